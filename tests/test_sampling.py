"""Decoding against teacher forcing and against one row at a time; the noise against published numbers."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.generation.sampling import (
    Completion,
    Decoder,
    Sampling,
    _truncate,
    _wide_nucleus_floor,
    choose,
    generate,
    philox,
    rows_within,
    uniforms,
)
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=96,
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    d_ff=48,
    max_context=320,
    rope_theta=1e4,
    tied=True,
)


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = Transformer(CONFIG, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.2)
    return model


def some_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
    return [torch.randint(0, 96, (length,), generator=generator).tolist() for length in lengths]


def test_philox_gives_the_published_numbers() -> None:
    """Known answers of Random123's philox4x32-10."""
    cases = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, expected in cases:
        words = philox(np.array(counter, dtype=np.uint64)[:, None], key)
        assert tuple(int(word) for word in words[:, 0]) == expected


def test_uniform_numbers_are_a_function_of_seed_and_index() -> None:
    numbers = uniforms(12345678901234, 0, 4000)
    assert np.array_equal(numbers[100:200], uniforms(12345678901234, 100, 100))
    assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.02 and abs(numbers.var() - 1 / 12) < 0.005
    assert not np.intersect1d(numbers, uniforms(12345678901235, 0, 4000)).size


def test_a_token_is_the_inverse_of_the_cumulative_distribution() -> None:
    """Probabilities 0.1, 0.2, 0.3, 0.4: boundaries at 0.1, 0.3, 0.6."""
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    numbers = torch.tensor([0.0, 0.09, 0.11, 0.29, 0.31, 0.59, 0.61, 1 - 2**-53], dtype=torch.float64)
    tokens, logprobs = choose(logits.expand(8, 4), numbers, Sampling(1, temperature=1.0))
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert torch.allclose(logprobs.float(), logits[tokens], atol=1e-6)


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-300, 5e-324])
def test_a_temperature_below_every_float32_chooses_the_most_likely(temperature: float) -> None:
    """0 / 0 once gave a token past the vocabulary's last block, which ended the server's loop."""
    logits = torch.linspace(-40, 40, 300).repeat(16, 1)
    logits[8:, :298] = 40.0  # a tie of 299
    tokens, logprobs = choose(logits, torch.from_numpy(uniforms(0, 0, 16)), Sampling(1, temperature, top_p=0.9))
    assert tokens[:8].tolist() == [299] * 8 and logprobs[:8].tolist() == [0.0] * 8
    assert torch.allclose(logprobs[8:], -torch.tensor(299.0, dtype=torch.float64).log()) and 298 not in tokens


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1, temperature=1.0, top_k=2), {2, 3}),
        (Sampling(1, temperature=1.0, top_p=0.3), {3}),
        (Sampling(1, temperature=1.0, top_p=0.45), {2, 3}),
        (Sampling(1, temperature=1.0, top_p=0.95), {0, 1, 2, 3}),
        (Sampling(1, temperature=1.0, top_k=2, top_p=0.5), {3}),
        (Sampling(1, temperature=1.0, top_k=9), {0, 1, 2, 3}),
    ],
)
def test_top_k_and_top_p_keep_the_likeliest(sampling: Sampling, kept: set[int]) -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(1000, 4)
    numbers = torch.from_numpy(uniforms(0, 0, 1000))
    tokens, logprobs = choose(logits, numbers, sampling)
    assert set(tokens.tolist()) == kept
    assert torch.allclose(logprobs.float(), logits[0][tokens], atol=1e-6), "of the whole distribution"


def test_a_wide_nucleus_needs_the_whole_sort_and_gets_it() -> None:
    logits = torch.linspace(0, 1, 90).expand(2000, 90)
    numbers = torch.from_numpy(uniforms(0, 0, 2000))
    tokens, _ = choose(logits, numbers, Sampling(1, temperature=1.0, top_p=0.9))
    falling = logits[0].double().softmax(0).flip(0).cumsum(0)
    size = int((falling < 0.9).sum()) + 1
    assert size > 64 and tokens.min() == 90 - size


