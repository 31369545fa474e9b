"""The report card: one self-contained page over the metrics of a run.

    metrics/*.json, metrics/*.csv, metrics/eval/* (+ speed.json of the work directory, + metrics of report.baseline) ->
    reports/index.html

The page has no script, no external reference and no date: built twice it has equal bytes. jinja2 escapes everything,
since model outputs are untrusted. Times come from the work directory by work key, and are "built elsewhere" if a stage
was restored from a cache. A change is colored only if chance does not explain it (report/claims.py).

`python -m pipeline.report.card [metrics]` prints the table at the end of `make`: the models that were built and their
results on held-out data.

Not promised: other commits than the one of `report.baseline` (`make compare A=... B=...` compares any two).
"""

import sys
from pathlib import Path

import jinja2
from markupsafe import Markup

from pipeline.report import charts, claims, compare
from pipeline.report import metrics as report_metrics
from pipeline.report.metrics import HEADLINES, Cost, Headline, Prices, Run, flat, lookup, read
from pipeline.run.types import JsonObject

LIKELIHOOD = ("language", "code", "tools", "lora")  # stages whose loss is in nats per token
MODELS = 4  # columns of one text table; more are wider than a terminal


def _curve_series(run: Run, column: str) -> list[charts.Series]:
    """A series for each stage of LIKELIHOOD that logged `column`; other losses have other units."""
    series = []
    for name, rows in run.curves.items():
        if name not in LIKELIHOOD:
            continue
        points = [(float(r["step"]), float(r[column])) for r in rows if r.get(column) not in (None, "", "not finite")]
        if points:
            series.append(charts.Series(name, points))
    return series


def figures(run: Run) -> list[JsonObject]:
    """The charts, each a dict of `title`, `svg` and its numbers as a table, `head` and `rows`."""
    figures: list[JsonObject] = []
    for title, column, unit in (
        ("Training loss", "loss", "nats per token"),
        ("Validation", "val/bpb", "bits per byte"),
    ):
        series = _curve_series(run, column)
        if series:
            svg = charts.lines(title, series, x="step", y=unit)
            figures.append(
                {
                    "title": title,
                    "svg": svg,
                    "head": ["step", *(s.name for s in series)],
                    "rows": charts.thinned(series),
                }
            )
    figures += _reinforcement_figures(run)
    for section in report_metrics.sections():
        figures += section.figures(run)
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
            figures.append(
                {"title": headline.title, "svg": svg, "head": ["model", "value", "low", "high"], "rows": rows}
            )
    return figures


def _reinforcement_figures(run: Run) -> list[JsonObject]:
    """Gold and proxy against the divergence with the best-of-n curve; problems solved by step."""
    figures = []
    best_of_n = run.stages.get("rlhf", {}).get("best_of_n") or []
    for title, column, unit in (
        ("Gold against divergence", "gold", "true score, 0 to 1"),
        ("Proxy against divergence", "proxy", "what training pays for"),
    ):
        points = [
            (float(r["kl"]), float(r[column])) for r in run.curves.get("rlhf", []) if _has_numbers(r, "kl", column)
        ]
        series = [
            charts.Series("PPO", sorted(points)),
            charts.Series("best of n", [(r["kl"], r[column]) for r in best_of_n]),
        ]
        series = [line for line in series if line.points]
        if points:
            svg = charts.lines(title, series, x="divergence from the reference, nats an answer", y=unit)
            rows = [[line.name, f"{x:.3f}", f"{y:.4f}"] for line in series for x, y in line.points]
            figures.append({"title": title, "svg": svg, "head": ["", "nats", column], "rows": rows})
    solved = [
        (float(r["step"]), float(r["gold"])) for r in run.curves.get("grpo", []) if _has_numbers(r, "step", "gold")
    ]
    if solved:
        title = "Problems solved while training on executed code"
        svg = charts.lines(title, [charts.Series("grpo", solved)], x="step", y="pass@1 on held-out problems")
        rows = [[f"{step:.0f}", f"{value:.4f}"] for step, value in solved]
        figures.append({"title": title, "svg": svg, "head": ["step", "pass@1"], "rows": rows})
    return figures


def _has_numbers(row: dict[str, str], *names: str) -> bool:
    return all(row.get(name) not in (None, "", "not finite") for name in names)


def table(run: Run) -> list[JsonObject]:
    """A row per headline number with a cell per model: the value, its interval, the change from the model's base."""
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
    has_interval = "low" in measured and measured["low"] != measured["high"]
    interval = f"{headline.show(measured['low'])} to {headline.show(measured['high'])}" if has_interval else ""
    text = headline.show_change(change.after - change.before) if change else ""
    if change and change.refused:
        text = "other items"
    elif change and change.few:
        text += f", too few items: {change.items}"
    return {
        "value": headline.show(measured["value"]),
        "interval": interval,
        "change": text,
        "kind": change.kind if change else "",
    }


