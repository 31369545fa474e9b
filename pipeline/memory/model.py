"""A memory: a bank of learnable rows in chapters; a text chooses chapters and reads them by cross-attention.

    u = mean of the normed states of a unit's source span      z = W u + b      p = softmax(z)
    w_c = top_k p_c / (sum of p over the chosen) for chosen chapters, 1 for shared ones
    x <- x + W_o attention(q = W_q norm(x), k = W_k m, v = W_v m), with ln w_c added to the logits of the rows of
    chapter c
    qk_norm: q and k divided by their root mean square      gated: W_o (read * silu(W_g norm(x)))
    centered: z = W norm(u - c) + b, with c the mean of u over training batches before the first step; b for u = 0

One softmax runs over all rows of the chosen and the shared chapters, so if all chapters are chosen with equal p, this
is attention over the entire bank. W_o starts at zero, so training starts from the base model. The idea comes from
Tasmay-Tibrewal/Memory; there, a text chooses based on all its positions, including later ones, so the gain over a
causal model cannot be measured. Here, a unit (tokens that choose together) chooses based on the tokens before it:

    routing   unit; the source span whose mean chooses
    chunk     W tokens of one document; the chunk before it (zeros for the first chunk)
    prompt    an answer (positions with a loss) and the block before it; that block. Text without answers is chunked
    token     each token; the token itself
    sequence  an entire document; the same document, so a position depends on later ones

A unit never crosses document boundaries, and padding belongs to no unit. The losses that balance the choices are in
`memory/training.py`.

**Decoding** needs more than keys and values (`memory/cache.py`). With routing by prompt, a row's first pass must cover
the entire block before the answer: this block is all tokens of the pass but the last, which already has a loss.

Not supported: positions (RoPE) or an order of the rows in the bank. `top_k` chapters are chosen per unit, not per head.

Shapes: N tokens, U units, L tokens in a unit, D width, M numbers in a row of the bank, H query heads, K key heads, h
head size, C routed and S shared chapters of T rows, k chosen chapters.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from pipeline.memory.cache import memory_cache, question_length, state
from pipeline.memory.config import MODEL_TYPE, MemoryConfig
from pipeline.model.cache import CacheLayout, KVCache
from pipeline.model.config import ModelConfig
from pipeline.model.layers import LayerHook, Layout, Linear, Reads, RMSNorm

ROUTER_STD = 0.02  # for fresh router weights
NAME = "memory"  # the memory's attribute name in a model
HF_KEYS = {"architectures": ["StagecoachMemory"], "model_type": MODEL_TYPE}


@dataclass(frozen=True)
class Units:
    """U units of a line of N tokens. Tokens are indices into the line, padded with N."""

    places: Tensor  # (U, L) the tokens of each unit, which read the same chapters
    sources: Tensor | None  # (U, M) the tokens averaged for the choice; None: each unit is a token and its own source
    back: Tensor  # (N,) index of each token in `places`, flattened; U * L for padding

    @property
    def counts(self) -> Tensor:
        """Number of source tokens of each unit, (U, 1), at least 1."""
        assert self.sources is not None
        return (self.sources < len(self.back)).sum(1, keepdim=True).clamp_min(1)


@dataclass(frozen=True)
class Routed:
    """The chapters chosen by the units of a line in one layer."""

    logits: Tensor  # (U, C) float32
    chosen: Tensor  # (U, k) chapters, 0 to C - 1
    log_weights: Tensor  # (U, k) their ln w

    @property
    def probabilities(self) -> Tensor:
        """p, (U, C) float32."""
        return self.logits.softmax(-1)


@dataclass
class Reading:
    """How a forward pass reads the memory, and the results by layer."""

    trained: Tensor | None = None  # (B, T) bool, positions with a loss, for routing by prompt; None: all
    off: bool = False  # read nothing
    choose: Callable[[int, Tensor], Tensor] | None = None  # (layer, logits (U, C)) -> chapters to read (U, k)
    watch: bool = False  # measure the reads
    routed: dict[int, Routed] = field(default_factory=dict)  # result
    measured: dict[int, dict[str, float]] = field(default_factory=dict)  # result, with `watch`
    means: dict[int, Tensor] = field(default_factory=dict)  # result, with `watch`: u (U, D)


class Memory(LayerHook):
    """The banks and the layers' readers. Without a `generator`, all weights stay zero until loaded."""

    name = NAME
    hf_keys = HF_KEYS

    def __init__(self, config: MemoryConfig, shape: ModelConfig, generator: torch.Generator | None = None) -> None:
        """Raises ValueError if the layers or heads do not fit the model."""
        super().__init__()
        self.config, self.shape = config, shape
        self.leaky = config.leaky
        layers = config.placed(shape.layers)
        banks = config.banks(len(layers))
        self.bank_of = dict(zip(layers, banks, strict=True))
        self.bank = nn.ModuleList(Bank(config, shape.width) for _ in range(max(banks, default=-1) + 1))
        self.readers = nn.ModuleDict({str(layer): Reader(config, shape) for layer in layers})
        if generator is not None:
            self.initialize(generator)

    def reads(self, positions: Tensor, padding: Tensor | None, computed: Tensor | None, reading: object) -> Reads:
        """Like `LayerHook.reads`, with a `Reading` or None."""
        config, reading = self.config, Reading() if reading is None else reading
        assert isinstance(reading, Reading)
        if reading.off:
            return lambda layer, x: x
        trained = None if reading.trained is None else reading.trained.flatten()
        if trained is not None and computed is not None:
            trained = trained[computed]
        units = cut(positions, routing=config.routing, window=config.window, padding=padding, trained=trained)
        return lambda layer, x: self.read(layer, x, units, reading)

    def going_on(self, layout: Layout) -> Reads:
        """The reads for a cache's new tokens, which `layout` has already added to the lengths.

        Raises ValueError for routing by sequence, which would need the entire text in advance.
        """
        assert isinstance(layout, CacheLayout), "expected a layout of rows of a cache"
        return _cached_reads(self, layout)

    def read(self, layer: int, x: Tensor, units: Units, reading: Reading) -> Tensor:
        """The stream (N, D) after a layer's read; unchanged in a non-reading layer."""
        if layer not in self.bank_of or not len(units.places):
            return x
        reader, bank = self.of(layer)
        normed = reader.norm(x)
        chooser = None if reading.choose is None else lambda logits: reading.choose(layer, logits)  # type: ignore[misc]
        u = means(normed, units)
        routed = reader.route(u, chooser)
        reading.routed[layer] = routed
        out = reader.out(normed, reader.attend(normed, units, routed, bank))
        if reading.watch:
            reading.means[layer] = u
            reading.measured[layer] = {
                "read_share": float(out.float().norm() / x.float().norm()),
                "row_entropy": reader.row_entropy(normed, units, routed, bank),
            }
        return x + out

    def of(self, layer: int) -> tuple["Reader", nn.Module]:
        """The reader of a layer and its bank: a `Bank`, or a `QuantisedBank` (memory/files.py)."""
        reader, bank = self.readers[str(layer)], self.bank[self.bank_of[layer]]
        assert isinstance(reader, Reader)
        return reader, bank

    def centers(self) -> list[Tensor]:
        """c of each reading layer, in order; empty without `centered`."""
        readers = [reader for reader in self.readers.values() if isinstance(reader, Reader)]
        return [reader.center for reader in readers if self.config.centered]

    def flops_per_token(self) -> int:
        """Training FLOPs per token for the reads, counted as in `ModelConfig.flops_per_token`; keys and values are
        counted per batch, not per token.
        """
        total, rows = 0, (self.config.shared + self.config.top_k) * self.config.chapter_rows
        for reader in self.readers.values():
            assert isinstance(reader, Reader)
            own = (reader.q_proj, reader.o_proj, reader.gate_proj)
            weights = sum(p.numel() for part in own if part is not None for p in part.parameters())
            total += 6 * weights + 12 * reader.heads * reader.head_dim * rows
        return total

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Fresh weights, drawn in the order of `state_dict()` on the generator's device.

        Rows are normal with standard deviation `bank_std`, routers with 0.02, a bank's second factor with 1/sqrt(r),
        projections as in the model; W_o (or the second of its two factors) and biases are zero, norms one.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2 or name.endswith(("o_proj.weight", "o_proj.up.weight")):
                parameter.fill_(0.0 if parameter.ndim > 1 or name.endswith("bias") else 1.0)
                continue
            if name.endswith("rows"):
                std = self.config.bank_std
            elif name.endswith("router.weight"):
                std = ROUTER_STD
            elif name.endswith("proj.weight"):
                std = self.shape.initializer_range
            else:
                std = parameter.shape[1] ** -0.5
            weights = torch.empty(parameter.shape, device=generator.device).normal_(0.0, std, generator=generator)
            parameter.copy_(weights)


