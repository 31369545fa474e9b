"""Five real steps of trl's DPOTrainer and GRPOTrainer, repeated with our model, losses and advantages: same losses,
same weights.

trl runs by itself (`trl_steps.py`, with the interpreter that has it) and provides the rows that its sampler drew and
the answers that its policy gave. Everything else is ours: the forward pass of `model/`, without trl's left padding,
log-probabilities, reference, advantages, loss. AdamW and gradient clipping are torch's on both sides.
"""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.batches.batch import Answered, Piece, answered
from pipeline.learning import losses, pair_losses, policy_losses
from pipeline.learning.losses import Loss
from pipeline.learning.pair_losses import PairLoss
from pipeline.learning.policy_losses import METHODS, Clip
from pipeline.model import checkpoint
from pipeline.model.transformer import Transformer
from pipeline.text.tokenizer import Tokenizer
from tests.goldens import interpreter, objective

SCRIPT = Path(__file__).with_name("trl_steps.py")
STEPS, RATE, NORM, EPS = 5, 2e-3, 0.5, 1e-6  # as in trl_steps.py
BETA = {"dpo": 0.3, "grpo": 0.05}


def walked(method: str, model: Transformer, tokenizer: Tokenizer, folder: Path) -> list[dict[str, Any]]:
    """The inputs and the loss of trl's trainer at each step; its final weights are in `after.pt`."""
    with torch.no_grad():  # so that some answers end
        model.get_parameter("model.embed_tokens.weight")[tokenizer.turn_end] *= 3
    checkpoint.save(folder / "model", model, tokenizer, {})
    rows = [
        {
            "prompt": f"Which way, {n}?" + " And then?" * (n % 3),
            "chosen": "left " * (1 + n % 5),
            "rejected": "right" + "." * (n % 7),
        }
        for n in range(20)
    ]
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    done = subprocess.run([interpreter("A"), SCRIPT, method, folder], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = torch.load(folder / "steps.pt", weights_only=True)
    assert len(found) == STEPS
    return found


def laid(ids: Tensor, mask: Tensor, trained: Tensor) -> Answered:
    """Rows without their padding, in our layout."""
    pieces = [
        Piece(row[keep.bool()].numpy(), said[keep.bool()].bool().numpy())
        for row, keep, said in zip(ids, mask, trained, strict=True)
    ]
    return answered(pieces, pad=0)


def walk(
    model: nn.Module, steps: list[dict[str, Any]], loss: Callable[[dict[str, Any]], tuple[Loss, dict[str, int]]]
) -> None:
    """Take our steps over the same rows and compare each loss with trl's."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, eps=EPS, weight_decay=0.0)
    for step in steps:
        found = objective(*loss(step))
        assert float(found.detach()) == pytest.approx(step["loss"], abs=2e-5)
        optimizer.zero_grad()
        found.backward()
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()


def assert_same_weights(model: nn.Module, start: dict[str, Tensor], folder: Path) -> None:
    """Check that our weights are far closer to trl's than to where they started."""
    theirs = {
        name.removeprefix("model."): tensor
        for name, tensor in torch.load(folder / "after.pt", weights_only=True).items()
    }
    ours = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    for name in theirs.keys() & ours.keys():
        moved, apart = (ours[name] - start[name]).abs().max(), (ours[name] - theirs[name]).abs().max()
        assert moved > 2 * RATE and apart < 0.01 * moved, (name, moved, apart)
    assert len(theirs.keys() & ours.keys()) > 20


@pytest.mark.oracle
@pytest.mark.extra
def test_five_steps_of_dpo_are_trl_s(byte_tokenizer: Tokenizer, tiny_model: Transformer, tmp_path: Path) -> None:
    steps = walked("dpo", tiny_model, byte_tokenizer, tmp_path)
    frozen, _ = checkpoint.load(tmp_path / "model")
    start = {name.removeprefix("model."): value.clone() for name, value in tiny_model.state_dict().items()}

    def loss(step: dict[str, Any]) -> tuple[Loss, dict[str, int]]:
        batch = laid(step["input_ids"], step["attention_mask"], step["completion_mask"])
        with torch.no_grad():
            reference = pair_losses.pair_logprobs(frozen, batch)
        found = pair_losses.dpo(pair_losses.pair_logprobs(tiny_model, batch), reference, PairLoss(beta=BETA["dpo"]))
        return found, {"pairs": len(batch.input_ids) // 2, "tokens": int((batch.targets >= 0).sum())}

    walk(tiny_model, steps, loss)
    assert steps[0]["loss"] == pytest.approx(np.log(2), abs=1e-6) and steps[-1]["loss"] < 0.5
    assert_same_weights(tiny_model, start, tmp_path)


@pytest.mark.oracle
@pytest.mark.extra
def test_five_steps_of_grpo_are_trl_s(byte_tokenizer: Tokenizer, tiny_model: Transformer, tmp_path: Path) -> None:
    steps = walked("grpo", tiny_model, byte_tokenizer, tmp_path)
    frozen, _ = checkpoint.load(tmp_path / "model")
    start = {name.removeprefix("model."): value.clone() for name, value in tiny_model.state_dict().items()}
    method = replace(METHODS["grpo"], clip=Clip(0.05, 0.05), beta=BETA["grpo"])
    sampled: dict[tuple[int, ...], Tensor] = {}  # an answer -> its log-probabilities when first seen

    def loss(step: dict[str, Any]) -> tuple[Loss, dict[str, int]]:
        ids, mask = (torch.cat([step[f"prompt_{name}"], step[f"completion_{name}"]], 1) for name in ("ids", "mask"))
        trained = torch.cat([torch.zeros_like(step["prompt_mask"]), step["completion_mask"]], 1)
        batch = laid(ids, mask, trained)
        logprobs, entropy = losses.token_logprobs(tiny_model, batch, 0.8)
        with torch.no_grad():
            reference, _ = losses.token_logprobs(frozen, batch, 0.8)
        chosen = batch.targets >= 0
        lengths = chosen.sum(1)
        now = logprobs.detach().split(lengths.tolist())
        old = torch.cat([sampled.setdefault(tuple(row), said) for row, said in zip(ids.tolist(), now, strict=True)])
        scores = (chosen & (batch.targets % 2 == 0)).sum(1).double()  # as in trl_steps.reward
        order = torch.tensor(
            sorted(range(len(ids)), key=lambda row: step["prompt_ids"][row].tolist())
        )  # trl shuffles them
        groups, valid = scores[order].view(-1, 4), torch.ones(2, 4, dtype=torch.bool)
        advantages = torch.empty(len(ids))
        advantages[order] = policy_losses.group_advantages(groups, valid, scaled=True).flatten().float()
        torch.testing.assert_close(advantages, step["advantages"], atol=1e-5, rtol=0)
        rows = torch.repeat_interleave(torch.arange(len(ids)), lengths)
        found = policy_losses.group_policy(
            logprobs,
            entropy,
            old=old,
            advantages=advantages[rows],
            reference=reference,
            row_of=rows,
            num_rows=len(ids),
            method=method,
            max_tokens=12,
        )
        return found, {"sequences": len(ids), "tokens": len(logprobs)}

    walk(tiny_model, steps, loss)
    lengths = {int(length) for step in steps for length in step["completion_mask"].sum(1)}
    assert len(lengths) > 1 and len(sampled) == 3 * 8  # some answers end, some do not; the last ones are used once
    assert_same_weights(tiny_model, start, tmp_path)
