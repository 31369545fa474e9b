"""The loss interface of the training loop, cross-entropy, and exact log-probabilities of autoregressive models.

A loss is a list of terms c_k * S_k / G_k, with sums S and counts G over all micro-batches and ranks, so gradient
accumulation and uneven ranks do not change it. A loss function returns sums; the loop divides once. `per` names the
count, which is available before the forward pass (`counts`). A term with G = 0 drops out.

Log-probabilities are per token. The head runs only on the selected positions: with a vocabulary of 4,096 and a width of
192 it accounts for a third of all multiplications, and in tool dialogues two thirds of the positions are prompts.

See `pair_losses.py` for reward models and the DPO family, and `policy_losses.py` for clipped policy gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import pad

from pipeline.batches.batch import Tokens
from pipeline.model.cpu.primitives import exponentials, outer, softmax

R = TypeVar("R")  # the result computed from hidden states: one loss or several
EVEN_ROWS = 128  # half-precision matmuls get a multiple of this many rows
MOST_LOGITS = 2**23  # in memory at once between two matmuls


@dataclass(frozen=True)
class Term:
    """One part of a loss: coefficient * sum / count."""

    name: str
    sum: Tensor  # scalar, with a gradient
    per: str = "tokens"  # the batch count that divides the sum
    coefficient: float = 1.0


@dataclass(frozen=True)
class Loss:
    """Terms to minimize, and metrics to log."""

    terms: list[Term]
    metrics: dict[str, tuple[Tensor, int]] = field(default_factory=dict)  # name -> (sum, count)
    extremes: dict[str, Tensor] = field(default_factory=dict)  # minimum if the name has "min", else maximum
    limits: dict[str, float] = field(default_factory=dict)  # metric -> upper limit of its mean over the entire step


def next_token(hidden: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats of softmax(hidden table^T), summed over the N trained positions: a scalar in float32.

    hidden (N, D), the head matrix `table` (V, D), targets (N,). Matmuls run in autocast precision, everything else in
    float32: with a large vocabulary, the softmax of bf16 logits loses the small probabilities. At most 2^23 logits
    exist at once (the idea of Wijmans et al. 2024, arXiv:2411.09009): their gradient is computed together with the
    loss, so none are kept.
    """
    return _NextToken.apply(hidden, table, targets)  # pyright: ignore[reportReturnType]


class _Context(Protocol):
    """Autograd context of the functions below: torch's, plus the input dtypes."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]
    dtypes: tuple[torch.dtype, ...]
    temperature: float
    rows: int

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


class _NextToken(Function):
    """With e = exp(z - max z) and s its sum: loss = log s + max z - z_t, dh = (e W) / s - W_t, dW = e^T (h / s) -
    sum h at t.
    """

    @staticmethod
    def forward(ctx: _Context, hidden: Tensor, table: Tensor, targets: Tensor) -> Tensor:
        half = _precision(hidden)
        wide = torch.promote_types(half, torch.float32)
        head, states = table.to(half), _even_rows(hidden.to(half))
        needs_states, needs_head = ctx.needs_input_grad[:2]
        grad_states = hidden.new_empty(states.shape, dtype=wide) if needs_states else None
        grad_head: Tensor | None = None
        total = hidden.new_zeros((), dtype=wide)
        size = max(EVEN_ROWS, MOST_LOGITS // len(table))
        for rows in (slice(start, start + size) for start in range(0, len(states), size)):
            logits, row_targets = torch.mm(states[rows], head.t()), targets[rows]
            logits, sums, losses = exponentials(logits, row_targets)  # exp(logits - max), in place
            total += losses
            if grad_states is not None:
                grad_states[rows] = torch.mm(logits, head).to(wide).div_(sums)
                grad_states[rows][: len(row_targets)] -= head.index_select(0, row_targets)
            if needs_head:
                part = outer(logits, (states[rows] / sums).to(half))
                grad_head = part.to(wide) if grad_head is None else grad_head.add_(part)
                grad_head.index_add_(0, row_targets, states[rows][: len(row_targets)].to(wide), alpha=-1)
        if needs_head and grad_head is None:  # nothing to predict
            grad_head = table.new_zeros(table.shape, dtype=wide)
        ctx.save_for_backward(None if grad_states is None else grad_states[: len(hidden)], grad_head)
        ctx.dtypes = hidden.dtype, table.dtype
        return total

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_states, grad_head = (
            None if x is None else (x * grad).to(dtype) for x, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return grad_states, grad_head, None


def _even_rows(x: Tensor) -> Tensor:
    """Pad half-precision rows on a CPU: oneDNN compiles a kernel for each new number of rows."""
    if x.device.type != "cpu" or x.dtype in (torch.float32, torch.float64):
        return x
    return pad(x, (0, 0, 0, -len(x) % EVEN_ROWS))


def _precision(x: Tensor) -> torch.dtype:
    """The matmul dtype: autocast's, if enabled."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else x.dtype


# -- log-probabilities -------------------------------------------------------------------------------------------------


def trained_logits(model: nn.Module, batch: Tokens) -> tuple[Tensor, Tensor]:
    """Logits (N, V) and targets (N,) at the N trained positions of the batch, row by row."""
    chosen = batch.targets >= 0  # (B, T)
    logits = model(batch.input_ids, positions=batch.positions, documents=batch.documents, select=chosen)
    return logits, batch.targets[chosen]


