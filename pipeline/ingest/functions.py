"""Turn the functions of a repository into programming tasks: their code, their dependencies, and mutants.

    ParsedFiles(files, name)
    .functions(path)            -> the top-level functions that could be tasks, and why the others cannot be
    .context(path, function)    -> one program with everything the function needs, minus its body
    mutants(function)           -> versions of its source, each changed in one place

The context is a slice of the module: the statements that bind the names the function reads and, transitively, the names
that those statements read; docstrings and function annotations are removed. Other modules of the repository are sliced
the same way; each is built in memory and registered in `sys.modules` before it is imported. So a candidate needs no
file, and it cannot see any part of the function's own body. The function itself is replaced by a stub, because tables
may refer to it; the candidate, appended to the context, redefines it.

Not guaranteed: that a slice behaves like the module (names created through `globals()`, stateful decorators, order of
side effects). Callers that build tasks must first run the function's own body on the slice.
"""

import ast
import copy
import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pipeline.ingest.repository import Import, Modules, imports_of
from pipeline.run.errors import DataError

MOST_MUTANTS = 12
CACHES = ("cache", "lru_cache")  # decorators that do not change results
Function = ast.FunctionDef
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
FUTURE = "from __future__ import annotations\n"  # so that a candidate's annotations are not evaluated
HEADER = """\
import sys as _sys, types as _types
for _name, _is_package in {names!r}:
    _sys.modules[_name] = _types.ModuleType(_name)
    if _is_package:
        _sys.modules[_name].__path__ = []
    _above, _, _last = _name.rpartition(".")
    if _above:
        setattr(_sys.modules[_above], _last, _sys.modules[_name])
for _name, _source in {sources!r}:
    exec(compile(_source, _name, "exec", dont_inherit=True), _sys.modules[_name].__dict__)
"""


class Unsliceable(DataError):
    """A function's context cannot be determined; the message explains why."""


@dataclass(frozen=True)
class MinedTask:
    """A function that could be a task."""

    path: str
    name: str
    signature: str  # `name(a, b=1)`, as written
    docstring: str
    source: str  # of the function, as written
    node: Function


@dataclass
class _Module:
    """A file and its top-level bindings."""

    path: str
    tree: ast.Module
    text: str
    binds: dict[str, list[int]] = field(default_factory=dict)  # name -> indices of the statements that bind it
    stars: list[str] = field(default_factory=list)  # files imported with *
    imports: dict[str, list[tuple[Import, list[str]]]] = field(default_factory=dict)  # bound name -> (import, files)


