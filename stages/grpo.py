"""Stage grpo: reinforcement learning from executed code, comparing groups of answers instead of using a critic.

    models/tools + data/problems (prompts, hidden tests) -> models/grpo     (Shao et al. 2024, arXiv:2402.03300)
    models/tools + conf/environment/<environment>.py     -> models/grpo     multi-turn tool use (rl/episodes.py)

`grpo.method` is one of GRPO, Dr. GRPO, DAPO, GSPO, RLOO, REINFORCE++ (learning/policy_losses.METHODS); keys set
to null take the method's default. Generated code runs only in the sandbox; without one, rewards that run code are
refused.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from pipeline.evaluation import solving
from pipeline.ingest import records
from pipeline.learning import gates, reference
from pipeline.learning.fit import Watchers, fit
from pipeline.learning.policy_losses import METHODS, Clip, GroupMethod
from pipeline.model import checkpoint
from pipeline.model.lora import AdapterConfig
from pipeline.rl import advantages
from pipeline.rl.episodes import EpisodeSetting
from pipeline.rl.models import CausalSetting, judge_or_none
from pipeline.rl.rewards import Scorer
from pipeline.rl.rollout import Method, RolloutConfig, RolloutStream, alarms_of, group_loss, watch_alarms
from pipeline.run import device
from pipeline.run.config import block
from pipeline.run.stage import main
from pipeline.run.workdir import Job
from pipeline.sandbox.judge import SandboxConfig


@dataclass(frozen=True, kw_only=True)
class Params:
    """The `grpo` block; its training keys are those of RolloutConfig."""

    base: str = "tools"
    """Model to start from: a folder in models/, or `base` for your own checkpoint (stage base)."""
    method: str
    """grpo, dr_grpo, dapo, gspo, rloo, reinforce_pp."""
    rewards: dict[str, float]
    """name: weight; code, code_format, length; with an environment task, length."""
    environment: str = "none"
    """A file of conf/environment/ for multi-turn tool use; none: problems with hidden tests."""
    tasks: int = 2000
    """Environment tasks to train on."""
    max_turns: int = 4
    """Maximum turns per answer in an environment."""
    clip_low: float | None = None
    """Ratios are clipped to at least 1 - clip_low; none: the method's default."""
    clip_high: float | None = None
    """Ratios are clipped to at most 1 + clip_high."""
    beta: float | None = None
    """Weight of the KL penalty toward the reference."""
    dynamic: bool | None = None
    """Resample groups whose scores are all equal."""
    sampler: str = "model"
    """model: the policy itself; server: an engine at `runtime.sampler.url` that receives the weights (rl/engine.py)."""
    held_out: solving.SolvingConfig = field(default_factory=solving.SolvingConfig)
    adapter: AdapterConfig | None = None
    """{rank, alpha, ...}: train only an adapter and merge it at the end."""
    sandbox: SandboxConfig = block("sandbox")
    fit: RolloutConfig

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown method, and for groups of size one."""
        if self.method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {self.method!r}")
        if self.sampler not in ("model", "server"):
            raise ValueError(f"sampler: expected model or server, got {self.sampler!r}")
        if min(self.tasks, self.max_turns) < 1:
            raise ValueError(f"tasks, max_turns: expected at least 1, got {self.tasks} and {self.max_turns}")
        if self.environment != "none" and "code" in self.rewards:
            raise ValueError(f"rewards: `code` needs tests; with `environment: {self.environment}`, use `task` instead")
        if self.fit.samples < 2 and self.method != "reinforce_pp":
            raise ValueError(
                f"samples: expected at least 2, got 1; {self.method} compares each prompt's answers with one another"
            )
        for key in ("beta", "clip_low", "clip_high"):
            if (value := getattr(self, key)) is not None and value < 0:
                raise ValueError(f"{key}: expected at least 0, got {value}")
        if self.clip_low is not None and self.clip_low > 1:
            raise ValueError(f"clip_low: expected at most 1, got {self.clip_low}; ratios are always positive")
        if self.resolved.dynamic and self.fit.samples < 2:
            raise ValueError("dynamic: expected `samples` of at least 2, because a single answer cannot be compared")

    @property
    def resolved(self) -> GroupMethod:
        """The method with this block's overrides applied."""
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


def run(params: Params, job: Job, *, base: Path, problems: Path, environment: Path, out: Path, samples: Path) -> None:
    """Train the policy on the results of its code or tool calls and save the model directory `out`."""
    alone = params.environment == "none"
    if alone and records.is_empty(problems / "rl.jsonl"):
        samples.touch()
        return checkpoint.pass_through(base, out, job, problems)
    config, method = params.fit, params.resolved
    start = reference.begin(
        base, params.adapter, job.seed, device.hardware(job.runtime.precision, job.runtime.base_weights)
    )
    start.reference.parked = not method.beta  # with beta: 0, only evaluations use the reference
    engine_for = base if params.sampler == "server" else None
    wanted = params.rewards if alone else ("task",)
    with judge_or_none(params.sandbox, job.workers, job.runtime.sandbox_url, wanted=wanted) as judge:
        if alone:
            setting = CausalSetting(start, config, job, engine_for=engine_for)
            asked = solving.of_problems(setting, problems, judge)
        else:
            setting = EpisodeSetting(start, config, job, environment, judge, params.max_turns, engine_for=engine_for)
            asked = solving.of_environment(setting, params.tasks, params.held_out.eval_problems)
        scorer = Scorer(params.rewards, setting.resources(judge, task=asked.task))
        reference_logprobs = setting.reference if method.beta else None
        stream = RolloutStream(
            asked.prompts,
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
        held_out = solving.HeldOutProblems(asked.held_out, setting, asked.verdicts, params.held_out)
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
        held_out_report = held_out.report()  # before `finish`, which also merges an adapter into the reference
        held_out.write_samples(samples)
        job.report(
            **reference.finish(start, base),
            **held_out_report,
            prompts=len(asked.prompts),
            alarms=alarms_of(job.tracker.rows),
        )
    checkpoint.save(out, start.policy, start.tokenizer, job.lineage)


if __name__ == "__main__":
    main(
        run,
        inputs={
            "base": "models/{base}",
            "problems": "data/problems",
            "environment": "conf/environment/{environment}.py",
        },
        outs={"out": "models/grpo", "samples": "metrics/samples/grpo.jsonl"},
        trains=True,
    )
