"""The server's engine: a thread that decodes the requests of many users together, row by row of one cache.

    Engine(model, rows, queue).submit(Request) -> Ticket;  events come to the request's listener from the engine's thread

Each step feeds every row what it has to read, at most CHUNK tokens of a prompt, or its last token; a prompt that comes in between
slows its neighbours by one chunk a step and stops none (continuous batching, Yu et al. 2022, Orca). Rows that ended are kept for
those who begin alike (`prefixes.py`). While few rows speak, each may say several tokens a step, where a guess is right (`drafts.py`).

What a request says depends on (model, prompt, sampling, seed) alone: a token is chosen by one number of (seed, place), so neighbours,
prefixes, drafts and cancelled requests change nothing but rounding (`generation/sampling.py`).

The thread, the queue and what becomes of faults are those of every engine (`loop.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import numpy as np
import torch
from torch import Tensor

from pipeline.generation.noise import uniforms
from pipeline.generation.sampling import Sampling, choose
from pipeline.model.cache import KVCache
from pipeline.model.transformer import Transformer
from pipeline.serve.drafts import Drafter
from pipeline.serve.loop import Loop, tell
from pipeline.serve.prefixes import Slot, check_memory, take_row
from pipeline.serve.request import Constraint, Ended, EngineStopped, Event, QueueFull, Request, Said, Stats, Ticket
from pipeline.serve.rows import RowDecoder, Rows

__all__ = ["Constraint", "Ended", "Engine", "EngineStopped", "Event", "QueueFull", "Request", "Said", "Stats", "Ticket"]

CHUNK = 256  # prompt tokens of a row in one step
DRAFT_ROWS = 2  # with more busy rows a step's arithmetic counts, not its reading, and guesses are not free


@dataclass(frozen=True)
class _Speaker:
    """A row that can say something: what it is guessed to say, and the logits (1 + guess, V) that tell whether it does."""

    row: int
    guess: list[int]
    logits: Tensor


class Engine(Loop):
    """See the module. `with` runs the thread; without it nothing happens but by `step`."""

    slots: list[Slot]

    def __init__(
        self, model: Transformer, *, rows: int = 8, queue: int = 32, drafts: bool = True, decoder: Callable[[int], Rows] | None = None
    ) -> None:  # fmt: skip
        """`decoder` makes a decoder of so many rows; None: our own, of `model`, whose weights no other one needs.

        Raises ValueError for a bidirectional model, InputError where the rows may take too much memory.
        """
        super().__init__(rows=rows, queue=queue, context=model.config.max_context, vocabulary=model.config.vocab_size)
        self.model, self.drafts = model.train(False), drafts
        self.decoder_of = decoder or partial(RowDecoder, self.model)
        table = model.model.embed_tokens.weight
        check_memory(model.config, rows, table.dtype, table.device)
        self._ended = count(1)
        self._make()

    def _empty(self) -> None:
        self.decoder = self.decoder_of(self.rows)
        self.slots = [Slot() for _ in range(self.rows)]

    def _advance(self, busy: list[int]) -> None:
        """Feed each busy row, say what can be said."""
        cache = self.decoder.cache
        most = None if isinstance(cache, KVCache) and cache.reads_at_once else CHUNK
        pieces = [self.slots[row].ahead[:most] for row in busy]
        speaks = [len(piece) == len(self.slots[row].ahead) for row, piece in zip(busy, pieces)]
        guesses = [self._guess(row) if spoken and len(busy) <= DRAFT_ROWS else [] for row, spoken in zip(busy, speaks)]
        wanted = [1 + len(guess) if spoken else 0 for spoken, guess in zip(speaks, guesses)]
        fed = [piece + guess for piece, guess in zip(pieces, guesses)]
        logits = self.decoder.advance(busy, fed, wanted)
        self._counts["steps"] += 1
        for row, piece in zip(busy, pieces):
            slot = self.slots[row]
            slot.held += piece
            del slot.ahead[: len(piece)]
        asked = zip(busy, guesses, logits.split(wanted))
        self._say([_Speaker(row, guess, own) for row, guess, own in asked if len(own)])

    def _guess(self, row: int) -> list[int]:
        """What a row may say after the next token; nothing under a constraint, which hears a token before it allows the next."""
        slot = self.slots[row]
        if slot.drafter is None:
            return []
        room = self.context - len(slot.held) - len(slot.ahead)
        return slot.drafter.guess(min(slot.remaining - 1, room))

    def _begin(self, ticket: Ticket) -> None:
        """Give a request a row."""
        request = ticket.request
        ids = list(request.ids)
        row, cached = take_row(self.slots, self.decoder.cache, ids, request.owner)
        budget = min(request.sampling.max_new_tokens, self.context - len(ids))
        self.slots[row] = Slot(
            held=ids[:cached], owner=request.owner, ticket=ticket, way=replace(request.sampling, max_new_tokens=1), cached=cached,
            ahead=ids[cached:], numbers=uniforms(request.seed, 0, budget),
            drafter=Drafter(ids) if self.drafts and request.constraint is None else None,
        )  # fmt: skip
        self._counts.update(prompt_tokens=len(ids), cached_tokens=cached)

    def _say(self, speakers: "list[_Speaker]") -> None:
        """Choose each row's tokens; rows that sample alike are chosen for together."""
        alike: dict[Sampling, list[tuple[_Speaker, Tensor]]] = {}
        for one in speakers:
            wanted = self._restricted(one)
            if wanted is not None:
                alike.setdefault(self.slots[one.row].way, []).append((one, wanted))
        for way, group in alike.items():
            slots = [self.slots[one.row] for one, _ in group]
            numbers = np.concatenate([slot.numbers[slot.said :][: len(own)] for slot, (_, own) in zip(slots, group)])
            tokens, _ = choose(_stacked([own for _, own in group]), torch.from_numpy(numbers), way)
            logprobs = _stacked([one.logits for one, _ in group]).float().log_softmax(-1)
            counts = [len(own) for _, own in group]
            for (one, _), chosen, own in zip(group, tokens.cpu().split(counts), logprobs.split(counts)):
                self._hear_all(one, chosen.tolist(), own)

    def _restricted(self, one: "_Speaker") -> Tensor | None:
        """A row's logits (n, V) with its bias and constraint on them; None where its constraint failed and ended it."""
        request, wanted = self._request(one.row), one.logits
        if request.bias:
            wanted = wanted.clone()
            wanted[:, list(request.bias)] += wanted.new_tensor(list(request.bias.values()))
        if request.constraint is None:
            return wanted
        try:
            allowed = request.constraint.allowed(self.slots[one.row].remaining)
            if allowed is None:
                return wanted
            if not allowed.any():
                raise ValueError("a constraint allows no token")
            return wanted.masked_fill(~allowed.to(wanted.device), float("-inf"))
        except Exception as error:  # its own fault, whatever it is: the others go on
            self._fail(one.row, error)
            return None

    def _hear_all(self, one: "_Speaker", tokens: list[int], logprobs: Tensor) -> None:
        """Say the tokens (n,) of a row as long as its guess foresaw them; what was guessed wrongly is forgotten."""
        slot, ticket = self.slots[one.row], self.slots[one.row].ticket
        assert ticket is not None
        right = 0
        for place, token in enumerate(tokens):
            self._hear(one.row, token, logprobs[place])
            if slot.ticket is None or ticket.cancelled.is_set() or place == len(one.guess) or token != one.guess[place]:
                break
            slot.held.append(token)
            right += 1
        if one.guess and slot.drafter is not None:
            self.decoder.rewind(one.row, len(slot.held))
            slot.drafter.judge(right)
            self._counts.update(drafted_tokens=len(one.guess), accepted_tokens=right)

    def _hear(self, row: int, token: int, logprobs: Tensor) -> None:
        """Count a token in, tell it, and see whether the answer ends. `logprobs` (V,)."""
        slot, request = self.slots[row], self._request(row)
        if request.constraint is not None:
            try:
                token = request.constraint.take(token, slot.remaining)
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
        self._counts["generated_tokens"] += 1
        if slot.drafter is not None:
            slot.drafter.hear(token)
        top = logprobs.topk(min(request.top, len(logprobs))) if request.top else None
        pairs = () if top is None else tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        if not tell(slot.ticket, Said(token, float(logprobs[token]), pairs)):
            self._end(row, "error")
        elif slot.remaining == 0:
            self._end(row, "length")

    def _end(self, row: int, reason: str, message: str = "") -> None:
        """Free a row; what it holds stays for whoever begins so."""
        slot = self.slots[row]
        ticket, slot.ticket, slot.ahead, slot.used = slot.ticket, None, [], next(self._ended)
        assert ticket is not None
        tell(ticket, Ended(reason, len(ticket.request.ids), slot.cached, slot.said, message))


def _stacked(parts: list[Tensor]) -> Tensor:
    """Parts one under another; one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
