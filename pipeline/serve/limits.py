"""Room for work beside the engines: so many jobs at a time, so many that wait, and no more than half of it for one who
asks.

    async with Places("texts to render", running=2, waiting=16).place(asker): ...    ApiFault 429 where there is no room
    await Pool("conversations to score", running=1, waiting=8).run(asker, function, ...)  the same on threads of its own

`asker` is a key's digest, or an address where no key is asked for. A free place goes to the asker with the fewest
running jobs, of equals to the first that came; one asker never takes the last running place while there are several.
Each kind of work has its own room: whoever fills one leaves the others alone.

Not here: processes that can be ended (`workshop.py`), the engines' queue (`loop.py`).

How much one who asks may ask in a while: a bucket of tokens for each key, or each address where there is no key.

    Rates(per_second).take(who, cost) -> seconds until there is enough, 0 where it was taken

A bucket fills by `per_second` and holds BURST_SECONDS of it (token bucket; Turner 1986). A request costs 1, and 1 more
for each whole COST_BYTES of its body; one that found no room REFUSED more: who comes again at once is refused at the
door, where it costs nothing. The buckets of those who asked least recently are forgotten beyond MOST_BUCKETS, which
forgives them.

Not promised: a limit for those behind one proxy each for himself: without keys they are one address.
"""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

from pipeline.serve.protocol import ApiFault

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
        """Wait for a place and hold it. Raises ApiFault 429 where too many wait, too many of this asker's, or one
        for too long.
        """
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


# -- rates -------------------------------------------------------------------------------------------------------------


PER_SECOND = 200.0
BURST_SECONDS = 5.0
COST_BYTES = 16 * 1024
REFUSED = 10
MOST_BUCKETS = 10_000


def cost(length: int) -> int:
    """Of a request with a body of so many bytes."""
    return 1 + length // COST_BYTES


class Rates:
    """See the module."""

    def __init__(self, per_second: float = PER_SECOND, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_second, self._clock = per_second, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # who -> (what is left, when it was)

    def take(self, who: str, cost: float) -> float:
        """Seconds to wait; 0 where the cost was taken. A cost above the whole bucket needs a full one."""
        now, most = self._clock(), self.per_second * BURST_SECONDS
        left, since = self._buckets.get(who, (most, now))
        left = min(most, left + (now - since) * self.per_second)
        cost = min(cost, most)
        enough = left >= cost
        self._buckets[who] = (left - cost if enough else left, now)
        self._buckets.move_to_end(who)
        if len(self._buckets) > MOST_BUCKETS:
            self._buckets.popitem(last=False)
        return 0.0 if enough else (cost - left) / self.per_second

    def fine(self, who: str, cost: float) -> None:
        """Take a cost, or what is left of it."""
        left, since = self._buckets.get(who, (self.per_second * BURST_SECONDS, self._clock()))
        self._buckets[who] = (max(0.0, left - cost), since)
