"""The sandbox over HTTP, so that many training nodes can share one machine for running generated code.

    python -m pipeline.sandbox.service --host 127.0.0.1 --port 8801 [--workers N] [--preload numpy]

    GET  /health     what this machine enforces: profile, ceilings, architecture, uid
    POST /run_batch  {"jobs": [job]} -> [answer] in order; both as in `jail.py`

The trainer's client is `remote.py` (`runtime.sandbox.url`). The trainer judges: no expected values go over the wire. If
STAGECOACH_SANDBOX_TOKEN is set, every request must carry that token; otherwise only this machine may send requests, and
only to a loopback name. Limits above CEILINGS are clamped. A request is limited to 1024 jobs and 16 MiB; if the queue
is full, it gets 429. There is no `allow_unsafe` here: without a sandbox the service does not start.

Not guaranteed: fairness between clients, privacy in transit (put TLS in front of it), or defense against a flood of
connections; run strangers' code on a separate machine.
"""

import argparse
import asyncio
import hashlib
import hmac
import ipaddress
import json
import os
import re
import signal
import sys
from collections import deque
from collections.abc import AsyncGenerator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from granian.constants import Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server as HttpServer

from pipeline.run.errors import ConfigError
from pipeline.run.types import JsonObject
from pipeline.sandbox.config import SandboxConfig
from pipeline.sandbox.pool import GRACE_SECONDS
from pipeline.sandbox.remote import TOKEN
from pipeline.sandbox.servers import HarnessError, Servers

MAX_JOBS, MAX_BYTES = 1024, 16 << 20  # per request
MAX_QUEUED = 4096  # waiting or running jobs across all requests
WINDOW = 64  # jobs of one request that run ahead of the answer being sent: bounds the answers in memory
MAX_ARGUMENT = 1 << 20  # characters in a test's argument text, which the server parses
CEILINGS: dict[str, float] = {
    "cpu": 60.0,
    "job_cpu": 60.0,
    "wall": 300.0,
    "job_wall": 300.0,
    "memory": 1 << 30,
    "stdout": 1 << 20,
    "stderr": 1 << 20,
    "results": 8 << 20,
    "source": 256 << 10,
    "tests": 1024,
}
LIMITS = tuple(name for name in CEILINGS if name not in ("source", "tests"))
_NONCE = re.compile(r"[0-9a-f]{32}")


