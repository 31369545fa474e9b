"""Safely read a user's repository in `data/own/`: its Python files and their import graph.

    find(data/own, "repos/mine")  -> the folder, checked         read(folder, max_bytes) -> Repository
    held_out(entry, repository, val_share) -> folders            splits(repository, folders) -> path -> train, val
    imports_of(tree)              -> Import, ...                 Modules(paths, name).targets(path, one) -> paths
    import_graph({path: imports}) -> path -> the paths it imports, in source order
    import_order(graph, at_import)  -> each path once, after the paths it imports

Repositories must be in `data/own/`, because that folder is a DVC dependency of the stages: DVC notices changed files.
DVC ignores `.git`, so it does not notice a commit that changes no file.

Never read: hidden files and folders (`.git`), installed packages (`site-packages`, `node_modules`, virtual
environments) and links. A link out of the repository is an error, because a third-party repository may link to anything
on this machine. Files that are too large, binary or not UTF-8 are skipped, and the reason is recorded. The walk is
limited in entries, files and bytes; for larger repositories, name a subfolder.

Import cycles are broken deterministically: the files of a cycle are ordered as Python would run them if the first file
by name were imported first, considering only imports outside functions.

Not supported: imports through `importlib` or a `sys.path` changed at run time; stubs (`.pyi`) and C extensions, which
are treated as external modules.
"""

from __future__ import annotations

import ast
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pipeline.ingest import cleaning
from pipeline.ingest.entries import RepositoryEntry
from pipeline.ingest.sources import digest
from pipeline.run.errors import DataError

MOST_ENTRIES = 200_000  # in all folders together; listing this many takes about a second
MOST_FILES = 20_000  # Python files
MOST_BYTES = 100_000_000  # of Python files, held in memory
INSTALLED = ("__pycache__", "node_modules", "site-packages", "dist-packages")
VIRTUAL_ENVIRONMENT = "pyvenv.cfg"
PACKAGE = "__init__.py"
SUFFIX = ".py"


@dataclass(frozen=True)
class SourceFile:
    """One Python file."""

    path: str  # relative to the repository, with "/"
    text: str  # decoded, with `\\n` line endings; might not parse


@dataclass(frozen=True)
class Skipped:
    """A Python file that was not read."""

    path: str
    reason: str  # link, size, encoding (of the text or the file name; also binary files), unreadable


@dataclass(frozen=True)
class Repository:
    """The Python files of a folder, in path order."""

    name: str
    root: Path
    files: tuple[SourceFile, ...]
    skipped: tuple[Skipped, ...]


def find(own: Path, folder: str) -> Path:
    """The folder of a repository below `own`. Raises DataError if it does not exist or its path leaves `own`."""
    path = own / folder
    if PurePosixPath(folder).is_absolute() or ".." in PurePosixPath(folder).parts:
        raise DataError(
            f"repository: {folder}: expected a folder in {own}, so that changes to its files are noticed; "
            f"copy or clone the repository there: git clone {folder} {own}/NAME"
        )
    if not path.is_dir():
        raise DataError(f"repository: {path}: expected a folder, found {'a file' if path.exists() else 'nothing'}")
    if not path.resolve().is_relative_to(own.resolve()):
        raise DataError(f"repository: {path}: is a link that leads out of {own}; replace the link with a copy")
    return path


def read(root: Path, max_bytes: int) -> Repository:
    """The Python files below a folder; those over `max_bytes` are skipped.

    Raises DataError if there is no Python file, a link leads out of the folder, or one of the limits above is exceeded.
    """
    files: list[SourceFile] = []
    skipped: list[Skipped] = []
    entries = list(itertools.islice(_walk(root), MOST_FILES + 1))  # counted before any is read
    if len(entries) > MOST_FILES:
        raise _too_large(root, f"{MOST_FILES:,} Python files")
    num_bytes = 0
    for entry in entries:
        path = Path(entry.path).relative_to(root).as_posix().encode("utf-8", "replace").decode()
        found = _text(entry, max_bytes)
        if isinstance(found, bytes):
            num_bytes += len(found)
            if num_bytes > MOST_BYTES:
                raise _too_large(root, f"{MOST_BYTES:,} bytes of Python")
            try:
                files.append(SourceFile(path, cleaning.decode(found)))
            except cleaning.Dropped as dropped:
                skipped.append(Skipped(path, str(dropped)))
        else:
            skipped.append(Skipped(path, found))
    if not entries:
        raise DataError(f"repository: {root}: has no Python file ({SUFFIX}); remove the entry")
    return Repository(root.resolve().name, root, tuple(sorted(files, key=lambda file: file.path)), tuple(skipped))


def _too_large(root: Path, limit: str) -> DataError:
    return DataError(f"repository: {root}: has more than {limit}; name one of its subfolders instead")


