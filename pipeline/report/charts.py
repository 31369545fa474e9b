"""Charts as inline SVG: text kept as text, no date, colours that follow the page's light or dark theme.

In: series of points with a name. Out: an `<svg>` element as text, equal for equal input. Every chart has axis names and
units. Not promised: interaction; the numbers stand in a table beside the chart.
"""

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


def lines(series: Sequence[Series], *, x: str, y: str, log: bool = False) -> str:
    """A line chart; `log` for a logarithmic vertical axis."""
    figure, axes = _axes(x, y)
    for number, one in enumerate(series):
        xs, ys = [p[0] for p in one.points], [p[1] for p in one.points]
        axes.plot(xs, ys, color=COLOURS[number % len(COLOURS)], label=one.name, linewidth=1.6,
                  marker="o" if len(xs) < 30 else "", markersize=3)  # fmt: skip
    if log:
        axes.set_yscale("log")
    if len(series) > 1:
        axes.legend(frameon=False, labelcolor=INK)
    return _svg(figure)


def bars(values: Sequence[Bar], *, x: str) -> str:
    """Horizontal bars with their intervals, the first on top."""
    figure, axes = _axes(x, "", height=0.7 + 0.34 * len(values))
    places = list(range(len(values)))[::-1]
    axes.barh(places, [b.value for b in values], color=COLOURS[0], height=0.6)
    errors = [[max(0.0, b.value - b.low) for b in values], [max(0.0, b.high - b.value) for b in values]]
    axes.errorbar([b.value for b in values], places, xerr=errors, fmt="none", ecolor=INK, capsize=3, linewidth=1)
    axes.set_yticks(places, [b.name for b in values], color=INK)
    axes.set_xlim(left=0)
    return _svg(figure)


def _axes(x: str, y: str, height: float = 2.9):  # type: ignore[no-untyped-def]
    figure = Figure(figsize=(7.2, height), layout="constrained")
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


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "stagecoach", "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'(<svg[^>]*?) width="[^"]*pt" height="[^"]*pt"', r'\1 width="100%"', text, count=1)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text)  # inline SVG needs no name spaces, and the page no addresses
    text = text.replace("xlink:href", "href")
    return text.replace(INK, "currentColor")
