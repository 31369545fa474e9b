"""Low-rank adapters on a frozen model: LoRA, rsLoRA, DoRA; merging. Their files: `lora_files.py`.

    y = W x + k B A drop(x),  k = alpha/r          LoRA (Hu et al. 2021, arXiv:2106.09685, eq. 3)
                              k = alpha/sqrt(r)    rsLoRA (Kalajdzievski 2023, arXiv:2312.03732)
    y = g * (W x + k B A x),  g = m / |W + k B A|  DoRA (Liu et al. 2024, arXiv:2402.09353, eq. 5, 6 and 11), a row each

A starts uniform and B zero, so the first step is the base model's. `attach` puts adapters into a model that has its
weights, `disabled` runs it as if they were not there (the reference of DPO and RL), `merge` folds them in. A base
weight keeps its name (`...q_proj.weight`), the adapter's stand beside it (`...q_proj.lora_A.weight`). Adapters are
float32 at least, whatever the base is.

`trained_tokens` are rows of the embedding that train whole, beside the adapters: a template's own tokens, which the
base model never read, cannot be learnt through the layers behind a frozen embedding (docs/LOG.md).

Not promised: low-rank adapters on the embedding or the head, more than one at a time, ranks that differ from module to
module, trained biases. `lora_files.import_peft` refuses those by name. DoRA norms its rows anew in every forward, as
peft does, which costs as much as r more tokens: merge before long decoding.

Adapters in the files of peft: `adapter_config.json` and `adapter_model.safetensors`, read and written.

What these adapters cannot do (other peft types, biases, ranks that differ, modules saved whole) is refused by file and
key. Not here: what an adapter computes (`lora.py`).
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

from pipeline.model.layers import Embedding, Linear
from pipeline.model.transformer import Transformer
from pipeline.run.errors import GateError, ModelError

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALL = "all-linear"  # all of TARGETS; as in peft, not the head
EMBEDDING = "model.embed_tokens"
MERGE_ROWS, MERGE_TOLERANCE = 64, 1e-4  # of the merge gate
ROUNDING = 1e-5  # of the largest logit


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Which modules get an adapter, and its size. Raises ValueError."""

    rank: int
    """Of the update B A: rows of A, columns of B."""
    alpha: float
    """The update is scaled by alpha / rank."""
    dropout: float = 0.0
    """Of what enters A, in training."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Or all-linear, alone."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank), so that a larger rank does not learn more slowly."""
    dora: bool = False
    """Learn the norm of each row apart from its direction."""
    trained_tokens: tuple[int, ...] = ()
    """Ids whose embeddings train too, as those of a template that the base never read."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"adapter.rank: expected at least 1, found {self.rank}")
        if not self.alpha > 0:
            raise ValueError(f"adapter.alpha: expected a positive number, found {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"adapter.dropout: expected a share from 0 to below 1, found {self.dropout}")
        if self.targets != (ALL,) and (not self.targets or set(self.targets) - set(TARGETS)):
            raise ValueError(
                f"adapter.targets: expected some of {', '.join(TARGETS)}, or {ALL} alone; found {list(self.targets)}"
            )
        if len(set(self.trained_tokens)) < len(self.trained_tokens) or any(token < 0 for token in self.trained_tokens):
            raise ValueError(
                f"adapter.trained_tokens: expected different ids, none below 0; found {list(self.trained_tokens)}"
            )

    @property
    def scale(self) -> float:
        """k, by which B A is multiplied."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def modules(self) -> tuple[str, ...]:
        """The names that `targets` stands for, in the order of TARGETS."""
        return tuple(name for name in TARGETS if self.targets == (ALL,) or name in self.targets)


