"""The records that data sources produce, and their JSONL form. Stages get nothing else from a data source.

`messages`, `prompt`, `chosen`, `rejected` and the `answer` of a label are lists of messages in the OpenAI form:

    {"role": "system" | "user", "content": str}
    {"role": "assistant", "content": str, "tool_calls": [{"id": "call_0", "type": "function",
                                                          "function": {"name": str, "arguments": JSON text}}]}
    {"role": "tool", "tool_call_id": "call_0", "name": str, "content": str}

`tool_calls` is omitted if empty. `tools` contains `{"type": "function", "function": {name, description, parameters}}`.
A problem's test is `{"args": "[1, 2]", "expected": "3", "visible": bool}` (Python literals as text: `args` is the
list of positional arguments) or `{"assert": "assert f(1) == 2", "visible": bool}`.
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
    source: str  # package, family or dataset
    path: str  # unique within the source
    license: str
    context: str = ""  # what precedes it in its repository (text/repositories.py); not trained on


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    """One conversation, with the tools available to the assistant."""

    id: str
    kind: str  # "tools", "choice", "code", "story", "copy", "talk", "chat"
    category: str  # within the kind: "simple", "parallel", ..., or a problem's group
    messages: list[Message]
    tools: list[JsonObject] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One programming problem with tests; `answer` is None if only the tests are known (problems for RL)."""

    id: str
    level: int  # 1 easy .. 5 hard
    group: str  # for reporting results: "easy", "medium", "hard", "phrasing", "told"
    key: str  # shared by all versions of one problem; never in two splits
    question: str
    entry_point: str
    signature: str
    tests: list[JsonObject]
    answer: str | None = None
    context: str | None = None  # the program that answers are appended to; omitted in the file if None

    def program(self, source: str | None) -> str | None:
        """The program to judge: the context, if any, followed by `source`; None if `source` is None."""
        return source if source is None or self.context is None else self.context + source


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two answers to the same prompt. `gold_*`: true scores in [0, 1]; `flipped`: label noise swapped the answers."""

    id: str
    source: str
    kind: str  # "code", "tools", "story", or the kind given in the user's file
    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: list[JsonObject] = field(default_factory=list)
    gold_chosen: float | None = None
    gold_rejected: float | None = None
    flipped: bool = False
    margin: float | None = None  # how far the chosen answer's reward should exceed the rejected one's
    # What is needed to score an answer: {"entry_point", "tests"} for a problem, {"right": message} for a tool turn,
    # {} for a story; None if unknown.
    truth: JsonObject | None = None
    given_by: str | None = None  # owner of the API key used to give this feedback on the web page


@dataclass(frozen=True, kw_only=True)
class Label:
    """An answer that somebody rated good or bad, with nothing to compare it to."""

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
    """A question to be answered from memory, with its answer."""

    id: str
    service: str  # the subject of the question
    attribute: str  # what the question asks about the service; used to group results
    question: str
    answer: str


SourceRecord = Text | Dialogue | Problem | Pair | Label  # what a row of a file or dataset becomes
Record = TypeVar("Record", Text, Dialogue, Problem, Pair, Label, Fact)


def unpaired(pairs: Iterable[Pair]) -> Iterator[Label]:
    """Two consecutive labels per pair: the chosen answer is good, the rejected one is bad."""
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
    """One line of JSON without its line feed; keys are in dataclass order, so equal records give equal bytes."""
    return json.dumps(fields_of(record), ensure_ascii=False)


def fields_of(record: SourceRecord | Fact) -> JsonObject:
    """The fields of a record as written and hashed. An empty context is omitted, so that records without a context
    keep the bytes and ids they had before the field existed.
    """
    row = dict(vars(record))
    if not row.get("context", True):
        del row["context"]
    return row


def is_empty(path: Path) -> bool:
    """Whether the records file exists and is empty."""
    return path.is_file() and not path.stat().st_size


def write(path: Path, records: Iterable[SourceRecord | Fact]) -> int:
    """Write records as JSONL (UTF-8, `\\n`) and return how many there are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for record in records:
            file.write(dumps(record) + "\n")
            count += 1
    return count


def read(path: Path, shape: type[Record]) -> Iterator[Record]:
    """Read what `write` wrote. Raises DataError naming the file, line and field."""
    types = get_type_hints(shape)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
                raise DataError(
                    f"{path}:{number}: not JSON in UTF-8 ({reason}); run dvc repro to rebuild the file"
                ) from error
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
    """Whether a JSON value matches a field's type; list elements are checked, object values are not."""
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(kind, UnionType):
        return any(_fits(value, option) for option in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(entry, get_args(kind)[0]) for entry in value)
    return isinstance(value, get_origin(kind) or kind)
