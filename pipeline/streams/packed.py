"""A stream of packed rows: what corpora and dialogues have in common.

    source (pieces of a packed row)  +  order (which row when)  ->  TokenBatch, a pure function of (seed, step)

`CorpusStream` and `DialogueStream` only build the two sources; everything else is here. The val split has its own
source and one fixed order, whatever the seed, so that evaluations of different runs see the same tokens. Not promised:
that a batch of the val split is full; its last one may be smaller.
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from pipeline.errors import DataError
from pipeline.streams.batch import Piece, TokenBatch, token_batch
from pipeline.streams.order import RowOrder
from pipeline.text.tokenizer import Tokenizer


class Source(Protocol):
    """A packed split."""

    @property
    def num_rows(self) -> int:
        """Packed rows."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of the split, each counted once; no padding."""
        ...

    def pieces(self, epoch: int, row: int) -> list[Piece]:
        """What stands in a row; only infilling looks at the epoch."""
        ...


class PackedStream:
    """Implements `batch.Stream` over two sources; `at` serves the mixture."""

    def __init__(
        self,
        name: str,
        train: Source,
        val: Source,
        tokenizer: Tokenizer,
        *,
        context: int,
        tokens_per_step: int,
        seed: int,
        fingerprint: str,
        document_mask: bool = True,
        left_out: str = "",
    ) -> None:
        """`name` is said in errors, with what was `left_out` of it.

        Raises DataError when `train` does not fill one batch, ValueError when sizes do not divide.
        """
        self.name = name
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
            best = f"{self.tokens_per_epoch}" if train.num_rows else f"none at context {context}: there is no row"
            raise DataError(
                f"{name}: too few tokens for one batch: held {train.num_tokens} tokens in {train.num_rows} packed rows "
                f"of {context}, needed tokens_per_step={tokens_per_step}; the largest tokens_per_step that works is "
                f"{best}. "
                f"Set it, change the context, or add data. {left_out}".rstrip()
            )

    def at(self, positions: np.ndarray, context: int) -> np.ndarray:
        """Row ids at positions of the endless sequence of packed rows, (n,) -> (n * windows,) int64."""
        return self._order.at(positions, context)

    def rows(self, step: int, context: int) -> np.ndarray:
        """Ids of the rows of this step's global batch, (tokens_per_step / context,) int64."""
        return self.at(self._order.positions(step), context)

    def batch(self, step: int, context: int, rows: np.ndarray) -> TokenBatch:
        """Those rows, (B, context), in the order given; `step` changes nothing (the ids carry the epoch)."""
        return self._batch(self._train, self._order, context, rows)

    def evaluation(self, tokens: int) -> Iterator[TokenBatch]:
        """The val split, packed alike but never infilled, until `tokens` targets. Raises DataError when it is empty."""
        if not self._val.num_rows:
            raise DataError(f"{self.name}: the val split holds nothing to evaluate on; add documents to it")
        order = RowOrder(
            num_rows=self._val.num_rows, context=self.context, tokens_per_step=self.tokens_per_step, seed=0
        )
        ids = order.at(np.arange(self._val.num_rows), self.context)  # one epoch, in a fixed order
        given = 0
        for start in range(0, len(ids), order.rows_per_step):
            if given >= tokens:
                return
            batch = self._batch(self._val, order, self.context, ids[start : start + order.rows_per_step])
            given += batch.num_targets
            yield batch

    def _batch(self, source: Source, order: RowOrder, context: int, rows: np.ndarray) -> TokenBatch:
        packed, window = order.locate(rows, context)
        wanted, place = np.unique(
            packed, return_inverse=True
        )  # a row is read once, however many of its windows are asked
        return token_batch(
            [source.pieces(*divmod(int(row), source.num_rows)) for row in wanted],
            place * order.num_windows(context) + window,
            packed=order.context,
            context=context,
            pad=self._tokenizer.pad,
            byte_lengths=self._tokenizer.byte_lengths,
            document_mask=self._document_mask,
        )
