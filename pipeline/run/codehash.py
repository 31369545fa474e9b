"""A hash of the code that each stage runs, by definition: what a stage does not reach changes nothing of it.

    pipeline/, stages/ -> build/code/<stage>.txt        (`python -m pipeline.run.codehash`, stage code_versions)

From `stages/<s>.py`, which counts whole, it follows the names that code uses: to the top-level functions, classes and
constants of
our two packages that they stand for, through imports of modules, of names and of names handed on by another module. A
line
`hash  module  names` covers the definitions of a module that are reached; a class counts whole. The hash is over syntax
trees without docstrings, positions and empty fields (our own dump: `ast.dump` differs between Python versions).

Always counted, where a module is imported at all: top-level statements that may do something (calls, loops, `if`,
assignments that call our own code, functions under decorators that are not in PLAIN). What cannot be followed counts as
the whole module: a module used as a value (`getattr(module, name)`), a name that it does not define, star imports,
`globals()`, `__getattr__`. Code that names its own file (`__file__`) brings all files of its folder along; the files
that are not Python's (templates) come with every definition beside them.

Left out are the modules of IGNORED: they change no result, so no default of a stage may live in them. What a module's
text gave is remembered in `.work/code.json`. Not seen: modules that a text names, and changes in installed packages.
"""

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from pipeline.run import workdir

PACKAGES = ("pipeline", "stages")
IGNORED = frozenset(
    f"pipeline.run.{name}"
    for name in ("codehash", "config", "cost", "errors", "processes", "registry", "stage", "tracking", "workdir")
)
PLAIN = frozenset(
    {"cache", "contextmanager", "dataclass", "lru_cache", "no_grad", "overload"}
)  # decorators without effects
OWN = FILE, GLOBALS = ("*file", "*globals")  # uses of `__file__` and `globals()`
ALWAYS, MAIN = "*always", "*main"  # names for a module's statements with effects, and for `if __name__ == "__main__"`
MOST_REMEMBERED = 2_000  # modules as they once stood

Function = ast.FunctionDef | ast.AsyncFunctionDef
COMPREHENSION = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def dump(node: object) -> str:
    """A syntax tree as text: type names and non-empty fields only, docstrings dropped."""
    if isinstance(node, ast.AST):
        fields = []
        for name in node._fields:
            value = getattr(node, name, None)
            if name == "body" and isinstance(value, list):
                value = _without_docstrings(node, value)
            if name in ("kind", "type_comment", "type_ignores", "ctx") or value is None or value == []:
                continue
            fields.append(f"{name}={dump(value)}")
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(dump(entry) for entry in node)}]"
    return repr(node)


def _without_docstrings(node: ast.AST, body: list[ast.stmt]) -> list[ast.stmt]:
    """A body without its docstring, and a class's without those of its fields."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return body
    last = len(body) if isinstance(node, ast.ClassDef) else 1
    return [statement for n, statement in enumerate(body) if n >= last or not _is_text(statement)]


def _is_text(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


def module_file(root: Path, module: str) -> Path | None:
    """The file of a module of ours, or None when there is none (a name inside a module)."""
    base = root.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


# -- one module --------------------------------------------------------------------------------------------------------


def read(path: Path, text: str, module: str) -> dict[str, Any]:
    """What the text of a module defines, and which names each definition uses. Raises SyntaxError as Python would.

    "names": {name: [digest, references]}; "imports": {name bound here: dotted name}; "loads": modules imported with
    this one; "opaque": whether it counts whole. A reference is the dotted name of something of ours,
    `pipeline.a.b.name`; it may go on into attributes. The digest covers the references too, so that importing the same
    name from elsewhere counts.
    """
    tree = ast.parse(text, str(path))
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    imports: dict[str, str] = {}
    loads: list[str] = []
    opaque = False
    groups: dict[str, list[ast.stmt]] = {}
    for statement in _without_docstrings(tree, tree.body):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            imports |= bindings(statement, package)
            loads += loaded(statement, package)
            opaque |= isinstance(statement, ast.ImportFrom) and any(alias.name == "*" for alias in statement.names)
        elif not _for_types_alone(statement):
            for name in _defined(statement):
                groups.setdefault(name, []).append(statement)
            for inner in ast.walk(statement):
                if isinstance(statement, ast.If | ast.Try | ast.With) and isinstance(
                    inner, ast.Import | ast.ImportFrom
                ):
                    imports |= bindings(inner, package)
    opaque |= "__getattr__" in groups
    known = imports | {name: f"{module}.{name}" for name in groups if name not in (ALWAYS, MAIN)}
    names: dict[str, list[Any]] = {}
    acting: set[str] = set()
    for name, statements in groups.items():
        uses = {use for statement in statements for use in Uses(known, package).of(statement)}
        digest = hashlib.sha256("\n".join([*map(dump, statements), *sorted(uses)]).encode()).hexdigest()
        names[name] = [digest, sorted(use for use in uses if use.split(".")[0].removeprefix("+") in (*PACKAGES, *OWN))]
        if FILE in uses:
            names[name][1] += _neighbours(statements)
        if name not in (ALWAYS, MAIN) and any(_acts(statement, known, package) for statement in statements):
            acting.add(f"{module}.{name}")
    if acting:
        own, uses = names.get(ALWAYS, ["", []])
        names[ALWAYS] = [own, sorted({*uses, *acting})]
    return {"names": names, "imports": imports, "loads": sorted(set(loads)), "opaque": opaque}


def _neighbours(statements: list[ast.stmt]) -> list[str]:
    """The Python files beside a module that it may start or import by their place: those it names, or all of them."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    if any(isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.path" for node in nodes):
        return ["*.py"]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return sorted(f"*{text}" for text in texts if text.endswith(".py"))


