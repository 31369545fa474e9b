"""Token shards as training batches: memory-mapped, packed, in a keyed order, some documents with the middle to fill in;
and several streams mixed by integer weights.

    data/tokens/<corpus>/{train,val}.bin, .idx, meta.json  ->  CorpusStream
    [(2, CorpusStream(text)), (1, CorpusStream(code))]     ->  MixtureStream

Memory stays flat however large the corpus: the token file is mapped, the packing index is cached on disk and mapped too.
Which documents are infilled depends on the seed, where they are cut on (seed, epoch): a second epoch is cut elsewhere.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pipeline.device import stable_hash
from pipeline.errors import DataError, ModelError
from pipeline.streams.batch import Piece, TokenBatch, concatenate
from pipeline.streams.infilling import RESERVE, infill
from pipeline.streams.order import mix
from pipeline.streams.packed import PackedStream
from pipeline.streams.packing import cached, cut, packing_of
from pipeline.text.tokenizer import Tokenizer


class TokenShard:
    """One split of `data/tokens/<corpus>`, packed: a `packed.Source`."""

    def __init__(
        self, folder: Path, split: str, tokenizer: Tokenizer, *, context: int, seed: int, fim_rate: float, cache: Path
    ) -> None:
        """Map the tokens and find or build the packing index in `cache`. Raises DataError when a file does not fit meta.json."""
        meta = read_meta(folder)
        expected = int(meta["splits"][split]["tokens"])
        path = folder / f"{split}.bin"
        dtype = np.dtype(meta["dtype"]).newbyteorder("<")
        if not path.is_file() or path.stat().st_size != expected * dtype.itemsize:
            raise DataError(f"{path}: expected {expected} tokens ({meta['dtype']}); run dvc repro stage_encode")
        self.num_tokens = expected
        self._tokens = np.memmap(path, dtype=dtype, mode="r") if expected else np.zeros(0, dtype)
        self._tokenizer, self._seed = tokenizer, seed

        def build():
            pieces = cut(np.fromfile(folder / f"{split}.idx", dtype="<u8"), context)
            chance = mix(np.arange(len(pieces.starts)), stable_hash("infill", seed)) / 2.0**64
            infilled = (chance < fim_rate) & pieces.whole & (pieces.lengths + RESERVE <= context)
            return packing_of(pieces, infilled, RESERVE, context)

        data = meta["splits"][split]["sha256"]
        self._packing = cached(cache, [data, context, fim_rate, seed if fim_rate else 0], build)
        self.num_rows = self._packing.num_rows

    def pieces(self, epoch: int, row: int) -> list[Piece]:
        """The documents, or pieces of documents, in a packed row."""
        packing = self._packing
        first, last = packing.row_starts[row : row + 2].tolist()
        starts, lengths = packing.starts[first:last].tolist(), packing.lengths[first:last].tolist()
        continues, infilled = packing.continues[first:last].tolist(), packing.infilled[first:last].tolist()
        out = []
        for start, length, goes_on, is_infilled in zip(starts, lengths, continues, infilled, strict=True):
            ids = self._tokens[start : start + length + goes_on]  # the token behind is a target, never an input
            if is_infilled:
                ids = infill(ids.astype(np.int64), stable_hash("cuts", self._seed, epoch, start), self._tokenizer)
            out.append(Piece(ids, True))
        return out


def read_meta(folder: Path) -> dict:
    """`meta.json` of a token folder. Raises DataError when there is none."""
    path = folder / "meta.json"
    if not path.is_file():
        raise DataError(f"{path}: expected encoded tokens here, found none; run dvc repro stage_encode")
    return json.loads(path.read_text(encoding="utf-8"))


class CorpusStream(PackedStream):
    """Batches of running text or code from `data/tokens/<corpus>`; loss on every token but each document's first."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        *,
        context: int,
        tokens_per_step: int,
        seed: int,
        fim_rate: float = 0.0,
        cache: Path,
        document_mask: bool = True,
    ) -> None:
        """`fim_rate` of the documents that have room are infilled; `document_mask` false lets documents of a row see each other.

        Raises ModelError when the tokens were encoded with another tokenizer, DataError when they do not fill one batch,
        ValueError when `fim_rate` is not in [0, 1] or `tokens_per_step` is no multiple of `context`.
        """
        if not 0 <= fim_rate <= 1:
            raise ValueError(f"fim_rate: expected a share in [0, 1], found {fim_rate}")
        meta = read_meta(folder)
        if meta["tokenizer"] != tokenizer.hash:
            raise ModelError(
                f"tokenizers disagree: {folder / 'meta.json'} was encoded with {meta['tokenizer'][:16]}, but "
                f"{tokenizer.source} is {tokenizer.hash[:16]}; rerun dvc repro stage_encode and the stages that made "
                "the model, so that both use data/tokenizer"
            )
        train, val = (
            TokenShard(folder, split, tokenizer, context=context, seed=seed, fim_rate=rate, cache=cache)
            for split, rate in (("train", fim_rate), ("val", 0.0))
        )
        hashes = [meta["splits"][split]["sha256"] for split in ("train", "val")]
        identity = json.dumps([*hashes, context, tokens_per_step, seed, fim_rate, document_mask])
        super().__init__(
            str(folder),
            train,
            val,
            tokenizer,
            context=context,
            tokens_per_step=tokens_per_step,
            seed=seed,
            fingerprint=hashlib.sha256(identity.encode()).hexdigest()[:16],
            document_mask=document_mask,
        )


