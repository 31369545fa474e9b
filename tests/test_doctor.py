"""`python -m pipeline.tools.doctor`: each fault, made for real in a scratch repository where that can be done, is
found with its remedy.
"""

import fcntl
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from pipeline.run import device
from pipeline.sandbox import servers
from pipeline.tools import doctor
from pipeline.tools.doctor import Finding

ROOT = Path(__file__).parents[1]
REFUSING_JAIL = """
import json, struct, sys
sys.stdin.buffer.read(4)
body = json.dumps({"refused": "no seccomp here"}).encode()
sys.stdout.buffer.write(struct.pack("<I", len(body)) + body)
"""


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty DVC repository with its own work directory."""
    (tmp_path / ".dvc" / "tmp").mkdir(parents=True)
    (tmp_path / "dvc.yaml").write_text("stages: {language: {cmd: x, outs: [models/language]}}\n")
    monkeypatch.setenv("STAGECOACH_WORK", str(tmp_path / "work"))
    return tmp_path


@pytest.fixture(scope="module")
def dead() -> int:
    """The pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def configure(root: Path, text: str, name: str = "config") -> Path:
    """Write `.dvc/config` or `config.local`."""
    (root / ".dvc" / name).write_text(text)
    return root


def with_parameters(root: Path, **replacements: str) -> Path:
    """The repository's parameters in a scratch repository, with some values in params.yaml replaced."""
    text = (ROOT / "params.yaml").read_text(encoding="utf-8")
    for old, new in replacements.items():
        assert f"{old}:" in text
        text = text.replace(f"{old}:", f"{old}: {new}")
    (root / "params.yaml").write_text(text, encoding="utf-8")
    for name in ("conf", "stages"):
        (root / name).symlink_to(ROOT / name)
    return root


def summary(findings: Iterable[Finding]) -> str:
    """What a person would read, one finding per line; every note and problem says what to do, and nothing else does."""
    lines = []
    for finding in findings:
        assert (finding.remedy is None) == (finding.state == "ok"), finding
        lines.append(
            f"{finding.state}: {finding.found} -> {finding.remedy}" if finding.remedy else f"ok: {finding.found}"
        )
    return "\n".join(lines)


def group(system: Path, name: str, **files: str) -> None:
    """A scratch /proc and /sys in which this process is in the control group `name`."""
    (system / "proc/self").mkdir(parents=True, exist_ok=True)
    (system / "proc/self/cgroup").write_text(f"1:cpu:/old\n0::/{name}\n")
    folder = system / "sys/fs/cgroup" / name
    folder.mkdir(parents=True, exist_ok=True)
    for kind, text in files.items():
        (folder / kind.replace("_", ".", 1)).write_text(text + "\n")


def test_a_limit_on_the_cores_time_is_found_wherever_above_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "workers", lambda asked: 8)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert summary(doctor.cores(tmp_path)).startswith("ok: 8 of ")
    group(tmp_path, "slice/job", cpu_max="max 100000")
    assert summary(doctor.cores(tmp_path)).startswith("ok: 8 of ")
    group(tmp_path, "slice", cpu_max="250000 100000")
    group(tmp_path, "slice/job")
    found = summary(doctor.cores(tmp_path)).splitlines()[0]
    assert found.startswith("note: 8 of") and "CPU quota 2.5 ->" in found
    assert "export OMP_NUM_THREADS=2" in found and "runtime.workers: 2" in found
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert summary(doctor.cores(tmp_path)).startswith("ok: 8 of ")


def test_what_linux_alone_tells_is_not_known_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    cores, bf16 = summary(doctor.cores(tmp_path)).splitlines()
    assert cores.startswith("ok:") and "not known" in cores and bf16 == "ok: not known on this system"


def test_a_cpu_without_bf16_is_told_what_it_computes_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for fast, text in ((True, "in hardware"), (False, "computes in fp32")):
        monkeypatch.setattr(device, "has_fast_bf16", lambda fast=fast: fast)
        assert text in summary(doctor.cores(tmp_path)).splitlines()[-1]


