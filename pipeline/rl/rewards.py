"""Rewards: the score of an answer, as a weighted sum of named parts.

| part          | value                                                                                                |
|---------------|------------------------------------------------------------------------------------------------------|
| `code_format` | 1: one closed Python block that parses; 0.5: one that does not parse; else 0                         |
| `code`        | 0 unless `code_format` is 1; else the share of hidden tests passed in the sandbox                    |
| `tool_call`   | 1: correct by BFCL's rules; else 0.1 * parses + 0.4 * (name correct) * (argument F1)                 |
| `length`      | 0 up to max_new - c, then (max_new - c - length) / c; -1 if unfinished; c = max_new / 4              |
| `learned`     | the reward model, normalized                                                                         |
| `preferred`   | probability of being preferred to the reference's answers, minus one half (`Preferred`)              |
| `task`        | degree to which an environment's task is solved, 0 to 1 (rl/episodes.py)                             |

A part maps answers to numbers. None means unknown, which never counts as 0: the answer is then unscorable. The total is
the sum of weight * part, clipped to [-10, 10].

`Preferred` is a reward on the same scale for every prompt. Rewards of a Bradley-Terry model are comparable only within
a prompt, so in PPO their per-prompt offset is noise that the critic has to learn first. Comparing with the rewards of
the reference's answers to the same prompt cancels the offset. The result is a probability, so it is bounded: no answer
is worth more than a sure win (Fu et al. 2025, arXiv:2502.18770, "preference as reward"). The reference answers every
prompt once, before training, in a fixed order, so that a resumed run has the same rewards.

Not guaranteed: that a reward cannot be gamed. The rewards that run code cannot be forged (`sandbox/`), but tests may be
weak.
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
from pipeline.sandbox.judge import Candidate, Judge, Verdict
from pipeline.text import chat

MOST_REWARD = 10.0
REFERENCE_ANSWERS = 2  # reference answers per prompt
PROMPTS = 256  # prompts that the reference answers at a time

Part = Callable[[Sequence[Answer]], list[float | None]]
GenerateAnswers = Callable[[Sequence[tuple[Prompt, int]]], list[Answer]]  # (prompt, sample index) -> an answer to each
Rewards = Callable[[Sequence[Answer]], np.ndarray]  # on the scale of the ranking loss, (n,)


@dataclass(frozen=True)
class Score:
    """The score of an answer; `total` is None where a part is unknown."""

    total: float | None
    parts: dict[str, float | None]
    verdict: str = ""  # from the sandbox, if code was run


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources for the parts. The scorer rejects a part if its resource is missing."""

    max_new_tokens: int
    judge: Judge | None = None
    learned: Rewards | None = None  # a reward model's normalized scores, (n,)
    preferred: Part | None = None  # a `Preferred` after `ask`
    call_score: Callable[[Pair, str], float] | None = None  # evaluation/tools.call_reward
    task: Part | None = None  # an environment's score


@dataclass
class Scorer:
    """Scores answers by weighted parts. Raises ConfigError for an unknown part or a missing resource."""

    weights: dict[str, float]
    resources: Resources
    verdicts: dict[int, str] = field(default_factory=dict)  # of the last call, by answer index

    def __post_init__(self) -> None:
        if not self.weights:
            raise ConfigError(f"rewards: expected at least one of {', '.join(PARTS)}")
        for name in self.weights:
            if name not in PARTS:
                raise ConfigError(f"rewards: unknown reward {name!r}; valid names: {', '.join(PARTS)}")
        if "code" in self.weights and self.resources.judge is None:
            raise ConfigError("rewards: `code` needs the sandbox")
        if "learned" in self.weights and self.resources.learned is None:
            raise ConfigError("rewards: `learned` needs a reward model")
        if "preferred" in self.weights and self.resources.preferred is None:
            raise ConfigError("rewards: `preferred` needs a reward model and the reference's answers")
        if "task" in self.weights and self.resources.task is None:
            raise ConfigError("rewards: `task` needs an environment; set grpo.environment")
        if "tool_call" in self.weights and self.resources.call_score is None:
            raise ConfigError("rewards: `tool_call` needs prompts with a known correct call")

    def __call__(self, answers: Sequence[Answer]) -> list[Score]:
        """A score for each answer."""
        self.verdicts = {}
        parts = {name: PARTS[name](self, answers) for name in self.weights}
        scores = []
        for index in range(len(answers)):
            values = {name: _finite(part[index]) for name, part in parts.items()}
            weighted = [self.weights[name] * value for name, value in values.items() if value is not None]
            total = max(-MOST_REWARD, min(MOST_REWARD, sum(weighted))) if len(weighted) == len(values) else None
            scores.append(Score(total, values, self.verdicts.get(index, "")))
        return scores


def _finite(value: float | None) -> float | None:
    """None for a non-finite value: clipping could turn it into the best score."""
    return value if value is not None and math.isfinite(value) else None


def code_format(scorer: Scorer, answers: Sequence[Answer]) -> list[float | None]:
    """Whether the answer is a single Python block that parses."""
    return [format_of(answer) for answer in answers]


def format_of(answer: Answer) -> float:
    """1, 0.5 or 0, as in the module docstring's table."""
    if not chat.formatted(answer.text):
        return 0.0
    return 1.0 if chat.tree(chat.extract(answer.text) or "") is not None else 0.5


