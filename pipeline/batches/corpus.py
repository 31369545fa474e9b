"""Token shards as training batches: memory-mapped, packed, in a keyed order, with optional fill-in-the-middle.

    data/tokens/<corpus>/{train,val}.bin, .idx, .ctx, meta.json  ->  CorpusStream

Memory does not grow with the corpus: the token file and the packing index, which is cached on disk, are memory-mapped.

Fill-in-the-middle reorders a document so that a causal model learns to insert text (Bavarian et al. 2022,
arXiv:2207.14255, sections 3-4). The seed determines which documents are cut, and (seed, epoch) determines where.

    prefix p, middle m, suffix s, END = end of text
    PSM   PRE p SUF s MID m END        SPM   PRE SUF s MID p m END        each half of the time

The two cuts are uniform over the document's characters; only tokens that are cut are re-encoded. If this adds more than
RESERVE tokens, the cuts move to token boundaries. Put back in order, the parts give exactly the document's bytes.

Some middles may instead be syntactic units, like those that editors request: a function body, a statement, or one to
four whole lines, with equal probability for each kind present. The context of a repository document
(`text/repositories.py`) stays before the prefix and has no loss; a row includes as much of the context as fits.

Not guaranteed: that each piece of a document longer than a row sees the preceding text; that the encoding around a cut
is canonical (this is intended: at inference, the cursor cuts tokens too).

**A mixture** combines several streams row by row in fixed proportions, given as integer weights.

    [(2, CorpusStream(text)), (1, CorpusStream(code))]  ->  MixtureStream: text, text, code, text, text, code, ...

**Annealing** switches to another stream for the last steps: a model retains best what it sees while the learning rate
decays (Hu et al. 2024, MiniCPM, arXiv:2404.06395, section 4).

    AnnealedStream(dialogues, MixtureStream(dialogues, text, code), at=1700)

Not guaranteed: that an epoch of the mixture reads each stream once. A stream is read as often as its weight requires;
to see how often, compare its `rows_per_epoch` with its share.
"""

import ast
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.batches.batch import Piece, TokenBatch, concatenate, fingerprint_of
from pipeline.batches.packing import PackedStream, Packing, Splits, cached, cut, mix, packing_of
from pipeline.run.device import stable_hash
from pipeline.run.errors import DataError, ModelError
from pipeline.run.types import JsonObject
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

MOST_LINES = 4  # in a middle that consists of whole lines
SYNTAX = 0.5  # share of infilled repository documents whose middle is a syntactic unit
RESERVE = 8  # tokens reserved in a row for an infilled document: 3 control tokens, and 5 for cut tokens


class FillInMiddle(NamedTuple):
    """How many documents to infill, as shares in [0, 1]."""

    rate: float = 0.0  # share of the documents with enough room for infilling
    syntax: float | None = None  # share of these with a syntactic middle; None: SYNTAX for repositories, else 0


WHOLE = FillInMiddle()


class TokenShard:
    """One packed split of `data/tokens/<corpus>`: a `packing.PackedSplit`."""

    def __init__(
        self, folder: Path, split: str, tokenizer: Tokenizer, *, context: int, seed: int, fim: FillInMiddle, cache: Path
    ) -> None:
        """Map the tokens; load or build the packing index in `cache`. Raises DataError for a file of the wrong size."""
        meta = read_meta(folder)
        expected = int(meta["splits"][split]["tokens"])
        path = folder / f"{split}.bin"
        dtype = np.dtype(meta["dtype"]).newbyteorder("<")
        if not path.is_file() or path.stat().st_size != expected * dtype.itemsize:
            raise DataError(
                f"{path}: expected a file of {expected} tokens ({meta['dtype']}); run dvc repro stage_encode"
            )
        self.num_tokens = expected
        self._tokens = np.memmap(path, dtype=dtype, mode="r") if expected else np.zeros(0, dtype)
        self._tokenizer, self._seed, self._fim = tokenizer, seed, fim

        def build() -> Packing:
            contexts = folder / f"{split}.ctx"
            leads = np.fromfile(contexts, dtype="<u8") if contexts.is_file() else None
            offsets = np.fromfile(folder / f"{split}.idx", dtype="<u8")
            pieces = cut(offsets, context, leads, RESERVE if fim.rate else 0)
            chance = mix(np.arange(len(pieces.starts)), stable_hash("infill", seed)) / 2.0**64
            room = pieces.whole & (pieces.lengths + RESERVE <= context)
            infilled = (chance < fim.rate) & room & (pieces.starts > 0)  # nothing precedes the first document
            return packing_of(pieces, infilled, RESERVE, context)

        checksum = meta["splits"][split]["sha256"]
        self._packing = cached(cache, [checksum, context, fim.rate, seed if fim.rate else 0], build)
        self.num_rows = self._packing.num_rows

    def pieces(self, epoch: int, row: int) -> list[Piece]:
        """The documents or pieces of documents in a packed row."""
        packing = self._packing
        first, last = packing.row_starts[row : row + 2].tolist()
        starts, lengths = packing.starts[first:last].tolist(), packing.lengths[first:last].tolist()
        continues, infilled = packing.continues[first:last].tolist(), packing.infilled[first:last].tolist()
        leads = packing.leads[first:last].tolist()
        row_pieces = []
        for start, length, continued, is_infilled, lead in zip(
            starts, lengths, continues, infilled, leads, strict=True
        ):
            # The token after a piece that continues is a target, never an input.
            ids = self._tokens[start : start + length + continued]
            if is_infilled:  # the preceding end of text and the context stay in front
                key = stable_hash("cuts", self._seed, epoch, start)
                syntax = self._fim.syntax if self._fim.syntax is not None else SYNTAX * (lead > 1)
                own = infill(ids[lead:].astype(np.int64), key, self._tokenizer, syntax)
                ids = np.concatenate([ids[:lead], own])
            row_pieces.append(Piece(ids, np.arange(len(ids)) >= lead if lead > 1 else True))
        return row_pieces


