"""The stage writes the page and nothing else."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.report import card
from stages import report


def test_the_out_is_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "render", lambda metrics: f"<p>é of {metrics.name}</p>")
    job: Any = None
    report.run(report.Params(), job, metrics=tmp_path / "metrics", out=tmp_path / "index.html")
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]
    assert (tmp_path / "index.html").read_bytes() == "<p>é of metrics</p>".encode()
