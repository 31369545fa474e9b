"""Token shards as training batches: memory-mapped, packed, in a keyed order, some documents with the middle to fill in.

    data/tokens/<corpus>/{train,val}.bin, .idx, meta.json  ->  CorpusStream

Memory stays flat however large the corpus: the token file is mapped, the packing index is cached on disk and mapped
too. Which documents are infilled depends on the seed, where they are cut on (seed, epoch): a second epoch is cut
elsewhere.

Not promised: that a piece of a document longer than a row sees what came before it.

Fill-in-the-middle: a document told in another order, so that a causal model learns to insert (Bavarian et al. 2022,
arXiv:2207.14255, sections 3-4).

    prefix p, middle m, suffix s, END = end of text
    PSM   PRE p SUF s MID m END        SPM   PRE SUF s MID p m END        half each

The two cuts are uniform over the document's characters; only the tokens that are cut are encoded anew. Where that takes
more than RESERVE tokens, the cuts move to token borders. Undone, the bytes are the document's.

Not promised: canonical encoding around a cut, which is the point: at use, the cursor cuts tokens too.
"""

import hashlib
import json
from pathlib import Path

import numpy as np

from pipeline.batches.batch import Piece
from pipeline.batches.packing import PackedStream, cached, cut, mix, packing_of
from pipeline.run.device import stable_hash
from pipeline.run.errors import DataError, ModelError
from pipeline.text.tokenizer import Tokenizer

RESERVE = 8  # tokens kept free in a row for an infilled document: 3 control tokens, and 5 for the tokens that are cut


def infill(ids: np.ndarray, key: int, tokenizer: Tokenizer) -> np.ndarray:
    """A whole document (n,), end of text included, in PSM or SPM order: at most n + RESERVE ids, cut as `key` says."""
    body, end = ids[:-1], ids[-1:]
    raw = b"".join([tokenizer.token_bytes[id_] for id_ in body.tolist()])
    borders = np.concatenate([[0], np.cumsum(tokenizer.byte_lengths[body])])  # byte offset of each token, and the end
    data = np.frombuffer(raw, dtype=np.uint8)
    characters = np.append(np.flatnonzero((data & 0xC0) != 0x80), len(raw))  # no cut inside a UTF-8 character
    first, second, form = mix(np.arange(3), key)
    suffix_first = bool(form & np.uint64(1))
    a, b = sorted(int(characters[int(draw) % len(characters)]) for draw in (first, second))
    out = _arrange(body, borders, raw, (a, b), suffix_first, tokenizer)
    if len(out) + 1 > len(ids) + RESERVE:
        a, b = (int(borders[np.searchsorted(borders, cut, "right") - 1]) for cut in (a, b))
        out = _arrange(body, borders, raw, (a, b), suffix_first, tokenizer)
    return np.concatenate([out, end])


def _arrange(
    body: np.ndarray, borders: np.ndarray, raw: bytes, cuts: tuple[int, int], suffix_first: bool, tokenizer: Tokenizer
) -> np.ndarray:
    a, b = cuts
    prefix = _stretch(body, borders, raw, 0, a, tokenizer)
    middle = _stretch(body, borders, raw, a, b, tokenizer)
    suffix = _stretch(body, borders, raw, b, len(raw), tokenizer)
    pre, suf, mid = ([id_] for id_ in (tokenizer.fim_prefix, tokenizer.fim_suffix, tokenizer.fim_middle))
    order = [pre, suf, suffix, mid, prefix, middle] if suffix_first else [pre, prefix, suf, suffix, mid, middle]
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in order])


def _stretch(
    body: np.ndarray, borders: np.ndarray, raw: bytes, start: int, end: int, tokenizer: Tokenizer
) -> np.ndarray:
    """Ids of the bytes start..end: the whole tokens inside as they are, the cut ones at both ends encoded anew."""
    i = int(np.searchsorted(borders, start, "left"))
    j = int(np.searchsorted(borders, end, "right")) - 1
    if i > j:  # both cuts in one token
        return np.asarray(_fragment(raw[start:end], tokenizer), dtype=np.int64)
    left = _fragment(raw[start : borders[i]], tokenizer)
    right = _fragment(raw[borders[j] : end], tokenizer)
    return np.concatenate([np.asarray(left, dtype=np.int64), body[i:j], np.asarray(right, dtype=np.int64)])


def _fragment(piece: bytes, tokenizer: Tokenizer) -> list[int]:
    """Ids of a piece of a token; byte by byte where the piece is not UTF-8 (a token may hold half a character)."""
    if not piece:
        return []
    try:
        return tokenizer.encode(piece.decode("utf-8"))
    except UnicodeDecodeError:
        return [tokenizer.byte_ids[byte] for byte in piece]


# -- corpus ------------------------------------------------------------------------------------------------------------


class TokenShard:
    """One split of `data/tokens/<corpus>`, packed: a `packed.Source`."""

    def __init__(
        self, folder: Path, split: str, tokenizer: Tokenizer, *, context: int, seed: int, fim_rate: float, cache: Path
    ) -> None:
        """Map the tokens and find or build the packing index in `cache`. Raises DataError when sizes do not fit."""
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
            room = pieces.whole & (pieces.lengths + RESERVE <= context)
            infilled = (chance < fim_rate) & room & (pieces.starts > 0)  # the first document has no lead to keep
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
            if is_infilled:  # the end of text before the document stays in front
                key = stable_hash("cuts", self._seed, epoch, start)
                ids = np.concatenate([ids[:1], infill(ids[1:].astype(np.int64), key, self._tokenizer)])
            out.append(Piece(ids, True))
        return out


def read_meta(folder: Path) -> dict:
    """`meta.json` of a token folder. Raises DataError when there is none."""
    path = folder / "meta.json"
    if not path.is_file():
        raise DataError(f"{path}: expected encoded tokens here, found none; run dvc repro stage_encode")
    return json.loads(path.read_text(encoding="utf-8"))


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
        fim_rate: float = 0.0,
        cache: Path,
        document_mask: bool = True,
    ) -> None:
        """`fim_rate` of the documents with room are infilled; without `document_mask` those of a row see each other.

        Raises ModelError when the tokens were encoded with another tokenizer, DataError when they do not fill one
        batch, ValueError when `fim_rate` is not in [0, 1] or `tokens_per_step` is no multiple of `context`.
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
