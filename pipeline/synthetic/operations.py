"""The operations of levels 1 to 3: each a typed step of a generated program, as words, as source, and as a function.

In: nothing. Out: the types of values (`NUMBERS` and so on), `Operation`, `op`, and the tables of operations by type,
written with `op`: name, types, source, function, phrasings (the last one only for the test split).

`source` (for answers) and `apply` (for truth) define the same thing twice, because nothing outside of the sandbox
executes text. The tests execute the one and compare it with the other. Not promised: speed or idiomatic code; the
sources are as regular as a very small model needs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

NUMBERS = "numbers"
WORDS = "words"
TEXT = "text"
COUNTS = "counts"
NUMBER = "number"

# Each type's name is also the variable that holds a value of it, in every answer.
ANNOTATIONS = {NUMBERS: "list[int]", WORDS: "list[str]", TEXT: "str", COUNTS: "dict[str, int]", NUMBER: "int"}

CONSTANTS = (2, 3, 4, 5, 6, 7, 8, 9)
Value = list[int] | list[str] | str | dict[str, int] | int  # of one of the types above


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A total function of one value (and a constant): it never raises and never changes its argument."""

    name: str
    takes: str  # a type above
    gives: str  # a type above
    source: str  # `{x}` is the value, `{k}` the constant; all lines are statements but the last, an expression
    apply: Callable[[Any, Any], Value]  # (value, constant or None) -> value
    phrasings: tuple[str, ...]  # imperatives with `{k}`; the last one is only for the test split
    bare: str | None = None  # the source without its default, which raises on an empty value
    other: str | None = None  # the type of the second argument, where `{k}` is not a constant

    @property
    def has_constant(self) -> bool:
        """Whether the operation needs a constant (2-9)."""
        return self.other is None and "{k}" in self.source


def op(
    name: str,
    takes: str,
    gives: str,
    source: str,
    apply: Callable[[Any, Any], Value],
    phrasings: str,
    *,
    bare: str | None = None,
    other: str | None = None,
) -> Operation:
    """An operation, with its phrasings in one string separated by ` | `."""
    return Operation(
        name=name,
        takes=takes,
        gives=gives,
        source=source,
        apply=apply,
        phrasings=tuple(phrasings.split(" | ")),
        bare=bare,
        other=other,
    )


# -- on list[str], str and dict[str, int] ------------------------------------------------------------------------------


VOWELS = "aeiouAEIOU"

