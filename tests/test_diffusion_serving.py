"""The engine of masked-diffusion models says what the sampler says, one canvas after another, and fails no request for
another's fault.
"""

import math
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.diffusion import files
from pipeline.diffusion.model import Denoiser, Noised
from pipeline.diffusion.sampling import Denoising, denoise
from pipeline.diffusion.serving import CanvasEngine
from pipeline.generation.sampling import Sampling
from pipeline.model.transformer import Transformer
from pipeline.run.device import stable_hash
from pipeline.serve.loop import Denoised, Ended, Event, GenerationRequest, SampledToken, Ticket
from pipeline.text.tokenizer import Tokenizer
from tests.server import random_model

CANVAS = 12


class Heard(list[Event]):
    """A listener, and what it heard."""

    def __call__(self, event: Event) -> None:
        assert self.end is None, "nothing is told behind the end"
        self.append(event)

    @property
    def said(self) -> list[int]:
        return [event.token for event in self if isinstance(event, SampledToken)]

    @property
    def end(self) -> Ended | None:
        return next((event for event in self if isinstance(event, Ended)), None)

    @property
    def frames(self) -> list[Denoised]:
        return [event for event in self if isinstance(event, Denoised)]


@pytest.fixture
def model(byte_tokenizer: Tokenizer) -> Denoiser:
    """An untrained model to which an end of turn is never likely."""
    made = files.from_causal(random_model(byte_tokenizer), byte_tokenizer)
    with torch.no_grad():
        made.trunk.model.embed_tokens.weight[byte_tokenizer.turn_end] *= 0.0
    return made


def ask(
    engine: CanvasEngine, ids: list[int], tokens: int = CANVAS, seed: int = 0, warm: float = 0.0, **named: Any
) -> tuple[Heard, Ticket]:
    heard = Heard()
    way = Sampling(tokens, temperature=warm, top_p=0.95 if warm else 1.0)
    return heard, engine.submit(GenerationRequest(ids=ids, sampling=way, seed=seed, listener=heard, **named))


def finished(engine: CanvasEngine, *heard: Heard) -> None:
    for _ in range(500):
        if all(one.end for one in heard):
            return
        engine.step()
    raise AssertionError("no end after 500 steps")


def alone(model: Denoiser, ids: list[int], seed: int = 0, warm: float = 0.0, length: int = CANVAS) -> list[int]:
    way = Denoising(length=length, steps=length, temperature=warm, top_p=0.95 if warm else 1.0)
    return denoise(model, [ids], way, [seed])[0].canvas


def test_each_request_hears_what_the_sampler_says(model: Denoiser) -> None:
    engine = CanvasEngine(model, rows=3, canvas=CANVAS)
    cases = [([20 + n, 30, 40 + n][: 1 + n % 3], n, 0.9 * (n % 2)) for n in range(10)]
    heard = [ask(engine, ids, seed=seed, warm=warm)[0] for ids, seed, warm in cases]
    finished(engine, *heard)
    for (ids, seed, warm), one in zip(cases, heard, strict=True):
        assert one.said == alone(model, ids, seed, warm)
        assert one.end == Ended("length", len(ids), 0, CANVAS)
    told = engine.stats()
    assert (told.running, told.prompt_tokens, told.generated_tokens) == (
        0,
        sum(len(ids) for ids, *_ in cases),
        10 * CANVAS,
    )


def test_a_negative_seed_is_a_seed(model: Denoiser) -> None:
    engine = CanvasEngine(model, canvas=CANVAS)
    heard = [
        ask(engine, [20, 21], seed=seed, warm=0.9, tokens=tokens)[0]
        for seed in (-1, -(2**63))
        for tokens in (CANVAS, 20)
    ]
    finished(engine, *heard)
    assert all(one.end is not None and one.end.reason == "length" for one in heard)
    assert heard[0].said == alone(model, [20, 21], 2**64 - 1, 0.9) == heard[1].said[:CANVAS] != heard[2].said


def test_what_is_said_stands_to_the_left_of_the_first_mask_and_never_changes(model: Denoiser) -> None:
    engine = CanvasEngine(model, canvas=CANVAS)
    heard, _ = ask(engine, [20, 21], frames=True)
    finished(engine, heard)
    assert [(frame.step, frame.steps, frame.offset) for frame in heard.frames] == [
        (n, CANVAS, 0) for n in range(1, CANVAS + 1)
    ]
    assert [frame.tokens.count(None) for frame in heard.frames] == list(range(CANVAS - 1, -1, -1))
    said: list[int] = []
    for event in heard:
        if isinstance(event, SampledToken):
            said.append(event.token)
            assert event.logprob <= 0 and math.isfinite(event.logprob)
        elif isinstance(event, Denoised):
            left = event.tokens[: event.tokens.index(None)] if None in event.tokens else event.tokens
            assert list(left[: len(said)]) == said
    assert said == list(heard.frames[-1].tokens)


def test_an_answer_goes_on_on_another_canvas(model: Denoiser) -> None:
    engine = CanvasEngine(model, canvas=CANVAS)
    heard, _ = ask(engine, [20, 21], tokens=30, seed=5, warm=0.9, frames=True)
    finished(engine, heard)
    said, offsets = [], (0, CANVAS, 2 * CANVAS)
    for offset in offsets:
        said += alone(model, [20, 21, *said], stable_hash(5, "canvas", offset) if offset else 5, 0.9)
    assert heard.said == said[:30] and heard.end == Ended("length", 2, 0, 30)
    assert sorted({frame.offset for frame in heard.frames}) == list(offsets)


