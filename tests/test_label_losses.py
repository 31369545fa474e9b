"""KTO against trl's numbers, against the values known at the start, and summed over parts of a step."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.batches.batch import Answered
from pipeline.batches.labels import LabelBatch
from pipeline.learning import label_losses
from pipeline.learning.label_losses import AnswerLogprobs, LabelLoss, kto
from pipeline.learning.losses import Loss
from pipeline.learning.processes import Ranks
from pipeline.learning.reference import Reference
from pipeline.learning.update import Totals
from pipeline.model.transformer import Transformer
from tests.goldens import Case, Given, assert_near, cases, numbers, objective, rows_of, tensors

KTO = cases("kto")
DTYPES = [torch.float32, torch.float64]


def config_of(case: Case) -> LabelLoss:
    names = ("beta", "desirable_weight", "undesirable_weight")
    return LabelLoss(loss=case["settings"]["loss_type"], **{name: case["inputs"][name] for name in names})


def sums_of(given: dict[str, Tensor], who: str, mask: str = "mask") -> Tensor:
    return (given[who] * given[mask]).sum(1)


def z0_of(given: dict[str, Tensor]) -> float:
    """The reference point, written out."""
    both = (sums_of(given, f"{who}_mismatched", "mismatched_mask") for who in ("policy", "reference"))
    policy, reference = both
    return max(0.0, float((policy - reference).mean()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KTO)
def test_loss_gradient_and_rewards_are_trl_s(name: str, dtype: torch.dtype) -> None:
    case, given, expected = KTO[name], tensors(KTO[name]["inputs"], dtype), KTO[name]["expected"]
    config, sums = config_of(case), sums_of(given, "policy").requires_grad_()
    divergence = z0_of(given) if config.uses_divergence else 0.0
    reference, desirable = sums_of(given, "reference"), given["desirable_mask"]
    loss = kto(AnswerLogprobs(sums), reference, desirable, divergence, config)
    whole = objective(loss, {"answers": 4})
    whole.backward()
    assert sums.grad is not None
    assert_near(whole, expected["loss"], dtype)
    assert_near(sums.grad, expected["grad"], dtype)
    shown = numbers(loss, {"answers": 4})
    metrics = [metric for metric in expected if metric.startswith(("kl", "rewards/", "logps/"))]
    assert len(metrics) == (3 if "alone" in name else 5)
    for metric in metrics:
        assert_near(shown[metric], expected[metric], dtype)
    assert "alone" not in name or not shown.keys() >= {"rewards/chosen", "rewards/rejected"}


def test_the_cases_have_reference_points_above_0_and_at_0() -> None:
    assert KTO["kto"]["expected"]["kl"] > 0.1 and KTO["kto_below"]["expected"]["kl"] == 0
    assert KTO["apo_zero_unpaired"]["expected"]["kl"] == 0


class Rows(nn.Module):
    """A model that answers mismatched rows, which begin with token 1, with other logits."""

    def __init__(self, matched: Tensor, mismatched: Tensor) -> None:
        super().__init__()
        self.answers = Given(matched), Given(mismatched)

    def forward(self, input_ids: Tensor, **more: Any) -> Tensor:
        return self.answers[int(input_ids[0, 0])](input_ids, **more)


def two_tokens(logprobs: Tensor) -> Tensor:
    """Logits (B, T, 2) under which token 0 has these log-probabilities."""
    return torch.stack([logprobs, torch.log(-torch.expm1(logprobs))], -1)


@pytest.mark.parametrize("name", KTO)
def test_from_logits_all_metrics_and_the_reference_point_are_trl_s(name: str) -> None:
    case, given, expected = KTO[name], tensors(KTO[name]["inputs"], torch.float32), KTO[name]["expected"]
    config, zero = config_of(case), torch.zeros(4, 7, dtype=torch.long)
    mismatched = rows_of(zero, given["mismatched_mask"])._replace(input_ids=zero + 1)
    batch = LabelBatch(rows_of(zero, given["mask"]), mismatched, given["desirable_mask"], {"answers": 4, "tokens": 0})
    policy, frozen = (
        Rows(two_tokens(given[who]), two_tokens(given[f"{who}_mismatched"])) for who in ("policy", "reference")
    )
    reference: Any = Held(frozen)
    divergence = label_losses.divergence_of(policy, reference, batch) if config.uses_divergence else 0.0
    logprobs, of_reference = (
        label_losses.answer_logprobs(policy, batch),
        label_losses.likelihoods(frozen, batch.matched),
    )
    shown = numbers(kto(logprobs, of_reference, batch.desirable, divergence, config), {"answers": 4})
    assert {"entropy", "kl", "loss"} <= expected.keys() - {"grad"} <= shown.keys()
    for metric in expected.keys() - {"grad"}:
        assert_near(shown[metric], expected[metric], torch.float32)


class Held:
    """A reference that needs no device."""

    def __init__(self, model: nn.Module) -> None:
        self.held = model

    def model(self, where: torch.device) -> "Held":
        return self

    def __enter__(self) -> nn.Module:
        return self.held

    def __exit__(self, *_: object) -> None:
        pass


# -- against what is known ---------------------------------------------------------------------------------------------


def drawn(seed: int, count: int = 8) -> Tensor:
    return -10 * torch.rand(count, generator=torch.Generator().manual_seed(seed))


LABELS = torch.tensor([True, False, False, True, True, False, True, False])


@pytest.mark.parametrize("loss", label_losses.LOSSES)
def test_a_policy_that_equals_its_reference_loses_half_of_each_weight(loss: str) -> None:
    config = LabelLoss(loss=loss, beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    desirable = torch.tensor([True, False, True, True, False, True, True, True])
    shown = numbers(kto(AnswerLogprobs(drawn(1)), drawn(1), desirable, 0.0, config), {"answers": 8})
    by_hand = (6 * 1.5 + 2 * 0.5) / 8 / 2
    assert shown["loss"] == pytest.approx(by_hand, rel=1e-6) == config.at_start(desirable)
    assert (shown["rewards/chosen"], shown["rewards/rejected"], shown["kl"]) == (0, 0, 0)


def test_the_reference_point_has_no_gradient_but_moves_the_loss() -> None:
    def run(divergence: float) -> tuple[float, Tensor]:
        sums = drawn(4).requires_grad_()
        loss = objective(kto(AnswerLogprobs(sums), drawn(5), LABELS, divergence, LabelLoss(beta=0.3)), {"answers": 8})
        (gradient,) = torch.autograd.grad(loss, sums)
        return float(loss.detach()), gradient

    (at_0, plain), (above, shifted) = run(0.0), run(2.0)
    assert at_0 != pytest.approx(above, rel=1e-3)
    assert torch.equal(plain.sign(), torch.where(LABELS, -1.0, 1.0)) and torch.equal(shifted.sign(), plain.sign())


PARTS = {
    "ones": [slice(n, n + 1) for n in range(8)],
    "ragged and empty": [slice(0, 0), slice(0, 3), slice(3, 3), slice(3, 4), slice(4, 8), slice(8, 8)],
}


@pytest.mark.parametrize("cut", PARTS)
@pytest.mark.parametrize("loss", label_losses.LOSSES)
def test_parts_add_up_to_the_whole(loss: str, cut: str) -> None:
    config, divergence = LabelLoss(loss=loss, beta=0.3, desirable_weight=1.2), 1.5 if loss == "kto" else 0.0

    def run(parts: list[slice]) -> tuple[dict[str, float], Tensor]:
        sums, totals = drawn(4).requires_grad_(), Totals({"answers": 8})
        for part in parts:
            one: Loss = kto(AnswerLogprobs(sums[part]), drawn(5)[part], LABELS[part], divergence, config)
            objective(one, {"answers": 8}).backward()
            totals.add(one)
        assert sums.grad is not None
        return totals.values(), sums.grad

    (whole, gradient), (summed, accumulated) = run([slice(None)]), run(PARTS[cut])
    assert summed == pytest.approx(whole, rel=1e-6, abs=1e-6)
    torch.testing.assert_close(accumulated, gradient, rtol=1e-6, atol=1e-6)
    assert gradient.abs().min() > 0


def random_rows(rows: slice) -> LabelBatch:
    """Some of 6 rows of random ids, matched and mismatched."""
    parts = []
    for ids in torch.randint(20, 200, (2, 6, 12), generator=torch.Generator().manual_seed(9)):
        targets = ids.roll(-1, 1)
        targets[:, :4] = targets[:, -1] = -100
        whole = (ids, targets, torch.zeros(6, 12, dtype=torch.int32), torch.arange(12).expand(6, 12))
        parts.append(Answered(*(tensor[rows] for tensor in whole)))
    return LabelBatch(parts[0], parts[1], LABELS[:6][rows], {"answers": len(parts[0].input_ids), "tokens": 0})


@pytest.mark.parametrize("likelier", [True, False])
def test_every_micro_batch_has_the_reference_point_of_the_whole_step(likelier: bool, tiny_model: Transformer) -> None:
    other, generator = copy.deepcopy(tiny_model), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    policy, frozen = (tiny_model, other) if likelier else (other, tiny_model)
    reference = Reference(frozen, adapted=False)
    ratios = label_losses.mismatched_ratios(policy, reference, random_rows(slice(None)))
    assert (float(ratios.mean()) > 1) == likelier and float(ratios.std()) > 0.1, "parts have other means"
    ranks, where = Ranks("fp32", "."), torch.device("cpu")
    parts = [random_rows(part) for part in (slice(0, 1), slice(1, 4), slice(4, 6))]
    found = label_losses.with_divergence(policy, parts, ranks, reference=reference, where=where)
    assert [batch.divergence for batch in found] == [pytest.approx(max(0.0, float(ratios.mean())), abs=1e-5)] * 3


# -- constants ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "sigmoid"}, "expected one of kto, apo_zero_unpaired, got 'sigmoid'"),
        ({"beta": 0.0}, "expected beta, desirable_weight and undesirable_weight > 0"),
        ({"desirable_weight": 0.0}, "desirable_weight and undesirable_weight > 0, got 0.1, 0.0 and 1.0"),
        ({"undesirable_weight": -1.0}, "undesirable_weight > 0"),
    ],
)
def test_a_constant_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LabelLoss(**changes)


@pytest.mark.parametrize("changes", [{"beta": 0.4}, {"desirable_weight": 2.0}, {"undesirable_weight": 2.0}])
@pytest.mark.parametrize("loss", label_losses.LOSSES)
def test_a_constant_changes_the_loss(loss: str, changes: dict[str, float]) -> None:
    def value(config: LabelLoss) -> float:
        return numbers(kto(AnswerLogprobs(drawn(6)), drawn(7), LABELS, 0.0, config), {"answers": 8})["loss"]

    assert value(LabelLoss(loss=loss, **changes)) != pytest.approx(value(LabelLoss(loss=loss)), rel=1e-3)


def test_unequal_numbers_of_answers_are_advised_on_and_the_advice_is_good() -> None:
    assert LabelLoss().unbalanced(100, 100) == LabelLoss().unbalanced(120, 100) == ""
    advice = LabelLoss().unbalanced(300, 100)
    assert "300 good and 100 bad answers weigh 3.00 to 1" in advice
    assert "desirable_weight between 0.33 and 0.44, or undesirable_weight between 2.25 and 3.00" in advice
    assert LabelLoss(desirable_weight=0.4).unbalanced(300, 100) == ""
    assert LabelLoss(undesirable_weight=2.6).unbalanced(300, 100) == ""
    assert LabelLoss(desirable_weight=0.5).unbalanced(300, 100)
