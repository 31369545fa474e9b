"""Hashes the code each stage runs, per definition: code that a stage cannot reach does not affect its hash.

    pipeline/, stages/ -> build/code/<stage>.txt        (`python -m pipeline.run.codehash`, stage code_versions)

`stages/<s>.py` is hashed in full. From there the hash follows the names used by the code to the top-level functions,
classes and constants of our two packages, through module imports, name imports and re-exports. Each line
`hash  module  names` covers the reached definitions of one module; a class is hashed in full. The hash is
computed over syntax trees without docstrings, source positions or empty fields (with our own dump: `ast.dump`
differs between Python versions).

Top-level statements with possible side effects are hashed wherever their module is imported: calls, loops, `if`,
assignments that call our own code, functions with decorators that are not in PLAIN_DECORATORS. A module is hashed in
full if its names cannot be followed: it is used as a value (`getattr(module, name)`) or for a name that it does not
define, or it has star imports, `globals()` or `__getattr__`. Code that uses `__file__` pulls in the Python files in
its folder. Any other file in a folder (a template, a word list) is hashed with the definitions in that folder that
contain its name as a string; a file that nothing names is hashed with every definition in the folder. `wings.each("x")`
uses the definition `x` of every `pipeline/*/wing.py` that has one; with an argument that is not a string literal, it
uses all of these modules in full. A module used as a value must define what is accessed: the names it imports are not
followed.

The modules in IGNORED are skipped: they do not affect results, so no stage default may live in them. Module summaries
are cached in `.work/code.json`. Not covered: modules named only in a string, and changes in installed packages.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import TypedDict

from pipeline.run import workdir
from pipeline.run.errors import ConfigError

PACKAGES = ("pipeline", "stages")
IGNORED = frozenset(
    f"pipeline.run.{name}"
    for name in ("codehash", "config", "cost", "errors", "mlflow_store", "processes", "stage", "tracking", "workdir")
)
PLAIN_DECORATORS = frozenset({"cache", "contextmanager", "dataclass", "lru_cache", "no_grad", "overload"})  # no effects
FILE, GLOBALS = "*file", "*globals"  # uses of `__file__` and `globals()`
WINGS = "pipeline.wings.each"  # calls with a string argument become `pipeline.wings.each:string`
ALWAYS, MAIN = "*always", "*main"  # names for statements with side effects, and for `if __name__ == "__main__"`
FILE_NAME = re.compile(r"[\w-]+\.\w+")
MAX_CACHED = 2_000  # module versions

Function = ast.FunctionDef | ast.AsyncFunctionDef
COMPREHENSION = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def closures(root: Path, stages: Iterable[str]) -> dict[str, dict[str, tuple[str, list[str]]]]:
    """stage -> module -> (16 hex digits, the names they cover), for everything that `stages/<stage>.py` reaches.

    Raises SyntaxError.
    """
    modules = ModuleTable(root)
    result = {stage: _stage_closure(modules, stage) for stage in stages}
    modules.cache.save()
    return result


def _stage_closure(modules: ModuleTable, stage: str) -> dict[str, tuple[str, list[str]]]:
    reach = Reach(modules)
    reach.add_module(f"stages.{stage}", started=True)
    reach.follow()
    closure: dict[str, tuple[str, list[str]]] = {}
    for module, names in sorted(reach.reached.items()):
        if names:
            path = modules.file(module)
            assert path is not None
            digest = hashlib.sha256()
            for name in sorted(names):
                digest.update(f"{name}\0{modules.summary(module)['names'][name][0]}\0".encode())
            for file in _data_files(modules, module, path, names):
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
            closure[module] = (digest.hexdigest()[:16], sorted(names))
    return closure


def _data_files(modules: ModuleTable, module: str, path: Path, names: Iterable[str]) -> list[Path]:
    """The non-Python files in a module's folder that are hashed with these definitions."""
    files = [
        p
        for p in sorted(path.parent.iterdir())
        if p.is_file() and p.suffix not in (".py", ".pyc") and not p.name.startswith(".")
    ]
    if not files:
        return []
    mine = {text for name in names for text in modules.summary(module)["files"].get(name, ())}
    named = modules.files_named_in(module if path.name == "__init__.py" else module.rpartition(".")[0])
    return [file for file in files if file.name in mine or file.name not in named]


