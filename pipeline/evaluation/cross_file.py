"""Cross-file completion: held-out lines and functions in repositories, completed with and without other files.

    data/raw/code (val, with contexts) -> Item, ... -> both ways: exact match, edit similarity, and their differences

A line is chosen where a file first uses a name defined in another file in the repository, as in CrossCodeEval (Ding et
al. 2023, arXiv:2310.11248) and RepoBench (Liu et al. 2023, arXiv:2306.03091). Imports are never chosen; the model's
context may or may not include the definition. The cursor is placed before the name, and before any space or bracket
merged into the name's first token; the model completes the rest of the line. A function is chosen if its body, of at
most MOST_LINES lines, uses such a name; the model writes the body. Items are sampled by a hash of their location.

Both prompts have the same token limit. Without other files, the window is filled with the file's own text before the
cursor. With other files, it contains the context that `ingest/repository_documents.py` chose without looking at the
answer; the file's own text gets the rest, at least a third. Decoding is greedy, up to the end of the line or body.

Edit similarity is 1 - Levenshtein distance / the longer length. Intervals resample files, not lines, since the lines of
a file are correlated. Not guaranteed: that the reference line is the only correct one.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.parquet

from pipeline.evaluation.intervals import Interval, paired_difference
from pipeline.evaluation.suites import Subject, SuiteResult
from pipeline.generation.sampling import Completion
from pipeline.run.device import generator, stable_hash
from pipeline.text import chat, repositories
from pipeline.text.repositories import Context

MOST_LINES = 12  # in a function's body
MOST_CHARACTERS = 400  # compared in an answer
LINE_TOKENS, FUNCTION_TOKENS = 48, 160
OWN = 1 / 3  # minimum share of a prompt for its own file's text
IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True)
class Item:
    """A completion task: context from other files, the file's own text before the cursor, and the reference."""

    file: str  # repository and path
    place: int  # character offset in the file
    context: Context  # `before` is all of the file's text before the cursor
    reference: str
    name: str  # defined in another file; for a function, the first such name in its body


@dataclass(frozen=True)
class HeldOut:
    """A held-out file in a repository."""

    name: str  # repository and path
    text: str
    contexts: tuple[Context, ...]  # one for each part of the file
    ends: tuple[int, ...]  # character offset of the end of each part

    def item(self, place: int, end: int, name: str) -> Item:
        """The item for the text from `place` to `end`, with the context of the part it is in."""
        number = next(n for n, border in enumerate(self.ends) if place < border)
        context = replace(self.contexts[number], before=self.text[:place], names=())
        return Item(self.name, place, context, self.text[place:end], name)


def read(corpus: Path) -> list[HeldOut]:
    """The held-out files in a corpus's repositories, sorted by name."""
    files: dict[str, list[tuple[int, str, str]]] = {}
    for path in sorted(corpus.glob("val-*.parquet")):
        for row in pyarrow.parquet.read_table(path).to_pylist():
            if row.get("context"):
                name, _, number = row["path"].partition("#")
                files.setdefault(f"{row['source']}/{name}", []).append((int(number or 1), row["text"], row["context"]))
    found = []
    for name, parts in sorted(files.items()):
        parts.sort()
        ends = itertools.accumulate(len(text) for _, text, _ in parts)
        contexts = tuple(Context.from_json(context) for *_, context in parts)
        found.append(HeldOut(name, "".join(text for _, text, _ in parts), contexts, tuple(ends)))
    return found


def items(files: Iterable[HeldOut]) -> tuple[list[Item], list[Item]]:
    """All eligible lines and functions in held-out files."""
    lines: list[Item] = []
    functions: list[Item] = []
    for file in files:
        tree = chat.tree(file.text)
        if tree is None:
            continue
        starts = [0, *itertools.accumulate(len(line) + 1 for line in file.text.split("\n"))]  # of lines, in characters
        names = frozenset(name for context in file.contexts for name in context.names)
        uses = sorted(_uses(tree, names, file.text, starts))
        first = {name: place for place, name in reversed(uses)}
        for name, place in sorted(first.items(), key=lambda entry: entry[1]):
            before = file.text[place - 1 : place]
            begin = place if not before or before.isalnum() or before == "\n" else place - 1
            end = file.text.find("\n", place)
            lines.append(file.item(begin, end if end >= 0 else len(file.text), name))
        for begin, end in _bodies(tree, starts):
            inside = [name for place, name in uses if begin <= place < end]
            if inside:
                functions.append(file.item(begin, end, inside[0]))
    return lines, functions


