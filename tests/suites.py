"""What the tests of the suites share: settings, a subject with scripted answers, texts, problems, sets."""

import gzip
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.evaluation.suites import Subject, SuiteSettings
from pipeline.generation.sampling import Completion
from pipeline.ingest.records import Problem, Text
from pipeline.model.transformer import Transformer
from pipeline.sandbox.judge import SandboxConfig
from pipeline.synthetic import programs as synthetic_programs
from pipeline.text.tokenizer import Tokenizer
from stages import evaluate

SETTINGS = SuiteSettings(
    documents=9,
    stories=9,
    problems=9,
    samples=0,
    dialogues=40,
    gaps=9,
    max_new_tokens=20,
    story_tokens=20,
    temperature=0.8,
    top_p=0.95,
    context=64,
    bootstrap=200,
)
SOURCE = "import os\n\n\ndef first(value):\n    return value + 1\n\n\ndef second(value):\n    return value + 2\n"
FEW = SuiteSettings(  # for the whole stage
    documents=3,
    stories=3,
    problems=12,
    samples=1,
    dialogues=24,
    gaps=2,
    max_new_tokens=4,
    story_tokens=4,
    temperature=0.8,
    top_p=0.95,
    context=64,
    bootstrap=20,
    constrained=8,
)
PARAMS = evaluate.Params(settings=FEW, sandbox=SandboxConfig())
DOUBLE = {
    "task_id": "Own/0",
    "prompt": (
        'from typing import List\n\n\ndef double(values: List[int]) -> List[int]:\n    """Twice each value.\n    >>>'
        ' double([1])\n    [2]\n    """\n'
    ),
    "entry_point": "double",
    "canonical_solution": "    return [2 * value for value in values]\n",
    "test": (
        '\n\nMETADATA = {"author": "own"}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) == [2, 4]\n   '
        ' assert candidate([]) == [], "empty"\n    assert True, "good for debugging"\n'
    ),
}
HALF = {
    "task_id": "Own/2",
    "prompt": 'def half(x: float) -> float:\n    """Half of x."""\n',
    "entry_point": "half",
    "canonical_solution": "    return x / 2\n",
    "test": (
        "def check(candidate):\n    assert abs(candidate(3) - 1.5) < 1e-6\n    result = candidate(4)\n    assert result"
        " == 2\n"
    ),
}


@dataclass(frozen=True)
class Scripted(Subject):
    """A subject that answers from a table {(id, sample): text or (text, stop)}, and keeps what it was asked."""

    answers: dict[Any, Any]
    asked: dict[str, list[int]]

    def complete(
        self, suite: str, prompts: dict[str, list[int]], *, tokens: int, temperature: float, sample: int = 0
    ) -> dict[str, Completion]:
        self.asked.update(prompts)
        done = {}
        for name in prompts:
            answer = self.answers.get((name, sample), self.answers.get(name))
            if answer is not None:
                text, stop = answer if isinstance(answer, tuple) else (answer, "stop")
                done[name] = Completion(spelled(self.tokenizer, text), [], stop)
        return done


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = []
    for number, piece in enumerate(text.replace("</tool_call>", "<tool_call>/").split("<tool_call>")):
        if number:
            ids.append(tokenizer.control_ids["</tool_call>" if piece.startswith("/") else "<tool_call>"])
            piece = piece.removeprefix("/")
        ids += tokenizer.encode(piece)
    return ids


@pytest.fixture(name="scripted")
def scripted_subjects(tiny_model: Transformer, byte_tokenizer: Tokenizer) -> Any:
    def made(answers: dict[Any, Any], **settings: Any) -> Scripted:
        return Scripted(tiny_model, byte_tokenizer, replace(SETTINGS, **settings), 7, answers, {})

    return made


def text(path: str, content: str) -> Text:
    return Text(text=content, source="s", path=path, license="MIT")


def problem(name: str, group: str) -> Problem:
    return Problem(
        id=name,
        level=1,
        group=group,
        key=name,
        question=f"Write {name}.",
        entry_point=name,
        signature=f"{name}(x)",
        tests=[],
        answer=synthetic_programs.fenced(f"def {name}(x):\n    return x"),
    )


def write_set(path: Path, table: list[dict[str, Any]]) -> Path:
    """A test set in the format of its name: JSON lines, gzip, or an indented list for `sanitized*.json`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in table)
    if path.name.startswith("sanitized"):
        text = json.dumps(table, indent=2)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path
