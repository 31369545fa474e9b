"""The shapes in which people and public data sets write rows -> the records of `streams.records`.

    {text}                                       Text
    {messages} {conversations}                   Dialogue   role/content or from/value; tools as a list or JSON text
    {system, conversations}, functions in it     Dialogue   ToolACE: [Name(a=1), ...]
    {query, tools, answers}                      Dialogue   xLAM: JSON texts, flat parameters
    {system, chat}                               Dialogue   Glaive: USER: ASSISTANT: <functioncall> FUNCTION RESPONSE:
    {instruction, input, output}                 Dialogue   Alpaca
    {question, answer} {prompt, response}        Dialogue
    {question | prompt, tests | test_cases}      Problem    asserts, or {args, expected}
    {prompt, chosen, rejected} {chosen, rejected}   Pair    strings, message lists, or transcripts with a common prefix

A row becomes one record or a `RowError` that names the field. Ids are the row's `id` or empty: `streams.intake` fills
those in. Dialogues are put into the OpenAI form of `streams.records`: call ids are counted from call_0, arguments are
JSON text, results follow their calls.

Not promised: that a dialogue is sensible, or that the arguments of a call fit the tool's schema.
"""

import os.path
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.streams import asserts, turns
from pipeline.streams.calls import RowError, from_json, tools
from pipeline.streams.records import Dialogue, Message, Pair, Problem, Text

Row = Mapping[str, Any]
KINDS = ("text", "code", "dialogues", "problems", "preferences")
SAMPLE_ROWS = 100  # so many rows decide the shape of a file


@dataclass(frozen=True)
class Columns:
    """Columns that a person named (`text_field`): texts join them, dialogues take the last as the answer to the rest."""

    names: Sequence[str] = ()

    def filled(self, row: Row) -> list[str]:
        """The texts of the named columns that are not empty, in order."""
        values = [row.get(name) for name in self.names]
        return [value for value in values if isinstance(value, str) and value.strip()]


@dataclass(frozen=True)
class Shape:
    """One way to write a row: does a row look like it, and what record does it make."""

    name: str
    kinds: tuple[str, ...]
    fits: Callable[[Row, Columns], bool]
    convert: Callable[[Row, Columns], Text | Dialogue | Problem | Pair]


def detect(rows: Sequence[Row], kind: str, columns: Columns) -> Shape | None:
    """The shape of `kind` that fits most of the rows, the more particular one when two fit as many; None: none fits."""
    candidates = [shape for shape in SHAPES if kind in shape.kinds]
    counts = [sum(shape.fits(row, columns) for row in rows) for shape in candidates]
    best = max(range(len(candidates)), key=lambda index: (counts[index], -index))
    return candidates[best] if counts[best] else None


def named(name: str, kind: str) -> Shape | None:
    """The shape called `name` if it makes records of `kind`; a shape given for another kind leaves this one to `detect`."""
    if name == "auto":
        return None
    matching = [shape for shape in SHAPES if shape.name == name]
    if not matching:
        known = ", ".join(["auto", *dict.fromkeys(shape.name for shape in SHAPES)])
        raise RowError("shape", f"expected one of {known}, got {name!r}")
    return next((shape for shape in matching if kind in shape.kinds), None)


def names(kind: str) -> list[str]:
    """The shapes that make records of `kind`."""
    return [shape.name for shape in SHAPES if kind in shape.kinds]


def convert(shape: Shape, row: Any, columns: Columns) -> Text | Dialogue | Problem | Pair:
    """One row as a record. Raises RowError, and nothing else."""
    if not isinstance(row, Mapping):
        raise RowError("row", f"expected an object, found {type(row).__name__}")
    try:
        return shape.convert(row, columns)
    except RecursionError as error:
        raise RowError("row", "nested too deeply") from error


def row_id(row: Row) -> str:
    """The `id` of a row as text; empty where there is none."""
    value = row.get("id")
    return str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""


def _string(row: Row, *names: str) -> str:
    """The first of these fields that is there, which must be a text that is not blank."""
    for name in names:
        if row.get(name) is not None:
            value = row[name]
            if not isinstance(value, str):
                raise RowError(name, f"expected a text, found {type(value).__name__}")
            if not value.strip():
                raise RowError(name, "is empty")
            return value
    raise RowError(names[0], "is missing")


def _optional(row: Row, name: str, default: str = "") -> str:
    value = row.get(name)
    return value if isinstance(value, str) and value.strip() else default


def _list(value: Any, field: str) -> list[Any]:
    """A list, or its JSON text (CSV and some parquet sets hold such)."""
    if isinstance(value, str):
        value = from_json(value, field)
    if not isinstance(value, list):
        raise RowError(field, f"expected a list, found {type(value).__name__}")
    return value


def _has(*names: str) -> Callable[[Row, Columns], bool]:
    return lambda row, columns: all(row.get(name) is not None for name in names)


# --- texts -----------------------------------------------------------------------------------------------------------


def _text(row: Row, columns: Columns) -> Text:
    return _document(row, _string(row, "text"))


