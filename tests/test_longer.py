"""Continued runs: a longer one from a shorter one's state or a named state, and models kept along the way."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.learning.settings import FitConfig
from pipeline.model import checkpoint
from pipeline.run import workdir
from tests.corpora import write_corpus
from tests.workspace import TRAINING, Ended, Workspace, command

KEYS = TRAINING | {
    "rehearse": "none",
    "tokens_per_step": 256,
    "context": 128,
    "eval_tokens": 64,
    "eval_steps": 4,
    "learning_rate": 1e-2,
    "schedule": "wsd",
    "decay_ratio": 0.2,
}


def tools(*argv: str, **changes: Any) -> Ended:
    """Stage tools with KEYS and `changes`; `save_steps` and `keep_models` belong to the block `runtime`."""
    runtime = {"precision": "fp32", "logging_steps": 3} | {
        key: changes.pop(key) for key in ("save_steps", "keep_models", "keep") if key in changes
    }
    values = [f"tools.{key}={json.dumps(value)}" for key, value in (KEYS | changes).items()]
    ended = command("tools", [*argv, *values, *(f"runtime.{key}={json.dumps(v)}" for key, v in runtime.items())])
    return ended


def published() -> dict[str, str]:
    """The hashes of what the stage made, without its lineage, which contains the key."""
    files = [path for path in Path("models/tools").rglob("*") if path.is_file() and path.name != "lineage.json"]
    return {str(path): workdir.sha256(path) for path in [*files, Path("metrics/tools.csv")]}


@pytest.mark.parametrize("publish", ["last", "best"])
def test_a_run_of_thirty_steps_after_one_of_twenty_equals_one_of_thirty(publish: str, workspace: Workspace) -> None:
    assert tools(steps=30, publish=publish).code == 0
    whole = published()
    workdir.remove(workspace.folder / ".work")
    assert tools(steps=20, publish=publish).code == 0
    assert "step-00000016" in workspace.states("tools")  # the rates fall from step 16 on
    longer = tools(steps=30, publish=publish)
    assert longer.code == 0 and "continuing from step 16 of run" in longer.said
    assert published() == whole


def test_a_run_that_rehearses_at_its_end_goes_on_from_before_that(workspace: Workspace) -> None:
    """Rehearsal begins at step 10 of 20, before the rates fall at 16; of 30 steps it begins at 15."""
    for name, texts in (("text", "The boats. "), ("code", "x = 1\n")):
        documents = [texts * (3 + n % 5) for n in range(60)]
        write_corpus(workspace.folder / name, documents[8:], documents[:8], workspace.tokenizer)
        (workspace.folder / name / "tokens").rename(workspace.folder / "data/tokens" / name)
    mixed = {"rehearse": "tokens", "rehearse_from": 0.5}
    assert tools(steps=30, **mixed).code == 0
    whole = published()
    workdir.remove(workspace.folder / ".work")
    assert tools(steps=20, **mixed).code == 0
    longer = tools(steps=30, **mixed)
    assert longer.code == 0 and "continuing from step 10 of run" in longer.said
    assert published() == whole
    assert tools(steps=30, rehearse="tokens", rehearse_from=0.0).code == 0 and published() != whole


def test_a_killed_run_serves_a_longer_one_too(workspace: Workspace) -> None:
    assert tools(steps=30).code == 0
    whole = published()
    (key,) = (path.parent for path in workspace.folder.glob(".work/tools/*/finished.json"))
    (key / "finished.json").unlink()
    longer = tools(steps=40)
    assert "continuing from step 24" in longer.said
    again = tools(steps=30)
    assert again.code == 0 and published() == whole


def test_another_schedule_starts_at_0_and_says_why(workspace: Workspace) -> None:
    assert tools(steps=8, schedule="cosine").code == 0
    assert not workspace.states("tools")
    first = published()
    longer = tools(steps=12, schedule="cosine")
    assert longer.code == 0 and "the rates of schedule cosine depend on the length" in longer.said
    assert tools(steps=12, schedule="cosine", learning_rate=2e-2).code == 0
    assert published() != first


def test_a_run_that_differs_in_more_than_its_length_is_not_gone_on_from(workspace: Workspace) -> None:
    assert tools(steps=20).code == 0
    other = tools(steps=30, learning_rate=2e-2)
    assert other.code == 0 and "differs only in length" not in other.said and "continuing from" not in other.said


@pytest.mark.parametrize(
    ("changes", "free"),
    [
        ({"schedule": "wsd", "decay_ratio": 0.2}, 240),
        ({"schedule": "constant"}, 300),
        ({"schedule": "cosine"}, 0),
        ({"schedule": "linear"}, 0),
        ({"schedule": "wsd", "warmup_ratio": 0.1}, 0),
        ({"schedule": "wsd", "warmup_steps": 20}, 240),
    ],
)
def test_the_free_steps_have_the_rates_of_every_longer_run(changes: dict[str, Any], free: int) -> None:
    config = FitConfig(learning_rate=1.0, steps=300, tokens_per_step=8, context=8, **changes)
    assert config.free_steps(300) == free
    for longer in (301, 400, 3000):
        assert all(config.factor(step, 300) == config.factor(step, longer) for step in range(free))
    if free < 300:
        assert config.factor(free + 1, 300) != config.factor(free + 1, 400)


def test_a_named_state_gives_the_bytes_of_the_run_that_stopped_there(workspace: Workspace) -> None:
    assert tools(steps=20, save_steps=5, keep=9).code == 0
    whole = published()
    listed = tools("--resume", "10", steps=20)
    assert listed.code == 2 and "--resume 10: this run has no such checkpoint" in listed.said and "16" in listed.said
    resumed = tools("--resume", "16", steps=20)
    assert resumed.code == 0 and "resumed at step 16 of 20" in resumed.said
    assert published() == whole


@pytest.mark.parametrize("argv", [["--resume"], ["--resume", "last"], ["--resume", "-3"]])
def test_a_state_must_be_named_by_its_step(argv: list[str], workspace: Workspace) -> None:
    ended = tools(*argv, steps=4)
    assert ended.code == 2 and "--resume STEP" in ended.said


def test_the_models_of_the_middle_are_those_of_runs_that_end_there(workspace: Workspace) -> None:
    constant: dict[str, Any] = {"schedule": "constant", "publish": "last"}
    assert tools(steps=12, keep_models=[5, 8], **constant).code == 0
    kept = {step: checkpoint.load(Path(f"models/tools-{step}"))[0].state_dict() for step in (5, 8)}
    workdir.remove(workspace.folder / ".work")
    for step, weights in kept.items():
        assert tools(steps=step, **constant).code == 0
        ended = checkpoint.load(Path("models/tools"))[0].state_dict()
        assert all(torch.equal(weights[name], tensor) for name, tensor in ended.items())
    assert not list(Path("models").glob(".*.part"))


def test_an_adapter_is_merged_into_the_model_of_the_middle_and_training_goes_on(workspace: Workspace) -> None:
    adapter = {"rank": 2, "alpha": 4}
    assert workspace.command("dpo", adapter=adapter, steps=4).code == 0
    whole = workspace.weights("dpo")
    workdir.remove(workspace.folder / ".work")
    ended = workspace.command("dpo", adapter=adapter, steps=4, **{"runtime.keep_models": [2]})
    assert ended.code == 0, ended.said
    assert all(torch.equal(whole[name], tensor) for name, tensor in workspace.weights("dpo").items())
    base, middle = workspace.weights("tools"), workspace.weights("dpo-2")
    assert base.keys() == middle.keys() and any(not torch.equal(base[name], middle[name]) for name in base)


def test_models_that_cannot_be_kept_are_named_and_end_no_run(workspace: Workspace) -> None:
    """The block `runtime` is read by every stage of the graph."""
    ended = workspace.command("reward", **{"runtime.keep_models": [2]})
    assert ended.code == 0 and "is ignored because stage_reward writes a model only at the end" in ended.said
    ended = tools(steps=4, keep_models=[9])
    assert ended.code == 0 and "stage_tools has 4 steps, so step 9 is never reached" in ended.said
    ended = tools(steps=4, keep_models=[2])
    assert ended.code == 0 and "the model of step 2 was not kept: retrain with runtime.fresh=true" in ended.said


def test_a_run_that_another_process_trains_is_left_alone(workspace: Workspace) -> None:
    assert tools(steps=20).code == 0
    (key,) = (path.parent for path in workspace.folder.glob(".work/tools/*/finished.json"))
    with workdir.held(key) as is_held:
        assert is_held
        longer = tools(steps=30)
    assert (
        longer.code == 0
        and "starts at step 0: the other run's states are gone, or in use by another process" in longer.said
    )
