"""A thread that answers the requests of many users, some at a time: what every engine of the server is.

    with Loop(...) as engine: engine.submit(Request) -> Ticket;  events come to the request's listener from the engine's
                                                                 thread

A request that cannot be served fails alone, at whatever step it fails: its sampling, its grammar, its draft, its
listener. A fault of what rows share (the forward pass, the queue) fails all that are open and marks the engine dead
(`alive`), until its owner restarts it. An owner has at most MOST_OF_ONE rows; a free row goes to the owner with the
fewest, then to the first that came. A full queue still takes requests of an owner that holds less than half of the
places, so no owner can shut out another. What a row does in a step is an engine's own: `engine.py` decodes from the
left, `canvas_engine.py` uncovers canvases.

What the engine is asked and what it answers: requests, their events, the constraints and counters around them.

Request -> Engine.submit -> Ticket;   its listener hears Said, Said, ..., Ended

Of a prompt that is scored it hears Read, Read, ..., Ended; of a masked-diffusion model also Denoised.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from torch import Tensor

from pipeline.generation.sampling import Sampling
from pipeline.run.errors import InputError


class QueueFull(InputError):
    """All rows are busy and the queue is full: try again later."""


class EngineStopped(RuntimeError):
    """The engine's loop has ended, by a fault or because it was closed: nothing is taken in."""


@dataclass(frozen=True)
class Said:
    """One more token of the answer. `logprob` is the model's own, at temperature 1, before bias, top-p and top-k."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the most likely tokens with their log-probabilities, falling


@dataclass(frozen=True)
class Read:
    """The next tokens of a prompt that is scored, as many as a step read: each one's log-probability, and the most
    likely others.

    Nothing is told of a prompt's first token: nothing stands before it.
    """

    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]


@dataclass(frozen=True)
class Ended:
    """The last event of a request."""

    reason: str  # stop, length, cancelled, timeout, slow (its grammar), error
    prompt_tokens: int
    cached_tokens: int  # of the prompt, taken from an earlier request's row
    new_tokens: int
    message: str = ""


@dataclass(frozen=True)
class Denoised:
    """A canvas after a step of a masked-diffusion model."""

    step: int  # from 1
    steps: int
    offset: int  # of its first place in the answer
    tokens: tuple[int | None, ...]  # None: still masked


Event = Said | Read | Denoised | Ended


class Constraint(Protocol):
    """What an answer may consist of. One object serves one request; it is asked from the engine's thread alone.

    `remaining` is how many tokens may still be said, the one asked for counted. Both methods are called once a token,
    in this order. What either raises ends the request with "error".
    """

    def allowed(self, remaining: int) -> Tensor | None:
        """(V,) bool on the CPU, True where a token may be chosen; None: all may."""
        ...

    def take(self, token: int, remaining: int) -> int:
        """Hear the token that was chosen, and tell the one to say: the same or another. A stop token ends the
        answer.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """What is to be said. `listener` is called from the engine's thread and must return at once."""

    ids: Sequence[int]  # the prompt
    sampling: Sampling
    seed: int
    listener: Callable[[Event], None]
    stop: Collection[int] = ()  # tokens that end the answer; they are not part of it
    bias: dict[int, float] = field(default_factory=dict)  # token -> what is added to its logit
    top: int = 0  # how many alternatives to tell with each token
    owner: str = ""  # rows are shared between requests of one owner only
    seconds: float = 600.0  # from `submit` on
    constraint: Constraint | None = None
    frames: bool = False  # tell each step of a canvas
    score: int | None = None  # say nothing, tell the prompt's log-probabilities with so many alternatives
    identity: str = "a request"  # of the HTTP request, by which the log is searched


