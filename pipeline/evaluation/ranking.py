"""How well a reward model ranks: accuracy by kind of pair, calibration, and what length has to do with it.

The truth is the pair's true scores where the data has them (a flipped label is then not believed), else its label. Not
promised: that equal accuracy on two kinds means equal use in reinforcement learning.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pipeline.evaluation.intervals import wilson
from pipeline.model.heads import RewardModel
from pipeline.streams.preferences import Encoded, batch_of

PAIRS = 32  # of one forward pass
BINS = 10  # of the calibration error


@torch.no_grad()
def rewards_of(model: RewardModel, pairs: Sequence[Encoded], pad: int) -> np.ndarray:
    """Normalised rewards (n, 2) of the chosen and the rejected answers."""
    where, found = next(model.parameters()).device, []
    model.train(False)
    for first in range(0, len(pairs), PAIRS):
        batch = batch_of(pairs[first : first + PAIRS], pad).to(where)
        rewards = model(batch.input_ids, positions=batch.positions, documents=batch.documents, select=batch.ends)
        found.append(model.normalised(rewards).float().cpu().numpy().reshape(2, -1).T)
    return np.concatenate(found)


def measure(model: RewardModel, pairs: Sequence[Encoded], pad: int) -> dict[str, Any]:
    """Accuracy with a 95 % interval over all and by kind, calibration error, correlation of reward and length."""
    rewards = rewards_of(model, pairs, pad)
    swap = np.array([truly_swapped(encoded) for encoded in pairs])
    margins = np.where(swap, -1, 1) * (rewards[:, 0] - rewards[:, 1]) * model.reward_std
    kinds = [encoded.pair.kind for encoded in pairs]
    found: dict[str, Any] = {"calibration_error": calibration_error(margins)}
    for kind in ("", *sorted(set(kinds))):
        mine = margins[[kind in ("", own) for own in kinds]]
        right = wilson(int((mine > 0).sum()), len(mine))
        part = {"accuracy": right.value, "accuracy_low": right.low, "accuracy_high": right.high, "n": len(mine)}
        found |= {kind: part} if kind else part
    lengths = np.array([[int(np.sum(p.trained)) for p in (e.chosen, e.rejected)] for e in pairs], dtype=float)
    found["length_correlation"] = correlation(rewards.reshape(-1), lengths.reshape(-1))
    return found


def truly_swapped(encoded: Encoded) -> bool:
    """Whether the true scores say that the rejected answer is the better one."""
    pair = encoded.pair
    return (pair.gold_chosen or 0.0) < (pair.gold_rejected or 0.0)


def calibration_error(margins: np.ndarray) -> float:
    """Expected calibration error (Naeini et al. 2015): |accuracy - confidence| over ten bins of sigmoid(|margin|)."""
    confidence, right = 1 / (1 + np.exp(-np.abs(margins))), margins > 0
    bins = np.minimum(((confidence - 0.5) * 2 * BINS).astype(int), BINS - 1)
    total = 0.0
    for number in range(BINS):
        mine = bins == number
        if mine.any():
            total += mine.mean() * abs(right[mine].mean() - confidence[mine].mean())
    return float(total)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's; 0 where one of them does not vary."""
    return float(np.corrcoef(a, b)[0, 1]) if a.std() > 0 and b.std() > 0 else 0.0