def by_sorting(weights: Tensor, top_p: float) -> Tensor:
    """A nucleus by its definition: the likeliest tokens until their sum (in float64) reaches the share, with all that
    tie with the last of them.
    """
    wanted = top_p * weights.sum(-1, keepdim=True)
    falling = weights.sort(dim=-1, descending=True).values
    end = (falling.double().cumsum(-1).to(weights.dtype) < wanted).sum(-1, keepdim=True).clamp_max(weights.shape[1] - 1)
    return weights.where(weights >= falling.gather(1, end), 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("top_p", [1e-9, 1e-3, 0.3, 0.9, 0.95, 0.999, 1 - 1e-7])
def test_a_nucleus_found_by_buckets_is_the_one_that_sorting_finds(dtype: torch.dtype, top_p: float) -> None:
    """Peaked and flat rows, ties in the middle and everywhere, weights of 0 and below every bucket, one token alone."""
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(40, 1500, generator=generator) * spread for spread in (0.0, 1e-4, 0.3, 1.0, 4.0, 30.0, 90.0)]
    logits.append(torch.randn(40, 1500, generator=generator).mul(4).round())  # every weight occurs many times
    lone = torch.full((1, 1500), -200.0)
    lone[0, 7] = 0
    weights = torch.cat([*logits, lone]).to(dtype)
    wide = weights.double() if dtype == torch.float64 else weights.float()
    weights = (wide - wide.amax(-1, keepdim=True)).exp()
    kept = by_sorting(weights, top_p)
    floors = _wide_nucleus_floor(weights, top_p * weights.sum(-1, keepdim=True))  # for narrow rows too
    assert torch.equal(weights.where(weights >= floors, 0.0), kept)
    if top_p < 0.99:  # above that, the rest is too small for the float32 sums of the first look at narrow rows
        assert torch.equal(_truncate(weights, Sampling(1, temperature=1.0, top_p=top_p)), kept)


def test_rows_that_hold_no_numbers_leave_the_others_alone() -> None:
    weights = torch.rand(5, 300, generator=torch.Generator().manual_seed(0))
    weights[2] = math.nan
    floors = _wide_nucleus_floor(weights, 0.9 * weights.sum(-1, keepdim=True))
    others = [0, 1, 3, 4]
    assert torch.equal(weights[others].where(weights[others] >= floors[others], 0.0), by_sorting(weights[others], 0.9))


def test_samples_follow_the_distribution() -> None:
    logits = torch.randn(20, generator=torch.Generator().manual_seed(0))
    tokens, _ = choose(
        logits.expand(40_000, 20), torch.from_numpy(uniforms(7, 0, 40_000)), Sampling(1, temperature=0.7)
    )
    counts = torch.bincount(tokens, minlength=20)
    expected = (logits / 0.7).softmax(0) * 40_000
    assert ((counts - expected) ** 2 / expected).sum() < 43.8  # chi-squared, 19 degrees, p = 0.001


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_equal_teacher_forcing(model: Transformer, temperature: float) -> None:
    prompts = some_prompts(9)
    done = generate(
        model, prompts, Sampling(30, temperature, top_p=0.9), stop={3, 4}, seeds=list(range(9)), batch_rows=4
    )
    for prompt, completion in zip(prompts, done):
        ids = prompt + completion.ids
        with torch.no_grad():
            expected = (model(torch.tensor([ids]))[0] / (temperature or 1.0)).log_softmax(-1)
        for t, token in enumerate(completion.ids):
            assert abs(completion.logprobs[t] - expected[len(prompt) - 1 + t, token].item()) < 1e-5
        if completion.stop == "stop":
            assert len(completion.logprobs) == len(completion.ids) + 1
            assert min(abs(completion.logprobs[-1] - expected[-1, stop].item()) for stop in (3, 4)) < 1e-5
        else:
            assert len(completion.ids) == len(completion.logprobs) == 30


