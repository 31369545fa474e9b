"""A stream of batches that the policy fills itself: sample, score, estimate, then some epochs of minibatches.

    prompts --sample--> answers --score--> scores --annotate, estimate--> arrays per token --rows--> RolloutBatch

`RolloutStream` is what `fit` trains on (learning/protocols.Rolling). How answers are sampled, scored and turned into
advantages is handed in, so PPO and the group methods differ in two functions. Each process samples its share of the
prompts; then all know all answers, so what is global (whitening, groups) needs no further word between them.

States are saved between fills, and a fill is a function of (weights, seed, iteration): a killed run goes on with the
bits of an uninterrupted one. Answers are one turn; tool results inside an answer are not sampled here.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pipeline.batches.batch import Piece, answered
from pipeline.learning.processes import Ranks
from pipeline.learning.settings import TrainingConfig
from pipeline.rl.answers import Answer, Prompt, piece_of
from pipeline.rl.rewards import Score
from pipeline.run.device import stable_hash
from pipeline.run.errors import GateError

Array = np.ndarray
EXTRA_ROUNDS = 3  # of dynamic sampling
EMPTY_ITERATIONS = 10  # in a row, and the run stops
ALL_EQUAL = 1e-6  # a group whose scores spread less teaches nothing
UNSCORABLE_STOPS = 0.05  # the share of answers without a score that ends a run


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(TrainingConfig):
    """A run over answers that the policy gives itself. Exactly one of iterations and passes says how long it is."""

    prompts: int
    """Of an iteration."""
    samples: int = 1
    """Answers to each prompt."""
    iterations: int | None = None
    """Fills."""
    passes: float | None = None
    """or: so often over the prompts."""
    epochs: int = 1
    """Over the answers of an iteration."""
    minibatches: int = 1
    """Updates of an epoch."""
    max_prompt: int
    """tokens; longer prompts are left out and counted."""
    max_new_tokens: int
    """Of an answer."""
    temperature: float = 1.0
    """Of sampling, and of every log-probability."""
    on_spike: str = "ignore"
    """skip, stop, or ignore: norms of policies are heavy-tailed, six deviations are nothing rare."""

    length_key: ClassVar[str] = "max_prompt + max_new_tokens"

    def __post_init__(self) -> None:
        if (self.iterations is None) == (self.passes is None):
            raise ValueError("expected exactly one of iterations and passes")
        counts = (self.prompts, self.samples, self.epochs, self.minibatches, self.max_prompt, self.max_new_tokens)
        length = self.passes if self.iterations is None else self.iterations
        if min(counts) < 1 or (length or 0) <= 0 or self.temperature <= 0:
            raise ValueError(
                "prompts, samples, iterations, passes, epochs, minibatches, max_prompt, max_new_tokens, temperature: "
                "expected > 0"
            )
        if "rollback" in (self.on_spike, self.on_nonfinite):
            raise ValueError("on_spike, on_nonfinite: expected skip or stop; a policy cannot go back to other data")
        if self.prompts * self.samples < self.minibatches:
            raise ValueError(f"minibatches: expected at most prompts * samples, got {self.minibatches}")
        self.check()

    @property
    def row_length(self) -> int:
        """Prompt and answer."""
        return self.max_prompt + self.max_new_tokens

    @property
    def trained_length(self) -> int:
        return self.max_new_tokens

    @property
    def rows(self) -> int:
        """Answers of an update; the last one of an epoch may have fewer."""
        return math.ceil(self.prompts * self.samples / self.minibatches)

    @property
    def steps_per_rollout(self) -> int:
        """Updates between two fills."""
        return self.epochs * self.minibatches

    def resolve_steps(self, tokens_per_epoch: int) -> int:
        """Updates of the whole run; `tokens_per_epoch` are prompts * row_length."""
        if self.iterations is not None:
            return self.iterations * self.steps_per_rollout
        num_prompts = tokens_per_epoch / self.row_length
        return max(1, round((self.passes or 0) * num_prompts / self.prompts)) * self.steps_per_rollout


@dataclass
class Rollout:
    """An answer with its score, and what the method computes for each of its tokens, (L,) each."""

    answer: Answer
    score: Score
    arrays: dict[str, Array] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """The score; NaN where it could not be told."""
        return math.nan if self.score.total is None else self.score.total


@dataclass(frozen=True)
class RolloutBatch:
    """`B` answers with `N` policy tokens in all."""

    input_ids: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64, -100 outside the policy's tokens
    documents: Tensor  # (B, T) int32
    positions: Tensor  # (B, T) int64
    row_of: Tensor  # (N,) int64, the row of each policy token
    old: Tensor  # (N,) float32, log-probabilities when sampled
    arrays: dict[str, Tensor]  # (N,) float32 each: advantages and what else the method made
    counts: dict[str, int]  # tokens, sequences, positions
    fresh: bool  # the policy has not moved since it sampled

    def to(self, device: torch.device | str) -> "RolloutBatch":
        """The same batch on another device."""
        names = ("input_ids", "targets", "documents", "positions", "row_of", "old")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return replace(self, **moved, arrays={name: value.to(device) for name, value in self.arrays.items()})


@dataclass(frozen=True, kw_only=True)
class Method:
    """What a method does with answers; see stages/rlhf.py and stages/grpo.py."""

    sample: Callable[[Sequence[tuple[Prompt, int]]], list[Answer]]
    score: Callable[[Sequence[Answer]], list[Score]]
    annotate: Callable[[list[Rollout]], None]  # forward passes, on this process's share: fills `arrays`
    estimate: Callable[[list[Rollout]], dict[str, float]]  # "advantages" of all rollouts; numbers to log
    dynamic: bool = False  # draw again for groups whose scores are all equal


class RolloutStream:
    """Minibatches of the policy's own answers."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        config: RolloutConfig,
        method: Method,
        *,
        pad: int,
        seed: int,
        ranks: Ranks,
        state: dict[str, Any] | None = None,
    ) -> None:
        """`state` is what the method carries from iteration to iteration (a KL coefficient); it travels in the
        states.
        """
        self.prompts, self.config, self.method = list(prompts), config, method
        self.steps_per_rollout = config.steps_per_rollout
        self.tokens_per_epoch = len(self.prompts) * config.row_length
        identity = json.dumps([[p.id, p.ids] for p in self.prompts] + [seed])
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self.carried = {} if state is None else state
        self.empty_in_row = 0
        self.rollouts: list[Rollout] = []
        self._pad, self._seed, self._ranks = pad, seed, ranks

    # -- filling -------------------------------------------------------------------------------------------------------

    def fill(self, step: int) -> dict[str, float]:
        """Sample and score the iteration that begins at `step`. Raises GateError when too little can be scored or
        learnt.
        """
        iteration = step // self.steps_per_rollout
        found = self._drawn(self._asked(iteration, 0, self.config.prompts))
        drawn = list(found)
        if self.method.dynamic:
            found = informative(found, self.config.samples)
            for extra in range(1, EXTRA_ROUNDS + 1):
                missing = self.config.prompts - len(found) // self.config.samples
                if not missing:
                    break
                more = self._drawn(self._asked(iteration, extra, missing))
                drawn += more
                found += informative(more, self.config.samples)
        self._check_scores(drawn, iteration)
        self.rollouts = found
        numbers = numbers_of(drawn, self.config.samples) | (self.method.estimate(found) if found else {})
        self.empty_in_row = 0 if found else self.empty_in_row + 1
        if self.empty_in_row >= EMPTY_ITERATIONS:
            raise GateError(
                f"iteration {iteration}: {EMPTY_ITERATIONS} iterations in a row drew no group whose scores differ, so"
                " there is nothing to learn from. Are the problems all solved, or all too hard? Change the data, the"
                " rewards or samples"
            )
        return numbers

    def _asked(self, iteration: int, extra: int, num: int) -> list[tuple[Prompt, int]]:
        """The requests of a round: the next `num` prompts in an order shuffled per pass, each with its sample
        numbers.
        """
        count, config = len(self.prompts), self.config
        start = iteration * config.prompts + extra * config.prompts  # an extra round looks at the prompts to come
        asked = []
        for place in range(start, start + num):
            turn, within = divmod(place, count)
            order = np.random.default_rng(stable_hash("prompts", self._seed, turn) % 2**63).permutation(count)
            prompt = self.prompts[int(order[within])]
            group = (
                (iteration * (EXTRA_ROUNDS + 1) + extra) * config.prompts + place - start
            )  # no two groups share a number
            first = group * config.samples if config.samples > 1 else turn
            asked += [(prompt, first + n) for n in range(config.samples)]
        return asked

    def _drawn(self, asked: list[tuple[Prompt, int]]) -> list[Rollout]:
        """Rollouts of all requests; this process samples, scores and annotates its share of the prompts."""
        groups = [asked[first : first + self.config.samples] for first in range(0, len(asked), self.config.samples)]
        share = [request for group in groups[self._ranks.rank :: self._ranks.world] for request in group]
        answers = self.method.sample(share)
        mine = [Rollout(answer, score) for answer, score in zip(answers, self.method.score(answers), strict=True)]
        self.method.annotate(mine)
        shares = self._ranks.gather(mine)
        place = {(prompt.id, number): n for n, (prompt, number) in enumerate(asked)}
        return sorted((r for one in shares for r in one), key=lambda r: place[r.answer.prompt.id, r.answer.sample])

    def _check_scores(self, drawn: list[Rollout], iteration: int) -> None:
        lost = sum(r.score.total is None for r in drawn)
        if lost > UNSCORABLE_STOPS * len(drawn) and lost > 1:
            raise GateError(
                f"iteration {iteration}: {lost} of {len(drawn)} answers could not be scored (at most 5 %); the sandbox"
                " or the reward model fails, so going on would learn from what is left by chance"
            )

    # -- batches -------------------------------------------------------------------------------------------------------

    def rows(self, step: int, context: int) -> Array:
        """Places of this update's rollouts; -1 pads, so that each process has as many.

        An epoch shuffles prompts, not rows: answers to one prompt lie side by side, so that where a batch's rows share
        their beginnings (`attention.Branches`) the prompt is computed once. Only a border between minibatches may part
        them.
        """
        within = step % self.steps_per_rollout
        iteration = step // self.steps_per_rollout
        epoch, part = divmod(within, self.config.minibatches)
        draws = np.random.default_rng(stable_hash("minibatches", self._seed, iteration, epoch) % 2**63)
        groups = np.arange(len(self.rollouts)).reshape(-1, self.config.samples)  # (P, G)
        order = groups[draws.permutation(len(groups))].reshape(-1)
        chosen = np.array_split(order, self.config.minibatches)[part]
        missing = -len(chosen) % self._ranks.world
        return np.concatenate([chosen, np.full(missing, -1, dtype=chosen.dtype)])

    def batch(self, step: int, context: int, rows: Array) -> RolloutBatch:
        """Those rollouts."""
        chosen = [self.rollouts[int(row)] for row in rows if row >= 0]
        pieces = [piece_of(rollout.answer) for rollout in chosen]
        pieces += [Piece(np.array([self._pad, self._pad]), False)] * (len(rows) - len(chosen))
        laid = answered(pieces, self._pad)
        lengths = [len(rollout.answer.ids) for rollout in chosen]
        names = sorted(chosen[0].arrays) if chosen else sorted(self.rollouts[0].arrays) if self.rollouts else []
        arrays = {name: _line([rollout.arrays[name] for rollout in chosen]) for name in names}
        return RolloutBatch(
            *laid,
            row_of=torch.repeat_interleave(torch.arange(len(chosen)), torch.tensor(lengths, dtype=torch.int64)),
            old=_line([np.array(rollout.answer.logprobs) for rollout in chosen]),
            arrays=arrays,
            counts={
                "tokens": sum(lengths),
                "sequences": len(chosen),
                "positions": int((laid.documents >= 0).sum()),
            },
            fresh=step % self.steps_per_rollout == 0,
        )

    def evaluation(self, tokens: int) -> Iterator[RolloutBatch]:
        """Nothing: what a policy is worth is measured by its answers, see `Watchers.evaluate`."""
        return iter(())

    # -- states --------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a resumed run needs besides the weights."""
        return {"carried": self.carried, "empty_in_row": self.empty_in_row}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take what `state` gave."""
        self.carried.update(state["carried"])
        self.empty_in_row = state["empty_in_row"]


def _line(arrays: Sequence[Array]) -> Tensor:
    """Arrays one after another, float32."""
    return torch.from_numpy(np.concatenate([*arrays, np.zeros(0)]).astype(np.float32))


def grouped(rollouts: Sequence[Rollout], samples: int) -> list[Sequence[Rollout]]:
    """The answers to each prompt: `samples` neighbours."""
    return [rollouts[first : first + samples] for first in range(0, len(rollouts), samples)]


def spread(group: Sequence[Rollout]) -> float:
    """The standard deviation of a group's known scores; NaN below two of them: neither equal nor different."""
    known = [rollout.total for rollout in group if rollout.score.total is not None]
    return _deviation(known) if len(known) > 1 else math.nan


