"""All metrics and logging: the step curve, final metrics, MLflow, other trackers, the progress bar.

    metrics/<stage>.csv             the curve, a row per logged step          (DVC plots)
    metrics/<stage>.json            final numbers and `lineage`
    metrics/training/<stage>.json   the headline numbers from that file       (DVC metrics)
    .work/.../speed.json            speed and hardware: never in an out
    logs/<stage>.log, .jsonl        a stage's messages, and its live curve with speed and memory
    MLflow                          one run per built stage (`pipeline/run/mlflow_store.py`)
    runtime.trackers                TensorBoard, Weights & Biases: the curve, through Accelerate's trackers

DVC's files contain no timestamps, ids or host names: identical runs give identical bytes. An MLflow failure causes one
warning and never stops the run. The other trackers come with the extra `trackers`. TensorBoard's files are in the work
folder (`tensorboard --logdir .work`); the environment variables of Weights & Biases set where its runs go
(WANDB_MODE=offline keeps them in the work folder).

A row is sent once it is complete, within SEND_SECONDS of its step or after its evaluation, with `speed/` values that
are not in any out. Steps that a resumed run repeats are sent only once: they are identical.

Not guaranteed: that MLflow receives what was in flight when the launcher was killed; that the other trackers have each
step only once after a `kill -9`; that Weights & Biases, which rejects steps it already has, shows the steps after a
rollback.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from pipeline.run.device import rank
from pipeline.run.errors import ConfigError
from pipeline.run.mlflow_store import LATER, SHORT_WAIT, Description, MlflowRun, Number, Spool, names_at, unknown
from pipeline.run.types import JsonObject

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

SEND_SECONDS = 5.0  # between two sends of the curve
LINE_SECONDS = 10.0  # between two progress lines if there is no terminal
LOG = logging.getLogger("stagecoach.stage")  # receives the output of `say`; goes nowhere without `log_to`


class Tracker:
    """The numbers of one stage run. `parameters` and `inputs` (path -> digest) describe the run for MLflow. `quiet`:
    open neither MLflow nor other trackers, as on ranks other than 0; `others`: the names in `runtime.trackers`; `live`:
    the file for the live curve.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        tags: dict[str, str],
        parameters: JsonObject,
        *,
        quiet: bool,
        inputs: dict[str, str] | None = None,
        others: Sequence[str] = (),
        live: Path | None = None,
    ) -> None:
        self.name, self.folder = name, folder
        self.rows: list[dict[str, Number]] = []
        self.final: JsonObject = {}
        self.speed: JsonObject = {}
        self._logged = 0  # rows already in MLflow
        self._sent_at = -SEND_SECONDS
        self._measured: dict[int, dict[str, Number]] = {}  # by step: speed and memory
        # once the run has succeeded: a model to register, files to store, a summary for the whole experiment
        self._model: tuple[Path, dict[str, str]] | None = None
        self._files: list[Path] = []
        self._summary: tuple[dict[str, float], list[Path]] = ({}, [])
        quiet = quiet or rank() != 0
        self._mlflow: Spool | MlflowRun | None = None
        parameters = flatten(parameters, separator=".")
        if not quiet:
            described = Description(name, tags, parameters, inputs or {})
            spools = os.environ.get("STAGECOACH_MLFLOW") == LATER
            self._mlflow = Spool(described, folder) if spools else MlflowRun(described, folder, say)
        self._others = None if quiet or not others else Others(others, name, folder, parameters)
        self._live = None if quiet else live

    def log(self, step: int, values: Mapping[str, Number]) -> None:
        """Add values to the curve at `step`; another call with the same step extends the same row."""
        if self.rows and self.rows[-1]["step"] == step:
            self.rows[-1].update(values)
        else:
            self.rows.append({"step": step, **values})

    def restore(self, rows: list[dict[str, Number]]) -> None:
        """Continue the curve of a resumed run."""
        self.rows = list(rows)
        self._logged = 0  # MlflowRun.log and Others.log skip the steps they already have

    def report(self, **numbers: object) -> None:
        """Add final numbers to metrics/<stage>.json."""
        self.final.update(numbers)

    def register(self, folder: Path, **tags: str) -> None:
        """Register the result with MLflow as a model version, once the run has succeeded."""
        self._model = (folder, tags)

    def store(self, *files: Path) -> None:
        """Store files with the MLflow run, once this run has succeeded."""
        self._files += files

    def summarize(self, numbers: Mapping[str, float], *files: Path) -> None:
        """Log numbers and files to the MLflow run of the whole experiment, once this run has succeeded."""
        self._summary = (dict(numbers), list(files))

    def headlines(self) -> dict[str, Number]:
        """The final numbers that `dvc metrics show` and `dvc exp show` print: best validation, tokens seen."""
        best = self.final.get("best", {})
        headlines = {name: best[name] for name in ("val_loss", "val_bpb") if name in best}
        return headlines | {name: self.final[name] for name in ("tokens",) if name in self.final}

    def flush(self) -> None:
        """Send the curve to the trackers, except its last row, which may still grow. Called after each checkpoint."""
        self._send(max(self._logged, len(self.rows) - 1))

    def beat(self, measured: Mapping[str, float]) -> None:
        """Add what was `measured` since the previous row to the last row, which is complete; show it live."""
        if not self.rows:
            return
        step = int(self.rows[-1]["step"])
        self._measured[step] = {f"speed/{name}": value for name, value in measured.items()}
        if self._live is not None:
            try:
                self._live.parent.mkdir(exist_ok=True)
                with self._live.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(self.rows[-1] | self._measured[step]) + "\n")
            except OSError as error:
                say(f"warning: cannot write {self._live}: {error.strerror}")
                self._live = None
        if time.monotonic() - self._sent_at >= SEND_SECONDS:
            self._send(len(self.rows))

    def back_to(self, step: int) -> None:
        """Go back to a step: the next rows replace those after it."""
        for tracker in (self._mlflow, self._others):
            if tracker is not None:
                tracker.back_to(step)

    def _send(self, end: int) -> None:
        rows = [row | self._measured.get(int(row["step"]), {}) for row in self.rows[self._logged : end]]
        for tracker in (self._mlflow, self._others):
            if tracker is not None:
                tracker.log(rows)
        self._logged, self._sent_at = end, time.monotonic()

    def abandon(self, status: str) -> None:
        """Set the MLflow status of a run that ended early: "KILLED" (resumable) or "FAILED", without a long wait."""
        if self._mlflow is not None:
            self._mlflow.end(status, wait=SHORT_WAIT)

    def finish(self, system: Sequence[tuple[int, Mapping[str, float]]] = ()) -> None:
        """Close the run: write speed.json; send final metrics, `system` metrics (milliseconds, values) and status."""
        self._send(len(self.rows))
        if self._mlflow is not None:
            write_json(self.folder / "speed.json", self.speed)  # device and timings do not belong in an out
            self._mlflow.system(system)
            if self._model is not None:
                self._mlflow.register(*self._model)
            if self._files:
                self._mlflow.artifacts(self._files)
            if any(self._summary):
                self._mlflow.summarize(*self._summary)
            self._mlflow.finish(flatten(self.final) | {f"speed/{k}": v for k, v in flatten(self.speed).items()})
        if self._others is not None:
            self._others.finish()


