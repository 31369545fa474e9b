"""Masks as data: which tokens of a text are masked is a pure function of (seed, stream, sample, iteration).

    key  --Philox-->  uniforms  --p | subset | coupled-->  masks  (L,) bool, True for masked tokens
    Drawn, CoupledBatch: rows under n masks each, or under three coupled masks (the input of the losses)

A sample draws one number u for its time t or for the number k of masked tokens, and then L numbers per draw, counted
from the first maskable token. So masks do not depend on padding, micro-batches, process count or resuming, and policy,
old policy and reference use the same masks.

Streams, with their samples: `mdm` (windows, `<corpus>:<window>`), `sft` and `canvas` (examples), `elbo`
(`<pair>/chosen`), `coupled` and `rollout` (`<problem>/<g>`), `time` and `anneal` (the step), `trim` (windows), `eval`
(anything that is evaluated). The iteration is the index of the pass over the data; in reinforcement learning, it is
rollout * inner iterations + inner. No global generator is used.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.diffusion.model import Noised

LEAST = 1e-3  # minimum masking probability in training: p = (1 - LEAST) t + LEAST
COUPLED = (0.2, 0.8)  # range of the time of a coupled pair
WORDS = 2.0**-53


def key(seed: int, stream: str, sample: str | int, iteration: int) -> int:
    """A 128-bit id of a draw: BLAKE2b of the four values as compact JSON, little-endian."""
    text = json.dumps([seed, stream, sample, iteration], separators=(",", ":"), ensure_ascii=False)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def uniforms(key: int, count: int) -> np.ndarray:
    """`count` numbers in [0, 1) for a key, (count,) float64: 53 bits of each raw Philox word."""
    words = np.random.Philox(key=key).random_raw(count)
    return (words >> np.uint64(11)) * WORDS


# -- times -------------------------------------------------------------------------------------------------------------


def times(seed: int, step: int, count: int, *, shared: bool = False, stream: str = "mdm") -> np.ndarray:
    """The times t of an optimizer step's `count` rows, (count,) in [0, 1): t_i = (u + i / count) mod 1, or u for all.

    Evenly spread times are uniform, but their mean varies less (Kingma et al. 2021, arXiv:2107.00630, appendix I.1).
    """
    sample = step if stream == "mdm" else f"{stream}:{step}"
    u = float(uniforms(key(seed, "time", sample, 0), 1)[0])
    return np.full(count, u) if shared else (u + np.arange(count) / count) % 1.0


def probability(t: float) -> float:
    """The masking probability p at time t, (1 - LEAST) t + LEAST, so that 1 / p is at most 1,000 (LLaDA,
    arXiv:2502.09992, algorithm 1).
    """
    return (1 - LEAST) * t + LEAST


def strata(u: float, draws: int, length: int) -> np.ndarray:
    """Number of masked tokens (of `length`) in each draw, (draws,) in 1..length: k_j = 1 + floor(L ((j + u) / n))."""
    counts = 1 + np.floor(length * ((np.arange(draws) + u) / draws)).astype(np.int64)
    return np.minimum(counts, length)


# -- masks -------------------------------------------------------------------------------------------------------------


def subset(numbers: np.ndarray, k: int) -> np.ndarray:
    """The k tokens with the smallest numbers, (L,) bool; ties go to the leftmost."""
    mask = np.zeros(len(numbers), dtype=bool)
    mask[np.argsort(numbers, kind="stable")[:k]] = True
    return mask


class Draws(NamedTuple):
    """Masks of a sample of L tokens for the k form of its ELBO.

    The mean over draws of scale * sum of log-probabilities of the masked tokens estimates the ELBO.
    """

    masks: np.ndarray  # (n, L) bool
    scales: np.ndarray  # (n,) float64: L / k


def elbo_draws(key: int, length: int, draws: int, *, stratified: bool = True) -> Draws:
    """n masks for the ELBO of `length` tokens: k ~ U{1..L}, then a uniform subset of that size. Raises ValueError if
    `length` or `draws` is below 1.

    If `stratified`, one random number spreads k over all draws; else each draw has its own. Both are unbiased.
    """
    if length < 1 or draws < 1:
        raise ValueError(f"expected at least one token and one draw, found {length} and {draws}")
    numbers = uniforms(key, (1 if stratified else draws) + draws * length)
    if stratified:
        counts, rest = strata(float(numbers[0]), draws, length), numbers[1:]
    else:
        table = numbers.reshape(draws, 1 + length)
        counts = np.minimum(1 + np.floor(length * table[:, 0]).astype(np.int64), length)
        rest = np.delete(table, 0, axis=1).reshape(-1)
    masks = np.stack([subset(row, int(k)) for row, k in zip(rest.reshape(draws, length), counts, strict=True)])
    return Draws(masks, length / counts)


class Coupled(NamedTuple):
    """Two masks that partition the tokens (DiffuCoder, arXiv:2506.20639, section 4.2)."""

    t: float
    first: np.ndarray  # (L,) bool, R < t
    second: np.ndarray  # (L,) bool, R >= t


def coupled(key: int, length: int, shared: int | None = None) -> Coupled:
    """t = 0.2 + 0.6 u and the two masks of `length` tokens; u is the first number of `key`, or of a `shared` key."""
    numbers = uniforms(key, 1 + length)
    low, high = COUPLED
    u = float(numbers[0] if shared is None else uniforms(shared, 1)[0])
    t = low + (high - low) * u
    first = numbers[1:] < t
    return Coupled(t, first, ~first)


def apart(key: int, length: int) -> Coupled:
    """Like `coupled`, but the second mask is independent, at rate 1 - t: for comparison, not for training."""
    t, first, _ = coupled(key, length)
    return Coupled(t, first, uniforms(key, 1 + 2 * length)[1 + length :] < 1 - t)


# -- windows, canvases and attention -----------------------------------------------------------------------------------


class Trim(NamedTuple):
    """The end of a window, and its first maskable position."""

    end: int
    start: int


def trim(key: int, length: int) -> Trim:
    """1% of windows are cut to U{1..L} tokens, and another 1% keep their first U{1..L} - 1 tokens clean (LLaDA,
    appendix B.1).
    """
    which, where = uniforms(key, 2)
    if which < 0.01:
        return Trim(1 + int(where * length), 0)
    return Trim(length, int(where * length) if which < 0.02 else 0)


def canvas(key: int, tokens: int, longest: int, unit: int) -> int:
    """The length of an answer including its fill: `unit` * U{ceil((tokens + 1) / unit) .. floor(longest / unit)}.

    `tokens` is the answer's length without its end of turn. Raises ValueError if the range is empty.
    """
    least, most = -(-(tokens + 1) // unit), longest // unit
    if least > most:
        raise ValueError(f"an answer of {tokens} tokens and its end of turn exceed the maximum of {most * unit}")
    return unit * (least + int(float(uniforms(key, 1)[0]) * (most - least + 1)))


def anneal(seed: int, step: int, length: int, steps: int) -> np.ndarray | None:
    """The attention mask at `step` of annealing over `steps` steps, (L, L) bool; None once attention is full.

    i attends to j if j <= i or U_ij < r with r = min(1, (step + 1) / steps): one matrix per step for all rows and
    processes (DiffuLLaMA, arXiv:2410.17891, section 3.2).
    """
    ratio = 1.0 if steps <= 0 else min(1.0, (step + 1) / steps)
    return None if ratio >= 1 else sight(uniforms(key(seed, "anneal", step, 0), length * length), length, ratio)


def sight(numbers: np.ndarray, length: int, ratio: float) -> np.ndarray:
    """A mask (L, L) bool of the past and a fraction `ratio` of the future: 0 is causal, 1 is full attention."""
    return np.tri(length, dtype=bool) | (numbers.reshape(length, length) < ratio)


def block_sight(blocks: np.ndarray) -> np.ndarray:
    """The attention mask (2T, 2T) bool for T noised tokens followed by T clean ones; `blocks` (T,): each token's block.

    A noised token attends to its own noised block and to earlier clean blocks; the clean half is block-causal (BD3-LM,
    arXiv:2503.09573, section 3.2).
    """
    same, before = blocks[:, None] == blocks[None], blocks[:, None] > blocks[None]
    return np.block([[same, before], [np.zeros_like(same), same | before]])


def cart_weights(masked: np.ndarray, p: float) -> np.ndarray:
    """Weights (L,): 1/2 sum over clean j of p (1 - p)^(|i - j| - 1) for each masked token i, 0 for clean ones.

    Dream's context-adaptive rescheduling (Ye et al. 2025, arXiv:2508.15487, section 3.3).
    """
    positions = np.arange(len(masked))
    distance = np.abs(positions[:, None] - positions[None])
    nearness = np.where(distance > 0, p * (1 - p) ** np.maximum(distance - 1, 0), 0.0)
    return np.where(masked, 0.5 * (nearness * ~masked[None]).sum(1), 0.0)


def balanced(masks: int, steps: int) -> np.ndarray:
    """The number of masks removed at each step, (steps,): masks // steps, plus the remainder in the first steps."""
    return masks // steps + (np.arange(steps) < masks % steps)


