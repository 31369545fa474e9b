"""A stream of batches that the policy fills itself: sample, score, estimate, then some epochs of minibatches.

    prompts --sample--> answers --score--> scores --annotate, estimate--> arrays per token --rows--> RolloutBatch

`RolloutStream` is what `fit` trains on (learning/protocols.Rolling). A `Method` has the functions that sample, score
and estimate advantages, so PPO and the group methods differ in two functions. Each process samples its share of the
prompts; then all processes have all answers, so that what is global (whitening, groups) needs no further communication.

States are saved between fills, and a fill is a function of (weights, seed, iteration): a killed run resumes with the
bits of an uninterrupted one.

With a rehearsal, an update also has rows of given data, whose loss is added (`rehearsed_too`), so that the policy
forgets nothing of what it was not asked for.

Alarms are symptoms that a healthy run does not show. They warn and never stop a run. `alarms_of` is a function of the
curve alone, so a resumed run has the same alarms. `watch_alarms` prints each once, when it is new.

An answer may have several turns with the results of tools between them (rl/episodes.py): only what the policy said has
a probability, an advantage and a gradient.
"""

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.batches.batch import IGNORED, Piece, TokenBatch, TokenStream, answered
from pipeline.learning import losses, policy_losses
from pipeline.learning.losses import Loss, Term
from pipeline.learning.policy_losses import GroupMethod
from pipeline.learning.processes import Ranks
from pipeline.learning.settings import TrainingConfig
from pipeline.model.transformer import Transformer
from pipeline.rl.answers import Answer, Prompt, piece_of
from pipeline.rl.rewards import Score
from pipeline.run.device import stable_hash
from pipeline.run.errors import GateError
from pipeline.run.tracking import say
from pipeline.run.types import JsonObject

Array = np.ndarray
EXTRA_ROUNDS = 3  # of dynamic sampling
EMPTY_ITERATIONS = 10  # in a row that end a run
ALL_EQUAL = 1e-6  # a group with a smaller spread of scores has no learning signal
UNSCORABLE_STOPS = 0.05  # the share of answers without a score that ends a run


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(TrainingConfig):
    """A run over the policy's own answers. Exactly one of iterations and passes sets its length."""

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

    length_keys: ClassVar[tuple[str, ...]] = ("iterations", "passes")
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
    """An answer with its score, and the arrays of the method over its tokens, (L,) each."""

    answer: Answer
    score: Score
    arrays: dict[str, Array] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """The score; NaN for an unscorable answer."""
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
    arrays: dict[str, Tensor]  # (N,) float32 each: advantages and others of the method
    counts: dict[str, int]  # tokens, sequences, positions; rehearsed: targets of the given data
    fresh: bool  # the policy has not moved since it sampled
    rehearsed: TokenBatch | None = None

    def to(self, device: torch.device | str) -> "RolloutBatch":
        """The same batch on another device."""
        names = ("input_ids", "targets", "documents", "positions", "row_of", "old")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        arrays = {name: value.to(device) for name, value in self.arrays.items()}
        return replace(self, **moved, arrays=arrays, rehearsed=self.rehearsed and self.rehearsed.to(device))


