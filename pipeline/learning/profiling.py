"""Where the time of a step goes: `runtime.profile: true` records a few steps with torch.profiler.

    <work folder>/profile/trace-rank0.json      for chrome://tracing or ui.perfetto.dev
    <work folder>/profile/top-rank0.txt         the twenty operations that take longest

The first steps of a run are left out: they compile, allocate and warm up. Recording costs time itself, so the speed that such a run
reports is not its own.
"""

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from pipeline.tracking import say

SKIPPED, WARM_UP, RECORDED = 2, 1, 3


class Profile:
    """Records steps 3 to 5 of this call. Inactive, it does nothing."""

    def __init__(self, active: bool, folder: Path, rank: int, device: torch.device) -> None:
        self.folder, self.rank, self.device = folder / "profile", rank, device
        self._profiler: Any = None
        if active:
            activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
            plan = schedule(skip_first=SKIPPED, wait=0, warmup=WARM_UP, active=RECORDED, repeat=1)
            self._profiler = profile(activities=activities, schedule=plan, on_trace_ready=self._write, acc_events=True)
            self._profiler.start()

    def step(self) -> None:
        """A training step has ended."""
        if self._profiler is not None:
            self._profiler.step()

    def stop(self) -> None:
        """The run ends; one that was too short has recorded nothing, and says so."""
        if self._profiler is None:
            return
        self._profiler.stop()
        self._profiler = None
        if not (self.folder / f"top-rank{self.rank}.txt").is_file():
            say(f"runtime.profile: nothing recorded: a run needs more than {SKIPPED + WARM_UP} steps")

    def _write(self, profiler: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        by = "self_cuda_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=by, row_limit=20)
        (self.folder / f"top-rank{self.rank}.txt").write_text(table)
        profiler.export_chrome_trace(str(self.folder / f"trace-rank{self.rank}.json"))
        say(f"{table}\nprofile of at most {RECORDED} steps: {self.folder}")
