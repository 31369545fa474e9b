"""Time to loss: how long our training takes to reach the final bits per byte of nanoGPT's recipe.

    python benchmarks/time_to_loss.py [--tokens data/tokens/text] [--tokenizer data/tokenizer] [--seeds 3] [--quick]

Both sides have the same corpus, tokenizer, tokens per step, context, threads and number of parameters (within 2%; if
not, the benchmark stops).

1. The baseline (`nanogpt.py`) runs `--steps` steps at each of `--rates`, in bf16, its fastest setting on a CPU with
   bf16. The best rate by final bits per byte on the entire validation split also runs with a second beta of 0.99
   (nanoGPT's value for few tokens per step); the better of the two settings runs with all seeds, and the
   mean of these runs is the target. Steps in float32, nanoGPT's setting on a CPU, are also timed, and `--float32`
   completes one such run.
2. Ours (`OURS`, only keys of params.yaml and conf/) may choose the length of its schedule: the fewest steps, on a grid
   of factor 1.25, for which the mean over seeds reaches the target.
3. Timing: each arm is a process; all take turns for a few steps, and seconds per step are medians over the rounds, in
   wall time and in CPU time (which is reliable on a shared machine). Seconds to the target are steps times seconds
   per step, without evaluating and saving. A second figure adds compilation (by PyTorch and oneDNN): the excess time of
   a run's first steps.
4. Ablations remove one of our choices at a time. Their time is the steps to the target times their seconds per step.
   Here, the steps (ours as well) are searched on a grid of factor 2 and interpolated between two runs in log steps.
   Runs have at most four times our steps.

Goal: at most 1/3 of the baseline's time. Finished runs are kept in `.work/time_to_loss`, keyed by their specification,
the tokens and the training code (`--fresh` discards them). Writes `results/time_to_loss-cpu.json` and `.png`; `--quick`
(a tiny model, nothing written) checks that the benchmark works. Not guaranteed: an untouched validation split; both
sides are tuned on it.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import train_speed
from benchmarks.time_to_loss_report import Reached, plot, ratio, steps_to, table, verdict
from benchmarks.train_speed import Side
from pipeline.run import device, workdir

SHAPE = {"width": 192, "layers": 4, "heads": 3}  # nanoGPT's; 2,655,936 parameters at 4,096 tokens and a context of 512
OURS = (
    "scale=demo",
    "model=nano",
    "model.d_ff=640",
    "language.optimizer=muon",
    "language.learning_rate=6e-3",
    "language.learning_rates={embedding: 0.02}",
    "language.schedule=wsd",
    "language.decay_ratio=0.6",
    "language.min_ratio=0.0",
    "language.warmup_steps=10",
    "language.induction_heads=true",
    "runtime.precision=bf16",
    "runtime.compile=auto",
)
TINY = ("model.width=32", "model.layers=2", "model.heads=1", "model.head_dim=32", "model.d_ff=96")


@dataclass(frozen=True)
class Arm:
    """Our run without one choice, removed by overrides or by a name defined in `time_to_loss_arm.py`."""

    name: str
    overrides: tuple[str, ...] = ()
    without: str = ""


ABLATIONS: dict[str, list[Arm]] = {  # of several arms, only the one with the fewest bits per byte counts
    "Muon -> AdamW, best of 3 rates": [
        Arm(f"AdamW {rate}", ("language.optimizer=adamw", f"language.learning_rate={rate}"))
        for rate in ("1e-3", "2e-3", "4e-3")
    ],
    "embedding's own rate -> Muon's": [Arm("one rate", ("language.learning_rates={}",))],
    "WSD -> cosine to a tenth": [Arm("cosine", ("language.schedule=cosine", "language.min_ratio=0.1"))],
    "packed documents -> random windows": [Arm("windows", (), "packing")],
    "packed documents, mask off": [Arm("unmasked", (), "mask")],
    "bf16 -> float32": [Arm("float32", ("runtime.precision=fp32",))],
    "pieces in C++ -> PyTorch's operators": [Arm("operators", ("runtime.compile=false",))],
    "induction heads -> normal weights": [Arm("normal weights", ("language.induction_heads=false",))],
    "architecture -> GPT-2's, normal weights": [Arm("GPT-2", (), "architecture")],
    "1,024 -> 2,048 tokens a step": [Arm("2,048 tokens", ("language.tokens_per_step=2048",))],
}


class Runs:
    """Complete runs, one process each; finished ones are loaded."""

    def __init__(self, folder: Path, tokens: Path, *, fresh: bool) -> None:
        self.folder, self.fresh = folder, fresh
        self.mine: set[Path] = set()  # run by this process
        self.data = workdir.sha256(tokens / "meta.json")
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The output of the run, with its specification. Raises RuntimeError if the run died."""
        file = self.folder / f"{workdir.canonical_hash([spec, self.data, code_of(spec['side'])])}.json"
        if file.is_file() and (not self.fresh or file in self.mine):
            return json.loads(file.read_text())
        done = subprocess.run(
            [sys.executable, str(ROOT / "benchmarks/time_to_loss_arm.py"), json.dumps(spec)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment(spec),
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{spec['side']}: {done.stderr[-2000:]}")
        found = json.loads(done.stdout.splitlines()[-1]) | {"spec": spec}
        file.write_text(json.dumps(found), encoding="utf-8")
        self.mine.add(file)
        last = found["points"][-1]
        changed = [given for given in spec.get("overrides", ()) if given not in OURS]
        sys.stdout.write(
            f"{spec['side']} seed {spec.get('seed')} {spec.get('recipe') or changed} {spec.get('without', '')}:"
            f" {last['step']} steps, {last['bpb']:.4f} bits per byte, {last['cpu_seconds']:.0f} CPU s\n"
        )
        sys.stdout.flush()
        return found


def code_of(side: str) -> str:
    """A hash of the code that determines the results of a side's runs."""
    files = [ROOT / "benchmarks/nanogpt.py"]
    if side == "ours":
        folders = ("learning", "model", "model/cpu", "batches")
        files += [
            ROOT / "stages/language.py",
            *sorted(p for f in folders for p in (ROOT / "pipeline" / f).iterdir() if p.suffix in (".py", ".cpp")),
        ]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def environment(spec: dict[str, Any]) -> dict[str, str]:
    """The environment of a run's process. The baseline is written for CPUs, so both sides run on the CPU."""
    return os.environ | {
        "STAGECOACH_MLFLOW": "off",
        "OMP_NUM_THREADS": str(spec["threads"]),
        "CUDA_VISIBLE_DEVICES": "",
    }


def final(run: dict[str, Any]) -> float:
    """Final bits per byte on the entire validation split."""
    return run["points"][-1]["bpb"]


class Bench:
    """The specifications of all runs, and the protocol in the module docstring as methods."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        quick = arguments.quick
        self.base: dict[str, Any] = {
            "tokens": str(arguments.tokens.resolve()),
            "tokenizer": str(arguments.tokenizer.resolve()),
            "threads": arguments.threads,
            "points": 2 if quick else 10,
            "shape": {"width": 32, "layers": 2, "heads": 1} if quick else SHAPE,
        }
        if quick:
            self.base |= {"most": 512, "slice": 128}
        self.context, self.rows = arguments.context, arguments.rows
        folder = workdir.root() / "time_to_loss"
        self.runs = Runs(folder, arguments.tokens, fresh=arguments.fresh or quick)

    def nanogpt(self, rate: float, seed: int, beta: float = 0.95, **setting: bool) -> dict[str, Any]:
        """The specification of the baseline, without the number of steps."""
        recipe = {
            "rows": self.rows,
            "context": self.context,
            "rate": rate,
            "seed": seed,
            "warmup": max(1, self.arguments.steps // 20),
            "betas": [0.9, beta],
            **setting,
        }
        return self.base | {"side": "nanogpt", "recipe": recipe}

    def ours(self, seed: int, arm: Arm | None = None) -> dict[str, Any]:
        """The specification of our run, or of an ablation arm."""
        size = [f"language.context={self.context}", f"language.tokens_per_step={self.rows * self.context}"]
        given = [*OURS, *size, *(TINY if self.arguments.quick else ()), *(arm.overrides if arm else ())]
        spec = self.base | {"side": "ours", "seed": seed, "overrides": given}
        return spec | {"without": arm.without} if arm and arm.without else spec

    def baseline(self) -> tuple[dict[str, float], dict[str, Any], list[dict[str, Any]]]:
        """Bits per byte by rate (and beta), the best setting, and the runs of all seeds with it."""
        settings = {f"{rate:g}": {"rate": rate} for rate in self.arguments.rates}
        found = {name: final(self._run(seed=0, **setting)) for name, setting in settings.items()}
        rate = settings[min(found, key=lambda name: found[name])]["rate"]
        if not self.arguments.quick:
            settings[f"{rate:g}, beta 0.99"] = {"rate": rate, "beta": 0.99}
            found[f"{rate:g}, beta 0.99"] = final(self._run(seed=0, rate=rate, beta=0.99))
        best = settings[min(found, key=lambda name: found[name])]
        return found, best, [self._run(seed=seed, **best) for seed in range(self.arguments.seeds)]

    def _run(self, **setting: Any) -> dict[str, Any]:
        return self.runs(self.nanogpt(**setting, bf16=True) | {"steps": self.arguments.steps})

    def mine(self, target: float) -> tuple[Reached, list[dict[str, Any]]]:
        """Our fewest steps whose mean over seeds reaches the target, and those runs."""

        def mean(steps: int) -> float:
            return statistics.mean(
                final(self.runs(self.ours(seed) | {"steps": steps})) for seed in range(self.arguments.seeds)
            )

        first = self.arguments.first
        reached = steps_to(
            target, mean, first=first, factor=4 if self.arguments.quick else 1.25, most=self.arguments.steps
        )
        steps = reached.steps or self.arguments.steps
        return reached, [self.runs(self.ours(seed) | {"steps": steps}) for seed in range(self.arguments.seeds)]

    def ablation(self, arms: list[Arm], target: float, steps: int) -> tuple[Arm, Reached, float]:
        """The best arm at our number of steps, its own steps to the target, and its compile time (CPU s)."""

        def bpb(arm: Arm, steps: int) -> float:
            return final(self.runs(self.ours(0, arm) | {"steps": steps}))

        best = min(arms, key=lambda arm: bpb(arm, steps)) if len(arms) > 1 else arms[0]
        most = min(self.arguments.steps, 4 * steps)
        reached = steps_to(target, lambda n: bpb(best, n), first=steps, factor=2, most=most)
        compiling = self.runs(self.ours(0, best) | {"steps": steps})["compiling_cpu"]
        return best, reached, compiling


@contextmanager
def started(specs: dict[str, dict[str, Any]]) -> Iterator[list[Side]]:
    """Start a process for each arm, warmed up one after another."""
    sides: list[Side] = []
    try:
        for name, spec in specs.items():
            command = [sys.executable, str(ROOT / "benchmarks/time_to_loss_arm.py"), json.dumps(spec)]
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=environment(spec),
            )
            sides.append(Side(name, process))
            sides[-1].hear()
        yield sides
    finally:
        for side in sides:
            side.process.kill()
            side.process.communicate()


def seconds_of_a_step(specs: dict[str, dict[str, Any]], rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """name -> median wall and CPU time over interleaved rounds, and the memory of the process."""
    with started(specs) as sides:
        train_speed.measure(sides, rounds, steps, tokens=1)  # speeds are steps per second
        return {
            side.name: {
                "seconds": statistics.median(1 / s for s in side.speeds),
                "cpu_seconds": statistics.median(1 / s for s in side.worked),
                "cpu_range": [min(1 / s for s in side.worked), max(1 / s for s in side.worked)],
                "peak_mib": round(side.peak / 2**20),
            }
            for side in sides
        }


def ablations(bench: Bench, target: float, steps: int, quick: bool) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """name -> results without that choice, and the specifications whose steps have to be timed."""
    found: dict[str, Any] = {}
    timed: dict[str, dict[str, Any]] = {}
    for name, arms in ({} if quick else ABLATIONS).items():
        arm, reached, compiling = bench.ablation(arms, target, steps)
        found[name] = {
            "arm": arm.name,
            "overrides": list(arm.overrides),
            "bpb_at_our_steps": round(dict(reached.tried)[steps], 4),
            "steps": reached.steps,
            "between": reached.between and round(reached.between),
            "tried": reached.tried,
            "compiling_cpu": round(compiling, 1),
        }
        timed[name] = bench.ours(0, arm)
    return found, timed


def measured(bench: Bench, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the entire protocol. Raises ValueError if the models differ in size."""
    search, best, runs = bench.baseline()
    target = statistics.mean(final(run) for run in runs)
    reached, mine = bench.mine(target)
    steps = reached.steps or arguments.steps
    sizes = {"nanogpt": runs[0]["parameters"], "ours": mine[0]["parameters"]}
    if abs(sizes["ours"] / sizes["nanogpt"] - 1) > 0.02:
        raise ValueError(f"expected models of equal size within 2%, found {sizes}; change model.d_ff in OURS")
    found, timed = ablations(bench, target, steps, arguments.quick)
    baselines = {"nanoGPT, bf16": bench.nanogpt(**best, seed=0, bf16=True)}
    curves, slow, compiling = {"nanoGPT, bf16": runs}, None, 0.0
    if not arguments.quick:
        baselines["nanoGPT, float32"] = bench.nanogpt(**best, seed=0)
        baselines["nanoGPT, bf16, compiled"] = bench.nanogpt(**best, seed=0, bf16=True, compiled=True)
        compiling = bench.runs(baselines["nanoGPT, bf16, compiled"] | {"steps": 40})["compiling_cpu"]
    if arguments.float32:
        slow = bench.runs(bench.nanogpt(**best, seed=0) | {"steps": arguments.steps})
        curves["nanoGPT, float32"] = [slow]
    nothing = (
        bench.ablation([Arm("nothing")], target, steps)[1].between if found else None
    )  # ours on the ablations' grid
    step = seconds_of_a_step(baselines | {"ours": bench.ours(0)} | timed, arguments.rounds, arguments.round_steps)
    for name, row in found.items():
        row["cpu_seconds"] = step[name]["cpu_seconds"]
        row["times_longer"] = (
            ratio(step, (name, row["between"]), ("ours", nothing or steps))["cpu_seconds"] if row["steps"] else None
        )
    base = {
        "rates": search,
        "best": best,
        "steps": arguments.steps,
        "seeds": [final(run) for run in runs],
        "compiling": compiling,
        "float32": final(slow) if slow else None,
    }
    ours = {
        "overrides": bench.ours(0)["overrides"],
        "steps": steps,
        "reached": reached.steps is not None,
        "between": reached.between,
        "between_by_ablations_grid": nothing,
        "tried": reached.tried,
        "seeds": [final(run) for run in mine],
        "compiling": statistics.median(run["compiling_cpu"] for run in mine),
    }
    report = {
        "machine": device.describe("bf16") | {"threads": arguments.threads},
        "tokens_of_a_step": bench.rows * bench.context,
        "tokens": bench.runs.data,
        "parameters": sizes,
        "target": target,
        "baseline": base,
        "ours": ours,
        "verdict": verdict(step, ours, base),
        "ablations": found,
        "step": step,
    }
    if not arguments.quick:
        plot(ROOT / "benchmarks/results/time_to_loss-cpu.png", curves | {"ours": mine}, step, target)
    return report


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Print the table; write the report unless --quick."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=Path, default=Path("data/tokens/text"), help="from stage_encode")
    parser.add_argument("--tokenizer", type=Path, default=Path("data/tokenizer"), help="from stage_tokenizer")
    parser.add_argument("--steps", type=int, default=1200, help="steps of the baseline")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3, 8e-3], help="for the baseline")
    parser.add_argument("--first", type=int, default=125, help="first number of steps in the search for our schedule")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=2, help="rows per batch")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--float32", action="store_true", help="also run the baseline in float32 to the end, instead of only timing it"
    )
    parser.add_argument("--fresh", action="store_true", help="discard finished runs")
    parser.add_argument("--quick", action="store_true", help="a tiny model, no ablations; nothing is written")
    arguments = parser.parse_args(given)
    if arguments.quick:
        arguments.steps, arguments.first, arguments.seeds, arguments.rates = 8, 8, 1, arguments.rates[:1]
        arguments.rounds, arguments.round_steps, arguments.context = 1, 2, 64
    if not (arguments.tokens / "meta.json").is_file():
        parser.error(
            f"{arguments.tokens}: expected encoded tokens, found none; run dvc repro stage_encode, or give --tokens"
        )
    report = measured(Bench(arguments), arguments)
    if not arguments.quick:
        file = ROOT / "benchmarks/results/time_to_loss-cpu.json"
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(table(report))
    return report


if __name__ == "__main__":
    main()
