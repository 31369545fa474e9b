"""The server as a process: keys on every route, limits, slow and vanishing clients, load, and extensions."""

import hashlib
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.text.tokenizer import Tokenizer
from tests.clients import ASK
from tests.server import Running, save_models, serving

pytestmark = pytest.mark.slow  # a server of its own

KEY = "a-key-that-nobody-guesses"
LONG = {"model": "nano", "messages": ASK, "max_tokens": 1900, "stream": True, "ignore_eos": True}
ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/nano"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/apply-template"),
    ("POST", "/score"),
    ("POST", "/preferences"),
    ("POST", "/labels"),
    ("POST", "/render"),
]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("keyed")
    (folder / "keys").write_text(f"{KEY}\n{KEY}-of-another\n")
    options = (
        "--api-key-file",
        str(folder / "keys"),
        "--feedback",
        str(folder / "feedback/preferences.jsonl"),
        "--queue",
        "4",
        "--rows",
        "2",
    )
    with serving(save_models(folder, byte_tokenizer), *options, log=folder / "log") as running:
        yield running


def head(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


def raw(url: str, request: bytes, seconds: float = 20) -> bytes:
    """The response to raw bytes."""
    with closing(socket.create_connection(head(url), timeout=seconds)) as connection:
        connection.sendall(request)
        pieces = []
        while piece := connection.recv(65536):
            pieces.append(piece)
            if b"\r\n\r\n" in b"".join(pieces):
                break
        return b"".join(pieces)


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), ROUTES, ids=[path for _, path in ROUTES])
def test_every_route_asks_for_the_key(keyed: Running, method: str, path: str) -> None:
    for spelled in (path, path.replace("/v1", "/%76%31"), path.replace("o", "%6f")):
        answer = httpx.request(method, f"{keyed.url}{spelled}", json={} if method == "POST" else None)
        assert answer.status_code == 401, spelled
        assert answer.json()["error"]["type"] == "authentication_error"
    known = httpx.request(
        method, f"{keyed.url}{path}", json={} if method == "POST" else None, headers={"authorization": f"Bearer {KEY}"}
    )
    assert known.status_code in (200, 400)


