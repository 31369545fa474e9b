"""The learning-rate finder: what it finds on a quadratic, and that it leaves everything as it was."""

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.learning import lr_finder
from pipeline.learning.fit import fit
from pipeline.learning.states import weights_of
from pipeline.run.errors import GateError
from tests.loop import Dropping, Net, Rows, config, job, loss
from tests.workspace import Workspace


@pytest.mark.parametrize("curvature", [0.3, 1.0, 40.0])
def test_gradient_descent_on_a_quadratic_breaks_at_two_over_its_curvature(curvature: float) -> None:
    weight = nn.Parameter(torch.tensor([3.0, -2.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def attempt(_step: int, factor: float) -> float:
        value = curvature / 2 * weight.square().sum()
        optimizer.zero_grad()
        value.backward()
        optimizer.param_groups[0]["lr"] = 0.05 * factor
        optimizer.step()
        return float(value.detach())

    found = lr_finder.search(attempt, 0.05, "quadratic")
    assert found.breaks_at == pytest.approx(2 / curvature, rel=0.1)
    assert found.steepest < 2 / curvature


def test_a_search_that_breaks_at_once_says_so() -> None:
    with pytest.raises(GateError, match="diverged after 3 steps"):
        lr_finder.search(lambda step, factor: math.nan if step == 3 else 1.0, 0.1, "toy")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_finder_trains_nothing_and_writes_a_curve_a_plot_and_a_line(
    tmp_path: Path, optimizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, at_work = Dropping(), job(tmp_path, find_lr=True)
    before = {name: value.clone() for name, value in weights_of(model).items()}
    with pytest.raises(SystemExit) as ended:
        fit(model, Rows(), loss, config(optimizer=optimizer), at_work)
    assert ended.value.code == 0
    assert all(
        torch.equal(a.nan_to_num(9), b.nan_to_num(9))
        for a, b in zip(before.values(), weights_of(model).values(), strict=True)
    )
    assert not list(tmp_path.glob("step-*")) and not at_work.tracker.rows
    rows = list(csv.DictReader((tmp_path / "find_lr/curve.csv").open()))
    rates = [float(row["learning_rate"]) for row in rows]
    assert rates[0] == pytest.approx(0.02 * 1e-4) and rates[1] / rates[0] == pytest.approx(1e7 ** (1 / 99), rel=1e-3)
    assert "<svg" in (tmp_path / "find_lr/curve.svg").read_text()
    said = capsys.readouterr().err
    assert "toy:\n      learning_rate: " in said and "valley" in said


def test_a_changed_state_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = iter(("a", "b"))
    monkeypatch.setattr(lr_finder, "fingerprint", lambda run: next(hashes))
    with pytest.raises(GateError, match="did not restore the training state"):
        fit(Net(), Rows(), loss, config(), job(tmp_path, find_lr=True))


def test_ratios_between_groups_are_kept(tmp_path: Path) -> None:
    rates: list[list[float]] = []
    original: Any = lr_finder.attempts

    def spy(run: Any) -> Any:
        attempt = original(run)

        def watched(step: int, factor: float) -> float:
            value = attempt(step, factor)
            rates.append(sorted({g["lr"] for o in run.optimizers.optimizers for g in o.param_groups}))
            return value

        return watched

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lr_finder, "attempts", spy)
        with pytest.raises(SystemExit):
            fit(Net(), Rows(), loss, config(learning_rates={"embedding": 0.08}), job(tmp_path, find_lr=True))
    assert all(high / low == pytest.approx(4.0) for low, high in rates) and len(rates) > 20


@pytest.mark.slow
@pytest.mark.full
def test_a_stage_that_looks_for_its_rate_leaves_its_results_and_its_unfinished_run_alone(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert workspace.command("lora").code == 0
    published = workspace.published()
    ended = workspace.command("lora", **{"runtime.find_lr": True})
    assert ended.code == 0 and "lora:\n      learning_rate: " in ended.said
    assert workspace.published() == published
    assert len(list(workspace.folder.glob(".work/lora/*-find-lr/find_lr/curve.svg"))) == 1
    monkeypatch.setenv("DVC_STAGE", "stage_lora")
    monkeypatch.setattr("pipeline.run.processes.die_with_parent", lambda parent: None)
    ended = workspace.command("lora", **{"runtime.find_lr": True})
    assert ended.code == 2 and "python -m stages.lora runtime.find_lr=true" in ended.said
