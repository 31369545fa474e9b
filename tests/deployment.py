"""The stage that deploys, run in this process, and the manifests that it reads."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stages import deploy


def manifests(folder: Path) -> dict[str, Path]:
    """Manifests as stage corpus writes them, with the fields that the card uses."""
    paths = {}
    for name, licenses in (("text", {"CC0-1.0": 600, "MIT": 400}), ("code", {"PSF-2.0": 1, "a|b\n": 2})):
        manifest = {
            "data": "machine",
            "parts": {"stories": {}, "prose": {}},
            "documents": {"train": 7, "val": 3},
            "bytes": {"train": 900, "val": 100},
            "licenses": {key: {"bytes": size, "files": 1} for key, size in licenses.items()},
        }
        paths[name] = folder / name / "manifest.json"
        paths[name].parent.mkdir()
        paths[name].write_text(json.dumps(manifest))
    return paths


@pytest.fixture(name="corpora")
def both_manifests(tmp_path: Path) -> dict[str, Path]:
    """The manifests of both corpora."""
    return manifests(tmp_path)


def deployed(
    params: deploy.Params, base: Path, out: Path, corpora: dict[str, Path], lineage: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run the stage; returns what it reported."""
    told: dict[str, Any] = {}
    job: Any = SimpleNamespace(
        lineage=lineage or {"key": "deploy-key"}, report=told.update, register=lambda folder, **tags: None
    )
    deploy.run(params, job, base=base, out=out, **corpora)
    return told


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
