"""The shape of a model, its `config.json` in Hugging Face's format, and the location of the user's checkpoint.

In: a file in `conf/model/`, or the `config.json` of a model directory. Out: `ModelConfig`, or the dict to write.
The architecture is Qwen3's (Yang et al. 2025, arXiv:2505.09388): RMSNorm before each block, half-split RoPE, SwiGLU,
grouped-query attention, a norm per head on queries and keys, no biases. Two related families also load: Qwen2 (biases
on q, k, v and no head norms) and LLaMA (neither).

`to_hf` writes the keys of transformers 4 *and* 5: `rope_theta` and `rope_parameters`, `torch_dtype` and `dtype`. If
only the keys of transformers 5 are present, transformers 4 and mlx-lm silently use a RoPE base of 10,000.

Not supported: scaled RoPE, sliding windows, MoE, biases elsewhere. `from_hf` raises an error naming the key.

**The user's checkpoint** is a local model directory or a model on the Hugging Face hub, imported by stage base.

    base.folder, base.hub -> BaseConfig;  fetched("owner/name@revision") -> Checkpoint: a folder and its commit

A directory is an input of the stage, so DVC and the work key depend on its contents. A hub revision is resolved once to
a commit, which is printed and recorded in the lineage. Only config.json, tokenizer.json and safetensors are fetched,
into huggingface_hub's cache; the variables HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE apply.

Nothing here imports torch.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from pipeline import wings
from pipeline.run.errors import ModelError
from pipeline.run.tracking import say
from pipeline.run.types import JsonObject

FAMILIES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
# Our own model type, so that causal engines reject these models instead of generating nonsense.
BIDIRECTIONAL = "stagecoach_mdm"
_WingKeys: type[object] = type("_WingKeys", tuple(offer() for offer in wings.each("model_keys")), {})


@dataclass(frozen=True, kw_only=True)
class ModelConfig(_WingKeys):
    """Shape of a `Transformer`; wings add keys (layers.py). Raises ValueError for inconsistent values."""

    vocab_size: int
    """Number of rows of the embedding; a multiple of 64 in our own models."""
    width: int
    """Width of the residual stream."""
    layers: int
    """Number of blocks of attention and SwiGLU."""
    heads: int
    """Number of query heads."""
    kv_heads: int
    """Number of key and value heads; must divide `heads`."""
    head_dim: int
    """Width of a head; must be even. heads * head_dim need not equal width."""
    d_ff: int
    """Hidden width of SwiGLU; not scaled or rounded."""
    max_context: int
    """Longest row, in tokens."""
    rope_theta: float
    """Base of the rotary angles."""
    tied: bool
    """Tie the head to the embedding."""
    bias: bool = False
    """Biases on q, k and v, as in the Qwen2 family, which has no head norms."""
    qk_norm: bool = True
    """RMSNorm on each query and key head, before RoPE; has no effect with `bias`."""
    norm_eps: float = 1e-6
    """RMSNorm's epsilon, added to the mean square."""
    attention: str = "causal"
    """causal or bidirectional."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "d_ff", "max_context"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}: expected at least 1, found {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"model.kv_heads: expected a divisor of heads ({self.heads}), found {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim: expected an even number (RoPE rotates pairs), found {self.head_dim}")
        if self.rope_theta <= 0 or self.norm_eps <= 0:
            raise ValueError("model.rope_theta and model.norm_eps: expected positive numbers")
        if self.attention not in ("causal", "bidirectional"):
            raise ValueError(f"model.attention: expected causal or bidirectional, found {self.attention!r}")
        for check in wings.each("check_model"):
            check(self)

    @property
    def family(self) -> str:
        """The Hugging Face `model_type` that matches the weights' names: qwen3, qwen2 or llama."""
        return "qwen2" if self.bias else "qwen3" if self.qk_norm else "llama"

    @property
    def head_norms(self) -> bool:
        """Whether each query and key head has its own norm."""
        return self.family == "qwen3"

    @property
    def matmul_parameters(self) -> int:
        """Number of weights in matrix products: includes the head, but not the embedding (a lookup) or the norms."""
        d, h = self.width, self.head_dim
        layer = 2 * d * self.heads * h + 2 * d * self.kv_heads * h + 3 * d * self.d_ff
        return self.layers * layer + self.vocab_size * d

    @property
    def initializer_range(self) -> float:
        """Standard deviation of fresh weights: 1/sqrt(2 * width), but at most 0.05. Tied logits then start with a
        standard deviation of 0.7.
        """
        return min(0.05, (2 * self.width) ** -0.5)

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied embedding is counted once."""
        norms = self.layers * (2 * self.width + (2 * self.head_dim if self.head_norms else 0)) + self.width
        biases = self.layers * (self.heads + 2 * self.kv_heads) * self.head_dim if self.bias else 0
        return self.matmul_parameters + norms + biases + (0 if self.tied else self.vocab_size * self.width)

    def flops_per_token(self, context: int) -> int:
        """Training FLOPs per token at this context length, counted as in karpathy/nanochat: 6 per weight, 12 per
        attention cell.
        """
        return 6 * self.matmul_parameters + 12 * self.layers * self.heads * self.head_dim * context

    def to_hf(self, dtype: str = "float32") -> JsonObject:
        """The architecture's part of `config.json`; the caller adds the tokenizer's ids (eos, pad)."""
        causal = self.attention == "causal"
        config: JsonObject = {
            "architectures": [FAMILIES[self.family] if causal else "StagecoachMaskedDiffusion"],
            "model_type": self.family if causal else BIDIRECTIONAL,
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.d_ff,
            "max_position_embeddings": self.max_context,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rope_scaling": None,
            "rms_norm_eps": self.norm_eps,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "attention_bias": self.bias,
            "attention_dropout": 0.0,
            "initializer_range": self.initializer_range,
            "use_cache": True,
            "torch_dtype": dtype,
            "dtype": dtype,
        }
        if self.family != "llama":
            config |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": self.layers}
        if not causal:
            config["base_model_type"] = self.family  # determines the names and shapes of the tensors
        return config

    @classmethod
    def from_hf(cls, config: JsonObject) -> "ModelConfig":
        """Read a `config.json`. Raises ModelError naming an unsupported, missing or invalid key."""
        kind = config.get("model_type")
        ours = [BIDIRECTIONAL, *(offer() for offer in wings.each("model_type"))]
        family = config.get("base_model_type", "qwen3") if kind in ours else kind
        if not isinstance(family, str) or family not in FAMILIES:
            raise ModelError(f"config.json: model_type {kind!r} is unsupported; expected one of {', '.join(FAMILIES)}")
        _check_supported(config, family)
        tied = config.get("tie_word_embeddings", False)
        if not isinstance(tied, bool):
            raise ModelError(f"config.json: tie_word_embeddings: expected true or false, found {tied!r}")
        try:
            heads, width = positive_int(config, "num_attention_heads"), positive_int(config, "hidden_size")
            return cls(
                vocab_size=positive_int(config, "vocab_size"),
                width=width,
                layers=positive_int(config, "num_hidden_layers"),
                heads=heads,
                kv_heads=positive_int(config, "num_key_value_heads", heads),
                head_dim=positive_int(config, "head_dim", 128 if family == "qwen3" else width // heads),
                d_ff=positive_int(config, "intermediate_size"),
                max_context=positive_int(config, "max_position_embeddings"),
                rope_theta=_rope_theta(config),
                tied=tied,
                bias=family == "qwen2",
                qk_norm=family != "llama",
                norm_eps=finite_number(config, "rms_norm_eps", 1e-6),
                attention="bidirectional" if kind == BIDIRECTIONAL else "causal",
            )
        except KeyError as error:
            raise ModelError(
                f"config.json: key {error} is missing; expected a complete {family} configuration"
            ) from error
        except ModelError:
            raise
        except ValueError as error:
            raise ModelError(f"config.json: {error}") from error


def read_config(folder: Path) -> ModelConfig:
    """The model shape in a directory's `config.json`. Raises ModelError."""
    return ModelConfig.from_hf(read_values(folder))


