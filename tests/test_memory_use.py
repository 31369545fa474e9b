"""What is reported about a memory's use: shares, evenness, chapters that are never chosen, and complaints in words."""

import math
from typing import Any

import pytest
import torch

from pipeline.memory.training import UNUSED, Use, summary, verdicts


def test_shares_evenness_and_deviation_by_hand() -> None:
    use = Use(
        torch.tensor([6.0, 2.0, 0.0, 0.0]), squares=8.0, logits=2, measured=[{"read_share": 0.1}, {"read_share": 0.3}]
    )
    told = use.numbers()
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    assert told["chapter_entropy"] == pytest.approx(entropy)
    assert told["chapter_cv"] == pytest.approx(math.sqrt((0.5**2 + 0.25**2 + 0.25**2) / 4) / 0.25)
    assert (told["chapters_unused"], told["largest_share"], told["logit_rms"]) == (2.0, 0.75, 2.0)
    assert told["read_share"] == pytest.approx(0.2)
    assert [told[f"chapter/{n:02d}"] for n in range(4)] == [0.75, 0.25, 0.0, 0.0]
    assert Use(torch.ones(5)).numbers()["chapter_entropy"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("numbers", "complaint"),
    [
        ({"memory/3/chapters_unused": 2.0}, ""),  # a fifth of ten
        ({"memory/3/chapters_unused": 3.0}, "layer 3: 3 of 10 chapters are never chosen"),
        ({"memory/random_costs_bpb": 0.0}, "the router is useless"),
        ({"memory/random_costs_bpb": 0.1, "memory/gain_bpb": 0.1}, ""),
        ({"memory/gain_bpb": -0.01}, "the memory is useless"),
    ],
)
def test_complaints(numbers: dict[str, float], complaint: str) -> None:
    said = verdicts(numbers, 10)
    assert len(said) == bool(complaint) and all(complaint in one for one in said)
    assert UNUSED == 0.2


def test_the_summary_leaves_single_chapters_out() -> None:
    told: dict[str, Any] = {"memory/3/chapter/01": 0.5, "memory/3/chapter_cv": 0.1, "memory/gain_bpb": 0.2}
    assert summary(told) == {"3/chapter_cv": 0.1, "gain_bpb": 0.2}
