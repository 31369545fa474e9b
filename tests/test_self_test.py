"""The sandbox tests itself before it runs anything: take a layer away and it refuses; what it lacks it names."""

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from tests.test_jail import ROOT, SANDBOX

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


def without(word: str, count: int) -> str:
    """Takes an argument and what follows it out of bubblewrap's command line."""
    return f"shell.arguments = lambda size, f=shell.arguments: (w := f(size)) and w[:w.index({word})] + w[w.index({word}) + {count}:]"


# layer -> what takes it away, and the profiles that need it
REMOVED = {
    "seccomp": ("kernel.install_seccomp = lambda profile: None", "sealed files"),
    "landlock": ("kernel.install_landlock = lambda *paths: None", "sealed files"),
    "the scratch directory's rights": ("kernel.WRITE_RIGHTS = 0", "files"),
    "the rights on links": (
        "import filters; filters.ON_FILES |= {'symlink': (88, None), 'symlinkat': (266, 36), 'chmod': (90, None),"
        " 'fchmodat': (268, 53)}",
        "files",
    ),
    "limits": (
        "kernel.fixed_limits = lambda profile, f=kernel.fixed_limits:"
        " {} if sys._getframe(1).f_code.co_name == 'harden' else f(profile)",
        "sealed files",
    ),
    "memory": (
        "kernel.limit = lambda which, value, f=kernel.limit: which == kernel.resource.RLIMIT_AS or f(which, value)",
        "sealed files",
    ),
    "session": ("os.setsid = lambda: None", "sealed files"),
    "prctl": (
        "kernel.prctl = lambda option, value=0, f=kernel.prctl: f(option, value) if option in (3, 38, 39) else 0",
        "sealed files",
    ),
    "no_new_privs": (
        "kernel.prctl = lambda option, value=0, f=kernel.prctl: f(option, value) if option != 38 else 0",
        "sealed files",
    ),
    "identity": ("kernel.drop_identity = os.getuid", "sealed files shell"),
    "the deny-list": (without("'--seccomp'", 2), "shell"),
    "the network namespace": (without("'--unshare-net'", 1), "shell"),
    "the pid namespace": (without("'--unshare-pid'", 1), "shell"),
    "the ipc namespace": (without("'--unshare-ipc'", 1), "shell"),
    "the read-only root": (without("'--remount-ro'", 2), "shell"),
    "the read-only /usr": (
        "shell.arguments = lambda size, f=shell.arguments: [w.replace('--ro-bind', '--bind') if w == '--ro-bind' else w"
        " for w in f(size)]",
        "shell",
    ),
    "the bound on /tmp": (without("'--size'", 2), "shell"),
    "the bound on processes": ("shell.START = 'exec /usr/bin/bash /script'", "shell"),
    "the sight of its processes": ("shell.tree = lambda pid: []", "shell"),
}  # fmt: skip


QUICK = ("seccomp", "landlock", "identity")  # the others are slow tests


@pytest.mark.parametrize(
    ("layer", "profile"),
    [pytest.param(layer, profile, marks=() if layer in QUICK and profile == "sealed" else pytest.mark.slow)
     for layer, (_, profiles) in REMOVED.items() for profile in profiles.split()],
)  # fmt: skip
def test_the_self_test_refuses_when_a_layer_is_removed(layer: str, profile: str):
    if layer == "identity" and os.getuid() != 0:
        pytest.skip("only root has an identity to drop")
    if (why := probe()["refused"].get(profile)) is not None:
        pytest.skip(f"profile {profile}: {why}")
    code = f"""
import os, sys
sys.path.insert(0, {str(SANDBOX)!r})
import jail, kernel, shell
if {layer!r} == "landlock" and not kernel.landlock_version(): sys.exit(3)
{REMOVED[layer][0]}
try:
    jail.prepare([], [], {profile!r})
except (kernel.Refused, OSError) as error:
    print(error)
    os._exit(7)
os._exit(0)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode in (7, 3)


@cache
def probe(*launcher: str) -> dict[str, Any]:
    """What `--probe` says, started by a launcher that takes something away from it."""
    command = [*launcher, sys.executable, "-B", "-m", "pipeline.sandbox.jail", "--probe"]
    return json.loads(subprocess.check_output(command, cwd=ROOT))


def test_the_probe_names_what_is_enforced():
    report = probe()
    assert report["profiles"][0] == "sealed" and report["uid"] != 0
    assert sorted([*report["profiles"], *report["refused"]]) == ["files", "sealed", "shell"]
    assert {"architecture", "landlock", "bwrap"} <= set(report)
    assert ("shell" in report["profiles"]) <= (report["bwrap"] is not None)


NO_LANDLOCK = """
import ctypes, os, struct, sys
steps = [(0x20, 0, 0, 0), (0x35, 0, 2, 444), (0x25, 1, 0, 446), (0x06, 0, 0, 0x50026), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
program = struct.pack("@HP", len(steps), ctypes.addressof(code))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""
# The last limit binds in a user namespace of its own, so that nobody else's are counted or forbidden.
NO_NAMESPACES = """
import ctypes, os, sys
uid, gid = os.getuid(), os.getgid()
asks, answers = os.pipe(), os.pipe()
parent = os.getpid()
helper = os.fork()
if helper == 0:
    os.read(asks[0], 1)
    ids = [(0, 0), (61000, 61000), (65534, 65534)] if uid == 0 else [(uid, uid)]
    for name in ("uid_map", "gid_map"):
        if name == "gid_map" and uid: open(f"/proc/{parent}/setgroups", "w").write("deny")
        open(f"/proc/{parent}/{name}", "w").write("".join(f"{a} {b} 1\\n" for a, b in ids))
    os.write(answers[1], b"g")
    os._exit(0)
assert ctypes.CDLL(None).unshare(0x10000000) == 0
os.write(asks[1], b"g")
os.read(answers[0], 1)
os.waitpid(helper, 0)
with open("/proc/sys/user/max_user_namespaces", "w") as file: file.write("0")
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_without_landlock_there_is_sealed_only():
    report = probe(sys.executable, "-c", NO_LANDLOCK)
    assert report["landlock"] == 0 and "sealed" in report["profiles"] and "files" not in report["profiles"]
    assert "Landlock of ABI 3" in report["refused"]["files"]


def test_without_user_namespaces_shell_is_refused_with_its_reason():
    if "shell" not in probe()["profiles"]:
        pytest.skip(f"profile shell: {probe()['refused']['shell']}")
    report = probe(sys.executable, "-c", NO_NAMESPACES)
    assert report["profiles"] == ["sealed", "files"]
    assert "namespace" in report["refused"]["shell"]
