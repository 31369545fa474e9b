"""Which test items stand in the training data, so that the items leave (not the text: no task knob retrains a model).

(name, text) items + data/raw corpora + training conversations -> the names that were found
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet

from pipeline.processes import pool_map
from pipeline.streams.decontamination import Index

GENERATED = frozenset({"generated"})


@dataclass(frozen=True)
class Search:
    """A file to look through, and what to look for: all a worker process needs."""

    path: Path
    items: Sequence[tuple[str, str]]


def found_in(items: Sequence[tuple[str, str]], corpora: Iterable[Path], texts: Iterable[str], workers: int) -> set[str]:
    """Names of the items that a training document of the corpora or one of the texts holds, or shares 13 words with."""
    index = Index(items)
    hits = {name for text in texts for name in index.hits(text)}
    files = [path for corpus in corpora for path in sorted(corpus.glob("train-*.parquet"))]
    for found in pool_map(look_through, [Search(path, items) for path in files], workers):
        hits |= found
    return hits


def look_through(search: Search) -> set[str]:
    """The items found in one parquet file."""
    index, hits = Index(search.items), set[str]()
    with pyarrow.parquet.ParquetFile(search.path) as file:
        for batch in file.iter_batches(columns=["text", "source"]):
            for text, source in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
                if source not in GENERATED:
                    hits.update(index.hits(text))
    return hits
