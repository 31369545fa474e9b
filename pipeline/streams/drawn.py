"""Rows under masks, as scorers of masked-diffusion models take them: n masks each, or three coupled ones."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pipeline.model.denoiser import Noised


@dataclass(frozen=True)
class Drawn:
    """Rows under n masks each: what an ELBO is estimated from."""

    inputs: list[Noised]  # n, of the same rows
    scales: Tensor  # (n, B) float32: L / k
    lengths: Tensor  # (B,) int64: L
    counts: dict[str, int]
    reference: Tensor | None = None  # (B,) float32, another model's ELBO under these masks

    def to(self, device: torch.device | str) -> "Drawn":
        """The same on another device."""
        reference = None if self.reference is None else self.reference.to(device)
        return replace(self, inputs=[one.to(device) for one in self.inputs], scales=self.scales.to(device),
                       lengths=self.lengths.to(device), reference=reference)  # fmt: skip


@dataclass(frozen=True)
class CoupledBatch:
    """Completions under their three masks: all of it, and two that share it out (specs: diffusion, 6)."""

    tokens: Tensor  # (B, T) int64: prompt and canvas
    documents: Tensor  # (B, T) int32
    positions: Tensor  # (B, T) int64
    canvas: Tensor  # (B, T) bool: the completion with what stands behind its end
    counted: Tensor  # (B, T) bool: the completion up to its first end
    first: Tensor  # (B, T) bool: R < t
    times: Tensor  # (B,) float32: t
    row_of: Tensor  # (N,) int64, the row of each counted token
    old: Tensor | None  # (N,) float32; none: what the training pass itself gives
    arrays: dict[str, Tensor]  # (N,) float32 each: advantages, reference
    counts: dict[str, int] = field(default_factory=dict)
    fresh: bool = False  # the policy has not moved since the old scores
    second: Tensor | None = None  # (B, T) bool; none: what `first` leaves of the canvas

    def to(self, device: torch.device | str) -> "CoupledBatch":
        """The same on another device."""
        moved = {k: v.to(device, non_blocking=True) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved, arrays={name: value.to(device) for name, value in self.arrays.items()})

    @property
    def inputs(self) -> list[Noised]:
        """The three of them. The counted tokens under each mask are asked for, no others."""
        second = self.canvas & ~self.first if self.second is None else self.second
        return [Noised(self.tokens, masks, self.documents, self.positions, asked=masks & self.counted)
                for masks in (self.canvas, self.first, second)]  # fmt: skip
