"""Synthetic data of every kind are the same to the byte: the hash of a fixed sample must not change.

To change the data on purpose, replace the hash and let the graph rebuild everything.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import pytest
from ruamel.yaml.error import YAMLError

from pipeline.ingest.records import fields_of
from pipeline.run.device import generator
from pipeline.synthetic import drills, preferences, programs, stories, tools, wording

FOLDER = Path(wording.__file__).parent


def digest(values: Iterable[object]) -> str:
    """16 hex digits of the SHA-256 of the values as JSON lines."""
    lines = "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def test_the_stories_are_the_same_to_the_byte() -> None:
    paths = [f"stories/{family}/{number}" for family in stories.FAMILIES for number in range(4)]
    texts = [stories.story(path) for path in paths]
    assert digest(texts) == "f7583111fb842cdf"
    assert digest(stories.edits(texts[5], paths[5], generator("same", 1)).items()) == "c70523288361ae2c"


def test_the_programs_are_the_same_to_the_byte() -> None:
    problems = [p for split in ("train", "val", "rl", "test") for p in programs.problems(split, 20, 1)]
    assert digest(map(fields_of, problems)) == "d1cd6aa41a08750f"
    assert digest(programs.distractors(problem, 1) for problem in problems) == "41af91bc681740c6"
    assert digest(map(fields_of, programs.sources(10_000, 1))) == "475c84bc09d06996"


def test_the_tool_conversations_are_the_same_to_the_byte() -> None:
    dialogues = [d for split in ("train", "val", "test") for d in tools.dialogues(split, 100, 1)]
    assert digest(map(asdict, dialogues)) == "0cfde5aeba83c3f9"
    assert digest(tools.wrong_answers(d, 1) for d in dialogues[:100] if tools.turns(d)) == "0a2d5c3d0b3bb9a3"
    assert digest(asdict(tools.choice_dialogue("train", 1, n)) for n in range(20)) == "e7dcb0a0525fca64"
    assert (
        digest(asdict(tools.talk_dialogue(s, 1, n)) for s in ("train", "test") for n in range(40)) == "77787bfddb8a8759"
    )


def test_the_drills_facts_and_pairs_are_the_same_to_the_byte() -> None:
    assert digest(map(fields_of, drills.records(20_000, 1))) == "8fc1c0a13914b16e"
    assert digest(asdict(drills.dialogue("train", 1, number)) for number in range(40)) == "360cc6d9d5ff5605"
    assert digest(asdict(fact) for split in drills.facts(20, 1).values() for fact in split) == "6f8ba5a4eeb9c314"
    pairs = [
        *preferences.tool_pairs(tools.dialogues("train", 20, 1), 1),
        *preferences.story_pairs(("stories/lost/1", "stories/gift/2"), 1),
    ]
    assert digest(map(asdict, pairs)) == "c096839bb80df0aa"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_a_table_is_read_whole_and_has_short_lines(path: Path) -> None:
    assert wording.table(path.name)
    assert all(len(line) <= 120 for line in path.read_text(encoding="utf-8").splitlines())


def test_a_key_that_occurs_twice_or_is_unknown_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "twice.yaml").write_text("a: b c\na: d\n")
    (tmp_path / "once.yaml").write_text("a: b, c d\n")
    monkeypatch.setattr(wording, "__file__", str(tmp_path / "wording.py"))
    with pytest.raises(YAMLError, match="duplicate key"):
        wording.table("twice.yaml")
    assert wording.word_list("once.yaml", "a") == ("b", "c d")
    with pytest.raises(KeyError):
        wording.lines("once.yaml", "b")
