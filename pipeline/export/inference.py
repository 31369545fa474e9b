"""The model as it is served: fused layers, and int8 weights on a CPU. No gradients.

    Fused(model)        q, k and v are one matmul, gate and up another; rotary angles come from a table
    quantize(model)     the same, with int8 weights in all matmuls, including the head
    for_serving(model)  `quantize(model)` if that pays off, else `Fused(model)`
    with_adapter(fused, adapted)  a twin that shares the weights of `fused`, with an adapter alongside its matmuls

At batch size 1, launching the operations of a small model's layer takes longer than computing them, so the number of
operations matters. Sums are computed in a different order than in the original model, so logits agree up to rounding,
not bit for bit. Shapes are as in `model/layers.py`.

int8 weights are for decoding, which is memory-bound: each token reads half as many bytes as with bf16, and a
quarter as many as with float32.

    w[i, :] ~ scale[i] q[i, :],   scale[i] = max |w[i, :]| / 127,   q = round(w / scale)

For a few rows, FBGEMM reads q once and multiplies integers. It takes 8-bit activations, which are too coarse, so each
row x becomes two rows of digits, a coarse one and one for the remainder:

    x ~ peak / D (a + b / 2D),   peak = max |x|,   a = round(D x / peak),   b = round(2D (D x / peak - a)),
    |a|, |b| <= D = 63

so the error of x is at most peak / 15,876, and sums are exact: a row's result does not depend on the other rows. D is
63 rather than 127 because, without VNNI, the CPU adds two products in 16 bits, where 2 (2D) 127 must fit. Digits take
0.5 to 0.8 times as long as torch's own matmul of int8 weights and bf16 activations (docs/LOG.md). With more than NARROW
rows, the work is compute-bound, so q is first converted (exactly) to bf16 if the CPU supports it in hardware, else to
float32. The embedding lookup keeps the original weights.

The change in a log-probability depends on how certain the model is. On the probe text, the perplexity changes by at
most 0.5%; for the demo's models with 2.4M parameters, the worst token's log-probability changes by 0.2 to 0.6 nats, and
the mean divergence is 9e-4 to 3.3e-3 nats (docs/LOG.md).

Not supported: training; DoRA with shared weights; torch.compile; bit-identical results for few and many rows; int8
on devices other than x86 CPUs; quantizing in two threads at once. Fused weights are copies; the others are shared with
the original model. To free the unfused originals, delete that model.
"""

import copy
import sys
import warnings
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.model import lora
from pipeline.model.config import ModelConfig
from pipeline.model.layers import Block, Body, Embedding, Layout, Linear, Reads, RMSNorm, rope_tables
from pipeline.model.transformer import Transformer
from pipeline.run.device import has_fast_bf16
from pipeline.run.errors import ConfigError

FEW, MANY = 5, 64  # rows in a decoding step with several users, or with draft tokens


class Fused(Transformer):
    """A `Transformer` in evaluation mode with fused layers. `head` is a linear layer even with a tied embedding."""

    def __init__(self, model: Transformer) -> None:
        """Raises ValueError for a model with adapters."""
        nn.Module.__init__(self)  # not Transformer's, which would initialize new weights
        config = self.config = model.config
        self.checkpointing, self.dropout, self.neftune_alpha = "none", 0.0, 0.0
        self.model = _FusedBody(model.model, config)
        self.attach(model.hook)
        self.head = _linear_of(model.model.embed_tokens.weight) if config.tied else joined(model.lm_head)
        cos, sin = rope_tables(torch.arange(config.max_context, device=self.head.weight.device), config)
        self.cos = nn.Buffer(torch.cat((cos, cos), -1), persistent=False)  # (context, 1, h)
        self.sin = nn.Buffer(torch.cat((-sin, sin), -1), persistent=False)
        self.train(False)

    @torch.no_grad()
    def line(
        self, ids: Tensor, positions: Tensor, layout: Layout, read: Reads | None = None, chosen: Tensor | None = None
    ) -> Tensor:
        """Like `Transformer.line`: `ids` and `positions` (N,) -> (N, D)."""
        if read is None and (hook := self.hook) is not None:
            read = hook.going_on(layout)
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[positions], self.sin[positions]
        for index, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, layout, index)
            if read is not None:
                x = read(index, x)
        return self.model.norm(x if chosen is None else x[chosen])

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V), in float32."""
        return self.head(hidden).float()

    @torch.no_grad()
    def trace(self) -> "Fused":
        """Speed up steps with fewer than FEW rows, 1.4x with int8 (docs/LOG.md). Do not change the model afterwards.

        Does nothing on Python 3.14, where torch cannot trace, or on GPUs, where fused operations round differently.
        """
        if sys.version_info < (3, 14) and self.cos.device.type == "cpu":
            x = self.model.embed_tokens(torch.zeros(1, dtype=torch.long, device=self.cos.device))
            for layer in self.model.layers:
                assert isinstance(layer, FusedBlock)
                layer.trace(x, self.cos[:1], self.sin[:1])
        return self

    def num_parameters(self) -> int:
        """The number of the model's weights; a tied embedding counts once."""
        return self.config.num_parameters + (0 if self.hook is None else self.hook.num_parameters())


