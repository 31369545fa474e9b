"""How much results depend on the training seed: the same measures over several runs that differ only in `seed`.

    python benchmarks/seeds.py RUN RUN [RUN ...] [--out benchmarks/results/seeds.json]

A RUN is a metrics folder, a commit, branch, tag or experiment, or `workspace`. For three runs, use `dvc exp run -S
seed=1` and `-S seed=2` in addition to the current run. Prints a Markdown table and writes the same numbers as JSON. The
rows are each model's headlines, their differences from those of the model it is compared with, and the report's claims.
The columns:

    mean, range      over the runs
    95% over items   would other items of the same kind give the same result? A bootstrap over items of the mean over
                     runs; for a number that is not a sum over items, the mean of the runs' own intervals (marked *),
                     which is not narrower
    95% over seeds   would other seeds give the same result? mean +- t s / sqrt(n), Student's t with n - 1 degrees of
                     freedom

The stages' own measurements (the claims) are over items that each stage chose; a search for frontier problems may
choose different items for each seed. Runs with different data, items or parameters are refused with the reason;
different code is noted. Not guaranteed: a reliable estimate of the spread from three seeds (its interval assumes that
values over seeds are normal), or an interval that covers both sources of chance.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.evaluation.intervals import paired_difference, ratio
from pipeline.report import baseline, claims, metrics
from pipeline.report.claims import Measured
from pipeline.report.compare import table
from pipeline.report.metrics import HEADLINES, Headline, MetricsRun, flat, lookup
from pipeline.run.device import generator
from pipeline.run.errors import InputError, StagecoachError

# Student's t, 97.5%, for 2 to 10 runs: 1 to 9 degrees of freedom
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
TAUGHT = "data/taught"  # a teacher's answers: a result of training, like models/, not data of the run
Columns = tuple[list[float], list[float]]  # each item's contribution to the numerator and the denominator


@dataclass(frozen=True)
class Spread:
    """One number over the runs."""

    model: str
    measure: str
    unit: str
    values: list[float]  # in the order of the runs
    mean: float
    lowest: float
    highest: float
    items: list[float] | None  # 95% over items: low, high; None: some run has none
    pooled: bool  # the interval over items is a bootstrap of the mean over runs, not the mean of the runs' own
    seeds: list[float]  # 95% over training seeds
    n: int  # items; 0: unknown

    def shown(self, value: float) -> str:
        """The value, formatted."""
        if self.unit in ("share", "points"):
            return f"{100 * value:+.1f} points" if self.unit == "points" else f"{100 * value:.1f}%"
        return f"{value:+.3f}" if self.unit == "difference" else f"{value:.3f}"

    def row(self) -> list[str]:
        """The row in the table."""
        items = (
            "–"
            if self.items is None
            else f"{self.shown(self.items[0])} to {self.shown(self.items[1])}{'' if self.pooled else ' *'}"
        )
        return [
            self.model,
            self.measure,
            ", ".join(map(self.shown, self.values)),
            self.shown(self.mean),
            f"{self.shown(self.lowest)} to {self.shown(self.highest)}",
            items,
            f"{self.shown(self.seeds[0])} to {self.shown(self.seeds[1])}",
            str(self.n or "–"),
        ]


def over_seeds(values: Sequence[float]) -> tuple[float, float]:
    """95% interval of the mean of independent, normal values by Student's t. Raises InputError unless there are 2 to
    10.
    """
    if len(values) not in STUDENT:
        raise InputError(f"expected 2 to 10 runs, found {len(values)}")
    mean = statistics.fmean(values)
    half = STUDENT[len(values)] * statistics.stdev(values) / sqrt(len(values))
    return mean - half, mean + half


def spread(
    model: str, measure: str, unit: str, values: list[float], items: tuple[float, float] | None, pooled: bool, n: int
) -> Spread:
    """The mean, range and interval over seeds of values; intervals of shares are clipped to [0, 1]."""
    low, high = over_seeds(values)
    if unit == "share":
        low, high = max(0.0, low), min(1.0, high)
    return Spread(
        model,
        measure,
        unit,
        values,
        statistics.fmean(values),
        min(values),
        max(values),
        list(items) if items else None,
        pooled,
        [low, high],
        n,
    )


def trained_with(name: str, one: MetricsRun) -> int:
    """The training seed of a run. Raises InputError if its stages have none, or more than one."""
    found = {stage: told["params"]["seed"] for stage, told in one.stages.items() if "seed" in told.get("params", {})}
    if len(set(found.values())) != 1:
        told = ", ".join(f"{stage} {seed}" for stage, seed in found.items()) or "none"
        raise InputError(f"{name}: expected stages trained with one seed, found {told}; build the run with dvc repro")
    return next(iter(found.values()))


def check(names: Sequence[str], runs: Sequence[MetricsRun]) -> list[int]:
    """The runs' seeds. Raises InputError if two are equal, or if runs differ in data or in a parameter other than the
    seed.
    """
    seeds = [trained_with(name, one) for name, one in zip(names, runs, strict=True)]
    for place, seed in enumerate(seeds):
        if seed in seeds[:place]:
            raise InputError(
                f"{names[seeds.index(seed)]} and {names[place]} were both trained with seed {seed}; expected a"
                " different seed for each run"
            )
    for name, other in zip(names[1:], runs[1:], strict=True):
        faults = _other_data(runs[0], other) or _other_parameters(runs[0], other)
        if faults:
            more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
            raise InputError(
                f"{names[0]} and {name} differ in more than the training seed: {'; '.join(faults[:5])}{more}"
            )
    return seeds


def _other_data(first: MetricsRun, second: MetricsRun) -> list[str]:
    """Descriptions of the data that differ between the two runs."""
    found: dict[str, None] = {}  # in order, once each
    for kind in ("stages", "evaluations"):
        ours, theirs = getattr(first, kind), getattr(second, kind)
        for name in ours.keys() & theirs.keys():
            seeds = [_data_seed(side[name]) for side in (ours, theirs)]
            if seeds[0] != seeds[1]:
                return [f"data_seed {seeds[0]} and {seeds[1]}"]
            digests = [side[name]["lineage"].get("inputs", {}) for side in (ours, theirs)]
            for path in sorted({path for side in digests for path in side if path.startswith("data/")} - {TAUGHT}):
                values = [side.get(path, "absent") for side in digests]
                if values[0] != values[1]:
                    found[f"{path} is {values[0]} and {values[1]}"] = None
    return sorted(found)


def _data_seed(told: dict[str, Any]) -> Any:
    return told.get("params", {}).get("data_seed", told.get("settings", {}).get("data_seed"))


def _other_parameters(first: MetricsRun, second: MetricsRun) -> list[str]:
    """The parameters, other than the seed, that differ between the stages and evaluations of the two runs."""
    found = []
    for kind, block in (("stages", "params"), ("evaluations", "settings")):
        ours, theirs = getattr(first, kind), getattr(second, kind)
        for name in (one for one in ours if one in theirs):
            sides = [flat(side[name].get(block, {})) for side in (ours, theirs)]
            for key in sorted(sides[0].keys() | sides[1].keys()):
                values = [side.get(key, "absent") for side in sides]
                if key != "seed" and values[0] != values[1]:
                    what = name if kind == "stages" else f"evaluation of {name}"
                    found.append(f"{what}: {key.replace(' / ', '.')} {values[0]} and {values[1]}")
    return found


def headlines(names: Sequence[str], runs: Sequence[MetricsRun]) -> list[Spread]:
    """Each headline of the models that all runs have. Raises InputError if runs were measured on different items."""
    found = []
    for model in common_models(runs):
        sides = [side for one in runs if (side := claims.of_model(one, model))]
        for headline in HEADLINES:
            told = [lookup(side.numbers, headline) for side in sides]
            values = [one["value"] for one in told if one]
            if len(values) < len(sides):
                continue
            columns = same_items(names, model, headline, sides)
            n = len(headline.items(sides[0].rows))
            if columns:
                mean = [statistics.fmean(tops) for tops in zip(*(tops for tops, _ in columns), strict=True)]
                # without denominators, `ratio` uses Wilson's bounds for 0 of n and n of n
                bottoms = None if set(columns[0][1]) == {1.0} else columns[0][1]
                draws = ratio(mean, bottoms, generator=generator("seeds", headline.key), resamples=10_000)
                interval = draws.low, draws.high
            else:
                interval = own_intervals([(one.get("low"), one.get("high")) for one in told if one])
            found.append(spread(model, headline.title, headline.unit, values, interval, bool(columns), n))
    return found


def own_intervals(told: Sequence[tuple[float | None, float | None]]) -> tuple[float, float] | None:
    """The mean of the runs' own intervals over items; None if a run has no interval."""
    lows, highs = [low for low, _ in told if low is not None], [high for _, high in told if high is not None]
    return (statistics.fmean(lows), statistics.fmean(highs)) if len(lows) == len(highs) == len(told) else None


