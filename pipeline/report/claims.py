"""Differences between two models or two runs, and whether they are significant; the claims that should hold for a run.

    change(headline, before, after)   the difference in a measure, by a paired bootstrap over the common items
    stages(before, after)             the stages whose code, parameters or inputs differ, and how
    claims(run)                       for example: a model is better than the one it was made from, a reward model
                                      ranks better than chance, exports match their model
    gates(run, gate)                  whether the deployed model may become champion
    alarms(run)                       alarms raised by reinforcement learning about its curves (rl/rollout.py)
    skipped(run)                      what was not measured, and why

Items are the same if their ids and question hashes match (for rows without hashes: if the data has the same digest).
If one model's items are a subset of the other's, the two are compared on the subset. Results on different items are not
compared; the `Change` records why. With fewer than 20 items, nothing is called better or worse. A measure that is not
a sum over items counts as better or worse if the two 95% intervals do not overlap, which is stricter. Intervals reflect
the choice of items, not of training seeds (benchmarks/seeds.py).

A claim holds if its 95% interval lies entirely on the claimed side; a claim that fails is shown as failed. Not
guaranteed: that a claim that holds here also holds for another seed (benchmarks/seeds.py compares runs with several
seeds).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeline import wings
from pipeline.evaluation.intervals import paired_difference
from pipeline.export import smoke
from pipeline.report.metrics import HEADLINES, Headline, MetricsRun, Row, flat, lookup, sections, stage_of_input
from pipeline.run.device import generator
from pipeline.run.types import JsonObject

RESAMPLES = 2000
FEWEST = 20  # items needed for a verdict: with fewer, bootstrap intervals are too narrow (evaluation/intervals.py)
DATA = {
    "text": "data/raw/text",
    "stories": "data/raw/text",
    "code": "data/raw/code",
    "problems": "data/problems",
    "requests": "data/problems",
    "tools": "data/dialogues",
    "facts": "data/facts",
    "reward": "data/preferences",
}
LIMITS = (
    "documents",
    "stories",
    "problems",
    "canvas_problems",
    "dialogues",
    "constrained",
    "fresh_seed",
)  # settings that select items
NAMED = 3  # item ids listed in a message


@dataclass(frozen=True)
class Measured:
    numbers: JsonObject
    rows: list[Row]

    @property
    def settings(self) -> JsonObject:
        return self.numbers.get("settings", {})

    @property
    def data_seed(self) -> int | None:
        """The data seed; older runs with a single seed have only `seed`."""
        return self.settings.get("data_seed", self.settings.get("seed"))

    def data(self, suite: str) -> str | None:
        """The digest of the data that the suite takes its items from."""
        return self.numbers.get("lineage", {}).get("inputs", {}).get(DATA.get(suite, ""))


@dataclass(frozen=True)
class Change:
    """The change in one measure: after - before."""

    headline: Headline
    before: float
    after: float
    low: float | None  # interval of the paired difference; None: not paired
    high: float | None
    items: int  # number of items common to both; 0: unknown
    kind: str  # better, worse, or "" if it is not significant or the uncertainty is unknown
    refused: str = ""  # why the two cannot be compared
    apart: str = ""  # the items that differ, if the two cannot be compared

    @property
    def few(self) -> bool:
        """Whether there are too few items for a verdict."""
        return 0 < self.items < FEWEST

    @property
    def shown(self) -> str:
        """The difference as text: `+1.5 points (−0.2 to 3.1)`."""
        if self.refused:
            return self.refused
        text = self.headline.show_change(self.after - self.before)
        if self.low is not None and self.high is not None:
            scale, digits = (100, 1) if self.headline.unit == "share" else (1, 3)
            low, high = (f"{scale * value:.{digits}f}".replace("-", "−") for value in (self.low, self.high))
            text = f"{text} ({low} to {high})"
        return f"{text}, too few items: {self.items}" if self.few else text


def of_model(run: MetricsRun, model: str) -> Measured | None:
    """The measurements of a model in a run; None if it was not evaluated."""
    numbers = run.evaluations.get(model)
    return None if numbers is None else Measured(numbers, run.items.get(model, []))


def change(headline: Headline, before: Measured, after: Measured) -> Change | None:
    """The difference in a measure; None if either side does not have it."""
    first, second = lookup(before.numbers, headline), lookup(after.numbers, headline)
    if first is None or second is None:
        return None
    old, new = headline.items(before.rows), headline.items(after.rows)
    common = [item for item in old if item in new]
    if not _same_items(headline, before, after, old, new, common):
        refused = f"measured on different items: {_why_items_differ(headline.suite, before, after)}"
        items = _compare_items(old, new)
        return Change(headline, first["value"], second["value"], None, None, 0, "", refused, items)
    if not (headline.rows and common):
        has_intervals = "low" in first and "low" in second
        sure = has_intervals and (second["low"] > first["high"] or second["high"] < first["low"])
        return _with_verdict(headline, (first["value"], second["value"]), (None, None), len(common), sure)
    columns = [[headline.counted(side[item]) for item in common] for side in (old, new)]
    sums = [([top for top, _ in column], [bottom for _, bottom in column]) for column in columns]
    difference = paired_difference(sums[0], sums[1], generator=generator("change", headline.key), resamples=RESAMPLES)
    values = first["value"], second["value"]
    if len(old) != len(new):  # only over the items of the smaller set
        values = sum(sums[0][0]) / sum(sums[0][1]), sum(sums[1][0]) / sum(sums[1][1])
    return _with_verdict(
        headline, values, (difference.low, difference.high), difference.n, difference.low > 0 or difference.high < 0
    )


def _with_verdict(
    headline: Headline, values: tuple[float, float], interval: tuple[float | None, float | None], items: int, sure: bool
) -> Change:
    kind = ("better" if (values[1] > values[0]) == headline.higher_is_better else "worse") if sure else ""
    result = Change(headline, *values, *interval, items, kind)
    return replace(result, kind="") if result.few else result


def _same_items(
    headline: Headline, before: Measured, after: Measured, old: dict[str, Row], new: dict[str, Row], common: list[str]
) -> bool:
    """Whether both were measured on the same items, or one on a subset of the other's."""
    hashed = all("item" in row for rows in (old, new) for row in rows.values()) and old and new
    if not hashed and before.data(headline.suite) != after.data(headline.suite):
        return False
    if not (old and new):  # runs without rows: their digests are equal
        return True
    is_part = len(common) == min(len(old), len(new))
    return is_part and (headline.rows is not None or len(old) == len(new))  # only sums can be computed on a subset


