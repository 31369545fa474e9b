"""How likely is this text under the model? Autoregressive: exact token log-probabilities.

The heads run only over the positions that are asked for: with a vocabulary of 4,096 and a width of 192 the head is a
third of all multiplications, and in tool dialogues two thirds of the positions are prompt.
"""

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.learning.objectives_pairs import PairLogprobs
from pipeline.streams.batch import Tokens
from pipeline.streams.preferences import PairStream


def trained_logits(model: nn.Module, batch: Tokens) -> tuple[Tensor, Tensor]:
    """Logits (N, V) and targets (N,) at the N trained positions of the batch, row by row."""
    chosen = batch.targets >= 0  # (B, T)
    logits = model(batch.input_ids, positions=batch.positions, documents=batch.documents, select=chosen)
    return logits, batch.targets[chosen]


def token_logprobs(model: nn.Module, batch: Tokens, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities (N,) of the trained targets at `temperature`, with gradient, and the entropies (N,), without.

    float32, in nats, row by row: log softmax(z / T)[target].
    """
    logits, targets = trained_logits(model, batch)
    scaled = logits.float() / temperature
    norm = scaled.logsumexp(-1)  # (N,)
    logprobs = scaled.gather(1, targets[:, None]).squeeze(1) - norm
    with torch.no_grad():
        entropy = norm - (scaled * (scaled - norm[:, None]).exp()).sum(-1)
    return logprobs, entropy


def sum_by_row(values: Tensor, chosen: Tensor) -> Tensor:
    """Sums (B,) of `values` (N,), which stand row by row at the True places of `chosen` (B, T)."""
    return values.new_zeros(chosen.shape).masked_scatter(chosen, values).sum(1)


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
