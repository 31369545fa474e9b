"""Runs candidates as jobs: splits them, retries after timeouts, and limits each candidate across all its children.

A `CandidateJob` is one candidate and its tests, without expected values. A function becomes one job (a test that times
out is abandoned and a fresh child continues with the next one); a program that reads stdin becomes one job per test.
The result is a list of `Report`s: what each child sent and how it ended, which only `judge.py` interprets.

Jobs run in the fork servers of this machine (`servers.py`) or, given an address, in those of a sandbox service
(`remote.py`); both implement `call`, so a candidate's verdict does not depend on where it ran. Threads here only wait.

Not guaranteed: consistent wall-clock limits under load; they are for programs that sleep, and allow 4 x CPU + 2 s.
CPU limits apply under any load.
"""

import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.run.types import JsonObject
from pipeline.sandbox.config import Limits, SandboxConfig, job_limits
from pipeline.sandbox.servers import HarnessError, NoSandboxError, Servers

if TYPE_CHECKING:
    from pipeline.sandbox.remote import Remote

__all__ = ["CandidateJob", "Limits", "NoSandboxError", "Pool", "Report", "SandboxConfig"]

LOG = logging.getLogger(__name__)
AHEAD = 4  # tasks to read ahead per thread
GRACE_SECONDS = 30.0  # past a job's own wall-clock limit, after which its server is considered hung


@dataclass(frozen=True)
class CandidateJob:
    """One candidate. A test has `args` and `kwargs` (source of a literal list and dict) or `stdin`."""

    source: str
    entry: str | None  # the function to call; None: a program, whose tests have stdin
    tests: list[dict[str, str]]
    cpu_seconds: float


@dataclass(frozen=True)
class Report:
    """One child's result: it received `given` tests, the first with index `first`, and answered len(frames) of them."""

    first: int
    given: int
    is_program: bool
    nonce: str
    frames: list[str]
    status: int | None  # exit code, if it exited on its own before sending its end frame
    signal: int | None
    cut: str | None  # why the server killed it: cpu, wall, threads, output, forged
    stdout: str
    stderr: str
    cpu_ms: int
    max_rss_kb: int

    @property
    def timed_out(self) -> bool:
        """Whether the server killed the child at a time limit."""
        return self.cut in ("cpu", "wall")


class Pool:
    """A context manager that runs tasks; `url` is the address of a sandbox service, or None for this machine.

    Entering raises ConfigError if there is no sandbox and `allow_unsafe` is false, or no compatible service.
    """

    def __init__(self, config: SandboxConfig, workers: int, url: str | None = None) -> None:
        self.config = config
        self.host: Servers | Remote = Servers(config, workers) if url is None else _remote(url, config)
        self._threads = ThreadPoolExecutor(self.host.threads, thread_name_prefix="sandbox")

    def __enter__(self) -> "Pool":
        self.host.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.host.stop()

    def map(self, tasks: Iterable[CandidateJob | None]) -> Iterator[list[Report] | None]:
        """Yield the reports of each task in order; None if the task is None or its server died twice.

        Reads only a few tasks ahead, so `tasks` may be infinite.
        """
        waiting: deque[Future[list[Report] | None] | None] = deque()
        try:
            for task in tasks:
                waiting.append(None if task is None else self._threads.submit(self.run, task))
                if len(waiting) > AHEAD * self.host.threads:
                    first = waiting.popleft()
                    yield None if first is None else first.result()
            while waiting:
                first = waiting.popleft()
                yield None if first is None else first.result()
        finally:
            for future in waiting:
                if future is not None:
                    future.cancel()

    def run(self, task: CandidateJob) -> list[Report] | None:
        """The reports of one task, in the order of its tests; None if its servers failed."""
        try:
            return self._run_program(task) if task.entry is None else self._run_function(task)
        except HarnessError as error:
            LOG.error("a candidate is unscorable: %s", error)
            return None

    def _run_function(self, task: CandidateJob) -> list[Report]:
        """Run all tests in one child; after a timeout, run the rest in a fresh one."""
        budget, reports, first, timeouts = Budget(self.config.limits), [], 0, 0
        while first < len(task.tests) and timeouts < self.config.limits.timeouts and budget.is_left():
            report = self._run_job(task, first, task.tests[first:], budget)
            reports.append(report)
            if not report.timed_out:
                break
            timeouts += 1
            first += len(report.frames) + 1
        return reports

    def _run_program(self, task: CandidateJob) -> list[Report]:
        """Run each test in a fresh child."""
        budget, reports, timeouts = Budget(self.config.limits), [], 0
        for first, test in enumerate(task.tests):
            if timeouts >= self.config.limits.timeouts or not budget.is_left():
                break
            reports.append(self._run_job(task, first, [test], budget))
            timeouts += reports[-1].timed_out
        return reports

    def _run_job(self, task: CandidateJob, first: int, tests: list[dict[str, str]], budget: "Budget") -> Report:
        """Run tests in one child, with a new nonce per job."""
        nonce = os.urandom(16).hex()
        job = {
            "id": nonce,
            "nonce": nonce,
            "source": task.source,
            "entry": task.entry,
            "tests": tests,
            "limits": job_limits(self.config.limits, task.cpu_seconds, budget.cpu_left, budget.wall_left),
        }
        answer = self.host.call(job, budget.wall_left + GRACE_SECONDS)
        budget.spend(answer)
        return Report(
            first=first,
            given=len(tests),
            is_program=task.entry is None,
            nonce=nonce,
            frames=answer["frames"],
            status=answer["status"],
            signal=answer["signal"],
            cut=answer["cut"],
            stdout=answer["stdout"],
            stderr=answer["stderr"],
            cpu_ms=answer["cpu_ms"],
            max_rss_kb=answer["max_rss_kb"],
        )


def _remote(url: str, config: SandboxConfig) -> "Remote":
    from pipeline.sandbox.remote import Remote  # imported lazily: judging on this machine needs no HTTP client

    return Remote(url, config)


class Budget:
    """CPU and wall seconds that a candidate has left across all its children, as measured by their servers.

    Waiting for a busy server or service does not count.
    """

    def __init__(self, limits: Limits) -> None:
        self.cpu_left = limits.job_cpu_seconds
        self.wall_left = limits.wall(limits.job_cpu_seconds)

    def spend(self, answer: JsonObject) -> None:
        """Subtract one child's usage."""
        self.cpu_left -= answer["cpu_ms"] / 1000
        self.wall_left -= answer["wall_ms"] / 1000

    def is_left(self) -> bool:
        """Whether another child may start."""
        return self.cpu_left > 0 and self.wall_left > 0
