"""Verdicts that are remembered: what a policy samples again and again is run once.

Of eight answers of a small policy to one problem three or four are distinct, and many come back an epoch later. A remembering judge
is used as a judge is; its memory lasts as long as itself and is in no state of a run.
"""

import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

from pipeline.sandbox.judge import Judge, Program, SandboxConfig, Verdict

MOST_REMEMBERED = 2**14  # verdicts, of one or two kilobytes each


class RememberingJudge(Judge):
    """A judge of what a policy samples: it repeats itself, and a program that it repeats is run once.

    Verdicts that follow from program and tests alone are remembered, up to `MOST_REMEMBERED`, the ones asked for last. Others
    (a time-out, a lack of memory, a harness that failed: a busy machine may be why) hold for equal programs of one call, so
    that equal answers of a group are paid alike, and are not remembered: a resumed run, which remembers nothing, has the same rewards.
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
