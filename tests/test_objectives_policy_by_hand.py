"""Policy gradients against numbers worked out by hand, and what must hold for all: clamps, masks, parts against the
whole.
"""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from pipeline.learning import policy_losses
from pipeline.learning.policy_losses import (
    METHODS,
    Clip,
    gae,
    group_advantages,
    group_policy,
    kl_k1,
    kl_k3,
    leave_one_out,
    ppo,
    ppo_rewards,
    rewards_to_go,
    surrogate,
    value_loss,
    whiten,
)
from pipeline.learning.update import Totals
from tests.goldens import counts_of, group_loss, numbers, objective, ppo_loss


def test_one_token_alone_is_not_whitened() -> None:
    """Bug museum: whitening one token. Its variance is 0 / 0."""
    values, mask = torch.tensor([[3.0, 7.0]]), torch.tensor([[False, True]])
    assert whiten(values, mask).tolist() == [[0.0, 7.0]]
    assert whiten(values, torch.zeros(1, 2, dtype=torch.bool)).tolist() == [[0.0, 0.0]]


def test_values_that_hardly_differ_are_only_centered() -> None:
    values, mask = (
        torch.tensor([[2.0, 2.00001, 2.00002, 50.0]], dtype=torch.float64),
        torch.tensor([[True] * 3 + [False]]),
    )
    torch.testing.assert_close(whiten(values, mask), torch.tensor([[-1e-5, 0.0, 1e-5, 0.0]], dtype=torch.float64))
    wider = torch.tensor([[2.0, 2.0002, 2.0004, 50.0]], dtype=torch.float64)  # a variance of 4e-8, so over sqrt(5e-8)
    root = 2e-4 / math.sqrt(4e-8 + 1e-8)
    torch.testing.assert_close(whiten(wider, mask), torch.tensor([[-root, 0.0, root, 0.0]], dtype=torch.float64))


def test_log_ratios_are_clamped_to_twenty_nats() -> None:
    far, near = torch.tensor([-100.0, -20.5, -1.0]), torch.tensor([-0.5, -0.25, -0.5])
    assert kl_k1(near, far).tolist() == [20.0, 20.0, 0.5]
    assert kl_k1(far, near).tolist() == [-20.0, -20.0, -0.5]
    torch.testing.assert_close(
        kl_k3(far, near), torch.tensor([20.0, 20.0, 0.5]).expm1() - torch.tensor([20.0, 20.0, 0.5])
    )
    ones = torch.ones(3)
    _, ratio = surrogate(near, far, ones, Clip(0.2, 0.2))
    torch.testing.assert_close(ratio, torch.tensor([20.0, 20.0, 0.5]).exp())
    _, ratio = surrogate(far, near, ones, Clip(0.2, 0.2))
    torch.testing.assert_close(ratio, torch.tensor([-20.0, -20.0, -0.5]).exp())


def test_k3_is_never_below_zero_and_both_are_zero_for_equals() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = -5 * torch.rand(2, 1000, generator=generator)
    assert kl_k3(a, b).min() >= 0
    assert kl_k3(a, a).abs().max() == 0 == kl_k1(a, a).abs().max()


def test_both_estimators_are_unbiased_over_the_policy_s_own_tokens() -> None:
    """Their exact expectations over three probabilities equal the divergence."""
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    divergence = float((p * (p / q).log()).sum())
    for estimator in (kl_k1, kl_k3):
        assert float((p * estimator(p.log(), q.log())).sum()) == pytest.approx(divergence, rel=1e-12)


def test_the_clip_holds_back_only_what_moves_on_in_the_rewarded_direction() -> None:
    """Ratios 0.5, 1.5, both signs: the loss is the larger of clipped and unclipped, so moves back have a gradient."""
    logprobs = torch.tensor([0.5, 0.5, 1.5, 1.5]).log().requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss, ratio = surrogate(logprobs, torch.zeros(4), advantages, Clip(0.2, 0.3))
    torch.testing.assert_close(loss, torch.tensor([-0.5, 0.8, -1.3, 1.5]))
    loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-0.5, 0.0, 0.0, 1.5]))
    torch.testing.assert_close(ratio, torch.tensor([0.5, 0.5, 1.5, 1.5]))


