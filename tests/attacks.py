"""Candidates that try to escape, to stay behind, or to pass without being right; data for `test_jail.py`.

Those in `FORGING` (`forging.py`) try to pass, those in `EXHAUSTING` (`exhausting.py`) to use up the machine, those in
`REFUSED` to escape. `CHEATS`: name, source of `f(x)`, allowed verdicts and reasons. The one test is f(2) == 4, three
times. `REFUSED`: name, an expression whose system call the kernel must refuse: `refused` and `raw` return whether it
did. `PROGRAMS`: name, source, stdin, stdout, verdicts. `ROWS`: the rows of the attack table and the attacks in each.
Standard library only: `python attacks.py` judges all of them as the user who runs it and prints JSON.
"""

import json
import platform
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # when run as a script
from tests.exhausting import EXHAUSTING
from tests.forging import FORGING, FRAME

RIGHT = "def f(x): return x * x\n"
TESTS = [{"args": f"[{n}]", "expected": str(n * n), "visible": n == 2} for n in (2, 3, 4)]
FAST = {"cpu_seconds": 0.4, "wall_extra_seconds": 0.4, "timeouts": 1, "memory_mib": 64}
NO_PASS = ("wrong", "error", "timeout", "unsafe")

CHEATS: list[tuple[str, str, tuple[str, ...], tuple[str, ...]]] = [
    ("honest", RIGHT, ("passed",), ("",)),
    ("__eq__ always true", "class A:\n def __eq__(s, o): return True\ndef f(x): return A()", ("wrong",), ("opaque",)),
    (
        "hostile subclass",
        "class A(int):\n def __eq__(s, o): return True\ndef f(x): return A(4)",
        ("wrong",),
        ("opaque",),
    ),
    (
        "frame walk and gc search for expected values",
        (
            "import gc, sys\ndef f(x):\n found = []\n fr = sys._getframe()\n"
            " while fr:\n  found.append(fr.f_locals.get('expected'))\n  fr = fr.f_back\n"
            " for o in gc.get_objects():\n  if type(o) is dict and 'expected' in o: found.append(o['expected'])\n"
            " return next((v for v in found if v is not None), None)"
        ),
        NO_PASS,
        ("value", "opaque"),
    ),
    (
        "prints passed",
        "print('passed', flush=True)\ndef f(x):\n print('{\"v\": 4}')\n return 0",
        ("wrong",),
        ("value",),
    ),
    ("frames on stdout", FRAME + "def f(x):\n os.write(1, b'4')\n return 0", ("wrong",), ("value",)),
    (
        "writes to every fd",
        (
            "import os\ndef f(x):\n for fd in range(32):\n  try: os.write(fd, b'passed')\n  except OSError: pass\n"
            " return 4"
        ),
        ("unsafe",),
        ("forged",),
    ),
    ("one stray byte", "import os\ndef f(x):\n os.write(3, b'x')\n return 4", ("unsafe",), ("forged",)),
    ("repeated frame", FRAME + "def f(x):\n answer(0, b'4')\n return x * x", ("unsafe",), ("forged",)),
    ("early frame", FRAME + "answer(0, b'4'); answer(1, b'9')\n" + RIGHT, ("unsafe",), ("forged",)),
    ("frame with a wrong nonce", FRAME + "def f(x):\n answer(0, b'4', '0' * 32)\n return 4", ("unsafe",), ("forged",)),
    ("end at once", FRAME + 'def f(x):\n send(b\'{"n":"%s","end":true}\' % nonce().encode())', NO_PASS, ("forged",)),
    ("sys.exit(0) at import", "import sys\nsys.exit(0)", ("error",), ("exit",)),
    ("sys.exit(0) in the call", "import sys\ndef f(x): sys.exit(0)", ("error",), ("exit",)),
    ("os._exit(0) after one answer", "import os\ndef f(x):\n if x > 2: os._exit(0)\n return 4", ("error",), ("exit",)),
    (
        "answers at exit and from __del__",
        FRAME + "import atexit\natexit.register(answer, 0, b'4')\nclass D:\n def __del__(s): answer(0, b'4')\nd = D()\n"
        "def f(x): return 0",
        NO_PASS,
        ("value", "forged"),
    ),
    (
        "answers from a late thread",
        FRAME + "import threading, time\nkey = nonce()\ndef late():\n time.sleep(0.01)\n"
        " for i in range(3): answer(i, b'4', key)\n"
        "def f(x):\n threading.Thread(target=late, daemon=True).start()\n time.sleep(0.02)\n return 0",
        NO_PASS,
        ("value", "forged", "exception"),
    ),
    (
        "patches builtins, json, os.write and the encoder",
        (
            "import builtins, json, os, sys\nbuiltins.type = lambda v: int\njson.dumps = lambda *a, **k: '4'\n"
            "os.write = lambda fd, b: len(b)\nfor m in list(sys.modules.values()):\n"
            "  if hasattr(m, 'MAX_NODES'): m.encode = lambda v: '4'\ndef f(x): return 0"
        ),
        NO_PASS,
        ("value", "opaque", "exception", "exit", "", "forged"),
    ),
    (
        "catches BaseException for ever",
        "def f(x):\n while True:\n  try:\n   while True: pass\n  except BaseException: pass",
        ("timeout",),
        ("",),
    ),
    ("cyclic value", "a = []\na.append(a)\ndef f(x): return a", ("wrong",), ("opaque",)),
    ("deep value", "d = 0\nfor _ in range(10**5): d = [d]\ndef f(x): return d", ("wrong",), ("opaque",)),
    (
        "colliding keys",
        "d = {n * (2**61 - 1): 0 for n in range(1, 1500)}\ndef f(x): return d",
        ("wrong", "timeout"),
        ("value", ""),
    ),
    ("knows no sign of zero", "def f(x): return x * x * -0.0", ("wrong",), ("value",)),
    ("huge integer", "def f(x): return 1 << 3321928", ("wrong",), ("opaque",)),
    ("knows only the public test", "def f(x): return 4", ("wrong",), ("value",)),
    ("endless loop", "def f(x):\n while True: pass", ("timeout",), ("",)),
    (
        "recursion, limit raised",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)",
        ("error", "memory", "timeout"),
        ("crash", "exception", ""),
    ),
    (
        "subprocess",
        "import subprocess\ndef f(x): return subprocess.run(['true']).returncode or x * x",
        ("error",),
        ("exception",),
    ),
    (
        "multiprocessing",
        "import multiprocessing\ndef f(x):\n p = multiprocessing.Process(target=print)\n p.start()\n return x * x",
        ("error",),
        ("exception",),
    ),
    ("endless C call", "def f(x): return sum(iter(int, 1))", ("timeout",), ("",)),
    ("sleep", "import time\ndef f(x): time.sleep(3600)", ("timeout",), ("",)),
    (
        "ignores the signals",
        "import signal\nfor s in (15, 24, 14, 2): signal.signal(s, signal.SIG_IGN)\ndef f(x):\n while True: pass",
        ("timeout",),
        ("",),
    ),
    (
        "closes its channel and sleeps",
        "import os, time\ndef f(x):\n os.close(3)\n time.sleep(3600)",
        ("timeout",),
        ("",),
    ),
    ("1 GB at once", "def f(x): return len(bytearray(1 << 30))", ("memory",), ("",)),
    ("growing list", "def f(x):\n a = []\n while True: a.append(bytearray(1 << 24))", ("memory",), ("",)),
    (
        "recursion through C",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return sorted([1, 2], key=f)",
        ("error",),
        ("crash",),
    ),
    ("stdout flood", "def f(x):\n while True: print('x' * 4096)", ("error",), ("output",)),
    ("stderr flood", "import sys\ndef f(x):\n while True: sys.stderr.write('x' * 4096)", ("error",), ("output",)),
    ("result flood", FRAME + "def f(x):\n while True: os.write(3, bytes(65536))", NO_PASS, ("forged", "output")),
    (
        "thread bomb",
        (
            "import threading, time\ndef f(x):\n while True: threading.Thread(target=time.sleep, args=(99,),"
            " daemon=True).start()"
        ),
        ("error",),
        ("exception",),
    ),
    (
        "inherited descriptors",
        (
            "import os\nfor fd in range(4, 64):\n try:\n  os.fstat(fd)\n  K = 0\n  break\n except OSError: K = 1\n"
            "def f(x): return x * x * K"
        ),
        ("passed",),
        ("",),
    ),
    ("environment", "import os\ndef f(x): return x * x if not os.environ else dict(os.environ)", ("passed",), ("",)),
]
if platform.machine() == "x86_64":
    LEGACY = "libc = ctypes.CDLL(None)\ndef f(x): return libc.syscall(0x40000000 | 39)"
    CHEATS += [
        ("x32 call", f"import ctypes\n{LEGACY}", ("error",), ("crash",)),
        (
            "32-bit call",
            (
                "import ctypes\nlibc = ctypes.CDLL(None)\n"
                "libc.mmap.restype = ctypes.c_void_p\ndef f(x):\n"
                " place = libc.mmap(None, 4096, 7, 0x22, -1, 0)\n"
                " ctypes.memmove(place, b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3', 8)  # getpid by int 0x80\n"
                " return ctypes.CFUNCTYPE(ctypes.c_int)(place)()"
            ),
            ("error",),
            ("crash",),
        ),
    ]

