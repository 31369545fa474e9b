"""The processes of one training run: who works on what, and what they tell each other. One process needs none of it.

Accelerate forms the process group and wraps the model; control values travel on a gloo side group, so that they never
wait behind a GPU queue. Not promised: FSDP2 and several nodes.
"""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline import device
from pipeline.errors import GateError


class Ranks:
    """This process among `world`."""

    def __init__(self, precision: str, folder: str) -> None:
        self.rank, self.world = device.rank(), device.world_size()
        self.accelerator: Any = None
        self.side: Any = None
        if self.world > 1:
            self.accelerator = device.accelerator(precision, folder)
            self.side = dist.new_group(backend="gloo")

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model whose backward averages gradients over the ranks."""
        return model if self.accelerator is None else self.accelerator.prepare(model)

    def no_sync(self, model: nn.Module, *, skip: bool) -> contextlib.AbstractContextManager[Any]:
        """Keep gradients local for this micro-batch when `skip`."""
        if self.accelerator is None or not skip:
            return contextlib.nullcontext()
        return self.accelerator.no_sync(model)

    def control(self, stop: int, save: bool, counts: dict[str, int]) -> tuple[int, bool, dict[str, int]]:
        """Agree on (signal to stop for, save now, summed counts) before a step; every rank names the same counts."""
        names = sorted(counts)
        values = torch.tensor([int(save), *(counts[name] for name in names)], dtype=torch.int64)
        signal = torch.tensor([stop], dtype=torch.int64)
        if self.world > 1:
            dist.all_reduce(values, group=self.side)
            dist.all_reduce(signal, op=dist.ReduceOp.MAX, group=self.side)
        return int(signal), bool(values[0]), dict(zip(names, values[1:].tolist(), strict=True))

    def greatest(self, value: float) -> float:
        """The greatest of a number over ranks."""
        if self.world == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.side)
        return float(tensor)

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in their order: rollouts travel so (ids and log-probabilities, no weights)."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self.side)
        return found

    def sum_tensor(self, values: Tensor) -> Tensor:
        """The sum over ranks of a CPU tensor."""
        if self.world > 1:
            dist.all_reduce(values, group=self.side)
        return values

    def sum_float(self, value: float) -> float:
        """The sum over ranks of a number."""
        return value if self.world == 1 else float(self.sum_tensor(torch.tensor(value, dtype=torch.float64)))

    def gradient_norm(self, model: nn.Module, limit: float) -> float:
        """The global gradient norm; gradients are clipped to `limit` when it is above 0."""
        parameters = [p for p in model.parameters() if p.grad is not None]
        return float(nn.utils.clip_grad_norm_(parameters, limit if limit > 0 else float("inf"), foreach=True))

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world > 1:
            dist.barrier(group=self.side)

    def check_equal_weights(self, model: nn.Module) -> None:
        """Raise GateError when the ranks do not start from the same weights."""
        if self.world == 1:
            return
        mine = torch.stack([p.detach().double().sum().cpu() for p in model.parameters()])
        first = mine.clone()
        dist.broadcast(first, src=0, group=self.side)
        if not torch.equal(first, mine):
            raise GateError(
                f"rank {self.rank} starts from other weights than rank 0; check the model files of each node"
            )
