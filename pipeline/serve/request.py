"""What the engine is asked and what it answers: requests, their events, the constraints and counters around them.

Request -> Engine.submit -> Ticket;   its listener hears Said, Said, ..., Ended

Of a prompt that is scored it hears Read, Read, ..., Ended; of a masked-diffusion model also Denoised.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from pipeline.errors import InputError
from pipeline.generation.sampling import Sampling


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
    """The next tokens of a prompt that is scored, as many as a step read: each one's log-probability, and the most likely others.

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

    `remaining` is how many tokens may still be said, the one asked for counted. Both methods are called once a token, in this order.
    What either raises ends the request with "error".
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
    frames: bool = False  # tell each step of a canvas
    score: int | None = None  # say nothing, tell the prompt's log-probabilities with so many alternatives
    identity: str = "a request"  # of the HTTP request, by which the log is searched


class Ticket:
    """A submitted request."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.deadline = time.monotonic() + request.seconds
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        """Give up, from any thread, also from within the listener: no token is told any more, its row is free before the next step."""
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