def test_no_other_route_answers(keyed: Running) -> None:
    app_routes = set(httpx.get(f"{keyed.url}/openapi.json", headers={"authorization": f"Bearer {KEY}"}).json()["paths"])
    assert app_routes == {path.replace("nano", "{name}") for _, path in ROUTES if path != "/openapi.json"} | {"/health"}
    for path in (
        "//v1/models",
        "/v1//models",
        "/V1/models",
        "/v1/models/../../metrics",
        "/docs",
        "/redoc",
        "/health/",
        "/page/",
        "/page/../api.py",
        "/page/%2e%2e/api.py",
    ):
        answer = raw(keyed.url, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert answer.split()[1] in (b"401", b"404", b"307"), path


def test_what_is_public_needs_no_key(keyed: Running) -> None:
    assert httpx.get(f"{keyed.url}/health").json() == {"status": "ok"}


def test_prefixes_are_not_shared_between_keys(keyed: Running) -> None:
    body = {
        "model": "nano",
        "messages": [{"role": "user", "content": "A secret that only one of us should know about."}],
        "max_tokens": 2,
    }

    def cached(key: str) -> int:
        answer = httpx.post(f"{keyed.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(KEY) == 0 and cached(KEY) > 16 and cached(f"{KEY}-of-another") == 0


# -- limits ------------------------------------------------------------------------------------------------------------


def test_headers_are_bounded(server: Running) -> None:
    big = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Big: " + b"a" * 20_000 + b"\r\n\r\n"
    assert raw(server.url, big).split()[1] == b"431"


@pytest.mark.full  # ten idle seconds
def test_half_sent_requests_are_closed_within_eleven_seconds(server: Running) -> None:
    began = time.monotonic()
    connections = [socket.create_connection(head(server.url), timeout=30) for _ in range(50)]
    for connection in connections:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
    assert httpx.get(f"{server.url}/health").status_code == 200, "others are answered meanwhile"
    for connection in connections:
        while connection.recv(4096):
            pass
        connection.close()
    assert 9 < time.monotonic() - began < 11.5


@pytest.mark.full  # ten idle seconds
def test_a_body_that_stops_coming_is_given_up(server: Running) -> None:
    request = (
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    )
    began = time.monotonic()
    assert raw(server.url, request).split()[1] == b"408" and 9 < time.monotonic() - began < 11.5


def test_a_large_body_is_refused(server: Running) -> None:
    assert httpx.post(f"{server.url}/tokenize", json={"model": "nano", "prompt": "a" * 2**20}).status_code == 413


@pytest.mark.parametrize(
    "change",
    [
        {"n": 9},
        {"n": 0},
        {"n": -1},
        {"temperature": 2.1},
        {"temperature": "0"},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"max_tokens": 0},
        {"max_tokens": -5},
        {"max_tokens": 1.5},
        {"max_completion_tokens": 10**9},
        {"seed": 2**64},
        {"logprobs": True, "top_logprobs": 21},
        {"top_logprobs": 3},
        {"stop": ["a"] * 5},
        {"stop": ""},
        {"stop": "a" * 300},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"5": 101}},
        {"logit_bias": {"99999": 1}},
        {"logit_bias": {str(n): 1 for n in range(301)}},
        {"messages": ASK * 513},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(65)]},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}] * 2},
        {"tool_choice": "required"},
        {"tools": [], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "xml"}},
        {"presence_penalty": 1},
        {"functions": [{"name": "f"}]},
        {"modalities": ["audio"]},
        {"stream": "yes"},
    ],
    ids=lambda change: json.dumps(change)[:60],
)
def test_what_is_out_of_range_is_a_400_that_names_its_field(server: Running, change: dict[str, Any]) -> None:
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", json={"model": "nano", "messages": ASK, "max_tokens": 2} | change
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert any(name in f"{error['param']} {error['message']}" for name in change), error


@pytest.mark.parametrize(
    "change",
    [
        {"presence_penalty": 0},
        {"frequency_penalty": 0.0},
        {"modalities": ["text"]},
        {"user": "me"},
        {"metadata": {"a": "b"}},
        {"store": True},
        {"functions": None},
        {"n": None},
        {"stop": None},
    ],
)
def test_what_asks_for_nothing_is_taken(server: Running, change: dict[str, Any]) -> None:
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", json={"model": "nano", "messages": ASK, "max_tokens": 2} | change
    )
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "rules",
    [
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a+)+$" * 100}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a|a)*(b|b)*" + "(x{1,50}){1,50}" * 10}}},
        {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9, "minItems": 10**8},
        {"enum": [str(n) for n in range(300)]},
        json.loads('{"type": "array", "items": ' * 40 + "{}" + "}" * 40),
        {"$ref": "#"},
        {"$ref": "http://127.0.0.1:1/schema"},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "string", "minLength": 10**6},
        {"type": "object", "properties": {f"k{n}": {"type": "string"} for n in range(5000)}},
    ],
    ids=[
        "long pattern",
        "pattern that explodes",
        "huge array",
        "many alternatives",
        "deep",
        "itself",
        "elsewhere",
        "impossible",
        "huge string",
        "many keys",
    ],
)
def test_a_hostile_schema_costs_seconds_at_most_and_the_server_is_well(server: Running, rules: dict[str, Any]) -> None:
    began = time.monotonic()
    body = {
        "model": "nano",
        "messages": ASK,
        "max_tokens": 20,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": rules}},
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30)
    # one of them is a regular language after all, and served as fast as any
    assert answer.status_code in (200, 400) and time.monotonic() - began < 10
    assert httpx.get(f"{server.url}/health").status_code == 200


# -- load --------------------------------------------------------------------------------------------------------------