def _columns_text(row: Row, columns: Columns) -> Text:
    parts = columns.filled(row)
    if not parts:
        raise RowError(",".join(columns.names) or "text_field", "no text in these columns")
    return _document(row, "\n\n".join(parts))


def _document(row: Row, text: str) -> Text:
    licence = _optional(row, "licence", _optional(row, "license"))
    return Text(text=text, source=_optional(row, "source"), path=row_id(row), licence=licence)


# --- dialogues -------------------------------------------------------------------------------------------------------


def _dialogue(row: Row, shape: str, messages: list[Message], tool_list: list[dict[str, Any]]) -> Dialogue:
    default = "tools" if tool_list else "chat"
    turns.check(messages, tool_list)
    return Dialogue(
        id=row_id(row),
        kind=_optional(row, "kind", default),
        category=_optional(row, "category", shape),
        messages=messages,
        tools=tool_list,
    )


def _columns_dialogue(row: Row, columns: Columns) -> Dialogue:
    parts = columns.filled(row)
    if len(columns.names) < 2 or len(parts) < 2 or not _optional(row, columns.names[-1]):
        raise RowError(
            ",".join(columns.names) or "text_field", "expected a question and, in the last column, its answer"
        )
    return _dialogue(row, "columns", turns.question("\n\n".join(parts[:-1]), parts[-1]), [])


def _messages(row: Row, columns: Columns) -> Dialogue:
    name = "messages" if row.get("messages") is not None else "conversations"
    tool_list = tools(row.get("tools", row.get("functions")))
    messages = turns.from_list(_list(row.get(name), name), name)
    system = _optional(row, "system")
    if system and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return _dialogue(row, "messages", messages, tool_list)


def _is_toolace(row: Row, columns: Columns) -> bool:
    system = row.get("system")
    return row.get("conversations") is not None and isinstance(system, str) and turns.find_functions(system) >= 0


def _toolace(row: Row, columns: Columns) -> Dialogue:
    if not _is_toolace(row, columns):
        raise RowError("system", "expected a text that holds a JSON list of functions")
    system, tool_list = turns.toolace_system(row["system"])
    messages = turns.toolace(_list(row.get("conversations"), "conversations"), "conversations")
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return _dialogue(row, "toolace", messages, tool_list)


def _xlam(row: Row, columns: Columns) -> Dialogue:
    messages = turns.xlam(_string(row, "query"), row.get("answers"), "answers")
    return _dialogue(row, "xlam", messages, tools(row.get("tools")))


def _glaive(row: Row, columns: Columns) -> Dialogue:
    system, tool_list = turns.glaive_system(_string(row, "system"), "system")
    messages = turns.glaive(_string(row, "chat"), "chat")
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return _dialogue(row, "glaive", messages, tool_list)


def _alpaca(row: Row, columns: Columns) -> Dialogue:
    instruction, extra = _string(row, "instruction"), _optional(row, "input")
    asked = f"{instruction}\n\n{extra}" if extra else instruction
    return _dialogue(row, "alpaca", turns.question(asked, _string(row, "output"), _optional(row, "system")), [])


def _question(row: Row, columns: Columns) -> Dialogue:
    if row.get("tests") is not None or row.get("test_cases") is not None:
        raise RowError("tests", "a row with tests is a problem: name its file under `problems`")
    names = ("question", "answer") if row.get("question") is not None else ("prompt", "response")
    asked, answer = _string(row, names[0]), _string(row, names[1])
    return _dialogue(row, "question", turns.question(asked, answer, _optional(row, "system")), [])


def _is_question(row: Row, columns: Columns) -> bool:
    return any(
        row.get(a) is not None and row.get(b) is not None for a, b in (("question", "answer"), ("prompt", "response"))
    )


# --- problems --------------------------------------------------------------------------------------------------------


def _problem(row: Row, columns: Columns) -> Problem:
    name = "tests" if row.get("tests") is not None else "test_cases"
    tests = [asserts.test(test, f"{name}[{index}]") for index, test in enumerate(_list(row.get(name), name))]
    if not tests:
        raise RowError(name, "no test")
    entry_point = _optional(row, "entry_point") or asserts.entry_point([test.get("assert", "") for test in tests])
    if not entry_point.isidentifier():
        raise RowError("entry_point", f"expected the name of the function under test, found {entry_point!r}")
    level = row.get("level")
    if level is not None and (isinstance(level, bool) or not isinstance(level, int) or not 1 <= level <= 5):
        raise RowError("level", f"expected a whole number from 1 to 5, found {level!r}")
    return Problem(
        id=row_id(row),
        level=3 if level is None else level,
        group=_optional(row, "group", "own"),
        key=_optional(row, "key"),
        question=_string(row, "question", "prompt"),
        entry_point=entry_point,
        signature=_optional(row, "signature"),
        tests=tests,
        answer=_optional(row, "answer", _optional(row, "response")) or None,
    )


