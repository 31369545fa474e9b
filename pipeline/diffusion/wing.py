"""The extension points of masked diffusion; see `pipeline.wings`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.evaluation.suites import OwnSuites
    from pipeline.export.smoke import OwnFormat
    from pipeline.model.checkpoint import BaseKind
    from pipeline.report.metrics import Section, WingModel
    from pipeline.serve.models import OwnKind


def base() -> "BaseKind":
    """The checkpoints that the stage `base` can import."""
    from pipeline.diffusion import files

    return files


def export() -> "OwnFormat":
    """The directories of masked-diffusion models."""
    from pipeline.diffusion import files

    return files


def evaluation_keys() -> type:
    """The keys of the `evaluate` block for masked-diffusion models."""
    from pipeline.diffusion import measure

    return measure.CanvasSettings


def purposes() -> dict[str, tuple[str, ...]]:
    """The suites of the causal model that a masked-diffusion model is compared with."""
    return {"diffusion_control": ("code", "problems")}


def evaluation() -> "OwnSuites":
    """The measurements of masked-diffusion models."""
    from pipeline.diffusion import measure

    return measure


def models() -> "dict[str, WingModel]":
    """The models in the report; `diffusion` is compared with its control, the best causal model on the same data."""
    from pipeline.report.metrics import WingModel

    return {
        "diffusion": WingModel("diffusion", compared="diffusion_control"),
        "diffusion_control": WingModel("diffusion", compared="code"),
        "diffusion_dpo": WingModel("diffusion_dpo"),
        "diffusion_grpo": WingModel("diffusion_grpo"),
    }


def report() -> "Section":
    """The report section on masked-diffusion models."""
    from pipeline.diffusion import report as diffusion_report

    return diffusion_report


def serving() -> "OwnKind":
    """The engine of masked-diffusion models."""
    from pipeline.diffusion import serving as diffusion_serving

    return diffusion_serving
