"""The model: token ids in, logits out. Qwen3's architecture (arXiv:2505.09388), and Qwen2's and LLaMA's.

    x = embed(ids);  per layer: x += attention(norm(x)), x += swiglu(norm(x));  logits = head(norm(x))

The parameters carry Hugging Face's names (`model.layers.0.self_attn.q_proj.weight`), so `state_dict()` is what
`model.safetensors` holds. Inside, all tokens of a batch lie on one line (N, D); `attention.py` says who sees whom.

Not here: losses (`learning/objectives.py`), files (`checkpoint.py`), sampling (`generation/`). Dropout is off unless set.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from pipeline.model import half, tiles
from pipeline.model.attention import Documents, Layout, Line, Masked, Padded, Rows, documents_of, positions_in
from pipeline.model.cache import Cached, KVCache
from pipeline.model.config import ModelConfig
from pipeline.model.kernels import rms_norm, rotate

EVEN_ROWS = 128  # so many different shapes at most below it, and multiples above
Checkpointing = Literal["none", "full", "every_2", "selective"]
KEPT = {  # by "selective": dear to compute and small to keep. A CPU's own attention (kernels.py) is computed again: its scores are not.
    torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.topk.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default, torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}  # fmt: skip


class Transformer(nn.Module):
    """Decoder-only transformer. Without a `generator` its weights are zero, to be loaded.

    `checkpointing` recomputes layers in the backward pass: "full" all, "every_2" each second one, "selective" all but their matrix
    products, attention and top-k. `dropout` is the share of each layer's two outputs that is dropped in training, `neftune_alpha`
    scales noise on the embeddings in training (see `_noise`). All three are settings of a run, not of the model.
    """

    def __init__(self, config: ModelConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.checkpointing: Checkpointing = "none"
        self.dropout = 0.0
        self.neftune_alpha = 0.0
        self.model = Body(config)
        if not config.tied:
            self.lm_head = Linear(config.width, config.vocab_size)
        if generator is not None:
            self.initialise(generator)

    def forward(
        self,
        input_ids: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
        select: Tensor | None = None,
        head: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Logits (B, T, V) of every position, or (n, V) of the n places where `select` (B, T) is True, row by row.

        The other arguments and errors as in `hidden`. A loss selects its targets: the head is a third of nano's work. With
        `head` the result is what it gives for the selected states (n, D) and the head's matrix (V, D), in place of their product.
        """
        x, line = self._encode(input_ids, positions, documents, cache)
        if select is None:
            return self.logits(_spread(x, line, input_ids))
        chosen = select.flatten() if line is None or line.kept is None else select.flatten()[line.kept]
        if line is not None and line.source is not None:
            x = x.index_select(0, line.source[chosen])
        elif not bool(chosen.all()):
            x = x.index_select(0, chosen.nonzero().squeeze(1))
        return self.logits(x) if head is None else head(x, self.table)

    def hidden(
        self,
        input_ids: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """What the head reads, after the last norm: (B, T, D) for `input_ids` (B, T).

        `documents` (B, T) are ids of the documents packed into each row: tokens see only their own (None: a row is a
        document). Negative ids are padding; what comes out there has no meaning. `positions` (B, T) count from 0 in
        each document, and are derived where they are not given. On a CPU, rows of one document that begin alike are
        computed once as far as they do. With a `cache` the T tokens follow what each of its B
        rows holds. Raises ValueError where rows are longer than the context, a cache meets documents, or a row of
        `documents` comes back to an earlier id.
        """
        return _spread(*self._encode(input_ids, positions, documents, cache), input_ids)

    def _encode(
        self, input_ids: Tensor, positions: Tensor | None, documents: Tensor | None, cache: KVCache | None
    ) -> tuple[Tensor, Line | None]:
        """Hidden states (N, D) of the tokens that are computed, and which these are; None: all B * T."""
        batch, time = input_ids.shape
        causal = self.config.attention == "causal"
        if time > self.config.max_context:
            raise ValueError(f"rows of {time} tokens are longer than the model's context of {self.config.max_context}")
        if cache is not None:
            if documents is not None or positions is not None or not causal:
                raise ValueError("a cache holds one causal document a row: give neither documents nor positions")
            cached = Cached(cache, range(batch), [time] * batch)
            return self.line(input_ids.flatten(), cached.positions, cached), None
        if documents is None:
            if positions is None:
                positions = torch.arange(time, device=input_ids.device).expand(batch, time)
            return self.line(input_ids.flatten(), positions.flatten(), Rows(batch, causal)), None
        if input_ids.device.type != "cpu" or self.compiled:
            positions = positions_in(documents) if positions is None else positions
            return self.line(input_ids.flatten(), positions.flatten(), Masked.of(documents, causal)), None
        # On a CPU: no mask, and the line holds the tokens that are not padding.
        packed = Line.of(documents, causal, None if self._random else input_ids)
        ids, places = input_ids.flatten(), packed.positions if positions is None else positions.flatten()
        if packed.computed is not None:
            ids = ids[packed.computed]
            places = places if positions is None else places[packed.computed]
        return self.line(ids, places, packed.layout), packed

    def line(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """The layers on one line of tokens: `ids` and `positions` (N,) -> (N, D), after the last norm."""
        tokens, missing = len(ids), uneven(self.model.embed_tokens.weight, len(ids))
        if missing:
            ids, positions = functional.pad(ids, (0, missing)), functional.pad(positions, (0, missing))
            layout = Padded(layout, tokens)
        x = self.model.embed_tokens(ids)
        x = functional.dropout(x, self._rate) if self._rate else x
        if self.neftune_alpha and self.training:
            x = x + self._noise(x, positions)
        cos, sin = rope_tables(positions, self.config)
        for index, layer in enumerate(self.model.layers):
            x = self._layer(layer, x, cos, sin, layout, index)
        return self.model.norm(x[:tokens] if missing else x)

    def _layer(self, layer: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, index: int) -> Tensor:
        """One layer, (N, D) -> (N, D); in training as `checkpointing` says."""
        if isinstance(layout, Cached):  # each step has other shapes: compiled layers would be compiled anew and anew
            return layer._call_impl(x, cos, sin, layout, index, self._rate)  # pyright: ignore[reportReturnType]
        again = self.checkpointing in ("full", "selective") or (self.checkpointing == "every_2" and index % 2 == 0)
        if not (again and self.training and torch.is_grad_enabled()):
            return layer(x, cos, sin, layout, index, self._rate)
        contexts = _keeping if self.checkpointing == "selective" else noop_context_fn
        x = checkpoint(layer, x, cos, sin, layout, index, self._rate, use_reentrant=False, context_fn=contexts)  # pyright: ignore[reportAssignmentType]
        assert isinstance(x, Tensor)
        return x

    @property
    def table(self) -> Tensor:
        """The head's matrix (V, D)."""
        return self.model.embed_tokens.table if self.config.tied else self.lm_head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        missing = uneven(hidden, len(hidden)) if hidden.ndim == 2 else 0
        if missing:
            return functional.linear(functional.pad(hidden, (0, 0, 0, missing)), self.table)[: len(hidden)]
        return functional.linear(hidden, self.table)

    @property
    def compiled(self) -> bool:
        """Whether the blocks run under torch.compile, which wants shapes that stay equal from batch to batch."""
        return getattr(self.model.layers[0], "_compiled_call_impl", None) is not None

    @property
    def _rate(self) -> float:
        return self.dropout if self.training else 0.0

    @property
    def _random(self) -> bool:
        """Whether equal tokens at equal places may get unequal states."""
        return self.training and bool(self.dropout or self.neftune_alpha)

    def _noise(self, x: Tensor, positions: Tensor) -> Tensor:
        """NEFTune's (Jain et al. 2023, arXiv:2310.05914): uniform in +-alpha / sqrt(L D) for documents of L tokens, (N, D)."""
        document = (positions == 0).cumsum(0)  # (N,) a new number where positions begin anew
        lengths = torch.bincount(document)[document]
        return torch.empty_like(x).uniform_(-1, 1) * (self.neftune_alpha / (lengths * x.shape[1]).sqrt())[:, None]

    def num_parameters(self) -> int:
        """All weights; a tied embedding counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, context: int) -> int:
        """Training FLOPs of one token, see `ModelConfig.flops_per_token`."""
        return self.config.flops_per_token(context)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Fresh weights: normal, the two projections into the residual stream scaled by 1/sqrt(2 * layers).

        As GPT-2 (Radford et al. 2019, 2.3), whose 0.02 is `ModelConfig.initializer_range` at width 1250. Norms one,
        biases zero. A function of the generator's state alone: weights
        are drawn on its device, in the order of `state_dict()`.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = self.config.initializer_range / ((2 * self.config.layers) ** 0.5 if into_stream else 1.0)
            drawn = torch.empty(parameter.shape, device=generator.device).normal_(0.0, std, generator=generator)
            parameter.copy_(drawn)


def _keeping() -> Any:
    """For "selective": the two contexts, of a layer's forward pass and of its recomputation."""
    return create_selective_checkpoint_contexts(_policy)


def _policy(_context: SelectiveCheckpointContext, operation: OpOverload, *_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def cpu_autocast(x: Tensor) -> bool:
    """Whether matrix products of `x` run in half precision on a CPU."""
    return x.device.type == "cpu" and torch.is_autocast_enabled("cpu")


def uneven(x: Tensor, rows: int) -> int:
    """How many rows a matrix product should have more: for each new shape oneDNN compiles a bf16 kernel, in 4 to 20 ms."""
    return -rows % EVEN_ROWS if rows > EVEN_ROWS and cpu_autocast(x) else 0


def _spread(x: Tensor, line: Line | None, input_ids: Tensor) -> Tensor:
    """(N, D) -> (B, T, D), zeros where padding was left out."""
    if line is not None and line.source is not None:
        x = x.index_select(0, line.source)
    if line is not None and line.kept is not None:
        x = x.new_zeros(input_ids.numel(), x.shape[-1]).index_copy(0, line.kept, x)
    return x.view(*input_ids.shape, -1)


def rope_tables(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin (N, 1, h/2) in float32 for `positions` (N,): angle i is position / theta^(2i/h)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device=positions.device).float()
    inverse = 1.0 / (config.rope_theta ** (exponents / config.head_dim))
    angles = positions.float()[:, None, None] * inverse
    return angles.cos(), angles.sin()


class Embedding(nn.Embedding):
    """`nn.Embedding` whose rows a tied head reads as `table`."""

    @property
    def table(self) -> Tensor:
        return self.weight


class Linear(nn.Linear):
    """`nn.Linear` that starts at zero: its weights are drawn by `Transformer.initialise`, or loaded."""

    def __init__(self, num_in: int, num_out: int, bias: bool = False) -> None:
        super().__init__(num_in, num_out, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention; RoPE on queries and keys, after their head norms."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, heads, kv_heads = config.head_dim, config.heads, config.kv_heads
        self.head_dim = size
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
            with torch.autocast("cpu", enabled=False):  # float32: attention in bf16 takes twice as long there
                attended = self._attend(q.float(), k.float(), v.float(), cos, sin, layout, index)
        else:
            attended = self._attend(q, k, v, cos, sin, layout, index)
        return self.o_proj(attended.flatten(-2))

    @property
    def plain(self) -> bool:
        """Whether the projections are as they were made: no adapters, no biases."""
        return all(type(x) is Linear and x.bias is None for x in (self.q_proj, self.k_proj, self.v_proj, self.o_proj))

    def in_bf16(self, x: Tensor, norm: "RMSNorm", cos: Tensor, sin: Tensor, documents: Documents) -> Tensor:
        """The same on norm(x), for training in bf16 on a CPU: (N, D) -> (N, D) in float32."""
        matrices = (self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
        joined = half.normed_product(x, norm.weight, norm.eps, *matrices).unflatten(-1, (-1, self.head_dim))
        heads = len(self.q_proj.weight) // self.head_dim
        norms = (self.q_norm.weight, self.k_norm.weight) if self.head_norms else None
        plan = tiles.plan(documents.lengths, documents.causal, heads)
        return half.product(half.attention(joined, cos, sin, norms, norm.eps, heads, plan), self.o_proj.weight)

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
        """Whether the projections are as they were made: no adapters."""
        return all(type(x) is Linear for x in (self.gate_proj, self.up_proj, self.down_proj))

    def in_bf16(self, x: Tensor, norm: "RMSNorm") -> Tensor:
        """The same on norm(x), for training in bf16 on a CPU: (N, D) -> (N, D) in float32."""
        joined = half.normed_product(x, norm.weight, norm.eps, self.gate_proj.weight, self.up_proj.weight)
        return half.product(half.gated(joined), self.down_proj.weight)


class Block(nn.Module):
    """One layer: attention, then SwiGLU, each behind a norm and added to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        self.mlp = SwiGLU(config)

    @property
    def plain(self) -> bool:
        """Whether all projections are as they were made."""
        return self.self_attn.plain and self.mlp.plain

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, index: int, dropout: float) -> Tensor:
        """(N, D) -> (N, D)."""
        by_hand = half.trains_in_bf16(x)
        documents = documents_of(layout, len(x)) if by_hand and self.self_attn.plain else None
        if documents is None:
            attended = self.self_attn(self.input_layernorm(x), cos, sin, layout, index)
        else:
            attended = self.self_attn.in_bf16(x, self.input_layernorm, cos, sin, documents)
        x = x + (functional.dropout(attended, dropout) if dropout else attended)
        if by_hand and self.mlp.plain:
            widened = self.mlp.in_bf16(x, self.post_attention_layernorm)
        else:
            widened = self.mlp(self.post_attention_layernorm(x))
        return x + (functional.dropout(widened, dropout) if dropout else widened)


class Body(nn.Module):
    """All but the head; named as Hugging Face names it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # Given, so that nn.Embedding draws nothing from the global generator.
        table = torch.zeros(config.vocab_size, config.width)
        self.embed_tokens = Embedding(config.vocab_size, config.width, _weight=table, _freeze=False)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
