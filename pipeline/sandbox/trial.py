"""The self-test of the sandbox: before the fork server reads a job, a child tries what must not succeed.

`self_test` forks a child behind the seccomp filter alone and one behind Landlock alone, so that neither layer hides the
absence of the other, and checks the rest (identity, limits, descriptors, session, no_new_privs) by reading it back.
Profile `files` must also be able to use its directory; `shell` tests itself (`shell.py`). One success, or a child that
does not report, and the server refuses to work. Standard library and the neighbours only.

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
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import child
import filters
import kernel
import scratch
import shell

REFUSALS = (errno.EPERM, errno.EACCES, errno.ENOSYS)
PATIENCE = 20  # seconds for a trial that takes a millisecond
MEMORY = 1 << 30


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def _paths() -> dict[str, Callable[[], object]]:
    """What no child may do to a path outside of its scratch directory, which is where it stands."""
    return {
        "read a folder": lambda: os.open("/", os.O_RDONLY),
        "read a file": lambda: os.open("/proc/self/stat", os.O_RDONLY),
        "write": lambda: os.open(os.devnull, os.O_WRONLY),
        "make a file": lambda: os.open("../stagecoach-trial", os.O_WRONLY | os.O_CREAT),
    }


def _links() -> dict[str, Callable[[], object]]:
    """What Landlock does not know, or what could point out of a scratch directory."""
    return {
        "symlink": lambda: Path("link").symlink_to("/"),
        "hard link": lambda: os.link("own", "link"),
        "chmod": lambda: Path("own").chmod(0o700),
        "times": lambda: os.utime("own"),
        "truncate": lambda: os.truncate("own", 0),
        "attribute": lambda: os.setxattr("own", "user.trial", b""),
    }


def _attempts(parent: int) -> dict[str, Callable[[], object]]:
    """What every child must be refused by its filter; none leaves a trace if it is not.

    ptrace and exec could not succeed here even without a filter, but they would then fail otherwise than refused.
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


def _state(profile: str) -> list[str]:
    """What is wrong with this child's limits, identity and descriptors."""
    wrong = kernel.faults(MEMORY, profile)
    for fd in range(child.CHANNEL + 1, 256):
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_GETFD)
            wrong.append(f"descriptor {fd}")
    return wrong


def _unusable() -> list[str]:
    """What a child of `files` must be able to do, behind both layers."""
    try:
        Path("made").mkdir()
        Path("made/file").write_text("text", encoding="ascii")
        Path("made/file").rename("file")
        Path("made").rmdir()
        usable = Path("file").read_text(encoding="ascii") == "text" and all(list(Path(p).iterdir()) for p in sys.path)
    except OSError as error:
        return [f"its scratch directory and the interpreter cannot be used: {error}"]
    return [] if usable else ["its scratch directory cannot be used"]


def _in_child(layers: tuple[str, ...], profile: str, scratch: str | None, trial: Callable[[int], list[str]]) -> None:
    """Run a trial behind the layers. Raises Refused with what it reports, and if it reports nothing."""
    parent, (outside, inside) = os.getpid(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(inside, child.CHANNEL)
            os.closerange(child.CHANNEL + 1, 256)
            child.enter(child.Cell(profile, MEMORY, 10.0, parent, scratch), layers)
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
    failed = json.loads(report) if report else ["a child reported nothing"]
    if failed:
        raise kernel.Refused(f"self-test of {profile} behind {' and '.join(layers)}: not held: {', '.join(failed)}")


def self_test(profile: str) -> None:
    """Try the layers of a profile, each without the other. Raises Refused naming what was not held."""
    filters.filter_code("sealed")  # made here once, and inherited by every child; no architecture: refused
    if b"CapEff:\t0000000000000000" not in Path("/proc/self/status").read_bytes():
        raise kernel.Refused("the process that runs candidates would keep capabilities; start it without them")
    if profile == "shell":
        shell.self_test()
    elif profile == "files":
        _files()
    else:
        _sealed()


def _sealed() -> None:
    everything = lambda parent: _attempts(parent) | _paths() | _links()  # noqa: E731
    _in_child(("seccomp",), "sealed", None, lambda parent: _succeeded(everything(parent).items()))

    def files_and_state(_: int) -> list[str]:
        return _state("sealed") + (_succeeded(_paths().items()) if kernel.landlock_version() else [])

    _in_child(("landlock",), "sealed", None, files_and_state)


def _files() -> None:
    """Truncation is a right of its own since ABI 3; before, a file that may only be read could be emptied."""
    if kernel.landlock_version() < 3:
        raise kernel.Refused(f"profile files needs Landlock of ABI 3 (Linux 6.2), found {kernel.landlock_version()}")
    filters.filter_code("files")
    folder = scratch.base()
    place = scratch.make(folder)
    Path(place, "own").touch()
    try:
        refused = lambda parent: _succeeded((_attempts(parent) | _links()).items())  # noqa: E731
        _in_child(("seccomp",), "files", place, refused)
        _in_child(("landlock",), "files", place, lambda _: _state("files") + _succeeded(_paths().items()))
        _in_child(("landlock", "seccomp"), "files", place, lambda _: _unusable())
    finally:
        scratch.remove(folder)
