"""Which chains count: those that no shorter chain does as well, and that do not give nearly always the same.

In: operation names. Out: `stays(names)`, `successors(name)`, `predecessors(name)`, and `split_of(key)`.

A chain is dropped if on the 48 fixed inputs of its type it acts like a shorter one or gives 3 different outputs or
fewer. Lengths 1 and 2 are compared with every shorter chain. From length 3 on a chain is compared with every chain of
lengths 1 and 2 and with itself less any one step, and each of its parts must stay; so a chain of four that happens to
act like an unrelated chain of three can be missed. The chains of length 2 are tabulated on first use; longer ones are
judged when they are drawn.
"""

import hashlib
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

from pipeline.synthesis import operations
from pipeline.synthesis.chains import Program, Step
from pipeline.synthesis.inputs import probes
from pipeline.synthesis.operation import ANNOTATIONS, CONSTANTS, Operation

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
    return _chain(tuple(operations.operation(name) for name in names), STAND_INS)


def _chain(chain: tuple[Operation, ...], constants: tuple[int, ...]) -> Program:
    return Program(tuple(Step(one, k if one.has_constant else None) for one, k in zip(chain, constants)))


@cache
def _single_behaviours() -> frozenset[tuple[str, str]]:
    """(type, outputs) of doing nothing and of every operation with every constant."""
    found = {(kind, "\n".join(repr(value) for value in probes(kind))) for kind in ANNOTATIONS}
    for one in operations.chain_operations():
        for constant in CONSTANTS if one.has_constant else (0,):
            found.add((one.takes, outputs(_chain((one,), (constant,)))))
    return frozenset(found)


@cache
def _pairs() -> dict[tuple[str, str], str]:
    """The chains of length 2 that stay, with their outputs."""
    kept = {}
    for first in operations.chain_operations():
        if not stays((first.name,)):
            continue
        for second in operations.taking(first.gives):
            behaviour = outputs(_chain((first, second), STAND_INS))
            if stays((second.name,)) and _is_varied(behaviour) and (first.takes, behaviour) not in _single_behaviours():
                kept[first.name, second.name] = behaviour
    return kept


@cache
def _pair_behaviours() -> frozenset[tuple[str, str]]:
    return frozenset((operations.operation(first).takes, text) for (first, _), text in _pairs().items())


@cache
def singles() -> tuple[str, ...]:
    """The operations that stay as chains of length 1."""
    return tuple(one.name for one in operations.chain_operations() if stays((one.name,)))


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