def _uses(tree: ast.Module, names: frozenset[str], text: str, starts: Sequence[int]) -> Iterable[tuple[int, str]]:
    """(character offset, name) of each use of the names; for `module.name`, the offset of `name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            written = ast.unparse(node)
            if written in names and node.end_lineno == node.lineno and node.end_col_offset is not None:
                line = text[starts[node.lineno - 1] : starts[node.lineno]].encode()
                end = len(line[: node.end_col_offset].decode())
                yield starts[node.lineno - 1] + end - len(written.rpartition(".")[2]), written


def _bodies(tree: ast.Module, starts: Sequence[int]) -> list[tuple[int, int]]:
    """(begin, end) character offsets of each function body that is short enough, from its first line."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body
            first, last = body[0].lineno, node.end_lineno or body[0].lineno
            if first > node.lineno and last - first < MOST_LINES:
                found.append((starts[first - 1], starts[last] - 1))
    return found


# --- the suite -------------------------------------------------------------------------------------------------------


def measured(subject: Subject, files: Sequence[HeldOut]) -> SuiteResult:
    """Complete lines, and half as many functions, each with and without other files.

    Metrics: `<kind>_exact_with`, `_without`, `_difference`, and the same for `similarity` and, for lines, `name`
    (whether the first name written is correct).
    """
    result = SuiteResult()
    most = subject.settings.cross_file
    lines, functions = items(files)
    for kind, found, tokens, count in (
        ("line", lines, LINE_TOKENS, most),
        ("function", functions, FUNCTION_TOKENS, most // 2),
    ):
        chosen = sorted(found, key=lambda item: stable_hash(subject.seed, kind, item.file, item.place))[:count]
        answers = _answers(subject, chosen, kind, tokens)
        kept = [item for item in chosen if all(_id(item) in arm for arm in answers.values())]
        result.numbers |= {f"{kind}s": len(kept), f"{kind}s_left_out": len(chosen) - len(kept)}
        if kept:
            _measure(result, subject, kind, kept, answers)
    return result


def _id(item: Item) -> str:
    return f"{item.file}:{item.place}"


def _answers(
    subject: Subject, chosen: Sequence[Item], kind: str, tokens: int
) -> dict[str, dict[str, tuple[Completion, str]]]:
    """For "with" and "without", by item id: the completion and its text, truncated at the end of the line or body."""
    room = min(subject.settings.context, subject.model.config.max_context - 8) - tokens
    found: dict[str, dict[str, tuple[Completion, str]]] = {}
    for arm in ("with", "without"):
        shown = [item.context if arm == "with" else item.context.alone() for item in chosen]
        prompts = dict(zip(map(_id, chosen), prompts_of(subject, shown, room), strict=True))
        completions = subject.complete(f"cross_file {kind}", prompts, tokens=tokens, temperature=0.0)
        found[arm] = {
            _id(item): (completions[_id(item)], _cut(subject.tokenizer.decode(completions[_id(item)].ids), item, kind))
            for item in chosen
            if _id(item) in completions
        }
    return found


def prompts_of(subject: Subject, contexts: Sequence[Context], room: int) -> list[list[int]]:
    """Prompts of at most `room` tokens: an end-of-text token, other files, and the file's own text before the cursor.

    If there is not enough room, both texts are truncated at the beginning and the end-of-text token is dropped, as in
    training.
    """
    tokenizer = subject.tokenizer
    heads = repositories.encode(tokenizer, [replace(context, before="") for context in contexts])
    prompts = []
    for head, context in zip(heads, contexts, strict=True):
        own = tokenizer.encode(context.before[-8 * room :])
        least = min(len(own), int(room * OWN))
        head = head[-(room - least) :]
        ids = [tokenizer.end_of_text, *head, *own[max(0, len(own) - (room - len(head))) :]]
        prompts.append(ids[-room:])
    return prompts


def _cut(text: str, item: Item, kind: str) -> str:
    """The answer up to the end of the line, or up to the first line that is indented less than the reference."""
    if kind == "line":
        return text.partition("\n")[0]
    indent = len(item.reference) - len(item.reference.lstrip())
    kept: list[str] = []
    for number, line in enumerate(text.split("\n")):
        if number and line.strip() and len(line) - len(line.lstrip()) < indent:
            break
        kept.append(line)
    return "\n".join(kept).rstrip()


def _measure(
    result: SuiteResult,
    subject: Subject,
    kind: str,
    kept: Sequence[Item],
    answers: dict[str, dict[str, tuple[Completion, str]]],
) -> None:
    """Add the metrics and rows of one kind of item."""
    scores: dict[str, dict[str, list[float]]] = {}
    for arm, of_arm in answers.items():
        for item in kept:
            completion, text = of_arm[_id(item)]
            row = score(text, item, kind)
            for measure, value in row.items():
                scores.setdefault(measure, {}).setdefault(arm, []).append(value)
            result.item(
                f"cross_file {kind} {arm}",
                _id(item),
                completion,
                text,
                asked=[item.context.path, item.context.before, item.reference],
                reference=item.reference,
                verdict="exact" if row["exact"] else "differs",
                right=int(row["exact"]),
                scores=row,
            )
    files = [item.file for item in kept]
    for measure, arms in scores.items():
        pairs = {arm: by_file(files, values) for arm, values in arms.items()}
        for arm, pair in pairs.items():
            result.measure(f"{kind}_{measure}_{arm}", subject.bootstrap(*pair) if len(pair[0]) > 1 else _mean(pair))
        if len(set(files)) > 1:
            draws = generator("bootstrap", subject.seed, len(kept))
            difference = paired_difference(
                pairs["without"], pairs["with"], generator=draws, resamples=subject.settings.bootstrap
            )
            result.measure(f"{kind}_{measure}_difference", difference)


def score(text: str, item: Item, kind: str) -> dict[str, float]:
    """Whether an answer is exact, how similar it is and, for lines, whether its first name is the expected one."""
    one, two = (" ".join(side.split()) if kind == "line" else side.strip() for side in (text, item.reference))
    scores = {"exact": float(one == two), "similarity": similarity(one, two)}
    if kind == "line":
        first = IDENTIFIER.search(one)
        scores["name"] = float(first is not None and first[0] == item.name.rpartition(".")[2])
    return scores


def similarity(one: str, two: str) -> float:
    """1 - Levenshtein distance / the longer length, over the first MOST_CHARACTERS; 1 for two empty strings."""
    one, two = one[:MOST_CHARACTERS], two[:MOST_CHARACTERS]
    row = list(range(len(two) + 1))
    for number, character in enumerate(one, start=1):
        diagonal, row[0] = row[0], number
        for place, other in enumerate(two, start=1):
            cost = min(row[place] + 1, row[place - 1] + 1, diagonal + (character != other))
            diagonal, row[place] = row[place], cost
    return 1 - row[-1] / max(len(one), len(two), 1)


def by_file(files: Sequence[str], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The sum and count of each file's values, for intervals over files."""
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    for file, value in zip(files, values, strict=True):
        sums[file] = sums.get(file, 0.0) + value
        counts[file] = counts.get(file, 0.0) + 1
    return list(sums.values()), list(counts.values())


def _mean(pair: tuple[list[float], list[float]]) -> Interval:
    """The mean of a single file, with the full range from 0 to 1 as its interval."""
    return Interval(sum(pair[0]) / sum(pair[1]), 0.0, 1.0, int(sum(pair[1])))