def _why_items_differ(suite: str, before: Measured, after: Measured) -> str:
    """Why two measurements of a suite have different items."""
    causes = []
    if before.data_seed != after.data_seed:
        causes.append(f"data_seed {before.data_seed} and {after.data_seed}")
    for key in LIMITS:
        values = [side.settings.get(key) for side in (before, after)]
        if values[0] != values[1]:
            causes.append(f"evaluate.{key} {values[0]} and {values[1]}")
    if not causes and before.data(suite) != after.data(suite):
        causes.append(f"different contents of {DATA.get(suite, 'the data')}")
    return "; ".join(causes) or "a different selection of the same data"


def _compare_items(old: dict[str, Row], new: dict[str, Row]) -> str:
    """`12 of 100 and 100 items are the same; only in one run: a, b, c, ...`; empty if a run has no rows."""
    if not (old and new):
        return ""
    alone = [str(row["id"]) for item, row in (old | new).items() if not (item in old and item in new)]
    num_same = sum(item in new for item in old)
    ids = ", ".join(list(dict.fromkeys(alone))[:NAMED]) + (", ..." if len(alone) > NAMED else "")
    text = f"{num_same} of {len(old)} and {len(new)} items are the same"
    return f"{text}; only in one run: {ids}" if alone else text


def measures(before: MetricsRun, after: MetricsRun, *, every: bool = False) -> dict[str, list[Change]]:
    """model -> the measures that moved between two runs (`every`: all of them), with models in the order of `after`."""
    moved = {}
    for model in after.evaluations:
        first, second = of_model(before, model), of_model(after, model)
        if first is not None and second is not None:
            changes = [c for headline in HEADLINES if (c := change(headline, first, second)) is not None]
            changes = [c for c in changes if every or c.kind or c.refused or c.before != c.after]
            if changes:
                moved[model] = changes
    return moved


