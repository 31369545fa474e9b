"""Worker processes in order, workers that die, launchers, parallel stages."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from pipeline import launch
from pipeline.errors import ConfigError
from pipeline.launch import pool_map

ROOT = Path(__file__).parents[1]


def square(number: int) -> int:
    """The earlier, the more work: results arrive out of order."""
    assert sum(range((20 - number) * 20_000)) >= 0
    return number * number


def process(_: int) -> int:
    return os.getpid()


def fails_at_two(number: int) -> int:
    if number == 2:
        raise ValueError("row 2 is bad")
    return number


def dies_at_two(number: int) -> int:
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_one_worker_is_this_process() -> None:
    assert set(pool_map(process, range(3), 1)) == {os.getpid()}


def test_results_come_in_order_from_other_processes_with_few_items_in_flight() -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        for number in range(20):
            taken += 1
            yield number

    results = pool_map(square, items(), 2)
    assert next(results) == 0
    assert taken == 3 * 2
    assert [0, *results] == [number * number for number in range(20)]
    assert os.getpid() not in set(pool_map(process, range(2), 2))


def test_an_exception_is_raised_in_its_turn_and_the_pool_ends() -> None:
    import multiprocessing

    results = pool_map(fails_at_two, range(6), 2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="row 2 is bad"):
        next(results)
    assert multiprocessing.active_children() == []


def test_a_killed_worker_is_an_error_and_no_hang() -> None:
    with pytest.raises(BrokenProcessPool):
        list(pool_map(dies_at_two, range(6), 2))


CHILD = "import os, signal, sys; from pipeline.launch import die_with_parent; die_with_parent(int(sys.argv[1])); print('ready', flush=True); signal.pause()"


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_child_dies_with_its_parent() -> None:
    code = f"import os, signal, subprocess, sys; subprocess.Popen([sys.executable, '-c', {CHILD!r}, str(os.getpid())]); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.kill()
        readable, _, _ = select.select([parent.stdout], [], [], 20)
        assert readable, "the child lives on"
        assert parent.stdout.read() == b""  # the end of the pipe: nobody holds it any more


def test_a_parent_that_is_gone_already_ends_the_child_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, "1"], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stdout) == (143, b"")


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: commands.append(command[1:]))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return commands


@pytest.mark.parametrize("asked", ["", "1"])
def test_one_process_is_launched_by_nobody(asked: str, executed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGECOACH_LAUNCH", asked)
    launch.relaunch("stages.language", [])
    assert executed == []


def test_a_number_asks_torchrun_and_a_file_asks_accelerate(
    executed: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STAGECOACH_LAUNCH", "2")
    launch.relaunch("stages.language", ["language.steps=3"])
    assert executed[0][:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    assert executed[0][-3:] == ["-m", "stages.language", "language.steps=3"]
    config = tmp_path / "fsdp2.yaml"
    config.write_text("{}")
    monkeypatch.setenv("STAGECOACH_LAUNCH", str(config))
    launch.relaunch("stages.language", [])
    assert executed[1] == ["-m", "accelerate.commands.launch", "--config_file", str(config), "-m", "stages.language"]


def test_a_worker_is_not_launched_again(executed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGECOACH_LAUNCH", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    launch.relaunch("stages.language", [])
    assert executed == []


@pytest.mark.parametrize("asked", ["0", "two", "-1", "no/such.yaml"])
def test_another_launch_is_refused_with_the_files_that_exist(
    asked: str, executed: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "conf/launch").mkdir(parents=True)
    (tmp_path / "conf/launch/fsdp2.yaml").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAGECOACH_LAUNCH", asked)
    with pytest.raises(ConfigError, match=rf"'{asked}'; files: conf/launch/fsdp2\.yaml"):
        launch.relaunch("stages.language", [])
    assert executed == []


class Repro:
    """A fake of `dvc repro -s STAGE` that ends at the second look."""

    started: list[str]
    alive: int
    most: int
    codes: dict[str, int]

    def __init__(self, command: list[str]) -> None:
        assert command[1:-1] == ["-m", "dvc", "--wait-for-lock", "repro", "-s"]
        self.name, self.looks = command[-1], 0
        Repro.started.append(self.name)
        Repro.alive += 1
        Repro.most = max(Repro.most, Repro.alive)

    def wait(self, timeout: float) -> int:
        self.looks += 1
        if self.looks < 2:
            raise subprocess.TimeoutExpired("dvc", timeout)
        Repro.alive -= 1
        self.returncode = Repro.codes.get(self.name, 0)
        return self.returncode


WAITS = {"a": set(), "b": {"a"}, "c": {"a"}, "d": {"a"}, "e": {"b", "c", "d"}}


@pytest.fixture
def repros(monkeypatch: pytest.MonkeyPatch) -> type[Repro]:
    Repro.started, Repro.alive, Repro.most, Repro.codes = [], 0, 0, {}
    monkeypatch.setattr(launch.subprocess, "Popen", Repro)
    monkeypatch.setattr(launch, "ready_stages", lambda target: (sorted(WAITS), WAITS))
    return Repro


def test_stages_start_when_what_they_wait_for_is_done(repros: type[Repro]) -> None:
    assert launch.run_parallel(2, None) == 0
    assert (repros.started[0], repros.started[-1], sorted(repros.started)) == ("a", "e", ["a", "b", "c", "d", "e"])
    assert (repros.most, repros.alive) == (2, 0)


def test_after_a_failure_nothing_starts_and_its_code_is_ours(repros: type[Repro]) -> None:
    repros.codes = {"b": 3}
    assert launch.run_parallel(2, None) == 3
    assert repros.started == ["a", "b", "c"]
    assert repros.alive == 0


def test_an_interrupt_waits_for_the_stages_that_run(repros: type[Repro], monkeypatch: pytest.MonkeyPatch) -> None:
    original = Repro.wait
    signals = [KeyboardInterrupt()]

    def wait(self: Repro, timeout: float) -> int:
        if self.name == "b" and signals:
            raise signals.pop()
        return original(self, timeout)

    monkeypatch.setattr(Repro, "wait", wait)
    assert launch.run_parallel(2, None) == 130
    assert (repros.started, repros.alive) == (["a", "b", "c"], 0)


def test_no_job_at_a_time_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["launch", "-j", "0"])
    with pytest.raises(SystemExit) as refused:
        launch.main()
    assert refused.value.code == 2
    assert "expected at least 1" in capsys.readouterr().err


@pytest.mark.slow
def test_ready_stages_are_those_of_the_graph_above_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"], "e": []}
    lines = ["stages:"]
    for name, deps in graph.items():
        lines += [
            f"  {name}:",
            f"    cmd: echo {name} >> order && echo {name} > {name}.out",
            "    outs:",
            f"      - {name}.out",
        ]
        lines += ["    deps:", *(f"      - {d}.out" for d in deps)] if deps else []
    (tmp_path / "dvc.yaml").write_text("\n".join(lines) + "\n")
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q", "--no-scm"], cwd=tmp_path, check=True)
    command = [sys.executable, "-m", "pipeline.launch", "-j", "2", "d"]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    order = (tmp_path / "order").read_text().split()
    assert (order[0], sorted(order[1:3]), order[3:]) == ("a", ["b", "c"], ["d"])
    monkeypatch.chdir(tmp_path)
    assert launch.ready_stages("b") == (["a", "b"], {"a": set(), "b": {"a"}})
    with pytest.raises(ConfigError, match="no stage 'x'"):
        launch.ready_stages("x")