class _Refusal(Exception):
    """A rejected request, with an HTTP status and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class SandboxService:
    """State shared by the routes: the servers, the threads that wait for them, and the queue length."""

    def __init__(self, servers: Servers, token: str | None) -> None:
        self.servers, self.token = servers, token
        self.threads = ThreadPoolExecutor(servers.threads, thread_name_prefix="service")
        self.queued = 0

    def health(self) -> JsonObject:
        """What is enforced, for humans and for `remote.py`."""
        return {
            **self.servers.enforced,
            "status": "ok",
            "preload": list(self.servers.config.preload),
            "ceilings": CEILINGS,
            "workers": self.servers.threads,
            "queued": self.queued,
        }

    def check(self, request: Request) -> None:
        """Check the token in constant time or, without one, the host name, to keep web pages out. Raises _Refusal."""
        if self.token is not None:
            token = request.headers.get("authorization", "").removeprefix("Bearer ")
            digests = [hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest() for text in (token, self.token)]
            if not hmac.compare_digest(*digests):
                raise _Refusal(401, f"expected the bearer token of {TOKEN}")
        elif not is_loopback(request.url.hostname or ""):
            raise _Refusal(403, "without a token, only requests to a loopback name are allowed")

    async def body(self, request: Request) -> object:
        """The JSON of a request. Raises _Refusal."""
        if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
            raise _Refusal(415, "expected application/json")  # forces browsers to send a preflight request
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > MAX_BYTES:
                raise _Refusal(413, f"expected at most {MAX_BYTES} bytes")
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _Refusal(400, f"expected JSON: {error}") from error

    def enqueue(self, count: int) -> None:
        """Add the number of jobs to the queue length. Raises _Refusal."""
        if count > MAX_JOBS:
            raise _Refusal(413, f"expected at most {MAX_JOBS} jobs, found {count}")
        if self.queued + count > MAX_QUEUED:
            raise _Refusal(429, f"{self.queued} jobs are waiting; try again")
        self.queued += count

    async def run(self, jobs: list[JsonObject]) -> AsyncGenerator[JsonObject, None]:
        """Run jobs and yield the answers in order. Decrements the queue length, even if the client disconnects."""
        num_left, waiting = len(jobs), deque[Future[JsonObject]]()
        remaining = iter(jobs)
        try:
            while num_left:
                for job in remaining:
                    waiting.append(self.threads.submit(self.call, job))
                    if len(waiting) >= WINDOW:
                        break
                yield await asyncio.wrap_future(waiting.popleft())
                num_left, self.queued = num_left - 1, self.queued - 1
        finally:
            self.queued -= num_left
            for future in waiting:
                future.cancel()

    def call(self, job: JsonObject) -> JsonObject:
        """Run one job; blocks until its answer arrives."""
        try:
            return self.servers.call(job, job["limits"]["job_wall"] + GRACE_SECONDS)
        except HarnessError as error:
            return {"id": job["id"], "fault": str(error)}


def create_app(service: SandboxService) -> FastAPI:
    """The FastAPI application with all routes."""
    app = FastAPI(title="Stagecoach sandbox", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(_Refusal)
    async def refuse(_: Request, error: _Refusal) -> Response:
        headers = {"Retry-After": "1"} if error.status == 429 else {}
        return Response(json.dumps({"detail": str(error)}), error.status, headers, media_type="application/json")

    @app.get("/health")
    async def health(request: Request) -> Response:
        service.check(request)
        return Response(json.dumps(service.health()), media_type="application/json")

    @app.post("/run_batch")
    async def run_batch(request: Request) -> Response:
        service.check(request)
        jobs = parse_jobs(await service.body(request))
        service.enqueue(len(jobs))
        chunks = _encode_list(service.run(jobs))
        first = await anext(chunks)  # start the generator, so that its `finally` runs even if the client is gone
        return StreamingResponse(_chain(first, chunks), media_type="application/json")

    return app


async def _encode_list(answers: AsyncGenerator[JsonObject, None]) -> AsyncGenerator[bytes, None]:
    """Encode answers as a JSON list, yielding one chunk per answer."""
    start = b"["
    async with aclosing(answers):
        async for answer in answers:
            yield start + json.dumps(answer, separators=(",", ":")).encode("ascii")
            start = b","
    yield b"]" if start == b"," else b"[]"


async def _chain(first: bytes, chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(chunks):
        yield first
        async for chunk in chunks:
            yield chunk


def parse_jobs(body: object) -> list[JsonObject]:
    """The jobs of a request, validated and with clamped limits. Raises _Refusal naming the first fault."""
    if not isinstance(body, dict) or set(body) != {"jobs"} or not isinstance(body["jobs"], list):
        raise _Refusal(422, 'expected {"jobs": [job]}')
    jobs = []
    for number, job in enumerate(body["jobs"]):
        fault = _find_fault(job)
        if fault is not None:
            raise _Refusal(422, f"jobs[{number}]: expected {fault}")
        jobs.append(clamp(job))
    return jobs


def _find_fault(job: object) -> str | None:
    """What is wrong with a job, or None."""
    keys = {"id", "nonce", "source", "entry", "tests", "limits"}
    if not isinstance(job, dict) or set(job) != keys:
        return f"the keys {', '.join(sorted(keys))}"
    tests, limits = job["tests"], job["limits"]
    arguments = {"stdin"} if job["entry"] is None else {"args", "kwargs"}
    checks = {
        "id: a string of at most 64 characters": isinstance(job["id"], str) and len(job["id"]) <= 64,
        "nonce: 32 hexadecimal digits": isinstance(job["nonce"], str) and _NONCE.fullmatch(job["nonce"]) is not None,
        "source: a string within limits": isinstance(job["source"], str) and len(job["source"]) <= CEILINGS["source"],
        "entry: a name, or null for a program": job["entry"] is None or isinstance(job["entry"], str),
        "tests: 1 to 1024 tests": isinstance(tests, list) and 1 <= len(tests) <= CEILINGS["tests"],
        "tests: one test for a program": job["entry"] is not None or (isinstance(tests, list) and len(tests) == 1),
        f"limits: positive numbers for {', '.join(LIMITS)}": isinstance(limits, dict)
        and set(limits) == set(LIMITS)
        and all(type(value) in (int, float) and 0 <= value < 1e15 for value in limits.values()),
    }
    failed = next((rule for rule, is_met in checks.items() if not is_met), None)
    if failed is not None:
        return failed
    if not all(isinstance(t, dict) and set(t) == arguments and all(type(v) is str for v in t.values()) for t in tests):
        return f"tests: strings named {', '.join(sorted(arguments))}"
    if "args" in arguments and any(len(text) > MAX_ARGUMENT for test in tests for text in test.values()):
        return f"tests: arguments of at most {MAX_ARGUMENT} characters"
    return None


def clamp(job: JsonObject) -> JsonObject:
    """The job with its limits capped at CEILINGS."""
    return job | {"limits": {name: min(value, CEILINGS[name]) for name, value in job["limits"].items()}}


def is_loopback(host: str) -> bool:
    """Whether a host name refers only to this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


# -- command line ------------------------------------------------------------------------------------------------------


async def serve(app: FastAPI, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM."""
    server = HttpServer(
        app,
        address=host,
        port=port,
        interface=Interfaces.ASGINL,
        http1_settings=HTTP1Settings(header_read_timeout=10_000),
        websockets=False,
        log_enabled=False,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.stop)
    await server.serve()


def main(argv: list[str]) -> int:
    """Run the service. Returns the exit code: 0, or 2 if there is no sandbox or the address is not allowed."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.sandbox.service", description="Run generated code for trainers."
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8801)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="concurrent children")
    parser.add_argument("--preload", nargs="*", default=[], help="modules that candidates may import, e.g. numpy")
    options = parser.parse_args(argv)
    token = os.environ.get(TOKEN) or None
    servers = Servers(SandboxConfig(preload=tuple(options.preload)), options.workers)
    try:
        if not 0 < options.port <= 65535:
            raise ConfigError(f"--port: expected 1 to 65535, got {options.port}")
        if token is None and not is_loopback(options.host):
            raise ConfigError(f"--host {options.host}: expected a loopback address, or a token in {TOKEN}")
        servers.start()
        service = SandboxService(servers, token)
        sys.stderr.write(f"sandbox service at http://{options.host}:{options.port}: {json.dumps(service.health())}\n")
        asyncio.run(serve(create_app(service), options.host, options.port))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    finally:
        servers.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
