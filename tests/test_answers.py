"""Prompts, sampled answers, and what models compute from them, compared with one answer at a time."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.batches.pairs import PairSplit
from pipeline.ingest import records
from pipeline.ingest.records import Pair, Problem
from pipeline.model.heads import RewardModel
from pipeline.model.transformer import Transformer
from pipeline.rl import answers
from pipeline.run.errors import DataError
from pipeline.text.tokenizer import Tokenizer
from tests import rollouts
from tests.rollouts import LONGEST, prompts, sampled


@pytest.fixture
def ending(tiny_model: Transformer, byte_tokenizer: Tokenizer) -> Transformer:
    """A model that ends some of its answers: the turn end's embedding is the direction that its states have in
    common.
    """
    with torch.no_grad():
        mean = tiny_model.hidden(torch.arange(20, 220)[None]).mean((0, 1))
        tiny_model.model.embed_tokens.weight[byte_tokenizer.turn_end] = 4.0 * mean / mean.norm()
    return tiny_model


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("pad", [0, 7])
def test_sampled_log_probabilities_are_those_of_teacher_forcing(
    ending: Transformer, byte_tokenizer: Tokenizer, temperature: float, pad: int
) -> None:
    """At the same temperature on both sides, whatever the padding."""
    found = sampled(ending, byte_tokenizer, temperature)
    assert {one.finished for one in found} == {True, False}
    forced = answers.logprobs_of(ending, found, pad, temperature)
    for one, logprobs in zip(found, forced, strict=True):
        assert len(one.ids) == len(one.logprobs) == len(logprobs)
        np.testing.assert_allclose(logprobs, one.logprobs, atol=1e-4)
    other = answers.logprobs_of(ending, found, pad, 1.7 - temperature)
    assert max(np.abs(a - b).max() for a, b in zip(forced, other, strict=True)) > 0.1


def test_an_answer_that_ended_has_its_end_as_its_last_token(ending: Transformer, byte_tokenizer: Tokenizer) -> None:
    for one in sampled(ending, byte_tokenizer):
        assert (one.ids[-1] == byte_tokenizer.turn_end) == one.finished
        assert byte_tokenizer.turn_end not in one.ids[:-1]
        assert len(one.ids) == LONGEST or one.finished
        assert one.text == byte_tokenizer.decode(one.ids[: len(one.ids) - one.finished])


def test_an_answer_depends_on_seed_prompt_and_sample_alone(ending: Transformer, byte_tokenizer: Tokenizer) -> None:
    asked = answers.repeated(prompts(), 12)
    assert [(p.id, n) for p, n in asked] == [(f"p{k}", n) for n in range(4) for k in range(3)]
    whole = {(one.prompt.id, one.sample): one.ids for one in sampled(ending, byte_tokenizer, count=12)}
    for one in sampled(ending, byte_tokenizer, asked=asked[7:2:-1]):
        assert one.ids == whole[one.prompt.id, one.sample]
    others = sampled(ending, byte_tokenizer, count=12, seed=4)
    assert [one.ids for one in others] != list(whole.values())
    assert answers.sample(lambda *_: [][0], [], byte_tokenizer, 3) == []


def test_values_stand_before_each_token_and_rewards_after_the_last(
    ending: Transformer, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with one row at a time, without padding; batches have 7 rows, so that there are several."""
    monkeypatch.setattr(answers, "ROWS", 7)
    found = sampled(ending, byte_tokenizer)
    critic = RewardModel(ending)
    with torch.no_grad():
        critic.score.weight.normal_(generator=torch.Generator().manual_seed(1))
    critic.reward_mean, critic.reward_std = 0.5, 2.0
    values, rewards = answers.values_of(critic, found, 0), answers.raw_rewards(critic, found, 0)
    assert rewards.shape == (30,) and len(values) == 30
    for one, value, reward in zip(found, values, rewards, strict=True):
        with torch.no_grad():
            alone = critic(torch.tensor([one.prompt.ids + one.ids]))[0]
        first = len(one.prompt.ids) - 1  # the state in which the first token is chosen
        np.testing.assert_allclose(value, (alone[first:-1].numpy() - 0.5) / 2.0, atol=1e-4)
        assert reward.item() == pytest.approx(alone[-1].item(), abs=1e-4)


