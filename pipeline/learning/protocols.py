"""What the training loop asks of a batch, a stream and a loss, and what its helpers read of a run.

    Batch         counts, and a move to a device; the loss reads the rest
    Stream        batches of given data, as a pure function of (seed, step): batches/
    Rolling       a stream that the policy fills with its own answers: rl/rollout.py
    TrainingRun   the part of `fit.Run` that the learning-rate finder, the memory plan and the speed report use

The helpers stand below the loop, so they do not import it. Protocols check types alone: nothing inherits from them.
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
    """A micro-batch, as far as the loop reads it."""

    @property
    def counts(self) -> dict[str, int]: ...  # what sums are divided by; always "tokens", the trained targets
    def to(self, device: torch.device) -> "Batch": ...


class Stream(Protocol):
    """Batches as a pure function of (seed, step); see batches/corpus.py."""

    fingerprint: str
    tokens_per_epoch: int

    def rows(self, step: int, context: int) -> np.ndarray: ...
    def batch(self, step: int, context: int, rows: np.ndarray) -> Batch: ...
    def evaluation(self, tokens: int) -> Iterator[Batch]: ...


class Rolling(Stream, Protocol):
    """A stream that the policy fills once every `steps_per_rollout` steps. States are saved between fills only."""

    steps_per_rollout: int

    def fill(self, step: int) -> dict[str, float]:
        """Sample and score the answers of the next `steps_per_rollout` steps. Returns numbers to log."""
        ...

    def state(self) -> JsonObject: ...
    def load_state(self, state: JsonObject) -> None: ...


class TrainingRun(Protocol):
    """A run of `fit`, as its helpers read it."""

    job: Job
    config: TrainingConfig
    stream: Stream
    rolling: Rolling | None  # the stream, where the policy fills it
    hardware: Hardware
    ranks: Ranks
    model: nn.Module  # wrapped for averaged gradients
    plain: nn.Module  # the same weights without the wrapper
    optimizers: Optimizers
    scaler: Scaler
    steps: int  # of the whole run
    micro_batch: int  # rows in one forward pass
    seen: int  # positions that this call of fit has trained on, over all ranks

    def batches(self, step: int, index: int) -> tuple[np.ndarray, list[Batch]]:
        """The rows of global batch number `index`, and this rank's micro-batches of them at the context of `step`."""
        ...

    def backward(self, batches: list[Batch], counts: dict[str, int]) -> Totals:
        """Accumulate gradients. Returns this rank's sums."""
        ...
