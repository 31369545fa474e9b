"""Training batches of conversations and facts.

    data/dialogues/{train,val}.jsonl (records.Dialogue)  --chat.render-->  segments, packed into rows -> DialogueStream
    data/facts/{train,val}.jsonl (records.Fact)  ->  E question \\n | answer E, packed into rows     -> FactStream

In dialogues, only assistant turns have a loss. A dialogue that does not fit in one row is split at user turns: each
segment takes as many groups (from one user turn to the next) as fit, plus the system turn and the tools, so each
assistant turn is trained once and no answer is cut. Groups that cannot fit are listed in `too_long`, and segments with
nothing to train on in `untrained`. Nothing else is left out.

In facts, the answer and its end of text (E) have a loss. Facts are plain text, because a base model has never seen chat
turns. Nothing is left out: a fact that does not fit in one row is an error.

`rehearsing` mixes dialogues with text and code of earlier stages, to avoid forgetting.

Not guaranteed: that a later segment of a dialogue includes what was said in an earlier one.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pipeline.batches.batch import Piece, fingerprint_of
from pipeline.batches.corpus import CorpusStream, MixtureStream, read_meta
from pipeline.batches.packing import PackedStream, Splits, pack
from pipeline.ingest import records
from pipeline.ingest.records import Dialogue, Fact, Message
from pipeline.run.errors import DataError, ModelError
from pipeline.run.tracking import say
from pipeline.run.workdir import Job
from pipeline.text import chat
from pipeline.text.chat import Rendered
from pipeline.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Segments:
    """A dialogue split into segments that each fit in one row, and the parts left out."""

    rendered: list[Rendered]
    too_long: list[str] = field(default_factory=list)  # "<dialogue>#<group>" of groups that cannot fit
    untrained: list[str] = field(default_factory=list)  # "<dialogue>#<last group>" of segments without assistant turns

    def add(self, rendered: Rendered, name: str) -> None:
        """Add a segment if it has an assistant turn."""
        if any(rendered.trained):
            self.rendered.append(rendered)
        else:
            self.untrained.append(name)


def segments(tokenizer: Tokenizer, dialogue: Dialogue, context: int) -> Segments:
    """Render a dialogue into segments of at most `context` tokens. Raises DataError naming the dialogue."""
    whole = _render(tokenizer, dialogue, dialogue.messages)
    result = Segments([])
    if len(whole.ids) <= context:
        result.add(whole, dialogue.id)
        return result
    system, groups = split_groups(dialogue.messages)
    messages: list[Message] = []  # the groups of the current segment
    segment: Rendered | None = None  # `messages`, rendered
    for number, group in enumerate(groups):
        longer = _render(tokenizer, dialogue, [*system, *messages, *group])
        if len(longer.ids) > context and segment:
            result.add(segment, f"{dialogue.id}#{number - 1}")
            messages, segment = [], None
            longer = _render(tokenizer, dialogue, [*system, *group])
        if len(longer.ids) > context:
            result.too_long.append(f"{dialogue.id}#{number}")
        else:
            messages, segment = [*messages, *group], longer
    if segment:
        result.add(segment, f"{dialogue.id}#{len(groups) - 1}")
    return result


def split_groups(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """The opening system turn, if any, and the groups, each of which runs from one user message to the next."""
    has_system = bool(messages) and messages[0].get("role") in ("system", "developer")
    groups: list[list[Message]] = []
    for message in messages[has_system:]:
        if not groups or message.get("role") == "user":
            groups.append([])
        groups[-1].append(message)
    return list(messages[:has_system]), groups


def _render(tokenizer: Tokenizer, dialogue: Dialogue, messages: list[Message]) -> Rendered:
    try:
        return chat.render(tokenizer, messages, dialogue.tools)
    except DataError as error:
        raise DataError(f"dialogue {dialogue.id}: {error}") from error


class PackedPieces:
    """Pieces packed into rows, in memory: a `packing.PackedSplit`."""

    def __init__(self, pieces: list[Piece], context: int) -> None:
        """Pack pieces of at most `context` tokens."""
        lengths = np.array([len(piece.ids) for piece in pieces], dtype=np.int64)
        self._pieces = pieces
        self._members, self._row_starts = pack(lengths, context)
        self.num_rows = len(self._row_starts) - 1
        self.num_tokens = int(lengths.sum())

    def pieces(self, epoch: int, row: int) -> list[Piece]:
        """The pieces in a packed row."""
        first, last = self._row_starts[row : row + 2]
        return [self._pieces[member] for member in self._members[first:last]]


class DialogueSplit(PackedPieces):
    """One split of the dialogues, rendered and packed."""

    def __init__(self, path: Path, tokenizer: Tokenizer, *, context: int) -> None:
        """Read and render the dialogues. Raises DataError naming the file and the problem."""
        if not path.is_file():
            raise DataError(f"{path}: expected dialogues here, found none; run dvc repro stage_tasks")
        pieces: list[Piece] = []
        self.too_long: list[str] = []
        self.untrained: list[str] = []
        self.num_dialogues = 0
        for dialogue in records.read(path, Dialogue):
            self.num_dialogues += 1
            result = segments(tokenizer, dialogue, context)
            self.too_long += result.too_long
            self.untrained += result.untrained
            pieces += [
                Piece(np.array(rendered.ids, dtype=np.int32), np.array(rendered.trained, dtype=bool))
                for rendered in result.rendered
            ]
        super().__init__(pieces, context)

    def digest(self) -> str:
        """A hash of every id and mask, in order."""
        state = hashlib.sha256()
        for piece in self._pieces:
            state.update(len(piece.ids).to_bytes(8, "little"))
            state.update(piece.ids.astype("<i4").tobytes())
            state.update(np.asarray(piece.trained).tobytes())
        return state.hexdigest()


class DialogueStream(PackedStream):
    """Batches of conversations from `data/dialogues/{train,val}.jsonl`; only assistant turns are targets."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, *, context: int, tokens_per_step: int, seed: int) -> None:
        """`too_long` and `untrained` list the parts of the train split that are left out.

        Raises DataError if a file or dialogue is invalid or the train split does not fill one batch, and ValueError if
        `tokens_per_step` is not a multiple of `context`.
        """
        train = DialogueSplit(folder / "train.jsonl", tokenizer, context=context)
        val = DialogueSplit(folder / "val.jsonl", tokenizer, context=context)
        self.too_long, self.untrained = train.too_long, train.untrained
        self.num_dialogues = train.num_dialogues
        left_out = f"{len(self.too_long)} groups of messages do not fit in {context} tokens." if self.too_long else ""
        super().__init__(
            Splits(str(folder), train, val, left_out=left_out),
            tokenizer,
            context=context,
            tokens_per_step=tokens_per_step,
            seed=seed,
            fingerprint=fingerprint_of([train.digest(), val.digest(), context, tokens_per_step, seed]),
        )


