"""The base of every engine: a thread, a bounded queue, and fair admission of requests to rows.

    with Loop(...) as engine: engine.submit(GenerationRequest) -> Ticket     events go to the request's listener, which
                                                                             is called on the engine's thread

A request's events are SampledToken, ..., Ended. A scored prompt yields Read, Read, ..., Ended instead; a
masked-diffusion model also yields Denoised.

A failure in a request's own work (its sampling, grammar, draft or listener) ends only that request. A failure in shared
work (the forward pass, the queue) ends all open requests and marks the engine as dead (`alive`) until it is
restarted.

An owner has at most MOST_OF_ONE rows, unless it has the engine to itself (`alone`). A free row goes to the owner with
the fewest rows, then to the earliest request. A full queue still accepts requests from an owner with less than half of
the places, so no owner can lock out another.

Not here: what a row does in a step. `engine.py` decodes from left to right; a wing may denoise canvases (`Denoised`).
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, Self

from torch import Tensor

from pipeline.generation.sampling import Sampling
from pipeline.run.errors import InputError

LOG = logging.getLogger(__name__)
MOST_OF_ONE = 8  # rows that one owner may have at a time
IDLE_SECONDS = 0.5  # how often an idle loop checks whether it must stop
COUNTED = ("steps", "prompt_tokens", "cached_tokens", "generated_tokens", "drafted_tokens", "accepted_tokens")


class QueueFull(InputError):
    """All rows are busy and the queue is full: try again later."""


class EngineStopped(RuntimeError):
    """The engine's loop has failed or was closed; it accepts no more requests."""


@dataclass(frozen=True)
class SampledToken:
    """The next token of the answer. `logprob` is the model's own, at temperature 1, before bias, top-p and top-k."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the most likely tokens with their log-probabilities, in descending order


@dataclass(frozen=True)
class Read:
    """Scores of the prompt tokens processed in one step: each token's log-probability, and the most likely
    alternatives.

    The first token of a prompt has no score: nothing precedes it.
    """

    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]


@dataclass(frozen=True)
class Ended:
    """The last event of a request."""

    reason: str  # stop, length, cancelled, timeout, slow (the grammar), error
    prompt_tokens: int
    cached_tokens: int  # prompt tokens taken from an earlier request's row
    new_tokens: int
    message: str = ""


@dataclass(frozen=True)
class Denoised:
    """A masked-diffusion model's canvas after one step."""

    step: int  # from 1
    steps: int
    offset: int  # position of the canvas's first token in the answer
    tokens: tuple[int | None, ...]  # None: still masked


Event = SampledToken | Read | Denoised | Ended


class OutputConstraint(Protocol):
    """Restricts the tokens of an answer. Each object serves one request and is called only on the engine's thread.

    `remaining` is how many tokens may still be generated, including the current one. Both methods are called once per
    token, in this order. An exception in either ends the request with "error".
    """

    def allowed(self, remaining: int) -> Tensor | None:
        """(V,) bool on the CPU, True for tokens that may be chosen; None: all of them."""
        ...

    def take(self, token: int, remaining: int) -> int:
        """Advance by the sampled token and return the token to emit, which may differ. A stop token ends the
        answer.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A prompt and how to continue it. `listener` is called on the engine's thread and must return quickly."""

    ids: Sequence[int]  # the prompt
    sampling: Sampling
    seed: int
    listener: Callable[[Event], None]
    stop: Collection[int] = ()  # tokens that end the answer and are not part of it
    say_stop: bool = False  # report the stop token as the last token
    bias: dict[int, float] = field(default_factory=dict)  # token -> value added to its logit
    top: int = 0  # how many alternatives to report with each token
    owner: str = ""  # rows are shared only between requests of the same owner
    seconds: float = 600.0  # time limit, counted from `submit`
    constraint: OutputConstraint | None = None
    frames: bool = False  # report the canvas after each step
    score: int | None = None  # generate nothing; report the prompt's log-probabilities with this many alternatives
    identity: str = "a request"  # the HTTP request's id, for the log


class Ticket:
    """A submitted request."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.deadline = time.monotonic() + request.seconds
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        """Cancel the request; may be called from any thread and from the listener. No more tokens are sent, and the
        row is freed before the next step.
        """
        self.cancelled.set()


@dataclass(frozen=True)
class Stats:
    """The state of an engine, and its counts since creation; a restart keeps them."""

    running: int  # requests
    waiting: int
    cache_share: float  # share of the cache's positions used by running requests
    steps: int
    prompt_tokens: int
    cached_tokens: int  # prompt tokens reused from a row instead of computed
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int  # drafted tokens that were accepted


class Row(Protocol):
    """What the loop needs from an engine's row."""

    ticket: Ticket | None  # the request that occupies it
    owner: str

    @property
    def held(self) -> list[int]:
        """The row's tokens: prompt and answer."""
        ...


