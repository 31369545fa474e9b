"""Check this machine and this checkout, and suggest fixes.

    python -m pipeline.tools.doctor      one line per check: ok, note or problem, the last two with a suggested fix

Input: the machine, `pyproject.toml`, `.dvc/config` (and `config.local`), `params.yaml`, `conf/`, lock files, and the
work directory. Output: text, and exit code 1 if there is a problem: something that stops `dvc repro` or makes its
results wrong. A note is about something that costs time or disk space, or affects only some runs. Nothing is repaired.
For a moment, the checks create links between the cache and the working tree, take locks, and start the sandbox's
servers.

Not checked: whether a remote or a sandbox service is up (neither is contacted); DVC's settings outside the repository,
and `core.hardlink_lock`; processes on other machines that share the disk (they appear dead). On macOS, some results
are "not known".
"""

import argparse
import configparser
import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from pipeline.run import device, graph, workdir
from pipeline.run.config import Runtime, Settings, build, stage_names, stage_params, without_password
from pipeline.run.errors import ConfigError, StagecoachError
from pipeline.sandbox import servers
from pipeline.sandbox.config import SandboxConfig

State = Literal["ok", "note", "problem"]
CHECK_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    ImportError,
    RuntimeError,
    psutil.Error,
    configparser.Error,
    yaml.YAMLError,
)
PROBLEM_BYTES, NOTE_BYTES = 2e9, 10e9  # free disk space below the first is a problem, below the second a note
MEMORY_BYTES = 2e9  # less available memory is a note
LEFTOVER = re.compile(r"\..+?\.(\d+)(\.old|\.\d+)?\.part")  # names used by workdir.publish and workdir.write_atomically
SHOWN_PACKAGES = ("torch", "dvc", "hydra-core", "mlflow", "accelerate")  # packages whose versions are shown
EXTRAS = {
    "onnx": "deploy.onnx",
    "s3": "a DVC remote on S3",
    "gpu": "how busy a GPU is, in speed.json",
    "trackers": "runtime.trackers: TensorBoard, Weights & Biases",
}
SWITCHES: dict[str, tuple[State, str]] = {  # DVC settings that must be off -> state if on, reason
    "hydra.enabled": ("problem", "dvc repro then ignores edits of conf/, and dvc exp run reverts manual edits"),
    "core.autostage": ("note", "git checkout . then keeps the staged dvc.lock"),
}


@dataclass(frozen=True)
class Finding:
    subject: str
    state: State
    found: str
    remedy: str | None = None  # suggested fix; None if all is well

    def render(self) -> str:
        """The finding as a line, with the remedy below it."""
        line = f"{self.state:<8} {self.subject:<12} {' '.join(self.found.split())}"
        return line if self.remedy is None else f"{line}\n{'':21} -> {' '.join(self.remedy.split())}"


def examine(root: Path) -> Iterator[Finding]:
    """All findings about this machine and the checkout in `root`; a check that cannot run becomes a note."""
    machine_checks = (cores, memory, gpus)
    checkout_checks = (
        disk,
        cache_links,
        rwlock,
        dvc_lock,
        unfinished,
        leftovers,
        sandbox,
        packages,
        checkout,
        parameters,
    )
    for check in (*machine_checks, *checkout_checks, switches, remote):
        try:
            yield from check(Path("/") if check in machine_checks else root)
        except CHECK_ERRORS as error:
            state = "problem" if isinstance(error, configparser.Error) else "note"  # DVC cannot read the config either
            text = f"could not be checked: {type(error).__name__}: {error}"
            yield Finding(check.__name__, state, text, "fix that, then rerun python -m pipeline.tools.doctor")


