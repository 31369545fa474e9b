"""What happens at a bad moment: signals while a policy samples, faults after a rollback, damaged states, the dry
step that tests memory.
"""

import math
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.learning import performance, states, update
from pipeline.learning.fit import Watchers, fit
from pipeline.learning.losses import Loss
from pipeline.learning.protocols import LossFunction
from pipeline.learning.settings import Curriculum
from pipeline.run.errors import GateError, StagecoachError
from pipeline.run.workdir import Job, Stopped
from tests.loop import (
    Batch,
    Dropping,
    Net,
    Rows,
    Spiking,
    Windows,
    config,
    equal,
    job,
    killed_and_resumed,
    loss,
    spiking_loss,
)


class Rolling(Rows):
    """Two steps per fill; the carried beta grows with each fill and scales the loss."""

    steps_per_rollout = 2

    def __init__(self, at_work: Job, stop_at: int = -1) -> None:
        super().__init__()
        self.at_work, self.stop_at, self.carried = at_work, stop_at, {"beta": 1.0}

    def fill(self, step: int) -> dict[str, float]:
        beta = self.carried["beta"]
        self.carried["beta"] = 1.25 * beta
        if step == self.stop_at:
            self.at_work.stop.signal = signal.SIGTERM
        return {"coefficient": beta}

    def batch(self, step: int, context: int, rows: np.ndarray) -> Batch:
        made = super().batch(step, context, rows)
        made.factor = self.carried["beta"]  # type: ignore[attr-defined]
        return made

    def state(self) -> dict[str, Any]:
        return {"carried": self.carried}

    def load_state(self, state: dict[str, Any]) -> None:
        self.carried.update(state["carried"])


