"""Which tokens choose chapters together, and from what: the units of a line of tokens.

    chunk     W tokens of one document; the mean of the chunk before it, zeros for the first
    prompt    an answer (positions with loss) and the block before it; the mean of that block. Text without one goes by chunks
    token     each token by itself
    sequence  a whole document, the mean of all of it: a position learns of later ones

Here are places and numbers alone; `memory.py` has the states. A unit never crosses documents, and padding belongs to none.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Units:
    """U units of a line of N tokens. Places are numbers of tokens, N where a unit has fewer."""

    places: Tensor  # (U, L) the tokens that read what the unit chose
    sources: Tensor | None  # (U, M) the tokens whose mean chooses; None: each unit is a token, and its own source
    back: Tensor  # (N,) where each token stands in `places`, flattened; U * L for padding

    @property
    def counts(self) -> Tensor:
        """Sources of each unit, (U, 1), at least 1."""
        assert self.sources is not None
        return (self.sources < len(self.back)).sum(1, keepdim=True).clamp_min(1)


def cut(
    positions: Tensor, *, routing: str, window: int, padding: Tensor | None = None, trained: Tensor | None = None
) -> Units:
    """Units of a line: `positions` (N,) count from 0 in each document; `padding` and `trained` (N,) bool.

    `trained` are positions with a loss; without it all have one, so that routing by prompt goes by chunks.
    """
    where, num = positions.device, len(positions)
    own = positions.cpu().numpy()
    begins = np.diff(own, prepend=own[:1] - 2) != 1  # of documents
    if padding is not None:
        hidden = padding.cpu().numpy()
        begins |= np.diff(hidden, prepend=hidden[:1]).astype(bool)
    else:
        hidden = np.zeros(num, dtype=bool)
    if routing == "token":
        kept = torch.from_numpy(np.flatnonzero(~hidden))
        back = torch.full((num,), len(kept))
        back[kept] = torch.arange(len(kept))
        return Units(kept[:, None].to(where), None, back.to(where))
    if routing == "prompt":
        readers, sources = _by_prompt(
            begins, np.ones(num, dtype=bool) if trained is None else trained.cpu().numpy(), window
        )
    elif routing == "sequence":
        readers = sources = _pieces(np.flatnonzero(begins), num)
    else:
        readers, sources = _by_chunk(begins, window)
    kept = [number for number, span in enumerate(readers) if len(span) and not hidden[span[0]]]
    return units([readers[i] for i in kept], [sources[i] for i in kept], num, where)


def units(readers: list[np.ndarray], sources: list[np.ndarray], num: int, where: torch.device) -> Units:
    """Units of spans of places in a line of `num` tokens."""
    places = _padded(readers, num)
    back = np.full(num + 1, places.size)
    back[places.reshape(-1)] = np.arange(places.size)
    return Units(torch.from_numpy(places).to(where), torch.from_numpy(_padded(sources, num)).to(where),
                 torch.from_numpy(back[:num]).to(where))  # fmt: skip


def _by_chunk(begins: np.ndarray, window: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    readers: list[np.ndarray] = []
    sources: list[np.ndarray] = []
    for document in _pieces(np.flatnonzero(begins), len(begins)):
        chunks = [document[at : at + window] for at in range(0, len(document), window)]
        readers += chunks
        sources += [document[:0], *chunks[:-1]]
    return readers, sources


def _by_prompt(begins: np.ndarray, trained: np.ndarray, window: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    readers: list[np.ndarray] = []
    sources: list[np.ndarray] = []
    for document in _pieces(np.flatnonzero(begins), len(begins)):
        own = trained[document]
        changes = np.flatnonzero(np.diff(own.astype(np.int8), prepend=1 - own[:1].astype(np.int8)))
        blocks = _pieces(changes, len(document))
        asked = [number for number, block in enumerate(blocks) if not own[block[0]] and number + 1 < len(blocks)]
        first = blocks[asked[0]][0] if asked else len(document)
        for at in range(0, int(first), window):  # text before the first prompt, or all of it
            readers.append(document[at : min(at + window, int(first))])
            sources.append(document[max(0, at - window) : at])
        for number, then in pairwise([*asked, len(blocks)]):
            end = blocks[then][0] if then < len(blocks) else len(document)
            readers.append(document[blocks[number][0] : end])
            sources.append(document[blocks[number]])
    return readers, sources


def _pieces(starts: np.ndarray, num: int) -> list[np.ndarray]:
    """The places 0 to num, cut at `starts`, of which the first is 0."""
    return np.split(np.arange(num), starts[1:]) if num else []


def _padded(spans: list[np.ndarray], fill: int) -> np.ndarray:
    """Spans of places as rows of one array, (U, L)."""
    found = np.full((len(spans), max(1, max(map(len, spans), default=0))), fill, dtype=np.int64)
    for row, span in zip(found, spans, strict=True):
        row[: len(span)] = span
    return found