def _for_types_alone(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.If) and isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"
    )


def _defined(statement: ast.stmt) -> list[str]:
    """The names that a top-level statement defines; ALWAYS or MAIN where it is there for what it does."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [statement.name]
        case ast.Assign() | ast.AnnAssign():
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            parts = [
                part
                for target in targets
                for part in (target.elts if isinstance(target, ast.Tuple | ast.List) else [target])
            ]
            if all(isinstance(part, ast.Name) for part in parts):
                return [part.id for part in parts if isinstance(part, ast.Name)]
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return [MAIN]
    inside = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    inside |= {
        node.name
        for node in ast.walk(statement)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    return [ALWAYS, *sorted(inside)]


def _acts(statement: ast.stmt, known: dict[str, str], package: str) -> bool:
    """Whether a definition may do something beyond it when the module is imported: it calls our code, or registers."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return any(_last(one) not in PLAIN for one in statement.decorator_list)
        case ast.Assign() | ast.AnnAssign():
            called = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
            uses = {use for function in called for use in Uses(known, package).of(function)}
            return any(use.split(".")[0] in PACKAGES for use in uses)
    return False


def _last(decorator: ast.expr) -> str:
    """`lru_cache` of `@functools.lru_cache(maxsize=2)`."""
    while isinstance(decorator, ast.Call):
        decorator = decorator.func
    return decorator.attr if isinstance(decorator, ast.Attribute) else ast.unparse(decorator)


def bindings(statement: ast.Import | ast.ImportFrom, package: str) -> dict[str, str]:
    """name bound -> what it stands for, of an import."""
    if isinstance(statement, ast.Import):
        return {
            one.asname or one.name.split(".")[0]: one.name if one.asname else one.name.split(".")[0]
            for one in statement.names
        }
    source = _source(statement, package)
    return {one.asname or one.name: f"{source}.{one.name}" for one in statement.names if one.name != "*"}


def loaded(statement: ast.Import | ast.ImportFrom, package: str) -> list[str]:
    """The modules of ours that an import runs, or names inside of them."""
    if isinstance(statement, ast.Import):
        names = [alias.name for alias in statement.names]
    else:
        source = _source(statement, package)
        names = [source, *(f"{source}.{alias.name}" for alias in statement.names)]
    return [name for name in names if name.split(".")[0] in PACKAGES]


def _source(statement: ast.ImportFrom, package: str) -> str:
    if not statement.level:
        return statement.module or ""
    up = package.split(".")[: len(package.split(".")) - statement.level + 1]
    return ".".join([*up, *([statement.module] if statement.module else [])])