# fmt: off
WORDS_TO_OTHERS: tuple[Operation, ...] = (
    op("upper_words", WORDS, WORDS, "[w.upper() for w in {x}]", lambda x, k: [w.upper() for w in x],
       "write each word in upper case | convert every word to capitals | make all words upper case"
       " | capitalise all letters of each word"),
    op("reverse_words", WORDS, WORDS, "[w[::-1] for w in {x}]", lambda x, k: [w[::-1] for w in x],
       "reverse each word | spell every word backwards | turn the letters of each word around"
       " | write each word from its end"),
    op("sort_words", WORDS, WORDS, "sorted({x})", lambda x, k: sorted(x),
       "sort the words | put the words in string order | order the words by their characters"
       " | arrange the words as strings"),
    op("sort_length", WORDS, WORDS, "sorted({x}, key=len)", lambda x, k: sorted(x, key=len),
       "sort the words by length | order the words from short to long | put shorter words first"
       " | arrange the words by how long they are"),
    op("reverse_list", WORDS, WORDS, "{x}[::-1]", lambda x, k: x[::-1],
       "reverse the list of words | turn the list of words around | put the words in reverse order"
       " | list the words from last to first"),
    op("longer_words", WORDS, WORDS, "[w for w in {x} if len(w) > {k}]", lambda x, k: [w for w in x if len(w) > k],
       "keep words longer than {k} letters | keep only words with more than {k} letters"
       " | remove words of up to {k} letters | filter for words whose length exceeds {k}"),
    op("words_with_a", WORDS, WORDS, '[w for w in {x} if "a" in w]', lambda x, k: [w for w in x if "a" in w],
       'keep words that contain "a" | keep only words with an "a" | remove words without "a"'
       ' | filter for words that have "a" in them'),
    op("unique_words", WORDS, WORDS, "list(dict.fromkeys({x}))", lambda x, k: list(dict.fromkeys(x)),
       "remove repeated words | drop duplicate words | keep the first of equal words"
       " | leave each word in only once"),
    op("first_words", WORDS, WORDS, "{x}[:{k}]", lambda x, k: x[:k],
       "keep the first {k} words | take {k} words from the start | cut the list after {k} words"
       " | keep the leading {k} words"),
    op("skip_words", WORDS, WORDS, "{x}[{k}:]", lambda x, k: x[k:],
       "drop the first {k} words | skip {k} words at the start | remove {k} words from the front"
       " | leave out the leading {k} words"),
    op("shorten_words", WORDS, WORDS, "[w[:{k}] for w in {x}]", lambda x, k: [w[:k] for w in x],
       "cut each word to its first {k} letters | shorten every word to {k} letters"
       " | keep {k} letters of each word | trim the words after letter {k}"),
    op("join_space", WORDS, TEXT, '" ".join({x})', lambda x, k: " ".join(x),
       "join the words with spaces | build a string of the words with spaces between"
       " | write the words in one string separated by spaces | put the words together into a sentence"),
    op("join_dash", WORDS, TEXT, '"-".join({x})', lambda x, k: "-".join(x),
       "join the words with dashes | build a string of the words with dashes between"
       " | write the words in one string separated by dashes | link the words by hyphens"),
    op("longest_word", WORDS, TEXT, 'max({x}, key=len, default="")', lambda x, k: max(x, key=len, default=""),
       'find the longest word, or "" | find the first word of greatest length, or ""'
       ' | take the word with most letters, or "" | give the word that is longest, or ""',
       bare="max({x}, key=len)"),
    op("shortest_word", WORDS, TEXT, 'min({x}, key=len, default="")', lambda x, k: min(x, key=len, default=""),
       'find the shortest word, or "" | find the first word of least length, or ""'
       ' | take the word with fewest letters, or "" | give the word that is shortest, or ""',
       bare="min({x}, key=len)"),
    op("initials", WORDS, TEXT, '"".join(w[:1] for w in {x})', lambda x, k: "".join(w[:1] for w in x),
       "join the first letters of the words | build a string of the initials"
       " | write the first letter of each word in one string | make an acronym of the words"),
    op("word_lengths", WORDS, NUMBERS, "[len(w) for w in {x}]", lambda x, k: [len(w) for w in x],
       "list the lengths of the words | replace each word by its length | count the letters of every word"
       " | find how long each word is"),
    op("word_total", WORDS, NUMBER, "len({x})", lambda x, k: len(x),
       "count the words in the list | find how many words there are | find the number of words"
       " | tell the size of the word list"),
    op("count_longer", WORDS, NUMBER, "sum(1 for w in {x} if len(w) > {k})",
       lambda x, k: sum(1 for w in x if len(w) > k),
       "count words longer than {k} letters | find how many words have more than {k} letters"
       " | find the number of words over {k} letters | tell how many word lengths exceed {k}"),
    op("count_words", WORDS, COUNTS, "{{w: {x}.count(w) for w in {x}}}", lambda x, k: {w: x.count(w) for w in x},
       "count how often each word occurs | map each word to its count | build a dict of word counts"
       " | tally the words"),
)

