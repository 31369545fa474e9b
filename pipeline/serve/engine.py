"""The server's engine: a thread that decodes the requests of many users together, row by row of one cache.

    Engine(model, rows, queue).submit(Request) -> Ticket;  events come to the request's listener from the engine's thread

Each step feeds every row what it has to read, at most CHUNK tokens of a prompt, or its last token; a prompt that comes in between
slows its neighbours by one chunk a step and stops none (continuous batching, Yu et al. 2022, Orca). A row that ends keeps its keys
and values, and the next request takes the free row that begins as it does; from a busy row the common beginning is copied.

What a request says depends on (model, prompt, sampling, seed) alone: a token is chosen by one number of (seed, place), so neighbours,
prefixes and cancelled requests change nothing but rounding (`generation/sampling.py`).

A request that cannot be served fails alone; a fault of the loop fails all that wait and marks the engine dead (`alive`).
Not promised: fairness beyond first come, first served.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import InputError
from pipeline.generation.noise import uniforms
from pipeline.generation.sampling import Decoder, Sampling, choose
from pipeline.model.transformer import Transformer

LOG = logging.getLogger(__name__)
CHUNK = 256  # prompt tokens of a row in one step
SHARED = 16  # a common beginning shorter than this is read again: finding it costs more
IDLE_SECONDS = 0.5  # how often an idle loop looks whether it is to end


class QueueFull(InputError):
    """All rows are busy and the queue is full: try again later."""


@dataclass(frozen=True)
class Said:
    """One more token of the answer. `logprob` is the model's own, at temperature 1, before bias, top-p and top-k."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the most likely tokens with their log-probabilities, falling


@dataclass(frozen=True)
class Ended:
    """The last event of a request."""

    reason: str  # stop, length, cancelled, timeout, error
    prompt_tokens: int
    cached_tokens: int  # of the prompt, taken from an earlier request's row
    new_tokens: int
    message: str = ""


Event = Said | Ended


class Constraint(Protocol):
    """What an answer may consist of. One object serves one request; it is asked from the engine's thread alone.

    `remaining` is how many tokens may still be said, the one asked for counted. Both methods are called once a token, in this order.
    """

    def allowed(self, remaining: int) -> Tensor | None:
        """(V,) bool on the CPU, True where a token may be chosen; None: all may."""
        ...

    def take(self, token: int, remaining: int) -> int:
        """Hear the token that was chosen, and tell the one to say: the same or another. A stop token ends the answer."""
        ...


@dataclass(frozen=True, kw_only=True)
class Request:
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


