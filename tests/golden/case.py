"""What a golden case is, how its inputs are drawn, and how it is written down.

Inputs are rounded to four decimals before the oracle sees them, so that the file has them exactly. Entries where a mask
is 0 are drawn like the others, so that a loss that ignores the mask is caught. Not guaranteed: the same ninth digit on
another processor.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of an oracle. README.md says which fields `inputs` and `expected` have."""

    name: str  # unique in its file
    oracle: str  # A, B or hand
    version: str
    call: str  # the function of the oracle
    seed: int | None  # of the inputs
    settings: dict[str, Any]  # the oracle's settings, by its own names
    inputs: dict[str, Any]
    expected: dict[str, Any]


def draw(generator: torch.Generator, *shape: int, low: float = -1.0, high: float = 1.0) -> Tensor:
    """Uniform numbers with four decimals."""
    return torch.round(torch.rand(*shape, generator=generator) * (high - low) + low, decimals=4)


def logprobs(generator: torch.Generator, *shape: int) -> Tensor:
    """Log-probabilities between -3 and -0.02."""
    return draw(generator, *shape, low=-3.0, high=-0.02)


def near(generator: torch.Generator, centre: Tensor, width: float) -> Tensor:
    """Log-probabilities within `width` of others, at most -0.01."""
    moved = centre + draw(generator, *centre.shape, low=-width, high=width)
    return torch.round(moved.clamp(max=-0.01), decimals=4)


def write(folder: Path, method: str, cases: list[Case]) -> Path:
    """Put the cases into the method's file, replacing those of the same oracle."""
    path = folder / f"{method}.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    kept = [old for old in kept if old["oracle"] not in {case.oracle for case in cases}]
    records = sorted([*kept, *map(_record, cases)], key=lambda record: record["oracle"])  # stable: keeps their order
    text = ",\n".join("{\n" + ",\n".join(f' "{k}": {json.dumps(v)}' for k, v in r.items()) + "\n}" for r in records)
    path.write_text(f"[\n{text}\n]\n", encoding="utf-8")
    return path


def _record(case: Case) -> dict[str, Any]:
    record = {**asdict(case), "inputs": _plain(case.inputs, "given"), "expected": _plain(case.expected, "found")}
    assert len(json.dumps(record)) < 8000, f"{case.name} is too long for a file that people read"
    return record


def _plain(value: Any, kind: str) -> Any:
    """Tensors as lists. Drawn inputs have four decimals, results nine digits; NaN becomes null."""
    if isinstance(value, Tensor):
        return _plain(value.tolist(), "drawn" if kind == "given" else kind)
    if isinstance(value, dict):
        return {key: _plain(part, kind) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, kind) for part in value]
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return None
    return {"given": value, "drawn": round(value, 4), "found": float(f"{value:.9g}")}[kind]
