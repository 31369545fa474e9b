"""From the event loop to the engine's thread and back: several answers to one request, as they grow.

    async with ask(model, wanted) as answers:  async for index, delta in answers: ...

Leaving the block, for whatever reason, gives up what still runs: a client that goes away frees its rows before the next
step. So does one that does not read: MOST_UNREAD events and UNREAD_SECONDS behind, its answers are cancelled. Both,
since a loop that was kept busy for a moment hears many events at once.

How an answer leaves: whole as JSON, or as an event stream; in both cases a client that goes away ends the work at once.

One that stays and reads nothing has its answers cancelled (`asking.py`) and is not waited for: SEND_SECONDS later, up
to a quarter more, what tells them is ended. Its connection stays until it reads or closes it, or the server ends.
"""

import asyncio
import logging
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pipeline.run.errors import InputError
from pipeline.serve.answers import Assembler, Delta
from pipeline.serve.loop import (
    Denoised,
    Ended,
    EngineStopped,
    Event,
    GenerationRequest,
    Loop,
    QueueFull,
    Read,
    Said,
    Ticket,
)
from pipeline.serve.protocol import ApiFault, JsonResponse, dumps, internal

LOG = logging.getLogger(__name__)
MOST_UNREAD, UNREAD_SECONDS = 256, 2.0
RETRY_SECONDS = 1
PING_SECONDS = 15.0


@dataclass(frozen=True)
class Usage:
    """The tokens of a request."""

    prompt: int
    completion: int
    cached: int

    def body(self) -> dict[str, object]:
        """OpenAI's object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(frozen=True)
class Finished:
    """An answer has ended; reason: stop, length."""

    index: int
    reason: str


def refuse_when_full(engine: Loop, owner: str) -> None:
    """Raises ApiFault 429 before any work was done for a request that would find no place."""
    if engine.full(owner):
        raise ApiFault(
            429, "all rows are busy and the queue is full; try again", code="queue_full", retry=RETRY_SECONDS
        )


def unheard(_: Event) -> None:
    """The listener of a request that was not submitted yet."""


@dataclass(frozen=True)
class Frame:
    """An answer's canvas after a step."""

    index: int
    shown: Denoised


class Ping:
    """Nothing was said for a while; the connection is to be kept."""


class Mailbox:
    """From engines' threads to one event loop, which is woken once for all that came since it looked: a step tells
    all its rows.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # which holds its mailbox
        self._held: deque[tuple[Callable[[int, Event], None], int, Event]] = deque()
        self._woken = False

    def post(self, to: Callable[[int, Event], None], index: int, event: Event) -> None:
        """From any thread: call `to(index, event)` on the loop, soon, in the order of the posts. RuntimeError: it is
        closed.
        """
        self._held.append((to, index, event))
        if not self._woken:  # if it is, the loop has yet to look, and will find this too
            self._wake()

    def _wake(self) -> None:
        loop = self._loop()
        if loop is None:
            raise RuntimeError("the event loop is gone")
        self._woken = True
        try:
            loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # it is closed: whoever posts next is to hear it too
            self._woken = False
            raise

    def _deliver(self) -> None:
        self._woken = False
        try:
            while self._held:
                to, index, event = self._held.popleft()
                to(index, event)
        finally:
            if self._held:  # one of them failed: the others are not to wait for the next post
                self._wake()

    @staticmethod
    def of(loop: asyncio.AbstractEventLoop) -> "Mailbox":
        """A loop's only one."""
        return MAILBOXES.setdefault(loop, Mailbox(loop))


MAILBOXES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = weakref.WeakKeyDictionary()


