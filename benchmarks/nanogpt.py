"""The baseline of `time_to_loss.py`: a plain version of karpathy/nanoGPT's recipe (`model.py`, `train.py`).

GPT-2's architecture (Radford et al. 2019) as in nanoGPT: learned absolute positions, pre-norm LayerNorm, GELU and a
feed-forward layer four times as wide, a tied head, no biases, no dropout; weights normal with std 0.02, projections
into the residual stream with 0.02 / sqrt(2 layers). Rows are random windows of the concatenated token stream, without
masking between documents. AdamW (weight decay except for gains), linear warmup, cosine decay to a tenth of the rate,
gradients clipped to norm 1. On a CPU nanoGPT runs in float32 without compilation (`--device=cpu --compile=False`); bf16
and compilation are settings here.

Two things favor this baseline over nanoGPT: AdamW is torch's fused version even on a CPU, and half precision uses
float32 logits. `GPT` also runs in our loop (`time_to_loss_arm.py`, the architecture ablation): its two tables are named
so that our optimizer treats them as embeddings, and it accepts a document mask. Not supported: loading or saving
nanoGPT checkpoints.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a GPT."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    context: int  # number of rows in the position table


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The recipe of a run, with nanoGPT's `train.py` names in comments."""

    steps: int  # max_iters, lr_decay_iters
    rows: int  # batch_size
    context: int  # block_size
    rate: float  # learning_rate; decays to a tenth of this
    warmup: int  # warmup_iters
    betas: tuple[float, float] = (0.9, 0.95)
    decay: float = 0.1  # weight_decay
    clip: float = 1.0  # grad_clip
    bf16: bool = False  # dtype
    compiled: bool = False  # compile
    seed: int = 0

    def rate_at(self, step: int) -> float:
        """The learning rate at a step: `get_lr` in train.py."""
        if step < self.warmup:
            return self.rate * (step + 1) / (self.warmup + 1)
        share = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))


class GPT(nn.Module):
    """Token ids (B, T) to logits (B, T, V), or to `head` applied to the states at `select` and the tied table."""

    def __init__(self, shape: Shape, generator: torch.Generator) -> None:
        super().__init__()
        self.shape = shape
        tables = {
            "words": nn.Embedding(shape.vocab_size, shape.width),
            "places": nn.Embedding(shape.context, shape.width),
        }
        self.embed_tokens = nn.ModuleDict(tables)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim == 2:
                    std = 0.02 / ((2 * shape.layers) ** 0.5 if "into_stream" in name else 1.0)
                    parameter.normal_(0.0, std, generator=generator)

    def forward(
        self,
        input_ids: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        select: Tensor | None = None,
        head: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """With `documents` (B, T), tokens attend only to their own document; without it, to all earlier tokens."""
        words, places = self.embed_tokens["words"], self.embed_tokens["places"]
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        mask = None
        if documents is not None:
            mask = (documents[:, None, :, None] == documents[:, None, None, :]).tril()  # (B, 1, T, T)
        x = words(input_ids) + places(positions)
        for layer in self.layers:
            x = layer(x, mask)
        x = self.norm(x)
        if select is not None:
            x = x[select]
        table = words.weight
        assert isinstance(table, Tensor)
        return functional.linear(x, table) if head is None else head(x, table, None)

    def num_parameters(self) -> int:
        """The number of weights; the tied table counts once, and the position table is included."""
        return sum(parameter.numel() for parameter in self.parameters())


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_into_stream = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.into_stream = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.attention_into_stream(seen.transpose(1, 2).flatten(2))
        return x + self.into_stream(functional.gelu(self.up(self.norm_2(x))))


def windows(tokens: np.ndarray, *, rows: int, context: int, seed: int, step: int) -> Tensor:
    """`get_batch` in train.py: `context` tokens plus the next one, from random positions, (rows, context + 1)."""
    starts = np.random.default_rng([seed, step]).integers(0, len(tokens) - context, rows)
    return torch.from_numpy(np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int64))


def adamw(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The optimizer: `configure_optimizers` in model.py."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    gains = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.decay}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=recipe.betas, fused=True)


def train(
    model: GPT, tokens: np.ndarray, recipe: Recipe, tick: Callable[[int], None], evaluate: Callable[[int], None]
) -> None:
    """The loop of train.py. Calls `evaluate` and `tick` before each step, and `evaluate` after the last step."""
    run = torch.compile(model) if recipe.compiled else model
    optimizer = adamw(model, recipe)
    for step in range(recipe.steps):
        evaluate(step)
        tick(step)
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate_at(step)
        batch = windows(tokens, rows=recipe.rows, context=recipe.context, seed=recipe.seed, step=step)
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.bf16):
            logits = run(batch[:, :-1].contiguous())
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    evaluate(recipe.steps)
