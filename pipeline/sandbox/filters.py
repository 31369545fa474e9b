"""The seccomp filters of the profiles, as classic BPF: which system calls a candidate may make, and with what.

`sealed` and `files` are allow-lists: everything else answers EPERM, what is unknown here and clone3 ENOSYS, so that
libc falls back. `shell` must exec and fork, so it gets a deny-list; bubblewrap's namespaces do the rest. A call of a
foreign architecture kills. Standard library only, and nothing of the project: `jail.py` loads this file by its path.

Sources: seccomp(2), bpf's classic instruction set in linux/filter.h; syscall numbers from the kernel's
arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (aarch64).

Not promised: another architecture than those two. In `files` a candidate may ask whether a path exists (stat takes no
right that Landlock knows); it may read nothing there.
"""

import ctypes
import functools
import platform
import struct
import sys
from dataclasses import dataclass

EPERM, ENOSYS = 1, 38

# name: (x86_64, aarch64); None where the architecture has none. No call here takes a path, an address or another
# process.
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
# What `files` may do besides: Landlock decides about the path. Not among them: what Landlock does not know (chmod, utime,
# xattr, truncate by path) and every kind of link, so nothing in a scratch directory points out of it.
ON_FILES: dict[str, tuple[int | None, int | None]] = {
    "open": (2, None), "stat": (4, None), "lstat": (6, None), "pwrite64": (18, 68), "access": (21, None),
    "sendfile": (40, 71), "flock": (73, 32), "fsync": (74, 82), "fdatasync": (75, 83), "ftruncate": (77, 46),
    "getdents": (78, None), "chdir": (80, 49), "fchdir": (81, 50), "rename": (82, None), "mkdir": (83, None),
    "rmdir": (84, None), "unlink": (87, None), "readlink": (89, None), "umask": (95, 166), "getdents64": (217, 61),
    "fadvise64": (221, 223), "openat": (257, 56), "mkdirat": (258, 34), "newfstatat": (262, 79), "unlinkat": (263, 35),
    "renameat": (264, 38), "readlinkat": (267, 78), "faccessat": (269, 48), "renameat2": (316, 276),
    "copy_file_range": (326, 285), "statx": (332, 291), "faccessat2": (439, 439),
}  # fmt: skip
# What `shell` may not do: sockets, namespaces, mounts, other processes' memory, keys, and ways into the kernel. A memfd
# would be a file beyond its 16 MiB.
DENIED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "connect": (42, 203), "accept": (43, 202), "sendto": (44, 206), "recvfrom": (45, 207),
    "sendmsg": (46, 211), "recvmsg": (47, 212), "bind": (49, 200), "listen": (50, 201), "socketpair": (53, 199),
    "accept4": (288, 242), "recvmmsg": (299, 243), "sendmmsg": (307, 269), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272), "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "statmount": (457, 457), "listmount": (458, 458), "open_tree_attr": (467, 467),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "init_module": (175, 105),
    "delete_module": (176, 106), "finit_module": (313, 273), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "fanotify_init": (300, 262), "fanotify_mark": (301, 263), "acct": (163, 89),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142),
    "syslog": (103, 116), "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266),
    "adjtimex": (159, 171), "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
    "personality": (135, 92), "uselib": (134, None), "move_pages": (279, 239), "migrate_pages": (256, 238),
    "mbind": (237, 235), "set_mempolicy": (238, 237), "seccomp": (317, 277), "vhangup": (153, 58),
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
CLONE_NEW = 0x7E020000  # every flag of a new namespace
TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX

# seccomp_data: nr at 0, arch at 4, argument n at 16 + 8 n (little endian: its low half first)
LOAD, AND, RETURN, JUMP, JUMP_EQ, JUMP_GE, JUMP_SET = 0x20, 0x54, 0x06, 0x05, 0x15, 0x35, 0x45
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


