"""From the event loop to the engine's thread and back: several answers to one request, as they grow.

    async with ask(model, wanted) as answers:  async for index, delta in answers: ...

Leaving the block, for whatever reason, gives up what still runs: a client that goes away frees its rows before the next step. So
does one that does not read: MOST_UNREAD events and UNREAD_SECONDS behind, its answers are cancelled. Both, since a loop that was kept
busy for a moment hears many events at once.
"""

import asyncio
import logging
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from pipeline.errors import InputError
from pipeline.serve.answers import Assembler, Delta
from pipeline.serve.faults import ApiFault, internal
from pipeline.serve.loop import Loop
from pipeline.serve.request import Denoised, Ended, EngineStopped, Event, QueueFull, Read, Request, Said, Ticket

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
    """From engines' threads to one event loop, which is woken once for all that came since it looked: a step tells all its rows."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # which holds its mailbox
        self._held: deque[tuple[Callable[[int, Event], None], int, Event]] = deque()
        self._woken = False

    def post(self, to: Callable[[int, Event], None], index: int, event: Event) -> None:
        """From any thread: call `to(index, event)` on the loop, soon, in the order of the posts. RuntimeError: it is closed."""
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
        requests: Sequence[Request],
        assemblers: Sequence[Assembler],
        *,
        n: int = 1,
        identity: str = "",
    ) -> None:
        """`n` requests in a row have the same prompt. Their listeners are set here, and the HTTP request's `identity`."""
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
        """Raises ApiFault: 429 where the queue is full, 400 for what can never be served, 503 where the engine is dead."""
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

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:  # fmt: skip
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
