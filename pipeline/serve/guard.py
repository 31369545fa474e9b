"""The outermost layer of the server: access control and rate limits. Every request must pass these checks:

    Host          one of ours, else 421: another site's page whose name resolves to this address gets nothing
                  (DNS rebinding)
    Origin        none, our own, or an allowed one, else 403; no answer has CORS headers for other origins
    key           required on every request that can have a body, else 401; checked on every path before the body is
                  read; compared as digests in constant time. Also a dependency of every route except the public ones
                  (`Keys.authenticate`)
    rate          per key, or per address if no keys are set (`Rates`), else 429 after HOLD_SECONDS
    Content-Type  JSON, else 415: a form on another site cannot submit anything
    body          1 MiB within 10 seconds, else 413 or 408; JSON without NaN, infinity or lone surrogates, else 400;
                  parsed once

The HTTP server limits headers (16 KB, 10 seconds, `__main__.py`). There is no encryption: put a proxy in front.

The module also limits how many jobs run alongside the engines, and how many requests a client can send:

    async with Places("texts to render", running=2, waiting=16).place(asker): ...    ApiFault 429 if all are taken
    await Pool("conversations to score", running=1, waiting=8).run(asker, function, ...)   the same, on its own threads
    Rates(per_second).take(asker, cost) -> seconds to wait, 0 if the cost was charged

`asker` is a key's digest, or an address if no keys are set.

Places: a free place goes to the asker with the fewest running jobs, first come, first served among equals. One asker
gets at most half of all places, and never all running places if there are several. Each kind of work has its own
places, so a client that takes all places for one kind does not affect the others.

Rates: a token bucket per asker (Turner 1986), refilled at `per_second` up to BURST_SECONDS' worth. A request costs 1,
plus 1 for each full COST_BYTES of its body. A request refused by the queue costs REFUSED_COST more, so that a client
that retries immediately is refused by the guard, which is cheap. Beyond MOST_BUCKETS, the least recently used buckets
are dropped, which resets their askers.

Not guaranteed: a limit per client behind a proxy (without keys, the proxy's clients share an address). Not here:
killable processes (`workshop.py`), the engines' queue (`loop.py`). Does not import torch, so the command starts
immediately.
"""

import asyncio
import hashlib
import hmac
import json
import math
import os
import re
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar

