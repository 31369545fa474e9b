"""The sandbox over HTTP: verdicts as on this machine, tokens, limits, retries, scripts of other trainers."""

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient

from pipeline.run.errors import ConfigError
from pipeline.sandbox import remote, service
from pipeline.sandbox.judge import Candidate, Judge, Limits, SandboxConfig
from pipeline.sandbox.servers import Servers
from tests.sandbox import ended, started
from tests.training import free_port

ROOT = Path(__file__).parents[1]
TOKEN = "a token of the tests"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
SECRET = "expected-1b7e"
PROGRAMS = [
    Candidate(source="def f(x): return x * x", entry_point="f", tests=[{"args": "[3]", "expected": "9"}]),
    Candidate(source="def f(x): return x", entry_point="f", tests=[{"args": "[3]", "expected": repr(SECRET)}]),
    Candidate(source="def f(x):", entry_point="f", tests=[{"args": "['é\\ud800']", "expected": "9"}]),
    Candidate(
        source="print(input())", entry_point="", tests=[{"stdin": "ü", "stdout": "ü\n"}, {"stdin": "", "stdout": ""}]
    ),
    Candidate(
        source="def f(x):\n while x: pass\n return 0",
        entry_point="f",
        tests=[{"args": f"[{x}]", "expected": "0"} for x in (0, 1, 0)],
        cpu_seconds=0.1,
    ),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A service without a token."""
    process, address = started()
    yield address
    ended(process)


class Proxy(http.server.ThreadingHTTPServer):
    """Passes requests on to a service, records their bodies, and first answers some as `faults` says."""

    def __init__(self, target: str, faults: list[int]) -> None:
        super().__init__(("127.0.0.1", 0), Passing)
        self.target, self.faults, self.bodies = target, faults, list[bytes]()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"  # without a scheme, as e2b_router_url is written


class Passing(http.server.BaseHTTPRequestHandler):
    server: Proxy

    def do_GET(self) -> None:
        self._answer(httpx.get(self.server.target + self.path, trust_env=False))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(body)
        fault = self.server.faults.pop(0) if self.server.faults else 200
        if fault == 0:  # the connection breaks
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if fault != 200:
            self._answer(httpx.Response(fault, headers={"Retry-After": "0.01"}, content=b"{}"))
            return
        headers = {"Content-Type": "application/json"}
        self._answer(
            httpx.post(self.server.target + self.path, content=body, headers=headers, timeout=60, trust_env=False)
        )

    def _answer(self, answer: httpx.Response) -> None:
        self.send_response(answer.status_code)
        self.send_header("Content-Length", str(len(answer.content)))
        if "Retry-After" in answer.headers:
            self.send_header("Retry-After", answer.headers["Retry-After"])
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def outcomes(url: str | None, programs: list[Candidate]) -> list[tuple]:
    with Judge(SandboxConfig(limits=Limits(cpu_seconds=1.0)), 2, url=url) as judge:
        return [(v.verdict, v.reason, v.score, v.results) for v in judge.judge(programs)]


def test_verdicts_through_the_service_are_those_of_this_machine_and_nothing_expected_is_sent(url: str):
    proxy = Proxy(url, [])
    here, there = outcomes(None, PROGRAMS), outcomes(proxy.url, PROGRAMS)
    proxy.shutdown()
    assert there == here
    assert [verdict for verdict, *_ in here] == ["passed", "wrong", "syntax", "error", "timeout"]
    assert b"x * x" in b"".join(proxy.bodies) and SECRET.encode() not in b"".join(proxy.bodies)


@pytest.mark.parametrize("faults", [[503, 503, 503], [0], [429] * 8, [500, 0, 429]])
def test_a_batch_that_fails_on_the_way_is_sent_again(url: str, faults: list[int], monkeypatch):
    monkeypatch.setattr(remote, "PAUSE", 0.01)
    proxy = Proxy(url, list(faults))
    found = outcomes(proxy.url, PROGRAMS[:1])
    proxy.shutdown()
    assert [verdict for verdict, *_ in found] == ["passed"]
    assert len(proxy.bodies) == len(faults) + 1


def test_after_three_retries_the_candidates_are_unscorable(url: str, monkeypatch, caplog):
    monkeypatch.setattr(remote, "PAUSE", 0.01)
    proxy = Proxy(url, [503] * 99)
    (found,) = outcomes(proxy.url, PROGRAMS[:1])
    proxy.shutdown()
    assert found[:3] == ("unscorable", "harness", None)
    assert len(proxy.bodies) == 4 and "answered 503, 4 times" in caplog.text


def test_a_token_is_needed_where_one_is_set(monkeypatch):
    process, address = started(token=TOKEN)
    try:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {TOKEN}x"}):
            for answer in (
                httpx.get(f"{address}/health", headers=headers, trust_env=False),
                httpx.post(f"{address}/run_batch", json={"jobs": []}, headers=headers, trust_env=False),
            ):
                assert answer.status_code == 401
        with pytest.raises(ConfigError, match=r"rejected the token.*STAGECOACH_SANDBOX_TOKEN"):
            outcomes(address, PROGRAMS[:1])
        monkeypatch.setenv(remote.TOKEN, TOKEN)
        assert outcomes(address, PROGRAMS[:1])[0][0] == "passed"
    finally:
        ended(process)


def test_without_a_token_only_this_machine_is_served():
    environment = {key: value for key, value in os.environ.items() if key != remote.TOKEN}
    command = [sys.executable, "-m", "pipeline.sandbox.service", "--host", "0.0.0.0", "--port", "1"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "expected a loopback address, or a token" in done.stderr


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("localhost.evil.example", False),
    ],
)
def test_loopback_names(host: str, is_own: bool):
    assert service.is_loopback(host) is is_own


def job(**changes: object) -> dict:
    limits = dict.fromkeys(service.LIMITS, 5) | dict.fromkeys(("memory", "stdout", "stderr", "results"), 1 << 20)
    plain = {"id": "a", "nonce": "0" * 32, "source": "", "entry": "f", "limits": limits}
    return plain | {"tests": [{"args": "[]", "kwargs": "{}"}]} | changes


@pytest.fixture(scope="module")
def asked() -> Iterator[tuple[TestClient, service.SandboxService]]:
    """The routes in this process, for requests that no well-behaved client sends."""
    servers = Servers(SandboxConfig(), 1)
    servers.start()
    inside = service.SandboxService(servers, None)
    yield TestClient(service.create_app(inside), base_url="http://localhost"), inside
    servers.stop()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"nonce": "0"}, "nonce: 32 hexadecimal digits"),
        ({"extra": 1}, "the keys"),
        ({"tests": []}, "tests: 1 to 1024"),
        ({"tests": [{"args": 1, "kwargs": "{}"}]}, "strings named args, kwargs"),
        ({"tests": [{"args": "[" * (2 << 20), "kwargs": "{}"}]}, "arguments of at most"),
        ({"entry": None}, "strings named stdin"),
        ({"limits": {"cpu": 1}}, "limits: positive numbers"),
        ({"limits": dict.fromkeys(service.LIMITS, -1)}, "limits: positive numbers"),
    ],
)
def test_a_malformed_job_is_refused_and_named(asked, changes: dict, why: str):
    answer = asked[0].post("/run_batch", json={"jobs": [job(), job(**changes)]})
    assert answer.status_code == 422 and why in answer.json()["detail"] and "jobs[1]" in answer.json()["detail"]


def test_requests_beyond_the_bounds_are_refused(asked):
    client, inside = asked
    assert client.post("/run_batch", json={"jobs": [job()] * 1025}).status_code == 413
    assert (
        client.post("/run_batch", content=b"x" * (17 << 20), headers={"Content-Type": "application/json"}).status_code
        == 413
    )
    assert client.post("/run_batch", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
    assert (
        client.post("/run_batch", content=b"[" * 10**6, headers={"Content-Type": "application/json"}).status_code == 400
    )
    assert client.post("/run_batch", json={"jobs": []}, headers={"Host": "evil.example"}).status_code == 403
    inside.queued = service.MAX_QUEUED
    full = client.post("/run_batch", json={"jobs": [job()]})
    inside.queued = 0
    assert full.status_code == 429 and full.headers["Retry-After"] == "1"
    assert client.post("/run_batch", json={"jobs": []}).json() == [] and inside.queued == 0


def test_answers_come_in_order_and_the_queue_is_empty_afterwards(asked):
    client, inside = asked
    jobs = [job(id=str(n), source=f"def f(): return {n}") for n in range(100)]
    answers = client.post("/run_batch", json={"jobs": jobs}).json()
    assert [(a["id"], json.loads(a["frames"][0])["v"]) for a in answers] == [(str(n), n) for n in range(100)]
    assert inside.queued == 0


def test_limits_are_lowered_to_the_ceilings_and_never_raised():
    found = service.clamp(job(limits=dict.fromkeys(service.LIMITS, 1e12)))["limits"]
    assert found == {name: service.CEILINGS[name] for name in service.LIMITS}
    assert service.clamp(job())["limits"] == job()["limits"]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (SandboxConfig(preload=("numpy",)), r"sandbox\.preload.*--preload numpy"),
        (SandboxConfig(limits=Limits(memory_mib=4096)), r"sandbox\.limits.*ceilings.*memory"),
        (SandboxConfig(limits=Limits(max_tests=2000)), r"sandbox\.limits.*2000"),
    ],
)
def test_a_service_that_would_change_verdicts_is_refused(url: str, config: SandboxConfig, why: str):
    with pytest.raises(ConfigError, match=why), Judge(config, 1, url=url):
        pass


@pytest.mark.parametrize("bad", ["ftp://a", "http://", "http://a/path", "http://a:b"])
def test_an_address_that_is_none_is_named(bad: str):
    with pytest.raises(ConfigError, match=r"runtime\.sandbox\.url: expected an address"):
        Judge(SandboxConfig(), 1, url=bad)


def test_no_service_at_the_address_is_an_error_that_says_what_to_do():
    with (
        pytest.raises(ConfigError, match=r"expected a sandbox service at http://127.*pipeline\.sandbox\.service"),
        Judge(SandboxConfig(), 1, url=f"127.0.0.1:{free_port()}"),
    ):
        pass
