"""Numbers for people: the step curve, final metrics, MLflow, other trackers, the progress bar. Nothing else logs any.

    metrics/<stage>.csv             the curve, a row for each logged step     (DVC plots)
    metrics/<stage>.json            final numbers and `lineage`
    metrics/training/<stage>.json   the few of them that people compare       (DVC metrics)
    .work/.../speed.json            how fast and where: never in an out
    logs/<stage>.log, .jsonl        what a stage says, and its curve with speed and memory, as they come
    MLflow                          one run for each built stage (`pipeline/run/mlflow_store.py`)
    runtime.trackers                TensorBoard, Weights & Biases: the curve, through Accelerate's trackers

DVC's files contain no clock, id or host: equal runs give equal bytes. A failing MLflow costs one warning, never the
run. The other trackers come with the extra `trackers`. TensorBoard's files are in the work folder (`tensorboard
--logdir .work`); the environment variables of Weights & Biases set where its runs go (WANDB_MODE=offline keeps them in
the work folder).

A row is sent once it is complete, within SEND_SECONDS of its step or after its evaluation, with `speed/` values that no
out has. Steps that a resumed run repeats are sent once: they are equal.

Not promised: that MLflow has what was being delivered when the launcher was killed; that the other trackers have steps
only once after a `kill -9`; that Weights & Biases, which refuses steps that it has, shows what follows a rollback.
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

SEND_SECONDS = 5.0  # between two sendings of the curve
LINE_SECONDS = 10.0  # between two lines of progress where there is no terminal
LOG = logging.getLogger("stagecoach.stage")  # what `say` says; without `log_to` nobody listens


class Tracker:
    """The numbers of one stage run. `parameters` and `inputs` (path -> digest) describe it for MLflow; `quiet` opens no
    MLflow run and no others, as for ranks other than 0; `others`: names of `runtime.trackers`; `live`: the file of the
    curve as it comes.
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
        self.tokens_per_second = 0.0  # of the last `beat`
        self._logged = 0  # rows already in MLflow
        self._sent_at = -SEND_SECONDS
        self._measured: dict[int, dict[str, Number]] = {}  # by step: what the clock and the memory say
        # once the run has succeeded: a model to register, files to store, what to show of the whole experiment
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
        """Add values to the curve at `step`; a second call with the same step adds to the same row."""
        if self.rows and self.rows[-1]["step"] == step:
            self.rows[-1].update(values)
        else:
            self.rows.append({"step": step, **values})

    def restore(self, rows: list[dict[str, Number]]) -> None:
        """Continue the curve of a resumed state."""
        self.rows = list(rows)
        self._logged = 0  # MlflowRun.log and Others.log skip the steps that they have

    def report(self, **numbers: object) -> None:
        """Final numbers for metrics/<stage>.json."""
        self.final.update(numbers)

    def register(self, folder: Path, **tags: str) -> None:
        """Register what was made with MLflow as a version of the model, once the run has succeeded."""
        self._model = (folder, tags)

    def store(self, *files: Path) -> None:
        """Store files with MLflow's run, once it has succeeded."""
        self._files += files

    def summarize(self, numbers: Mapping[str, float], *files: Path) -> None:
        """Log numbers and files with MLflow's run of the whole experiment, once this one has succeeded."""
        self._summary = (dict(numbers), list(files))

    def headlines(self) -> dict[str, Number]:
        """The final numbers that `dvc metrics show` and `dvc exp show` print: best validation, tokens read."""
        best = self.final.get("best", {})
        headlines = {name: best[name] for name in ("val_loss", "val_bpb") if name in best}
        return headlines | {name: self.final[name] for name in ("tokens",) if name in self.final}

    def flush(self) -> None:
        """Send the curve to the trackers, without its last row, which may still grow. Called after each saved state."""
        self._send(max(self._logged, len(self.rows) - 1))

    def beat(self, measured: Mapping[str, float]) -> None:
        """Show the last row, which is complete, with what was `measured` since the one before."""
        if not self.rows:
            return
        self.tokens_per_second = measured.get("tokens_per_second", 0.0)
        step = int(self.rows[-1]["step"])
        self._measured[step] = {f"speed/{name}": value for name, value in measured.items()}
        if self._live is not None:
            try:
                self._live.parent.mkdir(exist_ok=True)
                with self._live.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(self.rows[-1] | self._measured[step]) + "\n")
            except OSError as error:
                say(f"warning: {self._live} is not written: {error.strerror}")
                self._live = None
        if time.monotonic() - self._sent_at >= SEND_SECONDS:
            self._send(len(self.rows))

    def back_to(self, step: int) -> None:
        """Go back to a step: the next rows replace those of the steps after it."""
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
        """Set MLflow's status of a run that ended early: "KILLED" (it resumes) or "FAILED", without a long wait."""
        if self._mlflow is not None:
            self._mlflow.end(status, wait=SHORT_WAIT)

    def finish(self, system: Sequence[tuple[int, Mapping[str, float]]] = ()) -> None:
        """Close the run: speed.json, MLflow's final metrics, `system` metrics (milliseconds, values) and status."""
        self._send(len(self.rows))
        if self._mlflow is not None:
            write_json(self.folder / "speed.json", self.speed)  # its device and clock belong to no out
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
                f"runtime.trackers: {missing[0]} is not installed: pip install '.[trackers]', or take it off the list"
            )
        self.names, self.run, self.folder, self.parameters = names, run, folder, parameters
        self.note = folder / "trackers.json"  # the last step that they have
        known = json.loads(self.note.read_text()) if self.note.is_file() else {}
        self._last, self._names = int(known.get("step", -1)), set[str](known.get("names", ()))
        self._open: list[GeneralTracker] = []

    def _start(self) -> None:
        from accelerate.state import PartialState
        from accelerate.tracking import TensorBoardTracker, WandBTracker

        PartialState()  # the trackers read from it whether this is the main process
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
        """Log rows of the curve, without what the trackers have already."""
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
    """A number, short string or nested dict as DVC can show it: NaN and infinity become text, floats keep 7 digits."""
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
    """Nested dicts as one with names such as `a/b`."""
    flat: JsonObject = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, name + separator, separator) if isinstance(value, Mapping) else {name: value}
    return flat


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write a metrics file: sorted keys, two spaces, one line feed at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(clean(value), indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def write_curve(path: Path, rows: list[dict[str, Number]]) -> None:
    """Write the curve as CSV: `step` first, then every name, sorted; empty where a row has no value."""
    names = ["step", *sorted({name for row in rows for name in row} - {"step"})]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: clean(value) for name, value in row.items()} for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(buffer.getvalue(), encoding="utf-8")


class Progress:
    """A bar with ETA on a terminal, a line every 30 seconds elsewhere; silent if all is done within two seconds."""

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
        """Show a short text behind the numbers, such as the loss."""
        self._note = f", {text}"
        self._bar.set_postfix_str(text, refresh=False)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


@contextmanager
def progress(*, total: float | None = None, desc: str, unit: str = "it", initial: float = 0) -> Iterator[Progress]:
    """Progress of a task of `total` units (None: unknown); a resumed one starts at `initial`."""
    bar = Progress(total, desc, unit, initial)
    try:
        yield bar
    finally:
        bar.close()


def say(text: str) -> None:
    """Print a line on stderr, above any progress bar, and into the log; rank 0 only."""
    if rank() == 0:
        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()
        if LOG.handlers:  # else a program that sets up logging, as the server does, would print it twice
            LOG.info("%s", text)


class _LogFile(logging.FileHandler):
    """A file that ends no run: one that cannot be opened or written is given up."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        LOG.removeHandler(self)


def log_to(path: Path) -> None:
    """Append to a file what `say` says from now on, each line with the time."""
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
