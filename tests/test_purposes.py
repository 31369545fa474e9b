"""Each model is measured by the suites that its purpose calls for, so every comparison in the report has both sides."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import wings
from pipeline.evaluation import suites
from pipeline.ingest.records import Problem
from pipeline.model.transformer import Transformer
from pipeline.report import claims
from pipeline.report.metrics import HEADLINES
from pipeline.run import device
from pipeline.run.config import Runtime
from pipeline.sandbox.judge import SandboxConfig
from pipeline.synthetic import programs
from pipeline.text.repositories import Context
from pipeline.text.tokenizer import Tokenizer
from stages import evaluate
from tests.suites import FEW

CHAT = ("tools", "dpo", "kto", "grpo", "distill", "rlhf")


@pytest.fixture
def plan(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:  # (model, every_suite) -> names of its suites
    monkeypatch.setattr(evaluate, "own_suites", list)
    monkeypatch.setattr(evaluate.checkpoint, "load", lambda _: (tiny_model, byte_tokenizer))
    monkeypatch.setattr(evaluate, "held_out", lambda corpus: [])
    problems = [next(programs.requests(1))]
    monkeypatch.setattr(evaluate, "clean_items", lambda folder, kind, overlap: problems if kind is Problem else [])
    data = dict.fromkeys(("text", "code", "dialogues", "problems", "facts", "overlap", "benchmarks"), tmp_path)

    def suites_of(model: str, every_suite: bool = False) -> list[str]:
        params = evaluate.Params(settings=FEW, sandbox=SandboxConfig(), every_suite=every_suite)
        job: Any = SimpleNamespace(seed=1, workers=1, runtime=Runtime())
        return list(evaluate.measurements(params, job, tmp_path / model, device.hardware("fp32"), **data)[0])

    return suites_of


def test_every_suite_of_the_table_is_one_of_the_plan(plan: Any) -> None:
    every = plan("one of a person's own")
    assert len(every) == 12 + ("memory" in wings.names())
    for model, names in suites.purposes().items():
        assert plan(model) == [name for name in every if name in names] and len(plan(model)) == len(names), model
    assert {name for names in suites.purposes().values() for name in names} == set(every), (
        "a suite that nobody asks for"
    )


def test_every_suite_can_be_asked_for(plan: Any) -> None:
    assert plan("rlhf", every_suite=True) == plan("one of a person's own")


def test_a_chat_model_is_not_measured_by_what_it_left_behind(plan: Any) -> None:
    for model in CHAT:
        assert set(plan(model)) >= {"code", "problems", "tools"}  # the suites that compare models
        assert not set(plan(model)) & {"stories", "stories_held_out", "drills", "transcripts", "facts"}
    assert "stories sampled" in plan("language") and "problems" not in plan("language")


def test_what_a_claim_compares_both_of_its_models_are_measured_by() -> None:
    by_key = {headline.key: headline for headline in HEADLINES}
    for key, model, base, title in claims.better():
        suite = by_key[key].path[0]
        for one in (model, base):
            assert suite in {name.split()[0] for name in suites.purposes()[one]}, (title, one)


def test_every_headline_of_a_causal_model_is_measured_of_some_model() -> None:
    measured = {name.split()[0] for names in suites.purposes().values() for name in names}
    gone = set() if "memory" in wings.names() else {"facts"}
    assert {headline.path[0] for headline in HEADLINES} - measured == {"reward"} | gone


def test_lines_across_files_are_measured_where_the_corpus_has_repositories(plan: Any, tmp_path: Path) -> None:
    assert "cross_file" not in plan("code")
    row = {"text": "x = 1\n", "source": "mine", "path": "a.py", "license": "own"}
    context = Context("mine", (), "a.py").to_json()
    pq.write_table(pa.Table.from_pylist([row | {"context": context}]), tmp_path / "val-00000.parquet")
    assert "cross_file" in plan("code") and "cross_file" in plan("tools", every_suite=True)
    assert "cross_file" not in plan("tools")
