"""Tools, JSON, completions and errors as OpenAI's Python client sees them: rows 23 to 49 of docs/clients.md."""

import json
import threading
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from pipeline.text.tokenizer import Tokenizer
from tests.clients import ASK, TIME, WEATHER, chat
from tests.server import Running, save_models, serving

pytestmark = pytest.mark.slow  # starts its own server

RULES = WEATHER["function"]["parameters"]


def arguments(call: Any) -> Any:
    found = json.loads(call.function.arguments)
    jsonschema.validate(found, RULES if call.function.name == "get_weather" else TIME["function"]["parameters"])
    return found


# -- tools -------------------------------------------------------------------------------------------------------------


def test_23_auto_answers_or_calls_and_a_call_is_valid(client: openai.OpenAI, byte_tokenizer: Tokenizer) -> None:
    called = 0
    for seed in range(6):
        choice = chat(
            client,
            tools=[WEATHER, TIME],
            tool_choice="auto",
            seed=seed,
            max_tokens=120,
            logit_bias={str(byte_tokenizer.tool_call): 2.0 * seed},
        ).choices[0]
        for call in choice.message.tool_calls or []:
            arguments(call)
        called += bool(choice.message.tool_calls)
        assert (choice.finish_reason == "tool_calls") == bool(choice.message.tool_calls)
    assert 0 < called < 6, "some of these seeds call, some talk"


def test_24_required_gives_a_complete_call_in_64_tokens(client: openai.OpenAI) -> None:
    small = {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
        },
    }
    for seed in range(10):
        answer = chat(client, tools=[small], tool_choice="required", seed=seed, max_tokens=64)
        choice = answer.choices[0]
        assert (
            choice.finish_reason == "tool_calls"
            and choice.message.content is None
            and answer.usage.completion_tokens <= 64
        )
        assert all(isinstance(json.loads(call.function.arguments)["n"], int) for call in choice.message.tool_calls)


def test_25_a_named_tool_is_called(client: openai.OpenAI) -> None:
    for name in ("get_weather", "get_time"):
        choice = chat(
            client, tools=[WEATHER, TIME], tool_choice={"type": "function", "function": {"name": name}}, max_tokens=120
        ).choices[0]
        assert [call.function.name for call in choice.message.tool_calls] == [name]
        arguments(choice.message.tool_calls[0])


def test_26_none_calls_nothing(client: openai.OpenAI, byte_tokenizer: Tokenizer) -> None:
    bias = {str(byte_tokenizer.tool_call): 100}
    choice = chat(client, tools=[WEATHER], tool_choice="none", logit_bias=bias).choices[0]
    assert choice.message.tool_calls is None and "<tool_call>" not in choice.message.content


def test_27_without_parallel_calls_there_is_only_one(client: openai.OpenAI, byte_tokenizer: Tokenizer) -> None:
    newline = str(byte_tokenizer.encode("\n")[0])
    asked: dict[str, Any] = {
        "tools": [TIME],
        "tool_choice": "required",
        "max_tokens": 300,
        "logit_bias": {newline: 100},
    }
    assert len(chat(client, **asked).choices[0].message.tool_calls) > 1
    assert len(chat(client, **asked, parallel_tool_calls=False).choices[0].message.tool_calls) == 1


def test_28_streamed_pieces_join_to_the_complete_call(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"tools": [WEATHER, TIME], "tool_choice": "required", "max_tokens": 200}
    whole = chat(client, **asked).choices[0].message.tool_calls
    joined: dict[int, dict[str, str]] = {}
    chunks = list(chat(client, **asked, stream=True))
    for piece in (piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or []):
        if piece.index not in joined:
            assert piece.id.startswith("call_") and piece.type == "function"
            joined[piece.index] = {"name": piece.function.name, "arguments": ""}
        else:
            assert piece.id is None and piece.function.name is None
        joined[piece.index]["arguments"] += piece.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert [(one["name"], one["arguments"]) for one in joined.values()] == [
        (c.function.name, c.function.arguments) for c in whole
    ]


