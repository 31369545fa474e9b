"""Candidates for one problem in one child process: the same scores as alone, with fewer children."""

from collections.abc import Sequence

import pytest

from pipeline.sandbox.judge import Candidate, Candidates, Judge, Limits, SandboxConfig, scores
from pipeline.synthetic import programs

TESTS = [{"args": f"[{n}]", "expected": str(n + 1), "visible": False} for n in range(4)]
RIGHT = "def up(x):\n    return x + 1\n"
ODD = {  # source -> its score when it runs alone
    RIGHT: 1.0,
    "def up(x):\n    return 2\n": 0.25,
    "def up(x):\n    return 1 // (x - 1) or x + 1\n": 0.25,
    "def up(x):\n    if x == 2: raise ValueError(x)\n    return x + 1\n": 0.75,
    "def up(x:\n": 0.0,
    "def down(x):\n    return x - 1\n": 0.0,
    "raise ValueError\n": 0.0,
    "def up(x):\n    global up\n    up = None\n    return x + 1\n": 0.25,
    "": 0.0,
}
ALONE = {  # ends its child, or would depend on the others in it
    "def up(x):\n    while x == 2: pass\n    return x + 1\n": 0.75,
    "import os\ndef up(x):\n    os._exit(0)\n": 0.0,
    "import sys\ndef up(x):\n    sys.exit()\n": 0.0,
    "def up(x):\n    return up(x)\n": 0.0,
    "def up(x):\n    return [0] * 10**9\n": 0.0,
}


@pytest.fixture(scope="module")
def judge():
    with Judge(SandboxConfig(limits=Limits(cpu_seconds=0.2)), 1) as judge:
        yield judge


def counted(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that children are given from now on."""
    found: list[str] = []
    original = judge.pool.run
    monkeypatch.setattr(judge.pool, "run", lambda task: (found.append(task.source), original(task))[1])
    return found


def alone(judge: Judge, candidates: Candidates) -> list[float | None]:
    asked = (
        Candidate(source=one, entry_point=candidates.entry_point, tests=candidates.tests) for one in candidates.sources
    )
    return [verdict.score for verdict in judge.judge(asked)]


@pytest.mark.parametrize("sources", [[*ODD], [*ODD][::-1]])
def test_values_and_exceptions_need_one_child(
    judge: Judge, sources: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = counted(judge, monkeypatch)
    candidates = Candidates(sources, "up", TESTS)
    assert list(scores(judge, [candidates])) == [[ODD[source] for source in sources]]
    assert len(given) == 1
    assert alone(judge, candidates) == [ODD[source] for source in sources]


@pytest.mark.parametrize("source", ALONE)
def test_a_candidate_that_ends_the_child_costs_the_others_nothing(
    judge: Judge, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = counted(judge, monkeypatch)
    candidates = Candidates([RIGHT, source, RIGHT], "up", TESTS)
    assert list(scores(judge, [Candidates([RIGHT], "up", TESTS), candidates, Candidates([], "up", TESTS)])) == [
        [1.0],
        [1.0, ALONE[source], 1.0],
    ]
    assert len(given) == 1 + 1 + 3


def test_a_problem_of_many_candidates_is_divided_and_one_without_tests_has_no_score(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Judge(SandboxConfig(limits=Limits(max_tests=9)), 1) as judge:
        given = counted(judge, monkeypatch)
        sources = [RIGHT, *[source for source in ODD if source]]
        assert list(scores(judge, [Candidates(sources, "up", TESTS)])) == [[1.0, *[ODD[s] for s in sources[1:]]]]
        assert len(given) == 5  # two at a time
        assert list(scores(judge, [Candidates(sources[:2], "up", [])])) == [[None, None]]


def test_what_the_generators_write_has_the_scores_that_it_has_alone(judge: Judge) -> None:
    asked = []
    for problem in programs.problems("train", 12, 3):
        hidden = [test for test in problem.tests if not test["visible"]]
        assert problem.answer is not None
        wrong = [text for _, text in programs.distractors(problem, 3)]
        right = problem.answer.removeprefix("```python\n").removesuffix("\n```")
        asked.append(Candidates([right, *wrong], problem.entry_point, hidden))
    found = list(scores(judge, asked))
    assert found == [alone(judge, one) for one in asked]
    assert all(one[0] == 1.0 for one in found) and any(score != 1.0 for one in found for score in one)
