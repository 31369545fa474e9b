"""Small token folders and streams over them, for the tests of streams."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipeline.batches.batch import TokenBatch
from pipeline.batches.corpus import CorpusStream, FillInMiddle
from pipeline.ingest import shards
from pipeline.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
SOURCE = (ROOT / "pipeline/batches/corpus.py").read_text(encoding="utf-8")
TOKENIZER = Tokenizer.train(iter([SOURCE]), 512)
CONTEXT, STEP = 64, 256


def write_raw(folder: Path, **files: list[tuple[str, str, str]]) -> Path:
    """Write a folder of parquet files, given as split_number=[(text, source, path), ...]."""
    folder.mkdir()
    for name, rows in files.items():
        columns = {key: [row[n] for row in rows] for n, key in enumerate(("text", "source", "path"))}
        table = pa.table(columns | {"license": ["MIT"] * len(rows)})
        pq.write_table(table, folder / f"{name.replace('_', '-')}.parquet")
    return folder


def write_corpus(folder: Path, train: list[str], val: list[str], tokenizer: Tokenizer = TOKENIZER) -> Path:
    """Write parquet files and, next to them, their tokens; returns the token folder."""
    raw, tokens = folder / "raw", folder / "tokens"
    raw.mkdir(parents=True)
    tokenizer.save(folder / "tokenizer")
    splits = {}
    for split, documents in (("train", train), ("val", val)):
        columns = {
            "text": documents,
            "source": ["test"] * len(documents),
            "path": [str(n) for n in range(len(documents))],
        }
        pq.write_table(pa.table(columns | {"license": ["MIT"] * len(documents)}), raw / f"{split}-0.parquet")
        tasks = [shards.EncodeTask(path, folder / "tokenizer", folder / "parts") for path in shards.files(raw, split)]
        splits[split] = shards.join(split, tasks, [shards.encode_file(task) for task in tasks], tokens)
    shards.write_meta(tokens, tokenizer, splits)
    return tokens


def documents(number: int, first: int = 0) -> list[str]:
    """Documents of 1 to about 300 tokens, all different."""
    return [f"{n} " + SOURCE[n * 37 % 5000 :][: 3 + (n * n * 13) % 600] for n in range(first, first + number)]


def stream(folder: Path, fim_rate: float = 0.0, fim_syntax: float | None = None, **changes: object) -> CorpusStream:
    changes["fim"] = FillInMiddle(fim_rate, fim_syntax)
    values = {"context": CONTEXT, "tokens_per_step": STEP, "seed": 1, "cache": folder.parent / "cache"} | changes
    return CorpusStream(folder, TOKENIZER, **values)  # type: ignore[arg-type]


def equal(a: TokenBatch, b: TokenBatch) -> bool:
    names = ("input_ids", "targets", "documents", "positions")
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in names) and a.num_bytes == b.num_bytes


@pytest.fixture(name="corpus", scope="module")
def token_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents(120), documents(20, first=1000))
