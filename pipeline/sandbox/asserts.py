"""Public tests written as `assert` statements: the calls to the candidate that they need, and whether they hold.

`assert f(1, [2]) == 3` must not run next to the candidate: the process that evaluates the `==` can be manipulated into
yielding True. So the calls with literal arguments are extracted with `ast`, and the sandbox returns their values. The
rest of the expression is evaluated here, on decoded values, by a small interpreter for literals, comparisons,
`and`/`or`/`not`, arithmetic on numbers, subscripts and the functions in FUNCTIONS. Comparisons follow Python's `==` on
plain data (`messages.equal`, mode `python`). An assert that needs more is "unprotected": `parse` returns None.

Not guaranteed: short-circuit evaluation of the calls (all are made); asserts about objects, exceptions and output.
"""

import ast
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.sandbox import messages
from pipeline.text import literals

FUNCTIONS = ("abs", "len", "sorted", "set", "round", "isclose", "sum", "min", "max", "list", "tuple")
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
NUMBERS = (bool, int, float)


class _Unsupported(ValueError):
    """The assert uses something the interpreter does not support."""


class _EvaluationError(Exception):
    """The expression cannot be evaluated on these answers, e.g. because of a type error or an opaque value."""


@dataclass(frozen=True)
class AssertedCall:
    """One call to the candidate; both fields are source code: a literal list and a literal dict."""

    args: str
    kwargs: str


@dataclass(frozen=True)
class Assertion:
    """An assert whose truth depends only on the answers to `calls`."""

    expression: ast.expr
    calls: tuple[AssertedCall, ...]
    entry: str

    def holds(self, answers: list[object]) -> bool:
        """Whether the assert is true; `answers` are decoded values (`messages.decode`), one per call.

        Any operation on an opaque value, or one that would fail in Python, makes it false.
        """
        assert len(answers) == len(self.calls)
        try:
            return _truth(_Interpreter(self.entry, iter(answers)).value(self.expression))
        except (_EvaluationError, messages.Incomparable, ArithmeticError, TypeError, ValueError, IndexError):
            return False


def parse(text: str, entry: str) -> Assertion | None:
    """Parse one `assert` statement about the function `entry`; None if it is unprotected."""
    try:
        body = ast.parse(text.strip()).body
        if len(body) != 1 or not isinstance(body[0], ast.Assert):
            return None
        expression = body[0].test
        interpreter = _Interpreter(entry, None)
        interpreter.value(expression)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return Assertion(expression, tuple(interpreter.calls), entry) if interpreter.calls else None


class _Interpreter:
    """Evaluates an expression; without answers, only collects the calls and raises _Unsupported."""

    def __init__(self, entry: str, answers: Iterator[object] | None) -> None:
        self.entry, self.answers = entry, answers
        self.calls: list[AssertedCall] = []

    def value(self, node: ast.expr) -> Any:
        """The value of a node. Visits every branch, so that calls and answers stay aligned."""
        try:
            return messages.check(literals.read(node, messages.bag, messages.mapping))
        except ValueError:
            pass  # not a literal: it contains a call
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Compare):
            return self._compare(node)
        if isinstance(node, ast.BoolOp):
            parts = [self.value(part) for part in node.values]
            return self._apply(_all if isinstance(node.op, ast.And) else _any, parts)
        if isinstance(node, ast.UnaryOp):
            return self._apply(_negate if isinstance(node.op, ast.Not) else _SIGNS.get(type(node.op)), node.operand)
        if isinstance(node, ast.BinOp):
            left, right = self.value(node.left), self.value(node.right)
            return self._apply(_arithmetic(OPERATORS.get(type(node.op))), left, right)
        if isinstance(node, ast.Subscript):
            return self._apply(_item, self.value(node.value), self.value(node.slice))
        if isinstance(node, ast.List | ast.Tuple):
            parts = [self.value(part) for part in node.elts]
            return self._apply(list if isinstance(node, ast.List) else tuple, parts)
        raise _Unsupported(ast.dump(node)[:80])

    def _apply(self, function: Callable[..., Any] | None, *arguments: Any) -> Any:
        """The function's result, or None if there are no answers."""
        if function is None:
            raise _Unsupported("operator")
        arguments = tuple(self.value(a) if isinstance(a, ast.expr) else a for a in arguments)
        return None if self.answers is None else function(*arguments)

    def _call(self, node: ast.Call) -> Any:
        name = node.func.id if isinstance(node.func, ast.Name) else None
        if name == self.entry:
            if self.answers is not None:
                return next(self.answers)
            self.calls.append(_literal_call(node))
            return None
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            name = node.func.attr if (node.func.value.id, node.func.attr) == ("math", "isclose") else None
        if name not in FUNCTIONS:
            raise _Unsupported(f"call of {name}")
        named = {keyword.arg: self.value(keyword.value) for keyword in node.keywords}
        if not set(named) <= {"rel_tol", "abs_tol", "reverse"}:
            raise _Unsupported("keyword")
        positional = [self.value(argument) for argument in node.args]
        return None if self.answers is None else _builtin(name, positional, named)

    def _compare(self, node: ast.Compare) -> Any:
        operands = [self.value(operand) for operand in (node.left, *node.comparators)]
        for op in node.ops:
            if type(op) not in (*ORDER, ast.Eq, ast.NotEq, ast.In, ast.NotIn, ast.Is, ast.IsNot):
                raise _Unsupported("comparison")
        if self.answers is None:
            return None
        return all(_compare(op, a, b) for op, a, b in zip(node.ops, operands, operands[1:], strict=False))


