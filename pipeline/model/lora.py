"""Low-rank adapters on a frozen model: LoRA, rsLoRA, DoRA; merging; reading and writing peft files.

    y = W x + k B A drop(x),  k = alpha/r          LoRA (Hu et al. 2021, arXiv:2106.09685, eq. 3)
                              k = alpha/sqrt(r)    rsLoRA (Kalajdzievski 2023, arXiv:2312.03732)
    y = g * (W x + k B A x),  g = m / |W + k B A|  DoRA (Liu et al. 2024, arXiv:2402.09353, eq. 5, 6 and 11), per row

A is drawn uniformly and B is zero, so training starts from the base model. `attach` adds adapters to a model with
loaded weights, `disabled` runs it without them (the reference of DPO and RL), and `merge` adds them to its weights.
Base weights keep their names (`...q_proj.weight`), next to the adapter's parameters (`...q_proj.lora_A.weight`).
Adapters are at least float32, whatever the dtype of the base.

`trained_tokens` selects embedding rows that are fully trained, in addition to the adapters: with a frozen embedding,
later layers cannot learn a template's own tokens, which the base model has never seen (docs/LOG.md).

`export_peft` and `import_peft` write and read peft's `adapter_config.json` and `adapter_model.safetensors`.

Not supported: low-rank adapters on the embedding or the head, more than one at a time, ranks that differ between
modules, trained biases, other peft types, fully saved modules. `import_peft` rejects these, naming the file and key.
DoRA recomputes its row norms in every forward pass, as peft does, which costs as much as r extra tokens: merge before
decoding many tokens.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from pipeline.model.layers import Embedding, Linear, dense, linear
from pipeline.model.transformer import Transformer
from pipeline.run.errors import GateError, ModelError
from pipeline.run.types import JsonObject

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALL = "all-linear"  # all of TARGETS, without the head, as in peft
EMBEDDING = "model.embed_tokens"
MERGE_ROWS, MERGE_TOLERANCE = 64, 1e-4  # for the merge gate
ROUNDING = 1e-5  # relative to the largest logit


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Which modules get an adapter, and how large it is. Raises ValueError."""

    rank: int
    """Rank of the update B A: rows of A, columns of B."""
    alpha: float
    """The update is scaled by alpha / rank."""
    dropout: float = 0.0
    """Dropout on the input of A, during training."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Modules that get an adapter; all-linear, on its own, selects all of them."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank), so that larger ranks do not learn more slowly."""
    dora: bool = False
    """Learn the norm of each weight row separately from its direction."""
    trained_tokens: tuple[int, ...] = ()
    """Ids of tokens whose embeddings are also trained, such as template tokens that the base model has never seen."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"adapter.rank: expected at least 1, found {self.rank}")
        if not self.alpha > 0:
            raise ValueError(f"adapter.alpha: expected a positive number, found {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"adapter.dropout: expected a number in [0, 1), found {self.dropout}")
        if self.targets != (ALL,) and (not self.targets or set(self.targets) - set(TARGETS)):
            raise ValueError(
                f"adapter.targets: expected names from {', '.join(TARGETS)}, or {ALL} alone; found {list(self.targets)}"
            )
        if len(set(self.trained_tokens)) < len(self.trained_tokens) or any(token < 0 for token in self.trained_tokens):
            raise ValueError(f"adapter.trained_tokens: expected distinct ids >= 0; found {list(self.trained_tokens)}")

    @property
    def scale(self) -> float:
        """k, the factor applied to B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def modules(self) -> tuple[str, ...]:
        """The module names selected by `targets`, in the order of TARGETS."""
        return tuple(name for name in TARGETS if self.targets == (ALL,) or name in self.targets)


