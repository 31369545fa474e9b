"""In which order rows are visited: a keyed permutation of the row numbers for each epoch, computed where it is needed.

Step -> positions -> a 4-round Feistel network keyed by (seed, epoch), walked until it falls inside (Black and Rogaway
2002, "Ciphers with arbitrary finite domains") -> row ids. Nothing is stored or shuffled, so the state of a run is one
integer and any rank can compute any row. A row id is `(epoch * num_rows + row) * windows + window`, so an id alone says
what a batch holds; `windows` is the packed length over the present context (curriculum by length: rows are split, not
skipped).

Not promised: cryptographic quality; for fewer than about 16 rows few of the possible orders occur.
"""

from dataclasses import dataclass

import numpy as np

from pipeline.device import stable_hash

ROUNDS = 4


def mix(values: np.ndarray, key: int) -> np.ndarray:
    """A 64-bit hash of each value under a key, uint64 of the same shape (the finaliser of SplitMix64)."""
    h = (values.astype(np.uint64) ^ np.uint64(key)) + np.uint64(0x9E3779B97F4A7C15)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


def permute(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """Where each index of range(size) goes under the key's permutation; (n,) int64 in, (n,) int64 out."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    keys = [stable_hash(key, round_) for round_ in range(ROUNDS)]
    out = index.astype(np.uint64)
    walking = np.arange(len(out))
    while len(walking):  # the domain is a power of 4, up to 4 times `size`: walk the cycle until inside
        left, right = out[walking] >> shift, out[walking] & mask
        for round_key in keys:
            left, right = right, left ^ (mix(right, round_key) & mask)
        out[walking] = (left << shift) | right
        walking = walking[out[walking] >= size]
    return out.astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class RowOrder:
    """The order of `num_rows` packed rows of `context` tokens, `tokens_per_step` of them a step."""

    num_rows: int
    context: int
    tokens_per_step: int
    seed: int

    def __post_init__(self) -> None:
        """Refuse sizes that do not divide."""
        if self.tokens_per_step <= 0 or self.tokens_per_step % self.context:
            raise ValueError(
                f"tokens_per_step: expected a multiple of the context {self.context}, found {self.tokens_per_step}"
            )

    @property
    def rows_per_step(self) -> int:
        """Packed rows in one step's batch."""
        return self.tokens_per_step // self.context

    def positions(self, step: int) -> np.ndarray:
        """Positions in the endless sequence of rows that a step covers, (rows_per_step,) int64."""
        return np.arange(step * self.rows_per_step, (step + 1) * self.rows_per_step, dtype=np.int64)

    def num_windows(self, context: int) -> int:
        """Windows that a packed row is split into at this context. Raises ValueError when it does not divide."""
        if context <= 0 or self.context % context:
            raise ValueError(f"context: expected a divisor of the packed length {self.context}, found {context}")
        return self.context // context

    def at(self, positions: np.ndarray, context: int) -> np.ndarray:
        """Row ids at the positions, each packed row's windows side by side: (n,) -> (n * windows,) int64."""
        windows = self.num_windows(context)
        epochs, index = np.divmod(positions, self.num_rows)
        rows = np.empty_like(index)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            rows[here] = permute(index[here], self.num_rows, stable_hash("order", self.seed, int(epoch)))
        ids = (epochs * self.num_rows + rows)[:, None] * windows + np.arange(windows)  # (n, windows)
        return ids.reshape(-1)

    def locate(self, ids: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
        """Take row ids apart: packed rows with their epoch (`epoch * num_rows + row`), and the window in each."""
        return np.divmod(ids, self.num_windows(context))
