"""The user's own files (`data=files`) in `data/own/` -> records of text, code, dialogues, problems, pairs and labels.

In: globs below a root folder, one list per kind. A `.jsonl`, `.json`, `.csv` or `.parquet` file is a table: `files`
reads it and `shapes` turns its rows into records; its shape is the one that fits most of its first 100 rows. Any other
file is one text. A folder that a glob matches is a folder of sources: every text file in it is one document, whatever
its suffix. Out: (split, record) for each accepted row.

Hidden files and `__pycache__` are never read. A link is followed as long as it stays below the root; one that leaves it
is an error, because a repository from elsewhere may link to anything on this machine. Links that lead nowhere or to a
folder above them are left out, and so are binary files; a message gives their number. An empty file gets a warning; a
glob that matches nothing is an error.

`Intake` decides about each row, here and in `hub`: accepted, a duplicate, or rejected. Rejected rows go
to a JSONL file (file, line, field, reason), and the first five are printed as `file:line: field: reason`; the three
counts add up to the number of rows. A row without an id gets the blake2b hash of its content as its id. The same id
with the same content is a duplicate, with other content it is rejected. Held out are files with `val` or `test` in
their names; where a source has none, `val_share` and `test_share` of the rows by blake2b(id), so that new rows move no
others. A problem goes by its key, so that two versions of one problem stay together. Text and code have no test split.

`feedback` reads the preference pairs and the labels that people gave on the web page, and selects those to train on.

Not promised: cleaning. Secrets, generated files and near duplicates leave later, in `stage_corpus`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Generic, TypeVar

from pipeline.ingest import files as ingest_files
from pipeline.ingest import shapes
from pipeline.ingest.records import Label, Pair, Problem, SourceRecord, Text
from pipeline.ingest.sources import DataConfig
from pipeline.ingest.tool_calls import RowError, to_json
from pipeline.run.device import stable_hash
from pipeline.run.errors import DataError
from pipeline.run.tracking import say
from pipeline.run.types import JsonObject

TEXT_BYTES = 1_000_000  # a longer text is cut at blank lines
NUM_PRINTED = 5
COUNTS = ("accepted", "duplicates", "rejected")
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")
_LINE_FEED = re.compile(r"\n")
TEXT_KINDS = ("text", "code")
OWN_LICENCE = "own"  # what a user brings without naming a licence
_HELD_OUT = {
    "val": re.compile(r"(?:^|[-_.])(?:val|valid|validation)(?:[-_.]|$)"),
    "test": re.compile(r"(?:^|[-_.])test(?:[-_.]|$)"),
}


@dataclass(frozen=True)
class Source:
    """One file to read: its path, its name in messages and records, and how to read it."""

    path: Path
    name: str  # relative to the root, with "/"
    group: str  # the folder that a glob matched, or the file: the `source` of its texts
    is_table: bool
    split: str | None  # val or test for a file so named; None: train, or by the id of each row


@dataclass(frozen=True)
class RowCounts:
    """Numbers of rows of one kind: accepted, duplicates, rejected. They add up to the rows that were read."""

    totals: dict[str, int] = field(default_factory=dict)
    files: dict[str, dict[str, int]] = field(default_factory=dict)  # by file

    def shown(self, title: str) -> str:
        """A table with a line for each file."""
        rows = [(title, *COUNTS), *((name, *(str(counts[n]) for n in COUNTS)) for name, counts in self.files.items())]
        width = max(len(row[0]) for row in rows)
        return "\n".join("  ".join([row[0].ljust(width), *(cell.rjust(10) for cell in row[1:])]) for row in rows)


def read_files(
    root: Path, config: DataConfig, kind: str, rejected: Path, tally: RowCounts | None = None
) -> Iterator[tuple[str, SourceRecord]]:
    """(split, record) for every accepted row of `kind` below `root`, files in order of name, rows in order.

    kind: text, code (Text), dialogues (Dialogue), problems (Problem), preferences (Pair), labels (Label).
    `rejected`: the JSONL file to write. Adds the numbers of rows to `tally`. No globs, no records.
    Raises DataError: a glob without a match, more rejected than `max_rejected` of all rows,
    or no row left; the last two after the last record.
    """
    patterns = _globs(config, kind)
    if not patterns:
        return
    sources = find_sources(root, patterns, kind)
    named = {source.split for source in sources}
    shares = (0.0 if "val" in named else config.val_share, 0.0 if named & {"val", "test"} else test_share(config, kind))
    with Intake(rejected, config.max_rejected, f"{kind} of {root}", shares) as intake:
        for source in sources:
            yield from _read(source, config, kind, intake)
        intake.add_to(tally or RowCounts())
        say(
            f"{kind}: {intake.num_accepted} rows accepted, {intake.num_duplicates} duplicates, "
            f"{intake.num_rejected} rejected, from {len(sources)} files"
        )


def test_share(config: DataConfig, kind: str) -> float:
    """The share of rows that the test takes."""
    return 0.0 if kind in TEXT_KINDS else config.test_share


def _globs(config: DataConfig, kind: str) -> Sequence[str]:
    by_kind = {
        "text": config.text,
        "code": config.code,
        "dialogues": config.dialogues,
        "problems": config.problems,
        "preferences": config.preferences,
        "labels": config.labels,
    }
    return by_kind[kind]


# --- files -----------------------------------------------------------------------------------------------------------


def find_sources(root: Path, patterns: Sequence[str], kind: str) -> list[Source]:
    """The files that the globs match, each once, in order of name. Raises DataError for a glob that matches none."""
    sources: dict[str, Source] = {}
    links = _Links(root)
    for pattern in patterns:
        matched = _match_glob(root, pattern, links)
        if not matched:
            raise DataError(missing(root, kind, pattern))
        for path in matched:
            name = path.relative_to(root).as_posix()
            if path.is_dir():
                for file in _walk(path, links):
                    inner = file.relative_to(root).as_posix()
                    sources.setdefault(inner, _make_source(file, inner, name, kind, direct=False))
            else:
                sources[name] = _make_source(path, name, name, kind, direct=True)
    if links.skipped:
        say(
            f"{kind}: {len(links.skipped)} links lead nowhere or to a folder above them, "
            f"the first {min(links.skipped)}; they are not read"
        )
    binary = [name for name, source in sources.items() if not source.is_table and ingest_files.is_binary(source.path)]
    if binary:
        say(f"{kind}: {len(binary)} binary files are skipped, the first {binary[0]}")
    return [sources[name] for name in sorted(sources.keys() - set(binary))]


def missing(root: Path, kind: str, pattern: str) -> str:
    """What to do about a glob that matches nothing."""
    return (
        f"no file matches {root / pattern}: put files there, or write `{kind}: []` in conf/data/files.yaml (of one "
        f"experiment: dvc exp run -S 'conf/data/files.yaml:{kind}=[]') if there are none of this kind"
    )


def missing_globs(root: Path, config: DataConfig, kinds: Sequence[str]) -> list[str]:
    """A line for each glob of these kinds that matches nothing below `root`, before anything is read."""
    if config.source != "files":
        return []
    links = _Links(root)
    return [
        missing(root, kind, pattern)
        for kind in kinds
        for pattern in _globs(config, kind)
        if not _match_glob(root, pattern, links)
    ]


def _match_glob(root: Path, pattern: str, links: _Links) -> list[Path]:
    try:
        paths = sorted(root.glob(pattern))
    except (ValueError, NotImplementedError, IndexError) as error:  # an empty or absolute pattern, a wrong **
        raise DataError(f"{pattern!r} is not a glob below {root} ({error})") from error
    visible = [path for path in paths if not _is_hidden(path.relative_to(root)) and links.allow(path)]
    files = [path for path in visible if path.is_file()]
    # `**/*` matches folders too; one whose files it matches as well is no folder of sources.
    parents = {parent for file in files for parent in file.parents}
    return [*files, *(path for path in visible if path.is_dir() and path not in parents and any(_walk(path, links)))]


def _walk(folder: Path, links: _Links) -> Iterator[Path]:
    below = (p for p in sorted(folder.rglob("*")) if not _is_hidden(p.relative_to(folder)))
    return (p for p in below if links.allow(p) and p.is_file())


class _Links:
    """Decides which links below a root are followed: only where a path leads in the end matters, not its way there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.real_root = Path(os.path.realpath(root))
        self.skipped: set[Path] = set()  # links that lead nowhere, in a circle, or to a folder that they lie in

    def allow(self, path: Path) -> bool:
        """Whether the path may be read. Raises DataError for one that leads out of the root."""
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(self.real_root):
            raise DataError(
                f"{path}: is a link that leaves {self.root} or lies behind one; put a copy there, or take it away"
            )
        if path.is_symlink() and (not path.exists() or Path(os.path.realpath(path.parent)).is_relative_to(target)):
            self.skipped.add(path)
            return False
        return not _is_hidden(target.relative_to(self.real_root))


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _make_source(path: Path, name: str, group: str, kind: str, *, direct: bool) -> Source:
    is_table = path.suffix.lower() in ingest_files.TABLES and (direct or kind not in TEXT_KINDS)
    parts = [part.lower() for part in name.split("/")] if direct else []
    split = next((split for split, form in _HELD_OUT.items() if any(map(form.search, parts))), None)
    if split == "test" and kind in TEXT_KINDS:
        split = "val"
    return Source(path=path, name=name, group=group, is_table=is_table, split=split)


