"""The records that a data source gives, and their JSONL form. Nothing else crosses that border.

`messages`, `prompt`, `chosen`, `rejected`, `answer` of a label are lists of messages in the OpenAI form:

    {"role": "system" | "user", "content": str}
    {"role": "assistant", "content": str, "tool_calls": [{"id": "call_0", "type": "function",
                                                          "function": {"name": str, "arguments": JSON text}}]}
    {"role": "tool", "tool_call_id": "call_0", "name": str, "content": str}

`tool_calls` is absent when there is none. `tools` holds `{"type": "function", "function": {name, description,
parameters}}`. A test of a problem is `{"args": "[1, 2]", "expected": "3", "visible": bool}` (Python literals as text:
`args` is the list of positional arguments) or `{"assert": "assert f(1) == 2", "visible": bool}`.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import TypeVar, get_args, get_origin, get_type_hints

from pipeline.run.config import type_name
from pipeline.run.errors import DataError
from pipeline.run.types import JsonObject

Message = JsonObject


@dataclass(frozen=True, kw_only=True)
class Text:
    """One document of running text or code."""

    text: str
    source: str  # package, family or data set
    path: str  # unique within the source
    licence: str
    context: str = ""  # what stands before it in its repository (text/repositories.py); it is not trained on


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    """One conversation, with the tools that the assistant may call."""

    id: str
    kind: str  # "tools", "choice", "code", "story", "copy", "talk", "chat"
    category: str  # within the kind: "simple", "parallel", ..., or a problem's group
    messages: list[Message]
    tools: list[JsonObject] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One programming problem with tests; `answer` is None where only the tests are known (problems for RL)."""

    id: str
    level: int  # 1 easy .. 5 hard
    group: str  # results are reported under it: "easy", "medium", "hard", "phrasing", "told"
    key: str  # equal for two versions of one problem; never in two splits
    question: str
    entry_point: str
    signature: str
    tests: list[JsonObject]
    answer: str | None = None
    context: str | None = None  # the program that every answer follows; absent in the file where there is none

    def program(self, source: str | None) -> str | None:
        """A candidate's source as it is judged."""
        return source if source is None or self.context is None else self.context + source


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two answers to one prompt; `gold_*` in [0, 1] is the true score, `flipped`: label noise swapped them."""

    id: str
    source: str
    kind: str  # "code", "tools", "story", or the kind in the user's file
    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: list[JsonObject] = field(default_factory=list)
    gold_chosen: float | None = None
    gold_rejected: float | None = None
    flipped: bool = False
    margin: float | None = None  # by which the reward of the chosen answer should exceed that of the other
    # Scores any answer to the prompt: {"entry_point", "tests"} of a problem, {"right": message} of a tool turn, {} of a
    # story; None where it is unknown.
    truth: JsonObject | None = None
    given_by: str | None = None  # the owner of the API key that sent it from the web page


@dataclass(frozen=True, kw_only=True)
class Label:
    """An answer that somebody found good or bad, without another one to compare it with."""

    id: str
    source: str
    kind: str  # as in Pair
    prompt: list[Message]
    answer: list[Message]
    desirable: bool
    tools: list[JsonObject] = field(default_factory=list)
    given_by: str | None = None  # as in Pair


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A question whose answer must be known by heart, with the answer."""

    id: str
    service: str  # that the question is about
    attribute: str  # of the service; results are reported under it
    question: str
    answer: str


SourceRecord = Text | Dialogue | Problem | Pair | Label  # the records that rows of files and data sets become
Record = TypeVar("Record", Text, Dialogue, Problem, Pair, Label, Fact)


def unpaired(pairs: Iterable[Pair]) -> Iterator[Label]:
    """Two labels of each pair, side by side: its chosen answer is good, its rejected one is bad."""
    for pair in pairs:
        for side, answer, desirable in (("chosen", pair.chosen, True), ("rejected", pair.rejected, False)):
            yield Label(
                id=f"{pair.id}-{side}",
                source=pair.source,
                kind=pair.kind,
                prompt=pair.prompt,
                answer=answer,
                desirable=desirable,
                tools=pair.tools,
                given_by=pair.given_by,
            )


def dumps(record: SourceRecord | Fact) -> str:
    """One line of JSON without the line feed; key order is the dataclass's, so equal records give equal bytes."""
    return json.dumps(fields_of(record), ensure_ascii=False)


def fields_of(record: SourceRecord | Fact) -> JsonObject:
    """The fields of a record as they are written and hashed: a context only where there is one, so that the bytes and
    ids of all others are older than this field.
    """
    row = dict(vars(record))
    if not row.get("context", True):
        del row["context"]
    return row


def is_empty(path: Path) -> bool:
    """Whether a file of records is there and has none."""
    return path.is_file() and not path.stat().st_size


def write(path: Path, records: Iterable[SourceRecord | Fact]) -> int:
    """Write records as JSONL (UTF-8, `\\n`) and return their number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for record in records:
            file.write(dumps(record) + "\n")
            count += 1
    return count


def read(path: Path, shape: type[Record]) -> Iterator[Record]:
    """Read what `write` wrote. Raises DataError naming file, line and field."""
    types = get_type_hints(shape)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
                raise DataError(f"{path}:{number}: not JSON in UTF-8 ({reason}); rebuild it with dvc repro") from error
            if not isinstance(row, dict) or not row.keys() <= types.keys():
                raise DataError(f"{path}:{number}: expected the keys of {shape.__name__} ({', '.join(sorted(types))})")
            for name, value in row.items():
                if not _fits(value, types[name]):
                    raise DataError(f"{path}:{number}: {name}: expected {type_name(types[name])}, found {value!r:.80}")
            try:
                yield shape(**row)
            except TypeError as error:
                raise DataError(f"{path}:{number}: {error}") from error


def _fits(value: object, kind: type | UnionType) -> bool:
    """Whether a value read from JSON has a field's type; elements of lists are checked, values of objects are not."""
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(kind, UnionType):
        return any(_fits(value, option) for option in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(entry, get_args(kind)[0]) for entry in value)
    return isinstance(value, get_origin(kind) or kind)
