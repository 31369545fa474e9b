"""Stage base: take in a checkpoint of your own, from a folder or the hub, for the stages whose `base` is `base`.

    base.folder, or base.hub -> models/base

Qwen3, Qwen2 and LLaMA stay causal models; Dream, DiffuCoder and LLaDA become masked-diffusion models. Weights keep
their numbers and precision. The checkpoint's tokenizer gets the control tokens that it lacks, and the embedding a row
for each (model/initialization.py). A model that this project made is copied. Weights that are not finite are refused.

Without a checkpoint the stage writes a folder that says so, for a graph in which no stage asks for it.
"""

from dataclasses import dataclass
from pathlib import Path

from pipeline import wings
from pipeline.model import checkpoint, initialization
from pipeline.model.config import BaseConfig, fetched
from pipeline.run.stage import main
from pipeline.run.workdir import Job

ABSENT = """No checkpoint of yours is named. Name a folder or a model of the hub:

    dvc exp run -S base.folder=/models/mine -S tools.base=base stage_tools
    dvc exp run -S base.hub=owner/name@revision -S tools.base=base stage_tools
"""


@dataclass(frozen=True, kw_only=True)
class Params:
    """The block `base`."""

    checkpoint: BaseConfig


def run(params: Params, job: Job, *, out: Path, folder: Path | None = None) -> None:
    """Write `folder`, or the checkpoint of the hub, as the model directory `out`."""
    lineage = job.lineage
    if params.checkpoint.absent:
        out.mkdir(parents=True)
        (out / "README.md").write_text(ABSENT, encoding="utf-8")
        return
    if folder is None:
        assert params.checkpoint.hub is not None  # else the folder is an input
        hub = fetched(params.checkpoint.hub)
        folder, lineage = hub.folder, lineage | {"base": f"{hub.name}@{hub.commit}"}
    kinds: list[checkpoint.BaseKind] = [offer() for offer in wings.each("base")]
    own_kind = next((kind for kind in kinds if kind.is_masked(folder)), None)
    precision = checkpoint.require_finite(folder)
    if own_kind:
        own_kind.take_in(folder, out, lineage, precision)
    else:
        is_ours = (folder / "lineage.json").is_file()
        load = checkpoint.load if is_ours else initialization.load
        model, tokenizer = load(folder)
        checkpoint.save(out, model, tokenizer, lineage, precision=precision)
    job.report(kind=checkpoint.kind(out), precision=precision)


if __name__ == "__main__":
    main(
        run, inputs={}, outs={"out": "models/base"}, seed="data_seed", chosen=lambda params: params.checkpoint.inputs()
    )
