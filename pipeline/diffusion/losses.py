"""Losses of masked diffusion, and the likelihood of texts: bounds and estimates from sampled masks.

    masked_cross_entropy, diffusion_dpo     the losses
    masked_logprobs     log p of the tokens under one mask                          training
    elbo                mean over a sample's draws of (L / k) sum of log p          evaluation, Diffusion-DPO
    coupled_logprobs    log p of each token from two complementary masks            coupled-GRPO
    enumerated          the ELBO by all masks, in three equal forms                 short texts: tests of the others

For prompt x, response y of L tokens and l_i = log p(y_i | x, y under mask M), in nats, over the ids that a text may
contain:

    ELBO = int_0^1 (1/t) E[sum_{i in M} l_i] dt              M: each token independently with probability t
         = E_{k ~ U{1..L}} E_{|M| = k} [(L/k) sum l_i]
         = mean over all orders of the chain-rule sum

-ELBO bounds the negative log-likelihood of decoding in a random order, one token a step (Ou et al. 2024,
arXiv:2406.03736). The batch contains the masks (diffusion/masks.py): all models that score a batch use the same ones.

For DPO, s = [B(w) - B_ref(w)] - [B(l) - B_ref(l)], with B the ELBO of an answer, w the chosen and l the rejected
answer of a pair. Coupled-GRPO has no loss of its own: its estimates are the log-probabilities in
`learning.policy_losses.group_policy`.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.diffusion.batches import NoisedPairs
from pipeline.diffusion.masks import CoupledBatch, Drawn
from pipeline.diffusion.model import Noised, Traits, logprobs
from pipeline.learning.losses import Loss, Term, sum_by_row
from pipeline.learning.pair_losses import PairLogprobs
from pipeline.run.tracking import progress

REDUCTIONS = ("sum", "mean")


def masked_cross_entropy(logprobs: Tensor, weights: Tensor, *, per: str) -> Loss:
    """-sum of weight * l over the masked tokens (n,), over the step's count `per` (LLaDA, arXiv:2502.09992, eq. 3)."""
    num = len(logprobs)
    return Loss([Term("loss", -(logprobs * weights).sum(), per)], {"masked/nll": (-logprobs.detach().sum(), num)})


def diffusion_dpo(
    policy: PairLogprobs, reference: PairLogprobs, *, beta: float, sft_weight: float, reduction: str = "sum"
) -> Loss:
    """-log sigmoid(beta s) - (sft_weight / |w|) B(w) of each pair (LLaDA 1.5, arXiv:2505.19223, eq. 4).

    With `reduction` mean, each B is divided by its answer's tokens. Metrics have TRL's names; the extremes are the
    least and the greatest beta s.
    """
    assert reduction in REDUCTIONS, reduction
    ones = torch.ones_like(policy.chosen)
    num_chosen, num_rejected = (policy.num_chosen, policy.num_rejected) if reduction == "mean" else (ones, ones)
    chosen = (policy.chosen - reference.chosen) / num_chosen
    rejected = (policy.rejected - reference.rejected) / num_rejected
    scaled = beta * (chosen - rejected)
    terms = [Term("preference", -F.logsigmoid(scaled).sum(), "pairs")]
    mean_logprobs = policy.chosen / policy.num_chosen
    if sft_weight:
        terms.append(Term("sft", -mean_logprobs.sum(), "pairs", sft_weight))
    num, margins = len(scaled), scaled.detach()
    chosen_rewards, rejected_rewards = beta * chosen.detach(), beta * rejected.detach()
    wins, ties = chosen_rewards > rejected_rewards, chosen_rewards == rejected_rewards
    metrics = {
        "rewards/chosen": (chosen_rewards.sum(), num),
        "rewards/rejected": (rejected_rewards.sum(), num),
        "rewards/margins": (margins.sum(), num),
        "rewards/accuracies": (wins.sum() + 0.5 * ties.sum(), num),
        "raw_accuracy": ((policy.chosen > policy.rejected).detach().sum(), num),
        "nelbo/chosen": (-policy.chosen.detach().sum(), int(policy.num_chosen.sum())),
        "nelbo/rejected": (-policy.rejected.detach().sum(), int(policy.num_rejected.sum())),
    }
    extremes = {"margin_min": margins.amin(), "margin_max": margins.amax()} if num else {}
    return Loss(terms, metrics | policy.metrics, extremes)


# -- likelihoods -------------------------------------------------------------------------------------------------------


NORMALIZATION = 2 / 3  # of the published estimate, whose mean is 1.5 log p


def masked_logprobs(model: nn.Module, noised: Noised) -> Tensor:
    """log p (n,) of the tokens at the predicted positions, row by row, in nats."""
    banned = _traits_of(model).banned
    (result,) = model([noised], lambda hidden, table, one: logprobs(hidden, table, one.targets, banned))
    return result


def draw_sums(model: nn.Module, inputs: Sequence[Noised]) -> Tensor:
    """Sums (n, B) of log p over the predicted positions of each draw's rows, in training with the memory of one
    draw.
    """
    banned = _traits_of(model).banned

    def read(hidden: Tensor, table: Tensor, noised: Noised) -> Tensor:
        return sum_by_row(logprobs(hidden, table, noised.targets, banned), noised.wanted)

    return torch.stack(model(inputs, read))


