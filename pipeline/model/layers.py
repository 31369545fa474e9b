"""The parts of the model's layers: embedding, norm, grouped-query attention with RoPE, SwiGLU, and their block.

Qwen3's (arXiv:2505.09388), and Qwen2's and LLaMA's; `transformer.py` runs them. Parameters have Hugging Face's names.
All tokens of a batch lie on one line (N, D); a layout (`attention.py`) defines which of them attend to each other.
Training in bf16 on a CPU uses the hand-written passes of `cpu/layers.py` (`in_bf16`).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.model.attention import Documents, Layout, documents_of
from pipeline.model.config import ModelConfig
from pipeline.model.cpu import attention, layers
from pipeline.model.cpu.layers import rms_norm, rotate


def cpu_autocast(x: Tensor) -> bool:
    """Whether matrix products of `x` run in half precision on a CPU."""
    return x.device.type == "cpu" and torch.is_autocast_enabled("cpu")


def rope_tables(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin (N, 1, h/2) in float32 for `positions` (N,): angle i is position / theta^(2i/h)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device=positions.device).float()
    inverse = 1.0 / (config.rope_theta ** (exponents / config.head_dim))
    angles = positions.float()[:, None, None] * inverse
    return angles.cos(), angles.sin()


class Embedding(nn.Embedding):
    """`nn.Embedding` whose rows are a tied head's matrix, `table`."""

    @property
    def table(self) -> Tensor:
        return self.weight


class Linear(nn.Linear):
    """`nn.Linear` that starts at zero: `Transformer.initialise` draws its weights, or they are loaded."""

    def __init__(self, num_in: int, num_out: int, bias: bool = False) -> None:
        super().__init__(num_in, num_out, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention; RoPE on queries and keys, after their head norms."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, heads, kv_heads = config.head_dim, config.heads, config.kv_heads
        self.head_dim = size
        self.q_proj = Linear(config.width, heads * size, config.bias)
        self.k_proj = Linear(config.width, kv_heads * size, config.bias)
        self.v_proj = Linear(config.width, kv_heads * size, config.bias)
        self.o_proj = Linear(heads * size, config.width)
        if config.head_norms:
            self.q_norm = RMSNorm(size, config.norm_eps)
            self.k_norm = RMSNorm(size, config.norm_eps)
        self.head_norms = config.head_norms

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, index: int) -> Tensor:
        """(N, D) -> (N, D)."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # (N, H, h)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # (N, K, h)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if cpu_autocast(x):
            with torch.autocast("cpu", enabled=False):  # float32: attention in bf16 takes twice as long there
                attended = self._attend(q.float(), k.float(), v.float(), cos, sin, layout, index)
        else:
            attended = self._attend(q, k, v, cos, sin, layout, index)
        return self.o_proj(attended.flatten(-2))

    @property
    def plain(self) -> bool:
        """Whether the projections have no adapters and no biases."""
        return all(type(x) is Linear and x.bias is None for x in (self.q_proj, self.k_proj, self.v_proj, self.o_proj))

    def in_bf16(self, x: Tensor, norm: "RMSNorm", cos: Tensor, sin: Tensor, documents: Documents) -> Tensor:
        """`forward` of norm(x), for training in bf16 on a CPU: (N, D) -> (N, D) in float32."""
        matrices = (self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
        joined = layers.normed_product(x, norm.weight, norm.eps, *matrices).unflatten(-1, (-1, self.head_dim))
        heads = len(self.q_proj.weight) // self.head_dim
        norms = (self.q_norm.weight, self.k_norm.weight) if self.head_norms else None
        plan = attention.plan(documents.lengths, documents.causal, heads)
        return layers.product(layers.attention(joined, cos, sin, norms, norm.eps, heads, plan), self.o_proj.weight)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, layout: Layout, index: int) -> Tensor:
        if self.head_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        return layout.attend(q, k, v, index)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.width, config.d_ff)
        self.up_proj = Linear(config.width, config.d_ff)
        self.down_proj = Linear(config.d_ff, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))

    @property
    def plain(self) -> bool:
        """Whether the projections have no adapters."""
        return all(type(x) is Linear for x in (self.gate_proj, self.up_proj, self.down_proj))

    def in_bf16(self, x: Tensor, norm: "RMSNorm") -> Tensor:
        """`forward` of norm(x), for training in bf16 on a CPU: (N, D) -> (N, D) in float32."""
        joined = layers.normed_product(x, norm.weight, norm.eps, self.gate_proj.weight, self.up_proj.weight)
        return layers.product(layers.gated(joined), self.down_proj.weight)


class Block(nn.Module):
    """One layer: attention, then SwiGLU, each after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, index: int, dropout: float) -> Tensor:
        """(N, D) -> (N, D)."""
        hand_written = layers.trains_in_bf16(x)
        documents = documents_of(layout, len(x)) if hand_written and self.self_attn.plain else None
        if documents is None:
            attended = self.self_attn(self.input_layernorm(x), cos, sin, layout, index)
        else:
            attended = self.self_attn.in_bf16(x, self.input_layernorm, cos, sin, documents)
        x = x + (functional.dropout(attended, dropout) if dropout else attended)
        if hand_written and self.mlp.plain:
            widened = self.mlp.in_bf16(x, self.post_attention_layernorm)
        else:
            widened = self.mlp(self.post_attention_layernorm(x))
        return x + (functional.dropout(widened, dropout) if dropout else widened)


class Body(nn.Module):
    """All but the head; named as Hugging Face names it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # Passed in, so that nn.Embedding draws nothing from the global generator.
        table = torch.zeros(config.vocab_size, config.width)
        self.embed_tokens = Embedding(config.vocab_size, config.width, _weight=table, _freeze=False)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
