"""Stage diffusion_grpo: reinforcement learning of a masked-diffusion model from executed code.

    models/diffusion + data/problems (prompts, hidden tests) -> models/diffusion_grpo
        (coupled-GRPO; Gong et al. 2025, DiffuCoder, arXiv:2506.20639)

The stage samples groups of completions on canvases of equal length. A completion's log-probabilities are estimated
under pairs of complementary masks: each token is masked in exactly one of the two, so every token is scored with some
of the others visible. Generated code runs only in the sandbox.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pipeline.diffusion import files, sampling, training
from pipeline.diffusion import rollouts as diffusion_rollouts
from pipeline.diffusion.masks import CoupledBatch
from pipeline.diffusion.model import Denoiser
from pipeline.diffusion.rollouts import CanvasRollouts, CanvasSetting, Coupling
from pipeline.diffusion.sampling import Denoising, EncodedPrompt
from pipeline.evaluation import solving
from pipeline.ingest import records
from pipeline.ingest.records import Problem
from pipeline.learning import policy_losses, reference
from pipeline.learning.fit import Watchers, fit
from pipeline.learning.losses import Loss
from pipeline.learning.policy_losses import Clip, GroupMethod
from pipeline.model import checkpoint
from pipeline.model.lora import AdapterConfig
from pipeline.rl import advantages, answers
from pipeline.rl.rewards import Resources, Scorer
from pipeline.rl.rollout import Method, RolloutConfig, alarms_of, watch_alarms
from pipeline.run import device
from pipeline.run.config import block
from pipeline.run.stage import main
from pipeline.run.tracking import write_json
from pipeline.run.workdir import Job
from pipeline.sandbox.judge import SandboxConfig

ADVANTAGES = {"loo": "others", "mean": "centered"}


@dataclass(frozen=True, kw_only=True)
class Params:
    """The `diffusion_grpo` block; its training keys are those of RolloutConfig. `epochs` counts inner iterations."""

    base: str = "diffusion"
    """Model to start from: a folder in models/, or `base` for your own checkpoint (stage base)."""
    rewards: dict[str, float]
    """Weight of each reward, by name: code, code_format, length."""
    difficulty: str = "frontier"
    """Problems to use: frontier (20% to 80% of 8 samples pass, and not all of the first 4 agree), all, or a group."""
    frontier_problems: int = 1000
    """Problems sampled to find the frontier."""
    denoising_steps: int
    """Forward passes per completion, at most its length."""
    threshold: float | None = None
    """Unmask all tokens with at least this probability at once, to save passes; none: follow `denoising_schedule`."""
    top_p: float = 1.0
    """Nucleus sampling: total probability of the tokens to sample from; 1: all tokens."""
    order: str = "entropy"
    """Which tokens to unmask first."""
    denoising_schedule: str = "balanced"
    """Schedule for how many tokens each step unmasks: balanced or dream."""
    confidence: str = "raw"
    """raw: the model's own probabilities; tempered: those after applying temperature and top_p."""
    estimator: str = "normalized"
    """released: as published, with mean 1.5 log p; normalized: the same times 2/3."""
    advantage: str = "loo"
    """Baseline for a completion: loo (mean over the other completions in its group) or mean (over all of them)."""
    t_scope: str = "sample"
    """sample: one timestep per completion; batch: one timestep for all completions."""
    clip_low: float = 0.5
    """Ratios are clipped to at least 1 - clip_low."""
    clip_high: float = 0.5
    """Ratios are clipped to at most 1 + clip_high."""
    beta: float = 0.01
    """Weight of the KL penalty toward the reference."""
    ref_sync: int = 0
    """Steps between updates of the reference to 0.6 policy + 0.4 reference; 0: no updates."""
    held_out: solving.SolvingConfig = field(default_factory=solving.SolvingConfig)
    adapter: AdapterConfig | None = None
    """{rank, alpha, ...}: train only an adapter and merge it at the end."""
    sandbox: SandboxConfig = block("sandbox")
    fit: RolloutConfig

    def __post_init__(self) -> None:
        options = {
            "estimator": ("normalized", "released"),
            "advantage": tuple(ADVANTAGES),
            "t_scope": ("sample", "batch"),
        }
        for name, values in options.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}: expected one of {', '.join(values)}, got {getattr(self, name)!r}")
        if self.fit.samples < 2:
            raise ValueError(
                f"samples: expected at least 2, got {self.fit.samples}; each problem's completions are compared"
                " with one another"
            )
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0 or self.beta < 0 or self.ref_sync < 0:
            raise ValueError("expected clip_low in [0, 1], clip_high >= 0, beta >= 0 and ref_sync >= 0")
        if self.ref_sync and (self.adapter is not None or not self.beta):
            raise ValueError(
                "ref_sync: expected 0 with an adapter, whose reference is its base model, and with `beta: 0`, which"
                " uses no reference"
            )
        if self.fit.learning_rate and not self.rewards:
            raise ValueError("rewards: expected at least one of code, code_format, length")
        _ = self.sampling  # runs the checks of Denoising

    @property
    def sampling(self) -> Denoising:
        """How completions are sampled."""
        return Denoising(
            length=self.fit.max_new_tokens,
            steps=self.denoising_steps,
            temperature=self.fit.temperature,
            top_p=self.top_p,
            order=self.order,
            schedule=self.denoising_schedule,
            confidence=self.confidence,
            threshold=self.threshold,
        )

    @property
    def method(self) -> GroupMethod:
        """The stage's policy loss as a group method: all counted tokens of a step have equal weight."""
        return GroupMethod(
            advantage=ADVANTAGES[self.advantage],
            normalizer="tokens",
            clip=Clip(self.clip_low, self.clip_high),
            beta=self.beta,
            kl_in="loss",
        )


