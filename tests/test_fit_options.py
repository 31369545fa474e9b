"""Every option of the loop changes what it should, and a killed run that uses it ends with the bits of an uninterrupted
one.
"""

import json
import math
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.learning import performance, states, update
from pipeline.learning.fit import Watchers, fit
from pipeline.learning.settings import Curriculum
from pipeline.learning.states import weights_of
from pipeline.model.cpu import native
from pipeline.run.device import Hardware
from pipeline.run.errors import ConfigError, GateError
from pipeline.run.workdir import Job
from tests.loop import Batch, Net, Rows, Spiking, Windows, config, equal, job, killed_and_resumed, loss, spiking_loss
from tests.stopping import Stopped, before


@pytest.fixture
def short_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "HISTORY", 8)


# -- averaged weights --------------------------------------------------------------------------------------------------


def test_averaged_weights_are_evaluated_and_published_and_survive_a_kill(tmp_path: Path) -> None:
    def run(at_work: Job, watchers: Watchers | None = None) -> nn.Module:
        model = Net()
        fit(model, Rows(), loss, config(ema_decay=0.8, publish="best"), at_work, watchers=watchers)
        return model

    killed_and_resumed(tmp_path, (1, 5, 9), run)
    plain, averaged, last = Net(), Net(), Net()
    without = job(tmp_path / "without")
    fit(plain, Rows(), loss, config(), without)
    with_them = job(tmp_path / "with")
    fit(averaged, Rows(), loss, config(ema_decay=0.8), with_them)
    assert not equal(plain, averaged)
    losses = [[row["loss"] for row in at_work.tracker.rows if "loss" in row] for at_work in (without, with_them)]
    held_out = [
        [row["val/loss"] for row in at_work.tracker.rows if "val/loss" in row] for at_work in (without, with_them)
    ]
    assert losses[0] == losses[1] and held_out[0] != held_out[1]  # training is the same, what is evaluated is not
    fit(last, Rows(), loss, config(ema_decay=0.8, publish="last"), job(tmp_path / "last"))
    assert not equal(last, plain)


# -- curriculum --------------------------------------------------------------------------------------------------------


def test_lengths_of_a_curriculum_double_on_their_line() -> None:
    lengths = [Curriculum(start=128, end=2048, steps=1000).context_at(step) for step in range(1100)]
    expected = [128 * 2 ** int(math.log2((128 + 1920 * min(1.0, step / 1000)) / 128)) for step in range(1100)]
    assert lengths == expected
    assert sorted(set(lengths)) == [128, 256, 512, 1024, 2048] and lengths[999] == 1024 and lengths[1000] == 2048


@pytest.mark.parametrize(
    "curriculum",
    [
        {"start": 3, "end": 8},
        {"start": 1, "end": 8},
        {"start": 8, "end": 4},
        {"start": 2, "end": 8, "steps": 0},
        {"start": 2, "end": 16},
    ],
)
def test_a_curriculum_that_cannot_be_is_refused(curriculum: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="curriculum"):
        config(curriculum=Curriculum(**curriculum))


def test_a_curriculum_changes_the_windows_and_neither_the_tokens_of_a_step_nor_their_order(tmp_path: Path) -> None:
    seen = []
    for curriculum in (None, Curriculum(start=2, end=8, steps=6)):
        stream = Windows()
        at_work = job(tmp_path / str(curriculum), micro_batch=3, logging_steps=1)
        fit(Net(), stream, loss, config(curriculum=curriculum, eval_tokens=1), at_work)
        seen.append((stream.shapes[1:], stream.tokens[3 * 8 :], [row.get("context") for row in at_work.tracker.rows]))
    assert set(seen[0][0]) == {(3, 8)} and seen[1][0][::2] == [(12, 2)] * 2 + [(6, 4)] * 4 + [(3, 8)] * 6
    assert seen[0][1] == seen[1][1]
    assert seen[1][2] == [2, 2, 4, 4, 4, 4, 8, 8, 8, 8, 8, 8] and seen[0][2] == [None] * 12


