"""Shared by the tests of objectives: the oracles' stored numbers (golden/README.md), our losses on their inputs, and
what the loop makes of a loss.
"""

import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.batches.batch import Answered
from pipeline.learning.losses import Loss
from pipeline.learning.policy_losses import Clip, GroupMethod, group_policy, ppo
from pipeline.learning.update import Totals

Case = dict[str, Any]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6}
VERSIONS = {"A": "1.12.0", "B": "0.11.4", "hand": "1"}
I = -100  # noqa: E741 (nothing is trained here)


def cases(method: str) -> dict[str, Case]:
    """The cases in a file, by name."""
    text = (Path(__file__).parent / "golden" / f"{method}.json").read_text(encoding="utf-8")
    return {case["name"]: case for case in json.loads(text)}


def tensors(inputs: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """The inputs that are lists; masks become booleans, ids integers, null NaN."""
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
    """Check that shapes are equal, and values within the README's tolerance, relative or absolute."""
    is_value, should = torch.as_tensor(found).detach().double(), torch.tensor(expected, dtype=torch.float64)
    assert is_value.shape == should.shape, (is_value.shape, should.shape)
    worst = ((is_value - should).abs() / should.abs().clamp(min=1)).max()
    assert worst <= TOLERANCE[dtype], (float(worst), is_value, should)


def objective(loss: Loss, counts: dict[str, int]) -> Tensor:
    """What the loop minimizes: the sum of the terms, each divided by its count."""
    return torch.stack([term.coefficient * term.sum / counts[term.per] for term in loss.terms]).sum()


def numbers(loss: Loss, counts: dict[str, int]) -> dict[str, float]:
    """What the loop logs for a step that consists of this loss alone."""
    totals = Totals(counts)
    totals.add(loss)
    return totals.values()


def ppo_loss(given: dict[str, Tensor], chosen: Tensor, **changes: Any) -> Loss:
    """Our loss on the chosen tokens of a case; entropies are 0.5."""
    rows = {name: given[name][chosen] for name in ("policy", "values", "old", "old_values", "advantages", "returns")}
    knobs: dict[str, Any] = {"clip": Clip(0.2, 0.2), "value_clip": 0.2, "value_weight": 0.1} | changes
    entropy = torch.full_like(rows["old"], 0.5)
    return ppo(rows.pop("policy"), entropy, rows.pop("values"), **rows, **knobs)


def group_loss(given: dict[str, Tensor], method: GroupMethod, max_tokens: int, rows: slice = slice(None)) -> Loss:
    """Our loss on some answers; advantages are (B,) or (B, T), entropies 0.5."""
    mask = given["mask"][rows]
    row_of = torch.arange(len(mask))[:, None].expand_as(mask)[mask]
    flat = {name: given[name][rows][mask] for name in ("policy", "old", "reference") if name in given}
    advantages = given["advantages"][rows]
    advantages = advantages[mask] if advantages.ndim == 2 else advantages[row_of]
    reference = flat["reference"] if method.kl_in == "loss" and method.beta else None
    return group_policy(
        flat["policy"],
        torch.full_like(flat["old"], 0.5),
        old=flat["old"],
        advantages=advantages,
        reference=reference,
        row_of=row_of,
        num_rows=len(mask),
        method=method,
        max_tokens=max_tokens,
    )


def counts_of(given: dict[str, Tensor]) -> dict[str, int]:
    return {"tokens": int(given["mask"].sum()), "sequences": len(given["mask"])}


class Given(nn.Module):
    """Answers every call with the same logits (B, T, V), at the requested positions."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(
        self, input_ids: Tensor, *, positions: Tensor, documents: Tensor, select: Tensor, head: Any = None
    ) -> Any:
        assert input_ids.shape == positions.shape == documents.shape == select.shape == self.logits.shape[:2]
        states = self.logits[select]
        return states if head is None else head(states, torch.eye(states.shape[-1], dtype=states.dtype), None)


def rows_of(ids: Tensor, mask: Tensor) -> Answered:
    """A batch with each target where it is predicted, so that nothing needs shifting."""
    zero = torch.zeros_like(ids)
    return Answered(zero, ids.where(mask, I), zero.int(), zero)


def interpreter(oracle: str) -> str:
    """The Python interpreter that has the oracle; skips the test if none does."""
    named = os.environ.get(f"STAGECOACH_TRL_{oracle}")
    if named or oracle == "hand":
        return named or sys.executable
    try:
        found = metadata.version("trl")
    except metadata.PackageNotFoundError:
        found = "none"
    if found != VERSIONS[oracle]:
        pytest.skip(
            f"needs trl {VERSIONS[oracle]} (found: {found}) or STAGECOACH_TRL_{oracle}; see tests/golden/make.py"
        )
    return sys.executable
