"""What stands between two matrix products in training in bf16 on a CPU: norms, rotations, gates, exponentials, and back.

    unit          x / sqrt(mean(x^2) + eps)                       its root's inverse is kept for the way back
    heads         queries and keys: norm, weights, rotation       RoPE (arXiv:2104.09864), the half-split form
    gated         silu(g) * u
    exponentials  e = exp(z - max z), s = sum e, losses log s + max z - z_t
    probabilities softmax(scores + mask)

Each exists twice. The plain formula, which `compile_pieces` hands to torch.compile: one pass over memory, 2 to 4 times as fast,
for half a minute of compiling (a C++ compiler is needed, so nothing relies on it). And PyTorch's operators one by one, over pieces of
rows that a core's second-level cache holds. Both compute in float32 and give bf16, but `gated`, which is in bf16 throughout where it is
not compiled: there converting costs more than the operators do.

Shapes: N tokens, D width, F outputs of a gate, H query heads, K key heads, J = H + K, h head size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

BF16 = torch.bfloat16
AT_ONCE = 2**18  # numbers of a piece

_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}


def compile_pieces() -> None:
    """From now on the plain formulas run, compiled on their first call. Needs what torch.compile needs."""
    for plain in (_unit, _unit_back, _heads, _heads_back, _gated, _gated_back, _exponentials, _probabilities):
        _compiled.setdefault(plain, _any_rows(torch.compile(plain)))


def run_eagerly() -> None:
    """From now on PyTorch's operators run again."""
    _compiled.clear()


