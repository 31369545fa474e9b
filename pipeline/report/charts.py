"""Charts, and the graph of a run, as inline SVG.

    series of points or bars -> an `<svg>` element: text kept as text, no date, ink in the color of the page's theme
    the lineages of a run    -> the graph: stages in columns, each to the right of all its inputs; edges as curves

Equal input gives equal text. Every chart has axis names and units. Several charts with different names may be in one
page: no id of one occurs in another, nothing is clipped (a clip path is a `url()`), no style leaves its element.

The graph has only the stages that were built, with their time if it is known. Edges that another path implies are left
out, so that the picture shows the chain. The order within a column is by the mean height of a stage's inputs.

Not promised: interaction, since the numbers are in a table below each chart; a graph without crossing edges.
"""

import html
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from pipeline.report.metrics import Run, stage_of_input

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
    """The points of line charts as rows of text, the step and a value per series: about `most` rows, with the first
    and the last.
    """
    values = {line.name: dict(line.points) for line in series}
    steps = sorted({step for points in values.values() for step in points})
    chosen = [*steps[: -1 : max(1, len(steps) // most)], steps[-1]]
    return [[f"{step:.0f}", *(f"{p[step]:.4f}" if step in p else "" for p in values.values())] for step in chosen]


def lines(name: str, series: Sequence[Series], *, x: str, y: str) -> str:
    """A line chart. `name` is its label for screen readers, and different for each chart of a page."""
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
    """A chart of this module as a separate file, dark on white (`dvc plots show` displays it offline)."""
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
    text = re.sub(r' clip-path="[^"]*"', "", text)  # nothing is outside of autoscaled axes
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # ids repeat in every chart, and nothing refers to them
    text = re.sub(r"font-family: [^;]*;", "", text)  # the page's font
    text = re.sub(r"<defs>\s*</defs>\s*", "", text)
    text = text.replace("xlink:href", "href").replace(INK, "currentColor")
    label = html.escape(name)
    return (
        f'<svg {box[0]} width="100%" role="img" aria-label="{label}" stroke-linejoin="round"'
        f' stroke-linecap="butt">{text}'
    )


# -- graph of a run ----------------------------------------------------------------------------------------------------


WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 118, 40, 30, 12, 4  # of a box, between boxes, around all
THIN = 4  # height of a passage, where an edge crosses a column


def edges(run: Run) -> dict[str, list[str]]:
    """stage -> the stages it was made from, without those that another of them implies."""
    all_parents = {name: _parents(name, run) for name in run.stages}

    def ancestors(name: str) -> set[str]:
        return {name}.union(*(ancestors(parent) for parent in all_parents[name])) if all_parents[name] else {name}

    return {
        name: [p for p in parents if not any(p in ancestors(other) for other in parents if other != p)]
        for name, parents in all_parents.items()
    }


def _parents(name: str, run: Run) -> list[str]:
    stages = [stage_of_input(path, run.stages) for path in run.stages[name]["lineage"].get("inputs", {})]
    return sorted({stage for stage in stages if stage is not None and stage != name})


def columns(parents: Mapping[str, list[str]]) -> list[list[str]]:
    """The stages by their longest path from the start.

    Where an edge crosses a column it has a position of its own there (`_passage`), so that it avoids the boxes. The
    order within a column is by the mean position of the inputs.
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
    """Left edge and middle height of each node, and the width and height of the picture."""
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


def svg(run: Run, notes: Mapping[str, str], marked: frozenset[str] = frozenset()) -> str:
    """The graph; `notes` are the second lines of boxes, `marked` are boxes with a strong border."""
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
    """A curve from the right of the first node to the left of the last, straight across the columns between."""
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