def test_memory_is_what_the_control_group_leaves_and_too_little_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=16 * 10**9, available=9 * 10**9))
    monkeypatch.setattr(device, "total_memory", lambda where: 16 * 10**9)
    assert summary(doctor.memory(tmp_path)) == "ok: 16.0 GB, 9.0 GB of it available"
    group(tmp_path, "job", memory_max="max", memory_current="1", memory_stat="inactive_file 1")
    assert summary(doctor.memory(tmp_path)) == "ok: 16.0 GB, 9.0 GB of it available"
    stat = "anon 5\ninactive_file 500000000"
    group(tmp_path, "job", memory_max="4000000000", memory_current="3000000000", memory_stat=stat)
    found = summary(doctor.memory(tmp_path))
    assert found.startswith("note: 16.0 GB, 1.5 GB of it available") and "pipeline.tools.plan" in found


def test_gpus_have_their_memory_and_a_driver_that_torch_does_not_see_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"device": "Some card (cuda)", "precision": "bf16", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(device, "describe", lambda: told)
    monkeypatch.setattr(device, "total_memory", lambda where: 80 * 10**9 + where.index)
    monkeypatch.setattr(device, "num_gpus", lambda: 2)
    assert summary(doctor.gpus(tmp_path)) == "ok: 2: Some card (cuda), bf16; memory: 80.0 GB, 80.0 GB"
    monkeypatch.setattr(device, "num_gpus", lambda: 0)
    assert summary(doctor.gpus(tmp_path)).startswith("ok: no CUDA GPU")
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version")
    assert summary(doctor.gpus(tmp_path)).startswith(
        "note: NVIDIA's driver is loaded, but torch 2.13.0+cpu sees no GPU ->"
    )


@pytest.mark.parametrize(("free", "state"), [(1.9e9, "problem"), (9.9e9, "note"), (10.1e9, "ok")])
def test_little_space_is_a_note_and_less_a_problem_in_each_of_the_three_places(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, free: float, state: str
) -> None:
    asked = []
    configure(scratch, "[cache]\n    dir = ../elsewhere\n", "config.local")

    def usage(folder: Path) -> SimpleNamespace:
        asked.append(folder)
        return SimpleNamespace(free=free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    (scratch / "work").mkdir()
    tree, states, cache = doctor.disk(scratch)
    assert {tree.state, states.state, cache.state} == {state}
    assert f"{free / 1e9:.1f} GB free in {scratch.resolve()}" in tree.found and str(scratch / "work") in states.found
    assert cache.found.endswith("elsewhere")
    assert asked == [scratch.resolve(), (scratch / "work").resolve(), scratch.resolve()]  # the cache does not exist yet
    if state != "ok":
        assert "dvc gc" in str(tree.remedy) and "prune" in str(states.remedy) and "dvc cache dir" in str(cache.remedy)


def test_the_cache_links_where_it_can_and_a_copy_that_need_not_be_is_a_note(scratch: Path) -> None:
    configure(scratch, '[cache]\n    type = "hardlink,reflink,copy"\n')
    assert summary(doctor.cache_links(scratch)).startswith(("ok: reflink", "ok: hardlink"))
    configure(scratch, "[cache]\n    type = copy\n", "config.local")
    found = summary(doctor.cache_links(scratch))
    assert found.startswith("note: copy") and found.endswith("-> dvc config cache.type hardlink,reflink,copy")
    assert not list(scratch.rglob(".doctor-*"))


def test_a_cache_on_another_file_system_copies_and_is_told_to_move(scratch: Path) -> None:
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK) or shm.stat().st_dev == scratch.stat().st_dev:
        pytest.skip("no second file system at hand")
    configure(scratch, f"[cache]\n    type = hardlink,reflink,copy\n    dir = {shm}/not-there\n")
    found = summary(doctor.cache_links(scratch))
    assert found.startswith("note: copy") and "dvc cache dir --local FOLDER" in found
    assert not list(shm.glob(".doctor-*"))


