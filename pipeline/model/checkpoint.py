"""Model directories: what every stage publishes under models/. The architecture travels with the weights.

    config.json  model.safetensors  generation_config.json  lineage.json
    tokenizer.json  tokenizer_config.json  chat_template.jinja

It is a Hugging Face directory: transformers 4 and 5 load it (`Qwen3ForCausalLM`; a reward model as
`Qwen3ForSequenceClassification`, without generation_config.json). No pickle, no code, no clock, id or host name in it,
so equal runs give equal bytes. `lineage.json` says which inputs and code made it.
Weights are float32, or what `save_precision` of their stage says; `load` gives float32 in any case.

What the safetensors of a model directory say of themselves, and whether its config.json asks for the same.

    folder -> headers(folder): name -> shape, no tensor read;  check(config, found, ...): raises ModelError, allocates
                                                               nothing

config.json is text that anybody can edit, and a model of its shape is built before weights are read: a hundred million
layers fill the memory of any machine. So every name and shape that the configuration asks for is compared with the
headers first; safetensors itself refuses a header that speaks of more bytes than its file has. A checked model needs no
more numbers than the files hold.

Not promised: that the numbers in the files are sensible; a directory's links are followed, as huggingface_hub's cache
needs.

Weights in and out of Hugging Face directories: Qwen3, Qwen2 and LLaMA, from local safetensors.

Our parameters carry Hugging Face's names, so converting is checking: no key missing, none over, every shape right.
Only two things may differ: a stored copy of a tied head is compared and dropped, and old checkpoints' rotary buffers
(`rotary_emb.inv_freq`, derived from the base) are left out.

Not here: writing directories (`checkpoint.py`), tokenizers, downloads. Nothing is unpickled: `.bin` files are refused.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.memory import files as memory_files
from pipeline.model.config import FAMILIES, REMEMBERING, ModelConfig, read_config, read_values
from pipeline.model.heads import RewardModel
from pipeline.model.transformer import Transformer
from pipeline.run.errors import ModelError
from pipeline.run.workdir import need_space
from pipeline.text.tokenizer import Tokenizer

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
DERIVED = "rotary_emb.inv_freq"  # of old checkpoints: a buffer that follows from the base
KEYS = {  # fields of ModelConfig under Hugging Face's names
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "d_ff": "intermediate_size",
}
Shape = tuple[int, ...]


def files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the files that hold the weights, and the file of each tensor where an index says it. Raises
    ModelError.
    """
    index = folder / INDEX
    if not index.exists() or (folder / WHOLE).exists():  # of both, transformers takes the whole file too
        return [WHOLE], {}
    try:
        places = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{index}: expected a JSON object with weight_map ({error!r:.200}); fetch it again") from error
    for name in places.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index} names {name!r}; expected safetensors of the same folder; fetch it again")
    return sorted(set(places.values())), places


def opened(folder: Path) -> Iterator[tuple[Path, str, Any]]:
    """(path, tensor's name, its open file) of every tensor. Raises ModelError for what is missing, damaged, or in
    two places.
    """
    names, places = files(folder)
    seen: set[str] = set()
    for name in names:
        path = folder / name
        if not path.exists():
            raise ModelError(f"{path} is missing; expected safetensors (a .bin checkpoint must be converted first)")
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a dict: it has no iterator)
                    if key in seen or places.get(key, name) != name:
                        raise ModelError(f"{path}: {key} stands in more than one shard, or not where {INDEX} says")
                    seen.add(key)
                    yield path, key, file
        except SafetensorError as error:
            raise ModelError(f"{path}: damaged ({error}); fetch or build it again") from error
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error}); expected a file of safetensors") from error
    if missing := sorted(set(places) - seen):
        raise ModelError(f"{folder}: {INDEX} names {missing[0]} and {len(missing) - 1} more that no shard holds")


def headers(folder: Path) -> dict[str, Shape]:
    """The shape of every tensor by name; no tensor is read. Raises ModelError."""
    return {key: tuple(file.get_slice(key).get_shape()) for _, key, file in opened(folder)}


def expected(config: ModelConfig) -> Iterator[tuple[str, tuple[Shape, str]]]:
    """The model's parameters, one after the other: name, shape, and the fields that ask for it ("heads * head_dim,
    width").
    """
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