# --- rows ------------------------------------------------------------------------------------------------------------


def _read(source: Source, config: DataConfig, kind: str, intake: Intake) -> Iterator[tuple[str, SourceRecord]]:
    try:
        if source.path.stat().st_size == 0:
            say(f"{source.name}: warning: the file is empty")
            return
        if source.is_table:
            yield from _read_table(source, config, kind, intake)
        elif kind in TEXT_KINDS:
            yield from _read_document(source, config, kind, intake)
        else:
            intake.reject(source.name, 1, RowError("file", f"expected {', '.join(ingest_files.TABLES)}"))
    except OSError as error:
        raise DataError(f"{source.name}: cannot be read ({error.strerror or error})") from error


def _read_table(source: Source, config: DataConfig, kind: str, intake: Intake) -> Iterator[tuple[str, SourceRecord]]:
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
        with intake.rejecting(source.name, line):
            if isinstance(row, RowError):
                raise row
            record = _convert(shape, row, columns, kind)
            if isinstance(record, Text):
                licence = record.licence or OWN_LICENCE
                record = replace(record, source=record.source or source.name, licence=licence)
            yield from intake.accept(record, source.name, line, source.split)


def _convert(shape: shapes.Shape | None, row: object, columns: shapes.Columns, kind: str) -> SourceRecord:
    if shape is None:
        content = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise RowError("row", f"fits no shape of {kind} ({', '.join(shapes.names(kind))}); it has: {content[:200]}")
    return shapes.convert(shape, row, columns)


