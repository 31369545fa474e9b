"""What a stage costs: time, processor, memory, GPU and energy, measured while it runs.

    with measured(folder, start) as usage: ...     -> usage.totals(), usage.samples; $folder/usage.json

A thread looks every EVERY seconds at this process and all below it (under a launcher: at all processes of this
machine's run), so the workers of a data stage and the sandbox count too. Memory is the sum of their proportional set
sizes, what each shares counted in parts. Energy is what the processor's packages (RAPL) and the GPUs (NVML) used
meanwhile, whoever used it; where the system does not let us read it, it says "not measured". Time and energy of a try
that was killed stay in usage.json and are added to those of the one that resumes it, so that a cost is what it took to
get there.

None of this is a result: it goes to speed.json and MLflow, never into an out. Not promised: a peak of memory between
two looks (but for this process, whose own peak the system keeps), other machines of the same run.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

EVERY = 5.0  # seconds
POWERCAP = Path("/sys/class/powercap")
NOT_MEASURED = "not measured"


class Usage:
    """What this try has used so far; `look` takes a sample."""

    def __init__(self, before: dict[str, float], began: float | None = None) -> None:
        mine = psutil.Process()
        self.root = (mine.parent() or mine) if "LOCAL_RANK" in os.environ else mine
        self.before = before  # totals of killed tries of the same key
        self.began = time.monotonic() if began is None else began  # time.monotonic() when the stage began
        self.cores = len(mine.cpu_affinity()) if sys.platform == "linux" else psutil.cpu_count() or 1
        self.meters = [*rapl(), *nvml()]
        self.samples: list[
            tuple[int, dict[str, float]]
        ] = []  # (milliseconds since 1970, MLflow's names of system metrics)
        self._cpu_start = self._cpu = self._cpu_seconds()
        self._last = time.monotonic()
        self._peak = 0
        self._busy = 0.0  # GPU seconds
        self._joules = 0.0

    def look(self) -> None:
        """Take a sample."""
        now, cpu, memory = time.monotonic(), self._cpu_seconds(), self._memory()
        passed = max(now - self._last, 1e-3)
        self._peak = max(self._peak, memory)
        self._joules += sum(meter.joules() for meter in self.meters)
        busy = [use for meter in self.meters if (use := meter.busy()) is not None]
        self._busy += passed * sum(busy)
        share = max(0.0, cpu - self._cpu) / passed / self.cores
        seen = {"system/cpu_utilization_percentage": 100 * share, "system/system_memory_usage_megabytes": memory / 1e6}
        seen |= {f"system/gpu_{n}_utilization_percentage": 100 * use for n, use in enumerate(busy)}
        self.samples.append((int(time.time() * 1000), seen))
        self._cpu, self._last = max(cpu, self._cpu), now

    def totals(self) -> dict[str, Any]:
        """`seconds`, `cpu_seconds`, `cpu_utilisation` (of the cores that the process may use), `host_memory_gb`
        (peak), `joules` ("not measured" where the system does not tell), `gpu_seconds` (busy, where there is a GPU
        that tells), `tries`."""
        mine = self._mine()
        whole = {key: mine[key] + self.before.get(key, 0.0) for key in mine if key != "host_memory_gb"}
        whole["host_memory_gb"] = max(mine["host_memory_gb"], self.before.get("host_memory_gb", 0.0))
        found: dict[str, Any] = {key: round(value, 3) for key, value in whole.items()}
        found["tries"] = int(whole["tries"])
        found["cpu_utilisation"] = round(whole["cpu_seconds"] / max(whole["seconds"], 1e-3) / self.cores, 4)
        found["cores"] = self.cores
        if not self.meters:
            found["joules"] = NOT_MEASURED
        if not any(isinstance(meter, Gpu) for meter in self.meters):
            del found["gpu_seconds"]
        return found

    def _mine(self) -> dict[str, float]:
        return {
            "seconds": time.monotonic() - self.began,
            "cpu_seconds": self._cpu - self._cpu_start,
            "tries": 1.0,
            "host_memory_gb": max(self._peak, own_peak()) / 1e9,
            "joules": self._joules,
            "gpu_seconds": self._busy,
        }

    def state(self) -> str:
        """The totals as usage.json keeps them for a try that resumes this one."""
        kept = {key: value for key, value in self.totals().items() if isinstance(value, int | float)}
        return json.dumps(kept)

    def _tree(self) -> list[psutil.Process]:
        return [self.root, *self.root.children(recursive=True)]

    def _cpu_seconds(self) -> float:
        """Of all living processes and of those that ended and were waited for."""
        total = 0.0
        for process in self._tree():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += sum(process.cpu_times()[:4])
        return total

    def _memory(self) -> int:
        total = 0
        for process in self._tree():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += proportional(process)
        return total


def proportional(process: psutil.Process) -> int:
    """Bytes of a process's memory, with what it shares counted in parts; the resident set where the system does not
    tell.
    """
    with suppress(OSError, ValueError):
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        if (found := re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)) is not None:
            return int(found[1]) * 1024
    return process.memory_info().rss


def own_peak() -> int:
    """The most bytes this process itself had resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Package:
    """A processor package's energy counter (Linux powercap), which wraps."""

    def __init__(self, folder: Path) -> None:
        self.counter, self.range = folder / "energy_uj", int((folder / "max_energy_range_uj").read_text())
        self.last = int(self.counter.read_text())  # PermissionError: only root may on most systems

    def joules(self) -> float:
        """Used since the last call."""
        now = int(self.counter.read_text())
        used = (now - self.last) % (self.range + 1)
        self.last = now
        return used / 1e6

    def busy(self) -> float | None:
        """Not told by this counter."""
        return None


