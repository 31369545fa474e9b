"""Next-token training of a model with a memory: the stream, the loss with the router's losses, and diagnostics.

    next_tokens(model, stream, weights, job) -> the stream, the loss and the watchers for `fit`

Router weights other than the defaults are rejected for a model without a memory, because they would have no effect.
`UnitStream` counts the units of each batch before the forward pass, so that the loop can divide the router's losses by
the units of the entire step.

Diagnostics run on the validation slice at each evaluation. Per layer: the share of each chapter, `chapter_entropy` (of
the mean share, 1 is even), `chapter_cv` (standard deviation over mean of the shares), `chapters_unused`,
`largest_share`, `logit_rms`, `read_share` (norm of the read over norm of the stream), `row_entropy` (of attention over
the chosen rows, 1 is even). Ablations, in bits per byte: `gain_bpb` of the memory over no memory, and the cost of
reading random chapters or always the most used ones. A router no better than chance is reported as useless.

**Losses of the router** balance the use of its chapters, and keep its logits small.

    f_i = share of choices that went to chapter i (sums to 1, no gradient)      P_i = mean over units of p_i
    load_balance  C sum_i f_i P_i                1 if either is uniform (Switch: Fedus et al. 2021, eq. 4, for top-k)
    auxiliary     sum_i (f_i - 1/C)^2            its gradient, through P, is 2/C times load_balance's
    z             mean of (ln sum_j e^z_j)^2     ST-MoE (Zoph et al. 2022, arXiv:2202.08906, eq. 5)

f is counted over all ranks and the micro-batches of a step so far (`Choices`); P stays local, because the loop divides
each term by the units of the entire step. Shared chapters are not counted: there is no choice to balance.

Shapes: U units, C routed chapters, k chosen chapters.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.batches.batch import TokenBatch, TokenStream
from pipeline.learning import losses as learning_losses
from pipeline.learning.fit import Watchers
from pipeline.learning.losses import Loss, Term
from pipeline.learning.pretraining import Training
from pipeline.memory.config import MemoryConfig, RouterWeights
from pipeline.memory.model import Memory, Reading, Routed, cut
from pipeline.model.transformer import Transformer
from pipeline.run import device
from pipeline.run.errors import ConfigError
from pipeline.run.workdir import Job

UNUSED = 0.2  # a layer with a larger share of unused chapters triggers a warning
CENTERED = 8  # steps averaged for a center
WATCHED = 8  # validation batches used for the diagnostics at each evaluation


class Choices:
    """How often each chapter has been chosen so far in this step, on all ranks."""

    def __init__(self) -> None:
        self.counts: dict[int, Tensor] = {}  # layer -> (C,) float32
        self.mine = True

    def begin(self, micro: int, mine: bool) -> None:
        """Call before each micro-batch. The first of a step resets the counts; one that is not `mine` is ignored."""
        self.mine = mine
        if micro == 0:
            self.counts = {}

    def add(self, routed: Mapping[int, Routed]) -> dict[int, Tensor]:
        """f (C,) of each layer with these choices included. All ranks must call this together."""
        if not routed:
            return {}
        new_counts = torch.stack([chosen_counts(choices) for choices in routed.values()])  # (layers, C)
        new_counts = new_counts if self.mine else new_counts * 0
        if device.world_size() > 1:
            dist.all_reduce(new_counts)
        for layer, counts in zip(routed, new_counts, strict=True):
            self.counts[layer] = self.counts[layer] + counts if layer in self.counts else counts
        return {layer: counts / counts.sum().clamp_min(1) for layer, counts in self.counts.items()}


def chosen_counts(routed: Routed) -> Tensor:
    """How often each chapter was chosen, (C,) float32."""
    num = routed.logits.shape[1]
    return torch.bincount(routed.chosen.flatten(), minlength=num).float()


def load_balance(routed: Routed, shares: Tensor) -> Tensor:
    """C sum f_i p_i, summed over the units; `shares` f (C,)."""
    return len(shares) * (routed.probabilities @ shares).sum()


def auxiliary(routed: Routed, shares: Tensor) -> Tensor:
    """sum (f_i - 1/C)^2, summed over the units; the gradient goes through f~ = P + stop(f - P)."""
    off = shares - 1 / len(shares)
    p = routed.probabilities
    return len(p) * off.square().sum() + 2 * ((p - p.detach()) @ off).sum()


def z_loss(routed: Routed) -> Tensor:
    """(ln sum_j e^z_j)^2, summed over the units."""
    return routed.logits.logsumexp(-1).square().sum()


def router_terms(routed: Mapping[int, Routed], shares: Mapping[int, Tensor], weights: RouterWeights) -> list[Term]:
    """Each loss with a weight above 0, averaged over layers; empty without layers. `shares` maps layers to f."""
    losses: tuple[tuple[str, float, Callable[[int], Tensor]], ...] = (
        ("load_balance", weights.load_balance, lambda layer: load_balance(routed[layer], shares[layer])),
        ("auxiliary", weights.auxiliary, lambda layer: auxiliary(routed[layer], shares[layer])),
        ("z", weights.z, lambda layer: z_loss(routed[layer])),
    )
    return [
        Term(name, torch.stack([loss(layer) for layer in routed]).mean(), "units", coefficient)
        for name, coefficient, loss in losses
        if coefficient and routed
    ]


@dataclass(frozen=True)
class UnitBatch(TokenBatch):
    """A `TokenBatch` and its number of units."""

    num_units: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """The counts by which sums are divided."""
        return super().counts | {"units": self.num_units}


class UnitStream:
    """A `batches.batch.TokenStream` that counts the units in the batches of a packed stream."""

    def __init__(self, stream: TokenStream, config: MemoryConfig) -> None:
        self._stream, self._config = stream, config
        self.fingerprint: str = stream.fingerprint
        self.rows_per_epoch: int = stream.rows_per_epoch
        self.tokens_per_epoch: int = stream.tokens_per_epoch

    def rows(self, step: int, context: int) -> np.ndarray:
        return self._stream.rows(step, context)

    def batch(self, step: int, context: int, rows: np.ndarray) -> UnitBatch:
        return _count_units(self._stream.batch(step, context, rows), self._config)

    def evaluation(self, tokens: int) -> Iterator[UnitBatch]:
        for batch in self._stream.evaluation(tokens):
            yield _count_units(batch, self._config)


def _count_units(batch: TokenBatch, config: MemoryConfig) -> UnitBatch:
    """The batch (still on the CPU) with its number of units."""
    units = cut(
        batch.positions.flatten(),
        routing=config.routing,
        window=config.window,
        padding=batch.documents.flatten() < 0,
        trained=batch.targets.flatten() >= 0,
    )
    tensors = {name: getattr(batch, name) for name in ("input_ids", "targets", "documents", "positions")}
    return UnitBatch(**tensors, num_bytes=batch.num_bytes, num_units=len(units.places))


def next_tokens(
    model: Transformer, stream: TokenStream, weights: RouterWeights, job: Job, *, tokens: int
) -> Training | None:
    """The stream, the loss and the watchers for `fit`; None for a model without a memory.

    `tokens` is the size of an evaluation. Raises ConfigError for router weights without a memory.
    """
    memory = model.hook
    if isinstance(memory, Memory) and memory.config.centered and not all(c.any() for c in memory.centers()):
        raise ConfigError(
            "memory.centered: expected a memory from stage_memory, which measures the center on a trained base; a model"
            " trained from scratch has no center; remove the key from the model's file in conf/model/"
        )
    if not isinstance(memory, Memory):
        if weights != type(weights)():
            raise ConfigError(
                "load_balance, auxiliary, z: expected the defaults, since the model has no memory; add a `memory` key"
                " to the model's file in conf/model/"
            )
        return None
    units = UnitStream(stream, memory.config)
    batches = [batch for _, batch in zip(range(WATCHED), units.evaluation(tokens), strict=False)]
    return units, *watched_loss(model, batches, weights, job)


@torch.no_grad()
def measure_centers(model: Transformer, stream: UnitStream, context: int, hardware: device.Hardware) -> None:
    """Set the centers of a fresh `centered` memory on a trained base: the means of u over the units of the first
    CENTERED steps, identical on all ranks. Does nothing for other memories.
    """
    memory = model.hook
    assert isinstance(memory, Memory)
    if not memory.config.centered:
        return
    where, was_training = model.model.embed_tokens.weight.device, model.training
    model.train(False)
    sums, units = [torch.zeros_like(center) for center in memory.centers()], 0
    for step in range(CENTERED):
        own = stream.batch(step, context, stream.rows(step, context))
        batch, units = own.to(where), units + own.num_units
        reading = Reading(trained=batch.targets >= 0, watch=True)
        with hardware.autocast():
            learning_losses.read_out(model, batch, learning_losses.next_token, reading)
        for total, u in zip(sums, reading.means.values(), strict=True):
            total += u.to(total.dtype).sum(0)
    for center, total in zip(memory.centers(), sums, strict=True):
        center.copy_(total / max(1, units))
    model.train(was_training)


def watched_loss(
    model: Transformer, batches: Sequence[UnitBatch], weights: RouterWeights, job: Job
) -> tuple[Callable[[Transformer, UnitBatch], Loss], Watchers]:
    """The loss of a model with a memory, and watchers that measure the choices of `batches` at each evaluation."""
    choices = Choices()
    loss = partial(memory_loss, choices=choices, weights=weights)
    return loss, Watchers(micro=choices.begin, evaluate=partial(_diagnose, model, batches, job), gradients_at=1)


def memory_loss(model: Transformer, batch: UnitBatch, *, choices: Choices, weights: RouterWeights) -> Loss:
    """Next-token cross-entropy, plus the router's losses in training."""
    reading = Reading(trained=batch.targets >= 0)
    terms = [Term("loss", learning_losses.read_out(model, batch, learning_losses.next_token, reading))]
    if torch.is_grad_enabled():
        terms += router_terms(reading.routed, choices.add(reading.routed), weights)
    return Loss(terms)


