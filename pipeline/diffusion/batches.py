"""Training batches for masked diffusion: windows of a corpus, pairs of answers, and problems with answers on canvases.

    CorpusStream windows                --times, masks-->       NoisedBatch     adaptation, pre-training
    prompt | answer, end of turn, fill  --times, masks-->       NoisedBatch     supervised fine-tuning
    prompt | answer of a pair           --k of L tokens, n x--> Drawn           Diffusion-DPO

Batches are a pure function of (seed, step). The masks (`diffusion/masks.py`) depend only on (seed, sample, pass).

A row's loss is the sum over its masked tokens of -log p / p_mask (LLaDA, arXiv:2502.09992, eq. 3 and 5), so its mean
over a validation set is the negative ELBO per token. Validation uses the k form (exactly k of L tokens are masked,
weighted by L / k), which has lower variance and never draws an empty mask.

**Pairs** (data/preferences/{train,val}.jsonl). Each answer gets n masks, each with some number k of masked tokens. The
masks depend on (seed, pair, side, pass); policy and reference score the same batch, so they share its masks. An answer
ends with its end of turn; unlike in fine-tuning, no fill follows it.

**Problems** (data/problems/{train,val}.jsonl). A diffusion model writes on a canvas of fixed length, so it must learn
to stop: the rest of the canvas, after the answer and its end of turn, is filled, and the fill is noised and predicted
like any other token (LLaDA, arXiv:2502.09992, appendix B.1). The length of a canvas depends on the example and the
pass, never on the rest of the batch. The prompt stays clean. The causal control gets the same examples in the same
order, without fill.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipeline.batches.batch import PADDING, Piece, TokenBatch, answered
from pipeline.batches.packing import PackedStream
from pipeline.batches.pairs import EVALUATION_PAIRS, Encoded, PairSplit
from pipeline.diffusion import masks as diffusion_masks
from pipeline.diffusion.masks import Drawn
from pipeline.diffusion.model import Noised, Traits
from pipeline.ingest import records
from pipeline.ingest.records import Problem
from pipeline.run.device import stable_hash
from pipeline.run.errors import DataError
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How training noise is drawn and weighted; `batch` means an optimizer step's batch, not a micro-batch."""

    t_scope: str = "sample"
    """sample: one time per row; batch: one time for the step's entire batch."""
    token_weight: str = "elbo"
    """Loss weighting: elbo (1 / p), or cart (by the nearby clean tokens)."""
    cart_p: float = 0.3
    """For cart: how quickly a clean token's weight decays with distance."""
    block_size: int = 0
    """Tokens denoised together, block by block from the left; 0: all."""

    def __post_init__(self) -> None:
        for name, options in {"t_scope": ("sample", "batch"), "token_weight": ("elbo", "cart")}.items():
            if getattr(self, name) not in options:
                raise ValueError(f"{name}: expected one of {', '.join(options)}, got {getattr(self, name)!r}")
        if not 0 < self.cart_p < 1:
            raise ValueError(f"cart_p: expected a share between 0 and 1, got {self.cart_p}")
        if self.block_size < 0:
            raise ValueError(f"block_size: expected 0 (off) or a number of tokens, got {self.block_size}")


@dataclass(frozen=True)
class NoisedBatch:
    """Masked rows, and the weight of each masked token."""

    noised: Noised
    weights: Tensor  # (n,) float32, of the predicted tokens, row by row
    counts: dict[str, int]  # maskable tokens, rows, positions; bytes if known

    def to(self, device: torch.device | str) -> "NoisedBatch":
        """The same batch on another device."""
        return replace(self, noised=self.noised.to(device), weights=self.weights.to(device, non_blocking=True))


@dataclass(frozen=True)
class MaskableRow:
    """A row before noising: the positions that may be masked, and uniform random numbers for them."""

    places: np.ndarray  # (L,) int64, positions in the row
    blocks: np.ndarray  # (L,) int64, the index of each position's block; all 0 without blocks
    numbers: np.ndarray  # (blocks - 1 + L,) uniform: times of the blocks after the first, then one per token


