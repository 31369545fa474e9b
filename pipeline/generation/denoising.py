"""Sampling from a masked-diffusion model: a canvas of masks behind a prompt, from which tokens are uncovered step by step.

    forward -> a token for each masked place -> the surest ones are committed -> forward ...        (specs: diffusion, 7)

`order` says which are surest, `schedule` how many a step commits, `threshold` commits all that are sure enough instead (Fast-dLLM,
arXiv:2505.22618), `block` goes through the canvas in blocks from the left, `remask: p2` lets committed tokens go again (Peng et al.
2025, arXiv:2502.03540), `cache` keeps keys and values between the steps of a block (approximate: see canvas_cache.py).

A token is chosen by the inverse of the cumulative distribution (sampling.choose), which has Gumbel's law without its float64. A row
draws from its own Philox stream, keyed by its seed: a completion hangs neither on its batch nor on the order of the rows. At
temperature 0 nothing is drawn, except by order `random`.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pipeline.generation.canvas_cache import CanvasCache
from pipeline.generation.sampling import Sampling, choose
from pipeline.model.denoiser import Denoiser, Noised, Traits, allowed_logits
from pipeline.streams import masking
from pipeline.streams.batch import PADDING

ORDERS = ("low_confidence", "margin", "entropy", "random")
CACHES = ("none", "prefix", "dual")


@dataclass(frozen=True, kw_only=True)
class Denoising:
    """How a canvas is uncovered. Raises ValueError for what cannot be."""

    length: int  # tokens of the canvas
    steps: int  # forward passes, where nothing ends earlier; at most `length`
    temperature: float = 0.0  # 0 takes the most likely token
    top_p: float = 1.0
    order: str = (
        "low_confidence"  # which are uncovered first: low_confidence (the surest token), margin, entropy, random
    )
    schedule: str = "balanced"  # how many a step: balanced, or dream
    confidence: str = "raw"  # probabilities as the model gives them, or tempered: after temperature and top_p
    threshold: float | None = None  # commit all tokens of at least this probability, and the surest one
    block: int | None = None  # tokens that are uncovered together, block by block from the left; none: the whole canvas
    remask: str = "none"  # p2: committed tokens that have become unlikely are masked again
    early_stop: bool = False  # end where everything up to the first end of turn is uncovered
    cache: str = "none"  # prefix, dual: keep keys and values between the steps of a block

    def __post_init__(self) -> None:
        if self.length < 1 or not 1 <= self.steps <= self.length:
            raise ValueError(f"steps: expected 1 to the canvas of {self.length} tokens, got {self.steps}")
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"expected temperature >= 0 and 0 < top_p <= 1, got {self.temperature} and {self.top_p}")
        options = {"order": ORDERS, "schedule": ("balanced", "dream"), "confidence": ("raw", "tempered"),
                   "remask": ("none", "p2"), "cache": CACHES}  # fmt: skip
        for name, known in options.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.block is not None and (self.block < 1 or self.length % self.block):
            raise ValueError(f"block: expected a divisor of the canvas of {self.length} tokens, got {self.block}")
        if self.steps < self.blocks and self.threshold is None:
            raise ValueError(f"steps: expected at least one for each of the {self.blocks} blocks, got {self.steps}")
        if self.threshold is not None and self.threshold < 0:
            raise ValueError(f"threshold: expected at least 0, got {self.threshold}")
        if self.remask == "p2" and (self.threshold is not None or self.cache != "none"):
            raise ValueError(
                "remask: p2 masks committed tokens again, which threshold and cache exclude; set them to none"
            )

    @property
    def size(self) -> int:
        """Tokens of a block."""
        return self.length if self.block is None else self.block

    @property
    def blocks(self) -> int:
        """Blocks of the canvas."""
        return self.length // self.size


@dataclass(frozen=True)
class Step:
    """What one step did to a canvas; places are counted from its begin."""

    committed: list[tuple[int, int, float]]  # place, id, probability
    remasked: list[int]


@dataclass(frozen=True)
class Generation:
    """One canvas, uncovered."""

    ids: list[int]  # up to the first end of turn, which is left out
    canvas: list[int]  # all of it; behind an early end the fill
    stop: Literal["stop", "length"]  # whether there is an end of turn
    forwards: int
    steps: list[Step]
    logprobs: list[float] = field(default_factory=list)  # none: a token's probability hangs on the order


@dataclass
class _Row:
    """A canvas in the making."""

    index: int
    prompt: list[int]
    noise: np.random.Philox
    tokens: np.ndarray  # (L,) int64
    masked: np.ndarray  # (L,) bool
    steps: list[Step] = field(default_factory=list)
    forwards: int = 0
    done: bool = False


def denoise(
    model: Denoiser,
    prompts: Sequence[Sequence[int]],
    settings: Denoising,
    seeds: Sequence[int],
    *,
    batch_rows: int = 64,
) -> list[Generation]:
    """A completion of each prompt, in their order.

    Raises ValueError for an empty prompt, one that leaves no room for the canvas, unequal numbers of seeds, or other blocks than
    the model was trained on.
    """
    if not isinstance(model, Denoiser):
        raise ValueError(
            "a causal model is decoded from the left (generation/sampling.py); expected a masked-diffusion one"
        )
    if len(seeds) != len(prompts):
        raise ValueError(f"expected a seed for each of the {len(prompts)} prompts, found {len(seeds)}")
    if model.traits.block_size not in (0, settings.block):
        raise ValueError(f"block: the model was trained on blocks of {model.traits.block_size}, got {settings.block}")
    context = model.config.max_context
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= context - settings.length:
            raise ValueError(f"prompt {index} has {len(prompt)} tokens; expected 1 to {context - settings.length}: the context "
                             f"of {context} less the canvas")  # fmt: skip
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))  # alike in length, little padding
    found: list[Generation | None] = [None] * len(prompts)
    was_training = model.training
    model.train(False)
    try:
        with torch.no_grad():
            for first in range(0, len(order), batch_rows):
                chosen = order[first : first + batch_rows]
                rows = [
                    _row(index, list(prompts[index]), seeds[index], settings.length, model.traits.mask)
                    for index in chosen
                ]
                _Batch(model, rows, settings).uncover()
                for row in rows:
                    found[row.index] = _generation(row, model.traits)
    finally:
        model.train(was_training)
    return [one for one in found if one is not None]


def _row(index: int, prompt: list[int], seed: int, length: int, mask: int) -> _Row:
    return _Row(
        index, prompt, np.random.Philox(key=seed), np.full(length, mask, dtype=np.int64), np.ones(length, dtype=bool)
    )


def _generation(row: _Row, traits: Traits) -> Generation:
    canvas = np.where(row.masked, traits.fill, row.tokens)
    ends = np.flatnonzero(np.isin(canvas, (traits.fill, *traits.ends)))
    end = int(ends[0]) if len(ends) else len(canvas)
    return Generation(
        canvas[:end].tolist(), canvas.tolist(), "stop" if len(ends) else "length", row.forwards, row.steps
    )


class _Batch:
    """Some canvases that are uncovered together, in step by blocks."""

    def __init__(self, model: Denoiser, rows: list[_Row], settings: Denoising) -> None:
        self.model, self.rows, self.settings = model, rows, settings
        self.device = next(model.parameters()).device
        self.length = max(len(row.prompt) for row in rows) + settings.length
        self.sight = self._sight() if model.traits.block_size else None  # (R, 1, T, T)
        self.cache: CanvasCache | None = None
        if settings.cache != "none":
            inside = torch.stack([torch.arange(self.length) < len(row.prompt) + settings.length for row in rows])
            seen = inside[:, None, None].to(self.device)
            seen = seen if self.sight is None else seen & self.sight
            self.cache = CanvasCache(model.trunk, len(rows), self.length, seen)

    def _sight(self) -> Tensor:
        """Of a block-diffusion model: the prompt is a block, and none sees a later one."""
        size, blocks = self.settings.size, []
        for row in self.rows:
            canvas = 1 + np.arange(self.length - len(row.prompt)) // size
            blocks.append(np.concatenate([np.zeros(len(row.prompt), dtype=np.int64), canvas]))
        table = torch.from_numpy(np.stack(blocks)).to(self.device)
        return (table[:, :, None] >= table[:, None, :])[:, None]

    def uncover(self) -> None:
        """Until no mask is left, or all rows have ended."""
        settings = self.settings
        shares = (
            masking.balanced(settings.steps, settings.blocks) if settings.threshold is None else itertools.repeat(0)
        )
        for block, steps in zip(range(settings.blocks), shares):
            begin, end = block * settings.size, (block + 1) * settings.size
            fresh = True  # the cache is filled anew at the begin of a block
            for count in self._counts(int(steps)):
                rows = [row for row in self.rows if not row.done and row.masked[begin:end].any()]
                if not rows:
                    break
                if count == 0:
                    continue  # nothing would change: the next forward pass gives the same
                asked = self._asked(rows, begin, end)
                places, logits = self._forward(rows, asked, begin, end, fresh)
                fresh = False
                for row, own, part in zip(rows, places, logits, strict=True):
                    row.forwards += 1
                    self._step(row, own, part, count, end - begin)
                    row.done = settings.early_stop and _ended(row, self.model.traits)

    def _counts(self, steps: int) -> Iterator[int]:
        """How many tokens stand uncovered or are to be uncovered at each step; -1: all that are sure enough."""
        settings = self.settings
        if settings.threshold is not None:
            return itertools.repeat(-1)
        if settings.remask == "p2":
            return iter([settings.size * (step + 1) // steps for step in range(steps)])
        return iter(masking.schedule(settings.schedule, settings.size, steps))

    def _asked(self, rows: list[_Row], begin: int, end: int) -> list[np.ndarray]:
        """The places of each canvas whose tokens are looked at: the masked ones of the block, with p2 all of it."""
        whole = self.settings.remask == "p2"
        return [begin + (np.arange(end - begin) if whole else np.flatnonzero(row.masked[begin:end])) for row in rows]

    # -- the model -----------------------------------------------------------------------------------------------------

    def _forward(
        self, rows: list[_Row], asked: list[np.ndarray], begin: int, end: int, fresh: bool
    ) -> tuple[list[np.ndarray], list[Tensor]]:
        """The asked places of each row, and their logits (n, V)."""
        ids = np.full((len(rows), self.length), self.model.traits.fill, dtype=np.int64)
        documents = np.full(ids.shape, PADDING, dtype=np.int32)
        wanted = np.zeros(ids.shape, dtype=bool)
        for n, (row, places) in enumerate(zip(rows, asked, strict=True)):
            stop = len(row.prompt) + self.settings.length
            ids[n, :stop] = row.prompt + row.tokens.tolist()
            documents[n, :stop] = 0
            wanted[n, len(row.prompt) + places] = True
        tokens, where = torch.from_numpy(ids).to(self.device), torch.from_numpy(wanted).to(self.device)
        if self.cache is None:
            positions = torch.arange(self.length, device=self.device).expand_as(tokens)
            numbers = self._numbers(rows)
            sight = None if self.sight is None else self.sight[numbers]
            none = torch.zeros_like(where)  # the mask's id stands in the tokens
            noised = Noised(
                tokens, none, torch.from_numpy(documents).to(self.device), positions, sight=sight, asked=where
            )
            logits = self.model.logits(noised)
        else:
            logits = self._cached(self.cache, rows, tokens, where, begin, end, fresh)
        return asked, list(logits.split([len(places) for places in asked]))

    def _numbers(self, rows: list[_Row]) -> list[int]:
        return [number for number, row in enumerate(self.rows) if any(row is one for one in rows)]

    def _cached(
        self, cache: CanvasCache, rows: list[_Row], tokens: Tensor, where: Tensor, begin: int, end: int, fresh: bool
    ) -> Tensor:
        """Logits from the block's window, or at its begin from all places; a shifted model needs the place before it."""
        numbers = self._numbers(rows)
        starts = torch.tensor([len(row.prompt) + begin - 1 for row in rows], device=self.device)
        if fresh:
            places = torch.arange(self.length, device=self.device).expand(len(rows), -1)
        else:
            stop = end if self.settings.cache == "dual" else self.settings.length
            places = starts[:, None] + torch.arange(stop - begin + 1, device=self.device)
        states = cache.window(numbers, tokens.gather(1, places), places, places)
        shift = 1 if self.model.traits.shift else 0
        row, column = where.nonzero(as_tuple=True)
        first = 0 if fresh else starts[row]
        hidden = states[row, column - shift - first]
        return allowed_logits(hidden, self.model.trunk.table, self.model.traits.banned)

    # -- one step ------------------------------------------------------------------------------------------------------

    def _step(self, row: _Row, places: np.ndarray, logits: Tensor, count: int, size: int) -> None:
        """Choose a token for each place, and commit the surest."""
        settings = self.settings
        numbers = (row.noise.random_raw(2 * len(row.tokens)) >> np.uint64(11)) * masking.WORDS
        chance, lots = numbers[: len(row.tokens)][places], numbers[len(row.tokens) :][places]
        sampling = Sampling(1, temperature=settings.temperature, top_p=settings.top_p)
        tokens = choose(logits, torch.from_numpy(chance), sampling)[0].cpu().numpy()
        tokens = np.where(row.masked[places], tokens, row.tokens[places])  # p2 looks at committed ones too
        probabilities = self._probabilities(logits)
        sure = (
            probabilities.gather(1, torch.from_numpy(tokens).to(probabilities.device)[:, None]).squeeze(1).cpu().numpy()
        )
        score = self._score(probabilities, sure, lots)
        best = np.argsort(-score, kind="stable")
        if settings.threshold is not None:
            chosen = np.union1d(best[:1], np.flatnonzero(sure >= settings.threshold))
        else:
            chosen = np.sort(best[:count])
        self._commit(row, places, tokens, sure, chosen)

    def _commit(self, row: _Row, places: np.ndarray, tokens: np.ndarray, sure: np.ndarray, chosen: np.ndarray) -> None:
        new = [n for n in chosen.tolist() if row.masked[places[n]]]
        kept = set(chosen.tolist())
        gone = [n for n in range(len(places)) if n not in kept and not row.masked[places[n]]]
        for n in new:
            row.tokens[places[n]], row.masked[places[n]] = tokens[n], False
        for n in gone:
            row.tokens[places[n]], row.masked[places[n]] = self.model.traits.mask, True
        told = [(int(places[n]), int(tokens[n]), float(sure[n])) for n in new]
        row.steps.append(Step(told, [int(places[n]) for n in gone]))

    def _probabilities(self, logits: Tensor) -> Tensor:
        """(n, V) float64: what confidence is read from."""
        settings, wide = self.settings, logits.double()
        if settings.confidence == "raw" or settings.temperature == 0:
            return wide.softmax(-1)
        found = (wide / settings.temperature).softmax(-1)
        falling, places = found.sort(-1, descending=True)
        outside = falling.cumsum(-1) - falling >= settings.top_p
        found = found.scatter(1, places, falling.masked_fill(outside, 0.0))
        return found / found.sum(-1, keepdim=True)

    def _score(self, probabilities: Tensor, sure: np.ndarray, lots: np.ndarray) -> np.ndarray:
        """How early each place is uncovered, (n,)."""
        order = self.settings.order
        if order == "low_confidence":
            return sure
        if order == "random":
            return lots
        if order == "margin":
            two = probabilities.topk(2, -1).values
            return (two[:, 0] - two[:, 1]).cpu().numpy()
        return torch.special.entr(probabilities).sum(-1).neg().cpu().numpy()


