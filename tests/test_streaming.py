"""How an answer ends when the connection takes nothing more."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from starlette.types import Message, Scope

from pipeline.serve import answers as serve_answers
from pipeline.serve.answers import Answers, EventStream


class Entered:
    """Stands in for answers that have been entered; only their exit matters here."""

    left = False

    async def __aexit__(self, *_: object) -> None:
        self.left = True


@dataclass
class Connection:
    """A client's end: it takes `room` messages, and never goes away."""

    room: int
    sent: list[bytes] = field(default_factory=list)
    ends: list[tuple[int, str | None]] = field(default_factory=list)

    async def send(self, message: Message) -> None:
        """Take a message, or keep the sender waiting forever."""
        if len(self.sent) == self.room:
            await asyncio.Event().wait()
        self.sent.append(message.get("body", b""))

    async def receive(self) -> Message:
        """Wait forever, since nothing comes."""
        await asyncio.Event().wait()
        raise AssertionError

    def told(self, tell: Callable[[Answers], AsyncIterator[bytes]]) -> Entered:
        """Run a stream on this connection to its end."""

        async def run() -> Entered:
            answers = Entered()
            stream = EventStream(cast(Any, answers), tell, lambda status, code: self.ends.append((status, code)))
            scope: Scope = {"identity": "one"}
            await asyncio.wait_for(stream(scope, self.receive, self.send), 10)
            return answers

        return asyncio.run(run())


def test_an_event_that_finds_no_room_for_long_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_answers, "SEND_SECONDS", 0.05)

    async def tell(_: Answers) -> AsyncIterator[bytes]:
        for number in range(100):
            yield b"data: %d\n\n" % number

    connection = Connection(room=3)
    answers = connection.told(tell)
    assert connection.sent == [b"", b"data: 0\n\n", b"data: 1\n\n"]
    assert connection.ends == [(499, "unread")] and answers.left


def test_a_model_that_is_silent_for_long_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_answers, "SEND_SECONDS", 0.05)

    async def tell(_: Answers) -> AsyncIterator[bytes]:
        for number in range(2):
            await asyncio.sleep(0.3)
            yield b"data: %d\n\n" % number

    connection = Connection(room=100)
    connection.told(tell)
    assert connection.sent == [b"", b"data: 0\n\n", b"data: 1\n\n", b"data: [DONE]\n\n"]
    assert connection.ends == [(200, None)]
