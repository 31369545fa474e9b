"""How well a reward model ranks: accuracy by kind of pair, calibration, and what length has to do with it.

The truth is the pair's true scores where the data has them (a flipped label is then not believed), else its label. Not
promised: that equal accuracy on two kinds means equal use in reinforcement learning.

The suite of a reward model: which of two answers it finds better, on held-out pairs whose true scores are known.

    reward: accuracy, by kind of pair too; calibration_error; length_correlation     (evaluation/preferences.py)
            margin_mean, margin_std, ties

A row for each pair says whether it was told right, and by how much.

What preference learning did to held-out pairs: does the policy now find the better answer likelier?

    accuracy     the log-ratio against the model before training is larger for the better answer (DPO's implicit reward)
    likelihood     the log-probability itself is larger for the better answer, before and after: needs no reference

Per kind of pair, with Wilson's intervals; the gain in `likelihood` by a paired bootstrap over pairs. `chosen_nats` is
how far the better answers' log-probability per token moved: a large fall means that the policy unlearnt both.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
from pipeline.run.workdir import canonical_hash

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


def measure_ranking(model: RewardModel, pairs: Sequence[Encoded], pad: int) -> dict[str, Any]:
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


# -- rewarded ----------------------------------------------------------------------------------------------------------


REWARD = "ForSequenceClassification"  # how the architecture of a reward model ends


def pairs_told(folder: Path, pairs: Path) -> SuiteResult:
    """Measure the reward model in `folder` on the split `pairs`. Raises ModelError and DataError as what loads them."""
    model, tokenizer = checkpoint.load_reward(folder)
    longest = model.trunk.config.max_context
    split = PairSplit(pairs, tokenizer, longest, longest)
    result = SuiteResult({"left_out": split.dropped.total(), **measure_ranking(model, split.pairs, tokenizer.pad)})
    rewards = rewards_of(model, split.pairs, tokenizer.pad)
    margins = rewards[:, 0] - rewards[:, 1]
    for number, (encoded, margin) in enumerate(zip(split.pairs, margins.tolist(), strict=True)):
        told = -margin if truly_swapped(encoded) else margin
        result.rows.append(
            {
                "suite": "reward",
                "id": f"{encoded.pair.kind}/{number}",
                "group": encoded.pair.kind,
                "item": canonical_hash(asdict(encoded.pair)),
                "margin": round(told, 4),
                "right": int(told > 0),
                "verdict": "right" if told > 0 else "wrong",
            }
        )
    spread = {
        "margin_mean": float(abs(margins).mean()),
        "margin_std": float(margins.std()),
        "ties": int((margins == 0).sum()),
    }
    result.numbers |= spread
    return result


# -- pairs -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def likelihoods(model: nn.Module, split: PairSplit, pad: int, where: torch.device) -> np.ndarray:
    """Summed log-probabilities (n, 2) of the chosen and the rejected answers."""
    was_training, found = model.training, []
    model.to(where).train(False)
    for first in range(0, len(split.pairs), PAIRS):
        pairs = pair_losses.pair_logprobs(model, batch_of(split.pairs[first : first + PAIRS], pad).to(where))
        found.append(torch.stack([pairs.chosen, pairs.rejected], 1).cpu().numpy())
    model.train(was_training)
    return np.concatenate(found)


def measure_pairs(split: PairSplit, before: np.ndarray, after: np.ndarray, seed: int) -> dict[str, Any]:
    """The numbers above over all pairs and by kind."""
    sign = np.where([truly_swapped(encoded) for encoded in split.pairs], -1.0, 1.0)
    kinds = [encoded.pair.kind for encoded in split.pairs]
    gain, plain, plain_before = (sign * (x[:, 0] - x[:, 1]) for x in (after - before, after, before))
    lengths = np.array([np.sum(encoded.chosen.trained) for encoded in split.pairs], dtype=np.float64)
    found: dict[str, Any] = {"chosen_nats": float((after - before)[:, 0].sum() / lengths.sum())}
    for kind in ("", *sorted(set(kinds))):
        mine = np.array([kind in ("", own) for own in kinds])
        part: dict[str, Any] = {"n": int(mine.sum())}
        for name, margins in (("accuracy", gain), ("likelihood", plain), ("likelihood_before", plain_before)):
            share = wilson(int((margins[mine] > 0).sum()), int(mine.sum()))
            part |= {name: share.value, f"{name}_low": share.low, f"{name}_high": share.high}
        rows = [((margins[mine] > 0).astype(float).tolist(), None) for margins in (plain_before, plain)]
        moved = paired_difference(rows[0], rows[1], generator=generator("pairs", seed))
        part |= {"gain": moved.value, "gain_low": moved.low, "gain_high": moved.high}
        found |= {kind: part} if kind else part
    return found
