"""Sums of losses, metrics and extremes: parts against the whole, the state as JSON, and that only a whole step is
refused.
"""

import json
import math

import pytest
import torch

from pipeline.learning.losses import Loss, Term
from pipeline.learning.update import LoggingWindow, Totals


def loss(values: list[float], *, coefficient: float = 0.5) -> Loss:
    """Two terms with different counts, a metric with a third, and both extremes."""
    row = torch.tensor(values)
    terms = [Term("first", row.sum()), Term("second", row.square().sum(), "rows", coefficient)]
    metrics = {"share": ((row > 1).sum(), 2 * len(values))}
    extremes = {"min_value": row.amin(), "max_value": row.amax()} if values else {}
    return Loss(terms, metrics, extremes)


def totals(counts: dict[str, int], *losses: Loss) -> Totals:
    found = Totals(dict(counts))
    for one in losses:
        found.add(one)
    return found.settle()


COUNTS = {"tokens": 8, "rows": 4}
BY_HAND = {
    "loss": 10 / 8 + 0.5 * 30 / 4,
    "first": 10 / 8,
    "second": 30 / 4,
    "share": 3 / 8,
    "min_value": 1.0,
    "max_value": 4.0,
}


def test_values_are_sums_over_counts_and_the_loss_weighs_its_terms() -> None:
    found = totals(COUNTS, loss([1.0, 2.0, 3.0, 4.0]))
    assert found.values() == pytest.approx(BY_HAND)
    assert found.value == pytest.approx(BY_HAND["loss"])


@pytest.mark.parametrize("parts", [[[1.0, 2.0], [3.0, 4.0]], [[], [4.0], [], [1.0, 3.0, 2.0], []]])
def test_micro_batches_equal_one(parts: list[list[float]]) -> None:
    assert totals(COUNTS, *map(loss, parts)).values() == pytest.approx(BY_HAND)


def test_a_loss_of_one_term_has_no_row_for_it_and_bytes_give_bits() -> None:
    found = totals({"tokens": 2, "bytes": 6}, Loss([Term("loss", torch.tensor(3.0))]))
    assert found.values() == {
        "loss": 1.5,
        "bpb": pytest.approx(3 / (6 * math.log(2))),
        "perplexity": pytest.approx(math.exp(1.5)),
    }
    huge = totals({"tokens": 2, "bytes": 6}, Loss([Term("loss", torch.tensor(3e9))]))
    assert math.isfinite(huge.values()["perplexity"])


def test_a_term_or_metric_without_a_count_drops_out() -> None:
    found = totals(
        {"tokens": 2, "rows": 0},
        Loss([Term("a", torch.tensor(3.0)), Term("b", torch.tensor(1.0), "rows")], {"none": (torch.tensor(0.0), 0)}),
    )
    assert found.values() == {"loss": 1.5, "a": 1.5}


def test_a_merge_adds_counts_and_sums_so_long_steps_weigh_more() -> None:
    """One step of 8 tokens in 4 rows and one of 2 tokens in 1 row; the result is not the mean of their means."""
    first = totals(COUNTS, loss([1.0, 2.0, 3.0, 4.0]))
    first.merge(totals({"tokens": 2, "rows": 1}, loss([7.0])))
    assert first.counts == {"tokens": 10, "rows": 5}
    assert first.values() == pytest.approx(
        {
            "loss": 17 / 10 + 0.5 * 79 / 5,
            "first": 17 / 10,
            "second": 79 / 5,
            "share": 4 / 10,
            "min_value": 1.0,
            "max_value": 7.0,
        }
    )


def test_a_merge_into_nothing_is_the_other_and_leaves_it_alone() -> None:
    other = totals(COUNTS, loss([1.0, 2.0, 3.0, 4.0]))
    found = Totals({})
    found.merge(other)
    found.merge(totals(COUNTS, loss([9.0])))
    assert other.values() == pytest.approx(BY_HAND)


def test_a_merge_weighs_a_term_as_the_newer_step_does() -> None:
    first = totals(COUNTS, loss([1.0], coefficient=0.5))
    first.merge(totals(COUNTS, loss([1.0], coefficient=0.25)))
    assert first.value == pytest.approx(2 / 16 + 0.25 * 2 / 8)


def test_extremes_go_by_their_name() -> None:
    found = totals(COUNTS, loss([3.0]), loss([5.0]), loss([4.0]))
    assert found.extremes == {"min_value": 3.0, "max_value": 5.0}
    found.merge(totals(COUNTS, loss([-1.0]), loss([9.0])))
    assert found.extremes == {"min_value": -1.0, "max_value": 9.0}


def test_a_window_travels_as_json_and_goes_on_as_if_nothing_had_happened() -> None:
    steps = [totals(COUNTS, loss([0.1, 0.7, 1.3])), totals(COUNTS, loss([1 / 3])), totals(COUNTS, loss([1e-9, 2.0]))]
    whole, first = LoggingWindow(), LoggingWindow()
    for number, step in enumerate(steps):
        whole.add(step, norm=0.3 * number)
    first.add(steps[0], norm=0.0)
    resumed = LoggingWindow.of(json.loads(json.dumps(first.state())))
    for number, step in enumerate(steps[1:], start=1):
        resumed.add(step, norm=0.3 * number)
    assert resumed.state() == whole.state()  # bit for bit: a resumed curve has no seam
    assert (whole.steps, whole.norm) == (3, pytest.approx(0.9))
    assert resumed.totals.values() == whole.totals.values()


def test_an_empty_window_travels_too() -> None:
    assert LoggingWindow.of(json.loads(json.dumps(LoggingWindow().state()))).state() == LoggingWindow().state()


def limited(ratios: list[float]) -> Loss:
    row = torch.tensor(ratios)
    return Loss([Term("policy", row.sum())], {"ratio": (row.sum(), len(ratios))}, limits={"ratio": 10.0})


@pytest.mark.parametrize(
    ("parts", "refused"),
    [
        ([[1.0, 1.0, 1.0], [30.0]], False),  # a mean of 8.25, though the last micro-batch alone is above 10
        ([[1.0, 30.0], [1.0, 30.0]], True),
        ([[10.0], [10.0]], False),
        ([[1.0], [math.nan]], True),
        ([[], [1.0]], False),
        ([[]], False),
    ],
)
def test_a_step_is_refused_for_its_whole_mean_however_it_is_cut(parts: list[list[float]], refused: bool) -> None:
    for cut in (parts, [[one for part in parts for one in part]]):
        assert bool(totals({"tokens": 4}, *map(limited, cut)).veto) == refused


def test_the_refusal_says_what_is_above_which_limit() -> None:
    assert totals({"tokens": 1}, limited([12.34])).veto == "the mean of ratio is 12.3, above 10"
    assert totals({"tokens": 1}, loss([1.0])).veto == ""
