"""Pack documents into rows of fixed length, order the rows, and stream them as batches.

    documents -> cut -> pack -> a split of packed rows  +  RowOrder (which row when)  ->  PackedStream -> TokenBatch

Packing. Documents longer than a row are cut into row-length pieces. All pieces are packed by best-fit decreasing (Ding
et al. 2024, arXiv:2404.10830, "Fewer truncations improve language modeling") over windows of 65,536 pieces, and open
rows carry over to the next window. Concatenating and cutting instead would cut about half of all Python files. A
document that fits in a row is never cut. Each document follows the preceding document's end of text, so every token of
a file except the very first is predicted exactly once; nothing is dropped.

Order. Each epoch has a keyed permutation of the row indices, computed on demand: step -> positions -> a 4-round Feistel
network keyed by (seed, epoch), with cycle walking (Black and Rogaway 2002, "Ciphers with arbitrary finite domains") ->
row ids. Nothing is stored or shuffled, so the state of a run is one integer and any rank can compute any row. A row id
is `(epoch * num_rows + row) * windows + window`, so the ids determine the content of a batch; `windows` is the packed
length divided by the current context (length curriculum: rows are split, not skipped).

Stream. A batch is a pure function of (seed, step). The val split has its own rows and one fixed order for all seeds, so
that different runs are evaluated on the same tokens.

Not guaranteed: optimal packing; cryptographic quality of the order (for fewer than about 16 rows, few of the possible
orders occur); that all val batches are full (the last one may be smaller).
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import numpy as np

from pipeline.batches.batch import Piece, TokenBatch, fingerprint_of, token_batch
from pipeline.run.device import stable_hash
from pipeline.run.errors import DataError
from pipeline.text.tokenizer import Tokenizer

WINDOW = 65_536
FORMAT = 4  # of the index on disk; increase it when the packing changes


@dataclass(frozen=True)
class Pieces:
    """Documents cut to row length."""

    starts: np.ndarray  # (P,) int64, first token in the .bin file
    lengths: np.ndarray  # (P,) int64, tokens that are inputs
    whole: np.ndarray  # (P,) bool: the piece is a complete document
    continues: np.ndarray  # (P,) bool: the token after the piece is a target; the piece fills its row
    leads: np.ndarray  # (P,) int64, leading tokens that are not targets: context, or the token before the document


def cut(offsets: np.ndarray, context: int, leads: np.ndarray | None = None, reserve: int = 0) -> Pieces:
    """Cut documents, given as n + 1 token offsets, into pieces of at most `context` tokens.

    A document's first piece begins with the preceding document's end of text, which is an input but not a target. So
    the document's first token is a target too, and a model can start a text from scratch. The first document of a file
    has no such token. A document's last token is a target but need not be an input, so a document of up to `context`
    tokens is never cut.

    leads: (n,) number of leading context tokens in each document. As many of them as necessary are dropped from the
    start, so that the document fits in a row with `reserve` tokens free.
    """
    offsets = offsets.astype(np.int64)
    begins = np.maximum(offsets[:-1] - 1, 0)  # (n,)
    num_targets = np.maximum(offsets[1:] - begins - 1, 0)  # (n,): all tokens but the leading one
    own = offsets[:-1]  # (n,): the first non-context token
    if leads is not None:
        own = own + leads.astype(np.int64)
        left_out = np.clip(num_targets + reserve - context, 0, np.maximum(own - begins - 1, 0))
        begins, num_targets = begins + left_out, num_targets - left_out
    counts = -(-num_targets // context)  # pieces of each document; 0 where there is nothing to predict
    document = np.repeat(np.arange(len(counts)), counts)  # (P,)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)  # index within its document
    starts = begins[document] + number * context
    ends = offsets[document + 1]
    return Pieces(
        starts=starts,
        lengths=np.minimum(context, ends - starts),
        whole=counts[document] == 1,
        continues=starts + context < ends,
        leads=np.clip(own[document] - starts, 0, context),
    )


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit decreasing: assign pieces to rows.

    `lengths` (P,) in 1..capacity. Returns `members` (P,), the piece indices row by row and ascending within a row, and
    `row_starts` (R + 1,), the start of each row in `members`. Raises ValueError if a piece cannot fit.
    """
    if len(lengths) and not 0 < lengths.min() <= lengths.max() <= capacity:
        raise ValueError(f"expected piece lengths in 1..{capacity}, found {lengths.min()}..{lengths.max()}")
    row_of = np.empty(len(lengths), dtype=np.int64)
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # by free space
    free = 0  # bit s is set if a row with exactly s free tokens is open
    num_rows = 0
    for start in range(0, len(lengths), WINDOW):
        window = lengths[start : start + WINDOW]
        rows: list[int] = []
        decreasing = np.argsort(-window, kind="stable")
        for length in window[decreasing].tolist():
            fitting = free >> length
            if fitting:
                space = length + (fitting & -fitting).bit_length() - 1  # the tightest row that fits
                row = open_rows[space].pop()
                if not open_rows[space]:
                    free ^= 1 << space
            else:
                space, row = capacity, num_rows
                num_rows += 1
            rows.append(row)
            if remaining := space - length:
                open_rows[remaining].append(row)
                free |= 1 << remaining
        row_of[start + decreasing] = rows
    members = np.argsort(row_of, kind="stable")
    row_starts = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(row_of, minlength=num_rows), out=row_starts[1:])
    return members, row_starts


