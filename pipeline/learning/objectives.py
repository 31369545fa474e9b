"""Losses as pure functions of logits and log-probabilities. Each returns sums and counts; the loop divides once.

A `Loss` is a list of terms c_k * S_k / G_k, S and G taken over all micro-batches and ranks (specs: training, 1), so that
accumulation and ragged ranks change nothing. A term with G = 0 drops out.
"""

from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Term:
    """One part of a loss: coefficient * sum / count."""

    name: str
    sum: Tensor  # scalar, with a gradient
    count: int  # what the sum runs over; known before the forward pass
    coefficient: float = 1.0


@dataclass(frozen=True)
class Loss:
    """Terms to be optimised, and metrics (name -> (sum, count)) to be averaged and shown."""

    terms: list[Term]
    metrics: dict[str, tuple[Tensor, int]] = field(default_factory=dict)


def next_token(logits: Tensor, targets: Tensor) -> Loss:
    """Cross-entropy in nats, summed over the trained positions.

    logits (N, V) and targets (N,) are those positions alone. In float32: with a large vocabulary the softmax of bf16
    logits loses the small probabilities.
    """
    total = F.cross_entropy(logits.float(), targets, reduction="sum")
    return Loss([Term("loss", total, targets.numel())])
