"""Resumable training checkpoints ("states"), written atomically.

    <work folder>/step-00000400/
        weights.safetensors  optimizer.safetensors  state.json  curve.jsonl
        manifest.json        sizes and sha256 of the other files, written last

`Keeper` saves and resumes a run: it decides which states to retain, which one to resume from, and which weights to
publish. All ranks call its methods together. Rank 0 writes (with FSDP2, each rank writes its own rows); only rank 0
picks the newest valid state.

Files are written to `step-N.part` and fsynced, the manifest last. Then the folder is fsynced and renamed, its parent is
fsynced, and only then are older states deleted. `newest` returns the newest state whose hashes all match, so a damaged
state costs only the steps since the previous one.

Each process writes its own rows of each tensor, and any process can read the rows it needs:

    weights.safetensors                     one process, or DDP: complete tensors
    weights-00001-of-00002.safetensors      FSDP2: rank 1's rows; the manifest has the first row of each tensor

A 2-process run can thus resume with 1 or 8 processes, or with different sharding, and a plain model can load a
checkpoint written by 8 processes. No process ever loads more than it needs.

Not guaranteed: surviving a disk that acknowledges fsync without writing.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeline.learning import processes, update
from pipeline.learning.optim import Optimizers
from pipeline.learning.processes import Ranks
from pipeline.learning.settings import TrainingConfig
from pipeline.learning.update import Averages, Course, LoggingWindow
from pipeline.run import workdir
from pipeline.run.errors import ConfigError, StagecoachError
from pipeline.run.tracking import say
from pipeline.run.types import JsonObject
from pipeline.run.workdir import (
    FAMILY,
    KEPT,
    Job,
    link_or_copy,
    need_space,
    remove,
    sha256,
    sync_folder,
    write_atomically,
)

AVERAGE = "average"  # `<parameter>/average` in the optimizer states
OLD = ".old"  # suffix of a state while it is being replaced
Offsets = dict[str, int]  # tensor -> its first row in a file
Files = dict[str, list[int | str | Offsets]]  # name -> [size, sha256], plus offsets for one rank's rows


class Keeper:
    """The states of one run. `settings` are properties of this process that must match for a bit-exact resume."""

    def __init__(
        self,
        job: Job,
        ranks: Ranks,
        model: nn.Module,
        optimizers: Optimizers,
        averages: Averages | None,
        fingerprint: str,
        settings: JsonObject,
        config: TrainingConfig,
    ) -> None:
        self.job, self.ranks, self.model, self.optimizers, self.averages = job, ranks, model, optimizers, averages
        self.fingerprint, self.settings, self.config = fingerprint, settings, config
        self.free = 0  # the first `free` steps are the same in every longer run
        self.publishes_best = config.validated.publish == "best"
        self.rolls_back = "rollback" in (config.on_nonfinite, config.on_spike)
        if job.runtime.async_save and ranks.sharding:
            raise ConfigError(
                "runtime.async_save is not supported for sharded models (FSDP2), which all processes write together;"
                " set it to false"
            )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")
        self._writing: Future[None] | None = None

    def save(self, course: Course, window: LoggingWindow, extra: JsonObject) -> None:
        """Write a state, then delete all but the `runtime.keep` newest, the best, and rollback candidates.

        With `runtime.async_save` a thread writes a copy; the next save and the end of the run wait for it.
        """
        self.wait()
        optimizer = self.optimizers.state_tensors()
        own = {"window": window.state(), "fingerprint": self.fingerprint, "free": self.free}
        meta = {**vars(course), **self.settings, **own, **extra}
        if self.averages:
            optimizer |= {f"{name}/{AVERAGE}": value for name, value in self.averages.values.items()}
            meta["averaged"] = self.averages.updates
        tensors = {"weights": weights_of(self.model), "optimizer": optimizer}
        if not self.job.runtime.async_save:
            self._write(course.step, tensors, meta, self.job.tracker.rows, self._protected_steps(course))
            self.job.tracker.flush()
        elif self.ranks.rank == 0:
            copies = {kind: {n: t.to("cpu", copy=True) for n, t in named.items()} for kind, named in tensors.items()}
            rows = copy.deepcopy(self.job.tracker.rows)
            self._writing = self._thread.submit(
                self._write, course.step, copies, copy.deepcopy(meta), rows, self._protected_steps(course)
            )

    def _protected_steps(self, course: Course) -> list[int]:
        """The steps whose states must not be deleted."""
        targets = [*(update.rollback_targets(course) if self.rolls_back else []), *([self.free] if self.free else [])]
        if not self.publishes_best:
            return targets
        return [course.best_step, *(update.best_before(course, step) for step in targets), *targets]

    def _write(
        self,
        step: int,
        tensors: dict[str, dict[str, Tensor]],
        meta: JsonObject,
        rows: list[JsonObject],
        protect: list[int],
    ) -> None:
        """Write one state. In a thread only rank 0 works, and no rank waits for another."""
        ranks, folder = self.ranks, self.job.folder
        first, alone = ranks.rank == 0, self.job.runtime.async_save
        part = begin(folder, step, tensors) if first else _part_folder(folder, step)
        if not alone:
            ranks.barrier()
        files = write(part, tensors, ranks.rank, ranks.world) if first or ranks.sharding else {}
        files_by_rank = [files] if alone else ranks.gather(files)
        if first:
            files = {name: facts for rank_files in files_by_rank for name, facts in rank_files.items()}
            complete(part, step, files, meta=meta, curve=rows)
            if self.job.family:
                write_atomically(folder / FAMILY, self.job.family)
            retain(folder, keep=self.job.runtime.keep, protect=protect)
        if not alone:
            ranks.barrier()

    def keep_for_longer_runs(self, course: Course) -> None:
        """Record the states from which a longer run can continue, so that they are kept after this run."""
        if not self.free or course.step < self.free or self.ranks.rank:
            return
        best = update.best_before(course, self.free) if self.publishes_best else -1
        names = [name_of(step) for step in (self.free, best) if step >= 0]
        write_atomically(self.job.folder / KEPT, json.dumps(names))

    def _go_on_from_a_relative(self) -> None:
        """If this run has no state, adopt the newest state of another run whose steps so far are identical."""
        folder, job = self.job.folder, self.job
        relatives = workdir.relatives(folder, job.family) if job.family else []
        if not relatives or job.runtime.fresh or next(folder.glob("step-????????"), None):
            return
        with ExitStack() as locks:  # leave runs of other processes alone
            free = [relative for relative in relatives if locks.enter_context(workdir.held(relative))]
            shared = [found for relative in free for found in self._shared_states(relative)]
            if shared:
                step, path, best = max(shared)
                for name in {name_of(best), path.name} if self.publishes_best and best >= 0 else {path.name}:
                    remove(folder / f"{name}.part")
                    shutil.copytree(path.with_name(name), folder / f"{name}.part", copy_function=link_or_copy)
                    (folder / f"{name}.part").rename(folder / name)
                say(
                    f"{job.name}: continuing from step {step} of run {path.parent.name}, which is identical to this"
                    " one so far"
                )
                return
        why = (
            "the other run's states are gone, or in use by another process"
            if self.free
            else f"the rates of schedule {self.config.schedule} depend on the length (use wsd or constant to continue)"
        )
        say(f"{job.name}: run {relatives[0].name} differs only in length, but this run starts at step 0: {why}")

    def _shared_states(self, relative: Path) -> Iterator[tuple[int, Path, int]]:
        """(step, state, best step) for each state of another run whose steps this run shares."""
        for path in relative.glob("step-????????"):
            meta = {} if fault(path) else read_state(path).meta
            if 0 < meta.get("step", 0) <= min(self.free, meta.get("free", 0)) and self._has_best(path, meta):
                yield meta["step"], path, meta["best_step"]

    def _has_best(self, path: Path, meta: JsonObject) -> bool:
        """Whether the best state named in `meta` is intact, if that state may be published."""
        best = path.with_name(name_of(meta["best_step"])) if meta["best_step"] >= 0 else path
        return not self.publishes_best or not fault(best)

    def wait(self) -> None:
        """Wait until the thread has written its state. Reraises the thread's exception."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
            self.job.tracker.flush()
        if self.job.runtime.async_save:
            self.ranks.barrier()

    def close(self) -> None:
        """Stop the thread after its current state, even if the run has failed."""
        self._thread.shutdown(wait=True)

    def resume(self) -> tuple[Course, LoggingWindow, JsonObject] | None:
        """Load the newest valid state into model, optimizers, averages and tracker. None if there is no state.

        Raises ConfigError for a state that was trained on other data or that some rank cannot see.
        """
        state = self._newest_state()
        if state is None:
            return None
        if state.meta["fingerprint"] != self.fingerprint:
            raise ConfigError(
                f"{state.folder}: this state was trained on other data; set runtime.fresh=true to start over"
            )
        changed = {k: (state.meta.get(k), v) for k, v in self.settings.items() if state.meta.get(k) != v}
        if changed:
            say(
                f"{self.job.name}: this run will not match an uninterrupted run bit for bit, because settings changed:"
                f" {changed}"
            )
        return self._restore(state)

    def _newest_state(self) -> State | None:
        """The newest valid state, the same one on all ranks. Only rank 0 checks the hashes."""
        state = None
        if self.ranks.rank == 0:
            self._go_on_from_a_relative()
            state = newest(self.job.folder)
            last = state.step if state else -1
            drop_after(self.job.folder, last)  # otherwise a damaged state would be taken for the newest
        step = self.ranks.gather(state and state.step)[0]
        if step is None or state is not None:
            return state
        try:
            return read_state(self.job.folder / name_of(step))
        except OSError as error:
            raise ConfigError(
                f"rank {self.ranks.rank} does not see {self.job.folder / name_of(step)}, which rank 0 resumes from: "
                "expected the work directory (STAGECOACH_WORK) on a file system shared by all machines"
            ) from error

    def load(self, step: int) -> tuple[Course, LoggingWindow, JsonObject]:
        """Like `resume`, from the state after `step` batches."""
        self.wait()
        self.job.tracker.back_to(step)
        return self._restore(at(self.job.folder, step))

    def _restore(self, state: State) -> tuple[Course, LoggingWindow, JsonObject]:
        load_weights(self.model, state.weights())
        moments, averages = self._optimizer_tensors(state)
        self.optimizers.load_state_tensors(moments)
        if self.averages:
            self.averages.restore(averages, state.meta["averaged"])
        self.job.tracker.restore(state.curve)
        course = Course(**{k: v for k, v in state.meta.items() if k in vars(Course())})
        return course, LoggingWindow.of(state.meta["window"]), state.meta

    def _optimizer_tensors(self, state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The optimizer states and the averaged weights by name, both with only this rank's rows."""
        stored, parameters = state.optimizer(), dict(self.model.named_parameters())
        tensors = {name: stored.like(name, parameters[name.rpartition("/")[0]]) for name in sorted(stored.names())}
        suffix = f"/{AVERAGE}"
        averages = {name.removesuffix(suffix): tensor for name, tensor in tensors.items() if name.endswith(suffix)}
        return {name: tensor for name, tensor in tensors.items() if not name.endswith(suffix)}, averages

    def forget_after(self, step: int) -> None:
        """Delete the states of later steps, invalidated by a rollback."""
        self.wait()
        self.ranks.barrier()
        if self.ranks.rank == 0:
            drop_after(self.job.folder, step)
        self.ranks.barrier()

    def load_weights(self, step: int) -> None:
        """Load the weights of the state at `step` into the model: the averaged weights if there are any."""
        self.wait()
        state = at(
            self.job.folder,
            step,
            remedy=(
                "the best weights are lost: publish the last ones "
                f"({self.job.stage}.publish=last), or start over (runtime.fresh=true)"
            ),
        )
        if self.averages:
            self.averages.restore(self._optimizer_tensors(state)[1], self.averages.updates)
            self.averages.load()
        else:
            load_weights(self.model, state.weights())


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name, one per storage (a tied head is the embedding)."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@torch.no_grad()
def load_weights(model: nn.Module, weights: StoredTensors) -> None:
    """Copy the weights of a state into the model, on each rank only its own rows. All names must match."""
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.names(), sorted(parameters.keys() ^ weights.names())
    for name, parameter in parameters.items():
        parameter.copy_(weights.like(name, parameter))


# -- states on disk ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """A state on disk from which a run can resume."""

    step: int  # completed batches
    folder: Path
    meta: JsonObject
    curve: list[JsonObject]

    def weights(self) -> StoredTensors:
        """Model parameters by name."""
        return StoredTensors(self.folder, "weights")

    def optimizer(self) -> StoredTensors:
        """`<parameter>/<state>` -> tensor."""
        return StoredTensors(self.folder, "optimizer")


def name_of(step: int) -> str:
    """The folder of the state after `step` batches."""
    return f"step-{step:08d}"


def save(
    folder: Path,
    step: int,
    *,
    weights: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    meta: JsonObject,
    curve: list[JsonObject],
) -> Path:
    """Write a state whose tensors are all in one process. Raises StagecoachError like `begin`."""
    tensors = {"weights": weights, "optimizer": optimizer}
    part = begin(folder, step, tensors)
    return complete(part, step, write(part, tensors), meta=meta, curve=curve)


def begin(folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]]) -> Path:
    """Create an empty folder for a state of these tensors, which may be sharded.

    Raises StagecoachError if free disk space is less than 1.2 times the state's size.
    """
    need = sum(t.numel() * t.element_size() for kind in tensors.values() for t in kind.values())
    need_space(folder, int(1.2 * need) + 1_000_000)
    part = _part_folder(folder, step)
    remove(part)
    part.mkdir(parents=True)
    return part