def cores(system: Path) -> Iterator[Finding]:
    """Cores available to this process, according to its affinity and its cgroups' CPU quota, and whether they support
    bf16.
    """
    usable, on_linux = device.workers("auto"), sys.platform == "linux"
    limits = [text.split() for text in _cgroup_files(system, "cpu.max")]
    quota = min((int(time) / int(period) for time, period in limits if time != "max"), default=usable)
    time = f"CPU quota {quota:g}" if on_linux else "CPU quota not known"
    num_threads, remedy = max(1, int(quota)), None
    if quota < min(usable, int(os.environ.get("OMP_NUM_THREADS", usable))):
        remedy = (
            f"too many threads: export OMP_NUM_THREADS={num_threads}, and set runtime.workers: {num_threads} in"
            " params.yaml"
        )
    yield Finding("cores", "note" if remedy else "ok", f"{usable} of {os.cpu_count()} usable, {time}", remedy)
    fast = "in hardware" if device.has_fast_bf16() else "not in hardware: the CPU computes in fp32"
    yield Finding("bf16", "ok", fast if on_linux else "not known on this system")


def _cgroup_files(system: Path, name: str) -> list[str]:
    """The text of a file in each of this process's cgroups (v2) that has it, innermost first."""
    membership, groups = system / "proc/self/cgroup", system / "sys/fs/cgroup"
    lines = membership.read_text().splitlines() if membership.exists() else []
    group = groups / next((line[3:] for line in lines if line.startswith("0::")), "/").strip("/")
    files = [folder / name for folder in (group, *group.parents) if folder.is_relative_to(groups)]
    return [file.read_text().strip() for file in files if file.is_file()]


def memory(system: Path) -> list[Finding]:
    """Total and available memory of the machine, or of this process's cgroup if it is limited."""
    import torch

    available = psutil.virtual_memory().available
    names = ("memory.max", "memory.current", "memory.stat")  # the outermost cgroup has only memory.stat
    for limit, current, stat in zip(*(_cgroup_files(system, name) for name in names)):
        cache_size = re.search(r"^inactive_file (\d+)$", stat, re.MULTILINE)  # page cache, which can be reclaimed
        if limit != "max":
            available = min(available, max(0, int(limit) - int(current) + int(cache_size[1] if cache_size else 0)))
    text = f"{_format_bytes(device.total_memory(torch.device('cpu')))}, {_format_bytes(available)} of it available"
    remedy = "close other programs, or use a smaller model: python -m pipeline.tools.plan shows how much each needs"
    return [Finding("memory", "ok", text) if available >= MEMORY_BYTES else Finding("memory", "note", text, remedy)]


def gpus(system: Path) -> list[Finding]:
    """The GPUs that torch sees; a note if NVIDIA's driver is loaded but torch sees none."""
    import torch

    count, described = device.num_gpus(), device.describe()
    if count:
        sizes = ", ".join(_format_bytes(device.total_memory(torch.device("cuda", index))) for index in range(count))
        return [Finding("GPU", "ok", f"{count}: {described['device']}, {described['precision']}; memory: {sizes}")]
    if not (system / "proc/driver/nvidia/version").exists():
        return [Finding("GPU", "ok", f"no CUDA GPU: stages run on {described['device']}")]
    text = f"NVIDIA's driver is loaded, but torch {described['torch']} sees no GPU"
    return [Finding("GPU", "note", text, "check nvidia-smi, then install the CUDA build of the same torch version")]


def _format_bytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def disk(root: Path) -> Iterator[Finding]:
    """Free disk space for outs, checkpoints and the cache."""
    gc_hint = "dvc gc --workspace --all-experiments --dry lists cache files that no experiment needs"
    folders = {
        "tree": (root, gc_hint),
        "work folder": (
            workdir.root(),
            "python -m pipeline.run.workdir prune, or set STAGECOACH_WORK to a folder on another disk",
        ),
        "DVC cache": (_cache_folder(root), f"{gc_hint}; or move it: dvc cache dir --local FOLDER (on another disk)"),
    }
    for subject, (folder, remedy) in folders.items():
        free = shutil.disk_usage(_existing_folder(folder)).free
        state = "problem" if free < PROBLEM_BYTES else "note" if free < NOTE_BYTES else "ok"
        yield Finding(
            subject, state, f"{_format_bytes(free)} free in {folder.resolve()}", None if state == "ok" else remedy
        )


def _existing_folder(path: Path) -> Path:
    """The path itself, or its nearest parent that exists."""
    return next(folder for folder in (path.resolve(), *path.resolve().parents) if folder.exists())


