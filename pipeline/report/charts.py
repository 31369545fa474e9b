"""Charts as inline SVG: text kept as text, no date, colours that follow the page's light or dark theme.

In: series of points with a name. Out: an `<svg>` element as text, equal for equal input. Every chart has axis names and
units. Several charts of different names may stand in one page: no id of one occurs in another, nothing is clipped (a
clip path is a `url()`), no style leaves its element. Not promised: interaction; the numbers stand in a table below.

The graph of a run as inline SVG, drawn from what each stage's lineage says it read.

    lineages -> stages in columns, each right of all that it was made from; edges as curves

Only stages that were built stand in it, with their time where it is known. Edges that another path implies are left
out, so that the picture shows the chain. Not promised: no crossings; the order within a column is by the mean height of
what a stage was made from.
"""

import html
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from pipeline.report.metrics import Run, maker

matplotlib.use("svg")


INK = "#0badf0"  # a marker colour, replaced by currentColor below
COLOURS = ("#3b78c4", "#d1742f", "#3f9b63", "#a05fb4", "#b8443f", "#7d7a2c")


@dataclass(frozen=True)
class Series:
    """A line: points (x, y), or bars when the chart is one of bars."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Bar:
    """A measured value with its interval."""

    name: str
    value: float
    low: float
    high: float


def lines(name: str, series: Sequence[Series], *, x: str, y: str) -> str:
    """A line chart. `name` is what a screen reader says, and different for each chart of a page."""
    figure, axes = _axes(x, y)
    for number, one in enumerate(series):
        xs, ys = [p[0] for p in one.points], [p[1] for p in one.points]
        axes.plot(
            xs,
            ys,
            color=COLOURS[number % len(COLOURS)],
            label=one.name,
            linewidth=1.6,
            marker="o" if len(xs) < 30 else "",
            markersize=3,
        )
    if len(series) > 1:
        axes.legend(frameon=False, labelcolor=INK)
    return _svg(figure, name)


def bars(name: str, values: Sequence[Bar], *, x: str) -> str:
    """Horizontal bars with their intervals, the first on top. `name` as in `lines`."""
    figure, axes = _axes(x, "", height=0.7 + 0.34 * len(values))
    places = list(range(len(values)))[::-1]
    axes.barh(places, [b.value for b in values], color=COLOURS[0], height=0.6)
    errors = [[b.value - min(b.value, max(0.0, b.low)) for b in values], [max(0.0, b.high - b.value) for b in values]]
    axes.errorbar([b.value for b in values], places, xerr=errors, fmt="none", ecolor=INK, capsize=3, linewidth=1)
    axes.set_yticks(places, [b.name for b in values], color=INK)
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
    return _svg(figure, name)


def standalone(svg: str) -> str:
    """A chart of this module as a file of its own, dark on white (`dvc plots show` displays it without the web)."""
    head = '<svg xmlns="http://www.w3.org/2000/svg" style="background: #fff; color: #222; font-family: sans-serif" '
    return svg.replace("<svg ", head, 1).replace('width="100%"', 'width="640"', 1) + "\n"


def _axes(x: str, y: str, height: float = 2.7):  # type: ignore[no-untyped-def]
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
    text = re.sub(r' clip-path="[^"]*"', "", text)  # autoscaled axes leave nothing outside
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # groups are numbered alike in every chart, and nothing refers to them
    text = re.sub(r"font-family: [^;]*;", "", text)  # the page's font
    text = re.sub(r"<defs>\s*</defs>\s*", "", text)
    text = text.replace("xlink:href", "href").replace(INK, "currentColor")
    label = html.escape(name)
    return (
        f'<svg {box[0]} width="100%" role="img" aria-label="{label}" stroke-linejoin="round"'
        f' stroke-linecap="butt">{text}'
    )


# -- graph -------------------------------------------------------------------------------------------------------------


WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 118, 40, 30, 12, 4  # of a box, between boxes, around all
THIN = 4  # height of the place where an edge passes a column


def edges(run: Run) -> dict[str, list[str]]:
    """stage -> the stages it was made from, without those that stand behind one another."""
    whole = {
        name: sorted(
            {m for p in told["lineage"].get("inputs", {}) if (m := maker(p, run.stages)) is not None and m != name}
        )
        for name, told in run.stages.items()
    }

    def above(name: str) -> set[str]:
        return {name}.union(*(above(parent) for parent in whole[name])) if whole[name] else {name}

    return {
        name: [p for p in parents if not any(p in above(other) for other in parents if other != p)]
        for name, parents in whole.items()
    }


def columns(parents: Mapping[str, list[str]]) -> list[list[str]]:
    """The stages by their longest way from the start. Where an edge passes a column it has a place of its own there
    (`passage`), so that it goes round the boxes. Within a column the order is by the mean place of what stands
    before."""
    depth: dict[str, int] = {}

    def measure(name: str) -> int:
        if name not in depth:
            depth[name] = 1 + max((measure(parent) for parent in parents[name]), default=-1)
        return depth[name]

    for name in parents:
        measure(name)
    found: list[list[str]] = []
    place: dict[str, float] = {}
    for level in range(max(depth.values(), default=-1) + 1):
        before = {
            name: [via(p, name, depth, level - 1) for p in parents[name]] for name in parents if depth[name] == level
        }
        for name, mine in parents.items():
            passing = [p for p in mine if depth[p] < level < depth[name]]
            before |= {passage(p, name, level): [via(p, name, depth, level - 1)] for p in passing}
        order = sorted(before, key=lambda n: sum(place[p] for p in before[n]) / len(before[n]) if before[n] else 0.0)
        place |= {name: number - (len(order) - 1) / 2 for number, name in enumerate(order)}
        found.append(order)
    return found


def via(parent: str, name: str, depth: Mapping[str, int], level: int) -> str:
    """What stands for the edge from `parent` to `name` in a column: the parent itself, or the place it passes."""
    return parent if depth[parent] == level else passage(parent, name, level)


def passage(parent: str, name: str, level: int) -> str:
    """The place where an edge passes a column."""
    return f"{parent}>{name}@{level}"


def placed(levels: list[list[str]]) -> tuple[dict[str, tuple[float, float]], float, float]:
    """Left edge and middle height of everything, and the width and height of all."""
    tall = [sum(THIN if ">" in name else HEIGHT for name in level) + GAP_Y * (len(level) - 1) for level in levels]
    width, height = len(levels) * (WIDTH + GAP_X) - GAP_X + 2 * MARGIN, max(tall) + 2 * MARGIN
    at: dict[str, tuple[float, float]] = {}
    for number, level in enumerate(levels):
        y = (height - tall[number]) / 2
        for name in level:
            size = THIN if ">" in name else HEIGHT
            at[name] = (MARGIN + number * (WIDTH + GAP_X), y + size / 2)
            y += size + GAP_Y
    return at, width, height


def svg(run: Run, notes: Mapping[str, str], marked: frozenset[str] = frozenset()) -> str:
    """The picture; `notes` is a second line of a box, `marked` are boxes with a strong border."""
    parents = edges(run)
    levels = columns(parents)
    if not levels:
        return ""
    at, width, height = placed(levels)
    depth = {name: number for number, level in enumerate(levels) for name in level}
    parts = [
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" aria-label="the'
        ' graph of this run" class="dag" font-size="13">'
    ]
    for name, before in parents.items():
        for parent in before:
            between = [passage(parent, name, level) for level in range(depth[parent] + 1, depth[name])]
            parts.append(_edge([at[one] for one in (parent, *between, name)]))
    for name in parents:
        x, middle = at[name]
        kind, note = ' class="marked"' if name in marked else "", notes.get(name, "")
        parts.append(f'<rect x="{x:g}" y="{middle - HEIGHT / 2:g}" width="{WIDTH}" height="{HEIGHT}" rx="6"{kind}/>')
        parts.append(f'<text x="{x + WIDTH / 2:g}" y="{middle - (3 if note else -5):g}">{html.escape(name)}</text>')
        if note:
            parts.append(f'<text x="{x + WIDTH / 2:g}" y="{middle + 12:g}" class="note">{html.escape(note)}</text>')
    return "".join(parts) + "</svg>"


def _edge(way: list[tuple[float, float]]) -> str:
    """A curve from the right of the first place to the left of the last, straight across the columns between."""
    x, y = way[0][0] + WIDTH, way[0][1]
    line = f"M{x:g} {y:g}"
    for number, (left, middle) in enumerate(way[1:], start=2):
        bend = (left - x) / 2
        line += f"C{x + bend:g} {y:g} {left - bend:g} {middle:g} {left:g} {middle:g}"
        x, y = left, middle
        if number < len(way):
            x += WIDTH
            line += f"H{x:g}"
    return f'<path d="{line}"/>'
