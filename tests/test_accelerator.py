"""Where there is another device than the CPU, stages use it for everything: each runs on that of `accelerator.py`."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.ingest.records import write
from pipeline.model import checkpoint
from pipeline.model.transformer import Transformer
from pipeline.synthetic import programs, stories, tools
from pipeline.text.tokenizer import Tokenizer
from tests import corpora, diffusion_workspace, memory_models, workspace
from tests.conftest import ROOT, SENTENCES
from tests.diffusion_workspace import masked_workspace as masked_workspace
from tests.suites import FEW
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
    assert all(told["there"] > 10 for told in ended.values()), ended
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


@pytest.mark.full
def test_the_spine_trains_there(coded: Workspace) -> None:
    texts(coded.folder, coded.tokenizer)
    stages = {stage: keys(stage, WINDOWS | {"base": "tools"}) for stage in ("code", "tools")}
    on_accelerator(stages | {stage: workspace.arguments(stage, {}) for stage in ("reward", "rlhf")})


@pytest.mark.full
def test_the_branches_train_there(coded: Workspace) -> None:
    stages = {stage: workspace.arguments(stage, {}) for stage in ("lora", "dpo", "kto", "grpo")}
    on_accelerator(stages | {"memory": memory_models.arguments()})


@pytest.mark.full
def test_the_masked_models_train_there(masked: Workspace) -> None:
    on_accelerator({stage: diffusion_workspace.arguments(stage, {}) for stage in diffusion_workspace.STAGES})


@pytest.mark.full
def test_models_are_measured_there(masked: Workspace, tiny_model: Transformer) -> None:
    data = masked.folder / "data"
    shutil.rmtree(data / "dialogues")
    shutil.rmtree(data / "problems")
    write(data / "dialogues/test.jsonl", tools.dialogues("test", 24, 1))
    write(data / "problems/test.jsonl", programs.problems("test", 8, 1))
    told = [(stories.story(f"stories/{family}/50"), family, f"stories/{family}/50") for family in ("gift", "trade")]
    for name in ("raw", "benchmarks"):
        (data / name).mkdir()
    corpora.write_raw(data / "raw/text", val_0=[("Prose. " * 40, "docs", "docs/1"), *told])
    corpora.write_raw(data / "raw/code", val_0=[("def f(x):\n    return x + 1\n" * 6, "package", "a.py")])
    (data / "overlap.json").write_text('{"dialogues": [], "problems": []}')
    long = Transformer(replace(tiny_model.config, max_context=4096), torch.Generator().manual_seed(0))
    checkpoint.save(masked.folder / "models/tools", long, masked.tokenizer, {})
    few = [f"evaluate.{key}={json.dumps(value)}" for key, value in asdict(FEW).items() if value is not None]
    for model in ("tools", "reward", "diffusion"):
        on_accelerator({"evaluate": [model, *few, "evaluate.every_suite=true", "runtime.precision=fp32"]})


def test_models_answer_and_score_there(masked: Workspace) -> None:
    on_accelerator({"serve": ["tools", "reward", "diffusion"]})
