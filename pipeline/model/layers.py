"""The layers of a model: layouts, which define what attends to what; blocks and their parts; the hook for a wing.

The blocks work on one line of tokens, (N, D), because everything except attention treats tokens independently. A
`Layout` describes how that line is divided into rows and documents; it is created once per batch and shared by all
layers.

| layout      | rows                                  | used for                                                  |
|-------------|---------------------------------------|-----------------------------------------------------------|
| `Rows`      | equal length, one document each       | plain batches; the fast kernel with `is_causal`           |
| `Masked`    | equal length, several documents each  | packed batches on accelerators and under compile          |
| `Documents` | documents of any length, no padding   | packed or padded batches on a CPU: no mask, no waste      |
| `Branches`  | `Documents` with common prefixes      | answers to one prompt on a CPU: the prefix runs once      |
| `Cached`    | new tokens for some rows of a cache   | decoding (cache.py)                                       |
| `Padded`    | another layout's rows, then padding   | bf16 on a CPU, where each new shape needs a compilation   |

In bf16 on a CPU, `Rows`, `Documents` and `Branches` run as an `attention_plan` in cpu/attention.py, not with `attend`.

Shapes: N tokens in the line, B rows, T tokens per row, H query heads, K key heads, G = H/K, h head size.

**Parts**: embedding, norm, grouped-query attention with RoPE, SwiGLU, and blocks, as in Qwen3 (arXiv:2505.09388), Qwen2
and LLaMA; `transformer.py` runs the blocks. Parameters have Hugging Face's names. Under autocast to bf16 on a CPU,
everything except decoding uses the hand-written passes of `cpu/layers.py` (`in_bf16`).

**The hook**: a module that changes the residual stream after each layer, provided by a wing (pipeline/wings.py).

A wing registers for its hook:

    model_keys     () -> a dataclass of the hook's keys in a model file
    check_model    (ModelConfig) -> None; raises ValueError if these keys are inconsistent with the others
    layer_hook     (ModelConfig) -> the LayerHook described by the keys, with zero weights; None without the keys
    hook_cache     (ModelConfig, rows, dtype, device) -> the hook's `cache.HookCache`; None without the keys
    hook_bytes     (ModelConfig, kind of device, precision, tokens) -> bytes the hook stores during a training pass
    model_type     () -> `model_type` in config.json of a model with the hook, so that no other engine runs it
    save_hook      (folder, LayerHook, weights, base) -> None; writes the hook's files into a model directory: `weights`
                   have the hook's own names; `base` is the digest of the model's other weights
    load_hook      (Transformer, folder) -> None; attaches the hook stored in a model directory

The core uses a hook only through `LayerHook`; the hook's weights are in the model's `state_dict()` under its `name`.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import pad, scaled_dot_product_attention

from pipeline import wings
from pipeline.model.cache import cross
from pipeline.model.config import ModelConfig
from pipeline.model.cpu import attention, layers
from pipeline.model.cpu.attention import Plan
from pipeline.model.cpu.layers import ragged_attention, rms_norm, rotate
from pipeline.run.types import JsonObject

KEPT_PROBABILITIES = 512  # up to this length, storing them is 1.4x faster than the fused kernel, but no faster at 2,048
MAX_SHARING_LENGTH = 2048  # rows up to this length may share a prefix
LEAST_SHARED = 16  # minimum length of a common prefix worth sharing


class Layout(Protocol):
    """Attention over one line of tokens: `q` (N, H, h), `k` and `v` (N, K, h) -> (N, H, h)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor: ...


@dataclass(frozen=True)
class Rows:
    """`batch` rows of equal length, each one document."""

    batch: int
    causal: bool

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        return _dense(q, k, v, self.batch, None, self.causal)


@dataclass(frozen=True)
class Masked:
    """Rows of equal length; `mask` (B, 1, T, T) is True where a query attends to a key."""

    mask: Tensor

    @classmethod
    def of(cls, documents: Tensor, causal: bool) -> "Masked":
        """From document ids (B, T): tokens in the same row with equal ids attend to each other."""
        same = documents[:, None, :, None] == documents[:, None, None, :]  # (B, 1, T, T)
        return cls(same.tril() if causal else same)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        return _dense(q, k, v, self.mask.shape[0], self.mask, False)


