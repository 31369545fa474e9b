"""Cutting and packing: nothing is lost or duplicated, nothing that fits is cut; the order of rows is a bijection."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.batches.packing import RowOrder, cached, cut, mix, pack, packing_of, permute

some = settings(max_examples=60, deadline=None)  # a shared machine may stall


def slow_best_fit(lengths: list[int], capacity: int) -> int:
    """Number of rows that best-fit decreasing needs, computed the obvious way."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in free if space >= length]
        if fitting:
            free.remove(min(fitting))
            free.append(min(fitting) - length)
        else:
            free.append(capacity - length)
    return len(free)


@some
@given(st.lists(st.integers(1, 50), max_size=80), st.integers(50, 70))
def test_every_piece_is_in_exactly_one_row_and_no_row_overflows(lengths: list[int], capacity: int) -> None:
    array = np.array(lengths, dtype=np.int64)
    members, row_starts = pack(array, capacity)
    assert sorted(members.tolist()) == list(range(len(lengths)))
    rows = [members[a:b] for a, b in itertools.pairwise(row_starts)]
    assert all(len(row) and array[row].sum() <= capacity for row in rows)
    assert len(rows) == slow_best_fit(lengths, capacity)


@pytest.mark.parametrize("length", [0, 51])
def test_a_piece_that_cannot_fit_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=r"lengths in 1\.\.50"):
        pack(np.array([3, length]), 50)


@some
@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 16))
def test_pieces_predict_every_token_but_the_first_once_and_only_long_documents_are_cut(
    lengths: list[int], context: int
) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    document = np.repeat(np.arange(len(lengths)), lengths)  # of each token
    pieces = cut(offsets.astype("<u8"), context)
    predicted: list[int] = []
    uncut: list[int] = []
    for start, length, whole, goes_on in zip(
        pieces.starts, pieces.lengths, pieces.whole, pieces.continues, strict=True
    ):
        targets = range(start + 1, start + length + goes_on)
        predicted += targets
        owner = document[targets[0]]  # a piece without a target fails here
        assert set(document[list(targets)]) == {owner}
        assert document[start] == owner or start + 1 == offsets[owner]  # begins in it, or one token before it
        assert length == context if goes_on else (length <= context and targets[-1] + 1 == offsets[owner + 1])
        if whole:
            uncut.append(owner)
            assert (targets[0], targets[-1] + 1) == (max(1, offsets[owner]), offsets[owner + 1])
    assert predicted == list(range(1, sum(lengths)))
    first = np.maximum(1, offsets[:-1])  # where the targets of each document begin
    assert uncut == [n for n in range(len(lengths)) if 0 < offsets[n + 1] - first[n] <= context]


def test_documents_are_cut_as_worked_out_by_hand() -> None:
    """Documents of 3, 4, 0, 8 and 9 tokens in rows of 4: after the first, each begins with the token before it."""
    pieces = cut(np.cumsum([0, 3, 4, 0, 8, 9]).astype("<u8"), 4)
    assert pieces.starts.tolist() == [0, 2, 6, 10, 14, 18, 22]
    assert pieces.lengths.tolist() == [3, 4, 4, 4, 4, 4, 2]
    assert pieces.continues.tolist() == [False, True, True, True, True, True, False]
    assert pieces.whole.tolist() == [True, True, False, False, False, False, False]


def test_rows_are_full_for_documents_of_ordinary_lengths() -> None:
    generator = np.random.default_rng(0)
    for context, mean in ((512, 5.0), (2048, 7.0)):  # stories of about 150 tokens, files of about 1,100
        lengths = np.minimum(generator.lognormal(mean, 0.8, 20_000).astype(np.int64) + 1, context)
        _, row_starts = pack(lengths, context)
        assert lengths.sum() / ((len(row_starts) - 1) * context) >= 0.95


def test_open_rows_are_carried_over_the_window() -> None:
    lengths = np.concatenate([np.full(65_536, 7), np.full(65_536, 3)])
    assert len(pack(lengths, 10)[1]) - 1 == 65_536


def test_a_packing_is_built_once_and_read_back_equal(tmp_path: Path) -> None:
    offsets = np.cumsum([0, 5, 20, 3, 7]).astype("<u8")
    pieces = cut(offsets, 8)
    infilled = np.array([True, False, False, False, False, False])
    calls = []

    def build():
        calls.append(1)
        return packing_of(pieces, infilled, 3, 8)

    first = cached(tmp_path / "cache", ["hash", 8], build)
    second = cached(tmp_path / "cache", ["hash", 8], build)
    cached(tmp_path / "cache", ["hash", 9], build)
    assert len(calls) == 2 and first.num_rows == second.num_rows
    for name in ("starts", "lengths", "continues", "infilled", "row_starts"):
        assert np.array_equal(getattr(first, name), getattr(build(), name))
        assert np.array_equal(getattr(second, name), getattr(build(), name))


@some
@given(st.integers(1, 300), st.integers(0, 2**63))
def test_the_permutation_is_a_bijection(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


def test_the_permutation_depends_on_its_key_and_moves_nearly_everything() -> None:
    index = np.arange(10_000)
    one, two = permute(index, 10_000, 1), permute(index, 10_000, 2)
    assert (one == index).sum() < 10 and (one == two).sum() < 10
    assert abs(np.corrcoef(one, index)[0, 1]) < 0.05
    assert np.array_equal(permute(index[5:9], 10_000, 1), one[5:9])


def test_hashes_are_spread_evenly() -> None:
    shares = np.bincount((mix(np.arange(64_000), 3) >> np.uint64(58)).astype(int), minlength=64) / 1000
    assert shares.min() > 0.85 and shares.max() < 1.15


@pytest.mark.parametrize("context", [16, 8, 4])
def test_an_epoch_visits_every_window_once_in_rows_that_stay_together(context: int) -> None:
    order = RowOrder(num_rows=12, context=16, tokens_per_step=48, seed=5)
    windows = 16 // context
    epoch = np.concatenate([order.at(order.positions(step), context) for step in range(4)])
    assert sorted(epoch.tolist()) == list(range(12 * windows))
    packed, window = order.locate(epoch, context)
    assert np.array_equal(packed, np.repeat(order.locate(order.at(np.arange(12), 16), 16)[0], windows))
    assert np.array_equal(window, np.tile(np.arange(windows), 12))


def test_the_second_epoch_has_another_order_and_other_ids() -> None:
    order = RowOrder(num_rows=12, context=16, tokens_per_step=80, seed=5)
    ids = np.concatenate([order.at(order.positions(step), 16) for step in range(5)])  # 25 rows: epochs 0, 1, start of 2
    assert sorted(ids[:12]) == list(range(12)) and sorted(ids[12:24]) == list(range(12, 24)) and ids[24] >= 24
    assert not np.array_equal(ids[:12], ids[12:24] - 12)


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the context 16, found 40"):
        RowOrder(num_rows=3, context=16, tokens_per_step=40, seed=0)
    with pytest.raises(ValueError, match="divisor of the packed length 16, found 5"):
        RowOrder(num_rows=3, context=16, tokens_per_step=48, seed=0).at(np.arange(3), 5)
