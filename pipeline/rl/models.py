"""The models of a reinforcement-learning run, on one device and in one precision: policy, reference, critic, rewards.

    Setting               policy and reference, and how they are sampled
    ├── CausalSetting     for causal models: rlhf, grpo
    └── (CanvasSetting)   for masked-diffusion models: diffusion_grpo

A setting provides what a rollout needs, as functions of answers; `rollout.py` and `advantages.py` then need no model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from pipeline.generation.sampling import Sampling, sampler
from pipeline.ingest.records import Pair
from pipeline.learning import reference
from pipeline.learning.performance import load_operators
from pipeline.learning.policy_losses import kl_k3
from pipeline.learning.processes import Copies, Ranks
from pipeline.learning.reference import Start
from pipeline.model import checkpoint, lora
from pipeline.model.heads import RewardModel
from pipeline.model.transformer import Transformer
from pipeline.rl import answers
from pipeline.rl.answers import Answer, Generate, Prompt
from pipeline.rl.engine import MISMATCH, RolloutEngine
from pipeline.rl.rewards import Part, Preferred, Resources
from pipeline.rl.rollout import RolloutConfig
from pipeline.run import device
from pipeline.run.errors import ConfigError, SamplerError
from pipeline.run.tracking import say
from pipeline.run.workdir import Job, remove
from pipeline.sandbox.judge import Judge, RememberingJudge, SandboxConfig

M = TypeVar("M", bound=nn.Module)


class Setting(ABC):
    """Policy and reference of a run, and how they are sampled. A sample depends only on its prompt and index.

    If FSDP2 shards the policy, each process samples with a full copy (`processes.Copies`), in bf16 where that rounds
    only what autocast would round anyway.
    """

    policy: nn.Module  # the model being trained
    whole: nn.Module  # for sampling and scoring: the policy, or this process's full copy of it

    def __init__(self, start: Start, job: Job) -> None:
        self.start, self.seed, self.workers = start, job.seed, job.workers
        self.sandbox_url = job.runtime.sandbox_url
        self.hardware = device.hardware(job.runtime.precision, job.runtime.base_weights)
        self.ranks = Ranks(job.runtime.precision, str(job.folder))
        self.copies = Copies(self.ranks)

    def copied(self, model: M) -> M:
        """The model or, if it will be sharded, a full copy that is synchronized whenever answers are sampled."""
        has_adapter = bool(lora.adapters(model))
        return self.copies.of(model, lambda own: own if has_adapter else reference.narrowed(own, self.hardware))

    @property
    def precision(self) -> str:
        """fp32, bf16 or fp16."""
        return self.hardware.precision

    def sample(self, requests: Sequence[tuple[Prompt, int]]) -> list[Answer]:
        """Sample answers from the policy. Collective: all ranks must call it."""
        self.copies.refresh()
        return self._answers(self.whole, requests, self.seed)

    def held_out(
        self, requests: Sequence[tuple[Prompt, int]], *, of_reference: bool = False, purpose: str = "held out"
    ) -> list[Answer]:
        """Sample answers from the policy or the reference, with separate seeds for each `purpose`."""
        seed = device.stable_hash(purpose, self.seed) % 2**62
        self.copies.refresh()
        if not of_reference:
            return self._answers(self.whole, requests, seed)
        with self.start.reference.model(self.hardware.device) as frozen:
            return self._answers(frozen, requests, seed)

    @abstractmethod
    def _answers(self, model: nn.Module, requests: Sequence[tuple[Prompt, int]], seed: int) -> list[Answer]:
        """Sample answers from `model`, which is the policy or the reference."""

    @abstractmethod
    def divergence(self, batch: Sequence[Answer]) -> tuple[float, float]:
        """The mean divergence from the reference, in nats per answer, with the estimators k1 and k3."""

    def judge(self, sandbox: SandboxConfig, *, wanted: Collection[str]) -> AbstractContextManager[Judge | None]:
        """The sandbox for the rewards `wanted`; see `judge_or_none`."""
        return judge_or_none(sandbox, self.workers, self.sandbox_url, wanted=wanted)


class CausalSetting(Setting):
    """The setting for causal models, with an optional reward model."""

    policy: Transformer

    def __init__(
        self,
        start: Start,
        config: RolloutConfig,
        job: Job,
        reward_model: RewardModel | None = None,
        engine_for: Path | None = None,
    ) -> None:
        """`engine_for`: the model directory of a policy whose answers the engine at `runtime.sampler.url` samples.

        Raises ConfigError if there is no engine.
        """
        super().__init__(start, job)
        load_operators(job.runtime.compile, hardware=self.hardware, name=job.name)
        self.config = config
        self.policy = start.policy.to(self.hardware.device)
        self.whole = self.copied(self.policy)
        start.reference.read_from(self.whole)
        self.reward_model = None
        if reward_model is not None:
            self.reward_model = reference.narrowed(reward_model, self.hardware).to(self.hardware.device)
        self.pad = start.tokenizer.pad
        self._engine, self._engine_has, self._job, self._base = None, "", job, engine_for
        if engine_for is not None:
            if job.runtime.sampler_url is None:
                raise ConfigError("runtime.sampler.url: missing; `sampler: server` needs the address of an engine")
            self._engine = RolloutEngine(
                job.runtime.sampler_url,
                job.folder / "sampler",
                vocab_size=self.policy.config.vocab_size,
                stop=start.tokenizer.turn_end,
                max_new_tokens=config.max_new_tokens,
                temperature=config.temperature,
            )

    def close(self) -> None:
        """Disconnect from the engine, if any, and remove the published weights."""
        if self._engine is not None:
            self._engine.close()
            remove(self._engine.folder)

    def sample(self, requests: Sequence[tuple[Prompt, int]]) -> list[Answer]:
        """See `Setting.sample`. The policy rescores an engine's answers. Raises SamplerError on all ranks."""
        if self._engine is None:
            return super().sample(requests)
        self.copies.refresh()
        drawn, error = list[Answer](), None
        try:
            if self.ranks.rank == 0:
                self._publish(self._engine)
        except SamplerError as failure:
            error = failure
        published, error = self.ranks.gather((self._engine.fingerprint, error))[0]
        self._engine.fingerprint = published
        try:
            if error is None:
                drawn = self._drawn(self._engine.generate, requests, self.seed)
        except SamplerError as failure:
            error = failure
        if failed := next(filter(None, self.ranks.gather(error)), None):
            raise failed
        with self.hardware.autocast():
            own = answers.logprobs_of(self.whole, drawn, self.pad, self.config.temperature)
        return self._reread(drawn, own)

    def _reread(self, drawn: Sequence[Answer], own: Sequence[np.ndarray]) -> list[Answer]:
        """The engine's answers with the policy's log-probabilities. Raises SamplerError on all ranks if, on any rank,
        these are far from the engine's.
        """
        assert self._engine is not None
        both = [
            replace(answer, logprobs=logprobs.tolist(), sampled=answer.logprobs)
            for answer, logprobs in zip(drawn, own, strict=True)
        ]
        differences = [
            abs(a - b) for answer in both for a, b in zip(answer.logprobs, answer.sampled or [], strict=True)
        ]
        mean = self.ranks.greatest(float(np.mean(differences)) if differences else 0.0)
        if mean > MISMATCH:
            raise SamplerError(
                f"runtime.sampler.url: the log-probabilities of the engine at {self._engine.url} differ from the"
                f" policy's by {mean:.2f} nats per token (at most {MISMATCH} allowed): it uses different weights, or"
                " does not report log-probabilities at the sampling temperature"
            )
        return both

    def _publish(self, engine: RolloutEngine) -> None:
        """Have the engine load the policy's weights, unless they are already loaded. Raises SamplerError."""
        digest = checkpoint.weights_digest(self.whole)
        if digest != self._engine_has:
            engine.publish(self._write)
            self._engine_has = digest

    def _write(self, folder: Path) -> str:
        """Write the policy for the engine, in its compute precision. Returns the digest of the weights."""
        assert self._base is not None and isinstance(self.whole, Transformer)
        remove(folder)
        reference.save_merged(self.whole, self.start.tokenizer, self._job, self._base, folder, self.precision)
        return checkpoint.weights_digest(checkpoint.load(folder)[0])

    def _answers(self, model: nn.Module, requests: Sequence[tuple[Prompt, int]], seed: int) -> list[Answer]:
        assert isinstance(model, Transformer), type(model)
        sampling = Sampling(self.config.max_new_tokens, temperature=self.config.temperature)
        with self.hardware.autocast(), lora.folded_in(model):
            generate = sampler(model, sampling, {self.start.tokenizer.turn_end})
            return self._drawn(generate, requests, seed)

    def _drawn(self, generate: Generate, requests: Sequence[tuple[Prompt, int]], seed: int) -> list[Answer]:
        """Draw answers with a sampler."""
        return answers.sample(generate, requests, self.start.tokenizer, seed)

    def reference(self, batch: Sequence[Answer]) -> list[np.ndarray]:
        """The reference's log-probabilities of each answer's tokens."""
        with self.start.reference.model(self.hardware.device) as frozen, self.hardware.autocast():
            return answers.logprobs_of(frozen, batch, self.pad, self.config.temperature)

    def divergence(self, batch: Sequence[Answer]) -> tuple[float, float]:
        pairs = zip(batch, self.reference(batch), strict=True)
        ratios = [torch.from_numpy(np.array(answer.logprobs) - frozen) for answer, frozen in pairs]
        k3 = [float(kl_k3(ratio, torch.zeros_like(ratio)).sum()) for ratio in ratios]
        return float(np.mean([float(ratio.sum()) for ratio in ratios])), float(np.mean(k3))

    def values(self, critic: RewardModel, batch: Sequence[Answer]) -> list[np.ndarray]:
        """The critic's value before each token of each answer."""
        with self.hardware.autocast():
            return answers.values_of(critic, batch, self.pad)

    def learned(self, batch: Sequence[Answer]) -> np.ndarray:
        """The reward model's normalized scores, (n,)."""
        assert self.reward_model is not None
        with self.hardware.autocast():
            return self.reward_model.normalized(answers.raw_rewards(self.reward_model, batch, self.pad)).numpy()

    def preferred(self, prompts: Sequence[Prompt]) -> Preferred:
        """A comparison of answers to these prompts with the reference's own answers."""
        assert self.reward_model is not None
        std = self.reward_model.reward_std
        comparison = Preferred(lambda batch: self.learned(batch) * std)
        seed = device.stable_hash("preferred", self.seed) % 2**62
        with self.start.reference.model(self.hardware.device) as frozen:
            comparison.ask(prompts, lambda requests: self._answers(frozen, requests, seed))
        return comparison

    def resources(
        self,
        judge: Judge | None,
        call_score: Callable[[Pair, str], float] | None = None,
        preferred: Preferred | None = None,
        task: Part | None = None,
    ) -> Resources:
        """The resources needed by the rewards."""
        return Resources(
            max_new_tokens=self.config.max_new_tokens,
            judge=judge,
            call_score=call_score,
            learned=self.learned if self.reward_model else None,
            preferred=preferred,
            task=task,
        )


@contextmanager
def judge_or_none(
    sandbox: SandboxConfig, workers: int, url: str | None, *, wanted: Collection[str] = ()
) -> Iterator[Judge | None]:
    """The sandbox, which runs each distinct answer only once.

    None if no sandbox is available; true scores of code then stay empty. Raises ConfigError instead if a reward runs
    code ("code" or "task" in `wanted`).
    """
    judge = RememberingJudge(sandbox, workers, url=url)
    try:
        judge.__enter__()
    except ConfigError as error:
        if "code" in wanted or "task" in wanted:
            raise
        say(f"no sandbox available, so answers with code get no true score: {error}")
        yield None
        return
    try:
        yield judge
    finally:
        judge.__exit__(None, None, None)
