"""Other places for the curve besides DVC and MLflow: `runtime.trackers: [tensorboard, wandb]`, through Accelerate's trackers.

They come with the extra `trackers`. TensorBoard's files lie in the work folder (`tensorboard --logdir .work`); Weights & Biases' own environment
variables say where its runs go (WANDB_MODE=offline keeps them in the work folder).

Not promised: that they hold the steps between the last saved state and a `kill -9` only once, or that Weights & Biases, which refuses
steps that it has, shows what follows a rollback.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError


class Others:
    """The trackers that a person asked for; opened at the first row. Raises ConfigError for one that is not installed."""

    def __init__(self, names: Sequence[str], run: str, folder: Path, parameters: dict[str, Any]) -> None:
        from accelerate.utils import is_tensorboard_available, is_wandb_available

        have = {"tensorboard": is_tensorboard_available(), "wandb": is_wandb_available()}
        if missing := [name for name in names if not have[name]]:
            raise ConfigError(
                f"runtime.trackers: {missing[0]} is not installed: pip install '.[trackers]', or take it off the list"
            )
        self.names, self.run, self.folder, self.parameters = names, run, folder, parameters
        self.note = folder / "trackers.json"  # the last step that they hold
        self._last = json.loads(self.note.read_text())["step"] if self.note.is_file() else -1
        self._open: list[Any] = []

    def _start(self) -> None:
        from accelerate.state import PartialState
        from accelerate.tracking import TensorBoardTracker, WandBTracker

        PartialState()  # they ask it whether they are on the main process
        if "tensorboard" in self.names:
            self._open.append(TensorBoardTracker(self.run, str(self.folder / "tensorboard")))
        if "wandb" in self.names:
            self._open.append(WandBTracker("stagecoach", dir=str(self.folder), name=self.run))
        shown = {k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in self.parameters.items()}
        for tracker in self._open:
            tracker.start()
            tracker.store_init_configuration(shown)

    def log(self, rows: list[dict[str, Any]]) -> None:
        """Rows of the curve; steps that they hold already are left out."""
        fresh = [row for row in rows if int(row["step"]) > self._last]
        if not fresh:
            return
        if not self._open:
            self._start()
        for row in fresh:
            numbers = {k: v for k, v in row.items() if k != "step" and isinstance(v, int | float) and math.isfinite(v)}
            for tracker in self._open:
                tracker.log(numbers, step=int(row["step"]))
        self._last = int(fresh[-1]["step"])
        self.note.write_text(json.dumps({"step": self._last}))

    def back_to(self, step: int) -> None:
        """Take the steps after this one again."""
        self._last = min(self._last, step)
        self.note.write_text(json.dumps({"step": self._last}))

    def finish(self) -> None:
        """Close them."""
        for tracker in self._open:
            tracker.finish()
