"""What may be said about a training run, and what it resolves to."""

from typing import Any

import pytest

from pipeline.learning import schedule
from pipeline.learning.settings import FitConfig, PairConfig


def config(**changes: Any) -> FitConfig:
    values: dict[str, Any] = {"steps": 100, "tokens_per_step": 4096, "context": 512, "learning_rate": 1e-3}
    return FitConfig(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 5}, r"exactly one of steps, tokens, epochs; got steps, tokens"),
        ({"steps": None}, r"exactly one of steps, tokens, epochs; got none"),
        ({"steps": 0}, r"steps: expected more than 0, got 0"),
        ({"steps": None, "epochs": -0.5}, r"epochs: expected more than 0, got -0\.5"),
        ({"tokens_per_step": 1000}, r"tokens_per_step 1000 is not a multiple of context 512; try 512"),
        ({"tokens_per_step": 1500}, r"try 1024"),
        ({"tokens_per_step": 0}, r"try 512"),
        ({"tokens_per_step": 100}, r"try 512"),
        ({"warmup_steps": 3, "warmup_ratio": 0.1}, r"at most one of warmup_steps and warmup_ratio"),
        ({"optimizer": "sgd"}, r"optimizer: expected one of adamw, muon, got 'sgd'"),
        (
            {"schedule": "cos"},
            r"schedule: expected one of constant, linear, cosine, cosine_with_restarts, wsd, got 'cos'",
        ),
        ({"publish": "first"}, r"publish: expected one of best, last"),
        ({"on_nonfinite": "go"}, r"on_nonfinite: expected one of skip, stop"),
        ({"context": 1, "tokens_per_step": 4}, r"context >= 2"),
        ({"eval_steps": 0}, r"eval_steps >= 1"),
        ({"betas": (0.9,)}, r"two betas"),
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
    "keys",
    [
        {"schedule": "constant"},
        {"schedule": "linear", "min_ratio": 0.3},
        {"schedule": "cosine", "min_ratio": 0.0},
        {"schedule": "cosine_with_restarts", "cycles": 4},
        {"schedule": "wsd", "decay_ratio": 0.5},
    ],
    ids=str,
)
def test_the_rate_follows_the_schedule_with_the_keys_that_were_given(keys: dict[str, Any]) -> None:
    """Against the schedule itself, at every step; the default of the last key would give another curve."""

    def curve(values: dict[str, Any]) -> list[float]:
        named = {"min_ratio": 0.1, "warmup": 0} | values
        name = named.pop("schedule")
        return [schedule.factor(step, name=name, steps=50, **named) for step in range(50)]

    found = [config(**keys).factor(step, 50) for step in range(50)]
    assert found == pytest.approx(curve(keys))
    last = list(keys)[-1]
    if last != "schedule":
        assert found != pytest.approx(curve({name: value for name, value in keys.items() if name != last}))


@pytest.mark.parametrize(("changes", "steps"), [({"steps": 7}, 7), ({"epochs": 2.5}, 25), ({"epochs": 0.01}, 1)])
def test_a_run_over_pairs_is_so_many_steps_or_so_often_over_them(changes: dict[str, Any], steps: int) -> None:
    """Of 80 pairs, 8 a step, two answers of at most 64 tokens each."""
    settings = PairConfig(pairs=8, max_prompt=32, max_length=64, learning_rate=1e-3, **changes)
    assert settings.rows == 8
    assert settings.resolve_steps(tokens_per_epoch=80 * 2 * 64) == steps
