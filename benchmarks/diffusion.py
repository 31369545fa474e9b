"""Masked-diffusion models on held-out problems: pass@1 by number of forward passes, and the gain of trained policies.

    python benchmarks/diffusion.py quality models/diffusion data/problems/test.jsonl
        [--problems 400] [--canvas 96] [--block 48]
    python benchmarks/diffusion.py gain models/diffusion data/problems/test.jsonl models/diffusion_grpo
        [models/other_seed ...] [--problems 400] [--steps 32] [--temperature 0.8] [--threshold 0.99]

`quality`: greedy answers at 1, 2, 4, 8 tokens per step and by threshold, with and without caches, each compared with
one token per step on the same problems (paired bootstrap; no early stop). Goal: at most a third of the forward passes,
with a loss of at most 2 points. `gain`: selects problems that the first model solves in 20% to 80% of 16 samples, and
compares all models on 16 fresh samples. Goal: a gain of at least 5 points on at least 64 problems. Prints JSON; --out
also saves it. With --samples FILE, `gain` reuses earlier samples after an interruption or when a model is added.
"""

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np

from pipeline.diffusion import files, measure
from pipeline.diffusion.measure import CanvasSettings, CanvasSubject
from pipeline.diffusion.sampling import Denoising
from pipeline.evaluation import code, suites
from pipeline.evaluation.intervals import paired_difference
from pipeline.ingest.records import Problem, read
from pipeline.run import device
from pipeline.run.workdir import write_atomically
from pipeline.sandbox.judge import Judge, SandboxConfig

SAMPLES, LOW, HIGH = 16, 0.2, 0.8


def subject(folder: Path, arguments: argparse.Namespace) -> CanvasSubject:
    """A model to sample from."""
    model, tokenizer = files.load(folder)
    settings = suites.SuiteSettings(
        documents=1,
        stories=1,
        problems=arguments.problems,
        samples=1,
        dialogues=1,
        gaps=1,
        max_new_tokens=1,
        story_tokens=1,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        context=512,
        bootstrap=10_000,
    )
    canvas = CanvasSettings(
        canvas=arguments.canvas,
        canvas_block=getattr(arguments, "block", arguments.canvas),
        canvas_problems=arguments.problems,
    )
    model.train(False).to(device.hardware().device)
    return CanvasSubject(model.trunk, tokenizer, settings, arguments.seed, denoiser=model, canvas=canvas)


class Samples:
    """Which samples of a model passed, cached in a file."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.found: dict[str, list[bool]] = json.loads(path.read_text()) if path and path.is_file() else {}

    def of(
        self, folder: Path, problems: list[Problem], samples: range, arguments: argparse.Namespace, judge: Judge
    ) -> np.ndarray:
        """Whether each sample of each problem passes: (problems, samples) bool."""
        asked = subject(folder, arguments)
        way = Denoising(
            length=arguments.canvas,
            steps=arguments.steps,
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            threshold=arguments.threshold,
            order=arguments.order,
            block=asked.denoiser.traits.block_size or None,
        )
        prompts = {p.id: suites.user(asked.tokenizer, p.question) for p in problems}
        model, which, found = fingerprint(folder), hash_of("".join(prompts)), []
        for sample in samples:
            key = f"{model} {which} {way} {arguments.seed} {sample}"
            if key not in self.found:
                done = asked.generate("gain", prompts, way, sample)
                texts = [[asked.tokenizer.decode(done[p.id].ids)] for p in problems]
                self.found[key] = [one.verdict == "passed" for one in code.judge_answers(judge, problems, texts)]
                if self.path:
                    write_atomically(self.path, json.dumps(self.found))
            found.append(self.found[key])
            print(
                f"{folder} sample {sample}: {np.mean(found[-1]):.3f} of {len(problems)} pass",
                file=sys.stderr,
                flush=True,
            )
        return np.array(found).T


def hash_of(text: str) -> str:
    """A short hash of a string."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def fingerprint(folder: Path) -> str:
    """A short hash of a model's weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:12]


def gain(arguments: argparse.Namespace, problems: list[Problem], judge: Judge) -> dict[str, Any]:
    """Compare the other models with the first one on problems that the first one solves only sometimes."""
    samples = Samples(arguments.samples)
    rates = samples.of(arguments.model, problems, range(SAMPLES), arguments, judge).mean(1)
    unsure = [p for p, rate in zip(problems, rates, strict=True) if LOW <= rate <= HIGH]
    more = range(SAMPLES, 2 * SAMPLES)
    first = samples.of(arguments.model, unsure, more, arguments, judge).mean(1)
    found: dict[str, Any] = {
        "problems": len(problems),
        "chosen": len(unsure),
        "rate_of_all": float(rates.mean()),
        "before": float(first.mean()),
    }
    for other in arguments.others:
        second = samples.of(other, unsure, more, arguments, judge).mean(1)
        moved = paired_difference(
            (first.tolist(), None), (second.tolist(), None), generator=device.generator("gain", 0)
        )
        found[str(other)] = {
            "after": float(second.mean()),
            "gain": moved.value,
            "gain_low": moved.low,
            "gain_high": moved.high,
        }
    return found


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("quality", "gain"):
        one = commands.add_parser(name)
        one.add_argument("model", type=Path)
        one.add_argument("file", type=Path)
        if name == "gain":
            one.add_argument("others", type=Path, nargs="+")
            one.add_argument("--samples", type=Path)
        for option, default in (("problems", 400), ("canvas", 96), ("steps", 48), ("seed", 0)):
            one.add_argument(f"--{option}", type=int, default=default)
        if name == "quality":
            one.add_argument("--block", type=int, default=48)
        one.add_argument("--temperature", type=float, default=0.8)
        one.add_argument("--top-p", type=float, default=0.95)
        one.add_argument(
            "--order",
            default="entropy",
            help="gain: which tokens are uncovered first; stage_diffusion_grpo samples by entropy",
        )
        one.add_argument(
            "--threshold", type=float, help="gain: uncover all tokens with at least this probability at once"
        )
        one.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    problems = list(read(arguments.file, Problem))[: arguments.problems]
    began = time.perf_counter()
    with Judge(SandboxConfig(), 1, url=None) as judge, device.hardware().autocast():
        if arguments.command == "quality":
            found: dict[str, Any] = measure.quality(subject(arguments.model, arguments), problems, judge).numbers
        else:
            found = gain(arguments, problems, judge)
    settings = {name: value for name, value in vars(arguments).items() if name not in ("out", "samples")}
    told = {"settings": settings, "seconds": round(time.perf_counter() - began, 1)} | found
    text = json.dumps(told, indent=2, default=str)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
