"""Where there is another device than the CPU, stages use it for everything: each runs on that of `accelerator.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.text.tokenizer import Tokenizer
from tests import corpora, diffusion_workspace, test_memory_stage, workspace
from tests.conftest import ROOT, SENTENCES
from tests.diffusion_workspace import masked_workspace as masked_workspace
from tests.workspace import TRAINING, Workspace

pytestmark = pytest.mark.slow

WINDOWS = TRAINING | {"steps": 2, "tokens_per_step": 256, "context": 128, "eval_tokens": 64, "learning_rate": 1e-2}


def keys(stage: str, values: dict[str, Any]) -> list[str]:
    return ["runtime.precision=fp32", *(f"{stage}.{key}={json.dumps(value)}" for key, value in values.items())]


def on_accelerator(stages: dict[str, list[str]]) -> None:
    """Each stage ends well, with all of its matrix products there."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.accelerator", json.dumps(stages)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    ended = json.loads(done.stdout.splitlines()[-1])
    assert {stage: told["said"] for stage, told in ended.items() if told["code"]} == {}
    assert all(told["there"] > 20 for told in ended.values()), ended
    assert {stage: told["cpu"] for stage, told in ended.items()} == dict.fromkeys(stages, 0)


def texts(folder: Path, tokenizer: Tokenizer) -> None:
    """A corpus of text, as tokens in data/tokens/text."""
    corpora.write_corpus(folder / "text", ["The boats. " * 9] * 40, ["The boats. " * 9] * 8, tokenizer)
    (folder / "data/tokens").mkdir(parents=True, exist_ok=True)
    (folder / "text/tokens").rename(folder / "data/tokens/text")


def test_language_trains_there(coded: Workspace) -> None:
    tokenizer = Tokenizer.train(iter(SENTENCES), 4096)
    tokenizer.save(coded.folder / "data/tokenizer")
    texts(coded.folder, tokenizer)
    (coded.folder / "models/scratch").mkdir()
    on_accelerator({"language": keys("language", WINDOWS | {"induction_heads": False})})


def test_the_spine_trains_there(coded: Workspace) -> None:
    texts(coded.folder, coded.tokenizer)
    stages = {stage: keys(stage, WINDOWS | {"base": "tools"}) for stage in ("code", "tools")}
    on_accelerator(stages | {stage: workspace.arguments(stage, {}) for stage in ("reward", "rlhf")})


@pytest.mark.full
def test_the_branches_train_there(coded: Workspace) -> None:
    stages = {stage: workspace.arguments(stage, {}) for stage in ("lora", "dpo", "kto", "grpo")}
    on_accelerator(stages | {"memory": test_memory_stage.arguments()})


@pytest.mark.full
def test_the_masked_models_train_there(masked: Workspace) -> None:
    on_accelerator({stage: diffusion_workspace.arguments(stage, {}) for stage in diffusion_workspace.STAGES})


def test_models_answer_and_score_there(masked: Workspace) -> None:
    on_accelerator({"serve": ["tools", "reward", "diffusion"]})