class Magnitude(nn.Module):
    """DoRA's m: a learned norm for each weight row."""

    def __init__(self, norms: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(norms)


class AdaptedLinear(nn.Module):
    """A frozen linear layer with its adapter. It shares the base layer's parameters; A is drawn from `generator`."""

    def __init__(self, base: nn.Linear, config: AdapterConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.nf4: Any = None  # as in Linear
        self.config = config
        self.enabled = True
        self.whole: Tensor | None = None  # inside `folded_in`: the weight with the adapter added
        (num_out, num_in), device, dtype = base.weight.shape, base.weight.device, _at_least_float32(base.weight.dtype)
        self.lora_A = Linear(num_in, config.rank).to(device, dtype)  # (r, in)
        self.lora_B = Linear(config.rank, num_out).to(device, dtype)  # (out, r)
        # peft's kaiming_uniform_(a=sqrt(5)): bound sqrt(6 / (1 + 5) / in)
        initial = torch.empty(config.rank, num_in, device=generator.device)
        initial.uniform_(-(num_in**-0.5), num_in**-0.5, generator=generator)
        with torch.no_grad():
            self.lora_A.weight.copy_(initial)
        if config.dora:
            self.lora_magnitude_vector = Magnitude(self._norms())
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out) in the dtype of the base layer's output."""
        if not self.enabled:
            return linear(x, self.weight, self.bias, self.nf4)
        if self.whole is not None:
            return functional.linear(x, self.whole, self.bias)
        config = self.config
        dropping = self.training and config.dropout > 0
        dropped = functional.dropout(x, config.dropout) if dropping else x
        update = self.lora_B(self.lora_A(dropped.to(self.lora_A.weight.dtype)))
        if not config.dora:
            base = linear(x, self.weight, self.bias, self.nf4)
            return torch.add(base, update, alpha=config.scale).to(base.dtype)
        base = linear(x, self.weight, nf4=self.nf4)
        dropped_base = linear(dropped, self.weight, nf4=self.nf4) if dropping else base
        gain = self.lora_magnitude_vector.weight / self._norms()  # (out,)
        out = base + (gain - 1) * dropped_base + gain * (config.scale * update)  # dropout on W x too, as in peft
        return (out if self.bias is None else out + self.bias).to(base.dtype)

    @property
    def plain(self) -> bool:
        """Whether the layer is just a product with `matrix`."""
        config = self.config
        dropping = self.training and config.dropout > 0
        return self.bias is None and (not self.enabled or (self.whole is None and not config.dora and not dropping))

    @property
    def matrix(self) -> Tensor:
        """W + k B A (out, in), for which autograd computes the exact gradients dB = k dW A^T and dA = k B^T dW.

        For many tokens, one product with this matrix is faster than three products, and computing dW is faster than
        computing gradients through thin matrices.
        """
        return self._sum() if self.enabled else dense(self.weight, self.nf4)

    @torch.no_grad()
    def folded(self) -> Tensor:
        """The weight (out, in) with the adapter merged in, at least float32."""
        weight = self._sum()
        if self.config.dora:
            weight *= (self.lora_magnitude_vector.weight / torch.linalg.vector_norm(weight, dim=1))[:, None]
        return weight

    def _sum(self) -> Tensor:
        """W + k B A (out, in), at least float32, even under autocast."""
        with torch.autocast(self.weight.device.type, enabled=False):
            weight = dense(self.weight, self.nf4)
            weight = weight.to(_at_least_float32(weight.dtype))
            b, a = (layer.weight.to(weight.dtype) for layer in (self.lora_B, self.lora_A))
            return torch.addmm(weight, b, a, alpha=self.config.scale)

    @torch.no_grad()
    def _norms(self) -> Tensor:
        """Row norms (out,) of W + k B A, without gradient (DoRA, section 4.3)."""
        return torch.linalg.vector_norm(self._sum(), dim=1)


class AdaptedEmbedding(nn.Module):
    """A frozen embedding with some trained rows, shared with a tied head (peft's trainable tokens)."""

    ids: Tensor

    def __init__(self, base: Embedding, config: AdapterConfig) -> None:
        super().__init__()
        self.weight = base.weight
        self.enabled = True
        self.whole: Tensor | None = None  # as in AdaptedLinear
        self.register_buffer("ids", torch.tensor(config.trained_tokens, device=base.weight.device), persistent=False)
        self.lora_rows = nn.Parameter(base.weight.detach()[self.ids].to(_at_least_float32(base.weight.dtype)))  # (n, D)
        self.train(base.training)

    @property
    def table(self) -> Tensor:
        """All rows (V, D), in the dtype of the base."""
        if not self.enabled:
            return self.weight
        if self.whole is not None:
            return self.whole
        return self.weight.index_copy(0, self.ids, self.lora_rows.to(self.weight.dtype))

    def forward(self, ids: Tensor) -> Tensor:
        """(...) -> (..., D)."""
        return functional.embedding(ids, self.table)

    @torch.no_grad()
    def folded(self) -> Tensor:
        """The table (V, D) with the trained rows merged in."""
        return self.weight.index_copy(0, self.ids, self.lora_rows.to(self.weight.dtype))


Adapted = AdaptedLinear | AdaptedEmbedding


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def attach(model: Transformer, config: AdapterConfig, generator: torch.Generator) -> None:
    """Add adapters to the target modules of a model with loaded weights, and freeze the rest. Outputs do not change.

    A is drawn on the generator's device in the order of the model's modules. Raises ModelError for DoRA on a weight
    with a row of zeros, which has no direction (weights not loaded yet?).
    """
    assert not adapters(model), "merge the existing adapters before attaching new ones"
    targets = [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name.rpartition(".")[2] in config.modules
    ]
    if config.dora:
        for name, layer in targets:
            if not bool(layer.weight.any(dim=1).all()):
                raise ModelError(
                    f"{name}.weight: a row of zeros has no direction for DoRA; load the weights first, or set"
                    " dora=false"
                )
    vocab_size = model.config.vocab_size
    if unknown := [token for token in config.trained_tokens if token >= vocab_size]:
        raise ModelError(
            f"adapter.trained_tokens: expected ids below {vocab_size}, the size of the vocabulary; found {unknown[0]}"
        )
    model.requires_grad_(False)
    for name, layer in targets:
        _replace_module(model, name, AdaptedLinear(layer, config, generator))
    if config.trained_tokens:
        _replace_module(model, EMBEDDING, AdaptedEmbedding(model.model.embed_tokens, config))


def _replace_module(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, layer)


def _named_adapters(model: nn.Module) -> list[tuple[str, Adapted]]:
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, Adapted)]