class Magnitude(nn.Module):
    """m of DoRA: a learned norm for each row."""

    def __init__(self, norms: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(norms)


class AdaptedLinear(nn.Module):
    """A frozen linear layer with its adapter. It shares the base layer's parameters; A is drawn from `generator`."""

    def __init__(self, base: nn.Linear, config: AdapterConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.config = config
        self.enabled = True
        self.whole: Tensor | None = None  # within `folded_in`: the weight with the adapter in it
        (num_out, num_in), device, dtype = base.weight.shape, base.weight.device, _wide(base.weight.dtype)
        self.lora_A = Linear(num_in, config.rank).to(device, dtype)  # (r, in)
        self.lora_B = Linear(config.rank, num_out).to(device, dtype)  # (out, r)
        # peft's kaiming_uniform_(a=sqrt(5)): bound sqrt(6 / (1 + 5) / in)
        drawn = torch.empty(config.rank, num_in, device=generator.device)
        drawn.uniform_(-(num_in**-0.5), num_in**-0.5, generator=generator)
        with torch.no_grad():
            self.lora_A.weight.copy_(drawn)
        if config.dora:
            self.lora_magnitude_vector = Magnitude(self._norms())
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out) in the dtype of the base layer's output."""
        if not self.enabled:
            return functional.linear(x, self.weight, self.bias)
        if self.whole is not None:
            return functional.linear(x, self.whole, self.bias)
        config = self.config
        dropping = self.training and config.dropout > 0
        entering = functional.dropout(x, config.dropout) if dropping else x
        update = self.lora_B(self.lora_A(entering.to(self.lora_A.weight.dtype)))
        if not config.dora:
            plain = functional.linear(x, self.weight, self.bias)
            return torch.add(plain, update, alpha=config.scale).to(plain.dtype)
        plain = functional.linear(x, self.weight)
        dropped = functional.linear(entering, self.weight) if dropping else plain
        gain = self.lora_magnitude_vector.weight / self._norms()  # (out,)
        out = plain + (gain - 1) * dropped + gain * (config.scale * update)  # dropout reaches W x too, as in peft
        return (out if self.bias is None else out + self.bias).to(plain.dtype)

    @torch.no_grad()
    def folded(self) -> Tensor:
        """The weight (out, in) that does the same without the adapter, in float32 at least."""
        whole = self._sum()
        if self.config.dora:
            whole *= (self.lora_magnitude_vector.weight / torch.linalg.vector_norm(whole, dim=1))[:, None]
        return whole

    def _sum(self) -> Tensor:
        """W + k B A (out, in), in float32 at least also under autocast."""
        with torch.autocast(self.weight.device.type, enabled=False):
            return self.weight.to(_wide(self.weight.dtype)) + self.config.scale * (
                self.lora_B.weight @ self.lora_A.weight
            )

    @torch.no_grad()
    def _norms(self) -> Tensor:
        """Norms of the rows of W + k B A (out,), without gradient: section 4.3 of DoRA."""
        return torch.linalg.vector_norm(self._sum(), dim=1)


class AdaptedEmbedding(nn.Module):
    """A frozen embedding of which some rows are trained; a head tied to it has the same rows (peft's trainable
    tokens).
    """

    ids: Tensor

    def __init__(self, base: Embedding, config: AdapterConfig) -> None:
        super().__init__()
        self.weight = base.weight
        self.enabled = True
        self.whole: Tensor | None = None  # as in AdaptedLinear
        self.register_buffer("ids", torch.tensor(config.trained_tokens, device=base.weight.device), persistent=False)
        self.lora_rows = nn.Parameter(base.weight.detach()[self.ids].to(_wide(base.weight.dtype)))  # (n, D)
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
        """The table (V, D) that does the same without the adapter."""
        return self.weight.index_copy(0, self.ids, self.lora_rows.to(self.weight.dtype))


Adapted = AdaptedLinear | AdaptedEmbedding


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def attach(model: Transformer, config: AdapterConfig, generator: torch.Generator) -> None:
    """Put adapters into the targets of a model that has its weights, and freeze all else. The outputs stay as they are.

    A is drawn on the generator's device in the order of the model's modules. Raises ModelError for DoRA on a weight
    with a row of zeros, which has no direction (weights not loaded yet?).
    """
    assert not adapters(model), "merge the adapters that are there before attaching others"
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
    most = model.config.vocab_size
    if wrong := [token for token in config.trained_tokens if token >= most]:
        raise ModelError(
            f"adapter.trained_tokens: expected ids below {most}, the size of the vocabulary; found {wrong[0]}"
        )
    model.requires_grad_(False)
    for name, layer in targets:
        _put(model, name, AdaptedLinear(layer, config, generator))
    if config.trained_tokens:
        _put(model, EMBEDDING, AdaptedEmbedding(model.model.embed_tokens, config))


def _put(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, layer)


def _places(model: nn.Module) -> list[tuple[str, Adapted]]:
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, Adapted)]


