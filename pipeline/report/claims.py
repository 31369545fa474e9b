"""What differs between two models, or between two runs, and whether it is more than chance.

    change(headline, before, after)    a measure's difference, by a paired bootstrap over items that both were asked
    stages(before, after)              which stages were built from something else, and from what

An item is the same where its id and the hash of what was asked are (in rows without hashes: where the data have the
same digest). Where one model was asked some of the other's items, the two are compared over these. Results over other
items are not compared: the difference gives the reason. Under 20 items nothing is called better or worse. A measure
that is no sum over items counts as moved where the two 95 % intervals do not overlap, which is stricter. Intervals
cover items, not training seeds (benchmarks/seeds.py).

What a run should show, each claim with what was measured, and what went wrong on the way.

    claims(run)    a model is better than what it was made from, a reward model ranks, exports answer as their model ...
    gates(run, gate)  whether the deployed model may be champion
    alarms(run)     what reinforcement learning said about its own curve (rl/alarms.py)
    skipped(run)    what was not measured, and why

A claim holds where its 95 % interval lies on the right side; a miss is shown as one. Not promised: that a claim that
holds here holds for another seed (benchmarks/seeds.py puts runs of several side by side).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.evaluation.intervals import paired_difference
from pipeline.report.metrics import HEADLINES, Headline, Row, Run, flat, lookup, maker
from pipeline.run.device import generator

RESAMPLES = 2000
FEWEST = 20  # items that a verdict takes: the bootstrap's intervals are too narrow below (evaluation/intervals.py)
DATA = {
    "text": "data/raw/text",
    "stories": "data/raw/text",
    "code": "data/raw/code",
    "problems": "data/problems",
    "tools": "data/dialogues",
    "facts": "data/facts",
    "reward": "data/preferences",
}
LIMITS = ("documents", "stories", "problems", "canvas_problems", "dialogues", "constrained")  # keys that choose items
NAMED = 3  # items


@dataclass(frozen=True)
class Measured:
    """What was measured of one model."""

    numbers: dict[str, Any]
    rows: list[Row]

    @property
    def settings(self) -> dict[str, Any]:
        """What it was measured with."""
        return self.numbers.get("settings", {})

    @property
    def data_seed(self) -> int | None:
        """Of the data that it was measured on; runs of the time when one seed was all have it as `seed`."""
        return self.settings.get("data_seed", self.settings.get("seed"))

    def data(self, suite: str) -> str | None:
        """The digest of the data from which the suite takes its items."""
        return self.numbers.get("lineage", {}).get("inputs", {}).get(DATA.get(suite, ""))


@dataclass(frozen=True)
class Change:
    """A difference of one measure: after - before."""

    headline: Headline
    before: float
    after: float
    low: float | None  # of the difference, paired; None: not paired
    high: float | None
    items: int  # that both were asked; 0: the files do not say
    kind: str  # better, worse, or "" where chance explains it or nothing says how sure the numbers are
    refused: str = ""  # why the two cannot be compared
    apart: str = ""  # which items are not the same, where they are refused

    @property
    def few(self) -> bool:
        """Whether there are too few items for a verdict."""
        return 0 < self.items < FEWEST

    @property
    def shown(self) -> str:
        """As people read it: `+1.5 points (−0.2 to 3.1)`."""
        if self.refused:
            return self.refused
        told = self.headline.show_change(self.after - self.before)
        if self.low is not None and self.high is not None:
            scale, digits = (100, 1) if self.headline.unit == "share" else (1, 3)
            low, high = (f"{scale * value:.{digits}f}".replace("-", "−") for value in (self.low, self.high))
            told = f"{told} ({low} to {high})"
        return f"{told}, too few items: {self.items}" if self.few else told


def of_model(run: Run, model: str) -> Measured | None:
    """What a run measured of a model; None where it was not evaluated."""
    numbers = run.evaluations.get(model)
    return None if numbers is None else Measured(numbers, run.items.get(model, []))


def change(headline: Headline, before: Measured, after: Measured) -> Change | None:
    """The difference of a measure; None where one of the two has no such number."""
    first, second = lookup(before.numbers, headline), lookup(after.numbers, headline)
    if first is None or second is None:
        return None
    ours, theirs = headline.items(before.rows), headline.items(after.rows)
    common = [item for item in ours if item in theirs]
    if not _same(headline, before, after, ours, theirs, common):
        refused = f"measured over other items: {reason(headline.suite, before, after)}"
        return Change(headline, first["value"], second["value"], None, None, 0, "", refused, _apart(ours, theirs))
    if not (headline.rows and common):
        known = "low" in first and "low" in second
        sure = known and (second["low"] > first["high"] or second["high"] < first["low"])
        return _judged(headline, (first["value"], second["value"]), (None, None), len(common), sure)
    columns = [[headline.counted(side[item]) for item in common] for side in (ours, theirs)]
    split = [([top for top, _ in column], [bottom for _, bottom in column]) for column in columns]
    found = paired_difference(split[0], split[1], generator=generator("change", headline.key), resamples=RESAMPLES)
    values = first["value"], second["value"]
    if len(ours) != len(theirs):  # the numbers of the smaller set's items alone
        values = sum(split[0][0]) / sum(split[0][1]), sum(split[1][0]) / sum(split[1][1])
    return _judged(headline, values, (found.low, found.high), found.n, found.low > 0 or found.high < 0)


def _judged(
    headline: Headline, values: tuple[float, float], interval: tuple[float | None, float | None], items: int, sure: bool
) -> Change:
    kind = ("better" if (values[1] > values[0]) == headline.higher_is_better else "worse") if sure else ""
    found = Change(headline, *values, *interval, items, kind)
    return found if not found.few else Change(headline, *values, *interval, items, "")


def _same(
    headline: Headline,
    before: Measured,
    after: Measured,
    ours: dict[str, Row],
    theirs: dict[str, Row],
    common: list[str],
) -> bool:
    """Whether both were asked the same items, or one of them some of the other's."""
    hashed = all("item" in row for rows in (ours, theirs) for row in rows.values()) and ours and theirs
    if not hashed and before.data(headline.suite) != after.data(headline.suite):
        return False
    if not (ours and theirs):  # runs that kept no rows: the digests have said it
        return True
    part = len(common) == min(len(ours), len(theirs))
    return part and (headline.rows is not None or len(ours) == len(theirs))  # only sums can be had over a part


