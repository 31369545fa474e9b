"""What differs between two models, or between two runs, and whether it is more than chance.

    change(headline, before, after)    a measure's difference, by a paired bootstrap over items where both models were asked the same
    stages(before, after)              which stages were built from something else, and from what

Two results are paired item by item only where both were measured on data of the same digest; elsewhere a difference counts as one
where the two 95 % intervals do not overlap, which is stricter. Intervals cover items, not training seeds.
"""

from dataclasses import dataclass
from typing import Any

from pipeline.device import generator
from pipeline.evaluation.intervals import paired_difference
from pipeline.report.headlines import HEADLINES, Headline, Row, lookup
from pipeline.report.run import Run, flat, maker

RESAMPLES = 2000


@dataclass(frozen=True)
class Measured:
    """What was measured of one model."""

    numbers: dict[str, Any]
    rows: list[Row]

    @property
    def data(self) -> dict[str, str]:
        """The digests of the data that it was measured on."""
        inputs = self.numbers.get("lineage", {}).get("inputs", {})
        return {path: digest for path, digest in inputs.items() if path.startswith("data/")}


@dataclass(frozen=True)
class Change:
    """A difference of one measure: after - before."""

    headline: Headline
    before: float
    after: float
    low: float | None  # of the difference, paired; None: not paired
    high: float | None
    items: int  # that were paired
    kind: str  # better, worse, or "" where chance explains it or nothing says how sure the numbers are

    @property
    def shown(self) -> str:
        """As people read it: `+1.5 points (−0.2 to 3.1)`."""
        told = self.headline.show_change(self.after - self.before)
        if self.low is None or self.high is None:
            return told
        scale, digits = (100, 1) if self.headline.unit == "share" else (1, 3)
        low, high = (f"{scale * value:.{digits}f}".replace("-", "−") for value in (self.low, self.high))
        return f"{told} ({low} to {high})"


def of_model(run: Run, model: str) -> Measured | None:
    """What a run measured of a model; None where it was not evaluated."""
    numbers = run.evaluations.get(model)
    return None if numbers is None else Measured(numbers, run.items.get(model, []))


def change(headline: Headline, before: Measured, after: Measured) -> Change | None:
    """The difference of a measure; None where one of the two has no such number."""
    first, second = lookup(before.numbers, headline), lookup(after.numbers, headline)
    if first is None or second is None:
        return None
    low, high, items = _paired(headline, before, after)
    if low is not None and high is not None:
        sure = low > 0 or high < 0
    else:
        known = "low" in first and "low" in second
        sure = known and (second["low"] > first["high"] or second["high"] < first["low"])
    up = second["value"] > first["value"]
    kind = ("better" if up == headline.higher_is_better else "worse") if sure else ""
    return Change(headline, first["value"], second["value"], low, high, items, kind)


def _paired(headline: Headline, before: Measured, after: Measured) -> tuple[float | None, float | None, int]:
    """The interval of the difference over the items of both, and their number."""
    first, second = headline.counted(before.rows), headline.counted(after.rows)
    if not first or first.keys() != second.keys() or before.data != after.data:
        return None, None, 0
    ids = list(first)
    columns = [([side[i][0] for i in ids], [side[i][1] for i in ids]) for side in (first, second)]
    found = paired_difference(columns[0], columns[1], generator=generator("change", headline.key), resamples=RESAMPLES)
    return found.low, found.high, found.n


def measures(before: Run, after: Run, *, every: bool = False) -> dict[str, list[Change]]:
    """model -> the measures that moved between two runs (`every`: all), models in the order of `after`."""
    found = {}
    for model in after.evaluations:
        first, second = of_model(before, model), of_model(after, model)
        if first is not None and second is not None:
            changes = [told for headline in HEADLINES if (told := change(headline, first, second)) is not None]
            changes = [told for told in changes if every or told.kind or told.before != told.after]
            if changes:
                found[model] = changes
    return found


@dataclass(frozen=True)
class Rebuilt:
    """A stage that two runs have differently."""

    stage: str
    keys: tuple[str, str]  # work keys; "" where a run has not built it
    why: list[str]


def stages(before: Run, after: Run) -> list[Rebuilt]:
    """The stages of either run whose work keys differ, with what made them differ, in pipeline order."""
    found = []
    for name in list(dict.fromkeys([*after.stages, *before.stages])):
        first, second = before.stages.get(name), after.stages.get(name)
        keys = tuple(side["lineage"].get("key", "") if side else "" for side in (first, second))
        if keys[0] == keys[1]:
            continue
        if first is None or second is None:
            why = ["built only " + ("after" if first is None else "before")]
        else:
            why = _reasons(first, second, after)
        found.append(Rebuilt(name, (keys[0], keys[1]), why))
    return found


def _reasons(first: dict[str, Any], second: dict[str, Any], run: Run) -> list[str]:
    old, new = (flat(side.get("params", {})) for side in (first, second))
    why = [
        f"{name.replace(' / ', '.')}: {old.get(name, 'absent')} → {new.get(name, 'absent')}"
        for name in list(dict.fromkeys([*new, *old]))
        if old.get(name, "absent") != new.get(name, "absent")
    ]
    if first["lineage"].get("code") != second["lineage"].get("code"):
        why.append("its code")
    before, after = (side["lineage"].get("inputs", {}) for side in (first, second))
    for path in sorted({*before, *after}):
        if before.get(path) != after.get(path):
            made_by = maker(path, run.stages)
            why.append(f"what it reads from {made_by}" if made_by else f"the contents of {path}")
    return why or ["a parameter that its metrics do not name"]
