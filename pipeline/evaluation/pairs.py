"""What preference learning did to held-out pairs: does the policy now find the better answer likelier?

    accuracy       the log-ratio against the model before training is larger for the better answer (DPO's implicit reward)
    likelihood     the log-probability itself is larger for the better answer, before and after: needs no reference

Per kind of pair, with Wilson's intervals; the gain in `likelihood` by a paired bootstrap over pairs. `chosen_nats` is how far
the better answers' log-probability per token moved: a large fall means that the policy unlearnt both.
"""

from typing import Any

import numpy as np
import torch
from torch import nn

from pipeline.device import generator
from pipeline.evaluation.intervals import paired_difference, wilson
from pipeline.evaluation.ranking import PAIRS, truly_swapped
from pipeline.learning import scoring_pairs
from pipeline.streams.preferences import PairSplit, batch_of


@torch.no_grad()
def likelihoods(model: nn.Module, split: PairSplit, pad: int, where: torch.device) -> np.ndarray:
    """Summed log-probabilities (n, 2) of the chosen and the rejected answers."""
    was_training, found = model.training, []
    model.to(where).train(False)
    for first in range(0, len(split.pairs), PAIRS):
        pairs = scoring_pairs.pair_logprobs(model, batch_of(split.pairs[first : first + PAIRS], pad).to(where))
        found.append(torch.stack([pairs.chosen, pairs.rejected], 1).cpu().numpy())
    model.train(was_training)
    return np.concatenate(found)


def measure(split: PairSplit, before: np.ndarray, after: np.ndarray, seed: int) -> dict[str, Any]:
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
