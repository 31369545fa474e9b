"""Read the user's files in `data/own/` (`data=files`) as text, code, dialogues, problems, preference pairs and labels.

In: the entries of a kind that name files (`ingest/entries.py`), as globs below a root folder. `.jsonl`, `.json`, `.csv`
and `.parquet` files are tables: `files` reads them and `shapes` turns rows into records; the shape is the one that fits
the most of the first 100 rows, unless the entry names a shape. Any other file is one text. If a glob matches a folder,
every text file in it is one document, whatever its suffix. Out: an `Accepted` for each accepted row.

Options without effect are errors: `columns` on a file that is not a table or that lacks those columns, `encoding` on
parquet. A file matched by two entries is also an error if one of them has options.

Hidden files and `__pycache__` are never read. Links are followed within the root; a link that leaves it is an error,
because a third-party repository may link to anything on this machine. Broken links, links to a parent folder and binary
files are skipped and counted in a message. An empty file triggers a warning; a glob without a match is an error.

`Intake` (`ingest/intake.py`) handles each row. Files with `val` or `test` in their names are held out; if a kind has
no such file, `val_share` and `test_share` of its rows are held out. Text and code have no test split.

`feedback` reads preference pairs and labels given on the web page, and selects the ones to train on.

Not guaranteed: clean texts. Secrets, generated files and near duplicates are removed later, in `stage_corpus`.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

from pipeline.ingest import files as ingest_files
from pipeline.ingest import shapes
from pipeline.ingest.entries import FileEntry
from pipeline.ingest.intake import Intake, RowCounts
from pipeline.ingest.records import Label, Pair, SourceRecord, Text
from pipeline.ingest.sources import TEXT_KINDS, DataConfig
from pipeline.ingest.tool_calls import RowError
from pipeline.run.config import suggest
from pipeline.run.device import stable_hash
from pipeline.run.errors import DataError
from pipeline.run.tracking import say
from pipeline.run.types import JsonObject

MOST_COLUMNS = 20  # listed in a message
OWN_LICENSE = "own"  # user data without a stated license
_HELD_OUT = {
    "val": re.compile(r"(?:^|[-_.])(?:val|valid|validation)(?:[-_.]|$)"),
    "test": re.compile(r"(?:^|[-_.])test(?:[-_.]|$)"),
}


@dataclass(frozen=True)
class TableReading:
    """How to read an entry's files."""

    encoding: str = "utf-8"
    shape: str = "auto"
    text_field: tuple[str, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)  # column in the file -> our name


@dataclass(frozen=True)
class Source:
    """One file to read: its path, its name in messages and records, and how to read it."""

    path: Path
    name: str  # relative to the root, with "/"
    group: str  # the folder that a glob matched, or the file: the `source` of its texts
    is_table: bool
    split: str | None  # val or test if its name contains that word; None: depends on each row's id
    entry: int = 0  # index of its entry among those of the kind
    reading: TableReading = field(default_factory=TableReading)


@dataclass(frozen=True)
class Accepted:
    """A record and its origin; a long text yields several records."""

    entry: int  # index among the entries of the kind
    file: str
    line: int
    number: int  # of the row among its source's accepted rows; one line may contain several rows
    split: str
    record: SourceRecord


def read_files(
    root: Path, config: DataConfig, kind: str, rejected: Path, tally: RowCounts | None = None
) -> Iterator[Accepted]:
    """Every accepted row of the files of `kind` below `root`, with files in name order and rows in file order.

    kind: text, code (Text), dialogues (Dialogue), problems (Problem), preferences (Pair), labels (Label). `rejected`:
    the JSONL file to write. Adds the row counts to `tally`. Yields nothing if no entry names files.
    Raises DataError for a glob without a match, an option without effect, missing columns, more than `max_rejected` of
    all rows rejected, or no rows left; the last two are raised after the last record.
    """
    entries = _file_entries(config, kind)
    if not entries:
        return
    sources = find_sources(root, entries, config, kind)
    named = {source.split for source in sources}
    shares = (0.0 if "val" in named else config.val_share, 0.0 if named & {"val", "test"} else test_share(config, kind))
    with Intake(rejected, config.max_rejected, f"{kind} of {root}", shares) as intake:
        for source in sources:
            yield from _read(source, kind, intake)
        intake.add_to(tally or RowCounts())
        say(
            f"{kind}: {intake.num_accepted} rows accepted, {intake.num_duplicates} duplicates, "
            f"{intake.num_rejected} rejected, from {len(sources)} files"
        )


