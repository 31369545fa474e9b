"""Oracle A, trl 1.12.0: generalized Jensen-Shannon divergence (GKD) and MiniLLM, on given logits."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from case import Case, draw
from trl.experimental.gkd import GKDTrainer
from trl.experimental.minillm import MiniLLMTrainer


def jsd_case(name: str, seed: int, beta: float, temperature: float) -> Case:
    """Logits (2, 3, 5), the last token of the second answer masked."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (draw(generator, 2, 3, 5, low=-3, high=3) for _ in range(2))
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    settings = {"beta": beta, "temperature": temperature}
    leaf, labels = student.clone().requires_grad_(), torch.where(mask.bool(), 0, -100)
    loss = GKDTrainer.generalized_jsd_loss(leaf, teacher, labels, **settings)
    loss.backward()
    assert leaf.grad is not None
    return Case(
        name=name,
        oracle="A",
        version="1.12.0",
        call="GKDTrainer.generalized_jsd_loss",
        seed=seed,
        settings=settings,
        inputs={"student": student, "teacher": teacher, "mask": mask, **settings},
        expected={"loss": loss.detach(), "grad_student": leaf.grad},
    )


def minillm_case(name: str, seed: int, gamma: float) -> Case:
    """Advantages of two answers of four tokens, and the loss over all next tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = [draw(generator, 2, 4, 5, low=-3, high=3).log_softmax(-1) for _ in range(2)]
    student, teacher = (torch.round(values, decimals=4) for values in logits)
    stub = SimpleNamespace(gamma=gamma, length_normalization=True)
    leaf, all_tokens = student.clone().requires_grad_(), torch.ones(2, 4, dtype=torch.bool)
    loss = MiniLLMTrainer._single_step_decomposition_loss(stub, leaf, teacher, all_tokens)
    return Case(
        name=name,
        oracle="A",
        version="1.12.0",
        call="MiniLLMTrainer._compute_advantage, _single_step_decomposition_loss",
        seed=seed,
        settings=vars(stub),
        inputs={"student": student, "teacher": teacher, "gamma": gamma},
        expected={
            "advantages": MiniLLMTrainer._compute_advantage(stub, student[..., 0], teacher[..., 0], all_tokens),
            "loss": loss.detach(),
        },
    )


def distill_cases() -> list[Case]:
    return [
        jsd_case("forward", 1, 0.0, 1.0),
        jsd_case("forward_0.8", 2, 0.0, 0.8),
        jsd_case("jsd_0.3", 3, 0.3, 1.0),
        jsd_case("jsd_0.5_2", 4, 0.5, 2.0),
        jsd_case("reverse", 5, 1.0, 1.0),
        minillm_case("minillm_0", 6, 0.0),
        minillm_case("minillm_0.9", 7, 0.9),
        minillm_case("minillm_1", 8, 1.0),
    ]
