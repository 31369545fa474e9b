"""Losses of masked diffusion: cross-entropy under masks, and DPO on estimated ELBOs.

Symbols: l log-probabilities under masks (nats), B the ELBO of an answer, s = [B(w) - B_ref(w)] - [B(l) - B_ref(l)] of a
pair with chosen answer w and rejected answer l. Which masks: `diffusion/masks.py`; the estimates: `scoring_masked.py`.

Coupled-GRPO has no loss of its own: its estimates go into `objectives_policy.group_policy`.

How likely is this text under a masked-diffusion model? Bounds and estimates from sampled masks.

    masked_logprobs     log p of the tokens under one mask                          training
    elbo                mean over a sample's draws of (L / k) sum of log p          evaluation, Diffusion-DPO
    coupled_logprobs    log p of each token from two complementary masks            coupled-GRPO
    enumerated          the ELBO by all masks, in three forms that agree      short texts: what the others are proved by

For prompt x, response y of L tokens and l_i = log p(y_i | x, y under mask M), in nats, over the ids that a text may
hold:

    ELBO = int_0^1 (1/t) E[sum_{i in M} l_i] dt              M: each token by itself with probability t
         = E_{k ~ U{1..L}} E_{|M| = k} [(L/k) sum l_i]
         = mean over all orders of the chain-rule sum

-ELBO bounds the negative log-likelihood of decoding in a random order, one token a step (Ou et al. 2024,
arXiv:2406.03736). Masks come with the batch (diffusion/masks.py): whoever scores the same batch sees the same ones.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.diffusion.batches import NoisedPairs
from pipeline.diffusion.masks import CoupledBatch, Drawn
from pipeline.diffusion.model import Noised, logprobs
from pipeline.learning.losses import Loss, Term, sum_by_row
from pipeline.learning.pair_losses import PairLogprobs
from pipeline.run.tracking import progress

REDUCTIONS = ("sum", "mean")


def masked_cross_entropy(logprobs: Tensor, weights: Tensor, *, per: str) -> Loss:
    """-sum of weight * l over the masked tokens (n,), divided by the count `per` of the step (LLaDA,
    arXiv:2502.09992, eq. 3).
    """
    num = len(logprobs)
    return Loss([Term("loss", -(logprobs * weights).sum(), per)], {"masked/nll": (-logprobs.detach().sum(), num)})


def diffusion_dpo(
    policy: PairLogprobs, reference: PairLogprobs, *, beta: float, sft_weight: float, reduction: str = "sum"
) -> Loss:
    """-log sigmoid(beta s) - (sft_weight / |w|) B(w) of each pair (LLaDA 1.5, arXiv:2505.19223, eq. 4).

    `reduction` mean takes each B over its answer's tokens. Metrics by TRL's names, and the quantiles' extremes of beta
    s.
    """
    assert reduction in REDUCTIONS, reduction
    one = torch.ones_like(policy.chosen)
    long, short = (policy.num_chosen, policy.num_rejected) if reduction == "mean" else (one, one)
    chosen = (policy.chosen - reference.chosen) / long
    rejected = (policy.rejected - reference.rejected) / short
    scaled = beta * (chosen - rejected)
    terms = [Term("preference", -F.logsigmoid(scaled).sum(), "pairs")]
    likely = policy.chosen / policy.num_chosen
    if sft_weight:
        terms.append(Term("sft", -likely.sum(), "pairs", sft_weight))
    num, still = len(scaled), scaled.detach()
    won, lost = beta * chosen.detach(), beta * rejected.detach()
    metrics = {
        "rewards/chosen": (won.sum(), num),
        "rewards/rejected": (lost.sum(), num),
        "rewards/margins": (still.sum(), num),
        "rewards/accuracies": ((won > lost).sum() + 0.5 * (won == lost).sum(), num),
        "raw_accuracy": ((policy.chosen > policy.rejected).detach().sum(), num),
        "nelbo/chosen": (-policy.chosen.detach().sum(), int(policy.num_chosen.sum())),
        "nelbo/rejected": (-policy.rejected.detach().sum(), int(policy.num_rejected.sum())),
    }
    extremes = {"margin_min": still.amin(), "margin_max": still.amax()} if num else {}
    return Loss(terms, metrics | policy.metrics, extremes)


# -- scoring_masked ----------------------------------------------------------------------------------------------------


NORMALISED = 2 / 3  # of the estimate as it was published, whose mean is 1.5 log p


def masked_logprobs(model: nn.Module, noised: Noised) -> Tensor:
    """log p (n,) of the tokens at the asked places, row by row, in nats."""
    banned = traits_of(model).banned
    (found,) = model([noised], lambda hidden, table, one: logprobs(hidden, table, one.targets, banned))
    return found


def draw_sums(model: nn.Module, inputs: Sequence[Noised]) -> Tensor:
    """Sums (n, B) of log p over the asked places of each draw's rows. Gradients by replay, in the memory of one
    draw.
    """
    banned = traits_of(model).banned

    def read(hidden: Tensor, table: Tensor, one: Noised) -> Tensor:
        return sum_by_row(logprobs(hidden, table, one.targets, banned), one.wanted)

    return torch.stack(model(inputs, read))


def elbo(model: nn.Module, batch: Drawn) -> Tensor:
    """ELBO (B,) of each row's response, in nats: the mean over its draws, unbiased."""
    return (draw_sums(model, batch.inputs) * batch.scales).mean(0)


