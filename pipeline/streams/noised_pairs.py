"""Pairs of answers under sampled masks, for Diffusion-DPO: each answer n times, of each time k of its tokens hidden.

    data/preferences/{train,val}.jsonl --PairSplit--> Drawn, a pure function of (seed, place in the passes)

The masks of a pair's answer hang on (seed, pair, side, pass); policy and reference score the same batch, so they share them. The
answer ends with the end of its turn; unlike in fine-tuning nothing fills the canvas behind it (specs: diffusion, 5).
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch

from pipeline.device import stable_hash
from pipeline.errors import DataError
from pipeline.model.denoiser import Noised
from pipeline.streams import masking
from pipeline.streams.batch import answered
from pipeline.streams.drawn import Drawn
from pipeline.streams.preferences import EVALUATION_PAIRS, Encoded, PairSplit

SIDES = ("chosen", "rejected")


def of_kinds(split: PairSplit, kinds: Collection[str], name: str) -> PairSplit:
    """The split with the pairs of some kinds alone; none named: all. Raises DataError where nothing is left."""
    if kinds:
        have = sorted({encoded.pair.kind for encoded in split.pairs})
        split.pairs = [encoded for encoded in split.pairs if encoded.pair.kind in kinds]
        if not split.pairs:
            raise DataError(f"{name}: expected pairs of the kinds {', '.join(kinds)}, found {', '.join(have)}")
    return split


def check_texts(split: PairSplit, mask: int, name: str) -> PairSplit:
    """The split. Raises DataError naming a pair that holds the mask, which no text may."""
    for encoded in split.pairs:
        if mask in encoded.chosen.ids or mask in encoded.rejected.ids:
            raise DataError(f"{name}: pair {encoded.pair.id} holds the mask token; take it out")
    return split


class NoisedPairs:
    """Batches of pairs under masks: a `protocols.Stream`."""

    def __init__(self, train: PairSplit, val: PairSplit, *, pad: int, pairs: int, max_length: int, draws: int,
                 stratified: bool, seed: int) -> None:  # fmt: skip
        """`pairs` a step, `draws` masks of each answer."""
        self.train, self.val = train, val
        self._pad, self._pairs, self._draws, self._stratified, self._seed = pad, pairs, draws, stratified, seed
        identity = [train.digest(), val.digest(), pairs, draws, stratified, seed]
        self.fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        self.tokens_per_epoch = len(train.pairs) * 2 * max_length
        self.references: dict[
            tuple[str, int], np.ndarray
        ] = {}  # (split, pass) -> (n, 2) ELBOs of the reference, NaN where they are not read
        self._order: tuple[int, np.ndarray] = (-1, np.arange(0))

    def rows(self, step: int, context: int) -> np.ndarray:
        """Places of the step's pairs in the endless sequence of passes, (pairs,)."""
        return np.arange(step * self._pairs, (step + 1) * self._pairs)

    def _chosen(self, rows: np.ndarray) -> list[tuple[int, int]]:
        """(number of the pair, pass) at each place; each pass goes once through all pairs, in an order of its own."""
        count = len(self.train.pairs)
        return [(int(self._at(int(row) // count)[int(row) % count]), int(row) // count) for row in rows]

    def _at(self, turn: int) -> np.ndarray:
        if self._order[0] != turn:
            draws = np.random.default_rng(stable_hash("pairs", self._seed, turn) % 2**63)
            self._order = (turn, draws.permutation(len(self.train.pairs)))
        return self._order[1]

    def batch(self, step: int, context: int, rows: np.ndarray) -> Drawn:
        """Those pairs."""
        return self._batch("train", self.train, self._chosen(rows))

    def read(self, name: str, turn: int, places: int) -> np.ndarray:
        """Which pairs of a split are read in a pass, if the run goes over so many `places`; sorted."""
        if name == "val":
            return np.arange(len(self.val.pairs))
        count = len(self.train.pairs)
        return np.sort(self._at(turn)[: max(0, min(count, places - turn * count))])

    def some(self, name: str, turn: int, numbers: np.ndarray) -> Iterator[Drawn]:
        """Pairs of a split ("train" or "val") by their numbers, under the masks of a pass."""
        split = self.train if name == "train" else self.val
        for first in range(0, len(numbers), EVALUATION_PAIRS):
            yield self._batch(name, split, [(int(n), turn) for n in numbers[first : first + EVALUATION_PAIRS]])

    def evaluation(self, tokens: int) -> Iterator[Drawn]:
        """The val split under fixed masks, until `tokens` answer tokens have been given."""
        given = 0
        for batch in self.some("val", 0, np.arange(len(self.val.pairs))):
            if given >= tokens:
                return
            given += batch.counts["tokens"]
            yield batch

    def _batch(self, name: str, split: PairSplit, chosen: list[tuple[int, int]]) -> Drawn:
        keys = [[masking.key(self._seed if name == "train" else 0, "elbo" if name == "train" else "eval",
                             f"{split.pairs[number].pair.id}/{side}", turn) for number, turn in chosen]
                for side in SIDES]  # fmt: skip
        reference = None
        if (name, chosen[0][1]) in self.references:
            told = np.stack([self.references[name, turn][number] for number, turn in chosen])  # (P, 2)
            reference = torch.from_numpy(told.T.reshape(-1).astype(np.float32))
        pairs = [split.pairs[number] for number, _ in chosen]
        return drawn_pairs(pairs, keys, self._pad, self._draws, stratified=self._stratified, reference=reference)


def drawn_pairs(
    pairs: Sequence[Encoded], keys: Sequence[Sequence[int]], pad: int, draws: int, *, stratified: bool,
    reference: torch.Tensor | None = None,
) -> Drawn:  # fmt: skip
    """Pairs as 2P rows under `draws` masks each; `keys` are those of the chosen answers, then of the rejected ones."""
    pieces = [encoded.chosen for encoded in pairs] + [encoded.rejected for encoded in pairs]
    laid = answered(pieces, pad)
    masks = np.zeros((draws, *laid.input_ids.shape), dtype=bool)
    scales, lengths = np.zeros((draws, len(pieces)), dtype=np.float32), np.zeros(len(pieces), dtype=np.int64)
    for row, (piece, key) in enumerate(zip(pieces, [key for side in keys for key in side], strict=True)):
        places = np.flatnonzero(piece.trained)
        found = masking.elbo_draws(key, len(places), draws, stratified=stratified)
        masks[:, row, places], scales[:, row], lengths[row] = found.masks, found.scales, len(places)
    inputs = [Noised(laid.input_ids, torch.from_numpy(mask), laid.documents, laid.positions) for mask in masks]
    counts = {"pairs": len(pairs), "tokens": int(lengths.sum()), "positions": int((laid.documents >= 0).sum()) * draws}
    return Drawn(inputs, torch.from_numpy(scales), torch.from_numpy(lengths), counts, reference)
