"""Rewards: what an answer is worth, in parts that are known by name.

| part          | value                                                                                                |
|---------------|---------------------------------------------------------------------------------------------------------|
| `code_format` | 1: one closed Python block that parses; 0.5: it does not parse; else 0                               |
| `code`        | 0 unless `code_format` is 1; else hidden tests passed / all, by the sandbox                          |
| `tool_call`   | 1: right by BFCL's rules; else 0.1 * parses + 0.4 * (name right) * (argument F1)                     |
| `length`      | 0 up to max_new - c, then (max_new - c - length) / c; -1 unfinished; c = max_new / 4                 |
| `learned`     | the reward model, normalised                                                                         |
| `preferred`   | its chance to be preferred to the reference's answers, less one half (`preferred.py`)                |

A part maps answers to numbers or None: None where it cannot be told, which never counts as 0 (the whole answer is then
unscorable). The total is the sum of weight * part, clipped to +-10. Not promised: that a reward cannot be gamed; the
rewards that run code cannot be forged (`sandbox/`), but tests may be weak.

How often an answer would be preferred to the reference's own: a reward that means the same for every prompt.

Rewards of a Bradley-Terry model are comparable within a prompt alone, so in PPO their offset from prompt to prompt is
noise that the critic has to learn away first. Against rewards of the reference's answers to the same prompt it cancels,
and what is left is a probability: bounded, so no answer is worth more than being sure to win (Fu et al. 2025,
arXiv:2502.18770, "preference as reward").

The reference answers every prompt once, before training, in a fixed order: a resumed run has the same rewards.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pipeline.ingest.records import Pair, Problem
from pipeline.rl.answers import Answer, Prompt
from pipeline.run.errors import ConfigError, DataError
from pipeline.run.tracking import progress
from pipeline.sandbox.judge import Judge, Program, Verdict
from pipeline.text import chat

LIMIT = 10.0
Part = Callable[[Sequence[Answer]], list[float | None]]


@dataclass(frozen=True)
class Score:
    """What one answer is worth; `total` is None where a part could not be told."""

    total: float | None
    parts: dict[str, float | None]
    verdict: str = ""  # the sandbox's, where code was run


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What the parts need; a part whose resource is missing is refused when the scorer is made."""

    max_new_tokens: int
    judge: Judge | None = None
    learned: Callable[[Sequence[Answer]], np.ndarray] | None = None  # a reward model's normalised scores, (n,)
    preferred: Part | None = None  # preferred.Preferred, where prompts were asked
    call_score: Callable[[Pair, str], float] | None = None  # evaluation/tools.call_reward


@dataclass
class Scorer:
    """Scores answers by weighted parts. Raises ConfigError for an unknown part or a missing resource."""

    weights: dict[str, float]
    resources: Resources
    verdicts: dict[int, str] = field(default_factory=dict)  # by place in the batch, of the last call

    def __post_init__(self) -> None:
        if not self.weights:
            raise ConfigError(f"rewards: expected at least one of {', '.join(PARTS)}")
        for name in self.weights:
            if name not in PARTS:
                raise ConfigError(f"rewards: unknown reward {name!r}; valid names: {', '.join(PARTS)}")
        if "code" in self.weights and self.resources.judge is None:
            raise ConfigError("rewards: code needs the sandbox")
        if "learned" in self.weights and self.resources.learned is None:
            raise ConfigError("rewards: learned needs a reward model")
        if "preferred" in self.weights and self.resources.preferred is None:
            raise ConfigError("rewards: preferred needs a reward model and the reference's answers")
        if "tool_call" in self.weights and self.resources.call_score is None:
            raise ConfigError("rewards: tool_call needs prompts whose right call is known")

    def __call__(self, answers: Sequence[Answer]) -> list[Score]:
        """A score for each answer."""
        self.verdicts = {}
        parts = {name: PARTS[name](self, answers) for name in self.weights}
        found = []
        for place in range(len(answers)):
            mine = {name: _finite(values[place]) for name, values in parts.items()}
            known = [self.weights[name] * value for name, value in mine.items() if value is not None]
            total = max(-LIMIT, min(LIMIT, sum(known))) if len(known) == len(mine) else None
            found.append(Score(total, mine, self.verdicts.get(place, "")))
        return found


