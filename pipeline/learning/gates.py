"""Health gates: cheap checks that stop a doomed run early and name the likely cause.

Each gate compares a number with its theoretical value before any learning: at the start, or in the first step before
the update. A mismatch raises GateError (exit code 3) with the expected value, the actual value and the likely cause.
Merely suspicious values get a warning. The second half of this file has the gates for fine-tuning and alignment.
"""

import math
from collections.abc import Callable

import torch
from torch import nn

from pipeline.batches.batch import IGNORED, Tokens
from pipeline.learning import processes
from pipeline.model.config import ModelConfig
from pipeline.run.errors import GateError
from pipeline.run.tracking import say
from pipeline.run.types import JsonObject
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

MOST_PASSES = 4


def trainable_tokens(num_targets: int, name: str) -> None:
    """Raise GateError unless the first batch trains at least one token."""
    if num_targets == 0:
        raise GateError(
            f"{name}: the first batch has no tokens to train on; check the loss masks of the data, and whether the "
            "answers fit in `context` tokens"
        )


def finite(model: nn.Module) -> None:
    """Raise GateError naming the first weight with non-finite values."""
    for name, weight in model.named_parameters():
        if num_wrong := int((~weight.isfinite()).sum()):
            raise GateError(
                f"the initial weights are damaged: {num_wrong} of the {weight.numel()} values of {name} are not finite;"
                " rebuild the model or download it again"
            )


@torch.no_grad()
def causal(model: nn.Module, longest: int = 24) -> None:
    """Raise GateError if changing the last token changes any bit of an earlier logit of a causal model, or if its
    weights are not finite.
    """
    config: ModelConfig | None = getattr(model, "config", None)
    if config is None or config.attention != "causal":
        return
    length = min(longest, config.max_context)
    device = next(model.parameters()).device
    ids = (torch.arange(length, device=device) * 37 % config.vocab_size)[None]
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 1) % config.vocab_size
    model.train(False)
    first, second = model(ids), model(other)
    model.train(True)
    if not torch.equal(first[0, : length - 1], second[0, : length - 1]):
        finite(model)
        raise GateError(
            "a later token changes earlier logits: the attention mask leaks future tokens; check"
            " pipeline/model/layers.py"
        )


def repeated(passes: float, model: nn.Module, name: str) -> None:
    """Warn when a causal model trains for more than four epochs (Muennighoff et al. 2023, arXiv:2305.16264).

    Masked diffusion benefits from many more (Prabhudesai et al. 2025, arXiv:2507.15857).
    """
    config: ModelConfig | None = getattr(model, "config", None)
    if passes > MOST_PASSES and (config is None or config.attention != "bidirectional"):
        say(
            f"warning: {name}: the run makes {passes:.1f} passes over its data; beyond {MOST_PASSES}, repetition"
            " helps little: add data or use fewer steps"
        )


def first_loss(nats: float, model: nn.Module, *, from_scratch: bool) -> None:
    """Raise GateError if a new model's first loss is not within 0.5 of ln V. Warn if a pretrained model's is higher."""
    config: ModelConfig | None = getattr(model, "config", None)
    if config is None:
        return
    uniform = math.log(config.vocab_size)
    if from_scratch and abs(nats - uniform) > 0.5:
        raise GateError(
            f"the first loss is {nats:.3f}; an untrained model with {config.vocab_size} tokens must start within 0.5 "
            f"of ln V = {uniform:.3f}: the initialization or the targets are wrong"
        )
    if not from_scratch and config.attention == "causal" and nats > uniform:
        say(
            f"warning: the first loss {nats:.3f} is above ln V = {uniform:.3f}: does the base model use this tokenizer?"
        )


def gradients(members: dict[str, dict[str, nn.Parameter]], model: nn.Module) -> None:
    """Raise GateError unless each group has a finite, nonzero first gradient and frozen weights have none."""
    totals = {}
    for group, parameters in members.items():
        norms = [processes.full(p.grad.norm()) for p in parameters.values() if p.grad is not None]
        totals[group] = float(torch.stack(norms).norm()) if norms else 0.0
    for group, total in totals.items():  # before the zero check: clipping by an infinite norm zeroes the others
        if not math.isfinite(total):
            raise GateError(
                f"group {group}: the first gradient is not finite; try runtime.precision=fp32, and check the initial "
                "weights"
            )
    for group, total in totals.items():
        if total == 0.0:
            raise GateError(
                f"group {group}: no gradient reaches {next(iter(members[group]))}, so it would never train; use it in"
                " the loss, or freeze it (requires_grad_(False))"
            )
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and parameter.grad is not None:
            raise GateError(f"{name} is frozen but has a gradient; freeze it before the first backward pass")


def falling(rows: list[JsonObject], steps: int, name: str) -> None:
    """Warn once, after a tenth of the run, if the loss fell by less than 2%."""
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    step, loss = losses[-1]
    before = losses[-2][0] if len(losses) > 1 else 0
    if before < steps // 10 <= step and loss > 0.98 * losses[0][1]:
        say(
            f"warning: {name}: the loss fell by less than 2% in the first tenth of the run; try another learning_rate"
            " (rerun with runtime.find_lr=true)"
        )


# -- fine-tuning and alignment -----------------------------------------------------------------------------------------


KL = ("objective/kl", "kl/rollout")  # divergence of the first answers from the reference: PPO, group methods


