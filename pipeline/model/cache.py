"""The key-value cache for decoding, and the attention of new tokens to it.

Rows with the same prompt share it: a cache has a second cache, `prompts`, and each row points to a row of `prompts`. A
decoding step then reads a prompt's keys once for all rows that share it, and a row with a long prompt does not make
other rows longer (Hydragen, Juravsky et al. 2024, arXiv:2402.05099). The two parts of the attention are merged using
their log-sum-exps:

    out = w out_prompt + (1 - w) out_own,    w = sigmoid(lse_prompt - lse_own)

Shapes: N tokens in the line, R rows, H query heads, K key heads, G = H/K, h head size, S cached positions, P prompts, M
rows per prompt. Keys are stored as (R, K, h, S) because reading them limits the speed of decoding, and reading along
S is twice as fast (docs/LOG.md).
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from pipeline import wings
from pipeline.model.config import ModelConfig

CACHE_BLOCK = 256  # the cache grows in blocks of this many positions
PROMPT_BLOCK = 64  # the same for the prompt cache, which is filled once; the maximum capacity is a multiple of it


class KVCache:
    """Keys and values of `rows` growing rows, and the length of each row.

    Per layer, one tensor for keys (R, K, h, S) and one for values (R, K, S, h); S grows in blocks.
    """

    def __init__(
        self, config: ModelConfig, rows: int, *, dtype: torch.dtype, device: torch.device, block: int = CACHE_BLOCK
    ) -> None:
        self.config, self.block = config, block
        self.own = [0] * rows  # number of positions in each row, without its prompt
        self.prompt_of: list[int | None] = [None] * rows  # the row of `prompts` that each row continues
        self.prompts: KVCache | None = None
        shape = (rows, config.kv_heads, config.head_dim, 0)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.values = [
            torch.zeros(rows, config.kv_heads, 0, config.head_dim, dtype=dtype, device=device)
            for _ in range(config.layers)
        ]
        self.hook = hook_cache(config, rows, dtype, device)

    @property
    def reads_at_once(self) -> bool:
        """Whether the model's hook needs each prompt in a single pass."""
        return self.hook is not None and self.hook.reads_at_once

    @property
    def capacity(self) -> int:
        """Number of positions allocated for each row."""
        return self.keys[0].shape[3]

    @property
    def lengths(self) -> list[int]:
        """Number of positions in each row, including its prompt."""
        return [own + self.before(row) for row, own in enumerate(self.own)]

    def before(self, row: int) -> int:
        """Number of positions in the row's prompt."""
        prompt = self.prompt_of[row]
        return 0 if prompt is None or self.prompts is None else self.prompts.own[prompt]

    def reserve(self, length: int) -> None:
        """Make room for `length` positions in every row. Raises ValueError if that exceeds the model's context."""
        self.check_length(length)
        if length <= self.capacity:
            return
        most = self.config.max_context
        room = min(-(-length // self.block) * self.block, most + -most % PROMPT_BLOCK)
        more = room - self.capacity
        self.keys = [pad(tensor, (0, more)) for tensor in self.keys]
        self.values = [pad(tensor, (0, 0, 0, more)) for tensor in self.values]
        if self.hook is not None:
            self.hook.reserve(more)

    def check_length(self, length: int) -> None:
        """Raise ValueError if a row of `length` tokens would exceed the model's context."""
        if length > (most := self.config.max_context):
            raise ValueError(f"a row of {length} tokens is longer than the model's context of {most}")

    def room_for_prompts(self, count: int) -> list[int]:
        """Rows of `prompts` for `count` new prompts: unused ones first, then newly added ones."""
        if self.prompts is None:
            self.prompts = KVCache(
                self.config, 0, dtype=self.keys[0].dtype, device=self.keys[0].device, block=PROMPT_BLOCK
            )
        store, used = self.prompts, set(self.prompt_of)
        free = [prompt for prompt in range(len(store.own)) if prompt not in used]
        more = max(0, count - len(free))
        if more:
            free += range(len(store.own), len(store.own) + more)
            store.own += [0] * more
            store.prompt_of += [None] * more
            store.keys = [pad(tensor, (0, 0, 0, 0, 0, 0, 0, more)) for tensor in store.keys]
            store.values = [pad(tensor, (0, 0, 0, 0, 0, 0, 0, more)) for tensor in store.values]
            if store.hook is not None:
                store.hook.add_rows(more)
        for prompt in free[:count]:
            store.clear(prompt)
        return free[:count]

    def clear(self, row: int, prompt: int | None = None) -> None:
        """Empty a row; it then continues `prompt`, a row of `prompts`, or has no prompt."""
        self.own[row], self.prompt_of[row] = 0, prompt
        if self.hook is not None:
            self.hook.clear(row)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only `rows`, in this order, and the prompts they continue."""
        index = torch.tensor(rows, device=self.keys[0].device)
        self.keys = [tensor.index_select(0, index) for tensor in self.keys]
        self.values = [tensor.index_select(0, index) for tensor in self.values]
        if self.hook is not None:
            self.hook.select(list(rows), index)
        self.own = [self.own[row] for row in rows]
        self.prompt_of = [self.prompt_of[row] for row in rows]
        if self.prompts is not None:
            used = sorted({prompt for prompt in self.prompt_of if prompt is not None})
            self.prompts.select(used)
            new_row = {prompt: new for new, prompt in enumerate(used)}
            self.prompt_of = [None if prompt is None else new_row[prompt] for prompt in self.prompt_of]

    def whole(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a row, (length, K, h) each."""
        own = self.own[row]
        k, v = self.keys[layer][row, :, :, :own].permute(2, 0, 1), self.values[layer][row, :, :own].transpose(0, 1)
        prompt = self.prompt_of[row]
        if prompt is None or self.prompts is None:
            return k, v
        first_k, first_v = self.prompts.whole(layer, prompt)
        return torch.cat([first_k, k]), torch.cat([first_v, v])


class HookCache(Protocol):
    """Per-row data that a model's hook (layers.py) stores in a key-value cache, in addition to keys and values."""

    reads_at_once: bool  # whether a prompt must be processed in a single pass

    def reserve(self, more: int) -> None:
        """Make room for `more` positions in every row."""
        ...

    def add_rows(self, more: int) -> None: ...

    def select(self, rows: list[int], index: Tensor) -> None:
        """Keep only `rows`, in this order; `index` is the same list as a tensor."""
        ...

    def clear(self, row: int) -> None:
        """Empty a row."""
        ...

    def rewind(self, row: int) -> None:
        """Prepare a truncated row to be continued with different text."""
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` to row `target`."""
        ...

    def zero(self, row: int) -> None:
        """Overwrite a row with zeros."""
        ...


def hook_cache(config: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device) -> HookCache | None:
    """The hook's part of a key-value cache; None without a hook."""
    caches: list[HookCache | None] = [offer(config, rows, dtype, device) for offer in wings.each("hook_cache")]
    return next((cache for cache in caches if cache is not None), None)


@runtime_checkable
class CacheLayout(Protocol):
    """A layout of new tokens for rows of a cache; creating it adds the tokens to the row lengths (`Cached`)."""

    cache: KVCache
    rows: list[int]
    counts: list[int]  # number of new tokens in each of these rows
    past: list[int]  # number of positions before the new tokens, including the prompt


class Cached:
    """A layout of new tokens: row `rows[i]` of a cache gets `counts[i]` >= 1 of them, in line order.

    The constructor reserves room in the cache and updates the row lengths; `attend` then writes a layer's keys and
    values.
    """

    def __init__(self, cache: KVCache, rows: Sequence[int], counts: Sequence[int]) -> None:
        device = cache.keys[0].device
        self.cache, self.rows, self.counts = cache, list(rows), list(counts)
        past = [cache.own[row] for row in rows]
        before = [cache.before(row) for row in rows]
        length = max(p + b + count for p, b, count in zip(past, before, counts))
        cache.check_length(length)
        self.longest = max(p + count for p, count in zip(past, counts))
        cache.reserve(self.longest)
        self.past = [p + b for p, b in zip(past, before)]
        columns = [p + i for p, count in zip(past, counts) for i in range(count)]
        self.columns = torch.tensor(columns, device=device)  # (N,) positions in the row's own part
        self.positions = torch.tensor(
            [p + i for p, count in zip(self.past, counts) for i in range(count)], device=device
        )
        self.row_of = torch.tensor([row for row, count in zip(rows, counts) for _ in range(count)], device=device)
        self.decoding = all(count == 1 for count in counts)
        for row, count in zip(rows, counts):
            cache.own[row] += count
        if self.decoding:
            self.all_rows = self.rows == list(range(len(cache.own)))
            lengths = torch.ones(len(cache.own), dtype=torch.long, device=device)  # other rows need some value > 0
            lengths[self.row_of] = self.columns + 1
            self.mask = _length_mask(lengths, self.longest)
            with_prompts = any(cache.prompt_of[row] is not None for row in rows)
            self.shared = _SharedPrompts(cache, self.rows) if with_prompts else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.row_of, :, :, self.columns] = k.to(keys.dtype)
        values[self.row_of, :, self.columns] = v.to(values.dtype)
        return self._decode(q, keys, values, layer) if self.decoding else self._prefill(q, layer)

    def _decode(self, q: Tensor, keys: Tensor, values: Tensor, layer: int) -> Tensor:
        """One token per row: the G heads of a key head become its G queries, so keys are read once and never copied."""
        kv_heads = keys.shape[1]
        grouped = (q * q.shape[-1] ** -0.5).unflatten(1, (kv_heads, -1)).to(keys.dtype)  # (N, K, G, h)
        queries = grouped
        if not self.all_rows:  # computing all rows is cheaper than copying the keys of a few
            queries = grouped.new_zeros(len(keys), *grouped.shape[1:]).index_copy_(0, self.row_of, grouped)
        out, lse = _attend_with_lse(queries, keys[..., : self.longest], values[:, :, : self.longest], self.mask)
        if not self.all_rows:
            out, lse = out[self.row_of], lse[self.row_of]
        if self.shared is not None:
            prompt_out, prompt_lse = self.shared.attend(grouped, layer)
            weight = torch.sigmoid(prompt_lse - lse)
            out = torch.lerp(out, prompt_out, weight)
        return out.flatten(1, 2).to(q.dtype)

    def _prefill(self, q: Tensor, layer: int) -> Tensor:
        """Row by row: query i of a row attends to its first `past + i + 1` positions."""
        pieces = zip(q.split(self.counts), self.rows, self.past)
        return torch.cat([cross(piece, *self.cache.whole(layer, row), past) for piece, row, past in pieces])


class _SharedPrompts:
    """The prompts of rows that get one token each; queries of rows with the same prompt are batched."""

    def __init__(self, cache: KVCache, rows: Sequence[int]) -> None:
        store = cache.prompts
        assert store is not None, "a row continues a prompt, but there is no prompt cache"
        device = store.keys[0].device
        members: list[list[int]] = [[] for _ in store.own]
        for number, row in enumerate(rows):
            prompt = cache.prompt_of[row]
            if prompt is not None:
                members[prompt].append(number)
        longest_group = max(map(len, members))
        back = [-1] * len(rows)  # index of each row's result among the P * M results
        for prompt, own in enumerate(members):
            for number, member in enumerate(own):
                back[member] = prompt * longest_group + number
        self.store = store
        self.members = torch.tensor(
            [own + [0] * (longest_group - len(own)) for own in members], device=device
        )  # (P, M)
        self.back = torch.tensor(back, device=device).clamp_min(0)
        self.without = torch.tensor([index < 0 for index in back], device=device) if min(back) < 0 else None
        self.longest = max(length for length, own in zip(store.own, members) if own)
        self.mask = _length_mask(torch.tensor(store.own, device=device).clamp(1, self.longest), self.longest)

    def attend(self, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Attention of scaled queries (N, K, G, h) to their prompts, (N, K, G, h), and its log-sum-exp (N, K, G, 1)."""
        keys, values = self.store.keys[layer], self.store.values[layer]
        group = q.shape[2]
        queries = q[self.members].transpose(1, 2).flatten(2, 3)  # (P, M, K, G, h) -> (P, K, M * G, h)
        out, lse = _attend_with_lse(queries, keys[..., : self.longest], values[:, :, : self.longest], self.mask)
        out, lse = (x.unflatten(2, (-1, group)).transpose(1, 2).flatten(0, 1)[self.back] for x in (out, lse))
        if self.without is not None:
            lse = lse.masked_fill(self.without[:, None, None, None], float("-inf"))
        return out, lse


def _length_mask(lengths: Tensor, longest: int) -> Tensor:
    """Mask added to the scores of `longest` positions, (R, 1, 1, longest): 0 for the first `lengths` (R,) of each row,
    -inf after.
    """
    inside = torch.arange(longest, device=lengths.device) < lengths[:, None]
    return torch.zeros(inside.shape, device=lengths.device).masked_fill_(~inside, float("-inf"))[:, None, None]


def _attend_with_lse(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of scaled queries (R, K, n, h) to keys (R, K, h, S), and its log-sum-exp (R, K, n, 1), both at least
    float32.
    """
    scores = torch.matmul(q, keys)
    scores = (scores if scores.dtype == torch.float64 else scores.float()).add_(mask)
    most = scores.amax(-1, keepdim=True)
    weights = scores.sub_(most).exp_()
    total = weights.sum(-1, keepdim=True)
    return torch.matmul(weights.to(values.dtype), values).to(total.dtype) / total, most + total.log()


def cross(q: Tensor, k: Tensor, v: Tensor, past: int) -> Tensor:
    """Causal attention of new queries (T, H, h) of one row to its keys and values (past + T, K, h): (T, H, h)."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(past) if past else None
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(q.dtype).transpose(0, 1)[None].repeat_interleave(group, 1) for x in (k, v))
    out = scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=mask is None)
    return out[0].transpose(0, 1)