# --- rehearsal --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Mixing ratio of dialogues, text and code."""

    dialogue_weight: int = 3
    """Relative number of dialogue rows in the mixture."""
    text_weight: int = 2
    """Relative number of text rows; 0: no text."""
    code_weight: int = 1
    """Relative number of code rows; 0: no code."""

    def __post_init__(self) -> None:
        if self.dialogue_weight < 1 or self.text_weight < 0 or self.code_weight < 0:
            raise ValueError("expected dialogue_weight >= 1, text_weight >= 0, code_weight >= 0")


def rehearsing(
    dialogues: DialogueStream, shares: Shares, job: Job, tokenizer: Tokenizer, *, text: Path, code: Path, base: str
) -> MixtureStream | None:
    """Mix the dialogues with any corpora of earlier stages that fill a batch. Returns None if there are none.

    Raises ModelError if a corpus was encoded with a tokenizer other than that of the model `base`.
    """
    members: list[tuple[int, PackedStream | MixtureStream]] = []
    for folder, weight in ((text, shares.text_weight), (code, shares.code_weight)):
        if not weight or not (folder / "meta.json").is_file():
            continue  # data/none contains no tokens
        meta = read_meta(folder)
        tokens = int(meta["splits"]["train"]["tokens"])
        if tokens < dialogues.tokens_per_step:
            say(f"{job.name}: {folder} is not rehearsed: its {tokens} tokens do not fill a batch")
            continue
        if meta["tokenizer"] != tokenizer.hash:
            raise ModelError(
                f"{folder} cannot be rehearsed: it was encoded with a different tokenizer than that of"
                f" the model {base}; set {job.stage}.rehearse=none or, for your own checkpoint, language.base=base"
            )
        stream = CorpusStream(
            folder,
            tokenizer,
            context=dialogues.context,
            tokens_per_step=dialogues.tokens_per_step,
            seed=job.seed,
            cache=job.folder.parent,
        )
        members.append((weight, stream))
    return MixtureStream([(shares.dialogue_weight, dialogues), *members]) if members else None


