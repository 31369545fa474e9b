"""Files of a memory and its base, banks quantized to 8 or 4 bits, and the baseline for a memory.

**The baseline**: an additional SwiGLU after some layers, with about as many weights as the memory.

    x <- x + down(silu(gate(norm(x))) * up(norm(x)))        down is zero at the start

Like a memory's read, it comes after complete layers of a frozen model and initially changes nothing; it has no router.

**Files**:

    config.json             model_type stagecoach_memory, so that no causal engine runs only the base
    model.safetensors       the base, under Hugging Face's names
    memory.safetensors      banks and readers; an int8 or int4 bank as integers and one scale per row
    memory.json             the configuration, and the digest of the base that the memory was trained on

On a different base, a memory would get states it has never seen, so `load` compares digests.

A bank is quantized after training, with one scale per row:

    s = max |row| / 127 (int4: / 7)      q = round(row / s), within +-127 (+-7; two to a byte)      |row - s q| <= s / 2

Rows are gathered first, then dequantized. In a factorized bank, only the rows' factor is quantized.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from pipeline.memory.config import MemoryConfig
from pipeline.memory.model import HF_KEYS, NAME, Bank, Memory, Reading
from pipeline.model.config import ModelConfig
from pipeline.model.layers import LayerHook, Layout, Linear, Reads, RMSNorm
from pipeline.model.transformer import Transformer
from pipeline.run.errors import ModelError
from pipeline.run.types import JsonObject


@dataclass(frozen=True, kw_only=True)
class WiderConfig:
    """The width of the SwiGLU, and the layers that have one, counted from 0. Raises ValueError."""

    width: int
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"wider.width: expected at least 1, got {self.width}")

    @classmethod
    def like(cls, memory: MemoryConfig, parameters: int, shape: ModelConfig) -> "WiderConfig":
        """A configuration for the same layers as `memory`, with about `parameters` weights in total."""
        layers = tuple(memory.placed(shape.layers))
        per_layer = parameters / max(1, len(layers)) - shape.width  # without the norm's weights
        return cls(width=max(1, round(per_layer / (3 * shape.width))), layers=layers)

    def to_json(self) -> JsonObject:
        """The configuration as memory.json stores it."""
        return asdict(self)


class Wider(LayerHook):
    """A SwiGLU after some of the layers. Without a `generator`, its weights stay zero until loaded."""

    name = NAME
    hf_keys = HF_KEYS

    def __init__(self, config: WiderConfig, shape: ModelConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if outside := [layer for layer in config.layers if not 0 <= layer < shape.layers]:
            raise ValueError(f"wider.layers: expected layers from 0 to {shape.layers - 1}, got {outside[0]}")
        self.config, self.shape = config, shape
        self.added = True
        self.readers = nn.ModuleDict({str(layer): WiderLayer(config.width, shape) for layer in config.layers})
        if generator is not None:
            self.initialize(generator)

    def reads(self, positions: Tensor, padding: Tensor | None, computed: Tensor | None, reading: object) -> Reads:
        """The reads for a line of tokens; each depends only on its own token."""
        return (lambda layer, x: x) if isinstance(reading, Reading) and reading.off else self._add

    def going_on(self, layout: Layout) -> Reads:
        """The reads for new tokens of a cache's rows; each depends only on its own token."""
        return self._add

    def _add(self, layer: int, x: Tensor) -> Tensor:
        return x + self.readers[str(layer)](x) if str(layer) in self.readers else x

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Initialize like the model's own SwiGLU, except for the down projection, which is zero."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0)
            elif name.endswith("down_proj.weight"):
                parameter.zero_()
            else:
                weights = torch.empty(parameter.shape, device=generator.device)
                parameter.copy_(weights.normal_(0.0, self.shape.initializer_range, generator=generator))


