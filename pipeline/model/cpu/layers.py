"""Operations of the model that eager PyTorch runs slowly on a CPU, with hand-written backward passes.

**Passes in bf16.** PyTorch's own operators, run one by one under autocast, spend most of a small model's step outside
its matrix products: on conversions, on norms, and on attention, where the fused kernel's backward pass takes several
times as long as batched products would. Here each part of a block is one autograd function: a product or attention
together with the operations before it (primitives.py):

    normed_product    unit(x) (W diag w)^T    RMSNorm (arXiv:1910.07467), its weight folded into the next matrices
    product           x W^T
    attention         RMSNorm of each head, RoPE (arXiv:2104.09864), attention within documents (attention.py)
    gated             silu(g) * u             SwiGLU (arXiv:2002.05202)

Sums, norms and angles are float32; values between two products are bf16, as under autocast. Weight gradients are
float32. Frozen models under autocast use these functions too, so that a policy and its reference round identically.
Decoding does not use them.

**Float32 and float64**: `rms_norm` (Zhang & Sennrich 2019, arXiv:1910.07467), `rotate` (RoPE, Su et al. 2021,
arXiv:2104.09864, in the half-split form of GPT-NeoX) and `ragged_attention`: softmax attention within each document of
one long line of tokens. Forward plus backward for 2,048 tokens with nano on one Zen 3 core, in ms: norm 2.9 -> 1.1,
head norms 5.1 -> 1.6, RoPE 2.0 -> 1.0, attention 46 (dense causal) or 26 (a fused kernel call per document) -> 15. A
hand-written SwiGLU, one matrix for q, k, v or for gate and up, and oneDNN's matmul were no faster.

On other devices, in half precision and under `torch.compile`, `rms_norm` and `rotate` are the plain formulas, which
the compiler fuses better. Without gradients, the two use the same operations as Qwen3 in transformers, so that an
exported model gives bit-identical results there.

No second derivatives. Shapes: N tokens, D width, F outputs, H query heads, K key heads, h head size.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from pipeline.model.cpu import attention as cpu_attention
from pipeline.model.cpu import primitives

BF16 = torch.bfloat16
Block = tuple[int, int, int, int]  # queries [begin, end) attend to keys [first, last)


class LayerContext(FunctionCtx):
    """The context of the functions below, with the values they store in it."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    dtype: torch.dtype
    heads: int
    plan: cpu_attention.Plan
    normed: bool
    blocks: list[Block]


def runs_in_bf16(x: Tensor) -> bool:
    """Whether this pass runs under autocast to bf16, on a CPU, and is not compiled: `torch.compile` fuses the plain
    formulas itself.
    """
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == BF16
        and not torch.compiler.is_compiling()
    )


def normed_product(x: Tensor, weight: Tensor, eps: float, *matrices: Tensor) -> Tensor:
    """rms_norm(x) times each matrix (F_i, D), side by side: (N, D) -> (N, sum F_i) in bf16."""
    return _NormedProduct.apply(x, weight, eps, *matrices)  # pyright: ignore[reportReturnType]


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """x W^T for x (N, D) in bf16 and W (F, D): (N, F) in float32, for the residual stream."""
    return _Product.apply(x, matrix)  # pyright: ignore[reportReturnType]


def attention(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    heads: int,
    plan: cpu_attention.Plan,
) -> Tensor:
    """Attention of queries, keys and values side by side, (N, H + 2K, h) in bf16 -> (N, H * h) in bf16.

    `norms` are the weights (h,) of the query and key norms, if there are any; `cos`, `sin` (N, 1, h/2) are in float32.
    """
    queries, keys = norms or (None, None)
    return _Attention.apply(x, cos, sin, queries, keys, eps, heads, plan)  # pyright: ignore[reportReturnType]


def gated(x: Tensor) -> Tensor:
    """silu(g) * u of x = (g, u) side by side: (N, 2F) -> (N, F) in bf16."""
    return _Gated.apply(x)  # pyright: ignore[reportReturnType]