def read_out(model: nn.Module, batch: Tokens, loss: Callable[[Tensor, Tensor, Tensor], R], reading: object = None) -> R:
    """Apply `loss` to the hidden states (N, D) at the N trained positions, the head matrix (V, D) and targets (N,).

    `reading` is passed to the model's hook (model/layers.py). The loss replaces the head inside the model's forward
    pass, so a loss that computes logits in chunks never materializes all of them.
    """
    chosen = batch.targets >= 0
    targets = batch.targets[chosen]
    options = {} if reading is None else {"reading": reading}

    def head(states: Tensor, table: Tensor, index: Tensor | None) -> R:
        return loss(states if index is None else states.index_select(0, index), table, targets)

    return model(
        batch.input_ids, positions=batch.positions, documents=batch.documents, select=chosen, head=head, **options
    )


def token_logprobs(model: nn.Module, batch: Tokens, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities (N,) of the trained targets at `temperature` with gradients, and entropies (N,) without.

    float32, in nats, row by row: log softmax(z / T)[target]. Logits shared by several rows are computed once.
    """
    chosen = batch.targets >= 0
    head = _logprobs_head(batch.targets[chosen], temperature)
    return model(batch.input_ids, positions=batch.positions, documents=batch.documents, select=chosen, head=head)


def actor_critic(model: nn.Module, batch: Tokens, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """`token_logprobs` of the actor, and the critic's values (N,) of the states before each token."""
    chosen = batch.targets >= 0
    head = _logprobs_head(batch.targets[chosen], temperature)
    (logprobs, entropy), values = model(
        batch.input_ids, positions=batch.positions, documents=batch.documents, select=chosen, head=head
    )
    return logprobs, entropy, values


def _logprobs_head(
    targets: Tensor, temperature: float
) -> Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]:
    def head(states: Tensor, table: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
        index = torch.arange(len(targets), device=targets.device) if index is None else index
        return _TargetLogprobs.apply(states, table, targets, index, temperature)  # pyright: ignore[reportReturnType]

    return head


class _TargetLogprobs(Function):
    """With p = softmax(z / T): l = log p_t; dz = (dl at t - p sum dl) / T. A state may have several targets.

    The matmul runs in autocast precision, in which p is also stored. At the targets dz is computed in float32: the
    gradient there is 1 - p_t, and a sharp policy's p_t would round to 1.
    """

    @staticmethod
    def forward(
        ctx: _Context, hidden: Tensor, table: Tensor, targets: Tensor, index: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        half = _precision(hidden)
        head, states = table.to(half), _even_rows(hidden.to(half))
        logprobs = hidden.new_empty(len(targets), dtype=torch.promote_types(half, torch.float32))
        entropies = torch.empty_like(logprobs)
        order = index.argsort(stable=True)
        size = max(EVEN_ROWS, MOST_LOGITS // len(table))
        firsts = range(0, len(states), size)
        bounds = torch.searchsorted(index[order], torch.tensor([*firsts, len(states)], device=index.device)).tolist()
        kept: list[Tensor] = []
        for first, (begin, end) in zip(firsts, pairwise(bounds), strict=True):
            logits = torch.mm(states[first : first + size], head.t())
            mine = order[begin:end]
            rows, columns = index[mine] - first, targets[mine]
            target_logits = logits[rows, columns].to(logprobs.dtype) / temperature
            probabilities, norms, of_rows = softmax(logits, temperature)  # in place
            logprobs[mine] = target_logits - norms[rows]
            entropies[mine] = of_rows[rows]
            kept.append(probabilities)
        if any(ctx.needs_input_grad[:2]):
            ctx.save_for_backward(states, head, targets, index, logprobs, *kept)
        ctx.dtypes, ctx.temperature, ctx.rows = (hidden.dtype, table.dtype), temperature, len(hidden)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: _Context, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        states, head, targets, index, logprobs, *kept = ctx.saved_tensors
        grad = grad / ctx.temperature
        sums = grad.new_zeros(len(states)).index_add_(0, index, grad)  # (U,) over the targets of a state
        places, place_of = (index * len(head) + targets).unique(return_inverse=True)  # indices of targets in the logits
        of_targets = grad.new_zeros(len(places)).index_add_(0, place_of, grad)
        of_targets[place_of] -= sums[index] * logprobs.exp()  # equal for equal targets
        size = len(kept[0]) if kept else 1
        bounds = torch.searchsorted(places, torch.arange(0, len(kept) + 1, device=places.device) * size * len(head))
        grad_states = torch.empty(states.shape, dtype=grad.dtype, device=grad.device)
        grad_head = grad.new_zeros(head.shape) if ctx.needs_input_grad[1] else None
        for number, (begin, end) in enumerate(pairwise(bounds.tolist())):
            rows = slice(number * size, number * size + len(kept[number]))
            grad_logits = kept[number] * -sums[rows, None].to(kept[number].dtype)
            grad_logits.view(-1)[places[begin:end] - number * size * len(head)] = of_targets[begin:end].to(head.dtype)
            grad_states[rows] = torch.mm(grad_logits, head).to(grad.dtype)
            if grad_head is not None:
                grad_head += outer(grad_logits, states[rows])
        of_states, of_head = ctx.dtypes
        return (
            grad_states[: ctx.rows].to(of_states),
            None if grad_head is None else grad_head.to(of_head),
            None,
            None,
            None,
        )


def target_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """`token_logprobs`, computed from logits (N, V) and their targets (N,)."""
    scaled = logits.float() / temperature
    norm = scaled.logsumexp(-1)  # (N,)
    logprobs = scaled.gather(1, targets[:, None]).squeeze(1) - norm
    with torch.no_grad():
        entropy = norm - (scaled * (scaled - norm[:, None]).exp()).sum(-1)
    return logprobs, entropy


def sum_by_row(values: Tensor, chosen: Tensor) -> Tensor:
    """Sums (B,) of `values` (N,), which fill the True positions of `chosen` (B, T) row by row."""
    return values.new_zeros(chosen.shape).masked_scatter(chosen, values).sum(1)
