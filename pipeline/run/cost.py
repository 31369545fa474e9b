"""What a stage costs: time, CPU, memory, GPU and energy, measured while it runs.

    with measured(folder, start) as usage: ...     -> usage.totals(), usage.samples; $folder/usage.json

Every EVERY seconds a thread samples this process and all its descendants (under a launcher: all processes of the run on
this machine), so the workers of a data stage and the sandbox are included. Memory is the sum of proportional set sizes:
each process counts its share of shared pages. Energy is what the CPU packages (RAPL) and the GPUs (NVML) used during
that time, across all programs; it is "not measured" where the system does not allow reading it. The time and energy of
a killed attempt stay in usage.json and are added to those of the attempt that resumes it, so the cost of a result
includes both.

None of this is a result: it goes to speed.json and MLflow, never into an out. Not measured: memory peaks between two
samples (except this process's own, which the system records), and other machines in the run.
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
from types import ModuleType

import psutil

EVERY = 5.0  # seconds
POWERCAP = Path("/sys/class/powercap")
NOT_MEASURED = "not measured"


class Usage:
    """What this attempt has used so far."""

    def __init__(self, before: dict[str, float], began: float | None = None) -> None:
        process = psutil.Process()
        self.root = (process.parent() or process) if "LOCAL_RANK" in os.environ else process
        self.before = before  # totals of killed attempts of the same key
        self.began = time.monotonic() if began is None else began  # time.monotonic() when the stage started
        self.cores = len(process.cpu_affinity()) if sys.platform == "linux" else psutil.cpu_count() or 1
        self.meters = [*rapl(), *nvml()]
        # milliseconds since 1970, and values under MLflow's names for system metrics
        self.samples: list[tuple[int, dict[str, float]]] = []
        self._cpu_start = self._cpu = self._cpu_seconds()
        self._last = time.monotonic()
        self._peak = 0
        self._busy = 0.0  # GPU seconds
        self._joules = 0.0

    def look(self) -> None:
        """Take a sample."""
        now, cpu, memory = time.monotonic(), self._cpu_seconds(), self._memory()
        seconds = max(now - self._last, 1e-3)
        self._peak = max(self._peak, memory)
        self._joules += sum(meter.joules() for meter in self.meters)
        busy = [use for meter in self.meters if (use := meter.busy()) is not None]
        self._busy += seconds * sum(busy)
        share = max(0.0, cpu - self._cpu) / seconds / self.cores
        values = {
            "system/cpu_utilization_percentage": 100 * share,
            "system/system_memory_usage_megabytes": memory / 1e6,
        }
        values |= {f"system/gpu_{n}_utilization_percentage": 100 * use for n, use in enumerate(busy)}
        self.samples.append((int(time.time() * 1000), values))
        self._cpu, self._last = max(cpu, self._cpu), now

    def totals(self) -> dict[str, float | str]:
        """`seconds`, `cpu_seconds`, `cpu_utilisation` (of the cores available to the process), `host_memory_gb`
        (peak), `joules` ("not measured" if unavailable), `gpu_seconds` (busy time, if available), `tries`.
        """
        own = self._own_totals()
        sums = {key: own[key] + self.before.get(key, 0.0) for key in own if key != "host_memory_gb"}
        sums["host_memory_gb"] = max(own["host_memory_gb"], self.before.get("host_memory_gb", 0.0))
        totals: dict[str, float | str] = {key: round(value, 3) for key, value in sums.items()}
        totals["tries"] = int(sums["tries"])
        totals["cpu_utilisation"] = round(sums["cpu_seconds"] / max(sums["seconds"], 1e-3) / self.cores, 4)
        totals["cores"] = self.cores
        if not self.meters:
            totals["joules"] = NOT_MEASURED
        if not any(isinstance(meter, Gpu) for meter in self.meters):
            del totals["gpu_seconds"]
        return totals

    def _own_totals(self) -> dict[str, float]:
        """The totals of this attempt only."""
        return {
            "seconds": time.monotonic() - self.began,
            "cpu_seconds": self._cpu - self._cpu_start,
            "tries": 1.0,
            "host_memory_gb": max(self._peak, own_peak_memory()) / 1e9,
            "joules": self._joules,
            "gpu_seconds": self._busy,
        }

    def state(self) -> str:
        """The totals as JSON, for the attempt that resumes this one."""
        return json.dumps({key: value for key, value in self.totals().items() if isinstance(value, int | float)})

    def _tree(self) -> list[psutil.Process]:
        return [self.root, *self.root.children(recursive=True)]

    def _cpu_seconds(self) -> float:
        """CPU seconds of all live processes, and of finished ones that were waited for."""
        total = 0.0
        for process in self._tree():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += sum(process.cpu_times()[:4])
        return total

    def _memory(self) -> int:
        total = 0
        for process in self._tree():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += proportional_memory(process)
        return total


def proportional_memory(process: psutil.Process) -> int:
    """A process's proportional set size in bytes; its resident set size if the system does not report the former."""
    with suppress(OSError, ValueError):
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        if (match := re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)) is not None:
            return int(match[1]) * 1024
    return process.memory_info().rss


