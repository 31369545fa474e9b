"""From gradients to an update: run position, update checks, sums, loss scaling, averaged weights.

    Course            the position of a run: all that resuming needs except weights and moments, as JSON
    fault, risen      whether to apply a step's update, and when to end the run
    Totals, LoggingWindow    sums over one step (or evaluation), and over the steps since the last row of the curve
    Scaler            loss scaling for fp16
    Averages          exponential moving average of the weights

**Checks.** A step is applied or skipped, or it ends the run or rolls it back. All ranks make the same decision because
the numbers are global. A spike is a loss above mean + 6 max(std, 1% of |mean|) of the last 128 applied steps, and at
least 0.1 nats above the mean (PaLM restarts before a spike and skips the batches around it: Chowdhery et al. 2022,
arXiv:2204.02311, 5.1). A skipped step changes no weights or moments. Spikes should be rare: the third in a row, or the
tenth in a thousand steps, is taken as the run's new level and applied, so spikes never end a run. A high gradient
norm never causes a skip: clipping bounds it, and a model that has memorized its data has norms near 0 with rare jumps.

Two things end a run: non-finite values in three consecutive steps or ten in a thousand, and a loss that stays high for
100 consecutive steps, more than 1 nat above the lowest median of 128 steps so far. A policy's loss is not in nats, so
with `on_spike: ignore` only non-finite values count. When a stage changes its data on purpose, earlier losses are
forgotten.

A rollback loads the newest evaluated state that is at least 16 steps old, but never one before the last rollback, and
skips the batches since that state. Without such a state, or after three rollbacks, a spike is skipped, and non-finite
values end the run.

**Sums.** `Totals` combines `Loss` objects with the step's denominators. Totals and windows contain plain numbers, so
the window can be saved with the state, and a resumed curve is seamless.

**Loss scaling** (Micikevicius et al. 2018, arXiv:1710.03740) keeps small gradients from underflowing in half precision.
torch's GradScaler doubles the scale after 2,000 steps without overflow and halves it after one. An overflow costs an
update but does not count as a skipped step while the scale can still fall.

**Averages** are kept, evaluated and published if `ema_decay` is set:

    average <- d average + (1 - d) weights,   d = min(ema_decay, (1 + s) / (10 + s)) after s applied steps

in float32, over the trained parameters (Polyak & Juditsky 1992; decay warmup as in TensorFlow's
ExponentialMovingAverage).
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
from pipeline.run.types import JsonObject

MOST_NATS = 700.0  # exp of this is still finite
HISTORY = 128  # applied steps used to detect spikes
DEVIATIONS = 6.0
LEAST_SPREAD = 0.01  # minimum standard deviation, as a share of the mean
LEAST_RISE = 0.1  # minimum rise of a spike's loss, in nats
FEWEST = 16  # applied steps needed before the median is used
RISEN, STAYED = 1.0, 100  # nats above the lowest median, consecutive steps
IN_ROW, WITHIN, IN_ALL = 3, 1000, 10  # too many skipped steps: IN_ROW in a row, or IN_ALL within WITHIN steps
BACK = 16  # minimum age of a rollback state, in steps
ROLLBACKS = 3
NOTHING = "the loss itself"
NOT_FINITE = "not finite"
ON_NONFINITE = ("skip", "stop", "rollback")
ON_SPIKE = ("skip", "stop", "rollback", "ignore")
LEAST_SCALE = 1.0


@dataclass
class Course:
    """The position of a run between two steps."""

    step: int = 0  # completed batches
    tokens: int = 0  # trained targets so far
    skipped: int = 0  # skipped updates
    spikes_at: list[int] = field(default_factory=list)  # of the last thousand steps, those skipped for a spike
    broken_at: list[int] = field(default_factory=list)  # steps skipped as non-finite or vetoed
    applied: list[float] = field(default_factory=list)  # losses of the last applied steps
    lowest: float = math.inf  # the lowest median of `applied` so far
    risen: int = 0  # consecutive steps with a loss far above `lowest`
    moved: bool = False  # the data, and thus the level of the loss, changed as planned
    windows: list[list[int]] = field(default_factory=list)  # [step, count]: from this step on, skip `count` batches
    best: float = math.inf
    best_step: int = -1
    bests: list[int] = field(default_factory=list)  # steps with a new best evaluation
    anchor: float = math.inf  # early stopping: moves only on an improvement above `threshold`
    stale: int = 0  # evaluations since the anchor moved
    evaluated: list[int] = field(default_factory=list)  # steps of the evaluations, oldest first
    owes_evaluation: bool = False  # a signal interrupted the evaluation after this step
    done: bool = False

    @property
    def index(self) -> int:
        """The batch index of this step: the step, plus the batches skipped by rollbacks."""
        return self.step + sum(count for first, count in self.windows if self.step >= first)

    def compare(self, value: float, *, threshold: float, patience: int) -> None:
        """Record a validation loss: update the best, the early-stopping anchor, and whether the run is done."""
        if value < self.best:
            self.best, self.best_step = value, self.step
            self.bests = [*self.bests, self.step]
        if value < self.anchor - threshold:
            self.anchor, self.stale = value, 0
        else:
            self.stale += 1
        self.done = patience > 0 and self.stale >= patience

    def results(self, rows: list[JsonObject], published: int) -> JsonObject:
        """A run's final numbers, from its curve and the step of the published weights."""
        results: JsonObject = {"steps": self.step, "tokens": self.tokens, "published_step": published}
        trained = [row for row in rows if "loss" in row]
        if trained:
            results["final"] = {name: trained[-1][name] for name in ("loss", "bpb") if name in trained[-1]}
        if math.isfinite(self.best):
            best_rows = [row for row in rows if row["step"] == self.best_step and "val/bpb" in row]
            results["best"] = {"val_loss": self.best, "step": self.best_step}
            results["best"] |= {"val_bpb": best_rows[-1]["val/bpb"]} if best_rows else {}
        return results


