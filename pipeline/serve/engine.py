"""The server's engine for causal models: continuous batching over the rows of one KV cache.

    Engine(model, rows=8, queue=32).submit(GenerationRequest) -> Ticket     events go to the request's listener, which
                                                                            is called on the engine's thread

Each step feeds every busy row up to CHUNK tokens of its prompt, or its last token. So a new prompt slows the other rows
by one chunk per step and never blocks them (Yu et al. 2022, Orca). While few rows are busy, each may generate several
tokens a step by checking a draft (`Drafter`).

An answer depends only on (model, prompt, sampling, seed): each token is chosen by one uniform number, a function of
(seed, position), so other rows, cached prefixes, drafts and cancelled requests change nothing but rounding
(`generation/sampling.py`).

A scored prompt is processed like any other, but in steps of SCORE_CHUNK tokens, using only SCORE_SHARE of the time
while other rows generate.

A failure in a row's own work (its grammar, sampling, draft or listener) fails only that row. A grammar that takes more
than CONSTRAINT_SECONDS plus CONSTRAINT_SECONDS_PER_TOKEN per token ends its answer, since all rows wait for its masks.
The thread, the queue and failures in shared work are handled as in every engine (`loop.py`).

Prefix cache: a finished row keeps its keys and values until another request takes it. A request takes the free row with
the longest common prefix. If a busy row shares more of the prompt, that prefix is copied; if no row shares any, the
request takes the row that has been idle longest. Only rows of the same owner are compared: response times must not
reveal to one user what another asked.

Decoder: a server mostly decodes one or two of its rows, each by one token or a short draft. `RowDecoder` reads the keys
and values of these rows in place and copies nothing; the queries of a group become rows of one matrix product. Idle
rows cost nothing, except those between busy rows when TOGETHER or more rows share a product. Shapes are as in
`model/cache.py`: keys (R, K, h, S), values (R, K, S, h). There are n new tokens per row and N in total; G = H / K.
"""

import contextlib
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor

from pipeline.generation.sampling import Decoder, Sampling, choose, uniforms
from pipeline.model.cache import KVCache, cross
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Transformer
from pipeline.run.errors import InputError
from pipeline.serve.loop import (
    Ended,
    EngineStopped,
    Event,
    GenerationRequest,
    Loop,
    QueueFull,
    Read,
    SampledToken,
    Ticket,
    notify,
)

__all__ = ["Ended", "Engine", "EngineStopped", "Event", "GenerationRequest", "QueueFull", "SampledToken", "Ticket"]

CHUNK = 256  # prompt tokens per row per step
SCORE_CHUNK = 64  # the same for a scored prompt; smaller, as each token needs the logits of the entire vocabulary
SCORE_SHARE = 0.25  # share of time for scoring while rows generate, here or on another engine in the process
PAUSE_SECONDS = 0.005
CONSTRAINT_SECONDS = 2.0  # CPU time per answer
CONSTRAINT_SECONDS_PER_TOKEN = 0.01  # plus this much per token
DRAFT_ROWS = 2  # with more busy rows a step is bound by compute, not by reading weights, and drafts are not free
SHARED = 16  # shorter common prefixes are recomputed, which costs less than looking for them
FREE_SHARE = 0.25  # share of the free memory that keys and values may take
CGROUP = Path("/sys/fs/cgroup")
NARROW = 16  # up to this many new tokens per row, plain products beat the fused kernel, which needs a copy of the keys
TOGETHER = 4  # with at least this many rows of one token each, one product serves all rows
DRAFT = 8  # tokens per draft
MATCHED = (3, 2)  # lengths of the suffixes to look up, longest first
# checking DRAFT tokens costs as much as up to PAYS extra steps (docs/LOG.md): a draft with fewer accepted tokens fails
PAYS = 2
LONGEST_WAIT = 64


