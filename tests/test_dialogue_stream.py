"""Dialogues as batches: masks keep the assistant's words, long dialogues are split between groups, nothing is lost."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.batches.dialogues import DialogueStream, segments, split_groups
from pipeline.ingest import records
from pipeline.ingest.records import Dialogue
from pipeline.run.errors import DataError
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
TOKENIZER = Tokenizer.train(iter([(ROOT / "pipeline/batches/dialogues.py").read_text(encoding="utf-8")]), 512)
CONTEXT = 128
some = settings(max_examples=40, deadline=None)  # a shared machine may stall

word = st.text("ab \n", max_size=30)
groups = st.lists(
    st.lists(st.tuples(st.sampled_from(["assistant", "tool", "assistant"]), word), max_size=3), max_size=5
)


def dialogue(number: int, kind: str = "tools", turns: int = 2) -> Dialogue:
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"Rules {number}."}]
    for turn in range(turns):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": f'{{"n": {turn}}}'}}
        messages += [
            {"role": "user", "content": f"question {number} {turn} " + "why " * (number % 5)},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "name": "f", "content": str(number)},
            {"role": "assistant", "content": f"answer {number} {turn}"},
        ]
    return Dialogue(id=f"d{number}", kind=kind, category="simple", messages=messages)


def built(groups: list[list[tuple[str, str]]]) -> Dialogue:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "S"}]
    for number, group in enumerate(groups):
        messages.append({"role": "user", "content": f"u{number}"})
        messages += [{"role": role, "content": content} for role, content in group]
    return Dialogue(id="x", kind="chat", category="", messages=messages)


def write(folder: Path, train: list[Dialogue], val: list[Dialogue]) -> Path:
    records.write(folder / "train.jsonl", train)
    records.write(folder / "val.jsonl", val)
    return folder


def said(ids: list[int], trained: list[bool]) -> str:
    return TOKENIZER.decode([i for i, t in zip(ids, trained, strict=True) if t], skip_special=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    train = [dialogue(n, kind=("tools", "code", "story")[n % 3], turns=1 + n % 4) for n in range(60)]
    return write(tmp_path_factory.mktemp("dialogues"), train, [dialogue(n) for n in range(100, 106)])


def stream(folder: Path, **changes: Any) -> DialogueStream:
    return DialogueStream(folder, TOKENIZER, **({"context": CONTEXT, "tokens_per_step": 512, "seed": 3} | changes))


def test_an_epoch_trains_every_assistant_turn_once_and_nothing_else(folder: Path) -> None:
    batches = stream(folder)
    assert batches.too_long == batches.untrained == []
    given: Counter[str] = Counter()
    for row in batches.at(np.arange(batches.rows_per_epoch), CONTEXT):
        batch = batches.batch(0, CONTEXT, np.array([row]))
        targets = batch.targets[batch.targets >= 0].tolist()
        given.update(TOKENIZER.decode(targets, skip_special=False).split("<|im_end|>")[:-1])
        assert targets  # no row is fully masked
    expected: Counter[str] = Counter()
    for item in records.read(folder / "train.jsonl", Dialogue):
        rendered = chat.render(TOKENIZER, item.messages)
        expected.update(said(rendered.ids, rendered.trained).split("<|im_end|>")[:-1])
    assert given == expected and sum(expected.values()) == sum(2 * (1 + n % 4) for n in range(60))


def test_each_segment_begins_with_the_system_turn_and_is_a_document_of_its_own(folder: Path) -> None:
    batches = stream(folder)
    seen = 0
    for step in range(3):
        batch = batches.batch(step, CONTEXT, batches.rows(step, CONTEXT))
        for row in range(len(batch.input_ids)):
            for number in set(batch.documents[row].tolist()) - {-1}:
                here = batch.documents[row] == number
                text = TOKENIZER.decode(batch.input_ids[row][here].tolist(), skip_special=False)
                assert text.startswith("<|im_start|>system\nRules ") and text.endswith("<|im_end|>\n")
                assert batch.positions[row][here].tolist() == list(range(int(here.sum())))
                seen += 1
    assert seen >= 12


@some
@given(groups, st.integers(40, 120))
def test_segments_fit_and_hold_each_group_once_unless_it_is_listed(
    groups: list[list[tuple[str, str]]], context: int
) -> None:
    item = built(groups)
    found = segments(TOKENIZER, item, context)
    assert all(len(segment.ids) <= context and any(segment.trained) for segment in found.rendered)
    system, parts = split_groups(item.messages)
    lone = [chat.render(TOKENIZER, [*system, *part]) for part in parts]
    too_long = [n for n, rendered in enumerate(lone) if len(rendered.ids) > context]
    whole = chat.render(TOKENIZER, item.messages)
    if len(whole.ids) <= context:
        too_long = []
    assert found.too_long == [f"x#{n}" for n in too_long]
    fits = "".join(said(r.ids, r.trained) for n, r in enumerate(lone) if n not in too_long)
    assert "".join(said(r.ids, r.trained) for r in found.rendered) == fits
    if not found.rendered and not too_long:
        assert len(found.untrained) == 1 or not any(whole.trained)


def test_groups_fill_segments_greedily_and_each_has_the_system_turn_and_tools() -> None:
    item = dialogue(1, turns=4)
    system, parts = split_groups(item.messages)
    two = len(chat.render(TOKENIZER, [*system, *parts[0], *parts[1]]).ids)
    found = segments(TOKENIZER, item, two)
    assert [s.ids for s in found.rendered] == [
        chat.render(TOKENIZER, [*system, *parts[0], *parts[1]]).ids,
        chat.render(TOKENIZER, [*system, *parts[2], *parts[3]]).ids,
    ]


def test_a_group_that_cannot_fit_is_listed_and_the_rest_is_kept(tmp_path: Path) -> None:
    item = built([[("assistant", "a")], [("assistant", "b" * 900)], [("assistant", "c")], []])
    write(tmp_path, [item, *(dialogue(n) for n in range(20))], [dialogue(99)])
    batches = stream(tmp_path)
    assert batches.too_long == ["x#1"] and batches.untrained == [] and batches.num_dialogues == 21
    found = segments(TOKENIZER, item, CONTEXT)
    assert [said(s.ids, s.trained) for s in found.rendered] == ["a<|im_end|>", "c<|im_end|>"]


def test_what_trains_nothing_is_listed_and_left_out(tmp_path: Path) -> None:
    write(tmp_path, [built([[]]), *(dialogue(n) for n in range(20))], [dialogue(99)])
    assert stream(tmp_path).untrained == ["x"]


def test_too_few_tokens_say_how_many_groups_do_not_fit(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"too few tokens for one batch: got 0 tokens in 0 packed rows of \d+"):
        stream(write(tmp_path, [], []))
    with pytest.raises(DataError, match="150 groups of messages do not fit in 32 tokens"):
        stream(folder, context=32)


def test_a_shorter_context_splits_rows_and_keeps_every_target(folder: Path) -> None:
    batches = stream(folder)
    long, short = (batches.batch(1, c, batches.rows(1, c)) for c in (CONTEXT, 32))
    assert short.input_ids.shape == (16, 32) and short.targets.reshape(-1, CONTEXT).equal(long.targets)


def test_the_fingerprint_sees_the_words_the_order_and_the_seed(folder: Path, tmp_path: Path) -> None:
    items = list(records.read(folder / "train.jsonl", Dialogue))
    val = list(records.read(folder / "val.jsonl", Dialogue))
    same, swapped = write(tmp_path / "a", items, val), write(tmp_path / "b", [*items[1:], items[0]], val)
    prints = [stream(folder), stream(same), stream(swapped), stream(folder, seed=4), stream(folder, context=256)]
    assert prints[0].fingerprint == prints[1].fingerprint
    assert len({p.fingerprint for p in prints}) == 4


def test_files_and_dialogues_that_are_wrong_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.jsonl: expected dialogues here"):
        stream(tmp_path)
    bad = Dialogue(id="d7", kind="chat", category="", messages=[{"role": "robot", "content": ""}])
    with pytest.raises(DataError, match=r"dialogue d7: .*'robot'"):
        stream(write(tmp_path, [bad], []))
