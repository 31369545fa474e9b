"""What the loop asks of a batch, a stream and a stage: the shapes that `fit` works with.

`Stream` is a stream of given data (streams/), `Rolling` one that the policy fills itself (reinforcement/rollout.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from pipeline.learning.objectives import Loss


class Batch(Protocol):
    """What fit needs to know of a batch; the loss knows the rest."""

    @property
    def counts(self) -> dict[str, int]: ...  # what sums are divided by; always "tokens", the trained targets
    def to(self, device: torch.device) -> Any: ...


class Stream(Protocol):
    """Batches as a pure function of (seed, step); see streams/corpus.py."""

    fingerprint: str
    tokens_per_epoch: int

    def rows(self, step: int, context: int) -> np.ndarray: ...
    def batch(self, step: int, context: int, rows: np.ndarray) -> Any: ...
    def evaluation(self, tokens: int) -> Iterator[Any]: ...


class Rolling(Stream, Protocol):
    """A stream that the policy itself fills, once every `steps_per_rollout` steps; states are saved between fills only."""

    steps_per_rollout: int

    def fill(self, step: int) -> dict[str, float]:
        """Sample and score the answers of the next `steps_per_rollout` steps; what is to be logged of them."""
        ...

    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: dict[str, Any]) -> None: ...


LossFunction = Callable[[Any, Any], Loss]  # of the model and a batch, whose types the stage knows
Values = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Watchers:
    """What a stage looks at besides the loss. Each may raise GateError."""

    first: Callable[[Values], None] | None = None  # the first fill, loss and metrics, before an update
    evaluate: Callable[[int], Values] | None = None  # at step 0, every eval_steps, and at the end
    logged: Callable[[list[dict[str, Any]]], None] | None = None  # the curve, after each new row
    micro: Callable[[int, bool], None] | None = (
        None  # before each micro-batch of a step: its number, and whether it counts
    )
    gradients_at: int | None = 0  # the step whose gradients must reach every group; a zero head lets none through at 0
