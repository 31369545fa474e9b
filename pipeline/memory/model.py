"""A memory: a bank of learnable rows in chapters, of which a text chooses a few and reads them by cross-attention.

    u = mean of the normed states of a span that the unit may know      z = W u + b      p = softmax(z)
    w_c = top_k p_c / (sum of p over the chosen) for chosen chapters, 1 for shared ones
    x <- x + W_o attention(q = W_q norm(x), k = W_k m, v = W_v m), with ln w_c added to the logits of the rows of
    chapter c
    qk_norm: q and k divided by their root mean square      gated: W_o (read * silu(W_g norm(x)))

One softmax runs over all rows of the chosen and the shared chapters, so with all chapters chosen and equal p this is
attention over the whole bank. W_o is zero at the start: the first step is the base model's. The idea is that of
Tasmay-Tibrewal/Memory; there a text chooses from all of its positions, later ones too, so what it gains over a causal
model cannot be told. Here a unit chooses from what stands before it (`memory_units.py`); the losses that spread the
choice are in `memory/losses.py`.

Not promised: positions in the bank (no RoPE), or an order of its rows. `top_k` chapters per unit, never per head.

Shapes: N tokens, U units, L tokens of a unit, D width, M numbers of a bank's row, H query heads, K key heads, h head
size, C routed and S shared chapters of T rows, k chosen.

Which tokens choose chapters together, and from what: the units of a line of tokens.

    chunk     W tokens of one document; the mean of the chunk before it, zeros for the first
    prompt    an answer (positions with loss) and the block before it; the mean of that block. Text without one goes by
              chunks
    token     each token by itself
    sequence  a whole document, the mean of all of it: a position learns of later ones

Here are places and numbers alone; `memory.py` has the states. A unit never crosses documents, and padding belongs to
none.

Decoding with a memory: what new tokens of a cache's rows choose from.

Beside keys and values the cache keeps, of each layer that reads, the normed states that units choose from, and the mean
that a row's current unit chose from: it is computed anew when a unit begins, and where a row was rewound. Running sums
would be smaller, but a row of a server is cut back to any length (drafts, prompts that begin alike), and a sum does not
know what its parts were. The keys and values of the bank are projected once for a cache.

With routing by prompt, what a row gets first is the block before the answer, all but its last token, which has a loss
already. It must come at once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from pipeline.memory.config import MemoryConfig
from pipeline.model.cache import KVCache
from pipeline.model.config import ModelConfig
from pipeline.model.layers import Linear, RMSNorm


@dataclass(frozen=True)
class Units:
    """U units of a line of N tokens. Places are numbers of tokens, N where a unit has fewer."""

    places: Tensor  # (U, L) the tokens that read what the unit chose
    sources: Tensor | None  # (U, M) the tokens whose mean chooses; None: each unit is a token, and its own source
    back: Tensor  # (N,) where each token stands in `places`, flattened; U * L for padding

    @property
    def counts(self) -> Tensor:
        """Sources of each unit, (U, 1), at least 1."""
        assert self.sources is not None
        return (self.sources < len(self.back)).sum(1, keepdim=True).clamp_min(1)


def cut(
    positions: Tensor, *, routing: str, window: int, padding: Tensor | None = None, trained: Tensor | None = None
) -> Units:
    """Units of a line: `positions` (N,) count from 0 in each document; `padding` and `trained` (N,) bool.

    `trained` are positions with a loss; without it all have one, so that routing by prompt goes by chunks.
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
        kept = torch.from_numpy(np.flatnonzero(~hidden))
        back = torch.full((num,), len(kept))
        back[kept] = torch.arange(len(kept))
        return Units(kept[:, None].to(where), None, back.to(where))
    if routing == "prompt":
        readers, sources = _by_prompt(
            begins, np.ones(num, dtype=bool) if trained is None else trained.cpu().numpy(), window
        )
    elif routing == "sequence":
        readers = sources = _pieces(np.flatnonzero(begins), num)
    else:
        readers, sources = _by_chunk(begins, window)
    kept = [number for number, span in enumerate(readers) if len(span) and not hidden[span[0]]]
    return units([readers[i] for i in kept], [sources[i] for i in kept], num, where)