class ParsedFiles:
    """The parsed files of a repository."""

    def __init__(self, files: Mapping[str, str], name: str) -> None:
        """`files`: path -> text. Files that do not parse are left out and listed in `broken` with the reason."""
        self.broken: dict[str, str] = {}
        self.modules = Modules(files, name)
        self._files: dict[str, _Module] = {}
        for path, text in files.items():
            try:
                tree = ast.parse(text)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                self.broken[path] = f"is not valid Python for this version: {getattr(error, 'msg', error)}"
                continue
            self._files[path] = self._module(path, tree, text)

    def _module(self, path: str, tree: ast.Module, text: str) -> _Module:
        module = _Module(path, tree, text)
        for number, node in enumerate(tree.body):
            for name in _bound(node):
                module.binds.setdefault(name, []).append(number)
        for one in imports_of(tree):
            targets = self.modules.targets(path, one)
            module.imports.setdefault(one.bound, []).append((one, targets))
            if one.bound == "*" and targets:
                module.stars.append(targets[0])
        return module

    def functions(self, path: str) -> tuple[list[MinedTask], dict[str, str]]:
        """The functions of a file that could be tasks, and name -> reason for those that cannot be."""
        tasks, others = [], dict[str, str]()
        module = self._files.get(path)
        for node in module.tree.body if module else []:
            if isinstance(node, ast.AsyncFunctionDef):
                others[node.name] = "is asynchronous"
            elif isinstance(node, ast.FunctionDef):
                assert module is not None
                if reason := _unfit(node, module):
                    others[node.name] = reason
                else:
                    source = "\n".join(module.text.splitlines()[node.lineno - 1 : node.end_lineno])
                    signature = f"{node.name}({ast.unparse(_bare(node).args)})"
                    tasks.append(MinedTask(path, node.name, signature, ast.get_docstring(node) or "", source, node))
        return tasks, others

    def context(self, path: str, name: str) -> str:
        """The program that candidates for the function are appended to. Raises Unsliceable."""
        needed: dict[str, set[int]] = {}
        pending = deque([(path, read) for read in _read(self._function(path, name))])
        seen = {(path, name), *pending}
        while pending:
            where, read = pending.popleft()
            for other in self._require(where, read, needed):
                if other not in seen:
                    seen.add(other)
                    pending.append(other)
        reads: dict[str, set[str]] = {}
        for where, read in seen:
            reads.setdefault(where, set()).add(read)
        own = FUTURE + self._sliced(path, needed.pop(path, set()), reads[path], stub=name)
        others = [file for file in self._in_order(needed) if needed[file]]
        if not others:
            return own
        names: dict[str, bool] = {}
        for file in others:
            module = self.modules.name_of(file)
            parts = module.split(".")
            for depth in range(1, len(parts)):
                names[".".join(parts[:depth])] = True
            names.setdefault(module, file.endswith("__init__.py"))
        sources = [
            (self.modules.name_of(file), FUTURE + self._sliced(file, needed[file], reads[file])) for file in others
        ]
        ordered = sorted(names.items(), key=lambda pair: (pair[0].count("."), pair[0]))
        return FUTURE + HEADER.format(names=ordered, sources=sources) + own.removeprefix(FUTURE)

    def _function(self, path: str, name: str) -> Function:
        found = [n for n in self._files[path].tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
        return _bare(found[-1])

    def _require(self, path: str, name: str, needed: dict[str, set[int]]) -> Iterator[tuple[str, str]]:
        """Add to `needed` the statements that bind a name in a file; yield the names that these statements read."""
        module = self._files.get(path)
        if module is None:
            raise Unsliceable(f"needs {path}, which {self.broken.get(path, 'does not exist')}")
        statements = needed.setdefault(path, set())
        found = module.binds.get(name, [])
        if not found:
            for star in module.stars:
                if star in self._files and name in self._files[star].binds:
                    statements |= {n for n, node in enumerate(module.tree.body) if _is_star(node)}
                    yield star, name
            return
        for number in found:
            node = module.tree.body[number]
            yield from self._targets(path, name)
            if number in statements:
                continue
            statements.add(number)
            if not isinstance(node, ast.Import | ast.ImportFrom):
                yield from ((path, read) for read in _read(_lean(node)) if read != name)
                for inner in ast.walk(node):  # imports in functions and in `try`
                    if isinstance(inner, ast.Import | ast.ImportFrom):
                        for alias in inner.names:
                            yield from self._targets(path, alias.asname or alias.name.split(".")[0])

    def _targets(self, path: str, bound: str) -> Iterator[tuple[str, str]]:
        """The names in other files that a bound name refers to, if it is imported."""
        module = self._files[path]
        for one, targets in module.imports.get(bound, []):
            for target in targets:
                if target not in self._files:
                    raise Unsliceable(f"needs {target}, which {self.broken.get(target, 'does not exist')}")
                is_module = one.name is None or self.modules.name_of(target).endswith(f".{one.name}")
                if one.name is not None and not (is_module and one.name not in self._files[target].binds):
                    yield target, one.name
                    continue
                yield from ((target, attribute) for attribute in self._attributes(module, bound))

    def _attributes(self, module: _Module, bound: str) -> set[str]:
        """The attributes read from a module that is imported as a whole."""
        found: set[str] = set()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute):
                chain = [node.attr]
                value = node.value
                while isinstance(value, ast.Attribute):
                    chain.append(value.attr)
                    value = value.value
                if isinstance(value, ast.Name) and value.id == bound:
                    found |= set(chain)
        return found

    def _in_order(self, needed: Mapping[str, set[int]]) -> list[str]:
        """The needed files, each after the files it imports, except within cycles."""
        order: list[str] = []

        def visit(path: str, above: frozenset[str]) -> None:
            if path in order or path in above:
                return
            for pairs in self._files[path].imports.values():
                for _, targets in pairs:
                    for target in targets:
                        if target in needed and target != path:
                            visit(target, above | {path})
            order.append(path)

        for path in sorted(needed):
            visit(path, frozenset())
        return order

    def _sliced(self, path: str, statements: set[int], reads: set[str], stub: str | None = None) -> str:
        """The source of these statements; repository imports use full names and import only the names in `reads`."""
        module = self._files[path]
        numbers = set(statements)
        if stub is not None:
            numbers |= set(module.binds[stub])
        roots = {name for number in numbers for name in _bound(module.tree.body[number])}
        lines = []
        for number, node in enumerate(module.tree.body):
            is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
            if is_future or (number not in numbers and not (_changes(node) & roots)):
                continue
            node = _lean(node)
            if isinstance(node, ast.Import | ast.ImportFrom) and not _is_star(node):
                node.names = [one for one in node.names if (one.asname or one.name.split(".")[0]) in reads]
            if isinstance(node, ast.FunctionDef) and node.name == stub:
                node.decorator_list = []
                node.body = [ast.parse("raise NotImplementedError").body[0]]
            node = _Absolute(self.modules, path).visit(node)
            lines.append(ast.unparse(ast.fix_missing_locations(node)))
        return "\n".join(lines) + "\n"