def test_the_value_loss_by_hand() -> None:
    values, old, returns = torch.tensor([1.0, 1.0, 0.1]), torch.tensor([0.0, 0.0, 0.0]), torch.tensor([1.0, -1.0, 1.0])
    loss, clipped = value_loss(values, old, returns, 0.2)
    torch.testing.assert_close(loss, torch.tensor([0.5 * 0.8**2, 0.5 * 2.0**2, 0.5 * 0.9**2]))
    assert clipped.tolist() == [True, False, False]


def test_gae_by_hand() -> None:
    """gamma 0.5, lambda 0.5. From the right: 1 - 0.5; -1 + 0.5 * 0.5 - 2 + 0.25 * A; 0 + 0.5 * 2 - 1 + 0.25 * A.

    Bug museum: returns reset at tool tokens.
    """
    rewards, values = torch.tensor([[0.0, -1.0, 9.0, 1.0]]), torch.tensor([[1.0, 2.0, 9.0, 0.5]])
    mask = torch.tensor([[True, True, False, True]])
    last = 1 - 0.5
    middle = -1 + 0.5 * 0.5 - 2 + 0.25 * last
    first = 0 + 0.5 * 2 - 1 + 0.25 * middle
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    torch.testing.assert_close(advantages, torch.tensor([[first, middle, 0.0, last]]))
    torch.testing.assert_close(returns, torch.tensor([[first + 1, middle + 2, 0.0, last + 0.5]]))


def rows(seed: int, shape: tuple[int, int], share: float = 0.6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name in ("a", "b", "c", "d", "e", "f")
    }
    return drawn | {"mask": torch.rand(shape, generator=generator) < share}


@pytest.mark.parametrize("seed", range(5))
def test_deleting_masked_tokens_changes_no_number(seed: int) -> None:
    """Bug museum: returns reset at tool tokens. Rewards after a tool's result never reached the call."""
    drawn = rows(seed, (4, 9))
    mask = drawn["mask"]
    scores = drawn["a"][:, 0]
    rewards = ppo_rewards(drawn["a"], drawn["b"], mask, scores, 0.3)
    whole = (*gae(rewards, drawn["c"], mask, gamma=0.9, lam=0.8), rewards_to_go(rewards, mask), rewards)
    for row, kept in enumerate(mask):
        if not kept.any():
            assert all(not found[row].any() for found in whole)
            continue
        a, b, c = (drawn[name][row, kept][None] for name in ("a", "b", "c"))
        every = torch.ones_like(a, dtype=torch.bool)
        alone = ppo_rewards(a, b, every, scores[row : row + 1], 0.3)
        short = (*gae(alone, c, every, gamma=0.9, lam=0.8), rewards_to_go(alone, every), alone)
        for found, expected in zip(whole, short, strict=True):
            assert torch.equal(found[row, kept], expected[0])
            assert not found[row, ~kept].any()


