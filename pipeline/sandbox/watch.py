"""One child, seen from the watcher: hands it its job, feeds it, reads it, times it, ends it.

The child owns its end of every pipe, so nothing that arrives is trusted: bytes are counted, frames must begin as an
answer of this job does, an answer must follow its question, and what they say is left to the judge. The CPU clock of a
child is read while it waits for its next "go", so load on the machine moves no test over its limit. What it takes to
read the arguments counts towards the whole job, and towards no test. Standard library and the neighbours only:
`jail.py` loads this file by its path.

Not promised: a wall-clock limit that holds under any load; it is for sleepers.
"""

import contextlib
import os
import select
import signal
import struct
import time
from typing import Any

import child
import kernel
from frames import frame

TICK = 0.01  # seconds between two looks at a child's clock and threads, at most


class Watch:
    """A child's frames, its output, its clock."""

    start_seconds = 20.0  # before a child is closed off nothing of the candidate has run: only a stalled machine waits

    def __init__(self, job: dict[str, Any], pid: int, channel: int, out: int, err: int, stdin: int) -> None:
        self.job, self.pid, self.limits = job, pid, job["limits"]
        self.channel, self.out, self.err, self.stdin = channel, out, err, stdin
        asked = {"nonce": job["nonce"], "source": job["source"], "entry": job["entry"]}
        asked |= {"tests": [] if job["entry"] is None else job["tests"]}
        start = child.ALLOWANCE.pack(int(self.limits["memory"]), self.limits["job_cpu"]) + frame(asked)
        text = job["tests"][0].get("stdin", "").encode("utf-8", "surrogatepass")
        self.feeds = {channel: memoryview(start), stdin: memoryview(text)}  # what it has not taken yet
        self.head = f'{{"n":"{job["nonce"]}",'.encode("ascii")
        self.buffer, self.output = bytearray(), {out: bytearray(), err: bytearray()}
        self.caps = {out: self.limits["stdout"], err: self.limits["stderr"]}
        self.received = 0
        self.frames: list[str] = []
        self.said = b""  # of the two bytes before its first frame
        self.ended, self.closed = False, False
        self.cut: str | None = None
        self.exit: tuple[int, Any] | None = None  # wait status and usage, once reaped
        self.died = False  # by itself
        self.cpu_start = self.cpu_mark = 0.0
        self.started = time.monotonic()
        self.wall_mark = self.stopped = self.counted = self.started
        self.poller = select.poll()

    def until_done(self, jobs: int) -> None:
        """Until the child said end, died, or passed a limit. The end of the trainer ends everything."""
        self.poller.register(jobs, 0)  # only its hang-up
        for fd in (self.channel, self.out, self.err, self.stdin):
            os.set_blocking(fd, False)
        self.poller.register(
            self.channel, select.POLLIN | select.POLLOUT
        )  # first: what it says comes before what it wrote
        for fd in (self.out, self.err):
            self.poller.register(fd, select.POLLIN)
        self.poller.register(self.stdin, select.POLLOUT)
        self._feed(self.stdin)
        self._go()
        while not self.ended and self.cut is None and self.exit is None:
            for fd, event in self.poller.poll(self._patience() * 1000):
                if fd == jobs:
                    os.kill(self.pid, signal.SIGKILL)
                    os._exit(0)
                elif fd == self.stdin:
                    self._feed(fd)
                elif fd == self.channel:
                    if event & select.POLLOUT:
                        self._feed(fd)
                    if event & ~select.POLLOUT:
                        self._answers()
                else:
                    self._output(fd)
            if not self.ended and self.cut is None:
                self._look()

    def _patience(self) -> float:
        """Seconds until the CPU limit can be reached at the earliest, at most a tick."""
        if self.closed:
            return 0.001
        return min(TICK, max(0.001, self.limits["cpu"] - (kernel.cpu_clock(self.pid) - self.cpu_mark)))

    def _look(self) -> None:
        """Has it died, or passed a limit of time?"""
        if self.closed:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.exit = (status, usage)
                return
        cpu, now = kernel.cpu_clock(self.pid), time.monotonic()
        if not self.said and now - self.started < self.start_seconds:
            return
        if now - self.counted > TICK and self._too_many_threads():
            self.cut = "threads"
        elif self._used_up(cpu):
            self.cut = "cpu"
        elif now - self.started > self.limits["job_wall"] or (
            self.begun and now - self.wall_mark > self.limits["wall"]
        ):
            self.cut = "wall"

    def _too_many_threads(self) -> bool:
        self.counted = time.monotonic()
        return kernel.num_threads(self.pid) > kernel.THREADS

    @property
    def begun(self) -> bool:
        """Whether the candidate may have run."""
        return len(self.said) == 2

    def _used_up(self, cpu: float) -> bool:
        """Whether the CPU seconds of the job, or of the test that runs, are."""
        return cpu - self.cpu_start > self.limits["job_cpu"] or (
            self.begun and cpu - self.cpu_mark > self.limits["cpu"]
        )

    def _feed(self, fd: int) -> None:
        """Hand over as much as it takes: of its job on the channel, of its input on stdin."""
        left = self.feeds[fd]
        try:
            left = left[os.write(fd, left[:65536]) :] if left else left
        except BlockingIOError:
            return
        except OSError:  # it does not read, or has died: the channel's own end of file tells
            left = memoryview(b"")
        self.feeds[fd] = left
        if left:
            return
        if fd == self.channel:
            self.poller.modify(fd, select.POLLIN)
        else:
            self.poller.unregister(fd)
            os.close(fd)
            self.stdin = -1

    def _output(self, fd: int) -> None:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return
        if not data:
            with contextlib.suppress(KeyError):  # `reap` meets the end a second time
                self.poller.unregister(fd)
        self.output[fd] += data
        if len(self.output[fd]) > self.caps[fd]:
            self.cut = "output"

    def _answers(self) -> None:
        try:
            data = os.read(self.channel, 1 << 18)
        except (BlockingIOError, ConnectionResetError):
            data = b""
        if not data:
            self.closed = True
            self.poller.unregister(self.channel)
            return
        self.received += len(data)
        self.buffer += data
        while self.buffer and not self.begun and self.cut is None:
            self._begin()
        if self.received > self.limits["results"]:
            self.cut = "output"
        while not self.ended and self.cut is None and (frame := self._frame()) is not None:
            self._take(frame)

    def _begin(self) -> None:
        """One of the two bytes before the first frame: it is closed off, it has read its job. Our own code sends it."""
        self.said += bytes(self.buffer[:1])
        del self.buffer[0]
        self.cpu_mark, self.wall_mark = kernel.cpu_clock(self.pid), time.monotonic()
        if len(self.said) == 1:
            self.cpu_start, self.started = self.cpu_mark, self.wall_mark

    def _frame(self) -> str | None:
        """The next whole frame. What does not begin like an answer of this job is forged."""
        start = bytes(self.buffer[4 : 4 + len(self.head)])
        if not self.head.startswith(start):
            self.cut = "forged"
            return None
        if len(self.buffer) < 4:
            return None
        size = struct.unpack("<I", self.buffer[:4])[0]
        if size > self.limits["results"]:  # an answer of this job that is too long, or a number that somebody made up
            self.cut = "output" if len(start) == len(self.head) else "forged"
        if self.cut is not None or len(self.buffer) < 4 + size:
            return None
        body = bytes(self.buffer[4 : 4 + size])
        del self.buffer[: 4 + size]
        if not body.isascii():
            self.cut = "forged"
        return body.decode("ascii", "replace")

    def _take(self, frame: str) -> None:
        """An answer counts if its test had been started, and its CPU clock is within the limits."""
        count = len(self.job["tests"])
        if len(self.frames) == count:
            self.ended = frame == f'{{"n":"{self.job["nonce"]}","end":true}}' and not self.buffer
            self.cut = None if self.ended else "forged"
            return
        cpu = kernel.cpu_clock(self.pid)
        if self._used_up(cpu):
            self.cut = "cpu"
            return
        self.frames.append(frame)
        self.cpu_mark, self.wall_mark = cpu, time.monotonic()
        if len(self.frames) < count:
            if self.buffer:  # an answer before its question
                self.cut = "forged"
            self._go()

    def _go(self) -> None:
        """Let it run the next test."""
        self.feeds[self.channel] = memoryview(bytes(self.feeds[self.channel]) + b"g")
        self._feed(self.channel)

    def reap(self) -> None:
        """Kill what is left, collect what it wrote, close everything."""
        self.stopped = time.monotonic()
        self._bury()
        for fd in (self.out, self.err):
            size = -1
            while self.cut != "output" and size != len(self.output[fd]):  # what is still in the pipe
                size = len(self.output[fd])
                self._output(fd)
        for fd in (self.channel, self.out, self.err, self.stdin):
            if fd >= 0:
                os.close(fd)

    def _bury(self) -> None:
        """Kill the child and its group, and wait for it."""
        for kill in (os.kill, os.killpg):
            try:
                if self.exit is None or kill is os.killpg:
                    kill(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        self.died = self.exit is not None
        if self.exit is None:
            self.exit = os.wait4(self.pid, 0)[1:]

    def answer(self) -> dict[str, Any]:
        """The frame for the pool. `status` and `signal` only if the child ended by itself; `cut` if we ended it."""
        assert self.exit is not None
        status, usage = self.exit
        if not self.said and self.cut != "output":  # only a candidate writes, and whether it says R first is a race
            return {"id": self.job["id"], "fault": f"a child could not close itself off (wait status {status})"}
        if self.cut is None and not self.ended and self.buffer:
            self.cut = "forged"
        alone = self.died and self.cut is None
        return {
            "id": self.job["id"],
            "frames": self.frames,
            "status": os.WEXITSTATUS(status) if alone and os.WIFEXITED(status) else None,
            "signal": os.WTERMSIG(status) if alone and os.WIFSIGNALED(status) else None,
            "cpu_ms": round(1000 * (usage.ru_utime + usage.ru_stime)),
            "wall_ms": round(1000 * (self.stopped - self.started)),
            "max_rss_kb": usage.ru_maxrss,
            "stdout": self.output[self.out][: self.caps[self.out]].decode("utf-8", "replace"),
            "stderr": self.output[self.err][: self.caps[self.err]].decode("utf-8", "replace"),
            "cut": self.cut,
        }
