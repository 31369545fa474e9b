"""Learning-rate finder: `python -m stages.language runtime.find_lr=true`. It leaves the model untrained.

    100 steps, with the rates multiplied by factors from 1e-4 to 1e3, spaced geometrically
    (Smith 2017, arXiv:1506.01186; fastai's finder)

The rate ratios between groups and the gradient clipping stay as configured. The same 8 batches rotate, so the loss
changes with the rate, not the data. The loss is averaged over ranks and smoothed (0.98, bias-corrected). The search
ends when the loss reaches four times its minimum. The suggestions are the rate of steepest descent (with respect to the
log of the rate), the middle of the longest valley (fastai's), and a tenth of the rate at the minimum. `breaks_at` is
the rate at which the unsmoothed loss starts to diverge: 2 / lambda for plain gradient descent on a quadratic of
curvature lambda. Weights and moments are restored and verified by a hash.

Not guaranteed: the best rate. One hundred steps show where training diverges; finding the best final loss takes full
runs at several rates.
"""

import csv
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from pipeline.learning.processes import local
from pipeline.learning.protocols import TrainingRun
from pipeline.run.errors import GateError
from pipeline.run.tracking import progress, say

STEPS, LEAST, MOST = 100, 1e-4, 1e3
BATCHES, SMOOTHING, DIVERGED = 8, 0.98, 4.0


@dataclass(frozen=True)
class Trial:
    """One step of the search."""

    rate: float
    loss: float  # smoothed
    raw: float


@dataclass(frozen=True)
class Suggestion:
    """The result of the search. Rates are those of the groups that use `learning_rate`."""

    trials: list[Trial]
    steepest: float
    valley: float
    tenth_of_least: float
    breaks_at: float | None  # None: the loss never diverged


def look(run: TrainingRun) -> NoReturn:
    """Run the search before training starts. Writes a CSV and a plot, prints the suggestions, then exits.

    Raises SystemExit(0), or GateError if the loss diverges within ten steps.
    """
    if run.rolling:
        raise GateError(
            "runtime.find_lr: not supported for a policy, which generates its own data; compare several rates with"
            " dvc exp run -S instead"
        )
    before = fingerprint(run)
    weights = [p.detach().clone() for p in run.plain.parameters()]
    try:
        with run.job.stop.heeded():
            result = search(attempts(run), run.config.learning_rate, run.job.name)
    finally:
        with torch.no_grad():
            for parameter, value in zip(run.plain.parameters(), weights, strict=True):
                parameter.copy_(value)
        for optimizer in run.optimizers.optimizers:
            optimizer.state.clear()
        run.optimizers.zero_grad()
    if fingerprint(run) != before:
        raise GateError("the learning-rate finder did not restore the training state; this is a bug")
    if run.ranks.rank == 0:
        write(result, run.job.folder / "find_lr", run.job.stage)
    run.ranks.barrier()
    if run.ranks.world > 1:
        run.ranks.leave()
    raise SystemExit(0)


def attempts(run: TrainingRun) -> Callable[[int, float], float]:
    """The step function for `search`: one update at scaled rates. NaN if the loss or norm is not finite."""
    data = [run.batches(index, index)[1] for index in range(BATCHES)]

    def attempt(step: int, factor: float) -> float:
        batches = data[step % BATCHES]
        counts = {name: sum(b.counts[name] for b in batches) for name in batches[0].counts}
        stop, _, counts = run.ranks.control(run.job.stop.signal, False, counts)
        if stop:
            raise SystemExit(128 + stop)
        totals = run.backward(batches, counts)
        run.scaler.unscale(run.optimizers.optimizers)
        norm = run.ranks.gradient_norm(run.plain, run.config.max_grad_norm)
        totals.reduce(run.ranks)
        overflow = run.scaler.update()
        if math.isfinite(norm):
            run.optimizers.step(factor)
        run.optimizers.zero_grad()
        return totals.value if math.isfinite(norm) or overflow else math.nan

    return attempt


def search(attempt: Callable[[int, float], float], rate: float, name: str) -> Suggestion:
    """Run the search. `attempt(step, factor)` returns the loss before an update at `factor` times the rates.

    Raises GateError if the loss diverges within ten steps.
    """
    trials: list[Trial] = []
    smoothed, least = 0.0, math.inf
    with progress(total=STEPS, desc=f"{name}: learning rates", unit="step") as bar:
        for step in range(STEPS):
            factor = LEAST * (MOST / LEAST) ** (step / (STEPS - 1))
            raw = attempt(step, factor)
            smoothed = SMOOTHING * smoothed + (1 - SMOOTHING) * raw
            loss = smoothed / (1 - SMOOTHING ** (step + 1))
            if not math.isfinite(raw):
                break
            trials.append(Trial(rate * factor, loss, raw))
            least = min(least, loss)
            if loss > DIVERGED * abs(least):
                break
            bar.update()
    if len(trials) < 10:
        found = "is not finite at the first step"
        if trials:
            found = f"diverged after {len(trials)} steps, at a learning rate of {trials[-1].rate:.1e}"
        raise GateError(f"{name}: the loss {found}; lower learning_rate first")
    return suggest(trials, broke=len(trials) < STEPS)


