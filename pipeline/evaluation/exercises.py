"""Rows of HumanEval and MBPP -> exercises: what a model is shown, how its answer becomes a program, what it must pass.

    HumanEval  task_id, prompt, entry_point, canonical_solution, test with `def check(candidate)`     (arXiv:2107.03374)
    MBPP       task_id, text, code, test_list, test_setup_code; sanitized: prompt, test_imports       (arXiv:2108.07732)

Two forms of the same exercise. A model that has never seen a conversation completes: HumanEval's prompt as it stands, cut
at the first of STOPS; MBPP's text and tests after three worked examples (ids 2-4 of the file), up to `[DONE]`. A model
that has is asked, in a chat turn, and its one block of code counts. Of MBPP the ids 11-510 are scored, the paper's test
split; a file that holds none of them is scored whole. `challenge_test_list` is not used.

Not promised: that numbers of the two forms can be compared with each other.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.evaluation import code, unrolling
from pipeline.evaluation.rows import Row
from pipeline.evaluation.unrolling import Check
from pipeline.streams import asserts
from pipeline.streams.calls import RowError

STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # of human-eval's paper, section 3.1
BEGIN, DONE = "[BEGIN]", "[DONE]"
SHOTS, SCORED = range(2, 5), range(11, 511)  # ids of MBPP


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One problem of a file. Both forms end in a program, which is judged by `check`'s tests."""

    id: str
    entry_point: str
    asked: str  # the user's turn
    continued: str  # what a base model continues
    stops: tuple[str, ...]  # where its completion ends
    before: str  # the program up to the completion
    reference: str  # a whole program that passes
    check: Check

    def completed(self, completion: str) -> str:
        """The program that a completion makes."""
        places = [place for stop in self.stops if (place := completion.find(stop)) >= 0]
        return self.before + completion[: min(places, default=len(completion))]

    def answered(self, answer: str) -> str | None:
        """The program that an answer in chat makes; None where it holds no code.

        The function anew stands behind what the exercise gives; a body alone goes on where the exercise ends.
        """
        source = code.extract(answer)
        if source is None:
            return None
        module = code.tree(source)
        defined = {node.name for node in module.body if isinstance(node, ast.FunctionDef)} if module else set()
        return self.before + ("\n\n" if self.entry_point in defined else "") + source


def humaneval(rows: Sequence[Row]) -> list[Exercise]:
    """The exercises of a HumanEval file. Raises DataError."""
    found = []
    for row in rows:
        prompt, name = row.text("prompt"), row.text("entry_point")
        reference = prompt + row.text("canonical_solution")
        module = unrolling.parse(reference, f"{row.where}: canonical_solution")
        if name not in {node.name for node in module.body if isinstance(node, ast.FunctionDef)}:
            raise row.wrong("entry_point", "the name of a function that prompt and canonical_solution define")
        found.append(
            Exercise(
                id=row.text("task_id"),
                entry_point=name,
                asked=f"Complete this function. Answer with the whole function.\n\n```python\n{prompt.strip()}\n```",
                continued=prompt,
                stops=STOPS,
                before=prompt,
                reference=reference,
                check=unrolling.function(row.text("test"), name, reference, row.where),
            )
        )
    return _distinct(rows, found)


def mbpp(rows: Sequence[Row]) -> list[Exercise]:
    """The scored exercises of an MBPP file, either form. Raises DataError."""
    ids = [_number(row) for row in rows]
    shots = "".join(
        f"{_task(row)}\n{BEGIN}\n{_code(row)}\n{DONE}\n\n"
        for number, row in zip(ids, rows, strict=True)
        if number in SHOTS
    )
    scored = [(number, row) for number, row in zip(ids, rows, strict=True) if number in SCORED]
    chosen = scored or list(zip(ids, rows, strict=True))
    return _distinct([row for _, row in chosen], [_mbpp(number, row, shots) for number, row in chosen])


def _mbpp(number: int, row: Row, shots: str) -> Exercise:
    tests = row.texts("test_list")
    body = [node for test in tests for node in unrolling.parse(test, f"{row.where}: test_list").body]
    if not any(isinstance(node, ast.Assert) for statement in body for node in ast.walk(statement)):
        raise row.wrong("test_list", "a list of asserts")
    try:
        name = asserts.entry_point(tests)
    except RowError as error:
        raise row.wrong("test_list", "asserts that call the function under test") from error
    if not name:
        raise row.wrong("test_list", "asserts that call the function under test")
    setup = "\n".join([*row.texts("test_imports"), str(row.fields.get("test_setup_code") or "")]).strip()
    before = f"{setup}\n\n" if setup else ""
    reference = before + _code(row)
    unrolling.parse(reference, f"{row.where}: code")
    return Exercise(
        id=f"MBPP/{number}",
        entry_point=name,
        asked=f"{_task(row)}\n",
        continued=f"{shots}{_task(row)}\n{BEGIN}\n",
        stops=(DONE,),
        before=before,
        reference=reference,
        check=Check(entry_point=name, context=reference, body=body),
    )


def _task(row: Row) -> str:
    """A task in the paper's words, its tests included."""
    text = row.text("text" if row.has("text") else "prompt").strip()
    tests = "\n".join(test.strip() for test in row.texts("test_list"))
    return f"You are an expert Python programmer, and here is your task: {text} Your code should pass these tests:\n\n{tests}"


def _code(row: Row) -> str:
    return row.text("code").replace("\r\n", "\n").strip()


def _number(row: Row) -> int:
    number = row.fields.get("task_id")
    if isinstance(number, bool) or not isinstance(number, int):
        raise row.wrong("task_id", "a whole number")
    return number


def _distinct(rows: Sequence[Row], exercises: list[Exercise]) -> list[Exercise]:
    seen: dict[str, str] = {}
    for row, exercise in zip(rows, exercises, strict=True):
        if exercise.id in seen:
            raise row.wrong("task_id", f"an id of its own ({seen[exercise.id]} has it too)")
        seen[exercise.id] = row.where
    return exercises
