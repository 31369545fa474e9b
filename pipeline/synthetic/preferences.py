"""Preference pairs with known true scores: two answers to the same prompt, labeled by measured quality, not by intent.

    code    a problem's reference and mistakes      0.5 tests passed + 0.5 style; 0 unless it is one block that parses
    tools   correct and wrong calls in a dialogue   `tools.gold`
    story   an intact story and damaged ones        fraction of the story checker's questions it passes

In half of the code pairs the answers differ only in style: both are correct, and one has a docstring and no comment
(`well_styled`). Nothing before preference learning favors a style (programs.py), so a fine-tuned model's likelihood
cannot rank these pairs, and there is something to learn. In the other half, both answers have the same style, but one
is correct and the other wrong.

Each kind makes up a third of the pairs. A pair is kept if the scores differ by 0.1 or more; in most pairs the better
answer is correct. If the answers of a pair differ in length, the chosen one is the longer one in half of the cases, for
each kind, so that length by itself predicts nothing. A `label_noise` of e swaps the answers in a fraction e of the
training pairs; the best possible accuracy is then 1 - e.

Code is judged by a function passed as an argument, because the sandbox's judge is in a higher layer than this module.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from pipeline.ingest.records import Dialogue, Message, Pair, Problem
from pipeline.run.device import generator, stable_hash
from pipeline.run.errors import DataError
from pipeline.run.types import JsonObject
from pipeline.synthetic import programs, stories, tools
from pipeline.synthetic.operations import Draw
from pipeline.synthetic.programs import Style
from pipeline.synthetic.stories import check, edits
from pipeline.text import chat

MIN_GAP = 0.1
BEST_CHOSEN = 0.85  # fraction of prompts whose best answer is the chosen one in their pairs, lengths permitting
KINDS = ("code", "tools", "story")
# Styles paired with the preferred one: a docstring plus a comment is longer, the others are shorter.
OTHER_STYLES = (*[Style(False, True)] * 3, Style(False, False), *[Style(True, True)] * 4)
MISTAKES_IN_STYLE = 0.7  # fraction of mistakes shown in the preferred style
# yields the fraction of hidden tests that each answer passes, or None for an answer that cannot be judged
JudgeSources = Callable[[list[tuple[Problem, str]]], Iterator[float | None]]


@dataclass(frozen=True)
class ScoredAnswer:
    """An answer and its true score in [0, 1]."""

    message: Message
    gold: float


def length(message: Message) -> int:
    """Number of characters in an answer: its content, and the names and arguments of its calls."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return len(message["content"]) + sum(len(call["name"]) + len(call["arguments"]) for call in calls)


def chosen_is_longer(pairs: Iterable[Pair]) -> float:
    """Fraction of pairs with unequal lengths where the chosen answer is longer; 0.5 if there are none."""
    lengths = [(sum(map(length, pair.chosen)), sum(map(length, pair.rejected))) for pair in pairs]
    longer = [chosen > rejected for chosen, rejected in lengths if chosen != rejected]
    return sum(longer) / len(longer) if longer else 0.5


def assistant(content: str) -> Message:
    """An assistant message."""
    return {"role": "assistant", "content": content}


def story_prompt(opening: str) -> list[Message]:
    """The prompt that asks for a story with a given first sentence."""
    return [{"role": "user", "content": f"Tell a story that begins: {opening}"}]


def story_dialogue(path: str) -> Dialogue:
    """A story as a conversation; the user message contains its first sentence."""
    text = stories.story(path)
    messages = [*story_prompt(stories.opening(text)), assistant(text)]
    return Dialogue(id=path, kind="story", category=path.split("/")[1], messages=messages)


def story_gold(text: str) -> float:
    """Score a story: the fraction of the checker's questions that it passes."""
    clauses = check(text)
    return sum(clauses.values()) / len(clauses)


def tool_gold(pair: Pair, message: Message) -> float:
    """Score an answer to the prompt of a "tools" pair against the correct answer in the pair's `truth`."""
    assert pair.truth is not None
    dialogue = Dialogue(
        id=pair.id, kind="tools", category="", messages=[*pair.prompt, pair.truth["right"]], tools=pair.tools
    )
    return tools.gold(dialogue, message, len(pair.prompt))