class Reach:
    """What a stage reaches in our packages: `reached[module]` is the set of names of its reached definitions."""

    def __init__(self, modules: ModuleTable) -> None:
        self.summary, self.file, self.wings = modules.summary, modules.file, modules.wings
        self.reached: dict[str, set[str]] = {}
        self._queue: list[tuple[str, str]] = []  # (module, definition name) still to follow

    def load(self, module: str) -> None:
        """Follow the import of a module: parent packages, statements with side effects, the modules that it imports."""
        queue = [module]
        while queue:
            name = queue.pop()
            if name in self.reached or name in IGNORED or self.file(name) is None:
                continue
            self.reached[name] = set()
            parts = name.split(".")
            queue += [".".join(parts[:n]) for n in range(1, len(parts))]
            queue += self.summary(name)["loads"]
            if ALWAYS in self.summary(name)["names"]:
                self._queue.append((name, ALWAYS))
            if self.summary(name)["opaque"]:
                self.add_module(name)

    def add_module(self, module: str, *, started: bool = False) -> None:
        """Add all definitions of a module; if `started`, its `if __name__ == "__main__"` block too."""
        self.load(module)
        names = self.summary(module)["names"] if module not in IGNORED else ()
        self._queue += [(module, name) for name in names if started or name != MAIN]

    def follow(self) -> None:
        """Add everything reachable from the definitions in the queue."""
        while self._queue:
            module, name = self._queue.pop()
            if name in self.reached[module]:
                continue
            self.reached[module].add(name)
            for use in self.summary(module)["names"][name][1]:
                if use == GLOBALS:
                    self.add_module(module)
                elif use.startswith(WINGS):
                    self._add_offers(use.partition(":")[2])
                elif use.startswith("+"):
                    self.load(use[1:])
                elif use.startswith("*") and use != FILE:
                    self._add_neighbors(module, use[1:])
                else:
                    self._add_use(use)

    def _add_neighbors(self, module: str, name: str) -> None:
        """Add the Python file `name` in a module's folder, or all of them for `.py`; they may be run as scripts."""
        path = self.file(module)
        assert path is not None
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for file in sorted(path.parent.glob("*.py")):
            if name in (".py", file.name) and file.stem != "__init__":
                self.add_module(f"{package}.{file.stem}", started=True)

    def _add_offers(self, offer: str) -> None:
        """Add what the wings offer under the name `offer`; if it is empty (not known), everything they offer."""
        self._add_use("pipeline.wings.each")
        for wing in self.wings:
            self.load(wing)
            if not offer:
                self.add_module(wing)
            elif offer in self.summary(wing)["names"]:
                self._queue.append((wing, offer))

    def _add_use(self, dotted: str) -> None:
        """Follow a dotted name in our packages to its definition."""
        for _ in range(20):  # re-exports
            parts = dotted.split(".")
            length = next((n for n in range(len(parts), 0, -1) if self.file(".".join(parts[:n]))), 0)
            module, rest = ".".join(parts[:length]), parts[length:]
            if not length or module in IGNORED:
                return
            self.load(module)
            summary = self.summary(module)
            if rest and rest[0] in summary["names"]:
                self._queue.append((module, rest[0]))
                return
            if rest and rest[0] in summary["imports"]:
                dotted = ".".join([summary["imports"][rest[0]], *rest[1:]])
                if dotted.split(".")[0] in PACKAGES:
                    continue
                return
            if rest and rest[0] in ("__name__", "__doc__"):
                return
            if module not in PACKAGES or rest:
                self.add_module(module)
            return
        raise AssertionError(f"{dotted}: circular import")