class Loop(ABC):
    """Base class of the engines. A `with` block runs the thread; otherwise only calls to `step` make progress."""

    slots: Sequence[Row]

    def __init__(self, *, rows: int, queue: int, context: int, vocabulary: int, alone: bool = False) -> None:
        """`context` limits prompt and answer together. `alone`: one owner may use all rows and queue slots.

        Raises ValueError for invalid numbers.
        """
        if rows < 1 or queue < 0:
            raise ValueError(f"expected rows >= 1 and queue >= 0, got {rows} and {queue}")
        self.rows, self.queue, self.context, self.vocabulary = rows, queue, context, vocabulary
        self.alone = alone
        self.others: Sequence[Loop] = ()  # engines in the same process: low-priority work yields to their answers
        self._changed = threading.Condition()
        self._errands: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._counts: Counter[str] = Counter()

    @abstractmethod
    def _reset_rows(self) -> None:
        """Create empty rows."""

    @abstractmethod
    def _assign_row(self, ticket: Ticket) -> None:
        """Assign a free row to a request. An exception ends only this request."""

    @abstractmethod
    def _advance(self, busy: list[int]) -> None:
        """Advance the busy rows by one step."""

    @abstractmethod
    def _finish(self, row: int, reason: str, message: str = "") -> None:
        """Free a row and send the last event of its request."""

    def _reset(self) -> None:
        """Create empty rows, an empty queue, and a thread, without starting it."""
        self._reset_rows()
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
        """Restart a dead loop with an empty cache; earlier requests have ended with "error".

        Call it from any thread but the engine's. Raises RuntimeError if the loop is not dead.
        """
        if self.alive:
            raise RuntimeError("the engine is alive; only a dead engine can be restarted")
        self._thread.join()
        with self._changed:
            self._reset()
            self._thread.start()

    @property
    def busy(self) -> int:
        """The number of rows with a request."""
        return sum(slot.ticket is not None for slot in self.slots)

    def stats(self) -> Stats:
        """Counts and gauges; may be called from any thread."""
        running = [len(slot.held) for slot in self.slots if slot.ticket is not None]
        return Stats(
            running=len(running),
            waiting=len(self.waiting),
            cache_share=sum(running) / (self.rows * self.context),
            **{name: self._counts[name] for name in COUNTED},
        )

    def submit(self, request: GenerationRequest) -> Ticket:
        """Queue a request.

        Raises InputError if it can never be served, QueueFull if it cannot be served now, EngineStopped if the engine
        has stopped.
        """
        num, most = len(request.ids), self.context - (request.score is None)
        if not 0 < num <= most:
            raise InputError(f"the prompt has {num} tokens; expected 1 to {most}, as many as the context allows")
        if wrong := [id_ for id_ in (*request.ids, *request.bias) if not 0 <= id_ < self.vocabulary]:
            raise InputError(f"token {wrong[0]} is not in the vocabulary of {self.vocabulary} tokens")
        ticket = Ticket(request)
        with self._changed:
            if not self.alive or self._stopping:
                raise EngineStopped("the engine has stopped")
            if self.full(request.owner):
                raise QueueFull(f"{self.busy} requests are running and {len(self.waiting)} are waiting")
            self.waiting.append(ticket)
            self._changed.notify()
        return ticket

    def full(self, owner: str) -> bool:
        """Whether a request from this owner must be refused: all places are taken, at most half by other owners."""
        with self._changed:
            places, taken = self.queue + self.rows, len(self.waiting) + self.busy
            own = sum(ticket.request.owner == owner for ticket in self.waiting)
            own += sum(slot.ticket is not None and slot.owner == owner for slot in self.slots)
            return taken >= places and (self.alone or own >= places // 2 or own == taken)

    def between_answers(self, errand: Callable[[], None]) -> None:
        """Run `errand` on the engine's thread, then empty all rows. Busy rows finish first, and waiting requests
        begin afterward; returns once the errand is done. Raises EngineStopped, and whatever the errand raises; the
        engine is then dead, since its rows may mix old and new state.
        """
        done: Future[None] = Future()
        with self._changed:
            if not self.alive or self._stopping:
                raise EngineStopped("the engine has stopped")
            self._errands.append((errand, done))
            self._changed.notify()
        done.result()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not (self._stopping or self._errands or self._next_ticket() or self.busy):
                        self._changed.wait(IDLE_SECONDS)
                    if self._stopping:
                        break
                self.step()
        except BaseException:  # including a library's panic, which is not an Exception
            LOG.exception("the engine's loop died")
            self.alive = False
        finally:
            self._finish_all("error" if not self.alive else "cancelled")

    def step(self) -> None:
        """Drop cancelled and expired requests, admit waiting ones, and advance the busy rows. Errands go first: nothing
        is admitted until all rows are idle and the errands are done.
        """
        self._drop()
        while self._errands and not self.busy:
            self._run_errand(*self._errands.popleft())
        if not self._errands:
            self._admit()
        if busy := [row for row, slot in enumerate(self.slots) if slot.ticket is not None]:
            self._advance(busy)

    def _run_errand(self, errand: Callable[[], None], done: Future[None]) -> None:
        try:
            errand()
            self._reset_rows()
        except BaseException as error:
            self.alive = False  # before notifying the caller, who may restart the engine immediately
            done.set_exception(error)
            raise
        done.set_result(None)

    def _drop(self) -> None:
        now = time.monotonic()
        for row, slot in enumerate(self.slots):
            if slot.ticket is not None and (reason := _drop_reason(slot.ticket, now)):
                self._finish(row, reason)
        with self._changed:
            dropped = [(ticket, reason) for ticket in self.waiting if (reason := _drop_reason(ticket, now))]
            for ticket, _ in dropped:
                self.waiting.remove(ticket)
        for ticket, reason in dropped:
            notify(ticket, Ended(reason, len(ticket.request.ids), 0, 0))

    def _admit(self) -> None:
        while True:
            with self._changed:
                ticket = self._next_ticket() if self.busy < self.rows else None
                if ticket is None:
                    return
                self.waiting.remove(ticket)
            try:
                self._assign_row(ticket)
            except Exception as error:  # any exception here belongs to this request; the others continue
                LOG.exception("%s could not begin", ticket.request.identity)
                notify(ticket, Ended("error", len(ticket.request.ids), 0, 0, type(error).__name__))

    def _next_ticket(self) -> Ticket | None:
        """The waiting request whose owner has the fewest rows and is below its limit; the earliest one in a tie.

        Only one prompt is scored at a time: scoring steps are the longest, and no answer should wait for many of them.
        """
        running = Counter(slot.owner for slot in self.slots if slot.ticket is not None)
        most = self.rows if self.alone else MOST_OF_ONE
        scoring = any(slot.ticket is not None and slot.ticket.request.score is not None for slot in self.slots)
        ready = (
            ticket
            for ticket in self.waiting
            if running[ticket.request.owner] < most and not (scoring and ticket.request.score is not None)
        )
        return min(ready, key=lambda ticket: running[ticket.request.owner], default=None)

    @contextmanager
    def _isolate(self, row: int) -> Iterator[None]:
        """Make an exception in the block end only this row's request."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # Rust libraries raise their panics as BaseException
            self._fail(row, error)

    def _fail(self, row: int, error: BaseException) -> None:
        """End a row whose request has failed, and log the cause."""
        ticket = self.slots[row].ticket
        if ticket is None:  # the request's last event was already sent
            LOG.error("a request failed after its end", exc_info=error)
            return
        LOG.error("%s failed", ticket.request.identity, exc_info=error)
        self._finish(row, "error", type(error).__name__)

    def _request(self, row: int) -> GenerationRequest:
        ticket = self.slots[row].ticket
        assert ticket is not None
        return ticket.request

    def _finish_all(self, reason: str) -> None:
        with self._changed:
            self._stopping = True
            waiting, errands = list(self.waiting), list(self._errands)
            self.waiting.clear()
            self._errands.clear()
        for _, done in errands:
            done.set_exception(EngineStopped("the engine has stopped"))
        for row, slot in enumerate(self.slots):
            if slot.ticket is not None:
                self._finish(row, reason)
        for ticket in waiting:
            notify(ticket, Ended(reason, len(ticket.request.ids), 0, 0))


def _drop_reason(ticket: Ticket, now: float) -> str:
    """The reason why a request must be dropped, or "" if it need not be."""
    return "cancelled" if ticket.cancelled.is_set() else "timeout" if now > ticket.deadline else ""


def notify(ticket: Ticket | None, event: Event) -> bool:
    """Call the listener; returns False if it raised, which affects only its own request."""
    assert ticket is not None
    try:
        ticket.request.listener(event)
    except Exception:
        LOG.exception("a listener failed")
        return False
    return True