TEXT_TO_OTHERS: tuple[Operation, ...] = (
    op("upper", TEXT, TEXT, "{x}.upper()", lambda x, k: x.upper(),
       "write the text in upper case | convert the string to capitals | make the text upper case"
       " | capitalise all letters of the text"),
    op("lower", TEXT, TEXT, "{x}.lower()", lambda x, k: x.lower(),
       "write the text in lower case | convert the string to small letters | make the text lower case"
       " | take away all capitals"),
    op("swap_case", TEXT, TEXT, "{x}.swapcase()", lambda x, k: x.swapcase(),
       "swap upper and lower case | change the case of every letter | flip the case of the text"
       " | exchange capitals and small letters"),
    op("backwards", TEXT, TEXT, "{x}[::-1]", lambda x, k: x[::-1],
       "reverse the text | turn the string around | write the text backwards | read the text from its end"),
    op("drop_vowels", TEXT, TEXT, '"".join(c for c in {x} if c not in "aeiouAEIOU")',
       lambda x, k: "".join(c for c in x if c not in VOWELS),
       "remove the vowels | drop every vowel from the text | delete all vowels | leave only what is no vowel"),
    op("drop_spaces", TEXT, TEXT, '{x}.replace(" ", "")', lambda x, k: x.replace(" ", ""),
       "remove the spaces | drop every space from the text | delete all spaces | close up the gaps between words"),
    op("dash_spaces", TEXT, TEXT, '{x}.replace(" ", "-")', lambda x, k: x.replace(" ", "-"),
       "replace spaces by dashes | turn every space into a dash | write dashes for all spaces"
       " | use hyphens where spaces are"),
    op("repeat_text", TEXT, TEXT, "{x} * {k}", lambda x, k: x * k,
       "repeat the text {k} times | write the string {k} times in a row | join {k} copies of the text"
       " | have the text {k} times over"),
    op("first_chars", TEXT, TEXT, "{x}[:{k}]", lambda x, k: x[:k],
       "keep the first {k} characters | take {k} characters from the start | cut the text after {k} characters"
       " | keep the leading {k} characters"),
    op("skip_chars", TEXT, TEXT, "{x}[{k}:]", lambda x, k: x[k:],
       "drop the first {k} characters | skip {k} characters at the start | remove {k} characters from the front"
       " | leave out the leading {k} characters"),
    op("double_chars", TEXT, TEXT, '"".join(c * 2 for c in {x})', lambda x, k: "".join(c * 2 for c in x),
       "double each character | write every character twice | repeat each character two times"
       " | have all characters in pairs"),
    op("sort_chars", TEXT, TEXT, '"".join(sorted({x}))', lambda x, k: "".join(sorted(x)),
       "sort the characters | put the characters of the text in order | order the text by characters"
       " | arrange the characters of the string"),
    op("unique_chars", TEXT, TEXT, '"".join(dict.fromkeys({x}))', lambda x, k: "".join(dict.fromkeys(x)),
       "remove repeated characters | drop duplicate characters | keep the first of equal characters"
       " | leave each character in only once"),
    op("reverse_order", TEXT, TEXT, '" ".join({x}.split()[::-1])', lambda x, k: " ".join(x.split()[::-1]),
       "reverse the order of the words | put the words of the text in reverse order"
       " | write the text from its last word to its first | turn the word order around"),
    op("split", TEXT, WORDS, "{x}.split()", lambda x, k: x.split(),
       "split the text into words | list the words of the text | cut the string at its spaces"
       " | take the text apart into words"),
    op("chunks", TEXT, WORDS, "[{x}[i:i + {k}] for i in range(0, len({x}), {k})]",
       lambda x, k: [x[i : i + k] for i in range(0, len(x), k)],
       "cut the text into pieces of {k} characters | split the string every {k} characters"
       " | list the chunks of length {k} | break the text up after each {k} characters"),
    op("text_length", TEXT, NUMBER, "len({x})", lambda x, k: len(x),
       "count the characters | find the length of the text | find how long the string is"
       " | tell the size of the text"),
    op("vowel_total", TEXT, NUMBER, 'sum(1 for c in {x} if c in "aeiouAEIOU")',
       lambda x, k: sum(1 for c in x if c in VOWELS),
       "count the vowels | find how many vowels there are | find the number of vowels in the text"
       " | tell how often a vowel occurs"),
    op("split_lengths", TEXT, NUMBERS, "[len(w) for w in {x}.split()]", lambda x, k: [len(w) for w in x.split()],
       "list the lengths of the words in the text | split the text and count the letters of every word"
       " | find the word lengths of the string | find how long each word of the text is"),
    op("char_codes", TEXT, NUMBERS, "[ord(c) for c in {x}]", lambda x, k: [ord(c) for c in x],
       "list the character codes | replace each character by its code | find the ord of every character"
       " | give the code points of the text"),
    op("count_chars", TEXT, COUNTS, "{{c: {x}.count(c) for c in {x}}}", lambda x, k: {c: x.count(c) for c in x},
       "count how often each character occurs | map each character to its count | build a dict of character counts"
       " | tally the characters"),
)

