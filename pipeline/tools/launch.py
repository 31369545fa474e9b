"""Builds the graph: runs stages in parallel as their inputs become ready, each as its own `dvc repro -s STAGE`.

    python -m pipeline.tools.launch            the whole graph
    python -m pipeline.tools.launch spine      the chain from text to a deployed model, everything it needs, its
                                               evaluations and the report
    python -m pipeline.tools.launch stage_dpo  one stage and everything it needs

If a stage fails, only the stages that depend on it are skipped. At the end, the launcher prints each stage's outcome,
how long jobs were idle, and the command to continue; the exit code is that of the first failure. The report covers what
was measured, so it waits for the other stages but requires none of them. On SIGINT, SIGTERM or SIGHUP, each running
stage gets one SIGINT and saves a checkpoint; the same command resumes it. If the launcher is killed, the kernel ends
DVC and its stage (Linux). A stage gets (cores / jobs) threads, or all cores if nothing large could run alongside it.
The graph and the scale decide that, not the current load: the number of threads affects the last bits of a result, so
an interrupted stage must resume with the same number. On Linux, DVC processes are forked from the launcher, which loads
DVC only once.

Not guaranteed: that the estimates of the remaining time are good before the first full run; they start from `seconds`
in the scale file and adapt to the pace of finished stages.
"""

import argparse
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from pipeline.run import device, graph, mlflow_store, processes, tracking, workdir
from pipeline.run.config import Settings, read_yaml
from pipeline.run.errors import ConfigError
from pipeline.sandbox import jail

SPINE = "spine"
CHAIN = ("language", "code", "tools", "rlhf")  # their evaluations are part of the spine; reward has a separate stage
REPORT, DEPLOY = "stage_report", "stage_deploy"
UNKNOWN_SECONDS = 30.0  # estimate for a stage without a measured time
POLL_SECONDS, LOOK_SECONDS = 0.1, 1.0  # polling intervals for processes and for their MLflow spools
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SMALL = 0.5
# Spins of a waiting OpenMP thread, a few microseconds: with none, a second thread gains nothing; with many more, all
# threads wait for the one whose core is busy with something else.
SPINS = "1000"
PACED_SECONDS = 30.0  # estimated seconds of built stages needed to judge how fast this machine is
MLFLOW = "STAGECOACH_MLFLOW"
ENDED = "STAGECOACH_ENDED"  # the file for a stage's exit code; DVC's own code says only that the stage failed
# Hints that DVC prints after each stage; the launcher prints them once, at the end
HINTS = re.compile(r"^\s*(Updating lock file|To track the changes|To enable auto staging|Use `dvc push`|$)")
# On macOS, forking a process that has used system frameworks may crash
PROCESSES = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


@dataclass
class Stage:
    name: str
    waits: set[str]  # stages that must succeed before this one
    seconds: float  # estimated time
    state: str = "waiting"  # then running, built, up to date, failed, not built, left out, stopped
    why: str = ""
    took: float = 0.0