def by_times(masks: int, steps: int) -> np.ndarray:
    """Dream's counts, (steps,): int(masks left * (1 - s / t)) along linspace(1, 1e-3, steps + 1) in float32; the last
    step removes all remaining masks.
    """
    line = np.linspace(1, 1e-3, steps + 1, dtype=np.float32)
    remaining, counts = masks, []
    for step in range(steps):
        share = np.float32(1) - line[step + 1] / line[step]
        count = remaining if step == steps - 1 else int(np.float32(remaining) * share)
        counts.append(count)
        remaining -= count
    return np.array(counts, dtype=np.int64)


def schedule(name: str, masks: int, steps: int) -> Sequence[int]:
    """The counts of the schedule `balanced` or `dream`."""
    return (balanced(masks, steps) if name == "balanced" else by_times(masks, steps)).tolist()


# -- batches under masks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """Rows under n masks each, for estimating ELBOs."""

    inputs: list[Noised]  # n inputs with the same rows
    scales: Tensor  # (n, B) float32: L / k
    lengths: Tensor  # (B,) int64: L
    counts: dict[str, int]
    reference: Tensor | None = None  # (B,) float32, another model's ELBO under these masks

    def to(self, device: torch.device | str) -> "Drawn":
        """The same on another device."""
        reference = None if self.reference is None else self.reference.to(device)
        return replace(
            self,
            inputs=[noised.to(device) for noised in self.inputs],
            scales=self.scales.to(device),
            lengths=self.lengths.to(device),
            reference=reference,
        )