class Bank(nn.Module):
    """N rows of M numbers."""

    def __init__(self, config: MemoryConfig, width: int) -> None:
        super().__init__()
        narrow = config.bank_rank or width
        self.rows = nn.Parameter(torch.zeros(config.rows, narrow))  # (N, M), or A of M = A B^T
        self.factor = nn.Parameter(torch.zeros(width, narrow)) if config.storage == "factorized" else None  # B (D, r)

    def forward(self, which: Tensor | None = None) -> Tensor:
        """The rows (..., M) with the indices `which` (...); None: all rows."""
        rows = self.rows if which is None else self.rows[which]
        return rows if self.factor is None else functional.linear(rows, self.factor)


class Projection(nn.Module):
    """up(down(x)): a low-rank matrix."""

    def __init__(self, num_in: int, num_out: int, rank: int) -> None:
        super().__init__()
        self.down, self.up = Linear(num_in, rank), Linear(rank, num_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class Reader(nn.Module):
    """One layer's part of the memory: its norm, router and projections."""

    center: Tensor  # (D,) c, with `centered`: zeros until measured by `memory/training.py`

    def __init__(self, config: MemoryConfig, shape: ModelConfig) -> None:
        super().__init__()
        self.config, self.heads, self.kv_heads = config, shape.heads, shape.kv_heads
        narrow = config.bank_rank if config.storage == "reduced" else None
        if narrow is not None and narrow % shape.heads:
            raise ValueError(
                f"memory.bank_rank: reduced storage needs a multiple of the number of heads ({shape.heads}), found "
                f"{narrow}"
            )
        self.head_dim = shape.head_dim if narrow is None else narrow // shape.heads
        inner, outer, row = self.heads * self.head_dim, self.kv_heads * self.head_dim, narrow or shape.width

        def projection(num_in: int, num_out: int) -> nn.Module:
            return Linear(num_in, num_out) if config.rank is None else Projection(num_in, num_out, config.rank)

        self.norm = RMSNorm(shape.width, shape.norm_eps)
        self.router = Linear(shape.width, config.chapters, bias=True)
        if config.centered:
            self.register_buffer("center", torch.zeros(shape.width))
        self.q_proj, self.k_proj = projection(shape.width, inner), projection(row, outer)
        self.v_proj, self.o_proj = projection(row, outer), projection(inner, shape.width)
        self.gate_proj = projection(shape.width, inner) if config.gated else None

    def route(self, u: Tensor, choose: Callable[[Tensor], Tensor] | None = None) -> Routed:
        """The chapters chosen by units with means `u` (U, D); ties go to the lower index. Uses float32."""
        with torch.autocast(u.device.type, enabled=False):
            wide = torch.promote_types(u.dtype, torch.float32)
            bias, u = self.router.bias, u.to(wide)
            if self.config.centered:
                own = functional.rms_norm(u - self.center.to(wide), u.shape[-1:], eps=self.norm.eps)
                u = own * u.any(-1, keepdim=True)
            logits = functional.linear(u, self.router.weight.to(wide), None if bias is None else bias.to(wide))
        if choose is None:
            chosen = logits.detach().sort(dim=-1, descending=True, stable=True).indices[:, : self.config.top_k]
        else:
            chosen = choose(logits.detach())
        own = logits.gather(1, chosen)  # ln w = ln k + ln p - ln (sum of p over the chosen)
        return Routed(logits, chosen, own.log_softmax(-1) + math.log(chosen.shape[1]))

    def attend(
        self,
        normed: Tensor,
        units: Units,
        routed: Routed,
        bank: nn.Module,
        projected: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The reads (N, H * h) of tokens (N, D), zeros for padding. `projected`: keys and values (rows, K, h) of the
        entire bank.
        """
        config = self.config
        num, each = len(units.places), config.chapter_rows
        q = self.queries(normed)
        if projected is None and num * config.top_k >= config.chapters:
            projected = self.projected(bank)
        if units.sources is None and projected is not None:
            out = self._attend_masked(q[units.places[:, 0]], routed, *projected)
        else:
            shared = torch.arange(config.shared, device=q.device).expand(num, -1)
            chapters = torch.cat([shared, config.shared + routed.chosen], 1)  # (U, S + k)
            if projected:
                keys, values = (
                    x.unflatten(0, (-1, each))[chapters].flatten(1, 2) for x in projected
                )  # (U, rows, K, h)
            else:
                which = (chapters[..., None] * each + torch.arange(each, device=q.device)).flatten(1)  # (U, rows)
                keys, values = self.projected(bank, which)
            weights = functional.pad(routed.log_weights, (config.shared, 0)).repeat_interleave(each, 1)  # (U, rows)
            queries = functional.pad(q, (0, 0, 0, 0, 0, 1))[units.places]  # (U, L, H, h), zero-padded
            out = self._attend_rows(queries, keys, values, weights).flatten(0, 1)  # (U * L, H, h)
        return functional.pad(out, (0, 0, 0, 0, 0, 1))[units.back].flatten(1)

    @torch.no_grad()
    def row_entropy(self, normed: Tensor, units: Units, routed: Routed, bank: nn.Module) -> float:
        """Mean entropy of the attention over the rows of the chosen chapters, divided by its maximum."""
        q = self.queries(normed).float()
        keys, _ = self.projected(bank)
        keys = keys.float().repeat_interleave(self.heads // self.kv_heads, 1)  # (rows, H, h)
        weights = self._row_log_weights(routed)  # (U, rows)
        unit_of = units.back // units.places.shape[1]
        in_unit = unit_of < len(units.places)
        scores = torch.einsum("nhd,mhd->nhm", q[in_unit], keys) * self.head_dim**-0.5 + weights[unit_of[in_unit], None]
        logs = scores.log_softmax(-1)
        entropy = -(logs.exp() * logs.clamp_min(-1e4)).sum(-1)
        most = (self.config.shared + self.config.top_k) * self.config.chapter_rows
        return float(entropy.mean() / math.log(max(2, most)))

    def _row_log_weights(self, routed: Routed) -> Tensor:
        """ln w of every row of the bank, -inf for unchosen chapters: (U, rows), at least float32."""
        config, logs = self.config, routed.log_weights
        wide = torch.promote_types(logs.dtype, torch.float32)
        mask = torch.full((len(logs), config.chapters), float("-inf"), device=logs.device, dtype=wide)
        mask = mask.scatter(1, routed.chosen, logs.to(wide))
        return functional.pad(mask, (config.shared, 0)).repeat_interleave(config.chapter_rows, 1)

    def out(self, normed: Tensor, read: Tensor) -> Tensor:
        """The update (N, D) of the stream for a read (N, H * h)."""
        return self.o_proj(read if self.gate_proj is None else read * functional.silu(self.gate_proj(normed)))

    def queries(self, normed: Tensor) -> Tensor:
        """Queries (N, H, h) of normed states (N, D)."""
        return self._norm_heads(self.q_proj(normed).unflatten(-1, (self.heads, self.head_dim)))

    def projected(self, bank: nn.Module, which: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values (..., K, h) of the rows `which` of the bank; None: all rows."""
        rows = bank(which)
        keys, values = (p(rows).unflatten(-1, (self.kv_heads, self.head_dim)) for p in (self.k_proj, self.v_proj))
        return self._norm_heads(keys), values

    def _norm_heads(self, x: Tensor) -> Tensor:
        """RMS norm without weights over each head, with `qk_norm`."""
        return functional.rms_norm(x, (self.head_dim,), eps=self.norm.eps) if self.config.qk_norm else x

    def _attend_rows(self, q: Tensor, keys: Tensor, values: Tensor, weights: Tensor) -> Tensor:
        """One softmax over all rows: q (U, L, H, h), keys and values (U, rows, K, h), ln w (U, rows) -> (U, L, H,
        h).
        """
        return (self._products if q.device.type == "cpu" else self._kernel)(q, keys, values, weights)

    def _products(self, q: Tensor, keys: Tensor, values: Tensor, weights: Tensor) -> Tensor:
        """Plain products: units are short, and a fused attention kernel is three times slower on a CPU."""
        grouped = q.transpose(1, 2).reshape(len(q), self.kv_heads, -1, self.head_dim)  # (U, K, H / K * L, h)
        scores = (grouped * self.head_dim**-0.5) @ keys.permute(0, 2, 3, 1)
        wide = torch.promote_types(scores.dtype, torch.float32)
        shares = (scores.to(wide) + weights.to(wide)[:, None, None]).softmax(-1)
        out = shares.to(values.dtype) @ values.transpose(1, 2)
        return out.reshape(len(q), self.heads, -1, self.head_dim).transpose(1, 2)

    def _kernel(self, q: Tensor, keys: Tensor, values: Tensor, weights: Tensor) -> Tensor:
        """ln w becomes one more dimension of the keys, which every fused attention kernel accepts."""
        size = self.head_dim
        extra = (weights.to(keys.dtype) * size**0.5)[..., None, None].expand(*keys.shape[:-1], 1)
        q = functional.pad(q, (0, 1), value=1.0).transpose(1, 2)  # (U, H, L, h + 1)
        keys, values = (self._expand_heads(x) for x in (torch.cat([keys, extra], -1), functional.pad(values, (0, 1))))
        return scaled_dot_product_attention(q, keys, values, scale=size**-0.5)[..., :size].transpose(1, 2)

    def _attend_masked(self, q: Tensor, routed: Routed, keys: Tensor, values: Tensor) -> Tensor:
        """For units of one token: q (U, H, h) and the entire bank (rows, K, h), with a mask for the chosen chapters ->
        (U, H, h).
        """
        mask = self._row_log_weights(routed)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        with torch.autocast(q.device.type, enabled=False):
            q, keys, values = (x.to(wide)[None] for x in (q, keys, values))
            out = scaled_dot_product_attention(
                q.transpose(1, 2),
                self._expand_heads(keys),
                self._expand_heads(values),
                attn_mask=mask[None, None].to(wide),
            )
        return out[0].transpose(0, 1)

    def _expand_heads(self, x: Tensor) -> Tensor:
        """(U, rows, K, h) -> (U, H, rows, h): each key head repeated for its query heads."""
        return x.transpose(1, 2).repeat_interleave(self.heads // self.kv_heads, 1)


def means(normed: Tensor, units: Units) -> Tensor:
    """u (U, D): the mean of the states (N, D) of each unit's source tokens, zeros for a unit without any."""
    if units.sources is None:
        return normed[units.places[:, 0]]
    return functional.pad(normed, (0, 0, 0, 1))[units.sources].sum(1) / units.counts


# -- units of a line ---------------------------------------------------------------------------------------------------


def cut(
    positions: Tensor, *, routing: str, window: int, padding: Tensor | None = None, trained: Tensor | None = None
) -> Units:
    """Units of a line: `positions` (N,) count from 0 in each document; `padding` and `trained` (N,) bool.

    `trained` marks positions with a loss; None: all positions, in which case routing by prompt falls back to chunks.
    """
    where, num = positions.device, len(positions)
    own = positions.cpu().numpy()
    begins = np.diff(own, prepend=own[:1] - 2) != 1  # of documents
    if padding is not None:
        hidden = padding.cpu().numpy()
        begins |= np.diff(hidden, prepend=hidden[:1]).astype(bool)
    else:
        hidden = np.zeros(num, dtype=bool)
    if routing == "token":
        tokens = torch.from_numpy(np.flatnonzero(~hidden))
        back = torch.full((num,), len(tokens))
        back[tokens] = torch.arange(len(tokens))
        return Units(tokens[:, None].to(where), None, back.to(where))
    if routing == "prompt":
        with_loss = np.ones(num, dtype=bool) if trained is None else trained.cpu().numpy()
        readers, sources = _cut_by_prompt(begins, with_loss, window)
    elif routing == "sequence":
        readers = sources = _split_at(np.flatnonzero(begins), num)
    else:
        readers, sources = _cut_by_chunk(begins, window)
    visible = [number for number, span in enumerate(readers) if len(span) and not hidden[span[0]]]
    return _units_of([readers[i] for i in visible], [sources[i] for i in visible], num, where)


def _units_of(readers: list[np.ndarray], sources: list[np.ndarray], num: int, where: torch.device) -> Units:
    """Units from the spans of their tokens and of their sources, in a line of `num` tokens."""
    places = _pad_spans(readers, num)
    back = np.full(num + 1, places.size)
    back[places.reshape(-1)] = np.arange(places.size)
    return Units(
        torch.from_numpy(places).to(where),
        torch.from_numpy(_pad_spans(sources, num)).to(where),
        torch.from_numpy(back[:num]).to(where),
    )


def _cut_by_chunk(begins: np.ndarray, window: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The spans of units and of their sources."""
    readers: list[np.ndarray] = []
    sources: list[np.ndarray] = []
    for document in _split_at(np.flatnonzero(begins), len(begins)):
        chunks = [document[at : at + window] for at in range(0, len(document), window)]
        readers += chunks
        sources += [document[:0], *chunks[:-1]]
    return readers, sources


def _cut_by_prompt(begins: np.ndarray, trained: np.ndarray, window: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The spans of units and of their sources."""
    readers: list[np.ndarray] = []
    sources: list[np.ndarray] = []
    for document in _split_at(np.flatnonzero(begins), len(begins)):
        own = trained[document]
        changes = np.flatnonzero(np.diff(own.astype(np.int8), prepend=1 - own[:1].astype(np.int8)))
        blocks = _split_at(changes, len(document))
        prompts = [number for number, block in enumerate(blocks) if not own[block[0]] and number + 1 < len(blocks)]
        first = int(blocks[prompts[0]][0] if prompts else len(document))
        for begin in range(0, first, window):  # text before the first prompt, or the entire text
            readers.append(document[begin : min(begin + window, first)])
            sources.append(document[max(0, begin - window) : begin])
        for prompt, following in pairwise([*prompts, len(blocks)]):
            end = blocks[following][0] if following < len(blocks) else len(document)
            readers.append(document[blocks[prompt][0] : end])
            sources.append(document[blocks[prompt]])
    return readers, sources


def _split_at(starts: np.ndarray, num: int) -> list[np.ndarray]:
    """The indices 0 to num - 1, split at `starts`, the first of which is 0."""
    return np.split(np.arange(num), starts[1:]) if num else []


def _pad_spans(spans: list[np.ndarray], fill: int) -> np.ndarray:
    """Spans of indices as rows of one array, (U, L)."""
    rows = np.full((len(spans), max(1, max(map(len, spans), default=0))), fill, dtype=np.int64)
    for row, span in zip(rows, spans, strict=True):
        row[: len(span)] = span
    return rows


# -- units of a growing cache ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CachedUnit:
    """New tokens of a row that read the same chapters, and the source positions for their choice."""

    row: int
    number: int  # index of the unit in its row
    begin: int  # of the source positions
    end: int
    places: np.ndarray  # indices of the new tokens in the line
    continued: bool  # some of its tokens came earlier


def _cached_reads(memory: Memory, layout: CacheLayout) -> Reads:
    """See `Memory.going_on`."""
    cache, own_cache = layout.cache, memory_cache(layout.cache)
    if memory.config.leaky:
        raise ValueError(
            "memory: `routing: sequence` needs the entire text, so the model cannot generate; train"
            " with `routing: chunk`"
        )
    where = cache.keys[0].device
    own = [
        [past - cache.before(row) + i for i in range(count)]
        for row, count, past in zip(layout.rows, layout.counts, layout.past)
    ]
    row_of = torch.tensor([row for row, columns in zip(layout.rows, own) for _ in columns], device=where)
    columns = torch.tensor([column for part in own for column in part], device=where)
    cached_units = _cached_units(memory.config, layout)
    num = len(columns)
    new = [
        number
        for number, unit in enumerate(cached_units)
        if not unit.continued or own_cache.unit_of[unit.row] != unit.number
    ]
    for unit in cached_units:
        own_cache.unit_of[unit.row] = unit.number
    if memory.config.routing == "token":
        line = torch.arange(num, device=where)
        units = Units(line[:, None], None, line)
    else:
        spans = [unit.places for unit in cached_units]
        units = _units_of(spans, spans, num, where)
    rows = torch.tensor([unit.row for unit in cached_units], device=where)

    def read(layer: int, x: Tensor) -> Tensor:
        if layer not in memory.bank_of:
            return x
        reader, bank = memory.of(layer)
        if layer not in own_cache.banks:
            own_cache.banks[layer] = reader.projected(bank)
        normed = reader.norm(x)
        if units.sources is None:
            u = normed
        else:
            own_cache.states[layer][row_of, columns] = normed.to(own_cache.states[layer].dtype)
            u = _cached_means(cache, layer, cached_units, rows, new)
        return x + reader.out(normed, reader.attend(normed, units, reader.route(u), bank, own_cache.banks[layer]))

    return read


def _cached_means(cache: KVCache, layer: int, units: list[CachedUnit], rows: Tensor, new: list[int]) -> Tensor:
    """u (U, D) of units: cached from the previous step, except for the `new` ones. A row caches its last unit's u."""
    chose = memory_cache(cache).chose[layer]
    u = chose[rows]
    for number in new:
        unit = units[number]
        u[number] = state(cache, layer, unit.row, unit.begin, unit.end).sum(0) / max(1, unit.end - unit.begin)
        chose[unit.row] = u[number]
    return u


def _cached_units(config: MemoryConfig, layout: CacheLayout) -> list[CachedUnit]:
    """The units of the new tokens, row by row."""
    cache, units, first = layout.cache, list[CachedUnit](), 0
    by_prompt, window = config.routing == "prompt", config.window
    for row, count, past in zip(layout.rows, layout.counts, layout.past):
        if by_prompt and past == 0:
            memory_cache(cache).question_lengths[row] = count - 1
        question = question_length(cache, row) if by_prompt else 0
        line = np.arange(first, first + count)
        if question:
            units.append(CachedUnit(row, 0, 0, question, line, continued=past > 0))
        else:
            for number in range(past // window, (past + count - 1) // window + 1):
                tokens = line[(past + np.arange(count)) // window == number]
                begin, end = max(0, number - 1) * window, number * window
                units.append(CachedUnit(row, number, begin, end, tokens, continued=past > end))
        first += count
    return units