class Others:
    """The trackers of `runtime.trackers`, opened at the first row. Raises ConfigError for one that is not installed."""

    def __init__(self, names: Sequence[str], run: str, folder: Path, parameters: JsonObject) -> None:
        from accelerate.utils import is_tensorboard_available, is_wandb_available

        installed = {"tensorboard": is_tensorboard_available(), "wandb": is_wandb_available()}
        if missing := [name for name in names if not installed[name]]:
            raise ConfigError(
                f"runtime.trackers: {missing[0]} is not installed; run pip install '.[trackers]', or remove it"
                " from the list"
            )
        self.names, self.run, self.folder, self.parameters = names, run, folder, parameters
        self.note = folder / "trackers.json"  # stores the last step sent
        known = json.loads(self.note.read_text()) if self.note.is_file() else {}
        self._last, self._names = int(known.get("step", -1)), set[str](known.get("names", ()))
        self._open: list[GeneralTracker] = []

    def _start(self) -> None:
        from accelerate.state import PartialState
        from accelerate.tracking import TensorBoardTracker, WandBTracker

        PartialState()  # tells the trackers whether this is the main process
        if "tensorboard" in self.names:
            self._open.append(TensorBoardTracker(self.run, str(self.folder / "tensorboard")))
        if "wandb" in self.names:
            self._open.append(WandBTracker("stagecoach", dir=str(self.folder), name=self.run))
        configuration = {
            k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in self.parameters.items()
        }
        for tracker in self._open:
            tracker.start()
            tracker.store_init_configuration(configuration)

    def log(self, rows: list[dict[str, Number]]) -> None:
        """Log rows of the curve, skipping what the trackers already have."""
        if not (new_rows := unknown(rows, self._last, self._names)):
            return
        if not self._open:
            self._start()
        for row in new_rows:
            numbers = {k: v for k, v in row.items() if k != "step" and isinstance(v, int | float) and math.isfinite(v)}
            for tracker in self._open:
                tracker.log(numbers, step=int(row["step"]))
        self._names = names_at(new_rows[-1], self._last, self._names)
        self._last = int(new_rows[-1]["step"])
        self._write_note()

    def back_to(self, step: int) -> None:
        """Accept the steps after this one again."""
        self._last = min(self._last, step)
        self._write_note()

    def _write_note(self) -> None:
        self.note.write_text(json.dumps({"step": self._last, "names": sorted(self._names)}))

    def finish(self) -> None:
        """Close the trackers."""
        for tracker in self._open:
            tracker.finish()


