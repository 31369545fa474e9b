"""A masked-diffusion model: a transformer that sees both sides, and predicts the tokens under its masks.

    tokens with some replaced by the mask  ->  logits (n, V) of the n asked places

A model that was a causal one keeps its shift: the state at place i - 1 predicts token i (DiffuLLaMA, arXiv:2410.17891),
so the first place of a text is always clean. Ids that no text may hold (the mask itself, padding) have probability 0.

`forward` takes any number of inputs. In training each but an only one runs under activation checkpointing: pass one
keeps ids and masks, the backward pass replays them one by one, so a loss over n draws needs the memory of one (specs:
diffusion, 3).

Published masked-diffusion checkpoints: Dream and DiffuCoder (`model_type` Dream), LLaDA (llada), from a local
directory.

    folder -> Denoiser, its tokenizer taken in (text/adoption.py)

Sizes and ids come from config.json and the tokenizer, never from a literal. Dream has Qwen2's names and biases and
keeps the shift of the causal model that it was; LLaDA names its tensors in its own way and has none. Where the two
files disagree about an id the tokenizer wins (DiffuCoder's config.json has another padding).

Not promised: their own conversation templates: a prompt is rendered as everywhere here, so fine-tune before you talk to
it. Code that a checkpoint brings along is never run.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipeline.model import checkpoint as model_checkpoint
from pipeline.model.attention import Masked
from pipeline.model.config import ModelConfig, number, read_values, whole
from pipeline.model.initialization import TABLES, grown
from pipeline.model.transformer import Checkpointing, Transformer
from pipeline.run.errors import ModelError
from pipeline.text.adoption import adopt
from pipeline.text.tokenizer import BEGINS, END_OF_TEXT, MASKS, PADS, TURN_ENDS, Tokenizer

MOST_LOGITS = 2**24  # that are formed at once without being computed again in the backward pass


@dataclass(frozen=True)
class Traits:
    """What tells a masked-diffusion model from a causal one of its shape; stands in config.json."""

    mask: int  # id of the mask
    fill: int  # id that fills a canvas behind the answer
    banned: tuple[int, ...]  # ids that are never predicted; the mask is one of them
    shift: bool  # the state at place i - 1 predicts token i
    block_size: int = 0  # tokens that it denoises together, from the left block by block; 0: all
    ends: tuple[int, ...] = ()  # ids that end an answer besides the fill: the end of a turn, where something else fills

    def __post_init__(self) -> None:
        assert self.mask in self.banned and not {self.fill, *self.ends} & set(self.banned), self


@dataclass(frozen=True)
class Noised:
    """Rows of tokens of which some are hidden."""

    tokens: Tensor  # (B, T) int64, as they are
    masks: Tensor  # (B, T) bool, True where the mask stands
    documents: Tensor  # (B, T) int32, -1 in the padding
    positions: Tensor  # (B, T) int64
    sight: Tensor | None = (
        None  # bool, who sees whom within a document: (T, T), beside clean tokens (B, 1, 2T, 2T); None: all
    )
    clean: Tensor | None = None  # (B, T) int64, block diffusion's clean tokens beside the noised ones
    asked: Tensor | None = None  # (B, T) bool, places whose tokens are predicted; None: those under the masks

    @property
    def wanted(self) -> Tensor:
        """The places whose tokens are predicted, (B, T)."""
        return self.masks if self.asked is None else self.asked

    @property
    def targets(self) -> Tensor:
        """The tokens there, (n,), row by row."""
        return self.tokens[self.wanted]

    def to(self, device: torch.device | str) -> "Noised":
        """The same on another device."""
        moved = {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in vars(self).items()}
        return Noised(**moved)


Read = Callable[[Tensor, Tensor, Noised], Tensor]  # of states (n, D), the head's matrix (V, D) and the input


class Denoiser(nn.Module):
    """A bidirectional `Transformer` with its traits. Raises ValueError for a causal one."""

    def __init__(self, trunk: Transformer, traits: Traits) -> None:
        super().__init__()
        if trunk.config.attention != "bidirectional":
            raise ValueError("a masked-diffusion model sees both sides; found causal attention")
        self.trunk, self.traits = trunk, traits

    def forward(self, inputs: Iterable[Noised], read: Read) -> list[Tensor]:
        """What `read` makes of each input's states at its asked places, in training under replay where there are
        several.
        """
        given = list(inputs)
        replay = self.training and torch.is_grad_enabled() and len(given) > 1
        return [self._replayed(one, read) if replay else self.read(one, read) for one in given]

    def _replayed(self, one: Noised, read: Read) -> Tensor:
        found = checkpoint(self.read, one, read, use_reentrant=False)
        assert isinstance(found, Tensor)
        return found

    def read(self, one: Noised, read: Read) -> Tensor:
        """One input's states at its asked places, given to `read`."""
        hidden = self.states(one)
        return read(hidden[self._places(one.wanted)], self.trunk.table, one)

    def states(self, one: Noised) -> Tensor:
        """What the head reads, (B, T, D). Raises ValueError for rows longer than the context."""
        ids = one.tokens.masked_fill(one.masks, self.traits.mask)
        if one.clean is not None:
            return self._beside_clean(ids, one)
        if one.sight is None:
            return self.trunk.hidden(ids, positions=one.positions, documents=one.documents)
        self._check_length(ids)
        same = Masked.of(one.documents, causal=False).mask  # (B, 1, T, T)
        return self._line(ids, one.positions, Masked(same & one.sight))

    def _beside_clean(self, ids: Tensor, one: Noised) -> Tensor:
        """Noised and clean tokens in one row of 2T, positions repeated; the states of the noised half."""
        assert one.clean is not None and one.sight is not None
        self._check_length(ids)
        both = torch.cat([one.documents, one.documents], 1)
        mask = Masked.of(both, causal=False).mask & one.sight
        mask = mask | torch.eye(both.shape[1], dtype=torch.bool, device=mask.device)  # padding sees itself
        positions = torch.cat([one.positions, one.positions], 1)
        return self._line(torch.cat([ids, one.clean], 1), positions, Masked(mask))[:, : ids.shape[1]]

    def _check_length(self, ids: Tensor) -> None:
        if ids.shape[1] > self.config.max_context:
            raise ValueError(f"rows of {ids.shape[1]} tokens are longer than the context of {self.config.max_context}")

    def _line(self, ids: Tensor, positions: Tensor, layout: Masked) -> Tensor:
        return self.trunk.line(ids.flatten(), positions.flatten(), layout).view(*ids.shape, -1)

    def _places(self, wanted: Tensor) -> Tensor:
        """Where the states stand that predict the tokens at the `wanted` places, (B, T)."""
        return functional.pad(wanted, (-1, 1)) if self.traits.shift else wanted

    def logits(self, one: Noised) -> Tensor:
        """Allowed logits (n, V) in float32 of the asked places, row by row."""
        return self.read(one, lambda hidden, table, _: allowed_logits(hidden, table, self.traits.banned))

    @property
    def config(self) -> ModelConfig:
        """The trunk's shape."""
        return self.trunk.config

    @property
    def checkpointing(self) -> Checkpointing:
        """As in `Transformer`."""
        return self.trunk.checkpointing

    @checkpointing.setter
    def checkpointing(self, mode: Checkpointing) -> None:
        self.trunk.checkpointing = mode

    def num_parameters(self) -> int:
        """All weights."""
        return self.trunk.num_parameters()

    def flops_per_token(self, context: int) -> int:
        """Training FLOPs of one token of an input, as `ModelConfig` counts them."""
        return self.config.flops_per_token(context)


