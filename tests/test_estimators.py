"""From scores to a number for each token, against trl's numbers, slow loops and numbers worked out by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.learning.policy_losses import METHODS, GroupMethod
from pipeline.rl.advantages import (
    PPOConfig,
    annotate_group,
    annotate_ppo,
    estimate_group,
    estimate_ppo,
    scores_with_ends,
)
from pipeline.rl.answers import Answer
from pipeline.rl.rewards import Score
from pipeline.rl.rollout import Rollout
from tests import rollouts
from tests.goldens import assert_near, cases

F64 = torch.float64


def made(
    totals: Sequence[float | None],
    lengths: Sequence[int],
    *,
    samples: int = 1,
    seed: int = 0,
    unfinished: Sequence[int] = (),
) -> list[Rollout]:
    """Rollouts with drawn log-probabilities, reference and values."""
    draws = np.random.default_rng(seed)
    found = []
    for place, (total, length) in enumerate(zip(totals, lengths, strict=True)):
        one = rollouts.rollout(place // samples, place, length, total, finished=place not in unfinished)
        one.answer = replace(one.answer, logprobs=draws.uniform(-3, -0.1, length).tolist())
        one.arrays = {"reference": draws.uniform(-3, -0.1, length), "values": draws.normal(size=length)}
        found.append(one)
    return found


def plain(**changes: Any) -> PPOConfig:
    values: dict[str, Any] = {"beta": 0.0, "target_kl": 6.0, "horizon": 100}
    return PPOConfig(**(values | changes))


# PPO


def slow_gae(one: Rollout, score: float, beta: float, gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """Advantages (not whitened) and returns, by sums over all later tokens (Schulman et al. 2015, eq. 16)."""
    length, values = len(one.answer.ids), [*one.arrays["values"], 0.0]
    rewards = [-beta * (o - f) for o, f in zip(one.answer.logprobs, one.arrays["reference"], strict=True)]
    rewards[-1] += score
    deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(length)]
    advantages = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, length)) + 0.0 for t in range(length)]
    return advantages, [a + v for a, v in zip(advantages, values[:-1], strict=True)]


def test_advantages_are_those_of_a_slow_loop_whitened_over_all_tokens() -> None:
    found = made([1.0, -2.0, 0.5], [4, 1, 6])
    estimate_ppo(found, plain(gamma=0.9, lam=0.8, beta=0.3), {"beta": 0.3})
    slow = [slow_gae(one, one.total, 0.3, 0.9, 0.8) for one in found]
    every = np.concatenate([advantages for advantages, _ in slow])
    for one, (advantages, returns) in zip(found, slow, strict=True):
        whitened = (np.array(advantages) - every.mean()) / np.sqrt(every.var(ddof=1) + 1e-8)
        np.testing.assert_allclose(one.arrays["advantages"], whitened, rtol=1e-9)
        np.testing.assert_allclose(one.arrays["returns"], returns, rtol=1e-9)
        np.testing.assert_allclose(one.arrays["old_values"], one.arrays["values"], rtol=0)


def test_an_answer_that_does_not_end_scores_at_most_minus_one() -> None:
    """With values 0, gamma and lambda 1 every return is the score."""
    found = made([2.0, 2.0, -3.0, -0.5], [2, 3, 1, 2], unfinished=[1, 2, 3])
    for one in found:
        one.arrays["values"][:] = 0
    numbers = estimate_ppo(found, plain(lam=1.0), {"beta": 0.0})
    assert [sorted(set(one.arrays["returns"])) for one in found] == [[2.0], [-1.0], [-3.0], [-1.0]]
    assert numbers["objective/scores"] == pytest.approx(-0.75)
    assert numbers["val/num_eos_tokens"] == 1


def test_an_answer_without_a_score_teaches_nothing_and_moves_nobody_s_baseline() -> None:
    """Bug museum: lost part as 0. The answer was punished for a failure of the sandbox."""
    lengths = [4, 3, 6]
    found, others = made([1.0, None, -2.0], lengths), made([1.0, None, -2.0], lengths)
    del others[1]
    carried = {"beta": 0.2}, {"beta": 0.2}
    numbers = estimate_ppo(found, plain(beta=0.2), carried[0])
    alone = estimate_ppo(others, plain(beta=0.2), carried[1])
    assert found[1].arrays["advantages"].tolist() == [0.0] * 3
    np.testing.assert_array_equal(found[1].arrays["returns"], found[1].arrays["values"])  # no error, so no gradient
    for one, other in zip((found[0], found[2]), others, strict=True):
        np.testing.assert_allclose(one.arrays["advantages"], other.arrays["advantages"], rtol=1e-12)
        np.testing.assert_allclose(one.arrays["returns"], other.arrays["returns"], rtol=1e-12)
    assert numbers["objective/scores"] == alone["objective/scores"] == -0.5


def test_no_known_score_at_all_gives_no_advantage() -> None:
    found = made([None, None], [2, 3])
    numbers = estimate_ppo(found, plain(beta=0.1), {"beta": 0.1})
    assert math.isnan(numbers["objective/scores"])
    assert all(not one.arrays["advantages"].any() for one in found)


@pytest.mark.parametrize(("kl", "expected"), [(6.0, 1.0), (6.6, 1.002), (30.0, 1.004), (3.0, 0.996), (5.4, 0.998)])
def test_beta_follows_the_divergence_for_the_next_iteration(kl: float, expected: float) -> None:
    """With two answers and a horizon of 100, beta moves by at most 0.2 * 2 / 100 per iteration. The divergence is
    summed over each answer's tokens.
    """
    found = made([1.0, 1.0], [4, 2])
    for one in found:
        one.arrays["reference"] = np.array(one.answer.logprobs) - kl / len(one.answer.ids)
    carried = {"beta": 0.05}
    numbers = estimate_ppo(found, plain(beta=0.05), carried)
    assert numbers["objective/kl"] == pytest.approx(kl)
    assert numbers["objective/kl_coef"] == 0.05  # that of this iteration
    assert carried["beta"] == pytest.approx(0.05 * expected, rel=1e-9)


def test_what_ppo_logs_by_hand() -> None:
    found = made([3.0, -1.0], [2, 1])
    for one, old, reference, values in zip(found, ([-1.0, -2.0], [-0.5]), ([-1.5, -1.0], [-1.5]), ([1.0, 2.0], [0.0])):
        one.answer = replace(one.answer, logprobs=old)
        one.arrays = {"reference": np.array(reference), "values": np.array(values)}
    numbers = estimate_ppo(found, plain(lam=1.0, beta=0.1), {"beta": 0.1})
    # o - f: 0.5, -1 | 1; returns: rewards -0.05, 0.1 + 3 | -0.1 - 1, summed to the end
    returns = np.array([3.05, 3.1, -1.1])
    explained = 1 - np.mean((returns - [1.0, 2.0, 0.0]) ** 2) / returns.var(ddof=1)
    assert numbers == pytest.approx(
        {
            "objective/kl": 0.25,
            "objective/kl_max": 1.0,
            "objective/entropy": 1.75,
            "objective/non_score_reward": -0.025,
            "objective/scores": 1.0,
            "objective/rlhf_reward": 0.975,
            "objective/kl_coef": 0.1,
            "val/num_eos_tokens": 2,
            "val/var_explained": explained,
        }
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta": -0.1}, "expected beta >= 0"),
        ({"target_kl": 0.0}, "target_kl > 0"),
        ({"horizon": 0}, "horizon >= 1"),
        ({"gamma": 0.0}, "gamma in"),
        ({"gamma": 1.1}, "gamma in"),
        ({"lam": 1.1}, "lam in"),
        ({"clip": 0.0}, "clip > 0"),
        ({"value_clip": 0.0}, "value_clip > 0"),
        ({"value_weight": -0.1}, "value_weight >= 0"),
    ],
)
def test_constants_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plain(**changes)


def test_annotations_go_to_their_own_answers() -> None:
    found = [rollouts.rollout(n, 0, n + 1, 1.0) for n in range(3)]

    def lengths(given: Sequence[Answer]) -> list[np.ndarray]:
        return [np.full(len(answer.ids), float(len(answer.ids))) for answer in given]

    annotate_ppo(found, reference=lengths, values=lambda given: [-row for row in lengths(given)])
    for one in found:
        assert one.arrays["reference"].tolist() == [len(one.answer.ids)] * len(one.answer.ids)
        assert one.arrays["values"].tolist() == [-len(one.answer.ids)] * len(one.answer.ids)
    others = [rollouts.rollout(n, 0, n + 1, 1.0) for n in range(3)]
    annotate_group(others, reference=None)
    assert all(one.arrays == {} for one in others)
    annotate_group(others, reference=lengths)
    assert [one.arrays["reference"].tolist() for one in others] == [[1.0], [2.0, 2.0], [3.0, 3.0, 3.0]]


# the group methods


def advantages_of(found: list[Rollout]) -> list[float]:
    """One per answer: all its tokens share it, with every method but reinforce_pp."""
    assert all(len(set(one.arrays["advantages"])) == 1 for one in found)
    return [one.arrays["advantages"][0] for one in found]


@pytest.mark.parametrize("name", ["advantages_group", "advantages_none"])
@pytest.mark.parametrize("method", ["grpo", "dapo", "gspo", "dr_grpo"])
def test_group_advantages_of_rollouts_are_trl_s(method: str, name: str) -> None:
    case = cases("grpo")[name]
    totals = case["inputs"]["rewards"]
    found = made(totals, [1 + n % 4 for n in range(len(totals))], samples=4)
    numbers = estimate_group(found, METHODS[method], 4)
    if (name == "advantages_none") == (method == "dr_grpo"):
        assert_near(torch.tensor(advantages_of(found), dtype=F64), case["expected"]["advantages"], F64)
    else:  # the other case differs in dividing by the deviation
        with pytest.raises(AssertionError):
            assert_near(torch.tensor(advantages_of(found), dtype=F64), case["expected"]["advantages"], F64)
    assert numbers["groups"] == 4
    by_hand = [sum(np.array(one.answer.logprobs) - one.arrays["reference"]) for one in found]
    assert numbers["kl/rollout"] == pytest.approx(np.mean(by_hand))


@pytest.mark.parametrize("name", ["advantages", "advantages_no_kl"])
def test_rloo_of_rollouts_is_trl_s(name: str) -> None:
    case = cases("rloo")[name]
    inputs = case["inputs"]
    found = made(inputs["rewards"], [2] * 8, samples=4)
    if inputs["beta"]:
        for row, one in enumerate(found):
            length = sum(inputs["mask"][row])
            ids, old = list(range(length)), inputs["old"][row][:length]
            one.answer = replace(one.answer, ids=ids, logprobs=old)
            one.arrays["reference"] = np.array(inputs["reference"][row][:length])
    estimate_group(found, replace(METHODS["rloo"], beta=inputs["beta"]), 4)
    assert_near(torch.tensor(advantages_of(found), dtype=F64), case["expected"]["advantages"], F64)


def test_reinforce_pp_of_rollouts_is_the_one_by_hand() -> None:
    """The case's masked tokens are not the policy's. An answer here is one turn, so they are left out."""
    case = cases("reinforce_pp")["two_answers"]
    inputs, found, expected = case["inputs"], [], []
    for row, mask in enumerate(case["inputs"]["mask"]):
        kept = [t for t, m in enumerate(mask) if m]
        one = rollouts.rollout(row, 0, len(kept), inputs["scores"][row])
        one.answer = replace(one.answer, logprobs=[inputs["old"][row][t] for t in kept])
        one.arrays["reference"] = np.array([inputs["reference"][row][t] for t in kept])
        found.append(one)
        expected += [case["expected"]["advantages"][row][t] for t in kept]
    estimate_group(found, replace(METHODS["reinforce_pp"], beta=inputs["beta"]), 1)
    flat = torch.from_numpy(np.concatenate([one.arrays["advantages"] for one in found]))
    assert_near(flat, expected, F64)


def test_an_unscorable_answer_of_reinforce_pp_leaves_the_whitening() -> None:
    found, others = made([1.0, None, -2.0], [4, 3, 6]), made([1.0, None, -2.0], [4, 3, 6])
    del others[1]
    estimate_group(found, METHODS["reinforce_pp"], 1)
    estimate_group(others, METHODS["reinforce_pp"], 1)
    assert found[1].arrays["advantages"].tolist() == [0.0] * 3
    for one, other in zip((found[0], found[2]), others, strict=True):
        np.testing.assert_allclose(one.arrays["advantages"], other.arrays["advantages"], rtol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_equal_scores_give_no_advantage_where_the_divergence_is_not_in_the_reward(name: str) -> None:
    found = made([0.7] * 6, [1, 2, 3, 4, 5, 6], samples=3)
    estimate_group(found, replace(METHODS[name], beta=0.0), 3)
    assert all(np.abs(one.arrays["advantages"]).max() < 1e-11 for one in found)


@pytest.mark.parametrize("name", METHODS)
def test_the_divergence_moves_advantages_only_where_it_is_in_the_reward(name: str) -> None:
    def run(beta: float) -> np.ndarray:
        found = made([0.0, 1.0, 2.0, 0.0, 5.0, 1.0], [1, 2, 3, 4, 5, 6], samples=3)
        estimate_group(found, replace(METHODS[name], beta=beta), 3)
        return np.concatenate([one.arrays["advantages"] for one in found])

    assert np.array_equal(run(0.0), run(0.3)) == (METHODS[name].kl_in == "loss")


def test_a_reward_with_a_divergence_needs_the_reference() -> None:
    found = made([0.0, 1.0], [1, 2], samples=2)
    for one in found:
        del one.arrays["reference"]
    with pytest.raises(AssertionError, match="reference"):
        estimate_group(found, METHODS["rloo"], 2)
    estimate_group(found, replace(METHODS["rloo"], beta=0.0), 2)
    assert advantages_of(found) == [-1.0, 1.0]


def test_better_answers_are_above_worse_ones_for_every_method() -> None:
    method: GroupMethod
    for method in METHODS.values():
        found = made([0.0, 0.5, 2.0], [2, 2, 2], samples=3)
        for one in found:
            one.arrays["reference"] = np.array(one.answer.logprobs)
        estimate_group(found, method, 3)
        low, middle, high = advantages_of(found)
        assert low < middle < high and low < 0 < high


def test_an_unknown_total_is_not_a_number_and_zero_is_a_score() -> None:
    assert math.isnan(Rollout(rollouts.answer(rollouts.prompt(0), 0, [1]), Score(None, {})).total)
    assert Rollout(rollouts.answer(rollouts.prompt(0), 0, [1]), Score(0.0, {})).total == 0.0


def test_not_ending_never_pays_whatever_the_scale_of_the_scores() -> None:
    """An answer without an end scores at most -1, or the lowest score of an answer that ended if that is lower."""
    for scores, unfinished, expected in (
        ([0.5, 2.0, 1.0], [1], [0.5, -1.0, 1.0]),
        ([-3.0, 2.0, -2.0], [1], [-3.0, -3.0, -2.0]),
        ([-3.0, -7.0, None], [1], [-3.0, -7.0, math.nan]),
        ([2.0, 1.0, 0.0], [0, 1, 2], [-1.0] * 3),
    ):
        group = made(scores, [2, 2, 2], samples=3, unfinished=unfinished)
        assert scores_with_ends(group).tolist() == pytest.approx(expected, nan_ok=True), scores
        method = replace(METHODS["rloo"], beta=0.0)
        estimate_group(group, method, 3, must_end=True)
        if None not in scores:
            others = [(sum(expected) - x) / 2 for x in expected]
            found = [float(one.arrays["advantages"][0]) for one in group]
            assert found == pytest.approx([x - mean for x, mean in zip(expected, others, strict=True)])
