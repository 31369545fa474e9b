"""Sums of what a run has seen since it last wrote a row: loss terms, metrics, extremes.

`Totals` are those of one step (or one evaluation), from `Loss` objects and the counts that the step's sums are divided by.
`Window` adds steps up. Both are plain numbers, so a window travels in a state and a resumed curve has no seam.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from pipeline.learning.objectives import Loss, Term
from pipeline.learning.ranks import Ranks

MOST_NATS = 700.0  # whose exponential is still a number


@dataclass
class Totals:
    """Sums over micro-batches, and after `reduce` over ranks."""

    counts: dict[str, int]  # of the whole step, over all ranks
    terms: dict[str, list[Any]] = field(default_factory=dict)  # name -> [sum, per, coefficient]
    metrics: dict[str, list[float]] = field(default_factory=dict)  # name -> [sum, count]
    extremes: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)  # metric -> the most its mean may be
    pending: list[Loss] = field(default_factory=list)  # added, not yet read

    def add(self, loss: Loss) -> None:
        """Take in a micro-batch. Its numbers stay on their device until `settle`."""
        terms = [Term(t.name, t.sum.detach(), t.per, t.coefficient) for t in loss.terms]
        self.pending.append(Loss(terms, loss.metrics, loss.extremes, loss.limits))

    def settle(self) -> "Totals":
        """Read everything that was added, in one copy from the device, and count it in."""
        losses, self.pending = self.pending, []
        tensors = [t.sum for loss in losses for t in loss.terms]
        tensors += [total for loss in losses for total, _ in loss.metrics.values()]
        tensors += [value for loss in losses for value in loss.extremes.values()]
        numbers = iter(_read(tensors))
        for loss in losses:
            for term in loss.terms:
                self.terms.setdefault(term.name, [0.0, term.per, term.coefficient])[0] += next(numbers)
        for loss in losses:
            for name, (_, count) in loss.metrics.items():
                entry = self.metrics.setdefault(name, [0.0, 0])
                entry[0] += next(numbers)
                entry[1] += count
        for loss in losses:
            for name in loss.extremes:
                self.extremes[name] = _extreme(name, self.extremes.get(name), next(numbers))
            self.limits |= loss.limits
        return self

    def reduce(self, ranks: Ranks) -> None:
        """Sum over all ranks; every rank must have seen the same names."""
        self.settle()
        if ranks.world == 1:
            return
        places = [(entry, 0) for entry in self.terms.values()]
        places += [(self.metrics[name], place) for name in sorted(self.metrics) for place in (0, 1)]
        values = torch.tensor([float(entry[place]) for entry, place in places], dtype=torch.float64)
        for (entry, place), value in zip(places, ranks.sum_tensor(values).tolist(), strict=True):
            entry[place] = value
        for name in sorted(self.extremes):
            sign = -1.0 if "min" in name else 1.0
            self.extremes[name] = sign * ranks.greatest(sign * self.extremes[name])

    @property
    def veto(self) -> str:
        """Why no update may be made from this step; empty where it may. Read it after `reduce`: a limit binds the whole step."""
        self.settle()
        for name, limit in self.limits.items():
            total, count = self.metrics[name]
            if count and not total / count <= limit:  # also where it is not a number
                return f"the mean of {name} is {total / count:.1f}, above {limit:g}"
        return ""

    @property
    def value(self) -> float:
        """The loss: sum of coefficient * sum / count over the terms."""
        self.settle()
        return sum(c * s / self.counts[per] for s, per, c in self.terms.values() if self.counts[per])

    def values(self) -> dict[str, float]:
        """The loss, its terms where there are several, metrics, extremes."""
        found = {"loss": self.value}
        if len(self.terms) > 1:
            found |= {name: s / self.counts[per] for name, (s, per, _) in self.terms.items() if self.counts[per]}
        found |= {name: s / count for name, (s, count) in self.metrics.items() if count}
        if self.counts.get("bytes"):
            nats = sum(s for s, per, _ in self.terms.values() if per == "tokens")
            found["bpb"] = nats / (math.log(2) * self.counts["bytes"])
            found["perplexity"] = math.exp(min(MOST_NATS, nats / self.counts["tokens"]))
        return found | self.extremes

    def merge(self, other: "Totals") -> None:
        """Add another step's totals."""
        other.settle()
        for name, count in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        for name, (total, per, coefficient) in other.terms.items():
            entry = self.terms.setdefault(name, [0.0, per, coefficient])
            entry[0] += total
            entry[2] = coefficient
        for name, (total, count) in other.metrics.items():
            entry = self.metrics.setdefault(name, [0.0, 0])
            entry[0] += total
            entry[1] += count
        for name, value in other.extremes.items():
            self.extremes[name] = _extreme(name, self.extremes.get(name), value)


def _read(tensors: list[Any]) -> list[float]:
    """Scalars, tensors or numbers, as floats: one wait for the device, whatever their number."""
    if not any(isinstance(t, torch.Tensor) and t.device.type != "cpu" for t in tensors):
        return [float(t) for t in tensors]
    where = next(t.device for t in tensors if isinstance(t, torch.Tensor) and t.device.type != "cpu")
    wide = torch.float64 if where.type == "cuda" else torch.float32
    return torch.stack([torch.as_tensor(t, device=where).detach().to(wide) for t in tensors]).tolist()


def _extreme(name: str, known: float | None, new: float) -> float:
    """The least where the name says min, else the greatest."""
    if known is None:
        return new
    return min(known, new) if "min" in name else max(known, new)


@dataclass
class Window:
    """Steps since the last row."""

    totals: Totals = field(default_factory=lambda: Totals({}))
    norm: float = 0.0  # sum of gradient norms
    steps: int = 0

    def add(self, totals: Totals, norm: float) -> None:
        """Count a step in."""
        self.totals.merge(totals)
        self.norm += norm
        self.steps += 1

    def state(self) -> dict[str, Any]:
        """As JSON."""
        totals = {name: value for name, value in vars(self.totals).items() if name != "pending"}
        return {"totals": totals, "norm": self.norm, "steps": self.steps}

    @classmethod
    def of(cls, state: dict[str, Any]) -> "Window":
        """From what `state` gave."""
        return cls(Totals(**state["totals"]), state["norm"], state["steps"])
