"""The server that runs untrusted code: a watcher, a zygote that never sees a job, and one child for each job.

`servers.py` executes `python -P -s -S -B jail.py` with an empty environment, so this process never contained the
trainer's memory, keys or data. It reads settings, imports what candidates may use, drops root, tests its layers and
splits in two (`Zygote`). The watcher then reads jobs as frames (4 bytes of little-endian length, JSON) on stdin and
answers each on stdout. Each job runs in one child: forked from the zygote, isolated by `kernel.py`, sent its job, sent
"go" before each test, killed and reaped. The child writes to fd 3: the byte R once it is isolated, A once it has read
its job, then per test `{"n": nonce, "i": index, "v": value}` or `{"n", "i", "e": [type, message]}`, or once
`{"n", "load", "e"}` if the source does not load, then `{"n", "end"}`.

    settings  {"profile", "preload": [module], "paths": [folder]}  ->  {"ready": {...}}, {"refused"} or {"missing"}
    job       {"id", "nonce", "source", "entry", "tests": [{"args", "kwargs"} or {"stdin"}], "limits": {...}}
    answer    {"id", "frames", "status", "signal", "cpu_ms", "wall_ms", "max_rss_kb", "stdout", "stderr", "cut"}
              or {"id", "fault"}

Related modules: `child.py` runs in the forks, `kernel.py` implements the layers, `watch.py` applies the limits,
`messages.py` defines the messages. `python -m pipeline.sandbox.jail --probe` prints what this machine enforces.
Standard library only, no project imports.

The attacker is the code of a model that is rewarded for passing tests: careless, greedy, tuned to cheat, and one of a
group that the same server runs in turn. Through the service it may be hostile, and one tenant among several. The
profile `sealed` guarantees:

    no way out         no file, no network, no program, no other process touched (signal, trace, limit, memory)
    no secret          nothing from the trainer, another candidate or another tenant in its address space: its initial
                       memory was set up before the first job, and no job, answer or exit status reaches the process
                       it is forked from
    no forged pass     what it sends is a claim that `judge.py` checks; expected values never leave the trainer
    bounds             CPU and wall time, address space, 64 threads, 32 descriptors, output; includes reading arguments
    nothing left over  no process, descriptor or shared memory; all die with the watcher, which ends with the trainer

`sealed` needs Linux with seccomp and is refused otherwise; Landlock is added if the kernel supports it. `unsafe` sets
only resource limits. It is for machines without a sandbox, if the user allows it, and guarantees none of this.

Not guaranteed:

    protection from bugs in the kernel (a candidate makes system calls, though few) or the processor (CPU caches,
        timing, speculation: a candidate can measure time and what else runs on a core)
    secrecy of hidden test inputs, which the candidate receives
    strong tests: a program that is correct on all of them passes
    fair shares between candidates, beyond the limits
    an exact thread count if the servers run as a user other than root (the kernel counts a user's processes
        machine-wide, so the watcher counts, every 10 ms)

This is not a virtual machine: run strangers' code on a separate machine.
"""

import builtins
import contextlib
import errno
import fcntl
import gc
import importlib
import json
import os
import platform
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NoReturn, TypedDict

# The after-fork handlers of threading, random and logging would run Python in every child and touch 170 pages, a sixth
# of a child's cost. A server has one thread, and a child seeds `random` itself.
_register_at_fork, os.register_at_fork = os.register_at_fork, lambda **_: None
sys.path.insert(0, str(Path(__file__).parent))  # which -P omits; neighbors are imported without the project package
import child  # noqa: E402
import kernel  # noqa: E402
from messages import ChildJob, ChildResult, Fault, read_frame, write_frame  # noqa: E402
from watch import Watch  # noqa: E402

sys.path.pop(0)

# What a candidate may import: nothing can be loaded after isolation. Each shared library slows down every fork, so
# modules that cannot work here (asyncio, subprocess, multiprocessing) and OpenSSL are excluded.
MODULES = """
__future__ abc argparse array ast base64 binascii bisect builtins calendar cmath codecs collections collections.abc
colorsys concurrent.futures.thread contextlib contextvars copy copyreg csv ctypes dataclasses datetime decimal difflib
enum errno fileinput fnmatch fractions functools gc glob graphlib hashlib heapq hmac html html.parser inspect io
ipaddress itertools json keyword linecache locale logging math numbers operator os pathlib pickle platform pprint queue
random re reprlib secrets select shlex signal socket stat statistics string stringprep struct sys tempfile textwrap
threading time timeit tokenize traceback types typing unicodedata unittest urllib.parse uuid warnings weakref zlib
_strptime encodings.ascii encodings.base64_codec encodings.cp1252 encodings.hex_codec encodings.idna encodings.latin_1
encodings.punycode encodings.raw_unicode_escape encodings.rot_13 encodings.unicode_escape encodings.utf_16
encodings.utf_16_be encodings.utf_16_le encodings.utf_32 encodings.utf_8 encodings.utf_8_sig
"""
WITHOUT_OPENSSL = "_hashlib"  # hashlib falls back to its own implementations
CONTROL = child.CHANNEL + 1  # the zygote's descriptor for its socket to the watcher; a child closes it
REFUSALS = (errno.EPERM, errno.EACCES, errno.ENOSYS)
PATIENCE = 20  # seconds for a trial that normally takes a millisecond
MEMORY = 1 << 30


