"""Record what a stage passes to `fit` instead of training, to check that the keys of its block arrive there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from pipeline.rl import models
from pipeline.sandbox.judge import SandboxConfig


@dataclass
class Handed:
    """The arguments of the stage's only call to `fit`."""

    model: Any = None
    stream: Any = None
    loss: Any = None
    config: Any = None
    job: Any = None
    from_scratch: bool = False
    watchers: Any = None
    seen: Any = None  # what `look` returned


def handed(
    stage: ModuleType, monkeypatch: pytest.MonkeyPatch, look: Callable[[Handed], Any] = lambda _: None
) -> Handed:
    """Replace the stage's `fit` by one that trains nothing, but fills the returned object and calls `look` on it."""
    found = Handed()

    def fit(model: Any, stream: Any, loss: Any, config: Any, job: Any, **more: Any) -> None:
        assert found.model is None, "a stage trains once"
        found.model, found.stream, found.loss, found.config, found.job = model, stream, loss, config, job
        for name, value in more.items():
            setattr(found, name, value)
        found.seen = look(found)

    monkeypatch.setattr(stage, "fit", fit)
    return found


def without_judge(monkeypatch: pytest.MonkeyPatch, stage: ModuleType = models) -> list[SandboxConfig]:
    """Start no sandbox when `stage` asks for one; returns the settings that it passed."""
    asked: list[SandboxConfig] = []

    def judge_or_none(sandbox: SandboxConfig, *_: Any, **__: Any) -> Any:
        asked.append(sandbox)
        return nullcontext()

    monkeypatch.setattr(stage, "judge_or_none", judge_or_none)
    return asked
