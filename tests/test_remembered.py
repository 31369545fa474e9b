"""Remembered verdicts: the same as without, but from running fewer programs."""

import pytest

from pipeline.sandbox import judge as sandbox_judge
from pipeline.sandbox.judge import Candidate, Judge, RememberingJudge, SandboxConfig

ADD = [{"args": "[1, 2]", "expected": "3", "visible": False}, {"args": "[2, 2]", "expected": "4", "visible": True}]
RIGHT = "def add(a, b):\n    return a + b\n"
SOURCES = {
    "passed": RIGHT,
    "wrong": "def add(a, b):\n    return 3\n",
    "error": "def add(a, b):\n    return 1 / 0\n",
    "syntax": "def add(a, b:\n",
    "timeout": "def add(a, b):\n    while True: pass\n",
    "no_code": "",
}


class Counting:
    """Records what a judge's pool is given."""

    def __init__(self, judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sources: list[str] = []
        original = judge.pool.run
        monkeypatch.setattr(judge.pool, "run", lambda task: (self.sources.append(task.source), original(task))[1])

    def names(self) -> list[str]:
        """The names of the sources given since the last call."""
        named = {source: name for name, source in SOURCES.items()}
        found, self.sources = sorted(named[source] for source in self.sources), []
        return found


def adding(*names: str) -> list[Candidate]:
    return [Candidate(source=SOURCES[name], entry_point="add", tests=ADD, cpu_seconds=0.2) for name in names]


def test_a_program_that_a_policy_repeats_is_run_once_and_its_verdict_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = adding("passed", "wrong", "passed", "syntax", "error", "wrong", "no_code", "timeout", "syntax", "timeout")
    with Judge(SandboxConfig(), 1) as plain:
        expected = list(plain.judge(asked))
    assert [one.verdict for one in expected][:3] == ["passed", "wrong", "passed"]
    with RememberingJudge(SandboxConfig(), 1) as judge:
        counting = Counting(judge, monkeypatch)
        assert list(judge.judge(iter(asked))) == expected
        assert counting.names() == ["error", "passed", "syntax", "timeout", "wrong"]
        assert list(judge.judge(asked[::-1])) == expected[::-1]
        assert counting.names() == ["timeout"], "only what a busy machine may have caused is run again"
        assert list(judge.judge([])) == []


def test_what_is_asked_of_a_program_belongs_to_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    other = [{"args": "[1, 2]", "expected": "4", "visible": False}]
    asked = [
        Candidate(source=RIGHT, entry_point="add", tests=tests, compare=compare)
        for tests in (ADD, other)
        for compare in ("strict", "python")
    ]
    with RememberingJudge(SandboxConfig(), 1) as judge:
        counting = Counting(judge, monkeypatch)
        assert [one.score for one in judge.judge(asked)] == [1.0, 1.0, 0.0, 0.0]
        assert len(counting.sources) == 4


def test_as_many_verdicts_are_remembered_as_memory_is_meant_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_judge, "MOST_REMEMBERED", 2)
    with RememberingJudge(SandboxConfig(), 1) as remembering:
        counting = Counting(remembering, monkeypatch)
        for names, run in (
            (["passed", "wrong"], ["passed", "wrong"]),
            (["passed", "error"], ["error"]),  # `wrong` was least recently used
            (["passed", "error"], []),
            (["wrong"], ["wrong"]),
        ):
            assert [one.verdict for one in remembering.judge(adding(*names))] == names
            assert counting.names() == run
