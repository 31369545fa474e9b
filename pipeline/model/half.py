"""Training in bf16 on a CPU: the parts of a block with their backward passes written by hand.

PyTorch's own operators, run one by one under autocast, spend most of a small model's step outside of its matrix products: in
conversions, in norms, and in attention, whose fused kernel has a backward pass several times as long as these batched products.
Here a part is one autograd function, a product or attention with what stands before it (pieces.py):

    normed_product    unit(x) (W diag w)^T    RMSNorm (arXiv:1910.07467), its weight folded into the matrices behind it
    product           x W^T
    attention         RMSNorm of each head, RoPE (arXiv:2104.09864), attention within documents (tiles.py)
    gated             silu(g) * u             SwiGLU (arXiv:2002.05202)

Sums, norms and angles are float32; what stands between two products is bf16, as under autocast. Gradients of weights are float32.
Not for inference: without gradients a model keeps the operations of `kernels.py`. No second derivatives.

Shapes: N tokens, D width, F outputs, H query heads, K key heads, h head size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pipeline.model import pieces, tiles

BF16 = torch.bfloat16


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

    `norms` are the weights (h,) of the norms of queries and keys, if there are any; `cos`, `sin` (N, 1, h/2) in float32.
    """
    queries, keys = norms or (None, None)
    return _Attention.apply(x, cos, sin, queries, keys, eps, heads, plan)  # pyright: ignore[reportReturnType]


def gated(x: Tensor) -> Tensor:
    """silu(g) * u of x = (g, u) side by side: (N, 2F) -> (N, F) in bf16."""
    return _Gated.apply(x)  # pyright: ignore[reportReturnType]


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
        if not ctx.needs_input_grad[1]:
            return torch.mm(grad, half), None
        return torch.mm(grad, half), pieces.outer(grad, x).to(ctx.dtype)


class _NormedProduct(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, *matrices: Tensor) -> Tensor:
        unit, scale = pieces.unit(x, eps)
        half = pieces.fold(weight, *matrices)  # (sum F_i, D)
        ctx.save_for_backward(unit, scale, half, weight, *matrices)
        return torch.mm(unit, half.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        unit, scale, half, weight, *matrices = ctx.saved_tensors
        grad_x = pieces.unit_back(torch.mm(grad, half), unit, scale)
        if not any(ctx.needs_input_grad[1:]):
            return grad_x, *[None] * (2 + len(matrices))
        folded, grad_weight = pieces.unfold(pieces.outer(grad, unit), weight, *matrices)
        return grad_x, grad_weight, None, *folded


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, queries: Tensor | None, keys: Tensor | None, eps: float,
        heads: int, plan: tiles.Plan,
    ) -> Tensor:  # fmt: skip
        both = (x.shape[1] + heads) // 2
        weights = _weights(queries, keys, heads, both, x.shape[2])
        turned, scale = pieces.heads(x, weights, cos, sin, None if queries is None else eps)
        out, kept = tiles.forward(turned[:, :heads], turned[:, heads:], x[:, both:], plan)
        ctx.save_for_backward(x, cos, sin, weights, scale, out, *kept)
        ctx.heads, ctx.plan, ctx.normed = heads, plan, queries is not None
        return out[: len(x)].flatten(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, cos, sin, weights, scale, out, *kept = ctx.saved_tensors
        heads = ctx.heads
        wide = tiles.backward(grad.view(len(x), heads, x.shape[2]), out, kept, ctx.plan, x.shape[1] - len(weights))
        result, of_weights = pieces.heads_back(wide, x, scale, weights, cos, sin, ctx.normed)
        if not ctx.normed:
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


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return pieces.gated(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return pieces.gated_back(grad, *ctx.saved_tensors)
