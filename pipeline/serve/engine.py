"""The server's engine: a thread that decodes the requests of many users together, row by row of one cache.

    Engine(model, rows, queue).submit(Request) -> Ticket;  events come to the request's listener from the engine's thread

Each step feeds every row what it has to read, at most CHUNK tokens of a prompt, or its last token; a prompt that comes in between
slows its neighbours by one chunk a step and stops none (continuous batching, Yu et al. 2022, Orca). Rows that ended are kept for
those who begin alike (`prefixes.py`). While few rows speak, each may say several tokens a step, where a guess is right (`drafts.py`).

What a request says depends on (model, prompt, sampling, seed) alone: a token is chosen by one number of (seed, place), so neighbours,
prefixes, drafts and cancelled requests change nothing but rounding (`generation/sampling.py`).

A prompt that is scored is read as any other, SCORED tokens a step, in SCORED_SHARE of the time while others speak. Each row's own work (its grammar, its
sampling, its draft, its listener) fails that row alone, and a grammar that takes more time than CONSTRAINT_SECONDS and
CONSTRAINT_EACH a token ends its answer: a mask is made on the thread on which all rows wait.

The thread, the queue and what becomes of faults are those of every engine (`loop.py`).
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from pipeline.serve.request import (
    Constraint,
    Ended,
    EngineStopped,
    Event,
    QueueFull,
    Read,
    Request,
    Said,
    Stats,
    Ticket,
)
from pipeline.serve.rows import RowDecoder, Rows

__all__ = ["Constraint", "Ended", "Engine", "EngineStopped", "Event", "QueueFull", "Request", "Said", "Stats", "Ticket"]

CHUNK = 256  # prompt tokens of a row in one step
SCORED = 64  # of a prompt that is scored: each needs the logits of the whole vocabulary
SCORED_SHARE = 0.25  # of the time, what scoring may take while others speak, here or on another engine of the process
PAUSE_SECONDS = 0.005
CONSTRAINT_SECONDS, CONSTRAINT_EACH = 2.0, 0.01  # of processor time, at once and for each token of an answer
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
        self._scored_until = 0.0  # when the next tokens may be scored, if others speak

    def _advance(self, busy: list[int]) -> None:
        """Feed each busy row, say what can be said."""
        began, scoring = time.monotonic(), [row for row in busy if self._request(row).score is not None]
        if began < self._scored_until and (len(scoring) < len(busy) or any(other.busy for other in self.others)):
            busy, scoring = [row for row in busy if row not in scoring], []
            if not busy:
                time.sleep(min(PAUSE_SECONDS, self._scored_until - began))
                return
        guesses = {row: self._guess(row) for row in busy if len(busy) <= DRAFT_ROWS and self._speaks(row)}
        busy = [row for row in busy if self.slots[row].ticket is not None]  # a guess may have failed
        pieces = [self.slots[row].ahead[: self._most(row)] for row in busy]
        wanted = []
        for row, piece in zip(busy, pieces):
            wanted.append(len(piece) if row in scoring else 1 + len(guesses.get(row, ())) if self._speaks(row) else 0)
        logits = self.decoder.advance(busy, [piece + guesses.get(row, []) for row, piece in zip(busy, pieces)], wanted)
        self._counts["steps"] += 1
        speakers = []
        for row, piece, own in zip(busy, pieces, logits.split(wanted)):
            slot = self.slots[row]
            slot.held += piece
            del slot.ahead[: len(piece)]
            if row in scoring:
                with self._alone(row):
                    self._score(row, len(piece), own)
            elif len(own):
                speakers.append(_Speaker(row, guesses.get(row, []), own))
        self._say(speakers)
        if scoring:
            now = time.monotonic()
            self._scored_until = now + (now - began) * (1 / SCORED_SHARE - 1)

    def _most(self, row: int) -> int | None:
        """How many tokens a row may read in a step; None: all, since it is the whole prompt that chooses from a memory."""
        cache = self.decoder.cache
        if isinstance(cache, KVCache) and cache.reads_at_once:
            return None
        return CHUNK if self._request(row).score is None else SCORED

    def _speaks(self, row: int) -> bool:
        """Whether a row has read its prompt with the next step, and is to say something."""
        most = self._most(row)
        return self._request(row).score is None and (most is None or len(self.slots[row].ahead) <= most)

    def _score(self, row: int, num: int, logits: Tensor) -> None:
        """Tell how likely the tokens behind the last `num` read ones were; `logits` (num, V). The last one ends the request."""
        slot, request = self.slots[row], self._request(row)
        begin = len(slot.held) - num + 1  # of the tokens that these logits foresaw
        following = torch.tensor(request.ids[begin : begin + num], dtype=torch.long, device=logits.device)
        logprobs = logits[: len(following)].float().log_softmax(-1)
        found = logprobs.gather(1, following[:, None]).squeeze(1)
        if found.isnan().any():
            raise ValueError("the model's logits are not finite")
        best = logprobs.topk(min(request.score or 0, logprobs.shape[1]))
        top = [tuple(zip(*pair, strict=True)) for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
        if not tell(slot.ticket, Read(tuple(found.tolist()), tuple(top))):
            self._end(row, "error")
        elif not slot.ahead:
            self._end(row, "length")

    def _guess(self, row: int) -> list[int]:
        """What a row may say after the next token; nothing under a constraint, which hears a token before it allows the next."""
        slot, guess = self.slots[row], list[int]()
        if slot.drafter is not None:
            room = self.context - len(slot.held) - len(slot.ahead)
            with self._alone(row):
                guess = slot.drafter.guess(min(slot.remaining - 1, room))
        return guess

    def _begin(self, ticket: Ticket) -> None:
        """Give a request a row."""
        request = ticket.request
        ids = list(request.ids)
        known = ids if request.score is None else ids[:1]  # what is scored is read from its beginning
        row, cached = take_row(self.slots, self.decoder.cache, known, request.owner)
        budget = 0 if request.score is not None else min(request.sampling.max_new_tokens, self.context - len(ids))
        self.slots[row] = Slot(
            held=ids[:cached], owner=request.owner, ticket=ticket, way=replace(request.sampling, max_new_tokens=1), cached=cached,
            ahead=ids[cached:], numbers=uniforms(request.seed, 0, budget),
            drafter=Drafter(ids) if self.drafts and request.constraint is None and budget else None,
        )  # fmt: skip
        self._counts.update(prompt_tokens=len(ids), cached_tokens=cached)

    def _say(self, speakers: "list[_Speaker]") -> None:
        """Choose each row's tokens; rows that sample alike are chosen for together, and one by one where that fails."""
        alike: dict[Sampling, list[tuple[_Speaker, Tensor]]] = {}
        for one in speakers:
            with self._alone(one.row):
                wanted = self._restricted(one)
                if wanted is not None:
                    alike.setdefault(self.slots[one.row].way, []).append((one, wanted))
        for way, group in alike.items():
            try:
                chosen = self._chosen(way, group)
            except Exception:  # whose fault it is shows below, and is logged there
                chosen = []
                for one in group:
                    with self._alone(one[0].row):
                        chosen += self._chosen(way, [one])
            for one, tokens, logprobs in chosen:
                with self._alone(one.row):
                    self._hear_all(one, tokens, logprobs)

    def _chosen(
        self, way: Sampling, group: "list[tuple[_Speaker, Tensor]]"
    ) -> "list[tuple[_Speaker, list[int], Tensor]]":
        """The tokens of each row, and the log-probabilities (n, V) that they were among. Raises ValueError for NaN and infinity."""
        slots, counts = [self.slots[one.row] for one, _ in group], [len(own) for _, own in group]
        numbers = np.concatenate([slot.numbers[slot.said :][:count] for slot, count in zip(slots, counts)])
        logits = _stacked([own for _, own in group])
        if not logits.amax(-1).isfinite().all():
            raise ValueError("the model's logits are not finite")
        tokens, _ = choose(logits, torch.from_numpy(numbers), way)
        logprobs = _stacked([one.logits for one, _ in group]).float().log_softmax(-1)
        parts = zip(group, tokens.cpu().split(counts), logprobs.split(counts))
        return [(one, chosen.tolist(), own) for (one, _), chosen, own in parts]

    def _restricted(self, one: "_Speaker") -> Tensor | None:
        """A row's logits (n, V) with its bias and constraint on them; None where its constraint took too long and ended it."""
        request, wanted = self._request(one.row), one.logits
        if request.bias:
            wanted = wanted.clone()
            wanted[:, list(request.bias)] += wanted.new_tensor(list(request.bias.values()))
        if request.constraint is None:
            return wanted
        with self._timed(one.row):
            allowed = request.constraint.allowed(self.slots[one.row].remaining)
        if self.slots[one.row].ticket is None or allowed is None:
            return None if self.slots[one.row].ticket is None else wanted
        if not allowed.any():
            raise ValueError("a constraint allows no token")
        return wanted.masked_fill(~allowed.to(wanted.device), float("-inf"))

    @contextmanager
    def _timed(self, row: int) -> Iterator[None]:
        """Count a constraint's time in, and end its answer where it has taken too much: all rows wait for it."""
        slot, began = self.slots[row], time.thread_time()
        yield
        slot.spent += time.thread_time() - began
        if slot.spent > CONSTRAINT_SECONDS + CONSTRAINT_EACH * slot.said:
            self._end(row, "slow")

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
            with self._timed(row):
                token = request.constraint.take(token, slot.remaining)
            if slot.ticket is None:
                return
            if not 0 <= token < len(logprobs):
                raise ValueError(f"a constraint says token {token}, which is not in the vocabulary")
        logprob = float(logprobs[token])
        if math.isnan(logprob):
            raise ValueError("the model's logits are not finite")
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
        if not tell(slot.ticket, Said(token, logprob, pairs)):
            self._end(row, "error")
        elif slot.remaining == 0:
            self._end(row, "length")

    def _fail(self, row: int, error: BaseException) -> None:
        """As `Loop._fail`; of what the row holds nothing is trusted any more: a NaN behind its end would reach its next request."""
        super()._fail(row, error)
        self.slots[row].held, cache = [], self.decoder.cache
        if isinstance(cache, KVCache):
            for tensor in (*cache.keys, *cache.values, *cache.states.values(), *cache.chose.values()):
                tensor[row].zero_()

    def _end(self, row: int, reason: str, message: str = "") -> None:
        """Free a row; what it holds stays for whoever begins so."""
        slot = self.slots[row]
        ticket, slot.ticket, slot.ahead, slot.used = slot.ticket, None, [], next(self._ended)
        assert ticket is not None
        tell(ticket, Ended(reason, len(ticket.request.ids), slot.cached, slot.said, message))


def _stacked(parts: list[Tensor]) -> Tensor:
    """Parts one under another; one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
