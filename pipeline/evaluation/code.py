"""Code metrics, and conversion of test code into literal asserts that the judge can evaluate.

HumanEval's `check(candidate)` and MBPP's asserts must not run in the same process as a candidate, which could patch
anything they use. Most asserts already have the form `assert f(1) == 2` and are used as is. The others, in loops or
with computed values, are unrolled: the check runs in the sandbox without a candidate, with the reference's helpers and
a stub that only records that it was called. Each assert that is reached is recorded, and each subexpression that does
not use the candidate is replaced with its value:

    for x in range(2, 4):
        assert candidate(x, x + 1) == str(x)      ->      assert f((2), (3)) == ('2') and f((3), (4)) == ('3')

An assert that needs more (such as an answer in a variable, an object or an exception) stays "unprotected": it is
counted but does not affect the verdict. Random inputs come from a fixed seed, set in every sandbox child.

Not guaranteed: that the unprotected asserts would pass; that a check with side effects on the candidate keeps its
meaning.

**Metrics**: pass@k, parsing, format, exact match; and validation of user-supplied problems.

    Judged answers -> pass@k, verdict counts, and the rates of answers that parse and of well-formatted answers
    Problems -> what is wrong with each problem's tests or solution

Verdicts come from `sandbox/judge`, which runs all code, including problem solutions; nothing is executed in this
process. `text/chat.py` extracts the code from an answer. pass@k is the unbiased estimator of Chen et al. 2021
(arXiv:2107.03374).

`faults` validates user-supplied problems: whether each test can be judged, and whether the problem's own solution
passes all tests. Generated problems are correct by construction (tests/test_programs.py proves it) and are not checked.

Not guaranteed: that the tests are strong, or that a problem supplied without a solution can be solved.
"""

import ast
import copy
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.ingest.records import Problem
from pipeline.run.errors import DataError
from pipeline.run.types import JsonObject
from pipeline.sandbox import asserts
from pipeline.sandbox.judge import Candidate, Judge, Verdict, parse_test
from pipeline.sandbox.pool import CandidateJob, Report
from pipeline.text.chat import extract, formatted, tree

CPU_SECONDS = 3.0  # for an entire check, as in HumanEval's own harness
HOLE = re.compile(r"_unroll_hole_(\d+)_")
OWN_SCOPE = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

# Runs in the sandbox, between the reference and the check. A value without a literal form invalidates its assert.
PRELUDE = """
import ast as _unroll_ast, json as _unroll_json, sys as _unroll_sys
_unroll_found, _unroll_asked = {}, []
def _unroll_candidate(*args, **kwargs):
    _unroll_asked.append(1)
    raise RuntimeError("the candidate is not known here")
def _unroll_value(value):
    text = repr(value)
    try:
        _unroll_ast.literal_eval(text)
    except Exception:
        return None
    return "(" + text + ")"
def _unroll_meet(number, *pieces):
    met = _unroll_found.setdefault(number, [])
    met.append(None if None in pieces else "".join(pieces))
"""
POSTLUDE = """
_unroll_run()
if not _unroll_asked:
    _unroll_sys.stdout.write("\\n" + _unroll_json.dumps(_unroll_found) + "\\n")
"""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Statements with asserts about `entry_point`. `context` is the reference and everything the statements may use."""

    entry_point: str
    context: str
    body: list[ast.stmt]


@dataclass
class Tests:
    """The asserts of a check: those that the judge can use as tests, and the unprotected ones."""

    __test__ = False  # not a test class, despite its name

    tests: list[JsonObject] = field(default_factory=list)  # as in `records.Problem`
    unprotected: list[str] = field(default_factory=list)  # the asserts that cannot be judged safely


def function(source: str, entry_point: str, reference: str, where: str) -> Check:
    """The check of `entry_point` from a source with `def check(candidate)`. Raises DataError."""
    module = parse(source, where)
    check = next((node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
    if check is None or len(check.args.args) != 1:
        raise DataError(f"{where}: test: expected `def check(candidate)` with asserts")
    body = [_Rename(check.args.args[0].arg, entry_point).visit(node) for node in check.body]
    others = [ast.unparse(node) for node in module.body if node is not check]
    return Check(entry_point=entry_point, context="\n".join([reference, *others]), body=body)


def parse(source: str, where: str) -> ast.Module:
    """Parse Python source code. Raises DataError with a message that begins with `where`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for example, for "\d" in a string, which is valid
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"{where}: expected Python code ({error}): {source.strip()[:80]!r}") from error


