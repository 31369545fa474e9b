"""Rollouts as batches: what an update gets from an iteration, how padding counts, and two processes against one."""

import copy
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.learning.policy_losses import METHODS
from pipeline.model.transformer import Transformer
from pipeline.rl.answers import Answer
from pipeline.rl.rollout import RolloutStream, group_loss, rehearsed_too
from tests import rollouts
from tests.rollouts import PAD, Given, Request, config, drawn, estimated, filled, method, names, scored_by, stream


@pytest.mark.parametrize("minibatches", [1, 2, 5, 12])
def test_an_epoch_goes_once_through_all_answers(minibatches: int) -> None:
    one = filled(config(minibatches=minibatches))
    orders = []
    for epoch in range(2):
        parts = [one.rows(epoch * minibatches + part, 9).tolist() for part in range(minibatches)]
        assert max(map(len, parts)) == one.config.rows
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        orders.append([row for part in parts for row in part])
        assert sorted(orders[-1]) == list(range(12))
    assert orders[0] != orders[1]
    assert filled(config(minibatches=minibatches)).rows(0, 9).tolist() == one.rows(0, 9).tolist()


def test_answers_to_one_prompt_stay_together_where_the_minibatches_allow_it() -> None:
    for minibatches, parted in ((1, 0), (2, 0), (4, 0), (3, 2), (12, 4)):  # 4 prompts with 3 answers each
        one = filled(config(minibatches=minibatches))
        of = [[one.rollouts[row].answer.prompt.id for row in one.rows(part, 9)] for part in range(minibatches)]
        assert sum(sum(name in part for part in of) > 1 for name in {n for part in of for n in part}) == parted
        for part in of:
            assert part == sorted(part, key=part.index), f"a prompt's answers are apart: {part}"


def test_another_iteration_has_another_order() -> None:
    one = filled(config(minibatches=1))
    first = one.rows(0, 9).tolist()
    one.fill(2)
    assert one.rows(2, 9).tolist() != first


def test_a_batch_holds_prompt_and_answer_with_the_answer_as_target() -> None:
    one = filled()
    one.rollouts = [rollouts.rollout(1, 0, 3, 2.0), rollouts.rollout(2, 0, 1, 3.0, logprob=-0.75)]
    estimated(one.rollouts)
    batch = one.batch(0, 9, np.array([0, 1]))
    assert batch.input_ids.tolist() == [[1, 101, 1, 2, 3], [2, 102, 1, PAD, PAD]]
    assert batch.targets.tolist() == [[-100, 1, 2, 3, -100], [-100, 1, -100, -100, -100]]
    assert batch.documents.tolist() == [[0] * 5, [0, 0, 0, -1, -1]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 0, 0]]
    assert batch.row_of.tolist() == [0, 0, 0, 1]
    assert batch.old.tolist() == [-0.5, -0.5, -0.5, -0.75]
    assert batch.arrays["advantages"].tolist() == [2.0, 2.0, 2.0, 3.0]
    assert batch.counts == {"tokens": 4, "sequences": 2, "positions": 8}
    assert batch.old.dtype == batch.arrays["advantages"].dtype == torch.float32
    moved = batch.to("cpu")
    assert moved.counts == batch.counts and torch.equal(moved.row_of, batch.row_of) and moved.fresh == batch.fresh


def test_only_the_first_update_after_a_fill_is_fresh() -> None:
    one = filled()
    assert [one.batch(step, 9, one.rows(step, 9)).fresh for step in range(5)] == [True, False, False, False, True]


def test_padding_rows_count_nothing() -> None:
    one = filled()
    alone, padded = one.batch(1, 9, np.array([4])), one.batch(1, 9, np.array([-1, 4, -1]))
    assert len(padded.input_ids) == 3
    assert (padded.targets >= 0).sum(1).tolist() == [len(one.rollouts[4].answer.ids), 0, 0]
    for name in ("tokens", "sequences"):
        assert padded.counts[name] == alone.counts[name]
    for name in ("row_of", "old"):
        assert torch.equal(getattr(padded, name), getattr(alone, name))
    only = one.batch(1, 9, np.array([-1]))
    assert (only.counts["tokens"], only.counts["sequences"], len(only.old)) == (0, 0, 0)
    assert {name: len(values) for name, values in only.arrays.items()} == {"advantages": 0, "reference": 0}
    assert list(one.evaluation(100)) == []


# rehearsal


@pytest.mark.parametrize(("count", "world"), [(1, 1), (3, 1), (3, 2), (7, 2), (20, 2)])
def test_each_update_has_its_rows_of_the_rehearsal_spread_over_micro_batches(count: int, world: int) -> None:
    one, plain = filled(rehearsal=Given(count)), filled()
    one._ranks = type("Ranks", (), {"world": world, "rank": 0, "sharding": None})()  # type: ignore[assignment]
    for step in range(4):
        rows = one.rows(step, 32)
        assert len(rows) % world == 0
        answered = [row for row in rows.tolist() if row >= 0]
        assert answered == plain.rows(step, 32).tolist()  # in the same order: answers to a prompt stay together
        assert [-2 - row for row in rows.tolist() if row < -1] == Given(count).rows(step, 32).tolist()
        parts = [one.batch(step, 32, rows[first : first + 3]) for first in range(0, len(rows), 3)]
        trained = [0 if part.rehearsed is None else part.rehearsed.num_targets for part in parts]
        assert [part.counts["rehearsed"] for part in parts] == trained
        assert sum(trained) == sum(row % 7 + 2 for row in Given(count).rows(step, 32).tolist())
        assert (
            sum(part.counts["tokens"] for part in parts) == plain.batch(step, 32, np.array(answered)).counts["tokens"]
        )
        if count == 3:  # six answers and three rows of the rehearsal
            assert all(part.rehearsed is not None for part in parts[:3])


