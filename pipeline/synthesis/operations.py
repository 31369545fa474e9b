"""All operations of the chains, by name and by type.

In: the tables of `operations_numbers.py`, `operations_words.py` and `operations_state.py`. Out: look-ups, built once on
first use. The order of every tuple is the order of the tables.
"""

from functools import cache

from pipeline.synthesis.operation import Operation
from pipeline.synthesis.operations_numbers import NUMBER_TO_OTHERS, NUMBERS_TO_NUMBERS, NUMBERS_TO_OTHERS
from pipeline.synthesis.operations_state import CONDITIONS, LOOPS, PAIRS, Condition
from pipeline.synthesis.operations_words import COUNTS_TO_OTHERS, TEXT_TO_OTHERS, WORDS_TO_OTHERS


@cache
def chain_operations() -> tuple[Operation, ...]:
    """The operations of levels 1 to 3: each an expression of one value."""
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
    return tuple(one for one in chain_operations() if one.takes == kind)


@cache
def alike(takes: str, gives: str) -> tuple[Operation, ...]:
    """The chain operations from one type to another."""
    return tuple(one for one in chain_operations() if (one.takes, one.gives) == (takes, gives))
