"""Convert rows in the formats of users and public datasets to the records of `pipeline.ingest.records`.

    {text}                                       Text
    {messages} {conversations}                   Dialogue   role/content or from/value; tools as a list or JSON text
    {system, conversations}, functions in it     Dialogue   ToolACE: [Name(a=1), ...]
    {query, tools, answers}                      Dialogue   xLAM: JSON texts, flat parameters
    {system, chat}                               Dialogue   Glaive: USER: ASSISTANT: <functioncall> FUNCTION RESPONSE:
    {instruction, input, output}                 Dialogue   Alpaca
    {question, answer} {prompt, response} {prompt, completion} {instruction, response} {input, output}     Dialogue
    {question | prompt, tests | test_cases}      Problem    asserts, or {args, expected}
    {prompt, chosen, rejected} {chosen, rejected}   Pair    strings, messages, or transcripts with a common prefix
    {instruction, input, chosen, rejected}          Pair    LLaMA-Factory, Alpaca's form
    {conversations, chosen, rejected}               Pair    LLaMA-Factory, ShareGPT's form: one message per side
    {prompt, completion, label}                     Label   TRL, unpaired: strings or messages; label true or false
    {messages | conversations, kto_tag}             Label   LLaMA-Factory; the last message is the answer
    {instruction, input, output, kto_tag}           Label   LLaMA-Factory, Alpaca's form

A row becomes one record, or a `RowError` that names the field. A record's id is the row's `id` or empty:
`intake.Intake` fills in missing ids. Dialogues use the OpenAI form of `records`: call ids count from call_0, arguments
are JSON text, and results follow their calls.

Tests of a problem may be `"assert f(1) == 2"`, `{"assert": ...}`, `{"args": "[1]", "expected": "2"}` with Python
literals as text, or the same with JSON values. They become `{"assert", "visible"}` or `{"args", "expected",
"visible"}`. Tests are only parsed here; `pipeline.sandbox` runs them.

`literals.read` parses untrusted Python literals, here and in the sandbox. It accepts what `ast.literal_eval` does but
hashes nothing, so it builds no sets or dicts: a 500 KB row can contain a set of integers that all share one hash, and
building that set takes seconds. The caller's functions get the elements of sets and the pairs of dicts as lists.

Not guaranteed: that a dialogue makes sense, that call arguments match the tool's schema, that a test passes for any
program, or that equal elements of a set are merged (that is up to the caller).
"""

import ast
import builtins
import os.path
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.ingest import conversations
from pipeline.ingest.records import Dialogue, Label, Message, Pair, Problem, SourceRecord, Text
from pipeline.ingest.tool_calls import RowError, from_json, tools
from pipeline.run.types import JsonObject
from pipeline.text import literals

Row = Mapping[str, object]
SAMPLE_ROWS = 100  # rows used to detect a file's shape


@dataclass(frozen=True)
class Columns:
    """Columns named in the configuration (`text_field`): joined for a text; in a dialogue, the last is the answer to
    the rest.
    """

    names: Sequence[str] = ()

    def filled(self, row: Row) -> list[str]:
        """The non-empty texts of the named columns, in order."""
        values = [row.get(name) for name in self.names]
        return [value for value in values if isinstance(value, str) and value.strip()]


@dataclass(frozen=True)
class Shape:
    """One row format: whether a row `fits` it, and how to `convert` the row to a record."""

    name: str
    kinds: tuple[str, ...]
    fits: Callable[[Row, Columns], bool]
    convert: Callable[[Row, Columns], SourceRecord]


def detect(rows: Sequence[Row], kind: str, columns: Columns) -> Shape | None:
    """The shape of `kind` that fits the most rows; ties go to the first in SHAPES. None: no shape fits."""
    candidates = [shape for shape in SHAPES if kind in shape.kinds]
    counts = [sum(shape.fits(row, columns) for row in rows) for shape in candidates]
    best = max(range(len(candidates)), key=lambda index: (counts[index], -index))
    return candidates[best] if counts[best] else None


