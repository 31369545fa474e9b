"""Shared fixtures: tiny models, a tokenizer of bytes, a scratch repository."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("STAGECOACH_MLFLOW", "off")  # tests of MLflow switch it on; the rest need not wait for it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).parents[1]


@pytest.fixture()
def in_repository(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work from the repository's root, as `dvc repro` does."""
    monkeypatch.chdir(ROOT)
    return ROOT
