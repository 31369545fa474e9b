"""Builds the graph: stages whose inputs are ready, side by side, each as `dvc repro -s STAGE`.

    python -m pipeline.tools.launch            the whole graph
    python -m pipeline.tools.launch spine      the chain from text to a deployed model, what it needs, its evaluations
                                               and the report
    python -m pipeline.tools.launch stage_dpo  one stage and what it needs

A stage that fails takes with it only what needs it: the rest is built, then a table gives what became of each stage and
how to go on, and the exit code is that of the first failure. The report reads whatever was measured, so it only waits
for the others. SIGINT, SIGTERM and SIGHUP reach each running stage once; it saves its state, and the same command
resumes. When the launcher is killed, the kernel ends DVC and its stage (Linux). A stage has the cores divided by the
jobs as threads, also where it runs alone: their number decides its last bits, so one that was stopped must resume with
as many.

Not promised: that an estimate of the time left is right before the first full run; it starts from `seconds` in the
scale file.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from pipeline.run import device, processes, workdir
from pipeline.run.config import Settings, read_yaml
from pipeline.run.errors import ConfigError
from pipeline.sandbox import jail

SPINE = "spine"
CHAIN = ("language", "code", "tools", "rlhf")  # whose evaluations belong to the spine; reward has a stage of its own
REPORT, DEPLOY = "stage_report", "stage_deploy"
SANDBOXED = {"stage_reward", "stage_rlhf", "stage_grpo", "stage_diffusion_grpo"}  # run programs that a model wrote
UNKNOWN_SECONDS = 30.0  # of a stage that nobody has timed
LOOK_SECONDS = 0.1
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENDED = "STAGECOACH_ENDED"  # the file in which a stage leaves its exit code; DVC's own says only that it failed
# `python -m dvc ...`, bound to the launcher
REPRO = (
    "import runpy, sys; from pipeline.run.processes import die_with_parent; die_with_parent(int(sys.argv.pop(1))); "
    "sys.argv[0] = 'dvc'; runpy.run_module('dvc', run_name='__main__')"
)


@dataclass
class Stage:
    """What the launcher knows of a stage of the graph."""

    name: str
    waits: set[str]  # stages that must have ended well before it
    seconds: float  # that it probably takes
    state: str = "waiting"  # running, built, up to date, failed, not built, left out, stopped
    why: str = ""
    took: float = 0.0


@dataclass
class Build:
    """The stages of one call of the launcher, and the order in which they go."""

    stages: dict[str, Stage]
    jobs: int
    behind: dict[str, float] = field(default_factory=dict)  # seconds of the longest chain that begins with a stage

    def __post_init__(self) -> None:
        for name in self.stages:
            self._chain(name)

    def _chain(self, name: str) -> float:
        if name not in self.behind:
            after = (other.name for other in self.stages.values() if name in other.waits and other.name != REPORT)
            self.behind[name] = self.stages[name].seconds + max(map(self._chain, after), default=0.0)
        return self.behind[name]

    def ready(self) -> list[str]:
        """Stages that may start: deploy first, since a person waits for it, then those with the longest chain behind
        them.
        """
        found = [one.name for one in self.stages.values() if one.state == "waiting" and self._may_start(one)]
        return sorted(found, key=lambda name: (name != DEPLOY, -self.behind[name], name))

    def _may_start(self, one: Stage) -> bool:
        done = ("built", "up to date")
        if one.name == REPORT:
            return all(self.stages[name].state not in ("waiting", "running") for name in one.waits)
        return all(self.stages[name].state in done for name in one.waits)

    def ended(self, name: str, state: str, why: str = "") -> None:
        """Note how a stage ended; after anything but success what needs it is not built."""
        self.stages[name].state, self.stages[name].why = state, why
        if state not in ("built", "up to date"):
            self._block(name)

    def _block(self, name: str) -> None:
        for other in self.stages.values():
            if name in other.waits and other.state == "waiting" and other.name != REPORT:
                other.state, other.why = "not built", f"needs {name}"
                self._block(other.name)

    def named(self, *states: str) -> list[str]:
        """The stages in these states."""
        return [one.name for one in self.stages.values() if one.state in states]

    def left(self, running: dict[str, float]) -> float:
        """Seconds until all is built, of the longest chain or of all work over the jobs; `running`: seconds that
        stages have run.
        """
        seconds = {name: self.stages[name].seconds for name in self.named("waiting", "running")}
        seconds |= {name: max(1.0, seconds[name] - passed) for name, passed in running.items()}
        chains = [self.behind[name] - self.stages[name].seconds + seconds[name] for name in seconds]
        return max([sum(seconds.values()) / self.jobs, *chains], default=0.0)

    def progress(self, running: dict[str, float]) -> str:
        """`7 of 12, about 4 min left`."""
        left = self.left(running)
        said = f"{left / 60:.0f} min" if left >= 90 else "1 min" if left >= 45 else f"{max(left, 1):.0f} s"
        return f"{len(self.named('built', 'up to date'))} of {len(self.stages)}" + (
            f", about {said} left" if left else ""
        )

    def table(self) -> str:
        """A line for each stage: its name, what became of it, seconds, why."""
        width = max(map(len, self.stages))
        rows = [
            f"{one.name:{width}}  {one.state:10}  {f'{one.took:.0f} s' if one.took else '':>8}  {one.why}".rstrip()
            for one in self.stages.values()
        ]
        return "\n".join(rows) + "\n"


def graph() -> dict[str, set[str]]:
    """Every stage of dvc.yaml, in an order that respects what each waits for, with the stages that it waits for."""
    from dvc.repo import Repo

    with Repo() as repo:
        found = repo.index.graph
        waits = {s.addressing: {u.addressing for u in found.successors(s)} for s in found.nodes}
    ordered: dict[str, set[str]] = {}
    while len(ordered) < len(waits):
        ordered |= {
            name: waits[name] for name in sorted(waits) if name not in ordered and waits[name] <= ordered.keys()
        }
    return ordered


def chosen(waits: dict[str, set[str]], target: str | None) -> dict[str, set[str]]:
    """The stages that `target` names, and what they need. Raises ConfigError for a name that is not there."""
    if target is None:
        return waits
    if target == SPINE:
        ends = {DEPLOY, "stage_evaluate_reward", *(f"stage_evaluate@{model}" for model in CHAIN)}
    else:
        ends = {name for name in waits if target in (name, name.split("@")[0])}
    if not ends or not ends <= waits.keys():
        raise ConfigError(
            f"no stage {target!r} in dvc.yaml: expected {SPINE}, or a stage; `dvc stage list` prints their names"
        )
    frontier = list(ends)
    while frontier:
        new = waits[frontier.pop()] - ends
        ends |= new
        frontier += new
    ends |= {REPORT} if target == SPINE else set()  # it reads all metrics there are, and waits for no branch
    return {name: needs & ends for name, needs in waits.items() if name in ends}


def seconds_of(names: list[str], scale: str) -> dict[str, float]:
    """How long each stage probably takes: its last run here, else `seconds` of the scale file."""
    guesses = read_yaml(Path(f"conf/scale/{scale}.yaml")).get("seconds") or {}
    found = {}
    for name in names:
        plain = name.removeprefix("stage_").replace("evaluate_reward", "evaluate@reward")
        guess = guesses.get(plain, guesses.get(plain.split("@")[0], UNKNOWN_SECONDS))
        timed = sorted((workdir.root() / plain).glob("*/speed.json"), key=lambda path: path.stat().st_mtime)
        with suppress(OSError, ValueError, KeyError, IndexError):
            guess = json.loads(timed[-1].read_text())["seconds"]
        found[name] = float(guess)
    return found


def no_sandbox(settings: Settings) -> str:
    """Why programs that a model wrote cannot be run here; empty where they can, or may run without a sandbox."""
    runtime, sandbox = settings.layers("runtime"), settings.layers("sandbox")
    elsewhere = runtime["sandbox"].raw if "sandbox" in runtime else None
    allowed = "allow_unsafe" in sandbox and bool(sandbox["allow_unsafe"].raw)
    if allowed or (elsewhere and elsewhere.get("url")):
        return ""
    return str(jail.probe().get("refused", ""))


def tidy_locks(folder: Path = Path(".dvc/tmp")) -> None:
    """Remove the list of DVC's locks when every process in it is gone, or when one was killed while it wrote the
    list.
    """
    path = folder / "rwlock"
    try:
        held = json.loads(path.read_text())
        entries = [*held.get("write", {}).values(), *(one for many in held.get("read", {}).values() for one in many)]
        alive = [entry["pid"] for entry in entries if psutil.pid_exists(int(entry["pid"]))]
    except FileNotFoundError:
        return
    except (ValueError, AttributeError, KeyError, TypeError):
        entries, alive = ["unreadable"], []
    if entries and not alive:
        path.unlink(missing_ok=True)
        say(f"{path}: DVC's locks of processes that are gone were removed")


def say(text: str) -> None:
    """A line of the launcher."""
    sys.stderr.write(f"launch: {text}\n")
    sys.stderr.flush()


class Launcher:
    """Starts and ends the stages of a build."""

    def __init__(self, build: Build, again: str) -> None:
        self.build, self.again = build, again
        self.running: dict[str, tuple[processes.Process, float]] = {}
        self.signal = 0  # the first one that came
        self.code = 0  # of the first stage that failed
        self.told: set[int] = set()  # processes that were asked to end,
        self.deadline = float("inf")  # and when those that have not are killed
        self.threads = str(max(1, device.workers("auto") // build.jobs))
        self.ended = workdir.root() / "ended"

    def run(self) -> int:
        """Build what can be built; the exit code."""
        self.ended.mkdir(parents=True, exist_ok=True)
        handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS if _heeded(number)}
        try:
            while self.running or (not self.signal and self.build.ready()):
                self._start()
                self._look()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        for name in self.build.named("waiting"):
            self.build.stages[name].state = "not built"
        sys.stderr.write("\n" + self.build.table())
        if self.signal:
            say(f"stopped by {signal.Signals(self.signal).name}; go on with: {self.again}")
            return 128 + self.signal
        if self.code:
            say(
                f"{', '.join(self.build.named('failed'))} failed, see above; all else was built. Go on with:"
                f" {self.again}"
            )
        return self.code

    def _on_signal(self, number: int, _frame: object) -> None:
        self.signal = self.signal or number

    def _start(self) -> None:
        free = self.build.jobs - len(self.running)
        names = [] if self.signal else self.build.ready()[:free]
        for name in names:
            (self.ended / name).unlink(missing_ok=True)
            environment = {"OMP_NUM_THREADS": self.threads} | os.environ | {ENDED: str(self.ended / name)}
            command = [sys.executable, "-c", REPRO, str(os.getpid()), "--wait-for-lock", "repro", "-s", name]
            process = subprocess.Popen(command, env=environment, start_new_session=True)
            self.running[name] = (process, time.monotonic())
            self.build.stages[name].state = "running"
            say(f"{name} starts ({self._progress()})")

    def _progress(self) -> str:
        return self.build.progress({name: time.monotonic() - began for name, (_, began) in self.running.items()})

    def _look(self) -> None:
        """Wait a moment, and take note of stages that ended."""
        if self.signal:
            self._stop()
        for name, (process, began) in list(self.running.items()):
            with suppress(subprocess.TimeoutExpired):
                self._end(name, process.wait(timeout=LOOK_SECONDS), time.monotonic() - began)

    def _end(self, name: str, status: int, seconds: float) -> None:
        del self.running[name]
        try:
            own = int((self.ended / name).read_text())
        except (OSError, ValueError):
            own = None  # its command did not run, or was killed
        self.build.stages[name].took = seconds
        if self.signal and status:
            self.build.ended(name, "stopped")
        elif status:
            code = own or (128 - status if status < 0 else status)
            self.code = self.code or code
            self.build.ended(name, "failed", f"exit {code}")
        else:
            self.build.ended(name, "up to date" if own is None else "built")
        say(f"{name}: {self.build.stages[name].state} in {seconds:.0f} s ({self._progress()})")
        if name == DEPLOY and not status and self.build.named("waiting", "running"):
            say("you can talk to it now: make chat   (the rest goes on)")

    def _stop(self) -> None:
        """Ask each stage once to save and end; DVC itself only where it runs none. What does not end is killed."""
        for process, _ in self.running.values():
            with suppress(psutil.NoSuchProcess):
                below = psutil.Process(process.pid).children()
                for one in [p for p in below or [psutil.Process(process.pid)] if p.pid not in self.told]:
                    if not self.told:
                        say("stages save their states and end")
                        self.deadline = time.monotonic() + processes.SAVE_SECONDS
                    self.told.add(one.pid)
                    one.send_signal(signal.SIGINT)
            if time.monotonic() > self.deadline:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _heeded(number: int) -> bool:
    """Whether a signal is not ignored, as SIGHUP is under nohup."""
    return signal.getsignal(number) is not signal.SIG_IGN


def prepare(target: str | None, jobs: int) -> Build:
    """The stages to build. Raises ConfigError for a wrong target or parameters."""
    settings = Settings(Path(), [])
    waits = chosen(graph(), target)
    seconds = seconds_of(list(waits), settings.name("scale"))
    build = Build({name: Stage(name, needs, seconds[name]) for name, needs in waits.items()}, jobs)
    concerned = sorted(SANDBOXED & waits.keys())
    if concerned and (refused := no_sandbox(settings)):
        say(f"there is no sandbox here ({refused}): what runs programs that a model wrote is left out")
        for name in concerned:
            build.ended(name, "left out", "no sandbox; sandbox.allow_unsafe: true runs it without one")
    return build


def main() -> int:
    """Command line of `python -m pipeline.tools.launch`."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.tools.launch", description="Build the graph, or a part of it."
    )
    parser.add_argument("-j", "--jobs", type=int, help="stages at a time (default: 2, on one core 1)")
    parser.add_argument("target", nargs="?", help=f"{SPINE}, or a stage of dvc.yaml; without it the whole graph")
    arguments = parser.parse_args()
    jobs = min(2, device.workers("auto")) if arguments.jobs is None else arguments.jobs
    if jobs < 1:
        parser.error(f"--jobs: expected at least 1, got {arguments.jobs}")
    under_make = "MAKELEVEL" in os.environ
    if under_make:  # which may be killed
        processes.die_with_parent(os.getppid())
    again = {SPINE: "make", None: "make all"}.get(arguments.target) if under_make else None
    again = again or " ".join(["python -m pipeline.tools.launch", *([arguments.target] if arguments.target else [])])
    try:
        tidy_locks()
        return Launcher(prepare(arguments.target, jobs), again).run()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
