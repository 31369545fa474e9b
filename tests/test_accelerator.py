"""If there is a device other than the CPU, stages use it for everything: each runs on the one in `accelerator.py`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.model import checkpoint
from pipeline.model.transformer import Transformer
from pipeline.text.tokenizer import Tokenizer
from tests import corpora, workspace
from tests.accelerator import on_accelerator, to_measure
from tests.conftest import SENTENCES
from tests.workspace import TRAINING, Workspace

pytestmark = pytest.mark.slow

WINDOWS = TRAINING | {"steps": 2, "tokens_per_step": 256, "context": 128, "eval_tokens": 64, "learning_rate": 1e-2}


def keys(stage: str, values: dict[str, Any]) -> list[str]:
    return ["runtime.precision=fp32", *(f"{stage}.{key}={json.dumps(value)}" for key, value in values.items())]


def texts(folder: Path, tokenizer: Tokenizer) -> None:
    """Write a text corpus as tokens to data/tokens/text."""
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
    on_accelerator({stage: workspace.arguments(stage, {}) for stage in ("lora", "dpo", "kto", "grpo", "distill")})


@pytest.mark.full
def test_models_are_measured_there(coded: Workspace, tiny_model: Transformer) -> None:
    few = to_measure(coded)
    long = Transformer(replace(tiny_model.config, max_context=4096), torch.Generator().manual_seed(0))
    checkpoint.save(coded.folder / "models/tools", long, coded.tokenizer, {})
    for model in ("tools", "reward"):
        on_accelerator({"evaluate": [model, *few]})


def test_models_answer_and_score_there(coded: Workspace) -> None:
    on_accelerator({"serve": ["tools", "reward"]})
