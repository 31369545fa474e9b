"""int8 weights for decoding on a CPU: half of what a token reads in bf16, a quarter of what it reads in float32.

    quantize(model) -> the same model, fused, whose matrix products, the head's with them, read int8
    for_serving(model) -> this where it pays, else the fused model

    w[i, :] ~ scale[i] q[i, :],   scale[i] = max |w[i, :]| / 127,   q = round(w / scale)

Decoding is bound by reading weights. For a few rows FBGEMM reads q once and multiplies whole numbers. It takes activations of eight
bits, which is too coarse, so each row x is given to it as two rows of digits, a coarse one and what that leaves:

    x ~ peak / D (a + b / 2D),   peak = max |x|,   a = round(D x / peak),   b = round(2D (D x / peak - a)),   |a|, |b| <= D = 63

so x is off by at most peak / 15,876, and sums are exact: what a row gets depends on no neighbour. D is not 127 because without VNNI the
CPU adds two products in 16 bits, and 2 (2D) 127 must fit there. That takes 0.5 to 0.8 of the time of torch's own product of int8
weights and bf16 activations (docs/LOG.md). Above NARROW rows the work is bound by arithmetic, and q is widened first, which is exact,
to bf16 where the CPU multiplies it. The embedding stays as it is for looking up.

How far a log-probability moves depends on how sure the model is of itself. On the probe text: perplexity within 0.5 %; the demo's models,
of 2.4 M parameters, 0.2 to 0.6 nats at the worst token and 9e-4 to 3.3e-3 nats of divergence in the mean (docs/LOG.md).

Not promised: equal bits between few and many rows; other devices than x86 CPUs; training; quantising in two threads at a time.
"""

import warnings
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.device import has_fast_bf16
from pipeline.errors import ConfigError
from pipeline.export.fused import Fused
from pipeline.model.transformer import Transformer

FROM_PARAMETERS = 50_000_000  # smaller models lie in a CPU's cache, and what they wait for is not their weights
NARROW = 32  # rows up to which digits are faster than widened weights
LEVELS, DIGITS = 127, 63
TINY = 1e-30  # instead of the largest of a row of zeros
FBGEMM = "fbgemm"


def pays(model: Transformer) -> bool:
    """Whether int8 is what a model is served in unless somebody asks for its own numbers."""
    possible = model.model.embed_tokens.weight.device.type == "cpu" and has_fbgemm()
    return possible and model.num_parameters() >= FROM_PARAMETERS


def has_fbgemm() -> bool:
    """Whether this torch multiplies whole numbers with FBGEMM: on x86 it does."""
    return FBGEMM in torch.backends.quantized.supported_engines


def for_serving(model: Transformer, weights: Literal["int8", "native"] | None = None) -> Fused:
    """The model as an engine runs it: in int8 or with its own weights; None: in int8 where that `pays`. Raises as `quantize`."""
    return (quantize(model) if weights == "int8" or (weights is None and pays(model)) else Fused(model)).trace()


def quantize(model: Transformer) -> Fused:
    """The model fused and in int8; the model given stays as it is. Raises ConfigError off x86 CPUs, and as `Fused`."""
    if (where := model.model.embed_tokens.weight.device.type) != "cpu":
        raise ConfigError(f"int8 weights are for CPUs, and this model lies on {where}: serve its own weights")
    if not has_fbgemm():
        raise ConfigError(
            "int8 weights want FBGEMM, which this torch has not (x86 has it): serve the model's own weights"
        )
    fused = Fused(model)
    for owner in list(fused.modules()):
        for name, layer in owner.named_children():
            if isinstance(layer, nn.Linear):
                setattr(owner, name, Int8Linear(layer))
    return fused


class Int8Linear(nn.Module):
    """A linear layer that holds (out, in) int8 and a scale for each output, once as they are and once as FBGEMM packs them."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        levels, scales = rounded(layer.weight.detach())
        self.levels, self.scales = nn.Buffer(levels), nn.Buffer(scales)
        self.packed = _packed(levels, scales.double() / DIGITS)
        self.largest, self.finer = torch.tensor(float(DIGITS)), torch.tensor(2.0 * DIGITS)  # a number would be made one
        self.bias = layer.bias
        self.wide = torch.bfloat16 if has_fast_bf16() else torch.float32

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out) in the dtype of `x`."""
        if x.ndim == 2 and len(x) <= NARROW:
            out = self._by_digits(x.float()).to(x.dtype)
        else:
            out = (functional.linear(x.to(self.wide), self.levels.to(self.wide)) * self.scales).to(x.dtype)
        return out if self.bias is None else out + self.bias

    def _by_digits(self, x: Tensor) -> Tensor:
        """(n, in) -> (n, out), float32."""
        peak = x.abs().amax(1, keepdim=True).clamp_min_(TINY)  # (n, 1)
        coarse = x * (self.largest / peak)
        digits = torch.cat((coarse, (coarse - coarse.round()).mul_(self.finer)))  # (2n, in); the product rounds them
        both = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(digits, 1.0, DIGITS, self.packed)
        high, low = both.chunk(2)
        return torch.add(high, low, alpha=0.5 / DIGITS).mul_(peak)


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight` (out, in) as levels (out, in) int8 from -127 to 127 and scales (out,) float32: levels * scales is near it."""
    wide = weight.float()
    scales = wide.abs().amax(1).clamp_min(TINY) / LEVELS
    return (wide / scales[:, None]).round_().to(torch.int8), scales


def _packed(levels: Tensor, scales: Tensor) -> torch.ScriptObject:
    """Levels (out, in) int8 and scales (out,) as FBGEMM reads them; digits count from DIGITS, levels from 0."""
    before, torch.backends.quantized.engine = torch.backends.quantized.engine, FBGEMM
    zeros = torch.zeros(len(levels), dtype=torch.long)
    try:
        with (
            warnings.catch_warnings()
        ):  # torch is pinned; where it drops this, onednn.qlinear_pointwise takes 1.6 times as long
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions", category=UserWarning)
            return torch.ops.quantized.linear_prepack(
                torch._make_per_channel_quantized_tensor(levels, scales, zeros, 0), None
            )
    finally:
        torch.backends.quantized.engine = before
