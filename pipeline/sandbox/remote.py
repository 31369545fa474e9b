"""The client of a sandbox service, used by `Pool`: sends the jobs of many threads in batches over HTTP.

Only jobs are sent: sources, arguments, stdin. Expected values, and thus the verdicts, stay in the trainer. Jobs are
pure, so a batch that fails in transit is retried three times; after that, its candidates are unscorable (`harness`). If
the service reports that it is full, the request is retried for ten minutes. The token is read from the environment
variable STAGECOACH_SANDBOX_TOKEN.

`start` queries what the service enforces and rejects a service whose ceilings or modules would change verdicts. A user
name and password in the URL are sent, but never appear in messages.

Not guaranteed: privacy in transit. Over anything but a trusted network, put TLS in front of the service and use https.
"""

import json
import os
import queue
import threading
import time
from concurrent.futures import Future

import httpx

from pipeline.run.config import without_password
from pipeline.run.errors import ConfigError
from pipeline.run.types import JsonObject
from pipeline.sandbox.config import SandboxConfig, job_limits
from pipeline.sandbox.servers import HarnessError

BATCH = 128  # jobs in one request
BATCH_BYTES = 8 << 20
SENDERS = 2  # concurrent requests: one runs while the next is prepared
BATCH_WAIT = 0.005  # seconds a batch waits for another job
RETRIES = 3
PAUSE = 0.5  # seconds before the first retry, doubled each time
BUSY_SECONDS = 600.0  # how long to retry requests to a full service
TIMEOUT = httpx.Timeout(10.0, read=900.0)  # 128 sleeping programs take two workers five minutes
TOKEN = "STAGECOACH_SANDBOX_TOKEN"
ANSWER = frozenset({"id", "frames", "status", "signal", "cpu_ms", "wall_ms", "max_rss_kb", "stdout", "stderr", "cut"})

_PendingJob = tuple[str, "Future[JsonObject]"]  # a job as JSON, and the future of its answer


