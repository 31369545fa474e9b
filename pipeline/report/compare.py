"""Two runs side by side: what was changed, what was rebuilt for it, and what that did to the results.

    python -m pipeline.report.compare A [B] [--md] [--all]        make compare A=HEAD~1 B=workspace

A and B are commits, branches, tags, experiments (`dvc exp show` names them) or `workspace`, the default of B.
Differences are B - A, over the same held-out items (report/claims.py); only those that chance does not explain are
marked. Measures over other items are not compared: the line gives the reason, and below the table stand the items. Each
stage's work key and MLflow run are named, so that every number can be traced.
"""

import argparse
import sys
from collections.abc import Sequence

from pipeline.report import baseline, claims, metrics
from pipeline.report.metrics import Run
from pipeline.run.errors import StagecoachError

MARKS = {"better": "better", "worse": "WORSE", "": ""}


def render(before: Run, after: Run, names: tuple[str, str], *, markdown: bool = False, every: bool = False) -> str:
    """The comparison as text; `every`: also the measures that did not move."""
    rebuilt = claims.stages(before, after)
    ids = [{one.stage: one for one in metrics.rows(side)} for side in (before, after)]
    head = ["stage", "because of", f"key of {names[0]}", f"key of {names[1]}", "MLflow run", "seconds"]
    body = []
    for one in rebuilt:
        found = ids[1].get(one.stage)
        seconds = found.speed.get("seconds") if found else None
        shown = "" if seconds is None else f"{seconds:.0f}"
        body.append(
            [one.stage, "; ".join(one.why), *(key or "–" for key in one.keys), found.mlflow if found else "", shown]
        )
    parts = [
        f"{names[0]} -> {names[1]}: {len(rebuilt)} {'stage differs' if len(rebuilt) == 1 else 'stages differ'}"
        + ("" if rebuilt else "; the two are the same run")
    ]
    if rebuilt:
        parts.append(table(head, body, markdown))
    if others := claims.packages(before, after):
        parts.append(
            "\n".join(
                ["Other packages computed them, which invalidates nothing by itself:", *(f"  {one}" for one in others)]
            )
        )
    rows: list[list[str]] = []
    apart: dict[str, list[str]] = {}  # which items are not the same -> models
    for model, changes in claims.measures(before, after, every=every).items():
        for told in changes:
            show = told.headline.show
            by = "intervals" if told.low is None else f"{told.items} items, paired"
            rows.append(
                [
                    model,
                    told.headline.title,
                    show(told.before),
                    show(told.after),
                    told.shown,
                    MARKS[told.kind],
                    "not compared" if told.refused else by,
                ]
            )
            if told.apart:
                apart.setdefault(f"{told.headline.suite}: {told.apart}", []).append(model)
    if rows:
        parts.append(table(["model", "measure", names[0], names[1], "difference", "", "by"], rows, markdown))
    elif rebuilt:
        parts.append("no measure moved")
    if apart:
        lines = (f"  {what} ({', '.join(dict.fromkeys(models))})" for what, models in apart.items())
        parts.append("\n".join(["Items of the measures that are not compared:", *lines]))
    parts.append(
        "Differences with their 95 % intervals; better and worse only where chance does not explain them, over "
        f"{claims.FEWEST} items at least."
    )
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], body: Sequence[Sequence[str]], markdown: bool) -> str:
    """Columns as wide as they must be, or a Markdown table."""
    if markdown:
        lines = [head, ["---"] * len(head), *body]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    widths = [max(len(line[column]) for line in (head, *body)) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (head, *body)
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def main(arguments: list[str]) -> int:
    """The command above."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.report.compare", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("before", metavar="A", help="a commit, branch, tag, experiment or `workspace`")
    parser.add_argument("after", metavar="B", nargs="?", default=baseline.WORKSPACE)
    parser.add_argument("--md", action="store_true", help="Markdown, for a pull request")
    parser.add_argument("--all", action="store_true", help="also what did not move")
    chosen = parser.parse_args(arguments)
    try:
        before, after = baseline.at(chosen.before), baseline.at(chosen.after)
    except StagecoachError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(render(before, after, (chosen.before, chosen.after), markdown=chosen.md, every=chosen.all))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
