"""Pairs whose labels are true: scores by hand, the gap, the balance of lengths, the noise."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from pipeline.ingest.records import Pair, Problem
from pipeline.run.device import stable_hash
from pipeline.run.errors import DataError
from pipeline.synthetic import preferences, programs, stories, tools
from pipeline.synthetic.preferences import ScoredAnswer, assistant, balanced, chosen_is_longer, code_gold, flip, length
from pipeline.text import chat

COUNT = 120


def made_up(sources: list[tuple[Problem, str]]) -> Iterator[float | None]:
    """Stands in for the sandbox: the reference passes all tests, unparsable code none, and the rest fifths by hash."""
    for problem, content in sources:
        lines = programs.unfenced(content).splitlines()
        source = "\n".join(line for line in lines if not line.startswith(('    """', "    # ")))  # whatever its style
        if source == programs.program_of(problem).source(problem.entry_point):
            yield 1.0
        else:
            yield stable_hash(source) % 5 / 5 if chat.tree(source) is not None else 0.0


def made(count: int, *, judge: preferences.JudgeSources = made_up, seed: int = 1, split: str = "train") -> list[Pair]:
    paths = (f"stories/{family}/{n}" for n in range(1, count) if n % 50 for family in stories.FAMILIES)
    kinds = {
        "code": lambda: preferences.code_pairs(programs.problems("train", count + 20, 1), seed, judge),
        "tools": lambda: preferences.tool_pairs(tools.dialogues("train", count + 20, 1), seed),
        "story": lambda: preferences.story_pairs(paths, seed),
    }
    return list(preferences.pairs(kinds, count=count, split=split))


@pytest.fixture(scope="module")
def some() -> list[Pair]:
    return made(COUNT)


def test_a_third_of_each_kind_in_turn_with_ids_of_their_own(some: list[Pair]) -> None:
    assert [pair.kind for pair in some[:6]] == ["code", "tools", "story"] * 2
    assert [sum(pair.kind == kind for pair in some) for kind in preferences.KINDS] == [40, 40, 40]
    assert len({pair.id for pair in some}) == COUNT
    assert all(pair.id.startswith("train-") for pair in some)


def test_counts_that_three_does_not_divide_are_met() -> None:
    for count in (1, 5):
        assert len(made(count)) == count


def test_labels_are_the_true_scores_of_the_answers(some: list[Pair]) -> None:
    talks = {d.id: d for d in tools.dialogues("train", COUNT + 20, 1)}
    asked = {p.id: p for p in programs.problems("train", COUNT + 20, 1)}
    for pair in some:
        name = pair.id.removeprefix("train-").rpartition("-")[0]
        golds = []
        for (message,) in (pair.chosen, pair.rejected):
            if pair.kind == "story":
                golds.append(preferences.story_gold(message["content"]))
            elif pair.kind == "tools":
                golds.append(tools.gold(talks[name], message, len(pair.prompt)))
            else:
                (passed,) = made_up([(asked[name], message["content"])])
                golds.append(code_gold(message["content"], passed or 0.0))
        assert (pair.gold_chosen, pair.gold_rejected) == tuple(golds), pair.id


def test_a_pair_is_kept_only_when_the_truth_differs_by_a_tenth(some: list[Pair]) -> None:
    gaps = [(pair.gold_chosen or 0) - (pair.gold_rejected or 0) for pair in some]
    assert min(gaps) >= 0.1 - 1e-9
    assert all(0 <= (pair.gold_rejected or 0) < (pair.gold_chosen or 0) <= 1 for pair in some)


def test_the_better_answer_is_mostly_a_right_one_and_not_always(some: list[Pair]) -> None:
    for kind in preferences.KINDS:
        golds = [pair.gold_chosen or 0 for pair in some if pair.kind == kind]
        assert sum(gold == 1 for gold in golds) >= 0.7 * len(golds), kind
    assert any((pair.gold_chosen or 0) < 1 for pair in some)


def test_length_alone_ranks_nothing(some: list[Pair]) -> None:
    for kind in preferences.KINDS:
        pairs = [pair for pair in some if pair.kind == kind]
        assert abs(chosen_is_longer(pairs) - 0.5) <= 0.03, kind
    assert abs(chosen_is_longer(some) - 0.5) <= 0.03
    noisy = [chosen_is_longer(flip(some, 0.2, seed)) for seed in range(20)]  # a single one can be off by 0.045
    assert abs(sum(noisy) / len(noisy) - 0.5) <= 0.03


def test_pairs_are_a_function_of_the_seed(some: list[Pair]) -> None:
    assert made(12) == made(12)
    assert made(12) != made(12, seed=2)


def test_what_could_not_be_judged_is_in_no_pair() -> None:
    def references_fail(sources: list[tuple[Problem, str]]) -> Iterator[float | None]:
        right = [programs.fenced(programs.program_of(p).source(p.entry_point)) for p, _ in sources]
        return (
            None if content == answer else score
            for (_, content), answer, score in zip(sources, right, made_up(sources), strict=True)
        )

    problems = list(programs.problems("train", 60, 1))
    assert list(preferences.code_pairs(problems, 1, references_fail)) == []
    assert list(preferences.code_pairs(problems, 1, made_up))
    assert list(preferences.code_pairs(problems, 1, lambda sources: iter([None] * len(sources)))) == []


