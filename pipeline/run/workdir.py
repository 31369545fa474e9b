"""The work directory: checkpoints and finished artifacts, keyed by what they are computed from.

    $DVC_ROOT/.work/<stage>[@item]/<key>/
        lock            flock: a second run of the same key waits, then exports
        parts/          resumable pieces of data stages
        step-00000400/  checkpoints of training stages (learning/states.py)
        out/            what is published; complete once finished.json exists
        finished.json   sizes and sha256 of everything in out/
        family          a key that ignores the length of the run: a longer run can continue from a checkpoint here

    python -m pipeline.run.workdir prune           remove unfinished work not in use, and checkpoints of finished runs
    ... prune --finished                           also remove finished work: DVC's cache has what was published

key = 16 hex digits of the sha256 of the canonical JSON of [format, stage, item, seed, resolved parameters, digest of
each input, code closure]. Device, dtype, process and worker counts are not part of it: they do not affect any
guaranteed result. STAGECOACH_WORK selects a different directory.

Publishing creates hard links (copies across file systems) in `.<name>.<pid>.part` next to the target, then moves the
old target away and renames the new one into place. We never write to a published file, so links into the DVC cache
stay intact. Not handled: different keys that publish the same out concurrently (DVC's own lock prevents that).
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pipeline.run import device
from pipeline.run.config import Runtime
from pipeline.run.errors import ConfigError, StagecoachError
from pipeline.run.tracking import Tracker, say
from pipeline.run.types import JsonObject

T = TypeVar("T")
FORMAT = 1
KEEP_NEWEST, KEEP_SECONDS = 4, 30 * 24 * 3600
KEPT, FAMILY = "kept.json", "family"  # files of a key: checkpoints that outlive the run, and `Job.family`
COMPUTING = ("numpy", "safetensors", "tokenizers", "torch")  # packages that may change a result


class Stopped(SystemExit):
    """A signal stopped the stage outside the training loop, so nothing was saved; the exit code is 128 + signal."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.status, self.name = 128 + number, signal.Signals(number).name


class StopRequest:
    """Handles SIGTERM and SIGINT in a training stage.

    While a model is being built, data loaded or a result written, the first signal raises Stopped: only work since the
    last checkpoint is lost. Within `heeded` it sets a flag that the training loop checks at every step. A second signal
    ends the process immediately.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._heeded = False

    def install(self) -> None:
        """Handle both signals in this process."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """For a loop that checks `signal` and saves before it exits. Raises Stopped after the loop for a signal that
        the loop missed.
        """
        self._heeded = True
        try:
            yield
        finally:
            self._heeded = False
        if self.signal:
            raise Stopped(self.signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        if self.signal:
            os._exit(128 + number)
        self.signal = number
        if not self._heeded:
            raise Stopped(number)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of a stage."""

    stage: str
    item: str | None
    key: str
    seed: int  # for training, or data_seed for a stage that generates data or evaluates
    folder: Path  # the keyed work folder; resumable parts go into folder / "parts"
    workers: int
    runtime: Runtime
    tracker: Tracker
    lineage: JsonObject
    stop: StopRequest
    family: str = ""  # a key that ignores settings for run length; empty if they affect anything else

    @property
    def name(self) -> str:
        """`language`, or `encode@text` for an item of a matrix."""
        return f"{self.stage}@{self.item}" if self.item else self.stage

    def report(self, **numbers: object) -> None:
        """Add final numbers to metrics/<stage>.json."""
        self.tracker.report(**numbers)

    def register(self, folder: Path, **tags: str) -> None:
        """Register the contents of `folder` with MLflow as a model version, once the run has succeeded."""
        self.tracker.register(folder, **tags)


def versions() -> dict[str, str]:
    """Versions of the packages that affect results, and the hash of the lock file. Not part of any key, so a new
    version invalidates nothing.
    """
    installed = {name: importlib.metadata.version(name) for name in COMPUTING}
    lock = Path("requirements.lock")
    return installed | ({"requirements.lock": sha256(lock)[:16]} if lock.is_file() else {})


def root() -> Path:
    """The path of `.work`, next to dvc.yaml in the main checkout, even in a temporary copy made by `dvc exp run`."""
    return Path(os.environ.get("STAGECOACH_WORK") or Path(os.environ.get("DVC_ROOT", ".")) / ".work").resolve()


def canonical(value: object) -> str:
    """JSON with sorted keys and no spaces, so that equal values give equal strings."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def canonical_hash(value: object) -> str:
    """The first 16 hex digits of the sha256 of the canonical JSON."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:16]


