"""Bugs that make a policy differ from itself: dropout, a reference that is not a copy, a one-sided temperature."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeline.batches.pairs import Encoded, PairBatch, batch_of
from pipeline.learning import reference
from pipeline.learning.pair_losses import PairLoss, dpo, pair_logprobs
from pipeline.learning.policy_losses import METHODS
from pipeline.learning.reference import Reference, Start
from pipeline.model import checkpoint
from pipeline.model.heads import ActorCritic, RewardModel
from pipeline.model.lora import AdapterConfig
from pipeline.model.transformer import Transformer
from pipeline.rl import advantages, answers
from pipeline.rl.advantages import PPOConfig
from pipeline.rl.models import CausalSetting
from pipeline.rl.rewards import Score
from pipeline.rl.rollout import Method, RolloutConfig, RolloutStream, group_loss
from pipeline.run.errors import ConfigError
from pipeline.text.tokenizer import Tokenizer
from stages import rlhf
from tests import rollouts
from tests.loop import job
from tests.rollouts import prompts


@pytest.fixture
def base(tmp_path: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer) -> Path:
    """The model directory that training starts from."""
    checkpoint.save(tmp_path / "tools", tiny_model, byte_tokenizer, {})
    return tmp_path / "tools"


def pairs() -> PairBatch:
    """Three pairs of unequal lengths."""
    pieces = [answers.piece_of(rollouts.answer(prompts()[n % 3], 0, range(30, 33 + 2 * n))) for n in range(6)]
    record = rollouts.prompt(0).record
    return batch_of([Encoded(record, *both) for both in zip(pieces[:3], pieces[3:], strict=True)], 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("adapter", [None, AdapterConfig(rank=2, alpha=4)])
def test_a_policy_in_training_says_twice_the_same(adapter: AdapterConfig | None, base: Path) -> None:
    """Bug museum: dropout (huggingface/trl 744). With dropout, the first ratio is not 1 and DPO's first loss is
    not ln 2.
    """
    policy = reference.begin(base, adapter, 1).policy.train(True)
    first, second = (pair_logprobs(policy, pairs()) for _ in range(2))
    assert torch.equal(first.chosen, second.chosen) and torch.equal(first.rejected, second.rejected)


def test_dropout_is_refused_in_every_model_of_alignment(base: Path, tiny_model: Transformer) -> None:
    """Bug museum: dropout (huggingface/trl 744). An adapter's dropout has no effect before its first update, so
    no gate at the start sees it.
    """
    with pytest.raises(ConfigError, match=r"adapter\.dropout: expected 0 .* got 0\.1"):
        reference.begin(base, AdapterConfig(rank=2, alpha=4, dropout=0.1), 1)
    dropping = checkpoint.load(base)[0]
    dropping.dropout = 0.1
    with pytest.raises(ValueError, match=r"dropout=0\.1"):
        RewardModel(dropping)
    with pytest.raises(ValueError, match=r"without dropout, found dropout 0\.1"):
        ActorCritic(dropping, RewardModel(tiny_model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_has_the_policy_s_dtype(dtype: torch.dtype, base: Path) -> None:
    """Bug museum: reference in another dtype. Rounded weights differ, so the first log-ratios were not 0."""
    policy = checkpoint.load(base)[0].to(dtype)
    with Reference(policy, adapted=False).model() as frozen:
        assert {parameter.dtype for parameter in frozen.parameters()} == {dtype}
        theirs = pair_logprobs(frozen, pairs())
    with torch.no_grad():  # recording a gradient uses other kernels, which round differently
        ours = pair_logprobs(policy, pairs())
    assert torch.equal(ours.chosen, theirs.chosen) and torch.equal(ours.rejected, theirs.rejected)
    assert float(dpo(ours, theirs, PairLoss()).terms[0].sum / 3) == pytest.approx(math.log(2), abs=1e-7)


def test_the_reference_is_the_policy_that_was_loaded_and_is_not_read_again(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug museum: reference reloaded from disk. Changes to the policy in memory were missing from it.

    Here every load of the directory gives different weights.
    """
    load, draws = checkpoint.load, torch.Generator().manual_seed(0)

    def changed(folder: Path) -> tuple[Transformer, Tokenizer]:
        model, tokenizer = load(folder)
        with torch.no_grad():
            model.model.embed_tokens.weight.add_(
                0.1 * torch.randn(model.model.embed_tokens.weight.shape, generator=draws)
            )
        return model, tokenizer

    monkeypatch.setattr(checkpoint, "load", changed)
    start = reference.begin(base, None, 1)
    with start.reference.model() as frozen:
        named = dict(frozen.named_parameters())
        assert all(torch.equal(value, named[name]) for name, value in start.policy.named_parameters())
        assert all(
            value is not named[name] and not named[name].requires_grad
            for name, value in start.policy.named_parameters()
        )


