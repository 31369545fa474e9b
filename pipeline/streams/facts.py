"""Facts as training batches: a question, and its answer with a loss.

    data/facts/{train,val}.jsonl (records.Fact)  ->  E question \\n | answer E, packed in rows        E: end of text

The texts are plain, since a base model has never read the turns of a chat. Nothing is left out: a fact that does not fit a row is an
error.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.errors import DataError
from pipeline.streams import records
from pipeline.streams.batch import Piece
from pipeline.streams.packed import PackedStream
from pipeline.streams.packing import pack
from pipeline.streams.records import Fact
from pipeline.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Asked:
    """A fact as ids."""

    fact: Fact
    prompt: list[int]
    answer: list[int]  # its end of text included


def encoded(fact: Fact, tokenizer: Tokenizer) -> Asked:
    """Raises DataError for an empty question or answer."""
    if not fact.question.strip() or not fact.answer.strip():
        raise DataError(f"fact {fact.id}: its question or answer is empty; mend it or take it out")
    prompt = [tokenizer.end_of_text, *tokenizer.encode(fact.question + "\n")]
    return Asked(fact, prompt, [*tokenizer.encode(fact.answer), tokenizer.end_of_text])


class FactSplit:
    """One split of the facts, packed, in memory: a `packed.Source`."""

    def __init__(self, path: Path, tokenizer: Tokenizer, *, context: int) -> None:
        """Raises DataError for a missing file, and for a fact that is longer than `context`."""
        if not path.is_file():
            raise DataError(f"{path}: expected facts here, found none; run dvc repro stage_tasks")
        self.asked = [encoded(fact, tokenizer) for fact in records.read(path, Fact)]
        lengths = np.array([len(one.prompt) + len(one.answer) for one in self.asked], dtype=np.int64)
        if len(lengths) and lengths.max() > context:
            one = self.asked[int(lengths.argmax())]
            raise DataError(f"{path}: fact {one.fact.id} has {lengths.max()} tokens, more than context ({context}); shorten it or raise context")  # fmt: skip
        self._pieces = [_piece(one) for one in self.asked]
        self._members, self._row_starts = pack(lengths, context)
        self.num_rows = len(self._row_starts) - 1
        self.num_tokens = int(lengths.sum())

    def pieces(self, epoch: int, row: int) -> list[Piece]:
        """The facts in a packed row."""
        first, last = self._row_starts[row : row + 2]
        return [self._pieces[member] for member in self._members[first:last]]

    def digest(self) -> str:
        """A hash of every id, in order."""
        told = json.dumps([[one.prompt, one.answer] for one in self.asked])
        return hashlib.sha256(told.encode()).hexdigest()


def _piece(one: Asked) -> Piece:
    ids = np.array([*one.prompt, *one.answer], dtype=np.int64)
    return Piece(ids, np.arange(len(ids)) >= len(one.prompt))


class FactStream(PackedStream):
    """Batches of facts: a `batch.Stream`."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, *, context: int, tokens_per_step: int, seed: int) -> None:
        """Raises DataError as `FactSplit`, and where the facts do not fill one batch."""
        train, val = (FactSplit(folder / f"{split}.jsonl", tokenizer, context=context) for split in ("train", "val"))
        identity = json.dumps([train.digest(), val.digest(), context, tokens_per_step, seed])
        super().__init__("facts", train, val, tokenizer, context=context, tokens_per_step=tokens_per_step, seed=seed,
                         fingerprint=hashlib.sha256(identity.encode()).hexdigest()[:16])  # fmt: skip
