"""The 49 rows through langchain-openai: `ChatOpenAI` and, for completions, `OpenAI`."""

import itertools
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import httpx
import openai
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
from langchain_core.messages import AIMessage, ToolMessage, convert_to_messages
from langchain_openai import ChatOpenAI, OpenAI

ENDLESS: dict[str, Any] = {"extra_body": {"ignore_eos": True}}
ABSENT = dict.fromkeys((1, 2), "the client has no call that lists models") | {
    3: "the client has no call that lists models; row 43 covers a chat with an unknown model"
}


def model(**asked: Any) -> ChatOpenAI:
    """A chat model with at most twelve tokens per answer, unless `asked` says otherwise."""
    basics = {"model": "nano", "base_url": BASE, "api_key": KEY, "max_tokens": 12, "seed": 5, "max_retries": 0}
    return ChatOpenAI(**(basics | asked))


def chat(messages: Any = ASK, **asked: Any) -> AIMessage:
    """The model's answer to `messages`."""
    return model(**asked).invoke(messages)


def called(
    tools: list[dict[str, Any]], choice: Any, *, messages: Any = ASK, parallel: bool | None = None, **asked: Any
) -> Any:
    """The model's answer when tools are offered."""
    return model(**asked).bind_tools(tools, tool_choice=choice, parallel_tool_calls=parallel).invoke(messages)


def streamed(**asked: Any) -> str:
    """The text of the model's answer, from a stream."""
    return "".join(chunk.content for chunk in model(**asked).stream(ASK))


def long_streams(count: int) -> AbstractContextManager[Callable[[], None]]:
    """Open `count` streams that do not end by themselves."""
    streams = [model(max_tokens=1900, seed=100 + n, **ENDLESS).stream(ASK) for n in range(count)]
    return open_streams(streams, lambda stream: stream.close())


def completer(**asked: Any) -> OpenAI:
    """A model that completes text."""
    basics = {"model": "nano", "base_url": BASE, "api_key": KEY, "max_tokens": 8, "seed": 3, "max_retries": 0}
    return OpenAI(**(basics | asked))


def fault(kind: type[Exception], **asked: Any) -> Any:
    """The error that a chat request raises."""
    try:
        chat(**asked)
    except kind as error:
        return error
    raise AssertionError("nothing was refused")


def logprobs_of(answer: Any) -> list[dict[str, Any]]:
    return answer.response_metadata["logprobs"]["content"]


