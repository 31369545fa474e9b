"""Row intake: accept, deduplicate or reject each row of a source, assign its id and split, and count rows by file.

`Intake` handles each row of the user's files and of hub datasets. Rejected rows go to a JSONL file (file, line, field,
reason), and the first five are printed as `file:line: field: reason`. A row without an id gets the blake2b hash of its
content as its id. A row that repeats an id is a duplicate if the content is the same, and is rejected otherwise. If a
source has no held-out files, `shares` of its rows are held out by blake2b(id), so that new rows do not move
existing ones. Problems are split by key, so that all versions of a problem stay together. A text over 1 MB is cut at
blank lines.

`RowCounts` counts the rows of a kind by file: accepted + duplicates + rejected + dropped = rows read. Dropped rows were
valid but removed later: by cleaning in `stage_corpus`, as test items found in the training data, or as hub problems
whose own solution is wrong.

Not guaranteed: constant memory. The id and a hash of every row are kept, about 200 bytes per row.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from pipeline.ingest.records import Problem, SourceRecord, Text, fields_of
from pipeline.ingest.tool_calls import RowError, to_json
from pipeline.run.errors import DataError
from pipeline.run.tracking import say

TEXT_BYTES = 1_000_000  # a longer text is cut at blank lines
NUM_PRINTED = 5
MOST_LINES = 40  # in a printed table; a folder of sources has one line per file
COUNTS = ("accepted", "duplicates", "rejected", "dropped")
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")
_LINE_FEED = re.compile(r"\n")


@dataclass(frozen=True)
class RowCounts:
    """Row counts of one kind of record by outcome, and the bytes of the rows that were accepted when read."""

    totals: dict[str, int] = field(default_factory=dict)
    files: dict[str, dict[str, int]] = field(default_factory=dict)  # by file

    def drop(self, file: str, num_rows: int = 1) -> None:
        """Move rows of a file from the accepted count to the dropped count."""
        for counts in (self.totals, self.files[file]):
            counts["accepted"] -= num_rows
            counts["dropped"] += num_rows

    def shown(self, title: str) -> str:
        """A table with one line per file (only the largest if there are very many) and a total."""
        sizes = {name: sum(counts[count] for count in COUNTS) for name, counts in self.files.items()}
        largest = set(sorted(sizes, key=lambda name: -sizes[name])[:MOST_LINES])
        rows = [(title, "rows", *COUNTS, "bytes")]
        rows += [self._line(name, counts) for name, counts in self.files.items() if name in largest]
        if len(sizes) > MOST_LINES:
            rows.append((f"and {len(sizes) - MOST_LINES:,} more files",))
        rows.append(self._line("all", self.totals))
        width = max(len(row[0]) for row in rows)
        lines = ["  ".join([row[0].ljust(width), *(cell.rjust(10) for cell in row[1:])]).rstrip() for row in rows]
        return "\n".join(lines)

    @staticmethod
    def _line(name: str, counts: dict[str, int]) -> tuple[str, ...]:
        cells = [counts.get(count, 0) for count in COUNTS]
        return (name, *(f"{number:,}" for number in (sum(cells), *cells, counts.get("bytes", 0))))


class Intake:
    """Accepts, rejects and counts the rows of one source.

    A context manager: on a clean exit it checks the counts; after an error it only closes the rejected-rows file.
    """

    def __init__(
        self, rejected: Path, max_rejected: float | None, name: str, shares: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        """`rejected`: the JSONL file to write; `max_rejected`: the share of rows that may be rejected (None: all);
        `name`: the source's name in messages; `shares`: the shares of rows for val and test, chosen by id.
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
        """Number of rows handled so far."""
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
        """Add the counts of accepted, duplicate and rejected rows to `tally`."""
        for name in (*COUNTS, "bytes"):
            tally.totals.setdefault(name, 0)
        for file, counts in self._by_file.items():
            tally.files[file] = {name: counts[name] for name in (*COUNTS, "bytes")}
            for name, number in tally.files[file].items():
                tally.totals[name] += number

    def accept(self, record: SourceRecord, file: str, line: int, split: str | None) -> list[tuple[str, SourceRecord]]:
        """A (split, record) pair, or several for a long text, or none for a duplicate. `split` None: chosen by id.

        Raises RowError if the id is taken or the row cannot be encoded as UTF-8.
        """
        content, num_bytes = _content_hash(record)
        identity = record.path if isinstance(record, Text) else record.id
        identity = identity or content.hex()
        earlier = self._seen.get(identity)
        if earlier is not None and earlier[0] == content:
            self._count(file, "duplicates")
            return []
        if earlier is not None:
            raise RowError("id", f"{identity[:80]!r} is already used at {earlier[1]}:{earlier[2]} for other content")
        self._seen[identity] = (content, file, line)
        self._count(file, "accepted")
        self._by_file[file]["bytes"] += num_bytes
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
        """Reject the row if the block raises RowError."""
        try:
            yield
        except RowError as error:
            self.reject(file, line, error)

    def reject(self, file: str, line: int, error: RowError) -> None:
        """Write the location and the reason to the rejected-rows file; print the first five."""
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
                f"{self._name}: {self.num_rejected} of {self.num_rows} rows were rejected, more than max_rejected = "
                f"{self._max_rejected:g} allows. Full list: {self._path}. The first:\n  "
                + "\n  ".join(self._first_messages)
            )
        if not self.num_accepted:
            raise DataError(f"{self._name}: no row was accepted ({self.num_rows} read, {self.num_rejected} rejected)")


def split_of(identity: str, val: float, test: float) -> str:
    """train, val or test, based only on the id, so that new rows do not move existing ones between splits."""
    digest = hashlib.blake2b(identity.encode("utf-8"), digest_size=8).digest()
    quotient, remainder = divmod(int.from_bytes(digest, "big"), 50)
    number = (remainder + quotient % 1000 / 1000) / 50  # uniform in [0, 1); values below 1/50 have always been held out
    return "val" if number < val else "test" if number < val + test else "train"


def _content_hash(record: SourceRecord) -> tuple[bytes, int]:
    """A hash of a record's content without its id, and its size in bytes. Raises RowError if UTF-8 cannot encode it."""
    if isinstance(record, Text):
        text, identity = record.text, record.path + record.source + record.license
    else:
        identity, text = record.id, to_json({**fields_of(record), "id": ""}, "row")
    try:
        identity.encode("utf-8")
        content = text.encode("utf-8")
        return hashlib.blake2b(content, digest_size=16).digest(), len(content)
    except UnicodeEncodeError as error:
        raise RowError("row", "contains half a surrogate pair, which UTF-8 cannot encode") from error


# --- long texts ------------------------------------------------------------------------------------------------------


def cut(document: Text) -> list[Text]:
    """Split a text over 1 MB into consecutive pieces of at most 1 MB; their paths end in `#1`, `#2`, ..."""
    if _num_bytes(document.text) <= TEXT_BYTES:
        return [document]
    pieces: list[list[str]] = []
    size = TEXT_BYTES  # as if a piece were full, so that the first part starts a new one
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
    """Paragraphs with their trailing blank lines. Overlong paragraphs are split into lines, and overlong lines between
    characters (which have at most 4 bytes each).
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
