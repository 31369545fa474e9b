"""How good answers with code are: pass@k from verdicts, whether they parse, keep the form, equal the reference.

Verdicts come from `sandbox/judge`; this file runs no code. What an answer's code is says `text/chat.py`. pass@k is the
unbiased estimate of Chen et al. 2021 (arXiv:2107.03374).

`codebleu_py`: likeness of Python sources to references, after CodeBLEU (Ren et al. 2020, arXiv:2009.10297).

The mean of four corpus scores: BLEU-4 on tokens; the same with unigrams weighted, keywords 1, others 0.2; clipped
matches of syntax subtrees; of def-use edges with variables renamed by first appearance. It has its own name because
tokens (`tokenize`) and trees (`ast`) differ from the paper's, so its values cannot be compared with published ones.
A source that does not parse gets 0 in parts 3 and 4. Without an edge in any reference it is the mean of three.

Is a problem that somebody brought in order: can one of its tests be judged, does its own solution pass them all?

In: `Problem`s; their solutions are code of strangers and run in the sandbox, as every candidate does. Out: what is
wrong with each, in words, or nothing. Generated problems are right by construction (tests/test_programs.py proves it),
so nobody asks here about them.

Not promised: that the tests are strong, or that a problem without a solution has one.
"""

import ast
import io
import keyword
import math
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pipeline.ingest.records import Problem
from pipeline.run.errors import DataError
from pipeline.sandbox.judge import Judge, Program, Verdict, parse_test
from pipeline.text import chat
from pipeline.text.chat import extract, formatted, tree


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


# -- codebleu ----------------------------------------------------------------------------------------------------------


OTHER_WEIGHT = 0.2  # of unigrams that are no keyword
SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)


@dataclass(frozen=True)
class CodeBleu:
    """Scores from 0 to 1; `dataflow` is None where no reference has an edge."""

    bleu: float
    weighted_bleu: float
    syntax: float
    dataflow: float | None

    @property
    def parts(self) -> int:
        """How many scores the mean is over: `codebleu_parts`."""
        return 3 if self.dataflow is None else 4

    @property
    def score(self) -> float:
        """`codebleu_py`."""
        return (self.bleu + self.weighted_bleu + self.syntax + (self.dataflow or 0.0)) / self.parts


def codebleu(sources: Sequence[str], references: Sequence[str]) -> CodeBleu:
    """Corpus scores, one reference a source in the same order. Raises ValueError for none or unequal numbers."""
    if not sources or len(sources) != len(references):
        raise ValueError(f"expected a source for each reference, found {len(sources)} and {len(references)}")
    pairs = [(tokens(source), tokens(reference)) for source, reference in zip(sources, references)]
    trees = [(tree(source), tree(reference)) for source, reference in zip(sources, references)]
    syntax = _matched([(subtrees(a) if a else Counter(), subtrees(b) if b else Counter()) for a, b in trees])
    dataflow = _matched([(edges(a) if a else Counter(), edges(b) if b else Counter()) for a, b in trees])
    return CodeBleu(corpus_bleu(pairs, weighted=False), corpus_bleu(pairs, weighted=True), syntax or 0.0, dataflow)


def tokens(source: str) -> list[str]:
    """Python tokens without comments; indents count, layout does not. From where it is no Python on: words."""
    read: list[tokenize.TokenInfo] = []
    rest = ""
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            read.append(token)
    except (tokenize.TokenError, SyntaxError, ValueError):
        row, column = read[-1].end if read else (1, 0)
        rest = "\n".join([line[column if i == 0 else 0 :] for i, line in enumerate(source.split("\n")[row - 1 :])])
    names = {tokenize.INDENT: "<indent>", tokenize.DEDENT: "<dedent>", tokenize.NEWLINE: "<newline>"}
    return [names.get(token.type, token.string) for token in read if token.type not in SKIPPED] + rest.split()


def corpus_bleu(pairs: Sequence[tuple[list[str], list[str]]], *, weighted: bool) -> float:
    """BLEU-4 over (candidate, reference) tokens, 0 to 1: clipped, brevity penalty, exponential smoothing.

    As sacrebleu's `smooth_method="exp"`: the j-th order without a match counts 1 / 2^j of a match. Orders that no
    candidate is long enough for are left out of the mean.
    """
    logs: list[float] = []
    smoothing = 1.0
    for order in range(1, 5):
        matched = total = 0.0
        for candidate, reference in pairs:
            grams, wanted = _grams(candidate, order), _grams(reference, order)
            for gram, count in grams.items():
                weight = 1.0 if not weighted or order > 1 or keyword.iskeyword(gram[0]) else OTHER_WEIGHT
                matched += weight * min(count, wanted[gram])
                total += weight * count
        if not total:
            break
        if not matched:
            smoothing *= 2
            matched = 1 / smoothing
        logs.append(math.log(matched / total))
    length, wanted_length = (sum(len(pair[side]) for pair in pairs) for side in (0, 1))
    if not logs or (not length and wanted_length):
        return 0.0
    if not any(gram in _grams(b, 1) for a, b in pairs for gram in _grams(a, 1)):
        return 0.0  # nothing in common: smoothing alone earns nothing
    brevity = 1.0 if length >= wanted_length else math.exp(1 - wanted_length / length)
    return brevity * math.exp(sum(logs) / len(logs))