def _dvc_options(root: Path) -> dict[str, str]:
    """`section.key` -> value in `.dvc/config`, overridden by `config.local`. Raises configparser.Error."""
    parser = configparser.ConfigParser(interpolation=None, strict=False, inline_comment_prefixes=("#",))
    for path in filter(Path.exists, (root / ".dvc/config", root / ".dvc/config.local")):
        parser.read_string(path.read_text(encoding="utf-8"), str(path))
    return {f"{name}.{key}": value.strip("\"'") for name in parser.sections() for key, value in parser[name].items()}


def _cache_folder(root: Path) -> Path:
    return root / ".dvc" / Path(_dvc_options(root).get("cache.dir", "cache")).expanduser()


def cache_links(root: Path) -> list[Finding]:
    """How DVC links cache files into the working tree; tries each link type with a test file."""
    works, folder, cache = ["copy"], tempfile.TemporaryDirectory, _existing_folder(_cache_folder(root))
    with folder(prefix=".doctor-", dir=cache) as cache_folder, folder(prefix=".doctor-", dir=root) as tree_folder:
        (source := Path(cache_folder) / "file").write_bytes(b"stagecoach")
        for kind, link in {"reflink": reflink, "hardlink": os.link, "symlink": os.symlink}.items():
            with contextlib.suppress(OSError):
                link(source, Path(tree_folder) / kind)
                works.append(kind)
    link_types = [kind.strip() for kind in _dvc_options(root).get("cache.type", "reflink,copy").split(",")]
    selected = next((kind for kind in link_types if kind in works), None)
    text = f"{selected or 'none'} (cache.type: {', '.join(link_types)}; works here: {', '.join(works)})"
    if selected not in (None, "copy"):
        return [Finding("cache links", "ok", text)]
    move = "every out takes twice its size; put the cache on the working tree's disk: dvc cache dir --local FOLDER"
    remedy = "dvc config cache.type hardlink,reflink,copy" if "hardlink" in works or selected is None else move
    return [Finding("cache links", "note" if selected else "problem", text, remedy)]


def reflink(source: Path, target: Path) -> None:
    """Create a file that shares the blocks of another. Raises OSError if the file system does not support it, and
    always on macOS, although DVC can create such files there.
    """
    with source.open("rb") as old, target.open("wb") as new:
        fcntl.ioctl(new, 0x40049409, old.fileno())  # FICLONE of linux/fs.h


def rwlock(root: Path) -> Iterator[Finding]:
    """The processes that hold DVC's file locks, according to `.dvc/tmp/rwlock`. The pid of a killed command may have
    been reused by another program.
    """
    path = root / ".dvc/tmp/rwlock"
    remedy = f"if no dvc command is running: rm {path}"
    try:
        lock = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        entries = [
            *lock.get("write", {}).values(),
            *(entry for many in lock.get("read", {}).values() for entry in many),
        ]
        holders = {int(entry["pid"]): str(entry["cmd"]) for entry in entries}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        yield Finding("DVC rwlock", "problem", f"corrupt, which blocks dvc commands: {error}", remedy)
        return
    yield Finding("DVC rwlock", "ok", f"processes that hold locks: {len(holders)}")
    for pid, command in holders.items():
        if not psutil.pid_exists(pid):
            yield Finding("DVC rwlock", "note", f"left by process {pid}, which is gone: {command}", remedy)
        elif _is_other_process(pid, command, path.stat().st_mtime):
            text = f"left by `{command}`; its pid {pid} now belongs to another program, which blocks dvc commands"
            yield Finding("DVC rwlock", "problem", text, remedy)
        else:
            yield Finding("DVC rwlock", "ok", f"process {pid} runs: {command}")


def _is_other_process(pid: int, command: str, written: float) -> bool:
    """Whether the process with a pid is not the one that wrote `command` to the lock: it started later, or runs
    something else.
    """
    process = psutil.Process(pid)
    programs = ("dvc", Path(command.split(" ")[0]).name)
    is_known = any(Path(word).name in programs for word in process.cmdline())
    return not is_known or process.create_time() > written + 2  # the two clocks differ by fractions of a second


