"""Model directories, which every stage publishes under models/: saving and loading them.

    config.json  model.safetensors  generation_config.json  lineage.json
    tokenizer.json  tokenizer_config.json  chat_template.jinja

They are Hugging Face directories, loadable by transformers 4 and 5 (`Qwen3ForCausalLM`; a reward model as
`Qwen3ForSequenceClassification`, without generation_config.json). They contain no pickles, code, timestamps, ids or
host names, so identical runs produce identical bytes. `lineage.json` lists the inputs and the code that produced the
model. Weights are in float32 or the stage's `save_precision`; `load` always returns float32.

Qwen3, Qwen2 and LLaMA directories from elsewhere can be loaded too, if their weights are safetensors. Parameters have
Hugging Face's names, so no conversion is needed, only checks: no missing key, no extra key, every shape correct. There
are two exceptions: a stored copy of a tied head is compared with the embedding and dropped, and the rotary buffers of
old checkpoints (`rotary_emb.inv_freq`, derived from the RoPE base) are ignored.

Headers are checked before anything is allocated. config.json may come from an untrusted source, and the model is built
before the weights are read: a hundred million layers would exhaust the memory of any machine. So `check` first compares
every name and shape implied by the configuration with the files' headers; safetensors itself rejects a header that is
larger than its file. A checked model therefore never has more weights than its files contain.

Not guaranteed: that the values in the files are sensible. Symbolic links are followed, as required by
huggingface_hub's cache. Nothing is unpickled: `.bin` files are refused. Downloads are handled in `config.py`.
"""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline import wings
from pipeline.model.config import FAMILIES, ModelConfig, read_config, read_values
from pipeline.model.heads import RewardModel
from pipeline.model.transformer import Transformer
from pipeline.run import device
from pipeline.run.errors import ModelError
from pipeline.run.tracking import say
from pipeline.run.types import JsonObject
from pipeline.run.workdir import Job, need_space
from pipeline.text.tokenizer import Tokenizer

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
ROTARY_BUFFER = "rotary_emb.inv_freq"  # in old checkpoints; derived from the RoPE base
KEYS = {  # fields of ModelConfig -> Hugging Face's names
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "d_ff": "intermediate_size",
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Shape = tuple[int, ...]


class BaseKind(Protocol):
    """What a wing registers as `base`: support for its own kind of checkpoint in stage base."""

    def is_masked(self, folder: Path) -> bool:
        """Whether a directory contains this kind of checkpoint."""
        ...

    def take_in(self, folder: Path, out: Path, lineage: JsonObject, precision: str) -> None:
        """Convert the checkpoint in `folder` to the model directory `out`. Raises ModelError."""
        ...


def files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the weight files, and the file of each tensor if there is an index. Raises ModelError."""
    index = folder / INDEX
    if not index.exists() or (folder / WHOLE).exists():  # transformers also prefers the single file
        return [WHOLE], {}
    try:
        file_of = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{index}: expected JSON with `weight_map` ({error!r:.200}); fetch it again") from error
    for name in file_of.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(
                f"{index} names {name!r}; expected safetensors files in the same folder; fetch the index again"
            )
    return sorted(set(file_of.values())), file_of


def _open_tensors(folder: Path) -> Iterator[tuple[str, safe_open]]:
    """(name, open file) of every tensor. Raises ModelError for tensors that are missing, damaged, or stored twice."""
    names, file_of = files(folder)
    seen: set[str] = set()
    for name in names:
        path = folder / name
        if not path.exists():
            raise ModelError(f"{path} is missing; expected safetensors (a .bin checkpoint must be converted first)")
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a dict: it has no iterator)
                    if key in seen or file_of.get(key, name) != name:
                        raise ModelError(f"{path}: {key} is in several shards, or not in the one that {INDEX} names")
                    seen.add(key)
                    yield key, file
        except SafetensorError as error:
            raise ModelError(f"{path}: damaged ({error}); fetch or build it again") from error
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error}); expected a safetensors file") from error
    if missing := sorted(set(file_of) - seen):
        raise ModelError(f"{folder}: {INDEX} names {missing[0]} and {len(missing) - 1} more tensors that no shard has")


def headers(folder: Path) -> dict[str, Shape]:
    """The shape of every tensor by name; no tensor is read. Raises ModelError."""
    return {key: tuple(file.get_slice(key).get_shape()) for key, file in _open_tensors(folder)}


def expected(config: ModelConfig) -> Iterator[tuple[str, tuple[Shape, str]]]:
    """Yield the model's parameters: name, shape, and the fields that determine it ("heads * head_dim, width")."""
    sizes = {
        "heads * head_dim": config.heads * config.head_dim,
        "kv_heads * head_dim": config.kv_heads * config.head_dim,
    }

    def parameter(name: str, *fields: str) -> tuple[str, tuple[Shape, str]]:
        return name, (tuple(sizes.get(f) or getattr(config, f) for f in fields), ", ".join(fields))

    yield parameter("model.embed_tokens.weight", "vocab_size", "width")
    yield parameter("model.norm.weight", "width")
    if not config.tied:
        yield parameter("lm_head.weight", "vocab_size", "width")
    for number in range(config.layers):
        layer = f"model.layers.{number}"
        yield parameter(f"{layer}.input_layernorm.weight", "width")
        yield parameter(f"{layer}.post_attention_layernorm.weight", "width")
        for part, rows in (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads")):
            yield parameter(f"{layer}.self_attn.{part}_proj.weight", f"{rows} * head_dim", "width")
            if config.bias:
                yield parameter(f"{layer}.self_attn.{part}_proj.bias", f"{rows} * head_dim")
        yield parameter(f"{layer}.self_attn.o_proj.weight", "width", "heads * head_dim")
        if config.head_norms:
            yield parameter(f"{layer}.self_attn.q_norm.weight", "head_dim")
            yield parameter(f"{layer}.self_attn.k_norm.weight", "head_dim")
        yield parameter(f"{layer}.mlp.gate_proj.weight", "d_ff", "width")
        yield parameter(f"{layer}.mlp.up_proj.weight", "d_ff", "width")
        yield parameter(f"{layer}.mlp.down_proj.weight", "width", "d_ff")


def check(config: ModelConfig, folder: Path, shapes: Mapping[str, Shape], keys: Mapping[str, str] = KEYS) -> None:
    """Raise ModelError unless the tensors with these `shapes` match the configuration of `folder`.

    `keys` maps the fields of ModelConfig to keys of config.json. Rotary buffers and a stored copy of a tied head are
    allowed.
    """
    weights = folder / WHOLE if (folder / WHOLE).exists() else folder / INDEX
    numbers = {int(match[1]) for match in map(LAYER.match, shapes) if match}
    if config.layers != len(numbers):
        raise ModelError(
            f"{folder}/config.json: {keys['layers']} is {config.layers}, but {weights} has {len(numbers)} layers;"
            " expected the config.json and the weights of the same model"
        )
    required = dict(expected(config))  # bounded: the number of layers matches the header
    missing = sorted(required.keys() - shapes.keys())
    head = {"lm_head.weight"} if config.tied else set()
    extra = sorted(key for key in shapes.keys() - required.keys() - head if not key.endswith(ROTARY_BUFFER))
    _check_keys(config, missing, extra, source=str(weights))
    for name, (shape, fields) in required.items():
        if tuple(shapes[name]) != shape:
            field_keys = re.sub(r"\w+", lambda match: keys.get(match[0], match[0]), fields)
            raise ModelError(
                f"{weights}: {name} has shape {list(shapes[name])}, but config.json requires {list(shape)}"
                f" ({field_keys})"
            )


def _check_keys(config: ModelConfig, missing: list[str], extra: list[str], *, source: str) -> None:
    """Raise ModelError naming the first `missing` and `extra` keys, if any."""
    if missing or extra:
        differences = [
            f"{len(names)} keys {what} ({', '.join(names[:3])})"
            for what, names in (("missing", missing), ("unknown", extra))
            if names
        ]
        raise ModelError(
            f"{source}: {' and '.join(differences)}; config.json describes a {config.family} model with"
            f" {config.layers} layers"
        )


# -- weights -----------------------------------------------------------------------------------------------------------


def load_causal(folder: Path, *, dtype: torch.dtype = torch.float32) -> Transformer:
    """The model in a Hugging Face directory, with weights cast to `dtype`. Raises ModelError naming the file or key."""
    config = read_config(folder)
    check(config, folder, headers(folder))
    model = empty(config, dtype)
    load_weights(model, folder)
    return model


def empty(config: ModelConfig, dtype: torch.dtype) -> Transformer:
    """A model with uninitialized weights."""
    with torch.device("meta"):
        model = Transformer(config)
    return model.to(dtype).to_empty(device="cpu")


def load_weights(model: Transformer, folder: Path) -> None:
    """Fill `model` with the weights of a directory. Raises ModelError naming the file or key."""
    load_state(model, read_weights(folder), source=str(folder))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors in `model.safetensors`, or in the shards listed in the index. Raises ModelError."""
    return {key: file.get_tensor(key) for key, file in _open_tensors(folder)}


def require_finite(folder: Path) -> str:
    """The precision of the weights: fp32, bf16 or fp16; fp32 if they differ.

    Raises ModelError naming the first tensor with non-finite values or another dtype.
    """
    found: set[torch.dtype] = set()
    for name, file in _open_tensors(folder):
        tensor = file.get_tensor(name)
        if tensor.dtype not in DTYPES.values():
            raise ModelError(f"{folder}: {name} is {tensor.dtype}; expected weights in float32, bfloat16 or float16")
        if not tensor.isfinite().all():
            number = int((~tensor.isfinite()).sum())
            raise ModelError(
                f"{folder}: {name} ({str(tensor.dtype).removeprefix('torch.')}) contains non-finite values ({number} of"
                f" {tensor.numel()}), so no loss would be finite; use a bfloat16 or float32 version of the checkpoint"
            )
        found.add(tensor.dtype)
    return next(name for name, dtype in DTYPES.items() if dtype in found or len(found) > 1)


def load_state(model: Transformer, state: Mapping[str, Tensor], *, source: str = "the weights") -> None:
    """Copy weights with Hugging Face's names into `model`, cast to the model's dtype.

    Raises ModelError if a key is missing or unknown, or if a shape differs from the configuration.
    """
    config = model.config
    state = _drop_derived(state, config, source)
    parameters = dict(model.named_parameters())
    missing, extra = sorted(set(parameters) - set(state)), sorted(set(state) - set(parameters))
    _check_keys(config, missing, extra, source=source)
    for name, parameter in parameters.items():
        if state[name].shape != parameter.shape:
            actual, shape = list(state[name].shape), list(parameter.shape)
            raise ModelError(f"{source}: {name} has shape {actual}, but config.json requires {shape}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])


def _drop_derived(state: Mapping[str, Tensor], config: ModelConfig, source: str) -> dict[str, Tensor]:
    """Drop rotary buffers, and a tied head that equals the embedding. Raises ModelError if the head differs."""
    parameters = {key: tensor for key, tensor in state.items() if not key.endswith(ROTARY_BUFFER)}
    head, table = parameters.get("lm_head.weight"), parameters.get("model.embed_tokens.weight")
    if config.tied and head is not None and table is not None:
        if not torch.equal(head, table):
            raise ModelError(
                f"{source}: config.json ties the head to the embedding, but lm_head.weight differs from it"
            )
        del parameters["lm_head.weight"]
    return parameters


# -- model directories -------------------------------------------------------------------------------------------------


def save(
    folder: Path, model: Transformer, tokenizer: Tokenizer, lineage: JsonObject, *, precision: str = "fp32"
) -> None:
    """Write a model directory, with weights rounded to `precision` (fp32, bf16, fp16). Weights over 5 GB are sharded.

    Raises ModelError if the tokenizer has more ids than the embedding has rows, and StagecoachError, before writing, if
    there is not enough disk space.
    """
    ids = {"pad_token_id": tokenizer.pad, "bos_token_id": None, "eos_token_id": tokenizer.turn_end}
    hook, own = model.hook, dict(model.state_dict())
    added = {name: own.pop(name) for name in list(own) if hook is not None and name.startswith(f"{hook.name}.")}
    state = {name: tensor.to(DTYPES[precision]) for name, tensor in own.items()}
    values = model.config.to_hf(str(DTYPES[precision]).removeprefix("torch.")) | ids
    if hook is not None:
        values |= hook.hf_keys | {"base_model_type": model.config.family}
    _save(folder, state, model.config, tokenizer, lineage, values)
    if hook is not None:
        weights = {name.removeprefix(f"{hook.name}."): tensor.detach().cpu() for name, tensor in added.items()}
        for save_hook in wings.each("save_hook"):
            save_hook(folder, hook, weights, state_digest(state))
    stops = {"eos_token_id": [tokenizer.turn_end, tokenizer.end_of_text], "pad_token_id": tokenizer.pad}
    _write(folder / "generation_config.json", {"do_sample": False} | stops)


def save_reward(folder: Path, model: RewardModel, tokenizer: Tokenizer, lineage: JsonObject) -> None:
    """Write a reward model as a transformers sequence classifier with one label. Same errors as `save`.

    transformers scores the last token that is not `pad_token_id`, so a row must end with the token to score and be
    padded on the right. It returns the raw reward; config.json has `reward_mean` and `reward_std` to normalize it.
    """
    values = model.config.to_hf() | {
        "architectures": [_classifier_name(model.config)],
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


def _classifier_name(config: ModelConfig) -> str:
    return FAMILIES[config.family].replace("ForCausalLM", "ForSequenceClassification")


def _save(
    folder: Path,
    state: dict[str, Tensor],
    config: ModelConfig,
    tokenizer: Tokenizer,
    lineage: JsonObject,
    values: JsonObject,
) -> None:
    """Write weights, tokenizer, lineage, and `values` as config.json."""
    assert not any(".lora_" in name for name in state), "merge the adapter before saving the model"
    check_vocabulary(config, tokenizer, folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    need_space(folder, sum(tensor.numel() * tensor.element_size() for tensor in state.values()) + 20_000_000)
    save_torch_state_dict(state, folder, max_shard_size="5GB", metadata={"format": "pt"})
    _write(folder / "config.json", values)
    _write(folder / "lineage.json", lineage | {"tokenizer": tokenizer.hash})
    tokenizer.save(folder)


def _write(path: Path, value: JsonObject) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load(folder: Path) -> tuple[Transformer, Tokenizer]:
    """The causal model (float32, training mode) and its tokenizer.

    Raises ModelError for a masked-diffusion model and for an inconsistent directory: a missing file, an extra or
    missing tensor, a tensor of the wrong shape, or a tokenizer with more ids than the embedding has rows.
    """
    if read_config(folder).attention != "causal":
        raise ModelError(
            f"{folder}: expected a causal model, found a masked-diffusion one; use models/code, models/tools or a model"
            " trained from them (only the stages diffusion, diffusion_dpo and diffusion_grpo can train this one)"
        )
    return load_any(folder)


def load_any(folder: Path) -> tuple[Transformer, Tokenizer]:
    """Like `load`, but for any attention; `diffusion/files.py` reads a masked-diffusion model's additional keys."""
    config = read_config(folder)
    check(config, folder, headers(folder))
    tokenizer = Tokenizer.load(folder)
    check_vocabulary(config, tokenizer, folder)
    model = Transformer(config)
    load_weights(model, folder)
    for load_hook in wings.each("load_hook"):
        load_hook(model, folder)
    return model, tokenizer


def pass_through(base: Path, out: Path, job: Job, missing: Path) -> None:
    """Copy the model `base` to `out` unchanged, for a stage whose data file, `missing`, is empty."""
    if device.rank():
        return
    shutil.copytree(base, out, ignore=shutil.ignore_patterns("adapter"))  # from stage lora: already merged
    tokenizer = {"tokenizer": Tokenizer.load(base).hash} if (base / "tokenizer.json").is_file() else {}
    (out / "lineage.json").unlink(missing_ok=True)
    _write(out / "lineage.json", job.lineage | tokenizer)
    job.report(passed_through=str(missing))
    say(f"{job.name}: {missing} has nothing to train on, so {base} passes through unchanged")


def kind(folder: Path) -> str:
    """`model_type` of a directory's config.json."""
    return str(read_values(folder).get("model_type"))


def load_frozen(folder: Path) -> Transformer:
    """The model in evaluation mode with frozen weights, for use as a reference. Same errors as `load`."""
    model, _ = load(folder)
    return model.train(False).requires_grad_(False)


def load_reward(folder: Path) -> tuple[RewardModel, Tokenizer]:
    """The reward model (float32, training mode) and its tokenizer.

    Raises ModelError for a different kind of model or a missing mean or deviation; otherwise the same errors as `load`.
    """
    config = read_config(folder)
    values = read_values(folder)
    architecture = values.get("architectures") or "no architecture"
    architecture = architecture[0] if isinstance(architecture, list) else architecture
    if architecture != _classifier_name(config):
        raise ModelError(
            f"{folder}: expected a reward model ({_classifier_name(config)}), found {architecture}; run dvc repro"
            " stage_reward to train one"
        )
    trunk = {name: shape for name, shape in headers(folder).items() if name != "score.weight"}
    check(replace(config, tied=True), folder, trunk)  # a reward model has no head over the vocabulary
    tokenizer = Tokenizer.load(folder)
    check_vocabulary(config, tokenizer, folder)
    model = RewardModel(Transformer(config))
    model.reward_mean, model.reward_std = _calibration(values, folder)
    state = read_weights(folder)
    score = state.pop("score.weight", None)
    if score is None or score.shape != model.score.weight.shape:
        shape = "nothing" if score is None else list(score.shape)
        raise ModelError(f"{folder}: expected score.weight of shape {list(model.score.weight.shape)}, found {shape}")
    load_state(model.trunk, state, source=str(folder))
    with torch.no_grad():
        model.score.weight.copy_(score)
    return model, tokenizer


def _calibration(values: JsonObject, folder: Path) -> tuple[float, float]:
    """`reward_mean` and `reward_std` of config.json. Raises ModelError."""
    mean, std = values.get("reward_mean"), values.get("reward_std")
    if isinstance(mean, int | float) and isinstance(std, int | float) and math.isfinite(mean) and 0 < std < math.inf:
        return float(mean), float(std)
    raise ModelError(
        f"{folder}/config.json: expected numbers `reward_mean` and `reward_std` > 0, found {mean!r} and {std!r}; for a "
        "reward model from elsewhere, add the mean and standard deviation of its rewards over a few hundred answers"
    )


def same_tokenizer(first: Tokenizer, second: Tokenizer, what_first: str, what_second: str) -> None:
    """Raise ModelError naming both models if their tokenizers differ."""
    if first.hash != second.hash:
        raise ModelError(
            f"{what_first} and {what_second} have different tokenizers ({first.hash[:12]} and {second.hash[:12]}); "
            "expected the same tokenizer; train both from the same base model"
        )


def check_vocabulary(config: ModelConfig, tokenizer: Tokenizer, folder: Path) -> None:
    """Raise ModelError if the tokenizer has ids without a row in the embedding."""
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, but the embedding has {config.vocab_size} rows;"
            " use the model's own tokenizer (dvc repro stage_tokenizer trains one with the model file's vocab_size)"
        )


def lineage(folder: Path) -> JsonObject:
    """The contents of lineage.json; empty for a directory from elsewhere."""
    path = folder / "lineage.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def weights_digest(model: torch.nn.Module, leave_out: str = "\0") -> str:
    """SHA-256 of the names and bytes of all parameters: identical for identical weights, however they are stored.

    Parameters with `leave_out` in their names are skipped (an adapter's, to get the digest of the base).
    """
    return state_digest({name: parameter for name, parameter in model.named_parameters() if leave_out not in name})


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Like `weights_digest`, for a state dict; half precision is hashed as float32, since `load` converts it."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        values = tensor.detach().cpu()
        values = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
        digest.update(name.encode())
        digest.update(values.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
