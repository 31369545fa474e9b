"""Keys of stages grpo and rlhf: the method and its constants, rewards, prompts, and what is measured alongside
training.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.evaluation.preferences import HeldOutConfig
from pipeline.evaluation.solving import SolvingConfig
from pipeline.ingest import records
from pipeline.learning import losses
from pipeline.learning.losses import Loss
from pipeline.learning.policy_losses import METHODS
from pipeline.model.lora import AdaptedLinear, AdapterConfig
from pipeline.rl import models
from pipeline.rl.advantages import PPOConfig, estimate_ppo
from pipeline.rl.answers import Answer
from pipeline.rl.models import CausalSetting, Setting
from pipeline.rl.rollout import Rollout, RolloutBatch, RolloutConfig, alarms_of
from pipeline.sandbox.judge import SandboxConfig
from stages import grpo, rlhf
from tests import workspace as builder
from tests.handed import Handed, handed, without_judge
from tests.loop import job
from tests.workspace import Workspace

Look = Callable[[Handed], Any]
PPO = PPOConfig(beta=0.3, target_kl=0.7, horizon=11, gamma=0.9, lam=0.8, clip=0.15, value_clip=0.25, value_weight=0.35)


def nothing(given: Handed) -> None:
    """Inspect nothing, because the arguments of `fit` say it all."""


def rolling(**changes: Any) -> RolloutConfig:
    values: dict[str, Any] = {
        "iterations": 1,
        "prompts": 3,
        "samples": 4,
        "max_prompt": 60,
        "max_new_tokens": 24,
        "learning_rate": 1e-3,
    }
    return RolloutConfig(**(values | changes))


def of_grpo(**changes: Any) -> grpo.Params:
    values: dict[str, Any] = {
        "method": "grpo",
        "rewards": {"length": 1.0, "code_format": 0.5},
        "held_out": SolvingConfig(eval_problems=1),
        "sandbox": SandboxConfig(),
        "fit": rolling(),
    }
    return grpo.Params(**(values | changes))


def of_rlhf(**changes: Any) -> rlhf.Params:
    held_out = HeldOutConfig(eval_prompts=2, best_of_prompts=0)
    settings = {"method": "ppo", "ppo": PPO, "sandbox": SandboxConfig(), "fit": rolling()}
    values: dict[str, Any] = {"held_out": held_out} | settings
    return rlhf.Params(**(values | changes))


def run(
    params: grpo.Params | rlhf.Params, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, look: Look = nothing
) -> tuple[Handed, list[SandboxConfig]]:
    """What the stage hands to `fit`, and the sandboxes that it asked for."""
    sandboxes = without_judge(monkeypatch, grpo if isinstance(params, grpo.Params) else models)
    shared: dict[str, Any] = {"base": Path("models/tools"), "out": Path("models/out"), "samples": Path("samples.jsonl")}
    if isinstance(params, grpo.Params):
        found = handed(grpo, monkeypatch, look)
        shared |= {"problems": Path("data/problems"), "environment": Path("conf/environment/none.py")}
        grpo.run(params, job(workspace.folder / "work/key"), **shared)
    else:
        found = handed(rlhf, monkeypatch, look)
        rlhf.run(
            params,
            job(workspace.folder / "work/key"),
            reward=Path("models/reward"),
            pairs=Path("data/preferences"),
            dialogues=Path("data/dialogues"),
            text=Path("data/none/text"),
            code=Path("data/none/code"),
            **shared,
        )
    return found, sandboxes


# the method


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_its_own_constants_where_nothing_else_is_said(method: str) -> None:
    assert of_grpo(method=method).resolved == METHODS[method]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("clip_low", 0.0),
        ("clip_low", 0.11),
        ("clip_high", 0.0),
        ("clip_high", 0.37),
        ("beta", 0.0),
        ("beta", 0.9),
        ("dynamic", False),
        ("dynamic", True),
    ],
)
def test_what_is_said_wins_over_the_method_also_where_it_is_nothing_and_moves_nothing_else(
    method: str, key: str, value: Any
) -> None:
    own = METHODS[method]
    if key.startswith("clip_"):
        expected = replace(own, clip=replace(own.clip, **{key.removeprefix("clip_"): value}))
    else:
        expected = replace(own, **{key: value})
    assert of_grpo(method=method, **{key: value}).resolved == expected


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"beta": -1.0}, "beta: expected at least 0"),
        ({"clip_low": 2.0}, "clip_low: expected at most 1"),
        ({"clip_low": -0.1}, "clip_low: expected at least 0"),
        ({"clip_high": -0.1}, "clip_high: expected at least 0"),
    ],
)
def test_constants_that_cannot_be_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of_grpo(**wrong)


def filled(given: Handed) -> tuple[list[Rollout], RolloutBatch]:
    """The answers of the first iteration, and its first batch."""
    given.stream.fill(0)
    return given.stream.rollouts, given.stream.batch(0, 84, given.stream.rows(0, 84))


def as_if(given: Handed, batch: RolloutBatch, *, ratio: float, advantage: float) -> Loss:
    """The loss when every token has this ratio and this advantage."""
    with torch.no_grad():
        now, _ = losses.token_logprobs(given.model, batch, given.config.temperature)
    arrays = batch.arrays | {"advantages": torch.full_like(now, advantage)}
    return given.loss(given.model, replace(batch, old=now - math.log(ratio), arrays=arrays, fresh=False))


def test_the_loss_clips_and_holds_back_as_the_block_says(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ratio of 2 is clipped to 1 + clip_high for a good answer, and 1/2 to 1 - clip_low for a bad one."""

    def look(given: Handed) -> Any:
        rollouts, batch = filled(given)
        up, down = (as_if(given, batch, ratio=r, advantage=a) for r, a in ((2.0, 1.0), (0.5, -1.0)))
        pulled = {term.name: term.coefficient for term in up.terms}.get("kl_loss", 0.0)
        answers = batch.counts["sequences"]
        return (
            -float(up.terms[0].sum.detach()) / answers,
            float(down.terms[0].sum.detach()) / answers,
            pulled,
            "reference" in rollouts[0].arrays,
        )

    for changes, expected in (
        ({}, (1.2, 0.8, 0.01, True)),
        ({"clip_low": 0.4}, (1.2, 0.6, 0.01, True)),
        ({"clip_high": 0.5}, (1.5, 0.8, 0.01, True)),
        ({"beta": 0.25}, (1.2, 0.8, 0.25, True)),
        ({"beta": 0.0}, (1.2, 0.8, 0.0, False)),
    ):
        found, _ = run(of_grpo(**changes), workspace, monkeypatch, look)
        assert found.seen == pytest.approx(expected, rel=1e-5), changes


