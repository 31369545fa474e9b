"""The self-test of the sandbox: before the fork server reads a job, a child tries what must not succeed.

`self_test` forks a child behind the seccomp filter alone and one behind Landlock alone, so that neither layer hides the
absence of the other, and checks the rest (identity, limits, descriptors, session, no_new_privs) by reading it back.
One success, or a child that does not report, and the server refuses to work. Standard library and the neighbours only.

Not promised: that the list is complete. It shows that each layer is there, not that the kernel has no holes.
"""

import contextlib
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

import child
import kernel

REFUSALS = (errno.EPERM, errno.EACCES, errno.ENOSYS)
PATIENCE = 20  # seconds for a trial that takes a millisecond
MEMORY = 1 << 30


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def _attempts(parent: int) -> dict[str, Callable[[], object]]:
    """What every sealed child must be refused; none leaves a trace if it is not.

    ptrace and exec could not succeed here even without a filter, but they would then fail otherwise than refused.
    """
    return {
        "read a folder": lambda: os.open("/", os.O_RDONLY),
        "read a file": lambda: os.open("/proc/self/stat", os.O_RDONLY),
        "write": lambda: os.open(os.devnull, os.O_WRONLY),
        "socket": lambda: socket.socket(socket.AF_UNIX),
        "fork": _fork,
        "kill": lambda: os.kill(parent, 0),
        "prlimit": lambda: resource.prlimit(parent, resource.RLIMIT_CORE, (0, 0)),
        "F_SETOWN": lambda: fcntl.fcntl(child.CHANNEL, fcntl.F_SETOWN, parent),
        "old ids": lambda: os.setresuid(0, 0, 0),
        "ptrace": lambda: kernel.trace(parent),
        "exec": lambda: os.execv("/nonexistent/program", ["program"]),
    }


def _succeeded(attempts: Iterable[tuple[str, Callable[[], object]]]) -> list[str]:
    """The names of attempts that were not refused; any other error than a refusal counts as a success."""
    names = []
    for name, attempt in attempts:
        try:
            attempt()
        except OSError as error:
            if error.errno in REFUSALS:
                continue
        names.append(name)
    return names


def _state() -> list[str]:
    """What is wrong with this child's limits, identity and descriptors."""
    wrong = kernel.faults(MEMORY)
    for fd in range(child.CHANNEL + 1, 256):
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_GETFD)
            wrong.append(f"descriptor {fd}")
    return wrong


def _in_child(layers: tuple[str, ...], trial: Callable[[int], list[str]]) -> list[str]:
    """What a trial reports from behind the layers. Raises Refused if it reports nothing."""
    parent, (outside, inside) = os.getpid(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(inside, child.CHANNEL)
            os.closerange(child.CHANNEL + 1, 256)
            child.enter(layers, MEMORY, 10.0, parent)
            os.write(child.CHANNEL, json.dumps(trial(parent)).encode("ascii"))
        except (OSError, kernel.Refused) as error:
            os.write(child.CHANNEL, json.dumps([f"setting up: {error}"]).encode("ascii"))
        finally:
            os._exit(0)
    os.close(inside)
    ready = select.select([outside], [], [], PATIENCE)[0]
    report = os.read(outside, 65536) if ready else b""
    os.close(outside)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if not report:
        raise kernel.Refused(f"self-test behind {layers}: a child was not held, it reported nothing")
    return json.loads(report)


def self_test() -> None:
    """Try the layers of profile `sealed`. Raises Refused naming what was not held."""
    kernel.filter_code()  # made here once, and inherited by every child
    if b"CapEff:\t0000000000000000" not in Path("/proc/self/status").read_bytes():
        raise kernel.Refused("the process that runs candidates would keep capabilities; start it without them")
    failed = _in_child(("seccomp",), lambda parent: _succeeded(_attempts(parent).items()))
    if failed:
        raise kernel.Refused(f"self-test: seccomp did not refuse: {', '.join(failed)}")

    def files_and_state(parent: int) -> list[str]:
        files = [(name, attempt) for name, attempt in _attempts(parent).items() if name.startswith(("read", "write"))]
        return _state() + (_succeeded(files) if kernel.landlock_version() else [])

    failed = _in_child(("landlock",), files_and_state)
    if failed:
        raise kernel.Refused(f"self-test: not held without the filter: {', '.join(failed)}")
