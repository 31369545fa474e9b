"""pipeline/run/cost.py: what a stage costs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.run import cost
from pipeline.run.tracking import Tracker

WORKER = """
import sys, time
held = bytearray(150_000_000)
end = time.process_time() + 0.4
while time.process_time() < end:
    pass
print("worked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def no_meters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "rapl", list)
    monkeypatch.setattr(cost, "nvml", list)


def test_a_worker_s_time_and_memory_count_while_it_lives_and_when_it_has_ended(tmp_path: Path, no_meters: None) -> None:
    with cost.measured(tmp_path) as used:
        before = used.totals()
        worker = subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert worker.stdout is not None and worker.stdout.readline() == b"worked\n"
        used.look()
        while_alive = used.totals()
        worker.communicate()
        used.look()
        ended = used.totals()
    assert while_alive["cpu_seconds"] - before["cpu_seconds"] >= 0.4
    assert ended["cpu_seconds"] >= while_alive["cpu_seconds"]
    assert while_alive["host_memory_gb"] >= 0.15
    assert ended["host_memory_gb"] == while_alive["host_memory_gb"]  # a peak stays
    busy = used.samples[0][1]["system/cpu_utilization_percentage"]
    assert busy > 100 * 0.3 / max(ended["seconds"], 0.4) / ended["cores"]


def test_a_try_that_ended_badly_counts_for_the_one_that_resumes(tmp_path: Path, no_meters: None) -> None:
    with pytest.raises(RuntimeError), cost.measured(tmp_path, time.monotonic() - 5):
        raise RuntimeError("killed")
    first = json.loads((tmp_path / "usage.json").read_text())
    assert first["tries"] == 1 and 5 <= first["seconds"] < 60
    with cost.measured(tmp_path, time.monotonic() - 7) as used:
        pass
    whole = used.totals()
    assert whole["tries"] == 2
    assert whole["seconds"] >= first["seconds"] + 7
    assert whole["cpu_seconds"] >= first["cpu_seconds"]


def test_a_torn_state_of_an_earlier_try_is_no_fault(tmp_path: Path, no_meters: None) -> None:
    (tmp_path / "usage.json").write_text('{"seconds": 1')
    with cost.measured(tmp_path) as used:
        pass
    assert used.totals()["tries"] == 1


def counter(folder: Path, name: str, value: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text("1000000\n")
    (folder / "energy_uj").write_text(f"{value}\n")
    return folder


def test_energy_is_that_of_the_packages_and_their_counters_wrap(tmp_path: Path) -> None:
    package = counter(tmp_path / "intel-rapl:0", "package-0", 900_000)
    counter(tmp_path / "intel-rapl:0:0", "core", 5)
    (meter,) = cost.rapl(tmp_path)
    (package / "energy_uj").write_text("950000")
    assert meter.joules() == pytest.approx(0.05)
    (package / "energy_uj").write_text("49999")  # wraps: 50,001 to restart at 0, then 49,999
    assert meter.joules() == pytest.approx(0.1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_counter_that_may_not_be_read_is_left_out(tmp_path: Path) -> None:
    (counter(tmp_path / "intel-rapl:0", "package-0", 1) / "energy_uj").chmod(0)
    assert cost.rapl(tmp_path) == []


def test_without_meters_energy_is_not_measured_and_no_gpu_is_named(tmp_path: Path, no_meters: None) -> None:
    with cost.measured(tmp_path) as used:
        pass
    assert used.totals()["joules"] == "not measured"
    assert "gpu_seconds" not in used.totals()


class Library:
    """NVML's functions as nvidia-ml-py names them."""

    class NVMLError(Exception):
        pass

    energy = 2000

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        return self.energy

    def nvmlDeviceGetUtilizationRates(self, handle: int):  # type: ignore[no-untyped-def]
        return type("Rates", (), {"gpu": 50})


def test_a_gpu_gives_energy_and_busy_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(cost, "rapl", list)
    monkeypatch.setattr(cost, "nvml", lambda: [cost.Gpu(library, 0)])
    with cost.measured(tmp_path) as used:
        library.energy = 5000  # millijoules
    found = used.totals()
    assert found["joules"] == pytest.approx(3.0)
    assert 0 < found["gpu_seconds"] <= found["seconds"]
    assert used.samples[-1][1]["system/gpu_0_utilization_percentage"] == 50


def test_mlflow_gets_the_samples_and_a_resumed_curve_does_not_mistake_them_for_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGECOACH_MLFLOW", "on")
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    folder = tmp_path / "key"
    folder.mkdir()
    first = Tracker("stage", folder, {}, {}, quiet=False)
    first.log(0, {"loss": 1.0})
    first.finish([(1000 + n, {"system/cpu_utilization_percentage": 50.0 + n}) for n in range(9)])
    second = Tracker("stage", folder, {}, {}, quiet=False)
    second.log(3, {"loss": 0.5})
    second.finish()
    assert first._mlflow is not None
    client, run = first._mlflow.client, first._mlflow.run_id
    assert [m.value for m in client.get_metric_history(run, "system/cpu_utilization_percentage")] == [
        50.0 + n for n in range(9)
    ]
    assert [m.step for m in client.get_metric_history(run, "loss")] == [0, 3]
