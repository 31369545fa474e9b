"""A masked-diffusion model small enough to enumerate: 3 tokens, 4 positions, a table of logits for each of its 256
states.
"""

import itertools
import math
from functools import cache

import numpy as np

V, L, MASK = 3, 4, 3
STATES = {state: n for n, state in enumerate(itertools.product(range(V + 1), repeat=L))}
SEQUENCES = list(itertools.product(range(V), repeat=L))
MASKS = [mask for mask in itertools.product((False, True), repeat=L) if any(mask)]


@cache
def table(seed: int) -> np.ndarray:
    """log p (256, 4, 3) of standard normal logits."""
    return normalized(np.random.default_rng(seed).standard_normal((len(STATES), L, V)))


def normalized(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@cache
def moved(seed: int, by: int, scale: float = 0.1) -> np.ndarray:
    """`table(seed)` plus `scale` times the noise of another generator, normalized."""
    return normalized(table(seed) + scale * np.random.default_rng(by).standard_normal((len(STATES), L, V)))


def score(logprobs: np.ndarray, sequence: tuple[int, ...]):
    """What `enumerated` takes: log p of each token of the sequence under a mask."""

    def found(mask: tuple[bool, ...]) -> np.ndarray:
        state = tuple(MASK if hidden else token for hidden, token in zip(mask, sequence, strict=True))
        return logprobs[STATES[state], range(L), sequence]

    return found


@cache
def masked_sums(seed: int, number: int) -> dict[tuple[bool, ...], float]:
    """Sums of log p over the masked tokens of a sequence, for each mask."""
    return {mask: float(np.asarray(score(table(seed), SEQUENCES[number])(mask))[list(mask)].sum()) for mask in MASKS}


def order_probability(logprobs: np.ndarray, sequence: tuple[int, ...]) -> float:
    """p(y) under decoding in a uniformly random order, one token per step."""
    told = score(logprobs, sequence)
    total = []
    for order in itertools.permutations(range(L)):
        hidden, nats = [True] * L, 0.0
        for place in order:
            nats += told(tuple(hidden))[place]
            hidden[place] = False
        total.append(math.exp(nats))
    return math.fsum(total) / len(total)
