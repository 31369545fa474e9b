"""int8: levels and scales by hand, products against the dequantized weights in float64, and what it does to a model."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from pipeline.export import inference, smoke
from pipeline.export.inference import DIGITS, LEVELS, NARROW, Int8Linear, Product, rounded
from pipeline.generation.sampling import Sampling, generate
from pipeline.model.config import ModelConfig
from pipeline.model.layers import Linear
from pipeline.model.transformer import Transformer
from pipeline.text.tokenizer import Tokenizer
from tests.models import SHAPES, made


def test_levels_and_scales_by_hand() -> None:
    weight = torch.tensor([[127.0, -63.6, 0.4], [0.0, 0.0, 0.0], [-2.54, 1.27, 0.02]])
    levels, scales = rounded(weight)
    assert levels[0].tolist() == [127, -64, 0] and float(scales[0]) == 1.0
    assert levels[1].tolist() == [0, 0, 0]
    assert float(scales[2]) == pytest.approx(0.02)
    assert levels[2].tolist() == [-127, 64, 1]  # 63.5 rounds to even


def test_no_weight_is_further_from_its_level_than_half_a_step() -> None:
    weight = torch.randn(64, 300, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 64)[:, None]
    levels, scales = rounded(weight)
    step = scales.double()[:, None]
    assert ((levels.double() * step - weight.double()).abs() <= step * 0.5000001).all()
    assert (levels.abs().amax(1) >= 126).all() and levels.dtype == torch.int8


@pytest.mark.parametrize("rows", [1, 2, 5, NARROW])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_of_few_rows_is_that_of_the_dequantized_weights_and_the_digits(rows: int, bias: bool) -> None:
    """Against the product with the digits in float64, and against that with the activations, from which the digits
    differ by at most half a step.
    """
    layer, x = drawn(rows, bias)
    small = Int8Linear(layer)
    peak = x.double().abs().amax(1, keepdim=True)
    scaled = x.double() * 63 / peak
    coarse = scaled.round()
    fine = ((scaled - coarse) * 126).round()
    held = peak / 63 * (coarse + fine / 126)
    exact = held @ (small.levels.double() * small.scales.double()[:, None]).T  # (rows, 80)
    exact += layer.bias.double() if bias else 0
    torch.testing.assert_close(small(x).double(), exact, atol=2e-3, rtol=1e-5)  # float32 may round a digit differently
    weights = (small.levels.double() * small.scales.double()[:, None]).abs().sum(1)  # (80,)
    whole = x.double() @ (small.levels.double() * small.scales.double()[:, None]).T
    whole += layer.bias.double() if bias else 0
    assert ((small(x) - whole).abs() <= peak / 15_876 * weights * 1.001).all()


@pytest.mark.parametrize("rows", [NARROW + 1, 200])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_of_many_rows_is_that_of_the_dequantized_weights_to_bf16(rows: int, bias: bool) -> None:
    layer, x = drawn(rows, bias)
    small = Int8Linear(layer)
    found = small(x)
    exact = x.bfloat16().double() @ (small.levels.double() * small.scales.double()[:, None]).T  # (rows, 80)
    exact += layer.bias.double() if bias else 0
    assert found.shape == exact.shape and found.dtype == x.dtype
    # sums of 96 terms have a deviation of 10; bf16 has 8 bits
    torch.testing.assert_close(found.double(), exact, atol=0.03, rtol=2**-8)
    torch.testing.assert_close(small(x[None])[0], found, atol=0.03, rtol=2**-7)


def drawn(rows: int, bias: bool) -> tuple[Linear, torch.Tensor]:
    """A layer and its input, both random."""
    generator = torch.Generator().manual_seed(rows)
    layer = Linear(96, 80, bias)
    nn.init.normal_(layer.weight, generator=generator)
    if bias:
        nn.init.normal_(layer.bias, generator=generator)
    return layer, torch.randn(rows, 96, generator=generator)


def test_a_row_is_multiplied_alike_whoever_its_neighbors_are() -> None:
    """To the bit, since integer sums do not depend on order, and no row's digits on another row."""
    layer, x = drawn(NARROW, bias=True)
    x *= torch.logspace(-6, 6, NARROW)[:, None]
    small = Int8Linear(layer)
    alone = torch.cat([small(row[None]) for row in x])
    assert torch.equal(small(x), alone)


@pytest.mark.parametrize("rows", [0, 1, NARROW, NARROW + 1])
def test_a_product_has_the_dtype_of_what_it_multiplies(rows: int) -> None:
    layer, x = drawn(max(rows, 1), bias=False)
    for dtype in (torch.float32, torch.bfloat16):
        found = Int8Linear(layer)(x[:rows].to(dtype))
        assert found.dtype == dtype and found.shape == (rows, 80) and found.isfinite().all()


