"""Attention within documents, or a tree of them, in bf16 on a CPU: a few large batched products over tiles of the line.

The line of N tokens is cut into tiles of 128. A tile's queries attend, under a mask, to `reach` tiles of keys: from the
tile where its first token's document begins through the tile itself. Tiles of equal reach are multiplied together, so a
batch needs only a few products with few distinct shapes, whatever its document lengths (oneDNN compiles a kernel for
each new shape).

**Trees.** Documents that share prefixes form a tree: the line contains each shared prefix once, and a token attends to
the tokens before it on its own path. A tile's queries then attend to the blocks of 32 keys that contain a key for any
of them, padded to full tiles; blocks that belong only to siblings are never multiplied.

    P = softmax(q k^T + mask)    o = P v    dv = P^T do    dP = do v^T - rowsum(do o)
    dS = P dP    dq = dS k    dk = dS^T q

The row sums are part of the product: do and v get extra columns, [do, -d_high, -d_low] [v, 1, 1]^T, so the difference
is computed in float32 before it is rounded to bf16, without another pass over the scores. Probabilities of tiles that
reach over at most 512 tokens are stored for the backward pass; the others are recomputed.

**Blocks.** If the processor has AMX and the C++ sources are loaded, all of this is one pass in C++ (attention.cpp) over
blocks of 32 queries and 32 keys: scores exist for one block of queries at a time and are recomputed in the backward
pass from each query's log-sum-exp (as in Dao et al. 2022, arXiv:2205.14135, but without the running maximum).

Shapes: N tokens, n tiles, H query heads, K key heads, G = H/K, h head size, R = 128 G rows per tile, r reach, S keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from pipeline.model.cpu import native, primitives

TILE = 128
KEY_BLOCK = 32  # tokens; a tree's keys are selected in blocks of this size
MOST_SCORES = 2**19  # per product: in bf16, these fit in a core's L2 cache
KEPT_REACH = 4  # tiles; up to this reach, probabilities are stored: at most 512 per token and head
SUM_COLUMNS = 32  # columns for the row sums: products process columns in steps of this size
BF16 = torch.bfloat16


Span = tuple[int, int]  # tokens [begin, end) of the line
Where = slice | Tensor  # tiles of the line: a slice if evenly spaced, which avoids a copy


@dataclass(frozen=True)
class Group:
    """Tiles of equal reach."""

    tiles: Where  # (m,) tiles of the queries
    # tiles of the keys: r entries (m,), from the first tile to the last; for a tree, their blocks (m, S / 32)
    keys: tuple[Where, ...] | Tensor
    # (m, 1, 128, 1, c) bf16 for the last c keys: 0, or -inf where a query does not attend; no other key is masked
    mask: Tensor


@dataclass(frozen=True)
class TilePlan:
    """Consecutive documents on a line, cut into tiles; created once per batch and shared by all layers."""

    tokens: int  # in the line, including padding: a multiple of 128
    groups: tuple[Group, ...]
    key_tile: int = TILE  # tokens per entry of a group's keys


@dataclass(frozen=True)
class BlockPlan:
    """Which keys the queries of each block attend to (attention.cpp); created once per batch, shared by all layers."""

    starts: Tensor  # (blocks + 1,) int64: where each block's entries start; padding up to a multiple of 128 has none
    entries: Tensor  # (E,) int64: twice the index of a key block, plus one if a mask applies
    masks: Tensor  # (E, 32) int32: bit q of element j is 1 if query q of the block attends to key j of the key block

    @classmethod
    def of(cls, offsets: np.ndarray, firsts: np.ndarray, lasts: np.ndarray) -> "BlockPlan":
        """Token i will attend to the keys [firsts[s], lasts[s]) of each span s in [offsets[i], offsets[i + 1])."""
        tokens = len(offsets) - 1
        spans = [torch.from_numpy(np.ascontiguousarray(part, dtype=np.int64)) for part in (offsets, firsts, lasts)]
        counts = torch.empty(-(-tokens // KEY_BLOCK), dtype=torch.int64)
        native.call("plan_attention", *spans, None, counts, None, None, tokens)
        starts = pad(counts.cumsum(0), (1, -len(counts) % (TILE // KEY_BLOCK)))
        starts[1 + len(counts) :] = starts[len(counts)]
        entries = torch.empty(int(starts[-1]), dtype=torch.int64)
        masks = torch.empty(len(entries), KEY_BLOCK, dtype=torch.int32)
        native.call("plan_attention", *spans, starts, counts, entries, masks, tokens)
        return cls(starts, entries, masks)

    @property
    def tokens(self) -> int:
        """Number of tokens in the line, including padding: a multiple of 128."""
        return (len(self.starts) - 1) * KEY_BLOCK


Plan = TilePlan | BlockPlan


def plan(lengths: tuple[int, ...], causal: bool, heads: int) -> Plan:
    """The plan for documents of these lengths, with `heads` query heads."""
    return _block_plan(lengths, causal) if native.has_attention_blocks() else _tile_plan(lengths, causal, heads)


def tree_plan(lengths: tuple[int, ...], before: tuple[int, ...], parents: tuple[int, ...], heads: int) -> Plan:
    """The plan for a tree of causal documents, with `heads` query heads.

    Document i adds `lengths[i]` tokens to the line after the first `before[i]` tokens of document `parents[i]`, which
    comes earlier (no parent if `before[i]` is 0).
    """
    if native.has_attention_blocks():
        return _tree_block_plan(lengths, before, parents)
    return _tree_tile_plan(lengths, before, parents, heads)


@lru_cache(maxsize=2)  # batches of full rows have equal plans
def _block_plan(lengths: tuple[int, ...], causal: bool) -> BlockPlan:
    ends, tokens = np.cumsum(lengths), sum(lengths)
    firsts = np.repeat(ends - lengths, lengths)
    return BlockPlan.of(np.arange(tokens + 1), firsts, np.arange(1, tokens + 1) if causal else np.repeat(ends, lengths))


@lru_cache(maxsize=2)  # an actor and its critic have equal plans
def _tree_block_plan(lengths: tuple[int, ...], before: tuple[int, ...], parents: tuple[int, ...]) -> BlockPlan:
    counts: list[np.ndarray] = []  # number of spans of each token
    firsts: list[np.ndarray] = []
    lasts: list[np.ndarray] = []
    for path in _paths(lengths, before, parents):
        spans = np.array(path)  # (s, 2)
        length = int(spans[-1, 1] - spans[-1, 0])
        counts.append(np.full(length, len(path)))
        firsts.append(np.tile(spans[:, 0], length))
        own = np.tile(spans[:, 1], (length, 1))  # a token's last span ends at the token itself
        own[:, -1] = spans[-1, 0] + 1 + np.arange(length)
        lasts.append(own.ravel())
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
    return BlockPlan.of(offsets, np.concatenate(firsts), np.concatenate(lasts))


@lru_cache(maxsize=2)
def _tile_plan(lengths: tuple[int, ...], causal: bool, heads: int) -> TilePlan:
    """Cut documents into tiles. The padding of the last tile is a document of its own."""
    missing = -sum(lengths) % TILE
    lengths = (*lengths, missing) if missing else lengths
    document = np.repeat(np.arange(len(lengths)), lengths)  # (N,)
    ends = np.cumsum(lengths)
    first = (ends - lengths)[document[::TILE]] // TILE  # (n,) the tile where the keys begin
    last = np.arange(len(first)) if causal else (ends[document[TILE - 1 :: TILE]] - 1) // TILE
    reach = last - first + 1
    groups: list[Group] = []
    for size in np.unique(reach):
        tiles = np.flatnonzero(reach == size)
        most = max(1, MOST_SCORES // (heads * TILE * TILE * int(size)))
        for begin in range(0, len(tiles), most):
            part = tiles[begin : begin + most]
            groups.append(_group(part, first[part][:, None] + np.arange(size), document, causal))
    return TilePlan(len(document), tuple(groups))


def _group(tiles: np.ndarray, keys: np.ndarray, document: np.ndarray, causal: bool) -> Group:
    """A group of query tiles (m,) with the same reach; their keys are in the tiles `keys` (m, r)."""
    inside = np.arange(TILE)
    query = tiles[:, None] * TILE + inside  # (m, 128) indices in the line
    key = (keys[:, :, None] * TILE + inside).reshape(len(tiles), -1)  # (m, r * 128)
    masked = document[query][:, :, None] != document[key][:, None, :]
    if causal:
        masked |= key[:, None, :] > query[:, :, None]
    begin = int(masked.any((0, 1)).argmax()) // TILE * TILE  # usually, only keys of the last tile are masked
    masked = masked[:, :, begin:]
    return Group(_tile_index(tiles), tuple(map(_tile_index, keys.T)), _mask(masked))


def _mask(masked: np.ndarray) -> Tensor:
    """(m, 128, c) -> (m, 1, 128, 1, c), see `Group`."""
    mask = torch.zeros(masked.shape, dtype=BF16).masked_fill_(torch.from_numpy(masked), float("-inf"))
    return mask[:, None, :, None]


def _tile_index(tiles: np.ndarray) -> Where:
    steps = np.unique(np.diff(tiles))
    if len(steps) > 1 or (len(steps) and steps[0] < 1):
        return torch.from_numpy(np.ascontiguousarray(tiles))
    step = int(steps[0]) if len(steps) else 1
    return slice(int(tiles[0]), int(tiles[-1]) + 1, step)


@lru_cache(maxsize=2)
def _tree_tile_plan(
    lengths: tuple[int, ...], before: tuple[int, ...], parents: tuple[int, ...], heads: int
) -> TilePlan:
    """Cut a tree into tiles. The padding of the last tile is a document of its own."""
    missing = -sum(lengths) % TILE
    if missing:
        lengths, before, parents = (*lengths, missing), (*before, 0), (*parents, 0)
    paths = _paths(lengths, before, parents)
    num_tiles = sum(lengths) // TILE
    queries: list[list[tuple[int, int, list[Span]]]] = [[] for _ in range(num_tiles)]  # per tile: [begin, end), keys
    for path in paths:
        begin, end = path[-1]
        for tile in range(begin // TILE, -(-end // TILE)):
            last = min(end, (tile + 1) * TILE)
            queries[tile].append((max(begin, tile * TILE), last, [*path[:-1], (begin, last)]))
    blocks = [_key_blocks(parts) for parts in queries]
    sizes = np.array([-(-len(chosen) * KEY_BLOCK // TILE) for chosen in blocks])  # in tiles
    groups: list[Group] = []
    for size in np.unique(sizes):
        tiles = np.flatnonzero(sizes == size)
        most = max(1, MOST_SCORES // (heads * TILE * TILE * int(size)))
        for first in range(0, len(tiles), most):
            part = tiles[first : first + most]
            keys = np.zeros((len(part), size * TILE // KEY_BLOCK), dtype=np.int64)
            masked = np.ones((len(part), TILE, size * TILE), dtype=bool)
            for number, tile in enumerate(part):
                keys[number, : len(blocks[tile])] = blocks[tile]
                _unmask(masked[number], queries[tile], blocks[tile], tile * TILE)
            groups.append(Group(_tile_index(part), torch.from_numpy(keys), _mask(masked)))
    return TilePlan(sum(lengths), tuple(groups), KEY_BLOCK)


def _paths(lengths: Sequence[int], before: Sequence[int], parents: Sequence[int]) -> list[list[Span]]:
    """The spans of the line that hold each document's tokens, in order; the last span is the document's own."""
    paths: list[list[Span]] = []
    begin = 0
    for length, shared, parent in zip(lengths, before, parents, strict=True):
        path: list[Span] = []
        for first, last in paths[parent] if shared else ():
            taken = min(last - first, shared)
            if taken:
                path.append((first, first + taken))
            shared -= taken
        assert not shared, "a document shares no more tokens than its parent has"
        paths.append([*path, (begin, begin + length)])
        begin += length
    return paths


def _key_blocks(queries: Sequence[tuple[int, int, list[Span]]]) -> np.ndarray:
    """The blocks that contain the keys these queries attend to, in order."""
    spans = {(first // KEY_BLOCK, -(-last // KEY_BLOCK)) for _, _, path in queries for first, last in path}
    return np.unique(np.concatenate([np.arange(*span) for span in spans]))


def _unmask(masked: np.ndarray, queries: Sequence[tuple[int, int, list[Span]]], blocks: np.ndarray, start: int) -> None:
    """Set `masked` (128, S) to False where a query attends to a key; the queries' tile begins at `start`."""
    for begin, end, path in queries:
        for first, last in path:  # a span's blocks are adjacent
            column = int(np.searchsorted(blocks, first // KEY_BLOCK)) * KEY_BLOCK + first % KEY_BLOCK
            seen = np.arange(first, last) <= np.arange(begin, end)[:, None]  # can be False only in the last span
            masked[begin - start : end - start, column : column + last - first] &= ~seen


def _split_tiles(x: Tensor, tokens: int, kv_heads: int, tile: int = TILE) -> Tensor:
    """(N, H, h) -> (n, K, 128, G, h), padded to `tokens`."""
    if len(x) < tokens:
        x = pad(x, (0, 0, 0, 0, 0, tokens - len(x)))
    return x.view(-1, tile, kv_heads, x.shape[1] // kv_heads, x.shape[2]).transpose(1, 2)


def _group_rows(x: Tensor, where: Where) -> Tensor:
    """A group's queries, selected from all tiles (n, K, 128, G, h): (m * K, R, h)."""
    return x[where].flatten(2, 3).flatten(0, 1)


def _group_keys(x: Tensor, keys: tuple[Where, ...] | Tensor) -> Tensor:
    """A group's keys, selected from all tiles or blocks (n, K, 128, 1, h): (m * K, S, h)."""
    if isinstance(keys, Tensor):
        chosen = x.flatten(1).index_select(0, keys.flatten()).view(*keys.shape, *x.shape[1:])
        return chosen.transpose(1, 2).flatten(2, 4).flatten(0, 1)
    return torch.stack([x[where] for where in keys], dim=2).flatten(2, 4).flatten(0, 1)


def forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, list[Tensor]]:
    """Attention of scaled queries (N, H, h) to keys and values (N, K, h), all in bf16.

    Returns the result, which may have padding rows, and the other tensors that the backward pass needs.
    """
    if isinstance(plan, BlockPlan):
        return _forward_blocks(q, k, v, plan)
    (_, heads, size), kv_heads = q.shape, k.shape[1]
    q = _split_tiles(q, plan.tokens, kv_heads)
    k, v = (_split_tiles(x, plan.tokens, kv_heads, plan.key_tile).contiguous() for x in (k, v))
    out = q.new_empty(plan.tokens, heads, size)
    result = _split_tiles(out, plan.tokens, kv_heads)
    saved: list[Tensor] = []
    for group in plan.groups:
        rows, keys, values = _group_rows(q, group.tiles), _group_keys(k, group.keys), _group_keys(v, group.keys)
        probabilities = _probabilities(rows, keys, group, kv_heads)
        result[group.tiles] = torch.bmm(probabilities, values).view(-1, *result.shape[1:])
        saved += [
            rows,
            keys,
            values,
            probabilities if keys.shape[1] <= KEPT_REACH * TILE else probabilities.new_empty(0),
        ]
    return out, saved


def _probabilities(rows: Tensor, keys: Tensor, group: Group, kv_heads: int) -> Tensor:
    """softmax(q k^T + mask) of a group's queries (m * K, R, h) and keys (m * K, S, h)."""
    scores = torch.bmm(rows, keys.transpose(1, 2))
    masked = scores.view(-1, kv_heads, TILE, rows.shape[1] // TILE, scores.shape[-1])
    return primitives.probabilities(masked, group.mask).view(scores.shape)


def backward(grad: Tensor, out: Tensor, saved: Sequence[Tensor], plan: Plan, kv_heads: int) -> Tensor:
    """Gradients of queries, keys and values side by side, (N, H + 2K, h) in float32, from the result's gradient (N, H,
    h).
    """
    if isinstance(plan, BlockPlan):
        return _backward_blocks(grad, out, saved, plan)
    tokens, heads, size = grad.shape
    inner = torch.linalg.vecdot(grad.float(), out[:tokens].float()).neg_()[..., None]
    above, inner = (_split_tiles(x, plan.tokens, kv_heads) for x in (grad, inner))
    grads = torch.empty(plan.tokens, heads + 2 * kv_heads, size)
    grad_q = _split_tiles(grads[:, :heads], plan.tokens, kv_heads)
    shape = plan.tokens // plan.key_tile, kv_heads, plan.key_tile, 1, size
    grad_k, grad_v = grads.new_zeros(shape), grads.new_zeros(shape)
    for number, group in enumerate(plan.groups):
        rows, keys, values, probabilities = saved[4 * number : 4 * number + 4]
        if not len(probabilities):
            probabilities = _probabilities(rows, keys, group, kv_heads)
        upper = _append_sums(_group_rows(above, group.tiles), _group_rows(inner, group.tiles))
        ones = values.new_zeros(*values.shape[:2], size + SUM_COLUMNS)
        ones[..., :size] = values
        ones[..., size : size + 2] = 1.0
        grad_scores = torch.bmm(upper, ones.transpose(1, 2)).mul_(probabilities)
        grad_q[group.tiles] = torch.bmm(grad_scores, keys).view(-1, *grad_q.shape[1:]).float()
        _add_to_tiles(grad_v, group.keys, torch.bmm(probabilities.transpose(1, 2), upper[..., :size]))
        _add_to_tiles(grad_k, group.keys, torch.bmm(grad_scores.transpose(1, 2), rows))
    for part, total in zip(grads[:, heads:].split(kv_heads, dim=1), (grad_k, grad_v), strict=True):
        part.copy_(total.transpose(1, 2).reshape(part.shape))
    return grads[:tokens]


def _append_sums(rows: Tensor, inner: Tensor) -> Tensor:
    """[do, -d_high, -d_low, 0] from rows of do in bf16 and of -d (..., 1) in float32."""
    wider = rows.new_zeros(*rows.shape[:2], rows.shape[2] + SUM_COLUMNS)
    wider[..., :-SUM_COLUMNS] = rows
    wider[..., -SUM_COLUMNS] = inner[..., 0]
    wider[..., 1 - SUM_COLUMNS] = inner[..., 0] - wider[..., -SUM_COLUMNS]
    return wider


def _add_to_tiles(total: Tensor, keys: tuple[Where, ...] | Tensor, part: Tensor) -> None:
    """Add gradients (m * K, S, h) to their tiles or blocks (n, K, 128, 1, h)."""
    if isinstance(keys, Tensor):
        part = part.view(len(keys), total.shape[1], -1, KEY_BLOCK, 1, part.shape[-1]).transpose(1, 2)
        primitives.add_rows(total.flatten(1), keys.flatten(), part.flatten(0, 1).flatten(1))
        return
    part = part.view(-1, total.shape[1], len(keys), TILE, 1, part.shape[-1])
    for number, where in enumerate(keys):
        if isinstance(where, slice):
            total[where] += part[:, :, number]
        else:  # without a causal mask, several query tiles may have the same keys
            total.index_add_(0, where, part[:, :, number].to(total.dtype))


# -- blocks ------------------------------------------------------------------------------------------------------------


def _forward_blocks(q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan) -> tuple[Tensor, list[Tensor]]:
    assert len(q) <= plan.tokens, "the plan is for a shorter line"
    out, sums = q.new_empty(q.shape), torch.empty(q.shape[1], len(q) + -len(q) % KEY_BLOCK)
    native.call(
        "attention_forward", *map(_rows, (q, k, v)), plan.starts, plan.entries, plan.masks, out, sums, *_sizes(q, k, v)
    )
    return out, [q, k, v, sums]


def _backward_blocks(grad: Tensor, out: Tensor, saved: Sequence[Tensor], plan: BlockPlan) -> Tensor:
    q, k, v, sums = saved
    grads = torch.empty(len(q), q.shape[1] + 2 * k.shape[1], q.shape[2])
    native.call(
        "attention_backward",
        grad.contiguous(),
        out,
        *map(_rows, (q, k, v)),
        plan.starts,
        plan.entries,
        plan.masks,
        sums,
        grads,
        *_sizes(q, k, v),
    )
    return grads


def _rows(x: Tensor) -> int:
    """The address of rows whose heads lie side by side, possibly within a wider tensor."""
    assert x.stride(2) == 1 and x.stride(1) == x.shape[2] and x.dtype == BF16
    return x.data_ptr()


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    tokens, heads, size = q.shape
    return q.stride(0), k.stride(0), v.stride(0), tokens, heads, k.shape[1], size