def reason(suite: str, before: Measured, after: Measured) -> str:
    """Why two measurements of a suite have other items."""
    why = []
    if before.data_seed != after.data_seed:
        why.append(f"data_seed {before.data_seed} and {after.data_seed}")
    for key in LIMITS:
        values = [side.settings.get(key) for side in (before, after)]
        if values[0] != values[1]:
            why.append(f"evaluate.{key} {values[0]} and {values[1]}")
    if not why and before.data(suite) != after.data(suite):
        why.append(f"other contents of {DATA.get(suite, 'the data')}")
    return "; ".join(why) or "another choice of the same data"


def _apart(ours: dict[str, Row], theirs: dict[str, Row]) -> str:
    """`12 of 100 and 100 are the same; in one alone: a, b, c, ...`; empty where a run kept no rows."""
    if not (ours and theirs):
        return ""
    alone = [str(row["id"]) for item, row in (ours | theirs).items() if not (item in ours and item in theirs)]
    same = sum(item in theirs for item in ours)
    named = ", ".join(list(dict.fromkeys(alone))[:NAMED]) + (", ..." if len(alone) > NAMED else "")
    told = f"{same} of {len(ours)} and {len(theirs)} are the same"
    return f"{told}; in one alone: {named}" if alone else told


def measures(before: Run, after: Run, *, every: bool = False) -> dict[str, list[Change]]:
    """model -> the measures that moved between two runs (`every`: all), models in the order of `after`."""
    found = {}
    for model in after.evaluations:
        first, second = of_model(before, model), of_model(after, model)
        if first is not None and second is not None:
            changes = [told for headline in HEADLINES if (told := change(headline, first, second)) is not None]
            changes = [told for told in changes if every or told.kind or told.refused or told.before != told.after]
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
    return list(dict.fromkeys(why)) or ["a parameter that its metrics do not name"]


def packages(before: Run, after: Run) -> list[str]:
    """The packages that compute, of which both runs have told versions and these differ: `torch: 2.13.0 → 2.14.0
    (language, code)`.
    """
    found: dict[str, list[str]] = {}
    for name in after.stages:
        sides = [run.stages.get(name, {}).get("lineage", {}).get("versions", {}) for run in (before, after)]
        for package in sides[0].keys() & sides[1].keys():
            if sides[0][package] != sides[1][package]:
                found.setdefault(f"{package}: {sides[0][package]} → {sides[1][package]}", []).append(name)
    return [f"{told} ({', '.join(stages)})" for told, stages in sorted(found.items())]


# -- claims ------------------------------------------------------------------------------------------------------------


HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "not measured"
UNDECIDED = "no verdict"  # the two sides were asked other items, or too few
# a measure, the model that should be better at it, and than which
BETTER = (
    ("code_bpb", "code", "language", "Learning code lowers the bits per byte of code"),
    ("ast", "tools", "code", "Fine-tuning teaches tool calls"),
    ("easy", "tools", "code", "Fine-tuning teaches answering with programs"),
    ("medium", "grpo", "tools", "GRPO solves more unseen compositions than its start"),
    ("facts", "memory", "code", "A memory knows more facts than the model beside which it stands"),
    ("facts", "memory", "memory_baseline", "A memory knows more facts than as many weights in a wider model"),
)
# title, stage, path of an interval's lower end, what it must be above
ABOVE = (
    ("The reward model ranks better than chance", "reward", ("test", "accuracy"), 0.5),
    ("DPO tells held-out pairs apart, against its start", "dpo", ("test", "accuracy"), 0.5),
    ("PPO raises the true score of held-out answers", "rlhf", ("held_out", "gain"), 0.0),
    ("GRPO raises pass@1 on held-out problems", "grpo", ("held_out", "gain"), 0.0),
    ("Diffusion-DPO tells more held-out pairs apart than its start", "diffusion_dpo", ("test", "gain"), 0.0),
    ("Coupled-GRPO raises pass@1 on held-out problems", "diffusion_grpo", ("held_out", "gain"), 0.0),
)


