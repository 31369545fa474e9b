"""What the Linux kernel does for the sandbox, through ctypes: seccomp, Landlock, resource limits, process identity.

Every function acts on the calling process and cannot be undone; the child of `jail.py` calls them between fork and the
first line of foreign code. Standard library only, and nothing of the project: `jail.py` loads this file by its path.

Sources: seccomp(2), bpf's classic instruction set in linux/filter.h, landlock(7), prctl(2); syscall numbers from the
kernel's arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (aarch64).

Not promised: protection from bugs of the kernel, from CPU side channels, or on another architecture than those two.
"""

import ctypes
import functools
import os
import platform
import resource
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path

UIDS = (61000, 65534)  # whom root becomes: the first one that the user namespace maps
NOFILE, STACK = 32, 8 << 20
EPERM, ENOSYS = 1, 38

PR_SET_PDEATHSIG, PR_GET_PDEATHSIG, PR_GET_DUMPABLE, PR_SET_DUMPABLE = 1, 2, 3, 4
PR_SET_NO_NEW_PRIVS, PR_GET_NO_NEW_PRIVS = 38, 39
SIGKILL = 9

# name: (x86_64, aarch64); None where the architecture has none. No call here takes a path, an address or another
# process. Everything else up to LAST_KNOWN answers EPERM; what is unknown here, and clone3, answers ENOSYS.
ALLOWED: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "poll": (7, None), "lseek": (8, 62),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "pread64": (17, 67), "readv": (19, 65), "writev": (20, 66),
    "select": (23, None), "sched_yield": (24, 124), "mremap": (25, 216), "madvise": (28, 233), "dup": (32, 23),
    "dup2": (33, None), "nanosleep": (35, 101), "getitimer": (36, 102), "alarm": (37, None), "setitimer": (38, 103),
    "getpid": (39, 172), "exit": (60, 93), "uname": (63, 160), "getcwd": (79, 17), "gettimeofday": (96, 169),
    "getrlimit": (97, 163), "getrusage": (98, 165), "sysinfo": (99, 179), "times": (100, 153), "getuid": (102, 174),
    "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177), "getppid": (110, 173),
    "rt_sigpending": (127, 136), "sigaltstack": (131, 132), "gettid": (186, 178), "time": (201, None),
    "futex": (202, 98), "set_tid_address": (218, 96), "restart_syscall": (219, 128), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "exit_group": (231, 94), "epoll_wait": (232, None),
    "epoll_ctl": (233, 21), "pselect6": (270, 72), "ppoll": (271, 73), "set_robust_list": (273, 99),
    "epoll_pwait": (281, 22), "eventfd2": (290, 19), "epoll_create1": (291, 20), "dup3": (292, 24), "pipe2": (293, 59),
    "getrandom": (318, 278), "rseq": (334, 293),
}  # fmt: skip
CHECKED = {  # allowed with some arguments only
    "ioctl": (16, 29), "clone": (56, 220), "fcntl": (72, 25), "sched_getaffinity": (204, 123), "prlimit64": (302, 261),
}  # fmt: skip
CLONE3 = 435
LAST_KNOWN = 470
CLONE_THREAD = 0x00010000
CLONE_OF_THREADS = 0x007D0F00  # the flags that glibc and musl pass to start a thread
FCNTL_COMMANDS = (0, 1030, 1, 2, 3)  # F_DUPFD, F_DUPFD_CLOEXEC, F_GETFD, F_SETFD, F_GETFL
IOCTL_REQUESTS = (0x5401, 0x5451)  # TCGETS, FIOCLEX

# seccomp_data: nr at 0, arch at 4, argument n at 16 + 8 n (little endian: its low half first)
LOAD, AND, RETURN, JUMP_EQ, JUMP_GE, JUMP_SET = 0x20, 0x54, 0x06, 0x15, 0x35, 0x45
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


@dataclass(frozen=True)
class Architecture:
    """How one architecture numbers its calls."""

    column: int  # of ALLOWED and CHECKED
    audit: int  # AUDIT_ARCH_*
    seccomp: int
    landlock_create: int = 444
    landlock_restrict: int = 446


