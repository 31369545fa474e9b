"""Small models with a memory, and rows for them."""

import json
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pipeline.memory.config import MemoryConfig
from pipeline.memory.model import Memory
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Transformer

NANO = ModelConfig(
    vocab_size=4096,
    width=192,
    layers=6,
    heads=3,
    kv_heads=1,
    head_dim=64,
    d_ff=512,
    max_context=1024,
    rope_theta=1e4,
    tied=True,
)
TINY = replace(NANO, vocab_size=64, width=32, layers=3, heads=4, kv_heads=2, head_dim=8, d_ff=64, max_context=256)
STORAGES: list[dict[str, Any]] = [
    {"storage": "full"},
    {"storage": "factorized", "bank_rank": 16},
    {"storage": "reduced", "bank_rank": 16},
]
FORMS: list[dict[str, Any]] = [
    *STORAGES,
    {"storage": "full", "gated": True, "qk_norm": True, "bank_std": 1.0, "centered": True},
]


def memory(**changes: Any) -> MemoryConfig:
    return MemoryConfig(**{"rows": 48, "chapters": 5, "shared": 1, "top_k": 2, "window": 8} | changes)


def opened(config: MemoryConfig, *, shape: ModelConfig = TINY, seed: int = 0, double: bool = False) -> Transformer:
    """A fresh model whose memory has an effect: its output projections are not zero."""
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(replace(shape, memory=config), generator)
    for name, parameter in model.named_parameters():
        if name.startswith("memory.") and ("o_proj" in name or "router" in name):
            parameter.data.normal_(0, 0.3, generator=generator)
    assert isinstance(model.hook, Memory)
    for center in model.hook.centers():
        center.normal_(0, 0.3, generator=generator)
    return (model.double() if double else model).train(False)


def tokens(rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(0, TINY.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def asked(rows: int, length: int, prompt: int) -> Tensor:
    """The positions with a loss in rows that begin with a prompt."""
    return (torch.arange(length) >= prompt).expand(rows, length)


SETTINGS: dict[str, Any] = {
    "steps": 4,
    "tokens_per_step": 512,
    "context": 128,
    "rows": 24,
    "shared": 1,
    "chapters": 5,
    "top_k": 2,
    "layers": "last_1",
    "routing": "prompt",
    "window": 16,
    "centered": True,
    "optimizer": "adamw",
    "learning_rate": 1e-2,
    "warmup_steps": 0,
    "eval_steps": 2,
    "eval_tokens": 400,
    "questions": 6,
}


def arguments(**changes: Any) -> list[str]:
    """The command line of stage memory with SETTINGS and `changes`."""
    values = SETTINGS | {"runtime.precision": "fp32"} | changes
    return [
        f"{key if key.startswith('runtime') else f'memory.{key}'}={json.dumps(value)}" for key, value in values.items()
    ]