@dataclass(frozen=True)
class Rebuilt:
    """A stage that differs between two runs."""

    stage: str
    keys: tuple[str, str]  # work keys; "" if a run did not build the stage
    why: list[str]


def stages(before: MetricsRun, after: MetricsRun) -> list[Rebuilt]:
    """The stages of either run whose work keys differ, with the causes, in pipeline order."""
    rebuilt = []
    for name in list(dict.fromkeys([*after.stages, *before.stages])):
        first, second = before.stages.get(name), after.stages.get(name)
        keys = tuple(side["lineage"].get("key", "") if side else "" for side in (first, second))
        if keys[0] == keys[1]:
            continue
        if first is None or second is None:
            why = ["built only in the " + ("second run" if first is None else "first run")]
        else:
            why = _causes(first, second, after)
        rebuilt.append(Rebuilt(name, (keys[0], keys[1]), why))
    return rebuilt


def _causes(first: JsonObject, second: JsonObject, run: MetricsRun) -> list[str]:
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
            stage = stage_of_input(path, run.stages)
            why.append(f"its inputs from {stage}" if stage else f"the contents of {path}")
    return list(dict.fromkeys(why)) or ["a parameter that its metrics do not list"]


def packages(before: MetricsRun, after: MetricsRun) -> list[str]:
    """The packages that affect results and whose versions differ between the two runs' lineages: `torch: 2.13.0 →
    2.14.0 (language, code)`.
    """
    stages_by_change: dict[str, list[str]] = {}
    for name in after.stages:
        sides = [run.stages.get(name, {}).get("lineage", {}).get("versions", {}) for run in (before, after)]
        for package in sides[0].keys() & sides[1].keys():
            if sides[0][package] != sides[1][package]:
                stages_by_change.setdefault(f"{package}: {sides[0][package]} → {sides[1][package]}", []).append(name)
    return [f"{text} ({', '.join(stages)})" for text, stages in sorted(stages_by_change.items())]


# -- claims ------------------------------------------------------------------------------------------------------------


HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "not measured"
NOT_SHOWN = "not shown"  # the interval contains both outcomes
UNDECIDED = "no verdict"  # the two sides have different items, or too few
# measure, the better model, the model it is compared with, title
BETTER = (
    ("code_bpb", "code", "language", "Training on code lowers the bits per byte of code"),
    ("ast", "tools", "code", "Fine-tuning teaches tool calls"),
    ("easy", "tools", "code", "Fine-tuning teaches answering with programs"),
    ("medium", "grpo", "tools", "GRPO solves more unseen compositions than its base model"),
)
# title, stage, path of the measure, the value that the lower end of its interval must exceed
ABOVE = (
    ("The reward model ranks better than chance", "reward", ("test", "accuracy"), 0.5),
    ("DPO's implicit rewards rank held-out pairs better than chance", "dpo", ("test", "accuracy"), 0.5),
    ("KTO's implicit rewards rank held-out pairs better than chance", "kto", ("pairs", "accuracy"), 0.5),
    ("Reinforcement learning from the reward model raises the true score", "rlhf", ("held_out", "gain"), 0.0),
    ("An adapter learns a new skill from a few examples", "lora", ("exact_match", "adapter", "accuracy"), 0.5),
    ("GRPO raises pass@1 on held-out problems", "grpo", ("held_out", "gain"), 0.0),
    ("A student taught by another model solves more held-out problems", "distill", ("held_out", "gain"), 0.0),
)


@dataclass(frozen=True)
class Claim:
    """A claim, its measurement and its state."""

    title: str
    measured: str
    state: str  # HOLDS, FAILS, NOT_SHOWN, UNKNOWN or UNDECIDED


def claims(run: MetricsRun) -> list[Claim]:
    """All claims, in pipeline order of the models."""
    of_wings = [claim for offer in wings.each("claims") for claim in offer(run)]
    return [*_comparisons(run), *_thresholds(run), *_export_claim(run), *of_wings]


