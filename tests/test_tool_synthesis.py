"""The toolbox, the tool conversations, their truth, and the scored wrong answers."""

import json
import os
import subprocess
import sys
from collections import Counter
from random import Random

import pytest

from pipeline.ingest.records import Dialogue
from pipeline.synthetic import toolbox
from pipeline.synthetic.tool_dialogues import LENGTH, Script, provenance
from pipeline.synthetic.tool_schemas import ToolSpec, ToolWorld, arguments_in, draw, function, leaf_values, problems
from pipeline.synthetic.toolbox import run, unseen
from pipeline.synthetic.tools import (
    NO_CALL_FIRST,
    QUOTAS,
    calls,
    canonical,
    dialogues,
    facets,
    gold,
    tools_at,
    truth,
    turns,
    wrong_answers,
)
from pipeline.synthetic.wording import sentences, words

TRAIN, VAL, TEST = 500, 100, 200


@pytest.fixture(scope="module")
def train() -> list[Dialogue]:
    return list(dialogues("train", TRAIN, 0))


@pytest.fixture(scope="module")
def val() -> list[Dialogue]:
    return list(dialogues("val", VAL, 0))


@pytest.fixture(scope="module")
def test_set() -> list[Dialogue]:
    return list(dialogues("test", TEST, 0))


@pytest.fixture(scope="module")
def everything(train: list[Dialogue], val: list[Dialogue], test_set: list[Dialogue]) -> list[Dialogue]:
    return train + val + test_set


# the conversations


def test_quotas_are_exact_in_every_hundred(train: list[Dialogue]) -> None:
    for start in range(0, TRAIN, 100):
        assert Counter(facets(d).category for d in train[start : start + 100]) == QUOTAS


def test_a_conversation_depends_on_split_seed_and_number_alone(train: list[Dialogue]) -> None:
    assert list(dialogues("train", 130, 0)) == train[:130]
    assert list(dialogues("train", 20, 1)) != train[:20]


@pytest.mark.slow
@pytest.mark.full
def test_the_hash_seed_changes_nothing() -> None:
    code = (
        "import hashlib; from pipeline.ingest.records import dumps; from pipeline.synthetic.tools import dialogues;"
        "lines = ''.join(dumps(d) for s in ('train', 'test') for d in dialogues(s, 40, 7));"
        "print(hashlib.sha256(lines.encode()).hexdigest())"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1] and len(found[0]) == 65


def test_an_unknown_split_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="train, val, test; found 'dev'"):
        next(dialogues("dev", 1, 0))


def test_every_call_fits_its_schema_and_every_value_has_a_source(everything: list[Dialogue]) -> None:
    for dialogue in everything:
        said, results = "", []
        for turn, message in enumerate(dialogue.messages):
            if message["role"] == "user":
                said += message["content"] + "\n"
            if message["role"] == "tool":
                results += leaf_values(json.loads(message["content"]))
            schemas = {t["function"]["name"]: t["function"]["parameters"] for t in tools_at(dialogue, turn)}
            for name, arguments in calls(message):
                assert not problems(schemas[name], arguments)
                for key, value in arguments.items():
                    default = schemas[name]["properties"][key].get("default", object())
                    for leaf in leaf_values(value):
                        assert provenance(leaf, said, results, default), (dialogue.id, name, key, leaf)


def test_results_on_record_are_what_the_tools_give(val: list[Dialogue], test_set: list[Dialogue]) -> None:
    num_results = 0
    for dialogue in val + test_set:
        world, waiting = ToolWorld(), []
        for message in dialogue.messages:
            waiting += [run(world, *call) for call in calls(message)]
            if message["role"] == "tool":
                assert json.loads(message["content"]) == waiting.pop(0)
                num_results += 1
    assert num_results > 60


