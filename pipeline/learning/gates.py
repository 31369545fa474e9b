"""Health gates: cheap checks that stop a run which would produce something wrong, with a sentence that says why.

Each raises GateError (exit 3) or, where it is only suspicious, says a warning.
"""

import math
from typing import Any

import torch
from torch import nn

from pipeline.errors import GateError
from pipeline.learning import sharding
from pipeline.tracking import say

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
            "a later token changes earlier logits: the attention mask leaks the future; look at pipeline/model/attention.py"
        )


def repeated(passes: float, model: nn.Module, name: str) -> None:
    """Warn when a causal model reads its data more often than pays (Muennighoff et al. 2023, arXiv:2305.16264: up to four times).

    Masked diffusion gains from many more passes (Prabhudesai et al. 2025, arXiv:2507.15857).
    """
    config: Any = getattr(model, "config", None)
    if passes > MOST_PASSES and (config is None or config.attention != "bidirectional"):
        say(
            f"warning: {name}: the run reads its data {passes:.1f} times; beyond {MOST_PASSES} times repeated text gains little: add "
            "data, or take fewer steps"
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
        norms = [sharding.full(p.grad.norm()) for p in parameters.values() if p.grad is not None]
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
                f"group {group}: no gradient arrives at {next(iter(members[group]))}; it would never train. Use it in the "
                "loss, or freeze it (requires_grad_(False))"
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
            f"warning: {name}: the loss fell by under 2 % in the first tenth of the run; look for another learning_rate: the same "
            "command with runtime.find_lr=true"
        )
