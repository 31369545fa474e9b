"""Training in bf16 on a CPU: the parts of a block with their backward passes written by hand.

PyTorch's own operators, run one by one under autocast, spend most of a small model's step outside of its matrix products: in
conversions, in norms, and in attention, whose fused kernel has a backward pass several times as long as these batched products.
Here a part is one autograd function, in few passes over pieces of rows that fit a core's second-level cache:

    normed_product    unit(x) (W diag w)^T    RMSNorm (arXiv:1910.07467), its weight folded into the matrices behind it
    product           x W^T
    attention         RMSNorm of each head, RoPE (arXiv:2104.09864), attention within documents (tiles.py)
    gated             silu(g) * u             SwiGLU (arXiv:2002.05202)

Sums, norms and angles are float32; what stands between two products is bf16, as under autocast. Gradients of weights are float32.
Not for inference: without gradients a model keeps the operations of `kernels.py`. No second derivatives.

Shapes: N tokens, D width, F outputs, H query heads, K key heads, h head size.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from pipeline.model import tiles

BF16 = torch.bfloat16
AT_ONCE = 2**17  # numbers of a piece


def trains_in_bf16(x: Tensor) -> bool:
    """Whether this pass keeps gradients, under autocast to bf16, on a CPU; `torch.compile` fuses plain formulas itself."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and torch.is_grad_enabled()
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == BF16
        and not torch.compiler.is_compiling()
    )


def normed_product(x: Tensor, weight: Tensor, eps: float, *matrices: Tensor) -> Tensor:
    """rms_norm(x) times each matrix (F_i, D), side by side: (N, D) -> (N, sum F_i) in bf16."""
    return _NormedProduct.apply(x, weight, eps, *matrices)  # pyright: ignore[reportReturnType]


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """x W^T for x (N, D) in bf16 and W (F, D): (N, F) in float32, what is added to the stream."""
    return _Product.apply(x, matrix)  # pyright: ignore[reportReturnType]


def attention(
    x: Tensor, cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float, heads: int, plan: tiles.Plan
) -> Tensor:
    """Queries, keys and values side by side, (N, H + 2K, h) in bf16 -> (N, H * h) in bf16.

    `norms` are the weights (h,) of the norms of queries and keys, if there are any; `cos`, `sin` (N, 1, h/2) in float32. Queries and
    keys, and these weights, come `interleaved`: then a rotation is one complex product instead of four real ones.
    """
    queries, keys = norms or (None, None)
    return _Attention.apply(x, cos, sin, queries, keys, eps, heads, plan)  # pyright: ignore[reportReturnType]


