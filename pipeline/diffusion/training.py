"""Masked diffusion: losses, likelihood estimates from sampled masks, and training support for its stages.

    masked_cross_entropy, diffusion_dpo     the losses
    masked_logprobs     log p of the tokens under one mask                          training
    elbo                mean over a sample's draws of (L / k) sum of log p          evaluation, Diffusion-DPO
    coupled_logprobs    log p of each token from two complementary masks            coupled-GRPO
    enumerated          the ELBO over all masks, in three equivalent forms           short texts, to test the others

For prompt x, response y of L tokens and l_i = log p(y_i | x, y under mask M), in nats, over the ids allowed in
texts:

    ELBO = int_0^1 (1/t) E[sum_{i in M} l_i] dt              M: each token independently with probability t
         = E_{k ~ U{1..L}} E_{|M| = k} [(L/k) sum l_i]
         = mean over all orders of the chain-rule sum

-ELBO is an upper bound on the negative log-likelihood of decoding in random order, one token per step (Ou et al. 2024,
arXiv:2406.03736). The batch contains the masks (diffusion/masks.py), so all models score it under the same masks.

For DPO, s = [B(w) - B_ref(w)] - [B(l) - B_ref(l)], with B the ELBO of an answer, w the chosen and l the rejected
answer of a pair. Coupled-GRPO has no separate loss: its estimates serve as the log-probabilities in
`learning.policy_losses.group_policy`.

**Training**: configurations, gates of the first step, and references.

TrainingConfig (learning/settings.py)
├── DiffusionConfig     adaptation and fine-tuning, with a causal control: diffusion
├── ExampleConfig       fine-tuning only
└── (PairConfig)        diffusion_dpo

`first_policy` and `first_scratch` check the first step's metrics before its update, like learning/gates.py for causal
models. `begin` loads the model to train and its frozen starting point, as `learning/reference.py` does for causal ones.

A `Following` reference moves toward the policy at regular step intervals (TR-DPO, Gorbatovski et al. 2024,
arXiv:2404.09656, eq. 6). Its weights are then part of a run's state: they are stored next to the saved states, and a
resumed run loads the weights named in its state.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipeline.diffusion import files
from pipeline.diffusion.batches import NORMS, UNIT, NoisedPairs
from pipeline.diffusion.masks import CoupledBatch, Drawn
from pipeline.diffusion.model import Denoiser, Noised
from pipeline.learning import gates, states
from pipeline.learning.losses import Loss, Term, sum_by_row
from pipeline.learning.pair_losses import PairLogprobs
from pipeline.learning.processes import published
from pipeline.learning.reference import Reference, Start
from pipeline.learning.settings import FitConfig, TrainingConfig, Validation
from pipeline.model import lora
from pipeline.model.lora import AdapterConfig
from pipeline.run import device
from pipeline.run.errors import ConfigError, StagecoachError
from pipeline.run.tracking import progress
from pipeline.run.types import JsonObject

REDUCTIONS = ("sum", "mean")


def masked_cross_entropy(logprobs: Tensor, weights: Tensor, *, per: str) -> Loss:
    """-sum of weight * l over masked tokens (n,) / the step's `per` count (LLaDA, arXiv:2502.09992, eq. 3)."""
    num = len(logprobs)
    return Loss([Term("loss", -(logprobs * weights).sum(), per)], {"masked/nll": (-logprobs.detach().sum(), num)})


def diffusion_dpo(
    policy: PairLogprobs, reference: PairLogprobs, *, beta: float, sft_weight: float, reduction: str = "sum"
) -> Loss:
    """-log sigmoid(beta s) - (sft_weight / |w|) B(w) of each pair (LLaDA 1.5, arXiv:2505.19223, eq. 4).

    With `reduction` mean, each B is divided by its answer's token count. Metrics have TRL's names; the extremes are the
    smallest and the largest beta * s.
    """
    assert reduction in REDUCTIONS, reduction
    ones = torch.ones_like(policy.chosen)
    num_chosen, num_rejected = (policy.num_chosen, policy.num_rejected) if reduction == "mean" else (ones, ones)
    chosen = (policy.chosen - reference.chosen) / num_chosen
    rejected = (policy.rejected - reference.rejected) / num_rejected
    scaled = beta * (chosen - rejected)
    terms = [Term("preference", -F.logsigmoid(scaled).sum(), "pairs")]
    mean_logprobs = policy.chosen / policy.num_chosen
    if sft_weight:
        terms.append(Term("sft", -mean_logprobs.sum(), "pairs", sft_weight))
    num, margins = len(scaled), scaled.detach()
    chosen_rewards, rejected_rewards = beta * chosen.detach(), beta * rejected.detach()
    wins, ties = chosen_rewards > rejected_rewards, chosen_rewards == rejected_rewards
    metrics = {
        "rewards/chosen": (chosen_rewards.sum(), num),
        "rewards/rejected": (rejected_rewards.sum(), num),
        "rewards/margins": (margins.sum(), num),
        "rewards/accuracies": (wins.sum() + 0.5 * ties.sum(), num),
        "raw_accuracy": ((policy.chosen > policy.rejected).detach().sum(), num),
        "nelbo/chosen": (-policy.chosen.detach().sum(), int(policy.num_chosen.sum())),
        "nelbo/rejected": (-policy.rejected.detach().sum(), int(policy.num_rejected.sum())),
    }
    extremes = {"margin_min": margins.amin(), "margin_max": margins.amax()} if num else {}
    return Loss(terms, metrics | policy.metrics, extremes)


