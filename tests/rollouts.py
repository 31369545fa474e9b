"""Hand-made prompts, answers and rollouts: what the tests of reinforcement share."""

from collections.abc import Sequence

from pipeline.ingest.records import Pair
from pipeline.rl.answers import Answer, Prompt
from pipeline.rl.rewards import Score
from pipeline.rl.rollout import Rollout


def prompt(number: int, length: int = 2) -> Prompt:
    """Prompt p0, p1, ...: its ids are its number, 100 more than that, and so on."""
    said = [{"role": "user", "content": str(number)}]
    record = Pair(id=f"p{number}", source="made", kind="story", prompt=said, chosen=said, rejected=[])
    return Prompt(f"p{number}", [number + 100 * place for place in range(length)], "story", record)


def answer(of: Prompt, sample: int, ids: Sequence[int], *, logprob: float = -0.5, finished: bool = True) -> Answer:
    """An answer whose every token had the same log-probability."""
    return Answer(of, sample, list(ids), [logprob] * len(ids), finished, " ".join(map(str, ids)))


def rollout(
    number: int, sample: int, length: int, total: float | None, *, finished: bool = True, logprob: float = -0.5
) -> Rollout:
    """Sample `sample` of prompt `number`, of `length` tokens, with a score."""
    one = answer(prompt(number), sample, range(1, length + 1), finished=finished, logprob=logprob)
    return Rollout(one, Score(total, {"part": total}))