def test_nothing_held_out_is_in_train_or_val(train: list[Dialogue], val: list[Dialogue]) -> None:
    names = {tool.name for tool in unseen()}
    descriptions = {tool.description for tool in unseen()}
    stems = [wording.split("{")[0] for tool in unseen() for wording in tool.wordings if wording[0] != "{"]
    frames = [frame.split("{}")[0] for frame in sentences("frames")[32:]]
    for dialogue in train + val:
        offered = tools_at(dialogue, len(dialogue.messages))
        assert not names & {tool["function"]["name"] for tool in offered}
        assert not descriptions & {tool["function"]["description"] for tool in offered}
        opening = dialogue.messages[0]["content"]
        assert not any(frame.lower() in opening.lower() for frame in frames)
        assert not any(len(stem) > 20 and stem in opening for stem in stems)


def test_the_splits_share_no_request(everything: list[Dialogue]) -> None:
    openings: dict[str, set[str]] = {"train": set(), "val": set(), "test": set()}
    for dialogue in everything:
        said = [m["content"] for m in dialogue.messages if m["role"] == "user"]
        asked = (text for text in said if text == said[0] or (len(text) > 40 and "<tools>" not in text))
        openings[dialogue.id.split("/")[1]].update(asked)
    assert not openings["train"] & openings["val"]
    assert not openings["train"] & openings["test"]
    assert not openings["val"] & openings["test"]


def test_the_four_quadrants_of_the_test_split_are_balanced_and_rightly_named(test_set: list[Dialogue]) -> None:
    for category in ("simple", "multiple", "irrelevance"):
        places = Counter(facets(d)[1:] for d in test_set if facets(d).category == category)
        assert len(places) == 4 and max(places.values()) - min(places.values()) <= 1
    held_out = {tool.name for tool in unseen()}
    for dialogue in test_set:
        called = {name for message in dialogue.messages for name, _ in calls(message)}
        assert facets(dialogue).unseen_tool == bool(called & held_out) or not called
        if facets(dialogue).category == "irrelevance" and facets(dialogue).unseen_tool:
            assert {tool["function"]["name"] for tool in dialogue.tools} & held_out


def test_the_categories_are_what_they_are_called(everything: list[Dialogue]) -> None:
    for dialogue in everything:
        category = facets(dialogue).category
        first = calls(dialogue.messages[turns(dialogue)[0]])
        assert bool(first) == (category not in NO_CALL_FIRST)
        scored = 2 if category in ("missing", "later", "dependent", "repair") else 1
        assert len(turns(dialogue)) >= scored
        assert len(turns(dialogue)) == scored or dialogue.id.startswith("tools/train/")
        if category == "simple":
            assert len(dialogue.tools) == 1 and len(first) == 1
        if category == "multiple":
            assert 2 <= len(dialogue.tools) <= 6 and len(first) == 1
        if category == "parallel":
            assert len(first) >= 2 and len({name for name, _ in first}) == 1
            assert len({canonical(arguments) for _, arguments in first}) == len(first)
        if category == "parallel_multiple":
            assert len({name for name, _ in first}) == len(first) >= 2
        if category == "later":
            assert len(tools_at(dialogue, turns(dialogue)[1])) == len(dialogue.tools) + 1
        if category == "repair":
            assert '"error"' in dialogue.messages[2]["content"]


def test_a_dependent_call_uses_a_value_of_the_first_result_that_the_user_never_said(train: list[Dialogue]) -> None:
    found = [d for d in train if facets(d).category == "dependent"]
    unsaid = 0
    for dialogue in found:
        results = [canonical(leaf) for leaf in leaf_values(json.loads(dialogue.messages[2]["content"]))]
        ((_, arguments),) = calls(dialogue.messages[turns(dialogue)[1]])
        linked = [leaf for leaf in leaf_values(arguments) if canonical(leaf) in results]
        assert linked
        unsaid += any(str(leaf) not in dialogue.messages[0]["content"] for leaf in linked)
    assert unsaid > 0.8 * len(found)