class Enforced(TypedDict):
    """What a server enforces; `alone`: its user has no other processes; `memory`: its own address space in bytes."""

    profile: str
    architecture: str
    landlock: int
    uid: int
    alone: bool
    memory: int


def prepare(preload: list[str], paths: list[str], profile: str) -> Enforced:
    """Import what candidates may use, drop root, test the layers.

    Returns what is enforced. Raises Refused, or ImportError for a module in `preload`.
    """
    os.environ.clear()
    os.environ |= {"TZ": "UTC0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    time.tzset()
    sys.path += paths
    sys.modules[WITHOUT_OPENSSL] = None  # pyright: ignore[reportArgumentType]
    for name in [*MODULES.split(), *preload]:
        importlib.import_module(name)
    os.register_at_fork = _register_at_fork
    builtins.exit = builtins.quit = sys.exit  # programs call them; `site`, which -S skips, normally defines them
    sys.path_importer_cache.clear()
    os.environ.clear()
    alone = kernel.drop_identity()
    sys.path.clear()
    kernel.harden()
    if profile == "sealed":
        self_test(alone=alone)
    gc.collect()
    gc.freeze()  # so that the garbage collector's writes do not copy pages in a child
    return {
        "profile": profile,
        "architecture": platform.machine(),
        "landlock": kernel.landlock_version(),
        "uid": os.getuid(),
        "alone": alone,
        "memory": kernel.address_space(),
    }


def serve() -> None:
    """Read jobs from stdin and write answers to stdout, until stdin ends."""
    jobs, answers = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (0, 1))
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = child.prepare_streams()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(child.CHANNEL + 1):  # none of our descriptors stay where a child puts its own
        os.dup2(null, fd)
    sys.argv = ["candidate"]
    settings = read_frame(jobs)
    if settings is None:
        return
    try:
        ready = prepare(settings["preload"], settings["paths"], settings["profile"])
    except ImportError as error:
        write_frame(answers, {"missing": str(error)})
        return
    except (kernel.Refused, OSError) as error:
        write_frame(answers, {"refused": str(error)})
        return
    zygote = Zygote(child.Cell(child.LAYERS[ready["profile"]], ready["memory"], os.getpid(), ready["alone"]))
    write_frame(answers, {"ready": ready})
    while (job := read_frame(jobs)) is not None:
        try:
            answer = run(job, zygote, jobs)
        except Exception as error:  # a bug in our code: the pool logs it and starts another server
            answer = {"id": job["id"], "fault": f"{type(error).__name__}: {error}"}
        write_frame(answers, answer)
    zygote.stop()


class Zygote:
    """The watcher's handle on the zygote, the process that every candidate is forked from. It never sees a job.

    trainer -- jobs, answers -->  watcher  -- one byte, four descriptors -->  zygote
                                     |                                          | clone
                                     +--------- job, "go", answers ---------> child

    Creating it splits a prepared server in two. This process continues as the watcher, the only one that reads jobs and
    keeps answers. The other half becomes the zygote, which only waits for a byte and forks. A candidate's job goes from
    the watcher straight to the fork, over the fork's own channel. So the memory that a candidate inherits contains
    nothing from earlier jobs: no frame, no object, no freed block, no buffer, no descriptor.

    A fork is a child of the watcher, not of the zygote (CLONE_PARENT). The watcher waits for it, so no pid is reused
    while it still refers to a child, and not even an exit status reaches the zygote. Zygote and children die with the
    watcher. Outside Linux, where the only profile is `unsafe`, the server forks itself and none of this applies.
    """

    def __init__(self, cell: child.Cell) -> None:
        """`cell` describes the isolation of every child."""
        self.cell, self.pid = cell, 0
        self.control, inside = socket.socketpair()
        if sys.platform != "linux":
            return
        self.pid = os.fork()
        if self.pid == 0:
            _serve_forks(inside.detach(), cell)
        inside.close()

    def fork(self, ends: tuple[int, int, int, int]) -> int:
        """Start a child with descriptors 0 to 3 from `ends`; it waits for its job. Returns its pid. Raises OSError."""
        if self.pid == 0:
            return os.fork() or child.run(ends, self.cell)
        socket.send_fds(self.control, [b"f"], ends)
        answer = self.control.recv(4)
        if len(answer) < 4:
            raise OSError("the zygote is gone")
        return struct.unpack("<i", answer)[0]

    def stop(self) -> None:
        """Stop the zygote and wait for it."""
        self.control.close()
        if self.pid:
            os.waitpid(self.pid, 0)


