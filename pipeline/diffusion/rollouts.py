"""Rollouts of a masked-diffusion policy in reinforcement learning: sampling, scoring and batching completions.

    prompts --denoise--> CanvasAnswer --three masks per inner iteration--> old and reference scores --> CoupledBatch

A completion is an entire canvas; tokens after its first end of turn stay in the input but are excluded from the loss.
Each inner iteration over a rollout has its own masks, keyed by (seed, problem, sample, rollout * inner iterations +
inner), and the old and reference scores under all these masks are computed before the first update (coupled-GRPO; Gong
et al. 2025, arXiv:2506.20639, section 4). If the first inner iteration is a single update, its old scores are those of
the training pass itself: a separate pass would compute the same values.

`CanvasSetting` holds a run's models on their device, and samples, scores and measures completions, as
`rl.models.CausalSetting` does for causal models. Its divergences are estimates from the coupled scores of policy and
reference under the same masks.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.batches.batch import PADDING
from pipeline.diffusion import masks as diffusion_masks
from pipeline.diffusion import training
from pipeline.diffusion.masks import CoupledBatch
from pipeline.diffusion.model import Denoiser
from pipeline.diffusion.sampling import Denoising, denoise
from pipeline.diffusion.training import Following
from pipeline.learning.policy_losses import kl_k3
from pipeline.learning.reference import Start
from pipeline.model import lora
from pipeline.rl.answers import Answer, Prompt, split_rows
from pipeline.rl.models import Setting
from pipeline.rl.rollout import Rollout, RolloutStream
from pipeline.run.types import JsonObject
from pipeline.run.workdir import Job
from pipeline.text.tokenizer import Tokenizer

ROWS = 16  # per scoring pass
COMPARED, DRAWS = 32, 8  # completions, and masks per completion, for `CanvasSetting.variances`


@dataclass(frozen=True)
class CanvasAnswer(Answer):
    """A completion with its canvas; `ids` end with the first end of turn."""

    canvas: tuple[int, ...] = ()
    forwards: int = 0


def sample(
    model: Denoiser, requests: Sequence[tuple[Prompt, int]], tokenizer: Tokenizer, settings: Denoising, seed: int
) -> list[CanvasAnswer]:
    """A completion for each (prompt, sample index); its noise depends only on (seed, prompt, sample index)."""
    seeds = [diffusion_masks.key(seed, "rollout", f"{prompt.id}/{number}", 0) for prompt, number in requests]
    generations = denoise(model, [prompt.ids for prompt, _ in requests], settings, seeds)
    answers = []
    for (prompt, number), generation in zip(requests, generations, strict=True):
        finished = generation.stop == "stop"
        ids = list(generation.canvas[: len(generation.ids) + finished])  # including the end of turn
        text, canvas = tokenizer.decode(generation.ids), tuple(generation.canvas)
        answers.append(CanvasAnswer(prompt, number, ids, [0.0] * len(ids), finished, text, canvas, generation.forwards))
    return answers


def _canvas_answers(answers: Sequence[Answer]) -> list[CanvasAnswer]:
    """The answers of a `CanvasSetting`; all have a canvas."""
    canvas_answers = [answer for answer in answers if isinstance(answer, CanvasAnswer)]
    assert len(canvas_answers) == len(answers), "expected answers with a canvas"
    return canvas_answers


@dataclass(frozen=True, kw_only=True)
class Coupling:
    """How completions are masked and scored."""

    seed: int
    inner: int  # iterations over a rollout
    fill: int
    released: bool = False  # estimates as published: 1.5 times as large
    shared_time: bool = False  # one time for all completions of a step
    apart: bool = False  # two independent masks, for comparison

    def batch(
        self,
        answers: Sequence[CanvasAnswer],
        iteration: int,
        *,
        old: Sequence[np.ndarray] | None = (),
        rows: int = 0,
        arrays: dict[str, list[np.ndarray]] | None = None,
        fresh: bool = False,
    ) -> CoupledBatch:
        """Completions under the masks of an iteration, padded to `rows` rows. If `old` is None, the training pass's
        own scores are used.
        """
        count = max(rows, len(answers))
        width = max((len(answer.prompt.ids) + len(answer.canvas) for answer in answers), default=2)
        shape = (count, width)
        tokens, documents = np.full(shape, self.fill, dtype=np.int64), np.full(shape, PADDING, dtype=np.int32)
        canvas, counted, first, second = (np.zeros(shape, dtype=bool) for _ in range(4))
        times = np.full(count, 0.5, dtype=np.float32)
        for n, answer in enumerate(answers):
            begin, end = len(answer.prompt.ids), len(answer.prompt.ids) + len(answer.canvas)
            tokens[n, :end] = [*answer.prompt.ids, *answer.canvas]
            documents[n, :end] = 0
            canvas[n, begin:end], counted[n, begin : begin + len(answer.ids)] = True, True
            masks = self.masks(answer, iteration)
            first[n, begin:end], second[n, begin:end], times[n] = masks.first, masks.second, masks.t
        documents[len(answers) :, :2] = 0  # a padding row must have some tokens
        positions = np.where(documents == 0, np.arange(width), 0)
        lengths = counted.sum(1)
        return CoupledBatch(
            *(torch.from_numpy(x) for x in (tokens, documents, positions, canvas, counted, first, times)),
            row_of=torch.repeat_interleave(torch.arange(count), torch.from_numpy(lengths)),
            old=None if old is None else _concatenate(old),
            arrays={name: _concatenate(values) for name, values in (arrays or {}).items()},
            counts={
                "tokens": int(lengths.sum()),
                "sequences": len(answers),
                "positions": 3 * int((documents >= 0).sum()),
            },
            fresh=fresh,
            second=torch.from_numpy(second) if self.apart else None,
        )

    def masks(self, answer: CanvasAnswer, iteration: int) -> diffusion_masks.Coupled:
        """The two masks of a completion's canvas, each token under exactly one (except with `apart`)."""
        key = diffusion_masks.key(self.seed, "coupled", f"{answer.prompt.id}/{answer.sample}", iteration)
        shared = diffusion_masks.key(self.seed, "coupled", "batch", iteration) if self.shared_time else None
        if self.apart:
            return diffusion_masks.apart(key, len(answer.canvas))
        return diffusion_masks.coupled(key, len(answer.canvas), shared)

    def scores(
        self, model: nn.Module, answers: Sequence[CanvasAnswer], iteration: int, where: torch.device
    ) -> list[np.ndarray]:
        """Estimated log-probabilities of each completion's counted tokens, (L,) each, with the training operations."""
        scores: list[np.ndarray] = []
        was_training = model.training
        model.train(True)  # under checkpointing, which keeps only ids and masks
        with torch.enable_grad():
            for first in range(0, len(answers), ROWS):
                batch = self.batch(answers[first : first + ROWS], iteration).to(where)
                logprobs = training.coupled_logprobs(model, batch, released=self.released).detach()
                scores += split_rows(logprobs.cpu().numpy(), batch.counted.sum(1).tolist())
        model.train(was_training)
        return scores


