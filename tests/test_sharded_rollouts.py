"""Reinforcement learning with a sharded model: each process samples with a whole copy of it."""

import re
from typing import Any

import pytest

from tests import sharded
from tests.workspace import Workspace, arguments

pytestmark = [pytest.mark.slow, pytest.mark.full]
ADAPTER = {"rank": 2, "alpha": 4}
GROUPS = {"method": "rloo", "samples": 2, "prompts": 4}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {"beta": 0.05, "adapter": ADAPTER}),
    ("grpo", {"method": "dapo", "epochs": 2, "minibatches": 1}),
    ("rlhf", {"method": "ppo", "rehearsal_rows": 3, "rehearsal_coef": 0.5}),
    ("distill", {"on_policy": 0.5, "beta": 0.3}),
    ("rlhf", GROUPS | {"rehearsal_rows": 1, "rehearsal_coef": 0.5, "adapter": ADAPTER}),
]


@pytest.mark.parametrize(("stage", "changes"), CASES)
def test_two_processes_equal_one(stage: str, changes: dict[str, Any], coded: Workspace) -> None:
    sharded.assert_equal_updates(stage, arguments(stage, sharded.SMOOTH | changes), "tools")


@pytest.mark.parametrize(
    ("stage", "processes", "changes"), [("grpo", 2, {"beta": 0.05}), ("rlhf", 3, {"method": "ppo"})]
)
def test_a_run_that_stopped_resumes_to_the_bit(
    stage: str, processes: int, changes: dict[str, Any], coded: Workspace
) -> None:
    """It publishes what an uninterrupted run of as many processes does; the last of three has fewer rows."""
    line = arguments(stage, sharded.SMOOTH | {"prompts": 6, "iterations": 4, "runtime.save_steps": 1} | changes)
    sharded.ended(stage, line, processes)
    whole = coded.published()
    sharded.stopped(stage, line, processes)
    assert re.search("resumed at step [0-9]+ of 8", sharded.ended(stage, line, processes))
    assert coded.published() == whole


def test_a_base_in_bf16_is_sharded_too(coded: Workspace) -> None:
    """Under an adapter, in bf16: it differs from one process only by rounding."""
    changes = {"adapter": ADAPTER, "beta": 0.05, "runtime.precision": "bf16", "runtime.base_weights": "bf16"}
    line = arguments("grpo", sharded.SMOOTH | changes)
    assert "2 processes" in sharded.ended("grpo", line, 2)
    before, after = sharded.weights("tools"), sharded.weights("grpo")
    frozen = [name for name in before if "mlp" in name or "norm" in name]
    assert frozen and all((after[name] == before[name]).all() for name in frozen)
    assert any(not (after[name] == before[name]).all() for name in before)