class Ticket:
    """A submitted request."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.deadline = time.monotonic() + request.seconds
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        """Give up: its row is free before the next step."""
        self.cancelled.set()


@dataclass
class _Slot:
    """A row of the cache: what it holds, whose it is, and who speaks on it now."""

    held: list[int] = field(default_factory=list)  # ids whose keys and values lie in the row
    owner: str = ""
    used: int = 0  # when it ended, as a count
    ticket: Ticket | None = None
    cached: int = 0
    said: int = 0
    numbers: np.ndarray = field(default_factory=lambda: np.zeros(0))
    ahead: list[int] = field(default_factory=list)  # ids still to be fed


class Engine:
    """See the module. `with` runs the thread; without it nothing happens but by `step`."""

    def __init__(self, model: Transformer, *, rows: int = 8, queue: int = 32) -> None:
        if rows < 1 or queue < 0:
            raise ValueError(f"expected rows >= 1 and queue >= 0, got {rows} and {queue}")
        self.model = model.train(False)
        self.decoder = Decoder(model, rows)
        self.slots = [_Slot() for _ in range(rows)]
        self.waiting: deque[Ticket] = deque()
        self.queue = queue
        self.alive = True
        self._ended = count(1)
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> "Engine":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    @property
    def context(self) -> int:
        """The longest prompt and answer together."""
        return self.model.config.max_context

    @property
    def busy(self) -> int:
        """Rows that speak."""
        return sum(slot.ticket is not None for slot in self.slots)

    def submit(self, request: Request) -> Ticket:
        """Take a request in. Raises InputError for one that can never be served, QueueFull for one that cannot be now."""
        vocabulary, num = self.model.config.vocab_size, len(request.ids)
        if not 0 < num < self.context:
            raise InputError(f"the prompt has {num} tokens; expected 1 to {self.context - 1}, the context less one")
        if wrong := [id_ for id_ in (*request.ids, *request.bias) if not 0 <= id_ < vocabulary]:
            raise InputError(f"token {wrong[0]} is not in the vocabulary of {vocabulary}")
        ticket = Ticket(request)
        with self._changed:
            if not self.alive or self._stopping:
                raise RuntimeError("the engine has stopped")
            if len(self.waiting) >= self.queue + len(self.slots) - self.busy:
                raise QueueFull(f"{self.busy} requests run and {len(self.waiting)} wait")
            self.waiting.append(ticket)
            self._changed.notify()
        return ticket

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not (self._stopping or self.waiting or self.busy):
                        self._changed.wait(IDLE_SECONDS)
                    if self._stopping:
                        break
                self.step()
        except Exception:
            LOG.exception("the engine's loop died")
            self.alive = False
        finally:
            self._end_all("error" if not self.alive else "cancelled")

    def step(self) -> None:
        """Drop what is given up, let in what waits, feed each busy row, say a token where a prompt is read."""
        self._drop()
        self._admit()
        busy = [row for row, slot in enumerate(self.slots) if slot.ticket is not None]
        if not busy:
            return
        pieces = [self.slots[row].ahead[:CHUNK] for row in busy]
        logits = self.decoder.feed(busy, pieces)
        speaking = []
        for place, (row, piece) in enumerate(zip(busy, pieces, strict=True)):
            slot = self.slots[row]
            slot.held += piece
            del slot.ahead[: len(piece)]
            if not slot.ahead:
                speaking.append((place, row))
        self._say([row for _, row in speaking], logits[[place for place, _ in speaking]])

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
            _tell(ticket, Ended(reason, len(ticket.request.ids), 0, 0))

    def _admit(self) -> None:
        while True:
            free = [row for row, slot in enumerate(self.slots) if slot.ticket is None]
            with self._changed:
                if not free or not self.waiting:
                    return
                ticket = self.waiting.popleft()
            try:
                self._begin(ticket, free)
            except Exception as error:  # its own fault, whatever it is: the others go on
                LOG.exception("a request could not begin")
                _tell(ticket, Ended("error", len(ticket.request.ids), 0, 0, type(error).__name__))

    def _begin(self, ticket: Ticket, free: list[int]) -> None:
        """Give a request the free row that begins as it does, or the one that has been idle longest."""
        request, cache = ticket.request, self.decoder.cache
        ids = list(request.ids)
        common = {
            row: found
            for row, slot in enumerate(self.slots)
            if slot.owner == request.owner and (found := _common(slot.held, ids)) >= SHARED
        }
        best = max(free, key=lambda row: (common.get(row, 0), -self.slots[row].used))
        cached = common.get(best, 0)
        donor = max(common, key=lambda row: common[row], default=best)
        if common.get(donor, 0) > cached:  # a busy row has more
            cached, best = common[donor], min(free, key=lambda row: self.slots[row].used)
            for tensors, along in ((cache.keys, 3), (cache.values, 2)):
                for tensor in tensors:
                    tensor[best].narrow(along - 1, 0, cached).copy_(tensor[donor].narrow(along - 1, 0, cached))
        cache.own[best] = cached
        budget = min(request.sampling.max_new_tokens, self.context - len(ids))
        self.slots[best] = _Slot(
            held=ids[:cached], owner=request.owner, ticket=ticket, cached=cached, ahead=ids[cached:],
            numbers=uniforms(request.seed, 0, budget),
        )  # fmt: skip

    def _say(self, rows: list[int], logits: Tensor) -> None:
        """Choose a token for each row; rows that sample alike are chosen for together."""
        wanted = logits.clone()
        alike: dict[Sampling, list[int]] = {}
        for place, row in enumerate(rows):
            if self._restrict(row, wanted[place]):
                alike.setdefault(replace(self._request(row).sampling, max_new_tokens=1), []).append(place)
        for sampling, places in alike.items():
            numbers = torch.tensor([self.slots[rows[place]].numbers[self.slots[rows[place]].said] for place in places])
            tokens, _ = choose(wanted[places], numbers, sampling)
            logprobs = logits[places].float().log_softmax(-1)
            for number, place in enumerate(places):
                self._hear(rows[place], int(tokens[number]), logprobs[number])

    def _restrict(self, row: int, wanted: Tensor) -> bool:
        """Put a row's bias and constraint on its logits (V,), in place; False where that ended the row."""
        request = self._request(row)
        for token, change in request.bias.items():
            wanted[token] += change
        if request.constraint is None:
            return True
        try:
            allowed = request.constraint.allowed(self._remaining(row))
            if allowed is None:
                return True
            if not allowed.any():
                raise ValueError("a constraint allows no token")
            wanted.masked_fill_(~allowed.to(wanted.device), float("-inf"))
        except Exception as error:  # its own fault, whatever it is: the others go on
            self._fail(row, error)
            return False
        return True

    def _hear(self, row: int, token: int, logprobs: Tensor) -> None:
        """Count a token in, tell it, and see whether the answer ends."""
        slot, request = self.slots[row], self._request(row)
        if request.constraint is not None:
            try:
                token = request.constraint.take(token, self._remaining(row))
                if not 0 <= token < len(logprobs):
                    raise ValueError(f"a constraint says token {token}, which is not in the vocabulary")
            except Exception as error:
                self._fail(row, error)
                return
        if token in request.stop:
            self._end(row, "stop")
            return
        slot.said += 1
        slot.ahead = [token]
        top = logprobs.topk(min(request.top, len(logprobs))) if request.top else None
        pairs = () if top is None else tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        if not _tell(slot.ticket, Said(token, float(logprobs[token]), pairs)):
            self._end(row, "error")
        elif slot.said == len(slot.numbers):
            self._end(row, "length")

    def _remaining(self, row: int) -> int:
        """How many tokens the row may still say."""
        return len(self.slots[row].numbers) - self.slots[row].said

    def _fail(self, row: int, error: Exception) -> None:
        """End a row by the fault of its own request."""
        LOG.error("a request failed", exc_info=error)
        self._end(row, "error", type(error).__name__)

    def _request(self, row: int) -> Request:
        ticket = self.slots[row].ticket
        assert ticket is not None
        return ticket.request

    def _end(self, row: int, reason: str, message: str = "") -> None:
        """Free a row; what it holds stays for whoever begins so."""
        slot = self.slots[row]
        ticket, slot.ticket, slot.ahead, slot.used = slot.ticket, None, [], next(self._ended)
        assert ticket is not None
        _tell(ticket, Ended(reason, len(ticket.request.ids), slot.cached, slot.said, message))

    def _end_all(self, reason: str) -> None:
        with self._changed:
            self._stopping = True
            waiting = list(self.waiting)
            self.waiting.clear()
        for row, slot in enumerate(self.slots):
            if slot.ticket is not None:
                self._end(row, reason)
        for ticket in waiting:
            _tell(ticket, Ended(reason, len(ticket.request.ids), 0, 0))


def _given_up(ticket: Ticket, now: float) -> str:
    """Why a request is to be dropped, or nothing."""
    return "cancelled" if ticket.cancelled.is_set() else "timeout" if now > ticket.deadline else ""


def _tell(ticket: Ticket | None, event: Event) -> bool:
    """Call the listener; a listener that fails loses its own request alone."""
    assert ticket is not None
    try:
        ticket.request.listener(event)
    except Exception:
        LOG.exception("a listener failed")
        return False
    return True


def _common(held: list[int], ids: list[int]) -> int:
    """How many first ids are the same; at most all but the last of `ids`, which is always fed: its logits are needed."""
    most = min(len(held), len(ids) - 1)
    for place in range(most):
        if held[place] != ids[place]:
            return place
    return max(0, most)
