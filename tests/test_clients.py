"""What OpenAI's own Python client gets from a real server: the rows of docs/clients.md, by number.

The model is untrained, so what it says means nothing; what is tested holds for any weights.
"""

import itertools

import openai
import pytest

from pipeline.text.tokenizer import Tokenizer
from tests.clients import ASK, TIME, chat
from tests.server import Running

pytestmark = pytest.mark.slow  # starts its own server

# -- models ------------------------------------------------------------------------------------------------------------


def test_01_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["nano", "other", "judge"]


def test_02_a_model_is_retrieved(client: openai.OpenAI) -> None:
    model = client.models.retrieve("nano")
    assert model.id == "nano" and model.object == "model"
    assert (
        model.model_extra
        and model.model_extra["meta"]["kind"] == "causal"
        and model.model_extra["meta"]["context"] == 2048
    )


def test_03_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("gpt-4o")
    assert error.value.code == "model_not_found" and "nano" in error.value.message


# -- chat --------------------------------------------------------------------------------------------------------------


def test_04_an_answer_has_the_fields_of_the_openai_api(client: openai.OpenAI) -> None:
    answer = chat(client)
    choice = answer.choices[0]
    assert (
        answer.object == "chat.completion"
        and answer.id.startswith("chatcmpl-")
        and answer.system_fingerprint.startswith("fp_")
    )
    assert choice.index == 0 and choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens and 0 < usage.completion_tokens <= 12


def test_05_a_developer_message_is_treated_as_a_system_message(client: openai.OpenAI) -> None:
    told = [chat(client, messages=[{"role": role, "content": "Be short."}, *ASK]) for role in ("system", "developer")]
    assert told[0].choices[0].message.content == told[1].choices[0].message.content
    assert told[0].usage.prompt_tokens == told[1].usage.prompt_tokens > chat(client).usage.prompt_tokens


