"""A memory in a model directory, beside its base.

    config.json             model_type stagecoach_memory, which no causal engine takes for the base alone
    model.safetensors       the base, under Hugging Face's names
    memory.safetensors      banks and readers; a bank in int8 or int4 as numbers and a scale a row
    memory.json             its shape, and the digest of the base that it was trained on

A memory on another base would read states that it has never seen, so `load` compares digests.

Banks in 8 or 4 bits, after training: numbers and one scale a row.

    s = max |row| / 127 (int4: / 7)      q = round(row / s), within +-127 (+-7; two to a byte)      |row - s q| <= s / 2

Rows are gathered first and made floats again after. Of a factorised bank the rows' factor is quantised, the other
stays.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from pipeline.memory.baseline import Wider, WiderConfig
from pipeline.memory.config import MemoryConfig
from pipeline.memory.model import Bank, Memory
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Transformer
from pipeline.run.errors import ModelError

LEVELS = {8: 127, 4: 7}


class QuantisedBank(nn.Module):
    """N rows of M numbers in few bits; not trainable."""

    numbers: Tensor
    scales: Tensor

    def __init__(self, bank: Bank, bits: int) -> None:
        """Raises ValueError for other than 8 or 4 bits, and for rows that do not fill bytes."""
        super().__init__()
        if bits not in LEVELS:
            raise ValueError(f"quantise: expected 8 or 4 bits, got {bits}")
        rows = bank.rows.detach()
        if bits == 4 and rows.shape[1] % 2:
            raise ValueError(
                f"quantise: two numbers of 4 bits make a byte; expected rows of an even length, got {rows.shape[1]}"
            )
        self.bits = bits
        numbers, scales = quantise(rows, bits)
        self.register_buffer("numbers", numbers)
        self.register_buffer("scales", scales)
        self.factor = bank.factor

    def forward(self, which: Tensor | None = None) -> Tensor:
        """As `Bank.forward`."""
        numbers, scales = (self.numbers, self.scales) if which is None else (self.numbers[which], self.scales[which])
        rows = dequantise(numbers, scales, self.bits)
        return rows if self.factor is None else functional.linear(rows, self.factor)


def quantise(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Numbers (N, M) int8, or (N, M / 2) uint8 of two each, the even place low; and scales (N, 1)."""
    most = LEVELS[bits]
    scales = rows.abs().amax(1, keepdim=True) / most
    whole = (rows / scales.clamp_min(torch.finfo(rows.dtype).tiny)).round().clamp(-most, most).to(torch.int8)
    if bits == 8:
        return whole, scales
    raised = (whole + 8).to(torch.uint8)  # 1 to 15
    return raised[:, 0::2] | (raised[:, 1::2] << 4), scales


