"""Left-to-right decoding: prompts in, completions out. RL, evaluation and the server share the `Decoder`.

Each token is chosen by inverse-CDF sampling with one uniform number. The float32 weights are summed in blocks, and the
block sums are added in float64. The uniform number is a function of (seed, token index): Philox4x32-10 (Salmon et al.
2011, SC11), a stateless counter-based generator, with the seed as key and the token index as counter. So a sample
depends only on (model, prompt, sampling, seed), not on batch composition, size or order, nor on drafts or resuming, and
two checkpoints sampled with the same seed share their noise. The only remaining difference is rounding: a matmul with a
different number of rows may round the logits differently (by about 1e-6), which changes a sample only if its uniform
number is that close to a boundary.

Cached and uncached logits agree to within 1e-5; log-probabilities match teacher forcing. Not here: grammars
(`constrain.py`), tool execution (`evaluation/tools.py`), the server's queue and threads (`serve/engine.py`).

Not guaranteed: cryptographic security. Seeds are taken modulo 2^64.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pipeline.model import decoding
from pipeline.model.cache import CACHE_BLOCK, Cached, KVCache
from pipeline.model.cpu import primitives
from pipeline.model.decoding import DecodingStep
from pipeline.model.transformer import Transformer

PREFILL_TOKENS = 8192  # prompt tokens per forward pass; bounds memory
COMPACT_BELOW = 0.75  # fraction of live rows below which finished rows are dropped from the cache
CACHE_BYTES = {"cpu": 2**29, "accelerator": 2**33}  # for keys and values of the rows decoded together
BLOCK = 64  # tokens per block: sums of blocks are searched first
NUCLEUS_PROBE = 64  # enough tokens for most nuclei; only rows that need more are searched in full
WIDE_ROWS = 64  # number of rows with wide nuclei processed at once: they fit in a core's L2 cache
BUCKETS = 1024  # for weights, 16 per power of two; weights below 2^-64 of the largest share the last bucket
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Raises ValueError for a value out of range."""

    max_new_tokens: int
    temperature: float = 0.0  # 0 takes the most likely token
    top_p: float = 1.0  # keep the most likely tokens up to this total probability; 1 keeps all
    top_k: int = 0  # keep the k most likely tokens; 0 keeps all

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected at least 1, found {self.max_new_tokens}")
        if not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(f"expected a finite temperature >= 0, 0 < top_p <= 1, top_k >= 0, found {self}")


@dataclass(frozen=True)
class Completion:
    """One sampled answer.

    `logprobs` are the model's log-probabilities at the sampling temperature (1 for temperature 0), before top-p and
    top-k, one per sampled token including the stop token, as needed for a policy gradient.
    """

    ids: list[int]  # without the stop token
    logprobs: list[float]  # natural logarithms; one more than `ids` after a stop token
    stop: Literal["stop", "length"]


def generate(
    model: Transformer,
    prompts: list[list[int]],
    sampling: Sampling,
    *,
    stop: Collection[int],
    seeds: list[int],
    batch_rows: int = 32,
) -> list[Completion]:
    """Complete each prompt with its own seed; results are in prompt order.

    A completion ends at a `stop` token, after `max_new_tokens`, or when the context is full ("length"). Identical
    prompts are processed only once. Raises ValueError for an empty prompt, one that fills the context, or a number of
    seeds that differs from the number of prompts.
    """
    if len(seeds) != len(prompts):
        raise ValueError(f"expected a seed for each of the {len(prompts)} prompts, found {len(seeds)}")
    context = model.config.max_context
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) < context:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; expected 1 to {context - 1} (the context minus one)"
            )
    was_training = model.training
    model.train(False)
    try:
        return _generate(model, prompts, sampling, frozenset(stop), seeds, batch_rows)
    finally:
        model.train(was_training)


def sampler(
    model: Transformer, sampling: Sampling, stop: Collection[int]
) -> Callable[[list[list[int]], list[int]], list[Completion]]:
    """`generate` with a fixed model and sampling, for rollouts: prompts and seeds in, completions out.

    Decodes `rows_within` rows at a time: fewer would be slow, and a cache for all rows may not fit in memory.
    """

    def sample(prompts: list[list[int]], seeds: list[int]) -> list[Completion]:
        rows = rows_within(model, max(map(len, prompts), default=0) + sampling.max_new_tokens)
        return generate(model, prompts, sampling, stop=stop, seeds=seeds, batch_rows=rows)

    return sample


