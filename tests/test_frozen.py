"""Frozen weights in bf16: under autocast not one bit of an output changes, and on a CPU nothing is changed at all."""

import copy
import math

import pytest
import torch

from pipeline.batches.batch import Piece, answered
from pipeline.learning import pair_losses
from pipeline.learning import reference as learning_reference
from pipeline.learning.gates import first_dpo
from pipeline.learning.pair_losses import PairLoss
from pipeline.learning.reference import Reference
from pipeline.model import checkpoint
from pipeline.model.heads import RewardModel
from pipeline.model.transformer import Transformer
from pipeline.run import device
from pipeline.run.device import Hardware
from pipeline.run.errors import GateError

CUDA = Hardware(device=torch.device("cuda"), precision="bf16", threads=1, base_weights="bf16")  # nothing is moved to it
IDS = torch.randint(0, 300, (3, 17), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("kind", "precision", "asked", "narrows"),
    [
        ("cuda", "bf16", "auto", True),
        ("cuda", "fp16", "auto", False),
        ("cuda", "bf16", "fp32", False),
        ("cpu", "bf16", "auto", False),
        ("cpu", "bf16", "bf16", True),
    ],
)
def test_frozen_layers_are_stored_as_asked_and_in_bf16_on_a_gpu_that_computes_in_it(
    tiny_model: Transformer, kind: str, precision: str, asked: str, narrows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "device_kind", lambda: kind)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    hardware = device.hardware(precision, asked)
    model = learning_reference.narrowed(tiny_model, hardware)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == (torch.bfloat16 if narrows else torch.float32)  # type: ignore[union-attr]
    assert model.model.embed_tokens.weight.dtype == model.model.norm.weight.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_under_autocast_a_narrowed_reference_has_the_bits_of_the_wide_one(tiny_model: Transformer) -> None:
    wide, slim = Reference(tiny_model, adapted=False), Reference(tiny_model, adapted=False, hardware=CUDA)
    with torch.autocast("cpu", torch.bfloat16), wide.model() as one, slim.model() as other:
        assert one.model.layers[0].mlp.up_proj.weight.dtype != other.model.layers[0].mlp.up_proj.weight.dtype  # type: ignore[union-attr]
        assert torch.equal(one(IDS), other(IDS))
    assert slim.digest == wide.digest  # the report names the weights as loaded


def test_a_narrowed_reference_is_watched_as_it_is_stored(tiny_model: Transformer) -> None:
    reference = Reference(tiny_model, adapted=False, hardware=CUDA)
    reference.check()
    with reference.model() as model:
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)  # type: ignore[union-attr]
    with pytest.raises(GateError, match="the reference"):
        reference.check()


def test_under_autocast_a_narrowed_reward_model_gives_the_same_rewards(tiny_model: Transformer) -> None:
    model = RewardModel(tiny_model)
    with torch.no_grad():
        model.score.weight.normal_(generator=device.generator("score"))
        with torch.autocast("cpu", torch.bfloat16):
            before = model(IDS)
            after = learning_reference.narrowed(model, CUDA)(IDS)
    assert model.score.weight.dtype == torch.float32
    assert torch.equal(before, after) and before.abs().min() > 0


def test_dpo_against_a_narrowed_reference_begins_at_ln_2_and_passes_its_gate(tiny_model: Transformer) -> None:
    reference = Reference(tiny_model, adapted=False, hardware=CUDA)
    rows = [Piece(ids.numpy(), torch.arange(17).numpy() > 5) for ids in IDS[:2]]
    batch = answered(rows, 0)
    with torch.autocast("cpu", torch.bfloat16):
        policy = pair_losses.pair_logprobs(tiny_model.train(), batch)
        with reference.model() as model:
            theirs = pair_losses.pair_logprobs(model, batch)
    found = pair_losses.dpo(policy, theirs, PairLoss(loss="sigmoid", beta=0.1))
    loss = float(found.terms[0].sum.detach())
    assert loss == pytest.approx(math.log(2), abs=2e-2)
    first_dpo(math.log(2), "bf16", 0.1)({"loss": loss, "rewards/chosen": 0.0, "rewards/rejected": 0.0})


def test_without_autocast_a_narrowed_model_computes_with_its_rounded_weights(tiny_model: Transformer) -> None:
    narrow = learning_reference.narrowed(copy.deepcopy(tiny_model), CUDA)
    for layer in tiny_model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = layer.weight.data.bfloat16().float()
    assert torch.equal(narrow(IDS), tiny_model(IDS))


def test_narrowing_rounds_the_linear_layers_as_autocast_would(tiny_model: Transformer) -> None:
    weight = tiny_model.model.layers[0].mlp.up_proj.weight.detach().clone()  # type: ignore[union-attr]
    digest = checkpoint.weights_digest(tiny_model)
    learning_reference.narrowed(tiny_model, CUDA)
    assert torch.equal(tiny_model.model.layers[0].mlp.up_proj.weight, weight.bfloat16())  # type: ignore[union-attr]
    assert checkpoint.weights_digest(tiny_model) != digest
