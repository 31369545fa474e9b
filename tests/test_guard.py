"""The door: each line of the table of attacks that it stands against, in the process itself."""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.errors import ConfigError
from pipeline.serve import guard
from pipeline.serve.faults import ApiFault
from pipeline.serve.guard import Guard, Keys

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
    "host", ["evil.example", "localhost.evil.example", "evil.example:localhost", "localhost@evil.example", "127.0.0.1.nip.io", "", "[::1", "::1", "127.1", "localhost:8000:1", "localhost:x"]
)  # fmt: skip
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
    "values", [(), ("",), ("Bearer",), ("Bearer ",), (f"Basic {KEY}",), (KEY,), (f"Bearer {KEY}x",), (f"Bearer {KEY[:-1]}",), (f"Bearer {KEY}", f"Bearer {KEY}"), ("Bearer \xff",)]
)  # fmt: skip
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
