"""Masked-diffusion models in the server: busy rows of the engine take turns denoising a canvas, one step at a time.

    models/diffusion -> Served, kind diffusion
    CanvasEngine(model, rows, queue).submit(GenerationRequest) -> Ticket
    the listener gets SampledToken and, if requested, Denoised

Only tokens to the left of the first mask are emitted, because they can no longer change. If a canvas is full and has no
end of turn, the answer continues on a new canvas after it, until the token budget is used up. Rows do not share a
forward pass: denoising is compute-bound, so batching would not help. An answer is therefore a bit-exact function of
(model, prompt, sampling, seed).

Not supported: log-probabilities of alternatives, logit biases, constraints (`chat_completions.py` refuses them),
prefixes and drafts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.diffusion import files
from pipeline.diffusion.model import Denoiser
from pipeline.diffusion.sampling import CANVAS, CanvasState, Denoising, stepwise
from pipeline.run import device
from pipeline.serve.loop import Denoised, Ended, Loop, SampledToken, Ticket, notify
from pipeline.serve.models import Served, fingerprint_of, never_said

KIND: str = "diffusion"
MAX_PROBABILITY = 1 + 1e-6  # room for rounding


def opens(folder: Path) -> bool:
    """See `files.opens`."""
    return files.opens(folder)


def load(folder: Path, name: str, stage: str, *, rows: int, queue: int) -> Served:
    """Load a model directory; its engine is created but not started. Raises ModelError."""
    model, tokenizer = files.load(folder)
    model.train(False).requires_grad_(False)
    banned = {*model.traits.banned, *never_said(tokenizer)}
    model.traits = replace(model.traits, banned=tuple(sorted(banned)))
    fingerprint = fingerprint_of(model.trunk)
    model = device.placed(model)
    return Served(
        id=name,
        kind=KIND,
        stage=stage,
        tokenizer=tokenizer,
        parameters=model.trunk.num_parameters(),
        context=model.config.max_context,
        vocab_size=model.config.vocab_size,
        fingerprint=fingerprint,
        weights="native",
        engine=CanvasEngine(model, rows=rows, queue=queue),
    )


@dataclass
class CanvasRow:
    """A request, its answer so far, and the current canvas."""

    ticket: Ticket | None = None
    owner: str = ""
    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    offset: int = 0  # where the canvas starts in the answer
    budget: int = 0
    work: Iterator[CanvasState] | None = None  # the canvas's denoising steps

    @property
    def held(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt + self.answer


class CanvasEngine(Loop):
    """Denoises many requests in turn. A `with` block runs its thread; otherwise, only `step` makes progress."""

    slots: list[CanvasRow]

    def __init__(self, model: Denoiser, *, rows: int = 8, queue: int = 32, canvas: int = CANVAS) -> None:
        """`canvas`: length in tokens; for block diffusion, rounded down to full blocks, at least one."""
        super().__init__(rows=rows, queue=queue, context=model.config.max_context, vocabulary=model.config.vocab_size)
        self.model = model.train(False)
        self.block_size = model.traits.block_size or 1
        self.canvas = max(self.block_size, canvas // self.block_size * self.block_size)
        self._reset()

    def _reset_rows(self) -> None:
        self.slots = [CanvasRow() for _ in range(self.rows)]

    def _assign_row(self, ticket: Ticket) -> None:
        row = next(number for number, slot in enumerate(self.slots) if slot.ticket is None)
        ids = list(ticket.request.ids)
        budget = min(ticket.request.sampling.max_new_tokens, self.context - len(ids))
        self.slots[row] = CanvasRow(ticket, ticket.request.owner, ids, budget=budget)
        self._counts.update(prompt_tokens=len(ids))

    def _advance(self, busy: list[int]) -> None:
        """One denoising step for each busy row; an error in a request fails only that request."""
        self._counts["steps"] += 1
        for row in busy:
            with self._isolate(row):
                self._denoise(row)

    def _denoise(self, row: int) -> None:
        """One step of the row's canvas; starts a new canvas if there is none."""
        slot = self.slots[row]
        if slot.work is None:
            length = min(self.canvas, self.context - len(slot.held)) // self.block_size * self.block_size
            if length < 1:
                self._finish(row, "length")
                return
            slot.offset = len(slot.answer)
            slot.work = self._start_canvas(row, length)
        progress = next(slot.work)
        if not all(0 <= probability <= MAX_PROBABILITY for probability in progress.sure):
            raise ValueError("the model's logits are not finite")
        if self._request(row).frames:
            frame = Denoised(progress.step, progress.steps, slot.offset, progress.tokens)
            if not notify(slot.ticket, frame):
                self._finish(row, "error")
                return
        self._emit(row, progress)
        if slot.ticket is not None and None not in progress.tokens:
            slot.work = None  # full, with no end of turn: the next step starts a new canvas

    def _start_canvas(self, row: int, length: int) -> Iterator[CanvasState]:
        """Start an empty canvas after the answer so far; the first canvas uses the request's own seed."""
        slot, request = self.slots[row], self._request(row)
        settings = Denoising(
            length=length,
            steps=length,
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            block=self.model.traits.block_size or None,
        )
        seed = request.seed if not slot.offset else device.stable_hash(request.seed, "canvas", slot.offset)
        return stepwise(self.model, slot.held, settings, seed % 2**64)  # OpenAI seeds may be negative

    def _emit(self, row: int, progress: CanvasState) -> None:
        """Emit the new tokens to the left of the first mask, and end the answer if it is complete."""
        slot, request = self.slots[row], self._request(row)
        traits = self.model.traits
        for position in range(len(slot.answer) - slot.offset, len(progress.tokens)):
            token = progress.tokens[position]
            if token is None or slot.ticket is None or slot.ticket.cancelled.is_set():
                return
            if token in request.stop or token == traits.fill or token in traits.ends:
                self._finish(row, "stop")
                return
            slot.answer.append(token)
            self._counts["generated_tokens"] += 1
            if not notify(slot.ticket, SampledToken(token, math.log(max(progress.sure[position], 1e-300)))):
                self._finish(row, "error")
            elif len(slot.answer) == slot.budget:
                self._finish(row, "length")
            if slot.ticket is None:
                return

    def _finish(self, row: int, reason: str, message: str = "") -> None:
        slot = self.slots[row]
        ticket, slot.ticket, slot.work = slot.ticket, None, None
        assert ticket is not None
        notify(ticket, Ended(reason, len(slot.prompt), 0, len(slot.answer), message))
