"""Hand-made prompts, answers and rollouts, and streams of them: what the tests of reinforcement learning share."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.batches.batch import Piece, TokenBatch, token_batch
from pipeline.generation.sampling import Sampling, sampler
from pipeline.ingest.records import Pair
from pipeline.learning.processes import Ranks
from pipeline.model.transformer import Transformer
from pipeline.rl import answers
from pipeline.rl.answers import Answer, Prompt
from pipeline.rl.rewards import Score
from pipeline.rl.rollout import Method, Rollout, RolloutConfig, RolloutStream
from pipeline.run.device import stable_hash
from pipeline.text.tokenizer import Tokenizer

Request = tuple[Prompt, int]
PAD, LONGEST = 0, 9


def prompt(number: int, length: int = 2) -> Prompt:
    """Prompt p0, p1, ..., whose ids are its number, its number + 100, and so on."""
    said = [{"role": "user", "content": str(number)}]
    record = Pair(id=f"p{number}", source="made", kind="story", prompt=said, chosen=said, rejected=[])
    return Prompt(f"p{number}", [number + 100 * place for place in range(length)], "story", record)


def answer(of: Prompt, sample: int, ids: Sequence[int], *, logprob: float = -0.5, finished: bool = True) -> Answer:
    """An answer in which every token has the same log-probability."""
    return Answer(of, sample, list(ids), [logprob] * len(ids), finished, " ".join(map(str, ids)))


def rollout(
    number: int, sample: int, length: int, total: float | None, *, finished: bool = True, logprob: float = -0.5
) -> Rollout:
    """Sample `sample` of prompt `number`, of `length` tokens, with a score."""
    one = answer(prompt(number), sample, range(1, length + 1), finished=finished, logprob=logprob)
    return Rollout(one, Score(total, {"part": total}))


def prompts() -> list[Prompt]:
    """Prompts of 1, 4 and 13 tokens."""
    drawn = np.random.default_rng(0)
    return [replace(prompt(n), ids=drawn.integers(20, 300, length).tolist()) for n, length in enumerate((1, 4, 13))]


def sampled(
    model: Transformer,
    tokenizer: Tokenizer,
    temperature: float = 1.0,
    count: int = 30,
    seed: int = 3,
    asked: Sequence[Any] | None = None,
) -> list[Answer]:
    """Sample `count` answers to `prompts`, or answers to `asked`."""
    complete = sampler(model, Sampling(LONGEST, temperature=temperature), {tokenizer.turn_end})
    return answers.sample(complete, asked or answers.repeated(prompts(), count), tokenizer, seed)


def config(**changes: Any) -> RolloutConfig:
    values: dict[str, Any] = {
        "learning_rate": 1e-3,
        "prompts": 4,
        "samples": 3,
        "iterations": 6,
        "epochs": 2,
        "minibatches": 2,
        "max_prompt": 4,
        "max_new_tokens": 5,
    }
    return RolloutConfig(**(values | changes))


def drawn(asked: Sequence[Request]) -> list[Answer]:
    """Answers of 1 to 5 tokens that depend only on prompt and sample; those of 5 tokens do not end."""
    found = []
    for prompt, sample in asked:
        number = stable_hash("drawn", prompt.id, sample)
        ids = [number % 89 + place + 1 for place in range(1 + number % 5)]
        found.append(answer(prompt, sample, ids, logprob=-0.1 - number % 7, finished=number % 5 != 4))
    return found


def scored(given: Sequence[Answer]) -> list[Score]:
    """Scores between 0 and 1, proportional to an answer's first token."""
    return [Score(answer.ids[0] / 89, {"part": answer.ids[0] / 89}) for answer in given]


def annotated(found: list[Rollout]) -> None:
    for one in found:
        one.arrays["reference"] = np.array(one.answer.logprobs) - 0.25


def estimated(found: list[Rollout]) -> dict[str, float]:
    for one in found:
        one.arrays["advantages"] = np.full(len(one.answer.ids), one.total)
    return {"estimated": float(len(found))}


def method(**changes: Any) -> Method:
    values: dict[str, Any] = {"sample": drawn, "score": scored, "annotate": annotated, "estimate": estimated}
    return Method(**(values | changes))


def stream(
    settings: RolloutConfig | None = None,
    how: Method | None = None,
    *,
    prompts: int = 10,
    seed: int = 1,
    ranks: Any = None,
    state: dict[str, Any] | None = None,
    rehearsal: Any = None,
) -> RolloutStream:
    asked = [prompt(number) for number in range(prompts)]
    group = Ranks("fp32", "unused") if ranks is None else ranks
    settings, how = settings or config(), how or method()
    return RolloutStream(asked, settings, how, pad=PAD, seed=seed, ranks=group, state=state, rehearsal=rehearsal)


class Given:
    """A stream of `count` rows per update: row n is one document of n % 7 + 3 tokens, all trained but the first."""

    fingerprint = "given"

    def __init__(self, count: int) -> None:
        self.count = count

    def rows(self, step: int, context: int) -> np.ndarray:
        return np.arange(step * self.count, (step + 1) * self.count)

    def batch(self, step: int, context: int, rows: np.ndarray) -> TokenBatch:
        pieces = [[Piece(np.arange(3 + row % 7), True)] for row in rows.tolist()]
        shape: dict[str, Any] = {"packed": context, "context": context, "pad": PAD, "byte_lengths": np.ones(128, int)}
        return token_batch(pieces, np.arange(len(rows)), **shape)


def names(found: Sequence[Rollout]) -> list[tuple[str, int]]:
    return [(one.answer.prompt.id, one.answer.sample) for one in found]


def filled(settings: RolloutConfig | None = None, how: Method | None = None, **changes: Any) -> RolloutStream:
    one = stream(settings, how, **changes)
    one.fill(0)
    return one


def scored_by(table: Callable[[int], float | None]) -> Callable[[Sequence[Answer]], list[Score]]:
    """Scores by sample number: group k of a run has samples 3k, 3k + 1, 3k + 2."""
    return lambda given: [Score(table(answer.sample), {"part": table(answer.sample)}) for answer in given]
