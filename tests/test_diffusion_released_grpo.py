"""Ten defects of DiffuCoder's released training code (apple/ml-diffucoder), each a test; no flag brings one back."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.diffusion import masks
from pipeline.diffusion import model as diffusion_model
from pipeline.diffusion.rollouts import CanvasRollouts, Coupling, annotate
from pipeline.diffusion.training import coupled_logprobs
from pipeline.learning.policy_losses import group_policy, kl_k3
from pipeline.learning.processes import Ranks
from pipeline.rl.rewards import Resources, Scorer
from pipeline.rl.rollout import Method, Rollout, RolloutConfig
from pipeline.sandbox.judge import Judge, SandboxConfig, Verdict
from tests.diffusion_models import model
from tests.diffusion_rollouts import METHOD, answer, scored
from tests.diffusion_workspace import arguments
from tests.diffusion_workspace import masked_workspace as masked_workspace
from tests.workspace import Workspace, command

COUPLING = Coupling(seed=0, inner=2, fill=2)


def filled(rows: int = 4, inner: int = 2) -> CanvasRollouts:
    """A stream between two fills."""
    config = RolloutConfig(
        prompts=1,
        samples=rows,
        iterations=1,
        epochs=inner,
        minibatches=1,
        max_prompt=8,
        max_new_tokens=6,
        learning_rate=1e-3,
    )
    nothing: Any = None
    method = Method(sample=nothing, score=nothing, annotate=nothing, estimate=nothing)
    stream = CanvasRollouts([answer().prompt], config, method, pad=1, seed=0, ranks=Ranks("fp32", "."))
    stream.coupling = replace(COUPLING, inner=inner)
    flat = {"advantages": np.ones(4), **{f"old/{n}": np.zeros(4) for n in range(inner)}}
    stream.rollouts = [Rollout(answer(sample=n), nothing, dict(flat)) for n in range(rows)]
    return stream


def test_1_each_inner_iteration_has_masks_of_its_own_which_accumulation_shares() -> None:
    """The released code indexed masks by the count of micro-batches, so that accumulating two of them over two
    iterations used one mask twice.
    """
    stream = filled()
    whole = [stream.batch(step, 0, np.arange(4)) for step in (0, 1)]
    assert not torch.equal(whole[0].first, whole[1].first) and not torch.equal(whole[0].times, whole[1].times)
    for step, batch in enumerate(whole):
        halves = [stream.batch(step, 0, np.array(rows)) for rows in ((0, 1), (2, 3))]
        assert torch.equal(torch.cat([half.first for half in halves]), batch.first)
        assert torch.equal(torch.cat([half.times for half in halves]), batch.times)


def test_2_scoring_resets_no_global_generator() -> None:
    def states() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]

    before = states()
    COUPLING.scores(model(), [answer(sample=n) for n in range(3)], 0, torch.device("cpu"))
    assert states() == before


def test_3_a_token_whose_number_equals_the_time_is_hidden_in_the_second_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "uniforms", lambda key, count: np.full(count, 0.5))  # t = 0.5
    batch = COUPLING.batch([answer()], 0)
    _, first, second = batch.inputs
    assert not first.masks.any() and torch.equal(second.masks, batch.canvas)


def test_4_one_inner_iteration_with_a_divergence_runs(masked: Workspace) -> None:
    ended = command("diffusion_grpo", arguments("diffusion_grpo", {"epochs": 1, "beta": 0.1, "ref_sync": 0}))
    assert ended.code == 0, ended.said
    assert any(row.get("kl_loss") for row in masked.curve("diffusion_grpo"))


def test_5_it_evaluates_while_it_trains(masked: Workspace) -> None:
    ended = command("diffusion_grpo", arguments("diffusion_grpo", {"eval_steps": 2}))
    assert ended.code == 0, ended.said
    assert [row["step"] for row in masked.curve("diffusion_grpo") if row.get("kl_held_out")] == ["0", "2", "4"]


def test_6_padding_to_the_left_the_right_or_none_scores_alike() -> None:
    alone = COUPLING.batch([answer()], 0)
    expected = coupled_logprobs(model().train(False), alone)
    for left, right in ((0, 5), (5, 0)):

        def padded(x: Tensor, value: int, left: int = left, right: int = right) -> Tensor:
            return torch.nn.functional.pad(x, (left, right), value=value)

        wide = replace(
            alone,
            tokens=padded(alone.tokens, 9),
            documents=padded(alone.documents, -1),
            positions=padded(alone.positions, 0),
            canvas=padded(alone.canvas, 0),
            counted=padded(alone.counted, 0),
            first=padded(alone.first, 0),
        )
        torch.testing.assert_close(coupled_logprobs(model().train(False), wide), expected, atol=1e-5, rtol=0)


def test_7_divergence_and_clipping_are_those_of_each_row() -> None:
    """In the released code, a mask of [B, 1, L] broadcast them to [B, B, L]."""
    batch = COUPLING.batch([answer(sample=n) for n in range(3)], 0)
    own = model().train(False)
    with torch.no_grad():
        now = coupled_logprobs(own, batch)
    moved = torch.tensor([0.9, -0.9, 0.1]).repeat_interleave(4)  # ratios below, above, and within 0.5 to 1.5
    signs = torch.tensor([-1.0, 1.0, 1.0]).repeat_interleave(4)
    told = scored(own, batch, now + moved, signs, now - moved)
    ratio = (-moved).exp()
    assert float(told.metrics["clip_ratio/low_mean"][0]) == float(((ratio < 0.5) & (signs < 0)).sum()) == 4
    assert float(told.metrics["clip_ratio/high_mean"][0]) == float(((ratio > 1.5) & (signs > 0)).sum()) == 4
    assert abs(float(told.metrics["kl"][0]) - float(kl_k3(now, now - moved).sum())) < 1e-4
    assert {count for _, count in (told.metrics["kl"], told.metrics["ratio"])} == {12}


@pytest.mark.parametrize("inner", [1, 4])
def test_8_what_a_step_above_the_bound_keeps_does_not_grow_with_the_inner_iterations(
    inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the released code, the logits of all 3 inputs of all inner iterations were alive at once."""
    monkeypatch.setattr(diffusion_model, "MOST_ACTIVATIONS", 0)
    sizes: list[int] = []
    own = model().train(True)
    known = {p.untyped_storage().data_ptr() for p in own.parameters()}

    def pack(x: Tensor) -> Tensor:
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in known:
            sizes.append(x.numel())
        return x

    stream = filled(inner=inner)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        coupled_logprobs(own, stream.batch(0, 0, np.arange(4)))
    assert sum(sizes) < 0.2 * 4 * 9 * 24  # less than a fifth of one input's logits