def test_share(config: DataConfig, kind: str) -> float:
    """The share of rows that goes to the test split."""
    return 0.0 if kind in TEXT_KINDS else config.test_share


def _file_entries(config: DataConfig, kind: str) -> dict[int, FileEntry]:
    """Entry index -> entry, for the entries that name files."""
    return {number: entry for number, entry in enumerate(config.entries(kind)) if isinstance(entry, FileEntry)}


def reading_of(entry: FileEntry, config: DataConfig) -> TableReading:
    """How to read an entry's files: its own options, else the top-level keys."""
    return TableReading(
        encoding=entry.encoding or config.encoding,
        shape=entry.shape or config.shape,
        text_field=tuple(config.text_field if entry.text_field is None else entry.text_field),
        columns=entry.columns,
    )


# --- files -----------------------------------------------------------------------------------------------------------


def find_sources(root: Path, entries: Mapping[int, FileEntry], config: DataConfig, kind: str) -> list[Source]:
    """The files matched by the globs, each once, in name order. Raises DataError for a glob without a match, for
    options without effect, and for a file matched by two entries if one of them has options.
    """
    sources: dict[str, Source] = {}
    links = _Links(root)
    for number, entry in entries.items():
        matched = _match_glob(root, entry.files, links)
        if not matched:
            raise DataError(missing(root, kind, entry.files))
        reading = reading_of(entry, config)
        for path in matched:
            name = path.relative_to(root).as_posix()
            inner = [(file, file.relative_to(root).as_posix()) for file in _walk(path, links)] if path.is_dir() else []
            for file, inner_name in inner or [(path, name)]:
                earlier = sources.get(inner_name)
                if earlier is not None:
                    _check_owner(inner_name, entries[earlier.entry], entry, kind)
                if earlier is None or not inner:  # a direct match wins: only then is a file read as a table
                    source = _make_source(file, inner_name, name, kind, direct=not inner)
                    sources[inner_name] = replace(source, entry=number, reading=reading)
    if links.skipped:
        say(
            f"{kind}: {len(links.skipped)} links are broken or point to a parent folder and were skipped; "
            f"the first: {min(links.skipped)}"
        )
    binary = [name for name, source in sources.items() if not source.is_table and ingest_files.is_binary(source.path)]
    if binary:
        say(f"{kind}: {len(binary)} binary files were skipped; the first: {binary[0]}")
    found = [sources[name] for name in sorted(sources.keys() - set(binary))]
    for number, entry in entries.items():
        _check_options(kind, entry, [source for source in found if source.entry == number])
    return found


def _check_owner(name: str, first: FileEntry, second: FileEntry, kind: str) -> None:
    if first != second and (first != FileEntry(files=first.files) or second != FileEntry(files=second.files)):
        raise DataError(
            f"{kind}: {name} is matched by two entries, {first.files} and {second.files}, and one of them has options: "
            "use globs that do not overlap"
        )


def _check_options(kind: str, entry: FileEntry, sources: Sequence[Source]) -> None:
    """Raise DataError for an option that does not apply to the entry's files."""
    plain = next((source.name for source in sources if not source.is_table), None)
    if entry.table_keys and plain is not None:
        raise DataError(
            f"{kind}: {entry.files}: `{entry.table_keys[0]}` has no effect on {plain}, which is a single text; "
            f"only {', '.join(ingest_files.TABLES)} files have rows: use a separate glob for those"
        )
    if entry.encoding is not None and sources and all(s.path.suffix.lower() == ".parquet" for s in sources):
        raise DataError(f"{kind}: {entry.files}: `encoding` has no effect on parquet; remove `encoding`")


def missing(root: Path, kind: str, pattern: str) -> str:
    """The message for a glob that matches nothing."""
    return (
        f"no file matches {root / pattern}: put files there, or set `{kind}: []` in conf/data/files.yaml if you have "
        f"none, or `{kind}: [packages]` for generated data (for a single experiment: "
        f"dvc exp run -S 'conf/data/files.yaml:{kind}=[packages]')"
    )


