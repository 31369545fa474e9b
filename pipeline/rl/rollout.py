"""Rollout batches from the policy's own answers: sample, score, estimate, then several epochs of minibatches.

    prompts --sample--> answers --score--> scores --annotate, estimate--> arrays per token --rows--> RolloutBatch

`fit` trains on a `RolloutStream` (learning/protocols.Rolling). A `Method` provides the functions that sample, score and
estimate advantages, so PPO and the group methods differ only in two functions. Each process samples its share of the
prompts; then the answers are gathered on all processes, so that global operations (whitening, groups) need no further
communication.

States are saved between fills, and a fill is a function of (weights, seed, iteration), so a killed run resumes
bit-exactly.

With a rehearsal, an update also includes rows of other data and adds their loss (`rehearsed_too`), so that the policy
does not forget what the prompts do not cover.

Alarms report symptoms of an unhealthy run. They only warn and never stop it. `alarms_of` is a function of the training
curve only, so a resumed run has the same alarms. `watch_alarms` prints each new alarm once.

An answer may have several turns with tool results in between (rl/episodes.py): only the policy's tokens have a
probability, an advantage and a gradient.
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
EXTRA_ROUNDS = 3  # maximum per iteration, for dynamic sampling
EMPTY_ITERATIONS = 10  # a run ends after this many consecutive iterations with nothing to learn from
ALL_EQUAL = 1e-6  # a group with a smaller spread of scores has no learning signal
UNSCORABLE_STOPS = 0.05  # a run ends if more than this share of answers cannot be scored


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(TrainingConfig):
    """A run that trains on the policy's own answers. Its length is set by exactly one of `iterations` and `passes`."""

    prompts: int
    """Prompts per iteration."""
    samples: int = 1
    """Answers per prompt."""
    iterations: int | None = None
    """Number of rollout iterations."""
    passes: float | None = None
    """Number of passes over the prompts, instead of `iterations`."""
    epochs: int = 1
    """Epochs over the answers of an iteration."""
    minibatches: int = 1
    """Updates per epoch."""
    max_prompt: int
    """Maximum tokens per prompt; longer prompts are left out and counted."""
    max_new_tokens: int
    """Maximum tokens per answer."""
    temperature: float = 1.0
    """For sampling and for all log-probabilities."""
    on_spike: str = "ignore"
    """skip, stop, or ignore. Policy gradient norms are heavy-tailed, so spikes of six deviations are not rare."""

    length_keys: ClassVar[tuple[str, ...]] = ("iterations", "passes")
    length_key: ClassVar[str] = "max_prompt + max_new_tokens"

    def __post_init__(self) -> None:
        if (self.iterations is None) == (self.passes is None):
            raise ValueError("expected exactly one of `iterations` and `passes`")
        counts = (self.prompts, self.samples, self.epochs, self.minibatches, self.max_prompt, self.max_new_tokens)
        length = self.passes if self.iterations is None else self.iterations
        if min(counts) < 1 or (length or 0) <= 0 or self.temperature <= 0:
            raise ValueError(
                "prompts, samples, iterations, passes, epochs, minibatches, max_prompt, max_new_tokens, temperature: "
                "expected values > 0"
            )
        if "rollback" in (self.on_spike, self.on_nonfinite):
            raise ValueError(
                "on_spike, on_nonfinite: expected skip or stop, because a rollback cannot give a policy other data"
            )
        if self.prompts * self.samples < self.minibatches:
            raise ValueError(f"minibatches: expected at most prompts * samples, got {self.minibatches}")
        self.check()

    @property
    def row_length(self) -> int:
        """Maximum tokens of a prompt plus its answer."""
        return self.max_prompt + self.max_new_tokens

    @property
    def trained_length(self) -> int:
        return self.max_new_tokens

    @property
    def rows(self) -> int:
        """Answers per update; the last update of an epoch may have fewer."""
        return math.ceil(self.prompts * self.samples / self.minibatches)

    @property
    def steps_per_rollout(self) -> int:
        """Updates between two fills."""
        return self.epochs * self.minibatches

    def resolve_steps(self, tokens_per_epoch: int) -> int:
        """Number of updates in the run; `tokens_per_epoch` is prompts * row_length."""
        if self.iterations is not None:
            return self.iterations * self.steps_per_rollout
        num_prompts = tokens_per_epoch / self.row_length
        return max(1, round((self.passes or 0) * num_prompts / self.prompts)) * self.steps_per_rollout


