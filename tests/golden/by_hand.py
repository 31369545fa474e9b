"""REINFORCE++, worked by hand: no oracle has it in this form (spec: alignment, 6).

Two answers of three policy tokens each; the first has a tool's token before its last. beta 0.5, clip 0.2.

    o - f                        -0.8  -0.4   9*    0.4    |  -0.4  -0.8   0.8   9*       (* = masked, must not count)
    score 1.1 | -0.9 on the last policy token, less beta * (o - f):
    reward                        0.4   0.2   -     0.9    |   0.2   0.4  -1.3   -
    to the end                    1.5   1.1   -     0.9    |  -0.7  -0.9  -1.3   -        carried over the masked token
    less the mean 0.1             1.4   1.0   -     0.8    |  -0.8  -1.0  -1.4   -

The squares sum to 2 (1.96 + 1 + 0.64) = 7.2; 7.2 / (6 - 1) = 1.44, with root 1.2 (eps 1e-8 changes the ninth digit):

    advantage                     7/6   5/6   -     2/3    |  -2/3  -5/6  -7/6   -
    ratio                         1.5   0.5   -     1.1    |   1.5   0.5   1.1   -
    min(rho*A, clip(rho)*A)      1.4   5/12   -    11/15   |  -1    -2/3 -77/60  -        sum -2/5
    loss = 2/5 / 6 = 1/15

The gradient of the loss with respect to l is -A * rho / 6 where not clipped. It is 0 where clipped: at the first token
of the first answer (1.5, A > 0) and at the second of the second (0.5, A < 0).
"""

from __future__ import annotations

import math

import torch
from case import Case

MASK = [[1, 1, 0, 1], [1, 1, 1, 0]]
REFERENCE = [[-1.0, -1.5, -12.0, -2.0], [-0.5, -1.2, -2.5, -12.0]]
DIFFERENCE = [[-0.8, -0.4, 9.0, 0.4], [-0.4, -0.8, 0.8, 9.0]]  # o - f
RATIO = [[1.5, 0.5, 3.0, 1.1], [1.5, 0.5, 1.1, 3.0]]
GRADIENT = [[0, -5 / 72, 0, -11 / 90], [1 / 6, 0, 77 / 360, 0]]


def cases() -> dict[str, list[Case]]:
    reference = torch.tensor(REFERENCE, dtype=torch.float64)
    old = torch.round(reference + torch.tensor(DIFFERENCE, dtype=torch.float64), decimals=4).tolist()
    policy = [[o + math.log(rho) for o, rho in zip(*rows, strict=True)] for rows in zip(old, RATIO, strict=True)]
    expected = {
        "rewards": [[0.4, 0.2, 0.0, 0.9], [0.2, 0.4, -1.3, 0.0]],
        "returns": [[1.5, 1.1, 0.0, 0.9], [-0.7, -0.9, -1.3, 0.0]],
        "advantages": [[7 / 6, 5 / 6, 0.0, 2 / 3], [-2 / 3, -5 / 6, -7 / 6, 0.0]],
        "loss": 1 / 15,
        "grad_policy": GRADIENT,
    }
    case = Case(
        name="two_answers",
        oracle="hand",
        version="1",
        call="by hand, see by_hand.py",
        seed=None,
        settings={},
        inputs={
            "beta": 0.5,
            "clip_low": 0.2,
            "clip_high": 0.2,
            "scores": [1.1, -0.9],
            "mask": MASK,
            "policy": policy,
            "old": old,
            "reference": REFERENCE,
        },
        expected=expected,
    )
    return {"reinforce_pp": [case]}
