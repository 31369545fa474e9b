"""Stages reward and dpo read as many pairs of answers at a time, and as long ones, as their blocks say."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from pipeline.learning.settings import PairConfig
from pipeline.sandbox.judge import SandboxConfig
from stages import dpo, reward
from tests.loop import job
from tests.workspace import Workspace

REWARD = {"centering": 0.0, "label_flip": 0.0, "own_prompts": 0, "calibration_answers": 4, "answer_tokens": 24}


class StreamAskedError(Exception):
    pass


@pytest.mark.parametrize("stage", [dpo, reward])
def test_pairs_are_read_as_the_keys_of_their_stage_say(
    stage: Any, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def stream(*_: object, **given: Any) -> None:
        asked.update(given)
        raise StreamAskedError

    monkeypatch.setattr(stage, "PairStream", stream)
    monkeypatch.setattr(reward, "judge_or_none", lambda *_: nullcontext(None))
    config = PairConfig(steps=1, learning_rate=1e-3, pairs=3, max_prompt=50, max_length=110)
    values: dict[str, Any] = {"precompute_reference": False} if stage is dpo else {"sandbox": SandboxConfig()} | REWARD
    outs = {"base": Path("models/tools"), "pairs": Path("data/preferences"), "out": Path("models/new")}
    with pytest.raises(StreamAskedError):
        stage.run(stage.Params(fit=config, **values), job(workspace.folder / "work"), **outs)
    assert (asked["pairs"], asked["max_prompt"], asked["max_length"], asked["seed"]) == (3, 50, 110, 1)
