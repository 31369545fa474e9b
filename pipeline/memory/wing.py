"""The memory's extension points; see `pipeline.wings`, and `model/layers.py` for the layer hook."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.memory.config import LEAK, MODEL_TYPE, MemoryConfig, ModelKeys

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pipeline.batches.batch import TokenStream
    from pipeline.evaluation.suites import Plan, Subject
    from pipeline.learning.pretraining import Training
    from pipeline.memory.cache import MemoryCache
    from pipeline.memory.config import RouterWeights
    from pipeline.memory.model import Memory
    from pipeline.model.config import ModelConfig
    from pipeline.model.layers import LayerHook
    from pipeline.model.transformer import Transformer
    from pipeline.report.claims import Claim
    from pipeline.report.metrics import MetricsRun, Section, WingModel
    from pipeline.run.workdir import Job


def model_keys() -> type:
    """The memory keys of a model file."""
    return ModelKeys


def model_type() -> str:
    """The type of a directory that also contains memory.json and memory.safetensors (memory/files.py)."""
    return MODEL_TYPE


def _memory_config(config: "ModelConfig") -> MemoryConfig | None:
    assert isinstance(config, ModelKeys)
    return config.memory


def check_model(config: "ModelConfig") -> None:
    """Raise ValueError if the memory does not fit the model."""
    memory = _memory_config(config)
    if memory is not None:
        memory.placed(config.layers)
        if config.attention != "causal":
            raise ValueError("model.memory: not supported for bidirectional models; use causal attention")
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


def hook_bytes(config: "ModelConfig", kind: str, precision: str, tokens: int) -> float:
    """Bytes that reading needs in a pass over `tokens`: for each reading layer, and once more for the one in progress.

    Each token needs its norm, queries and result and, on a CPU, the weights of all rows; each unit needs the keys and
    values of its chapters. If the units together read the entire bank, its keys and values are added.
    """
    memory = _memory_config(config)
    if memory is None:
        return 0.0
    size, cpu = (4 if precision == "fp32" else 2), kind == "cpu"
    q, k = config.heads * config.head_dim, config.kv_heads * config.head_dim
    rows = (memory.shared + memory.top_k) * memory.chapter_rows
    shares = config.heads * rows * (4 + (size if size == 2 else 0)) if cpu else 0
    units = tokens / (1 if memory.routing == "token" else memory.window)
    normed = 4 * q if memory.qk_norm else 0  # the input of the query norm
    per_token = (4 + size) * config.width + (3 if memory.gated else 2) * 2 * size * q + normed + shares
    bank = memory.rows * k * (2 * size + (4 if memory.qk_norm else 0)) if units * memory.top_k >= memory.chapters else 0
    per_read = tokens * per_token + units * 2 * rows * k * size + bank
    placed = len(memory.placed(config.layers))
    return per_read * (placed + 1 if placed else 0)


def save_hook(folder: Path, hook: "LayerHook", weights: dict[str, "Tensor"], base: str) -> None:
    """Write the files of a memory, or of its baseline, for a base model with the digest `base`."""
    from pipeline.memory import files
    from pipeline.memory.files import Wider
    from pipeline.memory.model import Memory

    if isinstance(hook, Memory | Wider):
        files.save(folder, hook, weights, base)


def load_hook(model: "Transformer", folder: Path) -> None:
    """Attach the memory in a model directory, or its baseline. Raises ModelError."""
    from pipeline.memory import files
    from pipeline.model import checkpoint

    if (folder / files.SHAPE).is_file() or checkpoint.kind(folder) == MODEL_TYPE:
        files.load(model, folder, checkpoint.weights_digest(model))


def loss_keys() -> type:
    """The loss weights of the router."""
    from pipeline.memory.config import RouterWeights

    return RouterWeights


def next_tokens(
    model: "Transformer", stream: "TokenStream", weights: "RouterWeights", job: "Job", *, tokens: int
) -> "Training | None":
    """See `memory.training.next_tokens`."""
    from pipeline.memory import training

    return training.next_tokens(model, stream, weights, job, tokens=tokens)


def purposes() -> dict[str, tuple[str, ...]]:
    """The suites for a memory and for the models it is compared with."""
    return {"code": ("facts",), "memory": ("text", "code", "facts"), "memory_baseline": ("text", "code", "facts")}


def causal_suites(subject: "Subject", *, facts: Path) -> "Plan":
    """The suite of trained facts; works for every causal model."""
    from pipeline.memory import measure

    return {"facts": lambda: measure.known(subject, facts)}


def models() -> "dict[str, WingModel]":
    """The models in the report; the memory is compared with a wider model."""
    from pipeline.report.metrics import WingModel

    return {
        "memory": WingModel("memory", compared="memory_baseline"),
        "memory_baseline": WingModel("memory", compared="code"),
    }


def report() -> "Section":
    """The report section on the memory."""
    from pipeline.memory import report as memory_report

    return memory_report


def claims(run: "MetricsRun") -> "Iterable[Claim]":
    """See `memory.report.claims`."""
    from pipeline.memory import report as memory_report

    return memory_report.claims(run)
