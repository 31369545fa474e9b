"""Distillation: a student is trained on a teacher's token probabilities.

    beta 0        KL(teacher || student)      forward: Hinton et al. 2015, arXiv:1503.02531
    0 < beta < 1  beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student:
                                              generalized Jensen-Shannon (GKD): Agarwal et al. 2024, arXiv:2306.13649
    beta 1        KL(student || teacher)      reverse (MiniLLM): Gu et al. 2024, arXiv:2306.08543

Both distributions use the sampling temperature. The teacher is either live (`Whole`: hidden states and head) or
precomputed (`Kept`: its top k tokens, with the remaining mass as one more outcome on both sides). With `Kept`
the outcomes are coarser, so the divergence is never greater than with `Whole`; they are equal if k is the vocabulary
size.

Logits are computed in chunks and recomputed in the backward pass, so at most 2^23 of them per model exist at once.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pipeline.learning.losses import EVEN_ROWS, MOST_LOGITS

LEAST_REST = 1e-7  # minimum probability of the tokens outside the top k: float32 sums may round to 1


class Teacher(Protocol):
    """Compares a student with a teacher at the N trained positions of a batch."""

    def both(self, student: Tensor, rows: slice, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the same outcomes under the student and the teacher, (n, K) each.

        `student` (n, V): the student's log-probabilities at the positions `rows`.
        """
        ...


@dataclass(frozen=True)
class Whole:
    """A live teacher."""

    hidden: Tensor  # (N, D) at the trained positions
    table: Tensor  # (V, D), the head's matrix

    def both(self, student: Tensor, rows: slice, temperature: float) -> tuple[Tensor, Tensor]:
        """The outcomes are all V tokens; see Teacher."""
        return student, log_probabilities(self.hidden[rows], self.table, temperature)


@dataclass(frozen=True)
class Kept:
    """Precomputed teacher outputs: the top k tokens at each position, at this run's temperature."""

    ids: Tensor  # (N, k) int64
    logprobs: Tensor  # (N, k) float32, nats

    def both(self, student: Tensor, rows: slice, temperature: float) -> tuple[Tensor, Tensor]:
        """The outcomes are the k tokens and the rest; see Teacher."""
        kept, teacher = student.gather(1, self.ids[rows]), self.logprobs[rows]
        if self.ids.shape[1] == student.shape[1]:
            return kept, teacher
        return torch.cat([kept, _rest(kept)], 1), torch.cat([teacher, _rest(teacher)], 1)


def _rest(logprobs: Tensor) -> Tensor:
    """The log-probability of all other tokens (n, 1)."""
    return (1 - logprobs.exp().sum(1, keepdim=True)).clamp(min=LEAST_REST).log()


def log_probabilities(hidden: Tensor, table: Tensor, temperature: float) -> Tensor:
    """log softmax(hidden table^T / T), (n, D) x (V, D) -> (n, V): matmul under autocast, the rest in float32."""
    logits = torch.nn.functional.linear(hidden, table)
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(1)


def jensen_shannon(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Divergence per row, in nats: log-probabilities (n, K), (n, K) -> (n,)."""
    if beta == 0:
        return _divergence(teacher, student)
    if beta == 1:
        return _divergence(student, teacher)
    middle = torch.logaddexp(student + np.log1p(-beta), teacher + np.log(beta))
    return beta * _divergence(teacher, middle) + (1 - beta) * _divergence(student, middle)


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q), from log-probabilities."""
    return (p.exp() * (p - q)).sum(1)


def compared(
    hidden: Tensor, table: Tensor, targets: Tensor, teacher: Teacher, *, beta: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """Divergences from the teacher and log-probabilities of the targets at the N trained positions, (N,) each.

    `hidden` (N, D) and `table` (V, D) are the student's. Both results carry gradients.
    """

    def part(states: Tensor, head: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        student = log_probabilities(states, head, temperature)
        divergences = jensen_shannon(*teacher.both(student, rows, temperature), beta)
        return divergences, student.gather(1, targets[rows, None]).squeeze(1)

    size = max(EVEN_ROWS, MOST_LOGITS // len(table))
    parts = [
        checkpoint(part, hidden[rows], table, rows, use_reentrant=False, preserve_rng_state=False)
        for rows in (slice(first, first + size) for first in range(0, len(hidden), size))
    ]
    if not parts:
        empty = hidden.sum() * 0 + hidden.new_zeros(0, dtype=torch.promote_types(hidden.dtype, torch.float32))
        return empty, empty
    divergences, logprobs = zip(*parts, strict=True)
    return torch.cat(divergences), torch.cat(logprobs)


def advantages(student: np.ndarray, teacher: np.ndarray, gamma: float) -> np.ndarray:
    """MiniLLM's per-token advantages (L,) for one answer, from the log-probabilities at sampling time (Gu et al. 2024,
    section 2.2, with length normalization as in TRL): the discounted mean of the rewards that follow.

        A_t = sum_{i >= t} gamma^(i - t) (log p_i - log q_i) / sum_{i >= t} gamma^(i - t)
    """
    rewards = np.asarray(teacher, dtype=np.float64) - student
    sums, weights = np.zeros_like(rewards), np.zeros_like(rewards)
    total = weight = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        total, weight = rewards[t] + gamma * total, 1 + gamma * weight
        sums[t], weights[t] = total, weight
    return (sums / weights).astype(np.float32)