# -- likelihoods -------------------------------------------------------------------------------------------------------


NORMALIZATION = 2 / 3  # for the published estimate, which has mean 1.5 log p


def masked_logprobs(model: nn.Module, noised: Noised) -> Tensor:
    """log p (n,) of the tokens at the predicted positions, row by row, in nats."""
    (result,) = model([noised])
    return result


def draw_sums(model: nn.Module, inputs: Sequence[Noised]) -> Tensor:
    """Sums (n, B) of log p over the predicted positions in each draw's rows."""
    return torch.stack([sum_by_row(values, one.wanted) for values, one in zip(model(inputs), inputs, strict=True)])


def elbo(model: nn.Module, batch: Drawn) -> Tensor:
    """ELBO (B,) of each row's response, in nats: the mean over its draws, unbiased."""
    return (draw_sums(model, batch.inputs) * batch.scales).mean(0)


def pair_elbos(model: nn.Module, batch: Drawn) -> PairLogprobs:
    """ELBOs of P pairs; the rows are P chosen answers, then P rejected ones; the metrics are variances over draws."""
    by_draw = draw_sums(model, batch.inputs) * batch.scales  # (n, 2P)
    pairs = pairs_of(by_draw.mean(0), batch.lengths)
    if len(by_draw) == 1:
        return pairs
    chosen, rejected = by_draw.detach().chunk(2, dim=1)
    variances = (chosen - rejected).var(0) / len(by_draw)  # (P,)
    return replace(pairs, metrics={"elbo/variance": (variances.sum(), len(variances))})


def pairs_of(sums: Tensor, lengths: Tensor) -> PairLogprobs:
    """Sums (2P,) as pairs; `lengths` (2P,) are the answers' token counts."""
    (chosen, rejected), (num_chosen, num_rejected) = sums.chunk(2), lengths.chunk(2)
    return PairLogprobs(chosen, rejected, num_chosen, num_rejected)


def coupled_logprobs(model: nn.Module, batch: CoupledBatch, *, released: bool = False) -> Tensor:
    """An estimate (N,) of log p of each counted token, row by row (DiffuCoder, arXiv:2506.20639, eq. 6).

    1/2 [l^a + 1(first) l^b / t + 1(second) l^c / (1 - t)]: under the full mask, and under whichever of the two halves
    masks the token. `released`: as published, with mean 1.5 log p for a model without context; otherwise multiplied by
    2/3, so that a ratio of two estimates is a ratio of probabilities.
    """
    inputs = batch.inputs
    whole, first, second = (
        values.new_zeros(batch.tokens.shape).masked_scatter(one.wanted, values)  # (B, T)
        for values, one in zip(model(inputs), inputs, strict=True)
    )
    t = batch.times[:, None]
    estimates = 0.5 * (whole + first / t + second / (1 - t))
    return (estimates if released else estimates * NORMALIZATION)[batch.counted]


def reference_elbos(
    model: nn.Module, stream: NoisedPairs, name: str, turn: int, numbers: np.ndarray, where: torch.device
) -> np.ndarray:
    """ELBOs (n, 2) of a split's chosen and rejected answers under the masks of a pass; NaN if not in `numbers`.

    Uses the training operations, so that a policy equal to its reference gets bit-identical results.
    """
    elbos = np.full((len((stream.train if name == "train" else stream.val).pairs), 2), np.nan, dtype=np.float32)
    done = 0
    with progress(total=len(numbers), desc=f"reference {name} {turn}", unit="pair") as bar, torch.enable_grad():
        for batch in stream.some(name, turn, numbers):
            pairs = pair_elbos(model, batch.to(where))
            part = torch.stack([pairs.chosen, pairs.rejected], 1).detach().cpu().numpy()
            elbos[numbers[done : done + len(part)]] = part
            done += len(part)
            bar.update(len(part))
    return elbos


