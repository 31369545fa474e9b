"""The divergence of whole answers on held-out prompts, against enumeration and at zero."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.batches.pairs import PairSplit
from pipeline.evaluation import preferences
from pipeline.learning import reference
from pipeline.model.lora import AdapterConfig
from pipeline.rl import answers
from pipeline.run import device
from tests.workspace import Workspace

TOOLS = Path("models/tools")


def begun(adapter: AdapterConfig | None = None) -> reference.Start:
    return reference.begin(TOOLS, adapter, 1, device.hardware("fp32"))


def split(start: reference.Start) -> PairSplit:
    return PairSplit(Path("data/preferences/test.jsonl"), start.tokenizer, 60, 120)


def moved(start: reference.Start) -> None:
    """Change the policy a little, but not its reference."""
    draws = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in start.policy.parameters():
            if parameter.requires_grad:
                parameter += 0.03 * torch.randn(parameter.shape, generator=draws)


@pytest.mark.parametrize("adapter", [None, AdapterConfig(rank=2, alpha=4.0)])
def test_a_policy_that_did_not_move_has_none(adapter: AdapterConfig | None, workspace: Workspace) -> None:
    start = begun(adapter)
    found = preferences.compare_answers(start, TOOLS, split(start), device.hardware("fp32"), None, 1)["divergence"]
    assert found["kl"] == pytest.approx(0.0, abs=1e-6) and found["prompts"] == 6


@pytest.mark.parametrize("released", [False, True])
def test_the_mean_over_seeds_is_the_enumerated_divergence_of_the_first_token(
    released: bool, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preferences, "COMPARED_TOKENS", 1)
    start = begun()
    moved(start)
    pairs = split(start)
    prompts = answers.pair_prompts(pairs, 1000)
    exact = []
    for prompt in prompts:
        ids = torch.tensor([prompt.ids])
        with torch.no_grad(), start.reference.model() as frozen:
            ours, theirs = (model(ids)[0, -1].double().log_softmax(-1) for model in (start.policy.eval(), frozen))
        exact.append(float((ours.exp() * (ours - theirs)).sum()))
    if released:
        start.reference.release()
    hardware = device.hardware("fp32")
    compared = (preferences.compare_answers(start, TOOLS, pairs, hardware, None, seed) for seed in range(300))
    found = np.array([one["divergence"]["kl"] for one in compared])
    error = found.std() / np.sqrt(len(found))
    assert np.mean(exact) > 10 * error and abs(found.mean() - np.mean(exact)) < 4 * error


def test_the_stages_report_it_with_an_interval(workspace: Workspace) -> None:
    for stage in ("dpo", "kto"):
        ended = workspace.command(stage)
        assert ended.code == 0, ended.said
        found = workspace.numbers(stage)["divergence"]
        assert found["kl_low"] <= found["kl"] <= found["kl_high"] and found["kl"] > 0 and found["tokens"] > 1