def missing_globs(root: Path, config: DataConfig, kinds: Sequence[str]) -> list[str]:
    """One line for each glob of these kinds that matches nothing below `root`, without reading any file."""
    links = _Links(root)
    return [
        missing(root, kind, entry.files)
        for kind in kinds
        for entry in _file_entries(config, kind).values()
        if not _match_glob(root, entry.files, links)
    ]


def _match_glob(root: Path, pattern: str, links: _Links) -> list[Path]:
    try:
        paths = sorted(root.glob(pattern))
    except (ValueError, NotImplementedError, IndexError) as error:  # an empty or absolute pattern, an invalid **
        raise DataError(f"{pattern!r} is not a glob below {root} ({error})") from error
    visible = [path for path in paths if not _is_hidden(path.relative_to(root)) and links.allow(path)]
    files = [path for path in visible if path.is_file()]
    # `**/*` matches folders too; a folder whose files also match is not a folder of sources.
    parents = {parent for file in files for parent in file.parents}
    return [*files, *(path for path in visible if path.is_dir() and path not in parents and any(_walk(path, links)))]


def _walk(folder: Path, links: _Links) -> Iterator[Path]:
    below = (p for p in sorted(folder.rglob("*")) if not _is_hidden(p.relative_to(folder)))
    return (p for p in below if links.allow(p) and p.is_file())


class _Links:
    """Decides which links below a root are followed, based only on their final target."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.real_root = Path(os.path.realpath(root))
        self.skipped: set[Path] = set()  # broken or circular links, and links to a parent folder

    def allow(self, path: Path) -> bool:
        """Whether the path may be read. Raises DataError if it leads out of the root."""
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(self.real_root):
            raise DataError(
                f"{path}: leads out of {self.root} through a link; replace the link with a copy, or remove it"
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


def _read(source: Source, kind: str, intake: Intake) -> Iterator[Accepted]:
    try:
        if source.path.stat().st_size == 0:
            say(f"{source.name}: warning: the file is empty")
            return
        if source.is_table:
            yield from _read_table(source, kind, intake)
        elif kind in TEXT_KINDS:
            yield from _read_document(source, kind, intake)
        else:
            intake.reject(source.name, 1, RowError("file", f"expected {', '.join(ingest_files.TABLES)}"))
    except OSError as error:
        raise DataError(f"{source.name}: cannot be read ({error.strerror or error})") from error


def _read_table(source: Source, kind: str, intake: Intake) -> Iterator[Accepted]:
    reading = source.reading
    columns = shapes.Columns(reading.text_field)
    try:
        shape = shapes.named(reading.shape, kind)
    except RowError as error:
        raise DataError(str(error)) from error
    rows = RenamedRows(source.name, reading.columns, ingest_files.rows(source.path, reading.encoding))
    head = list(itertools.islice(rows, shapes.SAMPLE_ROWS))
    if len(head) < shapes.SAMPLE_ROWS or source.path.suffix.lower() not in ingest_files.OBJECTS:
        rows.check_columns()  # before any row is rejected for a missing column
    if shape is None:
        shape = shapes.detect([row for _, row in head if isinstance(row, dict)], kind, columns)
    for line, row in itertools.chain(head, rows):
        with intake.rejecting(source.name, line):
            if isinstance(row, RowError):
                raise row
            record = _convert(shape, row, columns, kind)
            if isinstance(record, Text):
                license = record.license or OWN_LICENSE
                record = replace(record, source=record.source or source.name, license=license)
            yield from _accept(record, source, line, intake)
    rows.check_columns()


def _accept(record: SourceRecord, source: Source, line: int, intake: Intake) -> Iterator[Accepted]:
    for split, piece in intake.accept(record, source.name, line, source.split):
        yield Accepted(source.entry, source.name, line, intake.num_accepted, split, piece)


class RenamedRows:
    """The rows of a table with its columns renamed to ours; remembers the original names."""

    def __init__(self, name: str, columns: Mapping[str, str], rows: ingest_files.Rows) -> None:
        """`name`: the table's name in messages; `columns`: column in the table -> our name."""
        self._name, self._rows, self._columns = name, rows, columns
        self._found: dict[str, None] = {}

    def __iter__(self) -> RenamedRows:
        return self

    def __next__(self) -> tuple[int, object]:
        line, row = next(self._rows)
        if not self._columns or not isinstance(row, dict):
            return line, row
        self._found |= dict.fromkeys(row)
        ours = {self._columns[name] for name in row if name in self._columns}  # renamed columns win
        kept = {name: value for name, value in row.items() if name in self._columns or name not in ours}
        return line, {self._columns.get(name, name): value for name, value in kept.items()}

    def check_columns(self) -> None:
        """Raise DataError for a column that no row has had so far."""
        absent = [name for name in self._columns if name not in self._found]
        if absent and self._found:
            shown = ", ".join(map(str, itertools.islice(self._found, MOST_COLUMNS)))
            more = ", ..." if len(self._found) > MOST_COLUMNS else ""
            raise DataError(
                f"{self._name}: columns: no row has {absent[0]!r}{suggest(absent[0], map(str, self._found))}; "
                f"the file has the columns {shown}{more}"
            )


