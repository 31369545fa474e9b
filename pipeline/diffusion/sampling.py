"""Sampling from a masked-diffusion model: a canvas of masks behind a prompt, from which tokens are uncovered step by
step.

    forward -> a token for each masked place -> the surest ones are committed -> forward ...       (specs: diffusion, 7)

`order` says which are surest, `schedule` how many a step commits, `threshold` commits all that are sure enough instead
(Fast-dLLM, arXiv:2505.22618), `block` goes through the canvas in blocks from the left, `remask: p2` lets committed
tokens go again (Peng et al. 2025, arXiv:2502.03540), `cache` keeps keys and values between the steps of a block
(approximate: see canvas_cache.py).

A token is chosen by the inverse of the cumulative distribution (sampling.choose), which has Gumbel's law without its
float64. A row draws from its own Philox stream, keyed by its seed: a completion hangs neither on its batch nor on the
order of the rows. At temperature 0 nothing is drawn, except by order `random`.

Keys and values of whole canvases, kept between the steps of a block (Wu et al. 2025, Fast-dLLM, arXiv:2505.22618).

    CanvasCache.refresh(...)   a pass over all places, whose keys and values are kept
    CanvasCache.window(...)    a pass over some places of each row; the others are as they were

Tokens of a masked-diffusion model see both sides, so what is kept is exact only until a token changes: at a block's
first step, where nothing lies outside the window, and in a block-diffusion model, whose earlier tokens never see later
ones.

In which order a canvas was uncovered: how far from left to right (DiffuCoder, arXiv:2506.20639, section 3.1).

How a masked-diffusion model writes: for a few held-out prompts, which tokens each step uncovered, and how sure it was
of them.

    models/<stage>/trace.json     settings, and for each prompt its canvas and its steps: [place, id, text, probability]
                                  each

At temperature 0, so a trace is a function of the weights. The report shows it, and the web page plays it.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pipeline.batches.batch import PADDING
from pipeline.diffusion import masks
from pipeline.diffusion.model import Denoiser, Noised, Traits, allowed_logits
from pipeline.generation.sampling import Sampling, choose
from pipeline.model.transformer import Transformer
from pipeline.text.tokenizer import Tokenizer


class CanvasCache:
    """Of `rows` canvases of `length` places."""

    def __init__(self, trunk: Transformer, rows: int, length: int, seen: Tensor) -> None:
        """`seen` (rows, 1, 1 or length, length) is True where a place may be seen."""
        config, table = trunk.config, trunk.model.embed_tokens.weight
        shape = (rows, config.kv_heads, length, config.head_dim)
        self.trunk, self.seen = trunk, seen
        self.keys = [torch.zeros(shape, dtype=table.dtype, device=table.device) for _ in range(config.layers)]
        self.values = [torch.zeros_like(keys) for keys in self.keys]

    def refresh(self, rows: Sequence[int], ids: Tensor, positions: Tensor) -> Tensor:
        """States (R, T, D) of all places of some rows: `ids` and `positions` (R, T)."""
        places = torch.arange(ids.shape[1], device=ids.device).expand(len(rows), -1)
        return self.window(rows, ids, positions, places)

    def window(self, rows: Sequence[int], ids: Tensor, positions: Tensor, places: Tensor) -> Tensor:
        """States (R, W, D) of the `places` (R, W) of some rows, which hold `ids` (R, W)."""
        layout = _Window(self, torch.tensor(rows, device=ids.device), places)
        return self.trunk.line(ids.flatten(), positions.flatten(), layout).view(*ids.shape, -1)


class _Window:
    """A layout of the model: the new places of some rows, among all of their keys."""

    def __init__(self, cache: CanvasCache, rows: Tensor, places: Tensor) -> None:
        self.cache, self.rows, self.places = cache, rows, places
        seen = cache.seen[rows]  # (R, 1, 1 or T, T)
        if seen.shape[2] > 1:
            seen = seen.gather(2, places[:, None, :, None].expand(-1, 1, -1, seen.shape[3]))
        self.mask = seen

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        shape = (*self.places.shape, -1)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        row = self.rows[:, None].expand_as(self.places)
        keys[row, :, self.places] = k.view(*shape, k.shape[-1]).to(keys.dtype)
        values[row, :, self.places] = v.view(*shape, v.shape[-1]).to(values.dtype)
        queries = q.view(*shape, q.shape[-1]).transpose(1, 2)  # (R, H, W, h)
        own, told = keys[self.rows].to(q.dtype), values[self.rows].to(q.dtype)
        group = queries.shape[1] // own.shape[1]
        if group > 1:
            own, told = own.repeat_interleave(group, 1), told.repeat_interleave(group, 1)
        out = scaled_dot_product_attention(queries, own, told, attn_mask=self.mask)
        return out.transpose(1, 2).reshape(q.shape)


# -- denoising ---------------------------------------------------------------------------------------------------------


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
        options = {
            "order": ORDERS,
            "schedule": ("balanced", "dream"),
            "confidence": ("raw", "tempered"),
            "remask": ("none", "p2"),
            "cache": CACHES,
        }
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

    Raises ValueError for an empty prompt, one that leaves no room for the canvas, unequal numbers of seeds, or other
    blocks than the model was trained on.
    """
    _check(model, prompts, settings, seeds)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))  # alike in length, little padding
    found: list[Generation | None] = [None] * len(prompts)
    was_training = model.training
    model.train(False)
    try:
        for first in range(0, len(order), batch_rows):
            chosen = order[first : first + batch_rows]
            rows = [
                _row(index, list(prompts[index]), seeds[index], settings.length, model.traits.mask) for index in chosen
            ]
            for _ in _Batch(model, rows, settings).uncover():
                pass
            for row in rows:
                found[row.index] = _generation(row, model.traits)
    finally:
        model.train(was_training)
    return [one for one in found if one is not None]


