"""Several streams as one, row by row in fixed proportion, by whole weights.

    [(2, CorpusStream(text)), (1, CorpusStream(code))]  ->  MixtureStream: text, text, code, text, text, code, ...

Not promised: that an epoch of the mixture reads each member once. A member is read as often as its weight asks; compare
its `rows_per_epoch` with its share to learn how often.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from pipeline.batches.batch import TokenBatch, concatenate, fingerprint_of
from pipeline.batches.packing import PackedStream
from pipeline.run.errors import DataError


class MixtureStream:
    """Rows of several streams in fixed proportion: one period of smooth weighted round-robin, repeated.

    A row id is `member's row id * number of members + member`. After any number of rows each member has its share
    to within one row; each member walks through its own epochs. An epoch of the mixture is as many rows as all members
    hold.
    """

    def __init__(self, members: Sequence[tuple[int, "PackedStream | MixtureStream"]]) -> None:
        """`members` are (weight, stream), weights whole and positive. Raises ValueError when shapes differ."""
        weights = [weight for weight, _ in members]
        self._members = [stream for _, stream in members]
        if not members or any(int(weight) != weight or weight < 1 for weight in weights):
            raise ValueError(f"mixture: expected whole weights of at least 1, found {weights}")
        if len({(stream.context, stream.tokens_per_step) for stream in self._members}) > 1:
            raise ValueError("mixture: members must have the same context and tokens_per_step")
        self._weights = np.array(weights, dtype=np.int64)
        self._period = round_robin(weights)  # (sum of weights,) member of each slot
        self._nth = np.zeros_like(self._period)  # number of the member's earlier slots in the period
        for member in range(len(members)):
            slots = self._period == member
            self._nth[slots] = np.arange(slots.sum())
        self.context = self._members[0].context
        self.tokens_per_step = self._members[0].tokens_per_step
        self.has_val: bool = any(stream.has_val for stream in self._members)
        self.rows_per_epoch: int = sum(stream.rows_per_epoch for stream in self._members)
        self.tokens_per_epoch: int = sum(stream.tokens_per_epoch for stream in self._members)
        self.fingerprint = fingerprint_of([[int(weight), stream.fingerprint] for weight, stream in members])

    def at(self, positions: np.ndarray, context: int) -> np.ndarray:
        """Row ids at positions of the mixed sequence, (n,) -> (n * windows,) int64."""
        periods, slots = np.divmod(positions, len(self._period))
        owner = self._period[slots]
        index = periods * self._weights[owner] + self._nth[slots]  # position in the member's own sequence
        ids = np.empty((len(positions), self.context // context), dtype=np.int64)
        for member, stream in enumerate(self._members):
            owned = owner == member
            member_ids = stream.at(index[owned], context)  # also for none: it checks the context
            ids[owned] = member_ids.reshape(-1, ids.shape[1]) * len(self._members) + member
        return ids.reshape(-1)

    def rows(self, step: int, context: int) -> np.ndarray:
        """Ids of the rows of this step's global batch, (tokens_per_step / context,) int64."""
        rows_per_step = self.tokens_per_step // self.context
        return self.at(np.arange(step * rows_per_step, (step + 1) * rows_per_step, dtype=np.int64), context)

    def batch(self, step: int, context: int, rows: np.ndarray) -> TokenBatch:
        """The rows with these ids, (B, context), in this order."""
        inner, owner = np.divmod(rows, len(self._members))
        present = np.unique(owner)
        batches = [self._members[int(m)].batch(step, context, inner[owner == m]) for m in present]
        batch_rows = np.argsort(owner, kind="stable")  # row k of the concatenation is row batch_rows[k] of the batch
        return concatenate(batches, np.argsort(batch_rows))

    def evaluation(self, tokens: int) -> Iterator[TokenBatch]:
        """Each member's val split in turn, its share of `tokens` by weight; members without one are skipped.

        Raises DataError when no member has a val split.
        """
        present = [
            (w, stream) for w, stream in zip(self._weights.tolist(), self._members, strict=True) if stream.has_val
        ]
        if not present:
            raise DataError("mixture: no member has anything in its val split to evaluate on; add documents to it")
        total = sum(weight for weight, _ in present)
        for weight, stream in present:
            yield from stream.evaluation(-(-tokens * weight // total))


def round_robin(weights: Sequence[int]) -> np.ndarray:
    """One period of smooth weighted round-robin, (sum of weights,): every prefix of it is within 1 of the shares.

    Share c of a member with weight w of W may start in slot floor(cW/w) and must come before ceil((c+1)W/w); the
    earliest deadline goes first, which is always feasible (Baruah et al. 1996, "Proportionate progress"). Giving each
    slot to the member with the most credit, as nginx does, can be off by more than 1.
    """
    total = sum(weights)
    counts = [0] * len(weights)
    period = []
    for slot in range(total):
        deadlines = [
            (-(-(count + 1) * total // weight), member)
            for member, (count, weight) in enumerate(zip(counts, weights, strict=True))
            if count * total // weight <= slot
        ]
        _, member = min(deadlines)
        counts[member] += 1
        period.append(member)
    return np.array(period, dtype=np.int64)