PRELUDE = r"""
import ctypes, fcntl, os, resource, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
REFUSALS = (1, 13, 38)
def refused(call, *args):
    try:
        call(*args)
    except OSError as error:
        return error.errno in REFUSALS
    return False
def fails(call, *args):
    try:
        call(*args)
    except OSError:
        return True
    return False
def raw(number, *args):
    ctypes.set_errno(0)
    wide = [a if isinstance(a, bytes) else ctypes.c_long(a) for a in args]
    return libc.syscall(ctypes.c_long(number), *wide) == -1 and ctypes.get_errno() in REFUSALS
P = os.getppid()
PLACES = ('/root', '/home', {places!r})
"""
X86 = platform.machine() == "x86_64"


def _nr(x86: int, arm: int) -> int:
    return x86 if X86 else arm


REFUSED: list[tuple[str, str]] = [
    ("fork", "refused(os.fork)"),
    ("vfork", "raw(58)" if X86 else "raw(220, 17, 0)"),
    ("clone", f"raw({_nr(56, 220)}, 17, 0, 0, 0, 0)"),
    ("clone of a thread in new namespaces", f"raw({_nr(56, 220)}, 0x10010000 | 0x3d0f00, 0, 0, 0, 0)"),
    ("clone3", "raw(435, bytes(88), 88)"),
    ("posix_spawn", "refused(os.posix_spawn, '/bin/true', ['true'], {})"),
    ("execve", "refused(os.execv, '/bin/sh', ['sh'])"),
    ("execveat", f"raw({_nr(322, 281)}, 0, b'', 0, 0, 0x1000)"),
    ("memfd", "refused(os.memfd_create, 'a')"),
    ("system by ctypes", "libc.system(b'true') != 0"),
    ("reads /etc/passwd", "refused(open, '/etc/passwd')"),
    (
        "reads the home and the repository",
        "all(refused(os.listdir, p) for p in PLACES) and refused(open, PLACES[2] + '/README.md')",
    ),
    ("lists the root", "refused(os.listdir, '/')"),
    ("stat", "refused(os.stat, '/etc/passwd')"),
    ("openat2", "raw(437, -100, b'/etc/passwd', bytes(24), 24)"),
    ("writes outside", "refused(open, '/tmp/escaped', 'w')"),
    ("writes /dev/shm", "refused(os.open, '/dev/shm/escaped', 66)"),
    ("symlink", "refused(os.symlink, '/etc/passwd', '/tmp/l')"),
    ("hard link", "refused(os.link, '/etc/passwd', '/tmp/l')"),
    ("chdir and unlink", "refused(os.chdir, '/tmp') and refused(os.unlink, '/tmp/x')"),
    ("/proc/self/environ", "refused(open, '/proc/self/environ', 'rb')"),
    ("parent's environ", "refused(open, f'/proc/{P}/environ', 'rb')"),
    ("parent's mem", "refused(open, f'/proc/{P}/mem', 'rb')"),
    ("parent's maps and fd", "refused(open, f'/proc/{P}/maps') and refused(os.listdir, f'/proc/{P}/fd')"),
    ("inet", "refused(socket.socket, socket.AF_INET)"),
    ("unix", "refused(socket.socket, socket.AF_UNIX)"),
    ("netlink", "refused(socket.socket, 16, socket.SOCK_RAW, 0)"),
    ("socketpair", "refused(socket.socketpair)"),
    ("connects its channel", f"raw({_nr(42, 203)}, 3, b'\\x01\\x00\\x00a', 4)"),
    ("passes descriptors", f"raw({_nr(46, 211)}, 3, bytes(56), 0)"),
    ("io_uring", "raw(425, 8, bytes(120)) and raw(426, 3, 1, 1, 0, 0) and raw(427, 3, 0, 0, 0)"),
    ("kill the parent", "refused(os.kill, P, 9)"),
    ("kill everyone", "refused(os.kill, -1, 9)"),
    ("kill itself", "refused(os.kill, os.getpid(), 9)"),
    ("tgkill", f"raw({_nr(234, 131)}, P, P, 9)"),
    ("pidfd", "raw(434, P, 0) and raw(424, 3, 9, 0, 0) and raw(438, 3, 0, 0)"),
    ("sigqueue", f"raw({_nr(129, 138)}, P, 9, bytes(128))"),
    ("F_SETOWN", "refused(fcntl.fcntl, 3, fcntl.F_SETOWN, P)"),
    ("F_SETSIG", "refused(fcntl.fcntl, 3, 10, 9)"),
    ("FIOASYNC, FIOSETOWN", "refused(fcntl.ioctl, 3, 0x5452, b'1234') and refused(fcntl.ioctl, 3, 0x8901, b'1234')"),
    ("prlimit on the server", "refused(resource.prlimit, P, resource.RLIMIT_CPU, (1, 1))"),
    ("raises its own limit", f"raw({_nr(302, 261)}, 0, 7, bytes(16), 0) and raw({_nr(160, 164)}, 7, bytes(16))"),
    (
        "two candidates against each other",
        (
            f"all(refused(os.kill, q, 0) and refused(resource.prlimit, q, 7, (9, 9)) and raw({_nr(101, 117)}, 16, q, 0,"
            " 0) and fails(open, f'/proc/{q}/mem', 'rb') for q in (*range(P + 1, P + 99), os.getpid() ^ 1))"
        ),
    ),
    ("prlimit on a sibling", "all(refused(resource.prlimit, os.getpid() + d, 7, (9, 9)) for d in (-2, -1, 1, 2))"),
    ("ptrace", f"raw({_nr(101, 117)}, 16, P, 0, 0)"),
    ("process_vm_readv, writev", f"raw({_nr(310, 270)}, P, 0, 0, 0, 0, 0) and raw({_nr(311, 271)}, P, 0, 0, 0, 0, 0)"),
    ("setsid", "refused(os.setsid)"),
    ("setpgid", "refused(os.setpgid, 0, 0)"),
    ("unshare", f"raw({_nr(272, 97)}, 0x10000000)"),
    ("setns", f"raw({_nr(308, 268)}, 0, 0)"),
    ("mount", f"raw({_nr(165, 40)}, b'none', b'/', b'tmpfs', 0, 0)"),
    ("chroot", "refused(os.chroot, '/')"),
    ("bpf", f"raw({_nr(321, 280)}, 0, bytes(64), 64)"),
    ("perf", f"raw({_nr(298, 241)}, bytes(128), 0, -1, -1, 0)"),
    ("userfaultfd", f"raw({_nr(323, 282)}, 0)"),
    ("keyctl", f"raw({_nr(250, 219)}, 0, -3, 0, 0, 0)"),
    ("modules", f"raw({_nr(175, 105)}, b'', 0, b'')"),
    ("ids back to 0", "refused(os.setresuid, 0, 0, 0) and refused(os.setresgid, 0, 0, 0)"),
    ("nice", "refused(os.nice, 1)"),
    ("affinity", "refused(os.sched_setaffinity, 0, {0})"),
    ("TIOCSTI", "refused(fcntl.ioctl, 0, 0x5412, b'x')"),
    ("seccomp again", f"raw({_nr(317, 277)}, 1, 0, bytes(16))"),
    ("prctl", "libc.prctl(4, 1, 0, 0, 0) == -1"),
    ("unknown call", "raw(4000)"),
    ("shared memory of System V", f"raw({_nr(29, 194)}, 0, 4096, 0o1666) and raw({_nr(30, 196)}, 0, 0, 0)"),
    ("messages of System V", f"raw({_nr(68, 186)}, 1, 0o1666) and raw({_nr(69, 189)}, 0, bytes(16), 8, 0)"),
    ("semaphores of System V", f"raw({_nr(64, 190)}, 1, 1, 0o1666)"),
    ("message queues of POSIX", f"raw({_nr(240, 180)}, b'escaped', 0o102, 0o666, 0)"),
    ("secret memory", "raw(447, 0)"),
    (
        "handles of files",
        f"raw({_nr(303, 264)}, -100, b'/', bytes(128), bytes(4), 0) and raw({_nr(304, 265)}, 3, bytes(128), 0)",
    ),
    ("watches files", f"raw({_nr(294, 26)}, 0) and raw({_nr(300, 262)}, 0, 0)"),
    ("compares and advises processes", f"raw({_nr(312, 272)}, P, P, 0, 0, 0) and raw(440, 3, 0, 0, 0, 0)"),
    ("personality", f"raw({_nr(135, 92)}, 0x40000)"),
    (
        "clocks",
        (
            f"raw({_nr(164, 170)}, bytes(16), 0) and raw({_nr(227, 112)}, 0, bytes(16)) and raw({_nr(159, 171)},"
            " bytes(208))"
        ),
    ),
    (
        "name, swap, reboot",
        f"raw({_nr(170, 161)}, b'a', 1) and raw({_nr(167, 224)}, b'/', 0) and raw({_nr(169, 142)}, 0, 0, 0, 0)",
    ),
    ("moves pages", f"raw({_nr(279, 239)}, P, 0, 0, 0, 0, 0) and raw({_nr(256, 238)}, P, 0, 0, 0)"),
    (
        "splices",
        (
            f"raw({_nr(275, 76)}, 3, 0, 1, 0, 9, 0) and raw({_nr(276, 77)}, 3, 1, 9, 0) and raw({_nr(278, 75)}, 1, 0,"
            " 0, 0)"
        ),
    ),
    ("sends a file", f"raw({_nr(40, 71)}, 1, 0, 0, 9) and raw({_nr(326, 285)}, 0, 0, 1, 0, 9, 0)"),
    ("timers that signal", f"raw({_nr(222, 107)}, 0, bytes(64), bytes(8)) and raw({_nr(282, 74)}, -1, bytes(8), 8, 0)"),
    ("waits for others", f"raw({_nr(61, 260)}, -1, 0, 0, 0) and raw({_nr(247, 95)}, 0, 0, bytes(128), 4, 0)"),
    ("priority and scheduler of others", f"raw({_nr(141, 140)}, 0, P, 9) and raw({_nr(144, 119)}, P, 0, bytes(8))"),
    ("capabilities", f"raw({_nr(126, 91)}, bytes(8), bytes(24)) and raw({_nr(125, 90)}, bytes(8), bytes(24))"),
    ("groups", f"raw({_nr(116, 159)}, 0, 0) and raw({_nr(123, 152)}, 0)"),
    ("landlock again", "raw(444, 0, 0, 1) and raw(446, 3, 0)"),
    ("a larger pipe", "refused(fcntl.fcntl, os.pipe()[1], 1031, 1 << 20)"),
    ("a lease and a lock", "refused(fcntl.fcntl, 3, 1024, 1) and refused(fcntl.flock, 3, 2)"),
    ("its own memory by /proc", "all(refused(open, f'/proc/self/{n}', 'rb') for n in ('mem', 'maps', 'fd/3', 'task'))"),
    (
        "the zygote's memory",
        "all(refused(open, f'/proc/{q}/{n}', 'rb') for q in range(P, P + 9) for n in ('mem', 'environ', 'maps'))",
    ),
]


