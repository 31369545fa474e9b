"""An exponential moving average of the weights: what is evaluated and published when `ema_decay` is on.

    average <- d average + (1 - d) weights,   d = min(ema_decay, (1 + s) / (10 + s)) after s applied steps

in float32, over the trained parameters (Polyak & Juditsky 1992; the warm-up of the decay as in TensorFlow's ExponentialMovingAverage).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Averages:
    """The averages of a model's trained weights. A frozen one is its own average."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.values = {name: p.detach().float().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after one applied step."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        for name, parameter in self.parameters.items():
            self.values[name].lerp_(parameter.float(), 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model with averaged weights, for as long as the block runs."""
        own = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self.load()
        try:
            yield
        finally:
            _copy(self.parameters, own)

    def load(self) -> None:
        """Put the averages into the model, for good."""
        _copy(self.parameters, self.values)

    def restore(self, values: dict[str, Tensor], updates: int) -> None:
        """Continue from saved averages. Raises ValueError for other names than those of the trained weights."""
        if values.keys() != self.values.keys():
            odd = sorted(values.keys() ^ self.values.keys())[0]
            raise ValueError(f"the saved averages and the trained weights differ in {odd!r}")
        self.updates = updates
        _copy(self.values, values)


@torch.no_grad()
def _copy(into: dict[str, nn.Parameter] | dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, tensor in into.items():
        tensor.copy_(values[name])
