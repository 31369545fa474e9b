"""Masks as data: which tokens of a text are hidden is a pure function of (seed, stream, sample, iteration).

    key  --Philox-->  uniforms  --bernoulli | subset | coupled-->  masks  (L,) bool, True where the mask stands

A sample draws one number u for its time t, or for the number k of masks, then L numbers a draw, counted from the first
token that may be masked. So neither padding nor micro-batches, processes or a resume can move a mask, and policy, old
policy and reference see the same ones (specs: diffusion, 2).

Streams and what a sample is: `mdm` windows `<corpus>:<window>`; `sft`, `canvas` examples; `elbo` `<pair>/chosen`;
`coupled`, `rollout` `<problem>/<g>`; `time`, `anneal` the step; `trim` windows; `eval` whatever is measured. The
iteration is the pass over the data, in reinforcement learning rollout * inner iterations + the inner one. Nothing here
touches a global generator.

Rows under masks, as scorers of masked-diffusion models take them: n masks each, or three coupled ones.
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

LEAST = 1e-3  # of a masking probability in training: p = (1 - LEAST) t + LEAST
COUPLED = (0.2, 0.8)  # between which the time of a coupled pair lies
WORDS = 2.0**-53


def key(seed: int, stream: str, sample: str | int, iteration: int) -> int:
    """128 bits that name a draw: BLAKE2b of the four as compact JSON, read little-endian."""
    text = json.dumps([seed, stream, sample, iteration], separators=(",", ":"), ensure_ascii=False)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def uniforms(key: int, count: int) -> np.ndarray:
    """`count` numbers in [0, 1) of a key, (count,) float64: the raw words of Philox, 53 bits of each."""
    words = np.random.Philox(key=key).random_raw(count)
    return (words >> np.uint64(11)) * WORDS


# -- times -------------------------------------------------------------------------------------------------------------


def times(seed: int, step: int, count: int, *, shared: bool = False, stream: str = "mdm") -> np.ndarray:
    """The times t of an optimiser step's `count` rows, (count,) in [0, 1): t_i = (u + i / count) mod 1, or one for all.

    Spread evenly they are uniform each and vary less together (Kingma et al. 2021, arXiv:2107.00630, appendix I.1).
    """
    sample = step if stream == "mdm" else f"{stream}:{step}"
    u = float(uniforms(key(seed, "time", sample, 0), 1)[0])
    return np.full(count, u) if shared else (u + np.arange(count) / count) % 1.0


def probability(t: float) -> float:
    """The share p of masks at time t, (1 - LEAST) t + LEAST, so that 1 / p stays below 1,000 (LLaDA,
    arXiv:2502.09992, algorithm 1).
    """
    return (1 - LEAST) * t + LEAST


def strata(u: float, draws: int, length: int) -> np.ndarray:
    """How many of `length` tokens each of the draws masks, (draws,) in 1..length: k_j = 1 + floor(L ((j + u) / n))."""
    found = 1 + np.floor(length * ((np.arange(draws) + u) / draws)).astype(np.int64)
    return np.minimum(found, length)


# -- masks -------------------------------------------------------------------------------------------------------------


def bernoulli(numbers: np.ndarray, p: float) -> np.ndarray:
    """Each token masked by itself with probability p, (L,) bool."""
    return numbers < p


def subset(numbers: np.ndarray, k: int) -> np.ndarray:
    """The k tokens with the smallest numbers, ties to the left, (L,) bool."""
    found = np.zeros(len(numbers), dtype=bool)
    found[np.argsort(numbers, kind="stable")[:k]] = True
    return found


class Draws(NamedTuple):
    """Masks of a sample of L tokens under the k form of its ELBO."""

    masks: np.ndarray  # (n, L) bool
    scales: np.ndarray  # (n,) float64: L / k
    # the mean over draws of scale * sum of log-probabilities at the masks estimates the ELBO


def elbo_draws(key: int, length: int, draws: int, *, stratified: bool = True) -> Draws:
    """n masks for the ELBO of `length` tokens: k ~ U{1..L}, then a subset of that size, uniformly. Raises ValueError
    below 1.

    Stratified, one number spreads the k of all draws; independent, each draw has its own. Both are unbiased.
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
    """Two masks of which each token is under exactly one (DiffuCoder, arXiv:2506.20639, section 4.2)."""

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
    """As `coupled`, but the second mask is drawn by itself, at rate 1 - t: what coupling is compared with, not
    trained by.
    """
    t, first, _ = coupled(key, length)
    return Coupled(t, first, uniforms(key, 1 + 2 * length)[1 + length :] < 1 - t)


