"""A trainable policy and its reference: a frozen copy of the initial model, or the policy with its adapter disabled.

    start = begin(base, adapter, seed)      start.policy trains, start.reference stays fixed
    finish(start, base)                     checks that the reference is unchanged; merges an adapter if the gate passes

The copy is made in memory from the loaded weights; the files are not read again.

Frozen matrices (of the reference, the reward model, the base model under an adapter) take 2 bytes instead of 4 if
`Hardware.base_weights` is bf16 (`runtime.base_weights`), and half a byte under an adapter if it is nf4: NormalFloat
with double quantization (QLoRA; Dettmers et al. 2023, arXiv:2305.14314), via bitsandbytes. Under bf16 autocast, every
pass rounds linear weights to bf16 anyway, so bf16 storage does not change the output of a frozen model; a pass outside
autocast uses the rounded weights. Weights that autocast does not round stay float32: embeddings (even if tied to the
head, since they are looked up), norms, the reward row. An adapter is merged into the float32 base, reloaded from its
files, so the published weights are not rounded.

Not guaranteed: that a copy fits in memory next to the policy; with an adapter there is no copy.
"""

import copy
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from pipeline.learning import gates
from pipeline.learning.processes import ON_DEVICE
from pipeline.model import checkpoint, lora
from pipeline.model.layers import Linear
from pipeline.model.lora import AdaptedLinear, AdapterConfig
from pipeline.model.transformer import Transformer
from pipeline.run import device
from pipeline.run.device import Hardware
from pipeline.run.errors import ConfigError
from pipeline.run.workdir import Job
from pipeline.text.tokenizer import Tokenizer

Model = TypeVar("Model", bound=nn.Module)
UNROUNDED = "score"  # the reward model's row: computed in float32 even under autocast
NF4_BLOCK = 64  # weights per scale
GATE_TOKENS = 32  # tokens per row of the merge gate


class Reference:
    """The frozen initial weights. `model()` is a context manager for running them; `release()` frees them.

    `parked`: kept in host memory between uses, not on the device (for when training needs no reference).
    """

    def __init__(self, policy: Transformer, *, adapted: bool, hardware: device.Hardware | None = None) -> None:
        """`hardware` runs the reference, always under its autocast. None: the copy keeps the policy's dtype."""
        self.adapted, self.parked = adapted, False
        self._weights: Transformer | None = (
            policy if adapted else copy.deepcopy(policy).train(False).requires_grad_(False)
        )
        self.digest = self._stored_digest = self._compute_digest()  # of the loaded weights, equal on any hardware
        if hardware is not None and hardware.base_weights != "fp32":
            (store if adapted else narrowed)(self._model, hardware)
            device.give_back(torch.device("cpu"))
            self._stored_digest = self._compute_digest()

    @property
    def _model(self) -> Transformer:
        assert self._weights is not None, "the reference was released"
        return self._weights

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

    def read_from(self, policy: Any) -> None:
        """Use the base weights of `policy`, a local copy. Needed if the trained policy is sharded across processes."""
        if self.adapted:
            self._weights = policy

    @property
    def released(self) -> bool:
        """Whether the copy has been freed."""
        return self._weights is None

    def release(self) -> None:
        """Check the weights one last time and free the copy. Raises GateError."""
        self.check()
        if not self.adapted:
            self._weights = None

    def check(self) -> None:
        """Raise GateError if the weights have changed since the start."""
        if self._weights is not None:
            gates.unmoved(self._stored_digest, self._compute_digest(), "the reference")

    def _compute_digest(self) -> str:
        if not self.adapted:
            return checkpoint.weights_digest(self._model)
        return checkpoint.weights_digest(self._model, leave_out="lora_")


@dataclass(frozen=True)
class Start:
    """The models at the start of preference or reinforcement learning."""

    policy: Transformer
    tokenizer: Tokenizer
    reference: Reference
    adapter: AdapterConfig | None


def begin(base: Path, adapter: AdapterConfig | None, seed: int, hardware: device.Hardware | None = None) -> Start:
    """Load a policy, attach the adapter if there is one, and freeze the reference for `hardware`.

    Raises ModelError, ConfigError.
    """
    if adapter is not None and adapter.dropout:
        raise ConfigError(
            f"adapter.dropout: expected 0 when the policy is compared with its reference, got {adapter.dropout}; only "
            "stage_lora supports dropout"
        )
    policy, tokenizer = checkpoint.load(base)
    if adapter is not None:
        lora.attach(policy, adapter, device.generator("adapter", seed))
    return Start(policy, tokenizer, Reference(policy, adapted=adapter is not None, hardware=hardware), adapter)


