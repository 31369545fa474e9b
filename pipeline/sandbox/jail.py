"""The fork server that runs untrusted code, and the child that it runs in.

`pool.py` executes `python -P -s -S -B jail.py` with an empty environment: this process never held the trainer's memory,
keys or data. It reads settings, then jobs, as frames (4 bytes of little-endian length, JSON) on stdin, and answers each
on stdout. A job is one child: forked, closed off by `kernel.py`, told "go" before each test, killed, reaped. The child
answers on fd 3: the byte R when it is closed off, then per test `{"n": nonce, "i": index, "v": value}` or
`{"n", "i", "e": [type, message]}`, or once `{"n", "load", "e"}` if the source does not load, then `{"n", "end"}`.

    settings  {"profile", "preload": [module], "paths": [folder]}  ->  {"ready": {...}} or {"refused": why}
    job       {"id", "nonce", "profile", "source", "entry", "tests": [{"args", "kwargs"} or {"stdin"}], "limits": {...}}
    answer    {"id", "frames", "status", "signal", "cpu_ms", "max_rss_kb", "stdout", "stderr", "cut"} or {"id", "fault"}

The CPU clock of a child is read while it waits for its next "go", so load on the machine moves no test over its limit.
`python -m pipeline.sandbox.jail --probe` prints what this machine enforces. Standard library only, nothing of the project.

Promised: no file, network, process or secret within reach of the child; bounded time, memory and output; no survivors.
Not promised: kernel bugs, CPU side channels, hidden test inputs, strong tests, fair shares. This is no virtual machine:
code of strangers belongs on a machine of its own.
"""

import ast
import contextlib
import fcntl
import gc
import importlib
import json
import os
import platform
import select
import shutil
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # -P left it out; the neighbours are taken without the project package
import child
import kernel
import trial

sys.path.pop(0)

# What a candidate may import: nothing can be loaded once the doors are closed. Each shared library makes every fork
# dearer, so those that cannot work in here (asyncio, subprocess, multiprocessing) and OpenSSL stay out.
MODULES = """
abc argparse array ast base64 binascii bisect builtins calendar cmath codecs collections collections.abc colorsys
concurrent.futures contextlib contextvars copy copyreg csv ctypes dataclasses datetime decimal difflib enum errno
fileinput fnmatch fractions functools gc glob graphlib hashlib heapq hmac html html.parser inspect io ipaddress itertools
json keyword linecache locale logging math numbers operator os pathlib pickle platform pprint queue random re reprlib
secrets select shlex signal socket stat statistics string stringprep struct sys tempfile textwrap threading
time timeit tokenize traceback types typing unicodedata unittest urllib.parse warnings weakref zlib _strptime
encodings.ascii encodings.base64_codec encodings.cp1252 encodings.hex_codec encodings.idna encodings.latin_1
encodings.punycode encodings.raw_unicode_escape encodings.rot_13 encodings.unicode_escape encodings.utf_16
encodings.utf_16_be encodings.utf_16_le encodings.utf_32 encodings.utf_8 encodings.utf_8_sig
"""
WITHOUT_OPENSSL = "_hashlib"  # hashlib falls back to its own implementations
TICK = 0.05  # seconds between two looks at a child's clock, at most


def read_frame(fd: int) -> Any:
    """One frame, or None at the end of the stream."""
    head = _read_exactly(fd, 4)
    if head is None:
        return None
    body = _read_exactly(fd, struct.unpack("<I", head)[0])
    return None if body is None else json.loads(body)


