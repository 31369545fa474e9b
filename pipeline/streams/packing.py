"""Whole documents into rows of fixed length, with little padding and no document cut that fits a row.

Documents longer than a row become pieces of a row's length; then best-fit decreasing (Ding et al. 2024,
arXiv:2404.10830, "Fewer truncations improve language modeling") over windows of 65,536 pieces, with the rows that are
still open carried from window to window. Concatenating and cutting instead would cut about half of all Python files.

A document is read after the end of text before it, so every token of a file but the very first is predicted exactly
once; nothing is dropped. Not promised: the optimal packing.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

WINDOW = 65_536
FORMAT = 3  # of the index on disk; raise it when the packing changes


@dataclass(frozen=True)
class Pieces:
    """Documents cut to a row's length."""

    starts: np.ndarray  # (P,) int64, first token in the .bin file
    lengths: np.ndarray  # (P,) int64, tokens that are read
    whole: np.ndarray  # (P,) bool: the piece is a whole document
    continues: np.ndarray  # (P,) bool: one more token is predicted behind the piece, which fills its row


def cut(offsets: np.ndarray, context: int) -> Pieces:
    """Cut documents, given as n + 1 token offsets, into pieces of at most `context` tokens.

    A document's first piece begins with the token before it, the end of text of another document, which is read and not
    predicted: so its first token is a target too, and a model can begin a text from nothing. The first document of a
    file has no such lead. A document's last token is a target and need not be read, so a document of up to `context`
    tokens is never cut.
    """
    offsets = offsets.astype(np.int64)
    begins = np.maximum(offsets[:-1] - 1, 0)  # (n,)
    num_targets = np.maximum(offsets[1:] - begins - 1, 0)  # (n,): all but the token that it begins with
    counts = -(-num_targets // context)  # pieces of each document; 0 where there is nothing to predict
    document = np.repeat(np.arange(len(counts)), counts)  # (P,)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)  # of the piece in its document
    starts = begins[document] + number * context
    ends = offsets[document + 1]
    return Pieces(
        starts=starts,
        lengths=np.minimum(context, ends - starts),
        whole=counts[document] == 1,
        continues=starts + context < ends,
    )


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit decreasing: which piece goes into which row.

    `lengths` (P,) in 1..capacity. Returns `members` (P,), the piece numbers row by row and ascending within a row, and
    `row_starts` (R + 1,), where each row begins in it. Raises ValueError when a piece cannot fit.
    """
    if len(lengths) and not 0 < lengths.min() <= lengths.max() <= capacity:
        raise ValueError(f"expected piece lengths in 1..{capacity}, found {lengths.min()}..{lengths.max()}")
    row_of = np.empty(len(lengths), dtype=np.int64)
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # by free space
    free = 0  # bit s is set when a row with exactly s free tokens is open
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
            if left := space - length:
                open_rows[left].append(row)
                free |= 1 << left
        row_of[start + decreasing] = rows
    members = np.argsort(row_of, kind="stable")
    row_starts = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(row_of, minlength=num_rows), out=row_starts[1:])
    return members, row_starts


@dataclass(frozen=True)
class Packing:
    """The index of a packed split: pieces, and which of them stand in which row."""

    starts: np.ndarray  # (P,) int64, first token of each piece in the .bin file, row by row
    lengths: np.ndarray  # (P,) int64, tokens in the .bin file that are read
    continues: np.ndarray  # (P,) bool
    infilled: np.ndarray  # (P,) bool: fill-in-the-middle, with room reserved for it
    row_starts: np.ndarray  # (R + 1,) int64, into the arrays above

    @property
    def num_rows(self) -> int:
        """Rows of the packing."""
        return len(self.row_starts) - 1


def packing_of(pieces: Pieces, infilled: np.ndarray, reserve: int, context: int) -> Packing:
    """Pack pieces into rows of `context`; those that are to be infilled take `reserve` tokens more."""
    members, row_starts = pack(pieces.lengths + reserve * infilled, context)
    return Packing(
        starts=pieces.starts[members],
        lengths=pieces.lengths[members],
        continues=pieces.continues[members],
        infilled=infilled[members],
        row_starts=row_starts,
    )


def cached(cache: Path, parts: list[str | int | float], build: Callable[[], Packing]) -> Packing:
    """The packing for `parts` from `cache`, memory-mapped; built and written by rename when it is not there yet."""
    key = hashlib.sha256(json.dumps([FORMAT, *parts]).encode()).hexdigest()[:16]
    folder = cache / f"packing-{key}"
    if not folder.is_dir():
        packing = build()
        part = cache / f".packing-{key}.{os.getpid()}.part"
        part.mkdir(parents=True, exist_ok=True)
        for field in fields(Packing):
            np.save(part / f"{field.name}.npy", getattr(packing, field.name))
        try:
            part.rename(folder)
        except OSError:  # another process was faster; what it wrote is the same
            shutil.rmtree(part)
    return Packing(*(np.load(folder / f"{field.name}.npy", mmap_mode="r") for field in fields(Packing)))
