"""Draws programs: chains of a given length, and what level 4 adds (branches, loops with state, two arguments).

In: a `Draw`, a split, a shape. Out: a `Program` whose key belongs to the split, with constants and phrasings chosen;
and its neighbours, the programs one operation away, which tests must tell from it.

Drawing starts from an operation chosen evenly and grows to both sides, so that rare types are as frequent as common
ones. It does not promise that the constants suit the chain: `verification.py` refuses those that give dull tests.
"""

from collections.abc import Iterator
from dataclasses import replace

from pipeline.synthesis import behaviour, operations
from pipeline.synthesis.behaviour import split_of
from pipeline.synthesis.chains import Branch, Program, Step
from pipeline.synthesis.inputs import Draw
from pipeline.synthesis.operation import CONSTANTS, NUMBER, NUMBERS, Operation
from pipeline.synthesis.operations_state import CONDITIONS, LOOPS, PAIRS

SHAPES = ("chain", "branch", "loop", "argument")
# One level-3 chain of the training split in so many is shown with its answer: the rest is left to be found out.
SHOWN_LEVEL_3 = 10


def step(one: Operation, draw: Draw, held_out: bool = False) -> Step:
    """The operation with a constant and a phrasing: the held-out one, or one of the others."""
    phrasing = len(one.phrasings) - 1 if held_out else draw.below(len(one.phrasings) - 1)
    return Step(one, draw.pick(CONSTANTS) if one.has_constant else None, phrasing)


def single_key(program: Program) -> str:
    """The key of a program of one operation: its constant and phrasing too, since every split has every operation."""
    (only,) = program.steps
    return f"{only.name}{'' if only.constant is None else f'.{only.constant}'}/{only.phrasing}"


def key_of(program: Program) -> str:
    """What makes two problems the same."""
    return single_key(program) if len(program.steps) == 1 and _is_plain(program) else program.key


def _is_plain(program: Program) -> bool:
    return all(isinstance(one, Step) and not one.argument and "\n" not in one.operation.source for one in program.steps)


def single(split: str, draw: Draw, held_out: bool = False) -> Program:
    """A level-1 program of a split. The held-out phrasings belong to the test split, whatever their keys' hashes."""
    while True:
        program = Program((step(operations.operation(draw.pick(behaviour.singles())), draw, held_out),))
        if held_out or split_of(single_key(program)) == split:
            return program


def chain(split: str, length: int, draw: Draw, held_out: bool = False, only_shown: bool = False) -> Program:
    """A chain of 2-4 operations of a split; `only_shown`: a level-3 chain whose answer may be shown in training."""
    while True:
        names = _grow(length, draw)
        key = "+".join(names)
        if split_of(key) != split or (only_shown and not is_shown(key)) or not behaviour.stays(names):
            continue
        return Program(tuple(step(operations.operation(name), draw, held_out) for name in names))


def is_shown(key: str) -> bool:
    """Whether a level-3 training chain is among the tenth that is shown with its answer."""
    return int.from_bytes(behaviour.digest("shown|" + key), "big") % SHOWN_LEVEL_3 == 0


def _grow(length: int, draw: Draw) -> tuple[str, ...]:
    """Names whose neighbours may follow each other; starts anywhere, again if it cannot go on."""
    while True:
        names = [draw.pick(behaviour.singles())]
        before = draw.below(length)
        while len(names) < length:
            choices = behaviour.predecessors(names[0]) if before else behaviour.successors(names[-1])
            if not choices:
                break
            if before:
                names.insert(0, draw.pick(choices))
                before -= 1
            else:
                names.append(draw.pick(choices))
        if len(names) == length:
            return tuple(names)


def stateful(split: str, shape: str, draw: Draw) -> Program:
    """A level-4 program that is no chain of four: a branch, a loop with state or two arguments."""
    build = {"branch": _branch, "loop": _loop, "argument": _argument}[shape]
    while True:
        program = build(draw)
        if split_of(program.key) == split:
            return program


def _around(middle: Step | Branch, draw: Draw) -> Program:
    """The step alone, with one step before it, or with one after it."""
    before = [one for one in operations.chain_operations() if one.gives == middle.takes and one.takes == middle.takes]
    after = operations.taking(middle.gives)
    place = draw.below(3)
    if place == 0:
        return Program((step(draw.pick(before), draw), middle))
    return Program((middle, step(draw.pick(after), draw)) if place == 1 else (middle,))


def _branch(draw: Draw) -> Program:
    condition = draw.pick(CONDITIONS)
    choices = [one for one in operations.taking(condition.takes) if one.gives in (condition.takes, NUMBER)]
    then = draw.pick(choices)
    otherwise = draw.pick([one for one in choices if one.gives == then.gives and one is not then])
    constant = draw.pick(CONSTANTS) if condition.has_constant else None
    phrasing = draw.below(len(condition.phrasings) - 1)
    return _around(Branch(condition, constant, step(then, draw), step(otherwise, draw), phrasing), draw)


def _loop(draw: Draw) -> Program:
    return _around(step(draw.pick(LOOPS), draw), draw)


def _argument(draw: Draw) -> Program:
    """Half of them take a second list, half a number in place of a constant."""
    if draw.chance(0.5):
        one = draw.pick(PAIRS)
        return _around(Step(one, None, draw.below(len(one.phrasings) - 1), True), draw)
    one = draw.pick([one for one in operations.taking(NUMBERS) if one.has_constant])
    return _around(replace(step(one, draw), constant=None, argument=True), draw)


def neighbours(program: Program, draw: Draw) -> Iterator[Program]:
    """Endless random programs of the same type, one operation or constant away: replaced, put in, or left out."""
    while True:
        place = draw.below(len(program.steps))
        changed = _changed(program, place, draw)
        if changed is not None:
            yield changed


def _changed(program: Program, place: int, draw: Draw) -> Program | None:
    here, steps, dice = program.steps[place], program.steps, draw.below(8)
    before, after = steps[:place], steps[place + 1 :]
    if dice == 0 and here.takes == here.gives and len(steps) > 1:
        return Program(before + after)
    if dice == 1:
        extra = operations.alike(here.gives, here.gives)
        return Program((*before, here, step(draw.pick(extra), draw), *after)) if extra else None
    if dice in (2, 3) and here.constant is not None:
        return Program((*before, replace(here, constant=here.constant + draw.pick((-1, 1, 2))), *after))
    if isinstance(here, Branch):
        other = step(draw.pick(operations.alike(here.takes, here.gives)), draw)
        branch = replace(here, then=other) if draw.chance(0.5) else replace(here, otherwise=other)
        return Program((*before, branch, *after))
    if isinstance(here, Step) and here.argument:
        # The second parameter must stay in use, or the signature would change.
        choices = [one for one in PAIRS if (one.takes, one.other) == (here.takes, here.operation.other)]
        if here.operation.other is None:
            choices = [one for one in operations.alike(here.takes, here.gives) if one.has_constant]
        return Program((*before, replace(here, operation=draw.pick(choices)), *after)) if choices else None
    choices = operations.alike(here.takes, here.gives)
    return Program((*before, step(draw.pick(choices), draw), *after)) if choices else None