def _is_problem(row: Row, columns: Columns) -> bool:
    asked = row.get("question") is not None or row.get("prompt") is not None
    return asked and (row.get("tests") is not None or row.get("test_cases") is not None)


# --- pairs -----------------------------------------------------------------------------------------------------------


def _pair(row: Row, columns: Columns) -> Pair:
    chosen, rejected = (_answer(row.get(name), name) for name in ("chosen", "rejected"))
    if row.get("prompt") is not None:
        prompt = _answer(row["prompt"], "prompt")
        if isinstance(prompt, str):
            prompt = turns.from_list([{"role": "user", "content": _string(row, "prompt")}], "prompt")
    elif isinstance(chosen, str) and isinstance(rejected, str):
        prompt, chosen, rejected = _common_transcript(chosen, rejected)
    else:
        prompt = []
    sides = [
        turns.from_list([{"role": "assistant", "content": s}], "chosen") if isinstance(s, str) else s
        for s in (chosen, rejected)
    ]
    if not prompt:  # both sides hold the whole conversation (TRL's implicit prompt)
        prompt = _common_prefix(*sides)
    sides = [side[len(prompt) :] if side[: len(prompt)] == prompt else side for side in sides]
    if not any(message["role"] == "user" for message in prompt):
        raise RowError("prompt", "no turn of the user, and no common beginning of `chosen` and `rejected` that has one")
    for name, side in zip(("chosen", "rejected"), sides, strict=True):
        if not side or side[0]["role"] != "assistant":
            raise RowError(name, "expected the assistant's answer after the prompt")
    if sides[0] == sides[1]:
        raise RowError("rejected", "equals `chosen`")
    gold = [_gold(row.get(name), name) for name in ("gold_chosen", "gold_rejected")]
    margin = row.get("margin")
    if margin is not None and (isinstance(margin, bool) or not isinstance(margin, int | float)):
        raise RowError("margin", f"expected a number, found {margin!r:.40}")
    return Pair(
        id=row_id(row),
        source=_optional(row, "source"),
        kind=_optional(row, "kind", "chat"),
        prompt=prompt,
        chosen=sides[0],
        rejected=sides[1],
        tools=tools(row.get("tools")),
        gold_chosen=gold[0],
        gold_rejected=gold[1],
        margin=margin,
        given_by=_optional(row, "given_by") or None,
    )


def _answer(value: Any, field: str) -> str | list[Message]:
    """A side of a pair: a text, or a message list (also as JSON text, in CSV)."""
    if isinstance(value, str) and value.lstrip().startswith('[{"'):
        value = from_json(value, field)
    if isinstance(value, list):
        return turns.from_list(value, field)
    if isinstance(value, str) and value.strip():
        return value
    raise RowError(field, "expected a text or a list of messages")


def _common_prefix(chosen: list[Message], rejected: list[Message]) -> list[Message]:
    length = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            break
        length += 1
    return chosen[:length]


def _common_transcript(chosen: str, rejected: str) -> tuple[list[Message], list[Message], list[Message]]:
    """hh-rlhf: two transcripts `Human: ... Assistant: ...`; the prompt is what they share, up to the last `Assistant:`."""
    shared = os.path.commonprefix([chosen, rejected])  # noqa: RUF071  (characters are what is compared)
    borders = [match.end() for match in re.finditer(r"(?:^|\n\n)Assistant:", shared)]
    if not borders:
        raise RowError("chosen", "expected `prompt`, or transcripts that share a beginning up to `Assistant:`")
    prompt = turns.transcript(shared[: borders[-1]].removesuffix("Assistant:"), "chosen")
    sides = [
        turns.transcript("Assistant:" + text[borders[-1] :], name)
        for text, name in ((chosen, "chosen"), (rejected, "rejected"))
    ]
    return prompt, sides[0], sides[1]


def _gold(value: Any, field: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise RowError(field, f"expected a number in [0, 1], found {value!r}")
    return float(value)


# The order is the order of trust: a row that fits two shapes is read as the one that stands first.
SHAPES = (
    Shape("columns", ("text", "code"), lambda row, columns: bool(columns.filled(row)), _columns_text),
    Shape("text", ("text", "code"), _has("text"), _text),
    Shape("columns", ("dialogues",), lambda row, columns: len(columns.filled(row)) > 1, _columns_dialogue),
    Shape("toolace", ("dialogues",), _is_toolace, _toolace),
    Shape("xlam", ("dialogues",), _has("query", "tools", "answers"), _xlam),
    Shape("glaive", ("dialogues",), _has("system", "chat"), _glaive),
    Shape(
        "messages",
        ("dialogues",),
        lambda row, columns: any(row.get(n) is not None for n in ("messages", "conversations")),
        _messages,
    ),
    Shape("alpaca", ("dialogues",), _has("instruction", "output"), _alpaca),
    Shape("question", ("dialogues",), _is_question, _question),
    Shape("problem", ("problems",), _is_problem, _problem),
    Shape("pair", ("preferences",), _has("chosen", "rejected"), _pair),
)
