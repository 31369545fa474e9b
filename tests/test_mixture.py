"""Weights: shares of the training rows, subsets and passes, ids and splits of repeated rows, and what is too small."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.ingest import mixture
from pipeline.ingest.entries import FileEntry, PackagesEntry
from pipeline.ingest.mixture import Lot, Stock, combine, draw, hold_out, interleaved, passes
from pipeline.ingest.records import Dialogue, Problem
from pipeline.ingest.sources import DataConfig
from pipeline.run.device import stable_hash
from pipeline.run.errors import DataError
from stages import tasks
from tests.data_stages import TASKS, made
from tests.judges import LengthJudge
from tests.ownfiles import jsonl


def stock(weight: float, sizes: list[int], name: str = "a") -> Stock:
    keys = np.array([stable_hash(name, n) for n in range(len(sizes))], np.uint64)
    return Stock(name, weight, np.array(sizes, np.int64), keys)


def shares(stocks: list[Stock]) -> list[float]:
    return [row["drawn"] for row in mixture.summary(stocks, draw(stocks))]


def dialogue(name: str, words: str = "") -> Dialogue:
    messages = [{"role": "user", "content": words or name}, {"role": "assistant", "content": "Yes."}]
    return Dialogue(id=name, kind="chat", category="c", messages=messages)


def lot(name: str, weight: float | None, num_train: int, **splits: list[Any]) -> Lot[Any]:
    train = [dialogue(f"{name}-{n}") for n in range(num_train)]
    return Lot(name, "files", weight, {"train": train, "val": [], "test": [], **splits})


def test_drawn_shares_are_the_weights_over_a_hundred_thousand_rows() -> None:
    stocks = [stock(w, [1] * n, str(w)) for w, n in ((0.7, 40_000), (0.25, 59_000), (0.05, 1_000))]
    assert shares(stocks) == pytest.approx([0.7, 0.25, 0.05], abs=1e-5)
    sizes = np.random.default_rng(0).integers(1, 20_000, 100_000).tolist()
    stocks = [stock(3, sizes[:60_000], "a"), stock(1, sizes[60_000:], "b")]
    assert shares(stocks) == pytest.approx([0.75, 0.25], abs=1e-5), "of bytes, too"


@settings(max_examples=60, deadline=None)
@given(
    members=st.lists(
        st.tuples(st.floats(0.01, 10), st.lists(st.integers(1, 50), min_size=1, max_size=60)), min_size=1, max_size=5
    ),
    by_row=st.booleans(),
)
def test_every_share_is_met_to_half_a_row_and_every_row_is_drawn_as_often_as_the_others(
    members: list[tuple[float, list[int]]], by_row: bool
) -> None:
    stocks = [stock(w, [1] * len(s) if by_row else s, str(n)) for n, (w, s) in enumerate(members)]
    copies = draw(stocks)
    total, weights = sum(one.total for one in stocks), sum(w for w, _ in members)
    for one, times in zip(stocks, copies, strict=True):
        drawn = int((one.sizes * times).sum())
        assert abs(drawn - one.weight / weights * total) <= 1 + one.sizes.max() / 2
        assert times.max() - times.min() <= 1, "whole passes, and a rest"
    if by_row:
        assert sum(int(times.sum()) for times in copies) == total


def test_new_rows_displace_few_and_the_seed_chooses_others() -> None:
    def taken(num_rows: int, seed: int) -> set[int]:
        keys = np.array([stable_hash("mixture", seed, str(n)) for n in range(num_rows)], np.uint64)
        few = Stock("few", 1.0, np.ones(num_rows, np.int64), keys)
        return set(np.flatnonzero(draw([few, stock(1, [1] * 100)])[0]).tolist())

    old, new = taken(1000, 0), taken(1100, 0)
    assert len(old) == 550 and len({n for n in new if n < 1000} ^ old) < 60
    assert taken(1000, 1) != old


def test_a_beginning_of_any_length_holds_every_list_in_its_proportion() -> None:
    lists = [["a"] * 700, ["b"] * 200, ["c"] * 100]
    mixed = interleaved(lists)
    for length in range(1, 1001):
        counts = Counter(mixed[:length])
        assert all(abs(counts[rows[0]] - length * len(rows) / 1000) <= 2 for rows in lists)


def test_passes_give_a_row_that_is_drawn_again_a_mark_and_the_others_none() -> None:
    drawn = passes(["x", "y"], np.array([3, 2]), lambda row, number: f"{row}{mixture.pass_mark(number)}")
    assert drawn == ["x", "y", "x#pass2", "y#pass2", "x#pass3"]


def test_what_is_drawn_has_unique_ids_and_what_is_held_out_is_there_once() -> None:
    lots = [
        lot("large", 1.0, 90, val=[dialogue("v1")], test=[dialogue("t1")]),
        lot("small", 3.0, 10, val=[dialogue("v2")]),
    ]
    splits, table = combine("dialogues", lots, 0, {})
    ids = [record.id for record in splits["train"]]
    assert len(ids) == len(set(ids)) == 100
    assert Counter(id_.split("-")[0] for id_ in ids) == {"large": 25, "small": 75}
    assert {"small-3", "small-3#pass2", "small-3#pass7"} <= set(ids)
    assert [record.id for record in splits["val"]] == ["v1", "v2"] and [r.id for r in splits["test"]] == ["t1"]
    assert [
        (row["entry"], row["rows"], row["wanted"], row["drawn"], row["times"], row["left_out"]) for row in table
    ] == [("large", 90, 0.25, 0.25, 25 / 90, 65), ("small", 10, 0.75, 0.75, 7.5, 0)]
    text = mixture.shown("dialogues", table).splitlines()
    assert text[1].split() == ["large", "90", "25.0%", "25.0%", "0.28", "65"]


def test_without_weights_every_row_is_there_once_and_there_is_no_table() -> None:
    splits, table = combine("dialogues", [lot("a", None, 5), lot("b", None, 2)], 0, {})
    assert len(splits["train"]) == 7 and table == []


def test_an_entry_with_a_weight_and_nothing_in_it_is_named() -> None:
    with pytest.raises(DataError, match=r"dialogues: none: nothing to train on"):
        combine("dialogues", [lot("a", 1.0, 5), lot("none", 1.0, 0)], 0, {})


def test_a_record_of_two_entries_is_kept_once_and_an_id_of_two_records_gets_a_name_before_it() -> None:
    first, second = lot("a", None, 2), lot("b", None, 0)
    second.splits["train"] = [dialogue("a-0"), dialogue("a-1", "other words")]
    splits, _ = combine("dialogues", [first, second], 0, {})
    assert sorted(record.id for record in splits["train"]) == ["a-0", "a-1", "b/a-1"]


# --- what is held out ------------------------------------------------------------------------------------------------

DATA = DataConfig(source="files", dialogues=["*"])


@pytest.mark.parametrize(("num_rows", "held"), [(1, (0, 0)), (2, (1, 0)), (3, (1, 1)), (9, (1, 1))])
def test_a_row_each_is_held_out_where_rows_allow_and_a_small_test_is_told(
    num_rows: int, held: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    one = lot("a", None, num_rows)
    hold_out("dialogues", [one], DATA)
    assert (len(one.splits["val"]), len(one.splits["test"])) == held
    assert len(one.splits["train"]) == num_rows - sum(held) >= 1
    mixture.tell_small("dialogues", [one], held[1])
    assert f"the test set has only {held[1]} rows; meaningful results need at least 20" in capsys.readouterr().err


def test_the_row_that_is_held_out_mostly_stays_so_when_rows_are_added() -> None:
    def held(num_rows: int) -> str:
        one = lot("a", None, num_rows)
        hold_out("dialogues", [one], DATA)
        return one.splits["test"][0].id

    assert len({held(num_rows) for num_rows in range(10, 60)}) <= 6


def test_a_share_of_nothing_holds_nothing_out() -> None:
    one = lot("a", None, 9)
    hold_out("dialogues", [one], replace(DATA, val_share=0.0, test_share=0.0))
    assert len(one.splits["train"]) == 9


def test_versions_of_a_problem_are_held_out_together() -> None:
    problems = [
        Problem(id=f"{n}", level=1, group="g", key=f"{n % 3}", question="Q", entry_point="f", signature="", tests=[])
        for n in range(9)
    ]
    one = Lot("a", "files", None, {"train": problems, "val": [], "test": []})
    hold_out("problems", [one], DATA)
    keys = [{problem.key for problem in records} for records in one.splits.values()]
    assert [len(k) for k in keys] == [1, 1, 1] and len(set.union(*keys)) == 3


# --- the stage -------------------------------------------------------------------------------------------------------


def own_dialogues(folder: Path, name: str, count: int, **more: Any) -> None:
    (folder / "own").mkdir(parents=True, exist_ok=True)
    rows = [{"question": f"{name} {n}?", "answer": f"Answer {n}."} | more for n in range(count)]
    (folder / "own" / name).write_text(jsonl(*rows))


def built(folder: Path, workers: int, **kinds: Any) -> dict[str, Any]:
    own_dialogues(folder, "mine.jsonl", 40)
    own_dialogues(folder, "val.jsonl", 4)
    data = DataConfig(source="files", **kinds)
    return made(folder, replace(TASKS, data=data, dialogues=60, pairs=6, test_items=2), workers=workers)


def test_dialogues_of_files_and_of_the_generator_are_mixed_by_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "Judge", LengthJudge)
    entries = [FileEntry(files="*.jsonl", weight=0.7), PackagesEntry(source="packages", weight=0.3)]
    found = built(tmp_path / "one", 1, dialogues=entries)
    train = found["dialogues"]["train"]
    assert len(train) == 40 + 60
    assert sum(d.kind == "chat" for d in train) == 70 and len({d.id for d in train}) == 100
    assert {d.category for d in found["dialogues"]["val"]} > {"question"}
    assert found["report"]["mixture"]["dialogues"][0]["entry"] == "*.jsonl"
    assert not any("#pass" in d.id for split in ("val", "test") for d in found["dialogues"][split])
    built(tmp_path / "two", 2, dialogues=entries)
    for path in sorted((tmp_path / "one/out").rglob("*.jsonl")):
        assert path.read_bytes() == (tmp_path / "two/out" / path.relative_to(tmp_path / "one/out")).read_bytes()


def test_kinds_without_entries_are_empty_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "Judge", None)  # nothing is judged
    found = built(tmp_path, 1, dialogues=["*.jsonl"])
    assert {split: len(rows) for split, rows in found["problems"].items()} == dict.fromkeys(
        ("train", "val", "test", "rl"), 0
    )
    assert {split: len(rows) for split, rows in found["preferences"].items()} == dict.fromkeys(
        ("train", "val", "test"), 0
    )
    assert {split: len(rows) for split, rows in found["dialogues"].items()} == {"train": 40, "val": 2, "test": 2}
    assert json.loads(json.dumps(found["report"]["preferences"])) == {"train": 0, "val": 0, "test": 0}


def test_generated_dialogues_show_generated_problems_where_there_are_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "Judge", None)
    found = built(tmp_path, 1, dialogues=["packages"])
    assert Counter(d.kind for d in found["dialogues"]["train"])["code"] == tasks.shared(60)["code"]
    assert found["problems"]["train"] == [] and len(found["dialogues"]["train"]) == 60