def _convert(shape: shapes.Shape | None, row: object, columns: shapes.Columns, kind: str) -> SourceRecord:
    if shape is None:
        content = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise RowError(
            "row", f"fits no shape of {kind} ({', '.join(shapes.names(kind))}); it contains: {content[:200]}"
        )
    return shapes.convert(shape, row, columns)


def _read_document(source: Source, kind: str, intake: Intake) -> Iterator[Accepted]:
    if source.path.suffix.lower() == ingest_files.NOTEBOOK:
        rows = iter([ingest_files.notebook(source.path, source.reading.encoding, code=kind == "code")])
    else:
        rows = ingest_files.document(source.path, source.reading.encoding)
    for line, row in rows:
        with intake.rejecting(source.name, line):
            if isinstance(row, RowError):
                raise row
            if not row["text"].strip():
                raise RowError("text", "is blank")
            record = Text(text=row["text"], source=source.group, path="", license=OWN_LICENSE)
            yield from _accept(record, source, line, intake)


# --- feedback --------------------------------------------------------------------------------------------------------


ACCEPT = ("all", "reviewed")
FEEDBACK = "feedback"  # the `source` of these records


@dataclass(frozen=True, kw_only=True)
class FeedbackConfig:
    """`tasks.feedback`: how far to trust feedback from the web page."""

    accept: str = "all"
    """all, or reviewed: only rows to which somebody added `"reviewed": true`."""
    share: float = 0.2
    """Maximum share of feedback among the training pairs, and among the training labels."""

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
    """The pairs or labels to train on alongside `others` other records, in file order, and the counts of all rows.

    Anyone with access to the server can submit feedback, so it is only partly trusted. An unreadable row is rejected
    without affecting others. Readable rows make up at most `share` of all training records: reviewed rows are taken
    first, then one per contributor in turn, so that thousands of rows from one API key leave room for two from another.
    Hashes determine the order of the turns and of the rows, so a new row displaces at most one other row. Without API
    keys, all rows are treated as one contributor's; a user with several keys gets several turns.

    Empty if the file does not exist. `rejected`: the JSONL file for unreadable rows (file, line, field, reason).
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
            f"{path.name}: training on {summary['kept']} of {summary['rows']} rows from {len(by_giver)} contributors; "
            f"{summary['rejected']} unreadable, {summary['not_reviewed']} not reviewed, "
            f"{summary['over_share']} over the limit of {config.share:.0%} of the {kind.__name__.lower()}s"
        )
    return selected, summary


def _read_feedback(path: Path, kind: type[Given], rejected: Path, counts: Counter[str]) -> Iterable[FeedbackRow[Given]]:
    """The readable rows; adds the counts of the others to `counts`."""
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
    """At most `limit` records: reviewed ones first, then one per contributor in turn."""
    if len(rows) <= limit:
        return [row.record for row in rows]
    turns: Counter[tuple[bool, str]] = Counter()
    ranked: list[tuple[bool, int, int, int]] = []  # not reviewed, turn, hash of the contributor, index
    for index in sorted(range(len(rows)), key=lambda index: stable_hash("feedback", rows[index].record.id)):
        row, giver = rows[index], rows[index].record.given_by or ""
        ranked.append((not row.reviewed, turns[row.reviewed, giver], stable_hash("giver", giver), index))
        turns[row.reviewed, giver] += 1
    return [rows[index].record for index in sorted(index for *_, index in sorted(ranked)[:limit])]
