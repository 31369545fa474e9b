"""Decoding in bf16 on a CPU (model/decoding.py): against the model in float64, against teacher forcing, and the
choice of tokens in C++ against the one in PyTorch.
"""

import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.generation import sampling as plain
from pipeline.generation.sampling import Decoder, Sampling, choose, generate, uniforms
from pipeline.model import decoding, lora
from pipeline.model.cpu import native
from pipeline.model.decoding import BF16
from pipeline.model.transformer import Transformer
from tests import models

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")
WIDE = {
    name: replace(config, width=48, head_dim=32 * (1 + (config.kv_heads == 1)), vocab_size=203, max_context=150)
    for name, config in models.SHAPES.items()
}
AVX2 = "-march=x86-64-v3"


@pytest.fixture(autouse=True)
def unloaded() -> Iterator[None]:
    yield
    native.unload()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "native"


@pytest.fixture(params=["this processor", "AVX2"])
def built(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Load the library, for this processor or for one without bf16 and with narrow registers."""
    if request.param == "AVX2":
        if platform.machine() != "x86_64":
            pytest.skip("another kind of processor")
        monkeypatch.setattr(native, "FLAGS", tuple(AVX2 if f == "-march=native" else f for f in native.FLAGS))
        monkeypatch.setattr(native, "WIDE", {})
        native._built.cache_clear()
    native.load(folder)
    native._built.cache_clear()
    return folder


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=BF16)


def prompts_of(config_vocabulary: int, lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, config_vocabulary, (length,), generator=generator).tolist() for length in lengths]


def adapted(name: str) -> Transformer:
    """A model with an adapter that changes what it says."""
    model = models.made(WIDE[name])
    config = lora.AdapterConfig(rank=4, alpha=8, targets=("all-linear",))
    lora.attach(model, config, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for key, values in lora.adapter_state(model).items():
            if "lora_B" in key:
                values.copy_(torch.randn(values.shape, generator=generator) * 0.2)
    return model.train(False)


def continued(model: Transformer, prompts: list[list[int]], texts: Tensor) -> Tensor:
    """A decoder's logits (T, n, V) after the prompts and after each column of texts (n, T - 1). Pairs of rows share a
    prompt; the last two rows have none.
    """
    rows = len(texts)
    decoder = Decoder(model, rows)
    numbers, first = decoder.read(prompts)
    for row in range(rows - 2):
        decoder.clear(row, numbers[row // 2])
    logits = [torch.cat([first.repeat_interleave(2, 0)[: rows - 2], decoder.feed([rows - 2, rows - 1], [[5], [6, 7]])])]
    logits += [decoder.feed(list(range(rows)), column[:, None].tolist()) for column in texts.T[:-1]]
    return torch.stack(logits).double()


def whole(model: Transformer, prompts: list[list[int]], texts: Tensor) -> Tensor:
    """The same as `continued`, from running each text whole in the model's own precision."""
    starts = [prompts[row // 2] for row in range(len(texts) - 2)] + [[5], [6, 7]]
    rows = []
    for start, text in zip(starts, texts.tolist(), strict=True):
        rows.append(model(torch.tensor([start + text[:-1]]))[0, len(start) - 1 :])
    return torch.stack(rows, dim=1).double()


@pytest.mark.parametrize("name", [*WIDE, "adapter"])
@torch.no_grad()
def test_logits_are_as_close_to_float64_as_those_of_autocast(built: Path, name: str) -> None:
    model = adapted("qwen3") if name == "adapter" else models.made(WIDE[name])
    prompts = prompts_of(203, (70, 3, 1, 40))
    texts = torch.randint(0, 203, (10, 40), generator=torch.Generator().manual_seed(3))
    with autocast():
        assert decoding.fits(model)
        found = continued(model, prompts, texts)
        native.unload()
        operators = continued(model, prompts, texts)
    expected = whole(model.double(), prompts, texts)
    errors = [(x.log_softmax(-1) - expected.log_softmax(-1)).abs() for x in (found, operators)]
    assert not torch.equal(found, operators)
    assert errors[0].mean() < 1.3 * errors[1].mean() and errors[0].max() < 3 * errors[1].max()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_are_those_of_the_update(folder: Path, temperature: float) -> None:
    """Those from sampling against those of the model as it trains in bf16, one text at a time."""
    native.load(folder)
    model = models.made(WIDE["qwen3"])
    prompts = prompts_of(203, (30, 30, 9, 1))
    with autocast():
        done = generate(model, prompts, Sampling(60, temperature), stop={0}, seeds=[4, 5, 6, 7], batch_rows=3)
    differences = []
    for prompt, completion in zip(prompts, done, strict=True):
        with autocast():
            logits = model(torch.tensor([prompt + completion.ids]))[0].detach().float()
        expected = logits.log_softmax(-1)[len(prompt) - 1 :]
        ids = torch.tensor([*completion.ids, *([0] if completion.stop == "stop" else [])])
        forced = expected[: len(ids)].gather(1, ids[:, None]).squeeze(1)
        differences.append(forced - torch.tensor(completion.logprobs))
    differences = torch.cat(differences)
    assert len(differences) > 100
    assert differences.mean().abs() < 2e-3 and differences.abs().mean() < 2e-2


SAMPLINGS = [
    Sampling(1),
    Sampling(1, 1.0),
    Sampling(1, 0.7, top_k=5),
    Sampling(1, 1.0, top_p=0.9),
    Sampling(1, 2.0, top_p=0.95),
    Sampling(1, 1.0, top_p=1e-6),
    Sampling(1, 1.3, top_p=0.5, top_k=40),
    Sampling(1, 1e-300),
    Sampling(1, 1.0, top_p=1 - 1e-7),
]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("given", SAMPLINGS, ids=str)
def test_tokens_are_those_that_pytorch_chooses(built: Path, given: Sampling, dtype: torch.dtype) -> None:
    """Peaked and flat rows, ties everywhere, a single likely token, a vocabulary that no vector width divides."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(60, 1501, generator=generator) * spread for spread in (0.0, 1e-3, 1.0, 4.0, 30.0)]
    rows.append(torch.randn(60, 1501, generator=generator).mul(3).round())
    rows.append(torch.full((1, 1501), -300.0).index_fill_(1, torch.tensor([7]), 0.0))
    logits = torch.cat(rows).to(dtype)
    numbers = torch.from_numpy(uniforms(3, 0, len(logits)))
    tokens, logprobs = choose(logits, numbers, given)
    native.unload()
    assert not plain.primitives.chooses(logits)
    expected, expected_logprobs = choose(logits, numbers, given)
    assert (tokens == expected).float().mean() > 0.995  # a number may fall within rounding of a boundary
    same = tokens == expected
    torch.testing.assert_close(logprobs[same], expected_logprobs[same], atol=2e-6, rtol=1e-6)


def test_a_number_at_either_end_takes_a_token_that_has_a_weight(folder: Path) -> None:
    native.load(folder)
    logits = torch.full((2, 200), -1000.0)
    logits[:, [3, 150]] = 0.0
    ends = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    tokens, logprobs = choose(logits, ends, Sampling(1, 1.0, top_p=0.99))
    assert tokens.tolist() == [3, 150]
    torch.testing.assert_close(logprobs, torch.full((2,), 0.5, dtype=torch.float64).log())


def test_a_row_beyond_the_context_is_refused_and_nothing_has_changed(folder: Path) -> None:
    native.load(folder)
    model = models.made(WIDE["qwen3"])
    with autocast():
        decoder = Decoder(model, 2)
        decoder.feed([0, 1], prompts_of(203, (150, 3)))
        with pytest.raises(ValueError, match="a row of 151 tokens is longer than the model's context of 150"):
            decoder.feed([1, 0], [[1], [1]])
        with pytest.raises(ValueError, match="a row of 151 tokens"):
            Decoder(model, 1).feed([0], prompts_of(203, (151,)))
        assert decoder.cache.own == [150, 3]
        assert decoder.feed([1], [[2]]).shape == (1, 203)


def test_what_does_not_fit_is_decoded_by_pytorch(folder: Path) -> None:
    """No library, narrow heads, many query heads per key head, weights in bf16, or no autocast (float32)."""
    shape = WIDE["qwen3"]
    with autocast():
        assert not decoding.fits(models.made(shape))
        native.load(folder)
        assert decoding.fits(models.made(shape)) and not decoding.fits(models.made(replace(shape, head_dim=16)))
        assert not decoding.fits(models.made(replace(shape, heads=9, kv_heads=1)))
        assert not decoding.fits(models.made(shape).to(BF16))
    assert not decoding.fits(models.made(shape))


def test_threads_share_the_rows(folder: Path) -> None:
    native.load(folder)
    model, prompts = models.made(WIDE["qwen3"]), prompts_of(203, (20, 9, 14))
    threads, answers = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            with autocast():
                answers.append(generate(model, prompts, Sampling(8, 1.0), stop=(), seeds=[1, 2, 3]))
    finally:
        torch.set_num_threads(threads)
    assert [a.ids for a in answers[0]] == [a.ids for a in answers[1]] == [a.ids for a in answers[2]]