def test_advantages_and_their_normalizer_are_those_of_the_method(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(given: Handed) -> Any:
        rollouts, batch = filled(given)
        term = as_if(given, batch, ratio=1.0, advantage=1.0).terms[0]
        return rollouts, term.per, term.coefficient

    for method, per, coefficient in (
        ("grpo", "sequences", 1.0),
        ("dr_grpo", "sequences", 1 / 24),
        ("dapo", "tokens", 1.0),
        ("rloo", "sequences", 1.0),
    ):
        rollouts, *found = run(of_grpo(method=method, dynamic=False), workspace, monkeypatch, look)[0].seen
        assert found == [per, coefficient], method
        group = torch.tensor([rollout.total for rollout in rollouts[:4]])
        assert group.std() > 0.01
        expected = group - group.mean()
        if method in ("grpo", "dapo"):
            expected /= group.std() + 1e-4
        if method == "rloo":
            expected = torch.stack([group[n] - (group.sum() - group[n]) / 3 for n in range(4)])
        first = torch.tensor([rollout.arrays["advantages"][0] for rollout in rollouts[:4]])
        torch.testing.assert_close(first.float(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "again"),
    [({}, False), ({"dynamic": True}, True), ({"method": "dapo"}, True), ({"method": "dapo", "dynamic": False}, False)],
)
def test_groups_without_a_difference_are_drawn_again_where_that_is_asked_for(
    changes: dict[str, Any], again: bool, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward of weight 0 gives all answers equal scores."""
    asked: list[int] = []
    original = Setting.sample

    def sample(self: Setting, given: Sequence[Any]) -> list[Answer]:
        asked.append(len(given))
        return original(self, given)

    monkeypatch.setattr(Setting, "sample", sample)
    run(of_grpo(rewards={"length": 0.0}, **changes), workspace, monkeypatch, lambda given: given.stream.fill(0))
    assert asked == ([12] * 4 if again else [12])


# what both stages share


@pytest.mark.parametrize("params", [of_grpo, of_rlhf])
def test_answers_are_sampled_and_weighed_at_the_temperature_and_within_their_length(
    params: Callable[..., Any], workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(given: Handed) -> Any:
        rollouts, batch = filled(given)
        policy = given.model if params is of_grpo else given.model.actor
        with torch.no_grad():
            told = [losses.token_logprobs(policy, batch, t)[0] for t in (0.5, 1.0)]
            agreement = given.loss(given.model, batch).extremes["sampling/sampling_logp_difference/max"]
        return batch.old, told, float(agreement), max(len(one.answer.ids) for one in rollouts)

    settings = rolling(temperature=0.5, max_new_tokens=16)
    old, told, agreement, longest = run(params(fit=settings), workspace, monkeypatch, look)[0].seen
    torch.testing.assert_close(old, told[0], rtol=0, atol=1e-4)
    assert (old - told[1]).abs().max() > 0.1
    assert agreement < 1e-4 and longest == 16


@pytest.mark.parametrize("params", [of_grpo, of_rlhf])
def test_training_is_paid_by_the_weights_of_the_rewards(
    params: Callable[..., Any], workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards = {"length": 2.0, "code_format": 0.5} | ({"learned": 0.25} if params is of_rlhf else {})
    rollouts, _ = run(params(rewards=rewards), workspace, monkeypatch, filled)[0].seen
    assert len({one.total for one in rollouts}) > 1
    for one in rollouts:
        assert one.score.parts.keys() == rewards.keys()
        assert one.total == pytest.approx(sum(weight * one.score.parts[name] for name, weight in rewards.items()))


@pytest.mark.parametrize("params", [of_grpo, of_rlhf])
def test_an_adapter_alone_trains_where_there_is_one(
    params: Callable[..., Any], workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(given: Handed) -> Any:
        return {module.config for module in given.model.modules() if isinstance(module, AdaptedLinear)}

    adapter = AdapterConfig(rank=2, alpha=4.0, targets=("v_proj",))
    assert run(params(adapter=adapter), workspace, monkeypatch, look)[0].seen == {adapter}
    assert run(params(adapter=None), workspace, monkeypatch, look)[0].seen == set()


@pytest.mark.parametrize("params", [of_grpo, of_rlhf])
def test_the_sandbox_is_that_of_its_block(
    params: Callable[..., Any], workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SandboxConfig(preload=("json",))
    assert run(params(sandbox=config), workspace, monkeypatch)[1] == [config]


# what is measured alongside training


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """For each call in order: distinct held-out prompts, answers in all, and whether the reference was asked."""
    found: list[tuple[int, int, bool]] = []
    original = Setting.held_out

    def held_out(self: Setting, given: Sequence[Any], *, of_reference: bool = False) -> list[Answer]:
        found.append((len({prompt.id for prompt, _ in given}), len(given), of_reference))
        return original(self, given, of_reference=of_reference)

    monkeypatch.setattr(Setting, "held_out", held_out)
    return found


def evaluated(given: Handed) -> dict[str, float]:
    return given.watchers.evaluate(0)


def test_an_evaluation_of_grpo_asks_so_many_problems_so_often(
    asked: list[tuple[int, int, bool]], workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = SolvingConfig(eval_problems=2, eval_samples=3)
    run(of_grpo(held_out=held_out), workspace, monkeypatch, evaluated)
    assert asked[0] == (2, 6, False)


def test_an_evaluation_of_rlhf_asks_so_many_prompts_and_best_of_n_so_many_of_the_reference(
    asked: list[tuple[int, int, bool]], workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start, at the end, and for the samples that are kept."""
    held_out = HeldOutConfig(eval_prompts=4, report_samples=2, best_of=3, best_of_prompts=2)
    run(of_rlhf(held_out=held_out), workspace, monkeypatch, evaluated)
    assert asked == [(4, 4, False), (4, 8, False), (4, 8, True), (2, 6, True), (4, 4, True), (4, 4, False)]


# rlhf alone


@pytest.mark.parametrize(("method", "adapter"), [("ppo", None), ("rloo", AdapterConfig(rank=2, alpha=4.0))])
def test_an_update_also_learns_from_rows_of_what_was_known_before(
    method: str,
    adapter: AdapterConfig | None,
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As many rows, and with the weight, as asked for: the policy's own mean loss on them."""

    def look(given: Handed) -> Any:
        _, batch = filled(given)
        policy = getattr(given.model, "actor", given.model)
        told = {term.name: term for term in given.loss(given.model, batch).terms}.get("rehearsal")
        if told is None or batch.rehearsed is None:
            return told, batch.rehearsed
        given_rows = batch.rehearsed
        logits = policy(given_rows.input_ids, positions=given_rows.positions, documents=given_rows.documents)
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), given_rows.targets.flatten())
        found = float(told.sum.detach()) / batch.counts[told.per]
        return len(given_rows.input_ids), told.coefficient, found, float(expected.detach())

    def of(rows: int) -> Any:
        params = of_rlhf(method=method, adapter=adapter, rehearsal_rows=rows, rehearsal_coef=0.4)
        return run(params, workspace, monkeypatch, look)[0].seen

    rows, coefficient, loss, expected = of(3)
    assert (rows, coefficient) == (3, 0.4) and loss == pytest.approx(expected, rel=1e-4)
    assert of(0) == (None, None)
    assert "rehearsal disabled" not in capsys.readouterr().err
    assert of(10_000) == (None, None)  # too few user dialogues do not end the run
    assert "rehearsal disabled: data/dialogues: too few tokens" in capsys.readouterr().err
    with pytest.raises(ValueError, match="expected rehearsal_rows >= 0, rehearsal_coef >= 0"):
        of(-1)


@pytest.mark.parametrize("kinds", [("story",), ("tools",), ()])
def test_prompts_of_the_kinds_alone_are_trained_and_measured_on(
    kinds: tuple[str, ...], workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split, count in (("train", 8), ("test", 8)):
        made = [builder.pair(n, **({"kind": "tools", "truth": None} if n % 2 else {})) for n in range(count)]
        records.write(workspace.folder / f"data/preferences/{split}.jsonl", made)
    held_out = HeldOutConfig(eval_prompts=8, best_of_prompts=0)
    found, _ = run(of_rlhf(kinds=kinds, held_out=held_out), workspace, monkeypatch)
    wanted = {*kinds} or {"story", "tools"}
    assert {prompt.kind for prompt in found.stream.prompts} == wanted
    assert {prompt.kind for prompt in found.watchers.evaluate.__self__.prompts} == wanted


@pytest.mark.parametrize("rewards", [{"learned": 1.0}, {"length": 1.0}])
def test_the_critic_begins_as_the_reward_model_only_where_that_is_what_pays(
    rewards: dict[str, float], workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    critic = run(of_rlhf(rewards=rewards), workspace, monkeypatch)[0].model.critic
    learned = "learned" in rewards
    assert bool(critic.score.weight.any()) == learned
    assert (critic.reward_mean, critic.reward_std) == ((0.1, 0.5) if learned else (0.0, 1.0))


def test_advantages_returns_and_the_next_beta_have_the_constants_of_the_block(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 answers, each 0.77 nats from the reference, which is a tenth too far."""
    original = CausalSetting.reference

    def reference(self: CausalSetting, given: Sequence[Answer]) -> list[np.ndarray]:
        found = original(self, given)
        for logprobs in found:
            logprobs[0] -= 0.77
        return found

    def look(given: Handed) -> Any:
        before = dict(given.stream.carried)
        given.stream.fill(0)
        return before, dict(given.stream.carried), given.stream.rollouts

    monkeypatch.setattr(CausalSetting, "reference", reference)
    before, after, rollouts = run(of_rlhf(rewards={"length": 1.0}), workspace, monkeypatch, look)[0].seen
    assert before == {"beta": 0.3}
    assert after == {"beta": pytest.approx(0.3 * (1 + 0.1 * 12 / 11), rel=1e-3)}
    returns = [one.arrays["returns"].tolist() for one in rollouts]
    for changes, same in (({}, True), ({"gamma": 0.5}, False), ({"lam": 0.3}, False)):
        again = copy.deepcopy(rollouts)
        estimate_ppo(again, replace(PPO, **changes), dict(before))
        assert ([one.arrays["returns"].tolist() for one in again] == returns) is same, changes


def test_the_loss_of_ppo_has_the_constants_of_the_block(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ratio of 2 is clipped to 1 + clip, and a value that moved from 0 to 1 to value_clip; the return is 2."""

    def look(given: Handed) -> Any:
        _, batch = filled(given)
        with torch.no_grad():
            now, _, values = losses.actor_critic(given.model, batch, given.config.temperature)
        arrays = {"advantages": torch.ones_like(now), "old_values": values - 1, "returns": values + 1}
        loss = given.loss(given.model, replace(batch, old=now - math.log(2), arrays=arrays, fresh=False))
        return [(float(term.sum.detach()) / len(now), term.coefficient) for term in loss.terms]

    policy, value = run(of_rlhf(), workspace, monkeypatch, look)[0].seen
    assert policy == (pytest.approx(-1.15, rel=1e-4), 1.0)
    assert value == (pytest.approx(0.5 * (2 - 0.25) ** 2, rel=1e-4), 0.35)


def test_alarms_ring_at_four_times_the_divergence_that_is_wanted(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def look(given: Handed) -> None:
        for step, nats in ((1, 2.7), (2, 2.9)):
            given.job.tracker.log(step, {"objective/kl": nats})
            given.watchers.logged(given.job.tracker.rows)

    found, _ = run(of_rlhf(), workspace, monkeypatch, look)
    what = "objective/kl is above 2.8"
    assert found.job.tracker.final["alarms"] == {what: 2}
    assert f"step 2: {what}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["policy/clipfrac_avg", "clip_ratio/region_mean"])
def test_an_alarm_rings_where_three_tenths_of_the_tokens_are_clipped(name: str) -> None:
    """Under the name that PPO logs, and the one that the group methods log."""
    assert alarms_of([{"step": 1, name: 0.29}, {"step": 2, name: 0.31}]) == {f"{name} is above 0.3": 2}
