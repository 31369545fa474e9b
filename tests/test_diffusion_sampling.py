"""Sampling from a masked-diffusion model: what a step may do, schedules, thresholds, caches, and the order that
comes out.
"""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.diffusion import sampling
from pipeline.diffusion.sampling import CanvasStep, Denoising, Generation, denoise, global_ar, local_ar, order_of
from pipeline.model.transformer import Transformer
from tests.diffusion_fixture import MASK, SEQUENCES, STATES, L, order_probability, table
from tests.diffusion_models import SHAPE, model

PROMPTS = [[4, 5, 6], [7, 8, 9, 10, 11], [12]]


def told(
    settings: Denoising, *, seeds: tuple[int, ...] = (1, 2, 3), prompts: Any = PROMPTS, rows: int = 64, **traits: Any
) -> list[Generation]:
    return denoise(model(**traits), prompts, settings, list(seeds), batch_rows=rows)


def counts(one: Generation) -> list[int]:
    return [len(step.committed) for step in one.steps]


@pytest.mark.parametrize("order", sampling.ORDERS)
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_no_mask_is_left_no_banned_id_is_said_and_what_is_committed_stays(order: str, temperature: float) -> None:
    for one in told(Denoising(length=12, steps=5, temperature=temperature, order=order)):
        assert len(one.canvas) == 12 and not set(one.canvas) & {1, 3}
        assert counts(one) == [3, 3, 2, 2, 2] and one.forwards == 5
        assert [one.canvas[place] for step in one.steps for place, *_ in step.committed] == [
            id_ for step in one.steps for _, id_, _ in step.committed
        ]
        assert sorted(order_of(one.steps)) == list(range(12)) and not any(step.remasked for step in one.steps)
        assert one.ids == one.canvas[: one.canvas.index(2) if 2 in one.canvas else 12]
        assert one.stop == ("stop" if 2 in one.canvas else "length")


def test_at_temperature_nought_it_repeats_whatever_the_seed() -> None:
    settings = Denoising(length=12, steps=4)
    assert told(settings) == told(settings, seeds=(9, 8, 7))
    hot = replace(settings, temperature=1.5)
    assert told(hot) == told(hot) and told(hot) != told(hot, seeds=(9, 8, 7))


@pytest.mark.parametrize(
    "settings",
    [
        Denoising(length=12, steps=6, temperature=1.0),
        Denoising(length=12, steps=12, temperature=1.0, threshold=0.3),
        Denoising(length=12, steps=6, block=4, cache="dual"),
        Denoising(length=12, steps=6, block=4, cache="prefix", temperature=1.0),
    ],
    ids=["plain", "threshold", "dual", "prefix"],
)
def test_a_completion_hangs_on_its_prompt_and_seed_alone(settings: Denoising) -> None:
    together = told(settings)
    for number, prompt in enumerate(PROMPTS):
        (alone,) = told(settings, prompts=[prompt], seeds=(number + 1,))
        assert alone.canvas == together[number].canvas and counts(alone) == counts(together[number])
    assert [one.canvas for one in told(settings, rows=1)] == [one.canvas for one in together]


def test_a_step_that_commits_nothing_costs_nothing() -> None:
    (one,) = told(Denoising(length=12, steps=12, schedule="dream"), prompts=[[5]], seeds=(1,))
    assert sum(counts(one)) == 12 and one.forwards == len(one.steps) == 11  # 0, 1, ..., 1, 2


@pytest.mark.parametrize(("schedule", "expected"), [("balanced", [3, 3, 2, 2]), ("dream", [2, 2, 2, 4])])
def test_schedules_commit_their_counts(schedule: str, expected: list[int]) -> None:
    assert counts(told(Denoising(length=10, steps=4, schedule=schedule), prompts=[[5]], seeds=(1,))[0]) == expected


def test_a_threshold_commits_all_that_is_sure_and_at_least_the_surest() -> None:
    one = told(Denoising(length=8, steps=8, threshold=1.5), prompts=[[5]], seeds=(1,))[0]
    assert counts(one) == [1] * 8
    assert counts(told(Denoising(length=8, steps=8, threshold=0.0), prompts=[[5]], seeds=(1,))[0]) == [8]
    own = model().train(False)
    logits = own.trunk(torch.tensor([[5, *[3] * 8]])).detach()[0, :8].double()  # shifted
    logits[:, [1, 3]] = float("-inf")
    middle = float(logits.softmax(-1).max(-1).values.sort().values[-3])  # three tokens are this sure at the first step
    some = told(Denoising(length=8, steps=8, threshold=middle - 1e-6), prompts=[[5]], seeds=(1,))[0]
    assert len(some.steps) < 8 and counts(some)[0] == 3
    for step in some.steps:
        assert all(sure >= middle - 1e-6 for *_, sure in step.committed) or len(step.committed) == 1