def value(values: dict[str, float], name: str, expected: float, tolerance: float, cause: str) -> None:
    """Raise GateError unless a first-step number has its expected value. `cause`: what probably went wrong."""
    number = values.get(name)
    if number is None or not abs(number - expected) <= tolerance:
        shown = "nothing" if number is None else f"{number:.8g}"
        raise GateError(
            f"gate {name}: expected {expected:.8g} to within {tolerance:g}, found {shown}. Likely cause: {cause}"
        )


def first_mask(batch: Tokens, tokenizer: Tokenizer) -> None:
    """Raise GateError unless a batch of conversations trains only on the assistant's text and end-of-turn tokens.

    The expected mask is computed from the ids alone, so the check is independent of the code that made the mask.
    """
    for ids, targets in zip(batch.input_ids.tolist(), batch.targets.tolist(), strict=True):
        following = [*ids[1:], targets[-1] if targets[-1] >= 0 else tokenizer.pad]
        trained = chat.spoken(tokenizer, [ids[0], *following])[1:]
        if [token if is_trained else IGNORED for token, is_trained in zip(following, trained, strict=True)] != targets:
            expected = tokenizer.decode(
                [token for token, is_trained in zip(following, trained, strict=True) if is_trained], skip_special=False
            )
            actual = tokenizer.decode([token for token in targets if token >= 0], skip_special=False)
            raise GateError(
                f"gate mask: expected the first batch to train on the assistant's text: {expected!r:.200}; found"
                f" {actual!r:.200}. Likely cause: the loss mask of text/chat.py, or the shift of batches/batch.py"
            )


def first_reward(expected: float) -> Callable[[dict[str, float]], None]:
    """Check that the first ranking loss is `expected`: a new head outputs 0, so the loss is ln 2 without margins."""

    def check(values: dict[str, float]) -> None:
        name = "ranking" if "ranking" in values else "loss"
        value(values, name, expected, 1e-5, "the reward head does not start at zero, or the margins are wrong")

    return check


# allowed mean difference in nats between the policy's and the reference's log-probabilities of a batch's answers, in
# half precision; a different model is off by more than 1 nat
ROUNDED = 0.2


def first_dpo(expected: float | None, precision: str, beta: float) -> Callable[[dict[str, float]], None]:
    """Check that the policy equals its reference: the loss must have its known value, and all rewards must be 0.

    In half precision, a pass with gradients rounds differently from one without, and the errors add up over an answer's
    tokens: to 0.04 nats, measured in a batch of 16 pairs. A reward is off by `beta` times that, and the loss by as
    much plus a share of its own size.
    """
    tolerance = 1e-4 if precision == "fp32" else ROUNDED * beta

    def check(values: dict[str, float]) -> None:
        if expected is None:
            return
        cause = "policy and reference differ in weights, dropout or dtype, or the precomputed sums are stale"
        loss_tolerance = tolerance if precision == "fp32" else tolerance + 0.05 * abs(expected)
        value(values, "preference" if "preference" in values else "loss", expected, loss_tolerance, cause)
        for name in ("rewards/chosen", "rewards/rejected"):
            value(values, name, 0.0, tolerance, cause)

    return check


def first_kto(expected: float, precision: str, beta: float) -> Callable[[dict[str, float]], None]:
    """As `first_dpo`, for labels: check that the policy equals its reference. The estimated divergence must also be 0.

    A batch may contain only good or only bad answers. With equal numbers of both, the loss is the same at any
    divergence, so the loss by itself would not reveal a wrong divergence.
    """
    rewards = ("rewards/chosen", "rewards/rejected")
    of_pairs = first_dpo(expected, precision, beta)

    def check(values: dict[str, float]) -> None:
        of_pairs(dict.fromkeys(rewards, 0.0) | values)
        cause = "policy and reference score mismatched answers with different weights, dropout or dtype"
        value(values, "kl", 0.0, 1e-3 if precision == "fp32" else ROUNDED, cause)

    return check


def first_policy(ratio: str, divergence: str, clipped: str, precision: str) -> Callable[[dict[str, float]], None]:
    """Check that nothing has changed since the rollout: ratio 1, no divergence, no clipping, equal log-probabilities.

    `ratio`, `divergence` and `clipped` are the method's metric names. In float32 the divergence from a reference
    must also be 0.
    """
    exact = precision == "fp32"

    def check(values: dict[str, float]) -> None:
        cause = (
            "the sampler and the training pass score answers with different temperatures, masks, positions or dropout"
        )
        name = "sampling/sampling_logp_difference/"
        value(values, name + ("max" if exact else "mean"), 0.0, 1e-4 if exact else 2e-2, cause)
        value(values, ratio, 1.0, 1e-4 if exact else 5e-2, cause)
        value(values, divergence, 0.0, 1e-6 if exact else 1e-2, cause)
        value(values, clipped, 0.0, 0.0 if exact else 1e-1, cause)
        for name in KL:  # sampling versus teacher forcing, summed over an answer: too coarse in half precision
            if exact and name in values:
                value(values, name, 0.0, 1e-3, "the reference is not the initial policy, or scores answers differently")

    return check


def unmoved(before: str, after: str, what: str) -> None:
    """Raise GateError if frozen weights changed during the run."""
    if before != after:
        raise GateError(
            f"{what} must stay frozen, but the hash of its weights changed from {before[:16]} to {after[:16]}: "
            "something trains or overwrites them"
        )
