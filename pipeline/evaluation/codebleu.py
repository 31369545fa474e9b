"""CodeBLEU: similarity of Python sources to references, with an interval over the sources.

    sources and their references -> `codebleu_py`

`codebleu_py` follows CodeBLEU (Ren et al. 2020, arXiv:2009.10297), the mean of four corpus scores: BLEU-4 on tokens;
the same with weighted unigrams (keywords 1, others 0.2); clipped matches of syntax subtrees; clipped matches of def-use
edges with variables renamed by first appearance. It has a separate name because tokens (`tokenize`) and trees (`ast`)
differ from the paper's, so its values are not comparable with published ones. A source that does not parse gets 0 for
the last two scores. If no reference has an edge, the score is the mean of the first three.

Each pair yields a row of counts, and the corpus scores are computed from the sums of these rows. The interval is
therefore a bootstrap over pairs that recomputes the scores from each resample's sums.
"""

import ast
import io
import keyword
import math
import tokenize
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.evaluation.intervals import Interval, percentiles, resampled
from pipeline.text.chat import tree

ORDERS = 4
OTHER_WEIGHT = 0.2  # weight of non-keyword unigrams
SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)


@dataclass(frozen=True)
class CodeBleu:
    """Scores from 0 to 1; `dataflow` is None if no reference has a def-use edge."""

    bleu: float
    weighted_bleu: float
    syntax: float
    dataflow: float | None

    @property
    def parts(self) -> int:
        """The number of scores in the mean."""
        return 3 if self.dataflow is None else 4

    @property
    def score(self) -> float:
        """`codebleu_py`, the mean of the scores."""
        return (self.bleu + self.weighted_bleu + self.syntax + (self.dataflow or 0.0)) / self.parts


def codebleu(sources: Sequence[str], references: Sequence[str]) -> CodeBleu:
    """Corpus scores of sources against references in the same order. Raises ValueError if there are no sources or the
    numbers of sources and references differ.
    """
    return _scores(_rows(sources, references).sum(0))


def with_interval(
    sources: Sequence[str], references: Sequence[str], *, generator: torch.Generator, resamples: int
) -> tuple[CodeBleu, Interval]:
    """The result of `codebleu`, and its score with a percentile-bootstrap interval over pairs. Same errors."""
    rows = _rows(sources, references)
    whole = _scores(rows.sum(0))
    scores = np.array([_scores(sums).score for sums in resampled(rows, generator, resamples)])
    return whole, Interval(whole.score, *percentiles(scores), len(rows))


def _rows(sources: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """The counts of each pair, (n, 22): matched and total n-grams of each order, plain and weighted; numbers of tokens
    on both sides; matched and total subtrees; matched and total edges.
    """
    if not sources or len(sources) != len(references):
        raise ValueError(f"expected one source per reference, found {len(sources)} and {len(references)}")
    rows = []
    for source, reference in zip(sources, references, strict=True):
        sides, trees = (tokens(source), tokens(reference)), (tree(source), tree(reference))
        graphs = [[count(module) if module else Counter() for module in trees] for count in (subtrees, edges)]
        matches = [value for ours, theirs in graphs for value in ((ours & theirs).total(), theirs.total())]
        grams = [value for weighted in (False, True) for value in gram_counts(*sides, weighted=weighted)]
        rows.append([*grams, *map(len, sides), *matches])
    return np.array(rows, dtype=np.float64)


def _scores(sums: np.ndarray) -> CodeBleu:
    """The corpus scores for summed counts."""
    plain, weighted = sums[: 2 * ORDERS], sums[2 * ORDERS : 4 * ORDERS]
    lengths, (subtrees_matched, num_subtrees, edges_matched, num_edges) = sums[4 * ORDERS : -4], sums[-4:].tolist()
    return CodeBleu(
        corpus_bleu(plain, lengths),
        corpus_bleu(weighted, lengths),
        subtrees_matched / num_subtrees if num_subtrees else 0.0,
        edges_matched / num_edges if num_edges else None,
    )


def tokens(source: str) -> list[str]:
    """Python tokens without comments or layout (except indents and line ends); after an error, plain words."""
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


def gram_counts(candidate: list[str], reference: list[str], *, weighted: bool) -> list[float]:
    """Matched n-grams of each order from 1 to 4, clipped by the reference's counts, then the candidate's totals.

    If `weighted`, a non-keyword unigram counts as OTHER_WEIGHT.
    """
    matched, total = [0.0] * ORDERS, [0.0] * ORDERS
    for order in range(1, ORDERS + 1):
        reference_counts = _ngrams(reference, order)
        for gram, count in _ngrams(candidate, order).items():
            weight = 1.0 if not weighted or order > 1 or keyword.iskeyword(gram[0]) else OTHER_WEIGHT
            matched[order - 1] += weight * min(count, reference_counts[gram])
            total[order - 1] += weight * count
    return [*matched, *total]


def corpus_bleu(counts: np.ndarray, lengths: np.ndarray) -> float:
    """BLEU-4, from 0 to 1, with brevity penalty and exponential smoothing, from summed `gram_counts` and token counts
    (candidate, reference).

    As in sacrebleu's `smooth_method="exp"`, the j-th order without a match counts as 1 / 2^j matches. Orders longer
    than every candidate are excluded from the mean.
    """
    matches, totals = counts[:ORDERS].tolist(), counts[ORDERS:].tolist()
    length, reference_length = lengths.tolist()
    if not matches[0]:
        return 0.0  # no token in common: the score is 0, despite smoothing
    logs: list[float] = []
    smoothing = 1.0
    for matched, total in zip(matches, totals, strict=True):
        if not total:
            break
        if not matched:
            smoothing *= 2
            matched = 1 / smoothing
        logs.append(math.log(matched / total))
    brevity = 1.0 if length >= reference_length else math.exp(1 - reference_length / length)
    return brevity * math.exp(sum(logs) / len(logs))


def _ngrams(words: list[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + order]) for i in range(len(words) - order + 1))


def subtrees(module: ast.Module) -> Counter[str]:
    """Counts of all subtrees with children, written as nested node types without names, constants or contexts."""
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

    An assignment gives an edge from every variable read on the right to every variable written on the left; any other
    use (a call, a return, a test) gives an edge from the variable to the statement kind. Variables are renamed v0, v1,
    ... by first appearance in their function, so consistent renaming changes nothing; other names (builtins, functions
    called but never bound) are not variables.
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
    """The statements of a scope, in order, excluding nested functions and classes."""
    statements: list[ast.AST] = []
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            statements.append(child)
            statements += _statements(child)
    return statements


def _variables(scope: ast.AST, statements: list[ast.AST]) -> set[str]:
    """Variables of a scope: its parameters and all assigned names."""
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
    """The nodes of a statement itself, in order, excluding nested statements."""
    nodes: list[ast.AST] = []
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            nodes += [child, *_own_nodes(child)]
    return nodes


def _writes_and_reads(statement: ast.AST, bound: set[str]) -> tuple[list[str], list[str]]:
    """Variables that a statement writes and reads, each in order of appearance; `x += y` also reads x."""
    writes: list[str] = []
    reads: list[str] = []
    for node in _own_nodes(statement):
        if isinstance(node, ast.Name) and node.id in bound:
            (writes if isinstance(node.ctx, ast.Store) else reads).append(node.id)
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        reads.append(statement.target.id)
    return writes, reads