Score = Callable[[Sequence[CanvasAnswer], int], list[np.ndarray]]  # (completions, iteration) -> (L,) each


def annotate(
    rollouts: list[Rollout],
    *,
    inner: int,
    rollout: int,
    policy: Score,
    reference: Score | None,
    own_first: bool = False,
) -> None:
    """Add the old and reference scores for every inner iteration of a rollout, before its first update.

    `own_first`: the first inner iteration is a single update that computes its old scores itself. The first rollout is
    still scored, because the first step's gate compares these scores with those of the training pass.
    """
    answers = _canvas_answers([entry.answer for entry in rollouts])
    for number in range(inner):
        iteration = rollout * inner + number
        for name, score in (("old", policy), ("reference", reference)):
            if own_first and rollout and (name, number) == ("old", 0):
                continue
            if score is not None:
                for entry, values in zip(rollouts, score(answers, iteration), strict=True):
                    entry.arrays[f"{name}/{number}"] = values


class CanvasRollouts(RolloutStream):
    """Minibatches of completions; each pass over a rollout is an inner iteration, with its own masks."""

    coupling: Coupling
    following: Following | None = None  # a reference that follows the policy
    at: int = 0  # the current iteration

    def fill(self, step: int) -> dict[str, float]:
        """Like `RolloutStream.fill`; adds the variance of a completion's estimate over the inner iterations."""
        if self.following is not None:
            self.following.before(step)
        self.at = step // self.steps_per_rollout
        metrics = super().fill(step)
        return metrics | variance(self.rollouts, self.coupling.inner)

    def batch(self, step: int, context: int, rows: np.ndarray) -> CoupledBatch:  # pyright: ignore[reportIncompatibleMethodOverride]
        """These rollouts, masked for the step's inner iteration."""
        iteration, within = divmod(step, self.steps_per_rollout)
        inner = within // self.config.minibatches
        entries = [self.rollouts[int(row)] for row in rows if row >= 0]
        arrays = {"advantages": [entry.arrays["advantages"] for entry in entries]}
        if f"reference/{inner}" in (self.rollouts[0].arrays if self.rollouts else {}):
            arrays["reference"] = [entry.arrays[f"reference/{inner}"] for entry in entries]
        has_old = not self.rollouts or f"old/{inner}" in self.rollouts[0].arrays
        return self.coupling.batch(
            _canvas_answers([entry.answer for entry in entries]),
            iteration * self.coupling.inner + inner,
            old=[entry.arrays[f"old/{inner}"] for entry in entries] if has_old else None,
            rows=len(rows),
            arrays=arrays,
            fresh=within == 0,
        )

    def state(self) -> JsonObject:
        """State for resuming, apart from the weights; includes the state of a `Following` reference."""
        return super().state() | ({"following": self.following.state()} if self.following else {})

    def load_state(self, state: JsonObject) -> None:
        """Restore the result of `state`."""
        super().load_state(state)
        if self.following:
            self.following.load(state["following"])


