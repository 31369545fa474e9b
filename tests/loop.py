"""What the tests of `fit` share: a small net and rows that it learns, jobs, and interrupted runs."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.learning import losses
from pipeline.learning.fit import Watchers
from pipeline.learning.losses import Loss, Term
from pipeline.learning.settings import FitConfig
from pipeline.learning.states import weights_of
from pipeline.run import device
from pipeline.run.config import Runtime
from pipeline.run.tracking import Tracker
from pipeline.run.workdir import Job, StopRequest
from tests.settings import flat
from tests.stopping import Stopped, before


class Batch:
    def __init__(self, ids: torch.Tensor, targets: torch.Tensor) -> None:
        self.ids, self.targets = ids, targets
        num_targets = int((targets >= 0).sum())
        self.counts = {"tokens": num_targets, "bytes": 3 * num_targets}

    def to(self, where: Any) -> "Batch":
        return self


class Rows:
    """Rows of random tokens with a pattern to learn; every third target is untrained, so rows have unequal counts."""

    fingerprint = "toy"
    tokens_per_epoch = 640
    rows_seen: list[list[int]]

    def __init__(self, poison: int = -1) -> None:
        self.poison, self.rows_seen = poison, []

    def rows(self, step: int, context: int) -> np.ndarray:
        return np.arange(6) + 6 * step

    def batch(self, step: int, context: int, rows: np.ndarray) -> Batch:
        self.rows_seen.append(rows.tolist())
        made = [self.row(int(row), context) for row in rows]
        return Batch(torch.stack([a for a, _ in made]), torch.stack([b for _, b in made]))

    def row(self, row: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(0, 13, (context,), generator=device.generator("toy", row))
        targets = (ids * 3 + 1) % 13
        targets[:: 2 + row % 3] = -100
        if row // 6 == self.poison:
            ids = torch.full_like(ids, 13)  # the embedding's row of NaN
        return ids, targets

    def evaluation(self, tokens: int) -> Iterator[Batch]:
        for row in range(10_000, 10_003):
            ids, targets = self.row(row, 8)
            yield Batch(ids[None], targets[None])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed_tokens = nn.Embedding(14, 16)
        self.hidden = nn.Linear(16, 16, bias=False)
        self.lm_head = nn.Linear(16, 13, bias=False)
        with torch.no_grad():
            self.embed_tokens.weight[13] = float("nan")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(torch.relu(self.hidden(self.embed_tokens(ids))))


class Dropping(Net):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(nn.functional.dropout(self.hidden(self.embed_tokens(ids)), 0.3, self.training))


def loss(model: nn.Module, batch: Batch) -> Loss:
    chosen = batch.targets >= 0
    total = losses.next_token(model(batch.ids)[chosen], torch.eye(13), batch.targets[chosen])  # already logits
    return Loss([Term("loss", total)])


def config(**changes: Any) -> FitConfig:
    values: dict[str, Any] = {
        "steps": 12,
        "tokens_per_step": 48,
        "context": 8,
        "learning_rate": 0.02,
        "eval_steps": 4,
        "warmup_steps": 2,
        "optimizer": "muon",
    }
    return flat(FitConfig, **(values | changes))


def job(folder: Path, **runtime: Any) -> Job:
    folder.mkdir(parents=True, exist_ok=True)
    return Job(
        stage="toy",
        item=None,
        key="k",
        seed=1,
        folder=folder,
        workers=1,
        runtime=Runtime(**({"logging_steps": 3, "precision": "fp32"} | runtime)),
        tracker=Tracker("toy", folder, {}, {}, quiet=True),
        lineage={},
        stop=StopRequest(),
    )


def equal(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(weights_of(a).values(), weights_of(b).values(), strict=True)
    return all(torch.equal(x.nan_to_num(9), y.nan_to_num(9)) for x, y in pairs)


SPIKE = 1e4  # the factor on a spiking batch's loss


class Spiking(Rows):
    """Rows whose batches at some indices have a loss that spikes."""

    tokens_per_epoch = 48 * 1000

    def __init__(self, at: tuple[int, ...], factor: float = SPIKE) -> None:
        super().__init__()
        self.at, self.factor = at, factor
        self.indices: list[int] = []

    def batch(self, step: int, context: int, rows: np.ndarray) -> Batch:
        made = super().batch(step, context, rows)
        if step not in self.indices[-1:]:
            self.indices.append(step)
        made.factor = self.factor if step in self.at else 1.0  # type: ignore[attr-defined]
        return made


def spiking_loss(model: nn.Module, batch: Batch) -> Loss:
    found = loss(model, batch)
    factor = getattr(batch, "factor", 1.0)
    return Loss([replace(term, sum=term.sum * factor) for term in found.terms])


def killed_and_resumed(
    folder: Path, kill_at: tuple[int, ...], run: Callable[[Job, Watchers | None], nn.Module]
) -> None:
    """Check that `run`, stopped before some step and resumed, ends with the same weights, curve and numbers."""
    first = job(folder / "whole")
    whole = run(first, None)
    for step in kill_at:
        with pytest.raises(Stopped):
            run(job(folder / str(step), save_steps=1), before(step))
        second = job(folder / str(step))
        again = run(second, None)
        assert equal(whole, again), step
        assert second.tracker.rows == first.tracker.rows and second.tracker.final == first.tracker.final


class Windows(Rows):
    """Rows of eight tokens, split into windows of a shorter context; each target depends on its own token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.tokens: list[int] = []

    def rows(self, step: int, context: int) -> np.ndarray:
        return np.arange(6 * 8 // context) + step * 6 * 8 // context

    def batch(self, step: int, context: int, rows: np.ndarray) -> Batch:
        whole = torch.stack([self.row(int(row) * context // 8, 8)[0] for row in rows])
        parts = torch.stack([row[int(r) * context % 8 :][:context] for row, r in zip(whole, rows, strict=True)])
        self.shapes.append(tuple(parts.shape))
        self.tokens += parts.flatten().tolist()
        return Batch(parts, (parts * 3 + 1) % 13)
