"""Models with a scalar head: the reward model, PPO's actor with its critic, and a reward model with an auxiliary task.

    r_t = w . h_t     h_t is the trunk's hidden state after token t; an answer's reward is that of its last token

The head is one row without bias, initialized to zero. `save_reward` and `load_reward` in `checkpoint.py` write and read
reward models (as transformers' `Qwen3ForSequenceClassification`).

`GuessingModel` also learns to predict, at each token of an answer, how likely the base model found that token.
Likelihood is a good signal of whether an answer is correct: it ranks 89% of pairs of a small policy's own programs
correctly. But a language model predicts the next token; it never looks back at how likely the current one was, and a
few thousand pairs are not enough to teach a reward model to do so (61%; docs/LOG.md). Trained to predict the likelihood
of every token, the model learns to look back, and the reward makes use of it. This is an auxiliary task (Jaderberg et
al. 2017, arXiv:1611.05397): its row is not part of the published model.

Not here: losses, advantages, choosing the token to score.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.model.config import ModelConfig
from pipeline.model.layers import Linear
from pipeline.model.transformer import Checkpointing, Transformer
from pipeline.run.errors import ConfigError

T = TypeVar("T")
MIN_STD = 1e-3  # below this, normalizing would only magnify rounding errors


class TrunkModel(nn.Module):
    """A model around a `Transformer`."""

    trunk: Transformer

    @property
    def config(self) -> ModelConfig:
        """The trunk's shape."""
        return self.trunk.config

    @property
    def checkpointing(self) -> Checkpointing:
        """See `Transformer`."""
        return self.trunk.checkpointing

    @checkpointing.setter
    def checkpointing(self, mode: Checkpointing) -> None:
        self.trunk.checkpointing = mode

    def num_parameters(self) -> int:
        """Number of weights, including the head's."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, context: int) -> int:
        """Training FLOPs per token; see `ModelConfig`."""
        return self.config.flops_per_token(context)


class RewardModel(TrunkModel):
    """A trunk and a scalar head. It takes ownership of the trunk and deletes its vocabulary head.

    `reward_mean` and `reward_std` describe the answers the head was calibrated on; 0 and 1 before calibration.
    """

    def __init__(self, trunk: Transformer) -> None:
        """Raises ValueError for a bidirectional trunk or one with dropout: scores would depend on more than the
        preceding text.
        """
        super().__init__()
        if trunk.config.attention != "causal" or trunk.dropout:
            raise ValueError(
                "a reward model needs a causal trunk without dropout, found "
                f"attention={trunk.config.attention}, dropout={trunk.dropout}"
            )
        self.trunk = trunk
        if not trunk.config.tied:
            del trunk.lm_head
        table = trunk.model.embed_tokens.weight
        self.score = Linear(trunk.config.width, 1).to(table.device, table.dtype)
        self.reward_mean, self.reward_std = 0.0, 1.0

    def forward(
        self,
        input_ids: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        select: Tensor | None = None,
    ) -> Tensor:
        """Rewards in float32, even under autocast: (B, T), or (n,) at the n positions where `select` (B, T) is True.

        The other arguments and errors are those of `Transformer.hidden`. Rewards at padding are undefined: do not
        select them.
        """
        return _scores(self.trunk, self.score.weight, input_ids, positions, documents, select).squeeze(-1)

    def normalized(self, rewards: Tensor) -> Tensor:
        """(r - mean) / std: the learned part of a score, and a critic's initial values."""
        return (rewards - self.reward_mean) / self.reward_std

    def calibrate(self, rewards: Tensor) -> None:
        """Set the mean and deviation (unbiased, >= 1e-3) from the raw rewards (n,) of the base model's answers."""
        self.reward_mean = float(rewards.double().mean())
        self.reward_std = max(MIN_STD, float(rewards.double().std()))

    def flops_per_token(self, context: int) -> int:
        """Training FLOPs per token: the trunk's, but with a single head row instead of one per vocabulary entry."""
        return self.config.flops_per_token(context) - 6 * (self.config.vocab_size - 1) * self.config.width


def _scores(
    trunk: Transformer,
    rows: Tensor,
    input_ids: Tensor,
    positions: Tensor | None,
    documents: Tensor | None,
    select: Tensor | None,
) -> Tensor:
    """Products of the states with `rows` (R, D), at least float32: (B, T, R), or (n, R) at the positions of
    `select`.
    """
    if select is None:
        states, index = trunk.hidden(input_ids, positions=positions, documents=documents), None
    else:
        states, index = trunk.selected(input_ids, select, positions=positions, documents=documents)
    with torch.autocast(states.device.type, enabled=False):
        wide = torch.promote_types(states.dtype, torch.float32)
        scores = functional.linear(states.to(wide), rows.to(wide))
    return scores if index is None else scores.index_select(0, index)


