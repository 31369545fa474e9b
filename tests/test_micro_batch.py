"""`runtime.micro_batch: auto`: repeatable choices, dry steps that leave no trace, halving, and the messages when memory
runs out.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.learning import footprint, performance
from pipeline.learning.fit import Run, Watchers, fit
from pipeline.learning.footprint import Work
from pipeline.learning.losses import Loss
from pipeline.learning.processes import Ranks
from pipeline.learning.settings import FitConfig, LabelConfig, PairConfig
from pipeline.model import checkpoint
from pipeline.model.config import ModelConfig
from pipeline.model.heads import RewardModel
from pipeline.model.lora import AdapterConfig, attach
from pipeline.model.transformer import Transformer
from pipeline.rl.rollout import RolloutConfig
from pipeline.run import device
from pipeline.run.config import Runtime, Settings, build
from pipeline.run.errors import InputError
from tests.loop import Batch, Dropping, Net, Rows, config, job, loss
from tests.stopping import Stopped, before

CPU = torch.device("cpu")


def nano() -> ModelConfig:
    settings = Settings(Path(), ["model=nano"])
    return build(ModelConfig, settings.group_values("model"), "model")


def planned(model: nn.Module, fitting: Any, memory: int, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> int:
    monkeypatch.setattr(device, "total_memory", lambda where: memory)
    hardware = device.Hardware(device=CPU, precision=changes.pop("precision", "fp32"), threads=1)
    plan = performance.plan_of(
        model, fitting, hardware, Runtime(**changes), rows=fitting.rows, ranks=Ranks("fp32", "k")
    )
    assert plan is not None
    return performance.planned(plan, hardware, fitting.rows)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "stage", ["language", "code", "tools", "lora", "reward", "dpo", "kto", "rlhf", "grpo", "distill"]
)
def test_a_demo_step_is_one_pass_on_a_machine_of_24_gb_or_a_few(
    in_repository: Path, stage: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_answers = {"reward": PairConfig, "dpo": PairConfig, "kto": LabelConfig}
    kind = (of_answers | {"rlhf": RolloutConfig, "grpo": RolloutConfig, "distill": RolloutConfig}).get(stage, FitConfig)
    settings = Settings(Path(), ["scale=demo"])
    known = {name for owner in kind.__mro__ for name in getattr(owner, "__annotations__", {})}
    values = {key: value for key, value in settings.layers(stage).items() if key in known}
    fitting = build(kind, values, stage)
    # 512 answers
    parts = {"grpo": 4 if precision == "fp32" else 2}
    expected = fitting.rows // parts.get(stage, 1)
    assert planned(Transformer(nano()), fitting, 24 * 10**9, monkeypatch, precision=precision) == expected


def test_the_plan_knows_the_loss_and_the_adapters(in_repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities of answers keep all logits, a reward model has none, and an adapter has operators
    of its own.
    """
    works: list[Work] = []
    whole = footprint.footprint
    monkeypatch.setattr(footprint, "footprint", lambda *given: works.append(given[2]) or whole(*given))
    tokens = FitConfig(steps=1, tokens_per_step=64, context=32, learning_rate=1e-3)
    pairs = PairConfig(steps=1, pairs=2, max_prompt=16, max_length=32, learning_rate=1e-3)
    adapted = Transformer(SMALL, torch.Generator().manual_seed(0))
    attach(adapted, AdapterConfig(rank=2, alpha=4, dropout=0.1, targets=("q_proj",)), torch.Generator())
    for model, fitting in (
        (Transformer(SMALL), tokens),
        (Transformer(SMALL), pairs),
        (RewardModel(Transformer(SMALL)), pairs),
        (adapted, tokens),
    ):
        planned(model, fitting, 10**9, monkeypatch)
    told = [(work.answers, work.selected > 0, work.adapted, work.dropped) for work in works]
    assert list(dict.fromkeys(told)) == [
        (False, True, None, False),
        (True, True, None, False),
        (True, False, None, False),
        (False, True, frozenset({"q_proj"}), True),
    ]