def common_models(runs: Sequence[MetricsRun]) -> list[str]:
    """The models that every run has evaluated."""
    return [model for model in runs[0].evaluations if all(model in one.evaluations for one in runs)]


def same_items(names: Sequence[str], model: str, headline: Headline, sides: Sequence[Measured]) -> list[Columns]:
    """What each item contributes to a headline in each run, in the same order; empty if the number is not a sum over
    items. Raises InputError.
    """
    rows = [headline.items(side.rows) for side in sides]
    for name, mine in zip(names[1:], rows[1:], strict=True):
        alone = [str(row["id"]) for item, row in (rows[0] | mine).items() if not (item in rows[0] and item in mine)]
        if alone:
            raise InputError(
                f"{names[0]} and {name} measured on different items: {headline.title} of {model}: {len(rows[0])} and"
                f" {len(mine)} items, only in one run: {', '.join(alone[:3])}{', ...' if len(alone) > 3 else ''}"
            )
    if headline.rows is None or not rows[0]:
        return []
    pairs = [[headline.counted(mine[item]) for item in rows[0]] for mine in rows]
    return [([top for top, _ in one], [bottom for _, bottom in one]) for one in pairs]


def changes(names: Sequence[str], runs: Sequence[MetricsRun]) -> list[Spread]:
    """Each headline's difference from the model it is compared with, if it is a sum over items of both."""
    found = []
    for model, base in runs[0].bases.items():
        if not all(one.bases.get(model) == base for one in runs):
            continue
        pairs = [(claims.of_model(one, base), claims.of_model(one, model)) for one in runs]
        befores, afters = [b for b, _ in pairs if b], [a for _, a in pairs if a]
        for headline in HEADLINES:
            told = [claims.change(headline, b, a) for b, a in zip(befores, afters, strict=True)]
            values = [one.after - one.before for one in told if one and one.low is not None]
            first, second = (
                same_items(names, name, headline, sides) for name, sides in ((base, befores), (model, afters))
            )
            if len(values) < len(runs) or not (first and second) or len(first[0][0]) != len(second[0][0]):
                continue
            order = list(headline.items(befores[0].rows))
            places = [list(headline.items(afters[0].rows)).index(item) for item in order]
            before, after = _mean(first), _mean(second)
            drawn = paired_difference(
                before,
                ([after[0][n] for n in places], [after[1][n] for n in places]),
                generator=generator("seeds", base, headline.key),
            )
            unit = "points" if headline.unit == "share" else "difference"
            measure = f"{headline.title}, less {base}"
            found.append(spread(model, measure, unit, values, (drawn.low, drawn.high), True, drawn.n))
    return found


