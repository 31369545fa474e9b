"""The fork servers of the sandbox, one per worker: starts them, sends jobs, restarts what dies, keeps the limits.

A `Task` is one candidate and its tests, without expected values. It becomes one job for a function (a test that runs
out of time is given up and a fresh child goes on behind it), or one job per test for a program that reads stdin. What
comes back are `Report`s: what each child sent and how it ended, to be believed by nobody but `judge.py`.

The servers are executed, never forked (`subprocess`), with an environment of one variable and no descriptor but three,
so no memory, key or file of the trainer reaches them. Threads here only wait for them.

Not promised: equal wall-clock limits under any load; they are for sleepers, and 4 x CPU + 2 s wide. CPU limits hold.
"""

import contextlib
import json
import logging
import os
import queue
import select
import struct
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError

LOG = logging.getLogger(__name__)
JAIL = Path(__file__).with_name("jail.py")
ENVIRONMENT = {"PYTHONHASHSEED": "0"}  # sets iterate alike in every run; python -I would ignore it
ATTEMPTS = 2  # a job that kills its server this often is unscorable
START_SECONDS = 120.0
GRACE_SECONDS = 30.0  # beyond a job's own wall limit, before the server counts as hung
UNSAFE_WARNING = "sandbox.allow_unsafe: generated code runs with resource limits only; it can read and write your files"
NO_SANDBOX = (
    "Running generated code safely needs Linux with seccomp. Set runtime.sandbox.url to a Linux machine, "
    "or sandbox.allow_unsafe: true to run it with resource limits only."
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one candidate may use. All of it changes verdicts, so all of it is tracked."""

    cpu_seconds: float = 0.5  # of one test, where the problem does not say
    job_cpu_seconds: float = 10.0  # of all tests of a candidate together
    wall_extra_seconds: float = 2.0  # a test may last 4 x its CPU limit and this
    timeouts: int = 3  # after so many the rest of the tests time out
    memory_mib: int = 256  # address space above the server's own
    stdout_kib: int = 64
    stderr_kib: int = 8
    results_kib: int = 4096  # of all answers of a candidate
    source_kib: int = 64
    max_tests: int = 256

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name}: expected a positive number, got {value}")

    def wall(self, cpu_seconds: float) -> float:
        """Seconds on the wall clock that go with a CPU limit."""
        return 4 * cpu_seconds + self.wall_extra_seconds


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """Block `sandbox` of params.yaml; the keys of `limits` stand flat in it."""

    limits: Limits = field(default_factory=Limits)
    preload: tuple[str, ...] = ()  # modules that candidates may import besides the standard library's: [numpy]
    allow_unsafe: bool = False  # where there is no sandbox: run with resource limits only, and mark the results


@dataclass(frozen=True)
class Task:
    """One candidate. A test holds `args` and `kwargs` (texts of a literal list and dict) or `stdin`."""

    source: str
    entry: str | None  # the function to call; None: a program, and the tests hold stdin
    tests: list[dict[str, str]]
    cpu_seconds: float


@dataclass(frozen=True)
class Report:
    """How one child went: it was given the `given` tests from `first` on and answered len(frames) of them."""

    first: int
    given: int
    is_program: bool
    nonce: str
    frames: list[str]
    status: int | None  # exit code, if it ended by itself before its end
    signal: int | None
    cut: str | None  # what the server ended it for: cpu, wall, output, forged
    stdout: str
    stderr: str
    cpu_ms: int
    max_rss_kb: int

    @property
    def timed_out(self) -> bool:
        """Whether a limit of time ended it."""
        return self.cut in ("cpu", "wall")


class NoSandboxError(ConfigError):
    """This machine cannot hold candidates, and nobody allowed to do without."""


class HarnessError(RuntimeError):
    """The server died, hung, or could not close a child off: says nothing about the candidate."""


class Server:
    """One process of `jail.py`. Not for two threads at once."""

    def __init__(self, config: SandboxConfig, profile: str) -> None:
        self.config, self.profile = config, profile
        self.process: subprocess.Popen[bytes] | None = None
        self.ready: dict[str, Any] = {}

    def launch(self) -> None:
        """Execute the process and send its settings; `greet` waits for the answer."""
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-S", "-B", str(JAIL)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=ENVIRONMENT,
            cwd="/",
            start_new_session=True,  # an interrupt at the terminal is the trainer's business
            bufsize=0,
        )
        paths = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}) if self.config.preload else []
        self._send({"preload": list(self.config.preload), "paths": paths, "profile": self.profile})

    def greet(self) -> None:
        """Wait until the server has proved its layers. Raises ConfigError if it refuses to work."""
        answer = self._receive(START_SECONDS)
        if "missing" in answer:
            self.stop()
            raise ConfigError(f"sandbox.preload: {answer['missing']}; install it or take it off the list")
        if "refused" in answer:
            self.stop()
            raise NoSandboxError(f"{NO_SANDBOX} Here: {answer['refused']}.")
        self.ready = answer["ready"]

    def call(self, job: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to one job. Raises HarnessError, and is then stopped."""
        try:
            self._send(job)
            answer = self._receive(seconds)
        except OSError as error:
            self.stop()
            raise HarnessError(f"the sandbox server is gone: {error}") from error
        if answer.get("id") != job["id"] or "fault" in answer:
            self.stop()
            raise HarnessError(str(answer.get("fault", "an answer to another job")))
        return answer

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process is not None and self.process.stdin is not None
        body = json.dumps(message, separators=(",", ":")).encode("ascii")
        view = memoryview(struct.pack("<I", len(body)) + body)
        while view:
            view = view[os.write(self.process.stdin.fileno(), view) :]

    def _receive(self, seconds: float) -> dict[str, Any]:
        assert self.process is not None and self.process.stdout is not None
        fd, deadline = self.process.stdout.fileno(), time.monotonic() + seconds
        poller, data, size = select.poll(), bytearray(), 4
        poller.register(fd, select.POLLIN)
        while len(data) < size:
            ready = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            piece = os.read(fd, size - len(data)) if ready else b""
            if not piece:
                self.stop()
                raise HarnessError("the sandbox server died" if ready else "the sandbox server hangs")
            data += piece
            if size == 4 and len(data) == 4:
                size += struct.unpack("<I", data)[0]
        return json.loads(data[4:])

    def stop(self) -> None:
        """End the process; its children die with it."""
        process, self.process = self.process, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        try:
            process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Pool:
    """Servers for tasks, as a context manager. `profile` says what is enforced once it is entered."""

    def __init__(self, config: SandboxConfig, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers: expected at least 1, got {workers}")
        self.config, self.workers, self.profile = config, workers, "sealed"
        self.enforced: dict[str, Any] = {}  # what the first server reported: architecture, landlock, uid, ...
        self.num_restarts = 0
        self._servers: list[Server] = []
        self._free: queue.SimpleQueue[Server] = queue.SimpleQueue()

    def __enter__(self) -> "Pool":
        try:
            self._start("sealed")
        except NoSandboxError:
            if not self.config.allow_unsafe:
                raise
            LOG.warning(UNSAFE_WARNING)
            self._start("unsafe")
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="sandbox")
        return self

    def _start(self, profile: str) -> None:
        servers = [Server(self.config, profile) for _ in range(self.workers)]
        try:
            for server in servers:
                server.launch()
            for server in servers:
                server.greet()
        except (OSError, HarnessError) as error:
            raise NoSandboxError(f"{NO_SANDBOX} Here: {error}.") from error
        finally:
            if not all(server.ready for server in servers):
                for server in servers:
                    server.stop()
        self.profile, self.enforced, self._servers = profile, servers[0].ready, servers
        for server in servers:
            self._free.put(server)

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        for server in self._servers:
            server.stop()

    def map(self, tasks: Iterable[Task | None]) -> Iterator[list[Report] | None]:
        """The reports of each task in order; None for a task that is None or whose server died twice.

        Reads only a few tasks ahead, so `tasks` may be endless.
        """
        waiting: deque[Future[list[Report] | None] | None] = deque()
        try:
            for task in tasks:
                waiting.append(None if task is None else self._threads.submit(self.run, task))
                if len(waiting) > 4 * self.workers:
                    first = waiting.popleft()
                    yield None if first is None else first.result()
            while waiting:
                first = waiting.popleft()
                yield None if first is None else first.result()
        finally:
            for future in waiting:
                if future is not None:
                    future.cancel()

    def run(self, task: Task) -> list[Report] | None:
        """The reports of one task, in the order of its tests; None when its server died ATTEMPTS times."""
        server = self._free.get()
        try:
            if task.entry is None:
                return self._programs(server, task)
            return self._function(server, task)
        except HarnessError as error:
            LOG.error("a candidate is unscorable, its sandbox server failed %d times: %s", ATTEMPTS, error)
            return None
        finally:
            self._free.put(server)

    def _function(self, server: Server, task: Task) -> list[Report]:
        """One child for all tests; after a test that ran out of time a fresh one for the tests behind it."""
        budget, reports, first, timeouts = Budget(self.config.limits), [], 0, 0
        while first < len(task.tests) and timeouts < self.config.limits.timeouts and budget.left():
            report = self._job(server, task, first, task.tests[first:], budget)
            reports.append(report)
            if not report.timed_out:
                break
            timeouts += 1
            first += len(report.frames) + 1
        return reports

    def _programs(self, server: Server, task: Task) -> list[Report]:
        """A fresh child for each test."""
        budget, reports, timeouts = Budget(self.config.limits), [], 0
        for first, test in enumerate(task.tests):
            if timeouts >= self.config.limits.timeouts or not budget.left():
                break
            reports.append(self._job(server, task, first, [test], budget))
            timeouts += reports[-1].timed_out
        return reports

    def _job(self, server: Server, task: Task, first: int, tests: list[dict[str, str]], budget: "Budget") -> Report:
        limits = self.config.limits
        message = {
            "profile": self.profile,
            "source": task.source,
            "entry": task.entry,
            "tests": tests,
            "limits": {
                "cpu": task.cpu_seconds,
                "wall": limits.wall(task.cpu_seconds),
                "job_cpu": budget.cpu_left,
                "job_wall": budget.wall_left(),
                "memory": limits.memory_mib << 20,
                "stdout": limits.stdout_kib << 10,
                "stderr": limits.stderr_kib << 10,
                "results": limits.results_kib << 10,
            },
        }
        answer = self._call(server, message, budget.wall_left() + GRACE_SECONDS)
        budget.cpu_left -= answer["cpu_ms"] / 1000
        return Report(
            first=first,
            given=len(tests),
            is_program=task.entry is None,
            nonce=answer["nonce"],
            frames=answer["frames"],
            status=answer["status"],
            signal=answer["signal"],
            cut=answer["cut"],
            stdout=answer["stdout"],
            stderr=answer["stderr"],
            cpu_ms=answer["cpu_ms"],
            max_rss_kb=answer["max_rss_kb"],
        )

    def _call(self, server: Server, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The server's answer and the nonce it had to use; a dead server is started again, ATTEMPTS times in all."""
        for attempt in range(1, ATTEMPTS + 1):
            nonce = os.urandom(16).hex()
            try:
                if server.process is None:
                    self.num_restarts += 1
                    server.launch()
                    server.greet()
                return server.call(message | {"id": nonce, "nonce": nonce}, seconds) | {"nonce": nonce}
            except HarnessError:
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError("unreachable")


class Budget:
    """What a candidate has left of its CPU and wall seconds over all its children."""

    def __init__(self, limits: Limits) -> None:
        self.cpu_left = limits.job_cpu_seconds
        self._deadline = time.monotonic() + limits.wall(limits.job_cpu_seconds)

    def wall_left(self) -> float:
        """Seconds until the candidate's deadline."""
        return max(0.0, self._deadline - time.monotonic())

    def left(self) -> bool:
        """Whether another child may start."""
        return self.cpu_left > 0 and self.wall_left() > 0
