"""End a run of `fit` before a step, or do something there, through its public hook `Watchers.step`."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from pipeline.learning import fit as learning_fit
from pipeline.learning.fit import Watchers
from tests.conftest import ROOT

DOOMED = """
import os, runpy, signal, sys
from tests.stopping import hooked
last = int(sys.argv[1])
def end(step):
    if step == last:
        os.kill(os.getpid(), signal.SIGKILL)
sys.argv = sys.argv[2:]
with hooked(end):
    runpy.run_module("stages." + sys.argv[0], run_name="__main__", alter_sys=True)
"""


def killed(last: int, stage: str, arguments: list[str]) -> None:
    """Run a stage as a process that kills itself with SIGKILL before step `last`: no handler, no flush."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    line = [sys.executable, "-c", DOOMED, str(last), stage, *arguments]
    ended = subprocess.run(line, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-4000:]


class Stopped(BaseException):
    """Ends a run without a signal, so that nothing more is saved."""


def before(last: int) -> Watchers:
    """Watchers that end a run before step `last`, counted from 0."""
    return Watchers(step=stop(last))


def stop(last: int) -> Callable[[int], None]:
    """The hook of `before`."""

    def step(made: int) -> None:
        if made == last:
            raise Stopped

    return step


@contextmanager
def hooked(step: Callable[[int], None]) -> Iterator[None]:
    """Inside the block, stages run as commands in this process call `step` before each step; their other hooks stay.

    A stage imports `fit` when it starts, so it gets the patched one.
    """
    original = learning_fit.fit

    def fit(*given: Any, watchers: Watchers | None = None, **options: Any) -> None:
        original(*given, watchers=replace(watchers or Watchers(), step=step), **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning_fit, "fit", fit)
        yield
