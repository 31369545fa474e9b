"""Distillation losses: TRL's numbers, numbers worked out by hand, parts against the whole, kept tokens against all."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.learning import distillation
from pipeline.learning.distillation import Kept, Whole, advantages, compared, jensen_shannon, log_probabilities
from tests.goldens import assert_near, cases, tensors

STORED = cases("distill")
DTYPES = [torch.float32, torch.float64]


def drawn(*shape: int, seed: int, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in STORED if not name.startswith("minillm")])
def test_divergences_and_gradients_are_trl_s(name: str, dtype: torch.dtype) -> None:
    case, given = STORED[name], tensors(STORED[name]["inputs"], dtype)
    mask, knobs = given["mask"], {key: case["inputs"][key] for key in ("beta", "temperature")}
    student = given["student"].requires_grad_()
    head = torch.eye(student.shape[-1], dtype=dtype)
    hidden, targets = student[mask], torch.zeros(int(mask.sum()), dtype=torch.int64)
    divergences, logprobs = compared(hidden, head, targets, Whole(given["teacher"][mask], head), **knobs)
    loss = divergences.mean()
    loss.backward()
    assert_near(loss, case["expected"]["loss"], dtype)
    assert student.grad is not None
    assert_near(student.grad, case["expected"]["grad_student"], dtype)
    assert_near(logprobs, (hidden / knobs["temperature"]).log_softmax(-1)[:, 0].tolist(), dtype)


@pytest.mark.parametrize("name", [name for name in STORED if name.startswith("minillm")])
def test_minillm_s_advantages_and_divergence_are_trl_s(name: str) -> None:
    case = STORED[name]
    student, teacher = (torch.tensor(case["inputs"][key], dtype=torch.float64) for key in ("student", "teacher"))
    found = [
        advantages(own.numpy(), its.numpy(), case["inputs"]["gamma"])
        for own, its in zip(student[..., 0], teacher[..., 0], strict=True)
    ]
    assert np.allclose(found, case["expected"]["advantages"], rtol=1e-6, atol=1e-6)
    divergence = jensen_shannon(student.flatten(0, 1), teacher.flatten(0, 1), 1.0).mean()
    assert float(divergence) == pytest.approx(case["expected"]["loss"], abs=1e-6)


def test_divergences_by_hand() -> None:
    """Student (1/2, 1/2), teacher (3/4, 1/4)."""
    student, teacher = (torch.tensor([p], dtype=torch.float64).log() for p in ([0.5, 0.5], [0.75, 0.25]))
    forward = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    reverse = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    to_middle = [0.75 * math.log(0.75 / 0.625) + 0.25 * math.log(0.25 / 0.375)]
    to_middle += [0.5 * math.log(0.5 / 0.625) + 0.5 * math.log(0.5 / 0.375)]
    for beta, expected in ((0.0, forward), (1.0, reverse), (0.5, sum(to_middle) / 2)):
        assert float(jensen_shannon(student, teacher, beta)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.7, 1.0])
def test_parts_are_the_whole_with_all_gradients(beta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "EVEN_ROWS", 1)
    hidden, table, teacher = drawn(7, 3, seed=1), drawn(11, 3, seed=2), drawn(7, 11, seed=3)
    weights, targets = drawn(2, 7, seed=4), torch.arange(7)
    found = []
    for most in (2 * 11, 100 * 11):  # parts of two rows, one part of all
        monkeypatch.setattr(distillation, "MOST_LOGITS", most)
        leaves = [hidden.clone().requires_grad_(), table.clone().requires_grad_()]
        results = compared(*leaves, targets, Whole(teacher, torch.eye(11).double()), beta=beta, temperature=0.7)
        sum(w @ r for w, r in zip(weights, results, strict=True)).backward()  # type: ignore[union-attr]
        found.append([*results, *(leaf.grad for leaf in leaves)])
    leaves = [hidden.clone().requires_grad_(), table.clone().requires_grad_()]
    logprobs = (leaves[0] @ leaves[1].T / 0.7).log_softmax(1)
    results = jensen_shannon(logprobs, (teacher / 0.7).log_softmax(1), beta), logprobs[torch.arange(7), targets]
    sum(w @ r for w, r in zip(weights, results, strict=True)).backward()  # type: ignore[union-attr]
    found.append([*results, *(leaf.grad for leaf in leaves)])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-12)


def test_nothing_trained_is_nothing_lost() -> None:
    hidden, table = drawn(0, 3, seed=1).requires_grad_(), drawn(5, 3, seed=2).requires_grad_()
    nothing = torch.zeros(0, dtype=torch.int64)
    divergences, logprobs = compared(hidden, table, nothing, Whole(drawn(0, 3, seed=1), table), beta=0.5, temperature=1)
    assert divergences.shape == logprobs.shape == (0,)
    divergences.sum().backward()


def kept(teacher: Tensor, k: int) -> Kept:
    top = teacher.topk(k)
    return Kept(top.indices, top.values)


def test_kept_in_full_is_the_teacher_and_kept_in_part_is_never_more() -> None:
    hidden, table, teacher = drawn(9, 4, seed=5), drawn(6, 4, seed=6), drawn(9, 6, seed=7)
    own_head, targets = torch.eye(6).double(), torch.zeros(9, dtype=torch.int64)
    for beta, temperature in itertools.product((0.0, 0.4, 1.0), (1.0, 0.5)):
        knobs: dict[str, Any] = {"beta": beta, "temperature": temperature}
        whole, _ = compared(hidden, table, targets, Whole(teacher, own_head), **knobs)
        probabilities = log_probabilities(teacher, own_head, temperature)
        by_k = [compared(hidden, table, targets, kept(probabilities, k), **knobs)[0] for k in (1, 3, 6)]
        assert torch.allclose(by_k[2], whole, atol=1e-12)
        assert (by_k[0] <= by_k[1] + 1e-12).all() and (by_k[1] <= whole + 1e-12).all()
        assert (by_k[0] < whole - 1e-3).any()


def test_kept_loses_nothing_where_the_rest_is_in_proportion() -> None:
    """Teacher (1/2, 1/4, 1/4) and student (1/5, 2/5, 2/5): the rest is one outcome with 1/2 and 4/5."""
    teacher = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    student = torch.tensor([[0.2, 0.4, 0.4]], dtype=torch.float64).log()
    both = kept(teacher, 1).both(student, slice(0, 1), 1.0)
    expected = 0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.5 / 0.8)
    assert float(jensen_shannon(*both, 0.0)) == pytest.approx(expected, abs=1e-12)
    assert float(jensen_shannon(student, teacher, 0.0)) == pytest.approx(expected, abs=1e-12)


def test_a_teacher_that_is_sure_gives_numbers_and_gradients() -> None:
    """The probability left for tokens that were not kept is 0 in float32."""
    hidden = torch.tensor([[40.0, 0.0, 0.0]]).requires_grad_()
    teacher = Kept(torch.tensor([[0]]), torch.tensor([[0.0]]))
    for beta in (0.0, 0.5, 1.0):
        divergences, _ = compared(hidden, torch.eye(3), torch.tensor([0]), teacher, beta=beta, temperature=1.0)
        (gradient,) = torch.autograd.grad(divergences.sum(), hidden)
        assert divergences.isfinite().all() and gradient.isfinite().all()


def test_advantages_by_hand() -> None:
    """Differences 1, -2, 4: their discounted means from each token on."""
    own, its = np.array([-1.0, -1.0, -5.0]), np.array([0.0, -3.0, -1.0])
    for gamma, expected in ((0.0, [1, -2, 4]), (1.0, [1, 1, 4]), (0.5, [(1 - 1 + 1) / 1.75, (-2 + 2) / 1.5, 4])):
        assert np.allclose(advantages(own, its, gamma), expected, atol=1e-6)