def _finite(value: float | None) -> float | None:
    """None for what is not a number: clipping would make the best score of it."""
    return value if value is not None and math.isfinite(value) else None


def code_format(scorer: Scorer, answers: Sequence[Answer]) -> list[float | None]:
    """Whether the answer is one Python block that parses."""
    return [format_of(answer) for answer in answers]


def format_of(answer: Answer) -> float:
    """1, 0.5 or 0, as in the table above."""
    if not chat.formatted(answer.text):
        return 0.0
    return 1.0 if chat.tree(chat.extract(answer.text) or "") is not None else 0.5


def code(scorer: Scorer, answers: Sequence[Answer]) -> list[float | None]:
    """Share of the hidden tests that the answer's code passes."""
    judge = scorer.resources.judge
    assert judge is not None
    verdicts = judged(judge, answers)
    scorer.verdicts |= {place: "no_code" if v is None else v.verdict for place, v in enumerate(verdicts)}
    return [0.0 if verdict is None else verdict.score for verdict in verdicts]


def judged(judge: Judge, answers: Sequence[Answer]) -> list[Verdict | None]:
    """What the sandbox says of each answer; None where it is not one block of code that parses."""
    found: list[Verdict | None] = [None] * len(answers)
    asked = [place for place, answer in enumerate(answers) if format_of(answer) == 1.0]
    for place, verdict in zip(asked, judge.judge([program_of(answers[n]) for n in asked]), strict=True):
        found[place] = verdict
    return found


def program_of(answer: Answer) -> Program:
    """The answer's code with the hidden tests of its problem (all of them where none is hidden)."""
    record = answer.prompt.record
    if isinstance(record, Problem):
        entry_point, tests = record.entry_point, record.tests
    elif record.truth and "tests" in record.truth:
        entry_point, tests = record.truth["entry_point"], record.truth["tests"]
    else:
        raise DataError(f"prompt {answer.prompt.id} of kind {answer.prompt.kind!r} has no tests, which `code` needs")
    hidden = [test for test in tests if not test.get("visible", False)]
    return Program(source=chat.extract(answer.text), entry_point=entry_point, tests=hidden or tests)


def length(scorer: Scorer, answers: Sequence[Answer]) -> list[float | None]:
    """Nothing lost while the answer is short; a slope in the last quarter; -1 where it did not end (Yu et al. 2025,
    eq. 13).
    """
    most = scorer.resources.max_new_tokens
    slope = most / 4
    return [min(0.0, (most - slope - len(answer.ids)) / slope) if answer.finished else -1.0 for answer in answers]


def learned(scorer: Scorer, answers: Sequence[Answer]) -> list[float | None]:
    """The reward model's score, normalised by its mean and spread over the base model's answers."""
    score = scorer.resources.learned
    assert score is not None
    return [float(value) for value in score(answers)]


def preferred(scorer: Scorer, answers: Sequence[Answer]) -> list[float | None]:
    """How often the answer would be preferred to the reference's."""
    score = scorer.resources.preferred
    assert score is not None
    return score(answers)


def tool_call(scorer: Scorer, answers: Sequence[Answer]) -> list[float | None]:
    """How right the calls of an answer are. Raises DataError for a prompt whose right answer nobody knows."""
    score = scorer.resources.call_score
    assert score is not None
    found: list[float | None] = []
    for answer in answers:
        record = answer.prompt.record
        if not isinstance(record, Pair) or not record.truth or "right" not in record.truth:
            raise DataError(
                f"prompt {answer.prompt.id} of kind {answer.prompt.kind!r} has no right call, which `tool_call` needs"
            )
        found.append(score(record, answer.text))
    return found


PARTS: dict[str, Callable[[Scorer, Sequence[Answer]], list[float | None]]] = {
    "code_format": code_format,
    "code": code,
    "tool_call": tool_call,
    "length": length,
    "learned": learned,
    "preferred": preferred,
}


# -- preferred ---------------------------------------------------------------------------------------------------------


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
