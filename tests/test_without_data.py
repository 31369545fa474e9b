"""Stages whose data are empty hand their model on as it is."""

import json
from pathlib import Path

import pytest

from pipeline.model import checkpoint
from pipeline.run import workdir
from tests.workspace import Ended, Workspace, command

DATA = {
    "tools": "dialogues/train",
    "lora": "dialogues/train",
    "dpo": "preferences/train",
    "kto": "labels/train",
    "rlhf": "preferences/train",
    "grpo": "problems/rl",
}


def without(stage: str, data: str) -> Ended:
    """Run a stage whose file of records is empty."""
    Path(f"data/{data}.jsonl").write_text("")
    ended = command(stage, [])
    assert ended.code == 0, ended.said
    return ended


@pytest.mark.parametrize("stage", DATA)
def test_a_model_passes_through_a_stage_without_data(stage: str, workspace: Workspace) -> None:
    base = "code" if stage in ("tools", "lora") else "tools"
    if stage == "tools":
        workdir.remove(Path("models/tools"))
    ended = without(stage, DATA[stage])
    assert f"data/{DATA[stage].split('/')[0]} has nothing to train on" in ended.said
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (Path("models") / stage / file).read_bytes() == (Path("models") / base / file).read_bytes()
    lineage = json.loads(Path(f"models/{stage}/lineage.json").read_text())
    assert f"models/{base}" in lineage["inputs"] and lineage["tokenizer"] == workspace.tokenizer.hash
    assert "passed_through" in workspace.numbers(stage)
    assert workspace.curve(stage) == []


def test_without_pairs_the_reward_of_every_answer_is_0(workspace: Workspace) -> None:
    without("reward", "preferences/train")
    model, _ = checkpoint.load_reward(Path("models/reward"))
    assert (model.reward_mean, model.reward_std) == (0.0, 1.0) and not model.score.weight.any()