def protect(judge: Judge, checks: Sequence[Check]) -> list[Tests]:
    """The tests of each check; non-literal asserts are unrolled in the judge's sandbox."""
    unsafe = [check for check in checks if any(_safe_text(check, node) is None for node in _asserts(check))]
    limit = judge.config.limits.source_kib << 10
    sources = [_recording_program(check) for check in unsafe]
    tasks = [
        CandidateJob(source, None, [{"stdin": ""}], CPU_SECONDS)
        if len(source.encode("utf-8", "replace")) <= limit
        else None
        for source in sources
    ]
    recorded = {
        id(check): _recorded_texts(reports) for check, reports in zip(unsafe, judge.pool.map(tasks), strict=True)
    }
    return [_tests_of(check, recorded.get(id(check), {})) for check in checks]


def _tests_of(check: Check, recorded: dict[int, list[str]]) -> Tests:
    """One test per assert in the source, whether it runs once or in a loop."""
    result = Tests()
    for number, node in enumerate(_asserts(check)):
        text = _safe_text(check, node)
        if text is None and number in recorded:
            text = f"assert {' and '.join(f'({part})' for part in recorded[number])}"
            text = text if asserts.parse(text, check.entry_point) else None
        if text is None:
            result.unprotected.append(ast.unparse(node))
        else:
            result.tests.append({"assert": text, "visible": False})
    return result


def _asserts(check: Check) -> Iterator[ast.Assert]:
    """Every assert of a check, in a fixed order, except `assert True`, which tests nothing."""
    for statement in check.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assert) and not (isinstance(node.test, ast.Constant) and node.test.value):
                yield node


def _safe_text(check: Check, node: ast.Assert) -> str | None:
    """The source of a top-level assert that needs only the candidate; None for other asserts."""
    if not any(node is statement for statement in check.body):
        return None
    text = ast.unparse(ast.Assert(test=node.test, msg=None))
    return text if asserts.parse(text, check.entry_point) else None


def _recording_program(check: Check) -> str:
    """The program that runs the check without a candidate and prints the recorded asserts, by index."""
    copied = Check(entry_point=check.entry_point, context=check.context, body=copy.deepcopy(check.body))
    numbered = list(_asserts(copied))
    recorder = _Record(check.entry_point, {id(node): number for number, node in enumerate(numbered)})
    run = ast.parse("def _unroll_run():\n    pass")
    assert isinstance(run.body[0], ast.FunctionDef)
    run.body[0].body = [recorder.visit(statement) for statement in copied.body] or [ast.Pass()]
    text = ast.unparse(ast.fix_missing_locations(run))
    return f"{check.context}\n{PRELUDE}\n{check.entry_point} = _unroll_candidate\n{text}\n{POSTLUDE}"


def _recorded_texts(reports: list[Report] | None) -> dict[int, list[str]]:
    """Recorded asserts by index, from the output's last line; empty if the program failed or called the candidate."""
    if reports is None or len(reports) != 1 or reports[0].cut is not None:
        return {}
    try:
        recorded = json.loads(reports[0].stdout.rstrip("\n").rpartition("\n")[2])
    except ValueError:
        return {}
    if not isinstance(recorded, dict):
        return {}
    by_number = {int(number): texts for number, texts in recorded.items() if isinstance(texts, list)}
    return {number: texts for number, texts in by_number.items() if all(isinstance(text, str) for text in texts)}