class FusedBlock(nn.Module):
    """One layer in four matmuls."""

    def __init__(self, block: nn.Module, config: ModelConfig) -> None:
        super().__init__()
        assert isinstance(block, Block), "expected a layer of a Transformer"
        attention, mlp = block.self_attn, block.mlp
        self.heads, self.kv_heads, self.size = config.heads, config.kv_heads, config.head_dim
        self.qkv: nn.Module = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out: nn.Module = joined(attention.o_proj)
        self.gate_up: nn.Module = joined(mlp.gate_proj, mlp.up_proj)
        self.down: nn.Module = joined(mlp.down_proj)
        self.before_attention = Norm(block.input_layernorm.weight, config.norm_eps)
        self.before_mlp = Norm(block.post_attention_layernorm.weight, config.norm_eps)
        # a tuple, so that the traced module, which shares the weights, is not registered as a submodule
        self.traced: tuple[torch.jit.ScriptModule, ...] = ()
        self.head_norms = None
        if config.head_norms:  # (H + K, h), for each head of q and k
            norms = attention.q_norm.weight, attention.k_norm.weight
            weights = torch.cat([norms[0].expand(self.heads, -1), norms[1].expand(self.kv_heads, -1)])
            self.head_norms = Norm(weights, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, index: int) -> Tensor:
        """(N, D) -> (N, D)."""
        block = self.traced[0] if self.traced and len(x) < FEW else self
        q, k, v = block.attention_inputs(x, cos, sin)
        return block.output(x, layout.attend(q, k, v, index).flatten(-2))

    def attention_inputs(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs of attention for x (N, D): q (N, H, h), k and v (N, K, h)."""
        heads = self.qkv(self.before_attention(x)).unflatten(-1, (-1, self.size))  # (N, H + 2K, h)
        queries_and_keys, v = heads.split((self.heads + self.kv_heads, self.kv_heads), 1)
        queries_and_keys = queries_and_keys.float()
        if self.head_norms is not None:
            queries_and_keys = self.head_norms(queries_and_keys)
        rotated = torch.addcmul(queries_and_keys * cos, queries_and_keys.roll(self.size // 2, -1), sin)
        q, k = rotated.to(x.dtype).split((self.heads, self.kv_heads), 1)
        return q, k, v.to(x.dtype)

    def output(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output (N, D) from its input and the output of attention, both (N, D)."""
        x = x + self.out(attended)
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate).mul_(up))

    def trace(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """From now on, run fewer than FEW rows without Python overhead between operations. The arguments are
        examples of `forward`'s arguments, with one row.
        """
        attended = x.new_zeros(1, self.heads * self.size)
        with warnings.catch_warnings():
            # torch.jit is deprecated, but torch is pinned, and torch.compile needs a C++ compiler and 30 seconds
            warnings.filterwarnings("ignore", message=".*torch.jit.*deprecated", category=DeprecationWarning)
            # a branch on the number of rows is traced for one row, and any number below FEW takes the same branch
            warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)
            traced = torch.jit.trace_module(
                self, {"attention_inputs": (x, cos, sin), "output": (x, attended)}, check_trace=False
            )
            for _ in range(2):  # warm-up: the first run builds a graph and the second optimizes it
                traced.attention_inputs(x, cos, sin)
                traced.output(x, attended)
        self.traced = (traced,)