@pytest.mark.parametrize("sampling", [Sampling(12), Sampling(12, 0.8, top_p=0.95, top_k=30)])
def test_a_sample_does_not_depend_on_its_batch(model: Transformer, sampling: Sampling) -> None:
    prompts = some_prompts(10)
    prompts[5] = prompts[9] = prompts[2]  # equal prompts are read only once
    seeds = [100 + i for i in range(10)]
    together = generate(model, prompts, sampling, stop={1, 2, 3}, seeds=seeds)
    for batch_rows in (1, 3):
        again = generate(model, prompts, sampling, stop={1, 2, 3}, seeds=seeds, batch_rows=batch_rows)
        assert [(c.ids, c.stop) for c in again] == [(c.ids, c.stop) for c in together]
    backwards = generate(model, prompts[::-1], sampling, stop={1, 2, 3}, seeds=seeds[::-1])[::-1]
    assert [c.ids for c in backwards] == [c.ids for c in together]
    assert len({tuple(together[i].ids) for i in (2, 5, 9)}) == (1 if sampling.temperature == 0 else 3)


def slow_greedy(model: Transformer, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_greedy_equals_running_the_whole_text_again(model: Transformer) -> None:
    prompts = some_prompts(3)
    done = generate(model, prompts, Sampling(20), stop=(), seeds=[0] * 3)
    assert [c.ids for c in done] == [slow_greedy(model, prompt, 20) for prompt in prompts]


def test_a_full_context_ends_the_row(model: Transformer) -> None:
    prompt = [5] * 310
    assert len(generate(model, [prompt], Sampling(64), stop=(), seeds=[0])[0].ids) == 10


def test_training_mode_is_left_as_it_was(model: Transformer) -> None:
    model.train(True)
    model.dropout = 0.5
    try:
        first, second = (generate(model, [[1, 2]], Sampling(9), stop=(), seeds=[0])[0] for _ in range(2))
        assert model.training and first == second
    finally:
        model.dropout = 0.0


def test_rows_of_the_decoder_go_on_alone(model: Transformer) -> None:
    """Feed rows at different times and in different pieces; each sees its own text."""
    decoder = Decoder(model, 3)
    texts = [some_prompts(8)[i][:12] * 2 for i in (0, 3, 4)]
    decoder.feed([2], [texts[2][:5]])
    decoder.feed([0, 2], [texts[0][:3], texts[2][5:6]])
    decoder.feed([0, 2], [texts[0][3:4], texts[2][6:7]])
    decoder.feed([1], [[9, 9, 9]])
    decoder.clear(1)
    logits = decoder.feed([2, 1, 0], [texts[2][7:], texts[1], texts[0][4:]])
    for row, text in zip(logits, (texts[2], texts[1], texts[0])):
        with torch.no_grad():
            assert torch.allclose(row, model(torch.tensor([text]))[0, -1], atol=1e-4)


def test_no_prompts_give_no_completions(model: Transformer) -> None:
    assert generate(model, [], Sampling(4), stop=(), seeds=[]) == []


def test_what_cannot_be_sampled_is_refused(model: Transformer) -> None:
    for prompts, seeds, message in [
        ([[]], [0], "0 tokens"),
        ([[1] * 320], [0], "320 tokens"),
        ([[1]], [], "a seed for each"),
    ]:
        with pytest.raises(ValueError, match=message):
            generate(model, prompts, Sampling(4), stop=(), seeds=seeds)
    for wrong in (
        {"max_new_tokens": 0},
        {"max_new_tokens": 1, "temperature": -1},
        {"max_new_tokens": 1, "top_p": 0},
        {"max_new_tokens": 1, "temperature": float("nan")},
        {"max_new_tokens": 1, "temperature": float("inf")},
    ):
        with pytest.raises(ValueError, match="expected"):
            Sampling(**wrong)
    with pytest.raises(ValueError, match="bidirectional"):
        Decoder(Transformer(ModelConfig(**{**CONFIG.__dict__, "attention": "bidirectional"})), 1)


def test_uniform_model_has_uniform_logprobs() -> None:
    done = generate(Transformer(CONFIG), [[1]], Sampling(8, 1.0), stop=(), seeds=[3])
    assert isinstance(done[0], Completion)
    assert all(math.isclose(value, -math.log(96), abs_tol=1e-12) for value in done[0].logprobs)
    assert done[0].ids == [int(u * 96) for u in uniforms(3, 0, 8)]


def test_the_cache_of_the_rows_decoded_together_is_bounded(model: Transformer) -> None:
    """Two layers of two key heads of eight in float32: 256 bytes a token, keys and values."""
    assert rows_within(model, 2**21 // 100) == 100
    assert rows_within(model, 10) == 512
    assert rows_within(model, 10**7) == 8