def _lineage(run: Run, costs: list[Cost]) -> list[JsonObject]:
    """A row per stage: its work key, the hash of its code, its inputs, its MLflow run if this machine has it."""
    run_ids = {cost.stage: cost.mlflow for cost in costs}
    return [
        {
            "stage": name,
            "key": metrics["lineage"].get("key", ""),
            "code": metrics["lineage"].get("code", ""),
            "inputs": metrics["lineage"].get("inputs", {}),
            "mlflow": run_ids.get(name, ""),
        }
        for name, metrics in run.stages.items()
    ]


def _duration(seconds: float | None) -> str:
    """A time as text: `14 s`, `3 min`, `1 h 20 min`."""
    if seconds is None:
        return ""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _graph(run: Run, costs: list[Cost], marked: frozenset[str]) -> str:
    """The graph with the time of each stage."""
    notes = {cost.stage.replace("@", "_"): _duration(cost.speed.get("seconds")) for cost in costs}
    return charts.svg(run, notes, marked)


def samples(run: Run, per_suite: int) -> list[JsonObject]:
    """The answers of each model to the first `per_suite` items of each suite."""
    entries: dict[tuple[str, str], JsonObject] = {}
    for model, rows in run.items.items():
        num_shown: dict[str, int] = {}
        for row in rows:
            suite = row["suite"]
            if not row.get("output") or num_shown.get(suite, 0) >= per_suite:
                continue
            num_shown[suite] = num_shown.get(suite, 0) + 1
            entry = entries.setdefault(
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
    return list(entries.values())


def render(
    metrics: Path,
    *,
    samples_each: int = 2,
    prices: Prices | None = None,
    gate: dict[str, float] | None = None,
    baseline: tuple[str, Run] | None = None,
) -> str:
    """The page as HTML. `baseline` is the name and the metrics of another run, which this one is compared with."""
    run = read(metrics)
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string((Path(__file__).parent / "card.html").read_text(encoding="utf-8"))
    costs = report_metrics.rows(run, prices)
    rebuilt = claims.stages(baseline[1], run) if baseline else []
    return template.render(
        run=run,
        table=table(run),
        figures=figures(run),
        lineage=_lineage(run, costs),
        costs=costs,
        total=report_metrics.total(costs),
        currency=prices.currency if prices else "",
        spent=_duration,
        samples=samples(run, samples_each),
        graph=_graph(run, costs, frozenset(stage.stage for stage in rebuilt)),
        claims=claims.claims(run),
        gates=claims.gates(run, gate or {}),
        alarms=claims.alarms(run),
        skipped=claims.skipped(run),
        baseline=baseline[0] if baseline else "",
        rebuilt=rebuilt,
        moved=claims.measures(baseline[1], run) if baseline else {},
        details={name: flat(numbers) for name, numbers in run.stages.items()},
        evaluations={name: flat(numbers) for name, numbers in run.evaluations.items()},
        sections=[
            Markup(environment.from_string(section.TEMPLATE).render(section.values(run.of_wings[section.FOLDER])))
            for section in report_metrics.sections()
        ],
    )


def text_table(metrics: Path) -> str:
    """Text tables of a few models each: a row per headline number, a column per model, intervals in brackets."""
    run = read(metrics)
    rows = table(run)
    times = {cost.stage: cost.speed["seconds"] for cost in report_metrics.rows(run) if "seconds" in cost.speed}
    if not rows:
        return f"nothing is evaluated yet below {metrics}/eval; run dvc repro"
    lines = [[row["headline"].title, *(_cell_text(cell) for cell in row["cells"])] for row in rows]
    text: list[str] = []
    for first in range(0, len(run.evaluations), MODELS):
        models = list(run.evaluations)[first : first + MODELS]
        body = [[line[0], *line[1 + first : 1 + first + MODELS]] for line in lines]
        text += [*([""] if text else []), compare.table(["held-out result", *models], body, markdown=False)]
    if times:
        text.append("")
        text.append("seconds: " + ", ".join(f"{stage} {seconds:.0f}" for stage, seconds in times.items()))
    return "\n".join(text)


def _cell_text(cell: dict[str, str]) -> str:
    return f"{cell['value']} [{cell['interval']}]" if cell["interval"] else cell["value"]


if __name__ == "__main__":
    sys.stdout.write(
        text_table(Path(sys.argv[1] if len(sys.argv) > 1 else "metrics")) + "\n\nreport: reports/index.html\n"
    )
