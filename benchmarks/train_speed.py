"""Training speed and peak memory: `fit` vs. Hugging Face's Trainer, litgpt's pretraining and a bare compiled loop.

    python benchmarks/train_speed.py [--sizes 2M 6M] [--rounds 7] [--precision bf16] [--litgpt-python PATH] [--quick]

All sides have the same Qwen3 shape, tokens, batch, optimizer and machine. Each is a separate process (`train_arms.py`),
compiled and warmed up with 5 steps; in each round, the sides train 40 steps, one after another. Before and after each
round, a reference matrix product is timed; rounds in which its time changes by more than 25% are repeated, at most
`--rounds` times. Peak memory is private memory (RssAnon, sampled every 20 ms) or GPU memory. A side's speed in a round
is tokens over seconds; a ratio is ours over theirs in the same round; medians and ranges are over rounds. Ours and
Trainer use the faster of two settings, compiled or not, and the bare loop the faster of two models, by median.
`by_cpu_time` is the ratio of tokens per CPU second: with one thread on a shared machine, it is reliable when wall time
is not. Goals: 1.3 times the speed of Trainer and litgpt, and 0.97 times that of the bare loop.

litgpt is not a dependency: pass the Python of an environment that has it, or its row is marked as left out. Results go
to `results/train_speed-<device>-<precision>.json`; `--quick` (2 rounds of 6 steps) writes nothing.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

OURS, TRAINER, LITGPT = ("ours", "ours compiled"), ("trainer", "trainer compiled"), ("litgpt",)
BARE = ("bare, transformers", "bare, our model")
GOALS = {TRAINER: ("Trainer", 1.3), LITGPT: ("litgpt", 1.3), BARE: ("bare loop", 0.97)}
MOVED = 1.25  # largest accepted change in the reference product's time, as a factor
WARMUP = 5
SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 64,
        "width": 16,
        "layers": 1,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 8,
        "d_ff": 24,
    },  # for tests
    "2M": {"vocab_size": 4096, "width": 192, "layers": 4, "heads": 3, "kv_heads": 1, "head_dim": 64, "d_ff": 512},
    "6M": {"vocab_size": 4096, "width": 256, "layers": 6, "heads": 4, "kv_heads": 4, "head_dim": 64, "d_ff": 768},
    "12M": {"vocab_size": 4096, "width": 320, "layers": 8, "heads": 5, "kv_heads": 5, "head_dim": 64, "d_ff": 1024},
    "50M": {"vocab_size": 16384, "width": 512, "layers": 10, "heads": 8, "kv_heads": 8, "head_dim": 64, "d_ff": 2048},
}


@dataclass
class Side:
    """A training process and its measurements."""

    name: str
    process: subprocess.Popen[str]
    speeds: list[float] = field(default_factory=list)  # tokens per second, one per round
    worked: list[float] = field(default_factory=list)  # tokens per second of CPU time over all threads
    peak: int = 0  # bytes

    def hear(self) -> dict[str, Any]:
        """Read the next line of the process. Raises RuntimeError if it died."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            assert self.process.stderr
            raise RuntimeError(f"{self.name}: {self.process.stderr.read()[-2000:]}")
        return json.loads(line)

    def train(self, steps: int) -> tuple[float, float]:
        """Train `steps` steps; returns wall and CPU seconds."""
        assert self.process.stdin
        with anonymous_peak(self.process.pid) as peak:
            self.process.stdin.write(f"{steps}\n")
            self.process.stdin.flush()
            heard = self.hear()
        self.peak = max(self.peak, heard["gpu"] or peak[0])
        return heard["seconds"], heard["cpu_seconds"]


@contextlib.contextmanager
def anonymous_peak(process: int) -> Iterator[list[int]]:
    """Peak RssAnon of a process within the block, in bytes, as the only item of a list."""
    peak, stop = [0], threading.Event()

    def ask() -> None:
        ended = False
        while not ended:
            ended = stop.wait(0.02)  # sample once more at the end: a round may be shorter than this
            for line in Path(f"/proc/{process}/status").read_text().splitlines():
                if line.startswith("RssAnon"):
                    peak[0] = max(peak[0], int(line.split()[1]) * 1024)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield peak
    finally:
        stop.set()
        asking.join()


@contextlib.contextmanager
def started(names: list[str], spec: dict[str, Any], litgpt: Path | None) -> Iterator[list[Side]]:
    """Start the sides' processes, warmed up one after another."""
    sides: list[Side] = []
    try:
        for name in names:
            python = str(litgpt) if name in LITGPT else sys.executable
            command = [python, str(ROOT / "benchmarks/train_arms.py"), name, json.dumps(spec)]
            environment = os.environ | {"STAGECOACH_MLFLOW": "off", "OMP_NUM_THREADS": str(spec["threads"])}
            side = Side(
                name,
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=environment,
                ),
            )
            sides.append(side)
            side.hear()
        yield sides
    finally:
        for side in sides:
            side.process.kill()
            side.process.communicate()


