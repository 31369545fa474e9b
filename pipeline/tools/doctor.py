"""What this machine and this checkout have, what they lack, and what to do about it.

    python -m pipeline.tools.doctor      a line per check: ok, note or problem; below the last two, what to do

In: the machine, `pyproject.toml`, `.dvc/config` with `config.local` over it, `params.yaml` and `conf/`, locks, the work
directory. Out: text, and exit code 1 where there is a problem: something that stops `dvc repro` or makes its results
wrong. A note costs time or disk, or only some runs need it. Nothing is repaired. To find out, it links files of its own
between the cache and the working tree and removes them, asks for locks and gives them back at once, and starts the
sandbox's servers.

Not promised: that a remote or a sandbox service answers (neither is contacted); DVC's settings outside the repository,
and its `core.hardlink_lock`; processes of other machines that share the disk (they look dead). On macOS some of it is
"not known".
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

from pipeline.run import device, workdir
from pipeline.run.config import Runtime, Settings, build, stage_names, stage_params, without_password
from pipeline.run.errors import ConfigError, StagecoachError
from pipeline.sandbox import servers
from pipeline.sandbox.config import SandboxConfig

State = Literal["ok", "note", "problem"]
CANNOT = (OSError, ValueError, KeyError, ImportError, RuntimeError, psutil.Error, configparser.Error, yaml.YAMLError)
PROBLEM_BYTES, NOTE_BYTES, MEMORY_BYTES = 2e9, 10e9, 2e9  # free on a disk, the same, available memory
LEFTOVER = re.compile(r"\..+?\.(\d+)(\.old|\.\d+)?\.part")  # as work.publish and work.write_atomically name them
NAMED = ("torch", "dvc", "hydra-core", "mlflow", "accelerate")  # packages whose versions are shown
EXTRAS = {
    "onnx": "deploy.onnx",
    "s3": "a DVC remote on S3",
    "gpu": "how busy a GPU is, in speed.json",
    "trackers": "runtime.trackers: TensorBoard, Weights & Biases",
}
SWITCHES: dict[str, tuple[State, str]] = {  # of DVC, that must be off: how bad it is, and why
    "hydra.enabled": ("problem", "dvc repro then ignores edits of conf/, and dvc exp run reverts edits by hand"),
    "core.autostage": ("note", "git checkout . then keeps the staged dvc.lock"),
}


@dataclass(frozen=True)
class Finding:
    """What one check saw."""

    subject: str
    state: State
    found: str
    remedy: str | None = None  # what to do; None where all is well

    def render(self) -> str:
        """The line, and below it the remedy."""
        line = f"{self.state:<8} {self.subject:<12} {' '.join(self.found.split())}"
        return line if self.remedy is None else f"{line}\n{'':21} -> {' '.join(self.remedy.split())}"


def examine(root: Path) -> Iterator[Finding]:
    """All findings about this machine and the checkout in `root`; a check that cannot run is a note."""
    of_machine = (cores, memory, gpus)
    of_checkout = (disk, cache_links, rwlock, dvc_lock, unfinished, leftovers, sandbox, packages, checkout, parameters)
    for check in (*of_machine, *of_checkout, switches, remote):
        try:
            yield from check(Path("/") if check in of_machine else root)
        except CANNOT as error:
            state = "problem" if isinstance(error, configparser.Error) else "note"  # DVC cannot read it either
            found = f"could not be checked: {type(error).__name__}: {error}"
            yield Finding(check.__name__, state, found, "see to that, then run python -m pipeline.tools.doctor again")


def cores(system: Path) -> Iterator[Finding]:
    """Cores that this process may use, by its affinity and the time that its control groups give it; whether they
    have bf16.
    """
    usable, on_linux = device.workers("auto"), sys.platform == "linux"
    limits = [text.split() for text in group_files(system, "cpu.max")]
    quota = min((int(time) / int(period) for time, period in limits if time != "max"), default=usable)
    time = f"time for {quota:g}" if on_linux else "a limit on their time is not known"
    fewer, remedy = max(1, int(quota)), None
    if quota < min(usable, int(os.environ.get("OMP_NUM_THREADS", usable))):
        remedy = f"threads wait: export OMP_NUM_THREADS={fewer}, and set runtime.workers: {fewer} in params.yaml"
    yield Finding("cores", "note" if remedy else "ok", f"{usable} of {os.cpu_count()} usable, {time}", remedy)
    fast = "in hardware" if device.has_fast_bf16() else "would be emulated, slowly: the CPU computes in fp32"
    yield Finding("bf16", "ok", fast if on_linux else "not known on this system")


def group_files(system: Path, name: str) -> list[str]:
    """A file of the control groups (version 2) that this process is in, innermost first, where they have it."""
    own, groups = system / "proc/self/cgroup", system / "sys/fs/cgroup"
    lines = own.read_text().splitlines() if own.exists() else []
    place = groups / next((line[3:] for line in lines if line.startswith("0::")), "/").strip("/")
    files = [folder / name for folder in (place, *place.parents) if folder.is_relative_to(groups)]
    return [file.read_text().strip() for file in files if file.is_file()]


def memory(system: Path) -> list[Finding]:
    """Memory of the machine or of its control group, and what of it a run may take."""
    import torch

    room, names = psutil.virtual_memory().available, ("memory.max", "memory.current", "memory.stat")
    for most, held, stat in zip(*(group_files(system, name) for name in names)):  # the outermost group has stat alone
        cached = re.search(r"^inactive_file (\d+)$", stat, re.MULTILINE)  # files' pages: given back when it runs short
        if most != "max":
            room = min(room, max(0, int(most) - int(held) + int(cached[1] if cached else 0)))
    found = f"{amount(device.total_memory(torch.device('cpu')))}, {amount(room)} of it available"
    remedy = "end other programs, or take a smaller model: python -m pipeline.tools.plan says what each one holds"
    return [Finding("memory", "ok", found) if room >= MEMORY_BYTES else Finding("memory", "note", found, remedy)]


def gpus(system: Path) -> list[Finding]:
    """The GPUs that torch sees; a note where there is NVIDIA's driver and torch sees none."""
    import torch

    count, chosen = device.num_gpus(), device.describe()
    if count:
        sizes = ", ".join(amount(device.total_memory(torch.device("cuda", index))) for index in range(count))
        return [Finding("GPU", "ok", f"{count}: {chosen['device']}, {chosen['precision']}; memory: {sizes}")]
    if not (system / "proc/driver/nvidia/version").exists():
        return [Finding("GPU", "ok", f"none for CUDA: stages run on {chosen['device']}")]
    found = f"NVIDIA's driver is loaded, but torch {chosen['torch']} sees no GPU"
    return [Finding("GPU", "note", found, "nvidia-smi lists them; install the CUDA build of the same version of torch")]


