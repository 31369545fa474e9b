"""The key-value cache: rows that share a prompt give the same results as rows with their own copy."""

import pytest
import torch
from torch import Tensor

from pipeline.generation.sampling import Decoder, Sampling, generate
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=128,
    width=48,
    layers=3,
    heads=6,
    kv_heads=2,
    head_dim=16,
    d_ff=80,
    max_context=300,
    rope_theta=1e4,
    tied=True,
)
PROMPTS = [[5, 9, 2] * 30, [7] * 4, [1, 2, 3, 4, 5]]


@pytest.fixture
def model() -> Transformer:
    made = Transformer(CONFIG, torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(1.6 if parameter.ndim > 1 else 1.1)
    return made.eval()


@torch.no_grad()
def uncached(model: Transformer, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens]))[0, -1]


def check(
    model: Transformer, decoder: Decoder, held: dict[int, list[int]], rows: list[int], pieces: list[list[int]]
) -> None:
    """Feed the pieces, and compare each row's logits with those of its whole text."""
    logits = decoder.feed(rows, pieces)
    for row, piece, found in zip(rows, pieces, logits, strict=True):
        held[row] = held[row] + piece
        assert torch.allclose(found, uncached(model, held[row]), atol=1e-9), f"row {row}"


def test_rows_on_shared_prompts_equal_rows_read_whole(model: Transformer) -> None:
    decoder = Decoder(model, 7)
    places, logits = decoder.read(PROMPTS[:2])
    for prompt, found in zip(PROMPTS, logits):
        assert torch.allclose(found, uncached(model, prompt), atol=1e-9)
    prompt_of = {0: 0, 1: 0, 3: 0, 4: 1, 6: None, 2: None}  # row 5 holds nothing
    held: dict[int, list[int]] = {}
    for row, prompt in prompt_of.items():
        decoder.clear(row, None if prompt is None else places[prompt])
        held[row] = [] if prompt is None else PROMPTS[prompt]
    check(model, decoder, held, [6, 2], [[3, 3, 8], [9]])  # no shared prompt: fed whole
    for step in range(3):  # one token each for some rows, in any order
        check(model, decoder, held, [4, 0, 6, 1, 3], [[step + n] for n in range(5)])
    check(model, decoder, held, [4, 1, 2], [[50, 51, 52], [60], [70, 71]])  # several tokens after a prompt
    check(model, decoder, held, [0, 1, 2, 3, 4, 6], [[n] for n in range(6)])
    assert decoder.cache.lengths == [len(held.get(row, [])) for row in range(7)]


def test_rows_that_stay_keep_their_prompts_and_others_make_room(model: Transformer) -> None:
    decoder = Decoder(model, 3)
    places, _ = decoder.read(PROMPTS)
    for row, place in enumerate(places):
        decoder.clear(row, place)
    held = dict(enumerate(PROMPTS))
    check(model, decoder, held, [0, 1, 2], [[1], [2], [3]])
    decoder.cache.select([2, 0])
    held = {0: held[2], 1: held[0]}
    assert decoder.cache.prompts is not None and len(decoder.cache.prompts.own) == 2
    check(model, decoder, held, [0, 1], [[4], [5]])
    decoder.clear(0)
    decoder.clear(0, decoder.read([[8, 8, 8]])[0][0])  # takes the place of a prompt that no row needs any more
    assert len(decoder.cache.prompts.own) == 2
    held[0] = [8, 8, 8]
    check(model, decoder, held, [0, 1], [[6], [7]])


def test_a_prompt_and_what_follows_are_no_longer_than_the_context(model: Transformer) -> None:
    decoder = Decoder(model, 1)
    decoder.clear(0, decoder.read([[1] * 299])[0][0])
    decoder.feed([0], [[2]])
    with pytest.raises(ValueError, match="301 tokens is longer than the model's context of 300"):
        decoder.feed([0], [[3]])


def test_samples_do_not_depend_on_who_shares_their_prompt(model: Transformer) -> None:
    asked = [PROMPTS[0], PROMPTS[2], PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[2]]
    sampling = Sampling(20, temperature=1.0)
    seeds = list(range(6))
    alone = [generate(model, [prompt], sampling, stop={3}, seeds=[seed])[0] for prompt, seed in zip(asked, seeds)]
    for rows in (1, 2, 4, 6):
        together = generate(model, asked, sampling, stop={3}, seeds=seeds, batch_rows=rows)
        assert [one.ids for one in together] == [one.ids for one in alone]
        for one, other in zip(together, alone):
            assert torch.allclose(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-9)