def _part_folder(folder: Path, step: int) -> Path:
    """The folder of an incomplete state."""
    return folder / f"{name_of(step)}.part"


def write(part: Path, tensors: Mapping[str, Mapping[str, Tensor]], rank: int = 0, world: int = 1) -> Files:
    """Write this rank's rows of each kind of tensor. Returns the manifest's entries for its files."""
    sharded = any(processes.is_sharded(t) for kind in tensors.values() for t in kind.values())
    files: Files = {}
    for kind, named in tensors.items():
        path = part / _file_name(kind, rank, world, sharded=sharded)
        offsets = _write_rows(path, named, first=rank == 0)
        _sync_file(path)
        files[path.name] = [path.stat().st_size, sha256(path), *([offsets] if sharded else [])]
    return files


def complete(part: Path, step: int, files: Files, *, meta: JsonObject, curve: list[JsonObject]) -> Path:
    """Add metadata and the manifest to a folder with the tensors of `files`, and rename it to its final name."""
    (part / "state.json").write_text(json.dumps({"step": step, **meta}, sort_keys=True))
    (part / "curve.jsonl").write_text("".join(json.dumps(row) + "\n" for row in curve))
    for path in (part / "state.json", part / "curve.jsonl"):
        _sync_file(path)
        files = files | {path.name: [path.stat().st_size, sha256(path)]}
    manifest = part / "manifest.json"
    manifest.write_text(json.dumps(files, sort_keys=True))
    _sync_file(manifest)
    sync_folder(part)
    target = part.with_name(name_of(step))
    old = target.with_suffix(OLD)
    if target.exists():  # a state of the same step, valid until the new one is renamed
        remove(old)
        target.rename(old)
    part.rename(target)
    sync_folder(part.parent)
    remove(old)
    return target


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def fault(folder: Path) -> str:
    """The first fault in a state's files; empty if they match the manifest."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        return "the manifest is unreadable"
    for name, (size, hash_, *_) in manifest.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if sha256(path) != hash_:
            return f"{name} has the wrong sha256"
    return ""


def newest(folder: Path) -> State | None:
    """The newest state whose files match its manifest. Prints why newer ones were skipped."""
    for old in folder.glob(f"step-????????{OLD}"):  # a save was killed between two renames
        remove(old) if old.with_suffix("").exists() else old.rename(old.with_suffix(""))
    for path in sorted(folder.glob("step-????????"), reverse=True):
        wrong = fault(path)
        if wrong:
            say(
                f"{path.parent.parent.name}: state {path.name} is damaged ({wrong}); discarding it and trying the"
                " previous one"
            )
            continue
        return read_state(path)
    return None


def at(folder: Path, step: int, *, remedy: str = "rerun to use the newest valid state") -> State:
    """The state after `step` batches. Raises StagecoachError with the `remedy` if it is damaged."""
    path = folder / name_of(step)
    if wrong := fault(path):
        raise StagecoachError(f"{path}: {wrong}; {remedy}")
    return read_state(path)


def read_state(path: Path) -> State:
    """The state in a folder whose files have been verified."""
    meta = json.loads((path / "state.json").read_text())
    curve = [json.loads(line) for line in (path / "curve.jsonl").read_text().splitlines()]
    return State(meta["step"], path, meta, curve)


def drop_after(folder: Path, step: int) -> None:
    """Remove the states of later steps."""
    for path in sorted(folder.glob("step-????????"), reverse=True):
        if path.name > name_of(step):
            shutil.rmtree(path)


def weights_at(folder: Path, step: int) -> dict[str, Tensor]:
    """The weights of the state after `step` batches."""
    return at(folder, step).weights().whole()


def retain(folder: Path, *, keep: int, protect: Collection[int]) -> None:
    """Keep only the newest `keep` states and those at steps in `protect`. Also deletes leftovers from killed saves."""
    names = {name_of(step) for step in protect}
    for path in sorted(folder.glob("step-????????"))[:-keep]:
        if path.name not in names:
            shutil.rmtree(path)
    for part in folder.glob("step-*.part"):
        shutil.rmtree(part)


# -- tensors on disk ---------------------------------------------------------------------------------------------------


def _file_name(kind: str, rank: int, world: int, *, sharded: bool) -> str:
    """The file name for a rank's tensors of a kind (`weights`, `optimizer`)."""
    return f"{kind}-{rank:05}-of-{world:05}.safetensors" if sharded else f"{kind}.safetensors"


