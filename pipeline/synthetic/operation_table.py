"""All operations, by name and by type, and what level 4 adds to a chain: loops, second arguments and branches.

In: the tables of `operations.py`. Out: look-ups, built once on first use, with every tuple in the order of the tables;
`LOOPS` (loops that carry state) and `PAIRS` (operations on two arguments; in both `{k}` is as in `operations.py`), and
`CONDITIONS` for branches. A loop's source has statements before its last line, so its truth is a function below rather
than a lambda. None of these occurs in a chain of levels 1 to 3.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from pipeline.synthetic.operations import (
    COUNTS_TO_OTHERS,
    NUMBER,
    NUMBER_TO_OTHERS,
    NUMBERS,
    NUMBERS_TO_NUMBERS,
    NUMBERS_TO_OTHERS,
    TEXT,
    TEXT_TO_OTHERS,
    WORDS,
    WORDS_TO_OTHERS,
    Operation,
    op,
)


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A test of a value, for `if`."""

    name: str
    takes: str
    source: str
    holds: Callable[[Any, Any], bool]
    phrasings: tuple[str, ...]  # clauses that follow "if"; the last one is only for the test split

    @property
    def has_constant(self) -> bool:
        """Whether the condition needs a constant (2-9)."""
        return "{k}" in self.source


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


# fmt: off
LOOPS: tuple[Operation, ...] = (
    op("reset_totals", NUMBERS, NUMBERS,
       "total = 0\nresult = []\nfor n in {x}:\n    total = 0 if total > {k} else total + n\n    result.append(total)\n"
       "result", _reset_totals,
       "list the running totals, but start again at 0 instead of adding whenever the total is above {k}"
       " | accumulate the numbers, setting the total to 0 in place of adding when it exceeds {k}"
       " | compute running sums that restart from 0 for one step once they are over {k}"
       " | total as you go, with a step back to zero after passing {k}"),
    op("collapse", NUMBERS, NUMBERS,
       "result = []\nfor n in {x}:\n    if not result or n != result[-1]:\n        result.append(n)\nresult", _collapse,
       "collapse runs of equal numbers into one | drop each number equal to the one just before it"
       " | keep one number of every run of equal neighbours | squeeze repeats that stand side by side"),
    op("running_largest", NUMBERS, NUMBERS,
       "result = []\nfor n in {x}:\n    result.append(max(n, result[-1]) if result else n)\nresult", _running_largest,
       "list the running maximum | replace each number by the largest so far"
       " | compute the greatest number up to each position | track the record as you go"),
    op("spaced", NUMBERS, NUMBERS,
       "result = []\nfor n in {x}:\n    if not result or n >= result[-1] + {k}:\n        result.append(n)\nresult",
       _spaced,
       "keep each number that is at least {k} more than the last one kept"
       " | take the first number and then every number {k} or more above the last taken"
       " | skip numbers less than {k} above the previous kept number | climb through the list by steps of {k} or more"),
    op("longest_run", NUMBERS, NUMBER,
       "best = run = 0\nlast = None\nfor n in {x}:\n    run = run + 1 if n == last else 1\n    last = n\n"
       "    best = max(best, run)\nbest", _longest_run,
       "find the length of the longest run of equal numbers | find how often a number repeats in a row at most"
       " | count the numbers in the longest stretch of equal neighbours | measure the widest block of one value"),
    op("longest_rise", NUMBERS, NUMBER,
       "best = run = 0\nlast = None\nfor n in {x}:\n    run = run + 1 if last is not None and n > last else 1\n"
       "    last = n\n    best = max(best, run)\nbest", _longest_rise,
       "find the length of the longest rising run | find how many numbers rise in a row at most"
       " | count the numbers in the longest increasing stretch | measure the longest climb in the list"),
    op("best_sum", NUMBERS, NUMBER,
       "best = total = 0\nfor n in {x}:\n    total = max(total + n, 0)\n    best = max(best, total)\nbest", _best_sum,
       "find the largest sum of neighbouring numbers, or 0 | find the best total of a stretch of the list, or 0"
       " | compute the maximum sum of consecutive numbers, or 0 | give the richest slice's total, or 0"),
    op("steps_past", NUMBERS, NUMBER,
       "total = steps = 0\nfor n in {x}:\n    if total > {k}:\n        break\n    total += n\n    steps += 1\nsteps",
       _steps_past,
       "count how many numbers you add before the total is above {k}"
       " | add the numbers until the sum exceeds {k} and find how many were added"
       " | find the number of additions after which the total is over {k}"
       " | tell how soon the sum of the numbers passes {k}"),
    op("run_lengths", TEXT, TEXT,
       'result = ""\nrun = 0\nfor i, c in enumerate({x}):\n    run += 1\n    if {x}[i + 1:i + 2] != c:\n'
       "        result += c + str(run)\n        run = 0\nresult", _run_lengths,
       "write each run of equal characters as the character and its count"
       " | replace runs of a character by the character and the run length"
       " | run-length encode the text | compress repeats to a character and a number"),
)

