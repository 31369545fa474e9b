"""Each loss against numbers worked out by hand, and summed over parts against the whole."""

import math

import pytest
import torch
from torch import Tensor

from pipeline.learning import losses
from pipeline.learning.losses import Loss, Term, next_token
from pipeline.model.cpu import primitives

# two positions over three tokens: e^0, e^ln2, e^ln5 sum to 8; e^ln3, e^0, e^0 sum to 5
LOGITS = [[0.0, math.log(2), math.log(5)], [math.log(3), 0.0, 0.0]]


EYE = torch.eye(3)  # as the head's matrix, so the hidden states are the logits


def test_next_token_is_minus_the_log_of_the_target_s_share() -> None:
    loss = next_token(torch.tensor(LOGITS), EYE, torch.tensor([1, 0]))
    assert loss.item() == pytest.approx(math.log(8 / 2) + math.log(5 / 3), rel=1e-6)


def test_the_gradient_of_next_token_is_softmax_less_one_hot() -> None:
    logits = torch.tensor(LOGITS, requires_grad=True)
    next_token(logits, EYE, torch.tensor([1, 0])).backward()
    expected = torch.tensor([[1 / 8, 2 / 8 - 1, 5 / 8], [3 / 5 - 1, 1 / 5, 1 / 5]])
    torch.testing.assert_close(logits.grad, expected)


def made(rows: int, width: int, words: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head's matrix and targets, some of them equal."""
    generator = torch.Generator().manual_seed(rows)
    hidden, table = (torch.randn(n, width, generator=generator).requires_grad_() for n in (rows, words))
    return hidden, table, torch.arange(rows) ** 2 % words


def plain(hidden: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    logits = hidden @ table.T
    return (logits.logsumexp(-1) - logits[torch.arange(len(targets)), targets]).sum()


@pytest.mark.parametrize("most", [1, 2**23])
def test_next_token_and_its_gradients_are_those_of_the_plain_formula(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it is computed in pieces of a few rows or a few logits."""
    monkeypatch.setattr(losses, "MOST_LOGITS", most)
    monkeypatch.setattr(primitives, "AT_ONCE", 40)
    inputs = [x.detach().double() if x.is_floating_point() else x for x in made(300, 6, 11)]
    found, expected = [], []
    for results, function in ((found, next_token), (expected, plain)):
        hidden, table = (x.clone().requires_grad_() for x in inputs[:2])
        total = function(hidden, table, inputs[2])
        (3 * total).backward()
        results += [total.detach(), hidden.grad, table.grad]
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def test_a_head_that_is_not_trained_gets_no_gradient_and_states_do() -> None:
    hidden, table, targets = made(5, 6, 11)
    next_token(hidden, table.detach(), targets).backward()
    assert table.grad is None
    expected = torch.autograd.grad(plain(hidden, table, targets), hidden)[0]
    torch.testing.assert_close(hidden.grad, expected)
    with torch.no_grad():
        torch.testing.assert_close(next_token(hidden, table, targets), plain(hidden, table, targets))


def test_parts_add_up_to_the_whole_also_ragged_and_empty() -> None:
    hidden, table, targets = made(7, 6, 11)
    whole = next_token(hidden, table, targets)
    parts = [next_token(hidden[a:b], table, targets[a:b]) for a, b in ((0, 1), (1, 1), (1, 5), (5, 7))]
    torch.testing.assert_close(sum(parts), whole)
    assert parts[1].item() == 0.0
    parts[1].backward()
    assert hidden.grad is not None and not hidden.grad.any() and table.grad is not None and not table.grad.any()


def test_logits_in_half_precision_are_scored_in_float32() -> None:
    """In bf16 the sum over 4,096 equal logits would be off by several percent."""
    with torch.autocast("cpu", torch.bfloat16):
        total = next_token(torch.zeros(1, 2), torch.zeros(4096, 2), torch.tensor([5]))
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(math.log(4096), rel=1e-6)


def test_gradients_under_autocast_are_float32_and_within_its_rounding() -> None:
    hidden, table, targets = made(200, 32, 300)
    exact = torch.autograd.grad(plain(hidden, table, targets), (hidden, table))
    with torch.autocast("cpu", torch.bfloat16):
        total = next_token(hidden, table, targets)
    for found, expected in zip(torch.autograd.grad(total, (hidden, table)), exact, strict=True):
        assert found.dtype == torch.float32
        assert (found - expected).norm() <= 0.01 * expected.norm()


def test_a_loss_has_no_metrics_unless_given() -> None:
    term = Term("a", torch.tensor(1.0), "tokens", 0.5)
    assert Loss([term]).metrics == {}
    assert Loss([term]).metrics is not Loss([term]).metrics