def _serve_forks(control: int, cell: child.Cell) -> NoReturn:
    """Fork this process for each message, until the watcher closes its end."""
    try:
        kernel.die_with(cell.parent)
        os.dup2(control, CONTROL)
        os.closerange(CONTROL + 1, 256)
        watcher = socket.socket(fileno=CONTROL)
        while (ends := tuple(socket.recv_fds(watcher, 1, 4)[1])) != ():
            pid = kernel.fork_sibling()
            if pid == 0:
                child.run(ends, cell)
            for fd in ends:
                os.close(fd)
            watcher.send(struct.pack("<i", pid))
    finally:
        os._exit(0)


def run(job: ChildJob, zygote: Zygote, jobs: int) -> ChildResult | Fault:
    """Run a job in one child and watch it. Exits when the trainer closes `jobs`."""
    outside, inside = (end.detach() for end in socket.socketpair())
    (out, out_inside), (err, err_inside), (stdin_inside, stdin) = os.pipe(), os.pipe(), os.pipe()
    pid = zygote.fork((stdin_inside, out_inside, err_inside, inside))
    for fd in (inside, out_inside, err_inside, stdin_inside):
        os.close(fd)
    watch = Watch(job, pid, outside, out, err, stdin)
    try:
        watch.until_done(jobs)
    finally:
        watch.reap()
    return watch.answer()


def probe() -> Mapping[str, object]:
    """What the profile `sealed` enforces on this machine, or `refused` with the reason why it is unavailable.

    Runs in a child, because the process cannot write to files afterward.
    """
    source, sink = os.pipe()
    if os.fork() == 0:
        try:
            answer = prepare([], [], "sealed")
        except (kernel.Refused, OSError) as error:
            answer = {"refused": str(error), "architecture": platform.machine(), "landlock": kernel.landlock_version()}
        write_frame(sink, answer)
        os._exit(0)
    os.close(sink)
    answer = read_frame(source) or {"refused": "the self-test ended without a result"}
    os.close(source)
    os.wait()
    return answer


def self_test(*, alone: bool) -> None:
    """Before the first job, attempt in a child what must not succeed. Raises Refused naming what succeeded.

    One child runs behind only the seccomp filter and one behind only Landlock, so that neither layer hides the absence
    of the other. The other settings (identity, limits, descriptors, session, no_new_privs) are read back. This shows
    that each layer is present, not that the kernel has no holes.
    """
    kernel.filter_code()  # built once, inherited by every child; raises Refused for an unsupported architecture
    if b"CapEff:\t0000000000000000" not in Path("/proc/self/status").read_bytes():
        raise kernel.Refused("the process that runs candidates would keep capabilities; start Stagecoach without them")
    everything = lambda parent: _call_attempts(parent) | _path_attempts() | _link_attempts()  # noqa: E731
    _run_in_child(("seccomp",), lambda parent: _succeeded(everything(parent).items()), alone=alone)

    def paths_and_state(_: int) -> list[str]:
        return _find_faults(alone=alone) + (_succeeded(_path_attempts().items()) if kernel.landlock_version() else [])

    _run_in_child(("landlock",), paths_and_state, alone=alone)
    _try_fork_sibling()


def _try_fork_sibling() -> None:
    """Fork as the zygote does. Raises Refused if the fork does not become our child."""
    pid = os.fork()
    if pid == 0:
        try:
            kernel.fork_sibling()
        finally:
            os._exit(0)
    try:
        pids = {os.waitpid(-1, 0)[0], os.waitpid(-1, 0)[0]}
    except ChildProcessError as error:
        raise kernel.Refused("self-test: a process cannot fork a child for its parent (clone, CLONE_PARENT)") from error
    assert pid in pids


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def _path_attempts() -> dict[str, Callable[[], object]]:
    """File accesses that must be refused in every child."""
    return {
        "read a folder": lambda: os.open("/", os.O_RDONLY),
        "read a file": lambda: os.open("/proc/self/stat", os.O_RDONLY),
        "write": lambda: os.open(os.devnull, os.O_WRONLY),
        "make a file": lambda: os.open("/stagecoach-trial", os.O_WRONLY | os.O_CREAT),
    }


def _link_attempts() -> dict[str, Callable[[], object]]:
    """File operations that Landlock does not cover, or covers only in recent ABIs."""
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
    """Faults in this child's limits, identity and descriptors."""
    faults = kernel.faults(MEMORY, alone=alone)
    for fd in range(child.CHANNEL + 1, 256):
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_GETFD)
            faults.append(f"descriptor {fd}")
    return faults


def _run_in_child(layers: tuple[str, ...], trial: Callable[[int], list[str]], *, alone: bool) -> None:
    """Run a trial in a child behind the layers. Raises Refused if it reports faults or nothing."""
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
    failed += [] if kernel.num_threads(pid) == 1 else ["its thread count cannot be read"]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if failed:
        raise kernel.Refused(f"self-test behind {' and '.join(layers)} failed: {', '.join(failed)}")


def main() -> None:
    """Run the server, or with `--probe` print one line of JSON."""
    if sys.argv[1:] == ["--probe"]:
        sys.stdout.write(json.dumps(probe()) + "\n")
    else:
        serve()
        os._exit(0)  # skips the interpreter's shutdown: there is nothing to clean up, and many servers may end at once


if __name__ == "__main__":
    main()
