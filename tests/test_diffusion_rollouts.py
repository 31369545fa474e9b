"""Coupled-GRPO: the estimate by hand, its mean, the first inner step, and the released code's defects (specs:
diffusion, 6).
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.diffusion import masks as diffusion_masks
from pipeline.diffusion import model as diffusion_model
from pipeline.diffusion import rollouts as diffusion_rollouts
from pipeline.diffusion import training
from pipeline.diffusion.masks import CoupledBatch
from pipeline.diffusion.model import Noised
from pipeline.diffusion.rollouts import Coupling
from pipeline.diffusion.training import coupled_logprobs
from pipeline.learning import policy_losses
from pipeline.learning.pair_losses import PairLogprobs
from pipeline.learning.policy_losses import Clip, kl_k3, leave_one_out
from pipeline.run.errors import GateError
from tests.diffusion_models import model
from tests.diffusion_rollouts import answer, scored


class Known:
    """A model whose log-probabilities are given for each of the three inputs in turn, (3, B, T)."""

    def __init__(self, logs: Tensor) -> None:
        self.logs = logs

    def __call__(self, inputs: list[Noised]) -> list[Tensor]:
        return [logs[one.wanted] for one, logs in zip(inputs, self.logs, strict=True)]


def batch(first: list[list[bool]], times: list[float], *, counted: list[list[bool]] | None = None) -> CoupledBatch:
    """Rows of a clean prompt token and a canvas of token 0."""
    halves = torch.tensor(first)
    count, length = halves.shape
    canvas = torch.ones(count, length + 1, dtype=torch.bool)
    canvas[:, 0] = False
    told = canvas.clone()
    if counted is not None:
        told[:, 1:] = torch.tensor(counted)
    tokens = torch.zeros(count, length + 1, dtype=torch.int64)
    places = torch.arange(length + 1).expand(count, -1)
    lengths = told.sum(1)
    return CoupledBatch(
        tokens,
        torch.zeros_like(tokens, dtype=torch.int32),
        places,
        canvas,
        told,
        torch.nn.functional.pad(halves, (1, 0)),
        torch.tensor(times, dtype=torch.float64),
        torch.repeat_interleave(torch.arange(count), lengths),
        torch.zeros(int(lengths.sum())),
        {},
    )


@pytest.mark.parametrize(
    ("in_first", "log", "released", "normalized"), [(True, -0.5, -1.125, -0.75), (False, -0.5, -0.916667, -0.611111)]
)
def test_the_estimate_of_a_token_by_hand(in_first: bool, log: float, released: float, normalized: float) -> None:
    """t = .4, l^a = -1, and the half that hides the token says -.5."""
    logs = torch.full((3, 1, 2), log, dtype=torch.float64)
    logs[0] = -1.0
    given = batch([[in_first]], [0.4])
    assert round(float(coupled_logprobs(Known(logs), given, released=True)), 6) == released  # type: ignore[arg-type]
    assert round(float(coupled_logprobs(Known(logs), given)), 6) == normalized  # type: ignore[arg-type]


def test_a_context_free_model_is_estimated_without_bias() -> None:
    """Mean over keys: log p where normalized, 1.5 log p as released."""
    log, found = -0.7, {True: [], False: []}
    logs = torch.full((3, 1, 9), log, dtype=torch.float64)
    coupling = Coupling(seed=0, inner=1, fill=2)
    for number in range(4000):
        masks = coupling.masks(answer(sample=number, canvas=(5,) * 8, ids=8), 0)
        given = batch([masks.first.tolist()], [masks.t])
        for released in found:
            found[released].append(coupled_logprobs(Known(logs), given, released=released).numpy())  # type: ignore[arg-type]
    assert abs(np.mean(found[False]) - log) < 0.005 and abs(np.mean(found[True]) - 1.5 * log) < 0.0075


def test_what_stands_behind_the_first_end_stays_in_the_input_and_leaves_the_loss() -> None:
    given = Coupling(seed=0, inner=1, fill=2).batch([answer()], 0)
    assert given.counted[0].tolist() == [False] * 3 + [True] * 4 + [False] * 2
    assert given.canvas[0].tolist() == [False] * 3 + [True] * 6
    whole, first, second = given.inputs
    assert whole.masks[0].tolist() == given.canvas[0].tolist()
    assert ((first.masks ^ second.masks) == given.canvas).all() and not (first.masks & second.masks).any()
    assert not any(one.masks[0, :3].any() for one in given.inputs)  # the prompt is clean
    own = model().train(True)
    before = coupled_logprobs(own, given)
    other = replace(given, tokens=given.tokens.clone())
    other.tokens[0, -1] = 11  # after the end
    assert not torch.equal(coupled_logprobs(own, other), before) and len(before) == 4


def test_masks_hang_on_the_sample_and_the_inner_iteration_alone() -> None:
    """Defects 1 and 10 of the released code: one mask for two inner iterations, one time for a micro-batch."""
    coupling = Coupling(seed=0, inner=2, fill=2)
    together = coupling.batch([answer(sample=0), answer(sample=1)], 3)
    for row in (0, 1):
        alone = coupling.batch([answer(sample=row)], 3)
        assert torch.equal(alone.first[0], together.first[row]) and alone.times[0] == together.times[row]
    times = {float(coupling.batch([answer(sample=n)], i).times[0]) for n in range(4) for i in range(4)}
    assert len(times) == 16


def test_one_time_may_be_shared_by_a_step() -> None:
    given = Coupling(seed=0, inner=2, fill=2, shared_time=True).batch([answer(sample=0), answer(sample=1)], 0)
    assert given.times[0] == given.times[1]
    assert given.times[0] != Coupling(seed=0, inner=2, fill=2, shared_time=True).batch([answer()], 1).times[0]


def test_a_row_of_padding_counts_nothing() -> None:
    given = Coupling(seed=0, inner=1, fill=2).batch([answer()], 0, rows=2)
    assert given.counts["sequences"] == 1 and given.counts["tokens"] == 4
    torch.testing.assert_close(
        coupled_logprobs(model().train(True), given),
        coupled_logprobs(model().train(True), Coupling(seed=0, inner=1, fill=2).batch([answer()], 0)),
    )
    empty = Coupling(seed=0, inner=1, fill=2).batch([], 0, rows=1)
    assert len(coupled_logprobs(model().train(True), empty)) == 0


def test_the_first_inner_step_is_reinforce() -> None:
    """Ratio 1, nothing clipped, no divergence, and the gradient is that of -A times the estimate."""
    given = Coupling(seed=0, inner=1, fill=2).batch([answer(sample=n) for n in range(3)], 0)
    advantages = torch.tensor([1.5, -0.5, -1.0]).repeat_interleave(4)
    own = model().train(True)
    with torch.no_grad():
        old = coupled_logprobs(own, given)
    found = scored(own, given, old, advantages, old)
    assert abs(float(found.metrics["ratio"][0]) / 12 - 1) < 1e-6 and found.metrics["clip_ratio/region_mean"][0] == 0
    assert abs(float(found.metrics["kl"][0])) < 1e-6
    sum(term.coefficient * term.sum for term in found.terms).backward()
    twin = model().train(True)
    (-advantages * coupled_logprobs(twin, given)).sum().backward()
    for (name, a), b in zip(own.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-5, msg=name)


def test_equal_rewards_without_divergence_give_no_gradient() -> None:
    given = Coupling(seed=0, inner=1, fill=2).batch([answer(sample=n) for n in range(2)], 0)
    own = model().train(True)
    with torch.no_grad():
        old = coupled_logprobs(own, given)
    found = scored(own, given, old, torch.zeros(8))
    found.terms[0].sum.backward()
    assert all(p.grad is None or not p.grad.any() for p in own.parameters())


def test_a_single_inner_iteration_with_a_divergence_runs() -> None:
    """Defect 4: mu = 1 with beta > 0 ended in a NameError."""
    given = Coupling(seed=0, inner=1, fill=2).batch([answer()], 0)
    with torch.no_grad():
        old = coupled_logprobs(model().train(False), given)
    assert len(scored(model().train(False), given, old, torch.ones(4), old - 0.5).terms) == 2


def test_the_divergence_is_taken_token_by_token() -> None:
    """Defect 7: a mask of [B, 1, L] broadcast it to [B, B, L]. The values are k3 at d = .5 and -.5."""
    found = kl_k3(torch.zeros(2), torch.tensor([0.5, -0.5]))
    assert [round(float(x), 6) for x in found] == [0.148721, 0.106531]
    given = Coupling(seed=0, inner=1, fill=2).batch([answer(sample=n) for n in range(3)], 0)
    with torch.no_grad():
        old = coupled_logprobs(model().train(False), given)
    shift = torch.tensor([0.5, -0.5, 0.2]).repeat_interleave(4)
    told = scored(model().train(False), given, old, torch.ones(12), old + shift)
    rows = [float(kl_k3(torch.zeros(4), shift[4 * n : 4 * n + 4]).sum()) for n in range(3)]
    assert abs(float(told.metrics["kl"][0]) - sum(rows)) < 1e-5


def test_advantages_leave_one_out() -> None:
    found = leave_one_out(torch.tensor([[2.5, 0.5, 0.0, 1.5]]), torch.ones(1, 4, dtype=torch.bool))
    assert [round(float(x), 4) for x in found[0]] == [1.8333, -0.8333, -1.5, 0.5]


def test_both_signs_of_an_advantage_are_clipped() -> None:
    log = torch.tensor([1.0, -1.0], requires_grad=True)
    loss, _ = policy_losses.surrogate(log, torch.zeros(2), torch.tensor([1.0, -1.0]), Clip(0.5, 0.5))
    loss.sum().backward()
    assert log.grad is not None and not log.grad.any()


def test_scores_above_the_bound_keep_the_memory_of_one_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect 8: it kept three sets of full-vocabulary logits for every inner iteration at once."""
    monkeypatch.setattr(diffusion_model, "MOST_ACTIVATIONS", 0)
    given = Coupling(seed=0, inner=1, fill=2).batch([answer(sample=n) for n in range(4)], 0)

    def saved(own: Any) -> int:
        known = {p.untyped_storage().data_ptr() for p in own.parameters()}
        sizes: list[int] = []

        def pack(x: Tensor) -> Tensor:
            if x.dtype == torch.float32 and x.untyped_storage().data_ptr() not in known:
                sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            coupled_logprobs(own, given)
        return sum(sizes)

    assert saved(model().train(True)) < 0.1 * saved(model().train(False))


