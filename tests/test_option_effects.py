"""Keys that the loop hands on to other code: each changes what it should, by the amount worked out by hand."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.learning import fit as learning_fit
from pipeline.learning import losses as learning_losses
from pipeline.learning import states, update
from pipeline.learning.fit import Watchers, fit
from pipeline.learning.losses import Loss, Term
from pipeline.learning.optim import Optimizers
from pipeline.model.transformer import Transformer
from pipeline.run import device
from tests import training
from tests.loop import Batch, Net, Rows, Spiking, config, job, loss, spiking_loss


def first_step(folder: Path, **changes: Any) -> tuple[dict[str, torch.Tensor], float]:
    """AdamW's moments after one step, and the gradient norm in the curve."""
    at_work = job(folder)
    fit(Net(), Rows(), loss, config(steps=1, optimizer="adamw", warmup_steps=0, **changes), at_work)
    state = states.newest(folder)
    assert state is not None
    return state.optimizer().whole(), float(at_work.tracker.rows[0]["grad_norm"])


def joined(moments: dict[str, torch.Tensor], kind: str) -> torch.Tensor:
    """The moments of one kind for all parameters."""
    return torch.cat([moments[name].flatten() for name in sorted(moments) if name.endswith(f"/{kind}")])


# -- optimizer and schedule --------------------------------------------------------------------------------------------


def test_gradients_reach_the_optimizer_no_longer_than_max_grad_norm(tmp_path: Path) -> None:
    lengths, said = {}, set()
    for limit in (0.0, 0.01, 100.0):
        moments, norm = first_step(tmp_path / str(limit), max_grad_norm=limit)
        lengths[limit] = float(joined(moments, "exp_avg").norm()) / 0.1  # the first moment is (1 - 0.9) g
        said.add(norm)
    assert len(said) == 1, "the curve shows the norm before clipping"
    (norm,) = said
    assert 0.02 < norm < 100
    assert lengths == {
        limit: pytest.approx(length, rel=1e-3) for limit, length in ((0, norm), (0.01, 0.01), (100, norm))
    }


def test_betas_are_those_of_the_moments(tmp_path: Path) -> None:
    usual, _ = first_step(tmp_path / "usual", max_grad_norm=0.0)
    other, _ = first_step(tmp_path / "other", max_grad_norm=0.0, betas=(0.6, 0.75))
    torch.testing.assert_close(joined(other, "exp_avg"), 4 * joined(usual, "exp_avg"))  # (1 - 0.6) g over (1 - 0.9) g
    torch.testing.assert_close(joined(other, "exp_avg_sq"), 5 * joined(usual, "exp_avg_sq"))  # 0.25 g^2 over 0.05 g^2


def test_every_step_is_made_at_the_factor_of_the_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factors: list[float] = []
    original = Optimizers.step

    def step(self: Optimizers, factor: float) -> None:
        factors.append(factor)
        original(self, factor)

    monkeypatch.setattr(Optimizers, "step", step)
    at_work = job(tmp_path, logging_steps=1)
    fit(Net(), Rows(), loss, config(steps=5, schedule="linear", min_ratio=0.2, warmup_steps=2), at_work)
    assert factors == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2])
    assert [row["lr"] for row in at_work.tracker.rows] == pytest.approx([0.02 * factor for factor in factors])


@pytest.mark.parametrize("length", [{"tokens": 144}, {"epochs": 0.225}])  # an epoch has 640 tokens, a step 48
def test_tokens_and_epochs_say_when_a_run_ends(tmp_path: Path, length: dict[str, float]) -> None:
    at_work = job(tmp_path)
    fit(Net(), Rows(), loss, config(steps=None, **length), at_work)
    assert at_work.tracker.final["steps"] == 3


# -- held-out loss, and what is published ------------------------------------------------------------------------------


def test_the_stream_is_asked_for_eval_tokens(tmp_path: Path) -> None:
    asked: list[int] = []

    class Asked(Rows):
        def evaluation(self, tokens: int) -> Iterator[Batch]:
            asked.append(tokens)
            return super().evaluation(tokens)

    fit(Net(), Asked(), loss, config(steps=4, eval_steps=2, eval_tokens=123), job(tmp_path))
    assert asked == [123, 123]


