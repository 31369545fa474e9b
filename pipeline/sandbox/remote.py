"""A sandbox service as `Pool` asks it: jobs of many threads go out in batches over HTTP, answers come back in order.

Only jobs travel: sources, arguments, stdin. Expected values, and with them the verdicts, stay in the trainer. Jobs are
pure, so a batch that fails on the way is sent again: three times, then its candidates are unscorable (`harness`). A
service that says it is full is asked again later, for ten minutes. The token is STAGECOACH_SANDBOX_TOKEN.

`start` asks what the service enforces and refuses one whose ceilings or modules would change verdicts.

A user and password in the url are sent, and shown in no message. Not promised: privacy on the way. Over anything but a
trusted network put TLS in front of it and use https.
"""

import json
import os
import queue
import threading
import time
from concurrent.futures import Future
from typing import Any

import httpx

from pipeline.run.config import without_password
from pipeline.run.errors import ConfigError
from pipeline.sandbox.config import SandboxConfig
from pipeline.sandbox.pool import job_limits
from pipeline.sandbox.servers import HarnessError

BATCH = 128  # jobs in one request
BATCH_BYTES = 8 << 20
SENDERS = 2  # requests on the way at once: while one runs the other is made
LINGER = 0.005  # seconds that a batch waits for another job
RETRIES = 3
PAUSE = 0.5  # seconds before the first retry, doubled for each further one
BUSY_SECONDS = 600.0  # how long a full service is asked again
TIMEOUT = httpx.Timeout(10.0, read=900.0)  # 128 sleepers on two workers take five minutes
TOKEN = "STAGECOACH_SANDBOX_TOKEN"
ANSWER = frozenset({"id", "frames", "status", "signal", "cpu_ms", "wall_ms", "max_rss_kb", "stdout", "stderr", "cut"})

_Waiting = tuple[str, "Future[dict[str, Any]]"]  # the text of a job, and where its answer goes