# --- facts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FactQuestion:
    """A fact with its question and answer as token ids."""

    fact: Fact
    prompt: list[int]
    answer: list[int]  # including its end of text


def encoded(fact: Fact, tokenizer: Tokenizer) -> FactQuestion:
    """Encode a fact. Raises DataError for an empty question or answer."""
    if not fact.question.strip() or not fact.answer.strip():
        raise DataError(f"fact {fact.id}: its question or answer is empty; fix or remove the fact")
    prompt = [tokenizer.end_of_text, *tokenizer.encode(fact.question + "\n")]
    return FactQuestion(fact, prompt, [*tokenizer.encode(fact.answer), tokenizer.end_of_text])


class FactSplit(PackedPieces):
    """One split of the facts, encoded and packed."""

    def __init__(self, path: Path, tokenizer: Tokenizer, *, context: int) -> None:
        """Raises DataError for a missing file, and for a fact longer than `context`."""
        if not path.is_file():
            raise DataError(f"{path}: expected facts here, found none; run dvc repro stage_tasks")
        self._facts = [encoded(fact, tokenizer) for fact in records.read(path, Fact)]
        pieces = [_piece(fact) for fact in self._facts]
        longest = max(range(len(pieces)), key=lambda index: len(pieces[index].ids), default=None)
        if longest is not None and len(pieces[longest].ids) > context:
            raise DataError(
                f"{path}: fact {self._facts[longest].fact.id} has {len(pieces[longest].ids)} tokens, more than"
                f" `context` ({context}); shorten the fact or raise `context`"
            )
        super().__init__(pieces, context)

    def digest(self) -> str:
        """A hash of every id, in order."""
        content = json.dumps([[fact.prompt, fact.answer] for fact in self._facts])
        return hashlib.sha256(content.encode()).hexdigest()


def _piece(fact: FactQuestion) -> Piece:
    ids = np.array([*fact.prompt, *fact.answer], dtype=np.int64)
    return Piece(ids, np.arange(len(ids)) >= len(fact.prompt))


class FactStream(PackedStream):
    """Batches of facts: a `batch.TokenStream`."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, *, context: int, tokens_per_step: int, seed: int) -> None:
        """Raises DataError like `FactSplit`, and if the facts do not fill one batch."""
        train, val = (FactSplit(folder / f"{split}.jsonl", tokenizer, context=context) for split in ("train", "val"))
        super().__init__(
            Splits("facts", train, val),
            tokenizer,
            context=context,
            tokens_per_step=tokens_per_step,
            seed=seed,
            fingerprint=fingerprint_of([train.digest(), val.digest(), context, tokens_per_step, seed]),
        )
