"""Between the event loop and the engine's thread: what is dropped, and what is not."""

import asyncio
import threading
import time
from typing import Any

import pytest

from pipeline.generation.sampling import Sampling
from pipeline.model.transformer import Transformer
from pipeline.serve import answers as serve_answers
from pipeline.serve.answers import Answers, Assembler, Finished, Mailbox, Ping, unheard
from pipeline.serve.engine import Ended, Engine, Event
from pipeline.serve.engine import GenerationRequest as Request
from pipeline.serve.protocol import ApiFault
from pipeline.text.tokenizer import Tokenizer


def answers(engine: Engine, tokenizer: Tokenizer, *, count: int = 1, tokens: int = 200, **named: Any) -> Answers:
    requests = [
        Request(ids=tokenizer.encode("The pilot"), sampling=Sampling(tokens), seed=n, listener=unheard, **named)
        for n in range(count)
    ]
    return Answers(engine, requests, [Assembler(tokenizer) for _ in requests], n=count)


def test_a_loop_is_woken_once_for_all_that_came_since_it_looked() -> None:
    woken: list[object] = []
    heard: list[tuple[int, int]] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        mailbox = Mailbox.of(loop)
        assert Mailbox.of(loop) is mailbox
        wake = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda call, *given, **named: (woken.append(call), wake(call, *given, **named))[1]  # type: ignore[method-assign]
        for turn in (1, 2):
            posting = [threading.Thread(target=post, args=(mailbox, number, turn)) for number in range(4)]
            for thread in posting:
                thread.start()
            for thread in posting:
                thread.join()  # the loop does not run meanwhile
            assert len(woken) == turn and len(heard) == 400 * (turn - 1)
            await until(lambda turn=turn: len(heard) == 400 * turn)

    def post(mailbox: Mailbox, number: int, turn: int) -> None:
        for place in range(100):
            mailbox.post(lambda index, _: heard.append((number, index)), 1000 * turn + place, Ended("stop", 0, 0, 0))

    asyncio.run(run())
    for number in range(4):  # in the order in which they were posted
        own = [index for who, index in heard if who == number]
        assert own == sorted(own) and len(own) == 200


def test_a_closed_loop_is_told_to_everyone_who_posts() -> None:
    loop = asyncio.new_event_loop()
    mailbox = Mailbox.of(loop)
    loop.close()
    for _ in range(3):
        with pytest.raises(RuntimeError):
            mailbox.post(lambda index, event: None, 0, Ended("stop", 0, 0, 0))


def test_one_that_fails_holds_up_nobody_behind_it() -> None:
    heard: list[int] = []

    def hear(index: int, _: Event) -> None:
        if index == 0:
            raise ZeroDivisionError
        heard.append(index)

    async def run() -> None:
        mailbox = Mailbox.of(asyncio.get_running_loop())
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        for place in (0, 1):
            mailbox.post(hear, place, Ended("stop", 0, 0, 0))
        await until(lambda: heard)

    asyncio.run(run())
    assert heard == [1]


def test_a_ping_follows_silence_alone_and_the_next_look_is_always_set(
    tiny_model: Transformer, byte_tokenizer: Tokenizer
) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        async with answers(Engine(tiny_model), byte_tokenizer) as asked:  # no thread, so nothing is generated

            def look(silent: float) -> tuple[int, float]:
                """Pings queued after a look, `silent` seconds after the last event, and seconds to the next look."""
                asked._read = time.monotonic() - silent
                asked._ping()
                assert asked._timer is not None
                return asked._queue.qsize(), asked._timer.when() - loop.time()

            waiting, ahead = look(serve_answers.PING_SECONDS - 5)
            assert waiting == 0 and 0 < ahead <= 5
            for _ in range(2):  # no second ping before the first is read
                waiting, ahead = look(serve_answers.PING_SECONDS + 5)
                assert waiting == 1 and serve_answers.PING_SECONDS / 2 < ahead <= serve_answers.PING_SECONDS
            assert isinstance(await anext(aiter(asked)), Ping)
            assert look(0)[0] == 0 and look(serve_answers.PING_SECONDS + 5)[0] == 1

    asyncio.run(run())


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
    monkeypatch.setattr(serve_answers, "MOST_UNREAD", 8)
    monkeypatch.setattr(serve_answers, "UNREAD_SECONDS", 0.0)

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
    monkeypatch.setattr(serve_answers, "PING_SECONDS", 0.01)

    async def run() -> None:
        engine = Engine(tiny_model)  # its thread is not started, so nothing is generated
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
