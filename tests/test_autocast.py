"""Half precision on a CPU: float32 between the projections, and matrix products with few different shapes."""

import pytest
import torch
from torch import Tensor

from pipeline.model import transformer
from pipeline.model.config import ModelConfig
from pipeline.model.layers import Documents, Padded
from pipeline.model.transformer import EVEN_ROWS, Transformer

CONFIG = ModelConfig(
    vocab_size=128,
    width=48,
    layers=3,
    heads=6,
    kv_heads=2,
    head_dim=16,
    d_ff=80,
    max_context=1280,
    rope_theta=1e4,
    tied=True,
)


def gradients(model: Transformer, ids: Tensor, documents: Tensor, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The gradients of a mean over some logits, under autocast to `dtype` or without."""
    model.zero_grad()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        logits = model(ids, documents=documents, select=torch.arange(ids.shape[1]).expand_as(ids) % 3 > 0)
    logits.float().logsumexp(-1).mean().backward()
    return {"logits": logits.detach().float()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def packed(batch: int, time: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, CONFIG.vocab_size, (batch, time), generator=torch.Generator().manual_seed(5))
    return ids, (torch.arange(time) // 41).expand(batch, time)


def test_bf16_gives_what_float32_gives_but_for_its_rounding() -> None:
    model, (ids, documents) = Transformer(CONFIG, torch.Generator().manual_seed(0)), packed(3, 131)
    exact, rounded = gradients(model, ids, documents, None), gradients(model, ids, documents, torch.bfloat16)
    for name, value in exact.items():
        assert (rounded[name] - value).norm() <= 0.03 * value.norm(), name


def test_shapes_are_even_and_evening_them_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, documents) = Transformer(CONFIG, torch.Generator().manual_seed(0)), packed(3, 131)
    shapes: set[int] = set()
    linear, product = torch.nn.functional.linear, torch.mm
    outputs = {(CONFIG.heads + 2 * CONFIG.kv_heads) * CONFIG.head_dim, 2 * CONFIG.d_ff}  # of joined matrices

    def watched(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.add(len(x))
        return linear(x, weight, bias)

    def watched_product(x: Tensor, y: Tensor) -> Tensor:
        shapes.update({size for size in (*x.shape, *y.shape) if size > EVEN_ROWS} - outputs)
        return product(x, y)

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    monkeypatch.setattr(torch, "mm", watched_product)
    even = gradients(model, ids, documents, torch.bfloat16)
    assert shapes and all(rows % EVEN_ROWS == 0 for rows in shapes)
    shapes.clear()
    monkeypatch.setattr(transformer, "EVEN_ROWS", 10**6)
    plain = gradients(model, ids, documents, torch.bfloat16)
    assert any(rows % EVEN_ROWS for rows in shapes)
    for name, value in plain.items():
        assert (even[name] - value).norm() <= 0.01 * value.norm(), name  # other shapes sum in another order


def test_a_padded_layout_is_the_other_one_and_zeros() -> None:
    q = torch.randn(12, 6, 16, generator=torch.Generator().manual_seed(1))
    k = torch.randn(12, 2, 16, generator=torch.Generator().manual_seed(2))
    inner = Documents((4, 5), causal=True)
    out = Padded(inner, 9).attend(q, k, k, 0)
    assert torch.equal(out[:9], inner.attend(q[:9], k[:9], k[:9], 0))
    assert torch.equal(out[9:], torch.zeros(3, 6, 16))
