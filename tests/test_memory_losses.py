"""The router's losses against numbers worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from pipeline.memory.model import Reader, Routed
from pipeline.memory.training import (
    Choices,
    RouterWeights,
    auxiliary,
    chosen_counts,
    load_balance,
    router_terms,
    z_loss,
)
from tests.memory_models import TINY, memory


def routed(probabilities: list[list[float]], chosen: list[list[int]]) -> Routed:
    """Units with exactly these probabilities: exp of their logits sums to one."""
    logits = torch.tensor(probabilities, dtype=torch.float64).log()
    places = torch.tensor(chosen)
    return Routed(logits, places, torch.zeros(places.shape))


def shares(one: Routed) -> Tensor:
    counts = chosen_counts(one).double()
    return counts / counts.sum()


def mean(total: Tensor, one: Routed) -> float:
    return float(total.detach()) / len(one.logits)


def test_load_balance_is_one_where_probabilities_or_choices_are_uniform() -> None:
    flat = routed([[0.25] * 4] * 3, [[0, 1], [0, 1], [0, 1]])  # uniform P, all on the same chapters
    assert mean(load_balance(flat, shares(flat)), flat) == pytest.approx(1.0, abs=1e-12)
    even = routed([[0.7, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7]], [[0, 1], [3, 2]])  # uniform f
    assert mean(load_balance(even, shares(even)), even) == pytest.approx(1.0, abs=1e-12)


def test_load_balance_of_a_collapse_is_the_chosen_mass_times_c_over_k() -> None:
    fallen = routed([[0.5, 0.3, 0.15, 0.05]] * 5, [[0, 1]] * 5)  # mass 0.8 on k = 2 of C = 4; f = 1/2 each
    assert mean(load_balance(fallen, shares(fallen)), fallen) == pytest.approx(0.8 * 4 / 2, abs=1e-12)


def test_load_balance_may_be_below_one() -> None:
    """C = 2, k = 1: three of four units choose chapter 0 by a hair, the fourth chooses 1 for sure."""
    low = routed([[0.5, 0.5]] * 3 + [[1e-12, 1 - 1e-12]], [[0], [0], [0], [1]])
    assert mean(load_balance(low, shares(low)), low) == pytest.approx(0.875, abs=1e-9)


def test_the_auxiliary_loss_at_balance_and_collapse() -> None:
    even = routed([[0.25] * 4] * 2, [[0, 1], [2, 3]])
    assert mean(auxiliary(even, shares(even)), even) == pytest.approx(0.0, abs=1e-12)
    for k, value in ((1, 0.875), (2, 0.375)):
        fallen = routed([[1 / 8] * 8] * 3, [list(range(k))] * 3)  # equal logits: the lowest are chosen
        assert mean(auxiliary(fallen, shares(fallen)), fallen) == pytest.approx(value, abs=1e-12)
        assert mean(load_balance(fallen, shares(fallen)), fallen) == pytest.approx(1.0, abs=1e-12)


def test_the_auxiliary_gradient_is_two_over_c_times_load_balance() -> None:
    places, gradients = torch.tensor([[0, 1], [0, 2], [0, 1]]), []
    for loss in (auxiliary, load_balance):
        logits = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        one = Routed(logits, places, torch.zeros(3, 2))
        loss(one, shares(one)).backward()
        assert logits.grad is not None
        gradients.append(logits.grad)
    torch.testing.assert_close(gradients[0], gradients[1] * 2 / 5, rtol=1e-10, atol=1e-12)


def test_the_gradient_of_load_balance_by_finite_differences() -> None:
    places, f = torch.tensor([[0, 1], [3, 0]]), torch.tensor([0.5, 0.25, 0.0, 0.25], dtype=torch.float64)
    logits = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def value(x: Tensor) -> Tensor:
        return load_balance(Routed(x, places, torch.zeros(2, 2)), f)

    assert torch.autograd.gradcheck(value, (logits,), eps=1e-6, atol=1e-8)


def test_the_z_loss() -> None:
    none = Routed(torch.zeros(3, 8), torch.zeros(3, 2, dtype=torch.long), torch.zeros(3, 2))
    assert mean(z_loss(none), none) == pytest.approx(math.log(8) ** 2, abs=1e-6) == pytest.approx(4.3240771, abs=1e-6)
    high = torch.zeros(1, 8)
    high[0, 3] = 40.0
    assert float(z_loss(Routed(high, torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2)))) == pytest.approx(
        1600, rel=1e-6
    )


def test_layers_are_averaged_and_none_cost_nothing() -> None:
    """Two layers with load balance 0.01 and 0.02 and z 0.001 and 0.002: 0.01 LB + 0.001 z is 1.515e-4 on average."""
    logits = {layer: torch.full((4, 2), math.log(0.5)).double() + z**0.5 for layer, z in ((0, 0.001), (3, 0.002))}
    chosen = {layer: Routed(x, torch.zeros(4, 2, dtype=torch.long), torch.zeros(4, 2)) for layer, x in logits.items()}
    f = {0: torch.tensor([0.01, 0.0], dtype=torch.float64), 3: torch.tensor([0.02, 0.0], dtype=torch.float64)}
    terms = router_terms(chosen, f, RouterWeights(load_balance=0.01, z=0.001))
    assert sum(float(t.coefficient * t.sum / 4) for t in terms) == pytest.approx(1.515e-4, rel=1e-6)
    assert [term.name for term in terms] == ["load_balance", "z"] and {term.per for term in terms} == {"units"}
    assert router_terms({}, {}, RouterWeights()) == []
    assert [t.name for t in router_terms(chosen, f, RouterWeights(load_balance=0.0, auxiliary=1.0, z=0.0))] == [
        "auxiliary"
    ]
    with pytest.raises(ValueError, match=r"router\.z: expected at least 0"):
        RouterWeights(z=-1.0)


def test_a_shared_chapter_is_no_way_out_of_the_balance() -> None:
    """Only routed chapters have logits: however many are shared, no mass can go to chapters that are never chosen."""
    for shared in (0, 1, 4):
        config = memory(rows=(5 + shared) * 8, shared=shared)
        reader = Reader(config, TINY)
        reader.router.weight.data.normal_(0, 3.0, generator=torch.Generator().manual_seed(0))
        one = reader.route(torch.randn(50, 32, generator=torch.Generator().manual_seed(1)))
        assert one.logits.shape == (50, 5) and torch.allclose(one.probabilities.sum(1), torch.ones(50))
        share = chosen_counts(one) / 100
        assert mean(load_balance(one, share), one) > 0.9
        torch.testing.assert_close(share.sum(), torch.tensor(1.0))


def test_the_last_micro_batch_sees_the_choices_of_the_whole_step() -> None:
    first, second = (routed([[0.4, 0.3, 0.2, 0.1]] * len(c), c) for c in ([[0, 1], [0, 2]], [[3, 1]]))
    choices = Choices()
    choices.begin(0, True)
    assert choices.add({2: first})[2].tolist() == [0.5, 0.25, 0.25, 0.0]
    choices.begin(1, True)
    whole = choices.add({2: second})[2]
    torch.testing.assert_close(whole, torch.tensor([2, 2, 1, 1]) / 6)
    choices.begin(2, False)  # a repeated batch, which does not count
    assert torch.equal(choices.add({2: second})[2], whole)
    choices.begin(0, True)  # the next step begins anew
    assert choices.add({2: second})[2].tolist() == [0.0, 0.5, 0.0, 0.5]
    assert choices.add({}) == {}
