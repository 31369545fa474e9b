"""Keys and values of whole canvases, kept between the steps of a block (Wu et al. 2025, Fast-dLLM, arXiv:2505.22618).

    CanvasCache.refresh(...)   a pass over all places, whose keys and values are kept
    CanvasCache.window(...)    a pass over some places of each row; the others are as they were

Tokens of a masked-diffusion model see both sides, so what is kept is exact only until a token changes: at a block's first step,
where nothing lies outside the window, and in a block-diffusion model, whose earlier tokens never see later ones.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pipeline.model.transformer import Transformer


class CanvasCache:
    """Of `rows` canvases of `length` places."""

    def __init__(self, trunk: Transformer, rows: int, length: int, seen: Tensor) -> None:
        """`seen` (rows, 1, 1 or length, length) is True where a place may be seen."""
        config, table = trunk.config, trunk.model.embed_tokens.weight
        shape = (rows, config.kv_heads, length, config.head_dim)
        self.trunk, self.seen = trunk, seen
        self.keys = [torch.zeros(shape, dtype=table.dtype, device=table.device) for _ in range(config.layers)]
        self.values = [torch.zeros_like(keys) for keys in self.keys]

    def refresh(self, rows: Sequence[int], ids: Tensor, positions: Tensor) -> Tensor:
        """States (R, T, D) of all places of some rows: `ids` and `positions` (R, T)."""
        places = torch.arange(ids.shape[1], device=ids.device).expand(len(rows), -1)
        return self.window(rows, ids, positions, places)

    def window(self, rows: Sequence[int], ids: Tensor, positions: Tensor, places: Tensor) -> Tensor:
        """States (R, W, D) of the `places` (R, W) of some rows, which hold `ids` (R, W)."""
        layout = _Window(self, torch.tensor(rows, device=ids.device), places)
        return self.trunk.line(ids.flatten(), positions.flatten(), layout).view(*ids.shape, -1)


class _Window:
    """A layout of the model: the new places of some rows, among all of their keys."""

    def __init__(self, cache: CanvasCache, rows: Tensor, places: Tensor) -> None:
        self.cache, self.rows, self.places = cache, rows, places
        seen = cache.seen[rows]  # (R, 1, 1 or T, T)
        if seen.shape[2] > 1:
            seen = seen.gather(2, places[:, None, :, None].expand(-1, 1, -1, seen.shape[3]))
        self.mask = seen

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        shape = (*self.places.shape, -1)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        row = self.rows[:, None].expand_as(self.places)
        keys[row, :, self.places] = k.view(*shape, k.shape[-1]).to(keys.dtype)
        values[row, :, self.places] = v.view(*shape, v.shape[-1]).to(values.dtype)
        queries = q.view(*shape, q.shape[-1]).transpose(1, 2)  # (R, H, W, h)
        own, told = keys[self.rows].to(q.dtype), values[self.rows].to(q.dtype)
        group = queries.shape[1] // own.shape[1]
        if group > 1:
            own, told = own.repeat_interleave(group, 1), told.repeat_interleave(group, 1)
        out = scaled_dot_product_attention(queries, own, told, attn_mask=self.mask)
        return out.transpose(1, 2).reshape(q.shape)