def test_blocks_are_uncovered_from_the_left() -> None:
    one = told(Denoising(length=12, steps=7, block=4), prompts=[[5]], seeds=(1,))[0]
    order = order_of(one.steps)
    assert [sorted(order[n : n + 4]) for n in (0, 4, 8)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert counts(one) == [2, 1, 1, 2, 2, 2, 2]  # 3, 2, 2 steps


def test_p2_keeps_as_many_as_the_schedule_says_and_takes_committed_ones_back() -> None:
    settings = Denoising(length=8, steps=4, remask="p2", temperature=2.0)
    gone = 0
    for seed in range(12):
        one = told(settings, prompts=[[5]], seeds=(seed,))[0]
        open_ = 0
        for number, step in enumerate(one.steps):
            open_ += len(step.committed) - len(step.remasked)
            assert open_ == [2, 4, 6, 8][number]
            gone += len(step.remasked)
        assert 3 not in one.canvas
    assert gone > 0


def test_early_stop_ends_where_the_answer_is_whole() -> None:
    settings = Denoising(length=12, steps=12, temperature=1.0)
    prompts, seeds = [[5], [9, 4], [7]] * 20, list(range(60))
    whole, short = (denoise(model(), prompts, replace(settings, early_stop=early), seeds) for early in (False, True))
    ended = [(a, b) for a, b in zip(whole, short, strict=True) if b.forwards < a.forwards]
    assert ended
    for a, b in zip(whole, short, strict=True):
        assert a.ids == b.ids and len(b.canvas) == 12 and 3 not in b.canvas
    for _, b in ended:
        assert b.stop == "stop" and b.canvas[len(b.ids) + 1 :].count(2) > 0


# -- caches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("shift", [True, False])
def test_a_cache_is_exact_at_a_blocks_first_step(cache: str, shift: bool) -> None:
    """With one step per block, every step is a block's first."""
    settings = Denoising(length=12, steps=3, block=4)
    plain, kept = told(settings, shift=shift), told(replace(settings, cache=cache), shift=shift)
    assert [one.canvas for one in plain] == [one.canvas for one in kept]


def test_a_cache_is_exact_where_nothing_lies_outside_of_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block, and a prompt of one token, with which a shifted model's window begins."""
    settings = Denoising(length=12, steps=12)
    for cache in ("prefix", "dual"):
        kept = told(replace(settings, cache=cache), prompts=[[5], [9]], seeds=(1, 2))
        assert [one.canvas for one in kept] == [one.canvas for one in told(settings, prompts=[[5], [9]], seeds=(1, 2))]


def test_the_prefix_cache_is_exact_on_a_block_diffusion_model() -> None:
    settings = Denoising(length=12, steps=12, block=4)
    plain, kept = (told(replace(settings, cache=cache), shift=False, block_size=4) for cache in ("none", "prefix"))
    assert [one.canvas for one in plain] == [one.canvas for one in kept]
    for a, b in zip(plain, kept, strict=True):
        for one, two in zip(a.steps, b.steps, strict=True):
            assert np.allclose([s for *_, s in one.committed], [s for *_, s in two.committed], atol=1e-5)


def test_a_cache_is_an_approximation_elsewhere_and_computes_less() -> None:
    """The states of a window are those of a pass over everything, except for what has changed outside it."""
    own, settings = model().train(False), Denoising(length=12, steps=12, block=4)
    tokens: list[int] = []
    original = Transformer.line

    def counting(self: Transformer, ids: Any, positions: Any, layout: Any, *read: Any) -> Any:
        tokens.append(len(ids))
        return original(self, ids, positions, layout, *read)

    totals = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transformer, "line", counting)
        for cache in sampling.CACHES:
            tokens.clear()
            denoise(own, [[5] * 20], replace(settings, cache=cache), [1])
            totals[cache] = sum(tokens)
    assert totals["none"] == 12 * 32
    assert totals["prefix"] == 3 * 32 + 3 * 13 + 3 * 9 + 3 * 5 and totals["dual"] == 3 * 32 + 9 * 5


# -- what comes out ----------------------------------------------------------------------------------------------------


class Table:
    """The fixture's table of logits in place of a model."""

    def __init__(self, seed: int) -> None:
        self.logs = torch.from_numpy(table(seed))

    def logits(self, noised: Any) -> torch.Tensor:
        canvas = noised.tokens[:, 1:].tolist()
        found = torch.stack([self.logs[STATES[tuple(state)]] for state in canvas])  # (B, L, V)
        return found[noised.asked[:, 1:]]


