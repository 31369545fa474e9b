"""Whether a step's update may be made, and what happens when it may not.

    finite?  spike?  limit?   ->   apply, skip, stop, or roll back          (one verdict on all ranks: the numbers are global)

A spike is a loss or gradient norm above mean + 6 max(std, 1 % of |mean|) of the last 128 applied steps (PaLM restarts before a spike and
skips the batches around it: Chowdhery et al. 2022, arXiv:2204.02311, 5.1). A loss less than 0.1 nats above the mean is none, nor is a
norm that clipping leaves alone: a model that knows its data by heart has losses near 0 with rare, small jumps. A skipped step changes no weight and no moment; three in a
row, or ten in a thousand steps, stop the run. A rollback goes back to the newest evaluated state at least 16 steps old, but never behind
the rollback before, and never reads the batches from there to here again; where there is none yet the step is skipped, and after three
rollbacks the run stops.

Not promised: that a spike is harmful. Policies that sample their own data have heavy-tailed norms, so there `on_spike` is `ignore`.
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
LEAST_RISE = 0.1  # of a loss, in nats
IN_ROW, WITHIN, IN_ALL = 3, 1000, 10
BACK = 16  # steps that the state of a rollback is old at least
ROLLBACKS = 3
NOTHING = "the loss alone"
ON_NONFINITE = ("skip", "stop", "rollback")
ON_SPIKE = ("skip", "stop", "rollback", "ignore")


def fault(course: Course, loss: float, norm: float, on_spike: str, clip: float = 0.0) -> str:
    """What is wrong with a step whose gradient is clipped to the norm `clip`; empty when its update may be made."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return "not finite"
    if on_spike == "ignore" or len(course.applied) < HISTORY:
        return ""
    losses, norms = zip(*course.applied, strict=True)
    for name, value, known in (("loss", loss, losses), ("gradient norm", norm, norms)):
        mean = statistics.fmean(known)
        limit = mean + DEVIATIONS * max(statistics.pstdev(known, mean), LEAST_SPREAD * abs(mean))
        limit = max(limit, mean + LEAST_RISE if name == "loss" else clip)
        if value > limit:
            return f"a spike: {name} above {limit:.4g}, the mean of the last {HISTORY} steps being {mean:.4g}"
    return ""


def applied(course: Course, loss: float, norm: float) -> None:
    """Count a step whose update was made."""
    course.skipped_in_row = 0
    course.applied = [*course.applied[1 - HISTORY :], [loss, norm]]


def skipped(course: Course) -> bool:
    """Count a step whose update was not made; whether that is one too many."""
    course.skipped += 1
    course.skipped_in_row += 1
    course.skipped_at = [step for step in course.skipped_at if step > course.step - WITHIN] + [course.step]
    return course.skipped_in_row >= IN_ROW or len(course.skipped_at) >= IN_ALL


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
