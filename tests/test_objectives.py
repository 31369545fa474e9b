"""Each loss against numbers worked out by hand, and summed over parts against the whole."""

import math

import pytest
import torch

from pipeline.learning.objectives import Loss, Term, next_token

# two positions over three tokens: e^0, e^ln2, e^ln5 sum to 8; e^ln3, e^0, e^0 sum to 5
LOGITS = [[0.0, math.log(2), math.log(5)], [math.log(3), 0.0, 0.0]]


def test_next_token_is_minus_the_log_of_the_target_s_share() -> None:
    loss = next_token(torch.tensor(LOGITS), torch.tensor([1, 0]))
    (term,) = loss.terms
    assert (term.name, term.per, term.coefficient) == ("loss", "tokens", 1.0)
    assert term.sum.item() == pytest.approx(math.log(8 / 2) + math.log(5 / 3), rel=1e-6)


def test_the_gradient_of_next_token_is_softmax_less_one_hot() -> None:
    logits = torch.tensor(LOGITS, requires_grad=True)
    next_token(logits, torch.tensor([1, 0])).terms[0].sum.backward()
    expected = torch.tensor([[1 / 8, 2 / 8 - 1, 5 / 8], [3 / 5 - 1, 1 / 5, 1 / 5]])
    torch.testing.assert_close(logits.grad, expected)


def test_parts_add_up_to_the_whole_also_ragged_and_empty() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(7, 11, generator=generator), torch.arange(7)
    whole = next_token(logits, targets).terms[0]
    parts = [next_token(logits[a:b], targets[a:b]).terms[0] for a, b in ((0, 1), (1, 1), (1, 5), (5, 7))]
    torch.testing.assert_close(sum(part.sum for part in parts), whole.sum)
    assert parts[1].sum.item() == 0.0


def test_logits_in_half_precision_are_scored_in_float32() -> None:
    """In bf16 the sum over 4,096 equal logits would be off by per cents."""
    logits = torch.zeros(1, 4096, dtype=torch.bfloat16)
    total = next_token(logits, torch.tensor([5])).terms[0].sum
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(math.log(4096), rel=1e-6)


def test_a_loss_has_no_metrics_unless_given() -> None:
    term = Term("a", torch.tensor(1.0), "tokens", 0.5)
    assert Loss([term]).metrics == {}
    assert Loss([term]).metrics is not Loss([term]).metrics
