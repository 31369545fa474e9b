"""Stage teach: have a teacher answer the problems once and record its token probabilities.

    models/grpo + data/problems (prompts) -> data/taught: answers, and the teacher's k most likely tokens per position

Stage distill trains on these files; if only keys of `distill` change, the teacher does not run again.
"""

from dataclasses import dataclass
from pathlib import Path

from pipeline.ingest import records
from pipeline.ingest.records import Problem
from pipeline.model import checkpoint
from pipeline.rl import answers, teaching
from pipeline.rl.models import judge_or_none
from pipeline.rl.rewards import judged
from pipeline.run import device
from pipeline.run.config import block
from pipeline.run.device import stable_hash
from pipeline.run.errors import DataError
from pipeline.run.stage import main
from pipeline.run.workdir import Job
from pipeline.sandbox.judge import SandboxConfig


@dataclass(frozen=True, kw_only=True)
class Params:
    """The `teach` block."""

    teacher: str = "grpo"
    """Model that answers the problems: a folder in models/, with the same tokenizer as the student."""
    problems: int | None = None
    """Number of reinforcement-learning problems to answer; none: all."""
    samples: int
    """Answers per problem."""
    top_k: int
    """Number of most likely tokens to record per position."""
    keep: str = "all"
    """all: every answer; passed: only code that passes the hidden tests (needs the sandbox)."""
    max_prompt: int
    """Maximum tokens per prompt; longer prompts are skipped and counted."""
    max_new_tokens: int
    """Maximum tokens per answer."""
    temperature: float = 1.0
    """Temperature for sampling and for the recorded probabilities."""
    sandbox: SandboxConfig = block("sandbox")

    def __post_init__(self) -> None:
        if min(self.samples, self.top_k, self.max_prompt, self.max_new_tokens) < 1 or self.temperature <= 0:
            raise ValueError("samples, top_k, max_prompt, max_new_tokens, temperature: expected values > 0")
        if self.problems is not None and self.problems < 1:
            raise ValueError(f"problems: expected at least 1, or `none` to use all; got {self.problems}")
        if self.keep not in ("all", "passed"):
            raise ValueError(f"keep: expected all or passed, got {self.keep!r}")


def run(params: Params, job: Job, *, teacher: Path, problems: Path, out: Path) -> None:
    """Write the answers and probabilities of `teacher` to the folder `out`."""
    if records.is_empty(problems / "rl.jsonl"):
        out.mkdir(parents=True, exist_ok=True)
        (out / teaching.ANSWERS).touch()
        return
    hardware = device.hardware(job.runtime.precision)
    model, tokenizer = checkpoint.load(teacher)
    digest = checkpoint.weights_digest(model)
    model = model.to(hardware.device).train(False)
    chosen = sorted(records.read(problems / "rl.jsonl", Problem), key=lambda p: stable_hash("taught", job.seed, p.id))
    prompts = answers.problem_prompts(chosen[: params.problems], tokenizer, params.max_prompt)
    given = teaching.said_by(
        model,
        tokenizer,
        prompts,
        samples=params.samples,
        max_new_tokens=params.max_new_tokens,
        temperature=params.temperature,
        hardware=hardware,
        seed=job.seed,
    )
    passed = None
    wanted = ["code"] if params.keep == "passed" else []
    with judge_or_none(params.sandbox, job.workers, job.runtime.sandbox_url, wanted=wanted) as judge:
        if judge is not None:
            right = [verdict is not None and verdict.verdict == "passed" for verdict in judged(judge, given)]
            passed = sum(right) / len(given)
            if params.keep == "passed":
                given = [answer for answer, is_right in zip(given, right, strict=True) if is_right]
    if not given:
        raise DataError(f"no answer from {teacher} passes the tests; set teach.keep=all, or choose another teacher")
    k = min(params.top_k, model.config.vocab_size)
    top = teaching.most_likely(model, given, pad=tokenizer.pad, k=k, temperature=params.temperature, hardware=hardware)
    teaching.write(out, given, top, tokenizer=tokenizer, temperature=params.temperature, teacher=digest)
    job.report(
        prompts=len(prompts),
        answers=len(given),
        tokens=len(top[0]),
        passed=passed,
        mass_of_top_k=teaching.mass(top[1]),
        left_out=min(len(chosen), params.problems or len(chosen)) - len(prompts),
    )


if __name__ == "__main__":
    main(run, inputs={"teacher": "models/{teacher}", "problems": "data/problems"}, outs={"out": "data/taught"})