class _Absolute(ast.NodeTransformer):
    """Rewrites imports within the repository to the full names of its in-memory modules."""

    def __init__(self, modules: Modules, path: str) -> None:
        self.modules, self.path = modules, path

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        one = Import(node.module or "", node.level, node.names[0].name, "", True)
        module = self.modules.targets(self.path, Import(one.module, one.level, None, "", True)) if node.module else []
        if module:
            return ast.ImportFrom(self.modules.name_of(module[0]), node.names, 0)
        if node.level:  # from . import a
            above = self.modules.name_of(self.path).split(".")
            cut = node.level - self.path.endswith("__init__.py")
            parts = above[: len(above) - cut] + (node.module.split(".") if node.module else [])
            return ast.ImportFrom(".".join(parts), node.names, 0)
        return node


def _unfit(node: Function, module: _Module) -> str:
    """The reason why a function cannot be a task; "" if it can."""
    if node.name.startswith("test"):
        return "is a test"
    if any(_name_of(one) not in CACHES for one in node.decorator_list):
        return "is decorated"
    if len(module.binds.get(node.name, [])) > 1:
        return "is defined more than once"
    if any(isinstance(inner, ast.Yield | ast.YieldFrom | ast.Await) for inner in ast.walk(node)):
        return "is a generator"
    if any(isinstance(inner, ast.Global | ast.Nonlocal) for inner in ast.walk(node)):
        return "changes globals"
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not body or all(isinstance(part, ast.Pass | ast.Raise) for part in body):
        return "has no body"
    return ""