class Ticket:
    """A submitted request."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.deadline = time.monotonic() + request.seconds
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        """Give up, from any thread, also from within the listener: no token is told any more, its row is free before
        the next step.
        """
        self.cancelled.set()


@dataclass(frozen=True)
class Stats:
    """The engine at this moment, and what it has done since it was made; a restart keeps the counts."""

    running: int  # requests
    waiting: int
    cache_share: float  # of the cache's positions, those held by running requests
    steps: int
    prompt_tokens: int
    cached_tokens: int  # of these, not read but taken from a row
    generated_tokens: int
    drafted_tokens: int  # proposed by drafts
    accepted_tokens: int  # of these, said


# -- loop --------------------------------------------------------------------------------------------------------------


LOG = logging.getLogger(__name__)
MOST_OF_ONE = 8  # rows that one owner may have at a time
IDLE_SECONDS = 0.5  # how often an idle loop looks whether it is to end
COUNTED = ("steps", "prompt_tokens", "cached_tokens", "generated_tokens", "drafted_tokens", "accepted_tokens")


class Loop(ABC):
    """See the module. `with` runs the thread; without it nothing happens but by `step`."""

    slots: Sequence[Any]  # of the rows; each with a `ticket` or None, an `owner`, and the tokens `held`

    def __init__(self, *, rows: int, queue: int, context: int, vocabulary: int) -> None:
        """Raises ValueError for numbers that cannot be."""
        if rows < 1 or queue < 0:
            raise ValueError(f"expected rows >= 1 and queue >= 0, got {rows} and {queue}")
        self.rows, self.queue = rows, queue
        self.context = context  # the longest prompt and answer together
        self.vocabulary = vocabulary
        self.others: Sequence[
            Loop
        ] = ()  # of the same process: what need not be done at once gives way to their answers
        self._changed = threading.Condition()
        self._counts: Counter[str] = Counter()

    @abstractmethod
    def _empty(self) -> None:
        """Make the rows anew."""

    @abstractmethod
    def _begin(self, ticket: Ticket) -> None:
        """Give a request a row. Whatever is raised fails this request alone."""

    @abstractmethod
    def _advance(self, busy: list[int]) -> None:
        """A step of the busy rows."""

    @abstractmethod
    def _end(self, row: int, reason: str, message: str = "") -> None:
        """Free a row and tell why."""

    def _make(self) -> None:
        """Empty rows, an empty queue, a thread that has not begun."""
        self._empty()
        self.waiting: deque[Ticket] = deque()
        self.alive, self._stopping = True, False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def restart(self) -> None:
        """Run again after a fault of the loop, with an empty cache; the requests of before have had their "error".

        From any thread but the engine's. Raises RuntimeError where the loop is not dead.
        """
        if self.alive:
            raise RuntimeError("the engine is alive: only a dead one is restarted")
        self._thread.join()
        with self._changed:
            self._make()
            self._thread.start()

    @property
    def busy(self) -> int:
        """Rows that speak."""
        return sum(slot.ticket is not None for slot in self.slots)

    def stats(self) -> Stats:
        """Counts and gauges, from any thread."""
        running = [len(slot.held) for slot in self.slots if slot.ticket is not None]
        return Stats(
            running=len(running),
            waiting=len(self.waiting),
            cache_share=sum(running) / (self.rows * self.context),
            **{name: self._counts[name] for name in COUNTED},
        )

    def submit(self, request: GenerationRequest) -> Ticket:
        """Take a request in.

        Raises InputError for one that can never be served, QueueFull for one that cannot be now, EngineStopped where
        none can.
        """
        num, most = len(request.ids), self.context - (request.score is None)
        if not 0 < num <= most:
            raise InputError(f"the prompt has {num} tokens; expected 1 to {most}, the context less what is to be said")
        if wrong := [id_ for id_ in (*request.ids, *request.bias) if not 0 <= id_ < self.vocabulary]:
            raise InputError(f"token {wrong[0]} is not in the vocabulary of {self.vocabulary}")
        ticket = Ticket(request)
        with self._changed:
            if not self.alive or self._stopping:
                raise EngineStopped("the engine has stopped")
            if self.full(request.owner):
                raise QueueFull(f"{self.busy} requests run and {len(self.waiting)} wait")
            self.waiting.append(ticket)
            self._changed.notify()
        return ticket

    def full(self, owner: str) -> bool:
        """Whether a request of this owner finds no place now: all are taken, and half of them by others at most."""
        with self._changed:
            places, taken = self.queue + self.rows, len(self.waiting) + self.busy
            own = sum(ticket.request.owner == owner for ticket in self.waiting)
            own += sum(slot.ticket is not None and slot.owner == owner for slot in self.slots)
            return taken >= places and (own >= places // 2 or own == taken)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not (self._stopping or self._next() or self.busy):
                        self._changed.wait(IDLE_SECONDS)
                    if self._stopping:
                        break
                self.step()
        except BaseException:  # also a library's panic, which is no Exception
            LOG.exception("the engine's loop died")
            self.alive = False
        finally:
            self._end_all("error" if not self.alive else "cancelled")

    def step(self) -> None:
        """Drop what is given up, let in what waits, and advance the busy rows."""
        self._drop()
        self._admit()
        if busy := [row for row, slot in enumerate(self.slots) if slot.ticket is not None]:
            self._advance(busy)

    def _drop(self) -> None:
        now = time.monotonic()
        for row, slot in enumerate(self.slots):
            if slot.ticket is not None and (reason := _given_up(slot.ticket, now)):
                self._end(row, reason)
        with self._changed:
            gone = [(ticket, reason) for ticket in self.waiting if (reason := _given_up(ticket, now))]
            for ticket, _ in gone:
                self.waiting.remove(ticket)
        for ticket, reason in gone:
            tell(ticket, Ended(reason, len(ticket.request.ids), 0, 0))

    def _admit(self) -> None:
        while True:
            with self._changed:
                ticket = self._next() if self.busy < self.rows else None
                if ticket is None:
                    return
                self.waiting.remove(ticket)
            try:
                self._begin(ticket)
            except Exception as error:  # its own fault, whatever it is: the others go on
                LOG.exception("%s could not begin", ticket.request.identity)
                tell(ticket, Ended("error", len(ticket.request.ids), 0, 0, type(error).__name__))

    def _next(self) -> Ticket | None:
        """Of those that wait the one whose owner has the fewest rows, and fewer than MOST_OF_ONE; of equals the first.

        One prompt is scored at a time: its steps are the longest, and nobody's answer is to wait for many of them.
        """
        running = Counter(slot.owner for slot in self.slots if slot.ticket is not None)
        scoring = any(slot.ticket is not None and slot.ticket.request.score is not None for slot in self.slots)
        ready = (
            ticket
            for ticket in self.waiting
            if running[ticket.request.owner] < MOST_OF_ONE and not (scoring and ticket.request.score is not None)
        )
        return min(ready, key=lambda ticket: running[ticket.request.owner], default=None)

    @contextmanager
    def _alone(self, row: int) -> Iterator[None]:
        """Whatever fails inside ends this row's request, and no other."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # Rust libraries raise their panics as one
            self._fail(row, error)

    def _fail(self, row: int, error: BaseException) -> None:
        """End a row by the fault of its own request, whose cause is logged."""
        ticket = self.slots[row].ticket
        if ticket is None:  # it had ended, and is not told twice
            LOG.error("a request failed behind its end", exc_info=error)
            return
        LOG.error("%s failed", ticket.request.identity, exc_info=error)
        self._end(row, "error", type(error).__name__)

    def _request(self, row: int) -> GenerationRequest:
        ticket = self.slots[row].ticket
        assert ticket is not None
        return ticket.request

    def _end_all(self, reason: str) -> None:
        with self._changed:
            self._stopping = True
            waiting = list(self.waiting)
            self.waiting.clear()
        for row, slot in enumerate(self.slots):
            if slot.ticket is not None:
                self._end(row, reason)
        for ticket in waiting:
            tell(ticket, Ended(reason, len(ticket.request.ids), 0, 0))


def _given_up(ticket: Ticket, now: float) -> str:
    """Why a request is to be dropped, or nothing."""
    return "cancelled" if ticket.cancelled.is_set() else "timeout" if now > ticket.deadline else ""


def tell(ticket: Ticket | None, event: Event) -> bool:
    """Call the listener; a listener that fails loses its own request alone."""
    assert ticket is not None
    try:
        ticket.request.listener(event)
    except Exception:
        LOG.exception("a listener failed")
        return False
    return True
