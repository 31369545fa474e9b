"""Entries of a kind: options of a glob, columns under other names, options without effect."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.ingest import own_files
from pipeline.ingest.entries import FileEntry, HubEntry, PackagesEntry
from pipeline.ingest.own_files import Accepted
from pipeline.ingest.sources import DataConfig
from pipeline.run.errors import DataError
from tests.ownfiles import jsonl


def accepted(own: Path, kind: str, *entries: Any, **options: Any) -> list[Accepted]:
    data = DataConfig(source="files", **{"max_rejected": 0.0, kind: list(entries)} | options)
    return list(own_files.read_files(own, data, kind, own.parent / "rejected.jsonl"))


def said(rows: list[Accepted]) -> list[list[str]]:
    return [[m["content"] for m in row.record.messages] for row in rows]  # type: ignore[union-attr]


def test_columns_of_a_table_get_our_names_and_those_of_other_entries_keep_theirs(own: Path) -> None:
    (own / "support.csv").write_text("question,reply,answer\nHow?,So.,old\n")
    (own / "other.jsonl").write_text(jsonl({"question": "Why?", "answer": "Thus."}))
    entry = FileEntry(files="support.csv", columns={"question": "prompt", "reply": "completion"})
    rows = accepted(own, "dialogues", "*.jsonl", entry)
    assert said(rows) == [["Why?", "Thus."], ["How?", "So."]]
    assert [(row.entry, row.file) for row in rows] == [(0, "other.jsonl"), (1, "support.csv")]


def test_a_column_that_gets_a_name_takes_the_place_of_the_one_that_has_it(own: Path) -> None:
    (own / "a.jsonl").write_text(jsonl({"text": "short", "body": "the whole"}))
    (row,) = accepted(own, "text", FileEntry(files="*", columns={"body": "text"}))
    assert row.record.text == "the whole"  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_a_column_that_no_row_has_is_named_with_those_that_are_there(
    own: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": "How?", "replay": f"{n}"} for n in range(3)]
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), own / name)
    else:
        csv = "question,replay\n" + "".join(f"{row['question']},{row['replay']}\n" for row in rows)
        (own / name).write_text(csv if name.endswith(".csv") else jsonl(*rows))
    entry = FileEntry(files="*", columns={"question": "prompt", "reply": "completion"})
    message = rf"{name}: columns: no row has 'reply' \(did you mean 'replay'\?\); the file has the columns question, re"
    with pytest.raises(DataError, match=message):
        accepted(own, "dialogues", entry)
    assert "fits no shape" not in capsys.readouterr().err, "said before rows are rejected for it"


def test_a_column_that_only_late_rows_have_is_found(own: Path) -> None:
    early, late = {"prompt": "Q", "completion": "A"}, {"prompt": "Q", "reply": "B"}
    (own / "a.jsonl").write_text(jsonl(*({**early, "id": n} for n in range(200)), late))
    rows = accepted(own, "dialogues", FileEntry(files="*", columns={"reply": "completion"}))
    assert said(rows) == [["Q", "A"]] * 200 + [["Q", "B"]]  # a row without it keeps its own `completion`
    (own / "a.jsonl").write_text(jsonl(*({**early, "id": n} for n in range(200))))
    with pytest.raises(DataError, match="no row has 'reply'"):
        accepted(own, "dialogues", FileEntry(files="*", columns={"reply": "completion"}), max_rejected=1.0)


def test_encoding_shape_and_text_field_of_an_entry_go_before_the_keys_for_all(own: Path) -> None:
    (own / "old.csv").write_bytes("text\ncafé\n".encode("latin-1"))
    (own / "new.jsonl").write_text(jsonl({"title": "Boats", "body": "They sail.", "text": "x"}))
    entries = (
        FileEntry(files="old.csv", encoding="latin-1"),
        FileEntry(files="new.jsonl", text_field=["title", "body"]),
    )
    texts = [row.record.text for row in accepted(own, "text", *entries)]  # type: ignore[union-attr]
    assert texts == ["Boats\n\nThey sail.", "café"]
    with pytest.raises(DataError, match="is not utf-8"):
        accepted(own, "text", "old.csv")
    both = {"instruction": "i", "output": "o", "question": "q", "answer": "a"}
    (own / "both.jsonl").write_text(jsonl(both))
    assert said(accepted(own, "dialogues", FileEntry(files="both.jsonl", shape="question"), shape="alpaca")) == [
        ["q", "a"]
    ]
    assert said(accepted(own, "dialogues", "both.jsonl", shape="alpaca")) == [["i", "o"]]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (FileEntry(files="a.txt", columns={"body": "text"}), r"text: a.txt: `columns` has no effect on a.txt, which"),
        (FileEntry(files="*", shape="text"), r"text: \*: `shape` has no effect on a.txt"),
        (FileEntry(files="a.txt", text_field=["body"]), r"`text_field` has no effect"),
        (FileEntry(files="*.parquet", encoding="latin-1"), r"`encoding` has no effect on parquet"),
    ],
)
def test_an_option_that_a_file_cannot_have_is_an_error(own: Path, entry: FileEntry, message: str) -> None:
    (own / "a.txt").write_text("one text")
    pq.write_table(pa.table({"text": ["x"]}), own / "b.parquet")
    with pytest.raises(DataError, match=message):
        accepted(own, "text", entry)


def test_a_file_of_two_entries_is_an_error_where_one_has_options(own: Path) -> None:
    (own / "a.jsonl").write_text(jsonl({"text": "x"}))
    assert len(accepted(own, "text", "*", "a.*")) == 1
    with pytest.raises(DataError, match=r"text: a.jsonl is matched by two entries, \* and a\.\*, and one of them"):
        accepted(own, "text", "*", FileEntry(files="a.*", shape="text"))


def test_globs_of_entries_are_looked_for_before_anything_is_read(own: Path) -> None:
    data = DataConfig(source="files", dialogues=["packages", FileEntry(files="d/*")], problems=[], text=["t/*"])
    found = own_files.missing_globs(own, data, ("dialogues", "problems"))
    assert len(found) == 1 and "d/*: put files there" in found[0]
    assert "dvc exp run -S 'conf/data/files.yaml:dialogues=[packages]'" in found[0]


def test_what_the_entries_of_a_kind_are() -> None:
    files = DataConfig(source="files", text=["packages", HubEntry(source="hub", id="a/b", enabled=False)])
    assert files.entries("text") == [PackagesEntry(source="packages")] and files.entries("problems") == []
    machine = DataConfig(source="machine")
    assert machine.entries("code") == machine.entries("problems") == [PackagesEntry(source="packages")]
    hub = DataConfig(source="hub")
    assert hub.entries("text") == [] and hub.entries("dialogues") == [PackagesEntry(source="packages")]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["a/*", FileEntry(files="b/*", weight=1.0)], r"dialogues: a/\* has no weight, but another entry does"),
        (["a/*", "a/*"], r"dialogues: a/\* is listed twice"),
        ([FileEntry(files="a", shape="tex")], r"dialogues: a: shape: expected one of auto"),
        ([FileEntry(files="a", shape="pair")], r"dialogues: a: shape: pair produces no dialogues; expected columns, "),
    ],
)
def test_entries_that_do_not_go_together_are_refused(entries: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(source="files", dialogues=entries)


def test_a_key_that_the_shapes_of_a_kind_do_not_read_is_refused() -> None:
    with pytest.raises(ValueError, match=r"problems: a: `text_field` is not used for problems"):
        DataConfig(source="files", problems=[FileEntry(files="a", text_field=["x"])])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FileEntry(files="a", weight=0.0), "weight: expected more than 0, got 0"),
        (lambda: PackagesEntry(source="packages", weight=-1.0), "weight: expected more than 0, got -1"),
        (lambda: HubEntry(source="hub", id="a/b", weight=float("nan")), "weight: expected more than 0, got nan"),
        (lambda: FileEntry(files="a", columns={"b": "text", "c": "text"}), "two columns cannot both become 'text'"),
        (lambda: FileEntry(files="a", columns={"text": "text"}), "columns: 'text' is mapped to itself"),
        (lambda: FileEntry(files="packages"), "`packages` is not a glob"),
    ],
)
def test_an_entry_that_means_nothing_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
