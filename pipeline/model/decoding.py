"""Decoding in bf16 on a CPU: append one token to each of several cache rows, and get the next logits.

With a small model under autocast, PyTorch spends most of this step outside the matrix products: on conversions, on
attention over rows of different lengths, and on masks. Here the residual stream is float32, the cache and the matrix
operands are bf16, and everything between two matrix products is one C++ pass (primitives.cpp):

    add_unit           x += y, x / rms(x)                      RMSNorm (arXiv:1910.07467)
    decode_heads       norms and RoPE of queries and keys; writes the new key and value to the cache
    decode_attention   a single softmax over a row's shared prompt and its own tokens (cache.py)
    gated              silu(g) * u
    choose             the next token from the logits (generation/sampling.py)

The arithmetic is that of bf16 training (layers.py), so log-probabilities from sampling and from the update agree up to
summation order. This module is used after `native.load`, for models without a hook; otherwise, PyTorch's operators do
the work.

Shapes: n rows, D width, H query heads, K key heads, h head size, F outputs of a gate, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeline.model.cache import KVCache
from pipeline.model.cpu import attention, primitives
from pipeline.model.cpu.layers import head_factors
from pipeline.model.cpu.native import call, loaded
from pipeline.model.layers import Block, Linear, rope_tables
from pipeline.model.lora import AdaptedLinear
from pipeline.model.transformer import Transformer

BF16 = torch.bfloat16
LANE = 16  # elements of a head that primitives.cpp processes at once
GROUPS = range(1, 9)  # query heads per key head for which primitives.cpp is compiled
FEW, MANY = 8, 32  # up to 64 rows are padded to a multiple of FEW, more rows to a multiple of MANY
CACHE_BLOCK = 64  # positions by which the cache grows; small, since each element of a new key touches a cache line
TABLE_BLOCK = 256  # positions by which the RoPE tables grow


def fits(model: Transformer) -> bool:
    """Whether this module can decode the model here: autocast to bf16 on a CPU, with the C++ operations loaded."""
    config = model.config
    return (
        loaded()
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == BF16
        and model.hook is None
        and config.head_dim % (2 * LANE) == 0
        and config.heads // config.kv_heads in GROUPS
        and type(model.model.embed_tokens.weight) is nn.Parameter  # not sharded across processes
        and model.table.device.type == "cpu"
        and all(_has_matrices(layer) for layer in model.model.layers)
    )


def _has_matrices(layer: nn.Module) -> bool:
    """Whether all projections of a block are float32 matrices, neither 8-bit nor sharded."""
    if not isinstance(layer, Block):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    of_attention = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
    parts = *of_attention, mlp.gate_proj, mlp.up_proj, mlp.down_proj
    return all(type(part) in (Linear, AdaptedLinear) and part.weight.dtype == torch.float32 for part in parts)


class DecodingStep:
    """The decoding step of a model. It copies the matrices to bf16, so later weight changes have no effect."""

    @torch.no_grad()
    def __init__(self, model: Transformer) -> None:
        self.config, self.embed = model.config, model.model.embed_tokens
        self.layers = [_LayerWeights(layer) for layer in model.model.layers if isinstance(layer, Block)]
        self.head = primitives.fold(model.model.norm.weight, model.table.detach()).t()  # (D, V)
        self.cos = self.sin = torch.empty(0)

    def next(self, cache: KVCache, rows: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Append `tokens[i]` to row `rows[i]` of a bf16 cache. Returns the next logits, (n, V) in bf16.

        Raises ValueError if a row would exceed the model's context; no row is changed in that case.
        """
        config, n = self.config, len(rows)
        own, before = [cache.own[row] for row in rows], [cache.before(row) for row in rows]
        longest = max(map(sum, zip(own, before))) + 1
        cache.check_length(longest)
        cache.reserve(max(own) + 1)
        self._reserve_tables(longest)
        for row in rows:
            cache.own[row] += 1
        prompts = [cache.prompt_of[row] or 0 for row in rows]
        where, columns, prompt, past = torch.tensor([list(rows), own, prompts, before]).unbind()
        positions, lengths = columns + past, columns + 1
        padded = n + -n % (FEW if n <= 2 * MANY else MANY)  # oneDNN compiles a kernel for each new shape
        x = torch.zeros(padded, config.width)
        x[:n] = self.embed(torch.tensor(tokens))
        unit, y = torch.empty(padded, config.width, dtype=BF16), None
        q = torch.empty(n, config.heads, config.head_dim)
        attended = torch.zeros(padded, config.heads * config.head_dim, dtype=BF16)
        shared = cache if cache.prompts is None or not any(before) else cache.prompts
        groups = n, config.kv_heads, config.heads // config.kv_heads, config.head_dim
        for layer, keys, values, prompt_keys, prompt_values in zip(
            self.layers, cache.keys, cache.values, shared.keys, shared.values, strict=True
        ):
            capacity = keys.shape[3]
            _add_unit(x, y, unit, config.norm_eps)
            joined = layer.joined(unit)
            given = joined, layer.factors, self.cos, self.sin, positions, where, columns, q, keys, values
            sizes = n, config.heads, config.kv_heads, config.head_dim // 2, capacity
            call("decode_heads", *given, *sizes, config.norm_eps, config.head_norms)
            given = q, keys, values, prompt_keys, prompt_values, where, lengths, prompt, past, attended
            call("decode_attention", *given, *groups, capacity, prompt_keys.shape[3])
            _add_unit(x, torch.mm(attended, layer.out), unit, config.norm_eps)
            y = torch.mm(primitives.gated(torch.mm(unit, layer.widen)), layer.narrow)
        _add_unit(x, y, unit, config.norm_eps)
        return torch.mm(unit, self.head)[:n]

    def read(self, cache: KVCache, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """Process the token sequences `texts` into empty rows of a bf16 cache. Returns the next logits, (n, V) in bf16.

        Raises ValueError if a sequence is longer than the model's context; no row is changed in that case.
        """
        config, lengths = self.config, [len(text) for text in texts]
        cache.check_length(max(lengths))
        cache.reserve(max(lengths))
        self._reserve_tables(max(lengths))
        for row, length in zip(rows, lengths, strict=True):
            cache.own[row] = length
        heads, size = config.heads, config.head_dim
        plan = attention.plan(tuple(lengths), True, heads)
        tokens, padded = sum(lengths), plan.tokens
        counts = torch.tensor(lengths)
        row_of, ends = torch.tensor(list(rows)).repeat_interleave(counts), counts.cumsum(0)
        columns = torch.arange(tokens) - (ends - counts).repeat_interleave(counts)
        positions = torch.nn.functional.pad(columns, (0, padded - tokens))
        cos, sin = self.cos[positions], self.sin[positions]
        x = torch.zeros(padded, config.width)
        x[:tokens] = self.embed(torch.tensor([token for text in texts for token in text]))
        unit, y = torch.empty(padded, config.width, dtype=BF16), None
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            _add_unit(x, y, unit, config.norm_eps)
            joined = layer.joined(unit).unflatten(1, (-1, size))  # (N, H + 2K, h)
            eps = config.norm_eps if config.head_norms else None
            turned, _ = primitives.heads(joined, layer.factors, cos, sin, eps)
            value = joined[:, turned.shape[1] :]
            out, _ = attention.forward(turned[:, :heads], turned[:, heads:], value, plan)
            keys[row_of, :, :, columns] = turned[:tokens, heads:]
            values[row_of, :, columns] = value[:tokens]
            _add_unit(x, torch.mm(out.flatten(1), layer.out), unit, config.norm_eps)
            y = torch.mm(primitives.gated(torch.mm(unit, layer.widen)), layer.narrow)
        assert y is not None, "a model has at least one layer"
        last = ends - 1
        x, unit = x[last], unit[: len(last)]
        _add_unit(x, y[last], unit, config.norm_eps)
        return torch.mm(unit, self.head)

    def _reserve_tables(self, length: int) -> None:
        if len(self.cos) < length:
            positions = torch.arange(length + -length % TABLE_BLOCK)
            self.cos, self.sin = (table.contiguous() for table in rope_tables(positions, self.config))


class _LayerWeights:
    """A layer's matrices in bf16, (in, out), with the weights of the preceding norms folded in."""

    def __init__(self, layer: Block) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        inputs = attention.q_proj, attention.k_proj, attention.v_proj
        self.heads = primitives.fold(layer.input_layernorm.weight, *map(_matrix, inputs)).t()
        biases = [part.bias.detach() for part in inputs if part.bias is not None]
        self.bias = torch.cat(biases).to(BF16) if biases else None
        self.out = _matrix(attention.o_proj).to(BF16).t()
        widening = _matrix(mlp.gate_proj), _matrix(mlp.up_proj)
        self.widen = primitives.fold(layer.post_attention_layernorm.weight, *widening).t()
        self.narrow = _matrix(mlp.down_proj).to(BF16).t()
        size, norms = attention.head_dim, None
        if attention.head_norms:
            norms = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
        heads, both = len(attention.q_proj.weight) // size, len(self.heads[0]) // size
        self.factors = head_factors(norms, heads, (both + heads) // 2, size)

    def joined(self, unit: Tensor) -> Tensor:
        """Queries, keys and values side by side, (n, (H + 2K) h)."""
        return torch.mm(unit, self.heads) if self.bias is None else torch.addmm(self.bias, unit, self.heads)


def _matrix(layer: nn.Module) -> Tensor:
    """The weights (out, in) of a linear layer, with its adapter, if any, merged in."""
    assert isinstance(layer, Linear | AdaptedLinear)
    return (layer.folded() if isinstance(layer, AdaptedLinear) and layer.enabled else layer.weight).detach()


def _add_unit(x: Tensor, y: Tensor | None, unit: Tensor, eps: float) -> None:
    call("add_unit", x, y, unit, *x.shape, eps)
