"""Resumable states of a training run: whole on disk or not there at all.

    <work folder>/step-00000400/
        weights.safetensors  optimizer.safetensors  state.json  curve.jsonl
        manifest.json        sizes and sha256 of the others, written last

Under FSDP2 each process writes a file of each kind, and the manifest says which rows it holds (slices.py).

Files go into `step-N.part`, each fsynced, the manifest last; then fsync of the folder, rename, fsync of the parent, and
only then are older states dropped. `newest` gives the newest state whose every hash holds, so a damaged one costs the
steps since the one before it. Not promised: survival of a disk that lies about fsync.

Tensors on disk, cut by rows over files: each process writes the rows it holds, and any process reads the rows it needs.

    weights.safetensors                     one process, or copies of one: whole tensors
    weights-00001-of-00002.safetensors      FSDP2: rank 1's rows, and where they begin in each tensor: {name: first row}

The offsets stand in the state's manifest, beside sizes and hashes. So a run of 2 processes goes on with 1, with 8, or
cut otherwise, and a plain model reads what 8 processes wrote. No process ever holds what it does not need.

What a run keeps on disk: its states, how many of them, which one it resumes from, and which weights it publishes.

`states.py` is the format on disk; here is what goes into it. All ranks call these methods together. Rank 0 writes, or
each rank its share of a model that is cut (FSDP2); rank 0 alone decides which state is the newest good one.
"""

import copy
import json
import os
import shutil
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeline.learning import processes, update
from pipeline.learning.optim import Optimizers
from pipeline.learning.processes import Ranks
from pipeline.learning.settings import TrainingConfig
from pipeline.learning.update import Averages, Course, Window
from pipeline.run.errors import ConfigError, StagecoachError
from pipeline.run.tracking import say
from pipeline.run.workdir import Job, need_space, remove, sha256, sync_folder

Offsets = dict[str, int]  # tensor -> its first row in a file


def file_name(kind: str, rank: int, world: int, *, cut: bool) -> str:
    """The file of a rank's tensors of a kind (`weights`, `optimizer`)."""
    return f"{kind}-{rank:05}-of-{world:05}.safetensors" if cut else f"{kind}.safetensors"


def write_rows(path: Path, tensors: Mapping[str, Tensor], *, first: bool) -> Offsets:
    """Write the rows that lie here; tensors that lie whole on all ranks only where `first`. Returns where the rows
    begin.
    """
    offsets: Offsets = {}
    held: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        begin, end = processes.rows(tensor)
        if begin < end if processes.is_sharded(tensor) else first:
            offsets[name], held[name] = begin, processes.local(tensor).detach().contiguous()
    save_file(held, path)
    return offsets


@dataclass(frozen=True)
class Piece:
    """Rows [first, last) of a tensor in a file; without dimensions it is one row."""

    first: int
    last: int
    path: Path
    scalar: bool


class Stored:
    """The tensors of one kind in a state's folder."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._pieces: dict[str, list[Piece]] = {}
        manifest = json.loads((folder / "manifest.json").read_text())
        for file, (_, _, *offsets) in manifest.items():
            if file == f"{kind}.safetensors" or file.startswith(f"{kind}-"):
                with safe_open(folder / file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 (not a dict: it has no iterator)
                        shape, first = opened.get_slice(name).get_shape(), offsets[0][name] if offsets else 0
                        piece = Piece(first, first + (shape[0] if shape else 1), folder / file, not shape)
                        self._pieces.setdefault(name, []).append(piece)
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece.first)

    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._pieces)

    def whole(self) -> dict[str, Tensor]:
        """All tensors."""
        return {name: self.read(name) for name in self._pieces}

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Rows [first, last) of a tensor, or all."""
        parts = []
        for piece in self._pieces[name]:
            with safe_open(piece.path, framework="pt") as file:
                if piece.scalar:
                    return file.get_tensor(name)
                low = max(first, piece.first) - piece.first
                high = min(piece.last, piece.last if last is None else last) - piece.first
                if low < high:
                    parts.append(file.get_slice(name)[low:high])
                elif not parts:  # none of its rows, in its width and dtype
                    parts.append(file.get_slice(name)[0:0])
        return torch.cat(parts)

    def like(self, name: str, parameter: Tensor) -> Tensor:
        """What `parameter` holds of a tensor of its shape, cut as it is; a number is the same everywhere."""
        if self._pieces[name][0].scalar or not processes.is_sharded(parameter):
            return self.read(name)
        return processes.like(self.read(name, *processes.rows(parameter)), parameter)


