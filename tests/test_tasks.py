"""The stage of conversations, problems and pairs: shares, splits that share nothing, and what leaves or joins."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.ingest import intake, own_files
from pipeline.ingest.intake import RowCounts
from pipeline.ingest.mixture import Lot
from pipeline.ingest.records import Problem
from pipeline.ingest.sources import DataConfig
from pipeline.run.config import Runtime
from pipeline.run.errors import ConfigError, DataError
from pipeline.sandbox import servers
from pipeline.sandbox.judge import Candidate, Judge, SandboxConfig
from pipeline.synthetic import preferences, stories, tools
from pipeline.synthetic import programs as synthetic_programs
from stages import tasks
from stages.tasks import Params
from tests.conftest import ROOT
from tests.data_stages import TASKS, Made, made
from tests.judges import LengthJudge

FEW = replace(TASKS, dialogues=20, problems=10, rl_problems=2, pairs=3, test_items=1)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "Judge", LengthJudge)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Made:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "Judge", LengthJudge)
        return made(tmp_path_factory.mktemp("usual"))


def test_every_split_has_what_was_asked_for(usual: Made) -> None:
    assert {split: len(rows) for split, rows in usual["dialogues"].items()} == {"train": 100, "val": 20, "test": 22}
    assert {split: len(rows) for split, rows in usual["problems"].items()} == {
        "train": 60,
        "val": 10,
        "test": 20 + 111,  # a request for each operation that has tests
        "rl": 8,
    }
    assert {split: len(rows) for split, rows in usual["preferences"].items()} == {"train": 30, "val": 10, "test": 30}
    facts = {split: len(rows) for split, rows in usual["facts"].items()}
    assert facts["train"] == 4 * 4 * 3 and facts["val"] + facts["test"] == 4 * 4 and facts["control"] == 4
    assert usual["report"]["kinds"] == {"choice": 9, "code": 33, "copy": 4, "story": 5, "talk": 13, "tools": 36}


def test_every_stretch_of_the_dialogues_holds_the_six_kinds_in_their_shares(usual: Made) -> None:
    kinds = [d.kind for d in usual["dialogues"]["train"]]
    for length in range(1, 101):
        counts = {kind: kinds[:length].count(kind) - length * share for kind, share in tasks.SHARES.items()}
        assert max(map(abs, counts.values())) <= 1, (length, counts)


def test_splits_share_no_item(usual: Made) -> None:
    for kind in ("dialogues", "problems", "preferences", "facts"):
        ids = [record.id for rows in usual[kind].values() for record in rows]
        assert len(ids) == len(set(ids)), kind
    keys = [(split, p.key) for split, rows in usual["problems"].items() for p in rows]
    assert len({key for _, key in keys}) == len(set(keys))
    openings = [{d.messages[0]["content"] for d in rows} for rows in usual["dialogues"].values()]
    assert not openings[0] & openings[1] and not openings[0] & openings[2] and not openings[1] & openings[2]


def test_problems_for_reinforcement_have_tests_and_no_answer(usual: Made) -> None:
    assert all(p.answer is None and p.tests for p in usual["problems"]["rl"])
    assert all(p.answer is not None for p in usual["problems"]["train"])


def test_stories_to_train_on_are_not_held_out_and_val_and_test_are_apart() -> None:
    paths = {split: tasks._paths(split, 60) for split in ("train", "val", "test")}
    assert all(len(set(found)) == 60 for found in paths.values())
    for split, found in paths.items():
        assert {stories.is_held_out(path) for path in found} == {split != "train"}
    assert not set(paths["val"]) & set(paths["test"])
    assert tasks._paths("test", 0) == []


@pytest.mark.slow
@pytest.mark.full
def test_equal_runs_give_equal_bytes_and_another_seed_others(tmp_path: Path, fake: None) -> None:
    small = replace(TASKS, dialogues=20, problems=10, rl_problems=2, pairs=6, test_items=3)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        made(tmp_path / name, small, seed=seed)
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a/out").rglob("*.jsonl"))
    assert len(files) == 20
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    assert all(
        (tmp_path / "a" / f).read_bytes() != (tmp_path / "c" / f).read_bytes() for f in files if "problems" in str(f)
    )


@pytest.mark.slow
@pytest.mark.full
def test_noise_swaps_generated_training_pairs_and_pairs_that_people_gave_join_them_unswapped(
    usual: Made, tmp_path: Path, fake: None
) -> None:
    (tmp_path / "feedback").mkdir()
    good, bad = ({"role": "assistant", "content": text} for text in ("Yes.", "No."))
    row = {"prompt": [{"role": "user", "content": "Is it?"}], "chosen": [good], "rejected": [bad]}
    (tmp_path / "feedback/preferences.jsonl").write_text(json.dumps(row) + "\n")
    found = made(tmp_path, replace(TASKS, label_noise=0.2, dialogues=20, problems=10))["preferences"]
    *noisy, given = found["train"]
    assert [p.source for p in noisy] == ["generated"] * 30
    assert sum(p.flipped for p in noisy) == 6
    assert [p.gold_chosen < p.gold_rejected for p in noisy] == [p.flipped for p in noisy]
    assert (given.source, given.flipped, given.chosen[0]["content"]) == ("feedback", False, "Yes.")
    assert found["test"] == usual["preferences"]["test"]


SMALL = replace(TASKS, dialogues=20, problems=10, rl_problems=2, pairs=20, test_items=3)


def choice(number: int, **more: Any) -> dict[str, Any]:
    """A row as the service appends it."""
    good, bad = ({"role": "assistant", "content": text} for text in ("Yes.", "No."))
    return {
        "id": f"page-{number}",
        "prompt": [{"role": "user", "content": f"Is it {number}?"}],
        "chosen": [good],
        "rejected": [bad],
        **more,
    }


def test_thousands_of_rows_that_one_person_gave_are_no_more_than_their_share_of_the_pairs(
    tmp_path: Path, fake: None
) -> None:
    """5,000 poisoned rows, then two from somebody else: at most a fifth of the training pairs, and both people are
    heard.
    """
    (tmp_path / "feedback").mkdir()
    rows = [choice(n, given_by="key-00000001") for n in range(5000)]
    rows += [choice(n, given_by="key-00000002") for n in (5000, 5001)]
    (tmp_path / "feedback/preferences.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = made(tmp_path, SMALL)
    train = found["preferences"]["train"]
    given = [p for p in train if p.source == "feedback"]
    assert (len(train), len(given)) == (25, 5)
    assert [p.given_by for p in given].count("key-00000002") == 2
    assert found["report"]["feedback"] == {
        "rows": 5002,
        "kept": 5,
        "duplicates": 0,
        "rejected": 0,
        "not_reviewed": 0,
        "over_share": 4997,
        "kept_by": {"key-00000001": 3, "key-00000002": 2},
    }


def test_feedback_that_is_cut_or_no_utf8_costs_its_own_rows_and_stops_nothing(tmp_path: Path, fake: None) -> None:
    (tmp_path / "feedback").mkdir()
    lines = [json.dumps(choice(n)).encode() for n in range(4)]
    lines[1] = lines[1][:-30]
    lines[2] = lines[2].replace(b"Yes.", b"\xff\xfe")
    (tmp_path / "feedback/preferences.jsonl").write_bytes(b"\n".join([*lines, b"[1]", b""]))
    found = made(tmp_path, SMALL)
    assert [p.id for p in found["preferences"]["train"] if p.source == "feedback"] == ["page-0", "page-3"]
    assert (found["report"]["feedback"]["kept"], found["report"]["feedback"]["rejected"]) == (2, 3)
    named = [
        json.loads(line) for line in (tmp_path / "out/preferences/feedback-rejected.jsonl").read_text().splitlines()
    ]
    assert [(row["file"], row["line"]) for row in named] == [("preferences.jsonl", n) for n in (2, 3, 5)]


def test_feedback_in_which_no_row_can_be_read_stops_nothing(tmp_path: Path, fake: None) -> None:
    (tmp_path / "feedback").mkdir()
    (tmp_path / "feedback/preferences.jsonl").write_bytes(b"\x00\xff{" * 50)
    found = made(tmp_path, SMALL)
    assert len(found["preferences"]["train"]) == 20 and found["report"]["feedback"]["rejected"] == 1


def thumb(number: int, **more: Any) -> dict[str, Any]:
    """A label as the service appends it."""
    answer = [{"role": "assistant", "content": "Yes."}]
    prompt = choice(number)["prompt"]
    return {"id": f"page-{number}", "prompt": prompt, "answer": answer, "desirable": number % 2 == 0, **more}


def test_labels_are_the_pairs_of_their_split_taken_apart_and_the_thumbs_of_the_page(tmp_path: Path, fake: None) -> None:
    """The page's pairs are not included, since together with the thumbs they would exceed its share."""
    (tmp_path / "feedback").mkdir()
    (tmp_path / "feedback/preferences.jsonl").write_text(json.dumps(choice(0)) + "\n")
    (tmp_path / "feedback/labels.jsonl").write_text("".join(json.dumps(thumb(n)) + "\n" for n in range(30)) + "[1]\n")
    found = made(tmp_path, SMALL)
    for split, labels in found["labels"].items():
        pairs = [pair for pair in found["preferences"][split] if pair.source != "feedback"]
        apart = [label for label in labels if label.source != "feedback"]
        assert [(label.prompt, label.answer, label.desirable) for label in apart] == [
            side for p in pairs for side in ((p.prompt, p.chosen, True), (p.prompt, p.rejected, False))
        ]
        assert len({label.id for label in labels}) == len(labels) == 2 * len(pairs) + (10 if split == "train" else 0)
    report = found["report"]
    assert report["feedback_labels"]["kept"] == 10 == 0.2 * len(found["labels"]["train"])
    assert (report["feedback"]["kept"], report["feedback_labels"]["rejected"]) == (1, 1)
    assert report["good_labels"]["test"] == len(found["preferences"]["test"])
    assert (tmp_path / "out/labels/feedback-rejected.jsonl").is_file()
    assert (
        made(tmp_path / "none", replace(SMALL, feedback=None))["report"]
        .keys()
        .isdisjoint({"feedback", "feedback_labels"})
    )


