"""A stage that trains more than once: each run of `fit` is a phase, with states and a curve of its own.

    phases = Phases(job)
    fit(model, ..., phases.begin("adapt"), last=False)      steps 0 .. n of the stage's curve
    fit(model, ..., phases.begin("sft"))                    steps n .. of it

A killed stage resumes in the phase that it was in: a phase that has ended is found ended, and gives the weights that it
published. The stage's curve holds the phases one after another, their steps counted on, so that they are one run in DVC
and MLflow. A phase that is given a prefix logs under it (`control/loss`), beside the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeline.run.tracking import Number, Tracker
from pipeline.run.workdir import Job


class Phases:
    """The phases of one stage, in their order."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._curves: list[PhaseTracker] = []

    def begin(self, name: str, *, prefix: str = "") -> Job:
        """The job of the next phase. The one before must have ended."""
        offset = self._curves[-1].end if self._curves else 0
        tracker = PhaseTracker(self._job.tracker, name, offset, prefix)
        self._curves.append(tracker)
        folder = self._job.folder / "parts" / name
        folder.mkdir(parents=True, exist_ok=True)
        item = f"{self._job.item}.{name}" if self._job.item else name
        return replace(self._job, item=item, folder=folder, tracker=tracker)


class PhaseTracker:
    """A `Tracker` for `fit`: it keeps the phase's own rows, and gives them to the stage's with their steps counted
    on.
    """

    def __init__(self, whole: Tracker, name: str, offset: int, prefix: str) -> None:
        self._whole, self._name, self._offset, self._prefix = whole, name, offset, prefix
        self._before = list(whole.rows)  # of the phases before
        self.rows: list[dict[str, Number]] = []
        self._counted = 0  # tokens that the stage's number holds of this phase
        self.speed: dict[str, Any] = whole.speed.setdefault(name, {})

    @property
    def end(self) -> int:
        """The step of the stage at which this phase ended."""
        return self._offset + int(self.rows[-1]["step"] if self.rows else 0)

    def log(self, step: int, values: Mapping[str, Number]) -> None:
        """As `Tracker.log`, with the phase's own steps."""
        if self.rows and self.rows[-1]["step"] == step:
            self.rows[-1].update(values)
        else:
            self.rows.append({"step": step, **values})
        self._give()

    def restore(self, rows: list[dict[str, Number]]) -> None:
        """Continue the curve of a resumed state."""
        self.rows = list(rows)
        self._whole.restore(self._before)
        self._give()

    def _give(self) -> None:
        """The stage's curve: the phases before, then this one."""
        named = [
            {"step": self._offset + int(row["step"]), "phase": self._name}
            | {self._prefix + name: value for name, value in row.items() if name != "step"}
            for row in self.rows
        ]
        if self._before and named and named[0]["step"] == self._before[-1]["step"]:  # where the phases meet
            named[0] = self._before[-1] | {k: v for k, v in named[0].items() if k not in self._before[-1]}
            self._whole.rows = self._before[:-1] + named
        else:
            self._whole.rows = self._before + named

    def report(self, **numbers: Any) -> None:
        """Final numbers of this phase, under its name; those of phases without a prefix are the stage's headlines too.

        Of these the last one's best evaluation counts, and the tokens of all.
        """
        own = self._whole.final.setdefault(self._name, {})
        own.update(numbers)
        if self._prefix:
            return
        before = self._whole.final.get("tokens", 0) - self._counted
        self._counted = int(own.get("tokens", 0))
        said = {"tokens": before + self._counted} if "tokens" in own else {}
        self._whole.final |= said | ({"best": own["best"]} if "best" in own else {})

    def flush(self) -> None:
        """As the stage's."""
        self._whole.flush()

    def back_to(self, step: int) -> None:
        """As the stage's, from this phase's step."""
        self._whole.back_to(self._offset + step)