def test_less_memory_halves_it_and_equal_runs_choose_alike(
    in_repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitting = FitConfig(steps=1, tokens_per_step=96 * 512, context=512, learning_rate=1e-3)
    model = Transformer(nano())
    found = [planned(model, fitting, memory, monkeypatch) for memory in (10**9, 2 * 10**9, 4 * 10**9, 40 * 10**9)]
    assert found[-1] == 96  # all rows
    assert all(n & (n - 1) == 0 for n in found[:-1])
    assert found == sorted(set(found)), found
    assert planned(model, fitting, 2 * 10**9, monkeypatch) == found[1]
    recomputing = planned(model, fitting, 2 * 10**9, monkeypatch, gradient_checkpointing="full")
    assert recomputing >= 2 * found[1]


def test_where_not_even_a_row_fits_the_run_is_refused_or_warned_of(
    in_repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fitting, model = FitConfig(steps=1, tokens_per_step=4 * 512, context=512, learning_rate=1e-3), Transformer(nano())
    with pytest.raises(InputError, match=r"needs an estimated 0\.1 GB, .* or try anyway with runtime\.micro_batch=1"):
        planned(model, fitting, 10**7, monkeypatch)
    needs = next(size for size in range(10**7, 10**9, 10**6) if fits(model, fitting, size, monkeypatch))
    capsys.readouterr()
    assert planned(model, fitting, needs, monkeypatch) == 1
    assert "warning: one row needs an estimated 0.1 GB" in capsys.readouterr().err


def fits(model: nn.Module, fitting: FitConfig, memory: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    try:
        planned(model, fitting, memory, monkeypatch)
    except InputError:
        return False
    return True


def run_of(folder: Path, found: Callable[[nn.Module, Batch], Loss] = loss, **runtime: Any) -> Run:
    return Run(Dropping(), Rows(), found, config(), job(folder, **runtime), False, Watchers())


def narrow(most: int) -> Callable[[nn.Module, Batch], Loss]:
    """The loss on a device with room for `most` rows."""

    def run_out(model: nn.Module, batch: Batch) -> Loss:
        found = loss(model, batch)
        if len(batch.ids) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")
        return found

    return run_out


@pytest.mark.parametrize(("most", "tried"), [(6, [6]), (5, [6, 4]), (2, [6, 4, 2]), (1, [6, 4, 2, 1])])
def test_a_dry_step_that_finds_no_room_is_halved_until_it_does(
    tmp_path: Path, most: int, tried: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path, narrow(most))
    assert performance.proved(run.plain, CPU, 6, partial(performance.dry_step, run), 1000.0) == tried
    said = capsys.readouterr().err
    assert said.count("out of memory in a dry step") == len(tried) - 1
    assert len(tried) == 1 or "out of memory in a dry step of 6 rows; trying 4" in said


def test_a_dry_step_leaves_weights_moments_gradients_and_generators_as_they_were(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.optimizers.step(0.0)
    before, moments = checkpoint.weights_digest(run.plain), run.optimizers.state_tensors()
    generator, course = torch.get_rng_state(), vars(run.course).copy()
    rows_before = len(run.stream.rows_seen)  # type: ignore[attr-defined]
    performance.proved(run.plain, CPU, 2, partial(performance.dry_step, run), 0.0)
    assert run.stream.rows_seen[rows_before:] == [[0, 1], [2, 3]]  # type: ignore[attr-defined]  # a real pass, and a second
    assert checkpoint.weights_digest(run.plain) == before
    assert run.optimizers.state_tensors().keys() == moments.keys()
    assert all(parameter.grad is None for parameter in run.plain.parameters())
    assert torch.equal(torch.get_rng_state(), generator)
    assert vars(run.course) == course


def test_a_run_after_a_dry_step_ends_with_the_bits_of_one_without(tmp_path: Path) -> None:
    finals = []
    for name in ("without", "with"):
        run = run_of(tmp_path / name, micro_batch=2)
        if name == "with":
            performance.proved(run.plain, CPU, 2, partial(performance.dry_step, run), 0.0)
        run.go()
        finals.append(checkpoint.weights_digest(run.plain))
    assert finals[0] == finals[1]


def test_no_room_for_one_row_says_what_to_do(tmp_path: Path) -> None:
    run = run_of(tmp_path, narrow(0))
    with pytest.raises(torch.OutOfMemoryError):
        performance.proved(run.plain, CPU, 2, partial(performance.dry_step, run), 0.0)
    with (
        pytest.raises(InputError, match=r"micro-batches tried: 2 "),
        performance.explained(run.job, run.config, 0, [2]),
    ):
        performance.proved(run.plain, CPU, 2, partial(performance.dry_step, run), 0.0)


def test_running_out_in_the_loop_names_the_step_and_every_way_out(tmp_path: Path) -> None:
    calls: list[int] = []

    def later(model: nn.Module, batch: Batch) -> Loss:
        calls.append(len(batch.ids))
        return narrow(6 if len(calls) < 4 else 0)(model, batch)

    with pytest.raises(InputError) as stopped:
        fit(Net(), Rows(), later, config(), job(tmp_path, micro_batch=3))
    message = str(stopped.value)
    for part in (
        "toy: out of memory in step 1,",
        "rows of 8 tokens",
        "micro-batches tried: 3",
        "Tried to allocate 2.00 GiB",
        "runtime.gradient_checkpointing=full",
        "runtime.micro_batch=1",
        "smaller model",
        "fsdp2.yaml",
    ):
        assert part in message, message
    assert "more lines" not in message
    assert stopped.value.exit_code == 2


def test_a_resumed_run_keeps_the_micro_batch_that_it_began_with(tmp_path: Path) -> None:
    whole = Net()
    fit(whole, Rows(), loss, config(), job(tmp_path / "whole", micro_batch=2))
    with pytest.raises(Stopped):
        fit(Net(), Rows(), loss, config(), job(tmp_path / "part", micro_batch=2, save_steps=1), watchers=before(3))
    again = Run(Net(), Rows(), loss, config(), job(tmp_path / "part"), False, Watchers())
    assert again.micro_batch == 2  # a fresh `auto` would take all six rows
    again.go()
    assert checkpoint.weights_digest(again.plain) == checkpoint.weights_digest(whole)


def test_a_state_of_another_world_or_a_damaged_one_decides_nothing(tmp_path: Path) -> None:
    assert performance.kept(tmp_path, 1) is None
    for step, text in ((5, json.dumps({"micro_batch": 4, "world": 1})), (6, "{"), (7, "{}")):
        folder = tmp_path / f"step-{step:08d}"
        folder.mkdir()
        (folder / "state.json").write_text(text)
    assert performance.kept(tmp_path, 1) == 4
    assert performance.kept(tmp_path, 2) is None


def test_the_dry_step_is_taken_where_there_is_one(tmp_path: Path) -> None:
    """For a model with a shape, `chosen` makes a plan (here for the CPU) and then tries it with dry steps."""
    run = run_of(tmp_path)
    shaped = Transformer(SMALL)
    tried = []

    def dry(rows: int) -> None:
        tried.append(rows)
        if rows > 2:
            raise torch.OutOfMemoryError("none left")

    found = performance.chosen(shaped, config(), run.job, run.hardware, run.ranks, 6, dry)
    assert found == tried == [6, 4, 2]
    assert performance.chosen(shaped, config(), run.job, run.hardware, run.ranks, 6, None) == [6]
    asked = replace(run.job, runtime=Runtime(micro_batch=4))
    assert performance.chosen(shaped, config(), asked, run.hardware, run.ranks, 6, dry) == [4]


SMALL = ModelConfig(
    vocab_size=64,
    width=16,
    layers=1,
    heads=1,
    kv_heads=1,
    head_dim=16,
    d_ff=16,
    max_context=64,
    rope_theta=1e4,
    tied=True,
)


def test_settings_that_are_seldom_meant_are_warned_of(in_repository: Path, tmp_path: Path) -> None:
    assert "warning" not in performance.headline(run_of(tmp_path / "a"))
    run = run_of(tmp_path / "b", precision="fp16")
    run.config = replace(run.config, warmup_steps=4 * run.steps)
    first, second = performance.headline(run).split("\n")[1:]
    assert first.startswith("warning: fp16 is several times slower")
    assert second.startswith(f"warning: all {run.steps} steps are warmup: the learning rate ends at 25% of")
