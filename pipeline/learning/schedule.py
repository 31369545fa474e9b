"""Learning-rate schedules as pure functions of the step: nothing to save, nothing to step.

S steps, W of warm-up, m = `min_ratio`, p = (s - W) / max(1, S - 1 - W). Warm-up is (s + 1) / W, then by name:

    constant                1
    linear                  1 - (1 - m) p
    cosine                  m + (1 - m) (1 + cos(pi p)) / 2
    cosine_with_restarts    the same with frac(cycles * p), and p = 1 at the end
    wsd                     1 until the last D = round(decay_ratio * S) steps, then 1 - (1 - m) (s - S + D + 1) / D

Pins: s = W - 1 gives 1, s = S - 1 gives m (constant: 1), each restart gives 1.
"""

import math

SCHEDULES = ("constant", "linear", "cosine", "cosine_with_restarts", "wsd")


def factor(
    step: int, *, name: str, steps: int, warmup: int, min_ratio: float, cycles: int = 1, decay_ratio: float = 0.2
) -> float:
    """What the learning rate is multiplied with at `step` (from 0). Raises ValueError for an unknown name."""
    if step < warmup:
        return (step + 1) / warmup
    p = (step - warmup) / max(1, steps - 1 - warmup)
    if name == "constant":
        return 1.0
    if name == "linear":
        return 1 - (1 - min_ratio) * p
    if name == "wsd":
        decay = max(1, round(decay_ratio * steps))
        return min(1.0, 1 - (1 - min_ratio) * (step - steps + decay + 1) / decay)
    if name == "cosine_with_restarts":
        p = 1.0 if p >= 1 else math.modf(cycles * p)[0]
    elif name != "cosine":
        raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {name!r}")
    return min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * p)) / 2
