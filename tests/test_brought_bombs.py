"""Hostile files: small parquet and gzip files that expand enormously, and links that lead out of the folder."""

import gzip
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.evaluation import bfcl
from pipeline.ingest import duplicates, files, own_files
from pipeline.ingest.tool_calls import RowError
from pipeline.run.errors import DataError
from tests.ownfiles import ROOT, config, jsonl, read, texts

LARGE, MOST = 1 << 23, 300_000  # 8 MB of text; the most memory, in kB, that a process reading such a file may use
PEAK = """
import sys
from pathlib import Path
from pipeline.ingest import files
for _ in files.rows(Path(sys.argv[1]), "utf-8"):
    pass
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def repeated(count: int) -> pa.Array:
    """An array that repeats one text of 8 MB `count` times; a file stores the text once."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array(["a" * LARGE]))


def listed(values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)


BOMBS: dict[str, Callable[[], tuple[pa.Table, bool]]] = {  # the table, and whether the writer may use a dictionary
    "a text repeated": lambda: (pa.table({"text": repeated(256)}).replace_schema_metadata(None), True),
    "a list of it": lambda: (pa.table({"text": ["x"], "more": listed(repeated(256))}), True),
    "messages of it": lambda: (
        pa.table({"messages": listed(pa.StructArray.from_arrays([repeated(256)], ["content"]))}),
        True,
    ),
    "a long text": lambda: (pa.table({"text": pa.array(["a" * (1 << 29)], pa.large_string())}), False),
    "a long text among short ones": lambda: (
        pa.table({"text": pa.array(["short"] * 999 + ["a" * (1 << 29)], pa.large_string())}),
        False,
    ),
    "a list of zeros": lambda: (pa.table({"text": ["x"], "n": listed(pa.array(np.zeros(1 << 28, np.int8)))}), True),
    "a list of nulls": lambda: (pa.table({"text": ["x"], "n": listed(pa.nulls(1 << 26, pa.int8()))}), True),
    "rows without end": lambda: (pa.table({"n": pa.nulls(1 << 24, pa.int8())}), True),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_parquet_file_that_expands_is_refused_row_by_row_or_group_by_group(tmp_path: Path, name: str) -> None:
    path = tmp_path / "bomb.parquet"
    table, dictionary = BOMBS[name]()
    pq.write_table(table, path, compression="zstd", use_dictionary=dictionary, store_schema=False)
    del table
    assert path.stat().st_size < 100_000
    told = subprocess.run([sys.executable, "-c", PEAK, path], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(told.stdout) < MOST
    found = [(line, row if isinstance(row, RowError) else None) for line, row in files.rows(path, "utf-8")]
    if name != "a text repeated":  # there, each row is within the limit
        assert any(row is not None for _, row in found)
        reasons = {row.reason for _, row in found if row is not None}
        assert any("over 64 MB" in reason or "expands" in reason or "rows in" in reason for reason in reasons), reasons
    assert len(found) < 2000


def test_what_dictionaries_hold_is_read_as_before(own: Path) -> None:
    rows = [
        {
            "text": f"{'same' if n % 3 else 'other'} text {n % 5}",
            "tags": [["a", None, "ü"], [], None][n % 3],
            "more": {"k": [{"v": "x" * (n % 4)}]},
            "raw": b"\xff",
            "n": n,
        }
        for n in range(700)
    ]
    pq.write_table(pa.Table.from_pylist(rows), own / "a.parquet", row_group_size=300)
    assert [row for _, row in files.rows(own / "a.parquet", "utf-8")] == rows
    assert [line for line, _ in files.rows(own / "a.parquet", "utf-8")] == list(range(1, 701))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz"])
def test_a_gzip_file_that_expands_is_refused_while_it_is_read(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "UNZIPPED_BYTES", 1 << 22)
    with gzip.open(tmp_path / name, "wb") as file:
        for _ in range(64):
            file.write(b"\0" * (1 << 20))
    tracemalloc.start()
    try:
        for attempt in (lambda: list(duplicates.benchmark_items(tmp_path)), lambda: bfcl.read(tmp_path / name)):
            with pytest.raises(DataError, match=r"a\.\w+\.gz: expands to more than 4 MB"):
                list(attempt())
        assert tracemalloc.get_traced_memory()[1] < 40_000_000
    finally:
        tracemalloc.stop()


# --- links -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (folder / "rows.jsonl").write_text(jsonl({"text": "secret"}))
    return folder


def direct(own: Path, outside: Path) -> None:
    (own / "a.txt").symlink_to(outside / "passwd")


def table(own: Path, outside: Path) -> None:
    (own / "a.jsonl").symlink_to(outside / "rows.jsonl")


def folder_of_sources(own: Path, outside: Path) -> None:
    (own / "repo").symlink_to(outside)


def nested(own: Path, outside: Path) -> None:
    (own / "repo/deep").mkdir(parents=True)
    (own / "repo/deep/main.py").write_text("x = 1\n")
    (own / "repo/deep/conf").symlink_to(outside / "passwd")


def nested_folder(own: Path, outside: Path) -> None:
    nested(own, outside)
    (own / "repo/deep/conf").unlink()
    (own / "repo/deep/conf").symlink_to(outside)


def link_to_a_link(own: Path, outside: Path) -> None:
    (own / "repo").mkdir()
    (own / "repo/a.py").write_text("x = 1\n")
    (own / "repo/.hidden").symlink_to(outside / "passwd")
    (own / "repo/b.py").symlink_to(".hidden")


def through_dots(own: Path, outside: Path) -> None:
    (own / "a.txt").symlink_to(f"../{outside.name}/passwd")


def beside(own: Path, outside: Path) -> None:
    """A folder whose name merely starts with our folder's name is not inside it."""
    other = own.parent / f"{own.name}-other"
    other.mkdir()
    (other / "a").write_text("text")
    (own / "a.txt").symlink_to(other / "a")


def proc(own: Path, outside: Path) -> None:
    (own / "a.txt").symlink_to("/proc/self/environ")


@pytest.mark.parametrize(
    "make", [direct, table, folder_of_sources, nested, nested_folder, link_to_a_link, through_dots, beside, proc]
)
@pytest.mark.parametrize("glob", ["*", "**/*"])
def test_a_link_that_leaves_the_folder_is_refused_by_name(
    own: Path, outside: Path, make: Callable[[Path, Path], None], glob: str
) -> None:
    make(own, outside)
    with pytest.raises(
        DataError, match=r"leads out of .* through a link; replace the link with a copy, or remove it"
    ) as caught:
        list(own_files.read_files(own, config("code", [glob]), "code", own.parent / "rejected.jsonl"))
    assert "root:x" not in str(caught.value)


def test_links_within_the_folder_are_read_and_never_lead_to_hidden_files(own: Path) -> None:
    (own / "repo").mkdir()
    (own / "repo/a.py").write_text("x = 1\n")
    (own / "repo/.env").write_text("TOKEN=1\n")
    (own / "repo/b.py").symlink_to("a.py")
    (own / "repo/c.py").symlink_to(".env")
    (own / "again").symlink_to("repo")
    assert set(texts(read(own, "code"))) == {"x = 1\n"}


def test_loops_and_links_to_nothing_end_and_are_told(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own / "repo").mkdir()
    (own / "repo/a.py").write_text("x = 1\n")
    (own / "repo/up").symlink_to("..")
    (own / "repo/self").symlink_to("self")
    (own / "repo/one").symlink_to("two")
    (own / "repo/two").symlink_to("one")
    (own / "repo/gone").symlink_to("nothing-here")
    assert set(texts(read(own, "code"))) == {"x = 1\n"}
    assert "5 links are broken" in capsys.readouterr().err


def test_the_folder_itself_may_be_a_link(own: Path, tmp_path: Path) -> None:
    (own / "a.txt").write_text("one\n")
    (tmp_path / "link").symlink_to(own)
    assert texts(read(tmp_path / "link")) == ["one\n"]


def test_a_pipe_is_no_file(own: Path) -> None:
    os.mkfifo(own / "pipe.txt")
    (own / "a.txt").write_text("one\n")
    assert texts(read(own)) == ["one\n"]


# --- large files -----------------------------------------------------------------------------------------------------

HUGE = 3 << 30  # a sparse file of 3 GB: after its head it is all zeros, which take up no disk space
HEADS = {
    "jsonl": b'{"text": "a"}\n',
    "json": b'[{"text": "a"},\n',
    "csv": b"text\na\n",
    "parquet": b"PAR1",
    "txt": b"a\n",
}


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads the peak of memory from /proc")
@pytest.mark.parametrize("suffix", HEADS)
def test_a_file_of_three_gigabytes_is_read_in_little_memory_or_refused(own: Path, suffix: str) -> None:
    path = own / f"huge.{suffix}"
    with path.open("wb") as file:
        file.write(HEADS[suffix])
        file.truncate(HUGE)
    (own / "small.txt").write_text("small\n")
    code = PEAK.replace('for _ in files.rows(Path(sys.argv[1]), "utf-8"):', READ).replace("    pass\n", "")
    told = subprocess.run([sys.executable, "-c", code, own], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(told.stdout) < 2 * MOST, "kB"
    if suffix == "txt":
        assert "1 binary files were skipped; the first: huge.txt" in told.stderr
        return
    reasons = {
        "json": "convert the file to .jsonl",
        "parquet": "not parquet",
        "csv": "over 64 MB",
        "jsonl": "over 64 MB",
    }
    assert f"huge.{suffix}:" in told.stderr and reasons[suffix] in told.stderr


READ = """
from pipeline.ingest import own_files
from pipeline.ingest.sources import DataConfig
config, own = DataConfig(source="files", text=["*"], max_rejected=1.0), Path(sys.argv[1])
list(own_files.read_files(own, config, "text", own.parent / "r.jsonl"))
"""


def test_a_text_without_blank_lines_is_cut_at_a_line(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "DOCUMENT_BYTES", 100)
    (own / "log.txt").write_text("".join(f"line {number}\n" for number in range(200)))
    found = texts(read(own))
    assert len(found) > 5 and max(map(len, found)) < 220
    assert "".join(found) == (own / "log.txt").read_text()


def test_a_row_of_ten_megabytes_is_read_and_a_text_of_that_size_is_cut(own: Path) -> None:
    long = "word " * 2_000_000
    (own / "a.jsonl").write_text(jsonl({"question": "Long?", "answer": long}, {"text": long, "id": 1}))
    (dialogue,) = [record for _, record in read(own, "dialogues").records]
    assert dialogue.messages[1]["content"].strip() == long.strip()
    pieces = texts(read(own))
    assert "".join(pieces) == long and len(pieces) == 10 and max(map(len, pieces)) <= 1_000_000