def check(config: ModelConfig, folder: Path, found: Mapping[str, Shape], keys: Mapping[str, str] = KEYS) -> None:
    """Raise ModelError unless the tensors `found` are those that the configuration of `folder` asks for.

    `keys`: what config.json calls the fields of ModelConfig. A stored copy of a tied head and rotary buffers may be
    there too.
    """
    weights = folder / WHOLE if (folder / WHOLE).exists() else folder / INDEX
    numbers = {int(match[1]) for match in map(LAYER.match, found) if match}
    if config.layers != len(numbers):
        raise ModelError(
            f"{folder}/config.json: {keys['layers']} is {config.layers}, but {weights} has {len(numbers)} layers;"
            " expected the config.json and the weights of one model"
        )
    asked = dict(expected(config))  # of no more layers than the header names
    missing = sorted(asked.keys() - found.keys())
    head = {"lm_head.weight"} if config.tied else set()
    extra = sorted(key for key in found.keys() - asked.keys() - head if not key.endswith(DERIVED))
    need_keys(config, missing, extra, source=str(weights))
    for name, (shape, fields) in asked.items():
        if tuple(found[name]) != shape:
            named = re.sub(r"\w+", lambda match: keys.get(match[0], match[0]), fields)
            raise ModelError(
                f"{weights}: {name} has shape {list(found[name])}, config.json asks for {list(shape)} ({named})"
            )


def need_keys(config: ModelConfig, missing: list[str], extra: list[str], *, source: str) -> None:
    """Raise ModelError, with the first of them, unless no key of the configuration's tensors is `missing` and none
    is `extra`.
    """
    if missing or extra:
        said = [
            f"{len(names)} keys {what} ({', '.join(names[:3])})"
            for what, names in (("missing", missing), ("unknown", extra))
            if names
        ]
        raise ModelError(f"{source}: {' and '.join(said)}; config.json says {config.family}, {config.layers} layers")


# -- convert -----------------------------------------------------------------------------------------------------------


def load_causal(folder: Path, *, dtype: torch.dtype = torch.float32) -> Transformer:
    """The model of a Hugging Face directory, weights cast to `dtype`. Raises ModelError naming file or key."""
    config = read_config(folder)
    check(config, folder, headers(folder))
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
    """All tensors of `model.safetensors`, where it is not there of the shards that its index names. Raises
    ModelError.
    """
    return {key: file.get_tensor(key) for _, key, file in opened(folder)}


def load_state(model: Transformer, state: Mapping[str, Tensor], *, source: str = "the weights") -> None:
    """Copy weights under Hugging Face's names into `model`, cast to its dtype.

    Raises ModelError where a key is missing, unknown, or has another shape than the configuration asks for.
    """
    config = model.config
    state = _without_derived(state, config, source)
    parameters = dict(model.named_parameters())
    missing, extra = sorted(set(parameters) - set(state)), sorted(set(state) - set(parameters))
    need_keys(config, missing, extra, source=source)
    for name, parameter in parameters.items():
        if state[name].shape != parameter.shape:
            asked, has = list(parameter.shape), list(state[name].shape)
            raise ModelError(f"{source}: {name} has shape {has}, config.json asks for {asked}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])


def _without_derived(state: Mapping[str, Tensor], config: ModelConfig, source: str) -> dict[str, Tensor]:
    """Drop a tied head that equals the embedding, and rotary buffers. Raises ModelError for a head that differs."""
    kept = {key: tensor for key, tensor in state.items() if not key.endswith(DERIVED)}
    head, table = kept.get("lm_head.weight"), kept.get("model.embed_tokens.weight")
    if config.tied and head is not None and table is not None:
        if not torch.equal(head, table):
            raise ModelError(
                f"{source}: config.json ties the head to the embedding, but lm_head.weight differs from it"
            )
        del kept["lm_head.weight"]
    return kept


# -- checkpoint --------------------------------------------------------------------------------------------------------


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

    Raises ModelError for a masked-diffusion model, and for a directory that is not whole: a missing file, a tensor too
    many, too few or of another shape, a tokenizer with more ids than the embedding has rows.
    """
    if read_config(folder).attention != "causal":
        raise ModelError(
            f"{folder}: expected a causal model, found a masked-diffusion one; take models/code, models/tools or one"
            " that was trained from them"
        )
    return load_any(folder)


def load_any(folder: Path) -> tuple[Transformer, Tokenizer]:
    """As `load`, of any attention; denoisers.py knows what else a masked-diffusion model has."""
    config = read_config(folder)
    check(config, folder, headers(folder))
    tokenizer = Tokenizer.load(folder)
    check_vocabulary(config, tokenizer, folder)
    model = Transformer(config)
    load_weights(model, folder)
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
            f"{folder}: expected a reward model ({_classifier(config)}), found {found}; make one with dvc repro"
            " stage_reward"
        )
    trunk = {name: shape for name, shape in headers(folder).items() if name != "score.weight"}
    check(replace(config, tied=True), folder, trunk)  # it has no head over the vocabulary
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
            f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab_size} embedding rows; use"
            " the tokenizer the model was trained with (dvc repro stage_tokenizer follows the model file's vocab_size)"
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
