"""Preference pairs with a known true score: two answers to one prompt, labelled by how good they are, not by intention.

    code    reference and mistakes of a problem     0.2 one block that parses + 0.8 hidden tests passed
    tools   right and wrong calls of a dialogue     `tools.gold`
    story   a whole story and damaged ones          mean of the story checker's clauses

A third each. A pair is kept when the scores differ by 0.1 or more; the chosen answer is the longer one in half of the
pairs of a kind, as near as the candidates allow, so that length alone ranks nothing. `label_noise` e swaps a share e of
the training pairs: the best accuracy is then 1 - e.

Code is judged by the function handed in (the sandbox's judge stands above this floor).
"""

import ast
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from pipeline.device import generator, stable_hash
from pipeline.streams.records import Dialogue, Message, Pair, Problem
from pipeline.synthesis import mistakes, stories, tools, wording
from pipeline.synthesis.story_check import check
from pipeline.synthesis.story_edits import edits

MIN_GAP = 0.1
KINDS = ("code", "tools", "story")
# scores of the sources of one problem: share of hidden tests passed, None where nothing could be judged
JudgeSources = Callable[[list[tuple[Problem, str]]], Iterator[float | None]]


@dataclass(frozen=True)
class Candidate:
    """An answer and its true score in [0, 1]."""

    message: Message
    gold: float

    @property
    def length(self) -> int:
        """Characters of the answer, calls included."""
        calls = self.message.get("tool_calls") or []
        return len(self.message["content"]) + sum(len(str(call["function"])) for call in calls)


def assistant(content: str) -> Message:
    """An assistant message."""
    return {"role": "assistant", "content": content}


def story_prompt(opening: str) -> list[Message]:
    """How a story is asked for."""
    return [{"role": "user", "content": f"Tell a story that begins: {opening}"}]


def story_dialogue(path: str) -> Dialogue:
    """A story as a conversation: the user gives its first sentence."""
    text = stories.story(path)
    messages = [*story_prompt(stories.opening(text)), assistant(text)]
    return Dialogue(id=path, kind="story", category=path.split("/")[1], messages=messages)


def story_gold(text: str) -> float:
    """Mean of the checker's clauses."""
    clauses = check(text)
    return sum(clauses.values()) / len(clauses)


def code_gold(content: str, passed: float | None) -> float:
    """Score of an answer to a problem from the share of hidden tests it passed; unjudged counts 0."""
    pieces = content.split("```python\n")
    block = pieces[1].partition("\n```")[0] if len(pieces) == 2 else ""
    try:
        parses = bool(block) and bool(ast.parse(block).body)
    except (SyntaxError, ValueError):
        parses = False
    return 0.2 * parses + 0.8 * (passed or 0.0)


