"""The sandbox tests itself before it runs anything: it refuses if a layer is removed, and names what it lacks."""

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from tests.sandbox import ROOT, SANDBOX

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


REMOVED = {  # layer -> what takes it away
    "seccomp": "kernel.install_seccomp = lambda: None",
    "landlock": "kernel.install_landlock = lambda: None",
    "limits": (
        "kernel.fixed_limits = lambda f=kernel.fixed_limits: {} if sys._getframe(1).f_code.co_name == 'harden' else f()"
    ),
    "memory": (
        "kernel.limit = lambda which, value, f=kernel.limit: which == kernel.resource.RLIMIT_AS or f(which, value)"
    ),
    "session": "os.setsid = lambda: None",
    "prctl": "kernel.prctl = lambda option, value=0, f=kernel.prctl: f(option, value) if option in (3, 38, 39) else 0",
    "no_new_privs": "kernel.prctl = lambda option, value=0, f=kernel.prctl: f(option, value) if option != 38 else 0",
    "identity": "kernel.drop_identity = lambda: False",
    "threads": (
        "kernel.limit = lambda which, value, f=kernel.limit: which == kernel.resource.RLIMIT_NPROC or f(which, value)"
    ),
    "the count of threads": "kernel.num_threads = lambda pid: 0",
    "siblings": "kernel.fork_sibling = os.fork",
}
QUICK = ("seccomp", "landlock", "identity")  # the others are slow tests


@pytest.mark.parametrize(
    "layer", [pytest.param(layer, marks=() if layer in QUICK else pytest.mark.slow) for layer in REMOVED]
)
def test_the_self_test_refuses_when_a_layer_is_removed(layer: str):
    if layer in ("identity", "threads") and os.getuid() != 0:
        pytest.skip("only root has an identity to drop, and becomes somebody whose threads the kernel counts")
    code = f"""
import os, sys
sys.path.insert(0, {str(SANDBOX)!r})
import jail, kernel
if {layer!r} == "landlock" and not kernel.landlock_version(): sys.exit(3)
{REMOVED[layer]}
try:
    jail.prepare([], [], "sealed")
except (kernel.Refused, OSError) as error:
    print(error)
    os._exit(7)
os._exit(0)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode in (7, 3)


@cache
def probe(*launcher: str) -> dict[str, Any]:
    """What `--probe` says when it is started by a launcher that takes something away from it."""
    command = [*launcher, sys.executable, "-B", "-m", "pipeline.sandbox.jail", "--probe"]
    return json.loads(subprocess.check_output(command, cwd=ROOT))


def test_the_probe_names_what_is_enforced():
    report = probe()
    assert report["profile"] == "sealed" and report["uid"] != 0 and "refused" not in report
    assert {"architecture", "landlock"} <= set(report)


NO_LANDLOCK = """
import ctypes, os, struct, sys
steps = [(0x20, 0, 0, 0), (0x35, 0, 2, 444), (0x25, 1, 0, 446), (0x06, 0, 0, 0x50026), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
program = struct.pack("@HP", len(steps), ctypes.addressof(code))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_without_landlock_there_is_still_sealed():
    report = probe(sys.executable, "-c", NO_LANDLOCK)
    assert report["landlock"] == 0 and report["profile"] == "sealed"
