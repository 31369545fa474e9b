"""A copy of the code to edit, and the stages that would run again after an edit."""

import shutil
from pathlib import Path

import pytest

from pipeline.run import codehash

ROOT = Path(__file__).parents[1]
STAGES = sorted(path.stem for path in (ROOT / "stages").glob("*.py") if path.stem != "__init__")


def copied(folder: Path) -> Path:
    for name in ("pipeline", "stages"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(name="own")
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STAGECOACH_WORK", str(tmp_path / ".work"))
    return copied(tmp_path)


def hashes(root: Path) -> dict[str, dict[str, tuple[str, list[str]]]]:
    return codehash.closures(root, STAGES)


def rerun(root: Path, before: dict[str, dict[str, tuple[str, list[str]]]]) -> set[str]:
    return {stage for stage, now in hashes(root).items() if now != before[stage]}


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path} does not hold {old!r}"
    path.write_text(text.replace(old, new, 1))
