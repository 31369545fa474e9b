"""The user's own files (`data=files`) -> records: what `data/own/` holds of text, code, dialogues, problems,
preferences.

In: globs below a root folder, one list per kind. A `.jsonl`, `.json`, `.csv` or `.parquet` file is a table, read by
`streams.formats` and put into records by `streams.shapes`; its shape is the one that fits most of its first 100 rows.
Any other file is one text. A folder that a glob names is a folder of sources: every text file in it is one document,
whatever its suffix. Out: (split, record), and the rejected rows in a file; `streams.intake` keeps the books.

Hidden files and `__pycache__` are never read. A link is followed as long as it stays below the root; one that leaves it
is an error, for a repository from elsewhere may link to anything on this machine. Links that lead nowhere or to a
folder above them are left out, and so are binary files; how many there are is said. An empty file is warned of; a glob
that matches nothing is an error.

Not promised: cleaning. Secrets, generated files and near duplicates leave later, in `stage_corpus`.

What becomes of each row: accepted, a counted duplicate, or rejected with file, line, field and reason.

In: records and `RowError`s with the place they come from. Out: (split, record) for each accepted row, a file of
rejected rows (JSONL: file, line, field, reason), the first five printed as `file:line: field: reason`, and three counts
whose sum is the number of rows. A row without an id is named by the blake2b hash of its content. The same id with the
same content is a duplicate, with other content it is rejected. Held out (`val`): files so called; where a source has
none, blake2b(id) mod 50 = 0; a problem goes by its key, so that two versions of one problem stay together.

Not promised: near duplicates; `streams.duplicates` finds those among texts.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

from pipeline.ingest import files as ingest_files
from pipeline.ingest import shapes
from pipeline.ingest.records import Dialogue, Pair, Problem, Text
from pipeline.ingest.tool_calls import RowError, to_json
from pipeline.run.errors import DataError
from pipeline.run.tracking import say

AnyRecord = Text | Dialogue | Problem | Pair
TEXT_BYTES = 1_000_000  # a longer text is cut at blank lines
VAL_SHARE = 50  # one id in so many is held out
NUM_PRINTED = 5
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")
_LINE_FEED = re.compile(r"\n")


class Intake:
    """The books of one source. A context manager: on leaving without an error it checks them, else only closes the
    file.
    """

    def __init__(self, rejected: Path, max_rejected: float | None, name: str, *, has_val: bool = False) -> None:
        """`rejected`: the JSONL file to write; `max_rejected`: share of all rows, None where any number may be
        rejected, all of them too; `name`: of the source, for messages.

        `has_val`: the source brings held-out rows of its own, so no id is held out here.
        """
        self._has_val = has_val
        self.num_accepted = self.num_duplicates = self.num_rejected = 0
        self._max_rejected = max_rejected
        self._name = name
        self._path = rejected
        self._seen: dict[str, tuple[bytes, str, int]] = {}  # id -> content, file, line
        self._first: list[str] = []
        rejected.parent.mkdir(parents=True, exist_ok=True)
        self._file = rejected.open("w", encoding="utf-8", newline="\n")

    @property
    def num_rows(self) -> int:
        """Rows seen so far."""
        return self.num_accepted + self.num_duplicates + self.num_rejected

    def __enter__(self) -> "Intake":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is None:
            self._check()

    def add_to(self, counts: dict[str, int]) -> None:
        """Add what became of the rows to `counts`: accepted, duplicates, rejected."""
        for name in ("accepted", "duplicates", "rejected"):
            counts[name] = counts.get(name, 0) + getattr(self, f"num_{name}")

    def accept(self, record: AnyRecord, file: str, line: int, split: str | None) -> list[tuple[str, AnyRecord]]:
        """(split, record), or nothing for a duplicate, or one per piece of a long text. `split` None: by the id.

        Raises RowError for an id that is taken and for what no UTF-8 can hold: the caller hands it to `reject`.
        """
        content = _content(record)
        identity = record.path if isinstance(record, Text) else record.id
        identity = identity or content.hex()
        known = self._seen.get(identity)
        if known is not None and known[0] == content:
            self.num_duplicates += 1
            return []
        if known is not None:
            raise RowError("id", f"{identity[:80]!r} stands at {known[1]}:{known[2]} with other content")
        self._seen[identity] = (content, file, line)
        self.num_accepted += 1
        if isinstance(record, Text):
            place = record.path or (f"{file}:{line}" if line > 1 else file)
            return [(self._split(split, identity), piece) for piece in cut(dataclasses.replace(record, path=place))]
        if isinstance(record, Problem):
            record = dataclasses.replace(record, id=identity, key=record.key or identity)
            return [(self._split(split, record.key), record)]
        return [(self._split(split, identity), dataclasses.replace(record, id=identity))]

    def _split(self, split: str | None, identity: str) -> str:
        return split or ("train" if self._has_val else split_of(identity))

    def reject(self, file: str, line: int, error: RowError) -> None:
        """Write the row down; the first five are printed too."""
        self.num_rejected += 1
        entry = {"file": file, "line": line, "field": error.field, "reason": error.reason}
        self._file.write(json.dumps(entry) + "\n")  # ASCII: a reason may quote half a surrogate pair
        if self.num_rejected <= NUM_PRINTED:
            self._first.append(f"{file}:{line}: {error.field}: {error.reason}".encode("utf-8", "replace").decode())
            say(self._first[-1])

    def _check(self) -> None:
        if self._max_rejected is None:
            return
        if self.num_rejected > self._max_rejected * self.num_rows:
            raise DataError(
                f"{self._name}: {self.num_rejected} of {self.num_rows} rows are rejected, more than max_rejected = "
                f"{self._max_rejected:g} of all. All of them: {self._path}. The first:\n  " + "\n  ".join(self._first)
            )
        if not self.num_accepted:
            raise DataError(f"{self._name}: nothing is left of {self.num_rows} rows, {self.num_rejected} rejected")


def split_of(identity: str) -> str:
    """train or val, by the id alone: adding rows moves none from one to the other."""
    digest = hashlib.blake2b(identity.encode("utf-8"), digest_size=8).digest()
    return "val" if int.from_bytes(digest, "big") % VAL_SHARE == 0 else "train"


def _content(record: AnyRecord) -> bytes:
    """A hash of what a record says, without its id. Raises RowError for what no UTF-8 JSON can hold."""
    if isinstance(record, Text):
        text, identity = record.text, record.path + record.source + record.licence
    else:
        identity, text = record.id, to_json({**vars(record), "id": ""}, "row")
    try:
        identity.encode("utf-8")
        return hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()
    except UnicodeEncodeError as error:
        raise RowError("row", "holds half a surrogate pair, which UTF-8 cannot write") from error


def cut(document: Text) -> list[Text]:
    """A text over 1 MB in pieces of at most that, which joined give the text; path gets `#1`, `#2`, ..."""
    if _num_bytes(document.text) <= TEXT_BYTES:
        return [document]
    pieces: list[list[str]] = []
    size = TEXT_BYTES  # as if a piece were full: the first part opens one
    for part in _parts(document.text):
        length = _num_bytes(part)
        if size + length > TEXT_BYTES:
            pieces.append([])
            size = 0
        pieces[-1].append(part)
        size += length
    return [
        dataclasses.replace(document, text="".join(piece), path=f"{document.path}#{number}")
        for number, piece in enumerate(pieces, start=1)
    ]


def _parts(text: str) -> Iterator[str]:
    """Paragraphs with the blank lines after them; a longer one by lines, a longer line by characters (4 bytes at
    most).
    """
    for paragraph in _split_after(_BLANK_LINES, text):
        if _num_bytes(paragraph) <= TEXT_BYTES:
            yield paragraph
            continue
        for line in _split_after(_LINE_FEED, paragraph):
            if _num_bytes(line) <= TEXT_BYTES:
                yield line
                continue
            step = TEXT_BYTES // 4
            yield from (line[start : start + step] for start in range(0, len(line), step))


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8"))


def _split_after(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    start = 0
    for match in pattern.finditer(text):
        yield text[start : match.end()]
        start = match.end()
    if start < len(text):
        yield text[start:]


# -- readers -----------------------------------------------------------------------------------------------------------


TEXT_KINDS = ("text", "code")
OWN_LICENCE = "own"  # what a user brings without naming a licence
_HELD_OUT = re.compile(r"(?:^|[-_.])(?:val|valid|validation)(?:[-_.]|$)")


class FilesConfig(Protocol):
    """What is read of `streams.sources.DataConfig`."""

    @property
    def text(self) -> Sequence[str]: ...
    @property
    def code(self) -> Sequence[str]: ...
    @property
    def dialogues(self) -> Sequence[str]: ...
    @property
    def problems(self) -> Sequence[str]: ...
    @property
    def preferences(self) -> Sequence[str]: ...
    @property
    def shape(self) -> str: ...
    @property
    def encoding(self) -> str: ...
    @property
    def text_field(self) -> Sequence[str]: ...
    @property
    def max_rejected(self) -> float: ...


@dataclass(frozen=True)
class Source:
    """One file to read: where it is, what it is called in messages and records, and how it is read."""

    path: Path
    name: str  # relative to the root, with "/"
    group: str  # the first folder below the root and the kind's own folder, or the file: the `source` of its texts
    is_table: bool
    split: str | None  # val for a file so called; None: train, or each row by its id where no file is called so


def read_files(
    root: Path, config: FilesConfig, kind: str, rejected: Path, counts: dict[str, int] | None = None
) -> Iterator[tuple[str, AnyRecord]]:
    """(split, record) for every accepted row of `kind` below `root`, files in order of name, rows in order.

    kind: text, code (Text), dialogues (Dialogue), problems (Problem), preferences (Pair). `rejected`: the JSONL file to
    write; to `counts` is added what became of the rows. No globs give nothing.
    Raises DataError: a glob without a match, more rejected than `max_rejected` of all rows,
    or no row left; the last two after the last record.
    """
    patterns = _globs(config, kind)
    if not patterns:
        return
    sources = find(root, patterns, kind)
    has_val = any(source.split for source in sources)
    with Intake(rejected, config.max_rejected, f"{kind} of {root}", has_val=has_val) as intake:
        for source in sources:
            yield from _read(source, config, kind, intake)
        intake.add_to({} if counts is None else counts)
        say(
            f"{kind}: {intake.num_accepted} rows accepted, {intake.num_duplicates} duplicates, "
            f"{intake.num_rejected} rejected, from {len(sources)} files"
        )


def _globs(config: FilesConfig, kind: str) -> Sequence[str]:
    by_kind = {
        "text": config.text,
        "code": config.code,
        "dialogues": config.dialogues,
        "problems": config.problems,
        "preferences": config.preferences,
    }
    return by_kind[kind]


# --- files -----------------------------------------------------------------------------------------------------------


def find(root: Path, patterns: Sequence[str], kind: str) -> list[Source]:
    """The files that the globs match, each once, in order of name. Raises DataError for a glob that matches none."""
    sources: dict[str, Source] = {}
    links = _Links(root)
    for pattern in patterns:
        matched = _match(root, pattern, links)
        if not matched:
            raise DataError(
                f"no file matches {root / pattern}: put files there, or write data.{kind}=[] if there are none of this"
                " kind"
            )
        for path in matched:
            name = path.relative_to(root).as_posix()
            if path.is_dir():
                for file in _walk(path, links):
                    inner = file.relative_to(root).as_posix()
                    sources.setdefault(inner, _source(file, inner, name, kind, direct=False))
            else:
                sources[name] = _source(path, name, name, kind, direct=True)
    if links.lost:
        say(
            f"{kind}: {len(links.lost)} links lead nowhere or to a folder above them, the first {min(links.lost)}; they"
            " are not read"
        )
    binary = [name for name, source in sources.items() if not source.is_table and ingest_files.is_binary(source.path)]
    if binary:
        say(f"{kind}: {len(binary)} binary files are skipped, the first {binary[0]}")
    return [sources[name] for name in sorted(sources.keys() - set(binary))]


def _match(root: Path, pattern: str, links: "_Links") -> list[Path]:
    try:
        paths = sorted(root.glob(pattern))
    except (ValueError, NotImplementedError, IndexError) as error:  # an empty or absolute pattern, a wrong **
        raise DataError(f"{pattern!r} is not a glob below {root} ({error})") from error
    shown = [path for path in paths if not _is_hidden(path.relative_to(root)) and links.allow(path)]
    files = [path for path in shown if path.is_file()]
    # `**/*` matches folders too; one whose files it matches anyway is no folder of sources.
    parents = {parent for file in files for parent in file.parents}
    return [*files, *(path for path in shown if path.is_dir() and path not in parents and any(_walk(path, links)))]


def _walk(folder: Path, links: "_Links") -> Iterator[Path]:
    below = (p for p in sorted(folder.rglob("*")) if not _is_hidden(p.relative_to(folder)))
    return (p for p in below if links.allow(p) and p.is_file())


class _Links:
    """Which links below a root are followed. A path is judged by where it leads in the end, whatever it passes on
    the way.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ends = Path(os.path.realpath(root))
        self.lost: set[Path] = set()  # lead nowhere, in a circle, or to a folder that they lie in

    def allow(self, path: Path) -> bool:
        """Whether the path may be read. Raises DataError for one that leads out of the root."""
        end = Path(os.path.realpath(path))
        if not end.is_relative_to(self.ends):
            raise DataError(
                f"{path}: is a link that leaves {self.root} or lies behind one; put a copy there, or take it away"
            )
        if path.is_symlink() and (not path.exists() or Path(os.path.realpath(path.parent)).is_relative_to(end)):
            self.lost.add(path)
            return False
        return not _is_hidden(end.relative_to(self.ends))


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _source(path: Path, name: str, group: str, kind: str, *, direct: bool) -> Source:
    is_table = path.suffix.lower() in ingest_files.TABLES and (direct or kind not in TEXT_KINDS)
    held_out = direct and any(_HELD_OUT.search(part.lower()) for part in name.split("/"))
    return Source(path=path, name=name, group=group, is_table=is_table, split="val" if held_out else None)


