"""Stage report: build the report card, one self-contained page, and save its charts as files.

    metrics/ -> reports/index.html, reports/headlines/<model>.json, reports/plots/*.svg

The page shows results with intervals, claims, curves, samples, lineage, time and cost, and the changes since the run
given by `baseline`. It works offline, on a phone and on paper. A model's headlines are its row in `dvc metrics show`.
The charts are for `dvc plots show`, which needs a library from the web to draw curves but not to show images.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.report import baseline, card
from pipeline.report.metrics import HEADLINES, Prices, short, with_intervals
from pipeline.run.stage import main
from pipeline.run.tracking import write_json
from pipeline.run.workdir import Job


@dataclass(frozen=True, kw_only=True)
class Params:
    """The `report` block."""

    samples: int
    """Number of items to show per suite, with the models' answers."""
    baseline: str | None = None
    """Full hash of the commit to compare with; to set it, run `python -m pipeline.report.baseline pin`."""
    prices: Prices | None = None
    """Prices per hour, for example {core: 0.04, gpu: 2.5, currency: EUR}."""
    gate: dict[str, float] = field(default_factory=dict)
    """Targets, by measure, that the deployed model must reach to become the next champion."""

    def __post_init__(self) -> None:
        if self.samples < 0:
            raise ValueError(f"samples: expected at least 0, got {self.samples}")
        known = {headline.key for headline in HEADLINES}
        if unknown := sorted(set(self.gate) - known):
            raise ValueError(f"gate: unknown measure {unknown[0]!r}; valid measures: {', '.join(sorted(known))}")
        if self.baseline is not None and not re.fullmatch(r"[0-9a-f]{40}", self.baseline):
            raise ValueError(
                f"baseline: expected the full hash of a commit, 40 hex digits, got {self.baseline!r}; a name would be"
                " an untracked input; set the hash with python -m pipeline.report.baseline pin REV"
            )


def run(params: Params, job: Job, *, metrics: Path, out: Path, plots: Path, headlines: Path) -> None:
    """Write the page `out`, the folder `plots`, and each model's headlines into the folder `headlines`."""
    baseline_run = None if params.baseline is None else (params.baseline[:10], baseline.at(params.baseline))
    page = card.render(
        metrics, samples_each=params.samples, prices=params.prices, gate=params.gate, baseline=baseline_run
    )
    out.write_text(page, encoding="utf-8")
    measured = card.read(metrics)
    headlines.mkdir()
    for model, numbers in measured.evaluations.items():
        write_json(headlines / f"{model}.json", short(numbers))
    job.tracker.summarize(with_intervals(measured.evaluations), out)
    plots.mkdir()
    for number, figure in enumerate(card.figures(measured)):
        words = re.findall(r"[a-z0-9]+", figure["title"].lower())
        (plots / f"{number}-{'-'.join(words)}.svg").write_text(card.standalone(figure["svg"]), encoding="utf-8")


if __name__ == "__main__":
    main(
        run,
        inputs={"metrics": "metrics"},
        outs={"out": "reports/index.html", "plots": "reports/plots", "headlines": "reports/headlines"},
        metrics=None,
    )
