"""The model's one hook: a module that changes the residual stream after each layer. A wing (pipeline/wings.py) has it.

What a wing offers for it:

    model_keys     () -> a dataclass of the keys that a model file may have for the hook
    check_model    (ModelConfig) -> None; raises ValueError where these keys do not fit the rest
    layer_hook     (ModelConfig) -> the LayerHook that the keys describe, its weights zero; None without them
    hook_cache     (ModelConfig, rows, dtype, device) -> its `cache.HookCache`; None without the keys
    hook_bytes     (ModelConfig, kind of device, precision) -> bytes per token that the hook keeps in training
    model_type     () -> `model_type` in config.json of a model with the hook, which no other engine may run
    save_hook      (folder, LayerHook, weights, base) -> None; writes the hook's files into a model directory: `weights`
                   are under its own names, `base` is the digest of the model's others
    load_hook      (Transformer, folder) -> None; attaches the hook whose files stand in a model directory

The core sees a hook only as this class; its weights stand in `state_dict()` under its name.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from pipeline import wings
from pipeline.model.attention import Layout
from pipeline.model.config import ModelConfig
from pipeline.run.types import JsonObject

Reads = Callable[[int, Tensor], Tensor]  # (layer, stream (N, D) after it) -> stream after the hook


class LayerHook(nn.Module):
    """A module that changes the residual stream after each layer."""

    name: ClassVar[str]  # in the model
    hf_keys: ClassVar[JsonObject]  # of config.json
    added: bool = False  # to a trained model, whose weights are then one parameter group (learning/optim.py)
    leaky: bool = False  # a position may depend on later ones

    def reads(self, positions: Tensor, padding: Tensor | None, computed: Tensor | None, reading: object) -> Reads:
        """For a line of tokens: `positions` (N,) count from 0 in each document, `padding` (N,) bool.

        `computed` (N,) are the tokens' indices in the flattened batch, None where they are all of it. `reading` is what
        the caller of the model gave for the hook.
        """
        raise NotImplementedError

    def going_on(self, layout: Layout) -> Reads:
        """For new tokens of a cache's rows, which its `layout` has counted in."""
        raise NotImplementedError

    def initialise(self, generator: torch.Generator) -> None:
        """Fresh weights, with which the model starts as without the hook."""
        raise NotImplementedError

    def flops_per_token(self) -> int:
        """FLOPs of training one token, counted as in `ModelConfig.flops_per_token`; 0 if they are not counted."""
        return 0

    def num_parameters(self) -> int:
        """All its weights."""
        return sum(parameter.numel() for parameter in self.parameters())


def layer_hook(config: ModelConfig) -> LayerHook | None:
    """The hook of a model of this shape, with zero weights; None: it has none."""
    hooks: list[LayerHook] = [hook for offer in wings.each("layer_hook") if (hook := offer(config)) is not None]
    assert len(hooks) < 2, "a model has one hook"
    return hooks[0] if hooks else None