@dataclass
class Slot:
    """A row of the cache: its contents, their owner, and the request running on it."""

    held: list[int] = field(default_factory=list)  # ids whose keys and values are in the row
    owner: str = ""
    used: int = 0  # when its last request ended, as a counter value
    ticket: Ticket | None = None
    sampling: Sampling = Sampling(1)  # rows with equal sampling are sampled together
    num_cached: int = 0  # prompt tokens that were already in the row
    num_generated: int = 0
    uniform_numbers: np.ndarray = field(default_factory=lambda: np.zeros(0))  # one per token of the budget
    pending: list[int] = field(default_factory=list)  # ids still to be fed
    drafter: "Drafter | None" = None
    constraint_seconds: float = 0.0

    @property
    def remaining(self) -> int:
        """How many more tokens can be generated."""
        return len(self.uniform_numbers) - self.num_generated


@dataclass(frozen=True)
class _Candidate:
    """A row ready to generate: its draft, and the logits (1 + draft, V) that confirm or reject it."""

    row: int
    draft: list[int]
    logits: Tensor


class Engine(Loop):
    """Decodes many requests together. A `with` block runs its thread; otherwise only `step` makes progress."""

    slots: list[Slot]

    def __init__(
        self, model: Transformer, *, rows: int = 8, queue: int = 32, drafts: bool = True, rollouts: bool = False
    ) -> None:
        """`rollouts`: for a policy in training. One owner may use all rows, log-probabilities are taken at the sampling
        temperature, and the stop token is part of the answer.

        Raises ValueError for a bidirectional model, InputError if the rows may take too much memory.
        """
        config = model.config
        super().__init__(
            rows=rows, queue=queue, context=config.max_context, vocabulary=config.vocab_size, alone=rollouts
        )
        self.model, self.drafts, self.rollouts = model.train(False), drafts, rollouts
        table = model.model.embed_tokens.weight
        check_memory(model.config, rows, table.dtype, table.device)
        self._end_counter = itertools.count(1)
        self._reset()

    def load(self, model: Transformer) -> None:
        """Switch to another model of the same shape. Raises the same errors as `between_answers`."""
        self.between_answers(lambda: setattr(self, "model", model.train(False)))

    def _reset_rows(self) -> None:
        self.decoder = RowDecoder(self.model, self.rows)
        self.slots = [Slot() for _ in range(self.rows)]
        self._scored_until = 0.0  # while other rows generate, scoring pauses until this time

    def _assign_row(self, ticket: Ticket) -> None:
        request = ticket.request
        ids = list(request.ids)
        reusable = ids if request.score is None else ids[:1]  # a scored prompt is processed from the start
        row, num_cached = take_row(self.slots, self.decoder.cache, reusable, request.owner)
        budget = 0 if request.score is not None else min(request.sampling.max_new_tokens, self.context - len(ids))
        self.slots[row] = Slot(
            held=ids[:num_cached],
            owner=request.owner,
            ticket=ticket,
            sampling=replace(request.sampling, max_new_tokens=1),
            num_cached=num_cached,
            pending=ids[num_cached:],
            uniform_numbers=uniforms(request.seed, 0, budget),
            drafter=Drafter(ids) if self.drafts and request.constraint is None and budget else None,
        )
        self._counts.update(prompt_tokens=len(ids), cached_tokens=num_cached)

    def _advance(self, busy: list[int]) -> None:
        """Feed every busy row, and emit tokens for rows whose prompt is done."""
        began, scoring = time.monotonic(), [row for row in busy if self._request(row).score is not None]
        if began < self._scored_until and (len(scoring) < len(busy) or any(other.busy for other in self.others)):
            busy, scoring = [row for row in busy if row not in scoring], []
            if not busy:
                time.sleep(min(PAUSE_SECONDS, self._scored_until - began))
                return
        drafts = {row: self._draft(row) for row in busy if len(busy) <= DRAFT_ROWS and self._will_generate(row)}
        busy = [row for row in busy if self.slots[row].ticket is not None]  # a failed draft has ended its request
        chunks = [self.slots[row].pending[: self._max_chunk(row)] for row in busy]
        wanted = []
        for row, chunk in zip(busy, chunks):
            generated = 1 + len(drafts.get(row, ())) if self._will_generate(row) else 0
            wanted.append(len(chunk) if row in scoring else generated)
        logits = self.decoder.advance(busy, [chunk + drafts.get(row, []) for row, chunk in zip(busy, chunks)], wanted)
        self._counts["steps"] += 1
        candidates = []
        for row, chunk, row_logits in zip(busy, chunks, logits.split(wanted)):
            slot = self.slots[row]
            slot.held += chunk
            del slot.pending[: len(chunk)]
            if row in scoring:
                with self._isolate(row):
                    self._score(row, len(chunk), row_logits)
            elif len(row_logits):
                candidates.append(_Candidate(row, drafts.get(row, []), row_logits))
        self._generate(candidates)
        if scoring:
            now = time.monotonic()
            self._scored_until = now + (now - began) * (1 / SCORE_SHARE - 1)

    def _max_chunk(self, row: int) -> int | None:
        """How many tokens a row may take in a step; None: no limit, since its hook needs the entire prompt."""
        if self.decoder.cache.reads_at_once:
            return None
        return CHUNK if self._request(row).score is None else SCORE_CHUNK

    def _will_generate(self, row: int) -> bool:
        """Whether the next step finishes a row's prompt, so that a token follows."""
        most = self._max_chunk(row)
        return self._request(row).score is None and (most is None or len(self.slots[row].pending) <= most)

    def _score(self, row: int, num: int, logits: Tensor) -> None:
        """Report the log-probabilities of the tokens that the last `num` processed tokens predict, from their `logits`
        (num, V). The prompt's last token ends the request.
        """
        slot, request = self.slots[row], self._request(row)
        begin = len(slot.held) - num + 1  # index of the first token that these logits predict
        targets = torch.tensor(request.ids[begin : begin + num], dtype=torch.long, device=logits.device)
        logprobs = logits[: len(targets)].float().log_softmax(-1)
        target_logprobs = logprobs.gather(1, targets[:, None]).squeeze(1)
        if target_logprobs.isnan().any():
            raise ValueError("the model's logits are not finite")
        best = logprobs.topk(min(request.score or 0, logprobs.shape[1]))
        top = [tuple(zip(*pair, strict=True)) for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
        if not notify(slot.ticket, Read(tuple(target_logprobs.tolist()), tuple(top))):
            self._finish(row, "error")
        elif not slot.pending:
            self._finish(row, "length")

    def _draft(self, row: int) -> list[int]:
        """Likely tokens after the next one. Empty under a constraint, which must take each token before it allows the
        next.
        """
        slot, draft = self.slots[row], list[int]()
        if slot.drafter is not None:
            room = self.context - len(slot.held) - len(slot.pending)
            with self._isolate(row):
                draft = slot.drafter.guess(min(slot.remaining - 1, room))
        return draft

    def _generate(self, candidates: list[_Candidate]) -> None:
        """Sample and emit tokens: together for rows with equal sampling, or one by one if that fails."""
        groups: dict[Sampling, list[tuple[_Candidate, Tensor]]] = {}
        for candidate in candidates:
            with self._isolate(candidate.row):
                logits = self._constrain_logits(candidate)
                if logits is not None:
                    groups.setdefault(self.slots[candidate.row].sampling, []).append((candidate, logits))
        for sampling, group in groups.items():
            try:
                choices = self._sample(sampling, group)
            except Exception:  # the retry below finds and logs the row to blame
                choices = []
                for pair in group:
                    with self._isolate(pair[0].row):
                        choices += self._sample(sampling, [pair])
            for candidate, tokens, logprobs in choices:
                with self._isolate(candidate.row):
                    self._accept(candidate, tokens, logprobs)

    def _sample(
        self, sampling: Sampling, group: list[tuple[_Candidate, Tensor]]
    ) -> list[tuple[_Candidate, list[int], Tensor]]:
        """The tokens of each row, and the log-probabilities (n, V) they were sampled from, before bias and constraint.
        Raises ValueError for NaN and infinity.
        """
        slots, counts = [self.slots[candidate.row] for candidate, _ in group], [len(logits) for _, logits in group]
        numbers = np.concatenate(
            [slot.uniform_numbers[slot.num_generated :][:count] for slot, count in zip(slots, counts)]
        )
        logits = _concatenate([row_logits for _, row_logits in group])
        if not logits.amax(-1).isfinite().all():
            raise ValueError("the model's logits are not finite")
        tokens, _ = choose(logits, torch.from_numpy(numbers), sampling)
        own = _concatenate([candidate.logits for candidate, _ in group]).float()
        if self.rollouts and sampling.temperature:
            own = own / sampling.temperature
        logprobs = own.log_softmax(-1)
        parts = zip(group, tokens.cpu().split(counts), logprobs.split(counts))
        return [(candidate, row_tokens.tolist(), row_logprobs) for (candidate, _), row_tokens, row_logprobs in parts]

    def _constrain_logits(self, candidate: _Candidate) -> Tensor | None:
        """A row's logits (n, V) under its bias and constraint; None if the constraint took too long, which ends the
        answer.
        """
        request, logits = self._request(candidate.row), candidate.logits
        if request.bias:
            logits = logits.clone()
            logits[:, list(request.bias)] += logits.new_tensor(list(request.bias.values()))
        if request.constraint is None:
            return logits
        with self._time_constraint(candidate.row):
            allowed = request.constraint.allowed(self.slots[candidate.row].remaining)
        if self.slots[candidate.row].ticket is None:
            return None
        if allowed is None:
            return logits
        if not allowed.any():
            raise ValueError("a constraint allows no token")
        return logits.masked_fill(~allowed.to(logits.device), float("-inf"))

    @contextmanager
    def _time_constraint(self, row: int) -> Iterator[None]:
        """Track a constraint's time, and end its answer once it has taken too long: all rows wait for it."""
        slot, began = self.slots[row], time.thread_time()
        yield
        slot.constraint_seconds += time.thread_time() - began
        if slot.constraint_seconds > CONSTRAINT_SECONDS + CONSTRAINT_SECONDS_PER_TOKEN * slot.num_generated:
            self._finish(row, "slow")

    def _accept(self, candidate: _Candidate, tokens: list[int], logprobs: Tensor) -> None:
        """Emit a row's sampled tokens (n,) as long as they match its draft; the rest of the draft is rewound."""
        slot, ticket = self.slots[candidate.row], self.slots[candidate.row].ticket
        assert ticket is not None
        draft, num_accepted = candidate.draft, 0
        for index, token in enumerate(tokens):
            self._emit(candidate.row, token, logprobs[index])
            if slot.ticket is None or ticket.cancelled.is_set() or index == len(draft) or token != draft[index]:
                break
            slot.held.append(token)
            num_accepted += 1
        if draft and slot.drafter is not None:
            self.decoder.rewind(candidate.row, len(slot.held))
            slot.drafter.judge(num_accepted)
            self._counts.update(drafted_tokens=len(draft), accepted_tokens=num_accepted)

    def _emit(self, row: int, token: int, logprobs: Tensor) -> None:
        """Pass a token to the constraint and the listener; end the answer if it is complete. `logprobs` (V,)."""
        slot, request = self.slots[row], self._request(row)
        if request.constraint is not None:
            with self._time_constraint(row):
                token = request.constraint.take(token, slot.remaining)
            if slot.ticket is None:
                return
            if not 0 <= token < len(logprobs):
                raise ValueError(f"a constraint returned token {token}, which is not in the vocabulary")
        logprob = float(logprobs[token])
        if math.isnan(logprob):
            raise ValueError("the model's logits are not finite")
        top = logprobs.topk(min(request.top, len(logprobs))) if request.top else None
        pairs = () if top is None else tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        if token in request.stop:
            if self.rollouts or request.say_stop:
                slot.num_generated += 1
                notify(slot.ticket, SampledToken(token, logprob, pairs))
            self._finish(row, "stop")
            return
        slot.num_generated += 1
        slot.pending = [token]
        self._counts["generated_tokens"] += 1
        if slot.drafter is not None:
            slot.drafter.hear(token)
        if not notify(slot.ticket, SampledToken(token, logprob, pairs)):
            self._finish(row, "error")
        elif slot.remaining == 0:
            self._finish(row, "length")

    def _fail(self, row: int, error: BaseException) -> None:
        """Like `Loop._fail`, but also clears the row: a NaN left in it would reach the next request."""
        super()._fail(row, error)
        self.slots[row].held, cache = [], self.decoder.cache
        for tensor in (*cache.keys, *cache.values):
            tensor[row].zero_()
        if cache.hook is not None:
            cache.hook.zero(row)

    def _finish(self, row: int, reason: str, message: str = "") -> None:
        """Like `Loop._finish`. The row keeps its contents for the next request with the same prefix."""
        slot = self.slots[row]
        ticket, slot.ticket, slot.pending, slot.used = slot.ticket, None, [], next(self._end_counter)
        assert ticket is not None
        notify(ticket, Ended(reason, len(ticket.request.ids), slot.num_cached, slot.num_generated, message))


def _concatenate(parts: list[Tensor]) -> Tensor:
    """Concatenate along the first dimension; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


# -- prefix cache ------------------------------------------------------------------------------------------------------


def take_row(slots: Sequence[Slot], cache: KVCache, ids: list[int], owner: str) -> tuple[int, int]:
    """(row, cached): the free row for a prompt, and how many of its leading positions already hold the prompt."""
    free = [row for row, slot in enumerate(slots) if slot.ticket is None]
    lengths = {row: _common_prefix(slot.held, ids) for row, slot in enumerate(slots) if slot.owner == owner}
    lengths = {row: length for row, length in lengths.items() if length >= SHARED and not cache.reads_at_once}
    best = max(free, key=lambda row: (lengths.get(row, 0), -slots[row].used))
    cached = lengths.get(best, 0)
    donor = max(lengths, key=lambda row: lengths[row], default=best)
    if lengths.get(donor, 0) > cached:  # a busy row shares more
        cached, best = lengths[donor], min(free, key=lambda row: slots[row].used)
        for tensors, dim in ((cache.keys, 2), (cache.values, 1)):
            for tensor in tensors:
                tensor[best].narrow(dim, 0, cached).copy_(tensor[donor].narrow(dim, 0, cached))
        if cache.hook is not None:
            cache.hook.copy(donor, best, cached)
    cache.own[best] = cached
    if cache.hook is not None:
        cache.hook.rewind(best)
    return best, cached


def _common_prefix(held: list[int], ids: list[int]) -> int:
    """Length of the common prefix, excluding the last of `ids`, which is always fed because its logits are needed."""
    most = min(len(held), len(ids) - 1)
    if held[:most] == ids[:most]:
        return most
    return next(index for index in range(most) if held[index] != ids[index])


def check_memory(config: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise InputError if the keys and values of `rows` rows may take more than FREE_SHARE of the free memory."""
    row = 2 * config.layers * config.kv_heads * config.head_dim * config.max_context * dtype.itemsize
    most = int(free_memory(device) * FREE_SHARE)
    if rows * row > most:
        fits = most // row
        advice = f"use at most --rows {fits}" if fits else "use a larger machine, or a model with a shorter context"
        raise InputError(
            f"--rows {rows}: rows of {config.max_context} tokens take {rows * row / 2**30:.1f} GiB for keys and"
            f" values, more than a quarter of the free memory ({most / 2**30:.1f} GiB); {advice}"
        )


def free_memory(device: torch.device) -> int:
    """Free bytes on a CUDA device, else on this machine or in its control group, whichever is less."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [psutil.virtual_memory().available]
    with contextlib.suppress(OSError, ValueError):  # no control group, or "max"
        free.append(int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text()))
    return min(free)


# -- decoder -----------------------------------------------------------------------------------------------------------


class RowDecoder(Decoder):
    """The server's `Decoder`, for a cache whose rows share no prompts."""

    @torch.no_grad()
    def advance(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], wanted: Sequence[int]) -> Tensor:
        """Append `tokens[i]` (at least one) to row `rows[i]`. Returns the logits after the last `wanted[i]` tokens of
        each row, row by row: (sum of wanted, V).

        Raises ValueError if a row would exceed the model's context; in that case no row has changed.
        """
        counts = [len(row_tokens) for row_tokens in tokens]
        layout = RowLayout(self.cache, rows, counts)
        device = layout.positions.device
        ids = torch.tensor([token for row_tokens in tokens for token in row_tokens], device=device)
        hidden = self.model.line(ids, layout.positions, layout)  # (N, D)
        indices = [
            index for end, want in zip(accumulate(counts), wanted, strict=True) for index in range(end - want, end)
        ]
        if len(indices) < len(hidden):
            hidden = hidden[torch.tensor(indices, dtype=torch.long, device=device)]
        return self.model.logits(hidden)

    def rewind(self, row: int, length: int) -> None:
        """Drop everything in a row after its first `length` tokens."""
        assert length <= self.cache.own[row], "a row cannot be rewound past its own length"
        self.cache.own[row] = length


