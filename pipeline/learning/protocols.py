"""What the training loop requires of batches, streams and losses, and what its helpers require of a run.

    Batch         counts, and `to`, which moves the batch to a device; only the loss uses the rest
    Stream        batches of fixed data, as a pure function of (seed, step): batches/
    Rolling       a stream filled with the policy's own answers: rl/rollout.py
    TrainingRun   the part of `fit.Run` used by the learning-rate finder, the memory planner and the speed report

The helpers are a layer below the loop, so they do not import it. The protocols are only for type checking: no
implementation inherits from them.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch
from torch import nn

from pipeline.learning.losses import Loss
from pipeline.learning.optim import Optimizers
from pipeline.learning.processes import Ranks
from pipeline.learning.settings import TrainingConfig
from pipeline.learning.update import Scaler, Totals
from pipeline.run.device import Hardware
from pipeline.run.types import JsonObject
from pipeline.run.workdir import Job

LossFunction = Callable[..., Loss]  # (model, batch) -> Loss; the stage knows the types of both


class Batch(Protocol):
    """A micro-batch, as seen by the loop."""

    @property
    def counts(self) -> dict[str, int]: ...  # loss denominators; always includes "tokens", the trained targets
    def to(self, device: torch.device) -> "Batch": ...


class Stream(Protocol):
    """Batches as a pure function of (seed, step); see batches/corpus.py."""

    fingerprint: str
    tokens_per_epoch: int

    def rows(self, step: int, context: int) -> np.ndarray: ...
    def batch(self, step: int, context: int, rows: np.ndarray) -> Batch: ...
    def evaluation(self, tokens: int) -> Iterator[Batch]: ...


class Rolling(Stream, Protocol):
    """A stream filled by the policy every `steps_per_rollout` steps. States are saved only between fills."""

    steps_per_rollout: int

    def fill(self, step: int) -> dict[str, float]:
        """Sample and score the answers for the next `steps_per_rollout` steps. Returns metrics to log."""
        ...

    def state(self) -> JsonObject: ...
    def load_state(self, state: JsonObject) -> None: ...


class TrainingRun(Protocol):
    """A run of `fit`, as seen by its helpers."""

    job: Job
    config: TrainingConfig
    stream: Stream
    rolling: Rolling | None  # the stream, if the policy fills it
    hardware: Hardware
    ranks: Ranks
    model: nn.Module  # wrapped to average gradients
    plain: nn.Module  # the same weights without the wrapper
    optimizers: Optimizers
    scaler: Scaler
    steps: int  # of the entire run
    micro_batch: int  # rows in one forward pass
    seen: int  # positions trained on in this call to fit, over all ranks

    def batches(self, step: int, index: int) -> tuple[np.ndarray, list[Batch]]:
        """The rows of global batch `index`, and this rank's micro-batches of them at the context length of `step`."""
        ...

    def backward(self, batches: list[Batch], counts: dict[str, int]) -> Totals:
        """Accumulate gradients. Returns this rank's sums."""
        ...
