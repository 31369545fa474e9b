"""Stages whose data are empty pass their model on unchanged."""

import json
from pathlib import Path

import pytest

from pipeline.model import checkpoint
from pipeline.run import workdir
from tests.workspace import Ended, Workspace, command

DATA = {
    "tools": "dialogues/train",
    "lora": "skill/train",
    "dpo": "preferences/train",
    "kto": "labels/train",
    "rlhf": "preferences/train",
    "grpo": "problems/rl",
    "distill": "taught/answers",
}


def without(stage: str, data: str) -> Ended:
    """Run a stage whose file of records is empty."""
    path = Path(f"data/{data}.jsonl")
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    keys = {"tools": ["tools.rehearse=none"], "rlhf": ["rlhf.rehearse=none"], "distill": ["distill.teacher=teacher"]}
    ended = command(stage, keys.get(stage, []))
    assert ended.code == 0, ended.said
    return ended


@pytest.mark.parametrize("stage", DATA)
def test_a_model_passes_through_a_stage_without_data(stage: str, workspace: Workspace) -> None:
    base = "code" if stage == "tools" else "tools"
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


def test_without_pairs_a_reward_model_is_not_measured(workspace: Workspace) -> None:
    Path("data/preferences/test.jsonl").write_text("")
    ended = command("evaluate", ["reward"])
    assert ended.code == 0, ended.said
    assert json.loads(Path("metrics/eval/reward.json").read_text()).keys() == {"settings", "lineage"}


def test_a_folder_that_says_why_it_has_no_model_is_not_measured(workspace: Workspace) -> None:
    for name in ("data/raw/text", "data/raw/code", "data/benchmarks", "models/none"):
        Path(name).mkdir(parents=True)
    Path("data/overlap.json").write_text('{"dialogues": [], "problems": []}')
    Path("models/none/README.md").write_text("No causal control.")
    ended = command("evaluate", ["none"])
    assert ended.code == 0 and "models/none: not measured. No causal control." in ended.said, ended.said
    assert Path("metrics/eval/none.jsonl").read_text() == ""
