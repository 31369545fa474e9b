"""The second row of a reward model in training: what it reads, what it is told, and that it is not published."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.batches import pairs
from pipeline.batches.batch import Piece
from pipeline.batches.pairs import Encoded, PairBatch
from pipeline.ingest.records import Pair
from pipeline.learning import losses, pair_losses
from pipeline.model import checkpoint
from pipeline.model.heads import GuessingModel, RewardModel
from pipeline.model.transformer import Transformer
from pipeline.text.tokenizer import Tokenizer
from stages import reward

PAIR = Pair(id="1", source="made", kind="story", prompt=[], chosen=[], rejected=[])


def piece(prompt: list[int], answer: list[int]) -> Piece:
    ids = np.array(prompt + answer)
    return Piece(ids, np.arange(len(ids)) >= len(prompt))


ANSWERS = [[20, 21, 22], [23], [24, 25], [26, 27, 28, 29]]  # chosen, chosen, rejected, rejected


def batch() -> PairBatch:
    """Two pairs with prompts of unequal length."""
    prompts = [[5, 6], [7, 8, 9, 10]]
    pieces = [piece(prompts[n % 2], answer) for n, answer in enumerate(ANSWERS)]
    return pairs.batch_of([Encoded(PAIR, pieces[n], pieces[n + 2]) for n in range(2)], 0)


def test_what_was_said_are_the_answers_tokens_in_the_order_of_the_targets() -> None:
    rows = batch()
    assert rows.input_ids[rows.said].tolist() == [token for answer in ANSWERS for token in answer]
    assert rows.targets[rows.targets >= 0].tolist() == rows.input_ids[rows.said].tolist()
    assert rows.ends[rows.said].nonzero().flatten().tolist() == [2, 3, 5, 9]


def test_the_reward_beside_a_guess_is_the_reward_model_s(tiny_model: Transformer) -> None:
    model = RewardModel(tiny_model)
    both = GuessingModel(model)
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(1))
        both.likelihood_score.weight.normal_(generator=torch.Generator().manual_seed(2))
        rows = batch()
        found = both(rows.input_ids, positions=rows.positions, documents=rows.documents, select=rows.said)
        alone = model(rows.input_ids, positions=rows.positions, documents=rows.documents, select=rows.said)
        hidden = model.trunk.hidden(rows.input_ids, positions=rows.positions, documents=rows.documents)[rows.said]
    torch.testing.assert_close(found[:, 0], alone)
    torch.testing.assert_close(found[:, 1], hidden @ both.likelihood_score.weight[0])


def test_guesses_are_held_against_what_the_policy_says_of_each_token(tiny_model: Transformer) -> None:
    """Both head rows are zero, so a token's error is its log-probability, bounded below at -5."""
    policy = Transformer(tiny_model.config, torch.Generator().manual_seed(7)).requires_grad_(False)
    rows, learner = batch(), GuessingModel(RewardModel(tiny_model))
    found = reward.loss(learner.train(True), rows, policy=policy, centering=0.0, likelihood_weight=0.25)
    terms = {term.name: term for term in found.terms}
    assert set(terms) == {"ranking", "likelihood"}
    assert float(terms["ranking"].sum.detach()) == pytest.approx(2 * math.log(2))
    expected = 0.0
    for ids, targets, length in zip(
        rows.input_ids.tolist(), rows.targets.tolist(), (rows.documents >= 0).sum(1).tolist(), strict=True
    ):
        with torch.no_grad():
            told = policy(torch.tensor([ids[:length]]))[0].log_softmax(-1)
        expected += sum(
            max(-5.0, float(told[n, target])) ** 2 for n, target in enumerate(targets[:length]) if target >= 0
        )
    assert float(terms["likelihood"].sum.detach()) == pytest.approx(expected, rel=1e-5)
    assert (terms["likelihood"].per, terms["likelihood"].coefficient) == ("tokens", 0.25)
    assert rows.counts["tokens"] == 10
    assert [
        t.name
        for t in reward.loss(learner.train(False), rows, policy=policy, centering=0.1, likelihood_weight=0.25).terms
    ] == ["ranking"]


def test_a_surprise_counts_five_nats_and_no_more() -> None:
    base = pair_losses.bradley_terry(torch.tensor([1.0]), torch.tensor([0.0]), centering=0.0)
    found = pair_losses.with_likelihood(base, torch.tensor([-1.0, -4.0]), torch.tensor([-0.5, -40.0]), weight=2.0)
    assert [term.name for term in found.terms] == ["ranking", "likelihood"]
    assert float(found.terms[1].sum) == pytest.approx(0.25 + 1.0)


def test_guesses_can_be_learnt_and_are_not_published(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh policy finds all tokens about as likely as one in 320, so the bound of -5 is moved out of the way."""
    monkeypatch.setattr(pair_losses, "LEAST_LIKELY", -100.0)
    policy = Transformer(tiny_model.config, torch.Generator().manual_seed(7)).requires_grad_(False)
    policy.model.embed_tokens.weight.mul_(2)
    model = RewardModel(tiny_model)
    learner, rows = GuessingModel(model).train(True), batch()
    told, _ = losses.token_logprobs(policy, rows)
    optimizer = torch.optim.Adam(learner.parameters(), lr=3e-3)
    errors = []
    for _ in range(300):
        found = reward.loss(learner, rows, policy=policy, centering=0.0, likelihood_weight=1.0)
        errors.append(float(found.terms[-1].sum.detach()))
        optimizer.zero_grad()
        sum((term.sum for term in found.terms), torch.zeros(())).backward()
        optimizer.step()
    variance = float((told - told.mean()).square().sum())
    assert errors[-1] < 0.1 * variance < errors[0]
    checkpoint.save_reward(tmp_path / "reward", model, byte_tokenizer, {})
    again, _ = checkpoint.load_reward(tmp_path / "reward")
    assert not any("likelihood" in name for name in again.state_dict())
    torch.testing.assert_close(again.state_dict(), model.state_dict())
