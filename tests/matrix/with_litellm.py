"""The 49 rows through litellm, as `openai/<model>` with an `api_base`."""

import asyncio
import itertools
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # do not fetch prices from the network

import litellm
from asked import (
    ASK,
    BAD_RULES,
    BASE,
    BOOK,
    CALLED,
    CONTROL,
    KEY,
    NUMBER,
    PARTS,
    PATIENCE,
    TIME,
    UNIQUE_RULES,
    WEATHER,
    WEATHER_RULES,
    WRONG_KEYS,
    Plan,
    falls,
    falls_idle,
    is_booking,
    is_call,
    is_scored,
    is_scored_as_said,
    is_weather,
    middle,
    near,
    open_streams,
    run,
    shaped,
    soon,
    speak,
    tokens,
)

litellm.suppress_debug_info = True
ENDLESS: dict[str, Any] = {"extra_body": {"ignore_eos": True}}
ABSENT = {
    2: "the client lists models, but has no call that retrieves one",
    3: "the client has no call that retrieves a model; row 43 covers a chat with an unknown model",
}


def chat(**asked: Any) -> Any:
    """A chat completion of at most twelve tokens, unless `asked` says otherwise."""
    basics = {
        "model": "openai/nano",
        "messages": ASK,
        "max_tokens": 12,
        "seed": 5,
        "api_base": BASE,
        "api_key": KEY,
        "max_retries": 0,
    }
    return litellm.completion(**(basics | asked))


def said(**asked: Any) -> str:
    """The text of the answer."""
    return chat(**asked).choices[0].message.content