class ModuleTable:
    """What the modules below `root` define; each module is read only once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache = workdir.JsonCache("code.json", MAX_CACHED)
        self.file = cache(partial(module_file, root))
        self.wings = sorted(f"pipeline.{path.parent.name}.wing" for path in root.glob("pipeline/*/wing.py"))
        self._summaries: dict[str, Summary] = {}

    def summary(self, name: str) -> Summary:
        """`summarize` of a module, cached."""
        if name not in self._summaries:
            path = self.file(name)
            assert path is not None, name
            text = path.read_text(encoding="utf-8")
            self._summaries[name] = self.cache.get(_cache_key(name, text), partial(summarize, path, text, name))
        return self._summaries[name]

    def files_named_in(self, package: str) -> set[str]:
        """The file names that occur as strings in a package's own modules."""
        folder = self.root.joinpath(*package.split("."))
        modules = [package, *(f"{package}.{path.stem}" for path in folder.glob("*.py") if path.stem != "__init__")]
        return {
            text
            for module in modules
            if self.file(module)
            for texts in self.summary(module)["files"].values()
            for text in texts
        }


def module_file(root: Path, module: str) -> Path | None:
    """The file of one of our modules, or None if it is not a module but a name inside one."""
    base = root.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def _cache_key(module: str, text: str) -> str:
    """sha256 of everything the result of `summarize` depends on."""
    parts = [_reader_version(), module.encode(), text.encode()]
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest()


@cache
def _reader_version() -> bytes:
    """The version of this file and of Python: a change in either invalidates the cache."""
    return sys.version.encode() + Path(__file__).read_bytes()


class Summary(TypedDict):
    """What a module defines; stored as JSON in `.work/code.json`, where tuples become lists.

    A reference is a dotted name in our packages, `pipeline.a.b.name`, possibly followed by attributes. The digest of a
    definition covers its references too, so importing the same name from elsewhere changes it.
    """

    names: dict[str, tuple[str, list[str]]]  # definition -> (digest, references)
    imports: dict[str, str]  # name bound here -> dotted name
    files: dict[str, list[str]]  # definition -> the file names among its strings
    loads: list[str]  # modules that importing this one imports
    opaque: bool  # whether the module is hashed in full


@cache
def summarize(path: Path, text: str, module: str) -> Summary:
    """What a module's source defines, and which names each definition uses. Raises SyntaxError as Python would."""
    tree = ast.parse(text, str(path))
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    imports: dict[str, str] = {}
    loads: list[str] = []
    opaque = False
    groups: dict[str, list[ast.stmt]] = {}
    for statement in _without_docstrings(tree, tree.body):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            imports |= bindings(statement, package)
            loads += imported_modules(statement, package)
            opaque |= isinstance(statement, ast.ImportFrom) and any(alias.name == "*" for alias in statement.names)
        elif not _is_type_checking_block(statement):
            for name in _defined_names(statement):
                groups.setdefault(name, []).append(statement)
            for inner in ast.walk(statement):
                if isinstance(statement, ast.If | ast.Try | ast.With) and isinstance(
                    inner, ast.Import | ast.ImportFrom
                ):
                    imports |= bindings(inner, package)
    opaque |= "__getattr__" in groups
    known = imports | {name: f"{module}.{name}" for name in groups if name not in (ALWAYS, MAIN)}
    names: dict[str, tuple[str, list[str]]] = {}
    files: dict[str, list[str]] = {}
    with_effects: set[str] = set()
    roots = (*PACKAGES, FILE, GLOBALS)
    for name, statements in groups.items():
        uses = {use for statement in statements for use in NameUses(known, package).collect(statement)}
        digest = hashlib.sha256("\n".join([*map(dump, statements), *sorted(uses)]).encode()).hexdigest()
        references = sorted(use for use in uses if use.split(".")[0].removeprefix("+") in roots)
        if FILE in uses:
            references += _neighbor_patterns(statements)
        names[name] = (digest, references)
        if texts := sorted(text for text in _texts(statements) if FILE_NAME.fullmatch(text)):
            files[name] = texts
        if name not in (ALWAYS, MAIN) and any(_has_effects(statement, known, package) for statement in statements):
            with_effects.add(f"{module}.{name}")
    if with_effects:
        digest, references = names.get(ALWAYS, ("", []))
        names[ALWAYS] = (digest, sorted({*references, *with_effects}))
    return {"names": names, "imports": imports, "files": files, "loads": sorted(set(loads)), "opaque": opaque}


