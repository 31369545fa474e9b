"""What one client asks for must not cost the others their answers: hostile schemas, texts, prompts and bodies, each
sent to a real server.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pipeline.text.tokenizer import Tokenizer
from tests.clients import ASK
from tests.server import Running, save_models, serving

pytestmark = pytest.mark.slow  # a server of its own

KEY, OTHER = "a-key-that-nobody-guesses", "another-key-of-some-length"
CHAT = {"model": "nano", "messages": ASK, "max_tokens": 4, "ignore_eos": True}
AT_MOST, TIMES = (
    2.0,
    40,
)  # most seconds for a plain answer during an attack (usually milliseconds), or this multiple of a quiet answer
GROWTH = 80  # MiB by which others' requests may grow the server
PRIMES = [(9973, 9967), (9949, 9941), (9931, 9929)]
HOSTILE = [{"type": "integer", "multipleOf": 9999991 + n} for n in range(12)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("shared")
    (folder / "keys").write_text(f"{KEY}\n{OTHER}\n")
    options = ("--api-key-file", str(folder / "keys"))
    with serving(save_models(folder, byte_tokenizer), *options, log=folder / "log") as running:
        ask(running, CHAT)
        yield running


def ask(server: Running, body: Any, key: str = KEY, path: str = "/v1/chat/completions") -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)


def shaped(rules: Any, **more: Any) -> dict[str, Any]:
    return (
        CHAT
        | {"ignore_eos": False, "response_format": {"type": "json_schema", "json_schema": {"schema": rules}}}
        | more
    )


def memory(server: Running) -> float:
    """Resident memory of the server's processes, in MiB."""
    family = psutil.Process(server.process.pid)
    total = 0
    for process in (family, *family.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 2**20


def beside(attack: list[Callable[[], httpx.Response]], server: Running) -> tuple[list[httpx.Response], list[float]]:
    """Send an attack all at once; returns its answers, and how long plain answers to the other key took meanwhile.

    Times are scaled to a quiet machine, because other tests may slow this one down.
    """
    quiet = []
    for _ in range(5):
        began = time.monotonic()
        ask(server, CHAT)
        quiet.append(time.monotonic() - began)
    slower = max(1.0, sorted(quiet)[2] * TIMES / AT_MOST)
    heard: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda one=one: heard.append(one())) for one in attack]
    for thread in threads:
        thread.start()
    seconds = []
    while any(thread.is_alive() for thread in threads) or len(seconds) < 3:
        began = time.monotonic()
        answer = ask(server, CHAT)
        seconds.append(time.monotonic() - began)
        assert answer.status_code == 200, answer.text
    return heard, [one / slower for one in seconds]


def test_a_schema_that_compiles_for_minutes_stalls_nobody(shared: Running) -> None:
    before = memory(shared)
    heard, seconds = beside([lambda one=one: ask(shared, shaped(one), OTHER) for one in HOSTILE], shared)
    assert {answer.status_code for answer in heard} <= {400, 429}, [answer.text for answer in heard]
    assert max(seconds) < AT_MOST and memory(shared) - before < GROWTH


def test_a_schema_that_no_bound_catches_is_killed_and_others_compile(shared: Running) -> None:
    """Each multiple is within its bound; together they make an automaton of a hundred million states."""
    hostile = [{"allOf": [{"type": "integer", "multipleOf": one} for one in pair]} for pair in PRIMES]
    before = memory(shared)
    heard, seconds = beside([lambda one=one: ask(shared, shaped(one), OTHER) for one in hostile], shared)
    assert {answer.status_code for answer in heard} <= {400, 429}, [answer.text for answer in heard]
    assert max(seconds) < AT_MOST and memory(shared) - before < GROWTH
    small = shaped({"type": "integer", "minimum": 0, "maximum": 9})
    assert ask(shared, small).json()["choices"][0]["message"]["content"].isdigit()


def test_texts_that_render_slowly_stall_nobody(shared: Running) -> None:
    before, text = memory(shared), "[" * 49_000
    heard, seconds = beside([lambda: ask(shared, {"markdown": text}, OTHER, "/render")] * 12, shared)
    assert {answer.status_code for answer in heard} <= {200, 400, 429}
    assert max(seconds) < AT_MOST and memory(shared) - before < GROWTH
    assert ask(shared, {"markdown": "**a**"}, path="/render").json()["html"].strip() == "<p><strong>a</strong></p>"