def named(name: str, kind: str) -> Shape | None:
    """The shape called `name`; None for `auto` or if that shape produces no records of `kind`: then use `detect`.

    Raises RowError for an unknown name.
    """
    if name == "auto":
        return None
    matching = [shape for shape in SHAPES if shape.name == name]
    if not matching:
        known = ", ".join(["auto", *dict.fromkeys(shape.name for shape in SHAPES)])
        raise RowError("shape", f"expected one of {known}, got {name!r}")
    return next((shape for shape in matching if kind in shape.kinds), None)


def names(kind: str) -> list[str]:
    """The shapes that produce records of `kind`."""
    return [shape.name for shape in SHAPES if kind in shape.kinds]


def convert(shape: Shape, row: object, columns: Columns) -> SourceRecord:
    """Convert one row to a record. Raises RowError and nothing else."""
    if not isinstance(row, Mapping):
        raise RowError("row", f"expected an object, found {type(row).__name__}")
    try:
        return shape.convert(row, columns)
    except RecursionError as error:
        raise RowError("row", "nested too deeply") from error


def row_id(row: Row) -> str:
    """The `id` of a row as text; empty if there is none."""
    value = row.get("id")
    return str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""


def _string(row: Row, *names: str) -> str:
    """The first of these fields that is present; it must be a non-blank string."""
    for name in names:
        if row.get(name) is not None:
            value = row[name]
            if not isinstance(value, str):
                raise RowError(name, f"expected a string, found {type(value).__name__}")
            if not value.strip():
                raise RowError(name, "is empty")
            return value
    raise RowError(names[0], "is missing")


def _optional(row: Row, name: str, default: str = "") -> str:
    value = row.get(name)
    return value if isinstance(value, str) and value.strip() else default


def _list(value: object, field: str) -> list[object]:
    """A list, or its JSON text (as in CSV and some parquet datasets)."""
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
    license = _optional(row, "license", _optional(row, "licence"))
    return Text(text=text, source=_optional(row, "source"), path=row_id(row), license=license)


# --- dialogues -------------------------------------------------------------------------------------------------------


def _dialogue(row: Row, shape: str, messages: list[Message], tool_list: list[JsonObject]) -> Dialogue:
    if (name := next((name for name in VERDICTS if isinstance(row.get(name), bool)), None)) is not None:
        reason = "a row with a label is feedback, and its answer may be bad: list the file under `labels`"
        raise RowError(name, reason)
    default = "tools" if tool_list else "chat"
    conversations.check(messages, tool_list)
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
            ",".join(columns.names) or "text_field", "expected a question, with its answer in the last column"
        )
    return _dialogue(row, "columns", conversations.question("\n\n".join(parts[:-1]), parts[-1]), [])


def _messages(row: Row, columns: Columns) -> Dialogue:
    name = "messages" if row.get("messages") is not None else "conversations"
    tool_list = tools(row.get("tools", row.get("functions")))
    messages = conversations.from_list(_list(row.get(name), name), name)
    system = _optional(row, "system")
    if system and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return _dialogue(row, "messages", messages, tool_list)


def _is_toolace(row: Row, columns: Columns) -> bool:
    system = row.get("system")
    return (
        row.get("conversations") is not None and isinstance(system, str) and conversations.find_functions(system) >= 0
    )


def _toolace(row: Row, columns: Columns) -> Dialogue:
    if not _is_toolace(row, columns):
        raise RowError("system", "expected a string with a JSON list of functions")
    system, tool_list = conversations.toolace_system(_string(row, "system"))
    messages = conversations.toolace(_list(row.get("conversations"), "conversations"), "conversations")
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return _dialogue(row, "toolace", messages, tool_list)


