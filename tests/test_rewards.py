"""Rewards worked out by hand, part by part; an unknown part never counts as a number."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.evaluation.tools import call_reward
from pipeline.ingest.records import Problem
from pipeline.model.heads import RewardModel
from pipeline.model.transformer import Transformer
from pipeline.rl import answers, rewards
from pipeline.rl.answers import Answer
from pipeline.rl.rewards import Resources, Score, Scorer
from pipeline.run.errors import ConfigError, DataError
from pipeline.sandbox.judge import Judge, Limits, SandboxConfig
from tests import rollouts
from tests.rollouts import prompts

PLAIN = Resources(max_new_tokens=16)


def answer(text: str, *, length: int = 4, finished: bool = True, **prompt: Any) -> Answer:
    made = rollouts.answer(replace(rollouts.prompt(0), **prompt), 0, [5] * length, finished=finished)
    return replace(made, text=text)


def fenced(code: str) -> str:
    return f"Here:\n```python\n{code}\n```"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (fenced("def f(x):\n    return x"), 1.0),
        (fenced("def f(x:"), 0.5),
        ("def f(x):\n    return x", 0.0),  # code, but in no block
        (fenced("x = 1") + "\nSo.", 0.0),  # not the end
        (fenced("x = 1") + "\n" + fenced("y = 1"), 0.0),
        ("```python\nx = 1", 0.0),  # not closed
        ("```bash\nls\n```", 0.0),
        ("", 0.0),
    ],
)
def test_the_form_of_code_by_hand(text: str, expected: float) -> None:
    assert Scorer({"code_format": 1.0}, PLAIN)([answer(text)]) == [Score(expected, {"code_format": expected})]


@pytest.mark.parametrize(
    ("length", "finished", "expected"),
    [
        (1, True, 0.0),
        (12, True, 0.0),
        (13, True, -0.25),
        (14, True, -0.5),
        (16, True, -1.0),
        (16, False, -1.0),
        (3, False, -1.0),
    ],
)
def test_the_length_by_hand(length: int, finished: bool, expected: float) -> None:
    """At most 16 tokens, so c = 4: no penalty up to 12, then a quarter per token."""
    (found,) = Scorer({"length": 1.0}, PLAIN)([answer("", length=length, finished=finished)])
    assert found.total == expected


def test_a_total_is_the_weighted_sum_held_within_ten() -> None:
    """Bug museum: weights ignored."""
    given = [answer(fenced("x = 1"), length=14), answer(fenced("x ="), length=3)]
    found = Scorer({"code_format": 4.0, "length": 0.5}, PLAIN)(given)
    assert [one.total for one in found] == [4.0 - 0.25, 2.0]
    assert found[0].parts == {"code_format": 1.0, "length": -0.5}
    assert [one.total for one in Scorer({"code_format": 25.0}, PLAIN)(given)] == [10.0, 10.0]
    assert Scorer({"length": 30.0}, PLAIN)([answer("", finished=False)])[0].total == -10.0


@pytest.mark.parametrize("lost", [None, math.nan, math.inf, -math.inf])
def test_a_part_that_is_not_known_makes_the_whole_unknown(lost: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither 0 nor, if it is not finite, the ten that clipping would make of it.

    Bug museum: lost part as 0.
    """

    def part(scorer: Scorer, given: Sequence[Answer]) -> list[float | None]:
        return [lost, 1.0]

    monkeypatch.setitem(rewards.PARTS, "learned", part)
    scorer = Scorer({"length": 1.0}, PLAIN)
    scorer.weights["learned"] = 1.0
    assert scorer([answer("a"), answer("b")]) == [
        Score(None, {"length": 0.0, "learned": None}),
        Score(1.0, {"length": 0.0, "learned": 1.0}),
    ]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "expected at least one of code_format, code, tool_call, length, learned, preferred"),
        (
            {"length": 1.0, "style": 1.0},
            "unknown reward 'style'; valid names: code_format, code, tool_call, length, learned, preferred",
        ),
        ({"code": 1.0}, "`code` needs the sandbox"),
        ({"learned": 1.0}, "`learned` needs a reward model"),
        ({"preferred": 1.0}, "`preferred` needs a reward model"),
        ({"tool_call": 1.0}, "`tool_call` needs prompts"),
    ],
)
def test_a_scorer_that_cannot_score_is_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Scorer(weights, PLAIN)


