"""The shape of a model: one frozen dataclass, and its `config.json` under Hugging Face's keys.

In: a file of `conf/model/`, or the `config.json` of a model directory. Out: `ModelConfig`, or the dict to write.
The shapes are Qwen3's (Yang et al. 2025, arXiv:2505.09388): RMSNorm before each block, half-split RoPE, SwiGLU,
grouped queries, a norm per head on queries and keys, no biases. Two related families load too: Qwen2 (biases on q, k,
v and no head norms) and LLaMA (neither).

`to_hf` writes the keys of transformers 4 *and* 5: `rope_theta` and `rope_parameters`, `torch_dtype` and `dtype`. With
transformers 5's keys alone, transformers 4 and mlx-lm silently take a RoPE base of 10,000.

Not promised: scaled RoPE, sliding windows, MoE, biases elsewhere. `from_hf` refuses them by name.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from pipeline import wings
from pipeline.run.errors import ModelError
from pipeline.run.types import JsonObject

FAMILIES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
# A model type of our own, so that causal engines refuse such models instead of answering nonsense.
BIDIRECTIONAL = "stagecoach_mdm"
_WingKeys: type[object] = type("_WingKeys", tuple(offer() for offer in wings.each("model_keys")), {})


@dataclass(frozen=True, kw_only=True)
class ModelConfig(_WingKeys):
    """Shape of a `Transformer`; wings add keys (hooks.py). Raises ValueError where the numbers do not fit together."""

    vocab_size: int
    """Rows of the embedding; a multiple of 64 in our own models."""
    width: int
    """Width of the residual stream."""
    layers: int
    """Blocks of attention and SwiGLU."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads; divides `heads`."""
    head_dim: int
    """Width of a head, even; heads * head_dim need not equal width."""
    d_ff: int
    """Width of SwiGLU's three matrices, taken literally."""
    max_context: int
    """Longest row, in tokens."""
    rope_theta: float
    """Base of the rotary angles."""
    tied: bool
    """The head is the embedding."""
    bias: bool = False
    """On q, k, v: the Qwen2 family, which has no head norms."""
    qk_norm: bool = True
    """RMSNorm on each query and key head, before RoPE; has no effect with `bias`."""
    norm_eps: float = 1e-6
    """RMSNorm's, added to the mean square."""
    attention: str = "causal"
    """causal or bidirectional."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "d_ff", "max_context"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}: expected at least 1, found {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"model.kv_heads: expected a divisor of heads ({self.heads}), found {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim: expected an even number (RoPE turns pairs), found {self.head_dim}")
        if self.rope_theta <= 0 or self.norm_eps <= 0:
            raise ValueError("model.rope_theta and model.norm_eps: expected positive numbers")
        if self.attention not in ("causal", "bidirectional"):
            raise ValueError(f"model.attention: expected causal or bidirectional, found {self.attention!r}")
        for check in wings.each("check_model"):
            check(self)

    @property
    def family(self) -> str:
        """Hugging Face's `model_type` for the names of the weights: qwen3, qwen2 or llama."""
        return "qwen2" if self.bias else "qwen3" if self.qk_norm else "llama"

    @property
    def head_norms(self) -> bool:
        """Whether each query and key head has its own norm."""
        return self.family == "qwen3"

    @property
    def matmul_parameters(self) -> int:
        """Weights in a token's matrix products: the head counts, the embedding (a lookup) and the norms do not."""
        d, h = self.width, self.head_dim
        layer = 2 * d * self.heads * h + 2 * d * self.kv_heads * h + 3 * d * self.d_ff
        return self.layers * layer + self.vocab_size * d

    @property
    def initializer_range(self) -> float:
        """Standard deviation of fresh weights, 1/sqrt(2 * width) and at most 0.05: that of tied logits then starts
        at 0.7.
        """
        return min(0.05, (2 * self.width) ** -0.5)

    @property
    def num_parameters(self) -> int:
        """All weights; a tied embedding counts once."""
        norms = self.layers * (2 * self.width + (2 * self.head_dim if self.head_norms else 0)) + self.width
        biases = self.layers * (self.heads + 2 * self.kv_heads) * self.head_dim if self.bias else 0
        return self.matmul_parameters + norms + biases + (0 if self.tied else self.vocab_size * self.width)

    def flops_per_token(self, context: int) -> int:
        """FLOPs of training one token at this context, counted as in karpathy/nanochat: 6 a weight, 12 an attention
        cell.
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
        """Read a `config.json`. Raises ModelError naming the key that is not supported."""
        kind = config.get("model_type")
        ours = [BIDIRECTIONAL, *(offer() for offer in wings.each("model_type"))]
        family = config.get("base_model_type", "qwen3") if kind in ours else kind
        if not isinstance(family, str) or family not in FAMILIES:
            raise ModelError(f"config.json: model_type {kind!r} is unknown here; expected one of {', '.join(FAMILIES)}")
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
                f"config.json: key {error} is missing; it is not a whole {family} configuration"
            ) from error
        except ModelError:
            raise
        except ValueError as error:
            raise ModelError(f"config.json: {error}") from error


def read_config(folder: Path) -> ModelConfig:
    """The shape in a directory's `config.json`. Raises ModelError."""
    return ModelConfig.from_hf(read_values(folder))


def read_values(folder: Path) -> JsonObject:
    """The whole object of a directory's `config.json`. Raises ModelError."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing: {folder} is not a model directory") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON ({str(error) or 'nested too deeply'})") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(values).__name__}; fetch it again")
    return values


def positive_int(config: JsonObject, key: str, default: int | None = None) -> int:
    """A count of `config.json`. Raises ModelError naming it, KeyError where it is absent and has no `default`."""
    value = config[key] if default is None else config.get(key)
    value = default if value is None and default is not None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key}: expected a whole number of at least 1, found {value!r:.80}")
    return value


def finite_number(config: JsonObject, key: str, default: float) -> float:
    """A finite number of `config.json`. Raises ModelError naming it."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(f"config.json: {key}: expected a number, found {value!r:.80}")
    return float(value)


def _object(config: JsonObject, key: str) -> JsonObject:
    """An object of `config.json`, empty where it is absent or null. Raises ModelError naming it."""
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise ModelError(f"config.json: {key}: expected an object, found {value!r:.80}")
    return value


def _rope_theta(config: JsonObject) -> float:
    """The RoPE base from either generation of keys. Raises ModelError where the two disagree or both are missing."""
    inner = _object(config, "rope_parameters")
    bases = [finite_number(keys, "rope_theta", 0.0) for keys in (inner, config) if keys.get("rope_theta") is not None]
    if not bases:
        raise ModelError("config.json: neither rope_theta nor rope_parameters.rope_theta is there; add the RoPE base")
    if bases[0] != bases[-1]:
        raise ModelError(
            f"config.json: rope_theta is {bases[-1]}, rope_parameters.rope_theta is {bases[0]}; which one is right?"
        )
    return bases[0]


def _check_supported(config: JsonObject, family: str) -> None:
    """Raise ModelError where a key asks for something that would silently change what the weights compute."""
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
                f"config.json: {key} = {value!r} is not supported for {family}; use a checkpoint without it"
            )