def _diagnose(model: Transformer, batches: Sequence[TokenBatch], job: Job, step: int) -> dict[str, float]:
    return diagnostics(model, batches, device.hardware(job.runtime.precision), seed=job.seed)


# -- diagnostics -------------------------------------------------------------------------------------------------------


@dataclass
class Use:
    """The choices of several batches' units in one layer."""

    counts: Tensor  # (C,)
    squares: float = 0.0  # of logits
    logits: int = 0
    measured: list[dict[str, float]] = field(default_factory=list)

    def numbers(self) -> dict[str, float]:
        """The layer's metrics; see the module docstring."""
        shares = self.counts / self.counts.sum().clamp_min(1)
        num = len(shares)
        entropy = -(shares[shares > 0] * shares[shares > 0].log()).sum()
        metrics = {
            "chapter_entropy": float(entropy / math.log(num)),
            "chapter_cv": float(shares.std(correction=0) / shares.mean().clamp_min(1e-12)),
            "chapters_unused": float((shares == 0).sum()),
            "largest_share": float(shares.max()),
            "logit_rms": (self.squares / max(1, self.logits)) ** 0.5,
        }
        for name in self.measured[0] if self.measured else ():
            metrics[name] = sum(values[name] for values in self.measured) / len(self.measured)
        return metrics | {f"chapter/{number:02d}": float(share) for number, share in enumerate(shares)}


