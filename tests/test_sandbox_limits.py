"""Keys of the block `sandbox`: each limits what its name says; a little less stops a candidate, a little more does
not.
"""

from dataclasses import dataclass
from typing import Any

import pytest

from pipeline.run.errors import DataError
from pipeline.sandbox.judge import Candidate, Judge, SandboxConfig, Verdict
from pipeline.sandbox.pool import Limits

ONCE: list[dict[str, Any]] = [{"args": "[0]", "expected": "0"}]
SPIN = "import time\ndef f(x):\n end = time.process_time() + x\n while time.process_time() < end: pass\n return 0"


@dataclass(frozen=True)
class Case:
    """A candidate that needs more than `tight` of a limit and less than `wide`."""

    tight: float
    wide: float
    source: str
    verdict: tuple[str, str]  # and its reason, under the tight limit
    tests: tuple[str, ...] = ("0",)  # arguments; every right answer is 0
    others: tuple[tuple[str, float], ...] = ()  # other limits


OUTPUT, TIME = ("error", "output"), ("timeout", "")
CASES = {
    "source_kib": Case(1, 4, "def f(x): return x" + "#" * 2000, OUTPUT),
    "stdout_kib": Case(1, 4, "def f(x):\n print('a' * 2000, flush=True)\n return x", OUTPUT),
    "stderr_kib": Case(
        1, 4, "import sys\ndef f(x):\n print('a' * 2000, file=sys.stderr, flush=True)\n return x", OUTPUT
    ),
    "results_kib": Case(1, 16, "def f(x): return 'a' * 2000", OUTPUT),
    "memory_mib": Case(64, 256, "def f(x): return len(bytearray(100 << 20)) * x", ("memory", "")),
    "cpu_seconds": Case(0.1, 2.0, SPIN, TIME, ("0.3",)),
    "job_cpu_seconds": Case(0.3, 5.0, SPIN, TIME, ("0.2",) * 3, others=(("cpu_seconds", 1.0),)),
    "wall_extra_seconds": Case(
        0.1, 10.0, "import time\ndef f(x):\n time.sleep(0.6)\n return x", TIME, others=(("cpu_seconds", 0.05),)
    ),
}


def judged(program: Candidate, **limits: Any) -> Verdict:
    with Judge(SandboxConfig(limits=Limits(**limits)), 1) as judge:
        return next(judge.judge([program]))


@pytest.mark.parametrize("key", CASES)
def test_a_candidate_that_needs_more_than_its_limit_is_stopped_and_one_that_needs_less_is_not(key: str) -> None:
    case = CASES[key]
    expected = "'" + "a" * 2000 + "'" if key == "results_kib" else "0"
    tests = [{"args": f"[{argument}]", "expected": expected} for argument in case.tests]
    program = Candidate(source=case.source, entry_point="f", tests=tests)
    tight, wide = (judged(program, **{key: limit, **dict(case.others)}) for limit in (case.tight, case.wide))
    assert (tight.verdict, tight.reason) == case.verdict
    assert (wide.verdict, wide.passed) == ("passed", len(tests)), wide.results


@pytest.mark.parametrize(("most", "last"), [(1, "timeout"), (2, "timeout"), (3, "passed")])
def test_after_so_many_timeouts_the_rest_is_not_tried(most: int, last: str) -> None:
    source = "def f(x):\n while x: pass\n return 0"
    tests = [{"args": f"[{argument}]", "expected": "0"} for argument in (1, 1, 0)]
    found = judged(Candidate(source=source, entry_point="f", tests=tests), cpu_seconds=0.1, timeouts=most)
    assert [result.verdict for result in found.results] == ["timeout", "timeout", last]


def test_a_problem_has_no_more_tests_than_are_allowed() -> None:
    program = Candidate(source="def f(x): return 0", entry_point="f", tests=ONCE * 3)
    assert judged(program, max_tests=3).verdict == "passed"
    with pytest.raises(DataError, match="expected at most 2 tests"):
        judged(program, max_tests=2)


@pytest.mark.parametrize(("limit", "length"), [(512, 900_000), (100, 400_000)])
def test_an_answer_above_the_limit_is_too_long_and_not_forged(limit: int, length: int) -> None:
    """Also where its first piece is within the limit and only its announced length is not."""
    program = Candidate(source=f"def f(x): return 'a' * {length}", entry_point="f", tests=ONCE)
    found = judged(program, results_kib=limit)
    assert (found.verdict, found.reason) == OUTPUT
