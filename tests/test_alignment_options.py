"""What the stages of alignment do with their keys before and after the loop: what they ask for, and with what they train."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.learning.objectives_policy import METHODS, Clip
from pipeline.learning.settings import PairConfig
from pipeline.model.guesses import GuessingModel
from pipeline.model.heads import RewardModel
from pipeline.reinforcement.estimators import PPOConfig
from pipeline.reinforcement.rollout import RolloutConfig
from pipeline.sandbox.judge import SandboxConfig
from pipeline.streams.preferences import PairStream
from stages import dpo, grpo, reward, rlhf
from tests.test_fit import job
from tests.workspace import Workspace

REWARD: dict[str, Any] = {
    "centring": 0.0,
    "label_flip": 0.0,
    "own_prompts": 0,
    "calibration_answers": 4,
    "answer_tokens": 24,
}


@dataclass
class Seen:
    """What stage reward trained, on what, and what it asked of the base model."""

    learner: Any = None
    stream: PairStream | None = None
    weights: dict[str, float] = field(default_factory=dict)
    own_prompts: list[int] = field(default_factory=list)
    calibrated_on: int = 0
    answer_tokens: int = 0

    @property
    def layers(self) -> int:
        """Of the model that is trained."""
        return self.learner.config.layers

    @property
    def chosen(self) -> list[list[int]]:
        """The better answers."""
        assert self.stream is not None
        return [encoded.chosen.ids.tolist() for encoded in self.stream.train.pairs]


def seen(workspace: Workspace, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Seen:
    """Stage reward without its training."""
    found, sampler = Seen(), reward.sampler

    def fit(learner: Any, stream: PairStream, loss: Any, *_: object, **__: object) -> None:
        found.learner, found.stream = learner, stream
        found.weights = {name: loss.keywords[name] for name in ("centring", "likelihood_weight")}

    def pairs(generate: Any, prompts: list[Any], *_: object) -> list[Any]:
        found.own_prompts.append(len(prompts))
        return []

    def generating(model: Any, sampling: Any, stop: Any) -> Any:
        found.answer_tokens = sampling.max_new_tokens
        return sampler(model, sampling, stop)

    def calibrate(self: RewardModel, rewards: Any) -> None:
        found.calibrated_on = len(rewards)

    monkeypatch.setattr(reward, "fit", fit)
    monkeypatch.setattr(reward, "sampler", generating)
    monkeypatch.setattr(reward, "judge_or_none", lambda *_: nullcontext(None))
    monkeypatch.setattr(reward.own_answers, "pairs", pairs)
    monkeypatch.setattr(reward.own_answers.gold, "known", lambda record: True)
    monkeypatch.setattr(RewardModel, "calibrate", calibrate)
    config = PairConfig(steps=1, learning_rate=1e-3, pairs=4, max_prompt=60, max_length=120)
    reward.run(
        reward.Params(sandbox=SandboxConfig(), fit=config, **(REWARD | changes)),
        job(workspace.folder / "work"), base=Path("models/tools"), pairs=Path("data/preferences"), out=Path("models/new"),
    )  # fmt: skip
    return found


def test_the_reward_stage_hands_its_keys_on(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = seen(workspace, monkeypatch)
    assert isinstance(usual.learner, RewardModel) and usual.layers == 2
    assert (usual.own_prompts, usual.calibrated_on, usual.answer_tokens) == ([0, 0], 4, 24)
    other = seen(
        workspace, monkeypatch, centring=0.5, label_flip=0.4, extra_layers=1, likelihood_weight=0.25, own_prompts=3,
        calibration_answers=7, answer_tokens=30,
    )  # fmt: skip
    assert isinstance(other.learner, GuessingModel) and other.layers == 3
    assert other.weights == {"centring": 0.5, "likelihood_weight": 0.25}
    assert (other.own_prompts, other.calibrated_on, other.answer_tokens) == ([3, 0], 7, 30)
    flipped = sum(a != b for a, b in zip(usual.chosen, other.chosen, strict=True))
    assert 0 < flipped < len(usual.chosen) == 20


class StreamAskedError(Exception):
    """Ends a stage where it has asked for its stream."""


@pytest.mark.parametrize("stage", [dpo, reward])
def test_pairs_are_read_as_the_keys_of_their_stage_say(
    stage: Any, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def stream(*_: object, **given: Any) -> None:
        asked.update(given)
        raise StreamAskedError

    monkeypatch.setattr(stage, "PairStream", stream)
    monkeypatch.setattr(reward, "judge_or_none", lambda *_: nullcontext(None))
    config = PairConfig(steps=1, learning_rate=1e-3, pairs=3, max_prompt=50, max_length=110)
    values: dict[str, Any] = {"precompute_reference": False} if stage is dpo else {"sandbox": SandboxConfig()} | REWARD
    outs = {"base": Path("models/tools"), "pairs": Path("data/preferences"), "out": Path("models/new")}
    with pytest.raises(StreamAskedError):
        stage.run(stage.Params(fit=config, **values), job(workspace.folder / "work"), **outs)
    assert (asked["pairs"], asked["max_prompt"], asked["max_length"], asked["seed"]) == (3, 50, 110, 1)


@pytest.mark.parametrize(
    ("changes", "clip", "beta", "dynamic"),
    [
        ({}, Clip(0.2, 0.2), 0.01, False),
        ({"clip_low": 0.0}, Clip(0.0, 0.2), 0.01, False),
        ({"clip_high": 0.3}, Clip(0.2, 0.3), 0.01, False),
        ({"beta": 0.0}, Clip(0.2, 0.2), 0.0, False),
        ({"dynamic": True}, Clip(0.2, 0.2), 0.01, True),
        ({"method": "dapo"}, Clip(0.2, 0.28), 0.0, True),
        ({"method": "dapo", "dynamic": False, "beta": 0.1}, Clip(0.2, 0.28), 0.1, False),
    ],
)
def test_a_key_of_grpo_goes_before_the_value_of_its_method(
    changes: dict[str, Any], clip: Clip, beta: float, dynamic: bool
) -> None:
    config = RolloutConfig(learning_rate=1e-3, prompts=2, samples=2, iterations=1, max_prompt=4, max_new_tokens=4)
    values: dict[str, Any] = {"method": "grpo", "rewards": {"code": 1.0}, "sandbox": SandboxConfig(), "fit": config}
    found = grpo.Params(**(values | changes)).resolved
    assert (found.clip, found.beta, found.dynamic) == (clip, beta, dynamic)
    assert found.advantage == METHODS[changes.get("method", "grpo")].advantage


def test_the_loss_of_rlhf_is_clipped_and_weighed_as_its_keys_say(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def actor_critic(model: Any, batch: Any, temperature: float) -> tuple[None, None, None]:
        asked["temperature"] = temperature
        return None, None, None

    monkeypatch.setattr(rlhf.scoring, "actor_critic", actor_critic)
    monkeypatch.setattr(rlhf.objectives_policy, "ppo", lambda *_, **given: asked.update(given))
    batch: Any = SimpleNamespace(old=None, arrays=dict.fromkeys(("advantages", "old_values", "returns")), fresh=False)
    model: Any = None
    ppo = PPOConfig(beta=0.1, target_kl=6.0, horizon=100, clip=0.3, value_clip=0.4, value_weight=0.5)
    rlhf.loss(model, batch, temperature=0.7, ppo=ppo)
    assert (asked["clip"], asked["value_clip"], asked["value_weight"]) == (Clip(0.3, 0.3), 0.4, 0.5)
    assert asked["temperature"] == 0.7
