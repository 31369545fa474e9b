"""Training stages in several processes as a person starts them: STAGECOACH_LAUNCH, signals, a killed worker, two
machines.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import ROOT
from tests.training import environment, free_port
from tests.workspace import Workspace, arguments

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(300)]
# AdamW turns rounding in gradients near eps into steps
STEPS: dict[str, Any] = {"steps": 30, "learning_rate": 1e-3, "eps": 1e-5, "runtime.save_steps": 3}


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts stages; any still running end with the test."""
    processes: list[subprocess.Popen[str]] = []

    def started(*arguments: Any, **variables: str) -> "subprocess.Popen[str]":
        processes.append(_started(*arguments, **variables))
        return processes[-1]

    yield started
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(60)


def _started(
    folder: Path, stage: str, launch: str, changes: dict[str, Any], **variables: str
) -> "subprocess.Popen[str]":
    """`python -m stages.<stage>` in a workspace."""
    variables = {"STAGECOACH_LAUNCH": launch, "STAGECOACH_WORK": str(folder / ".work"), "PYTHONPATH": ""} | variables
    return subprocess.Popen(
        [sys.executable, "-m", f"stages.{stage}", *arguments(stage, changes)],
        cwd=folder,
        text=True,
        env=environment() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    output = process.communicate(timeout=200)[0]
    assert "Traceback" not in output, output[-4000:]
    return process.returncode, output


def workers(process: "subprocess.Popen[str]") -> dict[int, psutil.Process]:
    """rank -> process."""
    children = psutil.Process(process.pid).children()
    return {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}


def wait_for(what: Callable[[], Any], process: "subprocess.Popen[str]") -> None:
    begun = time.monotonic()
    while not what():
        assert process.poll() is None and time.monotonic() - begun < 150, process.communicate()[0][-4000:]
        time.sleep(0.02)


def test_fsdp2_saves_when_one_worker_is_told_to_stop_goes_on_and_publishes_what_one_process_does(
    workspace: Workspace, start: Start
) -> None:
    """dpo: the policy is sharded, its reference is not, and the result is measured after training."""
    alone = workspace.command("dpo", **STEPS)
    assert alone.code == 0, alone.said
    expected, numbers = workspace.weights("dpo"), workspace.numbers("dpo")
    (workspace.folder / "models/dpo").rename(workspace.folder / "models/by_one")
    other = workspace.folder / "other"
    process = start(workspace.folder, "dpo", "fsdp2:2", STEPS, STAGECOACH_WORK=str(other / ".work"))
    wait_for(lambda: list(other.glob(".work/dpo/*/step-????????")), process)
    workers(process)[1].send_signal(signal.SIGTERM)
    code, output = ended(process)
    assert code == 143, output
    assert "stopped by signal 15" in output
    newest = sorted(other.glob(".work/dpo/*/step-????????"))[-1]
    assert len(list(newest.glob("weights-*-of-00002.safetensors"))) == 2
    code, output = ended(start(workspace.folder, "dpo", "fsdp2:2", STEPS, STAGECOACH_WORK=str(other / ".work")))
    assert code == 0, output
    assert "resumed at step" in output and "2 processes" in output
    found = workspace.weights("dpo")
    assert all((found[name] - expected[name]).abs().max() <= 1e-6 for name in expected)
    told = workspace.numbers("dpo")
    assert told["test"]["accuracy"] == numbers["test"]["accuracy"] and told["reference"] == numbers["reference"]


CONFIG = """compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
num_processes: 2
num_machines: 2
main_process_ip: 127.0.0.1
main_process_port: {port}
use_cpu: true
"""


def test_two_machines_train_one_model_and_a_killed_worker_ends_both(
    workspace: Workspace, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two launchers of one worker each, as on two machines with a shared file system; machine 0 alone publishes."""
    changes = STEPS | {"dropout": 0.0}  # each rank would draw its own
    file = workspace.folder / "machines.yaml"
    file.write_text(CONFIG.format(port=free_port()))

    def machines() -> list["subprocess.Popen[str]"]:
        return [start(workspace.folder, "lora", str(file), changes, MACHINE_RANK=str(n)) for n in (1, 0)]

    second, first = machines()
    wait_for(lambda: list(workspace.folder.glob(".work/lora/*/step-????????")), first)
    workers(second)[1].kill()
    code, output = ended(second)
    assert code == 137 and "process 1 was killed by SIGKILL" in output
    code, output = ended(first)
    assert code == 1 and "another process of this run is gone" in output
    assert not (workspace.folder / "models/lora").exists()

    file.write_text(CONFIG.format(port=free_port()))
    second, first = machines()
    code, output = ended(first)
    assert code == 0, output
    assert "resumed at step" in output and "2 processes" in output
    code, said = ended(second)
    assert (code, said) == (0, "")
    found = workspace.weights("lora")
    workspace.folder.joinpath("models/lora").rename(workspace.folder / "models/by_two")
    monkeypatch.setenv("STAGECOACH_WORK", str(workspace.folder / "alone"))
    assert workspace.command("lora", **changes).code == 0
    expected = workspace.weights("lora")
    assert all((found[name] - expected[name]).abs().max() <= 1e-6 for name in expected)


LEFT = """import pipeline, subprocess, sys, threading
from datetime import timedelta
from torch import distributed
host = ("from torch.distributed import TCPStore; "
        "store = TCPStore('127.0.0.1', %s, is_master=True, wait_for_workers=False); "
        "print(flush=True); sys.stdin.read()")
process = subprocess.Popen([sys.executable, "-c", "import os, sys; " + host % sys.argv[1] + "; os._exit(0)"],
                           stdin=subprocess.PIPE, stdout=subprocess.PIPE)
process.stdout.readline()
store = distributed.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False,
                             timeout=timedelta(seconds=60))
threading.Timer(1, process.stdin.close).start()
try:
    store.wait(["never"])
except distributed.DistNetworkError:
    print("told")
"""


def test_a_store_that_is_gone_is_an_exception_and_no_stack_of_c10d() -> None:
    """When two machines end normally, the first may leave their exit barrier before the second has its answer."""
    told = subprocess.run([sys.executable, "-c", LEFT, str(free_port())], capture_output=True, text=True, timeout=300)
    assert (told.returncode, told.stdout, told.stderr) == (0, "told\n", "")


def test_accelerate_launch_on_a_cpu_starts_as_many_processes_as_it_is_asked_for(workspace: Workspace) -> None:
    """By default it starts one and leaves the others to mpirun."""
    launch = ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m", "stages.dpo"]
    done = subprocess.run(
        [sys.executable, "-m", *launch, *arguments("dpo", {"steps": 2})],
        cwd=workspace.folder,
        env=environment() | {"STAGECOACH_WORK": str(workspace.folder / ".work"), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert ", 2 processes" in done.stderr
    assert (workspace.folder / "models/dpo/model.safetensors").is_file()