def test_every_chain_fits_its_two_tools() -> None:
    for chain in toolbox.chains():
        first, second = toolbox.tools()[chain.first], toolbox.tools()[chain.second]
        result = run(ToolWorld(), chain.first, arguments_in(first, first.wordings[0], draw(first, Random(0))))
        assert chain.key in result
        for tail in chain.tails:
            arguments = {**arguments_in(second, tail, draw(second, Random(0))), chain.param: result[chain.key]}
            assert not problems(function(second)["function"]["parameters"], arguments)


def test_training_requests_and_names_are_various(train: list[Dialogue]) -> None:
    openings = {dialogue.messages[0]["content"] for dialogue in train}
    names = {tool["function"]["name"] for dialogue in train for tool in dialogue.tools}
    assert len(openings) > 0.98 * TRAIN
    assert len(names) > 400
    assert any(
        any(name in d.messages[0]["content"] for name in words("first_names") if not name.isascii()) for d in train
    )


def test_training_conversations_go_on_until_they_are_long(train: list[Dialogue], val: list[Dialogue]) -> None:
    added = refused = 0
    for dialogue in train:
        messages = dialogue.messages
        last = max(n for n, message in enumerate(messages) if message["role"] == "user")
        size = len(json.dumps(dialogue.tools)) + sum(len(json.dumps(message)) for message in messages)
        assert size >= LENGTH, dialogue.id
        requests = [m for m in messages if m["role"] == "user"]
        if len(requests) < 3:  # with a question or a late tool there are two anyway
            continue
        added += 1
        answer = messages[last + 1]
        refused += not calls(answer)
        assert calls(answer) or answer["content"] in sentences("refusals")
        before = len(json.dumps([t["function"] for t in dialogue.tools]))
        before += sum(len(json.dumps(m)) for m in messages[:last])
        assert before < LENGTH + 400  # 400, since results and closing words come after the size check
    assert added > 0.3 * TRAIN and 0.1 < refused / added < 0.5
    assert all(sum(m["role"] == "user" for m in d.messages) <= 2 for d in val)


def test_simple_conversations_are_short(val: list[Dialogue]) -> None:
    sizes = [
        len(json.dumps(d.tools)) + sum(len(m["content"]) for m in d.messages)
        for d in val
        if facets(d).category == "simple"
    ]
    assert sum(sizes) / len(sizes) < 500


# checks that refuse


def _script(said: str) -> tuple[Script, ToolSpec]:
    tool = toolbox.tools()["set_light"]
    script = Script([tool])
    script.user(said)
    return script, tool


def test_a_value_from_nowhere_is_refused() -> None:
    script, tool = _script("Set the light in the hall.")
    with pytest.raises(AssertionError):
        script.call([(tool, {"room": "hall", "brightness": 7})])


def test_a_number_inside_another_number_is_no_source() -> None:
    assert provenance(7, "set it to 70", [], None) is None
    assert provenance(7, "set it to 0.7", [], None) is None
    assert provenance(7, "set it to 7.", [], None) == "user"
    assert provenance("P12", "order it", ["P12"], None) == "result"
    assert provenance(True, "order it", [1], None) is None
    assert provenance("", "order it", [], "") == "default"


def test_arguments_that_break_the_schema_are_refused() -> None:
    script, tool = _script("Set the light in the hall to 7.")
    with pytest.raises(AssertionError):
        script.call([(tool, {"room": "hall", "brightness": "7"})])


# truth, gold, wrong answers


def _example() -> Dialogue:
    tool = toolbox.tools()["book_hotel"]
    script = Script([tool, toolbox.tools()["get_wind"]])
    script.user("Book a hotel in Rome for 4 nights.")
    script.call([(tool, {"city": "Rome", "nights": 4})])
    return script.close("x", "multiple/unseen_tool/seen_template")


def _answer(*made: tuple[str, object]) -> dict:
    tool_calls = [{"function": {"name": name, "arguments": json.dumps(arguments)}} for name, arguments in made]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def test_truth_accepts_absence_and_the_default_of_an_optional_parameter() -> None:
    assert truth(_example(), 1) == [{"book_hotel": {"city": ["Rome"], "nights": [4], "stars": [3, ""]}}]


