"""Sampling from a masked-diffusion model: a canvas of masks after a prompt, denoised step by step.

    forward -> a token for each masked position -> commit the most confident ones -> forward ...

`order` ranks the tokens by confidence, `schedule` sets how many each step commits, `threshold` instead commits all
tokens that are confident enough (Fast-dLLM, arXiv:2505.22618), `block` processes the canvas in blocks from the left,
`remask: p2` masks committed tokens again (Peng et al. 2025, arXiv:2502.03540), and `cache` reuses keys and values
between the steps of a block.

Tokens are drawn by inverse-CDF sampling (`generation.sampling.choose`), which has the same distribution as the Gumbel
trick but does not need float64. Each row draws from its own Philox stream, keyed by its seed, so a completion depends
neither on its batch nor on the row order. At temperature 0, nothing is drawn, except with order `random`.

**The cache** (Wu et al. 2025, Fast-dLLM, arXiv:2505.22618) stores keys and values of complete canvases. Tokens of a
masked-diffusion model attend to both sides, so the cache is exact only until a token changes. It is always exact in
three cases: at a block's first step, if nothing is outside the window, and in block diffusion, where earlier tokens
never attend to later ones.

**AR-ness** (`local_ar`, `global_ar`) measures how closely decoding followed left-to-right order (DiffuCoder,
arXiv:2506.20639, section 3.1).

**Traces** (`write`) show how a model generates: the tokens committed at each step for a few held-out prompts, and their
probabilities. They use temperature 0, so a trace is a function of the weights. The report and the web page show them.

    models/<stage>/trace.json     settings, and each prompt's canvas and steps, with [position, id, text,
                                  probability] for each committed token
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pipeline.batches.batch import PADDING
from pipeline.diffusion import masks
from pipeline.diffusion.model import Denoiser, Noised, Traits, allowed_logits
from pipeline.generation.sampling import Sampling, choose
from pipeline.model.transformer import Transformer
from pipeline.run.types import JsonObject
from pipeline.text.tokenizer import Tokenizer

ORDERS = ("low_confidence", "margin", "entropy", "random")
CACHES = ("none", "prefix", "dual")


@dataclass(frozen=True, kw_only=True)
class Denoising:
    """How a canvas is denoised. Raises ValueError for invalid settings."""

    length: int  # tokens of the canvas
    steps: int  # forward passes, unless all rows finish earlier; at most `length`
    temperature: float = 0.0  # 0 takes the most likely token
    top_p: float = 1.0
    order: str = (
        "low_confidence"  # what to commit first: low_confidence (the most likely token), margin, entropy, random
    )
    schedule: str = "balanced"  # tokens per step: balanced, or dream
    confidence: str = "raw"  # raw: the model's probabilities; tempered: those after temperature and top_p
    threshold: float | None = None  # commit all tokens with at least this probability, and always the most likely one
    block: int | None = None  # tokens denoised together, block by block from the left; None: the entire canvas
    remask: str = "none"  # p2: remask committed tokens that have become unlikely
    early_stop: bool = False  # stop when everything up to the first end of turn is committed
    cache: str = "none"  # prefix, dual: reuse keys and values between the steps of a block

    def __post_init__(self) -> None:
        if self.length < 1 or not 1 <= self.steps <= self.length:
            raise ValueError(f"steps: expected 1 to {self.length}, the length of the canvas, got {self.steps}")
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"expected temperature >= 0 and 0 < top_p <= 1, got {self.temperature} and {self.top_p}")
        options = {
            "order": ORDERS,
            "schedule": ("balanced", "dream"),
            "confidence": ("raw", "tempered"),
            "remask": ("none", "p2"),
            "cache": CACHES,
        }
        for name, values in options.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}: expected one of {', '.join(values)}, got {getattr(self, name)!r}")
        if self.block is not None and (self.block < 1 or self.length % self.block):
            raise ValueError(f"block: expected a divisor of {self.length}, the length of the canvas, got {self.block}")
        if self.steps < self.blocks and self.threshold is None:
            raise ValueError(f"steps: expected at least one for each of the {self.blocks} blocks, got {self.steps}")
        if self.threshold is not None and self.threshold < 0:
            raise ValueError(f"threshold: expected at least 0, got {self.threshold}")
        if self.remask == "p2" and (self.threshold is not None or self.cache != "none"):
            raise ValueError(
                "remask: `p2` remasks committed tokens, which is incompatible with `threshold` and `cache`; set both to"
                " `none`"
            )

    @property
    def size(self) -> int:
        """Tokens in a block."""
        return self.length if self.block is None else self.block

    @property
    def blocks(self) -> int:
        """Number of blocks in the canvas."""
        return self.length // self.size


@dataclass(frozen=True)
class CanvasStep:
    """The changes that one step makes to a canvas; positions count from the start of the canvas."""

    committed: list[tuple[int, int, float]]  # position, id, probability
    remasked: list[int]  # positions


@dataclass(frozen=True)
class Generation:
    """One denoised canvas."""

    ids: list[int]  # up to the first end of turn, exclusive
    canvas: list[int]  # the entire canvas, filled after an early end
    stop: Literal["stop", "length"]  # whether there is an end of turn
    forwards: int
    steps: list[CanvasStep]
    logprobs: list[float] = field(default_factory=list)  # empty: a token's probability depends on the order


@dataclass(frozen=True)
class CanvasState:
    """A canvas after a step."""

    step: int  # from 1
    steps: int  # maximum
    tokens: tuple[int | None, ...]  # None: masked
    sure: tuple[float, ...]  # probability of each token when it was committed; 0 for a mask


def denoise(
    model: Denoiser,
    prompts: Sequence[Sequence[int]],
    settings: Denoising,
    seeds: Sequence[int],
    *,
    batch_rows: int = 64,
) -> list[Generation]:
    """A completion for each prompt, in order.

    Raises ValueError for an empty prompt, one that leaves no room for the canvas, a number of seeds that differs from
    the number of prompts, or a block size the model was not trained with.
    """
    _check(model, prompts, settings, seeds)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))  # similar lengths need little padding
    results: list[Generation | None] = [None] * len(prompts)
    was_training = model.training
    model.train(False)
    try:
        for first in range(0, len(order), batch_rows):
            batch = order[first : first + batch_rows]
            rows = [
                _row(index, list(prompts[index]), seeds[index], settings.length, model.traits.mask) for index in batch
            ]
            for _ in _Batch(model, rows, settings).uncover():
                pass
            for row in rows:
                results[row.index] = _generation(row, model.traits)
    finally:
        model.train(was_training)
    return [result for result in results if result is not None]


def stepwise(model: Denoiser, prompt: Sequence[int], settings: Denoising, seed: int) -> Iterator[CanvasState]:
    """One canvas after a prompt, a step at a time, with the same result and errors as `denoise`. The model must be in
    evaluation mode.
    """
    _check(model, [prompt], settings, [seed])
    row = _row(0, list(prompt), seed, settings.length, model.traits.mask)
    sure = [0.0] * settings.length
    for number, _ in enumerate(_Batch(model, [row], settings).uncover(), 1):
        sure = [0.0 if masked else old for masked, old in zip(row.masked, sure, strict=True)]
        for position, _, probability in row.steps[-1].committed:
            sure[position] = probability
        tokens = tuple(None if masked else int(token) for masked, token in zip(row.masked, row.tokens, strict=True))
        yield CanvasState(number, settings.steps, tokens, tuple(sure))


def _check(model: Denoiser, prompts: Sequence[Sequence[int]], settings: Denoising, seeds: Sequence[int]) -> None:
    if not isinstance(model, Denoiser):
        raise ValueError("expected a masked-diffusion model, found a causal one; use generation/sampling.py")
    if len(seeds) != len(prompts):
        raise ValueError(f"expected a seed for each of the {len(prompts)} prompts, found {len(seeds)}")
    if model.traits.block_size not in (0, settings.block):
        raise ValueError(f"block: expected {model.traits.block_size}, as in training, got {settings.block}")
    context = model.config.max_context
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= context - settings.length:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; expected 1 to {context - settings.length}: the context "
                f"of {context} minus the canvas"
            )


# -- canvases in progress ----------------------------------------------------------------------------------------------


@dataclass
class _Canvas:
    """A canvas being denoised."""

    index: int  # of its prompt
    prompt: list[int]
    noise: np.random.Philox
    tokens: np.ndarray  # (L,) int64
    masked: np.ndarray  # (L,) bool
    steps: list[CanvasStep] = field(default_factory=list)
    forwards: int = 0
    done: bool = False


def _row(index: int, prompt: list[int], seed: int, length: int, mask: int) -> _Canvas:
    return _Canvas(
        index, prompt, np.random.Philox(key=seed), np.full(length, mask, dtype=np.int64), np.ones(length, dtype=bool)
    )


def _generation(row: _Canvas, traits: Traits) -> Generation:
    canvas = np.where(row.masked, traits.fill, row.tokens)
    ends = np.flatnonzero(np.isin(canvas, (traits.fill, *traits.ends)))
    end = int(ends[0]) if len(ends) else len(canvas)
    return Generation(
        canvas[:end].tolist(), canvas.tolist(), "stop" if len(ends) else "length", row.forwards, row.steps
    )


def _ended(row: _Canvas, traits: Traits) -> bool:
    """Whether everything up to the first end of an answer is committed."""
    ends = np.flatnonzero(~row.masked & np.isin(row.tokens, (traits.fill, *traits.ends)))
    return len(ends) > 0 and not row.masked[: ends[0]].any()


class CanvasCache:
    """Keys and values of `rows` canvases with their prompts, `length` positions each."""

    def __init__(self, trunk: Transformer, rows: int, length: int, mask: Tensor) -> None:
        """`mask` (rows, 1, 1 or length, length) is True where a query attends to a key."""
        config, table = trunk.config, trunk.model.embed_tokens.weight
        shape = (rows, config.kv_heads, length, config.head_dim)
        self.trunk, self.mask = trunk, mask
        self.keys = [torch.zeros(shape, dtype=table.dtype, device=table.device) for _ in range(config.layers)]
        self.values = [torch.zeros_like(keys) for keys in self.keys]

    def window(self, rows: Sequence[int], ids: Tensor, positions: Tensor) -> Tensor:
        """States (R, W, D) of `ids` (R, W) at `positions` (R, W) of some rows, whose keys and values are updated."""
        layout = _Window(self, torch.tensor(rows, device=ids.device), positions)
        return self.trunk.line(ids.flatten(), positions.flatten(), layout).view(*ids.shape, -1)


class _Window:
    """A layout of the model: updated positions of some rows attend to all positions of the same row."""

    def __init__(self, cache: CanvasCache, rows: Tensor, positions: Tensor) -> None:
        self.cache, self.rows, self.positions = cache, rows, positions
        mask = cache.mask[rows]  # (R, 1, 1 or T, T)
        if mask.shape[2] > 1:
            mask = mask.gather(2, positions[:, None, :, None].expand(-1, 1, -1, mask.shape[3]))
        self.mask = mask

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        shape = (*self.positions.shape, -1)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        row = self.rows[:, None].expand_as(self.positions)
        keys[row, :, self.positions] = k.view(*shape, k.shape[-1]).to(keys.dtype)
        values[row, :, self.positions] = v.view(*shape, v.shape[-1]).to(values.dtype)
        queries = q.view(*shape, q.shape[-1]).transpose(1, 2)  # (R, H, W, h)
        row_keys, row_values = keys[self.rows].to(q.dtype), values[self.rows].to(q.dtype)
        group = queries.shape[1] // row_keys.shape[1]
        if group > 1:
            row_keys, row_values = row_keys.repeat_interleave(group, 1), row_values.repeat_interleave(group, 1)
        out = scaled_dot_product_attention(queries, row_keys, row_values, attn_mask=self.mask)
        return out.transpose(1, 2).reshape(q.shape)


class _Batch:
    """Canvases denoised together, block by block."""

    def __init__(self, model: Denoiser, rows: list[_Canvas], settings: Denoising) -> None:
        self.model, self.rows, self.settings = model, rows, settings
        self.device = next(model.parameters()).device
        self.length = max(len(row.prompt) for row in rows) + settings.length
        self.sight = self._block_mask() if model.traits.block_size else None  # (R, 1, T, T)
        self.cache: CanvasCache | None = None
        if settings.cache != "none":
            inside = torch.stack([torch.arange(self.length) < len(row.prompt) + settings.length for row in rows])
            mask = inside[:, None, None].to(self.device)
            mask = mask if self.sight is None else mask & self.sight
            self.cache = CanvasCache(model.trunk, len(rows), self.length, mask)

    def _block_mask(self) -> Tensor:
        """For a block-diffusion model: the prompt is one block, and no block attends to a later one."""
        size, blocks = self.settings.size, []
        for row in self.rows:
            canvas = 1 + np.arange(self.length - len(row.prompt)) // size
            blocks.append(np.concatenate([np.zeros(len(row.prompt), dtype=np.int64), canvas]))
        table = torch.from_numpy(np.stack(blocks)).to(self.device)
        return (table[:, :, None] >= table[:, None, :])[:, None]

    @torch.no_grad()
    def uncover(self) -> Iterator[None]:
        """Denoise one step at a time until no mask is left or all rows have ended."""
        settings = self.settings
        shares = masks.balanced(settings.steps, settings.blocks) if settings.threshold is None else itertools.repeat(0)
        for block, steps in zip(range(settings.blocks), shares):
            begin, end = block * settings.size, (block + 1) * settings.size
            refresh = True  # the cache is refilled at the beginning of a block
            for count in self._counts(int(steps)):
                rows = [row for row in self.rows if not row.done and row.masked[begin:end].any()]
                if not rows:
                    break
                if count == 0:
                    continue  # nothing would change: the next forward pass gives the same result
                positions = self._candidates(rows, begin, end)
                logits = self._forward(rows, positions, begin, end, refresh)
                refresh = False
                self._step(rows, positions, logits, count)
                for row in rows:
                    row.forwards += 1
                    row.done = settings.early_stop and _ended(row, self.model.traits)
                yield

    def _counts(self, steps: int) -> Iterator[int]:
        """Tokens to commit at each step (with p2, in total after each step); -1: all that reach the threshold."""
        settings = self.settings
        if settings.threshold is not None:
            return itertools.repeat(-1)
        if settings.remask == "p2":
            return iter([settings.size * (step + 1) // steps for step in range(steps)])
        return iter(masks.schedule(settings.schedule, settings.size, steps))

    def _candidates(self, rows: list[_Canvas], begin: int, end: int) -> list[np.ndarray]:
        """The positions considered in a step, per canvas: the masked ones of the block; with p2, the entire block."""
        whole = self.settings.remask == "p2"
        return [begin + (np.arange(end - begin) if whole else np.flatnonzero(row.masked[begin:end])) for row in rows]

    def _forward(
        self, rows: list[_Canvas], candidates: list[np.ndarray], begin: int, end: int, refresh: bool
    ) -> Tensor:
        """Logits (N, V) of the candidate positions, row by row."""
        ids = np.full((len(rows), self.length), self.model.traits.fill, dtype=np.int64)
        documents = np.full(ids.shape, PADDING, dtype=np.int32)
        predicted = np.zeros(ids.shape, dtype=bool)
        for n, (row, positions) in enumerate(zip(rows, candidates, strict=True)):
            stop = len(row.prompt) + self.settings.length
            ids[n, :stop] = row.prompt + row.tokens.tolist()
            documents[n, :stop] = 0
            predicted[n, len(row.prompt) + positions] = True
        tokens, asked = torch.from_numpy(ids).to(self.device), torch.from_numpy(predicted).to(self.device)
        if self.cache is None:
            line = torch.arange(self.length, device=self.device).expand_as(tokens)
            sight = None if self.sight is None else self.sight[self._indices(rows)]
            no_masks = torch.zeros_like(asked)  # the tokens already contain the mask id
            noised = Noised(
                tokens, no_masks, torch.from_numpy(documents).to(self.device), line, sight=sight, asked=asked
            )
            return self.model.logits(noised)
        return self._forward_cached(self.cache, rows, tokens, asked, begin, end, refresh)

    def _indices(self, rows: list[_Canvas]) -> list[int]:
        """The indices of these rows in the batch."""
        return [index for index, row in enumerate(self.rows) if any(row is other for other in rows)]

    def _forward_cached(
        self,
        cache: CanvasCache,
        rows: list[_Canvas],
        tokens: Tensor,
        asked: Tensor,
        begin: int,
        end: int,
        refresh: bool,
    ) -> Tensor:
        """Logits from the block's window, or from all positions at the start of a block; a shifted model also needs the
        position before the window.
        """
        starts = torch.tensor([len(row.prompt) + begin - 1 for row in rows], device=self.device)
        if refresh:
            positions = torch.arange(self.length, device=self.device).expand(len(rows), -1)
        else:
            stop = end if self.settings.cache == "dual" else self.settings.length
            positions = starts[:, None] + torch.arange(stop - begin + 1, device=self.device)
        states = cache.window(self._indices(rows), tokens.gather(1, positions), positions)
        shift = 1 if self.model.traits.shift else 0
        row, column = asked.nonzero(as_tuple=True)
        first = 0 if refresh else starts[row]
        hidden = states[row, column - shift - first]
        return allowed_logits(hidden, self.model.trunk.table, self.model.traits.banned)

    def _step(self, rows: list[_Canvas], positions: list[np.ndarray], logits: Tensor, count: int) -> None:
        """Choose a token for each candidate position (N in total; `logits` (N, V)), and commit each row's best."""
        settings = self.settings
        numbers = [(row.noise.random_raw(2 * len(row.tokens)) >> np.uint64(11)) * masks.WORDS for row in rows]
        for_tokens = np.concatenate([own[: len(row.tokens)][part] for own, row, part in zip(numbers, rows, positions)])
        for_order = np.concatenate([own[len(row.tokens) :][part] for own, row, part in zip(numbers, rows, positions)])
        if settings.temperature == 0:
            chosen = logits.argmax(-1).cpu().numpy()
        else:
            sampling = Sampling(1, temperature=settings.temperature, top_p=settings.top_p)
            chosen = choose(logits, torch.from_numpy(for_tokens), sampling)[0].cpu().numpy()
        masked = np.concatenate([row.masked[part] for row, part in zip(rows, positions)])
        current = np.concatenate([row.tokens[part] for row, part in zip(rows, positions)])
        tokens = np.where(masked, chosen, current)  # p2 also considers committed tokens
        probabilities, scores = self._confidence(logits, torch.from_numpy(tokens).to(logits.device), for_order)
        cuts = np.cumsum([len(part) for part in positions])[:-1]
        by_row = (np.split(array, cuts) for array in (tokens, probabilities, scores))
        for row, part, row_tokens, row_probabilities, row_scores in zip(rows, positions, *by_row, strict=True):
            best = np.argsort(-row_scores, kind="stable")
            if settings.threshold is not None:
                committed = np.union1d(best[:1], np.flatnonzero(row_probabilities >= settings.threshold))
            else:
                committed = np.sort(best[:count])
            self._commit(row, part, row_tokens, row_probabilities, committed)

    def _commit(
        self, row: _Canvas, positions: np.ndarray, tokens: np.ndarray, probabilities: np.ndarray, chosen: np.ndarray
    ) -> None:
        """Commit the `chosen` candidates, and remask committed tokens that are not chosen."""
        new = [n for n in chosen.tolist() if row.masked[positions[n]]]
        chosen_set = set(chosen.tolist())
        remasked = [n for n in range(len(positions)) if n not in chosen_set and not row.masked[positions[n]]]
        for n in new:
            row.tokens[positions[n]], row.masked[positions[n]] = tokens[n], False
        for n in remasked:
            row.tokens[positions[n]], row.masked[positions[n]] = self.model.traits.mask, True
        committed = [(int(positions[n]), int(tokens[n]), float(probabilities[n])) for n in new]
        row.steps.append(CanvasStep(committed, [int(positions[n]) for n in remasked]))

    def _confidence(self, logits: Tensor, tokens: Tensor, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens' probabilities (N,) and scores (N,); the token with the highest score is committed first."""
        settings, wide = self.settings, logits if logits.dtype == torch.float64 else logits.float()
        if settings.confidence == "tempered" and settings.temperature:
            wide = self._temper(wide)
        total = wide.logsumexp(-1, keepdim=True)
        probabilities = (wide.gather(1, tokens[:, None]) - total).exp().squeeze(1).cpu().double().numpy()
        if settings.order == "low_confidence":
            return probabilities, probabilities
        if settings.order == "random":
            return probabilities, numbers
        if settings.order == "margin":
            best = (wide.topk(2, -1).values - total).exp()
            return probabilities, (best[:, 0] - best[:, 1]).cpu().double().numpy()
        return probabilities, torch.special.entr((wide - total).exp()).sum(-1).neg().cpu().double().numpy()

    def _temper(self, wide: Tensor) -> Tensor:
        """Logits (N, V) after temperature and top_p."""
        wide = (wide - wide.amax(-1, keepdim=True)) / max(self.settings.temperature, torch.finfo(wide.dtype).tiny)
        falling, ids = wide.softmax(-1).sort(-1, descending=True)
        outside = falling.cumsum(-1) - falling >= self.settings.top_p
        return wide.masked_fill(torch.zeros_like(outside).scatter(1, ids, outside), float("-inf"))


# -- AR-ness -----------------------------------------------------------------------------------------------------------


def order_of(steps: Sequence[CanvasStep]) -> list[int]:
    """The positions of a canvas in order of their last commit, left to right within a step."""
    step_of: dict[int, int] = {}
    for number, step in enumerate(steps):
        step_of |= {position: number for position, *_ in step.committed}
    return sorted(step_of, key=lambda position: (step_of[position], position))


def local_ar(order: Sequence[int], k: int) -> float:
    """AR-ness local@k: the fraction of tokens p whose k preceding commits were p - k, ..., p - 1, in this order.

    Positions before the completion are treated as committed in order (DiffuCoder, arXiv:2506.20639, section 3.1).
    `order` is a permutation.
    """
    hits = 0
    for index, p in enumerate(order):
        hits += all(p < back or (index >= back and order[index - back] == p - back) for back in range(1, k + 1))
    return hits / len(order)


def global_ar(order: Sequence[int], k: int) -> float:
    """AR-ness global@k: the fraction of tokens that were among the k leftmost masks when committed."""
    masked, hits = sorted(order), 0
    for position in order:
        hits += position in masked[:k]
        masked.remove(position)
    return hits / len(order)


# -- traces ------------------------------------------------------------------------------------------------------------

PROMPTS = 8
CANVAS = 64  # tokens, by default


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as text and as ids."""

    id: str
    text: str
    ids: list[int]


def write(
    paths: Sequence[Path],
    model: Denoiser,
    tokenizer: Tokenizer,
    asked: Sequence[EncodedPrompt],
    *,
    length: int = CANVAS,
    block: int | None = None,
) -> None:
    """Denoise a canvas, one token per step, after each of the first prompts that leave room, and write the traces."""
    settings = Denoising(length=length, steps=length, block=block)
    fitting = [prompt for prompt in asked if len(prompt.ids) <= model.config.max_context - length][:PROMPTS]
    generations = denoise(model, [prompt.ids for prompt in fitting], settings, [0] * len(fitting))
    traces = {
        "settings": asdict(settings),
        "prompts": [
            _trace(prompt, generation, tokenizer) for prompt, generation in zip(fitting, generations, strict=True)
        ],
    }
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(traces, ensure_ascii=False) + "\n", encoding="utf-8")


def _trace(prompt: EncodedPrompt, generation: Generation, tokenizer: Tokenizer) -> JsonObject:
    """One prompt's part of a trace."""

    def text(id_: int) -> str:
        return tokenizer.decode([id_], skip_special=False)

    steps = [
        {
            "committed": [
                [position, id_, text(id_), round(probability, 4)] for position, id_, probability in step.committed
            ],
            "remasked": step.remasked,
        }
        for step in generation.steps
    ]
    return {
        "id": prompt.id,
        "prompt": prompt.text,
        "answer": tokenizer.decode(generation.ids),
        "forwards": generation.forwards,
        "canvas": [text(id_) for id_ in generation.canvas],
        "length": len(generation.ids),
        "steps": steps,
    }