@dataclass(frozen=True)
class Documents:
    """Consecutive documents without padding; their `lengths` sum to N. For CPUs."""

    lengths: tuple[int, ...]
    causal: bool

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        if q.dtype in (torch.float32, torch.float64) and max(self.lengths, default=0) <= KEPT_PROBABILITIES:
            return ragged_attention(q, k, v, self.lengths, causal=self.causal)
        pieces = zip(q.split(self.lengths), k.split(self.lengths), v.split(self.lengths), strict=True)
        return torch.cat([_dense(*piece, 1, None, self.causal) for piece in pieces])


@dataclass(frozen=True)
class Branches:
    """Documents, some of which share a prefix with another; the line contains a shared prefix once. Causal, for CPUs.

    Document i adds `lengths[i]` tokens to the line after the first `before[i]` tokens of document `parents[i]`, which
    comes earlier; `keys` (N + sum(before),) are the line indices of all tokens of each document.
    """

    lengths: tuple[int, ...]
    before: tuple[int, ...]
    parents: tuple[int, ...]
    keys: Tensor

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        k, v = k.index_select(0, self.keys), v.index_select(0, self.keys)
        if q.dtype in (torch.float32, torch.float64):
            return ragged_attention(q, k, v, self.lengths, causal=True, before=self.before)
        whole = [past + length for past, length in zip(self.before, self.lengths, strict=True)]
        pieces = zip(q.split(self.lengths), k.split(whole), v.split(whole), self.before, strict=True)
        return torch.cat([cross(*piece) for piece in pieces])


@dataclass(frozen=True)
class Padded:
    """Another layout on the first `tokens` of the line; the padding after them attends to nothing and outputs zeros."""

    layout: Layout
    tokens: int

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        out = self.layout.attend(q[: self.tokens], k[: self.tokens], v[: self.tokens], layer)
        return pad(out, (0, 0, 0, 0, 0, len(q) - self.tokens))


def attention_plan(layout: Layout, tokens: int, heads: int) -> Plan | None:
    """The plan for bf16 attention of `heads` query heads over a line of `tokens` tokens; None if there is none."""
    if isinstance(layout, Padded):
        layout, tokens = layout.layout, layout.tokens
    if isinstance(layout, Rows):
        layout = Documents((tokens // layout.batch,) * layout.batch, layout.causal)
    if isinstance(layout, Documents):
        return attention.plan(layout.lengths, layout.causal, heads)
    if isinstance(layout, Branches):
        return attention.tree_plan(layout.lengths, layout.before, layout.parents, heads)
    return None


def _dense(q: Tensor, k: Tensor, v: Tensor, batch: int, mask: Tensor | None, causal: bool) -> Tensor:
    """The fused kernel on `batch` rows of equal length."""
    q, k, v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (q, k, v))  # (B, heads, T, h)
    group = q.shape[1] // k.shape[1]
    if group > 1 and q.device.type == "cpu":  # `enable_gqa` is slower there (50 vs. 46 ms); one key head needs no copy
        k, v = (x.expand(-1, group, -1, -1) if x.shape[1] == 1 else x.repeat_interleave(group, 1) for x in (k, v))
        group = 1
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=group > 1)
    return out.transpose(1, 2).flatten(0, 1)


def positions_in(documents: Tensor) -> Tensor:
    """Positions within each run of equal ids, from 0: (B, T) -> (B, T), computed on the device of the ids."""
    time = torch.arange(documents.shape[1], device=documents.device)
    begins = documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0
    return time - torch.where(begins, time, 0).cummax(dim=1).values