def test_scoring_moves_no_global_generator() -> None:
    """Defect 2: the released code re-seeded the global generators."""
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]
    Coupling(seed=0, inner=1, fill=2).scores(model(), [answer()], 0, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before[0]) and np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]


def test_the_gate_of_the_first_step_names_what_moved() -> None:
    good = {"ratio": 1.0, "approxkl": 0.0, "clip_ratio/region_mean": 0.0, "kl": 0.0}
    check = training.first_policy("fp32")
    check(good)
    for name, wrong in {"ratio": 1.01, "approxkl": 1e-3, "clip_ratio/region_mean": 0.1, "kl": 0.01}.items():
        with pytest.raises(GateError, match=f"gate {name}"):
            check(good | {name: wrong})


# -- losses by hand ----------------------------------------------------------------------------------------------------


def test_the_masked_cross_entropy_weighs_each_token_by_one_over_its_noise() -> None:
    """Tokens of -1 and -3 nats at t = 1/2 and t = 1/4: 2 * 1 + 4 * 3."""
    logprobs = torch.tensor([-1.0, -3.0], requires_grad=True)
    found = training.masked_cross_entropy(logprobs, torch.tensor([2.0, 4.0]), per="tokens")
    (term,) = found.terms
    assert (term.name, term.sum.item(), term.per) == ("loss", 14.0, "tokens")
    term.sum.backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-2.0, -4.0]
    assert (float(found.metrics["masked/nll"][0]), found.metrics["masked/nll"][1]) == (4.0, 2), "unweighted"


