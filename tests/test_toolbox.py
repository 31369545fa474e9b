"""The tools: schemas, wordings, results worked out by hand, and the tools invented for training."""

import json
import re
from collections import Counter
from random import Random

import jsonschema
import pytest

from pipeline.synthetic.tool_schemas import (
    ToolWorld,
    arguments_in,
    draw,
    execute,
    fill,
    function,
    invent,
    problems,
    renamed,
    sibling,
)
from pipeline.synthetic.toolbox import HELD_OUT_DOMAINS, run, tools, unseen
from pipeline.synthetic.wording import misspelt, words


def test_there_are_12_domains_of_four_tools_or_more_and_three_domains_are_held_out() -> None:
    domains = Counter(tool.domain for tool in tools().values())
    assert len(domains) >= 12 and min(domains.values()) >= 4
    assert len(set(HELD_OUT_DOMAINS)) == 3 and set(HELD_OUT_DOMAINS) <= set(domains)
    assert len(unseen()) == sum(domains[name] for name in HELD_OUT_DOMAINS)


def test_the_schemas_are_valid_and_use_every_feature_that_the_specification_names() -> None:
    text = ""
    for tool in tools().values():
        parameters = function(tool)["function"]["parameters"]
        jsonschema.Draft202012Validator.check_schema(parameters)
        text += json.dumps(parameters)
    for feature in ('"default"', '"enum"', '"array"', '"null"', '"integer"', '"number"', '"boolean"', '"object"'):
        assert text.count(feature) > (len(tools()) if feature == '"object"' else 0), feature


def test_every_wording_states_all_that_is_required_executes_and_has_closing_words() -> None:
    rng = Random(0)
    for tool in tools().values():
        required = {name for name, parameter in tool.params.items() if "default" not in parameter.schema}
        assert len(tool.wordings) == len(set(tool.wordings)) == 5
        for wording in tool.wordings:
            arguments = arguments_in(tool, wording, draw(tool, rng))
            assert required <= set(arguments), (tool.name, wording)
            result = run(ToolWorld(), tool.name, arguments)
            assert "error" not in result, (tool.name, arguments, result)
            assert tool.answer.format_map({**arguments, **result})
            assert "{" not in fill(tool, wording, arguments, rng)


def test_a_wording_for_asking_back_leaves_out_its_parameter_and_no_other_required_one() -> None:
    for tool in tools().values():
        assert tool.missing, tool.name
        required = {name for name, parameter in tool.params.items() if "default" not in parameter.schema}
        for name, wording in tool.missing:
            values = draw(tool, Random(1))
            assert required - set(arguments_in(tool, wording, values)) == {name}, (tool.name, wording)


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("power", {"base": 2, "exponent": 5}, {"result": 32}),
        ("percentage", {"percent": 15, "value": 80}, {"result": 12}),
        ("mean", {"numbers": [1, 2, 6]}, {"mean": 3}),
        ("convert_length", {"value": 2.5, "from_unit": "km", "to_unit": "m"}, {"result": 2500}),
        ("count_words", {"text": "a b  c"}, {"words": 3}),
        ("reverse_text", {"text": "Zoë"}, {"text": "ëoZ"}),
        ("replace_word", {"text": "cat catalog cat", "old": "cat", "new": "dog"}, {"text": "dog catalog dog"}),
        ("repeat_text", {"text": "ab", "times": 3, "separator": "-"}, {"text": "ab-ab-ab"}),
        ("add_days", {"date": "2024-02-28", "days": 2}, {"date": "2024-03-01"}),
        ("days_between", {"start": "2024-02-28", "end": "2024-03-01"}, {"days": 2}),
        ("get_weekday", {"date": "2024-02-29"}, {"weekday": "Thursday"}),
        ("add_minutes", {"time": "23:50", "minutes": 15}, {"time": "00:05"}),
        ("convert_currency", {"amount": 10, "from_currency": "USD", "to_currency": "EUR"}, {"result": 9}),
    ],
)
def test_a_tool_without_state_gives_the_result_worked_out_by_hand(name: str, arguments: dict, result: dict) -> None:
    assert run(ToolWorld(), name, arguments) == result


def test_worlds_are_equal_exactly_when_the_same_was_done() -> None:
    one, two = ToolWorld(), ToolWorld()
    run(one, "set_light", {"room": "hall", "brightness": 40})
    assert one != two
    run(two, "set_light", {"room": "hall", "brightness": 40})
    assert one == two


def test_money_that_was_transferred_is_on_the_other_account() -> None:
    world = ToolWorld()
    before = [run(world, "get_balance", {"account": account})["balance"] for account in ("A1", "B2")]
    run(world, "transfer_money", {"from_account": "A1", "to_account": "B2", "amount": 40})
    after = [run(world, "get_balance", {"account": account})["balance"] for account in ("A1", "B2")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [-40, 40]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("no_such_tool", {}),
        ("power", {"base": "2", "exponent": 5}),
        ("power", {"base": 2}),
        ("power", {"base": 2, "exponent": 5, "mood": "good"}),
        ("power", {"base": 0, "exponent": -1}),
        ("power", {"base": 1e300, "exponent": 9}),
        ("mean", {"numbers": []}),
        ("add_minutes", {"time": "soon", "minutes": 3}),
        ("add_days", {"date": "2024-13-01", "days": 3}),
        ("add_days", {"date": "2024-12-01", "days": 10**15}),
        ("get_weather", {"city": "Atlantis"}),
        ("set_light", {"room": "", "brightness": 1}),
        ("find_phone", {"name": "Anna"}),
        ("reverse_text", None),
        ("track_order", {"order_id": "\ud800"}),
    ],
)
def test_whatever_a_model_writes_comes_back_as_an_error_and_raises_nothing(name: str, arguments: object) -> None:
    assert "error" in run(ToolWorld(), name, arguments)


def test_a_misspelt_name_differs_and_the_error_names_one_that_works() -> None:
    rng = Random(0)
    for city in words("cities")[::4]:
        wrong = misspelt(city, rng)
        assert wrong != city
        result = run(ToolWorld(), "get_wind", {"city": wrong})
        near = re.search(r'did you mean "(.*)"\?', result["error"])
        assert near is not None and "speed" in run(ToolWorld(), "get_wind", {"city": near[1]})


# invented tools


def test_an_invented_tool_has_a_valid_schema_and_executes_what_its_wordings_state() -> None:
    rng = Random(3)
    for _ in range(60):
        tool = invent(rng)
        for version in (tool, renamed(tool, rng), sibling(tool, rng)):
            parameters = function(version)["function"]["parameters"]
            jsonschema.Draft202012Validator.check_schema(parameters)
            arguments = arguments_in(version, version.wordings[0], draw(version, rng))
            assert not problems(parameters, arguments)
            world = ToolWorld()
            assert execute(version, world, arguments)
            assert len(world.ledger) == 1


def test_a_renamed_tool_does_what_the_tool_of_the_old_names_does() -> None:
    rng = Random(4)
    for tool in tools().values():
        new = renamed(tool, rng)
        values = draw(tool, rng)
        old_world, new_world = ToolWorld(), ToolWorld()
        arguments = {after: values[before] for after, before in new.old_names.items()}
        assert execute(new, new_world, arguments) == execute(tool, old_world, values)
        assert new_world == old_world
