"""How an answer leaves, where the connection takes nothing more."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from starlette.types import Message, Scope

from pipeline.serve import streaming
from pipeline.serve.asking import Answers
from pipeline.serve.streaming import EventStream


class Entered:
    """Stands for answers that have been entered: only their leaving counts here."""

    left = False

    async def __aexit__(self, *_: object) -> None:
        self.left = True


def test_an_event_that_finds_no_room_for_long_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SEND_SECONDS", 0.05)
    sent: list[bytes] = []
    ends: list[tuple[int, str | None]] = []
    answers = Entered()

    async def tell(_: Answers) -> AsyncIterator[bytes]:
        for number in range(100):
            yield b"data: %d\n\n" % number

    async def send(message: Message) -> None:
        if len(sent) == 3:
            await asyncio.Event().wait()
        sent.append(message.get("body", b""))

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> None:
        stream = EventStream(cast(Any, answers), tell, lambda status, code: ends.append((status, code)))
        scope: Scope = {"identity": "one"}
        await asyncio.wait_for(stream(scope, receive, send), 10)

    asyncio.run(run())
    assert sent == [b"", b"data: 0\n\n", b"data: 1\n\n"]
    assert ends == [(499, "unread")] and answers.left
