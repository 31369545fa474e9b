"""Texts with masks as training batches of masked diffusion: windows of a corpus, and problems with their answers.

    CorpusStream windows              --times, bernoulli-->  NoisedBatch     adaptation, pre-training
    prompt + answer on a canvas       --times, bernoulli-->  NoisedBatch     supervised fine-tuning

The loss of a row is sum over its masked tokens of -log p / p_mask (LLaDA, arXiv:2502.09992, eq. 3 and 5), so a mean over a
validation set is its negative ELBO per token. There the k form is used, which has less variance and never an empty mask.
Which tokens are masked is `masking.py`'s and hangs on (seed, sample, pass) alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pipeline.model.denoiser import Noised
from pipeline.streams import masking
from pipeline.streams.batch import PADDING, TokenBatch
from pipeline.streams.packed import PackedStream


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How training noise is drawn and weighted; `batch` is always the optimiser step, never the micro-batch."""

    t_scope: str = "sample"  # a time for each row, or one for the batch
    token_weight: str = "elbo"  # 1 / p; or cart: by the clean tokens nearby
    cart_p: float = 0.3  # of cart: how fast the weight of a clean token falls with its distance
    block_size: int = 0  # tokens that are denoised together, from the left block by block; 0: all

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
    """Rows under masks, and how much each masked token counts."""

    noised: Noised
    weights: Tensor  # (n,) float32 of the asked tokens, row by row
    counts: dict[str, int]  # tokens that may be masked, rows, positions; bytes where they are known

    def to(self, device: torch.device | str) -> "NoisedBatch":
        """The same batch on another device."""
        return replace(self, noised=self.noised.to(device), weights=self.weights.to(device, non_blocking=True))


@dataclass(frozen=True)
class Row:
    """One row before its noise: which of its places may be masked, and their numbers."""

    places: np.ndarray  # (L,) int64, in the row
    blocks: np.ndarray  # (L,) int64, the block of each from 0 on; all 0 without blocks
    numbers: np.ndarray  # (number of blocks - 1 + L,) uniform: further times, then one a token


def noised_row(row: Row, t: float, noise: Noise) -> tuple[np.ndarray, np.ndarray]:
    """Masks (L,) and weights (L,) of a row at time t; a further block has its own time."""
    more = int(row.blocks[-1]) if len(row.blocks) else 0
    rates = np.array([masking.probability(time) for time in (t, *row.numbers[:more])])[row.blocks]
    masks = row.numbers[more:] < rates
    if noise.token_weight == "cart":
        return masks, masking.cart_weights(masks, noise.cart_p)
    return masks, np.where(masks, 1 / rates, 0.0)


def evaluated_row(row: Row, u: float) -> tuple[np.ndarray, np.ndarray]:
    """Masks (L,) and weights (L,) of the k form: in each block k of its tokens, which weigh its length / k."""
    more = int(row.blocks[-1]) if len(row.blocks) else 0
    masks, weights = np.zeros(len(row.places), dtype=bool), np.zeros(len(row.places))
    for block, time in enumerate((u, *row.numbers[:more]) if len(row.places) else ()):
        here = np.flatnonzero(row.blocks == block)
        k = int(masking.strata(time, 1, len(here))[0])
        masks[here] = masking.subset(row.numbers[more:][here], k)
        weights[here] = len(here) / k
    return masks, np.where(masks, weights, 0.0)


def laid_out(tokens: Tensor, documents: Tensor, positions: Tensor, rows: list[Row],
             drawn: list[tuple[np.ndarray, np.ndarray]], blocks: np.ndarray | None, sight: np.ndarray | None,
             ) -> tuple[Noised, Tensor]:  # fmt: skip
    """The input and the weights of its masked tokens; `blocks` (B, T) put the clean tokens beside the noised ones."""
    masks, weights = np.zeros(tokens.shape, dtype=bool), np.zeros(tokens.shape, dtype=np.float32)
    for number, (row, (hidden, weight)) in enumerate(zip(rows, drawn, strict=True)):
        masks[number, row.places], weights[number, row.places] = hidden, weight
    clean = None
    if blocks is not None:
        sight = np.stack([masking.block_sight(own) for own in blocks])[:, None]
        clean = tokens
    seen = None if sight is None else torch.from_numpy(np.ascontiguousarray(sight))
    noised = Noised(tokens, torch.from_numpy(masks), documents, positions, sight=seen, clean=clean)
    return noised, torch.from_numpy(weights[masks])


