"""The seccomp filter of profile `sealed`, as classic BPF: which system calls a candidate may make, and how.

It is an allow-list. Everything else returns EPERM; clone3 and calls beyond LAST_KNOWN return ENOSYS, so that libc falls
back. A call of a foreign architecture kills. Standard library only, nothing of the project: `jail.py` loads this file
by its path.

Sources: seccomp(2), bpf's classic instruction set in linux/filter.h; syscall numbers from the kernel's
arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (aarch64).

Not promised: architectures other than these two.
"""

import ctypes
import functools
import platform
import struct
import sys
from dataclasses import dataclass

EPERM, ENOSYS = 1, 38

# name: (x86_64, aarch64); None where the architecture has no such call. No call here takes a path, an address or
# another process.
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
CHECKED = {  # allowed only with some arguments
    "ioctl": (16, 29),
    "clone": (56, 220),
    "fcntl": (72, 25),
    "sched_getaffinity": (204, 123),
    "prlimit64": (302, 261),
}
CLONE3 = 435
LAST_KNOWN = 470
# All the flags with which glibc and musl start a thread; with fewer it would have its own descriptors or signals
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

    It looks the call up by binary search: the kernel runs a new filter once for every call number, so a chain of
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
    program = [(LOAD, 0, 0, 4), (JUMP_EQ, 1, 0, machine.audit), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    if machine.column == 0:  # x32 calls carry this bit under the same architecture word
        program += [(JUMP_SET, 0, 1, 0x40000000), (RETURN, 0, 0, KILL)]
    return program + _search(ranges)


def _search(ranges: list[tuple[int, list[Instruction]]]) -> list[Instruction]:
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, above = _search(ranges[:middle]), _search(ranges[middle:])
    if len(below) < 256:
        return [(JUMP_GE, len(below), 0, ranges[middle][0]), *below, *above]
    # a conditional jump of classic BPF spans a byte; JUMP spans all
    return [(JUMP_GE, 0, 1, ranges[middle][0]), (JUMP, 0, 0, len(below)), *below, *above]


def _checks() -> dict[str, list[Instruction]]:
    """The instructions that decide about the calls of CHECKED by their arguments."""
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
    """Allow if the loaded word is one of these, else fall through."""
    return [step for constant in constants for step in ((JUMP_EQ, 0, 1, constant), (RETURN, 0, 0, ALLOW))]


@functools.cache
def filter_code() -> tuple[bytes, ctypes.Array[ctypes.c_char]]:
    """The filter for seccomp(2), made once before any fork: struct sock_fprog, and the code it points to.

    Raises Refused.
    """
    program = b"".join(struct.pack("=HBBI", *step) for step in filter_program(architecture()))
    code = ctypes.create_string_buffer(program, len(program))
    return struct.pack("@HP", len(program) // 8, ctypes.addressof(code)), code
