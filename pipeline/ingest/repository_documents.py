"""Turn a repository's files into training documents: each part of a file once, after what it needs from other files.

    RepositoryEntry -> read_files -> one text per Python file, with its split; then cleaned and deduplicated
    the files that were kept -> documents -> Text with a `context`, for each part of a file

Parts. A file larger than half of `document_bytes` is cut between statements, at the outermost boundary in the second
half of the available space. Together, its parts make up the file, so a file's own text is trained on once per epoch.

Context fills the rest of `document_bytes` and is not trained on, because it may precede many parts. It contains, in
order of priority: the signatures of what the file imports by name from the repository, starting with those the part
uses; outlines (a class with its fields and method signatures); full definitions; complete files that the file imports
directly or transitively; and the file's own text before the part. Names are followed through re-exporting packages.
Files appear in import order (`ingest/repository.py`).

Splits are by folder, never by file (`repository.held_out`). The context of a training document never includes a
held-out file. For held-out parts, which are for evaluation, the context is chosen without looking at the part: names
that are imported but not used before the part come first, because they must be used eventually.

Not guaranteed: that a small repository has folders to hold out (stage_corpus prints a message if it has none); that
names resolved at run time are found.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pipeline.ingest import cleaning, repository
from pipeline.ingest.duplicates import fingerprint
from pipeline.ingest.entries import RepositoryEntry
from pipeline.ingest.intake import TEXT_BYTES, Intake, RowCounts
from pipeline.ingest.own_files import OWN_LICENSE, Accepted
from pipeline.ingest.records import Text
from pipeline.ingest.repository import Import, Modules, Repository
from pipeline.ingest.selection import SPLITS, Parts, PartWriter, read_part
from pipeline.ingest.sources import DataConfig
from pipeline.ingest.tool_calls import RowError
from pipeline.run.errors import DataError
from pipeline.run.tracking import say
from pipeline.text.repositories import Context

LINE = re.compile(r"[^\n]*\n|[^\n]+")
CHAIN = re.compile(r"(?<![\w.])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)  # a name and its attributes
# import statements: a name that occurs only there is not used
IMPORTS = re.compile(r"^[ \t]*(?:from\s+\S+\s+)?import\s+(?:\([^)]*\)|.*)$", re.MULTILINE)
OTHERS = 2 / 3  # maximum share of a context's bytes for other files; the file's own text before the part gets the rest
MOST_STEPS = 5  # of re-exports through which a name is followed
MOST_OUTLINE = 12  # lines of an outline
MOST_FILES = 24  # direct and transitive imports considered for one part


def entries_of(config: DataConfig, kind: str) -> dict[int, RepositoryEntry]:
    """Entry index -> entry, for the entries that name a repository."""
    return {n: entry for n, entry in enumerate(config.entries(kind)) if isinstance(entry, RepositoryEntry)}


def missing(own: Path, config: DataConfig) -> list[str]:
    """One line for each `code` repository that is not a folder below `own`."""
    lines = []
    for entry in entries_of(config, "code").values():
        try:
            repository.find(own, entry.repository)
        except DataError as error:
            lines.append(f"code: {error}")
    return lines


def rejected_file(parts: Path, number: int) -> Path:
    """The JSONL file that lists the skipped files of an entry's repository."""
    return parts / f"repository-{number}-rejected.jsonl"


def most_bytes(config: DataConfig) -> int:
    """The size of the largest file to read: larger files are dropped, not cut like long texts."""
    return min(config.max_bytes, TEXT_BYTES)


def read_files(own: Path, config: DataConfig, parts: Path, tally: RowCounts) -> Iterator[Accepted]:
    """Every Python file of the `code` repositories, with its split. Adds the file counts to `tally`.

    Raises DataError like `repository.find` and `repository.read`, and for a `held_out` folder without files.
    """
    for number, entry in entries_of(config, "code").items():
        found = repository.read(repository.find(own, entry.repository), most_bytes(config))
        folders = repository.held_out(entry, found, config.val_share)
        split_of = repository.splits(found, folders)
        with Intake(rejected_file(parts, number), None, f"code of {entry.repository}") as intake:
            for file in found.files:
                name = f"{entry.repository}/{file.path}"
                with intake.rejecting(name, 1):
                    if not file.text.strip():
                        raise RowError("text", "is blank")
                    text = Text(text=file.text, source=entry.repository, path=file.path, license=OWN_LICENSE)
                    for split, record in intake.accept(text, name, 1, split_of[file.path]):
                        yield Accepted(number, name, 1, intake.num_accepted, split, record)
            for skipped in found.skipped:
                intake.reject(f"{entry.repository}/{skipped.path}", 1, RowError("file", skipped.reason))
            intake.add_to(tally)
        reasons = Counter(skipped.reason for skipped in found.skipped)
        held_out = Counter(split_of.values())["val"]
        say(
            f"code: {entry.repository}: {len(found.files)} Python files, {held_out} of them held out"
            + "".join(f"; {count} not read: {reason}" for reason, count in sorted(reasons.items()))
        )