def _bound(node: ast.stmt) -> set[str]:
    """The names that a top-level statement binds, including in its branches."""
    if isinstance(node, Definition):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {
            alias.asname or (alias.name if isinstance(node, ast.ImportFrom) else alias.name.split(".")[0])
            for alias in node.names
        } - {"*"}
    names: set[str] = set()
    pending: list[ast.AST] = [node]
    while pending:
        one = pending.pop()
        if isinstance(one, Definition | ast.Import | ast.ImportFrom) and one is not node:
            names |= _bound(one)
            continue
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            names.add(one.id)
        if not isinstance(one, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            pending += ast.iter_child_nodes(one)
    return names


def _read(node: ast.AST) -> set[str]:
    """The names that a node reads, except those bound in the function that reads them."""
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Load) else set()
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        return {node.target.id} | _read(node.value)
    names = {name for child in ast.iter_child_nodes(node) for name in _read(child)}
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        arguments = node.args
        own = {one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        own |= {one.arg for one in (arguments.vararg, arguments.kwarg) if one is not None}
        body = node.body if isinstance(node.body, list) else [node.body]
        outer = {n for part in _outside(node) for n in _read(part)}
        declared = {n for one in ast.walk(node) if isinstance(one, ast.Global) for n in one.names}
        inner = {n for part in body for n in _stored(part)} - declared
        return (names - own - inner) | outer
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        own = {n for one in node.generators for n in _stored(one.target)}
        return names - own
    return names


def _outside(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[ast.expr]:
    """The parts of a function that are evaluated at definition time."""
    decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
    return [*node.args.defaults, *(one for one in node.args.kw_defaults if one is not None), *decorators]


def _stored(node: ast.AST) -> set[str]:
    """The names that a statement binds in its function's scope."""
    if isinstance(node, Definition):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Store) else set()
    own = {node.name} if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name else set()
    if isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return own
    return own | {name for child in ast.iter_child_nodes(node) for name in _stored(child)}


def _changes(node: ast.stmt) -> set[str]:
    """The names mutated by a top-level statement: `TABLE.append(x)`, `TABLE["a"] = x`, `f.attribute = x`."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        targets: list[ast.expr] = [node.value.func]
    elif isinstance(node, ast.Assign):
        targets = [target for target in node.targets if isinstance(target, ast.Attribute | ast.Subscript)]
    else:
        return set()
    names: set[str] = set()
    for target in targets:
        inner = target
        while isinstance(inner, ast.Attribute | ast.Subscript):
            inner = inner.value
        if isinstance(inner, ast.Name) and inner is not target:
            names.add(inner.id)
    return names


def _is_star(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.names[0].name == "*"


def _bare(node: Function) -> Function:
    """A copy of the function without annotations, docstring or decorators."""
    lean = _lean(node)
    assert isinstance(lean, ast.FunctionDef)
    lean.decorator_list = []
    return lean


def _name_of(decorator: ast.expr) -> str:
    """`lru_cache` for `@functools.lru_cache(maxsize=8)`."""
    inner = decorator.func if isinstance(decorator, ast.Call) else decorator
    return inner.attr if isinstance(inner, ast.Attribute) else inner.id if isinstance(inner, ast.Name) else ""


def _lean(node: ast.stmt) -> ast.stmt:
    """A copy of the statement without docstrings or function annotations."""
    node = copy.deepcopy(node)
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            inner.returns = None
            arguments = inner.args
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                argument.annotation = None
            for extra in (arguments.vararg, arguments.kwarg):
                if extra is not None:
                    extra.annotation = None
        if isinstance(inner, Definition) and ast.get_docstring(inner) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
    return node


# --- mutants ---------------------------------------------------------------------------------------------------------

COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
COMPUTED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


def mutants(node: Function, most: int = MOST_MUTANTS) -> list[str]:
    """Up to `most` versions of the function, each changed in one place chosen by hash; none equals the original."""
    whole = _bare(node)
    original = ast.unparse(whole)
    count = sum(1 for _ in _changed(whole))
    made: dict[str, None] = {}
    order = sorted(range(count), key=lambda n: hashlib.blake2b(f"{original}/{n}".encode()).digest())
    for wanted in order:
        if len(made) == most:
            break
        other = copy.deepcopy(whole)
        for number, apply in enumerate(_changed(other)):
            if number == wanted:
                apply()
                break
        text = ast.unparse(ast.fix_missing_locations(other))
        if text != original:
            made.setdefault(text)
    return list(made)


def _changed(node: Function) -> "Iterator[_Change]":
    """Every possible single change to a function, to be applied in place."""
    for one in ast.walk(node):
        if isinstance(one, ast.Compare) and type(one.ops[0]) in COMPARED:
            yield _Change(one.ops, 0, COMPARED[type(one.ops[0])]())
        elif isinstance(one, ast.BinOp) and type(one.op) in COMPUTED:
            yield _Change(one, "op", COMPUTED[type(one.op)]())
        elif isinstance(one, ast.BoolOp):
            yield _Change(one, "op", ast.Or() if isinstance(one.op, ast.And) else ast.And())
        elif isinstance(one, ast.If | ast.While | ast.IfExp):
            yield _Change(one, "test", ast.UnaryOp(ast.Not(), one.test))
        elif isinstance(one, ast.Return) and one.value is not None:
            yield _Change(one, "value", ast.Constant(None))
        elif isinstance(one, ast.Constant):
            value = one.value
            if isinstance(value, bool):
                yield _Change(one, "value", not value)
            elif isinstance(value, int | float):
                yield _Change(one, "value", value + 1)
            elif isinstance(value, str):
                yield _Change(one, "value", value[:-1] or "x")
            elif isinstance(value, bytes):
                yield _Change(one, "value", value[:-1] or b"x")
        elif isinstance(one, ast.AugAssign) and type(one.op) in COMPUTED:
            yield _Change(one, "op", COMPUTED[type(one.op)]())
        elif isinstance(one, ast.Call) and len(one.args) > 1:
            yield _Change(one, "args", [one.args[1], one.args[0], *one.args[2:]])
            yield _Change(one, "args", one.args[:-1])
        elif isinstance(one, ast.Call) and len(one.args) == 1 and isinstance(one.func, ast.Name):
            yield _Change(one, "args", [ast.Tuple([one.args[0]], ast.Load())])
        elif isinstance(one, ast.List | ast.Tuple | ast.Set) and len(one.elts) > 1:
            if isinstance(getattr(one, "ctx", ast.Load()), ast.Load):
                yield _Change(one, "elts", one.elts[:-1])
        elif isinstance(one, ast.Slice) and one.lower is not None:
            yield _Change(one, "lower", None)
        elif isinstance(one, ast.Slice) and one.upper is not None:
            yield _Change(one, "upper", None)
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(one, name, None)
            if not isinstance(statements, list):
                continue
            for number, statement in enumerate(statements):
                if isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr | ast.For | ast.If):
                    yield _Change(statements, number, ast.Pass())


@dataclass(frozen=True)
class _Change:
    """One change: a node attribute or list element gets a different value."""

    owner: object
    place: str | int
    value: object

    def __call__(self) -> None:
        if isinstance(self.place, int):
            assert isinstance(self.owner, list)
            self.owner[self.place] = self.value
        else:
            setattr(self.owner, self.place, self.value)
