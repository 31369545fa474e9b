"""benchmarks/diffusion.py measures a policy on the problems that its start was unsure of, with other samples than those
that chose the problems.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import diffusion
from tests.judges import problem

RATES = {"a": 0.0, "b": 0.25, "c": 0.5, "d": 0.75, "e": 1.0}


def test_a_gain_is_measured_on_unsure_problems_by_other_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str], list[int]]] = []

    def solved(_: diffusion.Samples, folder: Path, problems: list[Any], samples: range, *__: object) -> np.ndarray:
        asked.append((folder.name, [p.id for p in problems], list(samples)))
        more = {"before": 0.0, "after": 0.25, "other": -0.25}[folder.name]
        return np.array([[n / 16 < RATES[p.id] + more for n in range(16)] for p in problems])

    monkeypatch.setattr(diffusion.Samples, "of", solved)
    arguments = argparse.Namespace(model=Path("before"), others=[Path("after"), Path("other")], samples=None)
    judge: Any = None
    found = diffusion.gain(arguments, [problem(name) for name in RATES], judge)
    first, second = list(range(16)), list(range(16, 32))
    assert asked == [("before", list("abcde"), first)] + [
        (name, list("bcd"), second) for name in ("before", "after", "other")
    ]
    assert (found["problems"], found["chosen"], found["rate_of_all"], found["before"]) == (5, 3, 0.5, 0.5)
    assert (found["after"]["after"], found["after"]["gain"], found["other"]["gain"]) == (0.75, 0.25, -0.25)
    assert [found["after"]["gain_low"], found["after"]["gain_high"]] == pytest.approx(
        [0.25, 0.25]
    )  # each gained the same


def test_samples_that_are_kept_are_not_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[int] = []

    def generate(_: str, prompts: Mapping[str, str], __: object, sample: int) -> dict[str, Any]:
        asked.append(sample)
        return {name: SimpleNamespace(ids=f"{name}{sample}") for name in prompts}

    denoiser = SimpleNamespace(traits=SimpleNamespace(block_size=0))
    subject = SimpleNamespace(generate=generate, denoiser=denoiser, tokenizer=SimpleNamespace(decode=str))
    monkeypatch.setattr(diffusion, "subject", lambda *_: subject)
    monkeypatch.setattr(diffusion.suites, "user", lambda _, question: question)
    passed = {"a0", "b1"}
    monkeypatch.setattr(
        diffusion.code,
        "judge_answers",
        lambda _, __, texts: [SimpleNamespace(verdict="passed" if text in passed else "wrong") for (text,) in texts],
    )
    folder, judge = tmp_path / "model", Any
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    arguments = argparse.Namespace(
        canvas=8, steps=8, temperature=1.0, top_p=1.0, threshold=None, order="entropy", seed=0
    )
    problems = [problem("a"), problem("b")]
    path = tmp_path / "samples.json"
    found = diffusion.Samples(path).of(folder, problems, range(2), arguments, judge)  # type: ignore[arg-type]
    assert found.tolist() == [[True, False], [False, True]] and asked == [0, 1]
    again = diffusion.Samples(path).of(folder, problems, range(3), arguments, judge)  # type: ignore[arg-type]
    assert again[:, :2].tolist() == found.tolist() and asked == [0, 1, 2]
    (folder / "model.safetensors").write_bytes(b"others")
    diffusion.Samples(path).of(folder, problems, range(1), arguments, judge)  # type: ignore[arg-type]
    assert asked == [0, 1, 2, 0]