@dataclass(frozen=True)
class Packing:
    """The index of a packed split: its pieces, and the row of each."""

    starts: np.ndarray  # (P,) int64, first token of each piece in the .bin file, row by row
    lengths: np.ndarray  # (P,) int64, tokens to read from the .bin file
    continues: np.ndarray  # (P,) bool
    infilled: np.ndarray  # (P,) bool: fill-in-the-middle, with reserved room
    leads: np.ndarray  # (P,) int64: tokens of each piece before the first target
    row_starts: np.ndarray  # (R + 1,) int64, start of each row in the arrays above

    @property
    def num_rows(self) -> int:
        """Number of packed rows."""
        return len(self.row_starts) - 1


def packing_of(pieces: Pieces, infilled: np.ndarray, reserve: int, context: int) -> Packing:
    """Pack pieces into rows of `context` tokens; infilled pieces take `reserve` extra tokens."""
    members, row_starts = pack(pieces.lengths + reserve * infilled, context)
    return Packing(
        starts=pieces.starts[members],
        lengths=pieces.lengths[members],
        continues=pieces.continues[members],
        infilled=infilled[members],
        leads=pieces.leads[members],
        row_starts=row_starts,
    )


def cached(cache: Path, parts: list[str | int | float], build: Callable[[], Packing]) -> Packing:
    """The packing for the key `parts`, memory-mapped from `cache`. If missing, it is built and renamed into place."""
    key = fingerprint_of([FORMAT, *parts])
    folder = cache / f"packing-{key}"
    if not folder.is_dir():
        packing = build()
        temporary = cache / f".packing-{key}.{os.getpid()}.part"
        temporary.mkdir(parents=True, exist_ok=True)
        for field in fields(Packing):
            np.save(temporary / f"{field.name}.npy", getattr(packing, field.name))
        try:
            temporary.rename(folder)
        except OSError:  # another process was faster and wrote the same content
            shutil.rmtree(temporary)
    return Packing(*(np.load(folder / f"{field.name}.npy", mmap_mode="r") for field in fields(Packing)))


# --- order of the rows -----------------------------------------------------------------------------------------------


ROUNDS = 4


def mix(values: np.ndarray, key: int) -> np.ndarray:
    """A 64-bit hash of each value under a key, uint64 of the same shape (the finalizer of SplitMix64)."""
    h = (values.astype(np.uint64) ^ np.uint64(key)) + np.uint64(0x9E3779B97F4A7C15)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


