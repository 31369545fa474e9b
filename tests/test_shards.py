"""From parquet to token shards: order, offsets, resume, an even sample."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.ingest import selection, shards
from pipeline.run.errors import DataError, GateError
from pipeline.run.processes import pool_map
from pipeline.text.tokenizer import Tokenizer
from stages import encode as stage_encode
from tests.data_stages import FakeJob

ROOT = Path(__file__).parents[1]
SOURCE = (ROOT / "pipeline/ingest/shards.py").read_text(encoding="utf-8")
TOKENIZER = Tokenizer.train(iter([SOURCE]), 512)
DOCUMENTS = [f"# {n}\n" + SOURCE[n * 11 % 3000 :][: 20 + n * 7 % 400] + "é" * (n % 3) for n in range(300)]


def write_parquet(path: Path, texts: list[str], first: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [f"p/{first + n}" for n in range(len(texts))]
    pq.write_table(pa.table({"text": texts, "source": ["s"] * len(texts), "path": names}), path)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    folder = tmp_path / "raw"
    for number in range(3):
        write_parquet(folder / f"train-{number}.parquet", DOCUMENTS[number * 100 : number * 100 + 100], number * 100)
    write_parquet(folder / "val-0.parquet", ["held out", "", "too"], 1000)
    TOKENIZER.save(tmp_path / "tokenizer")
    return folder


def encode(raw: Path, split: str, out: Path, workers: int = 1) -> dict[str, object]:
    tasks = [shards.EncodeTask(p, raw.parent / "tokenizer", raw.parent / "parts") for p in shards.files(raw, split)]
    return shards.join(split, tasks, list(pool_map(shards.encode_file, tasks, workers)), out)


def test_tokens_are_the_documents_in_order_each_with_an_end(raw: Path, tmp_path: Path) -> None:
    entry = encode(raw, "train", tmp_path / "out")
    tokens = np.fromfile(tmp_path / "out/train.bin", "<u2")
    offsets = np.fromfile(tmp_path / "out/train.idx", "<u8")
    expected = [[*TOKENIZER.encode(text), TOKENIZER.end_of_text] for text in DOCUMENTS]
    assert tokens.tolist() == [id_ for document in expected for id_ in document]
    assert offsets.tolist() == [0, *np.cumsum([len(document) for document in expected]).tolist()]
    assert (entry["documents"], entry["tokens"]) == (300, len(tokens))
    assert entry["bytes"] == sum(len(text.encode()) for text in DOCUMENTS)


def test_documents_without_text_are_left_out_and_counted(raw: Path, tmp_path: Path) -> None:
    entry = encode(raw, "val", tmp_path / "out")
    assert (entry["documents"], entry["empty"]) == (2, 1)
    assert len(np.fromfile(tmp_path / "out/val.idx", "<u8")) == 3


def test_a_second_run_encodes_only_what_is_not_there(raw: Path, tmp_path: Path) -> None:
    first = encode(raw, "train", tmp_path / "one")
    (tmp_path / "parts/train-1.json").unlink()  # as if killed while writing this part
    (tmp_path / "parts/train-1.bin").write_bytes(b"half")
    marks = {path: path.stat().st_mtime_ns for path in (tmp_path / "parts").glob("train-[02].bin")}
    assert encode(raw, "train", tmp_path / "two") == first
    assert {path: path.stat().st_mtime_ns for path in marks} == marks
    assert (tmp_path / "one/train.bin").read_bytes() == (tmp_path / "two/train.bin").read_bytes()


@pytest.mark.slow
@pytest.mark.full
def test_the_number_of_workers_changes_nothing(raw: Path, tmp_path: Path) -> None:
    one = encode(raw, "train", tmp_path / "one")
    for path in (tmp_path / "parts").iterdir():
        path.unlink()
    assert encode(raw, "train", tmp_path / "two", workers=2) == one
    assert (tmp_path / "one/train.bin").read_bytes() == (tmp_path / "two/train.bin").read_bytes()


def test_large_vocabularies_take_four_bytes_a_token() -> None:
    assert shards.token_dtype(65_536) == np.dtype("<u2") and shards.token_dtype(65_537) == np.dtype("<u4")


def test_meta_names_the_tokenizer_and_both_splits(raw: Path, tmp_path: Path) -> None:
    splits = {split: encode(raw, split, tmp_path / "out") for split in shards.SPLITS}
    shards.write_meta(tmp_path / "out", TOKENIZER, splits)
    meta = json.loads((tmp_path / "out/meta.json").read_text())
    assert meta["tokenizer"] == TOKENIZER.hash and meta["dtype"] == "uint16"
    assert meta["splits"]["train"]["documents"] == 300 and meta["splits"]["val"]["tokens"] == splits["val"]["tokens"]


def test_the_sample_is_spread_over_the_corpus_near_the_size_asked_and_blind_to_the_files(
    raw: Path, tmp_path: Path
) -> None:
    everything = list(shards.texts(raw, "train", 10**9, 10_000))
    assert everything == DOCUMENTS
    held = sum(len(text.encode()) for text in DOCUMENTS)
    sample = list(shards.texts(raw, "train", held // 3, 10_000))
    assert 0.2 < sum(len(text.encode()) for text in sample) / held < 0.47
    places = [DOCUMENTS.index(text) for text in sample]
    assert places == sorted(places) and min(places) < 30 and max(places) > 270
    write_parquet(tmp_path / "one/train-0.parquet", DOCUMENTS)
    assert list(shards.texts(tmp_path / "one", "train", held // 3, 10_000)) == sample
    assert list(shards.texts(raw, "train", 10**9, 5)) == [text[:5] for text in DOCUMENTS]


def test_missing_files_and_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected train-\*\.parquet, found none; run dvc repro stage_corpus"):
        shards.files(tmp_path, "train")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "train-0.parquet")
    with pytest.raises(DataError, match=r"train-0\.parquet: .* missing: path, source"):
        list(shards.texts(tmp_path, "train", 10, 10))


@pytest.mark.slow
@pytest.mark.full
def test_memory_stays_flat_when_the_corpus_is_ten_times_larger(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path / "tokenizer")
    code = (
        "import resource, sys; from pathlib import Path; from pipeline.ingest import shards; root = Path(sys.argv[1]);"
        " shards.encode_file(shards.EncodeTask(Path(sys.argv[2]), root / 'tokenizer', root / 'parts'));"
        " print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for number, times in enumerate((2, 20)):
        path = tmp_path / f"train-{number}.parquet"
        with pq.ParquetWriter(path, pa.schema([("text", pa.string())])) as writer:
            for block in range(times):  # row groups of 64 documents, together 0.4 MB
                writer.write_table(pa.table({"text": [f"{block} {row} {SOURCE}" for row in range(64)]}))
        command = [sys.executable, "-c", code, str(tmp_path), str(path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout) * (1 if sys.platform == "darwin" else 1024))
    assert peaks[1] - peaks[0] < 20e6, peaks


def test_a_document_in_both_splits_is_refused(raw: Path) -> None:
    shards.check_apart(raw)
    write_parquet(raw / "val-1.parquet", ["new", DOCUMENTS[123], ""], 2000)
    with pytest.raises(GateError, match=r"train-1.parquet: p/123 is also in the val split \(val-1.parquet: p/2001\)"):
        shards.check_apart(raw)


def test_a_corpus_without_documents_is_encoded_as_no_tokens(tmp_path: Path) -> None:
    selection.write_empty(tmp_path / "raw")
    TOKENIZER.save(tmp_path / "tokenizer")
    job: Any = FakeJob(tmp_path / "work")
    out = tmp_path / "tokens"
    stage_encode.run(stage_encode.Params(), job, tokenizer=tmp_path / "tokenizer", corpus=tmp_path / "raw", out=out)
    meta = json.loads((out / "meta.json").read_text())
    assert {split: entry["tokens"] for split, entry in meta["splits"].items()} == {"train": 0, "val": 0}
    assert (out / "train.bin").read_bytes() == b"" and (out / "train.idx").stat().st_size == 8
    assert job.reported["train"]["documents"] == 0
