"""A masked-diffusion model: a bidirectional transformer that predicts the tokens under its masks.

    tokens with some replaced by the mask  ->  logits (n, V) of the n predicted positions

A model adapted from a causal one keeps its shift: the state at position i - 1 predicts token i (DiffuLLaMA,
arXiv:2410.17891), so the first token of a text is always clean. Ids that no text may contain (the mask itself, padding)
have probability 0.

`forward` takes any number of inputs. In training, several inputs run under activation checkpointing: the forward pass
keeps only ids and masks, the backward pass recomputes them one by one, so a loss over n draws needs the memory of one.

**Published checkpoints** (`load_published`): Dream and DiffuCoder (`model_type` Dream), LLaDA (llada), from a local
directory, with an adapted tokenizer (text/tokenizer.py). Sizes and ids come from config.json and the tokenizer, never
from a literal. Dream has Qwen2's names and biases and the shift of the causal model that it was; LLaDA has its own
names for tensors and no shift. If the two files disagree about an id, the tokenizer wins (DiffuCoder's config.json has
another padding).

Not promised: the conversation templates of published checkpoints: prompts are rendered in our format, so fine-tune
before chatting. Code in a checkpoint is never run.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipeline.model import checkpoint as model_checkpoint
from pipeline.model.config import ModelConfig, finite_number, positive_int, read_values
from pipeline.model.heads import TrunkModel
from pipeline.model.initialization import TABLES, grown
from pipeline.model.layers import Masked
from pipeline.model.transformer import Transformer
from pipeline.run.errors import ModelError
from pipeline.run.types import JsonObject
from pipeline.text.tokenizer import Tokenizer, adopt

MOST_LOGITS = 2**24  # that are computed at once without checkpointing


@dataclass(frozen=True)
class Traits:
    """The properties of a masked-diffusion model that a causal one of its shape lacks; stored in config.json."""

    mask: int  # id of the mask
    fill: int  # id that fills a canvas after the answer
    banned: tuple[int, ...]  # ids that are never predicted, including the mask
    shift: bool  # the state at position i - 1 predicts token i
    block_size: int = 0  # tokens that it denoises together, block by block from the left; 0: all
    ends: tuple[int, ...] = ()  # ids that end an answer besides the fill: the end of a turn, if it is not the fill

    def __post_init__(self) -> None:
        assert self.mask in self.banned and not {self.fill, *self.ends} & set(self.banned), self


@dataclass(frozen=True)
class Noised:
    """Rows of tokens of which some are masked."""

    tokens: Tensor  # (B, T) int64, without masks
    masks: Tensor  # (B, T) bool, True where the mask replaces the token
    documents: Tensor  # (B, T) int32, -1 in the padding
    positions: Tensor  # (B, T) int64
    # bool, which tokens attend to which within a document: (T, T), with clean tokens (B, 1, 2T, 2T); None: all
    sight: Tensor | None = None
    clean: Tensor | None = None  # (B, T) int64, block diffusion's clean tokens beside the noised ones
    asked: Tensor | None = None  # (B, T) bool, positions whose tokens are predicted; None: those under the masks

    @property
    def wanted(self) -> Tensor:
        """The positions whose tokens are predicted, (B, T)."""
        return self.masks if self.asked is None else self.asked

    @property
    def targets(self) -> Tensor:
        """The tokens at the predicted positions, (n,), row by row."""
        return self.tokens[self.wanted]

    def to(self, device: torch.device | str) -> "Noised":
        """The same on another device."""
        moved = {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in vars(self).items()}
        return Noised(**moved)


Read = Callable[[Tensor, Tensor, Noised], Tensor]  # (states (n, D), the head's matrix (V, D), the input) -> result


class Denoiser(TrunkModel):
    """A bidirectional `Transformer` with its traits. Raises ValueError for a causal one."""

    def __init__(self, trunk: Transformer, traits: Traits) -> None:
        super().__init__()
        if trunk.config.attention != "bidirectional":
            raise ValueError("a masked-diffusion model sees both sides; found causal attention")
        self.trunk, self.traits = trunk, traits

    def forward(self, inputs: Iterable[Noised], read: Read) -> list[Tensor]:
        """`read` of each input's states at its predicted positions; in training several inputs run under
        checkpointing.
        """
        inputs = list(inputs)
        recompute = self.training and torch.is_grad_enabled() and len(inputs) > 1
        return [self._read_checkpointed(noised, read) if recompute else self.read(noised, read) for noised in inputs]

    def _read_checkpointed(self, noised: Noised, read: Read) -> Tensor:
        result = checkpoint(self.read, noised, read, use_reentrant=False)
        assert isinstance(result, Tensor)
        return result

    def read(self, noised: Noised, read: Read) -> Tensor:
        """`read` of one input's states at its predicted positions."""
        hidden = self.states(noised)
        return read(hidden[self._state_positions(noised.wanted)], self.trunk.table, noised)

    def states(self, noised: Noised) -> Tensor:
        """The head's input, (B, T, D). Raises ValueError for rows longer than the context."""
        ids = noised.tokens.masked_fill(noised.masks, self.traits.mask)
        if noised.clean is not None:
            return self._states_with_clean(ids, noised)
        if noised.sight is None:
            return self.trunk.hidden(ids, positions=noised.positions, documents=noised.documents)
        self._check_length(ids)
        same_document = Masked.of(noised.documents, causal=False).mask  # (B, 1, T, T)
        return self._line(ids, noised.positions, Masked(same_document & noised.sight))

    def _states_with_clean(self, ids: Tensor, noised: Noised) -> Tensor:
        """Noised and clean tokens in one row of 2T with repeated positions; returns the states of the noised half."""
        assert noised.clean is not None and noised.sight is not None
        self._check_length(ids)
        documents = torch.cat([noised.documents, noised.documents], 1)
        mask = Masked.of(documents, causal=False).mask & noised.sight
        mask = mask | torch.eye(documents.shape[1], dtype=torch.bool, device=mask.device)  # padding attends to itself
        positions = torch.cat([noised.positions, noised.positions], 1)
        return self._line(torch.cat([ids, noised.clean], 1), positions, Masked(mask))[:, : ids.shape[1]]

    def _check_length(self, ids: Tensor) -> None:
        if ids.shape[1] > self.config.max_context:
            raise ValueError(f"rows of {ids.shape[1]} tokens are longer than the context of {self.config.max_context}")

    def _line(self, ids: Tensor, positions: Tensor, layout: Masked) -> Tensor:
        return self.trunk.line(ids.flatten(), positions.flatten(), layout).view(*ids.shape, -1)

    def _state_positions(self, predicted: Tensor) -> Tensor:
        """The positions of the states that predict the tokens at the `predicted` positions, (B, T)."""
        return functional.pad(predicted, (-1, 1)) if self.traits.shift else predicted

    def logits(self, noised: Noised) -> Tensor:
        """Allowed logits (n, V), at least float32, of the predicted positions, row by row."""
        return self.read(noised, lambda hidden, table, _: allowed_logits(hidden, table, self.traits.banned))


