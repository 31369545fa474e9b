"""Initial weights: induction heads in a fresh model, or a pretrained checkpoint.

**Fresh weights that learn to copy sooner.** A small model learns to copy in one sudden drop of the loss, after
about a million tokens (in a short run, never), because two layers have to learn to work together (Olsson et al. 2022,
arXiv:2209.11895). `induction_heads` writes this circuit into the usual random weights, in the spirit of Trockman and
Kolter 2023 (arXiv:2305.09828), who initialize attention with the structure of trained attention. All weights stay
trainable, and the architecture does not change.

    embedding   dimension 0 of every token is the same constant; the last norm hides it from the head
    layer 0     query and key use only the constant, rotated to match at a distance of one token on RoPE's fast angles:
                head 0 attends to the previous token and adds its projection V, in directions O
    layer 1     query V x, key O^T x, on RoPE's slow angles: head 0 attends to the position whose previous token is
                this token, and adds that position's token to the stream

`relate_variants` makes the variants of a word (" Oslo", "Oslo", "_oslo") share half of their embeddings, so that a name
seen after a space is also found and copied after a quotation mark, and "task" leads to "add_task". Otherwise, training
has to learn each such pair separately.

The embedding starts six times larger, and the residual branches start at zero except for the two heads; otherwise, the
first layer's noise would drown out the tokens. The last norm undoes the scale, so fresh logits keep their size.

**A pretrained checkpoint** (`load`): its weights, plus rows for added control tokens.

    folder of a Qwen3, Qwen2 or LLaMA checkpoint -> Transformer, Tokenizer

The architecture is the checkpoint's; only the vocabulary may grow (`text/tokenizer.py` determines by how much). A new
control token's row is the mean of the rows of all tokens in the checkpoint, in the embedding and in an untied head: its
logit is then the mean of theirs, so it takes hardly any probability from them (Hewitt 2021, "Initializing new word
embeddings for pretrained language models"). The logits of the checkpoint's tokens do not change. Rows without a token
keep the checkpoint's values.

Not supported: other families, scaled RoPE, pickles. `config.py` and `checkpoint.py` raise an error naming the cause.
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
from pipeline.text.tokenizer import Tokenizer, adopt

EMBEDDING = 0.3  # standard deviation of the embedding's entries
FAST, SLOW = 0.5, 0.01  # radians per token: angles >= FAST distinguish neighbors; angles <= SLOW span a context
NOISE = 0.2  # fraction of the random weights kept in the two heads
MEASURED_WIDTH = 192  # nano's width: a token's own logit grows as sqrt(width), so wider models get a smaller last norm
STRENGTH = 1.7  # length of a head's output relative to an embedding's
LEADING = re.compile(rb"[^A-Za-z0-9\x80-\xff]+(?=[A-Za-z\x80-\xff])")  # the characters before the word in a token


@torch.no_grad()
def induction_heads(model: Transformer, generator: torch.Generator) -> None:
    """Write the two heads into a fresh model; draws from `generator`, on its device.

    Raises ConfigError for a one-layer model, a bidirectional one, or one without slow angles.
    """
    config = model.config
    width, size = config.width, config.head_dim
    if config.layers < 2 or config.attention != "causal":
        raise ConfigError(
            "induction heads need a causal model with at least two layers; set language.induction_heads=false"
        )
    angles = config.rope_theta ** (-torch.arange(0, size, 2) / size)
    fast, slow = angles >= FAST, angles <= SLOW
    if not slow.any():
        raise ConfigError(
            f"induction heads need angles up to {SLOW} per token; rope_theta {config.rope_theta} and head_dim {size}"
            " give none. Raise rope_theta, or set language.induction_heads=false"
        )

    def draw_projection() -> Tensor:
        """(head_dim, width), rows of length about one that ignore the constant."""
        rows = torch.empty(size, width, device=generator.device).normal_(0.0, width**-0.5, generator=generator)
        rows[:, 0] = 0
        return rows

    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    table, last = model.model.embed_tokens.weight, model.model.norm.weight
    length = EMBEDDING * width**0.5
    table.mul_(EMBEDDING / config.initializer_range)
    table[:, 0] = length  # as long as the rest of the row, so the constant makes up half of the squared norm
    last.fill_(config.initializer_range / EMBEDDING * (MEASURED_WIDTH / width) ** 0.5)
    last[0] = 0
    added = STRENGTH * length * (2 / size) ** 0.5

    query, key, value, out = _head(model, 0)
    previous, position = draw_projection(), draw_projection()
    rotation = torch.cat((angles.cos() * fast, -angles.sin() * fast))
    constant = (2 * size / (width * int(fast.sum()))) ** 0.5  # gives queries and keys the length sqrt(head_dim)
    query[:, 0] += constant * rotation
    key[:, 0] += constant * torch.cat((fast, torch.zeros_like(fast)))
    value += previous
    out += added * position.T

    query, key, value, out = _head(model, 1)
    slow_rows = torch.cat((slow, slow))[:, None] * STRENGTH
    successor = draw_projection()
    query += previous * slow_rows
    key += position * slow_rows
    value += successor
    out += added * successor.T


@torch.no_grad()
def relate_variants(model: Transformer, token_bytes: Sequence[bytes], generator: torch.Generator) -> None:
    """Make tokens that differ only in capitalization, leading spaces or punctuation share half of their embeddings.

    `token_bytes[i]` are the bytes of token i. The squared weights of the old and shared halves sum to 1, so lengths do
    not change.
    Call this before `induction_heads`, which sets the scale. Draws from `generator`, on its device.
    """
    words: dict[bytes, list[int]] = {}
    for token, text in enumerate(token_bytes):
        if word := LEADING.sub(b"", text, count=1).lower():
            words.setdefault(word, []).append(token)
    table = model.model.embed_tokens.weight
    std = model.config.initializer_range
    for tokens in words.values():
        if len(tokens) > 1:
            common = torch.empty(table.shape[1], device=generator.device).normal_(0.0, std, generator=generator)
            table[tokens] = 0.5**0.5 * (table[tokens] + common)


def _head(model: Transformer, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of head 0's weights: query, key, value (h, D) with most of their noise removed, and output (D, h)."""
    size = model.config.head_dim
    query, key, value, out = (model.get_parameter(f"model.layers.{layer}.self_attn.{x}_proj.weight") for x in "qkvo")
    for part in (query, key, value):
        part[:size] *= NOISE
    return query[:size], key[:size], value[:size], out[:, :size]


