"""Estimated likelihoods against enumeration, on a model small enough that everything about it is known (specs:
diffusion, checks 1-3, 6-10).
"""

import itertools
import math

import numpy as np
import pytest

from pipeline.diffusion import masks
from pipeline.diffusion.training import FORMS, enumerated
from tests.diffusion_fixture import (
    MASK,
    MASKS,
    SEQUENCES,
    STATES,
    L,
    V,
    masked_sums,
    moved,
    normalized,
    order_probability,
    score,
    table,
)


def consistent() -> np.ndarray:
    """log p of the conditionals of one joint distribution, (256, 4, 3)."""
    joint = np.random.default_rng(5).dirichlet(np.ones(V**L)).reshape((V,) * L)
    found = np.zeros((len(STATES), L, V))
    for state, number in STATES.items():
        seen = joint[tuple(slice(None) if token == MASK else slice(token, token + 1) for token in state)]
        for place in range(L):
            axes = tuple(axis for axis in range(L) if axis != place)
            own = seen.sum(axes)
            found[number, place] = own / own.sum() if state[place] == MASK else 1 / V
    return np.log(found)


def test_three_forms_of_the_elbo_agree_for_every_sequence() -> None:
    for sequence in SEQUENCES:
        t, k, order = (enumerated(score(table(1), sequence), L, form) for form in FORMS)
        assert abs(t - k) < 2e-15 * 8 and abs(k - order) < 1e-12


def test_random_order_decoding_is_a_distribution_that_the_elbo_bounds() -> None:
    likely = [order_probability(table(1), sequence) for sequence in SEQUENCES]
    assert abs(math.fsum(likely) - 1) < 1e-12
    gaps = [math.log(p) - enumerated(score(table(1), s), L, "k") for p, s in zip(likely, SEQUENCES, strict=True)]
    assert round(min(gaps), 3) == 0.452


def test_the_bound_is_tight_for_a_consistent_joint() -> None:
    logprobs = consistent()
    for sequence in SEQUENCES[::7]:
        tight = math.log(order_probability(logprobs, sequence)) - enumerated(score(logprobs, sequence), L, "order")
        assert abs(tight) < 1e-14


def test_a_context_free_model_has_its_exact_likelihood_in_every_form() -> None:
    own = normalized(np.random.default_rng(3).standard_normal((L, V)))
    logprobs = np.broadcast_to(own, (len(STATES), L, V))
    for sequence in SEQUENCES[::9]:
        exact = own[range(L), sequence].sum()
        assert all(abs(enumerated(score(logprobs, sequence), L, form) - exact) < 1e-12 for form in FORMS)


def test_subsets_of_each_size_weigh_what_they_should() -> None:
    one = {
        k: enumerated(lambda mask, k=k: [float(sum(mask) == k) / max(1, sum(mask))] * L, L, "t") for k in range(1, 5)
    }
    assert {k: round(value, 12) for k, value in one.items()} == {
        k: round(1 / k, 12) for k in one
    }  # C(4, k) / (k C(4, k))


def test_a_text_too_long_to_enumerate_is_refused() -> None:
    with pytest.raises(ValueError, match="1 to 8 tokens, found 9"):
        enumerated(lambda mask: [0.0] * 9, 9, "k")
    with pytest.raises(ValueError, match="form: expected one of t, k, order"):
        enumerated(lambda mask: [0.0] * 2, 2, "j")


def k_draw(sums: dict[tuple[bool, ...], float], key: int, draws: int = 1, *, stratified: bool = True) -> float:
    found = masks.elbo_draws(key, L, draws, stratified=stratified)
    return float(np.mean([scale * sums[tuple(mask.tolist())] for mask, scale in zip(*found, strict=True)]))


def test_sampled_forms_come_to_the_enumerated_value_and_k_varies_least() -> None:
    sums, exact = masked_sums(1, 37), enumerated(score(table(1), SEQUENCES[37]), L, "k")
    by_k = [k_draw(sums, masks.key(0, "elbo", str(n), 0)) for n in range(20_000)]
    by_t = []
    for n in range(20_000):
        numbers = masks.uniforms(masks.key(0, "mdm", str(n), 0), 1 + L)
        p = masks.probability(float(numbers[0]))
        mask = tuple((numbers[1:] < p).tolist())
        by_t.append(sums[mask] / p if any(mask) else 0.0)
    for found in (by_k, by_t):
        assert abs(np.mean(found) - exact) < 4 * np.std(found) / math.sqrt(len(found))
    assert abs(np.var(by_k) / 4.343 - 1) < 0.1  # by enumeration; with p above 1e-3 the t form has 31.5
    assert np.var(by_t) > 5 * np.var(by_k)