class _Rename(ast.NodeTransformer):
    """Renames the check's parameter to the function under test."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(id=self.new, ctx=node.ctx) if node.id == self.old else node


class _Record(ast.NodeTransformer):
    """`assert f(x) == g(x)` -> `_unroll_meet(0, "f(", _unroll_value(x), ") == ", _unroll_value(g(x)))`."""

    def __init__(self, entry_point: str, numbers: dict[int, int]) -> None:
        self.entry_point, self.numbers = entry_point, numbers

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        holes = _Holes(self.entry_point)
        number = self.numbers.get(id(node))
        if number is None or any(isinstance(part, OWN_SCOPE) and holes.asks(part) for part in ast.walk(node.test)):
            return ast.Pass()
        template = HOLE.split(ast.unparse(holes.visit(node.test)))
        pieces: list[ast.expr] = [ast.Constant(number)]
        for index, piece in enumerate(template):  # text, index of a hole, text, ...
            pieces.append(_call("_unroll_value", [holes.parts[int(piece)]]) if index % 2 else ast.Constant(piece))
        return ast.Expr(_call("_unroll_meet", pieces))


class _Holes(ast.NodeTransformer):
    """Puts numbered names in place of the largest subexpressions that do not use the candidate."""

    def __init__(self, entry_point: str) -> None:
        self.entry_point = entry_point
        self.parts: list[ast.expr] = []

    def asks(self, node: ast.AST) -> bool:
        """Whether a node uses the candidate."""
        return any(isinstance(part, ast.Name) and part.id == self.entry_point for part in ast.walk(node))

    def visit(self, node: ast.AST) -> Any:
        """The node with its holes; called functions, starred expressions and slices are not replaced."""
        if isinstance(node, ast.expr) and not isinstance(node, ast.Starred | ast.Slice) and not self.asks(node):
            self.parts.append(node)
            return ast.Name(id=f"_unroll_hole_{len(self.parts) - 1}_", ctx=ast.Load())
        if not isinstance(node, ast.Call):
            return self.generic_visit(node)
        node.args = [self.visit(argument) for argument in node.args]
        for named in node.keywords:
            named.value = self.visit(named.value)
        return node


def _call(name: str, arguments: list[ast.expr]) -> ast.Call:
    return ast.Call(func=ast.Name(id=name, ctx=ast.Load()), args=arguments, keywords=[])


# -- code in answers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """The verdict on one answer to one problem."""

    problem: str  # the problem's id
    sample: int
    source: str | None  # the judged code
    formatted: bool  # the answer ends with its only fenced Python block
    parses: bool
    verdict: str  # from sandbox/judge
    reason: str
    score: float | None  # fraction of tests passed; None if the answer could not be judged


def judge_answers(judge: Judge, problems: Sequence[Problem], answers: Sequence[Sequence[str]]) -> list[Judged]:
    """Judge `answers[i][s]`, sample s of problem i; results are in that order, problem by problem."""
    return judge_sources(
        judge,
        [
            (
                problem.id,
                s,
                text,
                Candidate(source=problem.program(extract(text)), entry_point=problem.entry_point, tests=problem.tests),
            )
            for problem, texts in zip(problems, answers, strict=True)
            for s, text in enumerate(texts)
        ],
    )


def judge_sources(judge: Judge, programs: Sequence[tuple[str, int, str, Candidate]]) -> list[Judged]:
    """Judge programs extracted from answers: (problem, sample, answer text, program); order is preserved."""
    judged = []
    verdicts = judge.judge(program for _, _, _, program in programs)
    for (problem, sample, text, program), result in zip(programs, verdicts, strict=True):
        parses = program.source is not None and tree(program.source) is not None
        form = formatted(text)
        judged.append(
            Judged(problem, sample, program.source, form, parses, result.verdict, result.reason, result.score)
        )
    return judged


def exact_match(source: str, reference: str) -> bool:
    """Whether the syntax trees without docstrings are equal, ignoring layout, comments and quote style.

    False if either source does not parse.
    """
    tree_of_source, tree_of_reference = tree(source), tree(reference)
    if tree_of_source is None or tree_of_reference is None:
        return False
    try:
        return ast.dump(_without_docstrings(tree_of_source)) == ast.dump(_without_docstrings(tree_of_reference))
    except RecursionError:
        return False


def _without_docstrings(module: ast.Module) -> ast.Module:
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                # a body that was only a docstring still needs a statement
                node.body = node.body[1:] or ([ast.Pass()] if not isinstance(node, ast.Module) else [])
    return module


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k answers is correct, estimated from n samples, c of them correct (Chen, eq. 1).

    Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k: expected 0 <= c <= n and 1 <= k <= n, found n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    failing = 1.0
    for i in range(n - c + 1, n + 1):
        failing *= 1 - k / i
    return 1 - failing


def pass_rows(judged: Iterable[Judged], k: int) -> dict[str, float]:
    """pass@k of each problem, by id. Skips unjudged samples, and problems with fewer than k judged ones."""
    samples: dict[str, list[bool]] = {}
    for answer in judged:
        right = samples.setdefault(answer.problem, [])
        if answer.score is not None:
            right.append(answer.verdict == "passed")
    return {problem: pass_at_k(len(right), sum(right), k) for problem, right in samples.items() if len(right) >= k}


def rates(judged: Sequence[Judged]) -> dict[str, float]:
    """`parse_rate`, `format_rate` and verdict counts `verdicts/<name>`. Raises ValueError if there are no answers."""
    if not judged:
        raise ValueError("expected at least one judged answer")
    counts = Counter(answer.verdict for answer in judged)
    return {
        "parse_rate": sum(answer.parses for answer in judged) / len(judged),
        "format_rate": sum(answer.formatted for answer in judged) / len(judged),
        **{f"verdicts/{verdict}": float(counts[verdict]) for verdict in sorted(counts)},
    }


# -- problems ----------------------------------------------------------------------------------------------------------


NO_SAFE_TEST = "none of its tests can be judged safely; expected `assert f(...) == literal`, or `args` and `expected`"


def solution(problem: Problem) -> str | None:
    """The source of a problem's solution: the code block of its answer, or the entire answer if it is bare code."""
    return None if problem.answer is None else problem.program(extract(problem.answer) or problem.answer)


