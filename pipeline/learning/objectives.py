"""Losses as pure functions of logits and log-probabilities. Each returns sums; the loop divides once.

A loss is a list of terms c_k * S_k / G_k, S and G taken over all micro-batches and ranks (specs: training, 1), so that
accumulation and ragged ranks change nothing. What a sum is divided by is named (`per`), and the batch knows the counts
before the forward pass (`counts`). A term with G = 0 drops out.

Here: the terms and cross-entropy. `objectives_pairs.py`: reward models and the DPO family. `objectives_policy.py`: clipped
policy gradients. They are files of their own so that a change in one method retrains no stage of another.
"""

from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Term:
    """One part of a loss: coefficient * sum / count."""

    name: str
    sum: Tensor  # scalar, with a gradient
    per: str = "tokens"  # the count of the batch that the sum is divided by
    coefficient: float = 1.0


@dataclass(frozen=True)
class Loss:
    """Terms to be optimised, and what is to be shown of them."""

    terms: list[Term]
    metrics: dict[str, tuple[Tensor, int]] = field(default_factory=dict)  # name -> (sum, count)
    extremes: dict[str, Tensor] = field(default_factory=dict)  # the least where the name says min, else the greatest
    limits: dict[str, float] = field(default_factory=dict)  # metric -> the most its mean over the whole step may be


def next_token(logits: Tensor, targets: Tensor) -> Loss:
    """Cross-entropy in nats, summed over the trained positions.

    logits (N, V) and targets (N,) are those positions alone. In float32: with a large vocabulary the softmax of bf16
    logits loses the small probabilities.
    """
    return Loss([Term("loss", F.cross_entropy(logits.float(), targets, reduction="sum"))])