def _neighbor_patterns(statements: list[ast.stmt]) -> list[str]:
    """Patterns for files that a module may run or import by path from its folder: those it names, or all of them."""
    nodes = (node for statement in statements for node in ast.walk(statement))
    if any(isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.path" for node in nodes):
        return ["*.py"]
    return sorted(f"*{text}" for text in _texts(statements) if text.endswith(".py"))


def _texts(statements: list[ast.stmt]) -> list[str]:
    """The strings in these statements."""
    nodes = (node for statement in statements for node in ast.walk(statement))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def _is_type_checking_block(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.If) and isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"
    )


def _defined_names(statement: ast.stmt) -> list[str]:
    """The names that a top-level statement defines, and ALWAYS if it has side effects; MAIN for the main block."""
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
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {
        node.name
        for node in ast.walk(statement)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    return [ALWAYS, *sorted(names)]


def _has_effects(statement: ast.stmt, known: dict[str, str], package: str) -> bool:
    """Whether a definition may have side effects on import, by calling our code or registering itself."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return any(_decorator_name(decorator) not in PLAIN_DECORATORS for decorator in statement.decorator_list)
        case ast.Assign() | ast.AnnAssign():
            callees = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
            uses = {use for callee in callees for use in NameUses(known, package).collect(callee)}
            return any(use.split(".")[0] in PACKAGES for use in uses)
    return False


def _decorator_name(decorator: ast.expr) -> str:
    """A decorator's name: `lru_cache` for `@functools.lru_cache(maxsize=2)`."""
    while isinstance(decorator, ast.Call):
        decorator = decorator.func
    return decorator.attr if isinstance(decorator, ast.Attribute) else ast.unparse(decorator)


def bindings(statement: ast.Import | ast.ImportFrom, package: str) -> dict[str, str]:
    """name that an import binds -> what it refers to."""
    if isinstance(statement, ast.Import):
        return {
            alias.asname or alias.name.split(".")[0]: alias.name if alias.asname else alias.name.split(".")[0]
            for alias in statement.names
        }
    source = _source(statement, package)
    return {alias.asname or alias.name: f"{source}.{alias.name}" for alias in statement.names if alias.name != "*"}


def imported_modules(statement: ast.Import | ast.ImportFrom, package: str) -> list[str]:
    """The modules in our packages that an import runs; may include names inside them."""
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


class NameUses:
    """The dotted names that code uses, if they are bound in its module. Local names shadow the module's, as in Python.

    Annotations of functions and local variables are skipped: they have no effect at run time. Annotations of class
    fields are included, since configurations are built from them.
    """

    def __init__(self, known: dict[str, str], package: str) -> None:
        self.known, self.package = known, package
        self.uses: set[str] = set()

    def collect(self, node: ast.AST) -> set[str]:
        """The names used under a node and under all nodes collected before it."""
        self._visit(node, [])
        return self.uses

    def _visit(self, node: ast.AST, scopes: list[dict[str, str]]) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                self._visit_function(node, scopes)
            case ast.ClassDef():
                for part in (*node.decorator_list, *node.bases, *node.keywords, *node.body):
                    self._visit(part, scopes)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                self._visit_all(ast.iter_child_nodes(node), [*scopes, _local_names(node, self.package)])
            case ast.Call(func=ast.Attribute() | ast.Name() as func, args=[ast.Constant(value=str(offer))]) if (
                self._is_offers(func, scopes)
            ):
                self.uses.add(f"{WINGS}:{offer}")
            case ast.Attribute():
                self._visit_attribute(node, scopes)
            case ast.Name():
                self._add_name(node.id, "", scopes)
            case ast.AnnAssign() if scopes:
                self._visit_all((part for part in (node.target, node.value) if part), scopes)
            case ast.AnnAssign():
                self._visit_annotation(node.annotation, scopes)
                self._visit_all((part for part in (node.target, node.value) if part), scopes)
            case ast.Import() | ast.ImportFrom():
                self.uses |= {f"+{name}" for name in imported_modules(node, self.package)}
            case _:
                self._visit_all(ast.iter_child_nodes(node), scopes)

    def _is_offers(self, func: ast.expr, scopes: list[dict[str, str]]) -> bool:
        """Whether an expression is `wings.each`."""
        inner = NameUses(self.known, self.package)
        inner._visit(func, scopes)
        return inner.uses == {WINGS}

    def _visit_all(self, nodes: Iterable[ast.AST], scopes: list[dict[str, str]]) -> None:
        for node in nodes:
            self._visit(node, scopes)

    def _visit_function(self, node: Function | ast.Lambda, scopes: list[dict[str, str]]) -> None:
        arguments = node.args
        self._visit_all([*arguments.defaults, *(default for default in arguments.kw_defaults if default)], scopes)
        if not isinstance(node, ast.Lambda):
            self._visit_all(node.decorator_list, scopes)
        local_names = _local_names(node, self.package)
        self._visit_all(node.body if isinstance(node.body, list) else [node.body], [*scopes, local_names])

    def _visit_annotation(self, node: ast.expr, scopes: list[dict[str, str]]) -> None:
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                try:
                    self._visit(ast.parse(part.value, mode="eval"), scopes)
                except SyntaxError:
                    continue
        self._visit(node, scopes)

    def _visit_attribute(self, node: ast.Attribute, scopes: list[dict[str, str]]) -> None:
        rest, inner = [node.attr], node.value
        while isinstance(inner, ast.Attribute):
            rest.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name):
            self._add_name(inner.id, "".join(f".{part}" for part in reversed(rest)), scopes)
        else:
            self._visit(inner, scopes)

    def _add_name(self, name: str, rest: str, scopes: list[dict[str, str]]) -> None:
        for scope in reversed(scopes):
            if name in scope:
                if scope[name]:
                    self.uses.add(scope[name] + rest)
                return
        if name in self.known:
            self.uses.add(self.known[name] + rest)
        elif name in ("globals", "__file__"):
            self.uses.add(GLOBALS if name == "globals" else FILE)


