"""How far people's pairs and labels are trusted: review, share, turns. Every row is accounted for."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.ingest import own_files
from pipeline.ingest.own_files import FeedbackConfig
from pipeline.ingest.records import Label, Pair


def row(number: int, **more: Any) -> dict[str, Any]:
    sides = {name: [{"role": "assistant", "content": said}] for name, said in (("chosen", "Yes."), ("rejected", "No."))}
    return {"id": f"page-{number}", "prompt": [{"role": "user", "content": f"Is it {number}?"}], **sides, **more}


def taken(folder: Path, rows: list[Any], others: int = 16, **config: Any) -> tuple[list[Pair], dict[str, Any]]:
    path = folder / "preferences.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    found, told = own_files.feedback(path, Pair, FeedbackConfig(**config), others, folder / "rejected.jsonl")
    assert (
        told["rows"]
        == len(rows)
        == sum(told[name] for name in ("kept", "duplicates", "rejected", "not_reviewed", "over_share"))
    )
    assert len(found) == told["kept"] == sum(told["kept_by"].values())
    return found, told


@pytest.mark.parametrize(
    ("share", "others", "most"), [(0.2, 16, 4), (0.2, 0, 0), (0.5, 7, 7), (0.0, 100, 0), (0.2, 200, 50), (0.3, 7, 3)]
)
def test_they_are_at_most_their_share_of_all_pairs(tmp_path: Path, share: float, others: int, most: int) -> None:
    found, told = taken(tmp_path, [row(n) for n in range(100)], others, share=share)
    assert len(found) == most and told["over_share"] == 100 - most
    assert len(found) <= share * (len(found) + others) + 1e-9


def test_within_their_share_all_are_taken_in_the_order_of_the_file(tmp_path: Path) -> None:
    found, told = taken(tmp_path, [row(n) for n in range(4)])
    assert [p.id for p in found] == [f"page-{n}" for n in range(4)] and told["kept_by"] == {"nobody named": 4}
    assert {p.source for p in found} == {"feedback"}


def test_only_reviewed_rows_are_taken_where_that_is_asked_for(tmp_path: Path) -> None:
    marks = [True, False, "true", 1, None, True]
    found, told = taken(tmp_path, [row(n, reviewed=mark) for n, mark in enumerate(marks)], 100, accept="reviewed")
    assert [p.id for p in found] == ["page-0", "page-5"] and told["not_reviewed"] == 4
    assert len(taken(tmp_path, [row(n, reviewed=mark) for n, mark in enumerate(marks)], 100)[0]) == 6


def test_reviewed_rows_come_first_and_givers_take_turns(tmp_path: Path) -> None:
    rows = [row(n, given_by="key-a") for n in range(50)] + [row(n, given_by="key-b") for n in range(50, 52)]
    rows += [row(60, given_by="key-a", reviewed=True), row(61)]
    found, told = taken(tmp_path, rows, 24)
    assert len(found) == 6 and "page-60" in {p.id for p in found}
    assert told["kept_by"] == {"key-a": 3, "key-b": 2, "nobody named": 1}
    assert [int(p.id.removeprefix("page-")) for p in found] == sorted(int(p.id.removeprefix("page-")) for p in found)


def test_a_new_row_displaces_one_at_most(tmp_path: Path) -> None:
    rows = [row(n, given_by=f"key-{n % 3}") for n in range(60)]
    before = {p.id for p in taken(tmp_path, rows, 60)[0]}
    for number in range(60, 90):
        after = {p.id for p in taken(tmp_path, [*rows, row(number, given_by="key-1")], 60)[0]}
        assert len(before - after) <= 1 and len(after) == len(before) == 15


def test_rows_that_cannot_be_read_are_named_and_counted(tmp_path: Path) -> None:
    broken = row(2) | {"chosen": row(2)["rejected"]}
    found, told = taken(
        tmp_path, [row(0), [1], broken, {"id": 3}, row(0), row(0) | {"prompt": row(5)["prompt"]}, row(4)]
    )
    assert [p.id for p in found] == ["page-0", "page-4"]
    assert (told["rejected"], told["duplicates"]) == (4, 1)
    named = [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines()]
    assert [(entry["line"], entry["field"]) for entry in named] == [
        (2, "row"),
        (3, "rejected"),
        (4, "chosen"),
        (6, "id"),
    ]


def test_without_a_file_there_is_nothing(tmp_path: Path) -> None:
    found, told = own_files.feedback(tmp_path / "none.jsonl", Pair, FeedbackConfig(), 10, tmp_path / "rejected.jsonl")
    assert found == [] and told["rows"] == 0 and not (tmp_path / "rejected.jsonl").exists()


@pytest.mark.parametrize("wrong", [{"accept": "some"}, {"share": 1.0}, {"share": -0.1}])
def test_a_wrong_value_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"accept: expected all or reviewed|share: expected a share in \[0, 1\)"):
        FeedbackConfig(**wrong)


def test_labels_are_believed_as_far_as_pairs_are(tmp_path: Path) -> None:
    def label(number: int, **more: Any) -> dict[str, Any]:
        asked, answer = row(number), [{"role": "assistant", "content": "Yes."}]
        return {"id": asked["id"], "prompt": asked["prompt"], "answer": answer, "desirable": number % 2 == 0, **more}

    rows = [label(n, given_by="key-a") for n in range(50)] + [label(50, given_by="key-b"), label(51, reviewed=True)]
    path = tmp_path / "labels.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in [*rows, label(60, desirable="yes"), rows[0]]))
    found, told = own_files.feedback(path, Label, FeedbackConfig(share=0.2), 16, tmp_path / "rejected.jsonl")
    assert len(found) == 4 and {"page-50", "page-51"} <= {one.id for one in found}
    assert all(one.desirable == (int(one.id.removeprefix("page-")) % 2 == 0) for one in found)
    assert {one.source for one in found} == {"feedback"}
    assert (told["rows"], told["kept"], told["duplicates"], told["rejected"], told["over_share"]) == (54, 4, 1, 1, 48)
    named = json.loads((tmp_path / "rejected.jsonl").read_text())
    assert (named["line"], named["field"]) == (53, "desirable")
