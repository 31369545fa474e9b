"""int8 weights for decoding on a CPU: half of what a token reads in bf16, a quarter of what it reads in float32.

    quantize(model) -> the same model, fused, whose matrix products, the head's with them, read int8
    for_serving(model) -> this where it pays, else the fused model

    w[i, :] ~ scale[i] q[i, :],   scale[i] = max |w[i, :]| / 127, rounded up to a bf16,   q = round(w / scale)

Decoding is bound by reading weights. `_weight_int8pack_mm` reads q once for a few rows and multiplies by bf16 activations into
float32 sums; above NARROW rows the work is bound by arithmetic and q is widened first, which is exact. The embedding stays as it is
for looking up. Activations and sums are rounded to bf16, eight bits, as in any bf16 model.

How far a log-probability moves depends on how sure the model is of itself. On the probe text: perplexity within 0.5 %; the demo's models,
of 2.4 M parameters, 0.3 to 0.5 nats at the worst token and 1e-3 to 4e-3 nats of divergence in the mean (docs/LOG.md).

Not promised: equal bits between few and many rows; other devices than CPUs; training.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.device import has_fast_bf16
from pipeline.export.fused import Fused
from pipeline.model.transformer import Transformer

FROM_PARAMETERS = 50_000_000  # smaller models lie in a CPU's cache, and what they wait for is not their weights
NARROW = 16  # rows up to which the packed product is the faster one
LEVELS = 127


def pays(model: Transformer) -> bool:
    """Whether int8 is what a model is served in unless somebody asks for its own numbers."""
    return model.model.embed_tokens.weight.device.type == "cpu" and model.num_parameters() >= FROM_PARAMETERS


def for_serving(model: Transformer, weights: Literal["int8", "native"] | None = None) -> Fused:
    """The model as an engine runs it: in int8 or with its own weights; None: in int8 where that `pays`. Raises as `quantize`."""
    return quantize(model) if weights == "int8" or (weights is None and pays(model)) else Fused(model)


def quantize(model: Transformer) -> Fused:
    """The model fused and in int8; the model given stays as it is. Raises ValueError off the CPU, and as `Fused`."""
    if (where := model.model.embed_tokens.weight.device.type) != "cpu":
        raise ValueError(f"int8 weights are for CPUs, and this model lies on {where}: serve its own weights")
    fused = Fused(model)
    for owner in list(fused.modules()):
        for name, layer in owner.named_children():
            if isinstance(layer, nn.Linear):
                setattr(owner, name, Int8Linear(layer))
    return fused


class Int8Linear(nn.Module):
    """A linear layer that holds (out, in) int8 and a scale for each output."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        levels, scales = rounded(layer.weight.detach())
        self.levels, self.scales = nn.Buffer(levels), nn.Buffer(scales)
        self.bias = layer.bias
        self.wide = torch.bfloat16 if has_fast_bf16() else torch.float32

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out) in bf16 for a few rows, else in the dtype of `x`: what is done with it promotes."""
        if x.ndim == 2 and len(x) <= NARROW:
            out = torch._weight_int8pack_mm(x.bfloat16(), self.levels, self.scales)
        else:
            out = functional.linear(x.to(self.wide), self.levels.to(self.wide)).to(x.dtype) * self.scales
        return out if self.bias is None else out + self.bias


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight` (out, in) as levels (out, in) int8 from -127 to 127 and scales (out,) bf16: levels * scales is near it."""
    wide = weight.float()
    exact = wide.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / LEVELS
    scales = exact.bfloat16()
    scales = torch.where(scales.float() < exact, scales * (1 + 2**-7), scales)  # up: no level is cut
    return (wide / scales.float()[:, None]).round_().to(torch.int8), scales