def read_values(folder: Path) -> JsonObject:
    """The contents of a directory's `config.json`. Raises ModelError."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing: {folder} is not a model directory{_reason(folder)}") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON ({str(error) or 'nested too deeply'})") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(values).__name__}; fetch it again")
    return values


def _reason(folder: Path) -> str:
    """The end of an error message for a directory that contains an adapter or only a README instead of a model."""
    if (folder / "adapter_config.json").is_file():
        return " but a peft adapter; merge it into its model first (merge_and_unload, save_pretrained)"
    readme = folder / "README.md"
    return f". {readme.read_text(encoding='utf-8', errors='replace').strip():.400}" if readme.is_file() else ""


def positive_int(config: JsonObject, key: str, default: int | None = None) -> int:
    """A positive integer in `config.json`.

    Raises ModelError naming the key, or KeyError if the key is absent and there is no `default`.
    """
    value = config[key] if default is None else config.get(key)
    value = default if value is None and default is not None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key}: expected a whole number of at least 1, found {value!r:.80}")
    return value


def finite_number(config: JsonObject, key: str, default: float) -> float:
    """A finite number in `config.json`. Raises ModelError naming the key."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(f"config.json: {key}: expected a number, found {value!r:.80}")
    return float(value)


def _object(config: JsonObject, key: str) -> JsonObject:
    """An object in `config.json`, empty if absent or null. Raises ModelError naming the key."""
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise ModelError(f"config.json: {key}: expected an object, found {value!r:.80}")
    return value


