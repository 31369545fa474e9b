"""User files: formats, encodings, counts that add up, and the promise that nothing but DataError is raised."""

import csv
import io
import json
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.ingest import files, own_files
from pipeline.ingest.intake import Intake
from pipeline.ingest.sources import DataConfig
from pipeline.run.errors import DataError
from tests.ownfiles import ROOT, config, jsonl, read, texts

# --- formats ---------------------------------------------------------------------------------------------------------


def test_every_format_gives_the_same_rows(own: Path) -> None:
    rows = [{"text": 'one, "two"\nthree'}, {"text": "naïve 𝄞"}]
    (own / "a.jsonl").write_text("\n" + jsonl(*rows))
    (own / "b.json").write_text(json.dumps(rows, indent=2))
    (own / "c.json").write_text(jsonl(*rows))
    with (own / "d.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([row["text"]] for row in rows)])
    pq.write_table(pa.Table.from_pylist(rows), own / "e.parquet")
    for path in sorted(own.iterdir()):
        assert [row for _, row in files.rows(path, "utf-8")] == rows, path.name


def test_lines_are_those_on_which_rows_begin(own: Path) -> None:
    (own / "a.jsonl").write_text('\n{"text": "a"}\n\n{"text": "b"}\n')
    (own / "b.json").write_text('\n[\n{"text":\n"a"}\n,\n\n{"text": "b"}]\n')
    (own / "c.csv").write_text('text,n\n"a\na",1\n\nb,2\n')
    found = {path.name: [line for line, _ in files.rows(path, "utf-8")] for path in own.iterdir()}
    assert found == {"a.jsonl": [2, 4], "b.json": [3, 7], "c.csv": [2, 5]}


def test_one_object_in_a_json_file_is_one_row(own: Path) -> None:
    (own / "a.json").write_text(json.dumps({"text": "one"}, indent=1))
    assert texts(read(own)) == ["one"]


def test_a_broken_row_costs_one_row_and_names_file_line_field_and_reason(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own / "a.jsonl").write_text('{"text": "a"}\n{"text": \n{"text": 3}\n[1]\n{"text": NaN}\n{"text": "b"}\n')
    books = read(own)
    assert texts(books) == ["a", "b"]
    assert [(r["file"], r["line"], r["field"]) for r in books.rejected] == [
        ("a.jsonl", 2, "row"),
        ("a.jsonl", 3, "text"),
        ("a.jsonl", 4, "row"),
        ("a.jsonl", 5, "row"),
    ]
    assert "a.jsonl:3: text: expected a string, found int" in capsys.readouterr().err


def test_five_rejected_rows_are_printed_and_all_are_written(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own / "a.jsonl").write_text(jsonl({"text": "good"}, *({"text": n} for n in range(9))))
    books = read(own)
    assert len(books.rejected) == 9
    assert capsys.readouterr().err.count("expected a string") == 5


def test_a_list_that_breaks_off_keeps_the_rows_before(own: Path) -> None:
    (own / "a.json").write_text('[{"text": "a"}, {"text": "b"} {"text": "c"}]')
    (own / "b.json").write_text('[{"text": "d"}, {"te')
    books = read(own)
    assert texts(books) == ["a", "b", "d"] and [r["file"] for r in books.rejected] == ["a.json", "b.json"]


def test_csv_rows_with_other_numbers_of_cells_or_an_open_quote_are_rejected(own: Path) -> None:
    (own / "a.csv").write_text('id,text\n1,a\n2\n3,b,c\n4,d\n5,"open\n')
    books = read(own)
    assert texts(books) == ["a", "d"] and [r["line"] for r in books.rejected] == [3, 4, 6]


def test_csv_fields_may_be_longer_than_the_limit_of_the_csv_module(own: Path) -> None:
    (own / "a.csv").write_text("text\n" + "x" * 200_000 + "\n")
    assert len(texts(read(own))[0]) == 200_000


def test_csv_columns_named_twice_are_an_error(own: Path) -> None:
    (own / "a.csv").write_text("text,text\na,b\n")
    with pytest.raises(DataError, match="distinct column names"):
        read(own)


def test_a_row_over_the_limit_is_rejected_and_the_next_one_read(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ROW_BYTES", 100)
    long = "x" * 150
    (own / "a.jsonl").write_text(jsonl({"text": long}, {"text": "a"}))
    (own / "b.jsonl").write_bytes(jsonl({"text": long}, {"text": "b"}).encode("utf-16"))
    (own / "c.json").write_text(json.dumps([{"text": long}, {"text": "c"}]))
    pq.write_table(pa.table({"text": [long, "d"]}), own / "d.parquet")
    (own / "e.csv").write_text(f'text\n"{long}\nx\n')
    books = read(own)
    assert texts(books) == ["a", "b", "c", "d"]
    assert [r["file"] for r in books.rejected] == ["a.jsonl", "b.jsonl", "c.json", "d.parquet", "e.csv"]


def test_damaged_parquet_is_one_rejected_row(own: Path) -> None:
    (own / "a.parquet").write_bytes(b"PAR1 not really")
    (own / "b.jsonl").write_text(jsonl({"text": "b"}))
    assert [r["file"] for r in read(own).rejected] == ["a.parquet"]


# --- encodings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_unicode_files_are_known_by_their_mark(own: Path, encoding: str, name: str) -> None:
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    word = "naïve \u010a\u0a0a 𝄞"  # two letters contain a line-feed byte in UTF-16
    content = {
        "a.jsonl": f'{{"text": "{word}"}}\r\n',
        "a.json": f'[{{"text": "{word}"}}]',
        "a.csv": f"text\r\n{word}\r\n",
    }
    (own / name).write_bytes((mark + content.get(name, word)).encode(encoding))
    assert texts(read(own)) == [word]


def test_a_bad_byte_names_its_offset_in_the_file(own: Path) -> None:
    (own / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    (own / "b.txt").write_bytes(b"fine\nfi\xe9ne\n")
    (own / "c.csv").write_bytes(b'text\n"a\n\xff"\nb\n')
    (own / "d.jsonl").write_bytes('{"text": "d"}\n'.encode("utf-16") + b"\x00\xd8x\x00")
    books = read(own)
    assert texts(books) == ["a", "b", "d"]
    offsets = {r["file"]: r["reason"].split(" is not")[0] for r in books.rejected}
    assert offsets == {
        "a.jsonl": "byte 0xff at offset 24",
        "b.txt": "byte 0xe9 at offset 7",
        "c.csv": "byte 0xff at offset 8",
        "d.jsonl": "byte 0x00 at offset 30",
    }


def test_encoding_is_for_the_files_that_are_not_utf8(own: Path) -> None:
    (own / "a.txt").write_bytes("café".encode())
    (own / "b.txt").write_bytes("café au lait".encode("latin-1"))
    assert texts(read(own, encoding="latin-1")) == ["café", "café au lait"]


@pytest.mark.parametrize("encoding", ["klingon", "hex", "undefined"])
def test_an_encoding_that_is_none_is_an_error(own: Path, encoding: str) -> None:
    (own / "a.txt").write_text("x")
    with pytest.raises(DataError, match=encoding):
        read(own, encoding=encoding)


def test_half_a_surrogate_pair_is_rejected(own: Path) -> None:
    (own / "a.jsonl").write_text('{"text": "\\ud800"}\n{"text": "a", "id": "\\ud800"}\n{"text": "b"}\n')
    assert texts(read(own)) == ["b"]


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_glob_without_a_match_is_an_error(own: Path) -> None:
    with pytest.raises(DataError, match="nothing"):
        read(own, globs=["nothing/*"])
    with pytest.raises(DataError, match="not a glob"):
        read(own, globs=["/etc/*"])


def test_an_empty_file_is_warned_of_and_alone_leaves_nothing(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own / "a.jsonl").touch()
    with pytest.raises(DataError, match=r"no row was accepted \([0-9]+ read"):
        read(own)
    assert "a.jsonl: warning: the file is empty" in capsys.readouterr().err
    (own / "b.txt").write_text("b")
    assert texts(read(own)) == ["b"]


def test_a_folder_of_sources_gives_each_text_file_and_no_hidden_or_binary_one(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in {
        "code/app/main.py": b"x = 1\r\n",
        "code/app/pkg/data.json": b'{"a": 1}',
        "code/app/logo.png": b"\x89PNG\0",
        "code/app/.git/config": b"hidden",
        "code/app/__pycache__/main.pyc": b"cached",
        "code/tool.sh": b"ls\n",
    }.items():
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_bytes(content)
    books = read(own, "code", ["code/*"])
    assert [(r.source, r.path, r.text, r.license) for _, r in books.records] == [
        ("code/app", "code/app/main.py", "x = 1\n", "own"),
        ("code/app", "code/app/pkg/data.json", '{"a": 1}', "own"),
        ("code/tool.sh", "code/tool.sh", "ls\n", "own"),
    ]
    assert "1 binary files were skipped; the first: code/app/logo.png" in capsys.readouterr().err


def test_a_file_matched_twice_is_read_once(own: Path) -> None:
    (own / "a.txt").write_text("a")
    (own / "sub").mkdir()
    (own / "sub" / "b.txt").write_text("b")
    assert texts(read(own, globs=["**/*", "*.txt", "*"])) == ["a", "b"]


def test_text_files_are_no_dialogues(own: Path) -> None:
    (own / "a.txt").write_text("hello")
    with pytest.raises(DataError, match=r"no row was accepted \([0-9]+ read"):
        read(own, "dialogues")


def test_no_globs_give_nothing(own: Path) -> None:
    assert list(own_files.read_files(own, config("text", []), "text", own / "r.jsonl")) == []


# --- everything ------------------------------------------------------------------------------------------------------

row_values = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.floats() | st.text(max_size=5) | st.just("assert f(1)"),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "name"]), inner, max_size=3)
    ),
    max_leaves=5,
)
row_names = st.sampled_from(
    ["id", "text", "messages", "tools", "question", "answer", "tests", "prompt", "chosen", "rejected"]
)
row_lines = st.dictionaries(row_names, row_values, max_size=4).map(json.dumps) | st.text(max_size=12).map(
    lambda text: text.replace("\n", " ").replace("\r", " ")
)


