"""The engine of masked-diffusion models: each row uncovers a canvas, a step in turn.

    CanvasEngine(model, rows, queue).submit(Request) -> Ticket;  the listener hears Said and, where asked for, Denoised

What is said are the tokens to the left of the first mask: nothing in them changes any more. A canvas on which no end
was written goes on on another one behind it, until the request's tokens are said. Rows do not share a forward pass: it
is arithmetic alone that a canvas costs, which more rows at once would not save, and so an answer hangs on (model,
prompt, sampling, seed) to the last bit.

Not for it: log-probabilities of alternatives, biases, constraints (`chats.py` refuses them), prefixes and drafts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.diffusion.model import Denoiser
from pipeline.diffusion.sampling import Denoising, Progress, stepwise
from pipeline.run.device import stable_hash
from pipeline.serve.loop import Denoised, Ended, Loop, Said, Ticket, tell

CANVAS = 96  # tokens
SURE = 1 + 1e-6  # a probability, rounded


@dataclass
class Sheet:
    """A row: what it has said, and the canvas it is at."""

    ticket: Ticket | None = None
    owner: str = ""
    prompt: list[int] = field(default_factory=list)
    said: list[int] = field(default_factory=list)
    offset: int = 0  # of the canvas in the answer
    budget: int = 0
    work: Iterator[Progress] | None = None

    @property
    def held(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt + self.said


class CanvasEngine(Loop):
    """See the module. `with` runs the thread; without it nothing happens but by `step`."""

    slots: list[Sheet]

    def __init__(self, model: Denoiser, *, rows: int = 8, queue: int = 32, canvas: int = CANVAS) -> None:
        """`canvas`: tokens of a canvas; of a block-diffusion model the whole blocks in it, at least one."""
        super().__init__(rows=rows, queue=queue, context=model.config.max_context, vocabulary=model.config.vocab_size)
        self.model = model.train(False)
        self.size = model.traits.block_size or 1
        self.canvas = max(self.size, canvas // self.size * self.size)
        self._make()

    def _empty(self) -> None:
        self.slots = [Sheet() for _ in range(self.rows)]

    def _begin(self, ticket: Ticket) -> None:
        row = next(number for number, slot in enumerate(self.slots) if slot.ticket is None)
        ids = list(ticket.request.ids)
        budget = min(ticket.request.sampling.max_new_tokens, self.context - len(ids))
        self.slots[row] = Sheet(ticket, ticket.request.owner, ids, budget=budget)
        self._counts.update(prompt_tokens=len(ids))

    def _advance(self, busy: list[int]) -> None:
        """A step of each busy row; whatever a row's own request does wrong fails it alone."""
        self._counts["steps"] += 1
        for row in busy:
            with self._alone(row):
                self._uncover(row)

    def _uncover(self, row: int) -> None:
        slot = self.slots[row]
        if slot.work is None:
            room = min(self.canvas, self.context - len(slot.held)) // self.size * self.size
            if room < 1:
                self._end(row, "length")
                return
            slot.offset = len(slot.said)
            slot.work = self._canvas(row, room)
        seen = next(slot.work)
        if not all(0 <= likely <= SURE for likely in seen.sure):
            raise ValueError("the model's logits are not finite")
        if self._request(row).frames and not tell(
            slot.ticket, Denoised(seen.step, seen.steps, slot.offset, seen.tokens)
        ):
            self._end(row, "error")
            return
        self._say(row, seen)
        if slot.ticket is not None and None not in seen.tokens:
            slot.work = None  # no end was written: the next canvas

    def _canvas(self, row: int, length: int) -> Iterator[Progress]:
        """An empty canvas behind what was said; the first one's noise is that of the seed itself."""
        slot, request = self.slots[row], self._request(row)
        way = Denoising(
            length=length,
            steps=length,
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            block=self.model.traits.block_size or None,
        )
        seed = request.seed if not slot.offset else stable_hash(request.seed, "canvas", slot.offset)
        return stepwise(self.model, slot.held, way, seed % 2**64)  # OpenAI's may be negative

    def _say(self, row: int, seen: Progress) -> None:
        """Tell what stands to the left of the first mask, and see whether the answer ends."""
        slot, request = self.slots[row], self._request(row)
        traits = self.model.traits
        for place in range(len(slot.said) - slot.offset, len(seen.tokens)):
            token = seen.tokens[place]
            if token is None or slot.ticket is None or slot.ticket.cancelled.is_set():
                return
            if token in request.stop or token == traits.fill or token in traits.ends:
                self._end(row, "stop")
                return
            slot.said.append(token)
            self._counts["generated_tokens"] += 1
            if not tell(slot.ticket, Said(token, math.log(max(seen.sure[place], 1e-300)))):
                self._end(row, "error")
            elif len(slot.said) == slot.budget:
                self._end(row, "length")
            if slot.ticket is None:
                return

    def _end(self, row: int, reason: str, message: str = "") -> None:
        slot = self.slots[row]
        ticket, slot.ticket, slot.work = slot.ticket, None, None
        assert ticket is not None
        tell(ticket, Ended(reason, len(slot.prompt), 0, len(slot.said), message))
