"""What the tests of coupled-GRPO share: an answer on its canvas, and the loss of coupled estimates."""

from typing import Any

from torch import Tensor

from pipeline.diffusion.masks import CoupledBatch
from pipeline.diffusion.rollouts import CanvasAnswer
from pipeline.diffusion.training import coupled_logprobs
from pipeline.ingest.records import Problem
from pipeline.learning.policy_losses import Clip, GroupMethod, group_policy
from pipeline.rl.answers import Prompt

METHOD = GroupMethod(advantage="others", normalizer="tokens", clip=Clip(0.5, 0.5), beta=0.01, kl_in="loss")
PROBLEM = Problem(id="p", level=1, group="easy", key="k", question="q", entry_point="f", signature="f()", tests=[])


def answer(
    name: str = "p", sample: int = 0, canvas: tuple[int, ...] = (5, 6, 7, 2, 9, 9), ids: int = 4
) -> CanvasAnswer:
    return CanvasAnswer(
        Prompt(name, [4, 5, 6], "code", PROBLEM), sample, list(canvas[:ids]), [0.0] * ids, True, "", canvas
    )


def scored(own: Any, given: CoupledBatch, old: Tensor, advantages: Tensor, reference: Tensor | None = None) -> Any:
    found = coupled_logprobs(own, given)
    return group_policy(
        found,
        -found.detach(),
        old=old,
        advantages=advantages,
        reference=reference,
        row_of=given.row_of,
        num_rows=len(given.tokens),
        method=METHOD,
        max_tokens=6,
    )
