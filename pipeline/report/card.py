"""The report card: one self-contained page over the metrics of a run.

    metrics/*.json, metrics/*.csv, metrics/eval/* (+ speed.json of the work directory) -> reports/index.html

No script, no outside reference, no date: built twice it has equal bytes. jinja2 escapes everything, since what a model
wrote is hostile. Times come from the work directory by key, and are "built elsewhere" when a stage was restored from a
cache. Not promised: comparison with another commit (`dvc metrics diff`, `dvc exp show` give that).
"""

import csv
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

from pipeline import work
from pipeline.report import charts, denoising, memory
from pipeline.report.headlines import HEADLINES, Headline, lookup

ORDER = ("corpus", "tasks", "tokenizer", "encode_text", "encode_code", "language", "code", "tools", "lora", "dpo", "grpo",
         "reward", "rlhf", "diffusion", "diffusion_control", "diffusion_dpo", "diffusion_grpo", "memory", "memory_baseline", "deploy")  # fmt: skip
LIKELIHOOD = ("language", "code", "tools", "lora")  # stages whose loss is nats per token
# What a model was made from, and so is compared with; lora does the work of tools, so it is compared with it.
# The masked-diffusion model is compared with its control: the causal model that read the same.
BASES = {"code": "language", "tools": "code", "lora": "tools", "dpo": "tools", "grpo": "tools", "rlhf": "tools",
         "diffusion_control": "code", "diffusion": "diffusion_control", "diffusion_dpo": "diffusion",
         "diffusion_grpo": "diffusion", "memory_baseline": "code", "memory": "memory_baseline"}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What the metrics folder holds."""

    stages: dict[str, dict[str, Any]]  # name -> metrics/<name>.json
    curves: dict[str, list[dict[str, str]]]  # name -> rows of metrics/<name>.csv
    evaluations: dict[str, dict[str, Any]]  # model -> metrics/eval/<model>.json
    items: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # model -> rows of metrics/eval/<model>.jsonl
    traces: dict[str, dict[str, Any]] = field(default_factory=dict)  # model -> metrics/traces/<model>.json
    routes: dict[str, dict[str, Any]] = field(default_factory=dict)  # model -> metrics/routing/<model>.json


def read(metrics: Path) -> Run:
    """Everything below `metrics`, in pipeline order."""
    stages = {
        p.stem: json.loads(p.read_text(encoding="utf-8")) for p in sorted(metrics.glob("*.json")) if known(p.stem)
    }
    order = {name: number for number, name in enumerate(ORDER)}
    stages = dict(sorted(stages.items(), key=lambda entry: (order.get(entry[0], len(order)), entry[0])))
    curves = {}
    for name in stages:
        path = metrics / f"{name}.csv"
        if path.is_file():
            with path.open(encoding="utf-8", newline="") as file:
                curves[name] = list(csv.DictReader(file))
    models = [name for name in ORDER if (metrics / "eval" / f"{name}.json").is_file()]  # a stage may make two
    evaluations = {m: json.loads((metrics / "eval" / f"{m}.json").read_text(encoding="utf-8")) for m in models}
    items = {m: _jsonl(metrics / "eval" / f"{m}.jsonl") for m in models}
    traces, routes = (_by_model(metrics / folder) for folder in ("traces", "routing"))
    return Run(stages, curves, evaluations, items, traces, routes)


def _by_model(folder: Path) -> dict[str, dict[str, Any]]:
    paths = {name: folder / f"{name}.json" for name in ORDER}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.is_file()}


def known(name: str) -> bool:
    """Whether a metrics file is one of the graph's: a stray file changes no report."""
    return name in ORDER