def pair_elbos(model: nn.Module, batch: Drawn) -> PairLogprobs:
    """ELBOs of P pairs, whose rows are the P chosen, then the P rejected ones; variances over their draws as
    metrics.
    """
    each = draw_sums(model, batch.inputs) * batch.scales  # (n, 2P)
    found = pairs_of(each.mean(0), batch.lengths)
    if len(each) == 1:
        return found
    better, worse = each.detach().chunk(2, dim=1)
    spread = (better - worse).var(0) / len(each)  # (P,)
    return replace(found, metrics={"elbo/variance": (spread.sum(), len(spread))})


def pairs_of(sums: Tensor, lengths: Tensor) -> PairLogprobs:
    """Sums (2P,) as pairs; `lengths` (2P,) count their tokens."""
    (better, worse), (longer, other) = sums.chunk(2), lengths.chunk(2)
    return PairLogprobs(better, worse, longer, other)


def coupled_logprobs(model: nn.Module, batch: CoupledBatch, *, released: bool = False) -> Tensor:
    """An estimate (N,) of log p of each counted token, row by row (DiffuCoder, arXiv:2506.20639, eq. 6).

    1/2 [l^a + 1(first) l^b / t + 1(second) l^c / (1 - t)]: under the whole mask, and under the one of the two halves
    that hides it. `released` as published, whose mean for a model without context is 1.5 log p; else times 2/3, so that
    a ratio of two is a ratio of probabilities.
    """
    banned, shape = traits_of(model).banned, batch.tokens.shape

    def read(hidden: Tensor, table: Tensor, one: Noised) -> Tensor:
        found = logprobs(hidden, table, one.targets, banned)
        return found.new_zeros(shape).masked_scatter(one.wanted, found)  # (B, T)

    whole, first, second = model(batch.inputs, read)
    t = batch.times[:, None]
    mixed = 0.5 * (whole + first / t + second / (1 - t))
    return (mixed if released else mixed * NORMALISED)[batch.counted]


def reference_elbos(
    model: nn.Module, stream: NoisedPairs, name: str, turn: int, numbers: np.ndarray, where: torch.device
) -> np.ndarray:
    """ELBOs (n, 2) of the chosen and rejected answers of a split under the masks of a pass; NaN but for the `numbers`.

    The operations are those of training, so that a policy which equals its reference has the same bits.
    """
    found = np.full((len((stream.train if name == "train" else stream.val).pairs), 2), np.nan, dtype=np.float32)
    done = 0
    with progress(total=len(numbers), desc=f"reference {name} {turn}", unit="pair") as bar, torch.enable_grad():
        for batch in stream.some(name, turn, numbers):
            pairs = pair_elbos(model, batch.to(where))
            told = torch.stack([pairs.chosen, pairs.rejected], 1).detach().cpu().numpy()
            found[numbers[done : done + len(told)]] = told
            done += len(told)
            bar.update(len(told))
    return found


def traits_of(model: nn.Module) -> Any:
    """The traits of a `Denoiser`, also of a wrapped one."""
    return getattr(model, "module", model).traits


# -- by all masks ------------------------------------------------------------------------------------------------------

MOST_ENUMERATED = 8
FORMS = ("t", "k", "order")
Score = Callable[
    [tuple[bool, ...]], Sequence[float]
]  # of a mask: log p of each token (those that are clean are not read)


def enumerated(score: Score, length: int, form: str) -> float:
    """The ELBO of a text of at most 8 tokens by all its masks, in nats. Raises ValueError for a longer one.

    The forms differ in how they weigh a mask of k tokens: t by a Beta integral, k by subsets of each size, order by the
    orders in which the tokens may come.
    """
    if not 1 <= length <= MOST_ENUMERATED:
        raise ValueError(f"expected 1 to {MOST_ENUMERATED} tokens, found {length}: there are 2^L masks")
    found = {mask: score(mask) for mask in itertools.product((False, True), repeat=length) if any(mask)}
    if form == "order":
        orders = list(itertools.permutations(range(length)))
        return math.fsum(_in_order(found, order) for order in orders) / len(orders)
    return math.fsum(
        _weight(sum(mask), length, form) * math.fsum(log for log, hidden in zip(logs, mask, strict=True) if hidden)
        for mask, logs in found.items()
    )


def _weight(k: int, length: int, form: str) -> float:
    """Of a mask of k tokens. t: int_0^1 t^(k-1) (1-t)^(L-k) dt = B(k, L-k+1). k: (L/k) / (L C(L, k))."""
    if form == "t":
        return math.gamma(k) * math.gamma(length - k + 1) / math.gamma(length + 1)
    if form == "k":
        return 1 / (k * math.comb(length, k))
    raise ValueError(f"form: expected one of {', '.join(FORMS)}, found {form!r}")


def _in_order(found: dict[tuple[bool, ...], Sequence[float]], order: Sequence[int]) -> float:
    hidden = [True] * len(order)
    total = 0.0
    for place in order:
        total += found[tuple(hidden)][place]
        hidden[place] = False
    return total