# -- Diffusion-DPO's loss ----------------------------------------------------------------------------------------------


def pairs(chosen: float, rejected: float) -> PairLogprobs:
    return PairLogprobs(torch.tensor([chosen]), torch.tensor([rejected]), torch.tensor([4]), torch.tensor([2]))


@pytest.mark.parametrize(("margin", "expected"), [(0.2, 0.598139), (-0.2, 0.798139), (0.0, 0.693147)])
def test_the_loss_of_a_margin_by_hand(margin: float, expected: float) -> None:
    found = training.diffusion_dpo(pairs(margin / 0.2, 0.0), pairs(0.0, 0.0), beta=0.2, sft_weight=0.0)
    assert round(float(found.terms[0].sum), 6) == expected
    swapped = training.diffusion_dpo(pairs(0.0, margin / 0.2), pairs(0.0, 0.0), beta=0.2, sft_weight=0.0)
    assert float(swapped.metrics["rewards/margins"][0]) == -float(found.metrics["rewards/margins"][0])


def test_the_likelihood_of_the_chosen_answer_is_a_mean_over_its_tokens() -> None:
    found = training.diffusion_dpo(pairs(-8.0, -1.0), pairs(-8.0, -1.0), beta=0.2, sft_weight=0.05)
    assert [(term.name, float(term.sum), term.coefficient) for term in found.terms[1:]] == [("sft", 2.0, 0.05)]


