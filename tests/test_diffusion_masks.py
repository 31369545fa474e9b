"""Masks as data: golden keys and schedules, what each draw promises, and what it does not depend on."""

import itertools
import math

import numpy as np
import pytest
import torch

from pipeline.diffusion import masks


def test_a_key_and_its_numbers_are_the_golden_ones() -> None:
    key = masks.key(42, "elbo", "pair-0/chosen", 0)
    assert key == 0x9D217DA83E50B1BD24C403A2A9718E52
    assert masks.uniforms(key, 3).round(6).tolist() == [0.867070, 0.314637, 0.851195]


def test_the_golden_draw_of_an_elbo_leaves_one_token_clean() -> None:
    draws = masks.elbo_draws(masks.key(42, "elbo", "pair-0/chosen", 0), 8, 1)
    assert draws.masks.astype(int).tolist() == [[1, 1, 0, 1, 1, 1, 1, 1]]
    assert draws.scales.tolist() == [8 / 7]


def test_the_golden_coupled_pair() -> None:
    pair = masks.coupled(masks.key(42, "coupled", "p7/3", 1), 6)
    assert round(pair.t, 6) == 0.466689
    assert pair.first.astype(int).tolist() == [1, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("change", range(4))
def test_every_part_of_a_key_changes_it(change: int) -> None:
    parts = [42, "elbo", "a", 0]
    other = [43, "eval", "b", 1]
    changed = [other[n] if n == change else part for n, part in enumerate(parts)]
    assert masks.key(*parts) != masks.key(*changed)  # type: ignore[arg-type]


def test_more_numbers_of_a_key_begin_with_the_fewer() -> None:
    key = masks.key(1, "mdm", "code:3", 0)
    assert masks.uniforms(key, 40)[:7].tolist() == masks.uniforms(key, 7).tolist()


def test_a_coupled_pair_shares_the_tokens_out_for_a_thousand_keys() -> None:
    for number in range(1000):
        pair = masks.coupled(masks.key(0, "coupled", f"p/{number}", number % 3), 1 + number % 17)
        assert (pair.first ^ pair.second).all()
        assert 0.2 <= pair.t < 0.8


def test_a_number_that_equals_the_time_is_in_the_second_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The released code left it clean in both: no score ever saw that token."""
    numbers = np.array([0.5, 0.5, 0.1, 0.9])  # t = 0.5
    monkeypatch.setattr(masks, "uniforms", lambda key, count: numbers[:count])
    pair = masks.coupled(0, 3)
    assert pair.t == 0.5
    assert pair.first.tolist() == [False, True, False] and pair.second.tolist() == [True, False, True]


def test_a_shared_time_moves_the_masks_but_not_their_numbers() -> None:
    one, other = (masks.coupled(key, 12, shared=masks.key(0, "coupled", "batch", 0)) for key in (1, 2))
    assert one.t == other.t and one.first.tolist() != other.first.tolist()
    own = masks.coupled(1, 12)
    assert own.t != one.t


@pytest.mark.parametrize("draws", [1, 3, 8])
def test_the_numbers_of_masks_of_stratified_draws_are_uniform(draws: int) -> None:
    length, counts = 6, np.zeros(7)
    for u in (np.arange(600) + 0.5) / 600:
        counts += np.bincount(masks.strata(float(u), draws, length), minlength=7)
    assert counts[0] == 0 and np.allclose(counts[1:] / counts.sum(), 1 / 6)


def test_stratified_draws_spread_over_all_lengths() -> None:
    assert masks.strata(0.3, 4, 8).tolist() == [1, 3, 5, 7]
    draws = masks.elbo_draws(masks.key(0, "elbo", "x", 0), 8, 4)
    assert draws.masks.sum(1).tolist() == sorted(draws.masks.sum(1).tolist()) and len(set(draws.masks.sum(1))) == 4


def test_independent_draws_have_a_number_each() -> None:
    found = [
        tuple(masks.elbo_draws(masks.key(0, "elbo", str(n), 0), 8, 4, stratified=False).masks.sum(1))
        for n in range(400)
    ]
    assert len({counts for counts in found if list(counts) != sorted(counts)}) > 100
    assert abs(np.mean(found) - 4.5) < 4 * math.sqrt(63 / 12 / 1600)


def test_a_draw_of_nothing_is_refused() -> None:
    for length, draws in ((0, 1), (3, 0)):
        with pytest.raises(ValueError, match="at least one token and one draw"):
            masks.elbo_draws(0, length, draws)


def test_a_subset_has_its_size_and_takes_the_first_of_equal_numbers() -> None:
    assert masks.subset(np.array([0.5, 0.2, 0.5, 0.2]), 3).tolist() == [True, True, False, True]
    for k in range(5):
        assert masks.subset(np.full(4, 0.5), k).tolist() == [n < k for n in range(4)]


def test_every_subset_of_a_size_is_equally_likely() -> None:
    names = [tuple(masks.subset(masks.uniforms(masks.key(0, "elbo", str(n), 0), 4), 2)) for n in range(6000)]
    shares = [names.count(tuple(n in pair for n in range(4))) / 6000 for pair in itertools.combinations(range(4), 2)]
    assert max(abs(share - 1 / 6) for share in shares) < 4 * math.sqrt(5 / 36 / 6000)


def test_times_of_a_step_are_spread_evenly_and_differ_from_step_to_step() -> None:
    times = masks.times(7, 3, 8)
    assert np.allclose(np.diff(np.sort(times)), 1 / 8) and times.min() >= 0 and times.max() < 1
    assert masks.times(7, 4, 8)[0] != times[0] and masks.times(8, 3, 8)[0] != times[0]
    assert masks.times(7, 3, 8, stream="sft")[0] != times[0]
    assert len(set(masks.times(7, 3, 8, shared=True))) == 1


def test_a_masking_probability_lies_above_its_floor() -> None:
    assert masks.probability(0.0) == 1e-3 and masks.probability(1.0) == 1.0


def test_two_windows_of_a_hundred_are_trimmed() -> None:
    found = [masks.trim(masks.key(0, "trim", f"code:{n}", 0), 50) for n in range(20_000)]
    cut, kept = sum(t.end < 50 for t in found), sum(t.start > 0 for t in found)
    assert abs(cut / 20_000 - 0.01 * 49 / 50) < 0.003 and abs(kept / 20_000 - 0.01 * 49 / 50) < 0.003
    assert all(1 <= t.end <= 50 and 0 <= t.start < 50 for t in found)
    assert not any(t.end < 50 and t.start for t in found)


def test_a_canvas_holds_the_answer_and_its_end_and_takes_every_size() -> None:
    found = {masks.canvas(masks.key(0, "canvas", str(n), 0), 31, 100, 32) for n in range(200)}
    assert found == {32, 64, 96}
    assert {masks.canvas(masks.key(0, "canvas", str(n), 0), 32, 100, 32) for n in range(200)} == {64, 96}
    with pytest.raises(ValueError, match="96 tokens and its end of turn exceed the maximum of 96"):
        masks.canvas(0, 96, 100, 32)


def test_attention_is_annealed_from_causal_to_full() -> None:
    numbers = np.random.default_rng(0).random(36)
    assert (masks.sight(numbers, 6, 0.0) == np.tri(6, dtype=bool)).all()
    assert masks.sight(numbers, 6, 1.0).all()
    half = masks.sight(numbers, 6, 0.5)
    assert half.sum() > 21 and (half | ~np.tri(6, dtype=bool)).all()
    assert masks.anneal(0, 9, 6, 10) is None and masks.anneal(0, 0, 6, 0) is None
    first, second = masks.anneal(0, 2, 6, 10), masks.anneal(0, 2, 6, 10)
    assert first is not None and second is not None and (first == second).all()


def test_blocks_see_themselves_and_what_is_clean_before_them() -> None:
    found = ["".join(str(int(seen)) for seen in row) for row in masks.block_sight(np.array([0, 0, 1, 1]))]
    assert found == ["11000000"] * 2 + ["00111100"] * 2 + ["00001100"] * 2 + ["00001111"] * 2


def test_schedules_are_the_golden_ones() -> None:
    assert masks.schedule("balanced", 10, 4) == [3, 3, 2, 2]
    assert masks.schedule("balanced", 8, 3) == [3, 3, 2]
    assert masks.schedule("balanced", 5, 5) == [1] * 5
    assert masks.schedule("dream", 8, 4) == [1, 2, 2, 3]
    assert masks.schedule("dream", 10, 4) == [2, 2, 2, 4]
    long = masks.schedule("dream", 256, 256)
    assert long == [0, *[1] * 254, 2] and sum(long) == 256


def test_cart_weights_are_the_golden_ones() -> None:
    found = masks.cart_weights(np.array([False, True, True, False, False]), 0.3)
    assert np.allclose(found, [0, 0.3285, 0.36, 0, 0])


def test_no_global_generator_moves() -> None:
    """The released code re-seeded the global generators inside a forward pass."""
    import random

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    masks.elbo_draws(masks.key(0, "elbo", "x", 0), 9, 3)
    masks.coupled(3, 9)
    masks.times(0, 0, 4)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    assert before == after
