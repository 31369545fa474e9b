"""Batches of work for the processes that read and clean, and what they do with one.

    files of this machine, until the quotas are met   -> FileBatch   ┐
    records of the user's files or of the hub         -> RecordBatch ┴-> clean -> Documents in order

Which batches are made may run a little ahead of what `Selection` has taken in, by an amount that depends on the number of
workers. That never shows: what comes after a full quota is not counted, and what comes after a full package is dropped
as `cap` whether it was read or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pipeline.streams import cleaning
from pipeline.streams.cleaning import Document
from pipeline.streams.records import Text
from pipeline.streams.selection import Selection
from pipeline.streams.sources import DataConfig, Found

BATCH_FILES, BATCH_BYTES = 24, 250_000


@dataclass(frozen=True, kw_only=True)
class FileBatch:
    """Files to read: Python for its code or its prose, METADATA for its prose, or shell."""

    files: tuple[Found, ...]
    parts: tuple[str, ...]  # python, prose, shell: what is wanted of each file
    full: frozenset[tuple[str, str]]  # (part, package) of which no more is read
    data: DataConfig


@dataclass(frozen=True, kw_only=True)
class RecordBatch:
    """Records with their split, from the user's files or the hub."""

    records: tuple[tuple[str, Text], ...]
    kind: str  # text, code
    data: DataConfig


def clean(batch: FileBatch | RecordBatch) -> list[Document]:
    """Every document of a batch, kept or with its drop reason, in the batch's order."""
    if isinstance(batch, FileBatch):
        return [document for found in batch.files for document in _clean_file(found, batch)]
    return [cleaning.own_record(record, split, batch.kind, batch.data) for split, record in batch.records]


def _clean_file(found: Found, batch: FileBatch) -> list[Document]:
    full = [part for part in batch.parts if (part, found.package) in batch.full]
    wanted = [part for part in batch.parts if part not in full]
    documents = [cleaning.capped(found, part) for part in full]
    if "shell" in wanted:
        documents.append(cleaning.shell_file(found, batch.data))
    elif wanted and found.path.endswith("/METADATA"):
        documents.append(cleaning.readme_file(found, batch.data))
    elif wanted:
        documents += cleaning.python_file(found, batch.data, code="python" in wanted, prose="prose" in wanted)
    return documents


def file_batches(files: list[Found], wanted: dict[str, Selection], data: DataConfig) -> Iterator[FileBatch]:
    """Files in their order, as long as one of the parts wanted (part -> its corpus) takes more."""
    for start in range(0, len(files), BATCH_FILES):
        parts = tuple(part for part, selection in wanted.items() if selection.is_open(part))
        if not parts:
            return
        full = frozenset(package for part in parts for package in wanted[part].full)
        yield FileBatch(files=tuple(files[start : start + BATCH_FILES]), parts=parts, full=full, data=data)


def record_batches(records: Iterable[tuple[str, Text]], kind: str, data: DataConfig) -> Iterator[RecordBatch]:
    """Records of one kind in their order, about 250 kB of text at a time."""
    batch: list[tuple[str, Text]] = []
    held = 0
    for split, record in records:
        batch.append((split, record))
        held += len(record.text)
        if held >= BATCH_BYTES:
            yield RecordBatch(records=tuple(batch), kind=kind, data=data)
            batch, held = [], 0
    if batch:
        yield RecordBatch(records=tuple(batch), kind=kind, data=data)