def test_truth_of_a_nested_object_and_of_a_list_of_objects_has_lists_at_the_leaves() -> None:
    tool = toolbox.tools()["book_taxi"]
    script = Script([tool])
    script.user("Book a taxi to Weber Street 12 at 10:30.")
    script.call([(tool, {"address": {"street": "Weber Street", "number": 12}, "time": "10:30"})])
    address = {"street": ["Weber Street"], "number": [12]}
    assert truth(script.close("x", "simple"), 1) == [{"book_taxi": {"address": [address], "time": ["10:30"]}}]
    tool = toolbox.tools()["order_items"]
    script = Script([tool])
    script.user("Order 2 of P17.")
    script.call([(tool, {"items": [{"product_id": "P17", "quantity": 2}]})])
    items = [[{"product_id": ["P17"], "quantity": [2]}]]
    assert truth(script.close("x", "simple"), 1) == [{"order_items": {"items": items}}]


def test_truth_of_another_role_is_refused() -> None:
    with pytest.raises(ValueError, match="from the user"):
        truth(_example(), 0)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (_answer(("book_hotel", {"city": "Rome", "nights": 4})), 1.0),
        (_answer(("book_hotel", {"city": "Rome", "nights": 4.0})), 1.0),
        (_answer(("book_hotel", {"city": "Rome", "nights": 4, "stars": 3})), 1.0),
        (_answer(("book_hotel", {"city": "Paris", "nights": 4})), 0.8),
        (_answer(("book_hotel", {"city": "Rome"})), 0.2 + 0.2 + 0.2),
        (_answer(("book_hotel", {"city": "Rome", "nights": "4"})), 0.2 + 0.2 + 0.2),
        (_answer(("book_hotel", {"city": "Rome", "nights": 4, "mood": "x"})), 0.2 + 0.2 + 0.4 * 2 / 3),
        (_answer(("get_wind", {"city": "Rome"})), 0.4),
        (_answer(("book_hotel", {"city": "Rome", "nights": 4}), ("get_wind", {"city": "Rome"})), 0.4 + 0.3),
        ({"role": "assistant", "content": "No."}, 0.0),
        ({"tool_calls": [{"function": {"name": "book_hotel", "arguments": "{oops"}}]}, 0.2),
    ],
)
def test_gold_is_what_its_formula_gives_by_hand(message: dict, expected: float) -> None:
    assert gold(_example(), message) == pytest.approx(expected)


def test_gold_of_a_turn_without_calls_is_one_or_zero(train: list[Dialogue]) -> None:
    dialogue = next(d for d in train if facets(d).category == "irrelevance")
    assert gold(dialogue, {"role": "assistant", "content": "I have no tool for that."}) == 1.0
    assert gold(dialogue, {"role": "assistant", "content": " "}) == 0.0
    assert gold(dialogue, {"role": "assistant", "content": "<tool_call>\n{"}) == 0.0
    assert gold(dialogue, _answer(("x", {}))) == 0.0


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_the_right_answer_has_gold_one_and_every_wrong_one_less_in_every_turn(
    everything: list[Dialogue], step: int
) -> None:
    kinds: Counter[str] = Counter()
    for dialogue in everything[::step]:
        for turn in turns(dialogue):
            assert gold(dialogue, dialogue.messages[turn], turn) == pytest.approx(1.0)
            wrong = wrong_answers(dialogue, 5, turn)
            assert wrong
            for kind, message in wrong:
                assert 0.0 <= gold(dialogue, message, turn) <= 0.901, (dialogue.id, kind)
            kinds.update(kind for kind, _ in wrong)
    assert set(kinds) == {"wrong_tool", "wrong_type", "wrong_value", "missing", "invented", "refusal", "needless_call"}


def test_wrong_answers_depend_on_their_seed_alone() -> None:
    assert wrong_answers(_example(), 1) == wrong_answers(_example(), 1)
    assert any(wrong_answers(_example(), 1) != wrong_answers(_example(), seed) for seed in range(2, 5))
