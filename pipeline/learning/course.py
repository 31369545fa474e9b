"""Where a training run is: everything besides weights and moments that a resumed run needs. Plain numbers, saved as JSON."""

import math
from dataclasses import dataclass


@dataclass
class Course:
    """The state of a run between two steps."""

    step: int = 0  # batches done
    tokens: int = 0  # trained targets so far
    skipped: int = 0
    skipped_in_row: int = 0
    best: float = math.inf
    best_step: int = -1
    anchor: float = math.inf  # early stopping: moves only on a gain above `threshold`
    stale: int = 0  # evaluations since the anchor moved
    done: bool = False

    def compare(self, value: float, *, threshold: float, patience: int) -> None:
        """Take in a validation loss: is it the best, did it move the anchor of early stopping, is the run over?"""
        if value < self.best:
            self.best, self.best_step = value, self.step
        if value < self.anchor - threshold:
            self.anchor, self.stale = value, 0
        else:
            self.stale += 1
        self.done = patience > 0 and self.stale >= patience
