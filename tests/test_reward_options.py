"""Keys of stage reward: noise in the labels, layers on top, own answers, calibration, and the weights of the loss."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.batches.batch import Piece
from pipeline.batches.pairs import Encoded, encode, flipped
from pipeline.evaluation import preferences
from pipeline.learning.settings import PairConfig
from pipeline.model.heads import GuessingModel, RewardModel
from pipeline.rl import answers
from pipeline.rl.answers import Answer, Prompt
from pipeline.sandbox.judge import SandboxConfig
from stages import reward
from tests import workspace as builder
from tests.handed import Handed, handed, without_judge
from tests.loop import job
from tests.workspace import Workspace


def trained(workspace: Workspace, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Handed:
    """What stage reward hands to `fit`; `seen` holds the sandboxes that it asked for.

    Its head gets random weights there in place of training.
    """

    def opinion(given: Handed) -> list[SandboxConfig]:
        model = given.model.model if isinstance(given.model, GuessingModel) else given.model
        with torch.no_grad():
            model.score.weight.normal_(generator=torch.Generator().manual_seed(5))
        return sandboxes

    found = handed(reward, monkeypatch, opinion)
    sandboxes = without_judge(monkeypatch, reward)
    values: dict[str, Any] = {
        "centering": 0.01,
        "label_flip": 0.0,
        "own_prompts": 0,
        "calibration_answers": 4,
        "answer_tokens": 24,
        "sandbox": SandboxConfig(),
        "fit": PairConfig(steps=1, pairs=4, max_prompt=60, max_length=120, learning_rate=1e-2),
    }
    reward.run(
        reward.Params(**(values | changes)),
        job(workspace.folder / "work/key"),
        base=Path("models/tools"),
        pairs=Path("data/preferences"),
        out=Path("models/out"),
    )
    return found


# label_flip


def unlike(number: int) -> Encoded:
    """A pair whose two answers are told apart by their ids."""
    chosen, rejected = (Piece(np.array([1, last]), True) for last in (2, 3))
    return Encoded(builder.pair(number), chosen, rejected)


def swapped(share: float, seed: int) -> set[str]:
    """Ids of those among 2,000 pairs whose answers were swapped."""
    given = [unlike(number) for number in range(2000)]
    names = set()
    for one in given:
        found = flipped(one, share, seed)
        same = found.chosen is one.chosen and found.rejected is one.rejected
        assert same or (found.chosen is one.rejected and found.rejected is one.chosen)
        names |= set() if same else {one.pair.id}
    return names


def test_the_share_of_the_labels_is_swapped_the_same_pairs_for_the_same_seed() -> None:
    for share in (0.1, 0.3):
        assert len(swapped(share, 1)) / 2000 == pytest.approx(share, abs=0.04)  # four standard deviations
    assert swapped(0.0, 1) == set()
    assert swapped(0.3, 1) == swapped(0.3, 1) != swapped(0.3, 2)
    assert swapped(0.1, 1) < swapped(0.3, 1)


def test_the_stage_swaps_training_pairs_and_none_that_it_is_measured_on(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[list[Encoded]] = []
    original = reward.preferences.measure_ranking

    def measure(model: Any, pairs: Any, pad: int) -> Any:
        measured.append(list(pairs))
        return original(model, pairs, pad)

    monkeypatch.setattr(reward.preferences, "measure_ranking", measure)
    whole, noisy = (trained(workspace, monkeypatch, label_flip=share).stream for share in (0.0, 0.3))

    def said(pairs: list[Encoded]) -> list[tuple[str, list[int], list[int]]]:
        return [(one.pair.id, one.chosen.ids.tolist(), one.rejected.ids.tolist()) for one in pairs]

    expected = [flipped(one, 0.3, 1) for one in whole.train.pairs]
    assert said(noisy.train.pairs) == said(expected)
    changed = sum(a != b for a, b in zip(said(whole.train.pairs), said(expected), strict=True))
    assert 0 < changed < len(expected)
    assert said(noisy.val.pairs) == said(whole.val.pairs)
    assert said(measured[0]) == said(measured[1])


# extra_layers


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_so_many_layers_are_put_on_top_of_the_base_model_s_two(
    extra: int, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trained(workspace, monkeypatch, extra_layers=extra)
    assert found.model.config.layers == len(found.model.trunk.model.layers) == 2 + extra


# own_prompts, calibration_answers, answer_tokens


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, workspace: Workspace) -> list[list[Prompt]]:
    """The prompts in train and test whose own answers are paired; each gives a made-up pair."""
    found: list[list[Prompt]] = []

    def pairs(generate: Any, prompts: list[Prompt], *_: Any) -> list[Encoded]:
        found.append(list(prompts))
        made = [encode(workspace.tokenizer, builder.pair(int(p.id), id=f"own-{p.id}"), 60, 120) for p in prompts]
        return [one for one in made if isinstance(one, Encoded)]

    monkeypatch.setattr(preferences, "own_pairs", pairs)
    return found


@pytest.mark.parametrize(("count", "of_test"), [(0, 0), (8, 2), (16, 4)])
def test_so_many_prompts_are_answered_by_the_base_model_and_their_pairs_join_the_others(
    count: int, of_test: int, asked: list[list[Prompt]], workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trained(workspace, monkeypatch, own_prompts=count)
    assert [len(prompts) for prompts in asked] == [count, of_test]
    ids = [one.pair.id for one in found.stream.train.pairs]
    assert ids == [str(n) for n in range(20)] + [f"own-{prompt.id}" for prompt in asked[0]]
    assert found.job.tracker.final["own_pairs"] == count
    assert ("own_answers" in found.job.tracker.final) == (count > 0)


@pytest.mark.parametrize("count", [3, 7])
def test_mean_and_spread_are_taken_over_so_many_answers(
    count: int, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calibrated = RewardModel.calibrate, []

    def calibrate(self: RewardModel, rewards: torch.Tensor) -> None:
        calibrated.append(rewards)
        original(self, rewards)

    monkeypatch.setattr(RewardModel, "calibrate", calibrate)
    model = trained(workspace, monkeypatch, calibration_answers=count).model
    assert [len(rewards) for rewards in calibrated] == [count]
    assert model.reward_std == pytest.approx(float(calibrated[0].std())) and model.reward_std > 1e-3


def test_answers_are_no_longer_than_they_may_be_and_prompts_without_room_are_passed_over(
    asked: list[list[Prompt]], workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, given = answers.sample, []

    def sample(*more: Any) -> list[Answer]:
        given.append(original(*more))
        return given[-1]

    monkeypatch.setattr(answers, "sample", sample)
    need = {str(n): len(workspace.tokenizer.encode("left " * (1 + n % 3))) + 1 for n in range(20)}
    few, many = sorted(set(need.values()))[-2:]
    for limit in (few, many):
        trained(workspace, monkeypatch, answer_tokens=limit, own_prompts=20, calibration_answers=20)
        room = {name for name, tokens in need.items() if tokens <= limit}
        assert {prompt.id for prompt in asked[-2]} == room == {one.prompt.id for one in given[-1]}
        assert max(len(one.ids) for one in given[-1]) == limit
    assert len(asked[0]) < len(asked[2]) == 20


# centering, likelihood_weight, sandbox


@pytest.mark.parametrize("centering", [0.0, 0.5])
@pytest.mark.parametrize("likelihood", [0.0, 0.25])
def test_the_loss_has_the_weights_of_the_block_and_guesses_only_where_they_weigh(
    centering: float, likelihood: float, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trained(workspace, monkeypatch, centering=centering, likelihood_weight=likelihood)
    assert type(found.model) is (GuessingModel if likelihood else RewardModel)
    first = found.stream.batch(0, 240, found.stream.rows(0, 240))
    terms = {term.name: term.coefficient for term in found.loss(found.model.train(), first).terms}
    assert terms == {
        "ranking": 1.0,
        **({"centering": centering} if centering else {}),
        **({"likelihood": likelihood} if likelihood else {}),
    }


def test_the_sandbox_of_own_answers_is_that_of_its_block(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SandboxConfig(preload=("json",))
    assert trained(workspace, monkeypatch, sandbox=config).seen == [config]
