"""How often an answer would be preferred to the reference's own: a reward that means the same for every prompt.

Rewards of a Bradley-Terry model are comparable within a prompt alone, so in PPO their offset from prompt to prompt is noise that
the critic has to learn away first. Against rewards of the reference's answers to the same prompt it cancels, and what is left is
a probability: bounded, so no answer is worth more than being sure to win (Fu et al. 2025, arXiv:2502.18770, "preference as
reward").

The reference answers every prompt once, before training, in a fixed order: a resumed run has the same rewards.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from pipeline.reinforcement.answers import Answer, Prompt
from pipeline.tracking import progress

OWN = 2  # answers of the reference to each prompt
PROMPTS = 256  # answered at a time

Generate = Callable[[Sequence[tuple[Prompt, int]]], list[Answer]]
Rewards = Callable[[Sequence[Answer]], np.ndarray]  # in the units of the ranking loss, (n,)


class Preferred:
    """The mean chance of an answer to win against the reference's, less one half: -0.5 to 0.5."""

    def __init__(self, rewards: Rewards) -> None:
        self.rewards = rewards
        self.theirs: dict[str, np.ndarray] = {}  # prompt -> rewards of the reference's answers, (OWN,)

    def ask(self, prompts: Sequence[Prompt], generate: Generate) -> None:
        """Let the reference answer these prompts."""
        with progress(total=len(prompts), desc="the reference's answers", unit="prompt") as bar:
            for first in range(0, len(prompts), PROMPTS):
                some = prompts[first : first + PROMPTS]
                given = generate([(prompt, number) for prompt in some for number in range(OWN)])
                table = self.rewards(given).reshape(len(some), OWN)
                self.theirs |= {prompt.id: row for prompt, row in zip(some, table, strict=True)}
                bar.update(len(some))

    def __call__(self, answers: Sequence[Answer]) -> list[float | None]:
        """A number for each answer; its prompt must have been asked."""
        mine = self.rewards(answers)
        return [
            chance(reward, self.theirs[answer.prompt.id]) - 0.5 for reward, answer in zip(mine, answers, strict=True)
        ]


def chance(reward: float, theirs: np.ndarray) -> float:
    """Mean of sigmoid(reward - r) over their rewards r: how often Bradley and Terry expect it to be preferred."""
    return float(torch.from_numpy(float(reward) - theirs.astype(np.float64)).sigmoid().mean())
