"""Starts our own processes: data workers, the training processes of a stage, parallel stages. The only place that may.

    pool_map(function, items, workers)          ordered results from worker processes
    beside(module, arguments, log)              one of our modules while a block runs
    relaunch(module, argv)                      a training stage replaces itself by its workers (STAGECOACH_LAUNCH)
    python -m pipeline.launch -j 2 [target]     ready stages of the graph side by side

`STAGECOACH_LAUNCH` is empty (one process), a number (that many processes on this machine through torch.distributed.run)
or an Accelerate config file (`conf/launch/*.yaml`). Not promised: several nodes; the launcher's own restarts.
"""

import argparse
import collections
import concurrent.futures
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, TypeVar

from pipeline.errors import ConfigError

Item = TypeVar("Item")
Result = TypeVar("Result")
Process: TypeAlias = "subprocess.Popen[bytes]"
PR_SET_PDEATHSIG = 1
END_SECONDS = 30
# what `beside` starts: `python -m MODULE ARGUMENTS`, bound to the process that asked
BESIDE = (
    "import runpy, sys; from pipeline.launch import die_with_parent; die_with_parent(int(sys.argv.pop(1))); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGTERM when the parent dies, so that killing DVC leaves no orphan that trains on.

    Raises SystemExit when the parent is gone already (it died between fork and here).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)


def _start_worker(parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool; a worker's traceback would only hide why


def pool_map(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Apply `function` (module level) to the items in worker processes; yield results in the items' order.

    At most 3 items a worker are in flight, so memory stays flat however many items there are. An exception in a worker
    is raised here; a killed worker raises concurrent.futures.process.BrokenProcessPool.
    """
    if workers <= 1:
        yield from map(function, items)
        return
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (os.getpid(),))
    waiting: collections.deque[concurrent.futures.Future[Result]] = collections.deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= 3 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def wanted() -> str:
    """What STAGECOACH_LAUNCH asks for; empty inside a worker, which is already launched."""
    return "" if "LOCAL_RANK" in os.environ else os.environ.get("STAGECOACH_LAUNCH", "")


def relaunch(module: str, argv: list[str]) -> None:
    """Replace this process (same pid, so DVC still waits for it) by the launcher of its workers.

    Returns only when one process is asked for. Raises ConfigError when STAGECOACH_LAUNCH is neither a number nor a file.
    """
    asked = wanted()
    if asked in ("", "1"):
        return
    if asked.isdecimal() and int(asked) > 0:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        command = ["torch.distributed.run", "--standalone", "--nproc_per_node", asked, "-m", module, *argv]
    elif Path(asked).is_file():
        command = ["accelerate.commands.launch", "--config_file", asked, "-m", module, *argv]
    else:
        have = ", ".join(sorted(str(p) for p in Path("conf/launch").glob("*.yaml"))) or "none"
        raise ConfigError(
            f"STAGECOACH_LAUNCH: expected a number or an Accelerate config file, got {asked!r}; files: {have}"
        )
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", *command])


@contextmanager
def beside(module: str, arguments: list[str], log: Path) -> Iterator[Process]:
    """One of our modules as a process of its own, output into `log`, until the block ends: SIGTERM, and SIGKILL if that does not help.

    It gets SIGTERM too when this process dies, however it dies.
    """
    command = [sys.executable, "-c", BESIDE, str(os.getpid()), module, *arguments]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ready_stages(target: str | None) -> tuple[list[str], dict[str, set[str]]]:
    """Stage names in an order that respects their dependencies, and for each the stages it waits for."""
    from dvc.repo import Repo

    with Repo() as repo:
        graph = repo.index.graph
        chosen = list(graph.nodes)
        if target:
            wanted_stages = {s for s in graph.nodes if s.addressing.split("@")[0] == target or s.addressing == target}
            if not wanted_stages:
                raise ConfigError(f"no stage {target!r} in dvc.yaml; dvc stage list names them")
            chosen, frontier = list(wanted_stages), list(wanted_stages)
            while frontier:
                for upstream in graph.successors(frontier.pop()):
                    if upstream not in chosen:
                        chosen.append(upstream)
                        frontier.append(upstream)
        waits = {s.addressing: {u.addressing for u in graph.successors(s)} for s in chosen}
    return sorted(waits), waits


def run_parallel(jobs: int, target: str | None) -> int:
    """Run `dvc --wait-for-lock repro -s STAGE` for each ready stage, `jobs` at a time; the first failure's exit code."""
    names, waits = ready_stages(target)
    done: set[str] = set()
    running: dict[str, subprocess.Popen[bytes]] = {}
    code = 0
    while len(done) < len(names):
        for name in names:
            if not code and len(running) < jobs and name not in done and name not in running and waits[name] <= done:
                command = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "-s", name]
                running[name] = subprocess.Popen(command)
        if not running:
            return code
        try:
            name = _first_ended(running)
        except KeyboardInterrupt:  # the stages got the signal too: they save and end
            code = code or 128 + signal.SIGINT
            continue
        status = running.pop(name).returncode
        code = code or status
        done.add(name)
    return code


def _first_ended(running: dict[str, subprocess.Popen[bytes]]) -> str:
    while True:
        for name, process in running.items():
            try:
                process.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                continue
            return name


def main() -> int:
    """Command line of `python -m pipeline.launch`."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.launch", description="Run ready stages side by side.")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="stages at a time (default 2)")
    parser.add_argument("target", nargs="?", help="a stage of dvc.yaml; without it the whole graph")
    arguments = parser.parse_args()
    if arguments.jobs < 1:
        parser.error(f"--jobs: expected at least 1, got {arguments.jobs}")
    try:
        return run_parallel(arguments.jobs, arguments.target)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
