"""MLflow's store, and the models that are registered there.

    connect()                      a client of the store, and the experiment of our runs
    register(client, run_id, ...)  a version of the model `stagecoach`, made by a run of stage deploy
    versions, champion, crown      the versions, the one with the alias `champion`, and giving a version the alias

The store is `sqlite:///$DVC_ROOT/mlflow.db` unless MLFLOW_TRACKING_URI is set. The evaluation of a version is stored
with its run as the artifact `evaluation`, so that a later version can be compared with it item by item. Which version
may be champion is decided in report/champion.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.run.errors import ConfigError

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

NAME, ALIAS, EVALUATION = "stagecoach", "champion", "evaluation"
DEFAULTS = {  # with its own, MLflow would retry for four minutes and warn at each try
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


@dataclass(frozen=True)
class Version:
    """A registered model."""

    number: str
    run_id: str
    tags: dict[str, str]  # work.key, git.commit, model, and the reason it became champion


def connect() -> tuple[MlflowClient, str]:
    """A client, and the id of the experiment `stagecoach`, created if it is missing. Raises ConfigError, and whatever
    MLflow raises.
    """
    for variable, value in DEFAULTS.items():
        os.environ.setdefault(variable, value)
    root = Path(os.environ.get("DVC_ROOT", ".")).resolve()
    uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{root / 'mlflow.db'}")
    (root / ".work").mkdir(exist_ok=True)
    with warnings.catch_warnings(), (root / ".work" / "mlflow.lock").open("w") as lock:
        warnings.simplefilter("ignore")
        fcntl.flock(lock, fcntl.LOCK_EX)  # else two first users would both create the tables
        _check_file(uri)
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        experiment = client.get_experiment_by_name("stagecoach")
        if experiment is not None:
            return client, experiment.experiment_id
        artifacts = (root / "mlartifacts").as_uri() if uri.startswith("sqlite") else None
        return client, client.create_experiment("stagecoach", artifact_location=artifacts)


def _check_file(uri: str) -> None:
    """Raise ConfigError if SQLite cannot open the store's file, a folder for example: MLflow would try for 100
    seconds.
    """
    path = uri.removeprefix("sqlite:///").partition("?")[0]
    if path in (uri, "", ":memory:"):
        return
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=60.0)) as store:
            store.execute("pragma schema_version").fetchone()
    except sqlite3.Error as error:
        what = "a folder" if Path(path).is_dir() else f"what SQLite cannot open ({error})"
        raise ConfigError(
            f"{path}: expected MLflow's database, found {what}; move it away, or set MLFLOW_TRACKING_URI"
        ) from error


def register(client: MlflowClient, run_id: str, folder: Path, tags: Mapping[str, str]) -> Version:
    """The version of a run, created from `folder` if the run has none yet."""
    from mlflow.exceptions import MlflowException

    for version in versions(client):
        if version.run_id == run_id:
            return version
    try:
        client.create_registered_model(NAME)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    created = client.create_model_version(NAME, source=folder.resolve().as_uri(), run_id=run_id, tags=dict(tags))
    return _version(created)


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
    """Store a version's evaluation with its run, then make the version champion."""
    for path in evaluation:
        client.log_artifact(version.run_id, str(path), EVALUATION)
    for key, value in tags.items():
        client.set_model_version_tag(NAME, version.number, key, value)
    client.set_registered_model_alias(NAME, ALIAS, version.number)  # last: the evaluation is stored by now


def evaluation(client: MlflowClient, version: Version, scratch: Path) -> Path:
    """The folder with a version's evaluation, downloaded into `scratch`."""
    return Path(client.download_artifacts(version.run_id, EVALUATION, str(scratch)))


def _version(registered: ModelVersion) -> Version:
    return Version(str(registered.version), str(registered.run_id or ""), dict(registered.tags))