def interleaved(weight: Tensor, size: int) -> Tensor:
    """Rows of heads of `size` as pairs (i, i + size/2) side by side: the order in which `attention` wants queries and keys."""
    return weight.unflatten(0, (-1, 2, size // 2)).transpose(1, 2).reshape(weight.shape)


def gated(x: Tensor) -> Tensor:
    """silu(g) * u of x = (g, u) side by side: (N, 2F) -> (N, F) in bf16."""
    return _Gated.apply(x)  # pyright: ignore[reportReturnType]


def _pieces(x: Tensor) -> Iterator[slice]:
    """Rows of x (N, ...), so many at once as a core's cache holds."""
    size = max(1, AT_ONCE * len(x) // max(1, x.numel()))
    return (slice(begin, begin + size) for begin in range(0, len(x), size))


def _inverse_norm(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, (..., 1)."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _unit_backward(grad: Tensor, unit: Tensor, scale: Tensor) -> Tensor:
    """Gradient of x where unit = x * scale(x), in the place of `grad`."""
    along = torch.linalg.vecdot(grad, unit).div_(-unit.shape[-1]).unsqueeze(-1)
    return grad.addcmul_(unit, along).mul_(scale)


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor) -> Tensor:
        half = matrix.to(BF16)
        ctx.save_for_backward(x, half)
        ctx.dtype = matrix.dtype
        return torch.mm(x, half.t()).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, half = ctx.saved_tensors
        grad = grad.to(BF16)
        return torch.mm(grad, half), torch.mm(grad.t(), x).to(ctx.dtype) if ctx.needs_input_grad[1] else None


class _NormedProduct(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, *matrices: Tensor) -> Tensor:
        unit, scale = torch.empty(x.shape, dtype=BF16), x.new_empty(len(x), 1)
        for rows in _pieces(x):
            scale[rows] = _inverse_norm(x[rows], eps)
            unit[rows] = x[rows] * scale[rows]
        half = torch.cat([matrix * weight for matrix in matrices]).to(BF16)  # (sum F_i, D)
        ctx.save_for_backward(unit, scale, half, weight, *matrices)
        return torch.mm(unit, half.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        unit, scale, half, weight, *matrices = ctx.saved_tensors
        grad_unit = torch.mm(grad, half)
        grad_x = torch.empty(unit.shape)
        for rows in _pieces(unit):
            grad_x[rows] = _unit_backward(grad_unit[rows].float(), unit[rows].float(), scale[rows])
        if not any(ctx.needs_input_grad[1:]):
            return grad_x, *[None] * (2 + len(matrices))
        folded = torch.mm(grad.t(), unit).float().split([len(matrix) for matrix in matrices])  # of W diag w
        grad_weight = torch.zeros_like(weight)
        for part, matrix in zip(folded, matrices, strict=True):
            grad_weight += (part * matrix).sum(0)
            part.mul_(weight)
        return grad_x, grad_weight, None, *folded


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, queries: Tensor | None, keys: Tensor | None, eps: float,
        heads: int, plan: tiles.Plan,
    ) -> Tensor:  # fmt: skip
        tokens, both = len(x), (x.shape[1] + heads) // 2
        scale = None if queries is None else torch.empty(tokens, both, 1)
        weights = _weights(queries, keys, heads, both, x.shape[2])
        turned = torch.empty(tokens, both, x.shape[2], dtype=BF16)
        for rows in _pieces(turned):
            wide = x[rows, :both].float()
            if scale is not None:
                scale[rows] = _inverse_norm(wide, eps)
                wide.mul_(scale[rows])
            turned[rows] = _turn(wide.mul_(weights), cos[rows], sin[rows], 1.0)
        out, kept = tiles.forward(turned[:, :heads], turned[:, heads:], x[:, both:], plan)
        ctx.save_for_backward(x, cos, sin, queries, keys, scale, out, *kept)
        ctx.heads, ctx.plan = heads, plan
        return out[:tokens].flatten(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, cos, sin, queries, keys, scale, out, *kept = ctx.saved_tensors
        heads, both = ctx.heads, (x.shape[1] + ctx.heads) // 2
        wide = tiles.backward(grad.view(len(x), heads, x.shape[2]), out, kept, ctx.plan, x.shape[1] - both)
        weights = _weights(queries, keys, heads, both, x.shape[2])
        of_weights = torch.zeros(both, x.shape[2])
        result = torch.empty_like(x)
        for rows in _pieces(x):
            back = _turn(wide[rows, :both], cos[rows], sin[rows], -1.0)
            if scale is None:
                result[rows, :both] = back.mul_(weights)
            else:
                unit = x[rows, :both] * scale[rows]
                of_weights += (back * unit).sum(0)
                result[rows, :both] = _unit_backward(back.mul_(weights), unit, scale[rows])
            result[rows, both:] = wide[rows, both:]
        if scale is None:
            return result, *[None] * 7
        of_queries = of_weights[:heads].sum(0).mul_(x.shape[2] ** -0.5)
        return result, None, None, of_queries, of_weights[heads:].sum(0), None, None, None


def _weights(queries: Tensor | None, keys: Tensor | None, heads: int, both: int, size: int) -> Tensor:
    """By what queries and keys are multiplied before they are turned, (H + K, h): the norms' weights, queries by h^-0.5 too."""
    weights = torch.ones(both, size)
    if queries is not None and keys is not None:
        weights[:heads], weights[heads:] = queries, keys
    weights[:heads] *= size**-0.5
    return weights


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Rotation of interleaved float32 heads by `sign` times the angle."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.complex(cos, sign * sin)).flatten(-2)


class _Gated(Function):
    """In bf16 throughout, as under autocast: its operators round once each, and converting costs more than they do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        result = torch.empty_like(x)
        for rows in _pieces(x):
            (gate, up), (left, right) = x[rows].chunk(2, dim=-1), result[rows].chunk(2, dim=-1)
            torch.mul(functional.silu(gate), grad[rows], out=right)
            torch.ops.aten.silu_backward.grad_input(grad[rows] * up, gate, grad_input=left)
        return result