def streamed(**asked: Any) -> str:
    """The text of the answer, from a stream."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in chat(**asked, stream=True))


def long_streams(count: int) -> AbstractContextManager[Callable[[], None]]:
    """Open `count` streams that do not end by themselves."""
    streams = [chat(max_tokens=1900, seed=100 + n, stream=True, **ENDLESS) for n in range(count)]
    return open_streams(streams, lambda stream: asyncio.run(stream.aclose()))


def complete(**asked: Any) -> Any:
    """A text completion."""
    basics = {
        "model": "text-completion-openai/nano",
        "prompt": "The pilot asked",
        "max_tokens": 8,
        "seed": 3,
        "api_base": BASE,
        "api_key": KEY,
    }
    return litellm.text_completion(**(basics | asked))


def fault(kind: type[Exception], **asked: Any) -> Any:
    """The error that a chat request raises."""
    try:
        chat(**asked)
    except kind as error:
        return error
    raise AssertionError("nothing was refused")


def arguments(call: Any) -> Any:
    return json.loads(call.function.arguments)


class Rows:
    """The rows, numbered as in docs/clients.md."""

    def row_1(self) -> None:
        found = litellm.get_valid_models(
            check_provider_endpoint=True, custom_llm_provider="openai", api_base=BASE, api_key=KEY
        )
        assert found == ["nano", "other", "judge"], found

    def row_4(self) -> None:
        answer = chat()
        choice, usage = answer.choices[0], answer.usage
        assert (
            answer.object == "chat.completion"
            and answer.id.startswith("chatcmpl-")
            and answer.system_fingerprint.startswith("fp_")
        )
        assert choice.index == 0 and choice.message.role == "assistant" and choice.message.content
        assert choice.finish_reason in ("stop", "length")
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens and 0 < usage.completion_tokens <= 12

    def row_5(self) -> None:
        told = [chat(messages=[{"role": role, "content": "Be short."}, *ASK]) for role in ("system", "developer")]
        assert told[0].choices[0].message.content == told[1].choices[0].message.content
        assert told[0].usage.prompt_tokens == told[1].usage.prompt_tokens > chat().usage.prompt_tokens

    def row_6(self) -> None:
        chunks = list(chat(stream=True))
        assert len({chunk.id for chunk in chunks}) == 1 and {chunk.object for chunk in chunks} == {
            "chat.completion.chunk"
        }
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].choices[0].finish_reason in ("stop", "length") and not chunks[-1].choices[0].delta.content
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said()
        assert all(getattr(chunk, "usage", None) is None for chunk in chunks), "counts come only if asked for"

    def row_7(self) -> None:
        last, whole = list(chat(stream=True, stream_options={"include_usage": True}))[-1].usage, chat().usage
        assert (last.prompt_tokens, last.completion_tokens, last.total_tokens) == (
            whole.prompt_tokens,
            whole.completion_tokens,
            whole.total_tokens,
        )

    def row_8(self) -> None:
        whole = [choice.message.content for choice in chat(n=3).choices]
        assert len(set(whole)) == 3
        pieces = ["", "", ""]
        for chunk in chat(n=3, stream=True):
            pieces[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert pieces == whole, (pieces, whole)

    def row_9(self) -> None:
        assert said() == said()
        assert len({said(seed=seed) for seed in range(4)}) == 4
        assert len({said(seed=None) for _ in range(3)}) == 3

    def row_10(self) -> None:
        alone = said(max_tokens=40)
        with long_streams(7):
            speak(7)
            assert said(max_tokens=40) == alone
        falls_idle()

    def row_11(self) -> None:
        answers = [chat(temperature=0, seed=seed, logprobs=True, top_logprobs=1).choices[0] for seed in (1, 2)]
        assert answers[0].message.content == answers[1].message.content
        assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in answers[0].logprobs.content)

    def row_12(self) -> None:
        text = said(max_tokens=60, **ENDLESS)
        stop = text[20:22]
        choice = chat(max_tokens=60, stop=stop, **ENDLESS).choices[0]
        assert choice.message.content == text[: text.index(stop)] and choice.finish_reason == "stop"

    def row_13(self) -> None:
        text = said(max_tokens=60, **ENDLESS)
        stop = text[10:25]
        assert streamed(max_tokens=60, stop=["never said", stop], **ENDLESS) == text[: text.index(stop)]

    def row_14(self) -> None:
        for field in ("max_tokens", "max_completion_tokens"):
            answer = chat(**({"max_tokens": 50} | {field: 3}), **ENDLESS)
            assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 3

    def row_15(self) -> None:
        choice = chat(logprobs=True).choices[0]
        content = choice.logprobs.content
        assert (
            bytes(itertools.chain(*(entry.bytes for entry in content))).decode("utf-8", "replace")
            == choice.message.content
        )
        assert all(entry.logprob <= 0 and entry.top_logprobs == [] for entry in content)
        told = [getattr(chunk.choices[0], "logprobs", None) for chunk in chat(logprobs=True, stream=True)]
        near(
            [entry["logprob"] for logprobs in told if logprobs for entry in dict(logprobs)["content"]],
            [entry.logprob for entry in content],
        )

    def row_16(self) -> None:
        for entry in chat(logprobs=True, top_logprobs=20).choices[0].logprobs.content:
            falls([top.logprob for top in entry.top_logprobs])

    def row_17(self) -> None:
        assert said(logit_bias={str(tokens("z")[0]): 100}, max_tokens=5) == "zzzzz"
        text = said(temperature=0, max_tokens=1)
        assert said(temperature=0, max_tokens=1, logit_bias={str(tokens(text)[0]): -100}) != text

    def row_18(self) -> None:
        ids = tokens("🚂🌊")
        assert len(ids) > 4 and complete(prompt=ids, echo=True, max_tokens=0).choices[0].text == "🚂🌊"
        for seed in range(8):
            assert streamed(seed=seed, max_tokens=40) == said(seed=seed, max_tokens=40)

    def row_19(self) -> None:
        assert said(messages=[{"role": "user", "content": PARTS}]) == said()

    def row_20(self) -> None:
        assert said(messages=CALLED, tools=[TIME], tool_choice="none")

    def row_21(self) -> None:
        turns = [
            {
                "role": "user",
                "content": "A prompt that nobody but litellm has asked, long enough to be kept: 1 2 3 4 5.",
            }
        ]
        first, second = (chat(messages=turns).usage for _ in range(2))
        assert first.prompt_tokens_details.cached_tokens < 20
        assert second.prompt_tokens_details.cached_tokens == second.prompt_tokens - 1

    def row_22(self) -> None:
        with long_streams(1) as close:
            speak(1)
            close()
            falls_idle()

    def row_23(self) -> None:
        called = 0
        for seed in range(6):
            bias = {str(CONTROL["tool_call"]): 2 * seed}
            choice = chat(
                tools=[WEATHER, TIME], tool_choice="auto", seed=seed, max_tokens=120, logit_bias=bias
            ).choices[0]
            for call in choice.message.tool_calls or []:
                is_call(call.function.name, arguments(call))
            called += bool(choice.message.tool_calls)
            assert (choice.finish_reason == "tool_calls") == bool(choice.message.tool_calls)
        assert 0 < called < 6, "some of these seeds call, some talk"

    def row_24(self) -> None:
        for seed in range(10):
            answer = chat(tools=[NUMBER], tool_choice="required", seed=seed, max_tokens=64)
            choice = answer.choices[0]
            assert (
                choice.finish_reason == "tool_calls"
                and choice.message.content is None
                and answer.usage.completion_tokens <= 64
            )
            assert all(type(arguments(call)["n"]) is int for call in choice.message.tool_calls)

    def row_25(self) -> None:
        for name in ("get_weather", "get_time"):
            choice = {"type": "function", "function": {"name": name}}
            calls = chat(tools=[WEATHER, TIME], tool_choice=choice, max_tokens=120).choices[0].message.tool_calls
            assert [call.function.name for call in calls] == [name]
            is_call(name, arguments(calls[0]))

    def row_26(self) -> None:
        message = (
            chat(tools=[WEATHER], tool_choice="none", logit_bias={str(CONTROL["tool_call"]): 100}).choices[0].message
        )
        assert message.tool_calls is None and "<tool_call>" not in message.content

    def row_27(self) -> None:
        asked: dict[str, Any] = {
            "tools": [TIME],
            "tool_choice": "required",
            "max_tokens": 300,
            "logit_bias": {str(tokens("\n")[0]): 100},
        }
        assert len(chat(**asked).choices[0].message.tool_calls) > 1
        assert len(chat(**asked, parallel_tool_calls=False).choices[0].message.tool_calls) == 1

    def row_28(self) -> None:
        asked: dict[str, Any] = {"tools": [WEATHER, TIME], "tool_choice": "required", "max_tokens": 200}
        whole = chat(**asked).choices[0].message.tool_calls
        joined: dict[int, list[str]] = {}
        chunks = list(chat(**asked, stream=True))
        for piece in (piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or []):
            if piece.index not in joined:
                assert piece.id.startswith("call_") and piece.type == "function"
                joined[piece.index] = [piece.function.name, ""]
            else:
                assert piece.id is None and piece.function.name is None
            joined[piece.index][1] += piece.function.arguments
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        assert list(joined.values()) == [[call.function.name, call.function.arguments] for call in whole]

    def row_29(self) -> None:
        for seed in range(5):
            answer = chat(tools=[BOOK], tool_choice="required", seed=seed, max_tokens=200, parallel_tool_calls=False)
            is_booking(arguments(answer.choices[0].message.tool_calls[0]))

    def row_30(self) -> None:
        asked: dict[str, Any] = {"tools": [TIME], "tool_choice": "required"}
        error = fault(litellm.BadRequestError, **asked, max_tokens=8)
        assert error.code == "budget_too_small", vars(error)
        needed = int(error.message.split(" takes ")[1].split()[0])
        assert chat(**asked, max_tokens=needed).choices[0].finish_reason == "tool_calls"
        fault(litellm.BadRequestError, **asked, max_tokens=needed - 1)

    def row_31(self) -> None:
        call = chat(tools=[TIME], tool_choice="required", max_tokens=100, parallel_tool_calls=False).choices[0].message

        def told(content: str) -> int:
            turns = [
                *ASK,
                call.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": content},
            ]
            return chat(messages=turns, tools=[TIME], temperature=0, tool_choice="none").usage.prompt_tokens

        assert told("midnight in the harbour") > told("noon")

    def row_32(self) -> None:
        for seed in range(5):
            assert isinstance(json.loads(said(response_format={"type": "json_object"}, seed=seed, max_tokens=40)), dict)

    def row_33(self) -> None:
        for seed in range(5):
            is_weather(json.loads(said(response_format=shaped(WEATHER_RULES), seed=seed, max_tokens=60)))

    def row_34(self) -> str:
        Plan.model_validate_json(said(response_format=Plan, max_tokens=80, seed=1))
        return "the client sends a Pydantic class as a schema; the test parses the text with the class"

    def row_35(self) -> None:
        assert "uniqueItems" in fault(litellm.BadRequestError, response_format=shaped(UNIQUE_RULES)).message

    def row_36(self) -> None:
        answer = complete()
        assert answer.object == "text_completion" and answer.choices[0].text and answer.usage.prompt_tokens > 0

    def row_37(self) -> None:
        answer = complete(prompt=["The pilot asked", "def add("], temperature=0, n=2)
        single = [complete(prompt=prompt, temperature=0).choices[0].text for prompt in ("The pilot asked", "def add(")]
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in answer.choices] == [single[0], single[0], single[1], single[1]]

    def row_38(self) -> None:
        assert complete(prompt=tokens("The pilot asked")).choices[0].text == complete().choices[0].text

    def row_39(self) -> None:
        prompts = [tokens(text) for text in ("The pilot asked", "def add(")]
        single = [complete(prompt=ids, temperature=0).choices[0].text for ids in prompts]
        assert [choice.text for choice in complete(prompt=prompts, temperature=0).choices] == single

    def row_40(self) -> None:
        ids = middle("def add(a, b):\n", "\nadd(1, 2)")
        answer = complete(prompt="def add(a, b):\n", suffix="\nadd(1, 2)")
        assert answer.choices[0].text == complete(prompt=ids).choices[0].text and answer.usage.prompt_tokens == len(ids)

    def row_41(self) -> None:
        def told(**asked: Any) -> tuple[str, Any]:
            choice = complete(**asked).choices[0]
            return choice.text, dict(choice.logprobs)

        is_scored(*told(echo=True, logprobs=2, max_tokens=0), "The pilot asked", 2)
        is_scored_as_said(
            lambda seed: told(seed=seed, logprobs=0, max_tokens=1),
            lambda prompt: told(prompt=prompt, echo=True, logprobs=0, max_tokens=0)[1],
        )

    def row_42(self) -> None:
        chunks = list(complete(stream=True, echo=True, stream_options={"include_usage": True}))
        text = "".join(choice.text or "" for chunk in chunks for choice in chunk.choices)
        assert text == "The pilot asked" + complete().choices[0].text
        assert next(c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason) in ("stop", "length")
        assert chunks[-1].usage.completion_tokens > 0

    def row_43(self) -> None:
        assert "served: nano, other, judge" in fault(litellm.NotFoundError, model="openai/gpt-none").message

    def row_44(self) -> None:
        assert "messages" in fault(litellm.BadRequestError, messages=[]).message

    def row_45(self) -> None:
        assert "temperature" in fault(litellm.BadRequestError, temperature=-1).message

    def row_46(self) -> None:
        error = fault(litellm.ContextWindowExceededError, messages=[{"role": "user", "content": "ab " * 3000}])
        assert "2048" in error.message
        assert said()

    def row_47(self) -> None:
        for rules in BAD_RULES:
            fault(litellm.BadRequestError, response_format=shaped(rules))

    def row_48(self) -> None:
        for key in WRONG_KEYS:
            fault(litellm.AuthenticationError, api_key=key)
        assert said()

    def row_49(self) -> None:
        with long_streams(40) as close:
            error = fault(litellm.RateLimitError)
            assert int(error.litellm_response_headers["retry-after"]) >= 1 and "queue is full" in error.message
            with soon(close):
                assert said(num_retries=PATIENCE)
        falls_idle()


if __name__ == "__main__":
    run(Rows(), ABSENT)