@dataclass(frozen=True)
class CoupledBatch:
    """Completions under three masks: one of the entire canvas, and two that partition it."""

    tokens: Tensor  # (B, T) int64: prompt and canvas
    documents: Tensor  # (B, T) int32
    positions: Tensor  # (B, T) int64
    canvas: Tensor  # (B, T) bool: the completion and everything after its end
    counted: Tensor  # (B, T) bool: the completion up to its first end
    first: Tensor  # (B, T) bool: R < t
    times: Tensor  # (B,) float32: t
    row_of: Tensor  # (N,) int64, the row of each counted token
    old: Tensor | None  # (N,) float32; None: use the training pass's own scores
    arrays: dict[str, Tensor]  # (N,) float32 each: advantages, reference
    counts: dict[str, int] = field(default_factory=dict)
    fresh: bool = False  # the policy has not moved since the old scores were computed
    second: Tensor | None = None  # (B, T) bool; None: the canvas minus `first`

    def to(self, device: torch.device | str) -> "CoupledBatch":
        """The same on another device."""
        moved = {k: v.to(device, non_blocking=True) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved, arrays={name: value.to(device) for name, value in self.arrays.items()})

    @property
    def inputs(self) -> list[Noised]:
        """The input under each of the three masks, where only counted tokens under the mask are predicted."""
        second = self.canvas & ~self.first if self.second is None else self.second
        return [
            Noised(self.tokens, masks, self.documents, self.positions, asked=masks & self.counted)
            for masks in (self.canvas, self.first, second)
        ]