@dataclass(frozen=True)
class Architecture:
    """How one architecture numbers its calls."""

    column: int  # of ALLOWED and CHECKED
    audit: int  # AUDIT_ARCH_*
    seccomp: int
    landlock_create: int = 444
    landlock_rule: int = 445
    landlock_restrict: int = 446


ARCHITECTURES = {"x86_64": Architecture(0, 0xC000003E, 317), "aarch64": Architecture(1, 0xC00000B7, 277)}


class Refused(RuntimeError):
    """This machine cannot enforce a layer of the sandbox; the message says which and why."""


def architecture() -> Architecture:
    """The machine's numbers. Raises Refused where there are none."""
    name = platform.machine()
    if sys.platform != "linux" or name not in ARCHITECTURES or sys.maxsize < 1 << 32 or sys.byteorder != "little":
        raise Refused(f"no seccomp filter for {sys.platform} on {name}")
    return ARCHITECTURES[name]


def filter_program(machine: Architecture, profile: str = "sealed") -> list[Instruction]:
    """The seccomp filter of a profile, as classic BPF.

    The number is found by halving: the kernel tries a new filter on every number, so a chain of comparisons would
    cost each child half a millisecond.
    """
    permitted, forbidden = [(RETURN, 0, 0, ALLOW)], [(RETURN, 0, 0, ERRNO | EPERM)]
    unknown = [(RETURN, 0, 0, ERRNO | ENOSYS)]
    listed, checks = ({}, _shell_checks()) if profile == "shell" else (ALLOWED, _checks())
    listed = listed | ON_FILES if profile == "files" else listed
    actions = {numbers[machine.column]: permitted for numbers in listed.values()}
    if profile == "shell":
        actions = {numbers[machine.column]: forbidden for numbers in DENIED.values()}
    actions |= {CHECKED[name][machine.column]: block for name, block in checks.items()}
    actions[CLONE3] = unknown
    rest = permitted if profile == "shell" else forbidden
    pieces: list[tuple[int, list[Instruction]]] = []  # (first number, what becomes of it and of those up to the next)
    for number in range(LAST_KNOWN + 1):
        action = actions.get(number, rest)
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
    if len(below) < 256:
        return [(JUMP_GE, len(below), 0, pieces[middle][0]), *below, *above]
    # a conditional jump of classic BPF spans a byte; JUMP spans all
    return [(JUMP_GE, 0, 1, pieces[middle][0]), (JUMP, 0, 0, len(below)), *below, *above]


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


def _shell_checks() -> dict[str, list[Instruction]]:
    """As `_checks`, for the deny-list: no new namespace, nothing typed into a terminal."""
    allowed = (RETURN, 0, 0, ALLOW)
    forbidden = (RETURN, 0, 0, ERRNO | EPERM)
    typing = [step for request in TERMINAL_INPUT for step in ((JUMP_EQ, 0, 1, request), forbidden)]
    return {
        "ioctl": [(LOAD, 0, 0, 24), *typing, allowed],
        "clone": [(LOAD, 0, 0, 16), (JUMP_SET, 0, 1, CLONE_NEW), forbidden, allowed],
    }


def _one_of(constants: tuple[int, ...]) -> list[Instruction]:
    """Allow when the loaded word is one of these; else fall through."""
    return [step for constant in constants for step in ((JUMP_EQ, 0, 1, constant), (RETURN, 0, 0, ALLOW))]


@functools.cache
def filter_bytes(profile: str) -> bytes:
    """The filter as an array of struct sock_filter, as the kernel and bubblewrap read it. Raises Refused."""
    return b"".join(struct.pack("=HBBI", *step) for step in filter_program(architecture(), profile))


@functools.cache
def filter_code(profile: str) -> tuple[bytes, ctypes.Array[ctypes.c_char]]:
    """The filter for seccomp(2), made once before any fork: struct sock_fprog, and the code it points to."""
    program = filter_bytes(profile)
    code = ctypes.create_string_buffer(program, len(program))
    return struct.pack("@HP", len(program) // 8, ctypes.addressof(code)), code
