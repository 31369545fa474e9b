"""The memory section of the report: chapter usage, overall and by source, and how much reading the chapters helps.

metrics/memory.csv             -> evenness of usage and the memory's benefit, at each evaluation
metrics/routing/memory.json    -> chapters by source, and a text from each source with the chapters its parts chose
                               (memory/measure.py)
"""

from collections.abc import Iterator

from pipeline.report import card
from pipeline.report.claims import FAILS, HOLDS, UNKNOWN, Claim
from pipeline.report.metrics import MetricsRun, flat
from pipeline.run.types import JsonObject

USE = (
    ("Evenness of chapter usage", "chapter_entropy", "entropy over its maximum, 1 is even"),
    ("Most used chapter", "largest_share", "share of all choices"),
    ("Chapters never chosen", "chapters_unused", "chapters"),
)
WORTH = {
    "memory/gain_bpb": "without the memory",
    "memory/random_costs_bpb": "chapters drawn at random",
    "memory/constant_costs_bpb": "always the same chapters",
}
BETTER: tuple[tuple[str, str, str, str], ...] = (
    ("facts", "memory", "code", "A memory recalls more facts than its base model"),
    ("facts", "memory", "memory_baseline", "A memory recalls more facts than a wider model of equal size"),
)
ABOVE: tuple[tuple[str, str, tuple[str, ...], float], ...] = ()
FOLDER: str = "routing"
TEMPLATE: str = (
    '{% if memories %}<h2 id="memory">Which texts choose which chapters of the memory</h2>\n'
    "{% for memory in memories %}<h3>{{ memory.model }}</h3>\n"
    "<p>Each text chooses {{ memory.top_k }} of {{ memory.chapters | length }} chapters, by {{ "
    "memory.routing }}. The numbers are percentages of a source's choices; even use would be {{ memory.even }}%. "
    "Darker cells mean more choices.</p>\n"
    '{% for table in memory.tables %}<div class="scroll"><table class="heat"><caption>Chapters by '
    "source, layer {{ table.layer }}</caption>\n"
    "<thead><tr><th>source</th>{% for chapter in memory.chapters %}<th>{{ chapter }}</th>{% endfor %}"
    "</tr></thead>\n"
    "<tbody>{% for row in table.rows %}<tr><td>{{ row.source }}</td>{% for cell in row.cells %}<td "
    'class="h{{ cell.strength }}">{{ cell.text }}</td>{% endfor %}</tr>\n'
    "{% endfor %}</tbody></table></div>\n"
    "{% endfor %}\n"
    '{% for map in memory.maps %}<div class="answers"><p>What a text from <b>{{ map.source }}</b> chose in '
    "layer {{ map.layer }}: color and number show the chapter with the largest weight in each part</p>\n"
    '<pre class="routes">{% for piece in map.pieces %}<span style="background: hsl({{ piece.hue }} 70% '
    '50% / .3)" title="{{ piece.title }}">{{ piece.text }}<sub>{{ piece.chapter }}</sub></span>{% endfor '
    "%}</pre></div>\n"
    "{% endfor %}{% endfor %}{% endif %}"
)


def figures(run: MetricsRun) -> list[JsonObject]:
    """The charts for a run of stage memory, from the rows of its curve."""
    rows = run.curves.get("memory", [])
    names = list(rows[0]) if rows else []
    layers = sorted({name.split("/")[1] for name in names if name.endswith("/chapter_entropy")}, key=int)
    charted = [
        (title, unit, {f"memory/{layer}/{column}": f"layer {layer}" for layer in layers}) for title, column, unit in USE
    ]
    charted.append(("Cost of using less of the memory", "bits per byte", WORTH))
    results = []
    for title, unit, columns in charted:
        series = [line for column, name in columns.items() if (line := points(rows, column, name)).points]
        if series:
            svg = card.lines(title, series, x="step", y=unit)
            head = ["step", *(line.name for line in series)]
            results.append({"title": title, "svg": svg, "head": head, "rows": card.thinned(series)})
    return results


def points(rows: list[dict[str, str]], column: str, name: str) -> card.Series:
    """One column of a curve, as a series of points."""
    values = [(float(r["step"]), float(r[column])) for r in rows if r.get(column) not in (None, "", "not finite")]
    return card.Series(name, values)


def claims(run: MetricsRun) -> Iterator[Claim]:
    """Whether every chapter was chosen."""
    title, router = "No memory chapter is dead", run.stages.get("memory", {}).get("router")
    unused = {name: n for name, n in flat(router or {}).items() if name.endswith("chapters_unused")}
    if not unused:
        yield Claim(title, "", UNKNOWN)
        return
    counts = ", ".join(f"{n:g}" for n in unused.values())
    yield Claim(title, f"never chosen, by layer: {counts}", FAILS if any(unused.values()) else HOLDS)


def values(files: dict[str, JsonObject]) -> JsonObject:
    """Each model's choices, for the page."""
    return {"memories": [{"model": model} | shown(routing) for model, routing in files.items() if routing]}


def shown(routing: JsonObject) -> JsonObject:
    """The tables and maps for the page. Each piece of a text gets the number and color of its top-weighted chapter."""
    num = routing["chapters"]
    even = 1 / num
    tables = []
    for layer in sorted({use["layer"] for use in routing["use"]}):
        rows = [
            {
                "source": use["source"],
                "cells": [{"text": f"{100 * share:.0f}", "strength": strength(share, even)} for share in use["shares"]],
            }
            for use in routing["use"]
            if use["layer"] == layer
        ]
        tables.append({"layer": layer, "rows": rows})
    maps = [
        {"source": map_["source"], "layer": map_["layer"], "pieces": [_piece(piece, num) for piece in map_["pieces"]]}
        for map_ in routing["maps"]
    ]
    return {
        "chapters": list(range(num)),
        "even": f"{100 * even:.0f}",
        "tables": tables,
        "maps": maps,
        "top_k": routing["top_k"],
        "routing": routing["routing"],
    }


def strength(share: float, even: float) -> int:
    """Darkness of a cell, 0 to 4: never chosen, below half of an even share, about even, above 1.5x, above 3x."""
    return sum((share > 0, share > even / 2, share > 1.5 * even, share > 3 * even))


def _piece(piece: JsonObject, num: int) -> JsonObject:
    """A part of a text with its chapters."""
    by_weight = sorted(zip(piece["weights"], piece["chapters"], strict=True), key=lambda pair: (-pair[0], pair[1]))
    chapters = ", ".join(f"{chapter} ({weight:.2f})" for weight, chapter in by_weight)
    return {
        "text": piece["text"],
        "chapter": by_weight[0][1],
        "hue": round(360 * by_weight[0][1] / num),
        "title": f"chapters {chapters}",
    }