class RowLayout:
    """An attention layout: row `rows[i]` of a cache receives `counts[i]` of the N tokens. The constructor extends
    the rows.
    """

    def __init__(self, cache: KVCache, rows: Sequence[int], counts: Sequence[int]) -> None:
        self.cache, self.rows, self.counts = cache, list(rows), list(counts)
        self.past = [cache.own[row] for row in rows]
        self.totals = [past + count for past, count in zip(self.past, counts)]
        cache.reserve(max(self.totals))
        for row, total in zip(rows, self.totals):
            cache.own[row] = total
        positions = [position for past, total in zip(self.past, self.totals) for position in range(past, total)]
        device = cache.keys[0].device
        self.positions = torch.tensor(positions, device=device)  # (N,)
        self.batched = len(rows) >= TOGETHER and len(positions) == len(rows)
        if self.batched:
            self.row_of = torch.tensor(self.rows, device=device)
            self.span = slice(min(rows), max(rows) + 1)  # includes the rows in between: cheaper than copying keys
            lengths = torch.ones(self.span.stop - self.span.start, dtype=torch.long, device=device)
            lengths[self.row_of - self.span.start] = self.positions + 1
            future = torch.arange(max(self.totals), device=device) >= lengths[:, None]
            mask = _additive_mask(future).repeat_interleave(cache.config.kv_heads, 0)
            self.mask = mask[:, None]  # (rows of the span * K, 1, S)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """`q` (N, H, h), `k` and `v` (N, K, h) -> (N, H, h)."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if self.batched:
            return self._attend_batched(q, k, v, keys, values)
        outputs, begin = [], 0
        for row, count, past, total in zip(self.rows, self.counts, self.past, self.totals):
            end = begin + count
            keys[row, :, :, past:total] = k[begin:end].permute(1, 2, 0)
            values[row, :, past:total] = v[begin:end].transpose(0, 1)
            row_keys, row_values = keys[row, :, :, :total], values[row, :, :total]
            if count <= NARROW:
                outputs.append(_attend_row(q[begin:end], row_keys, row_values, past))
            else:
                outputs.append(cross(q[begin:end], row_keys.permute(2, 0, 1), row_values.transpose(0, 1), past))
            begin = end
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_batched(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Many rows of one token each: one product over all rows of the span."""
        keys[self.row_of, :, :, self.positions] = k.to(keys.dtype)
        values[self.row_of, :, self.positions] = v.to(values.dtype)
        longest, indices = max(self.totals), self.row_of - self.span.start
        grouped = q.unflatten(1, (keys.shape[1], -1))  # (N, K, G, h)
        queries = grouped.new_zeros(self.span.stop - self.span.start, *grouped.shape[1:])
        queries = queries.index_copy_(0, indices, grouped)  # (rows of the span, K, G, h)
        span_keys, span_values = keys[self.span, ..., :longest], values[self.span, :, :longest]
        out = _attention(queries.flatten(0, 1), span_keys.flatten(0, 1), span_values.flatten(0, 1), self.mask)
        return out.unflatten(0, (-1, keys.shape[1]))[indices].flatten(1, 2)


def _attend_row(q: Tensor, keys: Tensor, values: Tensor, past: int) -> Tensor:
    """New queries (n, H, h) of one row against its keys (K, h, S) and values (K, S, h), causal: (n, H, h)."""
    num, kv_heads = len(q), len(keys)
    if num == 1:
        return _attention(q.reshape(kv_heads, -1, q.shape[2]), keys, values, q.new_zeros(())).reshape(q.shape)
    queries = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # (K, G n, h)
    future = torch.arange(keys.shape[2], device=q.device) > torch.arange(past, past + num, device=q.device)[:, None]
    mask = _additive_mask(future).repeat(queries.shape[1] // num, 1)  # (G n, S)
    out = _attention(queries, keys, values, mask)
    return out.unflatten(1, (-1, num)).permute(2, 0, 1, 3).flatten(1, 2)


def _attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention of queries (b, n, h) to keys (b, h, S) and values (b, S, h); `mask` is added to the scores
    (b, n, S).
    """
    scores = torch.baddbmm(mask.to(q.dtype), q, keys, alpha=q.shape[-1] ** -0.5)
    return torch.bmm(scores.softmax(-1, torch.float32).to(values.dtype), values)


def _additive_mask(hidden: Tensor) -> Tensor:
    """-inf where True, else 0."""
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))


