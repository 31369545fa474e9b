"""The report card: one self-contained page with a run's metrics, and with charts and the graph as inline SVG.

    series of points or bars -> an `<svg>` element: text kept as text, no date, drawn in the page's text color
    the lineages of a run    -> the graph: stages in columns, each to the right of all its inputs; edges as curves

Equal input gives equal output. Every chart has axis labels and units. A page can contain several charts with different
names: they share no ids, nothing is clipped (a clip path needs an id), and styles stay within their element.

The graph contains only stages that were built, with their times if known. Edges implied by another path are omitted, so
that the picture shows the chain. Stages within a column are ordered by the mean vertical position of their inputs.

Not included: interactivity (the numbers are in a table below each chart); a graph without crossing edges.

**The page**:

    metrics/*.json, metrics/*.csv, metrics/eval/* (+ speed.json of the work directory, + metrics of report.baseline) ->
    reports/index.html

The page has no scripts, external references or dates, so rebuilding it gives identical bytes. jinja2 escapes
everything, since model outputs are untrusted. Times are looked up in the work directory by work key; a stage restored
from a cache is "built elsewhere". A change is colored only if it is statistically significant (report/claims.py).

`python -m pipeline.report.card [metrics]` prints the table shown at the end of `make`: the models that were built and
their results on held-out data.

Not included: commits other than `report.baseline` (`make compare A=... B=...` compares any two).
"""

import html
import io
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from pipeline.report import chain, claims, compare
from pipeline.report import metrics as report_metrics
from pipeline.report.metrics import HEADLINES, Cost, Headline, MetricsRun, Prices, flat, lookup, read, stage_of_input
from pipeline.run.tracking import duration
from pipeline.run.types import JsonObject

matplotlib.use("svg")


INK = "#0badf0"  # a placeholder, replaced by currentColor in `_svg`
COLOURS = ("#3b78c4", "#d1742f", "#3f9b63", "#a05fb4", "#b8443f", "#7d7a2c")


