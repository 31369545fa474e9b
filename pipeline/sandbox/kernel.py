"""The kernel side of the sandbox, through ctypes: seccomp, Landlock, resource limits, process identity (Linux).

Every function acts on the calling process, and its effect is permanent; the child of `jail.py` calls them between fork
and the first line of untrusted code. Standard library only, no project imports: `jail.py` loads this file by its path.

The seccomp filter of the profile `sealed` (classic BPF) is an allowlist of system calls and their arguments. Everything
else returns EPERM; clone3 and calls beyond LAST_KNOWN return ENOSYS, so that libc falls back. A call from a foreign
architecture kills the process.

Sources: seccomp(2), landlock(7), prctl(2), setrlimit(2); the classic BPF instructions in linux/filter.h; syscall
numbers from the kernel's arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (aarch64).

Not guaranteed: protection from kernel bugs or CPU side channels; architectures other than x86_64 and aarch64.
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

OWN_UIDS = range(1 << 30, 1 << 31)  # root switches to a random uid, whose process limit no other processes share
UIDS = (61000, 65534)  # tried in turn if the user namespace maps none of those
NOFILE, STACK = 32, 8 << 20
THREADS = 64  # per candidate, including its main thread
SERVER = 2  # watcher and zygote, which count toward the same limit

PR_SET_PDEATHSIG, PR_GET_PDEATHSIG, PR_GET_DUMPABLE, PR_SET_DUMPABLE = 1, 2, 3, 4
PR_SET_NO_NEW_PRIVS, PR_GET_NO_NEW_PRIVS = 38, 39
SIGKILL, SIGCHLD = 9, 17
CLONE_PARENT = 0x8000
_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_gil = ctypes.PyDLL(None, use_errno=True)  # holds the interpreter's lock during a call


def call(number: int, *arguments: int | bytes | None) -> int:
    """Make a raw system call. Raises OSError with its errno."""
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = _libc.syscall(ctypes.c_long(number), *wide)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def prctl(option: int, value: int = 0) -> int:
    """Call prctl(2) with one argument. Raises OSError."""
    result = _libc.prctl(option, *[ctypes.c_ulong(v) for v in (value, 0, 0, 0)])
    if result < 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")
    return result


def install_seccomp() -> None:
    """Install the seccomp filter in this process. Needs no_new_privs. Raises Refused or OSError."""
    call(architecture().seccomp, 1, 0, filter_code()[0])


@functools.cache
def landlock_version() -> int:
    """The kernel's Landlock ABI version, or 0 without Landlock."""
    try:
        return call(architecture().landlock_create, None, 0, 1)
    except (OSError, Refused):
        return 0