@dataclass(frozen=True)
class Claim:
    """A claim and what was measured."""

    title: str
    measured: str
    state: str  # HOLDS, FAILS, UNKNOWN or UNDECIDED


def claims(run: Run) -> list[Claim]:
    """All of them, in pipeline order of their models."""
    return [*_better(run), *_above(run), *_exports(run), *_chapters(run)]


def _better(run: Run) -> Iterator[Claim]:
    by_key = {headline.key: headline for headline in HEADLINES}
    for key, model, base, title in BETTER:
        before, after = of_model(run, base), of_model(run, model)
        told = change(by_key[key], before, after) if before and after else None
        if told is None:
            yield Claim(title, "", UNKNOWN)
            continue
        show = told.headline.show
        text = f"{model} {show(told.after)}, {base} {show(told.before)}: {told.shown}"
        judged = HOLDS if told.kind == "better" else FAILS
        yield Claim(title, text, UNDECIDED if told.refused or told.few else judged)


def _above(run: Run) -> Iterator[Claim]:
    for title, stage, path, least in ABOVE:
        place: Any = run.stages.get(stage, {})
        for key in path[:-1]:
            place = place.get(key, {})
        value, low, high = (place.get(f"{path[-1]}{end}") for end in ("", "_low", "_high"))
        if not all(isinstance(number, int | float) for number in (value, low, high)):
            yield Claim(title, "", UNKNOWN)
            continue
        text = f"{value:.3f} ({low:.3f} to {high:.3f}), more than {least:g} is claimed"
        yield Claim(title, text, HOLDS if low > least else FAILS)


def _exports(run: Run) -> Iterator[Claim]:
    title, parity = "Every export answers as the model that was evaluated", run.stages.get("deploy", {}).get("parity")
    if not parity:
        yield Claim(title, "", UNKNOWN)
        return
    told = ", ".join(f"{kind} {one['greedy_equal']} of {one['greedy_tokens']} tokens" for kind, one in parity.items())
    exact = all(one["greedy_equal"] == one["greedy_tokens"] for one in parity.values())
    yield Claim(title, told, HOLDS if exact else FAILS)


def _chapters(run: Run) -> Iterator[Claim]:
    title, router = "No chapter of the memory is dead", run.stages.get("memory", {}).get("router")
    unused = {name: n for name, n in flat(router or {}).items() if name.endswith("chapters_unused")}
    if not unused:
        yield Claim(title, "", UNKNOWN)
        return
    told = ", ".join(f"{n:g}" for n in unused.values())
    yield Claim(title, f"never chosen, by layer: {told}", FAILS if any(unused.values()) else HOLDS)


def gates(run: Run, gate: dict[str, float]) -> list[Claim]:
    """What the deployed model must reach to be champion (`report.gate`), by the worse end of each interval."""
    by_key = {headline.key: headline for headline in HEADLINES}
    model = str(run.stages.get("deploy", {}).get("model", ""))
    found = []
    for key, least in gate.items():
        headline, measured = by_key[key], lookup(run.evaluations.get(model, {}), by_key[key])
        title = (
            f"{headline.title} of {model or 'the deployed model'}: at"
            f" {'least' if headline.higher_is_better else 'most'} {headline.show(least)}"
        )
        if measured is None:
            found.append(Claim(title, "", UNKNOWN))
            continue
        worst = measured.get("low" if headline.higher_is_better else "high", measured["value"])
        reached = worst >= least if headline.higher_is_better else worst <= least
        found.append(
            Claim(
                title,
                f"{headline.show(measured['value'])}, at worst {headline.show(worst)}",
                HOLDS if reached else FAILS,
            )
        )
    return found


def alarms(run: Run) -> list[tuple[str, int, str]]:
    """(stage, step, what) of each alarm."""
    return [
        (name, int(step), what)
        for name, numbers in run.stages.items()
        for what, step in (numbers.get("alarms") or {}).items()
    ]


def skipped(run: Run) -> list[tuple[str, str, str]]:
    """(model, suite, reason) of each measurement that was left out."""
    return [
        (model, name.removesuffix(" / skipped"), value)
        for model, numbers in run.evaluations.items()
        for name, value in flat(numbers).items()
        if isinstance(value, str) and value.startswith("skipped")
    ]
