"""Sums of what a run has seen since it last wrote a row: loss terms, metrics, extremes.

`Totals` are those of one step (or one evaluation), from `Loss` objects and the counts that the step's sums are divided
by. `Window` adds steps up. Both are plain numbers, so a window travels in a state and a resumed curve has no seam.

Whether a step's update may be made, and what ends a run.

    finite?  spike?  risen?   ->   apply, skip, stop, or roll back    (one verdict on all ranks: the numbers are global)

A spike is a loss above mean + 6 max(std, 1 % of |mean|) of the last 128 applied steps, and at least 0.1 nats above it
(PaLM restarts before a spike and skips the batches around it: Chowdhery et al. 2022, arXiv:2204.02311, 5.1). A skipped
step changes no weight and no moment. A spike is rare: the third in a row, or the tenth in a thousand steps, is the
run's new level, and its update is made. So a spike never ends a run. A gradient norm is no reason by itself: clipping
bounds it, and a model that knows its data by heart has norms near 0 with rare jumps.

Two things end a run: three steps in a row, or ten in a thousand, that are not finite; and a loss that has risen and
stays: 100 steps in a row more than 1 nat above the lowest median that 128 steps ever had. A policy's loss is not
measured in nats, so with `on_spike: ignore` only what is not finite counts.

A rollback goes back to the newest evaluated state at least 16 steps old, but never behind the rollback before, and
never reads the batches from there to here again. Where there is none yet, or after three rollbacks, a spike is skipped;
numbers that are not finite then stop the run.

Loss scaling for fp16 (Micikevicius et al. 2018, arXiv:1710.03740): small gradients would be zero in half precision.

torch's GradScaler keeps the scale: twice as large after 2,000 steps without overflow, half as large after one. An
overflow costs an update and is not counted among the skipped ones as long as the scale can still fall.

An exponential moving average of the weights: what is evaluated and published when `ema_decay` is on.

    average <- d average + (1 - d) weights,   d = min(ema_decay, (1 + s) / (10 + s)) after s applied steps

in float32, over the trained parameters (Polyak & Juditsky 1992; the warm-up of the decay as in TensorFlow's
ExponentialMovingAverage).

Where a training run is: everything besides weights and moments that a resumed run needs. Plain numbers, saved as JSON.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.learning import processes
from pipeline.learning.losses import Loss, Term
from pipeline.learning.processes import Ranks
from pipeline.run import device as run_device

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
        """Why no update may be made from this step; empty where it may. Read it after `reduce`: a limit binds the
        whole step.
        """
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


# -- course ------------------------------------------------------------------------------------------------------------


@dataclass
class Course:
    """The state of a run between two steps."""

    step: int = 0  # batches done
    tokens: int = 0  # trained targets so far
    skipped: int = 0  # updates that were not made
    spikes_at: list[int] = field(default_factory=list)  # the steps of the last thousand left out for a spike
    broken_at: list[int] = field(default_factory=list)  # the same for what is not finite or was vetoed
    applied: list[float] = field(default_factory=list)  # losses of the last applied steps
    lowest: float = math.inf  # the lowest median of such losses so far
    risen: int = 0  # steps in a row whose loss was far above it
    windows: list[list[int]] = field(
        default_factory=list
    )  # [step, count]: from this step on so many data indices are skipped
    best: float = math.inf
    best_step: int = -1
    bests: list[int] = field(default_factory=list)  # the steps that were the best one when they were evaluated
    anchor: float = math.inf  # early stopping: moves only on a gain above `threshold`
    stale: int = 0  # evaluations since the anchor moved
    evaluated: list[int] = field(default_factory=list)  # steps of the evaluations, oldest first
    owes_evaluation: bool = False  # a signal cut the evaluation after this step
    done: bool = False

    @property
    def index(self) -> int:
        """The number of the batch that this step reads: the step, moved behind windows that a rollback gave up."""
        return self.step + sum(count for first, count in self.windows if self.step >= first)

    def compare(self, value: float, *, threshold: float, patience: int) -> None:
        """Take in a validation loss: is it the best, did it move the anchor of early stopping, is the run over?"""
        if value < self.best:
            self.best, self.best_step = value, self.step
            self.bests = [*self.bests, self.step]
        if value < self.anchor - threshold:
            self.anchor, self.stale = value, 0
        else:
            self.stale += 1
        self.done = patience > 0 and self.stale >= patience

    def results(self, rows: list[dict[str, Any]], published: int) -> dict[str, Any]:
        """The final numbers of a run, from its curve and the step whose weights are published."""
        found: dict[str, Any] = {"steps": self.step, "tokens": self.tokens, "published_step": published}
        trained = [row for row in rows if "loss" in row]
        if trained:
            found["final"] = {name: trained[-1][name] for name in ("loss", "bpb") if name in trained[-1]}
        if math.isfinite(self.best):
            chosen = [row for row in rows if row["step"] == self.best_step and "val/bpb" in row]
            found["best"] = {"val_loss": self.best, "step": self.best_step}
            found["best"] |= {"val_bpb": chosen[-1]["val/bpb"]} if chosen else {}
        return found


# -- verdict -----------------------------------------------------------------------------------------------------------


HISTORY = 128  # applied steps that a spike is measured against
DEVIATIONS = 6.0
LEAST_SPREAD = 0.01  # of the mean
LEAST_RISE = 0.1  # of a spike's loss, in nats
FEWEST = 16  # applied steps that have a median
RISEN, STAYED = 1.0, 100  # nats above the lowest median, steps in a row
IN_ROW, WITHIN, IN_ALL = 3, 1000, 10
BACK = 16  # steps that the state of a rollback is old at least
ROLLBACKS = 3
NOTHING = "the loss alone"
NOT_FINITE = "not finite"
ON_NONFINITE = ("skip", "stop", "rollback")
ON_SPIKE = ("skip", "stop", "rollback", "ignore")


def fault(course: Course, loss: float, norm: float, on_spike: str) -> str:
    """What is wrong with a step; empty when its update may be made."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return NOT_FINITE
    if on_spike == "ignore" or len(course.applied) < HISTORY:
        return ""
    mean = statistics.fmean(course.applied)
    spread = max(statistics.pstdev(course.applied, mean), LEAST_SPREAD * abs(mean))
    limit = mean + max(DEVIATIONS * spread, LEAST_RISE)
    return (
        f"a spike: loss above {limit:.4g}, the mean of the last {HISTORY} steps being {mean:.4g}"
        if loss > limit
        else ""
    )