def permute(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """The image of each index of range(size) under the permutation given by `key`, (n,) int64 -> (n,) int64."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    keys = [stable_hash(key, round_) for round_ in range(ROUNDS)]
    out = index.astype(np.uint64)
    outside = np.arange(len(out))
    while len(outside):  # the domain is a power of 4, up to 4 times `size`: walk cycles until inside
        left, right = out[outside] >> shift, out[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (mix(right, round_key) & mask)
        out[outside] = (left << shift) | right
        outside = outside[out[outside] >= size]
    return out.astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class RowOrder:
    """The order of `num_rows` packed rows of `context` tokens, with `tokens_per_step` tokens per step."""

    num_rows: int
    context: int
    tokens_per_step: int
    seed: int

    def __post_init__(self) -> None:
        if self.tokens_per_step <= 0 or self.tokens_per_step % self.context:
            raise ValueError(
                f"tokens_per_step: expected a multiple of the context {self.context}, found {self.tokens_per_step}"
            )

    @property
    def rows_per_step(self) -> int:
        """Packed rows in one step's batch."""
        return self.tokens_per_step // self.context

    def positions(self, step: int) -> np.ndarray:
        """Positions of a step in the infinite sequence of rows, (rows_per_step,) int64."""
        return np.arange(step * self.rows_per_step, (step + 1) * self.rows_per_step, dtype=np.int64)

    def num_windows(self, context: int) -> int:
        """Number of windows per packed row at this context. Raises ValueError if that is not a whole number."""
        if context <= 0 or self.context % context:
            raise ValueError(f"context: expected a divisor of the packed length {self.context}, found {context}")
        return self.context // context

    def at(self, positions: np.ndarray, context: int) -> np.ndarray:
        """Row ids at the positions, with the windows of a packed row adjacent: (n,) -> (n * windows,) int64."""
        windows = self.num_windows(context)
        epochs, index = np.divmod(positions, self.num_rows)
        rows = np.empty_like(index)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            rows[in_epoch] = permute(index[in_epoch], self.num_rows, stable_hash("order", self.seed, int(epoch)))
        ids = (epochs * self.num_rows + rows)[:, None] * windows + np.arange(windows)  # (n, windows)
        return ids.reshape(-1)

    def locate(self, ids: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
        """Split row ids into packed rows, including the epoch (`epoch * num_rows + row`), and window indices."""
        return np.divmod(ids, self.num_windows(context))


# --- streams ---------------------------------------------------------------------------------------------------------


class PackedSplit(Protocol):
    """A split as packed rows of pieces."""

    @property
    def num_rows(self) -> int:
        """Number of packed rows."""
        ...

    @property
    def num_tokens(self) -> int:
        """Number of tokens, each counted once, excluding padding."""
        ...

    def pieces(self, epoch: int, row: int) -> list[Piece]:
        """The pieces in a row; only infilling depends on the epoch."""
        ...


@dataclass(frozen=True)
class Splits:
    """Two packed splits. `name` and `left_out` (a sentence about unusable data) appear in error messages."""

    name: str
    train: PackedSplit
    val: PackedSplit
    left_out: str = ""


class PackedStream:
    """A `batch.TokenStream` over two packed splits; `at` is for `MixtureStream`."""

    def __init__(
        self,
        splits: Splits,
        tokenizer: Tokenizer,
        *,
        context: int,
        tokens_per_step: int,
        seed: int,
        fingerprint: str,
        document_mask: bool = True,
    ) -> None:
        """Raises DataError if the train split does not fill one batch, ValueError if sizes do not divide evenly."""
        train, val = splits.train, splits.val
        self.name = splits.name
        self.context = context
        self.tokens_per_step = tokens_per_step
        self.fingerprint = fingerprint
        self.rows_per_epoch = train.num_rows
        self.tokens_per_epoch = train.num_rows * context
        self.num_tokens = train.num_tokens
        self.has_val = val.num_rows > 0
        self._train, self._val, self._tokenizer, self._document_mask = train, val, tokenizer, document_mask
        self._order = RowOrder(num_rows=train.num_rows, context=context, tokens_per_step=tokens_per_step, seed=seed)
        if self.tokens_per_epoch < tokens_per_step:
            best = f"{self.tokens_per_epoch}" if train.num_rows else f"none (no rows at context {context})"
            raise DataError(
                f"{self.name}: too few tokens for one batch: got {train.num_tokens} tokens in {train.num_rows} packed "
                f"rows of {context}, but tokens_per_step={tokens_per_step}; largest tokens_per_step that works: "
                f"{best}. Lower tokens_per_step, change the context, or add data. {splits.left_out}".rstrip()
            )

    def at(self, positions: np.ndarray, context: int) -> np.ndarray:
        """Row ids at positions in the infinite sequence of packed rows, (n,) -> (n * windows,) int64."""
        return self._order.at(positions, context)

    def rows(self, step: int, context: int) -> np.ndarray:
        """Ids of the rows of this step's global batch, (tokens_per_step / context,) int64."""
        return self.at(self._order.positions(step), context)

    def batch(self, step: int, context: int, rows: np.ndarray) -> TokenBatch:
        """The rows with these ids, (B, context), in this order; `step` is unused (the ids contain the epoch)."""
        return self._batch(self._train, self._order, context, rows)

    def evaluation(self, tokens: int) -> Iterator[TokenBatch]:
        """The packed val split, never infilled, up to `tokens` targets. Raises DataError if it is empty."""
        if not self._val.num_rows:
            raise DataError(f"{self.name}: the val split is empty; add documents to it")
        order = RowOrder(
            num_rows=self._val.num_rows, context=self.context, tokens_per_step=self.tokens_per_step, seed=0
        )
        ids = order.at(np.arange(self._val.num_rows), self.context)  # one epoch, in a fixed order
        num_targets = 0
        for start in range(0, len(ids), order.rows_per_step):
            if num_targets >= tokens:
                return
            batch = self._batch(self._val, order, self.context, ids[start : start + order.rows_per_step])
            num_targets += batch.num_targets
            yield batch

    def _batch(self, split: PackedSplit, order: RowOrder, context: int, rows: np.ndarray) -> TokenBatch:
        packed, window = order.locate(rows, context)
        # A row is read once, however many of its windows are in the batch.
        unique_rows, index = np.unique(packed, return_inverse=True)
        return token_batch(
            [split.pieces(*divmod(int(row), split.num_rows)) for row in unique_rows],
            index * order.num_windows(context) + window,
            packed=order.context,
            context=context,
            pad=self._tokenizer.pad,
            byte_lengths=self._tokenizer.byte_lengths,
            document_mask=self._document_mask,
        )