def amount(size: float) -> str:
    """Bytes for a person."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def disk(root: Path) -> Iterator[Finding]:
    """Free space where outs, states and the cache go."""
    collect = "dvc gc --workspace --all-experiments --dry says what of the cache no experiment needs"
    places = {
        "tree": (root, collect),
        "work folder": (
            workdir.root(),
            "python -m pipeline.run.workdir prune, or let STAGECOACH_WORK name another disk",
        ),
        "DVC cache": (cache_folder(root), f"{collect}; or dvc cache dir --local FOLDER on another disk"),
    }
    for subject, (folder, remedy) in places.items():
        free = shutil.disk_usage(standing(folder)).free
        state = "problem" if free < PROBLEM_BYTES else "note" if free < NOTE_BYTES else "ok"
        yield Finding(subject, state, f"{amount(free)} free in {folder.resolve()}", None if state == "ok" else remedy)


def standing(path: Path) -> Path:
    """The path, or the innermost folder above it that exists."""
    return next(place for place in (path.resolve(), *path.resolve().parents) if place.exists())


def dvc_options(root: Path) -> dict[str, str]:
    """`section.key` -> value of `.dvc/config` with `config.local` over it. Raises configparser.Error."""
    parser = configparser.ConfigParser(interpolation=None, strict=False, inline_comment_prefixes=("#",))
    for path in filter(Path.exists, (root / ".dvc/config", root / ".dvc/config.local")):
        parser.read_string(path.read_text(encoding="utf-8"), str(path))
    return {f"{name}.{key}": value.strip("\"'") for name in parser.sections() for key, value in parser[name].items()}


def cache_folder(root: Path) -> Path:
    """Where DVC keeps its cache."""
    return root / ".dvc" / Path(dvc_options(root).get("cache.dir", "cache")).expanduser()


def cache_links(root: Path) -> list[Finding]:
    """How a file of the cache comes into the working tree: which ways work is tried with a file of our own."""
    works, folder, cache = ["copy"], tempfile.TemporaryDirectory, standing(cache_folder(root))
    with folder(prefix=".doctor-", dir=cache) as here, folder(prefix=".doctor-", dir=root) as there:
        (source := Path(here) / "file").write_bytes(b"stagecoach")
        for kind, link in {"reflink": reflink, "hardlink": os.link, "symlink": os.symlink}.items():
            with contextlib.suppress(OSError):
                link(source, Path(there) / kind)
                works.append(kind)
    asked = [kind.strip() for kind in dvc_options(root).get("cache.type", "reflink,copy").split(",")]
    chosen = next((kind for kind in asked if kind in works), None)
    found = f"{chosen or 'none'} (cache.type: {', '.join(asked)}; works here: {', '.join(works)})"
    if chosen not in (None, "copy"):
        return [Finding("cache links", "ok", found)]
    move = "every out takes twice its size: put the cache on the working tree's disk, dvc cache dir --local FOLDER"
    remedy = "dvc config cache.type reflink,hardlink,copy" if "hardlink" in works or chosen is None else move
    return [Finding("cache links", "note" if chosen else "problem", found, remedy)]


def reflink(source: Path, target: Path) -> None:
    """A second file over the same blocks. Raises OSError where that cannot be had; on macOS always, though DVC has
    it there.
    """
    with source.open("rb") as old, target.open("wb") as new:
        fcntl.ioctl(new, 0x40049409, old.fileno())  # FICLONE of linux/fs.h


def rwlock(root: Path) -> Iterator[Finding]:
    """Who holds files for DVC, by `.dvc/tmp/rwlock`: an entry of a killed command can name another program's pid by
    now.
    """
    path = root / ".dvc/tmp/rwlock"
    remedy = f"when no dvc command runs: rm {path}"
    try:
        lock = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        entries = [*lock.get("write", {}).values(), *(each for all_ in lock.get("read", {}).values() for each in all_)]
        holders = {int(entry["pid"]): str(entry["cmd"]) for entry in entries}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        yield Finding("DVC rwlock", "problem", f"damaged, and dvc commands stop at it: {error}", remedy)
        return
    yield Finding("DVC rwlock", "ok", f"processes named as holders: {len(holders)}")
    for pid, command in holders.items():
        if not psutil.pid_exists(pid):
            yield Finding("DVC rwlock", "note", f"left by process {pid}, which is gone: {command}", remedy)
        elif is_another(pid, command, path.stat().st_mtime):
            found = f"left by `{command}`; its pid {pid} is another program now, and dvc commands stop at it"
            yield Finding("DVC rwlock", "problem", found, remedy)
        else:
            yield Finding("DVC rwlock", "ok", f"process {pid} runs: {command}")


def is_another(pid: int, command: str, written: float) -> bool:
    """Whether a pid is not the process that wrote `command` into the lock: it began later, or runs something else."""
    process = psutil.Process(pid)
    programs = ("dvc", Path(command.split(" ")[0]).name)
    is_known = any(Path(word).name in programs for word in process.cmdline())
    return not is_known or process.create_time() > written + 2  # the two clocks differ by parts of a second


def dvc_lock(root: Path) -> list[Finding]:
    """Whether a dvc command holds the repository; the file alone, which DVC never removes, says nothing."""
    path = root / ".dvc/tmp/lock"
    pid = path.read_text().strip() if path.exists() and is_held(path) else None
    if pid is None or not pid.isdecimal() or psutil.pid_exists(int(pid)):
        return [Finding("DVC lock", "ok", "free" if pid is None else f"a dvc command runs (process {pid})")]
    found = f"process {pid} took it and is gone, but a child of it holds it: dvc commands stop at it"
    return [Finding("DVC lock", "problem", found, f"fuser -v {path} names the holder: end it")]


def is_held(lock: Path) -> bool:
    """Whether a process holds a flock on the file."""
    with lock.open() as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    return True


def unfinished(_root: Path) -> Iterator[Finding]:
    """Keys of the work directory that run now, and those that were begun and are held by nobody."""
    idle = {}
    for lock in sorted(workdir.root().glob("*/*/lock")):
        key, name = lock.parent, f"{lock.parent.parent.name}/{lock.parent.name}"
        if is_held(lock):
            yield Finding("work", "ok", f"running: {name} (process {lock.read_text().strip() or 'not known'})")
        elif not (key / "finished.json").exists() and {path.name for path in key.iterdir()} - {"lock", "speed.json"}:
            idle[name] = sum(path.stat().st_size for path in key.rglob("*") if path.is_file())
    found = f"{len(idle)} unfinished, {amount(sum(idle.values()))} {', '.join([*idle][:3])}" + ", ..." * (len(idle) > 3)
    remedy = "the same dvc repro resumes what it still needs; python -m pipeline.run.workdir prune removes all of it"
    yield Finding("work", "note" if idle else "ok", found, remedy if idle else None)


def leftovers(root: Path) -> list[Finding]:
    """Parts beside the outs of dvc.yaml, and in the work directory, whose writer is dead."""
    stages = yaml.safe_load((root / "dvc.yaml").read_text(encoding="utf-8"))["stages"].values()
    entries = [entry for stage in stages for kind in ("outs", "metrics", "plots") for entry in stage.get(kind, ())]
    outs = [root / (next(iter(entry)) if isinstance(entry, dict) else entry) for entry in entries]
    parts = [
        path for folder in sorted({out.parent for out in outs} | {workdir.root()}) for path in folder.glob(".*.part")
    ]
    writers = {path: name[1] for path in sorted(parts) if (name := LEFTOVER.fullmatch(path.name))}
    dead = [str(path) for path, pid in writers.items() if not psutil.pid_exists(int(pid))]
    remedy = f"rm -r {shlex.join(dead)}" if dead else None
    return [Finding("leftovers", "note" if dead else "ok", f"{len(dead)} parts of dead processes", remedy)]


def sandbox(root: Path) -> Iterator[Finding]:
    """Whether there is a sandbox for generated code here, proved by a server."""
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
        yield Finding("sandbox", "ok", "profile sealed holds generated code")
    except (ConfigError, servers.HarnessError, OSError) as error:
        state = "note" if config.allow_unsafe else "problem"
        yield Finding("sandbox", state, f"profile sealed cannot be had: {error}", servers.NO_SANDBOX)
    finally:
        server.stop()


def packages(root: Path) -> Iterator[Finding]:
    """Python and the packages against pyproject.toml: the ranges of what is needed, and which extras are there."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    python, asked = platform.python_version(), project["requires-python"]
    if not SpecifierSet(asked).contains(python, prereleases=True):
        remedy = "install one that fits; then make clean && make PYTHON=<its command>"
        yield Finding("packages", "problem", f"Python is {python}, pyproject.toml asks for {asked}", remedy)
    needed = [Requirement(text) for text in project["dependencies"]]
    faults = {requirement: fault for requirement in needed if (fault := lack(requirement))}
    for requirement, fault in faults.items():
        yield Finding("packages", "problem", fault, f"python -m pip install '{requirement}'")
    fit = [requirement.name for requirement in needed if requirement not in faults]
    shown = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in NAMED if name in fit)
    found = f"Python {python}; {len(fit)} of {len(needed)} packages within pyproject.toml's ranges: {shown}"
    yield Finding("packages", "ok", found)
    for extra, texts in project.get("optional-dependencies", {}).items():
        if extra in EXTRAS:
            lacking = next((fault for text in texts if (fault := lack(Requirement(text)))), None)
            state = f"absent ({lacking}); python -m pip install -e '.[{extra}]'" if lacking else "present"
            yield Finding("extra", "ok", f"{extra} ({EXTRAS[extra]}): {state}")