@settings(max_examples=40, deadline=None)
@given(st.lists(row_lines, max_size=8), st.sampled_from(["text", "dialogues", "problems", "preferences"]))
def test_accepted_and_duplicates_and_rejected_are_all_rows(lines: list[str], kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
        num_rows = sum(bool(line.strip()) for line in lines)
        with Intake(Path(folder) / "r.jsonl", 1.0, "test") as books:
            books.num_accepted = 1  # so that leaving does not complain of an empty file
            source = own_files.Source(path=path, name="a.jsonl", group="a.jsonl", is_table=True, split=None)
            records = list(own_files._read(source, kind, books))
        assert books.num_rows - 1 == num_rows
        assert len(records) == books.num_accepted - 1
        assert len((Path(folder) / "r.jsonl").read_text().splitlines()) == books.num_rejected


damaged = st.one_of(
    st.binary(max_size=60),
    st.lists(
        st.sampled_from(
            [
                b'{"text": "a"}',
                b"\n",
                b"[",
                b"]",
                b",",
                b'"',
                b"\xff\xfe",
                b"\x00",
                b"\xef\xbb\xbf",
                b"id,text",
                b"PAR1",
            ]
        )
    ).map(b"".join),
)


@settings(max_examples=80, deadline=None)
@given(
    damaged,
    st.sampled_from(["jsonl", "json", "csv", "parquet", "txt"]),
    st.sampled_from(["utf-8", "latin-1", "utf-16-le"]),
)
def test_readers_raise_nothing_but_data_error(content: bytes, suffix: str, encoding: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "own"
        own.mkdir()
        (own / f"a.{suffix}").write_bytes(content)
        try:
            books = read(own, encoding=encoding)
        except DataError:
            return
        assert books.records


def test_the_config_file_of_own_files_builds() -> None:
    found = DataConfig(**yaml.safe_load((ROOT / "conf/data/files.yaml").read_text()))
    assert found.source == "files" and all(
        getattr(found, kind) for kind in ("text", "code", "dialogues", "problems", "preferences")
    )


def test_the_same_files_give_the_same_records_and_rejected_rows_twice(own: Path) -> None:
    for number in range(5):
        (own / f"{number}.jsonl").write_text(jsonl({"text": f"a {number}"}, {"text": number}, {"text": "same"}))
    first, second = read(own), read(own)
    assert first == second
    assert [record.path for _, record in first.records] == [
        "0.jsonl",
        "0.jsonl:3",
        "1.jsonl",
        "2.jsonl",
        "3.jsonl",
        "4.jsonl",
    ]


def test_csv_reads_what_the_csv_module_wrote(own: Path) -> None:
    cells = ['a,"b"', "c\nd", "", "é"]
    buffer = io.StringIO()
    csv.writer(buffer).writerows([["text", "n"], *([cell, str(n)] for n, cell in enumerate(cells))])
    (own / "a.csv").write_text(buffer.getvalue(), newline="")
    assert [row["text"] for _, row in files.rows(own / "a.csv", "utf-8")] == [cell or None for cell in cells]
