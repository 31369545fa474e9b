"""Small models with random weights, in published shapes."""

from dataclasses import replace

import torch

from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Transformer

BASE = ModelConfig(
    vocab_size=96,
    width=24,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    d_ff=40,
    max_context=300,
    rope_theta=1e4,
    tied=True,
)
SHAPES = {
    "qwen3": BASE,
    "untied": replace(BASE, tied=False),
    "qwen2, with biases": replace(BASE, bias=True),
    "llama, one key head": replace(BASE, qk_norm=False, kv_heads=1),
    "a head for each": replace(BASE, kv_heads=4, layers=1),
}


def made(config: ModelConfig) -> Transformer:
    """A model with random weights, biases and norms."""
    generator = torch.Generator().manual_seed(0)
    model = Transformer(config, generator)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter * 4 if parameter.ndim > 1 else parameter + 0.3 * drawn)
    return model.train(False)
