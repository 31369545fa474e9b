"""Windows and examples under masks: what a batch holds, and that masks do not depend on batch, process or padding."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.batches.pairs import PairSplit
from pipeline.diffusion import files
from pipeline.diffusion.batches import (
    ExampleSplit,
    ExampleStream,
    MaskableRow,
    Noise,
    NoisedBatch,
    NoisedPairs,
    PlainExamples,
    WindowStream,
    drawn_pairs,
    evaluated_row,
    noised_row,
)
from pipeline.ingest import records
from pipeline.run.errors import DataError
from pipeline.text.tokenizer import Tokenizer
from tests.corpora import CONTEXT, TOKENIZER, stream
from tests.corpora import token_folder as token_folder
from tests.diffusion_workspace import answered
from tests.workspace import pair, problem


def windows(corpus: Path, noise: Noise | None = None, **changes: Any) -> WindowStream:
    seed = changes.pop("seed", 1)
    return WindowStream(
        stream(corpus, seed=seed),
        noise or Noise(),
        name="code",
        seed=seed,
        byte_lengths=TOKENIZER.byte_lengths,
        **changes,
    )


def examples(folder: Path, tokenizer: Tokenizer, noise: Noise | None = None, **changes: Any) -> ExampleStream:
    values: dict[str, Any] = {"rows": 4, "norm": "answer", "seed": 1} | changes
    traits = files.traits(tokenizer, shift=True)
    lengths = {name: values.pop(name, default) for name, default in (("max_prompt", 80), ("max_new", 96))}
    train, val = (ExampleSplit(folder / f"{split}.jsonl", tokenizer, traits, **lengths) for split in ("train", "val"))
    return ExampleStream(train, val, traits, noise or Noise(), **values)


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    for split, first, count in (("train", 0, 10), ("val", 100, 3)):
        records.write(tmp_path / f"{split}.jsonl", map(answered, range(first, first + count)))
    return tmp_path


def parts(batch: NoisedBatch, row: int) -> tuple[list[int], list[int]]:
    """Tokens and masked places of a row without its padding."""
    real = batch.noised.documents[row] >= 0
    return batch.noised.tokens[row][real].tolist(), batch.noised.masks[row].nonzero().flatten().tolist()


@pytest.mark.parametrize("kind", ["windows", "examples"])
@pytest.mark.parametrize("step", [0, 3])
def test_masks_are_the_same_in_one_micro_batch_or_several_and_on_two_ranks(
    kind: str, step: int, corpus: Path, problems: Path, byte_tokenizer: Tokenizer
) -> None:
    """The step cut in two, cut into every second row as for two ranks, and cut into single rows."""
    made: Any = windows(corpus) if kind == "windows" else examples(problems, byte_tokenizer, rows=8)
    rows = made.rows(step, CONTEXT)
    whole = made.batch(step, CONTEXT, rows)
    for cut in ([rows[:2], rows[2:]], [rows[::2], rows[1::2]], [rows[n : n + 1] for n in range(len(rows))]):
        for some in cut:
            batch = made.batch(step, CONTEXT, np.array(some))
            weights, at = batch.weights, 0
            for n, row in enumerate(some):
                place = rows.tolist().index(row)
                assert parts(batch, n) == parts(whole, place)
                count = int(batch.noised.masks[n].sum())
                begin = int(whole.noised.masks[:place].sum())
                assert torch.equal(weights[at : at + count], whole.weights[begin : begin + count])
                at += count


def test_a_window_hides_nothing_in_front_of_its_documents_and_in_padding(corpus: Path) -> None:
    made = windows(corpus)
    for step in range(6):
        one = made.batch(step, CONTEXT, made.rows(step, CONTEXT))
        assert not one.noised.masks[(one.noised.positions == 0) | (one.noised.documents < 0)].any()
        ids = one.noised.tokens[one.noised.masks]
        assert TOKENIZER.mask not in ids and one.counts["tokens"] >= len(ids)


def test_weights_are_the_inverse_of_each_rows_probability(corpus: Path) -> None:
    made = windows(corpus)
    one = made.batch(2, CONTEXT, made.rows(2, CONTEXT))
    per_row = one.weights.split(one.noised.masks.sum(1).tolist())
    rates = [1 / float(weights[0]) for weights in per_row if len(weights)]
    assert all(len(set(weights.tolist())) <= 1 for weights in per_row)
    spread = sorted((rate - 1e-3) / (1 - 1e-3) for rate in rates)
    assert np.allclose(np.diff(spread), 1 / 4, atol=1e-4)  # four rows a step, t_i = (u + i / 4) mod 1


def test_one_time_for_the_batch_is_one_for_all_of_its_rows(corpus: Path) -> None:
    made = windows(corpus, Noise(t_scope="batch"))
    assert len(set(made.batch(2, CONTEXT, made.rows(2, CONTEXT)).weights.tolist())) == 1


def test_the_loss_of_uniform_predictions_is_ln_v_on_average(corpus: Path) -> None:
    """The weights sum to 1 per maskable token."""
    made = windows(corpus)
    total = count = 0.0
    for step in range(120):
        one = made.batch(step, CONTEXT, made.rows(step, CONTEXT))
        total, count = total + float(one.weights.sum()), count + one.counts["tokens"]
    assert abs(total / count - 1) < 0.1


def test_a_second_pass_hides_other_tokens_and_another_seed_too(corpus: Path) -> None:
    made = windows(corpus)
    per_pass = made._corpus.rows_per_epoch
    row = int(made.rows(0, CONTEXT)[0])
    again = next(step for step in range(1000) if row + per_pass in made.rows(step, CONTEXT).tolist())
    one, two = made.batch(0, CONTEXT, np.array([row])), made.batch(again, CONTEXT, np.array([row + per_pass]))
    assert torch.equal(one.noised.tokens, two.noised.tokens) and not torch.equal(one.noised.masks, two.noised.masks)
    assert (
        windows(corpus, seed=2).fingerprint != made.fingerprint != windows(corpus, Noise(t_scope="batch")).fingerprint
    )


def test_attention_is_annealed_for_so_many_steps(corpus: Path) -> None:
    made = windows(corpus, anneal_steps=4)
    seen = [made.batch(step, CONTEXT, made.rows(step, CONTEXT)[:1]).noised.sight for step in range(5)]
    shares = [1.0 if s is None else float(s.float().mean()) for s in seen]
    assert shares == sorted(shares) and shares[0] < 0.75 and seen[3] is None and seen[4] is None
    assert next(made.evaluation(10)).noised.sight is None


def test_the_validation_masks_are_fixed_and_never_empty(corpus: Path) -> None:
    one, two = (next(windows(corpus, seed=seed).evaluation(100)) for seed in (1, 2))
    assert torch.equal(one.noised.masks, two.noised.masks) and torch.equal(one.weights, two.weights)
    assert (one.noised.masks.sum(1) > 0).all()
    maskable = ((one.noised.positions > 0) & (one.noised.documents >= 0)).sum(1)
    for hidden, length, weights in zip(
        one.noised.masks.sum(1), maskable, one.weights.split(one.noised.masks.sum(1).tolist()), strict=True
    ):
        assert torch.allclose(weights, length / hidden)


def test_a_tokens_weight_may_be_that_of_the_clean_ones_nearby() -> None:
    row = MaskableRow(np.arange(5), np.zeros(5, dtype=int), np.array([0.9, 0.1, 0.1, 0.9, 0.9]))
    masks, weights = noised_row(row, 0.5, Noise(token_weight="cart"))
    assert masks.tolist() == [False, True, True, False, False] and np.allclose(weights, [0, 0.3285, 0.36, 0, 0])


def test_blocks_have_a_time_each_and_lie_beside_clean_tokens(corpus: Path) -> None:
    row = MaskableRow(np.arange(6), np.array([0, 0, 0, 1, 1, 1]), np.array([0.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]))
    masks, weights = noised_row(row, 0.9, Noise(block_size=3))
    assert masks.tolist() == [True] * 3 + [False] * 3 and np.allclose(weights[:3], 1 / (0.999 * 0.9 + 0.001))
    masks, weights = evaluated_row(row, 0.9)
    assert masks[:3].sum() == 3 and masks[3:].sum() == 1 and set(weights[masks]) == {1.0, 3.0}
    one = (made := windows(corpus, Noise(block_size=16))).batch(0, CONTEXT, made.rows(0, CONTEXT))
    assert one.noised.clean is not None and torch.equal(one.noised.clean, one.noised.tokens)
    assert one.noised.sight is not None and one.noised.sight.shape[-2:] == (2 * CONTEXT, 2 * CONTEXT)


# -- examples ----------------------------------------------------------------------------------------------------------


def test_an_answer_its_end_and_the_filling_may_be_hidden_and_the_prompt_never(
    problems: Path, byte_tokenizer: Tokenizer
) -> None:
    made = examples(problems, byte_tokenizer)
    filled = 0
    for step in range(12):
        one = made.batch(step, 0, made.rows(step, 0))
        for n, (example, _) in enumerate(made.chosen(made.rows(step, 0))):
            begin, real = len(example.prompt), int((one.noised.documents[n] >= 0).sum())
            tokens = one.noised.tokens[n].tolist()
            assert tokens[:real][begin : begin + len(example.answer)] == example.answer
            assert example.answer[-1] == byte_tokenizer.turn_end
            assert set(tokens[begin + len(example.answer) : real]) <= {byte_tokenizer.turn_end}
            assert (real - begin) % 32 == 0 and real - begin <= 96
            assert not one.noised.masks[n, :begin].any() and not one.noised.masks[n, real:].any()
            filled += int(one.noised.masks[n, begin + len(example.answer) : real].sum())
    assert filled > 0


@pytest.mark.parametrize(("norm", "per"), [("answer", "rows"), ("tokens", "tokens"), ("batch", "rows")])
def test_a_rows_loss_is_divided_as_it_is_asked(norm: str, per: str, problems: Path, byte_tokenizer: Tokenizer) -> None:
    """By the size of its own canvas, by that of all canvases, or not at all; each token's loss is 1 here."""
    made = examples(problems, byte_tokenizer, norm=norm)
    total, counts = 0.0, {"rows": 0, "tokens": 0}
    for step in range(300):
        one = made.batch(step, 0, made.rows(step, 0))
        total += float(one.weights.sum())
        counts = {name: counts[name] + one.counts[name] for name in counts}
    expected = counts["tokens"] / counts["rows"] if norm == "batch" else 1.0
    assert abs(total / counts[per] / expected - 1) < 0.1


