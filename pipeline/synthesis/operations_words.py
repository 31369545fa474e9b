"""The operations on list[str], str and dict[str, int]: name, types, source, function, phrasings (the last for test).

In: nothing. Out: `WORDS_TO_OTHERS`, `TEXT_TO_OTHERS`, `COUNTS_TO_OTHERS`. See `operation.py` for the columns.
"""

from pipeline.synthesis.operation import COUNTS, NUMBER, NUMBERS, TEXT, WORDS, Operation, op

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
