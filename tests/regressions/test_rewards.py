"""Bugs in rewards: an empty answer is worth nothing."""

from dataclasses import replace

import pytest

from pipeline.evaluation.tools import call_reward
from pipeline.ingest.records import Pair, Problem
from pipeline.rl.answers import Answer
from pipeline.rl.rewards import Resources, Scorer
from pipeline.sandbox.judge import Candidate, Judge, Limits, SandboxConfig
from tests import rollouts

TESTS = [{"args": "[1]", "expected": "None", "visible": False}]  # what a function that does nothing returns
PROBLEM = Problem(id="1", level=1, group="easy", key="1", question="?", entry_point="f", signature="f(x)", tests=TESTS)
NOTHING = ["", "\n", "```python\n```", "```python\n\n```", "```python\n# f\n```", "```python\npass\n```", "```"]


def answer(text: str, record: Pair | Problem) -> Answer:
    one = rollouts.answer(rollouts.prompt(0), 0, [2] if text else [])
    return replace(one, text=text, prompt=replace(one.prompt, record=record))


def test_an_answer_without_code_passes_no_test() -> None:
    """Bug museum: empty output earns 1 (volcengine/verl 7853). Nothing failed, so all had passed."""
    with Judge(SandboxConfig(limits=Limits(cpu_seconds=2.0)), 1) as judge:
        scorer = Scorer({"code": 1.0}, Resources(max_new_tokens=16, judge=judge))
        assert [one.total for one in scorer([answer(text, PROBLEM) for text in NOTHING])] == [0.0] * len(NOTHING)
        sources = [None, "", " \n", "# f\n"]
        verdicts = list(judge.judge(Candidate(source=source, entry_point="f", tests=TESTS) for source in sources))
        assert [verdict.score for verdict in verdicts] == [0.0] * 4
        (untested,) = judge.judge([Candidate(source="def f(x): pass", entry_point="f", tests=[])])
        assert (untested.verdict, untested.score) == ("unscorable", None)  # unknown, which is neither 0 nor 1


@pytest.mark.parametrize("called", [True, False])
def test_an_answer_that_says_nothing_is_no_right_call_and_no_right_refusal(called: bool) -> None:
    """Bug museum: empty output earns 1 (volcengine/verl 7853). Silence makes no call, yet it is no right refusal."""
    tool = {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
    call = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": '{"place": "deck"}'}}
    right = (
        {"role": "assistant", "content": "", "tool_calls": [call]}
        if called
        else {"role": "assistant", "content": "No."}
    )
    record = rollouts.prompt(0).record
    assert isinstance(record, Pair)
    record = replace(record, kind="tools", tools=[tool], truth={"right": right})
    scorer = Scorer({"tool_call": 1.0}, Resources(max_new_tokens=16, call_score=call_reward))
    assert [one.total for one in scorer([answer("", record), answer(" \n", record)])] == [0.0, 0.0]
    assert scorer([answer("No.", record)])[0].total == (0.0 if called else 1.0)