def sha256(path: Path) -> str:
    """The sha256 of a file's contents, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_key(
    *, stage: str, item: str | None, seed: int, parameters: JsonObject, inputs: dict[str, str], code: dict[str, str]
) -> str:
    """The 16 hex digits that identify everything a run is computed from."""
    return canonical_hash([FORMAT, stage, item, seed, parameters, inputs, code])


def digest(path: Path) -> str:
    """A hash of a file, or of all relative paths and contents below a folder; cached by size, mtime and inode."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    cache = JsonCache("digests.json", 20_000)
    lines = [
        f"{f.relative_to(path) if f != path else ''} {cache.get(_file_state(f), partial(sha256, f))}" for f in files
    ]
    cache.save()
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _file_state(path: Path) -> str:
    """A file's path, size, mtime and inode, so that large unchanged files are not reread."""
    stat = path.stat()
    return f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}"


class JsonCache:
    """Cached results, as JSON in `.work/<name>`: the newest `max_entries`. A corrupt file counts as empty."""

    def __init__(self, name: str, max_entries: int) -> None:
        self.path, self.max_entries = root() / name, max_entries
        self.changed = False
        try:
            self.entries: dict[str, Any] = dict(json.loads(self.path.read_text()))
        except (OSError, ValueError, TypeError):
            self.entries = {}

    def get(self, key: str, compute: Callable[[], T]) -> T:
        """The result of `compute`, from the cache if the key is in it."""
        if key not in self.entries:
            self.entries[key] = compute()
            self.changed = True
        return self.entries[key]

    def save(self) -> None:
        """Write the file atomically if there are new entries; do nothing if the folder is not writable."""
        if not self.changed:
            return
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(dict(list(self.entries.items())[-self.max_entries :])))


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that readers see either the old or the new version, even after a crash."""
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """fsync a directory, so that a rename in it survives a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def need_space(folder: Path, num_bytes: int) -> None:
    """Raise StagecoachError if the file system of `folder` has less than `num_bytes` free."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise StagecoachError(
            f"{folder}: no space: {num_bytes / 1e6:,.1f} MB needed, {free / 1e6:,.1f} MB free. Nothing was written; "
            "free some space (python -m pipeline.run.workdir prune removes unfinished work), then rerun to resume."
        )


def need_writable(*targets: Path) -> None:
    """Raise ConfigError if a target cannot be published; call it before doing the work."""
    for target in targets:
        folder = next(folder for folder in target.absolute().parents if folder.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            what = "is not writable" if folder.is_dir() else "is not a folder"
            raise ConfigError(
                f"{target}: {folder} {what}; nothing was computed. Make it a writable folder (see ls -ld) and rerun"
            )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait for the key's flock and hold it; report the holder's pid every minute. The descriptor survives `execv`.

    Raises StagecoachError in a training process whose key differs from the one its launcher has locked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    locked_folder = os.environ.get("STAGECOACH_LOCKED", str(folder))
    if locked_folder != str(folder):
        raise StagecoachError(
            f"the stage was started for key {Path(locked_folder).name}, but its key is now {folder.name}: an input, a"
            " parameter or the code changed in the meantime; run it again"
        )
    if "STAGECOACH_LOCKED" in os.environ or device.rank() > 0:  # the launcher holds the lock, or rank 0 does
        yield
        return
    with (folder / "lock").open("a+") as file:
        num_tries = 0
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                if num_tries % 600 == 0:
                    file.seek(0)
                    say(
                        f"{folder.parent.name}: waiting for process {file.read().strip() or '?'}, which is running"
                        " the same key"
                    )
                num_tries += 1
                time.sleep(0.1)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        os.set_inheritable(file.fileno(), True)
        yield


def is_finished(folder: Path) -> bool:
    """Whether out/ is complete and every file in it has the recorded size and sha256."""
    try:
        recorded = json.loads((folder / "finished.json").read_text())
    except (OSError, ValueError):
        return False
    for name, (size, hash_) in recorded.items():
        path = folder / "out" / name
        if not path.is_file() or path.stat().st_size != size or sha256(path) != hash_:
            say(f"{folder}: {name} was changed after it was finished; recomputing")
            return False
    return True


def mark_finished(folder: Path) -> None:
    """Record every file in out/; from now on a rerun only exports."""
    out = folder / "out"
    files = sorted(p for p in out.rglob("*") if p.is_file())
    write_atomically(
        folder / "finished.json", json.dumps({str(p.relative_to(out)): [p.stat().st_size, sha256(p)] for p in files})
    )


def drop_states(folder: Path) -> None:
    """Remove what only an unfinished run needs: parts, and checkpoints except those kept (KEPT) for a longer run."""
    for entry in (*folder.glob("step-*"), folder / "parts"):
        if entry.name not in kept_states(folder):
            remove(entry)


def kept_states(folder: Path) -> list[str]:
    """The checkpoints that are kept after the run has finished."""
    path = folder / KEPT
    return json.loads(path.read_text()) if path.is_file() else []


def back_to(folder: Path, step: int) -> None:
    """Remove checkpoints after `step`, and the result if finished. Raises ConfigError if `step` has no checkpoint."""
    steps = sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-????????"))
    if step not in steps:
        listed = ", ".join(map(str, steps)) or "none"
        raise ConfigError(
            f"--resume {step}: this run has no such checkpoint; {folder} has checkpoints for steps: {listed}."
            " Without --resume the run resumes from the last one; runtime.fresh=true starts over"
        )
    remove(folder / "finished.json")
    for late in steps:
        if late > step:
            remove(folder / f"step-{late:08d}")


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Take a key's lock if it is free, and yield whether it was: if so, nothing in the key changes inside the block."""
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            yield False
        else:
            yield True


