"""Where a training run is: everything besides weights and moments that a resumed run needs. Plain numbers, saved as JSON."""

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Course:
    """The state of a run between two steps."""

    step: int = 0  # batches done
    tokens: int = 0  # trained targets so far
    skipped: int = 0  # updates that were not made
    spikes_at: list[int] = field(default_factory=list)  # the steps of the last thousand left out for a spike
    broken_at: list[int] = field(default_factory=list)  # the same for what is not finite or was vetoed
    applied: list[float] = field(default_factory=list)  # losses of the last applied steps
    lowest: float = math.inf  # the lowest median of such losses so far
    risen: int = 0  # steps in a row whose loss was far above it
    windows: list[list[int]] = field(
        default_factory=list
    )  # [step, count]: from this step on so many data indices are skipped
    best: float = math.inf
    best_step: int = -1
    bests: list[int] = field(default_factory=list)  # the steps that were the best one when they were evaluated
    anchor: float = math.inf  # early stopping: moves only on a gain above `threshold`
    stale: int = 0  # evaluations since the anchor moved
    evaluated: list[int] = field(default_factory=list)  # steps of the evaluations, oldest first
    owes_evaluation: bool = False  # a signal cut the evaluation after this step
    done: bool = False

    @property
    def index(self) -> int:
        """The number of the batch that this step reads: the step, moved behind windows that a rollback gave up."""
        return self.step + sum(count for first, count in self.windows if self.step >= first)

    def compare(self, value: float, *, threshold: float, patience: int) -> None:
        """Take in a validation loss: is it the best, did it move the anchor of early stopping, is the run over?"""
        if value < self.best:
            self.best, self.best_step = value, self.step
            self.bests = [*self.bests, self.step]
        if value < self.anchor - threshold:
            self.anchor, self.stale = value, 0
        else:
            self.stale += 1
        self.done = patience > 0 and self.stale >= patience

    def results(self, rows: list[dict[str, Any]], published: int) -> dict[str, Any]:
        """The final numbers of a run, from its curve and the step whose weights are published."""
        found: dict[str, Any] = {"steps": self.step, "tokens": self.tokens, "published_step": published}
        trained = [row for row in rows if "loss" in row]
        if trained:
            found["final"] = {name: trained[-1][name] for name in ("loss", "bpb") if name in trained[-1]}
        if math.isfinite(self.best):
            chosen = [row for row in rows if row["step"] == self.best_step and "val/bpb" in row]
            found["best"] = {"val_loss": self.best, "step": self.best_step}
            found["best"] |= {"val_bpb": chosen[-1]["val/bpb"]} if chosen else {}
        return found
