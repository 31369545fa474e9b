"""Numbers that people look at: the step curve, the final metrics, MLflow, the progress bar. Nothing else logs numbers.

    metrics/<stage>.csv    the curve, a row per logged step          (DVC plots)
    metrics/<stage>.json   final numbers and `lineage`
    metrics/training/<stage>.json   the few of them that people compare   (DVC metrics)
    .work/.../speed.json   how fast and where: never in an out
    MLflow                 one run per built stage, continued when a killed stage resumes

DVC's files hold no clock, id or host: equal runs give equal bytes. A failing MLflow costs one warning, never the run.
Not promised: that MLflow holds the steps between the last saved state and a `kill -9`; they are logged when redone.

Other places for the curve besides DVC and MLflow: `runtime.trackers: [tensorboard, wandb]`, through Accelerate's
trackers.

They come with the extra `trackers`. TensorBoard's files lie in the work folder (`tensorboard --logdir .work`); Weights
& Biases' own environment variables say where its runs go (WANDB_MODE=offline keeps them in the work folder).

Not promised: that they hold the steps between the last saved state and a `kill -9` only once, or that Weights & Biases,
which refuses steps that it has, shows what follows a rollback.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pipeline.run import registry
from pipeline.run.errors import ConfigError


class Others:
    """The trackers that a person asked for; opened at the first row. Raises ConfigError for one that is not
    installed.
    """

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


# -- tracking ----------------------------------------------------------------------------------------------------------


Number = float | int | str


def clean(value: Any) -> Any:
    """A number, short string or nested dict as DVC can show it: NaN and infinity become text, floats keep 7 digits."""
    if isinstance(value, Mapping):
        return {str(key): clean(entry) for key, entry in value.items()}
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else "not finite"
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a metrics file: sorted keys, two spaces, one line feed at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(clean(value), indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def write_curve(path: Path, rows: list[dict[str, Number]]) -> None:
    """Write the curve as CSV: `step` first, then every name that occurs, empty where a row has no value."""
    names = ["step", *sorted({name for row in rows for name in row} - {"step"})]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: clean(value) for name, value in row.items()} for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(buffer.getvalue(), encoding="utf-8")


class Progress:
    """A bar with ETA on a terminal, a line per 30 seconds elsewhere; silent when all is done within two seconds."""

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
        if self._bar.disable and now - self._last >= 30 and int(os.environ.get("RANK", "0")) == 0:
            self._last = now
            elapsed = now - self._start
            rate = (self.done - self._initial) / elapsed
            left = f", {(self.total - self.done) / rate:.0f} s left" if self.total and rate else ""
            whole = f"/{self.total:.0f}" if self.total else ""
            say(f"{self.desc}: {self.done:.0f}{whole} {self.unit}, {elapsed:.0f} s{left}{self._note}")

    def note(self, text: str) -> None:
        """Show a short text behind the numbers, such as the loss."""
        self._note = f", {text}"
        self._bar.set_postfix_str(text, refresh=False)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


@contextmanager
def progress(*, total: float | None = None, desc: str, unit: str = "it", initial: float = 0) -> Iterator[Progress]:
    """Progress of a task of `total` units (None: unknown), from `initial` on when resumed."""
    bar = Progress(total, desc, unit, initial)
    try:
        yield bar
    finally:
        bar.close()


def say(text: str) -> None:
    """One line to the person at the terminal, above any progress bar; rank 0 only."""
    if int(os.environ.get("RANK", "0")) == 0:
        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()


class Tracker:
    """The numbers of one stage run. `quiet` (a finished key, ranks other than 0): no MLflow run; `others` are named
    in `trackers.py`.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        tags: dict[str, str],
        parameters: dict[str, Any],
        *,
        quiet: bool,
        others: Sequence[str] = (),
    ) -> None:
        self.name, self.folder = name, folder
        self.rows: list[dict[str, Number]] = []
        self.final: dict[str, Any] = {}
        self.speed: dict[str, Any] = {}
        self._logged = 0  # rows already in MLflow
        self._model: tuple[Path, dict[str, str]] | None = None  # to be registered when the run has ended well
        quiet = quiet or int(os.environ.get("RANK", "0")) != 0
        self._mlflow = None if quiet else MlflowRun(name, folder, tags, parameters)
        self._others = None if quiet or not others else Others(others, name, folder, parameters)

    def log(self, step: int, values: Mapping[str, Number]) -> None:
        """Add values to the curve at `step`; a second call with the same step adds to the same row."""
        if self.rows and self.rows[-1]["step"] == step:
            self.rows[-1].update(values)
        else:
            self.rows.append({"step": step, **values})

    def restore(self, rows: list[dict[str, Number]]) -> None:
        """Continue the curve of a resumed state."""
        self.rows = list(rows)
        self._logged = 0  # MlflowRun.log and Others.log skip the steps that they hold

    def report(self, **numbers: Any) -> None:
        """Final numbers for metrics/<stage>.json."""
        self.final.update(numbers)

    def register(self, folder: Path, **tags: str) -> None:
        """Let MLflow know what was made as a version of the registered model, once the run has ended well."""
        self._model = (folder, tags)

    def headlines(self) -> dict[str, Number]:
        """The final numbers that `dvc metrics show` and `dvc exp show` print: best validation, tokens read."""
        best = self.final.get("best", {})
        found = {name: best[name] for name in ("val_loss", "val_bpb") if name in best}
        return found | {name: self.final[name] for name in ("tokens",) if name in self.final}

    def flush(self) -> None:
        """Bring the curve into MLflow, but for its last row, which may still grow: called after each saved state."""
        self._send(max(self._logged, len(self.rows) - 1))

    def back_to(self, step: int) -> None:
        """What follows are other rows of the steps after this one: the run goes on from there."""
        for tracker in (self._mlflow, self._others):
            if tracker is not None:
                tracker.back_to(step)

    def _send(self, end: int) -> None:
        for tracker in (self._mlflow, self._others):
            if tracker is not None:
                tracker.log(self.rows[self._logged : end])
        self._logged = end

    def abandon(self, status: str) -> None:
        """Say in MLflow that the run ended early: "KILLED" (it resumes) or "FAILED". Nobody waits long for that."""
        if self._mlflow is not None:
            self._mlflow.end(status, wait=SHORT_WAIT)

    def finish(self, system: Sequence[tuple[int, Mapping[str, float]]] = ()) -> None:
        """Close the run: speed.json, MLflow's final metrics, system metrics (milliseconds, values) and status."""
        self._send(len(self.rows))
        if self._mlflow is not None:
            write_json(self.folder / "speed.json", self.speed)  # its device and clock belong to no out
            self._mlflow.system(system)
            if self._model is not None:
                self._mlflow.register(*self._model)
            self._mlflow.finish(flatten(self.final) | {f"speed/{k}": v for k, v in flatten(self.speed).items()})
        if self._others is not None:
            self._others.finish()


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as `a/b` names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}/") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def known_run(folder: Path) -> str:
    """The id of the MLflow run of a work folder; empty where it has none."""
    note = folder / NOTE
    return json.loads(note.read_text())["run_id"] if note.is_file() else ""