def variance(rollouts: Sequence[Rollout], inner: int) -> dict[str, float]:
    """Unbiased variance of a completion's summed estimate over the inner iterations' masks, averaged over completions.

    Needs at least two iterations with old scores: nothing is scored just for this metric.
    """
    names = [f"old/{number}" for number in range(inner) if rollouts and f"old/{number}" in rollouts[0].arrays]
    if len(names) < 2:
        return {}
    sums = np.array([[entry.arrays[name].sum() for name in names] for entry in rollouts])
    return {"coupled/variance": float(sums.var(1, ddof=1).mean())}


def _concatenate(arrays: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([*arrays, np.zeros(0)]).astype(np.float32))


class CanvasSetting(Setting):
    """Policy and reference of a run, and how they sample."""

    policy: Denoiser

    def __init__(self, model: Denoiser, start: Start, sampling: Denoising, coupling: Coupling, job: Job) -> None:
        super().__init__(start, job)
        self.sampling, self.coupling = sampling, coupling
        self.policy = model.to(self.hardware.device)
        self.whole = self.copied(self.policy)
        start.reference.read_from(self.whole)
        self.following: Following | None = None  # the reference of the loss, if it is not the start model

    def follow(self, *, every: int, folder: Path) -> Following:
        """Replace the loss's reference with one that follows the policy."""
        frozen = copy.deepcopy(self.policy).train(False).requires_grad_(False)
        self.following = Following(frozen, self.policy, every=every, folder=folder)
        return self.following

    def _answers(self, model: nn.Module, requests: Sequence[tuple[Prompt, int]], seed: int) -> list[Answer]:
        assert isinstance(model, Denoiser), "a reference of masked diffusion is a Denoiser"
        with self.hardware.autocast(), lora.folded_in(model.trunk):
            return list(sample(model, requests, self.start.tokenizer, self.sampling, seed))

    def scores(self, answers: Sequence[CanvasAnswer], iteration: int) -> list[np.ndarray]:
        """The policy's estimates under the masks of an iteration, (L,) each."""
        with self.hardware.autocast():
            return self.coupling.scores(self.whole, answers, iteration, self.hardware.device)

    def reference(self, answers: Sequence[CanvasAnswer], iteration: int) -> list[np.ndarray]:
        """Like `scores`, for the reference of the loss."""
        if self.following is None:
            return self._start_scores(answers, iteration)
        with self.hardware.autocast():
            return self.coupling.scores(self.following.model, answers, iteration, self.hardware.device)

    def _start_scores(self, answers: Sequence[CanvasAnswer], iteration: int) -> list[np.ndarray]:
        """Like `scores`, for the model that training started from."""
        with self.start.reference.model(self.hardware.device) as frozen, self.hardware.autocast():
            return self.coupling.scores(frozen, answers, iteration, self.hardware.device)

    def divergence(self, batch: Sequence[Answer]) -> tuple[float, float]:
        """Like `Setting.divergence`, relative to the start model; both numbers are estimates."""
        answers = _canvas_answers(batch)
        pairs = zip(self.scores(answers, 0), self._start_scores(answers, 0), strict=True)
        differences = [torch.from_numpy(policy - start) for policy, start in pairs]
        k3 = [float(kl_k3(difference, torch.zeros_like(difference)).sum()) for difference in differences]
        return float(np.mean([float(difference.sum()) for difference in differences])), float(np.mean(k3))

    def variances(self, given: Sequence[Answer]) -> dict[str, dict[str, float]]:
        """The variance of a completion's summed estimate over coupled and over independent masks, averaged over the
        first COMPARED completions.
        """
        variances, answers = dict[str, float](), _canvas_answers(given[:COMPARED])
        for name, coupling in (
            ("coupled", replace(self.coupling, shared_time=False)),
            ("apart", replace(self.coupling, apart=True)),
        ):
            with self.hardware.autocast():
                draws = [coupling.scores(self.whole, answers, draw, self.hardware.device) for draw in range(DRAWS)]
            sums = np.array([[values.sum() for values in scores] for scores in draws])
            variances[name] = float(sums.var(0, ddof=1).mean())
        return {"held_out_variance": variances}
