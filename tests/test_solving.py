"""Held-out problems: how many are asked, how many answers to each, and what share of them passes."""

from collections.abc import Sequence
from typing import Any

import pytest

from pipeline.evaluation.solving import HeldOut, SolvingConfig
from pipeline.reinforcement.answers import Answer, Prompt
from tests.workspace import problem


class Setting:
    """Answers whose text says which they are; the second to each problem of the policy passes."""

    seed = 1

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def held_out(self, asked: Sequence[tuple[Prompt, int]], *, of_reference: bool = False) -> list[Answer]:
        self.asked = [(prompt.id, sample) for prompt, sample in asked]
        return [
            Answer(prompt, n, [5], [-1.0], True, "passed" if n == 1 and not of_reference else "wrong")
            for prompt, n in asked
        ]

    def divergence(self, given: Sequence[Answer]) -> tuple[float, float]:
        return 0.25, 0.5


def held_out(monkeypatch: pytest.MonkeyPatch, **config: int) -> tuple[HeldOut, Setting]:
    prompts = [Prompt(str(n), [1], "code", problem(n)) for n in range(5)]
    setting: Any = Setting()
    found = HeldOut(prompts, setting, None, SolvingConfig(**config))
    monkeypatch.setattr(found, "judge", object())
    monkeypatch.setattr(found, "_verdicts", lambda answers: [answer.text for answer in answers])
    return found, setting


@pytest.mark.parametrize(("problems", "samples"), [(3, 1), (2, 2), (9, 4)])
def test_so_many_problems_are_asked_so_often(monkeypatch: pytest.MonkeyPatch, problems: int, samples: int) -> None:
    measured, setting = held_out(monkeypatch, eval_problems=problems, eval_samples=samples)
    row = measured.row(0)
    asked = min(problems, 5)
    assert len({name for name, _ in setting.asked}) == asked
    assert sorted(n for _, n in setting.asked) == sorted([*range(samples)] * asked)
    assert row["gold"] == pytest.approx(0.0 if samples == 1 else 1 / samples)  # one of the answers to each passes


def test_the_policy_is_compared_with_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, _ = held_out(monkeypatch, eval_problems=4, eval_samples=2)
    told = measured.report()["held_out"]
    assert (told["pass_at_1_before"], told["pass_at_1"], told["gain"], told["n"]) == (0.0, 0.5, 0.5, 4)


@pytest.mark.parametrize("wrong", [{"eval_problems": 0}, {"eval_samples": 0}])
def test_counts_that_measure_nothing_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected eval_problems and eval_samples of at least 1"):
        SolvingConfig(**wrong)
