"""The table at the end of `make`."""

from pathlib import Path

from pipeline.report.card import text_table
from tests import results
from tests.results import metrics_folder as metrics_folder


def test_columns_are_models_and_line_up(metrics: Path) -> None:
    lines = text_table(metrics).splitlines()
    head, rule, *rows = lines
    assert head.split() == ["held-out", "result", "language", "code", "tools"]
    starts = [head.index(model) for model in results.MODELS]
    assert all(rule[start - 1] == " " and rule[start] == "-" for start in starts)
    (ast,) = [row for row in rows if row.startswith("Correct tool calls (AST)")]
    assert [ast[start:].split("  ")[0].strip() for start in starts] == ["0.0%", "0.0%", "58.0% [51.0% to 65.0%]"]
    (unseen,) = [row for row in rows if row.startswith("Correct calls of unseen tools")]
    assert [unseen[start:].split("  ")[0].strip() for start in starts] == ["–", "–", "31.0%"]


def test_seconds_stand_below_where_this_machine_built(metrics: Path, tmp_path: Path) -> None:
    assert "seconds" not in text_table(metrics)
    folder = tmp_path / ".work" / "code" / "00000006abcdef00"
    folder.mkdir(parents=True)
    (folder / "speed.json").write_text('{"seconds": 83.6}')
    assert text_table(metrics).endswith("\n\nseconds: code 84")


def test_nothing_evaluated_says_what_to_run(tmp_path: Path) -> None:
    assert text_table(tmp_path) == f"no evaluations in {tmp_path}/eval yet; run dvc repro"
