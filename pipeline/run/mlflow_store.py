"""MLflow: the store, one run per stage that is built, and the model registry.

    connect()                      a client for the store, and the experiment that contains our runs
    MlflowRun, Spool, deliver      a stage's run; its calls as lines in the work folder; replaying those lines
    register(client, run_id, ...)  a version of the model `stagecoach`, made by a run of stage deploy
    versions, champion, crown      the versions, the one with the alias `champion`, and assigning the alias

    workspace                      a run per DVC experiment (or for the workspace) and commit: headline metrics, report
      workspace/language           nested under it, a run per stage: parameters under their params.yaml names,
                                   inputs as datasets with their digests, the curve, final numbers, artifacts

The store is `sqlite:///$DVC_ROOT/mlflow.db` unless MLFLOW_TRACKING_URI is set. A version is an MLflow model with a copy
of the deployed model, so it still loads after `prune`, and on other machines (`pipeline/export/pyfunc.py`). A
champion's evaluation is stored with its run as the artifact `evaluation`, so that later versions can be compared with
it item by item. Which version may become champion is decided in report/champion.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import sqlite3
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.run.errors import ConfigError
from pipeline.run.types import JsonObject

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

Number = float | int | str
NAME, ALIAS, EVALUATION = "stagecoach", "champion", "evaluation"
WORKSPACE = "workspace"  # as in `dvc exp show`: what was built outside any experiment
GROUP = "stagecoach.group"  # tag of an experiment's parent run
NOTE = "mlflow.json"  # in the work folder: the id of its MLflow run
SPOOL, LATER = "mlflow.jsonl", "later"  # file of spooled calls in a work folder; STAGECOACH_MLFLOW value for spooling
WAIT, SHORT_WAIT = 120.0, 5.0  # seconds to wait for the store: normally, and in a run that is being stopped
MAX_DIGEST = 36  # characters in a column of MLflow's tables
DEFAULTS = {  # by default MLflow would retry for four minutes and warn each time
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
LOADER = "pipeline.export.pyfunc"
ANOTHER_PROGRAMS = ("gguf", "ollama", "onnx")  # folders of an export that are left out of MLflow's copy
NEEDED = ("torch", "numpy", "pyyaml", "ruamel.yaml", "safetensors", "tokenizers", "tqdm")  # packages that LOADER needs


@dataclass(frozen=True)
class Description:
    """What the MLflow run of a stage is created from."""

    name: str  # evaluate@tools
    tags: dict[str, str] = field(default_factory=dict)
    parameters: JsonObject = field(default_factory=dict)  # under the user's names: language.learning_rate
    inputs: dict[str, str] = field(default_factory=dict)  # path -> digest

    @property
    def experiment(self) -> str:
        """The name of the DVC experiment."""
        return self.tags.get("dvc.exp") or WORKSPACE

    @property
    def group(self) -> str:
        """The tag shared by the runs of one experiment, or of the workspace at one commit."""
        return f"{self.experiment} {self.tags.get('dvc.baseline') or self.tags.get('git.commit', '')}".strip()


@dataclass(frozen=True)
class Version:
    """A version of the registered model."""

    number: str
    run_id: str
    tags: dict[str, str]  # work.key, git.commit, model, and the reason it became champion


# -- the store ---------------------------------------------------------------------------------------------------------


def connect() -> tuple[MlflowClient, str]:
    """A client and the id of the experiment `stagecoach`, created if missing. Raises ConfigError, and whatever MLflow
    raises.
    """
    for variable, value in DEFAULTS.items():
        os.environ.setdefault(variable, value)
    root = Path(os.environ.get("DVC_ROOT", ".")).resolve()
    uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{root / 'mlflow.db'}")
    with warnings.catch_warnings(), _locked():  # otherwise the first two processes could both create the tables
        warnings.simplefilter("ignore")
        _check_file(uri)
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        experiment = client.get_experiment_by_name("stagecoach")
        if experiment is not None:
            return client, experiment.experiment_id
        artifacts = (root / "mlartifacts").as_uri() if uri.startswith("sqlite") else None
        return client, client.create_experiment("stagecoach", artifact_location=artifacts)


@contextmanager
def _locked() -> Iterator[None]:
    """Let only one process of this repository run the block at a time."""
    folder = Path(os.environ.get("DVC_ROOT", ".")).resolve() / ".work"
    folder.mkdir(exist_ok=True)
    with (folder / "mlflow.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_file(uri: str) -> None:
    """Raise ConfigError if SQLite cannot open the store's file, e.g. because it is a folder: MLflow would otherwise
    keep trying for 100 seconds.
    """
    path = uri.removeprefix("sqlite:///").partition("?")[0]
    if path in (uri, "", ":memory:"):
        return
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=60.0)) as store:
            store.execute("pragma schema_version").fetchone()
    except sqlite3.Error as error:
        what = "a folder" if Path(path).is_dir() else f"a file that SQLite cannot open ({error})"
        raise ConfigError(
            f"{path}: expected MLflow's database, found {what}; move it away, or set MLFLOW_TRACKING_URI"
        ) from error


# -- runs --------------------------------------------------------------------------------------------------------------


class MlflowRun:
    """One MLflow run, opened in a thread (importing MLflow takes seconds) and resumed by its id in the work folder.

    The first call to `log` waits up to WAIT seconds for the store (`connect`). If the store does not respond, then or
    later, the stage continues without MLflow after one warning through `warn`. STAGECOACH_MLFLOW=off disables MLflow
    (in tests of other features); under the launcher a stage uses a Spool instead.
    """

    def __init__(self, description: Description, folder: Path, warn: Callable[[str], None]) -> None:
        self.description, self.folder, self.warn = description, folder, warn
        self.client: MlflowClient | None = None
        self.run_id = self.parent_id = ""
        self.failed = os.environ.get("STAGECOACH_MLFLOW") == "off"
        self._last_step, self._last_names = -1, set[str]()
        self._thread = threading.Thread(target=self._start, daemon=True)
        if not self.failed:
            self._thread.start()

    def _start(self) -> None:
        try:
            self._open()
        except Exception as error:  # of many possible types; none may end a training run
            self._fail(error)

    def _open(self) -> None:
        client, experiment = connect()
        self.run_id = self._resume(client) or self._create(client, experiment)
        if self.parent_id:
            client.update_run(self.parent_id, status="RUNNING")
        self.client = client

    def _resume(self, client: MlflowClient) -> str:
        run_id = known_run(self.folder)
        if not run_id:
            return ""
        from mlflow.exceptions import MlflowException

        try:
            client.update_run(run_id, status="RUNNING")
            data = client.get_run(run_id).data
        except MlflowException:  # the store was deleted, or a different one is in use
            return ""
        self.parent_id = data.tags.get("mlflow.parentRunId", "")
        curve = [name for name in data.metrics if not name.startswith("system/")]
        steps = {name: max(m.step for m in client.get_metric_history(run_id, name)) for name in curve}
        self._last_step = max(steps.values(), default=-1)
        self._last_names = {name for name, step in steps.items() if step == self._last_step}
        return run_id

    def _create(self, client: MlflowClient, experiment: str) -> str:
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param

        described = self.description
        with _locked():  # otherwise two stages would both create the parent
            self.parent_id = self._parent(client, experiment)
        models = {f"input.{path}": digest for path, digest in described.inputs.items() if path.startswith("models/")}
        tags = described.tags | models | {"mlflow.parentRunId": self.parent_id, "mlflow.source.type": "LOCAL"}
        if commit := described.tags.get("git.commit"):
            tags["mlflow.source.git.commit"] = commit
        run = client.create_run(experiment, run_name=f"{described.experiment}/{described.name}", tags=tags)
        run_id = run.info.run_id
        (self.folder / NOTE).write_text(json.dumps({"run_id": run_id}))
        params = [Param(valid_name(k), str(v)[:500]) for k, v in sorted(described.parameters.items())]
        for first in range(0, len(params), 100):  # MLflow's limit per batch
            client.log_batch(run_id, params=params[first : first + 100])
        data = [
            DatasetInput(
                Dataset(path, digest[:MAX_DIGEST], "local", json.dumps({"uri": path})),
                [InputTag("mlflow.data.context", described.name)],
            )
            for path, digest in described.inputs.items()
            if not path.startswith("models/")
        ]
        if data:
            with _locked():  # MLflow fails if two runs insert the same data set at the same time
                client.log_inputs(run_id, data)
        return run_id

    def _parent(self, client: MlflowClient, experiment: str) -> str:
        """The experiment's parent run, created if missing."""
        described = self.description
        quoted = described.group.replace("'", "\\'")
        found = client.search_runs([experiment], f"tags.`{GROUP}` = '{quoted}'", max_results=1)
        if found:
            return found[0].info.run_id
        tags = {GROUP: described.group, "dvc.exp": described.tags.get("dvc.exp", "")}
        if commit := described.tags.get("git.commit"):
            tags |= {"git.commit": commit, "mlflow.source.git.commit": commit}
        return client.create_run(experiment, run_name=described.experiment, tags=tags).info.run_id

    def _fail(self, error: Exception) -> None:
        if not self.failed:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self.warn(f"warning: MLflow failed ({type(error).__name__}: {reason[:200]}); continuing without it")
        self.failed = True

    def _wait_for_client(self, wait: float | None = None) -> MlflowClient | None:
        """The client once the run is open; None if the store does not respond."""
        if self._thread.ident is not None and not self.failed:
            wait = WAIT if wait is None else wait
            self._thread.join(timeout=wait)
            if self._thread.is_alive():
                self._fail(TimeoutError(f"no answer within {wait:.0f} s"))
        return None if self.failed else self.client

    def log(self, rows: list[dict[str, Number]]) -> None:
        """Log rows of the curve, skipping what the run already has."""
        if not rows or (client := self._wait_for_client()) is None:  # waits until `_resume` knows what the run has
            return
        rows = [{valid_name(name): value for name, value in row.items()} for row in rows]
        if new_rows := unknown(rows, self._last_step, self._last_names):
            now = int(time.time() * 1000)
            values = [(k, v, now, int(row["step"])) for row in new_rows for k, v in row.items() if k != "step"]
            self._send(client, self.run_id, values)
            self._last_names = names_at(new_rows[-1], self._last_step, self._last_names)
            self._last_step = int(new_rows[-1]["step"])

    def system(self, samples: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Log machine utilization under names that MLflow displays as system metrics."""
        if samples and (client := self._wait_for_client()) is not None:
            numbered = enumerate(samples)
            values = [(k, v, when, step) for step, (when, values) in numbered for k, v in values.items()]
            self._send(client, self.run_id, values)

    def register(self, folder: Path, tags: Mapping[str, str]) -> None:
        """Register `folder` as a version of the model, with `tags` and this run's key and commit."""
        if (client := self._wait_for_client()) is None:
            return
        try:
            own_tags = {key: value for key in ("work.key", "git.commit") if (value := self.description.tags.get(key))}
            register(client, self.run_id, folder, own_tags | dict(tags))
        except Exception as error:  # as in _start
            self._fail(error)

    def artifacts(self, files: Sequence[Path]) -> None:
        """Store files with the run."""
        self._store(self.run_id, files)

    def summarize(self, numbers: Mapping[str, float], files: Sequence[Path]) -> None:
        """Log numbers and files to the experiment's parent run, next to those of its other stages."""
        if (client := self._wait_for_client()) is not None and self.parent_id:
            now = int(time.time() * 1000)
            self._send(client, self.parent_id, [(name, value, now, 0) for name, value in numbers.items()])
            self._store(self.parent_id, files)

    def _store(self, run_id: str, files: Sequence[Path]) -> None:
        if (client := self._wait_for_client()) is None:
            return
        try:
            for path in files:
                client.log_artifact(run_id or self.run_id, str(path))
        except Exception as error:  # as in _start
            self._fail(error)

    def _send(self, client: MlflowClient, run_id: str, values: Sequence[tuple[str, object, int, int]]) -> None:
        """Log (name, value, milliseconds, step) tuples, skipping values that are not finite numbers."""
        from mlflow.entities import Metric

        metrics = [
            Metric(valid_name(k), float(v), when, step)
            for k, v, when, step in values
            if isinstance(v, int | float) and math.isfinite(v)
        ]
        try:
            for first in range(0, len(metrics), 1000):
                client.log_batch(run_id, metrics=metrics[first : first + 1000])
        except Exception as error:  # as in _start
            self._fail(error)

    def back_to(self, step: int) -> None:
        """Accept steps after `step` again; the values that the run already has for them are kept too."""
        if self._wait_for_client() is not None:
            self._last_step = min(self._last_step, step)

    def finish(self, final: JsonObject) -> None:
        """Log the final metrics under `final/`, and set the status FINISHED."""
        if (client := self._wait_for_client()) is not None:
            now, last = int(time.time() * 1000), max(self._last_step, 0)
            self._send(client, self.run_id, [(f"final/{name}", value, now, last) for name, value in final.items()])
            self.end("FINISHED")

    def end(self, status: str, wait: float | None = None) -> None:
        """Set the status of the run and its parent; wait at most `wait` seconds (None: WAIT) for a store that is still
        opening.
        """
        if (client := self._wait_for_client(wait)) is None:
            return
        try:
            for run_id in filter(None, (self.run_id, self.parent_id)):
                client.set_terminated(run_id, status)
        except Exception as error:  # as in _start
            self._fail(error)


def valid_name(name: str) -> str:
    """The name with `_` for each character that MLflow does not allow in a name, such as `%`."""
    return re.sub(r"[^\w./: -]", "_", name)


def unknown(rows: list[dict[str, Number]], last: int, names: Set[str]) -> list[dict[str, Number]]:
    """The rows after step `last`, plus the values at step `last` whose names are not in `names`."""
    new_rows = [row for row in rows if int(row["step"]) > last]
    more = [{k: v for k, v in row.items() if k not in names} for row in rows if int(row["step"]) == last]
    return [row for row in more if len(row) > 1] + new_rows


def names_at(row: dict[str, Number], last: int, names: Set[str]) -> set[str]:
    """The names that a tracker has at the step of its newest `row`, if it previously had `names` at step `last`."""
    return row.keys() - {"step"} | (names if int(row["step"]) == last else set())


class Spool:
    """Records MlflowRun calls as lines in the work folder. Importing MLflow takes two seconds of CPU time, so the
    launcher makes the calls of all stages from one process (`deliver`).
    """

    def __init__(self, description: Description, folder: Path) -> None:
        self.path = folder / SPOOL
        self._add("open", asdict(description))

    def _add(self, *call: object) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(call, default=str) + "\n")

    def log(self, rows: list[dict[str, Number]]) -> None:
        """Spool a call to MlflowRun.log."""
        if rows:
            self._add("log", rows)

    def system(self, samples: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Spool a call to MlflowRun.system."""
        self._add("system", samples)

    def register(self, folder: Path, tags: Mapping[str, str]) -> None:
        """Spool a call to MlflowRun.register."""
        self._add("register", folder.resolve(), tags)

    def artifacts(self, files: Sequence[Path]) -> None:
        """Spool a call to MlflowRun.artifacts."""
        self._add("artifacts", [path.resolve() for path in files])

    def summarize(self, numbers: Mapping[str, float], files: Sequence[Path]) -> None:
        """Spool a call to MlflowRun.summarize."""
        self._add("summarize", numbers, [path.resolve() for path in files])

    def back_to(self, step: int) -> None:
        """Spool a call to MlflowRun.back_to."""
        self._add("back_to", step)

    def finish(self, final: JsonObject) -> None:
        """Spool a call to MlflowRun.finish."""
        self._add("finish", final)

    def end(self, status: str, wait: float | None = None) -> None:
        """Spool a call to MlflowRun.end; does not wait."""
        self._add("end", status)


def deliver(root: Path, ended: Callable[[], bool], warn: Callable[[str], None]) -> None:
    """Make the calls that stages spooled in the work directory `root`, including those of earlier builds, until `ended`
    (which blocks briefly) returns true and none are left.
    """
    runs: dict[Path, MlflowRun] = {}
    is_last = False
    while not is_last:
        is_last = ended()
        for path in sorted(root.glob(f"*/*/{SPOOL}")):
            for line in _taken(path):
                _make_call(runs, path.parent, json.loads(line), warn)


def _taken(spool: Path) -> list[str]:
    """Read the lines of a spool and empty it."""
    if not spool.stat().st_size:
        return []
    with spool.open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = file.read().splitlines()
        file.truncate(0)
    return lines


def _make_call(runs: dict[Path, MlflowRun], folder: Path, call: list[Any], warn: Callable[[str], None]) -> None:
    if call[0] == "open":
        runs[folder] = MlflowRun(Description(**call[1]), folder, warn)
        return
    if folder not in runs:  # the run was opened by an earlier build's process, which was killed
        runs[folder] = MlflowRun(Description(folder.parent.name), folder, warn)
    run = runs[folder]
    match call:
        case ["log", rows]:
            run.log(rows)
        case ["system", samples]:
            run.system(samples)
        case ["register", made, tags]:
            run.register(Path(made), tags)
        case ["artifacts", files]:
            run.artifacts([Path(file) for file in files])
        case ["summarize", numbers, files]:
            run.summarize(numbers, [Path(file) for file in files])
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


# -- registered models -------------------------------------------------------------------------------------------------


def register(client: MlflowClient, run_id: str, folder: Path, tags: Mapping[str, str]) -> Version:
    """The model version of a run, created from `folder` if missing: an MLflow model with a copy of the export, without
    the files for other programs.
    """
    from mlflow.exceptions import MlflowException

    for version in versions(client):
        if version.run_id == run_id:
            return version
    try:
        client.create_registered_model(NAME)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    with tempfile.TemporaryDirectory(prefix="mlflow-", dir=folder.parent) as scratch:
        client.log_artifact(run_id, str(_as_mlflow_model(folder, Path(scratch))))
    source = f"{client.get_run(run_id).info.artifact_uri}/model"
    return _version(client.create_model_version(NAME, source=source, run_id=run_id, tags=dict(tags)))


def _as_mlflow_model(folder: Path, scratch: Path) -> Path:
    """Save the export `folder` as an MLflow model in `scratch`; files are linked instead of copied where possible."""
    import importlib.metadata

    from mlflow import pyfunc
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

    def link(source: str, target: str) -> str:
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)
        return target

    export = scratch / "export"
    ignored = shutil.ignore_patterns(*ANOTHER_PROGRAMS, "SHA256SUMS")  # the checksums list files that are left out
    shutil.copytree(folder, export, ignore=ignored, copy_function=link)
    params = ParamSchema(
        [
            ParamSpec("temperature", "double", 0.0),
            ParamSpec("max_new_tokens", "long", 256),
            ParamSpec("seed", "long", 0),
        ]
    )
    text = Schema([ColSpec("string")])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pyfunc.save_model(
            str(scratch / "model"),
            loader_module=LOADER,
            data_path=str(export),
            code_paths=[str(Path(__file__).parents[1])],
            signature=ModelSignature(text, text, params),
            pip_requirements=[f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in NEEDED],
        )
    return scratch / "model"


def versions(client: MlflowClient) -> list[Version]:
    """The registered versions, newest first."""
    registered = client.search_model_versions(f"name = '{NAME}'")
    return sorted((_version(version) for version in registered), key=lambda version: -int(version.number))


def champion(client: MlflowClient) -> Version | None:
    """The version with the alias `champion`; None if there is none."""
    from mlflow.exceptions import MlflowException

    try:
        return _version(client.get_model_version_by_alias(NAME, ALIAS))
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):  # no model, no alias
            return None
        raise


def crown(client: MlflowClient, version: Version, evaluation: list[Path], tags: Mapping[str, str]) -> None:
    """Store a version's evaluation with its run, then make the version the champion."""
    for path in evaluation:
        client.log_artifact(version.run_id, str(path), EVALUATION)
    for key, value in tags.items():
        client.set_model_version_tag(NAME, version.number, key, value)
    client.set_registered_model_alias(NAME, ALIAS, version.number)  # last, so that a champion always has its evaluation


def evaluation(client: MlflowClient, version: Version, scratch: Path) -> Path:
    """The folder with a version's evaluation, downloaded into `scratch`."""
    return Path(client.download_artifacts(version.run_id, EVALUATION, str(scratch)))


def _version(registered: ModelVersion) -> Version:
    return Version(str(registered.version), str(registered.run_id or ""), dict(registered.tags))