def suggest(trials: list[Trial], *, broke: bool) -> Suggestion:
    """Suggest rates from a loss-versus-rate curve."""
    logs, losses = [math.log(t.rate) for t in trials], [t.loss for t in trials]
    slopes = [(b - a) / (y - x) for a, b, x, y in zip(losses, losses[1:], logs, logs[1:], strict=False)]
    first, last = _longest_fall(losses)
    least = min(range(len(losses)), key=losses.__getitem__)
    return Suggestion(
        trials=trials,
        steepest=trials[min(range(len(slopes)), key=slopes.__getitem__)].rate,
        valley=trials[(first + last) // 2].rate,
        tenth_of_least=trials[least].rate / 10,
        breaks_at=_breaking_rate([t.rate for t in trials], [t.raw for t in trials], broke=broke),
    )


def _breaking_rate(rates: list[float], losses: list[float], *, broke: bool) -> float | None:
    """The interpolated rate beyond which the loss grew at every step: the zero of log(next / loss) in log(rate).

    If noise interrupts the growth in the last steps, returns the rate beyond which the loss stays above its first
    value, or None if there is no such rate.
    """

    def growth(step: int) -> float:
        before, after = losses[step], losses[step + 1]
        return math.log(after / before) if min(before, after) > 0 else math.copysign(1.0, after - before)

    step = len(losses) - 2
    if any(growth(step - back) <= 0 for back in range(3)):
        below = [number for number, loss in enumerate(losses) if loss <= losses[0]][-1]
        return rates[min(below + 1, len(rates) - 1)] if broke or below < len(losses) - 1 else None
    while step > 0 and growth(step) > 0:
        step -= 1
    low, high = growth(step), growth(min(step + 1, len(losses) - 2))
    if not low < 0 < high:
        return rates[step]
    return math.exp(math.log(rates[step]) + math.log(rates[step + 1] / rates[step]) * -low / (high - low))


def _longest_fall(losses: list[float]) -> tuple[int, int]:
    """First and last indices of the longest falling subsequence (fastai's valley)."""
    lengths, previous = [1] * len(losses), [-1] * len(losses)
    for i, loss in enumerate(losses):
        for j in range(i):
            if losses[j] > loss and lengths[j] >= lengths[i]:
                lengths[i], previous[i] = lengths[j] + 1, j
    last = max(range(len(losses)), key=lengths.__getitem__)
    first = last
    while previous[first] >= 0:
        first = previous[first]
    return first, last


def fingerprint(run: TrainingRun) -> str:
    """A hash of all weights and moments."""
    digest = hashlib.sha256()
    tensors = {**dict(run.plain.named_parameters()), **run.optimizers.state_tensors()}
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(local(tensor.detach()).cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def write(result: Suggestion, folder: Path, stage: str) -> None:
    """Write `curve.csv` and `curve.svg`, and print the suggestions."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "curve.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["learning_rate", "loss", "smoothed"])
        writer.writerows([f"{t.rate:.6g}", f"{t.raw:.6g}", f"{t.loss:.6g}"] for t in result.trials)
    plot(result, folder / "curve.svg")
    ends = f"{result.breaks_at:.2g}" if result.breaks_at else f"above {result.trials[-1].rate:.2g}"
    say(
        f"learning rates from {result.trials[0].rate:.2g}: steepest descent at {result.steepest:.2g}, valley"
        f" at {result.valley:.2g}, minimum / 10 at {result.tenth_of_least:.2g}, divergence: {ends}\n  curve and plot:"
        f" {folder}\n  params.yaml:\n    {stage}:\n      learning_rate: {result.tenth_of_least:.1e}"
    )


def plot(result: Suggestion, path: Path) -> None:
    """Smoothed and raw loss against the rate, with the three suggestions."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    rates = [t.rate for t in result.trials]
    axes.plot(rates, [t.raw for t in result.trials], color="#bbbbbb", label="loss")
    axes.plot(rates, [t.loss for t in result.trials], color="#1f4e8c", label="smoothed")
    marks = (("steepest", result.steepest), ("valley", result.valley), ("least / 10", result.tenth_of_least))
    for (label, rate), style in zip(marks, ("--", "-", ":"), strict=True):
        axes.axvline(rate, color="#b3541e", linestyle=style, label=f"{label}: {rate:.1e}")
    least, first = min(t.raw for t in result.trials), result.trials[0].raw
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss", title="Learning-rate finder")
    # a diverging loss runs off the top of the plot
    axes.set_ylim(least - 0.1 * abs(first - least), first + 0.6 * abs(first - least))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