def adapters(model: nn.Module) -> list[Adapted]:
    """The adapted layers, in the order of the model's modules; empty without an adapter."""
    return [layer for _, layer in _named_adapters(model)]


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """The adapters' parameters by name in the model (`model.layers.0.self_attn.q_proj.lora_A.weight`)."""
    return {
        f"{module}.{name}": parameter.detach()
        for module, layer in _named_adapters(model)
        for name, parameter in layer.named_parameters()
        if name.startswith("lora_")
    }


def load_adapter_state(model: nn.Module, state: Mapping[str, Tensor], *, source: str = "the adapter") -> None:
    """Load the result of `adapter_state`. Raises ModelError if a name is missing or unknown, or a shape differs."""
    own = adapter_state(model)
    missing, extra = sorted(set(own) - set(state)), sorted(set(state) - set(own))
    if missing or extra:
        differences = [
            f"{len(names)} {what} ({', '.join(names[:3])})"
            for what, names in (("missing", missing), ("unknown", extra))
            if names
        ]
        raise ModelError(
            f"{source}: expected the {len(own)} parameters of the attached adapter, found {' and '.join(differences)}; "
            "attach the adapter with the configuration and base model it was trained with"
        )
    for name, parameter in own.items():
        if state[name].shape != parameter.shape:
            found, expected = list(state[name].shape), list(parameter.shape)
            raise ModelError(f"{source}: {name} has shape {found}, expected {expected}; the rank or base model differs")
    for name, parameter in own.items():
        parameter.copy_(state[name])


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """A context in which the model's outputs are the base model's, bit for bit.

    Do not run a backward pass of the adapted model in this context: recomputed layers would lack adapters.
    """
    layers = adapters(model)
    before = [layer.enabled for layer in layers]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer, enabled in zip(layers, before, strict=True):
            layer.enabled = enabled


