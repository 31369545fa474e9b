"""Operations (the typed steps of generated programs) as words, source and functions; and the values they act on.

In: `programs.yaml`. Out: the value types (`NUMBERS` and so on) and the operations; every lookup keeps the order of the
tables. `chain_operations()` returns the operations for levels 1 to 3, each an expression in one value; level 4 adds
`loops()` (with state), `list_pairs()` (two arguments) and `conditions()` (for branches).

`source` (for answers) and `apply` (for truth) define each operation twice, because source text is never executed
outside the sandbox. The tests execute `source` and compare it with `apply`.

`pool(kind)` returns the values of a type from which tests are drawn; `probes(kind)` returns 48 fixed values of the
type: two programs that agree on all of them are treated as equal. Both are the same on every machine and in every
Python version: `Draw` uses only `random.Random.random()`, whose sequence the Python documentation guarantees.

Not guaranteed: speed or idiomatic code (the sources are as regular as a very small model needs), or that a pool covers
its entire type (no word is longer than ten letters, and no number in a list is larger than 99).
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

from pipeline.synthetic.wording import table, word_list

NUMBERS = "numbers"
WORDS = "words"
TEXT = "text"
COUNTS = "counts"
NUMBER = "number"

# In every answer, a variable is named after its type.
ANNOTATIONS = {NUMBERS: "list[int]", WORDS: "list[str]", TEXT: "str", COUNTS: "dict[str, int]", NUMBER: "int"}

CONSTANTS = (2, 3, 4, 5, 6, 7, 8, 9)
Value = list[int] | list[str] | str | dict[str, int] | int  # of one of the types above


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A total function of one value (and possibly a constant): it never raises and never mutates its argument."""

    name: str
    takes: str  # one of the types above
    gives: str  # one of the types above
    source: str  # `{x}` is the value, `{k}` the constant; the last line is an expression, all others are statements
    apply: Callable[[Any, Any], Value]  # (value, constant or None) -> value
    phrasings: tuple[str, ...]  # imperatives with `{k}`; the last one is only for the test split
    bare: str | None  # the source without its default; raises on an empty value
    other: str | None  # the type of the second argument, if `{k}` is not a constant

    @property
    def has_constant(self) -> bool:
        """Whether the operation needs a constant (2-9)."""
        return self.other is None and "{k}" in self.source


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A test of a value, for an `if` statement."""

    name: str
    takes: str
    source: str
    holds: Callable[[Any, Any], bool]
    phrasings: tuple[str, ...]  # clauses that follow "if"; the last one is only for the test split

    @property
    def has_constant(self) -> bool:
        """Whether the condition needs a constant (2-9)."""
        return "{k}" in self.source


@cache
def chain_operations() -> tuple[Operation, ...]:
    """The operations for levels 1 to 3."""
    return _operations("chains")


@cache
def loops() -> tuple[Operation, ...]:
    """The loops that carry state."""
    return _operations("loops")


@cache
def list_pairs() -> tuple[Operation, ...]:
    """The operations on two lists."""
    return _operations("pairs")


@cache
def conditions() -> tuple[Condition, ...]:
    """The conditions of branches."""
    return tuple(_condition(name, **row) for name, row in table("programs.yaml")["conditions"].items())


def _operations(section: str) -> tuple[Operation, ...]:
    rows = []
    for types, group in table("programs.yaml")[section].items():
        takes, gives = types.split(" to ")
        other = takes if section == "pairs" else None
        rows += [_operation(name, takes, gives, other, **row) for name, row in group.items()]
    return tuple(rows)


def _operation(
    name: str, takes: str, gives: str, other: str | None, *, source: str, phrasings: str, bare: str | None = None
) -> Operation:
    return Operation(
        name=name,
        takes=takes,
        gives=gives,
        source=source,
        apply=FUNCTIONS[name],
        phrasings=tuple(phrasings.splitlines()),
        bare=bare,
        other=other,
    )


def _condition(name: str, *, takes: str, source: str, phrasings: str) -> Condition:
    return Condition(
        name=name, takes=takes, source=source, holds=FUNCTIONS[name], phrasings=tuple(phrasings.splitlines())
    )


@cache
def all_operations() -> tuple[Operation, ...]:
    """The operations for levels 1 to 4."""
    return (*chain_operations(), *loops(), *list_pairs())


@cache
def _operations_by_name() -> dict[str, Operation]:
    return {operation.name: operation for operation in all_operations()}


@cache
def _conditions_by_name() -> dict[str, Condition]:
    return {condition.name: condition for condition in conditions()}


def operation(name: str) -> Operation:
    """Look up an operation by name. Raises KeyError if it is unknown."""
    return _operations_by_name()[name]


def condition(name: str) -> Condition:
    """Look up a condition by name. Raises KeyError if it is unknown."""
    return _conditions_by_name()[name]


@cache
def taking(kind: str) -> tuple[Operation, ...]:
    """The chain operations that take a given type."""
    return tuple(operation for operation in chain_operations() if operation.takes == kind)


@cache
def alike(takes: str, gives: str) -> tuple[Operation, ...]:
    """The chain operations from one type to another."""
    return tuple(operation for operation in taking(takes) if operation.gives == gives)


# -- functions ---------------------------------------------------------------------------------------------------------


def _reset_totals(x: list[int], k: int) -> list[int]:
    total, result = 0, []
    for n in x:
        total = 0 if total > k else total + n
        result.append(total)
    return result


def _collapse(x: list[int], k: None) -> list[int]:
    return [n for i, n in enumerate(x) if i == 0 or n != x[i - 1]]


def _running_largest(x: list[int], k: None) -> list[int]:
    return [max(x[: i + 1]) for i in range(len(x))]


def _spaced(x: list[int], k: int) -> list[int]:
    result: list[int] = []
    for n in x:
        if not result or n >= result[-1] + k:
            result.append(n)
    return result


def _longest_run(x: list[int], k: None) -> int:
    run = best = 0
    for i, n in enumerate(x):
        run = run + 1 if i > 0 and n == x[i - 1] else 1
        best = max(best, run)
    return best


def _longest_rise(x: list[int], k: None) -> int:
    run = best = 0
    for i, n in enumerate(x):
        run = run + 1 if i > 0 and n > x[i - 1] else 1
        best = max(best, run)
    return best


def _best_sum(x: list[int], k: None) -> int:
    return max((sum(x[i:j]) for i in range(len(x)) for j in range(i, len(x) + 1)), default=0)


def _steps_past(x: list[int], k: int) -> int:
    total = steps = 0
    for n in x:
        if total > k:
            break
        total += n
        steps += 1
    return steps


def _run_lengths(x: str, k: None) -> str:
    result, run = "", 0
    for i, c in enumerate(x):
        run += 1
        if i + 1 == len(x) or x[i + 1] != c:
            result, run = result + c + str(run), 0
    return result


VOWELS = "aeiouAEIOU"

# The function of each operation and condition: (value, constant or second argument) -> value.
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, k: [n + k for n in x],
    "subtract": lambda x, k: [n - k for n in x],
    "multiply": lambda x, k: [n * k for n in x],
    "divide": lambda x, k: [n // k for n in x],
    "remainder": lambda x, k: [n % k for n in x],
    "square": lambda x, k: [n * n for n in x],
    "negate": lambda x, k: [-n for n in x],
    "absolute": lambda x, k: [abs(n) for n in x],
    "keep_even": lambda x, k: [n for n in x if n % 2 == 0],
    "keep_odd": lambda x, k: [n for n in x if n % 2 == 1],
    "keep_positive": lambda x, k: [n for n in x if n > 0],
    "keep_negative": lambda x, k: [n for n in x if n < 0],
    "keep_above": lambda x, k: [n for n in x if n > k],
    "keep_below": lambda x, k: [n for n in x if n < k],
    "keep_multiples": lambda x, k: [n for n in x if n % k == 0],
    "remove_value": lambda x, k: [n for n in x if n != k],
    "sort": lambda x, k: sorted(x),
    "sort_down": lambda x, k: sorted(x, reverse=True),
    "reverse": lambda x, k: x[::-1],
    "unique": lambda x, k: list(dict.fromkeys(x)),
    "first": lambda x, k: x[:k],
    "last": lambda x, k: x[-k:],
    "skip": lambda x, k: x[k:],
    "cut": lambda x, k: x[:-k],
    "every": lambda x, k: x[::k],
    "rotate": lambda x, k: x[k:] + x[:k],
    "cap": lambda x, k: [min(n, k) for n in x],
    "floor": lambda x, k: [max(n, k) for n in x],
    "running_sum": lambda x, k: [sum(x[: i + 1]) for i in range(len(x))],
    "differences": lambda x, k: [b - a for a, b in pairwise(x)],
    "times_index": lambda x, k: [i * n for i, n in enumerate(x)],
    "append": lambda x, k: [*x, k],
    "prepend": lambda x, k: [k, *x],
    "mirror": lambda x, k: x + x[::-1],
    "repeat_each": lambda x, k: [n for n in x for _ in range(k)],
    "from_largest": lambda x, k: [max(x) - n for n in x],
    "sum": lambda x, k: sum(x),
    "largest": lambda x, k: max(x, default=0),
    "smallest": lambda x, k: min(x, default=0),
    "length": lambda x, k: len(x),
    "count_even": lambda x, k: sum(1 for n in x if n % 2 == 0),
    "count_above": lambda x, k: sum(1 for n in x if n > k),
    "count_distinct": lambda x, k: len(set(x)),
    "spread": lambda x, k: max(x, default=0) - min(x, default=0),
    "average": lambda x, k: sum(x) // len(x) if x else 0,
    "alternating_sum": lambda x, k: sum(x[::2]) - sum(x[1::2]),
    "index_largest": lambda x, k: x.index(max(x)) if x else -1,
    "first_number": lambda x, k: x[0] if x else 0,
    "last_number": lambda x, k: x[-1] if x else 0,
    "to_words": lambda x, k: [str(n) for n in x],
    "join_numbers": lambda x, k: ",".join(str(n) for n in x),
    "plus": lambda x, k: x + k,
    "minus": lambda x, k: x - k,
    "times": lambda x, k: x * k,
    "quotient": lambda x, k: x // k,
    "modulo": lambda x, k: x % k,
    "squared": lambda x, k: x * x,
    "magnitude": lambda x, k: abs(x),
    "digit_sum": lambda x, k: sum(int(d) for d in str(abs(x))),
    "digits": lambda x, k: [int(d) for d in str(abs(x))],
    "multiples": lambda x, k: [x * i for i in range(1, k + 1)],
    "to_text": lambda x, k: str(x),
    "binary": lambda x, k: bin(abs(x))[2:],
    "upper_words": lambda x, k: [w.upper() for w in x],
    "reverse_words": lambda x, k: [w[::-1] for w in x],
    "sort_words": lambda x, k: sorted(x),
    "sort_length": lambda x, k: sorted(x, key=len),
    "reverse_list": lambda x, k: x[::-1],
    "longer_words": lambda x, k: [w for w in x if len(w) > k],
    "words_with_a": lambda x, k: [w for w in x if "a" in w],
    "unique_words": lambda x, k: list(dict.fromkeys(x)),
    "first_words": lambda x, k: x[:k],
    "skip_words": lambda x, k: x[k:],
    "shorten_words": lambda x, k: [w[:k] for w in x],
    "join_space": lambda x, k: " ".join(x),
    "join_dash": lambda x, k: "-".join(x),
    "longest_word": lambda x, k: max(x, key=len, default=""),
    "shortest_word": lambda x, k: min(x, key=len, default=""),
    "initials": lambda x, k: "".join(w[:1] for w in x),
    "word_lengths": lambda x, k: [len(w) for w in x],
    "word_total": lambda x, k: len(x),
    "count_longer": lambda x, k: sum(1 for w in x if len(w) > k),
    "count_words": lambda x, k: {w: x.count(w) for w in x},
    "upper": lambda x, k: x.upper(),
    "lower": lambda x, k: x.lower(),
    "swap_case": lambda x, k: x.swapcase(),
    "backwards": lambda x, k: x[::-1],
    "drop_vowels": lambda x, k: "".join(c for c in x if c not in VOWELS),
    "drop_spaces": lambda x, k: x.replace(" ", ""),
    "dash_spaces": lambda x, k: x.replace(" ", "-"),
    "repeat_text": lambda x, k: x * k,
    "first_chars": lambda x, k: x[:k],
    "skip_chars": lambda x, k: x[k:],
    "double_chars": lambda x, k: "".join(c * 2 for c in x),
    "sort_chars": lambda x, k: "".join(sorted(x)),
    "unique_chars": lambda x, k: "".join(dict.fromkeys(x)),
    "reverse_order": lambda x, k: " ".join(x.split()[::-1]),
    "split": lambda x, k: x.split(),
    "chunks": lambda x, k: [x[i : i + k] for i in range(0, len(x), k)],
    "text_length": lambda x, k: len(x),
    "vowel_total": lambda x, k: sum(1 for c in x if c in VOWELS),
    "split_lengths": lambda x, k: [len(w) for w in x.split()],
    "char_codes": lambda x, k: [ord(c) for c in x],
    "count_chars": lambda x, k: {c: x.count(c) for c in x},
    "values": lambda x, k: list(x.values()),
    "sorted_keys": lambda x, k: sorted(x),
    "keys_above": lambda x, k: [w for w in x if x[w] > k],
    "keep_entries": lambda x, k: {w: n for w, n in x.items() if n > k},
    "add_values": lambda x, k: {w: n + k for w, n in x.items()},
    "sum_values": lambda x, k: sum(x.values()),
    "largest_value": lambda x, k: max(x.values(), default=0),
    "top_key": lambda x, k: max(x, key=x.get, default=""),
    "reset_totals": _reset_totals,
    "collapse": _collapse,
    "running_largest": _running_largest,
    "spaced": _spaced,
    "longest_run": _longest_run,
    "longest_rise": _longest_rise,
    "best_sum": _best_sum,
    "steps_past": _steps_past,
    "run_lengths": _run_lengths,
    "add_pairs": lambda x, k: [a + b for a, b in zip(x, k)],
    "multiply_pairs": lambda x, k: [a * b for a, b in zip(x, k)],
    "larger_pairs": lambda x, k: [max(a, b) for a, b in zip(x, k)],
    "shared": lambda x, k: [n for n in x if n in k],
    "without": lambda x, k: [n for n in x if n not in k],
    "concatenate": lambda x, k: x + k,
    "shared_words": lambda x, k: [w for w in x if w in k],
    "without_words": lambda x, k: [w for w in x if w not in k],
    "if_longer": lambda x, k: len(x) > k,
    "if_sum_above": lambda x, k: sum(x) > k,
    "if_contains": lambda x, k: k in x,
    "if_more_words": lambda x, k: len(x) > k,
    "if_long_text": lambda x, k: len(x) > k,
    "if_space": lambda x, k: " " in x,
    "if_above": lambda x, k: x > k,
    "if_even": lambda x, k: x % 2 == 0,
}


# -- values and random draws -------------------------------------------------------------------------------------------

Item = TypeVar("Item")


class Draw:
    """A random generator whose draws are a pure function of the parts of its seed."""

    def __init__(self, *parts: int | str) -> None:
        digest = hashlib.blake2b("|".join(str(part) for part in parts).encode(), digest_size=8).digest()
        self._random = random.Random(int.from_bytes(digest, "big")).random

    def below(self, limit: int) -> int:
        """An integer from 0 to limit - 1."""
        return int(self._random() * limit)

    def between(self, low: int, high: int) -> int:
        """An integer from low to high, inclusive."""
        return low + int(self._random() * (high - low + 1))

    def pick(self, items: Sequence[Item]) -> Item:
        """A random item."""
        return items[int(self._random() * len(items))]

    def chance(self, share: float) -> bool:
        """True with probability `share`."""
        return self._random() < share

    def sample(self, items: Sequence[Item], count: int) -> list[Item]:
        """Up to `count` items in random order, drawn without replacement."""
        shuffled = list(items)
        for i in range(min(count, len(shuffled))):
            j = i + int(self._random() * (len(shuffled) - i))
            shuffled[i], shuffled[j] = shuffled[j], shuffled[i]
        return shuffled[:count]


@dataclass(frozen=True)
class ValuePool:
    """Values of one type. They can be shared, because operations are pure and do not mutate them."""

    edges: tuple[tuple[Value, ...], ...]  # one tuple per kind of edge case: empty, one, negative, repeated, long
    short: tuple[Value, ...]  # for visible tests: a few tokens each
    plain: tuple[Value, ...]  # for hidden tests


@cache
def pool(kind: str) -> ValuePool:
    """The values of a type, built once. Raises KeyError for an unknown type."""
    build = {NUMBERS: _numbers, WORDS: _words, TEXT: _texts, COUNTS: _counts, NUMBER: _number}[kind]
    return build(Draw("pool", kind))


@cache
def probes(kind: str) -> tuple[Value, ...]:
    """48 fixed values: up to two of each kind of edge case, the rest plain."""
    values = pool(kind)
    edges = [value for group in values.edges for value in group[:2]]
    return tuple([*edges, *values.plain][:48])


def _list_of(draw: Draw, low: int, high: int, count: int) -> list[int]:
    return [draw.between(low, high) for _ in range(count)]


def _numbers(draw: Draw) -> ValuePool:
    single = tuple([n] for n in (7, 4, -3, 0, 12, 9))
    negative = tuple(_list_of(draw, -30, -1, draw.between(3, 7)) for _ in range(8))
    repeated = tuple([draw.between(-4, 9)] * draw.between(3, 5) + _list_of(draw, 0, 5, 3) for _ in range(8))
    long = tuple(_list_of(draw, -20, 40, draw.between(12, 16)) for _ in range(10))
    # Small numbers in `short`, because each digit is a token and constants are 2-9.
    short = [_list_of(draw, -5, 14, draw.between(3, 5)) for _ in range(60)]
    short += [draw.sample(_list_of(draw, 1, 9, 3) * 2, 5) for _ in range(20)]
    plain = [_list_of(draw, -12, 30, draw.between(2, 11)) for _ in range(80)]
    plain += [_list_of(draw, -3, 10, draw.between(4, 11)) for _ in range(60)]
    plain += [draw.sample(_list_of(draw, -9, 99, 4) * 2, draw.between(5, 8)) for _ in range(20)]
    return ValuePool((([],), single, negative, repeated, long), tuple(short), tuple(draw.sample(plain, len(plain))))


def _noun(draw: Draw) -> str:
    return draw.pick(word_list("programs.yaml", "nouns"))


def _cased(draw: Draw, word: str) -> str:
    return draw.pick((word, word, word, word.capitalize(), word.upper()))


def _words(draw: Draw) -> ValuePool:
    def some(low: int, high: int) -> list[str]:
        return [_cased(draw, _noun(draw)) for _ in range(draw.between(low, high))]

    single = tuple([word] for word in ("sun", "Apple", "a", "WATER", "moon"))
    # Lists with empty strings take the place that negative numbers have in other types.
    hollow = tuple(["", *some(1, 4), ""] for _ in range(4))
    repeated = tuple([_noun(draw)] * draw.between(2, 4) + some(1, 3) for _ in range(8))
    long = tuple(some(11, 14) for _ in range(8))
    short = [[_noun(draw) for _ in range(draw.between(2, 4))] for _ in range(60)]
    short += [draw.sample([_noun(draw), _noun(draw)] * 2, 3) for _ in range(20)]
    plain = [some(2, 9) for _ in range(110)] + [draw.sample(some(3, 4) * 2, 6) for _ in range(40)]
    return ValuePool((([],), single, hollow, repeated, long), tuple(short), tuple(draw.sample(plain, len(plain))))


def _texts(draw: Draw) -> ValuePool:
    def some(low: int, high: int) -> str:
        return " ".join(_cased(draw, _noun(draw)) for _ in range(draw.between(low, high)))

    single = ("x", "A", "7", " ", "e")
    # Strings with odd spaces or without letters take the place that negative numbers have in other types.
    odd = ("  two  spaces ", "...", "12 34", "a-b_c", "Tab\there", "END.")
    repeated = ("aaaa", "abab abab", "zzz ZZZ", "go go go", "mississippi", "oooh no")
    long = tuple(some(9, 12) for _ in range(8))
    short = [" ".join(_noun(draw) for _ in range(draw.between(1, 3))) for _ in range(60)]
    short += [some(1, 3) for _ in range(30)]
    plain = [some(1, 6) for _ in range(130)] + [some(2, 3) + draw.pick(("!", "?", "..", " 42")) for _ in range(20)]
    return ValuePool((("",), single, odd, repeated, long), tuple(short), tuple(draw.sample(plain, len(plain))))


def _counts(draw: Draw) -> ValuePool:
    def some(low: int, high: int, least: int, most: int) -> dict[str, int]:
        words = draw.sample(word_list("programs.yaml", "nouns"), draw.between(low, high))
        return {word: draw.between(least, most) for word in words}

    single = tuple({word: n} for word, n in (("sun", 5), ("a", 1), ("key", 9), ("Sky", 3)))
    negative = tuple(some(2, 5, -9, -1) for _ in range(6))
    repeated = tuple(some(3, 5, 4, 4) for _ in range(6))
    long = tuple(some(10, 12, -5, 30) for _ in range(6))
    short = [some(2, 3, 0, 12) for _ in range(80)]
    plain = [some(2, 7, -4, 20) for _ in range(100)] + [some(3, 6, 0, 10) for _ in range(50)]
    return ValuePool((({},), single, negative, repeated, long), tuple(short), tuple(draw.sample(plain, len(plain))))


def _number(draw: Draw) -> ValuePool:
    negative = tuple(draw.between(-99, -2) for _ in range(8))
    repeated = (11, 77, 333, 5555, 1001, 2020)
    long = tuple(draw.between(10_000, 999_999) for _ in range(8))
    plain = [draw.between(2, 99) for _ in range(80)] + [draw.between(100, 999) for _ in range(50)]
    plain += [draw.between(-500, -1) for _ in range(20)]
    plain = list(dict.fromkeys(plain))
    short = tuple(range(2, 60))
    return ValuePool(((0,), (1, -1), negative, repeated, long), short, tuple(draw.sample(plain, len(plain))))
