"""Bugs in policy gradients: where a score goes, what is averaged over what, what an all-zero mask does."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.generation.sampling import Sampling, generate
from pipeline.learning import policy_losses
from pipeline.learning.fit import Run, Watchers
from pipeline.learning.losses import Loss
from pipeline.learning.policy_losses import METHODS, Clip
from pipeline.learning.update import Totals
from pipeline.rl import answers
from pipeline.rl.advantages import PPOConfig, estimate_group, estimate_ppo
from pipeline.rl.rewards import Score
from pipeline.rl.rollout import Method, Rollout, RolloutStream, group_loss
from tests import bandit, rollouts
from tests.goldens import objective
from tests.loop import job


def constants(**changes: float) -> PPOConfig:
    return replace(PPOConfig(beta=0.0, target_kl=6.0, horizon=100), **changes)


def with_values(found: list[Rollout], reference: float = -0.5) -> list[Rollout]:
    """Add values of 0, and a reference with the same log-probability for all tokens."""
    for one in found:
        length = len(one.answer.ids)
        one.arrays = {"reference": np.full(length, reference), "values": np.zeros(length)}
    return found


def test_a_score_stands_on_the_token_that_ended_the_answer_whichever_that_is() -> None:
    """Bug museum: score on pad, custom stop id (huggingface/trl 3750).

    The score was added after the end, where nothing is trained; an answer that ended with a token other than the
    tokenizer's EOS was taken for unfinished. With values of 0 and gamma 1/2, each token's return shows how far it is
    from the score.
    """

    class Letters(bandit.Letters):
        turn_end = 7

    model = bandit.actor()
    prompts = [rollouts.prompt(number, length=1) for number in range(2, 10)]

    def complete(asked: list[list[int]], seeds: list[int]) -> list:
        return generate(model, asked, Sampling(6, temperature=1.0), stop=[Letters.turn_end], seeds=seeds)

    given = answers.sample(complete, answers.repeated(prompts, 40), Letters(), 1)  # type: ignore[arg-type]
    assert {one.finished for one in given} == {True, False}
    assert all((one.ids[-1] == 7) == one.finished for one in given)
    found = with_values([Rollout(one, Score(0.8, {})) for one in given])
    estimate_ppo(found, constants(gamma=0.5, lam=1.0), {"beta": 0.0})
    for one in found:
        score = 0.8 if one.answer.finished else -1.0
        halved = [score / 2**distance for distance in range(len(one.answer.ids))]
        np.testing.assert_allclose(one.arrays["returns"], halved[::-1], rtol=1e-12)


def test_numbers_of_an_answer_are_over_its_own_tokens() -> None:
    """Bug museum: padding in metrics (huggingface/trl 6121). Padding had the log-probability 1, so entropies were
    negative.

    Answers of 1 and 5 tokens with log-probability -0.5, or -0.75 under the reference; metrics are in nats per answer.
    """
    found = with_values([rollouts.rollout(0, 0, 1, 1.0), rollouts.rollout(1, 0, 5, 1.0)], reference=-0.75)
    numbers = estimate_ppo(found, constants(beta=0.1), {"beta": 0.1})
    assert numbers["objective/entropy"] == pytest.approx((0.5 + 2.5) / 2)
    assert numbers["objective/kl"] == pytest.approx((0.25 + 1.25) / 2)
    assert numbers["objective/non_score_reward"] == pytest.approx(-0.1 * (0.25 + 1.25) / 2)


@pytest.mark.parametrize("name", ["grpo", "dapo", "rloo"])
def test_a_gradient_is_over_the_step_s_tokens_however_they_are_cut(name: str, tmp_path: Path) -> None:
    """Bug museum: mean of means (huggingface/trl 3021). Each micro-batch was averaged, then their means, which
    favored short answers.

    Answers of 9, 1, 1 and 6 tokens, one per micro-batch or all in one.
    """
    asked = [rollouts.prompt(number, length=1) for number in (2, 3)]
    given = [
        Rollout(
            rollouts.answer(asked[n // 2], n % 2, range(1, length + 1)),
            Score(float(n), {}),
            {"reference": np.full(length, -0.6)},
        )
        for n, length in enumerate((9, 1, 1, 6))
    ]
    settings = bandit.config(prompts=2, samples=2, iterations=1)
    how = Method(
        sample=lambda asked: [], score=lambda found: [], annotate=lambda found: None, estimate=lambda found: {}
    )
    method = METHODS[name]
    estimate_group(given, method, 2)

    def loss(model: torch.nn.Module, batch: object) -> Loss:
        return group_loss(model, batch, method=method, config=settings)  # type: ignore[arg-type]

    gradients, values = [], []
    for cut in ([[0, 1, 2, 3]], [[0], [1], [2], [3]]):
        stream = bandit.filling(how, settings)
        stream.rollouts = given
        run = Run(bandit.actor(), stream, loss, settings, job(tmp_path), False, Watchers())
        counts = stream.batch(0, 0, np.arange(4)).counts
        totals = run.backward([stream.batch(0, 0, np.array(rows)) for rows in cut], counts)
        gradients.append([parameter.grad for parameter in run.plain.parameters()])
        values.append(totals.value)
    assert values[1] == pytest.approx(values[0], rel=1e-5, abs=1e-7)
    assert max(float(gradient.abs().max()) for gradient in gradients[0]) > 1e-3
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def no_tokens(stream: RolloutStream) -> tuple[Loss, torch.Tensor]:
    """The loss of a process that has only a row of padding, and weights that its gradient must still reach."""
    model = bandit.actor()
    batch = stream.batch(0, 0, np.array([-1]))
    assert batch.counts["tokens"] == batch.counts["sequences"] == 0
    method = replace(METHODS["grpo"], beta=0.1)
    return group_loss(model, batch, method=method, config=stream.config), model.model.embed_tokens.weight


def test_no_token_at_all_is_a_zero_and_not_a_nan() -> None:
    """Bug museum: all-zero mask. A mean over no tokens is 0 / 0, and its NaN went into every weight."""
    how = Method(
        sample=lambda asked: [], score=lambda found: [], annotate=lambda found: None, estimate=lambda found: {}
    )
    stream = bandit.filling(how, bandit.config(prompts=1, samples=2, iterations=1))
    stream.rollouts = [rollouts.rollout(2, 0, 3, 1.0)]
    stream.rollouts[0].arrays = {"advantages": np.ones(3), "reference": np.full(3, -0.6)}
    loss, weight = no_tokens(stream)
    sum((term.sum for term in loss.terms), start=torch.zeros(())).backward()  # as next to a process with tokens
    assert weight.grad is not None and not weight.grad.any()
    assert all(term.sum == 0 for term in loss.terms)  # summed over processes: one NaN would spread
    totals = Totals({"tokens": 0, "sequences": 0})
    totals.add(loss)
    assert totals.value == 0 and not totals.veto
    assert all(value == 0 for value in totals.values().values())


@pytest.mark.parametrize("name", METHODS)
def test_an_answer_without_tokens_leaves_the_others_as_they_are(name: str) -> None:
    """Bug museum: all-zero mask. One all-zero row among others was divided by its length, 0."""
    method = replace(METHODS[name], beta=0.1)
    drawn = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).mul(0.2)
    logprobs = drawn[0].clone().requires_grad_()

    def value(row_of: list[int], num_rows: int) -> torch.Tensor:
        reference = drawn[3] if method.kl_in == "loss" else None
        loss = policy_losses.group_policy(
            logprobs,
            -logprobs.detach(),
            old=drawn[1],
            advantages=drawn[2],
            reference=reference,
            row_of=torch.tensor(row_of),
            num_rows=num_rows,
            method=method,
            max_tokens=5,
        )
        return objective(loss, {"tokens": 5, "sequences": 2})

    found = []
    for row_of, num_rows in (([0, 0, 0, 1, 1], 2), ([0, 0, 0, 2, 2], 4)):  # rows 1 and 3 are padding
        one = value(row_of, num_rows)
        found.append((one.item(), *torch.autograd.grad(one, logprobs)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][1].isfinite().all() and found[0][1].any()


def test_a_critic_without_tokens_gives_no_advantage_and_no_loss() -> None:
    """Bug museum: all-zero mask. In PPO, advantages, returns and loss of no tokens must be 0."""
    zero, none = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    rewards = policy_losses.ppo_rewards(zero, zero, none, torch.tensor([5.0, 7.0]), 0.1)
    for found in (
        rewards,
        policy_losses.whiten(zero + 3, none),
        *policy_losses.gae(rewards, zero + 2, none, gamma=1.0, lam=0.95),
    ):
        assert not found.any()
    empty = torch.zeros(0)
    totals = Totals({"tokens": 0})
    totals.add(
        policy_losses.ppo(
            empty,
            empty,
            empty,
            old=empty,
            advantages=empty,
            old_values=empty,
            returns=empty,
            clip=Clip(0.2, 0.2),
            value_clip=0.2,
            value_weight=0.1,
        )
    )
    assert totals.value == 0 and not totals.veto and set(totals.values().values()) == {0.0}
