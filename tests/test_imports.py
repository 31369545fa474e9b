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
SHARDED = ("torch.distributed.fsdp", "torch.distributed.tensor", "sympy")  # for models sharded over processes
MODELS = ("language", "rlhf", "memory", "evaluate", "deploy")
BESIDE_TORCH = (*(name for name in HEAVY if name not in ("torch", "scipy")), *SHARDED, "torch._dynamo")


def imported(stage: str) -> set[str]:
    """The modules that are loaded once a stage has been imported."""
    told = subprocess.run(
        [sys.executable, "-c", f"import sys, stages.{stage}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(told.stdout.split())


@pytest.mark.parametrize(
    ("stage", "unwanted"), [*((stage, HEAVY) for stage in LIGHT), *((stage, BESIDE_TORCH) for stage in MODELS)]
)
def test_a_stage_does_not_import_what_it_does_not_use(stage: str, unwanted: tuple[str, ...]) -> None:
    found = imported(stage)
    assert "pipeline.run.config" in found
    assert not found & set(unwanted)


def test_an_update_does_not_import_a_compiler() -> None:
    """torch's own optimizers would, at their first call."""
    code = """
import sys, torch
from pipeline.learning.optim import OptimizerConfig, Optimizers
model = torch.nn.Sequential(torch.nn.Linear(2, 2))
rates = OptimizerConfig(optimizer="muon", learning_rate=1.0, weight_decay=0.0, betas=(0.9, 0.99), eps=1e-8)
both = Optimizers(model, rates, fast_bf16=False)
before = [parameter.clone() for parameter in model.parameters()]
model(torch.ones(1, 2)).sum().backward()
both.step(1.0)
assert len(both.optimizers) == 2 and not any(map(torch.equal, before, model.parameters()))
assert all(parameter.grad is None for parameter in model.parameters())
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
