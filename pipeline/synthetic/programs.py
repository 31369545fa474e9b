"""Programming problems with known truth, and a code corpus, both generated for `data: machine`.

In: a split, a count, a seed. Out: `Problem` records (question, tests, answer), `Text` records for the code corpus, a
problem as a dialogue, requests in everyday words, and wrong answers to a problem.

    level 1  one operation              split by operation, constant and phrasing
    level 2  two operations             split by the names of the operations, like all higher levels
    level 3  three operations           training shows only a tenth of the chains
    level 4  four operations, a branch, a loop with state, or two arguments      never with an answer in training
    level 5  like levels 1-3, but with the steps out of order or only examples   only in the test split

    train  levels 1, 2, shown 3    val  levels 1-3    rl  levels 2, 3, some of 4, without answers
    test   easy = 1, medium = 2 and 3, hard = 4, told = 5, phrasing = 1 and 2 in phrasings that training never uses

Every record is a pure function of (split, index, seed), and no key is in two splits.

Wording: questions are short and have few forms, because the smallest model learns them from a million tokens; only the
operations, their phrasings, constants, names and examples vary.

Requests (`request`, `requests`): one operation in everyday words (`requests.yaml`), without a function name and without
examples, as one types it on the chat page. The wordings were written independently of the phrasings; the test ones
were written independently of the others. A model trained on the problems alone refuses most requests (docs/LOG.md).

Tests (`tests_of`): 3 visible and 12 to 24 hidden records `{"args", "expected", "visible"}`, with inputs that show what
the program does and catch near misses. The hidden tests have an input for each kind of edge case (empty, single item,
negative, repeated, long). Each of 16 programs that differ by one operation or constant fails a test if an input from
the pool tells it apart. No expected value makes up more than half of the tests. A program with uninteresting constants
may have no such tests; it is then redrawn.

Style: the answer to a problem is code only. In a dialogue (`dialogue`), the return value is described in a docstring,
in a comment, in both or in neither: half of the answers have a docstring, and half have a comment, so that a model
trained on dialogues has no preference among the four. Preference learning adds one (`well_styled`, preferences.py). The
description follows from the signature: a docstring that repeated the question cost tokens and hurt a model on other
phrasings. On a diffusion model's canvas, written all at once, optional lines made half of the answers wrong
(docs/LOG.md).

Mistakes (`distractors`): wrong answers for preference pairs, as (kind, source). People make all of these mistakes:

    other_operation  one step replaced by another of the same types, inserted or removed
    off_by_one       a step uses its value without the first or the last item
    wrong_constant   a different constant
    lost_default     the value for empty input is missing
    broken_syntax    a bracket, a colon or the indentation is missing

A mistake states an intent, not a verdict: the source may pass all tests (the label comes from running them). Kinds that
do not apply to a program are absent.

Not guaranteed: that good results on the problems, worded by rule in regular English, carry over to other wordings (the
group `request` measures that for one operation), that people word requests like these (they were written for this
project, not collected), or that a program two operations away fails a test.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipeline.ingest.records import Dialogue, Problem, Text
from pipeline.run.errors import DataError
from pipeline.run.types import JsonObject
from pipeline.synthetic import chains
from pipeline.synthetic.chains import Branch, Program, Step, neighbors, parse, spell
from pipeline.synthetic.operations import COUNTS, NUMBER, Draw, Value, operation, pool
from pipeline.synthetic.wording import lines, word_list

# Levels to draw from, one entry per tenth; the test split cycles through TEST_GROUPS for exact proportions.
TRAIN_LEVELS = (1, 1, 2, 2, 2, 2, 2, 2, 3, 3)
# RL consolidates problems that are mostly solved and hardly learns those that are mostly unsolved (docs/LOG.md).
RL_LEVELS = (2, 2, 2, 2, 2, 3, 3, 3, 3, 4)
RL_SHAPES = ("chain", "chain", "chain", "branch", "loop", "argument")
# Mostly medium, the group used to measure preference learning and RL.
TEST_GROUPS = (
    *("medium", "easy", "medium", "phrasing", "medium", "hard", "medium", "easy", "medium", "told"),
    *("medium", "easy", "medium", "phrasing", "medium", "hard", "medium", "easy", "medium", "phrasing"),
)
GROUP_OF_LEVEL = {1: "easy", 2: "medium", 3: "medium", 4: "hard"}
# The generated code contains the shapes of level 4 (never a chain of four), so that RL can find them.
SOURCE_SHAPES = ("single", "single", "pair", "pair", "pair", "pair", "triple", "branch", "loop", "argument")
SOURCE_FUNCTIONS = 3
REDRAWS = 20
REQUEST = "request"  # the group of problems in everyday words
REQUESTED = "solve"  # the function's name in the answer to a request


def problems(split: str, count: int, seed: int, first: int = 0) -> Iterator[Problem]:
    """Problems `first` to `count` - 1 of the split `train`, `val`, `rl` or `test`; those of `rl` have no answer.

    A smaller `count` yields a prefix of the same problems. Raises ValueError for other splits.
    """
    if split not in ("train", "val", "rl", "test"):
        raise ValueError(f"split must be train, val, rl or test, found {split!r}")
    for index in range(first, count):
        yield _problem(split, index, seed)


def fresh_problems(known: Sequence[Problem], seed: int) -> list[Problem]:
    """Replace the generated test problems with new ones; keep all others."""
    generated = [problem for problem in known if problem.id.startswith("test-")]
    return [*problems("test", len(generated), seed), *(p for p in known if not p.id.startswith("test-"))]


def _problem(split: str, index: int, seed: int) -> Problem:
    draw = Draw("problem", split, seed, index)
    group = TEST_GROUPS[index % len(TEST_GROUPS)] if split == "test" else ""
    # The problem's index within its group selects its form, so that each form has its exact proportion.
    turn = index // len(TEST_GROUPS) * TEST_GROUPS.count(group) + TEST_GROUPS[: index % len(TEST_GROUPS)].count(group)
    while True:
        level, program = _test_program(group, turn, draw) if split == "test" else _program(split, draw)
        tests = tests_of(program, draw)
        if tests is not None:
            break
    name = draw.pick(word_list("programs.yaml", "function_names"))
    if level < 5:
        question = in_order(program, name, draw)
    elif turn % 2 == 0:
        question = out_of_order(program, name, draw)
    else:
        question = by_examples(program, name, draw)
    return Problem(
        id=f"{split}-{seed}-{index}-{spell(program)}",
        level=level,
        group=group or GROUP_OF_LEVEL[level],
        key=chains.key_of(program),
        question=with_examples(question, name, tests),
        entry_point=name,
        signature=program.signature(name),
        tests=tests,
        answer=None if split == "rl" else fenced(program.source(name)),
    )


def requests(seed: int) -> Iterator[Problem]:
    """Test problems in held-out everyday words: one per operation, without a signature or examples.

    An operation without a balanced set of tests in REDRAWS draws has none (`magnitude`: short inputs are positive).
    """
    for index, name in enumerate(chains.singles()):
        draw = Draw("request", "test", seed, index)
        drawn = (Program((chains.step(operation(name), draw),)) for _ in range(REDRAWS))
        program, tests = next(((p, tests) for p in drawn if (tests := tests_of(p, draw))), (None, []))
        if program is not None:
            yield Problem(
                id=f"request-{seed}-{index}-{spell(program)}",
                level=1,
                group=REQUEST,
                key=f"{REQUEST}/{spell(program)}",
                question=_asked(program, lines("requests.yaml", name)[-1]),
                entry_point=REQUESTED,
                signature=program.signature(REQUESTED),
                tests=tests,
                answer=fenced(program.source(REQUESTED)),
            )


def request(draw: Draw, *, held_out: bool = False) -> tuple[str, str]:
    """A request and its answer, for a conversation; the last wording of an operation is held out.

    One operation is mostly requested in everyday words; two are always worded as in the problems.
    """
    if not held_out and draw.chance(0.3):
        program = chains.chain("train", 2, draw) if draw.chance(0.6) else chains.single("train", draw)
        question = draw.pick(lines("programs.yaml", "frames_of_requests")).format(steps=_join_steps(program))
        question = question[0].upper() + question[1:]
    else:
        program = Program((chains.step(operation(draw.pick(chains.singles())), draw),))
        *known, last = lines("requests.yaml", program.steps[0].name)
        question = _asked(program, last if held_out else draw.pick(known))
    if not held_out and draw.chance(0.3):
        question = question.rstrip("?.")
        question = question.lower() if draw.chance(0.5) else question
    source, description = described(program, REQUESTED)
    return question, fenced(styled(source, description, Style.draw(draw)))


def _asked(program: Program, wording: str) -> str:
    """The wording with the constant of the program's only step."""
    return wording.replace("{k}", str(program.steps[0].constant))


