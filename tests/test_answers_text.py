"""However an answer is split into tokens, its pieces join to the whole answer; nothing is sent too early."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.serve.answers import Assembler, Delta
from pipeline.serve.engine import SampledToken
from pipeline.text.tokenizer import Tokenizer
from tests.conftest import SENTENCES

TOKENIZER = Tokenizer.train(iter(SENTENCES), 320)
BYTE = TOKENIZER.byte_ids


def said(ids: list[int]) -> list[SampledToken]:
    return [SampledToken(id_, -1.0) for id_ in ids]


def heard(ids: list[int], **named: Any) -> tuple[Assembler, list[Delta]]:
    assembler = Assembler(TOKENIZER, **named)
    deltas = [delta for one in said(ids) for delta in assembler.hear(one)]
    return assembler, deltas + assembler.close()


def bytewise(text: str) -> list[int]:
    """The ids of a text, one per byte: every character of several bytes is split."""
    return [BYTE[byte] for byte in text.encode()]


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_comes_out_whole_though_its_characters_are_cut(text: str) -> None:
    _, deltas = heard(bytewise(text))
    assert "".join(delta.content for delta in deltas) == text
    assert not any("\ufffd" in delta.content for delta in deltas) or "\ufffd" in text


@given(st.binary(max_size=40))
@settings(max_examples=200, deadline=None)
def test_bytes_that_are_no_text_become_replacement_characters_as_if_read_at_once(raw: bytes) -> None:
    _, deltas = heard([BYTE[byte] for byte in raw])
    assert "".join(delta.content for delta in deltas) == raw.decode("utf-8", "replace")


@given(st.text("ab¡🚂", max_size=30), st.lists(st.text("ab¡🚂", min_size=1, max_size=4), min_size=1, max_size=4))
@settings(max_examples=400, deadline=None)
def test_a_stop_text_cuts_where_it_first_stands_and_never_shows(text: str, stops: list[str]) -> None:
    assembler, deltas = heard(bytewise(text), stops=stops)
    # the first place at which some stop text is complete; of those that end there, the one that began first
    ends = (
        [min(text.find(stop) + len(stop) for stop in stops if stop in text)]
        if any(stop in text for stop in stops)
        else []
    )
    told = "".join(delta.content for delta in deltas)
    if ends:
        begin = min(ends[0] - len(stop) for stop in stops if text[: ends[0]].endswith(stop))
        assert told == text[:begin] and assembler.stopped
    else:
        assert told == text and not assembler.stopped


@given(st.lists(st.integers(16, 319), max_size=50), st.lists(st.text("ae t", min_size=1, max_size=3), max_size=2))
@settings(max_examples=200, deadline=None)
def test_every_token_is_told_once_and_in_order(ids: list[int], stops: list[str]) -> None:
    assembler, deltas = heard(ids, stops=stops)
    told = [one.token for delta in deltas for one in delta.tokens]
    assert told == ids[: len(told)] and (assembler.stopped or told == ids)


ARGUMENTS = st.dictionaries(
    st.text(max_size=8),
    st.recursive(st.none() | st.integers() | st.text(max_size=10), lambda inner: st.lists(inner, max_size=3)),
    max_size=3,
)


@given(
    st.sampled_from(["", "Let me see.", "Well }\n"]),
    st.lists(st.tuples(st.sampled_from(["f", "get_time"]), ARGUMENTS), min_size=1, max_size=3),
)
@settings(max_examples=200, deadline=None)
def test_calls_come_out_as_they_were_said_in_pieces(opening: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    ids = bytewise(opening + "\n" if opening else "")
    for number, (name, arguments) in enumerate(calls):
        text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=number % 2 == 0)
        ids += [
            *bytewise("\n" if number else ""),
            TOKENIZER.tool_call,
            *bytewise(f"\n{text}\n"),
            TOKENIZER.tool_call_end,
        ]
    assembler, deltas = heard(ids, tools=True)
    assert assembler.content == opening.rstrip()
    joined: dict[int, list[Any]] = {}
    for piece in (delta.call for delta in deltas if delta.call is not None):
        if piece.id is not None:
            assert piece.index not in joined, "a call begins once"
            joined[piece.index] = [piece.name, ""]
        joined[piece.index][1] += piece.arguments
    assert [(name, json.loads(text)) for name, text in joined.values()] == calls
    assert [call.arguments for call in assembler.calls] == [text for _, text in joined.values()]
    assert all(call.closed for call in assembler.calls)
    assert [one.token for delta in deltas for one in delta.tokens] == [i for i in ids if i is not None][: len(ids)]


def test_text_that_spells_a_tag_is_no_call() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assembler, deltas = heard(bytewise(text), tools=True)
    assert assembler.calls == [] and "".join(delta.content for delta in deltas) == text


def test_a_call_that_was_cut_is_not_closed() -> None:
    ids = [TOKENIZER.tool_call, *bytewise('\n{"name": "f", "arguments": {"a')]
    assembler, _ = heard(ids, tools=True)
    assert not assembler.calls[0].closed and assembler.calls[0].arguments == '{"a'


@pytest.mark.parametrize("text", ["no space", "trailing space  ", "line\n\n"])
def test_space_at_the_end_is_told_where_no_call_follows(text: str) -> None:
    _, deltas = heard(bytewise(text), tools=True)
    assert "".join(delta.content for delta in deltas) == text