class Gpu:
    """A GPU by its driver's library."""

    def __init__(self, library: Any, number: int) -> None:
        self.library, self.handle = library, library.nvmlDeviceGetHandleByIndex(number)
        self.last: float | None = self._energy()

    def _energy(self) -> float | None:
        try:
            return self.library.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1e3
        except self.library.NVMLError:  # older than Volta
            return None

    def joules(self) -> float:
        """Used since the last call; 0 where the GPU does not count."""
        now = self._energy()
        used = 0.0 if now is None or self.last is None else now - self.last
        self.last = now
        return used

    def busy(self) -> float | None:
        """The share of the last moment in which it worked."""
        try:
            return self.library.nvmlDeviceGetUtilizationRates(self.handle).gpu / 100
        except self.library.NVMLError:
            return None


def rapl(powercap: Path = POWERCAP) -> list[Package]:
    """The processor packages whose energy may be read."""
    found = []
    for folder in sorted(powercap.glob("intel-rapl:*")):  # AMD's too, in spite of the name
        with suppress(OSError, ValueError):
            if (folder / "name").read_text().startswith("package"):
                found.append(Package(folder))
    return found


def nvml() -> list[Gpu]:
    """The GPUs that this process may see, where the extra `gpu` is installed."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        return []
    try:
        pynvml.nvmlInit()
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        numbers = range(pynvml.nvmlDeviceGetCount()) if chosen is None else [int(n) for n in chosen.split(",") if n]
        return [Gpu(pynvml, number) for number in numbers]
    except (pynvml.NVMLError, ValueError):  # no driver; devices named by uuid
        return []


@contextmanager
def measured(folder: Path, began: float | None = None) -> Iterator[Usage]:
    """Measure the block; `folder`/usage.json holds the totals of all tries at any moment, to a look's precision."""
    path = folder / "usage.json"
    try:
        before = json.loads(path.read_text())
    except (OSError, ValueError):  # the first try, or the machine stopped while it was written
        before = {}
    usage, over = Usage(before, began), threading.Event()

    def watch() -> None:
        while not over.wait(EVERY):
            usage.look()
            keep(path, usage)

    thread = threading.Thread(target=watch, daemon=True, name="usage")
    thread.start()
    try:
        yield usage
    finally:
        over.set()
        thread.join()
        usage.look()
        keep(path, usage)


def keep(path: Path, usage: Usage) -> None:
    """Write usage.json by rename; a full disk costs the numbers, not the run."""
    part = path.with_suffix(".part")
    with suppress(OSError):
        part.write_text(usage.state())
        part.replace(path)
