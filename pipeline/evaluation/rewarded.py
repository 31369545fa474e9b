"""The suite of a reward model: which of two answers it finds better, on held-out pairs whose true scores are known.

    reward: accuracy, by kind of pair too; calibration_error; length_correlation     (evaluation/ranking.py)
            margin_mean, margin_std, ties

A row for each pair says whether it was told right, and by how much.
"""

from dataclasses import asdict
from pathlib import Path

from pipeline import checkpoint
from pipeline.evaluation import ranking
from pipeline.evaluation.suites import Result
from pipeline.streams.preferences import PairSplit
from pipeline.work import canonical_hash

REWARD = "ForSequenceClassification"  # how the architecture of a reward model ends


def pairs_told(folder: Path, pairs: Path) -> Result:
    """Measure the reward model in `folder` on the split `pairs`. Raises ModelError and DataError as what loads them."""
    model, tokenizer = checkpoint.load_reward(folder)
    longest = model.trunk.config.max_context
    split = PairSplit(pairs, tokenizer, longest, longest)
    result = Result({"left_out": split.dropped.total(), **ranking.measure(model, split.pairs, tokenizer.pad)})
    rewards = ranking.rewards_of(model, split.pairs, tokenizer.pad)
    margins = rewards[:, 0] - rewards[:, 1]
    for number, (encoded, margin) in enumerate(zip(split.pairs, margins.tolist(), strict=True)):
        told = -margin if ranking.truly_swapped(encoded) else margin
        result.rows.append({"suite": "reward", "id": f"{encoded.pair.kind}/{number}", "group": encoded.pair.kind,
                            "item": canonical_hash(asdict(encoded.pair)),
                            "margin": round(told, 4), "right": int(told > 0), "verdict": "right" if told > 0 else "wrong"})  # fmt: skip
    spread = {"margin_mean": float(abs(margins).mean()), "margin_std": float(margins.std()), "ties": int((margins == 0).sum())}  # fmt: skip
    result.numbers |= spread
    return result
