"""Reads a folder of own files as the stages do, and keeps the books, for the tests of readers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.ingest import own_files
from pipeline.ingest.sources import DataConfig

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Books:
    """What a source gave and what became of its rows."""

    records: list[tuple[str, Any]]
    rejected: list[dict[str, Any]]


def config(kind: str, globs: Sequence[str] = ("*",), max_rejected: float = 1.0, **options: Any) -> DataConfig:
    return DataConfig(source="files", max_rejected=max_rejected, **{kind: list(globs)}, **options)


def read(
    root: Path, kind: str = "text", globs: Sequence[str] = ("*",), max_rejected: float = 1.0, **options: Any
) -> Books:
    path = root.parent / f"{root.name}-rejected.jsonl"
    found = list(own_files.read_files(root, config(kind, globs, max_rejected, **options), kind, path))
    return Books(found, [json.loads(line) for line in path.read_text().splitlines()])


def texts(books: Books) -> list[str]:
    return [record.text for _, record in books.records]


def jsonl(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
