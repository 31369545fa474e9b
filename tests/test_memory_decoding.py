"""A memory in decoding, padding, packing, gradient checkpointing, the engine and the exports: the same as the full
pass.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.export import gguf
from pipeline.export.inference import Fused
from pipeline.generation.sampling import Sampling, generate
from pipeline.memory.model import Reader, Reading, Routed
from pipeline.model.cache import KVCache
from pipeline.model.transformer import Transformer
from pipeline.run.errors import ModelError
from pipeline.serve.engine import Engine
from pipeline.text.tokenizer import Tokenizer
from tests.engine import ask, finished
from tests.memory_models import FORMS, TINY, asked, memory, opened, tokens


@pytest.mark.parametrize("storage", FORMS, ids=lambda form: form["storage"] + "-gated" * ("gated" in form))
@pytest.mark.parametrize("routing", ["chunk", "token", "prompt"])
@pytest.mark.parametrize("prompt", [1, 7, 8, 9, 17])
def test_cached_decoding_equals_the_full_pass(storage: dict[str, Any], routing: str, prompt: int) -> None:
    model = opened(memory(routing=routing, layers="all", **storage))
    ids = tokens(2, 33)
    with torch.no_grad():
        full = model(ids, reading=Reading(trained=asked(2, 33, prompt - 1)))
        for steps in ([1] * (33 - prompt), [8, 1, 33 - prompt - 9]):
            cache = KVCache(model.config, 2, dtype=torch.float32, device=torch.device("cpu"))
            parts, at = [model(ids[:, :prompt], cache=cache)], prompt
            for step in steps:
                parts.append(model(ids[:, at : at + step], cache=cache))
                at += step
            found = torch.cat(parts, 1)
            since = 0 if routing != "prompt" else prompt - 1
            torch.testing.assert_close(found[:, since:], full[:, since:], rtol=1e-5, atol=1e-5)
            assert torch.equal(found[:, since:].argmax(-1), full[:, since:].argmax(-1))


@pytest.mark.parametrize("routing", ["chunk", "prompt"])
def test_rows_that_share_a_prompt_decode_as_alone(routing: str) -> None:
    model = opened(memory(routing=routing, layers="all"))
    ids = tokens(2, 30)
    ids[1, :13] = ids[0, :13]
    with torch.no_grad():
        full = model(ids, reading=Reading(trained=asked(2, 30, 12)))
        cache = KVCache(model.config, 2, dtype=torch.float32, device=torch.device("cpu"))
        (place,) = cache.room_for_prompts(1)
        assert cache.prompts is not None
        model(ids[:1, :13], cache=cache.prompts)
        for row in range(2):
            cache.clear(row, place)
        parts = [model(ids[:, at : at + 1], cache=cache) for at in range(13, 30)]
    torch.testing.assert_close(torch.cat(parts, 1), full[:, 13:], rtol=1e-5, atol=1e-5)


def test_a_row_that_is_cut_back_goes_on_as_if_it_had_never_been_longer() -> None:
    model = opened(memory(layers="all"))
    ids, other = tokens(1, 30), tokens(1, 30, seed=5)
    with torch.no_grad():
        full = model(ids)
        for length in (3, 8, 15, 16, 20):
            cache = KVCache(model.config, 1, dtype=torch.float32, device=torch.device("cpu"))
            model(torch.cat([ids[:, :length], other[:, length:29]], 1), cache=cache)
            cache.own[0] = length
            found = [model(ids[:, at : at + 1], cache=cache) for at in range(length, 30)]
            torch.testing.assert_close(torch.cat(found, 1), full[:, length:], rtol=1e-5, atol=1e-5)
            model(other[:, 10:], cache=cache)
            cache.own[0] = length  # and all at once, over units that the row had reached before
            torch.testing.assert_close(model(ids[:, length:], cache=cache), full[:, length:], rtol=1e-5, atol=1e-5)


def test_routing_by_sequence_cannot_be_decoded() -> None:
    model = opened(memory(routing="sequence", allow_leak=True))
    cache = KVCache(model.config, 1, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="the model cannot generate"):
        model(tokens(1, 3), cache=cache)


@pytest.mark.parametrize("routing", ["chunk", "token", "prompt"])
def test_padding_and_packing_change_no_logit(routing: str) -> None:
    model = opened(memory(routing=routing, layers="all"), double=True)
    one, two = tokens(1, 19, seed=3), tokens(1, 11, seed=4)
    losses = {length: asked(1, length, 5) for length in (19, 11)}
    with torch.no_grad():
        alone = [model(ids, reading=Reading(trained=losses[ids.shape[1]])) for ids in (one, two)]
        hidden = torch.zeros(1, 2, dtype=torch.int64)
        ids = torch.cat([hidden, one, two, hidden], 1)
        documents = torch.tensor([[-1] * 2 + [0] * 19 + [1] * 11 + [-2] * 2], dtype=torch.int32)
        none = torch.zeros(1, 2, dtype=torch.bool)
        trained = torch.cat([none, losses[19], losses[11], none], 1)
        packed = model(ids, documents=documents, reading=Reading(trained=trained))
    torch.testing.assert_close(packed[:, 2:21], alone[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(packed[:, 21:32], alone[1], rtol=1e-12, atol=1e-12)


def gradients(model: Transformer, ids: Tensor, mode: Any) -> tuple[dict[str, Tensor], dict[int, Routed]]:
    model.train().checkpointing = mode
    model.zero_grad()
    told = Reading()
    model(ids, reading=told).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, told.routed


@pytest.mark.parametrize("mode", ["full", "every_2", "selective"])
def test_layers_that_are_computed_again_choose_and_learn_the_same(mode: str) -> None:
    model, ids = opened(memory(layers="all")), tokens(2, 30)
    plain, chose = gradients(model, ids, "none")
    again, chose_again = gradients(model, ids, mode)
    assert plain.keys() == again.keys() and any("router" in name for name in plain)
    for name, gradient in plain.items():
        assert torch.equal(gradient, again[name]), name
    assert all(torch.equal(chose[layer].chosen, chose_again[layer].chosen) for layer in chose)


def test_two_passes_before_a_backward() -> None:
    model, (one, two) = opened(memory(layers="all")).train(), (tokens(2, 30), tokens(1, 17, seed=8))
    apart: dict[str, Tensor] = {}
    for ids in (one, two):
        model.zero_grad()
        model(ids).square().mean().backward()
        apart = {name: p.grad + apart.get(name, 0) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    first, second = model(one).square().mean(), model(two).square().mean()
    (first + second).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, apart[name], rtol=1e-5, atol=1e-7)


def test_of_equal_logits_the_lower_chapter_is_chosen() -> None:
    reader = Reader(memory(), TINY)
    assert reader.route(torch.zeros(3, 32)).chosen.tolist() == [[0, 1]] * 3
    assert reader.route(torch.zeros(3, 32)).log_weights.tolist() == [[0.0, 0.0]] * 3


def test_the_way_in_bf16_is_close_to_float32() -> None:
    model, ids = opened(memory(layers="all")), tokens(4, 100)
    with torch.no_grad():
        wide = model(ids)
        with torch.autocast("cpu", torch.bfloat16):
            narrow = model(ids)
    assert (wide - narrow.float()).abs().max() < 0.05 * wide.abs().max()


# -- served ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ["chunk", "token", "prompt"])
def test_the_engine_says_what_the_sampler_says(routing: str) -> None:
    """With drafts, rows that begin alike, and prompts longer than a step takes, all of which cut rows back."""
    model = opened(memory(routing=routing, layers="all"), shape=replace(TINY, max_context=512))
    start = tokens(1, 300)[0].tolist()
    prompts = [start, [*start[:40], *start[:9]], [*start[:200], 5, 6, 7], start[:23] * 4, start, start[:30]]
    engine = Engine(Fused(model), rows=2, queue=8)
    way = Sampling(max_new_tokens=20)
    heard = [ask(engine, ids, way)[0] for ids in prompts]
    finished(engine, *heard)
    expected = generate(model, prompts, way, stop=(), seeds=[0] * len(prompts))
    assert [one.ids for one in heard] == [one.ids for one in expected]
    cached = [one.end.cached_tokens for one in heard if one.end is not None]
    assert any(cached) is (routing != "prompt")


def test_an_export_that_would_drop_the_memory_is_refused(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(ModelError, match=r"llama\.cpp does not support the memory"):
        gguf.write(tmp_path / "m.gguf", opened(memory()), byte_tokenizer, "", kind="f16", name="m")
