"""Losses of masked diffusion: cross-entropy under masks, and DPO on estimated ELBOs.

Symbols: l log-probabilities under masks (nats), B the ELBO of an answer, s = [B(w) - B_ref(w)] - [B(l) - B_ref(l)] of a pair with
chosen answer w and rejected answer l. Which masks: `streams/masking.py`; the estimates: `scoring_masked.py`.

Coupled-GRPO has no loss of its own: its estimates go into `objectives_policy.group_policy`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.learning.objectives import Loss, Term
from pipeline.learning.objectives_pairs import PairLogprobs

REDUCTIONS = ("sum", "mean")


def masked_cross_entropy(logprobs: Tensor, weights: Tensor, *, per: str) -> Loss:
    """-sum of weight * l over the masked tokens (n,), divided by the count `per` of the step (LLaDA, arXiv:2502.09992, eq. 3)."""
    num = len(logprobs)
    return Loss([Term("loss", -(logprobs * weights).sum(), per)], {"masked/nll": (-logprobs.detach().sum(), num)})


def diffusion_dpo(
    policy: PairLogprobs, reference: PairLogprobs, *, beta: float, sft_weight: float, reduction: str = "sum"
) -> Loss:
    """-log sigmoid(beta s) - (sft_weight / |w|) B(w) of each pair (LLaDA 1.5, arXiv:2505.19223, eq. 4).

    `reduction` mean takes each B over its answer's tokens. Metrics by TRL's names, and the quantiles' extremes of beta s.
    """
    assert reduction in REDUCTIONS, reduction
    one = torch.ones_like(policy.chosen)
    long, short = (policy.num_chosen, policy.num_rejected) if reduction == "mean" else (one, one)
    chosen = (policy.chosen - reference.chosen) / long
    rejected = (policy.rejected - reference.rejected) / short
    scaled = beta * (chosen - rejected)
    terms = [Term("preference", -F.logsigmoid(scaled).sum(), "pairs")]
    likely = policy.chosen / policy.num_chosen
    if sft_weight:
        terms.append(Term("sft", -likely.sum(), "pairs", sft_weight))
    num, still = len(scaled), scaled.detach()
    won, lost = beta * chosen.detach(), beta * rejected.detach()
    metrics = {
        "rewards/chosen": (won.sum(), num),
        "rewards/rejected": (lost.sum(), num),
        "rewards/margins": (still.sum(), num),
        "rewards/accuracies": ((won > lost).sum() + 0.5 * (won == lost).sum(), num),
        "raw_accuracy": ((policy.chosen > policy.rejected).detach().sum(), num),
        "nelbo/chosen": (-policy.chosen.detach().sum(), int(policy.num_chosen.sum())),
        "nelbo/rejected": (-policy.rejected.detach().sum(), int(policy.num_rejected.sum())),
    }
    extremes = {"margin_min": still.amin(), "margin_max": still.amax()} if num else {}
    return Loss(terms, metrics | policy.metrics, extremes)
