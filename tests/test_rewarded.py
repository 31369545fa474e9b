"""The suite of a reward model: rows and numbers agree, and truth is what the pairs' scores say."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.batches.pairs import PairSplit
from pipeline.evaluation import preferences
from pipeline.evaluation.suites import SuiteResult
from pipeline.ingest import records
from pipeline.ingest.records import Pair
from pipeline.model import checkpoint
from pipeline.model.heads import RewardModel
from pipeline.model.transformer import Transformer
from pipeline.text.tokenizer import Tokenizer


def said(text: str) -> list[records.Message]:
    return [{"role": "assistant", "content": text}]


PAIRS = [
    Pair(
        id=f"p{n}",
        source="test",
        kind="code" if n % 3 else "story",
        prompt=[{"role": "user", "content": f"Say {n}."}],
        chosen=said("left " * (1 + n % 4)),
        rejected=said("right " * (1 + n % 3)),
        gold_chosen=1.0,
        gold_rejected=0.0,
    )
    for n in range(24)
]


@pytest.fixture
def model(tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """models/reward with a random but confident head."""
    found = RewardModel(Transformer(tiny_model.config, torch.Generator().manual_seed(3)))
    with torch.no_grad():
        found.score.weight.copy_(5 * torch.randn(found.score.weight.shape, generator=torch.Generator().manual_seed(4)))
    found.reward_mean, found.reward_std = 0.25, 1.5
    checkpoint.save_reward(tmp_path / "reward", found, byte_tokenizer, {"key": "k"})
    return tmp_path / "reward"


def told(model: Path, pairs: list[Pair]) -> SuiteResult:
    path = model.parent / "test.jsonl"
    records.write(path, pairs)
    return preferences.pairs_told(model, path, torch.device("cpu"))


def test_rows_and_numbers_say_the_same(model: Path) -> None:
    result = told(model, PAIRS)
    right = [row["right"] for row in result.rows]
    assert 0 < sum(right) < len(right) == len(PAIRS) == result.numbers["n"], (
        "a model that is always right shows nothing"
    )
    assert result.numbers["accuracy"] == pytest.approx(sum(right) / len(right))
    for kind in ("code", "story"):
        own = [row["right"] for row in result.rows if row["group"] == kind]
        assert (result.numbers[kind]["n"], result.numbers[kind]["accuracy"]) == (
            len(own),
            pytest.approx(sum(own) / len(own)),
        )
    margins = torch.tensor([row["margin"] for row in result.rows])
    assert result.numbers["margin_mean"] == pytest.approx(float(margins.abs().mean()), abs=1e-3)
    assert result.numbers["ties"] == int((margins == 0).sum())
    assert [row["verdict"] for row in result.rows] == ["right" if one else "wrong" for one in right]
    others = told(model, [*PAIRS[:-1], replace(PAIRS[-1], rejected=said("wrong"))])
    same = [one["item"] == other["item"] for one, other in zip(result.rows, others.rows, strict=True)]
    assert same == [True] * 23 + [False], "another answer makes another item of the same id"


def test_margins_are_differences_of_the_normalized_rewards_of_one_answer_at_a_time(
    model: Path, byte_tokenizer: Tokenizer
) -> None:
    result = told(model, PAIRS)
    loaded, _ = checkpoint.load_reward(model)
    split = PairSplit(model.parent / "test.jsonl", byte_tokenizer, 512, 512)
    for row, encoded in zip(result.rows, split.pairs, strict=True):
        (rewards,) = preferences.rewards_of(loaded, [encoded], byte_tokenizer.pad)
        assert row["margin"] == pytest.approx(float(rewards[0] - rewards[1]), abs=1e-3)


def test_a_flipped_label_is_not_believed_where_the_scores_know_better(model: Path) -> None:
    plain = told(model, PAIRS)
    flipped = [
        replace(pair, chosen=pair.rejected, rejected=pair.chosen, gold_chosen=0.0, gold_rejected=1.0, flipped=True)
        for pair in PAIRS
    ]
    again = told(model, flipped)
    assert [row["right"] for row in again.rows] == [row["right"] for row in plain.rows]
    assert again.numbers["accuracy"] == plain.numbers["accuracy"]
    unknown = told(model, [replace(pair, gold_chosen=None, gold_rejected=None) for pair in flipped])
    lost = sum(1 - row["right"] for row in plain.rows if row["margin"] != 0)
    assert unknown.numbers["accuracy"] == pytest.approx(lost / len(PAIRS)), "without scores the label is all there is"
