"""What an operation is: one typed step of a generated program, as words, as Python source, and as a function.

In: nothing. Out: the types of values (`NUMBERS` and so on), `Operation`, and `op`, which the tables
`operations_numbers.py`, `operations_words.py` and `operations_state.py` are written with.

`source` (for answers) and `apply` (for truth) say the same thing twice, because nothing outside the sandbox executes
text. The tests execute the one and compare it with the other. It does not promise speed or idiom beyond that: the
sources are as regular as a very small model needs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NUMBERS = "numbers"
WORDS = "words"
TEXT = "text"
COUNTS = "counts"
NUMBER = "number"

# Each type's name is also the variable that holds a value of it, in every answer.
ANNOTATIONS = {
    NUMBERS: "list[int]",
    WORDS: "list[str]",
    TEXT: "str",
    COUNTS: "dict[str, int]",
    NUMBER: "int",
}

CONSTANTS = (2, 3, 4, 5, 6, 7, 8, 9)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A total function of one value (and a constant): it never raises and never changes its argument."""

    name: str
    takes: str  # a type above
    gives: str  # a type above
    source: str  # `{x}` is the value, `{k}` the constant; all lines but the last are statements, the last an expression
    apply: Callable[[Any, Any], Any]  # (value, constant or None) -> value
    phrasings: tuple[str, ...]  # imperatives with `{k}`; the last one is kept for the test split
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
    apply: Callable[[Any, Any], Any],
    phrasings: str,
    *,
    bare: str | None = None,
    other: str | None = None,
) -> Operation:
    """An operation whose phrasings are written in one string, separated by ` | `."""
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
