"""Tensors on disk, cut by rows over files: each process writes the rows it holds, and any process reads the rows it needs.

    weights.safetensors                     one process, or copies of one: whole tensors
    weights-00001-of-00002.safetensors      FSDP2: rank 1's rows, and where they begin in each tensor: {name: first row}

The offsets stand in the state's manifest, beside sizes and hashes. So a run of 2 processes goes on with 1, with 8, or cut
otherwise, and a plain model reads what 8 processes wrote. No process ever holds what it does not need.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeline.learning import sharding

Offsets = dict[str, int]  # tensor -> its first row in a file


def file_name(kind: str, rank: int, world: int, *, cut: bool) -> str:
    """The file of a rank's tensors of a kind (`weights`, `optimizer`)."""
    return f"{kind}-{rank:05}-of-{world:05}.safetensors" if cut else f"{kind}.safetensors"


def write(path: Path, tensors: Mapping[str, Tensor], *, first: bool) -> Offsets:
    """Write the rows that lie here; tensors that lie whole on all ranks only where `first`. Returns where the rows begin."""
    offsets: Offsets = {}
    held: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        begin, end = sharding.rows(tensor)
        if begin < end if sharding.is_sharded(tensor) else first:
            offsets[name], held[name] = begin, sharding.local(tensor).detach().contiguous()
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
        if self._pieces[name][0].scalar or not sharding.is_sharded(parameter):
            return self.read(name)
        return sharding.like(self.read(name, *sharding.rows(parameter)), parameter)
