"""The alias `champion` of the registered model: the deployed model to use.

    python -m pipeline.report.champion             show the champion and all registered versions
    python -m pipeline.report.champion crown       make the model in models/deploy the champion, if it is good enough
    python -m pipeline.report.champion crown --although "REASON"      despite objections; the reason is recorded

A model is good enough if, for each measure in `report.gate` (by a headline's key, as `dvc metrics show` prints it), the
worse end of its interval reaches the target, and if no measure is significantly worse than the current champion's,
compared item by item. An empty gate is an objection, and so is a champion that was evaluated on different items. The
model that was evaluated must be the one that was deployed. Otherwise, the alias does not move.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from pipeline.report import claims
from pipeline.report.claims import Measured
from pipeline.report.metrics import HEADLINES, lines, read
from pipeline.run import mlflow_store
from pipeline.run.config import Settings, stage_params
from pipeline.run.errors import GateError, InputError, StagecoachError
from pipeline.run.mlflow_store import Version
from pipeline.run.types import JsonObject

METRICS = Path("metrics")
NO_GATE = "report.gate sets no target; set one in params.yaml, such as `gate: {easy: 0.5}`"


def deployed() -> tuple[str, str, list[Path]]:
    """The name of the model in models/deploy, the deployment's key, and its evaluation files. Raises InputError."""
    deployment = _read(METRICS / "deploy.json", "dvc repro stage_deploy")
    model = str(deployment["model"])
    paths = [METRICS / "eval" / f"{model}.{end}" for end in ("json", "jsonl")]
    evaluation = _read(paths[0], f"dvc repro stage_evaluate@{model}")
    deployed_hash, measured_hash = (
        metrics["lineage"]["inputs"].get(f"models/{model}") for metrics in (deployment, evaluation)
    )
    if deployed_hash != measured_hash:
        raise InputError(
            f"{paths[0]} was measured on a different models/{model} ({measured_hash}) than the one that was"
            f" deployed ({deployed_hash}); run dvc repro"
        )
    return model, str(deployment["lineage"]["key"]), paths


def _read(path: Path, command: str) -> JsonObject:
    if not path.is_file():
        raise InputError(f"{path} does not exist; run {command}")
    return json.loads(path.read_text(encoding="utf-8"))


def objections(gates: list[claims.Claim], candidate: Measured, present: Measured | None) -> list[str]:
    """The reasons why the candidate is not good enough; empty if it is."""
    reasons = [f"{gate.title}: {gate.measured or gate.state}" for gate in gates if gate.state != claims.HOLDS]
    incomparable: dict[str, list[str]] = {}
    for headline in HEADLINES:
        change = None if present is None else claims.change(headline, present, candidate)
        if change is not None and change.kind == "worse":
            reasons.append(f"{headline.title} is worse than the champion's: {change.shown}")
        if change is not None and change.refused:
            incomparable.setdefault(change.refused, []).append(headline.title)
    return reasons + [
        f"not comparable with the champion, {why} ({', '.join(titles)})" for why, titles in incomparable.items()
    ]


def crown(although: str | None) -> str:
    """Make the deployed model the champion. Raises GateError for objections, InputError if it is not registered."""
    model, key, paths = deployed()
    gate = stage_params("report", Settings(Path(), [])).gate
    gates = claims.gates(read(METRICS), gate)
    client, _ = mlflow_store.connect()
    candidate = next((v for v in mlflow_store.versions(client) if v.tags.get("work.key") == key), None)
    if candidate is None:
        raise InputError(
            f"the deployment {key} is not registered in this MLflow store: it was built elsewhere, or while MLflow was"
            " unavailable; build it here with python -m stages.deploy runtime.fresh=true"
        )
    present = mlflow_store.champion(client)
    if present is not None and present.number == candidate.number:
        return f"version {present.number} ({model}, key {key}) is already the champion"
    with tempfile.TemporaryDirectory(prefix="stagecoach-champion-") as scratch:
        measured = None if present is None else _measured(mlflow_store.evaluation(client, present, Path(scratch)))
        reasons = [] if gate else [NO_GATE]
        reasons += objections(gates, Measured(json.loads(paths[0].read_text()), lines(paths[1])), measured)
    if reasons and although is None:
        raise GateError(
            f"version {candidate.number} ({model}) was not made the champion: "
            + "; ".join(reasons)
            + '. To override, run crown --although "REASON"'
        )
    tags = {"champion.although": f"{although}: {'; '.join(reasons)}"} if reasons and although else {}
    mlflow_store.crown(client, candidate, paths, tags)
    return f"version {candidate.number} ({model}, key {key}) is now the champion" + (
        f", replacing version {present.number}" if present else ""
    )


def _measured(folder: Path) -> Measured:
    (path,) = folder.glob("*.json")
    return Measured(json.loads(path.read_text(encoding="utf-8")), lines(path.with_suffix(".jsonl")))


def listing(versions: list[Version], present: Version | None) -> str:
    """One line of text per version."""
    rows = [
        f"{'*' if present and version.number == present.number else ' '} version {version.number} "
        f" {version.tags.get('model', '?'):12} key {version.tags.get('work.key', '?')}  commit"
        f" {version.tags.get('git.commit', '')[:10] or '–'}"
        for version in versions
    ]
    return "\n".join(rows) or "no versions registered yet; dvc repro stage_deploy registers the model it deploys"


def main(arguments: list[str]) -> int:
    """Command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.report.champion", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("command", nargs="?", choices=["show", "crown"], default="show")
    parser.add_argument("--although", metavar="REASON")
    options = parser.parse_args(arguments)
    try:
        if options.command == "crown":
            sys.stdout.write(crown(options.although) + "\n")
        else:
            client, _ = mlflow_store.connect()
            sys.stdout.write(listing(mlflow_store.versions(client), mlflow_store.champion(client)) + "\n")
    except StagecoachError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
