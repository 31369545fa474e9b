"""A hash of the code that each stage runs, so that a comment, a docstring or the server retrains nothing.

    pipeline/, stages/ -> build/code/<stage>.txt        (`python -m pipeline.codehash`, stage code_versions)

For `stages/<s>.py` it follows static imports inside the two packages and writes sorted `hash  module` lines. A module's
hash is over its syntax tree without docstrings, positions and empty fields (our own dump: `ast.dump` differs between
Python versions) and over the non-Python files beside it (templates). Left out are the modules of IGNORED: they change no
result, so no default of a stage may live in them.

Not seen: imports whose name is computed at run time, and changes in installed packages.
"""

import ast
import hashlib
import sys
from functools import cache
from pathlib import Path

PACKAGES = ("pipeline", "stages")
IGNORED = frozenset(
    f"pipeline.{name}"
    for name in ("codehash", "errors", "launch", "params", "registry", "running", "tracking", "usage", "work")
)


def dump(node: object) -> str:
    """A syntax tree as text: type names and non-empty fields only, docstrings dropped."""
    if isinstance(node, ast.AST):
        fields = []
        for name in node._fields:
            value = getattr(node, name, None)
            if name == "body" and isinstance(value, list):
                value = _without_docstring(node, value)
            if name in ("kind", "type_comment", "type_ignores", "ctx") or value is None or value == []:
                continue
            fields.append(f"{name}={dump(value)}")
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(dump(entry) for entry in node)}]"
    return repr(node)


def _without_docstring(node: ast.AST, body: list[ast.stmt]) -> list[ast.stmt]:
    documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    first = body[0] if body else None
    if not (documented and isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)):
        return body
    return body[1:] if isinstance(first.value.value, str) else body


def module_file(root: Path, module: str) -> Path | None:
    """The file of a module of ours, or None when there is none (a name inside a module)."""
    base = root.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def imports(root: Path, module: str) -> set[str]:
    """Modules of ours that `module` imports statically, at any depth of the file, with the packages around them."""
    path = module_file(root, module)
    assert path is not None, module
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    ours = {name for name in names if name.split(".")[0] in PACKAGES}
    parents = {".".join(name.split(".")[:n]) for name in ours for n in range(1, name.count(".") + 1)}
    return {name for name in ours | parents if module_file(root, name) is not None}


def closure(root: Path, stage: str) -> dict[str, str]:
    """module -> 16 hex digits, for everything that `stages/<stage>.py` runs. Raises SyntaxError as Python would."""
    start = f"stages.{stage}"
    seen: dict[str, str] = {}
    waiting = [start, "stages"]
    while waiting:
        module = waiting.pop()
        if module in seen or module in IGNORED:
            continue
        path = module_file(root, module)
        assert path is not None, module
        seen[module] = _hash_of(path)
        waiting += sorted(imports(root, module))
    return dict(sorted(seen.items()))


@cache
def _hash_of(path: Path) -> str:
    digest = hashlib.sha256(dump(ast.parse(path.read_text(encoding="utf-8"))).encode())
    for beside in sorted(path.parent.iterdir()):
        if beside.is_file() and beside.suffix not in (".py", ".pyc") and not beside.name.startswith("."):
            digest.update(beside.name.encode() + b"\0" + beside.read_bytes())
    return digest.hexdigest()[:16]


def main() -> int:
    """Write build/code/<stage>.txt for every stage; a file whose content stands already is left alone."""
    root = Path()
    for path in sorted((root / "stages").glob("*.py")):
        if path.stem == "__init__":
            continue
        lines = "".join(f"{hash_}  {module}\n" for module, hash_ in closure(root, path.stem).items())
        target = root / "build" / "code" / f"{path.stem}.txt"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
