"""Health gates: cheap checks that stop a run which would produce something wrong, with a sentence that says why.

Each raises GateError (exit 3) or, where it is only suspicious, says a warning.

Gates of alignment, from fine-tuning to reinforcement: what the first step must show before its update.

Each compares a number with what the mathematics says it must be when nothing has been learnt yet. A miss raises
GateError (exit 3) and names the gate, what was expected, what was found, and the likely cause.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pipeline.batches.batch import IGNORED, Tokens
from pipeline.learning import processes
from pipeline.run.errors import GateError
from pipeline.run.tracking import say
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

MOST_PASSES = 4


def trainable_tokens(num_targets: int, name: str) -> None:
    """The first batch trains at least one token."""
    if num_targets == 0:
        raise GateError(
            f"{name}: the first batch holds no token to train on; look at the data's trained-on masks, and whether the "
            "answers lie within `context` tokens"
        )


@torch.no_grad()
def causal(model: nn.Module, longest: int = 24) -> None:
    """Changing the last token leaves every earlier logit bit-equal, for a causal model."""
    config: Any = getattr(model, "config", None)
    if config is None or config.attention != "causal":
        return
    length = min(longest, config.max_context)
    where = next(model.parameters()).device
    ids = (torch.arange(length, device=where) * 37 % config.vocab_size)[None]
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 1) % config.vocab_size
    model.train(False)
    first, second = model(ids), model(other)
    model.train(True)
    if not torch.equal(first[0, : length - 1], second[0, : length - 1]):
        raise GateError(
            "a later token changes earlier logits: the attention mask leaks the future; look at"
            " pipeline/model/attention.py"
        )


def repeated(passes: float, model: nn.Module, name: str) -> None:
    """Warn when a causal model reads its data more often than pays (Muennighoff et al. 2023, arXiv:2305.16264: up to
    four times).

    Masked diffusion gains from many more passes (Prabhudesai et al. 2025, arXiv:2507.15857).
    """
    config: Any = getattr(model, "config", None)
    if passes > MOST_PASSES and (config is None or config.attention != "bidirectional"):
        say(
            f"warning: {name}: the run reads its data {passes:.1f} times; beyond {MOST_PASSES} times repeated text"
            " gains little: add data, or take fewer steps"
        )


def first_loss(nats: float, model: nn.Module, *, from_scratch: bool) -> None:
    """From scratch the first loss is ln V within 0.5; a continued model above ln V has learnt nothing of use here."""
    config: Any = getattr(model, "config", None)
    if config is None:
        return
    uniform = math.log(config.vocab_size)
    if from_scratch and abs(nats - uniform) > 0.5:
        raise GateError(
            f"the first loss is {nats:.3f}; an untrained model of {config.vocab_size} tokens must start at "
            f"ln V = {uniform:.3f} within 0.5: the initialisation or the targets are wrong"
        )
    if not from_scratch and config.attention == "causal" and nats > uniform:
        say(
            f"warning: the first loss {nats:.3f} is above ln V = {uniform:.3f}: does the base model fit this tokenizer?"
        )


def gradients(members: dict[str, dict[str, nn.Parameter]], model: nn.Module) -> None:
    """Each group has a finite, non-zero gradient after the first backward; frozen weights have none."""
    totals = {}
    for group, parameters in members.items():
        norms = [processes.full(p.grad.norm()) for p in parameters.values() if p.grad is not None]
        totals[group] = float(torch.stack(norms).norm()) if norms else 0.0
    for group, total in totals.items():  # before the zeros: clipping by an infinite norm makes zeros of the others
        if not math.isfinite(total):
            raise GateError(
                f"group {group}: the first gradient is not finite; try runtime.precision=fp32, and look at the weights "
                "that the run starts from"
            )
    for group, total in totals.items():
        if total == 0.0:
            raise GateError(
                f"group {group}: no gradient arrives at {next(iter(members[group]))}; it would never train. Use it in"
                " the loss, or freeze it (requires_grad_(False))"
            )
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and parameter.grad is not None:
            raise GateError(f"{name} is frozen but has a gradient; freeze it before the first backward pass")


def falling(rows: list[dict[str, Any]], steps: int, name: str) -> None:
    """Warn once, at a tenth of the run, when the loss fell by less than 2 %."""
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    step, loss = losses[-1]
    before = losses[-2][0] if len(losses) > 1 else 0
    if before < steps // 10 <= step and loss > 0.98 * losses[0][1]:
        say(
            f"warning: {name}: the loss fell by under 2 % in the first tenth of the run; look for another"
            " learning_rate: the same command with runtime.find_lr=true"
        )


# -- first_steps -------------------------------------------------------------------------------------------------------


KL = ("objective/kl", "kl/rollout")  # of the first answers from the reference: PPO's, the group methods'


def value(values: dict[str, float], name: str, expected: float, tolerance: float, cause: str) -> None:
    """Raise GateError unless a number of the first step is what the mathematics says; `cause` is the likely fault."""
    found = values.get(name)
    if found is None or not abs(found - expected) <= tolerance:
        shown = "nothing" if found is None else f"{found:.8g}"
        raise GateError(
            f"gate {name}: expected {expected:.8g} within {tolerance:g}, found {shown}. Likely cause: {cause}"
        )


def first_mask(batch: Tokens, tokenizer: Tokenizer) -> None:
    """Raise GateError unless a batch of conversations trains what the assistant says and the ends of its turns, no
    more.

    What that is is told from the ids alone, so that the mask is compared with something that made it not.
    """
    for ids, targets in zip(batch.input_ids.tolist(), batch.targets.tolist(), strict=True):
        following = [*ids[1:], targets[-1] if targets[-1] >= 0 else tokenizer.pad]
        said = chat.spoken(tokenizer, [ids[0], *following])[1:]
        if [token if mine else IGNORED for token, mine in zip(following, said, strict=True)] != targets:
            expected = tokenizer.decode(
                [token for token, mine in zip(following, said, strict=True) if mine], skip_special=False
            )
            found = tokenizer.decode([token for token in targets if token >= 0], skip_special=False)
            raise GateError(
                f"gate mask: expected the first batch to train what the assistant says: {expected!r:.200}; found"
                f" {found!r:.200}. Likely cause: the trained-on mask of text/chat.py, or the shift of batches/batch.py"
            )


def first_reward(expected: float) -> Callable[[dict[str, float]], None]:
    """A fresh head gives 0 to all, so the ranking loss is ln 2 (less with margins)."""

    def check(values: dict[str, float]) -> None:
        name = "ranking" if "ranking" in values else "loss"
        value(values, name, expected, 1e-5, "the reward head does not start at zero, or the margins are read wrongly")

    return check


# nats by which the sums of a batch's answers may differ on average in half precision; another model is off by more than
# one
ROUNDED = 0.2


def first_dpo(expected: float | None, precision: str, beta: float) -> Callable[[dict[str, float]], None]:
    """The policy equals its reference: the loss is known, and no answer is preferred (strictly).

    In half precision a pass that keeps gradients rounds otherwise than one that does not, and an answer's sum has many
    terms: 0.04 nats were seen in a batch of 16 pairs. Rewards are `beta` times these, and the loss moves by a reward,
    or by its own size.
    """
    near = 1e-4 if precision == "fp32" else ROUNDED * beta

    def check(values: dict[str, float]) -> None:
        if expected is None:
            return
        cause = "policy and reference differ: other weights, dropout, another dtype, or stale precomputed sums"
        loose = near if precision == "fp32" else near + 0.05 * abs(expected)
        value(values, "preference" if "preference" in values else "loss", expected, loose, cause)
        for name in ("rewards/chosen", "rewards/rejected"):
            value(values, name, 0.0, near, cause)

    return check


def first_policy(ratio: str, divergence: str, clipped: str, precision: str) -> Callable[[dict[str, float]], None]:
    """Nothing has moved since the rollout: ratio 1, no divergence, nothing clipped, sampling agrees with teacher
    forcing.

    The names are those of the method's metrics. In float32 the divergence from the reference is 0 too, where one is
    loaded.
    """
    narrow = precision == "fp32"

    def check(values: dict[str, float]) -> None:
        cause = "the sampler and the training pass score answers differently: temperature, masks, positions, dropout"
        name = "sampling/sampling_logp_difference/"
        value(values, name + ("max" if narrow else "mean"), 0.0, 1e-4 if narrow else 2e-2, cause)
        value(values, ratio, 1.0, 1e-4 if narrow else 5e-2, cause)
        value(values, divergence, 0.0, 1e-6 if narrow else 1e-2, cause)
        value(values, clipped, 0.0, 0.0 if narrow else 1e-1, cause)
        for name in KL:  # sampled against teacher-forced, summed over an answer: too coarse a number in half precision
            if narrow and name in values:
                value(values, name, 0.0, 1e-3, "the reference is not what the policy starts from, or scores otherwise")

    return check


def unmoved(before: str, after: str, what: str) -> None:
    """Raise GateError when frozen weights changed during the run."""
    if before != after:
        raise GateError(
            f"{what}: its weights had the hash {before[:16]} at the start and {after[:16]} now; it must stay frozen: "
            "something trains or overwrites it"
        )
