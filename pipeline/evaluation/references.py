"""Is a problem that somebody brought in order: can one of its tests be judged, does its own solution pass them all?

In: `Problem`s; their solutions are code of strangers and run in the sandbox, as every candidate does. Out: what is wrong
with each, in words, or nothing. Generated problems are right by construction (tests/test_programs.py proves it), so
nobody asks here about them.

Not promised: that the tests are strong, or that a problem without a solution has one.
"""

from collections.abc import Iterable, Iterator

from pipeline.errors import DataError
from pipeline.evaluation import code
from pipeline.sandbox.judge import Judge, Program, Verdict, parse_test
from pipeline.streams.records import Problem

NOT_ONE = "none of its tests can be judged safely; expected `assert f(...) == literal`, or {args, expected}"


def solution(problem: Problem) -> str | None:
    """The source of a problem's own answer: its code block, or the answer itself where that is bare code."""
    return None if problem.answer is None else code.extract(problem.answer) or problem.answer


def faults(
    judge: Judge, asked: Iterable[tuple[Problem, str | None]], cpu_seconds: float | None = None
) -> Iterator[tuple[str, str]]:
    """(field, what is wrong) of each problem with the source of its solution, in order; both empty where all is well."""
    waiting: list[tuple[str, str | None]] = []

    def programs() -> Iterator[Program]:
        for problem, source in asked:
            fault = _unreadable(problem, judge.config.limits.max_tests)
            waiting.append((fault, source))
            tests = [] if fault else problem.tests
            yield Program(source=source, entry_point=problem.entry_point, tests=tests, cpu_seconds=cpu_seconds)

    for verdict in judge.judge(programs()):
        fault, source = waiting.pop(0)
        if fault or not verdict.total:
            yield "tests", fault or NOT_ONE
        elif source is not None and verdict.verdict != "passed":
            yield "answer", f"its own solution fails its own tests ({explain(verdict)})"
        else:
            yield "", ""


def explain(verdict: Verdict) -> str:
    """A verdict in words: `wrong, value: 1 of 3 tests pass`."""
    what = ", ".join(part for part in (verdict.verdict, verdict.reason) if part)
    message = next((result.message for result in verdict.results if result.message), "")
    shown = f"; {message[:120]}" if message else ""
    return f"{what}: {verdict.passed} of {verdict.total} tests pass{shown}"


def _unreadable(problem: Problem, most: int) -> str:
    if len(problem.tests) > most:
        return f"expected at most {most} tests, found {len(problem.tests)}"
    try:
        for test in problem.tests:
            parse_test(test, problem.entry_point)
    except DataError as error:
        return str(error)
    return ""