def test_06_chunks_arrive_in_order(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True))
    assert len({chunk.id for chunk in chunks}) == 1 and {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason in ("stop", "length") and chunks[-1].choices[0].delta.content is None
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == chat(client).choices[0].message.content
    assert all(chunk.usage is None for chunk in chunks), "counts come only if asked for"


def test_07_usage_comes_last_if_requested(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage == chat(client, prompt_cache_key="x").usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_08_three_answers_differ_and_stream_concurrently(client: openai.OpenAI) -> None:
    whole = [choice.message.content for choice in chat(client, n=3).choices]
    assert len(set(whole)) == 3
    pieces = ["", "", ""]
    for chunk in chat(client, n=3, stream=True):
        pieces[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert pieces == whole


def test_09_the_same_seed_gives_the_same_text(client: openai.OpenAI) -> None:
    assert chat(client).choices[0].message.content == chat(client).choices[0].message.content
    assert len({chat(client, seed=seed).choices[0].message.content for seed in range(4)}) == 4
    assert len({chat(client, seed=None).choices[0].message.content for _ in range(3)}) == 3, (
        "without a seed: another each time"
    )


def test_10_a_seeded_answer_does_not_depend_on_seven_concurrent_ones(server: Running, client: openai.OpenAI) -> None:
    alone = chat(client, max_tokens=40).choices[0].message.content
    neighbors = [  # long enough that the first is still speaking when the last begins
        chat(client, seed=100 + n, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}) for n in range(7)
    ]
    for stream in neighbors:
        next(iter(stream))
    assert server.reaches(7)
    assert chat(client, max_tokens=40).choices[0].message.content == alone
    for stream in neighbors:
        stream.close()


def test_11_temperature_zero_is_greedy(client: openai.OpenAI) -> None:
    answers = [chat(client, temperature=0, seed=seed, logprobs=True, top_logprobs=1) for seed in (1, 2)]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    for entry in answers[0].choices[0].logprobs.content:
        assert entry.logprob == entry.top_logprobs[0].logprob


def test_12_a_stop_string_ends_the_answer_and_is_left_out(client: openai.OpenAI) -> None:
    text = chat(client, max_tokens=60, extra_body={"ignore_eos": True}).choices[0].message.content
    stop = text[20:22]
    choice = chat(client, max_tokens=60, stop=stop, extra_body={"ignore_eos": True}).choices[0]
    assert choice.message.content == text[: text.index(stop)] and choice.finish_reason == "stop"


def test_13_a_stop_string_of_many_tokens_is_also_found_in_a_stream(client: openai.OpenAI) -> None:
    text = chat(client, max_tokens=60, extra_body={"ignore_eos": True}).choices[0].message.content
    stop = text[10:25]
    chunks = chat(client, max_tokens=60, stop=["never said", stop], stream=True, extra_body={"ignore_eos": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text[: text.index(stop)]


def test_14_finish_reason_is_length_if_tokens_run_out(client: openai.OpenAI) -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        answer = chat(client, **{"max_tokens": 50, field: 3}, extra_body={"ignore_eos": True})
        assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 3


def test_15_logprobs_are_those_of_the_returned_tokens(client: openai.OpenAI) -> None:
    choice = chat(client, logprobs=True).choices[0]
    content = choice.logprobs.content
    assert (
        bytes(itertools.chain(*(entry.bytes for entry in content))).decode("utf-8", "replace") == choice.message.content
    )
    assert all(entry.logprob <= 0 and entry.top_logprobs == [] for entry in content)
    told = [chunk.choices[0].logprobs for chunk in chat(client, logprobs=True, stream=True)]
    streamed = [entry.logprob for logprobs in told if logprobs for entry in logprobs.content]
    assert streamed == pytest.approx([entry.logprob for entry in content], abs=1e-4)


def test_16_twenty_alternatives_are_sorted(client: openai.OpenAI) -> None:
    for entry in chat(client, logprobs=True, top_logprobs=20).choices[0].logprobs.content:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 20 and values == sorted(values, reverse=True)


def test_17_logit_bias_forces_and_forbids_tokens(client: openai.OpenAI, byte_tokenizer: Tokenizer) -> None:
    token = byte_tokenizer.encode("z")[0]
    assert chat(client, logit_bias={str(token): 100}, max_tokens=5).choices[0].message.content == "zzzzz"
    text = chat(client, temperature=0, max_tokens=1).choices[0].message.content
    first = byte_tokenizer.encode(text)[0]
    assert chat(client, temperature=0, max_tokens=1, logit_bias={str(first): -100}).choices[0].message.content != text


def test_18_an_emoji_is_streamed_whole(client: openai.OpenAI, byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("🚂🌊")
    assert len(ids) > 4, "its bytes are tokens"
    answer = client.completions.create(model="nano", prompt=ids, echo=True, max_tokens=0)
    assert answer.choices[0].text == "🚂🌊"
    pieces = [
        chunk.choices[0].delta.content or ""
        for seed in range(8)
        for chunk in chat(client, stream=True, seed=seed, max_tokens=40)
    ]
    wholes = [chat(client, seed=seed, max_tokens=40).choices[0].message.content for seed in range(8)]
    assert "".join(pieces) == "".join(wholes), "no piece broke a character that the whole text has"


def test_19_content_in_parts_is_joined(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Which way would "}, {"type": "text", "text": "the ferry go?"}]
    assert (
        chat(client, messages=[{"role": "user", "content": parts}]).choices[0].message
        == chat(client).choices[0].message
    )


def test_20_null_content_beside_calls_is_accepted(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    turns = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    assert chat(client, messages=turns, tools=[TIME], tool_choice="none").choices[0].message.content


def test_21_a_repeated_prompt_is_counted_as_cached(client: openai.OpenAI) -> None:
    turns = [{"role": "user", "content": "A prompt that nobody else has asked, long enough to be kept: 1 2 3 4 5."}]
    first, second = (chat(client, messages=turns).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens < 20
    assert second.prompt_tokens_details.cached_tokens == second.prompt_tokens - 1


def test_22_closing_a_stream_frees_its_slot(server: Running, client: openai.OpenAI) -> None:
    stream = chat(client, stream=True, max_tokens=1900, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert server.reaches(1)
    stream.close()
    assert server.falls_idle()
