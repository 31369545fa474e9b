"""The chat format: text, ids and mask together; prefixes; no injection; calls read back."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.run.errors import DataError
from pipeline.text import chat
from pipeline.text.tokenizer import ADDED, SPECIAL, Tokenizer

ROOT = Path(__file__).parents[1]
some = settings(max_examples=30, deadline=None)  # a shared machine may stall
TOKENIZER = Tokenizer.train(iter([(ROOT / "pipeline/text/chat.py").read_text(encoding="utf-8")]), 512)
CONTROL = [*SPECIAL.values(), *ADDED.values()]

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add é", "parameters": {"type": "object"}}}]
MESSAGES = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "1+2? And 3+4?\n"},
    {
        "role": "assistant",
        "content": "\nLet me see. ",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x":1, "y": 2}'}},
            {"id": "b", "type": "function", "function": {"name": "add", "arguments": '{"s": "\\u00e9"}'}},
        ],
    },
    {"role": "tool", "tool_call_id": "b", "content": "7"},
    {"role": "tool", "tool_call_id": "a", "content": "3"},
    {"role": "assistant", "content": "3 and 7"},
]
RENDERED = """\
<|im_start|>system
Be brief.

Tools you can call:
<tools>
{"name": "add", "description": "Add é", "parameters": {"type": "object"}}
</tools><|im_end|>
<|im_start|>user
1+2? And 3+4?
<|im_end|>
<|im_start|>assistant
Let me see.
<tool_call>
{"name": "add", "arguments": {"x": 1, "y": 2}}
</tool_call>
<tool_call>
{"name": "add", "arguments": {"s": "é"}}
</tool_call><|im_end|>
<|im_start|>tool
<tool_response>
3
</tool_response><|im_end|>
<|im_start|>tool
<tool_response>
7
</tool_response><|im_end|>
<|im_start|>assistant
3 and 7<|im_end|>
"""

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
calls = st.builds(
    lambda name, arguments: {"function": {"name": name, "arguments": arguments}},
    st.text(min_size=1, max_size=6),
    st.dictionaries(st.text(max_size=4), json_values, max_size=3),
)
contents = st.one_of(st.text(max_size=12), st.sampled_from(["", " ", "\n\nx", "<|im_end|>", "a <tool_call> b", "'s"]))
plain = st.builds(
    lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "system"]), contents
)
assistants = st.builds(
    lambda content, tool_calls: {"role": "assistant", "content": content, "tool_calls": tool_calls},
    contents,
    st.lists(calls, max_size=2),
)
results = st.builds(lambda content: {"role": "tool", "content": content}, contents)
conversations = st.lists(st.one_of(plain, assistants, results), min_size=1, max_size=6)


def test_a_conversation_renders_to_the_text_written_by_hand() -> None:
    assert chat.render_text(MESSAGES, TOOLS) == RENDERED
    assert TOKENIZER.decode(chat.render(TOKENIZER, MESSAGES, TOOLS).ids, skip_special=False) == RENDERED


def test_what_is_trained_is_the_assistants_content_its_calls_and_the_stop_token() -> None:
    rendered = chat.render(TOKENIZER, MESSAGES, TOOLS)
    said = [id_ for id_, trained in zip(rendered.ids, rendered.trained, strict=True) if trained]
    assert TOKENIZER.decode(said, skip_special=False) == (
        'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"s": "é"}}\n</tool_call><|im_end|>3 and 7<|im_end|>'
    )


def test_tools_without_a_system_turn_make_one() -> None:
    text = chat.render_text([{"role": "user", "content": "hi"}], TOOLS)
    assert text.startswith("<|im_start|>system\nTools you can call:\n<tools>\n{") and text.count("system\n") == 1


@some
@given(conversations, st.booleans())
def test_every_prefix_of_the_messages_renders_to_a_prefix_of_the_ids(
    messages: list[dict[str, Any]], tools: bool
) -> None:
    whole = chat.render(TOKENIZER, messages, TOOLS if tools else ())
    for k in range(1, len(messages)):
        part = chat.render(TOKENIZER, messages[:k], TOOLS if tools else ())
        assert whole.ids[: len(part.ids)] == part.ids and whole.trained[: len(part.ids)] == part.trained
        if messages[k]["role"] == "assistant":
            prompt = chat.render(TOKENIZER, messages[:k], TOOLS if tools else (), generation_prompt=True)
            assert whole.ids[: len(prompt.ids)] == prompt.ids
            assert not any(prompt.trained[len(part.ids) :]) and whole.trained[len(prompt.ids)]


@some
@given(conversations)
def test_ids_decode_to_the_text_and_the_mask_to_what_the_assistant_said(messages: list[dict[str, Any]]) -> None:
    rendered = chat.render(TOKENIZER, messages)
    assert TOKENIZER.decode(rendered.ids, skip_special=False) == chat.render_text(messages)
    said = [id_ for id_, trained in zip(rendered.ids, rendered.trained, strict=True) if trained]
    expected = [chat.render_text([message]) for message in messages if message["role"] == "assistant"]
    bodies = [text.removeprefix("<|im_start|>assistant\n").removesuffix("\n") for text in expected]
    assert TOKENIZER.decode(said, skip_special=False) == "".join(bodies)


@some
@given(conversations, st.booleans())
def test_what_the_assistant_says_is_told_from_the_ids_alone_as_the_mask_tells_it(
    messages: list[dict[str, Any]], tools: bool
) -> None:
    rendered = chat.render(TOKENIZER, messages, TOOLS if tools else ())
    assert chat.spoken(TOKENIZER, rendered.ids) == rendered.trained
    assert chat.spoken(TOKENIZER, rendered.ids * 2) == rendered.trained * 2


@some
@given(conversations)
def test_messages_cannot_open_or_close_a_turn(messages: list[dict[str, Any]]) -> None:
    ids = chat.render(TOKENIZER, messages).ids
    assert ids.count(TOKENIZER.turn_start) == ids.count(TOKENIZER.turn_end) == len(messages)
    assert ids.count(TOKENIZER.tool_call) == sum(len(message.get("tool_calls", [])) for message in messages)
    assert ids.count(TOKENIZER.tool_response) == sum(message["role"] == "tool" for message in messages)


@some
@given(st.text().filter(lambda text: "<tool_call>" not in text), st.lists(calls, max_size=3))
def test_a_turn_is_read_back_as_it_was_written(content: str, tool_calls: list[dict[str, Any]]) -> None:
    text = chat.render_text([{"role": "assistant", "content": content, "tool_calls": tool_calls}])
    said = text.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
    assert chat.parse(said) == chat.Reply(content.strip(), [call["function"] for call in tool_calls], None)


@some
@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', "{", "[", "x", "\n"]))
)
def test_reading_never_raises_and_an_error_is_reported_for_every_unread_call(pieces: list[str]) -> None:
    reply = chat.parse("".join(pieces))
    assert len(reply.tool_calls) <= pieces.count("<tool_call>")
    if len(reply.tool_calls) < pieces.count("<tool_call>"):
        assert reply.error


@pytest.mark.parametrize(
    ("text", "names", "error"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', ["f"], None),
        ('<tool_call>\n{"name": "f", "arguments": {}}', [], "expected </tool_call>"),
        (
            '<tool_call>{bad</tool_call> x <tool_call>{"name": "g", "arguments": {}}</tool_call>',
            ["g"],
            "cannot be read",
        ),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', [], "NaN"),
        ('<tool_call>{"name": "f"}</tool_call>', [], "name and arguments"),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', [], "arguments object"),
        ("<tool_call>[1]</tool_call>", [], "an object"),
        ("<tool_call>" + "[" * 100_000, [], "cannot be read"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(text: str, names: list[str], error: str | None) -> None:
    reply = chat.parse(text)
    assert [call["name"] for call in reply.tool_calls] == names
    assert (reply.error is None) if error is None else (error in str(reply.error))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "robot", "content": ""}, "'robot'"),
        ({"role": "user", "content": [{"type": "text"}]}, "must be a string"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}, "not JSON"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": NaN}'}}]}, "not JSON"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}, "an arguments object"),
    ],
)
def test_a_message_that_cannot_be_rendered_is_refused(message: dict[str, Any], expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        chat.render(TOKENIZER, [message])


def generated(number: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A random conversation in the on-disk format, awkward whitespace and Unicode included."""
    draw = random.Random(number)

    def words() -> str:
        parts = [
            "\n",
            " ",
            "  ",
            "word",
            "Héllo",
            "日本",
            "🙂",
            "x = 1\n",
            "'s",
            "don't",
            "12",
            "\t",
            "\r\n",
            "\u0301",
            "\x85",
        ]
        return "".join(draw.choices(parts, k=draw.randrange(8)))

    def call(n: int) -> dict[str, Any]:
        arguments = {words(): draw.choice([1, 1.5, None, True, [words()], {"k": words()}, words()]) for _ in range(2)}
        text = json.dumps(arguments, ensure_ascii=False) if draw.random() < 0.5 else arguments
        return {"id": f"call_{n}", "type": "function", "function": {"name": f"f{n}", "arguments": text}}

    messages: list[dict[str, Any]] = []
    if draw.random() < 0.5:
        messages.append({"role": draw.choice(["system", "developer"]), "content": words()})
    for _ in range(draw.randrange(1, 4)):
        messages.append({"role": "user", "content": words()})
        made = [call(n) for n in range(draw.randrange(3))]
        messages.append({"role": "assistant", "content": words()} | ({"tool_calls": made} if made else {}))
        messages += [{"role": "tool", "tool_call_id": f"call_{n}", "content": words()} for n in range(len(made))]
    tools = [{"type": "function", "function": {"name": words(), "parameters": {"b": words(), "a": 1}}}]
    return messages, tools * draw.randrange(3)


@pytest.mark.oracle
def test_ids_text_and_masks_equal_transformers_on_500_dialogues(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    TOKENIZER.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for number in range(500):
        messages, tools = generated(number)
        ours = chat.render(TOKENIZER, messages, tools)
        got = theirs.apply_chat_template(messages, tools or None, return_dict=True, return_assistant_tokens_mask=True)
        assert list(got["input_ids"]) == ours.ids, messages
        assert [bool(m) for m in got["assistant_masks"]] == ours.trained, messages
        prompt = theirs.apply_chat_template(messages[:-1], tools or None, add_generation_prompt=True, tokenize=False)
        assert prompt == chat.render_text(messages[:-1], tools, generation_prompt=True)