PROGRAMS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("only the first expected line", "print(int(input()) ** 2)", "2\n3", "4\n9\n", ("wrong",)),
    ("all expected lines", "print(int(input()) ** 2)\nprint(int(input()) ** 2)", "2\n3", "4\n9\n", ("passed",)),
]
# The attack table: row -> the attacks above that belong to it; every attack is in a row.
ROWS: dict[str, tuple[str, ...]] = {
    "eq, hostile subclass": ("honest", "__eq__ always true", "hostile subclass"),
    "frame walk, gc search": ("frame walk and gc search for expected values",),
    "prints passed, frames on stdout": ("prints passed", "frames on stdout"),
    "writes to every fd": ("writes to every fd", "one stray byte"),
    "repeated, early, wrong-nonce frame": ("repeated frame", "early frame", "frame with a wrong nonce", "end at once"),
    "sys.exit(0)": ("sys.exit(0) at import", "sys.exit(0) in the call"),
    "os._exit(0) after one answer": ("os._exit(0) after one answer",),
    "atexit, __del__, late thread": ("answers at exit and from __del__", "answers from a late thread"),
    "patches builtins": ("patches builtins, json, os.write and the encoder",),
    "catches BaseException": ("catches BaseException for ever",),
    "only the first expected line": ("only the first expected line", "all expected lines"),
    "cyclic, deep, huge value": ("cyclic value", "deep value", "huge integer"),
    "colliding keys": ("colliding keys",),
    "NaN, -0.0, lone surrogate, NUL": ("exact values", "knows no sign of zero"),
    "knows only the public tests": ("knows only the public test",),
    "endless loop, endless C call": ("endless loop", "endless C call"),
    "sleep, signals ignored": ("sleep", "ignores the signals", "closes its channel and sleeps"),
    "1 GB at once, growing list": ("1 GB at once", "growing list"),
    "recursion, limit raised": ("recursion through C", "recursion, limit raised"),
    "floods": ("stdout flood", "stderr flood", "result flood"),
    "thread bomb": ("thread bomb",),
    "fork, vfork, clone, clone3": ("fork", "vfork", "clone", "clone of a thread in new namespaces", "clone3"),
    "subprocess, multiprocessing": ("subprocess", "multiprocessing", "posix_spawn"),
    "execve, execveat, memfd, system": ("execve", "execveat", "memfd", "system by ctypes"),
    "reads passwd, home, repository": (
        "reads /etc/passwd",
        "reads the home and the repository",
        "lists the root",
        "stat",
        "openat2",
    ),
    "writes outside, /dev/shm": ("writes outside", "writes /dev/shm"),
    "symlink, hard link, unlink": ("symlink", "hard link", "chdir and unlink"),
    "environ": ("environment", "/proc/self/environ"),
    "parent's /proc": ("parent's environ", "parent's mem", "parent's maps and fd"),
    "inherited fds": ("inherited descriptors",),
    "sockets": ("inet", "unix", "netlink", "socketpair", "connects its channel", "passes descriptors"),
    "io_uring": ("io_uring",),
    "kill, tgkill, pidfd": ("kill the parent", "kill everyone", "kill itself", "tgkill", "pidfd", "sigqueue"),
    "F_SETOWN, F_SETSIG": ("F_SETOWN", "F_SETSIG", "FIOASYNC, FIOSETOWN"),
    "prlimit": ("prlimit on the server", "prlimit on a sibling", "raises its own limit"),
    "ptrace, process_vm_writev": ("ptrace", "process_vm_readv, writev"),
    "setsid, setpgid": ("setsid", "setpgid"),
    "unshare, setns, mount, chroot": ("unshare", "setns", "mount", "chroot"),
    "bpf, perf, userfaultfd, keyctl, modules": (
        "bpf",
        "perf",
        "userfaultfd",
        "keyctl",
        "modules",
        "seccomp again",
        "prctl",
    ),
    "ids, nice, affinity": ("ids back to 0", "nice", "affinity"),
    "32-bit and x32 calls": ("x32 call", "32-bit call") if X86 else ("unknown call",),
    "TIOCSTI": ("TIOCSTI", "unknown call"),
    "two candidates against each other": ("two candidates against each other",),
    "trainer killed": ("trainer killed",),
    "left over": ("left over",),
    "forged frames": tuple(name for name in FORGING if name.startswith(("sends ", "writes "))),
    "forged values": tuple(name for name in FORGING if name.startswith("returns ")),
    "forged process": tuple(name for name in FORGING if name.startswith("patches ")),
    "exhausts time, memory, descriptors, threads, output": tuple(EXHAUSTING),
    "System V, queues, handles": (
        "shared memory of System V",
        "messages of System V",
        "semaphores of System V",
        "message queues of POSIX",
        "secret memory",
        "handles of files",
        "watches files",
    ),
    "clocks, names, pages, splices": (
        "clocks",
        "name, swap, reboot",
        "moves pages",
        "splices",
        "sends a file",
        "personality",
        "compares and advises processes",
    ),
    "timers, children, scheduler": ("timers that signal", "waits for others", "priority and scheduler of others"),
    "capabilities, groups, layers": ("capabilities", "groups", "landlock again", "a larger pipe", "a lease and a lock"),
    "memory by /proc": ("its own memory by /proc", "the zygote's memory"),
}


