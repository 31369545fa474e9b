"""The door: who may ask, from where, and how much. Nothing of a request is believed before it passed here.

    Host          one of ours, else 421: a page of another site that resolves to this address gets nothing (DNS rebinding)
    Origin        none, our own, or one that was allowed, else 403; no answer carries CORS headers for others
    key           of all that can have a body, else 401: before the first byte of it, whatever its path; compared as digests in
                  constant time. Beside that a dependency of every route but the public ones (`asker`)
    rate          of the key, or of the address without one (`rates.py`), else 429, which comes late: who asks again at once waits
    Content-Type  JSON, else 415: what a form of another site can send is never read
    body          1 MiB within 10 seconds, else 413 or 408; JSON without constants and halves of characters, else 400; parsed once

Headers are bounded by the HTTP server (16 KB, 10 seconds, `__main__.py`). Not here: encryption; put a proxy in front for that.
"""

import asyncio
import hashlib
import hmac
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Collection, Coroutine
from pathlib import Path
from typing import Any

from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.errors import ConfigError
from pipeline.serve.faults import ApiFault
from pipeline.serve.rates import REFUSED, Rates, cost

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
MOST_BYTES, MOST_SECONDS = 2**20, 10.0
HELD_SECONDS, MOST_HELD = 0.5, 64  # how long a refusal of the rate is held back, and how many at a time
WITH_BODY = ("POST", "PUT", "PATCH")
HALVES = re.compile(r"\\u[dD][89a-fA-F]")  # what may be half a character
KEYS = "STAGECOACH_API_KEYS"  # keys, separated by commas
SHORTEST_KEY = 16
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
CORS = {"access-control-allow-methods": "GET, POST", "access-control-allow-headers": "authorization, content-type", "access-control-max-age": "600"}  # fmt: skip


