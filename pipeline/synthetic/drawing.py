"""Which chains count: those that no shorter chain does as well, and that do not give nearly always the same.

In: operation names. Out: `stays(names)`, `successors(name)`, `predecessors(name)`, and `split_of(key)`.

A chain is dropped if on the 48 fixed inputs of its type it acts like a shorter one or gives 3 different outputs or
fewer. Lengths 1 and 2 are compared with every shorter chain. From length 3 on a chain is compared with every chain of
lengths 1 and 2 and with itself less any one step, and each of its parts must stay; so a chain of four that happens to
act like an unrelated chain of three can be missed. The chains of length 2 are tabulated on first use; longer ones are
judged when they are drawn.

Draws programs: chains of a given length, and what level 4 adds (branches, loops with state, two arguments).

In: a `Draw`, a split, a shape. Out: a `Program` whose key belongs to the split, with constants and phrasings chosen;
and its neighbours, the programs one operation away, which tests must tell from it.

Drawing starts from an operation chosen evenly and grows to both sides, so that rare types are as frequent as common
ones. It does not promise that the constants suit the chain: `verification.py` refuses those that give dull tests.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

from pipeline.synthetic import operation_table
from pipeline.synthetic.chains import Branch, Draw, Program, Step, probes
from pipeline.synthetic.operation_table import CONDITIONS, LOOPS, PAIRS
from pipeline.synthetic.operations import ANNOTATIONS, CONSTANTS, NUMBER, NUMBERS, Operation

# The constants that stand for all in a comparison, by position. Different ones, or "add" and "subtract" would cancel.
STAND_INS = (5, 4, 6, 7)
MIN_OUTPUTS = 4
SPLITS = ("test", "val", "rl", "rl", "train", "train", "train", "train", "train", "train")


def split_of(key: str) -> str:
    """`test`, `val`, `rl` or `train`, by blake2b(key) mod 10."""
    return SPLITS[int.from_bytes(digest(key), "big") % 10]


def digest(text: str) -> bytes:
    """8 bytes of blake2b."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def outputs(program: Program) -> str:
    """What the program gives on the fixed inputs of its type, as one text."""
    return "\n".join(repr(program.run((value,))) for value in probes(program.takes))


def _is_varied(behaviour: str) -> bool:
    return len(set(behaviour.split("\n"))) >= MIN_OUTPUTS


def stand_in(names: tuple[str, ...]) -> Program:
    """The chain of those names with the constants of `STAND_INS`."""
    return _chain(tuple(operation_table.operation(name) for name in names), STAND_INS)


def _chain(chain: tuple[Operation, ...], constants: tuple[int, ...]) -> Program:
    return Program(tuple(Step(one, k if one.has_constant else None) for one, k in zip(chain, constants)))


@cache
def _single_behaviours() -> frozenset[tuple[str, str]]:
    """(type, outputs) of doing nothing and of every operation with every constant."""
    found = {(kind, "\n".join(repr(value) for value in probes(kind))) for kind in ANNOTATIONS}
    for one in operation_table.chain_operations():
        for constant in CONSTANTS if one.has_constant else (0,):
            found.add((one.takes, outputs(_chain((one,), (constant,)))))
    return frozenset(found)


@cache
def _pairs() -> dict[tuple[str, str], str]:
    """The chains of length 2 that stay, with their outputs."""
    kept = {}
    for first in operation_table.chain_operations():
        if not stays((first.name,)):
            continue
        for second in operation_table.taking(first.gives):
            behaviour = outputs(_chain((first, second), STAND_INS))
            if stays((second.name,)) and _is_varied(behaviour) and (first.takes, behaviour) not in _single_behaviours():
                kept[first.name, second.name] = behaviour
    return kept


@cache
def _pair_behaviours() -> frozenset[tuple[str, str]]:
    return frozenset((operation_table.operation(first).takes, text) for (first, _), text in _pairs().items())


@cache
def singles() -> tuple[str, ...]:
    """The operations that stay as chains of length 1."""
    return tuple(one.name for one in operation_table.chain_operations() if stays((one.name,)))


@cache
def pairs() -> tuple[tuple[str, str], ...]:
    """The chains of length 2 that stay."""
    return tuple(_pairs())


@cache
def successors(name: str) -> tuple[str, ...]:
    """What may follow an operation."""
    return tuple(second for first, second in pairs() if first == name)


