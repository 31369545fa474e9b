"""Whatever the weights, a constrained answer is complete and valid within its budget, or refused if even the
shortest does not fit.
"""

import ipaddress
import json
import re
import threading
from typing import Any

import jsonschema
import pytest
import torch

from pipeline.generation import constrain
from pipeline.generation import grammars as generation_grammars
from pipeline.generation.constrain import Grammars, reply
from pipeline.generation.grammars import ANY_OBJECT
from pipeline.generation.schemas import SchemaError
from pipeline.text import chat
from pipeline.text.chat import CALL, CALL_END
from pipeline.text.tokenizer import Tokenizer
from tests.schemas import EXAMPLES, ROWS, answer

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "kelvin"]}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "nowhere"}},
]


@pytest.fixture(scope="module")
def grammars(byte_tokenizer: Tokenizer) -> Grammars:
    return Grammars(byte_tokenizer, ROWS)


def tool(parameters: dict[str, Any], name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def spelled(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of the ids, control tokens included; fails if it is not UTF-8."""
    return b"".join(tokenizer._literal[id_] for id_ in ids).decode("utf-8", errors="strict")


def judge(name: str, instance: Any) -> None:
    """Check that the instance is valid for the example, formats included."""
    jsonschema.Draft202012Validator(EXAMPLES[name].schema).validate(instance)
    if name == "formats":
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", instance["day"]) and ipaddress.IPv4Address(instance["host"])


def forced(grammars: Grammars, number: int, budget: int, name: str) -> bool:
    """Generate one call and one document of an example, and return whether both fitted. Each must be complete and
    valid, or refused with the number of tokens needed.
    """
    call = grammars.tool_calls([tool(EXAMPLES[name].schema)], choice="required", parallel=number % 2 == 0)
    document = grammars.json_schema(EXAMPLES[name].schema)
    fitted = 0
    for grammar in (call, document):
        if len(grammar.plan) > budget:
            with pytest.raises(SchemaError, match=f"{len(grammar.plan)} tokens, but the budget is {budget}") as error:
                grammar.constraint(budget)
            assert error.value.code == "budget_too_small"
            continue
        fitted += 1
        said = answer(grammar, budget, seed=number)
        text = spelled(grammars.tokenizer, said.ids)
        assert len(said.ids) <= budget
        if grammar is document:
            judge(name, json.loads(text))
            continue
        found = chat.parse(text)
        assert found.error is None and found.content == "" and found == reply(grammars.tokenizer, said.ids)
        assert found.tool_calls and (number % 2 == 0 or len(found.tool_calls) == 1)
        for one in found.tool_calls:
            assert one["name"] == "f"
            judge(name, one["arguments"])
    return fitted == 2


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_forced_answer_is_complete_and_valid_or_refused(grammars: Grammars, name: str) -> None:
    """Calls and documents, with budgets that are too small, that just suffice and that leave room."""
    shortest = len(grammars.tool_calls([tool(EXAMPLES[name].schema)], choice="required").plan)
    fitted = [forced(grammars, n, budget, name) for n, budget in enumerate((8, shortest, shortest + 2, shortest + 60))]
    assert fitted[1:] == [True] * 3


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_thousand_forced_calls(grammars: Grammars, name: str) -> None:
    """50 budgets from 8 to 256 for each of the 20 schemas, each for a call and a document."""
    fitted = [forced(grammars, number, 8 + number * 248 // 49, name) for number in range(50)]
    assert any(fitted) and (len(grammars.tool_calls([tool(EXAMPLES[name].schema)]).plan) < 9 or not fitted[0])


def test_the_form_is_the_one_that_is_trained(grammars: Grammars, byte_tokenizer: Tokenizer) -> None:
    """Every token of a rendered turn with two calls is allowed in its place, and so is the end after it."""
    calls = [
        {"name": "weather", "arguments": {"city": 'Köln "<tool_call>"\n', "unit": "kelvin"}},
        {"name": "now", "arguments": {}},
    ]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    rendered = chat.render(byte_tokenizer, messages, TOOLS)
    ids = [id_ for id_, trained in zip(rendered.ids, rendered.trained, strict=True) if trained]
    for choice in ("auto", "required"):
        constraint = grammars.tool_calls(TOOLS, choice=choice).constraint(500)
        for place, id_ in enumerate(ids):
            assert constraint.allowed(500 - place)[id_]
            assert constraint.take(id_, 500 - place) == id_
    assert ids[-1] == byte_tokenizer.turn_end


def test_a_required_call_opens_at_once_and_one_call_is_one(grammars: Grammars, byte_tokenizer: Tokenizer) -> None:
    ends = [byte_tokenizer.end_of_text, byte_tokenizer.turn_end]
    for parallel in (False, True):
        grammar = grammars.tool_calls(TOOLS, choice="now", parallel=parallel)
        constraint = grammar.constraint(200)
        assert constraint.allowed(200).nonzero().flatten().tolist() == [byte_tokenizer.tool_call]
        for id_ in grammar.plan:
            assert not constraint.complete and not constraint.allowed(200)[ends].any()
            assert constraint.take(id_, 200) == id_
        assert constraint.complete
        line_feed = [byte_tokenizer.byte_ids[10]] if parallel else []
        assert sorted(constraint.allowed(200).nonzero().flatten().tolist()) == sorted(ends + line_feed)


def test_another_call_begins_only_where_it_fits(grammars: Grammars, byte_tokenizer: Tokenizer) -> None:
    grammar = grammars.tool_calls(TOOLS, choice="now")
    line_feed = byte_tokenizer.byte_ids[10]
    for remaining, said in ((1 + len(grammar.plan), line_feed), (len(grammar.plan), byte_tokenizer.turn_end)):
        constraint = grammar.constraint(200)
        for id_ in grammar.plan:
            constraint.take(id_, 200)
        assert constraint.take(line_feed, remaining) == said


def test_auto_says_text_until_the_tag_which_opens_only_where_a_call_fits(
    grammars: Grammars, byte_tokenizer: Tokenizer
) -> None:
    grammar = grammars.tool_calls(TOOLS, choice="auto", parallel=False)
    need = len(grammar.plan)
    constraint = grammar.constraint(1)  # no call is required, so no budget is too small
    controls = set(byte_tokenizer.control_ids.values())
    ends = {byte_tokenizer.end_of_text, byte_tokenizer.turn_end}
    for remaining, tag in ((need - 1, set[int]()), (need, {byte_tokenizer.tool_call})):
        allowed = set(constraint.allowed(remaining).nonzero().flatten().tolist())
        assert allowed == set(range(byte_tokenizer.vocab_size)) - controls | ends | tag
    for id_ in byte_tokenizer.encode("Let me see: <tool_call>\n"):
        assert constraint.take(id_, need) == id_ and constraint.complete
    assert constraint.take(byte_tokenizer.tool_call, need) == byte_tokenizer.tool_call and not constraint.complete
    said = [byte_tokenizer.tool_call]
    while not constraint.complete:  # from here on only the plan fits, whatever is sampled
        said.append(constraint.take(byte_tokenizer.byte_ids[ord("x")], need - len(said)))
    assert said == list(grammar.plan)


def test_auto_answers_with_valid_calls(grammars: Grammars, byte_tokenizer: Tokenizer) -> None:
    called = 0
    for seed in range(20):
        said = answer(grammars.tool_calls(TOOLS, choice="auto"), 120, seed, wish=byte_tokenizer.tool_call)
        found = reply(byte_tokenizer, said.ids)
        assert found.error is None
        called += bool(found.tool_calls)
        for one in found.tool_calls:
            schema = WEATHER if one["name"] == "weather" else {"maxProperties": 0}
            jsonschema.validate(one["arguments"], schema)
    assert called >= 10


def test_a_number_a_text_and_a_list_end_with_the_budget(grammars: Grammars, byte_tokenizer: Tokenizer) -> None:
    """Random logits hardly ever end them; the plan does, at the last token."""
    for schema in ({"type": "number"}, {"type": "string"}, {"type": "array", "items": {"type": "integer"}}):
        steered = 0
        for seed in range(20):
            said = answer(grammars.json_schema(schema), 12, seed)
            jsonschema.validate(json.loads(spelled(byte_tokenizer, said.ids)), schema)
            steered += said.steered
        assert steered or schema == {"type": "number"}  # a number may end after any digit


def test_an_object_of_any_form(grammars: Grammars, byte_tokenizer: Tokenizer) -> None:
    sizes = set()
    for seed in range(30):
        found = json.loads(spelled(byte_tokenizer, answer(grammars.json_schema(ANY_OBJECT), 40, seed).ids))
        assert isinstance(found, dict)
        sizes.add(len(found))
    assert len(sizes) > 1


def test_the_same_logits_say_the_same(grammars: Grammars, byte_tokenizer: Tokenizer) -> None:
    grammar = grammars.json_schema(EXAMPLES["either"].schema)
    fresh = Grammars(byte_tokenizer, ROWS).json_schema(EXAMPLES["either"].schema)
    assert [answer(grammar, 90, seed) for seed in range(5)] == [answer(fresh, 90, seed) for seed in range(5)]
    assert grammar.plan == fresh.plan


def test_a_model_that_wants_the_impossible_is_led_by_the_plan(grammars: Grammars, byte_tokenizer: Tokenizer) -> None:
    """Tokens that the mask forbids never get through."""
    grammar = grammars.tool_calls(TOOLS, choice="required")
    constraint = grammar.constraint(100)
    said = [constraint.take(byte_tokenizer.turn_end, 100 - n) for n in range(len(grammar.plan))]
    assert said == list(grammar.plan) and constraint.complete


def test_where_the_grammar_gives_out_the_plan_is_said(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = generation_grammars.LLParserLimits(max_lexer_states=60, verbose_errors=False)
    monkeypatch.setattr(generation_grammars, "LIMITS", limits)
    grammars = Grammars(byte_tokenizer, ROWS)
    schema = {"type": "array", "items": {"type": "string", "pattern": "^[a-z]*[ab].{9}$"}}
    grammar = grammars.json_schema(schema)
    gave_out = 0
    for seed in range(10):
        constraint, ids = grammar.constraint(80), list[int]()
        generator = torch.Generator().manual_seed(seed)
        while len(ids) < 80:
            allowed = constraint.allowed(80 - len(ids)).nonzero().flatten()
            gave_out += constraint._matcher.is_error()
            said = constraint.take(int(allowed[torch.randint(len(allowed), (1,), generator=generator)]), 80 - len(ids))
            if said in grammar.closer.ends:
                break
            ids.append(said)
        jsonschema.validate(json.loads(spelled(byte_tokenizer, ids)), schema)
    assert gave_out


@pytest.mark.parametrize(
    ("tools", "choice", "code"),
    [
        ([], "auto", "tool_invalid"),
        ([tool({}), tool({})], "auto", "tool_invalid"),
        ([tool({}, name="")], "auto", "tool_invalid"),
        ([{"function": {"name": ["f"]}}], "auto", "tool_invalid"),
        ([tool({"anyOf": "all"})], "auto", "schema_invalid"),
        (TOOLS, "sunshine", "tool_unknown"),
        ([tool({"type": "string"})], "auto", "schema_refused"),
        ([tool({"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]})], "auto", "schema_refused"),
        ([tool({"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]})], "auto", "schema_refused"),
    ],
)
def test_tools_that_cannot_be_called_are_refused(
    grammars: Grammars, tools: list[dict[str, Any]], choice: str, code: str
) -> None:
    with pytest.raises(SchemaError) as error:
        grammars.tool_calls(tools, choice=choice)
    assert error.value.code == code


@pytest.mark.parametrize(
    "keyword",
    ["uniqueItems", "not", "if", "then", "dependentRequired", "propertyNames", "contains", "unevaluatedProperties"],
)
def test_a_keyword_that_cannot_be_promised_is_named(grammars: Grammars, keyword: str) -> None:
    value = {"uniqueItems": True, "dependentRequired": {"a": ["b"]}}.get(keyword, {"type": "string"})
    for schema in (
        {keyword: value},
        {"type": "object", "properties": {"a": {keyword: value}}, "x-guidance": {"lenient": True}},
    ):
        with pytest.raises(SchemaError, match=keyword) as error:
            grammars.json_schema(schema)
        assert error.value.code == "schema_refused"
    grammars.json_schema({"type": "object", "properties": {keyword: {"type": "string"}}})  # a name, not a keyword


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}, "minItems": 100_000},
        {"type": "string", "pattern": "(.*a){20}(.*b){20}.{50}c"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}},
    ],
)
def test_a_schema_without_an_end_in_reach_is_refused_in_time(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any]
) -> None:
    monkeypatch.setattr("pipeline.generation.grammars.MAX_SECONDS", 0.1)
    with pytest.raises(SchemaError) as error:
        Grammars(byte_tokenizer, ROWS).json_schema(schema)
    assert error.value.code in ("schema_unclosable", "schema_refused", "schema_too_large")


def test_compiled_grammars_are_kept_the_latest_used_of_them(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    compile_ = Grammars._compile
    monkeypatch.setattr(
        Grammars, "_compile", lambda self, *given: (compiled.append(given[0]), compile_(self, *given))[1]
    )
    grammars = Grammars(byte_tokenizer, ROWS, cache_bytes=3 * constrain.GRAMMAR_BYTES)
    for value in (1, 2, 1, 3, 1, 2):  # two fit: 3 evicts 2, because 1 was used more recently
        grammars.json_schema({"const": value})
    assert [text.split('"const": ')[1][0] for text in compiled] == ["1", "2", "3", "2"]
    assert grammars.tool_calls(TOOLS, choice="auto").matcher is grammars.tool_calls(TOOLS, choice="required").matcher


def test_threads_share_the_grammars(byte_tokenizer: Tokenizer) -> None:
    grammars = Grammars(byte_tokenizer, ROWS)
    alone = {name: answer(grammars.json_schema(EXAMPLES[name].schema), 60, 1) for name in ("enum", "tuple", "array")}
    shared, found = Grammars(byte_tokenizer, ROWS), []

    def ask(name: str) -> None:
        found.append(answer(shared.json_schema(EXAMPLES[name].schema), 60, 1) == alone[name])

    threads = [threading.Thread(target=ask, args=(name,)) for name in alone for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 9


def test_a_turn_is_read_by_its_control_tokens(byte_tokenizer: Tokenizer) -> None:
    """Text that spells the tags stays text; an unfinished call is an error, as in `chat.parse`."""
    tag, end = byte_tokenizer.tool_call, byte_tokenizer.tool_call_end
    spelled_tag = byte_tokenizer.encode(f'{CALL}{{"name": "f", "arguments": {{}}}}{CALL_END} ')
    body = byte_tokenizer.encode('\n{"name": "g", "arguments": {"a": "</tool_call>"}}\n')
    found = reply(byte_tokenizer, [*spelled_tag, tag, *body, end])
    assert found.tool_calls == [{"name": "g", "arguments": {"a": "</tool_call>"}}] and found.error is None
    assert found.content.startswith(CALL)
    assert [one["name"] for one in chat.parse(byte_tokenizer.decode([*spelled_tag, tag, *body, end])).tool_calls] == [
        "f",
        "g",
    ]
    broken = reply(byte_tokenizer, [tag, *body])
    assert broken.error is not None and broken.tool_calls == []
