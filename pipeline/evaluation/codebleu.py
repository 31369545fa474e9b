"""`codebleu_py`: likeness of Python sources to references, after CodeBLEU (Ren et al. 2020, arXiv:2009.10297).

The mean of four corpus scores: BLEU-4 on tokens; the same with unigrams weighted, keywords 1, others 0.2; clipped
matches of syntax subtrees; of def-use edges with variables renamed by first appearance. It has its own name because
tokens (`tokenize`) and trees (`ast`) differ from the paper's, so its values cannot be compared with published ones.
A source that does not parse gets 0 in parts 3 and 4. Without an edge in any reference it is the mean of three.
"""

import ast
import io
import keyword
import math
import tokenize
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.text.fenced import tree

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