def relatives(folder: Path, family: str) -> list[Path]:
    """The work folders of runs that differ from the one in `folder` only in their length."""
    marks = sorted(folder.parent.glob(f"*/{FAMILY}"))
    return [mark.parent for mark in marks if mark.parent != folder and mark.read_text() == family]


def publish(source: Path, target: Path) -> None:
    """Replace `target` with a finished file or folder, all or nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(target)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    if source.is_dir():
        shutil.copytree(source, part, copy_function=link_or_copy)
        part.chmod(0o755)
    else:
        link_or_copy(str(source), str(part))
    old = target.with_name(f".{target.name}.{os.getpid()}.old.part")
    if target.exists() or target.is_symlink():
        target.rename(old)
    part.rename(target)
    remove(old)


def link_or_copy(source: str, target: str) -> str:
    """Make `target` a hard link to `source`, or a copy if that fails; for `shutil.copytree`."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)
    return target


def remove(path: Path) -> None:
    """Delete a file, a link, or a folder and its contents; do nothing if it does not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _clear_leftovers(target: Path) -> None:
    """Remove `.part`s left by dead processes next to the target."""
    for leftover in target.parent.glob(f".{target.name}.*.part"):
        pid = leftover.name[len(target.name) + 2 :].split(".")[0]
        if pid.isdecimal() and not _is_alive(int(pid)):
            remove(leftover)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def start_over(folder: Path) -> None:
    """Empty a key's folder (`runtime.fresh: true`), except for its lock."""
    for entry in folder.iterdir():
        if entry.name != "lock":
            remove(entry)


def prune_finished(stage_folder: Path, current: str) -> None:
    """Empty the stage's finished keys over 30 days old, but keep the newest 4, the current one, and each speed.json."""
    finished = sorted(stage_folder.glob("*/finished.json"), key=lambda p: p.stat().st_mtime, reverse=True)
    for mark in finished[KEEP_NEWEST:]:
        if mark.parent.name != current and time.time() - mark.stat().st_mtime > KEEP_SECONDS:
            for entry in mark.parent.iterdir():
                if entry.name not in ("speed.json", "lock"):
                    remove(entry)


def prune(*, finished: bool = False) -> Iterator[tuple[Path, int]]:
    """Remove every key that is neither finished nor locked by a live process, and the checkpoints that finished runs
    kept for longer ones; with `finished`, also everything in finished runs except speed.json. Yields what was removed
    and the bytes freed: zero for files with other links, as in models/ or DVC's cache.
    """
    for lock in sorted(root().glob("*/*/lock")):
        with held(lock.parent) as is_held:
            if not is_held:
                continue
            done = (lock.parent / "finished.json").is_file()
            doomed = [lock.parent] if not done else sorted(lock.parent.glob("step-*"))
            if done and finished:
                doomed = [entry for entry in lock.parent.iterdir() if entry.name not in ("speed.json", "lock")]
                doomed.sort(key=lambda entry: entry.name != "finished.json")  # first: a half-removed key is unfinished
            for path in doomed:
                num_bytes = freed_by_removing(path)
                remove(path)
                yield path, num_bytes


def freed_by_removing(path: Path) -> int:
    """Bytes of disk space freed by removing a file or folder."""
    files = [path] if not path.is_dir() else [file for file in path.rglob("*") if file.is_file()]
    status = [file.lstat() for file in files]
    return sum(512 * one.st_blocks for one in status if one.st_nlink == 1)


def main() -> int:
    """Command line of `python -m pipeline.run.workdir`."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.run.workdir", description="Clean up the work directory.")
    parser.add_argument("command", choices=["prune"], help="prune: remove unfinished work that is not in use")
    parser.add_argument("--finished", action="store_true", help="also remove the work of finished runs")
    arguments = parser.parse_args()
    total = 0
    for path, num_bytes in prune(finished=arguments.finished):
        sys.stdout.write(f"removed {path}: {num_bytes / 1e6:,.1f} MB\n")
        total += num_bytes
    sys.stdout.write(f"{total / 1e6:,.1f} MB freed\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