COUNTS_TO_OTHERS: tuple[Operation, ...] = (
    op("values", COUNTS, NUMBERS, "list({x}.values())", lambda x, k: list(x.values()),
       "list the values of the dict | take the values as a list | find all dict values"
       " | give what the dict stores under its keys"),
    op("sorted_keys", COUNTS, WORDS, "sorted({x})", lambda x, k: sorted(x),
       "list the keys in order | find the sorted keys | sort the keys of the dict"
       " | give the ordered list of keys"),
    op("keys_above", COUNTS, WORDS, "[w for w in {x} if {x}[w] > {k}]", lambda x, k: [w for w in x if x[w] > k],
       "list the keys whose value is above {k} | find the keys with values greater than {k}"
       " | take the keys of all values over {k} | give the keys for which the value exceeds {k}"),
    op("keep_entries", COUNTS, COUNTS, "{{w: n for w, n in {x}.items() if n > {k}}}",
       lambda x, k: {w: n for w, n in x.items() if n > k},
       "keep the entries with a value above {k} | keep only values greater than {k} in the dict"
       " | remove entries with values up to {k} | filter the dict for values that exceed {k}"),
    op("add_values", COUNTS, COUNTS, "{{w: n + {k} for w, n in {x}.items()}}",
       lambda x, k: {w: n + k for w, n in x.items()},
       "add {k} to each value | increase every value of the dict by {k} | make all dict values {k} larger"
       " | raise each value by {k}"),
    op("sum_values", COUNTS, NUMBER, "sum({x}.values())", lambda x, k: sum(x.values()),
       "sum the values of the dict | add up all dict values | find the total of the values"
       " | find what the values come to"),
    op("largest_value", COUNTS, NUMBER, "max({x}.values(), default=0)", lambda x, k: max(x.values(), default=0),
       "find the largest value, or 0 | find the maximum of the dict values, or 0"
       " | take the greatest value, or 0 | give the biggest of the values, or 0", bare="max({x}.values())"),
    op("top_key", COUNTS, TEXT, 'max({x}, key={x}.get, default="")', lambda x, k: max(x, key=x.get, default=""),
       'find the key with the largest value, or "" | find the first key of greatest value, or ""'
       ' | take the key of the maximum, or "" | give the key that has the biggest value, or ""',
       bare="max({x}, key={x}.get)"),
)
# fmt: on


# -- on list[int] and int ----------------------------------------------------------------------------------------------


