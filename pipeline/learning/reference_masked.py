"""`reference.begin` for masked-diffusion models: the model to be trained, and the frozen one that it starts from."""

from pathlib import Path
from typing import Any

from pipeline import denoisers, device
from pipeline.errors import ConfigError
from pipeline.learning.reference import Reference, Start
from pipeline.model import lora
from pipeline.model.denoiser import Denoiser
from pipeline.model.lora import AdapterConfig


def begin(base: Path, adapter: AdapterConfig | None, seed: int, hardware: device.Hardware) -> tuple[Denoiser, Start]:
    """The model, and its start: the trunk as policy, with its adapter where there is to be one; the reference is a `Denoiser`.

    Raises ModelError for a causal model; ConfigError for an adapter with dropout, or a model that denoises by blocks.
    """
    if adapter is not None and adapter.dropout:
        raise ConfigError(
            f"adapter.dropout: expected 0 where the policy is compared with its reference, got {adapter.dropout}"
        )
    model, tokenizer = denoisers.load(base)
    if model.traits.block_size:
        raise ConfigError(
            f"{base} is a block-diffusion model (block_size {model.traits.block_size}); its likelihood needs clean tokens beside "
            "the noised ones, which preference and reinforcement learning do not have here: expected block_size 0"
        )
    if adapter is not None:
        lora.attach(model.trunk, adapter, device.generator("adapter", seed))
    whole: Any = model  # a Reference runs whatever is copied or has its adapter switched off
    frozen = Reference(whole, adapted=adapter is not None, hardware=hardware)
    return model, Start(model.trunk, tokenizer, frozen, adapter)
