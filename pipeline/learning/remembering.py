"""Next tokens, learnt by a model that may have a memory: then its router is trained too, and watched.

What the stages language, code and memory have in common. A model without a memory is trained as ever, and refuses the router's weights,
which would change nothing.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from pipeline import device
from pipeline.errors import ConfigError
from pipeline.learning import memory_use as use
from pipeline.learning import objectives, objectives_memory, scoring
from pipeline.learning.objectives import Loss, Term
from pipeline.learning.objectives_memory import Choices, RouterWeights
from pipeline.learning.protocols import Watchers
from pipeline.model.memory import Memory, Reading
from pipeline.model.transformer import Transformer
from pipeline.streams.batch import TokenBatch
from pipeline.streams.units import UnitBatch, UnitStream
from pipeline.work import Job

WATCHED = 8  # batches of the validation split whose choices are measured at each evaluation


def next_tokens(model: Transformer, stream: Any, weights: RouterWeights, job: Job, *, tokens: int) -> tuple[Any, Any, Watchers]:  # fmt: skip
    """The stream, the loss and what is looked at. `tokens` are those of an evaluation. Raises ConfigError."""
    if not isinstance(model.memory, Memory):
        if weights != RouterWeights():
            raise ConfigError(
                "load_balance, auxiliary, z: expected their defaults, since the model has no memory; give its file in conf/model/ a key memory"
            )
        return stream, plain_loss, Watchers()
    units = UnitStream(stream, model.memory.config)
    batches = [batch for _, batch in zip(range(WATCHED), units.evaluation(tokens), strict=False)]
    return units, *watched_loss(model, batches, weights, job)


def watched_loss(model: Transformer, batches: Sequence[UnitBatch], weights: RouterWeights, job: Job) -> tuple[Any, Watchers]:  # fmt: skip
    """The loss of a model with a memory, and what is looked at: the choices of `batches` at each evaluation."""
    choices = Choices()
    loss = partial(memory_loss, choices=choices, weights=weights)
    return loss, Watchers(micro=choices.begin, evaluate=partial(diagnosed, model, batches, job), gradients_at=1)


def memory_loss(model: Transformer, batch: UnitBatch, *, choices: Choices, weights: RouterWeights) -> Loss:
    """Next tokens, and in training the router's losses."""
    told = Reading(trained=batch.targets >= 0)
    terms = [Term("loss", scoring.read_out(model, batch, objectives.next_token, told))]
    if torch.is_grad_enabled():
        terms += objectives_memory.router_terms(told.routed, choices.add(told.routed), weights)
    return Loss(terms)


def plain_loss(model: Transformer, batch: TokenBatch) -> Loss:
    """Next tokens alone."""
    return Loss([Term("loss", scoring.read_out(model, batch, objectives.next_token))])


def diagnosed(model: Transformer, batches: Sequence[TokenBatch], job: Job, step: int) -> dict[str, float]:
    """What is logged of the router at each evaluation."""
    return use.diagnostics(model, batches, device.hardware(job.runtime.precision), seed=job.seed)
