"""A masked-diffusion model: a bidirectional transformer that predicts the tokens under its masks.

    tokens with some replaced by the mask  ->  logits (n, V) of the n predicted positions

A model adapted from a causal model keeps the causal shift: the state at position i - 1 predicts token i (DiffuLLaMA,
arXiv:2410.17891), so the first token of a text is always clean. Ids that are not allowed in texts (the mask itself,
padding) have probability 0.

`forward` takes any number of inputs and runs them as one pass. In training, if several inputs would use too much
memory, activation checkpointing is used: the forward pass keeps only ids and masks, and the backward pass recomputes
the inputs one by one, so a loss over n draws needs no more memory than a loss over one.

**Published checkpoints** (`load_published`): Dream and DiffuCoder (`model_type` Dream), LLaDA (llada), from a local
directory, with an adapted tokenizer (text/tokenizer.py). Sizes and ids come from config.json and the tokenizer, never
from constants. Dream has Qwen2's names and biases and the shift of the causal model it was adapted from; LLaDA has its
own tensor names and no shift. If config.json and the tokenizer disagree about an id, the tokenizer wins (DiffuCoder's
config.json has a different padding id).

Not supported: the chat templates of published checkpoints. Prompts are rendered in our format, so fine-tune before
chatting. Code in a checkpoint is never run.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipeline.learning.losses import EVEN_ROWS
from pipeline.model import checkpoint as model_checkpoint
from pipeline.model.config import ModelConfig, finite_number, positive_int, read_values
from pipeline.model.cpu.primitives import exponentials, outer
from pipeline.model.heads import TrunkModel
from pipeline.model.initialization import TABLES, grown
from pipeline.model.layers import Masked, linear
from pipeline.model.transformer import Transformer
from pipeline.run.errors import ModelError
from pipeline.run.types import JsonObject
from pipeline.text.tokenizer import Tokenizer, adopt

MOST_LOGITS = 2**26  # maximum number computed at once without checkpointing
# Maximum tokens * layers * (width + d_ff) of several inputs without checkpointing; about 12 bytes each (bf16, CPU).
MOST_ACTIVATIONS = 2**27


@dataclass(frozen=True)
class Traits:
    """The properties of a masked-diffusion model that a causal one of the same shape lacks; stored in config.json."""

    mask: int  # id of the mask
    fill: int  # id that fills a canvas after the answer
    banned: tuple[int, ...]  # ids that are never predicted, including the mask
    shift: bool  # the state at position i - 1 predicts token i
    block_size: int = 0  # tokens denoised together, block by block from the left; 0: all
    ends: tuple[int, ...] = ()  # ids other than the fill that end an answer: the end of turn, if it is not the fill

    def __post_init__(self) -> None:
        assert self.mask in self.banned and not {self.fill, *self.ends} & set(self.banned), self


@dataclass(frozen=True)
class Noised:
    """Rows of tokens, some of them masked."""

    tokens: Tensor  # (B, T) int64, without masks
    masks: Tensor  # (B, T) bool, True where the mask replaces the token
    documents: Tensor  # (B, T) int32, -1 for padding
    positions: Tensor  # (B, T) int64
    # bool, which tokens attend to which within a document: (T, T), or (B, 1, 2T, 2T) with clean tokens; None: all
    sight: Tensor | None = None
    clean: Tensor | None = None  # (B, T) int64, the clean tokens, for block diffusion
    asked: Tensor | None = None  # (B, T) bool, positions to predict; None: the masked ones

    @property
    def wanted(self) -> Tensor:
        """The positions to predict, (B, T)."""
        return self.masks if self.asked is None else self.asked

    @property
    def targets(self) -> Tensor:
        """The tokens at the predicted positions, (n,), row by row."""
        return self.tokens[self.wanted]

    def to(self, device: torch.device | str) -> "Noised":
        """The same on another device."""
        moved = {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in vars(self).items()}
        return Noised(**moved)


class Denoiser(TrunkModel):
    """A bidirectional `Transformer` with its traits. Raises ValueError for a causal one."""

    def __init__(self, trunk: Transformer, traits: Traits) -> None:
        super().__init__()
        if trunk.config.attention != "bidirectional":
            raise ValueError("a masked-diffusion model must be bidirectional; found causal attention")
        self.trunk, self.traits = trunk, traits

    def forward(self, inputs: Sequence[Noised]) -> list[Tensor]:
        """log p (n,) of the tokens at each input's predicted positions, row by row, in nats.

        All inputs have the same shape. Rows that occur in several inputs (for example, fully masked answers to the same
        prompt) are computed once.
        """
        config = self.config
        numbers = sum(noised.tokens.numel() for noised in inputs) * config.layers * (config.width + config.d_ff)
        if len(inputs) > 1 and self.training and torch.is_grad_enabled() and numbers > MOST_ACTIVATIONS:
            return [_replayed(self._logprobs, [noised])[0] for noised in inputs]
        return list(self._logprobs(inputs))

    def _logprobs(self, inputs: Sequence[Noised]) -> tuple[Tensor, ...]:
        states, index = self._predicting(inputs)
        targets = torch.cat([noised.targets for noised in inputs])
        values = logprobs(states, index, self.trunk.table, targets, self.traits.banned)
        return values.split([int(noised.wanted.sum()) for noised in inputs])

    def _predicting(self, inputs: Sequence[Noised]) -> tuple[Tensor, Tensor]:
        """The distinct states (u, D) that predict tokens, and the index of the state that predicts each token, (n,)."""
        if inputs[0].sight is not None:
            (noised,) = inputs
            states = self.states(noised)[self._state_positions(noised.wanted)]
            return states, torch.arange(len(states), device=states.device)
        ids = torch.cat([noised.tokens.masked_fill(noised.masks, self.traits.mask) for noised in inputs])
        documents = torch.cat([noised.documents for noised in inputs])
        positions = torch.cat([noised.positions for noised in inputs])
        predicting = torch.cat([self._state_positions(noised.wanted) for noised in inputs])
        first, row_of = _different_rows(ids, documents, positions)
        row, column = predicting.nonzero(as_tuple=True)
        place = row_of[row] * ids.shape[1] + column
        needed = torch.zeros(len(first) * ids.shape[1], dtype=torch.bool, device=ids.device)
        needed[place] = True
        states = self.trunk(
            ids[first],
            positions=positions[first],
            documents=documents[first],
            select=needed.view(len(first), -1),
            head=lambda states, *_: states,
        )
        return states, (needed.cumsum(0) - 1)[place]

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
        """Noised and clean tokens in one row of 2T with repeated positions; returns the noised half's states."""
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
        """Logits (n, V), at least float32, of the predicted positions, row by row; -inf for the banned ids."""
        states, index = self._predicting([noised])
        return allowed_logits(states, self.trunk.table, self.traits.banned)[index]


