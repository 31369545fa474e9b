"""What the core finds of the memory by name (pipeline/wings.py): keys of model files, the layer hook, its files."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.memory.config import LEAK, MemoryConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pipeline.memory.cache import MemoryCache
    from pipeline.memory.model import Memory
    from pipeline.model.config import ModelConfig
    from pipeline.model.hooks import LayerHook
    from pipeline.model.transformer import Transformer

MODEL_TYPE = "stagecoach_memory"  # with memory.json and memory.safetensors beside config.json (memory/files.py)


@dataclass(frozen=True, kw_only=True)
class ModelFields:
    """What a model file may have for a memory."""

    memory: MemoryConfig | None = None
    """{rows, chapters, top_k, ...}: a bank that some layers read (memory/config.py)."""


def _memory_config(config: "ModelConfig") -> MemoryConfig | None:
    assert isinstance(config, ModelFields)
    return config.memory


def check_model(config: "ModelConfig") -> None:
    """Raise ValueError for a memory that does not fit the model."""
    memory = _memory_config(config)
    if memory is not None:
        memory.placed(config.layers)
        if config.attention != "causal":
            raise ValueError("model.memory: a model that sees both sides has none here; take causal attention")
        if memory.leaky and not memory.allow_leak:
            raise ValueError(f"model.memory.{LEAK}")


def layer_hook(config: "ModelConfig") -> "Memory | None":
    """The memory of a model, with zero weights."""
    from pipeline.memory.model import Memory

    memory = _memory_config(config)
    return None if memory is None else Memory(memory, config)


def hook_cache(config: "ModelConfig", rows: int, dtype: "torch.dtype", device: "torch.device") -> "MemoryCache | None":
    """The memory's part of a key-value cache."""
    from pipeline.memory.cache import MemoryCache

    memory = _memory_config(config)
    return None if memory is None else MemoryCache(memory, config, rows, dtype, device)


def hook_bytes(config: "ModelConfig", kind: str, precision: str) -> float:
    """Bytes per token of reading: norm, queries, result; on a CPU the weights of all rows; keys and values."""
    memory = _memory_config(config)
    if memory is None:
        return 0.0
    size, cpu = (4 if precision == "fp32" else 2), kind == "cpu"
    q, k = config.heads * config.head_dim, config.kv_heads * config.head_dim
    rows = (memory.shared + memory.top_k) * memory.chapter_rows
    shares = config.heads * rows * (4 + (size if size == 2 else 0)) if cpu else 0
    gathered = 2 * rows * k * size / (1 if memory.routing == "token" else memory.window)
    per_read = (4 + size) * config.width + (3 if memory.gated else 2) * 2 * size * q + shares + gathered
    return per_read * len(memory.placed(config.layers))


def save_hook(folder: Path, hook: "LayerHook", weights: dict[str, "Tensor"], base: str) -> None:
    """Write the files of a memory, or of its baseline, which stands on a base with the digest `base`."""
    from pipeline.memory import files
    from pipeline.memory.baseline import Wider
    from pipeline.memory.model import Memory

    if isinstance(hook, Memory | Wider):
        files.save(folder, hook, weights, base)


def load_hook(model: "Transformer", folder: Path) -> None:
    """Attach the memory, or its baseline, of a model directory. Raises ModelError."""
    from pipeline.memory import files
    from pipeline.model import checkpoint

    if (folder / files.SHAPE).is_file() or checkpoint.kind(folder) == MODEL_TYPE:
        files.load(model, folder, checkpoint.weights_digest(model))