def clean(value: Any) -> Any:
    """Convert a number, short string or nested dict for DVC: NaN and infinity become text, floats keep 7 digits."""
    if isinstance(value, Mapping):
        return {str(key): clean(entry) for key, entry in value.items()}
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else "not finite"
    return value


def duration(seconds: float) -> str:
    """A time as text: `14 s`, `3 min`, `1 h 20 min`."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def flatten(values: Mapping[str, Any], prefix: str = "", separator: str = "/") -> JsonObject:
    """Flatten nested dicts into one with names such as `a/b`."""
    flat: JsonObject = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, name + separator, separator) if isinstance(value, Mapping) else {name: value}
    return flat


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write a metrics file: sorted keys, two-space indent, trailing newline."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(clean(value), indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def write_curve(path: Path, rows: list[dict[str, Number]]) -> None:
    """Write the curve as CSV: `step` first, then all names, sorted; missing values are empty."""
    names = ["step", *sorted({name for row in rows for name in row} - {"step"})]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: clean(value) for name, value in row.items()} for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(buffer.getvalue(), encoding="utf-8")


class Progress:
    """A progress bar with ETA on a terminal, shown after two seconds; elsewhere, a line every LINE_SECONDS."""

    def __init__(self, total: float | None, desc: str, unit: str, initial: float = 0) -> None:
        self._bar = tqdm(
            total=total,
            desc=desc,
            unit=unit,
            initial=initial,
            delay=2 if sys.stderr.isatty() else 0,
            unit_scale=True,
            leave=False,
            disable=not sys.stderr.isatty() or "LOCAL_RANK" in os.environ,
            dynamic_ncols=True,
        )
        self.desc, self.total, self.unit, self.done = desc, total, unit, initial
        self._initial = initial
        self._start = self._last = time.monotonic()
        self._note = ""

    def update(self, amount: float = 1) -> None:
        """Count `amount` more units as done."""
        self.done += amount
        self._bar.update(amount)
        now = time.monotonic()
        if self._bar.disable and now - self._last >= LINE_SECONDS and rank() == 0:
            self._last = now
            elapsed = now - self._start
            rate = (self.done - self._initial) / elapsed
            total = f"/{self.total:.0f}" if self.total else ""
            left = f", about {duration((self.total - self.done) / rate)} left" if self.total and rate else ""
            say(f"{self.desc}: {self.done:.0f}{total} {self.unit}{self._note}, {duration(elapsed)}{left}")

    def note(self, text: str) -> None:
        """Show a short text after the numbers, such as the loss."""
        self._note = f", {text}"
        self._bar.set_postfix_str(text, refresh=False)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


@contextmanager
def progress(*, total: float | None = None, desc: str, unit: str = "it", initial: float = 0) -> Iterator[Progress]:
    """Show the progress of a task with `total` units (None: unknown); a resumed task starts at `initial`."""
    bar = Progress(total, desc, unit, initial)
    try:
        yield bar
    finally:
        bar.close()


def say(text: str) -> None:
    """Print a line to stderr, above any progress bar, and to the log; rank 0 only."""
    if rank() == 0:
        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()
        if LOG.handlers:  # otherwise a program that sets up logging, like the server, would print it twice
            LOG.info("%s", text)


class _LogFile(logging.FileHandler):
    """A log file that never stops a run: if it cannot be opened or written, it is dropped."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        LOG.removeHandler(self)


def log_to(path: Path) -> None:
    """Append the output of `say` to a file from now on, each line with a timestamp."""
    for handler in list(LOG.handlers):
        LOG.removeHandler(handler)
        handler.close()
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError:
        return
    handler = _LogFile(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
