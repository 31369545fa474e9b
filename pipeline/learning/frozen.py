"""How the weights of models that only compute are stored: the reference of preference and reinforcement learning, the reward model.

Under bf16 autocast a linear layer's weight is rounded to bf16 in every pass anyhow. Where that is so on a GPU, these layers are
stored rounded, 2 bytes for 4, and every output keeps its bits. What autocast does not round stays float32: embeddings (they are
looked up, also where the head is tied to them), norms, the reward's row. A narrowed model runs under that autocast only.

Not narrowed: the base below an adapter. The health gates and the evaluation of pairs run it without autocast, and what is published
is the base plus its update: rounding it would be in every model that leaves the stage.
"""

from typing import TypeVar

import torch
from torch import nn

from pipeline.device import Hardware

Model = TypeVar("Model", bound=nn.Module)
KEPT = "score"  # of the reward model: computed in float32 also under autocast


def narrows(kind: str, precision: str) -> bool:
    """Whether frozen linear layers are stored in bf16: on a GPU whose passes are. On a CPU memory is seldom what is short."""
    return kind == "cuda" and precision == "bf16"


def narrowed(model: Model, hardware: Hardware) -> Model:
    """The model itself, frozen, its linear layers in bf16 where `narrows` says so."""
    model.requires_grad_(False)
    return narrow(model) if narrows(hardware.device.type, hardware.precision) else model


def narrow(model: Model) -> Model:
    """The model itself, with the weights (and biases) of its linear layers in bf16."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.rpartition(".")[2] != KEPT:
            layer.to(torch.bfloat16)
    return model
