"""Training batches of good and bad answers, for learning from unpaired feedback.

    data/labels/{train,val,test}.jsonl (records.Label)  --chat.render-->  LabelBatch, a pure function of (seed, step)

Labels are rendered and filtered like pairs (`batches/pairs.py`). Each batch also contains mismatched answers, from
which the loss estimates the policy's distance from its reference: each prompt is combined with the preceding answer in
the step's global batch, and the first prompt with the last answer (as in TRL: (x_1, y_n), (x_2, y_1), ...). The set of
answers thus stays the same, and the matching does not depend on how the batch is split. Mismatched rows are truncated
to `max_length`.

Not guaranteed: that a mismatched answer is wrong; two answers to the same prompt may be consecutive.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipeline.batches import pairs
from pipeline.batches.batch import Answered, Piece, answered, fingerprint_of
from pipeline.ingest.records import Label
from pipeline.run.device import stable_hash
from pipeline.run.errors import DataError
from pipeline.text.tokenizer import Tokenizer

EVALUATION_ANSWERS = 64  # per val batch


@dataclass(frozen=True)
class LabelBatch:
    """`B` answers and as many mismatched ones."""

    matched: Answered  # (B, T)
    mismatched: Answered  # (B, S)
    desirable: Tensor  # (B,) bool
    counts: dict[str, int]  # answers, tokens (of the answers), positions
    divergence: float | None = None  # z0 of the entire step in nats; None: estimate z0 from this batch

    def to(self, device: torch.device | str) -> "LabelBatch":
        """The same batch on another device."""
        matched, mismatched = (
            Answered(*(tensor.to(device, non_blocking=True) for tensor in part))
            for part in (self.matched, self.mismatched)
        )
        return replace(self, matched=matched, mismatched=mismatched, desirable=self.desirable.to(device))


@dataclass(frozen=True)
class EncodedLabel:
    """A label as token ids."""

    label: Label
    piece: Piece  # prompt and answer
    num_prompt: int  # tokens of the prompt


def encode(tokenizer: Tokenizer, label: Label, max_prompt: int, max_length: int) -> EncodedLabel | str:
    """The label as ids, or the reason why it is left out. Raises DataError naming the label."""
    if pairs.is_empty(label.answer):
        return "empty answer"
    prompt, [piece] = pairs.pieces(tokenizer, label, [label.answer])
    return pairs.too_long(len(prompt), [piece], max_prompt, max_length) or EncodedLabel(label, piece, len(prompt))


class LabelSplit:
    """One encoded split, in memory."""

    def __init__(self, path: Path, tokenizer: Tokenizer, max_prompt: int, max_length: int) -> None:
        """Raises DataError for a missing file or an invalid record, or if over a tenth of the labels are left out."""
        self.labels, self.dropped = pairs.usable(
            path, Label, partial(encode, tokenizer), max_prompt=max_prompt, max_length=max_length
        )

    @property
    def num_good(self) -> int:
        """The number of good answers."""
        return sum(encoded.label.desirable for encoded in self.labels)

    def digest(self) -> str:
        """A hash of every id, mask and label, in order."""
        state = hashlib.sha256()
        for encoded in self.labels:
            state.update(len(encoded.piece.ids).to_bytes(8, "little") + encoded.num_prompt.to_bytes(8, "little"))
            state.update(encoded.piece.ids.astype("<i4").tobytes() + np.asarray(encoded.piece.trained).tobytes())
            state.update(bytes([encoded.label.desirable]))
        return state.hexdigest()


def batch_of(labels: Sequence[EncodedLabel], before: Sequence[EncodedLabel], pad: int, max_length: int) -> LabelBatch:
    """Lay out labels as a batch; `before` provides the answers of the mismatched rows."""
    matched = answered([encoded.piece for encoded in labels], pad)
    mismatched = answered([_mismatch(*both, max_length) for both in zip(labels, before, strict=True)], pad)
    return LabelBatch(
        matched,
        mismatched,
        desirable=torch.tensor([encoded.label.desirable for encoded in labels], dtype=torch.bool),
        counts={
            "answers": len(labels),
            "tokens": int((matched.targets >= 0).sum()),
            "positions": int((matched.documents >= 0).sum()),
        },
    )


def _mismatch(prompt_of: EncodedLabel, answer_of: EncodedLabel, max_length: int) -> Piece:
    """The prompt of one label with the answer of another."""
    start, end = prompt_of.num_prompt, answer_of.num_prompt
    trained = np.concatenate([np.zeros(start, dtype=bool), np.asarray(answer_of.piece.trained)[end:]])
    ids = np.concatenate([prompt_of.piece.ids[:start], answer_of.piece.ids[end:]])
    return Piece(ids[:max_length], trained[:max_length])


class LabelStream:
    """Batches of labels, reshuffled each epoch. The val split has one fixed, shuffled order."""

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, *, max_prompt: int, max_length: int, answers: int, seed: int
    ) -> None:
        """`answers`: number per step. Raises DataError like LabelSplit, or if all training labels are equal."""
        path = folder / "train.jsonl"
        self.train = LabelSplit(path, tokenizer, max_prompt, max_length)
        good, total = self.train.num_good, len(self.train.labels)
        if good in (0, total):
            raise DataError(
                f"{path}: expected both good and bad answers, found {good} good and {total - good} bad; add some of the"
                " other kind (`labels` in conf/data, or ratings on the web page), or train on good answers as dialogues"
            )
        self.val = LabelSplit(folder / "val.jsonl", tokenizer, max_prompt, max_length)
        self._pad, self._answers, self._max_length, self._seed = tokenizer.pad, answers, max_length, seed
        self.fingerprint = fingerprint_of([self.train.digest(), self.val.digest(), answers, seed])
        self.tokens_per_epoch = total * max_length
        self._order: tuple[int, np.ndarray] = (-1, np.arange(0))

    def rows(self, step: int, context: int) -> np.ndarray:
        """Positions in the infinite sequence of epochs, (answers,); each epoch contains every label once."""
        return np.arange(step * self._answers, (step + 1) * self._answers)

    def batch(self, step: int, context: int, rows: np.ndarray) -> LabelBatch:
        """The labels at these positions of the step's batch, with mismatched answers from all of it."""
        first = step * self._answers
        before = first + (rows - first - 1) % self._answers
        return batch_of(self._labels_at(rows), self._labels_at(before), self._pad, self._max_length)

    def _labels_at(self, positions: np.ndarray) -> list[EncodedLabel]:
        count = len(self.train.labels)
        return [self.train.labels[self._epoch_order(int(p) // count)[int(p) % count]] for p in positions]

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._order[0] != epoch:
            self._order = (epoch, _shuffled(len(self.train.labels), "labels", self._seed, epoch))
        return self._order[1]

    def evaluation(self, tokens: int) -> Iterator[LabelBatch]:
        """The val split, up to `tokens` answer tokens. Shuffled, because labels for the same prompt may be adjacent."""
        shuffled = [self.val.labels[index] for index in _shuffled(len(self.val.labels), "held-out labels")]
        num_tokens = 0
        for first in range(0, len(shuffled), EVALUATION_ANSWERS):
            if num_tokens >= tokens:
                return
            part = shuffled[first : first + EVALUATION_ANSWERS]
            batch = batch_of(part, [part[-1], *part[:-1]], self._pad, self._max_length)
            num_tokens += batch.counts["tokens"]
            yield batch


def _shuffled(count: int, *key: str | int) -> np.ndarray:
    return np.random.default_rng(stable_hash(*key) % 2**63).permutation(count)