# -- spikes and non-finite numbers -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short_history")
def test_a_spike_changes_no_weight_and_no_moment(tmp_path: Path) -> None:
    results = []
    for name, at, policy in (("spike", (10,), "skip"), ("ignored", (10,), "ignore"), ("none", (), "skip")):
        model, at_work = Net(), job(tmp_path / name, save_steps=1, keep=20, logging_steps=1)
        fit(model, Spiking(at), spiking_loss, config(steps=12, on_spike=policy, eval_steps=12), at_work)
        results.append((at_work, states.at(at_work.folder, 10), states.at(at_work.folder, 11)))
    at_work, before, after = results[0]
    assert all(
        torch.equal(a.nan_to_num(9), b.nan_to_num(9))
        for a, b in zip(before.weights().whole().values(), after.weights().whole().values(), strict=True)
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(before.optimizer().whole().values(), after.optimizer().whole().values(), strict=True)
    )
    assert [row["skipped"] for row in at_work.tracker.rows][-3:] == [0, 1, 1]
    assert results[1][0].tracker.rows[-1]["skipped"] == results[2][0].tracker.rows[-1]["skipped"] == 0


@pytest.mark.usefixtures("short_history")
def test_a_spike_may_stop_the_run(tmp_path: Path) -> None:
    with pytest.raises(GateError, match=r"step 10: loss .* a spike: loss above"):
        fit(Net(), Spiking((10,)), spiking_loss, config(steps=12, on_spike="stop"), job(tmp_path))


@pytest.mark.usefixtures("short_history")
def test_a_rollback_never_reads_its_window_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "BACK", 4)
    settings = config(steps=24, on_spike="rollback", eval_steps=3)
    streams: list[Spiking] = []

    def run(at_work: Job, watchers: Watchers | None = None) -> nn.Module:
        model, stream = Net(), Spiking((13, 27))
        streams.append(stream)
        fit(model, stream, spiking_loss, settings, at_work, watchers=watchers)
        return model

    run(job(tmp_path / "once"))
    # step 13 reads batch 13, spikes, and goes back to 9: 9 reads 14. Step 22 reads 27, spikes, back to 18: 18 reads 28.
    assert streams[0].indices == [*range(14), *range(14, 28), *range(28, 34)]
    at_work = job(tmp_path / "again")
    run(at_work)
    assert [row["skipped"] for row in at_work.tracker.rows][-1] == 0
    killed_and_resumed(tmp_path, (3, 13, 14, 20), run)


@pytest.mark.usefixtures("short_history")
def test_after_three_rollbacks_spikes_are_skipped_and_what_is_not_finite_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update, "BACK", 2)
    at, at_work = tuple(range(13, 200, 14)), job(tmp_path / "spikes")
    fit(Net(), Spiking(at), spiking_loss, config(steps=60, on_spike="rollback", eval_steps=3), at_work)
    state = states.newest(at_work.folder)
    assert state is not None and len(state.meta["windows"]) == 3 and at_work.tracker.rows[-1]["skipped"] > 0
    with pytest.raises(GateError, match="not finite, after 3 rollbacks"):
        fit(
            Net(),
            Spiking(at, factor=float("nan")),
            spiking_loss,
            config(steps=60, on_nonfinite="rollback", eval_steps=3),
            job(tmp_path / "nan"),
        )


@pytest.mark.usefixtures("short_history")
def test_a_loss_that_stays_high_ends_the_run_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "STAYED", 10)
    monkeypatch.setattr(update, "FEWEST", 8)
    with pytest.raises(GateError, match=r"step 29: loss .*the loss rose and stayed high: 10 steps .*learning_rate"):
        fit(Net(), Spiking(tuple(range(20, 99)), factor=50.0), spiking_loss, config(steps=60), job(tmp_path))


