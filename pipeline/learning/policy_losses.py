"""Policy gradients: PPO with a critic, and the group methods GRPO, Dr. GRPO, DAPO, GSPO, RLOO, REINFORCE++.

Notation: l, o, f are a token's log-probabilities under the policy, under the policy at rollout time, and under the
reference (nats, float32, all at the sampling temperature); m is 1 where the policy chose the token; A is the token's
advantage; rho = exp(l - o). Tensors are (B, T) with a mask where order matters (GAE), else (N,): the policy's tokens,
row by row.

See `generation/` for sampling and `rl/rewards.py` for scores. Not supported: off-policy data more than one rollout old.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.learning.losses import Loss, Term

MOST_LOG_RATIO = 20.0  # log-ratios are clamped to this before exp, in nats
MAX_RATIO = 10.0  # a step with a higher mean ratio is not applied
MOST_IMPORTANCE = 2.0  # cap on importance weights
MASKED_IMPORTANCE = 3.0  # an answer with a higher overall ratio does not train the policy


# -- Kullback-Leibler divergence ---------------------------------------------------------------------------------------


def kl_k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """l - f, clamped: unbiased for KL(policy || reference) on the policy's own tokens (Schulman 2020, k1)."""
    return -(reference - logprobs).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)


def kl_k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(q) - 1 - q with q = f - l: unbiased, nonnegative, low variance (Schulman 2020, k3).

    Its value estimates KL(policy || reference). As a loss, its expected gradient is that of KL(reference || policy).
    """
    q = (reference - logprobs).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    return torch.expm1(q) - q


def adapted_beta(beta: float, kl: float, *, target: float, num: int, horizon: int) -> float:
    """The next KL coefficient after `num` episodes with mean KL `kl` (Ziegler et al. 2019, arXiv:1909.08593, 2.2)."""
    return beta * (1 + min(max(kl / target - 1, -0.2), 0.2) * num / horizon)


# -- advantages --------------------------------------------------------------------------------------------------------


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the masked positions, unbiased; 0 elsewhere. A single value is unchanged."""
    chosen = values[mask]
    if len(chosen) < 2:
        return values * mask
    centered = (values - chosen.mean()) * mask
    variance = chosen.var()
    return centered if variance < 1e-8 else centered * (variance + 1e-8).rsqrt()


def ppo_rewards(old: Tensor, reference: Tensor, mask: Tensor, scores: Tensor, beta: float) -> Tensor:
    """-beta * (o - f) at each policy token, plus the score at the last one: (B, T), from scores (B,)."""
    rewards = -beta * (old - reference) * mask
    column = torch.arange(mask.shape[1], device=mask.device)
    last = (column * mask).amax(1)  # (B,)
    nonempty = mask.any(1)
    return rewards + (column == last[:, None]) * (scores * nonempty)[:, None]


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns (B, T), 0 where the mask is 0. Tokens outside the mask are skipped, as if absent.

    Schulman et al. 2015 (arXiv:1506.02438), eq. 16: delta = r + gamma V+ - V; A = delta + gamma lam A+.
    """
    advantages = torch.zeros_like(rewards)
    next_value = rewards.new_zeros(len(rewards))
    next_advantage = rewards.new_zeros(len(rewards))
    for t in range(rewards.shape[1] - 1, -1, -1):
        m = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = advantage * m
        next_advantage = torch.where(m, advantage, next_advantage)
        next_value = torch.where(m, values[:, t], next_value)
    return advantages, (advantages + values) * mask


def group_advantages(rewards: Tensor, valid: Tensor, *, scaled: bool) -> Tensor:
    """R - group mean, divided by the group's standard deviation (unbiased) + 1e-4 if `scaled`. (P, G) -> (P, G).

    Shao et al. 2024 (GRPO, arXiv:2402.03300), eq. 3; unscaled: Liu et al. 2025 (Dr. GRPO, arXiv:2503.20783). Answers
    that are not `valid` (P, G) get 0 and are excluded from the mean and deviation.
    """
    num = valid.sum(1, keepdim=True)
    known = rewards.where(valid, 0.0)
    mean = known.sum(1, keepdim=True) / num.clamp(min=1)
    centered = (known - mean).where(valid, 0.0)
    if not scaled:
        return centered
    deviation = (centered.square().sum(1, keepdim=True) / (num - 1).clamp(min=1)).sqrt()
    return centered / (deviation + 1e-4)


def leave_one_out(rewards: Tensor, valid: Tensor) -> Tensor:
    """R - mean of the others in the group (Ahmadian et al. 2024, RLOO, arXiv:2402.14740, eq. 10). (P, G) -> (P, G).

    Answers that are not `valid` get 0 and are excluded from the means. The only valid answer in a group also gets 0.
    """
    num = valid.sum(1, keepdim=True)
    known = rewards.where(valid, 0.0)
    others = (known.sum(1, keepdim=True) - known) / (num - 1).clamp(min=1)
    return (known - others).where(valid & (num > 1), 0.0)


def rewards_to_go(rewards: Tensor, mask: Tensor) -> Tensor:
    """Sum of rewards from each policy token to the end, 0 outside the mask (Hu 2025, REINFORCE++, arXiv:2501.03262)."""
    return (rewards * mask).flip(1).cumsum(1).flip(1) * mask


def importance(logprobs: Tensor, sampled: Tensor, *, whole: bool) -> Tensor:
    """Importance weights of an answer's tokens (L,), correcting for an inference engine whose log-probabilities differ
    slightly from the policy's: exp(l - s), at most MOST_IMPORTANCE (Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training": truncated importance sampling). `whole`: one ratio for the entire
    answer, for sequence-level methods. All weights are 0 if the answer's ratio exceeds MASKED_IMPORTANCE (Liu et al.
    2025, "When speed kills stability").
    """
    difference = logprobs - sampled
    ratio = difference.sum().exp()
    if ratio > MASKED_IMPORTANCE:
        return torch.zeros_like(logprobs)
    weights = ratio.expand_as(logprobs) if whole else difference.clamp(max=MOST_LOG_RATIO).exp()
    return weights.clamp(max=MOST_IMPORTANCE)


# -- losses ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clip:
    """The clipping range of the ratio: 1 - low to 1 + high."""

    low: float
    high: float


def surrogate(logprobs: Tensor, old: Tensor, advantages: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """-min(rho A, clip(rho) A) and rho, elementwise (Schulman et al. 2017, PPO, arXiv:1707.06347, eq. 7)."""
    ratio = (logprobs - old).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()
    clipped = ratio.clamp(1 - clip.low, 1 + clip.high)
    return torch.maximum(-advantages * ratio, -advantages * clipped), ratio


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Elementwise: 0.5 * max((V - R)^2, (V clipped around its old value - R)^2), and whether the second is larger."""
    near = values.clamp(old - clip, old + clip)  # bit-equal inside the range, so rounding is never taken for clipping
    free, bound = (values - returns).square(), (near - returns).square()
    return 0.5 * torch.maximum(free, bound), bound > free


