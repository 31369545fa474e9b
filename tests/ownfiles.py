"""Reads a folder of a user's files as the stages do and records what became of the rows, for the tests of readers; also
rows in the formats of published data sets, good and broken.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.ingest import own_files
from pipeline.ingest.sources import DataConfig

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Books:
    """The records that a source yielded, and the rows that it rejected."""

    records: list[tuple[str, Any]]
    rejected: list[dict[str, Any]]


def config(kind: str, globs: Sequence[str] = ("*",), max_rejected: float = 1.0, **options: Any) -> DataConfig:
    return DataConfig(source="files", max_rejected=max_rejected, **{kind: list(globs)}, **options)


def read(
    root: Path, kind: str = "text", globs: Sequence[str] = ("*",), max_rejected: float = 1.0, **options: Any
) -> Books:
    path = root.parent / f"{root.name}-rejected.jsonl"
    rows = own_files.read_files(root, config(kind, globs, max_rejected, **options), kind, path)
    found = [(row.split, row.record) for row in rows]
    return Books(found, [json.loads(line) for line in path.read_text().splitlines()])


def texts(books: Books) -> list[str]:
    return [record.text for _, record in books.records]


def jsonl(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def notebook(*cells: tuple[str, str]) -> str:
    made = [{"cell_type": kind, "source": source.splitlines(keepends=True), "outputs": []} for kind, source in cells]
    return json.dumps({"nbformat": 4, "cells": made})


def call(number: int, name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


XLAM = {
    "id": 7,
    "query": "Weather in Rome and Oslo?",
    "tools": json.dumps(
        [
            {
                "name": "weather",
                "description": "Now",
                "parameters": {
                    "city": {"type": "str", "description": "Where"},
                    "days": {"type": "int, optional", "description": "How many", "default": 1},
                    "tags": {"type": "List[Union[int, float]], optional", "description": ""},
                },
            }
        ]
    ),
    "answers": (
        '[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "weather", "arguments": {"city": "Oslo"}}]'
    ),
}
GLAIVE = {
    "system": (
        'SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\n{"name":'
        ' "price", "description": "d", "parameters": {"type": "object", "properties": {"s": {"type":'
        ' "string"}}}}\n\n{"name": "other", "description": "", "parameters": {}}'
    ),
    "chat": (
        "USER: Price of Bob's?\n\n\nASSISTANT: One moment. <functioncall> "
        '{"name": "price", "arguments": \'{"s": "Bob\\\'s"}\'} <|endoftext|>\n\n\n'
        'FUNCTION RESPONSE: {"p": 1}\n\n\nASSISTANT: It is 1. <|endoftext|>\n\n\n'
    ),
}
TOOLACE = {
    "system": (
        "You are an expert in composing functions. The current time is 2024-05-01 10:00:00.Here is a list of functions"
        ' in JSON format that you can invoke:\n[{"name": "Market Trends API", "description": "d", "parameters":'
        ' {"type": "dict", "properties": {"kind": {"type": "float", "description": "k"}, "all": {"type": "bool"}},'
        ' "required": ["kind"]}, "required": null}, {"name": "g", "parameters": {}}].\nPut it in the format of'
        " [func1(name=value), func2(params)]"
    ),
    "conversations": [
        {"from": "user", "value": "Trends?"},
        {"from": "assistant", "value": '[Market Trends API(kind=-1.5, all=true, note="a, (b) = [c]"), g()]'},
        {
            "from": "tool",
            "value": '[{"name": "Market Trends API", "results": {"up": 1}}, {"name": "g", "results": "no"}]',
        },
        {"from": "assistant", "value": "Up."},
    ],
}


BROKEN = [
    ("text", {"text": 3}, "text"),
    ("text", {"text": " "}, "text"),
    ("dialogues", {"messages": []}, "messages"),
    ("dialogues", {"messages": "["}, "messages"),
    ("dialogues", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ("dialogues", {"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ("dialogues", {"messages": [{"role": "user", "content": "Q"}]}, "messages"),
    ("dialogues", {"messages": [{"role": "assistant", "content": ""}]}, "messages[0].content"),
    ("dialogues", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
    ("dialogues", {"messages": [{"role": "assistant", "tool_calls": [call(0, "f", "{}")]}]}, "messages[0]"),
    (
        "dialogues",
        {"messages": [{"role": "assistant", "tool_calls": [call(0, "f", "{")]}]},
        "messages[0].tool_calls.arguments",
    ),
    ("dialogues", {"conversations": [{"from": "function_call", "value": "f(1)"}]}, "conversations[0]"),
    ("dialogues", {**XLAM, "answers": "[]"}, "answers"),
    ("dialogues", {**XLAM, "answers": '[{"name": "snow", "arguments": {}}]'}, "messages[1]"),
    ("dialogues", {**XLAM, "tools": '[{"description": "no name"}]'}, "tools[0]"),
    ("dialogues", {**GLAIVE, "chat": 'USER: q\n\nASSISTANT: <functioncall> {"name": '}, "chat[1]"),
    ("dialogues", {**GLAIVE, "chat": "FUNCTION RESPONSE: 1"}, "chat[0]"),
    ("dialogues", {**GLAIVE, "chat": "hello"}, "chat"),
    ("dialogues", {**GLAIVE, "system": 'SYSTEM: x {"name": '}, "system"),
    ("dialogues", {**TOOLACE, "conversations": [{"from": "assistant", "value": "[g(1)]"}]}, "conversations[0]"),
    ("dialogues", {**TOOLACE, "conversations": [{"from": "assistant", "value": "[g(a=open(1))]"}]}, "conversations[0]"),
    ("dialogues", {"instruction": "", "output": "x"}, "instruction"),
    ("dialogues", {"question": "Q", "answer": 4}, "answer"),
    ("dialogues", {"question": "Q", "answer": "A", "tests": []}, "tests"),
    ("problems", {"question": "Q", "tests": []}, "tests"),
    ("problems", {"question": "Q", "tests": ["f(1)"]}, "tests[0].assert"),
    ("problems", {"question": "Q", "tests": ["assert f("]}, "tests[0]"),
    ("problems", {"question": "Q", "tests": [{"args": "[1]", "expected": "2"}]}, "entry_point"),
    ("problems", {"question": "Q", "entry_point": "f", "tests": [{"args": "1", "expected": "2"}]}, "tests[0].args"),
    (
        "problems",
        {"question": "Q", "entry_point": "f", "tests": [{"args": "[1]", "expected": "abc"}]},
        "tests[0].expected",
    ),
    ("problems", {"question": "Q", "tests": ["assert f(1)"], "level": 9}, "level"),
    ("preferences", {"prompt": "Q", "chosen": "A", "rejected": "A"}, "rejected"),
    ("preferences", {"prompt": "Q", "chosen": "A", "rejected": ""}, "rejected"),
    ("preferences", {"chosen": "A", "rejected": "B"}, "chosen"),
    ("preferences", {"prompt": "Q", "chosen": "A", "rejected": "B", "gold_chosen": 2}, "gold_chosen"),
    ("preferences", {"prompt": [], "chosen": "A", "rejected": "B"}, "prompt"),
    ("labels", {"prompt": "Q", "completion": "A", "label": 1}, "label"),
    ("labels", {"prompt": "Q", "completion": "A", "label": "maybe"}, "label"),
    ("labels", {"messages": [{"role": "user", "content": "Q"}], "kto_tag": True}, "messages"),
    ("labels", {"prompt": "Q", "completion": " ", "label": True}, "completion"),
    ("labels", {"prompt": "Q", "completion": [{"role": "assistant", "content": ""}], "label": True}, "completion"),
    ("labels", {"completion": "A", "label": True}, "instruction"),
    ("labels", {"prompt": [{"role": "system", "content": "S"}], "completion": "A", "label": True}, "prompt"),
    ("labels", {"prompt": "Q", "completion": [{"role": "user", "content": "R"}], "label": True}, "completion"),
    ("dialogues", {"messages": [{"role": "user", "content": "Q"}], "kto_tag": False}, "kto_tag"),
]
