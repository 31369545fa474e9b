"""`workspace.py` for the masked-diffusion stages: an adapted model, problems with answers, code tokens."""

from typing import Any

import pytest
import torch

from pipeline.diffusion import files
from pipeline.ingest import records
from pipeline.model import checkpoint
from tests import workspace
from tests.workspace import PAIRS, ROLLOUTS, TRAINING, Workspace, problem

STAGES = ("diffusion", "diffusion_dpo", "diffusion_grpo")
SETTINGS: dict[str, dict[str, Any]] = {
    "diffusion": TRAINING
    | {
        "adapt_steps": 3,
        "context": 64,
        "tokens_per_step": 256,
        "anneal_fraction": 0.7,
        "sft_epochs": 0.5,
        "sft_examples": 4,
        "max_prompt": 80,
        "max_new_tokens": 96,
        "learning_rate": 1e-3,
        "eval_tokens": 64,
    },
    "diffusion_dpo": PAIRS | {"diffusion_steps": 3, "eval_draws": 4, "beta": 0.2, "sft_weight": 0.05, "kinds": []},
    "diffusion_grpo": ROLLOUTS
    | {
        "prompts": 3,
        "samples": 4,
        "epochs": 2,
        "minibatches": 1,
        "denoising_steps": 8,
        "difficulty": "all",
        "ref_sync": 2,
        "rewards": {"length": 1.0, "code_format": 0.5},
        "eval_problems": 2,
    },
}


def answered(number: int) -> records.Problem:
    """A problem with its answer, which takes one to three canvases."""
    lines = "".join(f"    x = x + {n}\n" for n in range(number % 3))
    return problem(number, answer=f"```python\ndef f(x):\n{lines}    return x\n```")


@pytest.fixture(name="masked")
def masked_workspace(coded: Workspace) -> Workspace:
    """`coded`, plus what the masked-diffusion stages read."""
    folder, tokenizer = coded.folder, coded.tokenizer
    for split, first, count in (("train", 0, 24), ("val", 100, 3)):
        records.write(folder / f"data/problems/{split}.jsonl", map(answered, range(first, first + count)))
    causal, _ = checkpoint.load(folder / "models/code")
    denoiser = files.from_causal(causal, tokenizer)
    with torch.no_grad():  # so that some completions end, but late
        denoiser.trunk.model.embed_tokens.weight[tokenizer.turn_end] *= 0.3
    files.save(folder / "models/diffusion", denoiser, tokenizer, {})
    return coded


def arguments(stage: str, changes: dict[str, Any]) -> list[str]:
    """A stage's command line with SETTINGS and `changes`."""
    before = workspace.SETTINGS
    workspace.SETTINGS = before | SETTINGS
    try:
        return workspace.arguments(stage, changes)
    finally:
        workspace.SETTINGS = before
