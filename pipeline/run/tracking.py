"""Numbers for people: the step curve, final metrics, MLflow, other trackers, the progress bar. Nothing else logs any.

    metrics/<stage>.csv             the curve, a row for each logged step     (DVC plots)
    metrics/<stage>.json            final numbers and `lineage`
    metrics/training/<stage>.json   the few of them that people compare       (DVC metrics)
    .work/.../speed.json            how fast and where: never in an out
    logs/<stage>.log, .jsonl        what a stage says, and its curve with speed and memory, as they come
    MLflow                          one run for each built stage, continued when a killed stage resumes
    .work/.../mlflow.jsonl          what a stage has for its MLflow run, until the launcher's process delivers it
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
import fcntl
import io
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from pipeline.run import registry
from pipeline.run.device import rank
from pipeline.run.errors import ConfigError
from pipeline.run.types import JsonObject

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker
    from mlflow.tracking import MlflowClient

Number = float | int | str
NOTE = "mlflow.json"  # in the work folder: the id of its MLflow run
SEND_SECONDS = 5.0  # between two sendings of the curve
LOG = logging.getLogger("stagecoach.stage")  # what `say` says; without `log_to` nobody listens
SPOOL, LATER = "mlflow.jsonl", "later"  # in the work folder: calls of an MlflowRun; the STAGECOACH_MLFLOW that spools
WAIT, SHORT_WAIT = 120.0, 5.0  # seconds for the store to open: for a run that trains, for one that is being stopped


class Tracker:
    """The numbers of one stage run. `quiet` opens no MLflow run and no others, as for ranks other than 0; `others`:
    names of `runtime.trackers`; `live`: the file of the curve as it comes.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        tags: dict[str, str],
        parameters: JsonObject,
        *,
        quiet: bool,
        others: Sequence[str] = (),
        live: Path | None = None,
    ) -> None:
        self.name, self.folder = name, folder
        self.rows: list[dict[str, Number]] = []
        self.final: JsonObject = {}
        self.speed: JsonObject = {}
        self._logged = 0  # rows already in MLflow
        self._sent_at = -SEND_SECONDS
        self._measured: dict[int, dict[str, Number]] = {}  # by step: what the clock and the memory say
        self._model: tuple[Path, dict[str, str]] | None = None  # to be registered once the run has succeeded
        quiet = quiet or rank() != 0
        run = Spool if os.environ.get("STAGECOACH_MLFLOW") == LATER else MlflowRun
        self._mlflow = None if quiet else run(name, folder, tags, parameters)
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
            self._mlflow.finish(flatten(self.final) | {f"speed/{k}": v for k, v in flatten(self.speed).items()})
        if self._others is not None:
            self._others.finish()


