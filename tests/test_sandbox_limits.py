"""Every limit of the block `sandbox` decides about a candidate: what passes under one value is cut under another."""

from collections.abc import Sequence
from typing import Any

import pytest

from pipeline.errors import DataError
from pipeline.sandbox.judge import Judge, Limits, Program, SandboxConfig, Verdict

ONE = [{"args": "[]", "expected": "1"}]
BURN = "def f():\n import time\n start = time.process_time()\n while time.process_time() < start + 0.1: pass\n return 1"
SPIN = "def f(x):\n while x: pass\n return 1"
STORE = "def f():\n for n in range(5): open(str(n), 'w').close()\n return 1"


def judged(
    limits: dict[str, Any], source: str, tests: Sequence[dict[str, Any]] = ONE, profile: str = "sealed"
) -> Verdict:
    """What becomes of a program under these limits."""
    with Judge(SandboxConfig(limits=Limits(**limits)), 1) as judge:
        if reason := judge.missing(profile):
            pytest.skip(str(reason))
        (verdict,) = judge.judge([Program(source=source, entry_point="f", tests=list(tests), profile=profile)])
    return verdict


@pytest.mark.parametrize(
    ("limits", "source", "profile", "verdict", "reason"),
    [
        ({"source_kib": 1}, "def f(): return 1\n#" + "x" * 2000, "sealed", "error", "output"),
        ({"stdout_kib": 1}, "def f():\n print('x' * 2000, flush=True)\n return 1", "sealed", "error", "output"),
        ({"stderr_kib": 1}, "import sys\ndef f():\n print('x' * 2000, file=sys.stderr, flush=True)\n return 1", "sealed", "error", "output"),
        ({"results_kib": 1}, "def f(): return 1 if len(repr(f)) < 2 else 'x' * 2000", "sealed", "error", "output"),
        ({"memory_mib": 32}, "def f(): return len(bytearray(64 << 20)) >> 26", "sealed", "memory", ""),
        ({"scratch_files": 3}, STORE, "files", "error", "output"),
    ],
)  # fmt: skip
def test_a_candidate_that_needs_more_than_a_limit_is_cut(
    limits: dict[str, Any], source: str, profile: str, verdict: str, reason: str
) -> None:
    cut, usual = judged(limits, source, profile=profile), judged({}, source, profile=profile)
    assert (cut.verdict, cut.reason) == (verdict, reason)
    assert usual.verdict == ("wrong" if "results_kib" in limits else "passed")


def test_the_cpu_seconds_of_all_tests_together_are_limited() -> None:
    limits = {"cpu_seconds": 1.0}  # each test takes a tenth
    assert judged(limits, BURN, ONE * 4).passed == 4
    found = judged(limits | {"job_cpu_seconds": 0.25}, BURN, ONE * 4)
    assert (found.verdict, found.passed) == ("timeout", 2)


@pytest.mark.parametrize(("timeouts", "passed"), [(1, 0), (2, 0), (3, 1)])
def test_after_so_many_timeouts_the_other_tests_are_not_reached(timeouts: int, passed: int) -> None:
    tests = [{"args": f"[{n}]", "expected": "1"} for n in (1, 1, 0)]
    found = judged({"cpu_seconds": 0.05, "timeouts": timeouts}, SPIN, tests)
    assert (found.verdict, found.passed) == ("timeout", passed)


def test_a_problem_with_more_tests_than_max_tests_is_an_error() -> None:
    with pytest.raises(DataError, match="f: expected at most 2 tests"):
        judged({"max_tests": 2}, "def f(): return 1", ONE * 3)
    assert judged({"max_tests": 3}, "def f(): return 1", ONE * 3).passed == 3
