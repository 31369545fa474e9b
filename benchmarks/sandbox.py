"""How many candidates a second the sandbox judges: a trivial function with 3 tests, pool and judge included.

    python benchmarks/sandbox.py            1000 runs with one worker held to one core, then with one per core

Goal: 300 a second per quiet core. The CPU milliseconds per run, of this process, the servers and the children together,
say what a quiet core could do when the machine is busy. Latency is that of one program at a time.

Not promised: the time of real candidates, which is mostly their own.
"""

import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.sandbox.judge import Judge, Program, SandboxConfig  # noqa: E402

RUNS = 1000
TESTS = [{"args": f"[{n}, 2]", "expected": str(n + 2), "visible": False} for n in range(3)]
PROGRAM = Program(source="def add(a, b):\n    return a + b\n", entry_point="add", tests=TESTS)


def cpu_seconds() -> float:
    """CPU of this process and of all that it has waited for, which after a judge is left includes its servers."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(workers: int) -> dict[str, float]:
    """Throughput with all workers busy, then the latency of single programs in milliseconds."""
    before = cpu_seconds()
    with Judge(SandboxConfig(), workers) as judge:
        passed = [verdict.score for verdict in judge.judge([PROGRAM] * 20 * workers)]
        start = time.perf_counter()
        passed += [verdict.score for verdict in judge.judge([PROGRAM] * RUNS)]
        seconds = time.perf_counter() - start
        latencies = []
        for _ in range(RUNS // 5):
            begin = time.perf_counter()
            passed += [verdict.score for verdict in judge.judge([PROGRAM])]
            latencies.append(1000 * (time.perf_counter() - begin))
    if set(passed) != {1.0}:
        raise SystemExit(f"expected every run to pass, found the scores {sorted(set(map(str, passed)))}")
    cut = statistics.quantiles(latencies, n=100)
    return {
        "workers": workers,
        "runs_per_second": round(RUNS / seconds, 1),
        "cpu_ms_per_run": round(1000 * (cpu_seconds() - before) / len(passed), 2),
        "p50_ms": round(cut[49], 2),
        "p99_ms": round(cut[98], 2),
    }


def main() -> None:
    """One line of JSON per setting."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    sys.stdout.write(json.dumps({"load": round(os.getloadavg()[0], 1), "cores": 1, **measure(1)}) + "\n")
    os.sched_setaffinity(0, cores)
    if len(cores) > 1:
        sys.stdout.write(json.dumps({"cores": len(cores), **measure(len(cores))}) + "\n")


if __name__ == "__main__":
    main()