from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.run.errors import ConfigError
from pipeline.serve.protocol import ApiFault

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
MOST_BYTES, MOST_SECONDS = 2**20, 10.0
HOLD_SECONDS, MOST_HELD = 0.5, 64  # how long a rate-limit refusal is delayed, and how many are delayed at a time
WITH_BODY = ("POST", "PUT", "PATCH")
SURROGATES = re.compile(r"\\u[dD][89a-fA-F]")  # an escape that may be half of a surrogate pair
KEYS = "STAGECOACH_API_KEYS"  # an environment variable: keys, separated by commas
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
CORS = {
    "access-control-allow-methods": "GET, POST",
    "access-control-allow-headers": "authorization, content-type",
    "access-control-max-age": "600",
}
Weights = Literal["int8", "native"]
RETRY_SECONDS = 1
WAIT_SECONDS = 10.0  # longest wait for a place
PER_SECOND = 200.0
BURST_SECONDS = 5.0
COST_BYTES = 16 * 1024
REFUSED_COST = 10
MOST_BUCKETS = 10_000

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Guard:
    """ASGI middleware that runs the checks of this module."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: "Keys | None" = None,
        rates: "Rates | None" = None,
        hosts: Collection[str] = (),
        origins: Collection[str] = (),
    ) -> None:
        """Without `keys` anyone may send requests; without `rates` there is no limit."""
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
            if origin := self._check_origin(scope, headers):
                extra |= {"access-control-allow-origin": origin, "vary": "origin"}
                extra["cross-origin-resource-policy"] = "cross-origin"
                if scope["method"] == "OPTIONS":
                    await _send_empty(204, extra | CORS, send)
                    return
            self._admit(scope, headers)
            if scope["method"] in WITH_BODY:
                body, scope["parsed"] = await _read_json(headers, receive)
                if "content-length" not in headers:
                    self._charge(scope["asker"], cost(len(body)) - 1)
                receive = _replay(body, receive)
        except ApiFault as fault:
            if fault.code == "rate_limited":
                await self._hold()
            await fault.response()(scope, receive, _add_headers(extra, send))
            return
        await self.app(scope, receive, self._fine_refusals(scope["asker"], _add_headers(extra, send)))

    async def _hold(self) -> None:
        """Delay a rate-limit refusal, which slows down a client that retries immediately."""
        if self._held >= MOST_HELD:
            return
        self._held += 1
        try:
            await asyncio.sleep(HOLD_SECONDS)
        finally:
            self._held -= 1

    def _fine_refusals(self, asker: str, send: Send) -> Send:
        """Charge extra for a request that was refused with 429 after the guard."""

        async def send_and_fine(message: Message) -> None:
            if self.rates is not None and message["type"] == "http.response.start" and message["status"] == 429:
                self.rates.fine(asker, REFUSED_COST)
            await send(message)

        return send_and_fine

    def _admit(self, scope: Scope, headers: Headers) -> None:
        """Identify the asker and charge for the request. Raises ApiFault 401 and 429."""
        client, length = scope.get("client"), headers.get("content-length", "")
        price = cost(min(int(length[:9]), MOST_BYTES)) if length.isdecimal() else 1
        wrong_key: ApiFault | None = None
        try:
            scope["owner"] = self.keys.owner(Request(scope))
        except ApiFault as fault:
            wrong_key, price = fault, 1
        scope["asker"] = scope.get("owner") or f"address {client[0] if client else ''}"
        self._charge(scope["asker"], price)
        if wrong_key is not None and scope["method"] in WITH_BODY:
            raise wrong_key

    def _charge(self, asker: str, price: float) -> None:
        """Charge an asker. Raises ApiFault 429 if the price is more than the asker has left."""
        if self.rates is not None and (seconds := self.rates.take(asker, price)):
            raise ApiFault(
                429, "too many requests in a short time; try again", code="rate_limited", retry=math.ceil(seconds)
            )

    def _check_origin(self, scope: Scope, headers: Headers) -> str:
        """Check Host and Origin. Returns the foreign origin allowed to read the answer, or "". Raises ApiFault."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or _host_name(hosts[0]) not in self.hosts:
            raise ApiFault(
                421, "that Host is not allowed; start the server with --allow-host NAME", code="host_not_allowed"
            )
        origin = headers.get("origin")
        if origin is None or origin == f"{scope.get('scheme', 'http')}://{hosts[0]}":
            return ""
        if origin not in self.origins:
            raise ApiFault(
                403,
                "that Origin is not allowed; start the server with --allow-origin ORIGIN",
                code="origin_not_allowed",
            )
        return origin


def _host_name(host: str) -> str:
    """A Host header without its port. A malformed header yields a name that no list contains."""
    name, colon, port = host.rpartition(":")
    if colon and port.isdecimal() and not name.endswith(":"):
        host = name
    return host.lower()


def _add_headers(extra: dict[str, str], send: Send) -> Send:
    """Add headers to an answer, except those it already has."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            names = {name for name, _ in message["headers"]}
            more = [(name.encode(), value.encode()) for name, value in extra.items() if name.encode() not in names]
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return send_with_headers


async def _send_empty(status: int, headers: dict[str, str], send: Send) -> None:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": b""})


async def _read_json(headers: Headers, receive: Receive) -> tuple[bytes, object]:
    """The complete body, as bytes and as parsed JSON. Raises ApiFault."""
    if headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise ApiFault(415, "expected Content-Type: application/json", code="unsupported_media_type")
    length = headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 9 or int(length) > MOST_BYTES):
        raise ApiFault(
            413, f"the body has more than {MOST_BYTES} bytes, the most this server accepts", code="body_too_large"
        )
    try:
        async with asyncio.timeout(MOST_SECONDS):
            body = await _read_body(receive)
    except TimeoutError:
        raise ApiFault(408, f"the body took over {MOST_SECONDS:.0f} seconds to arrive", code="body_too_slow") from None
    try:
        text = body.decode()
        parsed = json.loads(text, parse_constant=_refuse_constant)
        if SURROGATES.search(text):
            json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise ApiFault(400, f"the body is not valid JSON ({reason})", code="invalid_json") from None
    return body, parsed


async def _read_body(receive: Receive) -> bytes:
    pieces, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiFault(400, "the client disconnected", code="client_closed")
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > MOST_BYTES:
            raise ApiFault(413, f"the body has more than {MOST_BYTES} bytes", code="body_too_large")
        if not message.get("more_body"):
            return b"".join(pieces)


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Deliver the body once, then the messages after it, such as the client's disconnect."""
    replayed = False

    async def receive_again() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


