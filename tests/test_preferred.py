"""The chance that an answer is preferred to the reference's own, worked out by hand."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from pipeline.rl import rewards as rl_rewards
from pipeline.rl.answers import Answer, Prompt
from pipeline.rl.rewards import Preferred, chance
from tests import rollouts


def test_the_chance_is_the_mean_over_the_reference_s_answers() -> None:
    """sigmoid(0) = 1/2 and sigmoid(ln 3) = 3/4."""
    assert chance(1.0, np.array([1.0, 1.0 - math.log(3)])) == pytest.approx(0.625)
    assert chance(-2000.0, np.array([0.0, 1000.0], dtype=np.float32)) == pytest.approx(0.0)


def asked(offsets: dict[str, float]) -> tuple[Preferred, list[tuple[str, int]]]:
    """An answer's reward is its first id in tenths plus an offset for its prompt."""

    def rewards(given: Sequence[Answer]) -> np.ndarray:
        return np.array([one.ids[0] / 10 + offsets[one.prompt.id] for one in given], dtype=np.float32)

    requests: list[tuple[str, int]] = []

    def generate(wanted: Sequence[tuple[Prompt, int]]) -> list[Answer]:
        requests.extend((prompt.id, number) for prompt, number in wanted)
        return [rollouts.answer(prompt, number, [10 * number]) for prompt, number in wanted]

    found = Preferred(rewards)
    found.ask([rollouts.prompt(n) for n in range(3)], generate)
    return found, requests


def test_the_reference_answers_each_prompt_twice_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rl_rewards, "PROMPTS", 2)  # the last batch is not full
    names = [rollouts.prompt(n).id for n in range(3)]
    found, requests = asked(dict.fromkeys(names, 0.0))
    assert requests == [(name, number) for name in names for number in (0, 1)]
    assert {name: row.tolist() for name, row in found.theirs.items()} == {name: [0.0, 1.0] for name in names}


def test_an_offset_of_a_prompt_changes_nothing() -> None:
    names = [rollouts.prompt(n).id for n in range(3)]
    answers = [rollouts.answer(rollouts.prompt(n), 5, [first]) for n, first in ((0, 10), (1, 10), (2, 0))]
    expected = [(math.exp(1) / (1 + math.exp(1)) + 0.5) / 2 - 0.5] * 2 + [(0.5 + 1 / (1 + math.exp(1))) / 2 - 0.5]
    for offsets in ([0.0, 0.0, 0.0], [3.0, -7.0, 0.25]):
        found, _ = asked(dict(zip(names, offsets, strict=True)))
        assert found(answers) == pytest.approx(expected, rel=1e-5)
