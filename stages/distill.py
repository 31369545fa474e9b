"""Stage distill: train a student on a teacher's token probabilities, over the teacher's or the student's answers.

    models/tools + data/taught [+ models/grpo] + data/problems -> models/distill
                                                GKD (Agarwal et al. 2024, arXiv:2306.13649), MiniLLM (Gu et al. 2024,
                                                arXiv:2306.08543)

`on_policy` is the fraction of answers sampled from the student. With 0, the teacher is not loaded: stage
teach has already saved the teacher's k most likely tokens. Held-out problems are answered as in stage grpo.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pipeline.evaluation import solving
from pipeline.ingest import records
from pipeline.learning import reference
from pipeline.learning.fit import Watchers, fit
from pipeline.model import checkpoint
from pipeline.model.lora import AdapterConfig
from pipeline.rl import teaching
from pipeline.rl.models import CausalSetting
from pipeline.rl.rollout import Method, RolloutConfig, RolloutStream
from pipeline.rl.teaching import LOSSES, Lessons, Taught
from pipeline.run import device
from pipeline.run.config import block
from pipeline.run.errors import ConfigError, DataError
from pipeline.run.stage import main
from pipeline.run.workdir import Job
from pipeline.sandbox.judge import SandboxConfig


@dataclass(frozen=True, kw_only=True)
class Params:
    """The `distill` block; its training keys are those of RolloutConfig."""

    base: str = "tools"
    """Initial student: a folder in models/, or `base` for your own checkpoint (stage base)."""
    teacher: str = "grpo"
    """Model that scores the student's answers; must be the same as `teach.teacher`."""
    loss: str = "jsd"
    """jsd: per-token divergence; minillm: policy gradient of the reverse KL (needs on_policy: 1 and beta: 1)."""
    beta: float
    """For jsd; 0: KL(teacher || student); 1: KL(student || teacher); in between: generalized Jensen-Shannon."""
    on_policy: float
    """Fraction of answers sampled from the student; the rest are the teacher's."""
    gamma: float = 0.0
    """For minillm: discount for later tokens in a token's advantage; 0: only its own log-probability difference."""
    held_out: solving.SolvingConfig = field(default_factory=solving.SolvingConfig)
    adapter: AdapterConfig | None = None
    """{rank, alpha, ...}: train only an adapter and merge it at the end."""
    sandbox: SandboxConfig = block("sandbox")
    fit: RolloutConfig

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"loss: expected one of {', '.join(LOSSES)}, got {self.loss!r}")
        for key in ("beta", "on_policy", "gamma"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"{key}: expected 0 to 1, got {getattr(self, key)}")
        if self.loss == "minillm" and (self.on_policy, self.beta) != (1.0, 1.0):
            raise ValueError(
                f"loss: minillm uses the reverse KL on the student's own answers; expected `on_policy: 1`"
                f" and `beta: 1`, got {self.on_policy} and {self.beta}"
            )


def run(
    params: Params, job: Job, *, base: Path, teacher: Path, taught: Path, problems: Path, out: Path, samples: Path
) -> None:
    """Train the student and save the model directory `out`."""
    if records.is_empty(taught / teaching.ANSWERS):
        samples.touch()
        return checkpoint.pass_through(base, out, job, taught)
    config = params.fit
    hardware = device.hardware(job.runtime.precision, job.runtime.base_weights)
    start = reference.begin(base, params.adapter, job.seed, hardware)
    start.reference.parked = True  # only evaluations use the reference
    given = Taught(taught, start.tokenizer, temperature=config.temperature, max_new_tokens=config.max_new_tokens)
    setting = CausalSetting(start, config, job)
    model = None
    if params.on_policy:
        model, tokenizer = checkpoint.load(teacher)
        if tokenizer.hash != start.tokenizer.hash or checkpoint.weights_digest(model) != given.teacher:
            raise ConfigError(
                f"distill.teacher: {teacher} did not write {taught}; set distill.teacher equal to teach.teacher"
            )
        model = reference.narrowed(model.train(False), hardware).to(hardware.device)
    with setting.judge(params.sandbox, wanted=()) as judge:
        asked = solving.of_problems(setting, problems, judge)
        prompts = [prompt for prompt in asked.prompts if params.on_policy == 1.0 or prompt.id in given.of]
        if not prompts:
            raise DataError(
                f"{taught}: every answer is longer than {config.max_new_tokens} tokens; raise distill.max_new_tokens"
            )
        lessons = Lessons(
            setting=setting,
            taught=given,
            teacher=model,
            on_policy=params.on_policy,
            beta=params.beta,
            gamma=params.gamma if params.loss == "minillm" else None,
        )
        stream = RolloutStream(
            prompts,
            config,
            Method(sample=lessons.sample, score=lessons.score, annotate=lessons.annotate, estimate=lambda rollouts: {}),
            pad=start.tokenizer.pad,
            seed=job.seed,
            ranks=setting.ranks,
        )
        held_out = solving.HeldOutProblems(asked.held_out, setting, asked.verdicts, params.held_out)
        watchers = Watchers(
            evaluate=held_out.row, save=partial(reference.save_merged, start.policy, start.tokenizer, job, base)
        )
        fit(start.policy, stream, lessons.loss, config, job, watchers=watchers)
        held_out_report = held_out.report()  # before `finish`, which also merges an adapter into the reference
        held_out.write_samples(samples)
        job.report(
            **reference.finish(start, base), **held_out_report, prompts=len(prompts), answers_too_long=given.dropped
        )
    checkpoint.save(out, start.policy, start.tokenizer, job.lineage)


if __name__ == "__main__":
    main(
        run,
        inputs={
            "base": "models/{base}",
            "teacher": "models/{teacher}",
            "taught": "data/taught",
            "problems": "data/problems",
        },
        outs={"out": "models/distill", "samples": "metrics/samples/distill.jsonl"},
        trains=True,
    )
