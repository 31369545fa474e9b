"""The model in the form in which it is served: the same function, in fewer and larger operations. No gradients.

    Fused(model)     q, k and v are one matrix product, gate and up are one; rotary angles come from a table

At batch 1 a layer of a small model takes longer to be asked for than to be computed, so the number of operations counts. Sums are
added up in another order, so logits agree to rounding, not to the bit.

Not promised: training, adapters that are not merged, torch.compile. Fused weights are copies, the others are shared: drop the first
model to free its own. Shapes as in `model/attention.py`.
"""

import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.model.attention import Layout
from pipeline.model.config import ModelConfig
from pipeline.model.layers import Block, Body, Embedding, Linear, RMSNorm, rope_tables
from pipeline.model.memory import Reads
from pipeline.model.transformer import Transformer

FEW, MANY = 5, 64  # rows of a step of several users, or of a draft and its token


class Fused(Transformer):
    """A `Transformer` in evaluation mode with fused layers; `head` is a linear layer also where the embedding is tied."""

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
        """Make steps of fewer than FEW rows faster, in int8 1.4 times (docs/LOG.md). From now on the model can only be run.

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
        """Run fewer than FEW rows without Python between two operations from now on; examples as of `forward`, of one row."""
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
    """A linear layer that multiplies from FEW rows on from the left: on a CPU's float32 that takes 0.6 of the time (docs/LOG.md)."""

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
