"""Whether a step's update may be made, and what ends a run.

    finite?  spike?  risen?   ->   apply, skip, stop, or roll back          (one verdict on all ranks: the numbers are global)

A spike is a loss above mean + 6 max(std, 1 % of |mean|) of the last 128 applied steps, and at least 0.1 nats above it (PaLM restarts before
a spike and skips the batches around it: Chowdhery et al. 2022, arXiv:2204.02311, 5.1). A skipped step changes no weight and no moment. A
spike is rare: the third in a row, or the tenth in a thousand steps, is the run's new level, and its update is made. So a spike never
ends a run. A gradient norm is no reason by itself: clipping bounds it, and a model that knows its data by heart has norms near 0 with
rare jumps.

Two things end a run: three steps in a row, or ten in a thousand, that are not finite; and a loss that has risen and stays: 100 steps in a
row more than 1 nat above the lowest median that 128 steps ever had. A policy's loss is not measured in nats, so with `on_spike: ignore`
only what is not finite counts.

A rollback goes back to the newest evaluated state at least 16 steps old, but never behind the rollback before, and never reads the batches
from there to here again. Where there is none yet, or after three rollbacks, a spike is skipped; numbers that are not finite then stop the run.
"""

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipeline import device
from pipeline.learning import sharding
from pipeline.learning.course import Course

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
    return f"the loss rose and stayed: {STAYED} steps in a row more than {RISEN:g} nat above {course.lowest:.4g}, the lowest median so far"


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
    """Whether `step` is one too many to be left out like `steps` before it: the third in a row, or the tenth in a thousand."""
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
            device.seed_step(run.job.seed, run.course.index, micro, run.ranks.rank)
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
        if parameter.grad is not None and not bool(torch.isfinite(sharding.local(parameter.grad)).all()):
            return f"the gradient of {name}"
    return NOTHING
