"""Masked-diffusion models on held-out problems: pass@1 against forward passes, and what a policy gained where its start was unsure.

    python benchmarks/masked.py quality models/diffusion data/problems/test.jsonl [--problems 400] [--canvas 96] [--block 48]
    python benchmarks/masked.py gain models/diffusion models/diffusion_grpo data/problems/test.jsonl [--problems 400] [--steps 32]
        [--temperature 0.8] [--threshold 0.99]

`quality`: greedy answers at 1, 2, 4, 8 tokens a step and by thresholds with and without caches, each beside one token a step on the
same problems (paired bootstrap; no early stop). Goal: at least 3 times fewer forward passes at no more than 2 points lost.
`gain`: problems that the first model solves in 20 to 80 % of 16 samples; both models on 16 other samples of these. Goal: at least 5
points on at least 64 problems. Numbers are JSON on standard output; a file of them is kept with --out.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from pipeline import denoisers, device  # noqa: E402
from pipeline.evaluation import canvases, code, suites  # noqa: E402
from pipeline.evaluation.canvases import CanvasSettings, CanvasSubject  # noqa: E402
from pipeline.evaluation.intervals import paired_difference  # noqa: E402
from pipeline.generation.denoising import Denoising  # noqa: E402
from pipeline.sandbox.judge import Judge, SandboxConfig  # noqa: E402
from pipeline.streams.records import Problem, read  # noqa: E402

SAMPLES, LOW, HIGH = 16, 0.2, 0.8


def subject(folder: Path, arguments: argparse.Namespace) -> CanvasSubject:
    """A model to be asked."""
    model, tokenizer = denoisers.load(folder)
    settings = suites.Settings(documents=1, stories=1, problems=arguments.problems, samples=1, dialogues=1, gaps=1, max_new_tokens=1,
                               story_tokens=1, temperature=arguments.temperature, top_p=arguments.top_p, context=512, bootstrap=10_000)  # fmt: skip
    canvas = CanvasSettings(canvas=arguments.canvas, canvas_block=arguments.block, canvas_problems=arguments.problems)
    model.train(False).to(device.hardware().device)
    return CanvasSubject(model.trunk, tokenizer, settings, arguments.seed, denoiser=model, canvas=canvas)


def solved(asked: CanvasSubject, problems: list[Problem], samples: range, arguments: argparse.Namespace, judge: Judge) -> np.ndarray:  # fmt: skip
    """Whether each sample of each problem passes: (problems, samples) bool."""
    way = Denoising(length=arguments.canvas, steps=arguments.steps, temperature=arguments.temperature, top_p=arguments.top_p,
                    threshold=arguments.threshold, block=asked.denoiser.traits.block_size or None)  # fmt: skip
    prompts = {p.id: suites.user(asked.tokenizer, p.question) for p in problems}
    found = []
    for sample in samples:
        done = asked.generate("gain", prompts, way, sample)
        texts = [[asked.tokenizer.decode(done[p.id].ids)] for p in problems]
        found.append([one.verdict == "passed" for one in code.judge_answers(judge, problems, texts)])
        print(f"sample {sample}: {np.mean(found[-1]):.3f} of {len(problems)} pass", file=sys.stderr, flush=True)
    return np.array(found).T


def gain(arguments: argparse.Namespace, problems: list[Problem], judge: Judge) -> dict[str, Any]:
    """The second model beside the first one on problems that the first one solves sometimes."""
    before, after = (subject(folder, arguments) for folder in (arguments.model, arguments.other))
    rates = solved(before, problems, range(SAMPLES), arguments, judge).mean(1)
    unsure = [p for p, rate in zip(problems, rates, strict=True) if LOW <= rate <= HIGH]
    others = range(SAMPLES, 2 * SAMPLES)
    first, second = (solved(one, unsure, others, arguments, judge).mean(1) for one in (before, after))
    moved = paired_difference((first.tolist(), None), (second.tolist(), None), generator=device.generator("gain", 0))  # fmt: skip
    return {"problems": len(problems), "chosen": len(unsure), "rate_of_all": float(rates.mean()), "before": float(first.mean()),
            "after": float(second.mean()), "gain": moved.value, "gain_low": moved.low, "gain_high": moved.high}  # fmt: skip


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("quality", "gain"):
        one = commands.add_parser(name)
        one.add_argument("model", type=Path)
        if name == "gain":
            one.add_argument("other", type=Path)
        one.add_argument("file", type=Path)
        for option, default in (("problems", 400), ("canvas", 96), ("block", 48), ("steps", 48), ("seed", 0)):
            one.add_argument(f"--{option}", type=int, default=default)
        one.add_argument("--temperature", type=float, default=0.8)
        one.add_argument("--top-p", type=float, default=0.95)
        one.add_argument(
            "--threshold", type=float, help="gain: uncover all tokens of at least this probability at once"
        )
        one.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    problems = list(read(arguments.file, Problem))[: arguments.problems]
    began = time.perf_counter()
    with Judge(SandboxConfig(), 1, url=None) as judge, device.hardware().autocast():
        if arguments.command == "quality":
            found: dict[str, Any] = canvases.quality(subject(arguments.model, arguments), problems, judge).numbers
        else:
            found = gain(arguments, problems, judge)
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(arguments).items()
        if name != "out"
    }
    text = json.dumps({"settings": settings, "seconds": round(time.perf_counter() - began, 1)} | found, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