def pairs(
    problems: Iterable[Problem], dialogues: Iterable[Dialogue], paths: Iterable[str], *, count: int, seed: int,
    split: str, judge: JudgeSources,
) -> Iterator[Pair]:  # fmt: skip
    """`count` pairs, the three kinds in turn. The iterables must hold enough; what gives no pair is passed over."""
    per_kind = [count - count * 2 // 3, count // 3, count * 2 // 3 - count // 3]
    streams = [
        code_pairs(problems, seed, judge), tool_pairs(dialogues, seed), story_pairs(paths, seed),
    ]  # fmt: skip
    limited = [itertools.islice(balanced(stream), number) for stream, number in zip(streams, per_kind, strict=True)]
    for turn in itertools.zip_longest(*limited):
        for pair in turn:
            if pair is not None:
                yield replace(pair, id=f"{split}-{pair.id}")


def balanced(candidates: Iterable[tuple[Pair, Candidate, Candidate]]) -> Iterator[Pair]:
    """Pairs of which the chosen answer is the longer one in half: one that would tip the balance waits for its turn."""
    waiting: dict[bool, list[Pair]] = {True: [], False: []}
    longer_next = True
    for pair, chosen, rejected in candidates:
        if chosen.length == rejected.length:
            yield pair
            continue
        waiting[chosen.length > rejected.length].append(pair)
        while waiting[longer_next]:
            yield waiting[longer_next].pop(0)
            longer_next = not longer_next


Made = Iterator[tuple[Pair, Candidate, Candidate]]


def _pair(identity: str, kind: str, prompt: list[Message], candidates: list[Candidate], rng: Random,
          offered: list[dict[str, Any]] | None = None) -> Made:  # fmt: skip
    """Pairs of candidates whose scores differ enough: one where the better is longer, one where it is shorter."""
    ordered = list(itertools.permutations(candidates, 2))
    rng.shuffle(ordered)
    seen: set[bool] = set()
    for better, worse in ordered:
        longer = better.length > worse.length
        if better.gold - worse.gold < MIN_GAP or longer in seen:
            continue
        seen.add(longer)
        pair = Pair(id=f"{identity}-{len(seen)}", source="generated", kind=kind, prompt=prompt, chosen=[better.message],
                    rejected=[worse.message], tools=offered or [], gold_chosen=round(better.gold, 4),
                    gold_rejected=round(worse.gold, 4))  # fmt: skip
        yield pair, better, worse


def code_pairs(problems: Iterable[Problem], seed: int, judge: JudgeSources) -> Made:
    """Pairs from the reference and the mistakes of each problem, executed in batches."""
    iterator = iter(problems)
    while batch := list(itertools.islice(iterator, 64)):
        sources = []
        for problem in batch:
            assert problem.answer is not None
            found = [problem.answer, *(wording.fenced(text) for _, text in mistakes.distractors(problem, seed))]
            sources += [(problem, content) for content in found]
        scored: dict[str, list[Candidate]] = {}
        for (problem, content), passed in zip(sources, judge(sources), strict=True):
            scored.setdefault(problem.id, []).append(Candidate(assistant(content), code_gold(content, passed)))
        for problem in batch:
            prompt = [{"role": "user", "content": problem.question}]
            rng = Random(stable_hash("pair", seed, problem.id))
            yield from _pair(problem.id, "code", prompt, scored[problem.id], rng)


def tool_pairs(dialogues: Iterable[Dialogue], seed: int) -> Made:
    """Pairs from the first scored turn of each dialogue."""
    for dialogue in dialogues:
        turns = tools.turns(dialogue)
        if not turns:
            continue
        turn = turns[0]
        right = dialogue.messages[turn]
        found = [right, *(message for _, message in tools.wrong_answers(dialogue, seed, turn))]
        candidates = [Candidate(message, tools.gold(dialogue, message, turn)) for message in found]
        rng = Random(stable_hash("pair", seed, dialogue.id))
        yield from _pair(dialogue.id, "tools", dialogue.messages[:turn], candidates, rng, dialogue.tools)


def story_pairs(paths: Iterable[str], seed: int) -> Made:
    """Pairs from each story and its damaged versions."""
    for path in paths:
        text = stories.story(path)
        found = [text, *edits(text, path, generator("story pair", seed, path)).values()]
        candidates = [Candidate(assistant(one), story_gold(one)) for one in found]
        rng = Random(stable_hash("pair", seed, path))
        yield from _pair(path, "story", story_prompt(stories.opening(text)), candidates, rng)


def flip(pairs: Iterable[Pair], share: float, seed: int) -> Iterator[Pair]:
    """Swap the answers of a share of the pairs, chosen by their id; `flipped` says which."""
    for pair in pairs:
        if stable_hash("flip", seed, pair.id) / 2**64 < share:
            pair = replace(pair, chosen=pair.rejected, rejected=pair.chosen, gold_chosen=pair.gold_rejected,
                           gold_rejected=pair.gold_chosen, flipped=True)  # fmt: skip
        yield pair