def difference(key: str, n_t: int, n_y: int, *, shared: bool = True, stratified: bool = False) -> float:
    """An estimate of s with beta 1 for w = 37 and l = 60, from n_t mask counts with n_y subsets each."""
    total = 0.0
    for side, sequence in (("chosen", 37), ("rejected", 60)):
        estimates = []
        for model in (0, 1):
            name = f"{key}/{side}" if shared else f"{key}/{side}/{model}"
            logprobs = moved(11, 12) if model else table(11)
            told = score(logprobs, SEQUENCES[sequence])
            numbers = masks.uniforms(masks.key(0, "elbo", name, 0), n_t + n_t * n_y * L)
            counts = (
                masks.strata(float(numbers[0]), n_t, L) if stratified else 1 + np.floor(L * numbers[:n_t]).astype(int)
            )
            rest = numbers[n_t:].reshape(n_t, n_y, L)
            each = [
                L / k * sum(np.asarray(told(tuple(m.tolist())))[m])
                for k, part in zip(counts, rest, strict=True)
                for m in (masks.subset(row, int(k)) for row in part)
            ]
            estimates.append(float(np.mean(each)))
        total += (1 if side == "chosen" else -1) * (estimates[1] - estimates[0])
    return total


@pytest.mark.parametrize(
    ("n_t", "n_y", "shared", "stratified", "expected"),
    [
        (8, 1, True, False, 0.0115),
        (4, 1, True, False, 0.0224),
        (2, 2, True, False, 0.0335),
        (1, 4, True, False, 0.0517),
        (1, 1, True, False, 0.100),
        (4, 1, False, False, 4.76),
        (8, 1, True, True, 0.0068),
    ],
)
def test_shared_masks_and_many_numbers_of_masks_make_the_difference_vary_little(
    n_t: int, n_y: int, shared: bool, stratified: bool, expected: float
) -> None:
    found = [difference(str(n), n_t, n_y, shared=shared, stratified=stratified) for n in range(1500)]
    assert abs(np.var(found) / expected - 1) < 0.15


def test_one_pair_of_coupled_masks_varies_less_than_two_independent_ones() -> None:
    """The variance of the summed released estimate of each sequence, enumerated over the coupled t on a fine grid."""
    grid = 0.2 + 0.6 * (np.arange(60) + 0.5) / 60
    ratios = []
    for number in range(len(SEQUENCES)):
        sums = masked_sums(1, number)
        whole = sums[(True,) * L]
        table_of = np.array([sums.get(mask, 0.0) for mask in itertools.product((False, True), repeat=L)])
        size = np.array([sum(mask) for mask in itertools.product((False, True), repeat=L)])
        coupled, first, second, squares = [], [], [], []
        for t in grid:
            chance = t**size * (1 - t) ** (L - size)
            b, c = table_of / t, table_of[::-1] / (1 - t)  # the complement of mask n is mask 15 - n
            coupled.append(((chance * (0.5 * (whole + b + c)) ** 2).sum(), (chance * 0.5 * (whole + b + c)).sum()))
            first.append((chance * b).sum())
            second.append((chance * c).sum())
            squares.append(((chance * b**2).sum(), (chance * c**2).sum()))
        mean = np.mean([m for _, m in coupled])
        var_coupled = np.mean([s for s, _ in coupled]) - mean**2
        e_b2, e_c2 = np.mean([s[0] for s in squares]), np.mean([s[1] for s in squares])
        cross = np.mean(np.array(first) * np.array(second))  # independent given t
        total = 0.25 * (whole**2 + e_b2 + e_c2 + 2 * whole * (np.mean(first) + np.mean(second)) + 2 * cross)
        ratios.append(var_coupled / (total - mean**2))
        if number == 37:
            assert abs(var_coupled - 3.910) < 0.02 and abs(total - mean**2 - 6.960) < 0.03
    assert max(ratios) < 1 and round(min(ratios), 2) == 0.18 and round(max(ratios), 2) == 0.97


def test_the_masks_of_the_fixture_are_all_but_the_empty_one() -> None:
    assert len(MASKS) == 2**L - 1