def _xlam(row: Row, columns: Columns) -> Dialogue:
    messages = conversations.xlam(_string(row, "query"), row.get("answers"), "answers")
    return _dialogue(row, "xlam", messages, tools(row.get("tools")))


def _glaive(row: Row, columns: Columns) -> Dialogue:
    system, tool_list = conversations.glaive_system(_string(row, "system"), "system")
    messages = conversations.glaive(_string(row, "chat"), "chat")
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return _dialogue(row, "glaive", messages, tool_list)


def _alpaca(row: Row, columns: Columns) -> Dialogue:
    instruction, extra = _string(row, "instruction"), _optional(row, "input")
    question = f"{instruction}\n\n{extra}" if extra else instruction
    return _dialogue(
        row, "alpaca", conversations.question(question, _string(row, "output"), _optional(row, "system")), []
    )


QUESTIONS = (
    ("question", "answer"),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "response"),
    ("input", "output"),
)


def _question(row: Row, columns: Columns) -> Dialogue:
    if row.get("tests") is not None or row.get("test_cases") is not None:
        raise RowError("tests", "a row with tests is a problem: list the file under `problems`")
    names = next((pair for pair in QUESTIONS if _has(*pair)(row, columns)), QUESTIONS[0])
    question, answer = (_answer(row.get(name), name) for name in names)
    if isinstance(question, str) and isinstance(answer, str):
        return _dialogue(row, "question", conversations.question(question, answer, _optional(row, "system")), [])
    sides = [_as_messages(side, role) for side, role in ((question, "user"), (answer, "assistant"))]
    return _dialogue(row, "question", [*sides[0], *sides[1]], tools(row.get("tools")))


def _is_question(row: Row, columns: Columns) -> bool:
    return any(_has(*pair)(row, columns) for pair in QUESTIONS)


def _as_messages(side: str | list[Message], role: str) -> list[Message]:
    """The messages of one side, which in TRL may be a string or a list of messages."""
    return side if isinstance(side, list) else conversations.from_list([{"role": role, "content": side}], role)


# --- problems --------------------------------------------------------------------------------------------------------


def _problem(row: Row, columns: Columns) -> Problem:
    name = "tests" if row.get("tests") is not None else "test_cases"
    tests = [parse_test(test, f"{name}[{index}]") for index, test in enumerate(_list(row.get(name), name))]
    if not tests:
        raise RowError(name, "no tests")
    entry_point = _optional(row, "entry_point") or most_called([test.get("assert", "") for test in tests])
    if not entry_point.isidentifier():
        raise RowError("entry_point", f"expected the name of the function under test, found {entry_point!r}")
    level = row.get("level")
    if level is not None and (isinstance(level, bool) or not isinstance(level, int) or not 1 <= level <= 5):
        raise RowError("level", f"expected an integer from 1 to 5, found {level!r}")
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
    has_question = row.get("question") is not None or row.get("prompt") is not None
    return has_question and (row.get("tests") is not None or row.get("test_cases") is not None)


# --- pairs -----------------------------------------------------------------------------------------------------------


def _pair(row: Row, columns: Columns) -> Pair:
    chosen, rejected = (_answer(row.get(name), name) for name in ("chosen", "rejected"))
    history = next((name for name in ("conversations", "messages") if row.get(name) is not None), None)
    if row.get("prompt") is None and history is not None:
        prompt = conversations.from_list(_list(row[history], history), history)
    elif row.get("prompt") is None and row.get("instruction") is not None:
        extra = _optional(row, "input")
        question = _string(row, "instruction") + (f"\n\n{extra}" if extra else "")
        prompt = conversations.from_list([{"role": "user", "content": question}], "instruction")
    elif row.get("prompt") is not None:
        prompt = _answer(row["prompt"], "prompt")
        if isinstance(prompt, str):
            prompt = conversations.from_list([{"role": "user", "content": _string(row, "prompt")}], "prompt")
    elif isinstance(chosen, str) and isinstance(rejected, str):
        prompt, chosen, rejected = _common_transcript(chosen, rejected)
    else:
        prompt = []
    sides = [
        conversations.from_list([{"role": "assistant", "content": s}], "chosen") if isinstance(s, str) else s
        for s in (chosen, rejected)
    ]
    if not prompt:  # both sides contain the entire conversation (TRL's implicit prompt)
        prompt = _common_prefix(*sides)
    sides = [side[len(prompt) :] if side[: len(prompt)] == prompt else side for side in sides]
    if not any(message["role"] == "user" for message in prompt):
        raise RowError("prompt", "no user turn, and no common prefix of `chosen` and `rejected` that contains one")
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


