"""Select and write the documents of a text corpus: deduplication, decontamination, caps, quotas, splits, and counts.

    files on this machine, until the quotas are met   -> FileBatch   ┐
    records from the user's files or the hub          -> RecordBatch ┴-> clean, in worker processes -> Documents
    Documents in a fixed order -> Selection -> a PartWriter for each part and split; counts by part, source, license,
                                               drop reason
    mix: the parts of a corpus -> data/raw/<corpus>/{train,val}-NNNNN.parquet (text, source, path, license)

`Selection` processes documents one by one in order, so the number of cleaning workers does not affect the result. It
keeps hashes and signatures, never texts. Every document offered while its part is open is counted as found and either
kept or dropped for one reason: found = kept + dropped.

Batches may run slightly ahead of `Selection`, depending on the number of workers. This never affects the result:
documents beyond a full quota are not counted, and further documents of a full package are dropped as `cap` whether they
were read or not.

`mix` spreads every part (stories, python, ...) evenly over the corpus, so that an evaluation or a sample that
reads only the beginning sees every part. Memory use is one row group per part, whatever the corpus size. Equal
documents give equal bytes (for a given pyarrow version).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.ingest import cleaning, mixture
from pipeline.ingest.cleaning import Document, Origin, SuppliedText
from pipeline.ingest.duplicates import Index, NearDuplicates, fingerprint, signature
from pipeline.ingest.records import Text
from pipeline.ingest.sources import DataConfig, Found
from pipeline.run.device import stable_hash
from pipeline.run.errors import DataError
from pipeline.run.types import JsonObject
from pipeline.run.workdir import sha256

SCHEMA = pa.schema([(name, pa.string()) for name in ("text", "source", "path", "license")])
CONTEXT = SCHEMA.append(pa.field("context", pa.string()))  # for a corpus with repositories
GROUP_BYTES = 1_000_000  # of text in a row group, which is what a reader keeps in memory
FILE_BYTES = 4_000_000  # of text in a file: the work unit of one `stage_encode` process
GROUP_ROWS = 4096
SPLITS = ("train", "val")
VAL_EVERY = 50  # for a corpus so small that no document landed in val
BATCH_FILES, BATCH_BYTES = 24, 250_000  # per FileBatch, per RecordBatch


class Tally:
    """Counts documents and bytes."""

    def __init__(self) -> None:
        self.files = self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        self.files += 1
        self.num_bytes += num_bytes

    def entry(self) -> dict[str, int]:
        """The counts as stored in the manifest."""
        return {"files": self.files, "bytes": self.num_bytes}


class Selection:
    """Decides which documents a corpus keeps. Close it before reading its parts."""

    def __init__(
        self,
        *,
        quotas: dict[str, float],
        caps: dict[str, float],
        threshold: float,
        min_bytes: int,
        benchmarks: Index,
        folder: Path,
    ) -> None:
        """`quotas`: bytes to keep of each part (inf: all of it); `caps`: maximum bytes of one package in a part;
        `threshold`: estimated similarity at which a later document is dropped; `folder`: where parts are written."""
        self.quotas, self.caps, self.min_bytes, self.benchmarks = quotas, caps, min_bytes, benchmarks
        self.full: set[tuple[str, str]] = set()  # (part, package) pairs that have reached their cap
        self.found: dict[str, Tally] = {part: Tally() for part in quotas}
        self.kept: dict[str, dict[str, Tally]] = {part: {split: Tally() for split in SPLITS} for part in quotas}
        self.dropped: dict[str, dict[str, Tally]] = {part: {} for part in quotas}
        self.sources: dict[str, Tally] = {}
        self.licenses: dict[str, Tally] = {}
        self.contaminated: dict[str, int] = {}  # benchmark item -> number of documents dropped for it
        self._fingerprints: set[int] = set()
        self._paragraphs_seen: set[int] = set()  # hashes of prose paragraphs
        self._near_duplicates = NearDuplicates(threshold)
        self._package_bytes: dict[tuple[str, str], int] = {}
        self._writers: dict[tuple[str, str], PartWriter] = {}
        self._folder = folder
        self.dropped_file = folder / "dropped.jsonl"  # path, source, reason, bytes, file, line; user data only
        self._dropped_writer: TextIO | None = None
        self.dropped_rows: Counter[str] = Counter()  # user file -> number of rows from which no document was kept
        self._row: Origin | None = None  # the row whose documents are being offered
        self._row_kept = False

    def is_open(self, part: str) -> bool:
        """Whether the part belongs to the corpus and has room."""
        if part not in self.quotas:
            return False
        return sum(tally.num_bytes for tally in self.kept[part].values()) < self.quotas[part]

    def offer(self, document: Document) -> int:
        """Keep or drop the next document and return the bytes kept; documents of a full part are not counted at all."""
        if not self.is_open(document.part):
            return 0
        self.found[document.part].add(document.num_bytes)
        reason, document = self._decide(document)
        if document.origin is not None:
            self._count_row(document.origin, kept=reason is None)
        if reason is not None:
            self.dropped[document.part].setdefault(reason, Tally()).add(document.num_bytes)
            if document.part.startswith("own "):
                self._name_dropped(document, reason)
            return 0
        record = document.record
        num_bytes = len(record.text.encode())
        key = (document.part, document.split)
        if key not in self._writers:
            self._writers[key] = PartWriter(self._folder / key[0] / f"{key[1]}.parquet")
        self._writers[key].add(record)
        self.kept[key[0]][key[1]].add(num_bytes)
        self.sources.setdefault(record.source, Tally()).add(num_bytes)
        self.licenses.setdefault(record.license, Tally()).add(num_bytes)
        return num_bytes

    def _count_row(self, origin: Origin | None, *, kept: bool) -> None:
        """When a new row begins, count the previous one as dropped if none of its documents was kept."""
        if origin != self._row:
            if self._row is not None and not self._row_kept:
                self.dropped_rows[self._row.file] += 1
            self._row, self._row_kept = origin, False
        self._row_kept |= kept

    def _name_dropped(self, document: Document, reason: str) -> None:
        if self._dropped_writer is None:
            self.dropped_file.parent.mkdir(parents=True, exist_ok=True)
            self._dropped_writer = self.dropped_file.open("w", encoding="utf-8", newline="\n")
        record = document.record
        entry = {"path": record.path, "source": record.source, "reason": reason, "bytes": document.num_bytes}
        if document.origin is not None:
            entry |= {"file": document.origin.file, "line": document.origin.line}
        self._dropped_writer.write(json.dumps(entry) + "\n")

    def _decide(self, document: Document) -> tuple[str | None, Document]:
        """The drop reason or None, and the document as it would be kept."""
        # Check full packages first: their files need not be read, and whether one was read must not matter.
        package = (document.part, document.record.source)
        if package in self.full:
            return "cap", document
        if document.reason is not None:
            return document.reason, document
        if document.paragraphs:
            document = self._join_new_paragraphs(document)
            if len(document.record.text.encode()) < self.min_bytes:
                return "size" if document.record.text else "duplicate", document
        if document.fingerprint in self._fingerprints:
            return "duplicate", document
        self._fingerprints.add(document.fingerprint)
        if document.signature:
            if self._near_duplicates.find(document.signature) is not None:
                return "near duplicate", document
            self._near_duplicates.add(document.signature)
        num_bytes = len(document.record.text.encode())
        package_bytes = self._package_bytes.get(package, 0)
        if package_bytes + num_bytes > self.caps.get(document.part, math.inf):
            self.full.add(package)
            return "cap", document
        if hits := self.benchmarks.hits(document.record.text):
            for name in hits:
                self.contaminated[name] = self.contaminated.get(name, 0) + 1
            return "benchmark", document
        self._package_bytes[package] = package_bytes + num_bytes
        return None, document

    def _join_new_paragraphs(self, document: Document) -> Document:
        """Reduce a prose document to the paragraphs that no earlier document had."""
        new_paragraphs = []
        for paragraph in document.paragraphs:
            paragraph_hash = fingerprint(paragraph)
            if paragraph_hash not in self._paragraphs_seen:
                self._paragraphs_seen.add(paragraph_hash)
                new_paragraphs.append(paragraph)
        text = "\n\n".join(new_paragraphs)
        return dataclasses.replace(
            document,
            record=dataclasses.replace(document.record, text=text),
            paragraphs=(),
            fingerprint=fingerprint(text),
            signature=signature(text),
        )

    def close(self) -> dict[str, dict[Path, Size]]:
        """Close the parts; return the files of each split and their sizes, in quota order."""
        self._count_row(None, kept=False)
        for writer in self._writers.values():
            writer.close()
        if self._dropped_writer is not None:
            self._dropped_writer.close()
        written = {key: (writer.path, writer.size) for key, writer in self._writers.items()}
        return {
            split: dict(written[part, split] for part in self.quotas if (part, split) in written) for split in SPLITS
        }

    def books(self) -> JsonObject:
        """Counts for the manifest, by part, source, license and drop reason; for each part, found = kept + dropped."""
        parts = {
            part: {
                "found": self.found[part].entry(),
                "kept": {split: tally.entry() for split, tally in self.kept[part].items()},
                "dropped": {reason: tally.entry() for reason, tally in sorted(self.dropped[part].items())},
            }
            for part in self.quotas
        }
        return {
            "parts": parts,
            "dropped": self._total_dropped(),
            "sources": {name: tally.entry() for name, tally in sorted(self.sources.items())},
            "licenses": {name: tally.entry() for name, tally in sorted(self.licenses.items())},
            "benchmark_items_hit": dict(sorted(self.contaminated.items())),
        }

    def _total_dropped(self) -> dict[str, dict[str, int]]:
        summed: dict[str, dict[str, int]] = {}
        for reasons in self.dropped.values():
            for reason, tally in reasons.items():
                entry = summed.setdefault(reason, {"files": 0, "bytes": 0})
                entry["files"] += tally.files
                entry["bytes"] += tally.num_bytes
        return dict(sorted(summed.items()))


# --- batches of work -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FileBatch:
    """Files to read: Python files for code or prose, METADATA files for prose, or shell scripts."""

    files: tuple[Found, ...]
    parts: tuple[str, ...]  # python, prose, shell: the parts each file may contribute to
    full: frozenset[tuple[str, str]]  # (part, package) pairs that have reached their cap
    data: DataConfig


@dataclass(frozen=True, kw_only=True)
class RecordBatch:
    """Texts from the user's files or the hub."""

    records: tuple[SuppliedText, ...]
    kind: str  # text, code
    data: DataConfig


