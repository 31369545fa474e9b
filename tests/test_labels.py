"""Batches of labels: what is in them, which prompt gets which other answer, and that a batch is a pure function."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.batches.labels import LabelBatch, LabelSplit, LabelStream
from pipeline.ingest import records
from pipeline.ingest.records import Label
from pipeline.run.errors import DataError
from pipeline.text.tokenizer import Tokenizer


def label(number: int, **changes: Any) -> Label:
    """A prompt and an answer whose lengths depend on the number."""
    values: dict[str, Any] = {
        "id": str(number),
        "source": "made",
        "kind": "story",
        "prompt": [{"role": "user", "content": f"Way {number}{'?' * (1 + number % 4)}"}],
        "answer": [{"role": "assistant", "content": f"{number} left" + "." * (number % 5)}],
        "desirable": number % 3 > 0,
    }
    return Label(**(values | changes))


def write(folder: Path, labels: list[Label], val: int = 5) -> Path:
    records.write(folder / "train.jsonl", labels)
    records.write(folder / "val.jsonl", [label(100 + n) for n in range(val)])
    return folder


def stream(folder: Path, tokenizer: Tokenizer, **changes: Any) -> LabelStream:
    values: dict[str, Any] = {"max_prompt": 60, "max_length": 120, "answers": 4, "seed": 1}
    return LabelStream(folder, tokenizer, **(values | changes))


def parts(batch: LabelBatch, tokenizer: Tokenizer, *, mismatched: bool = False) -> list[tuple[str, str]]:
    """For each row, the text before the trained tokens and the trained text."""
    rows, found = batch.mismatched if mismatched else batch.matched, []
    for ids, targets, documents in zip(rows.input_ids, rows.targets, rows.documents, strict=True):
        start = int((targets >= 0).nonzero()[0]) + 1
        prompt, answer = ids[:start].tolist(), targets[targets >= 0].tolist()
        assert int((documents >= 0).sum()) == start + len(answer), "the answer ends the row"
        found.append((tokenizer.decode(prompt), tokenizer.decode(answer)))
    return found


def test_each_prompt_also_gets_the_answer_before_it_in_the_whole_step(
    byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """(x_1, y_n), (x_2, y_1), ..., however the step is cut."""
    made = stream(write(tmp_path, [label(n) for n in range(11)]), byte_tokenizer)
    for step in range(5):
        rows = made.rows(step, 120)
        whole = made.batch(step, 120, rows)
        matched, mismatched = (parts(whole, byte_tokenizer, mismatched=side) for side in (False, True))
        assert [prompt for prompt, _ in mismatched] == [prompt for prompt, _ in matched]
        answers = [answer for _, answer in matched]
        assert [answer for _, answer in mismatched] == [answers[-1], *answers[:-1]]
        for some in ([2], [3, 0], [1, 2, 3]):
            cut = made.batch(step, 120, rows[some])
            assert parts(cut, byte_tokenizer, mismatched=True) == [mismatched[n] for n in some]
            assert cut.desirable.tolist() == whole.desirable[some].tolist()


def test_an_epoch_has_every_label_once_with_its_verdict(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    labels = [label(n) for n in range(12)]
    made = stream(write(tmp_path, labels), byte_tokenizer)
    epochs: list[list[str]] = []
    for epoch in range(2):
        seen: dict[str, bool] = {}
        for step in range(3 * epoch, 3 * epoch + 3):
            batch = made.batch(step, 120, made.rows(step, 120))
            seen |= dict(
                zip((answer for _, answer in parts(batch, byte_tokenizer)), batch.desirable.tolist(), strict=True)
            )
        assert {answer.split()[0]: verdict for answer, verdict in seen.items()} == {
            one.id: one.desirable for one in labels
        }
        epochs.append(list(seen))
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1])


def test_a_label_that_a_step_has_twice_has_two_partners(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """At the border between two epochs, and where there are fewer labels than a step takes."""
    made = stream(write(tmp_path, [label(n) for n in range(3)]), byte_tokenizer, answers=5)
    rows = made.rows(0, 120)
    assert len(set(rows.tolist())) == 5
    answers = [answer for _, answer in parts(made.batch(0, 120, rows), byte_tokenizer)]
    mismatched = [answer for _, answer in parts(made.batch(0, 120, rows), byte_tokenizer, mismatched=True)]
    assert mismatched == [answers[-1], *answers[:-1]] and len(set(answers)) == 3


def test_a_mismatched_answer_is_cut_at_the_length_limit(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "Which way? " * 4}]
    long = [{"role": "assistant", "content": "0123456789" * 5}]
    labels = [label(0, prompt=asked), label(1, answer=long)]
    made = stream(write(tmp_path, labels), byte_tokenizer, answers=2, max_length=90)
    batch = made.batch(0, 90, made.rows(0, 90))
    assert batch.mismatched.input_ids.shape[1] == 90 and batch.matched.input_ids.shape[1] <= 90
    assert batch.counts["answers"] == 2 and int((batch.mismatched.targets >= 0).any(1).sum()) == 2


def test_the_held_out_labels_come_in_one_order_and_end_with_the_tokens(
    byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    made = stream(write(tmp_path, [label(n) for n in range(4)], val=150), byte_tokenizer)
    batches = list(made.evaluation(10**6))
    assert [batch.counts["answers"] for batch in batches] == [64, 64, 22]
    found = [answer.split()[0] for batch in batches for _, answer in parts(batch, byte_tokenizer)]
    assert sorted(map(int, found)) == list(range(100, 250)) and found != sorted(found)
    for batch in batches:
        answers = [answer for _, answer in parts(batch, byte_tokenizer)]
        assert [a for _, a in parts(batch, byte_tokenizer, mismatched=True)] == [answers[-1], *answers[:-1]]
    first = batches[0].counts["tokens"]
    assert len(list(made.evaluation(first))) == 1 and len(list(made.evaluation(first + 1))) == 2


@pytest.mark.parametrize("desirable", [True, False])
def test_one_kind_of_answers_alone_is_refused(byte_tokenizer: Tokenizer, tmp_path: Path, desirable: bool) -> None:
    folder = write(tmp_path, [label(n, desirable=desirable) for n in range(7)])
    counts = "7 good and 0 bad" if desirable else "0 good and 7 bad"
    with pytest.raises(DataError, match=rf"train\.jsonl: expected both good and bad answers, found {counts}; add some"):
        stream(folder, byte_tokenizer)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([], r"0 of 0 labels cannot be used \(the file is empty\)"),
        (
            [label(n, answer=[{"role": "assistant", "content": " "}]) for n in range(2)],
            r"2 of 2 labels .*2 empty answer",
        ),
        ([label(0, prompt=[{"role": "user", "content": "Which? " * 20}]), label(1)], r"\(1 prompt too long\)"),
        ([label(0, answer=[{"role": "assistant", "content": "x" * 200}]), label(1)], r"\(1 answer too long\)"),
        ([label(0, prompt=[{"role": "robot", "content": "x"}])], r"label 0: .*robot"),
    ],
)
def test_labels_that_cannot_be_used_are_counted_or_named(
    byte_tokenizer: Tokenizer, tmp_path: Path, labels: list[Label], message: str
) -> None:
    records.write(tmp_path / "train.jsonl", labels)
    with pytest.raises(DataError, match=message):
        LabelSplit(tmp_path / "train.jsonl", byte_tokenizer, 60, 120)


def test_a_missing_file_says_what_makes_it(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected labels here, found none; run dvc repro stage_tasks"):
        LabelSplit(tmp_path / "test.jsonl", byte_tokenizer, 60, 120)


def test_the_fingerprint_is_of_ids_labels_seed_and_size(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    labels = [label(n) for n in range(4)]
    folder = write(tmp_path, labels)
    prints = {stream(folder, byte_tokenizer).fingerprint, stream(folder, byte_tokenizer).fingerprint}
    assert len(prints) == 1
    prints |= {stream(folder, byte_tokenizer, **more).fingerprint for more in ({"seed": 2}, {"answers": 2})}
    write(tmp_path, [replace(labels[0], desirable=not labels[0].desirable), *labels[1:]])
    prints.add(stream(folder, byte_tokenizer).fingerprint)
    assert len(prints) == 4
    assert np.array_equal(stream(folder, byte_tokenizer).rows(2, 1), [8, 9, 10, 11])