def risen(course: Course, loss: float, on_spike: str) -> str:
    """Count a step, applied or not; why the run must end, empty when it goes on."""
    if on_spike == "ignore" or not math.isfinite(loss):
        return ""
    if len(course.applied) >= FEWEST:
        course.lowest = min(course.lowest, statistics.median(course.applied))
    course.risen = course.risen + 1 if loss > course.lowest + RISEN else 0
    if course.risen < STAYED:
        return ""
    return (
        f"the loss rose and stayed: {STAYED} steps in a row more than {RISEN:g} nat above {course.lowest:.4g}, the"
        " lowest median so far"
    )


def applied(course: Course, loss: float, *, new_level: bool = False) -> None:
    """Count a step whose update was made; after a spike too many, what a spike is measured against begins anew."""
    course.applied = [loss] if new_level else [*course.applied[1 - HISTORY :], loss]


def in_row(steps: list[int], step: int) -> int:
    """How many steps in a row up to `step` were left out, when it is left out too and `steps` were before."""
    count = 1
    while len(steps) >= count and steps[-count] == step - count:
        count += 1
    return count


def too_many(steps: list[int], step: int) -> bool:
    """Whether `step` is one too many to be left out like `steps` before it: the third in a row, or the tenth in a
    thousand.
    """
    recent = [earlier for earlier in steps if earlier > step - WITHIN]
    return in_row(steps, step) >= IN_ROW or len(recent) + 1 >= IN_ALL


def skipped(course: Course, steps: list[int]) -> None:
    """Count a step whose update was not made, in `steps` of its kind."""
    course.skipped += 1
    steps[:] = [step for step in steps if step > course.step - WITHIN] + [course.step]


def rollback_target(course: Course) -> int | None:
    """The step whose state a rollback from here would load; None where none is old enough."""
    last = course.windows[-1][0] if course.windows else None  # never behind the last one, whose window would come back
    old = [e for e in course.evaluated if e == last or (last or 0) < e <= course.step - BACK]
    return old[-1] if old else None


def rollback_targets(course: Course) -> list[int]:
    """The steps whose states a rollback, now or later, may load."""
    target = rollback_target(course)
    return [step for step in course.evaluated if target is None or step >= target]


def best_before(course: Course, step: int) -> int:
    """The step that was the best one after `step` batches; -1 where none was."""
    return max((best for best in course.bests if best <= step), default=-1)


def give_up(course: Course, step: int, index: int) -> None:
    """After loading the state of `course`: never read the batches from its own to `index`, read at `step`, again."""
    course.windows = [*course.windows, [course.step, index + 1 - course.index]]
    course.applied = []  # what a spike is measured against begins anew
    assert course.step <= step


def blamed(run: Any, batches: list[Any]) -> str:
    """What is not finite first in the step of a fit.Run, on the rank that has it."""

    def again() -> None:
        for micro, (batch, _) in enumerate(run.ranks.evened(batches)):
            run_device.seed_step(run.job.seed, run.course.index, micro, run.ranks.rank)
            with torch.no_grad(), run.hardware.autocast():
                run.loss(run.plain, batch.to(run.hardware.device))

    found = run.ranks.gather(culprit(run.plain, again))
    return next((name for name in found if name != NOTHING), found[0])


def culprit(model: nn.Module, forward: Callable[[], None]) -> str:
    """The first module whose output is not finite in one more forward pass, or else the first gradient that is not."""
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not found and not bool(torch.isfinite(output).all()):
                found.append(name)

        return hook

    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    if found:
        return f"the output of {found[0]}"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(torch.isfinite(processes.local(parameter.grad)).all()):
            return f"the gradient of {name}"
    return NOTHING


# -- scaling -----------------------------------------------------------------------------------------------------------


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
        """Adapt the scale after a step; whether it fell, that is, whether an overflow was met that it may still
        cure.
        """
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


# -- averages ----------------------------------------------------------------------------------------------------------


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
