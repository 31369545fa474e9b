"""Fresh weights that can copy from the context before the first step.

A small model learns to copy in one sudden fall of the loss, after about a million tokens or, in a short run, never: two
layers have to find each other (Olsson et al. 2022, arXiv:2209.11895). `induction_heads` writes that circuit into the
normal fresh weights, in the spirit of Trockman and Kolter 2023 (arXiv:2305.09828), who start attention from the
structure that trained attention shows. All of it stays trainable, and the architecture is untouched.

    embedding   number 0 of every token is one constant; the last norm hides it from the head
    layer 0     query and key read the constant alone, turned so that RoPE's fast angles agree one token apart: head 0
                sees the token before and adds a projection V of it, in directions O
    layer 1     query V x, key O^T x, on RoPE's slow angles: head 0 finds the place whose token before was this token,
                and adds that place's token to the stream

`relate_variants` lets the tokens of one word (" Oslo", "Oslo", "_oslo") start half alike, so that a name that stood
after a space is found and copied behind a quotation mark too, and "task" leads to "add_task"; training alone has to
learn that pair by pair.

The embedding starts six times larger and the branches at zero but for the two heads, or else the noise of the first
layer drowns the tokens; the last norm makes up for the size, so fresh logits keep their scale.

A pretrained checkpoint as the first model: its weights, with rows for the control tokens that were added.

    folder of a Qwen3, Qwen2 or LLaMA checkpoint + the tokenizer taken from it -> Transformer

The architecture is the checkpoint's; of it only the number of rows may grow (`text/adoption.py` says to what). A new
control token's row is the mean of the rows of all tokens that the checkpoint knows, in the embedding and in a head of
its own: its logit is then the mean of the others', so it takes hardly any probability from them (Hewitt 2021,
"Initializing new word embeddings for pretrained language models"). The logits of the tokens that were there stay as
they were. Rows that no token has keep the checkpoint's numbers.

Not promised: other families, scaled RoPE, pickles: `config.py` and `convert.py` refuse them by name.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from pipeline.model import checkpoint
from pipeline.model.config import read_config
from pipeline.model.transformer import Transformer
from pipeline.run.errors import ConfigError, ModelError
from pipeline.text.adoption import adopt
from pipeline.text.tokenizer import Tokenizer

EMBEDDING = 0.3  # standard deviation of the embedding's entries
FAST, SLOW = 0.5, 0.01  # radians a token: from here on an angle tells neighbours apart; up to here it spans a context
NOISE = 0.2  # of the normal weights that stays in the two heads
MEASURED_WIDTH = 192  # nano's: a token's own logit grows as sqrt(width), so the last norm shrinks for wider models
STRENGTH = 1.7  # of what a head adds, in lengths of an embedding
LEADING = re.compile(rb"[^A-Za-z0-9\x80-\xff]+(?=[A-Za-z\x80-\xff])")  # what may stand before a word in its token


@torch.no_grad()
def induction_heads(model: Transformer, generator: torch.Generator) -> None:
    """Write the two heads into a fresh model; draws from `generator`, on its device.

    Raises ConfigError for a model of one layer, a bidirectional one, or angles of which none are slow.
    """
    config = model.config
    width, size = config.width, config.head_dim
    if config.layers < 2 or config.attention != "causal":
        raise ConfigError(
            "induction heads need a causal model of two layers or more; set language.induction_heads=false"
        )
    angles = config.rope_theta ** (-torch.arange(0, size, 2) / size)
    fast, slow = angles >= FAST, angles <= SLOW
    if not slow.any():
        raise ConfigError(
            f"induction heads need angles of at most {SLOW} a token; rope_theta {config.rope_theta} and head_dim {size}"
            " have none. Raise rope_theta, or set language.induction_heads=false"
        )

    def drawn() -> Tensor:
        """(head_dim, width), rows of length about one that do not read the constant."""
        rows = torch.empty(size, width, device=generator.device).normal_(0.0, width**-0.5, generator=generator)
        rows[:, 0] = 0
        return rows

    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    table, last = model.model.embed_tokens.weight, model.model.norm.weight
    length = EMBEDDING * width**0.5
    table.mul_(EMBEDDING / config.initializer_range)
    table[:, 0] = length  # as long as the rest of the row: of a normed row, half the square is the constant's
    last.fill_(config.initializer_range / EMBEDDING * (MEASURED_WIDTH / width) ** 0.5)
    last[0] = 0
    added = STRENGTH * length * (2 / size) ** 0.5

    query, key, value, out = _head(model, 0)
    before, place = drawn(), drawn()
    turn = torch.cat((angles.cos() * fast, -angles.sin() * fast))
    constant = (2 * size / (width * int(fast.sum()))) ** 0.5  # makes queries and keys of length sqrt(head_dim)
    query[:, 0] += constant * turn
    key[:, 0] += constant * torch.cat((fast, torch.zeros_like(fast)))
    value += before
    out += added * place.T

    query, key, value, out = _head(model, 1)
    slowly = torch.cat((slow, slow))[:, None] * STRENGTH
    successor = drawn()
    query += before * slowly
    key += place * slowly
    value += successor
    out += added * successor.T


@torch.no_grad()
def relate_variants(model: Transformer, token_bytes: Sequence[bytes], generator: torch.Generator) -> None:
    """Give tokens that differ in a leading space or sign or in capitals alone a common half of their fresh embeddings.

    `token_bytes[i]` are the bytes of token i. Squares of old and common part add up, so lengths stay. To be called
    before `induction_heads`, which sets the scale. Draws from `generator`, on its device.
    """
    words: dict[bytes, list[int]] = {}
    for token, spelled in enumerate(token_bytes):
        if word := LEADING.sub(b"", spelled, count=1).lower():
            words.setdefault(word, []).append(token)
    table = model.model.embed_tokens.weight
    std = model.config.initializer_range
    for tokens in words.values():
        if len(tokens) > 1:
            common = torch.empty(table.shape[1], device=generator.device).normal_(0.0, std, generator=generator)
            table[tokens] = 0.5**0.5 * (table[tokens] + common)


def _head(model: Transformer, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of head 0's weights: query, key, value (h, D) with most of their noise taken away, and output (D, h)."""
    size = model.config.head_dim
    query, key, value, out = (model.get_parameter(f"model.layers.{layer}.self_attn.{x}_proj.weight") for x in "qkvo")
    for part in (query, key, value):
        part[:size] *= NOISE
    return query[:size], key[:size], value[:size], out[:, :size]


