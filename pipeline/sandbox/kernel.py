"""The Linux kernel's part of the sandbox, through ctypes: seccomp, Landlock, resource limits, process identity.

Every function acts on the calling process and cannot be undone; the child of `jail.py` calls them between fork and the
first line of untrusted code. Standard library only, nothing of the project: `jail.py` loads this file by its path.

Sources: seccomp(2), landlock(7), prctl(2), setrlimit(2); the filter itself is in `filters.py`.

Not promised: protection from bugs of the kernel, or from CPU side channels.
"""

import ctypes
import functools
import os
import resource
import struct
import sys
import time
from pathlib import Path

import filters
from filters import Refused, architecture

OWN_UIDS = range(1 << 30, 1 << 31)  # root switches to a random one, so that no other processes count toward its limit
UIDS = (61000, 65534)  # tried in turn where the user namespace maps none of those
NOFILE, STACK = 32, 8 << 20
THREADS = 64  # of one candidate, its main thread included
SERVER = 2  # watcher and zygote, which count toward the same limit

PR_SET_PDEATHSIG, PR_GET_PDEATHSIG, PR_GET_DUMPABLE, PR_SET_DUMPABLE = 1, 2, 3, 4
PR_SET_NO_NEW_PRIVS, PR_GET_NO_NEW_PRIVS = 38, 39
SIGKILL, SIGCHLD = 9, 17
CLONE_PARENT = 0x8000
_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_gil = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock during a call


def call(number: int, *arguments: int | bytes | None) -> int:
    """A raw system call. Raises OSError with its errno."""
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = _libc.syscall(ctypes.c_long(number), *wide)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def prctl(option: int, value: int = 0) -> int:
    """prctl(2) with one number. Raises OSError."""
    result = _libc.prctl(option, *[ctypes.c_ulong(v) for v in (value, 0, 0, 0)])
    if result < 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")
    return result


def install_seccomp() -> None:
    """Install the seccomp filter in this process. Needs no_new_privs. Raises Refused or OSError."""
    call(architecture().seccomp, 1, 0, filters.filter_code()[0])


@functools.cache
def landlock_version() -> int:
    """The kernel's Landlock ABI version, 0 without Landlock."""
    try:
        return call(architecture().landlock_create, None, 0, 1)
    except (OSError, Refused):
        return 0


def install_landlock() -> None:
    """Forbid every right on files, network and scopes that this kernel's Landlock supports. Raises OSError."""
    version, machine = landlock_version(), architecture()
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    rights = struct.pack("=QQQ", files, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = call(machine.landlock_create, rights[:size], size, 0)
    call(machine.landlock_restrict, ruleset, 0)
    os.close(ruleset)


def drop_identity() -> bool:
    """Give up root for good: groups, all ids, and with them the capabilities. Returns whether the uid is ours alone.

    Raises Refused if no other id can be taken, or if an id of root remains.
    """
    own = OWN_UIDS[int.from_bytes(os.urandom(8)) % len(OWN_UIDS)]
    if 0 in (os.getuid(), os.geteuid()):
        for uid in (own, *UIDS):
            try:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
                break
            except OSError:
                continue
    if 0 in os.getresuid():
        raise Refused(f"running as root, and the ids {UIDS} cannot be taken: run as another user")
    return os.getuid() == own


def fixed_limits() -> dict[int, int]:
    """The resource limits that are the same for all jobs."""
    limits = {
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: NOFILE,
        resource.RLIMIT_STACK: STACK,
    }
    if sys.platform == "linux":
        limits |= {resource.RLIMIT_MEMLOCK: 0, resource.RLIMIT_MSGQUEUE: 0}
    return limits


def limit(which: int, value: int) -> None:
    """Lower one resource limit for good, unless it is lower already."""
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def harden() -> None:
    """Restrict the server, and so its children: core dumps, new privileges, files, open descriptors.

    Call it after `drop_identity`, which would make the process dumpable again.
    """
    for which, value in fixed_limits().items():
        limit(which, value)
    if sys.platform == "linux":
        prctl(PR_SET_DUMPABLE, 0)
        prctl(PR_SET_NO_NEW_PRIVS, 1)


def fork_sibling() -> int:
    """fork(2), but the new process is a child of our parent, which then waits for it. Raises OSError.

    Skips Python's own after-fork work: it handles locks and threads, and the caller has one thread.
    """
    number = architecture().clone
    pid = _libc_with_gil.syscall(*[ctypes.c_long(word) for word in (number, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0)])
    if pid < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return pid


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when `parent` dies; exit at once if it is dead already."""
    prctl(PR_SET_PDEATHSIG, SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def isolate(memory: int, cpu_seconds: float, parent: int, *, alone: bool) -> None:
    """Set a child's limits: address space in bytes, a session, death with its parent; threads if its uid is `alone`.

    RLIMIT_CPU is set only where there is no CPU clock to watch: on Linux it would make that clock tick in jiffies.
    """
    os.setsid()
    if sys.platform != "linux":
        limit(resource.RLIMIT_CPU, int(cpu_seconds) + 2)
        return
    limit(resource.RLIMIT_AS, memory)
    if alone:
        limit(resource.RLIMIT_NPROC, THREADS + SERVER)
    die_with(parent)


def faults(memory: int, *, alone: bool) -> list[str]:
    """The names of what `harden` and `isolate` should have set in this process but did not."""
    signal = ctypes.c_int(0)
    _libc.prctl(PR_GET_PDEATHSIG, ctypes.byref(signal), 0, 0, 0)
    is_faulty = {
        "parent-death signal": signal.value != SIGKILL,
        "dumpable": prctl(PR_GET_DUMPABLE) != 0,
        "no_new_privs": prctl(PR_GET_NO_NEW_PRIVS) != 1,
        "root": 0 in os.getresuid(),
        "session": os.getsid(0) != os.getpid(),
    }
    own = {resource.RLIMIT_AS: memory} | ({resource.RLIMIT_NPROC: THREADS + SERVER} if alone else {})
    for which, value in (fixed_limits() | own).items():
        is_faulty[f"resource limit {which}"] = not all(0 <= bound <= value for bound in resource.getrlimit(which))
    return [name for name, faulty in is_faulty.items() if faulty]


def trace(pid: int) -> None:
    """ptrace(PTRACE_CONT) on a process that we do not trace, for the self-test. Raises OSError: ESRCH, or refused."""
    if _libc.ptrace(7, pid, None, None) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")


def cpu_clock(pid: int) -> float:
    """CPU seconds of a running process; 0.0 once it is dead, and where the system has no such clock."""
    if sys.platform != "linux":
        return 0.0
    try:
        return time.clock_gettime((~pid << 3) | 2)  # MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED)
    except OSError:  # exited, perhaps not yet reaped
        return 0.0


def num_threads(pid: int) -> int:
    """The number of threads of a process that was not waited for, from the link count of their folder. 0 if unknown."""
    try:
        return os.stat(f"/proc/{pid}/task").st_nlink - 2  # noqa: PTH116  a Path would cost three times as much
    except OSError:  # /proc is hidden, or there is none
        return 0


def address_space() -> int:
    """The current address space of this process in bytes."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