def expected() -> dict[str, tuple[tuple[str, ...], tuple[str, ...] | None]]:
    """name -> allowed verdicts and reasons (None: any). A candidate in REFUSED passes if its call was refused."""
    found: dict[str, tuple[tuple[str, ...], tuple[str, ...] | None]] = {
        name: (verdicts, reasons) for name, _, verdicts, reasons in CHEATS
    }
    found |= {name: (("passed",), None) for name, _ in REFUSED}
    found |= {name: (verdicts, None) for name, *_, verdicts in PROGRAMS}
    found |= dict.fromkeys(FORGING, (NO_PASS, None))
    found |= dict.fromkeys(EXHAUSTING, ((*NO_PASS, "memory"), None))
    return found | dict.fromkeys(("exact values", "trainer killed", "left over"), (("passed",), None))


def sources() -> list[tuple[str, dict[str, Any]]]:
    """(name, the fields of a Program) of all but `trainer killed` and `left over`."""
    prelude = PRELUDE.format(places=str(Path(__file__).parents[1]))
    functions = [(name, source) for name, source, _, _ in CHEATS]
    functions += [*FORGING.items(), *EXHAUSTING.items()]
    functions += [(name, f"{prelude}def f(x): return x * x if {test} else 'it worked'\n") for name, test in REFUSED]
    found = [(name, {"source": source, "entry_point": "f", "tests": TESTS}) for name, source in functions]
    for name, source, stdin, stdout, _ in PROGRAMS:
        found.append((name, {"source": source, "entry_point": "", "tests": [{"stdin": stdin, "stdout": stdout}]}))
    exact = "['\\ud800\\0', -0.0, 1e999, 10**400]".replace("10**400", "1" + "0" * 400)
    tests = [{"args": "[1]", "expected": exact}]
    return [*found, ("exact values", {"source": f"def f(x): return {exact}", "entry_point": "f", "tests": tests})]


