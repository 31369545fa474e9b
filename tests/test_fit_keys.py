"""Training keys that the loop hands on: the limit of the norm, the optimiser's constants, the validation slice."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.learning.fit import fit
from pipeline.learning.optim import Optimizers
from tests import test_optim
from tests.test_fit import Batch, Net, Rows, config, job, loss

# With an eps this large AdamW's first step is the gradient times learning_rate / eps, so its length is the norm's.
PLAIN: dict[str, Any] = {"steps": 1, "warmup_steps": 0, "optimizer": "adamw", "weight_decay": 0.0, "eps": 1e3,
                         "learning_rate": 10.0, "schedule": "constant", "publish": "last"}  # fmt: skip


def moved(folder: Path, **changes: Any) -> tuple[float, float]:
    """How far one step moves the weights, and the norm of its gradient before it was clipped."""
    model, before, at_work = Net(), Net(), job(folder)
    fit(model, Rows(), loss, config(**(PLAIN | changes)), at_work)
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    squares = [(a - b).detach().double().nan_to_num(0).square().sum() for a, b in pairs]
    (norm,) = (row["grad_norm"] for row in at_work.tracker.rows if "grad_norm" in row)
    return float(torch.stack(squares).sum().sqrt()), float(norm)


def test_a_gradient_is_cut_to_the_norm_that_is_allowed_and_0_allows_any(tmp_path: Path) -> None:
    free, norm = moved(tmp_path / "free", max_grad_norm=0.0)
    assert free == pytest.approx(norm / 100, rel=1e-2)
    for share in (0.5, 0.1):
        cut, same = moved(tmp_path / str(share), max_grad_norm=share * norm)
        assert same == pytest.approx(norm)
        assert cut == pytest.approx(share * free, rel=1e-2)
    assert moved(tmp_path / "wide", max_grad_norm=2 * norm)[0] == pytest.approx(free, rel=1e-6)


@pytest.mark.parametrize(
    "changes", [{}, {"betas": (0.5, 0.6)}, {"betas": (0.9, 0.6)}, {"eps": 0.1}, {"weight_decay": 0.9}, {"learning_rate": 0.03}],
    ids=str,
)  # fmt: skip
def test_adamw_has_the_constants_of_the_settings(changes: dict[str, Any]) -> None:
    """Against torch's own; vectors do not decay."""
    torch.manual_seed(0)
    mine, theirs = test_optim.Net(), test_optim.Net()
    theirs.load_state_dict(mine.state_dict())
    settings = replace(test_optim.config("adamw"), **changes)
    ours = Optimizers(mine, settings, fast_bf16=False)
    decaying, others = ([p for p in theirs.parameters() if (p.ndim < 2) == flat] for flat in (False, True))
    oracle = torch.optim.AdamW(
        [{"params": decaying, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=settings.learning_rate, betas=(settings.betas[0], settings.betas[1]), eps=settings.eps,
    )  # fmt: skip
    for step in range(4):
        ids = (torch.arange(20) * (step + 3)) % 11
        for model in (mine, theirs):
            model.zero_grad()
            model(ids).square().mean().backward()
        ours.step(1.0)
        oracle.step()
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_muon_decays_its_matrices_as_the_settings_say(decay: float) -> None:
    """Without a gradient to follow but one of zeros, a step only shrinks the weights."""
    model = test_optim.Net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers = Optimizers(model, replace(test_optim.config("muon"), weight_decay=decay), fast_bf16=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers.step(1.0)
    for name in ("hidden.0.weight", "hidden.1.weight"):
        torch.testing.assert_close(model.get_parameter(name), before[name] * (1 - 0.01 * decay))


class Counted(Rows):
    """Takes down how much of the validation split is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def evaluation(self, tokens: int) -> Iterator[Batch]:
        self.asked.append(tokens)
        return super().evaluation(tokens)


@pytest.mark.parametrize(("every", "steps"), [(3, [3, 6, 7]), (7, [7]), (100, [7])])
def test_so_many_tokens_are_evaluated_every_so_many_steps_and_at_the_end(
    every: int, steps: list[int], tmp_path: Path
) -> None:
    stream, at_work = Counted(), job(tmp_path)
    fit(Net(), stream, loss, config(steps=7, eval_steps=every, eval_tokens=40 + every), at_work)
    assert stream.asked == [40 + every] * len(steps)
    assert [row["step"] for row in at_work.tracker.rows if "val/loss" in row] == steps
