"""A wing is removed by deleting its folder, its stages, its keys and its tests; the rest works without it."""

import dataclasses
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.graph import Repository

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[1]
IMPORT_ALL = """
import importlib, sys
from pathlib import Path
sys.path.append("pipeline/sandbox")  # what runs inside finds its neighbors there
for path in sorted(path for folder in ("pipeline", "stages") for path in Path(folder).rglob("*.py")):
    importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
"""
QUICK = ("architecture", "card", "docs", "evaluate", "footprint", "params", "purposes", "reference_keys", "wiring")


def copied(folder: Path) -> Path:
    """A copy of the files that git tracks or would add."""
    listed = ["git", "ls-files", "-co", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def remove(folder: Path, wing: str) -> None:
    """Delete a wing from a copy of the repository: files with its name, its lines in the graph, keys and commands."""
    stages = [path.stem for path in (folder / "stages").glob(f"{wing}*.py")]
    offer = getattr(importlib.import_module(f"pipeline.{wing}.wing"), "evaluation_keys", None)
    keys = [field.name for field in dataclasses.fields(offer())] if offer else []
    shutil.rmtree(folder / "pipeline" / wing)
    for pattern in (f"stages/{wing}*.py", f"tests/{wing}*.py", f"tests/test_{wing}*.py", f"benchmarks/{wing}*.py"):
        for path in folder.glob(pattern):
            path.unlink()
    yaml = YAML()
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.width = 1000
    graph = yaml.load(folder / "dvc.yaml")
    models = {Path(out).name for stage in stages for out in graph["stages"][f"stage_{stage}"]["outs"]}
    for stage in stages:
        del graph["stages"][f"stage_{stage}"]
    matrix, versions = graph["stages"]["stage_evaluate"]["matrix"], graph["stages"]["code_versions"]
    matrix["model"] = [model for model in matrix["model"] if model not in models]
    versions["outs"] = [out for out in versions["outs"] if Path(next(iter(out))).stem not in stages]
    yaml.dump(graph, folder / "dvc.yaml")
    for path in (folder / "params.yaml", *(folder / "conf/scale").glob("*.yaml")):
        values = yaml.load(path)
        for stage in stages:
            for block in (values, values.get("seconds", {})):
                block.pop(stage, None)
        for key in keys:
            values.get("evaluate", {}).pop(key, None)
        yaml.dump(values, path)
    for path in (folder / "conf/model").glob("*.yaml"):
        if wing in yaml.load(path):
            path.unlink()
    for stage in stages:
        shutil.rmtree(folder / "conf/preset" / stage, ignore_errors=True)
    commands = folder / "docs/commands.md"
    rows = commands.read_text(encoding="utf-8").splitlines(keepends=True)
    commands.write_text("".join(row for row in rows if not row.startswith(f"| `stage_{wing}")), encoding="utf-8")


@pytest.mark.parametrize("wing", ["diffusion", "memory"])
def test_the_rest_works_without_a_wing(wing: str, tmp_path: Path) -> None:
    repository = Repository(copied(tmp_path / "repository"))
    remove(repository.folder, wing)
    repository.run(sys.executable, "-c", IMPORT_ALL)
    repository.run(sys.executable, "-m", "pipeline.run.config")
    repository.run(sys.executable, "-m", "pipeline.tools.reference")
    repository.run("dvc", "init", "-q", "--no-scm", "-f")
    repository.run("dvc", "stage", "list", "--all")
    pytest_ = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    repository.run(*pytest_, "--collect-only")
    quick = [f"tests/test_{name}.py" for name in QUICK if name != wing]
    repository.run(*pytest_, "-m", "not slow and not full and not oracle and not gpu", *quick)
