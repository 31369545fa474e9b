"""Measures of code: pass@k, parsing, format, exact match, CodeBLEU; and a check of problems from elsewhere.

    Judged answers -> pass@k, rates of verdicts, of answers that parse, of answers in form
    sources and their references -> `codebleu_py`
    Problems -> what is wrong with the tests or the solution of each

Verdicts come from `sandbox/judge`, in which all code runs, solutions of problems too; nothing is executed in this
process. `text/chat.py` extracts the code of an answer. pass@k is the unbiased estimate of Chen et al. 2021
(arXiv:2107.03374).

`codebleu_py` is the similarity of Python sources to references, after CodeBLEU (Ren et al. 2020, arXiv:2009.10297): the
mean of four corpus scores, BLEU-4 on tokens; the same with weighted unigrams, keywords 1, others 0.2; clipped matches
of syntax subtrees; clipped matches of def-use edges with variables renamed by first appearance. It has its own name
because tokens (`tokenize`) and trees (`ast`) differ from the paper's, so its values cannot be compared with published
ones. A source that does not parse gets 0 in parts 3 and 4. Without an edge in any reference it is the mean of three.

`faults` checks problems that a person brings: whether a test can be judged, and whether the problem's own solution
passes all tests. Generated problems are correct by construction (tests/test_programs.py proves it) and are not checked.

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
from pipeline.text.chat import extract, formatted, tree


@dataclass(frozen=True)
class Judged:
    """The verdict on one answer to one problem."""

    problem: str  # its id
    sample: int
    source: str | None  # the code that was judged
    formatted: bool  # the answer ends with its one fenced Python block
    parses: bool
    verdict: str  # of sandbox/judge
    reason: str
    score: float | None  # share of tests passed; None if it could not be judged


def judge_answers(judge: Judge, problems: Sequence[Problem], answers: Sequence[Sequence[str]]) -> list[Judged]:
    """Judge `answers[i][s]`, sample s of problem i; the result is in that order, problem by problem."""
    return judge_sources(
        judge,
        [
            (problem.id, s, text, Program(source=extract(text), entry_point=problem.entry_point, tests=problem.tests))
            for problem, texts in zip(problems, answers, strict=True)
            for s, text in enumerate(texts)
        ],
    )


def judge_sources(judge: Judge, programs: Sequence[tuple[str, int, str, Program]]) -> list[Judged]:
    """Judge programs extracted from answers: (problem, sample, text of the answer, program); the order is kept."""
    judged = []
    verdicts = judge.judge(program for _, _, _, program in programs)
    for (problem, sample, text, program), result in zip(programs, verdicts, strict=True):
        parses = program.source is not None and tree(program.source) is not None
        form = formatted(text)
        judged.append(
            Judged(problem, sample, program.source, form, parses, result.verdict, result.reason, result.score)
        )
    return judged


def exact_match(source: str, reference: str) -> bool:
    """Whether the syntax trees without docstrings are equal, which ignores layout, comments and quotes.

    False if a source does not parse.
    """
    tree_of_source, tree_of_reference = tree(source), tree(reference)
    if tree_of_source is None or tree_of_reference is None:
        return False
    try:
        return ast.dump(_without_docstrings(tree_of_source)) == ast.dump(_without_docstrings(tree_of_reference))
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
                # a body that was only a docstring still needs a statement
                node.body = node.body[1:] or ([ast.Pass()] if not isinstance(node, ast.Module) else [])
    return module


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k answers is right, estimated from n samples of which c are right (eq. 1).

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
    """pass@k of each problem, by id, without samples that could not be judged and problems with fewer than k others."""
    samples: dict[str, list[bool]] = {}
    for answer in judged:
        right = samples.setdefault(answer.problem, [])
        if answer.score is not None:
            right.append(answer.verdict == "passed")
    return {problem: pass_at_k(len(right), sum(right), k) for problem, right in samples.items() if len(right) >= k}


def rates(judged: Sequence[Judged]) -> dict[str, float]:
    """`parse_rate`, `format_rate` and the counts of verdicts `verdicts/<name>`. Raises ValueError without answers."""
    if not judged:
        raise ValueError("expected at least one judged answer")
    counts = Counter(answer.verdict for answer in judged)
    return {
        "parse_rate": sum(answer.parses for answer in judged) / len(judged),
        "format_rate": sum(answer.formatted for answer in judged) / len(judged),
        **{f"verdicts/{verdict}": float(counts[verdict]) for verdict in sorted(counts)},
    }


# -- CodeBLEU ----------------------------------------------------------------------------------------------------------


OTHER_WEIGHT = 0.2  # of unigrams other than keywords
SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)


@dataclass(frozen=True)
class CodeBleu:
    """Scores from 0 to 1; `dataflow` is None if no reference has an edge."""

    bleu: float
    weighted_bleu: float
    syntax: float
    dataflow: float | None

    @property
    def parts(self) -> int:
        """The number of scores in the mean: `codebleu_parts`."""
        return 3 if self.dataflow is None else 4

    @property
    def score(self) -> float:
        """`codebleu_py`."""
        return (self.bleu + self.weighted_bleu + self.syntax + (self.dataflow or 0.0)) / self.parts


def codebleu(sources: Sequence[str], references: Sequence[str]) -> CodeBleu:
    """Corpus scores of sources against references in the same order. Raises ValueError for none or unequal numbers."""
    if not sources or len(sources) != len(references):
        raise ValueError(f"expected a source for each reference, found {len(sources)} and {len(references)}")
    pairs = [(tokens(source), tokens(reference)) for source, reference in zip(sources, references)]
    trees = [(tree(source), tree(reference)) for source, reference in zip(sources, references)]
    syntax = _clipped_matches([(subtrees(a) if a else Counter(), subtrees(b) if b else Counter()) for a, b in trees])
    dataflow = _clipped_matches([(edges(a) if a else Counter(), edges(b) if b else Counter()) for a, b in trees])
    return CodeBleu(corpus_bleu(pairs, weighted=False), corpus_bleu(pairs, weighted=True), syntax or 0.0, dataflow)


def tokens(source: str) -> list[str]:
    """Python tokens without comments; indents are tokens, other layout is not. The rest from an error on is words."""
    parsed: list[tokenize.TokenInfo] = []
    rest = ""
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            parsed.append(token)
    except (tokenize.TokenError, SyntaxError, ValueError):
        row, column = parsed[-1].end if parsed else (1, 0)
        rest = "\n".join([line[column if i == 0 else 0 :] for i, line in enumerate(source.split("\n")[row - 1 :])])
    names = {tokenize.INDENT: "<indent>", tokenize.DEDENT: "<dedent>", tokenize.NEWLINE: "<newline>"}
    return [names.get(token.type, token.string) for token in parsed if token.type not in SKIPPED] + rest.split()


def corpus_bleu(pairs: Sequence[tuple[list[str], list[str]]], *, weighted: bool) -> float:
    """BLEU-4 of (candidate, reference) tokens, 0 to 1: clipped counts, brevity penalty, exponential smoothing.

    As sacrebleu's `smooth_method="exp"`: the j-th order without a match counts 1 / 2^j of a match. Orders longer than
    every candidate are left out of the mean.
    """
    logs: list[float] = []
    smoothing = 1.0
    for order in range(1, 5):
        matched = total = 0.0
        for candidate, reference in pairs:
            grams, reference_counts = _ngrams(candidate, order), _ngrams(reference, order)
            for gram, count in grams.items():
                weight = 1.0 if not weighted or order > 1 or keyword.iskeyword(gram[0]) else OTHER_WEIGHT
                matched += weight * min(count, reference_counts[gram])
                total += weight * count
        if not total:
            break
        if not matched:
            smoothing *= 2
            matched = 1 / smoothing
        logs.append(math.log(matched / total))
    length, reference_length = (sum(len(pair[side]) for pair in pairs) for side in (0, 1))
    if not logs or (not length and reference_length):
        return 0.0
    if not any(gram in _ngrams(b, 1) for a, b in pairs for gram in _ngrams(a, 1)):
        return 0.0  # nothing in common: smoothing alone earns nothing
    brevity = 1.0 if length >= reference_length else math.exp(1 - reference_length / length)
    return brevity * math.exp(sum(logs) / len(logs))


def _ngrams(words: list[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + order]) for i in range(len(words) - order + 1))


def _clipped_matches(pairs: Sequence[tuple[Counter[str], Counter[str]]]) -> float | None:
    """Clipped matches divided by the references' count; None if that is 0."""
    total = sum(reference.total() for _, reference in pairs)
    return sum((counts & reference).total() for counts, reference in pairs) / total if total else None


