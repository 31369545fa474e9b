"""An update is the same however its rows are cut: micro-batches of 1 or 8, one process or two.

    python -m torch.distributed.run ... -m tests.test_invariance KIND FOLDER      is one of the two processes

Adam's eps is 0.01 here: with 1e-8 the first update is the sign of each gradient, so a gradient of 1e-9 that rounds
to the other side of zero moves its weight by twice the rate.
"""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipeline.batches.labels import LabelBatch, LabelStream
from pipeline.batches.pairs import PairBatch, PairStream
from pipeline.ingest import records
from pipeline.ingest.records import Pair
from pipeline.learning import label_losses, pair_losses
from pipeline.learning.fit import Watchers, fit
from pipeline.learning.label_losses import LabelLoss
from pipeline.learning.losses import Loss
from pipeline.learning.pair_losses import PairLoss, dpo
from pipeline.learning.policy_losses import METHODS
from pipeline.learning.processes import Ranks
from pipeline.learning.reference import Reference
from pipeline.learning.settings import LabelConfig, PairConfig
from pipeline.learning.states import weights_of
from pipeline.model.config import ModelConfig
from pipeline.model.heads import ActorCritic, GuessingModel, RewardModel
from pipeline.model.transformer import Transformer
from pipeline.rl.advantages import PPOConfig
from pipeline.text.tokenizer import Tokenizer
from stages import reward
from tests import bandit
from tests.conftest import SENTENCES
from tests.loop import job
from tests.rollouts import Given
from tests.settings import flat

ROOT = Path(__file__).parents[1]
KINDS = ("dpo", "kto", "reward", "grpo", "rehearsed", "ppo")
SMOOTH: dict[str, Any] = {"eps": 1e-2, "learning_rate": 1e-2}


def pair(number: int) -> Pair:
    """A pair with answers of unequal lengths."""
    said = [
        [{"role": role, "content": text}]
        for role, text in (
            ("user", f"Which way, {number}?"),
            ("assistant", "left " * (1 + number % 5)),
            ("assistant", "right" + "." * (number % 7)),
        )
    ]
    return Pair(id=str(number), source="made", kind="story", prompt=said[0], chosen=said[1], rejected=said[2])


def shape_of(tokenizer: Tokenizer) -> ModelConfig:
    return ModelConfig(
        vocab_size=tokenizer.vocab_size,
        width=32,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=16,
        d_ff=48,
        max_context=128,
        rope_theta=1e4,
        tied=True,
    )


def train_pairs(folder: Path, method: str, **runtime: Any) -> nn.Module:
    """Two updates of 8 pairs; the three pairs of the val split are one batch, so a second process has none."""
    tokenizer = Tokenizer.train(iter(SENTENCES), 320)
    data = folder / f"data-{os.environ.get('RANK', '0')}"
    for split, first, count in (("train", 0, 11), ("val", 100, 3)):
        records.write(data / f"{split}.jsonl", map(pair, range(first, first + count)))
    stream = PairStream(data, tokenizer, max_prompt=64, max_length=128, pairs=8, seed=1)
    model, frozen = (Transformer(shape_of(tokenizer), torch.Generator().manual_seed(seed)) for seed in (0, 1))
    losses = PairLoss(nll_weight=0.2)

    def loss(trained: nn.Module, batch: PairBatch) -> Loss:
        with torch.no_grad():
            reference = pair_losses.pair_logprobs(frozen, batch)
        return dpo(pair_losses.pair_logprobs(trained, batch), reference, losses)

    trained, objective = (
        (model, loss)
        if method == "dpo"
        else (
            GuessingModel(RewardModel(model)),
            partial(reward.loss, policy=frozen, centering=0.1, likelihood_weight=0.5),
        )
    )
    settings = flat(PairConfig, steps=2, pairs=8, max_prompt=64, max_length=128, eval_steps=1, publish="last", **SMOOTH)
    one = job(folder, **runtime)
    fit(
        trained, stream, objective, settings, one, watchers=Watchers(gradients_at=1)
    )  # before that, a zero head lets none through
    keep_curve(one, folder)
    return trained