@dataclass
class Rollout:
    """An answer with its score and the method's arrays over its tokens, (L,) each."""

    answer: Answer
    score: Score
    arrays: dict[str, Array] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """The score; NaN for an unscorable answer."""
        return math.nan if self.score.total is None else self.score.total


@dataclass(frozen=True)
class RolloutBatch:
    """`B` answers with `N` policy tokens in total."""

    input_ids: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64, -100 outside the policy's tokens
    documents: Tensor  # (B, T) int32
    positions: Tensor  # (B, T) int64
    row_of: Tensor  # (N,) int64, the row of each policy token
    old: Tensor  # (N,) float32, log-probabilities before the update (the policy's own, even if an engine sampled)
    arrays: dict[str, Tensor]  # (N,) float32 each: advantages and the method's other arrays
    counts: dict[str, int]  # tokens, sequences, positions; rehearsed: targets in the rehearsal data
    fresh: bool  # the policy has not been updated since sampling
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
    annotate: Callable[[list[Rollout]], None]  # forward passes on this process's share; fills `arrays`
    estimate: Callable[[list[Rollout]], dict[str, float]]  # fills "advantages" for all rollouts; returns metrics
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
        """`state`: what the method carries across iterations, such as a KL coefficient; included in saved states.

        Each update includes a batch of `rehearsal`, if given.
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
        """Sample and score the iteration that starts at `step`. Returns metrics to log.

        Raises GateError if too few answers can be scored, or too many iterations have nothing to learn from.
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
                f"iteration {iteration}: {EMPTY_ITERATIONS} iterations in a row had no group with different scores, so"
                " there is nothing to learn from. Are the problems all solved, or all too hard? Change the data,"
                " rewards or samples"
            )
        return numbers

    def _requests(self, iteration: int, extra: int, num: int) -> list[tuple[Prompt, int]]:
        """(prompt, sample index) pairs of a round: `samples` for each of the next `num` prompts, shuffled each pass."""
        count, config = len(self.prompts), self.config
        start = iteration * config.prompts + extra * config.prompts  # an extra round uses upcoming prompts
        requests = []
        for position in range(start, start + num):
            epoch, within = divmod(position, count)
            order = np.random.default_rng(stable_hash("prompts", self._seed, epoch) % 2**63).permutation(count)
            prompt = self.prompts[int(order[within])]
            # unique among all groups of the run
            group = (iteration * (EXTRA_ROUNDS + 1) + extra) * config.prompts + position - start
            first = group * config.samples if config.samples > 1 else epoch
            requests += [(prompt, first + n) for n in range(config.samples)]
        return requests

    def _sample(self, requests: list[tuple[Prompt, int]]) -> list[Rollout]:
        """Rollouts for all requests. This process samples, scores and annotates its share of the prompts."""
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
                " sandbox or the reward model is failing, and the remaining answers would be a biased sample"
            )

    def rows(self, step: int, context: int) -> Array:
        """Indices of this update's rollouts. -1 is padding, so that all processes get the same number of rows; -2 - n
        is row n of the rehearsal. Rehearsal rows are interleaved, so that each micro-batch gets its share.

        An epoch shuffles prompts, not rows: answers to the same prompt stay adjacent, so that rows with a common prefix
        (`layers.Branches`) compute the prompt only once. Only a minibatch boundary may separate them.
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
        """The batch of these rollouts and rehearsal rows."""
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
            elif self._ranks.sharding:  # all ranks need the same number of passes; this pass has no targets
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
        """Empty: a policy is evaluated on its answers; see `Watchers.evaluate`."""
        return iter(())

    def state(self) -> JsonObject:
        """The state needed to resume, in addition to the weights."""
        return {"carried": self.carried, "empty_in_row": self.empty_in_row}

    def load_state(self, state: JsonObject) -> None:
        """Load a `state()`."""
        self.carried.update(state["carried"])
        self.empty_in_row = state["empty_in_row"]


def _concatenate(arrays: Sequence[Array]) -> Tensor:
    """Concatenate arrays as float32; there may be none."""
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
    """`loss` plus `coefficient` times the cross-entropy of the update's rehearsal rows, in nats per token.

    This gives the gradient of PPO-ptx (Ouyang et al. 2022, arXiv:2203.02155, equation 2). `policy` is the trained model
    inside any wrapper: its gradients are accumulated with those of `loss` in the same backward pass.
    """

    def both(model: nn.Module, batch: RolloutBatch) -> Loss:
        result = loss(model, batch)
        total = result.terms[0].sum * 0
        if batch.rehearsed is not None:
            total = losses.read_out(policy, batch.rehearsed, losses.next_token)
        return replace(result, terms=[*result.terms, Term("rehearsal", total, "rehearsed", coefficient)])

    return both


def grouped(rollouts: Sequence[Rollout], samples: int) -> list[Sequence[Rollout]]:
    """The rollouts of each group: `samples` consecutive ones."""
    return [rollouts[first : first + samples] for first in range(0, len(rollouts), samples)]


def spread(group: Sequence[Rollout]) -> float:
    """The standard deviation of a group's known scores; NaN for fewer than two (neither equal nor different)."""
    known = [rollout.total for rollout in group if rollout.score.total is not None]
    return _deviation(known) if len(known) > 1 else math.nan


