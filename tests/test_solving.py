"""Held-out problems of grpo: how many are asked, how often, and what their answers come to."""

from collections.abc import Sequence
from typing import Any

import pytest

from pipeline.evaluation import solving
from pipeline.evaluation.solving import HeldOutProblems, SolvingConfig
from pipeline.rl.answers import Answer, Prompt
from pipeline.sandbox.judge import Verdict
from tests.workspace import problem

PROMPTS = [Prompt(str(n), [n], "code", problem(n)) for n in range(9)]


class Setting:
    """Answers that say whose they are; sample 0 of every problem is right, and so is the policy's sample 1."""

    seed = 1

    def __init__(self) -> None:
        self.asked: list[list[tuple[str, int]]] = []

    def held_out(self, asked: Sequence[tuple[Prompt, int]], *, of_reference: bool = False) -> list[Answer]:
        self.asked.append([(prompt.id, sample) for prompt, sample in asked])
        right = 1 if of_reference else 2
        return [Answer(p, n, [5], [-1.0], True, "right" if n < right else "wrong") for p, n in asked]

    def divergence(self, given: Sequence[Answer]) -> tuple[float, float]:
        return 0.0, 0.0


@pytest.fixture(autouse=True)
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge answers by their text."""

    def verdicts(judge: Any, answers: Sequence[Answer]) -> list[Verdict]:
        return [
            Verdict(
                verdict="passed" if one.text == "right" else "failed",
                reason="",
                passed=0,
                total=1,
                score=0.0,
                results=[],
            )
            for one in answers
        ]

    monkeypatch.setattr(solving, "judged", verdicts)


def held_out(**config: int) -> tuple[HeldOutProblems, Setting]:
    setting: Any = Setting()
    return HeldOutProblems(PROMPTS, setting, solving.verdicts_of(object()), SolvingConfig(**config)), setting  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "kept"), [(1, 1), (4, 4), (100, 9)])
def test_every_evaluation_asks_the_same_first_problems(count: int, kept: int) -> None:
    found, setting = held_out(eval_problems=count)
    found.row(0)
    found.row(100)
    whole = [prompt.id for prompt in held_out(eval_problems=9)[0].prompts]
    assert setting.asked == [[(name, 0) for name in whole[:kept]]] * 2


@pytest.mark.parametrize(("samples", "before", "after"), [(1, 1.0, 1.0), (2, 0.5, 1.0), (4, 0.25, 0.5)])
def test_every_problem_is_answered_so_often_and_counts_by_the_share_that_passes(
    samples: int, before: float, after: float
) -> None:
    found, setting = held_out(eval_problems=3, eval_samples=samples)
    row, told = found.row(0), found.report()["held_out"]
    assert [len(asked) for asked in setting.asked] == [3 * samples] * 3
    assert {sample for _, sample in setting.asked[0]} == set(range(samples))
    assert row["gold"] == told["pass_at_1"] == after
    assert (told["pass_at_1_before"], told["n"]) == (before, 3)


@pytest.mark.parametrize("wrong", [{"eval_problems": 0}, {"eval_samples": 0}])
def test_counts_that_measure_nothing_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="eval_problems, eval_samples: expected at least 1 each"):
        SolvingConfig(**wrong)
