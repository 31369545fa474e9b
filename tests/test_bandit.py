"""Reinforcement learning solves the task of `bandit.py`, and a killed run resumes exactly."""

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.learning import states
from pipeline.learning.fit import Watchers
from pipeline.learning.policy_losses import METHODS
from pipeline.learning.processes import Ranks
from pipeline.model.heads import ActorCritic, RewardModel
from pipeline.model.layers import Line
from pipeline.model.transformer import Transformer
from pipeline.rl import answers
from pipeline.rl.advantages import PPOConfig, annotate_ppo, estimate_ppo
from pipeline.rl.answers import Answer, Prompt
from pipeline.rl.rollout import Method, Rollout, RolloutStream
from stages import rlhf
from tests import rollouts
from tests.bandit import PAD, actor, config, group_run, ppo_run, sampler, score
from tests.loop import job
from tests.stopping import Stopped, before


def reward_of(model: Transformer) -> float:
    """The mean reward of 200 answers that training never saw."""
    asked = answers.repeated([rollouts.prompt(number, length=1) for number in range(2, 10)], 200)
    return float(np.mean([one.total for one in score(sampler(model, 99)(asked)) if one.total is not None]))


def assert_solved(model: Transformer, one: Any) -> None:
    """Check that the reward rises from under 0.2 to over 0.8, in the curve and on answers from other seeds."""
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
    """DAPO gets fewer iterations: once every answer is right, it finds no group whose scores differ, and
    stops.
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
    """With a learning rate of 0, in every update of two iterations the ratio is 1 and nothing is clipped."""
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
    """The gradients of an epoch's summed loss, in `parts` minibatches."""
    constants = PPOConfig(beta=0.05, target_kl=1.0, horizon=100)
    stream.config = replace(stream.config, minibatches=parts)
    stream.steps_per_rollout = stream.config.steps_per_rollout
    model.zero_grad()
    for step in range(parts):
        told = rlhf.loss(model, stream.batch(step, 0, stream.rows(step, 0)), temperature=1.0, ppo=constants)
        sum(term.coefficient * term.sum for term in told.terms).backward()  # pyright: ignore[reportAttributeAccessIssue]
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_the_minibatches_of_prompts_have_together_the_gradient_of_the_whole_batch() -> None:
    """In float64; 8 prompts of 20 tokens and 4 answers each, in 1, 2, 4 and 3 parts, some of which split a prompt's
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
def test_a_killed_run_ends_with_the_bits_of_an_uninterrupted_one(kill_at: int, tmp_path: Path) -> None:
    """Inside an iteration, it resumes at the fill before it: states are saved between fills. PPO's beta is carried
    along.
    """
    constants = PPOConfig(beta=0.05, target_kl=0.1, horizon=100)

    def run(folder: Path, watchers: Watchers | None = None) -> tuple[ActorCritic, Any]:
        model = ActorCritic(actor(), RewardModel(actor()))
        settings = config(prompts=6, samples=1, minibatches=2, iterations=2)  # 4 updates per iteration
        return model, ppo_run(model, constants, settings, folder, watchers, save_steps=1)

    whole, first = run(tmp_path / "whole")
    with pytest.raises(Stopped):
        run(tmp_path / "killed", before(kill_at))
    again, second = run(tmp_path / "killed")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
    assert second.tracker.rows == first.tracker.rows
    assert len({row["objective/kl_coef"] for row in first.tracker.rows if "objective/kl_coef" in row}) == 2


def test_a_signal_inside_an_iteration_names_the_step_where_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is saved between the updates of one iteration."""
    jobs: list[Any] = []
    monkeypatch.setattr("tests.bandit.job", lambda *given, **runtime: jobs.append(job(*given, **runtime)) or jobs[-1])

    def signalled(made: int) -> None:
        if made == 6:
            jobs[-1].stop.signal = signal.SIGTERM

    model = ActorCritic(actor(), RewardModel(actor()))
    settings = config(prompts=6, samples=1, minibatches=2, iterations=2)  # 4 updates per iteration
    with pytest.raises(SystemExit):
        ppo_run(
            model,
            PPOConfig(beta=0.05, target_kl=0.1, horizon=100),
            settings,
            tmp_path,
            Watchers(step=signalled),
            save_steps=1,
        )
    assert "stopped by signal 15 at step 6; rerun the same command to resume at step 4" in capsys.readouterr().err
    newest = states.newest(tmp_path)
    assert newest is not None and newest.step == 4