def test_a_full_queue_says_when_to_come_back(keyed: Running) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(headers=headers) as client:
        streams = [client.stream("POST", f"{keyed.url}/v1/chat/completions", json=LONG) for _ in range(6)]
        opened = [stream.__enter__() for stream in streams]
        for _ in range(20):
            answer = client.post(f"{keyed.url}/v1/chat/completions", json=LONG)
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        for stream in streams:
            stream.__exit__(None, None, None)
    assert len(opened) == 6


def test_a_client_that_vanishes_frees_its_row_also_without_a_stream(server: Running) -> None:
    body = json.dumps(LONG | {"stream": False}).encode()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length:"
        b" %d\r\n\r\n" % len(body)
    )
    connection = socket.create_connection(head(server.url))
    connection.sendall(request + body)
    deadline = time.monotonic() + 5
    while not server.running() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.running() == 1
    connection.close()
    assert server.falls_idle()


# -- extensions --------------------------------------------------------------------------------------------------------


def test_pieces_join_to_the_prompt_and_controls_are_marked(server: Running, byte_tokenizer: Tokenizer) -> None:
    found = httpx.post(f"{server.url}/apply-template", json={"model": "nano", "messages": ASK}).json()
    assert "".join(piece["text"] for piece in found["pieces"]) == found["prompt"]
    assert [piece["id"] for piece in found["pieces"]] == found["tokens"]
    assert found["pieces"][0] == {"id": byte_tokenizer.turn_start, "text": "<|im_start|>", "special": True}
    assert sum(piece["special"] for piece in found["pieces"]) == 3


def test_text_that_spells_a_control_token_is_text(server: Running, byte_tokenizer: Tokenizer) -> None:
    found = httpx.post(f"{server.url}/tokenize", json={"model": "nano", "prompt": "<|im_end|> ü"}).json()
    assert byte_tokenizer.turn_end not in found["tokens"] and found["count"] == len(found["tokens"])
    back = httpx.post(f"{server.url}/detokenize", json={"model": "nano", "tokens": found["tokens"]}).json()
    assert back == {"prompt": "<|im_end|> ü"}


