"""Commits as dialogues: what is asked, what is dropped and why, limits, and a repository that tries to run code."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.ingest import history, mixture
from pipeline.ingest.entries import RepositoryEntry
from pipeline.ingest.intake import RowCounts
from pipeline.ingest.records import Dialogue
from pipeline.ingest.sources import DataConfig
from pipeline.run.errors import DataError
from pipeline.run.processes import output_of


def git(root: Path, *arguments: str) -> None:
    name = ("-c", "user.name=A", "-c", "user.email=ann@corp.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *name, *arguments], cwd=root, check=True, capture_output=True)


def commit(root: Path, files: dict[str, str], message: str) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    git(root, "add", "-A")
    git(root, "commit", "-q", "--allow-empty", "-m", message)


@pytest.fixture(name="root")
def repository_with_commits(tmp_path: Path) -> Path:
    root = tmp_path / "own/mine"
    root.mkdir(parents=True)
    git(root, "init", "-q")
    commit(root, {"a/x.py": "x = 1\n", "b/y.py": "y = 1\n"}, "Start with two files")
    commit(root, {"a/x.py": "x = 2\n"}, "Double x\n\nAsk ann@corp.org about it.")
    commit(root, {"b/y.py": "y = 2\n"}, "Set y to two")
    commit(root, {"a/x.py": "x = 3\n"}, "wip")
    commit(root, {}, "Nothing is changed here")
    commit(root, {"a/long.py": "".join(f"x{n} = {n}\n" for n in range(900))}, "Add a long file")
    commit(root, {"a/key.py": "TOKEN = 'ghp_" + "a1B2" * 9 + "'\n"}, "Add the key of production")
    return root


def read(tmp_path: Path, **keys: Any) -> tuple[list[tuple[str, Dialogue]], RowCounts]:
    entry = RepositoryEntry(repository="mine", **keys)
    config = DataConfig(source="files", dialogues=[entry], val_share=0.0, test_share=0.0)
    (tmp_path / "parts").mkdir(exist_ok=True)
    tally = RowCounts()
    rows = list(history.read(tmp_path / "own", config, tmp_path / "parts", tally))
    return [(row.split, row.record) for row in rows if isinstance(row.record, Dialogue)], tally


def test_a_commit_asks_for_its_message_and_what_cannot_be_learnt_from_is_counted(root: Path, tmp_path: Path) -> None:
    rows, tally = read(tmp_path)
    assert [record.messages[1]["content"].split("\n")[0] for _, record in rows] == [
        "Set y to two",
        "Double x",
        "Start with two files",
    ]
    asked = rows[0][1].messages[0]["content"]
    assert asked.startswith("Write the commit message of this change.\n\n```diff\ndiff --git a/b/y.py b/b/y.py\n")
    assert asked.endswith("@@ -1 +1 @@\n-y = 1\n+y = 2\n```")
    assert "ann@corp.org" not in rows[1][1].messages[1]["content"]
    assert (tally.totals["accepted"], tally.totals["rejected"]) == (3, 4)
    reasons = (tmp_path / "parts/dialogues-repository-0-rejected.jsonl").read_text()
    assert all(reason in reasons for reason in ("fewer than 3 words", "has no text", "more than 4000", "secret"))


def test_a_commit_that_changes_a_held_out_folder_is_not_trained_on(root: Path, tmp_path: Path) -> None:
    rows, _ = read(tmp_path, held_out=["b"])
    assert [split for split, _ in rows] == ["val", "train", "val"]


def test_commits_are_a_lot_of_the_dialogues(root: Path, tmp_path: Path) -> None:
    config = DataConfig(source="files", dialogues=[RepositoryEntry(repository="mine", held_out=["b"])])
    tallies: dict[str, RowCounts] = {}
    (lot,) = mixture.read_lots("dialogues", Dialogue, config, tmp_path / "own", tmp_path / "parts", tallies)
    assert {split: len(records) for split, records in lot.splits.items()} == {"train": 1, "val": 1, "test": 1}
    assert (lot.source, tallies["dialogues"].totals["accepted"]) == ("files", 3)


def test_a_repository_s_own_configuration_runs_nothing(root: Path, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    for key in ("core.fsmonitor", "core.pager", "diff.external", "diff.own.textconv", "gpg.program"):
        git(root, "config", key, str(program))
    git(root, "config", "log.showSignature", "true")
    (root / ".git/info").mkdir(exist_ok=True)
    (root / ".git/info/attributes").write_text("*.py diff=own\n")
    assert len(read(tmp_path)[0]) == 3 and not (tmp_path / "ran").exists()


def test_without_commits_or_git_the_error_says_so(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="needs git"):
        read(tmp_path)
    monkeypatch.undo()
    (root / ".git/HEAD").write_text("broken")
    with pytest.raises(DataError, match="git cannot read the commits"):
        read(tmp_path)
    (root / ".git").rename(tmp_path / "gone")
    with pytest.raises(DataError, match=r"has no \.git"):
        read(tmp_path)


def test_a_program_is_stopped_at_its_bounds() -> None:
    endless = [sys.executable, "-c", "while True: print('x' * 1000)"]
    done = output_of(endless, environment={}, most_bytes=5000, seconds=60.0)
    assert len(done.output) == 5000 and done.code is None
    silent = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert output_of(silent, environment={}, most_bytes=10, seconds=0.5).code is None
    failed = [sys.executable, "-c", "import sys; sys.exit('why')"]
    assert output_of(failed, environment={}, most_bytes=10, seconds=60.0).code == 1