@dataclass
class Build:
    """The stages of one launcher run, and their order."""

    stages: dict[str, Stage]
    jobs: int
    alone: frozenset[str] = frozenset()  # stages that run exclusively
    behind: dict[str, float] = field(default_factory=dict)  # stage -> seconds of the longest chain that starts with it

    def __post_init__(self) -> None:
        for name in self.stages:
            self._chain_seconds(name)

    def _chain_seconds(self, name: str) -> float:
        if name not in self.behind:
            after = (other.name for other in self.stages.values() if name in other.waits and other.name != REPORT)
            self.behind[name] = self.stages[name].seconds + max(map(self._chain_seconds, after), default=0.0)
        return self.behind[name]

    def ready(self) -> list[str]:
        """Stages that may start: deploy first, since the user is waiting for it, then by longest chain."""
        names = [stage.name for stage in self.stages.values() if stage.state == "waiting" and self._may_start(stage)]
        return sorted(names, key=lambda name: (name != DEPLOY, -self.behind[name], name))

    def next(self) -> list[str]:
        """The stages to start now. An exclusive stage waits for running ones, and later ones do not overtake it."""
        running, names = self.named("running"), list[str]()
        if self.alone & set(running):
            return []
        for name in self.ready()[: self.jobs - len(running)]:
            if name in self.alone:
                return names or ([] if running else [name])
            names.append(name)
        return names

    def _may_start(self, stage: Stage) -> bool:
        states = [self.stages[name].state for name in stage.waits]
        if stage.name == REPORT:
            return all(state not in ("waiting", "running") for state in states)
        return all(state in ("built", "up to date") for state in states)

    def ended(self, name: str, state: str, why: str = "") -> None:
        """Record the end of a stage; unless it succeeded, the stages that depend on it are not built."""
        self.stages[name].state, self.stages[name].why = state, why
        if state not in ("built", "up to date"):
            self._block(name)

    def _block(self, name: str) -> None:
        for other in self.stages.values():
            if name in other.waits and other.state == "waiting" and other.name != REPORT:
                other.state, other.why = "not built", f"needs {name}"
                self._block(other.name)

    def named(self, *states: str) -> list[str]:
        return [stage.name for stage in self.stages.values() if stage.state in states]

    @property
    def pace(self) -> float:
        """Actual seconds per estimated second, from the stages built so far; 1 until there is enough data."""
        built = [stage for stage in self.stages.values() if stage.state == "built"]
        estimate = sum(stage.seconds for stage in built)
        return sum(stage.took for stage in built) / estimate if estimate >= PACED_SECONDS else 1.0

    def left(self, running: dict[str, float]) -> float:
        """Seconds until everything is built: the longest chain or the work per job, whichever takes longer.
        `running`: stage -> seconds since it started.
        """
        pace = self.pace
        seconds = {name: pace * self.stages[name].seconds for name in self.named("waiting", "running")}
        seconds |= {name: max(1.0, seconds[name] - elapsed) for name, elapsed in running.items()}
        chains = [pace * (self.behind[name] - self.stages[name].seconds) + seconds[name] for name in seconds]
        work = sum(seconds[name] * (self.jobs if name in self.alone else 1) for name in seconds)
        return max([work / self.jobs, *chains], default=0.0)

    def progress(self, running: dict[str, float]) -> str:
        """`7 of 12, about 4 min left`."""
        seconds_left = self.left(running)
        time_left = (
            f"{seconds_left / 60:.0f} min"
            if seconds_left >= 90
            else "1 min"
            if seconds_left >= 45
            else f"{max(seconds_left, 1):.0f} s"
        )
        num_done = len(self.named("built", "up to date"))
        return f"{num_done} of {len(self.stages)}" + (f", about {time_left} left" if seconds_left else "")

    def table(self) -> str:
        """A line for each stage: name, outcome, seconds, reason."""
        width = max(map(len, self.stages))
        rows = [
            f"{s.name:{width}}  {s.state:10}  {f'{s.took:.0f} s' if s.took else '':>8}  {s.why}".rstrip()
            for s in self.stages.values()
        ]
        return "\n".join(rows) + "\n"

    def use(self, seconds: float) -> str:
        """Job utilization in a build that took `seconds`, and the longest chain: while other jobs are idle, only
        shortening this chain speeds up the build.
        """
        busy = sum(stage.took * (self.jobs if stage.name in self.alone else 1) for stage in self.stages.values())
        idle = max(0.0, 1 - busy / (seconds * self.jobs)) if seconds else 0.0
        ended: dict[str, float] = {}  # stage -> seconds of the longest chain that ends with it

        def until(name: str) -> float:
            if name not in ended:
                ended[name] = self.stages[name].took + max(map(until, self.stages[name].waits), default=0.0)
            return ended[name]

        last = max(self.stages, key=until)
        chain = [last]
        while waits := self.stages[chain[-1]].waits:
            chain.append(max(waits, key=until))
        names = " > ".join(name.removeprefix("stage_") for name in reversed(chain) if self.stages[name].took >= 1)
        jobs = f"{self.jobs} jobs, idle {idle:.0%} of the time" if self.jobs > 1 else "1 job"
        return f"{seconds / 60:.1f} min, {jobs}; longest chain {until(last) / 60:.1f} min: {names}\n"


def chosen(waits: dict[str, set[str]], target: str | None) -> dict[str, set[str]]:
    """The stages selected by `target`, and everything they need. Raises ConfigError for an unknown name."""
    if target is None:
        return waits
    if target == SPINE:
        ends = {DEPLOY, "stage_evaluate_reward", *(f"stage_evaluate@{model}" for model in CHAIN)}
    else:
        ends = {name for name in waits if target in (name, name.split("@")[0])}
    if not ends or not ends <= waits.keys():
        raise ConfigError(
            f"no stage {target!r} in dvc.yaml; expected {SPINE} or a stage (run `dvc stage list` to see the names)"
        )
    queue = list(ends)
    while queue:
        needed = waits[queue.pop()] - ends
        ends |= needed
        queue += needed
    ends |= {REPORT} if target == SPINE else set()  # the report covers existing metrics, so it needs no other stage
    return {name: needs & ends for name, needs in waits.items() if name in ends}