def finish(start: Start, base: Path) -> dict[str, float | str]:
    """Check the reference and merge the adapter into the weights of `base`. Returns metrics to report.

    Raises GateError.
    """
    start.reference.check()
    report: dict[str, float | str] = {"reference": start.reference.digest[:16]}
    if start.adapter is not None:
        report["merge_difference"] = merge(start.policy, base)
    return report


def merge(policy: Transformer, base: Path) -> float:
    """Merge the adapter into the float32 weights of `base`, which `policy` may store in bf16. Returns the largest
    logit difference. Raises GateError.

    If the weights would fill much of the device, they are merged on the CPU and the policy stays there.
    """
    rounded = {name: p for name, p in policy.named_parameters() if p.dtype != torch.float32}
    if rounded:
        where = next(policy.parameters()).device
        policy.to("cpu" if where.type == "cuda" and not placeable(policy, where) else where)
        weights = checkpoint.read_weights(base)
        for name, parameter in rounded.items():
            parameter.data = weights[name].to(parameter.device, torch.float32)
        for layer in policy.modules():
            if isinstance(layer, Linear | AdaptedLinear):
                layer.nf4 = None
    return lora.merged_with_gate(policy, gate_rows(policy))


def placeable(model: nn.Module, where: torch.device) -> bool:
    """Whether the model in float32 takes less than half of the device's memory."""
    return 4 * sum(parameter.numel() for parameter in model.parameters()) < ON_DEVICE * device.total_memory(where)


def save_merged(
    policy: Transformer, tokenizer: Tokenizer, job: Job, base: Path, folder: Path, precision: str = "fp32"
) -> None:
    """Write the current policy, for `Watchers.save`. An adapter is merged into a copy. Raises GateError."""
    if lora.adapters(policy):
        policy = copy.deepcopy(policy)
        merge(policy, base)
    checkpoint.save(folder, policy, tokenizer, job.lineage, precision=precision)


def gate_rows(model: Transformer) -> torch.Tensor:
    """Random ids for the merge gate, (64, T), on the model's device."""
    shape = (lora.MERGE_ROWS, min(GATE_TOKENS, model.config.max_context))
    ids = torch.randint(model.config.vocab_size, shape, generator=device.generator("merge gate"))
    return ids.to(next(model.parameters()).device)


# -- storage of frozen weights -----------------------------------------------------------------------------------------


def narrowed(model: Model, hardware: Hardware) -> Model:
    """Freeze the model in place, with linear layers in bf16 if the hardware stores them that way. Returns the model."""
    model.requires_grad_(False)
    return narrow(model) if hardware.base_weights != "fp32" else model


def store(model: Transformer, hardware: Hardware) -> None:
    """Store the base weights under adapters as `Hardware.base_weights` says, but the head in at least bf16."""
    if hardware.base_weights == "nf4":
        quantize(model, hardware.device)
    if hardware.base_weights != "fp32":
        narrow(model)


def quantize(model: nn.Module, where: torch.device) -> None:
    """Convert a model's frozen layers to NF4 in place, on their compute device. Skips the head and layers whose rows
    are not a multiple of the block size.
    """
    to_4bit = importlib.import_module("bitsandbytes.functional").quantize_4bit
    for name, layer in model.named_modules():
        if not isinstance(layer, Linear | AdaptedLinear) or layer.weight.requires_grad or "lm_head" in name:
            continue
        if layer.weight.shape[1] % NF4_BLOCK == 0:
            weight = layer.weight.data.to(where, torch.bfloat16)
            layer.weight.data, layer.nf4 = to_4bit(
                weight, blocksize=NF4_BLOCK, quant_type="nf4", compress_statistics=True
            )


def narrow(model: Model) -> Model:
    """Convert a model's frozen linear layers to bf16 in place, weights and biases. Returns the model."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear | AdaptedLinear) and name.rpartition(".")[2] != UNROUNDED:
            for parameter in (layer.weight, layer.bias):
                if parameter is not None and not parameter.requires_grad and parameter.is_floating_point():
                    parameter.data = parameter.data.to(torch.bfloat16)
    return model
