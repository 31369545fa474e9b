"""kill -9 at random moments: checks that each training stage then publishes what an uninterrupted run does.

    python benchmarks/kills.py [STAGE ...] [--kills 20] [--seed 0] [--folder DIR]      default: all training stages

A scratch folder has the data and models at scale smoke, built by the stages themselves (later calls reuse them). Each
stage first runs uninterrupted. Then it is started and killed, with its children, by SIGKILL at a random moment after
a fraction EARLIEST of its run time, so most kills hit loading, the training loop (with a state after every step) or
publishing. A run that ends before its kill is compared and started over; after the last kill the stage runs to its end
and is compared too. Runs are equal if every file published by the uninterrupted run has the same sha256. Prints a line
per stage and writes benchmarks/results/kills.json; exits with 1 if bytes differ.

One thread, one process, no MLflow. Not guaranteed: equal bytes across thread counts, machines or versions of torch, or
after a power loss, when data may not have reached the disk.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.run import graph

RESULTS = ROOT / "benchmarks" / "results" / "kills.json"
DATA = ("corpus", "tasks", "tokenizer", "encode text", "encode code")
GRAPH = graph.stages(ROOT)
TRAINING = tuple(
    name.removeprefix("stage_")
    for name, stage in GRAPH.items()
    if any(out.startswith("metrics/training/") for out in stage.outs)
)
SETTINGS = (
    "scale=smoke",
    "runtime.save_steps=1",
    "runtime.device=cpu",
    "runtime.precision=fp32",
    "runtime.compile=false",
)
EARLIEST = 0.4  # fraction of the run time; earlier, Python and torch are still being imported
LIMIT = 600.0  # maximum seconds for a run


@dataclass
class Found:
    """Results for one stage."""

    stage: str
    seconds: float  # of the uninterrupted run
    files: int  # published by the uninterrupted run
    kills: int = 0
    resumed: int = 0  # starts that resumed from a state
    compared: int = 0  # runs that ended
    different: int = 0  # runs that ended with different bytes


class Scratch:
    """A folder in which the stages run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("conf", "pipeline", "stages", "pyproject.toml", "requirements.lock", "params.yaml", "feedback"):
            if not (folder / name).exists():
                (folder / name).symlink_to(ROOT / name)
        for name in ("own", "benchmarks"):
            (folder / "data" / name).mkdir(parents=True, exist_ok=True)

    def start(self, stage: str, work: str, *more: str) -> subprocess.Popen[bytes]:
        """Start a stage, with its output in a log file."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("STAGECOACH_", "DVC_"))}
        variables = {
            "OMP_NUM_THREADS": "1",
            "STAGECOACH_MLFLOW": "off",
            "STAGECOACH_WORK": str(self.folder / work),
            "PYTHONPATH": str(ROOT),
        }
        name, *item = stage.split()
        command = [sys.executable, "-m", f"stages.{name}", *item, *SETTINGS, *more]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command, cwd=self.folder, env=kept | variables, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def log(self) -> Path:
        """The log file for the stages' output."""
        return self.folder / "log"

    def whole(self, stage: str, work: str) -> float:
        """Run a stage to its end and return the seconds. Exits if the stage fails."""
        start = time.monotonic()
        if code := self.start(stage, work).wait(LIMIT):
            sys.exit(f"stage_{stage} exited with code {code}; its output is in {self.log}")
        return time.monotonic() - start

    def files(self, since: float = 0.0) -> dict[str, str]:
        """sha256 of the files under models/ and metrics/ that were written since a given time."""
        paths = sorted(
            path
            for top in ("models", "metrics")
            for path in (self.folder / top).rglob("*")
            if path.is_file() and path.stat().st_mtime >= since
        )
        return {str(path.relative_to(self.folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}

    def remove(self, published: dict[str, str]) -> None:
        """Remove what a stage published, so that a later run cannot be confused with an earlier one."""
        for name in published:
            (self.folder / name).unlink(missing_ok=True)


def prepare(scratch: Scratch, stages: list[str]) -> None:
    """Build the stages' inputs: data, and the models of earlier stages."""
    wanted: list[str] = []

    made = {out: name for name in TRAINING for out in GRAPH[f"stage_{name}"].outs}

    def want(stage: str) -> None:
        for need in [made[dep] for dep in GRAPH[f"stage_{stage}"].deps if dep in made]:
            want(need)
            if need not in wanted:
                wanted.append(need)

    for stage in stages:
        want(stage)
    for stage in (*DATA, *wanted):
        scratch.whole(stage, "work")


def killed(scratch: Scratch, stage: str, kills: int, draw: random.Random) -> Found:
    """Kill one stage `kills` times, and compare what it publishes."""
    for name in ("whole", "killed"):
        shutil.rmtree(scratch.folder / name, ignore_errors=True)
    began = time.time()
    seconds = scratch.whole(stage, "whole")
    published = scratch.files(began)
    found = Found(stage, round(seconds, 1), len(published))
    scratch.remove(published)
    size = scratch.log.stat().st_size
    anew = True
    while found.kills < kills:
        began = time.monotonic()
        process = scratch.start(stage, "killed")
        try:
            code = process.wait(draw.uniform(EARLIEST, 1.0) * seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            found.kills += 1
            anew = False
            continue
        if code:
            sys.exit(f"stage_{stage} exited with code {code} after {found.kills} kills; its output is in {scratch.log}")
        if anew:  # perhaps a faster run, on a less busy machine: draw earlier moments from now on
            seconds = time.monotonic() - began
        _compare(scratch, published, found)
        scratch.remove(published)
        shutil.rmtree(scratch.folder / "killed")
        anew = True
    scratch.whole(stage, "killed")
    _compare(scratch, published, found)
    with scratch.log.open("rb") as log:
        log.seek(size)
        found.resumed = log.read().count(b"resumed at step")
    for name in ("killed", "whole"):
        shutil.rmtree(scratch.folder / name, ignore_errors=True)
    return found


def _compare(scratch: Scratch, published: dict[str, str], found: Found) -> None:
    """Count a run that ended, and whether its files match the uninterrupted run."""
    now = scratch.files()
    other = [name for name, hash_ in published.items() if now.get(name) != hash_]
    found.compared += 1
    found.different += bool(other)
    if other:
        sys.stdout.write(f"  {found.stage}: different bytes after {found.kills} kills: {', '.join(other)}\n")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks/kills.py", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"any of {', '.join(TRAINING)}")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="seed for drawing the moments")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "stagecoach-kills")
    asked = parser.parse_args()
    if unknown := sorted(set(asked.stages) - set(TRAINING)):
        parser.error(f"{unknown[0]} is not a training stage; valid stages: {', '.join(TRAINING)}")
    stages = [stage for stage in TRAINING if stage in asked.stages or not asked.stages]
    scratch, rows = Scratch(asked.folder.resolve()), {}
    if RESULTS.is_file():
        rows = {row["stage"]: row for row in json.loads(RESULTS.read_text())}
    prepare(scratch, stages)
    failed = False
    for stage in stages:
        found = killed(scratch, stage, asked.kills, random.Random(f"{asked.seed} {stage}"))
        sys.stdout.write(
            f"{stage}: {found.kills} kills in runs of {found.seconds} s, {found.resumed} resumed from a state;"
            f" {found.compared} runs ended, {found.different} with different bytes among {found.files} files\n"
        )
        sys.stdout.flush()
        failed |= found.different > 0
        rows[stage] = asdict(found)
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps([rows[name] for name in TRAINING if name in rows], indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