def test_prompts_that_are_scored_stall_nobody(shared: Running) -> None:
    before = memory(shared)
    body = {
        "model": "nano",
        "prompt": [[n] * 1900 for n in range(20, 28)],
        "max_tokens": 0,
        "echo": True,
        "logprobs": 5,
    }
    heard, seconds = beside([lambda: ask(shared, body, OTHER, "/v1/completions")] * 24, shared)
    assert {answer.status_code for answer in heard} <= {200, 429} and 200 in {answer.status_code for answer in heard}
    assert max(seconds) < AT_MOST and memory(shared) - before < GROWTH


def test_bodies_without_a_key_are_not_read(shared: Running) -> None:
    body = b'{"model": "nano", "prompt": [' + b"[]," * 340_000 + b"[]]}"
    headers = {"content-type": "application/json"}

    def post() -> httpx.Response:
        return httpx.post(f"{shared.url}/v1/completions", content=body, headers=headers, timeout=60)

    before = memory(shared)
    heard, seconds = beside([post] * 8, shared)
    assert {answer.status_code for answer in heard} <= {401, 429} and max(seconds) < AT_MOST
    assert memory(shared) - before < GROWTH


def test_a_body_of_many_mistakes_costs_its_sender_alone(shared: Running) -> None:
    body = {"model": "nano", "prompt": [[]] * 250_000}
    heard, seconds = beside([lambda: ask(shared, body, OTHER, "/v1/completions")] * 4, shared)
    assert {answer.status_code for answer in heard} <= {400, 429} and max(seconds) < AT_MOST
    assert all(len(answer.content) < 1000 for answer in heard)


def test_the_key_is_asked_for_before_a_byte_of_the_body_has_come(shared: Running) -> None:
    address, port = shared.url.removeprefix("http://").split(":")
    with closing(socket.create_connection((address, int(port)), timeout=5)) as connection:
        connection.sendall(
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length:"
            b" 1000000\r\n\r\n"
        )
        assert connection.recv(4096).split()[1] == b"401"


@pytest.mark.parametrize("place", ["whole", "property", "items", "call"])
@pytest.mark.parametrize(
    "rules",
    [
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "number", "minimum": 5, "maximum": 3},
        {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1},
        {"type": "number", "minimum": 1, "exclusiveMaximum": 1},
        {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
        {"type": "integer", "minimum": 0.2, "maximum": 0.8},
        {"type": "integer", "minimum": 4, "maximum": 5, "multipleOf": 3},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "array", "minItems": 3, "maxItems": 2},
        {"type": "number", "minimum": 1e300},
        {"type": "number", "maximum": -1e300},
        {"type": "integer", "minimum": -1e300, "maximum": -(2**63)},
        {"type": "number", "minimum": 1e400},
    ],
    ids=lambda rules: json.dumps(rules)[:60],
)
def test_an_empty_or_endless_range_is_a_400(shared: Running, rules: dict[str, Any], place: str) -> None:
    whole = {"type": "object", "properties": {"a": rules}, "required": ["a"]}
    call = {"type": "function", "function": {"name": "f", "parameters": whole}}
    body = {
        "whole": shaped(rules),
        "property": shaped(whole),
        "items": shaped({"type": "array", "items": rules, "minItems": 1}),
        "call": CHAT | {"ignore_eos": False, "tools": [call], "tool_choice": "required"},
    }[place]
    content = json.dumps(body | {"max_tokens": 60}).replace("Infinity", "1e400")
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    answer = httpx.post(f"{shared.url}/v1/chat/completions", content=content, headers=headers, timeout=30)
    assert answer.status_code == 400 and "invalid_request_error" in answer.text, answer.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-46, 9e-6])
def test_a_temperature_that_no_float_holds_is_greedy(shared: Running, path: str, temperature: float) -> None:
    prompt = {"messages": ASK} if "chat" in path else {"prompt": "The pilot"}
    bodies = [
        {"model": "nano", "max_tokens": 20, "temperature": value, "seed": 1} | prompt for value in (0, temperature)
    ]
    greedy, cold = (ask(shared, body, path=path).json()["choices"] for body in bodies)
    assert greedy == cold


def test_the_log_has_no_fault(shared: Running) -> None:
    assert "Traceback" not in Path(shared.log).read_text()