@contextmanager
def folded_in(model: nn.Module) -> Iterator[None]:
    """A context without gradients in which each layer uses a single matrix W + k B A: one product per layer, not three.

    Layers whose matrix would lose precision this way (half-precision weights without autocast) keep their adapters
    separate. Used for sampling.
    """
    layers = [layer for layer in adapters(model) if layer.enabled]
    try:
        with torch.no_grad():
            for layer in layers:
                device_type, weight = layer.weight.device.type, layer.folded()
                if isinstance(layer, AdaptedLinear) and torch.is_autocast_enabled(device_type):
                    layer.whole = weight.to(torch.get_autocast_dtype(device_type))
                elif weight.dtype == layer.weight.dtype:
                    layer.whole = weight
            yield
    finally:
        for layer in layers:
            layer.whole = None


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Merge the adapters into the weights, restore plain layers, and unfreeze all parameters.

    The sum is computed in float32 and stored in the dtype of the base weight: to keep precision, convert a bf16
    model to float32 first.
    """
    for layer in adapters(model):
        layer.weight.copy_(layer.folded())
    detach(model)


def detach(model: nn.Module) -> None:
    """Replace the adapted layers with plain ones that have the base weights, and unfreeze all parameters."""
    for name, layer in _named_adapters(model):
        with torch.device("meta"):
            if isinstance(layer, AdaptedEmbedding):
                plain = Embedding(layer.weight.shape[0], layer.weight.shape[1])
            else:
                plain = Linear(layer.weight.shape[1], layer.weight.shape[0], layer.bias is not None)
                plain.bias = layer.bias
        plain.weight = layer.weight  # pyright: ignore[reportAttributeAccessIssue]
        _replace_module(model, name, plain.train(layer.training))
    model.requires_grad_(True)


@torch.no_grad()
def merged_with_gate(model: Transformer, input_ids: Tensor) -> float:
    """`merge` with a check: returns the largest change in the logits of `input_ids` (64, T), which has no padding.

    Raises GateError if it exceeds 1e-4 or, if larger, 1e-5 times the largest logit (the float32 rounding error if
    logits are large). In that case, the model must not be published. The logits before merging are kept on the CPU.
    """
    assert len(input_ids) == MERGE_ROWS, f"the merge gate needs {MERGE_ROWS} rows"
    was_training = model.training
    model.train(False)
    rows = input_ids.split(8)
    before = [model(ids).float().cpu() for ids in rows]
    merge(model)
    pairs = ((old, model(ids).float().cpu()) for old, ids in zip(before, rows, strict=True))
    difference = max(float((new - old).abs().nan_to_num(nan=math.inf).max()) for old, new in pairs)
    model.train(was_training)
    largest = max(float(old.abs().nan_to_num(0.0, 0.0, 0.0).max()) for old in before)
    tolerance = max(MERGE_TOLERANCE, ROUNDING * largest)
    if not difference <= tolerance:
        raise GateError(
            f"merge gate: expected merging to change the logits of {MERGE_ROWS} rows by at most {tolerance:.2g}, "
            f"found {difference:.2e}. Likely cause: weights in {model.model.embed_tokens.weight.dtype} instead of "
            "float32, or an update that is not finite or far larger than its base weight (lower the learning rate)"
        )
    return difference


# -- peft files --------------------------------------------------------------------------------------------------------


PREFIX = "base_model.model."  # peft's prefix of a parameter's name
# Keys of adapter_config.json: those we read, and those without effect here. Any other key must be empty.
READ = (
    "peft_type",
    "task_type",
    "bias",
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "use_rslora",
    "use_dora",
    "init_lora_weights",
    "trainable_token_indices",
)
IGNORED = (
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "peft_version",
    "megatron_core",
    "qalora_group_size",
    "runtime_config",
)
EMPTY: tuple[object, ...] = (None, False, {}, [])


def export_peft(folder: Path, model: Transformer, config: AdapterConfig, *, base_name: str) -> None:
    """Write the attached adapter as peft does: `adapter_config.json` and `adapter_model.safetensors`.

    The configuration has the keys that every peft version since 0.11 reads; newer keys are left at their defaults.
    """
    assert adapters(model), "there is no adapter to export; merge() removes adapters"
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": sorted(config.modules),
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "layer_replication": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "auto_mapping": None,
        "revision": None,
        "loftq_config": {},
        "megatron_config": None,
        "megatron_core": "megatron.core",
    }
    if config.trained_tokens:  # since peft 0.15
        values["trainable_token_indices"] = {EMBEDDING.rpartition(".")[2]: list(config.trained_tokens)}
    text = json.dumps(values, indent=2, sort_keys=True) + "\n"
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    state = {_peft_name(name): tensor.cpu().contiguous() for name, tensor in adapter_state(model).items()}
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _peft_name(name: str) -> str:
    """peft stores DoRA's vector under an older name, without `.weight`, and trained tokens under its own name."""
    if name == f"{EMBEDDING}.lora_rows":
        return f"{PREFIX}{EMBEDDING}.token_adapter.trainable_tokens_delta"
    return PREFIX + (name.removesuffix(".weight") if "lora_magnitude_vector" in name else name)


