"""Stage report: the report card, one self-contained page.

    metrics/ -> reports/index.html

It holds results with intervals, curves, samples, lineage, time. It opens offline, on a phone and on paper.
"""

from dataclasses import dataclass
from pathlib import Path

from pipeline.params import main
from pipeline.report import card
from pipeline.work import Job


@dataclass(frozen=True, kw_only=True)
class Params:
    """The report has no keys: everything that was measured is shown."""


def run(params: Params, job: Job, *, metrics: Path, out: Path) -> None:
    """Write the page `out`."""
    out.write_text(card.render(metrics), encoding="utf-8")


if __name__ == "__main__":
    main(run, inputs={"metrics": "metrics"}, outs={"out": "reports/index.html"}, metrics=None)
