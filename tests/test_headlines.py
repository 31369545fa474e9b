"""The headline numbers: found where they are stored, shown as people read them."""

import pytest

from pipeline.report.metrics import HEADLINES, Headline, lookup

RATE = Headline(("problems", "easy", "pass_at_1"), "Easy", "share", "easy")
BITS = Headline(("text", "bpb"), "Text", "bits per byte", "text_bpb", False, "bits per byte")


def test_a_number_is_found_by_its_path_with_its_interval() -> None:
    numbers = {"problems": {"easy": {"pass_at_1": 0.25, "pass_at_1_low": 0.2, "pass_at_1_high": 0.31}}}
    assert lookup(numbers, RATE) == {"value": 0.25, "low": 0.2, "high": 0.31}


@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"problems": {"skipped": "skipped: no sandbox"}},
        {"problems": {"easy": {"pass_at_1": "not finite"}}},
        {"problems": 3},
    ],
)
def test_what_was_not_measured_is_none(numbers: dict[str, object]) -> None:
    assert lookup(numbers, RATE) is None


def test_without_an_interval_the_value_is_all() -> None:
    assert lookup({"text": {"bpb": 2}}, BITS) == {"value": 2.0}
    odd = {"text": {"bpb": 2.0, "bpb_low": "not finite", "bpb_high": 2.5}}
    assert lookup(odd, BITS) == {"value": 2.0}


def test_shares_are_per_cent_and_their_changes_are_points() -> None:
    assert (RATE.show(0.12345), RATE.show_change(0.05), RATE.show_change(-0.125)) == (
        "12.3%",
        "+5.0 points",
        "−12.5 points",
    )
    assert (BITS.show(1.23456), BITS.show_change(-0.0625), BITS.show_change(0)) == ("1.235", "−0.062", "+0.000")


def test_no_number_stands_twice_and_shares_are_those_in_per_cent() -> None:
    assert (
        len({h.path for h in HEADLINES})
        == len({h.title for h in HEADLINES})
        == len({h.key for h in HEADLINES})
        == len(HEADLINES)
    )
    assert all((h.unit == "share") == (not h.path[-1].startswith("bpb")) for h in HEADLINES)