def run(params: Params, job: Job, *, base: Path, problems: Path, out: Path, samples: Path, trace: Path) -> None:
    """Train the policy on the execution results of its code and save the model directory `out`."""
    if records.is_empty(problems / "rl.jsonl"):
        samples.touch()
        write_json(trace, {"settings": {}, "prompts": []})
        return checkpoint.pass_through(base, out, job, problems)
    config, method = params.fit, params.method
    hardware = device.hardware(job.runtime.precision, job.runtime.base_weights)
    model, start = training.begin(base, params.adapter, job.seed, hardware)
    start.reference.parked = not method.beta
    config.check_context(model)
    coupling = Coupling(
        seed=job.seed,
        inner=config.epochs,
        fill=model.traits.fill,
        released=params.estimator == "released",
        shared_time=params.t_scope == "batch",
    )
    setting = CanvasSetting(model, start, params.sampling, coupling, job)
    prompts, validation_prompts = (
        answers.problem_prompts(
            list(records.read(problems / f"{split}.jsonl", Problem)), start.tokenizer, config.max_prompt
        )
        for split in ("rl", "val")
    )
    with setting.judge(params.sandbox, wanted=params.rewards) as judge:
        prompts = solving.chosen(prompts, params.difficulty, params.frontier_problems, setting, judge, job.folder)
        stream = CanvasRollouts(
            prompts,
            config,
            Method(
                sample=setting.sample,
                score=Scorer(params.rewards, Resources(max_new_tokens=config.max_new_tokens, judge=judge)),
                annotate=lambda rollouts: diffusion_rollouts.annotate(
                    rollouts,
                    inner=config.epochs,
                    rollout=stream.at,
                    policy=setting.scores,
                    reference=setting.reference if method.beta else None,
                    own_first=config.minibatches == 1,
                ),
                estimate=partial(advantages.estimate_group, method=method, samples=config.samples),
            ),
            pad=start.tokenizer.pad,
            seed=job.seed,
            ranks=setting.ranks,
        )
        stream.coupling = coupling
        held_out = solving.HeldOutProblems(
            validation_prompts, setting, solving.verdicts_of(judge), params.held_out, more=setting.variances
        )
        if params.ref_sync:
            stream.following = setting.follow(every=params.ref_sync, folder=job.folder)
        gate = training.first_policy(setting.precision)
        watchers = Watchers(first=gate, evaluate=held_out.row, logged=watch_alarms(job.name), gradients_at=None)
        fit(model, stream, partial(loss, method=method, params=params), config, job, watchers=watchers)
        solving_report = held_out.report()  # before `finish`, which also merges an adapter into the reference
        held_out.write_samples(samples)
        job.report(
            **reference.finish(start, base), **solving_report, prompts=len(prompts), alarms=alarms_of(job.tracker.rows)
        )
    files.save(out, model, start.tokenizer, job.lineage)
    traced = [
        EncodedPrompt(prompt.id, getattr(prompt.record, "question", ""), prompt.ids) for prompt in validation_prompts
    ]
    sampling.write([out / "trace.json", trace], model, start.tokenizer, traced, length=config.max_new_tokens)


def loss(model: Denoiser, batch: CoupledBatch, *, method: GroupMethod, params: Params) -> Loss:
    """The clipped policy-gradient loss on the coupled estimates."""
    logprobs = training.coupled_logprobs(model, batch, released=params.estimator == "released")
    return policy_losses.group_policy(
        logprobs,
        -logprobs.detach(),
        old=logprobs.detach() if batch.old is None else batch.old,
        advantages=batch.arrays["advantages"],
        reference=batch.arrays.get("reference"),
        row_of=batch.row_of,
        num_rows=len(batch.tokens),
        method=method,
        max_tokens=params.fit.max_new_tokens,
    )


if __name__ == "__main__":
    main(
        run,
        inputs={"base": "models/{base}", "problems": "data/problems"},
        outs={
            "out": "models/diffusion_grpo",
            "samples": "metrics/samples/diffusion_grpo.jsonl",
            "trace": "metrics/traces/diffusion_grpo.json",
        },
        trains=True,
    )
