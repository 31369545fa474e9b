"""Stand-ins for what a trainer of trl 1.12.0 holds: accelerate, the model, the trainer itself."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def same(value: Any, **_: Any) -> Any:
    return value


ALONE = SimpleNamespace(  # accelerate in a single process
    device=torch.device("cpu"),
    num_processes=1,
    process_index=0,
    is_main_process=True,
    gather=same,
    gather_for_metrics=same,
    reduce=same,
)


class Model(torch.nn.Module):
    """A model in training mode, without checkpointing, that answers every call with the same logits."""

    is_gradient_checkpointing = False

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits)


def two_tokens(logps: Tensor) -> Tensor:
    """Logits (B, T+1, 2) under which token 0 has the log-probabilities (B, T); the trainers drop the last position."""
    logits = torch.stack([logps, torch.log(-torch.expm1(logps))], dim=-1)
    return torch.cat([logits, torch.zeros_like(logits[:, :1])], dim=1)


def metrics_of(stub: SimpleNamespace, *names: str) -> dict[str, float]:
    return {name: stub._metrics["train"][name][0] for name in names}


def stand_in(**attributes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        accelerator=ALONE,
        aux_loss_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        **attributes,
    )
