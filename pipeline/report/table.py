"""The table at the end of `make`: the models that were built and their results on held-out data.

python -m pipeline.report.table [metrics]
"""

import sys
from pathlib import Path

from pipeline.report import card
from pipeline.report import metrics as report_metrics
from pipeline.report.metrics import read

MODELS = 4  # columns of one table; more are wider than a terminal


def render(metrics: Path) -> str:
    """Text tables of a few models each: a row per headline number, a column per model, intervals in brackets."""
    run = read(metrics)
    rows = card.table(run)
    times = {cost.stage: cost.speed["seconds"] for cost in report_metrics.rows(run) if "seconds" in cost.speed}
    if not rows:
        return f"nothing is evaluated yet below {metrics}/eval; run dvc repro"
    lines = [[row["headline"].title, *(_text(cell) for cell in row["cells"])] for row in rows]
    text: list[str] = []
    for first in range(0, len(run.evaluations), MODELS):
        models = list(run.evaluations)[first : first + MODELS]
        text += [
            *([""] if text else []),
            *_block(models, [[line[0], *line[1 + first : 1 + first + MODELS]] for line in lines]),
        ]
    if times:
        text.append("")
        text.append("seconds: " + ", ".join(f"{stage} {seconds:.0f}" for stage, seconds in times.items()))
    return "\n".join(text)


def _block(models: list[str], body: list[list[str]]) -> list[str]:
    """The lines of a table with a column per model."""
    rows = [["held-out result", *models], *body]
    widths = [max(len(line[column]) for line in rows) for column in range(len(models) + 1)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in rows]
    return [text[0], "  ".join("-" * width for width in widths), *text[1:]]


def _text(cell: dict[str, str]) -> str:
    return f"{cell['value']} [{cell['interval']}]" if cell["interval"] else cell["value"]


if __name__ == "__main__":
    sys.stdout.write(render(Path(sys.argv[1] if len(sys.argv) > 1 else "metrics")) + "\n\nreport: reports/index.html\n")
