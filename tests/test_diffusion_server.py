"""A masked-diffusion model behind the API: chat like other models', its canvases on request, and a refusal for what
it cannot do.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.diffusion import files
from pipeline.diffusion.sampling import CANVAS, Denoising, denoise
from pipeline.serve.models import never_said
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer
from tests.server import Running, random_model, save_models, serving

pytestmark = pytest.mark.slow
TALK = [{"role": "user", "content": "Add two numbers"}]
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(byte_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder, byte_tokenizer)
    files.save(folder / "masked", files.from_causal(random_model(byte_tokenizer), byte_tokenizer), byte_tokenizer, {})
    with serving([folder / "nano", folder / "masked"], log=folder / "log") as running:
        yield running


def asked(server: Running, path: str = PATH, **body: Any) -> httpx.Response:
    return httpx.post(
        server.url + path, json={"model": "masked", "messages": TALK, "temperature": 0} | body, timeout=60
    )


def streamed(server: Running, **body: Any) -> list[dict[str, Any]]:
    lines = asked(server, stream=True, **body).text.splitlines()
    assert lines[-2] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def test_it_is_listed_as_what_it_is(server: Running) -> None:
    kinds = {one["id"]: one["meta"]["kind"] for one in httpx.get(f"{server.url}/v1/models").json()["data"]}
    assert kinds == {"nano": "causal", "masked": "diffusion"}


def test_an_answer_is_what_the_sampler_uncovers(server: Running, byte_tokenizer: Tokenizer) -> None:
    model = files.from_causal(random_model(byte_tokenizer), byte_tokenizer)
    model.traits = replace(model.traits, banned=tuple({*model.traits.banned, *never_said(byte_tokenizer)}))
    prompt = chat.render(byte_tokenizer, TALK, generation_prompt=True).ids
    expected = denoise(model, [prompt], Denoising(length=CANVAS, steps=CANVAS), [0])[0]
    found = asked(server, max_completion_tokens=40, return_token_ids=True, seed=7).json()
    assert found["choices"][0]["token_ids"] == expected.ids[:40]
    assert found["usage"]["prompt_tokens"] == len(prompt) and found["usage"]["completion_tokens"] == len(
        expected.ids[:40]
    )
    assert found["choices"][0]["finish_reason"] == ("length" if len(expected.ids) >= 40 else "stop")


def test_a_stream_tells_each_step_where_it_is_asked_to(server: Running) -> None:
    body: dict[str, Any] = {"max_completion_tokens": 30, "seed": 3, "temperature": 1.0}
    whole = asked(server, **body).json()["choices"][0]["message"]["content"]
    plain = streamed(server, **body)
    shown = streamed(server, **body, stream_options={"include_denoising": True})
    assert not [chunk for chunk in plain if "denoising" in chunk]
    frames = [chunk["denoising"] for chunk in shown if "denoising" in chunk]
    assert [frame["step"] for frame in frames] == list(range(1, len(frames) + 1))
    assert all(
        frame["steps"] == CANVAS and frame["offset"] == frame["index"] == 0 and len(frame["tokens"]) == CANVAS
        for frame in frames
    )
    for chunks in (plain, shown):
        said = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
        assert said == whole


def test_several_answers_differ_by_their_seeds(server: Running) -> None:
    choices = asked(server, n=3, temperature=1.0, seed=1, max_completion_tokens=20).json()["choices"]
    assert len({one["message"]["content"] for one in choices}) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprobs", True),
        ("logit_bias", {"5": 1}),
        ("top_k", 5),
        ("ignore_eos", True),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(server: Running, name: str, value: Any) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    answer = asked(server, **({"tools": tools} if name == "tool_choice" else {}), **{name: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == name and f"{name}: not supported by a masked-diffusion model" in error["message"]


def test_only_it_has_canvases_and_completions_are_not_for_it(server: Running) -> None:
    answer = asked(server, model="nano", stream=True, stream_options={"include_denoising": True})
    assert answer.status_code == 400 and "'nano' is a causal model" in answer.json()["error"]["message"]
    body = {"prompt": "a", "stream": True, "stream_options": {"include_denoising": True}}
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": "nano"} | body)
    assert answer.status_code == 400 and "masked-diffusion models have canvases" in answer.json()["error"]["message"]
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": "masked", "prompt": "a"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "wrong_kind"


def test_a_stop_ends_it_and_its_row_is_free(server: Running) -> None:
    whole = asked(server, max_completion_tokens=60).json()["choices"][0]["message"]["content"]
    stop = whole[len(whole) // 2 :][:1]
    found = asked(server, max_completion_tokens=60, stop=stop).json()["choices"][0]
    assert found["message"]["content"] == whole[: whole.index(stop)] and found["finish_reason"] == "stop"
    assert server.falls_idle()
    assert 'stagecoach:generation_tokens_total{model_name="masked"}' in httpx.get(f"{server.url}/metrics").text


def test_a_log_of_the_server_has_no_fault(server: Running) -> None:
    assert "Traceback" not in Path(server.log).read_text()
