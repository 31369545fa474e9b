"""A scratch copy of the repository in which the graph runs at smoke scale, shared by the slow tests of DVC."""

import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.run import codehash

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[1]


def _heed_signals() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Repository:
    """A separate git and DVC repository, with its own cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def copy_of_ours(cls, folder: Path) -> "Repository":
        """A new repository at smoke scale, with our files that git tracks or would add, committed."""
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file() and not name.startswith(("tests/", "build/")) and name != "dvc.lock":
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
        repository = cls(folder)
        repository.edit("params.yaml", "scale: demo", "scale: smoke")
        repository.git("init", "-q", "-b", "main")
        repository.git("config", "user.email", "test@example.org")
        repository.git("config", "user.name", "test")
        repository.git("config", "commit.gpgsign", "false")
        repository.commit("start")
        return repository

    @property
    def environment(self) -> dict[str, str]:
        """The environment of every command in the repository."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("DVC_", "GIT_", "STAGECOACH_", "PYTEST_"))}
        path = f"{Path(sys.executable).parent}:{clean['PATH']}"
        return clean | {"PATH": path, "STAGECOACH_MLFLOW": "off", "DVC_NO_ANALYTICS": "1", "PYTHONPATH": ""}

    def run(self, *command: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the repository, capturing stdout and stderr together."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=1800,
        )
        assert not check or done.returncode == 0, f"{command} -> {done.returncode}\n{done.stdout[-6000:]}"
        return done

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command as the leader of its own process group. It does not ignore SIGINT or SIGHUP, even if the
        tests run under nohup.
        """
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_heed_signals,
        )

    @contextmanager
    def started(self, *command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
        """Start a command; at the end, kill its process group and remove DVC locks that it may have left."""
        process = self.start(*command, **environment)
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            for name in ("rwlock", "lock"):
                (self.folder / ".dvc" / "tmp" / name).unlink(missing_ok=True)

    def git(self, *arguments: str) -> str:
        """A git command's output."""
        return self.run("git", *arguments).stdout

    def commit(self, message: str) -> None:
        """Commit everything."""
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message)

    def dvc(self, *arguments: str, check: bool = True, **environment: str) -> str:
        """A dvc command's output."""
        return self.run("dvc", *arguments, check=check, **environment).stdout

    def repro(self, *arguments: str, **environment: str) -> set[str]:
        """Run `dvc repro`; returns the stages whose commands ran."""
        return ran(self.dvc("repro", *arguments, **environment))

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace the first occurrence of a text in a file."""
        path = self.folder / name
        text = path.read_text()
        assert old in text, f"{name} does not hold {old!r}"
        path.write_text(text.replace(old, new, 1))

    def changed(self) -> set[str]:
        """The stages that `dvc status` reports as changed."""
        import json

        return {name.split(":")[-1] for name in json.loads(self.dvc("status", "--json"))}

    def inputs(self, stage: str) -> dict[str, str]:
        """The digests of everything that a stage was made from, as recorded in its metrics."""
        import json

        return json.loads((self.folder / f"metrics/{stage}.json").read_text())["lineage"]["inputs"]

    def sha(self, model: str) -> str:
        """sha256 of a model's weights."""
        return hashlib.sha256((self.folder / "models" / model / "model.safetensors").read_bytes()).hexdigest()


def copy_of_built(folder: Path, factory: "pytest.TempPathFactory") -> tuple[Repository, str]:
    """A copy of the whole graph as its first `dvc repro` left it, committed, and that command's output.

    The graph is built once for all processes of pytest-xdist: the first to ask builds it (five minutes), the others
    wait. `ran/` next to the copy records which of our functions the stages called (tests/traced).
    """
    base = factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "built"
    shared.mkdir(exist_ok=True)
    printed = shared / "repro.txt"  # exists once the repository next to it is complete
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not printed.exists():
            shutil.rmtree(shared / "repository", ignore_errors=True)
            repository = Repository.copy_of_ours(shared / "repository")
            (shared / "ran").mkdir(exist_ok=True)
            around = ",".join(name.removeprefix("pipeline.").replace(".", "/") for name in codehash.IGNORED)
            output = repository.dvc(
                "repro",
                PYTHONPATH=str(ROOT / "tests/traced"),
                STAGECOACH_TRACED=str(shared / "ran"),
                STAGECOACH_AROUND=around,
            )
            repository.commit("built")
            printed.write_text(output)
    shutil.copytree(shared / "ran", folder.with_name("ran"))
    # `cp -a` keeps the hard links between cache and outs, which `shutil.copytree` does not
    subprocess.run(["cp", "-a", str(shared / "repository"), str(folder)], check=True)
    return Repository(folder), printed.read_text()


def ran(output: str) -> set[str]:
    """The stage names after "Running stage" in dvc's output."""
    return set(re.findall(r"Running stage '([^']+)'", output))
