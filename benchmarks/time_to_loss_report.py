"""The evaluation of `time_to_loss.py`'s runs: steps to a target, time ratios, the table and the chart. Nothing here
trains.

A run is the output of `time_to_loss_arm.py`: `points` of step, bits per byte and seconds. `step` maps the name of an
arm to its measured time per step, wall ("seconds") and CPU ("cpu_seconds").
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GOAL = 1 / 3


@dataclass(frozen=True)
class Reached:
    """Steps to a target: of the shortest run that reaches it, and interpolated; `tried`: (steps, bits per byte)."""

    steps: int | None  # None: not within the maximum number of steps
    between: float | None
    tried: list[tuple[int, float]] = field(default_factory=list)


def steps_to(target: float, run: Callable[[int], float], *, first: int, factor: float, most: int) -> Reached:
    """The fewest steps first * factor^k, at most `most`, for which `run` returns the target or less."""
    tried: dict[int, float] = {}

    def reaches(steps: int) -> bool:
        tried[steps] = run(steps)
        return tried[steps] <= target

    steps, power = min(first, most), 0
    if reaches(steps):
        while (fewer := max(1, round(first * factor ** (power - 1)))) < steps and reaches(fewer):
            steps, power = fewer, power - 1
        return Reached(steps, between(tried, target), sorted(tried.items()))
    while steps < most:
        power += 1
        steps = min(most, round(first * factor**power))
        if reaches(steps):
            return Reached(steps, between(tried, target), sorted(tried.items()))
    return Reached(None, None, sorted(tried.items()))


def between(tried: dict[int, float], target: float) -> float:
    """Interpolate the steps to the target, in log steps, between the longest run that misses it and the next one."""
    hit = min(steps for steps, bpb in tried.items() if bpb <= target)
    misses = [steps for steps, bpb in tried.items() if bpb > target and steps < hit]
    if not misses:
        return float(hit)
    miss = max(misses)
    share = (tried[miss] - target) / (tried[miss] - tried[hit])
    return math.exp(math.log(miss) + share * (math.log(hit) - math.log(miss)))


def ratio(step: dict[str, dict[str, float]], mine: tuple[str, float], theirs: tuple[str, float]) -> dict[str, float]:
    """Our time over theirs; `mine` and `theirs` each hold an arm's name in `step` and a number of steps."""
    return {
        key: round(mine[1] * step[mine[0]][key] / (theirs[1] * step[theirs[0]][key]), 3)
        for key in ("seconds", "cpu_seconds")
    }


def verdict(step: dict[str, dict[str, float]], ours: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
    """Our time over the baseline's in each of its settings, without and with compilation (`compiling`: CPU seconds,
    once).
    """
    found: dict[str, Any] = {}
    for name in [name for name in step if name.startswith("nanoGPT")]:
        here = ratio(step, ("ours", ours["steps"]), (name, baseline["steps"]))
        mine = ours["steps"] * step["ours"]["cpu_seconds"] + ours["compiling"]
        theirs = baseline["steps"] * step[name]["cpu_seconds"] + (baseline["compiling"] if "compiled" in name else 0.0)
        found[name] = here | {"with_compiling": round(mine / theirs, 3), "met": max(here.values()) <= GOAL}
    return found


def plot(file: Path, curves: dict[str, list[dict[str, Any]]], step: dict[str, dict[str, float]], target: float) -> None:
    """Bits per byte by CPU seconds of training, on a logarithmic axis: curves for a slice of the validation split, and
    dots for all of it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (name, runs) in enumerate(curves.items()):
        for run in runs:
            points = [(p["step"] * step[name]["cpu_seconds"], p["bpb"]) for p in run["points"] if p["step"]]
            label = (
                f"{name} ({len(runs)} seeds)" if run is runs[0] and len(runs) > 1 else name if run is runs[0] else None
            )
            axes.plot(*zip(*points[:-1], strict=True), color=f"C{number}", label=label, linewidth=1.2)
            axes.plot(*points[-1], "o", color=f"C{number}", markersize=4)
    axes.axhline(target, color="grey", linewidth=0.8, linestyle="--", label="target")
    axes.set(xscale="log", xlabel="CPU seconds of training, one thread", ylabel="validation bits per byte")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150, metadata={"Software": None})


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    base, ours, lines = report["baseline"], report["ours"], []
    lines.append(
        f"target {report['target']:.4f} bits per byte; nanoGPT {base['steps']} steps, {base['best']}; ours"
        f" {ours['steps']} steps"
    )
    for name, row in report["verdict"].items():
        lines.append(
            f"ours / {name}: CPU time {row['cpu_seconds']}, wall time {row['seconds']}, with compiling"
            f" {row['with_compiling']} (goal {GOAL:.2f}: {'met' if row['met'] else 'missed'})"
        )
    lines.append(f"{'removed choice':44}{'bpb at our steps':>18}{'steps':>8}{'s/step':>9}{'times longer':>14}")
    for name, row in report["ablations"].items():
        steps, longer = (
            (f"{row['between']}", f"{row['times_longer']:.2f}") if row["steps"] else (f"> {row['tried'][-1][0]}", "-")
        )
        lines.append(f"{name:44}{row['bpb_at_our_steps']:>18.4f}{steps:>8}{row['cpu_seconds']:>9.3f}{longer:>14}")
    return "\n".join(lines) + "\n"
