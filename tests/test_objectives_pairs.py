"""Losses of pairs against trl's numbers, against the values known at the start, and summed over parts."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.learning import pair_losses
from pipeline.learning.losses import Loss
from pipeline.learning.pair_losses import LOSSES, PairLogprobs, PairLoss, bradley_terry, dpo, untrained_loss
from pipeline.learning.update import Totals
from tests.goldens import Case, assert_near, cases, numbers, objective, tensors

REWARD, DPO = cases("reward"), {name: case for name, case in cases("dpo").items() if name != "logits"}
DTYPES = [torch.float32, torch.float64]
SIDES = ("chosen", "rejected")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", REWARD)
def test_bradley_terry_is_trl_s(name: str, dtype: torch.dtype) -> None:
    case, given = REWARD[name], tensors(REWARD[name]["inputs"], dtype)
    expected, margin = case["expected"], given["margin"] if "margin" in name else None
    chosen, rejected = (given[side].requires_grad_() for side in SIDES)

    def loss(part: slice) -> Loss:
        gap = None if margin is None else margin[part]
        return bradley_terry(chosen[part], rejected[part], margin=gap, centering=case["inputs"]["centering"])

    whole = objective(loss(slice(None)), {"pairs": 5})
    whole.backward()
    assert_near(whole, expected["loss"], dtype)
    assert chosen.grad is not None and rejected.grad is not None
    assert_near(chosen.grad, expected["grad_chosen"], dtype)
    assert_near(rejected.grad, expected["grad_rejected"], dtype)
    each = torch.stack([objective(loss(slice(n, n + 1)), {"pairs": 1}) for n in range(5)])
    assert_near(each, expected["losses"], dtype)
    shown = numbers(loss(slice(None)), {"pairs": 5})
    for metric in ("accuracy", "margin", "min_reward", "mean_reward", "max_reward"):
        assert_near(shown[metric], expected[metric], dtype)


def test_rewards_of_zero_lose_ln_2_and_margins_more() -> None:
    zero, margins = torch.zeros(2), torch.tensor([0.0, math.log(3)])
    assert objective(bradley_terry(zero, zero), {"pairs": 2}).item() == pytest.approx(math.log(2))
    assert untrained_loss(torch.zeros(3)) == pytest.approx(math.log(2))
    by_hand = (math.log(2) + math.log(4)) / 2  # -log sigmoid(-ln 3) = ln(1 + 3)
    assert untrained_loss(margins) == pytest.approx(by_hand)
    assert objective(bradley_terry(zero, zero, margin=margins), {"pairs": 2}).item() == pytest.approx(by_hand)


def test_equal_rewards_are_not_accurate() -> None:
    assert numbers(bradley_terry(torch.ones(3), torch.ones(3)), {"pairs": 3})["accuracy"] == 0


def config_of(case: Case) -> PairLoss:
    """Our configuration for a case in dpo.json."""
    given, name = case["inputs"], case["name"].removesuffix("_nll").removesuffix("_reference_free").split("_0.")[0]
    known = {field.name for field in dataclasses.fields(PairLoss)}
    knobs: dict[str, Any] = {key: value for key, value in given.items() if key in known}
    return PairLoss(loss=name, gamma=given.get("gap", 0.0), **knobs)


def sums_of(given: dict[str, Tensor], who: str) -> PairLogprobs:
    """The log-probabilities of whole answers. Positions outside an answer hold numbers too, which must not count."""
    sums = [(given[f"{who}_{side}"] * given[f"{side}_mask"]).sum(1) for side in SIDES]
    return PairLogprobs(*sums, *(given[f"{side}_mask"].sum(1) for side in SIDES))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", DPO)
def test_the_dpo_family_is_trl_s(name: str, dtype: torch.dtype) -> None:
    case, given, expected = DPO[name], tensors(DPO[name]["inputs"], dtype), DPO[name]["expected"]
    config, policy = config_of(case), sums_of(given, "policy")
    policy.chosen.requires_grad_()
    policy.rejected.requires_grad_()
    reference = sums_of(given, "reference") if config.uses_reference else None

    def loss(part: slice) -> Loss:
        return dpo(part_of(policy, part), reference and part_of(reference, part), config)

    whole = objective(loss(slice(None)), {"pairs": 4})
    whole.backward()
    assert_near(whole, expected["loss"], dtype)
    assert policy.chosen.grad is not None and policy.rejected.grad is not None
    assert_near(policy.chosen.grad, expected["grad_chosen"], dtype)
    assert_near(policy.rejected.grad, expected["grad_rejected"], dtype)
    each = torch.stack([objective(loss(slice(n, n + 1)), {"pairs": 1}) for n in range(4)])
    assert_near(each, expected["losses"], dtype)
    shown = numbers(loss(slice(None)), {"pairs": 4})
    metrics = [metric for metric in expected if "/" in metric]
    assert len(metrics) >= (0 if name == "sigmoid_reference_free" else 4)
    for metric in metrics:
        assert_near(shown[metric], expected[metric], dtype)


def test_every_loss_has_a_case_of_trl_or_a_test_file_of_its_own() -> None:
    checked = {config_of(case).loss for case in DPO.values()}
    assert checked <= set(LOSSES)
    for loss in set(LOSSES) - checked:
        assert (Path(__file__).parent / f"test_{loss}.py").is_file(), f"{loss}: no value that it should have is tested"


def part_of(pairs: PairLogprobs, part: slice) -> PairLogprobs:
    return PairLogprobs(pairs.chosen[part], pairs.rejected[part], pairs.num_chosen[part], pairs.num_rejected[part])


def drawn(seed: int, pairs: int = 8) -> PairLogprobs:
    generator = torch.Generator().manual_seed(seed)
    chosen, rejected = -10 * torch.rand(2, pairs, generator=generator)
    return PairLogprobs(chosen, rejected, *torch.randint(1, 9, (2, pairs), generator=generator))


def any_config(loss: str, **changes: Any) -> PairLoss:
    """Allowed constants for any loss."""
    needed: dict[str, Any] = {"label_smoothing": 0.2} if loss in ("cdpo", "robust") else {}
    return PairLoss(loss=loss, **(needed | changes))


OTHERWISE = {"ipo": 1 / (4 * 0.3**2), "hinge": 1.0, "apo_zero": 1.0, "apo_down": 1.0}
AT_START = {loss: OTHERWISE.get(loss, math.log(2)) for loss in LOSSES if loss != "simpo"}


@pytest.mark.parametrize("loss", AT_START)
def test_a_policy_that_equals_its_reference_loses_the_spec_s_number(loss: str) -> None:
    config, policy = any_config(loss, beta=0.3), drawn(1)
    shown = numbers(dpo(policy, policy, config), {"pairs": 8})
    assert shown["loss"] == pytest.approx(AT_START[loss], rel=1e-6)
    assert config.at_start == pytest.approx(AT_START[loss], rel=1e-12)
    assert [shown[f"rewards/{name}"] for name in ("chosen", "rejected", "margins", "accuracies")] == [0, 0, 0, 0]


def test_a_start_that_depends_on_the_data_is_not_foretold() -> None:
    assert PairLoss(loss="simpo").at_start is None
    assert PairLoss(reference_free=True).at_start is None


def test_the_likelihood_term_is_the_chosen_answer_s_mean_per_token() -> None:
    policy, reference = drawn(2), drawn(3)
    plain = numbers(dpo(policy, reference, PairLoss()), {"pairs": 8})["loss"]
    with_term = numbers(dpo(policy, reference, PairLoss(nll_weight=0.5)), {"pairs": 8})
    by_hand = -sum(float(c) / int(n) for c, n in zip(policy.chosen, policy.num_chosen, strict=True)) / 8
    assert with_term["nll"] == pytest.approx(by_hand, rel=1e-6)
    assert with_term["loss"] == pytest.approx(plain + 0.5 * by_hand, rel=1e-6)


def test_nats_per_token_of_policy_and_reference_are_over_all_chosen_tokens() -> None:
    chosen, rejected = torch.tensor([-6.0, -1.0]), torch.tensor([-2.0, -2.0])
    policy = PairLogprobs(chosen, rejected, torch.tensor([3, 1]), torch.tensor([1, 1]))
    reference = dataclasses.replace(policy, chosen=torch.tensor([-4.0, -1.0]))
    shown = numbers(dpo(policy, reference, PairLoss()), {"pairs": 2})
    assert (shown["nll/policy"], shown["nll/reference"]) == (pytest.approx(7 / 4), pytest.approx(5 / 4))


PARTS = {
    "ones": [slice(n, n + 1) for n in range(8)],
    "ragged and empty": [slice(0, 0), slice(0, 3), slice(3, 3), slice(3, 4), slice(4, 8), slice(8, 8)],
}


@pytest.mark.parametrize("cut", PARTS)
@pytest.mark.parametrize("loss", ["bradley_terry", *LOSSES])
def test_parts_add_up_to_the_whole(loss: str, cut: str) -> None:
    """1 x 8 = 8 x 1: loss, gradient, metrics and extremes, also where a process has no pair left."""
    reference = drawn(5)

    def run(parts: list[slice]) -> tuple[dict[str, float], Tensor]:
        policy, totals = drawn(4), Totals({"pairs": 8})
        policy.chosen.requires_grad_()
        for part in parts:
            if loss == "bradley_terry":
                one = bradley_terry(policy.chosen[part], policy.rejected[part], margin=reference.chosen[part])
            else:
                config = any_config(loss, nll_weight=0.2)
                frozen = part_of(reference, part) if config.uses_reference else None
                one = dpo(part_of(policy, part), frozen, config)
            objective(one, {"pairs": 8}).backward()
            totals.add(one)
        assert policy.chosen.grad is not None
        return totals.values(), policy.chosen.grad

    (whole, gradient), (summed, accumulated) = run([slice(None)]), run(PARTS[cut])
    assert summed == pytest.approx(whole, rel=1e-6, abs=1e-6)
    torch.testing.assert_close(accumulated, gradient, rtol=1e-6, atol=1e-6)
    assert gradient.abs().min() > 0


REFUSED = [
    ({"loss": "kto"}, f"expected one of {', '.join(LOSSES)}, got 'kto'"),
    ({"beta": 0.0}, "expected beta > 0"),
    ({"nll_weight": -0.1}, "nll_weight >= 0"),
    *(
        ({"loss": loss, "label_smoothing": 0.1}, f"expected 0, because {loss} has no label smoothing")
        for loss in LOSSES
        if loss not in ("cdpo", "robust")
    ),
    *(
        ({"loss": loss, "label_smoothing": wrong}, r"expected a share in \(0, 0.5\)")
        for loss in ("cdpo", "robust")
        for wrong in (0.0, 0.5, 0.7, -0.1)
    ),
    *(
        ({"loss": loss, "gamma": 0.3}, f"expected 0, because {loss} has no margin")
        for loss in LOSSES
        if loss not in ("simpo", "cdpo", "robust")
    ),
    *(
        ({"loss": loss, "gamma": 0.3, "label_smoothing": 0.1}, f"expected 0, because {loss} has no margin")
        for loss in ("cdpo", "robust")
    ),
    *(
        ({"loss": loss, "reference_free": True}, f"{loss} is defined by its reference")
        for loss in ("ipo", "apo_zero", "apo_down")
    ),
    ({"loss": "simpo", "reference_free": True}, "simpo never uses a reference"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_constant_that_the_loss_does_not_read_is_refused(changes: dict[str, Any], message: str) -> None:
    """Bug museum: smoothing ignored. It was accepted, but some losses never used it."""
    with pytest.raises(ValueError, match=message):
        PairLoss(**changes)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_constant_that_is_allowed_changes_the_loss(loss: str) -> None:
    """So no constant is without effect.

    Bug museum: smoothing ignored.
    """
    policy, reference = drawn(6), drawn(7)

    def value(**changes: Any) -> float:
        config = any_config(loss, **changes)
        return numbers(dpo(policy, reference if config.uses_reference else None, config), {"pairs": 8})["loss"]

    plain = value()
    assert value(beta=0.4) != pytest.approx(plain, rel=1e-3)
    assert value(nll_weight=0.1) != pytest.approx(plain, rel=1e-3)
    if loss in ("cdpo", "robust"):
        assert value(label_smoothing=0.4) != pytest.approx(plain, rel=1e-3)
    if loss == "simpo":
        assert value(gamma=3.0) != pytest.approx(plain, rel=1e-3)
    if loss in ("sigmoid", "cdpo", "robust", "hinge", "norm"):
        assert value(reference_free=True) != pytest.approx(plain, rel=1e-3)


def test_a_token_rarer_than_one_in_148_is_guessed_as_one_of_them() -> None:
    none = pair_losses.Loss([])
    found = pair_losses.with_likelihood(none, torch.tensor([-5.0, -1.0]), torch.tensor([-30.0, -3.0]), weight=0.5)
    assert [(term.name, float(term.sum), term.per, term.coefficient) for term in found.terms] == [
        ("likelihood", 4.0, "tokens", 0.5)
    ]
