"""Who sees whom: the ways in which a batch's tokens attend to each other.

The blocks of the model work on one line of tokens, (N, D), because all that is not attention treats tokens alone. A
`Layout` knows how that line is cut into rows and documents; it is made once per batch and shared by all layers.

| layout      | rows                                  | used for                                                  |
|-------------|---------------------------------------|-----------------------------------------------------------|
| `Rows`      | equal length, one document each       | plain batches; the fast kernel with `is_causal`           |
| `Masked`    | equal length, several documents each  | packed batches on accelerators and under compile          |
| `Documents` | documents of any length, no padding   | packed or padded batches on a CPU: no mask, nothing wasted |
| `Branches`  | as many, of which some begin alike    | answers to one prompt on a CPU: what they share, once      |
| `Cached`    | new tokens of some rows of a cache    | decoding (cache.py)                                       |
| `Padded`    | those of another one, then padding    | bf16 on a CPU, where a new shape costs a compilation      |

Training in bf16 on a CPU does not call a layout: it asks for `documents_of` it, and tiles.py attends.

Shapes: N tokens of the line, B rows, T time, H query heads, K key heads, G = H/K, h head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from pipeline.model.cache import cross
from pipeline.model.cpu.layers import ragged_attention

KEPT_PROBABILITIES = 512  # up to this length keeping them is 1.4x faster than the fused kernel; at 2,048 it is equal
MOST_SHARED = 2048  # rows up to this length may begin alike
LEAST_SHARED = 16  # tokens that two rows must have in common at their beginning


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
    """Rows of equal length; `mask` (B, 1, T, T) is True where a query may see a key."""

    mask: Tensor

    @classmethod
    def of(cls, documents: Tensor, causal: bool) -> "Masked":
        """From document ids (B, T): equal ids of a row see each other."""
        same = documents[:, None, :, None] == documents[:, None, None, :]  # (B, 1, T, T)
        return cls(same.tril() if causal else same)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        return _dense(q, k, v, self.mask.shape[0], self.mask, False)


@dataclass(frozen=True)
class Documents:
    """Documents one after another, without padding; their `lengths` sum to N. For CPUs."""

    lengths: tuple[int, ...]
    causal: bool

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        if q.dtype in (torch.float32, torch.float64) and max(self.lengths, default=0) <= KEPT_PROBABILITIES:
            return ragged_attention(q, k, v, self.lengths, causal=self.causal)
        pieces = zip(q.split(self.lengths), k.split(self.lengths), v.split(self.lengths), strict=True)
        return torch.cat([_dense(*piece, 1, None, self.causal) for piece in pieces])


@dataclass(frozen=True)
class Branches:
    """Documents of which some begin as another one does; the line holds what they share once. Causal, for CPUs.

    Document i adds `lengths[i]` tokens to the line and stands behind `before[i]` tokens of another one; `keys` are the
    places in the line of the tokens that each document consists of, (N + sum(before),).
    """

    lengths: tuple[int, ...]
    before: tuple[int, ...]
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
    """Another layout on the first `tokens` of the line; what stands behind them sees nothing and gets zeros."""

    layout: Layout
    tokens: int

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        out = self.layout.attend(q[: self.tokens], k[: self.tokens], v[: self.tokens], layer)
        return pad(out, (0, 0, 0, 0, 0, len(q) - self.tokens))


def documents_of(layout: Layout, tokens: int) -> Documents | None:
    """The documents of a line of so many tokens, where they lie one after another and see nothing else."""
    if isinstance(layout, Padded):
        layout, tokens = layout.layout, layout.tokens
    if isinstance(layout, Rows):
        return Documents((tokens // layout.batch,) * layout.batch, layout.causal)
    return layout if isinstance(layout, Documents) else None


def _dense(q: Tensor, k: Tensor, v: Tensor, batch: int, mask: Tensor | None, causal: bool) -> Tensor:
    """The fused kernel on `batch` rows of equal length."""
    q, k, v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (q, k, v))  # (B, heads, T, h)
    group = q.shape[1] // k.shape[1]
    if group > 1 and q.device.type == "cpu":  # there `enable_gqa` is slower (50 against 46 ms); one key head is a view
        k, v = (x.expand(-1, group, -1, -1) if x.shape[1] == 1 else x.repeat_interleave(group, 1) for x in (k, v))
        group = 1
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=group > 1)
    return out.transpose(1, 2).flatten(0, 1)


def positions_in(documents: Tensor) -> Tensor:
    """Positions from 0 in each run of equal ids, (B, T) -> (B, T), without leaving the device."""
    time = torch.arange(documents.shape[1], device=documents.device)
    begins = documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0
    return time - torch.where(begins, time, 0).cummax(dim=1).values


@dataclass(frozen=True)
class Line:
    """A padded batch of documents laid out as one line: how they attend, and the way back."""

    layout: Layout
    positions: Tensor  # (N,) of the line's tokens, from 0 in each document
    computed: Tensor | None  # (N,) flat places of the line's tokens in the batch; None if all, in their order
    kept: Tensor | None  # (M,) flat places of all tokens that are not padding; None if there is no padding
    source: Tensor | None  # (M,) the line's token for each of these; None if each has its own, in their order

    @classmethod
    def of(cls, documents: Tensor, causal: bool, ids: Tensor | None = None) -> "Line":
        """Cut ids of documents (B, T) into documents; negative ones are padding, left out. Runs of equal ids are
        documents.

        Given the tokens `ids` (B, T) too, rows of one causal document each that begin alike share that beginning.
        Raises ValueError where a row returns to an earlier id: that is not a row of documents one after another.
        """
        numbers = documents.cpu().numpy()
        width = numbers.shape[1]
        starts = np.flatnonzero(np.diff(numbers, axis=1, prepend=numbers[:, :1] - 1))  # where a document begins
        lengths = np.diff(starts, append=numbers.size)
        values = numbers.reshape(-1)[starts].astype(np.int64)
        pairs = np.stack([starts // width, values], axis=1)
        if len(np.unique(pairs, axis=0)) < len(pairs):
            raise ValueError("documents: a row comes back to an earlier id; equal ids of a row must lie together")
        real = values >= 0
        positions = torch.from_numpy(np.arange(numbers.size) - np.repeat(starts, lengths))
        kept = None if real.all() else torch.from_numpy(np.flatnonzero(np.repeat(real, lengths)))
        starts, lengths = starts[real], lengths[real]
        single = len(starts) == len(numbers) and bool((starts // width == np.arange(len(numbers))).all())
        if ids is not None and causal and single and lengths.max() <= MOST_SHARED:
            tokens = ids.cpu().numpy().reshape(-1)
            alike = begin_alike([tokens[s : s + n] for s, n in zip(starts, lengths, strict=True)])
            if any(number for _, _, number in alike):
                return cls._branches(positions, starts, lengths, alike)
        layout = Documents(tuple(lengths.tolist()), causal)
        return cls(layout, positions if kept is None else positions[kept], kept, kept, None)

    @classmethod
    def _branches(
        cls, positions: Tensor, starts: np.ndarray, lengths: np.ndarray, alike: list[tuple[int, int, int]]
    ) -> "Line":
        """Each document without the tokens at its beginning that another one has too."""
        shared = np.zeros_like(lengths)
        for row, _, number in alike:
            shared[row] = number
        own = lengths - shared
        begins = np.cumsum(own) - own  # where the line holds each document's own tokens
        places = [np.arange(0)] * len(lengths)  # of all tokens of each document
        for row, other, number in alike:
            places[row] = np.concatenate([places[other][:number], begins[row] + np.arange(own[row])])
        computed = torch.from_numpy(np.concatenate([s + np.arange(p, n) for s, p, n in zip(starts, shared, lengths)]))
        kept = np.concatenate([s + np.arange(n) for s, n in zip(starts, lengths)])
        source = torch.from_numpy(np.concatenate(places))
        layout = Branches(tuple(own.tolist()), tuple(shared.tolist()), source)
        return cls(layout, positions[computed], computed, torch.from_numpy(kept), source)


def begin_alike(rows: Sequence[np.ndarray]) -> list[tuple[int, int, int]]:
    """(row, other, number) of each row: it agrees with the other one in its first `number` tokens; 0 and 0 where with
    none.

    The other one comes first in the list, and no row before it agrees in more. In the order of their tokens each row
    stands behind the one that it agrees with most, so what all rows have in common is counted once: answers share their
    prompt, and prompts share how they begin. A row keeps at least its last token, and fewer than `LEAST_SHARED` do not
    count.
    """
    order = sorted(range(len(rows)), key=lambda row: rows[row].astype(">i8").tobytes())
    found = [(order[0], 0, 0)] if order else []
    for other, row in pairwise(order):
        most = min(len(rows[row]) - 1, len(rows[other]))
        unequal = np.flatnonzero(rows[row][:most] != rows[other][:most])
        number = int(unequal[0]) if len(unequal) else most
        found.append((row, other, number) if number >= LEAST_SHARED else (row, 0, 0))
    return found
