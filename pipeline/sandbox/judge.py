"""Turns a candidate's source and a problem's tests into a verdict. The sandbox runs the code; this module compares.

    with Judge(config, workers) as judge:
        for verdict in judge.judge([Candidate(source=source, entry_point="add", tests=problem.tests)]):
            verdict.verdict, verdict.score      # "passed", 1.0

Expected values stay in this process; the child gets only arguments. A child's reports are mere claims: a wrong nonce,
an index out of order or bad JSON is `unsafe` and scores 0; a value counts only if it equals the expected one.

| verdict | reason |
|---|---|
| passed | |
| wrong | value, opaque (not plain data) |
| error | exception, exit, crash, output (too much of it, or a source that is too long) |
| timeout, memory, syntax, no_code | |
| unsafe | forged |
| unscorable | harness (a server died twice, no service), unprotected (no test can be judged) |

A program's verdict is that of its first failing test; its score is tests passed / tests that can be judged. An
unscorable program has the score None, never 0 or 1.

Not guaranteed: that the tests are strong, that hidden inputs stay hidden from the candidate, or a verdict on asserts
that need more than values (`asserts.py`): these are counted in `unprotected` and do not affect the score.

There are two ways to judge many candidates with fewer runs. `scores` judges candidates written by our own generators.
Several sources for one problem share one child, because forking one for each costs more than running it.

    [(tests, entry_point, [source, ...]), ...]  --one program each-->  scores of every source, in order

The judged program contains the sources as strings, and its tests select which one to call, and with which arguments.
Each source has its own namespace, so it behaves as if it ran alone. If anything but a value or an exception comes back
(a timeout, out of memory, an exit, too much output), that problem's candidates are judged again one by one, so they get
the scores they would get alone. Never use this for model-generated programs: programs that share a child can read each
other's answers and forge each other's verdicts.

`RememberingJudge` deduplicates what a policy samples repeatedly. A small policy's eight answers to one problem contain
three or four distinct ones, and many recur an epoch later. It has the interface of `Judge`; its cache lives as long as
the object and is not part of a run's saved state.
"""

import functools
import hashlib
import json
import signal
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from pipeline.run.errors import DataError
from pipeline.run.types import JsonObject
from pipeline.sandbox import asserts, messages
from pipeline.sandbox.pool import CandidateJob, Limits, Pool, Report, SandboxConfig
from pipeline.text import literals