def test_what_is_no_number_stays_in_its_row_and_the_engine_of_quantized_products_as_it_was() -> None:
    layer, x = drawn(3, bias=False)
    before = torch.backends.quantized.engine
    small = Int8Linear(layer)
    assert torch.backends.quantized.engine == before
    clean = small(x)
    x[1, 5] = torch.nan
    found = small(x)
    assert torch.equal(found[0], clean[0]) and torch.equal(found[2], clean[2]) and found[1].isnan().all()


def test_the_largest_weights_and_activations_do_not_overflow() -> None:
    """16 bits hold two products of 2D and 127, which a CPU without VNNI adds in 16 bits."""
    assert 2 * (2 * DIGITS) * LEVELS < 2**15
    layer = Linear(512, 3)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0], [-1.0], [0.5]]).expand(3, 512))
    small = Int8Linear(layer)
    found = small(torch.stack((torch.full((512,), 3.0), torch.full((512,), -3.0), torch.zeros(512))))
    torch.testing.assert_close(
        found, torch.tensor([[1536.0, -1536.0, 768.0], [-1536.0, 1536.0, -768.0], [0.0, 0.0, 0.0]])
    )


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_a_quantized_model_is_the_model_with_rounded_weights(config: ModelConfig) -> None:
    """Against a float32 model that holds the dequantized weights: only the rounding of activations differs."""
    model = made(config)
    small = inference.quantize(model)
    assert not [layer for layer in small.modules() if isinstance(layer, nn.Linear)]  # not even the head
    assert torch.equal(small.model.embed_tokens.weight, model.model.embed_tokens.weight)  # the lookup is unchanged
    oracle = Transformer(replace(config, tied=False)).train(False)
    head = model.model.embed_tokens.weight if config.tied else model.lm_head.weight
    oracle.load_state_dict(model.state_dict() | {"lm_head.weight": head})
    ids = torch.tensor([list(range(90))])
    with torch.no_grad():
        for layer in oracle.modules():
            if isinstance(layer, nn.Linear):
                levels, scales = rounded(layer.weight)
                layer.weight.copy_(levels * scales.float()[:, None])
        logprobs = [m(ids).log_softmax(-1) for m in (model, oracle, small)]
    of_weights, of_activations = (float((logprobs[n] - logprobs[n + 1]).abs().mean()) for n in (0, 1))
    assert 0 < of_activations < 0.02 and 0 < of_weights < 0.05


def test_a_model_in_int8_is_within_the_bounds_on_the_probe(byte_tokenizer: Tokenizer, tiny_model: Transformer) -> None:
    """log p within 0.15, perplexity within 0.5%, for a model that is no sharper than a trained one."""
    with torch.no_grad():
        for parameter in tiny_model.parameters():
            if parameter.ndim > 1:
                parameter.div_(1.6)
    ids = byte_tokenizer.encode(smoke.PROBE.read_text(encoding="utf-8"))[:2000]
    found = smoke.compare(tiny_model, smoke.Ours(inference.quantize(tiny_model)), ids)
    assert 0 < found.max_difference < 0.15
    assert abs(found.perplexity) < 0.005


def test_it_decodes(tiny_model: Transformer) -> None:
    small = inference.quantize(tiny_model)
    ids = list(range(30, 50))
    answers = [generate(m, [ids], Sampling(40), stop=(), seeds=[0])[0] for m in (tiny_model, small)]
    with torch.no_grad():
        whole = tiny_model(torch.tensor([ids + answers[1].ids]))[0].log_softmax(-1)
    for place, token in enumerate(answers[1].ids):  # each is nearly the most likely token
        assert float(whole[19 + place, token]) > float(whole[19 + place].max()) - 0.3


def test_int8_pays_from_50_million_parameters_on_a_cpu(
    tiny_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert inference.FROM_PARAMETERS == 50_000_000
    assert not inference.pays(tiny_model)
    kinds = [type(inference.for_serving(tiny_model, weights).head) for weights in ("int8", "native", None)]
    assert kinds == [Int8Linear, Product, Product]
    monkeypatch.setattr(inference, "FROM_PARAMETERS", tiny_model.num_parameters())
    assert inference.pays(tiny_model)
    kinds = [type(inference.for_serving(tiny_model, weights).head) for weights in ("int8", "native", None)]
    assert kinds == [Int8Linear, Product, Int8Linear]
    elsewhere = tiny_model.to("meta")
    assert not inference.pays(elsewhere)
    with pytest.raises(ValueError, match="int8 weights are for CPUs, but this model is on meta"):
        inference.quantize(elsewhere)


def test_int8_wants_fbgemm(tiny_model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "FROM_PARAMETERS", 1)
    assert inference.has_fbgemm() and inference.pays(tiny_model)
    monkeypatch.setattr(inference, "FBGEMM", "another")
    assert not inference.pays(tiny_model)
    with pytest.raises(ValueError, match="int8 weights need FBGEMM"):
        inference.quantize(tiny_model)
