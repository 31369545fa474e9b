"""A product-key memory attached to a frozen model: a baseline in `benchmarks/memory.py`.

    q_h = halves of head h of W_q norm(x);  scores of value (i, j): q_h1 . K_h1[i] + q_h2 . K_h2[j]
    the top k sums of the top k of each half, softmax, sum of their values over all heads
    x <- x + W_o (sum * silu(W_g norm(x)))          W_o is zero at the start

Product keys: Lample et al. 2019, arXiv:1907.05242, 3.1; gate and one value table for all layers: Berges et al. 2024,
arXiv:2412.09764, 3. Each token is looked up independently, so the layer is causal. Initialization as in
facebookresearch/memory: keys uniform within 1/sqrt of their size, values normal with std 1/sqrt of the width. Not
implemented: query batch normalization, which is not causal.

Shapes: N tokens, D width, H heads, h size of half a query, n half-keys per table (n * n values).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.memory.model import NAME, Reading
from pipeline.model.config import ModelConfig
from pipeline.model.layers import LayerHook, Linear, Reads, RMSNorm


@dataclass(frozen=True, kw_only=True)
class ProductKeysConfig:
    """The shape of a product-key memory. Raises ValueError if it is invalid."""

    layers: tuple[int, ...]
    keys: int  # n
    half: int  # h
    heads: int = 4
    top_k: int = 32

    def __post_init__(self) -> None:
        if min(self.keys, self.half, self.heads) < 1 or not 1 <= self.top_k <= self.keys:
            raise ValueError(f"product keys: expected positive sizes and top_k at most keys ({self.keys}), got {self}")

    def parameters(self, width: int) -> int:
        """The total number of weights."""
        each = width + width * self.heads * 2 * self.half + 2 * self.heads * self.keys * self.half + 2 * width * width
        return len(self.layers) * each + self.keys**2 * width

    def flops(self, width: int) -> int:
        """FLOPs of matrix products per token."""
        query = 2 * width * self.heads * 2 * self.half
        scores = 2 * self.heads * 2 * self.keys * self.half
        return len(self.layers) * (query + scores + 2 * self.heads * self.top_k * width + 4 * width * width)

    def numbers_read(self, width: int) -> int:
        """Weights read per token."""
        each = width + width * self.heads * 2 * self.half + 2 * self.heads * self.keys * self.half + 2 * width * width
        return len(self.layers) * (each + self.heads * self.top_k * width)


class ProductKeys(LayerHook):
    """One value table, and a reader for each layer."""

    name = NAME

    def __init__(self, config: ProductKeysConfig, shape: ModelConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.config, self.std, self.added = config, shape.initializer_range, True
        self.values = nn.EmbeddingBag(config.keys**2, shape.width, mode="sum")
        self.readers = nn.ModuleDict({str(layer): Lookup(config, shape) for layer in config.layers})
        self.initialise(generator)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Initialize as described in the module docstring."""
        width, half = self.values.weight.shape[1], self.config.half
        self.values.weight.normal_(0.0, width**-0.5, generator=generator)
        for name, parameter in self.readers.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0)
            elif name.endswith("keys"):
                parameter.uniform_(-(half**-0.5), half**-0.5, generator=generator)
            elif name.endswith("o_proj.weight"):
                parameter.zero_()
            else:
                parameter.normal_(0.0, self.std, generator=generator)

    def reads(self, positions: Tensor, padding: Tensor | None, computed: Tensor | None, reading: object) -> Reads:
        """The hook for complete rows of tokens; each token is looked up independently."""
        return (lambda layer, x: x) if isinstance(reading, Reading) and reading.off else self._read

    def going_on(self, layout: Any) -> Reads:
        """The hook for new tokens of cached rows; each token is looked up independently."""
        return self._read

    def _read(self, layer: int, x: Tensor) -> Tensor:
        return x + self.readers[str(layer)](x, self.values) if str(layer) in self.readers else x


class Lookup(nn.Module):
    """Norm, queries, half-keys, gate and output projection of one layer."""

    def __init__(self, config: ProductKeysConfig, shape: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = RMSNorm(shape.width, shape.norm_eps)
        self.q_proj = Linear(shape.width, config.heads * 2 * config.half)
        self.keys = nn.Parameter(torch.zeros(2, config.heads, config.keys, config.half))
        self.gate_proj, self.o_proj = Linear(shape.width, shape.width), Linear(shape.width, shape.width)
        # With sorted halves, (i + 1)(j + 1) sums are at least as large as the one at (i, j): pairs for which this is
        # more than k are never among the top k
        ranks = [(i, j) for i in range(config.top_k) for j in range(config.top_k) if (i + 1) * (j + 1) <= config.top_k]
        self.first, self.second = torch.tensor([i for i, _ in ranks]), torch.tensor([j for _, j in ranks])

    def choose(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Value indices (N, H, k) for tokens (N, D), and their weights."""
        config = self.config
        q = self.q_proj(normed).float().unflatten(-1, (config.heads, 2, config.half))  # (N, H, 2, h)
        best, which = torch.einsum("nhsd,shkd->nhsk", q, self.keys.float()).topk(config.top_k, dim=-1)  # (N, H, 2, k)
        first, second = self.first, self.second
        scores, places = (best[:, :, 0, first] + best[:, :, 1, second]).topk(config.top_k, dim=-1)
        pairs = which[:, :, 0, first] * config.keys + which[:, :, 1, second]
        return pairs.gather(2, places), scores.softmax(-1)

    def forward(self, x: Tensor, values: nn.EmbeddingBag) -> Tensor:
        normed = self.norm(x)
        which, weights = self.choose(normed)
        read = values(which.flatten(1), per_sample_weights=weights.flatten(1).to(values.weight.dtype))
        return self.o_proj(read * functional.silu(self.gate_proj(normed)))