def elbo(model: nn.Module, batch: Drawn) -> Tensor:
    """ELBO (B,) of each row's response, in nats: the mean over its draws, unbiased."""
    return (draw_sums(model, batch.inputs) * batch.scales).mean(0)


def pair_elbos(model: nn.Module, batch: Drawn) -> PairLogprobs:
    """ELBOs of P pairs, whose rows are the P chosen, then the P rejected ones; the metrics are variances over draws."""
    by_draw = draw_sums(model, batch.inputs) * batch.scales  # (n, 2P)
    pairs = pairs_of(by_draw.mean(0), batch.lengths)
    if len(by_draw) == 1:
        return pairs
    chosen, rejected = by_draw.detach().chunk(2, dim=1)
    variances = (chosen - rejected).var(0) / len(by_draw)  # (P,)
    return replace(pairs, metrics={"elbo/variance": (variances.sum(), len(variances))})


def pairs_of(sums: Tensor, lengths: Tensor) -> PairLogprobs:
    """Sums (2P,) as pairs; `lengths` (2P,) count their tokens."""
    (chosen, rejected), (num_chosen, num_rejected) = sums.chunk(2), lengths.chunk(2)
    return PairLogprobs(chosen, rejected, num_chosen, num_rejected)


def coupled_logprobs(model: nn.Module, batch: CoupledBatch, *, released: bool = False) -> Tensor:
    """An estimate (N,) of log p of each counted token, row by row (DiffuCoder, arXiv:2506.20639, eq. 6).

    1/2 [l^a + 1(first) l^b / t + 1(second) l^c / (1 - t)]: under the whole mask, and under the one of the two halves
    that masks it. `released`: as published, where its mean for a model without context is 1.5 log p; else times 2/3, so
    that a ratio of two estimates is a ratio of probabilities.
    """
    banned, shape = _traits_of(model).banned, batch.tokens.shape

    def read(hidden: Tensor, table: Tensor, noised: Noised) -> Tensor:
        values = logprobs(hidden, table, noised.targets, banned)
        return values.new_zeros(shape).masked_scatter(noised.wanted, values)  # (B, T)

    whole, first, second = model(batch.inputs, read)
    t = batch.times[:, None]
    estimates = 0.5 * (whole + first / t + second / (1 - t))
    return (estimates if released else estimates * NORMALIZATION)[batch.counted]


def reference_elbos(
    model: nn.Module, stream: NoisedPairs, name: str, turn: int, numbers: np.ndarray, where: torch.device
) -> np.ndarray:
    """ELBOs (n, 2) of the chosen and rejected answers of a split under the masks of a pass; NaN except for `numbers`.

    The operations are those of training, so that a policy equal to its reference gets the same bits.
    """
    elbos = np.full((len((stream.train if name == "train" else stream.val).pairs), 2), np.nan, dtype=np.float32)
    done = 0
    with progress(total=len(numbers), desc=f"reference {name} {turn}", unit="pair") as bar, torch.enable_grad():
        for batch in stream.some(name, turn, numbers):
            pairs = pair_elbos(model, batch.to(where))
            part = torch.stack([pairs.chosen, pairs.rejected], 1).detach().cpu().numpy()
            elbos[numbers[done : done + len(part)]] = part
            done += len(part)
            bar.update(len(part))
    return elbos


def _traits_of(model: nn.Module) -> Traits:
    """The traits of a `Denoiser`, also of a wrapped one."""
    traits = getattr(model, "module", model).traits
    assert isinstance(traits, Traits)
    return traits


# -- by all masks ------------------------------------------------------------------------------------------------------

MOST_ENUMERATED = 8
FORMS = ("t", "k", "order")
Score = Callable[[tuple[bool, ...]], Sequence[float]]  # mask -> log p of each token (those of clean ones are not read)


def enumerated(score: Score, length: int, form: str) -> float:
    """The ELBO of a text of at most 8 tokens by all its masks, in nats. Raises ValueError for a longer one.

    The forms differ in the weight of a mask of k tokens: t by a Beta integral, k by subsets of each size, order by the
    orders in which the tokens may come.
    """
    if not 1 <= length <= MOST_ENUMERATED:
        raise ValueError(f"expected 1 to {MOST_ENUMERATED} tokens, found {length}: there are 2^L masks")
    scores = {mask: score(mask) for mask in itertools.product((False, True), repeat=length) if any(mask)}
    if form == "order":
        orders = list(itertools.permutations(range(length)))
        return math.fsum(_chain_rule_sum(scores, order) for order in orders) / len(orders)
    return math.fsum(
        _weight(sum(mask), length, form) * math.fsum(log for log, masked in zip(logs, mask, strict=True) if masked)
        for mask, logs in scores.items()
    )


def _weight(k: int, length: int, form: str) -> float:
    """Weight of a mask of k tokens. t: int_0^1 t^(k-1) (1-t)^(L-k) dt = B(k, L-k+1). k: (L/k) / (L C(L, k))."""
    if form == "t":
        return math.gamma(k) * math.gamma(length - k + 1) / math.gamma(length + 1)
    if form == "k":
        return 1 / (k * math.comb(length, k))
    raise ValueError(f"form: expected one of {', '.join(FORMS)}, found {form!r}")


def _chain_rule_sum(scores: dict[tuple[bool, ...], Sequence[float]], order: Sequence[int]) -> float:
    mask = [True] * len(order)
    total = 0.0
    for position in order:
        total += scores[tuple(mask)][position]
        mask[position] = False
    return total
