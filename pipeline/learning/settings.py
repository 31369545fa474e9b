"""FitConfig: what a person may say about a training run. Its keys stand flat in each stage's block of params.yaml."""

from dataclasses import dataclass

from pipeline.learning import schedule
from pipeline.learning.optim import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class FitConfig(OptimizerConfig):
    """One training run. Exactly one of steps, tokens, epochs says how long it is."""

    steps: int | None = None  # batches
    tokens: int | None = None  # or: trained on so many tokens
    epochs: float | None = None  # or: so often over the data
    tokens_per_step: int = 16384  # of the global batch, whatever the number of processes
    context: int = 2048  # tokens in a row
    optimizer: str = "adamw"  # adamw, or muon: Muon for the hidden matrices, AdamW for the rest
    learning_rate: float  # at the top of the schedule
    weight_decay: float = 0.1
    betas: tuple[float, ...] = (0.9, 0.95)  # AdamW's
    eps: float = 1e-8  # AdamW's
    max_grad_norm: float = 1.0  # the global gradient norm is clipped to this; 0 is off
    schedule: str = "cosine"  # constant, linear, cosine, cosine_with_restarts, wsd
    min_ratio: float = 0.1  # the last learning rate as a share of the first
    cycles: int = 1  # of cosine_with_restarts
    decay_ratio: float = 0.2  # wsd: the share of steps that decays
    warmup_steps: int = 0  # at most one of these two
    warmup_ratio: float = 0.0
    eval_steps: int = 500  # evaluate every so many steps, and at the end
    eval_tokens: int = 262144  # size of the fixed validation slice
    patience: int = 0  # stop after so many evaluations without a gain; 0 is off
    threshold: float = 0.0  # what counts as a gain for patience, in nats per token
    publish: str = "best"  # best: the weights of the lowest validation loss; last
    on_nonfinite: str = "skip"  # skip the update (3 in a row stop), or stop at once

    def __post_init__(self) -> None:
        given = [k for k in ("steps", "tokens", "epochs") if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(f"expected exactly one of steps, tokens, epochs; got {', '.join(given) or 'none'}")
        if getattr(self, given[0]) <= 0:
            raise ValueError(f"{given[0]}: expected more than 0, got {getattr(self, given[0])}")
        self.check_groups()
        if self.learning_rate < 0 or self.context < 2 or self.eval_steps < 1 or len(self.betas) != 2:
            raise ValueError("expected learning_rate >= 0, context >= 2, eval_steps >= 1 and two betas")
        if self.tokens_per_step % self.context or self.tokens_per_step < self.context:
            low = self.tokens_per_step // self.context * self.context or self.context
            raise ValueError(
                f"tokens_per_step {self.tokens_per_step} is not a multiple of context {self.context}; try {low}"
            )
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("at most one of warmup_steps and warmup_ratio may be set")
        choices = {
            "optimizer": ("adamw", "muon"), "schedule": schedule.SCHEDULES, "publish": ("best", "last"),
            "on_nonfinite": ("skip", "stop"),
        }  # fmt: skip
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key}: expected one of {', '.join(allowed)}, got {getattr(self, key)!r}")

    @property
    def rows(self) -> int:
        """Rows of the global batch."""
        return self.tokens_per_step // self.context

    def resolve_steps(self, tokens_per_epoch: int) -> int:
        """The number of steps, from whichever of steps, tokens, epochs was given."""
        if self.steps is not None:
            return self.steps
        tokens = self.tokens if self.tokens is not None else (self.epochs or 0) * tokens_per_epoch
        return max(1, round(tokens / self.tokens_per_step))

    def factor(self, step: int, steps: int) -> float:
        """The schedule at `step` of `steps`."""
        warmup = self.warmup_steps or round(self.warmup_ratio * steps)
        return schedule.factor(
            step, name=self.schedule, steps=steps, warmup=warmup, min_ratio=self.min_ratio, cycles=self.cycles,
            decay_ratio=self.decay_ratio,
        )  # fmt: skip
