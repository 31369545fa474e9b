"""The stage writes the page, a line of headlines for each model, and the charts as files."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pipeline.report import card
from pipeline.report.headlines import HEADLINES, lookup
from stages import report
from tests import results

MODELS = ("language", "code", "tools")


@pytest.fixture
def metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STAGECOACH_WORK", str(tmp_path / ".work"))
    return results.write(tmp_path / "metrics")


def written(metrics: Path, folder: Path) -> dict[str, Path]:
    job: Any = None
    folder.mkdir()
    outs = {"out": folder / "index.html", "plots": folder / "plots"} | {m: folder / f"{m}.json" for m in MODELS}
    report.run(report.Params(), job, metrics=metrics, **outs)
    assert sorted(folder.iterdir()) == sorted(outs.values())
    return outs


def test_the_page_is_the_card(metrics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "render", lambda metrics: f"<p>é of {metrics.name}</p>")
    assert written(metrics, tmp_path / "out")["out"].read_bytes() == f"<p>é of {metrics.name}</p>".encode()


def test_each_model_has_its_headlines_and_one_that_is_not_evaluated_none(metrics: Path, tmp_path: Path) -> None:
    (metrics / "eval/code.json").unlink()
    outs = written(metrics, tmp_path / "out")
    assert json.loads(outs["code"].read_text()) == {}
    for model in ("language", "tools"):
        numbers = json.loads((metrics / f"eval/{model}.json").read_text())
        line = json.loads(outs[model].read_text())
        for headline in HEADLINES:
            measured = lookup(numbers, headline)
            assert line.get(headline.key) == (measured and round(measured["value"], 4))
    assert line["ast"] == 0.58 and line["easy"] == 0.44


def test_every_chart_of_the_page_is_a_picture_that_needs_nothing_else(metrics: Path, tmp_path: Path) -> None:
    pictures = sorted(written(metrics, tmp_path / "out")["plots"].iterdir())
    assert [path.name for path in pictures][:2] == ["0-training-loss.svg", "1-validation.svg"]
    assert len(pictures) == len(card.figures(card.read(metrics)))
    for path in pictures:
        root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
        assert root.tag == "{http://www.w3.org/2000/svg}svg" and int(root.attrib["width"]) > 0
        assert "http" not in path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "", 1)