# -- a pretrained checkpoint -------------------------------------------------------------------------------------------


TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Transformer, Tokenizer]:
    """The checkpoint's model in `dtype`, with a row for each tokenizer id, and its tokenizer, plus any missing tokens.

    Raises ModelError for a checkpoint that cannot be read or is not causal.
    """
    config = read_config(folder)
    if config.attention != "causal":
        raise ModelError(f"{folder}: expected a causal model, found a {config.attention} one")
    checkpoint.check(config, folder, checkpoint.headers(folder))
    adopted = adopt(folder, config.vocab_size)
    state = checkpoint.read_weights(folder)
    rows = adopted.tokenizer.vocab_size
    for name in TABLES:
        if name in state:
            state[name] = grown(state[name], rows, adopted.known, adopted.fresh)
    model = checkpoint.empty(replace(config, vocab_size=rows), dtype)
    checkpoint.load_state(model, state, source=str(folder))
    return model, adopted.tokenizer


def grown(table: Tensor, rows: int, known: Sequence[int], fresh: Sequence[int]) -> Tensor:
    """(V, D) -> (rows, D) float32: the rows of `fresh`, and all added rows, are the mean of the rows of `known`."""
    table = table.float()
    mean = table[[id_ for id_ in known if id_ < len(table)]].mean(0)
    added = mean.expand(rows - len(table), -1)
    table = torch.cat((table, added))
    table[list(fresh)] = mean
    return table
