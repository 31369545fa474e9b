"""Stage base: import your own checkpoint, from a folder or the Hub, for the stages that set `base: base`.

    base.folder, or base.hub -> models/base

Qwen3, Qwen2 and LLaMA stay causal models; Dream, DiffuCoder and LLaDA become masked-diffusion models. Weights keep
their values and precision. Missing control tokens are added to the checkpoint's tokenizer, with one embedding row each
(model/initialization.py). A model trained by this project is copied. Non-finite weights are rejected.

If no checkpoint is set, the stage writes a folder with only a README, for pipelines that need no checkpoint.
"""

from dataclasses import dataclass
from pathlib import Path

from pipeline import wings
from pipeline.model import checkpoint, initialization
from pipeline.model.config import BaseConfig, fetched
from pipeline.run.stage import main
from pipeline.run.workdir import Job

ABSENT = """No checkpoint is set. Set a folder or a model on the Hub:

    dvc exp run -S base.folder=/models/mine -S tools.base=base stage_tools
    dvc exp run -S base.hub=owner/name@revision -S tools.base=base stage_tools
"""


@dataclass(frozen=True, kw_only=True)
class Params:
    """The `base` block."""

    checkpoint: BaseConfig


def run(params: Params, job: Job, *, out: Path, folder: Path | None = None) -> None:
    """Convert `folder`, or the Hub checkpoint, into the model directory `out`."""
    lineage = job.lineage
    if params.checkpoint.absent:
        out.mkdir(parents=True)
        (out / "README.md").write_text(ABSENT, encoding="utf-8")
        return
    if folder is None:
        assert params.checkpoint.hub is not None  # without `hub`, `folder` is a stage input
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
