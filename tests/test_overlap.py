"""Test items that the training data contain are not measured."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from pipeline.ingest.records import Dialogue, Problem, write
from stages import evaluate, overlap
from tests.loop import job

LONG = "please list every open invoice of the customer whose name begins with the letter q and add up what they owe"
ANSWER = """```python
def total(rows):
    result = 0
    for row in rows:
        result += row.price * row.count
    return round(result, 2)
```"""


def dialogue(name: str, request: str, kind: str = "chat") -> Dialogue:
    said = [{"role": "user", "content": request}, {"role": "assistant", "content": "yes"}]
    return Dialogue(id=name, kind=kind, category="", messages=said)


def problem(name: str, answer: str | None, *, request: str = "") -> Problem:
    return Problem(
        id=name,
        level=1,
        group="request" if request else "easy",
        key=name,
        question=request or "add up",
        entry_point="total",
        signature="",
        tests=[],
        answer=answer,
    )


def contained(folder: Path, *, text: str = "nothing", code: str = "pass", **train: list[Dialogue]) -> dict[str, Any]:
    for name, document in (("text", text), ("code", code)):
        (folder / name).mkdir()
        table = pyarrow.table({"text": [document], "source": ["s"]})
        pyarrow.parquet.write_table(table, folder / name / "train-0.parquet")
    write(folder / "dialogues/train.jsonl", train.get("train", []))
    write(folder / "dialogues/test.jsonl", [dialogue("a", LONG), dialogue("b", "hello"), dialogue("c", LONG, "story")])
    problems = [
        problem("x", ANSWER),
        problem("y", None),
        problem("z", "```python\nx\n```", request=f"Write code: {LONG}"),
    ]
    write(folder / "problems/test.jsonl", problems)
    data = {name: folder / name for name in ("text", "code", "dialogues", "problems")}
    overlap.run(overlap.Params(), job(folder / "work/key"), **data, out=folder / "overlap.json")
    return json.loads((folder / "overlap.json").read_text())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"dialogues": [], "problems": []}),
        ({"text": f"A letter: {LONG}."}, {"dialogues": ["a"], "problems": ["z"]}),
        ({"code": ANSWER.split("\n", 1)[1]}, {"dialogues": [], "problems": ["x"]}),
        ({"train": [dialogue("t", f"Now {LONG}")]}, {"dialogues": ["a"], "problems": ["z"]}),
        ({"train": [dialogue("t", f"Now {LONG}", "code")]}, {"dialogues": [], "problems": []}),
    ],
)
def test_an_item_is_listed_where_a_document_or_a_training_request_contains_it(
    given: dict[str, Any], expected: dict[str, list[str]], tmp_path: Path
) -> None:
    assert contained(tmp_path, **given) == expected


def test_an_item_that_is_contained_is_measured_by_nobody(tmp_path: Path) -> None:
    contained(tmp_path, text=LONG, code=ANSWER)
    clean = evaluate.clean_items(tmp_path / "dialogues", Dialogue, tmp_path / "overlap.json")
    assert [item.id for item in clean] == ["b", "c"]
    assert [p.id for p in evaluate.clean_items(tmp_path / "problems", Problem, tmp_path / "overlap.json")] == ["y"]
