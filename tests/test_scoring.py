"""Log-probabilities at the trained positions alone equal those of the whole forward pass."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.batches.batch import Piece, TokenBatch, answered
from pipeline.learning import losses
from pipeline.learning.losses import sum_by_row, token_logprobs, trained_logits
from pipeline.model.transformer import Transformer
from tests.goldens import Given, I, assert_near, cases, rows_of, tensors

BATCH = TokenBatch(
    input_ids=torch.tensor([[7, 8, 9, 7, 4, 5, 6, 0], [9, 9, 8, 1, 2, 3, 3, 2]]),
    targets=torch.tensor([[8, I, 7, I, 5, 6, I, I], [I, I, I, 2, 3, 3, 2, 1]]),
    documents=torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1], [0] * 8], dtype=torch.int32),
    positions=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5, 6, 7]]),
    num_bytes=9,
)


def test_selected_logits_are_those_of_the_trained_positions_row_by_row(tiny_model: Transformer) -> None:
    logits, targets = trained_logits(tiny_model, BATCH)
    assert targets.tolist() == [8, 7, 5, 6, 2, 3, 3, 2, 1]
    assert logits.shape == (9, tiny_model.config.vocab_size)
    whole = tiny_model(BATCH.input_ids, positions=BATCH.positions, documents=BATCH.documents)
    places = [(0, 0), (0, 2), (0, 4), (0, 5), *((1, t) for t in range(3, 8))]
    torch.testing.assert_close(logits, torch.stack([whole[b, t] for b, t in places]), atol=1e-5, rtol=1e-5)


def test_a_document_in_a_packed_row_is_scored_as_if_it_were_alone(tiny_model: Transformer) -> None:
    logits, _ = trained_logits(tiny_model, BATCH)
    alone = tiny_model(BATCH.input_ids[:1, 4:7])
    torch.testing.assert_close(logits[2:4], alone[0, :2], atol=1e-5, rtol=1e-5)


def test_a_batch_without_targets_gives_no_logits(tiny_model: Transformer) -> None:
    import dataclasses

    logits, targets = trained_logits(tiny_model, dataclasses.replace(BATCH, targets=torch.full((2, 8), I)))
    assert logits.shape == (0, tiny_model.config.vocab_size)
    assert targets.shape == (0,)


@pytest.mark.parametrize("name", ["temperature_0.7", "temperature_1.0"])
def test_log_probabilities_and_entropies_at_a_temperature_are_trl_s(name: str) -> None:
    case = cases("grpo")[name]
    given = tensors(case["inputs"], torch.float32)
    every = rows_of(given["ids"], torch.ones_like(given["ids"], dtype=torch.bool))
    logprobs, entropies = token_logprobs(Given(given["logits"]), every, case["inputs"]["temperature"])
    assert_near(logprobs.view_as(given["ids"]), case["expected"]["logprobs"], torch.float32)
    assert_near(entropies.view_as(given["ids"]), case["expected"]["entropies"], torch.float32)


def test_log_probabilities_have_a_gradient_and_entropies_none() -> None:
    logits = torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    batch = rows_of(torch.tensor([[1, 2, 3]]), torch.tensor([[True, False, True]]))
    logprobs, entropies = token_logprobs(Given(logits), batch, 2.0)
    assert logprobs.shape == entropies.shape == (2,)
    assert logprobs.requires_grad and not entropies.requires_grad
    logprobs.sum().backward()
    expected = -(logits.detach() / 2).softmax(-1)
    expected[0, 0, 1] += 1
    expected[0, 2, 3] += 1
    expected[0, 1] = 0
    torch.testing.assert_close(logits.grad, expected / 2)


def test_half_precision_logits_are_normalized_in_float32() -> None:
    logits = torch.zeros(1, 1, 4096, dtype=torch.bfloat16)
    logprobs, entropies = token_logprobs(Given(logits), rows_of(torch.tensor([[7]]), torch.tensor([[True]])), 1.0)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(torch.stack([-logprobs, entropies]), torch.full((2, 1), 4096.0).log())


def test_sums_are_taken_row_by_row_and_a_row_without_places_is_zero() -> None:
    chosen = torch.tensor([[True, False, True], [False, False, False], [False, True, False]])
    assert sum_by_row(torch.tensor([1.0, 20.0, 300.0]), chosen).tolist() == [21.0, 0.0, 300.0]


def test_rows_of_answers_are_laid_out_as_worked_out_by_hand() -> None:
    """A position's target is the next token if that is trained on; padding comes last, whatever its id."""
    short = Piece(np.array([5, 6]), np.array([False, True]))
    long = Piece(np.array([7, 8, 9, 4]), np.array([False, False, True, True]))
    found = answered([short, long], pad=0)
    assert found.input_ids.tolist() == [[5, 6, 0, 0], [7, 8, 9, 4]]
    assert found.targets.tolist() == [[6, -100, -100, -100], [-100, 9, 4, -100]]
    assert found.documents.tolist() == [[0, 0, -1, -1], [0, 0, 0, 0]]
    assert found.positions.tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("dtype", "scale", "bound"),
    [(torch.float64, 2.0, 1e-12), (torch.float32, 0.5, 1e-6), (torch.bfloat16, 0.5, 0.0), (torch.bfloat16, 2.0, 0.0)],
)
@pytest.mark.parametrize("most", [2**23, 2**12])
def test_log_probabilities_and_gradients_are_those_of_a_softmax_of_all_logits(
    dtype: torch.dtype, scale: float, bound: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several targets for one state, even the same one twice; sharp logits at a scale of 2; the head in several parts.

    In bf16 it is no further off than the plain formula on bf16 logits.
    """
    monkeypatch.setattr(losses, "MOST_LOGITS", most)
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, 300, (500,), generator=generator)
    targets = torch.randint(0, 16, (500,), generator=generator)  # many equal ones
    above = torch.randn(500, generator=generator, dtype=torch.float64)
    given = [torch.randn(n, 24, generator=generator, dtype=torch.float64) for n in (300, 50)]
    given = [(scale * x).to(dtype).requires_grad_() for x in given]

    def found(states: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        return losses._logprobs_head(targets, 0.8)(states, table, index)

    def plain(states: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        return losses.target_logprobs((states @ table.T)[index], targets, 0.8)

    def exact(states: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        shares = (states.double() @ table.double().T / 0.8).log_softmax(-1)[index]
        return shares.gather(1, targets[:, None])[:, 0], -(shares * shares.exp()).sum(-1)

    def results(formula: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        logprobs, entropies = formula(*given)
        gradients = torch.autograd.grad(logprobs, given, above.to(logprobs.dtype))
        return [x.detach().double() for x in (logprobs, entropies, *gradients)]

    for got, rounded, value in zip(results(found), results(plain), results(exact), strict=True):
        assert (got - value).norm() <= bound * value.norm() + (1.1 * (rounded - value).norm() if not bound else 0.0)


def test_a_batch_without_targets_has_no_log_probabilities_and_no_gradient() -> None:
    states, table = torch.zeros(0, 4, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    logprobs, _ = losses._logprobs_head(torch.zeros(0, dtype=torch.long), 1.0)(states, table, None)
    logprobs.sum().backward()
    assert logprobs.shape == (0,) and table.grad is not None and not table.grad.any()