# -- what surrounds them -----------------------------------------------------------------------------------------------


class Trim(NamedTuple):
    """What of a window is read, and from where on it may be masked."""

    end: int
    start: int


def trim(key: int, length: int) -> Trim:
    """1 % of windows are cut to U{1..L} tokens, another 1 % keep U{1..L} - 1 of them clean in front (LLaDA, appendix
    B.1).
    """
    which, where = uniforms(key, 2)
    if which < 0.01:
        return Trim(1 + int(where * length), 0)
    return Trim(length, int(where * length) if which < 0.02 else 0)


def canvas(key: int, tokens: int, longest: int, unit: int) -> int:
    """The length of a response with its padding: `unit` * U{ceil((tokens + 1) / unit) .. floor(longest / unit)}.

    `tokens` are those of the answer without its end. Raises ValueError where no multiple lies between.
    """
    least, most = -(-(tokens + 1) // unit), longest // unit
    if least > most:
        raise ValueError(f"an answer of {tokens} tokens and its end do not fit {most * unit}")
    return unit * (least + int(float(uniforms(key, 1)[0]) * (most - least + 1)))


def anneal(seed: int, step: int, length: int, steps: int) -> np.ndarray | None:
    """Who may see whom at `step` of an annealing over `steps`, (L, L) bool; None once all see all.

    i sees j if j <= i or U_ij < r with r = min(1, (step + 1) / steps): one matrix a step for all rows and processes
    (DiffuLLaMA, arXiv:2410.17891, section 3.2).
    """
    ratio = 1.0 if steps <= 0 else min(1.0, (step + 1) / steps)
    return None if ratio >= 1 else sight(uniforms(key(seed, "anneal", step, 0), length * length), length, ratio)


def sight(numbers: np.ndarray, length: int, ratio: float) -> np.ndarray:
    """(L, L) bool: the past, and of the future what lies below `ratio`. 0 is causal attention, 1 is full attention."""
    return np.tri(length, dtype=bool) | (numbers.reshape(length, length) < ratio)


def block_sight(blocks: np.ndarray) -> np.ndarray:
    """Who sees whom in a row of noisy and clean tokens side by side, (2T, 2T) bool; `blocks` (T,) number each token's
    block.

    A noisy token sees its own noisy block and the clean blocks before it; the clean half is causal from block to block
    (BD3-LM, arXiv:2503.09573, section 3.2).
    """
    same, before = blocks[:, None] == blocks[None], blocks[:, None] > blocks[None]
    return np.block([[same, before], [np.zeros_like(same), same | before]])


def cart_weights(masked: np.ndarray, p: float) -> np.ndarray:
    """Weights by the clean tokens near each masked one, (L,): 1/2 sum over clean j of p (1 - p)^(|i - j| - 1), 0 where
    clean.

    Dream's context-adaptive rescheduling (Ye et al. 2025, arXiv:2508.15487, section 3.3).
    """
    places = np.arange(len(masked))
    distance = np.abs(places[:, None] - places[None])
    near = np.where(distance > 0, p * (1 - p) ** np.maximum(distance - 1, 0), 0.0)
    return np.where(masked, 0.5 * (near * ~masked[None]).sum(1), 0.0)


def balanced(masks: int, steps: int) -> np.ndarray:
    """How many masks each step removes, (steps,): masks // steps, the remainder first. As many steps as masks: one
    each.
    """
    return masks // steps + (np.arange(steps) < masks % steps)


def by_times(masks: int, steps: int) -> np.ndarray:
    """Dream's counts, (steps,): int(left * (1 - s / t)) along linspace(1, 1e-3, steps + 1) in float32, all at the
    last.
    """
    line = np.linspace(1, 1e-3, steps + 1, dtype=np.float32)
    left, found = masks, []
    for step in range(steps):
        share = np.float32(1) - line[step + 1] / line[step]
        count = left if step == steps - 1 else int(np.float32(left) * share)
        found.append(count)
        left -= count
    return np.array(found, dtype=np.int64)


def schedule(name: str, masks: int, steps: int) -> Sequence[int]:
    """The counts of `balanced` or `dream`."""
    return (balanced(masks, steps) if name == "balanced" else by_times(masks, steps)).tolist()


# -- drawn -------------------------------------------------------------------------------------------------------------


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
        return replace(
            self,
            inputs=[one.to(device) for one in self.inputs],
            scales=self.scales.to(device),
            lengths=self.lengths.to(device),
            reference=reference,
        )


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
        return [
            Noised(self.tokens, masks, self.documents, self.positions, asked=masks & self.counted)
            for masks in (self.canvas, self.first, second)
        ]