def test_each_pass_goes_through_all_examples_on_other_canvases(problems: Path, byte_tokenizer: Tokenizer) -> None:
    made = examples(problems, byte_tokenizer, rows=10)
    first, second = (made.chosen(made.rows(step, 0)) for step in (0, 1))
    assert sorted(e.id for e, _ in first) == sorted(e.id for e, _ in second) == sorted(map(str, range(10)))
    assert [turn for _, turn in first] == [0] * 10 and [turn for _, turn in second] == [1] * 10
    sizes = [made.batch(step, 0, made.rows(step, 0)).counts["tokens"] for step in range(4)]
    assert len(set(sizes)) > 1


def test_the_control_predicts_the_answers_and_their_ends(problems: Path, byte_tokenizer: Tokenizer) -> None:
    made = examples(problems, byte_tokenizer)
    one = PlainExamples(made, byte_tokenizer).batch(0, 0, made.rows(0, 0))
    for n, (example, _) in enumerate(made.chosen(made.rows(0, 0))):
        assert one.targets[n][one.targets[n] >= 0].tolist() == example.answer
    (val,) = PlainExamples(made, byte_tokenizer).evaluation(10**6)
    assert len(val.input_ids) == 3


def test_text_that_holds_the_mask_is_refused(
    problems: Path, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_tokenizer, "mask", byte_tokenizer.encode("x")[0])
    with pytest.raises(DataError, match="problem 0 contains the mask token"):
        examples(problems, byte_tokenizer)


