"""The recall of facts: what counts as a right answer."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.ingest import records
from pipeline.ingest.records import Fact
from pipeline.memory import measure
from pipeline.memory.measure import questions, recall
from pipeline.model.transformer import Transformer
from pipeline.text.tokenizer import Tokenizer


def test_only_the_whole_answer_is_right(
    byte_tokenizer: Tokenizer, tiny_model: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        Fact(id=str(n), service="s", attribute=a, question="q?", answer="12")
        for n, a in enumerate(("port", "port", "owner", "owner"))
    ]
    records.write(tmp_path / "test.jsonl", rows)
    asked = questions(tmp_path / "test.jsonl", byte_tokenizer, 10)
    whole = byte_tokenizer.encode("12")
    said = [(whole, "stop"), (whole, "length"), (whole[:1], "stop"), (byte_tokenizer.encode("123"), "stop")]
    monkeypatch.setattr(
        measure, "generate", lambda *_, **__: [SimpleNamespace(ids=ids, stop=stop) for ids, stop in said]
    )
    found = recall(tiny_model, byte_tokenizer, asked)
    assert found.right.tolist() == [True, False, False, False]
    told = found.measure()
    assert (told["n"], told["exact_match"], told["port"], told["owner"]) == (4, 0.25, 0.5, 0.0)
    assert told["exact_match_low"] == pytest.approx(0.0456, abs=1e-3) and told["exact_match_high"] == pytest.approx(
        0.6994, abs=1e-3
    )
