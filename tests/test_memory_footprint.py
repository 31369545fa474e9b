"""The planned RAM of a model with a memory includes the memory's weights and reads."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.learning import footprint
from pipeline.model.transformer import Transformer
from tests.peak import SMALL, TOTALS, WORK, at_32000, on_linux, planned_and_measured

READ = {
    "rows": 2048,
    "chapters": 31,
    "shared": 1,
    "top_k": 4,
    "layers": "all",
    "qk_norm": True,
    "gated": True,
    "bank_std": 1.0,
}
CASES: dict[str, dict[str, Any]] = {
    "a memory": {"shape": SMALL | {"memory": READ}, "rows": 8, "micro_batch": 8, "context": 256},
    "a memory in bf16": {
        "shape": SMALL | {"memory": READ},
        "rows": 8,
        "micro_batch": 8,
        "context": 256,
        "precision": "bf16",
    },
}


def test_a_model_s_own_memory_counts() -> None:
    config = at_32000("nano_memory")
    with torch.device("meta"):
        model = Transformer(config)
    assert footprint.weights_of(model) == footprint.full(config)
    assert footprint.full(config).trained == TOTALS["nano"] + 399_390  # the specs' count; see tests/test_memory.py
    work = replace(WORK, kind="cpu", row=256, context=256, selected=256)
    # two layers and the one at work. A token: normed 192, twice its copy; queries and result twice; queries before
    # their norm; 3 heads of 5 * 64 shares. A unit of 64: its chapters' keys and values of 64 numbers
    token, unit = 8 * 192 + 2 * 2 * 4 * 192 + 4 * 192 + 4 * 3 * 320, 2 * 320 * 64 * 4
    assert footprint.hook_bytes(config, work, 64) == 3 * (64 * token + unit)
    whole = 1024 * 64 * 12  # four units choose 16 of 15 chapters: all keys, those before their norm, all values
    assert footprint.hook_bytes(config, work, 256) == 3 * (256 * token + 4 * unit + whole)
    assert footprint.hook_bytes(at_32000("nano"), work, 256) == 0


@pytest.mark.slow
@pytest.mark.full
@on_linux
@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_within_a_fifth_of_the_measured_peak(name: str) -> None:
    planned_and_measured(CASES[name])
