"""Practice in choosing: every call fits an offered tool, requests say what is called, nothing held out occurs."""

import json
from collections import Counter

import pytest

from pipeline.synthetic import tools
from pipeline.synthetic.tool_schemas import leaf_values, problems
from pipeline.synthetic.toolbox import seen, unseen
from pipeline.synthetic.tools import LENGTH, SCHEMA, belongs, calls
from pipeline.synthetic.wording import sentences

TALKS = [tools.choice_dialogue("train", 3, number) for number in range(300)]


def test_a_number_decides() -> None:
    assert [tools.choice_dialogue("train", 3, number) for number in range(20)] == TALKS[:20]
    assert tools.choice_dialogue("val", 3, 0).messages != TALKS[0].messages
    assert {talk.kind for talk in TALKS} == {"choice"}
    assert all(int(talk.category) == len(talk.tools) for talk in TALKS)
    assert {talk.category for talk in TALKS} == {"2", "3", "4"}


def test_every_call_fits_its_schema_and_says_what_was_asked() -> None:
    for talk in TALKS:
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in talk.tools}
        assert len(schemas) == len(talk.tools)
        asked = ""
        for message in talk.messages:
            asked = message["content"] if message["role"] == "user" else asked
            for name, arguments in calls(message):
                assert not problems(schemas[name], arguments)
                for leaf in leaf_values(arguments):
                    assert (str(leaf).lower() if isinstance(leaf, bool) else str(leaf)) in asked, (talk.id, leaf, asked)


def test_choices_are_many_and_their_kinds_have_their_shares() -> None:
    forms: Counter[str] = Counter()
    for talk in TALKS:
        sizes = [len(json.dumps(tool["function"])) for tool in talk.tools]
        assert max(sizes) <= SCHEMA and sum(sizes) + sum(len(json.dumps(m)) for m in talk.messages) > LENGTH
        for message in talk.messages:
            made = calls(message)
            if made:
                names = {name for name, _ in made}
                forms["one" if len(made) == 1 else "several" if len(names) == 1 else "together"] += 1
            elif message["role"] == "assistant" and message["content"] in sentences("refusals"):
                forms["refused"] += 1
    total = forms.total()
    assert total > 3 * len(TALKS)
    assert forms["one"] / total == pytest.approx(0.45, abs=0.06)
    assert forms["together"] / total == pytest.approx(0.3, abs=0.06)
    assert forms["several"] / total == pytest.approx(0.15, abs=0.06)
    assert forms["refused"] / total == pytest.approx(0.1, abs=0.04)


def test_most_tools_are_invented_and_none_is_held_out() -> None:
    names = [tool["function"]["name"] for talk in TALKS for tool in talk.tools]
    assert not {tool.name for tool in unseen()} & set(names)
    known = {tool.name for tool in seen()}
    assert 0.02 < sum(name in known for name in names) / len(names) < 0.15


def test_no_opening_request_of_another_split_occurs() -> None:
    for talk in TALKS:
        assert all(belongs(m["content"], "train") for m in talk.messages if m["role"] == "user")
