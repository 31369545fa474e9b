"""Fair limits for the server: how many jobs run beside the engines, and how often one client may ask.

    async with Places("texts to render", running=2, waiting=16).place(asker): ...    ApiFault 429 where all are taken
    await Pool("conversations to score", running=1, waiting=8).run(asker, function, ...)   the same, on its own threads
    Rates(per_second).take(asker, cost) -> seconds to wait, 0 where the cost was taken

`asker` is a key's digest, or an address where no key is needed.

Places: a free place goes to the asker with the fewest running jobs, of equals to the first that came. One asker gets at
most half of all places, and never the last running one while there are several. Each kind of work has its own places,
so a client that fills one leaves the others alone.

Rates: a token bucket for each asker (Turner 1986), which fills by `per_second` and holds BURST_SECONDS of it. A request
costs 1, and 1 more for each whole COST_BYTES of its body. A request that the queue refuses costs REFUSED_COST more, so
that a client which retries at once is refused by the guard, where it costs nothing. Beyond MOST_BUCKETS the least
recently used buckets are dropped, which forgives their askers.

Not promised: a limit for each client behind one proxy; without keys they are one address. Not here: processes that can
be ended (`workshop.py`), the engines' queue (`loop.py`).
"""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from pipeline.serve.protocol import ApiFault

RETRY_SECONDS = 1
WAIT_SECONDS = 10.0  # for a place
PER_SECOND = 200.0
BURST_SECONDS = 5.0
COST_BYTES = 16 * 1024
REFUSED_COST = 10
MOST_BUCKETS = 10_000

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class _Waiter:
    asker: str
    granted: asyncio.Future[None]


class Places:
    """Places for jobs of one kind, on one event loop."""

    def __init__(self, jobs: str, *, running: int, waiting: int) -> None:
        """`jobs` names them in messages; at most `running` run and `waiting` wait."""
        self.jobs, self.running, self.waiting = jobs, running, waiting
        self._running: Counter[str] = Counter()
        self._waiting: list[_Waiter] = []

    @asynccontextmanager
    async def place(self, asker: str) -> AsyncIterator[None]:
        """Wait for a place and hold it. Raises ApiFault 429 where too many wait, too many of this asker's, or one
        for too long.
        """
        own = self._running[asker] + sum(waiter.asker == asker for waiter in self._waiting)
        if len(self._waiting) >= self.waiting or own >= max(1, (self.running + self.waiting) // 2):
            raise self._full()
        waiter = _Waiter(asker, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._grant()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await waiter.granted
        except (TimeoutError, asyncio.CancelledError) as error:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif waiter.granted.done() and not waiter.granted.cancelled():
                self._release(asker)
            if isinstance(error, TimeoutError):
                raise self._full() from None
            raise
        try:
            yield
        finally:
            self._release(asker)

    def _full(self) -> ApiFault:
        return ApiFault(429, f"too many {self.jobs} wait; try again", code="queue_full", retry=RETRY_SECONDS)

    def _release(self, asker: str) -> None:
        self._running[asker] -= 1
        if not self._running[asker]:
            del self._running[asker]
        self._grant()

    def _grant(self) -> None:
        """Give free places to those who wait."""
        while self._running.total() < self.running:
            ready = [waiter for waiter in self._waiting if self._running[waiter.asker] < max(1, self.running - 1)]
            if not ready:
                return
            waiter = min(ready, key=lambda waiter: self._running[waiter.asker])
            self._waiting.remove(waiter)
            self._running[waiter.asker] += 1
            waiter.granted.set_result(None)


class Pool(Places):
    """Places with a thread each."""

    def __init__(self, jobs: str, *, running: int, waiting: int) -> None:
        super().__init__(jobs, running=running, waiting=waiting)
        self._threads = ThreadPoolExecutor(running, thread_name_prefix=jobs.split()[0])

    async def run(
        self, asker: str, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """What the function returns, or raises. Raises ApiFault as `place`."""
        async with self.place(asker):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, lambda: function(*args, **kwargs))


def cost(length: int) -> int:
    """The cost of a request whose body has so many bytes."""
    return 1 + length // COST_BYTES


class Rates:
    """A token bucket for each asker."""

    def __init__(self, per_second: float = PER_SECOND, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_second, self._clock = per_second, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # asker -> (its tokens, at which time)

    def take(self, asker: str, cost: float) -> float:
        """Seconds to wait; 0 where the cost was taken. A cost above the whole bucket needs a full one."""
        now, most = self._clock(), self.per_second * BURST_SECONDS
        tokens, since = self._buckets.get(asker, (most, now))
        tokens = min(most, tokens + (now - since) * self.per_second)
        cost = min(cost, most)
        enough = tokens >= cost
        self._buckets[asker] = (tokens - cost if enough else tokens, now)
        self._buckets.move_to_end(asker)
        if len(self._buckets) > MOST_BUCKETS:
            self._buckets.popitem(last=False)
        return 0.0 if enough else (cost - tokens) / self.per_second

    def fine(self, asker: str, cost: float) -> None:
        """Take a cost, or as much of it as the bucket holds."""
        tokens, since = self._buckets.get(asker, (self.per_second * BURST_SECONDS, self._clock()))
        self._buckets[asker] = (max(0.0, tokens - cost), since)
