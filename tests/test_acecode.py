"""AceCode: reduced rows, hand-computed difficulties, and the two versions of a question."""

from typing import Any

import numpy as np
import pytest

from pipeline.ingest import hub


def row(rates: list[float], question: str = "Do you f?", completion: str = "def f(x): return x") -> dict[str, Any]:
    names = [*hub.MODELS] * len(rates)
    inferences = [
        {"model_name": name, "completion": completion, "pass_rate": rate}
        for name, rate in zip(names, rates, strict=False)
    ]
    other = {"model_name": "another", "completion": "def f(x): return 0", "pass_rate": 0.0}
    return hub.reduce(
        {
            "id": "7",
            "question": question,
            "test_cases": ["assert f(1) == 1", "assert f(2) == 2"],
            "inferences": [*inferences, other],
        }
    )


def test_difficulties_are_percentiles_of_the_full_set() -> None:
    # Means 0.0, 0.1, ..., 1.0; standard deviations 0 for even tenths, 0.1 for odd ones.
    rates = [[n / 10, n / 10] if n % 2 == 0 else [n / 10 - 0.1, n / 10 + 0.1] for n in range(11)]
    limits = hub.thresholds(rates)
    assert (limits.hard_mean, limits.medium_mean, limits.easy_mean) == pytest.approx((0.2, 0.25, 0.75))
    assert limits.hard_std == pytest.approx(0.0)  # six of eleven are 0: the 40th percentile is the fifth of ten steps
    taken = {level: [n for n in range(11) if limits.takes(rates[n], level)] for level in hub.LEVELS}
    assert taken == {"hard": [0, 1, 2], "medium": [3, 4, 5, 6, 7], "easy": [8, 9, 10]}
    spread = hub.thresholds([[n / 10, n / 10] if n < 3 else [n / 10 - 0.1, n / 10 + 0.1] for n in range(11)])
    assert spread.hard_std == pytest.approx(0.1)
    assert not spread.takes([0.0, 0.0], "hard") and spread.takes([0.0, 0.25], "hard")


def test_only_the_two_models_count_and_questions_without_them_are_no_part_of_the_full_set() -> None:
    assert row([0.25, 0.75])["pass_rates"] == [0.25, 0.75]
    assert hub.thresholds([[], [0.5, 0.5]]).hard_mean == 0.5
    assert not hub.thresholds([[0.5]]).takes([], "hard")


def test_a_question_without_a_code_block_shows_its_first_test() -> None:
    limits = hub.thresholds([[0.0]])
    (plain,) = hub.problems(row([0.0]), limits, None)
    assert plain.question == "Do you f?\n\nFor example:\n```python\nassert f(1) == 1\n```"
    assert [test["visible"] for test in plain.tests] == [True, False] and plain.entry_point == "f"
    (block,) = hub.problems(row([0.0], "Do you ```f```?"), limits, None)
    assert block.question == "Do you ```f```?" and not any(test["visible"] for test in block.tests)


def test_a_question_that_speaks_to_nobody_comes_again_as_a_docstring() -> None:
    limits = hub.thresholds([[0.5]])
    first, second = hub.problems(row([1.0], 'Give """x"""\nback.', "def f(x: int) -> int:\n    return x"), limits, None)
    assert (
        second.question == "```python\ndef f(x: int) -> int:\n    \"\"\"\n    Give '''x'''\n    back.\n    \"\"\"\n```"
    )
    assert (first.id, second.id, first.key, second.key) == ("7", "7/signature", "7", "7")
    assert first.answer == "def f(x: int) -> int:\n    return x"
    assert len(hub.problems(row([0.5], "Give x.", "import re\ndef f(x): return x"), limits, None)) == 1
    assert len(hub.problems(row([0.5], "Give x.", "def g(x): return x"), limits, None)) == 1


def test_an_answer_passed_every_test() -> None:
    limits = hub.thresholds([[0.5]])
    assert hub.problems(row([0.9]), limits, None)[0].answer is None
    assert hub.problems(row([1.0]), limits, None)[0].answer == "def f(x): return x"


def test_the_best_completion_is_the_first_with_the_highest_pass_rate() -> None:
    rates = np.array([0.2, 0.9, 0.9])
    inferences = [{"model_name": "m", "completion": str(n), "pass_rate": float(rate)} for n, rate in enumerate(rates)]
    assert hub.reduce({"inferences": inferences})["best"] == {"completion": "1", "pass_rate": 0.9}
    assert hub.reduce({})["best"] == {"completion": None, "pass_rate": None}
