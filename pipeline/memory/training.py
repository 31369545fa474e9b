"""Is the memory used, and does its router know what it does? Measured on the validation slice, at each evaluation.

Per layer: the share of each chapter, `chapter_entropy` (of the mean share, 1 is even), `chapter_cv` (deviation over
mean of the shares), `chapters_unused`, `largest_share`, `logit_rms`, `read_share` (norm of what is read over the
stream's), `row_entropy` (of attention over the rows that were chosen, 1 is even). Ablations, in bits per byte:
`gain_bpb` of the memory against none, and what is lost where chapters are drawn at random or are always the most used
ones. A router no better than chance is said to be useless.

A stream whose batches know how many units of a memory they hold: what the router's losses are divided by.

A batch knows its counts before the forward pass, so that the loop can divide by those of the whole step (specs:
training, 1).

Next tokens, learnt by a model that may have a memory: then its router is trained too, and watched.

What the stages language, code and memory have in common. A model without a memory is trained as ever, and refuses the
router's weights, which would change nothing.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.batches.batch import TokenBatch
from pipeline.learning import losses as learning_losses
from pipeline.learning.fit import Watchers
from pipeline.learning.losses import Loss, Term
from pipeline.memory import losses as memory_losses
from pipeline.memory.config import MemoryConfig
from pipeline.memory.losses import Choices, RouterWeights, chosen_counts
from pipeline.memory.model import Memory, Reading, cut
from pipeline.model.transformer import Transformer
from pipeline.run import device
from pipeline.run.errors import ConfigError
from pipeline.run.workdir import Job

UNUSED = 0.2  # of a layer's chapters, above which there is a warning


@dataclass
class Use:
    """What the units of some batches chose in one layer."""

    counts: Tensor  # (C,)
    squares: float = 0.0  # of logits
    logits: int = 0
    measured: list[dict[str, float]] = field(default_factory=list)

    def numbers(self) -> dict[str, float]:
        """As in the module."""
        shares = self.counts / self.counts.sum().clamp_min(1)
        num = len(shares)
        entropy = -(shares[shares > 0] * shares[shares > 0].log()).sum()
        found = {
            "chapter_entropy": float(entropy / math.log(num)),
            "chapter_cv": float(shares.std(correction=0) / shares.mean().clamp_min(1e-12)),
            "chapters_unused": float((shares == 0).sum()),
            "largest_share": float(shares.max()),
            "logit_rms": (self.squares / max(1, self.logits)) ** 0.5,
        }
        for name in self.measured[0] if self.measured else ():
            found[name] = sum(one[name] for one in self.measured) / len(self.measured)
        return found | {f"chapter/{number:02d}": float(share) for number, share in enumerate(shares)}


@torch.no_grad()
def bits_per_byte(model: Transformer, batches: Sequence[TokenBatch], told: Callable[[TokenBatch], Reading]) -> float:
    """Of the trained targets; `told` makes each batch's reading."""
    nats, size = 0.0, 0
    where = model.model.embed_tokens.weight.device
    for batch in batches:
        moved = batch.to(where)
        nats += float(learning_losses.read_out(model, moved, learning_losses.next_token, told(moved)))
        size += batch.num_bytes
    return nats / math.log(2) / max(1, size)


def diagnostics(
    model: Transformer, batches: Sequence[TokenBatch], hardware: device.Hardware, *, seed: int
) -> dict[str, float]:
    """All of it, by name: `memory/4/chapter_entropy`, `memory/gain_bpb`."""
    memory = model.memory
    assert isinstance(memory, Memory)
    uses: dict[int, Use] = {}
    was_training = model.training
    model.train(False)

    def watched(batch: TokenBatch) -> Reading:
        readings.append(Reading(trained=batch.targets >= 0, watch=True))
        return readings[-1]

    readings: list[Reading] = []
    with hardware.autocast():
        full = bits_per_byte(model, batches, watched)
        for reading in readings:
            for layer, routed in reading.routed.items():
                use = uses.setdefault(layer, Use(torch.zeros(routed.logits.shape[1])))
                use.counts += chosen_counts(routed).cpu()
                use.squares += float(routed.logits.float().square().sum())
                use.logits += routed.logits.numel()
                use.measured.append(reading.measured[layer])
        other = {name: bits_per_byte(model, batches, told) for name, told in ablations(memory, uses, seed).items()}
    model.train(was_training)
    found = {
        f"memory/{layer}/{name}": value for layer, use in sorted(uses.items()) for name, value in use.numbers().items()
    }
    found |= {"memory/bpb": full, "memory/gain_bpb": other.pop("off") - full}
    return found | {f"memory/{name}_costs_bpb": value - full for name, value in other.items()}


def ablations(memory: Memory, uses: dict[int, Use], seed: int) -> dict[str, Callable[[TokenBatch], Reading]]:
    """Ways to read that know less: nothing, chapters at random, always the same."""
    top_k = memory.config.top_k

    def at_random(layer: int, logits: Tensor) -> Tensor:
        drawn = torch.rand(logits.shape, generator=device.generator("chapters", seed))
        return drawn.argsort(-1)[:, :top_k].to(logits.device)

    def constant(layer: int, logits: Tensor) -> Tensor:
        most = uses[layer].counts.topk(top_k).indices.to(logits.device)
        return most.expand(len(logits), -1)

    def with_(choose: Callable[[int, Tensor], Tensor]) -> Callable[[TokenBatch], Reading]:
        return lambda batch: Reading(trained=batch.targets >= 0, choose=choose)

    return {"off": lambda _: Reading(off=True), "random": with_(at_random), "constant": with_(constant)}