class MixtureStream:
    """Rows of several streams in fixed proportion: one period of smooth weighted round-robin, repeated.

    A row id is `member's row id * number of members + member`. Within every stretch of rows each member has its share to
    within one row; each member walks through its own epochs. An epoch of the mixture is as many rows as all members hold.
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
        nth = np.zeros_like(self._period)  # how many of this member's slots come before, within the period
        for member in range(len(members)):
            here = self._period == member
            nth[here] = np.arange(here.sum())
        self._nth = nth
        self.context = self._members[0].context
        self.tokens_per_step = self._members[0].tokens_per_step
        self.has_val: bool = any(stream.has_val for stream in self._members)
        self.rows_per_epoch: int = sum(stream.rows_per_epoch for stream in self._members)
        self.tokens_per_epoch: int = sum(stream.tokens_per_epoch for stream in self._members)
        identity = json.dumps([[int(weight), stream.fingerprint] for weight, stream in members])
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]

    def at(self, positions: np.ndarray, context: int) -> np.ndarray:
        """Row ids at positions of the mixed sequence, (n,) -> (n * windows,) int64."""
        periods, slots = np.divmod(positions, len(self._period))
        owner = self._period[slots]
        index = periods * self._weights[owner] + self._nth[slots]  # position in the member's own sequence
        ids = np.empty((len(positions), self.context // context), dtype=np.int64)
        for member, stream in enumerate(self._members):
            here = owner == member
            own = stream.at(index[here], context)  # also for none: it checks the context
            ids[here] = own.reshape(-1, ids.shape[1]) * len(self._members) + member
        return ids.reshape(-1)

    def rows(self, step: int, context: int) -> np.ndarray:
        """Ids of the rows of this step's global batch, (tokens_per_step / context,) int64."""
        rows_per_step = self.tokens_per_step // self.context
        return self.at(np.arange(step * rows_per_step, (step + 1) * rows_per_step, dtype=np.int64), context)

    def batch(self, step: int, context: int, rows: np.ndarray) -> TokenBatch:
        """Those rows, (B, context), in the order given."""
        inner, owner = np.divmod(rows, len(self._members))
        present = np.unique(owner)
        batches = [self._members[int(m)].batch(step, context, inner[owner == m]) for m in present]
        behind = np.argsort(owner, kind="stable")  # row k of the concatenation is row behind[k] of the batch
        return concatenate(batches, np.argsort(behind))

    def evaluation(self, tokens: int) -> Iterator[TokenBatch]:
        """Each member's val split in turn, its share of `tokens` by weight; members without one are passed over.

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
    """One period of smooth weighted round-robin, (sum of weights,): after any number of slots each member is within 1 of its share.

    Share c of a member with weight w of W may start in slot floor(cW/w) and must be given before ceil((c+1)W/w); the earliest
    deadline goes first, which is always feasible (Baruah et al. 1996, "Proportionate progress"). Giving each slot to the
    member with the most credit, as nginx does, can be off by more than 1.
    """
    total = sum(weights)
    given = [0] * len(weights)
    period = []
    for slot in range(total):
        deadlines = [
            (-(-(count + 1) * total // weight), member)
            for member, (count, weight) in enumerate(zip(given, weights, strict=True))
            if count * total // weight <= slot
        ]
        _, member = min(deadlines)
        given[member] += 1
        period.append(member)
    return np.array(period, dtype=np.int64)