@dataclass(frozen=True)
class Series:
    """A line of points (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Bar:
    """A value with its interval."""

    name: str
    value: float
    low: float
    high: float


def thinned(series: list[Series], most: int = 24) -> list[list[str]]:
    """The points of line charts as rows of text, with the step and a value per series: about `most` rows, including
    the first and the last.
    """
    values = {line.name: dict(line.points) for line in series}
    steps = sorted({step for points in values.values() for step in points})
    chosen = [*steps[: -1 : max(1, len(steps) // most)], steps[-1]]
    return [[f"{step:.0f}", *(f"{p[step]:.4f}" if step in p else "" for p in values.values())] for step in chosen]


def lines(name: str, series: Sequence[Series], *, x: str, y: str) -> str:
    """A line chart. `name` is its label for screen readers, and must be unique within a page."""
    figure, axes = _axes(x, y)
    for number, line in enumerate(series):
        xs, ys = [p[0] for p in line.points], [p[1] for p in line.points]
        axes.plot(
            xs,
            ys,
            color=COLOURS[number % len(COLOURS)],
            label=line.name,
            linewidth=1.6,
            marker="o" if len(xs) < 30 else "",
            markersize=3,
        )
    if len(series) > 1:
        axes.legend(frameon=False, labelcolor=INK)
    return _svg(figure, name)


def bars(name: str, values: Sequence[Bar], *, x: str) -> str:
    """Horizontal bars with their intervals, the first at the top. `name` as in `lines`."""
    figure, axes = _axes(x, "", height=0.7 + 0.34 * len(values))
    positions = list(range(len(values)))[::-1]
    axes.barh(positions, [b.value for b in values], color=COLOURS[0], height=0.6)
    errors = [[b.value - min(b.value, max(0.0, b.low)) for b in values], [max(0.0, b.high - b.value) for b in values]]
    axes.errorbar([b.value for b in values], positions, xerr=errors, fmt="none", ecolor=INK, capsize=3, linewidth=1)
    axes.set_yticks(positions, [b.name for b in values], color=INK)
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
    return _svg(figure, name)


def standalone(svg: str) -> str:
    """A chart from this module as a standalone file, dark on white (`dvc plots show` displays it offline)."""
    head = '<svg xmlns="http://www.w3.org/2000/svg" style="background: #fff; color: #222; font-family: sans-serif" '
    return svg.replace("<svg ", head, 1).replace('width="100%"', 'width="640"', 1) + "\n"


def _axes(x: str, y: str, height: float = 2.7) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.0, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.tick_params(colors=INK)
    axes.set_facecolor("none")
    figure.patch.set_alpha(0)
    for name, spine in axes.spines.items():
        spine.set_color(INK)
        spine.set_visible(name in ("left", "bottom"))
    axes.grid(alpha=0.25, color=INK, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Figure, name: str) -> str:
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    text = text[text.index(">", text.index("<svg")) + 1 :]
    text = re.sub(r"<(style|metadata|clipPath)\b.*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r' clip-path="[^"]*"', "", text)  # nothing lies outside autoscaled axes
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # ids repeat across charts, and nothing refers to them
    text = re.sub(r"font-family: [^;]*;", "", text)  # the page sets the font
    text = re.sub(r"<defs>\s*</defs>\s*", "", text)
    text = text.replace("xlink:href", "href").replace(INK, "currentColor")
    label = html.escape(name)
    return (
        f'<svg {box[0]} width="100%" role="img" aria-label="{label}" stroke-linejoin="round"'
        f' stroke-linecap="butt">{text}'
    )


# -- graph of a run ----------------------------------------------------------------------------------------------------


WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 118, 40, 30, 12, 4  # size of a box, gaps between boxes, outer margin
THIN = 4  # height of a passage, where an edge crosses a column


def edges(run: MetricsRun) -> dict[str, list[str]]:
    """stage -> the stages it was made from, except those that another of these stages depends on."""
    all_parents = {name: _parents(name, run) for name in run.stages}

    def ancestors(name: str) -> set[str]:
        return {name}.union(*(ancestors(parent) for parent in all_parents[name])) if all_parents[name] else {name}

    return {
        name: [p for p in parents if not any(p in ancestors(other) for other in parents if other != p)]
        for name, parents in all_parents.items()
    }


def _parents(name: str, run: MetricsRun) -> list[str]:
    stages = [stage_of_input(path, run.stages) for path in run.stages[name]["lineage"].get("inputs", {})]
    return sorted({stage for stage in stages if stage is not None and stage != name})


def columns(parents: Mapping[str, list[str]]) -> list[list[str]]:
    """The stages in columns, by the length of the longest path from the start.

    An edge that crosses a column gets its own position there (`_passage`), so that it avoids the boxes. The order
    within a column is by the mean position of the inputs.
    """
    depth: dict[str, int] = {}

    def measure(name: str) -> int:
        if name not in depth:
            depth[name] = 1 + max((measure(parent) for parent in parents[name]), default=-1)
        return depth[name]

    for name in parents:
        measure(name)
    levels: list[list[str]] = []
    position: dict[str, float] = {}
    for level in range(max(depth.values(), default=-1) + 1):
        before = {
            name: [_node_in_column(p, name, depth, level - 1) for p in parents[name]]
            for name in parents
            if depth[name] == level
        }
        for name, inputs in parents.items():
            passing = [p for p in inputs if depth[p] < level < depth[name]]
            before |= {_passage(p, name, level): [_node_in_column(p, name, depth, level - 1)] for p in passing}
        order = sorted(before, key=lambda n: sum(position[p] for p in before[n]) / len(before[n]) if before[n] else 0.0)
        position |= {name: number - (len(order) - 1) / 2 for number, name in enumerate(order)}
        levels.append(order)
    return levels


def _node_in_column(parent: str, name: str, depth: Mapping[str, int], level: int) -> str:
    """The node of the edge from `parent` to `name` in a column: the parent itself, or a passage."""
    return parent if depth[parent] == level else _passage(parent, name, level)


def _passage(parent: str, name: str, level: int) -> str:
    """The node where an edge crosses a column."""
    return f"{parent}>{name}@{level}"


def _layout(levels: list[list[str]]) -> tuple[dict[str, tuple[float, float]], float, float]:
    """Left edge and vertical center of each node, and the width and height of the picture."""
    heights = [sum(THIN if ">" in name else HEIGHT for name in level) + GAP_Y * (len(level) - 1) for level in levels]
    width, height = len(levels) * (WIDTH + GAP_X) - GAP_X + 2 * MARGIN, max(heights) + 2 * MARGIN
    positions: dict[str, tuple[float, float]] = {}
    for number, level in enumerate(levels):
        y = (height - heights[number]) / 2
        for name in level:
            node_height = THIN if ">" in name else HEIGHT
            positions[name] = (MARGIN + number * (WIDTH + GAP_X), y + node_height / 2)
            y += node_height + GAP_Y
    return positions, width, height


def svg(run: MetricsRun, notes: Mapping[str, str], marked: frozenset[str] = frozenset()) -> str:
    """The graph. `notes`: the second lines in the boxes; `marked`: the boxes with a bold border."""
    parents = edges(run)
    levels = columns(parents)
    if not levels:
        return ""
    positions, width, height = _layout(levels)
    depth = {name: number for number, level in enumerate(levels) for name in level}
    parts = [
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" aria-label="the'
        ' graph of this run" class="dag" font-size="13">'
    ]
    for name, inputs in parents.items():
        for parent in inputs:
            between = [_passage(parent, name, level) for level in range(depth[parent] + 1, depth[name])]
            parts.append(_edge_path([positions[node] for node in (parent, *between, name)]))
    for name in parents:
        x, middle = positions[name]
        attribute, note = ' class="marked"' if name in marked else "", notes.get(name, "")
        parts.append(
            f'<rect x="{x:g}" y="{middle - HEIGHT / 2:g}" width="{WIDTH}" height="{HEIGHT}" rx="6"{attribute}/>'
        )
        parts.append(f'<text x="{x + WIDTH / 2:g}" y="{middle - (3 if note else -5):g}">{html.escape(name)}</text>')
        if note:
            parts.append(f'<text x="{x + WIDTH / 2:g}" y="{middle + 12:g}" class="note">{html.escape(note)}</text>')
    return "".join(parts) + "</svg>"


def _edge_path(nodes: list[tuple[float, float]]) -> str:
    """A curve from the right of the first node to the left of the last, straight across the columns in between."""
    x, y = nodes[0][0] + WIDTH, nodes[0][1]
    line = f"M{x:g} {y:g}"
    for number, (left, middle) in enumerate(nodes[1:], start=2):
        bend = (left - x) / 2
        line += f"C{x + bend:g} {y:g} {left - bend:g} {middle:g} {left:g} {middle:g}"
        x, y = left, middle
        if number < len(nodes):
            x += WIDTH
            line += f"H{x:g}"
    return f'<path d="{line}"/>'


# -- card --------------------------------------------------------------------------------------------------------------


LIKELIHOOD = ("language", "code", "tools", "lora")  # stages whose loss is in nats per token
MODELS = 4  # columns per text table; more would be wider than a terminal


def _curve_series(run: MetricsRun, column: str) -> list[Series]:
    """A series for each stage of LIKELIHOOD that logged `column`; the losses of other stages have other units."""
    series = []
    for name, rows in run.curves.items():
        if name not in LIKELIHOOD:
            continue
        points = [(float(r["step"]), float(r[column])) for r in rows if r.get(column) not in (None, "", "not finite")]
        if points:
            series.append(Series(name, points))
    return series


def figures(run: MetricsRun) -> list[JsonObject]:
    """The charts, each a dict with `title`, `svg`, and the numbers as a table in `head` and `rows`."""
    figures: list[JsonObject] = []
    for title, column, unit in (
        ("Training loss", "loss", "nats per token"),
        ("Validation", "val/bpb", "bits per byte"),
    ):
        series = _curve_series(run, column)
        if series:
            svg = lines(title, series, x="step", y=unit)
            figures.append(
                {"title": title, "svg": svg, "head": ["step", *(s.name for s in series)], "rows": thinned(series)}
            )
    figures += _reinforcement_figures(run)
    for section in report_metrics.sections():
        figures += section.figures(run)
    for headline in HEADLINES:
        if not headline.chart:
            continue
        values = [
            Bar(model, *(measured.get(k, measured["value"]) for k in ("value", "low", "high")))
            for model, numbers in run.evaluations.items()
            if (measured := lookup(numbers, headline)) is not None
        ]
        if len(values) > 1:
            rows = [[v.name, headline.show(v.value), headline.show(v.low), headline.show(v.high)] for v in values]
            svg = bars(headline.title, values, x=headline.axis)
            figures.append(
                {"title": headline.title, "svg": svg, "head": ["model", "value", "low", "high"], "rows": rows}
            )
    return figures


def _reinforcement_figures(run: MetricsRun) -> list[JsonObject]:
    """Charts: gold and proxy reward against divergence, with the best-of-n curve, and problems solved over time."""
    figures = []
    best_of_n = run.stages.get("rlhf", {}).get("best_of_n") or []
    for title, column, unit in (
        ("Gold against divergence", "gold", "true score, 0 to 1"),
        ("Proxy against divergence", "proxy", "reward optimized in training"),
    ):
        points = [
            (float(r["kl"]), float(r[column])) for r in run.curves.get("rlhf", []) if _has_numbers(r, "kl", column)
        ]
        series = [Series("policy", sorted(points)), Series("best of n", [(r["kl"], r[column]) for r in best_of_n])]
        series = [line for line in series if line.points]
        if points:
            svg = lines(title, series, x="divergence from the reference, nats per answer", y=unit)
            rows = [[line.name, f"{x:.3f}", f"{y:.4f}"] for line in series for x, y in line.points]
            figures.append({"title": title, "svg": svg, "head": ["", "nats", column], "rows": rows})
    solved = [
        (float(r["step"]), float(r["gold"])) for r in run.curves.get("grpo", []) if _has_numbers(r, "step", "gold")
    ]
    if solved:
        title = "Problems solved while training on executed code"
        svg = lines(title, [Series("grpo", solved)], x="step", y="pass@1 on held-out problems")
        rows = [[f"{step:.0f}", f"{value:.4f}"] for step, value in solved]
        figures.append({"title": title, "svg": svg, "head": ["step", "pass@1"], "rows": rows})
    return figures


def _has_numbers(row: dict[str, str], *names: str) -> bool:
    return all(row.get(name) not in (None, "", "not finite") for name in names)


def table(run: MetricsRun) -> list[JsonObject]:
    """A row per headline number with a cell per model: the value, its interval and the change from the model's base."""
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
        text = "different items"
    elif change and change.few:
        text += f", too few items: {change.items}"
    return {
        "value": headline.show(measured["value"]),
        "interval": interval,
        "change": text,
        "kind": change.kind if change else "",
    }


