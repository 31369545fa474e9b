"""Gates of masked diffusion: what the first step must show before its update. Beside `first_steps.py`."""

import math
from collections.abc import Callable

from pipeline.learning import first_steps

CAUSE = "old scores and training differ: other masks, another precision, dropout, or a policy that moved"


def first_policy(precision: str) -> Callable[[dict[str, float]], None]:
    """Nothing has moved since the old scores: ratio 1, nothing clipped, no divergence from the reference."""
    narrow = precision == "fp32"

    def check(values: dict[str, float]) -> None:
        first_steps.value(values, "ratio", 1.0, 1e-4 if narrow else 5e-2, CAUSE)
        first_steps.value(values, "approxkl", 0.0, 1e-6 if narrow else 1e-2, CAUSE)
        first_steps.value(values, "clip_ratio/region_mean", 0.0, 0.0 if narrow else 1e-1, CAUSE)
        if "kl" in values:
            first_steps.value(
                values, "kl", 0.0, 1e-6 if narrow else 1e-2, "the reference is not what the policy starts from"
            )

    return check


def first_scratch(vocab_size: int) -> Callable[[dict[str, float]], None]:
    """An untrained model finds every token as likely: -log p of a masked one is ln V. (The loss weighs tokens, and is noisy.)"""

    def check(values: dict[str, float]) -> None:
        first_steps.value(
            values, "masked/nll", math.log(vocab_size), 0.5, "the initialisation, or what is predicted where"
        )

    return check
