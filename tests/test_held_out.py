"""The comparison of held-out bits per byte: the compressor's size, the tokens counted, the models' numbers read."""

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from benchmarks import held_out
from pipeline.run.errors import DataError, ModelError
from pipeline.text.tokenizer import Tokenizer

DOCUMENTS = {"text": ["a", "b"], "stories": ["c"], "stories_held_out": [], "code": ["d"]}


@pytest.mark.parametrize("text", ["x", "é" * 3000, "".join(chr(33 + n * n % 90) for n in range(9000))])
def test_the_cut_dictionary_gives_the_size_of_the_preset(text: str) -> None:
    whole = lzma.compress(text.encode(), format=lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME)
    assert held_out.xz_bits(text) == 8 * len(whole)


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    """Metrics of two models on DOCUMENTS, in the format of stage_evaluate."""
    (tmp_path / "eval").mkdir()
    inputs = {"data/raw/text": "t1", "data/raw/code": "c1"}
    for corpus in ("text", "code"):
        (tmp_path / f"encode_{corpus}.json").write_text(json.dumps({"lineage": {"inputs": inputs}}))
    for name in ("tools", "language"):
        numbers: dict = {
            kind: {"bpb": 1.0 + n, "bpb_low": 0.5, "bpb_high": 9.0, "documents": len(texts)} if texts else {}
            for n, (kind, texts) in enumerate(DOCUMENTS.items())
        }
        (tmp_path / "eval" / f"{name}.json").write_text(json.dumps(numbers | {"lineage": {"inputs": inputs}}))
    return tmp_path


def test_the_models_own_numbers_are_read_in_the_order_of_the_graph(metrics: Path) -> None:
    models = held_out.evaluated(metrics, DOCUMENTS)
    assert list(models) == ["language", "tools"]
    assert list(models["tools"]) == ["text", "stories", "code"], "no documents, no number"
    assert (models["tools"]["code"].value, models["tools"]["code"].low, models["tools"]["code"].n) == (4.0, 0.5, 1)


def test_a_model_that_was_scored_on_other_documents_stops_the_run(metrics: Path) -> None:
    with pytest.raises(DataError, match="expected 3 documents"):
        held_out.evaluated(metrics, DOCUMENTS | {"text": ["a", "b", "c"]})
    (metrics / "encode_code.json").write_text(json.dumps({"lineage": {"inputs": {"data/raw/code": "c2"}}}))
    with pytest.raises(DataError, match="dvc repro stage_evaluate"):
        held_out.evaluated(metrics, DOCUMENTS)


def test_without_evaluated_models_there_are_no_rows_of_models(tmp_path: Path) -> None:
    assert held_out.evaluated(tmp_path, DOCUMENTS) == {}


def test_only_the_first_tokens_are_counted(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(iter(["some text"]), 320)
    np.arange(20, 30, dtype="<u2").tofile(tmp_path / "train.bin")
    meta = {"tokenizer": tokenizer.hash, "dtype": "uint16", "splits": {"train": {"tokens": 10}}}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    assert held_out.training_tokens(tmp_path, tokenizer, 3).tolist() == [20, 21, 22]
    assert held_out.training_tokens(tmp_path, tokenizer, None).tolist() == list(range(20, 30))
    with pytest.raises(DataError, match="expected 1 to 10"):
        held_out.training_tokens(tmp_path, tokenizer, 11)
    (tmp_path / "meta.json").write_text(json.dumps(meta | {"tokenizer": "another"}))
    with pytest.raises(ModelError, match="a tokenizer other than"):
        held_out.training_tokens(tmp_path, tokenizer, None)


def test_a_table_has_a_line_for_each_row_and_a_gap_where_nothing_was_measured() -> None:
    row = {"text": held_out.Interval(1.25, 1.0, 1.5, 2)}
    lines = held_out.table({"xz": row}, DOCUMENTS).splitlines()
    assert lines[0].startswith("| bits per byte | running prose, 2 documents | stories, 1 documents |")
    assert lines[2] == "| xz | 1.250 (1.000-1.500) |  |  |  |"
