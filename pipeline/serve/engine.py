"""The server's engine: a thread that decodes the requests of many users together, row by row of one cache.

    Engine(model, rows, queue).submit(GenerationRequest) -> Ticket;  events come to the request's listener from the
                                                                     engine's thread

Each step feeds every row what it has to read, at most CHUNK tokens of a prompt, or its last token; a prompt that comes
in between slows its neighbours by one chunk a step and stops none (continuous batching, Yu et al. 2022, Orca). Rows
that ended are kept for those who begin alike (`prefixes.py`). While few rows speak, each may say several tokens a step,
where a guess is right (`drafts.py`).

What a request says depends on (model, prompt, sampling, seed) alone: a token is chosen by one number of (seed, place),
so neighbours, prefixes, drafts and cancelled requests change nothing but rounding (`generation/sampling.py`).

A prompt that is scored is read as any other, SCORED tokens a step, in SCORED_SHARE of the time while others speak. Each
row's own work (its grammar, its sampling, its draft, its listener) fails that row alone, and a grammar that takes more
time than CONSTRAINT_SECONDS and CONSTRAINT_EACH a token ends its answer: a mask is made on the thread on which all rows
wait.

The thread, the queue and what becomes of faults are those of every engine (`loop.py`).

What the engine decodes with: rows that hold texts. Ours is `generation/sampling.py`'s, with an attention for few rows
of many.

    RowDecoder(model, rows).advance(rows, tokens, wanted) -> logits after the last `wanted[i]` of the tokens that row i
    gets

A server mostly decodes one or two of its rows, each by one token, or by a draft of a few. Here a row's keys and values
are read where they lie: no row is asked that does not speak, and nothing is copied (grouped queries stand as rows of
one product).

Shapes as in `model/cache.py`: keys (R, K, h, S), values (R, K, S, h); n new tokens of a row, G = H / K.

Rows that remember: which row of the cache already holds the beginning of a prompt, and how much memory rows may take.

A row that ended keeps its keys and values until another request takes it. A request takes the free row that begins as
its prompt does; where a busy one has more of it, that beginning is copied, if our own cache holds it; else it takes the
row that has been idle longest. Only rows of the same owner are looked at: how fast an answer comes must not tell one
user what another asked.
"""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
import psutil
import torch
from torch import Tensor

from pipeline.generation.sampling import Decoder, Sampling, choose, uniforms
from pipeline.model.cache import KVCache, cross
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Transformer
from pipeline.run.errors import InputError
from pipeline.serve.drafts import Drafter
from pipeline.serve.loop import (
    Constraint,
    Ended,
    EngineStopped,
    Event,
    GenerationRequest,
    Loop,
    QueueFull,
    Read,
    Said,
    Stats,
    Ticket,
    tell,
)

NARROW = 16  # new tokens of a row up to which plain products beat the fused kernel, which wants its keys copied
TOGETHER = 4  # from so many rows of one token each on they are asked in one product


@dataclass
class Lengths:
    """Rows whose keys and values another program keeps: how many positions each holds. They can be cut, not copied."""

    own: list[int]


class Rows(Protocol):
    """What the engine asks of a decoder. Other programs' stand in files of their own (`onnx_engine.py`)."""

    @property
    def cache(self) -> KVCache | Lengths:
        """Whose `own` says how much of each row counts; what lies behind is overwritten."""
        ...

    def advance(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], wanted: Sequence[int]) -> Tensor:
        """As `RowDecoder.advance`."""
        ...

    def rewind(self, row: int, length: int) -> None:
        """As `RowDecoder.rewind`."""
        ...


