"""Files of the Berkeley Function Calling Leaderboard, v3 and v4 -> scores by category, under the rules of `bfcl.py`.

    BFCL_v3_simple.json                    a row a line: id, question [[messages]], function [{name, description, parameters}]
    possible_answer/BFCL_v3_simple.json    a row a line: id, ground_truth [{name: {parameter: [accepted values]}}]

The category is in the name. Scored are the single turns in Python, `live_` ones too: simple (`simple_python` in v4),
multiple, parallel, parallel_multiple by their calls -> `ast_<category>`; irrelevance (no call is right) and relevance (any
call is), which have no truth. Names of functions stay as they are, dots included.

Not promised: the leaderboard's own prompts; the model is asked in its chat format with the functions as its tools.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import DataError
from pipeline.evaluation import bfcl, rows
from pipeline.evaluation.intervals import wilson
from pipeline.evaluation.rows import Row
from pipeline.evaluation.suites import CUT, Result, Subject
from pipeline.streams import calls
from pipeline.streams.calls import RowError
from pipeline.streams.records import Message
from pipeline.text import chat

NAME = re.compile(r"(?:BFCL_v\d+_)?(?P<category>\w+?)\.jsonl?(?:\.gz)?")
BY_CALLS = ("simple", "multiple", "parallel", "parallel_multiple")
BY_SILENCE = ("irrelevance", "relevance")
ROLES = ("system", "user")


@dataclass(frozen=True, kw_only=True)
class Question:
    """One row. `truth` is empty where no calls are compared."""

    id: str
    messages: list[Message]
    tools: list[dict[str, Any]]
    truth: list[bfcl.Truth] = field(default_factory=list)


@dataclass(frozen=True)
class Questions:
    """A file: its category and its rows, or why it is not scored."""

    category: str
    asked: list[Question] = field(default_factory=list)
    skipped: str = ""


def is_question(row: Row) -> bool:
    """Whether a row looks like one of these files; multi-turn rows name classes instead of functions."""
    return row.has("id", "question") and (row.has("function") or row.has("involved_classes"))


def category(path: Path) -> str:
    """`live_simple` of BFCL_v4_live_simple.json. Raises DataError for a name that says none."""
    match = NAME.fullmatch(path.name)
    if match is None:
        raise DataError(f"{path}: expected a name with the category such as BFCL_v4_simple_python.json")
    return match["category"].replace("simple_python", "simple")


def load(path: Path, found: Sequence[Row]) -> Questions:
    """The questions of a file with their truth. Raises DataError."""
    name = category(path)
    kind = name.removeprefix("live_")
    if kind not in (*BY_CALLS, *BY_SILENCE):
        return Questions(name, skipped=f"skipped: {name} is not a single turn in Python")
    truths = _truths(path) if kind in BY_CALLS else None
    asked = [_question(row, truths) for row in found]
    seen: set[str] = set()
    for row, question in zip(found, asked, strict=True):
        if question.id in seen:
            raise row.wrong("id", "an id of its own")
        seen.add(question.id)
    return Questions(name, asked)


def score(subject: Subject, suite: str, questions: Questions) -> Result:
    """The share of right turns with Wilson's interval, and a row per question; or why the file is skipped."""
    if questions.skipped:
        return Result({"skipped": questions.skipped})
    name, kind = questions.category, questions.category.removeprefix("live_")
    prompts = {
        q.id: chat.render(subject.tokenizer, q.messages, q.tools, generation_prompt=True).ids for q in questions.asked
    }
    done = subject.complete(suite, prompts, tokens=subject.settings.max_new_tokens, temperature=0.0)
    result = Result({"category": name, "left_out": len(prompts) - len(done), "n": len(done)})
    verdicts = []
    for question in questions.asked:
        if question.id not in done:
            continue
        text = subject.tokenizer.decode(done[question.id].ids)
        verdicts.append(_check(kind, question, chat.parse(text)))
        result.item(suite, question.id, done[question.id], text, asked=[question.messages, question.tools],
                    prompt=question.messages[-1]["content"][:CUT],
                    category=name, verdict="right" if verdicts[-1].valid else verdicts[-1].error)  # fmt: skip
    if verdicts:
        measure = f"ast_{name}" if kind in BY_CALLS else name
        result.measure(measure, wilson(sum(verdict.valid for verdict in verdicts), len(verdicts)))
    if kind in BY_CALLS:
        result.numbers["greedy_disagreements"] = sum(verdict.greedy_disagrees for verdict in verdicts)
    return result


def _check(kind: str, question: Question, reply: chat.Reply) -> bfcl.Check:
    if kind in BY_CALLS:
        return bfcl.check([tool["function"] for tool in question.tools], reply.tool_calls, question.truth)
    valid = bool(reply.tool_calls) == (kind == "relevance")
    return bfcl.Check(valid, "" if valid else "called" if kind == "irrelevance" else "silent", greedy=valid)


def _question(row: Row, truths: dict[str, list[bfcl.Truth]] | None) -> Question:
    name, turns = row.text("id"), row.fields["question"]
    if not isinstance(turns, list) or len(turns) != 1 or not isinstance(turns[0], list) or not turns[0]:
        raise row.wrong("question", "a list of one turn, which is a list of messages")
    for message in turns[0]:
        if (
            not isinstance(message, dict)
            or message.get("role") not in ROLES
            or not isinstance(message.get("content"), str)
        ):
            raise row.wrong("question", "messages with a role of system or user and a content")  # fmt: skip
    try:
        tools = calls.tools(row.fields.get("function"), "function")
    except RowError as error:
        raise row.wrong("function", f"a list of functions ({error.reason})") from error
    if truths is not None and name not in truths:
        raise row.wrong("id", "one that stands in the file of the same name in possible_answer/")
    return Question(id=name, messages=turns[0], tools=tools, truth=[] if truths is None else truths[name])


def _truths(path: Path) -> dict[str, list[bfcl.Truth]]:
    """Accepted calls by id."""
    answers = path.parent / "possible_answer" / path.name
    if not answers.is_file():
        raise DataError(f"{path}: expected the accepted calls in {answers}, found no such file; fetch it too")
    found = {}
    for row in rows.read(answers):
        truth = row.fields.get("ground_truth")
        if not isinstance(truth, list) or not truth or not all(map(_is_truth, truth)):
            raise row.wrong("ground_truth", "a list of {name: {parameter: [accepted values]}}")
        found[row.text("id")] = truth
    return found


def _is_truth(entry: Any) -> bool:
    if not isinstance(entry, dict) or len(entry) != 1:
        return False
    (parameters,) = entry.values()
    return isinstance(parameters, dict) and all(isinstance(values, list) for values in parameters.values())