def rows_within(model: Transformer, length: int) -> int:
    """How many rows of `length` tokens to decode together: as many as fit in a cache of CACHE_BYTES, 8 to 512."""
    config, table = model.config, model.model.embed_tokens.weight
    row = 2 * config.layers * config.kv_heads * config.head_dim * table.element_size() * max(length, 1)
    budget = CACHE_BYTES["cpu" if table.device.type == "cpu" else "accelerator"]
    return max(8, min(512, budget // row))


class Decoder:
    """The core of decoding: a cache of rows, and a step that appends new tokens to any of them."""

    def __init__(self, model: Transformer, rows: int) -> None:
        """Raises ValueError for a bidirectional model."""
        if model.config.attention != "causal":
            raise ValueError("a bidirectional model cannot decode left to right; use diffusion/sampling.py")
        self.model = model
        table = model.model.embed_tokens.weight
        self.step = DecodingStep(model) if decoding.fits(model) else None
        dtype, block = (table.dtype, CACHE_BLOCK) if self.step is None else (torch.bfloat16, decoding.CACHE_BLOCK)
        self.cache = KVCache(model.config, rows, dtype=dtype, device=table.device, block=block)

    @torch.no_grad()
    def feed(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append `tokens[i]` (one or more) to row `rows[i]`; returns logits (len(rows), V) after each row's last token.

        All new tokens are processed together: the linear layers run once, attention once per row (once in total if each
        row gets one token). Raises ValueError if a row would exceed the model's context.
        """
        if self.step is not None and all(len(row_tokens) == 1 for row_tokens in tokens):
            return self.step.next(self.cache, rows, [row_tokens[0] for row_tokens in tokens])
        return self._feed(self.cache, rows, tokens)

    @torch.no_grad()
    def read(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Tensor]:
        """Process prompts: returns their indices, for `clear`, and the logits (len(prompts), V) after each prompt.

        The next `read` overwrites prompts that no row uses.
        """
        numbers = self.cache.room_for_prompts(len(prompts))
        assert self.cache.prompts is not None
        return numbers, self._feed(self.cache.prompts, numbers, prompts)

    def _feed(self, cache: KVCache, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        counts = [len(row_tokens) for row_tokens in tokens]
        if not all(counts):
            raise ValueError("each row needs at least one token: an empty prompt has no next token")
        if self.step is not None and not any(cache.own[row] or cache.before(row) for row in rows):
            return self.step.read(cache, rows, tokens)
        layout = Cached(cache, rows, counts)
        ids = torch.tensor([token for row_tokens in tokens for token in row_tokens], device=layout.positions.device)
        hidden = self.model.line(ids, layout.positions, layout)
        ends = torch.tensor(counts, device=ids.device).cumsum(0) - 1
        return self.model.logits(hidden[ends])

    def clear(self, row: int, prompt: int | None = None) -> None:
        """Empty a row; it then continues `prompt`, an index from `read`, or has no prompt."""
        self.cache.clear(row, prompt)


# -- rows of a batch ---------------------------------------------------------------------------------------------------


class _Rows:
    """The samples being decoded, one per slot: arrays (slots, maximum new tokens); a row's entries beyond its length
    are unused.
    """

    def __init__(self, slots: int, most: int) -> None:
        self.prompts = np.full(slots, -1)  # (slots,) the index of the prompt; -1: free
        self.budgets, self.lengths = np.zeros(slots, dtype=np.int64), np.zeros(slots, dtype=np.int64)
        self.numbers, self.logprobs = np.zeros((slots, most)), np.zeros((slots, most))
        self.ids = np.zeros((slots, most), dtype=np.int64)

    def begin(self, slot: int, prompt: int, numbers: NDArray[np.float64]) -> None:
        """Start sampling a prompt's completion in a slot; it gets as many tokens as there are uniform numbers."""
        self.prompts[slot], self.budgets[slot], self.lengths[slot] = prompt, len(numbers), 0
        self.numbers[slot, : len(numbers)] = numbers

    def select(self, slots: NDArray[np.int64]) -> None:
        """Keep only `slots`."""
        for name, values in vars(self).items():
            setattr(self, name, values[slots])

    def advance(
        self, slots: NDArray[np.int64], logits: Tensor, sampling: Sampling, stop: NDArray[np.int64]
    ) -> Iterator[tuple[int, Completion]]:
        """Choose the next token of each of these slots; yields (prompt index, completion) for each that ends."""
        at = self.lengths[slots]
        chosen = choose(logits, torch.from_numpy(self.numbers[slots, at]), sampling)
        tokens, logprobs = (values.cpu().numpy() for values in chosen)
        self.ids[slots, at], self.logprobs[slots, at] = tokens, logprobs
        self.lengths[slots] += 1
        stopped = np.isin(tokens, stop)
        for number in np.flatnonzero(stopped | (self.lengths[slots] == self.budgets[slots])):
            slot, length = slots[number], int(at[number]) + 1
            ids, ended = self.ids[slot, : length - stopped[number]].tolist(), "stop" if stopped[number] else "length"
            yield int(self.prompts[slot]), Completion(ids, self.logprobs[slot, :length].tolist(), ended)
            self.prompts[slot] = -1


def _generate(
    model: Transformer,
    prompts: list[list[int]],
    sampling: Sampling,
    stop: frozenset[int],
    seeds: list[int],
    batch_rows: int,
) -> list[Completion]:
    """Finished rows make room for waiting prompts; when none are waiting, the cache shrinks to the live rows."""
    # The longest comes last, so it is popped first; identical prompts are adjacent. Results do not depend on this.
    waiting = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), prompts[index], -index))
    results: dict[int, Completion] = {}
    num_slots, ends = min(batch_rows, len(prompts)), np.array(sorted(stop), dtype=np.int64)
    decoder, rows = Decoder(model, num_slots), _Rows(num_slots, sampling.max_new_tokens)
    while waiting or (rows.prompts >= 0).any():
        live, free = np.flatnonzero(rows.prompts >= 0), np.flatnonzero(rows.prompts < 0).tolist()
        if waiting and (not len(live) or len(free) >= max(1, num_slots // 4)):
            admitted = _admit(waiting, free, prompts)
            for slot, index in admitted:
                budget = min(sampling.max_new_tokens, model.config.max_context - len(prompts[index]))
                rows.begin(slot, index, uniforms(seeds[index], 0, budget))
            slots, logits = np.array([slot for slot, _ in admitted]), _prefill(decoder, admitted, prompts)
            results.update(rows.advance(slots, logits, sampling, ends))
            continue
        if not waiting and len(live) < COMPACT_BELOW * num_slots:
            decoder.cache.select(live.tolist())
            rows.select(live)
            num_slots = len(live)
            live = np.arange(num_slots)
        last = rows.ids[live, rows.lengths[live] - 1, None].tolist()
        results.update(rows.advance(live, decoder.feed(live.tolist(), last), sampling, ends))
    return [results[index] for index in range(len(prompts))]


def _admit(waiting: list[int], free: list[int], prompts: list[list[int]]) -> list[tuple[int, int]]:
    """Take prompts from the end of `waiting`, up to PREFILL_TOKENS; returns (slot, prompt index) pairs."""
    admitted: list[tuple[int, int]] = []
    tokens = 0
    for slot in free:
        if not waiting or (admitted and tokens + len(prompts[waiting[-1]]) > PREFILL_TOKENS):
            break
        index = waiting.pop()
        if not admitted or prompts[admitted[-1][1]] != prompts[index]:
            tokens += len(prompts[index])
        admitted.append((slot, index))
    return admitted


def _prefill(decoder: Decoder, admitted: list[tuple[int, int]], prompts: list[list[int]]) -> Tensor:
    """Process the admitted prompts, each distinct one once; returns logits (len(admitted), V)."""
    distinct: list[list[int]] = []
    prompt_of: list[int] = []  # index in `distinct` of each admitted prompt
    for slot, index in admitted:
        decoder.clear(slot)  # so that its previous prompt can be overwritten
        if not distinct or distinct[-1] != prompts[index]:
            distinct.append(prompts[index])
        prompt_of.append(len(distinct) - 1)
    numbers, logits = decoder.read(distinct)
    for (slot, _), prompt in zip(admitted, prompt_of):
        decoder.clear(slot, numbers[prompt])
    return logits[torch.tensor(prompt_of, device=logits.device)]


# -- the next token ----------------------------------------------------------------------------------------------------


def choose(logits: Tensor, numbers: Tensor | None, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Next tokens (R,) int64 and their log-probabilities (R,) float64 from `logits` (R, V).

    `numbers` (R,) float64 in [0, 1), one per row; unused at temperature 0. The cumulative distribution is in id order;
    tokens tied with the last one kept by top-k or top-p are also kept, so their order does not matter. On a device
    without float64 (Apple's GPU), the logits are copied to the CPU; the log-probabilities stay there.
    """
    if logits.device.type == "mps":
        tokens, logprobs = choose(logits.cpu(), numbers, sampling)
        return tokens.to(logits.device), logprobs
    assert numbers is not None or sampling.temperature == 0, "sampling needs one uniform number per row"
    if primitives.chooses(logits):
        temperature = sampling.temperature and max(sampling.temperature, torch.finfo(torch.float32).tiny)
        return primitives.choose(logits, numbers, temperature, sampling.top_p, sampling.top_k)
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        wide = logits.double()
        return tokens, wide.gather(1, tokens[:, None]).squeeze(1) - wide.logsumexp(-1)
    assert numbers is not None
    wide = logits if logits.dtype == torch.float64 else logits.float()
    largest = wide.amax(-1, keepdim=True)
    temperature = max(sampling.temperature, torch.finfo(wide.dtype).tiny)  # lower values would give 0 / 0
    weights = (wide - largest).div_(temperature).exp_()  # the difference is exact near the largest, where it matters
    tokens = _invert(_truncate(weights, sampling), numbers.to(logits.device))
    total = _blocks(weights).sum(-1).double().sum(-1)
    chosen = wide.gather(1, tokens[:, None]).double() - largest.double()
    return tokens, chosen.squeeze(1) / temperature - total.log()


def _blocks(weights: Tensor) -> Tensor:
    """(R, V) -> (R, V / BLOCK, BLOCK), zeros after the last token."""
    missing = -weights.shape[1] % BLOCK
    return (functional.pad(weights, (0, missing)) if missing else weights).unflatten(1, (-1, BLOCK))


def _invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """The token (R,) at the fraction `numbers` (R,) of each row's sum: first its block, then its index in the block."""
    blocks = _blocks(weights)
    sums = blocks.sum(-1).double().cumsum(-1)  # (R, V / BLOCK)
    target = numbers.double()[:, None] * sums[:, -1:]
    block = _first_above(sums, target)  # (R, 1)
    before = functional.pad(sums, (1, 0)).gather(1, block)
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK)).squeeze(1).double().cumsum(-1)
    return (block * BLOCK + _first_above(inside, target - before)).squeeze(1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """The first index (R, 1) whose sum exceeds `target`; if rounding leaves none, the last one with nonzero weight."""
    index = torch.searchsorted(cumulative, target, right=True)
    return torch.minimum(index, torch.searchsorted(cumulative, cumulative[:, -1:].contiguous()))


def _truncate(weights: Tensor, sampling: Sampling) -> Tensor:
    """Set weights (R, V), unnormalized probabilities, to 0 outside top-k, then outside top-p of the rest."""
    if 0 < sampling.top_k < weights.shape[1]:
        floor = weights.topk(sampling.top_k, dim=-1).values[:, -1:]
        weights = weights.where(weights >= floor, 0.0)
    if sampling.top_p == 1:
        return weights
    target = sampling.top_p * weights.sum(-1, keepdim=True)
    best = weights.topk(min(NUCLEUS_PROBE, weights.shape[1]), dim=-1).values  # descending
    floors = _nucleus_floor(best, target)
    wide = (best.sum(-1) < target.squeeze(1)).nonzero().squeeze(1)
    if len(wide):  # rare with a trained model, common at high temperature
        floors[wide] = _wide_nucleus_floor(weights[wide], target[wide])
    return (weights >= floors).to(weights.dtype).mul_(weights)  # `where` is three times slower on a CPU: it branches


def _wide_nucleus_floor(weights: Tensor, target: Tensor) -> Tensor:
    """`_nucleus_floor` for unsorted rows (R, V). A full sort is ten times slower on a CPU."""
    if weights.device.type != "cpu":
        return _nucleus_floor(weights.sort(dim=-1, descending=True).values, target)
    parts = zip(weights.split(WIDE_ROWS), target.split(WIDE_ROWS), strict=True)
    return torch.cat([_bucket_nucleus_floor(*part) for part in parts])


def _bucket_nucleus_floor(weights: Tensor, target: Tensor) -> Tensor:
    """Sum the weights by buckets, descending; only the bucket where the sum reaches `target` is sorted.

    Non-negative floats sort in the order of their bits, so the exponent and four mantissa bits determine the bucket.
    """
    count = len(weights)
    rising = (weights.float().view(torch.int32) >> 19) - (127 * 16 - BUCKETS)
    bucket = BUCKETS - rising.clamp_(0, BUCKETS)  # (R, V), 0 has the most likely tokens
    first = torch.arange(count, dtype=torch.int32)[:, None] * (BUCKETS + 1)
    flat = (bucket + first).view(-1)
    sums = torch.bincount(flat, weights.reshape(-1).double(), minlength=count * (BUCKETS + 1)).view(count, -1)
    cumulative = sums.cumsum(-1)
    border = (cumulative.to(weights.dtype) < target).sum(-1, keepdim=True).clamp_max(BUCKETS)  # (R, 1)
    before = (cumulative - sums).gather(1, border)
    row, column = (bucket == border).nonzero(as_tuple=True)
    sizes = torch.bincount(row, minlength=count)
    index = torch.arange(len(row)) - (sizes.cumsum(0) - sizes)[row]
    border_weights = weights.new_zeros(count, max(1, int(sizes.max())))
    border_weights[row, index] = weights[row, column]
    border_weights = border_weights.sort(dim=-1, descending=True).values
    end = ((before + border_weights.double().cumsum(-1)).to(weights.dtype) < target).sum(-1, keepdim=True)
    return border_weights.gather(1, end.minimum(sizes[:, None] - 1).clamp_min(0))


def _nucleus_floor(falling: Tensor, target: Tensor) -> Tensor:
    """The weight (R, 1) of the first token at which the sum of `falling` (R, n) reaches `target` (R, 1)."""
    end = (falling.cumsum(-1) < target).sum(-1, keepdim=True).clamp_max(falling.shape[1] - 1)
    return falling.gather(1, end)


# -- uniform numbers ---------------------------------------------------------------------------------------------------


def philox(counter: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint64]:
    """Ten rounds on four 32-bit words: `counter` (4, n) -> (4, n); `key` is two 32-bit words."""
    a, b, c, d = (word.astype(np.uint64) for word in counter)
    first, second = key
    for _ in range(10):
        left, right = a * np.uint64(_MULTIPLIERS[0]), c * np.uint64(_MULTIPLIERS[1])
        a, b, c, d = (
            (right >> _HALF) ^ b ^ np.uint64(first),
            right & _LOW,
            (left >> _HALF) ^ d ^ np.uint64(second),
            left & _LOW,
        )
        first, second = (first + _KEY_STEPS[0]) & 0xFFFFFFFF, (second + _KEY_STEPS[1]) & 0xFFFFFFFF
    return np.stack([a, b, c, d])


def uniforms(seed: int, start: int, count: int) -> NDArray[np.float64]:
    """The uniform numbers of a sample's tokens `start` to `start + count - 1`: (count,) in [0, 1), 53 bits each."""
    index = np.arange(start, start + count, dtype=np.uint64)
    zero = np.zeros_like(index)
    words = philox(np.stack([index & _LOW, index >> _HALF, zero, zero]), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    return ((words[0] << np.uint64(21)) ^ (words[1] >> np.uint64(11))).astype(np.float64) * 2.0**-53