def train_labels(folder: Path, **runtime: Any) -> nn.Module:
    """Three updates of 8 answers against another model, so that the reference point is above 0 from the beginning."""
    tokenizer = Tokenizer.train(iter(SENTENCES), 320)
    data = folder / f"data-{os.environ.get('RANK', '0')}"
    for split, first, count in (("train", 0, 11), ("val", 100, 3)):
        records.write(data / f"{split}.jsonl", records.unpaired(map(pair, range(first, first + count))))
    stream = LabelStream(data, tokenizer, max_prompt=64, max_length=128, answers=8, seed=1)
    model, frozen = (Transformer(shape_of(tokenizer), torch.Generator().manual_seed(seed)) for seed in (1, 0))
    with torch.no_grad():
        for name, parameter in frozen.named_parameters():
            parameter.copy_(dict(model.named_parameters())[name] + 0.1 * parameter)
    reference, losses = Reference(frozen, adapted=False), LabelLoss(beta=0.5, desirable_weight=1.3)

    def loss(trained: nn.Module, batch: LabelBatch) -> Loss:
        assert not trained.training or batch.divergence is not None
        divergence = batch.divergence
        if divergence is None:
            divergence = label_losses.divergence_of(trained, reference, batch)
        sums = label_losses.likelihoods(frozen, batch.matched)
        return label_losses.kto(label_losses.answer_logprobs(trained, batch), sums, batch.desirable, divergence, losses)

    settings = flat(
        LabelConfig, steps=3, answers=8, max_prompt=64, max_length=128, eval_steps=1, publish="last", **SMOOTH
    )
    complete = partial(label_losses.with_divergence, reference=reference, where=torch.device("cpu"))
    one = job(folder, **runtime)
    fit(model, stream, loss, settings, one, watchers=Watchers(complete=complete))
    assert max(float(row.get("kl", 0.0)) for row in one.tracker.rows) > 0.01
    keep_curve(one, folder)
    return model


def train_grpo(folder: Path, rehearsal: Given | None = None, **runtime: Any) -> nn.Module:
    """15 answers in minibatches of 8 and 7: in the second one, a process of two has a row of padding only."""
    model = bandit.actor()
    settings = bandit.config(prompts=5, samples=3, minibatches=2, epochs=1, iterations=2, **SMOOTH)
    method = replace(METHODS["grpo"], beta=0.05)
    keep_curve(bandit.group_run(model, method, settings, folder, rehearsal, **runtime), folder)
    return model


def train_ppo(folder: Path, **runtime: Any) -> nn.Module:
    """The same for PPO."""
    model = ActorCritic(bandit.actor(), RewardModel(bandit.actor()))
    settings = bandit.config(prompts=15, samples=1, minibatches=2, epochs=1, iterations=2, **SMOOTH)
    constants = PPOConfig(beta=0.05, target_kl=1.0, horizon=100)
    keep_curve(bandit.ppo_run(model, constants, settings, folder, **runtime), folder)
    return model


def keep_curve(one: Any, folder: Path) -> None:
    """Loss, metrics and extremes of every row, as tensors."""
    rows = {
        f"{n}/{name}": torch.tensor(float(value))
        for n, row in enumerate(one.tracker.rows)
        for name, value in row.items()
    }
    save_file(rows, folder / f"curve-{os.environ.get('RANK', '0')}.safetensors")


def run(kind: str, folder: Path, **runtime: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    train = {
        "dpo": partial(train_pairs, method="dpo"),
        "reward": partial(train_pairs, method="reward"),
        "kto": train_labels,
        "grpo": train_grpo,
        "rehearsed": partial(train_grpo, rehearsal=Given(3)),
        "ppo": train_ppo,
    }[kind]
    model = train(folder, logging_steps=1, **runtime)
    weights = {name: value.contiguous() for name, value in weights_of(model).items()}
    save_file(weights, folder / f"weights-{os.environ.get('RANK', '0')}.safetensors")


def in_two_processes(kind: str, folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        [*command, "-m", "tests.test_invariance", kind, str(folder)],
        cwd=ROOT,
        env=environment,
        text=True,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as started:
        try:
            _, said = started.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)  # also ends the two workers, which wait for each other
            raise
    assert started.returncode == 0, said[-4000:]


def files_of(folder: Path, name: str) -> dict[str, Tensor]:
    return load_file(folder / f"{name}.safetensors")


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_is_the_same_however_its_rows_are_cut(kind: str, tmp_path: Path) -> None:
    run(kind, tmp_path / "whole", micro_batch=8)
    run(kind, tmp_path / "ones", micro_batch=1)
    in_two_processes(kind, tmp_path / "two")
    expected = files_of(tmp_path / "whole", "weights-0")
    curve = files_of(tmp_path / "whole", "curve-0")
    assert sum(name.endswith("/loss") for name in curve) >= 2
    assert min(float(value) for name, value in curve.items() if name.endswith("/grad_norm")) > 0.05
    for cut, rank in (("ones", 0), ("two", 0), ("two", 1)):
        found = files_of(tmp_path / cut, f"weights-{rank}")
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, atol=1e-6, rtol=0, msg=lambda m, n=name, c=cut: f"{c} {n}: {m}"
            )
        other = files_of(tmp_path / cut, f"curve-{rank}")
        assert other.keys() == curve.keys()
        for name, value in curve.items():
            torch.testing.assert_close(
                other[name], value, atol=2e-5, rtol=1e-5, equal_nan=True, msg=lambda m, n=name, c=cut: f"{c} {n}: {m}"
            )


if __name__ == "__main__":
    Ranks.leave = lambda self: None  # type: ignore[method-assign]  # rank 1 too tells what it has in the end
    run(sys.argv[1], Path(sys.argv[2]))
    dist.barrier()
    dist.destroy_process_group()
