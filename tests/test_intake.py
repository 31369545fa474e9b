"""Intake of own files: rejected rows and their limit, shapes, duplicates, splits, and documents that are cut."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.ingest import files, intake, own_files
from pipeline.ingest.intake import RowCounts, cut, split_of
from pipeline.ingest.records import Text
from pipeline.ingest.sources import DataConfig
from pipeline.run.errors import DataError
from tests.ownfiles import jsonl, notebook, read, texts


def test_too_many_rejected_rows_fail_after_the_last_record(own: Path) -> None:
    (own / "a.jsonl").write_text(jsonl(*({"text": f"row {n}"} for n in range(99)), {"text": 1}))
    assert len(read(own, max_rejected=0.01).records) == 99
    (own / "b.jsonl").write_text(jsonl({"text": 2}))
    with pytest.raises(DataError, match=r"2 of 101 rows were rejected[\s\S]*a.jsonl:100: text:"):
        read(own, max_rejected=0.01)


def test_a_file_that_fits_no_shape_says_what_it_has(own: Path) -> None:
    (own / "a.jsonl").write_text(jsonl({"body": "x"}, {"text": "y"}))
    (own / "b.jsonl").write_text(jsonl({"bodi": "x"}))
    books = read(own)
    assert texts(books) == ["y"]
    assert "it contains: bodi" in books.rejected[1]["reason"]


def test_the_first_hundred_rows_decide_the_shape(own: Path) -> None:
    alpaca, question = {"instruction": "i", "output": "o"}, {"question": "q", "answer": "a"}
    rows = [{**question, "id": n} for n in range(51)] + [{**alpaca, "id": n} for n in range(51, 300)]
    (own / "a.jsonl").write_text(jsonl(*rows))
    assert {record.category for _, record in read(own, "dialogues").records} == {"question"}
    assert {record.category for _, record in read(own, "dialogues", shape="alpaca").records} == {"alpaca"}


def test_a_text_is_made_of_the_columns_that_are_named(own: Path) -> None:
    (own / "a.jsonl").write_text(jsonl({"text": "x", "title": "Boats", "body": "They sail."}))
    assert texts(read(own)) == ["x"]
    assert texts(read(own, text_field=["body"])) == ["They sail."]
    assert texts(read(own, text_field=["title", "body"])) == ["Boats\n\nThey sail."]


def test_an_unknown_shape_is_an_error(own: Path) -> None:
    (own / "a.jsonl").write_text(jsonl({"text": "x"}))
    with pytest.raises(DataError, match="expected one of auto"):
        read(own, shape="tex")


def test_same_id_same_content_is_a_duplicate_other_content_is_rejected(own: Path) -> None:
    (own / "a.jsonl").write_text(
        jsonl({"id": 1, "text": "a"}, {"id": 1, "text": "a"}, {"id": 1, "text": "b"}, {"text": "a"})
    )
    (own / "b.jsonl").write_text(jsonl({"id": "1", "text": "a"}, {"text": "a"}))
    books = read(own)
    assert [record.path for _, record in books.records] == ["1", "a.jsonl:4"]
    assert [(r["file"], r["line"], r["field"]) for r in books.rejected] == [("a.jsonl", 3, "id")]
    assert "a.jsonl:1" in books.rejected[0]["reason"]


def test_files_called_val_are_held_out_and_else_one_row_in_fifty_by_its_id(own: Path) -> None:
    (own / "notes-val.jsonl").write_text(jsonl({"text": "held out"}))
    (own / "evaluate.jsonl").write_text(jsonl(*({"id": n, "text": f"row {n}"} for n in range(2000))))
    assert {record.path for split, record in read(own).records if split == "val"} == {"notes-val.jsonl"}
    (own / "notes-val.jsonl").unlink()
    held_out = {record.path for split, record in read(own).records if split == "val"}
    assert 20 <= len(held_out) <= 60
    (own / "evaluate.jsonl").write_text(jsonl(*({"id": n, "text": f"row {n}"} for n in range(1000, 4000))))
    again = {record.path for split, record in read(own).records if split == "val"}
    assert {n for n in held_out if n.isdigit() and int(n) >= 1000} == {
        n for n in again if n.isdigit() and int(n) < 2000
    }


def test_two_problems_of_one_key_stay_in_one_split(own: Path) -> None:
    row = {"question": "Q", "tests": ["assert f(1)"]}
    (own / "a.jsonl").write_text(jsonl(*({**row, "id": n, "key": f"k{n % 150}"} for n in range(300))))
    splits: dict[str, set[str]] = {}
    for split, record in read(own, "problems").records:
        splits.setdefault(record.key, set()).add(split)
    assert (
        all(len(found) == 1 for found in splits.values())
        and {"train"} in splits.values()
        and {"val"} in splits.values()
    )


def test_the_split_of_an_id_never_changes() -> None:
    """Pinned: a new version must not move a row from test to training."""
    splits = {split: [n for n in range(200) if split_of(str(n), 0.02, 0.05) == split] for split in ("val", "test")}
    assert splits == {"val": [2, 52, 155, 168], "test": [4, 9, 36, 38, 75, 87, 106, 135, 138, 182]}
    more = [n for n in range(200) if split_of(str(n), 0.02, 0.1) == "test"]
    assert set(splits["test"]) < set(more), "a larger share takes more and gives none back"


def test_shares_of_the_rows_are_held_out_and_text_has_no_test(own: Path) -> None:
    (own / "a.jsonl").write_text(jsonl(*({"question": f"q{n}", "answer": "a"} for n in range(2000))))
    counts = Counter(split for split, _ in read(own, "dialogues", val_share=0.1, test_share=0.2).records)
    assert counts.total() == 2000 and 150 < counts["val"] < 250 and 320 < counts["test"] < 480
    (own / "a.jsonl").write_text(jsonl(*({"text": f"t{n}"} for n in range(200))))
    assert {split for split, _ in read(own, val_share=0.1, test_share=0.2).records} == {"train", "val"}


def test_a_file_called_test_is_the_test_and_one_called_val_leaves_no_shares(own: Path) -> None:
    rows = [{"question": f"q{n}", "answer": "a"} for n in range(100)]
    (own / "a.jsonl").write_text(jsonl(*rows))
    (own / "my-test.jsonl").write_text(jsonl({"question": "t", "answer": "a"}))
    found = read(own, "dialogues", val_share=0.5, test_share=0.4).records
    assert [record.messages[0]["content"] for split, record in found if split == "test"] == ["t"]
    assert 30 < sum(split == "val" for split, _ in found) < 70
    (own / "val.jsonl").write_text(jsonl({"question": "v", "answer": "a"}))
    splits = Counter(split for split, _ in read(own, "dialogues", val_share=0.5, test_share=0.4).records)
    assert splits == {"train": 100, "val": 1, "test": 1}


# --- notebooks and delimiters ----------------------------------------------------------------------------------------


def test_of_a_notebook_the_cells_are_read_as_code_or_as_prose(own: Path) -> None:
    cells = (("markdown", "# Sums\nAdd."), ("code", "x = 1\nx + 1"), ("raw", "?"), ("code", ""))
    (own / "a.ipynb").write_text(notebook(*cells))
    assert texts(read(own, "code")) == ["# # Sums\n# Add.\n\nx = 1\nx + 1\n"]
    assert texts(read(own, "text")) == ["# Sums\nAdd.\n"]


@pytest.mark.parametrize("content", ["{", json.dumps({"worksheets": []}), json.dumps([1])])
def test_a_notebook_that_cannot_be_read_is_a_rejected_row(own: Path, content: str) -> None:
    (own / "a.ipynb").write_text(content)
    (own / "b.txt").write_text("text")
    books = read(own, "code")
    assert texts(books) == ["text"] and [(r["file"], r["line"]) for r in books.rejected] == [("a.ipynb", 1)]


@pytest.mark.parametrize(("name", "sign"), [("a.csv", ","), ("a.csv", ";"), ("a.csv", "|"), ("a.tsv", "\t")])
def test_the_delimiter_of_a_table_is_that_of_its_header(own: Path, name: str, sign: str) -> None:
    lines = [sign.join(cells) for cells in (("id", "text"), ("1", '"one, two; three"'))]
    (own / name).write_text("\n".join(lines) + "\n")
    (record,) = read(own).records
    assert (record[1].path, record[1].text) == ("1", "one, two; three")


# --- before anything is read -----------------------------------------------------------------------------------------


def test_all_globs_without_a_match_are_named_at_once(own: Path) -> None:
    (own / "text").mkdir()
    (own / "text/a.txt").write_text("x")
    config = DataConfig(source="files", text=["text/*"], dialogues=["d/*", "e/*"], problems=["p/*"])
    found = own_files.missing_globs(own, config, ("text", "dialogues", "problems"))
    assert [line.split(":")[0] for line in found] == [f"no file matches {own / glob}" for glob in ("d/*", "e/*", "p/*")]
    assert "`dialogues: []` in conf/data/files.yaml" in found[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "machine", "dialogues": ["d/*"]}, "`dialogues` is used only with `source: files`, but"),
        ({"source": "hub", "text_field": ["a"]}, "`text_field` is used only with `source: files`, but `source` is hub"),
        ({"source": "files", "hub": {"text": []}}, "`hub` is used only with `source: hub`, but `source` is files"),
        ({"source": "files", "val_share": 0.5, "test_share": 0.5}, "val_share, test_share: expected"),
    ],
)
def test_a_key_that_nothing_reads_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**options)


def test_a_document_longer_than_the_window_becomes_rows_cut_at_blank_lines(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "DOCUMENT_BYTES", 10)
    (own / "a.txt").write_text("first part\nof it\n\nsecond\n\nthird\n")
    books = read(own)
    assert texts(books) == ["first part\nof it\n", "\nsecond\n\nthird\n"]
    assert [record.path for _, record in books.records] == ["a.txt", "a.txt:3"]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(st.sampled_from(["word ", "\n", "\n\n", " \n", "é" * 9, "x" * 30]), max_size=40),
    limit=st.integers(8, 60),
)
def test_pieces_join_to_the_text_and_none_is_over_the_limit(
    parts: list[str], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "TEXT_BYTES", limit)
    document = Text(text="".join(parts), source="s", path="p", license="l")
    pieces = cut(document)
    assert "".join(piece.text for piece in pieces) == document.text
    if len(pieces) > 1:
        assert all(0 < len(piece.text.encode()) <= limit for piece in pieces)
        assert [piece.path for piece in pieces] == [f"p#{number}" for number in range(1, len(pieces) + 1)]


def test_a_long_text_is_cut_at_blank_lines_where_it_has_them() -> None:
    paragraph = "word " * 60_000 + "\n\n"  # 300,002 bytes
    pieces = cut(Text(text=paragraph * 5, source="s", path="p", license="l"))
    assert [piece.text.count("\n\n") for piece in pieces] == [3, 2]


def test_the_rows_of_each_file_add_up_to_what_it_holds(own: Path) -> None:
    (own / "a.jsonl").write_text(jsonl({"text": "x"}, {"text": "x"}, {"text": "y", "id": 1}, {"text": 2}))
    (own / "b.jsonl").write_text(jsonl({"text": "z", "id": 1}, {"text": "w"}))
    tally = RowCounts()
    rejected = own.parent / "rejected.jsonl"
    list(own_files.read_files(own, DataConfig(source="files", text=["*"], max_rejected=1.0), "text", rejected, tally))
    assert tally.files == {
        "a.jsonl": {"accepted": 2, "duplicates": 1, "rejected": 1, "dropped": 0, "bytes": 2},
        "b.jsonl": {"accepted": 1, "duplicates": 0, "rejected": 1, "dropped": 0, "bytes": 1},
    }
    assert tally.totals == {"accepted": 3, "duplicates": 1, "rejected": 2, "dropped": 0, "bytes": 3}
    tally.drop("b.jsonl")
    assert [line.split() for line in tally.shown("text").splitlines()] == [
        ["text", "rows", "accepted", "duplicates", "rejected", "dropped", "bytes"],
        ["a.jsonl", "4", "2", "1", "1", "0", "2"],
        ["b.jsonl", "2", "0", "0", "1", "1", "1"],
        ["all", "6", "2", "1", "2", "1", "3"],
    ]
