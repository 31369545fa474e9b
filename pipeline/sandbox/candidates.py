"""Two ways to judge many candidates with fewer runs: several in one child, and remembered verdicts.

`scores` judges candidates that our own generators wrote. Several sources for one problem share one child, because a
fork for each costs more than running them.

    [(tests, entry_point, [source, ...]), ...]  --one program each-->  scores of every source, in order

The program that is judged contains the sources as texts, and its tests select which one is called with what. Each
source has its own namespace, so it sees what it would see alone. If anything but a value or an exception comes back (a
time-out, a lack of memory, an exit, too much output), that problem's candidates are judged again one by one, so their
scores are those that they have alone. Never for programs that a model wrote: programs that share a child can read each
other's answers and forge each other's verdicts.

`RememberingJudge` runs once what a policy samples repeatedly. Of eight answers of a small policy to one problem three
or four are distinct, and many come back an epoch later. It has the interface of `Judge`; its memory lasts as long as
the object and is in no state of a run.
"""

import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pipeline.run.types import JsonObject
from pipeline.sandbox.judge import Judge, Program, SandboxConfig, Verdict

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
    """Sources that are judged by the same tests, of the form {"args", "expected", "visible"}."""

    sources: Sequence[str]
    entry_point: str
    tests: list[JsonObject]


def scores(judge: Judge, problems: Iterable[Candidates]) -> Iterator[list[float | None]]:
    """For each problem, the share of the tests that each source passes; None where it cannot be judged."""
    batches = [batch for candidates in problems for batch in _split(candidates, judge.config.limits.max_tests)]
    joint_verdicts = list(judge.judge(_joint_program(batch) for _, batch in batches))
    unclear = [batch for (_, batch), verdict in zip(batches, joint_verdicts, strict=True) if not _is_clear(verdict)]
    single_verdicts = judge.judge(
        Program(source=source, entry_point=batch.entry_point, tests=batch.tests)
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
    """Batches of as many sources as fit `max_tests`, each with whether it is the last of its problem."""
    size = max(1, max_tests // max(1, len(candidates.tests)))
    sources = candidates.sources
    batches = [sources[first : first + size] for first in range(0, len(sources), size)]
    for number, batch in enumerate(batches, 1):
        yield number == len(batches), Candidates(batch, candidates.entry_point, candidates.tests)


def _joint_program(batch: Candidates) -> Program:
    tests = [
        test | {"args": f"[{number}, {test['args']}]"} for number in range(len(batch.sources)) for test in batch.tests
    ]
    source = JOINT_SOURCE.format(sources=list(batch.sources), call=CALL, entry_point=batch.entry_point)
    return Program(source=source, entry_point=CALL, tests=tests)


def _is_clear(verdict: Verdict) -> bool:
    """Whether each test gave a value, or an exception that does not depend on the depth of the calls."""
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
    """A judge for the samples of a policy, which repeat: equal programs run once.

    Verdicts that depend on program and tests alone are remembered: the `MOST_REMEMBERED` most recently used. Others (a
    time-out, a lack of memory, a harness failure: a busy machine may be the cause) hold only for equal programs of the
    same call, so that equal answers of a group get equal rewards. They are not remembered, so that a resumed run, which
    starts without memory, gets the same rewards.
    """

    def __init__(self, config: SandboxConfig, workers: int, url: str | None = None) -> None:
        super().__init__(config, workers, url)
        self._memory: OrderedDict[bytes, Verdict] = OrderedDict()

    def judge(self, programs: Iterable[Program]) -> Iterator[Verdict]:
        """As `Judge.judge`, for a finite number of programs."""
        pending: deque[bytes] = deque()  # programs that were read and whose verdicts were not yielded yet
        running: deque[bytes] = deque()  # those of them that run in the sandbox
        verdicts: dict[bytes, Verdict | None] = {}  # of this call; None: still running

        def new_programs() -> Iterator[Program]:
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


def _key(program: Program) -> bytes:
    """A hash of all that a verdict depends on."""
    return hashlib.sha256(json.dumps(vars(program), sort_keys=True).encode()).digest()


def _is_reproducible(verdict: Verdict) -> bool:
    """Whether every result depends on program and tests alone, even on a busy machine."""
    results = [(result.verdict, result.reason) for result in verdict.results]
    return verdict.verdict != "unscorable" and all(
        name in ("passed", "wrong", "syntax") or reason == "exception" for name, reason in results
    )