TRAINER = """
import sys, threading
from pipeline.sandbox.pool import CandidateJob, Pool, SandboxConfig
pool = Pool(SandboxConfig(), 2).__enter__()
task = CandidateJob("import time\\ntime.sleep(60)", "f", [{"args": "[]", "kwargs": "{}"}], 10.0)
for _ in range(2): threading.Thread(target=pool.run, args=(task,), daemon=True).start()
print(*[s.process.pid for s in pool.host.running], flush=True)
threading.Event().wait()
"""


def survivors() -> int:
    """How many servers and children are still alive a few seconds after their trainer was killed."""
    import os

    root = Path(__file__).parents[1]
    trainer = subprocess.Popen([sys.executable, "-B", "-c", TRAINER], cwd=root, stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    servers = [int(pid) for pid in trainer.stdout.readline().split()]
    children: list[int] = []
    while len(children) < 4:  # each server's zygote and a candidate
        children = [int(p) for s in servers for p in Path(f"/proc/{s}/task/{s}/children").read_text().split()]
    watched = [os.pidfd_open(pid) for pid in (*servers, *children)]
    trainer.send_signal(signal.SIGKILL)
    trainer.communicate()
    alive = sum(not select.select([fd], [], [], 5.0)[0] for fd in watched)
    for fd in watched:
        os.close(fd)
    return alive


def state(judge: Any) -> list[int]:
    """What must not grow in two servers and their zygotes: processes, descriptors (only root sees them), IPC objects,
    and memory by more than 8 MiB.
    """
    servers = [server.process.pid for server in judge.pool.host.running]
    zygotes = [int(pid) for s in servers for pid in Path(f"/proc/{s}/task/{s}/children").read_text().split()]
    everybody = [*servers, *zygotes]
    ipc = sum(len(Path(f"/proc/sysvipc/{kind}").read_text().splitlines()) for kind in ("shm", "msg", "sem"))
    found = [len(zygotes), ipc]
    for pid in everybody:
        size, resident = (int(word) * 4096 for word in Path(f"/proc/{pid}/statm").read_text().split()[:2])
        found += [size, resident] if pid in servers else [size]
        try:
            found.append(len(list(Path(f"/proc/{pid}/fd").iterdir())))
        except PermissionError:
            found.append(0)
    return found


def judge_all() -> dict[str, Any]:
    """name -> (verdict, reason, score), two candidates at a time."""
    from pipeline.sandbox.judge import Candidate, Judge, Limits, SandboxConfig

    with Judge(SandboxConfig(limits=Limits(**FAST)), 2) as judge:
        verdicts = judge.judge(Candidate(**fields) for _, fields in sources())
        before = state(judge)
        found: dict[str, Any] = {
            name: (v.verdict, v.reason, v.score) for (name, _), v in zip(sources(), verdicts, strict=True)
        }
        left = [(a, b) for a, b in zip(before, state(judge), strict=True) if b - a > (0 if a < 1 << 20 else 8 << 20)]
        found["left over"] = ("wrong", f"{left} more", 0.0) if left else ("passed", "", 1.0)
    alive = survivors()
    return found | {"trainer killed": ("passed", "", 1.0) if alive == 0 else ("wrong", f"{alive} alive", 0.0)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(judge_all()))