class WiderLayer(nn.Module):
    """Norm and SwiGLU of one layer."""

    def __init__(self, width: int, shape: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.width, shape.norm_eps)
        self.gate_proj, self.up_proj = Linear(shape.width, width), Linear(shape.width, width)
        self.down_proj = Linear(width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return self.down_proj(functional.silu(self.gate_proj(normed)) * self.up_proj(normed))


# -- files -------------------------------------------------------------------------------------------------------------


LEVELS = {8: 127, 4: 7}


class QuantisedBank(nn.Module):
    """N quantized rows of M numbers; not trainable."""

    numbers: Tensor
    scales: Tensor

    def __init__(self, bank: Bank, bits: int) -> None:
        """Raises ValueError unless `bits` is 8 or 4 and rows fill whole bytes."""
        super().__init__()
        if bits not in LEVELS:
            raise ValueError(f"quantize: expected 8 or 4 bits, got {bits}")
        rows = bank.rows.detach()
        if bits == 4 and rows.shape[1] % 2:
            raise ValueError(
                f"quantize: two 4-bit numbers share a byte; expected rows of even length, got {rows.shape[1]}"
            )
        self.bits = bits
        numbers, scales = quantize(rows, bits)
        self.register_buffer("numbers", numbers)
        self.register_buffer("scales", scales)
        self.factor = bank.factor

    def forward(self, which: Tensor | None = None) -> Tensor:
        """See `Bank.forward`."""
        numbers, scales = (self.numbers, self.scales) if which is None else (self.numbers[which], self.scales[which])
        rows = dequantize(numbers, scales, self.bits)
        return rows if self.factor is None else functional.linear(rows, self.factor)


def quantize(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Integers (N, M) int8, or (N, M / 2) uint8 with two per byte, the even index in the low bits; scales (N, 1)."""
    level = LEVELS[bits]
    scales = rows.abs().amax(1, keepdim=True) / level
    numbers = (rows / scales.clamp_min(torch.finfo(rows.dtype).tiny)).round().clamp(-level, level).to(torch.int8)
    if bits == 8:
        return numbers, scales
    unsigned = (numbers + 8).to(torch.uint8)  # 1 to 15
    return unsigned[:, 0::2] | (unsigned[:, 1::2] << 4), scales


def dequantize(numbers: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The rows (..., M) from the integers and scales of `quantize`."""
    if bits == 4:
        low, high = numbers & 15, numbers >> 4
        numbers = torch.stack([low, high], -1).flatten(-2).to(torch.int8) - 8
    return numbers.to(scales.dtype) * scales


def quantized(memory: Memory, bits: int) -> None:
    """Quantize all banks of a memory in place. Raises ValueError."""
    for number, bank in enumerate(memory.bank):
        assert isinstance(bank, Bank), "quantized already"
        memory.bank[number] = QuantisedBank(bank, bits)


# -- model directories -------------------------------------------------------------------------------------------------


WEIGHTS, SHAPE = "memory.safetensors", "memory.json"
PREFIX = f"{NAME}."


def attach(
    model: Transformer, config: MemoryConfig | WiderConfig, generator: torch.Generator | None = None
) -> Memory | Wider:
    """Add a memory, or its baseline, to a model with loaded weights, and freeze those weights.

    Raises ValueError if the memory does not fit the model, or if the model already has one.
    """
    if model.hook is not None:
        raise ValueError("the model already has a memory; use a model without one, such as model: nano")
    model.requires_grad_(False)
    where = model.model.embed_tokens.weight.device
    if isinstance(config, MemoryConfig):
        shape = replace(model.config, memory=config)
        memory: Memory | Wider = Memory(config, shape, generator)
        model.config = shape
    else:
        memory = Wider(config, model.config, generator)
    memory.added = True
    model.attach(memory.to(where))
    return memory


def save(folder: Path, memory: Memory | Wider, weights: dict[str, Tensor], base: str) -> None:
    """Write the two files of a memory, or of its baseline, on a base with the digest `base`."""
    kind = "memory" if isinstance(memory, Memory) else "wider"
    config = memory.config
    bits = next((bank.bits for bank in memory.modules() if isinstance(bank, QuantisedBank)), None)
    description: JsonObject = {"kind": kind, "config": config.to_json(), "base": base, "bits": bits}
    if isinstance(config, MemoryConfig):
        description["leaky"] = config.leaky
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, folder / WEIGHTS, metadata={"format": "pt"}
    )
    (folder / SHAPE).write_text(json.dumps(description, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load(model: Transformer, folder: Path, base: str) -> None:
    """Attach the memory of a directory to its loaded base, whose digest is `base`. Raises ModelError naming the file
    and the reason.
    """
    description = _read_description(folder)
    if description["base"] != base:
        raise ModelError(
            f"{folder / SHAPE}: this memory was trained on another base (digest {description['base'][:12]}, found"
            f" {base[:12]}); put the memory next to its own base's model.safetensors, or run dvc repro"
            " stage_memory to retrain the memory"
        )
    try:
        config = (
            MemoryConfig.from_json(description["config"])
            if description["kind"] == "memory"
            else WiderConfig(width=description["config"]["width"], layers=tuple(description["config"]["layers"]))
        )
        _check_shapes(config, model.config, description["bits"], folder)
        memory = attach(model, config)
    except ModelError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{folder / SHAPE}: {error}") from error
    model.requires_grad_(True)
    memory.added = False
    if description["bits"] and isinstance(memory, Memory):
        quantized(memory, description["bits"])
    memory.load_state_dict(load_file(folder / WEIGHTS))


def _check_shapes(config: MemoryConfig | WiderConfig, shape: ModelConfig, bits: int | None, folder: Path) -> None:
    """Raise ModelError unless the header of memory.safetensors matches this memory; allocates nothing."""
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{folder / WEIGHTS}: missing or damaged ({error}); run dvc repro stage_memory to rebuild it"
        ) from error
    try:
        with torch.device("meta"):
            memory = Memory(config, shape) if isinstance(config, MemoryConfig) else Wider(config, shape)
            if bits and isinstance(memory, Memory):
                quantized(memory, bits)
        expected = {name: tuple(tensor.shape) for name, tensor in memory.state_dict().items()}
    except (RuntimeError, TypeError) as error:  # a size beyond 64 bits
        raise ModelError(f"{folder / SHAPE}: invalid sizes ({str(error).splitlines()[0]})") from error
    if expected != found:
        name = min(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise ModelError(
            f"{folder / WEIGHTS}: its tensors do not match {SHAPE} ({name}: expected"
            f" {list(expected.get(name, ())) or 'nothing'}, found {list(found.get(name, ())) or 'nothing'}); run dvc"
            " repro stage_memory to rebuild it"
        )


def _read_description(folder: Path) -> JsonObject:
    """The content of memory.json. Raises ModelError."""
    path = folder / SHAPE
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            f"{path} is missing, but config.json describes a memory; run dvc repro stage_memory to rebuild it"
        ) from error
    except ValueError as error:
        raise ModelError(f"{path}: not JSON ({error})") from error
    if not isinstance(description, dict) or not {"kind", "config", "base", "bits"} <= description.keys():
        raise ModelError(f"{path}: expected the keys kind, config, base and bits")
    return description