def allowed_logits(hidden: Tensor, table: Tensor, banned: Collection[int]) -> Tensor:
    """Logits (n, V), at least float32, of states (n, D) under the head's matrix (V, D); -inf for the banned ids."""
    logits = functional.linear(hidden, table)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    never = torch.tensor(sorted(banned), device=wide.device)
    return (
        wide.index_fill(-1, never, float("-inf")) if wide.requires_grad else wide.index_fill_(-1, never, float("-inf"))
    )


def logprobs(hidden: Tensor, table: Tensor, targets: Tensor, banned: Collection[int]) -> Tensor:
    """log p (n,) of the targets (n,), in nats; over MOST_LOGITS logits in pieces that the backward pass computes
    again.
    """
    size = max(1, MOST_LOGITS // len(table))
    if len(hidden) <= size:
        return _logprobs(hidden, table, targets, banned)
    pieces: list[Any] = []
    for states, aims in zip(hidden.split(size), targets.split(size), strict=True):
        if torch.is_grad_enabled():
            pieces.append(checkpoint(_logprobs, states, table, aims, banned, use_reentrant=False))
        else:
            pieces.append(_logprobs(states, table, aims, banned))
    return torch.cat(pieces)


def _logprobs(hidden: Tensor, table: Tensor, targets: Tensor, banned: Collection[int]) -> Tensor:
    logits = allowed_logits(hidden, table, banned)
    return logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(-1)


# -- published ---------------------------------------------------------------------------------------------------------


LLADA_SIZES = {
    "width": "d_model",
    "layers": "n_layers",
    "heads": "n_heads",
    "d_ff": "mlp_hidden_size",
    "max_context": "max_sequence_length",
    "rope_theta": "rope_theta",
}
LLADA_TOP = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}
LLADA_BLOCK = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
Named = TypeVar("Named")


@dataclass(frozen=True)
class Published:
    """A checkpoint's shape, whether it is shifted, and what config.json says of its ids."""

    shape: ModelConfig
    shift: bool
    ids: dict[str, int | None]  # mask, eos, pad, bos