def better() -> list[tuple[str, str, str, str]]:
    """BETTER, plus the wings' rows."""
    return [*BETTER, *(row for section in sections() for row in section.BETTER)]


def above() -> list[tuple[str, str, tuple[str, ...], float]]:
    """ABOVE, plus the wings' rows."""
    return [*ABOVE, *(row for section in sections() for row in section.ABOVE)]


def _comparisons(run: MetricsRun) -> Iterator[Claim]:
    by_key = {headline.key: headline for headline in HEADLINES}
    for key, model, base, title in better():
        before, after = of_model(run, base), of_model(run, model)
        difference = change(by_key[key], before, after) if before and after else None
        if difference is None:
            yield Claim(title, "", UNKNOWN)
            continue
        show = difference.headline.show
        text = f"{model} {show(difference.after)}, {base} {show(difference.before)}: {difference.shown}"
        state = {"better": HOLDS, "worse": FAILS}.get(difference.kind, NOT_SHOWN)
        yield Claim(title, text, UNDECIDED if difference.refused or difference.few else state)


def _thresholds(run: MetricsRun) -> Iterator[Claim]:
    for title, stage, path, least in above():
        parent = run.stages.get(stage, {})
        for key in path[:-1]:
            parent = parent.get(key, {})
        measured = [parent.get(f"{path[-1]}{end}") for end in ("", "_low", "_high")]
        numbers = [number for number in measured if isinstance(number, int | float)]
        if len(numbers) < len(measured):
            yield Claim(title, "", UNKNOWN)
            continue
        value, low, high = numbers
        text = f"{value:.3f} ({low:.3f} to {high:.3f}), claimed: more than {least:g}"
        yield Claim(title, text, HOLDS if low > least else NOT_SHOWN if high > least else FAILS)


def _export_claim(run: MetricsRun) -> Iterator[Claim]:
    title = "Every export matches the model that was evaluated, up to the rounding of its format"
    if not (parity := run.stages.get("deploy", {}).get("parity")):
        yield Claim(title, "", UNKNOWN)
        return
    faults = [f"{kind}: {fault}" for kind, result in parity.items() for fault in smoke.faults(result, kind)]
    distances = ", ".join(f"{kind} {result.get('divergence', 0.0):.1e}" for kind, result in parity.items())
    text = "; ".join(faults) or f"mean divergence in nats per token: {distances}"
    yield Claim(title, text, FAILS if faults else HOLDS)


def gates(run: MetricsRun, gate: dict[str, float]) -> list[Claim]:
    """Whether the deployed model reaches each target in `report.gate`, judged by the worse end of the interval."""
    by_key = {headline.key: headline for headline in HEADLINES}
    model = str(run.stages.get("deploy", {}).get("model", ""))
    claims = []
    for key, least in gate.items():
        headline, measured = by_key[key], lookup(run.evaluations.get(model, {}), by_key[key])
        title = (
            f"{headline.title} of {model or 'the deployed model'}: at"
            f" {'least' if headline.higher_is_better else 'most'} {headline.show(least)}"
        )
        if measured is None:
            claims.append(Claim(title, "", UNKNOWN))
            continue
        worst = measured.get("low" if headline.higher_is_better else "high", measured["value"])
        reached = worst >= least if headline.higher_is_better else worst <= least
        claims.append(
            Claim(
                title,
                f"{headline.show(measured['value'])}, at worst {headline.show(worst)}",
                HOLDS if reached else FAILS,
            )
        )
    return claims


def alarms(run: MetricsRun) -> list[tuple[str, int, str]]:
    """(stage, step, name) of each alarm."""
    return [
        (name, int(step), alarm)
        for name, numbers in run.stages.items()
        for alarm, step in (numbers.get("alarms") or {}).items()
    ]


def skipped(run: MetricsRun) -> list[tuple[str, str, str]]:
    """(model, suite, reason) of each measurement that was skipped."""
    return [
        (model, name.removesuffix(" / skipped"), value)
        for model, numbers in run.evaluations.items()
        for name, value in flat(numbers).items()
        if isinstance(value, str) and value.startswith("skipped")
    ]
