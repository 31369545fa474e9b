"""The model in the form in which it is served: the same function, in fewer and larger operations. No gradients.

    Fused(model)     q, k and v are one matrix product, gate and up are one; rotary angles come from a table

At batch 1 a layer of a small model takes longer to be asked for than to be computed, so the number of operations
counts. Sums are added up in another order, so logits agree to rounding, not to the bit.

Not promised: training, adapters that are not merged, torch.compile. Fused weights are copies, the others are shared:
drop the first model to free its own. Shapes as in `model/attention.py`.

int8 weights for decoding on a CPU: half of what a token reads in bf16, a quarter of what it reads in float32.

    quantize(model) -> the same model, fused, whose matrix products, the head's with them, read int8
    for_serving(model) -> this where it pays, else the fused model

    w[i, :] ~ scale[i] q[i, :],   scale[i] = max |w[i, :]| / 127,   q = round(w / scale)

Decoding is bound by reading weights. For a few rows FBGEMM reads q once and multiplies whole numbers. It takes
activations of eight bits, which is too coarse, so each row x is given to it as two rows of digits, a coarse one and
what that leaves:

    x ~ peak / D (a + b / 2D),   peak = max |x|,   a = round(D x / peak),   b = round(2D (D x / peak - a)),
    |a|, |b| <= D = 63

so x is off by at most peak / 15,876, and sums are exact: what a row gets depends on no neighbour. D is not 127 because
without VNNI the CPU adds two products in 16 bits, and 2 (2D) 127 must fit there. That takes 0.5 to 0.8 of the time of
torch's own product of int8 weights and bf16 activations (docs/LOG.md). Above NARROW rows the work is bound by
arithmetic, and q is widened first, which is exact, to bf16 where the CPU multiplies it. The embedding stays as it is
for looking up.

How far a log-probability moves depends on how sure the model is of itself. On the probe text: perplexity within 0.5 %;
the demo's models, of 2.4 M parameters, 0.2 to 0.6 nats at the worst token and 9e-4 to 3.3e-3 nats of divergence in the
mean (docs/LOG.md).

Not promised: equal bits between few and many rows; other devices than x86 CPUs; training; quantising in two threads at
a time.
"""

import sys
import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.memory.model import Reads
from pipeline.model.attention import Layout
from pipeline.model.config import ModelConfig
from pipeline.model.layers import Block, Body, Embedding, Linear, RMSNorm, rope_tables
from pipeline.model.transformer import Transformer
from pipeline.run.device import has_fast_bf16
from pipeline.run.errors import ConfigError

FEW, MANY = 5, 64  # rows of a step of several users, or of a draft and its token