def test_the_learned_part_is_the_reward_model_s_normalized(tiny_model: Transformer) -> None:
    model = RewardModel(tiny_model)
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(1))
    model.reward_mean, model.reward_std = 2.0, 0.25
    given = [rollouts.answer(prompt, 0, [9] * (1 + n)) for n, prompt in enumerate(prompts())]
    resources = replace(PLAIN, learned=lambda given: model.normalized(answers.raw_rewards(model, given, 0)).numpy())
    found = Scorer({"learned": 1.0}, resources)(given)
    raw = answers.raw_rewards(model, given, 0)
    for one, value in zip(found, raw.tolist(), strict=True):
        assert one.parts["learned"] == pytest.approx((value - 2.0) / 0.25, rel=1e-5)
    with torch.no_grad():
        model.score.weight.fill_(math.nan)
    assert [one.total for one in Scorer({"learned": 1.0}, resources)(given)] == [None] * 3


DOUBLE = [
    {"args": "[1]", "expected": "2", "visible": True},
    {"args": "[2]", "expected": "4", "visible": False},
    {"args": "[3]", "expected": "6", "visible": False},
]
PROBLEM = Problem(
    id="1", level=1, group="easy", key="1", question="Double x.", entry_point="f", signature="f(x)", tests=DOUBLE
)


def test_code_is_the_share_of_hidden_tests_that_pass_in_the_sandbox() -> None:
    """The visible test does not count, and an answer of the wrong form is not run."""
    pair = replace(rollouts.prompt(0).record, kind="code", truth={"entry_point": "f", "tests": DOUBLE[:1]})
    given = [
        answer(fenced("def f(x):\n    return 2 * x"), record=PROBLEM),
        answer(fenced("def f(x):\n    return 4 if x == 2 else 0"), record=PROBLEM),
        answer(fenced("def f(x):\n    return 2 if x == 1 else 0"), record=PROBLEM),
        answer("def f(x):\n    return 2 * x", record=PROBLEM),
        answer(fenced("def f(x):\n    return 2 if x == 1 else 0"), record=pair),  # none is hidden: all count
    ]
    with Judge(SandboxConfig(limits=Limits(cpu_seconds=2.0)), 1) as judge:
        scorer = Scorer({"code": 2.0, "code_format": 0.5}, replace(PLAIN, judge=judge))
        found = scorer(given)
        assert [one.parts["code"] for one in found] == [1.0, 0.5, 0.0, 0.0, 1.0]
        assert [one.total for one in found] == [2.5, 1.5, 0.5, 0.0, 2.5]
        assert [one.verdict for one in found] == ["passed", "wrong", "wrong", "no_code", "passed"]
        assert scorer([]) == []
        with pytest.raises(DataError, match="prompt p0 of kind 'story' has no tests, which `code` needs"):
            scorer([answer(fenced("x = 1"))])


def test_a_right_call_is_worth_one_and_a_prompt_without_truth_is_refused() -> None:
    call = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": '{"place": "deck"}'}}
    tool = {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
    right = {"role": "assistant", "content": "", "tool_calls": [call]}
    record = replace(rollouts.prompt(0).record, kind="tools", tools=[tool], truth={"right": right})
    scorer = Scorer({"tool_call": 1.0}, replace(PLAIN, call_score=call_reward))
    text = '<tool_call>\n{"name": "look", "arguments": {"place": "%s"}}\n</tool_call>'
    found = scorer(
        [answer(text % "deck", record=record), answer(text % "sea", record=record), answer("No.", record=record)]
    )
    assert found[0].total == 1.0
    assert found[1].total == pytest.approx(0.1)  # it parses and names the tool, but no argument is right
    assert found[2].total == 0.0
    with pytest.raises(DataError, match="prompt p0 of kind 'story' has no correct call"):
        scorer([answer("No.")])
