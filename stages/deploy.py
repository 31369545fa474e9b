"""Stage deploy: export the chosen model and prove that the export is the model.

    models/<deploy.model> -> models/deploy

A Hugging Face directory with card and checksums. It is loaded back and compared on a probe text; a difference fails the
stage, so what is published always answers as the model that was evaluated.
"""

from dataclasses import dataclass
from pathlib import Path

from pipeline import checkpoint
from pipeline.export import huggingface
from pipeline.params import main
from pipeline.work import Job


@dataclass(frozen=True, kw_only=True)
class Params:
    """The block `deploy`."""

    model: str  # a folder of models/

    def __post_init__(self) -> None:
        if not self.model or "/" in self.model or self.model.startswith(".") or self.model == "deploy":
            raise ValueError(f"model: expected the name of a folder of models/ such as tools, got {self.model!r}")


def run(params: Params, job: Job, *, base: Path, out: Path) -> None:
    """Export `base` into `out` and compare the two."""
    model, tokenizer = checkpoint.load(base)
    lineage = job.lineage | {"model": params.model, "made_by": checkpoint.lineage(base).get("key", "elsewhere")}
    huggingface.export(model, tokenizer, lineage, out, name=f"stagecoach-{params.model}")
    job.report(model=params.model, parameters=model.num_parameters(), parity=huggingface.verify(model, tokenizer, out))


if __name__ == "__main__":
    main(run, inputs={"base": "models/{model}"}, outs={"out": "models/deploy"})
