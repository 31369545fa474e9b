"""Small masked-diffusion models, and random checkpoints with the tensor names of published ones."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pipeline.diffusion.model import Denoiser, Traits
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Transformer
from pipeline.text.tokenizer import Tokenizer

SHAPE = ModelConfig(
    vocab_size=24,
    width=32,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=16,
    d_ff=48,
    max_context=64,
    rope_theta=1e4,
    tied=True,
    attention="bidirectional",
)
TRAITS = Traits(mask=3, fill=2, banned=(1, 3), shift=True)


def model(*, shift: bool = True, seed: int = 0, block_size: int = 0, dtype: torch.dtype = torch.float32) -> Denoiser:
    trunk = Transformer(SHAPE, torch.Generator().manual_seed(seed)).to(dtype)
    return Denoiser(trunk, replace(TRAITS, shift=shift, block_size=block_size))


DREAM = {
    "model_type": "Dream",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
LLADA = {
    "model_type": "llada",
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 4,
    "mlp_hidden_size": 48,
    "max_sequence_length": 64,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
    "weight_tying": False,
}


def checkpoint(
    folder: Path, tokenizer: Tokenizer, values: dict[str, Any], *, mask: str = "<|mask|>"
) -> dict[str, Tensor]:
    """Write a directory with random weights, whose tokenizer has `mask` in place of our mask token."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer.serialized.replace("<|mask|>", mask))
    rows, generator = tokenizer.vocab_size, torch.Generator().manual_seed(0)
    ids = {
        "mask_token_id": tokenizer.mask,
        "eos_token_id": tokenizer.end_of_text,
        "pad_token_id": tokenizer.end_of_text,
    }
    (folder / "config.json").write_text(json.dumps(values | ids | {"vocab_size": rows, "embedding_size": rows}))
    tensors = llada_tensors(rows, values) if values["model_type"] == "llada" else dream_tensors(rows, values)
    weights = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in tensors.items()}
    save_file(weights, folder / "model.safetensors")
    return weights


def dream_tensors(rows: int, c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, f, kv = (
        c["hidden_size"],
        c["intermediate_size"],
        c["hidden_size"] * c["num_key_value_heads"] // c["num_attention_heads"],
    )
    block = {
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (d, d),
        "self_attn.q_proj.bias": (d,),
        "self_attn.k_proj.weight": (kv, d),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.weight": (kv, d),
        "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (d, d),
        "mlp.gate_proj.weight": (f, d),
        "mlp.up_proj.weight": (f, d),
        "mlp.down_proj.weight": (d, f),
    }
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (rows, d),
        "model.norm.weight": (d,),
        "lm_head.weight": (rows, d),
    }
    return found | {
        f"model.layers.{n}.{name}": shape for n in range(c["num_hidden_layers"]) for name, shape in block.items()
    }


def llada_tensors(rows: int, c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, f = c["d_model"], c["mlp_hidden_size"]
    block = dict.fromkeys(("q_proj", "k_proj", "v_proj", "attn_out"), (d, d)) | {"attn_norm": (d,), "ff_norm": (d,)}
    block |= {"ff_proj": (f, d), "up_proj": (f, d), "ff_out": (d, f)}
    found: dict[str, tuple[int, ...]] = {"wte": (rows, d), "ln_f": (d,), "ff_out": (rows, d)}
    found |= {f"blocks.{n}.{name}": shape for n in range(c["n_layers"]) for name, shape in block.items()}
    return {f"model.transformer.{name}.weight": shape for name, shape in found.items()}
