"""From scored answers to per-token values: PPO advantages and returns, and the advantages of the group methods.

Both families define a `rollout.Method`: `annotate` runs forward passes (reference, critic) over this process's answers;
`estimate` processes all answers with the pure functions of `learning/policy_losses.py`. The reference is any function
from answers to log-probabilities: a frozen copy, or the policy with its adapter disabled.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.learning import policy_losses
from pipeline.learning.policy_losses import GroupMethod
from pipeline.rl.answers import Answer
from pipeline.rl.rollout import Rollout, grouped
from pipeline.run.types import JsonObject

PerToken = Callable[[Sequence[Answer]], list[np.ndarray]]  # answers -> one value per token
UNFINISHED = -1.0  # maximum score of an unfinished answer if the reward does not depend on whether it ends


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """PPO hyperparameters."""

    beta: float
    """Initial weight of the KL penalty (divergence from the reference) in the reward."""
    target_kl: float
    """Target KL in nats per answer; beta adapts towards it."""
    horizon: int
    """Number of answers over which beta adapts."""
    gamma: float = 1.0
    """Discount factor per token."""
    lam: float = 0.95
    """GAE lambda: 1 relies on observed rewards, 0 on the critic."""
    clip: float = 0.2
    """Clip range of the policy ratio."""
    value_clip: float = 0.2
    """Clip range of a value around its value at sampling time."""
    value_weight: float = 0.1
    """Weight of the critic loss relative to the policy loss."""
    critic_rate: float | None = None
    """The critic's learning rate; if none, the policy's."""

    def __post_init__(self) -> None:
        if self.beta < 0 or self.target_kl <= 0 or self.horizon < 1:
            raise ValueError("expected beta >= 0, target_kl > 0, horizon >= 1")
        if self.value_weight < 0 or (self.critic_rate is not None and self.critic_rate <= 0):
            raise ValueError(
                f"expected value_weight >= 0, critic_rate > 0, got {self.value_weight}, {self.critic_rate}"
            )
        if not (0 < self.gamma <= 1 and 0 <= self.lam <= 1 and self.clip > 0 and self.value_clip > 0):
            raise ValueError("expected gamma in (0, 1], lam in [0, 1], clip > 0, value_clip > 0")


def annotate_ppo(rollouts: list[Rollout], *, reference: PerToken, values: PerToken) -> None:
    """Store reference log-probabilities and values for each token."""
    answers = [rollout.answer for rollout in rollouts]
    for rollout, f, v in zip(rollouts, reference(answers), values(answers), strict=True):
        rollout.arrays |= {"reference": f, "values": v}


def estimate_ppo(rollouts: list[Rollout], config: PPOConfig, carried: JsonObject) -> dict[str, float]:
    """Fill `advantages` and `returns`, and adapt `carried["beta"]` for the next iteration.

    Returns metrics to log, named like TRL's objective/*.
    """
    beta = float(carried["beta"])
    mask = _mask(rollouts)
    old, reference, values = (_padded(rollouts, name, mask) for name in ("old", "reference", "values"))
    scores = scores_with_ends(rollouts)
    usable = ~scores.isnan()
    rewards = policy_losses.ppo_rewards(old, reference, mask, scores.nan_to_num(0.0), beta)
    advantages, returns = policy_losses.gae(rewards, values, mask, gamma=config.gamma, lam=config.lam)
    trained = mask & usable[:, None]  # an answer without a score does not train the policy
    advantages = policy_losses.whiten(advantages, trained)
    returns = torch.where(usable[:, None], returns, values)
    _store(rollouts, mask, advantages=advantages, returns=returns, old_values=values)
    divergence = policy_losses.kl_k1(old, reference) * mask
    kl = float(divergence.sum(1).mean())
    carried["beta"] = policy_losses.adapted_beta(
        beta, kl, target=config.target_kl, num=len(rollouts), horizon=config.horizon
    )
    penalty = float((-beta * (old - reference) * mask).sum(1).mean())
    mean_score = float(scores[usable].mean()) if bool(usable.any()) else math.nan
    return {
        "objective/kl": kl,
        "objective/kl_max": float(divergence.sum(1).max()),
        "objective/entropy": float((-old * mask).sum(1).mean()),
        "objective/non_score_reward": penalty,
        "objective/scores": mean_score,
        "objective/rlhf_reward": mean_score + penalty,
        "objective/kl_coef": beta,
        "val/num_eos_tokens": float(sum(rollout.answer.finished for rollout in rollouts)),
        "val/var_explained": policy_losses.explained_variance(values[mask], returns[mask]),
    }


def annotate_group(rollouts: list[Rollout], *, reference: PerToken | None) -> None:
    """Store reference log-probabilities for each token, if the method uses a reference."""
    if reference is None:
        return
    for rollout, f in zip(rollouts, reference([rollout.answer for rollout in rollouts]), strict=True):
        rollout.arrays["reference"] = f


def scores_with_ends(rollouts: list[Rollout]) -> Tensor:
    """The scores (B,), NaN if unknown, with those of unfinished answers capped.

    The cap is UNFINISHED or the lowest score of a finished answer, whichever is lower, so leaving an answer unfinished
    never pays, whatever the scale of the rewards.
    """
    scores = torch.tensor([rollout.total for rollout in rollouts], dtype=torch.float64)
    ended = torch.tensor([rollout.answer.finished for rollout in rollouts])
    known = scores[ended & ~scores.isnan()]
    lowest = min(UNFINISHED, float(known.min()) if len(known) else UNFINISHED)
    return torch.where(ended, scores, scores.clamp(max=lowest))


def estimate_group(
    rollouts: list[Rollout], method: GroupMethod, samples: int, *, must_end: bool = False
) -> dict[str, float]:
    """Fill `advantages` for groups of `samples` consecutive answers. Returns metrics to log.

    With `must_end`, uses `scores_with_ends`, for rewards that ignore whether an answer ended.
    """
    mask = _mask(rollouts)
    totals = torch.tensor([rollout.total for rollout in rollouts], dtype=torch.float64)
    rewards = scores_with_ends(rollouts) if must_end else totals
    valid = ~rewards.isnan()
    known = rewards.nan_to_num(0.0)
    numbers: dict[str, float] = {}
    divergence = torch.zeros_like(mask, dtype=torch.float64)
    if "reference" in rollouts[0].arrays:
        divergence = _padded(rollouts, "old", mask) - _padded(rollouts, "reference", mask)
        numbers["kl/rollout"] = float((divergence * mask).sum(1).mean())
    else:
        assert method.kl_in == "loss" or not method.beta, "the reward includes a divergence: annotate with a reference"
    if method.advantage == "to_go":
        per_token = policy_losses.ppo_rewards(divergence, torch.zeros_like(divergence), mask, known, method.beta)
        trained = mask & valid[:, None]
        advantages = policy_losses.whiten(policy_losses.rewards_to_go(per_token, mask), trained)
    else:
        if method.kl_in == "reward":
            known = known - method.beta * (divergence * mask).sum(1)
        table, valid_table = known.view(-1, samples), valid.view(-1, samples)  # (P, G)
        per_answer = (
            policy_losses.leave_one_out(table, valid_table)
            if method.advantage == "others"
            else policy_losses.group_advantages(table, valid_table, scaled=method.advantage == "scaled")
        )
        advantages = per_answer.reshape(-1, 1) * mask
    _store(rollouts, mask, advantages=advantages)
    numbers["groups"] = float(len(grouped(rollouts, samples)))
    return numbers | correct_for_engine(rollouts, whole=method.normalizer in ("ratio", "mean_ratio"))


def correct_for_engine(rollouts: list[Rollout], *, whole: bool) -> dict[str, float]:
    """Weight the advantages of answers sampled by an engine (`policy_losses.importance`). Returns metrics to log."""
    differences, weights = [], []
    for rollout in rollouts:
        if rollout.answer.sampled is not None:
            own, sampled = torch.tensor([rollout.answer.logprobs, rollout.answer.sampled], dtype=torch.float64)
            weights.append(policy_losses.importance(own, sampled, whole=whole))
            differences.append((own - sampled).abs())
            rollout.arrays["advantages"] = rollout.arrays["advantages"] * weights[-1].numpy()
    if not weights:
        return {}
    difference, weight = torch.cat(differences), torch.cat(weights)
    return {
        "sampler/logp_difference/mean": float(difference.mean()),
        "sampler/logp_difference/max": float(difference.max()),
        "sampler/importance/mean": float(weight.mean()),
        "sampler/importance/min": float(weight.min()),
        "sampler/importance/max": float(weight.max()),
        "sampler/capped": float((weight == policy_losses.MOST_IMPORTANCE).double().mean()),
        "sampler/masked": sum(not own.any() for own in weights) / len(weights),
    }


def _mask(rollouts: list[Rollout]) -> Tensor:
    """True at the policy's tokens of each answer, (B, T)."""
    lengths = torch.tensor([len(rollout.answer.logprobs) for rollout in rollouts])
    return torch.arange(int(lengths.max())) < lengths[:, None]


def _padded(rollouts: list[Rollout], name: str, mask: Tensor) -> Tensor:
    """An array of all answers as (B, T) float64, padded with 0. "old" names the log-probabilities before the update."""
    flat = np.concatenate([r.answer.logprobs if name == "old" else r.arrays[name] for r in rollouts])
    return torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask, torch.from_numpy(flat.astype(np.float64)))


def _store(rollouts: list[Rollout], mask: Tensor, **padded: Tensor) -> None:
    """Store each row of (B, T) values, without padding, in the arrays of its rollout."""
    for name, values in padded.items():
        for rollout, row, inside in zip(rollouts, values, mask, strict=True):
            rollout.arrays[name] = row[inside].numpy()