def diagnostics(
    model: Transformer, batches: Sequence[TokenBatch], hardware: device.Hardware, *, seed: int
) -> dict[str, float]:
    """All metrics by name, such as `memory/4/chapter_entropy` and `memory/gain_bpb`."""
    memory = model.hook
    assert isinstance(memory, Memory)
    uses: dict[int, Use] = {}
    readings: list[Reading] = []
    was_training = model.training
    model.train(False)

    def watch(batch: TokenBatch) -> Reading:
        readings.append(Reading(trained=batch.targets >= 0, watch=True))
        return readings[-1]

    with hardware.autocast():
        full = bits_per_byte(model, batches, watch)
        for reading in readings:
            for layer, routed in reading.routed.items():
                use = uses.setdefault(layer, Use(torch.zeros(routed.logits.shape[1])))
                use.counts += chosen_counts(routed).cpu()
                use.squares += float(routed.logits.float().square().sum())
                use.logits += routed.logits.numel()
                use.measured.append(reading.measured[layer])
        ablated = {name: bits_per_byte(model, batches, make) for name, make in ablations(memory, uses, seed).items()}
    model.train(was_training)
    metrics = {
        f"memory/{layer}/{name}": value for layer, use in sorted(uses.items()) for name, value in use.numbers().items()
    }
    metrics |= {"memory/bpb": full, "memory/gain_bpb": ablated.pop("off") - full}
    return metrics | {f"memory/{name}_costs_bpb": value - full for name, value in ablated.items()}