def test_missing_problems_say_what_makes_them(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="run dvc repro stage_tasks"):
        examples(tmp_path, byte_tokenizer)
    records.write(tmp_path / "train.jsonl", [problem(0)])  # without an answer
    with pytest.raises(DataError, match="0 of 0 problems with an answer do not fit"):
        examples(tmp_path, byte_tokenizer)


# -- pairs -------------------------------------------------------------------------------------------------------------


def pairs(folder: Path, tokenizer: Tokenizer, **changes: Any) -> NoisedPairs:
    for split, first, count in (("train", 0, 10), ("val", 100, 3)):
        records.write(folder / f"{split}.jsonl", map(pair, range(first, first + count)))
    splits = [PairSplit(folder / f"{split}.jsonl", tokenizer, 60, 120) for split in ("train", "val")]
    values: dict[str, Any] = {
        "pad": tokenizer.pad,
        "pairs": 4,
        "max_length": 120,
        "draws": 3,
        "stratified": True,
        "seed": 1,
    }
    return NoisedPairs(*splits, **(values | changes))


def test_each_answer_has_masks_of_its_own_which_the_batch_does_not_move(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    made = pairs(tmp_path, byte_tokenizer)
    rows = made.rows(0, 0)
    whole = made.batch(0, 0, rows)
    assert len(whole.inputs) == 3 and whole.scales.shape == (3, 8) and whole.counts["pairs"] == 4
    for n, row in enumerate(rows):
        alone = made.batch(0, 0, np.array([row]))
        width = alone.inputs[0].tokens.shape[1]
        for a, b in zip(alone.inputs, whole.inputs, strict=True):
            assert torch.equal(a.masks, b.masks[[n, n + 4], :width])
        assert torch.equal(alone.scales, whole.scales[:, [n, n + 4]])
    for one, scale in zip(whole.inputs, whole.scales, strict=True):
        assert torch.allclose(scale, whole.lengths / one.masks.sum(1))
        assert (one.documents[one.masks] == 0).all()


def test_every_token_of_an_answer_and_its_end_may_be_hidden_and_nothing_else(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    made = pairs(tmp_path, byte_tokenizer, draws=64)
    encoded = made.train.pairs[0]
    one = drawn_pairs([encoded], [[7], [8]], byte_tokenizer.pad, 64, stratified=True)
    for row, piece in enumerate((encoded.chosen, encoded.rejected)):
        ever = torch.stack([draw.masks[row] for draw in one.inputs]).any(0).numpy()
        assert ever[: len(piece.ids)].tolist() == np.asarray(piece.trained).tolist()
        assert piece.ids[-1] == byte_tokenizer.turn_end and not ever[len(piece.ids) :].any()


def test_stored_references_come_back_by_pair_and_pass(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    made = pairs(tmp_path, byte_tokenizer)
    for turn in (0, 1):
        made.references["train", turn] = np.stack([np.arange(10) + 100 * turn, np.arange(10) + 100 * turn + 50], 1)
    rows = made.rows(2, 0)  # places 8 to 11, across the border of two passes
    told = made.batch(2, 0, rows).reference
    chosen = made._chosen(rows)
    assert told is not None
    assert told.tolist() == [float(n + 100 * turn + side) for side in (0, 50) for n, turn in chosen]
    assert {turn for _, turn in chosen} == {0, 1}
    assert made.read("train", 1, 14).tolist() == sorted(n for n, _ in made._chosen(np.arange(10, 14)))
    assert len(made.read("train", 0, 14)) == 10 and len(made.read("val", 0, 14)) == 3


def test_a_fingerprint_knows_how_many_masks_there_are(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    made = {
        pairs(tmp_path, byte_tokenizer, **more).fingerprint
        for more in ({}, {"draws": 4}, {"stratified": False}, {"seed": 2})
    }
    assert len(made) == 4


def test_uniform_weights_have_the_mean_that_they_should() -> None:
    rng, found = np.random.default_rng(0), []
    for _ in range(4000):
        row = MaskableRow(np.arange(6), np.zeros(6, dtype=int), rng.random(6))
        found.append(noised_row(row, float(rng.random()), Noise())[1].sum() / 6)
    assert abs(np.mean(found) - 1) < 4 * np.std(found) / math.sqrt(len(found))
    assert replace(Noise(), cart_p=0.5).cart_p == 0.5