# fmt: off
NUMBERS_TO_NUMBERS: tuple[Operation, ...] = (
    op("add", NUMBERS, NUMBERS, "[n + {k} for n in {x}]", lambda x, k: [n + k for n in x],
       "add {k} to each number | increase every number by {k} | make all numbers {k} larger"
       " | raise each number by {k}"),
    op("subtract", NUMBERS, NUMBERS, "[n - {k} for n in {x}]", lambda x, k: [n - k for n in x],
       "subtract {k} from each number | decrease every number by {k} | make all numbers {k} smaller"
       " | lower each number by {k}"),
    op("multiply", NUMBERS, NUMBERS, "[n * {k} for n in {x}]", lambda x, k: [n * k for n in x],
       "multiply each number by {k} | scale every number by {k} | make all numbers {k} times as large"
       " | take each number {k} times"),
    op("divide", NUMBERS, NUMBERS, "[n // {k} for n in {x}]", lambda x, k: [n // k for n in x],
       "divide each number by {k}, rounding down | floor-divide every number by {k}"
       " | replace each number by its whole quotient by {k} | split each number by {k} and round down"),
    op("remainder", NUMBERS, NUMBERS, "[n % {k} for n in {x}]", lambda x, k: [n % k for n in x],
       "take each number modulo {k} | replace every number by its remainder by {k} | reduce all numbers modulo {k}"
       " | keep what remains of each number after division by {k}"),
    op("square", NUMBERS, NUMBERS, "[n * n for n in {x}]", lambda x, k: [n * n for n in x],
       "square each number | replace every number by its square | multiply each number by itself"
       " | raise all numbers to the second power"),
    op("negate", NUMBERS, NUMBERS, "[-n for n in {x}]", lambda x, k: [-n for n in x],
       "negate each number | flip the sign of every number | change the sign of all numbers"
       " | turn each number into its opposite"),
    op("absolute", NUMBERS, NUMBERS, "[abs(n) for n in {x}]", lambda x, k: [abs(n) for n in x],
       "take the absolute value of each number | drop the sign of every number | make all numbers non-negative by abs"
       " | replace each number by its magnitude"),
    op("keep_even", NUMBERS, NUMBERS, "[n for n in {x} if n % 2 == 0]", lambda x, k: [n for n in x if n % 2 == 0],
       "keep the even numbers | keep only numbers that are even | remove the odd numbers"
       " | filter out everything odd"),
    op("keep_odd", NUMBERS, NUMBERS, "[n for n in {x} if n % 2 == 1]", lambda x, k: [n for n in x if n % 2 == 1],
       "keep the odd numbers | keep only numbers that are odd | remove the even numbers"
       " | filter out everything even"),
    op("keep_positive", NUMBERS, NUMBERS, "[n for n in {x} if n > 0]", lambda x, k: [n for n in x if n > 0],
       "keep the positive numbers | keep only numbers above zero | remove zeros and negative numbers"
       " | filter for what is greater than zero"),
    op("keep_negative", NUMBERS, NUMBERS, "[n for n in {x} if n < 0]", lambda x, k: [n for n in x if n < 0],
       "keep the negative numbers | keep only numbers below zero | remove zeros and positive numbers"
       " | filter for what is less than zero"),
    op("keep_above", NUMBERS, NUMBERS, "[n for n in {x} if n > {k}]", lambda x, k: [n for n in x if n > k],
       "keep the numbers above {k} | keep only numbers greater than {k} | remove the numbers up to {k}"
       " | filter for what exceeds {k}"),
    op("keep_below", NUMBERS, NUMBERS, "[n for n in {x} if n < {k}]", lambda x, k: [n for n in x if n < k],
       "keep the numbers below {k} | keep only numbers less than {k} | remove the numbers from {k} up"
       " | filter for what is under {k}"),
    op("keep_multiples", NUMBERS, NUMBERS, "[n for n in {x} if n % {k} == 0]",
       lambda x, k: [n for n in x if n % k == 0],
       "keep the multiples of {k} | keep only numbers divisible by {k} | remove what {k} does not divide"
       " | filter for what {k} divides"),
    op("remove_value", NUMBERS, NUMBERS, "[n for n in {x} if n != {k}]", lambda x, k: [n for n in x if n != k],
       "remove every {k} | drop the numbers equal to {k} | keep the numbers other than {k} | delete each {k}"),
    op("sort", NUMBERS, NUMBERS, "sorted({x})", lambda x, k: sorted(x),
       "sort the numbers | put the numbers in ascending order | order the numbers from small to large"
       " | arrange the numbers by size"),
    op("sort_down", NUMBERS, NUMBERS, "sorted({x}, reverse=True)", lambda x, k: sorted(x, reverse=True),
       "sort the numbers in descending order | put the numbers in falling order"
       " | order the numbers from large to small | arrange the numbers with the biggest in front"),
    op("reverse", NUMBERS, NUMBERS, "{x}[::-1]", lambda x, k: x[::-1],
       "reverse the list of numbers | turn the list of numbers around | put the numbers in reverse order"
       " | read the numbers backwards"),
    op("unique", NUMBERS, NUMBERS, "list(dict.fromkeys({x}))", lambda x, k: list(dict.fromkeys(x)),
       "remove repeated numbers | drop duplicate numbers | keep the first of equal numbers"
       " | leave each number in only once"),
    op("first", NUMBERS, NUMBERS, "{x}[:{k}]", lambda x, k: x[:k],
       "keep the first {k} numbers | take {k} numbers from the start | cut the list after {k} numbers"
       " | keep the leading {k} numbers"),
    op("last", NUMBERS, NUMBERS, "{x}[-{k}:]", lambda x, k: x[-k:],
       "keep the last {k} numbers | take {k} numbers from the end | keep only the final {k} numbers"
       " | keep the trailing {k} numbers"),
    op("skip", NUMBERS, NUMBERS, "{x}[{k}:]", lambda x, k: x[k:],
       "drop the first {k} numbers | skip {k} numbers at the start | remove {k} numbers from the front"
       " | leave out the leading {k} numbers"),
    op("cut", NUMBERS, NUMBERS, "{x}[:-{k}]", lambda x, k: x[:-k],
       "drop the last {k} numbers | cut {k} numbers off the end | remove the final {k} numbers"
       " | leave out the trailing {k} numbers"),
    op("every", NUMBERS, NUMBERS, "{x}[::{k}]", lambda x, k: x[::k],
       "take every {k}th number from the first | keep the numbers at indices divisible by {k}"
       " | step through the numbers by {k} | pick numbers at a stride of {k}"),
    op("rotate", NUMBERS, NUMBERS, "{x}[{k}:] + {x}[:{k}]", lambda x, k: x[k:] + x[:k],
       "move the first {k} numbers to the end | rotate the numbers left by {k}"
       " | put the first {k} numbers behind the rest | shift the first {k} numbers to the back"),
    op("cap", NUMBERS, NUMBERS, "[min(n, {k}) for n in {x}]", lambda x, k: [min(n, k) for n in x],
       "cap each number at {k} | limit every number to at most {k} | replace numbers above {k} by {k}"
       " | let no number exceed {k}"),
    op("floor", NUMBERS, NUMBERS, "[max(n, {k}) for n in {x}]", lambda x, k: [max(n, k) for n in x],
       "raise each number to at least {k} | limit every number to at least {k} | replace numbers below {k} by {k}"
       " | let no number be under {k}"),
    op("running_sum", NUMBERS, NUMBERS, "[sum({x}[:i + 1]) for i in range(len({x}))]",
       lambda x, k: [sum(x[: i + 1]) for i in range(len(x))],
       "list the running totals | replace the numbers by their running sums | compute the cumulative sums"
       " | accumulate the numbers"),
    op("differences", NUMBERS, NUMBERS, "[b - a for a, b in zip({x}, {x}[1:])]",
       lambda x, k: [b - a for a, b in pairwise(x)],
       "list the differences between neighbours | subtract each number from the next"
       " | compute the steps between adjacent numbers | find how much each number grows to the next"),
    op("times_index", NUMBERS, NUMBERS, "[i * n for i, n in enumerate({x})]",
       lambda x, k: [i * n for i, n in enumerate(x)],
       "multiply each number by its index | scale every number by its position from 0"
       " | weight the numbers by their index | take each number as often as its index"),
    op("append", NUMBERS, NUMBERS, "{x} + [{k}]", lambda x, k: [*x, k],
       "append {k} to the list | add {k} at the end of the list | put one {k} behind the numbers"
       " | extend the list with {k}"),
    op("prepend", NUMBERS, NUMBERS, "[{k}] + {x}", lambda x, k: [k, *x],
       "prepend {k} to the list | add {k} at the start of the list | put one {k} before the numbers"
       " | begin the list with {k}"),
    op("mirror", NUMBERS, NUMBERS, "{x} + {x}[::-1]", lambda x, k: x + x[::-1],
       "append the reversed list to the list | mirror the list at its end | add the numbers again in reverse order"
       " | follow the list by its mirror image"),
    op("repeat_each", NUMBERS, NUMBERS, "[n for n in {x} for _ in range({k})]",
       lambda x, k: [n for n in x for _ in range(k)],
       "repeat each number {k} times | write every number {k} times in a row | put {k} copies of each number"
       " | have each number occur {k} times over"),
    op("from_largest", NUMBERS, NUMBERS, "[max({x}) - n for n in {x}]", lambda x, k: [max(x) - n for n in x],
       "subtract each number from the largest | list how far each number is below the largest"
       " | replace every number by its distance to the maximum | measure each number down from the top one"),
)

NUMBERS_TO_OTHERS: tuple[Operation, ...] = (
    op("sum", NUMBERS, NUMBER, "sum({x})", lambda x, k: sum(x),
       "sum the numbers | add up all numbers | find the total of the numbers | find what the numbers come to"),
    op("largest", NUMBERS, NUMBER, "max({x}, default=0)", lambda x, k: max(x, default=0),
       "find the largest number, or 0 | find the maximum, or 0 | take the greatest number, or 0"
       " | give the biggest of the numbers, or 0", bare="max({x})"),
    op("smallest", NUMBERS, NUMBER, "min({x}, default=0)", lambda x, k: min(x, default=0),
       "find the smallest number, or 0 | find the minimum, or 0 | take the least number, or 0"
       " | give the lowest of the numbers, or 0", bare="min({x})"),
    op("length", NUMBERS, NUMBER, "len({x})", lambda x, k: len(x),
       "count the numbers | find how many numbers there are | find the length of the list"
       " | give the size of the list"),
    op("count_even", NUMBERS, NUMBER, "sum(1 for n in {x} if n % 2 == 0)",
       lambda x, k: sum(1 for n in x if n % 2 == 0),
       "count the even numbers | find how many numbers are even | find the number of even values"
       " | tell how many values 2 divides"),
    op("count_above", NUMBERS, NUMBER, "sum(1 for n in {x} if n > {k})", lambda x, k: sum(1 for n in x if n > k),
       "count the numbers above {k} | find how many numbers are greater than {k}"
       " | find the number of values over {k} | tell how many values exceed {k}"),
    op("count_distinct", NUMBERS, NUMBER, "len(set({x}))", lambda x, k: len(set(x)),
       "count the distinct numbers | find how many different numbers there are"
       " | find the number of unique values | tell how many values there are without repeats"),
    op("spread", NUMBERS, NUMBER, "max({x}, default=0) - min({x}, default=0)",
       lambda x, k: max(x, default=0) - min(x, default=0),
       "find the largest minus the smallest number, or 0 | find the range from minimum to maximum, or 0"
       " | take the spread of the numbers, or 0 | give the distance between the extremes, or 0",
       bare="max({x}) - min({x})"),
    op("average", NUMBERS, NUMBER, "sum({x}) // len({x}) if {x} else 0", lambda x, k: sum(x) // len(x) if x else 0,
       "find the average rounded down, or 0 | find the whole mean, or 0 | take the floor of the mean, or 0"
       " | give the mean without its fraction, or 0", bare="sum({x}) // len({x})"),
    op("alternating_sum", NUMBERS, NUMBER, "sum({x}[::2]) - sum({x}[1::2])", lambda x, k: sum(x[::2]) - sum(x[1::2]),
       "find the alternating sum | add and subtract the numbers in turn"
       " | subtract the sum at odd indices from the sum at even indices | total the numbers with switching signs"),
    op("index_largest", NUMBERS, NUMBER, "{x}.index(max({x})) if {x} else -1",
       lambda x, k: x.index(max(x)) if x else -1,
       "find the index of the largest number, or -1 | find where the maximum first occurs, or -1"
       " | take the position of the greatest number, or -1 | locate the biggest of the numbers, or -1",
       bare="{x}.index(max({x}))"),
    op("first_number", NUMBERS, NUMBER, "{x}[0] if {x} else 0", lambda x, k: x[0] if x else 0,
       "find the first number, or 0 | take the number at the start, or 0 | find the number at index 0, or 0"
       " | give the leading number, or 0", bare="{x}[0]"),
    op("last_number", NUMBERS, NUMBER, "{x}[-1] if {x} else 0", lambda x, k: x[-1] if x else 0,
       "find the last number, or 0 | take the number at the end, or 0 | find the final number, or 0"
       " | give the trailing number, or 0", bare="{x}[-1]"),
    op("to_words", NUMBERS, WORDS, "[str(n) for n in {x}]", lambda x, k: [str(n) for n in x],
       "turn each number into a string | convert the numbers to strings | write every number as a string"
       " | make strings of the numbers"),
    op("join_numbers", NUMBERS, TEXT, '",".join(str(n) for n in {x})', lambda x, k: ",".join(str(n) for n in x),
       "join the numbers with commas | write the numbers in a string separated by commas"
       " | build a comma-separated string of the numbers | string the numbers together with commas"),
)

NUMBER_TO_OTHERS: tuple[Operation, ...] = (
    op("plus", NUMBER, NUMBER, "{x} + {k}", lambda x, k: x + k,
       "add {k} to the number | increase the result by {k} | make the number {k} larger | put {k} on top"),
    op("minus", NUMBER, NUMBER, "{x} - {k}", lambda x, k: x - k,
       "subtract {k} from the number | decrease the result by {k} | make the number {k} smaller | take {k} away"),
    op("times", NUMBER, NUMBER, "{x} * {k}", lambda x, k: x * k,
       "multiply the number by {k} | scale the result by {k} | find {k} times the number"
       " | take the number {k} times"),
    op("quotient", NUMBER, NUMBER, "{x} // {k}", lambda x, k: x // k,
       "divide the number by {k}, rounding down | floor-divide the result by {k}"
       " | find the whole quotient by {k} | split the number by {k} and round down"),
    op("modulo", NUMBER, NUMBER, "{x} % {k}", lambda x, k: x % k,
       "take the number modulo {k} | find the remainder by {k} | reduce the result modulo {k}"
       " | give what remains of the number after division by {k}"),
    op("squared", NUMBER, NUMBER, "{x} * {x}", lambda x, k: x * x,
       "square the number | multiply the number by itself | find the square of the result"
       " | raise the number to the second power"),
    op("magnitude", NUMBER, NUMBER, "abs({x})", lambda x, k: abs(x),
       "take the absolute value of the number | drop the sign of the result | find the abs of the number"
       " | give the magnitude of the number"),
    op("digit_sum", NUMBER, NUMBER, "sum(int(d) for d in str(abs({x})))",
       lambda x, k: sum(int(d) for d in str(abs(x))),
       "sum the digits of the number | add up the digits of the result | find the digit sum"
       " | total the digits in the number"),
    op("digits", NUMBER, NUMBERS, "[int(d) for d in str(abs({x}))]", lambda x, k: [int(d) for d in str(abs(x))],
       "list the digits of the number | split the number into digits | find the digits of the result as a list"
       " | take the number apart into its digits"),
    op("multiples", NUMBER, NUMBERS, "[{x} * i for i in range(1, {k} + 1)]",
       lambda x, k: [x * i for i in range(1, k + 1)],
       "list the first {k} multiples of the number | find the number times 1 to {k}"
       " | build a list of {k} multiples of the result | write out {k} steps of the times table"),
    op("to_text", NUMBER, TEXT, "str({x})", lambda x, k: str(x),
       "turn the number into a string | convert the result to a string | find the number as text"
       " | write the number out as a string"),
    op("binary", NUMBER, TEXT, "bin(abs({x}))[2:]", lambda x, k: bin(abs(x))[2:],
       "write the absolute value in binary | find the binary digits of the number"
       " | convert the number to base 2, without sign | give the number in base two"),
)
# fmt: on