def clean(batch: FileBatch | RecordBatch) -> list[Document]:
    """Every document of a batch, cleaned or with its drop reason, in batch order."""
    if isinstance(batch, FileBatch):
        return [document for file in batch.files for document in _clean_file(file, batch)]
    return [cleaning.own_record(row, batch.kind, batch.data) for row in batch.records]


def _clean_file(file: Found, batch: FileBatch) -> list[Document]:
    full = [part for part in batch.parts if (part, file.package) in batch.full]
    wanted = [part for part in batch.parts if part not in full]
    documents = [cleaning.capped_file(file, part) for part in full]
    if "shell" in wanted:
        documents.append(cleaning.shell_file(file, batch.data))
    elif wanted and file.path.endswith("/METADATA"):
        documents.append(cleaning.readme_file(file, batch.data))
    elif wanted:
        documents += cleaning.python_file(file, batch.data, code="python" in wanted, prose="prose" in wanted)
    return documents


def file_batches(files: list[Found], wanted: dict[str, Selection], data: DataConfig) -> Iterator[FileBatch]:
    """Batch the files in order while any wanted part is open. `wanted`: part -> the selection of its corpus."""
    for start in range(0, len(files), BATCH_FILES):
        parts = tuple(part for part, selection in wanted.items() if selection.is_open(part))
        if not parts:
            return
        full = frozenset(package for part in parts for package in wanted[part].full)
        yield FileBatch(files=tuple(files[start : start + BATCH_FILES]), parts=parts, full=full, data=data)