# -- states ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """What a resumed run starts from."""

    step: int  # batches done
    folder: Path
    meta: dict[str, Any]
    curve: list[dict[str, Any]]

    def weights(self) -> Stored:
        """Model parameters by name."""
        return Stored(self.folder, "weights")

    def optimizer(self) -> Stored:
        """`<parameter>/<state>` -> tensor."""
        return Stored(self.folder, "optimizer")


def name_of(step: int) -> str:
    """The folder of the state after `step` batches."""
    return f"step-{step:08d}"


OLD = ".old"  # the ending of a state while another takes its place
Files = dict[str, list[Any]]  # name -> [size, sha256], and for a share {tensor: its first row}


def save(
    folder: Path,
    step: int,
    *,
    weights: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    meta: dict[str, Any],
    curve: list[dict[str, Any]],
) -> Path:
    """Write a state that lies here whole. Raises StagecoachError before writing when the disk has not 1.2 times its
    size left.
    """
    tensors = {"weights": weights, "optimizer": optimizer}
    part = begin(folder, step, tensors)
    return complete(part, step, write(part, tensors), meta=meta, curve=curve)


def begin(folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]]) -> Path:
    """An empty folder for a state of these tensors, of which shares may lie elsewhere. Raises StagecoachError as
    `save`.
    """
    need = sum(t.numel() * t.element_size() for kind in tensors.values() for t in kind.values())
    need_space(folder, int(1.2 * need) + 1_000_000)
    part = part_of(folder, step)
    remove(part)
    part.mkdir(parents=True)
    return part


def part_of(folder: Path, step: int) -> Path:
    """Where a state is written before it is whole."""
    return folder / f"{name_of(step)}.part"


def write(part: Path, tensors: Mapping[str, Mapping[str, Tensor]], rank: int = 0, world: int = 1) -> Files:
    """Write what lies here of the tensors of each kind, and say what was written."""
    cut = any(processes.is_sharded(t) for kind in tensors.values() for t in kind.values())
    files: Files = {}
    for kind, named in tensors.items():
        path = part / file_name(kind, rank, world, cut=cut)
        offsets = write_rows(path, named, first=rank == 0)
        _sync_file(path)
        files[path.name] = [path.stat().st_size, sha256(path), *([offsets] if cut else [])]
    return files


