"""The benchmark of training: its clock and ratios worked out by hand, and one tiny run of two sides."""

import io
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import train_arms, train_speed
from benchmarks.train_speed import Side


def side(name: str, *speeds: float) -> Side:
    process: Any = SimpleNamespace(pid=0)
    return Side(name, process, list(speeds), [2 * speed for speed in speeds])


def test_a_ratio_is_a_median_over_rounds_against_the_faster_setting() -> None:
    ours, slow, fast = side("ours compiled", 13, 26, 39), side("trainer", 9, 9, 9), side("trainer compiled", 10, 10, 10)
    found = train_speed.compared([side("ours", 9, 9, 9), ours, slow, fast, side("bare, our model", 13, 26, 30)])
    assert found["Trainer"] == {
        "side": "trainer compiled",
        "ours": "ours compiled",
        "ratio": 2.6,
        "range": [1.3, 3.9],
        "by_cpu_time": 2.6,
        "goal": 1.3,
        "met": True,
    }
    assert found["bare loop"]["ratio"] == 1.0 and found["bare loop"]["met"]
    assert found["litgpt"] == {"left out": "it was not asked for, or its environment was not given"}
    assert not train_speed.compared([side("ours", 9.0), side("bare, our model", 10.0)])["bare loop"]["met"]


def test_a_round_whose_reference_moved_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 1.3, 1.0, 1.2, 1.0, 0.9])
    monkeypatch.setattr(train_speed, "reference", lambda: next(times))
    one = side("ours")
    monkeypatch.setattr(Side, "train", lambda self, steps: (4.0, 2.0))
    again, references = train_speed.measure([one], 2, 10, 100)
    assert (again, references) == (1, pytest.approx([1.1, 0.95]))
    assert (one.speeds, one.worked) == ([250.0, 250.0], [500.0, 500.0])


def test_the_metronome_counts_between_the_beginnings_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(train_arms, "say", said.append)
    monkeypatch.setattr(sys, "stdin", io.StringIO("3\n1\n\n"))
    metronome, now = train_arms.Metronome(2), [0.0]
    monkeypatch.setattr(train_arms.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(train_arms.os, "_exit", sys.exit)

    def train() -> None:
        for step in range(99):
            now[0] = step * step  # each step takes longer than the one before
            metronome.tick()

    with pytest.raises(SystemExit):
        train()
    assert said[0] == {"ready": True}
    assert [line["seconds"] for line in said[1:]] == [25 - 4, 36 - 25]  # steps 2 to 4, then step 5


def test_all_sides_see_the_same_rows_of_a_step() -> None:
    spec = {"size": train_speed.SIZES["tiny"], "rows": 2, "context": 8}
    rows = train_arms.tokens_of(3, spec)
    assert torch.equal(rows, train_arms.tokens_of(3, spec)) and not torch.equal(rows, train_arms.tokens_of(4, spec))
    batch = train_arms.full_rows(spec, train_arms.Metronome(9)).batch(3, 8, range(2))
    inputs, targets = train_arms.shifted(rows)
    assert torch.equal(batch.input_ids, inputs) and torch.equal(batch.targets, targets)
    assert batch.documents.eq(0).all()


@pytest.mark.slow
@pytest.mark.full
def test_a_tiny_run_compares_fit_with_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    given = [
        "--sizes",
        "tiny",
        "--sides",
        "ours",
        "trainer",
        "--rows",
        "2",
        "--context",
        "8",
        "--threads",
        "1",
        "--quick",
    ]
    (row,) = train_speed.main(given)
    assert json.loads(capsys.readouterr().out)["size"] == "tiny"
    assert row["ratios"]["Trainer"]["ratio"] > 0
    for one in row["sides"].values():
        assert one["tokens_per_second"] > 0 and one["peak_mib"] > 50


def test_a_side_that_fails_says_why() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such shape')"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with pytest.raises(RuntimeError, match="ours: no such shape"):
        Side("ours", process).hear()
    process.communicate()
