"""The loop: exact resume, accumulation, early stopping, faults. With a small model so that every case runs in a
moment.
"""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.learning import states
from pipeline.learning.fit import Run, Watchers, fit
from pipeline.learning.losses import Loss
from pipeline.learning.states import weights_of
from pipeline.run import device
from pipeline.run.errors import ConfigError, GateError
from tests.loop import Batch, Dropping, Net, Rows, config, equal, job, loss
from tests.stopping import Stopped, before


@pytest.mark.parametrize(
    ("kind", "micro_batch"),
    [
        (Dropping, 2),
        *(
            pytest.param(*case, marks=(pytest.mark.slow, pytest.mark.full))
            for case in ((Net, 2), (Net, 6), (Dropping, 6))
        ),
    ],
)
def test_a_run_killed_at_any_step_ends_with_the_bits_of_an_uninterrupted_one(
    tmp_path: Path, kind: type[Net], micro_batch: int
) -> None:
    whole = kind()
    first = job(tmp_path / "whole", micro_batch=micro_batch)
    fit(whole, Rows(), loss, config(), first)
    for kill_at in (0, 1, 4, 5, 11):
        part, folder = kind(), tmp_path / f"killed{kill_at}"
        at_work = job(folder, micro_batch=micro_batch, save_steps=1)
        with pytest.raises(Stopped):
            fit(part, Rows(), loss, config(), at_work, watchers=before(kill_at))
        again, second = kind(), job(folder, micro_batch=micro_batch)
        fit(again, Rows(), loss, config(), second)
        assert equal(whole, again), kill_at
        assert second.tracker.rows == first.tracker.rows
        assert second.tracker.final == first.tracker.final


def test_accumulation_changes_nothing_but_the_order_of_sums(tmp_path: Path) -> None:
    models = []
    for micro in (6, 4, 1):
        model = Net()
        fit(model, Rows(), loss, config(), job(tmp_path / str(micro), micro_batch=micro))
        models.append(model)
    for other in models[1:]:
        for x, y in zip(weights_of(models[0]).values(), weights_of(other).values(), strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4, equal_nan=True)


class Told(Batch):
    """A batch that carries a number computed from its whole step."""

    greatest = 0