PAIRS: tuple[Operation, ...] = (
    op("add_pairs", NUMBERS, NUMBERS, "[a + b for a, b in zip({x}, {k})]",
       lambda x, k: [a + b for a, b in zip(x, k)],
       "add the numbers of both lists in pairs | sum the two lists position by position"
       " | add each number to its partner in others | total the lists side by side", other=NUMBERS),
    op("multiply_pairs", NUMBERS, NUMBERS, "[a * b for a, b in zip({x}, {k})]",
       lambda x, k: [a * b for a, b in zip(x, k)],
       "multiply the numbers of both lists in pairs | multiply the two lists position by position"
       " | multiply each number by its partner in others | take products side by side", other=NUMBERS),
    op("larger_pairs", NUMBERS, NUMBERS, "[max(a, b) for a, b in zip({x}, {k})]",
       lambda x, k: [max(a, b) for a, b in zip(x, k)],
       "take the larger number of each pair from both lists | keep the maximum of the lists at each position"
       " | replace each number by the larger of it and its partner in others | pick the winner side by side",
       other=NUMBERS),
    op("shared", NUMBERS, NUMBERS, "[n for n in {x} if n in {k}]", lambda x, k: [n for n in x if n in k],
       "keep the numbers that are in others | keep only numbers that both lists have"
       " | remove numbers that others lacks | filter for what others holds too", other=NUMBERS),
    op("without", NUMBERS, NUMBERS, "[n for n in {x} if n not in {k}]", lambda x, k: [n for n in x if n not in k],
       "remove the numbers that are in others | keep only numbers that others lacks"
       " | drop every number found in the second list | filter out what others holds", other=NUMBERS),
    op("concatenate", NUMBERS, NUMBERS, "{x} + {k}", lambda x, k: x + k,
       "append others to the numbers | join the two lists | put the second list behind the first"
       " | chain both lists together", other=NUMBERS),
    op("shared_words", WORDS, WORDS, "[w for w in {x} if w in {k}]", lambda x, k: [w for w in x if w in k],
       "keep the words that are in others | keep only words that both lists have"
       " | remove words that others lacks | filter for words others holds too", other=WORDS),
    op("without_words", WORDS, WORDS, "[w for w in {x} if w not in {k}]", lambda x, k: [w for w in x if w not in k],
       "remove the words that are in others | keep only words that others lacks"
       " | drop every word found in the second list | filter out words others holds", other=WORDS),
)


def _condition(name: str, takes: str, source: str, holds: Callable[[Any, Any], bool], phrasings: str) -> Condition:
    return Condition(name=name, takes=takes, source=source, holds=holds, phrasings=tuple(phrasings.split(" | ")))


CONDITIONS: tuple[Condition, ...] = (
    _condition("if_longer", NUMBERS, "len({x}) > {k}", lambda x, k: len(x) > k,
               "there are more than {k} numbers | the list is longer than {k} | the list has over {k} numbers"
               " | the size of the list exceeds {k}"),
    _condition("if_sum_above", NUMBERS, "sum({x}) > {k}", lambda x, k: sum(x) > k,
               "the sum is above {k} | the numbers add up to more than {k} | the total is greater than {k}"
               " | what the numbers come to exceeds {k}"),
    _condition("if_contains", NUMBERS, "{k} in {x}", lambda x, k: k in x,
               "the list contains {k} | {k} is in the list | one number is {k} | {k} occurs"),
    _condition("if_more_words", WORDS, "len({x}) > {k}", lambda x, k: len(x) > k,
               "there are more than {k} words | the list is longer than {k} | the list has over {k} words"
               " | the size of the list exceeds {k}"),
    _condition("if_long_text", TEXT, "len({x}) > {k}", lambda x, k: len(x) > k,
               "the text is longer than {k} | there are more than {k} characters | the string has over {k} characters"
               " | the size of the text exceeds {k}"),
    _condition("if_space", TEXT, '" " in {x}', lambda x, k: " " in x,
               "the text contains a space | there is a space in the string | one character is a space"
               " | a space occurs"),
    _condition("if_above", NUMBER, "{x} > {k}", lambda x, k: x > k,
               "the number is above {k} | the result is greater than {k} | the number is more than {k}"
               " | the number exceeds {k}"),
    _condition("if_even", NUMBER, "{x} % 2 == 0", lambda x, k: x % 2 == 0,
               "the number is even | the result is divisible by 2 | 2 divides the number | there is no odd bit"),
)
# fmt: on


# -- look-ups ----------------------------------------------------------------------------------------------------------


@cache
def chain_operations() -> tuple[Operation, ...]:
    """The operations of levels 1 to 3: each is an expression of one value."""
    return (
        *NUMBERS_TO_NUMBERS,
        *NUMBERS_TO_OTHERS,
        *NUMBER_TO_OTHERS,
        *WORDS_TO_OTHERS,
        *TEXT_TO_OTHERS,
        *COUNTS_TO_OTHERS,
    )


@cache
def all_operations() -> tuple[Operation, ...]:
    """The operations of levels 1 to 4."""
    return (*chain_operations(), *LOOPS, *PAIRS)


@cache
def _by_name() -> dict[str, Operation]:
    return {operation.name: operation for operation in all_operations()}


@cache
def _conditions_by_name() -> dict[str, Condition]:
    return {condition.name: condition for condition in CONDITIONS}


def operation(name: str) -> Operation:
    """The operation of that name. Raises KeyError."""
    return _by_name()[name]


def condition(name: str) -> Condition:
    """The condition of that name. Raises KeyError."""
    return _conditions_by_name()[name]


@cache
def taking(kind: str) -> tuple[Operation, ...]:
    """The chain operations on values of a type."""
    return tuple(operation for operation in chain_operations() if operation.takes == kind)


@cache
def alike(takes: str, gives: str) -> tuple[Operation, ...]:
    """The chain operations from one type to another."""
    return tuple(operation for operation in chain_operations() if (operation.takes, operation.gives) == (takes, gives))