def load(folder: Path) -> tuple[Denoiser, Tokenizer]:
    """The model in float32 and its tokenizer, with rows for the control tokens that were added.

    Raises ModelError for another family, a missing or unknown tensor, and ids that the tokenizer does not have.
    """
    told = read(folder)
    found, keys = model_checkpoint.headers(folder), model_checkpoint.KEYS
    if any(name.startswith("model.transformer.") for name in found):
        found, keys = renamed(found), keys | LLADA_SIZES
    model_checkpoint.check(told.shape, folder, found, keys)
    adopted = adopt(folder, told.shape.vocab_size)
    tokenizer = adopted.tokenizer
    state = model_checkpoint.read_weights(folder)
    state = renamed(state) if any(name.startswith("model.transformer.") for name in state) else dict(state)
    for name in TABLES:
        if name in state:
            state[name] = grown(state[name], tokenizer.vocab_size, adopted.known, adopted.fresh)
    trunk = Transformer(replace(told.shape, vocab_size=tokenizer.vocab_size))
    model_checkpoint.load_state(trunk, state, source=str(folder))
    return Denoiser(trunk, traits(folder, told, tokenizer, adopted.fresh)), tokenizer


def read(folder: Path) -> Published:
    """What config.json says. Raises ModelError."""
    path, values = folder / "config.json", read_values(folder)
    kind = values.get("model_type")
    ids = {name: values.get(f"{name}_token_id") for name in ("mask", "eos", "pad", "bos")}
    if kind == "Dream":
        shape = ModelConfig.from_hf(values | {"model_type": "qwen2"})
        return Published(replace(shape, attention="bidirectional"), True, ids)
    if kind == "llada":
        return Published(_llada(values, path), False, ids)
    raise ModelError(
        f"{path}: model_type {kind!r}; expected Dream (Dream, DiffuCoder) or llada. A causal checkpoint goes into"
        " stage_language: language.start=pretrained"
    )


def _llada(values: dict[str, Any], path: Path) -> ModelConfig:
    try:
        sizes: dict[str, Any] = {name: whole(values, key) for name, key in LLADA_SIZES.items() if name != "rope_theta"}
        heads = whole(values, "n_heads")
        return ModelConfig(
            **sizes,
            rope_theta=number(values, "rope_theta", 0.0),
            vocab_size=whole(values, "embedding_size" if values.get("embedding_size") else "vocab_size"),
            kv_heads=whole(values, "n_kv_heads", heads),
            head_dim=whole(values, "d_model") // heads,
            tied=bool(values.get("weight_tying", False)),
            norm_eps=number(values, "rms_norm_eps", 1e-5),
            qk_norm=False,
            attention="bidirectional",
        )
    except KeyError as error:
        raise ModelError(f"{path}: key {error} is missing; it is not a whole llada configuration") from error
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error


def renamed(state: Mapping[str, Named]) -> dict[str, Named]:
    """LLaDA's tensors, or their shapes, under our names: its ff_proj is the gate. Raises ModelError for a name that
    it does not have.
    """
    found = {}
    for name, tensor in state.items():
        parts = name.removeprefix("model.transformer.").split(".")
        if parts[0] == "blocks" and len(parts) == 4 and parts[2] in LLADA_BLOCK:
            found[f"model.layers.{parts[1]}.{LLADA_BLOCK[parts[2]]}.{parts[3]}"] = tensor
        elif parts[0] in LLADA_TOP and len(parts) == 2:
            found[f"{LLADA_TOP[parts[0]]}.{parts[1]}"] = tensor
        else:
            raise ModelError(f"{name}: no tensor of a llada checkpoint")
    return found


def original(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our names back to LLaDA's."""
    top, block = ({ours: theirs for theirs, ours in table.items()} for table in (LLADA_TOP, LLADA_BLOCK))
    found = {}
    for name, tensor in state.items():
        stem, _, kind = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, number, rest = stem.split(".", 3)
            found[f"model.transformer.blocks.{number}.{block[rest]}.{kind}"] = tensor
        else:
            found[f"model.transformer.{top[stem]}.{kind}"] = tensor
    return found


def traits(folder: Path, told: Published, tokenizer: Tokenizer, fresh: tuple[int, ...]) -> Traits:
    """Mask, fill, ends and banned ids, by the tokenizer's own tokens, then by config.json. Raises ModelError without
    a mask.
    """
    own = {text: id_ for text, id_ in tokenizer.control_ids.items() if id_ not in fresh}

    def known(names: tuple[str, ...]) -> int | None:
        return next((own[name] for name in names if name in own), None)

    mask = known(MASKS)
    mask = told.ids["mask"] if mask is None else mask
    if mask is None or mask not in own.values():
        raise ModelError(
            f"{folder}: expected a mask token in the tokenizer ({' or '.join(MASKS)}), found none; config.json names "
            f"{told.ids['mask']}"
        )
    fill = told.ids["eos"] if told.ids["eos"] in own.values() else own.get(END_OF_TEXT, tokenizer.turn_end)
    assert fill is not None
    turn = known(TURN_ENDS)
    pad, begin = known(PADS), known(BEGINS)
    spare = {tokenizer.pad, tokenizer.mask} & set(fresh)  # ours that it does not know
    banned = {id_ for id_ in (mask, begin, pad, *spare) if id_ is not None and id_ != fill}
    ends = {id_ for id_ in (turn, tokenizer.turn_end) if id_ is not None and id_ != fill}
    return Traits(mask=mask, fill=fill, banned=tuple(sorted(banned)), shift=told.shift, ends=tuple(sorted(ends)))