class MlflowRun:
    """One MLflow run, started in a thread (importing MLflow takes seconds), continued by its id in the work folder.

    The first log waits up to WAIT seconds for the store (`registry.connect`); a store that does not answer by then, or
    later, costs one warning. STAGECOACH_MLFLOW=off switches MLflow off (for tests of other things); under the launcher
    a stage has a Spool instead.
    """

    def __init__(self, name: str, folder: Path, tags: dict[str, str], parameters: JsonObject) -> None:
        self.name, self.folder, self.tags, self.parameters = name, folder, tags, parameters
        self.client: MlflowClient | None = None
        self.run_id = ""
        self.failed = os.environ.get("STAGECOACH_MLFLOW") == "off"
        self._last_step, self._last_names = -1, set[str]()
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

    def _resume(self, client: MlflowClient) -> str:
        run_id = known_run(self.folder)
        if not run_id:
            return ""
        from mlflow.exceptions import MlflowException

        try:
            client.update_run(run_id, status="RUNNING")
            names = client.get_run(run_id).data.metrics
        except MlflowException:  # the store was deleted, or another one is in use now
            return ""
        curve = [name for name in names if not name.startswith("system/")]
        steps = {name: max(m.step for m in client.get_metric_history(run_id, name)) for name in curve}
        self._last_step = max(steps.values(), default=-1)
        self._last_names = {name for name, step in steps.items() if step == self._last_step}
        return run_id

    def _create(self, client: MlflowClient, experiment: str) -> str:
        from mlflow.entities import Param

        run = client.create_run(experiment, run_name=self.name, tags=self.tags)
        (self.folder / NOTE).write_text(json.dumps({"run_id": run.info.run_id}))
        params = [Param(k, str(v)[:500]) for k, v in sorted(flatten(self.parameters).items())]
        for first in range(0, len(params), 100):  # as many as one batch takes
            client.log_batch(run.info.run_id, params=params[first : first + 100])
        return run.info.run_id

    def _fail(self, error: Exception) -> None:
        if not self.failed:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            say(f"warning: MLflow does not answer ({type(error).__name__}: {reason[:200]}); going on without it")
        self.failed = True

    def _wait_for_client(self, wait: float | None = None) -> MlflowClient | None:
        """The client once the run is open; None if the store does not answer."""
        if self._thread.ident is not None and not self.failed:
            wait = WAIT if wait is None else wait
            self._thread.join(timeout=wait)
            if self._thread.is_alive():
                self._fail(TimeoutError(f"no answer within {wait:.0f} s"))
        return None if self.failed else self.client

    def log(self, rows: list[dict[str, Number]]) -> None:
        """Log rows of the curve, without what the run has already."""
        if not rows or (client := self._wait_for_client()) is None:  # once it is open, `_resume` knows what it has
            return
        if new_rows := unknown(rows, self._last_step, self._last_names):
            now = int(time.time() * 1000)
            values = [(k, v, now, int(row["step"])) for row in new_rows for k, v in row.items() if k != "step"]
            self._send(client, values)
            self._last_names = names_at(new_rows[-1], self._last_step, self._last_names)
            self._last_step = int(new_rows[-1]["step"])

    def system(self, samples: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Log how busy the machine was, under names that MLflow's page draws as system metrics."""
        if samples and (client := self._wait_for_client()) is not None:
            numbered = enumerate(samples)
            self._send(client, [(k, v, when, step) for step, (when, values) in numbered for k, v in values.items()])

    def register(self, folder: Path, tags: Mapping[str, str]) -> None:
        """Register a version of the model, with this run's tags and its own."""
        if (client := self._wait_for_client()) is None:
            return
        try:
            own_tags = {key: self.tags[key] for key in ("work.key", "git.commit") if self.tags.get(key)}
            registry.register(client, self.run_id, folder, own_tags | dict(tags))
        except Exception as error:  # as in _start
            self._fail(error)

    def _send(self, client: MlflowClient, values: Sequence[tuple[str, object, int, int]]) -> None:
        """Log (name, value, milliseconds, step) tuples, without values that are not finite numbers."""
        from mlflow.entities import Metric

        metrics = [
            Metric(k, float(v), when, step)
            for k, v, when, step in values
            if isinstance(v, int | float) and math.isfinite(v)
        ]
        try:
            for first in range(0, len(metrics), 1000):
                client.log_batch(self.run_id, metrics=metrics[first : first + 1000])
        except Exception as error:  # as in _start
            self._fail(error)

    def back_to(self, step: int) -> None:
        """Accept the steps after this one again; those that the run has already stay beside them."""
        if self._wait_for_client() is not None:
            self._last_step = min(self._last_step, step)

    def finish(self, final: JsonObject) -> None:
        """Log the final metrics under `final/`, and set the status FINISHED."""
        if (client := self._wait_for_client()) is not None:
            last = max(self._last_step, 0)
            now = int(time.time() * 1000)
            self._send(client, [(f"final/{k}", v, now, last) for k, v in final.items()])
            self.end("FINISHED")

    def end(self, status: str, wait: float | None = None) -> None:
        """Set the run's status; wait at most `wait` seconds for a store that is still being opened (None: WAIT)."""
        if (client := self._wait_for_client(wait)) is None:
            return
        try:
            client.set_terminated(self.run_id, status=status)
        except Exception as error:  # as in _start
            self._fail(error)


def unknown(rows: list[dict[str, Number]], last: int, names: Set[str]) -> list[dict[str, Number]]:
    """The rows after the step `last`, and what its row has beside the values `names`."""
    new_rows = [row for row in rows if int(row["step"]) > last]
    more = [{k: v for k, v in row.items() if k not in names} for row in rows if int(row["step"]) == last]
    return [row for row in more if len(row) > 1] + new_rows


def names_at(row: dict[str, Number], last: int, names: Set[str]) -> set[str]:
    """The values that a tracker has at the step of `row`, the last that it got; before, it had `names` at `last`."""
    return row.keys() - {"step"} | (names if int(row["step"]) == last else set())


class Spool:
    """The calls of an MlflowRun, as lines in the work folder. Importing MLflow takes two CPU seconds, so the launcher
    makes the calls of all stages in one process (`deliver`).
    """

    def __init__(self, name: str, folder: Path, tags: dict[str, str], parameters: JsonObject) -> None:
        self.path = folder / SPOOL
        self._add("open", name, tags, parameters)

    def _add(self, *call: object) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(call, default=str) + "\n")

    def log(self, rows: list[dict[str, Number]]) -> None:
        """MlflowRun.log, later."""
        if rows:
            self._add("log", rows)

    def system(self, samples: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """MlflowRun.system, later."""
        self._add("system", samples)

    def register(self, folder: Path, tags: Mapping[str, str]) -> None:
        """MlflowRun.register, later."""
        self._add("register", folder.resolve(), tags)

    def back_to(self, step: int) -> None:
        """MlflowRun.back_to, later."""
        self._add("back_to", step)

    def finish(self, final: JsonObject) -> None:
        """MlflowRun.finish, later."""
        self._add("finish", final)

    def end(self, status: str, wait: float | None = None) -> None:
        """MlflowRun.end, later; nothing is waited for here."""
        self._add("end", status)


def deliver(root: Path, ended: Callable[[], bool]) -> None:
    """Make the calls that stages spool in the work directory `root`, also those of an earlier build, until `ended`,
    which takes a moment, is true and none is left.
    """
    runs: dict[Path, MlflowRun] = {}
    is_last = False
    while not is_last:
        is_last = ended()
        for path in sorted(root.glob(f"*/*/{SPOOL}")):
            for line in _taken(path):
                _make_call(runs, path.parent, json.loads(line))


def _taken(spool: Path) -> list[str]:
    """The lines of a spool, which is empty from then on."""
    if not spool.stat().st_size:
        return []
    with spool.open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = file.read().splitlines()
        file.truncate(0)
    return lines


def _make_call(runs: dict[Path, MlflowRun], folder: Path, call: list[Any]) -> None:
    if call[0] == "open":
        _, name, tags, parameters = call
        runs[folder] = MlflowRun(name, folder, tags, parameters)
        return
    if folder not in runs:  # an earlier build's process opened the run, and was killed
        runs[folder] = MlflowRun(folder.parent.name, folder, {}, {})
    run = runs[folder]
    match call:
        case ["log", rows]:
            run.log(rows)
        case ["system", samples]:
            run.system(samples)
        case ["register", made, tags]:
            run.register(Path(made), tags)
        case ["back_to", step]:
            run.back_to(step)
        case ["finish", final]:
            run.finish(final)
        case ["end", status]:
            run.end(status)


def known_run(folder: Path) -> str:
    """The id of a work folder's MLflow run; empty if it has none."""
    note = folder / NOTE
    return json.loads(note.read_text())["run_id"] if note.is_file() else ""


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


def flatten(values: Mapping[str, Any], prefix: str = "") -> JsonObject:
    """Nested dicts as one with names such as `a/b`."""
    flat: JsonObject = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}/") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
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
        if self._bar.disable and now - self._last >= 30 and rank() == 0:
            self._last = now
            elapsed = now - self._start
            rate = (self.done - self._initial) / elapsed
            eta = f", {(self.total - self.done) / rate:.0f} s left" if self.total and rate else ""
            total = f"/{self.total:.0f}" if self.total else ""
            say(f"{self.desc}: {self.done:.0f}{total} {self.unit}, {elapsed:.0f} s{eta}{self._note}")

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
