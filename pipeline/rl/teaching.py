"""Distillation: a teacher's answers, recorded once (`data/taught`), and how a policy learns from them.

    models/<teacher> + prompts --> answers.jsonl      id, sample, ids, logprobs, finished: one answer per line
                                   top_k.safetensors  ids, logprobs (N, k): the k most likely tokens at each position
                                   meta.json          the teacher and its tokenizer, by hash; temperature, k

`Taught` reads these files. `Lessons` provides the functions of a `rollout.Method`: an answer to a prompt is the
student's own with probability `on_policy`, else one of the teacher's, chosen by a hash of (seed, prompt, sample). If
`on_policy` is 0, the recorded probabilities suffice and the teacher is not needed again; otherwise, it rescores every
answer.

An answer's score is the mean, over its tokens, of the teacher's log-probability minus the sampling model's.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from pipeline.generation.sampling import Sampling, sampler
from pipeline.learning import distillation, losses, policy_losses
from pipeline.learning.distillation import Kept, Teacher, Whole
from pipeline.learning.losses import Loss, Term
from pipeline.learning.policy_losses import METHODS
from pipeline.model.transformer import Transformer
from pipeline.rl import answers
from pipeline.rl.answers import ROWS, Answer, Prompt
from pipeline.rl.models import CausalSetting
from pipeline.rl.rewards import Score
from pipeline.rl.rollout import Rollout, RolloutBatch
from pipeline.run.device import Hardware, stable_hash
from pipeline.run.errors import ConfigError, DataError, ModelError
from pipeline.run.tracking import progress
from pipeline.text.tokenizer import Tokenizer

LOSSES = ("jsd", "minillm")
ANSWERS, TOP_K, META = "answers.jsonl", "top_k.safetensors", "meta.json"
AT_ONCE = 256  # answers between progress bar updates


@dataclass(frozen=True)
class TeacherAnswer:
    """One of the teacher's answers, with the teacher's k most likely tokens at each position."""

    ids: list[int]
    logprobs: list[float]  # of each token when it was sampled
    finished: bool
    top_ids: np.ndarray  # (L, k) int32
    top_logprobs: np.ndarray  # (L, k) float32


def said_by(
    teacher: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    *,
    samples: int,
    max_new_tokens: int,
    temperature: float,
    hardware: Hardware,
    seed: int,
) -> list[Answer]:
    """Sample `samples` teacher answers to each prompt, prompt by prompt."""
    requests = [(prompt, number) for prompt in prompts for number in range(samples)]
    given: list[Answer] = []
    with progress(total=len(requests), desc="the teacher's answers", unit="answer") as bar, hardware.autocast():
        generate = sampler(teacher, Sampling(max_new_tokens, temperature=temperature), {tokenizer.turn_end})
        for first in range(0, len(requests), AT_ONCE):
            part = requests[first : first + AT_ONCE]
            given += answers.sample(generate, part, tokenizer, seed)
            bar.update(len(part))
    return given


@torch.no_grad()
def most_likely(
    teacher: Transformer, given: Sequence[Answer], *, pad: int, k: int, temperature: float, hardware: Hardware
) -> tuple[np.ndarray, np.ndarray]:
    """The k most likely tokens at each position of the answers, with log-probabilities: (N, k) int32 and float32."""

    def top(hidden: Tensor, table: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        size = max(losses.EVEN_ROWS, losses.MOST_LOGITS // len(table))
        parts = [
            distillation.log_probabilities(hidden[first : first + size], table, temperature).topk(k)
            for first in range(0, len(hidden), size)
        ]
        return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])

    where = next(teacher.parameters()).device
    ids, logprobs = [np.zeros((0, k), np.int32)], [np.zeros((0, k), np.float32)]
    with progress(total=len(given), desc="the teacher's probabilities", unit="answer") as bar, hardware.autocast():
        for first in range(0, len(given), ROWS):
            rows = answers.rows_of(given[first : first + ROWS], pad)
            indices, values = losses.read_out(teacher, type(rows)(*(tensor.to(where) for tensor in rows)), top)
            ids.append(indices.to("cpu", torch.int32).numpy())
            logprobs.append(values.float().cpu().numpy())
            bar.update(len(rows.input_ids))
    return np.concatenate(ids), np.concatenate(logprobs)


def write(
    folder: Path,
    given: Sequence[Answer],
    top: tuple[np.ndarray, np.ndarray],
    *,
    tokenizer: Tokenizer,
    temperature: float,
    teacher: str,
) -> None:
    """Write data/taught. `top` has a row per answer token, in order; `teacher` is the digest of the teacher."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ANSWERS).open("w", encoding="utf-8") as file:
        for answer in given:
            line = {"id": answer.prompt.id, "sample": answer.sample, "ids": answer.ids}
            line |= {"logprobs": answer.logprobs, "finished": answer.finished, "text": answer.text}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    save_file({"ids": top[0], "logprobs": top[1]}, folder / TOP_K)
    meta = {"tokenizer": tokenizer.hash, "temperature": temperature, "teacher": teacher, "k": int(top[0].shape[1])}
    (folder / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def mass(logprobs: np.ndarray) -> float:
    """The mean total probability of the k most likely tokens."""
    return float(np.exp(logprobs).sum(1).mean())


class Taught:
    """data/taught. Raises ModelError, ConfigError or DataError if the student cannot learn from it."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, *, temperature: float, max_new_tokens: int) -> None:
        """Answers of more than `max_new_tokens` tokens are left out and counted in `dropped`."""
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        if meta["tokenizer"] != tokenizer.hash:
            raise ModelError(
                f"{folder}: the teacher's tokenizer differs from the student's, so its tokens cannot be used;"
                " choose a teacher with the same tokenizer (teach.teacher)"
            )
        if meta["temperature"] != temperature:
            raise ConfigError(
                f"distill.temperature: expected {meta['temperature']}, as used to create {folder}"
                f" (teach.temperature), got {temperature}"
            )
        top = load_file(folder / TOP_K)
        self.teacher = str(meta["teacher"])
        self.k, self.dropped = int(meta["k"]), 0
        self.of: dict[str, list[TeacherAnswer]] = {}  # prompt -> answers
        first = 0
        for line in (folder / ANSWERS).read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            rows = slice(first, first + len(record["ids"]))
            first = rows.stop
            if len(record["ids"]) > max_new_tokens:
                self.dropped += 1
                continue
            said = TeacherAnswer(
                record["ids"], record["logprobs"], record["finished"], top["ids"][rows], top["logprobs"][rows]
            )
            self.of.setdefault(record["id"], []).append(said)
        if first != len(top["ids"]):
            raise DataError(
                f"{folder}: {ANSWERS} has {first} tokens, but {TOP_K} has {len(top['ids'])}; run dvc repro stage_teach"
            )

    def answer(self, prompt: str, number: int) -> TeacherAnswer:
        """The teacher's answer for the sample with index `number`."""
        choices = self.of[prompt]
        return choices[number % len(choices)]


@dataclass(frozen=True, kw_only=True)
class Lessons:
    """The functions of a method, for student and teacher answers."""

    setting: CausalSetting
    taught: Taught
    teacher: Transformer | None  # on the device; None: use the recorded probabilities
    on_policy: float
    beta: float
    gamma: float | None  # for MiniLLM's advantages; None: divergence only

    @property
    def temperature(self) -> float:
        """The temperature of sampling and of all probabilities."""
        return self.setting.config.temperature

    def is_own(self, prompt: Prompt, number: int) -> bool:
        """Whether the answer is sampled from the student."""
        if self.on_policy in (0.0, 1.0):
            return self.on_policy == 1.0
        return stable_hash("own answer", self.setting.seed, prompt.id, number) / 2**64 < self.on_policy

    def sample(self, requests: Sequence[tuple[Prompt, int]]) -> list[Answer]:
        """An answer to each (prompt, sample index). Collective: all ranks must call it."""
        own = [request for request in requests if self.is_own(*request)]
        drawn = iter(self.setting.sample(own) if self.on_policy else ())
        return [next(drawn) if self.is_own(*request) else self._said(*request) for request in requests]

    def _said(self, prompt: Prompt, number: int) -> Answer:
        said = self.taught.answer(prompt.id, number)
        ids = said.ids[:-1] if said.finished else said.ids
        text = self.setting.start.tokenizer.decode(ids)
        return Answer(prompt, number, said.ids, said.logprobs, said.finished, text)

    def score(self, given: Sequence[Answer]) -> list[Score]:
        """The scores defined in the module docstring; 0 if there is no teacher to rescore answers."""
        means = [0.0] * len(given)
        if self.teacher is not None:
            with self.setting.hardware.autocast():
                read = answers.logprobs_of(self.teacher, given, self.setting.pad, self.temperature)
            means = [
                float(np.mean(by_teacher - np.array(answer.logprobs)))
                for by_teacher, answer in zip(read, given, strict=True)
            ]
        return [Score(mean, {"teacher": mean}) for mean in means]

    def annotate(self, rollouts: list[Rollout]) -> None:
        """Store what the loss needs for each answer: the teacher's top tokens, or the advantages."""
        if self.teacher is None:
            for rollout in rollouts:
                said = self.taught.answer(rollout.answer.prompt.id, rollout.answer.sample)
                rollout.arrays["top_ids"] = said.top_ids.ravel()
                rollout.arrays["top_logprobs"] = said.top_logprobs.ravel()
        elif self.gamma is not None:
            given = [rollout.answer for rollout in rollouts]
            with self.setting.hardware.autocast():
                read = answers.logprobs_of(self.teacher, given, self.setting.pad, self.temperature)
            for rollout, by_teacher in zip(rollouts, read, strict=True):
                own = np.array(rollout.answer.logprobs)
                rollout.arrays["advantages"] = distillation.advantages(own, by_teacher, self.gamma)

    def teacher_of(self, batch: RolloutBatch) -> Teacher:
        """The teacher at the trained positions of a batch."""
        if self.teacher is None:
            shape = (-1, self.taught.k)
            return Kept(batch.arrays["top_ids"].long().view(shape), batch.arrays["top_logprobs"].view(shape))
        with torch.no_grad():
            hidden = losses.read_out(self.teacher, batch, lambda states, table, targets: states)
        return Whole(hidden, self.teacher.table)

    def loss(self, model: Transformer, batch: RolloutBatch) -> Loss:
        """The loss of a minibatch. `jsd`: divergence per token; `minillm`: also the policy gradient (LOSSES)."""
        compare = partial(
            distillation.compared, teacher=self.teacher_of(batch), beta=self.beta, temperature=self.temperature
        )
        divergences, logprobs = losses.read_out(model, batch, compare)
        term = Term("divergence", divergences.sum())
        if self.gamma is None:
            return Loss([term], {"logprob": (logprobs.detach().sum(), len(logprobs))})
        result = policy_losses.group_policy(
            logprobs,
            -logprobs.detach(),  # its mean is the entropy
            old=batch.old,
            advantages=batch.arrays["advantages"],
            reference=None,
            row_of=batch.row_of,
            num_rows=len(batch.input_ids),
            method=METHODS["dapo"],
            max_tokens=self.setting.config.max_new_tokens,
        )
        return replace(result, terms=[*result.terms, term])