class Uses:
    """The dotted names that code uses of what its module knows. Local names hide the module's, as in Python.

    Annotations of functions and of local variables are left out: nothing runs by them. Those of a class's fields count,
    since configurations are built by them.
    """

    def __init__(self, known: dict[str, str], package: str) -> None:
        self.known, self.package = known, package
        self.found: set[str] = set()

    def of(self, node: ast.AST) -> set[str]:
        """All of them under a node."""
        self._visit(node, [])
        return self.found

    def _visit(self, node: ast.AST, scopes: list[dict[str, str]]) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                self._function(node, scopes)
            case ast.ClassDef():
                for part in (*node.decorator_list, *node.bases, *node.keywords, *node.body):
                    self._visit(part, scopes)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                self._each(ast.iter_child_nodes(node), [*scopes, _bound(node, self.package)])
            case ast.Attribute():
                self._chain(node, scopes)
            case ast.Name():
                self._name(node.id, "", scopes)
            case ast.AnnAssign() if scopes:
                self._each((part for part in (node.target, node.value) if part), scopes)
            case ast.AnnAssign():
                self._annotation(node.annotation, scopes)
                self._each((part for part in (node.target, node.value) if part), scopes)
            case ast.Import() | ast.ImportFrom():
                self.found |= {f"+{name}" for name in loaded(node, self.package)}
            case _:
                self._each(ast.iter_child_nodes(node), scopes)

    def _each(self, nodes: Iterable[ast.AST], scopes: list[dict[str, str]]) -> None:
        for node in nodes:
            self._visit(node, scopes)

    def _function(self, node: Function | ast.Lambda, scopes: list[dict[str, str]]) -> None:
        arguments = node.args
        self._each([*arguments.defaults, *(one for one in arguments.kw_defaults if one)], scopes)
        if not isinstance(node, ast.Lambda):
            self._each(node.decorator_list, scopes)
        own = _bound(node, self.package)
        self._each(node.body if isinstance(node.body, list) else [node.body], [*scopes, own])

    def _annotation(self, node: ast.expr, scopes: list[dict[str, str]]) -> None:
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                try:
                    self._visit(ast.parse(part.value, mode="eval"), scopes)
                except SyntaxError:
                    continue
        self._visit(node, scopes)

    def _chain(self, node: ast.Attribute, scopes: list[dict[str, str]]) -> None:
        rest, inner = [node.attr], node.value
        while isinstance(inner, ast.Attribute):
            rest.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name):
            self._name(inner.id, "".join(f".{part}" for part in reversed(rest)), scopes)
        else:
            self._visit(inner, scopes)

    def _name(self, name: str, rest: str, scopes: list[dict[str, str]]) -> None:
        for scope in reversed(scopes):
            if name in scope:
                if scope[name]:
                    self.found.add(scope[name] + rest)
                return
        if name in self.known:
            self.found.add(self.known[name] + rest)
        elif name in ("globals", "__file__"):
            self.found.add(GLOBALS if name == "globals" else FILE)


def _bound(node: Function | ast.Lambda | ast.AST, package: str) -> dict[str, str]:
    """The names that a function or comprehension binds; those of imports with what they stand for."""
    if isinstance(node, COMPREHENSION):
        return {part.id: "" for one in node.generators for part in ast.walk(one.target) if isinstance(part, ast.Name)}
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    bound = {one.arg: "" for one in every if one}
    outer: set[str] = set()
    for part in _within(node.body if isinstance(node.body, list) else [node.body]):
        match part:
            case ast.Name(ctx=ast.Store() | ast.Del()):
                bound[part.id] = ""
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                bound[part.name] = ""
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                bound[name] = ""
            case ast.MatchMapping(rest=str(name)):
                bound[name] = ""
            case ast.Import() | ast.ImportFrom():
                bound |= bindings(part, package)
            case ast.Global() | ast.Nonlocal():
                outer |= set(part.names)
    return {name: target for name, target in bound.items() if name not in outer}