class Norm(RMSNorm):
    """`RMSNorm` in four operations, in float32: x / sqrt(mean(x^2) + eps) = sqrt(D) x / hypot(|x|, sqrt(D eps)).

    `functional.rms_norm` takes seven on a CPU, and twice as long for one token (docs/LOG.md).
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
            raise ValueError("the embedding has an adapter; merge the adapter before fusing the model")
        self.embed_tokens = body.embed_tokens
        self.layers = nn.ModuleList(FusedBlock(layer, config) for layer in body.layers)
        self.norm = Norm(body.norm.weight, config.norm_eps)


class Product(Linear):
    """A linear layer that, for FEW to MANY rows in float32 on a CPU, multiplies with the weight on the left, which
    takes 0.6 times as long (docs/LOG.md).
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        if x.ndim == 2 and FEW <= len(x) <= MANY and x.device.type == "cpu" and x.dtype == torch.float32:
            out = (self.weight @ x.t()).t().contiguous()
            return out if self.bias is None else out.add_(self.bias)
        return functional.linear(x, self.weight, self.bias)


def joined(*layers: nn.Module) -> Product:
    """Fuse linear layers with the same input into one with concatenated outputs. Raises ValueError for adapters."""
    linears = [layer for layer in layers if type(layer) is Linear]
    if len(linears) < len(layers):
        raise ValueError("a linear layer has an adapter; merge the adapter before fusing the model")
    biases = [layer.bias.detach() for layer in linears if layer.bias is not None]
    fused = _linear_of(
        linears[0].weight if len(linears) == 1 else torch.cat([layer.weight.detach() for layer in linears])
    )
    if biases:
        fused.bias = nn.Parameter(torch.cat(biases))
    return fused


def _linear_of(weight: Tensor) -> Product:
    """A linear layer with these weights (out, in) and no bias; a Parameter is shared, not copied."""
    with torch.device("meta"):
        layer = Product(weight.shape[1], weight.shape[0])
    layer.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
    return layer


# -- adapters ----------------------------------------------------------------------------------------------------------

M = TypeVar("M", bound=nn.Module)


def with_adapter(fused: Fused, adapted: Transformer) -> Fused:
    """A model that shares the weights of `fused` and adds the adapter of `adapted`, a model of the same shape.

    Raises ConfigError for DoRA and for trained tokens, because they change the shared weights themselves.
    """
    adapters = lora.adapters(adapted)
    if any(isinstance(adapter, lora.AdaptedEmbedding) or adapter.config.dora for adapter in adapters):
        raise ConfigError("an adapter with DoRA or trained tokens changes the base weights; serve the merged model")
    twin = _twin(fused)
    twin.model = _twin(fused.model)
    pairs = zip(fused.model.layers, adapted.model.layers, strict=True)
    twin.model.layers = nn.ModuleList(_block_with_adapter(block, layer) for block, layer in pairs)
    return twin.trace()


def _twin(module: M) -> M:
    """A shallow copy of a module: the weights are shared, but submodules can be replaced."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


def _block_with_adapter(block: nn.Module, layer: nn.Module) -> "FusedBlock":
    assert isinstance(block, FusedBlock) and isinstance(layer, Block)
    twin = _twin(block)
    twin.traced = ()
    attention, mlp = layer.self_attn, layer.mlp
    twin.qkv = _beside(block.qkv, attention.q_proj, attention.k_proj, attention.v_proj)
    twin.out = _beside(block.out, attention.o_proj)
    twin.gate_up = _beside(block.gate_up, mlp.gate_proj, mlp.up_proj)
    twin.down = _beside(block.down, mlp.down_proj)
    return twin


def _beside(product: nn.Module, *layers: nn.Module) -> nn.Module:
    """A fused matmul with the adapters of its original layers; only the matmul if no layer has an adapter."""
    downs: list[Tensor] = []
    ups: list[Tensor] = []
    for layer in layers:
        assert isinstance(layer, nn.Linear | lora.AdaptedLinear)
        if isinstance(layer, lora.AdaptedLinear):
            downs.append(layer.lora_A.weight.detach())
            ups.append(layer.config.scale * layer.lora_B.weight.detach())
        else:
            ups.append(layer.weight.new_zeros(len(layer.weight), 0))
    return LowRank(product, torch.cat(downs), torch.block_diag(*ups)) if downs else product


class LowRank(nn.Module):
    """W x + B A x: a shared matmul, the A (r, in) of all adapters, and a block-diagonal B (out, r)."""

    def __init__(self, product: nn.Module, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.product = product
        self.down, self.up = nn.Buffer(down, persistent=False), nn.Buffer(up, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out) in the dtype of the matmul's output."""
        out = self.product(x)
        return out + functional.linear(functional.linear(x.to(self.down.dtype), self.down), self.up).to(out.dtype)


