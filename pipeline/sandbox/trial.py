"""The self-test of the sandbox: before the fork server reads a job, a child tries what must not succeed.

`self_test` forks a child behind the seccomp filter alone and one behind Landlock alone, so that neither layer hides the
absence of the other. It checks the rest (identity, limits, descriptors, session, no_new_privs) by reading it back. One
success, or a child that does not report, and the server refuses to work. Standard library and neighboring modules only.

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
import filters
import kernel

REFUSALS = (errno.EPERM, errno.EACCES, errno.ENOSYS)
PATIENCE = 20  # seconds for a trial that takes a millisecond
MEMORY = 1 << 30


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def _path_attempts() -> dict[str, Callable[[], object]]:
    """File accesses that every child must be refused."""
    return {
        "read a folder": lambda: os.open("/", os.O_RDONLY),
        "read a file": lambda: os.open("/proc/self/stat", os.O_RDONLY),
        "write": lambda: os.open(os.devnull, os.O_WRONLY),
        "make a file": lambda: os.open("/stagecoach-trial", os.O_WRONLY | os.O_CREAT),
    }


def _link_attempts() -> dict[str, Callable[[], object]]:
    """File operations that Landlock does not cover, or only since a recent ABI."""
    return {
        "symlink": lambda: Path("link").symlink_to("/"),
        "hard link": lambda: os.link("own", "link"),
        "chmod": lambda: Path("own").chmod(0o700),
        "times": lambda: os.utime("own"),
        "truncate": lambda: os.truncate("own", 0),
        "attribute": lambda: os.setxattr("own", "user.trial", b""),
    }


def _call_attempts(parent: int) -> dict[str, Callable[[], object]]:
    """System calls that the filter must refuse; none has a lasting effect if it succeeds.

    ptrace and exec could not succeed here even without a filter, but they would then fail with another error.
    """
    return {
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
    """The names of attempts that were not refused; any error other than a refusal counts as a success."""
    names = []
    for name, attempt in attempts:
        try:
            attempt()
        except OSError as error:
            if error.errno in REFUSALS:
                continue
        names.append(name)
    return names


def _find_faults(*, alone: bool) -> list[str]:
    """What is wrong with this child's limits, identity and descriptors."""
    faults = kernel.faults(MEMORY, alone=alone)
    for fd in range(child.CHANNEL + 1, 256):
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_GETFD)
            faults.append(f"descriptor {fd}")
    return faults


def _run_in_child(layers: tuple[str, ...], trial: Callable[[int], list[str]], *, alone: bool) -> None:
    """Run a trial in a child behind the layers. Raises Refused with what it reports, and if it reports nothing."""
    parent, (outside, inside) = os.getpid(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(inside, child.CHANNEL)
            os.closerange(child.CHANNEL + 1, 256)
            child.enter(child.Cell(layers, 0, parent, alone), MEMORY, 10.0)
            os.write(child.CHANNEL, json.dumps(trial(parent)).encode("ascii"))
        except (OSError, kernel.Refused) as error:
            os.write(child.CHANNEL, json.dumps([f"setting up: {error}"]).encode("ascii"))
        finally:
            os._exit(0)
    os.close(inside)
    ready = select.select([outside], [], [], PATIENCE)[0]
    report = os.read(outside, 65536) if ready else b""
    os.close(outside)
    failed = json.loads(report) if report else ["a child reported nothing"]
    failed += [] if kernel.num_threads(pid) == 1 else ["the number of its threads cannot be seen"]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if failed:
        raise kernel.Refused(f"self-test behind {' and '.join(layers)}: not held: {', '.join(failed)}")


def self_test(*, alone: bool) -> None:
    """Try the layers of profile `sealed`, each without the other. Raises Refused naming what did not work."""
    filters.filter_code()  # built once, inherited by every child; raises Refused for an unsupported architecture
    if b"CapEff:\t0000000000000000" not in Path("/proc/self/status").read_bytes():
        raise kernel.Refused("the process that runs candidates would keep capabilities; start it without them")
    everything = lambda parent: _call_attempts(parent) | _path_attempts() | _link_attempts()  # noqa: E731
    _run_in_child(("seccomp",), lambda parent: _succeeded(everything(parent).items()), alone=alone)

    def paths_and_state(_: int) -> list[str]:
        return _find_faults(alone=alone) + (_succeeded(_path_attempts().items()) if kernel.landlock_version() else [])

    _run_in_child(("landlock",), paths_and_state, alone=alone)
    _try_fork_sibling()


def _try_fork_sibling() -> None:
    """Fork as a zygote does. Raises Refused if the copy does not become our child."""
    pid = os.fork()
    if pid == 0:
        try:
            kernel.fork_sibling()
        finally:
            os._exit(0)
    try:
        pids = {os.waitpid(-1, 0)[0], os.waitpid(-1, 0)[0]}
    except ChildProcessError as error:
        raise kernel.Refused(
            "self-test: a process cannot make another one for its parent (clone, CLONE_PARENT)"
        ) from error
    assert pid in pids
