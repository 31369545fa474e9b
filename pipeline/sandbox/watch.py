"""The watcher's view of one child: sends its job and input, reads its output, measures its time, and kills it.

The child owns its end of every pipe, so nothing that arrives is trusted: bytes are counted, frames must begin like an
answer to this job, an answer must follow its "go", and the judge checks the contents. A child's CPU clock is read while
it waits for its next "go", so machine load cannot push a test over its limit. Time spent reading the arguments counts
toward the job's limit but not toward any test's. Standard library and neighboring modules only: `jail.py` loads this
file by its path.

Not guaranteed: an exact wall-clock limit under load; this limit targets programs that sleep.
"""

import contextlib
import os
import resource
import select
import signal
import struct
import time

import child
import kernel
from messages import ChildJob, ChildResult, Fault, frame

TICK = 0.01  # maximum seconds between checks of a child's clock and threads


class Watch:
    """One child's frames, output and clocks."""

    start_seconds = 20.0  # for a child to isolate itself; no candidate code runs yet: only a stalled machine exceeds it

    def __init__(self, job: ChildJob, pid: int, channel: int, out: int, err: int, stdin: int) -> None:
        self.job, self.pid, self.limits = job, pid, job["limits"]
        self.channel, self.out, self.err, self.stdin = channel, out, err, stdin
        request = {"nonce": job["nonce"], "source": job["source"], "entry": job["entry"]}
        request |= {"tests": [] if job["entry"] is None else job["tests"]}
        start = child.ALLOWANCE.pack(int(self.limits["memory"]), self.limits["job_cpu"]) + frame(request)
        text = job["tests"][0].get("stdin", "").encode("utf-8", "surrogatepass")
        self.pending = {channel: memoryview(start), stdin: memoryview(text)}  # bytes not yet sent
        self.head = f'{{"n":"{job["nonce"]}",'.encode("ascii")
        self.buffer, self.output = bytearray(), {out: bytearray(), err: bytearray()}
        self.caps = {out: self.limits["stdout"], err: self.limits["stderr"]}
        self.received = 0
        self.frames: list[str] = []
        self.handshake = b""  # the bytes R and A received so far
        self.ended, self.closed = False, False
        self.cut: str | None = None
        self.exit: tuple[int, resource.struct_rusage] | None = None  # wait status and usage, once reaped
        self.died = False  # without being killed
        self.cpu_start = self.cpu_mark = 0.0
        self.started = time.monotonic()
        self.wall_mark = self.stopped = self.threads_counted = self.started
        self.poller = select.poll()

    def until_done(self, jobs: int) -> None:
        """Serve the child until it ends, dies, or exceeds a limit. Exits when the trainer closes `jobs`."""
        self.poller.register(jobs, 0)  # only to detect when it closes
        for fd in (self.channel, self.out, self.err, self.stdin):
            os.set_blocking(fd, False)
        # Registered first, so that frames are read before output.
        self.poller.register(self.channel, select.POLLIN | select.POLLOUT)
        for fd in (self.out, self.err):
            self.poller.register(fd, select.POLLIN)
        self.poller.register(self.stdin, select.POLLOUT)
        self._send(self.stdin)
        self._start_test()
        while not self.ended and self.cut is None and self.exit is None:
            for fd, event in self.poller.poll(self._poll_timeout() * 1000):
                if fd == jobs:
                    os.kill(self.pid, signal.SIGKILL)
                    os._exit(0)
                elif fd == self.stdin:
                    self._send(fd)
                elif fd == self.channel:
                    if event & select.POLLOUT:
                        self._send(fd)
                    if event & ~select.POLLOUT:
                        self._read_frames()
                else:
                    self._read_output(fd)
            if not self.ended and self.cut is None:
                self._check_limits()

    def _poll_timeout(self) -> float:
        """Seconds until the CPU limit could be reached, at most TICK."""
        if self.closed:
            return 0.001
        return min(TICK, max(0.001, self.limits["cpu"] - (kernel.cpu_clock(self.pid) - self.cpu_mark)))

    def _check_limits(self) -> None:
        """Record whether the child has died, or cut it off if it exceeds a limit."""
        if self.closed:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.exit = (status, usage)
                return
        cpu, now = kernel.cpu_clock(self.pid), time.monotonic()
        if not self.handshake and now - self.started < self.start_seconds:
            return
        if now - self.threads_counted > TICK and self._too_many_threads():
            self.cut = "threads"
        elif self._exceeds_cpu(cpu):
            self.cut = "cpu"
        elif now - self.started > self.limits["job_wall"] or (
            self.has_started and now - self.wall_mark > self.limits["wall"]
        ):
            self.cut = "wall"

    def _too_many_threads(self) -> bool:
        self.threads_counted = time.monotonic()
        return kernel.num_threads(self.pid) > kernel.THREADS

    @property
    def has_started(self) -> bool:
        """Whether the candidate may have started running."""
        return len(self.handshake) == 2

    def _exceeds_cpu(self, cpu: float) -> bool:
        """Whether the job or the running test has used more CPU than its limit."""
        return cpu - self.cpu_start > self.limits["job_cpu"] or (
            self.has_started and cpu - self.cpu_mark > self.limits["cpu"]
        )

    def _send(self, fd: int) -> None:
        """Send as much as the pipe accepts: job data on the channel, input on stdin."""
        data = self.pending[fd]
        try:
            data = data[os.write(fd, data[:65536]) :] if data else data
        except BlockingIOError:
            return
        except OSError:  # the child does not read, or has died: end of file on the channel shows which
            data = memoryview(b"")
        self.pending[fd] = data
        if data:
            return
        if fd == self.channel:
            self.poller.modify(fd, select.POLLIN)
        else:
            self.poller.unregister(fd)
            os.close(fd)
            self.stdin = -1

    def _read_output(self, fd: int) -> None:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return
        if not data:
            with contextlib.suppress(KeyError):  # already unregistered if `reap` reads end of file again
                self.poller.unregister(fd)
        self.output[fd] += data
        if len(self.output[fd]) > self.caps[fd]:
            self.cut = "output"

    def _read_frames(self) -> None:
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
        while self.buffer and not self.has_started and self.cut is None:
            self._read_handshake()
        if self.received > self.limits["results"]:
            self.cut = "output"
        while not self.ended and self.cut is None and (frame := self._next_frame()) is not None:
            self._accept(frame)

    def _read_handshake(self) -> None:
        """Read one of the two bytes before the first frame: R (isolated), A (job read). Our own code sends them."""
        self.handshake += bytes(self.buffer[:1])
        del self.buffer[0]
        self.cpu_mark, self.wall_mark = kernel.cpu_clock(self.pid), time.monotonic()
        if len(self.handshake) == 1:
            self.cpu_start, self.started = self.cpu_mark, self.wall_mark

    def _next_frame(self) -> str | None:
        """The next complete frame, or None. Bytes that do not begin like an answer to this job are deemed forged."""
        start = bytes(self.buffer[4 : 4 + len(self.head)])
        if not self.head.startswith(start):
            self.cut = "forged"
            return None
        if len(self.buffer) < 4:
            return None
        size = struct.unpack("<I", self.buffer[:4])[0]
        if size > self.limits["results"]:  # an oversized answer to this job, or a made-up length
            self.cut = "output" if len(start) == len(self.head) else "forged"
        if self.cut is not None or len(self.buffer) < 4 + size:
            return None
        body = bytes(self.buffer[4 : 4 + size])
        del self.buffer[: 4 + size]
        if not body.isascii():
            self.cut = "forged"
        return body.decode("ascii", "replace")

    def _accept(self, frame: str) -> None:
        """Accept an answer if its test was started and the CPU clock is within the limits."""
        count = len(self.job["tests"])
        if len(self.frames) == count:
            self.ended = frame == f'{{"n":"{self.job["nonce"]}","end":true}}' and not self.buffer
            self.cut = None if self.ended else "forged"
            return
        cpu = kernel.cpu_clock(self.pid)
        if self._exceeds_cpu(cpu):
            self.cut = "cpu"
            return
        self.frames.append(frame)
        self.cpu_mark, self.wall_mark = cpu, time.monotonic()
        if len(self.frames) < count:
            if self.buffer:  # an answer sent before its "go"
                self.cut = "forged"
            self._start_test()

    def _start_test(self) -> None:
        self.pending[self.channel] = memoryview(bytes(self.pending[self.channel]) + b"g")
        self._send(self.channel)

    def reap(self) -> None:
        """Kill the child, read the rest of its output, close all descriptors."""
        self.stopped = time.monotonic()
        self._kill()
        for fd in (self.out, self.err):
            size = -1
            while self.cut != "output" and size != len(self.output[fd]):  # what is left in the pipe
                size = len(self.output[fd])
                self._read_output(fd)
        for fd in (self.channel, self.out, self.err, self.stdin):
            if fd >= 0:
                os.close(fd)

    def _kill(self) -> None:
        """Kill the child and its process group, and wait for it."""
        for kill in (os.kill, os.killpg):
            try:
                if self.exit is None or kill is os.killpg:
                    kill(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        self.died = self.exit is not None
        if self.exit is None:
            self.exit = os.wait4(self.pid, 0)[1:]

    def answer(self) -> ChildResult | Fault:
        """The answer for the pool. `status` or `signal` is set if the child ended by itself, `cut` if we killed it."""
        assert self.exit is not None
        status, usage = self.exit
        if not self.handshake and self.cut != "output":  # too much output shows that a candidate ran, even before R
            return {"id": self.job["id"], "fault": f"a child could not isolate itself (wait status {status})"}
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
