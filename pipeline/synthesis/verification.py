"""Tests for a generated program: inputs that show what it does and catch programs that do nearly the same.

In: a `Program` and a `Draw`. Out: records of the form `{"args", "expected", "visible"}`, 3 visible and 12 to 24 hidden,
or None where its constants make it dull and another draw is needed.

The hidden ones hold an input of each kind of edge (empty, one, negative, repeated, long). 16 programs one operation
away that differ from it somewhere on the pool each fail a test. No expected value fills more than half of the tests.
It does not promise that a program two operations away fails.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from pipeline.synthesis.chains import Program
from pipeline.synthesis.drawing import neighbours
from pipeline.synthesis.inputs import Draw, pool
from pipeline.synthesis.operation import NUMBER

NUM_VISIBLE = 3
NUM_HIDDEN = 12
MAX_HIDDEN = 24
NUM_NEIGHBOURS = 16
MAX_NEIGHBOURS_TRIED = 64
NUM_SPARE = 32  # inputs on which a neighbour that passes so far is tried again
MAX_VISIBLE_LENGTH = 42  # characters of an expected value in the question
MAX_LENGTH = 400  # characters of an expected value anywhere


@dataclass(frozen=True)
class Case:
    """One test before it is written down; `expected` is text, since 1 == True and 0.0 == 0."""

    arguments: tuple[Any, ...]
    expected: str


def tests(program: Program, draw: Draw) -> list[dict[str, Any]] | None:
    """The program's tests, visible ones first; None if no balanced set was found."""
    visible = visible_cases(program, draw)
    if visible is None:
        return None
    hidden = _hidden_cases(program, draw, visible)
    if hidden is None:
        return None
    # Inputs on which a neighbour is told apart, looked for where the tests so far do not.
    hidden += _killers(program, draw, visible + hidden)
    cases = visible + hidden
    if len(hidden) > MAX_HIDDEN or 2 * _most_common(cases)[1] > len(cases):
        return None
    return [
        {"args": repr(list(case.arguments)), "expected": case.expected, "visible": place < NUM_VISIBLE}
        for place, case in enumerate(cases)
    ]


def visible_cases(program: Program, draw: Draw, count: int = NUM_VISIBLE) -> list[Case] | None:
    """Short inputs with different short outputs, as a question or a docstring shows them; None if there are too few.

    At least one is not its own output: "keep the last 8 numbers" is not shown on lists of five.
    """
    found: list[Case] = []
    spare: list[Case] = []
    for value in draw.sample(pool(program.takes).short, 24):
        case = _case(program, value, draw)
        if len(case.expected) > MAX_VISIBLE_LENGTH or any(case.expected == other.expected for other in found + spare):
            continue
        # An input that comes back as it went in says little; it is taken only for want of others.
        (spare if case.expected == repr(value) else found).append(case)
        if len(found) == count:
            return found
    if not found or len(found) + len(spare) < count:
        return None
    return found + spare[: count - len(found)]


def _case(program: Program, value: Any, draw: Draw) -> Case:
    arguments = (value, _second(program.second, draw)) if program.second is not None else (value,)
    return Case(arguments, repr(program.run(arguments)))


def _second(kind: str | None, draw: Draw) -> Any:
    if kind == NUMBER:
        return draw.between(1, 9)
    return draw.pick(pool(kind or NUMBER).short)


def _hidden_cases(program: Program, draw: Draw, visible: list[Case]) -> list[Case] | None:
    values = pool(program.takes)
    edges = [_case(program, draw.pick(group), draw) for group in values.edges]
    found = list(edges)
    fresh = iter(draw.sample(values.plain, 60))
    for value in fresh:
        if len(found) == NUM_HIDDEN:
            break
        case = _case(program, value, draw)
        common, count = _most_common(visible + found)
        # Past a third, a value that is expected often already makes room for others.
        if case.expected != common or 3 * count < NUM_HIDDEN + NUM_VISIBLE:
            found.append(case)
    if len(found) < NUM_HIDDEN or any(len(case.expected) > MAX_LENGTH for case in found):
        return None
    return found


def _killers(program: Program, draw: Draw, cases: list[Case]) -> list[Case]:
    """One more case for each of 16 differing neighbours that passes all cases so far."""
    added: list[Case] = []
    spare: list[Case] = []  # other inputs, run when the first neighbour passes all cases
    killed = tried = 0
    for neighbour in neighbours(program, draw):
        tried += 1
        if killed == NUM_NEIGHBOURS or tried > MAX_NEIGHBOURS_TRIED:
            return added
        if any(_tells(case, neighbour) for case in cases):
            killed += 1
            continue
        spare = spare or [_case(program, value, draw) for value in draw.sample(pool(program.takes).plain, NUM_SPARE)]
        found = next((case for case in spare if len(case.expected) <= MAX_LENGTH and _tells(case, neighbour)), None)
        if found is not None:
            added.append(found)
            cases = [*cases, found]
            killed += 1
    return added


def _tells(case: Case, neighbour: Program) -> bool:
    """Whether the neighbour fails the case."""
    return repr(neighbour.run(case.arguments)) != case.expected


def _most_common(cases: list[Case]) -> tuple[str, int]:
    return Counter(case.expected for case in cases).most_common(1)[0]
