"""The page: equal bytes, no outside resources, hostile text stays text, every number is the one in its file."""

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipeline.report import card
from pipeline.report import metrics as report_metrics
from pipeline.report.metrics import HEADLINES, MetricsRun
from tests import results
from tests.results import metrics_folder as metrics_folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of the made-up run, rendered once."""
    folder = tmp_path_factory.mktemp("card")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAGECOACH_WORK", str(folder / ".work"))
        return card.render(results.write(folder / "metrics"))


class Page(HTMLParser):
    """Tags, attributes and table cells of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "path", "use"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data + " "


def test_built_twice_it_has_equal_bytes_and_stray_files_change_nothing(metrics: Path, text: str) -> None:
    for name in (
        "stray.json",
        "stray.csv",
        "eval/stray.json",
        "eval/stray.jsonl",
        "notes.txt",
        ".language.json.12.part",
    ):
        (metrics / name).write_text('{"text": {"bpb": 0.5}}')
    assert card.render(metrics) == text


def test_it_refers_to_nothing_outside_and_runs_nothing(text: str) -> None:
    page = Page(text)
    assert page.open == []
    assert "script" not in page.tags and "link" not in page.tags and "img" not in page.tags
    assert not [a for a in page.attributes if a[0] in ("src", "srcset", "action", "data") or a[0].startswith("on")]
    assert {value[:1] for name, value in page.attributes if name == "href"} == {"#"}
    for word in ("<script", "url(", "@import", "http:", "https:"):
        assert word not in text, word
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    assert len(text.encode()) < 2_000_000


def test_no_id_stands_twice_and_every_reference_has_one(text: str) -> None:
    attributes = Page(text).attributes
    ids = [value for name, value in attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {value[1:] for name, value in attributes if name == "href"} <= set(ids)


def test_what_a_model_wrote_stays_text(text: str) -> None:
    assert text.count(html.escape(results.HOSTILE, quote=False).replace('"', "&#34;").replace("'", "&#39;")) == 5
    assert "<img" not in text


def test_every_headline_number_equals_its_file(metrics: Path, text: str) -> None:
    page = Page(text)
    files = [json.loads((metrics / "eval" / f"{m}.json").read_text()) for m in results.MODELS]
    rows = {row[0].strip(): row[1:] for row in page.rows if len(row) == 4}
    for headline in HEADLINES:
        if headline.key in ("code_bpb_bound", "facts", "pairs", "ast_grammar"):  # none of these models has one
            assert f"{headline.title} {headline.axis}" not in rows
            continue
        cells = rows[f"{headline.title} {headline.axis}"]
        for numbers, cell in zip(files, cells, strict=True):
            place = numbers
            for key in headline.path[:-1]:
                place = place.get(key, {})
            value = place.get(headline.path[-1])
            shown = "–" if value is None else f"{100 * value:.1f}%" if headline.unit == "share" else f"{value:.3f}"
            assert cell.split("  ")[0].strip().startswith(shown), (headline.title, cell)


def test_a_change_is_colored_only_where_intervals_are_apart_and_by_what_is_better(metrics: Path) -> None:
    rows = {row["headline"].path: row["cells"] for row in card.table(card.read(metrics))}
    text = rows["text", "bpb"]  # 1.812, 1.830, 1.900, each +- 0.03
    assert [c["kind"] for c in text] == ["", "", "worse"]
    assert [c["change"] for c in text] == ["", "+0.018", "+0.070"]
    assert [c["kind"] for c in rows["code", "bpb"]] == ["", "better", "worse"]
    assert [c["kind"] for c in rows["tools", "ast"]] == ["", "", "better"]
    assert rows["tools", "ast"][2]["interval"] == "51.0% to 65.0%"
    unsure = rows["problems", "parse_rate"]  # numbers without an interval say nothing about a change
    assert [(c["change"], c["interval"], c["kind"]) for c in unsure][1:] == [
        ("+59.0 points", "", ""),
        ("+21.0 points", "", ""),
    ]
    assert [c["value"] for c in rows["tools", "false_call_rate"]] == ["–", "–", "8.0%"]


def test_ppo_is_compared_with_its_policy_s_start_and_not_with_its_reward_model() -> None:
    """Otherwise the table would pass over a drop in tool calls from 14% to 0."""
    lineage = {"lineage": {"inputs": {"data/preferences": "1", "models/reward": "2", "models/tools": "3"}}}
    found = MetricsRun({"rlhf": lineage}, {}, {"tools": {}, "reward": {}, "rlhf": {}})
    assert found.bases == {"rlhf": "tools"}


def test_numbers_of_a_curve_stand_below_it_thinned_with_first_and_last() -> None:
    series = [card.Series("a", [(float(s), s / 100) for s in range(1, 101)]), card.Series("b", [(1.0, 5.0)])]
    rows = card.thinned(series, most=10)
    assert rows[0] == ["1", "0.0100", "5.0000"]
    assert rows[-1] == ["100", "1.0000", ""]
    assert 10 <= len(rows) <= 12
    assert card.thinned([card.Series("a", [(7.0, 1.0)])]) == [["7", "1.0000"]]


def test_time_comes_from_the_work_folder_of_the_key_or_was_elsewhere(metrics: Path, tmp_path: Path) -> None:
    folder = tmp_path / ".work" / "language" / "00000005abcdef00"
    folder.mkdir(parents=True)
    (folder / "speed.json").write_text('{"seconds": 12.34, "tokens_per_second": 9000, "device": "a CPU"}')
    (folder / "mlflow.json").write_text('{"run_id": "abc123"}')
    found = {row.stage: row for row in report_metrics.rows(card.read(metrics))}
    assert (found["language"].speed["seconds"], found["language"].device, found["language"].mlflow) == (
        12.34,
        "a CPU",
        "abc123",
    )
    assert (found["code"].speed, found["code"].device, found["code"].mlflow) == ({}, "built elsewhere", "")


def test_stages_are_in_pipeline_order(metrics: Path) -> None:
    run = card.read(metrics)
    assert tuple(run.stages) == results.STAGES
    assert tuple(run.evaluations) == results.MODELS


def test_answers_to_one_item_stand_together(metrics: Path) -> None:
    found = card.samples(card.read(metrics), 2)
    assert [(s["suite"], s["id"]) for s in found] == [
        ("stories", "stories/wish/50"),
        ("problems", "p-1"),
        ("tools", "t-1#2"),
        ("tools", "t-2#2"),
    ]
    assert [a["model"] for a in found[0]["answers"]] == list(results.MODELS)


def test_a_run_without_evaluations_or_without_anything_still_has_a_page(tmp_path: Path, metrics: Path) -> None:
    for path in (metrics / "eval").iterdir():
        path.unlink()
    assert 'id="results"' not in card.render(metrics)
    (tmp_path / "empty").mkdir()
    empty = card.render(tmp_path / "empty")
    assert (
        "<b>0</b>stages built" in empty
        and "<b>0</b>models evaluated" in empty
        and re.findall('id="([a-z]+)"', empty) == ["claims", "numbers"]
    )
