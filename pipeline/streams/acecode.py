"""TIGER-Lab/AceCode-89K -> problems of a chosen difficulty, as DiffuCoder's coupled-GRPO takes them.

In: rows {id, question, test_cases: [assert, ...], inferences: [{model_name, completion, pass_rate}, ...]}. Difficulty comes
from how often two models solved a question (apple/ml-diffucoder, recipes/process_data.py): mean and standard deviation of
`pass_rate` over `qwen_coder_2.5` and `llama3_instruct`.

    hard     mean <= 20th percentile, and standard deviation >= 40th percentile of the full set
    medium   25th to 75th percentile of the mean, both ends in
    easy     mean >= 75th percentile

A question that does not speak to "you" and whose best completion begins with `def` comes a second time, as a signature
with the question for a docstring. A question without a code block gets its first test, which then is visible.

Not promised: that a best completion is right; it becomes the answer only where it passed every test.
"""

import ast
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.streams import asserts
from pipeline.streams.calls import RowError
from pipeline.streams.records import Problem

MODELS = ("qwen_coder_2.5", "llama3_instruct")
LEVELS = {"easy": 1, "medium": 3, "hard": 5}  # difficulty -> level of a Problem


@dataclass(frozen=True)
class Thresholds:
    """Percentiles over the full set."""

    hard_mean: float  # 20th of the mean
    hard_std: float  # 40th of the standard deviation
    medium_mean: float  # 25th of the mean
    easy_mean: float  # 75th of the mean

    def takes(self, pass_rates: list[float], level: str) -> bool:
        """Whether a question with these pass rates has this difficulty."""
        if not pass_rates:
            return False
        mean, std = float(np.mean(pass_rates)), float(np.std(pass_rates))
        if level == "hard":
            return mean <= self.hard_mean and std >= self.hard_std
        return mean >= self.easy_mean if level == "easy" else self.medium_mean <= mean <= self.easy_mean

    def group(self, pass_rates: list[float]) -> str:
        """The difficulty by the mean alone, for a set that is taken whole."""
        mean = float(np.mean(pass_rates)) if pass_rates else 0.0
        return "easy" if mean >= self.easy_mean else "medium" if mean >= self.medium_mean else "hard"


def reduce(row: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a row: of some twenty completions the best one, and the pass rates that count."""
    inferences = [i for i in row.get("inferences") or [] if isinstance(i, dict)]
    rated = [i for i in inferences if isinstance(i.get("pass_rate"), int | float)]
    best = max(rated, key=lambda inference: inference["pass_rate"], default={})
    return {
        "id": row.get("id"),
        "question": row.get("question"),
        "test_cases": row.get("test_cases"),
        "pass_rates": [float(i["pass_rate"]) for i in rated if i.get("model_name") in MODELS],
        "best": {"completion": best.get("completion"), "pass_rate": best.get("pass_rate")},
    }


def thresholds(all_pass_rates: Iterable[list[float]]) -> Thresholds:
    """Percentiles over every question that one of the two models tried. Raises RowError when there is none."""
    rated = [rates for rates in all_pass_rates if rates]
    if not rated:
        raise RowError("inferences", f"no pass_rate of {' or '.join(MODELS)} in the whole set")
    means = [float(np.mean(rates)) for rates in rated]
    stds = [float(np.std(rates)) for rates in rated]
    hard, medium, easy = (float(value) for value in np.percentile(means, (20, 25, 75)))
    return Thresholds(hard, float(np.percentile(stds, 40)), medium, easy)


def problems(row: Mapping[str, Any], limits: Thresholds, level: str | None) -> list[Problem]:
    """The problems of one reduced row: none when it has another difficulty, else one or two of the same key."""
    if level is not None and not limits.takes(row["pass_rates"], level):
        return []
    question, cases = row["question"], row["test_cases"]
    if not isinstance(question, str) or not question.strip():
        raise RowError("question", "expected a text")
    if not isinstance(cases, list) or not cases:
        raise RowError("test_cases", "expected a list of asserts")
    tests = [asserts.test(case, f"test_cases[{index}]") for index, case in enumerate(cases)]
    entry_point = asserts.entry_point([test.get("assert", "") for test in tests])
    if not entry_point:
        raise RowError("test_cases", "no test calls a function")
    completion = row["best"]["completion"] if isinstance(row["best"]["completion"], str) else ""
    identity = "" if row["id"] is None else str(row["id"])
    group = level or limits.group(row["pass_rates"])
    signature = _signature(completion, entry_point)

    def problem(name: str, text: str) -> Problem:
        has_block = "```" in text
        if not has_block:
            text = f"{text}\n\nFor example:\n```python\n{cases[0]}\n```"
        return Problem(
            id=name,
            level=LEVELS[group],
            group=group,
            key=identity,
            question=text,
            entry_point=entry_point,
            signature=signature,
            tests=[{**test, "visible": not has_block and index == 0} for index, test in enumerate(tests)],
            answer=completion if completion and row["best"]["pass_rate"] == 1 else None,
        )

    versions = [problem(identity, question)]
    if "you" not in question.lower() and completion.startswith("def") and signature:
        versions.append(problem(f"{identity}/signature" if identity else "", _as_docstring(signature, question)))
    return versions


def _signature(completion: str, entry_point: str) -> str:
    """`def f(x: int) -> int:` of the function under test; empty when the completion does not parse or lacks it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = ast.parse(completion).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == entry_point:
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            return f"def {node.name}({ast.unparse(node.args)}){returns}:"
    return ""


def _as_docstring(signature: str, question: str) -> str:
    lines = question.strip().replace("\\", "\\\\").replace('"""', "'''").splitlines()
    indented = "\n".join(f"    {line}".rstrip() for line in lines)
    return f'```python\n{signature}\n    """\n{indented}\n    """\n```'