@dataclass(frozen=True)
class Line:
    """A padded batch of documents laid out as one line: its attention, and the mapping back to the batch."""

    layout: Layout
    positions: Tensor  # (N,) for the line's tokens, from 0 in each document
    computed: Tensor | None  # (N,) flat indices of the line's tokens in the batch; None: all, in order
    kept: Tensor | None  # (M,) flat indices of all tokens that are not padding; None: no padding
    source: Tensor | None  # (M,) the index in the line of each kept token; None: the identity

    @classmethod
    def of(cls, documents: Tensor, causal: bool, ids: Tensor | None = None) -> "Line":
        """From document ids (B, T): runs of equal ids are documents; negative ids are padding, which is left out.

        If the tokens `ids` (B, T) are given and each row is one causal document, rows share their common prefixes.
        Raises ValueError if a row returns to an earlier id, because its documents are then not contiguous.
        """
        numbers = documents.cpu().numpy()
        width = numbers.shape[1]
        starts = np.flatnonzero(np.diff(numbers, axis=1, prepend=numbers[:, :1] - 1))  # where a document begins
        lengths = np.diff(starts, append=numbers.size)
        values = numbers.reshape(-1)[starts].astype(np.int64)
        pairs = np.stack([starts // width, values], axis=1)
        if len(np.unique(pairs, axis=0)) < len(pairs):
            raise ValueError("documents: a row returns to an earlier id; equal ids in a row must be contiguous")
        not_padding = values >= 0
        positions = torch.from_numpy(np.arange(numbers.size) - np.repeat(starts, lengths))
        kept = None if not_padding.all() else torch.from_numpy(np.flatnonzero(np.repeat(not_padding, lengths)))
        starts, lengths = starts[not_padding], lengths[not_padding]
        single = len(starts) == len(numbers) and bool((starts // width == np.arange(len(numbers))).all())
        if ids is not None and causal and single and lengths.max() <= MAX_SHARING_LENGTH:
            tokens = ids.cpu().numpy().reshape(-1)
            prefixes = begin_alike([tokens[s : s + n] for s, n in zip(starts, lengths, strict=True)])
            if any(number for _, _, number in prefixes):
                return cls._branches(positions, starts, lengths, prefixes)
        layout = Documents(tuple(lengths.tolist()), causal)
        return cls(layout, positions if kept is None else positions[kept], kept, kept, None)

    @classmethod
    def _branches(
        cls, positions: Tensor, starts: np.ndarray, lengths: np.ndarray, prefixes: list[tuple[int, int, int]]
    ) -> "Line":
        """Lay out the documents in the order of `prefixes`, each without the prefix it shares with another."""
        order = np.array([row for row, _, _ in prefixes])
        place = np.argsort(order)  # position of each row in the line
        shared = np.array([number for _, _, number in prefixes])
        own = lengths[order] - shared
        begins = np.cumsum(own) - own  # where each document's own tokens begin in the line
        indices: list[np.ndarray] = []  # line indices of all tokens of each document
        for begin, length, (_, other, number) in zip(begins, own, prefixes, strict=True):
            prefix = indices[place[other]][:number] if number else np.arange(0)
            indices.append(np.concatenate([prefix, begin + np.arange(length)]))
        firsts = starts[order] + shared
        computed = torch.from_numpy(np.concatenate([s + np.arange(n) for s, n in zip(firsts, own, strict=True)]))
        kept = np.concatenate([s + np.arange(n) for s, n in zip(starts, lengths, strict=True)])
        source = torch.from_numpy(np.concatenate([indices[row] for row in place]))
        parents = tuple(int(place[other]) for _, other, _ in prefixes)
        keys = torch.from_numpy(np.concatenate(indices))
        layout = Branches(tuple(own.tolist()), tuple(shared.tolist()), parents, keys)
        return cls(layout, positions[computed], computed, torch.from_numpy(kept), source)


def begin_alike(rows: Sequence[np.ndarray]) -> list[tuple[int, int, int]]:
    """(row, other, number) for each row: its first `number` tokens equal those of row `other`; 0 if none are shared.

    `other` comes earlier in the list, and no earlier row shares a longer prefix. Rows are sorted by their tokens, so
    each follows the row with which it shares the longest prefix, and a prefix of several rows is computed once: answers
    share their prompt, and prompts share their beginning. Each row keeps at least its last token, and prefixes shorter
    than `LEAST_SHARED` are ignored.
    """
    order = sorted(range(len(rows)), key=lambda row: rows[row].astype(">i8").tobytes())
    prefixes = [(order[0], 0, 0)] if order else []
    for other, row in pairwise(order):
        most = min(len(rows[row]) - 1, len(rows[other]))
        mismatches = np.flatnonzero(rows[row][:most] != rows[other][:most])
        number = int(mismatches[0]) if len(mismatches) else most
        prefixes.append((row, other, number) if number >= LEAST_SHARED else (row, 0, 0))
    return prefixes


# -- layers ------------------------------------------------------------------------------------------------------------


def cpu_autocast(x: Tensor) -> bool:
    """Whether matrix products of `x` run in half precision on a CPU."""
    return x.device.type == "cpu" and torch.is_autocast_enabled("cpu")


def rope_tables(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin (N, 1, h/2) in float32 for `positions` (N,): angle i is position / theta^(2i/h)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device=positions.device).float()
    inverse = 1.0 / (config.rope_theta ** (exponents / config.head_dim))
    angles = positions.float()[:, None, None] * inverse
    return angles.cos(), angles.sin()


class Embedding(nn.Embedding):
    """`nn.Embedding` whose `table` is also the matrix of a tied head."""

    @property
    def table(self) -> Tensor:
        return self.weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, nf4: Any = None) -> Tensor:
    """x W^T + b. A frozen weight may be stored at lower precision (learning/reference.py): in bf16, converted to the
    dtype of x outside autocast, or in NF4 with the state `nf4`, dequantized on the fly.
    """
    if nf4 is not None:
        return importlib.import_module("bitsandbytes").matmul_4bit(x, weight.t(), quant_state=nf4, bias=bias)
    if weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return functional.linear(x, weight, bias)


def dense(weight: Tensor, nf4: Any) -> Tensor:
    """A weight (out, in), dequantized to bf16 if stored in NF4."""
    if nf4 is None:
        return weight
    return importlib.import_module("bitsandbytes.functional").dequantize_4bit(weight, nf4)


class Linear(nn.Linear):
    """`nn.Linear` that starts at zero: its weights are drawn by `Transformer.initialize` or loaded."""

    nf4: Any = None  # bitsandbytes' quantization state for an NF4 weight

    def __init__(self, num_in: int, num_out: int, bias: bool = False) -> None:
        super().__init__(num_in, num_out, bias=bias)

    def forward(self, input: Tensor) -> Tensor:  # named as in nn.Linear
        return linear(input, self.weight, self.bias, self.nf4)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def plain(self) -> bool:
        """Whether the layer is just a product with `matrix`."""
        return self.bias is None

    @property
    def matrix(self) -> Tensor:
        """The matrix (out, in)."""
        return dense(self.weight, self.nf4)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention, with RoPE on queries and keys after their head norms."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, heads, kv_heads = config.head_dim, config.heads, config.kv_heads
        self.head_dim, self.heads = size, heads
        self.q_proj = Linear(config.width, heads * size, config.bias)
        self.k_proj = Linear(config.width, kv_heads * size, config.bias)
        self.v_proj = Linear(config.width, kv_heads * size, config.bias)
        self.o_proj = Linear(heads * size, config.width)
        if config.head_norms:
            self.q_norm = RMSNorm(size, config.norm_eps)
            self.k_norm = RMSNorm(size, config.norm_eps)
        self.head_norms = config.head_norms

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, index: int) -> Tensor:
        """(N, D) -> (N, D)."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # (N, H, h)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # (N, K, h)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if cpu_autocast(x):
            with torch.autocast("cpu", enabled=False):  # float32: bf16 attention takes twice as long here
                attended = self._attend(q.float(), k.float(), v.float(), cos, sin, layout, index)
        else:
            attended = self._attend(q, k, v, cos, sin, layout, index)
        return self.o_proj(attended.flatten(-2))

    @property
    def plain(self) -> bool:
        """Whether each projection is a single matrix product."""
        return all(x.plain for x in (self.q_proj, self.k_proj, self.v_proj, self.o_proj))

    def in_bf16(self, x: Tensor, norm: "RMSNorm", cos: Tensor, sin: Tensor, plan: Plan) -> Tensor:
        """`forward` of norm(x), in bf16 on a CPU: (N, D) -> (N, D) in float32."""
        matrices = (self.q_proj.matrix, self.k_proj.matrix, self.v_proj.matrix)
        joined = layers.normed_product(x, norm.weight, norm.eps, *matrices).unflatten(-1, (-1, self.head_dim))
        norms = (self.q_norm.weight, self.k_norm.weight) if self.head_norms else None
        return layers.product(layers.attention(joined, cos, sin, norms, norm.eps, self.heads, plan), self.o_proj.matrix)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, layout: Layout, index: int) -> Tensor:
        if self.head_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        return layout.attend(q, k, v, index)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.width, config.d_ff)
        self.up_proj = Linear(config.width, config.d_ff)
        self.down_proj = Linear(config.d_ff, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))

    @property
    def plain(self) -> bool:
        """Whether each projection is a single matrix product."""
        return all(x.plain for x in (self.gate_proj, self.up_proj, self.down_proj))

    def in_bf16(self, x: Tensor, norm: "RMSNorm") -> Tensor:
        """`forward` of norm(x), in bf16 on a CPU: (N, D) -> (N, D) in float32."""
        joined = layers.normed_product(x, norm.weight, norm.eps, self.gate_proj.matrix, self.up_proj.matrix)
        return layers.product(layers.gated(joined), self.down_proj.matrix)


class Block(nn.Module):
    """One layer: attention, then SwiGLU, each with a pre-norm and a residual connection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        layout: Layout,
        index: int,
        dropout: float,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """(N, D) -> (N, D), or (U, D) for only the tokens with the indices `chosen` (U,)."""
        plan = attention_plan(layout, len(x), self.self_attn.heads) if layers.runs_in_bf16(x) else None
        if plan is not None and self.self_attn.plain:
            attended = self.self_attn.in_bf16(x, self.input_layernorm, cos, sin, plan)
        else:
            attended = self.self_attn(self.input_layernorm(x), cos, sin, layout, index)
        x = x + (functional.dropout(attended, dropout) if dropout else attended)
        x = x if chosen is None else x.index_select(0, chosen)
        if plan is not None and self.mlp.plain:
            widened = self.mlp.in_bf16(x, self.post_attention_layernorm)
        else:
            widened = self.mlp(self.post_attention_layernorm(x))
        return x + (functional.dropout(widened, dropout) if dropout else widened)


class Body(nn.Module):
    """Everything but the head, with Hugging Face's names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # Passed in so that nn.Embedding does not draw from the global generator.
        table = torch.zeros(config.vocab_size, config.width)
        self.embed_tokens = Embedding(config.vocab_size, config.width, _weight=table, _freeze=False)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)


# -- the hook for a wing -----------------------------------------------------------------------------------------------


Reads = Callable[[int, Tensor], Tensor]  # (layer, residual stream (N, D) after it) -> the stream after the hook


class LayerHook(nn.Module):
    """A module that changes the residual stream after each layer."""

    name: ClassVar[str]  # the hook's attribute name in the model
    hf_keys: ClassVar[JsonObject]  # the hook's keys in config.json
    added: bool = False  # whether the model was trained before; its weights then form one parameter group (optim.py)
    leaky: bool = False  # whether a position may depend on later ones

    def reads(self, positions: Tensor, padding: Tensor | None, computed: Tensor | None, reading: object) -> Reads:
        """The function to apply after each layer to a line of tokens.

        `positions` (N,) count from 0 in each document; `padding` (N,) is bool. `computed` (N,) are the tokens' indices
        in the flattened batch, None for the entire batch. `reading` is what the model's caller passes for the hook.
        """
        raise NotImplementedError

    def going_on(self, layout: Layout) -> Reads:
        """Like `reads`, but for new tokens of cache rows; `layout` has already added them to the row lengths."""
        raise NotImplementedError

    def initialize(self, generator: torch.Generator) -> None:
        """Draw fresh weights, with which the hook initially has no effect."""
        raise NotImplementedError

    def flops_per_token(self) -> int:
        """Training FLOPs per token, counted as in `ModelConfig.flops_per_token`; 0 if not counted."""
        return 0

    def num_parameters(self) -> int:
        """Number of the hook's weights."""
        return sum(parameter.numel() for parameter in self.parameters())


def layer_hook(config: ModelConfig) -> LayerHook | None:
    """The hook for a model of this shape, with zero weights; None if there is none."""
    hooks: list[LayerHook] = [hook for offer in wings.each("layer_hook") if (hook := offer(config)) is not None]
    assert len(hooks) < 2, "a model has at most one hook"
    return hooks[0] if hooks else None