def test_29_nested_objects_enum_and_pattern_are_respected(client: openai.OpenAI) -> None:
    rules = {
        "type": "object",
        "properties": {
            "place": {
                "type": "object",
                "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "side": {"enum": ["left", "right"]}},
                "required": ["zip", "side"],
            },
            "days": {
                "type": "array",
                "items": {"type": "integer", "minimum": 1, "maximum": 7},
                "minItems": 1,
                "maxItems": 3,
            },
        },
        "required": ["place", "days"],
    }
    tool = {"type": "function", "function": {"name": "book", "parameters": rules}}
    for seed in range(5):
        calls = (
            chat(client, tools=[tool], tool_choice="required", seed=seed, max_tokens=200, parallel_tool_calls=False)
            .choices[0]
            .message.tool_calls
        )
        jsonschema.validate(json.loads(calls[0].function.arguments), rules)


def test_30_a_budget_below_the_shortest_call_is_refused_with_the_minimum(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"tools": [TIME], "tool_choice": "required"}
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, **asked, max_tokens=8)
    assert error.value.code == "budget_too_small"
    needed = int(error.value.message.split(" takes ")[1].split()[0])
    assert chat(client, **asked, max_tokens=needed).choices[0].finish_reason == "tool_calls"
    with pytest.raises(openai.BadRequestError):
        chat(client, **asked, max_tokens=needed - 1)


def test_31_a_tool_result_is_accepted(client: openai.OpenAI) -> None:
    call = (
        chat(client, tools=[TIME], tool_choice="required", max_tokens=100, parallel_tool_calls=False).choices[0].message
    )
    turns = [
        *ASK,
        call.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "noon"},
    ]
    noon = chat(client, messages=turns, tools=[TIME], temperature=0, tool_choice="none")
    night = chat(
        client,
        messages=[*turns[:-1], turns[-1] | {"content": "midnight in the harbour"}],
        tools=[TIME],
        temperature=0,
        tool_choice="none",
    )
    assert night.usage.prompt_tokens > noon.usage.prompt_tokens


# -- structure ---------------------------------------------------------------------------------------------------------


def test_32_json_object_gives_an_object(client: openai.OpenAI) -> None:
    for seed in range(5):
        assert isinstance(
            json.loads(
                chat(client, response_format={"type": "json_object"}, seed=seed, max_tokens=40)
                .choices[0]
                .message.content
            ),
            dict,
        )


def test_33_json_schema_gives_a_valid_instance(client: openai.OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "weather", "schema": RULES, "strict": True}}
    for seed in range(5):
        choice = chat(client, response_format=wanted, seed=seed, max_tokens=60).choices[0]
        jsonschema.validate(json.loads(choice.message.content), RULES)


class Step(BaseModel):
    kind: Literal["go", "stop"]
    metres: int


class Plan(BaseModel):
    steps: list[Step]
    note: str | None


def test_34_parse_gives_a_typed_object(client: openai.OpenAI) -> None:
    found = client.chat.completions.parse(model="nano", messages=ASK, response_format=Plan, max_tokens=80, seed=1)
    assert isinstance(found.choices[0].message.parsed, Plan)


