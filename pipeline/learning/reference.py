"""A policy to be trained and the reference that it starts from: a frozen copy, or the policy with its adapter off.

    start = begin(base, adapter, seed)      start.policy trains, start.reference never moves
    finish(start)                           the reference is as it was; an adapter is merged under its gate

The copy is made in memory from the weights that were loaded, never read again by name, and stored as `frozen.py` says.
Not promised: that a copy fits beside the policy; with an adapter there is none.

How the weights of models that only compute are stored: the reference of preference and reinforcement learning, the
reward model.

Under bf16 autocast a linear layer's weight is rounded to bf16 in every pass anyhow. Where that is so on a GPU, these
layers are stored rounded, 2 bytes for 4, and every output keeps its bits. What autocast does not round stays float32:
embeddings (they are looked up, also where the head is tied to them), norms, the reward's row. A narrowed model runs
under that autocast only.

Not narrowed: the base below an adapter. The health gates and the evaluation of pairs run it without autocast, and what
is published is the base plus its update: rounding it would be in every model that leaves the stage.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from pipeline.learning import gates
from pipeline.model import checkpoint, lora
from pipeline.model.lora import AdapterConfig
from pipeline.model.transformer import Transformer
from pipeline.run import device
from pipeline.run.device import Hardware
from pipeline.run.errors import ConfigError
from pipeline.text.tokenizer import Tokenizer

Model = TypeVar("Model", bound=nn.Module)
KEPT = "score"  # of the reward model: computed in float32 also under autocast


def narrows(kind: str, precision: str) -> bool:
    """Whether frozen linear layers are stored in bf16: on a GPU whose passes are. On a CPU memory is seldom what is
    short.
    """
    return kind == "cuda" and precision == "bf16"


def narrowed(model: Model, hardware: Hardware) -> Model:
    """The model itself, frozen, its linear layers in bf16 where `narrows` says so."""
    model.requires_grad_(False)
    return narrow(model) if narrows(hardware.device.type, hardware.precision) else model


def narrow(model: Model) -> Model:
    """The model itself, with the weights (and biases) of its linear layers in bf16."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.rpartition(".")[2] != KEPT:
            layer.to(torch.bfloat16)
    return model


# -- reference ---------------------------------------------------------------------------------------------------------


GATE_TOKENS = 32  # of each row that the merge gate looks at


class Reference:
    """The frozen weights. `model()` gives something to run them with, `release()` lets them go.

    `parked`: between uses they lie in the machine's memory, not on the device (where training itself reads no
    reference).
    """

    def __init__(self, policy: Transformer, *, adapted: bool, hardware: device.Hardware | None = None) -> None:
        """`hardware`: what runs it, always in its autocast; None: the copy has the policy's dtype whatever runs it."""
        self.adapted, self.parked = adapted, False
        self._held: Transformer | None = policy if adapted else copy.deepcopy(policy).train(False).requires_grad_(False)
        self.digest = self._stored = self._now()  # of the weights that were loaded, on any hardware
        if hardware is not None and not adapted:
            narrowed(self._model, hardware)
            self._stored = self._now()

    @property
    def _model(self) -> Transformer:
        assert self._held is not None, "the reference was released"
        return self._held

    @contextmanager
    def model(self, where: torch.device | None = None) -> Iterator[Transformer]:
        """The reference in evaluation mode, without gradients, on a device."""
        model = self._model if where is None or self.adapted else self._model.to(where)
        was_training = model.training
        model.train(False)
        with torch.no_grad(), lora.disabled(model):
            yield model
        model.train(was_training)
        if self.parked and not self.adapted:
            model.to("cpu")

    def release(self) -> None:
        """Check it a last time and free its copy: all that was wanted of it is known. Raises GateError."""
        self.check()
        if not self.adapted:
            self._held = None

    def check(self) -> None:
        """Raise GateError when its weights are not those of the start."""
        if self._held is None:
            return
        gates.unmoved(self._stored, self._now(), "the reference")

    def _now(self) -> str:
        if not self.adapted:
            return checkpoint.weights_digest(self._model)
        return checkpoint.weights_digest(self._model, leave_out="lora_")


@dataclass(frozen=True)
class Start:
    """What a stage of preference or reinforcement learning begins with."""

    policy: Transformer
    tokenizer: Tokenizer
    reference: Reference
    adapter: AdapterConfig | None


def begin(base: Path, adapter: AdapterConfig | None, seed: int, hardware: device.Hardware | None = None) -> Start:
    """Load a policy, attach its adapter if there is to be one, and freeze the reference, as `hardware` runs it.

    Raises ModelError, ConfigError.
    """
    if adapter is not None and adapter.dropout:
        raise ConfigError(
            f"adapter.dropout: expected 0 where the policy is compared with its reference, got {adapter.dropout}; only "
            "stage_lora trains with dropout"
        )
    policy, tokenizer = checkpoint.load(base)
    if adapter is not None:
        lora.attach(policy, adapter, device.generator("adapter", seed))
    return Start(policy, tokenizer, Reference(policy, adapted=adapter is not None, hardware=hardware), adapter)


def finish(start: Start) -> dict[str, float | str]:
    """Check the reference, merge the adapter; what is to be reported. Raises GateError."""
    start.reference.check()
    report: dict[str, float | str] = {"reference": start.reference.digest[:16]}
    if start.adapter is not None:
        start.policy.float()
        report["merge_difference"] = lora.merged_with_gate(start.policy, gate_rows(start.policy))
    return report


def gate_rows(model: nn.Module) -> torch.Tensor:
    """Rows of ids for the merge gate, (64, T), on the model's device."""
    config: object = model.config
    drawn = torch.randint(
        config.vocab_size,  # type: ignore[attr-defined]
        (lora.MERGE_ROWS, min(GATE_TOKENS, config.max_context)),  # type: ignore[attr-defined]
        generator=device.generator("merge gate"),
    )
    return drawn.to(next(model.parameters()).device)