def _check(model: Denoiser, prompts: Sequence[Sequence[int]], settings: Denoising, seeds: Sequence[int]) -> None:
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
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; expected 1 to {context - settings.length}: the context "
                f"of {context} less the canvas"
            )


@dataclass(frozen=True)
class Progress:
    """A canvas after a step."""

    step: int  # from 1
    steps: int  # at most
    tokens: tuple[int | None, ...]  # None: masked
    sure: tuple[float, ...]  # probability of each token when it was committed; 0 of a mask


def stepwise(model: Denoiser, prompt: Sequence[int], settings: Denoising, seed: int) -> Iterator[Progress]:
    """One canvas behind a prompt, a step at a time; at the end it is `denoise`'s. Raises as `denoise`; `model` is
    not training.
    """
    _check(model, [prompt], settings, [seed])
    row = _row(0, list(prompt), seed, settings.length, model.traits.mask)
    sure = [0.0] * settings.length
    for number, _ in enumerate(_Batch(model, [row], settings).uncover(), 1):
        sure = [0.0 if masked else old for masked, old in zip(row.masked, sure, strict=True)]
        for place, _, likely in row.steps[-1].committed:
            sure[place] = likely
        tokens = tuple(None if masked else int(token) for masked, token in zip(row.masked, row.tokens, strict=True))
        yield Progress(number, settings.steps, tokens, tuple(sure))


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

    @torch.no_grad()
    def uncover(self) -> Iterator[None]:
        """Until no mask is left, or all rows have ended; a step at a time."""
        settings = self.settings
        shares = masks.balanced(settings.steps, settings.blocks) if settings.threshold is None else itertools.repeat(0)
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
                logits = self._forward(rows, asked, begin, end, fresh)
                fresh = False
                self._step(rows, asked, logits, count)
                for row in rows:
                    row.forwards += 1
                    row.done = settings.early_stop and _ended(row, self.model.traits)
                yield

    def _counts(self, steps: int) -> Iterator[int]:
        """How many tokens stand uncovered or are to be uncovered at each step; -1: all that are sure enough."""
        settings = self.settings
        if settings.threshold is not None:
            return itertools.repeat(-1)
        if settings.remask == "p2":
            return iter([settings.size * (step + 1) // steps for step in range(steps)])
        return iter(masks.schedule(settings.schedule, settings.size, steps))

    def _asked(self, rows: list[_Row], begin: int, end: int) -> list[np.ndarray]:
        """The places of each canvas whose tokens are looked at: the masked ones of the block, with p2 all of it."""
        whole = self.settings.remask == "p2"
        return [begin + (np.arange(end - begin) if whole else np.flatnonzero(row.masked[begin:end])) for row in rows]

    # -- the model -----------------------------------------------------------------------------------------------------

    def _forward(self, rows: list[_Row], asked: list[np.ndarray], begin: int, end: int, fresh: bool) -> Tensor:
        """Logits (N, V) of the asked places of each row, one row after another."""
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
            return self.model.logits(noised)
        return self._cached(self.cache, rows, tokens, where, begin, end, fresh)

    def _numbers(self, rows: list[_Row]) -> list[int]:
        return [number for number, row in enumerate(self.rows) if any(row is one for one in rows)]

    def _cached(
        self, cache: CanvasCache, rows: list[_Row], tokens: Tensor, where: Tensor, begin: int, end: int, fresh: bool
    ) -> Tensor:
        """Logits from the block's window, or at its begin from all places; a shifted model needs the place before
        it.
        """
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

    def _step(self, rows: list[_Row], places: list[np.ndarray], logits: Tensor, count: int) -> None:
        """Choose a token for each asked place (N of all rows; `logits` (N, V)), and commit each row's surest."""
        settings = self.settings
        numbers = [(row.noise.random_raw(2 * len(row.tokens)) >> np.uint64(11)) * masks.WORDS for row in rows]
        chance = np.concatenate([own[: len(row.tokens)][part] for own, row, part in zip(numbers, rows, places)])
        lots = np.concatenate([own[len(row.tokens) :][part] for own, row, part in zip(numbers, rows, places)])
        if settings.temperature == 0:
            chosen = logits.argmax(-1).cpu().numpy()
        else:
            sampling = Sampling(1, temperature=settings.temperature, top_p=settings.top_p)
            chosen = choose(logits, torch.from_numpy(chance), sampling)[0].cpu().numpy()
        masked = np.concatenate([row.masked[part] for row, part in zip(rows, places)])
        held = np.concatenate([row.tokens[part] for row, part in zip(rows, places)])
        tokens = np.where(masked, chosen, held)  # p2 looks at committed ones too
        sure, score = self._confidence(logits, torch.from_numpy(tokens).to(logits.device), lots)
        cuts = np.cumsum([len(part) for part in places])[:-1]
        each = zip(rows, places, np.split(tokens, cuts), np.split(sure, cuts), np.split(score, cuts), strict=True)
        for row, part, said, likely, order in each:
            best = np.argsort(-order, kind="stable")
            if settings.threshold is not None:
                taken = np.union1d(best[:1], np.flatnonzero(likely >= settings.threshold))
            else:
                taken = np.sort(best[:count])
            self._commit(row, part, said, likely, taken)

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

    def _confidence(self, logits: Tensor, tokens: Tensor, lots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The probabilities (N,) of the tokens, and how early each place is uncovered (N,)."""
        settings, wide = self.settings, logits if logits.dtype == torch.float64 else logits.float()
        if settings.confidence == "tempered" and settings.temperature:
            wide = self._tempered(wide)
        total = wide.logsumexp(-1, keepdim=True)
        sure = (wide.gather(1, tokens[:, None]) - total).exp().squeeze(1).cpu().double().numpy()
        if settings.order == "low_confidence":
            return sure, sure
        if settings.order == "random":
            return sure, lots
        if settings.order == "margin":
            two = (wide.topk(2, -1).values - total).exp()
            return sure, (two[:, 0] - two[:, 1]).cpu().double().numpy()
        return sure, torch.special.entr((wide - total).exp()).sum(-1).neg().cpu().double().numpy()

    def _tempered(self, wide: Tensor) -> Tensor:
        """Logits (N, V) after temperature and top_p."""
        wide = (wide - wide.amax(-1, keepdim=True)) / max(self.settings.temperature, torch.finfo(wide.dtype).tiny)
        falling, places = wide.softmax(-1).sort(-1, descending=True)
        outside = falling.cumsum(-1) - falling >= self.settings.top_p
        return wide.masked_fill(torch.zeros_like(outside).scatter(1, places, outside), float("-inf"))


def _ended(row: _Row, traits: Traits) -> bool:
    """Whether everything up to the first end of an answer is uncovered."""
    ends = np.flatnonzero(~row.masked & np.isin(row.tokens, (traits.fill, *traits.ends)))
    return len(ends) > 0 and not row.masked[: ends[0]].any()


# -- arness ------------------------------------------------------------------------------------------------------------


def order_of(steps: Sequence[Step]) -> list[int]:
    """The places of a canvas in the order in which they were uncovered for good, those of one step from the left."""
    when: dict[int, int] = {}
    for number, step in enumerate(steps):
        when |= {place: number for place, *_ in step.committed}
    return sorted(when, key=lambda place: (when[place], place))


def local_ar(order: Sequence[int], k: int) -> float:
    """AR-ness local@k: the share of tokens p before which p - 1, ..., p - k were uncovered, each one step before the
    last.

    Places before the completion count as uncovered in time (DiffuCoder, arXiv:2506.20639, section 3.1). `order` is a
    permutation.
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


# -- traces ------------------------------------------------------------------------------------------------------------


PROMPTS = 8
CANVAS = 64  # tokens, where nothing else is said


@dataclass(frozen=True)
class Asked:
    """A prompt as a person reads it, and as ids."""

    id: str
    text: str
    ids: list[int]


def write(
    paths: Sequence[Path],
    model: Denoiser,
    tokenizer: Tokenizer,
    asked: Sequence[Asked],
    *,
    length: int = CANVAS,
    block: int | None = None,
) -> None:
    """Uncover a canvas behind each of the first prompts that leave room for it, a token a step, and write what
    happened.
    """
    settings = Denoising(length=length, steps=length, block=block)
    fitting = [one for one in asked if len(one.ids) <= model.config.max_context - length][:PROMPTS]
    found = denoise(model, [one.ids for one in fitting], settings, [0] * len(fitting))
    told = {
        "settings": asdict(settings),
        "prompts": [row(one, done, tokenizer) for one, done in zip(fitting, found, strict=True)],
    }
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(told, ensure_ascii=False) + "\n", encoding="utf-8")


def row(asked: Asked, done: Generation, tokenizer: Tokenizer) -> dict[str, Any]:
    """One prompt's part of a trace."""

    def text(id_: int) -> str:
        return tokenizer.decode([id_], skip_special=False)

    steps = [
        {
            "committed": [[place, id_, text(id_), round(sure, 4)] for place, id_, sure in step.committed],
            "remasked": step.remasked,
        }
        for step in done.steps
    ]
    return {
        "id": asked.id,
        "prompt": asked.text,
        "answer": tokenizer.decode(done.ids),
        "forwards": done.forwards,
        "canvas": [text(id_) for id_ in done.canvas],
        "length": len(done.ids),
        "steps": steps,
    }
