"""The shapes of rows: a good and a broken row each, detection, and the promise that nothing but RowError is raised."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.ingest import conversations, shapes
from pipeline.ingest.records import Dialogue, Label, Pair, Problem, Text
from pipeline.ingest.tool_calls import RowError
from tests.ownfiles import BROKEN, GLAIVE, TOOLACE, XLAM, call

NONE = shapes.Columns()


def read(row: dict[str, Any], kind: str, columns: shapes.Columns = NONE) -> Any:
    shape = shapes.detect([row], kind, columns)
    assert shape is not None
    return shapes.convert(shape, row, columns)


def shape_of(row: dict[str, Any], kind: str) -> str | None:
    shape = shapes.detect([row], kind, NONE)
    return shape.name if shape else None


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


@pytest.mark.parametrize("spelling", ["license", "licence"])
def test_text_keeps_its_license_and_id(spelling: str) -> None:
    found = read({"text": "a b", spelling: "MIT", "id": 3}, "text")
    assert found == Text(text="a b", source="", path="3", license="MIT")


def test_named_columns_join_the_filled_ones_by_blank_lines_and_answer_with_the_last() -> None:
    columns = shapes.Columns(("title", "body", "reply"))
    row = {"title": "T", "body": None, "reply": "R"}
    assert read(row, "text", columns).text == "T\n\nR"
    messages = read({**row, "body": "B"}, "dialogues", columns).messages
    assert messages == [{"role": "user", "content": "T\n\nB"}, {"role": "assistant", "content": "R"}]


def test_xlam_calls_become_one_turn_and_flat_parameters_become_a_schema() -> None:
    found = read(XLAM, "dialogues")
    assert shape_of(XLAM, "dialogues") == "xlam"
    assert found == Dialogue(
        id="7",
        kind="tools",
        category="xlam",
        messages=[
            {"role": "user", "content": "Weather in Rome and Oslo?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [call(0, "weather", '{"city": "Rome"}'), call(1, "weather", '{"city": "Oslo"}')],
            },
        ],
        tools=[
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "description": "Now",
                    "parameters": {
                        "type": "object",
                        "properties": {
                            "city": {"type": "string", "description": "Where"},
                            "days": {"type": "integer", "description": "How many", "default": 1},
                            "tags": {"type": "array", "items": {"type": "number"}, "description": ""},
                        },
                        "required": ["city"],
                    },
                },
            }
        ],
    )


def test_glaive_transcript_keeps_the_text_before_the_call_and_reads_single_quoted_arguments() -> None:
    found = read(GLAIVE, "dialogues")
    assert found.messages == [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Price of Bob's?"},
        {"role": "assistant", "content": "One moment.", "tool_calls": [call(0, "price", '{"s": "Bob\'s"}')]},
        {"role": "tool", "tool_call_id": "call_0", "name": "price", "content": '{"p": 1}'},
        {"role": "assistant", "content": "It is 1."},
    ]
    assert [t["function"]["name"] for t in found.tools] == ["price", "other"]


def test_toolace_calls_with_spaces_in_names_are_read_and_the_system_text_keeps_only_the_date() -> None:
    found = read(TOOLACE, "dialogues")
    arguments = '{"kind": -1.5, "all": true, "note": "a, (b) = [c]"}'
    assert found.messages == [
        {"role": "system", "content": "The current time is 2024-05-01 10:00:00."},
        {"role": "user", "content": "Trends?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call(0, "Market Trends API", arguments), call(1, "g", "{}")],
        },
        {"role": "tool", "tool_call_id": "call_0", "name": "Market Trends API", "content": '{"up": 1}'},
        {"role": "tool", "tool_call_id": "call_1", "name": "g", "content": "no"},
        {"role": "assistant", "content": "Up."},
    ]
    parameters = found.tools[0]["function"]["parameters"]
    assert parameters == {
        "type": "object",
        "properties": {"kind": {"type": "number", "description": "k"}, "all": {"type": "boolean"}},
        "required": ["kind"],
    }


def test_sharegpt_roles_and_openai_messages_give_the_same_dialogue() -> None:
    tools = [tool("f", x={"type": "integer"})]
    share = {
        "system": "S",
        "tools": json.dumps([tools[0]["function"]]),
        "conversations": [
            {"from": "human", "value": "Q"},
            {"from": "gpt", "value": "Let me see."},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "A"},
        ],
    }
    openai = {
        "tools": tools,
        "messages": [
            {"role": "developer", "content": "S"},
            {"role": "user", "content": [{"type": "text", "text": "Q"}]},
            {"role": "assistant", "content": "Let me see.", "tool_calls": [call(9, "f", '{"x":1}')]},
            {"role": "tool", "tool_call_id": "call_9", "content": "2"},
            {"role": "assistant", "content": "A"},
        ],
    }
    assert read(share, "dialogues") == read(openai, "dialogues")


def test_results_follow_the_ids_they_name_else_the_order_of_the_calls() -> None:
    both = {"role": "assistant", "content": None, "tool_calls": [call(5, "f", "{}"), call(6, "g", "{}")]}
    named = [both, {"role": "tool", "tool_call_id": "call_6", "content": "G"}, {"role": "tool", "content": "F"}]
    found = conversations.from_list(named, "messages")
    assert [(m["name"], m["tool_call_id"], m["content"]) for m in found[1:]] == [
        ("g", "call_1", "G"),
        ("f", "call_0", "F"),
    ]


def test_alpaca_puts_the_input_after_a_blank_line() -> None:
    row = {"instruction": "Add.", "input": "1, 2", "output": "3"}
    assert read(row, "dialogues").messages[0]["content"] == "Add.\n\n1, 2"
    assert read({**row, "input": ""}, "dialogues").messages[0]["content"] == "Add."


@pytest.mark.parametrize("names", [("question", "answer"), ("prompt", "response")])
def test_question_and_answer_become_two_turns(names: tuple[str, str]) -> None:
    assert read(dict(zip(names, ("Q", "A"), strict=True)), "dialogues").messages == conversations.question("Q", "A")


def test_problem_takes_the_name_most_asserts_call_and_both_forms_of_tests() -> None:
    row = {
        "question": "Sum",
        "tests": ["assert sorted(f([1])) == [1]", {"assert": "assert f([]) == 0", "visible": True}],
    }
    assert read(row, "problems") == Problem(
        id="",
        level=3,
        group="own",
        key="",
        question="Sum",
        entry_point="f",
        signature="",
        tests=[
            {"assert": "assert sorted(f([1])) == [1]", "visible": False},
            {"assert": "assert f([]) == 0", "visible": True},
        ],
    )
    literal = {
        "prompt": "P",
        "entry_point": "f",
        "test_cases": [{"args": [1, "a"], "expected": "'b'"}],
        "response": "def f",
    }
    found = read(literal, "problems")
    assert found.tests == [{"args": "[1, 'a']", "expected": "'b'", "visible": False}] and found.answer == "def f"


def test_pairs_of_strings_of_lists_and_of_whole_conversations_are_the_same_pair() -> None:
    user, good, bad = ({"role": r, "content": c} for r, c in (("user", "Q"), ("assistant", "G"), ("assistant", "B")))
    expected = Pair(id="", source="", kind="chat", prompt=[user], chosen=[good], rejected=[bad])
    assert read({"prompt": "Q", "chosen": "G", "rejected": "B"}, "preferences") == expected
    assert read({"prompt": [user], "chosen": [good], "rejected": [bad]}, "preferences") == expected
    assert read({"prompt": "Q", "chosen": [user, good], "rejected": [user, bad]}, "preferences") == expected
    assert read({"chosen": [user, good], "rejected": [user, bad]}, "preferences") == expected
    transcripts = {"chosen": "\n\nHuman: Q\n\nAssistant: G", "rejected": "\n\nHuman: Q\n\nAssistant: B"}
    assert read(transcripts, "preferences") == expected


def test_transcripts_that_part_before_the_last_turn_keep_their_later_turns() -> None:
    row = {
        "chosen": "\n\nHuman: Q\n\nAssistant: G\n\nHuman: R\n\nAssistant: H",
        "rejected": "\n\nHuman: Q\n\nAssistant: B",
    }
    found = read(row, "preferences")
    assert [m["content"] for m in found.prompt] == ["Q"]
    assert [m["content"] for m in found.chosen] == ["G", "R", "H"] and [m["content"] for m in found.rejected] == ["B"]


@pytest.mark.parametrize(("kind", "row", "field"), BROKEN)
def test_a_broken_row_names_its_field(kind: str, row: dict[str, Any], field: str) -> None:
    with pytest.raises(RowError) as caught:
        read(row, kind)
    assert caught.value.field == field


def test_a_particular_shape_wins_over_a_general_one() -> None:
    assert shape_of(TOOLACE, "dialogues") == "toolace"
    assert shape_of({**TOOLACE, "system": "Be kind."}, "dialogues") == "messages"
    assert shape_of({"query": "x"}, "dialogues") is None


def test_the_shape_that_fits_most_rows_is_taken() -> None:
    rows = [{"instruction": "a", "output": "b"}] * 2 + [{"question": "a", "answer": "b"}] * 3
    shape = shapes.detect(rows, "dialogues", NONE)
    assert shape is not None and shape.name == "question"


def test_a_shape_for_another_kind_leaves_this_kind_to_detection_and_an_unknown_one_is_an_error() -> None:
    assert shapes.named("xlam", "text") is None
    with pytest.raises(RowError, match="xlam"):
        shapes.named("xlm", "dialogues")


FIELDS = """text messages conversations system tools functions query answers chat instruction input output question
answer prompt response completion label kto_tag desirable
tests test_cases entry_point level chosen rejected gold_chosen id kind role content from value
name arguments tool_calls function_call function parameters type properties args expected assert"""
names = st.sampled_from(FIELDS.split())
pieces = st.sampled_from(
    [
        "user",
        "assistant",
        "tool",
        "function_call",
        "[f(a=1)]",
        "[f(",
        '[{"name": "f"}]',
        '{"name": "f"}',
        "assert f(1)",
        "Human: x",
    ]
)
rows = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | pieces | st.text(max_size=6) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=5),
    max_leaves=14,
)


@given(rows, st.sampled_from(shapes.SHAPES))
def test_no_row_raises_anything_but_row_error(row: Any, shape: shapes.Shape) -> None:
    named: list[str] = []
    for columns in (NONE, shapes.Columns(("text", "query"))):
        try:
            record = shapes.convert(shape, row, columns)
        except RowError as error:
            named.append(error.field)
        else:
            assert isinstance(record, Text | Dialogue | Problem | Pair | Label)
    assert all(named)


# --- shapes of TRL and LLaMA-Factory ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Q?", "completion": "A."},
        {"instruction": "Q?", "response": "A."},
        {"input": "Q?", "output": "A."},
        {"prompt": [{"role": "user", "content": "Q?"}], "completion": [{"role": "assistant", "content": "A."}]},
        {"prompt": [{"role": "user", "content": "Q?"}], "completion": "A."},
    ],
)
def test_a_question_has_the_names_of_any_trainer(row: dict[str, Any]) -> None:
    assert read(row, "dialogues").messages == [
        {"role": "user", "content": "Q?"},
        {"role": "assistant", "content": "A."},
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Q?", "completion": "A.", "label": False},
        {"messages": [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": "A."}], "kto_tag": True},
        {"instruction": "Q?", "output": "A.", "kto_tag": False},
    ],
)
def test_a_row_with_a_label_is_no_dialogue_to_learn_from(row: dict[str, Any]) -> None:
    with pytest.raises(RowError, match=r"a row with a label is feedback.*list the file under `labels`"):
        read(row, "dialogues")


ASKED, SAID = {"role": "user", "content": "Q?"}, {"role": "assistant", "content": "A."}
HELPFUL = {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "Q?", "completion": "A.", "label": False}, [ASKED]),
        ({"prompt": [ASKED], "completion": [SAID], "label": False}, [ASKED]),
        ({"prompt": [HELPFUL, ASKED], "completion": [HELPFUL, ASKED, SAID], "label": False}, [HELPFUL, ASKED]),
        ({"prompt": "Q?", "completion": "A.", "label": "False"}, [ASKED]),  # as in CSV
        ({"messages": [ASKED, SAID, ASKED, SAID], "kto_tag": False}, [ASKED, SAID, ASKED]),
        (
            {
                "system": "Be kind.",
                "conversations": [{"from": "human", "value": "Q?"}, {"from": "gpt", "value": "A."}],
                "label": False,
            },
            [HELPFUL, ASKED],
        ),
        ({"instruction": "Q?", "output": "A.", "kto_tag": False}, [ASKED]),
        ({"instruction": "Q?", "input": "2 1", "output": "A.", "kto_tag": False}, [{**ASKED, "content": "Q?\n\n2 1"}]),
        ({"prompt": [ASKED], "answer": [SAID], "desirable": False}, [ASKED]),  # ours
    ],
)
def test_a_label_has_the_form_of_any_trainer(row: dict[str, Any], prompt: list[dict[str, Any]]) -> None:
    assert read(row, "labels") == Label(id="", source="", kind="chat", prompt=prompt, answer=[SAID], desirable=False)


def test_the_answer_that_is_judged_stands_after_the_last_result_of_a_tool() -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [call(0, "f", "{}")]}
    result = {"role": "tool", "tool_call_id": "call_0", "name": "f", "content": "3"}
    found = read({"messages": [ASKED, called, result, SAID], "label": True}, "labels")
    assert (found.prompt[-1]["role"], found.answer, found.desirable) == ("tool", [SAID], True)
    assert read({"messages": [ASKED, called], "label": False}, "labels").answer[0]["tool_calls"]


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "Sort", "input": "2 1", "chosen": "1 2", "rejected": "2 1"},
        {
            "conversations": [{"from": "human", "value": "Sort\n\n2 1"}],
            "chosen": {"from": "gpt", "value": "1 2"},
            "rejected": {"from": "gpt", "value": "2 1"},
        },
        {
            "prompt": [{"role": "user", "content": "Sort\n\n2 1"}],
            "chosen": [{"role": "assistant", "content": "1 2"}],
            "rejected": {"role": "assistant", "content": "2 1"},
        },
    ],
)
def test_a_pair_has_the_form_of_any_trainer(row: dict[str, Any]) -> None:
    found = read(row, "preferences")
    assert found.prompt == [{"role": "user", "content": "Sort\n\n2 1"}]
    assert [found.chosen[0]["content"], found.rejected[0]["content"]] == ["1 2", "2 1"]


def test_a_row_without_a_verdict_or_an_answer_in_a_file_of_labels_names_what_it_lacks() -> None:
    (label,) = (shape for shape in shapes.SHAPES if shape.name == "label")
    for row, field in (
        ({"prompt": "Q?", "completion": "A."}, "label"),
        ({"prompt": "Q?", "label": True}, "completion"),
    ):
        with pytest.raises(RowError) as caught:
            shapes.convert(label, row, NONE)
        assert caught.value.field == field
