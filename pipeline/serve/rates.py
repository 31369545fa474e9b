"""How much one who asks may ask in a while: a bucket of tokens for each key, or each address where there is no key.

    Rates(per_second).take(who, cost) -> seconds until there is enough, 0 where it was taken

A bucket fills by `per_second` and holds BURST_SECONDS of it (token bucket; Turner 1986). A request costs 1, and 1 more for each
whole COST_BYTES of its body; one that found no room REFUSED more: who comes again at once is refused at the door, where it costs nothing. The buckets of those who asked least recently are forgotten beyond MOST_BUCKETS, which forgives them.

Not promised: a limit for those behind one proxy each for himself: without keys they are one address.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

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