# -- checks of a step --------------------------------------------------------------------------------------------------


def fault(course: Course, loss: float, norm: float, on_spike: str) -> str:
    """The fault of a step; empty if its update may be applied."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return NOT_FINITE
    if on_spike == "ignore" or len(course.applied) < HISTORY:
        return ""
    mean = statistics.fmean(course.applied)
    spread = max(statistics.pstdev(course.applied, mean), LEAST_SPREAD * abs(mean))
    limit = mean + max(DEVIATIONS * spread, LEAST_RISE)
    return (
        f"a spike: loss above {limit:.4g}, while the mean of the last {HISTORY} steps is {mean:.4g}"
        if loss > limit
        else ""
    )


def risen(course: Course, loss: float, on_spike: str) -> str:
    """Count a step, applied or not. Returns why the run must end; empty if it may continue."""
    if on_spike == "ignore" or not math.isfinite(loss):
        return ""
    if len(course.applied) >= FEWEST:
        course.lowest = min(course.lowest, statistics.median(course.applied))
    course.risen = course.risen + 1 if loss > course.lowest + RISEN else 0
    if course.risen < STAYED:
        return ""
    return (
        f"the loss rose and stayed high: {STAYED} steps in a row more than {RISEN:g} nat above {course.lowest:.4g},"
        " the lowest median so far"
    )


def new_level(course: Course) -> None:
    """Forget the losses on earlier data; only the first call has an effect."""
    if not course.moved:
        course.applied, course.lowest, course.risen, course.moved = [], math.inf, 0, True


def applied(course: Course, loss: float, *, new_level: bool = False) -> None:
    """Count an applied update. At a `new_level` the spike history starts over."""
    course.applied = [loss] if new_level else [*course.applied[1 - HISTORY :], loss]


def in_row(steps: list[int], step: int) -> int:
    """The number of consecutive skipped steps ending with `step`; `steps` are the earlier skipped ones."""
    count = 1
    while len(steps) >= count and steps[-count] == step - count:
        count += 1
    return count


def too_many(steps: list[int], step: int) -> bool:
    """Whether `step`, after the skipped `steps`, is the third in a row or the tenth in a thousand steps."""
    recent = [earlier for earlier in steps if earlier > step - WITHIN]
    return in_row(steps, step) >= IN_ROW or len(recent) + 1 >= IN_ALL


def skipped(course: Course, steps: list[int]) -> None:
    """Count a skipped update, in the list `steps` for its kind of fault."""
    course.skipped += 1
    steps[:] = [step for step in steps if step > course.step - WITHIN] + [course.step]


def rollback_target(course: Course) -> int | None:
    """The step whose state a rollback from here would load; None if none is old enough."""
    last = course.windows[-1][0] if course.windows else None  # never earlier: its skipped batches would come back
    candidates = [e for e in course.evaluated if e == last or (last or 0) < e <= course.step - BACK]
    return candidates[-1] if candidates else None


def rollback_targets(course: Course) -> list[int]:
    """The steps whose states a rollback may load, now or later."""
    target = rollback_target(course)
    return [step for step in course.evaluated if target is None or step >= target]


def best_before(course: Course, step: int) -> int:
    """The best step up to `step`; -1 if there is none."""
    return max((best for best in course.bests if best <= step), default=-1)


def give_up(course: Course, step: int, index: int) -> None:
    """Skip the batches from the loaded `course` up to `index`, the batch used at `step`."""
    course.windows = [*course.windows, [course.step, index + 1 - course.index]]
    course.applied = []  # the spike history starts over
    assert course.step <= step


def culprit(model: nn.Module, forward: Callable[[], None]) -> str:
    """The first module with a non-finite output in a repeated forward pass, or else the first non-finite gradient."""
    names: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            if isinstance(output, Tensor) and not names and not bool(torch.isfinite(output).all()):
                names.append(name)

        return hook

    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    if names:
        return f"the output of {names[0]}"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(torch.isfinite(processes.local(parameter.grad)).all()):
            return f"the gradient of {name}"
    return NOTHING


# -- sums --------------------------------------------------------------------------------------------------------------


@dataclass
class Totals:
    """Sums over micro-batches and, after `reduce`, over ranks."""

    counts: dict[str, int]  # of the entire step, over all ranks
    terms: dict[str, list[Any]] = field(default_factory=dict)  # name -> [sum, per, coefficient], a list as in JSON
    metrics: dict[str, list[float]] = field(default_factory=dict)  # name -> [sum, count]
    extremes: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)  # metric -> upper limit of its mean
    pending: list[Loss] = field(default_factory=list)  # added, still on the device

    def add(self, loss: Loss) -> None:
        """Add a micro-batch. Its numbers stay on the device until `settle`."""
        terms = [Term(t.name, t.sum.detach(), t.per, t.coefficient) for t in loss.terms]
        self.pending.append(Loss(terms, loss.metrics, loss.extremes, loss.limits))

    def settle(self) -> "Totals":
        """Sum up the pending losses, with a single copy from the device."""
        losses, self.pending = self.pending, []
        tensors = [t.sum for loss in losses for t in loss.terms]
        tensors += [total for loss in losses for total, _ in loss.metrics.values()]
        tensors += [value for loss in losses for value in loss.extremes.values()]
        numbers = iter(_to_floats(tensors))
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
        slots = [(entry, 0) for entry in self.terms.values()]
        slots += [(self.metrics[name], index) for name in sorted(self.metrics) for index in (0, 1)]
        values = torch.tensor([float(entry[index]) for entry, index in slots], dtype=torch.float64)
        for (entry, index), value in zip(slots, ranks.sum_tensor(values).tolist(), strict=True):
            entry[index] = value
        for name in sorted(self.extremes):
            sign = -1.0 if "min" in name else 1.0
            self.extremes[name] = sign * ranks.greatest(sign * self.extremes[name])

    @property
    def veto(self) -> str:
        """The reason not to apply this step; empty if none. Call after `reduce`: limits apply to the entire step."""
        self.settle()
        for name, limit in self.limits.items():
            total, count = self.metrics[name]
            if count and not total / count <= limit:  # also true for NaN
                return f"the mean of {name} is {total / count:.1f}, above {limit:g}"
        return ""

    @property
    def value(self) -> float:
        """The loss: sum of coefficient * sum / count over the terms."""
        self.settle()
        return sum(c * s / self.counts[per] for s, per, c in self.terms.values() if self.counts[per])

    def values(self) -> dict[str, float]:
        """The loss, its terms if there are several, metrics and extremes."""
        values = {"loss": self.value}
        if len(self.terms) > 1:
            values |= {name: s / self.counts[per] for name, (s, per, _) in self.terms.items() if self.counts[per]}
        values |= {name: s / count for name, (s, count) in self.metrics.items() if count}
        if self.counts.get("bytes"):
            nats = sum(s for s, per, _ in self.terms.values() if per == "tokens")
            values["bpb"] = nats / (math.log(2) * self.counts["bytes"])
            values["perplexity"] = math.exp(min(MOST_NATS, nats / self.counts["tokens"]))
        return values | self.extremes

    def merge(self, other: "Totals") -> None:
        """Add the totals of another step."""
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


def _to_floats(scalars: list[Tensor]) -> list[float]:
    """Scalars (tensors, or plain numbers of a metric) as floats. Waits for the device once."""
    device = next((t.device for t in scalars if isinstance(t, Tensor) and t.device.type != "cpu"), None)
    if device is None:
        return [float(t) for t in scalars]
    wide = torch.float64 if device.type == "cuda" else torch.float32
    return torch.stack([torch.as_tensor(t, device=device).detach().to(wide) for t in scalars]).tolist()


def _extreme(name: str, before: float | None, value: float) -> float:
    """The minimum if "min" is in the name, else the maximum."""
    if before is None:
        return value
    return min(before, value) if "min" in name else max(before, value)


@dataclass
class LoggingWindow:
    """Sums of the steps since the last row of the curve."""

    totals: Totals = field(default_factory=lambda: Totals({}))
    norm: float = 0.0  # sum of gradient norms
    steps: int = 0

    def add(self, totals: Totals, norm: float) -> None:
        """Add a step."""
        self.totals.merge(totals)
        self.norm += norm
        self.steps += 1

    def state(self) -> JsonObject:
        """The window as JSON."""
        totals = {name: value for name, value in vars(self.totals).items() if name != "pending"}
        return {"totals": totals, "norm": self.norm, "steps": self.steps}

    @classmethod
    def of(cls, state: JsonObject) -> "LoggingWindow":
        """Create a window from a `state()`."""
        return cls(Totals(**state["totals"]), state["norm"], state["steps"])


# -- loss scaling ------------------------------------------------------------------------------------------------------


class Scaler:
    """Scales losses in fp16; a no-op in any other precision."""

    def __init__(self, precision: str, device: torch.device) -> None:
        self.torch = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    @property
    def scale_now(self) -> float:
        """The current loss scale."""
        return self.torch.get_scale()

    def scale(self, objective: Tensor) -> Tensor:
        """The objective times the scale, for the backward pass."""
        return self.torch.scale(objective)

    def unscale(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Divide the gradients by the scale, before computing their norm."""
        for optimizer in optimizers if self.torch.is_enabled() else ():
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                self.torch.unscale_(optimizer)

    def update(self) -> bool:
        """Adapt the scale after a step. Returns whether the scale fell, in which case the overflow may not recur."""
        if not self.torch.is_enabled():
            return False
        before = self.scale_now
        self.torch.update()
        return self.scale_now < before and before > LEAST_SCALE

    def state(self) -> JsonObject:
        """The scaler as JSON; empty when disabled."""
        return self.torch.state_dict()

    def load_state(self, state: JsonObject) -> None:
        """Load a `state()`; ignored unless both that run and this one use fp16."""
        if state and self.torch.is_enabled():
            self.torch.load_state_dict(state)


# -- averaged weights --------------------------------------------------------------------------------------------------


class Averages:
    """Moving averages of a model's trained weights. A frozen weight is its own average."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.values = {name: p.detach().float().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages after an applied step."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        for name, parameter in self.parameters.items():
            self.values[name].lerp_(parameter.float(), 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the averaged weights into the model inside the block."""
        own = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self.load()
        try:
            yield
        finally:
            _copy(self.parameters, own)

    def load(self) -> None:
        """Copy the averages into the model permanently."""
        _copy(self.parameters, self.values)

    def restore(self, values: dict[str, Tensor], updates: int) -> None:
        """Continue from saved averages. Raises ValueError if their names differ from those of the trained weights."""
        if values.keys() != self.values.keys():
            name = sorted(values.keys() ^ self.values.keys())[0]
            raise ValueError(f"{name!r} is in the saved averages or in the trained weights, but not in both")
        self.updates = updates
        _copy(self.values, values)


@torch.no_grad()
def _copy(into: dict[str, nn.Parameter] | dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, tensor in into.items():
        tensor.copy_(values[name])
