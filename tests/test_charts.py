"""Charts that can share a page: they refer to nothing outside it, and follow its colors."""

import functools
import re

from pipeline.report import card
from pipeline.report.card import COLOURS, Bar, Series

SERIES = [Series("language", [(1, 8.5), (10, 4.0), (20, 3.0)]), Series("code", [(1, 3.0), (20, 2.0)])]
BARS = [Bar("language", 0.5, 0.4, 0.6), Bar("code", 0.25, 0.25, 0.25)]


def ids(svg: str) -> set[str]:
    return set(re.findall(r'\bid="([^"]*)"', svg))


@functools.cache
def both() -> list[str]:
    """A chart of each kind."""
    return [card.lines("Loss & more", SERIES, x="step", y="nats per token"), card.bars("Rate", BARS, x="share")]


def test_equal_input_gives_equal_bytes() -> None:
    assert both.__wrapped__() == both()


def test_no_id_of_one_chart_is_in_another_and_every_reference_is_within() -> None:
    first = card.lines("First", SERIES, x="step", y="loss")
    second = card.lines("Second", SERIES, x="step", y="loss")
    assert ids(first) and not ids(first) & ids(second)
    for svg in (first, second, *both()):
        assert set(re.findall(r'href="#([^"]*)"', svg)) == ids(svg)
        assert len(re.findall(r"\bid=", svg)) == len(ids(svg))


def test_nothing_points_outside_and_nothing_styles_the_page() -> None:
    for svg in both():
        for word in ("url(", "http", "<style", "xmlns", "xlink", "<metadata", "<script", "@import", "<?xml", "clip"):
            assert word not in svg, word
        assert re.fullmatch(r"<svg [^>]*>.*</svg>\s*", svg, re.DOTALL)


def test_every_colour_is_the_page_s_own_or_of_the_palette() -> None:
    """Black text would vanish in dark mode."""
    for svg in both():
        drawn = re.findall(r"<(?:text|path|use)\b[^>]*>", svg)
        assert all("fill:" in tag or "stroke:" in tag for tag in drawn if tag.startswith("<text"))
        assert set(re.findall(r"#[0-9a-f]{6}\b(?!\")", svg)) - set(COLOURS) <= {"#1f77b4"}  # a cap's invisible fill
        assert "currentColor" in svg
        assert card.INK not in svg


def test_axes_and_series_are_named_in_text() -> None:
    lines, bars = both()
    for word in ("step", "nats per token", "language", "code"):
        assert f">{word}</text>" in lines
    for word in ("share", "language", "code"):
        assert f">{word}</text>" in bars
    assert 'aria-label="Loss &amp; more"' in lines


def test_one_series_needs_no_legend() -> None:
    assert ">language</text>" not in card.lines("Loss", SERIES[:1], x="step", y="loss")


def test_the_first_bar_is_on_top_and_its_length_is_its_value() -> None:
    svg = card.bars("Rate", [Bar("a", 0.5, 0.5, 0.5), Bar("b", 0.25, 0.25, 0.25)], x="share")
    paths = re.findall(rf'<path d="([^"]*)" style="fill: {COLOURS[0]}"', svg)
    corners = [[tuple(map(float, point)) for point in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)] for path in paths]
    widths = [max(x for x, _ in box) - min(x for x, _ in box) for box in corners]
    assert abs(widths[0] - 2 * widths[1]) < 0.01
    assert max(y for _, y in corners[0]) < min(y for _, y in corners[1])
