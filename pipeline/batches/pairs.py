"""Training batches of answer pairs, for reward models and the DPO family.

    data/preferences/{train,val,test}.jsonl (records.Pair)  --chat.render-->  PairBatch, a pure function of (seed, step)

`text/chat.py` renders prompts and answers; a rendered prompt is a prefix of the rendered conversation. The answer is
the assistant text after the prompt, including its end of turn. Pairs with equal or empty answers and overlong pairs are
left out and counted (a truncated answer would lose its end). The stage stops if over a tenth of the pairs are left out.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.batches.batch import Piece, answered, fingerprint_of
from pipeline.ingest import records
from pipeline.ingest.records import Label, Message, Pair
from pipeline.run.device import stable_hash
from pipeline.run.errors import DataError
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

MOST_DROPPED = 0.1
EVALUATION_PAIRS = 32  # per val batch
R = TypeVar("R", Pair, Label)
E = TypeVar("E")


@dataclass(frozen=True)
class PairBatch:
    """`P` pairs as 2P rows: the chosen answers, then the rejected ones in the same order."""

    input_ids: Tensor  # (2P, T) int64
    targets: Tensor  # (2P, T) int64, -100 outside the answers
    documents: Tensor  # (2P, T) int32, -1 in the padding
    positions: Tensor  # (2P, T) int64
    margins: Tensor  # (P,) float32, 0 where the data has none
    reference: Tensor | None  # (2P,) float32, summed reference log-probabilities, if precomputed
    counts: dict[str, int]  # pairs, tokens (of the answers), positions

    @property
    def ends(self) -> Tensor:
        """True at the last token of each row, (2P, T): where the reward is read."""
        last = (self.documents >= 0).sum(1) - 1
        return torch.arange(self.documents.shape[1], device=last.device) == last[:, None]

    @property
    def said(self) -> Tensor:
        """True where the input is an answer token, (2P, T). In order, these tokens are the targets other than -100."""
        return functional.pad(self.targets >= 0, (1, -1))  # shifted right by one

    def to(self, device: torch.device | str) -> "PairBatch":
        """The same batch on another device."""
        names = ("input_ids", "targets", "documents", "positions", "margins")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return replace(self, **moved, reference=None if self.reference is None else self.reference.to(device))


@dataclass(frozen=True)
class Encoded:
    """A pair as token ids."""

    pair: Pair
    chosen: Piece
    rejected: Piece

    @property
    def margin(self) -> float:
        """The reward margin given in the data, else 0."""
        return self.pair.margin or 0.0


def encode(tokenizer: Tokenizer, pair: Pair, max_prompt: int, max_length: int) -> Encoded | str:
    """The pair as ids, or the reason why it is left out. Raises DataError naming the pair."""
    if pair.chosen == pair.rejected:
        return "chosen equals rejected"
    if any(is_empty(answer) for answer in (pair.chosen, pair.rejected)):
        return "empty answer"
    prompt, sides = pieces(tokenizer, pair, [pair.chosen, pair.rejected])
    return too_long(len(prompt), sides, max_prompt, max_length) or Encoded(pair, *sides)


def is_empty(answer: Sequence[Message]) -> bool:
    """Whether the assistant turns have neither content nor calls."""
    return not any((m.get("content") or "").strip() or m.get("tool_calls") for m in answer if m["role"] == "assistant")


def too_long(num_prompt: int, answers: Sequence[Piece], max_prompt: int, max_length: int) -> str:
    """The reason why a record with these lengths is left out; empty if it is kept."""
    if num_prompt > max_prompt:
        return "prompt too long"
    return "answer too long" if max(len(piece.ids) for piece in answers) > max_length else ""


def pieces(
    tokenizer: Tokenizer, record: Pair | Label, answers: Sequence[list[Message]]
) -> tuple[list[int], list[Piece]]:
    """The ids of the prompt, and of the prompt with each answer. Raises DataError naming the record."""
    try:
        prompt = chat.render(tokenizer, record.prompt, record.tools, generation_prompt=True).ids
        return prompt, [_answer_piece(tokenizer, record, answer, prompt) for answer in answers]
    except DataError as error:
        raise DataError(f"{type(record).__name__.lower()} {record.id}: {error}") from error


def _answer_piece(tokenizer: Tokenizer, record: Pair | Label, answer: list[Message], prompt: list[int]) -> Piece:
    """Prompt and answer up to the last assistant token; trained only after the prompt."""
    whole = chat.render(tokenizer, [*record.prompt, *answer], record.tools)
    trained = np.array(whole.trained, dtype=bool)
    trained[: len(prompt)] = False
    end = int(np.flatnonzero(trained)[-1]) + 1
    return Piece(np.array(whole.ids[:end], dtype=np.int64), trained[:end])


def usable(
    path: Path, kind: type[R], encode: Callable[[R, int, int], E | str], *, max_prompt: int, max_length: int
) -> tuple[list[E], Counter[str]]:
    """The encoded records of a split, and the number left out for each reason.

    Raises DataError for a missing file or an invalid record, or if over a tenth of the records are left out.
    """
    what = {Pair: "preference pairs", Label: "labels"}[kind]
    if not path.is_file():
        raise DataError(f"{path}: expected {what} here, found none; run dvc repro stage_tasks")
    kept: list[E] = []
    dropped: Counter[str] = Counter()
    for record in records.read(path, kind):
        encoded = encode(record, max_prompt, max_length)
        if isinstance(encoded, str):
            dropped[encoded] += 1
        else:
            kept.append(encoded)
    total = len(kept) + dropped.total()
    if not kept or dropped.total() > MOST_DROPPED * total:
        drops = ", ".join(f"{number} {reason}" for reason, number in dropped.most_common())
        raise DataError(
            f"{path}: {dropped.total()} of {total} {what.split()[-1]} cannot be used ({drops or 'the file is empty'});"
            f" at most 10% may be left out. Fix the file, or raise max_prompt ({max_prompt}) and max_length"
            f" ({max_length})"
        )
    return kept, dropped


class PairSplit:
    """One encoded split, in memory."""

    def __init__(self, path: Path, tokenizer: Tokenizer, max_prompt: int, max_length: int) -> None:
        """Raises DataError for a missing file or an invalid record, or if over a tenth of the pairs are left out."""
        self.pairs, self.dropped = usable(
            path, Pair, partial(encode, tokenizer), max_prompt=max_prompt, max_length=max_length
        )

    def digest(self) -> str:
        """A hash of every id and mask, in order."""
        state = hashlib.sha256()
        for encoded in self.pairs:
            for piece in (encoded.chosen, encoded.rejected):
                state.update(len(piece.ids).to_bytes(8, "little"))
                state.update(piece.ids.astype("<i4").tobytes() + np.asarray(piece.trained).tobytes())
            state.update(str(encoded.margin).encode())
        return state.hexdigest()


def batch_of(pairs: Sequence[Encoded], pad: int, reference: np.ndarray | None = None) -> PairBatch:
    """Lay out pairs as a batch; `reference` (2P,): summed reference log-probabilities, chosen answers first."""
    rows = answered([encoded.chosen for encoded in pairs] + [encoded.rejected for encoded in pairs], pad)
    return PairBatch(
        *rows,
        margins=torch.tensor([encoded.margin for encoded in pairs], dtype=torch.float32),
        reference=None if reference is None else torch.from_numpy(reference),
        counts={
            "pairs": len(pairs),
            "tokens": int((rows.targets >= 0).sum()),
            "positions": int((rows.documents >= 0).sum()),
        },
    )


class PairStream:
    """Batches of pairs, reshuffled each epoch. The val split stays in file order."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        *,
        max_prompt: int,
        max_length: int,
        pairs: int,
        seed: int,
        label_flip: float = 0.0,
        more: Sequence[Encoded] = (),
    ) -> None:
        """`pairs`: pairs per step. `more`: additional training pairs. `label_flip`: share of training pairs whose
        answers are swapped, chosen by a hash of the pair's id.
        """
        self.train = PairSplit(folder / "train.jsonl", tokenizer, max_prompt, max_length)
        self.val = PairSplit(folder / "val.jsonl", tokenizer, max_prompt, max_length)
        self._pad, self._pairs, self._seed = tokenizer.pad, pairs, seed
        self.train.pairs += more
        if label_flip:
            self.train.pairs = [flipped(p, label_flip, seed) for p in self.train.pairs]
        self.fingerprint = fingerprint_of([self.train.digest(), self.val.digest(), pairs, seed])
        self.tokens_per_epoch = len(self.train.pairs) * 2 * max_length
        self.references: dict[str, np.ndarray] = {}  # by split: (n, 2) reference log-probability sums
        self._order: tuple[int, np.ndarray] = (-1, np.arange(0))

    def rows(self, step: int, context: int) -> np.ndarray:
        """Indices of the step's pairs, (pairs,); each epoch contains every pair once."""
        positions = np.arange(step * self._pairs, (step + 1) * self._pairs)
        count = len(self.train.pairs)
        return np.array([self._epoch_order(int(position) // count)[int(position) % count] for position in positions])

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._order[0] != epoch:
            draws = np.random.default_rng(stable_hash("pairs", self._seed, epoch) % 2**63)
            self._order = (epoch, draws.permutation(len(self.train.pairs)))
        return self._order[1]

    def batch(self, step: int, context: int, rows: np.ndarray) -> PairBatch:
        """The pairs with these indices."""
        return self._batch("train", self.train, rows)

    def _batch(self, name: str, split: PairSplit, rows: np.ndarray) -> PairBatch:
        sums = self.references[name][rows].T.reshape(-1) if name in self.references else None
        return batch_of([split.pairs[int(row)] for row in rows], self._pad, sums)

    def batches(self, name: str) -> Iterator[PairBatch]:
        """All batches of a split ("train" or "val") in file order."""
        split = self.train if name == "train" else self.val
        for first in range(0, len(split.pairs), EVALUATION_PAIRS):
            yield self._batch(name, split, np.arange(first, min(first + EVALUATION_PAIRS, len(split.pairs))))

    def evaluation(self, tokens: int) -> Iterator[PairBatch]:
        """The val split, up to `tokens` answer tokens."""
        num_tokens = 0
        for batch in self.batches("val"):
            if num_tokens >= tokens:
                return
            num_tokens += batch.counts["tokens"]
            yield batch


def flipped(encoded: Encoded, share: float, seed: int) -> Encoded:
    """The pair, with its answers swapped if the hash of its id, scaled to [0, 1), is below `share`."""
    if stable_hash("label flip", seed, encoded.pair.id) / 2**64 >= share:
        return encoded
    return Encoded(encoded.pair, encoded.rejected, encoded.chosen)
