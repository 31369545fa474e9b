"""How likely are the two answers of a pair? Sums of exact token log-probabilities, of whole answers.

A file of its own, so that a change here retrains no language model.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.learning.objectives_pairs import PairLogprobs
from pipeline.learning.scoring import sum_by_row, target_logprobs, trained_logits
from pipeline.streams.batch import Tokens
from pipeline.streams.preferences import PairStream
from pipeline.tracking import progress


def pair_logprobs(model: nn.Module, batch: Tokens) -> PairLogprobs:
    """Summed log-probabilities of the answers of P pairs, whose rows are the P chosen, then the P rejected ones.

    With TRL's metrics of the single tokens: mean logits of both sides, entropy of both, accuracy over the chosen answers.
    """
    logits, targets = trained_logits(model, batch)
    logprobs, entropy = target_logprobs(logits, targets)
    chosen = batch.targets >= 0
    num = int(chosen.chunk(2)[0].sum())  # tokens of the chosen answers, which stand first
    still = logits.detach()
    means, right = still.float().mean(-1), still[:num].argmax(-1) == targets[:num]
    metrics = {
        "logits/chosen": (means[:num].sum(), num),
        "logits/rejected": (means[num:].sum(), len(means) - num),
        "entropy": (entropy.sum(), len(entropy)),
        "mean_token_accuracy": (right.sum(), num),
    }
    return replace(pairs_of(sum_by_row(logprobs, chosen), chosen), metrics=metrics)


def pairs_of(sums: Tensor, chosen: Tensor) -> PairLogprobs:
    """Sums (2P,) of the answers marked by `chosen` (2P, T) as pairs."""
    (better, worse), (longer, other) = sums.chunk(2), chosen.sum(1).chunk(2)
    return PairLogprobs(better, worse, longer, other)


@torch.no_grad()
def reference_sums(model: nn.Module, stream: PairStream, where: torch.device) -> dict[str, np.ndarray]:
    """Sums (n, 2) of the chosen and rejected answers of each split's pairs, in their order: computed once, the reference goes."""
    found = {}
    with progress(total=len(stream.train.pairs) + len(stream.val.pairs), desc="reference", unit="pair") as bar:
        for name in ("train", "val"):
            parts = []
            for batch in stream.batches(name):
                pairs = pair_logprobs(model, batch.to(where))
                parts.append(torch.stack([pairs.chosen, pairs.rejected], 1).cpu().numpy())
                bar.update(len(parts[-1]))
            found[name] = np.concatenate(parts)
    return found