def test_9_a_test_that_takes_too_long_fails_alone_and_a_lost_judge_is_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = [{"args": f"[{n}]", "expected": str(n + 1), "visible": False} for n in range(4)]
    slow = "```python\ndef f(x):\n    while x == 2:\n        pass\n    return x + 1\n```"
    asked = replace(
        answer(), text=slow, prompt=replace(answer().prompt, record=replace(answer().prompt.record, tests=tests))
    )
    with Judge(SandboxConfig(), 1) as judge:
        scorer = Scorer({"code": 2.0}, Resources(max_new_tokens=64, judge=judge))
        assert scorer([asked])[0].total == 2.0 * 3 / 4

        gone = Verdict(verdict="unscorable", reason="harness", passed=0, total=4, score=None, results=[])
        monkeypatch.setattr(judge, "judge", lambda programs: [gone for _ in programs])
        assert scorer([asked])[0].total is None


def test_10_each_completion_has_a_time_of_its_own() -> None:
    stream = filled()
    times = torch.cat([stream.batch(step, 0, np.arange(4)).times for step in (0, 1)])
    assert len(set(times.tolist())) == 8


def test_the_first_inner_iteration_of_one_update_needs_no_old_scores() -> None:
    """The training pass computes them: the gradients of both inner iterations equal those with old scores computed
    beforehand.
    """
    policy = model().train(True)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)), alpha=0.05)
    asked: list[int] = []

    def score(answers: Any, iteration: int) -> list[np.ndarray]:
        asked.append(iteration)
        return COUPLING.scores(policy, answers, iteration, torch.device("cpu"))

    def gradients(own_first: bool) -> list[list[Tensor]]:
        stream = filled()
        for number, one in enumerate(stream.rollouts):
            one.arrays = {"advantages": np.full(4, (-1.0) ** number * (number + 1))}
        annotate(stream.rollouts, inner=2, rollout=1, policy=score, reference=None, own_first=own_first)
        found = []
        for step in (2, 3):  # the second rollout
            policy.zero_grad()
            given = stream.batch(step, 0, np.arange(4))
            assert (given.old is None) == (own_first and step == 2)
            told = coupled_logprobs(policy, given)
            old = told.detach() if given.old is None else given.old
            scored_loss = group_policy(
                told,
                -told.detach(),
                old=old,
                advantages=given.arrays["advantages"],
                reference=None,
                row_of=given.row_of,
                num_rows=4,
                method=METHOD,
                max_tokens=6,
            )
            scored_loss.terms[0].sum.backward()
            found.append([p.grad.clone() for p in policy.parameters() if p.grad is not None])
        return found

    before, own = gradients(False), gradients(True)
    assert asked == [2, 3, 3]
    assert max(float(one.abs().max()) for one in own[0]) > 1e-3
    for a, b in zip(before, own, strict=True):
        for expected, found in zip(a, b, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_first_rollout_has_all_old_scores_which_its_gate_compares() -> None:
    stream = filled()
    for one in stream.rollouts:
        one.arrays = {"advantages": np.ones(4)}
    annotate(
        stream.rollouts,
        inner=2,
        rollout=0,
        policy=lambda answers, _: [np.zeros(4)] * len(answers),
        reference=lambda answers, _: [np.zeros(4)] * len(answers),
        own_first=True,
    )
    assert set(stream.rollouts[0].arrays) == {"advantages", "old/0", "old/1", "reference/0", "reference/1"}
    assert stream.batch(0, 0, np.arange(4)).old is not None


def test_more_than_one_minibatch_has_the_old_scores_of_before_the_first_update(
    masked: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    original = CanvasRollouts.batch

    def batch(self: CanvasRollouts, step: int, context: int, rows: np.ndarray) -> Any:
        found = original(self, step, context, rows)
        told.append(found.old is None)
        return found

    monkeypatch.setattr(CanvasRollouts, "batch", batch)
    for minibatches, expected in ((1, [False, False, True, False]), (2, [False] * 8)):
        told.clear()
        ended = command(
            "diffusion_grpo", arguments("diffusion_grpo", {"minibatches": minibatches, "runtime.micro_batch": 100})
        )
        assert ended.code == 0, ended.said
        assert told == expected
