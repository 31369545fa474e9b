"""The stored numbers of the oracles (golden/README.md), and what a loop makes of a loss: what the tests of
objectives share.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.learning.losses import Loss
from pipeline.learning.update import Totals

Case = dict[str, Any]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6}


def cases(method: str) -> dict[str, Case]:
    """The cases of a file by name."""
    text = (Path(__file__).parent / "golden" / f"{method}.json").read_text(encoding="utf-8")
    return {case["name"]: case for case in json.loads(text)}


def tensors(inputs: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """The inputs that are lists; masks are booleans, ids whole numbers, null is not a number."""
    kinds = {"mask": torch.bool, "ids": torch.int64}
    return {
        name: torch.tensor(_known(value), dtype=kinds.get(name.split("_")[-1], dtype))
        for name, value in inputs.items()
        if isinstance(value, list)
    }


def _known(value: Any) -> Any:
    if isinstance(value, list):
        return [_known(part) for part in value]
    return float("nan") if value is None else value


def assert_near(found: Tensor | float, expected: Any, dtype: torch.dtype) -> None:
    """Equal within the tolerance of the README, relative or absolute, and of one shape."""
    is_value, should = torch.as_tensor(found).detach().double(), torch.tensor(expected, dtype=torch.float64)
    assert is_value.shape == should.shape, (is_value.shape, should.shape)
    worst = ((is_value - should).abs() / should.abs().clamp(min=1)).max()
    assert worst <= TOLERANCE[dtype], (float(worst), is_value, should)


def objective(loss: Loss, counts: dict[str, int]) -> Tensor:
    """What the loop minimises: the terms, each divided by its count."""
    return torch.stack([term.coefficient * term.sum / counts[term.per] for term in loss.terms]).sum()


def numbers(loss: Loss, counts: dict[str, int]) -> dict[str, float]:
    """What the loop shows of a step that is this loss alone."""
    totals = Totals(counts)
    totals.add(loss)
    return totals.values()
