"""Uniform numbers that are a function of (seed, token index) alone: Philox4x32-10 (Salmon et al. 2011, SC11).

A counter-based generator has no state, so a sample's noise does not depend on its batch, on drafts or on a resume, and
two checkpoints with one seed share their noise. The key is the seed, the counter the token's index.

Not promised: secrecy. Seeds are taken modulo 2^64.
"""

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint64]:
    """Ten rounds on four 32-bit words each: `counter` (4, n) -> (4, n); `key` is two 32-bit words."""
    a, b, c, d = (word.astype(np.uint64) for word in counter)
    first, second = key
    for _ in range(10):
        left, right = a * np.uint64(_MULTIPLIERS[0]), c * np.uint64(_MULTIPLIERS[1])
        a, b, c, d = (
            (right >> _HALF) ^ b ^ np.uint64(first),
            right & _LOW,
            (left >> _HALF) ^ d ^ np.uint64(second),
            left & _LOW,
        )
        first, second = (first + _KEY_STEPS[0]) & 0xFFFFFFFF, (second + _KEY_STEPS[1]) & 0xFFFFFFFF
    return np.stack([a, b, c, d])


def uniforms(seed: int, start: int, count: int) -> NDArray[np.float64]:
    """The numbers of tokens `start` to `start + count - 1` of one sample: (count,) in [0, 1), 53 bits each."""
    index = np.arange(start, start + count, dtype=np.uint64)
    zero = np.zeros_like(index)
    words = philox(np.stack([index & _LOW, index >> _HALF, zero, zero]), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    return ((words[0] << np.uint64(21)) ^ (words[1] >> np.uint64(11))).astype(np.float64) * 2.0**-53