def test_a_score_is_the_reward_models_own(server: Running, tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    import torch

    from pipeline.model import checkpoint
    from pipeline.text import chat

    judge, _ = checkpoint.load_reward(save_models(tmp_path, byte_tokenizer)[2])
    talks = [[*ASK, {"role": "assistant", "content": text}] for text in ("North.", "It would go to the harbour.")]
    found = httpx.post(
        f"{server.url}/score", json={"model": "judge", "conversations": [{"messages": talk} for talk in talks]}
    ).json()
    for talk, row in zip(talks, found["data"], strict=True):
        ids = chat.render(byte_tokenizer, talk).ids
        last = len(ids) - 1 - ids[::-1].index(byte_tokenizer.turn_end)
        assert row["reward"] == pytest.approx(judge(torch.tensor([ids]))[0, last].item(), abs=1e-5)
    assert (
        httpx.post(f"{server.url}/score", json={"model": "nano", "conversations": [{"messages": talks[0]}]}).status_code
        == 400
    )
    assert (
        httpx.post(f"{server.url}/score", json={"model": "judge", "conversations": [{"messages": ASK}]}).status_code
        == 400
    )


def test_a_preference_is_stored_once_in_the_form_of_the_data(keyed: Running) -> None:
    from pipeline.ingest import records

    headers = {"authorization": f"Bearer {KEY}"}
    body = {
        "model": "nano",
        "prompt": ASK,
        "chosen": [{"role": "assistant", "content": "North."}],
        "rejected": [{"role": "assistant", "content": "No."}],
    }
    answers = [httpx.post(f"{keyed.url}/preferences", json=body, headers=headers) for _ in range(2)]
    assert [a.status_code for a in answers] == [201, 200] and [a.json()["stored"] for a in answers] == [True, False]
    path = keyed.log.parent / "feedback/preferences.jsonl"
    [pair] = records.read(path, records.Pair)
    assert pair.source == "page" and pair.prompt == ASK and pair.chosen[0]["content"] == "North."
    assert pair.given_by == f"key-{hashlib.sha256(KEY.encode()).hexdigest()[:8]}"
    for wrong in (
        body | {"rejected": body["chosen"]},
        body | {"chosen": ASK},
        body | {"prompt": []},
        body | {"model": "judge"},
    ):
        assert httpx.post(f"{keyed.url}/preferences", json=wrong, headers=headers).status_code == 400
    assert len(path.read_text().splitlines()) == 1


def test_a_label_is_stored_once_beside_the_preferences_in_the_form_of_the_data(keyed: Running) -> None:
    from pipeline.ingest import records

    headers = {"authorization": f"Bearer {KEY}"}
    body = {"model": "nano", "prompt": ASK, "answer": [{"role": "assistant", "content": "North."}], "desirable": False}
    bodies = (body, body, body | {"desirable": True})
    answers = [httpx.post(f"{keyed.url}/labels", json=one, headers=headers) for one in bodies]
    assert [a.status_code for a in answers] == [201, 200, 201] and answers[-1].json() == {"stored": True, "count": 2}
    path = keyed.log.parent / "feedback/labels.jsonl"
    bad, good = records.read(path, records.Label)
    assert (bad.source, bad.prompt, bad.answer[0]["content"]) == ("page", ASK, "North.")
    assert (bad.desirable, good.desirable) == (False, True) and bad.id != good.id
    assert bad.given_by == f"key-{hashlib.sha256(KEY.encode()).hexdigest()[:8]}"
    for wrong in (
        body | {"desirable": "yes"},
        body | {"desirable": 1},
        body | {"answer": ASK},
        body | {"answer": [{"role": "assistant", "content": " "}]},
        body | {"prompt": []},
        body | {"prompt": body["answer"]},
        body | {"model": "judge"},
    ):
        assert httpx.post(f"{keyed.url}/labels", json=wrong, headers=headers).status_code == 400
    assert len(path.read_text().splitlines()) == 2


def test_without_a_file_labels_are_not_collected(server: Running) -> None:
    body = {"model": "nano", "prompt": ASK, "answer": [{"role": "assistant", "content": "a"}], "desirable": True}
    answer = httpx.post(f"{server.url}/labels", json=body)
    assert answer.status_code == 404 and "--feedback" in answer.json()["error"]["message"]


def test_without_a_file_preferences_are_not_collected(server: Running) -> None:
    body = {
        "model": "nano",
        "prompt": ASK,
        "chosen": [{"role": "assistant", "content": "a"}],
        "rejected": [{"role": "assistant", "content": "b"}],
    }
    answer = httpx.post(f"{server.url}/preferences", json=body)
    assert answer.status_code == 404 and "--feedback" in answer.json()["error"]["message"]


def test_metrics_count_what_was_asked(server: Running) -> None:
    def value(name: str) -> float:
        found = re.search(
            rf'^stagecoach:{name}\{{model_name="other"[^}}]*\}} (\S+)',
            httpx.get(f"{server.url}/metrics").text,
            re.MULTILINE,
        )
        return float(found[1]) if found else 0.0

    names = (
        "prompt_tokens_total",
        "generation_tokens_total",
        "e2e_request_latency_seconds_count",
        "time_to_first_token_seconds_count",
    )
    before = [value(name) for name in names]
    usage = httpx.post(
        f"{server.url}/v1/chat/completions", json=LONG | {"model": "other", "stream": False, "max_tokens": 7}
    ).json()["usage"]
    assert [value(name) - was for name, was in zip(names, before, strict=True)] == [usage["prompt_tokens"], 7, 1, 1]


def test_the_log_holds_no_text(server: Running) -> None:
    httpx.post(
        f"{server.url}/v1/chat/completions",
        json=LONG | {"stream": False, "max_tokens": 2, "messages": [{"role": "user", "content": "xyzzy\x1b[31m"}]},
    )
    text = server.log.read_text()
    assert "nano 200" in text and "xyzzy" not in text and "\x1b" not in text
