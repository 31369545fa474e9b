"""What becomes of each row: accepted, a counted duplicate, or rejected with file, line, field and reason.

In: records and `RowError`s with the place they come from. Out: (split, record) for each accepted row, a file of rejected
rows (JSONL: file, line, field, reason), the first five printed as `file:line: field: reason`, and three counts whose sum is
the number of rows. A row without an id is named by the blake2b hash of its content. The same id with the same content is a
duplicate, with other content it is rejected. Held out (`val`): files so called; where a source has none, blake2b(id)
mod 50 = 0; a problem goes by its key, so that two versions of one problem stay together.

Not promised: near duplicates; `streams.duplicates` finds those among texts.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from pipeline.errors import DataError
from pipeline.streams.calls import RowError, to_json
from pipeline.streams.records import Dialogue, Pair, Problem, Text
from pipeline.tracking import say

AnyRecord = Text | Dialogue | Problem | Pair
TEXT_BYTES = 1_000_000  # a longer text is cut at blank lines
VAL_SHARE = 50  # one id in so many is held out
NUM_PRINTED = 5
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")
_LINE_FEED = re.compile(r"\n")


class Intake:
    """The books of one source. A context manager: on leaving without an error it checks them, else only closes the file."""

    def __init__(self, rejected: Path, max_rejected: float | None, name: str, *, has_val: bool = False) -> None:
        """`rejected`: the JSONL file to write; `max_rejected`: share of all rows, None where any number may be rejected, all
        of them too; `name`: of the source, for messages.

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
    """Paragraphs with the blank lines after them; a longer one by lines, a longer line by characters (4 bytes at most)."""
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