def _text(entry: os.DirEntry[str], max_bytes: int) -> bytes | str:
    """The bytes of a file, or the reason why it was not read."""
    try:
        entry.name.encode()
        if entry.is_symlink():
            return "link"
        if not entry.is_file():  # a pipe or socket would block
            return "unreadable"
        with Path(entry.path).open("rb") as file:
            raw = file.read(max_bytes + 1)
    except UnicodeEncodeError:
        return "encoding"
    except OSError:
        return "unreadable"
    return "size" if len(raw) > max_bytes else raw


def _walk(root: Path) -> Iterator[os.DirEntry[str]]:
    """The Python files below a folder, and links with such names; links to folders are not followed."""
    real_root = os.path.realpath(root)
    num_entries, pending = 0, [str(root)]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(folder) as scanned:
                entries = sorted(scanned, key=lambda entry: entry.name)
        except PermissionError:
            continue
        num_entries += len(entries)
        if num_entries > MOST_ENTRIES:
            raise _too_large(root, f"{MOST_ENTRIES:,} files and folders")
        if folder != str(root) and any(entry.name == VIRTUAL_ENVIRONMENT for entry in entries):
            continue
        for entry in entries:
            if entry.name.startswith(".") or entry.name in INSTALLED:
                continue
            if entry.is_symlink() and not Path(os.path.realpath(entry.path)).is_relative_to(real_root):
                raise DataError(f"repository: {entry.path}: is a link that leads out of {root}; remove the link")
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)
            elif entry.name.endswith(SUFFIX):
                yield entry


# --- splits ----------------------------------------------------------------------------------------------------------


def held_out(entry: RepositoryEntry, found: Repository, val_share: float) -> list[str]:
    """The held-out folders of a repository: those named in the entry, else top-level folders chosen by a hash of their
    names until `val_share` of the bytes is held out.

    A folder with more than half of the bytes is replaced by its subfolders; files directly in it stay in training.
    Raises DataError if a named folder has no Python file.
    """
    sizes = {file.path: len(file.text.encode()) for file in found.files}
    folders = [PurePosixPath(folder).as_posix() for folder in entry.held_out]
    for folder in folders:
        if not any(is_inside(path, folder) for path in sizes):
            raise DataError(
                f"repository: {entry.repository}: held_out: {folder} has no Python file; name another folder"
            )
    if not folders and val_share:
        total, held = sum(sizes.values()), 0
        for unit in sorted(_units(sizes), key=lambda unit: digest(f"{found.name}/{unit}")):
            size = sum(size for path, size in sizes.items() if is_inside(path, unit))
            if held < val_share * total and size <= total / 2:
                folders.append(unit)
                held += size
    return folders


def splits(found: Repository, folders: Sequence[str]) -> dict[str, str]:
    """Path -> val if it is in one of the folders, else train."""
    return {
        file.path: "val" if any(is_inside(file.path, folder) for folder in folders) else "train" for file in found.files
    }


def is_inside(path: str, folder: str) -> bool:
    """Whether a path is inside a folder; everything is inside "."."""
    return folder == "." or path.startswith(f"{folder}/")


def _units(sizes: Mapping[str, int]) -> list[str]:
    """The folders that can be held out: those with at most half of the bytes, or without subfolders."""
    units, pending, half = [], ["."], sum(sizes.values()) / 2
    while pending:
        folder = pending.pop()
        start = 0 if folder == "." else len(folder) + 1
        inside = [path for path in sizes if is_inside(path, folder)]
        inner = {path[: path.index("/", start)] for path in inside if "/" in path[start:]}
        if inner and sum(sizes[path] for path in inside) > half:
            pending += sorted(inner)
        elif folder != ".":
            units.append(folder)
    return units


# --- imports ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    """One name that a file imports."""

    module: str  # as written, without leading dots
    level: int  # number of leading dots
    name: str | None  # after `from module import`; None: `import module`
    bound: str  # the name in the importing file; `*` for a star import
    at_import: bool  # runs when the file is imported: not in a function, not under TYPE_CHECKING


def imports_of(tree: ast.Module) -> list[Import]:
    """The imports of a file in source order, including those in functions."""
    found: list[tuple[int, int, Import]] = []
    pending: list[tuple[ast.AST, bool]] = [(tree, True)]
    while pending:
        node, at_import = pending.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                found.append((node.lineno, node.col_offset, Import(alias.name, 0, None, bound, at_import)))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                one = Import(node.module or "", node.level, alias.name, alias.asname or alias.name, at_import)
                found.append((node.lineno, node.col_offset, one))
        elif isinstance(node, ast.stmt | ast.Module | ast.ExceptHandler | ast.match_case):
            inner = at_import and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            orelse = set(map(id, node.orelse)) if isinstance(node, ast.If) else set()
            pending += [
                (child, inner and (not typing_only or id(child) in orelse)) for child in ast.iter_child_nodes(node)
            ]
    return [one for *_, one in sorted(found, key=lambda entry: entry[:2])]


