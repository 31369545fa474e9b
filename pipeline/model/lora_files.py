"""Adapters in the files of peft: `adapter_config.json` and `adapter_model.safetensors`, read and written.

What these adapters cannot do (other peft types, biases, ranks that differ, modules saved whole) is refused by file and key.
Not here: what an adapter computes (`lora.py`).
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.model import lora
from pipeline.model.lora import EMBEDDING, AdapterConfig, adapter_state, adapters, attach, load_adapter_state
from pipeline.model.transformer import Transformer

PREFIX = "base_model.model."  # what peft puts before a parameter's name
# Keys of adapter_config.json that change nothing here, whatever they say. Any other key must be empty.
READ = ("peft_type", "task_type", "bias", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora",
        "init_lora_weights", "trainable_token_indices")  # fmt: skip
IGNORED = ("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "megatron_core",
           "qalora_group_size", "runtime_config")  # fmt: skip
EMPTY: tuple[Any, ...] = (None, False, {}, [])


def export_peft(folder: Path, model: Transformer, config: AdapterConfig, *, base_name: str) -> None:
    """Write the attached adapter as peft does: `adapter_config.json` and `adapter_model.safetensors`.

    The configuration holds the keys that every peft since 0.11 knows; newer ones mean their defaults where they lack.
    """
    assert adapters(model), "there is no adapter to export: merge() folds it in"
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_name, "inference_mode": True,
        "r": config.rank, "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "lora_dropout": config.dropout, "target_modules": sorted(config.modules), "use_rslora": config.rslora,
        "use_dora": config.dora, "bias": "none", "fan_in_fan_out": False, "init_lora_weights": True,
        "modules_to_save": None, "layers_to_transform": None, "layers_pattern": None, "layer_replication": None,
        "rank_pattern": {}, "alpha_pattern": {}, "auto_mapping": None, "revision": None, "loftq_config": {},
        "megatron_config": None, "megatron_core": "megatron.core",
    }  # fmt: skip
    if config.trained_tokens:  # since peft 0.15
        values["trainable_token_indices"] = {EMBEDDING.rpartition(".")[2]: list(config.trained_tokens)}
    text = json.dumps(values, indent=2, sort_keys=True) + "\n"
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    state = {_peft_name(name): tensor.cpu().contiguous() for name, tensor in adapter_state(model).items()}
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _peft_name(name: str) -> str:
    """peft keeps an older name of DoRA's vector, without `.weight`, and a name of its own for trained tokens."""
    if name == f"{EMBEDDING}.lora_rows":
        return f"{PREFIX}{EMBEDDING}.token_adapter.trainable_tokens_delta"
    return PREFIX + (name.removesuffix(".weight") if "lora_magnitude_vector" in name else name)


def import_peft(folder: Path, model: Transformer) -> AdapterConfig:
    """Attach an adapter that peft or `export_peft` made. Returns its configuration.

    Raises ModelError naming file and key for what is not supported here; the model is then as it was, except that all
    its parameters train.
    """
    config = _read_config(folder / "adapter_config.json")
    path = folder / "adapter_model.safetensors"
    try:
        stored = load_file(path)
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing; expected safetensors (a .bin adapter must be converted first)") from error
    except SafetensorError as error:
        raise ModelError(f"{path}: damaged ({error}); fetch or export it again") from error
    _compare_rank(stored, config.rank, path)
    attach(model, config, torch.Generator())  # what it draws is overwritten
    names = {_peft_name(name): name for name in adapter_state(model)}
    try:
        load_adapter_state(model, {names.get(key, key): tensor for key, tensor in stored.items()}, source=str(path))
    except ModelError:
        lora.detach(model)
        raise
    return config


def _compare_rank(stored: dict[str, Tensor], rank: int, path: Path) -> None:
    """Raise ModelError for a rank beyond that of the file's tensors, which would be allocated before they are compared."""
    for name, tensor in stored.items():
        if name.endswith("lora_A.weight") and rank > tensor.shape[0]:
            raise ModelError(
                f"{path}: {name} has shape {list(tensor.shape)}, expected [{rank}, {tensor.shape[-1]}]: another rank than r of "
                "adapter_config.json; fetch or export it again"
            )


def _read_config(path: Path) -> AdapterConfig:
    """`adapter_config.json`. Raises ModelError for what these adapters cannot do."""
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        rank, alpha, named = values["r"], values["lora_alpha"], values["target_modules"]
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing: {path.parent} is not an adapter directory") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: expected the JSON of a LoRA adapter ({error!r})") from error
    expected: dict[str, tuple[Any, ...]] = {
        "peft_type": ("LORA",), "task_type": ("CAUSAL_LM", None), "bias": ("none",),
        "init_lora_weights": (True, False, "gaussian"),  # others change the base weights
    }  # fmt: skip
    expected |= {key: EMPTY for key in values if key not in READ + IGNORED}
    for key, allowed in expected.items():
        if values.get(key, allowed[0]) not in allowed:
            raise ModelError(
                f"{path}: {key} = {values[key]!r} is not supported here; expected {' or '.join(map(repr, allowed[:2]))}. "
                "Merge the adapter in peft and take the merged model in"
            )
    try:
        # peft writes whole paths for all-linear. Where a layer is left out, its adapter will be missing in the file.
        leaves = (named,) if isinstance(named, str) else sorted({str(name).rpartition(".")[2] for name in named})
        return AdapterConfig(rank=rank, alpha=alpha, dropout=values.get("lora_dropout", 0.0), targets=tuple(leaves),
                             rslora=values.get("use_rslora", False), dora=values.get("use_dora", False),
                             trained_tokens=_tokens(path, values.get("trainable_token_indices")))  # fmt: skip
    except (ValueError, TypeError) as error:
        raise ModelError(f"{path}: {error}") from error


def _tokens(path: Path, named: Any) -> tuple[int, ...]:
    """`trainable_token_indices`: ids, or ids of the embedding alone. Raises ModelError."""
    leaf = EMBEDDING.rpartition(".")[2]
    ids = named.get(leaf) if isinstance(named, dict) and set(named) <= {leaf} else named
    if ids is None or ids == {}:
        return ()
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise ModelError(f"{path}: trainable_token_indices = {named!r}; expected ids of {leaf}")
    return tuple(ids)
