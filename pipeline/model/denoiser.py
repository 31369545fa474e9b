"""A masked-diffusion model: a transformer that sees both sides, and predicts the tokens under its masks.

    tokens with some replaced by the mask  ->  logits (n, V) of the n asked places

A model that was a causal one keeps its shift: the state at place i - 1 predicts token i (DiffuLLaMA, arXiv:2410.17891), so the
first place of a text is always clean. Ids that no text may hold (the mask itself, padding) have probability 0.

`forward` takes any number of inputs. In training each but an only one runs under activation checkpointing: pass one keeps ids and
masks, the backward pass replays them one by one, so a loss over n draws needs the memory of one (specs: diffusion, 3).
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipeline.model.attention import Masked
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Checkpointing, Transformer

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
        """What `read` makes of each input's states at its asked places, in training under replay where there are several."""
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
    """log p (n,) of the targets (n,), in nats; over MOST_LOGITS logits in pieces that the backward pass computes again."""
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
