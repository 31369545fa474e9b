"""The report card: one self-contained page over the metrics of a run.

    metrics/*.json, metrics/*.csv, metrics/eval/* (+ speed.json of the work directory, + metrics of report.baseline) ->
    reports/index.html

No script, no outside reference, no date: built twice it has equal bytes. jinja2 escapes everything, since what a model
wrote is hostile. Times come from the work directory by key, and are "built elsewhere" when a stage was restored from a
cache. A change is coloured only where chance does not explain it (report/claims.py). Not promised: other commits than
the one that `report.baseline` names (`make compare A=... B=...` compares any two).
"""

from pathlib import Path
from typing import Any

import jinja2

from pipeline.diffusion import report as diffusion_report
from pipeline.memory import report as memory_report
from pipeline.report import charts, claims
from pipeline.report import metrics as report_metrics
from pipeline.report.metrics import HEADLINES, Headline, Prices, Run, flat, lookup, read

LIKELIHOOD = ("language", "code", "tools", "lora")  # stages whose loss is nats per token


def curve(run: Run, column: str) -> list[charts.Series]:
    """A series per stage that learns to predict text and logged `column`; other losses have other units."""
    found = []
    for name, rows in run.curves.items():
        if name not in LIKELIHOOD:
            continue
        points = [(float(r["step"]), float(r[column])) for r in rows if r.get(column) not in (None, "", "not finite")]
        if points:
            found.append(charts.Series(name, points))
    return found


def figures(run: Run) -> list[dict[str, Any]]:
    """The charts with their titles and their numbers; each has axis names and units."""
    found: list[dict[str, Any]] = []
    for title, column, unit in (
        ("Training loss", "loss", "nats per token"),
        ("Validation", "val/bpb", "bits per byte"),
    ):
        series = curve(run, column)
        if series:
            svg = charts.lines(title, series, x="step", y=unit)
            found.append(
                {"title": title, "svg": svg, "head": ["step", *(s.name for s in series)], "rows": thinned(series)}
            )
    found += (
        alignment(run)
        + diffusion_report.figures(run.evaluations)
        + memory_report.figures(run.curves.get("memory", []), thinned)
    )
    for headline in HEADLINES:
        if not headline.chart:
            continue
        values = [
            charts.Bar(model, *(measured.get(k, measured["value"]) for k in ("value", "low", "high")))
            for model, numbers in run.evaluations.items()
            if (measured := lookup(numbers, headline)) is not None
        ]
        if len(values) > 1:
            rows = [[v.name, headline.show(v.value), headline.show(v.low), headline.show(v.high)] for v in values]
            svg = charts.bars(headline.title, values, x=headline.axis)
            found.append({"title": headline.title, "svg": svg, "head": ["model", "value", "low", "high"], "rows": rows})
    return found


def alignment(run: Run) -> list[dict[str, Any]]:
    """What reinforcement learning did: gold and proxy against the divergence, beside best-of-n; problems solved by
    step.
    """
    found = []
    line = run.stages.get("rlhf", {}).get("best_of_n") or []
    for title, column, unit in (
        ("Gold against divergence", "gold", "true score, 0 to 1"),
        ("Proxy against divergence", "proxy", "what training pays for"),
    ):
        points = [(float(r["kl"]), float(r[column])) for r in run.curves.get("rlhf", []) if _number(r, "kl", column)]
        series = [
            charts.Series("PPO", sorted(points)),
            charts.Series("best of n", [(r["kl"], r[column]) for r in line]),
        ]
        series = [one for one in series if one.points]
        if points:
            svg = charts.lines(title, series, x="divergence from the reference, nats an answer", y=unit)
            rows = [[one.name, f"{x:.3f}", f"{y:.4f}"] for one in series for x, y in one.points]
            found.append({"title": title, "svg": svg, "head": ["", "nats", column], "rows": rows})
    solved = [(float(r["step"]), float(r["gold"])) for r in run.curves.get("grpo", []) if _number(r, "step", "gold")]
    if solved:
        title = "Problems solved while training on executed code"
        svg = charts.lines(title, [charts.Series("grpo", solved)], x="step", y="pass@1 on held-out problems")
        rows = [[f"{step:.0f}", f"{value:.4f}"] for step, value in solved]
        found.append({"title": title, "svg": svg, "head": ["step", "pass@1"], "rows": rows})
    return found


def _number(row: dict[str, str], *names: str) -> bool:
    return all(row.get(name) not in (None, "", "not finite") for name in names)


