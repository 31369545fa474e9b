"""The answers to one request: tokens from an engine's thread, turned into one JSON response or an event stream.

    Assembler(tokenizer, stops).hear(SampledToken) -> deltas     .close() -> the remaining deltas
    async with Answers(engine, requests, assemblers) as answers:
        async for event in answers: ...         (index, Delta), Frame, Finished or Ping

An `Assembler` emits text without broken characters or stop strings, and pieces of tool calls. It buffers text that is
still ambiguous: bytes of an incomplete character, a possible prefix of a stop string, whitespace that may precede a
call, and the bracket that may close a call. A call is recognized by its control tokens, never by text that spells them:

    <tool_call> {"name": "f", "arguments": {...}} </tool_call>      the tags are single tokens

The concatenated deltas are the answer, however it was tokenized. Not here: checking calls against their schema
(`chat_completions.py`).

Leaving the `Answers` block for any reason cancels whatever is still running: when a client disconnects, its rows are
free before the next step. The same applies to a client that stops reading, but its answers are cancelled only when they
are both MOST_UNREAD events and UNREAD_SECONDS behind, because a briefly blocked event loop also receives many events at
once. The stream ends when one event has waited SEND_SECONDS for the connection (or up to a quarter longer). The
connection itself stays open until the client reads or closes it, or the server exits.
"""

import asyncio
import codecs
import logging
import re
import secrets
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pipeline.run.errors import InputError
from pipeline.run.types import JsonObject
from pipeline.serve.guard import RETRY_SECONDS
from pipeline.serve.loop import (
    Denoised,
    Ended,
    EngineStopped,
    Event,
    GenerationRequest,
    Loop,
    QueueFull,
    Read,
    SampledToken,
    Ticket,
)
from pipeline.serve.protocol import ApiFault, JsonResponse, dumps, internal
from pipeline.text.tokenizer import Tokenizer

LOG = logging.getLogger(__name__)

CALL_BEGIN = re.compile(r'\s*\{"name": "([^"\\]*)", "arguments": ')  # names need no escapes (`protocol.py`, NAME)
CALL_END = re.compile(r"\}?\s*\Z")  # possible end of a call after its arguments
LOG = logging.getLogger(__name__)
MOST_UNREAD, UNREAD_SECONDS = 256, 2.0
PING_SECONDS = 15.0
SEND_SECONDS = 60.0  # how long one event may wait for a connection whose buffers (about 3 MB) are full
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a proxy must not buffer the events
}
DONE = b"data: [DONE]\n\n"
CLIENT_CLOSED = 499  # nginx's status for a client that has disconnected; it appears only in the log

Result = TypeVar("Result")


