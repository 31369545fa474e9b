"""How likely is this text under the model? Autoregressive: exact token log-probabilities.

The heads run only over the positions that are asked for: with a vocabulary of 4,096 and a width of 192 the head is a
third of all multiplications, and in tool dialogues two thirds of the positions are prompt.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipeline.model.memory import Reading
from pipeline.streams.batch import Tokens


def trained_logits(model: nn.Module, batch: Tokens) -> tuple[Tensor, Tensor]:
    """Logits (N, V) and targets (N,) at the N trained positions of the batch, row by row."""
    chosen = batch.targets >= 0  # (B, T)
    logits = model(batch.input_ids, positions=batch.positions, documents=batch.documents, select=chosen)
    return logits, batch.targets[chosen]


def read_out(
    model: nn.Module, batch: Tokens, loss: Callable[[Tensor, Tensor, Tensor], Tensor], reading: Reading | None = None
) -> Tensor:
    """`loss` of the hidden states (N, D) at the N trained positions, the head's matrix (V, D) and the targets (N,).

    `reading` is for a model with a memory, and tells what it chose. It runs within the model's forward pass, in place of the head: a loss that forms logits piece by piece never holds them all.
    """
    chosen = batch.targets >= 0
    targets = batch.targets[chosen]
    told = {} if reading is None else {"reading": reading}
    return model(batch.input_ids, positions=batch.positions, documents=batch.documents, select=chosen,
                 head=lambda hidden, table: loss(hidden, table, targets), **told)  # fmt: skip


def token_logprobs(model: nn.Module, batch: Tokens, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities (N,) of the trained targets at `temperature`, with gradient, and the entropies (N,), without.

    float32, in nats, row by row: log softmax(z / T)[target].
    """
    return target_logprobs(*trained_logits(model, batch), temperature)


def actor_critic(model: nn.Module, batch: Tokens, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """As `token_logprobs` of the actor, and the critic's values (N,) of the states that the tokens were chosen in."""
    chosen = batch.targets >= 0
    logits, values = model(batch.input_ids, positions=batch.positions, documents=batch.documents, select=chosen)
    return *target_logprobs(logits, batch.targets[chosen], temperature), values


def target_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The same from logits (N, V) and their targets (N,)."""
    scaled = logits.float() / temperature
    norm = scaled.logsumexp(-1)  # (N,)
    logprobs = scaled.gather(1, targets[:, None]).squeeze(1) - norm
    with torch.no_grad():
        entropy = norm - (scaled * (scaled - norm[:, None]).exp()).sum(-1)
    return logprobs, entropy


def sum_by_row(values: Tensor, chosen: Tensor) -> Tensor:
    """Sums (B,) of `values` (N,), which stand row by row at the True places of `chosen` (B, T)."""
    return values.new_zeros(chosen.shape).masked_scatter(chosen, values).sum(1)
