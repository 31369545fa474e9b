"""The guard: each row of the table of attacks that it withstands, tested in process."""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.run.errors import ConfigError
from pipeline.serve import guard
from pipeline.serve.guard import Guard, Keys, ParsedRoute, Rates, cost
from pipeline.serve.protocol import ApiFault

KEY = "a-key-that-nobody-guesses"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with what it was sent."""
    body = (await receive()).get("body", b"") if scope["method"] == "POST" else b""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": body})


def ask(app: Any, method: str = "GET", **named: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8000") as client:
            return await client.request(method, "/x", **named)

    return asyncio.run(run())


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "127.0.0.1:1", "[::1]", "[::1]:8000", "LOCALHOST", "models.example:443"]
)
def test_our_own_hosts_are_answered(host: str) -> None:
    assert ask(Guard(echo, hosts=["models.example"]), headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "evil.example:localhost",
        "localhost@evil.example",
        "127.0.0.1.nip.io",
        "",
        "[::1",
        "::1",
        "127.1",
        "localhost:8000:1",
        "localhost:x",
    ],
)
def test_any_other_host_is_misdirected(host: str) -> None:
    answer = ask(Guard(echo), headers={"host": host})
    assert answer.status_code == 421 and answer.json()["error"]["code"] == "host_not_allowed"


def test_two_hosts_are_none() -> None:
    assert ask(Guard(echo), headers=[("host", "localhost"), ("host", "evil.example")]).status_code == 421


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "http://localhost:9000",
        "https://localhost:8000",
        "http://localhost:8000.evil.example",
    ],
)
def test_pages_of_other_origins_may_not_ask(origin: str) -> None:
    answer = ask(Guard(echo), headers={"origin": origin})
    assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers


def test_our_own_page_and_allowed_origins_may_ask() -> None:
    assert ask(Guard(echo), headers={"origin": "http://localhost:8000"}).status_code == 200
    door = Guard(echo, origins=["https://app.example"])
    answer = ask(door, headers={"origin": "https://app.example"})
    assert answer.headers["access-control-allow-origin"] == "https://app.example" and answer.headers["vary"] == "origin"
    before = ask(door, "OPTIONS", headers={"origin": "https://app.example", "access-control-request-method": "POST"})
    assert before.status_code == 204 and "authorization" in before.headers["access-control-allow-headers"]
    assert ask(door, "OPTIONS", headers={"origin": "https://other.example"}).status_code == 403


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "application/jsonp"],
)
def test_what_a_form_can_send_is_not_read(kind: str) -> None:
    assert ask(Guard(echo), "POST", content=b"{}", headers={"content-type": kind}).status_code == 415


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
def test_json_is_read_and_handed_on_as_it_came(kind: str) -> None:
    answer = ask(Guard(echo), "POST", content=b'{"a":  1}', headers={"content-type": kind})
    assert answer.status_code == 200 and answer.content == b'{"a":  1}'


BAD = {
    "cut": b'{"a": 1',
    "not UTF-8": b'"\xff"',
    "a constant": b'{"a": NaN}',
    "an infinity": b"[-Infinity]",
    "half a character": b'"\\ud800"',
    "half a character in a key": b'{"\\udfff": 1}',
    "too deep": b"[" * 200_000 + b"]" * 200_000,
    "empty": b"",
    "a number of ten thousand digits": b"1" * 10_000,
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD.keys())
def test_what_is_not_json_is_a_400_that_does_not_repeat_it(body: bytes) -> None:
    answer = ask(Guard(echo), "POST", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json" and len(answer.content) < 300


def test_a_body_above_a_mebibyte_is_not_read_whatever_it_says_of_its_length() -> None:
    big = json.dumps("x" * 2**20).encode()
    assert ask(Guard(echo), "POST", content=big, headers={"content-type": "application/json"}).status_code == 413
    taken = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(100):
            taken += 1
            yield b" " * 2**17

    async def run() -> httpx.Response:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": await anext(stream), "more_body": True}

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        stream = pieces()
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/x",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }
        await Guard(echo)(scope, receive, send)
        return sent[0]["status"]

    assert asyncio.run(run()) == 413 and taken == 9


def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MOST_SECONDS", 0.05)

    async def run() -> int:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(60)
            raise AssertionError

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/x",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }
        await Guard(echo)(scope, receive, send)
        return sent[0]["status"]

    assert asyncio.run(run()) == 408


def test_every_answer_has_the_policy_and_an_id() -> None:
    for answer in (ask(Guard(echo)), ask(Guard(echo), headers={"host": "evil.example"})):
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["x-request-id"].startswith(
            "req-"
        )


def posted(door: Guard, headers: list[tuple[bytes, bytes]], path: str = "/x") -> tuple[int, int]:
    """The status of a post, and how often its body was asked for."""
    asked, sent = 0, list[Any]()

    async def receive() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    given = [(b"host", b"localhost"), (b"content-type", b"application/json"), *headers]
    scope = {"type": "http", "method": "POST", "path": path, "headers": given, "client": ("10.0.0.1", 1)}
    asyncio.run(door(scope, receive, send))
    return sent[0]["status"], asked


@pytest.mark.parametrize("path", ["/x", "/health", "/", "/page/x.js", "//v1", "/%76%31/models"])
def test_nothing_of_a_body_is_read_before_the_key_is_known_whatever_the_path(path: str) -> None:
    door = Guard(echo, keys=Keys([KEY]))
    assert posted(door, [], path) == (401, 0)
    assert posted(door, [(b"authorization", b"Bearer wrong")], path) == (401, 0)
    assert posted(door, [(b"authorization", f"Bearer {KEY}".encode())], path) == (200, 1)


def test_a_body_is_parsed_once_and_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi import APIRouter, FastAPI, Request
    from pydantic import BaseModel

    class Body(BaseModel):
        a: int

    app, routes = FastAPI(), APIRouter(route_class=ParsedRoute)

    @routes.post("/x")
    async def route(body: Body, request: Request) -> dict[str, int]:
        return {"a": body.a}

    app.include_router(routes)
    parsed = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda *given, **named: (parsed.append(given[0]), loads(*given, **named))[1])
    answer = ask(Guard(app), "POST", content=b'{"a": 17}', headers={"content-type": "application/json"})
    assert answer.content == b'{"a":17}' and len(parsed) == 1


def test_who_asks_for_too_much_waits_and_others_do_not() -> None:
    now = [0.0]
    rates = Rates(2.0, clock=lambda: now[0])  # allows ten at once
    door = Guard(echo, keys=Keys([KEY, KEY + "2"]), rates=rates)
    key, other = ([(b"authorization", f"Bearer {name}".encode())] for name in (KEY, KEY + "2"))
    assert [posted(door, key)[0] for _ in range(11)] == [200] * 10 + [429]
    assert posted(door, key) == (429, 0), "its body is not read"
    assert [posted(door, [])[0] for _ in range(11)] == [401] * 10 + [429]
    assert posted(door, other)[0] == 200
    now[0] += 0.5
    assert [posted(door, key)[0] for _ in range(2)] == [200, 429]


def test_a_large_body_costs_more_said_or_not() -> None:
    assert [cost(length) for length in (0, 16 * 1024, 2**20)] == [1, 2, 65]
    now = [0.0]
    door = Guard(echo, rates=Rates(20.0, clock=lambda: now[0]))
    length = [(b"content-length", str(2**20 - 1).encode())]
    assert [posted(door, length)[0] for _ in range(2)] == [200, 429]
    assert posted(door, [(b"content-length", b"9" * 5000)])[0] in (413, 429)


def test_who_finds_no_room_and_comes_again_at_once_is_refused_at_the_door() -> None:
    async def full(scope: Any, receive: Any, send: Any) -> None:
        await ApiFault(429, "full", code="queue_full", retry=1).response()(scope, receive, send)

    now = [0.0]
    door = Guard(full, rates=Rates(10.0, clock=lambda: now[0]))  # allows fifty at once
    assert [posted(door, []) for _ in range(6)] == [(429, 1)] * 5 + [(429, 0)]
    now[0] += 1
    assert [posted(door, [])[1] for _ in range(2)] == [1, 0]


def test_buckets_fill_and_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.serve.guard.MOST_BUCKETS", 3)
    now = [0.0]
    rates = Rates(1.0, clock=lambda: now[0])
    assert [rates.take("a", 4) for _ in range(2)] == [0, 3]
    now[0] = 3
    assert rates.take("a", 4) == 0 and rates.take("a", 1) == 1
    assert rates.take("b", 100) == 0, "what costs more than a bucket holds takes a full one"
    for name in "cde":
        rates.take(name, 1)
    assert rates.take("a", 5) == 0


# -- keys --------------------------------------------------------------------------------------------------------------


def request(*values: str) -> Any:
    from starlette.requests import Request

    return Request({"type": "http", "headers": [(b"authorization", value.encode()) for value in values]})


def test_without_keys_everybody_is_nobody() -> None:
    assert Keys([]).owner(request()) == "" and not Keys([])


def test_a_key_is_known_and_two_keys_are_two_owners() -> None:
    keys = Keys([KEY, "another-key-of-some-length"])
    owners = {
        keys.owner(request(f"{kind} {key}"))
        for kind in ("Bearer", "bearer")
        for key in (KEY, "another-key-of-some-length")
    }
    assert len(owners) == 2 and not any(KEY in owner for owner in owners)


@pytest.mark.parametrize(
    "values",
    [
        (),
        ("",),
        ("Bearer",),
        ("Bearer ",),
        (f"Basic {KEY}",),
        (KEY,),
        (f"Bearer {KEY}x",),
        (f"Bearer {KEY[:-1]}",),
        (f"Bearer {KEY}", f"Bearer {KEY}"),
        ("Bearer \xff",),
    ],
)
def test_anything_else_is_unknown(values: tuple[str, ...]) -> None:
    with pytest.raises(ApiFault) as fault:
        Keys([KEY]).owner(request(*values))
    assert fault.value.status == 401 and fault.value.response().headers["www-authenticate"] == "Bearer"


def test_keys_are_compared_as_digests_of_one_length_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def spy(left: bytes, right: bytes) -> bool:
        seen.append((len(left), len(right)))
        return left == right

    monkeypatch.setattr(hmac, "compare_digest", spy)
    Keys([KEY, "b" * 20, "c" * 30]).owner(request(f"Bearer {KEY}"))
    assert seen == [(32, 32)] * 3


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\n\n")
    monkeypatch.setenv(guard.KEYS, "b" * 20 + ", " + "c" * 20)
    keys = Keys.load(tmp_path / "keys")
    assert len({keys.owner(request(f"Bearer {key}")) for key in (KEY, "b" * 20, "c" * 20)}) == 3
    monkeypatch.delenv(guard.KEYS)
    assert not Keys.load(None)


def test_a_bad_file_or_a_short_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "short").write_text("secret\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("missing", "empty", "short", "binary"):
        with pytest.raises(ConfigError) as error:
            Keys.load(tmp_path / name)
        assert "secret" not in str(error.value)
