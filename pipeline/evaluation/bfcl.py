"""The Berkeley Function Calling Leaderboard (BFCL), v3 and v4: file format, rules, and scores by category.

    BFCL_v3_simple.json        a row per line: id, question [[messages]], function [{name, description, parameters}]
    possible_answer/BFCL_v3_simple.json    a row per line: id, ground_truth [{name: {parameter: [accepted values]}}]

The category is part of the file name. The single-turn Python categories are supported, including `live_` ones: simple
(`simple_python` in v4), multiple, parallel, parallel_multiple, scored by their calls -> `ast_<category>`; irrelevance
(correct if there is no call) and relevance (correct if there is any call), which have no ground truth. Function names
are kept unchanged, including dots.

`check` judges the calls of a turn by the rules of BFCL's AST checker for Python, v3 (ShishirPatil/gorilla,
bfcl_eval/eval_checker/ast_eval/ast_checker.py). The ground truth is a list of {name: {parameter: [accepted values]}},
where "" means that the parameter may be absent; a nested object is a dict of lists of accepted values. The rules: the
number of calls and their names match; required parameters are present, and none is unknown; types match, including the
item type of a list; an int is accepted as a float; a value of a different type is accepted if the ground truth has that
type; strings are compared in lower case, without spaces or `,./-_*^`, and with unified quotes; lists are compared in
order, objects by key, and parallel calls in any order.

There are two deviations, both in favor of correct answers: parallel calls are matched by maximum bipartite matching
(the original takes the first fit, in order; `TurnCheck.greedy` is its verdict), and an int is also accepted as a float
inside a list.

`read` returns the rows of any test set supplied by path: JSON lines, a JSON list or one object, plain or gzip. Each
`FileRow` records its position in the file and validates its fields on access. Any fault raises a DataError of the form
`file:line: field: expected ..., found ...; repair the file or remove it from evaluate.benchmarks`.

Not supported: files too large for memory; types nested more than one level deep; Java and JavaScript; the leaderboard's
own prompts (the model is prompted in its chat format, with the functions as tools).
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.evaluation.intervals import wilson
from pipeline.evaluation.suites import CUT, Subject, SuiteResult
from pipeline.ingest import files, tool_calls
from pipeline.ingest.records import Message
from pipeline.ingest.tool_calls import RowError
from pipeline.run.errors import DataError
from pipeline.run.types import JsonObject
from pipeline.text import chat

Value = Any  # a JSON value
Call = JsonObject  # {"name": str, "arguments": dict}
Truth = dict[str, dict[str, list[Value]]]
TYPES: dict[str, type] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
}
BFCL_TYPES = {"dict": "object", "float": "number", "tuple": "array"}  # "any" becomes the empty schema
GZIP = b"\x1f\x8b"  # the magic bytes of gzip files


@dataclass(frozen=True)
class FileRow:
    """One row of a file. `where` is `file:line`, or `file, row n` in a JSON list."""

    where: str
    fields: JsonObject

    def wrong(self, field: str, expected: str) -> DataError:
        """Build the error for a malformed field."""
        value = repr(self.fields[field])[:80] if field in self.fields else "nothing"
        return DataError(
            f"{self.where}: {field}: expected {expected}, found {value}; repair the file or remove it from"
            " evaluate.benchmarks"
        )

    def text(self, field: str) -> str:
        """The value of a field that must be a non-blank string."""
        value = self.fields.get(field)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(field, "a string")
        return value

    def texts(self, field: str) -> list[str]:
        """The value of a field that must be a list of strings; empty if the field is absent or null."""
        value = self.fields.get(field)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.wrong(field, "a list of strings")
        return value

    def has(self, *fields: str) -> bool:
        """Whether the row has all these fields."""
        return all(field in self.fields for field in fields)


def read(path: Path) -> list[FileRow]:
    """The rows of a file, at least one. Raises DataError."""
    try:
        with path.open("rb") as file:
            is_gzip = file.read(len(GZIP)) == GZIP
        text = (files.unzipped(path) if is_gzip else path.read_bytes()).decode("utf-8-sig")
    except OSError as error:  # includes gzip.BadGzipFile
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: expected UTF-8 text, plain or gzip ({error}); convert or replace the file") from error
    rows = _rows_of_list(path, text) if text.lstrip().startswith("[") else _rows_of_lines(path, text)
    if not rows:
        raise DataError(f"{path}: the file has no rows; download it again or remove it from evaluate.benchmarks")
    return rows


def _rows_of_lines(path: Path, text: str) -> list[FileRow]:
    """One row per line, or a single row if the file is one multi-line object."""
    try:
        value = json.loads(text)
    except ValueError:
        numbered = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        return [_row(f"{path}:{number}", _load_json(f"{path}:{number}", line)) for number, line in numbered]
    return [_row(f"{path}:1", value)]


def _rows_of_list(path: Path, text: str) -> list[FileRow]:
    return [_row(f"{path}, row {number}", row) for number, row in enumerate(_load_json(str(path), text), start=1)]


def _load_json(where: str, text: str) -> Value:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        position = where if ":" in where.rpartition("/")[2] else f"{where}:{error.lineno}"
        raise DataError(f"{position}: invalid JSON ({error.msg}); repair the file or download it again") from error
    except RecursionError as error:
        raise DataError(f"{where}: the JSON is nested too deeply") from error


def _row(where: str, value: object) -> FileRow:
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected an object, found {type(value).__name__}; repair the file")
    return FileRow(where, value)


# -- rules -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TurnCheck:
    """The verdict on one turn. `error` is "" or the first violated rule, which `detail` explains."""

    valid: bool
    error: str = ""
    detail: str = ""
    greedy: bool = True  # the verdict under the original's greedy matching

    @property
    def greedy_disagrees(self) -> bool:
        return self.valid != self.greedy


RIGHT = TurnCheck(True)


def check(functions: Sequence[JsonObject], calls: Sequence[Call], truth: Sequence[Truth]) -> TurnCheck:
    """Judge the calls of one turn. `functions` are {name, parameters} (JSON schema, or BFCL's own type names)."""
    if len(calls) != len(truth):
        return _invalid("wrong_count", f"expected {len(truth)} calls, found {len(calls)}")
    by_name = {function["name"]: function for function in functions}
    verdicts = [[_check_expected_call(by_name, call, expected) for call in calls] for expected in truth]
    fits = [[verdict.valid for verdict in row] for row in verdicts]
    greedy = _matches_greedily(fits)
    if matching(fits) == len(truth):
        return TurnCheck(True, greedy=greedy)
    if len(truth) == 1:
        return verdicts[0][0]
    return _invalid("cannot_find_match", "; ".join(row[0].detail for row in verdicts if not any(v.valid for v in row)))


def matching(fits: list[list[bool]]) -> int:
    """Size of a maximum bipartite matching between rows and columns (Kuhn's augmenting paths)."""
    row_of: dict[int, int] = {}

    def augment(row: int, tried: set[int]) -> bool:
        for column, fit in enumerate(fits[row]):
            if fit and column not in tried:
                tried.add(column)
                if column not in row_of or augment(row_of[column], tried):
                    row_of[column] = row
                    return True
        return False

    return sum(augment(row, set()) for row in range(len(fits)))


def _matches_greedily(fits: list[list[bool]]) -> bool:
    """The original's matching: each expected call in turn takes the first unused call that fits."""
    taken: set[int] = set()
    for row in fits:
        free = next((column for column, fit in enumerate(row) if fit and column not in taken), None)
        if free is None:
            return False
        taken.add(free)
    return True


def check_call(function: JsonObject, arguments: dict[str, Value], accepted: dict[str, list[Value]]) -> TurnCheck:
    """Judge the arguments of a call whose name is correct."""
    parameters = function.get("parameters", {})
    properties = parameters.get("properties", {})
    for name in parameters.get("required", []):
        if name not in arguments:
            return _invalid("missing_required", f"required parameter {name!r} is missing")
    for name, value in arguments.items():
        if name not in properties or name not in accepted:
            return _invalid("unexpected_param", f"parameter {name!r} is unknown")
        verdict = _check_parameter(name, value, properties[name], accepted[name])
        if not verdict.valid:
            return verdict
    for name, values in accepted.items():
        if name not in arguments and "" not in values:
            return _invalid("missing_optional", f"parameter {name!r} is missing")
    return RIGHT


def standardize(text: str) -> str:
    """Normalize a string for comparison: no spaces, no `,./-_*^`, lower case, double quotes."""
    return re.sub(r"[ \,\.\/\-\_\*\^]", "", text).lower().replace("'", '"')


def _invalid(error: str, detail: str) -> TurnCheck:
    return TurnCheck(False, error, detail, greedy=False)


def _check_expected_call(by_name: dict[str, JsonObject], call: Call, expected: Truth) -> TurnCheck:
    name = next(iter(expected))
    if call["name"] != name:
        return _invalid("wrong_func_name", f"expected {name}, found {call['name']}")
    if not isinstance(call["arguments"], dict):
        return _invalid("wrong_type", f"the arguments of {name} are not an object")
    return check_call(by_name.get(name, {}), call["arguments"], expected[name])


def _json_type(schema: JsonObject) -> str | None:
    """The first non-null JSON type of a schema; None if any type is allowed."""
    types = schema.get("type")
    name = next((t for t in types if t != "null"), None) if isinstance(types, list) else types
    return BFCL_TYPES.get(name, name) if name in TYPES or name in BFCL_TYPES else None


def _check_parameter(name: str, value: Value, schema: JsonObject, accepted: list[Value]) -> TurnCheck:
    type_ = _json_type(schema)
    nested = _json_type(schema.get("items", {})) if type_ == "array" else None
    if value is None:
        return RIGHT if None in accepted else _value_error("null", name, value, accepted)
    if type_ is None:  # any type is allowed: compare by the value's own type
        type_ = next((t for t, python in TYPES.items() if type(value) is python), "string")
    if type_ == "number" and type(value) is int:
        value = float(value)
    fits, is_variable = _check_type(value, accepted, TYPES[type_], TYPES[nested] if nested else None)
    if not fits:
        return _invalid("wrong_type", f"parameter {name!r}: expected {schema.get('type')}, found {value!r}")
    if not is_variable:
        if type_ == "object":
            return _check_object(name, value, accepted)
        if type_ == "array" and nested == "object":
            return _check_objects(name, value, accepted)
        if type_ == "string":
            matches = standardize(value) in [standardize(a) for a in accepted if isinstance(a, str)]
            return RIGHT if matches else _value_error("string", name, value, accepted)
        if type_ == "array":
            # as in the original, "" among the accepted lists means the empty list
            matches = _standard_list(value) in [_standard_list(a) for a in accepted if isinstance(a, list | str)]
            return RIGHT if matches else _value_error("list", name, value, accepted)
    return RIGHT if value in accepted else _value_error("other", name, value, accepted)


def _check_type(value: Value, accepted: list[Value], expected: type, nested: type | None) -> tuple[bool, bool]:
    """Whether the type fits, and whether it differs from the schema's type (a "variable" in the original's terms)."""
    accepted_type = next((type(a) for a in accepted if a != "" and a is not None), None)
    if type(value) is expected:
        if nested is None:
            return True, accepted_type is not None and accepted_type is not expected
        for option in accepted:
            if not isinstance(option, list) or all(_item_type_fits(v, option, nested) for v in value):
                return True, accepted_type is not None and accepted_type is not expected
        return False, False
    return accepted_type is not None and type(value) is accepted_type, True


def _item_type_fits(value: Value, option: list[Value], nested: type) -> bool:
    value = float(value) if nested is float and type(value) is int else value
    return _check_type(value, option, nested, None)[0]


def _standard_list(values: list[Value] | str) -> list[Value]:
    return [standardize(value) if isinstance(value, str) else value for value in values]


def _check_object(name: str, value: dict[str, Value], accepted: list[Value]) -> TurnCheck:
    verdict = _value_error("object", name, value, accepted)
    for option in accepted:
        if not isinstance(option, dict):  # "" or null
            continue
        verdict = _check_keys(name, value, option)
        if verdict.valid:
            return verdict
    return verdict


def _check_keys(name: str, value: Value, option: dict[str, list[Value]]) -> TurnCheck:
    if not isinstance(value, dict):
        return _value_error("object", name, value, [option])
    for key, item in value.items():
        if key not in option:
            return _invalid("value_error:dict_key", f"parameter {name!r}: unknown key {key!r}")
        standard = standardize(item) if isinstance(item, str) else item
        if standard not in [standardize(a) if isinstance(a, str) else a for a in option[key]]:
            return _invalid("value_error:dict_value", f"parameter {name!r}, key {key!r}: found {item!r}")
    for key, values in option.items():
        if key not in value and "" not in values:
            return _invalid("value_error:dict_key", f"parameter {name!r}: key {key!r} is missing")
    return RIGHT


def _check_objects(name: str, value: list[Value], accepted: list[Value]) -> TurnCheck:
    verdict = _value_error("list_dict", name, value, accepted)
    for option in accepted:
        if not isinstance(option, list | str):
            continue
        if len(value) != len(option):  # as in the original, "" means the empty list
            verdict = _invalid("value_error:list_dict_count", f"parameter {name!r}: expected {len(option)} objects")
            continue
        verdicts = [_check_object(name, item, [expected]) for item, expected in zip(value, option, strict=True)]
        verdict = next((v for v in verdicts if not v.valid), RIGHT)
        if verdict.valid:
            return verdict
    return verdict


def _value_error(kind: str, name: str, value: Value, accepted: list[Value]) -> TurnCheck:
    return _invalid(f"value_error:{kind}", f"parameter {name!r}: found {value!r}, accepted {accepted!r:.200}")


# -- categories --------------------------------------------------------------------------------------------------------


NAME = re.compile(r"(?:BFCL_v\d+_)?(?P<category>\w+?)\.jsonl?(?:\.gz)?")
BY_CALLS = ("simple", "multiple", "parallel", "parallel_multiple")
BY_SILENCE = ("irrelevance", "relevance")
ROLES = ("system", "user")


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question. `truth` is empty in categories without ground-truth calls."""

    id: str
    messages: list[Message]
    tools: list[JsonObject]
    truth: list[Truth] = field(default_factory=list)


@dataclass(frozen=True)
class Questions:
    """A file's category and questions, or the reason why the file is not scored."""

    category: str
    asked: list[Question] = field(default_factory=list)
    skipped: str = ""


def is_question(row: FileRow) -> bool:
    """Whether a row looks like a BFCL row; multi-turn rows have classes instead of functions."""
    return row.has("id", "question") and (row.has("function") or row.has("involved_classes"))


def category(path: Path) -> str:
    """The category in a file name: `live_simple` for BFCL_v4_live_simple.json. Raises DataError if there is none."""
    match = NAME.fullmatch(path.name)
    if match is None:
        raise DataError(f"{path}: expected a file name that contains the category, such as BFCL_v4_simple_python.json")
    return match["category"].replace("simple_python", "simple")


def load(path: Path, rows: Sequence[FileRow]) -> Questions:
    """The questions in a file with their ground truth. Raises DataError."""
    name = category(path)
    kind = name.removeprefix("live_")
    if kind not in (*BY_CALLS, *BY_SILENCE):
        return Questions(name, skipped=f"skipped: {name} is not a single turn in Python")
    truths = _truths(path) if kind in BY_CALLS else None
    questions = [_question(row, truths) for row in rows]
    seen: set[str] = set()
    for row, question in zip(rows, questions, strict=True):
        if question.id in seen:
            raise row.wrong("id", "a unique id")
        seen.add(question.id)
    return Questions(name, questions)


def score(subject: Subject, suite: str, questions: Questions) -> SuiteResult:
    """The fraction of correct turns with a Wilson interval, and a row per question; or why the file was skipped."""
    if questions.skipped:
        return SuiteResult({"skipped": questions.skipped})
    name, kind = questions.category, questions.category.removeprefix("live_")
    prompts = {
        question.id: chat.render(subject.tokenizer, question.messages, question.tools, generation_prompt=True).ids
        for question in questions.asked
    }
    completions = subject.complete(suite, prompts, tokens=subject.settings.max_new_tokens, temperature=0.0)
    result = SuiteResult({"category": name, "left_out": len(prompts) - len(completions), "n": len(completions)})
    verdicts = []
    for question in questions.asked:
        if question.id not in completions:
            continue
        completion = completions[question.id]
        text = subject.tokenizer.decode(completion.ids)
        verdict = _check_reply(kind, question, chat.parse(text))
        verdicts.append(verdict)
        result.item(
            suite,
            question.id,
            completion,
            text,
            asked=[question.messages, question.tools],
            prompt=question.messages[-1]["content"][:CUT],
            category=name,
            verdict="right" if verdict.valid else verdict.error,
        )
    if verdicts:
        measure = f"ast_{name}" if kind in BY_CALLS else name
        result.measure(measure, wilson(sum(verdict.valid for verdict in verdicts), len(verdicts)))
    if kind in BY_CALLS:
        result.numbers["greedy_disagreements"] = sum(verdict.greedy_disagrees for verdict in verdicts)
    return result


def _check_reply(kind: str, question: Question, reply: chat.Reply) -> TurnCheck:
    if kind in BY_CALLS:
        return check([tool["function"] for tool in question.tools], reply.tool_calls, question.truth)
    valid = bool(reply.tool_calls) == (kind == "relevance")
    return TurnCheck(valid, "" if valid else "called" if kind == "irrelevance" else "silent", greedy=valid)


def _question(row: FileRow, truths: dict[str, list[Truth]] | None) -> Question:
    name, turns = row.text("id"), row.fields["question"]
    if not isinstance(turns, list) or len(turns) != 1 or not isinstance(turns[0], list) or not turns[0]:
        raise row.wrong("question", "a list of one turn, which is a list of messages")
    for message in turns[0]:
        if (
            not isinstance(message, dict)
            or message.get("role") not in ROLES
            or not isinstance(message.get("content"), str)
        ):
            raise row.wrong("question", "messages with a `role` (system or user) and a `content` string")
    try:
        tools = tool_calls.tools(row.fields.get("function"), "function")
    except RowError as error:
        raise row.wrong("function", f"a list of functions ({error.reason})") from error
    if truths is not None and name not in truths:
        raise row.wrong("id", "an id from the file of the same name in possible_answer/")
    return Question(id=name, messages=turns[0], tools=tools, truth=[] if truths is None else truths[name])


def _truths(path: Path) -> dict[str, list[Truth]]:
    """The accepted calls of each question, by id."""
    answers = path.parent / "possible_answer" / path.name
    if not answers.is_file():
        raise DataError(
            f"{path}: expected the accepted calls in {answers}, which does not exist; download that file too"
        )
    truths = {}
    for row in read(answers):
        truth = row.fields.get("ground_truth")
        if not isinstance(truth, list) or not truth or not all(map(_is_truth, truth)):
            raise row.wrong("ground_truth", "a list of {name: {parameter: [accepted values]}}")
        truths[row.text("id")] = truth
    return truths


def _is_truth(entry: object) -> bool:
    if not isinstance(entry, dict) or len(entry) != 1:
        return False
    (parameters,) = entry.values()
    return isinstance(parameters, dict) and all(isinstance(values, list) for values in parameters.values())
