"""benchmarks/masked.py measures a policy where its start was unsure, by other samples than those that say where that is."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import masked
from tests.test_code_metrics import problem

RATES = {"a": 0.0, "b": 0.25, "c": 0.5, "d": 0.75, "e": 1.0}


def test_a_gain_is_measured_on_unsure_problems_by_other_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str], list[int]]] = []

    def solved(model: str, problems: list[Any], samples: range, *_: object) -> np.ndarray:
        asked.append((model, [p.id for p in problems], list(samples)))
        more = 0.25 if model == "after" else 0.0
        return np.array([[n / 16 < RATES[p.id] + more for n in range(16)] for p in problems])

    monkeypatch.setattr(masked, "subject", lambda folder, _: folder.name)
    monkeypatch.setattr(masked, "solved", solved)
    arguments = argparse.Namespace(model=Path("before"), other=Path("after"))
    judge: Any = None
    found = masked.gain(arguments, [problem(name) for name in RATES], judge)
    first, second = list(range(16)), list(range(16, 32))
    assert asked == [("before", list("abcde"), first), ("before", list("bcd"), second), ("after", list("bcd"), second)]
    assert (found["problems"], found["chosen"], found["rate_of_all"]) == (5, 3, 0.5)
    assert (found["before"], found["after"], found["gain"]) == (0.5, 0.75, 0.25)
    assert [found["gain_low"], found["gain_high"]] == pytest.approx([0.25, 0.25])  # each of them gained as much