def _mean(columns: Sequence[Columns]) -> Columns:
    tops = [statistics.fmean(values) for values in zip(*(tops for tops, _ in columns), strict=True)]
    return tops, columns[0][1]


def claimed(runs: Sequence[MetricsRun]) -> list[Spread]:
    """The measurements by stages that the report's claims rely on: gains of reinforcement learning, pairs ranked
    correctly.
    """
    found = []
    for title, stage, path, _ in claims.above():
        told = [place for one in runs if (place := _at(one.stages.get(stage, {}), path)) is not None]
        if len(told) == len(runs):
            interval = own_intervals([(low, high) for _, low, high in told])
            found.append(spread(stage, title, "number", [value for value, _, _ in told], interval, False, 0))
    return found


def _at(numbers: dict[str, Any], path: tuple[str, ...]) -> tuple[float, float | None, float | None] | None:
    place: Any = numbers
    for key in path[:-1]:
        place = place.get(key, {})
    value, low, high = (place.get(f"{path[-1]}{end}") for end in ("", "_low", "_high"))
    return (float(value), low, high) if isinstance(value, int | float) else None


def notes(names: Sequence[str], runs: Sequence[MetricsRun]) -> list[str]:
    """Notes for the table: models that not all runs have, code that differs."""
    found = []
    models = dict.fromkeys(model for one in runs for model in one.evaluations)
    for model in models:
        missing = [name for name, one in zip(names, runs, strict=True) if model not in one.evaluations]
        if missing:
            found.append(f"{model} is left out: not evaluated in {', '.join(missing)}")
    other = [stage for stage in runs[0].stages if len({_code(one, stage) for one in runs if stage in one.stages}) > 1]
    if other:
        found.append(f"the code of these stages differs between the runs: {', '.join(other)}")
    return found


def _code(one: MetricsRun, stage: str) -> str:
    return one.stages[stage]["lineage"].get("code", "")


def measured(names: Sequence[str], runs: Sequence[MetricsRun]) -> dict[str, Any]:
    """All results. Raises InputError."""
    seeds = check(names, runs)
    rows = [*headlines(names, runs), *changes(names, runs), *claimed(runs)]
    if not rows:
        raise InputError("no model was evaluated in all runs; build the runs with dvc repro")
    return {
        "runs": dict(zip(names, seeds, strict=True)),
        "notes": notes(names, runs),
        "student_t": STUDENT[len(runs)],
        "rows": rows,
    }


def markdown(found: dict[str, Any]) -> str:
    """The table, followed by its notes."""
    head = [
        "model",
        "measure",
        f"seeds {', '.join(str(seed) for seed in found['runs'].values())}",
        "mean",
        "range",
        "95% over items",
        "95% over seeds",
        "items",
    ]
    foot = (
        ["\\* the mean of the runs' own intervals"]
        if any(not row.pooled and row.items for row in found["rows"])
        else []
    )
    return "\n\n".join([table(head, [row.row() for row in found["rows"]], True), *foot, *found["notes"]])


def taken(name: str) -> MetricsRun:
    """Load a run from its metrics folder or revision. Raises InputError."""
    return metrics.read(Path(name)) if Path(name).is_dir() else baseline.at(name)


def main(arguments: list[str]) -> int:
    """Measure, write and print the results. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a metrics folder, or a commit, branch, tag, experiment or `workspace`"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "seeds.json")
    chosen = parser.parse_args(arguments)
    try:
        found = measured(chosen.runs, [taken(name) for name in chosen.runs])
    except StagecoachError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    told = found | {"rows": [asdict(row) for row in found["rows"]]}
    chosen.out.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sys.stdout.write(markdown(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