def _jsonl(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]  # splitlines would cut at U+2028 in an answer


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
    found += alignment(run) + denoising.figures(run.evaluations) + memory.figures(run.curves.get("memory", []), thinned)
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
    """What reinforcement learning did: gold and proxy against the divergence, beside best-of-n; problems solved by step."""
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
    """The points of line charts as rows of text: the step, a value per series, about `most` rows with first and last."""
    values = {one.name: dict(one.points) for one in series}
    steps = sorted({step for points in values.values() for step in points})
    chosen = [*steps[: -1 : max(1, len(steps) // most)], steps[-1]]
    return [[f"{step:.0f}", *(f"{p[step]:.4f}" if step in p else "" for p in values.values())] for step in chosen]


def table(run: Run) -> list[dict[str, Any]]:
    """A row per headline number: a cell per model, with interval and the change from the model that it was made from."""
    rows = []
    for headline in HEADLINES:
        cells = []
        for model, numbers in run.evaluations.items():
            base = run.evaluations.get(BASES.get(model, ""))
            cells.append(_cell(headline, lookup(numbers, headline), lookup(base, headline) if base else None))
        if any(cell["value"] != "–" for cell in cells):
            rows.append({"headline": headline, "cells": cells})
    return rows


def _cell(headline: Headline, measured: dict[str, float] | None, before: dict[str, float] | None) -> dict[str, str]:
    if measured is None:
        return {"value": "–", "interval": "", "change": "", "kind": ""}
    value = headline.show(measured["value"])
    known = "low" in measured
    wide = known and measured["low"] != measured["high"]
    interval = f"{headline.show(measured['low'])} to {headline.show(measured['high'])}" if wide else ""
    if before is None:
        return {"value": value, "interval": interval, "change": "", "kind": ""}
    known = known and "low" in before
    apart = known and (measured["low"] > before["high"] or measured["high"] < before["low"])  # only then it is coloured
    up = measured["value"] > before["value"]
    kind = ("better" if up == headline.higher_is_better else "worse") if apart else ""
    difference = measured["value"] - before["value"]
    return {"value": value, "interval": interval, "change": headline.show_change(difference), "kind": kind}


def lineage(run: Run) -> list[dict[str, Any]]:
    """A row per stage: its work key, the hash of its code, what it was made from."""
    rows = []
    for name, numbers in run.stages.items():
        facts = numbers.get("lineage", {})
        rows.append(
            {
                "stage": name,
                "key": facts.get("key", ""),
                "code": facts.get("code", ""),
                "inputs": facts.get("inputs", {}),
            }
        )
    return rows


def costs(run: Run) -> list[dict[str, Any]]:
    """A row per stage with its time and speed, from the work directory of this machine."""
    rows = []
    for name, numbers in run.stages.items():
        key = numbers.get("lineage", {}).get("key", "none")
        found = sorted(work.root().glob(f"*/{key}/speed.json"))
        speed = json.loads(found[0].read_text()) if found else {}
        rows.append({"stage": name, "seconds": speed.get("seconds"), "tokens_per_second": speed.get("tokens_per_second"),
                     "memory_gb": speed.get("memory_gb"), "gflops": speed.get("gflops"),
                     "device": speed.get("device", "" if found else "built elsewhere")})  # fmt: skip
    return rows


def samples(run: Run, per_suite: int = 2) -> list[dict[str, Any]]:
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


def flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested numbers as (name, value) rows, without the lineage."""
    rows: list[tuple[str, Any]] = []
    for key, value in values.items():
        if key == "lineage":
            continue
        rows += flat(value, f"{prefix}{key} / ") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return rows


def render(metrics: Path) -> str:
    """The page."""
    run = read(metrics)
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string((Path(__file__).parent / "card.html").read_text(encoding="utf-8"))
    return template.render(
        run=run, table=table(run), figures=figures(run), lineage=lineage(run), costs=costs(run), samples=samples(run),
        details={name: flat(numbers) for name, numbers in run.stages.items()},
        evaluations={name: flat(numbers) for name, numbers in run.evaluations.items()},
        traces=[denoising.shown(model, trace) for model, trace in run.traces.items()],
        memories=[{"model": model} | memory.shown(told) for model, told in run.routes.items()],
    )  # fmt: skip
