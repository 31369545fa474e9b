"""Held-out preference pairs: how well a reward model ranks them, and what preference learning changed.

    a reward model and pairs -> accuracy, by kind of pair too; calibration_error; length_correlation
                                as a suite also margin_mean, margin_std, ties, and a row a pair with its margin
    log-probabilities before and after training -> accuracy, likelihood, gain, chosen_nats; by kind of pair too

    accuracy       the log-ratio of the policy to the model before training is larger for the better answer (DPO's
                   implicit reward)
    likelihood     the log-probability itself is larger for the better answer, before and after: needs no reference
    chosen_nats    change of the better answers' log-probability per token: a large fall means that the policy unlearned
                   both answers

The truth is the pair's true scores where the data has them (a flipped label is then ignored), else its label. Shares
have Wilson's intervals; the gain in `likelihood` has a paired bootstrap over pairs.

Not promised: that equal accuracy on two kinds means equal use in reinforcement learning.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import nn

from pipeline.batches.pairs import Encoded, PairSplit, batch_of
from pipeline.evaluation.intervals import paired_difference, wilson
from pipeline.evaluation.suites import SuiteResult
from pipeline.learning import pair_losses
from pipeline.model import checkpoint
from pipeline.model.heads import RewardModel
from pipeline.run.device import generator
from pipeline.run.types import JsonObject
from pipeline.run.workdir import canonical_hash

PAIRS = 32  # in one forward pass
BINS = 10  # of the calibration error


@torch.no_grad()
def rewards_of(model: RewardModel, pairs: Sequence[Encoded], pad: int) -> np.ndarray:
    """Normalized rewards (n, 2) of the chosen and the rejected answers."""
    device, parts = next(model.parameters()).device, []
    model.train(False)
    for first in range(0, len(pairs), PAIRS):
        batch = batch_of(pairs[first : first + PAIRS], pad).to(device)
        rewards = model(batch.input_ids, positions=batch.positions, documents=batch.documents, select=batch.ends)
        parts.append(model.normalised(rewards).float().cpu().numpy().reshape(2, -1).T)
    return np.concatenate(parts)


def measure_ranking(model: RewardModel, pairs: Sequence[Encoded], pad: int) -> JsonObject:
    """Accuracy with a 95 % interval over all pairs and by kind, calibration error, correlation of reward and length."""
    rewards = rewards_of(model, pairs, pad)
    swap = np.array([truly_swapped(encoded) for encoded in pairs])
    margins = np.where(swap, -1, 1) * (rewards[:, 0] - rewards[:, 1]) * model.reward_std
    kinds = [encoded.pair.kind for encoded in pairs]
    numbers: JsonObject = {"calibration_error": calibration_error(margins)}
    for kind in ("", *sorted(set(kinds))):
        of_kind = margins[[kind in ("", pair_kind) for pair_kind in kinds]]
        right = wilson(int((of_kind > 0).sum()), len(of_kind))
        part = {"accuracy": right.value, "accuracy_low": right.low, "accuracy_high": right.high, "n": len(of_kind)}
        numbers |= {kind: part} if kind else part
    lengths = np.array([[int(np.sum(p.trained)) for p in (e.chosen, e.rejected)] for e in pairs], dtype=float)
    numbers["length_correlation"] = correlation(rewards.reshape(-1), lengths.reshape(-1))
    return numbers


def truly_swapped(encoded: Encoded) -> bool:
    """Whether the rejected answer has the higher true score."""
    pair = encoded.pair
    return (pair.gold_chosen or 0.0) < (pair.gold_rejected or 0.0)


def calibration_error(margins: np.ndarray) -> float:
    """Expected calibration error (Naeini et al. 2015): |accuracy - confidence| over ten bins of sigmoid(|margin|)."""
    confidence, right = 1 / (1 + np.exp(-np.abs(margins))), margins > 0
    bins = np.minimum(((confidence - 0.5) * 2 * BINS).astype(int), BINS - 1)
    total = 0.0
    for bin_number in range(BINS):
        in_bin = bins == bin_number
        if in_bin.any():
            total += in_bin.mean() * abs(right[in_bin].mean() - confidence[in_bin].mean())
    return float(total)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson correlation; 0 if one of them does not vary."""
    return float(np.corrcoef(a, b)[0, 1]) if a.std() > 0 and b.std() > 0 else 0.0