def informative(rollouts: Sequence[Rollout], samples: int) -> list[Rollout]:
    """The groups whose scores differ."""
    return [rollout for group in grouped(rollouts, samples) if spread(group) > ALL_EQUAL for rollout in group]


def numbers_of(rollouts: Sequence[Rollout], samples: int) -> dict[str, float]:
    """What is logged of an iteration, by TRL's names: rewards, lengths, verdicts."""
    totals = [r.total for r in rollouts if r.score.total is not None]
    lengths = [len(r.answer.ids) for r in rollouts]
    groups = grouped(rollouts, samples)
    numbers = {
        "reward": _mean(totals),
        "reward_std": _deviation(totals),
        "completions/mean_length": _mean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": _mean([not r.answer.finished for r in rollouts]),
        "unscorable": _mean([r.score.total is None for r in rollouts]),
    }
    if samples > 1:
        numbers["frac_reward_zero_std"] = _mean([spread(group) <= ALL_EQUAL for group in groups])
    for name in rollouts[0].score.parts:
        values = [r.score.parts[name] for r in rollouts]
        known = [value for value in values if value is not None]
        numbers |= {f"rewards/{name}/mean": _mean(known), f"rewards/{name}/std": _deviation(known)}
    verdicts = Counter(r.score.verdict for r in rollouts if r.score.verdict)
    return numbers | {f"verdicts/{name}": float(count) for name, count in sorted(verdicts.items())}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else math.nan


def _deviation(values: Sequence[float]) -> float:
    """Unbiased; 0 below two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