def _any_rows(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """One compilation for every number of rows, so that what a step computes does not hang on the steps before it."""

    def run(x: Tensor, *others: Any) -> Any:
        for tensor in (x, *(y for y in others if isinstance(y, Tensor))):
            if len(tensor) == len(x):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(x, *others)

    return run


def _rows(x: Tensor) -> Iterator[slice]:
    """Rows of x (N, ...), so many at once as a core's cache holds."""
    size = max(1, AT_ONCE * len(x) // max(1, x.numel()))
    return (slice(begin, begin + size) for begin in range(0, len(x), size))


# norms


def unit(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x (N, D) in float32 -> x / rms(x) in bf16, and 1 / rms(x), (N, 1)."""
    if _unit in _compiled:
        return _compiled[_unit](x, eps)
    whole, scale = torch.empty(x.shape, dtype=BF16), x.new_empty(len(x), 1)
    for rows in _rows(x):
        scale[rows] = _inverse_norm(x[rows], eps)
        whole[rows] = x[rows] * scale[rows]
    return whole, scale


def _unit(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale).to(BF16), scale


def unit_back(grad: Tensor, whole: Tensor, scale: Tensor) -> Tensor:
    """From the gradient of `unit`'s result in bf16 to that of x (N, D) in float32."""
    if _unit_back in _compiled:
        return _compiled[_unit_back](grad, whole, scale)
    result = torch.empty(grad.shape)
    for rows in _rows(grad):
        result[rows] = _norm_back(grad[rows].float(), whole[rows].float(), scale[rows])
    return result


def _unit_back(grad: Tensor, whole: Tensor, scale: Tensor) -> Tensor:
    grad, whole = grad.float(), whole.float()
    return (grad - whole * (grad * whole).mean(-1, keepdim=True)) * scale


def _inverse_norm(x: Tensor, eps: float) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _norm_back(grad: Tensor, whole: Tensor, scale: Tensor) -> Tensor:
    """The same in the place of `grad`."""
    along = torch.linalg.vecdot(grad, whole).div_(-whole.shape[-1]).unsqueeze(-1)
    return grad.addcmul_(whole, along).mul_(scale)


# queries and keys


def heads(x: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, eps: float | None) -> tuple[Tensor, Tensor]:
    """The first J heads of x (N, J + K, h) in bf16, turned: (N, J, h) in bf16, and 1 / rms of each, (N, J, 1).

    They are multiplied by `weights` (J, h), and normed before that if there is an `eps`. `cos`, `sin` (N, 1, h/2) in float32.
    """
    if _heads in _compiled:
        return _compiled[_heads](x, weights, cos, sin, eps)
    num = len(weights)
    turned, scale = torch.empty(len(x), num, x.shape[2], dtype=BF16), torch.ones(len(x), num, 1)
    for rows in _rows(turned):
        wide = x[rows, :num].float()
        if eps is not None:
            scale[rows] = _inverse_norm(wide, eps)
            wide.mul_(scale[rows])
        turned[rows] = _turn(wide.mul_(weights), cos[rows], sin[rows], 1.0)
    return turned, scale


def _heads(x: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, eps: float | None) -> tuple[Tensor, Tensor]:
    wide = x[:, : len(weights)].float()
    scale = torch.ones_like(wide[..., :1])
    if eps is not None:
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    first, second = (wide * scale * weights).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(BF16), scale


def heads_back(
    grad: Tensor, x: Tensor, scale: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, normed: bool
) -> tuple[Tensor, Tensor]:
    """From the gradients (N, J + K, h), in float32, of turned heads and of values, to those of x in bf16 and of weights (J, h)."""
    if _heads_back in _compiled:
        return _compiled[_heads_back](grad, x, scale, weights, cos, sin, normed)
    num, of_weights, result = len(weights), torch.zeros_like(weights), torch.empty_like(x)
    for rows in _rows(x):
        back = _turn(grad[rows, :num], cos[rows], sin[rows], -1.0)
        whole = x[rows, :num] * scale[rows]
        of_weights += (back * whole).sum(0)
        back.mul_(weights)
        result[rows, :num] = _norm_back(back, whole, scale[rows]) if normed else back
        result[rows, num:] = grad[rows, num:]
    return result, of_weights


def _heads_back(
    grad: Tensor, x: Tensor, scale: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, normed: bool
) -> tuple[Tensor, Tensor]:
    num = len(weights)
    first, second = grad[:, :num].chunk(2, dim=-1)
    back = torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)
    whole = x[:, :num].float() * scale
    of_weights, back = (back * whole).sum(0), back * weights
    if normed:
        back = (back - whole * (back * whole).mean(-1, keepdim=True)) * scale
    return torch.cat((back, grad[:, num:]), dim=1).to(BF16), of_weights


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Rotation of float32 heads by `sign` times the angle."""
    turned = torch.empty(x.shape)
    (first, second), (left, right) = x.chunk(2, dim=-1), turned.chunk(2, dim=-1)
    torch.mul(first, cos, out=left).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=right).addcmul_(first, sin, value=sign)
    return turned


# SwiGLU


def gated(x: Tensor) -> Tensor:
    """silu(g) * u of x = (g, u) side by side, in bf16: (N, 2F) -> (N, F)."""
    if _gated in _compiled:
        return _compiled[_gated](x)
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def _gated(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(BF16)


def gated_back(grad: Tensor, x: Tensor) -> Tensor:
    """From the gradient (N, F) of `gated`'s result to that of x (N, 2F), both in bf16."""
    if _gated_back in _compiled:
        return _compiled[_gated_back](grad, x)
    result = torch.empty_like(x)
    (gate, up), (left, right) = x.chunk(2, dim=-1), result.chunk(2, dim=-1)
    torch.mul(functional.silu(gate), grad, out=right)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=left)
    return result


def _gated_back(grad: Tensor, x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    above, share = grad.float(), torch.sigmoid(gate)
    silu = gate * share
    return torch.cat(((share + silu * (1 - share)) * up * above, silu * above), dim=-1).to(BF16)


# the head


def exponentials(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """e (n, V) like the logits, which are lost, s (n, 1), and the sum of the losses; the last two in float32 at least.

    There may be fewer targets than rows: the rows without one get zeros, and 1 as their sum.
    """
    if _exponentials in _compiled and logits.dtype == BF16 and logits.device.type == "cpu":
        return _compiled[_exponentials](logits, functional.pad(targets, (0, len(logits) - len(targets)), value=-1))
    wide_type = torch.promote_types(logits.dtype, torch.float32)
    sums = torch.ones(len(logits), 1, dtype=wide_type, device=logits.device)
    total = sums.new_zeros(())
    size = max(1, AT_ONCE // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(targets))
    for rows in (slice(begin, begin + size) for begin in range(0, len(targets), size)):
        aims = targets[rows]
        wide = logits[rows][: len(aims)].to(wide_type)
        most, aimed = wide.amax(-1, keepdim=True), wide.gather(1, aims[:, None])
        own = sums[rows][: len(aims)]
        torch.sum(wide.sub_(most).exp_(), -1, keepdim=True, out=own)
        total += (own.log() + most - aimed).sum()
        if wide.dtype != logits.dtype:
            logits[rows][: len(aims)] = wide
    logits[len(targets) :] = 0
    return logits, sums, total


def _exponentials(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide, real = logits.float(), targets[:, None] >= 0
    most = wide.amax(-1, keepdim=True)
    e = torch.where(real, torch.exp(wide - most), 0.0)
    sums = torch.where(real, e.sum(-1, keepdim=True), 1.0)
    losses = sums.log() + most - wide.gather(1, targets[:, None].clamp(min=0))
    return e.to(BF16), sums, torch.where(real, losses, 0.0).sum()


# attention


def probabilities(scores: Tensor, mask: Tensor) -> Tensor:
    """softmax(scores + mask) in bf16, of scores (m, K, 128, G, S), which are lost, and the mask (m, 1, 128, 1, c) of the last keys."""
    if _probabilities in _compiled:
        return _compiled[_probabilities](scores, functional.pad(mask, (scores.shape[-1] - mask.shape[-1], 0)))
    scores[..., scores.shape[-1] - mask.shape[-1] :].add_(mask)
    return torch.softmax(scores, dim=-1)


def _probabilities(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(scores.float() + mask, dim=-1).to(BF16)