class Remote:
    """A client of the service at `url` (default scheme: http). `threads` threads may use `call` concurrently."""

    profile = "sealed"  # a service is never unsafe

    def __init__(self, url: str, config: SandboxConfig) -> None:
        base_url = address(url)
        self.url, self.config, self.threads = without_password(base_url), config, BATCH * SENDERS  # url: for messages
        self.enforced: JsonObject = {}  # the answer from /health
        self.num_restarts = 0  # requests that had to be retried
        self._jobs: queue.Queue[_PendingJob | None] = queue.Queue()
        token = os.environ.get(TOKEN)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(base_url=base_url, headers=headers, timeout=TIMEOUT, trust_env=False)
        self._senders = [threading.Thread(target=self._send_batches, daemon=True) for _ in range(SENDERS)]

    def start(self) -> None:
        """Query what the service enforces. Raises ConfigError if it is unreachable or incompatible with this run."""
        try:
            answer = self._client.get("/health", timeout=10.0)
        except httpx.HTTPError as error:
            raise ConfigError(
                f"runtime.sandbox.url: expected a sandbox service at {self.url}, found none ({error}); start one there "
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
        required = job_limits(limits, cpu, cpu, limits.wall(cpu)) | {"source": limits.source_kib << 10}
        ceilings = self.enforced["ceilings"] | {"tests": limits.max_tests}
        above = {name: value for name, value in required.items() if value > ceilings[name]}
        if above or limits.max_tests > self.enforced["ceilings"]["tests"]:
            raise ConfigError(
                f"sandbox.limits: expected at most the ceilings of the service at {self.url}"
                f" ({self.enforced['ceilings']}), found {above or limits.max_tests}; lower the limits, or judge on this"
                " machine"
            )

    def call(self, job: JsonObject, seconds: float) -> JsonObject:
        """The answer to one job. Raises HarnessError. `seconds` is ignored: the service applies its own time limit."""
        future: Future[JsonObject] = Future()
        self._jobs.put((json.dumps(job, separators=(",", ":")), future))
        answer = future.result()
        if answer.get("id") != job["id"] or not answer.keys() >= ANSWER:
            raise HarnessError(f"{self.url}: {answer.get('fault', 'received the result of another job')}")
        return answer

    def _send_batches(self) -> None:
        """Send batches until `stop`; each sender thread runs this."""
        while (first := self._jobs.get()) is not None:
            batch = self._collect_batch(first)
            try:
                for (_, future), answer in zip(batch, self._post_batch([text for text, _ in batch]), strict=True):
                    future.set_result(answer)
            except Exception as error:  # any error: an unresolved future would hang the trainer
                for _, future in batch:
                    future.set_exception(error)

    def _collect_batch(self, first: _PendingJob) -> list[_PendingJob]:
        batch, size = [first], len(first[0])
        while len(batch) < BATCH and size < BATCH_BYTES:
            try:
                item = self._jobs.get(timeout=BATCH_WAIT)
            except queue.Empty:
                break
            if item is None:  # `stop`: put it back for the sender to read after this batch
                self._jobs.put(None)
                break
            batch.append(item)
            size += len(item[0])
        return batch

    def _post_batch(self, texts: list[str]) -> list[JsonObject]:
        """Send a batch and return its answers. Raises HarnessError after the last attempt, ConfigError if rejected."""
        body = f'{{"jobs":[{",".join(texts)}]}}'.encode("ascii")
        failures, busy_until = 0, time.monotonic() + BUSY_SECONDS
        while True:
            try:
                answer = self._client.post("/run_batch", content=body, headers={"Content-Type": "application/json"})
                if answer.status_code == 429 and time.monotonic() < busy_until:
                    time.sleep(float(answer.headers.get("Retry-After", 1)))
                    continue
                if answer.status_code == 413:
                    raise HarnessError(f"{self.url}: a request of {len(body)} bytes is too large for this service")
                if answer.status_code < 500 and answer.status_code != 429:
                    _check_status(answer)
                    return _parse_answers(answer, len(texts))
                fault = f"{self.url} answered {answer.status_code}"
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
        """Stop the senders after the requests in flight, and close the client."""
        if self._senders[0].is_alive():
            for _ in self._senders:
                self._jobs.put(None)
            for sender in self._senders:
                sender.join()
        self._client.close()


def address(url: str, key: str = "runtime.sandbox.url") -> str:
    """The base URL of a service from user input: http if there is no scheme, no trailing slash.

    Raises ConfigError.
    """
    base_url = (url.strip() if "://" in url else f"http://{url.strip()}").rstrip("/")
    try:
        parsed = httpx.URL(base_url)
    except httpx.InvalidURL:
        parsed = None
    if parsed is None or parsed.scheme not in ("http", "https") or not parsed.host or parsed.path not in ("", "/"):
        raise ConfigError(f"{key}: expected an address such as http://10.0.0.2:8801, got {without_password(url)!r}")
    return base_url


def _check_status(answer: httpx.Response) -> None:
    if answer.status_code in (401, 403):
        raise ConfigError(
            f"runtime.sandbox.url: {without_password(str(answer.url))} rejected the token; set the environment variable"
            f" {TOKEN} to the service's token"
        )
    if answer.status_code != 200:
        raise ConfigError(
            f"runtime.sandbox.url: {without_password(str(answer.url))}: expected status 200, found"
            f" {answer.status_code}: {answer.text[:300]}; is it a sandbox service of this version?"
        )


def _parse_answers(answer: httpx.Response, count: int) -> list[JsonObject]:
    """The answers in a response. Raises ValueError if the stream was cut off or has unexpected content."""
    answers = json.loads(answer.content)
    if not isinstance(answers, list) or len(answers) != count or not all(isinstance(a, dict) for a in answers):
        raise ValueError(f"expected a list of {count} answers")
    return answers
