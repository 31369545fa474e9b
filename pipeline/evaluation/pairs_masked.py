"""What preference learning did to a masked-diffusion model, on held-out pairs: `pairs.py` with estimated likelihoods.

Both models are asked under the same masks, `draws` of each answer, spread evenly: what differs is the model.
"""

from typing import Any

import numpy as np
import torch

from pipeline import device
from pipeline.evaluation import pairs
from pipeline.learning import scoring_masked
from pipeline.model.denoiser import Denoiser
from pipeline.streams import masking
from pipeline.streams.noised_pairs import SIDES, drawn_pairs
from pipeline.streams.preferences import PairSplit
from pipeline.tracking import progress

PAIRS = 32  # of a batch
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@torch.no_grad()
def elbos(model: Denoiser, split: PairSplit, pad: int, draws: int, hardware: device.Hardware) -> np.ndarray:
    """ELBOs (n, 2), in nats, of the chosen and the rejected answers, in the precision of training."""
    was_training, found = model.training, []
    model.to(hardware.device).train(False)
    batches = range(0, len(split.pairs), PAIRS)
    with progress(total=len(batches), desc="held-out pairs", unit="batch") as bar, hardware.autocast():
        for first in batches:
            chosen = split.pairs[first : first + PAIRS]
            keys = [[masking.key(0, "eval", f"{encoded.pair.id}/{side}", 0) for encoded in chosen] for side in SIDES]
            batch = drawn_pairs(chosen, keys, pad, draws, stratified=True).to(hardware.device)
            told = scoring_masked.pair_elbos(model, batch)
            found.append(torch.stack([told.chosen, told.rejected], 1).cpu().numpy())
            bar.update()
    model.train(was_training)
    return np.concatenate(found)


def measure(split: PairSplit, before: np.ndarray, after: np.ndarray, seed: int, *, beta: float) -> dict[str, Any]:
    """`pairs.measure`, where `likelihood` is the raw pair accuracy; and the quantiles of beta s."""
    margins = beta * ((after - before)[:, 0] - (after - before)[:, 1])
    spread = {f"q{100 * q:.0f}": float(np.quantile(margins, q)) for q in QUANTILES}
    return pairs.measure(split, before, after, seed) | {"margin": spread}