def _answer(value: object, field: str) -> str | list[Message]:
    """A side of a pair: a string, a message list (as JSON text in CSV), or one message."""
    if isinstance(value, str) and value.lstrip().startswith('[{"'):
        value = from_json(value, field)
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, list):
        return conversations.from_list(value, field)
    if isinstance(value, str) and value.strip():
        return value
    empty = isinstance(value, str)
    raise RowError(field, "is empty" if empty else f"expected a string or messages, found {type(value).__name__}")


def _common_prefix(chosen: list[Message], rejected: list[Message]) -> list[Message]:
    length = 0
    for left, right in zip(chosen, rejected, strict=False):
        if left != right:
            break
        length += 1
    return chosen[:length]


def _common_transcript(chosen: str, rejected: str) -> tuple[list[Message], list[Message], list[Message]]:
    """hh-rlhf: two transcripts `Human: ... Assistant: ...`. The prompt is their common prefix up to the last
    `Assistant:`.
    """
    shared = os.path.commonprefix([chosen, rejected])  # noqa: RUF071  (compares characters on purpose)
    borders = [match.end() for match in re.finditer(r"(?:^|\n\n)Assistant:", shared)]
    if not borders:
        raise RowError("chosen", "expected `prompt`, or transcripts with a common prefix up to `Assistant:`")
    prompt = conversations.transcript(shared[: borders[-1]].removesuffix("Assistant:"), "chosen")
    sides = [
        conversations.transcript("Assistant:" + text[borders[-1] :], name)
        for text, name in ((chosen, "chosen"), (rejected, "rejected"))
    ]
    return prompt, sides[0], sides[1]


