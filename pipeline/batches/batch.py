"""Training batches. This is the only module that shifts targets relative to inputs.

A packed row contains several pieces (documents, dialogues) side by side:

    tokens     E a b E  E d E  P        E: end of text, which also precedes each text document; P: padding
    input_ids  E a b E  E d E  P
    targets    a b E -  d E -  -        -: -100, not trained: no target crosses a document boundary
    documents  0 0 0 0  1 1 1 -1        tokens attend only to tokens with the same index
    positions  0 1 2 3  0 1 2  0

Length curriculum: rows are shifted first and then split into windows, so a window's last target is not lost.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

IGNORED = -100  # torch's ignore_index
PADDING = -1  # the document index of padding


@dataclass(frozen=True)
class TokenBatch:
    """`B` windows of `T` tokens with the target token at each position."""

    input_ids: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64, -100 where nothing is trained (next document, prompt, padding)
    documents: Tensor  # (B, T) int32, attention segment within the row; padding is its own segment (-1)
    positions: Tensor  # (B, T) int64, from 0 in each segment
    num_bytes: int  # UTF-8 bytes of the trained targets; special tokens count as 0

    @cached_property
    def num_targets(self) -> int:
        """The number of positions with a target, counted on the CPU before the batch moves to a device."""
        return int((self.targets >= 0).sum())

    @property
    def counts(self) -> dict[str, int]:
        """The counts by which sums over the batch are divided."""
        return {"tokens": self.num_targets, "bytes": self.num_bytes, "positions": self.input_ids.numel()}

    def to(self, device: torch.device | str) -> "TokenBatch":
        """Copy the batch to another device without blocking."""
        count = self.num_targets
        tensors = {name: getattr(self, name).to(device, non_blocking=True) for name in _TENSORS}
        moved = replace(self, **tensors)
        moved.__dict__["num_targets"] = count  # fills the cached property, which avoids a device sync
        return moved


class Tokens(Protocol):
    """The tensors of a batch that models and scorers need."""

    @property
    def input_ids(self) -> Tensor: ...  # (B, T)
    @property
    def targets(self) -> Tensor: ...  # (B, T)
    @property
    def documents(self) -> Tensor: ...  # (B, T)
    @property
    def positions(self) -> Tensor: ...  # (B, T)


_TENSORS = ("input_ids", "targets", "documents", "positions")


def concatenate(batches: Sequence[TokenBatch], order: np.ndarray) -> TokenBatch:
    """Concatenate batches of the same context and reorder the rows by `order`, a permutation of all rows."""
    index = torch.from_numpy(order)
    tensors = {name: torch.cat([getattr(batch, name) for batch in batches])[index] for name in _TENSORS}
    return TokenBatch(**tensors, num_bytes=sum(batch.num_bytes for batch in batches))


class TokenStream(Protocol):
    """The training data interface of `fit`: batches as a pure function of (seed, step)."""

    fingerprint: str  # of the data, the seed and the row shape; a run cannot resume with a different one
    rows_per_epoch: int  # packed rows
    tokens_per_epoch: int  # positions, including padding: rows_per_epoch * packed length

    def rows(self, step: int, context: int) -> np.ndarray:
        """Ids of the rows of this step's global batch, (R,) int64; R * context is constant."""
        ...

    def batch(self, step: int, context: int, rows: np.ndarray) -> TokenBatch:
        """The rows with these ids, for example those of one rank or micro-batch. Depends only on the ids."""
        ...

    def evaluation(self, tokens: int) -> Iterator[TokenBatch]:
        """The val split in a fixed order, up to `tokens` targets."""
        ...


class Piece(NamedTuple):
    """Consecutive tokens of a document in a row. May be one token longer than the row, to provide the last target."""

    ids: np.ndarray  # (n,)
    trained: np.ndarray | bool  # (n,) bool: which ids may be targets