def _rope_theta(config: JsonObject) -> float:
    """The RoPE base, from the key of transformers 4 or 5. Raises ModelError if they disagree or both are missing."""
    inner = _object(config, "rope_parameters")
    bases = [finite_number(keys, "rope_theta", 0.0) for keys in (inner, config) if keys.get("rope_theta") is not None]
    if not bases:
        raise ModelError("config.json: found neither rope_theta nor rope_parameters.rope_theta; add the RoPE base")
    if bases[0] != bases[-1]:
        raise ModelError(
            f"config.json: rope_theta is {bases[-1]}, but rope_parameters.rope_theta is {bases[0]}; correct one of them"
        )
    return bases[0]


def _check_supported(config: JsonObject, family: str) -> None:
    """Raise ModelError for an unsupported key that, if ignored, would silently change the model's outputs."""
    rope = _object(config, "rope_scaling") or _object(config, "rope_parameters")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    unsupported = {
        "rope_type": rope_type if rope_type != "default" else None,
        "hidden_act": config.get("hidden_act", "silu") if config.get("hidden_act", "silu") != "silu" else None,
        "use_sliding_window": config.get("use_sliding_window") or None,
        "mlp_bias": config.get("mlp_bias") or None,
        "attention_bias": (config.get("attention_bias") or None) if family != "qwen2" else None,
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0)
        if rope.get("partial_rotary_factor", 1.0) != 1.0
        else None,
        "quantization_config": config.get("quantization_config"),
    }
    for key, value in unsupported.items():
        if value is not None:
            raise ModelError(
                f"config.json: {key} = {value!r} is not supported for {family}; use a checkpoint without this key"
            )


# -- the user's checkpoint -------------------------------------------------------------------------------------


SCRATCH = "scratch"  # models/scratch means starting without a model
PLACEHOLDER = "data/pretrained"  # a directory in git that contains no model
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """The block `base`: the user's checkpoint. Raises ValueError."""

    folder: str = PLACEHOLDER
    """Directory of a Qwen3, Qwen2, LLaMA, Dream, DiffuCoder or LLaDA model, with weights in safetensors."""
    hub: str | None = None
    """owner/name@revision on the Hugging Face hub, used instead of `folder`; preferably with a 40-digit commit hash."""

    def __post_init__(self) -> None:
        if self.hub is not None and not HUB_ID.fullmatch(self.hub):
            raise ValueError(f"hub: expected owner/name or owner/name@revision, got {self.hub!r}")

    @property
    def absent(self) -> bool:
        """Whether no checkpoint is configured: `folder` is the repository's placeholder and contains no model."""
        return (
            self.hub is None
            and self.folder == PLACEHOLDER
            and not any(path.suffix in (".json", ".safetensors", ".bin") for path in Path(self.folder).glob("*"))
        )

    def inputs(self) -> dict[str, str]:
        """The inputs of stage base, under the names in its `Wiring` (run/stage.py). Raises ModelError."""
        if self.hub is not None:
            return {}
        if not Path(self.folder).is_dir():
            hint = f" For a model on the hub, set base.hub={self.folder}"
            raise ModelError(
                f"base.folder: expected a model directory, but {self.folder} is not one."
                f"{hint if HUB_ID.fullmatch(self.folder) else ' Give the path to a model directory'}"
            )
        return {"folder": self.folder}


