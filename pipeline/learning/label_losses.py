"""Losses for unpaired good and bad answers: KTO and APO-zero.

Notation of Ethayarajh et al. 2024 (KTO, arXiv:2402.01306): r = log pi(y) - log ref(y) for an entire answer (beta is
kept outside, as in TRL); z0 is the reference point, an estimate of KL(pi, ref) in nats:

    good answer   lambda_D (1 - sigmoid(beta (r - z0)))          eq. 7
    bad answer    lambda_U (1 - sigmoid(beta (z0 - r)))
    z0 = max(0, mean of r over mismatched answers)               without a gradient; 0 for apo_zero_unpaired

The mean is over the entire step, across all micro-batches and ranks (`with_divergence`): z0 is inside the sigmoid, so
partial estimates would not add up to the full gradient. Each answer has weight 1 before lambda; the loop divides by
the number of answers in the entire step.

Not guaranteed: that z0 is the true divergence. The mismatched answers are not sampled from the policy, so z0 is a
biased estimate that only shows whether the policy raises or lowers all answers alike (section 4.1 of the paper).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from pipeline.batches.batch import Tokens
from pipeline.batches.labels import LabelBatch
from pipeline.learning.losses import Loss, Term, sum_by_row, target_logprobs, token_logprobs, trained_logits
from pipeline.learning.processes import Ranks
from pipeline.learning.reference import Reference

LOSSES = ("kto", "apo_zero_unpaired")
BALANCED = (1.0, 4 / 3)  # range of lambda_D n_D / (lambda_U n_U), eq. 8 of the paper


@dataclass(frozen=True, kw_only=True)
class LabelLoss:
    """The loss and its constants. Raises ValueError for invalid values."""

    loss: str = "kto"
    """kto, or apo_zero_unpaired: reference point fixed at 0 (D'Oosterlinck et al. 2024, arXiv:2408.06266)."""
    beta: float = 0.1
    """KL strength: larger values stay closer to the reference."""
    desirable_weight: float = 1.0
    """Weight of good answers (lambda_D)."""
    undesirable_weight: float = 1.0
    """Weight of bad answers (lambda_U)."""

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"loss: expected one of {', '.join(LOSSES)}, got {self.loss!r}")
        if min(self.beta, self.desirable_weight, self.undesirable_weight) <= 0:
            raise ValueError(
                "expected beta, desirable_weight and undesirable_weight > 0, got "
                f"{self.beta}, {self.desirable_weight} and {self.undesirable_weight}"
            )

    @property
    def uses_divergence(self) -> bool:
        """Whether the reference point is estimated."""
        return self.loss == "kto"

    def weights(self, desirable: Tensor) -> Tensor:
        """The weight of each answer, float32 with the shape of `desirable`."""
        return torch.where(desirable, self.desirable_weight, self.undesirable_weight)

    def at_start(self, desirable: Tensor) -> float:
        """The mean loss of a batch of labels (B,) when the policy equals its reference: half the mean weight."""
        return float(self.weights(desirable).double().mean() / 2)

    def unbalanced(self, num_good: int, num_bad: int) -> str:
        """What to change if good and bad answers are weighted too unequally; empty if they are balanced."""
        ratio = self.desirable_weight * num_good / (self.undesirable_weight * num_bad)
        low, high = BALANCED
        if low <= ratio <= high:
            return ""
        good, bad = self.desirable_weight / ratio, self.undesirable_weight * ratio
        return (
            f"{num_good} good and {num_bad} bad answers weigh {ratio:.2f} to 1; expected {low:g} to {high:.2f}: set "
            f"desirable_weight between {low * good:.2f} and {high * good:.2f}, or undesirable_weight"
            f" between {bad / high:.2f} and {bad / low:.2f}"
        )


@dataclass(frozen=True)
class AnswerLogprobs:
    """Log-probabilities (nats) of entire answers under the policy."""

    sums: Tensor  # (B,) float32
    metrics: dict[str, tuple[Tensor, int]] = field(default_factory=dict)  # per token: name -> (sum, count)


def kto(policy: AnswerLogprobs, reference: Tensor, desirable: Tensor, divergence: float, config: LabelLoss) -> Loss:
    """The configured loss over answers, and TRL's metrics: `chosen` are the good answers, `rejected` the bad ones.

    reference (B,) log-probabilities, desirable (B,) bool, divergence z0 >= 0 in nats (0 if the loss does not use it).
    """
    assert config.uses_divergence or divergence == 0.0, "apo_zero_unpaired has its reference point at 0"
    ratios = policy.sums - reference  # r
    sign = torch.where(desirable, 1.0, -1.0)
    losses = config.weights(desirable) * (1 - torch.sigmoid(sign * config.beta * (ratios - divergence)))
    metrics = {"kl": (ratios.new_tensor(divergence * len(ratios)), len(ratios))}
    rewards, logps = config.beta * ratios.detach(), policy.sums.detach()
    for side, mask in (("chosen", desirable), ("rejected", ~desirable)):
        num = int(mask.sum())
        metrics |= {f"rewards/{side}": (rewards[mask].sum(), num), f"logps/{side}": (logps[mask].sum(), num)}
    return Loss([Term("kto", losses.sum(), "answers")], metrics | policy.metrics)


# -- log-probabilities of answers --------------------------------------------------------------------------------------


def answer_logprobs(model: nn.Module, batch: LabelBatch) -> AnswerLogprobs:
    """Log-probabilities of the answers, with TRL's token metrics: mean logits of good and bad answers, entropy."""
    logits, targets = trained_logits(model, batch.matched)
    logprobs, entropy = target_logprobs(logits, targets)
    said = batch.matched.targets >= 0  # (B, T)
    means = logits.detach().float().mean(-1)  # (N,)
    good = batch.desirable[:, None].expand_as(said)[said]  # (N,)
    metrics = {"entropy": (entropy.sum(), len(entropy))}
    for side, mask in (("chosen", good), ("rejected", ~good)):
        metrics[f"logits/{side}"] = (means[mask].sum(), int(mask.sum()))
    return AnswerLogprobs(sum_by_row(logprobs, said), metrics)


@torch.no_grad()
def likelihoods(model: nn.Module, batch: Tokens) -> Tensor:
    """Log-probabilities (B,) of the answers, without gradient."""
    return sum_by_row(token_logprobs(model, batch)[0], batch.targets >= 0)


def mismatched_ratios(policy: nn.Module, reference: Reference, batch: LabelBatch) -> Tensor:
    """Log-ratios r (B,) of the mismatched answers, on the batch's device."""
    of_policy = likelihoods(policy, batch.mismatched)  # first: the next line switches off an adapter
    with reference.model(batch.desirable.device) as frozen:
        return of_policy - likelihoods(frozen, batch.mismatched)


def divergence_of(policy: nn.Module, reference: Reference, batch: LabelBatch) -> float:
    """z0 of a single batch, for evaluation."""
    return max(0.0, float(mismatched_ratios(policy, reference, batch).double().mean()))


def with_divergence(
    policy: nn.Module, batches: Sequence[LabelBatch], ranks: Ranks, *, reference: Reference, where: torch.device
) -> list[LabelBatch]:
    """This rank's micro-batches with z0 of the entire step, over all ranks. Collective: every rank must call it."""
    total, count = 0.0, 0
    for batch, counted in ranks.evened(list(batches)):
        ratios = mismatched_ratios(policy, reference, batch.to(where))
        if counted:
            total, count = total + float(ratios.double().sum()), count + len(ratios)
    divergence = max(0.0, ranks.sum_float(total) / ranks.sum_float(count))
    return [replace(batch, divergence=divergence) for batch in batches]
