"""Model directories: what every stage publishes under models/. The architecture travels with the weights.

    config.json  model.safetensors  generation_config.json  lineage.json
    tokenizer.json  tokenizer_config.json  chat_template.jinja

It is a Hugging Face directory: transformers 4 and 5 load it (`Qwen3ForCausalLM`; a reward model as
`Qwen3ForSequenceClassification`, without generation_config.json). No pickle, no code, no clock, id or host name in it,
so equal runs give equal bytes. `lineage.json` says which inputs and code made it.
Weights are float32, or what `save_precision` of their stage says; `load` gives float32 in any case.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.model import convert, memory_files, stored
from pipeline.model.config import FAMILIES, REMEMBERING, ModelConfig, read_config, read_values
from pipeline.model.heads import RewardModel
from pipeline.model.transformer import Transformer
from pipeline.text.tokenizer import Tokenizer
from pipeline.work import need_space

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def save(
    folder: Path, model: Transformer, tokenizer: Tokenizer, lineage: dict[str, Any], *, precision: str = "fp32"
) -> None:
    """Write a model directory, its weights rounded to `precision` (fp32, bf16, fp16). Weights over 5 GB are sharded.

    Raises ModelError when the tokenizer has more ids, StagecoachError before writing when the disk is too full.
    """
    ids = {"pad_token_id": tokenizer.pad, "bos_token_id": None, "eos_token_id": tokenizer.turn_end}
    base, beside = memory_files.split(model.state_dict())
    state = {name: tensor.to(DTYPES[precision]) for name, tensor in base.items()}
    dtype = str(DTYPES[precision]).removeprefix("torch.")
    values = (model.config.to_hf(dtype) if model.memory is None else model.config.to_hf_remembering(dtype)) | ids
    _save(folder, state, model.config, tokenizer, lineage, values)
    if model.memory is not None:
        assert isinstance(model.memory, torch.nn.Module)
        memory_files.save(
            folder, model.memory, {name: tensor.detach().cpu() for name, tensor in beside.items()}, state_digest(state)
        )
    stops = {"eos_token_id": [tokenizer.turn_end, tokenizer.end_of_text], "pad_token_id": tokenizer.pad}
    _write(folder / "generation_config.json", {"do_sample": False} | stops)


def save_reward(folder: Path, model: RewardModel, tokenizer: Tokenizer, lineage: dict[str, Any]) -> None:
    """Write a reward model as transformers' sequence classifier with one label. Raises as `save`.

    transformers scores the last token that is not `pad_token_id`, so a row must end with the token that counts, padding
    to its right. It gives r; `reward_mean` and `reward_std` stand in config.json for who normalises.
    """
    values = model.config.to_hf() | {
        "architectures": [_classifier(model.config)],
        "num_labels": 1,
        "id2label": {"0": "REWARD"},
        "label2id": {"REWARD": 0},
        "pad_token_id": tokenizer.pad,
        "bos_token_id": None,
        "eos_token_id": tokenizer.turn_end,
        "reward_mean": model.reward_mean,
        "reward_std": model.reward_std,
    }
    state = {name.removeprefix("trunk."): tensor for name, tensor in model.state_dict().items()}
    _save(folder, state, model.config, tokenizer, lineage, values)


def _classifier(config: ModelConfig) -> str:
    return FAMILIES[config.family].replace("ForCausalLM", "ForSequenceClassification")


def _save(
    folder: Path,
    state: dict[str, Tensor],
    config: ModelConfig,
    tokenizer: Tokenizer,
    lineage: dict[str, Any],
    values: dict[str, Any],
) -> None:
    """Weights, tokenizer, lineage, and `values` as config.json."""
    assert not any(".lora_" in name for name in state), "merge the adapter before saving the model"
    check_vocabulary(config, tokenizer, folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    need_space(folder, sum(tensor.numel() * tensor.element_size() for tensor in state.values()) + 20_000_000)
    save_torch_state_dict(state, folder, max_shard_size="5GB", metadata={"format": "pt"})
    _write(folder / "config.json", values)
    _write(folder / "lineage.json", lineage | {"tokenizer": tokenizer.hash})
    tokenizer.save(folder)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load(folder: Path) -> tuple[Transformer, Tokenizer]:
    """The causal model (float32, training mode) and its tokenizer.

    Raises ModelError for a masked-diffusion model, and for a directory that is not whole: a missing file, a tensor too many, too
    few or of another shape, a tokenizer with more ids than the embedding has rows.
    """
    if read_config(folder).attention != "causal":
        raise ModelError(
            f"{folder}: expected a causal model, found a masked-diffusion one; take models/code, models/tools or one that was "
            "trained from them"
        )
    return load_any(folder)


def load_any(folder: Path) -> tuple[Transformer, Tokenizer]:
    """As `load`, of any attention; denoisers.py knows what else a masked-diffusion model has."""
    config = read_config(folder)
    stored.check(config, folder, stored.headers(folder))
    tokenizer = Tokenizer.load(folder)
    check_vocabulary(config, tokenizer, folder)
    model = Transformer(config)
    convert.load_weights(model, folder)
    if (folder / memory_files.SHAPE).is_file() or kind(folder) == REMEMBERING:
        memory_files.load(model, folder, weights_digest(model))
    return model, tokenizer


def kind(folder: Path) -> str:
    """`model_type` of a directory's config.json."""
    return str(read_values(folder).get("model_type"))