def _within(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a function's own scope: not those inside of functions and classes in it, nor a comprehension's
    targets.
    """
    for node in nodes:
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, COMPREHENSION):
            yield from (part for part in ast.walk(node) if isinstance(part, ast.NamedExpr))
            yield from (part.target for part in ast.walk(node) if isinstance(part, ast.NamedExpr))
            continue
        yield from _within(ast.iter_child_nodes(node))


# -- a stage -----------------------------------------------------------------------------------------------------------


class Modules:
    """What the modules below `root` define, each read once."""

    def __init__(self, root: Path) -> None:
        self.root, self.memory = root, workdir.Remembered("code.json", MOST_REMEMBERED)
        self.file = cache(partial(module_file, root))
        self._read: dict[str, dict[str, Any]] = {}

    def of(self, name: str) -> dict[str, Any]:
        """`read` of a module, remembered."""
        if name not in self._read:
            path = self.file(name)
            assert path is not None, name
            text = path.read_text(encoding="utf-8")
            self._read[name] = self.memory.get(_key(name, text), partial(read, path, text, name))
        return self._read[name]


class Reach:
    """What a stage reaches in our packages: `reached[module]` are the names of its definitions."""

    def __init__(self, modules: Modules) -> None:
        self.module, self.file = modules.of, modules.file
        self.reached: dict[str, set[str]] = {}
        self._waiting: list[tuple[str, str]] = []

    def load(self, module: str) -> None:
        """Import a module: the packages around it, its statements with effects, and the modules that it imports."""
        waiting = [module]
        while waiting:
            name = waiting.pop()
            if name in self.reached or name in IGNORED or self.file(name) is None:
                continue
            self.reached[name] = set()
            parts = name.split(".")
            waiting += [".".join(parts[:n]) for n in range(1, len(parts))]
            waiting += self.module(name)["loads"]
            if ALWAYS in self.module(name)["names"]:
                self._waiting.append((name, ALWAYS))
            if self.module(name)["opaque"]:
                self.whole(name)

    def whole(self, module: str, *, started: bool = False) -> None:
        """Take all definitions of a module, and where it is `started` what stands under `if __name__ == "__main__"`."""
        self.load(module)
        names = self.module(module)["names"] if module not in IGNORED else ()
        self._waiting += [(module, name) for name in names if started or name != MAIN]

    def follow(self) -> None:
        """Everything that is reached from what was taken."""
        while self._waiting:
            where, name = self._waiting.pop()
            if name in self.reached[where]:
                continue
            self.reached[where].add(name)
            for use in self.module(where)["names"][name][1]:
                if use == GLOBALS:
                    self.whole(where)
                elif use.startswith("+"):
                    self.load(use[1:])
                elif use.startswith("*") and use != FILE:
                    self._beside(where, use[1:])
                else:
                    self._use(use)

    def _beside(self, module: str, name: str) -> None:
        """Take Python files of a module's folder, which may be started too: all of them for `.py`, or one."""
        path = self.file(module)
        assert path is not None
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for file in sorted(path.parent.glob("*.py")):
            if name in (".py", file.name) and file.stem != "__init__":
                self.whole(f"{package}.{file.stem}", started=True)

    def _use(self, dotted: str) -> None:
        """Follow a name of ours to the definition that it stands for."""
        for _ in range(20):  # names handed on by modules
            parts = dotted.split(".")
            length = next((n for n in range(len(parts), 0, -1) if self.file(".".join(parts[:n]))), 0)
            module, rest = ".".join(parts[:length]), parts[length:]
            if not length or module in IGNORED:
                return
            self.load(module)
            read_ = self.module(module)
            if rest and rest[0] in read_["names"]:
                self._waiting.append((module, rest[0]))
                return
            if rest and rest[0] in read_["imports"]:
                dotted = ".".join([read_["imports"][rest[0]], *rest[1:]])
                if dotted.split(".")[0] in PACKAGES:
                    continue
                return
            if rest and rest[0] in ("__name__", "__doc__"):
                return
            if module not in PACKAGES or rest:
                self.whole(module)
            return
        raise AssertionError(f"{dotted}: imports in a circle")


def closures(root: Path, stages: Iterable[str]) -> dict[str, dict[str, tuple[str, list[str]]]]:
    """stage -> module -> 16 hex digits and the names they cover, for all that `stages/<stage>.py` reaches. Raises
    SyntaxError.
    """
    modules = Modules(root)
    found = {stage: _closure(modules, stage) for stage in stages}
    modules.memory.save()
    return found


def _closure(modules: Modules, stage: str) -> dict[str, tuple[str, list[str]]]:
    reach = Reach(modules)
    reach.whole(f"stages.{stage}", started=True)
    reach.follow()
    found: dict[str, tuple[str, list[str]]] = {}
    for module, names in sorted(reach.reached.items()):
        if names:
            path = modules.file(module)
            assert path is not None
            digest = hashlib.sha256()
            for name in sorted(names):
                digest.update(f"{name}\0{modules.of(module)['names'][name][0]}\0".encode())
            for beside in _beside(path):
                digest.update(beside.name.encode() + b"\0" + beside.read_bytes())
            found[module] = (digest.hexdigest()[:16], sorted(names))
    return found


def _beside(path: Path) -> list[Path]:
    """The files in a module's folder that are not Python's: templates."""
    found = sorted(path.parent.iterdir())
    return [p for p in found if p.is_file() and p.suffix not in (".py", ".pyc") and not p.name.startswith(".")]


def _key(module: str, text: str) -> str:
    """sha256 of all that `read` gives hangs on."""
    parts = [_reader(), module.encode(), text.encode()]
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest()


@cache
def _reader() -> bytes:
    """What reads: another version of this file, or of Python, remembers anew."""
    return sys.version.encode() + Path(__file__).read_bytes()


def main() -> int:
    """Write build/code/<stage>.txt for every stage; a file whose content stands already is left alone."""
    root = Path()
    stages = [path.stem for path in sorted((root / "stages").glob("*.py")) if path.stem != "__init__"]
    for stage, modules in closures(root, stages).items():
        lines = "".join(f"{hash_}  {module}  {' '.join(names)}\n" for module, (hash_, names) in modules.items())
        target = root / "build" / "code" / f"{stage}.txt"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