class RowDecoder(Decoder):
    """`Decoder` of a server, for a cache whose rows share no prompts."""

    @torch.no_grad()
    def advance(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], wanted: Sequence[int]) -> Tensor:
        """Append `tokens[i]` (at least one) to row `rows[i]`: logits (sum of wanted, V), row by row, after its last
        `wanted[i]`.

        Raises ValueError where a row would outgrow the model's context; then no row has changed.
        """
        counts = [len(piece) for piece in tokens]
        layout = Pieces(self.cache, rows, counts)
        device = layout.positions.device
        ids = torch.tensor([token for piece in tokens for token in piece], device=device)
        hidden = self.model.line(ids, layout.positions, layout)  # (N, D)
        asked = [
            place for end, want in zip(accumulate(counts), wanted, strict=True) for place in range(end - want, end)
        ]
        if len(asked) < len(hidden):
            hidden = hidden[torch.tensor(asked, dtype=torch.long, device=device)]
        return self.model.logits(hidden)

    def rewind(self, row: int, length: int) -> None:
        """Forget what a row holds behind its first `length` tokens."""
        assert length <= self.cache.own[row], "a row cannot be rewound to what it does not hold"
        self.cache.own[row] = length


class Pieces:
    """A layout of attention: row `rows[i]` of a cache gets `counts[i]` tokens of the line. Making it counts them in."""

    def __init__(self, cache: KVCache, rows: Sequence[int], counts: Sequence[int]) -> None:
        self.cache, self.rows, self.counts = cache, list(rows), list(counts)
        self.past = [cache.own[row] for row in rows]
        self.totals = [past + count for past, count in zip(self.past, counts)]
        cache.reserve(max(self.totals))
        for row, total in zip(rows, self.totals):
            cache.own[row] = total
        places = [place for past, total in zip(self.past, self.totals) for place in range(past, total)]
        device = cache.keys[0].device
        self.positions = torch.tensor(places, device=device)  # (N,)
        self.together = len(rows) >= TOGETHER and len(places) == len(rows)
        if self.together:
            self.row_of = torch.tensor(self.rows, device=device)
            self.span = slice(min(rows), max(rows) + 1)  # rows between are asked too: cheaper than copying keys
            seen = torch.ones(self.span.stop - self.span.start, dtype=torch.long, device=device)
            seen[self.row_of - self.span.start] = self.positions + 1
            future = torch.arange(max(self.totals), device=device) >= seen[:, None]
            self.future = _infinite(future).repeat_interleave(cache.config.kv_heads, 0)[
                :, None
            ]  # (rows of the span * K, 1, S)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """`q` (N, H, h), `k` and `v` (N, K, h) -> (N, H, h)."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if self.together:
            return self._one_each(q, k, v, keys, values)
        out, begin = [], 0
        for row, count, past, total in zip(self.rows, self.counts, self.past, self.totals):
            end = begin + count
            keys[row, :, :, past:total] = k[begin:end].permute(1, 2, 0)
            values[row, :, past:total] = v[begin:end].transpose(0, 1)
            whole_k, whole_v = keys[row, :, :, :total], values[row, :, :total]
            if count <= NARROW:
                out.append(_narrow(q[begin:end], whole_k, whole_v, past))
            else:
                out.append(cross(q[begin:end], whole_k.permute(2, 0, 1), whole_v.transpose(0, 1), past))
            begin = end
        return out[0] if len(out) == 1 else torch.cat(out)

    def _one_each(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Many rows of a token each: one product over all rows of the span."""
        keys[self.row_of, :, :, self.positions] = k.to(keys.dtype)
        values[self.row_of, :, self.positions] = v.to(values.dtype)
        longest, among = max(self.totals), self.row_of - self.span.start
        grouped = q.unflatten(1, (keys.shape[1], -1))  # (N, K, G, h)
        asked = grouped.new_zeros(self.span.stop - self.span.start, *grouped.shape[1:]).index_copy_(0, among, grouped)
        own_k, own_v = keys[self.span, ..., :longest].flatten(0, 1), values[self.span, :, :longest].flatten(0, 1)
        out = _weighed(asked.flatten(0, 1), own_k, own_v, self.future)
        return out.unflatten(0, (-1, keys.shape[1]))[among].flatten(1, 2)


def _narrow(q: Tensor, keys: Tensor, values: Tensor, past: int) -> Tensor:
    """New queries (n, H, h) of one row against its keys (K, h, S) and values (K, S, h), causal: (n, H, h)."""
    num, kv_heads = len(q), len(keys)
    if num == 1:
        return _weighed(q.reshape(kv_heads, -1, q.shape[2]), keys, values, q.new_zeros(())).reshape(q.shape)
    asked = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # (K, G n, h)
    ahead = torch.arange(keys.shape[2], device=q.device) > torch.arange(past, past + num, device=q.device)[:, None]
    future = _infinite(ahead).repeat(asked.shape[1] // num, 1)  # (G n, S)
    out = _weighed(asked, keys, values, future)
    return out.unflatten(1, (-1, num)).permute(2, 0, 1, 3).flatten(1, 2)


def _weighed(q: Tensor, keys: Tensor, values: Tensor, future: Tensor) -> Tensor:
    """Softmax attention of queries (b, n, h) to keys (b, h, S) and values (b, S, h); `future` is added to the scores
    (b, n, S).
    """
    scores = torch.baddbmm(future.to(q.dtype), q, keys, alpha=q.shape[-1] ** -0.5)
    return torch.bmm(scores.softmax(-1, torch.float32).to(values.dtype), values)


def _infinite(where: Tensor) -> Tensor:
    """-inf where True, else 0."""
    return torch.zeros(where.shape, device=where.device).masked_fill_(where, float("-inf"))


# -- prefixes ----------------------------------------------------------------------------------------------------------


SHARED = 16  # a common beginning shorter than this is read again: finding it costs more
FREE_SHARE = 0.25  # of the free memory, what keys and values may take
CGROUP = Path("/sys/fs/cgroup")


@dataclass
class Slot:
    """A row of the cache: what it holds, whose it is, and who speaks on it now."""

    held: list[int] = field(default_factory=list)  # ids whose keys and values lie in the row
    owner: str = ""
    used: int = 0  # when it ended, as a count
    ticket: Ticket | None = None
    way: Sampling = Sampling(1)  # how tokens are chosen; equal ones are chosen for together
    cached: int = 0
    said: int = 0
    numbers: np.ndarray = field(default_factory=lambda: np.zeros(0))  # one for each token that may be said
    ahead: list[int] = field(default_factory=list)  # ids still to be fed
    drafter: Drafter | None = None
    spent: float = 0.0  # seconds of its constraint

    @property
    def remaining(self) -> int:
        """How many tokens may still be said."""
        return len(self.numbers) - self.said


def take_row(slots: Sequence[Slot], cache: KVCache | Lengths, ids: list[int], owner: str) -> tuple[int, int]:
    """(row, cached): the free row in which a prompt is to go on, whose first `cached` positions are those of the
    prompt.
    """
    free = [row for row, slot in enumerate(slots) if slot.ticket is None]
    common = {row: _common(slot.held, ids) for row, slot in enumerate(slots) if slot.owner == owner}
    whole = isinstance(cache, KVCache) and cache.reads_at_once
    common = {row: found for row, found in common.items() if found >= SHARED and not whole}
    best = max(free, key=lambda row: (common.get(row, 0), -slots[row].used))
    cached = common.get(best, 0)
    donor = max(common, key=lambda row: common[row], default=best)
    if isinstance(cache, KVCache) and common.get(donor, 0) > cached:  # a busy row has more
        cached, best = common[donor], min(free, key=lambda row: slots[row].used)
        for tensors, along in ((cache.keys, 2), (cache.values, 1), (cache.states.values(), 0)):
            for tensor in tensors:
                tensor[best].narrow(along, 0, cached).copy_(tensor[donor].narrow(along, 0, cached))
    cache.own[best] = cached
    if isinstance(cache, KVCache):
        cache.unit_of[best] = -1  # what the row's units chose from is another text's
    return best, cached


def _common(held: list[int], ids: list[int]) -> int:
    """How many first ids are the same; at most all but the last of `ids`, which is always fed: its logits are
    needed.
    """
    most = min(len(held), len(ids) - 1)
    if held[:most] == ids[:most]:
        return most
    return next(place for place in range(most) if held[place] != ids[place])


def check_memory(config: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise InputError where the keys and values of so many rows may come to take more than FREE_SHARE of the free
    memory.
    """
    row = 2 * config.layers * config.kv_heads * config.head_dim * config.max_context * dtype.itemsize
    most = int(free_memory(device) * FREE_SHARE)
    if rows * row > most:
        fits = most // row
        advice = (
            f"ask for at most --rows {fits}" if fits else "it needs a larger machine, or a model of a shorter context"
        )
        raise InputError(
            f"--rows {rows}: so many rows of {config.max_context} tokens take {rows * row / 2**30:.1f} GiB of keys and"
            f" values, more than a quarter of the free memory ({most / 2**30:.1f} GiB); {advice}"
        )


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a CUDA device, else in this machine or the control group that it runs in."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [psutil.virtual_memory().available]
    with contextlib.suppress(OSError, ValueError):  # no control group, or "max"
        free.append(int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text()))
    return min(free)