@dataclass(frozen=True)
class CallPiece:
    """Part of a call: the first piece has the call's id and name; later pieces have more of its arguments."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Delta:
    """The next part of an answer and its tokens."""

    content: str = ""
    call: CallPiece | None = None
    tokens: tuple[SampledToken, ...] = ()


@dataclass
class PartialCall:
    """A call, as far as it has been generated."""

    id: str
    text: str = ""  # everything between its tags
    name: str | None = None
    num_parsed: int = 0  # characters of `text` already sent as arguments or read as part of the name
    closed: bool = False
    arguments: str = ""


@dataclass
class Assembler:
    """Assembles one answer. `stopped`: a stop string was found, so later tokens are ignored."""

    tokenizer: Tokenizer
    stops: Sequence[str] = ()
    tools: bool = False  # whether to look for calls
    content: str = ""  # sent so far
    calls: list[PartialCall] = field(default_factory=list)
    stopped: bool = False

    def __post_init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._buffer = ""  # decoded, not yet sent
        self._tokens: list[SampledToken] = []  # not yet sent
        self._call: PartialCall | None = None  # the open call

    def hear(self, event: SampledToken) -> list[Delta]:
        """Add a token and return the deltas that are now final."""
        if self.stopped:
            return []
        self._tokens.append(event)
        if self.tools and event.token == self.tokenizer.tool_call and self._call is None:
            return self._open_call()
        if self._call is not None:
            if event.token == self.tokenizer.tool_call_end:
                return self._close_call()
            return self._add_call_text(self._decoder.decode(self.tokenizer.token_bytes[event.token]))
        return self._add_text(self._decoder.decode(self.tokenizer.token_bytes[event.token]))

    def close(self) -> list[Delta]:
        """End the answer and return the buffered text and unsent tokens."""
        if self.stopped:
            return self._make_delta("")
        rest = self._decoder.decode(b"", final=True)
        if self._call is not None:
            return self._add_call_text(rest)
        cut = self._cut_at_stop(self._buffer + rest)
        return self._make_delta(self._strip_layout(self._buffer + rest, last=True) if cut is None else cut)

    # -- text ----------------------------------------------------------------------------------------------------------

    def _add_text(self, text: str) -> list[Delta]:
        self._buffer += text
        if self.calls and not self._buffer.strip():  # the newline between two calls is not content
            return []
        cut = self._cut_at_stop(self._buffer)
        if cut is not None:
            self.stopped = True
            return self._make_delta(cut)
        ready = len(self._buffer) - self._num_uncertain()
        text, self._buffer = self._buffer[:ready], self._buffer[ready:]
        return self._make_delta(text) if text else []

    def _cut_at_stop(self, text: str) -> str | None:
        """The text before its first stop string, or None if it has none."""
        positions = [position for stop in self.stops if (position := text.find(stop)) >= 0]
        return text[: min(positions)] if positions else None

    def _num_uncertain(self) -> int:
        """How many trailing characters may belong to a stop string, or to whitespace before a call."""
        most = 0
        for stop in self.stops:
            for size in range(min(len(stop) - 1, len(self._buffer)), most, -1):
                if self._buffer.endswith(stop[:size]):
                    most = size
                    break
        spaces = len(self._buffer) - len(self._buffer.rstrip()) if self.tools else 0
        return max(most, spaces)

    def _strip_layout(self, text: str, *, last: bool) -> str:
        """Strip the whitespace around a call, which is only layout."""
        return text.rstrip() if (self.tools and (not last or self.calls)) else text

    def _make_delta(self, text: str) -> list[Delta]:
        self.content += text
        tokens, self._tokens = tuple(self._tokens), []
        return [Delta(content=text, tokens=tokens)] if text or tokens else []

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _open_call(self) -> list[Delta]:
        rest = self._strip_layout(self._buffer + self._decoder.decode(b"", final=True), last=False)
        self._buffer = ""
        self._decoder.reset()
        self._call = PartialCall(f"call_{secrets.token_hex(12)}")
        self.calls.append(self._call)
        if not rest:
            return []
        opening = self._tokens.pop()
        deltas = self._make_delta(rest)
        self._tokens.append(opening)
        return deltas

    def _add_call_text(self, text: str) -> list[Delta]:
        call = self._call
        assert call is not None
        call.text += text
        deltas = []
        if call.name is None and (match := CALL_BEGIN.match(call.text)):
            call.name, call.num_parsed = match[1], match.end()
            deltas.append(self._make_call_delta(call, name=match[1]))
        if call.name is not None:
            closing = CALL_END.search(call.text, call.num_parsed)
            end = closing.start() if closing else len(call.text)
            if end > call.num_parsed:
                piece = call.text[call.num_parsed : end]
                call.num_parsed = end
                call.arguments += piece
                deltas.append(self._make_call_delta(call, arguments=piece))
        return deltas

    def _close_call(self) -> list[Delta]:
        deltas = self._add_call_text(self._decoder.decode(b"", final=True))
        assert self._call is not None
        self._call.closed = self._call.text.rstrip().endswith("}") and self._call.name is not None
        self._call = None
        self._decoder.reset()
        return deltas

    def _make_call_delta(self, call: PartialCall, *, name: str | None = None, arguments: str = "") -> Delta:
        tokens, self._tokens = tuple(self._tokens), []
        number = len(self.calls) - 1
        return Delta(call=CallPiece(number, arguments, call.id if name is not None else None, name), tokens=tokens)


@dataclass(frozen=True)
class TokenUsage:
    """Token counts of a request."""

    prompt: int
    completion: int
    cached: int

    def body(self) -> JsonObject:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(frozen=True)
class Finished:
    """An answer has ended; `reason` is "stop" or "length"."""

    index: int
    reason: str


@dataclass(frozen=True)
class Frame:
    """The canvas of an answer after one step."""

    index: int
    canvas: Denoised


class Ping:
    """Keeps the connection open when there is no event for a while."""


def refuse_when_full(engine: Loop, owner: str) -> None:
    """Raise ApiFault 429 before doing any work for a request that the queue would refuse."""
    if engine.full(owner):
        raise ApiFault(
            429, "all rows are busy and the queue is full; try again", code="queue_full", retry=RETRY_SECONDS
        )


def unheard(_: Event) -> None:
    """Placeholder listener for a request that has not been submitted."""


class Answers:
    """The answers to a request: submitted on entry, read by iteration, cancelled on exit."""

    def __init__(
        self,
        engine: Loop,
        requests: Sequence[GenerationRequest],
        assemblers: Sequence[Assembler],
        *,
        n: int = 1,
        identity: str = "",
    ) -> None:
        """Every `n` consecutive requests share a prompt. Each gets a listener and the HTTP request's `identity`."""
        self.engine, self.requests, self.assemblers, self.n = engine, requests, assemblers, n
        self.identity = identity
        self.prompt_scores: list[list[Read]] = [[] for _ in requests]
        self.ends: list[Ended | None] = [None] * len(requests)
        self.first_seconds: float | None = None  # to the first token
        self.began = self._read = time.monotonic()
        self._queue: asyncio.Queue[tuple[int, Event] | Ping] = asyncio.Queue()
        self._tickets: list[Ticket] = []
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> "Answers":
        """Submit the requests. Raises ApiFault: 429 if the queue is full, 400 if a request can never be served, 503
        if the engine is dead.
        """
        try:
            for index, request in enumerate(self.requests):
                request = replace(request, listener=self._make_listener(index), identity=self.identity)
                self._tickets.append(self.engine.submit(request))
        except QueueFull as error:
            self._cancel()
            raise ApiFault(429, f"{error}; try again", code="queue_full", retry=RETRY_SECONDS) from None
        except InputError as error:
            self._cancel()
            raise ApiFault(400, str(error)) from None
        except EngineStopped:
            self._cancel()
            raise ApiFault(503, "the model is being restarted; try again", code="model_restarting", retry=5) from None
        self._timer = self._loop.call_later(PING_SECONDS, self._ping)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for ticket in self._tickets:
            ticket.cancel()

    def _make_listener(self, index: int) -> Callable[[Event], None]:
        mailbox = Mailbox.of(self._loop)
        return lambda event: mailbox.post(self._put, index, event)  # called on the engine's thread

    def _put(self, index: int, event: Event) -> None:
        if self._queue.qsize() >= MOST_UNREAD and time.monotonic() - self._read > UNREAD_SECONDS:
            self._cancel()
        self._queue.put_nowait((index, event))

    def _ping(self) -> None:
        """Queue a Ping after some time without events. One timer covers all events: a timeout per event would cost more
        than sending the event.
        """
        silence = time.monotonic() - self._read
        if silence >= PING_SECONDS:
            silence = 0.0
            if self._queue.empty():
                self._queue.put_nowait(Ping())
        self._timer = self._loop.call_later(PING_SECONDS - silence, self._ping)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta] | Frame | Finished | Ping]:
        """Yield events until all answers have ended. Raises ApiFault if one of them failed."""
        while any(end is None for end in self.ends):
            message = await self._queue.get()
            self._read = time.monotonic()
            if isinstance(message, Ping):
                yield message
                continue
            index, event = message
            assembler = self.assemblers[index]
            if isinstance(event, SampledToken):
                self.first_seconds = self.first_seconds or time.monotonic() - self.began
                for delta in assembler.hear(event):
                    yield index, delta
                if assembler.stopped:
                    self._tickets[index].cancel()
                continue
            if isinstance(event, Denoised):
                yield Frame(index, event)
                continue
            if isinstance(event, Read):
                self.prompt_scores[index].append(event)
                continue
            self.ends[index] = event
            if not assembler.stopped and event.reason not in ("stop", "length"):
                raise _fault(event, self.identity)
            for delta in assembler.close():
                yield index, delta
            yield Finished(index, "stop" if assembler.stopped else event.reason)

    @property
    def usage(self) -> TokenUsage:
        """Token usage of all finished answers; a prompt is counted once, no matter how many answers it has."""
        ended = [end for end in self.ends if end is not None]
        first_ended = [end for end in self.ends[:: self.n] if end is not None]  # the first answer to each prompt
        return TokenUsage(
            sum(len(request.ids) for request in self.requests[:: self.n]),
            sum(end.new_tokens for end in ended),
            sum(end.cached_tokens for end in first_ended),
        )


