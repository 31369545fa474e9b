"""The baseline of a memory: an additional SwiGLU after some layers, with as many weights.

    x <- x + down(silu(gate(norm(x))) * up(norm(x)))        down is zero at the start

Like a memory's read it follows whole layers of a frozen model and starts as the base; it chooses nothing.
"""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.memory.config import MemoryConfig
from pipeline.memory.model import HF_KEYS, NAME, Reading
from pipeline.model.attention import Layout
from pipeline.model.config import ModelConfig
from pipeline.model.hooks import LayerHook, Reads
from pipeline.model.layers import Linear, RMSNorm
from pipeline.run.types import JsonObject


@dataclass(frozen=True, kw_only=True)
class WiderConfig:
    """Width of the SwiGLU, and the layers with one, from 0. Raises ValueError."""

    width: int
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"wider.width: expected at least 1, got {self.width}")

    @classmethod
    def like(cls, memory: MemoryConfig, parameters: int, shape: ModelConfig) -> "WiderConfig":
        """At the memory's layers, with about `parameters` weights in all."""
        layers = tuple(memory.placed(shape.layers))
        per_layer = parameters / max(1, len(layers)) - shape.width  # less the norm's
        return cls(width=max(1, round(per_layer / (3 * shape.width))), layers=layers)

    def to_json(self) -> JsonObject:
        """The configuration as memory.json stores it."""
        return asdict(self)


class Wider(LayerHook):
    """A SwiGLU after each of some layers. Without a `generator` its weights are zero, to be loaded."""

    name = NAME
    hf_keys = HF_KEYS

    def __init__(self, config: WiderConfig, shape: ModelConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if outside := [layer for layer in config.layers if not 0 <= layer < shape.layers]:
            raise ValueError(f"wider.layers: expected layers from 0 to {shape.layers - 1}, got {outside[0]}")
        self.config, self.shape = config, shape
        self.added = True
        self.readers = nn.ModuleDict({str(layer): WiderLayer(config.width, shape) for layer in config.layers})
        if generator is not None:
            self.initialise(generator)

    def reads(self, positions: Tensor, padding: Tensor | None, computed: Tensor | None, reading: object) -> Reads:
        """For a line of tokens, each token by itself."""
        return (lambda layer, x: x) if isinstance(reading, Reading) and reading.off else self._add

    def going_on(self, layout: Layout) -> Reads:
        """For new tokens of a cache's rows, each token by itself."""
        return self._add

    def _add(self, layer: int, x: Tensor) -> Tensor:
        return x + self.readers[str(layer)](x) if str(layer) in self.readers else x

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """As the model's own SwiGLU, except for the down projection, which is zero."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0)
            elif name.endswith("down_proj.weight"):
                parameter.zero_()
            else:
                weights = torch.empty(parameter.shape, device=generator.device)
                parameter.copy_(weights.normal_(0.0, self.shape.initializer_range, generator=generator))


class WiderLayer(nn.Module):
    """Norm and SwiGLU of one layer."""

    def __init__(self, width: int, shape: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.width, shape.norm_eps)
        self.gate_proj, self.up_proj = Linear(shape.width, width), Linear(shape.width, width)
        self.down_proj = Linear(width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return self.down_proj(functional.silu(self.gate_proj(normed)) * self.up_proj(normed))
