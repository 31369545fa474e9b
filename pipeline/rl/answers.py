"""Prompts, the answers of a policy to them, and the rows of a batch that both make.

    Prompt  --generate-->  Answer (its ids, its log-probabilities, whether it ended)  --rows-->  forward passes

`generate` is an argument (`generation/` makes it), so that any sampler can serve. The seed of an answer is a hash of
(seed, prompt, sample): neither batch nor process changes it. An answer ends with the end of a turn, a token of the
policy like any other; one that reached its limit is not finished.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
    """The prompt of a policy, as ids, and its record, which has the right answer or tests."""

    id: str
    ids: list[int]
    kind: str
    record: Pair | Problem


@dataclass(frozen=True)
class Answer:
    """One sampled answer."""

    prompt: Prompt
    sample: int
    ids: list[int]  # the policy's tokens, with the end of the turn if it came
    logprobs: list[float]  # of each of them when it was sampled, nats at the sampling temperature
    finished: bool
    text: str  # without the end of the turn
    # by an engine: its log-probabilities; `logprobs` are then the policy's
    sampled: list[float] | None = field(default=None, kw_only=True)


class Sampled(Protocol):
    """A sampler's result for one answer. `logprobs` has one more than `ids` where there is a stop token."""

    @property
    def ids(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[float]: ...
    @property
    def stop(self) -> str: ...


Generate = Callable[[list[list[int]], list[int]], Sequence[Sampled]]  # prompts, seeds -> one answer each


def sample(generate: Generate, requests: Sequence[tuple[Prompt, int]], tokenizer: Tokenizer, seed: int) -> list[Answer]:
    """An answer to each (prompt, sample number)."""
    seeds = [stable_hash("rollout", seed, prompt.id, number) % 2**63 for prompt, number in requests]
    completions = generate([prompt.ids for prompt, _ in requests], seeds) if requests else []
    answers = []
    for (prompt, number), completion in zip(requests, completions, strict=True):
        finished = completion.stop == "stop"
        ids = [*completion.ids, tokenizer.turn_end] if finished else list(completion.ids)
        text = tokenizer.decode(completion.ids)
        answers.append(Answer(prompt, number, ids, list(completion.logprobs), finished, text))
    return answers


def repeated(prompts: Sequence[Prompt], count: int) -> list[tuple[Prompt, int]]:
    """`count` requests: each prompt in turn, with samples numbered from 0."""
    return [(prompts[n % len(prompts)], n // len(prompts)) for n in range(count)]


def pair_prompts(split: PairSplit, max_new_tokens: int, kinds: Sequence[str] = ()) -> list[Prompt]:
    """The distinct prompts of pairs whose better answer fits `max_new_tokens`, of these `kinds` if there are any.

    Raises DataError when none remains.
    """
    prompts: dict[str, Prompt] = {}
    for encoded in split.pairs:
        pair, start = (
            encoded.pair,
            int(np.argmax(encoded.chosen.trained)),
        )  # where the answer starts, tool results included
        if len(encoded.chosen.ids) - start > max_new_tokens or (kinds and pair.kind not in kinds):
            continue
        ids = encoded.chosen.ids[:start].tolist()
        prompts.setdefault(chat.render_text(pair.prompt, pair.tools), Prompt(pair.id, ids, pair.kind, pair))
    if not prompts:
        raise DataError(
            f"no prompt of the preference pairs has an answer within {max_new_tokens} tokens"
            + (f" and one of the kinds {', '.join(kinds)}" if kinds else "")
            + "; raise max_new_tokens"
        )
    return list(prompts.values())


def problem_prompts(problems: Sequence[Problem], tokenizer: Tokenizer, max_prompt: int) -> list[Prompt]:
    """A prompt for each problem. Raises DataError for a problem without tests, or when most are too long."""
    prompts = []
    for problem in problems:
        if not problem.tests:
            raise DataError(f"problem {problem.id} has no tests, so no answer to it can be scored; add some or drop it")
        ids = chat.render(tokenizer, [{"role": "user", "content": problem.question}], generation_prompt=True).ids
        if len(ids) <= max_prompt:
            prompts.append(Prompt(problem.id, ids, "code", problem))
    if len(prompts) < 0.9 * len(problems) or not prompts:
        raise DataError(
            f"{len(problems) - len(prompts)} of {len(problems)} problems have prompts of more than max_prompt ="
            f" {max_prompt} tokens; at most a tenth may be left out. Raise max_prompt, or drop them from the data"
        )
    return prompts


def rows_of(answers: Sequence[Answer], pad: int) -> Answered:
    """A row for each answer, with its prompt. Targets are the policy's tokens alone."""
    return answered([piece_of(answer) for answer in answers], pad)


def piece_of(answer: Answer) -> Piece:
    """Prompt and answer one after the other, with the answer trained."""
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
    arrays: list[np.ndarray] = []
    for rows in _batches(answers, pad, _device(model)):
        logprobs, _ = losses.token_logprobs(model, rows, temperature)
        arrays += split_rows(logprobs.cpu().numpy(), (rows.targets >= 0).sum(1).tolist())
    return arrays


@torch.no_grad()
def values_of(critic: RewardModel, answers: Sequence[Answer], pad: int) -> list[np.ndarray]:
    """The critic's value before each of an answer's tokens, (L,) each."""
    arrays: list[np.ndarray] = []
    for rows in _batches(answers, pad, _device(critic)):
        chosen = rows.targets >= 0
        values = critic.normalised(
            critic(rows.input_ids, positions=rows.positions, documents=rows.documents, select=chosen)
        )
        arrays += split_rows(values.float().cpu().numpy(), chosen.sum(1).tolist())
    return arrays


@torch.no_grad()
def raw_rewards(model: RewardModel, answers: Sequence[Answer], pad: int) -> Tensor:
    """The reward at each answer's last token, (n,) float32, not normalized."""
    rewards = []
    for rows in _batches(answers, pad, _device(model)):
        last = (rows.documents >= 0).sum(1) - 1
        ends = torch.arange(rows.documents.shape[1], device=last.device) == last[:, None]
        rewards.append(
            model(rows.input_ids, positions=rows.positions, documents=rows.documents, select=ends).float().cpu()
        )
    return torch.cat([torch.zeros(0), *rewards])  # a process may have no answers


def split_rows(flat: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Split values of consecutive rows into one array a row."""
    return np.split(flat, np.cumsum(lengths)[:-1])
