"""Stages as commands in one process, or in several that shard their model (FSDP2)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from tests.conftest import ROOT

TOLERANCE = 1e-6
SECONDS = 300
# with Adam's eps of 1e-8, a gradient of 1e-9 that rounds to the other side of zero moves its weight by twice the rate
SMOOTH: dict[str, Any] = {"eps": 1e-2, "learning_rate": 1e-2}


def started(stage: str, arguments: list[str], processes: int = 1) -> "subprocess.Popen[str]":
    """Start a stage in this directory."""
    launch = "" if processes == 1 else f"fsdp2:{processes}"
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "STAGECOACH_LAUNCH": launch,
    }
    command = [sys.executable, "-m", f"stages.{stage}", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def ended(stage: str, arguments: list[str], processes: int = 1) -> str:
    """Run a stage, from a saved state if there is one, and return its stderr. A stage that hangs is killed and has
    failed.
    """
    process = started(stage, arguments, processes)
    try:
        said = process.communicate(timeout=SECONDS)[1]
    except subprocess.TimeoutExpired:
        for one in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
            one.kill()
        raise
    assert process.returncode == 0, said[-6000:]
    return said


def stopped(stage: str, arguments: list[str], processes: int = 1) -> None:
    """Run a stage from the beginning until it has saved a state, then tell it to stop."""
    process = started(stage, [*arguments, "runtime.fresh=true"], processes)
    begun = time.monotonic()
    while not list(Path(".work", stage).glob("*/step-????????")) and time.monotonic() - begun < 200:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=200)[1]
    assert process.returncode == 143, said[-6000:]


def weights(stage: str) -> dict[str, torch.Tensor]:
    """The weights of models/<stage>."""
    return load_file(Path("models") / stage / "model.safetensors")


def assert_equal_updates(stage: str, arguments: list[str], base: str) -> None:
    """Check that two processes sharding a model end within TOLERANCE of one, and that weights moved far more."""
    ended(stage, arguments)
    alone, start = weights(stage), weights(base)
    assert "2 processes" in ended(stage, [*arguments, "runtime.fresh=true"], 2)
    together = weights(stage)
    assert together.keys() == alone.keys()
    for name, value in alone.items():
        torch.testing.assert_close(together[name], value, atol=TOLERANCE, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    moved = max(float((value - start[name]).abs().max()) for name, value in alone.items())
    assert moved > 100 * TOLERANCE, moved