def _literal_call(node: ast.Call) -> AssertedCall:
    if any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords):
        raise _Unsupported("starred arguments")
    for argument in (*node.args, *(k.value for k in node.keywords)):
        literals.read(argument)  # ValueError: not a literal
    args = ", ".join(ast.unparse(a) for a in node.args)
    kwargs = ", ".join(f"{k.arg!r}: {ast.unparse(k.value)}" for k in node.keywords)
    return AssertedCall(f"[{args}]", f"{{{kwargs}}}")


def _require_plain(value: Any) -> Any:
    if messages.has_opaque(value):
        raise _EvaluationError("opaque")
    return value


def _truth(value: object) -> bool:
    value = _require_plain(value)
    return bool(len(_items(value)) if isinstance(value, messages.Bag | messages.Mapping) else value)


def _all(parts: list[object]) -> bool:
    return all(_truth(part) for part in parts)


def _any(parts: list[object]) -> bool:
    return any(_truth(part) for part in parts)


def _negate(value: object) -> bool:
    return not _truth(value)


def _number(value: object) -> float:
    if not isinstance(value, NUMBERS):
        raise _EvaluationError("not a number")
    return value


_SIGNS: dict[type[ast.unaryop], Callable[[object], float]] = {
    ast.USub: lambda value: -_number(value),
    ast.UAdd: lambda value: +_number(value),
}


def _arithmetic(function: Callable[[float, float], float] | None) -> Callable[[object, object], float] | None:
    """The operator restricted to numbers: `"x" * 10**9` must not run."""
    return None if function is None else lambda left, right: function(_number(left), _number(right))


def _items(value: object) -> list[Any]:
    """The elements that iterating over the value yields."""
    if isinstance(value, messages.Bag):
        return value.items
    if isinstance(value, messages.Mapping):
        return [key for key, _ in value.pairs]
    if isinstance(value, list | tuple | str | bytes):
        return list(value)
    raise _EvaluationError("not a collection")


def _item(value: object, index: object) -> object:
    if isinstance(value, messages.Mapping):
        for key, item in value.pairs:
            if messages.equal(index, key, "python"):
                return item
        raise _EvaluationError("no such key")
    if not isinstance(value, list | tuple | str | bytes) or not isinstance(index, int):
        raise _EvaluationError("not a sequence")
    return value[index]


def _compare(op: ast.cmpop, left: object, right: object) -> bool:
    left, right = _require_plain(left), _require_plain(right)
    if isinstance(op, ast.Eq | ast.NotEq):
        return messages.equal(left, right, "python") is isinstance(op, ast.Eq)
    if isinstance(op, ast.In | ast.NotIn):
        if isinstance(left, str) and isinstance(right, str):
            return (left in right) is isinstance(op, ast.In)
        return any(messages.equal(left, item, "python") for item in _items(right)) is isinstance(op, ast.In)
    if isinstance(op, ast.Is | ast.IsNot):
        if left not in (None, True, False) and right not in (None, True, False):
            raise _EvaluationError("identity of values")
        return messages.equal(left, right, "strict") is isinstance(op, ast.Is)
    return bool(ORDER[type(op)](left, right))


def _builtin(name: str, positional: list[Any], named: dict[str | None, Any]) -> object:
    """Call a function from FUNCTIONS on decoded values."""
    first, *rest = (_require_plain(value) for value in positional)
    if name == "isclose":
        bounds = {str(key): float(_number(value)) for key, value in named.items()}
        return math.isclose(_number(first), _number(rest[0]), **bounds)
    if name == "sorted":
        return sorted(_items(first), reverse=bool(named.get("reverse", False)))
    if name == "abs":
        return abs(first)
    if name == "round":
        return round(_number(first), *[int(_number(digits)) for digits in rest])
    if name in ("min", "max"):
        return (min if name == "min" else max)(_items(first) if not rest else [first, *rest])
    if rest:
        raise _EvaluationError("too many arguments")
    items = _items(first)
    if name == "set":
        return messages.Bag(list({messages.canonical(item, "python"): item for item in items}.values()), frozen=False)
    results: dict[str, Callable[[], object]] = {
        "len": lambda: len(items),
        "sum": lambda: sum(_number(item) for item in items),
        "list": lambda: items,
        "tuple": lambda: tuple(items),
    }
    return results[name]()