def _replayed(
    compute: Callable[[Sequence[Noised]], tuple[Tensor, ...]], inputs: Sequence[Noised]
) -> tuple[Tensor, ...]:
    """`compute(inputs)`, recomputed in the backward pass."""
    result = checkpoint(compute, inputs, use_reentrant=False)
    assert isinstance(result, tuple)
    return result


def _different_rows(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Groups of rows equal in all tensors (B, T): the first row of each group, (m,), and each row's group, (B,)."""
    rows = torch.cat(tensors, 1).cpu().numpy()
    sets: dict[bytes, int] = {}
    set_of = [sets.setdefault(row.tobytes(), len(sets)) for row in rows]
    first = np.unique(set_of, return_index=True)[1]
    device = tensors[0].device
    return torch.from_numpy(first).to(device), torch.tensor(set_of, device=device)


# -- the head ----------------------------------------------------------------------------------------------------------


def allowed_logits(hidden: Tensor, table: Tensor, banned: Collection[int]) -> Tensor:
    """Logits (n, V), at least float32, of states (n, D) with the head's matrix (V, D); -inf for the banned ids."""
    logits = linear(hidden, table)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    ids = torch.tensor(sorted(banned), device=wide.device)
    return wide.index_fill(-1, ids, float("-inf")) if wide.requires_grad else wide.index_fill_(-1, ids, float("-inf"))


def logprobs(states: Tensor, index: Tensor, table: Tensor, targets: Tensor, banned: Collection[int]) -> Tensor:
    """log p (n,) of the targets (n,) in nats, each from the row of states (u, D) given by `index` (n,), over all ids
    except the banned ones.

    If there are more than MOST_LOGITS logits, they are computed in parts, with checkpointing.
    """
    allowed = torch.ones(len(table), dtype=torch.bool, device=table.device)
    allowed[torch.tensor(sorted(banned), device=table.device)] = False
    rows, ranks = table[allowed], (allowed.cumsum(0) - 1)[targets]
    size = max(1, MOST_LOGITS // len(table))
    if len(states) <= size:
        return _Logprobs.apply(states, rows, ranks, index)  # pyright: ignore[reportReturnType]
    parts: list[Tensor] = []
    for part_ranks, part_index in zip(ranks.split(size), index.split(size), strict=True):
        used, part_index = part_index.unique(return_inverse=True)
        part = checkpoint(_Logprobs.apply, states[used], rows, part_ranks, part_index, use_reentrant=False)
        assert isinstance(part, Tensor)
        parts.append(part)
    return torch.cat(parts)


class _LogprobsContext(Protocol):
    """The context of `_Logprobs`: torch's, plus information about the inputs."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]
    dtypes: tuple[torch.dtype, ...]
    num_states: int

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Logprobs(Function):
    """With e = exp(z - max z) and s its sum: l = z_t - max z - log s. With G the sum of dl over a state's targets:
    dh = sum dl W_t - (G / s) e W and dW = sum dl h at t - e^T ((G / s) h).

    The products run in autocast precision, everything else in at least float32.
    """

    @staticmethod
    def forward(ctx: _LogprobsContext, states: Tensor, table: Tensor, targets: Tensor, index: Tensor) -> Tensor:
        kind = states.device.type
        autocast = torch.is_autocast_enabled(kind) and states.dtype != torch.float64
        half = torch.get_autocast_dtype(kind) if autocast else states.dtype
        wide = torch.promote_types(half, torch.float32)
        head, rows = table.to(half), states.to(half)
        if half != wide and states.device.type == "cpu":  # oneDNN compiles a kernel for each new number of rows
            rows = functional.pad(rows, (0, 0, 0, -len(rows) % EVEN_ROWS))
        logits = torch.mm(rows, head.t())
        target_logits, largest = logits[index, targets].to(wide), logits.amax(-1).to(wide)
        exponents, sums, _ = exponentials(logits, targets.new_zeros(len(states)))  # in place
        ctx.save_for_backward(rows, head, exponents, sums, targets, index)
        ctx.dtypes, ctx.num_states = (states.dtype, table.dtype), len(states)
        return target_logits - (largest + sums.squeeze(1).log())[index]

    @staticmethod
    def backward(ctx: _LogprobsContext, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, head, exponents, sums, targets, index = ctx.saved_tensors
        of_states, of_table = ctx.dtypes
        needs_states, needs_table = ctx.needs_input_grad[:2]
        grad_states, grad_table, grad = None, None, grad.to(sums.dtype)
        scale = -sums.new_zeros(len(rows)).index_add_(0, index, grad)[:, None] / sums
        if needs_states:
            grad_states = torch.mm(exponents, head).to(grad.dtype).mul_(scale)
            grad_states.index_add_(0, index, head[targets] * grad[:, None])
            grad_states = grad_states[: ctx.num_states].to(of_states)
        if needs_table:
            grad_table = outer(exponents, (rows * scale).to(rows.dtype)).to(grad.dtype)
            grad_table.index_add_(0, targets, rows[index] * grad[:, None])
            grad_table = grad_table.to(of_table)
        return grad_states, grad_table, None, None


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
    """A published checkpoint's config.json: the shape, whether the model is shifted, and the ids."""

    shape: ModelConfig
    shift: bool
    ids: dict[str, int | None]  # mask, eos, pad, bos


def load_published(folder: Path) -> tuple[Denoiser, Tokenizer]:
    """The model in float32 and its tokenizer, with rows for added control tokens.

    Raises ModelError for any other model family, a missing or unknown tensor, or ids that the tokenizer lacks.
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
    raise ModelError(f"{path}: model_type {kind!r} is not supported; expected Dream (Dream, DiffuCoder) or llada")


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
        raise ModelError(f"{path}: key {error} is missing; expected a complete llada configuration") from error
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error


def renamed(state: Mapping[str, Value]) -> dict[str, Value]:
    """LLaDA's tensors, or their shapes, under our names (ff_proj is the gate). Raises ModelError for an unknown
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
            raise ModelError(f"{name}: not a tensor of a llada checkpoint")
    return result


def original(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict under LLaDA's names."""
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
    """Mask, fill, ends and banned ids, from the tokenizer's tokens first, then from config.json. Raises ModelError
    if there is no mask.
    """
    own = {text: id_ for text, id_ in tokenizer.control_ids.items() if id_ not in fresh}

    def first_id(names: tuple[str, ...]) -> int | None:
        return next((own[name] for name in names if name in own), None)

    mask = first_id(MASKS)
    mask = config.ids["mask"] if mask is None else mask
    if mask is None or mask not in own.values():
        raise ModelError(
            f"{folder}: expected a mask token in the tokenizer ({' or '.join(MASKS)}), found none; config.json has"
            f" mask_token_id {config.ids['mask']}"
        )
    fill = config.ids["eos"] if config.ids["eos"] in own.values() else own.get(END_OF_TEXT, tokenizer.turn_end)
    assert fill is not None
    turn = first_id(TURN_ENDS)
    pad, begin = first_id(PADS), first_id(BEGINS)
    added = {tokenizer.pad, tokenizer.mask} & set(fresh)  # our tokens, unknown to the checkpoint
    banned = {id_ for id_ in (mask, begin, pad, *added) if id_ is not None and id_ != fill}
    ends = {id_ for id_ in (turn, tokenizer.turn_end) if id_ is not None and id_ != fill}
    return Traits(mask=mask, fill=fill, banned=tuple(sorted(banned)), shift=config.shift, ends=tuple(sorted(ends)))