def test_a_signal_while_a_policy_samples_leaves_the_iteration_to_the_resumed_run(tmp_path: Path) -> None:
    settings = config(optimizer="adamw", max_grad_norm=0.0)
    whole, first = Net(), job(tmp_path / "whole")
    fit(whole, Rolling(first), spiking_loss, settings, first)
    for stop_at in (0, 4, 10):
        cut = job(tmp_path / str(stop_at))
        with pytest.raises(SystemExit):
            fit(Net(), Rolling(cut, stop_at), spiking_loss, settings, cut)
        state = states.newest(cut.folder)
        assert state is not None and state.step == stop_at
        assert state.meta["stream"] == {"carried": {"beta": 1.25 ** (stop_at // 2)}}  # as before the fill
        again, second = Net(), job(cut.folder)
        fit(again, Rolling(second), spiking_loss, settings, second)
        assert equal(whole, again) and second.tracker.rows == first.tracker.rows


def test_a_signal_before_a_policy_samples_does_not_wait_for_it(tmp_path: Path) -> None:
    at_work = job(tmp_path)
    stream = Rolling(at_work)
    stream.fill = lambda step: pytest.fail("it sampled")  # type: ignore[method-assign]
    at_work.stop.signal = signal.SIGINT
    with pytest.raises(SystemExit):
        fit(Net(), stream, loss, config(), at_work)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_real_signal_in_the_loop_saves_a_state_and_one_before_it_does_not_reach_the_loop(
    tmp_path: Path, number: signal.Signals
) -> None:
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    settings, whole = config(), Net()
    fit(whole, Rows(), loss, settings, job(tmp_path / "whole"))
    cut, stream = job(tmp_path / "cut"), Rows()
    original = stream.rows
    stream.rows = lambda step, context: (signal.raise_signal(number) if step == 5 else None, original(step, context))[1]  # type: ignore[method-assign]
    try:
        cut.stop.install()
        with pytest.raises(SystemExit) as ended:
            fit(Net(), stream, loss, settings, cut)
        early = job(tmp_path / "early")
        early.stop.install()
        with pytest.raises(Stopped):
            signal.raise_signal(number)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    state = states.newest(cut.folder)
    assert ended.value.code == 128 + number and state is not None and state.step == 5
    again = Net()
    fit(again, Rows(), loss, settings, job(cut.folder))
    assert equal(whole, again) and states.newest(early.folder) is None


# -- rollbacks ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def short_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "HISTORY", 8)


@pytest.mark.usefixtures("short_history")
def test_a_second_fault_soon_after_a_rollback_finds_its_state(tmp_path: Path) -> None:
    """Retention has dropped everything older than the first rollback's state."""
    stream = Spiking(
        (28, 31), factor=math.nan
    )  # batch 28 is read at step 28, back to 10; batch 31 at step 12, back to 10 again
    at_work = job(tmp_path, keep=1, save_steps=1)
    fit(Net(), stream, spiking_loss, config(steps=40, eval_steps=5, on_nonfinite="rollback"), at_work)
    assert stream.indices[:29] == list(range(29)) and stream.indices[29:33] == [29, 30, 31, 32]
    assert at_work.tracker.rows[-1]["step"] == 40 and at_work.tracker.rows[-1]["skipped"] == 0


class Rising(Rows):
    """Rows with one batch whose loss is NaN."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def batch(self, step: int, context: int, rows: np.ndarray) -> Batch:
        made = super().batch(step, context, rows)
        made.factor = math.nan if step == self.at else 1.0  # type: ignore[attr-defined]
        return made


def held_out(values: list[float], stream: Rows, loss: LossFunction) -> tuple[Rows, LossFunction]:
    """Stream and loss of a run whose validation losses are `values`, one after another."""
    coming, current, original = iter(values), 0.0, stream.evaluation

    def evaluation(tokens: int) -> Iterator[Batch]:
        nonlocal current
        current = next(coming)
        yield from original(tokens)

    def measured(model: nn.Module, batch: Batch) -> Loss:
        made = loss(model, batch)
        if model.training:
            return made
        return Loss([replace(term, sum=torch.tensor(current * batch.counts[term.per])) for term in made.terms])

    stream.evaluation = evaluation  # type: ignore[method-assign]
    return stream, measured


def test_the_best_weights_that_a_rollback_returns_to_are_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Best at 4, then at 24; a fault at 30 goes back to 12, where the best is from 4, and nothing later is better."""
    monkeypatch.setattr(update, "BACK", 16)
    stream, measured = held_out([1.0, 2.0, 2.0, 2.0, 2.0, 0.5, 2.0, *[3.0] * 20], Rising(30), spiking_loss)
    at_work = job(tmp_path, keep=1)
    fit(Net(), stream, measured, config(steps=40, eval_steps=4, on_nonfinite="rollback", publish="best"), at_work)
    assert at_work.tracker.final["published_step"] == 4


# -- states ------------------------------------------------------------------------------------------------------------


def test_a_damaged_state_does_not_count_as_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config(steps=12, publish="last")
    fit(Net(), Rows(), loss, config(steps=8, publish="last"), job(tmp_path, keep=2, save_steps=2))
    (tmp_path / states.name_of(8) / "weights.safetensors").write_bytes(b"half")
    cut = job(tmp_path, keep=1, save_steps=1)
    stream = Rows()
    original = stream.rows
    stream.rows = lambda step, context: (setattr(cut.stop, "signal", 15 * (step == 7)), original(step, context))[1]  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        fit(Net(), stream, loss, settings, cut)
    assert "step-00000008 is damaged" in capsys.readouterr().err
    state = states.newest(tmp_path)
    assert state is not None and state.step == 7 and len(list(tmp_path.glob("step-*"))) == 1


def test_lost_best_weights_say_what_helps(tmp_path: Path) -> None:
    """They are lost during the last step; the losses rise after the first evaluation."""

    def lose(made: int) -> None:
        if made == 11:
            shutil.rmtree(tmp_path / states.name_of(4))

    stream, measured = held_out([1.0, 2.0, 2.0], Rows(), loss)
    with pytest.raises(
        StagecoachError, match=r"publish the last ones \(toy\.publish=last\), or start over \(runtime\.fresh=true"
    ):
        fit(Net(), stream, measured, config(publish="best"), job(tmp_path), watchers=Watchers(step=lose))


# -- before the first update -------------------------------------------------------------------------------------------


def test_the_proof_of_a_micro_batch_runs_in_a_run_that_is_still_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: forward and backward before the loop begins."""
    proved = []

    def of(run: Any) -> list[int]:
        performance.dry_step(run, 2)
        proved.append(any(p.grad is not None for p in run.plain.parameters()))
        run.optimizers.zero_grad()
        return [2]

    monkeypatch.setattr(performance, "micro_batches", of)
    fit(Net(), Rows(), loss, config(), job(tmp_path))
    assert proved == [True]


def test_an_overflow_puts_the_gate_on_gradients_off_and_not_away(tmp_path: Path) -> None:
    class Cut(Net):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.lm_head(torch.relu(self.hidden(self.embed_tokens(ids).detach())))

    settings = config(on_spike="ignore", optimizer="adamw")
    with pytest.raises(GateError, match="group embedding: no gradient reaches"):
        fit(Cut(), Spiking((0, 1), factor=1e34), spiking_loss, settings, job(tmp_path, precision="fp16"))


def test_a_wrong_first_loss_ends_a_run_before_its_first_update(tmp_path: Path) -> None:
    model = Net()
    model.config = type("Shape", (), {"vocab_size": 13, "max_context": 99, "attention": "none"})()  # type: ignore[assignment]
    before = model.hidden.weight.detach().clone()

    def twice(model: nn.Module, batch: Batch) -> Loss:
        batch.factor = 2.0  # type: ignore[attr-defined]
        return spiking_loss(model, batch)

    with pytest.raises(GateError, match="the first loss is"):
        fit(model, Rows(), twice, config(), job(tmp_path, micro_batch=6), from_scratch=True)
    assert torch.equal(model.hidden.weight, before)


def test_rows_say_how_often_the_data_were_read_and_too_often_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at_work = job(tmp_path / "a", logging_steps=1)
    fit(Net(), Rows(), loss, config(steps=12), at_work)  # 48 of 640 tokens per step
    assert [row["epoch"] for row in at_work.tracker.rows if "loss" in row] == pytest.approx(
        [0.075 * n for n in range(1, 13)]
    )
    assert "passes over its data" not in capsys.readouterr().err
    fit(Net(), Rows(), loss, config(steps=60), job(tmp_path / "b"))
    assert "warning: toy: the run makes 4.5 passes over its data" in capsys.readouterr().err


def test_muons_share_of_a_step_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    model.flops_per_token = lambda length: 1e6  # type: ignore[assignment]
    fit(model, Rows(), loss, config(), job(tmp_path))
    assert "added 0.4% to the FLOPs\n" in capsys.readouterr().err


def test_the_finder_stops_at_a_signal(tmp_path: Path) -> None:
    at_work = job(tmp_path, find_lr=True)
    at_work.stop.signal = signal.SIGTERM
    model = Net()
    before = model.hidden.weight.detach().clone()
    with pytest.raises(SystemExit) as ended:
        fit(model, Rows(), loss, config(), at_work)
    assert ended.value.code == 128 + signal.SIGTERM and torch.equal(model.hidden.weight, before)


def test_watchers_see_the_first_values(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []
    fit(Net(), Rows(), loss, config(), job(tmp_path), watchers=Watchers(first=seen.append))
    assert len(seen) == 1 and seen[0]["perplexity"] == pytest.approx(math.exp(seen[0]["loss"]))


# -- compiling ---------------------------------------------------------------------------------------------------------


def test_compiling_by_rule_that_does_not_work_goes_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Python.h: No such file or directory")

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(performance, "lacking", lambda device: "")
    monkeypatch.setitem(performance.PAYS, "cpu", 0.0)
    model = Net()
    model.flops_per_token = lambda length: 1.0  # type: ignore[assignment]
    fit(model, Rows(), loss, config(), job(tmp_path))
    said = capsys.readouterr().err
    assert "continuing without torch.compile, which does not work here: Python.h: No such file" in said


def test_a_gpu_without_a_c_compiler_is_lacking_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(performance.shutil, "which", lambda name: None)
    assert performance.lacking(torch.device("cuda")) == "a C compiler (gcc or clang)"
    monkeypatch.setattr(performance.shutil, "which", lambda name: "/usr/bin/gcc" if name == "gcc" else None)
    assert performance.lacking(torch.device("cuda")) == ""


# -- resuming ----------------------------------------------------------------------------------------------------------


def test_a_run_whose_rows_grow_resumes_to_the_bit(tmp_path: Path) -> None:
    def run(at_work: Job, watchers: Watchers | None = None) -> nn.Module:
        model = Net()
        settings = config(curriculum=Curriculum(start=2, end=8, steps=6), eval_tokens=1)
        fit(model, Windows(), loss, settings, at_work, watchers=watchers)
        return model

    killed_and_resumed(tmp_path, (1, 3, 7, 11), run)


def test_a_run_in_bf16_resumes_to_the_bit(tmp_path: Path) -> None:
    def run(at_work: Job, watchers: Watchers | None = None) -> nn.Module:
        model = Dropping()
        at_work = replace(at_work, runtime=replace(at_work.runtime, precision="bf16", micro_batch=2))
        fit(model, Rows(), loss, config(ema_decay=0.9), at_work, watchers=watchers)
        return model

    killed_and_resumed(tmp_path, (1, 6, 10), run)