def import_peft(folder: Path, model: Transformer) -> AdapterConfig:
    """Attach an adapter written by peft or `export_peft`. Returns its configuration.

    Raises ModelError naming the file and key of anything unsupported; the model is then unchanged, except that all its
    parameters are trainable.
    """
    config = _read_peft_config(folder / "adapter_config.json")
    path = folder / "adapter_model.safetensors"
    try:
        stored = load_file(path)
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing; expected safetensors (a .bin adapter must be converted first)") from error
    except SafetensorError as error:
        raise ModelError(f"{path}: damaged ({error}); fetch or export it again") from error
    _check_rank(stored, config.rank, path)
    attach(model, config, torch.Generator())  # its random values are overwritten
    names = {_peft_name(name): name for name in adapter_state(model)}
    try:
        load_adapter_state(model, {names.get(key, key): tensor for key, tensor in stored.items()}, source=str(path))
    except ModelError:
        detach(model)
        raise
    return config


def _check_rank(stored: dict[str, Tensor], rank: int, path: Path) -> None:
    """Raise ModelError for a rank above that of the file's tensors, before anything of that size is allocated."""
    for name, tensor in stored.items():
        if name.endswith("lora_A.weight") and rank > tensor.shape[0]:
            raise ModelError(
                f"{path}: {name} has shape {list(tensor.shape)}, expected [{rank}, {tensor.shape[-1]}]: the rank"
                " differs from `r` in adapter_config.json; fetch or export the adapter again"
            )


def _read_peft_config(path: Path) -> AdapterConfig:
    """Read `adapter_config.json`. Raises ModelError for unsupported settings."""
    try:
        values: JsonObject = json.loads(path.read_text(encoding="utf-8"))
        rank, alpha, modules = values["r"], values["lora_alpha"], values["target_modules"]
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing: {path.parent} is not an adapter directory") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: expected the JSON of a LoRA adapter ({error!r})") from error
    expected: dict[str, tuple[object, ...]] = {
        "peft_type": ("LORA",),
        "task_type": ("CAUSAL_LM", None),
        "bias": ("none",),
        "init_lora_weights": (True, False, "gaussian"),  # other values change the base weights
    }
    expected |= {key: EMPTY for key in values if key not in READ + IGNORED}
    for key, allowed in expected.items():
        if values.get(key, allowed[0]) not in allowed:
            raise ModelError(
                f"{path}: {key} = {values[key]!r} is not supported here; expected"
                f" {' or '.join(map(repr, allowed[:2]))}. Merge the adapter with peft and import the merged model"
            )
    try:
        # peft writes full paths for all-linear. If a layer is left out, its adapter is missing from the file.
        leaves = (modules,) if isinstance(modules, str) else sorted({str(name).rpartition(".")[2] for name in modules})
        return AdapterConfig(
            rank=rank,
            alpha=alpha,
            dropout=values.get("lora_dropout", 0.0),
            targets=tuple(leaves),
            rslora=values.get("use_rslora", False),
            dora=values.get("use_dora", False),
            trained_tokens=_trained_tokens(path, values.get("trainable_token_indices")),
        )
    except (ValueError, TypeError) as error:
        raise ModelError(f"{path}: {error}") from error


def _trained_tokens(path: Path, value: object) -> tuple[int, ...]:
    """The ids in `trainable_token_indices`: a list, or a dict with a list for the embedding. Raises ModelError."""
    leaf = EMBEDDING.rpartition(".")[2]
    ids = value.get(leaf) if isinstance(value, dict) and set(value) <= {leaf} else value
    if ids is None or ids == {}:
        return ()
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise ModelError(f"{path}: trainable_token_indices = {value!r}; expected ids for {leaf}")
    return tuple(ids)