def alone(waits: dict[str, set[str]], seconds: dict[str, float], root: Path = Path()) -> frozenset[str]:
    """Training stages that run exclusively because parallel work would fill less than a fraction SMALL of their time:
    two threads in one stage achieve less than two parallel stages, but more than one thread next to an idle core. Work
    that needs no training runs beside the first stages, so it counts only once.

    `seconds` come from the scale file, so that an interrupted stage resumes with the same number of threads.
    """

    before: dict[str, set[str]] = {}

    def ancestors(name: str) -> set[str]:
        if name not in before:
            before[name] = waits[name].union(*map(ancestors, waits[name]))
        return before[name]

    outs = {name: stage.outs for name, stage in graph.stages(root).items()}
    train = {name for name in waits if any(out.startswith("models/") for out in outs[name])} - judging(root) - {DEPLOY}
    left, exclusive = dict(seconds), set[str]()  # left: seconds that no earlier stage runs beside
    for name in sorted(train, key=lambda name: (len(ancestors(name)), name)):
        others = [other for other in waits.keys() - ancestors(name) - {name} if name not in ancestors(other)]
        if sum(left[other] for other in others) < SMALL * seconds[name]:
            exclusive.add(name)
            continue
        room = seconds[name]
        for other in sorted(other for other in others if not train & {other, *ancestors(other)}):
            used = min(room, left[other])
            left[other], room = left[other] - used, room - used
    return frozenset(exclusive)


def seconds_of(names: list[str], scale: str, *, measured: bool = True) -> dict[str, float]:
    """The estimated time of each stage: that of its last run here if `measured`, else `seconds` from the scale file."""
    estimates = read_yaml(Path(f"conf/scale/{scale}.yaml")).get("seconds") or {}
    seconds = {}
    for name in names:
        short_name = name.removeprefix("stage_").replace("evaluate_reward", "evaluate@reward")
        estimate = estimates.get(short_name, estimates.get(short_name.split("@")[0], UNKNOWN_SECONDS))
        timed = (workdir.root() / short_name).glob("*/speed.json") if measured else ()
        timings = sorted(timed, key=lambda path: path.stat().st_mtime)
        with suppress(OSError, ValueError, KeyError, IndexError):
            estimate = json.loads(timings[-1].read_text())["seconds"]
        seconds[name] = float(estimate)
    return seconds


def judging(root: Path) -> set[str]:
    """The stages that run model-written programs while training a model."""
    made = graph.stages(root).values()
    return {s.name for s in made if "sandbox" in s.tracked and any(out.startswith("models/") for out in s.outs)}


def rewarded_by_code(settings: Settings, names: Iterable[str]) -> list[str]:
    """The stages that train on the results of model-written programs; others only use them for measurement."""
    blocks = {name: settings.layers(name.removeprefix("stage_")) for name in names}
    return sorted(
        name for name, block in blocks.items() if "rewards" in block and "code" in (block["rewards"].raw or {})
    )


def no_sandbox(settings: Settings) -> str:
    """The reason why model-written programs cannot run here; empty if they can, or may run without a sandbox."""
    runtime, sandbox = settings.layers("runtime"), settings.layers("sandbox")
    service = runtime["sandbox"].raw if "sandbox" in runtime else None
    unsafe_allowed = "allow_unsafe" in sandbox and bool(sandbox["allow_unsafe"].raw)
    if unsafe_allowed or (service and service.get("url")):
        return ""
    return str(jail.probe().get("refused", ""))


def tidy_locks(folder: Path = Path(".dvc/tmp")) -> None:
    """Remove DVC's lock file if all processes listed in it are gone, or if one was killed while writing it."""
    path = folder / "rwlock"
    try:
        locks = json.loads(path.read_text())
        entries = [
            *locks.get("write", {}).values(),
            *(entry for many in locks.get("read", {}).values() for entry in many),
        ]
        alive = [entry["pid"] for entry in entries if psutil.pid_exists(int(entry["pid"]))]
    except FileNotFoundError:
        return
    except (ValueError, AttributeError, KeyError, TypeError):
        entries, alive = ["unreadable"], []
    if entries and not alive:
        path.unlink(missing_ok=True)
        say(f"{path}: removed DVC's stale locks")


