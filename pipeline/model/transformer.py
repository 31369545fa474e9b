"""The model: token ids in, logits out. The architecture of Qwen3 (arXiv:2505.09388), Qwen2 and LLaMA.

    x = embed(ids);  per layer: x += attention(norm(x)), x += swiglu(norm(x));  logits = head(norm(x))

Parameters have Hugging Face's names (`model.layers.0.self_attn.q_proj.weight`), so `state_dict()` has the keys of
`model.safetensors`. Internally, a batch's tokens are flattened into one line (N, D); a layout (`layers.py`) defines
which tokens attend to each other.

Not here: losses (`learning/losses.py`), files (`checkpoint.py`), sampling (`generation/`). Dropout is off by default.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal, TypeVar

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

from pipeline.model.cache import Cached, KVCache
from pipeline.model.config import ModelConfig
from pipeline.model.layers import (
    Body,
    LayerHook,
    Layout,
    Line,
    Linear,
    Masked,
    Padded,
    Reads,
    Rows,
    cpu_autocast,
    layer_hook,
    linear,
    positions_in,
    rope_tables,
)

T = TypeVar("T")
EVEN_ROWS = 128  # more rows than this are padded to a multiple of it, which limits the number of distinct shapes
FEW = 0.75  # if at most this share of tokens is selected, only those go through the end of the last layer
Checkpointing = Literal["none", "full", "every_2", "selective"]
# Saved by "selective" checkpointing: results that are expensive to compute and small to store. Our CPU attention
# (cpu/layers.py) is recomputed, because its scores are large.
SAVED_OPERATIONS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.topk.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


class Transformer(nn.Module):
    """Decoder-only transformer. Without a `generator` its weights are zero, to be loaded later.

    `checkpointing` recomputes layers in the backward pass: "full" recomputes all of them, "every_2" every other one,
    and "selective" everything but matrix products, attention and top-k. In training, `dropout` applies to the two
    outputs of each layer, and `neftune_alpha` scales noise on the embeddings (see `_noise`). All three are settings of
    a run, not of the model.
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
        self.attach(layer_hook(config))
        if generator is not None:
            self.initialize(generator)

    def attach(self, hook: LayerHook | None) -> None:
        """Let `hook` change the residual stream after each layer. Its weights are registered under its name."""
        self.hook_name = "" if hook is None else hook.name
        if hook is not None:
            self.add_module(hook.name, hook)

    @property
    def hook(self) -> LayerHook | None:
        """The module that changes the residual stream after each layer, if any."""
        hook = self._modules.get(self.hook_name)
        assert hook is None or isinstance(hook, LayerHook)
        return hook

    def forward(
        self,
        input_ids: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
        select: Tensor | None = None,
        head: Callable[[Tensor, Tensor, Tensor | None], T] | None = None,
        reading: object = None,
    ) -> Tensor | T:
        """Logits (B, T, V) at every position, or (n, V) at the n positions where `select` (B, T) is True, row by row.

        The other arguments and errors are those of `hidden`. Losses select their targets, because the head takes a
        third of nano's compute. With `head`, returns `head(states, matrix, index)` instead: the distinct selected
        states (U, D), the head's matrix (V, D), and each position's index into the states (n,), or None if it is the
        identity.
        """
        if select is None:
            return self.logits(
                self.hidden(input_ids, positions=positions, documents=documents, cache=cache, reading=reading)
            )
        x, index = self.selected(
            input_ids, select, positions=positions, documents=documents, cache=cache, reading=reading
        )
        if head is not None:
            return head(x, self.table, index)
        return self.logits(x if index is None else x.index_select(0, index))

    def selected(
        self,
        input_ids: Tensor,
        select: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
        reading: object = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The distinct head inputs (U, D) at the n positions where `select` (B, T) is True.

        Also returns each position's index into these inputs, (n,), row by row; None if it is the identity. The other
        arguments and errors are those of `hidden`.
        """
        x, line, index = self._encode(input_ids, positions, documents, cache, reading, select)
        if index is not None:
            return x, index
        selected = _selected(select, line)
        return x if len(x) == len(selected) else x.index_select(0, selected), None

    def hidden(
        self,
        input_ids: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
        reading: object = None,
    ) -> Tensor:
        """The head's input, after the last norm: (B, T, D) for `input_ids` (B, T).

        `documents` (B, T) are ids of the documents packed into each row: tokens attend only within their own document
        (None: each row is one). Negative ids are padding; the output there is undefined. `positions` (B, T) count from
        0 in each document; if None, they are derived. On a CPU, the common prefix of rows with one document each is
        computed once. With a `cache`, the T tokens continue its B rows. `reading` is passed to the model's hook
        (model/layers.py). Raises ValueError if rows are longer than the context, a cache is combined with documents,
        or a row of `documents` returns to an earlier id.
        """
        x, line, _ = self._encode(input_ids, positions, documents, cache, reading)
        return _spread(x, line, input_ids)

    def _encode(
        self,
        input_ids: Tensor,
        positions: Tensor | None,
        documents: Tensor | None,
        cache: KVCache | None,
        reading: object = None,
        select: Tensor | None = None,
    ) -> tuple[Tensor, Line | None, Tensor | None]:
        """Hidden states (N, D) of the computed tokens, and which tokens these are (None: all B * T).

        With `select` (B, T), may compute only the states at its positions, (n, D), or, if rows share a prefix, only the
        distinct ones, (U, D), and then also returns each position's index into them, (n,).
        """
        batch, time = input_ids.shape
        causal = self.config.attention == "causal"
        if time > self.config.max_context:
            raise ValueError(f"rows of {time} tokens are longer than the model's context of {self.config.max_context}")
        if cache is not None:
            if documents is not None or positions is not None or not causal:
                raise ValueError("a cache has one causal document per row: pass neither documents nor positions")
            cached = Cached(cache, range(batch), [time] * batch)
            return self.line(input_ids.flatten(), cached.positions, cached), None, None
        if documents is None:
            if positions is None:
                positions = torch.arange(time, device=input_ids.device).expand(batch, time)
            line_positions = positions.flatten()
            read = self._reads(line_positions, None, None, reading)
            return self.line(input_ids.flatten(), line_positions, Rows(batch, causal), read), None, None
        if input_ids.device.type != "cpu" or self.compiled:
            line_positions = (positions_in(documents) if positions is None else positions).flatten()
            read = self._reads(line_positions, documents.flatten() < 0, None, reading)
            return self.line(input_ids.flatten(), line_positions, Masked.of(documents, causal), read), None, None
        # On a CPU, the line needs no mask and has no padding.
        separate = self._random or self.hook is not None  # whether rows must not share computed tokens
        packed = Line.of(documents, causal, None if separate else input_ids)
        ids, line_positions = input_ids.flatten(), packed.positions if positions is None else positions.flatten()
        if packed.computed is not None:
            ids = ids[packed.computed]
            line_positions = line_positions if positions is None else line_positions[packed.computed]
        read = self._reads(line_positions, None, packed.computed, reading)
        chosen = index = None
        if select is not None and packed.source is not None:
            chosen, index = packed.source[select.flatten()[packed.kept]].unique(return_inverse=True)
        elif select is not None and self.hook is None:
            selected = _selected(select, packed)
            chosen = selected if len(selected) <= FEW * len(ids) else None
        return self.line(ids, line_positions, packed.layout, read, chosen), packed, index

    def _reads(
        self, positions: Tensor, padding: Tensor | None, computed: Tensor | None, reading: object
    ) -> Reads | None:
        """See `LayerHook.reads`; None without a hook."""
        return None if self.hook is None else self.hook.reads(positions, padding, computed, reading)

    def line(
        self, ids: Tensor, positions: Tensor, layout: Layout, read: Reads | None = None, chosen: Tensor | None = None
    ) -> Tensor:
        """Run the layers on one line of tokens: `ids` and `positions` (N,) -> (N, D), after the last norm.

        `read` maps the stream (N, D) after each layer to the stream after the hook; None: there is no hook, or the
        tokens continue rows of a cache. With the indices `chosen` (U,), which no hook allows, returns only these
        tokens' states, (U, D); after the last attention, they depend on no other tokens.
        """
        if read is None and (hook := self.hook) is not None:
            read = hook.going_on(layout)
        table = self.model.embed_tokens.weight
        tokens, missing = len(ids), num_padding_rows(table, len(ids))
        if missing:
            ids, positions = functional.pad(ids, (0, missing)), functional.pad(positions, (0, missing))
            layout = Padded(layout, tokens)
        rows = None if chosen is None else functional.pad(chosen, (0, num_padding_rows(table, len(chosen))))
        x = self.model.embed_tokens(ids)
        x = functional.dropout(x, self._rate) if self._rate else x
        if self.neftune_alpha and self.training:
            x = x + self._noise(x, positions)
        cos, sin = rope_tables(positions, self.config)
        for index, layer in enumerate(self.model.layers):
            x = self._layer(layer, x, cos, sin, layout, index, rows if index == self.config.layers - 1 else None)
            if read is not None:
                x = torch.cat([read(index, x[:tokens]), x[tokens:]]) if missing else read(index, x)
        tokens = tokens if chosen is None else len(chosen)
        return self.model.norm(x if len(x) == tokens else x[:tokens])

    def _layer(
        self, layer: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, index: int, chosen: Tensor | None
    ) -> Tensor:
        """One layer (see `Block`), recomputed in the backward pass according to `checkpointing`."""
        if isinstance(layout, Cached):  # shapes change at each step: compiled layers would recompile every time
            return layer._call_impl(x, cos, sin, layout, index, self._rate)  # pyright: ignore[reportReturnType]
        recompute = self.checkpointing in ("full", "selective") or (self.checkpointing == "every_2" and index % 2 == 0)
        if not (recompute and self.training and torch.is_grad_enabled()):
            return layer(x, cos, sin, layout, index, self._rate, chosen)
        contexts = _selective_contexts if self.checkpointing == "selective" else noop_context_fn
        x = checkpoint(layer, x, cos, sin, layout, index, self._rate, chosen, use_reentrant=False, context_fn=contexts)  # pyright: ignore[reportAssignmentType]
        assert isinstance(x, Tensor)
        return x

    @property
    def table(self) -> Tensor:
        """The head's matrix (V, D)."""
        return self.model.embed_tokens.table if self.config.tied else self.lm_head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        missing = num_padding_rows(hidden, len(hidden)) if hidden.ndim == 2 else 0
        if missing:
            return linear(functional.pad(hidden, (0, 0, 0, missing)), self.table)[: len(hidden)]
        return linear(hidden, self.table)

    @property
    def compiled(self) -> bool:
        """Whether the blocks run under torch.compile, which needs the same shapes in every batch."""
        return getattr(self.model.layers[0], "_compiled_call_impl", None) is not None

    @property
    def _rate(self) -> float:
        return self.dropout if self.training else 0.0

    @property
    def _random(self) -> bool:
        """Whether identical tokens at identical positions may get different states."""
        return self.training and bool(self.dropout or self.neftune_alpha)

    def _noise(self, x: Tensor, positions: Tensor) -> Tensor:
        """NEFTune's noise (Jain et al. 2023, arXiv:2310.05914): uniform in +-alpha / sqrt(L D) for documents of L
        tokens, (N, D).
        """
        document = (positions == 0).cumsum(0)  # (N,) increments where positions restart
        lengths = torch.bincount(document)[document]
        return torch.empty_like(x).uniform_(-1, 1) * (self.neftune_alpha / (lengths * x.shape[1]).sqrt())[:, None]

    def num_parameters(self) -> int:
        """Number of weights; a tied embedding counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, context: int) -> int:
        """Training FLOPs per token (see `ModelConfig.flops_per_token`), including the hook's."""
        return self.config.flops_per_token(context) + (0 if self.hook is None else self.hook.flops_per_token())

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Draw fresh weights: normal, with the two projections into the residual stream scaled by 1/sqrt(2 * layers).

        This follows GPT-2 (Radford et al. 2019, 2.3), whose 0.02 is `ModelConfig.initializer_range` at width 1250.
        Norms start at 1, biases at 0. The result depends only on the generator's state: weights are drawn on its
        device, in the order of `state_dict()`.
        """
        for name, parameter in self.named_parameters():
            if self.hook is not None and name.startswith(f"{self.hook.name}."):
                continue
            if parameter.ndim < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = self.config.initializer_range / ((2 * self.config.layers) ** 0.5 if into_stream else 1.0)
            weights = torch.empty(parameter.shape, device=generator.device).normal_(0.0, std, generator=generator)
            parameter.copy_(weights)
        if self.hook is not None:
            self.hook.initialize(generator)


def _selective_contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """The context managers of "selective" checkpointing for a layer's forward pass and its recomputation."""
    return create_selective_checkpoint_contexts(_selective_policy)


def _selective_policy(
    _context: SelectiveCheckpointContext, operation: OpOverload, *_: object, **__: object
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in SAVED_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE


def num_padding_rows(x: Tensor, rows: int) -> int:
    """Number of padding rows for a product: oneDNN takes 4 to 20 ms to compile a bf16 kernel for each new shape."""
    return -rows % EVEN_ROWS if rows > EVEN_ROWS and cpu_autocast(x) else 0


def _selected(select: Tensor, line: Line | None) -> Tensor:
    """Indices (n,) of the line's tokens selected by `select` (B, T)."""
    kept = select.flatten() if line is None or line.kept is None else select.flatten()[line.kept]
    return kept.nonzero().squeeze(1)


def _spread(x: Tensor, line: Line | None, input_ids: Tensor) -> Tensor:
    """(N, D) -> (B, T, D), with zeros where padding was left out."""
    if line is not None and line.source is not None:
        x = x.index_select(0, line.source)
    if line is not None and line.kept is not None:
        x = x.new_zeros(input_ids.numel(), x.shape[-1]).index_copy(0, line.kept, x)
    return x.view(*input_ids.shape, -1)
