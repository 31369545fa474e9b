"""Rows that remember: which row of the cache already holds the beginning of a prompt, and how much memory rows may take.

A row that ended keeps its keys and values until another request takes it. A request takes the free row that begins as its prompt
does; where a busy one has more of it, that beginning is copied, if our own cache holds it; else it takes the row that has been idle longest. Only rows of the
same owner are looked at: how fast an answer comes must not tell one user what another asked.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import torch

from pipeline.errors import InputError
from pipeline.generation.sampling import Sampling
from pipeline.model.cache import KVCache
from pipeline.model.config import ModelConfig
from pipeline.serve.drafts import Drafter
from pipeline.serve.request import Ticket
from pipeline.serve.rows import Lengths

SHARED = 16  # a common beginning shorter than this is read again: finding it costs more
FREE_SHARE = 0.25  # of the free memory, what keys and values may take
CGROUP = Path("/sys/fs/cgroup")


@dataclass
class Slot:
    """A row of the cache: what it holds, whose it is, and who speaks on it now."""

    held: list[int] = field(default_factory=list)  # ids whose keys and values lie in the row
    owner: str = ""
    used: int = 0  # when it ended, as a count
    ticket: Ticket | None = None
    way: Sampling = Sampling(1)  # how tokens are chosen; equal ones are chosen for together
    cached: int = 0
    said: int = 0
    numbers: np.ndarray = field(default_factory=lambda: np.zeros(0))  # one for each token that may be said
    ahead: list[int] = field(default_factory=list)  # ids still to be fed
    drafter: Drafter | None = None
    spent: float = 0.0  # seconds of its constraint

    @property
    def remaining(self) -> int:
        """How many tokens may still be said."""
        return len(self.numbers) - self.said


def take_row(slots: Sequence[Slot], cache: KVCache | Lengths, ids: list[int], owner: str) -> tuple[int, int]:
    """(row, cached): the free row in which a prompt is to go on, whose first `cached` positions are those of the prompt."""
    free = [row for row, slot in enumerate(slots) if slot.ticket is None]
    common = {row: _common(slot.held, ids) for row, slot in enumerate(slots) if slot.owner == owner}
    whole = isinstance(cache, KVCache) and cache.reads_at_once
    common = {row: found for row, found in common.items() if found >= SHARED and not whole}
    best = max(free, key=lambda row: (common.get(row, 0), -slots[row].used))
    cached = common.get(best, 0)
    donor = max(common, key=lambda row: common[row], default=best)
    if isinstance(cache, KVCache) and common.get(donor, 0) > cached:  # a busy row has more
        cached, best = common[donor], min(free, key=lambda row: slots[row].used)
        for tensors, along in ((cache.keys, 2), (cache.values, 1), (cache.states.values(), 0)):
            for tensor in tensors:
                tensor[best].narrow(along, 0, cached).copy_(tensor[donor].narrow(along, 0, cached))
    cache.own[best] = cached
    if isinstance(cache, KVCache):
        cache.unit_of[best] = -1  # what the row's units chose from is another text's
    return best, cached


def _common(held: list[int], ids: list[int]) -> int:
    """How many first ids are the same; at most all but the last of `ids`, which is always fed: its logits are needed."""
    most = min(len(held), len(ids) - 1)
    if held[:most] == ids[:most]:
        return most
    return next(place for place in range(most) if held[place] != ids[place])


def check_memory(config: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise InputError where the keys and values of so many rows may come to take more than FREE_SHARE of the free memory."""
    row = 2 * config.layers * config.kv_heads * config.head_dim * config.max_context * dtype.itemsize
    most = int(free_memory(device) * FREE_SHARE)
    if rows * row > most:
        fits = most // row
        advice = (
            f"ask for at most --rows {fits}" if fits else "it needs a larger machine, or a model of a shorter context"
        )
        raise InputError(
            f"--rows {rows}: so many rows of {config.max_context} tokens take {rows * row / 2**30:.1f} GiB of keys and values, more than "
            f"a quarter of the free memory ({most / 2**30:.1f} GiB); {advice}"
        )


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a CUDA device, else in this machine or the control group that it runs in."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [psutil.virtual_memory().available]
    with contextlib.suppress(OSError, ValueError):  # no control group, or "max"
        free.append(int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text()))
    return min(free)
