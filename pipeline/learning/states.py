"""Resumable states of a training run: whole on disk or not there at all.

    <work folder>/step-00000400/
        weights.safetensors  optimizer.safetensors  state.json  curve.jsonl
        manifest.json        sizes and sha256 of the others, written last

Files go into `step-N.part`, each fsynced, the manifest last; then fsync of the folder, rename, fsync of the parent, and
only then are older states dropped. `newest` gives the newest state whose every hash holds, so a damaged one costs the steps
since the one before it. Not promised: survival of a disk that lies about fsync.
"""

import json
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.errors import StagecoachError
from pipeline.tracking import say
from pipeline.work import need_space, remove, sha256, sync_folder


@dataclass(frozen=True)
class State:
    """What a resumed run starts from."""

    step: int  # batches done
    folder: Path
    meta: dict[str, Any]
    curve: list[dict[str, Any]]

    def weights(self) -> dict[str, Tensor]:
        """Model parameters by name."""
        return load_file(self.folder / "weights.safetensors")

    def optimizer(self) -> dict[str, Tensor]:
        """`<parameter>/<state>` -> tensor."""
        return load_file(self.folder / "optimizer.safetensors")


def name_of(step: int) -> str:
    """The folder of the state after `step` batches."""
    return f"step-{step:08d}"


def save(
    folder: Path,
    step: int,
    *,
    weights: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    meta: dict[str, Any],
    curve: list[dict[str, Any]],
) -> Path:
    """Write a state. Raises StagecoachError before writing when the disk has not 1.2 times its size left."""
    need = sum(t.numel() * t.element_size() for t in (*weights.values(), *optimizer.values()))
    need_space(folder, int(1.2 * need) + 1_000_000)
    part = folder / f"{name_of(step)}.part"
    remove(part)
    part.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, part / "weights.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in optimizer.items()}, part / "optimizer.safetensors")
    (part / "state.json").write_text(json.dumps({"step": step, **meta}, sort_keys=True))
    (part / "curve.jsonl").write_text("".join(json.dumps(row) + "\n" for row in curve))
    files = sorted(part.iterdir())
    for path in files:
        _sync_file(path)
    manifest = part / "manifest.json"
    manifest.write_text(json.dumps({p.name: [p.stat().st_size, sha256(p)] for p in files}))
    _sync_file(manifest)
    sync_folder(part)
    target = folder / name_of(step)
    remove(target)  # a state of the same step that was found damaged
    part.rename(target)
    sync_folder(folder)
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
    for name, (size, hash_) in manifest.items():
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
    for path in sorted(folder.glob("step-????????"), reverse=True):
        wrong = fault(path)
        if wrong:
            say(f"{path.parent.parent.name}: state {path.name} is damaged ({wrong}); trying the one before")
            continue
        return _read(path)
    return None


def at(folder: Path, step: int) -> State:
    """The state after `step` batches. Raises StagecoachError when it is damaged."""
    path = folder / name_of(step)
    if wrong := fault(path):
        raise StagecoachError(f"{path}: {wrong}; run again: the newest whole state serves")
    return _read(path)


def _read(path: Path) -> State:
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
    return load_file(folder / name_of(step) / "weights.safetensors")


def retain(folder: Path, *, keep: int, protect: Collection[int]) -> None:
    """Drop all but the newest `keep` states and the protected steps (the best); leftovers of killed saves too."""
    names = {name_of(step) for step in protect}
    for path in sorted(folder.glob("step-????????"))[:-keep]:
        if path.name not in names:
            shutil.rmtree(path)
    for part in folder.glob("step-*.part"):
        shutil.rmtree(part)
