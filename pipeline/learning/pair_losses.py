"""Losses that compare a better answer with a worse one: Bradley-Terry reward models and the DPO family.

Notation of the papers: beta scales the log-ratio u = log pi(y) - log ref(y) of an entire answer; d = u_chosen -
u_rejected; #c and #r are the token counts of the answers. Each pair has weight 1; the loop divides by the number of
pairs in the entire step. `pair_logprobs` returns the log-probabilities of entire answers, as sums of exact token
log-probabilities.

Not supported: losses that need more than two answers per prompt.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.batches.batch import Tokens
from pipeline.batches.pairs import PairStream
from pipeline.learning.losses import Loss, Term, sum_by_row, target_logprobs, trained_logits
from pipeline.run.tracking import progress

LEAST_LIKELY = -5.0  # nats: a probability of 1 in 148


@dataclass(frozen=True)
class PairLogprobs:
    """Log-probabilities (nats) of entire answers, and their token counts."""

    chosen: Tensor  # (P,) float32
    rejected: Tensor  # (P,)
    num_chosen: Tensor  # (P,) tokens, including the end of turn
    num_rejected: Tensor  # (P,)
    metrics: dict[str, tuple[Tensor, int]] = field(default_factory=dict)  # per token: name -> (sum, count)


def bradley_terry(chosen: Tensor, rejected: Tensor, *, margin: Tensor | None = None, centering: float = 0.01) -> Loss:
    """-log sigmoid(r_c - r_r - m) + centering * (r_c + r_r)^2 for each pair.

    Rewards and margins are (P,) float32. `margin`: Touvron et al. 2023 (Llama 2, eq. 2). `centering` (Eisenstein et al.
    2023, arXiv:2312.09244, eq. 2) keeps the mean reward near 0.
    """
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    centered = (chosen + rejected).square()
    terms = [Term("ranking", -F.logsigmoid(difference).sum(), "pairs")]
    if centering:
        terms.append(Term("centering", centered.sum(), "pairs", centering))
    both, num = torch.cat([chosen, rejected]).detach(), len(chosen)
    metrics = {
        "accuracy": ((chosen > rejected).sum(), num),
        "margin": ((chosen - rejected).detach().sum(), num),
        "mean_reward": (both.sum(), 2 * num),
    }
    return Loss(terms, metrics, {"min_reward": both.amin(), "max_reward": both.amax()} if num else {})


def with_likelihood(loss: Loss, guessed: Tensor, likelihoods: Tensor, *, weight: float) -> Loss:
    """The loss plus `weight` times the squared error of predicted log-probabilities (N,), averaged over answer tokens.

    The true values, `likelihoods` (N,), are in nats, clamped to at least -5: below that, a token is simply a surprise.
    """
    error = (guessed - likelihoods.clamp(min=LEAST_LIKELY)).square().sum()
    return replace(loss, terms=[*loss.terms, Term("likelihood", error, "tokens", weight)])


def untrained_loss(margins: Tensor) -> float:
    """The mean loss of `bradley_terry` when all rewards are 0: ln 2 without margins (P,)."""
    return float(-F.logsigmoid(-margins.double()).mean())


@dataclass(frozen=True, kw_only=True)
class PairLoss:
    """A loss of the DPO family and its constants. Raises ValueError for a constant that the loss does not use."""

    loss: str = "sigmoid"
    """sigmoid, cdpo, robust, ipo, hinge, norm, simpo, apo_zero, apo_down."""
    beta: float = 0.1
    """KL strength: larger values stay closer to the reference."""
    label_smoothing: float = 0.0
    """Assumed share of wrong labels, for cdpo and robust."""
    gamma: float = 0.0
    """Target margin between the per-token means, for simpo."""
    reference_free: bool = False
    """Assume a uniform reference: its terms are 0."""
    nll_weight: float = 0.0
    """Weight of the chosen answer's mean negative log-likelihood, added to the loss."""

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"loss: expected one of {', '.join(LOSSES)}, got {self.loss!r}")
        if self.beta <= 0 or self.nll_weight < 0:
            raise ValueError(f"expected beta > 0 and nll_weight >= 0, got {self.beta} and {self.nll_weight}")
        smooth = self.loss in ("cdpo", "robust")
        if smooth != (self.label_smoothing > 0) or not 0 <= self.label_smoothing < 0.5:
            wanted = "a share in (0, 0.5)" if smooth else f"0, because {self.loss} has no label smoothing"
            raise ValueError(f"label_smoothing: expected {wanted}, got {self.label_smoothing}")
        if self.gamma and self.loss != "simpo":
            raise ValueError(f"gamma: expected 0, because {self.loss} has no margin; got {self.gamma}")
        if self.reference_free and self.loss in ("ipo", "apo_zero", "apo_down"):
            raise ValueError(f"reference_free: {self.loss} is defined by its reference; choose another loss")
        if self.reference_free and self.loss == "simpo":
            raise ValueError("reference_free: simpo never uses a reference; leave it false")

    @property
    def uses_reference(self) -> bool:
        """Whether a reference model is needed."""
        return self.loss != "simpo" and not self.reference_free

    @property
    def at_start(self) -> float | None:
        """The loss of a policy that equals its reference, without the nll term; None if it depends on the data."""
        if self.loss == "simpo" or self.reference_free:
            return None
        if self.loss == "ipo":
            return 1 / (4 * self.beta**2)
        return 1.0 if self.loss in ("hinge", "apo_zero", "apo_down") else math.log(2)