NOTE = "mlflow.json"
WAIT, SHORT_WAIT = 120.0, 5.0  # seconds for the store to open: of a run that trains, of one that is being stopped


class MlflowRun:
    """One MLflow run, started in a thread (importing MLflow takes seconds), continued by the id kept in the work
    folder.

    The store is `sqlite:///$DVC_ROOT/mlflow.db` unless MLFLOW_TRACKING_URI says otherwise, created under a flock. The
    first log waits up to WAIT seconds for it; a store that does not answer by then, or later, costs one warning.
    STAGECOACH_MLFLOW=off switches it off (tests of other things).
    """

    def __init__(self, name: str, folder: Path, tags: dict[str, str], parameters: dict[str, Any]) -> None:
        self.name, self.folder, self.tags, self.parameters = name, folder, tags, parameters
        self.client: Any = None
        self.run_id = ""
        self.failed = os.environ.get("STAGECOACH_MLFLOW") == "off"
        self._last_step = -1
        self._thread = threading.Thread(target=self._start, daemon=True)
        if not self.failed:
            self._thread.start()

    def _start(self) -> None:
        try:
            self._open()
        except Exception as error:  # MLflow raises many types; none of them may cost a training run
            self._fail(error)

    def _open(self) -> None:
        client, experiment = registry.connect()
        self.run_id = self._resume(client) or self._create(client, experiment)
        self.client = client

    def _resume(self, client: Any) -> str:
        run_id = known_run(self.folder)
        if not run_id:
            return ""
        from mlflow.exceptions import MlflowException

        try:
            client.update_run(run_id, status="RUNNING")
            names = client.get_run(run_id).data.metrics
        except MlflowException:  # the store was deleted or another one is in use now
            return ""
        curve = [name for name in names if not name.startswith("system/")]
        steps = [m.step for name in curve for m in client.get_metric_history(run_id, name)]
        self._last_step = max(steps, default=-1)
        return run_id

    def _create(self, client: Any, experiment: str) -> str:
        from mlflow.entities import Param

        run = client.create_run(experiment, run_name=self.name, tags=self.tags)
        (self.folder / NOTE).write_text(json.dumps({"run_id": run.info.run_id}))
        params = [Param(k, str(v)[:500]) for k, v in sorted(flatten(self.parameters).items())]
        for first in range(0, len(params), 100):  # as many as one batch takes
            client.log_batch(run.info.run_id, params=params[first : first + 100])
        return run.info.run_id

    def _fail(self, error: Exception) -> None:
        if not self.failed:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            say(f"warning: MLflow does not answer ({type(error).__name__}: {first[:200]}); going on without it")
        self.failed = True

    def _ready(self, wait: float | None = None) -> bool:
        if self._thread.ident is not None and not self.failed:
            wait = WAIT if wait is None else wait
            self._thread.join(timeout=wait)
            if self._thread.is_alive():
                self._fail(TimeoutError(f"no answer within {wait:.0f} s"))
        return self.client is not None and not self.failed

    def log(self, rows: list[dict[str, Number]]) -> None:
        """One batch of curve rows; steps that the run holds already are left out."""
        fresh = [row for row in rows if int(row["step"]) > self._last_step]
        if not fresh or not self._ready():
            return
        fresh = [row for row in fresh if int(row["step"]) > self._last_step]  # _resume may have moved it
        if fresh:
            now = int(time.time() * 1000)
            self._send([(k, v, now, int(row["step"])) for row in fresh for k, v in row.items() if k != "step"])
            self._last_step = int(fresh[-1]["step"])

    def system(self, samples: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """How busy the machine was, under the names that MLflow's page draws as system metrics."""
        if samples and self._ready():
            self._send([(k, v, when, step) for step, (when, seen) in enumerate(samples) for k, v in seen.items()])

    def register(self, folder: Path, tags: Mapping[str, str]) -> None:
        """A version of the registered model, with this run's tags and its own."""
        if not self._ready():
            return
        try:
            mine = {key: self.tags[key] for key in ("work.key", "git.commit") if self.tags.get(key)}
            registry.register(self.client, self.run_id, folder, mine | dict(tags))
        except Exception as error:  # as in _start
            self._fail(error)

    def _send(self, values: list[tuple[str, Any, int, int]]) -> None:
        """(name, value, milliseconds, step) each."""
        from mlflow.entities import Metric

        metrics = [
            Metric(k, float(v), when, step)
            for k, v, when, step in values
            if isinstance(v, int | float) and math.isfinite(v)
        ]
        try:
            for first in range(0, len(metrics), 1000):
                self.client.log_batch(self.run_id, metrics=metrics[first : first + 1000])
        except Exception as error:  # as in _start
            self._fail(error)

    def back_to(self, step: int) -> None:
        """Take the steps after this one again; those that the run holds stay beside them."""
        if self._ready():
            self._last_step = min(self._last_step, step)

    def finish(self, final: dict[str, Any]) -> None:
        """Final metrics under `final/`, and the status FINISHED."""
        if self._ready():
            last = max(self._last_step, 0)
            now = int(time.time() * 1000)
            self._send([(f"final/{k}", v, now, last) for k, v in final.items()])
            self.end("FINISHED")

    def end(self, status: str, wait: float | None = None) -> None:
        """Set the run's status; `wait` seconds at most for a store that is still being opened (None: WAIT)."""
        if not self._ready(wait):
            return
        try:
            self.client.set_terminated(self.run_id, status=status)
        except Exception as error:  # as in _start
            self._fail(error)