ARCHITECTURES = {"x86_64": Architecture(0, 0xC000003E, 317), "aarch64": Architecture(1, 0xC00000B7, 277)}
_libc = ctypes.CDLL(None, use_errno=True)


class Refused(RuntimeError):
    """This machine cannot enforce a layer of the sandbox; the message says which and why."""


def architecture() -> Architecture:
    """The machine's numbers. Raises Refused where there are none."""
    name = platform.machine()
    if sys.platform != "linux" or name not in ARCHITECTURES or sys.maxsize < 1 << 32 or sys.byteorder != "little":
        raise Refused(f"no seccomp filter for {sys.platform} on {name}")
    return ARCHITECTURES[name]


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


def filter_program(machine: Architecture) -> list[Instruction]:
    """The seccomp filter of profile `sealed`, as classic BPF.

    The number is found by halving: the kernel tries a new filter on every number, so a chain of comparisons would
    cost each child half a millisecond.
    """
    permitted, forbidden = [(RETURN, 0, 0, ALLOW)], [(RETURN, 0, 0, ERRNO | EPERM)]
    unknown = [(RETURN, 0, 0, ERRNO | ENOSYS)]
    actions = {numbers[machine.column]: permitted for numbers in ALLOWED.values()}
    actions |= {CHECKED[name][machine.column]: block for name, block in _checks().items()}
    actions[CLONE3] = unknown
    pieces: list[tuple[int, list[Instruction]]] = []  # (first number, what becomes of it and of those up to the next)
    for number in range(LAST_KNOWN + 1):
        action = actions.get(number, forbidden)
        if not pieces or pieces[-1][1] is not action:
            pieces.append((number, action))
    pieces.append((LAST_KNOWN + 1, unknown))
    program = [(LOAD, 0, 0, 4), (JUMP_EQ, 1, 0, machine.audit), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    if machine.column == 0:  # x32 calls carry this bit under the same architecture word
        program += [(JUMP_SET, 0, 1, 0x40000000), (RETURN, 0, 0, KILL)]
    return program + _search(pieces)


def _search(pieces: list[tuple[int, list[Instruction]]]) -> list[Instruction]:
    if len(pieces) == 1:
        return pieces[0][1]
    middle = len(pieces) // 2
    below, above = _search(pieces[:middle]), _search(pieces[middle:])
    assert len(below) < 256, "a jump of classic BPF spans a byte"
    return [(JUMP_GE, len(below), 0, pieces[middle][0]), *below, *above]


def _checks() -> dict[str, list[Instruction]]:
    """What decides about the calls of CHECKED, by their arguments."""
    forbidden = (RETURN, 0, 0, ERRNO | EPERM)
    return {
        "ioctl": [(LOAD, 0, 0, 24), *_one_of(IOCTL_REQUESTS), forbidden],
        "fcntl": [(LOAD, 0, 0, 24), *_one_of(FCNTL_COMMANDS), forbidden],
        "clone": [
            *[(LOAD, 0, 0, 16), (JUMP_SET, 1, 0, CLONE_THREAD), forbidden],
            *[(AND, 0, 0, 0xFFFFFFFF & ~CLONE_OF_THREADS), *_one_of((0,)), forbidden],
        ],
        "sched_getaffinity": [(LOAD, 0, 0, 16), *_one_of((0,)), forbidden],  # of itself
        "prlimit64": [  # of itself, and the pointer to new limits must be null in both halves
            *[(LOAD, 0, 0, 16), (JUMP_EQ, 1, 0, 0), forbidden, (LOAD, 0, 0, 32), (JUMP_EQ, 1, 0, 0), forbidden],
            *[(LOAD, 0, 0, 36), *_one_of((0,)), forbidden],
        ],
    }


def _one_of(constants: tuple[int, ...]) -> list[Instruction]:
    """Allow when the loaded word is one of these; else fall through."""
    return [step for constant in constants for step in ((JUMP_EQ, 0, 1, constant), (RETURN, 0, 0, ALLOW))]


@functools.cache
def filter_code() -> tuple[bytes, ctypes.Array[ctypes.c_char]]:
    """The filter as the kernel reads it, made once before any fork: struct sock_fprog, and the code it points to."""
    program = b"".join(struct.pack("=HBBI", *step) for step in filter_program(architecture()))
    code = ctypes.create_string_buffer(program, len(program))
    return struct.pack("@HP", len(program) // 8, ctypes.addressof(code)), code


def install_seccomp() -> None:
    """Filter the system calls of this process from now on. Needs no_new_privs. Raises Refused or OSError."""
    call(architecture().seccomp, 1, 0, filter_code()[0])


@functools.cache
def landlock_version() -> int:
    """The kernel's Landlock ABI, 0 without Landlock."""
    try:
        return call(architecture().landlock_create, None, 0, 1)
    except (OSError, Refused):
        return 0


def install_landlock() -> None:
    """Forbid every right on files, network and scopes that this kernel's Landlock knows. Raises OSError."""
    version = landlock_version()
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    rights = struct.pack("=QQQ", files, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    machine = architecture()
    ruleset = call(machine.landlock_create, rights[:size], size, 0)
    call(machine.landlock_restrict, ruleset, 0)
    os.close(ruleset)


def drop_identity() -> int:
    """Give up root for good: groups, all ids, and with them the capabilities. Returns the uid.

    Raises Refused if neither of UIDS can be taken, or if something is left.
    """
    if 0 in (os.getuid(), os.geteuid()):
        for uid in UIDS:
            try:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
                break
            except OSError:
                continue
    if 0 in os.getresuid():
        raise Refused(f"running as root, and the ids {UIDS} cannot be taken: run as another user")
    return os.getuid()


def fixed_limits() -> dict[int, int]:
    """The resource limits that no job changes. File size 0: nothing is written but pipes."""
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
    """What the server gives up and its children inherit: core dumps, new privileges, files, open descriptors.

    After the id drop, which would make the process dumpable again.
    """
    for which, value in fixed_limits().items():
        limit(which, value)
    if sys.platform == "linux":
        prctl(PR_SET_DUMPABLE, 0)
        prctl(PR_SET_NO_NEW_PRIVS, 1)


def isolate(memory: int, cpu_seconds: float, parent: int) -> None:
    """What is the child's own: bytes of address space, a session, death with its parent.

    RLIMIT_CPU stands only where there is no CPU clock to watch: on Linux it would make that clock tick in jiffies.
    """
    os.setsid()
    if sys.platform != "linux":
        limit(resource.RLIMIT_CPU, int(cpu_seconds) + 2)
        return
    limit(resource.RLIMIT_AS, memory)
    prctl(PR_SET_PDEATHSIG, SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def faults(memory: int) -> list[str]:
    """What `harden` and `isolate` should have set in this process and did not."""
    signal = ctypes.c_int(0)
    _libc.prctl(PR_GET_PDEATHSIG, ctypes.byref(signal), 0, 0, 0)
    found = {
        "parent-death signal": signal.value != SIGKILL,
        "dumpable": prctl(PR_GET_DUMPABLE) != 0,
        "no_new_privs": prctl(PR_GET_NO_NEW_PRIVS) != 1,
        "root": 0 in os.getresuid(),
        "session": os.getsid(0) != os.getpid(),
    }
    for which, value in (fixed_limits() | {resource.RLIMIT_AS: memory}).items():
        found[f"resource limit {which}"] = not all(0 <= bound <= value for bound in resource.getrlimit(which))
    return [name for name, wrong in found.items() if wrong]


def trace(pid: int) -> None:
    """ptrace(PTRACE_CONT) on a process that we do not trace, for the self-test. Raises OSError: ESRCH, or refused."""
    if _libc.ptrace(7, pid, None, None) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")


def cpu_clock(pid: int) -> float:
    """CPU seconds of a living process; 0.0 once it has died, and where the system has no such clock."""
    if sys.platform != "linux":
        return 0.0
    try:
        return time.clock_gettime((~pid << 3) | 2)  # MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED)
    except OSError:  # exited, perhaps not yet reaped
        return 0.0


def address_space() -> int:
    """Bytes of address space that this process holds now."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