def _gold(value: object, field: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise RowError(field, f"expected a number in [0, 1], found {value!r}")
    return float(value)


# --- labels ----------------------------------------------------------------------------------------------------------


VERDICTS = ("desirable", "label", "kto_tag")  # ours, TRL's, LLaMA-Factory's
ANSWERS = ("answer", "completion", "response", "output")
WORDS = {"true": True, "false": False}  # in CSV


def _label(row: Row, columns: Columns) -> Label:
    desirable = _verdict(row)
    history = next((name for name in ("messages", "conversations") if row.get(name) is not None), None)
    if history is not None:
        whole = conversations.from_list(_list(row[history], history), history)
        system = _optional(row, "system")
        if system and whole and whole[0]["role"] != "system":
            whole.insert(0, {"role": "system", "content": system})
        start = 1 + max((n for n, message in enumerate(whole) if message["role"] != "assistant"), default=-1)
        prompt, answer, field = whole[:start], whole[start:], history
    else:
        prompt = _label_prompt(row)
        field = next((name for name in ANSWERS if row.get(name) is not None), ANSWERS[1])
        answer = _as_messages(_answer(row.get(field), field), "assistant")
        answer = answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer
    if not any(message["role"] == "user" for message in prompt):
        raise RowError("prompt" if history is None else field, "no user turn before the answer")
    if not answer or answer[0]["role"] != "assistant":
        raise RowError(field, "expected the assistant's answer after the prompt")
    if not any(message["content"].strip() or message.get("tool_calls") for message in answer):
        raise RowError(field, "the answer is empty")
    return Label(
        id=row_id(row),
        source=_optional(row, "source"),
        kind=_optional(row, "kind", "chat"),
        prompt=prompt,
        answer=answer,
        desirable=desirable,
        tools=tools(row.get("tools")),
        given_by=_optional(row, "given_by") or None,
    )


def _verdict(row: Row) -> bool:
    """Whether the answer is good: true or false (as a word in CSV)."""
    name = next((name for name in VERDICTS if row.get(name) is not None), VERDICTS[1])
    value = row.get(name)
    value = WORDS.get(value.strip().lower(), value) if isinstance(value, str) else value
    if not isinstance(value, bool):
        raise RowError(name, f"expected true (a good answer) or false (a bad one), found {value!r:.40}")
    return value


def _label_prompt(row: Row) -> list[Message]:
    system = _optional(row, "system")
    head: list[Message] = [{"role": "system", "content": system}] if system else []
    if row.get("prompt") is not None:
        prompt = _as_messages(_answer(row["prompt"], "prompt"), "user")
    else:
        extra = _optional(row, "input")
        question = _string(row, "instruction", "question") + (f"\n\n{extra}" if extra else "")
        prompt = _as_messages(question, "user")
    return prompt if prompt and prompt[0]["role"] == "system" else [*head, *prompt]


def _is_label(row: Row, columns: Columns) -> bool:
    """Whether the row has a verdict and an answer that the verdict may refer to."""
    judged = any(row.get(name) is not None for name in VERDICTS)
    return judged and any(row.get(name) is not None for name in ("messages", "conversations", *ANSWERS))


# In order of precedence: a row that fits two shapes is read as the first.
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
    Shape("label", ("labels",), _is_label, _label),
)


# --- tests of problems -----------------------------------------------------------------------------------------------


def parse_test(test: object, field: str) -> JsonObject:
    """One test from `"assert ..."`, `{"assert": ...}` or `{"args", "expected"}`, with values as JSON or as Python
    literals given as text.
    """
    if isinstance(test, str):
        test = {"assert": test}
    if not isinstance(test, dict):
        raise RowError(field, f"expected an assert or an object, found {type(test).__name__}")
    visible = test.get("visible") is True
    if test.get("assert") is not None:
        source = test["assert"]
        tree = _parse_python(source, field) if isinstance(source, str) else None
        if tree is None or not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
            raise RowError(f"{field}.assert", "expected Python with an `assert`")
        return {"assert": source, "visible": visible}
    if "args" not in test or "expected" not in test:
        raise RowError(field, "expected `assert`, or `args` and `expected`")
    args, expected = (_literal(test[name], f"{field}.{name}") for name in ("args", "expected"))
    if not args.startswith(("[", "(")):
        raise RowError(f"{field}.args", f"expected the list of positional arguments, found {args[:40]!r}")
    return {"args": args, "expected": expected, "visible": visible}


def most_called(sources: Sequence[str]) -> str:
    """The name called by the most asserts. Ties go to the first; builtins are used only if nothing else is called."""
    calls: Counter[str] = Counter()
    for source in sources:
        nodes = [node for node in ast.walk(_parse_python(source, "tests")) if isinstance(node, ast.Call)]
        functions = dict.fromkeys(node.func.id for node in nodes if isinstance(node.func, ast.Name))
        calls.update(list(functions))  # once per assert
    own = [name for name in calls if not hasattr(builtins, name)]
    return max(own or calls, key=lambda name: calls[name], default="")


def _literal(value: object, field: str) -> str:
    text = value.strip() if isinstance(value, str) else repr(value)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the data may contain invalid escapes such as "\d"
            literals.read(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        reason = f"expected a Python literal as text (a string is \"'abc'\"), found {text[:40]!r}"
        raise RowError(field, reason) from error
    return text


def _parse_python(source: str, field: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise RowError(field, f"not Python ({error})") from error
