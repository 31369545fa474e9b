"""Keeps test items out of training text, and test items out that training text already holds.

    data/benchmarks/* -> items (every string of every row) -> Index -> which items does this document hold?

On words after NFKC and lower case, a document hits an item when it shares 13 words in a row with it or, for an item of
fewer words, holds all of them in a row (items of 40 characters or more; a shorter one is no evidence). Runs of words are
compared as 64-bit hashes.

`stage_corpus` drops the training text, `stage_tasks` the generated test item. Not promised: finding a translation or a
paraphrase, or a solution with other names.
"""

from __future__ import annotations

import csv
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import DataError
from pipeline.streams import formats
from pipeline.streams.calls import RowError
from pipeline.streams.duplicates import shingle_hashes

RUN, SHORTEST = 13, 40  # words in a row; characters of an item that counts as a whole
WORD = re.compile(r"\w+")
READ_WHOLE = (".txt", ".md", ".rst", ".py", ".sh")


def words(text: str) -> list[bytes]:
    """The words of a text after NFKC and lower case, in UTF-8."""
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return [word.encode("utf-8", "replace") for word in WORD.findall(plain.lower())]


class Index:
    """The runs of words of a set of items."""

    def __init__(self, items: Iterable[tuple[str, str]]) -> None:
        """Index (name, text) items; one name may stand for several texts."""
        self.names: list[str] = []
        runs: dict[int, list[NDArray[np.uint64]]] = {}
        owners: dict[int, list[NDArray[np.int32]]] = {}
        for name, text in items:
            found = words(text)
            whole = len(found) < RUN
            if not found or (whole and len(b" ".join(found)) < SHORTEST):
                continue
            if not self.names or self.names[-1] != name:
                self.names.append(name)
            width = len(found) if whole else RUN
            hashes = shingle_hashes(found, width)
            runs.setdefault(width, []).append(hashes)
            owners.setdefault(width, []).append(np.full(len(hashes), len(self.names) - 1, np.int32))
        self._runs: dict[int, tuple[NDArray[np.uint64], NDArray[np.int32]]] = {}
        for width in sorted(runs):
            hashes, numbers = np.concatenate(runs[width]), np.concatenate(owners[width])
            order = np.argsort(hashes, kind="stable")
            self._runs[width] = hashes[order], numbers[order]

    def __len__(self) -> int:
        """How many items are long enough to be looked for."""
        return len(self.names)

    def hits(self, text: str) -> list[str]:
        """Names of the items that this text holds or shares 13 words in a row with, in the items' order."""
        if not self.names:
            return []
        found, numbers = words(text), set()
        for width, (hashes, owners) in self._runs.items():
            runs = shingle_hashes(found, width)
            left, right = np.searchsorted(hashes, runs, "left"), np.searchsorted(hashes, runs, "right")
            for first, last in zip(left[left < right], right[left < right], strict=True):
                numbers.update(owners[first:last].tolist())
        return [self.names[number] for number in sorted(numbers)]


def benchmark_files(folder: Path) -> list[Path]:
    """The files of data/benchmarks/ in a fixed order, without README.md and hidden ones."""
    if not folder.is_dir():
        return []
    files = (path for path in folder.rglob("*") if path.is_file())
    kept = [
        p for p in files if p.name != "README.md" and not any(x.startswith(".") for x in p.relative_to(folder).parts)
    ]
    return sorted(kept, key=lambda path: path.relative_to(folder).as_posix())


def benchmark_items(folder: Path) -> Iterator[tuple[str, str]]:
    """(file:row, text) of every string in the benchmark files. Raises DataError for one that cannot be read."""
    for path in benchmark_files(folder):
        name = path.relative_to(folder).as_posix()
        for number, row in enumerate(_rows(path), start=1):
            for text in strings(row):
                yield f"{name}:{number}", text


def strings(value: Any) -> Iterator[str]:
    """Every string inside a JSON value, keys left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from strings(inner)


def _rows(path: Path) -> Iterator[Any]:
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    if suffix == ".parquet":
        for number, row in formats.rows(path, "utf-8"):
            if isinstance(row, RowError):
                raise DataError(f"{path}:{number}: {row}; repair it or take it away")
            yield row
        return
    try:
        raw = formats.unzipped(path) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: expected UTF-8 text, plain or gzip ({error}); convert it or take it away") from error
    if suffix in READ_WHOLE:
        yield from [text, *re.split(r"\n\s*\n", text)]
    elif suffix in (".csv", ".tsv"):
        csv.field_size_limit(2**31 - 1)
        yield from csv.reader(text.splitlines(keepends=True), delimiter="\t" if suffix == ".tsv" else ",")
    elif suffix in (".json", ".jsonl"):
        yield from _json_rows(path, text)
    else:
        raise DataError(
            f"{path}: expected .jsonl, .json, .csv, .tsv, .parquet (or .gz of these) or text; convert it or take it away"
        )


def _json_rows(path: Path, text: str) -> Iterator[Any]:
    """The rows of a JSON list or object, else of JSON lines (BFCL writes these into .json files)."""
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(
                        f"{path}:{number}: not JSON ({error.msg}); repair the line or take the file away"
                    ) from error
    else:
        yield from whole if isinstance(whole, list) else [whole]