class Guard:
    """The outermost layer of the application."""

    def __init__(
        self, app: ASGIApp, *, keys: "Keys | None" = None, rates: Rates | None = None, hosts: Collection[str] = (),
        origins: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Without `keys` everybody may ask, without `rates` as much as he likes."""
        self.app, self.keys, self.rates = app, keys or Keys([]), rates
        self.hosts, self.origins = {*LOOPBACK, *(host.lower() for host in hosts)}, set(origins)
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope["identity"] = f"req-{secrets.token_hex(8)}"
        extra = HEADERS | {"x-request-id": scope["identity"]}
        try:
            if origin := self._check(scope, headers):
                extra |= {"access-control-allow-origin": origin, "vary": "origin"}
                extra["cross-origin-resource-policy"] = "cross-origin"
                if scope["method"] == "OPTIONS":
                    await _empty(204, extra | CORS, send)
                    return
            self._admit(scope, headers)
            if scope["method"] in WITH_BODY:
                body, scope["parsed"] = await _body(headers, receive)
                if "content-length" not in headers:
                    self._charge(scope["asker"], cost(len(body)) - 1)
                receive = _replayed(body, receive)
        except ApiFault as fault:
            if fault.code == "rate_limited":
                await self._hold()
            await fault.response()(scope, receive, _with(extra, send))
            return
        await self.app(scope, receive, self._fined(scope["asker"], _with(extra, send)))

    async def _hold(self) -> None:
        """Let who asks too often wait before he hears it: a client that comes again at once comes rarely then."""
        if self._held >= MOST_HELD:
            return
        self._held += 1
        try:
            await asyncio.sleep(HELD_SECONDS)
        finally:
            self._held -= 1

    def _fined(self, asker: str, send: Send) -> Send:
        """Charge an answer that found no room."""

        async def sending(message: Message) -> None:
            if self.rates is not None and message["type"] == "http.response.start" and message["status"] == 429:
                self.rates.fine(asker, REFUSED)
            await send(message)

        return sending

    def _admit(self, scope: Scope, headers: Headers) -> None:
        """Find out who asks, and whether he may ask again. Raises ApiFault 401 and 429."""
        client, length = scope.get("client"), headers.get("content-length", "")
        price = cost(min(int(length[:9]), MOST_BYTES)) if length.isdecimal() else 1
        unknown: ApiFault | None = None
        try:
            scope["owner"] = self.keys.owner(Request(scope))
        except ApiFault as fault:
            unknown, price = fault, 1
        scope["asker"] = scope.get("owner") or f"address {client[0] if client else ''}"
        self._charge(scope["asker"], price)
        if unknown is not None and scope["method"] in WITH_BODY:
            raise unknown

    def _charge(self, asker: str, price: float) -> None:
        """Raises ApiFault 429."""
        if self.rates is not None and (seconds := self.rates.take(asker, price)):
            raise ApiFault(429, "too much was asked for in a short time; try again", code="rate_limited", retry=math.ceil(seconds))  # fmt: skip

    def _check(self, scope: Scope, headers: Headers) -> str:
        """The origin that may read the answer, or nothing. Raises ApiFault."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or _name(hosts[0]) not in self.hosts:
            raise ApiFault(
                421,
                "this server does not answer to that Host; start it with --allow-host NAME",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is None or origin == f"{scope.get('scheme', 'http')}://{hosts[0]}":
            return ""
        if origin not in self.origins:
            raise ApiFault(403, "pages of that Origin may not ask; start it with --allow-origin ORIGIN", code="origin_not_allowed")  # fmt: skip
        return origin


def _name(host: str) -> str:
    """A Host header without its port. What is no host at all gives what no list holds."""
    name, colon, port = host.rpartition(":")
    if colon and port.isdecimal() and not name.endswith(":"):
        host = name
    return host.lower()


def _with(extra: dict[str, str], send: Send) -> Send:
    """Add headers to an answer that has not set them itself."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            have = {name for name, _ in message["headers"]}
            more = [(name.encode(), value.encode()) for name, value in extra.items() if name.encode() not in have]
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return sending


async def _empty(status: int, headers: dict[str, str], send: Send) -> None:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": b""})


async def _body(headers: Headers, receive: Receive) -> tuple[bytes, Any]:
    """The whole body and what it says. Raises ApiFault."""
    if headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise ApiFault(415, "expected Content-Type: application/json", code="unsupported_media_type")
    length = headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 9 or int(length) > MOST_BYTES):
        raise ApiFault(413, f"the body has more than {MOST_BYTES} bytes, which is the most that is read", code="body_too_large")  # fmt: skip
    try:
        async with asyncio.timeout(MOST_SECONDS):
            body = await _read(receive)
    except TimeoutError:
        raise ApiFault(408, f"the body did not come within {MOST_SECONDS:.0f} seconds", code="body_too_slow") from None
    try:
        text = body.decode()
        parsed = json.loads(text, parse_constant=_refuse)
        if HALVES.search(text):
            json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise ApiFault(400, f"the body is not JSON that can be read ({reason})", code="invalid_json") from None
    return body, parsed


class ParsedRoute(APIRoute):
    """A route that takes the body as the guard has parsed it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI's."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_Parsed(request.scope, request.receive))

        return handle


class _Parsed(Request):
    async def json(self) -> Any:
        return self.scope["parsed"]


async def _read(receive: Receive) -> bytes:
    pieces, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiFault(400, "the client went away", code="client_closed")
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > MOST_BYTES:
            raise ApiFault(413, f"the body has more than {MOST_BYTES} bytes", code="body_too_large")
        if not message.get("more_body"):
            return b"".join(pieces)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Gives the body once, then what comes behind it: the client's going away."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


class Keys:
    """The keys that may ask; without any, everybody may."""

    def __init__(self, keys: Collection[str]) -> None:
        """Raises ConfigError for a key that can be guessed."""
        if short := sum(len(key) < SHORTEST_KEY for key in keys):
            raise ConfigError(
                f"{short} of the API keys have fewer than {SHORTEST_KEY} characters; make some: openssl rand -hex 24"
            )
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @classmethod
    def load(cls, file: Path | None) -> "Keys":
        """Keys of a file, one a line, and of the environment. Raises ConfigError."""
        keys = [key for key in os.environ.get(KEYS, "").split(",") if key.strip()]
        if file is not None:
            try:
                keys += file.read_text(encoding="utf-8").split("\n")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{file}: expected API keys, one a line ({error})") from error
            if not any(key.strip() for key in keys):
                raise ConfigError(f"{file}: expected API keys, one a line, found none")
        return cls([key.strip() for key in keys if key.strip()])

    def __bool__(self) -> bool:
        return bool(self._digests)

    async def asker(self, request: Request) -> str:
        """As `owner`; a dependency that is no coroutine costs a thread's turn, which a busy engine makes milliseconds."""
        return request.scope["owner"] if "owner" in request.scope else self.owner(request)

    def owner(self, request: Request) -> str:
        """Whose request it is: nobody's where no key is asked for. Raises ApiFault 401. All keys are compared, equal or not."""
        if not self._digests:
            return ""
        given = request.headers.getlist("authorization")
        kind, _, key = (given[0] if len(given) == 1 else "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "replace")).digest()
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        if kind.lower() != "bearer" or not any(found):
            raise ApiFault(401, "expected a valid key: Authorization: Bearer KEY", code="invalid_api_key")
        return digest.hex()
