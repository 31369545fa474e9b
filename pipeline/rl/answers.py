"""Prompts, a policy's answers to them, and the batch rows they form.

    Prompt  --generate-->  Answer (its ids, its log-probabilities, whether it ended)  --rows-->  forward passes

`generate` is an argument (see `generation/`), so any sampler works. The seed of an answer is a hash of (seed, prompt,
sample), independent of batch and process. An answer ends with the end-of-turn token, which the policy produces like any
other; an answer that reaches the token limit is not finished.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from pipeline.run.types import JsonObject
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

ROWS = 64  # per forward pass without gradients


@dataclass(frozen=True)
class Prompt:
    """A prompt for a policy, as ids, and its record with the correct answer or tests."""

    id: str
    ids: list[int]
    kind: str
    record: "Pair | Problem | Task"


@dataclass(frozen=True)
class Task:
    """A task of an environment (rl/episodes.py); `state` and `goal` are plain data used only by the environment."""

    question: str
    tools: list[JsonObject]
    state: JsonObject
    goal: object


@dataclass(frozen=True)
class Answer:
    """One sampled answer: one turn, or several with tool results in between."""

    prompt: Prompt
    sample: int
    ids: list[int]  # all of the answer's tokens, with the end of turn if it was sampled
    logprobs: list[float]  # of each policy token when sampled, in nats at the sampling temperature
    finished: bool
    text: str  # of the last turn, without the end of turn
    # which ids are the policy's; None: all. The others are tool results, which are not trained on
    own: list[bool] | None = field(default=None, kw_only=True)
    calls: list[JsonObject] = field(default_factory=list, kw_only=True)  # {"name", "arguments"}, in order
    # the engine's log-probabilities, if an engine sampled the answer; `logprobs` are then the policy's
    sampled: list[float] | None = field(default=None, kw_only=True)


class Sampled(Protocol):
    """A sampler's result for one answer. `logprobs` has one more entry than `ids` if there is a stop token."""

    @property
    def ids(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[float]: ...
    @property
    def stop(self) -> str: ...


Generate = Callable[[list[list[int]], list[int]], Sequence[Sampled]]  # prompts, seeds -> one answer each


def sample(generate: Generate, requests: Sequence[tuple[Prompt, int]], tokenizer: Tokenizer, seed: int) -> list[Answer]:
    """Sample an answer to each (prompt, sample index)."""
    seeds = [seed_of(seed, prompt, number) for prompt, number in requests]
    completions = generate([prompt.ids for prompt, _ in requests], seeds) if requests else []
    answers = []
    for (prompt, number), completion in zip(requests, completions, strict=True):
        finished = completion.stop == "stop"
        ids = [*completion.ids, tokenizer.turn_end] if finished else list(completion.ids)
        text = tokenizer.decode(completion.ids)
        answers.append(Answer(prompt, number, ids, list(completion.logprobs), finished, text))
    return answers


def seed_of(seed: int, prompt: Prompt, number: int, *turn: int) -> int:
    """The seed of an answer, or of one of its later turns."""
    return stable_hash("rollout", seed, prompt.id, number, *turn) % 2**63


def repeated(prompts: Sequence[Prompt], count: int) -> list[tuple[Prompt, int]]:
    """`count` requests, cycling through the prompts, with sample indices from 0."""
    return [(prompts[n % len(prompts)], n // len(prompts)) for n in range(count)]


def pair_prompts(split: PairSplit, max_new_tokens: int, kinds: Sequence[str] = ()) -> list[Prompt]:
    """The distinct prompts of pairs whose better answer fits in `max_new_tokens`, limited to `kinds` if given.

    Raises DataError if no prompt remains.
    """
    prompts: dict[str, Prompt] = {}
    for encoded in split.pairs:
        pair, start = (
            encoded.pair,
            int(np.argmax(encoded.chosen.trained)),
        )  # where the answer, including tool results, starts
        if len(encoded.chosen.ids) - start > max_new_tokens or (kinds and pair.kind not in kinds):
            continue
        ids = encoded.chosen.ids[:start].tolist()
        prompts.setdefault(chat.render_text(pair.prompt, pair.tools), Prompt(pair.id, ids, pair.kind, pair))
    if not prompts:
        raise DataError(
            f"no preference pair has an answer of at most {max_new_tokens} tokens"
            + (f" and a prompt of the kinds {', '.join(kinds)}" if kinds else "")
            + "; raise max_new_tokens"
        )
    return list(prompts.values())


def problem_prompts(problems: Sequence[Problem], tokenizer: Tokenizer, max_prompt: int) -> list[Prompt]:
    """A prompt for each problem. Raises DataError for a problem without tests, or if too many prompts are too long."""
    for problem in problems:
        if not problem.tests:
            raise DataError(
                f"problem {problem.id} has no tests, so its answers cannot be scored; add tests or remove it"
            )
    return _fitting(
        [(problem.id, problem, problem.question, []) for problem in problems], tokenizer, max_prompt, "code"
    )


def task_prompts(tasks: Mapping[str, Task], tokenizer: Tokenizer, max_prompt: int) -> list[Prompt]:
    """A prompt for each task, by its id. Raises DataError if too many prompts are too long."""
    asked = [(id_, task, task.question, task.tools) for id_, task in tasks.items()]
    return _fitting(asked, tokenizer, max_prompt, "task")


def _fitting(
    asked: Sequence[tuple[str, Problem | Task, str, list[JsonObject]]], tokenizer: Tokenizer, limit: int, kind: str
) -> list[Prompt]:
    """The prompts of at most `limit` tokens, from (id, record, question, tools)."""
    prompts = []
    for id_, record, question, tools in asked:
        ids = chat.render(tokenizer, [{"role": "user", "content": question}], tools, generation_prompt=True).ids
        if len(ids) <= limit:
            prompts.append(Prompt(id_, ids, kind, record))
    if len(prompts) < 0.9 * len(asked) or not prompts:
        raise DataError(
            f"{len(asked) - len(prompts)} of {len(asked)} problems have prompts of more than max_prompt = {limit}"
            " tokens; at most 10% may be left out. Raise max_prompt, or drop these problems from the data"
        )
    return prompts


def rows_of(answers: Sequence[Answer], pad: int) -> Answered:
    """One row per answer, with its prompt. Only the policy's tokens are targets."""
    return answered([piece_of(answer) for answer in answers], pad)


def piece_of(answer: Answer) -> Piece:
    """Prompt and answer concatenated; only the policy's tokens are trained on."""
    ids = np.array(answer.prompt.ids + answer.ids, dtype=np.int64)
    trained = np.arange(len(ids)) >= len(answer.prompt.ids)
    if answer.own is not None:
        trained[len(answer.prompt.ids) :] = answer.own
    return Piece(ids, trained)


def _batches(answers: Sequence[Answer], pad: int, where: torch.device) -> Iterator[Answered]:
    for first in range(0, len(answers), ROWS):
        yield Answered(*(tensor.to(where) for tensor in rows_of(answers[first : first + ROWS], pad)))


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


@torch.no_grad()
def logprobs_of(model: nn.Module, answers: Sequence[Answer], pad: int, temperature: float) -> list[np.ndarray]:
    """Teacher-forced log-probabilities of each answer's tokens under a model, (L,) per answer."""
    arrays: list[np.ndarray] = []
    for rows in _batches(answers, pad, _device(model)):
        logprobs, _ = losses.token_logprobs(model, rows, temperature)
        arrays += split_rows(logprobs.cpu().numpy(), (rows.targets >= 0).sum(1).tolist())
    return arrays


@torch.no_grad()
def values_of(critic: RewardModel, answers: Sequence[Answer], pad: int) -> list[np.ndarray]:
    """The critic's value before each token of an answer, (L,) per answer."""
    arrays: list[np.ndarray] = []
    for rows in _batches(answers, pad, _device(critic)):
        chosen = rows.targets >= 0
        values = critic.normalized(
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
    """Split values of consecutive rows into one array per row."""
    return np.split(flat, np.cumsum(lengths)[:-1])