def test_a_loss_may_read_what_is_known_of_the_whole_step_before_its_passes(tmp_path: Path) -> None:
    """However a step is cut, all its micro-batches pass the hook together, before any of them is trained on."""
    models = []
    for micro in (6, 4, 1):
        events: list[tuple[str, int]] = []

        def complete(model: nn.Module, batches: list[Batch], ranks: Any, seen: Any = events) -> list[Batch]:
            told = [Told(batch.ids, batch.targets) for batch in batches]
            for batch in told:
                batch.greatest = max(int(one.ids.max()) for one in batches)
            seen.append(("step", len(batches)))
            return list(told)

        def scaled(model: nn.Module, batch: Any, seen: Any = events) -> Loss:
            plain = loss(model, batch)
            if not model.training:
                return plain
            seen.append(("pass", batch.greatest))
            return Loss([replace(plain.terms[0], sum=plain.terms[0].sum * batch.greatest)])

        model = Net()
        settings = config(steps=3, on_spike="ignore")
        fit(
            model,
            Rows(),
            scaled,
            settings,
            job(tmp_path / str(micro), micro_batch=micro),
            watchers=Watchers(complete=complete),
        )
        cuts = -(-6 // micro)
        assert [name for name, _ in events] == (["step"] + ["pass"] * cuts) * 3
        assert {number for name, number in events if name == "step"} == {cuts}
        assert all(number > 0 for _, number in events)
        models.append(model)
    for other in models[1:]:
        for x, y in zip(weights_of(models[0]).values(), weights_of(other).values(), strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4, equal_nan=True)


def test_the_gradient_is_that_of_the_mean_over_trained_tokens(tmp_path: Path) -> None:
    """Against the obvious computation: one forward pass over all rows, and the mean over targets."""
    model, stream = Net(), Rows()
    batch = stream.batch(0, 8, stream.rows(0, 8))
    chosen = batch.targets >= 0
    value = nn.functional.cross_entropy(model(batch.ids)[chosen], batch.targets[chosen])
    value.backward()
    run = Run(Net(), Rows(), loss, config(), job(tmp_path, micro_batch=2), False, Watchers())
    parts = [stream.batch(0, 8, stream.rows(0, 8)[i : i + 2]) for i in (0, 2, 4)]
    totals = run.backward(parts, batch.counts)
    assert totals.value == pytest.approx(value.item(), rel=1e-6)
    for x, y in zip(model.parameters(), run.plain.parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad, atol=1e-7, rtol=1e-5)


def test_it_learns(tmp_path: Path) -> None:
    model, one = Net(), job(tmp_path)
    fit(model, Rows(), loss, config(steps=60, learning_rate=0.05, optimizer="adamw"), one)
    assert one.tracker.final["best"]["val_loss"] < 0.2


def test_zero_learning_rate_moves_nothing(tmp_path: Path) -> None:
    model = Net()
    fit(model, Rows(), loss, config(learning_rate=0.0), job(tmp_path))
    assert equal(model, Net())


def test_a_batch_that_is_not_finite_changes_no_weight_and_three_stop(tmp_path: Path) -> None:
    one = job(tmp_path / "a")
    fit(Net(), Rows(poison=5), loss, config(), one)
    assert one.tracker.rows[-1]["skipped"] == 1
    original = Rows.row
    bad = Rows()
    bad.row = lambda row, context: original(Rows(poison=row // 6 if 3 <= row // 6 < 9 else -1), row, context)  # type: ignore[method-assign]
    with pytest.raises(GateError, match=r"not finite \(3 in a row.*learning_rate"):
        fit(Net(), bad, loss, config(), job(tmp_path / "b"))


def test_a_signal_saves_a_state_and_exits_with_its_number(tmp_path: Path) -> None:
    one = job(tmp_path)
    one.stop.signal = signal.SIGTERM
    with pytest.raises(SystemExit) as stopped:
        fit(Net(), Rows(), loss, config(), one)
    assert stopped.value.code == 143
    assert states.newest(tmp_path) is not None


def test_patience_stops_and_the_best_weights_are_published(tmp_path: Path) -> None:
    one = job(tmp_path)
    model = Net()
    fit(model, Rows(), loss, config(steps=400, patience=2, threshold=10.0), one)
    assert one.tracker.rows[-1]["step"] == 12  # the first evaluation sets the best loss, two more do not
    best = states.weights_at(tmp_path, one.tracker.final["published_step"])
    assert torch.equal(best["hidden.weight"], model.hidden.weight)


def test_a_state_of_other_data_is_refused(tmp_path: Path) -> None:
    fit(Net(), Rows(), loss, config(), job(tmp_path))
    other = Rows()
    other.fingerprint = "else"
    with pytest.raises(ConfigError, match="trained on other data"):
        fit(Net(), other, loss, config(), job(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_per_step": 50}, "not a multiple of context 8; try 48"),
        ({"tokens": 100}, "exactly one of steps, tokens, epochs; got steps, tokens"),
        ({"steps": None}, "got none"),
        ({"warmup_ratio": 0.1}, "at most one of `warmup"),
        ({"optimizer": "sgd"}, "expected one of adamw, muon"),
    ],
)
def test_settings_that_contradict_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_tokens_and_epochs_become_steps() -> None:
    assert config(steps=None, tokens=480).resolve_steps(640) == 10
    assert config(steps=None, epochs=3.0).resolve_steps(640) == 40


def test_a_group_without_gradient_is_named(tmp_path: Path) -> None:
    class Cut(Net):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.lm_head(self.embed_tokens(ids)) + 0 * self.hidden.weight.sum()

    with pytest.raises(GateError, match=r"group hidden: no gradient reaches hidden\.weight"):
        fit(Cut(), Rows(), loss, config(), job(tmp_path))


def test_a_resumed_state_of_another_micro_batch_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(Net(), Rows(), loss, config(), job(tmp_path))
    fit(Net(), Rows(), loss, config(), replace(job(tmp_path, micro_batch=3)))
    assert "will not match an uninterrupted run" in capsys.readouterr().err


def test_a_term_s_coefficient_is_in_its_gradient(tmp_path: Path) -> None:
    """Half the loss at twice the rate moves plain weights as the whole loss would, so the gradients are compared."""
    norms = []
    for coefficient in (1.0, 0.25):

        def weighted(model: nn.Module, batch: Batch, share: float = coefficient) -> Loss:
            return Loss([replace(term, coefficient=share) for term in loss(model, batch).terms])

        at_work = job(tmp_path / str(coefficient), logging_steps=1)
        fit(Net(), Rows(), weighted, config(steps=1, max_grad_norm=0.0), at_work)
        norms.append(next(row["grad_norm"] for row in at_work.tracker.rows if "grad_norm" in row))
    assert norms[1] == pytest.approx(0.25 * norms[0])


def test_each_micro_batch_drops_something_else_and_an_evaluation_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds, modes = [], []
    original = device.seed_step
    monkeypatch.setattr(device, "seed_step", lambda *parts: (seeds.append(parts), original(*parts)))

    class Watching(Dropping):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            modes.append((torch.is_grad_enabled(), self.training))
            return super().forward(ids)

    fit(Watching(), Rows(), loss, config(steps=4, eval_steps=2), job(tmp_path, micro_batch=2))
    assert len(seeds) == len(set(seeds)) == 4 * 3
    assert set(modes) == {(True, True), (False, False)}