def test_a_mean_reduction_divides_by_each_answers_own_length() -> None:
    found = training.diffusion_dpo(pairs(4.0, 1.0), pairs(0.0, 0.0), beta=1.0, sft_weight=0.0, reduction="mean")
    assert float(found.metrics["rewards/margins"][0]) == 4 / 4 - 1 / 2


def test_raw_and_implicit_accuracy_are_two_things_and_a_tie_counts_half() -> None:
    found = training.diffusion_dpo(pairs(-3.0, -2.0), pairs(-3.0, -2.0), beta=1.0, sft_weight=0.0)
    assert float(found.metrics["rewards/accuracies"][0]) == 0.5 and float(found.metrics["raw_accuracy"][0]) == 0
    found = training.diffusion_dpo(pairs(-3.0, -2.0), pairs(-5.0, -2.0), beta=1.0, sft_weight=0.0)
    assert float(found.metrics["rewards/accuracies"][0]) == 1 and float(found.metrics["raw_accuracy"][0]) == 0


def test_the_variance_of_an_estimate_is_taken_over_the_inner_iterations() -> None:
    class One:
        def __init__(self, first: float, second: float) -> None:
            self.arrays = {"old/0": np.array([first, 1.0]), "old/1": np.array([second, 1.0])}

    rollouts: Any = [One(0.0, 2.0), One(1.0, 1.0)]
    assert diffusion_rollouts.variance(rollouts, 2) == {"coupled/variance": 1.0}
    assert diffusion_rollouts.variance(rollouts, 1) == {}


def test_masks_drawn_apart_have_the_coupled_ones_first_mask_and_rates() -> None:
    keys = [diffusion_masks.key(0, "coupled", str(n), 0) for n in range(400)]
    seconds, rates, overlaps = [], [], 0
    for key in keys:
        coupled, apart = diffusion_masks.coupled(key, 16), diffusion_masks.apart(key, 16)
        assert coupled.t == apart.t and (coupled.first == apart.first).all()
        seconds.append(apart.second.mean())
        rates.append(1 - apart.t)
        overlaps += int((apart.first & apart.second).any())
    assert abs(np.mean(seconds) - np.mean(rates)) < 4 * 0.5 / math.sqrt(400 * 16)
    assert overlaps > 300  # some tokens are hidden by both masks, others by neither