@pytest.mark.slow
def test_random_order_sampling_has_the_law_that_enumeration_says() -> None:
    """The total variation is at most .025 over 40,000 draws (check 3)."""
    settings = Denoising(length=L, steps=L, temperature=1.0, order="random")
    seen = np.zeros(len(SEQUENCES))
    own: Any = Table(1)
    own.traits, own.parameters = (
        replace(model().traits, mask=MASK, fill=0, banned=(MASK,)),
        lambda: iter([torch.zeros(1)]),
    )
    numbers = {sequence: n for n, sequence in enumerate(SEQUENCES)}
    for first in range(0, 40_000, 1000):
        rows = [sampling._row(n, [0], first + n, L, MASK) for n in range(1000)]
        for _ in sampling._Batch(own, rows, settings).uncover():
            pass
        for row in rows:
            seen[numbers[tuple(row.tokens.tolist())]] += 1
    exact = np.array([order_probability(table(1), sequence) for sequence in SEQUENCES])
    assert 0.5 * np.abs(seen / seen.sum() - exact).sum() <= 0.025


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ([0, 1, 2, 3], {1: (1, 1), 2: (1, 1), 4: (1, 1)}),
        ([3, 2, 1, 0], {1: (0.25, 0.25), 2: (0.25, 0.5), 4: (0.25, 1)}),
        ([0, 2, 1, 3], {1: (0.25, 0.75), 2: (0.25, 1)}),
    ],
)
def test_how_autoregressive_an_order_is(order: list[int], expected: dict[int, tuple[float, float]]) -> None:
    assert {k: (local_ar(order, k), global_ar(order, k)) for k in expected} == expected


def test_a_place_that_was_taken_back_counts_when_it_came_for_good() -> None:
    steps = [CanvasStep([(0, 7, 0.5), (1, 7, 0.5)], []), CanvasStep([(2, 7, 0.5)], [0]), CanvasStep([(0, 8, 0.9)], [])]
    assert order_of(steps) == [1, 2, 0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"steps": 0}, "steps: expected 1 to 8, the length of the canvas, got 0"),
        ({"steps": 9}, "steps: expected 1 to"),
        ({"block": 3}, "block: expected a divisor of 8, the length of the canvas, got 3"),
        ({"block": 2, "steps": 3}, "at least one for each of the 4 blocks"),
        ({"order": "left"}, "order: expected one of low_confidence, margin"),
        ({"cache": "all"}, "cache: expected one of"),
        ({"remask": "p2", "cache": "dual"}, "which is incompatible with `threshold` and `cache`"),
        ({"remask": "p2", "threshold": 0.9}, "which is incompatible with `threshold` and `cache`"),
        ({"threshold": -0.1}, "threshold"),
        ({"top_p": 0.0}, "top_p"),
        ({"temperature": -1.0}, "temperature"),
        ({"schedule": "cosine"}, "schedule"),
        ({"confidence": "cold"}, "confidence"),
        ({"length": 0}, "steps"),
    ],
)
def test_settings_that_cannot_be_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Denoising(**{"length": 8, "steps": 4} | more)


def test_a_wrong_model_prompt_or_number_of_seeds_is_refused() -> None:
    settings, causal = Denoising(length=8, steps=4), Transformer(replace(SHAPE, attention="causal"))
    with pytest.raises(ValueError, match="expected a masked-diffusion model, found a causal one"):
        denoise(causal, [[4]], settings, [0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prompt 0 has 57 tokens; expected 1 to 56"):
        told(settings, prompts=[[4] * 57], seeds=(0,))
    with pytest.raises(ValueError, match="prompt 0 has 0 tokens"):
        told(settings, prompts=[[]], seeds=(0,))
    with pytest.raises(ValueError, match="a seed for each of the 1 prompts, found 3"):
        told(settings, prompts=[[4]])
    with pytest.raises(ValueError, match="block: expected 4, as in training, got None"):
        told(settings, block_size=4, shift=False)


@pytest.mark.parametrize("order", ["margin", "entropy", "low_confidence"])
def test_the_surest_place_comes_first(order: str) -> None:
    own = model().train(False)
    one = denoise(own, [[5, 6]], Denoising(length=6, steps=6, order=order), [0])[0]
    state = [3] * 6
    for step in one.steps:
        ids = torch.tensor([[5, 6, *state]])
        places = [n for n, id_ in enumerate(state) if id_ == 3]
        logits = own.trunk(ids).detach()[0, [1 + n for n in places]].double()  # shifted
        logits[:, [1, 3]] = float("-inf")
        p = logits.softmax(-1)
        top = p.topk(2).values
        score = {
            "low_confidence": top[:, 0],
            "margin": top[:, 0] - top[:, 1],
            "entropy": torch.special.entr(p).sum(-1).neg(),
        }[order]
        ((place, id_, sure),) = step.committed
        assert place == places[int(score.argmax())] and id_ == int(p[int(score.argmax())].argmax())
        assert abs(sure - float(p[int(score.argmax())].max())) < 1e-5
        state[place] = id_


def test_tempered_confidence_looks_at_what_is_sampled_from() -> None:
    settings = Denoising(length=8, steps=8, temperature=0.5, top_p=0.5, confidence="tempered")
    one = told(settings, prompts=[[5]], seeds=(1,))[0]
    raw = told(replace(settings, confidence="raw"), prompts=[[5]], seeds=(1,))[0]
    first, other = one.steps[0].committed[0][2], max(sure for *_, sure in raw.steps[0].committed)
    assert first > other  # a nucleus of half the mass, at a lower temperature


def test_every_order_of_four_places_has_its_measures_between_nought_and_one() -> None:
    for order in itertools.permutations(range(4)):
        assert all(0 <= measure(order, k) <= 1 for measure in (local_ar, global_ar) for k in (1, 2, 3))
