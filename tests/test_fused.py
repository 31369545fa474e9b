"""The fused model equals the model up to rounding, and attending over a few cache rows equals attention."""

import sys
from collections.abc import Callable

import pytest
import torch

from pipeline.export.inference import FEW, MANY, Fused, FusedBlock, joined, quantize
from pipeline.generation.sampling import Sampling, generate
from pipeline.model.config import ModelConfig
from pipeline.model.layers import Linear
from pipeline.model.lora import AdapterConfig, attach
from pipeline.model.transformer import Transformer
from pipeline.serve.engine import NARROW, TOGETHER, RowDecoder
from tests.models import BASE, SHAPES, made


def in_bf16(model: Transformer) -> Fused:
    return quantize(model.bfloat16())


def text(seed: int, length: int) -> list[int]:
    return torch.randint(0, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_a_fused_model_gives_the_model_s_logits(config: ModelConfig) -> None:
    model = made(config)
    fused = Fused(model)
    ids = torch.tensor([text(1, 50), text(2, 50)])
    documents = torch.tensor([[0] * 30 + [1] * 20, [0] * 45 + [-1] * 5])
    with torch.no_grad():
        torch.testing.assert_close(fused(ids), model(ids), atol=2e-5, rtol=1e-5)
        seen = documents >= 0
        packed = fused(ids, documents=documents, select=seen)
        torch.testing.assert_close(packed, model(ids, documents=documents, select=seen), atol=2e-5, rtol=1e-5)
    prompts, sampling = [text(3, 9), text(4, 2)], Sampling(30, temperature=0.8)
    both = [generate(m, prompts, sampling, stop=(), seeds=[1, 2]) for m in (model, fused)]
    assert [one.ids for one in both[0]] == [one.ids for one in both[1]]
    assert fused.num_parameters() == model.num_parameters()


def test_the_model_that_is_fused_stays_as_it_is_and_shares_its_largest_weights() -> None:
    model = made(BASE)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fused = Fused(model)
    assert fused.head.weight is model.model.embed_tokens.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("rows", [1, FEW - 1, FEW, 9, MANY, MANY + 1])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_from_the_left_is_the_linear_layer(rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    layer = Linear(24, 40, bias)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=generator)
    x = torch.randn(rows, 24, generator=generator)
    with torch.no_grad():
        found = joined(layer)(x)
        assert found.is_contiguous()
        torch.testing.assert_close(found, layer(x), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(joined(layer)(x[None])[0], layer(x), atol=0, rtol=0)


@pytest.mark.parametrize("served", [Fused, quantize, in_bf16], ids=["native", "int8", "int8 of bf16"])
@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_a_traced_model_says_the_same_to_the_bit(config: ModelConfig, served: Callable[[Transformer], Fused]) -> None:
    """Steps of one row up to more rows than are traced, in mixed order; and it holds no weight twice."""
    steps = [
        {0: 20},
        {0: 1},
        {0: 3, 1: 1},
        {0: 1, 1: 1},
        dict.fromkeys(range(FEW), 1),
        {0: FEW - 1},
        {0: 60, 1: 9},
        {0: 1},
    ]
    said = []
    for model in (served(made(config)), served(made(config)).trace()):
        decoder = RowDecoder(model, FEW)
        pieces = [[text(10 * number + row, count) for row, count in step.items()] for number, step in enumerate(steps)]
        said.append(
            [decoder.advance(list(step), own, [1] * len(step)) for step, own in zip(steps, pieces, strict=True)]
        )
        assert set(model.state_dict()) == set(served(made(config)).state_dict())
        for layer in model.model.layers:
            assert isinstance(layer, FusedBlock)
            own = {tensor.data_ptr() for tensor in layer.state_dict(keep_vars=True).values()}
            for graph in layer.traced:
                assert own <= {tensor.data_ptr() for tensor in (*graph.parameters(), *graph.buffers())}
    assert all(layer.traced for layer in model.model.layers) == (sys.version_info < (3, 14))
    for plain, traced in zip(*said, strict=True):
        assert torch.equal(plain, traced)


def test_adapters_are_refused() -> None:
    for adapter in (AdapterConfig(rank=2, alpha=4.0), AdapterConfig(rank=2, alpha=4.0, trained_tokens=(3,))):
        model = made(BASE)
        attach(model, adapter, torch.Generator().manual_seed(0))
        with pytest.raises(ValueError, match="merge the adapter before"):
            Fused(model)


@pytest.mark.parametrize("kind", [lambda model: model, Fused], ids=["plain", "fused"])
@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_ragged_pieces_give_the_logits_of_one_forward_pass(config: ModelConfig, kind: type) -> None:
    """Mixed steps: one token each for few and for many rows, drafts, chunks, and rows that are cut back."""
    model = made(config)
    decoder = RowDecoder(kind(model), 6)
    rows: list[list[int]] = [[] for _ in range(6)]
    steps = [
        {0: 40, 2: NARROW + 1, 5: 1},
        {0: 1},
        {2: 9},
        {0: 3, 2: 1},
        {5: 1, 2: 1},
        {1: 2, 3: 1, 4: NARROW},
        {1: 1, 2: 1, 3: 1, 4: 1, 5: 1},
        {5: 1, 4: 1, 2: 1, 1: 1},
        {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1},
        {3: 256},
    ]
    assert TOGETHER == 4  # so one product serves steps of one token for four or more rows
    for number, step in enumerate(steps):
        pieces = [text(100 * number + row, count) for row, count in step.items()]
        wanted = [min(count, 1 + row) for row, count in step.items()]
        logits = decoder.advance(list(step), pieces, wanted).split(wanted)
        for row, piece, own in zip(step, pieces, logits, strict=True):
            rows[row] += piece
            with torch.no_grad():
                whole = model(torch.tensor([rows[row]]))[0, -len(own) :]
            torch.testing.assert_close(own.log_softmax(-1), whole.log_softmax(-1), atol=2e-5, rtol=1e-5)
        if number % 3 == 1:  # as after a rejected draft
            row = next(iter(step))
            del rows[row][-1]
            decoder.rewind(row, len(rows[row]))
    assert decoder.cache.own == [len(row) for row in rows]


def test_nothing_is_asked_of_the_head_within_a_prompt_and_a_full_row_is_refused_whole() -> None:
    decoder = RowDecoder(made(BASE), 2)
    assert decoder.advance([0, 1], [text(1, 5), text(2, 3)], [0, 0]).shape == (0, 96)
    with pytest.raises(ValueError, match="a row of 301 tokens is longer than the model's context of 300"):
        decoder.advance([0, 1], [text(1, 1), text(2, 298)], [1, 1])
    assert decoder.cache.own == [5, 3]


def test_bf16_weights_stay_near_the_float32_ones() -> None:
    model = made(BASE)
    whole = [text(5, 40)]
    half = Fused(made(BASE).bfloat16())
    with torch.no_grad():
        difference = (
            half(torch.tensor(whole)).float().log_softmax(-1) - model(torch.tensor(whole)).log_softmax(-1)
        ).abs()
    assert half.head.weight.dtype == torch.bfloat16
    assert 1e-3 < float(difference.mean()) < 0.05