def _read_exactly(fd: int, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        piece = os.read(fd, min(size - len(parts), 1 << 20))
        if not piece:
            return None
        parts += piece
    return bytes(parts)


def write_frame(fd: int, message: object) -> None:
    """One frame, whole."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    child.write_all(fd, struct.pack("<I", len(body)) + body)


def prepare(preload: list[str], paths: list[str], profile: str) -> dict[str, Any]:
    """Import what candidates may use, give up root, prove the layers. Returns what is enforced; raises Refused."""
    os.environ.clear()
    os.environ |= {"TZ": "UTC0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    time.tzset()
    sys.path += paths
    sys.modules[WITHOUT_OPENSSL] = None  # pyright: ignore[reportArgumentType]
    for name in [*MODULES.split(), *preload]:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise kernel.Refused(f"sandbox.preload: {name} cannot be imported: {error}") from error
    sys.path.clear()
    sys.path_importer_cache.clear()
    os.environ.clear()
    uid = kernel.drop_identity()
    kernel.harden()
    if profile != "unsafe":
        trial.self_test()
    gc.collect()
    gc.freeze()  # children then copy no page only because the collector wrote to it
    return {
        "profile": profile,
        "architecture": platform.machine(),
        "landlock": kernel.landlock_version(),
        "uid": uid,
        "memory": kernel.address_space(),
    }


def serve() -> None:
    """Jobs from stdin, answers to stdout, until stdin ends."""
    jobs, answers = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (0, 1))
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = child.prepare_streams()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(child.CHANNEL + 1):  # nothing of ours stays at the places that a child uses
        os.dup2(null, fd)
    sys.argv = ["candidate"]
    settings = read_frame(jobs)
    if settings is None:
        return
    try:
        ready = prepare(settings["preload"], settings["paths"], settings["profile"])
    except (kernel.Refused, OSError) as error:
        write_frame(answers, {"refused": str(error)})
        return
    write_frame(answers, {"ready": ready})
    while (job := read_frame(jobs)) is not None:
        try:
            answer = run(job, ready["memory"], jobs)
        except Exception as error:  # a defect of ours: the pool logs it and starts another server
            answer = {"id": job["id"], "fault": f"{type(error).__name__}: {error}"}
        write_frame(answers, answer)


def run(job: dict[str, Any], memory: int, jobs: int) -> dict[str, Any]:
    """Fork one child for a job, watch it, and say what it did. `memory` is the server's own address space in bytes."""
    if job["entry"] is not None:
        job["arguments"] = [(ast.literal_eval(test["args"]), ast.literal_eval(test["kwargs"])) for test in job["tests"]]
    outside, inside = (end.detach() for end in socket.socketpair())
    (out, out_inside), (err, err_inside), (stdin_inside, stdin) = os.pipe(), os.pipe(), os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        child.run(job, (stdin_inside, out_inside, err_inside, inside), memory, parent)
    for fd in (inside, out_inside, err_inside, stdin_inside):
        os.close(fd)
    watch = Watch(job, pid, outside, out, err, stdin)
    try:
        watch.until_done(jobs)
    finally:
        watch.reap()
    return watch.answer()


class Watch:
    """One child seen from the server: its frames, its output, its clock."""

    def __init__(self, job: dict[str, Any], pid: int, channel: int, out: int, err: int, stdin: int) -> None:
        self.job, self.pid, self.limits = job, pid, job["limits"]
        self.channel, self.out, self.err, self.stdin = channel, out, err, stdin
        self.feed = memoryview(job["tests"][0].get("stdin", "").encode("utf-8", "surrogatepass"))
        self.head = f'{{"n":"{job["nonce"]}",'.encode("ascii")
        self.buffer, self.output = bytearray(), {out: bytearray(), err: bytearray()}
        self.caps = {out: self.limits["stdout"], err: self.limits["stderr"]}
        self.received = 0
        self.frames: list[str] = []
        self.ready, self.ended, self.closed = False, False, False
        self.cut: str | None = None
        self.exit: tuple[int, Any] | None = None  # wait status and usage, once reaped
        self.died = False  # by itself
        self.cpu_mark, self.started = 0.0, time.monotonic()
        self.wall_mark = self.started
        self.poller = select.poll()

    def until_done(self, jobs: int) -> None:
        """Until the child said end, died, or passed a limit. The end of the trainer ends everything."""
        self.poller.register(jobs, 0)  # only its hang-up
        for fd in (self.channel, self.out, self.err):
            os.set_blocking(fd, False)
            self.poller.register(fd, select.POLLIN)
        os.set_blocking(self.stdin, False)
        self.poller.register(self.stdin, select.POLLOUT)
        self._go()
        while not self.ended and self.cut is None and self.exit is None:
            for fd, _ in self.poller.poll(self._patience() * 1000):
                if fd == jobs:
                    os.kill(self.pid, signal.SIGKILL)
                    os._exit(0)
                elif fd == self.stdin:
                    self._feed()
                elif fd == self.channel:
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
        if cpu - self.cpu_mark > self.limits["cpu"] or cpu > self.limits["job_cpu"]:
            self.cut = "cpu"
        elif now - self.wall_mark > self.limits["wall"] or now - self.started > self.limits["job_wall"]:
            self.cut = "wall"

    def _feed(self) -> None:
        try:
            self.feed = self.feed[os.write(self.stdin, self.feed[:65536]) :] if self.feed else self.feed
        except BlockingIOError:
            return
        except BrokenPipeError:  # the program does not read
            self.feed = memoryview(b"")
        if not self.feed:
            self.poller.unregister(self.stdin)
            os.close(self.stdin)
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
        if not self.ready:
            self.ready = self.buffer[:1] == b"R"
            del self.buffer[0]
        if self.received > self.limits["results"]:
            self.cut = "output"
        while not self.ended and self.cut is None and (frame := self._frame()) is not None:
            self._take(frame)

    def _frame(self) -> str | None:
        """The next whole frame. What does not begin like an answer of this job is forged."""
        start = bytes(self.buffer[4 : 4 + len(self.head)])
        if not self.head.startswith(start):
            self.cut = "forged"
            return None
        if len(self.buffer) < 4:
            return None
        size = struct.unpack("<I", self.buffer[:4])[0]
        if size > self.limits["results"]:
            self.cut = "forged"
        if self.cut is not None or len(self.buffer) < 4 + size:
            return None
        body = bytes(self.buffer[4 : 4 + size])
        del self.buffer[: 4 + size]
        if not body.isascii():
            self.cut = "forged"
        return body.decode("ascii", "replace")

    def _take(self, frame: str) -> None:
        """An answer counts if its test had been started and the CPU clock agrees."""
        count = len(self.job["tests"])
        if len(self.frames) == count:
            self.ended = frame == f'{{"n":"{self.job["nonce"]}","end":true}}' and not self.buffer
            self.cut = None if self.ended else "forged"
            return
        cpu = kernel.cpu_clock(self.pid)
        if cpu - self.cpu_mark > self.limits["cpu"] or cpu > self.limits["job_cpu"]:
            self.cut = "cpu"
            return
        self.frames.append(frame)
        self.cpu_mark, self.wall_mark = cpu, time.monotonic()
        if len(self.frames) < count:
            if self.buffer:  # an answer before its question
                self.cut = "forged"
            self._go()

    def _go(self) -> None:
        try:
            os.write(self.channel, b"g")
        except OSError:  # it died or closed its end: the channel's own end of file tells
            return

    def reap(self) -> None:
        """Kill what is left, collect what it wrote, close everything."""
        for kill in (os.kill, os.killpg):
            try:
                if self.exit is None or kill is os.killpg:
                    kill(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        self.died = self.exit is not None
        if self.exit is None:
            self.exit = os.wait4(self.pid, 0)[1:]
        for fd in (self.out, self.err):
            size = -1
            while self.cut != "output" and size != len(self.output[fd]):  # what is still in the pipe
                size = len(self.output[fd])
                self._output(fd)
        for fd in (self.channel, self.out, self.err, self.stdin):
            if fd >= 0:
                os.close(fd)

    def answer(self) -> dict[str, Any]:
        """The frame for the pool. `status` and `signal` only if the child ended by itself; `cut` if we ended it."""
        assert self.exit is not None
        status, usage = self.exit
        if not self.ready:
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
            "max_rss_kb": usage.ru_maxrss,
            "stdout": self.output[self.out][: self.caps[self.out]].decode("utf-8", "replace"),
            "stderr": self.output[self.err][: self.caps[self.err]].decode("utf-8", "replace"),
            "cut": self.cut,
        }


def probe() -> dict[str, Any]:
    """What this machine enforces, for a person. A child finds out: it cannot write to a file afterwards."""
    source, sink = os.pipe()
    if os.fork() == 0:
        try:
            found = {"profiles": ["sealed"], "uid": prepare([], [], "sealed")["uid"]}
        except (kernel.Refused, OSError) as error:
            found = {"profiles": [], "refused": str(error)}
        write_frame(sink, found)
        os._exit(0)
    os.close(sink)
    found = read_frame(source) or {"profiles": [], "refused": "the self-test ended without a word"}
    os.wait()
    machine = {
        "architecture": platform.machine(),
        "landlock": kernel.landlock_version(),
        "bwrap": shutil.which("bwrap"),
    }
    return found | machine


def main() -> None:
    """The server, or with `--probe` one line of JSON."""
    if sys.argv[1:] == ["--probe"]:
        sys.stdout.write(json.dumps(probe()) + "\n")
    else:
        serve()
        os._exit(0)  # nothing to tidy up, and many servers may be ending


if __name__ == "__main__":
    main()
