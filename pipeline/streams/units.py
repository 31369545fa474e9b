"""A stream whose batches know how many units of a memory they hold: what the router's losses are divided by.

A batch knows its counts before the forward pass, so that the loop can divide by those of the whole step (specs: training, 1).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.model.memory_config import MemoryConfig
from pipeline.model.memory_units import cut
from pipeline.streams.batch import TokenBatch


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
    units = cut(batch.positions.flatten(), routing=config.routing, window=config.window,
                padding=batch.documents.flatten() < 0, trained=batch.targets.flatten() >= 0)  # fmt: skip
    tensors = {name: getattr(batch, name) for name in ("input_ids", "targets", "documents", "positions")}
    return UnitBatch(**tensors, num_bytes=batch.num_bytes, num_units=len(units.places))