def test_a_state_that_a_rollback_may_load_outlives_retention(tmp_path: Path) -> None:
    at_work = job(tmp_path, save_steps=1, keep=1)
    fit(Net(), Rows(), loss, config(steps=30, eval_steps=5, on_nonfinite="rollback", publish="last"), at_work)
    kept = sorted(int(path.name[5:]) for path in tmp_path.glob("step-*"))
    assert kept == [10, 15, 20, 25, 30]  # at step 30 a rollback would go to 10


def test_what_is_not_finite_is_named_by_its_module_and_rows(tmp_path: Path) -> None:
    with pytest.raises(
        GateError, match=r"not finite \(1 in a row\); rows \[12, 13.*First non-finite value: the output of embed_tokens"
    ):
        fit(Net(), Rows(poison=2), loss, config(on_nonfinite="stop"), job(tmp_path))


# -- signals -----------------------------------------------------------------------------------------------------------


class Interrupted(Rows):
    """Validation batches; in one evaluation, a signal comes with the second batch."""

    def __init__(self, at_work: Job, evaluation: int) -> None:
        super().__init__()
        self.at_work, self.left = at_work, evaluation

    def evaluation(self, tokens: int) -> Iterator[Batch]:
        self.left -= 1
        for number, batch in enumerate(super().evaluation(tokens)):
            if number == 1 and self.left == 0:
                self.at_work.stop.signal = signal.SIGTERM
            yield batch


def test_a_signal_in_an_evaluation_leaves_it_to_the_resumed_run(tmp_path: Path) -> None:
    whole, first = Net(), job(tmp_path / "whole")
    fit(whole, Rows(), loss, config(), first)
    for evaluation in (1, 2, 3):
        folder = tmp_path / str(evaluation)
        cut = job(folder)
        with pytest.raises(SystemExit) as ended:
            fit(Net(), Interrupted(cut, evaluation), loss, config(), cut)
        assert ended.value.code == 128 + signal.SIGTERM
        state = states.newest(folder)
        assert state is not None and state.step == 4 * evaluation and state.meta["owes_evaluation"]
        again, second = Net(), job(folder)
        fit(again, Rows(), loss, config(), second)
        assert equal(whole, again) and second.tracker.rows == first.tracker.rows
        assert second.tracker.final == first.tracker.final


# -- precision, dropout, compiling, profiling --------------------------------------------------------------------------


def test_fp16_scales_its_loss_and_resumes_with_the_scale(tmp_path: Path) -> None:
    def run(at_work: Job, watchers: Watchers | None = None) -> nn.Module:
        model = Net()
        at_work = replace(at_work, runtime=replace(at_work.runtime, precision="fp16"))
        fit(model, Rows(), loss, config(learning_rate=0.01, optimizer="adamw"), at_work, watchers=watchers)
        return model

    killed_and_resumed(tmp_path, (2, 7), run)
    at_work = job(tmp_path / "scale", precision="fp16")
    fit(Net(), Rows(), loss, config(optimizer="adamw"), at_work)
    assert at_work.tracker.rows[0]["loss_scale"] == 65536
    exact = Net()
    fit(exact, Rows(), loss, config(learning_rate=0.01, optimizer="adamw"), job(tmp_path / "exact"))
    near = run(job(tmp_path / "near"))
    for a, b in zip(weights_of(exact).values(), weights_of(near).values(), strict=True):
        torch.testing.assert_close(a.nan_to_num(9), b.nan_to_num(9), atol=2e-2, rtol=0)


def test_an_overflow_in_fp16_halves_the_scale_and_is_no_skipped_step(tmp_path: Path) -> None:
    at_work = job(tmp_path, precision="fp16", logging_steps=1)
    fit(Net(), Spiking((0, 1, 2, 3), factor=1e34), spiking_loss, config(on_spike="ignore", optimizer="adamw"), at_work)
    scales = [row["loss_scale"] for row in at_work.tracker.rows]
    assert scales[:5] == [32768, 16384, 8192, 4096, 4096] and at_work.tracker.rows[-1]["skipped"] == 0


