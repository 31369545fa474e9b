"""Losses of a memory's router: they balance the use of its chapters, and keep its logits small.

    f_i = share of choices that fell on chapter i (sums to 1, no gradient)      P_i = mean over units of p_i
    load_balance  C sum_i f_i P_i                1 where either is uniform (Switch: Fedus et al. 2021, eq. 4, for top-k)
    auxiliary     sum_i (f_i - 1/C)^2            its gradient is that of P: 2/C times load balance's
    z             mean of (ln sum_j e^z_j)^2     ST-MoE (Zoph et al. 2022, arXiv:2202.08906, eq. 5)

f is counted over all ranks and the micro-batches of a step so far (`Choices`); P stays local, since the loop divides
each term by the units of the whole step. Shared chapters do not count: there is no choice to balance.

Shapes: U units, C routed chapters, k chosen.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.learning.losses import Term
from pipeline.memory.model import Routed
from pipeline.run import device


@dataclass(frozen=True, kw_only=True)
class RouterWeights:
    """Weights of the router's losses relative to the loss of the text. Raises ValueError below 0."""

    load_balance: float = 0.01
    """Weight of the loss that balances the choices of a memory's chapters."""
    auxiliary: float = 0.0
    """Weight of another balancing loss, whose gradient differs only in size."""
    z: float = 0.001
    """Weight of the loss that keeps the router's logits small."""

    def __post_init__(self) -> None:
        for name in ("load_balance", "auxiliary", "z"):
            if getattr(self, name) < 0:
                raise ValueError(f"router.{name}: expected at least 0, got {getattr(self, name)}")


class Choices:
    """How often each chapter was chosen in this step so far, on all ranks."""

    def __init__(self) -> None:
        self.counts: dict[int, Tensor] = {}  # layer -> (C,) float32
        self.mine = True

    def begin(self, micro: int, mine: bool) -> None:
        """Call before each micro-batch; the first of a step resets the counts. Only those that are `mine` count."""
        self.mine = mine
        if micro == 0:
            self.counts = {}

    def add(self, routed: Mapping[int, Routed]) -> dict[int, Tensor]:
        """f (C,) of each layer with these choices included. All ranks call it together."""
        if not routed:
            return {}
        new_counts = torch.stack([chosen_counts(choices) for choices in routed.values()])  # (layers, C)
        new_counts = new_counts if self.mine else new_counts * 0
        if device.world_size() > 1:
            dist.all_reduce(new_counts)
        for layer, counts in zip(routed, new_counts, strict=True):
            self.counts[layer] = self.counts[layer] + counts if layer in self.counts else counts
        return {layer: counts / counts.sum().clamp_min(1) for layer, counts in self.counts.items()}


def chosen_counts(routed: Routed) -> Tensor:
    """How often each chapter was chosen, (C,) float32."""
    num = routed.logits.shape[1]
    return torch.bincount(routed.chosen.flatten(), minlength=num).float()


def load_balance(routed: Routed, shares: Tensor) -> Tensor:
    """C sum f_i p_i, summed over the units; `shares` f (C,)."""
    return len(shares) * (routed.probabilities @ shares).sum()


def auxiliary(routed: Routed, shares: Tensor) -> Tensor:
    """sum (f_i - 1/C)^2, summed over the units; the gradient goes through f~ = P + stop(f - P)."""
    off = shares - 1 / len(shares)
    p = routed.probabilities
    return len(p) * off.square().sum() + 2 * ((p - p.detach()) @ off).sum()


def z_loss(routed: Routed) -> Tensor:
    """(ln sum_j e^z_j)^2, summed over the units."""
    return routed.logits.logsumexp(-1).square().sum()


def router_terms(routed: Mapping[int, Routed], shares: Mapping[int, Tensor], weights: RouterWeights) -> list[Term]:
    """Each loss with a weight above 0, as a mean over the layers; none without layers. `shares` are f by layer."""
    losses: tuple[tuple[str, float, Callable[[int], Tensor]], ...] = (
        ("load_balance", weights.load_balance, lambda layer: load_balance(routed[layer], shares[layer])),
        ("auxiliary", weights.auxiliary, lambda layer: auxiliary(routed[layer], shares[layer])),
        ("z", weights.z, lambda layer: z_loss(routed[layer])),
    )
    return [
        Term(name, torch.stack([loss(layer) for layer in routed]).mean(), "units", coefficient)
        for name, coefficient, loss in losses
        if coefficient and routed
    ]