def install_landlock() -> None:
    """Deny every file, network and scope right that this kernel's Landlock supports. Raises OSError."""
    version, machine = landlock_version(), architecture()
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    rights = struct.pack("=QQQ", files, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = call(machine.landlock_create, rights[:size], size, 0)
    call(machine.landlock_restrict, ruleset, 0)
    os.close(ruleset)


def write_only_below(folder: Path) -> None:
    """Deny this process and its children any file changes outside `folder`, and signals to other processes.

    For a repository's own tests, which may read what the user may read. Needs no_new_privs. Raises OSError, Refused.
    """
    version, machine = landlock_version(), architecture()
    if not version:
        raise Refused("no Landlock, so a test could change files outside its copy of the repository")
    changes = (1 << 1) | sum(1 << bit for bit in range(4, 13))  # write_file; remove_dir to make_sym
    changes |= (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)  # refer, truncate
    rights = struct.pack("=QQQ", changes, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = call(machine.landlock_create, rights[:size], size, 0)
    for path, allowed in ((folder, changes), (Path("/dev"), 1 << 1)):
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        call(machine.landlock_add_rule, ruleset, 1, struct.pack("=Qi", allowed, parent), 0)
        os.close(parent)
    call(machine.landlock_restrict, ruleset, 0)
    os.close(ruleset)


def install_no_network() -> None:
    """Deny io_uring and all sockets except local ones (AF_UNIX) to this process and its children.

    Needs no_new_privs. Raises OSError, Refused.
    """
    machine = architecture()
    socket, uring = (41, 425) if machine.column == 0 else (198, 425)
    forbidden = (RETURN, 0, 0, ERRNO | EPERM)
    program = _number_of_call(machine)
    program += [(JUMP_EQ, 0, 1, uring), forbidden, (JUMP_EQ, 1, 0, socket), (RETURN, 0, 0, ALLOW)]
    program += [(LOAD, 0, 0, 16), (JUMP_EQ, 0, 1, 1), (RETURN, 0, 0, ALLOW), forbidden]
    code = _assembled(program)
    call(machine.seccomp, 1, 0, code[0])


def drop_identity() -> bool:
    """Drop root permanently: groups, all ids, and with them the capabilities. Returns whether the uid is ours alone.

    Raises Refused if no other id is available, or if a root id remains.
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
        raise Refused(f"running as root, but the ids {UIDS} cannot be used; run as another user")
    return os.getuid() == own


def fixed_limits() -> dict[int, int]:
    """The resource limits common to all jobs."""
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
    """Lower one resource limit permanently, unless it is already lower."""
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def harden() -> None:
    """Forbid core dumps, new privileges and file writes in the server and thus its children; limit its descriptors.

    Call this after `drop_identity`, which would make the process dumpable again.
    """
    for which, value in fixed_limits().items():
        limit(which, value)
    if sys.platform == "linux":
        prctl(PR_SET_DUMPABLE, 0)
        prctl(PR_SET_NO_NEW_PRIVS, 1)


def fork_sibling() -> int:
    """fork(2), but the new process is a child of our parent, which must wait for it. Raises OSError.

    Skips Python's own after-fork work, which handles locks and threads: the caller has only one thread.
    """
    number = architecture().clone
    pid = _libc_with_gil.syscall(*[ctypes.c_long(word) for word in (number, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0)])
    if pid < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return pid


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when `parent` dies; exit immediately if it is already dead."""
    prctl(PR_SET_PDEATHSIG, SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def isolate(memory: int, cpu_seconds: float, parent: int, *, alone: bool) -> None:
    """Isolate a child: limit its address space (bytes), start a session, and have it killed when its parent dies.

    `alone`: no unrelated process has its uid, so its threads are limited too. RLIMIT_CPU is set only if there is no
    CPU clock to watch: on Linux it would make that clock tick in jiffies.
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
    """Names of the settings that `harden` and `isolate` should have applied to this process but did not."""
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
    """Call ptrace(PTRACE_CONT) on a process we do not trace, for the self-test. Raises OSError: ESRCH or a refusal."""
    if _libc.ptrace(7, pid, None, None) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")


def cpu_clock(pid: int) -> float:
    """CPU seconds of a running process; 0.0 once it is dead, or if the system has no such clock."""
    if sys.platform != "linux":
        return 0.0
    try:
        return time.clock_gettime((~pid << 3) | 2)  # MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED)
    except OSError:  # exited, perhaps not yet reaped
        return 0.0


def num_threads(pid: int) -> int:
    """The thread count of an unreaped process, from the link count of its task folder. 0 if unknown."""
    try:
        return os.stat(f"/proc/{pid}/task").st_nlink - 2  # noqa: PTH116  a Path would cost three times as much
    except OSError:  # /proc is hidden, or there is none
        return 0


def address_space() -> int:
    """The current address space of this process in bytes."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()


EPERM, ENOSYS = 1, 38

# name: (x86_64, aarch64); None if the architecture has no such call. No call here takes a path, an address or another
# process.
ALLOWED: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "poll": (7, None),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "pread64": (17, 67),
    "readv": (19, 65),
    "writev": (20, 66),
    "select": (23, None),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "dup": (32, 23),
    "dup2": (33, None),
    "nanosleep": (35, 101),
    "getitimer": (36, 102),
    "alarm": (37, None),
    "setitimer": (38, 103),
    "getpid": (39, 172),
    "exit": (60, 93),
    "uname": (63, 160),
    "getcwd": (79, 17),
    "gettimeofday": (96, 169),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "times": (100, 153),
    "getuid": (102, 174),
    "getgid": (104, 176),
    "geteuid": (107, 175),
    "getegid": (108, 177),
    "getppid": (110, 173),
    "rt_sigpending": (127, 136),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "time": (201, None),
    "futex": (202, 98),
    "set_tid_address": (218, 96),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "epoll_wait": (232, None),
    "epoll_ctl": (233, 21),
    "pselect6": (270, 72),
    "ppoll": (271, 73),
    "set_robust_list": (273, 99),
    "epoll_pwait": (281, 22),
    "eventfd2": (290, 19),
    "epoll_create1": (291, 20),
    "dup3": (292, 24),
    "pipe2": (293, 59),
    "getrandom": (318, 278),
    "rseq": (334, 293),
}
CHECKED = {  # allowed only with certain arguments
    "ioctl": (16, 29),
    "clone": (56, 220),
    "fcntl": (72, 25),
    "sched_getaffinity": (204, 123),
    "prlimit64": (302, 261),
}
CLONE3 = 435
LAST_KNOWN = 470
# The flags with which glibc and musl start a thread; with fewer, a thread would have its own descriptors or signals
CLONE_OF_THREADS = (0x003D0F00, 0x007D0F00)
FCNTL_COMMANDS = (0, 1030, 1, 2, 3)  # F_DUPFD, F_DUPFD_CLOEXEC, F_GETFD, F_SETFD, F_GETFL
IOCTL_REQUESTS = (0x5401, 0x5451)  # TCGETS, FIOCLEX

# seccomp_data: nr at 0, arch at 4, argument n at 16 + 8 n (little endian: its low half first)
LOAD, RETURN, JUMP, JUMP_EQ, JUMP_GE, JUMP_SET = 0x20, 0x06, 0x05, 0x15, 0x35, 0x45
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


@dataclass(frozen=True)
class Architecture:
    """The system call numbers of one architecture."""

    column: int  # of ALLOWED and CHECKED
    audit: int  # AUDIT_ARCH_*
    seccomp: int
    clone: int
    landlock_create: int = 444
    landlock_add_rule: int = 445
    landlock_restrict: int = 446


ARCHITECTURES = {"x86_64": Architecture(0, 0xC000003E, 317, 56), "aarch64": Architecture(1, 0xC00000B7, 277, 220)}


class Refused(RuntimeError):
    """This machine cannot enforce a layer of the sandbox; the message states which and why."""


def architecture() -> Architecture:
    """The architecture of this machine. Raises Refused for an unsupported one."""
    name = platform.machine()
    if sys.platform != "linux" or name not in ARCHITECTURES or sys.maxsize < 1 << 32 or sys.byteorder != "little":
        raise Refused(f"no seccomp filter for {sys.platform} on {name}")
    return ARCHITECTURES[name]


def filter_program(machine: Architecture) -> list[Instruction]:
    """The filter as classic BPF.

    Looks the call up by binary search: the kernel runs a new filter once for every call number, so a linear chain of
    comparisons would cost each child half a millisecond.
    """
    permitted, forbidden = [(RETURN, 0, 0, ALLOW)], [(RETURN, 0, 0, ERRNO | EPERM)]
    unknown = [(RETURN, 0, 0, ERRNO | ENOSYS)]
    actions = {numbers[machine.column]: permitted for numbers in ALLOWED.values()}
    actions |= {CHECKED[name][machine.column]: block for name, block in _checks().items()}
    actions[CLONE3] = unknown
    ranges: list[tuple[int, list[Instruction]]] = []  # (first call number, action up to the next range)
    for number in range(LAST_KNOWN + 1):
        action = actions.get(number, forbidden)
        if not ranges or ranges[-1][1] is not action:
            ranges.append((number, action))
    ranges.append((LAST_KNOWN + 1, unknown))
    return _number_of_call(machine) + _search(ranges)


def _number_of_call(machine: Architecture) -> list[Instruction]:
    """The first instructions of a filter: load the call number, if the call is for this architecture."""
    program = [(LOAD, 0, 0, 4), (JUMP_EQ, 1, 0, machine.audit), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    if machine.column == 0:  # x32 calls report the same architecture but set this bit
        program += [(JUMP_SET, 0, 1, 0x40000000), (RETURN, 0, 0, KILL)]
    return program


def _search(ranges: list[tuple[int, list[Instruction]]]) -> list[Instruction]:
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, above = _search(ranges[:middle]), _search(ranges[middle:])
    if len(below) < 256:
        return [(JUMP_GE, len(below), 0, ranges[middle][0]), *below, *above]
    # the offset of a conditional jump in classic BPF is one byte; JUMP has no such limit
    return [(JUMP_GE, 0, 1, ranges[middle][0]), (JUMP, 0, 0, len(below)), *below, *above]


def _checks() -> dict[str, list[Instruction]]:
    """The instructions that check the arguments of the calls in CHECKED."""
    forbidden = (RETURN, 0, 0, ERRNO | EPERM)
    return {
        "ioctl": [(LOAD, 0, 0, 24), *_one_of(IOCTL_REQUESTS), forbidden],
        "fcntl": [(LOAD, 0, 0, 24), *_one_of(FCNTL_COMMANDS), forbidden],
        "clone": [(LOAD, 0, 0, 16), *_one_of(CLONE_OF_THREADS), forbidden],
        "sched_getaffinity": [(LOAD, 0, 0, 16), *_one_of((0,)), forbidden],  # on itself
        "prlimit64": [  # on itself, and the pointer to new limits must be null in both halves
            *[(LOAD, 0, 0, 16), (JUMP_EQ, 1, 0, 0), forbidden, (LOAD, 0, 0, 32), (JUMP_EQ, 1, 0, 0), forbidden],
            *[(LOAD, 0, 0, 36), *_one_of((0,)), forbidden],
        ],
    }


def _one_of(constants: tuple[int, ...]) -> list[Instruction]:
    """Allow if the loaded word is one of these, otherwise fall through."""
    return [step for constant in constants for step in ((JUMP_EQ, 0, 1, constant), (RETURN, 0, 0, ALLOW))]


@functools.cache
def filter_code() -> tuple[bytes, ctypes.Array[ctypes.c_char]]:
    """The filter for seccomp(2), built once before any fork: struct sock_fprog, and the code it points to.

    Raises Refused.
    """
    return _assembled(filter_program(architecture()))


def _assembled(steps: list[Instruction]) -> tuple[bytes, ctypes.Array[ctypes.c_char]]:
    program = b"".join(struct.pack("=HBBI", *step) for step in steps)
    code = ctypes.create_string_buffer(program, len(program))
    return struct.pack("@HP", len(program) // 8, ctypes.addressof(code)), code