class Drafter:
    """Drafts by prompt lookup: finds an earlier occurrence of the last few tokens and proposes what followed them.

    Prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding) is speculative decoding (Leviathan et al.
    2022, arXiv:2211.17192) without a second model. One step of the model checks an entire draft. A draft token is
    accepted if it equals the token sampled with the position's own uniform number, so an answer is the same with and
    without drafts, at any temperature.

    Code and tool calls repeat earlier text. Other text does not, and drafts then cost time, so after a failed draft the
    row waits 1, then 2, 4, ... tokens before it tries again.
    """

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids: list[int] = []
        self.after: dict[tuple[int, ...], int] = {}  # a pair or triple -> the position after its last occurrence
        self.failures = self.wait = 0
        for token in ids:
            self._append(token)

    def hear(self, token: int) -> None:
        """Append a generated token."""
        self.wait = max(0, self.wait - 1)
        self._append(token)

    def guess(self, most: int) -> list[int]:
        """Up to min(`most`, DRAFT) tokens that may come next; repetitive text is assumed to keep repeating."""
        if self.wait or most < 1:
            return []
        for length in MATCHED:
            begin = self.after.get(tuple(self.ids[-length:]))
            if begin is not None:
                period = len(self.ids) - begin
                return [self.ids[begin + index % period] for index in range(min(most, DRAFT))]
        return []

    def judge(self, right: int) -> None:
        """Adapt the wait to the number of accepted tokens in the last draft."""
        self.failures = 0 if right >= PAYS else self.failures + 1
        self.wait = min(2**self.failures // 2, LONGEST_WAIT)

    def _append(self, token: int) -> None:
        end = len(self.ids)
        for length in MATCHED:
            if end >= length:
                self.after[tuple(self.ids[end - length :])] = end
        self.ids.append(token)