class Remote:
    """The service at `url` (without a scheme: http). `call` may be used by `threads` threads at once."""

    profile = "sealed"  # a service is never unsafe

    def __init__(self, url: str, config: SandboxConfig) -> None:
        full = address(url)
        self.url, self.config, self.threads = without_password(full), config, BATCH * SENDERS  # what messages show
        self.enforced: dict[str, Any] = {}  # what the service says it enforces
        self.num_restarts = 0  # requests that had to be sent again
        self._jobs: queue.Queue[_Waiting | None] = queue.Queue()
        token = os.environ.get(TOKEN)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(base_url=full, headers=headers, timeout=TIMEOUT, trust_env=False)
        self._senders = [threading.Thread(target=self._send_all, daemon=True) for _ in range(SENDERS)]

    def start(self) -> None:
        """Ask what the service enforces. Raises ConfigError where it does not answer, or not as this run needs."""
        try:
            answer = self._client.get("/health", timeout=10.0)
        except httpx.HTTPError as error:
            raise ConfigError(
                f"runtime.sandbox.url: expected a sandbox service at {self.url}, found none ({error}); start it there "
                "with python -m pipeline.sandbox.service, or set the url to null"
            ) from error
        _check_status(answer)
        self.enforced = answer.json()
        self._check_limits()
        if sorted(self.config.preload) != sorted(self.enforced["preload"]):
            raise ConfigError(
                f"sandbox.preload: expected the modules of the service at {self.url} ({self.enforced['preload']}), "
                f"found {list(self.config.preload)}; start the service with --preload {' '.join(self.config.preload)}"
            )
        for sender in self._senders:
            sender.start()

    def _check_limits(self) -> None:
        limits = self.config.limits
        cpu = limits.job_cpu_seconds
        asked = job_limits(limits, cpu, cpu, limits.wall(cpu)) | {"source": limits.source_kib << 10}
        ceilings = self.enforced["ceilings"] | {"tests": limits.max_tests}
        above = {name: value for name, value in asked.items() if value > ceilings[name]}
        if above or limits.max_tests > self.enforced["ceilings"]["tests"]:
            raise ConfigError(
                f"sandbox.limits: expected at most the ceilings of the service at {self.url}"
                f" ({self.enforced['ceilings']}), found {above or limits.max_tests}; lower them, or judge on this"
                " machine"
            )

    def call(self, job: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to one job. Raises HarnessError; `seconds` are the service's business."""
        future: Future[dict[str, Any]] = Future()
        self._jobs.put((json.dumps(job, separators=(",", ":")), future))
        answer = future.result()
        if answer.get("id") != job["id"] or not answer.keys() >= ANSWER:
            raise HarnessError(f"{self.url}: {answer.get('fault', 'an answer to another job')}")
        return answer

    def _send_all(self) -> None:
        """One sender: batches, until `stop`."""
        while (first := self._jobs.get()) is not None:
            batch = self._gather(first)
            try:
                for (_, future), answer in zip(batch, self._post([text for text, _ in batch]), strict=True):
                    future.set_result(answer)
            except Exception as error:  # whatever it is: a future that nobody answers would hang the trainer
                for _, future in batch:
                    future.set_exception(error)

    def _gather(self, first: _Waiting) -> list[_Waiting]:
        batch, size = [first], len(first[0])
        while len(batch) < BATCH and size < BATCH_BYTES:
            try:
                item = self._jobs.get(timeout=LINGER)
            except queue.Empty:
                break
            if item is None:  # for the next turn of a sender
                self._jobs.put(None)
                break
            batch.append(item)
            size += len(item[0])
        return batch

    def _post(self, texts: list[str]) -> list[dict[str, Any]]:
        """The answers to a batch. Raises HarnessError once every attempt failed, ConfigError if the service refuses."""
        body = f'{{"jobs":[{",".join(texts)}]}}'.encode("ascii")
        failures, busy_until = 0, time.monotonic() + BUSY_SECONDS
        while True:
            try:
                answer = self._client.post("/run_batch", content=body, headers={"Content-Type": "application/json"})
                if answer.status_code == 429 and time.monotonic() < busy_until:
                    time.sleep(float(answer.headers.get("Retry-After", 1)))
                    continue
                if answer.status_code == 413:
                    raise HarnessError(f"{self.url}: a job of {len(body)} bytes is too large for it")
                if answer.status_code < 500 and answer.status_code != 429:
                    _check_status(answer)
                    return _list_of(answer, len(texts))
                fault = f"{self.url} answers {answer.status_code}"
            except (httpx.HTTPError, ValueError) as error:
                if isinstance(error, ConfigError):
                    raise
                fault = f"{self.url}: {type(error).__name__}: {error}"
            if failures == RETRIES:
                raise HarnessError(f"{fault}, {1 + RETRIES} times")
            time.sleep(PAUSE * 2**failures)
            failures += 1
            self.num_restarts += 1

    def stop(self) -> None:
        """Let the senders end; what is on the way is waited for."""
        if self._senders[0].is_alive():
            for _ in self._senders:
                self._jobs.put(None)
            for sender in self._senders:
                sender.join()
        self._client.close()


def address(url: str) -> str:
    """The base address of a service as a person wrote it: without a scheme http, without a slash at the end.

    Raises ConfigError.
    """
    full = (url.strip() if "://" in url else f"http://{url.strip()}").rstrip("/")
    try:
        parsed = httpx.URL(full)
    except httpx.InvalidURL:
        parsed = None
    if parsed is None or parsed.scheme not in ("http", "https") or not parsed.host or parsed.path not in ("", "/"):
        raise ConfigError(
            f"runtime.sandbox.url: expected an address such as http://10.0.0.2:8801, got {without_password(url)!r}"
        )
    return full


def _check_status(answer: httpx.Response) -> None:
    if answer.status_code in (401, 403):
        raise ConfigError(
            f"runtime.sandbox.url: {without_password(str(answer.url))} refuses the token; expected the service's"
            f" {TOKEN} in the environment"
        )
    if answer.status_code != 200:
        raise ConfigError(
            f"runtime.sandbox.url: {without_password(str(answer.url))}: expected status 200, found"
            f" {answer.status_code}: {answer.text[:300]}; is it a sandbox service of this version?"
        )


def _list_of(answer: httpx.Response, count: int) -> list[dict[str, Any]]:
    """The answers. Raises ValueError where the stream broke off or something else came."""
    answers = json.loads(answer.content)
    if not isinstance(answers, list) or len(answers) != count or not all(isinstance(a, dict) for a in answers):
        raise ValueError(f"expected a list of {count} answers")
    return answers