def test_too_few_items_are_an_error_that_names_the_kind(some: list[Pair]) -> None:
    with pytest.raises(DataError, match=r"expected 10 pairs of kind tools, found 0; lower `tasks\.pairs`"):
        list(preferences.pairs({"code": lambda: some, "tools": list, "story": lambda: some}, count=30, split="train"))


def test_code_scores_by_hand() -> None:
    block = programs.fenced("def solve(x):\n    return x")
    assert code_gold(block, 0.5) == pytest.approx(0.25)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the parser's warnings about an answer must not reach the console
        assert code_gold("```python\nx = 1if True else 0\n```", 1.0) == pytest.approx(0.5)
    assert code_gold(programs.fenced('def solve(x):\n    """Keep it."""\n    return x'), 1.0) == 1.0
    assert code_gold(programs.fenced("def solve(x:"), 0.0) == 0.0
    assert code_gold("def solve(x):\n    return x", 0.0) == 0.0  # no block
    assert code_gold(block + "\n" + block, 0.0) == 0.0  # two
    assert code_gold("```python\n\n```", 0.0) == 0.0  # nothing in it


def test_length_counts_words_names_and_arguments() -> None:
    call = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    assert length(assistant("four")) == 4
    assert length(assistant("ok") | {"tool_calls": [call, call]}) == 2 + 2 * (3 + 8)


def pair(number: int, chosen: str, rejected: str) -> Pair:
    return Pair(
        id=f"p{number}",
        source="s",
        kind="code",
        prompt=[],
        chosen=[assistant(chosen)],
        rejected=[assistant(rejected)],
        gold_chosen=0.9,
        gold_rejected=0.1,
    )


def test_a_pair_that_would_tip_the_balance_waits() -> None:
    longer, shorter, equal = ("aa", "b"), ("a", "bb"), ("a", "b")
    order = [longer, longer, equal, longer, shorter, shorter, shorter, shorter]
    out = [p.id for p in balanced(pair(n, *texts) for n, texts in enumerate(order))]
    assert out == ["p0", "p2", "p4", "p1", "p5", "p3", "p6"]  # p7 waits for a longer one that never comes


def test_only_unequal_lengths_count_as_longer_or_shorter() -> None:
    assert chosen_is_longer([pair(0, "aa", "b"), pair(1, "a", "b"), pair(2, "aa", "b"), pair(3, "a", "bb")]) == 2 / 3
    assert chosen_is_longer([pair(0, "a", "b")]) == 0.5


def test_of_candidates_there_is_at_most_one_pair_of_either_direction() -> None:
    candidates = [ScoredAnswer(assistant("x" * n), gold) for n, gold in ((3, 1.0), (9, 0.5), (1, 0.4), (5, 0.95))]
    for seed in range(20):
        found = list(preferences._pairs_of("i", "code", [], candidates, Random(seed), {}))
        assert sorted(length(p.chosen[0]) > length(p.rejected[0]) for p in found) == [False, True]
    close = [ScoredAnswer(assistant("x"), 0.5), ScoredAnswer(assistant("xx"), 0.59)]
    assert list(preferences._pairs_of("i", "code", [], close, Random(0), {})) == []
    exact = [ScoredAnswer(assistant("x"), 0.7), ScoredAnswer(assistant("xx"), 0.8)]  # 0.8 - 0.7 rounds to below 0.1
    assert len(list(preferences._pairs_of("i", "code", [], exact, Random(0), {}))) == 1


def test_noise_flips_its_share_by_id_and_says_which() -> None:
    pairs = [pair(n, "aa", "b") for n in range(1000)]
    noisy = list(flip(pairs, 0.2, 7))
    assert sum(p.flipped for p in noisy) == 200
    for before, after in zip(pairs, noisy, strict=True):
        expected = before
        if after.flipped:
            expected = replace(
                before, chosen=before.rejected, rejected=before.chosen, gold_chosen=0.1, gold_rejected=0.9, flipped=True
            )
        assert after == expected
    again = {p.id for p in flip(pairs[::-1], 0.2, 7) if p.flipped}
    assert again == {p.id for p in noisy if p.flipped}
    assert again != {p.id for p in flip(pairs, 0.2, 8) if p.flipped}
    assert not any(p.flipped for p in flip(pairs, 0.0, 7))


def test_a_story_dialogue_asks_for_the_story_it_holds() -> None:
    dialogue: Any = preferences.story_dialogue("stories/gift/3")
    text = stories.story("stories/gift/3")
    assert dialogue.messages[1]["content"] == text
    assert dialogue.messages[0]["content"] == f"Tell a story that begins: {stories.opening(text)}"
    assert (dialogue.kind, dialogue.category) == ("story", "gift")
    assert preferences.story_gold(text) == 1.0
