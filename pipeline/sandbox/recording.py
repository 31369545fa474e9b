"""Records what a repository's functions return in its own tests, by running `recorder.py` on a copy.

    record(root, files, paths, functions, seconds) -> Recording

The copy has every regular file except hidden ones and links, up to MOST_BYTES; tests that delete files affect only the
copy. The process is killed after `seconds`; everything recorded by then is kept. Each test makes the same calls on
every machine, but which tests pass varies: those that need the network, a missing package or a C extension fail.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipeline.run.errors import DataError
from pipeline.sandbox.servers import NoSandboxError

RECORDER = Path(__file__).with_name("recorder.py")
MOST_BYTES = 1 << 30  # per copy
FOUND = ".stagecoach-calls.json"
SKIPPED = ("node_modules", "__pycache__")
TAIL = 1000  # characters of process output to show in an error


@dataclass(frozen=True)
class Recording:
    """The recorded tests and calls."""

    tests: dict[str, int]  # passed, failed, skipped, not collected
    calls: dict[str, list[tuple[str, str, str]]]  # file::function -> (arguments, keyword arguments, result), literals
    timed_out: bool
    said: str  # the end of the tests' output


def record(
    root: Path, files: Sequence[str], paths: Sequence[str], functions: Mapping[str, Sequence[str]], seconds: float
) -> Recording:
    """Run the tests below `root` and record calls.

    `files`: its Python files; `paths`: folders from which its modules are imported; `functions`: file -> names to
    record. Raises DataError with the reason if nothing was recorded, NoSandboxError without Landlock.
    """
    with (
        tempfile.TemporaryDirectory(prefix="stagecoach-record-", ignore_cleanup_errors=True) as scratch,
        tempfile.TemporaryFile() as output,  # not a pipe: a process that a test left behind would keep it open
    ):
        folder = Path(scratch) / root.resolve().name
        _copy(root, folder)
        task = {
            "folder": str(folder),
            "paths": [str(folder / path) for path in paths],
            "functions": functions,
            "files": list(files),
            "out": FOUND,
            "parent": os.getpid(),
        }
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}"
        kept = {"PATH": path, "HOME": scratch, "TMPDIR": str(folder), "LANG": "C.UTF-8"}
        process = subprocess.Popen(
            [sys.executable, "-P", "-B", str(RECORDER)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=kept | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            start_new_session=True,
        )
        timed_out = False
        try:
            process.communicate(json.dumps(task).encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _end(process, Path(scratch))
        output.seek(0, os.SEEK_END)
        output.seek(max(0, output.tell() - 4 * TAIL))
        said = output.read().decode("utf-8", "replace").strip()[-TAIL:]
        found = folder / FOUND
        if not found.is_file():
            if "Landlock" in said:
                raise NoSandboxError(f"the tests of {root} cannot run: this kernel has no Landlock (new in Linux 5.13)")
            reason = f"they took more than {seconds:g} seconds" if timed_out else said or "no output"
            raise DataError(f"{root}: its tests could not be run: {reason}")
        row = json.loads(found.read_text(encoding="utf-8"))
    calls = {key: [(args, kwargs, result) for args, kwargs, result in seen] for key, seen in row["calls"].items()}
    return Recording(row["tests"], calls, timed_out, said)


def _end(process: subprocess.Popen[bytes], scratch: Path) -> None:
    """Kill the process and whatever its tests left running: any process whose working directory is in the copy."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for left in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if Path(left.cwd()).is_relative_to(scratch):
                left.kill()


def _copy(root: Path, folder: Path) -> None:
    """Copy the regular files. Raises DataError if there are too many bytes."""
    left = MOST_BYTES

    def ignored(directory: str, names: list[str]) -> list[str]:
        nonlocal left
        leave = []
        for name in names:
            path = Path(directory, name)
            if name.startswith(".") or name in SKIPPED or path.is_symlink() or not (path.is_file() or path.is_dir()):
                leave.append(name)
            elif path.is_file():
                left -= path.stat().st_size
                if left < 0:
                    raise DataError(f"{root}: has more than {MOST_BYTES >> 20} MiB; name one of its folders instead")
        return leave

    shutil.copytree(root, folder, ignore=ignored)
