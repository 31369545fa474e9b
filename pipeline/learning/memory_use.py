"""Is the memory used, and does its router know what it does? Measured on the validation slice, at each evaluation.

Per layer: the share of each chapter, `chapter_entropy` (of the mean share, 1 is even), `chapter_cv` (deviation over mean of the
shares), `chapters_unused`, `largest_share`, `logit_rms`, `read_share` (norm of what is read over the stream's), `row_entropy` (of
attention over the rows that were chosen, 1 is even). Ablations, in bits per byte: `gain_bpb` of the memory against none, and what
is lost where chapters are drawn at random or are always the most used ones. A router no better than chance is said to be useless.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeline import device
from pipeline.learning import objectives, scoring
from pipeline.learning.objectives_memory import chosen_counts
from pipeline.model.memory import Memory, Reading
from pipeline.model.transformer import Transformer
from pipeline.streams.batch import TokenBatch

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
        nats += float(scoring.read_out(model, moved, objectives.next_token, told(moved)))
        size += batch.num_bytes
    return nats / math.log(2) / max(1, size)


def diagnostics(model: Transformer, batches: Sequence[TokenBatch], hardware: device.Hardware, *, seed: int) -> dict[str, float]:  # fmt: skip
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
                f"layer {name.split('/')[1]}: {value:.0f} of {chapters} chapters are never chosen; raise load_balance, or take fewer chapters"
            )
    if numbers.get("memory/random_costs_bpb", 1.0) <= 0:
        found.append("the router is useless: chapters drawn at random read as well")
    if numbers.get("memory/gain_bpb", 1.0) <= 0:
        found.append("the memory is useless: the model is as good without it")
    return found


def summary(numbers: dict[str, float]) -> dict[str, Any]:
    """The numbers without those of single chapters, for the final metrics."""
    return {name.removeprefix("memory/"): value for name, value in numbers.items() if "/chapter/" not in name}
