"""Mixtures of streams: weights, the members' own order, evaluation, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.batches.corpus import CorpusStream, MixtureStream, round_robin
from tests.corpora import CONTEXT, STEP, documents, equal, stream, write_corpus
from tests.corpora import token_folder as token_folder

some = settings(max_examples=40, deadline=None)  # a shared machine stalls


@some
@given(st.lists(st.integers(1, 30), min_size=1, max_size=10))
def test_a_mixture_is_within_one_row_of_its_weights_at_every_place(weights: list[int]) -> None:
    period = round_robin(weights)
    slots = np.arange(1, len(period) + 1)
    for member, weight in enumerate(weights):
        assert (period == member).sum() == weight
        assert np.abs(np.cumsum(period == member) - slots * weight / sum(weights)).max() < 1


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[MixtureStream, CorpusStream, CorpusStream]:
    second = write_corpus(tmp_path_factory.mktemp("second"), documents(60, first=300), documents(5, first=2000))
    one, two = stream(corpus, fim_rate=0.5), stream(second)
    return MixtureStream([(3, one), (2, two)]), one, two


@pytest.mark.parametrize("context", [64, 32])
def test_a_mixture_gives_its_members_rows_in_their_own_order(
    mixture: tuple[MixtureStream, CorpusStream, CorpusStream], context: int
) -> None:
    mixed, one, two = mixture
    windows = CONTEXT // context
    ids = np.concatenate([mixed.rows(step, context) for step in range(25)])  # 100 packed rows
    for member, (own, share) in enumerate(((one, 60), (two, 40))):
        expected = own.at(np.arange(share), context)
        assert np.array_equal(ids[ids % 2 == member] // 2, expected) and len(expected) == share * windows
    for step in (0, 7):
        rows = mixed.rows(step, context)
        batch = mixed.batch(step, context, rows)
        assert batch.input_ids.shape == (STEP // context, context)
        assert batch.num_bytes == sum(mixed.batch(0, context, rows[n : n + 1]).num_bytes for n in range(len(rows)))
        for place, row in enumerate(rows):
            single = (one, two)[row % 2].batch(0, context, np.array([row // 2]))
            assert torch.equal(single.targets[0], batch.targets[place])


def test_a_mixture_evaluates_each_member_by_its_weight(
    mixture: tuple[MixtureStream, CorpusStream, CorpusStream],
) -> None:
    mixed, one, two = mixture
    assert all(map(equal, mixed.evaluation(500), [*one.evaluation(300), *two.evaluation(200)]))
    assert mixed.rows_per_epoch == one.rows_per_epoch + two.rows_per_epoch
    assert mixed.fingerprint != MixtureStream([(2, one), (2, two)]).fingerprint


def test_a_mixture_of_mixtures_gives_the_innermost_rows(
    mixture: tuple[MixtureStream, CorpusStream, CorpusStream],
) -> None:
    mixed, one, _ = mixture
    outer = MixtureStream([(1, mixed), (1, one)])
    rows = outer.rows(3, 32)
    batch = outer.batch(3, 32, rows)
    inner = [
        mixed.batch(0, 32, np.array([r // 2])) if r % 2 == 0 else one.batch(0, 32, np.array([r // 2])) for r in rows
    ]
    assert torch.equal(batch.input_ids, torch.cat([b.input_ids for b in inner]))


def test_mixtures_that_cannot_be_are_refused(corpus: Path) -> None:
    with pytest.raises(ValueError, match="whole weights"):
        MixtureStream([(0, stream(corpus))])
    with pytest.raises(ValueError, match="same context"):
        MixtureStream([(1, stream(corpus)), (1, stream(corpus, context=32))])
