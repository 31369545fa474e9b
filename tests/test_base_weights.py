"""`runtime.base_weights: bf16`: a frozen base below an adapter takes half the memory, and no rounding is published."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.learning import reference
from pipeline.model import checkpoint, lora
from pipeline.model.cpu import native
from pipeline.model.layers import Linear, dense
from pipeline.model.lora import AdapterConfig
from pipeline.model.transformer import Transformer
from pipeline.run import device
from pipeline.run.device import Hardware
from pipeline.run.errors import ConfigError
from pipeline.text.tokenizer import Tokenizer
from tests.workspace import Workspace

IDS = torch.randint(0, 300, (3, 40), generator=torch.Generator().manual_seed(0))
ADAPTER = AdapterConfig(rank=2, alpha=4, targets=("q_proj", "down_proj"))
NARROW = Hardware(device=torch.device("cpu"), precision="bf16", threads=1, base_weights="bf16")


@pytest.fixture(autouse=True)
def unloaded() -> Iterator[None]:
    yield
    native.unload()


@pytest.fixture
def base(tmp_path: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer) -> Path:
    checkpoint.save(tmp_path / "base", tiny_model, byte_tokenizer, {})
    return tmp_path / "base"


def stirred(start: reference.Start) -> reference.Start:
    """Give the adapters random weights, so that they change the output."""
    for layer in lora.adapters(start.policy):
        assert isinstance(layer, lora.AdaptedLinear)
        layer.lora_B.weight.data.normal_(0, 0.02, generator=torch.Generator().manual_seed(1))
    return start


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_it_computes_what_a_base_rounded_by_hand_does(
    base: Path, autocast: bool, library: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Bit for bit, gradients too, with our operators, with and without the C++ library."""
    if library:
        native.load(tmp_path_factory.getbasetemp() / "native")
    narrow = stirred(reference.begin(base, ADAPTER, 1, NARROW)).policy
    wide = stirred(reference.begin(base, ADAPTER, 1, device.hardware("fp32"))).policy
    for name, parameter in wide.named_parameters():
        other = narrow.get_parameter(name)
        assert other.dtype == (torch.bfloat16 if "_proj.weight" in name else torch.float32), name
        if other.dtype == torch.bfloat16:
            parameter.data = parameter.data.bfloat16().float()
    losses = []
    for model in (narrow, wide):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses.append(model(IDS).float().logsumexp(-1).mean())
        losses[-1].backward()
    assert torch.equal(*losses)
    found, expected = ({n: p.grad for n, p in m.named_parameters() if p.requires_grad} for m in (narrow, wide))
    assert found and all(torch.equal(value, expected[name]) for name, value in found.items())  # type: ignore[arg-type]


def test_the_merged_model_is_the_float32_base_with_the_update(base: Path) -> None:
    start = stirred(reference.begin(base, ADAPTER, 1, NARROW))
    before, _ = checkpoint.load(base)
    update = {
        f"{name}.weight": layer.config.scale * (layer.lora_B.weight @ layer.lora_A.weight)
        for name, layer in start.policy.named_modules()
        if isinstance(layer, lora.AdaptedLinear)
    }
    kept = copy.deepcopy(start.policy)
    assert reference.finish(start, base)["merge_difference"] < 1e-4  # type: ignore[operator]
    for name, parameter in before.named_parameters():
        expected = parameter.detach() + update.get(name, 0)
        torch.testing.assert_close(start.policy.get_parameter(name).detach(), expected, atol=1e-7, rtol=1e-6)
    reference.merge(kept, base)
    assert checkpoint.weights_digest(kept) == checkpoint.weights_digest(start.policy)


