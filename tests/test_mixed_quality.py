"""500 rows of mixed quality in nine formats: what happens to every row, by file, and where that is recorded."""

import csv
import io
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.ingest.intake import COUNTS
from pipeline.ingest.sources import DataConfig
from stages import tasks
from tests.data_stages import TASKS, Machine, made, manifest, rows, source
from tests.data_stages import planted_machine as planted_machine
from tests.judges import LengthJudge
from tests.ownfiles import notebook

TABLES = ("jsonl", "ndjson", "json", "csv", "tsv", "parquet")
SINGLE = {"txt": 40, "md": 25, "ipynb": 15}  # formats with one row per file, and the number of files
EACH = 70  # rows per table


def text_of(draw: random.Random, number: int) -> str | None:
    """A good text, or one that is too short, a copy, nearly a copy, blank, missing, or holds a secret."""
    quality = draw.random()
    if quality < 0.7:
        return f"Number {number}. {source(number, 3)}"
    return draw.choice(
        [
            f"short {number}",
            "Copied. " + source(1, 3),
            f"Nearly copied. {source(2, 12)} and {number}",
            f"{source(number, 3)} TOKEN = ghp_{'a1B2' * 9}",
            "   ",
            None,
        ]
    )


def table(form: str, texts: list[str | None], draw: random.Random) -> tuple[bytes, int]:
    """A file of these texts and its number of rows, with lines that are not rows where the format allows them."""
    if form == "parquet":
        buffer = io.BytesIO()
        pq.write_table(pa.table({"text": texts}), buffer)
        return buffer.getvalue(), len(texts)
    if form == "json":
        return json.dumps([{"text": text} for text in texts]).encode(), len(texts)
    if form in ("csv", "tsv"):
        out = io.StringIO()
        writer = csv.writer(out, delimiter="," if form == "csv" else "\t", lineterminator="\n")
        writer.writerow(["text", "more"])
        for text in texts:
            writer.writerow([text, "x"] if draw.random() < 0.95 else [text, "x", "y"])
        return out.getvalue().encode(), len(texts)
    broken = [b'{"text": "cut off', b"[1, 2]", b'{"text": 3}', b'{"text": "\xff"}', b"null"]
    lines = [json.dumps({"text": text}).encode() if draw.random() < 0.93 else draw.choice(broken) for text in texts]
    return b"\n".join(lines) + b"\n", len(texts)


def fill(own: Path, seed: int) -> dict[str, int]:
    """Write 500 rows in nine formats; returns file -> number of rows."""
    draw, numbers, expected = random.Random(seed), iter(range(1000, 9999)), dict[str, int]()
    for form in TABLES:
        content, expected[f"rows.{form}"] = table(form, [text_of(draw, next(numbers)) for _ in range(EACH)], draw)
        (own / f"rows.{form}").write_bytes(content)
    for form, count in SINGLE.items():
        for number in range(count):
            name, text = f"{form}-{number:02}.{form}", text_of(draw, next(numbers)) or " "
            (own / name).write_text(notebook(("markdown", text)) if form == "ipynb" else text)
            expected[name] = 1
    return expected


@pytest.mark.parametrize("seed", range(4))
def test_every_row_of_every_file_is_accepted_or_a_duplicate_or_rejected_or_dropped(
    machine: Machine, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = fill(machine.tmp / "own", seed)
    assert sum(expected.values()) == 500
    out = machine.build("out", data=DataConfig(source="files", text=["*"], max_rejected=0.5))
    told = manifest(out, "text")
    by_file: dict[str, dict[str, int]] = told["rows_by_file"]
    assert {file: sum(counts[name] for name in COUNTS) for file, counts in by_file.items()} == expected
    assert told["rows"] == {name: sum(counts[name] for counts in by_file.values()) for name in (*COUNTS, "bytes")}
    assert min(told["rows"][name] for name in COUNTS) > 5, "every fate occurs"
    assert told["rows"]["accepted"] == len(rows(out / "text")) == sum(told["documents"].values())

    def written(name: str) -> Counter[str]:
        lines = map(json.loads, (out / "text" / name).read_text().splitlines())
        return Counter(row["file"] for row in lines if row["reason"])

    for name in ("rejected", "dropped"):
        assert written(f"{name}.jsonl") == {file: n for file, counts in by_file.items() if (n := counts[name])}
    shown = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert ["all", "500", *(f"{told['rows'][name]:,}" for name in (*COUNTS, "bytes"))] in shown
    assert ["rows.csv", "70", *(f"{by_file['rows.csv'][name]:,}" for name in (*COUNTS, "bytes"))] in shown


KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "dialogues": lambda n: {"question": f"Question {n}?", "answer": "Yes."},
    "preferences": lambda n: {"prompt": f"Question {n}?", "chosen": "Yes.", "rejected": "No."},
}


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_conversations_and_pairs_add_up(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "Judge", LengthJudge)
    draw, own, expected = random.Random(seed), tmp_path / "own", dict[str, int]()
    own.mkdir()
    for kind, row in KINDS.items():
        for form in ("jsonl", "json", "parquet"):
            made_rows = [row(draw.randrange(60)) for _ in range(EACH)]
            for number in range(0, EACH, 9):
                made_rows[number] |= {draw.choice(list(made_rows[number])): draw.choice(["", None])}
            if form == "parquet":
                pq.write_table(pa.Table.from_pylist(made_rows), own / f"{kind}.{form}")
            else:
                lines = (json.dumps(one) for one in made_rows)
                whole = json.dumps(made_rows) if form == "json" else "\n".join(lines)
                (own / f"{kind}.{form}").write_text(whole)
            expected[f"{kind}.{form}"] = EACH
    kinds: Any = {kind: [f"{kind}*"] for kind in KINDS}
    data = DataConfig(source="files", max_rejected=0.5, **kinds)
    found = made(tmp_path, replace(TASKS, data=data))
    report = found["report"]
    by_file = {file: counts for kind in KINDS for file, counts in report["rows_by_file"][kind].items()}
    assert {file: sum(counts[name] for name in COUNTS) for file, counts in by_file.items()} == expected
    for kind in KINDS:
        kept = sum(len(records) for records in found[kind].values())
        assert report["rows"][kind]["accepted"] == kept and report["rows"][kind]["duplicates"] > 20
        rejected = (tmp_path / f"out/{kind}/rejected.jsonl").read_text().splitlines()
        assert len(rejected) == report["rows"][kind]["rejected"] >= 20
