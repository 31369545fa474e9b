"""pipeline/report/baseline.py: metrics of a commit, and pinning it."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.report import baseline
from pipeline.run.errors import ConfigError, InputError
from stages.report import Params

GRAPH = """
stages:
  code:
    cmd: mkdir -p metrics/eval && cp given.json metrics/code.json && cp given.json metrics/eval/code.json
    deps: [given.json]
    outs: [metrics/code.json, metrics/eval/code.json]
"""


def told(key: str) -> str:
    return json.dumps({"lineage": {"key": key}, "best": {"val_bpb": 1.5}})


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with two commits, whose metrics say `first` and `second`."""
    folder = tmp_path_factory.mktemp("history")

    def do(*command: str) -> None:
        subprocess.run(command, cwd=folder, check=True, capture_output=True)

    do("git", "init", "-q", "-b", "main")
    do("git", "config", "user.email", "a@b.c")
    do("git", "config", "user.name", "a")
    do("dvc", "init", "-q")
    (folder / "dvc.yaml").write_text(GRAPH)
    (folder / "params.yaml").write_text(
        "seed: 1\n\nreport:\n  samples:         # items\n  baseline:        # a commit\n\nx: {baseline: 2}\n"
    )
    for name in ("first", "second"):
        (folder / "given.json").write_text(told(name))
        do("dvc", "repro", "-q")
        do("git", "add", "-A")
        do("git", "commit", "-qm", name)
    return folder


@pytest.fixture
def here(history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(history, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.slow
@pytest.mark.full
def test_the_metrics_of_a_commit_come_from_the_cache_and_leave_the_workspace_alone(here: Path) -> None:
    assert baseline.at("HEAD~1").stages["code"]["lineage"]["key"] == "first"
    found = baseline.at("main")
    assert found.stages["code"]["lineage"]["key"] == found.evaluations["code"]["lineage"]["key"] == "second"
    assert json.loads((here / "metrics/code.json").read_text())["lineage"]["key"] == "second"
    assert baseline.at("workspace").stages["code"]["lineage"]["key"] == "second"


@pytest.mark.slow
@pytest.mark.full
def test_what_is_not_there_is_said_with_what_to_do(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="nowhere: expected a commit, branch, tag or experiment"):
        baseline.at("nowhere")
    shutil.rmtree(here / ".dvc/cache")
    with pytest.raises(InputError, match="dvc fetch --all-commits"):
        baseline.at("HEAD~1")
    shutil.rmtree(here / "metrics")
    with pytest.raises(InputError, match="metrics/ does not exist; run dvc repro"):
        baseline.at("workspace")
    assert baseline.main(["pin", "HEAD~1"]) == 2 and "dvc fetch" in capsys.readouterr().err
    assert "baseline:  " in (here / "params.yaml").read_text()


@pytest.mark.slow
@pytest.mark.full
def test_a_pinned_commit_is_a_full_hash_in_its_line_and_nothing_else_changes(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (here / "params.yaml").read_text()
    assert baseline.main(["pin", "HEAD~1"]) == 0
    said = capsys.readouterr().out.split()[3].rstrip(";")
    assert Params(samples=1, baseline=said).baseline == said
    assert (here / "params.yaml").read_text() == before.replace("baseline:        # a", f"baseline: {said}        # a")
    assert baseline.at(said).stages["code"]["lineage"]["key"] == "first"
    assert baseline.main(["unpin"]) == 0
    assert (here / "params.yaml").read_text() == before
    (here / "params.yaml").write_text(before.replace("baseline:  ", "baseline: null  "))  # as a user may write it
    assert baseline.main(["unpin"]) == 0
    assert (here / "params.yaml").read_text() == before


def test_a_file_without_the_line_and_a_wrong_command_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "params.yaml").write_text("x:\n  baseline: 1\nreport:\n  samples: 1\n")
    with pytest.raises(ConfigError, match="expected a block `report:`"):
        baseline.pin(tmp_path / "params.yaml", "a")
    assert baseline.main(["pin", "a", "b"]) == 2 and "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["main", "HEAD~1", "abc123", "G" * 40])
def test_a_baseline_that_is_no_full_hash_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="baseline: expected the full hash of a commit"):
        Params(samples=1, baseline=name)
