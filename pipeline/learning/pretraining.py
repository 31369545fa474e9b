"""Next-token training (stream, loss and watchers for `fit` on plain text), and stages that train in phases.

    next_tokens(model, stream, weights, job) -> stream, loss, watchers

A wing provides the following for a model with the wing's hook (model/layers.py):

    loss_keys      () -> a dataclass of weights for the hook's extra losses; its fields are keys of the stages' blocks
    next_tokens    like the function below; without the hook, returns None, or raises ConfigError if weights are set

**Phases** are for stages that train more than once: each run of `fit` is a phase with its own states and curve.

    phases = Phases(job)
    fit(model, ..., phases.begin("adapt"), last=False)      steps 0 .. n of the stage's curve
    fit(model, ..., phases.begin("sft"))                    steps n .. onward

A killed stage resumes in its last phase: for finished phases, `fit` only loads the final state and published weights.
The stage's curve concatenates the phases with continuous steps, so they form one run in DVC and MLflow. A phase with a
prefix logs under that prefix (`control/loss`), alongside the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline import wings
from pipeline.batches.batch import TokenBatch, TokenStream
from pipeline.learning import losses
from pipeline.learning.fit import Watchers
from pipeline.learning.losses import Loss, Term
from pipeline.model.transformer import Transformer
from pipeline.run.tracking import Number, Tracker
from pipeline.run.types import JsonObject
from pipeline.run.workdir import Job

KEYS = [offer() for offer in wings.each("loss_keys")]
Training = tuple[TokenStream, Callable[[Transformer, Any], Loss], Watchers]  # the loss takes batches from the stream


@dataclass(frozen=True, kw_only=True)
class LossWeights(*KEYS):
    """Weights of the losses added by wings, relative to the text loss."""

    def __post_init__(self) -> None:
        for keys in KEYS:
            keys.__post_init__(self)


def next_tokens(model: Transformer, stream: TokenStream, weights: LossWeights, job: Job, *, tokens: int) -> Training:
    """The stream, loss and watchers for `fit`. `tokens` is the evaluation size. Raises ConfigError if a wing does."""
    for offer in wings.each("next_tokens"):
        if (training := offer(model, stream, weights, job, tokens=tokens)) is not None:
            return training
    return stream, plain_loss, Watchers()


def plain_loss(model: Transformer, batch: TokenBatch) -> Loss:
    """Next-token cross-entropy only."""
    return Loss([Term("loss", losses.read_out(model, batch, losses.next_token))])


# -- training in phases ------------------------------------------------------------------------------------------------


class Phases:
    """The phases of one stage, in order."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._curves: list[PhaseTracker] = []

    def begin(self, name: str, *, prefix: str = "") -> Job:
        """The job of the next phase. The previous one must have ended."""
        offset = self._curves[-1].end if self._curves else 0
        tracker = PhaseTracker(self._job.tracker, name, offset, prefix)
        self._curves.append(tracker)
        folder = self._job.folder / "parts" / name
        folder.mkdir(parents=True, exist_ok=True)
        item = f"{self._job.item}.{name}" if self._job.item else name
        return replace(self._job, item=item, folder=folder, tracker=tracker, family="")


class PhaseTracker:
    """A `Tracker` for one phase. Appends its rows to the stage's curve, and counts steps from the stage's start."""

    def __init__(self, stage: Tracker, name: str, offset: int, prefix: str) -> None:
        self._stage, self._name, self._offset, self._prefix = stage, name, offset, prefix
        self._earlier_rows = list(stage.rows)  # the rows of earlier phases
        self.rows: list[dict[str, Number]] = []
        self._reported_tokens = 0  # this phase's share of the stage's total
        self.speed: JsonObject = stage.speed.setdefault(name, {})

    @property
    def end(self) -> int:
        """The stage step at which this phase ended."""
        return self._offset + int(self.rows[-1]["step"] if self.rows else 0)

    def log(self, step: int, values: Mapping[str, Number]) -> None:
        """Like `Tracker.log`, with the phase's steps."""
        if self.rows and self.rows[-1]["step"] == step:
            self.rows[-1].update(values)
        else:
            self.rows.append({"step": step, **values})
        self._update_stage()

    def restore(self, rows: list[dict[str, Number]]) -> None:
        """Continue the curve of a resumed state."""
        self.rows = list(rows)
        self._stage.restore(self._earlier_rows)
        self._update_stage()

    def _update_stage(self) -> None:
        """Set the stage's curve: the rows of earlier phases, then those of this one."""
        rows: list[dict[str, Number]] = [
            {"step": self._offset + int(row["step"]), "phase": self._name}
            | {self._prefix + name: value for name, value in row.items() if name != "step"}
            for row in self.rows
        ]
        earlier = self._earlier_rows
        if earlier and rows and rows[0]["step"] == earlier[-1]["step"]:  # the step where the phases meet
            rows[0] = earlier[-1] | {k: v for k, v in rows[0].items() if k not in earlier[-1]}
            earlier = earlier[:-1]
        self._stage.rows = earlier + rows

    def report(self, **numbers: object) -> None:
        """Report final numbers under this phase's name.

        Phases without a prefix also set the stage's headline numbers: the last phase's best evaluation and the
        total number of tokens.
        """
        own = self._stage.final.setdefault(self._name, {})
        own.update(numbers)
        if self._prefix:
            return
        others = self._stage.final.get("tokens", 0) - self._reported_tokens
        self._reported_tokens = int(own.get("tokens", 0))
        tokens = {"tokens": others + self._reported_tokens} if "tokens" in own else {}
        self._stage.final |= tokens | ({"best": own["best"]} if "best" in own else {})

    def beat(self, measured: Mapping[str, float]) -> None:
        """Like `Tracker.beat`."""
        self._stage.beat(measured)

    def flush(self) -> None:
        self._stage.flush()

    def back_to(self, step: int) -> None:
        """Like `Tracker.back_to`, with the phase's step."""
        self._stage.back_to(self._offset + step)