class Modules:
    """Resolves module names to files of a repository."""

    def __init__(self, paths: Iterable[str], name: str = "") -> None:
        """`name`: the repository's name, used in its imports if the repository is itself a package."""
        self._paths = frozenset(paths)
        self._name = name if PACKAGE in self._paths else None
        self._roots: dict[str, list[str]] = {}  # first part of a module name -> parent folders of packages so named
        for path in self._paths:
            if path.endswith(PACKAGE):
                root = self.root_of(path)
                top = PurePosixPath(path).relative_to(root).parts[0]
                self._roots.setdefault(top, [])
                if root not in self._roots[top]:
                    self._roots[top].append(root)
        for roots in self._roots.values():
            roots.sort(key=lambda root: (len(PurePosixPath(root).parts), root))

    def root_of(self, path: str) -> str:
        """The import root of a file: the nearest parent folder that is not a package; "." for the top level."""
        folder = PurePosixPath(path).parent
        while folder.name and (folder / PACKAGE).as_posix() in self._paths:
            folder = folder.parent
        return folder.as_posix()

    def name_of(self, path: str) -> str:
        """A file's module name, relative to `root_of`."""
        parts = PurePosixPath(path).relative_to(self.root_of(path)).with_suffix("").parts
        return ".".join(parts[: len(parts) - 1] if parts[-1] == "__init__" and len(parts) > 1 else parts)

    def targets(self, path: str, one: Import) -> list[str]:
        """The files an import in `path` refers to: the submodule of that name if there is one, else the module.

        Empty for external modules.
        """
        module = self._find(path, one.module, one.level)
        if one.name is None or one.name == "*":
            return [module] if module else []
        inner = self._find(path, f"{one.module}.{one.name}".strip("."), one.level)
        return [found] if (found := inner or module) else []

    def _find(self, path: str, module: str, level: int) -> str | None:
        parts = module.split(".") if module else []
        if level:
            above = PurePosixPath(path).parents
            return self._file(above[level - 1], parts) if level <= len(above) else None
        top = parts[0] if parts else ""
        if top == self._name and (found := self._file(PurePosixPath(), parts[1:])):
            return found
        for root in dict.fromkeys([self.root_of(path), ".", "src", *self._roots.get(top, [])]):
            if found := self._file(PurePosixPath(root), parts):
                return found
        return None

    def _file(self, folder: PurePosixPath, parts: Sequence[str]) -> str | None:
        target = folder.joinpath(*parts)
        options = [(target / PACKAGE).as_posix()]
        if parts:
            options.append(f"{target.as_posix()}{SUFFIX}")
        return next((option for option in options if option in self._paths), None)


def import_graph(
    imports: Mapping[str, Sequence[Import]], modules: Modules | None = None, *, at_import: bool = False
) -> dict[str, tuple[str, ...]]:
    """Path -> the paths it imports, each once, in source order; `at_import`: only imports that run at import time."""
    modules = modules or Modules(imports)
    graph: dict[str, tuple[str, ...]] = {}
    for path in sorted(imports):
        wanted = [one for one in imports[path] if one.at_import or not at_import]
        found = dict.fromkeys(target for one in wanted for target in modules.targets(path, one))
        graph[path] = tuple(target for target in found if target != path)
    return graph


def import_order(graph: Mapping[str, Sequence[str]], at_import: Mapping[str, Sequence[str]]) -> list[str]:
    """Each path once, after the paths it imports.

    `at_import` is the subgraph that breaks cycles: within a cycle, a path comes after those it imports at import time.
    """
    order: list[str] = []
    for group in _components(graph):
        inside = {path: [target for target in at_import[path] if target in group] for path in sorted(group)}
        order += _depth_first(inside)
    return order


def _depth_first(graph: Mapping[str, Sequence[str]]) -> list[str]:
    """The nodes, each after those it points to, except within cycles."""
    order: list[str] = []
    seen: set[str] = set()
    for start in graph:
        stack = [] if start in seen else [(start, iter(graph[start]))]
        seen.add(start)
        while stack:
            node, targets = stack[-1]
            target = next((target for target in targets if target not in seen), None)
            if target is None:
                order.append(node)
                stack.pop()
            else:
                seen.add(target)
                stack.append((target, iter(graph[target])))
    return order


def _components(graph: Mapping[str, Sequence[str]]) -> list[set[str]]:
    """Strongly connected components, each after those it points to; computed without recursion (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    open_nodes: list[str] = []
    is_open: set[str] = set()
    components: list[set[str]] = []

    def enter(node: str) -> tuple[str, Iterator[str]]:
        index[node] = low[node] = len(index)
        open_nodes.append(node)
        is_open.add(node)
        return node, iter(graph[node])

    for start in sorted(graph):
        stack = [] if start in index else [enter(start)]
        while stack:
            node, targets = stack[-1]
            for target in targets:
                if target not in index:
                    stack.append(enter(target))
                    break
                if target in is_open:
                    low[node] = min(low[node], index[target])
            else:
                stack.pop()
                if stack:
                    low[stack[-1][0]] = min(low[stack[-1][0]], low[node])
                if low[node] == index[node]:
                    component = set(open_nodes[open_nodes.index(node) :])
                    del open_nodes[-len(component) :]
                    is_open -= component
                    components.append(component)
    return components