def code(scorer: Scorer, answers: Sequence[Answer]) -> list[float | None]:
    """Share of the hidden tests passed by the answer's code."""
    judge = scorer.resources.judge
    assert judge is not None
    verdicts = judged(judge, answers)
    scorer.verdicts |= {index: "no_code" if v is None else v.verdict for index, v in enumerate(verdicts)}
    return [0.0 if verdict is None else verdict.score for verdict in verdicts]


def judged(judge: Judge, answers: Sequence[Answer]) -> list[Verdict | None]:
    """The sandbox's verdict on each answer; None if it is not a single code block that parses."""
    verdicts: list[Verdict | None] = [None] * len(answers)
    parsed = [index for index, answer in enumerate(answers) if format_of(answer) == 1.0]
    for index, verdict in zip(parsed, judge.judge([program_of(answers[n]) for n in parsed]), strict=True):
        verdicts[index] = verdict
    return verdicts


def program_of(answer: Answer) -> Candidate:
    """The answer's code with the hidden tests of its problem (all tests if none are hidden)."""
    record = answer.prompt.record
    source = chat.extract(answer.text)
    if isinstance(record, Problem):
        entry_point, tests, source = record.entry_point, record.tests, record.program(source)
    elif isinstance(record, Pair) and record.truth and "tests" in record.truth:
        entry_point, tests = record.truth["entry_point"], record.truth["tests"]
    else:
        raise DataError(f"prompt {answer.prompt.id} of kind {answer.prompt.kind!r} has no tests, which `code` needs")
    hidden = [test for test in tests if not test.get("visible", False)]
    return Candidate(source=source, entry_point=entry_point, tests=hidden or tests)


def length(scorer: Scorer, answers: Sequence[Answer]) -> list[float | None]:
    """0 for short answers, falling in the last quarter, -1 if unfinished (Yu et al. 2025, arXiv:2503.14476, eq. 13)."""
    most = scorer.resources.max_new_tokens
    slope = most / 4
    return [min(0.0, (most - slope - len(answer.ids)) / slope) if answer.finished else -1.0 for answer in answers]


def learned(scorer: Scorer, answers: Sequence[Answer]) -> list[float | None]:
    """The reward model's score, normalized by its mean and standard deviation over the base model's answers."""
    score = scorer.resources.learned
    assert score is not None
    return [float(value) for value in score(answers)]


def preferred(scorer: Scorer, answers: Sequence[Answer]) -> list[float | None]:
    """The probability that the answer is preferred to the reference's, minus one half."""
    score = scorer.resources.preferred
    assert score is not None
    return score(answers)


def tool_call(scorer: Scorer, answers: Sequence[Answer]) -> list[float | None]:
    """How correct the calls of an answer are. Raises DataError for a prompt without a correct call."""
    score = scorer.resources.call_score
    assert score is not None
    values: list[float | None] = []
    for answer in answers:
        record = answer.prompt.record
        if not isinstance(record, Pair) or not record.truth or "right" not in record.truth:
            raise DataError(
                f"prompt {answer.prompt.id} of kind {answer.prompt.kind!r} has no correct call, which `tool_call` needs"
            )
        values.append(score(record, answer.text))
    return values


def task(scorer: Scorer, answers: Sequence[Answer]) -> list[float | None]:
    """The degree to which the task is solved, according to the environment."""
    score = scorer.resources.task
    assert score is not None
    return score(answers)


PARTS: dict[str, Callable[[Scorer, Sequence[Answer]], list[float | None]]] = {
    "code_format": code_format,
    "code": code,
    "tool_call": tool_call,
    "length": length,
    "learned": learned,
    "preferred": preferred,
    "task": task,
}


# -- preference over the reference -------------------------------------------------------------------------------------


class Preferred:
    """The mean probability that an answer beats the reference's, minus one half: -0.5 to 0.5."""

    def __init__(self, rewards: Rewards) -> None:
        self.rewards = rewards
        self.theirs: dict[str, np.ndarray] = {}  # prompt -> rewards of the reference's answers, (REFERENCE_ANSWERS,)

    def ask(self, prompts: Sequence[Prompt], generate: GenerateAnswers) -> None:
        """Sample the reference's answers to these prompts and store their rewards."""
        with progress(total=len(prompts), desc="the reference's answers", unit="prompt") as bar:
            for first in range(0, len(prompts), PROMPTS):
                batch = prompts[first : first + PROMPTS]
                answers = generate([(prompt, number) for prompt in batch for number in range(REFERENCE_ANSWERS)])
                table = self.rewards(answers).reshape(len(batch), REFERENCE_ANSWERS)
                self.theirs |= {prompt.id: row for prompt, row in zip(batch, table, strict=True)}
                bar.update(len(batch))

    def __call__(self, answers: Sequence[Answer]) -> list[float | None]:
        """The value of each answer; its prompt must have been passed to `ask`."""
        rewards = self.rewards(answers)
        return [
            chance(reward, self.theirs[answer.prompt.id]) - 0.5 for reward, answer in zip(rewards, answers, strict=True)
        ]


def chance(reward: float, theirs: np.ndarray) -> float:
    """Mean of sigmoid(reward - r) over the rewards r in `theirs`: the Bradley-Terry probability of being preferred."""
    return float(torch.from_numpy(float(reward) - theirs.astype(np.float64)).sigmoid().mean())