def lack(requirement: Requirement) -> str | None:
    """What is wrong with the installed version of a package; None where it fits."""
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{requirement.name} is not installed"
    fits = requirement.specifier.contains(version, prereleases=True)
    return None if fits else f"{requirement.name} is {version}, pyproject.toml asks for {requirement.specifier}"


def checkout(root: Path) -> Iterator[Finding]:
    """This is a DVC repository in a git checkout, and there is git."""
    place = root.resolve()
    for name in (".dvc", "dvc.yaml"):
        if not (root / name).exists():
            yield Finding("checkout", "problem", f"no {name} in {place}", f"run where it is, or git checkout {name}")
    if shutil.which("git") is None:
        yield Finding("checkout", "problem", "git is not installed: DVC needs it", "apt install git")
    elif any((folder / ".git").exists() for folder in (place, *place.parents)):
        yield Finding("checkout", "ok", "git is installed, and this is a checkout")
    else:
        remedy = "git clone the project; or, to go on without experiments, dvc config --local core.no_scm true"
        yield Finding("checkout", "note", "this is no git checkout: dvc exp needs one", remedy)


def switches(root: Path) -> Iterator[Finding]:
    """What must be off in DVC's settings is."""
    options = dvc_options(root)
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
            Finding("parameters", "problem", str(error), "mend that; python -m pipeline.run.config names every fault")
        ]
    return [Finding("parameters", "ok", f"those of {len(names)} stages resolve")]


def remote(root: Path) -> list[Finding]:
    """Where `dvc push` goes."""
    options = dvc_options(root)
    name = options.get("core.remote")
    url = options.get(f"'remote \"{name}\"'.url")
    if url is None:
        found = f"no url for core.remote ({name or 'none'}): dvc push and pull go nowhere"
        return [Finding("remote", "note", found, f"dvc remote add --default {name or 'store'} FOLDER")]
    if "://" in url:
        return [Finding("remote", "ok", f"{name}: {without_password(url)} (not contacted)")]
    folder = (root / ".dvc" / Path(url).expanduser()).resolve()
    remedy = None if folder.is_dir() else "it is not there yet: dvc push makes it"
    return [Finding("remote", "note" if remedy else "ok", f"{name}: {folder}", remedy)]


def main(argv: list[str]) -> int:
    """Print the findings; 1 where one of them is a problem."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.tools.doctor", description="Check machine and checkout.")
    parser.parse_args(argv)
    states = []
    for finding in examine(Path()):
        sys.stdout.write(f"{finding.render()}\n")
        states.append(finding.state)
    sys.stdout.write(f"\nproblems: {states.count('problem')}, notes: {states.count('note')}\n")
    return StagecoachError.exit_code if "problem" in states else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