class ParsedRoute(APIRoute):
    """A route that reuses the body already parsed by the guard."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_ParsedRequest(request.scope, request.receive))

        return handle


class _ParsedRequest(Request):
    async def json(self) -> object:
        return self.scope["parsed"]


class Keys:
    """The valid API keys; if there are none, access is open."""

    def __init__(self, keys: Collection[str]) -> None:
        """Raises ConfigError if a key is short enough to guess."""
        if short := sum(len(key) < SHORTEST_KEY for key in keys):
            raise ConfigError(
                f"{short} of the API keys have fewer than {SHORTEST_KEY} characters; run openssl rand -hex 24 to"
                " make a new one"
            )
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @classmethod
    def load(cls, file: Path | None) -> "Keys":
        """Load keys from a file, one per line, and from the environment. Raises ConfigError."""
        keys = [key for key in os.environ.get(KEYS, "").split(",") if key.strip()]
        if file is not None:
            try:
                keys += file.read_text(encoding="utf-8").split("\n")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{file}: expected API keys, one per line ({error})") from error
            if not any(key.strip() for key in keys):
                raise ConfigError(f"{file}: expected API keys, one per line, found none")
        return cls([key.strip() for key in keys if key.strip()])

    def __bool__(self) -> bool:
        return bool(self._digests)

    async def authenticate(self, request: Request) -> str:
        """Like `owner`, for use as a dependency. A coroutine, because FastAPI runs plain functions on a thread, which
        takes milliseconds while an engine is busy.
        """
        return request.scope["owner"] if "owner" in request.scope else self.owner(request)

    def owner(self, request: Request) -> str:
        """The digest of the request's key, or "" if no keys are set. Raises ApiFault 401. Every key is compared, even
        after a match.
        """
        if not self._digests:
            return ""
        values = request.headers.getlist("authorization")
        kind, _, key = (values[0] if len(values) == 1 else "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "replace")).digest()
        matches = [hmac.compare_digest(digest, valid) for valid in self._digests]
        if kind.lower() != "bearer" or not any(matches):
            raise ApiFault(401, "expected a valid key in the header Authorization: Bearer KEY", code="invalid_api_key")
        return digest.hex()


@dataclass(frozen=True, eq=False)
class _Waiter:
    asker: str
    granted: asyncio.Future[None]


class Places:
    """Places for jobs of one kind, on one event loop."""

    def __init__(self, jobs: str, *, running: int, waiting: int) -> None:
        """`jobs` names the jobs in messages; at most `running` of them run and `waiting` wait."""
        self.jobs, self.running, self.waiting = jobs, running, waiting
        self._running: Counter[str] = Counter()
        self._waiting: list[_Waiter] = []

    @asynccontextmanager
    async def place(self, asker: str) -> AsyncIterator[None]:
        """Wait for a place and hold it. Raises ApiFault 429 if too many jobs wait, in total or from this asker, or
        after too long a wait.
        """
        own = self._running[asker] + sum(waiter.asker == asker for waiter in self._waiting)
        if len(self._waiting) >= self.waiting or own >= max(1, (self.running + self.waiting) // 2):
            raise self._full()
        waiter = _Waiter(asker, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._grant()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await waiter.granted
        except (TimeoutError, asyncio.CancelledError) as error:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif waiter.granted.done() and not waiter.granted.cancelled():
                self._release(asker)
            if isinstance(error, TimeoutError):
                raise self._full() from None
            raise
        try:
            yield
        finally:
            self._release(asker)

    def _full(self) -> ApiFault:
        return ApiFault(429, f"too many {self.jobs} are waiting; try again", code="queue_full", retry=RETRY_SECONDS)

    def _release(self, asker: str) -> None:
        self._running[asker] -= 1
        if not self._running[asker]:
            del self._running[asker]
        self._grant()

    def _grant(self) -> None:
        """Give free places to waiting jobs."""
        while self._running.total() < self.running:
            ready = [waiter for waiter in self._waiting if self._running[waiter.asker] < max(1, self.running - 1)]
            if not ready:
                return
            waiter = min(ready, key=lambda waiter: self._running[waiter.asker])
            self._waiting.remove(waiter)
            self._running[waiter.asker] += 1
            waiter.granted.set_result(None)


class ThreadPlaces(Places):
    """Places with one thread each."""

    def __init__(self, jobs: str, *, running: int, waiting: int) -> None:
        super().__init__(jobs, running=running, waiting=waiting)
        self._threads = ThreadPoolExecutor(running, thread_name_prefix=jobs.split()[0])

    async def run(
        self, asker: str, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Run the function and return its result. Raises what the function raises, and ApiFault like `place`."""
        async with self.place(asker):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, lambda: function(*args, **kwargs))


