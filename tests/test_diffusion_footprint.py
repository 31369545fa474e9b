"""The planned memory of training a masked-diffusion model against what Linux measures."""

from typing import Any

import pytest

from pipeline.diffusion import model
from pipeline.learning import footprint
from tests.peak import FOUR, on_linux, planned_and_measured

CASES: dict[str, dict[str, Any]] = {"bf16": {}, "accumulating": {"micro_batch": 2}, "fp32": {"precision": "fp32"}}


@pytest.mark.slow
@pytest.mark.full
@on_linux
@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_within_a_fifth_of_the_measured_peak(name: str) -> None:
    planned_and_measured(FOUR | {"method": "diffusion"} | CASES[name])


def test_the_plan_knows_how_many_logits_come_at_once() -> None:
    assert footprint.MOST_MASKED_LOGITS == model.MOST_LOGITS
