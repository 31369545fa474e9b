"""Curves in TensorBoard and Weights & Biases, besides DVC and MLflow."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.run.config import Runtime
from pipeline.run.errors import ConfigError

ROWS = """
import sys
from pathlib import Path
from pipeline.run.tracking import Tracker

name, folder = sys.argv[1], Path(sys.argv[2])
for part in (1, 2):  # the second continues the first, as after a kill
    tracker = Tracker("language", folder, {}, {"fit": {"steps": 6}, "rate": 0.1}, quiet=False, others=(name,))
    tracker.restore([{"step": step, "loss": 1.0 / step} for step in range(1, 3 * part + 1)])
    tracker.log(3 * part, {"val/loss": 0.25, "note": "text"})
    tracker.flush()
    tracker.finish()
"""


def run(name: str, folder: Path) -> None:
    """Run in a separate process, because the trackers keep threads and global state."""
    environment = {"STAGECOACH_MLFLOW": "off", "WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(folder)}
    subprocess.run([sys.executable, "-c", ROWS, name, str(folder)], check=True, env={**os.environ, **environment})


@pytest.mark.slow
@pytest.mark.full
def test_tensorboard_holds_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run("tensorboard", tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted((tmp_path / "tensorboard/language").glob("events*")):
        events = EventAccumulator(str(path))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, []).extend((e.step, round(e.value, 4)) for e in events.Scalars(tag))
    assert sorted(found["loss"]) == [(step, round(1 / step, 4)) for step in range(1, 7)]
    assert sorted(found["val/loss"]) == [(3, 0.25), (6, 0.25)] and "note" not in found


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.extra
def test_wandb_keeps_an_offline_run_in_the_work_folder(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run("wandb", tmp_path)
    assert len(list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))) == 2


def test_one_that_is_not_installed_or_not_known_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.run.tracking import Others

    monkeypatch.setattr("accelerate.utils.is_wandb_available", lambda: False)
    with pytest.raises(ConfigError, match=r"wandb is not installed; run pip install '\.\[trackers\]'"):
        Others(("wandb",), "language", tmp_path, {})
    with pytest.raises(ValueError, match="trackers: expected only tensorboard, wandb, got 'comet'"):
        Runtime(trackers=("comet",))