def token_batch(
    rows: Sequence[Sequence[Piece]],
    windows: np.ndarray,
    *,
    packed: int,
    context: int,
    pad: int,
    byte_lengths: np.ndarray,
    document_mask: bool = True,
) -> TokenBatch:
    """Lay out pieces in rows of `packed` tokens, shift targets, split into windows of `context`, and select `windows`.

    `windows` (n,) are window indices across all rows: row * (packed / context) + window. `byte_lengths` (V,): number of
    bytes of each id. If `document_mask` is false, a row is one segment (an ablation); targets stay within documents.
    """
    tokens = np.full((len(rows), packed + 1), pad, dtype=np.int64)  # (R, packed + 1): last column only for targets
    documents = np.full((len(rows), packed + 1), PADDING, dtype=np.int32)
    trained = np.zeros((len(rows), packed + 1), dtype=bool)
    for row, pieces in enumerate(rows):
        start = 0
        for number, piece in enumerate(pieces):
            end = start + len(piece.ids)
            assert end <= packed or (end == packed + 1 and not start), "pieces do not fit their row"
            tokens[row, start:end] = piece.ids
            documents[row, start:end] = number
            trained[row, start:end] = piece.trained
            start = end
    within = (documents[:, 1:] == documents[:, :-1]) & trained[:, 1:]
    targets = np.where(within, tokens[:, 1:], IGNORED).reshape(-1, context)[windows]  # (n, context)
    inputs = tokens[:, :-1].reshape(-1, context)[windows]
    segments = documents[:, :-1].reshape(-1, context)[windows]
    if not document_mask:
        segments = np.zeros_like(segments)
    return TokenBatch(
        input_ids=torch.from_numpy(inputs),
        targets=torch.from_numpy(targets),
        documents=torch.from_numpy(segments),
        positions=torch.from_numpy(_positions(segments)),
        num_bytes=int(byte_lengths[targets[targets >= 0]].sum()),
    )


class Answered(NamedTuple):
    """One prompt and answer per row, padded to the longest. The last token is also an input, not only a target."""

    input_ids: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64, the next token where it is trained, else -100
    documents: Tensor  # (B, T) int32, 0, and -1 in the padding
    positions: Tensor  # (B, T) int64, from 0; 0 in the padding


def answered(rows: Sequence[Piece], pad: int) -> Answered:
    """Put one piece into each row and shift targets. Padding is determined by lengths alone, so `pad` may be any id."""
    lengths = np.array([len(row.ids) for row in rows], dtype=np.int64)
    longest = int(lengths.max(initial=1))
    tokens = np.full((len(rows), longest + 1), pad, dtype=np.int64)  # last column only for targets
    trained = np.zeros((len(rows), longest + 1), dtype=bool)
    for number, row in enumerate(rows):
        tokens[number, : len(row.ids)] = row.ids
        trained[number, : len(row.ids)] = row.trained
    column = np.arange(longest)
    inside = column < lengths[:, None]
    return Answered(
        torch.from_numpy(np.ascontiguousarray(tokens[:, :-1])),
        torch.from_numpy(np.where(trained[:, 1:], tokens[:, 1:], IGNORED)),
        torch.from_numpy(np.where(inside, 0, PADDING).astype(np.int32)),
        torch.from_numpy(np.where(inside, column, 0)),
    )


def _positions(segments: np.ndarray) -> np.ndarray:
    """Distance of each position from the start of its run of equal indices, (B, T) -> (B, T) int64."""
    column = np.arange(segments.shape[1], dtype=np.int64)
    starts = np.ones_like(segments, dtype=bool)
    np.not_equal(segments[:, 1:], segments[:, :-1], out=starts[:, 1:])
    return column - np.maximum.accumulate(np.where(starts, column, 0), axis=1)


def fingerprint_of(parts: Sequence[object]) -> str:
    """The first 16 hex digits of the sha256 of `parts`, serialized as a JSON list."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