class Fused(Transformer):
    """A `Transformer` in evaluation mode with fused layers; `head` is a linear layer also where the embedding is
    tied.
    """

    def __init__(self, model: Transformer) -> None:
        """Raises ValueError for a model that holds adapters."""
        nn.Module.__init__(self)  # not Transformer's, which would make all weights anew
        config = self.config = model.config
        self.checkpointing, self.dropout, self.neftune_alpha = "none", 0.0, 0.0
        self.model = _FusedBody(model.model, config)
        self.memory = model.memory  # read as it is, between the layers
        self.head = _around(model.model.embed_tokens.weight) if config.tied else joined(model.lm_head)
        cos, sin = rope_tables(torch.arange(config.max_context, device=self.head.weight.device), config)
        self.cos = nn.Buffer(torch.cat((cos, cos), -1), persistent=False)  # (context, 1, h)
        self.sin = nn.Buffer(torch.cat((-sin, sin), -1), persistent=False)
        self.train(False)

    @torch.no_grad()
    def line(self, ids: Tensor, positions: Tensor, layout: Layout, read: Reads | None = None) -> Tensor:
        """As `Transformer.line`: `ids` and `positions` (N,) -> (N, D)."""
        if self.memory is not None and read is None:
            read = self.memory.going_on(layout)
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[positions], self.sin[positions]
        for index, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, layout, index)
            if read is not None:
                x = read(index, x)
        return self.model.norm(x)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V), in float32."""
        return self.head(hidden).float()

    @torch.no_grad()
    def trace(self) -> "Fused":
        """Make steps of fewer than FEW rows faster, in int8 1.4 times (docs/LOG.md). From now on the model can only be
        run.

        Not where Python is 3.14, which torch cannot trace, nor off the CPU, where what is fused is rounded otherwise.
        """
        if sys.version_info < (3, 14) and self.cos.device.type == "cpu":
            x = self.model.embed_tokens(torch.zeros(1, dtype=torch.long, device=self.cos.device))
            for layer in self.model.layers:
                assert isinstance(layer, FusedBlock)
                layer.trace(x, self.cos[:1], self.sin[:1])
        return self

    def num_parameters(self) -> int:
        """All weights of the model; a tied embedding counts once."""
        beside = 0 if self.memory is None else sum(p.numel() for p in self.memory.parameters())
        return self.config.num_parameters + beside


class FusedBlock(nn.Module):
    """One layer in four matrix products."""

    def __init__(self, block: nn.Module, config: ModelConfig) -> None:
        super().__init__()
        assert isinstance(block, Block), "expected a layer as Transformer has them"
        attention, mlp = block.self_attn, block.mlp
        self.heads, self.kv_heads, self.size = config.heads, config.kv_heads, config.head_dim
        self.qkv = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = joined(attention.o_proj)
        self.gate_up = joined(mlp.gate_proj, mlp.up_proj)
        self.down = joined(mlp.down_proj)
        self.before_attention = Norm(block.input_layernorm.weight, config.norm_eps)
        self.before_mlp = Norm(block.post_attention_layernorm.weight, config.norm_eps)
        self.traced: tuple[Any, ...] = ()  # in a tuple it is no module of this one: its weights are these
        self.head_norms = None
        if config.head_norms:  # (H + K, h), for each head of q and of k
            norms = attention.q_norm.weight, attention.k_norm.weight
            each = torch.cat([norms[0].expand(self.heads, -1), norms[1].expand(self.kv_heads, -1)])
            self.head_norms = Norm(each, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, index: int) -> Tensor:
        """(N, D) -> (N, D)."""
        block: Any = self.traced[0] if self.traced and len(x) < FEW else self
        q, k, v = block.before(x, cos, sin)
        return block.behind(x, layout.attend(q, k, v, index).flatten(-2))

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What attention asks, of (N, D): q (N, H, h), k and v (N, K, h)."""
        heads = self.qkv(self.before_attention(x)).unflatten(-1, (-1, self.size))  # (N, H + 2K, h)
        both, v = heads.split((self.heads + self.kv_heads, self.kv_heads), 1)
        both = both.float()
        if self.head_norms is not None:
            both = self.head_norms(both)
        turned = torch.addcmul(both * cos, both.roll(self.size // 2, -1), sin)
        q, k = turned.to(x.dtype).split((self.heads, self.kv_heads), 1)
        return q, k, v.to(x.dtype)

    def behind(self, x: Tensor, attended: Tensor) -> Tensor:
        """What a layer makes of its input and of what attention found, both (N, D)."""
        x = x + self.out(attended)
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate).mul_(up))

    def trace(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Run fewer than FEW rows without Python between two operations from now on; examples as of `forward`, of
        one row.
        """
        attended = x.new_zeros(1, self.heads * self.size)
        with warnings.catch_warnings():
            # deprecated: but torch is pinned, and torch.compile wants a C++ compiler and half a minute
            warnings.filterwarnings("ignore", message=".*torch.jit.*deprecated", category=DeprecationWarning)
            # a branch by the number of rows is taken as for one, which holds up to FEW
            warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)
            made = torch.jit.trace_module(self, {"before": (x, cos, sin), "behind": (x, attended)}, check_trace=False)
            for _ in range(2):  # a graph is made at its first run and improved at its second: not while somebody waits
                made.before(x, cos, sin)
                made.behind(x, attended)
        self.traced = (made,)


class Norm(RMSNorm):
    """`RMSNorm` in four operations, in float32: x / sqrt(mean(x^2) + eps) = sqrt(D) x / hypot(|x|, sqrt(D eps)).

    `functional.rms_norm` is seven on a CPU, and takes twice as long for one token (docs/LOG.md).
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        nn.Module.__init__(self)
        width = weight.shape[-1]
        self.scaled = nn.Buffer(weight.detach().float() * width**0.5, persistent=False)
        self.least = nn.Buffer(torch.tensor((width * eps) ** 0.5, device=weight.device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return (wide * self.scaled).div_(torch.hypot(norm, self.least)).to(x.dtype)


class _FusedBody(Body):
    def __init__(self, body: Body, config: ModelConfig) -> None:
        nn.Module.__init__(self)
        if type(body.embed_tokens) is not Embedding:
            raise ValueError("the embedding holds an adapter: merge it before the model is fused")
        self.embed_tokens = body.embed_tokens
        self.layers = nn.ModuleList(FusedBlock(layer, config) for layer in body.layers)
        self.norm = Norm(body.norm.weight, config.norm_eps)


class Product(Linear):
    """A linear layer that multiplies from FEW rows on from the left: on a CPU's float32 that takes 0.6 of the time
    (docs/LOG.md).
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        if x.ndim == 2 and FEW <= len(x) <= MANY and x.device.type == "cpu" and x.dtype == torch.float32:
            out = (self.weight @ x.t()).t().contiguous()
            return out if self.bias is None else out.add_(self.bias)
        return functional.linear(x, self.weight, self.bias)


def joined(*layers: nn.Module) -> Product:
    """Linear layers of one input as one, whose output is theirs one after another. Raises ValueError for adapters."""
    plain = [layer for layer in layers if type(layer) is Linear]
    if len(plain) < len(layers):
        raise ValueError("a linear layer holds an adapter: merge it before the model is fused")
    biases = [layer.bias.detach() for layer in plain if layer.bias is not None]
    made = _around(plain[0].weight if len(plain) == 1 else torch.cat([layer.weight.detach() for layer in plain]))
    if biases:
        made.bias = nn.Parameter(torch.cat(biases))
    return made


def _around(weight: Tensor) -> Product:
    """A linear layer without bias around weights (out, in) that are there; a parameter is shared."""
    with torch.device("meta"):
        made = Product(weight.shape[1], weight.shape[0])
    made.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
    return made


# -- quantize ----------------------------------------------------------------------------------------------------------


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
    """The model as an engine runs it: in int8 or with its own weights; None: in int8 where that `pays`. Raises as
    `quantize`.
    """
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
    """A linear layer that holds (out, in) int8 and a scale for each output, once as they are and once as FBGEMM
    packs them.
    """

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
    """`weight` (out, in) as levels (out, in) int8 from -127 to 127 and scales (out,) float32: levels * scales is
    near it.
    """
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
