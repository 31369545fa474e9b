"""The server that runs untrusted code: a watcher, a zygote that never sees a job, and one child for each job.

`servers.py` executes `python -P -s -S -B jail.py` with an empty environment: this process never held the trainer's
memory, keys or data. It reads settings, imports what candidates may use, gives up root, tests its layers and splits in
two (`zygote.py`). The watcher then reads jobs as frames (4 bytes of little-endian length, JSON) on stdin and answers
each on stdout. A job is one child: copied from the zygote, closed off by `kernel.py`, handed its job, told "go" before
each test, killed, reaped. The child speaks on fd 3: the byte R when it is closed off, A when it has read its job, then
per test `{"n": nonce, "i": index, "v": value}` or `{"n", "i", "e": [type, message]}`, or once `{"n", "load", "e"}` if
the source does not load, then `{"n", "end"}`.

    settings  {"profile", "preload": [module], "paths": [folder]}  ->  {"ready": {...}}, {"refused"} or {"missing"}
    job       {"id", "nonce", "source", "entry", "tests": [{"args", "kwargs"} or {"stdin"}], "limits": {...}}
    answer    {"id", "frames", "status", "signal", "cpu_ms", "wall_ms", "max_rss_kb", "stdout", "stderr", "cut"}
              or {"id", "fault"}

Neighbours: `zygote.py` what is copied, `child.py` what runs after the copy, `kernel.py` and `filters.py` the layers,
`watch.py` the limits, `trial.py` the self-test, `frames.py` the messages. `python -m pipeline.sandbox.jail --probe`
prints what this machine enforces. Standard library only, nothing of the project.

The opponent is code of a model that is rewarded for passing: careless, greedy, tuned to cheat, and one of a group that
is judged in turn by the same server; through the service, hostile, and one tenant among several. Promised, in profile
`sealed`:

    no way out         no file, no network, no program, no other process touched (signal, trace, limit, memory)
    no secret          nothing of the trainer, of another candidate or of another tenant in its address space: the
                       memory that it begins with was made before the first job, and no job, answer or exit status
                       reaches the process that it is a copy of
    no forged pass     what it sends is a claim that `judge.py` compares; expected values never leave the trainer
    bounds             CPU and wall time, address space, 64 threads, 32 descriptors, output; reading arguments counts
    nothing left over  no process, descriptor, shared memory; all die with the watcher, which ends with the trainer

`sealed` needs Linux with seccomp, else it is refused; Landlock is put behind it where the kernel has it. `unsafe` is
resource limits only, where there is no sandbox and a person allowed it, and promises none of this.

Not promised: protection from bugs of the kernel (a candidate makes system calls, if few) or of the processor (CPU
caches, timing, speculation: a candidate can measure time, and what else runs on a core); the inputs of hidden tests,
which it is given; strong tests: a program that is right on all of them passes; fair shares between candidates, beyond
the limits; an exact number of threads where the servers run as another user than root (the kernel counts a user's
processes over the whole machine, so the watcher counts, every 10 ms). This is no virtual machine: code of strangers
belongs on a machine of its own.
"""

import builtins
import fcntl
import gc
import importlib
import json
import os
import platform
import socket
import sys
import time
from pathlib import Path
from typing import Any

# The handlers of threading, random and logging would run Python in every child, 170 pages of it: a sixth of what a
# child costs. A server has one thread, and a child seeds anew.
_register_at_fork, os.register_at_fork = os.register_at_fork, lambda **_: None
sys.path.insert(0, str(Path(__file__).parent))  # -P left it out; the neighbours are taken without the project package
import child  # noqa: E402
import kernel  # noqa: E402
import trial  # noqa: E402
from frames import read_frame, write_frame  # noqa: E402
from watch import Watch  # noqa: E402
from zygote import Zygote  # noqa: E402

sys.path.pop(0)

# What a candidate may import: nothing can be loaded once the doors are closed. Each shared library makes every fork
# dearer, so those that cannot work in here (asyncio, subprocess, multiprocessing) and OpenSSL stay out.
MODULES = """
abc argparse array ast base64 binascii bisect builtins calendar cmath codecs collections collections.abc colorsys
concurrent.futures.thread contextlib contextvars copy copyreg csv ctypes dataclasses datetime decimal difflib enum errno
fileinput fnmatch fractions functools gc glob graphlib hashlib heapq hmac html html.parser inspect io ipaddress
itertools
json keyword linecache locale logging math numbers operator os pathlib pickle platform pprint queue random re reprlib
secrets select shlex signal socket stat statistics string stringprep struct sys tempfile textwrap threading
time timeit tokenize traceback types typing unicodedata unittest urllib.parse uuid warnings weakref zlib _strptime
encodings.ascii encodings.base64_codec encodings.cp1252 encodings.hex_codec encodings.idna encodings.latin_1
encodings.punycode encodings.raw_unicode_escape encodings.rot_13 encodings.unicode_escape encodings.utf_16
encodings.utf_16_be encodings.utf_16_le encodings.utf_32 encodings.utf_8 encodings.utf_8_sig
"""
WITHOUT_OPENSSL = "_hashlib"  # hashlib falls back to its own implementations


def prepare(preload: list[str], paths: list[str], profile: str) -> dict[str, Any]:
    """Import what candidates may use, give up root, prove the layers.

    Returns what is enforced. Raises Refused, or ImportError for a module of `preload`.
    """
    os.environ.clear()
    os.environ |= {"TZ": "UTC0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    time.tzset()
    sys.path += paths
    sys.modules[WITHOUT_OPENSSL] = None  # pyright: ignore[reportArgumentType]
    for name in [*MODULES.split(), *preload]:
        importlib.import_module(name)
    os.register_at_fork = _register_at_fork
    builtins.exit = builtins.quit = sys.exit  # programs call them; `site`, which -S leaves out, would define them
    sys.path_importer_cache.clear()
    os.environ.clear()
    alone = kernel.drop_identity()
    sys.path.clear()
    kernel.harden()
    if profile == "sealed":
        trial.self_test(alone=alone)
    gc.collect()
    gc.freeze()  # children then copy no page only because the collector wrote to it
    return {
        "profile": profile,
        "architecture": platform.machine(),
        "landlock": kernel.landlock_version(),
        "uid": os.getuid(),
        "alone": alone,
        "memory": kernel.address_space(),
    }


def serve() -> None:
    """Jobs from stdin, answers to stdout, until stdin ends."""
    jobs, answers = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (0, 1))
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = child.prepare_streams()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(child.CHANNEL + 1):  # nothing of ours stays at the places that a child uses
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
        except Exception as error:  # a defect of ours: the pool logs it and starts another server
            answer = {"id": job["id"], "fault": f"{type(error).__name__}: {error}"}
        write_frame(answers, answer)
    zygote.stop()


def run(job: dict[str, Any], zygote: Zygote, jobs: int) -> dict[str, Any]:
    """One child for a job: watch it, and say what it did. The end of `jobs` ends everything."""
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


def probe() -> dict[str, Any]:
    """What profile `sealed` enforces on this machine, or `refused`: why it cannot be had.

    A child finds out: it cannot write to a file afterwards.
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
    answer = read_frame(source) or {"refused": "the self-test ended without a word"}
    os.close(source)
    os.wait()
    return answer


def main() -> None:
    """The server, or with `--probe` one line of JSON."""
    if sys.argv[1:] == ["--probe"]:
        sys.stdout.write(json.dumps(probe()) + "\n")
    else:
        serve()
        os._exit(0)  # nothing to tidy up, and many servers may be ending


if __name__ == "__main__":
    main()
