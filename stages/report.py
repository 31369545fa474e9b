"""Stage report: the report card, one self-contained page, and its charts as files.

    metrics/ -> reports/index.html, reports/headlines/<model>.json, reports/plots/*.svg

The page holds results with intervals, curves, samples, lineage, time. It opens offline, on a phone and on paper. A
model's headlines are its line in `dvc metrics show`; a model that is not evaluated has an empty one. The charts are for
`dvc plots show`, which draws curves with a library from the web, and pictures without it.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from pipeline.params import main
from pipeline.report import card, charts
from pipeline.report.headlines import short
from pipeline.tracking import write_json
from pipeline.work import Job

# that have a line in `dvc metrics show`
MODELS = ("language", "code", "tools", "lora", "dpo", "grpo", "rlhf", "diffusion", "diffusion_control", "diffusion_dpo",
          "diffusion_grpo", "memory", "memory_baseline")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Params:
    """The report has no keys: everything that was measured is shown."""


def run(params: Params, job: Job, *, metrics: Path, out: Path, plots: Path, **headlines: Path) -> None:
    """Write the page `out`, the folder `plots`, and each model's headlines."""
    out.write_text(card.render(metrics), encoding="utf-8")
    measured = card.read(metrics)
    for model, path in headlines.items():
        write_json(path, short(measured.evaluations.get(model, {})))
    plots.mkdir()
    for number, figure in enumerate(card.figures(measured)):
        words = re.findall(r"[a-z0-9]+", figure["title"].lower())
        (plots / f"{number}-{'-'.join(words)}.svg").write_text(charts.standalone(figure["svg"]), encoding="utf-8")


if __name__ == "__main__":
    main(
        run,
        inputs={"metrics": "metrics"},
        outs={"out": "reports/index.html", "plots": "reports/plots"}
        | {m: f"reports/headlines/{m}.json" for m in MODELS},
        metrics=None,
    )
