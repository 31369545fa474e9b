"""The tests of a programming problem in the forms that people write -> the two forms of `streams.records`.

In: `"assert f(1) == 2"`, `{"assert": ...}`, `{"args": "[1]", "expected": "2"}` with Python literals as text, or the same
with JSON values. Out: `{"assert", "visible"}` or `{"args", "expected", "visible"}`. Tests are parsed, never run: running
belongs to `pipeline.sandbox`. What cannot be read raises `RowError`.

Not promised: that a test passes for any program.
"""

import ast
import builtins
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pipeline.streams import literals
from pipeline.streams.calls import RowError


def test(test: Any, field: str) -> dict[str, Any]:
    """`"assert ..."`, `{"assert": ...}` or `{"args", "expected"}`; values may be Python literals as text, or JSON."""
    if isinstance(test, str):
        test = {"assert": test}
    if not isinstance(test, dict):
        raise RowError(field, f"expected an assert or an object, found {type(test).__name__}")
    visible = test.get("visible") is True
    if test.get("assert") is not None:
        source = test["assert"]
        tree = _parse(source, field) if isinstance(source, str) else None
        if tree is None or not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
            raise RowError(f"{field}.assert", "expected Python with an `assert`")
        return {"assert": source, "visible": visible}
    if "args" not in test or "expected" not in test:
        raise RowError(field, "expected `assert`, or `args` and `expected`")
    args, expected = (_literal(test[name], f"{field}.{name}") for name in ("args", "expected"))
    if not args.startswith(("[", "(")):
        raise RowError(f"{field}.args", f"expected the list of positional arguments, found {args[:40]!r}")
    return {"args": args, "expected": expected, "visible": visible}


def _literal(value: Any, field: str) -> str:
    text = value.strip() if isinstance(value, str) else repr(value)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d" in a foreign string is no business of ours
            literals.read(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        reason = f"expected a Python literal as text (a string is \"'abc'\"), found {text[:40]!r}"
        raise RowError(field, reason) from error
    return text


def _parse(source: str, field: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise RowError(field, f"not Python ({error})") from error


def entry_point(sources: Sequence[str]) -> str:
    """The name that most asserts call, the first of them at a tie, a builtin only where nothing else is called."""
    calls: Counter[str] = Counter()
    for source in sources:
        nodes = [node for node in ast.walk(_parse(source, "tests")) if isinstance(node, ast.Call)]
        calls.update(
            list(dict.fromkeys(node.func.id for node in nodes if isinstance(node.func, ast.Name)))
        )  # once per assert
    own = [name for name in calls if not hasattr(builtins, name)]
    return max(own or calls, key=lambda name: calls[name], default="")