@cache
def predecessors(name: str) -> tuple[str, ...]:
    """What may stand before an operation."""
    return tuple(first for first, second in pairs() if second == name)


@lru_cache(maxsize=200_000)
def stays(names: tuple[str, ...]) -> bool:
    """Whether a chain (1-4 names whose types fit) is kept."""
    if len(names) == 1:
        program = stand_in(names)
        behaviour = outputs(program)
        nothing = "\n".join(repr(value) for value in probes(program.takes))
        return _is_varied(behaviour) and behaviour != nothing
    if len(names) == 2:
        return names in _pairs()
    if not (stays(names[1:]) and stays(names[:-1])):
        return False
    program = stand_in(names)
    behaviour = outputs(program)
    known: Any = (program.takes, behaviour)
    if not _is_varied(behaviour) or known in _single_behaviours() or known in _pair_behaviours():
        return False
    return all(outputs(shorter) != behaviour for shorter in _with_one_step_less(program))


def _with_one_step_less(program: Program) -> list[Program]:
    """The chains that remain when one step is left out and the types still fit."""
    found = []
    for gap in range(len(program.steps)):
        steps = program.steps[:gap] + program.steps[gap + 1 :]
        if steps[0].takes == program.takes and all(a.gives == b.takes for a, b in pairwise(steps)):
            found.append(Program(steps))
    return found


# -- drawing -----------------------------------------------------------------------------------------------------------


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
        program = Program((step(operation_table.operation(draw.pick(singles())), draw, held_out),))
        if held_out or split_of(single_key(program)) == split:
            return program


def chain(split: str, length: int, draw: Draw, held_out: bool = False, only_shown: bool = False) -> Program:
    """A chain of 2-4 operations of a split; `only_shown`: a level-3 chain whose answer may be shown in training."""
    while True:
        names = _grow(length, draw)
        key = "+".join(names)
        if split_of(key) != split or (only_shown and not is_shown(key)) or not stays(names):
            continue
        return Program(tuple(step(operation_table.operation(name), draw, held_out) for name in names))


def is_shown(key: str) -> bool:
    """Whether a level-3 training chain is among the tenth that is shown with its answer."""
    return int.from_bytes(digest("shown|" + key), "big") % SHOWN_LEVEL_3 == 0


def _grow(length: int, draw: Draw) -> tuple[str, ...]:
    """Names whose neighbours may follow each other; starts anywhere, again if it cannot go on."""
    while True:
        names = [draw.pick(singles())]
        before = draw.below(length)
        while len(names) < length:
            choices = predecessors(names[0]) if before else successors(names[-1])
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
    before = [
        one for one in operation_table.chain_operations() if one.gives == middle.takes and one.takes == middle.takes
    ]
    after = operation_table.taking(middle.gives)
    place = draw.below(3)
    if place == 0:
        return Program((step(draw.pick(before), draw), middle))
    return Program((middle, step(draw.pick(after), draw)) if place == 1 else (middle,))


def _branch(draw: Draw) -> Program:
    condition = draw.pick(CONDITIONS)
    choices = [one for one in operation_table.taking(condition.takes) if one.gives in (condition.takes, NUMBER)]
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
    one = draw.pick([one for one in operation_table.taking(NUMBERS) if one.has_constant])
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
        extra = operation_table.alike(here.gives, here.gives)
        return Program((*before, here, step(draw.pick(extra), draw), *after)) if extra else None
    if dice in (2, 3) and here.constant is not None:
        return Program((*before, replace(here, constant=here.constant + draw.pick((-1, 1, 2))), *after))
    if isinstance(here, Branch):
        other = step(draw.pick(operation_table.alike(here.takes, here.gives)), draw)
        branch = replace(here, then=other) if draw.chance(0.5) else replace(here, otherwise=other)
        return Program((*before, branch, *after))
    if isinstance(here, Step) and here.argument:
        # The second parameter must stay in use, or the signature would change.
        choices = [one for one in PAIRS if (one.takes, one.other) == (here.takes, here.operation.other)]
        if here.operation.other is None:
            choices = [one for one in operation_table.alike(here.takes, here.gives) if one.has_constant]
        return Program((*before, replace(here, operation=draw.pick(choices)), *after)) if choices else None
    choices = operation_table.alike(here.takes, here.gives)
    return Program((*before, step(draw.pick(choices), draw), *after)) if choices else None