def adapters(model: nn.Module) -> list[Adapted]:
    """The adapted layers, in the order of the model's modules; empty where nothing is attached."""
    return [layer for _, layer in _places(model)]


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """The adapters' parameters by their names in the model (`model.layers.0.self_attn.q_proj.lora_A.weight`)."""
    return {
        f"{place}.{name}": parameter.detach()
        for place, layer in _places(model)
        for name, parameter in layer.named_parameters()
        if name.startswith("lora_")
    }


def load_adapter_state(model: nn.Module, state: Mapping[str, Tensor], *, source: str = "the adapter") -> None:
    """Copy in what `adapter_state` gave. Raises ModelError where a name is missing, unknown, or has another shape."""
    own = adapter_state(model)
    missing, extra = sorted(set(own) - set(state)), sorted(set(state) - set(own))
    if missing or extra:
        found = [
            f"{len(names)} {what} ({', '.join(names[:3])})"
            for what, names in (("missing", missing), ("unknown", extra))
            if names
        ]
        raise ModelError(
            f"{source}: expected the {len(own)} parameters of the attached adapter, found {' and '.join(found)}; "
            "attach with the configuration that the adapter was trained with, to the same base model"
        )
    for name, parameter in own.items():
        if state[name].shape != parameter.shape:
            asked, has = list(parameter.shape), list(state[name].shape)
            raise ModelError(f"{source}: {name} has shape {has}, expected {asked}: another rank, or another base model")
    for name, parameter in own.items():
        parameter.copy_(state[name])


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Within it the model is the base model, bit for bit.

    No backward pass of the adapted model may run within it: layers that are recomputed would lack their adapters.
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
    """Within it no gradient is kept, and each layer computes with one matrix W + k B A: sampling takes one product for
    three.

    Layers whose matrix would lose precision that way (half-precision weights without autocast) keep their adapters
    apart.
    """
    layers = [layer for layer in adapters(model) if layer.enabled]
    try:
        with torch.no_grad():
            for layer in layers:
                kind, whole = layer.weight.device.type, layer.folded()
                if isinstance(layer, AdaptedLinear) and torch.is_autocast_enabled(kind):
                    layer.whole = whole.to(torch.get_autocast_dtype(kind))
                elif whole.dtype == layer.weight.dtype:
                    layer.whole = whole
            yield
    finally:
        for layer in layers:
            layer.whole = None


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Fold the adapters in, put plain layers back, and let all parameters train again.

    The sum is formed in float32 and stored in the dtype of the base weight: make a bf16 model float32 first to keep it.
    """
    for layer in adapters(model):
        layer.weight.copy_(layer.folded())
    detach(model)


def detach(model: nn.Module) -> None:
    """Plain layers back in the places of the adapted ones."""
    for name, layer in _places(model):
        with torch.device("meta"):
            if isinstance(layer, AdaptedEmbedding):
                plain = Embedding(layer.weight.shape[0], layer.weight.shape[1])
            else:
                plain = Linear(layer.weight.shape[1], layer.weight.shape[0], layer.bias is not None)
                plain.bias = layer.bias
        plain.weight = layer.weight  # pyright: ignore[reportAttributeAccessIssue]
        _put(model, name, plain.train(layer.training))
    model.requires_grad_(True)


@torch.no_grad()
def merged_with_gate(model: Transformer, input_ids: Tensor) -> float:
    """`merge`, and the proof: logits of `input_ids` (64, T), no padding, before and after. Returns the difference.

    Raises GateError above 1e-4, or above 1e-5 of the largest logit where that is more: so far float32 rounds a sharp
    model's. Nothing may be published then. The logits from before are kept, on the CPU.
    """
    assert len(input_ids) == MERGE_ROWS, f"the merge gate looks at {MERGE_ROWS} rows"
    was_training = model.training
    model.train(False)
    rows = input_ids.split(8)
    before = [model(ids).float().cpu() for ids in rows]
    merge(model)
    pairs = ((old, model(ids).float().cpu()) for old, ids in zip(before, rows, strict=True))
    difference = max(float((new - old).abs().nan_to_num(nan=math.inf).max()) for old, new in pairs)
    model.train(was_training)
    largest = max(float(old.abs().nan_to_num(0.0, 0.0, 0.0).max()) for old in before)
    most = max(MERGE_TOLERANCE, ROUNDING * largest)
    if not difference <= most:
        raise GateError(
            f"merge gate: expected the logits of {MERGE_ROWS} rows within {most:.2g} before and after merging, "
            f"found {difference:.2e}. Likely cause: weights in {model.model.embed_tokens.weight.dtype} instead of "
            "float32, or an adapter whose update is not finite or far larger than its base weight (lower the rate)"
        )
    return difference


# -- lora_files --------------------------------------------------------------------------------------------------------


PREFIX = "base_model.model."  # what peft puts before a parameter's name
# Keys of adapter_config.json that change nothing here, whatever they say. Any other key must be empty.
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
EMPTY: tuple[Any, ...] = (None, False, {}, [])


def export_peft(folder: Path, model: Transformer, config: AdapterConfig, *, base_name: str) -> None:
    """Write the attached adapter as peft does: `adapter_config.json` and `adapter_model.safetensors`.

    The configuration holds the keys that every peft since 0.11 knows; newer ones mean their defaults where they lack.
    """
    assert adapters(model), "there is no adapter to export: merge() folds it in"
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
        detach(model)
        raise
    return config


def _compare_rank(stored: dict[str, Tensor], rank: int, path: Path) -> None:
    """Raise ModelError for a rank beyond that of the file's tensors, which would be allocated before they are
    compared.
    """
    for name, tensor in stored.items():
        if name.endswith("lora_A.weight") and rank > tensor.shape[0]:
            raise ModelError(
                f"{path}: {name} has shape {list(tensor.shape)}, expected [{rank}, {tensor.shape[-1]}]: another rank"
                " than r of adapter_config.json; fetch or export it again"
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
        "peft_type": ("LORA",),
        "task_type": ("CAUSAL_LM", None),
        "bias": ("none",),
        "init_lora_weights": (True, False, "gaussian"),  # others change the base weights
    }
    expected |= {key: EMPTY for key in values if key not in READ + IGNORED}
    for key, allowed in expected.items():
        if values.get(key, allowed[0]) not in allowed:
            raise ModelError(
                f"{path}: {key} = {values[key]!r} is not supported here; expected"
                f" {' or '.join(map(repr, allowed[:2]))}. Merge the adapter in peft and take the merged model in"
            )
    try:
        # peft writes whole paths for all-linear. Where a layer is left out, its adapter will be missing in the file.
        leaves = (named,) if isinstance(named, str) else sorted({str(name).rpartition(".")[2] for name in named})
        return AdapterConfig(
            rank=rank,
            alpha=alpha,
            dropout=values.get("lora_dropout", 0.0),
            targets=tuple(leaves),
            rslora=values.get("use_rslora", False),
            dora=values.get("use_dora", False),
            trained_tokens=_tokens(path, values.get("trainable_token_indices")),
        )
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