def faults(
    judge: Judge, problems: Iterable[tuple[Problem, str | None]], cpu_seconds: float | None = None
) -> Iterator[tuple[str, str]]:
    """(field, fault) for each (problem, source of its solution), in order; both are "" if there is no fault."""
    pending: list[tuple[str, str | None]] = []

    def programs() -> Iterator[Candidate]:
        for problem, source in problems:
            fault = _fault_of_tests(problem, judge.config.limits.max_tests)
            pending.append((fault, source))
            tests = [] if fault else problem.tests
            yield Candidate(source=source, entry_point=problem.entry_point, tests=tests, cpu_seconds=cpu_seconds)

    for verdict in judge.judge(programs()):
        fault, source = pending.pop(0)
        if fault or not verdict.total:
            yield "tests", fault or NO_SAFE_TEST
        elif source is not None and verdict.verdict != "passed":
            yield "answer", f"the solution fails the problem's own tests ({_explain(verdict)})"
        else:
            yield "", ""


def _explain(verdict: Verdict) -> str:
    """Format a verdict, for example as `wrong, value: 1 of 3 tests pass`."""
    verdict_and_reason = ", ".join(part for part in (verdict.verdict, verdict.reason) if part)
    message = next((result.message for result in verdict.results if result.message), "")
    detail = f"; {message[:120]}" if message else ""
    return f"{verdict_and_reason}: {verdict.passed} of {verdict.total} tests pass{detail}"


def _fault_of_tests(problem: Problem, most: int) -> str:
    if len(problem.tests) > most:
        return f"expected at most {most} tests, found {len(problem.tests)}"
    try:
        for test in problem.tests:
            parse_test(test, problem.entry_point)
    except DataError as error:
        return str(error)
    return ""