def informative(rollouts: Sequence[Rollout], samples: int) -> list[Rollout]:
    """The rollouts of groups with differing scores."""
    return [rollout for group in grouped(rollouts, samples) if spread(group) > ALL_EQUAL for rollout in group]


def numbers_of(rollouts: Sequence[Rollout], samples: int) -> dict[str, float]:
    """The metrics of an iteration, under TRL's names: rewards, lengths, verdicts."""
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
    """The unbiased standard deviation; 0 for fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


# -- alarms ------------------------------------------------------------------------------------------------------------


WITHOUT_FIT = 10  # iterations with a critic worse than predicting the mean
WITHOUT_SPREAD = 5  # iterations with equal rewards within groups: with few prompts, one such iteration may be chance
EXPLOITED = 2  # evaluations with falling gold and rising proxy
LOW_ENTROPY = 0.2  # fraction of the initial entropy


def alarms_of(rows: Sequence[JsonObject], *, target_kl: float | None = None) -> dict[str, int]:
    """The alarms for a training curve: message -> first step."""
    alarms: dict[str, int] = {}
    for row in rows:
        for message in _of_row(row, target_kl):
            alarms.setdefault(message, int(row["step"]))
    for name in ("policy/entropy_avg", "entropy"):
        with_entropy = [row for row in rows if name in row]
        for row in with_entropy:
            if row[name] < LOW_ENTROPY * with_entropy[0][name]:
                message = f"{name} is below 20% of its initial value: the answers are collapsing"
                alarms.setdefault(message, int(row["step"]))
    critic = [row for row in rows if "val/var_explained" in row]
    groups = [row for row in rows if "frac_reward_zero_std" in row]
    rewarded = [row for row in rows if "gold" in row and "proxy" in row]
    for subset, bad, times, message in (
        (
            critic,
            [row["val/var_explained"] < 0 for row in critic],
            WITHOUT_FIT,
            f"the critic explained no variance for {WITHOUT_FIT} iterations: raise its learning rate",
        ),
        (
            groups,
            [row["frac_reward_zero_std"] > 0.9 for row in groups],
            WITHOUT_SPREAD,
            (
                f"over 90% of the groups had equal rewards for {WITHOUT_SPREAD} iterations: choose problems of medium"
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
    """The alarms for a single row of the curve."""
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
    """A curve watcher that prints new alarms."""
    known: set[str] = set()

    def print_new(rows: list[JsonObject]) -> None:
        for message, step in alarms_of(rows, target_kl=target_kl).items():
            if message not in known:
                known.add(message)
                say(f"alarm: {name}, step {step}: {message}")

    return print_new