# -- by enumeration of all masks ---------------------------------------------------------------------------------------

MOST_ENUMERATED = 8
FORMS = ("t", "k", "order")
Score = Callable[[tuple[bool, ...]], Sequence[float]]  # mask -> log p of each token (ignored for clean tokens)


def enumerated(score: Score, length: int, form: str) -> float:
    """The ELBO of a text of at most 8 tokens, over all masks, in nats. Raises ValueError for a longer text.

    The forms differ in how they weight a mask of k tokens: `t` by a Beta integral, `k` by the number of subsets of each
    size, `order` by the possible token orders.
    """
    if not 1 <= length <= MOST_ENUMERATED:
        raise ValueError(f"expected 1 to {MOST_ENUMERATED} tokens, found {length}; L tokens have 2^L masks")
    scores = {mask: score(mask) for mask in itertools.product((False, True), repeat=length) if any(mask)}
    if form == "order":
        orders = list(itertools.permutations(range(length)))
        return math.fsum(_chain_rule_sum(scores, order) for order in orders) / len(orders)
    return math.fsum(
        _weight(sum(mask), length, form) * math.fsum(log for log, masked in zip(logs, mask, strict=True) if masked)
        for mask, logs in scores.items()
    )


def _weight(k: int, length: int, form: str) -> float:
    """Weight of a mask of k tokens. t: int_0^1 t^(k-1) (1-t)^(L-k) dt = B(k, L-k+1). k: (L/k) / (L C(L, k))."""
    if form == "t":
        return math.gamma(k) * math.gamma(length - k + 1) / math.gamma(length + 1)
    if form == "k":
        return 1 / (k * math.comb(length, k))
    raise ValueError(f"form: expected one of {', '.join(FORMS)}, found {form!r}")


def _chain_rule_sum(scores: dict[tuple[bool, ...], Sequence[float]], order: Sequence[int]) -> float:
    mask = [True] * len(order)
    total = 0.0
    for position in order:
        total += scores[tuple(mask)][position]
        mask[position] = False
    return total


# -- training ----------------------------------------------------------------------------------------------------------


CAUSE = "the old scores used different masks, precision or dropout than training, or the policy has changed"
SHARE = 0.6  # weight of the policy in a `Following` reference


