"""Weights in and out of Hugging Face directories: Qwen3, Qwen2 and LLaMA, from local safetensors.

Our parameters carry Hugging Face's names, so converting is checking: no key missing, none over, every shape right.
Only two things may differ: a stored copy of a tied head is compared and dropped, and old checkpoints' rotary buffers
(`rotary_emb.inv_freq`, derived from the base) are left out.

Not here: writing directories (`checkpoint.py`), tokenizers, downloads. Nothing is unpickled: `.bin` files are refused.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.model import stored
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.transformer import Transformer


def load(folder: Path, *, dtype: torch.dtype = torch.float32) -> Transformer:
    """The model of a Hugging Face directory, weights cast to `dtype`. Raises ModelError naming file or key."""
    config = read_config(folder)
    stored.check(config, folder, stored.headers(folder))
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device="cpu")
    model.to(dtype)
    load_weights(model, folder)
    return model


def load_weights(model: Transformer, folder: Path) -> None:
    """Fill `model` with the weights of a directory. Raises ModelError naming file or key."""
    load_state(model, read_weights(folder), source=str(folder))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of `model.safetensors`, where it is not there of the shards that its index names. Raises ModelError."""
    return {key: file.get_tensor(key) for _, key, file in stored.opened(folder)}


def load_state(model: Transformer, state: Mapping[str, Tensor], *, source: str = "the weights") -> None:
    """Copy weights under Hugging Face's names into `model`, cast to its dtype.

    Raises ModelError where a key is missing, unknown, or has another shape than the configuration asks for.
    """
    config = model.config
    state = _without_derived(state, config, source)
    parameters = dict(model.named_parameters())
    missing, extra = sorted(set(parameters) - set(state)), sorted(set(state) - set(parameters))
    stored.need_keys(config, missing, extra, source=source)
    for name, parameter in parameters.items():
        if state[name].shape != parameter.shape:
            asked, has = list(parameter.shape), list(state[name].shape)
            raise ModelError(f"{source}: {name} has shape {has}, config.json asks for {asked}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])


def _without_derived(state: Mapping[str, Tensor], config: ModelConfig, source: str) -> dict[str, Tensor]:
    """Drop a tied head that equals the embedding, and rotary buffers. Raises ModelError for a head that differs."""
    kept = {key: tensor for key, tensor in state.items() if not key.endswith(stored.DERIVED)}
    head, table = kept.get("lm_head.weight"), kept.get("model.embed_tokens.weight")
    if config.tied and head is not None and table is not None:
        if not torch.equal(head, table):
            raise ModelError(
                f"{source}: config.json ties the head to the embedding, but lm_head.weight differs from it"
            )
        del kept["lm_head.weight"]
    return kept