class Rows:
    """The rows, numbered as in docs/clients.md."""

    def row_4(self) -> None:
        answer = chat()
        told, usage = answer.response_metadata, answer.usage_metadata
        assert (
            told["id"].startswith("chatcmpl-")
            and told["system_fingerprint"].startswith("fp_")
            and told["model_name"] == "nano"
        )
        assert answer.content and told["finish_reason"] in ("stop", "length")
        assert (
            usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] and 0 < usage["output_tokens"] <= 12
        )

    def row_5(self) -> None:
        told = [chat([(role, "Be short."), *ASK]) for role in ("system", "developer")]
        assert told[0].content == told[1].content
        assert (
            told[0].usage_metadata["input_tokens"]
            == told[1].usage_metadata["input_tokens"]
            > chat().usage_metadata["input_tokens"]
        )

    def row_6(self) -> None:
        chunks = list(model().stream(ASK))
        reasons = [chunk.response_metadata.get("finish_reason") for chunk in chunks]
        end = next(index for index, reason in enumerate(reasons) if reason)
        assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].content == ""
        assert (
            reasons[end] in ("stop", "length")
            and not any(reasons[end + 1 :])
            and not any(c.content for c in chunks[end:])
        )
        assert "".join(chunk.content for chunk in chunks) == chat().content
        assert all(chunk.usage_metadata is None for chunk in chunks), "counts come only if asked for"

    def row_7(self) -> None:
        counts = [chunk.usage_metadata for chunk in model(stream_usage=True).stream(ASK)]
        told, whole = [count for count in counts if count], chat().usage_metadata
        assert len(told) == 1 and not any(counts[: counts.index(told[0])])
        assert [told[0][key] for key in ("input_tokens", "output_tokens", "total_tokens")] == [
            whole[key] for key in ("input_tokens", "output_tokens", "total_tokens")
        ]

    def row_8(self) -> str:
        (found,) = model(n=3).generate([convert_to_messages(ASK)]).generations
        assert len({one.text for one in found}) == 3 and found[0].text == chat().content
        return "the client's streams contain only one answer"

    def row_9(self) -> None:
        assert chat().content == chat().content
        assert len({chat(seed=seed).content for seed in range(4)}) == 4
        assert len({chat(seed=None).content for _ in range(3)}) == 3

    def row_10(self) -> None:
        alone = chat(max_tokens=40).content
        with long_streams(7):
            speak(7)
            assert chat(max_tokens=40).content == alone
        falls_idle()

    def row_11(self) -> None:
        answers = [chat(temperature=0, seed=seed, logprobs=True, top_logprobs=1) for seed in (1, 2)]
        assert answers[0].content == answers[1].content
        assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in logprobs_of(answers[0]))

    def row_12(self) -> None:
        text = chat(max_tokens=60, **ENDLESS).content
        stop = text[20:22]
        answer = chat(max_tokens=60, stop=[stop], **ENDLESS)
        assert answer.content == text[: text.index(stop)] and answer.response_metadata["finish_reason"] == "stop"

    def row_13(self) -> None:
        text = chat(max_tokens=60, **ENDLESS).content
        stop = text[10:25]
        assert streamed(max_tokens=60, stop=["never said", stop], **ENDLESS) == text[: text.index(stop)]

    def row_14(self) -> None:
        for asked in (
            {"max_tokens": 3, **ENDLESS},
            {"max_tokens": None, "extra_body": {"ignore_eos": True, "max_tokens": 3}},
        ):
            answer = chat(**asked)
            assert answer.response_metadata["finish_reason"] == "length" and answer.usage_metadata["output_tokens"] == 3

    def row_15(self) -> None:
        answer = chat(logprobs=True)
        content = logprobs_of(answer)
        assert (
            bytes(itertools.chain(*(entry["bytes"] for entry in content))).decode("utf-8", "replace") == answer.content
        )
        assert all(entry["logprob"] <= 0 and entry["top_logprobs"] == [] for entry in content)
        told = [chunk.response_metadata.get("logprobs") for chunk in model(logprobs=True).stream(ASK)]
        near(
            (entry["logprob"] for logprobs in told if logprobs for entry in logprobs["content"]),
            (entry["logprob"] for entry in content),
        )

    def row_16(self) -> None:
        for entry in logprobs_of(chat(logprobs=True, top_logprobs=20)):
            falls([top["logprob"] for top in entry["top_logprobs"]])

    def row_17(self) -> None:
        assert chat(logit_bias={tokens("z")[0]: 100}, max_tokens=5).content == "zzzzz"
        text = chat(temperature=0, max_tokens=1).content
        assert chat(temperature=0, max_tokens=1, logit_bias={tokens(text)[0]: -100}).content != text

    def row_18(self) -> None:
        assert len(tokens("🚂🌊")) > 4, "its bytes are tokens"
        assert completer(max_tokens=0).invoke("🚂🌊", echo=True) == "🚂🌊"
        for seed in range(8):
            assert streamed(seed=seed, max_tokens=40) == chat(seed=seed, max_tokens=40).content

    def row_19(self) -> None:
        assert chat([{"role": "user", "content": PARTS}]).content == chat().content

    def row_20(self) -> None:
        sent: list[Any] = []
        watched = httpx.Client(event_hooks={"request": [lambda request: sent.append(json.loads(request.read()))]})
        assert model(http_client=watched).bind_tools([TIME], tool_choice="none").invoke(CALLED).content
        assert sent[0]["messages"][1]["content"] is None

    def row_21(self) -> None:
        turns = [("user", "A prompt that nobody but langchain has asked, long enough to be kept: 1 2 3 4 5.")]
        first, second = (chat(turns).usage_metadata for _ in range(2))
        assert first["input_token_details"]["cache_read"] < 20
        assert second["input_token_details"]["cache_read"] == second["input_tokens"] - 1

    def row_22(self) -> None:
        with long_streams(1) as close:
            speak(1)
            close()
            falls_idle()

    def row_23(self) -> None:
        callers = 0
        for seed in range(6):
            answer = called(
                [WEATHER, TIME], "auto", seed=seed, max_tokens=120, logit_bias={CONTROL["tool_call"]: 2 * seed}
            )
            for call in answer.tool_calls:
                is_call(call["name"], call["args"])
            callers += bool(answer.tool_calls)
            assert (answer.response_metadata["finish_reason"] == "tool_calls") == bool(
                answer.tool_calls
            ) and not answer.invalid_tool_calls
        assert 0 < callers < 6, "some of these seeds call, some talk"

    def row_24(self) -> None:
        for seed in range(10):
            answer = called([NUMBER], "required", seed=seed, max_tokens=64)
            assert answer.response_metadata["finish_reason"] == "tool_calls" and answer.content == ""
            assert (
                answer.usage_metadata["output_tokens"] <= 64
                and answer.tool_calls
                and all(type(call["args"]["n"]) is int for call in answer.tool_calls)
            )

    def row_25(self) -> None:
        for name in ("get_weather", "get_time"):
            calls = called([WEATHER, TIME], name, max_tokens=120).tool_calls
            assert [call["name"] for call in calls] == [name]
            is_call(name, calls[0]["args"])

    def row_26(self) -> None:
        answer = called([WEATHER], "none", logit_bias={CONTROL["tool_call"]: 100})
        assert answer.tool_calls == [] and "<tool_call>" not in answer.content

    def row_27(self) -> None:
        asked: dict[str, Any] = {"max_tokens": 300, "logit_bias": {tokens("\n")[0]: 100}}
        assert len(called([TIME], "required", **asked).tool_calls) > 1
        assert len(called([TIME], "required", parallel=False, **asked).tool_calls) == 1

    def row_28(self) -> None:
        bound = model(max_tokens=200).bind_tools([WEATHER, TIME], tool_choice="required")
        whole, chunks = bound.invoke(ASK), list(bound.stream(ASK))
        joined: dict[int, list[str]] = {}
        for piece in (piece for chunk in chunks for piece in chunk.tool_call_chunks):
            if piece["index"] not in joined:
                assert piece["id"].startswith("call_")
                joined[piece["index"]] = [piece["name"], ""]
            else:
                assert piece["id"] is None and piece["name"] is None
            joined[piece["index"]][1] += piece["args"]
        assert [
            chunk.response_metadata["finish_reason"] for chunk in chunks if chunk.response_metadata.get("finish_reason")
        ] == ["tool_calls"]
        assert [[name, json.loads(text)] for name, text in joined.values()] == [
            [call["name"], call["args"]] for call in whole.tool_calls
        ]

    def row_29(self) -> None:
        for seed in range(5):
            is_booking(called([BOOK], "required", seed=seed, max_tokens=200, parallel=False).tool_calls[0]["args"])

    def row_30(self) -> None:
        bound = {"tools": [TIME], "tool_choice": "required"}
        error = fault(openai.BadRequestError, max_tokens=8, model_kwargs=bound)
        assert error.code == "budget_too_small"
        needed = int(error.message.split(" takes ")[1].split()[0])
        assert chat(max_tokens=needed, model_kwargs=bound).response_metadata["finish_reason"] == "tool_calls"
        fault(openai.BadRequestError, max_tokens=needed - 1, model_kwargs=bound)

    def row_31(self) -> None:
        call = called([TIME], "required", max_tokens=100, parallel=False)

        def told(content: str) -> int:
            turns = [*ASK, call, ToolMessage(content, tool_call_id=call.tool_calls[0]["id"])]
            return called([TIME], "none", messages=turns, temperature=0).usage_metadata["input_tokens"]

        assert told("midnight in the harbour") > told("noon")

    def row_32(self) -> None:
        for seed in range(5):
            assert isinstance(
                model(seed=seed, max_tokens=40).with_structured_output(None, method="json_mode").invoke(ASK), dict
            )

    def row_33(self) -> None:
        for seed in range(5):
            is_weather(
                model(seed=seed, max_tokens=60)
                .with_structured_output({"title": "weather", **WEATHER_RULES}, method="json_schema")
                .invoke(ASK)
            )

    def row_34(self) -> str:
        assert isinstance(model(max_tokens=80, seed=1).with_structured_output(Plan).invoke(ASK), Plan)
        return "tested with `with_structured_output` and a Pydantic class"

    def row_35(self) -> None:
        error = fault(openai.BadRequestError, model_kwargs={"response_format": shaped(UNIQUE_RULES)})
        assert "uniqueItems" in error.message

    def row_36(self) -> None:
        result = completer().generate(["The pilot asked"])
        assert result.generations[0][0].text and result.llm_output["token_usage"]["prompt_tokens"] > 0

    def row_37(self) -> None:
        prompts = ["The pilot asked", "def add("]
        found = completer(temperature=0, n=2).generate(prompts).generations
        single = [completer(temperature=0).invoke(prompt) for prompt in prompts]
        assert [[one.text for one in texts] for texts in found] == [[text, text] for text in single]

    def row_38(self) -> str:
        assert completer(extra_body={"prompt": tokens("The pilot asked")}).invoke("") == completer().invoke(
            "The pilot asked"
        )
        return "ids are passed in `extra_body`"

    def row_39(self) -> str:
        prompts = [tokens(text) for text in ("The pilot asked", "def add(")]
        found = completer(temperature=0, extra_body={"prompt": prompts}).generate(["", ""]).generations
        assert [texts[0].text for texts in found] == [
            completer(temperature=0, extra_body={"prompt": ids}).invoke("") for ids in prompts
        ]
        return "ids are passed in `extra_body`"

    def row_40(self) -> None:
        ids = middle("def add(a, b):\n", "\nadd(1, 2)")
        found = completer().generate(["def add(a, b):\n"], suffix="\nadd(1, 2)")
        assert found.generations[0][0].text == completer(extra_body={"prompt": ids}).invoke("")
        assert found.llm_output["token_usage"]["prompt_tokens"] == len(ids)

    def row_41(self) -> None:
        def told(prompt: str = "The pilot asked", *, echo: bool = False, **asked: Any) -> tuple[str, Any]:
            choice = completer(**asked).generate([prompt], echo=echo).generations[0][0]
            return choice.text, choice.generation_info["logprobs"]

        is_scored(*told(echo=True, logprobs=2, max_tokens=0), "The pilot asked", 2)
        is_scored_as_said(
            lambda seed: told(seed=seed, logprobs=0, max_tokens=1),
            lambda prompt: told(prompt, echo=True, logprobs=0, max_tokens=0)[1],
        )

    def row_42(self) -> str:
        assert "".join(completer().stream("The pilot asked", echo=True)) == "The pilot asked" + completer().invoke(
            "The pilot asked"
        )
        return "the client streams text as plain strings, without a finish reason or token counts"

    def row_43(self) -> None:
        assert "served: nano, other, judge" in fault(openai.NotFoundError, model="gpt-none").message

    def row_44(self) -> None:
        assert fault(openai.BadRequestError, messages=[]).param == "messages"

    def row_45(self) -> None:
        assert fault(openai.BadRequestError, temperature=-1).param == "temperature"

    def row_46(self) -> None:
        error = fault(openai.BadRequestError, messages=[("user", "ab " * 3000)])
        assert error.code == "context_length_exceeded" and "2048" in error.message
        assert chat().content

    def row_47(self) -> None:
        for rules in BAD_RULES:
            fault(openai.BadRequestError, model_kwargs={"response_format": shaped(rules)})

    def row_48(self) -> None:
        for key in WRONG_KEYS:
            fault(openai.AuthenticationError, api_key=key)
        assert chat().content

    def row_49(self) -> None:
        with long_streams(40) as close:
            error = fault(openai.RateLimitError)
            assert int(error.response.headers["retry-after"]) >= 1 and error.code == "queue_full"
            with soon(close):
                assert chat(max_retries=PATIENCE).content
        falls_idle()


if __name__ == "__main__":
    run(Rows(), ABSENT)