def ppo(
    logprobs: Tensor,
    entropy: Tensor,
    values: Tensor,
    *,
    old: Tensor,
    advantages: Tensor,
    old_values: Tensor,
    returns: Tensor,
    clip: Clip,
    value_clip: float,
    value_weight: float,
) -> Loss:
    """PPO's loss over the policy's tokens, all (N,): clipped policy term + `value_weight` * clipped value term."""
    policy, ratio = surrogate(logprobs, old, advantages, clip)
    value, value_clipped = value_loss(values, old_values, returns, value_clip)
    num, detached = len(ratio), ratio.detach()
    metrics = {
        "policy/approxkl_avg": (0.5 * (logprobs.detach() - old).square().sum(), num),
        "policy/clipfrac_avg": ((policy.detach() > -advantages * detached).sum(), num),
        "policy/entropy_avg": (entropy.sum(), num),
        "val/clipfrac_avg": (value_clipped.sum(), num),
        "val/ratio": (detached.sum(), num),
        "val/ratio_var": ((detached - 1).square().sum(), num),
    }
    terms = [Term("loss/policy_avg", policy.sum()), Term("loss/value_avg", value.sum(), "tokens", value_weight)]
    return Loss(terms, metrics, limits={"val/ratio": MAX_RATIO})


@dataclass(frozen=True, kw_only=True)
class GroupMethod:
    """The differences between the group methods."""

    advantage: str  # scaled, centered, others, to_go
    # what divides the loss: `sequences`: a sequence's length, then the number of sequences; `max_tokens`; `tokens`;
    # `ratio`, `mean_ratio`: one ratio per sequence, that of the entire answer or its geometric mean per token
    normalizer: str
    clip: Clip
    beta: float  # weight of the KL divergence from the reference
    kl_in: str  # loss (k3), or reward (k1)
    dynamic: bool = False  # groups with all-equal scores are resampled

    def __post_init__(self) -> None:
        assert self.advantage in ("scaled", "centered", "others", "to_go"), self.advantage
        assert self.normalizer in ("sequences", "max_tokens", "tokens", "ratio", "mean_ratio"), self.normalizer
        assert self.kl_in in ("loss", "reward"), self.kl_in