def _ended(row: _Row, traits: Traits) -> bool:
    """Whether everything up to the first end of an answer is uncovered."""
    ends = np.flatnonzero(~row.masked & np.isin(row.tokens, (traits.fill, *traits.ends)))
    return len(ends) > 0 and not row.masked[: ends[0]].any()


# -- in which order ------------------------------------------------------------------------------------------------------


def order_of(steps: Sequence[Step]) -> list[int]:
    """The places of a canvas in the order in which they were uncovered for good, those of one step from the left."""
    when: dict[int, int] = {}
    for number, step in enumerate(steps):
        when |= {place: number for place, *_ in step.committed}
    return sorted(when, key=lambda place: (when[place], place))


def local_ar(order: Sequence[int], k: int) -> float:
    """AR-ness local@k: the share of tokens p before which p - 1, ..., p - k were uncovered, each one step before the last.

    Places before the completion count as uncovered in time (DiffuCoder, arXiv:2506.20639, section 3.1). `order` is a permutation.
    """
    hits = 0
    for at, place in enumerate(order):
        hits += all(place < back or (at >= back and order[at - back] == place - back) for back in range(1, k + 1))
    return hits / len(order)


def global_ar(order: Sequence[int], k: int) -> float:
    """AR-ness global@k: the share of tokens that were among the k leftmost masks when they were uncovered."""
    left, hits = sorted(order), 0
    for place in order:
        hits += place in left[:k]
        left.remove(place)
    return hits / len(order)
