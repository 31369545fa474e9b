"""The graph of a run as inline SVG, drawn from what each stage's lineage says it read.

    lineages -> stages in columns, each right of all that it was made from; edges as curves

Only stages that were built stand in it, with their time where it is known. Edges that another path implies are left out, so that the
picture shows the chain. Not promised: no crossings; the order within a column is by the mean height of what a stage was made from.
"""

import html
from collections.abc import Mapping

from pipeline.report.run import Run, maker

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
    """The stages by their longest way from the start. Where an edge passes a column it has a place of its own there (`passage`), so that
    it goes round the boxes. Within a column the order is by the mean place of what stands before."""  # fmt: skip
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
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" aria-label="the graph of this run" '
        'class="dag" font-size="13">'
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
