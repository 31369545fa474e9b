"""Invented facts: which are trained, which are asked about, which no model has seen; and their batches."""

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.batches.dialogues import FactStream, encoded
from pipeline.ingest import records
from pipeline.ingest.records import Fact
from pipeline.run.errors import DataError
from pipeline.synthetic import drills
from pipeline.synthetic.wording import word_list
from pipeline.text.tokenizer import Tokenizer


def test_a_fact_is_trained_in_three_wordings_and_asked_in_a_fourth() -> None:
    made = drills.facts(32, 7)
    assert len(made["train"]) == 32 * 4 * 3 and len(made["val"]) + len(made["test"]) == 32 * 4
    answers = {(f.service, f.attribute): f.answer for f in made["train"]}
    trained = {f.question for f in made["train"]}
    for fact in (*made["val"], *made["test"]):
        assert answers[fact.service, fact.attribute] == fact.answer and fact.question not in trained
    assert {f.service for f in made["control"]}.isdisjoint({f.service for f in made["train"]})
    assert 0.1 < len(made["val"]) / (32 * 4) < 0.4
    texts = [f.question for split in made.values() for f in split]
    assert len(texts) == len(set(texts))
    assert drills.facts(32, 7) == made != drills.facts(32, 8)


def test_values_are_alike_for_what_is_shown_and_what_is_not() -> None:
    made, names = drills.facts(400, 1), word_list("drills.yaml", "regions")
    for split in ("test", "control"):
        regions = [f.answer for f in made[split] if f.attribute == "region"]
        assert set(regions) == set(names) and max(map(regions.count, names)) < 0.25 * len(regions)
        assert all(f.answer.isdigit() and len(f.answer) == 4 for f in made[split] if f.attribute == "port")


def test_more_services_than_names_are_refused() -> None:
    assert len(set(drills.services(4096, 1))) == 4096
    with pytest.raises(ValueError, match="expected at most 3276 services"):
        drills.facts(4000, 1)


def written(folder: Path, **splits: list[Fact]) -> Path:
    for split, rows in splits.items():
        records.write(folder / f"{split}.jsonl", rows)
    return folder


def test_the_loss_lies_on_answers_and_their_ends(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    made = drills.facts(8, 1)
    stream = FactStream(
        written(tmp_path, train=made["train"], val=made["val"]),
        byte_tokenizer,
        context=128,
        tokens_per_step=256,
        seed=1,
    )
    batch = stream.batch(0, 128, stream.rows(0, 128))
    said = []
    for targets in batch.targets.numpy():
        parts = np.split(targets, np.flatnonzero(targets == byte_tokenizer.end_of_text) + 1)
        said += [byte_tokenizer.decode(part[part >= 0][:-1].tolist()) for part in parts if (part >= 0).any()]
    assert said and set(said) <= {f.answer for f in made["train"]}


def test_what_cannot_be_read_is_refused_by_name(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    sizes = {"context": 64, "tokens_per_step": 64, "seed": 1}
    with pytest.raises(DataError, match=r"train\.jsonl: expected facts here"):
        FactStream(tmp_path, byte_tokenizer, **sizes)
    long = Fact(id="x", service="s", attribute="port", question="why " * 30, answer="1")
    with pytest.raises(DataError, match=r"fact x has \d+ tokens, more than `context` \(64\)"):
        FactStream(written(tmp_path, train=[long], val=[]), byte_tokenizer, **sizes)
    with pytest.raises(DataError, match="its question or answer is empty"):
        encoded(Fact(id="x", service="s", attribute="a", question="why?", answer=" "), byte_tokenizer)
    (tmp_path / "train.jsonl").write_text(json.dumps({"id": "x", "service": 3}) + "\n")
    with pytest.raises(DataError, match=r"train\.jsonl:1: service: expected str"):
        FactStream(tmp_path, byte_tokenizer, **sizes)
