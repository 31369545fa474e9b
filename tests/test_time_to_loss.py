"""Time to loss: its arithmetic worked out by hand, the baseline's recipe, and one tiny run of both sides."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import nanogpt, time_to_loss, time_to_loss_arm
from benchmarks.nanogpt import GPT, Recipe, Shape
from benchmarks.time_to_loss_report import Reached, between, plot, ratio, steps_to, table, verdict
from pipeline.batches.batch import Piece, token_batch
from tests.corpora import write_corpus

SHAPE = Shape(vocab_size=64, width=16, layers=2, heads=2, context=12)


def gpt() -> GPT:
    return GPT(SHAPE, torch.Generator().manual_seed(0))


def test_the_search_goes_up_to_the_first_length_that_reaches_the_target() -> None:
    losses = {100: 2.0, 150: 1.8, 225: 1.5, 338: 1.2}
    found = steps_to(1.6, losses.__getitem__, first=100, factor=1.5, most=1000)
    assert found.steps == 225 and [steps for steps, _ in found.tried] == [100, 150, 225]
    assert found.between == pytest.approx(150 * 1.5 ** (2 / 3))  # two thirds of the way from 1.8 to 1.5


def test_the_search_goes_down_while_fewer_steps_reach_the_target() -> None:
    losses = {100: 1.0, 80: 1.1, 64: 1.3}
    found = steps_to(1.2, losses.__getitem__, first=100, factor=1.25, most=1000)
    assert found.steps == 80 and found.tried == [(64, 1.3), (80, 1.1), (100, 1.0)]
    assert found.between == pytest.approx(64 * 1.25**0.5)


def test_a_target_that_the_most_steps_miss_is_not_reached() -> None:
    found = steps_to(1.0, lambda steps: 2.0, first=100, factor=1.5, most=200)
    assert found == Reached(None, None, [(100, 2.0), (150, 2.0), (200, 2.0)])


def test_without_a_miss_below_it_the_first_hit_counts() -> None:
    assert between({100: 1.0, 200: 0.5}, 1.0) == 100


def test_a_verdict_is_steps_times_seconds_over_those_of_the_baseline() -> None:
    step = {
        "ours": {"seconds": 0.3, "cpu_seconds": 0.2},
        "nanoGPT, bf16": {"seconds": 0.3, "cpu_seconds": 0.1},
        "nanoGPT, bf16, compiled": {"seconds": 0.1, "cpu_seconds": 0.1},
    }
    assert ratio(step, ("ours", 100), ("nanoGPT, bf16", 1000)) == {"seconds": 0.1, "cpu_seconds": 0.2}
    found = verdict(step, {"steps": 100, "compiling": 5.0}, {"steps": 1000, "compiling": 25.0})
    assert found["nanoGPT, bf16"] == {"seconds": 0.1, "cpu_seconds": 0.2, "with_compiling": 0.25, "met": True}
    assert found["nanoGPT, bf16, compiled"] == {"seconds": 0.3, "cpu_seconds": 0.2, "with_compiling": 0.2, "met": True}
    assert not verdict(step, {"steps": 120, "compiling": 0.0}, {"steps": 1000, "compiling": 0.0})[
        "nanoGPT, bf16, compiled"
    ]["met"]


def test_the_clock_leaves_evaluations_out_and_tells_compiling_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time_to_loss_arm.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time_to_loss_arm.time, "process_time", lambda: now[0] / 2)
    clock = time_to_loss_arm.Clock()
    for step in (0, *range(14)):  # the checks before the first step draw step 0 once more
        clock.tick(step)
        now[0] += 10 if step == 0 else 1
        if step == 5:
            before = clock.now()
            now[0] += 100
            clock.leave_out(before)
    assert clock.taken(clock.now()) == (10 + 13, 11.5)
    assert clock.compiling() == (9.0, 4.5)


def test_the_rate_warms_up_and_falls_to_a_tenth() -> None:
    recipe = Recipe(steps=100, rows=1, context=8, rate=1.0, warmup=9)
    assert recipe.rate_at(0) == pytest.approx(0.1) and recipe.rate_at(9) == 1.0
    assert recipe.rate_at(9 + 45) == pytest.approx(0.55, abs=0.01) and recipe.rate_at(100) == pytest.approx(0.1)


def test_a_window_is_consecutive_tokens_and_the_one_behind() -> None:
    rows = nanogpt.windows(np.arange(1000, dtype=np.uint16), rows=3, context=8, seed=1, step=2)
    assert rows.shape == (3, 9) and rows.diff(dim=1).eq(1).all()
    again, other = (nanogpt.windows(np.arange(1000), rows=3, context=8, seed=1, step=step) for step in (2, 3))
    assert torch.equal(rows, again) and not torch.equal(rows, other)


def test_the_baseline_sees_nothing_that_comes_later_and_with_documents_nothing_of_another() -> None:
    model, ids = gpt(), torch.arange(12)[None] * 5 % 64
    changed = ids.clone()
    changed[0, 6] = 63
    before, after = model(ids), model(changed)
    assert torch.allclose(before[0, :6], after[0, :6], atol=1e-6) and not torch.allclose(
        before[0, 7:], after[0, 7:], atol=1e-4
    )
    documents = torch.tensor([[0] * 7 + [1] * 5])
    apart = [model(x, documents=documents)[0, 7:] for x in (ids, changed)]
    assert torch.allclose(apart[0], apart[1], atol=1e-6)


def test_what_the_ablation_decays_and_orthogonalises_of_the_baseline_is_what_its_names_say() -> None:
    from pipeline.learning.optim import groups

    found = groups(gpt())
    assert set(found) == {"embedding", "hidden", "norm_bias"} and len(found["hidden"]) == 8
    assert set(found["embedding"]) == {"embed_tokens.words.weight", "embed_tokens.places.weight"}


def test_bits_per_byte_are_those_of_a_uniform_model() -> None:
    model = gpt()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    batch = token_batch(
        [[Piece(np.arange(1, 7), True), Piece(np.arange(7, 13), True)]],
        np.arange(1),
        packed=12,
        context=12,
        pad=0,
        byte_lengths=np.full(64, 3),
    )
    for whole_rows in (True, False):
        assert time_to_loss_arm.bits_per_byte(model, [batch], whole_rows=whole_rows) == pytest.approx(6 / 3)
    assert time_to_loss_arm.seen_whole(batch).documents.eq(0).all() and batch.documents.max() == 1


def test_the_baseline_learns_and_evaluates_before_each_step_and_at_the_end() -> None:
    line, asked, losses = np.tile(np.arange(16, dtype=np.uint16), 40), [], []
    model, recipe = gpt(), Recipe(steps=60, rows=4, context=12, rate=1e-2, warmup=3)

    def evaluate(step: int) -> None:
        asked.append(step)
        rows = nanogpt.windows(line, rows=8, context=12, seed=9, step=0)
        with torch.no_grad():
            losses.append(
                float(torch.nn.functional.cross_entropy(model(rows[:, :12]).flatten(0, 1), rows[:, 1:].flatten()))
            )

    nanogpt.train(model, line, recipe, lambda step: None, evaluate)
    assert asked == list(range(61))
    assert losses[0] == pytest.approx(np.log(64), abs=0.1) and losses[-1] < 1.0


def test_a_run_is_kept_by_its_specification_and_forgotten_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meta.json").write_text("{}")
    numbers = itertools.count()

    def run(*_: object, **__: object) -> Any:
        said = {"points": [{"step": 1, "bpb": float(next(numbers)), "cpu_seconds": 1.0}]}
        return SimpleNamespace(returncode=0, stdout=json.dumps(said), stderr="")

    monkeypatch.setattr(time_to_loss.subprocess, "run", run)
    spec = {"side": "nanogpt", "threads": 1}
    runs = time_to_loss.Runs(tmp_path, tmp_path, fresh=False)
    assert [time_to_loss.final(runs(s)) for s in (spec, spec, spec | {"steps": 2})] == [0.0, 0.0, 1.0]
    again = time_to_loss.Runs(tmp_path, tmp_path, fresh=True)
    assert [time_to_loss.final(again(spec)) for _ in range(2)] == [2.0, 2.0]


def test_a_run_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meta.json").write_text("{}")
    dead = SimpleNamespace(returncode=1, stdout="", stderr="no such rate")
    monkeypatch.setattr(time_to_loss.subprocess, "run", lambda *_, **__: dead)
    with pytest.raises(RuntimeError, match="nanogpt: no such rate"):
        time_to_loss.Runs(tmp_path, tmp_path, fresh=False)({"side": "nanogpt", "threads": 1})


def test_missing_tokens_are_said_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        time_to_loss.main(["--tokens", str(tmp_path / "none")])
    assert "run dvc repro stage_encode" in capsys.readouterr().err


def test_the_table_and_the_chart_show_what_was_reached_and_what_was_not(tmp_path: Path) -> None:
    reached = {
        "bpb_at_our_steps": 1.7,
        "steps": 300,
        "between": 280,
        "times_longer": 2.5,
        "cpu_seconds": 0.2,
        "tried": [[300, 1.6]],
    }
    missed = reached | {"steps": None, "between": None, "times_longer": None, "tried": [[1200, 1.65]]}
    row = {"cpu_seconds": 0.1, "seconds": 0.2, "with_compiling": 0.15, "met": True}
    report = {
        "target": 1.6,
        "baseline": {"steps": 1200, "best": {}},
        "ours": {"steps": 125},
        "verdict": {"nanoGPT": row},
        "ablations": {"Muon": reached, "mask": missed},
    }
    text = table(report)
    assert "(goal 0.33: met)" in text and " 2.50" in text and "> 1200" in text
    run = {"points": [{"step": step, "bpb": 3.0 - step / 10} for step in (0, 1, 2)]}
    plot(tmp_path / "a.png", {"ours": [run, run]}, {"ours": {"cpu_seconds": 0.5}}, 2.8)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.full
def test_a_tiny_run_compares_both_sides(
    tmp_path: Path, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STAGECOACH_WORK", str(tmp_path / ".work"))
    byte_tokenizer.save(tmp_path / "tokenizer")
    stories = [f"Day {number}: the river runs past {number * 7} stones and a mill." for number in range(60)]
    tokens = write_corpus(tmp_path / "tokens", stories[:50], stories[50:], byte_tokenizer)
    report = time_to_loss.main(["--quick", "--tokens", str(tokens), "--tokenizer", str(tmp_path / "tokenizer")])
    assert "ours / nanoGPT, bf16: CPU time" in capsys.readouterr().out
    assert abs(report["parameters"]["ours"] / report["parameters"]["nanogpt"] - 1) < 0.02
    assert report["verdict"]["nanoGPT, bf16"]["cpu_seconds"] > 0 and report["target"] > 0
