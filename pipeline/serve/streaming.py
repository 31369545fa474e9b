"""How an answer leaves: whole as JSON, or as an event stream; in both cases a client that goes away ends the work at once.

One that stays and reads nothing has its answers cancelled (`asking.py`) and is not waited for: SEND_SECONDS later, up to a quarter
more, what tells them is ended. Its connection stays until it reads or closes it, or the server ends.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pipeline.serve.asking import Answers
from pipeline.serve.faults import ApiFault, JsonResponse, dumps, internal

Result = TypeVar("Result")

LOG = logging.getLogger(__name__)
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
    """Server-sent events. The answers were entered already, so that a refusal has its own status; they are left here."""

    def __init__(self, answers: Answers, tell: Callable[[Answers], AsyncIterator[bytes]], done: Callable[[int, str | None], None]) -> None:  # fmt: skip
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