def filled(
    kind: str, base: Path, folder: Path, temperature: float
) -> tuple[nn.Module, RolloutStream, dict[str, float]]:
    """What `stage_rlhf` or `stage_grpo` samples and annotates at a temperature, and what it logs."""
    policy, tokenizer = checkpoint.load(base)
    start = Start(policy, tokenizer, Reference(policy, adapted=False), None)
    config = RolloutConfig(
        learning_rate=1e-3, prompts=3, samples=2, iterations=1, max_prompt=16, max_new_tokens=8, temperature=temperature
    )
    setting = CausalSetting(start, config, job(folder))
    carried = {"beta": 0.05}
    model, critic = policy, RewardModel(checkpoint.load(base)[0])
    if kind == "rlhf":
        model = ActorCritic(policy, critic)
        constants = PPOConfig(beta=0.05, target_kl=6.0, horizon=100)
        method = Method(
            sample=setting.sample,
            score=lambda given: [Score(float(len(one.ids) % 3), {}) for one in given],
            annotate=lambda found: advantages.annotate_ppo(
                found, reference=setting.reference, values=lambda given: setting.values(critic, given)
            ),
            estimate=lambda found: advantages.estimate_ppo(found, constants, carried),
        )
    else:
        method = Method(
            sample=setting.sample,
            score=lambda given: [Score(float(one.ids[0] % 5), {}) for one in given],
            annotate=lambda found: advantages.annotate_group(found, reference=setting.reference),
            estimate=lambda found: advantages.estimate_group(found, METHODS["grpo"], 2),
        )
    stream = RolloutStream(prompts(), config, method, pad=tokenizer.pad, seed=1, ranks=setting.ranks, state=carried)
    return model, stream, stream.fill(0)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("kind", ["rlhf", "grpo"])
def test_every_log_probability_is_at_the_temperature_of_sampling(
    kind: str, temperature: float, base: Path, tmp_path: Path
) -> None:
    """Bug museum: one-sided temperature (OpenRLHF/OpenRLHF 853). Answers were sampled at T but trained and
    compared at 1, so the ratio was not 1.
    """
    model, stream, logged = filled(kind, base, tmp_path / "work", temperature)
    batch = stream.batch(0, 0, stream.rows(0, 0))
    if kind == "rlhf":
        constants = PPOConfig(beta=0.05, target_kl=6.0, horizon=100)
        found = rlhf.loss(model, batch, temperature=temperature, ppo=constants)  # type: ignore[arg-type]
    else:
        found = group_loss(model, batch, method=METHODS["grpo"], config=stream.config)  # type: ignore[arg-type]
    name = "val/ratio" if kind == "rlhf" else "ratio"
    total, count = found.metrics[name]
    assert float(total) / count == pytest.approx(1, abs=1e-5)
    assert float(found.extremes["sampling/sampling_logp_difference/max"]) < 1e-4
    divergence = logged["objective/kl" if kind == "rlhf" else "kl/rollout"]
    assert divergence == pytest.approx(0, abs=1e-4)