def _write_rows(path: Path, tensors: Mapping[str, Tensor], *, first: bool) -> Offsets:
    """Write this rank's rows and, if `first`, tensors that all ranks replicate. Returns each tensor's first row."""
    offsets: Offsets = {}
    parts: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        start, end = processes.rows(tensor)
        if start < end if processes.is_sharded(tensor) else first:
            offsets[name], parts[name] = start, processes.local(tensor).detach().contiguous()
    save_file(parts, path)
    return offsets


@dataclass(frozen=True)
class RowRange:
    """Rows [first, last) of a tensor in a file; a tensor without dimensions is one row."""

    first: int
    last: int
    path: Path
    scalar: bool


class StoredTensors:
    """All tensors of one kind in a state's folder."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._ranges: dict[str, list[RowRange]] = {}
        manifest = json.loads((folder / "manifest.json").read_text())
        for file, (_, _, *offsets) in manifest.items():
            if file == f"{kind}.safetensors" or file.startswith(f"{kind}-"):
                with safe_open(folder / file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 (not a dict: it has no iterator)
                        shape, first = opened.get_slice(name).get_shape(), offsets[0][name] if offsets else 0
                        rows = RowRange(first, first + (shape[0] if shape else 1), folder / file, not shape)
                        self._ranges.setdefault(name, []).append(rows)
        for ranges in self._ranges.values():
            ranges.sort(key=lambda rows: rows.first)

    def names(self) -> set[str]:
        return set(self._ranges)

    def whole(self) -> dict[str, Tensor]:
        return {name: self.read(name) for name in self._ranges}

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Rows [first, last) of a tensor; by default, all rows."""
        parts = []
        for rows in self._ranges[name]:
            with safe_open(rows.path, framework="pt") as file:
                if rows.scalar:
                    return file.get_tensor(name)
                low = max(first, rows.first) - rows.first
                high = min(rows.last, rows.last if last is None else last) - rows.first
                if low < high:
                    parts.append(file.get_slice(name)[low:high])
                elif not parts:  # zero rows, but the tensor's width and dtype
                    parts.append(file.get_slice(name)[0:0])
        return torch.cat(parts)

    def like(self, name: str, parameter: Tensor) -> Tensor:
        """A tensor with the shape and sharding of `parameter`. A scalar is the same on all ranks."""
        if self._ranges[name][0].scalar or not processes.is_sharded(parameter):
            return self.read(name)
        return processes.like(self.read(name, *processes.rows(parameter)), parameter)