# --- parts -----------------------------------------------------------------------------------------------------------


def lines_of(text: str) -> list[str]:
    """The lines of a text with their line feeds, as Python counts them: no other character ends a line."""
    return LINE.findall(text)


def parts_of(text: str, most: int) -> list[tuple[int, int]]:
    """The parts of a file, at most `most` bytes each unless a line is longer: (first line, end line), from 0."""
    lines = lines_of(text)
    sizes = [len(line.encode()) for line in lines]
    if sum(sizes) <= most:
        return [(0, len(lines))]
    depths = _statement_lines(text, lines)
    parts, start = [], 0
    while start < len(lines):
        end, size = start, 0
        while end < len(lines) and (end == start or size + sizes[end] <= most):
            size += sizes[end]
            end += 1
        if end < len(lines):
            filled = list(itertools.accumulate(sizes[start:end]))  # bytes before each line after the first
            inner = [line for line in range(start + 1, end + 1) if line in depths]
            later = [line for line in inner if 2 * filled[line - start - 1] >= most]
            end = min(later or inner, key=lambda line: (depths[line], -line), default=end)
        parts.append((start, end))
        start = end
    return parts


def _statement_lines(text: str, lines: Sequence[str]) -> dict[int, int]:
    """First line of each statement, including decorators and comments -> nesting depth; empty if the text does not
    parse.
    """
    depths: dict[int, int] = {}
    try:
        pending: list[tuple[ast.AST, int]] = [(cleaning.parse(text), 0)]
    except cleaning.Dropped:
        return depths
    while pending:
        node, depth = pending.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                line = _first_line(child)
                while line and lines[line - 1].lstrip().startswith("#"):
                    line -= 1
                depths[line] = min(depth, depths.get(line, depth))
                pending.append((child, depth + 1))
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                pending.append((child, depth + 1))
    return depths


