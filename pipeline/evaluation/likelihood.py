"""Bits per byte and perplexity of held-out documents under a left-to-right model.

    texts -> a `Scored` each (nats, tokens, bytes) -> bits_per_byte, perplexity

Counted are the text's tokens; the separator before the first is given, never counted. A long document is read in
windows of L tokens: the first scores all of its tokens, each later one advances by L/2 and scores its last half, so
every token is scored once, with at least L/2 tokens before it. Bytes come from the tokens' own bytes, never from
decoding them one by one (half a character would give three bytes).

Sums are in float64, so a uniform model gets exactly log2(V) * tokens / bytes. Not here: the masked-diffusion bound.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, fsum, log

import torch
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.model.transformer import Transformer
from pipeline.text.tokenizer import Tokenizer

BATCH_TOKENS = 8192  # of one forward
HEAD_ROWS = 512  # positions whose logits exist at a time, in float64
PADDING = -1


@dataclass(frozen=True)
class Scored:
    """What the model thinks of one document."""

    nats: float  # -ln p of its tokens
    tokens: int
    bytes: int  # UTF-8


@dataclass(frozen=True)
class Likelihood:
    """A set of documents, scored in order. `left_out` counts texts that the tokenizer changes (a normaliser)."""

    documents: list[Scored]
    left_out: int
    places: list[int]  # of the documents among the texts that were given

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers."""
        return fsum(d.nats for d in self.documents) / log(2) / sum(d.bytes for d in self.documents)

    @property
    def perplexity(self) -> float:
        """exp(nats per token): comparable only between equal tokenizers."""
        return exp(fsum(d.nats for d in self.documents) / sum(d.tokens for d in self.documents))


@dataclass(frozen=True)
class Window:
    """One row of a forward: token `ids[i]` is read at place i, and predicts `targets[i]` from place `scored` on."""

    document: int
    ids: list[int]
    targets: list[int]
    scored: int


def likelihood(model: Transformer, tokenizer: Tokenizer, texts: Iterable[str], *, context: int) -> Likelihood:
    """Score documents with windows of `context` tokens.

    Empty texts are left out and not counted. Raises ValueError for a context that is odd, below 2 or above the model's,
    ModelError where the tokenizer's bytes do not spell what it decodes to.
    """
    if context < 2 or context % 2 or context > model.config.max_context:
        raise ValueError(f"context: expected an even number from 2 to {model.config.max_context}, found {context}")
    whole = [(place, text) for place, text in enumerate(texts) if text]
    encoded, left_out, places = [], 0, []
    for (place, text), ids in zip(whole, tokenizer.encode_batch([text for _, text in whole])):
        if _same_bytes(tokenizer, text, ids):
            encoded.append((ids, len(text.encode())))
            places.append(place)
        else:
            left_out += 1
    nats = token_nats(model, [ids for ids, _ in encoded], start=tokenizer.end_of_text, context=context)
    scored = [Scored(fsum(n), len(ids), size) for n, (ids, size) in zip(nats, encoded)]
    return Likelihood(scored, left_out, places)


def _same_bytes(tokenizer: Tokenizer, text: str, ids: list[int]) -> bool:
    """Whether the tokens spell the text; False where a normaliser changed it. Raises ModelError for wrong bytes."""
    spelled = b"".join(tokenizer.token_bytes[i] for i in ids)
    if spelled == text.encode():
        return True
    if tokenizer.decode(ids, skip_special=False) == text:
        raise ModelError(
            f"the tokenizer's bytes of {text[:40]!r} do not spell it: {spelled[:40]!r}; bpb would be wrong"
        )
    return False


def token_nats(model: Transformer, documents: Sequence[list[int]], *, start: int, context: int) -> list[list[float]]:
    """-ln p of every token of every document, each document read after the token `start`."""
    nats: list[list[float]] = [[0.0] * len(ids) for ids in documents]
    filled = [0] * len(documents)
    was_training = model.training
    model.train(False)
    try:
        for batch in _batches(
            [w for number, ids in enumerate(documents) for w in windows(number, ids, start, context)]
        ):
            for window, values in zip(batch, _score(model, batch)):
                nats[window.document][filled[window.document] : filled[window.document] + len(values)] = values
                filled[window.document] += len(values)
    finally:
        model.train(was_training)
    assert filled == [len(ids) for ids in documents], "every token is scored once"
    return nats


def windows(document: int, ids: list[int], start: int, context: int) -> Iterator[Window]:
    """Cut one document; the windows' scored parts follow each other without gap or overlap."""
    read = [start, *ids]  # read[i] predicts ids[i]
    half = context // 2
    if ids:
        yield Window(document, read[:context] if len(ids) >= context else read[: len(ids)], ids[:context], 0)
    done = context
    while done < len(ids):
        begin = done - half
        end = min(begin + context, len(ids))
        yield Window(document, read[begin:end], ids[begin:end], half)
        done = end


def _batches(pieces: list[Window]) -> Iterator[list[Window]]:
    """Consecutive windows up to BATCH_TOKENS. They are ragged: nothing is computed for padding."""
    batch: list[Window] = []
    tokens = 0
    for piece in pieces:
        if batch and tokens + len(piece.ids) > BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(piece)
        tokens += len(piece.ids)
    if batch:
        yield batch


@torch.no_grad()
def _score(model: Transformer, batch: list[Window]) -> list[list[float]]:
    """-ln p of the scored targets of each window, one forward for all."""
    device = next(model.parameters()).device
    width = max(len(window.ids) for window in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    documents = torch.full((len(batch), width), PADDING, dtype=torch.int32)
    select = torch.zeros(len(batch), width, dtype=torch.bool)
    for row, window in enumerate(batch):
        ids[row, : len(window.ids)] = torch.tensor(window.ids)
        documents[row, : len(window.ids)] = 0
        select[row, window.scored : len(window.ids)] = True
    targets = torch.tensor([target for window in batch for target in window.targets[window.scored :]])
    hidden = model.hidden(ids.to(device), documents=documents.to(device))[select.to(device)]  # (n, D)
    values = torch.cat([_nats(model.logits(h), t) for h, t in zip(hidden.split(HEAD_ROWS), targets.split(HEAD_ROWS))])
    counts = [len(window.ids) - window.scored for window in batch]
    return [piece.tolist() for piece in values.split(counts)]


def _nats(logits: Tensor, targets: Tensor) -> Tensor:
    """-ln p (n,) in float64 of `targets` (n,) under `logits` (n, V)."""
    wide = logits.double().cpu()
    return wide.logsumexp(-1) - wide.gather(1, targets[:, None]).squeeze(1)
