"""Next-token training: the stream, the loss and the watchers of `fit` for running text.

    next_tokens(model, stream, weights, job) -> stream, loss, watchers

What a wing offers for a model with its hook (model/hooks.py):

    loss_keys      () -> a dataclass of the weights of the losses that the hook adds, keys of the stages' blocks
    next_tokens    as the function here; None for a model without the hook, ConfigError if weights are given for it
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline import wings
from pipeline.batches.batch import Stream, TokenBatch
from pipeline.learning import losses
from pipeline.learning.fit import Watchers
from pipeline.learning.losses import Loss, Term
from pipeline.model.transformer import Transformer
from pipeline.run.workdir import Job

KEYS = [offer() for offer in wings.each("loss_keys")]
Training = tuple[Stream, Callable[[Transformer, Any], Loss], Watchers]  # a loss takes the batches of its stream


@dataclass(frozen=True, kw_only=True)
class LossWeights(*KEYS):
    """Weights of the losses that wings add, relative to the loss of the text."""

    def __post_init__(self) -> None:
        for keys in KEYS:
            keys.__post_init__(self)


def next_tokens(model: Transformer, stream: Stream, weights: LossWeights, job: Job, *, tokens: int) -> Training:
    """The stream, the loss and the watchers for `fit`. `tokens` are those of an evaluation. Raises ConfigError."""
    for offer in wings.each("next_tokens"):
        if (training := offer(model, stream, weights, job, tokens=tokens)) is not None:
            return training
    return stream, plain_loss, Watchers()


def plain_loss(model: Transformer, batch: TokenBatch) -> Loss:
    """Next-token cross-entropy alone."""
    return Loss([Term("loss", losses.read_out(model, batch, losses.next_token))])
