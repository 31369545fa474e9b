"""`runtime.micro_batch: auto`: how many rows go through the model at once. It changes the sums' order, so it is part of a run.

    kept        what the run's newest state was trained with: a resumed run stays exact
    planned     else all rows, or the largest power of two that the plan (footprint.py) puts within 80 % of a GPU's memory, or 30 %
                of a machine's, which belongs to other programs too
    proved      on a GPU a dry step of that size follows, a real forward and backward pass; out of memory: half of it

The total and not what is free, so that equal runs choose alike. The dry step leaves weights, moments and generators as they
were. On a CPU a pass that exhausts the memory is killed by the system instead of raising, so there the plan alone decides; so
it does where the batches do not exist yet (a rollout). Out of memory later ends the run with what can be done about it.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline import device
from pipeline.errors import InputError
from pipeline.learning import footprint
from pipeline.learning.footprint import Footprint, Work
from pipeline.learning.ranks import Ranks
from pipeline.learning.settings import FitConfig, TrainingConfig
from pipeline.params import Runtime
from pipeline.tracking import say
from pipeline.work import Job

SHARE = 0.8  # of a GPU's total memory that a plan may fill
CPU_SHARE = 0.3  # of a machine's: other programs run there, and more rows at once are no faster


def of(run: Any) -> list[int]:
    """The micro-batches tried for a fit.Run, the last of which serves. Raises ConfigError for fewer rows than processes."""
    config, ranks = run.config, run.ranks
    # One rank that runs out inside of a collective would leave the others waiting: a model that is cut is planned alone.
    provable = run.hardware.device.type == "cuda" and not run.rolling and not ranks.sharding
    rows = ranks.share_of(config.rows, run.job.stage)
    return chosen(run.plain, config, run.job, run.hardware, ranks, rows, partial(dry_step, run) if provable else None)


def dry_step(run: Any, micro: int) -> None:
    """Forward and backward of the first two micro-batches of this size; all that is left of it are gradients."""
    length = run.config.row_length
    mine = run.stream.rows(0, length)[run.ranks.rank :: run.ranks.world]
    parts = [part for part in (mine[:micro], mine[micro : 2 * micro]) if len(part)]
    batches = [run.stream.batch(0, length, part) for part in parts]
    counts = {name: sum(batch.counts[name] for batch in batches) for name in batches[0].counts}
    with run.ranks.no_sync(run.model, skip=True):
        run.backward(batches, counts)


def chosen(
    model: nn.Module, config: TrainingConfig, job: Job, hardware: device.Hardware, ranks: Ranks, rows: int,
    dry: Callable[[int], object] | None,
) -> list[int]:  # fmt: skip
    """The micro-batches tried for the `rows` of this process's share of a step; the last one is taken, by all processes.

    `dry` runs forward and backward of so many rows; None: the plan alone decides. Raises InputError where none fits.
    """
    asked, before = job.runtime.micro_batch, kept(job.folder, ranks.world)
    if asked != "auto" or before is not None:
        return [min(rows, int(before or 1) if asked == "auto" else int(asked))]
    plan = plan_of(model, config, hardware, job.runtime, rows=rows, ranks=ranks)
    if plan is None:
        return [rows]
    tried = [-int(ranks.greatest(-planned(plan, hardware, rows)))]
    if dry is not None:
        with explained(job, config, 0, tried):
            tried = proved(model, hardware.device, tried[0], dry, plan(1).optimizer)
    return [*tried[:-1], -int(ranks.greatest(-tried[-1]))]


def kept(folder: Path, world: int) -> int | None:
    """The micro-batch of the newest readable state, if as many processes trained it; None: there is none."""
    for path in sorted(folder.glob("step-????????/state.json"), reverse=True):
        with suppress(OSError, ValueError, KeyError):  # a damaged state: the one before it was trained alike
            meta = json.loads(path.read_text())
            return int(meta["micro_batch"]) if meta["world"] == world else None
    return None


def planned(plan: Callable[[int], Footprint], hardware: device.Hardware, rows: int) -> int:
    """All `rows`, or the largest power of two that the plan puts within the share of the total memory that it may fill; at least 1."""
    total = device.total_memory(hardware.device)
    beside = max(0.0, device.held_memory(hardware.device) - plan(1).weights)  # a reward model that is there already
    share = CPU_SHARE if hardware.device.type == "cpu" else SHARE
    found = footprint.largest(share * total - beside, lambda micro_batch: plan(micro_batch).total, rows)
    if not found:
        say(
            f"warning: one row needs about {(plan(1).total + beside) / 1e9:.1f} GB by the plan, and "
            f"{hardware.device.type} has {total / 1e9:.1f}; see python -m pipeline.plan"
        )
    return max(1, found)


def plan_of(
    model: nn.Module, config: TrainingConfig, hardware: device.Hardware, runtime: Runtime, *, rows: int, ranks: Ranks
) -> Callable[[int], Footprint] | None:
    """micro-batch -> the plan of a step of `rows`; None for a model without a shape that the plan knows."""
    configs = [shape for shape in (getattr(part, "config", None) for part in parts(model)) if shape is not None]
    if not configs:
        return None
    weights = footprint.weights_of(model)
    adapted, dropped = footprint.adapters_of(model)
    selected = (
        config.trained_length if hasattr(parts(model)[0], "logits") else 0
    )  # a reward model has no head for tokens
    work = Work(
        row=config.row_length, context=config.longest, selected=selected, kind=hardware.device.type, precision=hardware.precision,
        optimizer=config.optimizer, checkpointing=runtime.gradient_checkpointing, answers=not isinstance(config, FitConfig),
        adapted=adapted, dropped=dropped,
    )  # fmt: skip

    def plan(micro_batch: int) -> Footprint:
        one = footprint.footprint(weights, configs, replace(work, accumulates=micro_batch < rows), micro_batch)
        if ranks.sharding:
            return footprint.sharded(one, configs[0], work, ranks.world)
        return footprint.data_parallel(one, weights) if ranks.world > 1 else one

    return plan


def parts(model: nn.Module) -> list[nn.Module]:
    """The models in a model: an actor and its critic, or itself."""
    return [getattr(model, name) for name in ("actor", "critic") if hasattr(model, name)] or [model]


def proved(
    model: nn.Module, where: torch.device, first: int, dry: Callable[[int], object], reserve: float
) -> list[int]:
    """The micro-batches tried, the last of which `dry` (forward and backward of so many rows) had memory for.

    `reserve` bytes stand for moments that the first update will make. Gradients are dropped and the generators put back.
    Raises torch.OutOfMemoryError where a single row finds no room.
    """
    tried = [first]
    while not _has_room(model, where, tried[-1], dry, reserve):
        half = 2 ** math.ceil(math.log2(tried[-1]) - 1)
        say(f"out of memory in a dry step of {tried[-1]} rows; trying {half}")
        tried.append(half)
    return tried


def _has_room(model: nn.Module, where: torch.device, rows: int, dry: Callable[[int], object], reserve: float) -> bool:
    """Whether a dry step passes. The error must be forgotten before the next try: its frames hold the activations."""
    with torch.random.fork_rng([where] if where.type == "cuda" else []):
        try:
            moments = torch.empty(int(reserve), dtype=torch.uint8, device=where)
            dry(rows)
            del moments
            return True
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
        finally:
            for parameter in model.parameters():
                parameter.grad = None
    device.give_back(where)
    return False


@contextmanager
def explained(job: Job, config: TrainingConfig, step: int, tried: list[int]) -> Iterator[None]:
    """Within it, running out of a GPU's memory becomes an InputError that says what can be done."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first = str(error).splitlines()[0] if str(error) else "no more is known"
        raise InputError(
            f"{job.stage}: out of memory in step {step}, at rows of {config.row_length} tokens; micro-batches tried: "
            f"{', '.join(map(str, tried))} ({first}). Recompute activations (runtime.gradient_checkpointing=full), ask for fewer "
            f"rows at once (runtime.micro_batch={max(1, tried[-1] // 2)}), take a smaller model (model: a file of conf/model/), or "
            "divide the states over processes (STAGECOACH_LAUNCH=conf/launch/fsdp2.yaml). What fits: python -m pipeline.plan"
        ) from error