def units(readers: list[np.ndarray], sources: list[np.ndarray], num: int, where: torch.device) -> Units:
    """Units of spans of places in a line of `num` tokens."""
    places = _padded(readers, num)
    back = np.full(num + 1, places.size)
    back[places.reshape(-1)] = np.arange(places.size)
    return Units(
        torch.from_numpy(places).to(where),
        torch.from_numpy(_padded(sources, num)).to(where),
        torch.from_numpy(back[:num]).to(where),
    )


def _by_chunk(begins: np.ndarray, window: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    readers: list[np.ndarray] = []
    sources: list[np.ndarray] = []
    for document in _pieces(np.flatnonzero(begins), len(begins)):
        chunks = [document[at : at + window] for at in range(0, len(document), window)]
        readers += chunks
        sources += [document[:0], *chunks[:-1]]
    return readers, sources


def _by_prompt(begins: np.ndarray, trained: np.ndarray, window: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    readers: list[np.ndarray] = []
    sources: list[np.ndarray] = []
    for document in _pieces(np.flatnonzero(begins), len(begins)):
        own = trained[document]
        changes = np.flatnonzero(np.diff(own.astype(np.int8), prepend=1 - own[:1].astype(np.int8)))
        blocks = _pieces(changes, len(document))
        asked = [number for number, block in enumerate(blocks) if not own[block[0]] and number + 1 < len(blocks)]
        first = blocks[asked[0]][0] if asked else len(document)
        for at in range(0, int(first), window):  # text before the first prompt, or all of it
            readers.append(document[at : min(at + window, int(first))])
            sources.append(document[max(0, at - window) : at])
        for number, then in pairwise([*asked, len(blocks)]):
            end = blocks[then][0] if then < len(blocks) else len(document)
            readers.append(document[blocks[number][0] : end])
            sources.append(document[blocks[number]])
    return readers, sources


def _pieces(starts: np.ndarray, num: int) -> list[np.ndarray]:
    """The places 0 to num, cut at `starts`, of which the first is 0."""
    return np.split(np.arange(num), starts[1:]) if num else []


def _padded(spans: list[np.ndarray], fill: int) -> np.ndarray:
    """Spans of places as rows of one array, (U, L)."""
    found = np.full((len(spans), max(1, max(map(len, spans), default=0))), fill, dtype=np.int64)
    for row, span in zip(found, spans, strict=True):
        row[: len(span)] = span
    return found


# -- memory_state ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """New tokens of a row that read together, and the positions of the row that they choose from."""

    row: int
    number: int  # of the unit in its row
    begin: int
    end: int
    places: np.ndarray  # in the line
    begun: bool  # some of its tokens came before


def going_on(memory: Any, layout: Any) -> Callable[[int, Tensor], Tensor]:
    """How the line of a growing cache reads a `Memory`; `layout` has `cache`, `rows`, `counts` and `past`, and the
    tokens are counted in.

    Raises ValueError for routing by sequence: a text that is still to come cannot choose.
    """
    cache: KVCache = layout.cache
    if memory.config.leaky:
        raise ValueError(
            "memory: routing by sequence reads the whole text, so it cannot be decoded; train one that routes by chunk"
        )
    where = cache.keys[0].device
    own = [
        [past - cache.before(row) + i for i in range(count)]
        for row, count, past in zip(layout.rows, layout.counts, layout.past)
    ]
    row_of = torch.tensor([row for row, places in zip(layout.rows, own) for _ in places], device=where)
    places = torch.tensor([place for some in own for place in some], device=where)
    cuts = _cuts(memory, layout)
    num = len(places)
    new = [at for at, unit in enumerate(cuts) if not unit.begun or cache.unit_of[unit.row] != unit.number]
    for unit in cuts:
        cache.unit_of[unit.row] = unit.number
    if memory.config.routing == "token":
        line = torch.arange(num, device=where)
        together = Units(line[:, None], None, line)
    else:
        spans = [unit.places for unit in cuts]
        together = units(spans, spans, num, where)
    rows = torch.tensor([unit.row for unit in cuts], device=where)

    def read(layer: int, x: Tensor) -> Tensor:
        if layer not in memory.bank_of:
            return x
        reader, bank = memory.of(layer)
        if layer not in cache.banks:
            cache.banks[layer] = reader.projected(bank)
        normed = reader.norm(x)
        if together.sources is None:
            u = normed
        else:
            cache.states[layer][row_of, places] = normed.to(cache.states[layer].dtype)
            u = _means(cache, layer, cuts, rows, new)
        return x + reader.out(normed, reader.attend(normed, together, reader.route(u), bank, cache.banks[layer]))

    return read


def _means(cache: KVCache, layer: int, cuts: list[Unit], rows: Tensor, new: list[int]) -> Tensor:
    """u (U, D) of units: kept from the step before, but for the `new` ones. A row keeps that of its last unit."""
    u = cache.chose[layer][rows]
    for number in new:
        unit = cuts[number]
        u[number] = cache.state(layer, unit.row, unit.begin, unit.end).sum(0) / max(1, unit.end - unit.begin)
        cache.chose[layer][unit.row] = u[number]
    return u


def _cuts(memory: Any, layout: Any) -> list[Unit]:
    """The units of the new tokens, row by row."""
    cache, found, first = layout.cache, [], 0
    by_prompt, window = memory.config.routing == "prompt", memory.config.window
    for row, count, past in zip(layout.rows, layout.counts, layout.past):
        if by_prompt and past == 0:
            cache.asked[row] = count - 1
        asked = cache.asked_of(row) if by_prompt else 0
        line = np.arange(first, first + count)
        if asked:
            found.append(Unit(row, 0, 0, asked, line, begun=past > 0))
        else:
            for number in range(past // window, (past + count - 1) // window + 1):
                inside = (past + np.arange(count)) // window == number
                found.append(
                    Unit(
                        row,
                        number,
                        max(0, number - 1) * window,
                        number * window,
                        line[inside],
                        begun=past > number * window,
                    )
                )
        first += count
    return found


# -- memory ------------------------------------------------------------------------------------------------------------


Reads = Callable[[int, Tensor], Tensor]  # of a layer and the stream (N, D) behind it: the stream
ROUTER_STD = 0.02  # of its fresh weights


@dataclass(frozen=True)
class Routed:
    """What the units of a line chose in one layer."""

    logits: Tensor  # (U, C) float32
    chosen: Tensor  # (U, k) chapters, of 0 to C - 1
    log_weights: Tensor  # (U, k) ln w of these

    @property
    def probabilities(self) -> Tensor:
        """p, (U, C) float32."""
        return self.logits.softmax(-1)


@dataclass
class Reading:
    """What a forward pass is told about the memory, and what it tells of it by layer."""

    trained: Tensor | None = None  # (B, T) bool, positions with a loss, for routing by prompt; None: all
    off: bool = False  # read nothing
    choose: Callable[[int, Tensor], Tensor] | None = None  # of a layer and its logits (U, C): other chapters (U, k)
    watch: bool = False  # measure what is read
    routed: dict[int, Routed] = field(default_factory=dict)
    measured: dict[int, dict[str, float]] = field(default_factory=dict)  # with `watch`


class Memory(nn.Module):
    """The banks and the layers' readers. Without a `generator` its weights are zero, to be loaded."""

    def __init__(self, config: MemoryConfig, shape: ModelConfig, generator: torch.Generator | None = None) -> None:
        """Raises ValueError where the placement or the heads do not fit the model."""
        super().__init__()
        self.config, self.shape = config, shape
        self.added = False  # to a model that has its weights, whose own are then one group of rates (optim.py)
        layers = config.placed(shape.layers)
        banks = config.banks(len(layers))
        self.bank_of = dict(zip(layers, banks, strict=True))
        self.bank = nn.ModuleList(Bank(config, shape.width) for _ in range(max(banks, default=-1) + 1))
        self.readers = nn.ModuleDict({str(layer): Reader(config, shape) for layer in layers})
        if generator is not None:
            self.initialise(generator)

    def reads(self, positions: Tensor, padding: Tensor | None, trained: Tensor | None, reading: Reading) -> Reads:
        """How a line reads whose `positions` (N,) count from 0 in each document; `padding` and `trained` (N,) bool."""
        config = self.config
        units = cut(positions, routing=config.routing, window=config.window, padding=padding, trained=trained)
        return lambda layer, x: self.read(layer, x, units, reading)

    def going_on(self, layout: Any) -> Reads:
        """How the new tokens of a growing cache read, see `memory_state.going_on`."""
        return going_on(self, layout)

    def read(self, layer: int, x: Tensor, units: Units, reading: Reading) -> Tensor:
        """The stream (N, D) after the reading of a layer; unchanged where it does not read."""
        if layer not in self.bank_of or not len(units.places):
            return x
        reader, bank = self.of(layer)
        normed = reader.norm(x)
        choose = None if reading.choose is None else lambda logits: reading.choose(layer, logits)  # type: ignore[misc]
        routed = reader.route(means(normed, units), choose)
        reading.routed[layer] = routed
        out = reader.out(normed, reader.attend(normed, units, routed, bank))
        if reading.watch:
            reading.measured[layer] = {
                "read_share": float(out.float().norm() / x.float().norm()),
                "row_entropy": reader.row_entropy(normed, units, routed, bank),
            }
        return x + out

    def of(self, layer: int) -> tuple["Reader", nn.Module]:
        """The reader of a layer and its bank: a `Bank`, or one in few bits (quantised_bank.py)."""
        reader, bank = self.readers[str(layer)], self.bank[self.bank_of[layer]]
        assert isinstance(reader, Reader)
        return reader, bank

    def num_parameters(self) -> int:
        """All weights of banks and readers."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self) -> int:
        """FLOPs of training one token's reading, counted as `ModelConfig.flops_per_token` does; keys and values are
        a batch's, not a token's.
        """
        total, rows = 0, (self.config.shared + self.config.top_k) * self.config.chapter_rows
        for reader in self.readers.values():
            assert isinstance(reader, Reader)
            own = (reader.q_proj, reader.o_proj, reader.gate_proj)
            weights = sum(p.numel() for part in own if part is not None for p in part.parameters())
            total += 6 * weights + 12 * reader.heads * reader.head_dim * rows
        return total

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Fresh weights, drawn in the order of `state_dict()` on the generator's device.

        Rows normal with deviation `bank_std`, routers with 0.02, the second factor of a bank 1/sqrt(r), projections as
        the model's own, the way out zero (of two factors the second), norms one, biases zero.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2 or name.endswith(("o_proj.weight", "o_proj.up.weight")):
                parameter.fill_(0.0 if parameter.ndim > 1 or name.endswith("bias") else 1.0)
                continue
            std = (
                self.config.bank_std
                if name.endswith("rows")
                else ROUTER_STD
                if name.endswith("router.weight")
                else parameter.shape[1] ** -0.5
            )
            if name.endswith("proj.weight"):
                std = self.shape.initializer_range
            drawn = torch.empty(parameter.shape, device=generator.device).normal_(0.0, std, generator=generator)
            parameter.copy_(drawn)


class Bank(nn.Module):
    """N rows of M numbers."""

    def __init__(self, config: MemoryConfig, width: int) -> None:
        super().__init__()
        narrow = config.bank_rank or width
        self.rows = nn.Parameter(torch.zeros(config.rows, narrow))  # (N, M), or A of M = A B^T
        self.factor = nn.Parameter(torch.zeros(width, narrow)) if config.storage == "factorised" else None  # B (D, r)

    def forward(self, which: Tensor | None = None) -> Tensor:
        """The rows (..., M) of these numbers (...); all without."""
        rows = self.rows if which is None else self.rows[which]
        return rows if self.factor is None else functional.linear(rows, self.factor)


class Projection(nn.Module):
    """up(down(x)): a matrix of low rank."""

    def __init__(self, num_in: int, num_out: int, rank: int) -> None:
        super().__init__()
        self.down, self.up = Linear(num_in, rank), Linear(rank, num_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class Reader(nn.Module):
    """What one layer has of the memory: its norm, its router, its projections."""

    def __init__(self, config: MemoryConfig, shape: ModelConfig) -> None:
        super().__init__()
        self.config, self.heads, self.kv_heads = config, shape.heads, shape.kv_heads
        narrow = config.bank_rank if config.storage == "reduced" else None
        if narrow is not None and narrow % shape.heads:
            raise ValueError(
                f"memory.bank_rank: expected a multiple of the {shape.heads} heads with reduced storage, got {narrow}"
            )
        self.head_dim = shape.head_dim if narrow is None else narrow // shape.heads
        inner, outer, row = self.heads * self.head_dim, self.kv_heads * self.head_dim, narrow or shape.width

        def projection(num_in: int, num_out: int) -> nn.Module:
            return Linear(num_in, num_out) if config.rank is None else Projection(num_in, num_out, config.rank)

        self.norm = RMSNorm(shape.width, shape.norm_eps)
        self.router = Linear(shape.width, config.chapters, bias=True)
        self.q_proj, self.k_proj = projection(shape.width, inner), projection(row, outer)
        self.v_proj, self.o_proj = projection(row, outer), projection(inner, shape.width)
        self.gate_proj = projection(shape.width, inner) if config.gated else None

    def route(self, u: Tensor, choose: Callable[[Tensor], Tensor] | None = None) -> Routed:
        """The chapters that units of means `u` (U, D) choose; of equal logits the lower number. In float32."""
        with torch.autocast(u.device.type, enabled=False):
            wide = torch.promote_types(u.dtype, torch.float32)
            bias = self.router.bias
            logits = functional.linear(u.to(wide), self.router.weight.to(wide), None if bias is None else bias.to(wide))
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
        """What the tokens (N, D) read, (N, H * h): zeros for padding. `projected` keys and values of the whole bank
        (rows, K, h).
        """
        config = self.config
        num, each = len(units.places), config.chapter_rows
        q = self.queries(normed)
        if projected is None and num * config.top_k >= config.chapters:
            projected = self.projected(bank)
        if units.sources is None and projected is not None:
            out = self._masked(q[units.places[:, 0]], routed, *projected)
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
            asked = functional.pad(q, (0, 0, 0, 0, 0, 1))[units.places]  # (U, L, H, h), zeros where a unit has fewer
            out = self._joint(asked, keys, values, weights).flatten(0, 1)  # (U * L, H, h)
        return functional.pad(out, (0, 0, 0, 0, 0, 1))[units.back].flatten(1)

    @torch.no_grad()
    def row_entropy(self, normed: Tensor, units: Units, routed: Routed, bank: nn.Module) -> float:
        """Mean entropy of the attention over the rows that a unit chose, over its largest value."""
        q = self.queries(normed).float()
        keys, _ = self.projected(bank)
        keys = keys.float().repeat_interleave(self.heads // self.kv_heads, 1)  # (rows, H, h)
        weights = self._dense(routed)  # (U, rows)
        unit_of = units.back // units.places.shape[1]
        kept = unit_of < len(units.places)
        scores = torch.einsum("nhd,mhd->nhm", q[kept], keys) * self.head_dim**-0.5 + weights[unit_of[kept], None]
        logs = scores.log_softmax(-1)
        entropy = -(logs.exp() * logs.clamp_min(-1e4)).sum(-1)
        most = (self.config.shared + self.config.top_k) * self.config.chapter_rows
        return float(entropy.mean() / math.log(max(2, most)))

    def _dense(self, routed: Routed) -> Tensor:
        """ln w of every row of the bank, -inf where it is not chosen: (U, rows) float32 at least."""
        config, logs = self.config, routed.log_weights
        wide = torch.promote_types(logs.dtype, torch.float32)
        mask = torch.full((len(logs), config.chapters), float("-inf"), device=logs.device, dtype=wide)
        mask = mask.scatter(1, routed.chosen, logs.to(wide))
        return functional.pad(mask, (config.shared, 0)).repeat_interleave(config.chapter_rows, 1)

    def out(self, normed: Tensor, read: Tensor) -> Tensor:
        """What is added to the stream (N, D) for what was read (N, H * h)."""
        return self.o_proj(read if self.gate_proj is None else read * functional.silu(self.gate_proj(normed)))

    def queries(self, normed: Tensor) -> Tensor:
        """(N, H, h)."""
        return self._normed(self.q_proj(normed).unflatten(-1, (self.heads, self.head_dim)))

    def projected(self, bank: nn.Module, which: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values (..., K, h) of these rows of the bank, or of all."""
        rows = bank(which)
        keys, values = (p(rows).unflatten(-1, (self.kv_heads, self.head_dim)) for p in (self.k_proj, self.v_proj))
        return self._normed(keys), values

    def _normed(self, x: Tensor) -> Tensor:
        """Of size one a number, with `qk_norm`; it has no weights."""
        return functional.rms_norm(x, (self.head_dim,), eps=self.norm.eps) if self.config.qk_norm else x

    def _joint(self, q: Tensor, keys: Tensor, values: Tensor, weights: Tensor) -> Tensor:
        """One softmax over all rows: q (U, L, H, h), keys and values (U, rows, K, h), ln w (U, rows) -> (U, L, H,
        h).
        """
        return (self._products if q.device.type == "cpu" else self._kernel)(q, keys, values, weights)

    def _products(self, q: Tensor, keys: Tensor, values: Tensor, weights: Tensor) -> Tensor:
        """Plain products: units are short, and a kernel of attention takes three times as long on a CPU."""
        together = q.transpose(1, 2).reshape(len(q), self.kv_heads, -1, self.head_dim)  # (U, K, H / K * L, h)
        scores = (together * self.head_dim**-0.5) @ keys.permute(0, 2, 3, 1)
        wide = torch.promote_types(scores.dtype, torch.float32)
        shares = (scores.to(wide) + weights.to(wide)[:, None, None]).softmax(-1)
        out = shares.to(values.dtype) @ values.transpose(1, 2)
        return out.reshape(len(q), self.heads, -1, self.head_dim).transpose(1, 2)

    def _kernel(self, q: Tensor, keys: Tensor, values: Tensor, weights: Tensor) -> Tensor:
        """ln w travels as one more dimension of the keys, which every kernel of attention takes."""
        size = self.head_dim
        extra = (weights.to(keys.dtype) * size**0.5)[..., None, None].expand(*keys.shape[:-1], 1)
        q = functional.pad(q, (0, 1), value=1.0).transpose(1, 2)  # (U, H, L, h + 1)
        keys, values = (self._grouped(x) for x in (torch.cat([keys, extra], -1), functional.pad(values, (0, 1))))
        return scaled_dot_product_attention(q, keys, values, scale=size**-0.5)[..., :size].transpose(1, 2)

    def _masked(self, q: Tensor, routed: Routed, keys: Tensor, values: Tensor) -> Tensor:
        """The same for units of one token: q (U, H, h) and the whole bank (rows, K, h), not chosen rows left out ->
        (U, H, h).
        """
        mask = self._dense(routed)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        with torch.autocast(q.device.type, enabled=False):
            q, keys, values = (x.to(wide)[None] for x in (q, keys, values))
            out = scaled_dot_product_attention(
                q.transpose(1, 2), self._grouped(keys), self._grouped(values), attn_mask=mask[None, None].to(wide)
            )
        return out[0].transpose(0, 1)

    def _grouped(self, x: Tensor) -> Tensor:
        """(U, rows, K, h) -> (U, H, rows, h): each key head for its query heads."""
        return x.transpose(1, 2).repeat_interleave(self.heads // self.kv_heads, 1)


def means(normed: Tensor, units: Units) -> Tensor:
    """u (U, D): the mean of the states (N, D) that each unit chooses from, zeros where it has none."""
    if units.sources is None:
        return normed[units.places[:, 0]]
    return functional.pad(normed, (0, 0, 0, 1))[units.sources].sum(1) / units.counts
