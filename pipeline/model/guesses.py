"""A reward model that is also taught to say, at each token of an answer, how likely the base model found it.

Whether an answer is right shows in how likely it was: of a small policy's own programs their likelihood ranks 89 % of pairs
rightly. But a language model says at a token which one comes next; it never looks back at how expected this one was, and from
some thousand pairs a reward model does not learn to (61 %; docs/LOG.md). Told the likelihood of every token it does, and the
reward reads it. The guesses are an auxiliary task (Jaderberg et al. 2017, arXiv:1611.05397): the row that makes them is not part
of the published model.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.model.config import ModelConfig
from pipeline.model.heads import RewardModel
from pipeline.model.layers import Linear
from pipeline.model.transformer import Checkpointing


class GuessingModel(nn.Module):
    """A reward model with a second row, zero at the start like the first; it trains the reward model that it was given."""

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
        """The reward and the guessed log-probability in nats, float32: (B, T, 2), or (n, 2) of the n places of `select` (B, T).

        The other arguments and errors as in `Transformer.hidden`.
        """
        hidden = self.model.trunk.hidden(input_ids, positions=positions, documents=documents)
        if select is not None:
            hidden = hidden[select]
        rows = torch.cat([self.model.score.weight, self.likelihood_score.weight])
        with torch.autocast(hidden.device.type, enabled=False):
            return functional.linear(hidden.float(), rows.float())

    @property
    def config(self) -> ModelConfig:
        """The trunk's shape."""
        return self.model.config

    @property
    def checkpointing(self) -> Checkpointing:
        """As in `Transformer`."""
        return self.model.checkpointing

    @checkpointing.setter
    def checkpointing(self, mode: Checkpointing) -> None:
        self.model.checkpointing = mode

    def num_parameters(self) -> int:
        """Those of the reward model."""
        return self.model.num_parameters()

    def flops_per_token(self, context: int) -> int:
        """Those of the reward model; one row more is nothing."""
        return self.model.flops_per_token(context)