def own_peak_memory() -> int:
    """This process's own peak resident memory, bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class ProcessorPackage:
    """A CPU package's energy counter (Linux powercap), which wraps around."""

    def __init__(self, folder: Path) -> None:
        self.counter, self.range = folder / "energy_uj", int((folder / "max_energy_range_uj").read_text())
        self.last = int(self.counter.read_text())  # PermissionError: on most systems only root may read it

    def joules(self) -> float:
        """Energy since the last call."""
        now = int(self.counter.read_text())
        used = (now - self.last) % (self.range + 1)
        self.last = now
        return used / 1e6

    def busy(self) -> float | None:
        """None: this counter measures only energy."""
        return None


class Gpu:
    """A GPU, read through `library` (pynvml)."""

    def __init__(self, library: ModuleType, number: int) -> None:
        self.library, self.handle = library, library.nvmlDeviceGetHandleByIndex(number)
        self.last: float | None = self._energy()

    def _energy(self) -> float | None:
        try:
            return self.library.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1e3
        except self.library.NVMLError:  # older than Volta
            return None

    def joules(self) -> float:
        """Energy since the last call; 0 if the GPU does not measure it."""
        now = self._energy()
        used = 0.0 if now is None or self.last is None else now - self.last
        self.last = now
        return used

    def busy(self) -> float | None:
        """The fraction of the driver's last sampling period in which the GPU was busy."""
        try:
            return self.library.nvmlDeviceGetUtilizationRates(self.handle).gpu / 100
        except self.library.NVMLError:
            return None


def rapl(powercap: Path = POWERCAP) -> list[ProcessorPackage]:
    """The CPU packages whose energy this process is allowed to read."""
    packages = []
    for folder in sorted(powercap.glob("intel-rapl:*")):  # AMD's too, despite the name
        with suppress(OSError, ValueError):
            if (folder / "name").read_text().startswith("package"):
                packages.append(ProcessorPackage(folder))
    return packages


def nvml() -> list[Gpu]:
    """The GPUs visible to this process; none without the extra `gpu`."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        return []
    try:
        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        numbers = range(pynvml.nvmlDeviceGetCount()) if visible is None else [int(n) for n in visible.split(",") if n]
        return [Gpu(pynvml, number) for number in numbers]
    except (pynvml.NVMLError, ValueError):  # no driver; devices named by uuid
        return []


@contextmanager
def measured(folder: Path, began: float | None = None) -> Iterator[Usage]:
    """Measure the `with` block; `folder`/usage.json has the totals of all attempts up to the last sample."""
    path = folder / "usage.json"
    try:
        earlier = json.loads(path.read_text())
    except (OSError, ValueError):  # this is the first attempt, or the machine crashed mid-write
        earlier = {}
    usage, stopped = Usage(earlier, began), threading.Event()

    def watch() -> None:
        while not stopped.wait(EVERY):
            usage.look()
            _write_usage(path, usage)

    thread = threading.Thread(target=watch, daemon=True, name="usage")
    thread.start()
    try:
        yield usage
    finally:
        stopped.set()
        thread.join()
        usage.look()
        _write_usage(path, usage)


def _write_usage(path: Path, usage: Usage) -> None:
    """Write usage.json atomically; a full disk loses the numbers, not the run."""
    part = path.with_suffix(".part")
    with suppress(OSError):
        part.write_text(usage.state())
        part.replace(path)