@dataclass(frozen=True)
class Checkpoint:
    """A hub checkpoint on disk."""

    folder: Path
    name: str  # owner/name
    commit: str


def fetched(hub: str) -> Checkpoint:
    """The checkpoint `owner/name@revision` from huggingface_hub's cache, fetched if missing. Raises ModelError."""
    match = HUB_ID.fullmatch(hub)
    assert match is not None  # checked by BaseConfig
    name, commit = match[1], _resolve_commit(match[1], match[2] or "main")
    files = [_fetch(name, commit, file) for file in ("config.json", "tokenizer.json")]
    _fetch_weights(name, commit)
    return Checkpoint(files[0].parent, name, commit)


def _resolve_commit(name: str, revision: str) -> str:
    """The commit of a revision, taken from the path of the files that huggingface_hub fetched."""
    commit = _fetch(name, revision, "config.json").parent.name
    if not COMMIT.fullmatch(commit):
        raise ModelError(f"{name}: the hub has no commit for {revision}; set base.hub={name}@<40 hex digits>")
    if commit != revision:
        say(f"{name}: revision {commit}")
    return commit


def _fetch_weights(name: str, commit: str) -> None:
    """Fetch the weights: a single file, or shards. Raises ModelError, including for a pickle-only checkpoint."""
    if _fetch(name, commit, WEIGHTS, optional=True) is not None:
        return
    index = _fetch(name, commit, INDEX, optional=True)
    if index is None:
        raise ModelError(
            f"{name}@{commit}: found neither {WEIGHTS} nor {INDEX}; pickles (.bin) are not fetched, so use a checkpoint"
            " with safetensors"
        )
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{name}@{commit}: {INDEX}: expected a JSON object with `weight_map` ({error!r})") from error
    for shard in shards:
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(f"{name}@{commit}: {INDEX} names {shard!r}; expected safetensors files in the same folder")
        _fetch(name, commit, shard)


@overload
def _fetch(name: str, revision: str, file: str) -> Path: ...
@overload
def _fetch(name: str, revision: str, file: str, *, optional: bool) -> Path | None: ...
def _fetch(name: str, revision: str, file: str, *, optional: bool = False) -> Path | None:
    """A file from huggingface_hub's cache, fetched if missing; None if it is optional and the model has none."""
    import httpx  # these imports take seconds and are needed only for the hub
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(hf_hub_download(name, file, revision=revision))
    except RemoteEntryNotFoundError as error:
        if optional:
            return None
        raise ModelError(f"{name}@{revision}: the model has no {file}, so it cannot be used as a base") from error
    except GatedRepoError as error:
        raise ModelError(
            f"{name}: the model is gated; accept its terms at https://huggingface.co/{name} and set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        what = "such model" if isinstance(error, RepositoryNotFoundError) else f"revision {revision}"
        raise ModelError(
            f"{name}: the hub has no {what}, or HF_TOKEN lacks access; check base.hub (expected owner/name@revision)"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, OSError, httpx.HTTPError) as error:
        offline = isinstance(error, OfflineModeIsEnabled) or isinstance(error.__cause__, OfflineModeIsEnabled)
        if offline and file == WEIGHTS:
            return None  # the checkpoint may be sharded; if the index is missing too, fetching it raises an error
        why = "HF_HUB_OFFLINE is set" if offline else f"the hub could not be reached ({_cause(error)})"
        raise ModelError(
            f"{name}@{revision}: {why}, and {file} is not in huggingface_hub's cache. Run again with network access"
            " (fetched files are kept), or copy the model to this machine and set base.folder=<folder>"
        ) from error


def _cause(error: BaseException) -> str:
    """The first line of the root cause's message."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__