def test_labels_of_the_user_take_the_place_of_the_pairs(tmp_path: Path, fake: None) -> None:
    (tmp_path / "own/labels").mkdir(parents=True)
    rows = [{"prompt": f"Q{n}?", "completion": "A.", "label": n % 3 > 0} for n in range(60)]
    wrong = {"prompt": "Q?", "completion": "A.", "label": "perhaps"}
    (tmp_path / "own/labels/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, wrong]))
    own = DataConfig(
        source="files", labels=["labels/*"], preferences=["packages"], max_rejected=0.1, val_share=0.1, test_share=0.1
    )
    found = made(tmp_path, replace(SMALL, data=own))
    asked = {label.prompt[0]["content"]: label.desirable for split in found["labels"].values() for label in split}
    assert asked == {f"Q{n}?": n % 3 > 0 for n in range(60)}
    assert all(found["labels"].values()) and len(found["preferences"]["train"]) == 20
    named = json.loads((tmp_path / "out/labels/rejected.jsonl").read_text())
    assert (named["line"], named["field"]) == (61, "label")


@pytest.mark.slow
@pytest.mark.full
def test_problems_of_the_user_take_the_place_of_generated_ones(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()

    def row(number: int, **more: Any) -> dict[str, Any]:
        test = {"assert": f"assert f{number}(1) == 2", "visible": False}
        return {
            "id": f"mine-{number}",
            "level": 1,
            "group": "own",
            "key": str(number),
            "question": f"Write f{number}.",
            "entry_point": f"f{number}",
            "signature": f"f{number}(x)",
            "tests": [test],
            **more,
        }

    answers = [{"answer": synthetic_programs.fenced(f"def f{n}(x):\n    return x + 1")} for n in range(8)]
    train = [row(n, **answers[n]) for n in range(4)] + [row(8)]
    (tmp_path / "own/train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in train) + "{broken\n")
    (tmp_path / "own/val.jsonl").write_text("".join(json.dumps(row(n, **answers[n])) + "\n" for n in range(4, 8)))
    data = DataConfig(
        source="files", problems=["*.jsonl"], dialogues=["packages"], preferences=["packages"], max_rejected=0.5
    )
    found = made(tmp_path, replace(TASKS, data=data, dialogues=40, pairs=6, test_items=2))
    read_again: Any = own_files.read_files(tmp_path / "own", data, "problems", tmp_path / "again.jsonl")
    held_out = [
        row.record.entry_point for row in read_again if row.split == "val"
    ]  # a hash of the id holds out rows of train, too
    assert {"f4", "f5", "f6", "f7"} <= set(held_out)
    assert {split: [p.entry_point for p in rows] for split, rows in found["problems"].items()} == {
        "train": [f"f{n}" for n in range(4) if f"f{n}" not in held_out],
        "val": held_out[::2],
        "test": held_out[1::2],
        "rl": ["f8"],
    }
    assert {d.kind for d in found["dialogues"]["train"]} == {"tools", "choice", "code", "copy", "story", "talk"}
    (rejected,) = map(json.loads, (tmp_path / "out/problems/rejected.jsonl").read_text().splitlines())
    assert (rejected["file"], rejected["line"]) == ("train.jsonl", 6)


PLUS = {"question": "Write f that adds one.", "answer": "def f(x):\n    return x + 1", "tests": ["assert f(1) == 2"]}
FAULTY: dict[str, tuple[dict[str, Any], str]] = {
    "lies": (PLUS | {"tests": ["assert f(1) == 2", "assert f(2) == 4"]}, "answer: .*(wrong, value: 1 of 2 tests pass)"),
    "raises": (PLUS | {"answer": "```python\ndef f(x):\n    return y\n```"}, "NameError: name 'y' is not defined"),
    "ends": (PLUS | {"answer": "import sys\n\ndef f(x):\n    sys.exit(0)"}, "answer: .*error, exit"),
    "sleeps": (PLUS | {"answer": "def f(x):\n    while True:\n        pass"}, "answer: .*timeout"),
    "talks": (PLUS | {"answer": "Just add one."}, "answer: .*syntax"),
    "elsewhere": (PLUS | {"answer": "def g(x):\n    return x + 1"}, "the source defines no f"),
    "unsafe": (
        PLUS | {"tests": ["assert f.__name__ == 'f'", "assert f(1).real == 2"], "entry_point": "f"},
        "tests: none of",
    ),
    "unsafe_rl": (
        {"question": "Write f.", "tests": ["assert f(open('x')) == 1"], "entry_point": "f"},
        "tests: none of",
    ),
}


def test_problems_of_which_only_the_tests_are_known_have_a_held_out_part_too(tmp_path: Path) -> None:
    """Even where no id's hash holds one out; and the ids have not changed."""
    rows = {f"p{n}": {k: v for k, v in PLUS.items() if k != "answer"} | {"entry_point": "f"} for n in range(6)}
    params = own_problems(tmp_path, rows)
    found = made(tmp_path, replace(params, data=replace(params.data, val_share=1e-9, test_share=1e-9)))["problems"]
    assert {split: len(records) for split, records in found.items()} == {"train": 0, "val": 1, "test": 1, "rl": 4}
    names = ("group", "question", "entry_point", "signature")
    plain = Problem(id="", level=1, key="", tests=[], **dict.fromkeys(names, "f"))
    assert intake._content_hash(plain)[0].hex() == "e0ab9c7b83722387c4031765dc5b15e4"


def own_problems(folder: Path, rows: dict[str, dict[str, Any]]) -> Params:
    (folder / "own").mkdir(parents=True)
    text = "".join(json.dumps(row | {"id": name}) + "\n" for name, row in rows.items())
    (folder / "own/problems.jsonl").write_text(text)
    data = DataConfig(source="files", problems=["problems.jsonl"], dialogues=["packages"], max_rejected=0.9)
    return replace(TASKS, data=data, dialogues=20, pairs=3, test_items=2)


@pytest.mark.parametrize("name", FAULTY)
def test_a_problem_that_no_test_can_judge_or_whose_solution_fails_stops_the_stage_and_is_named(
    tmp_path: Path, name: str
) -> None:
    row, reason = FAULTY[name]
    good = {f"good{n}": PLUS | {"question": f"Write f, version {n}."} for n in range(30)}
    params = own_problems(tmp_path, good | {name: row})
    with pytest.raises(
        DataError, match=rf"(?s)1 of 31 problems are invalid.*problems.jsonl:31: problem '{name}': .*{reason}"
    ) as caught:
        made(tmp_path, params)
    assert "good" not in str(caught.value)
    assert not any((tmp_path / "out").iterdir())


def test_a_message_names_five_wrong_problems_and_counts_the_rest(tmp_path: Path) -> None:
    rows = {f"bad{n}": PLUS | {"question": f"{n}", "tests": ["assert f(1) == 3"]} for n in range(7)}
    with pytest.raises(DataError, match=r"7 of 7 problems are invalid.*The first 5:") as caught:
        made(tmp_path, own_problems(tmp_path, rows))
    assert [f"'bad{n}'" in str(caught.value) for n in range(7)].count(True) == 5


def test_brought_problems_are_refused_where_there_is_no_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "JAIL", tmp_path / "missing.py")
    with pytest.raises(ConfigError, match=r"safely needs Linux with seccomp.*allow_unsafe"):
        made(tmp_path, own_problems(tmp_path, {"good": PLUS}))


def test_wrong_problems_of_the_hub_leave_up_to_max_rejected_and_are_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def problem(number: int, expected: int) -> Problem:
        tests = [{"assert": f"assert f({number}) == {expected}", "visible": False}]
        return Problem(
            id=f"p{number}",
            level=1,
            group="easy",
            key=str(number),
            question="Q",
            entry_point="f",
            signature="",
            tests=tests,
            answer="def f(x):\n    return x",
        )

    def tried(bad: int) -> tuple[dict[str, list[Any]], dict[str, int]]:
        splits = {"train": [problem(n, n + (n < bad)) for n in range(20)], "test": [problem(99, 99)]}
        lot = Lot("a/b", "hub", None, splits, {p.id: "part" for ps in splits.values() for p in ps})
        counts = {"accepted": 21, "duplicates": 0, "rejected": 3, "dropped": 0}
        tallies = {"problems": RowCounts(dict(counts), {"part": counts})}
        data = DataConfig(source="hub", max_rejected=0.05)
        job: Any = SimpleNamespace(workers=1, runtime=Runtime())
        tasks._try_out([lot], replace(TASKS, data=data), job, tmp_path, tallies)
        return lot.splits, tallies["problems"].totals

    splits, counts = tried(1)
    assert [p.id for p in splits["train"]] == [f"p{n}" for n in range(1, 20)] and len(splits["test"]) == 1
    assert counts == {"accepted": 20, "duplicates": 0, "rejected": 3, "dropped": 1}
    (row,) = map(json.loads, (tmp_path / "problems-wrong.jsonl").read_text().splitlines())
    assert (row["id"], row["field"]) == ("p0", "answer") and "0 of 1 tests pass" in row["reason"]
    assert "problem 'p0': answer: the solution fails" in capsys.readouterr().err
    with pytest.raises(DataError, match="2 of 21 problems are invalid"):
        tried(2)


@pytest.mark.parametrize("change", [{"pairs": 0}, {"label_noise": 0.5}, {"label_noise": -0.1}, {"test_items": 0}])
def test_counts_and_shares_out_of_range_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected (at least 1|a fraction in \[0, 0\.5\))"):
        replace(TASKS, **change)


@pytest.mark.slow
@pytest.mark.full
def test_labels_of_code_are_what_the_sandbox_says(tmp_path: Path) -> None:
    found = made(tmp_path, replace(TASKS, pairs=60), workers=2)
    pairs = [p for p in found["preferences"]["train"] if p.kind == "code"]
    asked = {p.id: p for p in tasks.programs.problems("train", 220, 2)}
    programs, golds = [], []
    for pair in pairs:
        problem = asked[pair.id.removeprefix("train-").rpartition("-")[0]]
        for message, gold in ((pair.chosen[0], pair.gold_chosen), (pair.rejected[0], pair.gold_rejected)):
            hidden = [test for test in problem.tests if not test["visible"]]
            programs.append(
                (
                    message["content"],
                    Candidate(
                        source=synthetic_programs.unfenced(message["content"]),
                        entry_point=problem.entry_point,
                        tests=hidden,
                    ),
                )
            )
            golds.append(gold)
    with Judge(SandboxConfig(), 1) as judge:
        verdicts = list(judge.judge(program for _, program in programs))
    again = [
        preferences.code_gold(content, verdict.score or 0.0)
        for (content, _), verdict in zip(programs, verdicts, strict=True)
    ]
    assert again == golds
    assert sum(gold == 1.0 for gold in golds) >= len(pairs) // 3
    assert min(chosen - rejected for chosen, rejected in zip(golds[::2], golds[1::2], strict=True)) >= 0.1 - 1e-9


def test_records_from_worker_processes_are_those_of_one_run() -> None:
    for kind, records in (("problems", synthetic_programs.problems), ("dialogues", tools.dialogues)):
        whole = list(records("train", 230, 3))
        assert tasks.generate(tasks.Chunk(kind, "train", 150, 230, 3)) == whole[150:]
        assert tasks._generated(kind, {"train": 230}, 3, workers=1) == {"train": whole}  # chunks of 200


def test_answers_to_be_paired_run_in_the_sandbox_of_its_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[SandboxConfig] = []

    class Taking(LengthJudge):
        def __init__(self, config: SandboxConfig, workers: int, url: str | None = None) -> None:
            super().__init__(config, workers, url)
            asked.append(config)

    monkeypatch.setattr(tasks, "Judge", Taking)
    config = SandboxConfig(preload=("json",))
    made(tmp_path, replace(FEW, sandbox=config))
    assert asked == [replace(config, allow_unsafe=True)]  # our own programs


def test_our_own_programs_run_where_there_is_no_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_one = made(tmp_path / "with", FEW)["preferences"]
    shutil.copytree(ROOT / "pipeline/sandbox", tmp_path / "sandbox")
    jail = tmp_path / "sandbox/jail.py"
    whole, refused = jail.read_text(), 'raise kernel.Refused("no seccomp")'
    jail.write_text(whole.replace("self_test(alone=alone)", refused, 1))
    assert refused in jail.read_text()
    monkeypatch.setattr(servers, "JAIL", jail)
    assert made(tmp_path / "without", FEW)["preferences"] == with_one
    assert any(pair.kind == "code" for pair in with_one["train"])
    assert "there is no sandbox here: programs run with resource limits only" in caplog.text
