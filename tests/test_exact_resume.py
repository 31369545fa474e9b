"""Resumed from the state after any of its steps, a run ends with the state of an uninterrupted one, bit for bit.

Twelve steps in float32 on a CPU, with dropout and averaged weights; one process and two, one micro-batch and three.
STAGECOACH_TEST_COMPILED=1 adds compiled layers, which takes minutes; test_compiling.py resumes one such run in any
case.
"""

import os
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pipeline.learning import states
from tests import training
from tests.training import Case

STEPS = 12
COMPILED = (False, True) if os.environ.get("STAGECOACH_TEST_COMPILED") else (False,)
KINDS = list(product((1, 2), (1, 3), COMPILED))  # processes, micro-batches per step, compiled
pytestmark = [pytest.mark.slow, pytest.mark.full]


def case(folder: Path, processes: int, micro_batches: int, compiled: bool, name: str) -> Case:
    micro_batch = 6 // processes // micro_batches
    return Case(
        folder=str(folder / f"{processes}-{micro_batches}-{compiled}" / name / "key"),
        micro_batch=micro_batch,
        steps=STEPS,
        save_steps=1,
        keep=STEPS,
        compile=compiled,
        optimizer="muon",
        dropout=0.1,
        ema_decay=0.9,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run every kind whole, then from each of its states; all runs share one cache of compiled code."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "compiled"))
        for processes in (1, 2):
            kinds = [kind for kind in KINDS if kind[0] == processes]
            training.together([case(folder, *kind, "whole") for kind in kinds], folder, processes=processes)
            again = []
            for kind in kinds:
                whole = Path(case(folder, *kind, "whole").folder)
                for step in range(1, STEPS + 1):
                    again.append(case(folder, *kind, str(step)))
                    shutil.copytree(whole / states.name_of(step), Path(again[-1].folder) / states.name_of(step))
            training.together(again, folder, processes=processes)
    return folder


def state(of: Case) -> dict[str, Any]:
    """The bytes of each of the last state's files."""
    folder = Path(of.folder) / states.name_of(STEPS)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(("processes", "micro_batches", "compiled"), KINDS)
def test_the_state_after_a_resume_is_deep_equal(runs: Path, processes: int, micro_batches: int, compiled: bool) -> None:
    whole = case(runs, processes, micro_batches, compiled, "whole")
    expected, seen = state(whole), training.told(Path(whole.folder), processes - 1)["seen"]
    assert {"weights.safetensors", "optimizer.safetensors", "state.json", "curve.jsonl"} <= set(expected)
    for step in range(1, STEPS + 1):
        again = case(runs, processes, micro_batches, compiled, str(step))
        assert state(again) == expected, step
        told = training.told(Path(again.folder), processes - 1)
        assert told["seen"] == {number: rows for number, rows in seen.items() if int(number) >= step}
    assert training.told(Path(whole.folder))["code"] == 0


def test_the_kinds_are_different_runs(runs: Path) -> None:
    """Dropout is drawn per rank and micro-batch, and compiled layers round differently, so equal bytes would mean that
    an option has no effect.
    """
    weights = {kind: state(case(runs, *kind, "whole"))["weights.safetensors"] for kind in KINDS}
    assert len(set(weights.values())) == len(KINDS)
