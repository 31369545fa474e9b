"""Model directories: what every stage publishes under models/. The architecture travels with the weights.

    config.json  model.safetensors  generation_config.json  lineage.json
    tokenizer.json  tokenizer_config.json  chat_template.jinja

It is a Hugging Face directory: transformers 4 and 5 load it (`Qwen3ForCausalLM`). No pickle, no code, no clock, id or
host name in it, so equal runs give equal bytes. `lineage.json` says which inputs and code made it.
Not promised: weights in another dtype than they were trained in; export/ does that.
"""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict

from pipeline.errors import ModelError
from pipeline.model import convert
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Transformer
from pipeline.text.tokenizer import Tokenizer
from pipeline.work import need_space


def save(folder: Path, model: Transformer, tokenizer: Tokenizer, lineage: dict[str, Any]) -> None:
    """Write a model directory. Weights over 5 GB are sharded.

    Raises ModelError when the tokenizer has more ids, StagecoachError before writing when the disk is too full.
    """
    check_vocabulary(model.config, tokenizer, folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    need_space(folder, sum(tensor.numel() * tensor.element_size() for tensor in state.values()) + 20_000_000)
    save_torch_state_dict(state, folder, max_shard_size="5GB", metadata={"format": "pt"})
    ids = {"pad_token_id": tokenizer.pad, "bos_token_id": None, "eos_token_id": tokenizer.turn_end}
    _write(folder / "config.json", model.config.to_hf() | ids)
    stops = {"eos_token_id": [tokenizer.turn_end, tokenizer.end_of_text], "pad_token_id": tokenizer.pad}
    _write(folder / "generation_config.json", {"do_sample": False} | stops)
    _write(folder / "lineage.json", lineage | {"tokenizer": tokenizer.hash})
    tokenizer.save(folder)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load(folder: Path) -> tuple[Transformer, Tokenizer]:
    """The model (float32, training mode) and its tokenizer.

    Raises ModelError for a directory that is not whole: a missing file, a tensor too many, too few or of another shape,
    a tokenizer with more ids than the embedding has rows.
    """
    config = convert.read_config(folder)
    tokenizer = Tokenizer.load(folder)
    check_vocabulary(config, tokenizer, folder)
    model = Transformer(config)
    convert.load_weights(model, folder)
    return model, tokenizer


def check_vocabulary(config: ModelConfig, tokenizer: Tokenizer, folder: Path) -> None:
    """Raise ModelError when the tokenizer can give an id that the embedding has no row for."""
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab_size} embedding rows; "
            "use the tokenizer the model was trained with (dvc repro stage_tokenizer follows the model file's vocab_size)"
        )


def lineage(folder: Path) -> dict[str, Any]:
    """What lineage.json says; empty for a directory from elsewhere."""
    path = folder / "lineage.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def weights_digest(model: torch.nn.Module) -> str:
    """sha256 over names and bytes of all parameters: equal for equal weights, whatever the file looks like."""
    import hashlib

    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
