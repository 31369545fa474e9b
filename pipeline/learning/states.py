"""Resumable states of a training run: whole on disk or not there at all.

    <work folder>/step-00000400/
        weights.safetensors  optimizer.safetensors  state.json  curve.jsonl
        manifest.json        sizes and sha256 of the others, written last

Under FSDP2 each process writes a file of each kind, and the manifest says which rows it holds (slices.py).

Files go into `step-N.part`, each fsynced, the manifest last; then fsync of the folder, rename, fsync of the parent, and
only then are older states dropped. `newest` gives the newest state whose every hash holds, so a damaged one costs the steps
since the one before it. Not promised: survival of a disk that lies about fsync.
"""

import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.errors import StagecoachError
from pipeline.learning import sharding, slices
from pipeline.learning.slices import Stored
from pipeline.tracking import say
from pipeline.work import need_space, remove, sha256, sync_folder


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
    """Write a state that lies here whole. Raises StagecoachError before writing when the disk has not 1.2 times its size left."""
    tensors = {"weights": weights, "optimizer": optimizer}
    part = begin(folder, step, tensors)
    return complete(part, step, write(part, tensors), meta=meta, curve=curve)


def begin(folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]]) -> Path:
    """An empty folder for a state of these tensors, of which shares may lie elsewhere. Raises StagecoachError as `save`."""
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
    cut = any(sharding.is_sharded(t) for kind in tensors.values() for t in kind.values())
    files: Files = {}
    for kind, named in tensors.items():
        path = part / slices.file_name(kind, rank, world, cut=cut)
        offsets = slices.write(path, named, first=rank == 0)
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
                f"{path.parent.parent.name}: state {path.name} is damaged ({wrong}); it is dropped, trying the one before"
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