def record_batches(rows: Iterable[SuppliedText], kind: str, data: DataConfig) -> Iterator[RecordBatch]:
    """Batch the texts of one kind in order, about 250,000 characters at a time."""
    batch: list[SuppliedText] = []
    num_characters = 0
    for row in rows:
        batch.append(row)
        num_characters += len(row.record.text)
        if num_characters >= BATCH_BYTES:
            yield RecordBatch(records=tuple(batch), kind=kind, data=data)
            batch, num_characters = [], 0
    if batch:
        yield RecordBatch(records=tuple(batch), kind=kind, data=data)


# --- files of a corpus -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    documents: int = 0
    num_bytes: int = 0


class PartWriter:
    """Writes one parquet file in row groups. The file can be read only after `close`."""

    def __init__(self, path: Path, *, contexts: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.size = Size()
        self._schema = CONTEXT if contexts else SCHEMA
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd", write_statistics=False)
        self._rows: list[Text] = []
        self._pending = 0

    def add(self, document: Text) -> None:
        num_bytes = len(document.text.encode())
        self._rows.append(document)
        self._pending += num_bytes
        self.size = Size(self.size.documents + 1, self.size.num_bytes + num_bytes)
        if self._pending >= GROUP_BYTES or len(self._rows) >= GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        """Write the pending rows and the footer."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            columns = {name: [getattr(row, name) for row in self._rows] for name in self._schema.names}
            self._writer.write_table(pa.table(columns, schema=self._schema), row_group_size=GROUP_ROWS)
        self._rows, self._pending = [], 0


# --- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Repetitions:
    """How often each document of a part is written, and the total size."""

    copies: NDArray[np.int64]
    size: Size


Parts = dict[str, dict[Path, Size]]  # split -> file of a part -> its size
Draws = dict[str, dict[Path, Repetitions]]  # split -> file of a part -> how often to write each document; absent: once


@dataclass(frozen=True)
class WeightedParts:
    """An entry of a corpus: its weight, and the parts its documents went to."""

    name: str
    weight: float
    parts: tuple[str, ...]


def drawn(corpus: str, parts: Parts, entries: Sequence[WeightedParts], seed: int) -> tuple[Draws, list[JsonObject]]:
    """Draw training documents so that the bytes of each entry match its weight (`ingest/mixture.py`). Returns how often
    to write each document of each part, and the summary table.

    If val is empty, 1 in 50 documents (by a hash of the name) first moves there, so no text is in both splits.
    Raises DataError for an entry with nothing to train on.
    """
    train = parts["train"]
    sizes, names = {}, {}
    for path in train:
        documents = [(len(d.text.encode()), stable_hash("mixture", seed, d.source, d.path)) for d in read_part(path)]
        sizes[path] = np.array([size for size, _ in documents], np.int64)
        names[path] = np.array([key for _, key in documents], np.uint64)
    held = _held_out(parts, names)
    of_entry = [[path for path in train if path.parent.name in entry.parts] for entry in entries]
    stocks = [
        mixture.Stock(
            entry.name,
            entry.weight,
            np.concatenate([np.empty(0, np.int64), *(sizes[path][~held[path]] for path in paths)]),
            np.concatenate([np.empty(0, np.uint64), *(names[path][~held[path]] for path in paths)]),
        )
        for entry, paths in zip(entries, of_entry, strict=True)
    ]
    mixture.check_filled(corpus, [(stock.name, stock.total) for stock in stocks])
    times = mixture.draw(stocks)
    draws: Draws = {"train": {}, "val": {}}
    for paths, copies in zip(of_entry, times, strict=True):
        borders = np.cumsum([(~held[path]).sum() for path in paths])
        for path, of_part in zip(paths, np.split(copies, borders[:-1]), strict=True):
            whole = np.zeros(len(sizes[path]), np.int64)
            whole[~held[path]] = of_part
            draws["train"][path] = _draw_of(whole, sizes[path])
            if held[path].any():
                draws["val"][path] = _draw_of(held[path].astype(np.int64), sizes[path])
    return draws, mixture.summary(stocks, times)


def _held_out(parts: Parts, names: dict[Path, NDArray[np.uint64]]) -> dict[Path, NDArray[np.bool_]]:
    """A mask, for each file, of the training documents that move to val: those with the smallest hashes, or none if val
    already has documents.
    """
    keys = np.sort(np.concatenate([np.empty(0, np.uint64), *names.values()]))
    if not len(keys) or any(size.documents for size in parts["val"].values()):
        return {path: np.zeros(len(hashes), bool) for path, hashes in names.items()}
    limit = keys[max(1, len(keys) // VAL_EVERY) - 1]
    return {path: hashes <= limit for path, hashes in names.items()}


def _draw_of(copies: NDArray[np.int64], sizes: NDArray[np.int64]) -> Repetitions:
    return Repetitions(copies, Size(int(copies.sum()), int((copies * sizes).sum())))


# --- mixing ----------------------------------------------------------------------------------------------------------


def mix(parts: Parts, out: Path, draws: Draws | None = None, *, contexts: bool = False) -> dict[str, list[JsonObject]]:
    """Spread the parts of each split evenly over files of about 4 MB; return each split's files for the manifest.

    `draws`: how often to write each document of a part (`drawn`); None: once. `contexts`: include the `context`
    column. If no document is in val, every 50th (at least the last) moves there, so that a model can be evaluated.
    Raises DataError if the corpus has fewer than two documents.
    """
    draws = draws or {split: {} for split in SPLITS}
    sizes = {split: parts[split] | {path: draw.size for path, draw in draws[split].items()} for split in SPLITS}
    total = sum(size.documents for split in SPLITS for size in sizes[split].values())
    if total < 2:
        raise DataError(f"{out.name}: expected at least two documents for training and validation, found {total}")
    out.mkdir(parents=True)
    num_documents = {split: sum(size.documents for size in sizes[split].values()) for split in SPLITS}
    files = {split: _NumberedFiles(out, split, contexts=contexts) for split in SPLITS}
    for split, other in zip(SPLITS, reversed(SPLITS), strict=True):
        for number, document in enumerate(_interleaved(sizes[split], draws[split]), start=1):
            last = number == num_documents[split]
            moved = not num_documents[other] and (last or number % VAL_EVERY == 0 if split == "train" else not last)
            files[other if moved else split].add(document)
    return {split: numbered.close() for split, numbered in files.items()}


def write_empty(out: Path) -> dict[str, list[JsonObject]]:
    """Write a corpus without documents: an empty file for each split."""
    out.mkdir(parents=True)
    return {split: _NumberedFiles(out, split).close() for split in SPLITS}


def _interleaved(parts: dict[Path, Size], draws: Mapping[Path, Repetitions]) -> Iterator[Text]:
    """All documents; the next one always comes from the part with the smallest share of its bytes emitted."""
    readers = [_PartReader(size, _drawnread_part(path, draws)) for path, size in parts.items() if size.documents]
    while readers:
        reader = min(readers, key=lambda reader: reader.share)
        document = next(reader.documents, None)
        if document is None:
            readers.remove(reader)
            continue
        reader.num_bytes += len(document.text.encode()) + 1
        reader.share = reader.num_bytes / (reader.size.num_bytes + reader.size.documents)
        yield document


@dataclass(eq=False)
class _PartReader:
    size: Size
    documents: Iterator[Text]
    num_bytes: int = 0  # emitted so far, plus one per document
    share: float = 0.0  # of the part, emitted so far


def read_part(path: Path) -> Iterator[Text]:
    """The documents of a part."""
    with pq.ParquetFile(path, pre_buffer=False) as file:
        for group in range(file.num_row_groups):
            for row in file.read_row_group(group).to_pylist():
                yield Text(**row)


def _drawnread_part(path: Path, draws: Mapping[Path, Repetitions]) -> Iterator[Text]:
    """The documents of a part, each as often as drawn, pass by pass."""
    if path not in draws:
        yield from read_part(path)
        return
    copies = draws[path].copies
    for number in range(1, int(copies.max(initial=0)) + 1):
        for document, times in zip(read_part(path), copies.tolist(), strict=True):
            if times >= number:
                mark = mixture.pass_mark(number) if number > 1 else ""
                yield dataclasses.replace(document, path=f"{document.path}{mark}")


class _NumberedFiles:
    """The numbered files of one split."""

    def __init__(self, folder: Path, split: str, *, contexts: bool = False) -> None:
        self.folder, self.split, self.contexts = folder, split, contexts
        self.done: list[JsonObject] = []
        self.writer: PartWriter | None = None

    def add(self, document: Text) -> None:
        if self.writer is not None and self.writer.size.num_bytes >= FILE_BYTES:
            self._close_file()
        if self.writer is None:
            self.writer = self._writer_of(len(self.done))
        self.writer.add(document)

    def close(self) -> list[JsonObject]:
        if self.writer is None and not self.done:  # readers expect a file for each split
            self.writer = self._writer_of(0)
        self._close_file()
        return self.done

    def _writer_of(self, number: int) -> PartWriter:
        return PartWriter(self.folder / f"{self.split}-{number:05d}.parquet", contexts=self.contexts)

    def _close_file(self) -> None:
        if self.writer is None:
            return
        self.writer.close()
        path, size = self.writer.path, self.writer.size
        self.done.append(
            {"file": path.name, "documents": size.documents, "bytes": size.num_bytes, "sha256": sha256(path)}
        )
        self.writer = None