def test_a_resumed_run_goes_on_with_the_scale_that_its_overflows_left(tmp_path: Path) -> None:
    def scales(at_work: Job, watchers: Watchers | None = None) -> list[float]:
        fit(
            Net(),
            Spiking((0, 1, 2, 3), factor=1e34),
            spiking_loss,
            config(on_spike="ignore", optimizer="adamw"),
            at_work,
            watchers=watchers,
        )
        return [row["loss_scale"] for row in at_work.tracker.rows]

    whole = scales(job(tmp_path / "whole", precision="fp16", logging_steps=1))
    with pytest.raises(Stopped):
        scales(job(tmp_path / "cut", precision="fp16", logging_steps=1, save_steps=1), before(6))
    assert scales(job(tmp_path / "cut", precision="fp16", logging_steps=1)) == whole and whole[-1] == 4096


def test_each_step_drops_something_else_and_a_resumed_one_the_same(tmp_path: Path) -> None:
    class Dropping(Net):
        drawn: list[float]

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            if self.training and torch.is_grad_enabled():
                self.drawn.append(torch.rand(1).item())
            return super().forward(ids)

    def run(at_work: Job, watchers: Watchers | None = None) -> Dropping:
        model = Dropping()
        model.drawn = []
        try:
            fit(model, Rows(), loss, config(steps=6), at_work, watchers=watchers)
        finally:
            kept.append(model.drawn)
        return model

    kept: list[list[float]] = []
    killed_and_resumed(tmp_path, (3,), run)
    whole, before, after = kept
    assert len(set(whole)) == len(whole) == 6
    assert before[: len(whole) // 2] + after[-(len(whole) // 2) :] == whole


def test_the_rule_compiles_long_runs_alone() -> None:
    cpu = torch.device("cpu")
    assert not performance.wanted("auto", flops=0.9e14, device=cpu) and not performance.wanted(
        False, flops=1e20, device=cpu
    )
    assert performance.wanted("auto", flops=1.1e14, device=cpu) == (performance.lacking(cpu) == "")
    assert not performance.wanted("auto", flops=1e20, device=torch.device("meta"))


def test_compile_without_a_compiler_is_an_error_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert not performance.wanted("auto", flops=1e20, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"runtime.compile=true needs a C\+\+ compiler"):
        performance.wanted(True, flops=0, device=torch.device("cpu"))


def test_a_compiler_that_fails_is_an_error_only_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "g++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    monkeypatch.setenv("STAGECOACH_WORK", str(tmp_path / "work"))
    cpu = Hardware(device=torch.device("cpu"), precision="bf16", threads=1)
    assert performance.compiled(tiny_model, "auto", flops=0, hardware=cpu, name="toy") is False
    assert "toy: falling back to PyTorch's operators, which are slower" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="could not build"):
        performance.compiled(tiny_model, True, flops=0, hardware=cpu, name="toy")
    monkeypatch.delenv("CXX")
    assert performance.compiled(tiny_model, False, flops=0, hardware=cpu, name="toy") is False
    if native.compiler():
        assert performance.compiled(tiny_model, "auto", flops=0, hardware=cpu, name="toy") and native.loaded()
    assert performance.compiled(tiny_model, False, flops=0, hardware=cpu, name="toy") is False and not native.loaded()


def test_a_profile_leaves_a_trace_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(Net(), Rows(), loss, config(), job(tmp_path / "long", profile=True))
    names = [
        event.get("name", "")
        for event in json.loads((tmp_path / "long/profile/trace-rank0.json").read_text())["traceEvents"]
    ]
    assert any("aten::" in name for name in names)
    assert "Self CPU" in (tmp_path / "long/profile/top-rank0.txt").read_text()
    fit(Net(), Rows(), loss, config(steps=2), job(tmp_path / "short", profile=True))
    assert "nothing recorded" in capsys.readouterr().err
    fit(Net(), Rows(), loss, config(), job(tmp_path / "off"))
    assert not (tmp_path / "off/profile").exists()


