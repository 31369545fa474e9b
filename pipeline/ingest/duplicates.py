"""Deduplication and decontamination: exact and near-duplicate documents, and test items in training text.

    text -> fingerprint (64 bits), signature (256 bytes)      stateless, in the workers
    each signature, in order -> does an earlier one resemble it?   NearDuplicates, in the collecting process

Fingerprints find documents that are equal up to whitespace. Signatures find near duplicates: each is a one-permutation
MinHash (Li, Owen, Zhang 2012) of 5-token shingles in 256 bins, with empty bins filled by rotation (Shrivastava & Li
2014) and 8 bits of each minimum kept (Li & König 2010). 32 bands of 8 bins propose candidates: a pair with Jaccard
similarity s is proposed with probability 1 - (1 - s^8)^32 (0.85 at 0.7, 0.996 at 0.8); the estimate over all 256 bins
(standard error 0.03 at 0.7) then confirms or rejects it. Memory per document, whatever its length: 256 bytes for the
signature and 210 to 320 bytes for the table. No text is kept.

    data/benchmarks/* -> items (every string of every row) -> Index -> which items does this document contain?
    (name, text) items + data/raw corpora + training conversations -> found_in -> the names that were found

Decontamination compares words after NFKC and lowercasing. A document hits an item if they share 13 consecutive words
or, for shorter items, if it contains all of the item's words consecutively (only items of at least 40 characters; a
shorter match proves nothing). Word runs are compared as 64-bit hashes. `stage_corpus` drops training text that contains
a benchmark item; `stage_tasks` instead drops its own test items that occur in training text, so that changing a
`tasks` parameter never triggers retraining.

Not guaranteed: that this finds every near duplicate (see the probabilities above), a document that merely contains
another, a translation or paraphrase, or a solution with renamed variables.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet
from numpy.typing import NDArray

from pipeline.ingest import files as ingest_files
from pipeline.ingest.tool_calls import RowError
from pipeline.run.errors import DataError
from pipeline.run.processes import pool_map

BINS, BANDS, SHINGLE = 256, 32, 5
ROTATION = 157  # added for each bin that a value moves, so that near and far donors give different values
CHANCE_AGREEMENT = 1 / 256  # probability that two unrelated minima agree in 8 bits
MAX_LOAD, GROWTH, LONGEST_CHAIN = 0.6, 1.5, 64
EMPTY = np.uint32(0xFFFFFFFF)
TOKEN = re.compile(rb"[A-Za-z0-9_\x80-\xff]+|[^\sA-Za-z0-9_\x80-\xff]")
Hashes = NDArray[np.uint64]


def fingerprint(text: str) -> int:
    """64 bits of blake2b over the text without its whitespace."""
    squeezed = "".join(text.split()).encode()
    return int.from_bytes(hashlib.blake2b(squeezed, digest_size=8).digest(), "little")


def mix(values: Hashes) -> Hashes:
    """splitmix64's finalizer: every input bit affects every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def shingle_hashes(tokens: list[bytes], width: int) -> Hashes:
    """A 64-bit hash of every run of `width` tokens, in order; empty if there are fewer tokens."""
    count = len(tokens) - width + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    words = np.fromiter(map(zlib.crc32, tokens), np.uint64, len(tokens))
    hashes = np.zeros(count, np.uint64)
    for offset in range(width):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + words[offset : offset + count]
    return mix(hashes)


def signature(text: str) -> bytes:
    """The 256-byte MinHash of a text; a text shorter than a shingle is treated as one shingle."""
    tokens = TOKEN.findall(text.encode())
    hashes = shingle_hashes(tokens, min(SHINGLE, max(1, len(tokens))))
    if not len(hashes):
        return bytes(BINS)
    hashes.sort()
    # The top 8 bits select the bin, so in sorted order the first hash of a bin is its minimum.
    bins = (hashes >> np.uint64(56)).astype(np.int64)
    first = np.flatnonzero(np.r_[True, bins[1:] != bins[:-1]])
    filled, minima = bins[first], (hashes[first] & np.uint64(0xFF)).astype(np.int64)
    every = np.arange(BINS)
    donor = np.searchsorted(filled, every) % len(filled)  # the next filled bin to the right, wrapping around at the end
    distance = (filled[donor] - every) % BINS
    return ((minima[donor] + ROTATION * distance) & 0xFF).astype(np.uint8).tobytes()