def _read_document(source: Source, config: DataConfig, kind: str, intake: Intake) -> Iterator[tuple[str, SourceRecord]]:
    if source.path.suffix.lower() == ingest_files.NOTEBOOK:
        rows = iter([ingest_files.notebook(source.path, config.encoding, code=kind == "code")])
    else:
        rows = ingest_files.document(source.path, config.encoding)
    for line, row in rows:
        with intake.rejecting(source.name, line):
            if isinstance(row, RowError):
                raise row
            if not row["text"].strip():
                raise RowError("text", "is blank")
            record = Text(text=row["text"], source=source.group, path="", licence=OWN_LICENCE)
            yield from intake.accept(record, source.name, line, source.split)


# --- accepted and rejected rows --------------------------------------------------------------------------------------


class Intake:
    """Accepts and rejects the rows of one source, and counts them.

    A context manager: on leaving without an error it checks the counts, else it only closes the file of rejected rows.
    """

    def __init__(
        self, rejected: Path, max_rejected: float | None, name: str, shares: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        """`rejected`: the JSONL file to write; `max_rejected`: share of all rows, None: any number, all of them too;
        `name`: of the source, for messages; `shares` of the rows that go to val and test by their ids.
        """
        self._shares = shares
        self.num_accepted = self.num_duplicates = self.num_rejected = 0
        self._max_rejected = max_rejected
        self._name = name
        self._path = rejected
        self._seen: dict[str, tuple[bytes, str, int]] = {}  # id -> content, file, line
        self._first_messages: list[str] = []
        self._by_file: dict[str, Counter[str]] = {}
        rejected.parent.mkdir(parents=True, exist_ok=True)
        self._file = rejected.open("w", encoding="utf-8", newline="\n")

    @property
    def num_rows(self) -> int:
        """Rows so far."""
        return self.num_accepted + self.num_duplicates + self.num_rejected

    def __enter__(self) -> Intake:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is None:
            self._check_counts()

    def add_to(self, tally: RowCounts) -> None:
        """Add the numbers of accepted, duplicate and rejected rows."""
        for name in COUNTS:
            tally.totals[name] = tally.totals.get(name, 0) + getattr(self, f"num_{name}")
        for file, counts in self._by_file.items():
            tally.files[file] = {name: counts[name] for name in COUNTS}

    def accept(self, record: SourceRecord, file: str, line: int, split: str | None) -> list[tuple[str, SourceRecord]]:
        """(split, record), one per piece of a long text, or nothing for a duplicate. `split` None: by the id.

        Raises RowError for an id that is taken and for what UTF-8 cannot encode.
        """
        content = _content_hash(record)
        identity = record.path if isinstance(record, Text) else record.id
        identity = identity or content.hex()
        earlier = self._seen.get(identity)
        if earlier is not None and earlier[0] == content:
            self._count(file, "duplicates")
            return []
        if earlier is not None:
            raise RowError("id", f"{identity[:80]!r} stands at {earlier[1]}:{earlier[2]} with other content")
        self._seen[identity] = (content, file, line)
        self._count(file, "accepted")
        if isinstance(record, Text):
            text_path = record.path or (f"{file}:{line}" if line > 1 else file)
            return [(self._split(split, identity), piece) for piece in cut(replace(record, path=text_path))]
        if isinstance(record, Problem):
            record = replace(record, id=identity, key=record.key or identity)
            return [(self._split(split, record.key), record)]
        return [(self._split(split, identity), replace(record, id=identity))]

    def _split(self, split: str | None, identity: str) -> str:
        return split or split_of(identity, *self._shares)

    def _count(self, file: str, name: str) -> None:
        setattr(self, f"num_{name}", getattr(self, f"num_{name}") + 1)
        self._by_file.setdefault(file, Counter())[name] += 1

    @contextlib.contextmanager
    def rejecting(self, file: str, line: int) -> Iterator[None]:
        """Reject the row for a RowError in the block."""
        try:
            yield
        except RowError as error:
            self.reject(file, line, error)

    def reject(self, file: str, line: int, error: RowError) -> None:
        """Write the row to the file of rejected rows; the first five are printed too."""
        self._count(file, "rejected")
        entry = {"file": file, "line": line, "field": error.field, "reason": error.reason}
        self._file.write(json.dumps(entry) + "\n")  # ASCII: a reason may quote half a surrogate pair
        if self.num_rejected <= NUM_PRINTED:
            self._first_messages.append(
                f"{file}:{line}: {error.field}: {error.reason}".encode("utf-8", "replace").decode()
            )
            say(self._first_messages[-1])

    def _check_counts(self) -> None:
        if self._max_rejected is None:
            return
        if self.num_rejected > self._max_rejected * self.num_rows:
            raise DataError(
                f"{self._name}: {self.num_rejected} of {self.num_rows} rows are rejected, more than max_rejected = "
                f"{self._max_rejected:g} of all. All of them: {self._path}. The first:\n  "
                + "\n  ".join(self._first_messages)
            )
        if not self.num_accepted:
            raise DataError(f"{self._name}: nothing is left of {self.num_rows} rows, {self.num_rejected} rejected")


def split_of(identity: str, val: float, test: float) -> str:
    """train, val or test, by the id alone: new rows do not move others between the splits."""
    digest = hashlib.blake2b(identity.encode("utf-8"), digest_size=8).digest()
    quotient, remainder = divmod(int.from_bytes(digest, "big"), 50)
    number = (remainder + quotient % 1000 / 1000) / 50  # uniform in [0, 1); the first fiftieth was held out ever since
    return "val" if number < val else "test" if number < val + test else "train"


def _content_hash(record: SourceRecord) -> bytes:
    """A hash of a record's content, without its id. Raises RowError for what JSON in UTF-8 cannot encode."""
    if isinstance(record, Text):
        text, identity = record.text, record.path + record.source + record.licence
    else:
        identity, text = record.id, to_json({**vars(record), "id": ""}, "row")
    try:
        identity.encode("utf-8")
        return hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()
    except UnicodeEncodeError as error:
        raise RowError("row", "holds half a surrogate pair, which UTF-8 cannot write") from error


# --- long texts ------------------------------------------------------------------------------------------------------


def cut(document: Text) -> list[Text]:
    """A text over 1 MB as pieces of at most 1 MB, which join to the text; their paths end in `#1`, `#2`, ..."""
    if _num_bytes(document.text) <= TEXT_BYTES:
        return [document]
    pieces: list[list[str]] = []
    size = TEXT_BYTES  # as if a piece were full: the first part starts one
    for part in _text_parts(document.text):
        length = _num_bytes(part)
        if size + length > TEXT_BYTES:
            pieces.append([])
            size = 0
        pieces[-1].append(part)
        size += length
    return [
        replace(document, text="".join(piece), path=f"{document.path}#{number}")
        for number, piece in enumerate(pieces, start=1)
    ]


def _text_parts(text: str) -> Iterator[str]:
    """Paragraphs with the blank lines after them; too long a paragraph by lines, too long a line by characters (of 4
    bytes at most).
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


ACCEPT = ("all", "reviewed")
FEEDBACK = "feedback"  # the `source` of these records


@dataclass(frozen=True, kw_only=True)
class FeedbackConfig:
    """`tasks.feedback`: how far what people gave on the web page is believed."""

    accept: str = "all"
    """all; reviewed: only rows to which somebody has added `"reviewed": true`."""
    share: float = 0.2
    """Of the training pairs that may come from there, and of the training labels."""

    def __post_init__(self) -> None:
        if self.accept not in ACCEPT:
            raise ValueError(f"accept: expected {' or '.join(ACCEPT)}, got {self.accept!r}")
        if not 0 <= self.share < 1:
            raise ValueError(f"share: expected a share in [0, 1), got {self.share}")


Given = TypeVar("Given", Pair, Label)


@dataclass(frozen=True)
class FeedbackRow(Generic[Given]):
    """A record, and whether somebody has reviewed it."""

    record: Given
    reviewed: bool


def feedback(
    path: Path, kind: type[Given], config: FeedbackConfig, others: int, rejected: Path
) -> tuple[list[Given], JsonObject]:
    """The pairs or labels to train on beside `others` others, in the order of the file, and the counts of all rows.

    Anybody who may ask the server may give them, so they are trusted only so far. A row that cannot be read is written
    to the rejected rows and costs no other row. Of the others at most `share` of all training records are taken: those
    that a person reviewed first, then one of each giver in turn, so that thousands of rows of one key leave room for
    two of another. Hashes of the ids decide whose turn it is, and which of their rows: a new row displaces one at most.
    Without API keys all rows are of one giver, and who has many keys has many turns.

    Without the file there are none. `rejected`: the JSONL file for what cannot be read (file, line, field, reason).
    """
    counts: Counter[str] = Counter()
    rows = list(_read_feedback(path, kind, rejected, counts)) if path.is_file() and path.stat().st_size else []
    accepted = [row for row in rows if row.reviewed or config.accept == "all"]
    selected = _select(accepted, int(config.share * others / (1 - config.share) + 1e-9))
    by_giver = Counter(record.given_by or "nobody named" for record in selected)
    summary = {
        "rows": counts.total() + len(rows),
        "kept": len(selected),
        "duplicates": counts["duplicates"],
        "rejected": counts["rejected"],
        "not_reviewed": len(rows) - len(accepted),
        "over_share": len(accepted) - len(selected),
        "kept_by": dict(sorted(by_giver.items())),
    }
    if summary["rows"]:
        say(
            f"{path.name}: {summary['kept']} of {summary['rows']} rows are trained on, of {len(by_giver)} givers; "
            f"{summary['rejected']} cannot be read, {summary['not_reviewed']} are not reviewed, "
            f"{summary['over_share']} are over {config.share:.0%} of the {kind.__name__.lower()}s"
        )
    return selected, summary


def _read_feedback(path: Path, kind: type[Given], rejected: Path, counts: Counter[str]) -> Iterable[FeedbackRow[Given]]:
    """The rows that can be read; adds the numbers of the others to `counts`."""
    (shape,) = (shape for shape in shapes.SHAPES if {Pair: "preferences", Label: "labels"}[kind] in shape.kinds)
    with Intake(rejected, None, f"{FEEDBACK} of {path}") as intake:
        for line, row in ingest_files.rows(path, "utf-8"):
            with intake.rejecting(path.name, line):
                if isinstance(row, RowError):
                    raise row
                read = shapes.convert(shape, row, shapes.Columns())
                reviewed = isinstance(row, Mapping) and row.get("reviewed") is True
                for _, record in intake.accept(read, path.name, line, "train"):
                    assert isinstance(record, kind)
                    yield FeedbackRow(replace(record, source=FEEDBACK), reviewed)
        counts.update(duplicates=intake.num_duplicates, rejected=intake.num_rejected)


def _select(rows: list[FeedbackRow[Given]], limit: int) -> list[Given]:
    """At most `limit` records: reviewed ones first, then one of each giver in turn."""
    if len(rows) <= limit:
        return [row.record for row in rows]
    turns: Counter[tuple[bool, str]] = Counter()
    ranked: list[tuple[bool, int, int, int]] = []  # not reviewed, turn, hash of the giver, index
    for index in sorted(range(len(rows)), key=lambda index: stable_hash("feedback", rows[index].record.id)):
        row, giver = rows[index], rows[index].record.given_by or ""
        ranked.append((not row.reviewed, turns[row.reviewed, giver], stable_hash("giver", giver), index))
        turns[row.reviewed, giver] += 1
    return [rows[index].record for index in sorted(index for *_, index in sorted(ranked)[:limit])]
