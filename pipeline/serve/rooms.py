"""Who asks, and where what he asks for is done: the rooms that the routes share, each with places of its own (`places.py`)."""

from dataclasses import dataclass

from starlette.requests import Request

from pipeline.serve.calls import Makers
from pipeline.serve.places import Pool
from pipeline.serve.workshop import Workshop


@dataclass(frozen=True)
class Who:
    """One request's sender."""

    owner: str  # of its rows: a key's digest, or nobody
    asker: str  # of its places: the owner, or an address
    identity: str  # of the request

    @classmethod
    def of(cls, request: Request) -> "Who":
        """As the guard found it."""
        return cls(request.scope["owner"], request.scope["asker"], request.scope["identity"])


class Rooms:
    """Where work is done that takes no engine."""

    def __init__(self, workshop: Workshop) -> None:
        self.workshop = workshop
        self.makers = Makers(workshop)
        self.texts = Pool("texts to encode", running=2, waiting=32)
        self.scores = Pool("conversations to score", running=1, waiting=32)
        self.choices = Pool("preferences", running=1, waiting=16)
