"""The stage writes three files (numbers, items and curves) from held-out data alone, the same each time."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.evaluation.suites import Subject
from pipeline.ingest.records import Dialogue, Text, write
from pipeline.model import checkpoint
from pipeline.model.transformer import Transformer
from pipeline.report.metrics import HEADLINES, lookup
from pipeline.run import device
from pipeline.run.config import Runtime
from pipeline.run.errors import ConfigError, DataError
from pipeline.run.tracking import Tracker
from pipeline.run.workdir import Job, StopRequest
from pipeline.sandbox.judge import Judge, SandboxConfig
from pipeline.synthetic import drills, preferences, programs, stories, tools
from pipeline.synthetic.toolbox import fresh as fresh_tools
from pipeline.synthetic.toolbox import unseen
from pipeline.text.tokenizer import Tokenizer
from stages import evaluate
from tests.corpora import write_raw
from tests.suites import FEW, HALF, PARAMS, write_set


class NoSandbox(Judge):
    def __enter__(self) -> "NoSandbox":
        raise ConfigError("sandbox: no name spaces here")


def test_held_out_texts_are_those_of_the_val_files_in_order(tmp_path: Path) -> None:
    folder = write_raw(
        tmp_path / "text", val_1=[("c", "s", "3")], val_0=[("a", "s", "1"), ("b", "s", "2")], train_0=[("x", "s", "0")]
    )
    assert [t.text for t in evaluate.held_out(folder)] == ["a", "b", "c"]


def test_a_long_document_counts_with_its_beginning_alone(tmp_path: Path) -> None:
    folder = write_raw(tmp_path / "code", val_0=[("ab" * 9000, "s", "1"), ("short", "s", "2")])
    assert [len(t.text) for t in evaluate.held_out(folder)] == [evaluate.DOCUMENT_CHARACTERS, 5]


def test_fresh_items_are_as_many_others_with_tools_that_no_other_test_has() -> None:
    """Items that this project did not generate stay."""
    own = Dialogue(id="mine", kind="tools", category="simple", messages=[], tools=[])
    words = Dialogue(id="talk/test/1/0", kind="talk", category="greeting", messages=[], tools=[])
    known = [*tools.dialogues("test", 40, 1), *tools.unserved_dialogues(9, 1), own, words]
    fresh = tools.fresh_dialogues(known, 7)
    assert len(fresh) == len(known) and fresh[-2:] == [own, words]
    assert not {d.id for d in fresh[:-2]} & {d.id for d in known}
    called = {name for d in fresh for m in d.messages for name, _ in tools.calls(m)}
    names = {domain: {t.name for t in part()} for domain, part in {"unseen": unseen, "fresh": fresh_tools}.items()}
    assert called & names["fresh"] and not called & names["unseen"]
    before = {name for d in known for m in d.messages for name, _ in tools.calls(m)}
    assert before & names["unseen"] and not before & names["fresh"]
    problem, request = replace(next(programs.problems("test", 1, 1)), id="mine"), next(programs.requests(1))
    others = programs.fresh_problems([*programs.problems("test", 20, 1), problem, request], 7)
    assert len(others) == 22 and others[-2] is problem and others[-1] is request  # there is one wording of a request
    assert not {p.id for p in others[:-2]} & {p.id for p in programs.problems("test", 20, 1)}
    assert [p.group for p in others[:20]] == [p.group for p in programs.problems("test", 20, 1)]


def test_texts_are_prose_known_families_and_unseen_families() -> None:
    texts = [
        Text(text="", source=s, path=s, license="") for s in ("docs", "gift", stories.HELD_OUT[0], "readme", "trade")
    ]
    assert [[t.source for t in part] for part in evaluate.split_texts(texts)] == [
        ["docs", "readme"],
        ["gift", "trade"],
        [stories.HELD_OUT[0]],
    ]


def test_the_curve_is_pass_at_k_over_the_k_that_were_sampled() -> None:
    numbers = {
        "problems": {
            f"pass_at_{k}{end}": k / 10 + d for k in (1, 5) for end, d in (("", 0), ("_low", -0.1), ("_high", 0.1))
        }
    }
    assert evaluate.curve_rows(numbers) == [
        {"step": 1, "curve": "pass_at_k", "value": 0.1, "low": 0.0, "high": 0.2},
        {"step": 5, "curve": "pass_at_k", "value": 0.5, "low": 0.4, "high": 0.6},
    ]
    assert evaluate.curve_rows({"problems": {"skipped": "skipped: no sandbox"}}) == evaluate.curve_rows({}) == []


def test_without_a_sandbox_problems_say_so(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    subject = Subject(tiny_model, byte_tokenizer, FEW, 1)
    result = evaluate.solve(subject, list(programs.problems("test", 4, 1)), lambda: NoSandbox(SandboxConfig(), 1))
    assert (result.numbers, result.rows) == ({"skipped": "skipped: no sandbox"}, [])
    assert "skipping problems: sandbox: no name spaces here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["HumanEval.jsonl.gz"], "expected files in data/benchmarks, which DVC tracks, got 'HumanEval.jsonl.gz'"),
        (["data/benchmarks/../own/a.jsonl"], "expected files in data/benchmarks"),
        (["/data/benchmarks/a.jsonl"], "python -m pipeline.evaluation.benchmarks MODEL_DIR FILE"),
        (["data/benchmarks/a.jsonl", "data/benchmarks/x/a.jsonl.gz"], "expected files with different names, got a, a"),
    ],
)
def test_test_sets_that_nobody_watches_or_that_share_a_name_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PARAMS, benchmarks=names)


def test_a_wrong_test_set_stops_the_stage_before_the_model_is_read(tmp_path: Path) -> None:
    write_set(tmp_path / "wrong.jsonl", [{"text": "a story"}])
    paths: dict[str, Any] = dict.fromkeys(
        ("model", "text", "code", "dialogues", "problems", "facts", "overlap", "summary", "items", "curves"),
        tmp_path / "missing",
    )
    job: Any = SimpleNamespace(name="evaluate@m", runtime=Runtime(compile=False))
    with pytest.raises(DataError, match=r"wrong\.jsonl:1: expected a row of HumanEval"):
        evaluate.run(replace(PARAMS, benchmarks=["data/benchmarks/wrong.jsonl"]), job, benchmarks=tmp_path, **paths)


@pytest.mark.slow
@pytest.mark.full
def test_a_model_is_measured_into_three_files_the_same_each_time(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = Transformer(replace(tiny_model.config, max_context=4096), torch.Generator().manual_seed(0))
    checkpoint.save(tmp_path / "model", model, byte_tokenizer, {"key": "k"})
    told = [
        (stories.story(f"stories/{family}/50"), family, f"stories/{family}/50") for family in ("gift", "trade", "grow")
    ]
    source = "".join(f"def function_{n}(value):\n    return value + {n}\n\n\n" for n in range(6))
    text = write_raw(tmp_path / "text", val_0=[("Prose. " * 40, "docs", "docs/1"), *told], train_0=[("x", "s", "0")])
    code = write_raw(tmp_path / "code", val_0=[(source, "package", "a.py")])
    write(
        tmp_path / "dialogues/test.jsonl",
        [*tools.dialogues("test", 24, 1), preferences.story_dialogue("stories/gift/50")],
    )
    asked = [*islice(programs.requests(1), 4), *programs.problems("test", 12, 1)]
    write(tmp_path / "problems/test.jsonl", asked)
    for split, known in drills.facts(4, 1).items():
        write(tmp_path / f"facts/{split}.jsonl", known)
    write_set(tmp_path / "benchmarks/own/HumanEval.jsonl.gz", [HALF])

    def measured(name: str) -> list[bytes]:
        outs = {
            "summary": tmp_path / name / "m.json",
            "items": tmp_path / name / "m.jsonl",
            "curves": tmp_path / name / "m.csv",
        }
        (tmp_path / name).mkdir()
        job = Job(
            stage="evaluate",
            item="m",
            key="k",
            seed=1,
            folder=tmp_path,
            workers=1,
            runtime=Runtime(),
            tracker=Tracker("evaluate", tmp_path, {}, {}, quiet=True),
            lineage={"key": "k"},
            stop=StopRequest(),
        )
        inputs: dict[str, Any] = {"model": tmp_path / "model", "text": text, "code": code}
        inputs |= {name: tmp_path / name for name in ("dialogues", "problems", "facts", "overlap.json")}
        inputs["overlap"] = inputs.pop("overlap.json")
        inputs["overlap"].write_text('{"dialogues": [], "problems": []}')
        params = replace(PARAMS, benchmarks=["data/benchmarks/own/HumanEval.jsonl.gz"])
        evaluate.run(params, job, **inputs, benchmarks=tmp_path / "benchmarks", **outs)
        return [path.read_bytes() for path in outs.values()]

    first, second = measured("a"), measured("b")
    assert first == second
    numbers = json.loads(first[0])
    assert set(numbers) == {
        "text",
        "stories",
        "stories_held_out",
        "code",
        "drills",
        "transcripts",
        "problems",
        "requests",
        "tools",
        "answers",
        "facts",
        "benchmarks",
        "settings",
        "lineage",
    }
    assert (
        numbers["text"]["documents"],
        numbers["stories"]["documents"],
        numbers["stories_held_out"]["documents"],
    ) == (1, 2, 1)
    assert {"story_rate", "bpb", "left_out", "samples_left_out"} <= set(numbers["stories"])
    missing = [headline.path for headline in HEADLINES if lookup(numbers, headline) is None]
    assert missing == [("code", "bpb_bound"), ("reward", "accuracy")], (
        "what no suite writes would be a row that never appears; masked models and reward models write these"
    )
    assert numbers["settings"]["precision"] == device.hardware().precision
    assert (numbers["settings"]["data_seed"], numbers["settings"]["stories"], numbers["lineage"]) == (
        1,
        3,
        {"key": "k"},
    )
    assert numbers["requests"]["n"] == 4 and "request" not in numbers["problems"]
    assert (numbers["benchmarks"]["HumanEval"]["form"], numbers["benchmarks"]["HumanEval"]["n"]) == ("chat", 1)
    rows = [json.loads(line) for line in first[1].decode().split("\n") if line]
    assert {row["suite"] for row in rows} >= {"stories", "gaps", "benchmarks/HumanEval", "benchmarks/HumanEval/tests"}
    answered = [row for row in rows if "output" in row]
    assert all(row["stop"] in ("stop", "length", "") and len(row["output"]) <= 2000 for row in answered)
    assert {row["suite"] for row in rows if "bits" in row} == {"text", "stories", "stories_held_out", "code"}
    assert all("item" in row for row in answered if not row["suite"].endswith("/tests")), "comparisons need it"
    assert all(headline.items(rows) for headline in HEADLINES if lookup(numbers, headline) is not None)
    for headline in HEADLINES:  # comparisons by item count the rows just as the headline number does
        if headline.rows is not None and lookup(numbers, headline) is not None:
            counted = [headline.counted(row) for row in headline.items(rows).values()]
            value = sum(top for top, _ in counted) / sum(bottom for _, bottom in counted)
            assert value == pytest.approx(lookup(numbers, headline)["value"], rel=1e-3), headline.key  # type: ignore[index]
    assert first[2].decode().splitlines()[0].startswith("step,curve,high,low,value")
