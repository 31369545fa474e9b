"""The table at the end of `make`: what was built and how good it is on held-out data.

python -m pipeline.report.table [metrics]
"""

import sys
from pathlib import Path

from pipeline.report import card


def render(metrics: Path) -> str:
    """A text table: a row per headline number, a column per model, intervals in brackets."""
    run = card.read(metrics)
    rows = card.table(run)
    costs = [row for row in card.costs(run) if row["seconds"] is not None]
    if not rows:
        return f"nothing is evaluated yet below {metrics}/eval; run dvc repro"
    head = ["held-out result", *run.evaluations]
    body = [[row["headline"].title, *(_text(cell) for cell in row["cells"])] for row in rows]
    widths = [max(len(line[column]) for line in [head, *body]) for column in range(len(head))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, *body]
    ]
    text.insert(1, "  ".join("-" * width for width in widths))
    if costs:
        text.append("")
        text.append("seconds: " + ", ".join(f"{row['stage']} {row['seconds']:.0f}" for row in costs))
    return "\n".join(text)


def _text(cell: dict[str, str]) -> str:
    return f"{cell['value']} [{cell['interval']}]" if cell["interval"] else cell["value"]


if __name__ == "__main__":
    sys.stdout.write(render(Path(sys.argv[1] if len(sys.argv) > 1 else "metrics")) + "\n\nreport: reports/index.html\n")
