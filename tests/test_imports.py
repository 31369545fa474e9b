"""What a stage imports before it does anything: a graph starts three dozen of them, so none pays for what it does
not use.
"""

import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "mlflow",
    "pandas",
    "datasets",
    "matplotlib",
    "nltk",
    "rouge_score",
    "scipy",
    "fastapi",
    "transformers",
    "accelerate",
)
LIGHT = ("corpus", "tasks", "tokenizer", "encode")  # no model
MEASURES = ("evaluate", "deploy")  # a model, but no training
NOT_TRAINED = (*(name for name in HEAVY if name not in ("torch", "scipy")), "torch.distributed.fsdp", "torch._dynamo")


def imported(stage: str) -> set[str]:
    """The modules that are there when a stage has been imported."""
    told = subprocess.run(
        [sys.executable, "-c", f"import sys, stages.{stage}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(told.stdout.split())


@pytest.mark.parametrize(
    ("stage", "unwanted"), [*((stage, HEAVY) for stage in LIGHT), *((stage, NOT_TRAINED) for stage in MEASURES)]
)
def test_a_stage_does_not_import_what_it_does_not_use(stage: str, unwanted: tuple[str, ...]) -> None:
    found = imported(stage)
    assert "pipeline.run.config" in found
    assert not found & set(unwanted)