def test_a_micro_batch_may_have_nothing_but_rehearsal_and_an_empty_iteration_has_none() -> None:
    one = filled(rehearsal=Given(2))
    alone = one.batch(0, 32, np.array([-2, -3]))
    assert (alone.counts["tokens"], alone.counts["sequences"], alone.counts["rehearsed"]) == (0, 0, 5)
    assert len(alone.input_ids) == 1  # one row of padding, so that there is a pass
    assert one.batch(0, 32, np.array([0, -1])).rehearsed is None
    assert "rehearsed" not in filled().batch(0, 32, np.array([0])).counts
    one.rollouts = []
    assert one.rows(0, 32).tolist() == []
    assert one.fingerprint != filled().fingerprint


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_the_rehearsal_adds_the_gradient_of_its_loss_per_token(coefficient: float, tiny_model: Transformer) -> None:
    """In float64 and in three micro-batches: the gradient of the policy's loss alone, plus c times that of the mean
    cross-entropy over the rehearsal (InstructGPT, equation 2).
    """
    model = copy.deepcopy(tiny_model).double()
    how, settings, given = replace(METHODS["grpo"], beta=0.0), config(minibatches=1), Given(4)
    loss = partial(group_loss, method=how, config=settings)
    plain, one = filled(settings), filled(settings, rehearsal=given)

    def gradients(objective: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(objective, list(model.parameters())))

    whole = plain.batch(0, 32, plain.rows(0, 32))
    of_answers = loss(model, whole)
    alone = gradients(sum((t.coefficient * t.sum / whole.counts[t.per] for t in of_answers.terms), torch.zeros(())))
    batch = given.batch(0, 32, given.rows(0, 32))
    logits = model(batch.input_ids, positions=batch.positions, documents=batch.documents)
    rehearsed = gradients(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()))
    rows = one.rows(0, 32)
    parts = [one.batch(0, 32, rows[first : first + 6]) for first in range(0, len(rows), 6)]
    counts = {name: sum(part.counts[name] for part in parts) for name in parts[0].counts}
    both = [torch.zeros_like(p) for p in model.parameters()]
    for part in parts:
        told = rehearsed_too(loss, model, coefficient)(model, part)
        assert told.terms[-1].name == "rehearsal"
        objective = sum((t.coefficient * t.sum / counts[t.per] for t in told.terms), torch.zeros(()))
        both = [total + new for total, new in zip(both, gradients(objective), strict=True)]
    assert max(float(g.abs().max()) for g in rehearsed) > 1e-3
    for found, first, second in zip(both, alone, rehearsed, strict=True):
        torch.testing.assert_close(found, first + coefficient * second, rtol=1e-6, atol=1e-9)


# two processes


class Group:
    """Two processes as threads: each gets what the other gathers."""

    def __init__(self) -> None:
        self.box: list[Any] = [None, None]
        self.barrier = threading.Barrier(2, timeout=20)

    def member(self, rank: int) -> Any:
        group = self

        class Member:
            world = 2

            def gather(self, value: Any) -> list[Any]:
                group.box[rank] = value
                group.barrier.wait()
                found = list(group.box)
                group.barrier.wait()
                return found

        member = Member()
        member.rank = rank  # type: ignore[attr-defined]
        return member


@pytest.mark.parametrize("dynamic", [False, True])
def test_two_processes_share_the_sampling_and_know_the_same(dynamic: bool) -> None:
    shares: list[list[Request]] = [[], []]

    def of(rank: int, ranks: Any) -> RolloutStream:
        def sample(asked: Sequence[Request]) -> list[Answer]:
            shares[rank] += asked
            return drawn(asked)

        score = scored_by(lambda n: float(n % 3 if n // 3 % 2 else 1))
        return stream(config(prompts=5), method(sample=sample, score=score, dynamic=dynamic), ranks=ranks)

    alone = of(0, None)
    numbers = alone.fill(0)
    asked, shares[0] = [(p.id, n) for p, n in shares[0]], []
    group = Group()
    both = [of(rank, group.member(rank)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda one: one.fill(0), both)) == [numbers, numbers]
    found = [[(p.id, n) for p, n in share] for share in shares]
    assert sorted(found[0] + found[1]) == sorted(asked)
    assert min(map(len, found)) >= 6
    for one in both:
        assert names(one.rollouts) == names(alone.rollouts)
        for mine, theirs in zip(one.rollouts, alone.rollouts, strict=True):
            assert mine.answer == theirs.answer
            assert all(np.array_equal(mine.arrays[name], theirs.arrays[name]) for name in theirs.arrays)
    for step in range(4):
        rows, padded = alone.rows(step, 9), both[0].rows(step, 9)
        assert len(padded) == len(rows) + len(rows) % 2  # each process gets the same number
        assert [row for row in padded if row >= 0] == rows.tolist()
        assert both[1].rows(step, 9).tolist() == padded.tolist()


def test_a_rank_of_a_sharded_model_without_rehearsed_rows_makes_their_pass_nevertheless() -> None:
    """The pass trains nothing, but each pass gathers the weights from all ranks."""
    one = filled(rehearsal=Given(1))
    rows = one.rows(0, 32)
    own = rows[rows >= 0]
    assert one.batch(0, 32, own).rehearsed is None
    one._ranks = type("Ranks", (), {"world": 2, "rank": 1, "sharding": True})()  # type: ignore[assignment]
    batch = one.batch(0, 32, own)
    assert batch.rehearsed is not None and batch.rehearsed.input_ids.numel() > 0
    assert batch.counts["rehearsed"] == batch.rehearsed.num_targets == 0
    assert one.batch(0, 32, rows).counts["rehearsed"] > 0
