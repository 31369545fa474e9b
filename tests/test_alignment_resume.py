"""Each alignment stage, stopped and run again, publishes the same bytes as an uninterrupted run (CPU, equal threads).

It is stopped in three ways: inside the loop (every stage in `make test`), after its last step, and by SIGKILL (in `make
test`, one stage that trains in steps and one that trains between rollouts; the rest in `make test-all`). VARIANTS cover
what else a state contains.
"""

from typing import Any

import pytest

from pipeline.model import checkpoint
from tests.stopping import Stopped, hooked, killed, stop
from tests.workspace import SETTINGS, Workspace, arguments

pytestmark = pytest.mark.slow  # each test runs a stage
SAVING: dict[str, Any] = {"runtime.save_steps": 1}
ROLLING = ("rlhf", "grpo", "distill")  # two steps per fill; states are saved only between fills


def finished(workspace: Workspace, stage: str, **changes: Any) -> tuple[dict[str, str], str]:
    """Run the stage; returns the hashes of what it published, and its output."""
    ended = workspace.command(stage, **changes)
    assert ended.code == 0, ended.said
    return {path: digest for path, digest in workspace.published().items() if f"/{stage}" in path}, ended.said


def stop_at(workspace: Workspace, stage: str, last: int, **changes: Any) -> None:
    """Run a stage from the beginning and stop it before step `last`."""
    with hooked(stop(last)), pytest.raises(Stopped):
        workspace.command(stage, **SAVING | {"runtime.fresh": True}, **changes)


@pytest.mark.parametrize("stage", SETTINGS)
def test_a_stage_that_stopped_before_its_second_step_publishes_what_an_uninterrupted_one_does(
    stage: str, workspace: Workspace
) -> None:
    """Inside an RL iteration, it resumes at the fill before it, which is the beginning."""
    whole, _ = finished(workspace, stage, **SAVING)
    assert any(path.endswith("model.safetensors") for path in whole)
    stop_at(workspace, stage, 1)
    again, said = finished(workspace, stage, **SAVING)
    assert ("resumed at step 1 of 4" in said) == (stage not in ROLLING)
    assert again == whole


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("kto", {"adapter": {"rank": 2, "alpha": 4}, "desirable_weight": 1.3}),
    ("dpo", {"adapter": {"rank": 2, "alpha": 4}, "precompute_reference": False}),
    ("rlhf", {"adapter": {"rank": 2, "alpha": 4, "dora": True}, "horizon": 10}),
    ("rlhf", {"rewards": {"learned": 1.0}, "samples": 2, "prompts": 3, "rehearsal_rows": 0}),
    ("rlhf", {"method": "rloo", "rewards": {"learned": 1.0}, "samples": 2, "prompts": 3}),
    ("grpo", {"method": "dapo", "epochs": 2, "minibatches": 1}),
    ("grpo", {"method": "reinforce_pp", "adapter": {"rank": 2, "alpha": 4}}),
    ("distill", {"on_policy": 0.0, "adapter": {"rank": 2, "alpha": 4}}),
    ("distill", {"on_policy": 1.0, "beta": 1.0, "loss": "minillm", "gamma": 0.9}),
    ("lora", {"dropout": 0.3, "dora": True}),
]


@pytest.mark.full
@pytest.mark.parametrize(("stage", "changes"), VARIANTS)
def test_adapters_and_other_methods_resume_too(stage: str, changes: dict[str, Any], workspace: Workspace) -> None:
    whole, _ = finished(workspace, stage, **SAVING, **changes)
    stop_at(workspace, stage, 3, **changes)
    again, said = finished(workspace, stage, **SAVING, **changes)
    assert "resumed at step" in said
    assert again == whole


@pytest.mark.full
@pytest.mark.parametrize("stage", SETTINGS)
def test_a_stage_that_was_stopped_behind_its_last_step_only_publishes(
    stage: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is where it merges, measures, calibrates and writes; no step is trained again."""
    whole, _ = finished(workspace, stage, **SAVING)

    def fail(*given: object) -> None:
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_reward" if stage == "reward" else "save", fail)
        with pytest.raises(Stopped):
            workspace.command(stage, **SAVING | {"runtime.fresh": True})
    again, said = finished(workspace, stage, **SAVING)
    assert "resumed at step 4 of 4" in said
    assert again == whole


@pytest.mark.parametrize(
    "stage", [stage if stage in ("lora", "grpo") else pytest.param(stage, marks=pytest.mark.full) for stage in SETTINGS]
)
def test_a_stage_that_was_killed_publishes_what_an_uninterrupted_one_does(stage: str, workspace: Workspace) -> None:
    """SIGKILL: no handler, no flush, no unlocking."""
    whole, _ = finished(workspace, stage, **SAVING)
    killed(3, stage, arguments(stage, SAVING | {"runtime.fresh": True}))
    assert workspace.states(stage)
    again, said = finished(workspace, stage, **SAVING)
    assert f"resumed at step {2 if stage in ROLLING else 3} of 4" in said
    assert again == whole
