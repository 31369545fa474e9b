"""Policy gradients against trl's numbers, against numbers worked out by hand, and summed over parts."""

import dataclasses

import pytest
import torch
from torch import Tensor

from pipeline.learning.policy_losses import (
    METHODS,
    Clip,
    GroupMethod,
    adapted_beta,
    explained_variance,
    gae,
    group_advantages,
    kl_k1,
    leave_one_out,
    ppo_rewards,
    rewards_to_go,
    whiten,
)
from pipeline.learning.update import Totals
from tests.goldens import Case, assert_near, cases, counts_of, group_loss, numbers, objective, ppo_loss, tensors

PPO, GRPO, RLOO, REINFORCE_PP = (cases(method) for method in ("ppo", "grpo", "rloo", "reinforce_pp"))
DTYPES = [torch.float32, torch.float64]
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def named(found: dict[str, Case], start: str) -> list[str]:
    return [name for name in found if name.startswith(start)]


# PPO's parts


@both_dtypes
@pytest.mark.parametrize("name", named(PPO, "rewards"))
def test_rewards_per_token_are_trl_s(name: str, dtype: torch.dtype) -> None:
    case, given = PPO[name], tensors(PPO[name]["inputs"], dtype)
    old, reference, mask, beta = given["old"], given["reference"], given["mask"], case["inputs"]["beta"]
    rewards = ppo_rewards(old, reference, mask, given["scores"], beta)
    assert_near(rewards, case["expected"]["rewards"], dtype)
    penalties = ppo_rewards(old, reference, mask, torch.zeros_like(given["scores"]), beta)
    assert_near(penalties, case["expected"]["penalties"], dtype)
    assert_near((kl_k1(old, reference) * mask).sum(1), case["expected"]["kl"], dtype)


@both_dtypes
@pytest.mark.parametrize("name", named(PPO, "advantages"))
def test_advantages_and_returns_are_trl_s(name: str, dtype: torch.dtype) -> None:
    case, given = PPO[name], tensors(PPO[name]["inputs"], dtype)
    knobs = {key: case["inputs"][key] for key in ("gamma", "lam")}
    advantages, returns = gae(given["rewards"], given["values"], given["mask"], **knobs)
    assert_near(whiten(advantages, given["mask"]), case["expected"]["advantages"], dtype)
    assert_near(returns, case["expected"]["returns"], dtype)


@both_dtypes
@pytest.mark.parametrize("name", named(PPO, "whiten"))
def test_whitening_is_trl_s(name: str, dtype: torch.dtype) -> None:
    given = tensors(PPO[name]["inputs"], dtype)
    assert_near(whiten(given["values"], given["mask"]), PPO[name]["expected"]["whitened"], dtype)


def test_the_controller_is_trl_s() -> None:
    case = PPO["controller"]
    knobs = {ours: case["inputs"][theirs] for ours, theirs in (("target", "target"), ("horizon", "horizon"))}
    beta, found = case["inputs"]["beta"], []
    for kl in case["inputs"]["kl"]:
        beta = adapted_beta(beta, kl, num=case["inputs"]["episodes"], **knobs)
        found.append(beta)
    assert found == pytest.approx(case["expected"]["beta"], rel=1e-6)


@both_dtypes
@pytest.mark.parametrize("name", named(PPO, "loss"))
def test_the_clipped_losses_are_trl_s(name: str, dtype: torch.dtype) -> None:
    given, expected, inputs = tensors(PPO[name]["inputs"], dtype), PPO[name]["expected"], PPO[name]["inputs"]
    given["policy"].requires_grad_()
    given["values"].requires_grad_()
    mask = given["mask"]
    counts = {"tokens": int(mask.sum())}
    clip, narrow = Clip(inputs["clip"], inputs["clip"]), inputs["clip_value"]
    loss = ppo_loss(given, mask, clip=clip, value_clip=narrow, value_weight=inputs["value_coefficient"])
    totals = Totals(counts)
    totals.add(loss)
    shown = totals.values()
    theirs = {
        "approxkl": "policy/approxkl_avg",
        "policy_clipfrac": "policy/clipfrac_avg",
        "value_clipfrac": "val/clipfrac_avg",
        "ratio": "val/ratio",
    }
    for trl, ours in theirs.items():
        assert_near(shown[ours], expected[trl], dtype)
    assert shown["policy/entropy_avg"] == pytest.approx(0.5)
    assert bool(totals.veto) == (name == "loss_skipped")
    if totals.veto:  # trl trains on zeros here; our loop makes no update
        assert totals.veto == f"the mean of val/ratio is {expected['ratio']:.1f}, above {inputs['max_ratio']:g}"
        return
    assert_near(shown["loss/policy_avg"], expected["policy_loss"], dtype)
    assert_near(shown["loss/value_avg"], expected["value_loss"], dtype)
    assert_near(shown["loss"], expected["loss"], dtype)
    objective(loss, counts).backward()
    for ours, trl in (("policy", "grad_policy"), ("values", "grad_values")):
        gradient = given[ours].grad
        assert gradient is not None
        assert_near(gradient, expected[trl], dtype)


@both_dtypes
@pytest.mark.parametrize("name", named(PPO, "loss"))
def test_explained_variance_is_one_less_trl_s_error_over_variance(name: str, dtype: torch.dtype) -> None:
    given, expected = tensors(PPO[name]["inputs"], dtype), PPO[name]["expected"]
    found = explained_variance(given["values"][given["mask"]], given["returns"][given["mask"]])
    assert_near(found, 1 - expected["value_error"] / expected["return_var"], dtype)