@dataclass(frozen=True)
class _Ratios:
    """The inputs of the losses: log-ratios against the reference, and log-probabilities per token."""

    chosen: Tensor  # u_c
    rejected: Tensor  # u_r
    num_chosen: Tensor
    num_rejected: Tensor
    mean_chosen: Tensor  # L_c / #c
    mean_rejected: Tensor

    @property
    def difference(self) -> Tensor:
        return self.chosen - self.rejected

    @property
    def difference_per_token(self) -> Tensor:
        return self.chosen / self.num_chosen - self.rejected / self.num_rejected


def _sigmoid(x: _Ratios, c: PairLoss) -> Tensor:
    """Rafailov et al. 2023 (arXiv:2305.18290), eq. 7."""
    return -F.logsigmoid(c.beta * x.difference)


def _cdpo(x: _Ratios, c: PairLoss) -> Tensor:
    """Conservative DPO: cross-entropy against labels of 1 - e (Mitchell 2023, eq. 3)."""
    right, wrong = F.logsigmoid(c.beta * x.difference), F.logsigmoid(-c.beta * x.difference)
    return -(1 - c.label_smoothing) * right - c.label_smoothing * wrong


def _robust(x: _Ratios, c: PairLoss) -> Tensor:
    """Unbiased under labels flipped with probability e (Chowdhury et al. 2024, arXiv:2403.00409, eq. 10)."""
    right, wrong = F.logsigmoid(c.beta * x.difference), F.logsigmoid(-c.beta * x.difference)
    return (-(1 - c.label_smoothing) * right + c.label_smoothing * wrong) / (1 - 2 * c.label_smoothing)


def _ipo(x: _Ratios, c: PairLoss) -> Tensor:
    """Azar et al. 2023 (arXiv:2310.12036), eq. 17, with per-token means as its authors recommend."""
    return (x.difference_per_token - 1 / (2 * c.beta)).square()


def _hinge(x: _Ratios, c: PairLoss) -> Tensor:
    """Zhao et al. 2023 (SLiC, arXiv:2305.10425), eq. 7, on log-ratios."""
    return torch.relu(1 - c.beta * x.difference)


def _norm(x: _Ratios, c: PairLoss) -> Tensor:
    """DPO on per-token means (Lambert et al. 2024, Tulu 3, arXiv:2411.15124, eq. 6)."""
    return -F.logsigmoid(c.beta * x.difference_per_token)


def _simpo(x: _Ratios, c: PairLoss) -> Tensor:
    """Meng et al. 2024 (arXiv:2405.14734), eq. 6, with its gamma / beta written as gamma."""
    return -F.logsigmoid(c.beta * (x.mean_chosen - x.mean_rejected - c.gamma))


def _apo_zero(x: _Ratios, c: PairLoss) -> Tensor:
    """Raises chosen log-ratios and lowers rejected ones (D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 8)."""
    return 1 - torch.sigmoid(c.beta * x.chosen) + torch.sigmoid(c.beta * x.rejected)


def _apo_down(x: _Ratios, c: PairLoss) -> Tensor:
    """Lowers both log-ratios, the rejected one more: for a policy better than the chosen answers (ibid., eq. 9)."""
    return torch.sigmoid(c.beta * x.chosen) + 1 - torch.sigmoid(c.beta * x.difference)


