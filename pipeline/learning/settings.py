"""Training settings and the learning-rate schedule. The keys are at the top level of a stage's block.

TrainingConfig              optimizer, schedule, evaluation; each subclass defines its batch
├── FitConfig               rows of packed tokens or dialogues
├── AnswerConfig            complete answers, with length limits
│   ├── PairConfig          pairs of answers: reward, dpo
│   └── LabelConfig         good and bad answers: kto
└── rl/rollout.RolloutConfig    the policy's own answers: rlhf, grpo

Validation                  validation loss, early stopping, averaged weights, what to publish (FitConfig, AnswerConfig)
FullTraining, Neftune       extra keys for stages that train all weights, and for those that train on dialogues

The schedule is a pure function of the step, so it has no state to save or advance. With S steps, W of warmup,
m = `min_ratio`, p = (s - W) / max(1, S - 1 - W), the factor is (s + 1) / W during warmup, then by name:

    constant                1
    linear                  1 - (1 - m) p
    cosine                  m + (1 - m) (1 + cos(pi p)) / 2
    cosine_with_restarts    the same with frac(cycles * p), and p = 1 at the end
    wsd                     1 until the last D = round(decay_ratio * S) steps, then 1 - (1 - m) (s - S + D + 1) / D

So s = W - 1 gives 1, s = S - 1 gives m (constant: 1), and each restart gives 1.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from pipeline.learning import update
from pipeline.learning.optim import OptimizerConfig
from pipeline.run.errors import ConfigError

SCHEDULES = ("constant", "linear", "cosine", "cosine_with_restarts", "wsd")
LEAST = {
    "learning_rate": 0,
    "weight_decay": 0,
    "max_grad_norm": 0,
    "min_ratio": 0,
    "cycles": 1,
    "decay_ratio": 0,
    "warmup_steps": 0,
    "warmup_ratio": 0,
    "eval_steps": 1,
}


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(OptimizerConfig):
    """Settings shared by all training runs. Subclasses define the batch of a step and the number of steps."""

    optimizer: str = "adamw"
    """adamw, or muon: Muon for the hidden matrices, AdamW for the rest."""
    learning_rate: float
    """Peak learning rate."""
    weight_decay: float = 0.1
    """For matrices, multiplied by the learning rate; 0 for norms, biases, `bank` and `router`."""
    betas: tuple[float, ...] = (0.9, 0.95)
    """AdamW betas."""
    eps: float = 1e-8
    """AdamW epsilon."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm to this value; 0 disables clipping."""
    schedule: str = "cosine"
    """constant, linear, cosine, cosine_with_restarts, wsd."""
    min_ratio: float = 0.1
    """Final learning rate as a fraction of the peak."""
    cycles: int = 1
    """Number of cycles for cosine_with_restarts."""
    decay_ratio: float = 0.2
    """Fraction of steps spent decaying, for wsd."""
    warmup_steps: int = 0
    """Warmup steps; set at most one of `warmup_steps` and `warmup_ratio`."""
    warmup_ratio: float = 0.0
    """Fraction of steps spent warming up to the peak rate."""
    eval_steps: int = 500
    """Steps between evaluations; there is also one at the end."""
    on_nonfinite: str = "skip"
    """If the loss or gradient norm is not finite: skip the update, stop, or rollback (learning/update.py)."""
    on_spike: str = "skip"
    """If the loss is far above that of the last 128 steps: skip, stop, rollback, or ignore."""

    length_keys: ClassVar[tuple[str, ...]] = ()  # keys that only set the number of steps
    length_key: ClassVar[str] = "context"  # the key that sets the longest row, for error messages
    even_rows: ClassVar[bool] = False  # all rows have the same length, so every batch has the same shape

    def check(self) -> None:
        """Raise ValueError for invalid values. The `__post_init__` of subclasses calls it."""
        self.check_groups()
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: expected two numbers in [0, 1), got {list(self.betas)}")
        for key, least in LEAST.items():
            if getattr(self, key) < least:
                raise ValueError(f"{key}: expected at least {least}, got {getattr(self, key)}")
        for key, most in {"min_ratio": 1.0, "warmup_ratio": 1.0, "decay_ratio": 1.0}.items():
            if getattr(self, key) > most:
                raise ValueError(f"{key}: expected at most {most:g}, got {getattr(self, key)}")
        if self.eps <= 0:
            raise ValueError(f"eps: expected more than 0, got {self.eps}")
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("set at most one of `warmup_steps` and `warmup_ratio`")
        choices = {
            "optimizer": ("adamw", "muon"),
            "schedule": SCHEDULES,
            "on_nonfinite": update.ON_NONFINITE,
            "on_spike": update.ON_SPIKE,
        }
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key}: expected one of {', '.join(allowed)}, got {getattr(self, key)!r}")

    @property
    def validated(self) -> "Validation":
        """Validation settings. Without a validation loss, the last weights are published."""
        return Validation(eval_tokens=0, publish="last")

    @property
    def row_length(self) -> int:
        """The maximum tokens per row of the batch."""
        raise NotImplementedError

    @property
    def longest(self) -> int:
        """The maximum sequence length the model processes."""
        return self.row_length

    @property
    def trained_length(self) -> int:
        """The maximum trained tokens per row. The head computes logits only for these."""
        return self.row_length

    @property
    def rows(self) -> int:
        """Rows of the global batch."""
        raise NotImplementedError

    def context_at(self, step: int) -> int:
        """Tokens per row of the batch at `step`."""
        return self.row_length

    def check_context(self, model: nn.Module) -> None:
        """Raise ConfigError if a row may exceed the context of the model (or of an actor and its critic)."""
        pair = [getattr(model, name) for name in ("actor", "critic") if hasattr(model, name)]
        for part in pair or [model]:
            shape = getattr(part, "config", None)
            if shape is not None and self.longest > shape.max_context:
                raise ConfigError(
                    f"{self.length_key}: expected at most {shape.max_context}, the model's context, got {self.longest};"
                    " reduce it"
                )

    def resolve_steps(self, tokens_per_epoch: int) -> int:
        """The number of steps. `tokens_per_epoch` counts positions in the data, including padding."""
        raise NotImplementedError

    def free_steps(self, steps: int) -> int:
        """The number of initial steps whose learning rates do not depend on the run length.

        All steps for `constant`, those before the decay for `wsd`, none for other schedules or with a `warmup_ratio`. A
        longer run continues from the state after these steps and is bitwise identical to a run from scratch.
        """
        if self.warmup_ratio or self.schedule not in ("constant", "wsd"):
            return 0
        return steps if self.schedule == "constant" else max(0, steps - decay_steps(steps, self.decay_ratio))

    def factor(self, step: int, steps: int) -> float:
        """The schedule factor at `step` of `steps`."""
        warmup = self.warmup_steps or round(self.warmup_ratio * steps)
        return factor(
            step,
            name=self.schedule,
            steps=steps,
            warmup=warmup,
            min_ratio=self.min_ratio,
            cycles=self.cycles,
            decay_ratio=self.decay_ratio,
        )


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Validation loss on held-out data, and the decisions based on it."""

    eval_tokens: int = 262144
    """Size of the fixed validation slice, in tokens."""
    patience: int = 0
    """Early stopping: stop after this many evaluations without improvement; 0 disables."""
    threshold: float = 0.0
    """Minimum improvement, in nats per token."""
    publish: str = "best"
    """Which weights to publish: best (lowest validation loss), or last."""
    ema_decay: float = 0.0
    """Decay of the averaged weights (EMA), which are evaluated and published; 0 disables averaging."""

    def __post_init__(self) -> None:
        for key in ("eval_tokens", "patience", "threshold"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key}: expected at least 0, got {getattr(self, key)}")
        if self.publish not in ("best", "last"):
            raise ValueError(f"publish: expected one of best, last, got {self.publish!r}")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay: expected a number in [0, 1), got {self.ema_decay}")


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Growing context length (Li et al. 2022, arXiv:2108.06084), at a constant number of tokens per step."""

    start: int = 128
    """Initial row length in tokens; it doubles at each stage."""
    end: int = 2048
    """Final row length."""
    steps: int = 1000
    """Steps over which the length grows."""

    def __post_init__(self) -> None:
        ratio = self.end // max(1, self.start)
        if self.start < 2 or self.steps < 1 or self.start * ratio != self.end or ratio & (ratio - 1):
            raise ValueError(
                "curriculum: expected steps >= 1, start >= 2 and end = start * 2^k, "
                f"got {self.start} to {self.end} in {self.steps} steps"
            )

    def context_at(self, step: int) -> int:
        """The largest start * 2^k that is at most start + (end - start) * min(1, step / steps)."""
        most = self.start + (self.end - self.start) * min(self.steps, step) // self.steps
        return self.start * 2 ** ((most // self.start).bit_length() - 1)


@dataclass(frozen=True, kw_only=True)
class FitConfig(TrainingConfig):
    """A run on packed rows. Exactly one of `steps`, `tokens` and `epochs` sets its length."""

    steps: int | None = None
    """Training length in steps; set exactly one of `steps`, `tokens` and `epochs`."""
    tokens: int | None = None
    """Training length in tokens, instead of `steps`."""
    epochs: float | None = None
    """Training length in epochs, instead of `steps`."""
    tokens_per_step: int = 16384
    """Global batch size in tokens, regardless of the number of processes."""
    context: int = 2048
    """Tokens per row."""
    curriculum: Curriculum | None = None
    """{start, end, steps}: growing context length."""
    validation: Validation = field(default_factory=Validation)
    length_keys: ClassVar[tuple[str, ...]] = ("steps", "tokens", "epochs")
    even_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _exactly_one(steps=self.steps, tokens=self.tokens, epochs=self.epochs)
        self.check()
        if self.context < 2:
            raise ValueError("expected context >= 2")
        if self.curriculum is not None and self.context % self.curriculum.end:
            raise ValueError(f"curriculum.end: expected a divisor of context {self.context}, got {self.curriculum.end}")
        if self.tokens_per_step % self.context or self.tokens_per_step < self.context:
            low = self.tokens_per_step // self.context * self.context or self.context
            raise ValueError(
                f"tokens_per_step {self.tokens_per_step} is not a multiple of context {self.context}; try {low}"
            )

    @property
    def validated(self) -> Validation:
        return self.validation

    @property
    def row_length(self) -> int:
        return self.context

    def context_at(self, step: int) -> int:
        """Tokens per row at `step`. During a curriculum, rows are windows of the packed rows."""
        return self.context if self.curriculum is None else self.curriculum.context_at(step)

    @property
    def rows(self) -> int:
        return self.tokens_per_step // self.context

    def resolve_steps(self, tokens_per_epoch: int) -> int:
        """The number of steps, derived from whichever of `steps`, `tokens` and `epochs` is set."""
        if self.steps is not None:
            return self.steps
        tokens = self.tokens if self.tokens is not None else (self.epochs or 0) * tokens_per_epoch
        return max(1, round(tokens / self.tokens_per_step))


@dataclass(frozen=True, kw_only=True)
class AnswerConfig(TrainingConfig):
    """A run on complete answers. Exactly one of `steps` and `epochs` sets its length. Subclasses define the batch."""

    steps: int | None = None
    """Training length in steps; set exactly one of `steps` and `epochs`."""
    epochs: float | None = None
    """Training length in epochs, instead of `steps`."""
    max_prompt: int = 512
    """Maximum prompt tokens; examples with longer prompts are dropped and counted."""
    max_length: int = 1024
    """Maximum tokens of prompt plus answer; longer examples are dropped, not truncated."""
    validation: Validation = field(default_factory=Validation)

    length_keys: ClassVar[tuple[str, ...]] = ("steps", "epochs")
    length_key: ClassVar[str] = "max_length"

    def __post_init__(self) -> None:
        _exactly_one(steps=self.steps, epochs=self.epochs)
        self.check()
        if not 2 <= self.max_prompt < self.max_length:
            raise ValueError("expected 2 <= max_prompt < max_length")

    @property
    def validated(self) -> Validation:
        return self.validation

    @property
    def row_length(self) -> int:
        return self.max_length

    @property
    def longest(self) -> int:
        return self.max_length

    def resolve_steps(self, tokens_per_epoch: int) -> int:
        """The number of steps, derived from whichever of `steps` and `epochs` is set."""
        if self.steps is not None:
            return self.steps
        return max(1, round((self.epochs or 0) * tokens_per_epoch / (self.rows * self.row_length)))


@dataclass(frozen=True, kw_only=True)
class PairConfig(AnswerConfig):
    """A run on pairs of answers."""

    pairs: int = 32
    """Pairs per step, regardless of the number of processes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pairs < 1:
            raise ValueError(f"pairs: expected at least 1, got {self.pairs}")

    @property
    def row_length(self) -> int:
        """A row consists of two answers."""
        return 2 * self.max_length

    @property
    def rows(self) -> int:
        return self.pairs


@dataclass(frozen=True, kw_only=True)
class LabelConfig(AnswerConfig):
    """A run on good and bad answers."""

    answers: int = 64
    """Answers per step, regardless of the number of processes; at least 2 (see batches/labels.py)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.answers < 2:
            raise ValueError(f"answers: expected at least 2, got {self.answers}")

    @property
    def rows(self) -> int:
        return self.answers


@dataclass(frozen=True, kw_only=True)
class FullTraining:
    """Extra keys for stages that train all weights."""

    dropout: float = 0.0
    """Dropout rate on each layer's outputs."""
    save_precision: str = "fp32"
    """Precision of the published weights: fp32, bf16, fp16."""

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: expected a number in [0, 1), got {self.dropout}")
        if self.save_precision not in ("fp32", "bf16", "fp16"):
            raise ValueError(f"save_precision: expected fp32, bf16 or fp16, got {self.save_precision!r}")


@dataclass(frozen=True, kw_only=True)
class Neftune:
    """Embedding noise for fine-tuning on dialogues."""

    neftune_alpha: float = 0.0
    """NEFTune embedding noise during training (arXiv:2310.05914: 5 to 15); 0 disables."""

    def __post_init__(self) -> None:
        if self.neftune_alpha < 0:
            raise ValueError(f"neftune_alpha: expected at least 0, got {self.neftune_alpha}")


def _exactly_one(**lengths: float | None) -> None:
    """Raise ValueError unless exactly one of a run's lengths is set, to a value above 0."""
    names = [name for name, value in lengths.items() if value is not None]
    if len(names) != 1:
        remedy = f"; unset the others, for example {names[-1]}=none" if names else ""
        raise ValueError(f"expected exactly one of {', '.join(lengths)}; got {', '.join(names) or 'none'}{remedy}")
    if (lengths[names[0]] or 0) <= 0:
        raise ValueError(f"{names[0]}: expected more than 0, got {lengths[names[0]]}")


# -- schedule ----------------------------------------------------------------------------------------------------------


def decay_steps(steps: int, decay_ratio: float) -> int:
    """The number of final steps in which `wsd` decays the rate."""
    return max(1, round(decay_ratio * steps))


def factor(
    step: int, *, name: str, steps: int, warmup: int, min_ratio: float, cycles: int = 1, decay_ratio: float = 0.2
) -> float:
    """The learning-rate factor at `step` (from 0). Raises ValueError for an unknown name."""
    if step < warmup:
        return (step + 1) / warmup
    p = (step - warmup) / max(1, steps - 1 - warmup)
    if name == "constant":
        return 1.0
    if name == "linear":
        return 1 - (1 - min_ratio) * p
    if name == "wsd":
        decay = decay_steps(steps, decay_ratio)
        return min(1.0, 1 - (1 - min_ratio) * (step - steps + decay + 1) / decay)
    if name == "cosine_with_restarts":
        p = 1.0 if p >= 1 else math.modf(cycles * p)[0]
    elif name != "cosine":
        raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {name!r}")
    return min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * p)) / 2
