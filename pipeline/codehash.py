"""A hash of the code that each stage runs, so that a comment, a docstring or the server retrains nothing.

    pipeline/, stages/ -> build/code/<stage>.txt        (`python -m pipeline.codehash`, stage code_versions)

For `stages/<s>.py` it follows static imports inside the two packages and writes sorted `hash  module` lines. A module's
hash is over its syntax tree without docstrings, positions and empty fields (our own dump: `ast.dump` differs between
Python versions) and over the non-Python files beside it (templates). Left out are the modules of IGNORED: they change no
result, so no default of a stage may live in them. What a module's text gave is remembered in `.work/code.json`: parsing the
hundred modules of a stage takes half a second.

Not seen: imports whose name is computed at run time, and changes in installed packages.
"""

import ast
import hashlib
import sys
from functools import cache, partial
from pathlib import Path

from pipeline import work

PACKAGES = ("pipeline", "stages")
IGNORED = frozenset(
    f"pipeline.{name}"
    for name in (
        "codehash",
        "errors",
        "launch",
        "params",
        "processes",
        "registry",
        "running",
        "tracking",
        "usage",
        "work",
    )
)
MOST_REMEMBERED = 2_000  # modules as they once stood


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


def closure(root: Path, stage: str) -> dict[str, str]:
    """module -> 16 hex digits, for everything that `stages/<stage>.py` runs. Raises SyntaxError as Python would."""
    start = f"stages.{stage}"
    seen: dict[str, str] = {}
    waiting = [start, "stages"]
    memory = work.Remembered("code.json", MOST_REMEMBERED)
    while waiting:
        module = waiting.pop()
        if module in seen or module in IGNORED:
            continue
        path = module_file(root, module)
        assert path is not None, module
        text = path.read_text(encoding="utf-8")
        seen[module], names = memory.get(_key(path, text), partial(_read, path, text))
        waiting += [name for name in names if module_file(root, name) is not None]
    memory.save()
    return dict(sorted(seen.items()))


def _read(path: Path, text: str) -> tuple[str, list[str]]:
    """The hash of a module, and the names of ours that it imports at any depth, with the packages around them."""
    tree = ast.parse(text, str(path))
    digest = hashlib.sha256(dump(tree).encode())
    for beside in _beside(path):
        digest.update(beside.name.encode() + b"\0" + beside.read_bytes())
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    ours = {name for name in names if name.split(".")[0] in PACKAGES}
    parents = {".".join(name.split(".")[:n]) for name in ours for n in range(1, name.count(".") + 1)}
    return digest.hexdigest()[:16], sorted(ours | parents)


def _beside(path: Path) -> list[Path]:
    """The files in a module's folder that are not Python's: templates."""
    found = sorted(path.parent.iterdir())
    return [p for p in found if p.is_file() and p.suffix not in (".py", ".pyc") and not p.name.startswith(".")]


def _key(path: Path, text: str) -> str:
    """sha256 of all that `_read` gives hangs on."""
    parts = [_reader(), text.encode(), *(part for p in _beside(path) for part in (p.name.encode(), p.read_bytes()))]
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest()


@cache
def _reader() -> bytes:
    """What reads: another version of this file, or of Python, remembers anew."""
    return sys.version.encode() + Path(__file__).read_bytes()


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
