"""What the engine decodes with: rows that hold texts. Ours is `generation/sampling.py`'s, with an attention for few rows of many.

    RowDecoder(model, rows).advance(rows, tokens, wanted) -> logits after the last `wanted[i]` of the tokens that row i gets

A server mostly decodes one or two of its rows, each by one token, or by a draft of a few. Here a row's keys and values are read where
they lie: no row is asked that does not speak, and nothing is copied (grouped queries stand as rows of one product).

Shapes as in `model/cache.py`: keys (R, K, h, S), values (R, K, S, h); n new tokens of a row, G = H / K.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from pipeline.generation.sampling import Decoder
from pipeline.model.cache import KVCache, cross

NARROW = 16  # new tokens of a row up to which plain products beat the fused kernel, which wants its keys copied
TOGETHER = 4  # from so many rows of one token each on they are asked in one product


@dataclass
class Lengths:
    """Rows whose keys and values another program keeps: how many positions each holds. They can be cut, not copied."""

    own: list[int]


class Rows(Protocol):
    """What the engine asks of a decoder. Other programs' stand in files of their own (`onnx_engine.py`)."""

    @property
    def cache(self) -> KVCache | Lengths:
        """Whose `own` says how much of each row counts; what lies behind is overwritten."""
        ...

    def advance(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], wanted: Sequence[int]) -> Tensor:
        """As `RowDecoder.advance`."""
        ...

    def rewind(self, row: int, length: int) -> None:
        """As `RowDecoder.rewind`."""
        ...


class RowDecoder(Decoder):
    """`Decoder` of a server, for a cache whose rows share no prompts."""

    @torch.no_grad()
    def advance(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], wanted: Sequence[int]) -> Tensor:
        """Append `tokens[i]` (at least one) to row `rows[i]`: logits (sum of wanted, V), row by row, after its last `wanted[i]`.

        Raises ValueError where a row would outgrow the model's context; then no row has changed.
        """
        counts = [len(piece) for piece in tokens]
        layout = Pieces(self.cache, rows, counts)
        device = layout.positions.device
        ids = torch.tensor([token for piece in tokens for token in piece], device=device)
        hidden = self.model.line(ids, layout.positions, layout)  # (N, D)
        asked = [
            place for end, want in zip(accumulate(counts), wanted, strict=True) for place in range(end - want, end)
        ]
        if len(asked) < len(hidden):
            hidden = hidden[torch.tensor(asked, dtype=torch.long, device=device)]
        return self.model.logits(hidden)

    def rewind(self, row: int, length: int) -> None:
        """Forget what a row holds behind its first `length` tokens."""
        assert length <= self.cache.own[row], "a row cannot be rewound to what it does not hold"
        self.cache.own[row] = length


class Pieces:
    """A layout of attention: row `rows[i]` of a cache gets `counts[i]` tokens of the line. Making it counts them in."""

    def __init__(self, cache: KVCache, rows: Sequence[int], counts: Sequence[int]) -> None:
        self.cache, self.rows, self.counts = cache, list(rows), list(counts)
        self.past = [cache.own[row] for row in rows]
        self.totals = [past + count for past, count in zip(self.past, counts)]
        cache.reserve(max(self.totals))
        for row, total in zip(rows, self.totals):
            cache.own[row] = total
        places = [place for past, total in zip(self.past, self.totals) for place in range(past, total)]
        device = cache.keys[0].device
        self.positions = torch.tensor(places, device=device)  # (N,)
        self.together = len(rows) >= TOGETHER and len(places) == len(rows)
        if self.together:
            self.row_of = torch.tensor(self.rows, device=device)
            self.span = slice(min(rows), max(rows) + 1)  # rows between are asked too: cheaper than copying keys
            seen = torch.ones(self.span.stop - self.span.start, dtype=torch.long, device=device)
            seen[self.row_of - self.span.start] = self.positions + 1
            future = torch.arange(max(self.totals), device=device) >= seen[:, None]
            self.future = _infinite(future).repeat_interleave(cache.config.kv_heads, 0)[
                :, None
            ]  # (rows of the span * K, 1, S)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """`q` (N, H, h), `k` and `v` (N, K, h) -> (N, H, h)."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if self.together:
            return self._one_each(q, k, v, keys, values)
        out, begin = [], 0
        for row, count, past, total in zip(self.rows, self.counts, self.past, self.totals):
            end = begin + count
            keys[row, :, :, past:total] = k[begin:end].permute(1, 2, 0)
            values[row, :, past:total] = v[begin:end].transpose(0, 1)
            whole_k, whole_v = keys[row, :, :, :total], values[row, :, :total]
            if count <= NARROW:
                out.append(_narrow(q[begin:end], whole_k, whole_v, past))
            else:
                out.append(cross(q[begin:end], whole_k.permute(2, 0, 1), whole_v.transpose(0, 1), past))
            begin = end
        return out[0] if len(out) == 1 else torch.cat(out)

    def _one_each(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Many rows of a token each: one product over all rows of the span."""
        keys[self.row_of, :, :, self.positions] = k.to(keys.dtype)
        values[self.row_of, :, self.positions] = v.to(values.dtype)
        longest, among = max(self.totals), self.row_of - self.span.start
        grouped = q.unflatten(1, (keys.shape[1], -1))  # (N, K, G, h)
        asked = grouped.new_zeros(self.span.stop - self.span.start, *grouped.shape[1:]).index_copy_(0, among, grouped)
        own_k, own_v = keys[self.span, ..., :longest].flatten(0, 1), values[self.span, :, :longest].flatten(0, 1)
        out = _weighed(asked.flatten(0, 1), own_k, own_v, self.future)
        return out.unflatten(0, (-1, keys.shape[1]))[among].flatten(1, 2)


def _narrow(q: Tensor, keys: Tensor, values: Tensor, past: int) -> Tensor:
    """New queries (n, H, h) of one row against its keys (K, h, S) and values (K, S, h), causal: (n, H, h)."""
    num, kv_heads = len(q), len(keys)
    if num == 1:
        return _weighed(q.reshape(kv_heads, -1, q.shape[2]), keys, values, q.new_zeros(())).reshape(q.shape)
    asked = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # (K, G n, h)
    ahead = torch.arange(keys.shape[2], device=q.device) > torch.arange(past, past + num, device=q.device)[:, None]
    future = _infinite(ahead).repeat(asked.shape[1] // num, 1)  # (G n, S)
    out = _weighed(asked, keys, values, future)
    return out.unflatten(1, (-1, num)).permute(2, 0, 1, 3).flatten(1, 2)


def _weighed(q: Tensor, keys: Tensor, values: Tensor, future: Tensor) -> Tensor:
    """Softmax attention of queries (b, n, h) to keys (b, h, S) and values (b, S, h); `future` is added to the scores (b, n, S)."""
    scores = torch.baddbmm(future.to(q.dtype), q, keys, alpha=q.shape[-1] ** -0.5)
    return torch.bmm(scores.softmax(-1, torch.float32).to(values.dtype), values)


def _infinite(where: Tensor) -> Tensor:
    """-inf where True, else 0."""
    return torch.zeros(where.shape, device=where.device).masked_fill_(where, float("-inf"))
