"""The stage writes the page, a line of headlines for each model, and the charts as files."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from pipeline.report import baseline, card
from pipeline.report.metrics import HEADLINES, Prices, lookup, read
from pipeline.run.tracking import Tracker
from stages import report
from tests import results
from tests.results import metrics_folder as metrics_folder


def job_in(folder: Path) -> Any:
    """The part of its job that the stage uses."""
    return SimpleNamespace(tracker=Tracker("report", folder, {}, {}, quiet=True))


def written(metrics: Path, folder: Path) -> dict[str, Path]:
    folder.mkdir()
    outs = {"out": folder / "index.html", "plots": folder / "plots", "headlines": folder / "headlines"}
    report.run(report.Params(samples=2), job_in(folder), metrics=metrics, **outs)
    assert sorted(folder.iterdir()) == sorted(outs.values())
    return outs


def test_the_page_is_the_card(metrics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "render", lambda metrics, **_: f"<p>é of {metrics.name}</p>")
    assert written(metrics, tmp_path / "out")["out"].read_bytes() == f"<p>é of {metrics.name}</p>".encode()


def test_each_model_has_its_headlines_and_one_that_is_not_evaluated_no_file(metrics: Path, tmp_path: Path) -> None:
    (metrics / "eval/code.json").unlink()
    lines = written(metrics, tmp_path / "out")["headlines"]
    assert sorted(path.stem for path in lines.iterdir()) == ["language", "tools"]
    for model in ("language", "tools"):
        numbers = json.loads((metrics / f"eval/{model}.json").read_text())
        line = json.loads((lines / f"{model}.json").read_text())
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


def test_samples_and_prices_of_the_block_reach_the_page_and_a_baseline_is_read_from_its_commit(
    metrics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def page(name: str, **keys: Any) -> str:
        (tmp_path / name).mkdir()
        outs = {key: tmp_path / name / key for key in ("out", "plots", "headlines")}
        report.run(report.Params(**{"samples": 2} | keys), job_in(tmp_path / name), metrics=metrics, **outs)
        return outs["out"].read_text()

    plain = page("plain")
    assert plain.count('class="answers"') == 4 and page("few", samples=1).count('class="answers"') == 3
    assert "No price is set" in plain and "CHF" in page("priced", prices=Prices(core=1.0, currency="CHF"))
    other = results.write(tmp_path / "before")
    code = json.loads((other / "code.json").read_text())
    (other / "code.json").write_text(json.dumps(code | {"lineage": code["lineage"] | {"key": "oldkey"}}))
    asked: list[str] = []
    monkeypatch.setattr(baseline, "at", lambda revision: asked.append(revision) or read(other))
    text = page("compared", baseline="0123456789" * 4)
    assert asked == ["0123456789" * 4] and "Compared with 0123" in text and "oldkey" in text and "Compared" not in plain
