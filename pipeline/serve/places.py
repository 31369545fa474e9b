"""Room for work beside the engines: so many jobs at a time, so many that wait, and no more than half of it for one who asks.

    async with Places("texts to render", running=2, waiting=16).place(asker): ...      ApiFault 429 where there is no room
    await Pool("conversations to score", running=1, waiting=8).run(asker, function, ...)   the same on threads of its own

`asker` is a key's digest, or an address where no key is asked for. A free place goes to the asker with the fewest running jobs, of
equals to the first that came; one asker never takes the last running place while there are several. Each kind of work has its own
room: whoever fills one leaves the others alone.

Not here: processes that can be ended (`workshop.py`), the engines' queue (`loop.py`).
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

from pipeline.serve.faults import ApiFault

RETRY_SECONDS = 1
WAIT_SECONDS = 10.0  # for a place

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Places:
    """See the module. For one event loop."""

    def __init__(self, what: str, *, running: int, waiting: int) -> None:
        self.what, self.running, self.waiting = what, running, waiting
        self._running: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def place(self, asker: str) -> AsyncIterator[None]:
        """Wait for a place and hold it. Raises ApiFault 429 where too many wait, too many of this asker's, or one for too long."""
        own = self._running[asker] + sum(who == asker for who, _ in self._waiting)
        if len(self._waiting) >= self.waiting or own >= max(1, (self.running + self.waiting) // 2):
            raise self._full()
        turn = (asker, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        self._call()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await turn[1]
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif turn[1].done() and not turn[1].cancelled():
                self._leave(asker)
            if isinstance(error, TimeoutError):
                raise self._full() from None
            raise
        try:
            yield
        finally:
            self._leave(asker)

    def _full(self) -> ApiFault:
        return ApiFault(429, f"too many {self.what} wait; try again", code="queue_full", retry=RETRY_SECONDS)

    def _leave(self, asker: str) -> None:
        self._running[asker] -= 1
        if not self._running[asker]:
            del self._running[asker]
        self._call()

    def _call(self) -> None:
        """Give free places to those who wait."""
        while self._running.total() < self.running:
            ready = [turn for turn in self._waiting if self._running[turn[0]] < max(1, self.running - 1)]
            if not ready:
                return
            turn = min(ready, key=lambda one: self._running[one[0]])
            self._waiting.remove(turn)
            self._running[turn[0]] += 1
            turn[1].set_result(None)


class Pool(Places):
    """Places with a thread each."""

    def __init__(self, what: str, *, running: int, waiting: int) -> None:
        super().__init__(what, running=running, waiting=waiting)
        self._threads = ThreadPoolExecutor(running, thread_name_prefix=what.split()[0])

    async def run(
        self, asker: str, function: Callable[Arguments, Result], *given: Arguments.args, **named: Arguments.kwargs
    ) -> Result:
        """What the function returns, or raises. Raises ApiFault as `place`."""
        async with self.place(asker):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, lambda: function(*given, **named))