__all__ = ["Candidate", "Judge", "Limits", "SandboxConfig", "TestResult", "Verdict"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A candidate and its tests: those of `records.Problem`, or `{"stdin", "stdout", "visible"}`."""

    source: str | None  # None or blank: the reply contained no code
    entry_point: str
    tests: list[JsonObject]
    cpu_seconds: float | None = None  # per test; None: the sandbox's default
    compare: str = "strict"  # how `expected` is compared: strict, python, close (`messages.equal`)

    def __post_init__(self) -> None:
        if self.compare not in messages.MODES:
            raise ValueError(f"compare: expected one of {', '.join(messages.MODES)}, got {self.compare!r}")


@dataclass(frozen=True, kw_only=True)
class TestResult:
    """The result of one test. `message` is for humans: the exception or how the process ended, escaped."""

    __test__ = False  # keeps pytest from collecting it

    verdict: str
    reason: str
    visible: bool
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    verdict: str
    reason: str
    passed: int
    total: int  # tests that can be judged
    score: float | None  # passed / total, 0 if unsafe, None if unscorable
    results: list[TestResult]  # of the tests that can be judged, in the order of the tests
    unprotected: int = 0  # asserts that cannot be judged safely
    profile: str = "sealed"  # of the sandbox; "unsafe": the candidate ran with resource limits only


@dataclass(frozen=True)
class _Check:
    """One parsed test: the calls (or the stdin) to send, and what to compare the answers with."""

    requests: list[dict[str, str]]
    visible: bool
    expected: object = None  # a decoded value, or the lines of stdout
    assertion: asserts.Assertion | None = None


@dataclass(frozen=True)
class _Answer:
    """A child's answer to one call: a decoded value, or why it is missing."""

    value: object = None
    verdict: str = ""  # "" if there is a value
    reason: str = ""
    message: str = ""


NOT_REACHED = _Answer(verdict="timeout", message="not reached: too many timeouts")
FORGED = _Answer(verdict="unsafe", reason="forged")


class Judge:
    """Judges programs in the sandbox, `workers` at a time. A context manager: entering starts the servers.

    `url` is the address of a sandbox service (`runtime.sandbox.url`); None: this machine. Entering raises ConfigError
    if there is no sandbox and `allow_unsafe` is false, or if the service is unreachable or incompatible.
    """

    def __init__(self, config: SandboxConfig, workers: int, url: str | None = None) -> None:
        self.config, self.pool = config, Pool(config, workers, url)

    def __enter__(self) -> "Judge":
        self.pool.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.pool.__exit__(*exception)

    def judge(self, programs: Iterable[Candidate]) -> Iterator[Verdict]:
        """Yield verdicts in the order of the programs; reads only a few ahead, so `programs` may be infinite.

        Raises DataError for a malformed test.
        """
        prepared: list[tuple[Candidate, list[_Check], int]] = []

        def tasks() -> Iterator[CandidateJob | None]:
            for program in programs:
                checks, unprotected = self._parse_tests(program)
                prepared.append((program, checks, unprotected))
                yield self._task(program, checks)

        for reports in self.pool.map(tasks()):
            program, checks, unprotected = prepared.pop(0)
            yield self._verdict(program, checks, unprotected, reports)

    def texts(self, source: str, entry_point: str, calls: Iterable[list[object]]) -> Iterator[tuple[str | None, str]]:
        """Call a function of our own code, one child per call; yields the returned string, or None and the reason.

        `calls` are lists of plain arguments. The results are trusted, so the source must not be a candidate's.
        """
        cpu_seconds = self.config.limits.cpu_seconds
        tasks = (
            CandidateJob(source, entry_point, [{"args": repr(call), "kwargs": "{}"}], cpu_seconds) for call in calls
        )
        for reports in self.pool.map(tasks):
            if reports is None:
                yield None, "the sandbox failed"
                continue
            (answer,) = _answers(reports, 1)
            text = answer.value if isinstance(answer.value, str) else None
            yield text, answer.message or answer.verdict or ("" if text is not None else "no text")

    def _parse_tests(self, program: Candidate) -> tuple[list[_Check], int]:
        """The tests that can be judged, and the number of tests that cannot."""
        if len(program.tests) > self.config.limits.max_tests:
            raise DataError(f"{program.entry_point}: expected at most {self.config.limits.max_tests} tests")
        parsed = [parse_test(test, program.entry_point) for test in program.tests]
        checks = [check for check in parsed if check is not None]
        if len({_is_program(check) for check in checks}) > 1:
            raise DataError(f"{program.entry_point}: tests with stdin and tests with arguments cannot be mixed")
        return checks, len(parsed) - len(checks)

    def _task(self, program: Candidate, checks: list[_Check]) -> CandidateJob | None:
        if not checks or _rejection(program, self.config.limits) is not None:
            return None
        assert program.source is not None
        entry = None if _is_program(checks[0]) else program.entry_point
        requests = [request for check in checks for request in check.requests]
        cpu_seconds = program.cpu_seconds or self.config.limits.cpu_seconds
        return CandidateJob(program.source, entry, requests, cpu_seconds)

    def _verdict(
        self, program: Candidate, checks: list[_Check], unprotected: int, reports: list[Report] | None
    ) -> Verdict:
        rejection = _rejection(program, self.config.limits)
        unscorable = Verdict(
            verdict="unscorable",
            reason="unprotected",
            passed=0,
            total=len(checks),
            score=None,
            results=[],
            unprotected=unprotected,
            profile=self.pool.host.profile,
        )
        if not checks:
            return unscorable
        if rejection is not None:
            results = [TestResult(verdict=rejection[0], reason=rejection[1], visible=c.visible) for c in checks]
        elif reports is None:
            return replace(unscorable, reason="harness")
        else:
            answers = _answers(reports, sum(len(check.requests) for check in checks))
            results = [_judge_test(check, answers, program.compare) for check in checks]
        passed = sum(result.verdict == "passed" for result in results)
        failure = next((result for result in results if result.verdict != "passed"), None)
        if any(result.verdict == "unsafe" for result in results):
            results = [replace(result, verdict="unsafe", reason="forged") for result in results]
            failure, passed = results[0], 0
        return replace(
            unscorable,
            verdict="passed" if failure is None else failure.verdict,
            reason="" if failure is None else failure.reason,
            passed=passed,
            score=passed / len(checks),
            results=results,
        )


def _judge_test(check: _Check, answers: list[_Answer], compare: str) -> TestResult:
    """The result of one test; pops its answers from the front of the list."""
    own_answers = [answers.pop(0) for _ in check.requests]
    failure = next((answer for answer in own_answers if answer.verdict), None)
    if failure is not None:
        return TestResult(
            verdict=failure.verdict, reason=failure.reason, visible=check.visible, message=_escape(failure.message)
        )
    if check.assertion is not None:
        is_right = check.assertion.holds([answer.value for answer in own_answers])
    elif _is_program(check):
        stdout = own_answers[0].value
        assert isinstance(stdout, str)
        is_right = _lines(stdout) == check.expected
    else:
        is_right = messages.equal(check.expected, own_answers[0].value, compare)
    if is_right:
        return TestResult(verdict="passed", reason="", visible=check.visible)
    opaque = any(messages.has_opaque(answer.value) for answer in own_answers)
    return TestResult(verdict="wrong", reason="opaque" if opaque else "value", visible=check.visible)


def parse_test(test: JsonObject, entry_point: str) -> _Check | None:
    """One test, parsed; None for an assert that cannot be judged safely. Raises DataError."""
    visible = bool(test.get("visible", False))
    if isinstance(test.get("stdin"), str) and isinstance(test.get("stdout"), str):
        return _Check([{"stdin": test["stdin"]}], visible, expected=_lines(test["stdout"]))
    if isinstance(test.get("assert"), str):
        assertion = _parse_assert(test["assert"], entry_point)
        if assertion is None:
            return None
        return _Check([vars(call) for call in assertion.calls], visible, assertion=assertion)
    if isinstance(test.get("args"), str) and isinstance(test.get("expected"), str):
        expected = _parse_expected(test["args"], test["expected"], entry_point)
        return _Check([{"args": test["args"], "kwargs": "{}"}], visible, expected=expected)
    raise DataError(
        f"{entry_point}: expected a test with `args` and `expected`, `assert`, or `stdin` and `stdout` (all strings), "
        f"found the keys {sorted(test)}"
    )


@functools.lru_cache(maxsize=4096)  # many candidates are judged with the same tests
def _parse_expected(args: str, expected: str, entry_point: str) -> object:
    """The expected value as `messages.decode` returns it, after checking both texts. Raises DataError."""
    if not isinstance(_read_literal(args, entry_point), list):
        raise DataError(f"{entry_point}: args: expected a list literal, found {args[:80]!r}")
    value = _read_literal(expected, entry_point)
    try:
        return messages.check(value)
    except ValueError as error:
        raise DataError(f"{entry_point}: expected: {error}") from error


_parse_assert = functools.lru_cache(maxsize=4096)(asserts.parse)


def _read_literal(text: str, entry_point: str) -> object:
    try:
        return literals.read(text, messages.bag, messages.mapping)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise DataError(f"{entry_point}: expected a Python literal, found {text[:80]!r}") from error


def _is_program(check: _Check) -> bool:
    return "stdin" in check.requests[0]


def _rejection(program: Candidate, limits: Limits) -> tuple[str, str] | None:
    """Verdict and reason for a source that is rejected without being run; otherwise None."""
    if program.source is None or not program.source.strip():
        return "no_code", ""
    if len(program.source.encode("utf-8", "surrogatepass")) > limits.source_kib << 10:
        return "error", "output"
    return None


def _lines(text: str) -> list[str]:
    """The lines of an output for comparison: right-stripped, without trailing blank lines."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _escape(text: str) -> str:
    """Make a candidate's text safe for a terminal or a page: escape control characters and lone surrogates."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _answers(reports: list[Report], count: int) -> list[_Answer]:
    """The answers to `count` calls; a call that no child ran counts as a timeout."""
    answers = [NOT_REACHED] * count
    for report in reports:
        answers[report.first : report.first + report.given] = _child_answers(report)
    return answers


def _child_answers(report: Report) -> list[_Answer]:
    """One child's answers, one per call."""
    answers: list[_Answer] = []
    for index, frame in enumerate(report.frames):
        try:
            answer, is_load = _parse_frame(messages.parse(frame), report, index)
        except messages.Malformed:
            answer, is_load = FORGED, True
        if is_load:  # ignore all later frames
            return [answer] * report.given
        answers.append(answer)
    failure = _failure(report)
    if failure is None:
        return answers
    answers = answers[: report.given - 1]  # all answered but no end frame: the last answer was sent while exiting
    return [*answers, failure, *[NOT_REACHED if report.timed_out else failure] * (report.given - len(answers) - 1)]


def _parse_frame(tree: object, report: Report, index: int) -> tuple[_Answer, bool]:
    """The answer in a frame, and whether it reports a load failure. Raises Malformed."""
    match tree:
        case (("n", report.nonce), ("i", number), ("v", value)) if type(number) is int and number == index:
            return _Answer(report.stdout if report.is_program else messages.decode(value)), False
        case (("n", report.nonce), ("i", number), ("e", [str(kind), str(text)])) if number == index:
            return _exception_answer(kind, text), False
        case (("n", report.nonce), ("load", "compile"), ("e", [str(kind), str(text)])) if index == 0:
            return _Answer(verdict="syntax", message=f"{kind}: {text}"), True
        case (("n", report.nonce), ("load", "run"), ("e", [str(kind), str(text)])) if index == 0:
            return _exception_answer(kind, text), True
    raise messages.Malformed("not a frame of this job and turn")


def _exception_answer(kind: str, text: str) -> _Answer:
    if kind == "MemoryError":
        return _Answer(verdict="memory", message=kind)
    reason = "exit" if kind == "SystemExit" else "exception"
    return _Answer(verdict="error", reason=reason, message=f"{kind}: {text}" if text else kind)


def _failure(report: Report) -> _Answer | None:
    """The answer for calls that a child left unanswered, based on how it ended; None for a normal end."""
    if report.timed_out:
        return _Answer(verdict="timeout", message=f"{report.cut} limit")
    if report.cut == "forged":
        return FORGED
    if report.cut == "threads":
        return _Answer(verdict="error", reason="crash", message="too many threads")
    if report.cut is not None:
        return _Answer(verdict="error", reason="output", message="too much output")
    if report.signal == signal.SIGKILL:  # sent neither by the child nor by us: the kernel ran out of memory
        return _Answer(verdict="memory", message="killed by the kernel")
    if report.signal is not None:
        return _Answer(verdict="error", reason="crash", message=f"signal {report.signal}")
    if report.status is not None:
        return _Answer(verdict="error", reason="exit", message=f"exit status {report.status}")
    return None


CALL = "call"
JOINT_SOURCE = """\
sources = {sources!r}
made = {{}}

def {call}(number, arguments):
    if number not in made:
        names = {{"__name__": "candidate"}}
        exec(compile(sources[number], "<candidate>", "exec", dont_inherit=True), names)
        made[number] = names
    return made[number][{entry_point!r}](*arguments)
"""


@dataclass(frozen=True)
class Candidates:
    """Sources to judge with the same tests, of the form {"args", "expected", "visible"}."""

    sources: Sequence[str]
    entry_point: str
    tests: list[JsonObject]


def scores(judge: Judge, problems: Iterable[Candidates]) -> Iterator[list[float | None]]:
    """For each problem, the fraction of tests that each source passes; None if it cannot be judged."""
    batches = [batch for candidates in problems for batch in _split(candidates, judge.config.limits.max_tests)]
    joint_verdicts = list(judge.judge(_joint_program(batch) for _, batch in batches))
    unclear = [batch for (_, batch), verdict in zip(batches, joint_verdicts, strict=True) if not _is_clear(verdict)]
    single_verdicts = judge.judge(
        Candidate(source=source, entry_point=batch.entry_point, tests=batch.tests)
        for batch in unclear
        for source in batch.sources
    )
    shares: list[float | None] = []
    for (is_last, batch), verdict in zip(batches, joint_verdicts, strict=True):
        if _is_clear(verdict):
            shares += _shares(verdict, len(batch.sources))
        else:
            shares += [next(single_verdicts).score for _ in batch.sources]
        if is_last:
            yield shares
            shares = []


def _split(candidates: Candidates, max_tests: int) -> Iterator[tuple[bool, Candidates]]:
    """Batches of as many sources as `max_tests` allows, each flagged if it is the last one for its problem."""
    size = max(1, max_tests // max(1, len(candidates.tests)))
    sources = candidates.sources
    batches = [sources[first : first + size] for first in range(0, len(sources), size)]
    for number, batch in enumerate(batches, 1):
        yield number == len(batches), Candidates(batch, candidates.entry_point, candidates.tests)


def _joint_program(batch: Candidates) -> Candidate:
    tests = [
        test | {"args": f"[{number}, {test['args']}]"} for number in range(len(batch.sources)) for test in batch.tests
    ]
    source = JOINT_SOURCE.format(sources=list(batch.sources), call=CALL, entry_point=batch.entry_point)
    return Candidate(source=source, entry_point=CALL, tests=tests)


def _is_clear(verdict: Verdict) -> bool:
    """Whether each test returned a value, or raised an exception that does not depend on call depth."""
    return bool(verdict.results) and all(
        result.verdict in ("passed", "wrong")
        or (result.reason == "exception" and not result.message.startswith("RecursionError"))
        for result in verdict.results
    )


def _shares(verdict: Verdict, num_sources: int) -> list[float]:
    passed = [result.verdict == "passed" for result in verdict.results]
    size = len(passed) // num_sources
    return [sum(passed[first : first + size]) / size for first in range(0, len(passed), size)]


MOST_REMEMBERED = 2**14  # verdicts, of one or two kilobytes each


class RememberingJudge(Judge):
    """A judge for policy samples, which often repeat: identical programs run once.

    Verdicts that depend only on program and tests are cached: the `MOST_REMEMBERED` most recently used. Others (a
    timeout, out of memory, a harness failure: a busy machine may be the cause) are shared only between identical
    programs of the same call, so that identical answers in a group get equal rewards. They are not cached, so that a
    resumed run, which starts with an empty cache, gets the same rewards.
    """

    def __init__(self, config: SandboxConfig, workers: int, url: str | None = None) -> None:
        super().__init__(config, workers, url)
        self._memory: OrderedDict[bytes, Verdict] = OrderedDict()

    def judge(self, programs: Iterable[Candidate]) -> Iterator[Verdict]:
        """Like `Judge.judge`, for a finite number of programs."""
        pending: deque[bytes] = deque()  # programs read but not yet answered with a verdict
        running: deque[bytes] = deque()  # programs running in the sandbox
        verdicts: dict[bytes, Verdict | None] = {}  # of this call; None: still running

        def new_programs() -> Iterator[Candidate]:
            for program in programs:
                key = _key(program)
                pending.append(key)
                if key in verdicts:
                    continue
                verdicts[key] = self._recall(key)
                if verdicts[key] is None:
                    running.append(key)
                    yield program

        def ready_verdicts() -> Iterator[Verdict]:
            while pending and (verdict := verdicts[pending[0]]) is not None:
                pending.popleft()
                yield verdict

        for verdict in super().judge(new_programs()):
            key = running.popleft()
            verdicts[key] = verdict
            if _is_reproducible(verdict):
                self._memory[key] = verdict
            yield from ready_verdicts()
        yield from ready_verdicts()
        while len(self._memory) > MOST_REMEMBERED:
            self._memory.popitem(last=False)

    def _recall(self, key: bytes) -> Verdict | None:
        if key in self._memory:
            self._memory.move_to_end(key)
        return self._memory.get(key)


def _key(program: Candidate) -> bytes:
    """A hash of everything a verdict depends on."""
    return hashlib.sha256(json.dumps(vars(program), sort_keys=True).encode()).digest()


def _is_reproducible(verdict: Verdict) -> bool:
    """Whether every result depends only on program and tests, even on a busy machine."""
    results = [(result.verdict, result.reason) for result in verdict.results]
    return verdict.verdict != "unscorable" and all(
        name in ("passed", "wrong", "syntax") or reason == "exception" for name, reason in results
    )