def say(text: str) -> None:
    """Print a line of launcher output to stderr."""
    sys.stderr.write(f"launch: {text}\n")
    sys.stderr.flush()


def _child(function: Callable[..., None], *arguments: object) -> BaseProcess:
    """Start `function(*arguments, launcher's pid)` in a process that dies with the launcher."""
    process = PROCESSES.Process(target=function, args=(*arguments, os.getpid()), daemon=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the child has its own handlers
    process.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return process


def _become_child(launcher: int) -> None:
    """In a child of the launcher: start a new session, reset the signal handlers, and die with the launcher."""
    os.setsid()
    for number in filter(_is_handled, SIGNALS):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    processes.die_with_parent(launcher)


def deliver(work: Path, end: Connection, launcher: int) -> None:
    """Deliver the stages' spooled MLflow calls until something is sent to `end`. Runs in a child of the launcher."""
    _become_child(launcher)
    mlflow_store.deliver(work, lambda: end.poll(LOOK_SECONDS), tracking.say)


def reproduce(name: str, environment: dict[str, str], launcher: int) -> None:
    """Run `dvc repro -s STAGE` in this process, a child of the launcher, and exit with DVC's code."""
    _become_child(launcher)
    os.environ.update(environment)
    from dvc.cli import main  # imported here because it takes a second
    from dvc.ui import ui

    write = ui.write
    ui.write = lambda *texts, **options: None if HINTS.search(" ".join(map(str, texts))) else write(*texts, **options)
    for handler in logging.getLogger("dvc").handlers:
        handler.addFilter(lambda record: not HINTS.search(record.getMessage()))
    sys.argv = ["dvc", "--wait-for-lock", "repro", "-s", name]
    raise SystemExit(main(sys.argv[1:]))


class Launcher:
    """Starts and stops the stages of a build."""

    def __init__(self, build: Build, command: str) -> None:
        self.build = build
        self.command = command  # continues the build
        self.running: dict[str, tuple[BaseProcess, float]] = {}  # stage -> DVC's process, its start
        self.signal = 0  # the first signal received
        self.code = 0  # exit code of the first stage that failed
        self.signaled: set[int] = set()  # pids that were sent SIGINT
        self.deadline = float("inf")  # when processes that are still running are killed
        self.cores = device.workers("auto")
        self.exit_codes = workdir.root() / "ended"

    def run(self) -> int:
        """Build everything that can be built; returns the exit code."""
        self.exit_codes.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS if _is_handled(number)}
        try:
            with nullcontext() if MLFLOW in os.environ else self._delivery():
                while self.running or (not self.signal and self.build.ready()):
                    self._start()
                    self._poll()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        for name in self.build.named("waiting"):
            self.build.stages[name].state = "not built"
        sys.stderr.write("\n" + self.build.table() + self.build.use(time.monotonic() - began))
        if self.build.named("built"):
            say("dvc.lock records what was built. Run git add dvc.lock; share the files with dvc push")
        if self.signal:
            say(f"stopped by {signal.Signals(self.signal).name}; continue with: {self.command}")
            return 128 + self.signal
        if self.code:
            failed = ", ".join(self.build.named("failed"))
            say(f"{failed} failed, see above; everything else was built. Continue with: {self.command}")
        return self.code

    @contextmanager
    def _delivery(self) -> Iterator[None]:
        """Deliver the stages' MLflow runs from a separate process, which gets some time to finish at the end."""
        receiver, sender = PROCESSES.Pipe(duplex=False)
        process = _child(deliver, workdir.root(), receiver)
        yield
        sender.send("end")
        process.join(mlflow_store.SHORT_WAIT if self.signal else mlflow_store.WAIT)
        process.kill()

    def _on_signal(self, number: int, _frame: object) -> None:
        self.signal = self.signal or number

    def _start(self) -> None:
        for name in [] if self.signal else self.build.next():
            (self.exit_codes / name).unlink(missing_ok=True)
            threads = max(1, self.cores // (1 if name in self.build.alone else self.build.jobs))
            defaults = {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": SPINS, MLFLOW: mlflow_store.LATER}
            environment = defaults | os.environ | {ENDED: str(self.exit_codes / name)}
            process = _child(reproduce, name, environment)
            self.running[name] = (process, time.monotonic())
            self.build.stages[name].state = "running"
            say(f"{name} starts ({self._progress()})")

    def _progress(self) -> str:
        return self.build.progress({name: time.monotonic() - began for name, (_, began) in self.running.items()})

    def _poll(self) -> None:
        """Wait briefly, and record the stages that ended."""
        if self.signal:
            self._stop()
        for name, (process, began) in list(self.running.items()):
            process.join(POLL_SECONDS)
            if process.exitcode is not None:
                self._finish_stage(name, process.exitcode, time.monotonic() - began)

    def _finish_stage(self, name: str, status: int, seconds: float) -> None:
        del self.running[name]
        try:
            recorded = int((self.exit_codes / name).read_text())
        except (OSError, ValueError):
            recorded = None  # the stage did not run, or was killed
        self.build.stages[name].took = seconds
        if self.signal and status:
            self.build.ended(name, "stopped")
        elif status:
            code = recorded or (128 - status if status < 0 else status)
            self.code = self.code or code
            self.build.ended(name, "failed", f"exit {code}")
        else:
            self.build.ended(name, "up to date" if recorded is None else "built")
        say(f"{name}: {self.build.stages[name].state} in {seconds:.0f} s ({self._progress()})")
        if name == DEPLOY and not status and self.build.named("waiting", "running"):
            say("you can talk to the model now: make chat   (the build continues)")

    def _stop(self) -> None:
        """Send each stage one SIGINT, so that it saves a checkpoint and exits; DVC itself gets one only while it runs
        no stage. Kill whatever is still running after SAVE_SECONDS.
        """
        for process, _ in self.running.values():
            assert process.pid is not None
            with suppress(psutil.NoSuchProcess):
                children = psutil.Process(process.pid).children()
                for target in [p for p in children or [psutil.Process(process.pid)] if p.pid not in self.signaled]:
                    if not self.signaled:
                        say("waiting for stages to save their state")
                        self.deadline = time.monotonic() + processes.SAVE_SECONDS
                    self.signaled.add(target.pid)
                    target.send_signal(signal.SIGINT)
            if time.monotonic() > self.deadline:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _is_handled(number: int) -> bool:
    """Whether a signal is not ignored; under nohup, SIGHUP is ignored."""
    return signal.getsignal(number) is not signal.SIG_IGN


def prepare(target: str | None, jobs: int) -> Build:
    """The build for a target. Raises ConfigError for an invalid target or invalid parameters."""
    settings = Settings(Path(), [])
    waits = chosen(graph.waits(), target)
    seconds = seconds_of(list(waits), settings.name("scale"))
    build = Build({name: Stage(name, needs, seconds[name]) for name, needs in waits.items()}, jobs)
    if device.workers("auto") < 2 * jobs and not os.environ.get("STAGECOACH_LAUNCH"):  # else two threads per job
        build.alone = alone(waits, seconds_of(list(waits), settings.name("scale"), measured=False))
    sandboxed = rewarded_by_code(settings, judging(Path()) & waits.keys())
    if sandboxed and (refused := no_sandbox(settings)):
        say(f"there is no sandbox here ({refused}): skipping stages that learn from model-written programs")
        for name in sandboxed:
            build.ended(name, "left out", "no sandbox; sandbox.allow_unsafe: true runs it without one")
    return build


def main() -> int:
    """Command line of `python -m pipeline.tools.launch`."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.tools.launch", description="Build the graph, or part of it."
    )
    parser.add_argument("-j", "--jobs", type=int, help="number of parallel stages (default: 2; 1 on a single core)")
    parser.add_argument("target", nargs="?", help=f"{SPINE}, or a stage in dvc.yaml; default: the whole graph")
    arguments = parser.parse_args()
    jobs = min(2, device.workers("auto")) if arguments.jobs is None else arguments.jobs
    if jobs < 1:
        parser.error(f"--jobs: expected at least 1, got {arguments.jobs}")
    under_make = "MAKELEVEL" in os.environ
    if under_make:  # stop if make is killed
        processes.die_with_parent(os.getppid())
    command = {SPINE: "make", None: "make all"}.get(arguments.target) if under_make else None
    command = command or " ".join(
        ["python -m pipeline.tools.launch", *([arguments.target] if arguments.target else [])]
    )
    try:
        tidy_locks()
        return Launcher(prepare(arguments.target, jobs), command).run()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