def dvc_lock(root: Path) -> list[Finding]:
    """Whether a dvc command has locked the repository. The lock file alone means nothing: DVC never removes it."""
    path = root / ".dvc/tmp/lock"
    pid = path.read_text().strip() if path.exists() and _is_locked(path) else None
    if pid is None or not pid.isdecimal() or psutil.pid_exists(int(pid)):
        return [Finding("DVC lock", "ok", "free" if pid is None else f"a dvc command is running (process {pid})")]
    text = f"process {pid} took the lock and is gone, but a child still holds it, which blocks dvc commands"
    return [Finding("DVC lock", "problem", text, f"find the holder with fuser -v {path} and end it")]


def _is_locked(lock: Path) -> bool:
    """Whether a process holds a flock on the file."""
    with lock.open() as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    return True


def unfinished(_root: Path) -> Iterator[Finding]:
    """Keys in the work directory whose stage is running, and unfinished keys whose stage is not."""
    idle = {}
    for lock in sorted(workdir.root().glob("*/*/lock")):
        key, name = lock.parent, f"{lock.parent.parent.name}/{lock.parent.name}"
        if _is_locked(lock):
            yield Finding("work", "ok", f"running: {name} (process {lock.read_text().strip() or 'not known'})")
        elif not (key / "finished.json").exists() and {path.name for path in key.iterdir()} - {"lock", "speed.json"}:
            idle[name] = sum(path.stat().st_size for path in key.rglob("*") if path.is_file())
    text = f"{len(idle)} unfinished, {_format_bytes(sum(idle.values()))} {', '.join([*idle][:3])}" + ", ..." * (
        len(idle) > 3
    )
    remedy = "dvc repro resumes the work it still needs; python -m pipeline.run.workdir prune removes all of it"
    yield Finding("work", "note" if idle else "ok", text, remedy if idle else None)


def leftovers(root: Path) -> list[Finding]:
    """`.part` files and folders left by dead processes, next to the outs of dvc.yaml and in the work directory."""
    outs = [root / out for stage in graph.stages(root).values() for out in stage.outs]
    parts = [
        path for folder in sorted({out.parent for out in outs} | {workdir.root()}) for path in folder.glob(".*.part")
    ]
    writers = {path: name[1] for path in sorted(parts) if (name := LEFTOVER.fullmatch(path.name))}
    dead = [str(path) for path, pid in writers.items() if not psutil.pid_exists(int(pid))]
    remedy = f"rm -r {shlex.join(dead)}" if dead else None
    return [Finding("leftovers", "note" if dead else "ok", f"{len(dead)} .part files of dead processes", remedy)]


def sandbox(root: Path) -> Iterator[Finding]:
    """Whether this machine can sandbox generated code, by starting a server."""
    settings = Settings(root, [])
    config = build(SandboxConfig, settings.layers("sandbox"), "sandbox")
    if url := build(Runtime, settings.layers("runtime"), "runtime").sandbox_url:
        shown = without_password(url)
        yield Finding("sandbox", "ok", f"generated code runs at {shown} (runtime.sandbox.url; not contacted)")
        return
    server = servers.Server(config, "sealed")
    try:
        server.launch()
        server.greet()
        yield Finding("sandbox", "ok", "profile sealed isolates generated code")
    except (ConfigError, servers.HarnessError, OSError) as error:
        state = "note" if config.allow_unsafe else "problem"
        yield Finding("sandbox", state, f"profile sealed is unavailable: {error}", servers.NO_SANDBOX)
    finally:
        server.stop()


