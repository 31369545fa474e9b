"""What a person may say about the training of masked-diffusion models; beside `settings.py`.

ValidatedConfig
├── DiffusionConfig     adaptation and fine-tuning, with a causal control: diffusion
├── ExampleConfig       the fine-tuning alone
└── (PairConfig)        diffusion_dpo
"""

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from pipeline.learning.settings import FitConfig, ValidatedConfig
from pipeline.streams.examples import NORMS, UNIT


@dataclass(frozen=True, kw_only=True)
class ExampleConfig(ValidatedConfig):
    """A run over prompts with answers on canvases."""

    epochs: float
    examples: int
    max_prompt: int
    max_new_tokens: int
    most_steps: int | None = None  # however many passes those are; none: no bound

    length_key: ClassVar[str] = "max_prompt + max_new_tokens"

    @property
    def row_length(self) -> int:
        """Prompt and canvas."""
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
class DiffusionConfig(ValidatedConfig):
    """Two runs, one after the other: adaptation (or pre-training) on windows of code, fine-tuning on problems with answers.

    What is not said otherwise for one of them is the same for both.
    """

    adapt_steps: int  # batches of windows; 0: none
    context: int = 2048  # tokens in a window
    tokens_per_step: int = 16384  # of a batch of windows, whatever the number of processes
    anneal_fraction: float = 0.1  # of the adaptation, in which attention grows from causal to full; 0: full at once
    sft_epochs: float = 3.0  # over the problems; 0: no fine-tuning
    sft_examples: int = 32  # of a step, whatever the number of processes
    sft_learning_rate: float | None = None  # none: learning_rate
    sft_learning_rates: dict[str, float] | None = None  # of parameter groups; none: learning_rates
    sft_warmup_steps: int | None = None  # none: warmup_steps
    sft_norm: str = "answer"  # a row's loss is divided by its canvas (answer), by all canvases (tokens), or not (batch)
    max_prompt: int = 512  # tokens; problems with a longer prompt are dropped and counted
    max_new_tokens: int = 256  # of the longest canvas
    control_steps: int | None = (
        None  # of each of the causal control's two runs at most; none: as many as the masked model's
    )

    length_key: ClassVar[str] = "context and max_prompt + max_new_tokens"

    def __post_init__(self) -> None:
        """Refuse what cannot be, in words that name the key."""
        self.check()
        if self.adapt_steps < 0 or self.sft_epochs < 0 or not (self.adapt_steps or self.sft_epochs):
            raise ValueError("adapt_steps and sft_epochs: expected at least 0, and one of them more")
        if not 0 <= self.anneal_fraction <= 1:
            raise ValueError(f"anneal_fraction: expected 0 to 1, got {self.anneal_fraction}")
        if self.sft_norm not in NORMS:
            raise ValueError(f"sft_norm: expected one of {', '.join(NORMS)}, got {self.sft_norm!r}")
        if self.sft_examples < 1 or self.max_prompt < 2 or self.max_new_tokens < UNIT:
            raise ValueError(
                f"expected sft_examples >= 1, max_prompt >= 2, max_new_tokens >= {UNIT}, the unit of canvases"
            )
        if self.sft_learning_rate is not None and self.sft_learning_rate < 0:
            raise ValueError(f"sft_learning_rate: expected at least 0, got {self.sft_learning_rate}")
        if self.control_steps is not None and self.control_steps < 1:
            raise ValueError(
                f"control_steps: expected at least 1, or none for as many as the masked model's, got {self.control_steps}"
            )
        _ = self.adapting  # its own checks

    @property
    def row_length(self) -> int:
        return self.context

    @property
    def rows(self) -> int:
        return self.tokens_per_step // self.context

    @property
    def anneal_steps(self) -> int:
        """Steps in which attention grows."""
        return round(self.anneal_fraction * self.adapt_steps)

    @property
    def adapting(self) -> FitConfig:
        """The run over windows. Raises ValueError."""
        return FitConfig(**self._common(), steps=max(1, self.adapt_steps), context=self.context, tokens_per_step=self.tokens_per_step)  # fmt: skip

    @property
    def tuning(self) -> ExampleConfig:
        """The run over problems."""
        common = self._common()
        own = {"learning_rate": self.sft_learning_rate, "learning_rates": self.sft_learning_rates,
               "warmup_steps": self.sft_warmup_steps}  # fmt: skip
        common |= {name: value for name, value in own.items() if value is not None}
        return ExampleConfig(**common, epochs=self.sft_epochs, examples=self.sft_examples, max_prompt=self.max_prompt,
                             max_new_tokens=self.max_new_tokens)  # fmt: skip

    @property
    def control_adapting(self) -> FitConfig:
        """The control's run over windows: the schedule over its own steps."""
        whole = self.adapting
        if self.control_steps is None:
            return whole
        return replace(whole, steps=min(whole.steps or 1, self.control_steps), **self._shorter_warmup(whole))

    @property
    def control_tuning(self) -> ExampleConfig:
        """The control's run over problems."""
        whole = self.tuning
        if self.control_steps is None:
            return whole
        return replace(whole, most_steps=self.control_steps, **self._shorter_warmup(whole))

    def _shorter_warmup(self, whole: ValidatedConfig) -> dict[str, int]:
        """A warm-up for 100,000 steps would be longer than the control's whole run."""
        assert self.control_steps is not None
        return {"warmup_steps": min(whole.warmup_steps, self.control_steps // 2)}

    def _common(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(ValidatedConfig)}