def _program(split: str, draw: Draw) -> tuple[int, Program]:
    """A level and a program from the training, validation or RL split."""
    level = draw.pick(RL_LEVELS if split == "rl" else TRAIN_LEVELS)
    if level == 1:
        return level, chains.single(split, draw)
    if level < 4:
        return level, chains.chain(split, level, draw, only_shown=split == "train" and level == 3)
    return level, _level_4(split, draw.pick(RL_SHAPES), draw)


def _level_4(split: str, shape: str, draw: Draw) -> Program:
    return chains.chain(split, 4, draw) if shape == "chain" else chains.stateful(split, shape, draw)


def _test_program(group: str, turn: int, draw: Draw) -> tuple[int, Program]:
    """A level and a program from a test group; `turn` is the problem's index within its group."""
    if group == "easy":
        return 1, chains.single("test", draw)
    if group == "medium":
        length = 2 + turn % 2
        return length, chains.chain("test", length, draw)
    if group == "hard":
        return 4, _level_4("test", ("chain", "branch", "chain", "loop", "chain", "argument")[turn % 6], draw)
    if group == "phrasing":
        if turn % 2:
            return 1, chains.single("test", draw, held_out=True)
        return 2, chains.chain("test", 2, draw, held_out=True)
    if turn % 2 == 0:
        return 5, chains.chain("test", 2 + turn // 2 % 2, draw)
    return 5, chains.single("test", draw)


def sources(target_bytes: int, seed: int) -> Iterator[Text]:
    """Files with three training-split functions, each with a docstring and asserts, until `target_bytes` are filled."""
    written = number = 0
    while written < target_bytes:
        draw = Draw("source", seed, number)
        names = draw.sample(word_list("programs.yaml", "function_names"), SOURCE_FUNCTIONS)
        text = "\n\n".join(_function(name, draw) for name in names)
        yield Text(text=text, source="generated", path=f"generated/{seed}/{number:06d}.py", license="CC0-1.0")
        written += len(text.encode())
        number += 1


def _function(name: str, draw: Draw) -> str:
    """One function followed by two asserts and a final newline."""
    while True:
        program = _source_program(draw.pick(SOURCE_SHAPES), draw)
        cases = visible_cases(program, draw, 2)
        if cases is not None:
            break
    asserts = [f"assert {name}({repr(list(case.arguments))[1:-1]}) == {case.expected}" for case in cases]
    return program.source(name, docstring(program)) + "\n\n\n" + "\n".join(asserts) + "\n"


def _source_program(shape: str, draw: Draw) -> Program:
    if shape == "single":
        return chains.single("train", draw)
    if shape in ("pair", "triple"):
        return chains.chain("train", 2 if shape == "pair" else 3, draw, only_shown=shape == "triple")
    return chains.stateful("train", shape, draw)


def dialogue(problem: Problem) -> Dialogue:
    """The problem as one user and one assistant message; generated answers use one of the four styles.

    Raises DataError if the answer is unknown.
    """
    if problem.answer is None:
        raise DataError(f"problem {problem.id} has no answer: only problems with an answer can be shown in training")
    answer = _in_a_style(problem, problem.answer)
    messages = [{"role": "user", "content": problem.question}, {"role": "assistant", "content": answer}]
    return Dialogue(id=problem.id, kind="code", category=problem.group, messages=messages)


# -- style -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Style:
    """Where an answer describes its return value."""

    docstring: bool
    comment: bool

    @classmethod
    def draw(cls, draw: Draw) -> "Style":
        """Draw one of the four styles."""
        return cls(draw.chance(0.5), draw.chance(0.5))


WANTED = Style(docstring=True, comment=False)


def described(program: Program, name: str) -> tuple[str, str]:
    """The function's source without a docstring, and a sentence on what it returns."""
    return program.source(name), f"Return the {program.gives} for the {program.takes}."


def styled(source: str, description: str, style: Style) -> str:
    """The function's source, with the description added below its first line as the style says."""
    first, _, body = source.partition("\n")
    added = [f'    """{description}"""'] * style.docstring + [f"    # {description}"] * style.comment
    return "\n".join([first, *added, body])


def _in_a_style(problem: Problem, answer: str) -> str:
    """The answer in a style drawn from the problem's id; unchanged if the problem is not a generated one."""
    try:
        source, description = described(program_of(problem), problem.entry_point)
    except ValueError:
        return answer
    if answer != fenced(source):  # a user's problem with an id like ours
        return answer
    return fenced(styled(source, description, Style.draw(Draw("style", problem.id))))


def well_styled(source: str, module: ast.Module) -> bool:
    """Whether a source has at least one function, a docstring in each function, and no comments."""
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    if not functions or not all((ast.get_docstring(function) or "").strip() for function in functions):
        return False
    try:
        return all(token.type != tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError):  # accepted by the parser but not by the tokenizer
        return False


# -- wording -----------------------------------------------------------------------------------------------------------

ORDINALS = ("First", "Second", "Third", "Fourth")


def in_order(program: Program, name: str, draw: Draw) -> str:
    """A question for levels 1 to 4: the steps in order."""
    frame = draw.pick(lines("programs.yaml", "frames"))
    return frame.format(signature=program.signature(name), steps=_join_steps(program))


def out_of_order(program: Program, name: str, draw: Draw) -> str:
    """A level-5 question: the steps out of order, with words that state the correct order."""
    phrases = _phrases(program)
    if draw.chance(0.5):
        first, *rest = phrases[::-1]
        instructions = f"In the end {first}; " + "; ".join(f"before that, {phrase}" for phrase in rest)
    else:
        numbered = [f"{ORDINALS[index].lower()}, {phrase}" for index, phrase in enumerate(phrases)]
        rotation = draw.between(1, len(numbered) - 1)
        instructions = "; ".join(numbered[rotation:] + numbered[:rotation]).capitalize()
    return f"Write `{program.signature(name)}`. {instructions}."


def by_examples(program: Program, name: str, draw: Draw) -> str:
    """A level-5 question without instructions: only the examples that follow define the task."""
    return draw.pick(lines("programs.yaml", "frames_of_examples")).format(signature=program.signature(name))


def with_examples(question: str, name: str, tests: Sequence[JsonObject]) -> str:
    """The question followed by its visible tests, one per line."""
    lines = [f"{name}({test['args'][1:-1]}) == {test['expected']}" for test in tests if test["visible"]]
    return question + "\n\n" + "\n".join(lines)


def docstring(program: Program) -> str:
    """A one-sentence description of the program."""
    steps = _join_steps(program)
    return steps[0].upper() + steps[1:] + "."


def fenced(source: str) -> str:
    """An answer: the source as a single fenced block."""
    return f"```python\n{source}\n```"


def unfenced(answer: str) -> str:
    """The source in an answer written by `fenced`."""
    return answer.removeprefix("```python\n").removesuffix("\n```")


def _phrases(program: Program) -> list[str]:
    return [step.words(program.second_name) for step in program.steps]


def _join_steps(program: Program) -> str:
    return ", then ".join(_phrases(program))


# -- tests -------------------------------------------------------------------------------------------------------------


NUM_VISIBLE = 3
NUM_HIDDEN = 12
MAX_HIDDEN = 24
NUM_NEIGHBORS = 16
MAX_NEIGHBORS_TRIED = 64
NUM_SPARE = 32  # extra inputs for a neighbor that passes all tests so far
MAX_VISIBLE_LENGTH = 42  # characters in the expected value of a visible test
MAX_LENGTH = 400  # characters in the expected value of any test


@dataclass(frozen=True)
class Case:
    """One test before serialization; `expected` is a string, because 1 == True and 0.0 == 0."""

    arguments: tuple[Value, ...]
    expected: str


def tests_of(program: Program, draw: Draw) -> list[JsonObject] | None:
    """The program's tests, visible ones first; None if no balanced set was found."""
    visible = visible_cases(program, draw)
    if visible is None:
        return None
    hidden = _hidden_cases(program, draw, visible)
    if hidden is None:
        return None
    hidden += _distinguishing_cases(program, draw, visible + hidden)
    cases = visible + hidden
    if len(hidden) > MAX_HIDDEN or 2 * _most_common(cases)[1] > len(cases):
        return None
    return [
        {"args": repr(list(case.arguments)), "expected": case.expected, "visible": number < NUM_VISIBLE}
        for number, case in enumerate(cases)
    ]


def visible_cases(program: Program, draw: Draw, count: int = NUM_VISIBLE) -> list[Case] | None:
    """Short inputs with distinct short outputs, for a question or a docstring; None if there are too few.

    At least one input differs from its output, so "keep the last 8 numbers" is not shown only on lists of five.
    """
    cases: list[Case] = []
    spare: list[Case] = []  # a case whose output equals its input shows little: only used if others are missing
    for value in draw.sample(pool(program.takes).short, 24):
        case = _case(program, value, draw)
        if len(case.expected) > MAX_VISIBLE_LENGTH or any(case.expected == other.expected for other in cases + spare):
            continue
        (spare if case.expected == repr(value) else cases).append(case)
        if len(cases) == count:
            return cases
    if not cases or len(cases) + len(spare) < count:
        return None
    return cases + spare[: count - len(cases)]


def _case(program: Program, value: Value, draw: Draw) -> Case:
    arguments = (value, _second_argument(program.second, draw)) if program.second is not None else (value,)
    return Case(arguments, repr(program.run(arguments)))


def _second_argument(kind: str, draw: Draw) -> Value:
    return draw.between(1, 9) if kind == NUMBER else draw.pick(pool(kind).short)


def _hidden_cases(program: Program, draw: Draw, visible: list[Case]) -> list[Case] | None:
    values = pool(program.takes)
    edges = [_case(program, draw.pick(group), draw) for group in values.edges]
    cases = list(edges)
    for value in draw.sample(values.plain, 60):
        if len(cases) == NUM_HIDDEN:
            break
        case = _case(program, value, draw)
        common, count = _most_common(visible + cases)
        # Once the most common value reaches a third of the tests, add only cases with other values.
        if case.expected != common or 3 * count < NUM_HIDDEN + NUM_VISIBLE:
            cases.append(case)
    if len(cases) < NUM_HIDDEN or any(len(case.expected) > MAX_LENGTH for case in cases):
        return None
    return cases


def _distinguishing_cases(program: Program, draw: Draw, cases: list[Case]) -> list[Case]:
    """For each of 16 neighbors that would pass all cases so far, one extra case that it fails, if one is found."""
    added: list[Case] = []
    spare: list[Case] = []  # extra cases, created when a neighbor first passes all cases
    num_failing = num_tried = 0
    for neighbor in neighbors(program, draw):
        num_tried += 1
        if num_failing == NUM_NEIGHBORS or num_tried > MAX_NEIGHBORS_TRIED:
            return added
        if any(_fails(neighbor, case) for case in cases):
            num_failing += 1
            continue
        spare = spare or [_case(program, value, draw) for value in draw.sample(pool(program.takes).plain, NUM_SPARE)]
        case = next((case for case in spare if len(case.expected) <= MAX_LENGTH and _fails(neighbor, case)), None)
        if case is not None:
            added.append(case)
            cases = [*cases, case]
            num_failing += 1
    return added


def _fails(neighbor: Program, case: Case) -> bool:
    return repr(neighbor.run(case.arguments)) != case.expected


def _most_common(cases: list[Case]) -> tuple[str, int]:
    return Counter(case.expected for case in cases).most_common(1)[0]


# -- mistakes ----------------------------------------------------------------------------------------------------------


def program_of(problem: Problem) -> Program:
    """The program of a generated problem. Raises ValueError for a problem from another source."""
    return parse(problem.id.rpartition("-")[2])


def distractors(problem: Problem, seed: int) -> list[tuple[str, str]]:
    """Distinct wrong sources, at most two per kind. Raises ValueError for a problem from another source."""
    program = program_of(problem)
    name, draw = problem.entry_point, Draw("mistake", seed, problem.id)
    right = program.source(name)
    mistakes = [
        *(("other_operation", wrong.source(name)) for wrong in _other_operations(program, draw)),
        *(("off_by_one", source) for source in _off_by_one(program, name, draw)),
        *(("wrong_constant", wrong.source(name)) for wrong in _wrong_constants(program, draw)),
        *(("lost_default", source) for source in _lost_defaults(program, name)),
        ("broken_syntax", _break_syntax(right, draw)),
    ]
    distinct: dict[str, str] = {}
    for kind, source in mistakes:
        if source != right:
            distinct.setdefault(source, kind)
    return [(kind, source) for source, kind in distinct.items()]


def _other_operations(program: Program, draw: Draw) -> list[Program]:
    """Two neighbors with different keys, or fewer if there are not enough."""
    others: list[Program] = []
    for num_tried, wrong in enumerate(neighbors(program, draw)):
        if len(others) == 2 or num_tried == 12:
            break
        if wrong.key != program.key and wrong.key not in [other.key for other in others]:
            others.append(wrong)
    return others


def _wrong_constants(program: Program, draw: Draw) -> list[Program]:
    programs = []
    for index, step in enumerate(program.steps):
        if step.constant is not None:
            wrong = replace(step, constant=draw.pick([k for k in range(2, 10) if abs(k - step.constant) > 1]))
            programs.append(Program((*program.steps[:index], wrong, *program.steps[index + 1 :])))
    return draw.sample(programs, 1)


def _off_by_one(program: Program, name: str, draw: Draw) -> list[str]:
    """Change where a step first reads its value: drop the first or last item, or add or subtract 1 from a number."""
    indices = [index for index, step in enumerate(program.steps) if isinstance(step, Step) and step.takes != COUNTS]
    if not indices:
        return []
    index = draw.pick(indices)
    step = program.steps[index]
    assert isinstance(step, Step)
    cut = draw.pick((" + 1", " - 1")) if step.takes == NUMBER else draw.pick(("[1:]", "[:-1]"))
    variable = f"({step.takes}{cut})" if step.takes == NUMBER else step.takes + cut
    source = step.operation.source.replace("{x}", variable, 1)
    return [_with_source(program, index, source).source(name)]


def _lost_defaults(program: Program, name: str) -> list[str]:
    return [
        _with_source(program, index, step.operation.bare).source(name)
        for index, step in enumerate(program.steps)
        if isinstance(step, Step) and step.operation.bare is not None
    ][:1]


def _with_source(program: Program, index: int, source: str) -> Program:
    """The program with a different source for one step. Never run it: that step's function no longer matches."""
    step = program.steps[index]
    assert not isinstance(step, Branch)
    wrong = replace(step, operation=replace(step.operation, source=source))
    return Program((*program.steps[:index], wrong, *program.steps[index + 1 :]))


def _break_syntax(source: str, draw: Draw) -> str:
    """The source with one syntax error."""
    brackets = [match.start() for match in re.finditer(r"[()\[\]]", source)]
    bracket = draw.pick(brackets)
    choices = (
        source[:bracket] + source[bracket + 1 :],
        source.replace(":\n", "\n", 1),
        source.replace("\n    ", "\n", 1),
        source.replace("return ", "return = ", 1),
    )
    return draw.pick(choices)
