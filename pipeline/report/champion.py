"""The alias `champion` of the registered model: which deployed model is the one to use.

    python -m pipeline.report.champion             who is champion, and who else was registered
    python -m pipeline.report.champion crown       make the model in models/deploy champion, if it is good enough
    python -m pipeline.report.champion crown --although "REASON"      in spite of what was found; the reason is kept

Good enough: each minimum of `report.gate` (by a headline's key, as `dvc metrics show` prints it) lies at or below the
lower end of the measure's interval, and no measure is worse than the present champion's beyond chance, item by item. A
champion that was measured over other items cannot be compared with, which is an objection too. What was measured must
be of the very model that was deployed. Nothing moves otherwise.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from pipeline.report import claims
from pipeline.report.claims import Measured
from pipeline.report.metrics import HEADLINES, lines, read
from pipeline.run import registry
from pipeline.run.config import Settings, stage_params
from pipeline.run.errors import GateError, InputError, StagecoachError
from pipeline.run.registry import Version

METRICS = Path("metrics")


def deployed() -> tuple[str, str, list[Path]]:
    """The name of the model that models/deploy holds, the key of the deployment, the files of its evaluation. Raises
    InputError.
    """
    facts = _read(METRICS / "deploy.json", "dvc repro stage_deploy")
    model = str(facts["model"])
    paths = [METRICS / "eval" / f"{model}.{end}" for end in ("json", "jsonl")]
    measured = _read(paths[0], f"dvc repro stage_evaluate@{model}")
    mine, theirs = (told["lineage"]["inputs"].get(f"models/{model}") for told in (facts, measured))
    if mine != theirs:
        raise InputError(
            f"{paths[0]} was measured of another models/{model} ({theirs}) than the one that was deployed ({mine}); run"
            " dvc repro"
        )
    return model, str(facts["lineage"]["key"]), paths


def _read(path: Path, command: str) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"{path} does not exist; make it with: {command}")
    return json.loads(path.read_text(encoding="utf-8"))


def objections(gates: list[claims.Claim], candidate: Measured, present: Measured | None) -> list[str]:
    """Why the candidate is not good enough; empty where it is."""
    found = [f"{one.title}: {one.measured or one.state}" for one in gates if one.state != claims.HOLDS]
    others: dict[str, list[str]] = {}
    for headline in HEADLINES:
        change = None if present is None else claims.change(headline, present, candidate)
        if change is not None and change.kind == "worse":
            found.append(f"{headline.title} is worse than the champion's: {change.shown}")
        if change is not None and change.refused:
            others.setdefault(change.refused, []).append(headline.title)
    return found + [f"not comparable with the champion, {why} ({', '.join(titles)})" for why, titles in others.items()]


def crown(although: str | None) -> str:
    """Give the alias to what is deployed. Raises GateError with the objections, InputError where nothing is
    registered.
    """
    model, key, paths = deployed()
    gates = claims.gates(read(METRICS), stage_params("report", Settings(Path(), [])).gate)
    client, _ = registry.connect()
    candidate = next((one for one in registry.versions(client) if one.tags.get("work.key") == key), None)
    if candidate is None:
        raise InputError(
            f"the deployment {key} is not registered in this MLflow store: it was built elsewhere, or while MLflow did"
            " not answer; build it here with python -m stages.deploy runtime.fresh=true"
        )
    present = registry.champion(client)
    if present is not None and present.number == candidate.number:
        return f"version {present.number} ({model}, key {key}) is champion already"
    with tempfile.TemporaryDirectory(prefix="stagecoach-champion-") as scratch:
        before = None if present is None else _measured(registry.evaluation(client, present, Path(scratch)))
        found = objections(gates, Measured(json.loads(paths[0].read_text()), lines(paths[1])), before)
    if found and although is None:
        raise GateError(
            f"version {candidate.number} ({model}) is not made champion: "
            + "; ".join(found)
            + '. To do it all the same: crown --although "REASON"'
        )
    tags = {"champion.although": f"{although}: {'; '.join(found)}"} if found and although else {}
    registry.crown(client, candidate, paths, tags)
    return f"version {candidate.number} ({model}, key {key}) is champion now" + (
        f", after version {present.number}" if present else ""
    )


def _measured(folder: Path) -> Measured:
    (path,) = folder.glob("*.json")
    return Measured(json.loads(path.read_text(encoding="utf-8")), lines(path.with_suffix(".jsonl")))


def listing(versions: list[Version], present: Version | None) -> str:
    """A line per version."""
    rows = [
        f"{'*' if present and one.number == present.number else ' '} version {one.number} "
        f" {one.tags.get('model', '?'):12} key {one.tags.get('work.key', '?')}  commit"
        f" {one.tags.get('git.commit', '')[:10] or '–'}"
        for one in versions
    ]
    return "\n".join(rows) or "nothing is registered yet; dvc repro stage_deploy registers what it deploys"


def main(arguments: list[str]) -> int:
    """The commands above."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.report.champion", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("command", nargs="?", choices=["show", "crown"], default="show")
    parser.add_argument("--although", metavar="REASON")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "crown":
            sys.stdout.write(crown(chosen.although) + "\n")
        else:
            client, _ = registry.connect()
            sys.stdout.write(listing(registry.versions(client), registry.champion(client)) + "\n")
    except StagecoachError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