# --- rows ------------------------------------------------------------------------------------------------------------


def _read(source: Source, config: FilesConfig, kind: str, intake: Intake) -> Iterator[tuple[str, AnyRecord]]:
    try:
        if source.path.stat().st_size == 0:
            say(f"{source.name}: warning: the file is empty")
            return
        if source.is_table:
            yield from _table(source, config, kind, intake)
        elif kind in TEXT_KINDS:
            yield from _document(source, config, intake)
        else:
            intake.reject(source.name, 1, RowError("file", f"expected {', '.join(ingest_files.TABLES)}"))
    except OSError as error:
        raise DataError(f"{source.name}: cannot be read ({error.strerror or error})") from error


def _table(source: Source, config: FilesConfig, kind: str, intake: Intake) -> Iterator[tuple[str, AnyRecord]]:
    columns = shapes.Columns(tuple(config.text_field))
    try:
        shape = shapes.named(config.shape, kind)
    except RowError as error:
        raise DataError(str(error)) from error
    rows = ingest_files.rows(source.path, config.encoding)
    head = list(itertools.islice(rows, shapes.SAMPLE_ROWS))
    if shape is None:
        shape = shapes.detect([row for _, row in head if isinstance(row, dict)], kind, columns)
    for line, row in itertools.chain(head, rows):
        try:
            if isinstance(row, RowError):
                raise row
            record = _convert(shape, row, columns, kind)
            if isinstance(record, Text):
                licence = record.licence or OWN_LICENCE
                record = replace(record, source=record.source or source.name, licence=licence)
            accepted = intake.accept(record, source.name, line, source.split)
        except RowError as error:
            intake.reject(source.name, line, error)
        else:
            yield from accepted


def _convert(shape: shapes.Shape | None, row: object, columns: shapes.Columns, kind: str) -> AnyRecord:
    if shape is None:
        found = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise RowError("row", f"fits no shape of {kind} ({', '.join(shapes.names(kind))}); it has: {found[:200]}")
    return shapes.convert(shape, row, columns)


def _document(source: Source, config: FilesConfig, intake: Intake) -> Iterator[tuple[str, AnyRecord]]:
    for line, row in ingest_files.document(source.path, config.encoding):
        try:
            if isinstance(row, RowError):
                raise row
            if not row["text"].strip():
                raise RowError("text", "is blank")
            record = Text(text=row["text"], source=source.group, path="", licence=OWN_LICENCE)
            accepted = intake.accept(record, source.name, line, source.split)
        except RowError as error:
            intake.reject(source.name, line, error)
        else:
            yield from accepted