def allowed_logits(hidden: Tensor, table: Tensor, banned: Collection[int]) -> Tensor:
    """Logits (n, V), at least float32, of states (n, D) with the head's matrix (V, D); -inf for the banned ids."""
    logits = functional.linear(hidden, table)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    ids = torch.tensor(sorted(banned), device=wide.device)
    return wide.index_fill(-1, ids, float("-inf")) if wide.requires_grad else wide.index_fill_(-1, ids, float("-inf"))


def logprobs(hidden: Tensor, table: Tensor, targets: Tensor, banned: Collection[int]) -> Tensor:
    """log p (n,) of the targets (n,), in nats; above MOST_LOGITS logits in parts, with checkpointing."""
    size = max(1, MOST_LOGITS // len(table))
    if len(hidden) <= size:
        return _logprobs(hidden, table, targets, banned)
    parts: list[Tensor] = []
    for part_hidden, part_targets in zip(hidden.split(size), targets.split(size), strict=True):
        if torch.is_grad_enabled():
            part = checkpoint(_logprobs, part_hidden, table, part_targets, banned, use_reentrant=False)
            assert isinstance(part, Tensor)
        else:
            part = _logprobs(part_hidden, table, part_targets, banned)
        parts.append(part)
    return torch.cat(parts)


def _logprobs(hidden: Tensor, table: Tensor, targets: Tensor, banned: Collection[int]) -> Tensor:
    logits = allowed_logits(hidden, table, banned)
    return logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(-1)


# -- published checkpoints ---------------------------------------------------------------------------------------------


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
# Control tokens by purpose: the name in Dream and DiffuCoder, then the one in LLaDA.
MASKS = ("<|mask|>", "<|mdm_mask|>")
BEGINS = ("<|beginoftext|>", "<|startoftext|>")  # before a text; never predicted
PADS = ("<|pad|>",)
TURN_ENDS = ("<|im_end|>", "<|eot_id|>")
END_OF_TEXT = "<|endoftext|>"  # fills a canvas
PUBLISHED = ("Dream", "llada")  # model types
Value = TypeVar("Value")


@dataclass(frozen=True)
class PublishedConfig:
    """The config.json of a published checkpoint: its shape, whether it is shifted, and its ids."""

    shape: ModelConfig
    shift: bool
    ids: dict[str, int | None]  # mask, eos, pad, bos


def load_published(folder: Path) -> tuple[Denoiser, Tokenizer]:
    """The model in float32 and its tokenizer, with rows for added control tokens.

    Raises ModelError for another family, a missing or unknown tensor, and ids that the tokenizer does not have.
    """
    config = read(folder)
    headers, keys = model_checkpoint.headers(folder), model_checkpoint.KEYS
    if any(name.startswith("model.transformer.") for name in headers):
        headers, keys = renamed(headers), keys | LLADA_SIZES
    model_checkpoint.check(config.shape, folder, headers, keys)
    adopted = adopt(folder, config.shape.vocab_size)
    tokenizer = adopted.tokenizer
    state = model_checkpoint.read_weights(folder)
    state = renamed(state) if any(name.startswith("model.transformer.") for name in state) else dict(state)
    for name in TABLES:
        if name in state:
            state[name] = grown(state[name], tokenizer.vocab_size, adopted.known, adopted.fresh)
    trunk = Transformer(replace(config.shape, vocab_size=tokenizer.vocab_size))
    model_checkpoint.load_state(trunk, state, source=str(folder))
    return Denoiser(trunk, _traits(folder, config, tokenizer, adopted.fresh)), tokenizer


def read(folder: Path) -> PublishedConfig:
    """Read config.json. Raises ModelError."""
    path, values = folder / "config.json", read_values(folder)
    kind = values.get("model_type")
    ids = {name: values.get(f"{name}_token_id") for name in ("mask", "eos", "pad", "bos")}
    if kind == "Dream":
        shape = ModelConfig.from_hf(values | {"model_type": "qwen2"})
        return PublishedConfig(replace(shape, attention="bidirectional"), True, ids)
    if kind == "llada":
        return PublishedConfig(_llada_shape(values, path), False, ids)
    raise ModelError(f"{path}: model_type {kind!r}; expected Dream (Dream, DiffuCoder) or llada")


def _llada_shape(values: JsonObject, path: Path) -> ModelConfig:
    try:
        sizes = {name: positive_int(values, key) for name, key in LLADA_SIZES.items() if name != "rope_theta"}
        return ModelConfig(
            width=sizes["width"],
            layers=sizes["layers"],
            heads=sizes["heads"],
            d_ff=sizes["d_ff"],
            max_context=sizes["max_context"],
            rope_theta=finite_number(values, "rope_theta", 0.0),
            vocab_size=positive_int(values, "embedding_size" if values.get("embedding_size") else "vocab_size"),
            kv_heads=positive_int(values, "n_kv_heads", sizes["heads"]),
            head_dim=sizes["width"] // sizes["heads"],
            tied=bool(values.get("weight_tying", False)),
            norm_eps=finite_number(values, "rms_norm_eps", 1e-5),
            qk_norm=False,
            attention="bidirectional",
        )
    except KeyError as error:
        raise ModelError(f"{path}: key {error} is missing; it is not a whole llada configuration") from error
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error


def renamed(state: Mapping[str, Value]) -> dict[str, Value]:
    """LLaDA's tensors, or their shapes, under our names: its ff_proj is the gate. Raises ModelError for an unknown
    name.
    """
    result = {}
    for name, tensor in state.items():
        parts = name.removeprefix("model.transformer.").split(".")
        if parts[0] == "blocks" and len(parts) == 4 and parts[2] in LLADA_BLOCK:
            result[f"model.layers.{parts[1]}.{LLADA_BLOCK[parts[2]]}.{parts[3]}"] = tensor
        elif parts[0] in LLADA_TOP and len(parts) == 2:
            result[f"{LLADA_TOP[parts[0]]}.{parts[1]}"] = tensor
        else:
            raise ModelError(f"{name}: no tensor of a llada checkpoint")
    return result


def original(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict under LLaDA's names, from ours."""
    top, block = ({ours: theirs for theirs, ours in table.items()} for table in (LLADA_TOP, LLADA_BLOCK))
    result = {}
    for name, tensor in state.items():
        stem, _, kind = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, number, rest = stem.split(".", 3)
            result[f"model.transformer.blocks.{number}.{block[rest]}.{kind}"] = tensor
        else:
            result[f"model.transformer.{top[stem]}.{kind}"] = tensor
    return result


def _traits(folder: Path, config: PublishedConfig, tokenizer: Tokenizer, fresh: tuple[int, ...]) -> Traits:
    """Mask, fill, ends and banned ids, from the tokenizer's own tokens, then from config.json. Raises ModelError
    without a mask.
    """
    own = {text: id_ for text, id_ in tokenizer.control_ids.items() if id_ not in fresh}

    def first_id(names: tuple[str, ...]) -> int | None:
        return next((own[name] for name in names if name in own), None)

    mask = first_id(MASKS)
    mask = config.ids["mask"] if mask is None else mask
    if mask is None or mask not in own.values():
        raise ModelError(
            f"{folder}: expected a mask token in the tokenizer ({' or '.join(MASKS)}), found none; config.json names "
            f"{config.ids['mask']}"
        )
    fill = config.ids["eos"] if config.ids["eos"] in own.values() else own.get(END_OF_TEXT, tokenizer.turn_end)
    assert fill is not None
    turn = first_id(TURN_ENDS)
    pad, begin = first_id(PADS), first_id(BEGINS)
    added = {tokenizer.pad, tokenizer.mask} & set(fresh)  # our tokens, unknown to the checkpoint
    banned = {id_ for id_ in (mask, begin, pad, *added) if id_ is not None and id_ != fill}
    ends = {id_ for id_ in (turn, tokenizer.turn_end) if id_ is not None and id_ != fill}
    return Traits(mask=mask, fill=fill, banned=tuple(sorted(banned)), shift=config.shift, ends=tuple(sorted(ends)))