def load_frozen(folder: Path) -> Transformer:
    """The model in evaluation mode, none of its weights trainable: a reference. Raises as `load`."""
    model, _ = load(folder)
    return model.train(False).requires_grad_(False)


def load_reward(folder: Path) -> tuple[RewardModel, Tokenizer]:
    """The reward model (float32, training mode) and its tokenizer.

    Raises ModelError for another kind of model, one without its mean and deviation, and as `load`.
    """
    config = read_config(folder)
    values = read_values(folder)
    found = values.get("architectures") or "no architecture"
    found = found[0] if isinstance(found, list) else found
    if found != _classifier(config):
        raise ModelError(
            f"{folder}: expected a reward model ({_classifier(config)}), found {found}; make one with dvc repro stage_reward"
        )
    trunk = {name: shape for name, shape in stored.headers(folder).items() if name != "score.weight"}
    stored.check(replace(config, tied=True), folder, trunk)  # it has no head over the vocabulary
    tokenizer = Tokenizer.load(folder)
    check_vocabulary(config, tokenizer, folder)
    model = RewardModel(Transformer(config))
    model.reward_mean, model.reward_std = _calibration(values, folder)
    state = convert.read_weights(folder)
    score = state.pop("score.weight", None)
    if score is None or score.shape != model.score.weight.shape:
        shape = "nothing" if score is None else list(score.shape)
        raise ModelError(f"{folder}: expected score.weight of shape {list(model.score.weight.shape)}, found {shape}")
    convert.load_state(model.trunk, state, source=str(folder))
    with torch.no_grad():
        model.score.weight.copy_(score)
    return model, tokenizer


def _calibration(values: dict[str, Any], folder: Path) -> tuple[float, float]:
    """`reward_mean` and `reward_std` of config.json. Raises ModelError."""
    mean, std = values.get("reward_mean"), values.get("reward_std")
    if isinstance(mean, int | float) and isinstance(std, int | float) and math.isfinite(mean) and 0 < std < math.inf:
        return float(mean), float(std)
    raise ModelError(
        f"{folder}/config.json: expected numbers reward_mean and reward_std > 0, found {mean!r} and {std!r}; for a "
        "reward model from elsewhere add those of its rewards over some hundred answers"
    )


def same_tokenizer(first: Tokenizer, second: Tokenizer, what_first: str, what_second: str) -> None:
    """Raise ModelError saying which two disagree when ids mean other tokens in one of them than in the other."""
    if first.hash != second.hash:
        raise ModelError(
            f"{what_first} and {what_second} have different tokenizers ({first.hash[:12]} and {second.hash[:12]}); "
            "expected one: train both from the same base model"
        )


def check_vocabulary(config: ModelConfig, tokenizer: Tokenizer, folder: Path) -> None:
    """Raise ModelError when the tokenizer can give an id that the embedding has no row for."""
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab_size} embedding rows; "
            "use the tokenizer the model was trained with (dvc repro stage_tokenizer follows the model file's vocab_size)"
        )


def lineage(folder: Path) -> dict[str, Any]:
    """What lineage.json says; empty for a directory from elsewhere."""
    path = folder / "lineage.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def weights_digest(model: torch.nn.Module, leave_out: str = "\0") -> str:
    """sha256 over names and bytes of all parameters: equal for equal weights, whatever the file looks like.

    Parameters whose names hold `leave_out` do not count (an adapter's, where the base is meant).
    """
    return state_digest({name: parameter for name, parameter in model.named_parameters() if leave_out not in name})


def state_digest(state: Mapping[str, Tensor]) -> str:
    """The same of tensors by name; halves count as the floats that `load` makes of them."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        whole = tensor.detach().cpu()
        whole = whole.float() if whole.dtype in (torch.bfloat16, torch.float16) else whole
        digest.update(name.encode())
        digest.update(whole.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
