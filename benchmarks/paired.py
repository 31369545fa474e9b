"""Two models on the same held-out problems: pass@1 of each and their difference, paired problem by problem.

    python benchmarks/paired.py models/tools models/grpo [--problems data/problems/test.jsonl] [--group medium]
    [--samples 4]

Samples at temperature 0.8 with the same seeds for both, plus greedy answers; answers run in the sandbox. The interval
of the difference is a paired bootstrap over problems (10,000 resamples). Prints a line per level and one for all; lines
with fewer than 20 problems give no verdict. Raises an error if a problem fits in one model's context but not in the
other's.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np

from pipeline.evaluation.intervals import paired_difference
from pipeline.generation.sampling import Sampling, sampler
from pipeline.ingest.records import Problem, read
from pipeline.model import checkpoint
from pipeline.report.claims import FEWEST
from pipeline.rl import answers
from pipeline.rl.rewards import judged
from pipeline.run.device import generator, keep_freed_memory
from pipeline.run.errors import InputError
from pipeline.sandbox.judge import Judge, SandboxConfig


def shares(
    model: Path, problems: list[Problem], judge: Judge, arguments: argparse.Namespace, greedy: bool
) -> dict[str, float]:
    """Share of each problem's answers that pass all hidden tests, by id, for problems that fit in the context."""
    policy, tokenizer = checkpoint.load_frozen(model), checkpoint.load(model)[1]
    prompts = answers.problem_prompts(problems, tokenizer, policy.config.max_context - arguments.tokens)
    count = 1 if greedy else arguments.samples
    generate = sampler(policy, Sampling(arguments.tokens, temperature=0.0 if greedy else 0.8), {tokenizer.turn_end})
    given = answers.sample(generate, [(p, n) for p in prompts for n in range(count)], tokenizer, arguments.seed)
    passed = [float(one is not None and one.verdict == "passed") for one in judged(judge, given)]
    return dict(
        zip((p.id for p in prompts), np.array(passed).reshape(len(prompts), count).mean(1).tolist(), strict=True)
    )


def compared(
    first: dict[str, float], second: dict[str, float], problems: list[Problem], answers_are: str
) -> Iterator[dict[str, Any]]:
    """A row for each level and one for all. Raises InputError if the models were not given the same problems."""
    if first.keys() != second.keys():
        alone = sorted(first.keys() ^ second.keys())
        raise InputError(
            f"models measured on different items: {len(first)} and {len(second)} problems, since only one of the"
            f" two has room for {', '.join(alone[:3])}{', ...' if len(alone) > 3 else ''}; compare models with the same"
            " context"
        )
    for level in (None, *sorted({problem.level for problem in problems if problem.id in first})):
        ids = [problem.id for problem in problems if problem.id in first and level in (None, problem.level)]
        sides = [[side[one] for one in ids] for side in (first, second)]
        moved = paired_difference((sides[0], None), (sides[1], None), generator=generator("paired", str(level)))
        few = {"verdict": f"none, too few items: {moved.n}"} if moved.n < FEWEST else {}
        yield {
            "answers": answers_are,
            "level": level or "all",
            "n": moved.n,
            "first": round(float(np.mean(sides[0])), 4),
            "second": round(float(np.mean(sides[1])), 4),
            "difference": round(moved.value, 4),
            "low": round(moved.low, 4),
            "high": round(moved.high, 4),
        } | few


def main() -> None:
    """Print a JSON line for each level and one for all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--problems", type=Path, default=Path("data/problems/test.jsonl"))
    parser.add_argument("--group", default="medium")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--seed", type=int, default=42)
    arguments = parser.parse_args()
    keep_freed_memory()
    problems = [problem for problem in read(arguments.problems, Problem) if problem.group == arguments.group]
    if not problems:
        sys.exit(f"{arguments.problems}: expected problems in the group {arguments.group!r}, found none")
    with Judge(SandboxConfig(), 2) as judge:
        for greedy in (False, True):
            sides = [shares(model, problems, judge, arguments, greedy) for model in (arguments.first, arguments.second)]
            try:
                for told in compared(
                    sides[0], sides[1], problems, "greedy" if greedy else f"{arguments.samples} at 0.8"
                ):
                    sys.stdout.write(json.dumps(told) + "\n")
            except InputError as error:
                sys.exit(str(error))


if __name__ == "__main__":
    main()
