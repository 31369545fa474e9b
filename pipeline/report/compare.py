"""Compare two runs: what changed, what was rebuilt because of it, and how the results moved.

    python -m pipeline.report.compare A [B] [--md] [--all]        make compare A=HEAD~1 B=workspace
    python -m pipeline.report.compare                             make experiments: all experiments for this commit

A and B are commits, branches, tags, experiments (`dvc exp show` lists them) or `workspace`, the default for B.
Differences are B - A, on the same held-out items (report/claims.py); only significant ones are marked. Measures on
different items are not compared: the row shows why, and the items are listed below the table. Each stage is listed with
its work key and MLflow run, so that every number can be traced. For an experiment, up to MOST measures that moved are
shown, significant ones first, in lines of at most WIDTH characters.
"""

import argparse
import io
import sys
from collections.abc import Sequence

import rich.box
import rich.console
import rich.table
import yaml

from pipeline.report import baseline, claims, metrics
from pipeline.report.metrics import HEADLINES, Headline, MetricsRun, flat, lookup
from pipeline.run.errors import InputError, StagecoachError

MARKS = {"better": "better", "worse": "WORSE", "": ""}
MOST, WIDTH = 4, 120


def render(
    before: MetricsRun, after: MetricsRun, names: tuple[str, str], *, markdown: bool = False, every: bool = False
) -> str:
    """The comparison as text; `every`: include measures that did not move."""
    rebuilt = claims.stages(before, after)
    parts = [
        f"{names[0]} -> {names[1]}: {len(rebuilt)} {'stage differs' if len(rebuilt) == 1 else 'stages differ'}"
        + ("" if rebuilt else "; the two are the same run")
    ]
    if rebuilt:
        parts.append(_rebuilt_stages(rebuilt, after, names, markdown))
    if packages := claims.packages(before, after):
        heading = "The runs used different package versions, which by itself invalidates no result:"
        parts.append("\n".join([heading, *(f"  {package}" for package in packages)]))
    rows: list[list[str]] = []
    apart: dict[str, list[str]] = {}  # which items differ -> models
    for model, changes in claims.measures(before, after, every=every).items():
        for change in changes:
            rows.append(_row(model, change))
            if change.apart:
                apart.setdefault(f"{change.headline.suite}: {change.apart}", []).append(model)
    if rows:
        parts.append(table(["model", "measure", names[0], names[1], "difference", "", "by"], rows, markdown))
    elif rebuilt:
        parts.append("no measure moved")
    if apart:
        lines = (f"  {items} ({', '.join(dict.fromkeys(models))})" for items, models in apart.items())
        parts.append("\n".join(["Items of the measures that were not compared:", *lines]))
    parts.append(
        "Differences have 95% intervals and are called better or worse only if significant, on at least "
        f"{claims.FEWEST} items."
    )
    return "\n\n".join(parts) + "\n"


def _rebuilt_stages(
    rebuilt: Sequence[claims.Rebuilt], after: MetricsRun, names: tuple[str, str], markdown: bool
) -> str:
    costs = {cost.stage: cost for cost in metrics.rows(after)}
    head = ["stage", "because of", f"key of {names[0]}", f"key of {names[1]}", "MLflow run", "seconds"]
    body = []
    for stage in rebuilt:
        cost = costs.get(stage.stage)
        seconds = cost.speed.get("seconds") if cost else None
        body.append(
            [
                stage.stage,
                "; ".join(stage.why),
                *(key or "–" for key in stage.keys),
                cost.mlflow if cost else "",
                "" if seconds is None else f"{seconds:.0f}",
            ]
        )
    return table(head, body, markdown)


def _row(model: str, change: claims.Change) -> list[str]:
    show = change.headline.show
    method = "intervals" if change.low is None else f"{change.items} items, paired"
    return [
        model,
        change.headline.title,
        show(change.before),
        show(change.after),
        change.shown,
        MARKS[change.kind],
        "not compared" if change.refused else method,
    ]