def test_a_critic_that_is_off_by_a_constant_explains_less() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(returns + 1, returns) == pytest.approx(0.0)  # a squared error of 1 in a variance of 1
    assert explained_variance(returns, torch.ones(3)) == 0
    assert explained_variance(returns[:1], returns[:1]) == 0


# the group methods


def method_of(name: str, inputs: Case) -> GroupMethod:
    """Our method for a loss in grpo.json or rloo.json."""
    kind = name.split("_kl")[0].removesuffix("_no")
    ours = METHODS[{"bnpo": "dapo", "loss": "rloo", "loss_asymmetric": "rloo"}.get(kind, kind)]
    clip = Clip(inputs["clip_low"], inputs["clip_high"])
    return dataclasses.replace(ours, clip=clip, beta=inputs.get("beta", 0.0))


LOSSES = {name: case for name, case in GRPO.items() if "clip_low" in case["inputs"]}
LOSSES |= {f"rloo_{name}": RLOO[name] for name in named(RLOO, "loss")}


@both_dtypes
@pytest.mark.parametrize("name", LOSSES)
def test_group_losses_are_trl_s(name: str, dtype: torch.dtype) -> None:
    case, given = LOSSES[name], tensors(LOSSES[name]["inputs"], dtype)
    method, counts = method_of(case["name"], case["inputs"]), counts_of(given)
    given["policy"].requires_grad_()
    loss = group_loss(given, method, case["inputs"].get("max_new", 1))
    value = objective(loss, counts)
    value.backward()
    assert_near(value, case["expected"]["loss"], dtype)
    assert given["policy"].grad is not None
    assert_near(given["policy"].grad, case["expected"]["grad_policy"], dtype)
    shown, metrics = numbers(loss, counts), [m for m in case["expected"] if m == "kl" or m.startswith("clip_ratio")]
    assert len(metrics) >= 3
    for metric in metrics:
        assert_near(shown[metric], case["expected"][metric], dtype)
    assert shown["entropy"] == pytest.approx(0.5)


def test_trl_has_a_case_for_every_normalizer() -> None:
    found = {method_of(case["name"], case["inputs"]).normalizer for case in LOSSES.values()}
    assert (
        found
        == {"sequences", "max_tokens", "tokens", "ratio", "mean_ratio"}
        == {m.normalizer for m in METHODS.values()}
    )


def groups_of(inputs: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rewards, and which of them are known, each (P, G)."""
    if "parts" in inputs:
        weights = torch.tensor(inputs["weights"], dtype=dtype)
        rewards = torch.tensor(inputs["parts"], dtype=dtype) @ weights
    else:
        rewards = tensors({"rewards": inputs["rewards"]}, dtype)["rewards"]
    table = rewards.view(-1, inputs["samples"])
    return table.nan_to_num(99.0), ~table.isnan()  # unknown rewards hold numbers too, which must not count


@both_dtypes
@pytest.mark.parametrize("name", named(GRPO, "advantages"))
def test_group_advantages_are_trl_s(name: str, dtype: torch.dtype) -> None:
    rewards, valid = groups_of(GRPO[name]["inputs"], dtype)
    found = group_advantages(rewards, valid, scaled=name != "advantages_none")
    assert_near(found.flatten(), GRPO[name]["expected"]["advantages"], dtype)


@both_dtypes
@pytest.mark.parametrize("name", named(RLOO, "advantages"))
def test_leave_one_out_is_trl_s(name: str, dtype: torch.dtype) -> None:
    case, given = RLOO[name], tensors(RLOO[name]["inputs"], dtype)
    rewards, valid = groups_of(case["inputs"], dtype)
    if case["inputs"]["beta"]:
        divergence = ((given["old"] - given["reference"]) * given["mask"]).sum(1)
        rewards = rewards - case["inputs"]["beta"] * divergence.view_as(rewards)
    assert_near(leave_one_out(rewards, valid).flatten(), case["expected"]["advantages"], dtype)


def test_leave_one_out_by_hand() -> None:
    rewards, valid = (
        torch.tensor([[1.0, 2.0, 6.0], [5.0, 7.0, 9.0], [3.0, 3.0, 3.0]]),
        torch.ones(3, 3, dtype=torch.bool),
    )
    valid[1] = torch.tensor([True, False, False])
    valid[2] = torch.tensor([False, False, False])
    assert leave_one_out(rewards, valid).tolist() == [[-3.0, -1.5, 4.5], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


@both_dtypes
def test_reinforce_pp_is_the_one_worked_by_hand(dtype: torch.dtype) -> None:
    case, given = REINFORCE_PP["two_answers"], tensors(REINFORCE_PP["two_answers"]["inputs"], dtype)
    mask, expected = given["mask"], case["expected"]
    rewards = ppo_rewards(given["old"], given["reference"], mask, given["scores"], case["inputs"]["beta"])
    assert_near(rewards, expected["rewards"], dtype)
    returns = rewards_to_go(rewards, mask)
    assert_near(returns, expected["returns"], dtype)
    given["advantages"] = whiten(returns, mask)
    assert_near(given["advantages"], expected["advantages"], dtype)
    given["policy"].requires_grad_()
    method = dataclasses.replace(METHODS["reinforce_pp"], clip=Clip(0.2, 0.2))
    value = objective(group_loss(given, method, 4), counts_of(given))
    value.backward()
    assert_near(value, expected["loss"], dtype)
    assert given["policy"].grad is not None
    assert_near(given["policy"].grad, expected["grad_policy"], dtype)
