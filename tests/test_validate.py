"""`python -m pipeline.tools.validate`: what it counts in a file is what the stages would take from it."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.ingest.duplicates import Index
from pipeline.run.errors import ConfigError
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer
from pipeline.tools import validate
from tests.ownfiles import jsonl, read

GOOD: list[Any] = [
    {"prompt": "What is 2 + 2?", "completion": "4"},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
]


def report(path: Path, tokenizer: Tokenizer | None = None, **changes: Any) -> validate.FileReport:
    return validate.report(path, changes.get("kind"), tokenizer, changes.get("index", Index([])))


def test_rows_are_counted_by_shape_and_reason(own: Path) -> None:
    bad = [{"prompt": "x", "completion": ""}, {"prompt": "q", "completion": "a", "label": False}]
    (own / "a.jsonl").write_text(jsonl(*GOOD, GOOD[0], *bad) + "not json\n")
    found = report(own / "a.jsonl")
    assert found.kind == "dialogues" and found.shapes == {"question": 2, "messages": 1}
    assert (found.num_rows, found.num_accepted, found.num_duplicates, found.num_rejected) == (6, 2, 1, 3)
    assert [reason.removeprefix(f"{own / 'a.jsonl'}:").split(": ")[:2] for reason in found.reasons] == [
        ["4", "completion"],
        ["5", "label"],
        ["6", "row"],
    ]


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.jsonl", jsonl({"prompt": "q", "chosen": "a", "rejected": "b"}), "preferences"),
        ("a.jsonl", jsonl({"question": "Add", "tests": ["assert add(1) == 1"]}), "problems"),
        ("a.jsonl", jsonl({"text": "x"}), "text"),
        ("a.csv", "instruction;output\ni;o\n", "dialogues"),
        ("a.md", "prose", "text"),
        ("a.py", "x = 1", "code"),
        ("a.ipynb", json.dumps({"cells": [{"cell_type": "code", "source": "x = 1"}]}), "code"),
    ],
)
def test_the_kind_is_what_the_rows_are(own: Path, name: str, content: str, kind: str) -> None:
    (own / name).write_text(content)
    found = report(own / name)
    assert found.kind == kind and found.num_accepted == found.num_rows == 1


def test_tokens_are_those_of_the_conversation_and_the_example_marks_what_is_trained(
    own: Path, byte_tokenizer: Tokenizer
) -> None:
    (own / "a.jsonl").write_text(jsonl(GOOD[0]))
    found = report(own / "a.jsonl", byte_tokenizer)
    messages = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]
    rendered = chat.render(byte_tokenizer, messages)
    assert (found.num_tokens, found.num_trained) == (len(rendered.ids), sum(rendered.trained))
    assert "[[4" in found.example and "[[What" not in found.example


def test_rows_that_hold_an_item_of_a_benchmark_are_counted(own: Path) -> None:
    item = " ".join(f"word{n}" for n in range(20))
    (own / "a.jsonl").write_text(jsonl({"text": f"before {item} after"}, {"text": "something else"}))
    assert report(own / "a.jsonl", index=Index([("b:1", item)])).num_benchmarks == 1


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.one_of(
            st.sampled_from(GOOD),
            st.dictionaries(st.sampled_from(["prompt", "completion", "id", "text"]), st.text(max_size=3), max_size=3),
            st.integers(),
            st.none(),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_no_row_is_lost_and_the_stages_take_as_many(own: Path, rows: list[Any]) -> None:
    (own / "a.jsonl").write_text(jsonl(*rows))
    found = report(own / "a.jsonl", kind="dialogues")
    assert found.num_accepted + found.num_duplicates + found.num_rejected == found.num_rows == len(rows)
    if {"question", "messages"} > set(found.shapes):  # the stages' reader takes one shape for a whole file
        try:
            taken = len(read(own, "dialogues").records)
        except Exception:  # nothing is left
            taken = 0
        assert taken == found.num_accepted


def test_the_command_ends_with_1_for_rejected_rows_and_2_for_what_cannot_be_read(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own / "good.jsonl").write_text(jsonl(GOOD[0]))
    (own / "bad.jsonl").write_text(jsonl(GOOD[0], {"prompt": "x"}))
    common = ["--benchmarks", str(own / "none")]
    assert validate.main([str(own / "good.jsonl"), *common]) == 0
    assert validate.main([str(own / "good.jsonl"), str(own / "bad.jsonl"), *common]) == 1
    told = capsys.readouterr().out
    assert told.count("good.jsonl") == 2 and "bad.jsonl:2: row: fits no shape of dialogues" in told
    assert validate.main([str(own / "none.jsonl"), *common]) == 2
    assert "expected a file, found nothing" in capsys.readouterr().err
    (own / "a.bin").write_bytes(b"\0\1")
    with pytest.raises(ConfigError, match="found a binary file"):
        report(own / "a.bin")


def test_columns_and_the_encoding_are_those_of_an_entry(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own / "tickets.csv").write_bytes("frage,antwort\nWo?,Köln\nWann?,Später\n".encode("latin-1"))
    options = ["--columns", "frage=prompt,antwort=completion", "--encoding", "latin-1"]
    assert validate.main([str(own / "tickets.csv"), *options]) == 0
    assert "question 2" in capsys.readouterr().out
    assert validate.main([str(own / "tickets.csv"), "--encoding", "latin-1"]) == 1
    assert validate.main([str(own / "tickets.csv"), "--columns", "fragen=prompt", "--encoding", "latin-1"]) == 2
    assert "no row has 'fragen' (did you mean 'frage'?)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        validate.main([str(own / "tickets.csv"), "--columns", "frage"])
    (own / "a.md").write_text("prose")
    assert validate.main([str(own / "a.md"), "--columns", "a=b"]) == 2
