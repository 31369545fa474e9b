"""Profile `shell`: a bash script behind bubblewrap, for tasks that must start programs.

The child becomes `bwrap`: namespaces of its own (user, pid, network, mount, ipc, uts), `/usr` read-only, 16 MiB of
tmpfs at /tmp, no environment but PATH, HOME and LANG, no capabilities, the deny-list of `filters.py`, 32 processes. No
Landlock: bubblewrap must mount. The answer is the exit status, which bubblewrap tells on fd 3 once the script really
started, and what stood on stdout. CPU and memory are summed over the tree of processes. Standard library only.

Not promised: that nothing private stands in /usr, which can be read whole; an exact CPU limit (the kernel counts the
tree in 10 ms, and processes whose parent ignores their end are only held by the wall clock). Needs user namespaces and
Linux 5.14, where the number of processes is counted inside of them.
"""

import contextlib
import json
import os
import platform
import resource
import shutil
import signal
import socket
from pathlib import Path
from typing import Any, NoReturn

import child
import filters
import kernel
from watch import Watch

PROCESSES = 32
WRAPPERS = 2  # bubblewrap, outside and as the first process inside
TICK = 0.02  # seconds between two looks at the tree
OLDEST = (5, 14)
PATH = "/usr/local/bin:/usr/bin:/bin"
FILTER, SCRIPT = 4, 5  # descriptors that bubblewrap reads
START = f"ulimit -u {PROCESSES} && exec /usr/bin/bash /script"
NAMESPACES = ("user", "pid", "net", "mnt", "ipc", "uts")
DEVICES = ("null", "zero", "full", "random", "urandom")
LINKS = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}
HERTZ = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def bwrap() -> str:
    """Where bubblewrap is. Raises Refused."""
    path = shutil.which("bwrap", path=PATH)
    if path is None:
        raise kernel.Refused("bubblewrap (bwrap) is not installed")
    return path