# -- int8 --------------------------------------------------------------------------------------------------------------


FROM_PARAMETERS = 50_000_000  # smaller models fit in the CPU cache, so they are not memory-bound
NARROW = 32  # up to this many rows, digits are faster than converted weights
LEVELS, DIGITS = 127, 63
TINY = 1e-30  # replaces the maximum of a row of zeros
FBGEMM = "fbgemm"


def pays(model: Transformer) -> bool:
    """Whether a model is served in int8 by default."""
    possible = model.model.embed_tokens.weight.device.type == "cpu" and has_fbgemm()
    return possible and model.num_parameters() >= FROM_PARAMETERS


def has_fbgemm() -> bool:
    """Whether this build of torch has FBGEMM integer matmuls, as on x86."""
    return FBGEMM in torch.backends.quantized.supported_engines


def for_serving(model: Transformer, weights: Literal["int8", "native"] | None = None) -> Fused:
    """The model as an engine runs it: in int8 or with its own weights; if `weights` is None, `pays` decides. Raises the
    errors of `quantize`.
    """
    return (quantize(model) if weights == "int8" or (weights is None and pays(model)) else Fused(model)).trace()


def quantize(model: Transformer) -> Fused:
    """The fused model in int8; `model` is unchanged. Raises ConfigError unless on an x86 CPU, and `Fused`'s errors."""
    if (where := model.model.embed_tokens.weight.device.type) != "cpu":
        raise ConfigError(f"int8 weights are for CPUs, but this model is on {where}; serve its native weights")
    if not has_fbgemm():
        raise ConfigError(
            "int8 weights need FBGEMM, which this build of torch lacks (x86 builds have it); serve the native weights"
        )
    fused = Fused(model)
    for owner in list(fused.modules()):
        for name, layer in owner.named_children():
            if isinstance(layer, nn.Linear):
                setattr(owner, name, Int8Linear(layer))
    return fused


class Int8Linear(nn.Module):
    """A linear layer with int8 weights (out, in) and a scale per output, both plain and packed for FBGEMM."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        levels, scales = rounded(layer.weight.detach())
        self.levels, self.scales = nn.Buffer(levels), nn.Buffer(scales)
        self.packed = _packed(levels, scales.double() / DIGITS)
        # tensors, since a Python number would be converted on every call
        self.largest, self.finer = torch.tensor(float(DIGITS)), torch.tensor(2.0 * DIGITS)
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
        digits = torch.cat((coarse, (coarse - coarse.round()).mul_(self.finer)))  # (2n, in); rounded by the matmul
        both = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(digits, 1.0, DIGITS, self.packed)
        high, low = both.chunk(2)
        return torch.add(high, low, alpha=0.5 / DIGITS).mul_(peak)


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight` (out, in) as levels (out, in), int8 from -127 to 127, and scales (out,), float32, with weight ~ scales *
    levels.
    """
    wide = weight.float()
    scales = wide.abs().amax(1).clamp_min(TINY) / LEVELS
    return (wide / scales[:, None]).round_().to(torch.int8), scales


def _packed(levels: Tensor, scales: Tensor) -> torch.ScriptObject:
    """Levels (out, in) int8 and scales (out,), packed for FBGEMM. The zero point is 0 for levels, DIGITS for digits."""
    engine, torch.backends.quantized.engine = torch.backends.quantized.engine, FBGEMM
    zeros = torch.zeros(len(levels), dtype=torch.long)
    try:
        with warnings.catch_warnings():
            # torch is pinned; if it drops this, onednn.qlinear_pointwise can replace it but takes 1.6 times as long
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions", category=UserWarning)
            return torch.ops.quantized.linear_prepack(
                torch._make_per_channel_quantized_tensor(levels, scales, zeros, 0), None
            )
    finally:
        torch.backends.quantized.engine = engine