def dequantise(numbers: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The rows again, (..., M)."""
    if bits == 4:
        low, high = numbers & 15, numbers >> 4
        numbers = torch.stack([low, high], -1).flatten(-2).to(torch.int8) - 8
    return numbers.to(scales.dtype) * scales


def quantised(memory: Memory, bits: int) -> None:
    """Put all banks of a memory into so many bits. Raises ValueError."""
    for number, bank in enumerate(memory.bank):
        assert isinstance(bank, Bank), "quantised already"
        memory.bank[number] = QuantisedBank(bank, bits)


# -- memory_files ------------------------------------------------------------------------------------------------------


WEIGHTS, SHAPE = "memory.safetensors", "memory.json"
PREFIX = "memory."


def attach(
    model: Transformer, config: MemoryConfig | WiderConfig, generator: torch.Generator | None = None
) -> Memory | Wider:
    """Put a memory, or what it is compared with, beside the layers of a model that has its weights, and freeze these.

    Raises ValueError where it does not fit the model, and where this has one.
    """
    if model.memory is not None:
        raise ValueError("the model has a memory already; expected one without, such as that of model: nano")
    model.requires_grad_(False)
    where = model.model.embed_tokens.weight.device
    if isinstance(config, MemoryConfig):
        shape = replace(model.config, memory=config)
        beside: Memory | Wider = Memory(config, shape, generator)
        model.config = shape
    else:
        beside = Wider(config, model.config, generator)
    beside.added = True
    model.memory = beside.to(where)
    return beside


def split(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A model's weights: those of the base, and those of the memory without their prefix."""
    base = {name: tensor for name, tensor in state.items() if not name.startswith(PREFIX)}
    return base, {name.removeprefix(PREFIX): tensor for name, tensor in state.items() if name.startswith(PREFIX)}


def save(folder: Path, beside: nn.Module, weights: dict[str, Tensor], base: str) -> None:
    """Write the two files of a memory whose base has the digest `base`."""
    kind = "memory" if isinstance(beside, Memory) else "wider"
    config: MemoryConfig | WiderConfig = beside.config  # type: ignore[assignment]
    bits = next((bank.bits for bank in beside.modules() if isinstance(bank, QuantisedBank)), None)
    told: dict[str, Any] = {"kind": kind, "config": config.to_json(), "base": base, "bits": bits}
    if isinstance(config, MemoryConfig):
        told["leaky"] = config.leaky
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, folder / WEIGHTS, metadata={"format": "pt"}
    )
    (folder / SHAPE).write_text(json.dumps(told, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load(model: Transformer, folder: Path, base: str) -> None:
    """Attach the memory of a directory to its loaded base, whose digest is `base`. Raises ModelError naming file and
    reason.
    """
    told = described(folder)
    if told["base"] != base:
        raise ModelError(
            f"{folder / SHAPE}: this memory was trained on another base (digest {told['base'][:12]}, found"
            f" {base[:12]}); put it beside the model.safetensors that it came with, or train it anew: dvc repro"
            " stage_memory"
        )
    try:
        config = (
            MemoryConfig.from_json(told["config"])
            if told["kind"] == "memory"
            else WiderConfig(width=told["config"]["width"], layers=tuple(told["config"]["layers"]))
        )
        _compare(config, model.config, told["bits"], folder)
        beside = attach(model, config)
    except ModelError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{folder / SHAPE}: {error}") from error
    model.requires_grad_(True)
    beside.added = False
    if told["bits"] and isinstance(beside, Memory):
        quantised(beside, told["bits"])
    beside.load_state_dict(load_file(folder / WEIGHTS))


def _compare(config: MemoryConfig | WiderConfig, shape: ModelConfig, bits: int | None, folder: Path) -> None:
    """Raise ModelError unless the header of memory.safetensors has the tensors of this memory; none of them is
    allocated.
    """
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{folder / WEIGHTS}: missing or damaged ({error}); build it again: dvc repro stage_memory"
        ) from error
    try:
        with torch.device("meta"):
            asked = Memory(config, shape) if isinstance(config, MemoryConfig) else Wider(config, shape)
            if bits and isinstance(asked, Memory):
                quantised(asked, bits)
        expected = {name: tuple(tensor.shape) for name, tensor in asked.state_dict().items()}
    except (RuntimeError, TypeError) as error:  # a size beyond 64 bits
        raise ModelError(f"{folder / SHAPE}: sizes that no memory can have ({str(error).splitlines()[0]})") from error
    if expected != found:
        wrong = min(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise ModelError(
            f"{folder / WEIGHTS}: its tensors are not those that {SHAPE} describes ({wrong}: expected"
            f" {list(expected.get(wrong, ())) or 'nothing'}, found {list(found.get(wrong, ())) or 'nothing'}); build it"
            " again: dvc repro stage_memory"
        )


def described(folder: Path) -> dict[str, Any]:
    """What memory.json says. Raises ModelError."""
    path = folder / SHAPE
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            f"{path} is missing, but config.json speaks of a memory; build it again: dvc repro stage_memory"
        ) from error
    except ValueError as error:
        raise ModelError(f"{path}: not JSON ({error})") from error
    if not isinstance(told, dict) or not {"kind", "config", "base", "bits"} <= told.keys():
        raise ModelError(f"{path}: expected kind, config, base and bits")
    return told
