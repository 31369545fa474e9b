"""A user's small checkpoints, imported as models/base, and stages that start from them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import checkpoints
from tests.workspace import Ended, Workspace, command


def take_in(folder: Path | None = None, **keys: str) -> Ended:
    """Run stage base on a folder, or with other keys."""
    keys = keys if folder is None else {"folder": str(folder)}
    return command("base", [f"base.{key}={value}" for key, value in keys.items()])


def causal_given(folder: Path, shape: str) -> None:
    """Write a small checkpoint and import it as models/base."""
    pytest.importorskip("transformers")
    checkpoints.write(folder, shape, max_position_embeddings=512)
    ended = take_in(folder)
    assert ended.code == 0, ended.said


def trained(workspace: Workspace, stage: str, **changes: Any) -> None:
    """Run a stage from models/base."""
    ended = workspace.command(stage, base="base", **changes)
    assert ended.code == 0, f"{stage}: {ended.said}"
    lineage = json.loads(Path(f"models/{stage}/lineage.json").read_text())
    assert "models/base" in lineage["inputs"]
    assert lineage["tokenizer"] == json.loads(Path("models/base/lineage.json").read_text())["tokenizer"]