def table(head: Sequence[str], body: Sequence[Sequence[str]], markdown: bool) -> str:
    """A table as aligned text or Markdown."""
    if markdown:
        lines = [head, ["---"] * len(head), *body]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    widths = [max(len(line[column]) for line in (head, *body)) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (head, *body)
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def experiments() -> str:
    """The experiments for this commit: what each changed, and how its results compare with the commit's. Raises
    InputError.
    """
    head = baseline.resolve("HEAD")
    found = baseline.experiments_of(head)
    if not found:
        return "no experiments for this commit yet; run one, for example: dvc exp run -n longer -S code.steps=2000\n"
    try:
        before = baseline.at(head)
    except InputError:  # no dvc.lock of a full run is committed
        before = None
    shown = rich.table.Table("experiment", "changed", "model", "measure", "result, 95%", "change", box=rich.box.SIMPLE)
    for name, revision in found:
        cells = [name, _changed(head, revision)]
        try:
            lines = _moved(before, baseline.at(revision))
        except InputError:
            lines = [["", "its metrics are not in the cache", "", ""]]
        for line in lines or [["", "no measure moved", "", ""]]:
            shown.add_row(*cells, *line)
            cells = ["", ""]
    text = io.StringIO()
    rich.console.Console(file=text, width=WIDTH).print(shown)
    return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines()) + "\n"


def _changed(before: str, after: str) -> str:
    """The keys in params.yaml that differ between two commits, with their values."""
    old, new = (flat(yaml.safe_load(baseline.file_at(revision, "params.yaml"))) for revision in (before, after))
    keys = [key for key in (*new, *(key for key in old if key not in new)) if old.get(key) != new.get(key)]
    return (
        ", ".join(f"{key.replace(' / ', '.')} {_shown(old.get(key))} → {_shown(new.get(key))}" for key in keys)
        or "no parameter"
    )


def _shown(value: object) -> str:
    return "default" if value is None else str(value)


def _moved(before: MetricsRun | None, after: MetricsRun) -> list[list[str]]:
    """Model, measure, result and change of each measure that moved; if there is nothing to compare with, the deployed
    model's results.
    """
    if before is None:
        model = str(after.stages.get("deploy", {}).get("model", ""))
        measures = [h for h in HEADLINES if lookup(after.evaluations.get(model, {}), h) is not None]
        return [[model, h.title, _result(after, model, h), ""] for h in measures[:MOST]]
    changes = [(model, c) for model, several in claims.measures(before, after).items() for c in several]
    changes.sort(key=lambda entry: entry[1].kind == "")
    return [
        [
            model,
            c.headline.title,
            _result(after, model, c.headline),
            "different items"
            if c.refused
            else f"{c.headline.show_change(c.after - c.before)} {MARKS[c.kind]}".rstrip(),
        ]
        for model, c in changes[:MOST]
    ]


def _result(run: MetricsRun, model: str, headline: Headline) -> str:
    measured = lookup(run.evaluations[model], headline) or {}
    interval = f" ({headline.show(measured['low'])}-{headline.show(measured['high'])})" if "low" in measured else ""
    return headline.show(measured["value"]) + interval


def main(arguments: list[str]) -> int:
    """Command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.report.compare", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "before",
        metavar="A",
        nargs="?",
        help="a commit, branch, tag, experiment or `workspace`; default: compare all experiments",
    )
    parser.add_argument("after", metavar="B", nargs="?", default=baseline.WORKSPACE)
    parser.add_argument("--md", action="store_true", help="print Markdown, for a pull request")
    parser.add_argument("--all", action="store_true", help="include measures that did not change")
    options = parser.parse_args(arguments)
    try:
        if options.before is None:
            sys.stdout.write(experiments())
            return 0
        before, after = baseline.at(options.before), baseline.at(options.after)
    except StagecoachError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(render(before, after, (options.before, options.after), markdown=options.md, every=options.all))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