def reference() -> float:
    """Seconds for a matrix product that nothing here can speed up: the best of several."""
    import torch

    a = torch.randn(768, 768)
    times = []
    for _ in range(8):
        begin = time.perf_counter()
        torch.mm(a, a)
        times.append(time.perf_counter() - begin)
    return min(times)


def measure(sides: list[Side], rounds: int, steps: int, tokens: int) -> tuple[int, list[float]]:
    """Fill in the sides' speeds; returns the number of repeated rounds, and the reference times of the other rounds."""
    again, references = 0, []
    while len(references) < rounds:
        before = reference()
        seconds = [side.train(steps) for side in sides]
        after = reference()
        if max(before, after) > MOVED * min(before, after) and again < rounds:
            again += 1
            continue
        references.append((before + after) / 2)
        for side, taken in zip(sides, seconds, strict=True):
            side.speeds.append(steps * tokens / taken[0])
            side.worked.append(steps * tokens / taken[1])
    return again, references


def best(sides: list[Side], names: tuple[str, ...]) -> Side | None:
    """The fastest side by median among those named, if any is present."""
    there = [side for side in sides if side.name in names]
    return max(there, key=lambda side: statistics.median(side.speeds), default=None)


def compared(sides: list[Side]) -> dict[str, Any]:
    """Our best setting over each competitor's best: median and range of the rounds' ratios."""
    ours = best(sides, OURS)
    assert ours
    found: dict[str, Any] = {}
    for names, (title, goal) in GOALS.items():
        rival = best(sides, names)
        if not rival:
            found[title] = {"left out": "it was not asked for, or its environment was not given"}
            continue
        ratios = [own / theirs for own, theirs in zip(ours.speeds, rival.speeds, strict=True)]
        middle = statistics.median(ratios)
        worked = statistics.median(a / b for a, b in zip(ours.worked, rival.worked, strict=True))
        found[title] = {
            "side": rival.name,
            "ours": ours.name,
            "ratio": round(middle, 3),
            "range": [round(min(ratios), 3), round(max(ratios), 3)],
            "by_cpu_time": round(worked, 3),
            "goal": goal,
            "met": middle >= goal,
        }
    return found


def row(size: str, arguments: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """Measure one size: every side's speed and memory, and the ratios."""
    tokens = arguments.rows * arguments.context
    spec = {
        "size": SIZES[size],
        "rows": arguments.rows,
        "context": arguments.context,
        "warmup": WARMUP,
        "precision": arguments.precision,
        "threads": arguments.threads,
    }
    with started(names, spec, arguments.litgpt_python) as sides:
        again, references = measure(sides, arguments.rounds, arguments.steps, tokens)
    return {
        "size": size,
        "ratios": compared(sides),
        "sides": {
            side.name: {
                "tokens_per_second": round(statistics.median(side.speeds)),
                "range": [round(min(side.speeds)), round(max(side.speeds))],
                "peak_mib": round(side.peak / 2**20),
            }
            for side in sides
        },
        "rounds_again": again,
        "reference_ms": [round(1e3 * value, 2) for value in references],
    }


def main(given: list[str] | None = None) -> list[dict[str, Any]]:
    """Print a line of JSON for each size."""
    from pipeline.run import device

    names = [*OURS, *TRAINER, *LITGPT, *BARE]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["2M", "6M", "12M", "50M"])
    parser.add_argument("--sides", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--litgpt-python", type=Path)
    parser.add_argument("--quick", action="store_true", help="2 rounds of 6 steps; nothing is written")
    arguments = parser.parse_args(given)
    if not set(OURS) & set(arguments.sides):
        parser.error(f"--sides: expected {' or '.join(OURS)}, because every ratio is ours over theirs")
    if arguments.quick:
        arguments.rounds, arguments.steps = 2, 6
    sides = [name for name in arguments.sides if name not in LITGPT or arguments.litgpt_python]
    found = []
    for size in arguments.sizes:
        found.append(row(size, arguments, sides))
        sys.stdout.write(json.dumps(found[-1]) + "\n")
        sys.stdout.flush()
    if not arguments.quick:
        where = device.hardware(arguments.precision)
        file = ROOT / "benchmarks/results" / f"train_speed-{where.device.type}-{arguments.precision}.json"
        head = device.describe(arguments.precision) | {
            "threads": arguments.threads,
            "rounds": arguments.rounds,
            "steps": arguments.steps,
        }
        file.write_text(json.dumps({"machine": head, "rows": found}, indent=1) + "\n", encoding="utf-8")
    return found


if __name__ == "__main__":
    main()
