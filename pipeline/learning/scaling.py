"""Loss scaling for fp16 (Micikevicius et al. 2018, arXiv:1710.03740): small gradients would be zero in half precision.

torch's GradScaler keeps the scale: twice as large after 2,000 steps without overflow, half as large after one. An overflow costs an
update and is not counted among the skipped ones as long as the scale can still fall.
"""

from typing import Any

import torch
from torch import Tensor

LEAST_SCALE = 1.0


class Scaler:
    """Scales losses in fp16, does nothing in any other precision."""

    def __init__(self, precision: str, device: torch.device) -> None:
        self.torch = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    @property
    def scale_now(self) -> float:
        """What the loss is multiplied with."""
        return self.torch.get_scale()

    def scale(self, objective: Tensor) -> Tensor:
        """The objective to run backward from."""
        return self.torch.scale(objective)

    def unscale(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Divide the gradients by the scale, before their norm is taken."""
        for optimizer in optimizers if self.torch.is_enabled() else ():
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                self.torch.unscale_(optimizer)

    def update(self) -> bool:
        """Adapt the scale after a step; whether it fell, that is, whether an overflow was met that it may still cure."""
        if not self.torch.is_enabled():
            return False
        before = self.scale_now
        self.torch.update()
        return self.scale_now < before and before > LEAST_SCALE

    def state(self) -> dict[str, Any]:
        """As JSON; empty when disabled."""
        return self.torch.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        """From what `state` gave; a state of another precision is left out."""
        if state and self.torch.is_enabled():
            self.torch.load_state_dict(state)