@torch.no_grad()
def bits_per_byte(
    model: Transformer, batches: Sequence[TokenBatch], make_reading: Callable[[TokenBatch], Reading]
) -> float:
    """Bits per byte of the trained targets; `make_reading` sets how each batch reads the memory."""
    nats, num_bytes = 0.0, 0
    where = model.model.embed_tokens.weight.device
    for batch in batches:
        moved = batch.to(where)
        nats += float(learning_losses.read_out(model, moved, learning_losses.next_token, make_reading(moved)))
        num_bytes += batch.num_bytes
    return nats / math.log(2) / max(1, num_bytes)


def ablations(memory: Memory, uses: dict[int, Use], seed: int) -> dict[str, Callable[[TokenBatch], Reading]]:
    """Ways to read without the router: nothing, random chapters, or always the most used ones."""
    top_k = memory.config.top_k

    def choose_random(layer: int, logits: Tensor) -> Tensor:
        numbers = torch.rand(logits.shape, generator=device.generator("chapters", seed))
        return numbers.argsort(-1)[:, :top_k].to(logits.device)

    def choose_constant(layer: int, logits: Tensor) -> Tensor:
        most_used = uses[layer].counts.topk(top_k).indices.to(logits.device)
        return most_used.expand(len(logits), -1)

    def reading(choose: Callable[[int, Tensor], Tensor]) -> Callable[[TokenBatch], Reading]:
        return lambda batch: Reading(trained=batch.targets >= 0, choose=choose)

    return {"off": lambda _: Reading(off=True), "random": reading(choose_random), "constant": reading(choose_constant)}


def verdicts(numbers: dict[str, float], chapters: int) -> list[str]:
    """Human-readable warnings; empty if all is well."""
    warnings = []
    for name, value in numbers.items():
        if name.endswith("/chapters_unused") and value > UNUSED * chapters:
            warnings.append(
                f"layer {name.split('/')[1]}: {value:.0f} of {chapters} chapters are never chosen; raise load_balance"
                " or use fewer chapters"
            )
    if numbers.get("memory/random_costs_bpb", 1.0) <= 0:
        warnings.append("the router is useless: random chapters work just as well")
    if numbers.get("memory/gain_bpb", 1.0) <= 0:
        warnings.append("the memory is useless: the model is just as good without it")
    return warnings


def summary(numbers: dict[str, float]) -> dict[str, float]:
    """The metrics without the per-chapter ones, for the final metrics."""
    return {name.removeprefix("memory/"): value for name, value in numbers.items() if "/chapter/" not in name}