def complete(part: Path, step: int, files: Files, *, meta: dict[str, Any], curve: list[dict[str, Any]]) -> Path:
    """Add the numbers and the manifest to a folder whose tensors are `files`, and put it in its place."""
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
    if target.exists():  # a state of the same step, which serves until the new one is in its place
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
    """What is wrong with a state's files; empty when nothing is."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        return "no readable manifest"
    for name, (size, hash_, *_) in manifest.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
        if sha256(path) != hash_:
            return f"{name} has another sha256"
    return ""


def newest(folder: Path) -> State | None:
    """The newest state whose manifest holds; says which ones were skipped and why."""
    for old in folder.glob(f"step-????????{OLD}"):  # killed between two renames
        remove(old) if old.with_suffix("").exists() else old.rename(old.with_suffix(""))
    for path in sorted(folder.glob("step-????????"), reverse=True):
        wrong = fault(path)
        if wrong:
            say(
                f"{path.parent.parent.name}: state {path.name} is damaged ({wrong}); it is dropped, trying the one"
                " before"
            )
            continue
        return opened(path)
    return None


def at(folder: Path, step: int, *, remedy: str = "run again: the newest whole state serves") -> State:
    """The state after `step` batches. Raises StagecoachError, with what can be done, when it is damaged."""
    path = folder / name_of(step)
    if wrong := fault(path):
        raise StagecoachError(f"{path}: {wrong}; {remedy}")
    return opened(path)


def opened(path: Path) -> State:
    """The state in a folder, whose files are known to be good."""
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
    """Drop all but the newest `keep` states and the protected steps (the best); leftovers of killed saves too."""
    names = {name_of(step) for step in protect}
    for path in sorted(folder.glob("step-????????"))[:-keep]:
        if path.name not in names:
            shutil.rmtree(path)
    for part in folder.glob("step-*.part"):
        shutil.rmtree(part)


# -- keeping -----------------------------------------------------------------------------------------------------------


AVERAGE = "average"  # `<parameter>/average` among the optimiser's states


class Keeper:
    """The states of one run. `settings` are facts of this process that a bit-exact resume needs unchanged."""

    def __init__(
        self,
        job: Job,
        ranks: Ranks,
        model: nn.Module,
        optimizers: Optimizers,
        averages: Averages | None,
        fingerprint: str,
        settings: dict[str, Any],
        config: TrainingConfig,
    ) -> None:
        self.job, self.ranks, self.model, self.optimizers, self.averages = job, ranks, model, optimizers, averages
        self.fingerprint, self.settings = fingerprint, settings
        self.publishes_best = config.publish == "best"
        self.rolls_back = "rollback" in (config.on_nonfinite, config.on_spike)
        if job.runtime.async_save and ranks.sharding:
            raise ConfigError(
                "runtime.async_save: a model that is cut (FSDP2) is written by all its processes together; set it to"
                " false"
            )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")
        self._writing: Future[None] | None = None

    def save(self, course: Course, window: Window, rest: dict[str, Any]) -> None:
        """Write a state, then drop all but the `runtime.keep` newest, the best, and those that a rollback may load.

        With `runtime.async_save` a thread writes a copy; one at a time, so the next save waits for it, and so does the
        end.
        """
        self.wait()
        optimizer = self.optimizers.state_tensors()
        meta = {**vars(course), **self.settings, "window": window.state(), "fingerprint": self.fingerprint, **rest}
        if self.averages:
            optimizer |= {f"{name}/{AVERAGE}": value for name, value in self.averages.values.items()}
            meta["averaged"] = self.averages.updates
        tensors = {"weights": weights_of(self.model), "optimizer": optimizer}
        if not self.job.runtime.async_save:
            self._write(course.step, tensors, meta, self.job.tracker.rows, self._protected(course))
            self.job.tracker.flush()
        elif self.ranks.rank == 0:
            copies = {kind: {n: t.to("cpu", copy=True) for n, t in named.items()} for kind, named in tensors.items()}
            rows = copy.deepcopy(self.job.tracker.rows)
            self._writing = self._thread.submit(
                self._write, course.step, copies, copy.deepcopy(meta), rows, self._protected(course)
            )

    def _protected(self, course: Course) -> list[int]:
        """Steps whose states outlive retention."""
        targets = update.rollback_targets(course) if self.rolls_back else []
        best = (
            [course.best_step, *(update.best_before(course, step) for step in targets)] if self.publishes_best else []
        )
        return best + targets

    def _write(
        self,
        step: int,
        tensors: dict[str, dict[str, Tensor]],
        meta: dict[str, Any],
        rows: list[Any],
        protect: list[int],
    ) -> None:
        """One state on disk. In a thread rank 0 is alone, and no rank waits for another."""
        ranks, folder = self.ranks, self.job.folder
        first, alone = ranks.rank == 0, self.job.runtime.async_save
        part = begin(folder, step, tensors) if first else part_of(folder, step)
        if not alone:
            ranks.barrier()
        files = write(part, tensors, ranks.rank, ranks.world) if first or ranks.sharding else {}
        written = [files] if alone else ranks.gather(files)
        if first:
            files = {name: facts for share in written for name, facts in share.items()}
            complete(part, step, files, meta=meta, curve=rows)
            retain(folder, keep=self.job.runtime.keep, protect=protect)
        if not alone:
            ranks.barrier()

    def wait(self) -> None:
        """Until what is being written is on disk. Raises what the writing raised."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
            self.job.tracker.flush()
        if self.job.runtime.async_save:
            self.ranks.barrier()

    def close(self) -> None:
        """End the thread, after what it is writing; also when the run has failed."""
        self._thread.shutdown(wait=True)

    def resume(self) -> tuple[Course, Window, dict[str, Any]] | None:
        """Put the newest whole state into model, optimisers, averages and tracker; returns the rest of it, None without
        one.

        Raises ConfigError for a state of other data, or one that not all ranks see.
        """
        state = self._newest()
        if state is None:
            return None
        if state.meta["fingerprint"] != self.fingerprint:
            raise ConfigError(f"{state.folder}: was trained on other data; set runtime.fresh=true to start over")
        changed = {k: (state.meta.get(k), v) for k, v in self.settings.items() if state.meta.get(k) != v}
        if changed:
            say(f"{self.job.name}: not bit-exact with an uninterrupted run: changed {changed}")
        return self._take(state)

    def _newest(self) -> State | None:
        """The newest good state, the same one on all ranks: hashes are read once."""
        found = None
        if self.ranks.rank == 0:
            found = newest(self.job.folder)
            last = found.step if found else -1
            drop_after(self.job.folder, last)  # damaged ones: they would count as the newest
        step = self.ranks.gather(found and found.step)[0]
        if step is None or found is not None:
            return found
        try:
            return opened(self.job.folder / name_of(step))
        except OSError as error:
            raise ConfigError(
                f"rank {self.ranks.rank} does not see {self.job.folder / name_of(step)}, which rank 0 goes on from: "
                "expected the work directory (STAGECOACH_WORK) on a file system that all machines share"
            ) from error

    def load(self, step: int) -> tuple[Course, Window, dict[str, Any]]:
        """As `resume`, from the state after `step` batches."""
        self.wait()
        self.job.tracker.back_to(step)
        return self._take(at(self.job.folder, step))

    def _take(self, state: State) -> tuple[Course, Window, dict[str, Any]]:
        load_weights(self.model, state.weights())
        moments, averages = self._moments(state)
        self.optimizers.load_state_tensors(moments)
        if self.averages:
            self.averages.restore(averages, state.meta["averaged"])
        self.job.tracker.restore(state.curve)
        known = {k: v for k, v in state.meta.items() if k in vars(Course())}
        return Course(**known), Window.of(state.meta["window"]), state.meta

    def _moments(self, state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The optimiser's states, and the averaged weights by their names: of each what this rank holds of the
        parameter.
        """
        stored, parameters = state.optimizer(), dict(self.model.named_parameters())
        tensors = {name: stored.like(name, parameters[name.rpartition("/")[0]]) for name in sorted(stored.names())}
        end = f"/{AVERAGE}"
        averages = {name.removesuffix(end): tensor for name, tensor in tensors.items() if name.endswith(end)}
        return {name: tensor for name, tensor in tensors.items() if not name.endswith(end)}, averages

    def forget_after(self, step: int) -> None:
        """Drop the states of later steps: a rollback has made them void."""
        self.wait()
        self.ranks.barrier()
        if self.ranks.rank == 0:
            drop_after(self.job.folder, step)
        self.ranks.barrier()

    def load_weights(self, step: int) -> None:
        """Load the weights of that step's state into the model, averaged ones where there are some."""
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
            self.averages.restore(self._moments(state)[1], self.averages.updates)
            self.averages.load()
        else:
            load_weights(self.model, state.weights())


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name, each storage once (a tied head is the embedding)."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@torch.no_grad()
def load_weights(model: nn.Module, weights: Stored) -> None:
    """Copy the weights of a state back into the model, each rank the rows that it holds; every name must match."""
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.names(), sorted(parameters.keys() ^ weights.names())
    for name, parameter in parameters.items():
        parameter.copy_(weights.like(name, parameter))