def _local_names(node: Function | ast.Lambda | ast.AST, package: str) -> dict[str, str]:
    """The names that a function or comprehension binds; imported names map to what they refer to."""
    if isinstance(node, COMPREHENSION):
        return {
            part.id: ""
            for generator in node.generators
            for part in ast.walk(generator.target)
            if isinstance(part, ast.Name)
        }
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    arguments = node.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    bound = {parameter.arg: "" for parameter in parameters if parameter}
    outer: set[str] = set()
    for part in _scope_nodes(node.body if isinstance(node.body, list) else [node.body]):
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


def _scope_nodes(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a function's own scope, without those inside nested functions and classes or the targets of
    comprehensions.
    """
    for node in nodes:
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, COMPREHENSION):
            yield from (part for part in ast.walk(node) if isinstance(part, ast.NamedExpr))
            yield from (part.target for part in ast.walk(node) if isinstance(part, ast.NamedExpr))
            continue
        yield from _scope_nodes(ast.iter_child_nodes(node))


def dump(node: object) -> str:
    """A syntax tree as text: type names and non-empty fields only, without docstrings."""
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
    """A body without its docstring and, for a class, without its field docstrings."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return body
    last = len(body) if isinstance(node, ast.ClassDef) else 1
    return [statement for n, statement in enumerate(body) if n >= last or not _is_text(statement)]


def _is_text(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


def main() -> int:
    """Write build/code/<stage>.txt for every stage."""
    root = Path()
    stages = [path.stem for path in sorted((root / "stages").glob("*.py")) if path.stem != "__init__"]
    try:
        found = closures(root, stages)
    except SyntaxError as error:
        sys.stderr.write(f"{error.filename}:{error.lineno}: {error.msg}; fix the file\n")
        return ConfigError.exit_code
    for stage, modules in found.items():
        lines = "".join(f"{hash_}  {module}  {' '.join(names)}\n" for module, (hash_, names) in modules.items())
        target = root / "build" / "code" / f"{stage}.txt"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
