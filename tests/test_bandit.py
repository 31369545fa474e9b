"""A task that reinforcement must solve: say one token four times, then end. Loop, sampler, stream and losses are the
real ones.

The reward is the share of four that was said; a fresh model of 16 tokens says it by chance, about 0.12.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.generation.sampling import Sampling, generate
from pipeline.learning import fit as learning_fit
from pipeline.learning.fit import Watchers, fit
from pipeline.learning.policy_losses import METHODS, GroupMethod
from pipeline.learning.processes import Ranks
from pipeline.model.config import ModelConfig
from pipeline.model.heads import ActorCritic, RewardModel
from pipeline.model.layers import Line
from pipeline.model.transformer import Transformer
from pipeline.rl import answers
from pipeline.rl.advantages import PPOConfig, annotate_group, annotate_ppo, estimate_group, estimate_ppo
from pipeline.rl.answers import Answer, Prompt
from pipeline.rl.rewards import Score
from pipeline.rl.rollout import Method, Rollout, RolloutConfig, RolloutStream
from stages import grpo, rlhf
from tests import rollouts
from tests.loop import Stopped, job

PAD, END, WANTED, MOST, LONGEST = 0, 1, 5, 4, 12


class Letters:
    """What sampling reads of a tokenizer, over 16 ids."""

    turn_end = END

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("a") + token) for token in ids)


def actor() -> Transformer:
    config = ModelConfig(
        vocab_size=16,
        width=32,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=16,
        d_ff=64,
        max_context=32,
        rope_theta=1e4,
        tied=False,
    )
    return Transformer(config, torch.Generator().manual_seed(0))


def config(**changes: Any) -> RolloutConfig:
    values: dict[str, Any] = {
        "learning_rate": 1e-2,
        "schedule": "constant",
        "weight_decay": 0.0,
        "prompts": 8,
        "samples": 8,
        "iterations": 30,
        "epochs": 2,
        "max_prompt": 4,
        "max_new_tokens": LONGEST,
        "eval_steps": 1000,
    }
    return RolloutConfig(**(values | changes))


def score(given: Sequence[Answer]) -> list[Score]:
    return [Score(min(answer.ids.count(WANTED), MOST) / MOST, {}) for answer in given]


def sampler(model: Transformer, seed: int) -> Callable[[Sequence[Any]], list[Answer]]:
    def complete(prompts: list[list[int]], seeds: list[int]) -> Any:
        return generate(model, prompts, Sampling(LONGEST, temperature=1.0), stop=[END], seeds=seeds, batch_rows=64)

    return lambda asked: answers.sample(complete, asked, Letters(), seed)  # type: ignore[arg-type]


def filling(
    method: Method, settings: RolloutConfig, state: dict[str, Any] | None = None, seed: int = 1
) -> RolloutStream:
    prompts = [rollouts.prompt(number % 14 + 2, length=1) for number in range(8)]
    return RolloutStream(prompts, settings, method, pad=PAD, seed=seed, ranks=Ranks("fp32", ""), state=state)


def reward_of(model: Transformer) -> float:
    """The mean reward of 200 answers that training never saw."""
    asked = answers.repeated([rollouts.prompt(number, length=1) for number in range(2, 10)], 200)
    return float(np.mean([one.total for one in score(sampler(model, 99)(asked)) if one.total is not None]))


def group_run(model: Transformer, method: GroupMethod, settings: RolloutConfig, folder: Path, **runtime: Any) -> Any:
    """Train the model by a group method as the stages do; the job, whose curve is kept."""
    frozen = copy.deepcopy(model).requires_grad_(False)
    needed = method.beta > 0

    def reference(given: Sequence[Answer]) -> list[np.ndarray]:
        return answers.logprobs_of(frozen, given, PAD, 1.0)

    def annotate(found: list[Rollout]) -> None:
        annotate_group(found, reference=reference if needed else None)

    how = Method(
        sample=sampler(model, 1),
        score=score,
        annotate=annotate,
        dynamic=method.dynamic,
        estimate=lambda found: estimate_group(found, method, settings.samples),
    )
    one = job(folder, **runtime)
    loss = partial(grpo.loss, method=method, config=settings)
    fit(model, filling(how, settings), loss, settings, one, watchers=Watchers(gradients_at=None))
    return one


def ppo_run(model: ActorCritic, constants: PPOConfig, settings: RolloutConfig, folder: Path, **runtime: Any) -> Any:
    """Train actor and critic by PPO as the stage does."""
    frozen = copy.deepcopy(model.actor).requires_grad_(False)

    def annotate(found: list[Rollout]) -> None:
        annotate_ppo(
            found,
            reference=lambda given: answers.logprobs_of(frozen, given, PAD, 1.0),
            values=lambda given: answers.values_of(model.critic, given, PAD),
        )

    carried = {"beta": constants.beta}
    how = Method(
        sample=sampler(model.actor, 1),
        score=score,
        annotate=annotate,
        estimate=lambda found: estimate_ppo(found, constants, carried),
    )
    one = job(folder, **runtime)
    loss = partial(rlhf.loss, temperature=1.0, ppo=constants)
    fit(model, filling(how, settings, carried), loss, settings, one)
    return one


def assert_solved(model: Transformer, one: Any) -> None:
    """From under a fifth of the most to over four fifths, in the training curve and on answers of other seeds."""
    curve = [row["reward"] for row in one.tracker.rows if "reward" in row]
    assert one.tracker.rows[-1]["step"] <= 60
    assert curve[0] < 0.2
    assert np.mean(curve[-3:]) >= 0.8
    assert reward_of(model) >= 0.8


GROUP_METHODS = {name: METHODS[name] for name in ("grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp")}


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", GROUP_METHODS)
def test_a_group_method_solves_the_bandit(name: str, tmp_path: Path) -> None:
    """DAPO gets fewer iterations: once every answer is right it finds no group whose scores differ, and stops
    itself.
    """
    model = actor()
    settings = config(iterations=20) if GROUP_METHODS[name].dynamic else config()
    one = group_run(model, GROUP_METHODS[name], settings, tmp_path)
    assert_solved(model, one)


@pytest.mark.slow
@pytest.mark.full
def test_ppo_solves_the_bandit(tmp_path: Path) -> None:
    critic = actor()
    model = ActorCritic(actor(), RewardModel(critic))
    constants = PPOConfig(beta=0.01, target_kl=6.0, horizon=2000)
    one = ppo_run(model, constants, config(samples=1, prompts=128, eps=1e-5), tmp_path)
    assert_solved(model.actor, one)


def test_without_learning_the_policy_stays_where_it_sampled(tmp_path: Path) -> None:
    """A rate of 0: in every update of two iterations the ratio is 1 and nothing is clipped."""
    model = actor()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    one = group_run(model, replace(METHODS["grpo"], beta=0.05), config(learning_rate=0.0, iterations=2), tmp_path)
    rows = [row for row in one.tracker.rows if "ratio" in row]
    assert len(rows) >= 2
    for row in rows:
        assert row["ratio"] == pytest.approx(1, abs=1e-4)
        assert row["approxkl"] < 1e-8
        assert row["clip_ratio/region_mean"] == 0
        assert row["kl"] == pytest.approx(0, abs=1e-6)
        assert row.get("sampling/sampling_logp_difference/max", 0.0) < 1e-5
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def gradients(model: ActorCritic, stream: RolloutStream, parts: int) -> list[torch.Tensor]:
    """Of the summed loss of an epoch in so many minibatches."""
    constants = PPOConfig(beta=0.05, target_kl=1.0, horizon=100)
    stream.config = replace(stream.config, minibatches=parts)
    stream.steps_per_rollout = stream.config.steps_per_rollout
    model.zero_grad()
    for step in range(parts):
        told = rlhf.loss(model, stream.batch(step, 0, stream.rows(step, 0)), temperature=1.0, ppo=constants)
        sum(term.coefficient * term.sum for term in told.terms).backward()  # pyright: ignore[reportAttributeAccessIssue]
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_the_minibatches_of_prompts_have_together_the_gradient_of_the_whole_batch() -> None:
    """In float64; 8 prompts of 20 tokens and 4 answers each, in 1, 2, 4 and 3 parts, of which some part a prompt's
    answers.
    """
    model = ActorCritic(actor(), RewardModel(actor())).double()
    with torch.no_grad():
        model.critic.score.weight.normal_(generator=torch.Generator().manual_seed(2))
    long = [Prompt(f"p{n}", [2 + n, *range(2, 16), *[n + 3] * 5], "made", rollouts.prompt(n).record) for n in range(8)]
    settings, constants = (
        config(samples=4, epochs=1, max_prompt=20, max_new_tokens=4),
        PPOConfig(beta=0.05, target_kl=1.0, horizon=100),
    )
    carried = {"beta": constants.beta}

    def complete(asked: Sequence[Any]) -> list[Answer]:
        draws = np.random.default_rng(3)
        return [rollouts.answer(prompt, n, draws.integers(2, 16, 4).tolist(), logprob=-2.5) for prompt, n in asked]

    def annotate(found: list[Rollout]) -> None:
        given = [one.answer for one in found]
        annotate_ppo(
            found,
            reference=lambda _: answers.logprobs_of(model.actor, given, PAD, 1.0),
            values=lambda _: answers.values_of(model.critic, given, PAD),
        )

    how = Method(
        sample=complete, score=score, annotate=annotate, estimate=lambda found: estimate_ppo(found, constants, carried)
    )
    stream = RolloutStream(long, settings, how, pad=PAD, seed=1, ranks=Ranks("fp32", ""), state=carried)
    stream.fill(0)
    whole = gradients(model, stream, 1)
    assert max(float(one.abs().max()) for one in whole) > 0.1
    for parts in (2, 3, 4):
        for found, expected in zip(gradients(model, stream, parts), whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    batch = stream.batch(0, 0, stream.rows(0, 0))  # the first of four parts: two prompts
    computed = Line.of(batch.documents, True, batch.input_ids).computed
    assert computed is not None and len(computed) <= 2 * 20 + 8 * 4


@pytest.mark.parametrize("kill_at", [1, 4, 6])
def test_a_killed_run_ends_with_the_bits_of_an_uninterrupted_one(
    kill_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside an iteration it goes on at the fill before it: states are saved between fills. PPO carries its beta
    along.
    """
    constants, original = PPOConfig(beta=0.05, target_kl=0.1, horizon=100), learning_fit.Run._one_step

    def run(folder: Path) -> tuple[ActorCritic, Any]:
        model = ActorCritic(actor(), RewardModel(actor()))
        settings = config(prompts=6, samples=1, minibatches=2, iterations=2)  # 4 updates an iteration
        return model, ppo_run(model, constants, settings, folder, save_steps=1)

    def step(self: Any) -> None:
        if self.course.step == kill_at:
            raise Stopped
        original(self)

    whole, first = run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(learning_fit.Run, "_one_step", step)
        with pytest.raises(Stopped):
            run(tmp_path / "killed")
    again, second = run(tmp_path / "killed")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
    assert second.tracker.rows == first.tracker.rows
    assert len({row["objective/kl_coef"] for row in first.tracker.rows if "objective/kl_coef" in row}) == 2
