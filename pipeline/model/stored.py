"""What the safetensors of a model directory say of themselves, and whether its config.json asks for the same.

    folder -> headers(folder): name -> shape, no tensor read;  check(config, found, ...): raises ModelError, allocates nothing

config.json is text that anybody can edit, and a model of its shape is built before weights are read: a hundred million layers
fill the memory of any machine. So every name and shape that the configuration asks for is compared with the headers first;
safetensors itself refuses a header that speaks of more bytes than its file has. A checked model needs no more numbers than
the files hold.

Not promised: that the numbers in the files are sensible; a directory's links are followed, as huggingface_hub's cache needs.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pipeline.errors import ModelError
from pipeline.model.config import ModelConfig

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
DERIVED = "rotary_emb.inv_freq"  # of old checkpoints: a buffer that follows from the base
KEYS = {  # fields of ModelConfig under Hugging Face's names
    "vocab_size": "vocab_size", "width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "d_ff": "intermediate_size",
}  # fmt: skip
Shape = tuple[int, ...]


def files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the files that hold the weights, and the file of each tensor where an index says it. Raises ModelError."""
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
    """(path, tensor's name, its open file) of every tensor. Raises ModelError for what is missing, damaged, or in two places."""
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
    """The model's parameters, one after the other: name, shape, and the fields that ask for it ("heads * head_dim, width")."""
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

    `keys`: what config.json calls the fields of ModelConfig. A stored copy of a tied head and rotary buffers may be there too.
    """
    weights = folder / WHOLE if (folder / WHOLE).exists() else folder / INDEX
    numbers = {int(match[1]) for match in map(LAYER.match, found) if match}
    if config.layers != len(numbers):
        raise ModelError(
            f"{folder}/config.json: {keys['layers']} is {config.layers}, but {weights} has {len(numbers)} layers; expected the "
            "config.json and the weights of one model"
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
    """Raise ModelError, with the first of them, unless no key of the configuration's tensors is `missing` and none is `extra`."""
    if missing or extra:
        said = [
            f"{len(names)} keys {what} ({', '.join(names[:3])})"
            for what, names in (("missing", missing), ("unknown", extra))
            if names
        ]
        raise ModelError(f"{source}: {' and '.join(said)}; config.json says {config.family}, {config.layers} layers")