def verdicts(numbers: dict[str, float], chapters: int) -> list[str]:
    """What is wrong, in words; empty where nothing is."""
    found = []
    for name, value in numbers.items():
        if name.endswith("/chapters_unused") and value > UNUSED * chapters:
            found.append(
                f"layer {name.split('/')[1]}: {value:.0f} of {chapters} chapters are never chosen; raise load_balance,"
                " or take fewer chapters"
            )
    if numbers.get("memory/random_costs_bpb", 1.0) <= 0:
        found.append("the router is useless: chapters drawn at random read as well")
    if numbers.get("memory/gain_bpb", 1.0) <= 0:
        found.append("the memory is useless: the model is as good without it")
    return found


def summary(numbers: dict[str, float]) -> dict[str, Any]:
    """The numbers without those of single chapters, for the final metrics."""
    return {name.removeprefix("memory/"): value for name, value in numbers.items() if "/chapter/" not in name}


# -- units -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitBatch(TokenBatch):
    """A `TokenBatch` and its number of units."""

    num_units: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """What sums are divided by."""
        return super().counts | {"units": self.num_units}


class UnitStream:
    """Implements `batch.Stream` around another stream of packed rows."""

    def __init__(self, stream: Any, config: MemoryConfig) -> None:
        self._stream, self._config = stream, config
        self.fingerprint: str = stream.fingerprint
        self.rows_per_epoch: int = stream.rows_per_epoch
        self.tokens_per_epoch: int = stream.tokens_per_epoch

    def rows(self, step: int, context: int) -> np.ndarray:
        """As the other's."""
        return self._stream.rows(step, context)

    def batch(self, step: int, context: int, rows: np.ndarray) -> UnitBatch:
        """As the other's, counted."""
        return counted(self._stream.batch(step, context, rows), self._config)

    def evaluation(self, tokens: int) -> Iterator[UnitBatch]:
        """As the other's, counted."""
        for batch in self._stream.evaluation(tokens):
            yield counted(batch, self._config)


def counted(batch: TokenBatch, config: MemoryConfig) -> UnitBatch:
    """The batch with its units, which lie on the CPU still."""
    units = cut(
        batch.positions.flatten(),
        routing=config.routing,
        window=config.window,
        padding=batch.documents.flatten() < 0,
        trained=batch.targets.flatten() >= 0,
    )
    tensors = {name: getattr(batch, name) for name in ("input_ids", "targets", "documents", "positions")}
    return UnitBatch(**tensors, num_bytes=batch.num_bytes, num_units=len(units.places))


# -- remembering -------------------------------------------------------------------------------------------------------


WATCHED = 8  # batches of the validation split whose choices are measured at each evaluation


def next_tokens(
    model: Transformer, stream: Any, weights: RouterWeights, job: Job, *, tokens: int
) -> tuple[Any, Any, Watchers]:
    """The stream, the loss and what is looked at. `tokens` are those of an evaluation. Raises ConfigError."""
    if not isinstance(model.memory, Memory):
        if weights != RouterWeights():
            raise ConfigError(
                "load_balance, auxiliary, z: expected their defaults, since the model has no memory; give its file in"
                " conf/model/ a key memory"
            )
        return stream, plain_loss, Watchers()
    units = UnitStream(stream, model.memory.config)
    batches = [batch for _, batch in zip(range(WATCHED), units.evaluation(tokens), strict=False)]
    return units, *watched_loss(model, batches, weights, job)


def watched_loss(
    model: Transformer, batches: Sequence[UnitBatch], weights: RouterWeights, job: Job
) -> tuple[Any, Watchers]:
    """The loss of a model with a memory, and what is looked at: the choices of `batches` at each evaluation."""
    choices = Choices()
    loss = partial(memory_loss, choices=choices, weights=weights)
    return loss, Watchers(micro=choices.begin, evaluate=partial(diagnosed, model, batches, job), gradients_at=1)


def memory_loss(model: Transformer, batch: UnitBatch, *, choices: Choices, weights: RouterWeights) -> Loss:
    """Next tokens, and in training the router's losses."""
    told = Reading(trained=batch.targets >= 0)
    terms = [Term("loss", learning_losses.read_out(model, batch, learning_losses.next_token, told))]
    if torch.is_grad_enabled():
        terms += memory_losses.router_terms(told.routed, choices.add(told.routed), weights)
    return Loss(terms)


def plain_loss(model: Transformer, batch: TokenBatch) -> Loss:
    """Next tokens alone."""
    return Loss([Term("loss", learning_losses.read_out(model, batch, learning_losses.next_token))])


def diagnosed(model: Transformer, batches: Sequence[TokenBatch], job: Job, step: int) -> dict[str, float]:
    """What is logged of the router at each evaluation."""
    return diagnostics(model, batches, device.hardware(job.runtime.precision), seed=job.seed)
