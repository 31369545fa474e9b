"""What stands between two matrix products in training in bf16 on a CPU: norms, rotations, gates, exponentials, and
back.

    unit          x / sqrt(mean(x^2) + eps)                       its root's inverse is kept for the way back
    fold          W diag(w)                                       what stands behind a norm with weights w
    heads         queries and keys: norm, weights, rotation       RoPE (arXiv:2104.09864), the half-split form
    gated         silu(g) * u
    exponentials  e = exp(z - max z), s = sum e, losses log s + max z - z_t
    probabilities softmax(scores + mask)
    outer         a^T b, the gradient of a matrix

Each exists twice: in C++ (primitives.cpp), one pass over memory, 2 to 5 times as fast, where native.py has been told to
load it; and as PyTorch's operators one by one, over pieces of rows that a core's second-level cache holds. Both compute
in float32 and give bf16, but PyTorch's `gated`, which is in bf16 throughout: there converting costs more than the
operators do.

Shapes: N tokens, D width, F outputs of a gate, H query heads, K key heads, J = H + K, h head size, V vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.model.cpu.native import call, loaded

BF16 = torch.bfloat16
AT_ONCE = 2**18  # numbers of a piece
PAYS_TO_TURN = 2**29  # multiplications of a product


def _rows(x: Tensor) -> Iterator[slice]:
    """Rows of x (N, ...), so many at once as a core's cache holds."""
    size = max(1, AT_ONCE * len(x) // max(1, x.numel()))
    return (slice(begin, begin + size) for begin in range(0, len(x), size))


# norms


def unit(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x (N, D) in float32 -> x / rms(x) in bf16, and 1 / rms(x), (N, 1)."""
    whole, scale = torch.empty(x.shape, dtype=BF16), x.new_empty(len(x), 1)
    if loaded():
        call("unit", x, whole, scale, *x.shape, eps)
        return whole, scale
    for rows in _rows(x):
        scale[rows] = _inverse_norm(x[rows], eps)
        whole[rows] = x[rows] * scale[rows]
    return whole, scale


def unit_back(grad: Tensor, whole: Tensor, scale: Tensor) -> Tensor:
    """From the gradient of `unit`'s result in bf16 to that of x (N, D) in float32."""
    result = torch.empty(grad.shape)
    if loaded():
        call("unit_back", grad, whole, scale, result, *grad.shape)
        return result
    for rows in _rows(grad):
        result[rows] = _norm_back(grad[rows].float(), whole[rows].float(), scale[rows])
    return result


def _inverse_norm(x: Tensor, eps: float) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _norm_back(grad: Tensor, whole: Tensor, scale: Tensor) -> Tensor:
    """The same in the place of `grad`."""
    along = torch.linalg.vecdot(grad, whole).div_(-whole.shape[-1]).unsqueeze(-1)
    return grad.addcmul_(whole, along).mul_(scale)


def fold(weight: Tensor, *matrices: Tensor) -> Tensor:
    """Each matrix (F_i, D) times weight (D,), one below the other in bf16: (sum F_i, D)."""
    if not loaded():
        return torch.cat([matrix * weight for matrix in matrices]).to(BF16)
    result = torch.empty(sum(map(len, matrices)), len(weight), dtype=BF16)
    begin = 0
    for matrix in matrices:
        call("fold", matrix.detach(), weight.detach(), result[begin:], *matrix.shape)
        begin += len(matrix)
    return result


def unfold(part: Tensor, weight: Tensor, *matrices: Tensor) -> tuple[list[Tensor], Tensor]:
    """From the gradient (sum F_i, D) of `fold`'s result in bf16 to those of the matrices and of the weight, in
    float32.
    """
    if not loaded():
        folded = list(part.float().split([len(matrix) for matrix in matrices]))
        of_weight = torch.zeros_like(weight)
        for grad, matrix in zip(folded, matrices, strict=True):
            of_weight += (grad * matrix).sum(0)
            grad.mul_(weight)
        return folded, of_weight
    results = [torch.empty(matrix.shape) for matrix in matrices]
    shares = weight.new_empty(len(matrices), torch.get_num_threads(), len(weight))
    begin = 0
    for matrix, result, sums in zip(matrices, results, shares, strict=True):
        call("unfold", part[begin:], matrix, weight, result, sums, *matrix.shape)
        begin += len(matrix)
    return results, shares.sum((0, 1))


# gradients of matrices


def outer(left: Tensor, right: Tensor) -> Tensor:
    """left^T right of (N, A) and (N, B): (A, B).

    On a CPU in bf16 oneDNN reads a transposed left side two to three times as slowly as a plain one. Where one side is
    at most half as wide as the other and the product is large, transposing that side first, and the result too if it
    was the right one, is less work.
    """
    narrow, broad = sorted((left.shape[1], right.shape[1]))
    slow = left.device.type == "cpu" and left.dtype == BF16
    if not slow or broad < 2 * narrow or narrow * broad * len(left) < PAYS_TO_TURN:
        return torch.mm(left.t(), right)
    if left.shape[1] == narrow:
        return torch.mm(left.t().contiguous(), right)
    return torch.mm(right.t().contiguous(), left).t().contiguous()


# queries and keys


def heads(x: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, eps: float | None) -> tuple[Tensor, Tensor]:
    """The first J heads of x (N, J + K, h) in bf16, turned: (N, J, h) in bf16, and 1 / rms of each, (N, J, 1).

    They are multiplied by `weights` (J, h), and normed before that if there is an `eps`. `cos`, `sin` (N, 1, h/2) in
    float32.
    """
    num = len(weights)
    turned, scale = torch.empty(len(x), num, x.shape[2], dtype=BF16), torch.ones(len(x), num, 1)
    if loaded():
        sizes = *x.shape[:2], num, x.shape[2] // 2
        call("heads", x, weights, cos, sin, turned, scale, *sizes, eps or 0.0, eps is not None)
        return turned, scale
    for rows in _rows(turned):
        wide = x[rows, :num].float()
        if eps is not None:
            scale[rows] = _inverse_norm(wide, eps)
            wide.mul_(scale[rows])
        turned[rows] = _turn(wide.mul_(weights), cos[rows], sin[rows], 1.0)
    return turned, scale


def heads_back(
    grad: Tensor, x: Tensor, scale: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, normed: bool
) -> tuple[Tensor, Tensor]:
    """From the gradients (N, J + K, h), in float32, of turned heads and of values, to those of x in bf16 and of
    weights (J, h).
    """
    num, result = len(weights), torch.empty_like(x)
    if loaded():
        shares = weights.new_empty(torch.get_num_threads(), *weights.shape)
        sizes = *x.shape[:2], num, x.shape[2] // 2
        call("heads_back", grad, x, scale, weights, cos, sin, result, shares, *sizes, normed)
        return result, shares.sum(0)
    of_weights = torch.zeros_like(weights)
    for rows in _rows(x):
        back = _turn(grad[rows, :num], cos[rows], sin[rows], -1.0)
        whole = x[rows, :num] * scale[rows]
        of_weights += (back * whole).sum(0)
        back.mul_(weights)
        result[rows, :num] = _norm_back(back, whole, scale[rows]) if normed else back
        result[rows, num:] = grad[rows, num:]
    return result, of_weights


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
    if loaded():
        result = x.new_empty(len(x), x.shape[1] // 2)
        call("gated", x, result, *result.shape)
        return result
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def gated_back(grad: Tensor, x: Tensor) -> Tensor:
    """From the gradient (N, F) of `gated`'s result to that of x (N, 2F), both in bf16."""
    result = torch.empty_like(x)
    if loaded():
        call("gated_back", grad, x, result, *grad.shape)
        return result
    (gate, up), (left, right) = x.chunk(2, dim=-1), result.chunk(2, dim=-1)
    torch.mul(functional.silu(gate), grad, out=right)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=left)
    return result


# the head


def exponentials(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """e (n, V) like the logits, which are lost, s (n, 1), and the sum of the losses; the last two in float32 at least.

    There may be fewer targets than rows: the rows without one get zeros, and 1 as their sum.
    """
    if loaded() and logits.dtype == BF16 and logits.device.type == "cpu":
        if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < logits.shape[1]:
            raise IndexError(
                f"expected targets within 0 to {logits.shape[1] - 1}, got {int(targets.min())} to {int(targets.max())}"
            )
        sums, losses = torch.empty(len(logits), 1), torch.empty(len(logits), dtype=torch.float64)
        call("exponentials", logits, targets, sums, losses, *logits.shape, len(targets))
        return logits, sums, losses.sum().float()
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


# attention


def probabilities(scores: Tensor, mask: Tensor) -> Tensor:
    """softmax(scores + mask) in bf16, of scores (m, K, 128, G, S), which are lost, and the mask (m, 1, 128, 1, c) of
    the last keys.
    """
    if loaded():
        call("probabilities", scores, mask, *scores.shape, mask.shape[-1])
        return scores
    scores[..., scores.shape[-1] - mask.shape[-1] :].add_(mask)
    return torch.softmax(scores, dim=-1)


def _probabilities(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(scores.float() + mask, dim=-1).to(BF16)