def subtrees(module: ast.Module) -> Counter[str]:
    """Counts of all subtrees with children, as nested node types without names, constants or contexts."""
    counts: Counter[str] = Counter()

    def visit(node: ast.AST) -> str:
        children = [visit(child) for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr_context)]
        shape = f"{type(node).__name__}({','.join(children)})"
        if children:
            counts[shape] += 1
        return shape

    try:
        visit(module)
    except RecursionError:
        return Counter()
    return counts


def edges(module: ast.Module) -> Counter[str]:
    """Def-use edges "target<-source" of each function (and of the module outside functions).

    An assignment gives an edge from every variable read on its right to every variable written on its left, a use
    elsewhere (a call, a return, a test) an edge from the variable to the kind of statement. Variables are renamed v0,
    v1, ... by first appearance in their function, so renaming all of them changes nothing; other names (builtins,
    functions called but never bound) are not variables.
    """
    counts: Counter[str] = Counter()
    scopes = [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for scope in [module, *scopes]:
        statements = list(_statements(scope))
        bound = _variables(scope, statements)
        renamed: dict[str, str] = {}
        for statement in statements:
            writes, reads = _writes_and_reads(statement, bound)
            for name in [*reads, *writes]:
                renamed.setdefault(name, f"v{len(renamed)}")
            kind = type(statement).__name__
            for read in reads:
                counts.update(
                    [f"{renamed[write]}<-{renamed[read]}" for write in writes] or [f"{kind}<-{renamed[read]}"]
                )
    return counts


def _statements(scope: ast.AST) -> list[ast.AST]:
    """The statements of a scope, in order, without those of functions and classes inside it."""
    statements: list[ast.AST] = []
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            statements.append(child)
            statements += _statements(child)
    return statements


def _variables(scope: ast.AST, statements: list[ast.AST]) -> set[str]:
    """Variables of a scope: its parameters and all names that it assigns."""
    bound = {
        node.id
        for s in statements
        for node in _own_nodes(s)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
        bound |= {node.arg for node in ast.walk(scope.args) if isinstance(node, ast.arg)}
    return bound


def _own_nodes(statement: ast.AST) -> list[ast.AST]:
    """The nodes of a statement itself, in order, without those of the statements inside it."""
    nodes: list[ast.AST] = []
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            nodes += [child, *_own_nodes(child)]
    return nodes


def _writes_and_reads(statement: ast.AST, bound: set[str]) -> tuple[list[str], list[str]]:
    """Variables that a statement writes and reads, each in order of appearance; `x += y` reads x too."""
    writes: list[str] = []
    reads: list[str] = []
    for node in _own_nodes(statement):
        if isinstance(node, ast.Name) and node.id in bound:
            (writes if isinstance(node.ctx, ast.Store) else reads).append(node.id)
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        reads.append(statement.target.id)
    return writes, reads


# -- problems ----------------------------------------------------------------------------------------------------------


NO_SAFE_TEST = "none of its tests can be judged safely; expected `assert f(...) == literal`, or {args, expected}"


def solution(problem: Problem) -> str | None:
    """The source of a problem's solution: the code block of its answer, or the whole answer if that is bare code."""
    return None if problem.answer is None else extract(problem.answer) or problem.answer


def faults(
    judge: Judge, problems: Iterable[tuple[Problem, str | None]], cpu_seconds: float | None = None
) -> Iterator[tuple[str, str]]:
    """(field, what is wrong with it) for each problem and the source of its solution, in order; both are "" if nothing
    is.
    """
    pending: list[tuple[str, str | None]] = []

    def programs() -> Iterator[Program]:
        for problem, source in problems:
            fault = _fault_of_tests(problem, judge.config.limits.max_tests)
            pending.append((fault, source))
            tests = [] if fault else problem.tests
            yield Program(source=source, entry_point=problem.entry_point, tests=tests, cpu_seconds=cpu_seconds)

    for verdict in judge.judge(programs()):
        fault, source = pending.pop(0)
        if fault or not verdict.total:
            yield "tests", fault or NO_SAFE_TEST
        elif source is not None and verdict.verdict != "passed":
            yield "answer", f"its own solution fails its own tests ({_explain(verdict)})"
        else:
            yield "", ""


def _explain(verdict: Verdict) -> str:
    """A verdict as text: `wrong, value: 1 of 3 tests pass`."""
    verdict_and_reason = ", ".join(part for part in (verdict.verdict, verdict.reason) if part)
    message = next((result.message for result in verdict.results if result.message), "")
    detail = f"; {message[:120]}" if message else ""
    return f"{verdict_and_reason}: {verdict.passed} of {verdict.total} tests pass{detail}"


def _fault_of_tests(problem: Problem, most: int) -> str:
    if len(problem.tests) > most:
        return f"expected at most {most} tests, found {len(problem.tests)}"
    try:
        for test in problem.tests:
            parse_test(test, problem.entry_point)
    except DataError as error:
        return str(error)
    return ""
