"""The report's part on a memory: whether its chapters are used, by what, and whether it is read for a reason.

metrics/memory.csv             -> evenness of use and what the memory is worth, at each evaluation
metrics/routing/memory.json    -> chapters against sources, and a text of each source by what its parts chose
                               (memory/measure.py)
"""

from collections.abc import Callable
from typing import Any

from pipeline.report import charts

USE = (
    ("Evenness of the chapters' use", "chapter_entropy", "entropy over its most, 1 is even"),
    ("Most used chapter", "largest_share", "share of all choices"),
    ("Chapters never chosen", "chapters_unused", "chapters"),
)
WORTH = {
    "memory/gain_bpb": "without the memory",
    "memory/random_costs_bpb": "chapters drawn at random",
    "memory/constant_costs_bpb": "always the same chapters",
}


def figures(
    rows: list[dict[str, str]], thinned: Callable[[list[charts.Series]], list[list[str]]]
) -> list[dict[str, Any]]:
    """The charts of a run of stage memory, whose curve has these rows; `thinned` gives their numbers as text."""
    names = list(rows[0]) if rows else []
    layers = sorted({name.split("/")[1] for name in names if name.endswith("/chapter_entropy")}, key=int)
    asked = [
        (title, unit, {f"memory/{layer}/{column}": f"layer {layer}" for layer in layers}) for title, column, unit in USE
    ]
    asked.append(("What knowing less of the memory costs", "bits per byte", WORTH))
    found = []
    for title, unit, columns in asked:
        series = [one for column, name in columns.items() if (one := points(rows, column, name)).points]
        if series:
            svg = charts.lines(title, series, x="step", y=unit)
            found.append(
                {"title": title, "svg": svg, "head": ["step", *(one.name for one in series)], "rows": thinned(series)}
            )
    return found


def points(rows: list[dict[str, str]], column: str, name: str) -> charts.Series:
    """A column of a curve."""
    values = [(float(r["step"]), float(r[column])) for r in rows if r.get(column) not in (None, "", "not finite")]
    return charts.Series(name, values)


def shown(told: dict[str, Any]) -> dict[str, Any]:
    """The tables and maps as the page shows them. Of each piece of a text the heaviest chapter gives number and
    colour.
    """
    num = told["chapters"]
    even = 1 / num
    tables = []
    for layer in sorted({one["layer"] for one in told["use"]}):
        rows = [
            {
                "source": one["source"],
                "cells": [{"text": f"{100 * share:.0f}", "strength": strength(share, even)} for share in one["shares"]],
            }
            for one in told["use"]
            if one["layer"] == layer
        ]
        tables.append({"layer": layer, "rows": rows})
    maps = [
        {"source": one["source"], "layer": one["layer"], "pieces": [piece(p, num) for p in one["pieces"]]}
        for one in told["maps"]
    ]
    return {
        "chapters": list(range(num)),
        "even": f"{100 * even:.0f}",
        "tables": tables,
        "maps": maps,
        "top_k": told["top_k"],
        "routing": told["routing"],
    }


def strength(share: float, even: float) -> int:
    """How dark a cell is, 0 to 4: never, below half of an even share, about it, above one and a half, above three."""
    return sum((share > 0, share > even / 2, share > 1.5 * even, share > 3 * even))


def piece(one: dict[str, Any], num: int) -> dict[str, Any]:
    """A part of a text with its chapters."""
    by_weight = sorted(zip(one["weights"], one["chapters"], strict=True), key=lambda pair: (-pair[0], pair[1]))
    told = ", ".join(f"{chapter} ({weight:.2f})" for weight, chapter in by_weight)
    return {
        "text": one["text"],
        "chapter": by_weight[0][1],
        "hue": round(360 * by_weight[0][1] / num),
        "title": f"chapters {told}",
    }
