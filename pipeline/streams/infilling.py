"""Fill-in-the-middle: a document told in another order, so that a causal model learns to insert (Bavarian et al. 2022,
arXiv:2207.14255, sections 3-4).

    prefix p, middle m, suffix s, END = end of text
    PSM   PRE p SUF s MID m END        SPM   PRE SUF s MID p m END        half each

The two cuts are uniform over the document's characters; only the tokens that are cut are encoded anew. Where that takes
more than RESERVE tokens, the cuts move to token borders. Undone, the bytes are the document's.

Not promised: canonical encoding around a cut, which is the point: at use, the cursor cuts tokens too.
"""

import numpy as np

from pipeline.streams.order import mix
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
