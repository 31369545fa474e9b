"""Charts as inline SVG: text kept as text, no date, colours that follow the page's light or dark theme.

In: series of points with a name. Out: an `<svg>` element as text, equal for equal input. Every chart has axis names and
units. Several charts of different names may stand in one page: no id of one occurs in another, nothing is clipped (a
clip path is a `url()`), no style leaves its element. Not promised: interaction; the numbers stand in a table below.
"""

import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib

matplotlib.use("svg")
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

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
        axes.plot(xs, ys, color=COLOURS[number % len(COLOURS)], label=one.name, linewidth=1.6,
                  marker="o" if len(xs) < 30 else "", markersize=3)  # fmt: skip
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
    return f'<svg {box[0]} width="100%" role="img" aria-label="{label}" stroke-linejoin="round" stroke-linecap="butt">{text}'