def test_no_answers_have_no_numbers(ending: Transformer) -> None:
    """A process's share may be empty."""
    assert answers.logprobs_of(ending, [], 0, 1.0) == []
    critic = RewardModel(ending)
    assert answers.values_of(critic, [], 0) == []
    assert answers.raw_rewards(critic, [], 0).shape == (0,)


def test_a_row_is_prompt_and_answer_with_the_answer_as_target() -> None:
    rows = answers.rows_of([rollouts.answer(rollouts.prompt(3), 0, [8, 9])], pad=0)
    assert rows.input_ids.tolist() == [[3, 103, 8, 9]]
    assert rows.targets.tolist() == [[-100, 8, 9, -100]]


# prompts from data


def said(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


def pair(number: str, question: str, chosen: list[dict[str, Any]], kind: str = "story") -> Pair:
    return Pair(
        id=number,
        source="made",
        kind=kind,
        prompt=[said("user", question)],
        chosen=chosen,
        rejected=[said("assistant", "no")],
    )


def split(folder: Path, tokenizer: Tokenizer, *pairs: Pair) -> PairSplit:
    records.write(folder / "train.jsonl", pairs)
    return PairSplit(folder / "train.jsonl", tokenizer, 400, 800)


def test_a_prompt_is_what_comes_before_the_answer_and_each_is_asked_once(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    given = split(
        tmp_path,
        byte_tokenizer,
        pair("a", "one?", [said("assistant", "x")]),
        pair("b", "one?", [said("assistant", "y")]),
        pair("c", "two?", [said("assistant", "x" * 90)]),
        pair("d", "three?", [said("assistant", "z")], kind="code"),
    )
    found = answers.pair_prompts(given, 40)
    assert [(one.id, one.kind) for one in found] == [("a", "story"), ("d", "code")]
    text = byte_tokenizer.decode(found[0].ids)
    assert text.endswith("assistant\n") and "one?" in text
    assert [one.id for one in answers.pair_prompts(given, 200, ["story"])] == ["a", "c"]
    with pytest.raises(
        DataError,
        match=r"no preference pair .* at most 200 tokens and a prompt of the kinds tools; raise max_new_tokens",
    ):
        answers.pair_prompts(given, 200, ["tools"])


def test_an_answer_with_a_tool_s_result_inside_is_no_part_of_the_prompt(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    """The tool's result is not trained, but it comes after the prompt."""
    call = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    chosen = [
        said("assistant", "", tool_calls=[call]),
        said("tool", "ten", tool_call_id="call_0", name="look"),
        said("assistant", "It is ten."),
    ]
    given = split(tmp_path, byte_tokenizer, pair("a", "when?", chosen))
    (found,) = answers.pair_prompts(given, 300)
    text = byte_tokenizer.decode(found.ids)
    assert text.endswith("assistant\n") and "ten" not in text and "look" not in text
    length = len(given.pairs[0].chosen.ids) - len(found.ids)  # there must be room for the whole answer, result included
    assert len(answers.pair_prompts(given, length)) == 1
    with pytest.raises(DataError, match="raise max_new_tokens"):
        answers.pair_prompts(given, length - 1)


def problem(number: int, question: str = "f?", tests: int = 1) -> Problem:
    asked = [{"args": "[1]", "expected": "1", "visible": False}] * tests
    return Problem(
        id=str(number),
        level=1,
        group="easy",
        key=str(number),
        question=question,
        entry_point="f",
        signature="f(x)",
        tests=asked,
    )


def test_a_problem_is_asked_as_one_user_turn(byte_tokenizer: Tokenizer) -> None:
    (found,) = answers.problem_prompts([problem(1, "Write f.")], byte_tokenizer, 100)
    text = byte_tokenizer.decode(found.ids)
    assert "Write f." in text and text.endswith("assistant\n")
    assert (found.id, found.kind, found.record) == ("1", "code", problem(1, "Write f."))


def test_a_tenth_of_the_problems_may_be_too_long_and_none_may_lack_tests(byte_tokenizer: Tokenizer) -> None:
    long, short = problem(99, "x" * 200), [problem(n) for n in range(9)]
    assert len(answers.problem_prompts([*short, long], byte_tokenizer, 100)) == 9
    with pytest.raises(DataError, match="1 of 9 problems have prompts of more than max_prompt = 100 tokens"):
        answers.problem_prompts([*short[1:], long], byte_tokenizer, 100)
    with pytest.raises(DataError, match="problem 7 has no tests"):
        answers.problem_prompts([problem(7, tests=0)], byte_tokenizer, 100)
