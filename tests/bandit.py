"""A task that reinforcement must solve: say one token four times, then end. Loop, sampler, stream and losses are the
real ones.

The reward is the fraction of the four that were said; a fresh model over 16 tokens gets about 0.12 by chance.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.generation.sampling import Sampling, generate
from pipeline.learning.fit import Watchers, fit
from pipeline.learning.losses import Loss
from pipeline.learning.policy_losses import GroupMethod
from pipeline.learning.processes import Ranks
from pipeline.model.config import ModelConfig
from pipeline.model.heads import ActorCritic
from pipeline.model.transformer import Transformer
from pipeline.rl import answers
from pipeline.rl.advantages import PPOConfig, annotate_group, annotate_ppo, estimate_group, estimate_ppo
from pipeline.rl.answers import Answer
from pipeline.rl.rewards import Score
from pipeline.rl.rollout import Method, Rollout, RolloutConfig, RolloutStream, group_loss, rehearsed_too
from stages import rlhf
from tests import rollouts
from tests.loop import job

PAD, END, WANTED, MOST, LONGEST = 0, 1, 5, 4, 12


class Letters:
    """The part of a tokenizer that sampling uses, over 16 ids."""

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
    method: Method, settings: RolloutConfig, state: dict[str, Any] | None = None, seed: int = 1, rehearsal: Any = None
) -> RolloutStream:
    prompts = [rollouts.prompt(number % 14 + 2, length=1) for number in range(8)]
    ranks = Ranks("fp32", "")
    return RolloutStream(prompts, settings, method, pad=PAD, seed=seed, ranks=ranks, state=state, rehearsal=rehearsal)


def group_run(
    model: Transformer,
    method: GroupMethod,
    settings: RolloutConfig,
    folder: Path,
    rehearsal: Any = None,
    **runtime: Any,
) -> Any:
    """Train the model by a group method as the stages do; returns the job, which keeps the curve."""
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
    loss: Callable[..., Loss] = partial(group_loss, method=method, config=settings)
    if rehearsal:
        loss = rehearsed_too(loss, model, 0.5)
    fit(model, filling(how, settings, rehearsal=rehearsal), loss, settings, one, watchers=Watchers(gradients_at=None))
    return one


def ppo_run(
    model: ActorCritic,
    constants: PPOConfig,
    settings: RolloutConfig,
    folder: Path,
    watchers: Watchers | None = None,
    **runtime: Any,
) -> Any:
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
    fit(model, filling(how, settings, carried), loss, settings, one, watchers=watchers)
    return one
