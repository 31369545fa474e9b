"""Adapters folded in while a policy samples: one matrix a layer, the same answers, and the adapters back afterwards."""

import pytest
import torch
from torch import Tensor

from pipeline.model import lora
from pipeline.model.config import ModelConfig
from pipeline.model.lora import AdapterConfig
from pipeline.model.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=128,
    width=48,
    layers=2,
    heads=6,
    kv_heads=2,
    head_dim=16,
    d_ff=80,
    max_context=128,
    rope_theta=1e4,
    tied=True,
)
IDS = torch.randint(0, 128, (3, 20), generator=torch.Generator().manual_seed(1))


def adapted(*, dora: bool = False) -> Transformer:
    generator = torch.Generator().manual_seed(0)
    model = Transformer(CONFIG, generator)
    lora.attach(model, AdapterConfig(rank=4, alpha=8, targets=("all-linear",), dora=dora), generator)
    for tensor in lora.adapter_state(model).values():
        tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
    return model.eval()


def products(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, int]:
    """Logits, and how many matrix products of layers they took."""
    linear, calls = torch.nn.functional.linear, [0]

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        calls[0] += 1
        return linear(x, weight, bias)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "linear", counted)
        return model(IDS), calls[0]


@pytest.mark.parametrize("dora", [False, True])
def test_folded_in_is_the_adapted_model_with_a_third_of_the_products(
    dora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted(dora=dora)
    apart, many = products(model, monkeypatch)
    with lora.folded_in(model):
        folded, few = products(model, monkeypatch)
    torch.testing.assert_close(folded, apart, rtol=0, atol=1e-5)
    assert few == 2 * 7 + 1 and many == 2 * 7 * 3 + 1
    assert torch.equal(products(model, monkeypatch)[0], apart)


def test_adapters_come_back_and_train_when_sampling_fails() -> None:
    model = adapted()

    def sample() -> None:
        with lora.folded_in(model):
            assert all(layer.whole is not None for layer in lora.adapters(model))
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        sample()
    assert all(layer.whole is None for layer in lora.adapters(model))
    model(IDS).square().mean().backward()
    assert all(layer.lora_B.weight.grad is not None for layer in lora.adapters(model))


def test_bf16_under_autocast_is_folded_once_and_bf16_weights_are_not() -> None:
    model = adapted()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        apart = model(IDS)
        with lora.folded_in(model):
            assert all(
                layer.whole is not None and layer.whole.dtype == torch.bfloat16 for layer in lora.adapters(model)
            )
            assert (model(IDS) - apart).norm() <= 0.02 * apart.norm()
    model.to(torch.bfloat16)
    with lora.folded_in(model):
        assert all(layer.whole is None for layer in lora.adapters(model))


def test_a_disabled_adapter_stays_off() -> None:
    model = adapted()
    with torch.no_grad(), lora.disabled(model):
        plain = model(IDS)
        with lora.folded_in(model):
            assert torch.equal(model(IDS), plain)
