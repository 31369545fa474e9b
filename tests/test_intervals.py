"""Intervals against numbers worked out by hand and against their promised coverage."""

import math

import numpy as np
import pytest
import torch

from pipeline.evaluation.intervals import Interval, effective_n, paired_difference, ratio, wilson


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"), [(0, 10, 0.0, 0.27753), (5, 10, 0.23659, 0.76341), (10, 10, 0.72247, 1.0)]
)
def test_wilson_gives_the_known_intervals(successes: int, n: int, low: float, high: float) -> None:
    interval = wilson(successes, n)
    assert (interval.low, interval.high) == (pytest.approx(low, abs=5e-6), pytest.approx(high, abs=5e-6))
    assert interval.value == successes / n and interval.n == n
    assert 0 <= interval.low <= interval.value <= interval.high <= 1


def test_the_bootstrap_covers_the_truth_about_95_times_in_100() -> None:
    random = np.random.default_rng(0)
    covered = 0
    for trial in range(400):
        values = random.exponential(1.0, 80)  # mean 1
        interval = ratio(values.tolist(), generator=seeded(trial), resamples=500)
        covered += interval.low <= 1.0 <= interval.high
    # An exponential's mean is covered a little less than 95%: 0.93 +- 3.5 standard errors.
    assert 0.89 <= covered / 400 <= 0.98


def test_a_ratio_is_formed_anew_in_each_resample() -> None:
    """All documents have two bits per byte, whatever their size: the ratio has no spread at all."""
    sizes = np.arange(1.0, 40)
    interval = ratio((2 * sizes).tolist(), sizes.tolist(), generator=seeded())
    assert (interval.value, interval.low, interval.high) == pytest.approx((2.0, 2.0, 2.0))
    assert interval.n == 39


def test_few_items_of_unequal_size_are_covered_as_many_equal_ones_are() -> None:
    """For 13 files whose sizes differ by an order of magnitude, bootstrap percentiles cover only 83%."""
    random = np.random.default_rng(0)
    sizes = random.lognormal(0, 1.2, 200_000)
    bits = sizes * 1.6 * np.exp(0.3 * random.standard_normal(len(sizes)) - 0.1 * np.log(sizes))
    truth, covered = bits.sum() / sizes.sum(), 0
    for _ in range(600):
        drawn = random.integers(0, len(sizes), 13)
        interval = ratio(bits[drawn].tolist(), sizes[drawn].tolist(), generator=seeded())
        covered += interval.low <= truth <= interval.high
    assert 0.92 <= covered / 600 <= 0.98


def test_the_jackknife_is_the_t_interval_of_a_mean_where_all_sizes_are_equal() -> None:
    """1, 2, 3: mean 2, standard error 1 / sqrt 3, t = 4.302653 with 2 degrees of freedom."""
    interval = ratio([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], generator=seeded())
    assert interval.high - interval.value == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
    assert effective_n([1.0, 1.0, 2.0]) == pytest.approx(16 / 6)
    one = ratio([2.0], [1.0], generator=seeded())
    assert (one.value, one.high, one.exp().high) == (2.0, math.inf, math.inf)


def test_percentiles_are_those_of_enumerated_resamples() -> None:
    """Items 0 and 1: resampled means are 0, 1/2, 1 with chances 1/4, 1/2, 1/4."""
    interval = ratio([0.0, 1.0], generator=seeded(), resamples=2000)
    assert (interval.value, interval.low, interval.high) == (0.5, 0.0, 1.0)


def test_pairing_removes_what_both_models_share() -> None:
    random = np.random.default_rng(1)
    hard = random.normal(0, 10, 200)  # items differ a lot
    first = (hard + random.normal(0, 0.1, 200)).tolist()
    second = (hard + 0.5 + random.normal(0, 0.1, 200)).tolist()
    paired = paired_difference((first, None), (second, None), generator=seeded(), resamples=2000)
    assert paired.low < 0.5 < paired.high and paired.high - paired.low < 0.1
    alone = ratio(first, generator=seeded())
    assert alone.high - alone.low > 1
    same = paired_difference((first, None), (first, None), generator=seeded(), resamples=100)
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)


def test_equal_generators_give_equal_intervals_and_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(2).normal(size=50).tolist()
    whole = ratio(values, generator=seeded(3))
    assert whole == ratio(values, generator=seeded(3)) != ratio(values, generator=seeded(4))
    monkeypatch.setattr("pipeline.evaluation.intervals.CHUNK", 1000)
    assert ratio(values, generator=seeded(3)) == whole


def test_what_has_no_interval_is_refused() -> None:
    for successes, n in ((0, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="wilson"):
            wilson(successes, n)
    with pytest.raises(ValueError, match="at least one item"):
        ratio([], generator=seeded())
    with pytest.raises(ValueError, match="one of each per item"):
        ratio([1.0], [1.0, 2.0], generator=seeded())
    with pytest.raises(ValueError, match="the same items"):
        paired_difference(([1.0], None), ([1.0, 2.0], None), generator=seeded())


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_share_that_is_the_same_for_all_has_wilsons_border(value: float) -> None:
    draws = torch.Generator().manual_seed(1)
    found = ratio([value] * 30, generator=draws)
    assert found == wilson(int(30 * value), 30)
    assert found.high - found.low > 0.1
    assert ratio([0.5] * 30, generator=draws) == Interval(0.5, 0.5, 0.5, 30)  # not a share of successes


def test_an_interval_is_as_wide_as_two_sided_95_percent_of_a_normal_mean() -> None:
    """1.96 standard errors to each side: 90% would be 1.645, 16% narrower."""
    values = np.random.default_rng(3).normal(5.0, 2.0, 4000)
    interval = ratio(values.tolist(), generator=seeded(), resamples=4000)
    error = values.std() / len(values) ** 0.5
    assert interval.high - values.mean() == pytest.approx(1.96 * error, rel=0.06)
    assert values.mean() - interval.low == pytest.approx(1.96 * error, rel=0.06)