LOSSES: dict[str, Callable[[_Ratios, PairLoss], Tensor]] = {
    "sigmoid": _sigmoid,
    "cdpo": _cdpo,
    "robust": _robust,
    "ipo": _ipo,
    "hinge": _hinge,
    "norm": _norm,
    "simpo": _simpo,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
}


def dpo(policy: PairLogprobs, reference: PairLogprobs | None, config: PairLoss) -> Loss:
    """The configured loss over pairs, and TRL's metrics. `reference` is None if the loss does not use one."""
    assert (reference is not None) == config.uses_reference, "pass a reference exactly when the loss uses one"
    zero = torch.zeros_like(policy.chosen)
    chosen = policy.chosen - (reference.chosen if reference else zero)
    rejected = policy.rejected - (reference.rejected if reference else zero)
    mean_chosen = policy.chosen / policy.num_chosen
    ratios = _Ratios(
        chosen, rejected, policy.num_chosen, policy.num_rejected, mean_chosen, policy.rejected / policy.num_rejected
    )
    terms = [Term("preference", LOSSES[config.loss](ratios, config).sum(), "pairs")]
    if config.nll_weight:
        terms.append(Term("nll", -mean_chosen.sum(), "pairs", config.nll_weight))
    num = len(chosen)
    if config.loss == "simpo":
        won, lost = config.beta * mean_chosen.detach(), config.beta * ratios.mean_rejected.detach()
    else:
        won, lost = config.beta * chosen.detach(), config.beta * rejected.detach()
    metrics = {
        "rewards/chosen": (won.sum(), num),
        "rewards/rejected": (lost.sum(), num),
        "rewards/margins": ((won - lost).sum(), num),
        "rewards/accuracies": ((won > lost).sum(), num),
        "logps/chosen": (policy.chosen.detach().sum(), num),
        "logps/rejected": (policy.rejected.detach().sum(), num),
        "nll/policy": (-policy.chosen.detach().sum(), int(policy.num_chosen.sum())),
    }
    if reference:
        metrics["nll/reference"] = (-reference.chosen.sum(), int(reference.num_chosen.sum()))
    return Loss(terms, metrics | policy.metrics)


# -- log-probabilities of pairs ----------------------------------------------------------------------------------------


def pair_logprobs(model: nn.Module, batch: Tokens) -> PairLogprobs:
    """Log-probabilities of the answers of P pairs: the rows are the P chosen answers, then the P rejected ones.

    Includes TRL's token metrics: mean logits and entropy of both sides, and accuracy on the chosen answers.
    """
    logits, targets = trained_logits(model, batch)
    logprobs, entropy = target_logprobs(logits, targets)
    chosen = batch.targets >= 0
    num = int(chosen.chunk(2)[0].sum())  # tokens of the chosen answers, which come first
    detached = logits.detach()
    means, correct = detached.float().mean(-1), detached[:num].argmax(-1) == targets[:num]
    metrics = {
        "logits/chosen": (means[:num].sum(), num),
        "logits/rejected": (means[num:].sum(), len(means) - num),
        "entropy": (entropy.sum(), len(entropy)),
        "mean_token_accuracy": (correct.sum(), num),
    }
    return replace(pairs_of(sum_by_row(logprobs, chosen), chosen), metrics=metrics)


def pairs_of(sums: Tensor, chosen: Tensor) -> PairLogprobs:
    """Turn the sums (2P,) of the answers marked by `chosen` (2P, T) into pairs."""
    (better, worse), (num_better, num_worse) = sums.chunk(2), chosen.sum(1).chunk(2)
    return PairLogprobs(better, worse, num_better, num_worse)


@torch.no_grad()
def reference_sums(model: nn.Module, stream: PairStream, where: torch.device) -> dict[str, np.ndarray]:
    """Reference log-probabilities (n, 2) of each split's chosen and rejected answers, in pair order.

    Computed once, so the reference can be released.
    """
    sums = {}
    with progress(total=len(stream.train.pairs) + len(stream.val.pairs), desc="reference", unit="pair") as bar:
        for name in ("train", "val"):
            parts = []
            for batch in stream.batches(name):
                pairs = pair_logprobs(model, batch.to(where))
                parts.append(torch.stack([pairs.chosen, pairs.rejected], 1).cpu().numpy())
                bar.update(len(parts[-1]))
            sums[name] = np.concatenate(parts)
    return sums