@torch.no_grad()
def deepened(trunk: Transformer, count: int) -> Transformer:
    """The trunk with `count` more layers on top: copies of its first layers with zero outputs, so results are the same.

    A language model represents its prediction only in its last layer, so no layer is left to compare the prediction
    with the actual token. Judging an answer needs that comparison, so a shallow trunk ranks better with a few more
    layers. Stacking copies is from Kim et al. 2024 (arXiv:2312.15166); zero outputs preserve the function, as in Wu et
    al. 2024 (arXiv:2401.02415). Raises ConfigError if `count` exceeds the trunk's number of layers.
    """
    if not 0 <= count <= trunk.config.layers:
        raise ConfigError(
            f"reward.extra_layers: expected 0 to {trunk.config.layers} (the base model's layers), got {count}"
        )
    if not count:
        return trunk
    table = trunk.model.embed_tokens.weight
    deeper = Transformer(replace(trunk.config, layers=trunk.config.layers + count)).to(table.device, table.dtype)
    state = trunk.state_dict()
    for name in list(state):
        parts = name.split(".")
        if parts[1] == "layers" and int(parts[2]) < count:
            parts[2] = str(int(parts[2]) + trunk.config.layers)
            zero = name.endswith(("o_proj.weight", "down_proj.weight"))
            state[".".join(parts)] = torch.zeros_like(state[name]) if zero else state[name]
    deeper.load_state_dict(state)
    return deeper


class ActorCritic(nn.Module):
    """PPO's two models, trained together; they share no weights."""

    def __init__(self, actor: Transformer, critic: RewardModel) -> None:
        """Raises ValueError if the actor has dropout: the ratio of identical policies would not be 1."""
        super().__init__()
        if actor.dropout:
            raise ValueError(f"expected an actor without dropout, found dropout {actor.dropout}")
        assert actor is not critic.trunk, "the critic needs its own trunk"
        self.actor, self.critic = actor, critic

    def forward(
        self,
        input_ids: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        select: Tensor | None = None,
        head: Callable[[Tensor, Tensor, Tensor | None], T] | None = None,
    ) -> tuple[Tensor | T, Tensor]:
        """Logits of the next token, and the value of the state in which it is chosen: (n, V) and (n,) at `select`.

        Both come from a single call, so that a wrapper that averages gradients over processes covers both. `head` is as
        in `Transformer.forward`; the other arguments are as in `RewardModel`.
        """
        logits = self.actor(input_ids, positions=positions, documents=documents, select=select, head=head)
        rewards = self.critic(input_ids, positions=positions, documents=documents, select=select)
        return logits, self.critic.normalized(rewards)

    @property
    def checkpointing(self) -> Checkpointing:
        """The mode of both models; see `Transformer`."""
        return self.actor.checkpointing

    @checkpointing.setter
    def checkpointing(self, mode: Checkpointing) -> None:
        self.actor.checkpointing = self.critic.checkpointing = mode


class GuessingModel(TrunkModel):
    """A reward model with a second row for the auxiliary task, also initialized to zero; training updates both."""

    def __init__(self, model: RewardModel) -> None:
        super().__init__()
        self.model = model
        weight = model.score.weight
        self.likelihood_score = Linear(model.config.width, 1).to(weight.device, weight.dtype)

    def forward(
        self,
        input_ids: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        select: Tensor | None = None,
    ) -> Tensor:
        """The reward and the predicted log-probability in nats, float32: (B, T, 2), or (n, 2) at the n positions of
        `select` (B, T).

        The other arguments and errors are those of `Transformer.hidden`.
        """
        rows = torch.cat([self.model.score.weight, self.likelihood_score.weight])
        return _scores(self.trunk, rows, input_ids, positions, documents, select)

    @property
    def trunk(self) -> Transformer:
        """The reward model's trunk."""
        return self.model.trunk

    def num_parameters(self) -> int:
        """Number of weights of the reward model."""
        return self.model.num_parameters()

    def flops_per_token(self, context: int) -> int:
        """Training FLOPs per token of the reward model; the extra row is negligible."""
        return self.model.flops_per_token(context)