def _first_line(node: ast.stmt) -> int:
    """The first line of a statement, counted from 0, including its decorators."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1


# --- definitions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Definition:
    """A name defined at the top level of a file."""

    line: int
    head: str  # function or class: everything before its body; assignment: its first line
    outline: str  # class: its head, fields and method heads; else the head
    source: str


def definitions(text: str) -> dict[str, Definition]:
    """The functions, classes and assigned names of a file; empty if it does not parse."""
    lines = lines_of(text)
    found: dict[str, Definition] = {}
    try:
        body = cleaning.parse(text).body
    except cleaning.Dropped:
        return found
    for node in body:
        source = "".join(lines[_first_line(node) : node.end_lineno])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        else:
            continue
        head = _head(node, lines)
        found |= {name: Definition(node.lineno, head, _outline(node, head, lines), source) for name in names}
    return found


def _outline(node: ast.stmt, head: str, lines: Sequence[str]) -> str:
    for member in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
            head += _head(member, lines)
        elif isinstance(member, ast.Assign | ast.AnnAssign):
            head += lines[member.lineno - 1]
    return "".join(lines_of(head)[:MOST_OUTLINE])


def _head(node: ast.stmt, lines: Sequence[str]) -> str:
    """The lines of a definition before its body; for other statements, the first line."""
    end = node.lineno
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        end = max(end, node.body[0].lineno - 1)
    return "".join(lines[node.lineno - 1 : end])


# --- context ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Name:
    """A definition: its file and its name there."""

    path: str
    name: str


class Library:
    """The files of a repository: what each defines and imports, and the context for a part of a file."""

    def __init__(self, found: Repository, kept: Mapping[str, Text]) -> None:
        """`kept`: path -> cleaned text; dropped files still re-export names but appear in no context."""
        self.name = found.name
        self.texts = {path: text.text for path, text in kept.items()}
        self._imports: dict[str, list[Import]] = {}
        for file in found.files:
            try:
                self._imports[file.path] = repository.imports_of(cleaning.parse(file.text))
            except cleaning.Dropped:
                self._imports[file.path] = []
        self._modules = Modules(self._imports, found.name)
        self._definitions: dict[str, dict[str, Definition]] = {}
        self._found: dict[tuple[str, str, int], Name | None] = {}
        self._imported: dict[str, dict[str, Name]] = {}

    @cached_property
    def graph(self) -> dict[str, tuple[str, ...]]:
        """Path -> the paths it imports."""
        return repository.import_graph(self._imports, self._modules)

    @cached_property
    def order(self) -> dict[str, int]:
        """Path -> its position in import order."""
        at_import = repository.import_graph(self._imports, self._modules, at_import=True)
        return {path: place for place, path in enumerate(repository.import_order(self.graph, at_import))}

    def defined(self, path: str) -> dict[str, Definition]:
        """The definitions of a file; empty if it was dropped."""
        if path not in self._definitions:
            self._definitions[path] = definitions(self.texts[path]) if path in self.texts else {}
        return self._definitions[path]

    def find(self, path: str, name: str, steps: int = MOST_STEPS) -> Name | None:
        """The definition of a name at the top level of `path`; None for external names."""
        if name in self.defined(path):
            return Name(path, name)
        key = (path, name, steps)
        if key not in self._found:
            self._found[key] = self._follow(path, name, steps) if steps else None
        return self._found[key]

    def _follow(self, path: str, name: str, steps: int) -> Name | None:
        for one in self._imports[path]:
            if one.name is not None and one.bound in (name, "*"):
                wanted = name if one.name == "*" else one.name
                for target in self._modules.targets(path, one):
                    if target != path and (found := self.find(target, wanted, steps - 1)):
                        return found
        return None

    def imported(self, path: str) -> dict[str, Name]:
        """Name as written -> its definition, for everything a file can use from other files, last import first.

        For a module imported as a whole, `module.name` for each of its names, after all others.
        """
        if path not in self._imported:
            names: dict[str, Name] = {}
            modules: dict[str, Name] = {}
            for one in reversed(self._imports[path]):
                for target in self._modules.targets(path, one):
                    direct = None if one.name in (None, "*") else self.find(target, one.name)
                    if direct is not None:
                        names.setdefault(one.bound, direct)
                    elif one.name == "*":
                        public = (name for name in self.defined(target) if not name.startswith("_"))
                        names |= {name: Name(target, name) for name in public if name not in names}
                    elif one.name is None or self._modules.name_of(target).rpartition(".")[2] == one.name:
                        whole = one.name is None and one.bound == one.module.split(".")[0]  # import a.b
                        prefix = one.module if whole else one.bound
                        modules |= {f"{prefix}.{name}": Name(target, name) for name in self.defined(target)}
            found = {written: name for written, name in (names | modules).items() if name.path != path}
            self._imported[path] = found
        return self._imported[path]

    def names(self, path: str, readable: frozenset[str]) -> list[str]:
        """The names that `path` can use from `readable` files, as written in `path`."""
        return sorted(written for written, name in self.imported(path).items() if name.path in readable)

    def context(self, path: str, room: int, readable: frozenset[str], first: frozenset[str]) -> Context:
        """The context of a part of `path`: at most about `room` bytes of other `readable` files.

        `first`: names with priority, as written in the file.
        """
        candidates = [(written, name) for written, name in self.imported(path).items() if name.path in readable]
        candidates.sort(key=lambda one: one[0] not in first)
        shown: dict[str, dict[int, str]] = {}  # file -> line -> excerpt
        for level in ("head", "outline", "source"):
            for _, name in candidates:
                target, definition = name.path, self.defined(name.path)[name.name]
                excerpt: str = getattr(definition, level)
                earlier = shown.get(target, {}).get(definition.line)
                heading = 0 if target in shown else len(target.encode()) + 2
                cost = len(excerpt.encode()) - len((earlier or "").encode()) + heading
                if cost <= room and excerpt != earlier:
                    shown.setdefault(target, {})[definition.line] = excerpt
                    room -= cost
        texts = {target: "".join(excerpt for _, excerpt in sorted(lines.items())) for target, lines in shown.items()}
        for target in self._reached(path, [name.path for _, name in candidates]):
            whole = self.texts[target] if target in readable else ""
            heading = 0 if target in texts else len(target.encode()) + 2
            cost = len(whole.encode()) - len(texts.get(target, "").encode()) + heading
            if whole and cost <= room and texts.get(target) != whole:
                texts[target] = whole
                room -= cost
        files = tuple((target, texts[target]) for target in sorted(texts, key=self.order.__getitem__))
        return Context(self.name, files, path)

    def _reached(self, path: str, nearest: Sequence[str]) -> list[str]:
        """The direct and transitive imports of a file, nearest first."""
        reached = dict.fromkeys([*nearest, *reversed(self.graph[path])])
        for target in self._breadth_first(path):
            if len(reached) >= MOST_FILES:
                break
            reached[target] = None
        return [target for target in reached if target != path]

    def _breadth_first(self, path: str) -> Iterator[str]:
        seen, pending = {path}, [path]
        for node in pending:
            for target in self.graph[node]:
                if target not in seen and len(pending) <= MOST_FILES:
                    seen.add(target)
                    pending.append(target)
                    yield target


@dataclass(frozen=True)
class KeptFiles:
    """A repository, and the files the corpus keeps: split -> path -> file."""

    found: Repository
    files: dict[str, dict[str, Text]]


def rewrite(parts: Parts, own: Path, config: DataConfig, part_of: Mapping[int, str], document_bytes: int) -> Parts:
    """The parts of a corpus, with repository files replaced by documents.

    `part_of`: entry index -> its corpus part. Training documents that equal a held-out document are left out.
    Raises DataError if no file of a repository is left, or no document of the corpus is held out.
    """
    entries = entries_of(config, "code")
    kept: dict[int, KeptFiles] = {}
    for number, entry in entries.items():
        files = {split: _in_part(parts[split], part_of[number]) for split in SPLITS}
        texts = {split: {text.path: text for path in files[split] for text in read_part(path)} for split in SPLITS}
        if not any(texts.values()):
            raise DataError(f"code: {entry.repository}: no Python file is left; see dropped.jsonl for the reasons")
        kept[number] = KeptFiles(repository.read(repository.find(own, entry.repository), most_bytes(config)), texts)
    if not any(size.documents for size in parts["val"].values()):
        raise DataError(
            "code: nothing is held out: no repository has a second folder, and single files are not held out; list "
            'folders in `held_out`, or add a second repository with `held_out: ["."]`, or an entry with other files'
        )
    theirs = {path for number in entries for split in SPLITS for path in _in_part(parts[split], part_of[number])}
    held_out = {fingerprint(text.text) for path in parts["val"] if path not in theirs for text in read_part(path)}
    for files in kept.values():
        for text in files.files["val"].values():
            lines = lines_of(text.text)
            held_out |= {fingerprint("".join(lines[a:b])) for a, b in parts_of(text.text, document_bytes // 2)}
    rewritten: Parts = {split: {p: size for p, size in parts[split].items() if p not in theirs} for split in SPLITS}
    for number, files in kept.items():
        writers: dict[str, PartWriter] = {}
        num_equal = 0
        folder = next(path.parent for path in theirs if path.parent.name == part_of[number])
        for split, document in documents(files.found, files.files, document_bytes):
            if split == "train" and fingerprint(document.text) in held_out:
                num_equal += 1
                continue
            if split not in writers:
                writers[split] = PartWriter(folder / f"{split}-documents.parquet", contexts=True)
            writers[split].add(document)
        for split, writer in writers.items():
            writer.close()
            rewritten[split][writer.path] = writer.size
        sizes = {split: writer.size.documents for split, writer in writers.items()}
        say(f"code: {entries[number].repository}: documents {sizes}; {num_equal} dropped (equal to a held-out one)")
    return rewritten


def _in_part(files: Mapping[Path, object], part: str) -> list[Path]:
    return [path for path in files if path.parent.name == part]


def documents(
    found: Repository, kept: Mapping[str, Mapping[str, Text]], document_bytes: int
) -> Iterator[tuple[str, Text]]:
    """(split, a part of a file with its context), file by file in import order.

    `kept`: split -> path -> file. Every line of a file is in exactly one part; a part and its context together have at
    most about `document_bytes` bytes.
    """
    library = Library(found, {path: text for files in kept.values() for path, text in files.items()})
    readable = {"train": frozenset(kept["train"]), "val": frozenset([*kept["train"], *kept["val"]])}
    splits_of = {path: split for split, files in kept.items() for path in files}
    for path in sorted(splits_of, key=library.order.__getitem__):
        split = splits_of[path]
        text = kept[split][path]
        lines = lines_of(text.text)
        parts = parts_of(text.text, document_bytes // 2)
        names, earlier = library.names(path, readable[split]), frozenset[str]()
        for number, (start, end) in enumerate(parts, start=1):
            part = "".join(lines[start:end])
            room = document_bytes - len(part.encode())
            used = _used(names, part)
            first = used if split == "train" else frozenset(names) - earlier
            earlier |= _used(names, IMPORTS.sub("", part))
            context = library.context(path, int(room * OTHERS), readable[split], first)
            room -= sum(len(name.encode()) + len(content.encode()) + 2 for name, content in context.files)
            asked = tuple(name for name in names if name in used) if split == "val" else ()
            context = replace(context, before=_before(lines[:start], room), names=asked)
            name = path if len(parts) == 1 else f"{path}#{number}"
            yield split, replace(text, text=part, path=name, context=context.to_json())


def _used(names: Sequence[str], text: str) -> frozenset[str]:
    """Those of the names that occur in a text."""
    present = frozenset(CHAIN.findall(text))
    parts = frozenset(part for chain in present for part in itertools.accumulate(chain.split("."), "{}.{}".format))
    return frozenset(name for name in names if name in parts)


def _before(lines: Sequence[str], room: int) -> str:
    """The text of the last lines that fit into `room` bytes."""
    start = len(lines)
    while start and len(lines[start - 1].encode()) <= room:
        start -= 1
        room -= len(lines[start].encode())
    return "".join(lines[start:])