class Turning(Rows):
    """From the twelfth batch on, the rows teach what the validation rows contradict."""

    def row(self, row: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, targets = super().row(row, context)
        turned = 72 <= row < 10_000
        return ids, torch.where(targets >= 0, (ids * 5 + 2) % 13, targets) if turned else targets


def held_out(model: nn.Module) -> float:
    """The validation loss of a model."""
    with torch.no_grad():
        parts = [(loss(model, batch).terms[0].sum, batch.counts["tokens"]) for batch in Rows().evaluation(1)]
    return float(sum(total for total, _ in parts)) / sum(count for _, count in parts)


@pytest.mark.parametrize("ema_decay", [0.0, 0.3])
def test_the_best_weights_are_published_where_the_last_ones_are_worse(tmp_path: Path, ema_decay: float) -> None:
    settings = {
        "steps": 24,
        "optimizer": "adamw",
        "schedule": "constant",
        "learning_rate": 0.05,
        "ema_decay": ema_decay,
    }
    losses, published = {}, {}
    for publish in ("best", "last"):
        model, at_work = Net(), job(tmp_path / publish)
        fit(model, Turning(), loss, config(publish=publish, **settings), at_work)
        losses = {int(row["step"]): float(row["val/loss"]) for row in at_work.tracker.rows if "val/loss" in row}
        published[publish] = at_work.tracker.final["published_step"]
        assert held_out(model) == pytest.approx(losses[published[publish]], rel=1e-5)
    best = min(losses, key=lambda step: losses[step])
    assert published == {"best": best, "last": 24} and losses[24] > losses[best] + 0.5


def test_ema_decay_is_the_share_that_an_average_keeps(tmp_path: Path) -> None:
    fit(
        Net(), Rows(), loss, config(steps=1, warmup_steps=0, ema_decay=0.05), job(tmp_path)
    )  # at first the decay is at most a tenth
    state = states.at(tmp_path, 1)
    average, now = state.optimizer().whole()["hidden.weight/average"], state.weights().whole()["hidden.weight"]
    torch.testing.assert_close(average, 0.05 * Net().hidden.weight.detach() + 0.95 * now, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(average, now, rtol=1e-5, atol=1e-6)


# -- steps that go wrong, and when a state is written ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "indices", "skipped"),
    # Step 13 reads batch 13, whose loss is NaN; a rollback goes to the state of step 9, which reads batch 14.
    [("skip", [*range(24)], 1), ("rollback", [*range(29)], 0)],
)
def test_a_loss_that_is_no_number_may_roll_the_run_back_behind_its_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, indices: list[int], skipped: int
) -> None:
    monkeypatch.setattr(update, "BACK", 4)
    stream, at_work = Spiking((13,), factor=float("nan")), job(tmp_path)
    fit(Net(), stream, spiking_loss, config(steps=24, eval_steps=3, on_nonfinite=policy), at_work)
    assert stream.indices == indices  # no batch is read twice
    assert at_work.tracker.rows[-1]["skipped"] == skipped
    state = states.newest(tmp_path)
    assert state is not None and state.meta["windows"] == ([[9, 5]] if policy == "rollback" else [])


@pytest.mark.parametrize(
    ("runtime", "kept"),
    [
        ({"save_minutes": 1.0}, [3, 6, 7]),  # a step takes half a minute, so three exceed one minute
        ({"save_minutes": 0.0}, [1, 2, 3, 4, 5, 6, 7]),
        ({"save_minutes": 60.0}, [7]),
        ({"save_minutes": 60.0, "save_steps": 2}, [2, 4, 6, 7]),
    ],
)
def test_a_state_is_written_when_its_minutes_or_steps_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: dict[str, Any], kept: list[int]
) -> None:
    clock = [0.0]

    def half_a_minute(_: int) -> None:
        clock[0] += 30.0

    monkeypatch.setattr(learning_fit, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    at_work, watchers = job(tmp_path, keep=20, **runtime), Watchers(step=half_a_minute)
    fit(Net(), Rows(), loss, config(steps=7, eval_steps=100), at_work, watchers=watchers)
    assert sorted(int(path.name.removeprefix("step-")) for path in tmp_path.glob("step-*")) == kept


# -- memory ------------------------------------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def recomputed(folder: Path, policy: str) -> tuple[list[int], int]:
    """How often each layer runs in one training step, and the number of matrix products in the run."""
    case = training.Case(folder=str(folder), steps=1)
    at_work = training.job_of(folder, case)
    at_work = replace(at_work, runtime=replace(at_work.runtime, gradient_checkpointing=policy))
    model, runs = training.model_of(case), [0, 0]

    def counted(number: int) -> Any:
        def hook(module: nn.Module, _: Any) -> None:
            runs[number] += module.training and torch.is_grad_enabled()

        return hook

    for number, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(counted(number))

    def of(model: Transformer, batch: training.Batch) -> Loss:
        chosen = batch.targets >= 0
        logits = model.logits(model.hidden(batch.ids)[chosen])
        return Loss(
            [Term("loss", learning_losses.next_token(logits, torch.eye(training.VOCABULARY), batch.targets[chosen]))]
        )

    settings = config(steps=1, tokens_per_step=case.rows * training.CONTEXT, optimizer="adamw")
    with Products() as products:
        fit(model, training.Rows(case, at_work), of, settings, at_work)
    return runs, products.count


def test_gradient_checkpointing_runs_layers_again_in_the_backward_pass(tmp_path: Path) -> None:
    recomputed(tmp_path / "first", "none")  # the speed of a product is measured once per process
    found = {policy: recomputed(tmp_path / policy, policy) for policy in ("none", "every_2", "full", "selective")}
    runs = {policy: of_layer for policy, (of_layer, _) in found.items()}
    assert runs == {"none": [1, 1], "every_2": [2, 1], "full": [2, 2], "selective": [2, 2]}
    products = {policy: count for policy, (_, count) in found.items()}
    assert products["none"] == products["selective"] < products["every_2"] < products["full"]


@pytest.mark.parametrize("asked", ["auto", True, False])
def test_the_batches_of_a_step_are_moved_as_pin_memory_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool | str
) -> None:
    moved: list[bool] = []

    def move(batch: Batch, where: torch.device, *, pin: bool) -> Batch:
        moved.append(pin)
        return batch

    pins, gpu = device.pins, torch.device("cuda")  # as if there were one
    monkeypatch.setattr(device, "pins", lambda asked, where: pins(asked, gpu))
    monkeypatch.setattr(device, "move", move)
    fit(Net(), Rows(), loss, config(steps=2), job(tmp_path, micro_batch=3, pin_memory=asked))
    assert moved == [asked is not False] * 4
