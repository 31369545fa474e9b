"""Writes a text corpus: data/raw/<corpus>/{train,val}-NNNNN.parquet with the columns text, source, path, licence.

    PartWriter   documents of one part (stories, python, ...) in the order they were kept -> one file per split
    mix          the parts of a corpus -> its files, every part spread evenly over the whole

Mixed, because a reader that takes only the beginning (an evaluation, a sample) should see all of it. Memory is one row
group per part, whatever the corpus holds. Equal documents give equal bytes (with one version of pyarrow).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import DataError
from pipeline.streams.records import Text
from pipeline.work import sha256

SCHEMA = pa.schema([(name, pa.string()) for name in ("text", "source", "path", "licence")])
GROUP_BYTES = 1_000_000  # of text in a row group: what a reader holds
FILE_BYTES = 4_000_000  # of text in a file: what one process of `stage_encode` takes at a time
GROUP_ROWS = 4096
SPLITS = ("train", "val")
VAL_EVERY = 50  # of a corpus so small that no document fell into val


@dataclass(frozen=True)
class Size:
    """How much a part holds."""

    documents: int = 0
    num_bytes: int = 0


class PartWriter:
    """One parquet file, written in row groups as documents come. Close it, or nothing can be read."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.size = Size()
        self._writer = pq.ParquetWriter(path, SCHEMA, compression="zstd", write_statistics=False)
        self._rows: list[Text] = []
        self._pending = 0

    def add(self, document: Text) -> None:
        """Append one document."""
        num_bytes = len(document.text.encode())
        self._rows.append(document)
        self._pending += num_bytes
        self.size = Size(self.size.documents + 1, self.size.num_bytes + num_bytes)
        if self._pending >= GROUP_BYTES or len(self._rows) >= GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        """Write what is left and the footer."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            columns = {name: [getattr(row, name) for row in self._rows] for name in SCHEMA.names}
            self._writer.write_table(pa.table(columns, schema=SCHEMA), row_group_size=GROUP_ROWS)
        self._rows, self._pending = [], 0


def mix(parts: dict[str, dict[Path, Size]], out: Path) -> dict[str, list[dict[str, Any]]]:
    """Spread the parts of each split evenly over files of about 4 MB; returns for each split its files for the manifest.

    A corpus without any val document gives every 50th, at least the last, so that it can be measured. Raises DataError when
    the corpus has no two documents.
    """
    out.mkdir(parents=True)
    total = sum(size.documents for split in SPLITS for size in parts[split].values())
    if total < 2:
        raise DataError(f"{out.name}: expected at least two documents to train and to validate on, {total} left")
    held = {split: sum(size.documents for size in parts[split].values()) for split in SPLITS}
    files = {split: _Files(out, split) for split in SPLITS}
    for split, other in zip(SPLITS, reversed(SPLITS), strict=True):
        for number, document in enumerate(_interleaved(parts[split]), start=1):
            last = number == held[split]
            moved = not held[other] and (last or number % VAL_EVERY == 0 if split == "train" else not last)
            files[other if moved else split].add(document)
    return {split: written.close() for split, written in files.items()}


def _interleaved(parts: dict[Path, Size]) -> Iterator[Text]:
    """All documents; the next is always from the part of which the smallest share of bytes was given."""
    streams = [[0.0, 0, size, _documents(path)] for path, size in parts.items() if size.documents]
    while streams:
        chosen = min(streams, key=lambda stream: stream[0])
        document = next(chosen[3], None)
        if document is None:
            streams.remove(chosen)
            continue
        chosen[1] += len(document.text.encode()) + 1
        chosen[0] = chosen[1] / (chosen[2].num_bytes + chosen[2].documents)
        yield document


def _documents(path: Path) -> Iterator[Text]:
    with pq.ParquetFile(path, pre_buffer=False) as file:
        for group in range(file.num_row_groups):
            for row in file.read_row_group(group).to_pylist():
                yield Text(**row)


class _Files:
    """The numbered files of one split."""

    def __init__(self, folder: Path, split: str) -> None:
        self.folder, self.split = folder, split
        self.done: list[dict[str, Any]] = []
        self.writer: PartWriter | None = None

    def add(self, document: Text) -> None:
        if self.writer is not None and self.writer.size.num_bytes >= FILE_BYTES:
            self._finish()
        if self.writer is None:
            self.writer = PartWriter(self.folder / f"{self.split}-{len(self.done):05d}.parquet")
        self.writer.add(document)

    def close(self) -> list[dict[str, Any]]:
        self._finish()
        return self.done

    def _finish(self) -> None:
        if self.writer is None:
            return
        self.writer.close()
        path, size = self.writer.path, self.writer.size
        self.done.append(
            {"file": path.name, "documents": size.documents, "bytes": size.num_bytes, "sha256": sha256(path)}
        )
        self.writer = None