class _Product(Function):
    @staticmethod
    def forward(ctx: LayerContext, x: Tensor, matrix: Tensor) -> Tensor:
        half = matrix.to(BF16)
        ctx.save_for_backward(x, half)
        ctx.dtype = matrix.dtype
        return torch.mm(x, half.t()).float()

    @staticmethod
    def backward(ctx: LayerContext, grad: Tensor) -> tuple[Tensor, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, half = ctx.saved_tensors
        grad = grad.to(BF16)
        if not ctx.needs_input_grad[1]:
            return torch.mm(grad, half), None
        return torch.mm(grad, half), primitives.outer(grad, x).to(ctx.dtype)


class _NormedProduct(Function):
    @staticmethod
    def forward(ctx: LayerContext, x: Tensor, weight: Tensor, eps: float, *matrices: Tensor) -> Tensor:
        unit, scale = primitives.unit(x, eps)
        half = primitives.fold(weight, *matrices)  # (sum F_i, D)
        ctx.save_for_backward(unit, scale, half, weight, *matrices)
        return torch.mm(unit, half.t())

    @staticmethod
    def backward(ctx: LayerContext, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        unit, scale, half, weight, *matrices = ctx.saved_tensors
        grad_x = primitives.unit_back(torch.mm(grad, half), unit, scale) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[1:]):
            return grad_x, *[None] * (2 + len(matrices))
        folded, grad_weight = primitives.unfold(primitives.outer(grad, unit), weight, *matrices)
        return grad_x, grad_weight, None, *folded


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: LayerContext,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        queries: Tensor | None,
        keys: Tensor | None,
        eps: float,
        heads: int,
        plan: cpu_attention.Plan,
    ) -> Tensor:
        both = (x.shape[1] + heads) // 2
        norms = None if queries is None or keys is None else (queries, keys)
        weights = head_factors(norms, heads, both, x.shape[2])
        rotated, scale = primitives.heads(x, weights, cos, sin, None if queries is None else eps)
        out, saved = cpu_attention.forward(rotated[:, :heads], rotated[:, heads:], x[:, both:], plan)
        ctx.save_for_backward(x, cos, sin, weights, scale, out, *saved)
        ctx.heads, ctx.plan, ctx.normed = heads, plan, queries is not None
        return out[: len(x)].flatten(1)

    @staticmethod
    def backward(ctx: LayerContext, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, cos, sin, weights, scale, out, *saved = ctx.saved_tensors
        heads = ctx.heads
        wide = cpu_attention.backward(
            grad.view(len(x), heads, x.shape[2]), out, saved, ctx.plan, x.shape[1] - len(weights)
        )
        result, of_weights = primitives.heads_back(wide, x, scale, weights, cos, sin, ctx.normed)
        if not ctx.normed:
            return result, *[None] * 7
        of_queries = of_weights[:heads].sum(0).mul_(x.shape[2] ** -0.5)
        return result, None, None, of_queries, of_weights[heads:].sum(0), None, None, None


def head_factors(norms: tuple[Tensor, Tensor] | None, heads: int, both: int, size: int) -> Tensor:
    """Factors of queries and keys before the rotation, (H + K, h): the norms' weights (h,), and h^-0.5 for queries."""
    weights = torch.ones(both, size)
    if norms is not None:
        weights[:heads], weights[heads:] = norms
    weights[:heads] *= size**-0.5
    return weights


class _Gated(Function):
    @staticmethod
    def forward(ctx: LayerContext, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return primitives.gated(x)

    @staticmethod
    def backward(ctx: LayerContext, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return primitives.gated_back(grad, *ctx.saved_tensors)


# -- float32 and float64 -----------------------------------------------------------------------------------------------


QUERY_BLOCK = 64  # the fastest of 64, 128, 256: smaller blocks compute fewer scores that the causal mask drops


def _uses_own_backward(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and not torch.compiler.is_compiling()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in at least float32; returns the dtype of `x`."""
    if _uses_own_backward(x):
        if not torch.is_grad_enabled():
            return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))
        return _RMSNorm.apply(x, weight, eps)  # pyright: ignore[reportReturnType]
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return functional.rms_norm(wide, (x.shape[-1],), weight.to(wide.dtype), eps).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + h/2) of each head. `x` (N, H, h); `cos`, `sin` (N, 1, h/2) in float32."""
    if _uses_own_backward(x) and torch.is_grad_enabled():
        return _Rotate.apply(x, cos, sin)  # pyright: ignore[reportReturnType]
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    first, second = wide.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: LayerContext, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: LayerContext, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, scale = ctx.saved_tensors
        unit = x * scale
        product = (grad * unit).view(-1, x.shape[-1])
        along = torch.mv(product, weight).view(scale.shape).div_(-x.shape[-1])  # -mean(grad * weight * unit)
        grad_x = (grad * weight).addcmul_(unit, along).mul_(scale)
        return grad_x, product.sum(0) if ctx.needs_input_grad[1] else None, None


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Rotation by `sign` times the angle; the backward pass is the inverse rotation."""
    rotated = torch.empty(x.shape, dtype=x.dtype)
    (first, second), (left, right) = x.chunk(2, dim=-1), rotated.chunk(2, dim=-1)
    torch.mul(first, cos, out=left).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=right).addcmul_(first, sin, value=sign)
    return rotated


class _Rotate(Function):
    @staticmethod
    def forward(ctx: LayerContext, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_pairs(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: LayerContext, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return _rotate_pairs(grad, cos, sin, -1.0), None, None


def ragged_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *, causal: bool, before: Sequence[int] | None = None
) -> Tensor:
    """Attention of each token within its own document: to the earlier tokens and itself if `causal`, else to all.

    `q` (N, H, h), `k` and `v` (M, K, h) with K dividing H, N = sum of `lengths`: the documents are consecutive. M = N,
    or, with `before`, N + sum(before): each document has `before` keys before those of its queries. For float32 or
    float64 on a CPU. Returns (N, H, h). Stores every probability for the backward pass, about H * sum(lengths^2) / 2
    values, so it is meant for documents of a few hundred tokens.
    """
    before = before or [0] * len(lengths)
    assert sum(lengths) == q.shape[0], "the documents must cover the line of tokens"
    assert sum(lengths) + sum(before) == k.shape[0], "each document's keys are the shared ones before it and its own"
    return _Ragged.apply(q, k, v, _blocks(lengths, before, causal), causal)  # pyright: ignore[reportReturnType]


def _blocks(lengths: Sequence[int], before: Sequence[int], causal: bool) -> list[Block]:
    """Cut each document's queries into nearly equal blocks; a causal block attends to the keys up to its own end."""
    blocks: list[Block] = []
    begin = first = 0
    for length, past in zip(lengths, before, strict=True):
        count = -(-length // QUERY_BLOCK) if causal else 1
        cuts = [index * length // count for index in range(count + 1)] if count else []
        blocks += [(begin + b, begin + e, first, first + past + (e if causal else length)) for b, e in pairwise(cuts)]
        begin, first = begin + length, first + past + length
    return blocks


@lru_cache(maxsize=256)
def _future(length: int, group: int, dtype: torch.dtype) -> Tensor:
    """The mask added to the scores of the last `length` keys of a causal block: -inf above the diagonal, (length *
    group, length).
    """
    mask = torch.full((length, length), float("-inf"), dtype=dtype).triu(1)
    return mask[:, None].expand(length, group, length).reshape(length * group, length)


class _Ragged(Function):
    """Queries of the G heads that share a key head are rows of one matrix, so keys are never copied or expanded."""

    @staticmethod
    def forward(ctx: LayerContext, q: Tensor, k: Tensor, v: Tensor, blocks: list[Block], causal: bool) -> Tensor:
        (tokens, heads, size), kv_heads = q.shape, k.shape[1]
        group = heads // kv_heads
        q = (q * size**-0.5).view(tokens, kv_heads, group, size).transpose(0, 1).contiguous()  # (K, N, G, h)
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()  # (K, N, h)
        out = torch.empty_like(q)
        saved: list[Tensor] = []
        for begin, end, first, last in blocks:
            rows = (kv_heads, (end - begin) * group, size)
            scores = torch.bmm(q[:, begin:end].view(rows), k[:, first:last].transpose(1, 2))
            if causal:
                scores[:, :, begin - end :].add_(_future(end - begin, group, q.dtype))
            probabilities = torch.softmax(scores, dim=-1)
            torch.bmm(probabilities, v[:, first:last], out=out[:, begin:end].view(rows))
            saved.append(probabilities)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(q, k, v, out, *saved)
            ctx.blocks = blocks
        return out.transpose(0, 1).reshape(tokens, heads, size)

    @staticmethod
    def backward(ctx: LayerContext, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, *saved = ctx.saved_tensors
        kv_heads, tokens, group, size = q.shape
        grad = grad.view(tokens, kv_heads, group, size).transpose(0, 1).contiguous()
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        inner = (grad * out).sum(-1)  # sum_j P_ij dP_ij, which softmax's derivative subtracts
        for (begin, end, first, last), probabilities in zip(ctx.blocks, saved):
            rows = (kv_heads, (end - begin) * group, size)
            upper = grad[:, begin:end].view(rows)
            grad_v[:, first:last].baddbmm_(probabilities.transpose(1, 2), upper)
            grad_scores = torch.bmm(upper, v[:, first:last].transpose(1, 2))
            grad_scores.sub_(inner[:, begin:end].view(kv_heads, -1, 1)).mul_(probabilities)
            torch.bmm(grad_scores, k[:, first:last], out=grad_q[:, begin:end].view(rows))
            grad_k[:, first:last].baddbmm_(grad_scores.transpose(1, 2), q[:, begin:end].view(rows))
        grad_q = grad_q.mul_(size**-0.5).transpose(0, 1).reshape(tokens, kv_heads * group, size)
        return grad_q, grad_k.transpose(0, 1), grad_v.transpose(0, 1), None, None