def thinned(series: list[charts.Series], most: int = 24) -> list[list[str]]:
    """The points of line charts as rows of text: the step, a value per series, about `most` rows with first and
    last.
    """
    values = {one.name: dict(one.points) for one in series}
    steps = sorted({step for points in values.values() for step in points})
    chosen = [*steps[: -1 : max(1, len(steps) // most)], steps[-1]]
    return [[f"{step:.0f}", *(f"{p[step]:.4f}" if step in p else "" for p in values.values())] for step in chosen]


def table(run: Run) -> list[dict[str, Any]]:
    """A row per headline number: a cell per model, with interval and the change from the model that it is compared
    with.
    """
    rows = []
    for headline in HEADLINES:
        cells = []
        for model in run.evaluations:
            after, before = claims.of_model(run, model), claims.of_model(run, run.bases.get(model, ""))
            change = claims.change(headline, before, after) if before and after else None
            cells.append(_cell(headline, lookup(run.evaluations[model], headline), change))
        if any(cell["value"] != "–" for cell in cells):
            rows.append({"headline": headline, "cells": cells})
    return rows


def _cell(headline: Headline, measured: dict[str, float] | None, change: claims.Change | None) -> dict[str, str]:
    if measured is None:
        return {"value": "–", "interval": "", "change": "", "kind": ""}
    wide = "low" in measured and measured["low"] != measured["high"]
    interval = f"{headline.show(measured['low'])} to {headline.show(measured['high'])}" if wide else ""
    told = headline.show_change(change.after - change.before) if change else ""
    if change and change.refused:
        told = "other items"
    elif change and change.few:
        told += f", too few items: {change.items}"
    return {
        "value": headline.show(measured["value"]),
        "interval": interval,
        "change": told,
        "kind": change.kind if change else "",
    }


def lineage(run: Run) -> list[dict[str, Any]]:
    """A row per stage: its work key, the hash of its code, what it was made from, its MLflow run where this machine
    has it.
    """
    known = {one.stage: one.mlflow for one in report_metrics.rows(run)}
    rows = []
    for name, numbers in run.stages.items():
        facts = numbers["lineage"]
        rows.append(
            {
                "stage": name,
                "key": facts.get("key", ""),
                "code": facts.get("code", ""),
                "inputs": facts.get("inputs", {}),
                "mlflow": known.get(name, ""),
            }
        )
    return rows


def spent(seconds: float | None) -> str:
    """A time as people read it: `14 s`, `3 min`, `1 h 20 min`."""
    if seconds is None:
        return ""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def picture(run: Run, spending: list[report_metrics.Cost], marked: frozenset[str]) -> str:
    """The graph with the time of each stage."""
    notes = {one.stage.replace("@", "_"): spent(one.speed.get("seconds")) for one in spending}
    return charts.svg(run, notes, marked)


def samples(run: Run, per_suite: int) -> list[dict[str, Any]]:
    """For a few fixed items, what each model answered."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for model, rows in run.items.items():
        count: dict[str, int] = {}
        for row in rows:
            suite = row["suite"]
            if not row.get("output") or count.get(suite, 0) >= per_suite:
                continue
            count[suite] = count.get(suite, 0) + 1
            entry = found.setdefault(
                (suite, str(row["id"])),
                {
                    "suite": suite,
                    "id": row["id"],
                    "prompt": row.get("prompt", ""),
                    "reference": row.get("reference", ""),
                    "answers": [],
                },
            )
            entry["answers"].append({"model": model, "output": row["output"], "verdict": row.get("verdict", "")})
    return list(found.values())


def render(
    metrics: Path,
    *,
    samples_each: int = 2,
    prices: Prices | None = None,
    gate: dict[str, float] | None = None,
    baseline: tuple[str, Run] | None = None,
) -> str:
    """The page. `baseline`: the name of another run and what was measured of it, which this one is compared with."""
    run = read(metrics)
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string((Path(__file__).parent / "card.html").read_text(encoding="utf-8"))
    spending = report_metrics.rows(run, prices)
    rebuilt = claims.stages(baseline[1], run) if baseline else []
    return template.render(
        run=run,
        table=table(run),
        figures=figures(run),
        lineage=lineage(run),
        costs=spending,
        total=report_metrics.total(spending),
        currency=prices.currency if prices else "",
        spent=spent,
        samples=samples(run, samples_each),
        graph=picture(run, spending, frozenset(one.stage for one in rebuilt)),
        claims=claims.claims(run),
        gates=claims.gates(run, gate or {}),
        alarms=claims.alarms(run),
        skipped=claims.skipped(run),
        baseline=baseline[0] if baseline else "",
        rebuilt=rebuilt,
        moved=claims.measures(baseline[1], run) if baseline else {},
        details={name: flat(numbers) for name, numbers in run.stages.items()},
        evaluations={name: flat(numbers) for name, numbers in run.evaluations.items()},
        traces=[diffusion_report.shown(model, trace) for model, trace in run.traces.items()],
        memories=[{"model": model} | memory_report.shown(told) for model, told in run.routes.items()],
    )
