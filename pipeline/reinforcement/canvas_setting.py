"""The models of a reinforcement-learning run of masked diffusion on their device: `setting.py` for canvases.

What sampling, scoring and measuring need, as functions of completions. Divergences are estimates: they are formed from the coupled
scores of policy and reference under the same masks.
"""

import copy
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline import device
from pipeline.generation.denoising import Denoising
from pipeline.learning.objectives_policy import kl_k3
from pipeline.learning.ranks import Ranks
from pipeline.learning.reference import Start
from pipeline.learning.reference_masked import Following
from pipeline.model import lora
from pipeline.model.denoiser import Denoiser
from pipeline.reinforcement import canvases
from pipeline.reinforcement.answers import Prompt
from pipeline.reinforcement.canvases import CanvasAnswer, Coupling
from pipeline.reinforcement.rewards import Resources
from pipeline.reinforcement.setting import judge_or_none
from pipeline.sandbox.judge import Judge, SandboxConfig
from pipeline.work import Job

COMPARED, DRAWS = 32, 8  # completions, and masks of each, from which `variances` tells


class CanvasSetting:
    """Policy and reference of a run, and how they sample."""

    def __init__(self, model: Denoiser, start: Start, sampling: Denoising, coupling: Coupling, job: Job) -> None:
        self.start, self.sampling, self.coupling, self.seed, self.workers = (
            start,
            sampling,
            coupling,
            job.seed,
            job.workers,
        )
        self.sandbox_url = job.runtime.sandbox_url
        self.hardware = device.hardware(job.runtime.precision)
        self.ranks = Ranks(job.runtime.precision, str(job.folder))
        self.policy = model.to(self.hardware.device)
        self.following: Following | None = None  # the reference of the loss, where it is not the start itself

    def follow(self, *, every: int, folder: Path) -> Following:
        """From now on the loss compares with a reference that follows the policy."""
        frozen = copy.deepcopy(self.policy).train(False).requires_grad_(False)
        self.following = Following(frozen, self.policy, every=every, folder=folder)
        return self.following

    @property
    def precision(self) -> str:
        """fp32, bf16 or fp16."""
        return self.hardware.precision

    def sample(self, asked: Sequence[tuple[Prompt, int]]) -> list[Any]:
        """The policy's completions."""
        return self._answers(self.policy, asked, self.seed)

    def held_out(self, asked: Sequence[tuple[Prompt, int]], *, of_reference: bool = False, purpose: str = "held out") -> list[Any]:  # fmt: skip
        """Completions of held-out prompts by seeds of their own: the policy's, or the reference's."""
        seed = device.stable_hash(purpose, self.seed) % 2**62
        if not of_reference:
            return self._answers(self.policy, asked, seed)
        with self.start.reference.model(self.hardware.device) as frozen:
            return self._answers(frozen, asked, seed)

    def _answers(self, model: Any, asked: Sequence[tuple[Prompt, int]], seed: int) -> list[CanvasAnswer]:
        with self.hardware.autocast(), lora.folded_in(model.trunk):
            return canvases.sample(model, asked, self.start.tokenizer, self.sampling, seed)

    def scores(self, answers: Sequence[CanvasAnswer], iteration: int) -> list[np.ndarray]:
        """The policy's estimates under the masks of an iteration, (L,) each."""
        with self.hardware.autocast():
            return self.coupling.scores(self.policy, answers, iteration, self.hardware.device)

    def reference(self, answers: Sequence[CanvasAnswer], iteration: int) -> list[np.ndarray]:
        """The reference's of the loss."""
        if self.following is None:
            return self._at_start(answers, iteration)
        with self.hardware.autocast():
            return self.coupling.scores(self.following.model, answers, iteration, self.hardware.device)

    def _at_start(self, answers: Sequence[CanvasAnswer], iteration: int) -> list[np.ndarray]:
        """Those of the model that training began with."""
        with self.start.reference.model(self.hardware.device) as frozen, self.hardware.autocast():
            return self.coupling.scores(frozen, answers, iteration, self.hardware.device)

    def divergence(self, given: Sequence[CanvasAnswer]) -> tuple[float, float]:
        """The mean divergence from the start over completions, nats a completion: by k1 and by k3, both estimates."""
        pairs = zip(self.scores(given, 0), self._at_start(given, 0), strict=True)
        gaps = [torch.from_numpy(mine - theirs) for mine, theirs in pairs]
        k3 = [float(kl_k3(gap, torch.zeros_like(gap)).sum()) for gap in gaps]
        return float(np.mean([float(gap.sum()) for gap in gaps])), float(np.mean(k3))

    def variances(self, given: Sequence[CanvasAnswer]) -> dict[str, dict[str, float]]:
        """The variance of a completion's summed estimate over its masks, coupled and drawn apart; a mean over some completions."""
        found, some = dict[str, float](), given[:COMPARED]
        for name, coupling in (
            ("coupled", replace(self.coupling, shared_time=False)),
            ("apart", replace(self.coupling, apart=True)),
        ):
            with self.hardware.autocast():
                told = [coupling.scores(self.policy, some, draw, self.hardware.device) for draw in range(DRAWS)]
            sums = np.array([[values.sum() for values in one] for one in told])
            found[name] = float(sums.var(0, ddof=1).mean())
        return {"held_out_variance": found}

    def resources(self, judge: Judge | None) -> Resources:
        """What the rewards may use."""
        return Resources(max_new_tokens=self.sampling.length, judge=judge)

    def judge(self, sandbox: SandboxConfig, *, wanted: Collection[str]) -> AbstractContextManager[Judge | None]:
        """The sandbox for these rewards."""
        return judge_or_none(sandbox, self.workers, self.sandbox_url, wanted=wanted)
