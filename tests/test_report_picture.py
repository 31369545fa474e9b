"""pipeline/report/card.py: the graph of a run as a picture."""

import re
from itertools import pairwise
from xml.etree import ElementTree

from pipeline.report import card
from pipeline.report.metrics import MetricsRun


def run(**reads: list[str]) -> MetricsRun:
    return MetricsRun(
        {name: {"lineage": {"key": name, "inputs": dict.fromkeys(paths, "0")}} for name, paths in reads.items()}, {}, {}
    )


CHAIN = run(
    corpus=[],
    tasks=["data/raw"],
    tokenizer=["data/raw"],
    encode_code=["data/raw/code", "data/tokenizer"],
    language=["data/tokens/text", "data/tokenizer"],
    code=["models/language", "data/tokens/code", "data/tokenizer"],
    tools=["models/code", "data/dialogues"],
    deploy=["models/tools", "data/raw/text/manifest.json"],
    mine=["models/lora", "data/own"],
    lora=["models/code"],
)


def test_an_edge_is_what_a_stage_reads_without_what_another_way_implies() -> None:
    assert card.edges(CHAIN) == {
        "corpus": [],
        "tasks": ["corpus"],
        "tokenizer": ["corpus"],
        "encode_code": ["tokenizer"],
        "language": ["tokenizer"],
        "code": ["encode_code", "language"],
        "tools": ["code", "tasks"],
        "deploy": ["tools"],
        "mine": ["lora"],
        "lora": ["code"],
    }


def test_every_stage_stands_right_of_what_it_was_made_from() -> None:
    parents = card.edges(CHAIN)
    levels = card.columns(parents)
    depth = {name: number for number, level in enumerate(levels) for name in level}
    assert all(depth[parent] < depth[name] for name, before in parents.items() for parent in before)
    assert sorted(name for level in levels for name in level if ">" not in name) == sorted(parents)
    between = [name for level in levels for name in level if name.startswith("tasks>tools@")]
    assert len(between) == depth["tools"] - depth["tasks"] - 1 > 0  # one place in each column that the edge passes


def test_no_box_covers_another_and_no_edge_goes_through_one() -> None:
    text = card.svg(CHAIN, {"code": "3 min"}, frozenset({"tools"}))
    root = ElementTree.fromstring(text)
    boxes = [(float(r.attrib["x"]), float(r.attrib["y"])) for r in root.iter("rect")]
    assert len(boxes) == len(CHAIN.stages)
    for (x, y), (other_x, other_y) in pairwise(sorted(boxes)):
        assert x != other_x or other_y - y >= card.HEIGHT
    for path in root.iter("path"):  # the straight pieces lie between boxes
        numbers = [float(n) for n in re.findall(r"-?[\d.]+", path.attrib["d"])]
        for left, level in zip(numbers[6::7], numbers[7::7], strict=False):
            assert not any(x <= left <= x + card.WIDTH and y < level < y + card.HEIGHT for x, y in boxes if x != left)
    assert [r.attrib.get("class") for r in root.iter("rect")].count("marked") == 1
    assert "3 min" in text and "url(" not in text


def test_names_are_escaped_and_nothing_gives_nothing() -> None:
    assert "&lt;b&gt;" in card.svg(run(**{"<b>": []}), {"<b>": "<i>"}) and "<i>" not in card.svg(
        run(**{"<b>": []}), {"<b>": "<i>"}
    )
    assert card.svg(run(), {}) == ""
