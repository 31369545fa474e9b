"""The fork servers of this machine, one `jail.py` process per worker: started here, and restarted if they die.

Servers are separate programs (`subprocess`), never forks of the trainer, and get only one environment variable and
three descriptors, so none of the trainer's memory, keys or files reach them. Their answers are not trusted; `judge.py`
checks them.

Not guaranteed: that a server survives its jobs. A job whose server dies twice raises HarnessError, which says nothing
about the candidate.
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
from pathlib import Path

from pipeline.run.errors import ConfigError
from pipeline.run.types import JsonObject
from pipeline.sandbox.config import SandboxConfig
from pipeline.sandbox.messages import write_frame

LOG = logging.getLogger(__name__)
JAIL = Path(__file__).with_name("jail.py")
ENVIRONMENT = {"PYTHONHASHSEED": "0"}  # same iteration order of sets in every run; python -I would ignore it
ATTEMPTS = 2  # a job that kills its server this many times is unscorable
START_SECONDS = 120.0
UNSAFE_WARNING = (
    "there is no sandbox here: programs run with resource limits only, and could read and write your files. The"
    " programs come from our own generators, or sandbox.allow_unsafe is true"
)
NO_SANDBOX = (
    "Running generated code safely needs Linux with seccomp. Set runtime.sandbox.url to a Linux machine, "
    "or sandbox.allow_unsafe: true to run it with resource limits only."
)


class NoSandboxError(ConfigError):
    """This machine has no sandbox, and `allow_unsafe` is false."""


class HarnessError(RuntimeError):
    """The server died, hung, or could not isolate a child, which says nothing about the candidate."""


class Server:
    """One `jail.py` process. Not thread-safe."""

    def __init__(self, config: SandboxConfig, profile: str) -> None:
        self.config, self.profile = config, profile
        self.process: subprocess.Popen[bytes] | None = None
        self.ready: JsonObject = {}

    def launch(self) -> None:
        """Start the process and send its settings; `greet` waits for the answer."""
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-S", "-B", str(JAIL)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=ENVIRONMENT,
            cwd="/",
            start_new_session=True,  # Ctrl-C in the terminal reaches only the trainer
            bufsize=0,
        )
        paths = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}) if self.config.preload else []
        self._send({"preload": list(self.config.preload), "paths": paths, "profile": self.profile})

    def greet(self) -> None:
        """Wait until the server has tested the layers of its sandbox. Raises ConfigError if it refuses to start."""
        answer = self._receive(START_SECONDS)
        if "missing" in answer:
            self.stop()
            raise ConfigError(f"sandbox.preload: {answer['missing']}; install it or remove it from the list")
        if "refused" in answer:
            self.stop()
            raise NoSandboxError(answer["refused"])
        self.ready = answer["ready"]

    def call(self, job: JsonObject, seconds: float) -> JsonObject:
        """The answer to one job. Stops the server and raises HarnessError if there is none."""
        try:
            self._send(job)
            answer = self._receive(seconds)
        except OSError as error:
            self.stop()
            raise HarnessError(f"the sandbox server is gone: {error}") from error
        if answer.get("id") != job["id"] or "fault" in answer:
            self.stop()
            raise HarnessError(str(answer.get("fault", "received the result of another job")))
        return answer

    def _send(self, message: JsonObject) -> None:
        assert self.process is not None and self.process.stdin is not None
        write_frame(self.process.stdin.fileno(), message)

    def _receive(self, seconds: float) -> JsonObject:
        assert self.process is not None and self.process.stdout is not None
        fd, deadline = self.process.stdout.fileno(), time.monotonic() + seconds
        poller, data, size = select.poll(), bytearray(), 4
        poller.register(fd, select.POLLIN)
        while len(data) < size:
            ready = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            chunk = os.read(fd, size - len(data)) if ready else b""
            if not chunk:
                self.stop()
                raise HarnessError("the sandbox server died" if ready else "the sandbox server hung")
            data += chunk
            if size == 4 and len(data) == 4:
                size += struct.unpack("<I", data)[0]
        return json.loads(data[4:])

    def stop(self) -> None:
        """Stop the process; its children die with it."""
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


class Servers:
    """`workers` servers with the same profile; up to `workers` threads may use `call` concurrently.

    `start` raises ConfigError if there is no sandbox and `allow_unsafe` is false.
    """

    def __init__(self, config: SandboxConfig, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers: expected at least 1, got {workers}")
        self.config, self.threads = config, workers
        self.profile = "sealed"  # or "unsafe", if the user allows it
        self.enforced: JsonObject = {}  # what the first server reported: architecture, landlock, uid, ...
        self.num_restarts = 0
        self.running: list[Server] = []
        self._free: queue.SimpleQueue[Server] = queue.SimpleQueue()

    def start(self) -> None:
        """Start servers with profile `sealed` or, without a sandbox and if the user allows it, `unsafe`."""
        try:
            self._start("sealed")
        except NoSandboxError as error:
            if not self.config.allow_unsafe:
                raise NoSandboxError(f"{NO_SANDBOX} On this machine: {error}.") from error
            LOG.warning(UNSAFE_WARNING)
            self.profile = "unsafe"
            self._start("unsafe")

    def _start(self, profile: str) -> None:
        servers = [Server(self.config, profile) for _ in range(self.threads)]
        try:
            for server in servers:
                server.launch()
            for server in servers:
                server.greet()
        except (OSError, HarnessError) as error:
            raise NoSandboxError(str(error)) from error
        finally:
            if not all(server.ready for server in servers):
                for server in servers:
                    server.stop()
        self.enforced = self.enforced or servers[0].ready
        self.running = servers
        for server in servers:
            self._free.put(server)

    def call(self, job: JsonObject, seconds: float) -> JsonObject:
        """The answer to one job, once a server is free. Raises HarnessError after ATTEMPTS failures."""
        server = self._free.get()
        try:
            return self._call(server, job, seconds)
        finally:
            self._free.put(server)

    def _call(self, server: Server, job: JsonObject, seconds: float) -> JsonObject:
        """Call the server up to ATTEMPTS times, restarting it whenever it is dead."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                if server.process is None:
                    self.num_restarts += 1
                    server.launch()
                    server.greet()
                return server.call(job, seconds)
            except (HarnessError, NoSandboxError) as error:
                if attempt == ATTEMPTS:
                    raise HarnessError(f"the sandbox server failed {ATTEMPTS} times: {error}") from error
                LOG.warning("sandbox: restarting a server and rerunning its job: %s", error)
        raise AssertionError("unreachable")

    def stop(self) -> None:
        """Stop every server; the children die with them."""
        for server in self.running:
            server.stop()