def test_35_an_unsupported_keyword_is_refused_by_name(client: openai.OpenAI) -> None:
    rules = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
    }
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        chat(client, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": rules}})


# -- completions -------------------------------------------------------------------------------------------------------


def complete(client: openai.OpenAI, **asked: Any) -> Any:
    return client.completions.create(
        **({"model": "nano", "prompt": "The pilot asked", "max_tokens": 8, "seed": 3} | asked)
    )


def test_36_a_text_is_continued(client: openai.OpenAI) -> None:
    answer = complete(client)
    assert answer.object == "text_completion" and answer.choices[0].text and answer.usage.prompt_tokens > 0


def test_37_several_prompts_are_answered_in_order(client: openai.OpenAI) -> None:
    answer = complete(client, prompt=["The pilot asked", "def add("], temperature=0, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    single = [
        complete(client, prompt=prompt, temperature=0).choices[0].text for prompt in ("The pilot asked", "def add(")
    ]
    assert [choice.text for choice in answer.choices] == [single[0], single[0], single[1], single[1]]


def test_38_token_ids_are_a_valid_prompt(client: openai.OpenAI, byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("The pilot asked")
    assert complete(client, prompt=ids).choices[0].text == complete(client).choices[0].text


def test_39_lists_of_token_ids_are_valid_prompts(client: openai.OpenAI, byte_tokenizer: Tokenizer) -> None:
    prompts = [byte_tokenizer.encode(text) for text in ("The pilot asked", "def add(")]
    answer = complete(client, prompt=prompts, temperature=0)
    assert [choice.text for choice in answer.choices] == [
        complete(client, prompt=ids, temperature=0).choices[0].text for ids in prompts
    ]


def test_40_a_suffix_asks_for_the_middle(client: openai.OpenAI, byte_tokenizer: Tokenizer) -> None:
    t = byte_tokenizer
    ids = [t.fim_prefix, *t.encode("def add(a, b):\n"), t.fim_suffix, *t.encode("\nadd(1, 2)"), t.fim_middle]
    answer = complete(client, prompt="def add(a, b):\n", suffix="\nadd(1, 2)")
    assert answer.choices[0].text == complete(client, prompt=ids).choices[0].text and answer.usage.prompt_tokens == len(
        ids
    )


def test_41_echo_scores_a_prompt(client: openai.OpenAI, byte_tokenizer: Tokenizer) -> None:
    choice = complete(client, echo=True, logprobs=2, max_tokens=0).choices[0]
    assert choice.text == "The pilot asked" and "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs[0] is None and all(value < 0 for value in choice.logprobs.token_logprobs[1:])
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs[1:])
    offsets = [0]
    for token in choice.logprobs.tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    assert choice.logprobs.text_offset == offsets
    extensions = {"return_token_ids": True, "ignore_eos": True}
    said = complete(client, temperature=0, logprobs=0, max_tokens=4, extra_body=extensions).choices[0]
    ids = byte_tokenizer.encode("The pilot asked") + said.model_extra["token_ids"]
    whole = complete(client, prompt=ids, echo=True, logprobs=0, max_tokens=0).choices[0]
    assert whole.logprobs.token_logprobs[-4:] == pytest.approx(said.logprobs.token_logprobs, abs=1e-4)


def test_42_a_completion_streams(client: openai.OpenAI) -> None:
    chunks = list(complete(client, stream=True, echo=True, stream_options={"include_usage": True}))
    assert (
        "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "The pilot asked" + complete(client).choices[0].text
    )
    assert chunks[-2].choices[0].finish_reason in ("stop", "length") and chunks[-1].usage.completion_tokens > 0


# -- errors ------------------------------------------------------------------------------------------------------------


def test_43_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="served: nano, other, judge"):
        chat(client, model="gpt-4o")


def test_44_a_request_without_messages_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, messages=[])
    assert error.value.param == "messages"


def test_45_a_negative_temperature_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, temperature=-1)
    assert error.value.param == "temperature"


def test_46_an_overlong_prompt_is_refused_and_the_next_request_succeeds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, messages=[{"role": "user", "content": "ab " * 3000}])
    assert error.value.code == "context_length_exceeded" and "2048" in error.value.message
    assert chat(client).choices[0].message.content


def test_47_a_bad_schema_is_refused(client: openai.OpenAI) -> None:
    for rules in ({"type": "nothing"}, {"$ref": "https://example.com/schema.json"}, {"properties": 3}):
        with pytest.raises(openai.BadRequestError):
            chat(client, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": rules}})


def test_48_a_wrong_key_is_refused(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    right = "a-key-that-nobody-guesses"
    models = save_models(tmp_path, byte_tokenizer)[:1]
    with serving(models, log=tmp_path / "log", environment={"STAGECOACH_API_KEYS": right}) as keyed:
        for key in ("wrong", "a-key-that-nobody-guesses-not", right.upper()):
            with pytest.raises(openai.AuthenticationError):
                chat(openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=key, max_retries=0))
        assert chat(openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=right)).choices[0].message.content
    assert right not in (tmp_path / "log").read_text()


def test_49_overload_gives_a_429_and_a_retry_succeeds(server: Running, client: openai.OpenAI) -> None:
    busy = [chat(client, max_tokens=1900, stream=True, seed=n, extra_body={"ignore_eos": True}) for n in range(40)]
    try:
        with pytest.raises(openai.RateLimitError) as error:
            chat(client)
        assert int(error.value.response.headers["retry-after"]) >= 1 and error.value.code == "queue_full"
        patient = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=5)
        freed = threading.Timer(0.3, lambda: [stream.close() for stream in busy])
        freed.start()
        assert chat(patient).choices[0].message.content
        freed.join()
    finally:
        for stream in busy:
            stream.close()
    assert server.falls_idle()