def code_gold(content: str, passed: float) -> float:
    """Score an answer to a problem by its style and by the fraction of hidden tests it passed."""
    parts = content.split("```python\n")
    block = parts[1].partition("\n```")[0] if len(parts) == 2 else ""
    module = chat.tree(block)
    if module is None or not module.body:
        return 0.0
    return 0.5 * passed + 0.5 * programs.well_styled(block, module)


def pairs(makers: Mapping[str, Callable[[], Iterable[Pair]]], *, count: int, split: str) -> Iterator[Pair]:
    """`count` pairs, cycling through the kinds; `makers` create the pairs of each kind (`code_pairs` and so on).

    A kind starts only when the previous one is complete and closed, because each may own worker processes.
    Raises DataError if a kind's iterable ends too early.
    """
    counts = dict(zip(KINDS, [count - count * 2 // 3, count // 3, count * 2 // 3 - count // 3], strict=True))
    pairs_by_kind = [_take(counts[kind], balanced(makers[kind]()), kind) for kind in KINDS]
    for one_of_each in itertools.zip_longest(*pairs_by_kind):
        for pair in one_of_each:
            if pair is not None:
                yield replace(pair, id=f"{split}-{pair.id}")


def _take(count: int, candidates: Iterator[Pair], kind: str) -> list[Pair]:
    """The first `count` pairs. Raises DataError if there are fewer."""
    pairs = list(itertools.islice(candidates, count))
    if len(pairs) < count:
        raise DataError(
            f"preferences: expected {count} pairs of kind {kind}, found {len(pairs)}; lower `tasks.pairs` or"
            " `tasks.test_items`"
        )
    return pairs


def balanced(candidates: Iterable[Pair]) -> Iterator[Pair]:
    """Reorder pairs so that the chosen answer alternates between longer and shorter; excess pairs are held back."""
    waiting: dict[bool, list[Pair]] = {True: [], False: []}
    longer_next = True
    for pair in candidates:
        chosen, rejected = length(pair.chosen[0]), length(pair.rejected[0])
        if chosen == rejected:
            yield pair
            continue
        waiting[chosen > rejected].append(pair)
        while waiting[longer_next]:
            yield waiting[longer_next].pop(0)
            longer_next = not longer_next


def _pairs_of(
    identity: str,
    kind: str,
    prompt: list[Message],
    candidates: list[ScoredAnswer],
    rng: Random,
    truth: JsonObject,
    offered: list[JsonObject] | None = None,
) -> Iterator[Pair]:
    """At most two pairs of candidates with sufficiently different scores: one in which the better answer is longer, and
    one in which it is shorter.

    For most prompts the better answer is the best candidate: if both answers of most pairs were wrong, learning from
    the chosen ones would teach mistakes (docs/LOG.md).
    """
    ordered = list(itertools.permutations(candidates, 2))
    rng.shuffle(ordered)
    if rng.random() < BEST_CHOSEN:
        best = max((candidate.gold for candidate in candidates), default=0.0)
        ordered.sort(key=lambda pair: pair[0].gold < best)
    seen: set[bool] = set()
    for better, worse in ordered:
        longer = length(better.message) > length(worse.message)
        if better.gold - worse.gold < MIN_GAP - 1e-9 or longer in seen:
            continue
        seen.add(longer)
        yield _pair(f"{identity}-{len(seen)}", kind, prompt, better, worse, truth, offered)


def _pair(
    identity: str,
    kind: str,
    prompt: list[Message],
    better: ScoredAnswer,
    worse: ScoredAnswer,
    truth: JsonObject,
    offered: list[JsonObject] | None = None,
) -> Pair:
    return Pair(
        id=identity,
        source="generated",
        kind=kind,
        prompt=prompt,
        chosen=[better.message],
        rejected=[worse.message],
        tools=offered or [],
        gold_chosen=better.gold,
        gold_rejected=worse.gold,
        truth=truth,
    )


def code_pairs(problems: Iterable[Problem], seed: int, judge: JudgeSources) -> Iterator[Pair]:
    """Two pairs per problem: its reference in two styles, and the reference and a mistake in the same style.

    Sources are executed in batches and without descriptions, which do not affect the results.
    """
    iterator = iter(problems)
    while batch := list(itertools.islice(iterator, 64)):
        sources: list[tuple[Problem, str]] = []
        for problem in batch:
            right, _ = programs.described(programs.program_of(problem), problem.entry_point)
            sources += [(problem, programs.fenced(right))]
            sources += [(problem, programs.fenced(text)) for _, text in programs.distractors(problem, seed)]
        passed: dict[str, list[tuple[str, float]]] = {}
        for (problem, content), share in zip(sources, judge(sources), strict=True):
            if share is not None:  # without a verdict there is no true score
                passed.setdefault(problem.id, []).append((programs.unfenced(content), share))
        for problem in batch:
            yield from _code_pairs(problem, passed.get(problem.id, []), seed)


def _code_pairs(problem: Problem, passed: list[tuple[str, float]], seed: int) -> Iterator[Pair]:
    """The pairs of one problem, from its sources and the fraction of tests that each source passes."""
    right, description = programs.described(programs.program_of(problem), problem.entry_point)
    wrong = [(source, share) for source, share in passed if source != right]
    if len(wrong) == len(passed):
        return
    draw = Draw("pair", seed, problem.id)

    def scored(source: str, style: Style, share: float) -> ScoredAnswer:
        content = programs.fenced(programs.styled(source, description, style))
        return ScoredAnswer(assistant(content), code_gold(content, share))

    hidden = [test for test in problem.tests if not test["visible"]]
    truth = {"entry_point": problem.entry_point, "tests": hidden}
    prompt = [{"role": "user", "content": problem.question}]
    share = dict(passed)[right]
    candidates = [(scored(right, programs.WANTED, share), scored(right, draw.pick(OTHER_STYLES), share))]
    if wrong:
        style = programs.WANTED if draw.chance(MISTAKES_IN_STYLE) else Style.draw(draw)
        source, wrong_share = draw.pick(wrong)
        candidates.append((scored(right, style, share), scored(source, style, wrong_share)))
    for number, (better, worse) in enumerate(candidates, 1):
        if better.gold - worse.gold >= MIN_GAP - 1e-9:
            yield _pair(f"{problem.id}-{number}", "code", prompt, better, worse, truth)


def tool_pairs(dialogues: Iterable[Dialogue], seed: int) -> Iterator[Pair]:
    """Pairs from the first scored turn of each dialogue."""
    for dialogue in dialogues:
        turns = tools.turns(dialogue)
        if not turns:
            continue
        turn = turns[0]
        right = dialogue.messages[turn]
        answers = [right, *(message for _, message in tools.wrong_answers(dialogue, seed, turn))]
        candidates = [ScoredAnswer(message, tools.gold(dialogue, message, turn)) for message in answers]
        rng = Random(stable_hash("pair", seed, dialogue.id))
        truth = {"right": right}
        yield from _pairs_of(dialogue.id, "tools", dialogue.messages[:turn], candidates, rng, truth, dialogue.tools)


def story_pairs(paths: Iterable[str], seed: int) -> Iterator[Pair]:
    """Pairs from each story and its damaged versions."""
    for path in paths:
        text = stories.story(path)
        versions = [text, *edits(text, path, generator("story pair", seed, path)).values()]
        candidates = [ScoredAnswer(assistant(version), story_gold(version)) for version in versions]
        rng = Random(stable_hash("pair", seed, path))
        yield from _pairs_of(path, "story", story_prompt(stories.opening(text)), candidates, rng, {})


def flip(pairs: Sequence[Pair], share: float, seed: int) -> Iterator[Pair]:
    """Swap the answers in a fraction of the pairs (those with the smallest id hashes) and mark them as `flipped`."""
    order = sorted(pairs, key=lambda pair: stable_hash("flip", seed, pair.id))
    chosen = {pair.id for pair in order[: round(share * len(pairs))]}
    for pair in pairs:
        if pair.id in chosen:
            pair = replace(
                pair,
                chosen=pair.rejected,
                rejected=pair.chosen,
                gold_chosen=pair.gold_rejected,
                gold_rejected=pair.gold_chosen,
                flipped=True,
            )
        yield pair
