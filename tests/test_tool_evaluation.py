"""The rules of BFCL's AST checker, a case per clause, and the measures of tool conversations."""

import itertools
import json
from random import Random
from typing import Any

import pytest

from pipeline.evaluation import bfcl
from pipeline.evaluation.tools import score, summarize
from pipeline.ingest.records import Dialogue
from pipeline.synthetic import toolbox
from pipeline.synthetic.tool_dialogues import Script
from pipeline.synthetic.tools import dialogues, facets, turns, wrong_answers

PLAN = {
    "name": "plan",
    "parameters": {
        "type": "dict",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "price": {"type": "float"},
            "warm": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "steps": {"type": "tuple", "items": {"type": "float"}},
            "place": {"type": "dict"},
            "stops": {"type": "array", "items": {"type": "dict"}},
            "extra": {"type": "any"},
            "note": {"type": ["string", "null"]},
        },
        "required": ["city"],
    },
}
OTHER = {"name": "other", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


def verdict(arguments: dict[str, Any], accepted: dict[str, list[Any]]) -> bfcl.TurnCheck:
    """One call to `plan` against one truth; the city is right unless given."""
    call = {"name": "plan", "arguments": {"city": "Rome", **arguments}}
    return bfcl.check([PLAN, OTHER], [call], [{"plan": {"city": ["Rome"], **accepted}}])


@pytest.mark.parametrize(
    ("arguments", "accepted"),
    [
        ({}, {}),
        ({"city": "new-york"}, {"city": ["New York"]}),  # case, spaces, `-`
        ({"city": "a,b.c/d_e*f^g"}, {"city": ["abcdefg"]}),
        ({"city": "it's"}, {"city": ['it"s']}),  # one kind of quote
        ({"city": "Roma"}, {"city": ["Rome", "Roma"]}),  # any of the accepted
        ({}, {"days": [3, ""]}),  # "" = may be absent
        ({"days": 3}, {"days": [3, ""]}),
        ({"price": 5}, {"price": [5.0]}),  # an int passes for a float
        ({"price": 5.0}, {"price": [5]}),
        ({"warm": True}, {"warm": [True]}),
        ({"tags": ["A b", "c"]}, {"tags": [["ab", "C"]]}),  # strings in lists are standardized
        ({"tags": []}, {"tags": [[]]}),
        ({"steps": [1, 2.5]}, {"steps": [[1.0, 2.5]]}),  # an int passes for a float one level deep
        ({"place": {"a": "X y", "b": 2}}, {"place": [{"a": ["xy"], "b": [1, 2]}]}),
        ({"place": {"a": "x"}}, {"place": [{"a": ["x"], "b": [1, ""]}]}),  # an optional key
        ({"place": {"b": 1}}, {"place": [{"a": ["x"]}, {"b": [1]}]}),  # the second accepted object
        ({"stops": [{"a": 1}, {"a": 2}]}, {"stops": [[{"a": [1]}, {"a": [2]}]]}),
        ({"extra": 4}, {"extra": [4]}),
        ({"extra": "A b"}, {"extra": ["ab"]}),
        ({"extra": ["A b"]}, {"extra": [["ab"]]}),
        ({"days": "tomorrow"}, {"days": ["tomorrow"]}),  # another type, if the truth has it
        ({"note": None}, {"note": [None]}),
        ({"note": "x"}, {"note": ["X", None]}),
    ],
)
def test_a_call_that_the_rules_allow_is_right(arguments: dict[str, Any], accepted: dict[str, list[Any]]) -> None:
    assert verdict(arguments, accepted) == bfcl.RIGHT


@pytest.mark.parametrize(
    ("arguments", "accepted", "error"),
    [
        ({"city": "Roma"}, {}, "value_error:string"),
        ({"colour": "red"}, {}, "unexpected_param"),
        ({"days": 3}, {}, "unexpected_param"),  # in the schema, not in the truth
        ({}, {"days": [3]}, "missing_optional"),
        ({"days": 4}, {"days": [3]}, "value_error:other"),
        ({"days": 3.0}, {"days": [3]}, "wrong_type"),  # a float does not pass for an int
        ({"days": "3"}, {"days": [3]}, "wrong_type"),
        ({"days": True}, {"days": [1]}, "wrong_type"),  # true is not 1
        ({"warm": 1}, {"warm": [True]}, "wrong_type"),
        ({"city": 7}, {}, "wrong_type"),
        ({"days": "Tomorrow"}, {"days": ["tomorrow"]}, "value_error:other"),  # a variable is compared exactly
        ({"tags": ["b", "a"]}, {"tags": [["a", "b"]]}, "value_error:list"),  # lists are compared in order
        ({"tags": "a"}, {"tags": [["a"]]}, "wrong_type"),
        ({"tags": [1]}, {"tags": [["a"]]}, "wrong_type"),  # nested one level
        ({"place": {"a": "x", "c": 1}}, {"place": [{"a": ["x"]}]}, "value_error:dict_key"),
        ({"place": {}}, {"place": [{"a": ["x"]}]}, "value_error:dict_key"),
        ({"place": {"a": "y"}}, {"place": [{"a": ["x"]}]}, "value_error:dict_value"),
        ({"stops": [{"a": 1}]}, {"stops": [[{"a": [1]}, {"a": [2]}]]}, "value_error:list_dict_count"),
        ({"stops": [{"a": 2}, {"a": 1}]}, {"stops": [[{"a": [1]}, {"a": [2]}]]}, "value_error:dict_value"),
        ({"extra": 5}, {"extra": [4]}, "value_error:other"),
        ({"note": None}, {"note": ["x"]}, "value_error:null"),
        ({"place": {"a": "x"}}, {"place": [None]}, "value_error:object"),
    ],
)
def test_a_call_that_breaks_a_rule_is_wrong_and_the_rule_is_named(
    arguments: dict[str, Any], accepted: dict[str, list[Any]], error: str
) -> None:
    found = verdict(arguments, accepted)
    assert (found.valid, found.error) == (False, error), found


def test_names_counts_and_required_parameters_are_checked() -> None:
    right = [{"plan": {"city": ["Rome"]}}]
    assert bfcl.check([PLAN], [], right).error == "wrong_count"
    assert bfcl.check([PLAN], [{"name": "plan", "arguments": {"city": "Rome"}}] * 2, right).error == "wrong_count"
    assert (
        bfcl.check([PLAN, OTHER], [{"name": "other", "arguments": {"city": "Rome"}}], right).error == "wrong_func_name"
    )
    assert bfcl.check([PLAN], [{"name": "plan", "arguments": {}}], right).error == "missing_required"
    assert bfcl.check([PLAN], [{"name": "plan", "arguments": ["Rome"]}], right).error == "wrong_type"
    assert bfcl.check([PLAN], [], []) == bfcl.RIGHT


def test_parallel_calls_have_no_order_and_each_truth_needs_its_own_call() -> None:
    truth = [{"other": {"city": ["Rome"]}}, {"other": {"city": ["Oslo"]}}]
    rome, oslo = ({"name": "other", "arguments": {"city": city}} for city in ("Rome", "Oslo"))
    assert bfcl.check([OTHER], [oslo, rome], truth).valid
    assert bfcl.check([OTHER], [rome, rome], truth).error == "cannot_find_match"


def test_a_greedy_trap_is_right_and_is_counted() -> None:
    """The first truth takes the only call that the second one could take."""
    truth = [{"other": {"city": ["Rome", "Oslo"]}}, {"other": {"city": ["Rome"]}}]
    calls = [{"name": "other", "arguments": {"city": city}} for city in ("Rome", "Oslo")]
    found = bfcl.check([OTHER], calls, truth)
    assert found.valid and not found.greedy and found.greedy_disagrees
    assert not bfcl.check([OTHER], calls[::-1], truth).greedy_disagrees


def test_the_matching_is_as_large_as_trying_all_assignments_finds() -> None:
    rng = Random(0)
    for _ in range(300):
        size = rng.randint(1, 5)
        fits = [[rng.random() < 0.4 for _ in range(size)] for _ in range(size)]
        slow = max(sum(fits[i][j] for i, j in enumerate(order)) for order in itertools.permutations(range(size)))
        assert bfcl.matching(fits) == slow


# measures


def text_of(message: dict[str, Any]) -> str:
    """A message as the text that a model would have written."""
    blocks = [
        "<tool_call>\n"
        + json.dumps({"name": c["function"]["name"], "arguments": json.loads(c["function"]["arguments"])})
        + "\n</tool_call>"
        for c in message.get("tool_calls", [])
    ]
    return "\n".join([message["content"], *blocks]).strip()


@pytest.fixture(scope="module")
def test_set() -> list[Dialogue]:
    return list(dialogues("test", 100, 3))


def test_the_truth_scores_one_everywhere(test_set: list[Dialogue]) -> None:
    items = [(d, turn, text_of(d.messages[turn])) for d in test_set for turn in turns(d)]
    rows, summary = score(items)
    assert all(row["valid"] and not row["error"] for row in rows)
    zeros = {"false_call_rate", "hallucinated_parameter_rate", "greedy_disagreements"}
    assert all(summary[name] == (0.0 if name in zeros else 1.0) for name in summary if name != "n"), summary
    expected = {"ast", "irrelevance", "relevance", "ask_back_rate", "multi_turn", "execution_match", "argument_f1"}
    assert expected <= set(summary) and "ast_unseen_tool_unseen_template" in summary


def test_truth_in_training_scores_one_although_names_are_invented() -> None:
    train = list(dialogues("train", 100, 3))
    _, summary = score([(d, turn, text_of(d.messages[turn])) for d in train for turn in turns(d)])
    assert summary["ast"] == summary["schema_valid"] == summary["argument_f1"] == 1.0


def test_wrong_answers_score_below_one(test_set: list[Dialogue]) -> None:
    items = [
        (d, turn, text_of(dict(wrong_answers(d, 0, turn)).get("wrong_value") or wrong_answers(d, 0, turn)[0][1]))
        for d in test_set
        for turn in turns(d)
    ]
    rows, summary = score(items)
    assert not any(row["valid"] for row in rows if row["category"] != "relevance")
    assert summary["ast"] == summary["irrelevance"] == summary["ask_back_rate"] == summary["multi_turn"] == 0.0
    assert summary["false_call_rate"] == summary["relevance"] == summary["json_valid"] == 1.0
    assert summary["name_accuracy"] > 0.9 and summary["argument_f1"] < 0.7


def test_words_instead_of_calls_are_no_false_calls_and_nothing_else(test_set: list[Dialogue]) -> None:
    _, summary = score([(d, turn, "No.") for d in test_set for turn in turns(d)])
    assert summary["irrelevance"] == 1.0 and summary["false_call_rate"] == 0.0
    assert summary["relevance"] == summary["ast"] == summary["json_valid"] == summary["multi_turn"] == 0.0
    assert summary["ask_back_rate"] == 0.0  # no answer is a question


def test_a_call_that_cannot_be_read_is_no_call(test_set: list[Dialogue]) -> None:
    broken = "<tool_call>\n{oops\n</tool_call>"
    _, summary = score([(d, turn, broken) for d in test_set for turn in turns(d)])
    assert summary["irrelevance"] == 1.0 and summary["json_valid"] == summary["ast"] == 0.0


def hotel() -> Dialogue:
    tool = toolbox.tools()["book_hotel"]
    script = Script([tool, toolbox.tools()["get_wind"]])
    script.user("Book a hotel in Rome for 4 nights.")
    script.call([(tool, {"city": "Rome", "nights": 4})])
    return script.close("x", "multiple/unseen_tool/seen_template")


def reply(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_the_shares_are_what_hand_counting_gives() -> None:
    items = [
        (hotel(), 1, reply("book_hotel", city="Rome", nights=4)),
        (
            hotel(),
            1,
            reply("book_hotel", city="Rome", nights=5, stars=3),
        ),  # 1 of 2 values right; the default does not count
        (hotel(), 1, reply("book_hotel", city="Rome", mood="x", nights=4)),  # 1 of 3 parameters unknown
        (hotel(), 1, reply("get_wind", city="Rome")),
    ]
    rows, summary = score(items)
    assert [row["valid"] for row in rows] == [True, False, False, False]
    assert summary["name_accuracy"] == 0.75
    assert summary["schema_valid"] == 0.75
    assert summary["execution_match"] == 0.25
    # wanted 2 each = 8; given 2 + 2 + 3 + 1 = 8; right 2 + 1 + 2 + 0 = 5
    assert summary["argument_f1"] == pytest.approx(2 * 5 / 16)
    assert summary["hallucinated_parameter_rate"] == pytest.approx(1 / 9)
    assert summary["ast"] == summary["ast_multiple"] == 0.25 and "ast_simple" not in summary


def test_ast_is_the_unweighted_mean_of_its_categories() -> None:
    simple = Dialogue(id="y", kind="tools", category="simple", messages=hotel().messages, tools=hotel().tools)
    right, wrong = reply("book_hotel", city="Rome", nights=4), reply("book_hotel", city="Oslo", nights=4)
    _, summary = score([(hotel(), 1, right), (simple, 1, right), (simple, 1, wrong), (simple, 1, wrong)])
    assert summary["ast"] == pytest.approx((1 + 1 / 3) / 2)


def test_parallel_calls_in_another_order_leave_an_equal_world() -> None:
    tool = toolbox.tools()["order_product"]
    script = Script([tool])
    script.user("Order P1 and P2.")
    script.call([(tool, {"product_id": "P1"}), (tool, {"product_id": "P2"})])
    dialogue = script.close("x", "parallel")
    swapped = reply("order_product", product_id="P2") + "\n" + reply("order_product", product_id="P1")
    ((row,), summary) = score([(dialogue, 1, swapped)])
    assert row["valid"] and row["execution_match"] and summary["ast_parallel"] == 1.0


def test_multi_turn_needs_every_turn_and_is_judged_by_the_final_world(test_set: list[Dialogue]) -> None:
    dialogue = next(d for d in test_set if facets(d).category == "missing")
    first, second = turns(dialogue)
    ask, call = (text_of(dialogue.messages[turn]) for turn in (first, second))
    assert score([(dialogue, first, ask), (dialogue, second, call)])[1]["multi_turn"] == 1.0
    assert score([(dialogue, second, call), (dialogue, first, ask)])[1]["multi_turn"] == 1.0  # any order of items
    assert score([(dialogue, first, "No idea."), (dialogue, second, call)])[1]["multi_turn"] == 0.0
    assert score([(dialogue, first, ask), (dialogue, second, "Done.")])[1]["multi_turn"] == 0.0
    assert "multi_turn" not in score([(dialogue, second, call)])[1]


def test_a_summary_of_all_rows_is_the_summary(test_set: list[Dialogue]) -> None:
    rows, summary = score([(d, turn, "Which one?") for d in test_set for turn in turns(d)])
    assert summarize(rows) == summary
    assert summary["ask_back_rate"] == 1.0
    assert summarize([]) == {"greedy_disagreements": 0.0, "n": 0.0}