# -- pretrained --------------------------------------------------------------------------------------------------------


TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def load(folder: Path, tokenizer: Tokenizer) -> Transformer:
    """The checkpoint's weights in float32, with a row for each id of `tokenizer`.

    Raises ModelError for a checkpoint that cannot be read, is not causal, or whose tokenizer is not the one given.
    """
    config = read_config(folder)
    if config.attention != "causal":
        raise ModelError(f"{folder}: expected a causal model to continue, found a {config.attention} one")
    checkpoint.check(config, folder, checkpoint.headers(folder))
    adopted = adopt(folder, config.vocab_size)
    if adopted.tokenizer.hash != tokenizer.hash:
        raise ModelError(
            f"{folder}: its tokenizer, taken in, is {adopted.tokenizer.hash[:12]}; {tokenizer.source} is "
            f"{tokenizer.hash[:12]}. Run dvc repro stage_tokenizer stage_encode"
        )
    state = checkpoint.read_weights(folder)
    for name in TABLES:
        if name in state:
            state[name] = grown(state[name], tokenizer.vocab_size, adopted.known, adopted.fresh)
    model = Transformer(replace(config, vocab_size=tokenizer.vocab_size))
    checkpoint.load_state(model, state, source=str(folder))
    return model


def grown(table: Tensor, rows: int, known: Sequence[int], fresh: Sequence[int]) -> Tensor:
    """(V, D) -> (rows, D) float32: those of `fresh`, and all that are new, are the mean of those of `known`."""
    table = table.float()
    mean = table[[id_ for id_ in known if id_ < len(table)]].mean(0)
    added = mean.expand(rows - len(table), -1)
    table = torch.cat((table, added))
    table[list(fresh)] = mean
    return table
