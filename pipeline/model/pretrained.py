"""A pretrained checkpoint as the first model: its weights, with rows for the control tokens that were added.

    folder of a Qwen3, Qwen2 or LLaMA checkpoint + the tokenizer taken from it -> Transformer

The architecture is the checkpoint's; of it only the number of rows may grow (`text/adoption.py` says to what). A new control
token's row is the mean of the rows of all tokens that the checkpoint knows, in the embedding and in a head of its own: its
logit is then the mean of the others', so it takes hardly any probability from them (Hewitt 2021, "Initializing new word
embeddings for pretrained language models"). The logits of the tokens that were there stay as they were. Rows that no token
has keep the checkpoint's numbers.

Not promised: other families, scaled RoPE, pickles: `config.py` and `convert.py` refuse them by name.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.model import convert, stored
from pipeline.model.config import read_config
from pipeline.model.transformer import Transformer
from pipeline.text.adoption import adopt
from pipeline.text.tokenizer import Tokenizer

TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def load(folder: Path, tokenizer: Tokenizer) -> Transformer:
    """The checkpoint's weights in float32, with a row for each id of `tokenizer`.

    Raises ModelError for a checkpoint that cannot be read, is not causal, or whose tokenizer is not the one given.
    """
    config = read_config(folder)
    if config.attention != "causal":
        raise ModelError(f"{folder}: expected a causal model to continue, found a {config.attention} one")
    stored.check(config, folder, stored.headers(folder))
    adopted = adopt(folder, config.vocab_size)
    if adopted.tokenizer.hash != tokenizer.hash:
        raise ModelError(
            f"{folder}: its tokenizer, taken in, is {adopted.tokenizer.hash[:12]}; {tokenizer.source} is "
            f"{tokenizer.hash[:12]}. Run dvc repro stage_tokenizer stage_encode"
        )
    state = convert.read_weights(folder)
    for name in TABLES:
        if name in state:
            state[name] = grown(state[name], tokenizer.vocab_size, adopted.known, adopted.fresh)
    model = Transformer(replace(config, vocab_size=tokenizer.vocab_size))
    convert.load_state(model, state, source=str(folder))
    return model


def grown(table: Tensor, rows: int, known: Sequence[int], fresh: Sequence[int]) -> Tensor:
    """(V, D) -> (rows, D) float32: those of `fresh`, and all that are new, are the mean of those of `known`."""
    table = table.float()
    mean = table[[id_ for id_ in known if id_ < len(table)]].mean(0)
    added = mean.expand(rows - len(table), -1)
    table = torch.cat((table, added))
    table[list(fresh)] = mean
    return table