def _grams(words: list[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + order]) for i in range(len(words) - order + 1))


def _matched(pairs: Sequence[tuple[Counter[str], Counter[str]]]) -> float | None:
    """Clipped matches over the references' count; None where the references have nothing."""
    total = sum(wanted.total() for _, wanted in pairs)
    return sum((found & wanted).total() for found, wanted in pairs) / total if total else None


def subtrees(module: ast.Module) -> Counter[str]:
    """Every subtree with children, as nested node types: no names, constants or contexts."""
    found: Counter[str] = Counter()

    def visit(node: ast.AST) -> str:
        children = [visit(child) for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr_context)]
        shape = f"{type(node).__name__}({','.join(children)})"
        if children:
            found[shape] += 1
        return shape

    try:
        visit(module)
    except RecursionError:
        return Counter()
    return found


def edges(module: ast.Module) -> Counter[str]:
    """Def-use edges "target<-source" of each function (and of the module outside functions).

    An assignment gives an edge from every variable read on its right to every variable written on its left, a use
    elsewhere (a call, a return, a test) an edge from the variable to the kind of statement. Variables are renamed v0,
    v1, ... by first appearance in their function, so renaming all of them changes nothing; other names (builtins,
    functions called but never bound) are not variables.
    """
    found: Counter[str] = Counter()
    scopes = [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for scope in [module, *scopes]:
        statements = list(_statements(scope))
        bound = _bound(scope, statements)
        number: dict[str, str] = {}
        for statement in statements:
            writes, reads = _names(statement, bound)
            for name in [*reads, *writes]:
                number.setdefault(name, f"v{len(number)}")
            kind = type(statement).__name__
            for read in reads:
                found.update([f"{number[write]}<-{number[read]}" for write in writes] or [f"{kind}<-{number[read]}"])
    return found


def _statements(scope: ast.AST) -> list[ast.AST]:
    """The statements of a scope in order, without those of functions and classes inside it."""
    found: list[ast.AST] = []
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            found.append(child)
            found += _statements(child)
    return found


def _bound(scope: ast.AST, statements: list[ast.AST]) -> set[str]:
    """Variables of a scope: its parameters and whatever it assigns."""
    bound = {
        node.id
        for s in statements
        for node in _own(s)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
        bound |= {node.arg for node in ast.walk(scope.args) if isinstance(node, ast.arg)}
    return bound


def _own(statement: ast.AST) -> list[ast.AST]:
    """The expression nodes of a statement itself, in order, not those of the statements inside it."""
    found: list[ast.AST] = []
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            found += [child, *_own(child)]
    return found


def _names(statement: ast.AST, bound: set[str]) -> tuple[list[str], list[str]]:
    """Variables that a statement writes and reads, each in order of appearance; `x += y` reads x too."""
    writes: list[str] = []
    reads: list[str] = []
    for node in _own(statement):
        if isinstance(node, ast.Name) and node.id in bound:
            (writes if isinstance(node.ctx, ast.Store) else reads).append(node.id)
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        reads.append(statement.target.id)
    return writes, reads


# -- references --------------------------------------------------------------------------------------------------------


NOT_ONE = "none of its tests can be judged safely; expected `assert f(...) == literal`, or {args, expected}"


def solution(problem: Problem) -> str | None:
    """The source of a problem's own answer: its code block, or the answer itself where that is bare code."""
    return None if problem.answer is None else chat.extract(problem.answer) or problem.answer


def faults(
    judge: Judge, asked: Iterable[tuple[Problem, str | None]], cpu_seconds: float | None = None
) -> Iterator[tuple[str, str]]:
    """(field, what is wrong) of each problem with the source of its solution, in order; both empty where all is
    well.
    """
    waiting: list[tuple[str, str | None]] = []

    def programs() -> Iterator[Program]:
        for problem, source in asked:
            fault = _unreadable(problem, judge.config.limits.max_tests)
            waiting.append((fault, source))
            tests = [] if fault else problem.tests
            yield Program(source=source, entry_point=problem.entry_point, tests=tests, cpu_seconds=cpu_seconds)

    for verdict in judge.judge(programs()):
        fault, source = waiting.pop(0)
        if fault or not verdict.total:
            yield "tests", fault or NOT_ONE
        elif source is not None and verdict.verdict != "passed":
            yield "answer", f"its own solution fails its own tests ({explain(verdict)})"
        else:
            yield "", ""


def explain(verdict: Verdict) -> str:
    """A verdict in words: `wrong, value: 1 of 3 tests pass`."""
    what = ", ".join(part for part in (verdict.verdict, verdict.reason) if part)
    message = next((result.message for result in verdict.results if result.message), "")
    shown = f"; {message[:120]}" if message else ""
    return f"{what}: {verdict.passed} of {verdict.total} tests pass{shown}"


def _unreadable(problem: Problem, most: int) -> str:
    if len(problem.tests) > most:
        return f"expected at most {most} tests, found {len(problem.tests)}"
    try:
        for test in problem.tests:
            parse_test(test, problem.entry_point)
    except DataError as error:
        return str(error)
    return ""