def _fault(end: Ended, identity: str) -> ApiFault:
    if end.reason == "timeout":
        return ApiFault(503, "the answer took too long; ask for fewer tokens", code="timeout")
    if end.reason == "slow":
        return ApiFault(400, "the schema takes too long to follow; simplify it", code="schema_too_slow")
    if end.reason == "cancelled":
        return ApiFault(503, "the answer was cancelled: it was not read, or the server is stopping", code="cancelled")
    return internal(identity)


class Mailbox:
    """Delivers events from the engines' threads to one event loop. A step sends an event for every row, so the loop is
    woken only once for all events since the last delivery.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # weak, because the loop owns its mailbox
        self._pending: deque[tuple[Callable[[int, Event], None], int, Event]] = deque()
        self._scheduled = False

    def post(self, handler: Callable[[int, Event], None], index: int, event: Event) -> None:
        """Schedule `handler(index, event)` on the loop, from any thread, in the order of the calls. Raises RuntimeError
        if the loop is closed.
        """
        self._pending.append((handler, index, event))
        if not self._scheduled:  # else the pending delivery will include this event
            self._schedule()

    def _schedule(self) -> None:
        loop = self._loop()
        if loop is None:
            raise RuntimeError("the event loop is gone")
        self._scheduled = True
        try:
            loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed: the next post must raise too
            self._scheduled = False
            raise

    def _deliver(self) -> None:
        self._scheduled = False
        try:
            while self._pending:
                handler, index, event = self._pending.popleft()
                handler(index, event)
        finally:
            if self._pending:  # a handler raised: the other events must not wait for the next post
                self._schedule()

    @staticmethod
    def of(loop: asyncio.AbstractEventLoop) -> "Mailbox":
        """The only mailbox of a loop."""
        return MAILBOXES.setdefault(loop, Mailbox(loop))


MAILBOXES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = weakref.WeakKeyDictionary()


# -- responses ---------------------------------------------------------------------------------------------------------


async def respond(
    request: Request, answers: Answers, complete: Callable[[Answers], Awaitable[JsonObject | bytes]]
) -> Response:
    """All answers in one JSON response. Raises ApiFault, including when the client disconnects."""
    async with answers:
        return JsonResponse(await unless_disconnected(request.receive, complete(answers)))


async def unless_disconnected(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of the work. Raises ApiFault if the client disconnects first."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiFault(400, "the client disconnected", code="client_closed")
    finally:
        task.cancel()
        gone.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. `answers` must have been entered, so that a refusal can still set the status; this class
    exits them.
    """

    def __init__(
        self,
        answers: Answers,
        stream: Callable[[Answers], AsyncIterator[bytes]],
        on_done: Callable[[int, str | None], None],
    ) -> None:
        """`on_done` receives the status that a non-streamed response would have had, and the code of any error."""
        super().__init__(headers=STREAM_HEADERS)
        del self.headers["content-length"]
        self.answers, self.stream, self.on_done = answers, stream, on_done
        self._sending_since: float | None = None  # None: no event is waiting for the connection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(scope, send))
        gone = asyncio.ensure_future(_wait_for_disconnect(receive))
        status, code = CLIENT_CLOSED, None
        try:
            while not sending.done() and not gone.done():
                # check periodically: a timeout per event would cost more
                await asyncio.wait({sending, gone}, timeout=SEND_SECONDS / 4, return_when=asyncio.FIRST_COMPLETED)
                if self._sending_since is not None and time.monotonic() - self._sending_since > SEND_SECONDS:
                    code = "unread"
                    break
            if sending.done():
                status, code = sending.result()
        finally:
            sending.cancel()
            gone.cancel()
            await self.answers.__aexit__(None, None, None)
            self.on_done(status, code)

    async def _send_all(self, scope: Scope, send: Send) -> tuple[int, str | None]:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        status, code = 200, None
        try:
            async for event in self.stream(self.answers):
                await self._send(send, event)
        except ApiFault as fault:  # too late to set the status
            status, code = fault.status, fault.code
            await self._send(send, b"data: " + dumps(fault.body) + b"\n\n")
        except Exception:
            status = 500
            LOG.exception("%s failed while streaming", scope["identity"])
            await self._send(send, b"data: " + dumps(internal(scope["identity"]).body) + b"\n\n")
        await self._send(send, DONE, more=False)
        return status, code

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        self._sending_since = time.monotonic()
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending_since = None