METHODS = {
    # Shao et al. 2024, arXiv:2402.03300
    "grpo": GroupMethod(advantage="scaled", normalizer="sequences", clip=Clip(0.2, 0.2), beta=0.01, kl_in="loss"),
    # Liu et al. 2025, arXiv:2503.20783
    "dr_grpo": GroupMethod(advantage="centered", normalizer="max_tokens", clip=Clip(0.2, 0.2), beta=0.0, kl_in="loss"),
    # Yu et al. 2025, arXiv:2503.14476
    "dapo": GroupMethod(
        advantage="scaled", normalizer="tokens", clip=Clip(0.2, 0.28), beta=0.0, kl_in="loss", dynamic=True
    ),
    # Zheng et al. 2025, arXiv:2507.18071
    "gspo": GroupMethod(advantage="scaled", normalizer="mean_ratio", clip=Clip(3e-4, 4e-4), beta=0.0, kl_in="loss"),
    # Ahmadian et al. 2024, arXiv:2402.14740
    "rloo": GroupMethod(advantage="others", normalizer="ratio", clip=Clip(0.2, 0.2), beta=0.05, kl_in="reward"),
    # Hu 2025, arXiv:2501.03262
    "reinforce_pp": GroupMethod(advantage="to_go", normalizer="tokens", clip=Clip(0.2, 0.2), beta=0.01, kl_in="reward"),
}


def group_policy(
    logprobs: Tensor,
    entropy: Tensor,
    *,
    old: Tensor,
    advantages: Tensor,
    reference: Tensor | None,
    row_of: Tensor,
    num_rows: int,
    method: GroupMethod,
    max_tokens: int,
) -> Loss:
    """The loss of a group method over the policy's tokens (N,); `row_of` (N,) maps tokens to the `num_rows` answers.

    `reference` is f if the method's KL is in the loss, else None. Each sum has its own count, so a batch can be split
    anywhere between answers.
    """
    num = len(logprobs)
    lengths = torch.bincount(row_of, minlength=num_rows)
    if method.normalizer in ("ratio", "mean_ratio"):  # one ratio and one advantage per sequence
        zero, nonempty = old.new_zeros(num_rows), lengths > 0  # a padding row is not a sequence
        new_sums, old_sums, advantage = (zero.index_add(0, row_of, x)[nonempty] for x in (logprobs, old, advantages))
        advantage = advantage / lengths[nonempty]
        if method.normalizer == "mean_ratio":
            new_sums, old_sums = new_sums / lengths[nonempty], old_sums / lengths[nonempty]
        loss, ratio = surrogate(new_sums, old_sums, advantage, method.clip)
        weight, signs = torch.ones_like(loss), advantage
    else:
        loss, ratio = surrogate(logprobs, old, advantages, method.clip)
        weight, signs = torch.ones_like(loss), advantages
        if method.normalizer == "sequences":
            weight = 1 / lengths[row_of]
    per, coefficient = "sequences", 1.0
    if method.normalizer == "tokens":
        per = "tokens"
    if method.normalizer == "max_tokens":
        coefficient = 1 / max_tokens
    terms = [Term("policy", (loss * weight).sum(), per, coefficient)]
    metrics = _clip_metrics(ratio.detach(), signs, method.clip) | {"entropy": (entropy.sum(), num)}
    if reference is not None:
        divergence = kl_k3(logprobs, reference)
        token_weight = weight if len(weight) == num else 1 / lengths[row_of]
        terms.append(Term("kl_loss", (divergence * token_weight).sum(), per, coefficient * method.beta))
        metrics["kl"] = (divergence.detach().sum(), num)
    return Loss(terms, metrics, limits={"ratio": MAX_RATIO})


def _clip_metrics(ratio: Tensor, signs: Tensor, clip: Clip) -> dict[str, tuple[Tensor, int]]:
    """Fractions of elements with clipped updates, and the mean ratio."""
    low = (ratio < 1 - clip.low) & (signs < 0)
    high = (ratio > 1 + clip.high) & (signs > 0)
    num = len(ratio)
    return {
        "clip_ratio/low_mean": (low.sum(), num),
        "clip_ratio/high_mean": (high.sum(), num),
        "clip_ratio/region_mean": ((low | high).sum(), num),
        "ratio": (ratio.sum(), num),
        "approxkl": (0.5 * ratio.log().square().sum(), num),
    }


def with_agreement(loss: Loss, logprobs: Tensor, old: Tensor) -> Loss:
    """Add metrics comparing teacher forcing with sampling, for a policy unchanged since sampling."""
    difference = (logprobs.detach() - old).abs()
    name = "sampling/sampling_logp_difference"
    metrics = loss.metrics | {f"{name}/mean": (difference.sum(), len(difference))}
    # a process may have nothing but padding
    extremes = {f"{name}/max": difference.max() if len(difference) else difference.sum()}
    return replace(loss, metrics=metrics, extremes=loss.extremes | extremes)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - mean (R - V)^2 / Var(R), so a constant critic error lowers it; 0 if all returns are equal."""
    spread = float(returns.var()) if len(returns) > 1 else 0.0
    return 1 - float((returns - values).square().mean()) / spread if spread > 0 and math.isfinite(spread) else 0.0