def test_bf16_weights_are_refused_where_passes_are_not_bf16() -> None:
    for asked in ("bf16", "nf4"):
        with pytest.raises(ConfigError, match=f"base_weights: {asked} requires forward passes in bf16, .* in fp32"):
            device.hardware("fp32", asked)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        ("lora", {"control_rate": 1e-3}),
        ("dpo", {"adapter": {"rank": 2, "alpha": 4}, "precompute_reference": False}),
        ("kto", {"adapter": {"rank": 2, "alpha": 4}}),
        ("grpo", {"adapter": {"rank": 2, "alpha": 4}, "beta": 0.1}),
        ("rlhf", {"adapter": {"rank": 2, "alpha": 4}}),
        ("distill", {"adapter": {"rank": 2, "alpha": 4}}),
        ("dpo", {}),
        ("reward", {}),
    ],
)
def test_stages_train_on_it(stage: str, changes: dict[str, Any], workspace: Workspace) -> None:
    ended = workspace.command(stage, **{"runtime.precision": "bf16", "runtime.base_weights": "bf16"}, **changes)
    assert ended.code == 0, ended.said
    if "adapter" in changes or stage == "lora":
        before, after = (workspace.weights(name) for name in ("tools", stage))
        # lora's adapters are on all layers
        frozen = [name for name in before if "norm" in name or ("gate_proj" in name and stage != "lora")]
        assert frozen and all(torch.equal(after[name], before[name]) for name in frozen)
        assert not torch.equal(
            after["model.layers.0.self_attn.q_proj.weight"], before["model.layers.0.self_attn.q_proj.weight"]
        )


@pytest.fixture
def cpu_nf4(monkeypatch: pytest.MonkeyPatch) -> Hardware:
    """bitsandbytes also runs on a CPU, but slowly; a stage would refuse."""
    pytest.importorskip("bitsandbytes")
    return Hardware(device=torch.device("cpu"), precision="bf16", threads=1, base_weights="nf4")


def test_nf4_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"base_weights: nf4 needs CUDA and bitsandbytes .* use bf16 instead"):
        device.hardware("bf16", "nf4")


@pytest.fixture
def broad(tmp_path: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer) -> Path:
    """A base whose rows consist of whole blocks."""
    shape = replace(tiny_model.config, width=64, head_dim=32, d_ff=128)
    checkpoint.save(tmp_path / "broad", Transformer(shape, torch.Generator().manual_seed(0)), byte_tokenizer, {})
    return tmp_path / "broad"


def test_rows_of_broken_blocks_stay_in_bf16(base: Path, cpu_nf4: Hardware) -> None:
    """bitsandbytes 0.50 misreads their 32 and 48 columns on a CPU."""
    policy = reference.begin(base, ADAPTER, 1, cpu_nf4).policy
    assert {policy.get_parameter(n).dtype for n, _ in policy.named_parameters() if "_proj.weight" in n} == {
        torch.bfloat16
    }


def test_a_base_in_nf4_takes_half_a_byte_a_weight_and_computes_with_its_values(broad: Path, cpu_nf4: Hardware) -> None:
    start = stirred(reference.begin(broad, ADAPTER, 1, cpu_nf4))
    twin = stirred(reference.begin(broad, ADAPTER, 1, device.hardware("fp32"))).policy
    for (name, layer), other in zip(start.policy.named_modules(), twin.modules(), strict=True):
        if isinstance(layer, Linear | lora.AdaptedLinear) and "_proj" in name and "lora" not in name:
            before = other.weight.data  # type: ignore[union-attr]
            assert layer.weight.dtype == torch.uint8 and layer.weight.numel() == before.numel() // 2
            found = dense(layer.weight, layer.nf4).float()
            assert 0.02 < float((found - before).norm() / before.norm()) < 0.12  # 0.09 for normal weights
            other.weight.data = found  # type: ignore[union-attr]
    for enabled in (True, False):
        losses = []
        for model in (start.policy, twin):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                losses.append(model(IDS).float().logsumexp(-1).mean())
            losses[-1].backward()
        torch.testing.assert_close(*losses, atol=2e-3, rtol=0)
    found_grads, grads = ({n: p.grad for n, p in m.named_parameters() if p.requires_grad} for m in (start.policy, twin))
    for name, grad in found_grads.items():
        assert grad is not None
        torch.testing.assert_close(grad, grads[name], atol=0.05 * float(grad.abs().max()), rtol=0)
    start.reference.check()


def test_an_adapter_on_nf4_is_merged_into_the_float32_base(broad: Path, cpu_nf4: Hardware) -> None:
    start = stirred(reference.begin(broad, ADAPTER, 1, cpu_nf4))
    before, _ = checkpoint.load(broad)
    reference.finish(start, broad)
    for name, parameter in before.named_parameters():
        after = start.policy.get_parameter(name)
        adapted = any(target in name for target in ADAPTER.targets)
        assert after.dtype == torch.float32 and torch.equal(after, parameter) != adapted, name
