"""`reference.begin` for masked-diffusion models: the model to be trained, and the frozen one that it starts from.

A `Following` reference moves towards the policy every so many steps (TR-DPO, Gorbatovski et al. 2024, arXiv:2404.09656, eq. 6). Its
weights are then part of a run's state: they lie beside the states, and a resumed run takes those that its state names.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pipeline import denoisers, device
from pipeline.errors import ConfigError, StagecoachError
from pipeline.learning import states
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


SHARE = 0.6  # of the policy in the reference that follows it


class Following:
    """A reference that is mixed with the policy every `every` steps: 0.6 of the policy, 0.4 of what it was."""

    def __init__(self, reference: Denoiser, policy: Denoiser, *, every: int, folder: Path) -> None:
        """`folder` is the job's, where the states lie."""
        self.model, self.policy, self.every, self.folder = reference, policy, every, folder
        self.moved_at = 0  # the step at which it was moved last; 0: never

    def before(self, step: int) -> None:
        """Move it, where `every` steps have gone by since it was moved; called before the rollout at `step`."""
        if step // self.every <= self.moved_at // self.every:
            return
        with torch.no_grad():
            for mine, theirs in zip(self.model.parameters(), self.policy.parameters(), strict=True):
                mine.lerp_(theirs.to(mine.device, mine.dtype), SHARE)
        self.moved_at = step
        if device.rank() == 0:
            self._write()

    def state(self) -> dict[str, Any]:
        """Which one it is."""
        return {"moved_at": self.moved_at}

    def load(self, state: dict[str, Any]) -> None:
        """Take the one that a state names. Raises StagecoachError where its file is gone."""
        self.moved_at = int(state["moved_at"])
        if not self.moved_at:
            return
        path = self._path(self.moved_at)
        if not path.is_file():
            raise StagecoachError(f"{path}: the reference of this state is missing; start over with runtime.fresh=true")
        for name, tensor in load_file(path).items():
            self.model.get_parameter(name).data.copy_(tensor)

    def _write(self) -> None:
        """Its weights, whole or not at all; those that no state can name any more go."""
        path = self._path(self.moved_at)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in self.model.named_parameters()}, part)
        part.replace(path)
        oldest = min((int(found.name[5:]) for found in self.folder.glob(states.name_of(0)[:5] + "????????")), default=0)
        known = sorted(path.parent.glob("reference-*.safetensors"))
        named = [found for found in known if int(found.stem[10:]) <= oldest]  # the last of them serves the oldest state
        for found in named[:-1]:
            found.unlink()

    def _path(self, step: int) -> Path:
        return self.folder / "parts" / f"reference-{step:08d}.safetensors"