# -- engine ------------------------------------------------------------------------------------------------------------


__all__ = [
    "Constraint",
    "Ended",
    "Engine",
    "EngineStopped",
    "Event",
    "GenerationRequest",
    "QueueFull",
    "Said",
    "Stats",
    "Ticket",
]

CHUNK = 256  # prompt tokens of a row in one step
SCORED = 64  # of a prompt that is scored: each needs the logits of the whole vocabulary
SCORED_SHARE = 0.25  # of the time, what scoring may take while others speak, here or on another engine of the process
PAUSE_SECONDS = 0.005
CONSTRAINT_SECONDS, CONSTRAINT_EACH = 2.0, 0.01  # of processor time, at once and for each token of an answer
DRAFT_ROWS = 2  # with more busy rows a step's arithmetic counts, not its reading, and guesses are not free


@dataclass(frozen=True)
class _Speaker:
    """A row that can say something: what it is guessed to say, and the logits (1 + guess, V) that tell whether it
    does.
    """

    row: int
    guess: list[int]
    logits: Tensor


class Engine(Loop):
    """See the module. `with` runs the thread; without it nothing happens but by `step`."""

    slots: list[Slot]

    def __init__(
        self,
        model: Transformer,
        *,
        rows: int = 8,
        queue: int = 32,
        drafts: bool = True,
        decoder: Callable[[int], Rows] | None = None,
    ) -> None:
        """`decoder` makes a decoder of so many rows; None: our own, of `model`, whose weights no other one needs.

        Raises ValueError for a bidirectional model, InputError where the rows may take too much memory.
        """
        super().__init__(rows=rows, queue=queue, context=model.config.max_context, vocabulary=model.config.vocab_size)
        self.model, self.drafts = model.train(False), drafts
        self.decoder_of = decoder or partial(RowDecoder, self.model)
        table = model.model.embed_tokens.weight
        check_memory(model.config, rows, table.dtype, table.device)
        self._ended = itertools.count(1)
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
        """How many tokens a row may read in a step; None: all, since it is the whole prompt that chooses from a
        memory.
        """
        cache = self.decoder.cache
        if isinstance(cache, KVCache) and cache.reads_at_once:
            return None
        return CHUNK if self._request(row).score is None else SCORED

    def _speaks(self, row: int) -> bool:
        """Whether a row has read its prompt with the next step, and is to say something."""
        most = self._most(row)
        return self._request(row).score is None and (most is None or len(self.slots[row].ahead) <= most)

    def _score(self, row: int, num: int, logits: Tensor) -> None:
        """Tell how likely the tokens behind the last `num` read ones were; `logits` (num, V). The last one ends the
        request.
        """
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
        """What a row may say after the next token; nothing under a constraint, which hears a token before it allows
        the next.
        """
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
            held=ids[:cached],
            owner=request.owner,
            ticket=ticket,
            way=replace(request.sampling, max_new_tokens=1),
            cached=cached,
            ahead=ids[cached:],
            numbers=uniforms(request.seed, 0, budget),
            drafter=Drafter(ids) if self.drafts and request.constraint is None and budget else None,
        )
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
        """The tokens of each row, and the log-probabilities (n, V) that they were among. Raises ValueError for NaN
        and infinity.
        """
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
        """A row's logits (n, V) with its bias and constraint on them; None where its constraint took too long and
        ended it.
        """
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
        """As `Loop._fail`; of what the row holds nothing is trusted any more: a NaN behind its end would reach its
        next request.
        """
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