def test_links_that_cannot_be_had_are_a_problem(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError("not here")

    monkeypatch.setattr(doctor, "reflink", refuse)
    configure(scratch, "[cache]\n    type = reflink\n")
    found = summary(doctor.cache_links(scratch))
    assert found.startswith("problem: none (cache.type: reflink;") and found.endswith("hardlink,reflink,copy")


def test_an_rwlock_of_a_dead_process_is_a_note_and_of_a_reused_pid_a_problem(scratch: Path, dead: int) -> None:
    path, own = scratch / ".dvc/tmp/rwlock", os.getpid()
    assert summary(doctor.rwlock(scratch)) == "ok: processes that hold locks: 0"
    path.write_text(f'{{"write": {{"/a/models": {{"pid": {dead}, "cmd": "dvc repro"}}}}}}')
    found = summary(doctor.rwlock(scratch)).splitlines()[1]
    assert found == f"note: left by process {dead}, which is gone: dvc repro -> if no dvc command is running: rm {path}"
    path.write_text(f'{{"read": {{"/a/models": [{{"pid": {own}, "cmd": "/x/bin/dvc repro"}}]}}}}')
    found = summary(doctor.rwlock(scratch)).splitlines()[1]
    assert found.startswith("problem: left by `/x/bin/dvc repro`") and f"rm {path}" in found


def test_an_rwlock_is_its_processs_unless_that_began_after_it_was_written(scratch: Path) -> None:
    from dvc.fs import localfs
    from dvc.rwlock import rwlock

    folder, command = scratch / ".dvc/tmp", f"{psutil.Process().cmdline()[0]} repro"
    with rwlock(str(folder), localfs, command, ["/a/data"], ["/a/models"], False):  # as dvc writes it
        named, holder = summary(doctor.rwlock(scratch)).splitlines()
        assert named.endswith(": 1") and holder == f"ok: process {os.getpid()} runs: {command}"
        os.utime(folder / "rwlock", (1, 1))
        assert "problem: left by" in summary(doctor.rwlock(scratch))
    assert summary(doctor.rwlock(scratch)) == "ok: processes that hold locks: 0"


def test_an_rwlock_that_was_cut_off_is_a_problem(scratch: Path) -> None:
    for text in ("", '{"write": {"/a": {"pid"', '{"write": {"/a": {"pid": 1}}}', "[1]"):
        (scratch / ".dvc/tmp/rwlock").write_text(text)
        found = summary(doctor.rwlock(scratch))
        assert found.startswith("problem: corrupt") and "rm " in found


def test_dvcs_lock_is_held_only_while_a_process_holds_it(scratch: Path, dead: int) -> None:
    from dvc.lock import Lock

    path = scratch / ".dvc/tmp/lock"
    assert summary(doctor.dvc_lock(scratch)) == "ok: free"
    with Lock(str(path)):
        assert summary(doctor.dvc_lock(scratch)) == f"ok: a dvc command is running (process {os.getpid()})"
    assert path.exists() and summary(doctor.dvc_lock(scratch)) == "ok: free"
    path.write_text(f" {dead}\n")
    assert summary(doctor.dvc_lock(scratch)) == "ok: free"
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = summary(doctor.dvc_lock(scratch))
    assert found.startswith(f"problem: process {dead} took the lock") and f"fuser -v {path}" in found


def test_unfinished_keys_are_counted_and_those_that_run_are_not(scratch: Path) -> None:
    def key(name: str, **files: int) -> Path:
        folder = scratch / "work/language" / name
        folder.mkdir(parents=True)
        (folder / "lock").write_text("4711")
        for kind, size in files.items():
            (folder / kind.replace("_", ".")).write_bytes(b"x" * size)
        return folder

    key("done", finished_json=2, out=3)
    key("emptied", speed_json=2)
    assert summary(doctor.unfinished(scratch)).startswith("ok: 0 unfinished")
    running = key("running", out=9)
    key("begun", out=2_000_000)
    with (running / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        held, idle = summary(doctor.unfinished(scratch)).splitlines()
    assert held == "ok: running: language/running (process 4711)"
    assert idle.startswith("note: 1 unfinished, 2.0 MB language/begun ->")
    assert "dvc repro resumes" in idle and "python -m pipeline.run.workdir prune" in idle


def test_parts_of_dead_processes_are_found_and_those_of_living_ones_left(scratch: Path, dead: int) -> None:
    (scratch / "models").mkdir()
    (scratch / "work").mkdir()
    (scratch / "models" / f".language.{os.getpid()}.part").mkdir()
    (scratch / "models" / ".language.part").mkdir()  # not named by us
    assert summary(doctor.leftovers(scratch)).startswith("ok: 0 .part files")
    (scratch / "models" / f".my model.{dead}.old.part").mkdir()
    (scratch / "work" / f".digests.json.{dead}.1234.part").touch()
    found = summary(doctor.leftovers(scratch))
    assert found.startswith("note: 2 .part files of dead processes -> rm -r ")
    assert f"'{scratch}/models/.my model.{dead}.old.part'" in found and f"{scratch}/work/.digests.json" in found


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
def test_a_sandbox_that_can_be_had_is_ok_and_one_that_cannot_says_why(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_parameters(scratch)
    assert summary(doctor.sandbox(scratch)) == "ok: profile sealed isolates generated code"
    jail = tmp_path / "jail.py"
    jail.write_text(REFUSING_JAIL)
    monkeypatch.setattr(servers, "JAIL", jail)
    refused = summary(doctor.sandbox(scratch))
    assert refused.startswith("problem: profile sealed is unavailable: no seccomp here -> ")
    assert "runtime.sandbox.url" in refused


def test_what_params_yaml_says_of_the_sandbox_counts(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "JAIL", tmp_path / "absent.py")
    with_parameters(scratch, allow_unsafe="true")
    assert summary(doctor.sandbox(scratch)).startswith("note: profile sealed is unavailable")
    text = (scratch / "params.yaml").read_text(encoding="utf-8")
    text = text.replace("sandbox:\n    url:", "sandbox:\n    url: http://other:8801")
    (scratch / "params.yaml").write_text(text, encoding="utf-8")
    assert summary(doctor.sandbox(scratch)).startswith("ok: generated code runs at http://other:8801")


def project(root: Path, python: str, dependencies: list[str], **extras: list[str]) -> Path:
    """A scratch pyproject.toml."""
    lines = ["[project]", f'requires-python = "{python}"', f"dependencies = {dependencies}"]
    lines += ["[project.optional-dependencies]", *(f"{name} = {texts}" for name, texts in extras.items())]
    (root / "pyproject.toml").write_text("\n".join(lines))
    return root


def test_packages_outside_their_ranges_are_problems_with_the_command_that_mends_them(tmp_path: Path) -> None:
    asked = ["torch==9.9.9", "dvc>=99", "no-such-package>=1", "psutil>=5"]
    found = summary(doctor.packages(project(tmp_path, ">=99", asked))).splitlines()
    torch, version = importlib.metadata.version("torch"), importlib.metadata.version("dvc")
    assert found[0].startswith("problem: Python is 3.") and "requires >=99" in found[0] and "make PYTHON=" in found[0]
    assert found[1:4] == [
        f"problem: torch is {torch}, but pyproject.toml requires ==9.9.9 -> python -m pip install 'torch==9.9.9'",
        f"problem: dvc is {version}, but pyproject.toml requires >=99 -> python -m pip install 'dvc>=99'",
        "problem: no-such-package is not installed -> python -m pip install 'no-such-package>=1'",
    ]
    assert "1 of 4 packages" in found[4]


def test_packages_that_fit_are_ok_and_so_are_extras_that_are_absent(tmp_path: Path) -> None:
    torch = importlib.metadata.version("torch").partition("+")[0]  # a build label such as +cpu is not another version
    root = project(tmp_path, ">=3.11", [f"torch=={torch}"], onnx=["no-such-package"], gpu=["psutil>=5"], dev=["x"])
    fits, onnx, gpu = summary(doctor.packages(root)).splitlines()
    assert fits.startswith("ok: Python 3.") and f"1 of 1 packages within pyproject.toml's ranges: torch {torch}" in fits
    assert onnx.startswith("ok: onnx (deploy.onnx): absent (no-such-package is not installed)") and "'.[onnx]'" in onnx
    assert gpu.startswith("ok: gpu (") and gpu.endswith(": present")


def test_a_folder_that_is_no_checkout_and_a_machine_without_git_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_dvc, no_graph, no_git = summary(doctor.checkout(tmp_path)).splitlines()
    assert no_dvc.startswith(f"problem: no .dvc in {tmp_path}") and no_graph.startswith("problem: no dvc.yaml in")
    assert no_git.startswith("note: this is not a git checkout") and "git clone" in no_git
    for name in (".dvc", ".git"):
        (tmp_path / name).mkdir()
    (tmp_path / "dvc.yaml").touch()
    assert summary(doctor.checkout(tmp_path)) == "ok: git is installed, and this is a checkout"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert summary(doctor.checkout(tmp_path)).startswith("problem: git is not installed")


def test_dvcs_hydra_switch_on_is_a_problem_and_autostage_a_note(scratch: Path) -> None:
    assert summary(doctor.switches(scratch)) == "ok: hydra.enabled is off\nok: core.autostage is off"
    configure(scratch, "[core]\n    autostage = true  # handy\n[hydra]\n    enabled = True\n")
    hydra, autostage = summary(doctor.switches(scratch)).splitlines()
    assert hydra.startswith("problem: hydra.enabled is on: dvc repro then ignores edits of conf/")
    assert "dvc config hydra.enabled false" in hydra
    assert autostage.startswith("note: core.autostage is on") and "dvc config core.autostage false" in autostage
    configure(scratch, "[core]\n    autostage = false\n[hydra]\n    enabled = false\n", "config.local")
    assert summary(doctor.switches(scratch)) == "ok: hydra.enabled is off\nok: core.autostage is off"


def test_a_wrong_key_of_any_block_is_a_problem(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "stage_names", lambda root: [])  # the command's test covers the stages
    assert "params.yaml: no such file" in summary(doctor.parameters(scratch))
    with_parameters(scratch)
    assert summary(doctor.parameters(scratch)).startswith("ok:")
    text = (scratch / "params.yaml").read_text(encoding="utf-8")
    (scratch / "params.yaml").write_text(text + "\nlanguge: {}\n", encoding="utf-8")
    found = summary(doctor.parameters(scratch))
    assert found.startswith("problem: params.yaml: unknown key 'languge' (did you mean 'language'?)")
    assert "python -m pipeline.run.config" in found
    (scratch / "params.yaml").write_text(text.replace("logging_steps:", "loging_steps:"), encoding="utf-8")
    assert "runtime: unknown key 'loging_steps'" in summary(doctor.parameters(scratch))


def test_a_remote_is_where_its_url_leads_from_dvcs_folder(scratch: Path) -> None:
    assert summary(doctor.remote(scratch)).startswith("note: no url for core.remote (none)")
    configure(scratch, "[core]\n    remote = store\n")
    assert summary(doctor.remote(scratch)).endswith("-> dvc remote add --default store FOLDER")
    configure(scratch, "[core]\n    remote = store\n['remote \"store\"']\n    url = ../kept\n")
    found = summary(doctor.remote(scratch))
    assert found == f"note: store: {scratch.resolve()}/kept -> the folder does not exist yet; dvc push creates it"
    (scratch / "kept").mkdir()
    assert summary(doctor.remote(scratch)) == f"ok: store: {scratch.resolve()}/kept"
    configure(scratch, "['remote \"store\"']\n    url = s3://bucket/kept\n", "config.local")
    assert summary(doctor.remote(scratch)) == "ok: store: s3://bucket/kept (not contacted)"


def test_a_check_that_cannot_run_is_a_note_and_dvcs_broken_settings_are_a_problem(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(root: Path) -> list[Finding]:
        raise PermissionError(13, "Permission denied", "/sys/fs/cgroup/cpu.max")

    names = (
        "memory gpus disk cache_links rwlock dvc_lock unfinished leftovers sandbox packages checkout parameters remote"
    )
    for name in names.split():
        monkeypatch.setattr(doctor, name, lambda root: [])
    monkeypatch.setattr(doctor, "cores", forbidden)
    configure(scratch, "[core\nremote = store\n")
    cores, settings = summary(doctor.examine(scratch)).splitlines()[0], list(doctor.examine(scratch))[-1]
    assert cores.startswith("note: could not be checked: PermissionError:") and "cpu.max" in cores
    assert settings.state == "problem" and ".dvc/config" in settings.found


def test_a_remedy_stands_below_its_finding_on_a_line_of_its_own() -> None:
    assert Finding("disk", "ok", "much").render() == "ok       disk         much"
    above, below = Finding("disk", "note", "a\nb", "do  this").render().splitlines()
    assert above == "note     disk         a b" and below.split() == ["->", "do", "this"] and below.startswith("   ")


def test_the_command_checks_everything_here(in_repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.main([])
    text = capsys.readouterr().out
    lines = text.splitlines()
    states = [line.split()[0] for line in lines if line and not line.startswith((" ", "problems:"))]
    assert set(states) <= {"ok", "note", "problem"}
    assert code == int("problem" in states)
    assert lines[-1] == f"problems: {states.count('problem')}, notes: {states.count('note')}"
    assert "could not be checked" not in text
    for subject in ("cores", "memory", "GPU", "DVC rwlock", "sandbox", "packages", "parameters", "remote"):
        assert f" {subject} " in text, subject


def test_the_command_takes_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        doctor.main(["--fix"])
    assert raised.value.code == 2 and "--fix" in capsys.readouterr().err
