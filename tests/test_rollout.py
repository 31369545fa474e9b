"""The stream that the policy fills: prompts asked, answers kept, how they become batches, and what ends a run."""

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

from pipeline.learning.processes import Ranks
from pipeline.rl import answers, rollout
from pipeline.rl.answers import Answer
from pipeline.rl.rewards import Score
from pipeline.rl.rollout import Method, Rollout, RolloutStream, numbers_of, spread
from pipeline.run.errors import GateError
from pipeline.text.tokenizer import Tokenizer
from tests import rollouts
from tests.goldens import cases
from tests.rollouts import PAD, Request, config, drawn, estimated, filled, method, names, scored_by, stream

# configuration


def test_rows_and_steps_of_a_run() -> None:
    small = config()
    assert (small.rows, small.row_length, small.steps_per_rollout, small.resolve_steps(10 * 9)) == (6, 9, 4, 24)
    assert config(minibatches=5).rows == 3  # 12 answers in 5 parts: 3, 3, 2, 2, 2
    passes = config(iterations=None, passes=2.0)
    assert passes.resolve_steps(10 * 9) == 5 * 4  # twice over 10 prompts, 4 per iteration
    assert config(iterations=None, passes=0.01).resolve_steps(10 * 9) == 4  # at least one


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"iterations": None}, "exactly one of `iterations` and `passes`"),
        ({"passes": 1.0}, "exactly one of `iterations` and `passes`"),
        ({"prompts": 0}, "expected values > 0"),
        ({"samples": 0}, "expected values > 0"),
        ({"iterations": 0}, "expected values > 0"),
        ({"iterations": None, "passes": 0.0}, "expected values > 0"),
        ({"temperature": 0.0}, "expected values > 0"),
        ({"max_new_tokens": 0}, "expected values > 0"),
        ({"minibatches": 13}, "at most prompts . samples, got 13"),
        ({"learning_rate": -1.0}, "learning_rate: expected at least 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


# which prompts are asked


@pytest.mark.parametrize("prompts", [3, 4, 10])
def test_no_seed_is_drawn_twice_in_a_run(prompts: int, byte_tokenizer: Tokenizer) -> None:
    """Over iterations and extra rounds, also where a prompt comes twice in one iteration (3 prompts, 4 per fill)."""
    seeds: list[int] = []

    def generate(given: list[list[int]], drawn_seeds: list[int]) -> list[Any]:
        seeds.extend(drawn_seeds)
        return [type("Sampled", (), {"ids": [65], "logprobs": [-1.0, -1.0], "stop": "stop"})() for _ in given]

    def sample(asked: Sequence[Request]) -> list[Answer]:
        return answers.sample(generate, asked, byte_tokenizer, seed=5)

    one = stream(how=method(sample=sample, dynamic=True), prompts=prompts)  # all score alike, so every round is drawn
    for iteration in range(9):
        one.fill(iteration * one.steps_per_rollout)
    assert len(seeds) == 9 * (1 + rollout.EXTRA_ROUNDS) * 12
    assert len(set(seeds)) == len(seeds)


def test_an_extra_round_asks_of_the_prompts_to_come_with_samples_of_its_own() -> None:
    asked: list[list[Request]] = []

    def sample(requests: Sequence[Request]) -> list[Answer]:
        asked.append(list(requests))
        return drawn(requests)

    equal = method(sample=sample, score=lambda given: [Score(1.0, {}) for _ in given], dynamic=True)
    one = stream(how=equal)
    one.fill(0)
    one.fill(one.steps_per_rollout)
    assert len(asked) == 8
    rounds = [[p.id for p, _ in requests] for requests in asked]
    assert rounds[1] == rounds[4] and rounds[2] == rounds[5]  # round 1 of iteration 0 has the prompts of iteration 1


def test_each_pass_goes_once_through_all_prompts_in_an_order_of_its_own() -> None:
    one = stream(config(samples=1, prompts=5))
    asked: list[tuple[str, int]] = []
    for iteration in range(4):
        one.fill(iteration * one.steps_per_rollout)
        asked += names(one.rollouts)
    first, second = [name for name, _ in asked[:10]], [name for name, _ in asked[10:]]
    assert sorted(first) == sorted(second) == [f"p{n}" for n in range(10)]
    assert first != second
    assert {sample for _, sample in asked[:10]} == {0} and {sample for _, sample in asked[10:]} == {1}
    assert names(filled(seed=1).rollouts) == names(filled(seed=1).rollouts)
    assert names(filled(seed=1).rollouts) != names(filled(seed=2).rollouts)


def test_samples_of_a_prompt_are_neighbors_and_all_are_annotated_and_estimated() -> None:
    one = stream()
    numbers = one.fill(0)
    found = one.rollouts
    assert len(found) == 12
    for first in range(0, 12, 3):
        assert len({r.answer.prompt.id for r in found[first : first + 3]}) == 1
        samples = [r.answer.sample for r in found[first : first + 3]]
        assert samples == list(range(samples[0], samples[0] + 3))
    assert all(set(r.arrays) == {"reference", "advantages"} for r in found)
    assert numbers["estimated"] == 12


# dynamic sampling


def test_groups_whose_scores_are_all_equal_are_drawn_again() -> None:
    """In iteration 0 (groups 0-3), only 1 and 3 have unequal scores; an extra round draws the missing two, 4 and 5."""
    differing = {1, 3, 4, 5, 6}
    how = method(score=scored_by(lambda n: float(n % 3 if n // 3 in differing else 1)), dynamic=True)
    one = stream(how=how)
    numbers = one.fill(0)
    assert [r.answer.sample // 3 for r in one.rollouts[::3]] == [1, 3, 4, 5]
    assert numbers["estimated"] == 12
    assert numbers["frac_reward_zero_std"] == 2 / 6  # of all groups drawn
    plain = stream(how=method(score=how.score))
    plain.fill(0)
    assert [r.answer.sample // 3 for r in plain.rollouts[::3]] == [0, 1, 2, 3]


def test_three_extra_rounds_are_the_most_and_what_was_found_is_trained_on() -> None:
    how = method(score=scored_by(lambda n: float(n % 3 if n // 3 in {2, 14} else 1)), dynamic=True)
    one = stream(how=how)
    assert one.fill(0)["estimated"] == 6
    assert [r.answer.sample // 3 for r in one.rollouts[::3]] == [2, 14]  # of 0-3, then of three each: 4-6, 8-10, 12-14
    assert [len(one.rows(step, 9)) for step in range(4)] == [3, 3, 3, 3]


def test_a_group_with_one_known_score_teaches_nothing() -> None:
    scores: dict[int, float | None] = {0: None, 1: 1.0, 2: None, 3: 0.0, 4: None, 5: 2.0}
    found = [rollouts.rollout(n // 3, n % 3, 2, scores[n]) for n in range(6)]
    assert math.isnan(spread(found[:3]))
    assert spread(found[3:]) == pytest.approx(math.sqrt(2))
    assert rollout.informative(found, 3) == found[3:]


def test_ten_iterations_in_a_row_without_a_difference_stop() -> None:
    good: set[int] = set()  # iterations with a group that differs
    how = method(score=scored_by(lambda n: float(n % 3 if n // 48 in good else 1)), dynamic=True)
    one = stream(how=how)
    for iteration in range(9):
        assert "estimated" not in one.fill(4 * iteration)
        assert len(one.rows(4 * iteration, 9)) == 0
    good.add(9)
    assert one.fill(36)["estimated"] == 12  # so the count starts over
    for iteration in range(10, 19):
        one.fill(4 * iteration)
    with pytest.raises(GateError, match="iteration 19: 10 iterations in a row had no group with different scores"):
        one.fill(4 * 19)


# scores that are not known


@pytest.mark.parametrize(("lost", "stops"), [(0, False), (1, False), (2, False), (3, True)])
def test_more_than_a_twentieth_without_a_score_stops(lost: int, stops: bool) -> None:
    """Of 40 answers, 2 are exactly 5%."""
    one = stream(config(prompts=10, samples=4), method(score=scored_by(lambda n: None if n < lost else float(n))))
    if stops:
        with pytest.raises(GateError, match=r"iteration 0: 3 of 40 answers could not be scored \(at most 5%\)"):
            one.fill(0)
    else:
        assert one.fill(0)["unscorable"] == lost / 40


def test_a_single_lost_score_of_few_does_not_stop() -> None:
    one = stream(config(prompts=2), method(score=scored_by(lambda n: None if n == 4 else float(n))))
    assert one.fill(0)["unscorable"] == pytest.approx(1 / 6)


# states


def test_a_resumed_stream_goes_on_where_the_state_was_saved() -> None:
    def carrying(carried: dict[str, Any]) -> Method:
        def estimate(found: list[Rollout]) -> dict[str, float]:
            carried["beta"] *= 1.5
            return estimated(found) | {"beta": carried["beta"]}

        return method(estimate=estimate)

    def begin() -> RolloutStream:
        state = {"beta": 0.1}
        return stream(how=carrying(state), state=state)

    whole = begin()
    rows = [whole.fill(4 * iteration) for iteration in range(4)]
    part = begin()
    part.fill(0)
    part.fill(4)
    resumed = begin()
    resumed.load_state(json.loads(json.dumps(part.state())))
    assert [resumed.fill(8), resumed.fill(12)] == rows[2:]
    assert resumed.state() == whole.state()
    assert names(resumed.rollouts) == names(whole.rollouts)
    assert resumed.rows(13, 9).tolist() == whole.rows(13, 9).tolist()


def test_empty_iterations_are_counted_across_a_resume() -> None:
    how = method(score=lambda given: [Score(1.0, {}) for _ in given], dynamic=True)
    first, second = stream(how=how), stream(how=how)
    for iteration in range(6):
        first.fill(4 * iteration)
    second.load_state(json.loads(json.dumps(first.state())))
    for iteration in range(6, 9):
        second.fill(4 * iteration)
    with pytest.raises(GateError, match="10 iterations in a row"):
        second.fill(36)


def test_the_fingerprint_tells_prompts_and_seeds_apart() -> None:
    prints = [stream().fingerprint, stream(prompts=9).fingerprint, stream(seed=2).fingerprint]
    assert len(set(prints)) == 3
    assert stream().fingerprint == prints[0]
    changed = [rollouts.prompt(n, length=3) for n in range(10)]
    assert (
        RolloutStream(changed, config(), method(), pad=PAD, seed=1, ranks=Ranks("fp32", "")).fingerprint not in prints
    )
    assert stream().tokens_per_epoch == 10 * 9


# what is logged


def test_numbers_by_hand() -> None:
    found = [
        Rollout(rollouts.answer(rollouts.prompt(0), 0, [1, 2, 3]), Score(1.0, {"a": 1.0, "b": 0.5}, "passed")),
        Rollout(rollouts.answer(rollouts.prompt(0), 1, [1], finished=False), Score(2.0, {"a": 2.0, "b": 0.5}, "wrong")),
        Rollout(rollouts.answer(rollouts.prompt(1), 2, [1] * 8), Score(None, {"a": None, "b": 0.5}, "lost")),
        Rollout(rollouts.answer(rollouts.prompt(1), 3, [1] * 4), Score(6.0, {"a": 6.0, "b": 0.5}, "passed")),
        Rollout(rollouts.answer(rollouts.prompt(2), 4, [1] * 2), Score(3.0, {"a": 3.0, "b": 0.5})),
        Rollout(rollouts.answer(rollouts.prompt(2), 5, [1] * 6), Score(3.0, {"a": 3.0, "b": 0.5})),
    ]
    assert numbers_of(found, 2) == pytest.approx(
        {
            "reward": 3.0,
            "reward_std": math.sqrt((4 + 1 + 9 + 0 + 0) / 4),
            "completions/mean_length": 4.0,
            "completions/min_length": 1.0,
            "completions/max_length": 8.0,
            "completions/clipped_ratio": 1 / 6,
            "unscorable": 1 / 6,
            "frac_reward_zero_std": 1 / 3,
            "rewards/a/mean": 3.0,
            "rewards/a/std": math.sqrt(14 / 4),
            "rewards/b/mean": 0.5,
            "rewards/b/std": 0.0,
            "verdicts/passed": 2.0,
            "verdicts/wrong": 1.0,
            "verdicts/lost": 1.0,
        }
    )
    assert "frac_reward_zero_std" not in numbers_of(found, 1)


@pytest.mark.parametrize(
    ("method", "name"), [("grpo", "advantages_group"), ("grpo", "advantages_weighted"), ("rloo", "advantages_no_kl")]
)
def test_rewards_of_an_iteration_are_summed_up_as_trl_does(method: str, name: str) -> None:
    case = cases(method)[name]
    inputs = case["inputs"]
    rewards = inputs.get("rewards") or [sum(w * p for w, p in zip(inputs["weights"], row)) for row in inputs["parts"]]
    found = [rollouts.rollout(n // 4, n, 2, reward) for n, reward in enumerate(rewards)]
    numbers = numbers_of(found, inputs["samples"])
    for metric in ("reward", "reward_std", "frac_reward_zero_std"):
        assert numbers[metric] == pytest.approx(case["expected"][metric], rel=1e-6), metric


def test_numbers_of_answers_without_any_score_are_not_zero() -> None:
    numbers = numbers_of([rollouts.rollout(0, n, 2, None) for n in range(2)], 2)
    assert math.isnan(numbers["reward"]) and math.isnan(numbers["rewards/part/mean"])
    assert numbers["unscorable"] == 1.0
