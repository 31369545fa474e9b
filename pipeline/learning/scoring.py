"""How likely is this text under the model? Autoregressive: exact token log-probabilities.

The heads run only over the positions that are asked for: with a vocabulary of 4,096 and a width of 192 the head is a
third of all multiplications, and in tool dialogues two thirds of the positions are prompt.
"""

from torch import Tensor, nn

from pipeline.streams.batch import TokenBatch


def trained_logits(model: nn.Module, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Logits (N, V) and targets (N,) at the N trained positions of the batch, row by row."""
    chosen = batch.targets >= 0  # (B, T)
    logits = model(batch.input_ids, positions=batch.positions, documents=batch.documents, select=chosen)
    return logits, batch.targets[chosen]
