"""How likely are the two answers of a pair? Sums of exact token log-probabilities, of whole answers.

A file of its own, so that a change here retrains no language model.
"""

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.learning.objectives_pairs import PairLogprobs
from pipeline.learning.scoring import sum_by_row, token_logprobs
from pipeline.streams.batch import Tokens
from pipeline.streams.preferences import PairStream


def pair_logprobs(model: nn.Module, batch: Tokens) -> PairLogprobs:
    """Summed log-probabilities of the answers of P pairs, whose rows are the P chosen, then the P rejected ones."""
    logprobs, _ = token_logprobs(model, batch)
    chosen = batch.targets >= 0
    return pairs_of(sum_by_row(logprobs, chosen), chosen)


def pairs_of(sums: Tensor, chosen: Tensor) -> PairLogprobs:
    """Sums (2P,) of the answers marked by `chosen` (2P, T) as pairs."""
    (better, worse), (longer, other) = sums.chunk(2), chosen.sum(1).chunk(2)
    return PairLogprobs(better, worse, longer, other)


@torch.no_grad()
def reference_sums(model: nn.Module, stream: PairStream, where: torch.device) -> dict[str, np.ndarray]:
    """Sums (n, 2) of the chosen and rejected answers of each split's pairs, in their order: computed once, the reference goes."""
    found = {}
    for name in ("train", "val"):
        parts = []
        for batch in stream.batches(name):
            pairs = pair_logprobs(model, batch.to(where))
            parts.append(torch.stack([pairs.chosen, pairs.rejected], 1).cpu().numpy())
        found[name] = np.concatenate(parts)
    return found