def noised_row(row: MaskableRow, t: float, noise: Noise) -> tuple[np.ndarray, np.ndarray]:
    """Masks (L,) and weights (L,) of a row at time t; each additional block has its own time."""
    num_further = int(row.blocks[-1]) if len(row.blocks) else 0
    rates = np.array([diffusion_masks.probability(time) for time in (t, *row.numbers[:num_further])])[row.blocks]
    masks = row.numbers[num_further:] < rates
    if noise.token_weight == "cart":
        return masks, diffusion_masks.cart_weights(masks, noise.cart_p)
    return masks, np.where(masks, 1 / rates, 0.0)


def evaluated_row(row: MaskableRow, u: float) -> tuple[np.ndarray, np.ndarray]:
    """Masks (L,) and weights (L,) of the k form: in each block, k tokens are masked, weighted by block length / k."""
    num_further = int(row.blocks[-1]) if len(row.blocks) else 0
    masks, weights = np.zeros(len(row.places), dtype=bool), np.zeros(len(row.places))
    for block, time in enumerate((u, *row.numbers[:num_further]) if len(row.places) else ()):
        inside = np.flatnonzero(row.blocks == block)
        k = int(diffusion_masks.strata(time, 1, len(inside))[0])
        masks[inside] = diffusion_masks.subset(row.numbers[num_further:][inside], k)
        weights[inside] = len(inside) / k
    return masks, np.where(masks, weights, 0.0)


def _build_input(
    tokens: Tensor,
    documents: Tensor,
    positions: Tensor,
    rows: list[MaskableRow],
    drawn: list[tuple[np.ndarray, np.ndarray]],
    blocks: np.ndarray | None,
    sight: np.ndarray | None,
) -> tuple[Noised, Tensor]:
    """The input and the weights of its masked tokens; with `blocks` (B, T), the input includes the clean tokens.

    `drawn` contains the masks and weights of each row.
    """
    masks, weights = np.zeros(tokens.shape, dtype=bool), np.zeros(tokens.shape, dtype=np.float32)
    for number, (row, (row_masks, row_weights)) in enumerate(zip(rows, drawn, strict=True)):
        masks[number, row.places], weights[number, row.places] = row_masks, row_weights
    clean = None
    if blocks is not None:
        sight = np.stack([diffusion_masks.block_sight(row_blocks) for row_blocks in blocks])[:, None]
        clean = tokens
    attention = None if sight is None else torch.from_numpy(np.ascontiguousarray(sight))
    noised = Noised(tokens, torch.from_numpy(masks), documents, positions, sight=attention, clean=clean)
    return noised, torch.from_numpy(weights[masks])


