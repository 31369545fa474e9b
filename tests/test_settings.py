"""The settings of a training run, and what they resolve to."""

from typing import Any

import pytest

from pipeline.learning.settings import FitConfig, PairConfig
from tests.settings import flat


def config(**changes: Any) -> FitConfig:
    values: dict[str, Any] = {"steps": 100, "tokens_per_step": 4096, "context": 512, "learning_rate": 1e-3}
    return flat(FitConfig, **(values | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokens": 5},
            (
                r"exactly one of steps, tokens, epochs; got steps, tokens; unset the others, for"
                r" example tokens=none"
            ),
        ),
        ({"steps": None}, r"exactly one of steps, tokens, epochs; got none"),
        ({"steps": 0}, r"steps: expected more than 0, got 0"),
        ({"steps": None, "epochs": -0.5}, r"epochs: expected more than 0, got -0\.5"),
        ({"tokens_per_step": 1000}, r"tokens_per_step 1000 is not a multiple of context 512; try 512"),
        ({"tokens_per_step": 1500}, r"try 1024"),
        ({"tokens_per_step": 0}, r"try 512"),
        ({"tokens_per_step": 100}, r"try 512"),
        ({"warmup_steps": 3, "warmup_ratio": 0.1}, r"at most one of `warmup_steps` and `warmup_ratio`"),
        ({"optimizer": "sgd"}, r"optimizer: expected one of adamw, muon, got 'sgd'"),
        (
            {"schedule": "cos"},
            r"schedule: expected one of constant, linear, cosine, cosine_with_restarts, wsd, got 'cos'",
        ),
        ({"publish": "first"}, r"publish: expected one of best, last"),
        ({"on_nonfinite": "go"}, r"on_nonfinite: expected one of skip, stop"),
        ({"context": 1, "tokens_per_step": 4}, r"context >= 2"),
        ({"eval_steps": 0}, r"eval_steps: expected at least 1, got 0"),
        ({"betas": (0.9,)}, r"betas: expected two numbers in \[0, 1\), got \[0.9\]"),
        ({"betas": (1.5, 0.9)}, r"betas: expected two numbers"),
        ({"weight_decay": -1.0}, r"weight_decay: expected at least 0, got -1.0"),
        ({"learning_rate": -1e-3}, r"learning_rate: expected at least 0"),
        ({"max_grad_norm": -1.0}, r"max_grad_norm: expected at least 0"),
        ({"eps": 0.0}, r"eps: expected more than 0"),
        ({"cycles": 0}, r"cycles: expected at least 1, got 0"),
        ({"min_ratio": 1.5}, r"min_ratio: expected at most 1, got 1.5"),
        ({"decay_ratio": -0.1}, r"decay_ratio: expected at least 0"),
        ({"warmup_ratio": 2.0}, r"warmup_ratio: expected at most 1"),
        ({"warmup_steps": -1}, r"warmup_steps: expected at least 0"),
        ({"patience": -1}, r"patience: expected at least 0"),
    ],
)
def test_a_run_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_rows_are_tokens_over_context() -> None:
    assert config().rows == 8
    assert config(context=4096).rows == 1


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"steps": 7}, 7),
        ({"steps": None, "tokens": 40_960}, 10),
        ({"steps": None, "tokens": 1}, 1),
        ({"steps": None, "epochs": 2.5}, 25),  # of 10 steps each
    ],
)
def test_length_resolves_to_steps(changes: dict[str, Any], steps: int) -> None:
    assert config(**changes).resolve_steps(tokens_per_epoch=40_960) == steps


def test_the_warm_up_is_steps_or_a_share_of_them() -> None:
    by_steps, by_ratio = config(warmup_steps=10), config(warmup_ratio=0.1)
    for step, expected in ((0, 0.1), (4, 0.5), (9, 1.0)):
        assert by_steps.factor(step, 100) == by_ratio.factor(step, 100) == pytest.approx(expected)
    assert by_steps.factor(99, 100) == pytest.approx(0.1)  # min_ratio at the last step


@pytest.mark.parametrize(
    ("schedule", "values"),  # at steps 25, 50 and 90 of 101: a quarter, a half and nine tenths of the way
    [
        ("constant", [1.0, 1.0, 1.0]),
        ("linear", [0.775, 0.55, 0.19]),  # 1 - 0.9 p
        ("cosine", [0.868198, 0.55, 0.122025]),  # 0.1 + 0.45 (1 + cos pi p)
        ("wsd", [1.0, 1.0, 0.55]),  # the last 20 steps decay, of which step 90 is the tenth
    ],
)
def test_the_schedule_is_the_one_that_is_named(schedule: str, values: list[float]) -> None:
    named = config(schedule=schedule)
    assert [named.factor(step, 101) for step in (25, 50, 90)] == pytest.approx(values, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "step", "expected"),
    [
        ({"schedule": "linear", "min_ratio": 0.3}, 50, 0.65),  # 1 - 0.7 / 2
        ({"schedule": "linear", "min_ratio": 0.3}, 100, 0.3),
        ({"schedule": "cosine", "min_ratio": 0.0}, 50, 0.5),
        ({"schedule": "cosine_with_restarts"}, 50, 0.55),  # one cycle is the cosine
        ({"schedule": "cosine_with_restarts", "cycles": 2}, 50, 1.0),  # the second one begins
        ({"schedule": "cosine_with_restarts", "cycles": 2}, 25, 0.55),
        ({"schedule": "cosine_with_restarts", "cycles": 4}, 25, 1.0),
        ({"schedule": "wsd", "decay_ratio": 0.5}, 61, 0.802),  # the eleventh of the last 50 steps: 1 - 0.9 * 11 / 50
        ({"schedule": "wsd", "decay_ratio": 0.1}, 90, 1.0),
    ],
)
def test_the_schedule_is_shaped_by_its_keys(changes: dict[str, Any], step: int, expected: float) -> None:
    assert config(**changes).factor(step, 101) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "steps"), [({"steps": 7}, 7), ({"epochs": 1.0}, 5), ({"epochs": 2.5}, 12), ({"epochs": 0.01}, 1)]
)
def test_epochs_over_pairs_resolve_to_steps(changes: dict[str, Any], steps: int) -> None:
    pairs = PairConfig(learning_rate=1e-3, pairs=4, max_prompt=50, max_length=100, **changes)
    assert pairs.resolve_steps(tokens_per_epoch=20 * 2 * 100) == steps  # 20 pairs of two answers, four a step
