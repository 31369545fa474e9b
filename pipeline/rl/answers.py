"""Prompts, the answers that a policy gives to them, and how the two become rows of a batch.

    Prompt  --generate-->  Answer (its ids, its log-probabilities, whether it ended)  --rows-->  forward passes

`generate` is handed in (`generation/` makes it), so every sampler serves. The seed of an answer is hashed from (seed,
prompt, sample): neither batch nor process changes it. Answers end with the end of a turn, which is a token of the
policy like any other; one that reached its limit is not finished.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.batches.batch import Answered, Piece, answered
from pipeline.batches.pairs import PairSplit
from pipeline.ingest.records import Pair, Problem
from pipeline.learning import losses
from pipeline.model.heads import RewardModel
from pipeline.run.device import stable_hash
from pipeline.run.errors import DataError
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

ROWS = 64  # of one forward pass without gradients


@dataclass(frozen=True)
class Prompt:
    """What the policy is asked, as ids, and the record that knows what is right."""

    id: str
    ids: list[int]
    kind: str
    record: Pair | Problem


@dataclass(frozen=True)
class Answer:
    """One sampled answer."""

    prompt: Prompt
    sample: int
    ids: list[int]  # the policy's tokens, the end of the turn included where it came
    logprobs: list[float]  # of each of them when it was sampled, nats at the sampling temperature
    finished: bool
    text: str  # without the end of the turn


class Sampled(Protocol):
    """What a sampler says of one answer; `logprobs` counts the stop token where there is one."""

    @property
    def ids(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[float]: ...
    @property
    def stop(self) -> str: ...


Generate = Callable[[list[list[int]], list[int]], Sequence[Sampled]]  # prompts, seeds -> one answer each


def sample(generate: Generate, asked: Sequence[tuple[Prompt, int]], tokenizer: Tokenizer, seed: int) -> list[Answer]:
    """An answer to each (prompt, sample number)."""
    seeds = [stable_hash("rollout", seed, prompt.id, number) % 2**63 for prompt, number in asked]
    given = generate([prompt.ids for prompt, _ in asked], seeds) if asked else []
    found = []
    for (prompt, number), one in zip(asked, given, strict=True):
        finished = one.stop == "stop"
        ids = [*one.ids, tokenizer.turn_end] if finished else list(one.ids)
        found.append(Answer(prompt, number, ids, list(one.logprobs), finished, tokenizer.decode(one.ids)))
    return found


def repeated(prompts: Sequence[Prompt], count: int) -> list[tuple[Prompt, int]]:
    """`count` requests: every prompt in turn, its samples numbered from 0."""
    return [(prompts[n % len(prompts)], n // len(prompts)) for n in range(count)]


def pair_prompts(split: PairSplit, max_new_tokens: int, kinds: Sequence[str] = ()) -> list[Prompt]:
    """The distinct prompts of pairs whose better answer has room in `max_new_tokens`; `kinds` restricts them.

    Raises DataError when none is left.
    """
    found: dict[str, Prompt] = {}
    for encoded in split.pairs:
        pair, start = (
            encoded.pair,
            int(np.argmax(encoded.chosen.trained)),
        )  # where the answer begins; it may hold results of tools
        if len(encoded.chosen.ids) - start > max_new_tokens or (kinds and pair.kind not in kinds):
            continue
        ids = encoded.chosen.ids[:start].tolist()
        found.setdefault(chat.render_text(pair.prompt, pair.tools), Prompt(pair.id, ids, pair.kind, pair))
    if not found:
        raise DataError(
            f"no prompt of the preference pairs has an answer within {max_new_tokens} tokens"
            + (f" and one of the kinds {', '.join(kinds)}" if kinds else "")
            + "; raise max_new_tokens"
        )
    return list(found.values())


def problem_prompts(problems: Sequence[Problem], tokenizer: Tokenizer, max_prompt: int) -> list[Prompt]:
    """A prompt for each problem. Raises DataError for a problem without tests, or when most are too long."""
    found = []
    for problem in problems:
        if not problem.tests:
            raise DataError(f"problem {problem.id} has no tests, so no answer to it can be scored; add some or drop it")
        ids = chat.render(tokenizer, [{"role": "user", "content": problem.question}], generation_prompt=True).ids
        if len(ids) <= max_prompt:
            found.append(Prompt(problem.id, ids, "code", problem))
    if len(found) < 0.9 * len(problems) or not found:
        raise DataError(
            f"{len(problems) - len(found)} of {len(problems)} problems have prompts of more than max_prompt ="
            f" {max_prompt} tokens; at most a tenth may be left out. Raise max_prompt, or drop them from the data"
        )
    return found


def rows_of(answers: Sequence[Answer], pad: int) -> Answered:
    """Prompt and answer of each in a row; targets are the policy's tokens alone."""
    return answered([piece_of(answer) for answer in answers], pad)


def piece_of(answer: Answer) -> Piece:
    """Prompt and answer on one line, the answer trained."""
    ids = np.array(answer.prompt.ids + answer.ids, dtype=np.int64)
    return Piece(ids, np.arange(len(ids)) >= len(answer.prompt.ids))


def _batches(answers: Sequence[Answer], pad: int, where: torch.device) -> Iterator[Answered]:
    for first in range(0, len(answers), ROWS):
        yield Answered(*(tensor.to(where) for tensor in rows_of(answers[first : first + ROWS], pad)))


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


@torch.no_grad()
def logprobs_of(model: nn.Module, answers: Sequence[Answer], pad: int, temperature: float) -> list[np.ndarray]:
    """Teacher-forced log-probabilities of each answer's tokens under a model, (L,) each."""
    found: list[np.ndarray] = []
    for rows in _batches(answers, pad, _device(model)):
        logprobs, _ = losses.token_logprobs(model, rows, temperature)
        found += split_rows(logprobs.cpu().numpy(), (rows.targets >= 0).sum(1).tolist())
    return found


@torch.no_grad()
def values_of(critic: RewardModel, answers: Sequence[Answer], pad: int) -> list[np.ndarray]:
    """The critic's value before each of an answer's tokens, (L,) each."""
    found: list[np.ndarray] = []
    for rows in _batches(answers, pad, _device(critic)):
        chosen = rows.targets >= 0
        values = critic.normalised(
            critic(rows.input_ids, positions=rows.positions, documents=rows.documents, select=chosen)
        )
        found += split_rows(values.float().cpu().numpy(), chosen.sum(1).tolist())
    return found


@torch.no_grad()
def raw_rewards(model: RewardModel, answers: Sequence[Answer], pad: int) -> Tensor:
    """The reward at each answer's last token, (n,) float32, not normalised."""
    found = []
    for rows in _batches(answers, pad, _device(model)):
        last = (rows.documents >= 0).sum(1) - 1
        ends = torch.arange(rows.documents.shape[1], device=last.device) == last[:, None]
        found.append(
            model(rows.input_ids, positions=rows.positions, documents=rows.documents, select=ends).float().cpu()
        )
    return torch.cat([torch.zeros(0), *found])  # a process may have no answers


def split_rows(flat: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Values that stand row by row, as one array a row."""
    return np.split(flat, np.cumsum(lengths)[:-1])