def test_page_locked_memory_without_a_gpu_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.pin_memory: `true` needs CUDA"):
        fit(Net(), Rows(), loss, config(), job(tmp_path, pin_memory=True))


def test_speed_says_how_much_of_the_machine_was_used(tmp_path: Path) -> None:
    class Counted(Net):
        def flops_per_token(self, context: int) -> int:
            return 10**6 * context

    at_work = job(tmp_path)
    fit(Counted(), Rows(), loss, config(), at_work)
    speed = at_work.tracker.speed
    assert speed["mfu_measured"] > 0 and speed["gflops"] > 0 and "mfu" not in speed  # a CPU has no data sheet here
    assert speed["tokens_per_second"] == pytest.approx(speed["targets_per_second"])  # this batch counts no positions
    mean = speed["tokens_per_second"] / speed["samples_per_second"]  # the seconds cancel but for the last bit
    context = math.ceil(round(mean, 6))  # of the mean row, not of the limit
    assert context < config().row_length
    assert speed["gflops"] == pytest.approx(speed["tokens_per_second"] * context / 1e3)


def test_the_curve_names_rates_that_differ(tmp_path: Path) -> None:
    at_work = job(tmp_path)
    fit(Net(), Rows(), loss, config(learning_rates={"embedding": 0.04}), at_work)
    row = at_work.tracker.rows[0]
    assert row["lr/embedding"] == pytest.approx(2 * row["lr"]) and row["lr/hidden"] == row["lr"]


# -- states in a thread ------------------------------------------------------------------------------------------------


def test_states_written_in_a_thread_are_those_that_the_loop_writes(tmp_path: Path) -> None:
    files: list[dict[str, bytes]] = []
    for asynchronous in (False, True):
        folder, model = tmp_path / str(asynchronous), Net()
        at_work = job(folder, save_steps=1, keep=20, async_save=asynchronous)
        fit(model, Rows(), loss, config(ema_decay=0.9), at_work)
        files.append(
            {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("step-*/*")) if p.is_file()}
        )
    assert len(files[0]) == 12 * 5 and files[0] == files[1]

    def run(at_work: Job, watchers: Watchers | None = None) -> nn.Module:
        model = Net()
        at_work = replace(at_work, runtime=replace(at_work.runtime, async_save=True))
        fit(model, Rows(), loss, config(), at_work, watchers=watchers)
        return model

    killed_and_resumed(tmp_path / "killed", (1, 6, 11), run)


def test_training_goes_on_while_a_state_is_written_and_the_end_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, steps, order = states.write, [], []
    begun, release = threading.Event(), threading.Event()

    def slow(part: Path, *rest: Any) -> Any:
        order.append(f"write {part.name}")
        begun.set()
        assert release.wait(timeout=60)
        return original(part, *rest)

    def step(made: int) -> None:
        steps.append(made)
        if made == 7:  # three steps after the save at 4
            assert begun.wait(timeout=60)  # on a busy machine the thread may not have begun yet
            order.append("step 7")
            release.set()

    monkeypatch.setattr(states, "write", slow)
    fit(Net(), Rows(), loss, config(), job(tmp_path, async_save=True), watchers=Watchers(step=step))
    assert order[:2] == ["write step-00000004.part", "step 7"] and states.newest(tmp_path).step == 12  # type: ignore[union-attr]


def test_a_write_that_fails_in_the_thread_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(states, "complete", full)
    with pytest.raises(OSError, match="No space left"):
        fit(Net(), Rows(), loss, config(), job(tmp_path, async_save=True))