def _estimate(stored: NDArray[np.uint8], query: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Estimate the Jaccard similarity of shingle sets from their signatures: about 0 if unrelated, 1 if equal."""
    return ((stored == query).mean(axis=-1) - CHANCE_AGREEMENT) / (1 - CHANCE_AGREEMENT)


class NearDuplicates:
    """All signatures added so far, and a hash table that maps each band of each signature to the signature's index.

    The table stores only indices, so a lookup compares the band with the signature that the slot points to. Two bands
    of the same document may share a slot, since looking up either one finds the document.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.count = 0
        self._words = np.zeros((1024, BANDS), np.uint64)  # a band of 8 bytes is one word
        self._table = np.full(int(1024 * BANDS / MAX_LOAD), EMPTY, np.uint32)

    def find(self, sketch: bytes) -> int | None:
        """The index of the first signature added so far that resembles this one, or None."""
        keys = np.frombuffer(sketch, np.uint64)
        slots = self._slots(keys)
        bands = np.arange(BANDS)
        matches = []
        while len(bands):
            numbers = self._table[slots]
            occupied = numbers != EMPTY
            bands, slots, numbers = bands[occupied], slots[occupied], numbers[occupied]
            matches.append(numbers[self._words[numbers, bands] == keys[bands]])
            slots = (slots + 1) % len(self._table)
        candidates = np.unique(np.concatenate(matches))
        if not len(candidates):
            return None
        near = _estimate(self._words[candidates].view(np.uint8), np.frombuffer(sketch, np.uint8)) >= self.threshold
        return int(candidates[near][0]) if near.any() else None

    def add(self, sketch: bytes) -> int:
        """Add a signature and return its index."""
        number = self.count
        self.count += 1
        if self.count > len(self._words):  # in place: pages are remapped, so there are never two copies
            self._words.resize((int(len(self._words) * GROWTH), BANDS), refcheck=False)
        self._words[number] = np.frombuffer(sketch, np.uint64)
        if self.count * BANDS > MAX_LOAD * len(self._table):
            self._rebuild(int(len(self._table) * GROWTH))
        else:
            self._insert(np.array([number]))
        return number

    def _slots(self, keys: Hashes) -> NDArray[np.int64]:
        # The same 8 bytes in two bands collide; that costs a comparison but never gives a wrong answer.
        return ((mix(keys) >> np.uint64(32)) * np.uint64(len(self._table)) >> np.uint64(32)).astype(np.int64)

    def _insert(self, numbers: NDArray[np.int64]) -> None:
        keys = self._words[numbers].reshape(-1)
        bands, owners = np.tile(np.arange(BANDS), len(numbers)), np.repeat(numbers, BANDS).astype(np.uint32)
        slots, num_alike = self._slots(keys), np.zeros(len(keys), np.int64)
        while len(keys):
            free = self._table[slots] == EMPTY
            self._table[slots[free]] = owners[free]
            stored = self._table[slots]
            # Boilerplate gives thousands of documents the same band; a chain of 64 yields enough candidates.
            num_alike += self._words[stored, bands] == keys
            unplaced = (stored != owners) & (num_alike < LONGEST_CHAIN)
            keys, bands, owners, num_alike = keys[unplaced], bands[unplaced], owners[unplaced], num_alike[unplaced]
            slots = (slots[unplaced] + 1) % len(self._table)

    def _rebuild(self, size: int) -> None:
        self._table = np.empty(0, np.uint32)  # frees the old table before the new one is allocated
        self._table = np.full(size, EMPTY, np.uint32)
        for first in range(0, self.count, 4096):
            self._insert(np.arange(first, min(first + 4096, self.count)))


# -- decontamination ---------------------------------------------------------------------------------------------------


RUN_LENGTH, MIN_CHARACTERS = 13, 40  # consecutive words that make a hit; minimum length of an item with fewer
WORD = re.compile(r"\w+")
READ_WHOLE = (".txt", ".md", ".rst", ".py", ".sh")


def words(text: str) -> list[bytes]:
    """The words of a text after NFKC normalization and lowercasing, encoded in UTF-8."""
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return [word.encode("utf-8", "replace") for word in WORD.findall(plain.lower())]


class Index:
    """An index of the word runs of a set of items."""

    def __init__(self, items: Iterable[tuple[str, str]]) -> None:
        """Index (name, text) items; consecutive texts may share a name."""
        self.names: list[str] = []
        runs: dict[int, list[NDArray[np.uint64]]] = {}
        owners: dict[int, list[NDArray[np.int32]]] = {}
        for name, text in items:
            item_words = words(text)
            is_short = len(item_words) < RUN_LENGTH
            if not item_words or (is_short and len(b" ".join(item_words)) < MIN_CHARACTERS):
                continue
            if not self.names or self.names[-1] != name:
                self.names.append(name)
            width = len(item_words) if is_short else RUN_LENGTH
            hashes = shingle_hashes(item_words, width)
            runs.setdefault(width, []).append(hashes)
            owners.setdefault(width, []).append(np.full(len(hashes), len(self.names) - 1, np.int32))
        self._runs: dict[int, tuple[NDArray[np.uint64], NDArray[np.int32]]] = {}
        for width in sorted(runs):
            hashes, numbers = np.concatenate(runs[width]), np.concatenate(owners[width])
            order = np.argsort(hashes, kind="stable")
            self._runs[width] = hashes[order], numbers[order]

    def __len__(self) -> int:
        """Number of items long enough to be found."""
        return len(self.names)

    def hits(self, text: str) -> list[str]:
        """Names of the items that this text contains or shares 13 consecutive words with, in item order."""
        if not self.names:
            return []
        text_words, numbers = words(text), set()
        for width, (hashes, owners) in self._runs.items():
            runs = shingle_hashes(text_words, width)
            left, right = np.searchsorted(hashes, runs, "left"), np.searchsorted(hashes, runs, "right")
            for first, last in zip(left[left < right], right[left < right], strict=True):
                numbers.update(owners[first:last].tolist())
        return [self.names[number] for number in sorted(numbers)]


def benchmark_files(folder: Path) -> list[Path]:
    """All files in data/benchmarks/ except README.md and hidden files, in a fixed order."""
    if not folder.is_dir():
        return []
    files = (path for path in folder.rglob("*") if path.is_file())
    visible = [
        p for p in files if p.name != "README.md" and not any(x.startswith(".") for x in p.relative_to(folder).parts)
    ]
    return sorted(visible, key=lambda path: path.relative_to(folder).as_posix())


def benchmark_items(folder: Path) -> Iterator[tuple[str, str]]:
    """(file:row, text) for every string in the benchmark files. Raises DataError for an unreadable file."""
    for path in benchmark_files(folder):
        name = path.relative_to(folder).as_posix()
        for number, row in enumerate(_rows(path), start=1):
            for text in strings(row):
                yield f"{name}:{number}", text


def strings(value: object) -> Iterator[str]:
    """Every string inside a JSON value, except keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from strings(inner)


def _rows(path: Path) -> Iterator[object]:
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    if suffix == ".parquet":
        for number, row in ingest_files.rows(path, "utf-8"):
            if isinstance(row, RowError):
                raise DataError(f"{path}:{number}: {row}; fix or remove it")
            yield row
        return
    try:
        raw = ingest_files.unzipped(path) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: expected UTF-8 text, plain or gzip ({error}); convert or remove it") from error
    if suffix in READ_WHOLE:
        yield from [text, *re.split(r"\n\s*\n", text)]
    elif suffix in (".csv", ".tsv"):
        csv.field_size_limit(2**31 - 1)
        yield from csv.reader(text.splitlines(keepends=True), delimiter="\t" if suffix == ".tsv" else ",")
    elif suffix in (".json", ".jsonl"):
        yield from _json_rows(path, text)
    else:
        raise DataError(
            f"{path}: expected .jsonl, .json, .csv, .tsv, .parquet or text, optionally gzipped; convert or remove it"
        )


def _json_rows(path: Path, text: str) -> Iterator[object]:
    """The elements of a JSON list, one JSON object, or the rows of JSON lines (as in BFCL's .json files)."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError:
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(
                        f"{path}:{number}: not JSON ({error.msg}); fix the line or remove the file"
                    ) from error
    else:
        yield from content if isinstance(content, list) else [content]


# -- screening ---------------------------------------------------------------------------------------------------------


GENERATED = frozenset({"generated"})


@dataclass(frozen=True)
class CorpusSearch:
    """A file and the items to search it for: everything a worker process needs."""

    path: Path
    items: Sequence[tuple[str, str]]


def found_in(items: Sequence[tuple[str, str]], corpora: Iterable[Path], texts: Iterable[str], workers: int) -> set[str]:
    """Names of the items hit by a training document of the corpora or by one of the texts (see `Index.hits`)."""
    index = Index(items)
    hits = {name for text in texts for name in index.hits(text)}
    files = [path for corpus in corpora for path in sorted(corpus.glob("train-*.parquet"))]
    for file_hits in pool_map(search_corpus_file, [CorpusSearch(path, items) for path in files], workers):
        hits |= file_hits
    return hits


def search_corpus_file(search: CorpusSearch) -> set[str]:
    """Names of the items found in one parquet file."""
    index, hits = Index(search.items), set[str]()
    with pyarrow.parquet.ParquetFile(search.path) as file:
        for batch in file.iter_batches(columns=["text", "source"]):
            for text, source in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
                if source not in GENERATED:
                    hits.update(index.hits(text))
    return hits