class _Passes:
    """Endless passes over `count` items, each in its own random order. Indices continue from pass to pass."""

    def __init__(self, name: str, seed: int, count: int) -> None:
        self._name, self._seed, self._count = name, seed, count
        self._order: tuple[int, np.ndarray] = (-1, np.arange(0))

    def items(self, indices: Sequence[int] | np.ndarray) -> list[tuple[int, int]]:
        """(item, pass) at each index."""
        pairs = [(int(index) // self._count, int(index) % self._count) for index in indices]
        return [(int(self.order(turn)[index]), turn) for turn, index in pairs]

    def order(self, turn: int) -> np.ndarray:
        """The items of a pass, (count,), in the order of that pass."""
        if self._order[0] != turn:
            generator = np.random.default_rng(stable_hash(self._name, self._seed, turn) % 2**63)
            self._order = (turn, generator.permutation(self._count))
        return self._order[1]


class WindowStream:
    """Masked windows of a corpus: a `fit.Stream`. The first token of a document stays clean, because no state precedes
    it.
    """

    def __init__(
        self,
        corpus: PackedStream,
        noise: Noise,
        *,
        name: str,
        seed: int,
        byte_lengths: np.ndarray,
        anneal_steps: int = 0,
    ) -> None:
        """`anneal_steps`: steps over which attention grows from causal to full; 0: full from the start."""
        assert not (noise.block_size and anneal_steps), "block diffusion starts from scratch"
        self._corpus, self._noise, self._name, self._seed = corpus, noise, name, seed
        self._byte_lengths, self._anneal_steps = byte_lengths, anneal_steps
        self.fingerprint = masking_fingerprint(corpus.fingerprint, noise, anneal_steps)
        self.tokens_per_epoch = corpus.tokens_per_epoch

    def rows(self, step: int, context: int) -> np.ndarray:
        """The step's row ids in the corpus; a row id also encodes the pass."""
        return self._corpus.rows(step, context)

    def batch(self, step: int, context: int, rows: np.ndarray) -> NoisedBatch:
        """These rows, masked."""
        step_rows = self.rows(step, context)
        times = diffusion_masks.times(self._seed, step, len(step_rows), shared=self._noise.t_scope == "batch")
        time_of = {int(row): float(time) for row, time in zip(step_rows, times, strict=True)}
        base = self._corpus.batch(step, context, rows)
        per_epoch = self._corpus.rows_per_epoch * (self._corpus.context // context)
        names = [divmod(int(row), per_epoch) for row in rows]
        trims = [
            diffusion_masks.trim(diffusion_masks.key(self._seed, "trim", f"{self._name}:{window}", turn), context)
            for turn, window in names
        ]
        keys = [diffusion_masks.key(self._seed, "mdm", f"{self._name}:{window}", turn) for turn, window in names]
        sight = diffusion_masks.anneal(self._seed, step, context, self._anneal_steps)
        draws = [partial(noised_row, t=time_of[int(row)], noise=self._noise) for row in rows]
        return self._batch(base, keys, trims, draws, sight)

    def evaluation(self, tokens: int) -> Iterator[NoisedBatch]:
        """The val split under fixed masks, in the k form, up to `tokens` maskable tokens."""
        num_tokens = num_rows = 0
        for base in self._corpus.evaluation(10**12):
            if num_tokens >= tokens:
                return
            count, length = base.input_ids.shape
            spread = (np.arange(count) + 0.5) / count
            keys = [diffusion_masks.key(0, "eval", f"{self._name}:val:{num_rows + n}", 0) for n in range(count)]
            draws = [partial(evaluated_row, u=float(u)) for u in spread]
            batch = self._batch(base, keys, [diffusion_masks.Trim(length, 0)] * count, draws, None)
            num_rows += count
            num_tokens += batch.counts["tokens"]
            yield batch

    def _batch(
        self,
        base: TokenBatch,
        keys: list[int],
        trims: list[diffusion_masks.Trim],
        draws: list[Callable[[MaskableRow], tuple[np.ndarray, np.ndarray]]],
        sight: np.ndarray | None,
    ) -> NoisedBatch:
        documents, positions, size = base.documents.numpy().copy(), base.positions.numpy(), self._noise.block_size
        column = np.arange(documents.shape[1])
        rows, blocks = [], positions // size if size else np.zeros_like(positions)
        for number, (key, (end, start)) in enumerate(zip(keys, trims, strict=True)):
            documents[number, end:] = PADDING
            inside = (column >= start) & (column < end) & (positions[number] > 0) & (documents[number] >= 0)
            maskable = np.flatnonzero(inside)
            row_blocks = _number_blocks(documents[number, maskable], blocks[number, maskable])
            num_further = int(row_blocks[-1]) if len(row_blocks) else 0
            numbers = diffusion_masks.uniforms(key, num_further + documents.shape[1])
            numbers = np.concatenate([numbers[:num_further], numbers[num_further:][maskable]])
            rows.append(MaskableRow(maskable, row_blocks, numbers))
        drawn = [draw(row) for draw, row in zip(draws, rows, strict=True)]
        noised, weights = _build_input(
            base.input_ids, torch.from_numpy(documents), base.positions, rows, drawn, blocks if size else None, sight
        )
        tokens = np.concatenate([base.input_ids[n].numpy()[row.places] for n, row in enumerate(rows)])
        counts = {
            "tokens": len(tokens),
            "bytes": int(self._byte_lengths[tokens].sum()),
            "rows": len(rows),
            "positions": int((documents >= 0).sum()),
        }
        return NoisedBatch(noised, weights, counts)


def _number_blocks(documents: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Number the blocks of a row's documents from 0, (L,) -> (L,); without blocks, all are 0."""
    if not len(blocks) or not blocks.any():
        return np.zeros(len(blocks), dtype=np.int64)
    changes = (np.diff(documents, prepend=documents[:1]) != 0) | (np.diff(blocks, prepend=blocks[:1]) != 0)
    return np.cumsum(changes)


def masking_fingerprint(data: str, noise: Noise, anneal_steps: int = 0) -> str:
    """A string that identifies the data and its masking when a run resumes."""
    return f"{data}-{diffusion_masks.key(0, 'fingerprint', repr(noise), anneal_steps):032x}"[:33]


# -- pairs of answers --------------------------------------------------------------------------------------------------


SIDES = ("chosen", "rejected")


def of_kinds(split: PairSplit, kinds: Collection[str], name: str) -> PairSplit:
    """The split with only the pairs of these kinds; all if `kinds` is empty. Raises DataError if no pair is left."""
    if kinds:
        existing = sorted({encoded.pair.kind for encoded in split.pairs})
        split.pairs = [encoded for encoded in split.pairs if encoded.pair.kind in kinds]
        if not split.pairs:
            raise DataError(f"{name}: expected pairs of the kinds {', '.join(kinds)}, found {', '.join(existing)}")
    return split


def check_texts(split: PairSplit, mask: int, name: str) -> PairSplit:
    """Return the split. Raises DataError naming a pair that contains the mask token, which is not allowed in texts."""
    for encoded in split.pairs:
        if mask in encoded.chosen.ids or mask in encoded.rejected.ids:
            raise DataError(f"{name}: pair {encoded.pair.id} contains the mask token; remove it")
    return split


class NoisedPairs:
    """Batches of masked pairs: a `fit.Stream`."""

    def __init__(
        self,
        train: PairSplit,
        val: PairSplit,
        *,
        pad: int,
        pairs: int,
        max_length: int,
        draws: int,
        stratified: bool,
        seed: int,
    ) -> None:
        """A step has `pairs` pairs, with `draws` masks for each answer."""
        self.train, self.val = train, val
        self._pad, self._pairs, self._draws, self._stratified, self._seed = pad, pairs, draws, stratified, seed
        identity = [train.digest(), val.digest(), pairs, draws, stratified, seed]
        self.fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        self.tokens_per_epoch = len(train.pairs) * 2 * max_length
        # (split, pass) -> (n, 2) ELBOs of the reference, NaN for unused pairs
        self.references: dict[tuple[str, int], np.ndarray] = {}
        self._passes = _Passes("pairs", seed, len(train.pairs))

    def rows(self, step: int, context: int) -> np.ndarray:
        """Indices of the step's pairs in the infinite sequence of passes, (pairs,)."""
        return np.arange(step * self._pairs, (step + 1) * self._pairs)

    def _chosen(self, rows: np.ndarray) -> list[tuple[int, int]]:
        """(index of the pair, pass) of each row."""
        return self._passes.items(rows)

    def batch(self, step: int, context: int, rows: np.ndarray) -> Drawn:
        """These pairs, masked."""
        return self._batch("train", self.train, self._chosen(rows))

    def read(self, name: str, turn: int, places: int) -> np.ndarray:
        """The sorted indices of a split's pairs that a run uses in a pass; `places`: pairs in the entire run."""
        if name == "val":
            return np.arange(len(self.val.pairs))
        count = len(self.train.pairs)
        return np.sort(self._passes.order(turn)[: max(0, min(count, places - turn * count))])

    def some(self, name: str, turn: int, numbers: np.ndarray) -> Iterator[Drawn]:
        """Pairs of a split ("train" or "val") by index, under the masks of a pass."""
        split = self.train if name == "train" else self.val
        for first in range(0, len(numbers), EVALUATION_PAIRS):
            yield self._batch(name, split, [(int(n), turn) for n in numbers[first : first + EVALUATION_PAIRS]])

    def evaluation(self, tokens: int) -> Iterator[Drawn]:
        """The val split under fixed masks, up to `tokens` answer tokens."""
        num_tokens = 0
        for batch in self.some("val", 0, np.arange(len(self.val.pairs))):
            if num_tokens >= tokens:
                return
            num_tokens += batch.counts["tokens"]
            yield batch

    def _batch(self, name: str, split: PairSplit, chosen: list[tuple[int, int]]) -> Drawn:
        keys = [
            [
                diffusion_masks.key(
                    self._seed if name == "train" else 0,
                    "elbo" if name == "train" else "eval",
                    f"{split.pairs[number].pair.id}/{side}",
                    turn,
                )
                for number, turn in chosen
            ]
            for side in SIDES
        ]
        reference = None
        if (name, chosen[0][1]) in self.references:
            elbos = np.stack([self.references[name, turn][number] for number, turn in chosen])  # (P, 2)
            reference = torch.from_numpy(elbos.T.reshape(-1).astype(np.float32))
        pairs = [split.pairs[number] for number, _ in chosen]
        return drawn_pairs(pairs, keys, self._pad, self._draws, stratified=self._stratified, reference=reference)


def drawn_pairs(
    pairs: Sequence[Encoded],
    keys: Sequence[Sequence[int]],
    pad: int,
    draws: int,
    *,
    stratified: bool,
    reference: torch.Tensor | None = None,
) -> Drawn:
    """Pairs as 2P rows under `draws` masks each; `keys`: those of the chosen answers, then of the rejected ones."""
    pieces = [encoded.chosen for encoded in pairs] + [encoded.rejected for encoded in pairs]
    rows = answered(pieces, pad)
    masks = np.zeros((draws, *rows.input_ids.shape), dtype=bool)
    scales, lengths = np.zeros((draws, len(pieces)), dtype=np.float32), np.zeros(len(pieces), dtype=np.int64)
    for row, (piece, key) in enumerate(zip(pieces, [key for side in keys for key in side], strict=True)):
        maskable = np.flatnonzero(piece.trained)
        drawn = diffusion_masks.elbo_draws(key, len(maskable), draws, stratified=stratified)
        masks[:, row, maskable], scales[:, row], lengths[row] = drawn.masks, drawn.scales, len(maskable)
    inputs = [Noised(rows.input_ids, torch.from_numpy(mask), rows.documents, rows.positions) for mask in masks]
    counts = {"pairs": len(pairs), "tokens": int(lengths.sum()), "positions": int((rows.documents >= 0).sum()) * draws}
    return Drawn(inputs, torch.from_numpy(scales), torch.from_numpy(lengths), counts, reference)


# -- problems on canvases ----------------------------------------------------------------------------------------------


UNIT = 32  # tokens; canvas lengths are multiples of this
MOST_DROPPED = 0.1  # fraction of the problems
EVALUATION_ROWS = 32
NORMS = ("answer", "tokens", "batch")


@dataclass(frozen=True)
class Example:
    """A problem and its answer as token ids."""

    id: str
    prompt: list[int]
    answer: list[int]  # including its end of turn


class ExampleSplit:
    """An encoded split in memory."""

    def __init__(self, path: Path, tokenizer: Tokenizer, traits: Traits, *, max_prompt: int, max_new: int) -> None:
        """Raises DataError if the file is missing or has the mask token, or over a tenth of its problems do not fit."""
        if not path.is_file():
            raise DataError(f"{path}: expected programming problems here, found none; run dvc repro stage_tasks")
        self.max_prompt, self.max_new = max_prompt, max_new
        self.examples: list[Example] = []
        self.dropped = 0
        problems = [problem for problem in records.read(path, Problem) if problem.answer is not None]
        for problem in problems:
            example = encoded(problem, tokenizer)
            if traits.mask in (*example.prompt, *example.answer):
                raise DataError(f"{path}: problem {problem.id} contains the mask token; remove it")
            if len(example.prompt) > max_prompt or len(example.answer) > max_new // UNIT * UNIT:
                self.dropped += 1
            else:
                self.examples.append(example)
        if not self.examples or self.dropped > MOST_DROPPED * len(problems):
            raise DataError(
                f"{path}: {self.dropped} of {len(problems)} problems with an answer do not fit; at most a tenth may be"
                f" dropped. Raise max_prompt ({max_prompt}) and max_new_tokens ({max_new}), or fix the file"
            )

    def digest(self) -> str:
        """A hash of all ids, in order."""
        text = json.dumps([[example.id, example.prompt, example.answer] for example in self.examples])
        return hashlib.sha256(text.encode()).hexdigest()


def encoded(problem: Problem, tokenizer: Tokenizer) -> Example:
    """The prompt and the answer of a problem. Raises DataError if the answer is empty."""
    if not (problem.answer or "").strip():
        raise DataError(f"problem {problem.id}: its answer is empty; fix it, or omit `answer`")
    question = [{"role": "user", "content": problem.question}]
    prompt = chat.render(tokenizer, question, generation_prompt=True).ids
    dialogue = chat.render(tokenizer, [*question, {"role": "assistant", "content": problem.answer}])
    end = int(np.flatnonzero(np.array(dialogue.trained))[-1]) + 1
    return Example(problem.id, prompt, dialogue.ids[len(prompt) : end])


class ExampleStream:
    """Masked examples on canvases: a `fit.Stream`."""

    def __init__(
        self, train: ExampleSplit, val: ExampleSplit, traits: Traits, noise: Noise, *, rows: int, norm: str, seed: int
    ) -> None:
        """`norm` divides a row's loss by the size of its canvas (answer) or of all canvases (tokens), or 1 (batch)."""
        self.train, self.val = train, val
        max_prompt, max_new = train.max_prompt, train.max_new
        self._traits, self._noise, self._rows, self._max_new = traits, noise, rows, max_new
        self._norm, self._seed = norm, seed
        identity = [self.train.digest(), self.val.digest(), rows, max_prompt, max_new, norm, seed]
        data = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        self.fingerprint = masking_fingerprint(data, noise)
        self.tokens_per_epoch = len(self.train.examples) * (max_prompt + max_new)
        self._passes = _Passes("examples", seed, len(self.train.examples))

    def rows(self, step: int, context: int) -> np.ndarray:
        """Indices of the step's rows in the infinite sequence of passes, (rows,)."""
        return np.arange(step * self._rows, (step + 1) * self._rows)

    def chosen(self, rows: Sequence[int] | np.ndarray) -> list[tuple[Example, int]]:
        """The example and the pass of each row."""
        return [(self.train.examples[number], turn) for number, turn in self._passes.items(rows)]

    def batch(self, step: int, context: int, rows: np.ndarray) -> NoisedBatch:
        """These rows, masked."""
        times = diffusion_masks.times(self._seed, step, self._rows, shared=self._noise.t_scope == "batch", stream="sft")
        layout, drawn = [], []
        for index, (example, turn) in zip(rows, self.chosen(rows), strict=True):
            key = diffusion_masks.key(self._seed, "canvas", example.id, turn)
            canvas = diffusion_masks.canvas(key, len(example.answer) - 1, self._max_new, UNIT)
            row = self._row(example, canvas, diffusion_masks.key(self._seed, "sft", example.id, turn))
            layout.append((example, canvas, row))
            drawn.append(noised_row(row, float(times[int(index) - step * self._rows]), self._noise))
        return self._batch(layout, drawn)

    def evaluation(self, tokens: int) -> Iterator[NoisedBatch]:
        """The val split in order, each answer on its shortest canvas, in the k form, up to `tokens` canvas tokens."""
        num_tokens = 0
        for first in range(0, len(self.val.examples), EVALUATION_ROWS):
            if num_tokens >= tokens:
                return
            layout = []
            for example in self.val.examples[first : first + EVALUATION_ROWS]:
                canvas = UNIT * -(-len(example.answer) // UNIT)
                row = self._row(example, canvas, diffusion_masks.key(0, "eval", example.id, 0))
                layout.append((example, canvas, row))
            drawn = [evaluated_row(row, (n + 0.5) / len(layout)) for n, (_, _, row) in enumerate(layout)]
            batch = self._batch(layout, drawn)
            num_tokens += batch.counts["tokens"]
            yield batch

    def _row(self, example: Example, canvas: int, key: int) -> MaskableRow:
        size = self._noise.block_size
        blocks = np.arange(canvas) // size if size else np.zeros(canvas, dtype=np.int64)
        numbers = diffusion_masks.uniforms(key, int(blocks[-1]) + canvas)
        return MaskableRow(len(example.prompt) + np.arange(canvas), blocks, numbers)

    def _batch(
        self, rows: list[tuple[Example, int, MaskableRow]], drawn: list[tuple[np.ndarray, np.ndarray]]
    ) -> NoisedBatch:
        """A batch of examples, with their canvas lengths and rows, under the `drawn` masks and weights."""
        longest = max(len(example.prompt) + canvas for example, canvas, _ in rows)
        tokens = np.full((len(rows), longest), self._traits.fill, dtype=np.int64)
        documents = np.full((len(rows), longest), PADDING, dtype=np.int32)
        blocks = np.zeros((len(rows), longest), dtype=np.int64)  # the prompt is one block
        for n, (example, canvas, row) in enumerate(rows):
            ids = example.prompt + example.answer
            tokens[n, : len(ids)] = ids
            documents[n, : len(example.prompt) + canvas] = 0
            blocks[n, row.places] = 1 + row.blocks
        positions = np.where(documents == 0, np.arange(longest), 0)
        noised, weights = _build_input(
            torch.from_numpy(tokens),
            torch.from_numpy(documents),
            torch.from_numpy(positions),
            [row for *_, row in rows],
            drawn,
            blocks if self._noise.block_size else None,
            None,
        )
        if self._norm == "answer":
            lengths = torch.tensor([canvas for _, canvas, _ in rows], dtype=torch.float32)
            weights = weights / lengths.repeat_interleave(noised.masks.sum(1))
        counts = {
            "tokens": sum(canvas for _, canvas, _ in rows),
            "rows": len(rows),
            "positions": int((documents == 0).sum()),
        }
        return NoisedBatch(noised, weights, counts)


class PlainExamples:
    """The same examples in the same order for the causal control: a `fit.Stream` for next-token training."""

    def __init__(self, noised: ExampleStream, tokenizer: Tokenizer) -> None:
        self._noised, self._tokenizer = noised, tokenizer
        self.fingerprint = f"{noised.fingerprint}-next"
        self.tokens_per_epoch = noised.tokens_per_epoch

    def rows(self, step: int, context: int) -> np.ndarray:
        """The masked stream's rows."""
        return self._noised.rows(step, context)

    def batch(self, step: int, context: int, rows: np.ndarray) -> TokenBatch:
        """The examples of these rows; the targets are the answers, including their end-of-turn tokens."""
        return self._batch([example for example, _ in self._noised.chosen(rows)])

    def evaluation(self, tokens: int) -> Iterator[TokenBatch]:
        """The val split in order, up to `tokens` targets."""
        num_targets, examples = 0, self._noised.val.examples
        for first in range(0, len(examples), EVALUATION_ROWS):
            if num_targets >= tokens:
                return
            batch = self._batch(examples[first : first + EVALUATION_ROWS])
            num_targets += batch.num_targets
            yield batch

    def _batch(self, examples: Sequence[Example]) -> TokenBatch:
        pieces = []
        for example in examples:
            ids = np.array(example.prompt + example.answer, dtype=np.int64)
            pieces.append(Piece(ids, np.arange(len(ids)) >= len(example.prompt)))
        rows = answered(pieces, self._tokenizer.pad)
        targets = rows.targets[rows.targets >= 0].numpy()
        return TokenBatch(*rows, num_bytes=int(self._tokenizer.byte_lengths[targets].sum()))