@dataclass(frozen=True, kw_only=True)
class Method:
    """The functions of a method; see stages/rlhf.py and stages/grpo.py."""

    sample: Callable[[Sequence[tuple[Prompt, int]]], list[Answer]]
    score: Callable[[Sequence[Answer]], list[Score]]
    annotate: Callable[[list[Rollout]], None]  # forward passes, on this process's share: fills `arrays`
    estimate: Callable[[list[Rollout]], dict[str, float]]  # fills "advantages" of all rollouts; numbers to log
    dynamic: bool = False  # replace groups whose scores are all equal


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
        state: JsonObject | None = None,
        rehearsal: TokenStream | None = None,
    ) -> None:
        """`state` is what the method carries from iteration to iteration (a KL coefficient). States include it.

        Each update has a batch of `rehearsal`, where there is one.
        """
        self.prompts, self.config, self.method = list(prompts), config, method
        self.steps_per_rollout = config.steps_per_rollout
        self.tokens_per_epoch = len(self.prompts) * config.row_length
        given = [rehearsal.fingerprint] if rehearsal else []
        identity = json.dumps([[p.id, p.ids] for p in self.prompts] + [seed] + given)
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self.carried = {} if state is None else state
        self.empty_in_row = 0
        self.rollouts: list[Rollout] = []
        self._pad, self._seed, self._ranks, self._rehearsal = pad, seed, ranks, rehearsal

    def fill(self, step: int) -> dict[str, float]:
        """Sample and score the iteration that starts at `step`. Returns numbers to log.

        Raises GateError when too few answers can be scored, or too many iterations have nothing to learn from.
        """
        iteration = step // self.steps_per_rollout
        sampled = self._sample(self._requests(iteration, 0, self.config.prompts))
        used = list(sampled)
        if self.method.dynamic:
            used = informative(used, self.config.samples)
            for extra in range(1, EXTRA_ROUNDS + 1):
                missing = self.config.prompts - len(used) // self.config.samples
                if not missing:
                    break
                more = self._sample(self._requests(iteration, extra, missing))
                sampled += more
                used += informative(more, self.config.samples)
        self._check_scores(sampled, iteration)
        self.rollouts = used
        numbers = numbers_of(sampled, self.config.samples) | (self.method.estimate(used) if used else {})
        self.empty_in_row = 0 if used else self.empty_in_row + 1
        if self.empty_in_row >= EMPTY_ITERATIONS:
            raise GateError(
                f"iteration {iteration}: {EMPTY_ITERATIONS} iterations in a row drew no group whose scores differ, so"
                " there is nothing to learn from. Are the problems all solved, or all too hard? Change the data, the"
                " rewards or samples"
            )
        return numbers

    def _requests(self, iteration: int, extra: int, num: int) -> list[tuple[Prompt, int]]:
        """(prompt, sample number) of a round: the next `num` prompts, in an order shuffled per pass, `samples` each."""
        count, config = len(self.prompts), self.config
        start = iteration * config.prompts + extra * config.prompts  # an extra round looks at the prompts to come
        requests = []
        for position in range(start, start + num):
            epoch, within = divmod(position, count)
            order = np.random.default_rng(stable_hash("prompts", self._seed, epoch) % 2**63).permutation(count)
            prompt = self.prompts[int(order[within])]
            # no two groups share a number
            group = (iteration * (EXTRA_ROUNDS + 1) + extra) * config.prompts + position - start
            first = group * config.samples if config.samples > 1 else epoch
            requests += [(prompt, first + n) for n in range(config.samples)]
        return requests

    def _sample(self, requests: list[tuple[Prompt, int]]) -> list[Rollout]:
        """Rollouts of all requests. This process samples, scores and annotates its share of the prompts."""
        size = self.config.samples
        groups = [requests[first : first + size] for first in range(0, len(requests), size)]
        share = [request for group in groups[self._ranks.rank :: self._ranks.world] for request in group]
        answers = self.method.sample(share)
        mine = [Rollout(answer, score) for answer, score in zip(answers, self.method.score(answers), strict=True)]
        self.method.annotate(mine)
        rollouts = [rollout for rank_rollouts in self._ranks.gather(mine) for rollout in rank_rollouts]
        position = {(prompt.id, number): n for n, (prompt, number) in enumerate(requests)}
        return sorted(rollouts, key=lambda r: position[r.answer.prompt.id, r.answer.sample])

    def _check_scores(self, rollouts: list[Rollout], iteration: int) -> None:
        unscorable = sum(r.score.total is None for r in rollouts)
        if unscorable > UNSCORABLE_STOPS * len(rollouts) and unscorable > 1:
            raise GateError(
                f"iteration {iteration}: {unscorable} of {len(rollouts)} answers could not be scored (at most 5%); the"
                " sandbox or the reward model fails, so going on would learn from what is left by chance"
            )

    def rows(self, step: int, context: int) -> Array:
        """Indices of this update's rollouts. -1 pads, so that each process has as many; -2 - n is row n of the
        rehearsal. These stand between the others, so that each micro-batch has its share.

        An epoch shuffles prompts, not rows: answers to one prompt are neighbors, so that where the rows of a batch
        share a beginning (`attention.Branches`) the prompt is computed once. Only the border of two minibatches may
        separate them.
        """
        iteration, within = divmod(step, self.steps_per_rollout)
        epoch, minibatch = divmod(within, self.config.minibatches)
        rng = np.random.default_rng(stable_hash("minibatches", self._seed, iteration, epoch) % 2**63)
        groups = np.arange(len(self.rollouts)).reshape(-1, self.config.samples)  # (P, G)
        order = groups[rng.permutation(len(groups))].reshape(-1)
        rows = np.array_split(order, self.config.minibatches)[minibatch]
        if self._rehearsal and len(rows):
            given = -2 - self._rehearsal.rows(step, context)
            rows = np.insert(rows, np.arange(len(given)) * len(rows) // len(given), given)
        missing = -len(rows) % self._ranks.world
        return np.concatenate([rows, np.full(missing, -1, dtype=rows.dtype)])

    def batch(self, step: int, context: int, rows: Array) -> RolloutBatch:
        """The batch of these rollouts, and of these rows of the rehearsal."""
        rollouts = [self.rollouts[int(row)] for row in rows if row >= 0]
        pieces = [piece_of(rollout.answer) for rollout in rollouts]
        pieces += [Piece(np.array([self._pad, self._pad]), False)] * max(int((rows == -1).sum()), not pieces)
        padded = answered(pieces, self._pad)
        lengths = [len(rollout.answer.logprobs) for rollout in rollouts]
        names = sorted((rollouts or self.rollouts)[0].arrays) if self.rollouts else []
        counts = {"tokens": sum(lengths), "sequences": len(rollouts), "positions": int((padded.documents >= 0).sum())}
        rehearsed = None
        if self._rehearsal:
            given = -2 - rows[rows <= -2]
            if given.size:
                rehearsed = self._rehearsal.batch(step, context, given)
            elif self._ranks.sharding:  # each rank makes as many passes: this one learns nothing
                rehearsed = self._rehearsal.batch(step, context, self._rehearsal.rows(step, context)[:1])
                rehearsed = replace(rehearsed, targets=torch.full_like(rehearsed.targets, IGNORED))
            counts["rehearsed"] = rehearsed.num_targets if rehearsed else 0
        return RolloutBatch(
            *padded,
            row_of=torch.repeat_interleave(torch.arange(len(rollouts)), torch.tensor(lengths, dtype=torch.int64)),
            old=_concatenate([np.array(rollout.answer.logprobs) for rollout in rollouts]),
            arrays={name: _concatenate([rollout.arrays[name] for rollout in rollouts]) for name in names},
            counts=counts,
            fresh=step % self.steps_per_rollout == 0,
            rehearsed=rehearsed,
        )

    def evaluation(self, tokens: int) -> Iterator[RolloutBatch]:
        """Nothing: a policy is evaluated by its answers, see `Watchers.evaluate`."""
        return iter(())

    def state(self) -> JsonObject:
        """The state for a resume, besides the weights."""
        return {"carried": self.carried, "empty_in_row": self.empty_in_row}

    def load_state(self, state: JsonObject) -> None:
        """Load a `state()`."""
        self.carried.update(state["carried"])
        self.empty_in_row = state["empty_in_row"]


def _concatenate(arrays: Sequence[Array]) -> Tensor:
    """Arrays one after another, float32; there may be none."""
    return torch.from_numpy(np.concatenate([*arrays, np.zeros(0)]).astype(np.float32))


def group_loss(model: Transformer, batch: RolloutBatch, *, method: GroupMethod, config: RolloutConfig) -> Loss:
    """The loss of a group method over a minibatch."""
    logprobs, entropy = losses.token_logprobs(model, batch, config.temperature)
    result = policy_losses.group_policy(
        logprobs,
        entropy,
        old=batch.old,
        advantages=batch.arrays["advantages"],
        reference=batch.arrays["reference"] if method.beta and method.kl_in == "loss" else None,
        row_of=batch.row_of,
        num_rows=len(batch.input_ids),
        method=method,
        max_tokens=config.max_new_tokens,
    )
    return policy_losses.with_agreement(result, logprobs, batch.old) if batch.fresh else result


def rehearsed_too(loss: Callable[..., Loss], policy: Transformer, coefficient: float) -> Callable[..., Loss]:
    """`loss` of an update, and `coefficient` times the cross-entropy of its rehearsal, per token, in nats.

    The gradient of PPO-ptx (Ouyang et al. 2022, arXiv:2203.02155, equation 2). `policy` is the trained model inside
    what wraps it: its gradients meet those of `loss` in the same backward pass.
    """

    def both(model: nn.Module, batch: RolloutBatch) -> Loss:
        result = loss(model, batch)
        total = result.terms[0].sum * 0
        if batch.rehearsed is not None:
            total = losses.read_out(policy, batch.rehearsed, losses.next_token)
        return replace(result, terms=[*result.terms, Term("rehearsal", total, "rehearsed", coefficient)])

    return both


def grouped(rollouts: Sequence[Rollout], samples: int) -> list[Sequence[Rollout]]:
    """The rollouts of each group: `samples` neighbors."""
    return [rollouts[first : first + samples] for first in range(0, len(rollouts), samples)]


def spread(group: Sequence[Rollout]) -> float:
    """The standard deviation of a group's known scores; NaN below two, which are neither equal nor different."""
    known = [rollout.total for rollout in group if rollout.score.total is not None]
    return _deviation(known) if len(known) > 1 else math.nan


def informative(rollouts: Sequence[Rollout], samples: int) -> list[Rollout]:
    """The rollouts of groups whose scores differ."""
    return [rollout for group in grouped(rollouts, samples) if spread(group) > ALL_EQUAL for rollout in group]


def numbers_of(rollouts: Sequence[Rollout], samples: int) -> dict[str, float]:
    """The numbers to log of an iteration, by TRL's names: rewards, lengths, verdicts."""
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


# -- alarms ------------------------------------------------------------------------------------------------------------


WITHOUT_FIT = 10  # iterations of a critic worse than the mean
WITHOUT_SPREAD = 5  # iterations of groups with equal rewards: one iteration of few prompts may have them by chance
EXPLOITED = 2  # evaluations at which gold fell while the proxy rose
LOW_ENTROPY = 0.2  # of the entropy at the start


def alarms_of(rows: Sequence[JsonObject], *, target_kl: float | None = None) -> dict[str, int]:
    """The alarms of a curve: message -> the first step that shows it."""
    alarms: dict[str, int] = {}
    for row in rows:
        for message in _of_row(row, target_kl):
            alarms.setdefault(message, int(row["step"]))
    for name in ("policy/entropy_avg", "entropy"):
        with_entropy = [row for row in rows if name in row]
        for row in with_entropy:
            if row[name] < LOW_ENTROPY * with_entropy[0][name]:
                message = f"{name} is below 20% of its start: the answers become all alike"
                alarms.setdefault(message, int(row["step"]))
    critic = [row for row in rows if "val/var_explained" in row]
    groups = [row for row in rows if "frac_reward_zero_std" in row]
    rewarded = [row for row in rows if "gold" in row and "proxy" in row]
    for subset, bad, times, message in (
        (
            critic,
            [row["val/var_explained"] < 0 for row in critic],
            WITHOUT_FIT,
            f"the critic explained nothing for {WITHOUT_FIT} iterations: raise its rate",
        ),
        (
            groups,
            [row["frac_reward_zero_std"] > 0.9 for row in groups],
            WITHOUT_SPREAD,
            (
                f"nine tenths of the groups had one reward for {WITHOUT_SPREAD} iterations: choose problems of middle"
                " difficulty"
            ),
        ),
        (
            rewarded[1:],
            [b["gold"] < a["gold"] and b["proxy"] > a["proxy"] for a, b in itertools.pairwise(rewarded)],
            EXPLOITED,
            "gold falls while the proxy rises: the reward model is being exploited",
        ),
    ):
        for end in range(times, len(bad) + 1):
            if all(bad[end - times : end]):
                alarms.setdefault(message, int(subset[end - 1]["step"]))
    return alarms


def _of_row(row: JsonObject, target_kl: float | None) -> list[str]:
    """The alarms of a single row."""
    limits = {
        "objective/kl": (-1.0, 4 * target_kl if target_kl else None),
        "val/ratio": (0.9, 1.1),
        "ratio": (0.9, 1.1),
        "policy/clipfrac_avg": (None, 0.3),
        "clip_ratio/region_mean": (None, 0.3),
        "completions/clipped_ratio": (None, 0.5),
        "unscorable": (None, 0.01),
    }
    messages = []
    for name, (low, high) in limits.items():
        value = row.get(name)
        if isinstance(value, int | float):
            if low is not None and value < low:
                messages.append(f"{name} is below {low:g}")
            if high is not None and value > high:
                messages.append(f"{name} is above {high:g}")
    return messages


def watch_alarms(name: str, *, target_kl: float | None = None) -> Callable[[list[JsonObject]], None]:
    """A watcher of the curve that prints new alarms."""
    known: set[str] = set()

    def print_new(rows: list[JsonObject]) -> None:
        for message, step in alarms_of(rows, target_kl=target_kl).items():
            if message not in known:
                known.add(message)
                say(f"alarm: {name}, step {step}: {message}")

    return print_new