def _lineage(run: MetricsRun, costs: list[Cost]) -> list[JsonObject]:
    """A row per stage: its work key, code hash, inputs, and MLflow run if this machine has it."""
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
    """A duration as text; empty if unknown."""
    return "" if seconds is None else duration(seconds)


def _graph(run: MetricsRun, costs: list[Cost], marked: frozenset[str]) -> str:
    """The graph with the time of each stage."""
    notes = {cost.stage.replace("@", "_"): _duration(cost.speed.get("seconds")) for cost in costs}
    return svg(run, notes, marked)


def samples(run: MetricsRun, per_suite: int) -> list[JsonObject]:
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
    baseline: tuple[str, MetricsRun] | None = None,
) -> str:
    """The page as HTML. `baseline`: the name and metrics of another run to compare with."""
    run = read(metrics)
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string((Path(__file__).parent / "card.html").read_text(encoding="utf-8"))
    costs = report_metrics.rows(run, prices)
    rebuilt = claims.stages(baseline[1], run) if baseline else []
    parts: dict[str, object] = {
        "chain": chain.steps(run, costs),
        "results": table(run),
        "changes": baseline and baseline[0],
        "claims": [claim for claim in claims.claims(run) if claim.state != claims.UNKNOWN],
        "graph": _graph(run, costs, frozenset(stage.stage for stage in rebuilt)),
        "curves": figures(run),
        "samples": samples(run, samples_each),
        "cost": costs,
        "lineage": _lineage(run, costs),
    }
    return template.render(
        parts,
        run=run,
        links=[name for name, content in parts.items() if content] + ["numbers"],
        kept=chain.kept(run),
        total=report_metrics.total(costs),
        currency=prices.currency if prices else "",
        spent=_duration,
        gates=claims.gates(run, gate or {}),
        alarms=claims.alarms(run),
        skipped=claims.skipped(run),
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
    """Text tables with a few models each: a row per headline number, a column per model, intervals in brackets."""
    run = read(metrics)
    rows = table(run)
    times = {cost.stage: cost.speed["seconds"] for cost in report_metrics.rows(run) if "seconds" in cost.speed}
    if not rows:
        return f"no evaluations in {metrics}/eval yet; run dvc repro"
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