def packages(root: Path) -> Iterator[Finding]:
    """Check Python and the packages against the ranges in pyproject.toml, and list installed extras."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    python, required = platform.python_version(), project["requires-python"]
    if not SpecifierSet(required).contains(python, prereleases=True):
        remedy = "install a matching version; then make clean && make PYTHON=<its command>"
        yield Finding("packages", "problem", f"Python is {python}, but pyproject.toml requires {required}", remedy)
    needed = [Requirement(text) for text in project["dependencies"]]
    faults = {requirement: fault for requirement in needed if (fault := _fault_of_requirement(requirement))}
    for requirement, fault in faults.items():
        yield Finding("packages", "problem", fault, f"python -m pip install '{requirement}'")
    fit = [requirement.name for requirement in needed if requirement not in faults]
    shown = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in SHOWN_PACKAGES if name in fit)
    text = f"Python {python}; {len(fit)} of {len(needed)} packages within pyproject.toml's ranges: {shown}"
    yield Finding("packages", "ok", text)
    for extra, texts in project.get("optional-dependencies", {}).items():
        if extra in EXTRAS:
            lacking = next((fault for text in texts if (fault := _fault_of_requirement(Requirement(text)))), None)
            state = f"absent ({lacking}); to install: python -m pip install -e '.[{extra}]'" if lacking else "present"
            yield Finding("extra", "ok", f"{extra} ({EXTRAS[extra]}): {state}")


def _fault_of_requirement(requirement: Requirement) -> str | None:
    """What is wrong with the installed version of a package; None if it fits."""
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{requirement.name} is not installed"
    fits = requirement.specifier.contains(version, prereleases=True)
    return None if fits else f"{requirement.name} is {version}, but pyproject.toml requires {requirement.specifier}"


def checkout(root: Path) -> Iterator[Finding]:
    """Whether this is a DVC repository in a git checkout, and whether git is installed."""
    location = root.resolve()
    for name in (".dvc", "dvc.yaml"):
        if not (root / name).exists():
            yield Finding("checkout", "problem", f"no {name} in {location}", f"cd to its folder or git checkout {name}")
    if shutil.which("git") is None:
        yield Finding("checkout", "problem", "git is not installed: DVC needs it", "apt install git")
    elif any((folder / ".git").exists() for folder in (location, *location.parents)):
        yield Finding("checkout", "ok", "git is installed, and this is a checkout")
    else:
        remedy = "git clone the project; or, to continue without experiments, dvc config --local core.no_scm true"
        yield Finding("checkout", "note", "this is not a git checkout: dvc exp needs one", remedy)


def switches(root: Path) -> Iterator[Finding]:
    """Whether the DVC settings that must be off are off."""
    options = _dvc_options(root)
    for name, (state, why) in SWITCHES.items():
        if options.get(name, "false").lower() in ("true", "yes", "on", "1"):
            remedy = f"dvc config {name} false (with --local if config.local has it)"
            yield Finding("DVC settings", state, f"{name} is on: {why}", remedy)
        else:
            yield Finding("DVC settings", "ok", f"{name} is off")


def parameters(root: Path) -> list[Finding]:
    """Whether the parameters of all stages resolve."""
    names = stage_names(root)
    try:
        settings = Settings(root, [])
        for name in names:
            stage_params(name, settings)
        build(Runtime, settings.layers("runtime"), "runtime")
    except ConfigError as error:
        return [
            Finding("parameters", "problem", str(error), "fix that; python -m pipeline.run.config lists all errors")
        ]
    return [Finding("parameters", "ok", f"the parameters of {len(names)} stages resolve")]


def remote(root: Path) -> list[Finding]:
    """The remote of `dvc push`."""
    options = _dvc_options(root)
    name = options.get("core.remote")
    url = options.get(f"'remote \"{name}\"'.url")
    if url is None:
        text = f"no url for core.remote ({name or 'none'}): dvc push and pull have no target"
        return [Finding("remote", "note", text, f"dvc remote add --default {name or 'store'} FOLDER")]
    if "://" in url:
        return [Finding("remote", "ok", f"{name}: {without_password(url)} (not contacted)")]
    folder = (root / ".dvc" / Path(url).expanduser()).resolve()
    remedy = None if folder.is_dir() else "the folder does not exist yet; dvc push creates it"
    return [Finding("remote", "note" if remedy else "ok", f"{name}: {folder}", remedy)]


def main(argv: list[str]) -> int:
    """Print the findings; exit code 1 if one of them is a problem."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.tools.doctor", description="Check this machine and suggest fixes."
    )
    parser.parse_args(argv)
    states = []
    for finding in examine(Path()):
        sys.stdout.write(f"{finding.render()}\n")
        states.append(finding.state)
    sys.stdout.write(f"\nproblems: {states.count('problem')}, notes: {states.count('note')}\n")
    return StagecoachError.exit_code if "problem" in states else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