@dataclass(frozen=True, kw_only=True)
class ExampleConfig(TrainingConfig):
    """A run that trains on prompts whose answers lie on canvases."""

    epochs: float
    examples: int
    max_prompt: int
    max_new_tokens: int
    most_steps: int | None = None  # maximum, regardless of epochs; None: no limit
    validation: Validation = field(default_factory=Validation)

    length_key: ClassVar[str] = "max_prompt + max_new_tokens"

    @property
    def validated(self) -> Validation:
        return self.validation

    @property
    def row_length(self) -> int:
        """Tokens of the prompt and canvas."""
        return self.max_prompt + self.max_new_tokens

    @property
    def trained_length(self) -> int:
        return self.max_new_tokens

    @property
    def rows(self) -> int:
        return self.examples

    def resolve_steps(self, tokens_per_epoch: int) -> int:
        """The number of steps."""
        steps = max(1, round(self.epochs * tokens_per_epoch / (self.rows * self.row_length)))
        return steps if self.most_steps is None else min(steps, self.most_steps)


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig(TrainingConfig):
    """Two runs, one after the other: adaptation (or pretraining) on windows of code, then fine-tuning on problems with
    answers.

    Keys without sft_ apply to both runs, unless a corresponding sft_ key is set.
    """

    adapt_steps: int
    """Steps on windows; 0: none."""
    context: int = 2048
    """Tokens in a window."""
    tokens_per_step: int = 16384
    """Tokens per batch of windows, independent of the number of processes."""
    anneal_fraction: float = 0.1
    """Fraction of the adaptation during which attention grows from causal to full; 0: full from the start."""
    sft_epochs: float = 3.0
    """Passes over the problems; 0: no fine-tuning."""
    sft_examples: int = 32
    """Examples per step, independent of the number of processes."""
    sft_learning_rate: float | None = None
    """Learning rate for fine-tuning; none: same as learning_rate."""
    sft_learning_rates: dict[str, float] | None = None
    """Learning rates of parameter groups for fine-tuning; none: same as learning_rates."""
    sft_warmup_steps: int | None = None
    """Warmup steps for fine-tuning; none: same as warmup_steps."""
    sft_norm: str = "answer"
    """Divide a row's loss by its canvas (answer), by all canvases (tokens), or not at all (batch)."""
    max_prompt: int = 512
    """Maximum prompt length in tokens; problems with longer prompts are dropped and counted."""
    max_new_tokens: int = 256
    """Maximum canvas length in tokens."""
    control_steps: int | None = None
    """Maximum steps for each of the causal control's two runs; none: as many as the masked model."""
    validation: Validation = field(default_factory=Validation)

    length_key: ClassVar[str] = "context and max_prompt + max_new_tokens"

    def __post_init__(self) -> None:
        """Raises ValueError naming the key."""
        self.check()
        if self.adapt_steps < 0 or self.sft_epochs < 0 or not (self.adapt_steps or self.sft_epochs):
            raise ValueError(
                "adapt_steps, sft_epochs: expected at least 0 each, and more than 0 for at least one of them"
            )
        if not 0 <= self.anneal_fraction <= 1:
            raise ValueError(f"anneal_fraction: expected 0 to 1, got {self.anneal_fraction}")
        if self.sft_norm not in NORMS:
            raise ValueError(f"sft_norm: expected one of {', '.join(NORMS)}, got {self.sft_norm!r}")
        if self.sft_examples < 1 or self.max_prompt < 2 or self.max_new_tokens < UNIT:
            raise ValueError(
                f"expected sft_examples >= 1, max_prompt >= 2, max_new_tokens >= {UNIT}, the unit of canvas lengths"
            )
        if self.sft_learning_rate is not None and self.sft_learning_rate < 0:
            raise ValueError(f"sft_learning_rate: expected at least 0, got {self.sft_learning_rate}")
        if self.control_steps is not None and self.control_steps < 1:
            raise ValueError(
                "control_steps: expected at least 1, or `none` for as many steps as the masked model, got"
                f" {self.control_steps}"
            )
        _ = self.adapting  # runs its own checks

    @property
    def validated(self) -> Validation:
        return self.validation

    @property
    def row_length(self) -> int:
        return self.context

    @property
    def rows(self) -> int:
        return self.tokens_per_step // self.context

    @property
    def anneal_steps(self) -> int:
        """Steps over which attention grows."""
        return round(self.anneal_fraction * self.adapt_steps)

    @property
    def adapting(self) -> FitConfig:
        """The configuration of the run on windows. Raises ValueError."""
        return FitConfig(
            **self._common(), steps=max(1, self.adapt_steps), context=self.context, tokens_per_step=self.tokens_per_step
        )

    @property
    def tuning(self) -> ExampleConfig:
        """The configuration of the run on problems."""
        overrides = {
            "learning_rate": self.sft_learning_rate,
            "learning_rates": self.sft_learning_rates,
            "warmup_steps": self.sft_warmup_steps,
        }
        return ExampleConfig(
            **(self._common() | {name: value for name, value in overrides.items() if value is not None}),
            epochs=self.sft_epochs,
            examples=self.sft_examples,
            max_prompt=self.max_prompt,
            max_new_tokens=self.max_new_tokens,
        )

    @property
    def control_adapting(self) -> FitConfig:
        """The configuration of the control's run on windows, with a schedule over its own steps."""
        config = self.adapting
        if self.control_steps is None:
            return config
        return replace(config, steps=min(config.steps or 1, self.control_steps), **self._shorter_warmup(config))

    @property
    def control_tuning(self) -> ExampleConfig:
        """The configuration of the control's run on problems."""
        config = self.tuning
        if self.control_steps is None:
            return config
        return replace(config, most_steps=self.control_steps, **self._shorter_warmup(config))

    def _shorter_warmup(self, config: TrainingConfig) -> dict[str, int]:
        """A warmup that fits the control's run, which may be shorter than the masked model's warmup."""
        assert self.control_steps is not None
        return {"warmup_steps": min(config.warmup_steps, self.control_steps // 2)}

    def _common(self) -> JsonObject:
        names = [*(own.name for own in fields(TrainingConfig)), "validation"]
        return {name: getattr(self, name) for name in names}


# -- gates of the first step -------------------------------------------------------------------------------------------


def first_policy(precision: str) -> Callable[[dict[str, float]], None]:
    """Check that the policy is the one that gave the old scores: ratio 1, no clipping, no KL from the reference."""
    exact = precision == "fp32"

    def check(values: dict[str, float]) -> None:
        gates.value(values, "ratio", 1.0, 1e-4 if exact else 5e-2, CAUSE)
        gates.value(values, "approxkl", 0.0, 1e-6 if exact else 1e-2, CAUSE)
        gates.value(values, "clip_ratio/region_mean", 0.0, 0.0 if exact else 1e-1, CAUSE)
        if "kl" in values:
            gates.value(values, "kl", 0.0, 1e-6 if exact else 1e-2, "the reference is not the policy's starting point")

    return check


def first_scratch(vocab_size: int) -> Callable[[dict[str, float]], None]:
    """Check that an untrained model gives all tokens the same probability: -log p of a masked token is ln V.

    The loss itself is not checked, because it is weighted and noisy.
    """

    def check(values: dict[str, float]) -> None:
        gates.value(values, "masked/nll", math.log(vocab_size), 0.5, "the initialization, or the prediction positions")

    return check


# -- references --------------------------------------------------------------------------------------------------------


def begin(base: Path, adapter: AdapterConfig | None, seed: int, hardware: device.Hardware) -> tuple[Denoiser, Start]:
    """The model, and its `Start`: the policy is the trunk, with any adapter; the reference is a `Denoiser`.

    Raises ModelError for a causal model, and ConfigError for an adapter with dropout or a block-diffusion model.
    """
    if adapter is not None and adapter.dropout:
        raise ConfigError(
            f"adapter.dropout: expected 0, because the policy is compared with its reference, got {adapter.dropout}"
        )
    model, tokenizer = files.load(base)
    if model.traits.block_size:
        raise ConfigError(
            f"{base} is a block-diffusion model (block_size {model.traits.block_size}); its likelihood needs clean"
            " tokens next to the noised ones, which preference and reinforcement learning do not support; use a model"
            " with block_size 0"
        )
    if adapter is not None:
        lora.attach(model.trunk, adapter, device.generator("adapter", seed))
    whole: Any = model  # a Reference runs any model that is copied or has its adapter disabled
    frozen = Reference(whole, adapted=adapter is not None, hardware=hardware)
    return model, Start(model.trunk, tokenizer, frozen, adapter)


class Following:
    """A reference mixed with the policy every `every` steps: 0.6 policy, 0.4 reference."""

    def __init__(self, reference: Denoiser, policy: Denoiser, *, every: int, folder: Path) -> None:
        """`folder` is the job's folder, which contains its states."""
        self.model, self.policy, self.every, self.folder = reference, policy, every, folder
        self.moved_at = 0  # the step of the last update; 0: never

    def before(self, step: int) -> None:
        """Update the weights if `every` steps have passed since the last update. Call before the rollout at `step`."""
        if step // self.every <= self.moved_at // self.every:
            return
        with torch.no_grad():
            for own, (_, policy) in zip(self.model.parameters(), published(self.policy), strict=True):
                own.lerp_(policy.to(own.device, own.dtype), SHARE)
        self.moved_at = step
        if device.rank() == 0:
            self._write()

    def state(self) -> JsonObject:
        """The step that identifies the reference's weights."""
        return {"moved_at": self.moved_at}

    def load(self, state: JsonObject) -> None:
        """Load the weights named in a state. Raises StagecoachError if their file is missing."""
        self.moved_at = int(state["moved_at"])
        if not self.moved_at:
            return
        path = self._path(self.moved_at)
        if not path.is_file():
            raise StagecoachError(f"{path}: the reference of this state is missing; start over with runtime.fresh=true")
        for name, tensor in load_file(path).items():
            self.model.get_parameter(name).data.copy_(tensor)

    def _write(self) -> None:
        """Write the weights atomically, and delete files that no state can refer to anymore."""
        path = self._path(self.moved_at)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in self.model.named_parameters()}, part)
        part.replace(path)
        oldest = min((int(state.name[5:]) for state in self.folder.glob(states.name_of(0)[:5] + "????????")), default=0)
        stored = sorted(path.parent.glob("reference-*.safetensors"))
        past = [file for file in stored if int(file.stem[10:]) <= oldest]  # the last one belongs to the oldest state
        for file in past[:-1]:
            file.unlink()

    def _path(self, step: int) -> Path:
        return self.folder / "parts" / f"reference-{step:08d}.safetensors"