def test_the_score_sits_on_the_last_policy_token_and_an_empty_answer_has_none() -> None:
    zero, mask = torch.zeros(3, 3), torch.tensor([[True, True, False], [False, True, True], [False, False, False]])
    found = ppo_rewards(zero, zero, mask, torch.tensor([5.0, 6.0, 7.0]), 0.1)
    assert found.tolist() == [[0.0, 5.0, 0.0], [0.0, 0.0, 6.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("scaled", [True, False])
def test_equal_rewards_give_no_advantage(scaled: bool) -> None:
    rewards, valid = torch.full((2, 4), 0.7, dtype=torch.float64), torch.ones(2, 4, dtype=torch.bool)
    valid[1, 2] = False
    assert group_advantages(rewards, valid, scaled=scaled).abs().max() < 1e-11
    assert leave_one_out(rewards, valid).abs().max() < 1e-15


def drawn_answers(seed: int, spread: float = 0.3) -> dict[str, Tensor]:
    """Eight answers of 1 to 9 tokens, a few of which are masked."""
    drawn = rows(seed, (8, 9), 0.7)
    drawn["mask"][:, 0] = True
    old = -2 * drawn["a"].abs() - 0.1
    return {
        "mask": drawn["mask"],
        "old": old.float(),
        "policy": (old + spread * drawn["b"]).float(),
        "reference": (old + spread * drawn["c"]).float(),
        "advantages": drawn["d"][:, 0].float(),
        "values": drawn["e"].float(),
        "old_values": (drawn["e"] + 0.3 * drawn["f"]).float(),
        "returns": drawn["f"].float(),
    }


@pytest.mark.parametrize("name", METHODS)
def test_equal_rewards_give_zero_gradient(name: str) -> None:
    given, method = drawn_answers(1), dataclasses.replace(METHODS[name], beta=0.0)
    given["policy"].requires_grad_()
    given["advantages"] = torch.zeros(8)
    objective(group_loss(given, method, 9), counts_of(given)).backward()
    assert given["policy"].grad is not None
    assert given["policy"].grad.abs().max() == 0


PARTS = {
    "ones": [slice(n, n + 1) for n in range(8)],
    "ragged and empty": [slice(0, 0), slice(0, 3), slice(3, 3), slice(3, 4), slice(4, 8), slice(8, 8)],
}


@pytest.mark.parametrize("cut", PARTS)
@pytest.mark.parametrize("name", ["ppo", *METHODS])
def test_a_batch_may_be_cut_anywhere_between_answers(name: str, cut: str) -> None:
    """1 x 8 = 8 x 1: loss, terms, metrics and gradients."""

    def run(parts: list[slice]) -> tuple[dict[str, float], Tensor]:
        given = drawn_answers(2)
        given["policy"].requires_grad_()
        counts = counts_of(given)
        totals = Totals(counts)
        for part in parts:
            if name == "ppo":
                mask = torch.zeros_like(given["mask"])
                mask[part] = given["mask"][part]
                given["advantages"] = given["advantages"].view(8, -1).expand_as(mask)
                one = ppo_loss(given, mask)
            else:
                one = group_loss(given, dataclasses.replace(METHODS[name], beta=0.1), 9, part)
            objective(one, counts).backward()
            totals.add(one)
        assert given["policy"].grad is not None
        return totals.values(), given["policy"].grad

    (whole, gradient), (summed, accumulated) = run([slice(None)]), run(PARTS[cut])
    assert summed == pytest.approx(whole, rel=1e-6, abs=1e-6)
    torch.testing.assert_close(accumulated, gradient, rtol=1e-6, atol=1e-6)
    assert gradient.abs().max() > 0.01


@pytest.mark.parametrize("name", METHODS)
def test_rows_of_padding_count_nothing(name: str) -> None:
    """A process whose share of the answers is smaller has such rows."""
    method, given = dataclasses.replace(METHODS[name], beta=0.1), drawn_answers(2)
    counts, whole = counts_of(given), group_loss(given, method, 9)
    given["mask"] = torch.cat([given["mask"], torch.zeros(3, 9, dtype=torch.bool)])
    for key in ("policy", "old", "reference"):
        given[key] = torch.cat([given[key], torch.ones(3, 9)])
    given["advantages"] = torch.cat([given["advantages"], torch.ones(3)])
    assert numbers(group_loss(given, method, 9), counts) == numbers(whole, counts)


@pytest.mark.parametrize("name", ["ppo", *METHODS])
def test_a_step_whose_mean_ratio_is_above_ten_is_refused(name: str) -> None:
    """Every token's ratio is e^2.25 = 9.49 or e^2.35 = 10.49. `ratio` is the product over an answer, so answers have
    one token.
    """
    for log_ratio, refused in ((2.25, False), (2.35, True), (-30.0, False), (math.nan, True)):
        given = drawn_answers(3)
        given["mask"] = torch.zeros(8, 9, dtype=torch.bool)
        given["mask"][:, 0] = True
        given["policy"] = given["old"] + log_ratio
        if name == "ppo":
            given["advantages"] = torch.ones(8, 9)
            loss = ppo_loss(given, given["mask"])
        else:
            loss = group_loss(given, METHODS[name], 9)
        totals = Totals(counts_of(given))
        totals.add(loss)
        assert bool(totals.veto) == refused, log_ratio
    assert policy_losses.MAX_RATIO == 10


def test_the_numbers_of_a_step_by_hand() -> None:
    """Two tokens with ratios 2 and 0.5, so log-ratios of +-ln 2."""
    nats, old = math.log(2), torch.tensor([-1.0, -2.0])
    new, zero, ones = old + torch.tensor([nats, -nats]), torch.zeros(2), torch.ones(2)
    found = ppo(
        new,
        ones,
        zero,
        old=old,
        advantages=ones,
        old_values=zero,
        returns=ones,
        clip=Clip(0.2, 0.2),
        value_clip=0.2,
        value_weight=0.1,
    )
    shown = numbers(found, {"tokens": 2})
    by_hand = {
        "policy/approxkl_avg": nats**2 / 2,
        "val/ratio": 1.25,
        "val/ratio_var": (1 + 0.25) / 2,
        "policy/clipfrac_avg": 0.5,
        "loss/policy_avg": -(1.2 + 0.5) / 2,
        "loss/value_avg": 0.5,
    }
    assert {name: shown[name] for name in by_hand} == pytest.approx(by_hand, rel=1e-6)
    found = group_policy(
        new,
        ones,
        old=old,
        advantages=ones,
        reference=None,
        row_of=torch.tensor([0, 0]),
        num_rows=1,
        method=METHODS["dapo"],
        max_tokens=2,
    )
    shown = numbers(found, {"tokens": 2})
    by_hand = {
        "approxkl": nats**2 / 2,
        "ratio": 1.25,
        "clip_ratio/high_mean": 0.5,
        "clip_ratio/low_mean": 0.0,
        "loss": -(1.28 + 0.5) / 2,
        "entropy": 1.0,
    }
    assert {name: shown[name] for name in by_hand} == pytest.approx(by_hand, rel=1e-6)


def test_the_methods_are_the_spec_s_table() -> None:
    """Advantage, normalizer, lo/hi, beta, where the divergence goes, dynamic sampling (alignment, 6)."""
    found = {
        name: (m.advantage, m.normalizer, m.clip.low, m.clip.high, m.beta, m.kl_in if m.beta else "", m.dynamic)
        for name, m in METHODS.items()
        if name != "gspo"
    }
    assert found == {
        "grpo": ("scaled", "sequences", 0.2, 0.2, 0.01, "loss", False),
        "dr_grpo": ("centered", "max_tokens", 0.2, 0.2, 0.0, "", False),
        "dapo": ("scaled", "tokens", 0.2, 0.28, 0.0, "", True),
        "rloo": ("others", "ratio", 0.2, 0.2, 0.05, "reward", False),
        "reinforce_pp": ("to_go", "tokens", 0.2, 0.2, 0.01, "reward", False),
    }


def test_on_the_rollout_s_own_policy_nothing_is_clipped_and_the_gradient_is_reinforce_s() -> None:
    """Ratio 1: the gradient of A * l, summed over tokens and divided by their number."""
    given = drawn_answers(4, spread=0.0)
    given["policy"] = given["old"].clone().requires_grad_()
    loss = group_loss(given, METHODS["dapo"], 9)
    shown = numbers(loss, counts_of(given))
    assert (shown["ratio"], shown["approxkl"], shown["clip_ratio/region_mean"]) == (1.0, 0.0, 0.0)
    objective(loss, counts_of(given)).backward()
    expected = -given["advantages"][:, None] * given["mask"] / given["mask"].sum()
    torch.testing.assert_close(given["policy"].grad, expected)
