"""Alarms of reinforcement learning: what a healthy run does not show. They warn and never stop (specs: alignment, 12).

`of` is a function of the curve alone, so a resumed run says the same; `watch` says each alarm once, when it is new.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.run.tracking import say

Row = dict[str, Any]
WITHOUT_FIT = 10  # iterations of a critic worse than the mean
WITHOUT_SPREAD = 5  # iterations in which groups were alike: one of few prompts may be so by chance
LOSSES = 2  # evaluations at which gold fell while the proxy rose
LOW_ENTROPY = 0.2  # of what it was at the start


def of(rows: Sequence[Row], *, target_kl: float | None = None) -> dict[str, int]:
    """The alarms of a curve: what is wrong -> the step at which it was first."""
    found: dict[str, int] = {}

    def raise_at(step: int, what: str) -> None:
        found.setdefault(what, step)

    for row in rows:
        for what in _of_row(row, target_kl):
            raise_at(int(row["step"]), what)
    for name in ("policy/entropy_avg", "entropy"):
        told = [row for row in rows if name in row]
        for row in told:
            if row[name] < LOW_ENTROPY * told[0][name]:
                raise_at(int(row["step"]), f"{name} is below 20 % of its start: the answers become all alike")
    critic = [row for row in rows if "val/var_explained" in row]
    groups = [row for row in rows if "frac_reward_zero_std" in row]
    told = [row for row in rows if "gold" in row and "proxy" in row]
    for of_rows, bad, times, what in (
        (
            critic,
            [row["val/var_explained"] < 0 for row in critic],
            WITHOUT_FIT,
            f"the critic explained nothing for {WITHOUT_FIT} iterations: raise its rate",
        ),
        (
            groups,
            [row["frac_reward_zero_std"] > 0.9 for row in groups],
            WITHOUT_SPREAD,
            (
                f"nine tenths of the groups had one reward for {WITHOUT_SPREAD} iterations: choose problems of middle"
                " difficulty"
            ),
        ),
        (
            told[1:],
            [b["gold"] < a["gold"] and b["proxy"] > a["proxy"] for a, b in itertools.pairwise(told)],
            LOSSES,
            "gold falls while the proxy rises: the reward model is being exploited",
        ),
    ):
        for place in range(times, len(bad) + 1):
            if all(bad[place - times : place]):
                raise_at(int(of_rows[place - 1]["step"]), what)
    return found


def _of_row(row: Row, target_kl: float | None) -> list[str]:
    """What one row alone shows."""
    limits = {
        "objective/kl": (-1.0, 4 * target_kl if target_kl else None),
        "val/ratio": (0.9, 1.1),
        "ratio": (0.9, 1.1),
        "policy/clipfrac_avg": (None, 0.3),
        "completions/clipped_ratio": (None, 0.5),
        "unscorable": (None, 0.01),
    }
    found = []
    for name, (low, high) in limits.items():
        value = row.get(name)
        if isinstance(value, int | float):
            if low is not None and value < low:
                found.append(f"{name} is below {low:g}")
            if high is not None and value > high:
                found.append(f"{name} is above {high:g}")
    return found


def watch(name: str, *, target_kl: float | None = None) -> Callable[[list[Row]], None]:
    """Says what is new each time the curve has grown."""
    known: set[str] = set()

    def look(rows: list[Row]) -> None:
        for what, step in of(rows, target_kl=target_kl).items():
            if what not in known:
                known.add(what)
                say(f"alarm: {name}, step {step}: {what}")

    return look
