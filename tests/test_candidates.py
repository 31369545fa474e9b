"""Verdicts under load and through the service equal those of a quiet machine; forgeries that pass elsewhere score
nothing.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pipeline.sandbox.judge import Candidate, Judge, Limits, SandboxConfig
from pipeline.synthetic import programs
from tests.judges import real_judge as real_judge
from tests.sandbox import ended, started

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


# Three candidates that do not know the answer, and how public checkers judge them.
WALK = "import sys\ndef f(x): return [c for c in sys._getframe(1).f_code.co_consts if isinstance(c, str)][-1]"
EQUAL = "class Any:\n def __eq__(s, o): return True\ndef f(x): return Any()"
FIRST_LINE = "print(1, end='')"
CHECK = "def check(candidate):\n    assert candidate(3) == 'the answer'\ncheck(f)"


@pytest.mark.parametrize("source", [WALK, EQUAL])
def test_a_forgery_that_passes_where_the_test_runs_beside_the_candidate_scores_nothing(judge: Judge, source: str):
    beside = f"exec({source + chr(10) + CHECK!r}, {{}})"  # openai/human-eval: one namespace; no exception means a pass
    assert subprocess.run([sys.executable, "-c", beside]).returncode == 0
    (found,) = judge.judge(
        [Candidate(source=source, entry_point="f", tests=[{"args": "[3]", "expected": "'the answer'"}])]
    )
    assert found.score == 0


def test_a_program_that_prints_only_the_first_line_scores_nothing(judge: Judge):
    expected = "1\n2\n3\n"
    output = subprocess.check_output([sys.executable, "-c", FIRST_LINE], text=True)
    pairs = zip(
        output.split("\n"), expected.split("\n"), strict=False
    )  # huggingface/open-r1: compares only the lines that both have
    assert all(mine.strip() == theirs.strip() for mine, theirs in pairs)
    (found,) = judge.judge([Candidate(source=FIRST_LINE, entry_point="", tests=[{"stdin": "", "stdout": expected}])])
    assert (found.verdict, found.score) == ("wrong", 0)


def stored() -> list[Candidate]:
    """500 programs: right answers, typical mistakes, and a few that fail in other ways."""
    found = []
    for problem in programs.problems("train", 200, 1):
        assert problem.answer is not None
        for source in [problem.answer, *(wrong for _, wrong in programs.distractors(problem, 1)[:2])]:
            found.append(Candidate(source=source, entry_point=problem.entry_point, tests=problem.tests[:6]))
    name, tests = found[0].entry_point, found[0].tests[:2]
    bodies = ["raise ValueError('x')", "raise SystemExit", "return iter([])", "return [0] * 10**9", "while True: pass"]
    odd = [Candidate(source=f"def {name}(*a):\n {body}", entry_point=name, tests=tests) for body in bodies]
    return [*found[: 500 - len(odd)], *odd]


@contextmanager
def load(factor: int) -> Iterator[None]:
    """Run `factor` endless loops per core."""
    count = factor * len(os.sched_getaffinity(0))
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.full
def test_verdicts_are_the_same_quiet_under_fourfold_load_and_through_the_service():
    asked = stored()
    assert len(asked) == 500

    def outcomes(url: str | None) -> list[tuple]:
        with Judge(SandboxConfig(limits=Limits(wall_extra_seconds=20)), 2, url=url) as judge:
            return [(v.verdict, v.reason, v.passed, v.results) for v in judge.judge(asked)]

    process, url = started()
    try:
        quiet, through = outcomes(None), outcomes(url)
    finally:
        ended(process)
    with load(4):
        loaded = outcomes(None)
    kinds = {verdict for verdict, *_ in quiet}
    assert {"passed", "wrong", "error", "memory", "timeout", "syntax"} <= kinds
    assert through == quiet
    assert loaded == quiet