def cost(length: int) -> int:
    """The cost of a request with a body of `length` bytes."""
    return 1 + length // COST_BYTES


class Rates:
    """A token bucket per asker."""

    def __init__(self, per_second: float = PER_SECOND, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_second, self._clock = per_second, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # asker -> (tokens, as of this time)

    def take(self, asker: str, cost: float) -> float:
        """Seconds to wait, or 0 if the cost was charged. A cost above the bucket's capacity needs a full bucket."""
        now, most = self._clock(), self.per_second * BURST_SECONDS
        tokens, since = self._buckets.get(asker, (most, now))
        tokens = min(most, tokens + (now - since) * self.per_second)
        cost = min(cost, most)
        enough = tokens >= cost
        self._buckets[asker] = (tokens - cost if enough else tokens, now)
        self._buckets.move_to_end(asker)
        if len(self._buckets) > MOST_BUCKETS:
            self._buckets.popitem(last=False)
        return 0.0 if enough else (cost - tokens) / self.per_second

    def fine(self, asker: str, cost: float) -> None:
        """Charge a cost, or as much of it as the bucket can cover."""
        tokens, since = self._buckets.get(asker, (self.per_second * BURST_SECONDS, self._clock()))
        self._buckets[asker] = (max(0.0, tokens - cost), since)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to serve and to whom; built from the command line and sent to the worker process."""

    models: tuple[Path, ...]
    weights: Weights | None = None  # None: chosen by model size
    rows: int = 8  # requests that run concurrently
    queue: int = 32  # requests that wait
    rate: float = 200.0  # requests per second per key, or per address if no keys are set (`Rates`); 0: no limit
    api_key_file: Path | None = None
    feedback: Path | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    rollouts: Path | None = None  # the folder below which a training run publishes the model's weights
    failure: Path | None = None  # the file in which the worker tells its parent why it cannot start

    def check(self) -> None:
        """Raise ConfigError for options that would fail later, in the worker."""
        for model in self.models:
            if not (model / "config.json").is_file() and not (model / "adapter_config.json").is_file():
                raise ConfigError(f"{model}: expected a model directory with config.json; build one with dvc repro")
        if self.rollouts is not None and (len(self.models) > 1 or self.weights == "int8"):
            raise ConfigError("--rollouts: expected one model with native weights; int8 is only for serving users")
        if self.rollouts is not None and not self.rollouts.is_dir():
            raise ConfigError(f"--rollouts: expected a folder, found none at {self.rollouts}")
