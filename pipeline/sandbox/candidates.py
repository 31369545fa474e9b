"""Candidates that our own generators wrote, judged in one child where there are several to one problem: a fork each
costs more than running them.

    [(tests, entry_point, [source, ...]), ...]  --one program each-->  scores of every source, in order

The program that is judged holds the sources as texts, and its tests say which one is called with what. Each source has
a namespace of its own, so it sees what it would see alone. Where anything but a value or an exception comes back (a
time-out, a lack of memory, an exit, too much output), that problem's candidates are judged again one by one: their
scores are those that they have alone.

Never for programs that a model wrote: those that share a child can read each other's answers and forge each other's
verdicts.

Verdicts that are remembered: what a policy samples again and again is run once.

Of eight answers of a small policy to one problem three or four are distinct, and many come back an epoch later. A
remembering judge is used as a judge is; its memory lasts as long as itself and is in no state of a run.
"""

import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.sandbox.judge import Judge, Program, SandboxConfig, Verdict

CALL = "call"
TOGETHER = """\
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
    """Sources that are tried by the same tests, which are of the form {"args", "expected", "visible"}."""

    sources: Sequence[str]
    entry_point: str
    tests: list[dict[str, Any]]


def scores(judge: Judge, asked: Iterable[Candidates]) -> Iterator[list[float | None]]:
    """The share of the tests that each source passes, of all the candidates in turn; None where that cannot be told."""
    whole = [part for one in asked for part in _parts(one, judge.config.limits.max_tests)]
    first = list(judge.judge(_program(part) for _, part in whole))
    again = [part for (_, part), verdict in zip(whole, first, strict=True) if not _plain(verdict)]
    alone = judge.judge(
        Program(source=source, entry_point=part.entry_point, tests=part.tests)
        for part in again
        for source in part.sources
    )
    found: list[float | None] = []
    for (last, part), verdict in zip(whole, first, strict=True):
        if _plain(verdict):
            found += _shares(verdict, len(part.sources))
        else:
            found += [next(alone).score for _ in part.sources]
        if last:
            yield found
            found = []


def _parts(candidates: Candidates, most: int) -> Iterator[tuple[bool, Candidates]]:
    """As many sources at a time as a program may have tests for, and whether they are the last ones."""
    size = max(1, most // max(1, len(candidates.tests)))
    sources = candidates.sources
    parts = [sources[first : first + size] for first in range(0, len(sources), size)]
    for number, part in enumerate(parts, 1):
        yield number == len(parts), Candidates(part, candidates.entry_point, candidates.tests)


def _program(part: Candidates) -> Program:
    tests = [
        test | {"args": f"[{number}, {test['args']}]"} for number in range(len(part.sources)) for test in part.tests
    ]
    source = TOGETHER.format(sources=list(part.sources), call=CALL, entry_point=part.entry_point)
    return Program(source=source, entry_point=CALL, tests=tests)


def _plain(verdict: Verdict) -> bool:
    """Whether each test gave a value or an exception that does not depend on how deep the calls were."""
    return bool(verdict.results) and all(
        result.verdict in ("passed", "wrong")
        or (result.reason == "exception" and not result.message.startswith("RecursionError"))
        for result in verdict.results
    )


def _shares(verdict: Verdict, count: int) -> list[float]:
    passed = [result.verdict == "passed" for result in verdict.results]
    size = len(passed) // count
    return [sum(passed[first : first + size]) / size for first in range(0, len(passed), size)]


# -- remembered --------------------------------------------------------------------------------------------------------


MOST_REMEMBERED = 2**14  # verdicts, of one or two kilobytes each


class RememberingJudge(Judge):
    """A judge of what a policy samples: it repeats itself, and a program that it repeats is run once.

    Verdicts that follow from program and tests alone are remembered, up to `MOST_REMEMBERED`, the ones asked for last.
    Others (a time-out, a lack of memory, a harness that failed: a busy machine may be why) hold for equal programs of
    one call, so that equal answers of a group are paid alike, and are not remembered: a resumed run, which remembers
    nothing, has the same rewards.
    """

    def __init__(self, config: SandboxConfig, workers: int, url: str | None = None) -> None:
        super().__init__(config, workers, url)
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()

    def judge(self, programs: Iterable[Program]) -> Iterator[Verdict]:
        """As `Judge.judge`, of a finite number of programs."""
        asked: deque[bytes] = deque()  # programs that were read and have not been answered
        running: deque[bytes] = deque()  # those of them that the sandbox was given
        told: dict[bytes, Verdict | None] = {}  # of this call; None: still running

        def fresh() -> Iterator[Program]:
            for program in programs:
                key = _key(program)
                asked.append(key)
                if key in told:
                    continue
                told[key] = self._recalled(key)
                if told[key] is None:
                    running.append(key)
                    yield program

        def answered() -> Iterator[Verdict]:
            while asked and (verdict := told[asked[0]]) is not None:
                asked.popleft()
                yield verdict

        for verdict in super().judge(fresh()):
            key = running.popleft()
            told[key] = verdict
            if _follows(verdict):
                self._known[key] = verdict
            yield from answered()
        yield from answered()
        while len(self._known) > MOST_REMEMBERED:
            self._known.popitem(last=False)

    def _recalled(self, key: bytes) -> Verdict | None:
        if key in self._known:
            self._known.move_to_end(key)
        return self._known.get(key)


def _key(program: Program) -> bytes:
    """What a verdict hangs on."""
    return hashlib.sha256(json.dumps(vars(program), sort_keys=True).encode()).digest()


def _follows(verdict: Verdict) -> bool:
    """Whether every result follows from program and tests, on a busy machine too."""
    results = [(result.verdict, result.reason) for result in verdict.results]
    return verdict.verdict != "unscorable" and all(
        name in ("passed", "wrong", "syntax") or reason == "exception" for name, reason in results
    )