def read_meta(folder: Path) -> JsonObject:
    """`meta.json` of a token folder. Raises DataError if the file is missing."""
    path = folder / "meta.json"
    if not path.is_file():
        raise DataError(f"{path}: expected encoded tokens here, found none; run dvc repro stage_encode")
    return json.loads(path.read_text(encoding="utf-8"))


def is_empty(folder: Path) -> bool:
    """Whether data/tokens/<corpus> has nothing to train on. Raises DataError like `read_meta`."""
    return not int(read_meta(folder)["splits"]["train"]["tokens"])


class CorpusStream(PackedStream):
    """Batches of running text or code from `data/tokens/<corpus>`; loss on every token but the very first."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        *,
        context: int,
        tokens_per_step: int,
        seed: int,
        fim: FillInMiddle = WHOLE,
        cache: Path,
        document_mask: bool = True,
    ) -> None:
        """Without `document_mask`, the documents in a row attend to each other.

        Raises ModelError if the tokens were encoded with a different tokenizer, DataError if they do not fill one
        batch, and ValueError if a share is not in [0, 1] or `tokens_per_step` is not a multiple of `context`.
        """
        for name, share in (("fim.rate", fim.rate), ("fim.syntax", fim.syntax or 0.0)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name}: expected a share in [0, 1], found {share}")
        meta = read_meta(folder)
        if meta["tokenizer"] != tokenizer.hash:
            raise ModelError(
                f"tokenizers differ: {folder / 'meta.json'} was encoded with {meta['tokenizer'][:16]}, but "
                f"{tokenizer.source} is {tokenizer.hash[:16]}; rerun dvc repro stage_encode and the stages that built "
                "the model, so that both use data/tokenizer (for your own checkpoint, set language.base=base)"
            )
        train, val = (
            TokenShard(folder, split, tokenizer, context=context, seed=seed, fim=cuts, cache=cache)
            for split, cuts in (("train", fim), ("val", WHOLE))
        )
        hashes = [meta["splits"][split]["sha256"] for split in ("train", "val")]
        parts = [*hashes, context, tokens_per_step, seed, fim.rate, document_mask]
        super().__init__(
            Splits(str(folder), train, val),
            tokenizer,
            context=context,
            tokens_per_step=tokens_per_step,
            seed=seed,
            fingerprint=fingerprint_of([*parts, fim.syntax] if fim.rate and fim.syntax is not None else parts),
            document_mask=document_mask,
        )


# --- fill-in-the-middle ----------------------------------------------------------------------------------------------


def infill(ids: np.ndarray, key: int, tokenizer: Tokenizer, syntax: float = 0.0) -> np.ndarray:
    """Reorder a complete document (n,), with its end of text, into PSM or SPM: at most n + RESERVE ids.

    `key` determines the two cuts. syntax: the probability that the middle is a syntactic unit, if the document has one.
    """
    body, end = ids[:-1], ids[-1:]
    raw = b"".join([tokenizer.token_bytes[id_] for id_ in body.tolist()])
    borders = np.concatenate([[0], np.cumsum(tokenizer.byte_lengths[body])])  # byte offset of each token, and the end
    data = np.frombuffer(raw, dtype=np.uint8)
    characters = np.append(np.flatnonzero((data & 0xC0) != 0x80), len(raw))  # no cut inside a UTF-8 character
    first, second, form = mix(np.arange(3), key)
    suffix_first = bool(form & np.uint64(1))
    start, stop = sorted(int(characters[int(draw) % len(characters)]) for draw in (first, second))
    if syntax:
        chance, kind, number = mix(np.arange(3, 6), key)
        units = syntax_units(raw) if chance / 2.0**64 < syntax else []
        if units:
            spans = units[int(kind) % len(units)]
            start, stop = spans[int(number) % len(spans)]
    infilled = _arrange(body, borders, raw, (start, stop), suffix_first, tokenizer)
    if len(infilled) + 1 > len(ids) + RESERVE:
        start, stop = (int(borders[np.searchsorted(borders, offset, "right") - 1]) for offset in (start, stop))
        infilled = _arrange(body, borders, raw, (start, stop), suffix_first, tokenizer)
    return np.concatenate([infilled, end])


def syntax_units(raw: bytes) -> list[list[tuple[int, int]]]:
    """Byte spans like those that editors request, grouped by kind: function bodies, statements, whole lines.

    Kinds without spans are left out. `raw` may be part of a file and indented throughout, such as a method.
    """
    text = raw.decode("utf-8", "replace")
    if len(text.encode()) != len(raw):  # partial character: spans would be wrong
        return []
    first = next((line for line in text.split("\n") if line.strip()), "")
    head = "if True:\n" if first[:1].isspace() else ""
    starts = [0, *(index + 1 for index, byte in enumerate(raw) if byte == 10)]  # offset of each line
    parsed = chat.tree(head + text)
    bodies, statements = [], []
    for node in ast.walk(parsed) if parsed is not None else ():
        if isinstance(node, ast.stmt) and node.end_lineno is not None and node.lineno > bool(head):
            statements.append((node, node))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                bodies.append((node.body[0], node))

    def span(begin: ast.stmt, end: ast.stmt) -> tuple[int, int]:
        assert end.end_lineno is not None and end.end_col_offset is not None
        lines = begin.lineno - 1 - bool(head), end.end_lineno - 1 - bool(head)
        return starts[lines[0]] + begin.col_offset, starts[lines[1]] + end.end_col_offset

    kinds = [[span(*pair) for pair in bodies], [span(*pair) for pair in statements], _line_spans(raw, starts)]
    return [spans for spans in kinds if spans]


def _line_spans(raw: bytes, starts: Sequence[int]) -> list[tuple[int, int]]:
    """Spans of 1 to MOST_LINES whole lines without outer whitespace; neither the first nor the last line is blank."""
    lines = [
        (start + len(line) - len(line.lstrip()), start + len(line.rstrip()))
        for start, line in zip(starts, raw.split(b"\n"), strict=True)
    ]
    return [
        (begin, lines[last][1])
        for first, (begin, end) in enumerate(lines)
        if end > begin
        for last in range(first, min(first + MOST_LINES, len(lines)))
        if lines[last][1] > lines[last][0]
    ]


def _arrange(
    body: np.ndarray, borders: np.ndarray, raw: bytes, cuts: tuple[int, int], suffix_first: bool, tokenizer: Tokenizer
) -> np.ndarray:
    start, stop = cuts
    prefix = _encode_range(body, borders, raw, 0, start, tokenizer)
    middle = _encode_range(body, borders, raw, start, stop, tokenizer)
    suffix = _encode_range(body, borders, raw, stop, len(raw), tokenizer)
    pre, suf, mid = ([id_] for id_ in (tokenizer.fim_prefix, tokenizer.fim_suffix, tokenizer.fim_middle))
    order = [pre, suf, suffix, mid, prefix, middle] if suffix_first else [pre, prefix, suf, suffix, mid, middle]
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in order])


def _encode_range(
    body: np.ndarray, borders: np.ndarray, raw: bytes, start: int, end: int, tokenizer: Tokenizer
) -> np.ndarray:
    """Ids of the bytes start..end: whole tokens unchanged, cut tokens at both ends re-encoded."""
    first = int(np.searchsorted(borders, start, "left"))
    last = int(np.searchsorted(borders, end, "right")) - 1
    if first > last:  # both cuts in one token
        return np.asarray(_encode_fragment(raw[start:end], tokenizer), dtype=np.int64)
    left = _encode_fragment(raw[start : borders[first]], tokenizer)
    right = _encode_fragment(raw[borders[last] : end], tokenizer)
    return np.concatenate([np.asarray(left, dtype=np.int64), body[first:last], np.asarray(right, dtype=np.int64)])


def _encode_fragment(fragment: bytes, tokenizer: Tokenizer) -> list[int]:
    """Ids of a token fragment; byte by byte if it is not UTF-8 (a token may contain part of a character)."""
    if not fragment:
        return []
    try:
        return tokenizer.encode(fragment.decode("utf-8"))
    except UnicodeDecodeError:
        return [tokenizer.byte_ids[byte] for byte in fragment]


# -- mixtures ----------------------------------------------------------------------------------------------------------


class MixtureStream:
    """Rows of several streams in fixed proportions: one period of smooth weighted round-robin, repeated.

    A row id is `the stream's row id * number of streams + index of the stream`. After any number of rows, each stream
    has its share to within one row. Each stream runs through its own epochs; an epoch of the mixture has as many rows
    as all streams together.
    """

    def __init__(self, members: Sequence[tuple[int, "PackedStream | MixtureStream"]]) -> None:
        """`members`: (weight, stream) pairs with positive integer weights. Raises ValueError if the shapes differ."""
        weights = [weight for weight, _ in members]
        self._members = [stream for _, stream in members]
        if not members or any(int(weight) != weight or weight < 1 for weight in weights):
            raise ValueError(f"mixture: expected integer weights of at least 1, found {weights}")
        if len({(stream.context, stream.tokens_per_step) for stream in self._members}) > 1:
            raise ValueError("mixture: all streams must have the same `context` and `tokens_per_step`")
        self._weights = np.array(weights, dtype=np.int64)
        self._period = round_robin(weights)  # (sum of weights,) index of the stream in each slot
        self._nth = np.zeros_like(self._period)  # number of the stream's earlier slots in the period
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
        index = periods * self._weights[owner] + self._nth[slots]  # position in the stream's own sequence
        ids = np.empty((len(positions), self.context // context), dtype=np.int64)
        for member, stream in enumerate(self._members):
            owned = owner == member
            member_ids = stream.at(index[owned], context)  # called even if empty, to check the context
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
        """Each stream's val split in turn, with its share of `tokens` by weight. Streams without one are skipped.

        Raises DataError if no stream has a val split.
        """
        present = [
            (w, stream) for w, stream in zip(self._weights.tolist(), self._members, strict=True) if stream.has_val
        ]
        if not present:
            raise DataError("mixture: the val splits of all streams are empty; add documents to one of them")
        total = sum(weight for weight, _ in present)
        for weight, stream in present:
            yield from stream.evaluation(-(-tokens * weight // total))


class AnnealedStream:
    """The rows of one stream before step `at`, then those of another, which is also used for evaluation.

    A row id is twice the stream's row id, plus 1 for the second stream. An epoch is an epoch of the first stream.
    """

    def __init__(self, first: "PackedStream | MixtureStream", last: "PackedStream | MixtureStream", *, at: int) -> None:
        """Raises ValueError if the shapes differ."""
        if (first.context, first.tokens_per_step) != (last.context, last.tokens_per_step):
            raise ValueError("annealing: both streams must have the same `context` and `tokens_per_step`")
        self._first, self._last, self._at = first, last, at
        self.context, self.tokens_per_step, self.has_val = last.context, last.tokens_per_step, last.has_val
        self.rows_per_epoch, self.tokens_per_epoch = first.rows_per_epoch, first.tokens_per_epoch
        self.fingerprint = fingerprint_of([first.fingerprint, last.fingerprint])  # not `at`: it varies with run length

    def rows(self, step: int, context: int) -> np.ndarray:
        """Ids of the rows of this step's global batch, (tokens_per_step / context,) int64."""
        is_last = step >= self._at
        return (self._last if is_last else self._first).rows(step, context) * 2 + is_last

    def batch(self, step: int, context: int, rows: np.ndarray) -> TokenBatch:
        """The rows with these ids, (B, context), in this order; all from one stream."""
        inner, is_last = np.divmod(rows, 2)
        assert (is_last == is_last[0]).all(), "rows of both streams in one batch"
        return (self._last if is_last[0] else self._first).batch(step, context, inner)

    def evaluation(self, tokens: int) -> Iterator[TokenBatch]:
        """The val split of the second stream. Raises the errors of its `evaluation`."""
        yield from self._last.evaluation(tokens)


def round_robin(weights: Sequence[int]) -> np.ndarray:
    """One period of smooth weighted round-robin, (sum of weights,): in every prefix, counts are within 1 of the shares.

    If the weights sum to W, turn c (from 0) of a stream with weight w may not come before slot floor(cW/w) and must
    come before slot ceil((c+1)W/w). The turn with the earliest deadline goes first, which is always feasible (Baruah et
    al. 1996, "Proportionate progress"). Giving each slot to the stream with the most credit, as nginx does, can be off
    by more than 1.
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