def pairs_told(folder: Path, pairs: Path) -> SuiteResult:
    """Measure the reward model in `folder` on the file `pairs`. Raises ModelError and DataError for malformed ones."""
    model, tokenizer = checkpoint.load_reward(folder)
    longest = model.trunk.config.max_context
    split = PairSplit(pairs, tokenizer, longest, longest)
    result = SuiteResult({"left_out": split.dropped.total(), **measure_ranking(model, split.pairs, tokenizer.pad)})
    rewards = rewards_of(model, split.pairs, tokenizer.pad)
    margins = rewards[:, 0] - rewards[:, 1]
    for number, (encoded, margin) in enumerate(zip(split.pairs, margins.tolist(), strict=True)):
        true_margin = -margin if truly_swapped(encoded) else margin
        result.rows.append(
            {
                "suite": "reward",
                "id": f"{encoded.pair.kind}/{number}",
                "group": encoded.pair.kind,
                "item": canonical_hash(asdict(encoded.pair)),
                "margin": round(true_margin, 4),
                "right": int(true_margin > 0),
                "verdict": "right" if true_margin > 0 else "wrong",
            }
        )
    result.numbers |= {
        "margin_mean": float(abs(margins).mean()),
        "margin_std": float(margins.std()),
        "ties": int((margins == 0).sum()),
    }
    return result


@torch.no_grad()
def likelihoods(model: nn.Module, split: PairSplit, pad: int, where: torch.device) -> np.ndarray:
    """Summed log-probabilities (n, 2) of the chosen and the rejected answers."""
    was_training, parts = model.training, []
    model.to(where).train(False)
    for first in range(0, len(split.pairs), PAIRS):
        pairs = pair_losses.pair_logprobs(model, batch_of(split.pairs[first : first + PAIRS], pad).to(where))
        parts.append(torch.stack([pairs.chosen, pairs.rejected], 1).cpu().numpy())
    model.train(was_training)
    return np.concatenate(parts)


def measure_pairs(split: PairSplit, before: np.ndarray, after: np.ndarray, seed: int) -> JsonObject:
    """The measures of preference learning over all pairs and by kind, from `likelihoods` before and after training."""
    sign = np.where([truly_swapped(encoded) for encoded in split.pairs], -1.0, 1.0)
    kinds = [encoded.pair.kind for encoded in split.pairs]
    implicit_rewards, after_margins, before_margins = (
        sign * (x[:, 0] - x[:, 1]) for x in (after - before, after, before)
    )
    lengths = np.array([np.sum(encoded.chosen.trained) for encoded in split.pairs], dtype=np.float64)
    numbers: JsonObject = {"chosen_nats": float((after - before)[:, 0].sum() / lengths.sum())}
    for kind in ("", *sorted(set(kinds))):
        of_kind = np.array([kind in ("", pair_kind) for pair_kind in kinds])
        part: JsonObject = {"n": int(of_kind.sum())}
        for name, margins in (
            ("accuracy", implicit_rewards),
            ("likelihood", after_margins),
            ("likelihood_before", before_margins),
        ):
            share = wilson(int((margins[of_kind] > 0).sum()), int(of_kind.sum()))
            part |= {name: share.value, f"{name}_low": share.low, f"{name}_high": share.high}
        rows = [((margins[of_kind] > 0).astype(float).tolist(), None) for margins in (before_margins, after_margins)]
        change = paired_difference(rows[0], rows[1], generator=generator("pairs", seed))
        part |= {"gain": change.value, "gain_low": change.low, "gain_high": change.high}
        numbers |= {kind: part} if kind else part
    return numbers
