"""Alarms of reinforcement learning: symptoms that a healthy run does not show. They warn and never stop a run.

`of` is a function of the curve alone, so a resumed run has the same alarms. `watch` prints each alarm once, when it is
new.
"""

import itertools
from collections.abc import Callable, Sequence

from pipeline.run.tracking import say
from pipeline.run.types import JsonObject

Row = JsonObject  # of the curve
WITHOUT_FIT = 10  # iterations of a critic worse than the mean
WITHOUT_SPREAD = 5  # iterations of groups with equal rewards: one iteration of few prompts may have them by chance
LOSSES = 2  # evaluations at which gold fell while the proxy rose
LOW_ENTROPY = 0.2  # of the entropy at the start


def of(rows: Sequence[Row], *, target_kl: float | None = None) -> dict[str, int]:
    """The alarms of a curve: message -> the first step that shows it."""
    alarms: dict[str, int] = {}
    for row in rows:
        for message in _of_row(row, target_kl):
            alarms.setdefault(message, int(row["step"]))
    for name in ("policy/entropy_avg", "entropy"):
        with_entropy = [row for row in rows if name in row]
        for row in with_entropy:
            if row[name] < LOW_ENTROPY * with_entropy[0][name]:
                message = f"{name} is below 20 % of its start: the answers become all alike"
                alarms.setdefault(message, int(row["step"]))
    critic = [row for row in rows if "val/var_explained" in row]
    groups = [row for row in rows if "frac_reward_zero_std" in row]
    rewarded = [row for row in rows if "gold" in row and "proxy" in row]
    for subset, bad, times, message in (
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
            rewarded[1:],
            [b["gold"] < a["gold"] and b["proxy"] > a["proxy"] for a, b in itertools.pairwise(rewarded)],
            LOSSES,
            "gold falls while the proxy rises: the reward model is being exploited",
        ),
    ):
        for end in range(times, len(bad) + 1):
            if all(bad[end - times : end]):
                alarms.setdefault(message, int(subset[end - 1]["step"]))
    return alarms


def _of_row(row: Row, target_kl: float | None) -> list[str]:
    """The alarms of a single row."""
    limits = {
        "objective/kl": (-1.0, 4 * target_kl if target_kl else None),
        "val/ratio": (0.9, 1.1),
        "ratio": (0.9, 1.1),
        "policy/clipfrac_avg": (None, 0.3),
        "completions/clipped_ratio": (None, 0.5),
        "unscorable": (None, 0.01),
    }
    messages = []
    for name, (low, high) in limits.items():
        value = row.get(name)
        if isinstance(value, int | float):
            if low is not None and value < low:
                messages.append(f"{name} is below {low:g}")
            if high is not None and value > high:
                messages.append(f"{name} is above {high:g}")
    return messages


def watch(name: str, *, target_kl: float | None = None) -> Callable[[list[Row]], None]:
    """A watcher of the curve that prints new alarms."""
    known: set[str] = set()

    def print_new(rows: list[Row]) -> None:
        for message, step in of(rows, target_kl=target_kl).items():
            if message not in known:
                known.add(message)
                say(f"alarm: {name}, step {step}: {message}")

    return print_new
