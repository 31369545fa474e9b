"""Training and generation on a GPU: the same numbers as on a CPU, exact order on resume, every precision and setting.
Skipped without a GPU.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import gpu_training
from pipeline.generation.sampling import Sampling, generate
from pipeline.learning.fit import Watchers, fit
from pipeline.learning.states import weights_of
from pipeline.model.transformer import Transformer
from pipeline.run import device
from pipeline.run.config import Runtime
from pipeline.serve import models
from tests import workspace as workspace_of_stages
from tests.stopping import Stopped, before
from tests.training import Case, Rows, job_of, model_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def trained(
    folder: Path,
    *,
    steps: int = 8,
    optimizer: str = "adamw",
    ema: float = 0.0,
    watchers: Watchers | None = None,
    **runtime: Any,
) -> tuple[Transformer, Any]:
    """A run of `fit` on what this machine has."""
    from pipeline.learning import losses as learning_losses
    from pipeline.learning.losses import Loss, Term
    from pipeline.learning.settings import FitConfig, Validation

    case = Case(folder=str(folder), rows=8, steps=steps)
    job = job_of(folder, case)
    job = replace(job, runtime=Runtime(**({"logging_steps": 1, "precision": "fp32", "save_steps": 1} | runtime)))
    model = model_of(case)
    config = FitConfig(
        steps=steps,
        tokens_per_step=8 * 8,
        context=8,
        learning_rate=5e-3,
        eval_steps=4,
        optimizer=optimizer,
        eps=1e-6,
        validation=Validation(publish="last", ema_decay=ema),
    )

    def loss(model: Transformer, batch: Any) -> Loss:
        chosen = batch.targets >= 0
        return Loss(
            [
                Term(
                    "loss",
                    model(
                        batch.ids,
                        select=chosen,
                        head=lambda hidden, table, _: learning_losses.next_token(hidden, table, batch.targets[chosen]),
                    ),
                )
            ]
        )

    class There(Rows):
        """Batches that can be moved to the device."""

        def batch(self, step: int, context: int, rows: Any) -> Any:
            made = super().batch(step, context, rows)
            made.to = lambda where: _moved(made, where)  # type: ignore[method-assign]
            return made

        def evaluation(self, tokens: int) -> Any:
            for made in super().evaluation(tokens):
                made.to = lambda where, made=made: _moved(made, where)  # type: ignore[method-assign]
                yield made

    fit(model, There(case, job), loss, config, job, watchers=watchers)
    return model, job


def _moved(batch: Any, where: torch.device) -> Any:
    batch.ids, batch.targets = batch.ids.to(where), batch.targets.to(where)
    return batch


def losses(job: Any) -> list[float]:
    return [row["loss"] for row in job.tracker.rows if "loss" in row]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_gpu_learns_what_a_cpu_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    _, there = trained(tmp_path / "gpu", optimizer=optimizer, ema=0.9)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        _, here = trained(tmp_path / "cpu", optimizer=optimizer, ema=0.9)
    assert losses(there) == pytest.approx(losses(here), abs=5e-3)  # float32 products run in TF32 on a GPU


@pytest.mark.parametrize(("precision", "near"), [("bf16", 0.05), ("fp16", 0.02)])
def test_half_precision_stays_near_float32(tmp_path: Path, precision: str, near: float) -> None:
    _, exact = trained(tmp_path / "fp32")
    _, half = trained(tmp_path / precision, precision=precision)
    assert losses(half) == pytest.approx(losses(exact), abs=near)


def test_an_automatic_micro_batch_is_proved_on_the_device(tmp_path: Path) -> None:
    model, at_work = trained(tmp_path, micro_batch="auto", precision="bf16")
    assert next(model.parameters()).device.type == "cuda" and len(losses(at_work)) == 8


@pytest.mark.parametrize("policy", ["full", "every_2", "selective"])
def test_activations_computed_again_change_nothing(tmp_path: Path, policy: str) -> None:
    plain, _ = trained(tmp_path / "plain")
    again, _ = trained(tmp_path / policy, gradient_checkpointing=policy)
    for name, weight in weights_of(plain).items():
        torch.testing.assert_close(weights_of(again)[name], weight, atol=1e-5, rtol=0, msg=name)


def test_compiled_layers_stay_near_plain_ones(tmp_path: Path) -> None:
    _, plain = trained(tmp_path / "plain", precision="bf16")
    model, compiled = trained(tmp_path / "compiled", precision="bf16", compile=True)
    assert model.compiled and losses(compiled) == pytest.approx(losses(plain), abs=0.05)


def test_a_killed_run_goes_on_in_the_same_order(tmp_path: Path) -> None:
    whole, first = trained(tmp_path / "whole")
    with pytest.raises(Stopped):
        trained(tmp_path / "cut", watchers=before(5))
    again, second = trained(tmp_path / "cut")
    assert losses(second) == pytest.approx(losses(first), abs=1e-5)
    for name, weight in weights_of(whole).items():
        torch.testing.assert_close(weights_of(again)[name], weight, atol=1e-4, rtol=0, msg=name)


def test_states_written_aside_are_those_of_their_step(tmp_path: Path) -> None:
    plain, _ = trained(tmp_path / "plain")
    aside, _ = trained(tmp_path / "aside", async_save=True)
    for name, weight in weights_of(plain).items():
        torch.testing.assert_close(weights_of(aside)[name], weight, atol=1e-5, rtol=0, msg=name)


def test_greedy_text_is_that_of_a_cpu(tiny_model: nn.Module) -> None:
    model: Any = tiny_model
    prompts = [[5, 9, 2, 40], [7, 7], [100, 3, 60]]
    here = generate(model, prompts, Sampling(24), stop=[], seeds=[1, 2, 3])
    there = generate(model.to("cuda"), prompts, Sampling(24), stop=[], seeds=[1, 2, 3])
    assert [one.ids for one in here] == [one.ids for one in there]


def test_the_benchmark_of_a_gpu_says_speed_use_and_memory() -> None:
    [found] = gpu_training.main(
        [
            "--models",
            "tiny",
            "--settings",
            "plain",
            "--rows",
            "2",
            "--context",
            "64",
            "--rounds",
            "1",
            "--steps",
            "2",
            "--anyway",
        ]
    )
    assert found["tokens_per_second"] > 0 and found["peak_gb"] > 0 and device.hardware("bf16").device.type == "cuda"


@pytest.mark.parametrize("stage", workspace_of_stages.SETTINGS)
def test_a_stage_trains_there(stage: str, workspace: workspace_of_stages.Workspace) -> None:
    torch.cuda.reset_peak_memory_stats()
    ended = workspace.command(stage, **{"runtime.precision": "bf16"})
    assert ended.code == 0, ended.said
    assert torch.cuda.max_memory_allocated() > 1_000_000


@pytest.mark.parametrize("weights", ["bf16", "nf4"])
@pytest.mark.parametrize("stage", ["lora", "dpo", "grpo"])
def test_an_adapter_trains_there_on_a_base_of_less_memory(
    stage: str, weights: str, workspace: workspace_of_stages.Workspace
) -> None:
    """Weights that do not train are published unchanged."""
    if weights == "nf4":
        pytest.importorskip("bitsandbytes")
    adapter = {} if stage == "lora" else {"adapter": {"rank": 2, "alpha": 4}}
    ended = workspace.command(stage, **{"runtime.precision": "bf16", "runtime.base_weights": weights}, **adapter)
    assert ended.code == 0, ended.said
    before, after = (workspace.weights(name) for name in ("tools", stage))
    assert all(torch.equal(after[name], before[name]) for name in before if "norm" in name)
    assert any(not torch.equal(after[name], before[name]) for name in before)


def test_models_answer_and_score_there(coded: workspace_of_stages.Workspace) -> None:
    """As the server loads them, in 16 bits."""
    names = [Path("models") / name for name in ("tools", "reward")]
    for one in models.load(names, rows=2, queue=2, weights=None):
        model = one.reward_model if one.engine is None else one.engine.model
        assert model is not None and {p.device.type for p in model.parameters()} == {"cuda"}
        if one.reward_model is not None:
            score = one.score([{"role": "user", "content": "go"}, {"role": "assistant", "content": "left"}], [])
            assert isinstance(score, float)
