"""Stage grpo: reinforcement learning from executed code, with groups of answers instead of a critic.

    models/tools + data/problems (prompts, hidden tests) -> models/grpo     (Shao et al. 2024, arXiv:2402.03300)

`grpo.method` is one of GRPO, Dr. GRPO, DAPO, GSPO, RLOO, REINFORCE++ (learning/policy_losses.METHODS); a key that is
null has the method's own value. Answers run only in the sandbox; without one the stage refuses to start.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from pipeline.evaluation import solving
from pipeline.ingest import records
from pipeline.ingest.records import Problem
from pipeline.learning import gates, reference
from pipeline.learning.fit import Watchers, fit
from pipeline.learning.policy_losses import METHODS, Clip, GroupMethod
from pipeline.model import checkpoint
from pipeline.model.lora import AdapterConfig
from pipeline.rl import advantages, answers
from pipeline.rl.models import CausalSetting
from pipeline.rl.rewards import Scorer
from pipeline.rl.rollout import Method, RolloutConfig, RolloutStream, alarms_of, group_loss, watch_alarms
from pipeline.run import device
from pipeline.run.config import block
from pipeline.run.stage import main
from pipeline.run.workdir import Job
from pipeline.sandbox.judge import SandboxConfig


@dataclass(frozen=True, kw_only=True)
class Params:
    """The block `grpo`; its training keys are those of RolloutConfig."""

    base: str = "tools"
    """Where training begins: a model of models/; base: a checkpoint of your own (stage base)."""
    method: str
    """grpo, dr_grpo, dapo, gspo, rloo, reinforce_pp."""
    rewards: dict[str, float]
    """name: weight; code, code_format, length."""
    clip_low: float | None = None
    """Ratios are clipped to at least 1 - clip_low; none: the method's own value."""
    clip_high: float | None = None
    """Ratios are clipped to at most 1 + clip_high."""
    beta: float | None = None
    """Weight of the divergence from the reference."""
    dynamic: bool | None = None
    """Draw again for groups whose scores are all equal."""
    sampler: str = "model"
    """model: the policy itself; server: an engine at runtime.sampler.url, which gets its weights (rl/engine.py)."""
    held_out: solving.SolvingConfig = field(default_factory=solving.SolvingConfig)
    adapter: AdapterConfig | None = None
    """{rank, alpha, ...}: train an adapter alone, and merge it at the end."""
    sandbox: SandboxConfig = block("sandbox")
    fit: RolloutConfig

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown method, and for groups of one."""
        if self.method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {self.method!r}")
        if self.sampler not in ("model", "server"):
            raise ValueError(f"sampler: expected model or server, got {self.sampler!r}")
        if self.fit.samples < 2 and self.method != "reinforce_pp":
            raise ValueError(f"samples: {self.method} compares answers to one prompt; expected at least 2, got 1")
        for key in ("beta", "clip_low", "clip_high"):
            if (value := getattr(self, key)) is not None and value < 0:
                raise ValueError(f"{key}: expected at least 0, got {value}")
        if self.clip_low is not None and self.clip_low > 1:
            raise ValueError(f"clip_low: expected at most 1, got {self.clip_low}: ratios are above 0")
        if self.resolved.dynamic and self.fit.samples < 2:
            raise ValueError("dynamic: one answer has nothing to differ from; expected samples of at least 2")

    @property
    def resolved(self) -> GroupMethod:
        """The method with the values of this block that override its own."""
        method = METHODS[self.method]
        low, high = (
            default if override is None else override
            for default, override in ((method.clip.low, self.clip_low), (method.clip.high, self.clip_high))
        )
        return replace(
            method,
            clip=Clip(low, high),
            beta=method.beta if self.beta is None else self.beta,
            dynamic=method.dynamic if self.dynamic is None else self.dynamic,
        )


def run(params: Params, job: Job, *, base: Path, problems: Path, out: Path, samples: Path) -> None:
    """Train the policy on the results of its code and save the model directory `out`."""
    if records.is_empty(problems / "rl.jsonl"):
        samples.touch()
        return checkpoint.pass_through(base, out, job, problems)
    config, method = params.fit, params.resolved
    start = reference.begin(
        base, params.adapter, job.seed, device.hardware(job.runtime.precision, job.runtime.base_weights)
    )
    start.reference.parked = not method.beta  # with beta 0 only evaluations read it
    setting = CausalSetting(start, config, job, engine_for=base if params.sampler == "server" else None)
    train_problems, validation_problems = (
        list(records.read(problems / f"{split}.jsonl", Problem)) for split in ("rl", "val")
    )
    prompts = answers.problem_prompts(train_problems, start.tokenizer, config.max_prompt)
    with setting.judge(params.sandbox, wanted=params.rewards) as judge:
        scorer = Scorer(params.rewards, setting.resources(judge))
        reference_logprobs = setting.reference if method.beta else None
        stream = RolloutStream(
            prompts,
            config,
            Method(
                sample=setting.sample,
                score=scorer,
                annotate=partial(advantages.annotate_group, reference=reference_logprobs),
                estimate=partial(advantages.estimate_group, method=method, samples=config.samples),
                dynamic=method.dynamic,
            ),
            pad=start.tokenizer.pad,
            seed=job.seed,
            ranks=setting.ranks,
        )
        held_out = solving.HeldOutProblems(
            answers.problem_prompts(validation_problems, start.tokenizer, config.max_prompt),
            setting,
            judge,
            params.held_out,
        )
        gate = gates.first_policy("ratio", "approxkl", "clip_ratio/region_mean", setting.precision)
        watchers = Watchers(
            first=gate,
            evaluate=held_out.row,
            logged=watch_alarms(job.name),
            gradients_at=None,
            save=partial(reference.save_merged, start.policy, start.tokenizer, job, base),
        )
        fit(start.policy, stream, partial(group_loss, method=method, config=config), config, job, watchers=watchers)
        setting.close()
        held_out_report = held_out.report()  # before `finish`, which merges an adapter into the reference too
        held_out.write_samples(samples)
        job.report(
            **reference.finish(start, base), **held_out_report, prompts=len(prompts), alarms=alarms_of(job.tracker.rows)
        )
    checkpoint.save(out, start.policy, start.tokenizer, job.lineage)


if __name__ == "__main__":
    main(
        run,
        inputs={"base": "models/{base}", "problems": "data/problems"},
        outs={"out": "models/grpo", "samples": "metrics/samples/grpo.jsonl"},
        trains=True,
    )
