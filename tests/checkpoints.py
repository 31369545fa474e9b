"""Pretrained checkpoints for tests, written by transformers: tiny, random, with a real byte-level BPE."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pipeline.text.tokenizer import PATTERN

ROOT = Path(__file__).parents[1]
# LLaMA 3's split pattern: up to three digits in a piece
LLAMA3 = PATTERN.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")
CONTROL = {
    "qwen2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "qwen3": [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|fim_prefix|>",
        "<tool_call>",
        "</tool_call>",
        "<think>",
    ],
    "llama": ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>"],
}
PLAIN = ("<|fim_prefix|>", "<tool_call>", "</tool_call>", "<think>")  # of these, not marked special in Qwen's files
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True, "num_key_value_heads": 2},
    "qwen2-untied": {"tie_word_embeddings": False, "num_key_value_heads": 4},
    "qwen3": {"tie_word_embeddings": True, "num_key_value_heads": 2, "head_dim": 32},
    "qwen3-untied": {"tie_word_embeddings": False, "num_key_value_heads": 1, "head_dim": 16},
    "llama": {"tie_word_embeddings": False, "num_key_value_heads": 2},
    "llama-tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
}


def texts() -> Iterator[str]:
    """What the tokenizers are trained on."""
    for path in sorted((ROOT / "pipeline/text").glob("*.py")):
        yield path.read_text(encoding="utf-8")


def bpe(family: str, size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE of `size` ids as the family's tokenizer.json has it: split, normalizer, control tokens,
    template.
    """
    llama = family == "llama"
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=llama))
    split = pre_tokenizers.Split(Regex(LLAMA3 if llama else PATTERN), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    if not llama:
        made.normalizer = normalizers.NFC()
    control = CONTROL[family]
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(control), show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(texts(), trainer)
    made.add_special_tokens([AddedToken(c, special=True, normalized=False) for c in control if c not in PLAIN])
    made.add_tokens([AddedToken(c, special=False, normalized=False) for c in control if c in PLAIN])
    if llama:
        first = (control[0], made.token_to_id(control[0]))
        made.post_processor = processors.TemplateProcessing(single=f"{first[0]} $A", special_tokens=[first])
    return made


def write(folder: Path, shape: str, *, ids: int = 500, rows: int = 512, **changes: Any) -> Any:
    """Write a checkpoint with `ids` tokens and `rows` embedding rows; returns the transformers model.

    All weights are random, norms and biases too, and large enough that its greedy text varies.
    """
    import transformers

    family = shape.partition("-")[0]
    values = {
        "vocab_size": rows,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "rope_theta": 50_000.0,
        "rms_norm_eps": 1e-5,
        "attn_implementation": "eager",
    }
    config = transformers.AutoConfig.for_model(family, **(values | SHAPES[shape] | changes))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim > 1 else 0.2))
    model.save_pretrained(folder)
    made = bpe(family, ids)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=CONTROL[family][0])
    fast.save_pretrained(folder)
    made.save(str(folder / "tokenizer.json"))  # as the family ships it, whatever transformers wrote
    return model


def edit(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes a key."""
    values = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}), encoding="utf-8")