def test_an_end_of_turn_ends_the_answer_as_soon_as_all_before_it_stands(model: Denoiser) -> None:
    canvas = alone(model, [20, 21])
    traits = replace(model.traits, ends=(canvas[4],))
    ended = Denoiser(model.trunk, traits)
    first = alone(ended, [20, 21]).index(canvas[4])
    engine = CanvasEngine(ended, canvas=CANVAS)
    heard, _ = ask(engine, [20, 21], tokens=60)
    finished(engine, heard)
    assert heard.said == canvas[:first] and heard.end == Ended("stop", 2, 0, first)
    stopped, _ = ask(CanvasEngine(model, canvas=CANVAS), [20, 21])
    engine = CanvasEngine(model, canvas=CANVAS)
    stopped, _ = ask(engine, [20, 21], stop=(canvas[4],))
    finished(engine, stopped)
    assert stopped.said == canvas[:first] and stopped.end is not None and stopped.end.reason == "stop"


def test_blocks_and_the_context_bound_a_canvas(model: Denoiser, byte_tokenizer: Tokenizer) -> None:
    blocks = Denoiser(model.trunk, replace(model.traits, block_size=5))
    assert CanvasEngine(blocks, canvas=CANVAS).canvas == 10 and CanvasEngine(blocks, canvas=3).canvas == 5
    engine = CanvasEngine(blocks, canvas=CANVAS)
    heard, _ = ask(engine, [20, 21], tokens=12)
    finished(engine, heard)
    assert len(heard.said) == 12
    small: Transformer = random_model(byte_tokenizer, context=32)
    tight = files.from_causal(small, byte_tokenizer)
    with torch.no_grad():
        tight.trunk.model.embed_tokens.weight[byte_tokenizer.turn_end] *= 0.0
    engine = CanvasEngine(tight, canvas=CANVAS)
    heard, _ = ask(engine, list(range(20, 46)), tokens=100)
    finished(engine, heard)
    assert heard.end == Ended("length", 26, 0, 6)
    engine = CanvasEngine(Denoiser(tight.trunk, replace(tight.traits, block_size=4)), canvas=CANVAS)
    heard, _ = ask(engine, list(range(20, 46)), tokens=100)
    finished(engine, heard)
    assert heard.end == Ended("length", 26, 0, 4)  # no whole block fits in what is left


def test_a_request_that_is_given_up_says_no_more_and_frees_its_row(model: Denoiser) -> None:
    engine = CanvasEngine(model, rows=1, canvas=CANVAS)
    first, ticket = ask(engine, [20], tokens=60)
    second, _ = ask(engine, [21])
    for _ in range(4):
        engine.step()
    ticket.cancel()
    count = len(first)
    finished(engine, first, second)
    assert first.end is not None and first.end.reason == "cancelled" and len(first) == count + 1
    assert second.said == alone(model, [21])


def test_a_listener_that_fails_loses_its_own_request_alone(model: Denoiser) -> None:
    engine = CanvasEngine(model, rows=2, canvas=CANVAS)

    def broken(event: Event) -> None:
        raise RuntimeError("deaf")

    engine.submit(GenerationRequest(ids=[20], sampling=Sampling(8), seed=0, listener=broken))
    engine.submit(GenerationRequest(ids=[20], sampling=Sampling(8), seed=0, listener=broken, frames=True))
    heard, _ = ask(engine, [21])
    finished(engine, heard)
    assert heard.said == alone(model, [21]) and engine.busy == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_whose_logits_are_no_numbers_ends_alone(
    model: Denoiser, monkeypatch: pytest.MonkeyPatch, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Only its canvas is broken, from the third step on; the others say what they would say alone."""
    engine = CanvasEngine(model, rows=3, canvas=CANVAS)
    expected = [alone(model, [21]), alone(model, [22], 1, 0.9)]
    failed, _ = ask(engine, [20], identity="req-7")
    others = [ask(engine, [21])[0], ask(engine, [22], seed=1, warm=0.9)[0]]
    logits = model.logits

    def broken(noised: Noised) -> torch.Tensor:
        found = logits(noised)
        return found.fill_(value) if int(noised.tokens[0, 0]) == 20 and engine._counts["steps"] > 2 else found

    monkeypatch.setattr(model, "logits", broken)
    finished(engine, failed, *others)
    assert failed.end is not None and failed.end.reason == "error" and "req-7" in caplog.text
    assert [one.said for one in others] == expected and engine.busy == 0


def test_a_panic_in_a_step_ends_its_own_request_alone(model: Denoiser, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    engine = CanvasEngine(model, rows=2, canvas=CANVAS)
    failed, other = ask(engine, [20], tokens=60)[0], ask(engine, [21])[0]
    engine.step()

    def panics() -> Any:
        raise Panic("index out of bounds")
        yield

    next(slot for slot in engine.slots if slot.prompt == [20]).work = panics()
    finished(engine, failed, other)
    assert failed.end is not None and (failed.end.reason, failed.end.message) == ("error", "Panic")
    assert other.said == alone(model, [21])


def test_the_thread_answers_and_ends(model: Denoiser) -> None:
    done = threading.Event()
    with CanvasEngine(model, canvas=CANVAS) as engine:
        heard = Heard()

        def hear(event: Event) -> None:
            heard(event)
            if isinstance(event, Ended):
                done.set()

        engine.submit(GenerationRequest(ids=[20], sampling=Sampling(CANVAS), seed=0, listener=hear))
        assert done.wait(60)
    assert heard.said == alone(model, [20])
