"""Read Python literals without running anything: numbers, strings, lists, tuples, sets and dicts.

Sets and dicts are built by the caller's functions, because the sandbox's judge must not hash what a candidate sent.
Only the standard library is used: the judge also runs for users whose Python lacks the project's packages.
"""

import ast
from collections.abc import Callable


def read(
    source: str | ast.expr,
    make_set: Callable[[list[object]], object] = list,
    make_dict: Callable[[list[tuple[object, object]]], object] = list,
) -> object:
    """The value of a literal, given as text or as a syntax tree.

    Raises ValueError for anything else; for text, it may also raise SyntaxError, MemoryError or RecursionError.
    """
    node = ast.parse(source.lstrip(" \t"), mode="eval").body if isinstance(source, str) else source

    def value(node: ast.expr, *, hashable: bool = False) -> object:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Tuple):
            return tuple([value(item, hashable=hashable) for item in node.elts])
        if isinstance(node, ast.UnaryOp | ast.BinOp):
            return _number(node)
        if hashable:
            raise ValueError(f"a {type(node).__name__.lower()} in a set or as a dict key")
        if isinstance(node, ast.List):
            return [value(item) for item in node.elts]
        if isinstance(node, ast.Set):
            return make_set([value(item, hashable=True) for item in node.elts])
        if isinstance(node, ast.Dict) and None not in node.keys:
            keys = [value(key, hashable=True) for key in node.keys if key is not None]
            return make_dict(list(zip(keys, [value(item) for item in node.values], strict=True)))
        if isinstance(node, ast.Call) and ast.unparse(node) == "set()":
            return make_set([])
        raise ValueError(f"not a literal: {type(node).__name__}")

    return value(node)


def _number(node: ast.expr) -> int | float | complex:
    """A number, possibly with a sign, or a complex number written as a sum. Raises ValueError for anything else."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        real, imaginary = _number(node.left), node.right
        if isinstance(imaginary, ast.Constant) and type(imaginary.value) is complex and type(real) in (int, float):
            return real + imaginary.value if isinstance(node.op, ast.Add) else real - imaginary.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        if isinstance(node.operand, ast.Constant):  # one sign before a number, never two
            return -_number(node.operand) if isinstance(node.op, ast.USub) else _number(node.operand)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float, complex):
        return node.value  # pyright: ignore[reportReturnType]
    raise ValueError("not a literal number")
