"""Requests to an engine in this process: a listener that keeps its events, and what a request would get if alone."""

import threading
from typing import Any

import torch

from pipeline.generation.sampling import Sampling, generate
from pipeline.model.transformer import Transformer
from pipeline.serve.engine import Ended, Engine, Event, SampledToken, Ticket
from pipeline.serve.engine import GenerationRequest as Request
from pipeline.serve.loop import Read

WARM = Sampling(24, temperature=0.9, top_p=0.95)


class Heard:
    """A listener that keeps the events it receives."""

    def __init__(self) -> None:
        self.said: list[SampledToken] = []
        self.read: list[Read] = []
        self.end: Ended | None = None
        self.done = threading.Event()

    def __call__(self, event: Event) -> None:
        if isinstance(event, SampledToken):
            self.said.append(event)
        elif isinstance(event, Read):
            self.read.append(event)
        else:
            assert self.end is None, "a request ends once"
            self.end = event
            self.done.set()

    @property
    def ids(self) -> list[int]:
        return [one.token for one in self.said]


def ask(engine: Engine, ids: list[int], sampling: Sampling = WARM, seed: int = 0, **named: Any) -> tuple[Heard, Ticket]:
    heard = Heard()
    return heard, engine.submit(Request(ids=ids, sampling=sampling, seed=seed, listener=heard, **named))


def prompt(number: int, length: int) -> list[int]:
    return torch.randint(20, 320, (length,), generator=torch.Generator().manual_seed(number)).tolist()


def finished(engine: Engine, *heard: Heard) -> None:
    """Step the engine until all requests have ended; its thread is not started."""
    for _ in range(500):
        if all(one.end for one in heard):
            return
        engine.step()
    raise AssertionError("no end after 500 steps")


def alone(model: Transformer, ids: list[int], sampling: Sampling, seed: int, stop: tuple[int, ...] = ()) -> list[int]:
    return generate(model, [ids], sampling, stop=stop, seeds=[seed])[0].ids
