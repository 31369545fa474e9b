"""Decoding with a memory: what new tokens of a cache's rows choose from.

Beside keys and values the cache keeps, of each layer that reads, the normed states that units choose from, and the mean that a row's
current unit chose from: it is computed anew when a unit begins, and where a row was rewound. Running sums would be smaller, but a
row of a server is cut back to any length (drafts, prompts that begin alike), and a sum does not know what its parts were. The keys and
values of the bank are projected once for a cache.

With routing by prompt, what a row gets first is the block before the answer, all but its last token, which has a loss already. It must
come at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.model.cache import KVCache
from pipeline.model.memory_units import Units, units


@dataclass(frozen=True)
class Unit:
    """New tokens of a row that read together, and the positions of the row that they choose from."""

    row: int
    number: int  # of the unit in its row
    begin: int
    end: int
    places: np.ndarray  # in the line
    begun: bool  # some of its tokens came before


def going_on(memory: Any, layout: Any) -> Callable[[int, Tensor], Tensor]:
    """How the line of a growing cache reads a `Memory`; `layout` has `cache`, `rows`, `counts` and `past`, and the tokens are counted in.

    Raises ValueError for routing by sequence: a text that is still to come cannot choose.
    """
    cache: KVCache = layout.cache
    if memory.config.leaky:
        raise ValueError(
            "memory: routing by sequence reads the whole text, so it cannot be decoded; train one that routes by chunk"
        )
    where = cache.keys[0].device
    own = [
        [past - cache.before(row) + i for i in range(count)]
        for row, count, past in zip(layout.rows, layout.counts, layout.past)
    ]
    row_of = torch.tensor([row for row, places in zip(layout.rows, own) for _ in places], device=where)
    places = torch.tensor([place for some in own for place in some], device=where)
    cuts = _cuts(memory, layout)
    num = len(places)
    new = [at for at, unit in enumerate(cuts) if not unit.begun or cache.unit_of[unit.row] != unit.number]
    for unit in cuts:
        cache.unit_of[unit.row] = unit.number
    if memory.config.routing == "token":
        line = torch.arange(num, device=where)
        together = Units(line[:, None], None, line)
    else:
        spans = [unit.places for unit in cuts]
        together = units(spans, spans, num, where)
    rows = torch.tensor([unit.row for unit in cuts], device=where)

    def read(layer: int, x: Tensor) -> Tensor:
        if layer not in memory.bank_of:
            return x
        reader, bank = memory.of(layer)
        if layer not in cache.banks:
            cache.banks[layer] = reader.projected(bank)
        normed = reader.norm(x)
        if together.sources is None:
            u = normed
        else:
            cache.states[layer][row_of, places] = normed.to(cache.states[layer].dtype)
            u = _means(cache, layer, cuts, rows, new)
        return x + reader.out(normed, reader.attend(normed, together, reader.route(u), bank, cache.banks[layer]))

    return read


def _means(cache: KVCache, layer: int, cuts: list[Unit], rows: Tensor, new: list[int]) -> Tensor:
    """u (U, D) of units: kept from the step before, but for the `new` ones. A row keeps that of its last unit."""
    u = cache.chose[layer][rows]
    for number in new:
        unit = cuts[number]
        u[number] = cache.state(layer, unit.row, unit.begin, unit.end).sum(0) / max(1, unit.end - unit.begin)
        cache.chose[layer][unit.row] = u[number]
    return u


def _cuts(memory: Any, layout: Any) -> list[Unit]:
    """The units of the new tokens, row by row."""
    cache, found, first = layout.cache, [], 0
    by_prompt, window = memory.config.routing == "prompt", memory.config.window
    for row, count, past in zip(layout.rows, layout.counts, layout.past):
        if by_prompt and past == 0:
            cache.asked[row] = count - 1
        asked = cache.asked_of(row) if by_prompt else 0
        line = np.arange(first, first + count)
        if asked:
            found.append(Unit(row, 0, 0, asked, line, begun=past > 0))
        else:
            for number in range(past // window, (past + count - 1) // window + 1):
                inside = (past + np.arange(count)) // window == number
                found.append(Unit(row, number, max(0, number - 1) * window, number * window, line[inside], begun=past > number * window))  # fmt: skip
        first += count
    return found
