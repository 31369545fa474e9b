"""Training of masked-diffusion models: configurations, gates of the first step, and references.

ValidatedConfig (learning/settings.py)
├── DiffusionConfig     adaptation and fine-tuning, with a causal control: diffusion
├── ExampleConfig       the fine-tuning alone
└── (PairConfig)        diffusion_dpo

`first_policy` and `first_scratch` check the metrics of the first step before its update, as learning/gates.py does for
causal models. `begin` loads the model to be trained and the frozen one that it starts from, as `reference.begin` does
there.

A `Following` reference moves towards the policy every so many steps (TR-DPO, Gorbatovski et al. 2024, arXiv:2404.09656,
eq. 6). Its weights are then part of a run's state: they are stored beside the states, and a resumed run loads those
that its state names.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file

from pipeline.diffusion import files
from pipeline.diffusion.batches import NORMS, UNIT
from pipeline.diffusion.model import Denoiser
from pipeline.learning import gates, states
from pipeline.learning.reference import Reference, Start
from pipeline.learning.settings import FitConfig, ValidatedConfig
from pipeline.model import lora
from pipeline.model.lora import AdapterConfig
from pipeline.run import device
from pipeline.run.errors import ConfigError, StagecoachError
from pipeline.run.types import JsonObject

CAUSE = "old scores and training differ: other masks, another precision, dropout, or a policy that moved"
SHARE = 0.6  # of the policy in the reference that follows it


@dataclass(frozen=True, kw_only=True)
class ExampleConfig(ValidatedConfig):
    """A run over prompts with answers on canvases."""

    epochs: float
    examples: int
    max_prompt: int
    max_new_tokens: int
    most_steps: int | None = None  # maximum, whatever the epochs; None: no bound

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
    """Two runs, one after the other: adaptation (or pre-training) on windows of code, fine-tuning on problems with
    answers.

    Keys without sft_ apply to both unless there is one with it.
    """

    adapt_steps: int
    """Steps on windows; 0: none."""
    context: int = 2048
    """Tokens in a window."""
    tokens_per_step: int = 16384
    """Tokens in a batch of windows, independent of the number of processes."""
    anneal_fraction: float = 0.1
    """Share of the adaptation in which attention grows from causal to full; 0: full at once."""
    sft_epochs: float = 3.0
    """Passes over the problems; 0: no fine-tuning."""
    sft_examples: int = 32
    """Examples in a step, independent of the number of processes."""
    sft_learning_rate: float | None = None
    """Learning rate of the fine-tuning; none: learning_rate."""
    sft_learning_rates: dict[str, float] | None = None
    """Learning rates of its parameter groups; none: learning_rates."""
    sft_warmup_steps: int | None = None
    """Warmup steps of the fine-tuning; none: warmup_steps."""
    sft_norm: str = "answer"
    """A row's loss is divided by its canvas (answer), by all canvases (tokens), or not (batch)."""
    max_prompt: int = 512
    """Maximum length of a prompt in tokens; problems with a longer one are dropped and counted."""
    max_new_tokens: int = 256
    """Length of the longest canvas in tokens."""
    control_steps: int | None = None
    """Maximum steps of each of the causal control's two runs; none: as many as the masked model's."""

    length_key: ClassVar[str] = "context and max_prompt + max_new_tokens"

    def __post_init__(self) -> None:
        """Raises ValueError naming the key."""
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
                "control_steps: expected at least 1, or none for as many as the masked model's, got"
                f" {self.control_steps}"
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
        return FitConfig(
            **self._common(), steps=max(1, self.adapt_steps), context=self.context, tokens_per_step=self.tokens_per_step
        )

    @property
    def tuning(self) -> ExampleConfig:
        """The run over problems."""
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
        """The control's run over windows, with a schedule over its own steps."""
        config = self.adapting
        if self.control_steps is None:
            return config
        return replace(config, steps=min(config.steps or 1, self.control_steps), **self._shorter_warmup(config))

    @property
    def control_tuning(self) -> ExampleConfig:
        """The control's run over problems."""
        config = self.tuning
        if self.control_steps is None:
            return config
        return replace(config, most_steps=self.control_steps, **self._shorter_warmup(config))

    def _shorter_warmup(self, config: ValidatedConfig) -> dict[str, int]:
        """A warmup for 100,000 steps would be longer than the control's whole run."""
        assert self.control_steps is not None
        return {"warmup_steps": min(config.warmup_steps, self.control_steps // 2)}

    def _common(self) -> JsonObject:
        return {field.name: getattr(self, field.name) for field in fields(ValidatedConfig)}


# -- gates of the first step -------------------------------------------------------------------------------------------


def first_policy(precision: str) -> Callable[[dict[str, float]], None]:
    """The policy has not moved since the old scores: ratio 1, nothing clipped, no divergence from the reference."""
    exact = precision == "fp32"

    def check(values: dict[str, float]) -> None:
        gates.value(values, "ratio", 1.0, 1e-4 if exact else 5e-2, CAUSE)
        gates.value(values, "approxkl", 0.0, 1e-6 if exact else 1e-2, CAUSE)
        gates.value(values, "clip_ratio/region_mean", 0.0, 0.0 if exact else 1e-1, CAUSE)
        if "kl" in values:
            gates.value(values, "kl", 0.0, 1e-6 if exact else 1e-2, "the reference is not what the policy starts from")

    return check


def first_scratch(vocab_size: int) -> Callable[[dict[str, float]], None]:
    """An untrained model predicts all tokens alike: -log p of a masked one is ln V. (The loss weights tokens, and is
    noisy.)
    """

    def check(values: dict[str, float]) -> None:
        gates.value(values, "masked/nll", math.log(vocab_size), 0.5, "the initialisation, or what is predicted where")

    return check


# -- references --------------------------------------------------------------------------------------------------------


def begin(base: Path, adapter: AdapterConfig | None, seed: int, hardware: device.Hardware) -> tuple[Denoiser, Start]:
    """The model, and its start: its trunk as policy, with an adapter if one is configured; the reference is a
    `Denoiser`.

    Raises ModelError for a causal model; ConfigError for an adapter with dropout, or a model that denoises by blocks.
    """
    if adapter is not None and adapter.dropout:
        raise ConfigError(
            f"adapter.dropout: expected 0 where the policy is compared with its reference, got {adapter.dropout}"
        )
    model, tokenizer = files.load(base)
    if model.traits.block_size:
        raise ConfigError(
            f"{base} is a block-diffusion model (block_size {model.traits.block_size}); its likelihood needs clean"
            " tokens beside the noised ones, which preference and reinforcement learning do not have here: expected"
            " block_size 0"
        )
    if adapter is not None:
        lora.attach(model.trunk, adapter, device.generator("adapter", seed))
    whole: Any = model  # a Reference runs whatever is copied or has its adapter switched off
    frozen = Reference(whole, adapted=adapter is not None, hardware=hardware)
    return model, Start(model.trunk, tokenizer, frozen, adapter)


class Following:
    """A reference that is mixed with the policy every `every` steps: 0.6 of the policy, 0.4 of the reference."""

    def __init__(self, reference: Denoiser, policy: Denoiser, *, every: int, folder: Path) -> None:
        """`folder` is the job's, with its states."""
        self.model, self.policy, self.every, self.folder = reference, policy, every, folder
        self.moved_at = 0  # the step of the last update; 0: never

    def before(self, step: int) -> None:
        """Update it if `every` steps have passed since the last update; call it before the rollout at `step`."""
        if step // self.every <= self.moved_at // self.every:
            return
        with torch.no_grad():
            for own, policy in zip(self.model.parameters(), self.policy.parameters(), strict=True):
                own.lerp_(policy.to(own.device, own.dtype), SHARE)
        self.moved_at = step
        if device.rank() == 0:
            self._write()

    def state(self) -> JsonObject:
        """The step that identifies its weights."""
        return {"moved_at": self.moved_at}

    def load(self, state: JsonObject) -> None:
        """Load the weights that a state names. Raises StagecoachError if their file is missing."""
        self.moved_at = int(state["moved_at"])
        if not self.moved_at:
            return
        path = self._path(self.moved_at)
        if not path.is_file():
            raise StagecoachError(f"{path}: the reference of this state is missing; start over with runtime.fresh=true")
        for name, tensor in load_file(path).items():
            self.model.get_parameter(name).data.copy_(tensor)

    def _write(self) -> None:
        """Write its weights atomically, and delete those that no state can name any more."""
        path = self._path(self.moved_at)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in self.model.named_parameters()}, part)
        part.replace(path)
        oldest = min((int(state.name[5:]) for state in self.folder.glob(states.name_of(0)[:5] + "????????")), default=0)
        stored = sorted(path.parent.glob("reference-*.safetensors"))
        past = [file for file in stored if int(file.stem[10:]) <= oldest]  # the last of them serves the oldest state
        for file in past[:-1]:
            file.unlink()

    def _path(self, step: int) -> Path:
        return self.folder / "parts" / f"reference-{step:08d}.safetensors"