class Answers:
    """The answers to a request: submitted on entering, heard by iteration, given up on leaving."""

    def __init__(
        self,
        engine: Loop,
        requests: Sequence[GenerationRequest],
        assemblers: Sequence[Assembler],
        *,
        n: int = 1,
        identity: str = "",
    ) -> None:
        """`n` requests in a row have the same prompt. Their listeners are set here, and the HTTP request's
        `identity`.
        """
        self.engine, self.requests, self.assemblers, self.n = engine, requests, assemblers, n
        self.identity = identity
        self.read: list[list[Read]] = [[] for _ in requests]  # of prompts that are scored
        self.ends: list[Ended | None] = [None] * len(requests)
        self.first: float | None = None  # seconds to the first token
        self.began = self._read = time.monotonic()
        self._queue: asyncio.Queue[tuple[int, Event] | Ping] = asyncio.Queue()
        self._tickets: list[Ticket] = []
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> "Answers":
        """Raises ApiFault: 429 where the queue is full, 400 for what can never be served, 503 where the engine is
        dead.
        """
        try:
            for index, request in enumerate(self.requests):
                heard = replace(request, listener=self._listener(index), identity=self.identity)
                self._tickets.append(self.engine.submit(heard))
        except QueueFull as error:
            self._give_up()
            raise ApiFault(429, f"{error}; try again", code="queue_full", retry=RETRY_SECONDS) from None
        except InputError as error:
            self._give_up()
            raise ApiFault(400, str(error)) from None
        except EngineStopped:
            self._give_up()
            raise ApiFault(503, "the model is being restarted; try again", code="model_restarting", retry=5) from None
        self._timer = self._loop.call_later(PING_SECONDS, self._ping)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_up()

    def _give_up(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for ticket in self._tickets:
            ticket.cancel()

    def _listener(self, index: int) -> Callable[[Event], None]:
        mailbox = Mailbox.of(self._loop)
        return lambda event: mailbox.post(self._put, index, event)  # on the engine's thread

    def _put(self, index: int, event: Event) -> None:
        if self._queue.qsize() >= MOST_UNREAD and time.monotonic() - self._read > UNREAD_SECONDS:
            self._give_up()
        self._queue.put_nowait((index, event))

    def _ping(self) -> None:
        """Say that nothing was said. One timer for all events: a timeout of each would cost more than telling it."""
        silent = time.monotonic() - self._read
        if silent >= PING_SECONDS:
            silent = 0.0
            if self._queue.empty():
                self._queue.put_nowait(Ping())
        self._timer = self._loop.call_later(PING_SECONDS - silent, self._ping)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta] | Frame | Finished | Ping]:
        """What is new, until all have ended. Raises ApiFault where one of them failed."""
        while any(end is None for end in self.ends):
            told = await self._queue.get()
            self._read = time.monotonic()
            if isinstance(told, Ping):
                yield told
                continue
            index, event = told
            assembler = self.assemblers[index]
            if isinstance(event, Said):
                self.first = self.first or time.monotonic() - self.began
                for delta in assembler.hear(event):
                    yield index, delta
                if assembler.stopped:
                    self._tickets[index].cancel()
                continue
            if isinstance(event, Denoised):
                yield Frame(index, event)
                continue
            if isinstance(event, Read):
                self.read[index].append(event)
                continue
            self.ends[index] = event
            if not assembler.stopped and event.reason not in ("stop", "length"):
                raise _fault(event, self.identity)
            for delta in assembler.close():
                yield index, delta
            yield Finished(index, "stop" if assembler.stopped else event.reason)

    @property
    def usage(self) -> Usage:
        """Of all answers that have ended; a prompt is counted once, however many answers it gets."""
        ended = [end for end in self.ends if end is not None]
        first = [end for end in self.ends[:: self.n] if end is not None]
        return Usage(
            sum(len(request.ids) for request in self.requests[:: self.n]),
            sum(end.new_tokens for end in ended),
            sum(end.cached_tokens for end in first),
        )


def _fault(end: Ended, identity: str) -> ApiFault:
    if end.reason == "timeout":
        return ApiFault(503, "the answer took too long; ask for fewer tokens", code="timeout")
    if end.reason == "slow":
        return ApiFault(400, "the schema takes too long to follow; make it simpler", code="schema_too_slow")
    if end.reason == "cancelled":
        return ApiFault(503, "the answer was given up: it was not read, or the server is stopping", code="cancelled")
    return internal(identity)


# -- streaming ---------------------------------------------------------------------------------------------------------


Result = TypeVar("Result")

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a proxy must not collect the events
}
DONE = b"data: [DONE]\n\n"
SEND_SECONDS = 60.0  # how long one event may wait for a connection whose buffers (about 3 MB) are full
GONE = 499  # nginx's number for a client that has gone; it is written to the log alone


async def whole(
    request: Request, answers: Answers, tell: Callable[[Answers], Coroutine[Any, Any, dict[str, Any] | bytes]]
) -> Response:
    """Wait for all of it. Raises ApiFault, also where the client has gone."""
    async with answers:
        return JsonResponse(await unless_gone(request.receive, tell(answers)))


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """What the work gives. Raises ApiFault where the client goes away before."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiFault(400, "the client went away", code="client_closed")
    finally:
        task.cancel()
        gone.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. The answers were entered already, so that a refusal has its own status; they are left
    here.
    """

    def __init__(
        self, answers: Answers, tell: Callable[[Answers], AsyncIterator[bytes]], done: Callable[[int, str | None], None]
    ) -> None:
        """`done` hears the status that the stream would have had, and an error's code."""
        super().__init__(headers=STREAM_HEADERS)
        del self.headers["content-length"]
        self.answers, self.tell, self.done = answers, tell, done
        self._passing: float | None = None  # since when an event waits for room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        speak, gone = asyncio.ensure_future(self._speak(scope, send)), asyncio.ensure_future(_gone(receive))
        status, code = GONE, None
        try:
            while not speak.done() and not gone.done():
                # looked at now and then: a timeout of each event would cost more
                await asyncio.wait({speak, gone}, timeout=SEND_SECONDS / 4, return_when=asyncio.FIRST_COMPLETED)
                if self._passing is not None and time.monotonic() - self._passing > SEND_SECONDS:
                    code = "unread"
                    break
            if speak.done():
                status, code = speak.result()
        finally:
            speak.cancel()
            gone.cancel()
            await self.answers.__aexit__(None, None, None)
            self.done(status, code)

    async def _speak(self, scope: Scope, send: Send) -> tuple[int, str | None]:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        status, code = 200, None
        try:
            async for piece in self.tell(self.answers):
                await self._pass(send, piece)
        except ApiFault as fault:  # too late for a status
            status, code = fault.status, fault.code
            await self._pass(send, b"data: " + dumps(fault.body) + b"\n\n")
        except Exception:
            status = 500
            LOG.exception("%s failed in its stream", scope["identity"])
            await self._pass(send, b"data: " + dumps(internal(scope["identity"]).body) + b"\n\n")
        await self._pass(send, DONE, more=False)
        return status, code

    async def _pass(self, send: Send, body: bytes, *, more: bool = True) -> None:
        self._passing = time.monotonic()
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._passing = None
