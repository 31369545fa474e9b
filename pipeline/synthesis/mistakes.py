"""Wrong answers to a generated problem, for preference pairs: each kind is a mistake that people make.

In: a `Problem` of `programs.py` (its id ends in its program). Out: (kind, source) pairs.

    other_operation  one step replaced by another of the same types, put in or left out
    off_by_one       a step sees its value less the first or the last item
    wrong_constant   another constant
    lost_default     the value for empty input is gone
    broken_syntax    a bracket, a colon or the indentation is missing

A mistake is an intention, not a verdict: one may pass all tests (the label comes from running them). Kinds that a
program has no room for are absent.
"""

import re
from dataclasses import replace

from pipeline.streams.records import Problem
from pipeline.synthesis.chains import Branch, Program, Step, parse
from pipeline.synthesis.drawing import neighbours
from pipeline.synthesis.inputs import Draw
from pipeline.synthesis.operation import COUNTS, NUMBER


def distractors(problem: Problem, seed: int) -> list[tuple[str, str]]:
    """Wrong sources of different text, at most two of a kind. Raises ValueError for a problem from elsewhere."""
    program = parse(problem.id.rpartition("-")[2])
    name, draw = problem.entry_point, Draw("mistake", seed, problem.id)
    right = program.source(name)
    found = [
        *(("other_operation", wrong.source(name)) for wrong in _other_operations(program, draw)),
        *(("off_by_one", source) for source in _off_by_one(program, name, draw)),
        *(("wrong_constant", wrong.source(name)) for wrong in _wrong_constants(program, draw)),
        *(("lost_default", source) for source in _lost_defaults(program, name)),
        *(("broken_syntax", source) for source in _broken(right, draw)),
    ]
    distinct: dict[str, str] = {}
    for kind, source in found:
        if source != right:
            distinct.setdefault(source, kind)
    return [(kind, source) for source, kind in distinct.items()]


def _other_operations(program: Program, draw: Draw) -> list[Program]:
    """Two neighbours with other names, or fewer where a program has hardly any."""
    found: list[Program] = []
    for tried, wrong in enumerate(neighbours(program, draw)):
        if len(found) == 2 or tried == 12:
            break
        if wrong.key != program.key and wrong.key not in [other.key for other in found]:
            found.append(wrong)
    return found


def _wrong_constants(program: Program, draw: Draw) -> list[Program]:
    found = []
    for place, step in enumerate(program.steps):
        if step.constant is not None:
            wrong = replace(step, constant=draw.pick([k for k in range(2, 10) if abs(k - step.constant) > 1]))
            found.append(Program((*program.steps[:place], wrong, *program.steps[place + 1 :])))
    return draw.sample(found, 1)


def _off_by_one(program: Program, name: str, draw: Draw) -> list[str]:
    """One step's value cut by one item where it is read first; a number is one too large or small."""
    places = [place for place, step in enumerate(program.steps) if isinstance(step, Step) and step.takes != COUNTS]
    if not places:
        return []
    place = draw.pick(places)
    step = program.steps[place]
    assert isinstance(step, Step)
    cut = draw.pick((" + 1", " - 1")) if step.takes == NUMBER else draw.pick(("[1:]", "[:-1]"))
    variable = f"({step.takes}{cut})" if step.takes == NUMBER else step.takes + cut
    source = step.operation.source.replace("{x}", variable, 1)
    return [_with_source(program, place, source).source(name)]


def _lost_defaults(program: Program, name: str) -> list[str]:
    return [
        _with_source(program, place, step.operation.bare).source(name)
        for place, step in enumerate(program.steps)
        if isinstance(step, Step) and step.operation.bare is not None
    ][:1]


def _with_source(program: Program, place: int, source: str) -> Program:
    """The program with one step's text changed; its function no longer fits it, so it is only written, never run."""
    step = program.steps[place]
    assert not isinstance(step, Branch)
    wrong = replace(step, operation=replace(step.operation, source=source))
    return Program((*program.steps[:place], wrong, *program.steps[place + 1 :]))


def _broken(source: str, draw: Draw) -> list[str]:
    """One damage that no parser accepts."""
    brackets = [match.start() for match in re.finditer(r"[()\[\]]", source)]
    hole = draw.pick(brackets)
    choices = (
        source[:hole] + source[hole + 1 :],
        source.replace(":\n", "\n", 1),
        source.replace("\n    ", "\n", 1),
        source.replace("return ", "return = ", 1),
    )
    return [draw.pick(choices)]
