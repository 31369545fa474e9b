"""Conversations as training batches: loss on what the assistant says, nothing else.

    data/dialogues/{train,val}.jsonl (records.Dialogue)  --chat.render-->  segments, packed in rows

A dialogue that does not fit a row is taken apart where a user speaks: as many groups (user to next user) as fit make a
segment, each with the system turn and the tools, so each assistant turn is trained once and no answer is cut. A group
that cannot fit is listed in `too_long`, what trains nothing in `untrained`; nothing else is left out.

Not promised: that a later segment knows what was said in an earlier one.

Facts as training batches: a question, and its answer with a loss.

    data/facts/{train,val}.jsonl (records.Fact)  ->  E question \n | answer E, packed in rows        E: end of text

The texts are plain, since a base model has never read the turns of a chat. Nothing is left out: a fact that does not
fit a row is an error.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pipeline.batches.batch import Piece
from pipeline.batches.packing import PackedStream, pack
from pipeline.ingest import records
from pipeline.ingest.records import Dialogue, Fact, Message
from pipeline.run.errors import DataError
from pipeline.text import chat
from pipeline.text.chat import Rendered
from pipeline.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Segments:
    """A dialogue as pieces that each fit a row, and what is left out."""

    rendered: list[Rendered]
    too_long: list[str] = field(default_factory=list)  # "<dialogue>#<group>" of groups that cannot fit
    untrained: list[str] = field(
        default_factory=list
    )  # "<dialogue>#<last group>" of segments without an assistant turn

    def keep(self, rendered: Rendered, name: str) -> None:
        """Take a segment in if the assistant speaks in it."""
        if any(rendered.trained):
            self.rendered.append(rendered)
        else:
            self.untrained.append(name)


def segments(tokenizer: Tokenizer, dialogue: Dialogue, context: int) -> Segments:
    """Render a dialogue into segments of at most `context` tokens. Raises DataError naming the dialogue."""
    whole = _render(tokenizer, dialogue, dialogue.messages)
    found = Segments([])
    if len(whole.ids) <= context:
        found.keep(whole, dialogue.id)
        return found
    system, groups = split_groups(dialogue.messages)
    held: list[Message] = []  # the groups of the segment that is being filled
    filled: Rendered | None = None  # what they render to
    for number, group in enumerate(groups):
        longer = _render(tokenizer, dialogue, [*system, *held, *group])
        if len(longer.ids) > context and filled:
            found.keep(filled, f"{dialogue.id}#{number - 1}")
            held, filled = [], None
            longer = _render(tokenizer, dialogue, [*system, *group])
        if len(longer.ids) > context:
            found.too_long.append(f"{dialogue.id}#{number}")
        else:
            held, filled = [*held, *group], longer
    if filled:
        found.keep(filled, f"{dialogue.id}#{len(groups) - 1}")
    return found


def split_groups(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """The opening system turn, if there is one, and the groups: each from one user's message to the next."""
    opens = bool(messages) and messages[0].get("role") in ("system", "developer")
    groups: list[list[Message]] = []
    for message in messages[opens:]:
        if not groups or message.get("role") == "user":
            groups.append([])
        groups[-1].append(message)
    return list(messages[:opens]), groups


def _render(tokenizer: Tokenizer, dialogue: Dialogue, messages: list[Message]) -> Rendered:
    try:
        return chat.render(tokenizer, messages, dialogue.tools)
    except DataError as error:
        raise DataError(f"dialogue {dialogue.id}: {error}") from error


class DialogueSplit:
    """One split of the dialogues, rendered and packed, in memory: a `packed.Source`."""

    def __init__(self, path: Path, tokenizer: Tokenizer, *, context: int) -> None:
        """Read and render the dialogues. Raises DataError naming the file and what is wrong."""
        if not path.is_file():
            raise DataError(f"{path}: expected dialogues here, found none; run dvc repro stage_tasks")
        ids: list[np.ndarray] = []
        trained: list[np.ndarray] = []
        self.too_long: list[str] = []
        self.untrained: list[str] = []
        self.num_dialogues = 0
        for dialogue in records.read(path, Dialogue):
            self.num_dialogues += 1
            found = segments(tokenizer, dialogue, context)
            self.too_long += found.too_long
            self.untrained += found.untrained
            ids += [np.array(rendered.ids, dtype=np.int32) for rendered in found.rendered]
            trained += [np.array(rendered.trained, dtype=bool) for rendered in found.rendered]
        lengths = np.array([len(segment) for segment in ids], dtype=np.int64)
        self._pieces = [Piece(*both) for both in zip(ids, trained, strict=True)]
        self._members, self._row_starts = pack(lengths, context)
        self.num_rows = len(self._row_starts) - 1
        self.num_tokens = int(lengths.sum())

    def pieces(self, epoch: int, row: int) -> list[Piece]:
        """The segments in a packed row."""
        first, last = self._row_starts[row : row + 2]
        return [self._pieces[member] for member in self._members[first:last]]

    def digest(self) -> str:
        """A hash of every id and mask, in order."""
        state = hashlib.sha256()
        for piece in self._pieces:
            state.update(len(piece.ids).to_bytes(8, "little"))
            state.update(piece.ids.astype("<i4").tobytes())
            state.update(np.asarray(piece.trained).tobytes())
        return state.hexdigest()


class DialogueStream(PackedStream):
    """Batches of conversations from `data/dialogues/{train,val}.jsonl`; targets only where the assistant speaks."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        *,
        context: int,
        tokens_per_step: int,
        seed: int,
    ) -> None:
        """`too_long` and `untrained` name what the train split could not use.

        Raises DataError when a file or a dialogue is wrong or the split does not fill one batch, ValueError when sizes
        do not divide.
        """
        train = DialogueSplit(folder / "train.jsonl", tokenizer, context=context)
        val = DialogueSplit(folder / "val.jsonl", tokenizer, context=context)
        self.too_long, self.untrained = train.too_long, train.untrained
        self.num_dialogues = train.num_dialogues
        identity = json.dumps([train.digest(), val.digest(), context, tokens_per_step, seed])
        super().__init__(
            str(folder),
            train,
            val,
            tokenizer,
            context=context,
            tokens_per_step=tokens_per_step,
            seed=seed,
            fingerprint=hashlib.sha256(identity.encode()).hexdigest()[:16],
            left_out=f"{len(self.too_long)} groups of messages do not fit {context} tokens." if self.too_long else "",
        )


# -- facts -------------------------------------------------------------------------------------------------------------


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
            raise DataError(
                f"{path}: fact {one.fact.id} has {lengths.max()} tokens, more than context ({context}); shorten it or"
                " raise context"
            )
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
        super().__init__(
            "facts",
            train,
            val,
            tokenizer,
            context=context,
            tokens_per_step=tokens_per_step,
            seed=seed,
            fingerprint=hashlib.sha256(identity.encode()).hexdigest()[:16],
        )