def arguments(tmpfs_bytes: int) -> list[str]:
    """The command line. Everything that could be written but /tmp is remounted read-only."""
    words = [bwrap(), "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    words += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    words += ["--uid", "65534", "--gid", "65534", "--hostname", "sandbox", "--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        place = Path("/", name)
        if place.is_symlink():
            words += ["--symlink", str(place.readlink()), str(place)]
        elif place.is_dir():
            words += ["--ro-bind", str(place), str(place)]
    words += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives", "--proc", "/proc"]
    for name in DEVICES:
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, end in LINKS.items():
        words += ["--symlink", f"/proc/self/fd{end}", f"/dev/{name}"]
    words += [
        "--ro-bind-data",
        str(SCRIPT),
        "/script",
        "--size",
        str(tmpfs_bytes),
        "--tmpfs",
        "/tmp",
        "--remount-ro",
        "/",
    ]
    words += ["--chdir", "/tmp", "--setenv", "PATH", PATH, "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8"]
    words += ["--json-status-fd", str(child.CHANNEL), "--seccomp", str(FILTER)]
    return [*words, "--", "/usr/bin/bash", "--norc", "-c", START]


def run(job: dict[str, Any], memory: int, jobs: int) -> dict[str, Any]:
    """Run one script with one stdin, watch it, and say what it did."""
    outside, inside = (end.detach() for end in socket.socketpair())
    (out, out_inside), (err, err_inside), (stdin_inside, stdin) = os.pipe(), os.pipe(), os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(job, (stdin_inside, out_inside, err_inside, inside), memory, parent)
    for fd in (inside, out_inside, err_inside, stdin_inside):
        os.close(fd)
    watch = ShellWatch(job, pid, outside, out, err, stdin)
    try:
        watch.until_done(jobs)
    finally:
        watch.reap()
    return watch.answer()


def _become(job: dict[str, Any], ends: tuple[int, int, int, int], memory: int, parent: int) -> NoReturn:
    """After the fork: hand the descriptors over and become bubblewrap."""
    try:
        texts = (filters.filter_bytes("shell"), job["source"].encode("utf-8", "surrogateescape"))
        sources = [os.memfd_create("shell", os.MFD_CLOEXEC) for _ in texts]
        for fd, text in zip(sources, texts, strict=True):
            child.write_all(fd, text)
            os.lseek(fd, 0, os.SEEK_SET)
        given = [os.dup2(fd, 32 - len(sources) - len(ends) + at) for at, fd in enumerate((*ends, *sources))]
        for place, fd in enumerate(given):
            os.dup2(fd, place)
        os.closerange(SCRIPT + 1, 256)
        kernel.isolate(memory + job["limits"]["memory"], job["limits"]["job_cpu"], parent)
        os.execve(bwrap(), arguments(int(job["limits"]["scratch"])), {})
    except BaseException as error:
        with contextlib.suppress(BaseException):
            os.write(2, f"{type(error).__name__}: {error}".encode())
    os._exit(child.LOST)


class ShellWatch(Watch):
    """A tree of processes seen from the server. Its frames are the server's own: nobody in there has a channel."""

    start_seconds = 0.0  # bubblewrap has no word for "closed off": its start counts
    code: int | None = None  # exit status of the script, as bubblewrap tells it
    held: int | None = (
        None  # a descriptor on its /tmp, whose file system so lives until it was counted for the last time
    )
    cpu = 0.0
    rss = 0

    def _go(self) -> None:
        """Nothing waits for a word."""

    def _patience(self) -> float:
        return 0.001 if self.closed or self.held is None else TICK

    def _cpu(self) -> float:
        processes = tree(self.pid)
        self.cpu = max(self.cpu, sum(process[0] for process in processes))
        self.rss = resident(processes)
        return self.cpu

    def _answers(self) -> None:
        """The lines of `--json-status-fd`."""
        try:
            data = os.read(self.channel, 65536)
        except (BlockingIOError, ConnectionResetError):
            data = b""
        if not data:
            self.closed = True
            self.poller.unregister(self.channel)
            return
        self.buffer += data
        while (end := self.buffer.find(b"\n")) >= 0:
            said = json.loads(self.buffer[:end])
            del self.buffer[: end + 1]
            self.code = said.get("exit-code", self.code)

    def _look(self) -> None:
        super()._look()
        if self.cut is None and self.exit is None:
            if self.rss > self.limits["memory"]:
                self.cut = "memory"
            elif self._stored_too_much():
                self.cut = "files"

    def _stored_too_much(self) -> bool:
        """Whether its /tmp holds more files than it may, counted by its file system; also when the tree is gone.

        A script that ends before it was seen in its /tmp even once, within a millisecond or so, is not counted.
        """
        if self.held is None:
            self.held = _tmp(self.pid, self.limits["scratch"])
        if self.held is None:
            return False
        found = os.statvfs(self.held)
        return found.f_files - found.f_ffree > self.limits["files"]

    def reap(self) -> None:
        """As for the other profiles."""
        super().reap()
        if self.held is not None:
            os.close(self.held)

    def _bury(self) -> None:
        """The whole tree: what loses its parent comes to this process, which is a subreaper."""
        super()._bury()
        while True:
            for pid in _children(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return

    def answer(self) -> dict[str, Any]:
        """As for the other profiles; a script that never started is our fault."""
        self.ready = self.code is not None or self.cut is not None
        if self.code == 0 and self.cut is None:
            self.frames, self.ended = [f'{{"n":"{self.job["nonce"]}","i":0,"v":null}}'], True
        answer = super().answer()
        if "fault" in answer:
            return answer | {
                "fault": f"bubblewrap: {bytes(self.output[self.err]).decode('utf-8', 'replace')[:300].strip()}"
            }
        answer["cpu_ms"] = max(answer["cpu_ms"], round(1000 * self.cpu))
        return answer | {"status": self.code if self.cut is None and not self.ended else None, "signal": None}


def _children(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):  # it ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(word) for word in Path(task, "children").read_bytes().split()]
    return found


def tree(pid: int) -> list[tuple[float, int]]:
    """(CPU seconds with those of the dead it waited for, resident bytes) of a process and all below it."""
    found, waiting = [], [pid]
    while waiting:
        process = waiting.pop()
        try:
            words = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:  # it died meanwhile; its parent has its time
            continue
        found.append((sum(map(int, words[11:15])) / HERTZ, int(words[21]) * resource.getpagesize()))
        waiting += _children(process)
    return found


def resident(processes: list[tuple[float, int]]) -> int:
    """Bytes that a tree holds at one time, at most: no more of its processes live together than it may have.

    `tree` takes a while to walk; in a storm of forks it meets processes that never lived side by side.
    """
    return sum(sorted((process[1] for process in processes), reverse=True)[: PROCESSES + WRAPPERS])


def _tmp(pid: int, size: float) -> int | None:
    """A descriptor on /tmp of the tree, which is known by its file system's size; None as long as there is none.

    While bubblewrap builds, the same path is on other file systems.
    """
    for process in _children(pid)[:1]:
        with contextlib.suppress(OSError):
            place = os.open(f"/proc/{process}/root/tmp", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            found = os.statvfs(place)
            if 0 < found.f_blocks * found.f_frsize < size + found.f_frsize:
                return place
            os.close(place)
    return None


# Prints a line for whatever it could do; the namespaces are compared outside.
TRIAL = """
for place in /usr/trial /trial /dev/trial /script /etc/trial; do (echo > "$place") 2> /dev/null && echo "wrote $place"; done
for place in /etc/passwd /home /root /var; do [ -e "$place" ] && echo "saw $place"; done
case "$( (exec 9<> /dev/tcp/127.0.0.1/1) 2>&1)" in *refused* | *nreachable* | "") echo "made a socket";; esac
[ "$(ulimit -u)" = 32 ] || echo "has $(ulimit -u) processes"
while read -r key value; do
  case "$key" in
    CapPrm: | CapEff: | CapBnd:) [ "$value" = 0000000000000000 ] || echo "has capabilities";;
    NoNewPrivs:) [ "$value" = 1 ] || echo "may gain privileges";;
    Seccomp:) [ "$value" = 2 ] || echo "has no filter";;
  esac
done < /proc/self/status
while read -r _ place _ options _; do
  case "$place ,$options," in "/tmp "* | "/proc"* | "/dev/"*) ;; *,rw,*) echo "has $place writable";; esac
done < /proc/self/mounts
[ "$(df -B1 --output=size /tmp | tail -n 1)" -le 16777216 ] || echo "has a larger /tmp"
[ "$(env | grep -v -E '^(PATH|HOME|LANG|PWD|OLDPWD|SHLVL|_)=' | wc -l)" = 0 ] || echo "has an environment"
for name in user pid net mnt ipc uts; do echo "namespace $(readlink /proc/self/ns/$name)"; done
echo "trial ended"
"""


def self_test() -> None:
    """A script tries what it must not be able to do. Raises Refused naming what was not held."""
    release = platform.release().split("-")[0].split(".")
    if tuple(int("".join(filter(str.isdigit, word)) or 0) for word in release[:2]) < OLDEST:
        raise kernel.Refused(
            f"Linux {platform.release()} counts processes per user; {'.'.join(map(str, OLDEST))} is needed"
        )
    bwrap()
    kernel.adopt_orphans()
    sizes = {"stdout": 65536, "stderr": 8192, "results": 65536, "scratch": 16 << 20, "files": 256, "memory": 256 << 20}
    times = {"cpu": 10.0, "wall": 20.0, "job_cpu": 10.0, "job_wall": 20.0}
    job = {"id": "trial", "nonce": "0" * 32, "source": TRIAL, "tests": [{"stdin": ""}], "limits": sizes | times}
    never = os.open(os.devnull, os.O_RDWR)
    answer = run(job, kernel.address_space(), never)
    endless = job | {"source": "while :; do :; done & sleep 60", "limits": sizes | times | {"cpu": 0.1}}
    stopped = run(endless, kernel.address_space(), never)
    os.close(never)
    for fault in [made["fault"] for made in (answer, stopped) if "fault" in made]:
        raise kernel.Refused(fault)
    lines = answer["stdout"].splitlines()
    own = {f"namespace {Path(f'/proc/self/ns/{name}').readlink()}" for name in NAMESPACES}
    found = [line for line in lines[:-1] if not line.startswith("namespace ") or line in own]
    count = sum(line.startswith("namespace ") for line in lines)
    if found or count != len(NAMESPACES) or lines[-1:] != ["trial ended"]:
        raise kernel.Refused(f"self-test of shell: not held: {', '.join(found) or answer['stderr'][:300] or lines}")
    if stopped.get("cut") != "cpu":
        raise kernel.Refused(
            f"self-test of shell: not held: CPU of its processes ({stopped['cut']}, {stopped['stderr']})"
        )
