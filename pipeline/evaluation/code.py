"""How good answers with code are: pass@k from verdicts, whether they parse, keep the form, equal the reference.

Verdicts come from `sandbox/judge`; this file runs no code. An answer's code is the one fenced Python block that ends
it; for judging, a lone block anywhere counts, else a bare answer that parses and defines something. pass@k is the unbiased estimate of
Chen et al. 2021 (arXiv:2107.03374).
"""

import ast
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.sandbox.judge import Judge, Program
from pipeline.streams.records import Problem

# A fence of three or more backticks on its own line, its language, and the same fence closing it.
FENCE = re.compile(
    r"^(?P<fence>`{3,})[ \t]*(?P<language>[\w+-]*)[ \t]*\n(?P<code>.*?)^(?P=fence)[ \t]*$", re.DOTALL | re.MULTILINE
)
PYTHON = ("python", "py", "python3", "")
MAX_SOURCE = 65_536  # characters; longer answers are not parsed


@dataclass(frozen=True)
class Judged:
    """One sampled answer to one problem."""

    problem: str  # its id
    sample: int
    source: str | None  # the code that was judged
    formatted: bool  # one fenced Python block ends the answer
    parses: bool
    verdict: str  # of sandbox/judge
    reason: str
    score: float | None  # share of tests passed; None where it could not be judged


def judge_answers(judge: Judge, problems: Sequence[Problem], answers: Sequence[Sequence[str]]) -> list[Judged]:
    """Judge `answers[i][s]`, sample s of problem i; in that order, problem by problem."""
    return judge_sources(
        judge,
        [
            (problem.id, s, text, Program(source=extract(text), entry_point=problem.entry_point, tests=problem.tests))
            for problem, texts in zip(problems, answers, strict=True)
            for s, text in enumerate(texts)
        ],
    )


def judge_sources(judge: Judge, asked: Sequence[tuple[str, int, str, Program]]) -> list[Judged]:
    """Judge programs that were read from answers: (problem, sample, text of the answer, program); in that order."""
    judged = []
    verdicts = judge.judge(program for _, _, _, program in asked)
    for (problem, sample, text, program), result in zip(asked, verdicts, strict=True):
        parses = program.source is not None and tree(program.source) is not None
        form = formatted(text)
        judged.append(
            Judged(problem, sample, program.source, form, parses, result.verdict, result.reason, result.score)
        )
    return judged


def extract(answer: str) -> str | None:
    """The code to judge: the only fenced Python block, else a bare answer that is Python with a definition; or None.

    Bare code is what a model writes before it has learnt to chat; a definition is asked for because "no" parses too.
    """
    blocks = [match for match in FENCE.finditer(answer) if match["language"].lower() in PYTHON]
    if len(blocks) == 1:
        return blocks[0]["code"]
    module = tree(answer) if not blocks and "```" not in answer else None
    defines = module is not None and any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in module.body)
    return answer if defines else None


def formatted(answer: str) -> bool:
    """Whether the answer holds exactly one fenced block, Python's, and ends with it."""
    blocks = list(FENCE.finditer(answer))
    if len(blocks) != 1 or blocks[0]["language"].lower() not in ("python", "py", "python3"):
        return False
    block = blocks[0]
    outside = answer[: block.start()] + answer[block.end() :]
    return "```" not in outside and not answer[block.end() :].strip()


def tree(source: str) -> ast.Module | None:
    """The syntax tree, or None where the source does not parse (or is too long, or too deep for the parser)."""
    if len(source) > MAX_SOURCE:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of the candidate's strings, no concern of ours
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def exact_match(source: str, reference: str) -> bool:
    """Equal syntax trees without docstrings: layout, comments and quotes do not matter. False if one does not parse."""
    mine, theirs = tree(source), tree(reference)
    if mine is None or theirs is None:
        return False
    try:
        return ast.dump(_without_docstrings(mine)) == ast.dump(_without_docstrings(theirs))
    except RecursionError:
        return False


def _without_docstrings(module: ast.Module) -> ast.Module:
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                # A body of a docstring alone keeps a statement; `pass` says the same.
                node.body = node.body[1:] or ([ast.Pass()] if not isinstance(node, ast.Module) else [])
    return module


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k answers is right, estimated from n samples of which c are right (eq. 1).

    Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k: expected 0 <= c <= n and 1 <= k <= n, found n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    failing = 1.0
    for i in range(n - c + 1, n + 1):
        failing *= 1 - k / i
    return 1 - failing


def pass_rows(judged: Iterable[Judged], k: int) -> dict[str, float]:
    """pass@k of each problem, by id. Unscorable samples are left out; so is a problem with fewer than k others."""
    samples: dict[str, list[bool]] = {}
    for answer in judged:
        right = samples.setdefault(answer.problem, [])
        if answer.score is not None:
            right.append(answer.verdict == "passed")
    return {problem: pass_at_k(len(right), sum(right), k) for problem, right in samples.items() if len(right) >= k}


def rates(judged: Sequence[Judged]) -> dict[str, float]:
    """`parse_rate`, `format_rate` and `verdicts/<name>`, the counts of verdicts. Raises ValueError without answers."""
    if not judged:
        raise ValueError("expected at least one judged answer")
    counts = Counter(answer.verdict for answer in judged)
    return {
        "parse_rate": sum(answer.parses for answer in judged) / len(judged),
        "format_rate": sum(answer.formatted for answer in judged) / len(judged),
        **{f"verdicts/{verdict}": float(counts[verdict]) for verdict in sorted(counts)},
    }
