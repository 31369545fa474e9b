"""The operations between two matrix products in bf16 training on a CPU: norms, rotations, gates, exponentials, and
their backward passes.

    unit          x / sqrt(mean(x^2) + eps)                       and 1 / rms for the backward pass
    fold          W diag(w)                                       matrices after a norm with weights w
    heads         queries and keys: norm, weights, rotation       RoPE (arXiv:2104.09864), the half-split form
    gated         silu(g) * u
    exponentials  e = exp(z - max z), s = sum e, losses log s + max z - z_t
    softmax       p = softmax(z / T), log sum exp(z / T), and p's entropy
    probabilities softmax(scores + mask)
    outer         a^T b, the gradient of a matrix
    add_rows      x[index] += rows, the gradient of a row lookup

Each operation exists twice: in C++ (primitives.cpp, if loaded by native.py), as one pass over memory that is 2 to 5
times faster, and as PyTorch operators over chunks of rows that fit in a core's L2 cache. Both compute in float32 and
return bf16, except `gated` in PyTorch, which is bf16 throughout because conversions would cost more than its operators.

Shapes: N tokens, D width, F outputs of a gate, H query heads, K key heads, J = H + K, h head size, V vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.model.cpu.native import call, loaded

BF16 = torch.bfloat16
AT_ONCE = 2**18  # elements in a chunk of rows
PAYS_TO_TURN = 2**29  # number of multiplications in a product above which transposing one side pays off


def _chunks(x: Tensor) -> Iterator[slice]:
    """Chunks of the rows of x (N, ...), small enough for a core's cache."""
    size = max(1, AT_ONCE * len(x) // max(1, x.numel()))
    return (slice(begin, begin + size) for begin in range(0, len(x), size))


# -- norms -------------------------------------------------------------------------------------------------------------


def unit(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x (N, D) in float32 -> x / rms(x) in bf16, and 1 / rms(x), (N, 1)."""
    whole, scale = torch.empty(x.shape, dtype=BF16), x.new_empty(len(x), 1)
    if loaded():
        call("unit", x, whole, scale, *x.shape, eps)
        return whole, scale
    for rows in _chunks(x):
        scale[rows] = _inverse_norm(x[rows], eps)
        whole[rows] = x[rows] * scale[rows]
    return whole, scale


def unit_back(grad: Tensor, whole: Tensor, scale: Tensor) -> Tensor:
    """The gradient of x (N, D) in float32 from the gradient of `unit`'s result in bf16."""
    result = torch.empty(grad.shape)
    if loaded():
        call("unit_back", grad, whole, scale, result, *grad.shape)
        return result
    for rows in _chunks(grad):
        result[rows] = _norm_back(grad[rows].float(), whole[rows].float(), scale[rows])
    return result


def _inverse_norm(x: Tensor, eps: float) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _norm_back(grad: Tensor, whole: Tensor, scale: Tensor) -> Tensor:
    """The gradient of a norm's input; overwrites `grad`."""
    along = torch.linalg.vecdot(grad, whole).div_(-whole.shape[-1]).unsqueeze(-1)
    return grad.addcmul_(whole, along).mul_(scale)


def fold(weight: Tensor, *matrices: Tensor) -> Tensor:
    """Each matrix (F_i, D) times weight (D,), concatenated in bf16: (sum F_i, D)."""
    if not loaded():
        return torch.cat([matrix * weight for matrix in matrices]).to(BF16)
    result = torch.empty(sum(map(len, matrices)), len(weight), dtype=BF16)
    begin = 0
    for matrix in matrices:
        call("fold", matrix.detach().float(), weight.detach(), result[begin:], *matrix.shape)
        begin += len(matrix)
    return result


def unfold(part: Tensor, weight: Tensor, *matrices: Tensor) -> tuple[list[Tensor], Tensor]:
    """The gradients of the matrices and of the weight, in float32, from the gradient of `fold`'s result (sum F_i, D)
    in bf16.
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
        call("unfold", part[begin:], matrix.float(), weight, result, sums, *matrix.shape)
        begin += len(matrix)
    return results, shares.sum((0, 1))


# -- gradients of matrices ---------------------------------------------------------------------------------------------


def outer(left: Tensor, right: Tensor) -> Tensor:
    """left^T right of (N, A) and (N, B): (A, B).

    On a CPU in bf16, oneDNN is two to three times slower with a transposed left side. If one side is at most half as
    wide as the other and the product is large, it is faster to transpose that side first and, if it was the right side,
    the result as well.
    """
    narrow, broad = sorted((left.shape[1], right.shape[1]))
    slow = left.device.type == "cpu" and left.dtype == BF16
    if not slow or broad < 2 * narrow or narrow * broad * len(left) < PAYS_TO_TURN:
        return torch.mm(left.t(), right)
    if left.shape[1] == narrow:
        return torch.mm(left.t().contiguous(), right)
    return torch.mm(right.t().contiguous(), left).t().contiguous()


def add_rows(total: Tensor, index: Tensor, rows: Tensor) -> None:
    """Add rows (m, w) in bf16 to the float32 rows of `total` (n, w) selected by `index` (m,), one by one."""
    if loaded():
        call("add_rows", total, index, rows, *rows.shape)
    else:
        total.index_add_(0, index, rows.to(total.dtype))


# -- queries and keys --------------------------------------------------------------------------------------------------


def heads(x: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, eps: float | None) -> tuple[Tensor, Tensor]:
    """The first J heads of x (N, J + K, h) in bf16, rotated: (N, J, h) in bf16, and 1 / rms of each, (N, J, 1).

    Before the rotation, heads are normed if there is an `eps` and multiplied by `weights` (J, h). `cos`, `sin`
    (N, 1, h/2) are in float32.
    """
    num = len(weights)
    rotated, scale = torch.empty(len(x), num, x.shape[2], dtype=BF16), torch.ones(len(x), num, 1)
    if loaded():
        sizes = *x.shape[:2], num, x.shape[2] // 2
        call("heads", x, weights, cos, sin, rotated, scale, *sizes, eps or 0.0, eps is not None)
        return rotated, scale
    for rows in _chunks(rotated):
        wide = x[rows, :num].float()
        if eps is not None:
            scale[rows] = _inverse_norm(wide, eps)
            wide.mul_(scale[rows])
        rotated[rows] = _rotate(wide.mul_(weights), cos[rows], sin[rows], 1.0)
    return rotated, scale


def heads_back(
    grad: Tensor, x: Tensor, scale: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, normed: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of x in bf16 and of weights (J, h) from those of the rotated heads and the values, (N, J + K, h) in
    float32.
    """
    num, result = len(weights), torch.empty_like(x)
    if loaded():
        shares = weights.new_empty(torch.get_num_threads(), *weights.shape)
        sizes = *x.shape[:2], num, x.shape[2] // 2
        call("heads_back", grad, x, scale, weights, cos, sin, result, shares, *sizes, normed)
        return result, shares.sum(0)
    of_weights = torch.zeros_like(weights)
    for rows in _chunks(x):
        back = _rotate(grad[rows, :num], cos[rows], sin[rows], -1.0)
        whole = x[rows, :num] * scale[rows]
        of_weights += (back * whole).sum(0)
        back.mul_(weights)
        result[rows, :num] = _norm_back(back, whole, scale[rows]) if normed else back
        result[rows, num:] = grad[rows, num:]
    return result, of_weights


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Rotation of float32 heads by `sign` times the angle."""
    rotated = torch.empty(x.shape)
    (first, second), (left, right) = x.chunk(2, dim=-1), rotated.chunk(2, dim=-1)
    torch.mul(first, cos, out=left).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=right).addcmul_(first, sin, value=sign)
    return rotated


# -- SwiGLU ------------------------------------------------------------------------------------------------------------


def gated(x: Tensor) -> Tensor:
    """silu(g) * u of x = (g, u) side by side, in bf16: (N, 2F) -> (N, F)."""
    if loaded():
        result = x.new_empty(len(x), x.shape[1] // 2)
        call("gated", x, result, *result.shape)
        return result
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def gated_back(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x (N, 2F) from the gradient of `gated`'s result (N, F), both in bf16."""
    result = torch.empty_like(x)
    if loaded():
        call("gated_back", grad, x, result, *grad.shape)
        return result
    (gate, up), (left, right) = x.chunk(2, dim=-1), result.chunk(2, dim=-1)
    torch.mul(functional.silu(gate), grad, out=right)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=left)
    return result


# -- the head ----------------------------------------------------------------------------------------------------------


def exponentials(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """e (n, V), which overwrites the logits, s (n, 1), and the sum of the losses; the last two in at least float32.

    There may be fewer targets than rows: rows without a target get zeros and the sum 1.
    """
    if loaded() and logits.dtype == BF16 and logits.device.type == "cpu":
        if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < logits.shape[1]:
            raise IndexError(
                f"expected targets from 0 to {logits.shape[1] - 1}, got {int(targets.min())} to {int(targets.max())}"
            )
        sums, losses = torch.empty(len(logits), 1), torch.empty(len(logits), dtype=torch.float64)
        call("exponentials", logits, targets, sums, losses, *logits.shape, len(targets))
        return logits, sums, losses.sum().float()
    wide_type = torch.promote_types(logits.dtype, torch.float32)
    sums = torch.ones(len(logits), 1, dtype=wide_type, device=logits.device)
    total = sums.new_zeros(())
    size = max(1, AT_ONCE // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(targets))
    for rows in (slice(begin, begin + size) for begin in range(0, len(targets), size)):
        chunk = targets[rows]
        wide = logits[rows][: len(chunk)].to(wide_type)
        largest, target_logits = wide.amax(-1, keepdim=True), wide.gather(1, chunk[:, None])
        chunk_sums = sums[rows][: len(chunk)]
        torch.sum(wide.sub_(largest).exp_(), -1, keepdim=True, out=chunk_sums)
        total += (chunk_sums.log() + largest - target_logits).sum()
        if wide.dtype != logits.dtype:
            logits[rows][: len(chunk)] = wide
    logits[len(targets) :] = 0
    return logits, sums, total


# -- the next token ---------------------------------------------------------------------------------------------------


def chooses(logits: Tensor) -> bool:
    """Whether `choose`, which exists only in C++, supports these logits. See generation/sampling.py for PyTorch's."""
    return loaded() and logits.device.type == "cpu" and logits.dtype in (BF16, torch.float32)


def choose(
    logits: Tensor, numbers: Tensor | None, temperature: float, top_p: float, top_k: int
) -> tuple[Tensor, Tensor]:
    """Tokens (n,) and their float64 log-probabilities (n,) from logits (n, V); see generation/sampling.py."""
    tokens, logprobs = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits), dtype=torch.float64)
    shares = None if numbers is None else numbers.double().contiguous()
    given = logits.contiguous(), shares, tokens, logprobs, *logits.shape
    call("choose_bf16" if logits.dtype == BF16 else "choose_fp32", *given, float(temperature), float(top_p), top_k)
    return tokens, logprobs


def softmax(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(z / T), which overwrites the logits (n, V), and log sum exp(z / T) and the entropy of each row, (n,) in
    at least float32.
    """
    wide_type = torch.promote_types(logits.dtype, torch.float32)
    norms, entropies = (torch.empty(len(logits), dtype=wide_type, device=logits.device) for _ in range(2))
    if loaded() and logits.dtype == BF16 and logits.device.type == "cpu":
        call("softmax", logits, norms, entropies, *logits.shape, temperature)
        return logits, norms, entropies
    for rows in _chunks(logits) if logits.device.type == "cpu" else (slice(None),):
        wide = logits[rows].to(wide_type) / temperature
        largest = wide.amax(-1, keepdim=True)
        shares = wide.sub_(largest).exp()
        sums = shares.sum(-1, keepdim=True)
        logarithms = sums.log().squeeze(-1)
        norms[rows] = logarithms + largest.squeeze(-1)
        entropies[rows] = logarithms - torch.linalg.vecdot(shares.div_(sums), wide)
        logits[rows] = shares
    return logits, norms, entropies


# -- attention ---------------------------------------------------------------------------------------------------------


def probabilities(scores: Tensor, mask: Tensor) -> Tensor:
    """softmax(scores + mask) in bf16. Overwrites the scores (m, K, 128, G, S); the mask (m, 1, 128, 1, c) applies to
    the last c keys.
    """
    if loaded():
        call("probabilities", scores, mask, *scores.shape, mask.shape[-1])
        return scores
    scores[..., scores.shape[-1] - mask.shape[-1] :].add_(mask)
    return torch.softmax(scores, dim=-1)
