"""Between the event loop and the engine's thread: what is given up, and what is not."""

import asyncio
import time
from typing import Any

import pytest

from pipeline.generation.sampling import Sampling
from pipeline.model.transformer import Transformer
from pipeline.serve import asking
from pipeline.serve.answers import Assembler
from pipeline.serve.asking import Answers, Finished, Ping, unheard
from pipeline.serve.engine import Engine, Request
from pipeline.serve.faults import ApiFault
from pipeline.text.tokenizer import Tokenizer


def answers(engine: Engine, tokenizer: Tokenizer, *, count: int = 1, tokens: int = 200, **named: Any) -> Answers:
    requests = [
        Request(ids=tokenizer.encode("The pilot"), sampling=Sampling(tokens), seed=n, listener=unheard, **named)
        for n in range(count)
    ]
    return Answers(engine, requests, [Assembler(tokenizer) for _ in requests], n=count)


async def until(condition: Any) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come")


def test_a_loop_that_was_kept_busy_loses_nobody(tiny_model: Transformer, byte_tokenizer: Tokenizer) -> None:
    """The whole answers, 600 events, come while nothing runs on the loop."""

    async def run() -> int:
        with Engine(tiny_model) as engine:
            async with answers(engine, byte_tokenizer, count=3) as asked:
                deadline = time.monotonic() + 60
                while engine.stats().generated_tokens < 600 and time.monotonic() < deadline:
                    time.sleep(0.01)
                heard = [event async for event in asked]
                assert [event.reason for event in heard if isinstance(event, Finished)] == ["length"] * 3
                return asked.usage.completion

    assert asyncio.run(run()) == 600


def test_who_does_not_read_for_long_is_given_up(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "MOST_UNREAD", 8)
    monkeypatch.setattr(asking, "UNREAD_SECONDS", 0.0)

    async def run() -> None:
        with Engine(tiny_model) as engine:
            async with answers(engine, byte_tokenizer) as asked:
                await until(lambda: engine.busy == 0 and engine.stats().generated_tokens)
                assert engine.stats().generated_tokens < 200
                with pytest.raises(ApiFault) as fault:
                    _ = [event async for event in asked]
                assert fault.value.status == 503 and fault.value.code == "cancelled"

    asyncio.run(run())


def test_leaving_frees_the_row_and_silence_gives_pings(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "PING_SECONDS", 0.01)

    async def run() -> None:
        engine = Engine(tiny_model)  # its thread is not started: nothing is said
        async with answers(engine, byte_tokenizer) as asked:
            engine._admit()
            assert engine.busy == 1
            async for event in asked:
                assert isinstance(event, Ping)
                break
        engine.step()
        assert engine.busy == 0

    asyncio.run(run())


def test_several_answers_are_all_taken_or_none(tiny_model: Transformer, byte_tokenizer: Tokenizer) -> None:
    async def run() -> None:
        engine = Engine(tiny_model, rows=2, queue=1)
        with pytest.raises(ApiFault) as fault:
            async with answers(engine, byte_tokenizer, count=4):
                raise AssertionError("not entered")
        assert fault.value.status == 429 and fault.value.retry
        engine.step()
        assert engine.busy == 0 and not engine.waiting

    asyncio.run(run())


def test_time_that_runs_out_is_a_503(tiny_model: Transformer, byte_tokenizer: Tokenizer) -> None:
    async def run() -> None:
        with Engine(tiny_model) as engine:
            async with answers(engine, byte_tokenizer, seconds=0.0) as asked:
                with pytest.raises(ApiFault) as fault:
                    _ = [event async for event in asked]
                assert fault.value.code == "timeout"

    asyncio.run(run())
