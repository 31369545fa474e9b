"""Which of the cleaned documents a corpus keeps: duplicates, caps, test items, quotas, split; and the books of it all.

    Documents in a fixed order -> Selection -> parquet parts, counts by part, source, licence and drop reason

It decides on one document after the other, in order, so the number of workers that cleaned them changes nothing. It holds
hashes and signatures, never texts. Every document offered while its part is open is found; it is kept or leaves by one
reason: found = kept + dropped.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from pipeline.streams.cleaning import Document
from pipeline.streams.decontamination import Index
from pipeline.streams.duplicates import NearDuplicates, fingerprint, signature
from pipeline.streams.parquet import SPLITS, PartWriter, Size


class Tally:
    """Documents and bytes."""

    def __init__(self) -> None:
        self.files = self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count one document."""
        self.files += 1
        self.num_bytes += num_bytes

    def entry(self) -> dict[str, int]:
        """As the manifest writes it."""
        return {"files": self.files, "bytes": self.num_bytes}


class Selection:
    """One corpus in the making. Close it before its parts are read."""

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
        """`quotas`: bytes to keep of each part (inf: all of it); `caps`: of one package in a part;
        `threshold`: estimated similarity from which a later document leaves; `folder`: for the parts."""
        self.quotas, self.caps, self.min_bytes, self.benchmarks = quotas, caps, min_bytes, benchmarks
        self.full: set[tuple[str, str]] = set()  # (part, package) whose cap is reached
        self.found: dict[str, Tally] = {part: Tally() for part in quotas}
        self.kept: dict[str, dict[str, Tally]] = {part: {split: Tally() for split in SPLITS} for part in quotas}
        self.dropped: dict[str, dict[str, Tally]] = {part: {} for part in quotas}
        self.sources: dict[str, Tally] = {}
        self.licences: dict[str, Tally] = {}
        self.contaminated: dict[str, int] = {}  # benchmark item -> documents dropped for it
        self._equal: set[int] = set()
        self._spoken: set[int] = set()  # paragraphs of prose
        self._near = NearDuplicates(threshold)
        self._packages: dict[tuple[str, str], int] = {}
        self._writers: dict[tuple[str, str], PartWriter] = {}
        self._folder = folder

    def is_open(self, part: str) -> bool:
        """Whether the part may take more."""
        return sum(tally.num_bytes for tally in self.kept[part].values()) < self.quotas[part]

    def offer(self, document: Document) -> int:
        """Keep or drop the next document and return the bytes kept; one whose part is full is not counted at all."""
        if not self.is_open(document.part):
            return 0
        self.found[document.part].add(document.num_bytes)
        reason, document = self._judge(document)
        if reason is not None:
            self.dropped[document.part].setdefault(reason, Tally()).add(document.num_bytes)
            return 0
        record = document.record
        num_bytes = len(record.text.encode())
        key = (document.part, document.split)
        if key not in self._writers:
            self._writers[key] = PartWriter(self._folder / key[0] / f"{key[1]}.parquet")
        self._writers[key].add(record)
        self.kept[key[0]][key[1]].add(num_bytes)
        self.sources.setdefault(record.source, Tally()).add(num_bytes)
        self.licences.setdefault(record.licence, Tally()).add(num_bytes)
        return num_bytes

    def _judge(self, document: Document) -> tuple[str | None, Document]:
        """The drop reason or None, and the document as it would be kept."""
        # A full package comes first: its files need not even be read, and whether one was must not show.
        package = (document.part, document.record.source)
        if package in self.full:
            return "cap", document
        if document.reason is not None:
            return document.reason, document
        if document.paragraphs:
            document = self._put_together(document)
            if len(document.record.text.encode()) < self.min_bytes:
                return "size" if document.record.text else "duplicate", document
        if document.fingerprint in self._equal:
            return "duplicate", document
        self._equal.add(document.fingerprint)
        if document.signature:
            if self._near.find(document.signature) is not None:
                return "near duplicate", document
            self._near.add(document.signature)
        num_bytes = len(document.record.text.encode())
        held = self._packages.get(package, 0)
        if held + num_bytes > self.caps.get(document.part, math.inf):
            self.full.add(package)
            return "cap", document
        if hits := self.benchmarks.hits(document.record.text):
            for name in hits:
                self.contaminated[name] = self.contaminated.get(name, 0) + 1
            return "benchmark", document
        self._packages[package] = held + num_bytes
        return None, document

    def _put_together(self, document: Document) -> Document:
        """A document of prose from those of its paragraphs that were not met before."""
        fresh = []
        for paragraph in document.paragraphs:
            spoken = fingerprint(paragraph)
            if spoken not in self._spoken:
                self._spoken.add(spoken)
                fresh.append(paragraph)
        text = "\n\n".join(fresh)
        return dataclasses.replace(
            document,
            record=dataclasses.replace(document.record, text=text),
            paragraphs=(),
            fingerprint=fingerprint(text),
            signature=signature(text),
        )

    def close(self) -> dict[str, dict[Path, Size]]:
        """Close the parts; returns for each split its files and their sizes, in the order of the quotas."""
        for writer in self._writers.values():
            writer.close()
        written = {key: (writer.path, writer.size) for key, writer in self._writers.items()}
        return {
            split: dict(written[part, split] for part in self.quotas if (part, split) in written) for split in SPLITS
        }

    def books(self) -> dict[str, Any]:
        """The counts for the manifest: by part, source, licence, drop reason; found = kept + dropped for each part."""
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
            "dropped": self._dropped_in_all(),
            "sources": {name: tally.entry() for name, tally in sorted(self.sources.items())},
            "licences": {name: tally.entry() for name, tally in sorted(self.licences.items())},
            "benchmark_items_hit": dict(sorted(self.contaminated.items())),
        }

    def _dropped_in_all(self) -> dict[str, dict[str, int]]:
        summed: dict[str, dict[str, int]] = {}
        for reasons in self.dropped.values():
            for reason, tally in reasons.items():
                entry = summed.setdefault(reason, {"files": 0, "bytes": 0})
                entry["files"] += tally.files
                entry["bytes"] += tally.num_bytes
        return dict(sorted(summed.items()))
