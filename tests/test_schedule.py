"""Schedules against numbers worked out by hand."""

import pytest

from pipeline.learning.settings import SCHEDULES, factor


@pytest.mark.parametrize("name", SCHEDULES)
def test_warmup_ends_at_one_and_the_run_at_min_ratio(name: str) -> None:
    options = {"name": name, "steps": 100, "warmup": 10, "min_ratio": 0.1, "cycles": 3}
    assert factor(9, **options) == 1.0
    assert factor(0, **options) == pytest.approx(0.1)
    assert factor(99, **options) == pytest.approx(1.0 if name == "constant" else 0.1)


def test_cosine_half_way_is_the_mean_of_both_ends() -> None:
    assert factor(50, name="cosine", steps=101, warmup=0, min_ratio=0.2) == pytest.approx(0.6)


def test_linear_is_a_straight_line() -> None:
    values = [factor(s, name="linear", steps=11, warmup=0, min_ratio=0.0) for s in range(11)]
    assert values == pytest.approx([1 - s / 10 for s in range(11)])


def test_each_restart_gives_one() -> None:
    values = [factor(s, name="cosine_with_restarts", steps=101, warmup=0, min_ratio=0.0, cycles=4) for s in range(101)]
    assert [s for s, v in enumerate(values) if v == 1.0] == [0, 25, 50, 75]
    assert values[100] == 0.0


def test_wsd_holds_one_until_the_decay_begins() -> None:
    values = [factor(s, name="wsd", steps=100, warmup=0, min_ratio=0.0, decay_ratio=0.2) for s in range(100)]
    assert values[79] == 1.0
    assert values[80] == pytest.approx(1 - 1 / 20)
    assert values[99] == pytest.approx(0.0)


def test_an_unknown_schedule_is_named() -> None:
    with pytest.raises(ValueError, match="cosine_with_restarts"):
        factor(5, name="cosin", steps=10, warmup=0, min_ratio=0.1)
