"""Programming problems with known truth, and generated code: the source of both behind `data: machine`.

In: a split, a number, a seed. Out: `Problem` records (question, tests, answer), `Text` records for the code corpus, and
what is made from a problem: its dialogue. Wrong answers to it are in `mistakes.py`.

    level 1  one operation      split by operation, constant and phrasing
    level 2  two                split by the names of the operations, as are the rest
    level 3  three              in training a tenth of its chains only
    level 4  four; or a branch, a loop with state, two arguments         never with an answer in training
    level 5  levels 1-3 told out of order, or by examples only           test only

    train  levels 1, 2, shown 3    val  levels 1-3    rl  levels 2, 3, some 4, no answers
    test   easy = 1, medium = 2 and 3, hard = 4, told = 5, phrasing = 1 and 2 in phrasings that training never uses

Every record is a pure function of (split, index, seed), and no key is in two splits. Questions are regular English
written by rule: doing well on them does not promise anything about questions that people write.
"""

from collections.abc import Iterator

from pipeline.errors import DataError
from pipeline.streams.records import Dialogue, Problem, Text
from pipeline.synthesis import drawing, verification, wording
from pipeline.synthesis.chains import Program, spell
from pipeline.synthesis.inputs import Draw

# Shares of the levels, in tenths where a draw chooses; the test split walks through TEST_GROUPS for exact shares.
TRAIN_LEVELS = (1, 1, 2, 2, 2, 2, 2, 2, 3, 3)
# What is mostly solved is made sure of, what is mostly missed is hardly learnt (docs/LOG.md).
RL_LEVELS = (2, 2, 2, 2, 2, 3, 3, 3, 3, 4)
RL_SHAPES = ("chain", "chain", "chain", "branch", "loop", "argument")
# Mostly medium: it is what preference learning and RL are measured on.
TEST_GROUPS = (
    *("medium", "easy", "medium", "phrasing", "medium", "hard", "medium", "easy", "medium", "told"),
    *("medium", "easy", "medium", "phrasing", "medium", "hard", "medium", "easy", "medium", "phrasing"),
)
GROUP_OF_LEVEL = {1: "easy", 2: "medium", 3: "medium", 4: "hard"}
# The generated code shows what level 4 looks like (never a chain of four), so that RL has something to find.
SOURCE_SHAPES = ("single", "single", "pair", "pair", "pair", "pair", "triple", "branch", "loop", "argument")
SOURCE_FUNCTIONS = 3


def problems(split: str, count: int, seed: int, first: int = 0) -> Iterator[Problem]:
    """Problems `first` to `count` of `train`, `val`, `rl` or `test`; those of `rl` have no answer.

    The first n of a longer run are the run of n. Raises ValueError for other splits.
    """
    if split not in ("train", "val", "rl", "test"):
        raise ValueError(f"split must be train, val, rl or test, found {split!r}")
    for index in range(first, count):
        yield _problem(split, index, seed)


def _problem(split: str, index: int, seed: int) -> Problem:
    draw = Draw("problem", split, seed, index)
    group = TEST_GROUPS[index % len(TEST_GROUPS)] if split == "test" else ""
    # The turn within the group decides between its forms, so that each form has its exact share.
    turn = index // len(TEST_GROUPS) * TEST_GROUPS.count(group) + TEST_GROUPS[: index % len(TEST_GROUPS)].count(group)
    while True:
        level, program = _test_program(group, turn, draw) if split == "test" else _program(split, draw)
        tests = verification.tests(program, draw)
        if tests is not None:
            break
    name = draw.pick(wording.NAMES)
    if level < 5:
        question = wording.in_order(program, name, draw)
    elif turn % 2 == 0:
        question = wording.out_of_order(program, name, draw)
    else:
        question = wording.by_examples(program, name, draw)
    return Problem(
        id=f"{split}-{seed}-{index}-{spell(program)}",
        level=level,
        group=group or GROUP_OF_LEVEL[level],
        key=drawing.key_of(program),
        question=wording.with_examples(question, name, tests),
        entry_point=name,
        signature=program.signature(name),
        tests=tests,
        answer=None if split == "rl" else wording.fenced(program.source(name)),
    )


def _program(split: str, draw: Draw) -> tuple[int, Program]:
    """A level and a program of the training, validation or RL split."""
    level = draw.pick(RL_LEVELS if split == "rl" else TRAIN_LEVELS)
    if level == 1:
        return level, drawing.single(split, draw)
    if level < 4:
        return level, drawing.chain(split, level, draw, only_shown=split == "train" and level == 3)
    return level, _level_4(split, draw.pick(RL_SHAPES), draw)


def _level_4(split: str, shape: str, draw: Draw) -> Program:
    return drawing.chain(split, 4, draw) if shape == "chain" else drawing.stateful(split, shape, draw)


def _test_program(group: str, turn: int, draw: Draw) -> tuple[int, Program]:
    """A level and a program of a test group; `turn` counts the group's problems."""
    if group == "easy":
        return 1, drawing.single("test", draw)
    if group == "medium":
        length = 2 + turn % 2
        return length, drawing.chain("test", length, draw)
    if group == "hard":
        return 4, _level_4("test", ("chain", "branch", "chain", "loop", "chain", "argument")[turn % 6], draw)
    if group == "phrasing":
        return (1, drawing.single("test", draw, True)) if turn % 2 else (2, drawing.chain("test", 2, draw, True))
    if turn % 2 == 0:
        return 5, drawing.chain("test", 2 + turn // 2 % 2, draw)
    return 5, drawing.single("test", draw)


def sources(target_bytes: int, seed: int) -> Iterator[Text]:
    """Files of three functions of the training split, with docstring and asserts, until `target_bytes` are reached."""
    written = number = 0
    while written < target_bytes:
        draw = Draw("source", seed, number)
        names = draw.sample(wording.NAMES, SOURCE_FUNCTIONS)
        text = "\n\n".join(_function(name, draw) for name in names)
        yield Text(text=text, source="generated", path=f"generated/{seed}/{number:06d}.py", licence="CC0-1.0")
        written += len(text.encode())
        number += 1


def _function(name: str, draw: Draw) -> str:
    """One function with two asserts below it, and a line feed at its end."""
    while True:
        program = _source_program(draw.pick(SOURCE_SHAPES), draw)
        cases = verification.visible_cases(program, draw, 2)
        if cases is not None:
            break
    asserts = [f"assert {name}({repr(list(case.arguments))[1:-1]}) == {case.expected}" for case in cases]
    return program.source(name, wording.docstring(program)) + "\n\n\n" + "\n".join(asserts) + "\n"


def _source_program(shape: str, draw: Draw) -> Program:
    if shape == "single":
        return drawing.single("train", draw)
    if shape in ("pair", "triple"):
        return drawing.chain("train", 2 if shape == "pair" else 3, draw, only_shown=shape == "triple")
    return drawing.stateful("train", shape, draw)


def dialogue(problem: Problem) -> Dialogue:
    """The problem as one turn of each side. Raises DataError if its answer is not known."""
    if problem.answer is None:
        raise DataError(f"problem {problem.id} has no answer: only problems with one can be shown in training")
    messages = [{"role": "user", "content": problem.question}, {"role": "assistant", "content": problem.answer}]
    return Dialogue(id=problem.id, kind="code", category=problem.group, messages=messages)