class WindowStream:
    """Windows of a corpus under masks: a `protocols.Stream`. The first token of a document stays clean: a state before it."""

    def __init__(self, corpus: PackedStream, noise: Noise, *, name: str, seed: int, byte_lengths: np.ndarray,
                 anneal_steps: int = 0) -> None:  # fmt: skip
        """`anneal_steps`: over so many steps attention grows from causal to full; 0: it is full at once."""
        assert not (noise.block_size and anneal_steps), "block diffusion starts from scratch"
        self._corpus, self._noise, self._name, self._seed = corpus, noise, name, seed
        self._byte_lengths, self._anneal_steps = byte_lengths, anneal_steps
        self.fingerprint = masking_fingerprint(corpus.fingerprint, noise, anneal_steps)
        self.tokens_per_epoch = corpus.tokens_per_epoch

    def rows(self, step: int, context: int) -> np.ndarray:
        """Row ids of the step, as the corpus numbers them: an id carries its pass."""
        return self._corpus.rows(step, context)

    def batch(self, step: int, context: int, rows: np.ndarray) -> NoisedBatch:
        """Those rows under their masks."""
        times = masking.times(self._seed, step, len(self.rows(step, context)), shared=self._noise.t_scope == "batch")
        place = {int(row): n for n, row in enumerate(self.rows(step, context))}
        base = self._corpus.batch(step, context, rows)
        per_epoch = self._corpus.rows_per_epoch * (self._corpus.context // context)
        names = [divmod(int(row), per_epoch) for row in rows]
        trims = [masking.trim(masking.key(self._seed, "trim", f"{self._name}:{window}", turn), context)
                 for turn, window in names]  # fmt: skip
        keys = [masking.key(self._seed, "mdm", f"{self._name}:{window}", turn) for turn, window in names]
        sight = masking.anneal(self._seed, step, context, self._anneal_steps)
        drawn = [partial(noised_row, t=float(times[place[int(row)]]), noise=self._noise) for row in rows]
        return self._batch(base, keys, trims, drawn, sight)

    def evaluation(self, tokens: int) -> Iterator[NoisedBatch]:
        """The val split under fixed masks, the k form, until `tokens` that may be masked have been given."""
        given = number = 0
        for base in self._corpus.evaluation(10**12):
            if given >= tokens:
                return
            count, length = base.input_ids.shape
            spread = (np.arange(count) + 0.5) / count
            keys = [masking.key(0, "eval", f"{self._name}:val:{number + n}", 0) for n in range(count)]
            drawn = [partial(evaluated_row, u=float(u)) for u in spread]
            batch = self._batch(base, keys, [masking.Trim(length, 0)] * count, drawn, None)
            number += count
            given += batch.counts["tokens"]
            yield batch

    def _batch(self, base: TokenBatch, keys: list[int], trims: list[masking.Trim],
               draw: list[Callable[[Row], tuple[np.ndarray, np.ndarray]]], sight: np.ndarray | None) -> NoisedBatch:  # fmt: skip
        documents, positions, size = base.documents.numpy().copy(), base.positions.numpy(), self._noise.block_size
        column = np.arange(documents.shape[1])
        rows, blocks = [], positions // size if size else np.zeros_like(positions)
        for number, (key, (end, start)) in enumerate(zip(keys, trims, strict=True)):
            documents[number, end:] = PADDING
            inside = (column >= start) & (column < end) & (positions[number] > 0) & (documents[number] >= 0)
            places = np.flatnonzero(inside)
            own = numbered(documents[number, places], blocks[number, places])
            more = int(own[-1]) if len(own) else 0
            numbers = masking.uniforms(key, more + documents.shape[1])
            rows.append(Row(places, own, np.concatenate([numbers[:more], numbers[more:][places]])))
        drawn = [one(row) for one, row in zip(draw, rows, strict=True)]
        noised, weights = laid_out(base.input_ids, torch.from_numpy(documents), base.positions, rows, drawn,
                                   blocks if size else None, sight)  # fmt: skip
        maskable = np.concatenate([base.input_ids[n].numpy()[row.places] for n, row in enumerate(rows)])
        counts = {"tokens": len(maskable), "bytes": int(self._byte_lengths[maskable].sum()), "rows": len(rows),
                  "positions": int((documents >= 0).sum())}  # fmt: skip
        return NoisedBatch(noised, weights, counts)


def numbered(documents: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Numbers from 0 on of the blocks of a row's documents, (L,) -> (L,); without blocks all are one."""
    if not len(blocks) or not blocks.any():
        return np.zeros(len(blocks), dtype=np.int64)
    changes = (np.diff(documents, prepend=documents[:1]) != 0) | (np.diff(blocks, prepend=blocks[:1]) != 0)
    return np.cumsum(changes)


def masking_fingerprint(data: str, noise: Noise, anneal_steps: int = 0) -> str:
    """What a resume compares: the data, and how it is masked."""
    return f"{data}-{masking.key(0, 'fingerprint', repr(noise), anneal_steps):032x}"[:33]
