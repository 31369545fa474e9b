"""Where the stages hand on what the runtime block says: the address of the sandbox service, the number of workers."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.evaluation import benchmarks
from pipeline.evaluation.suites import SuiteResult
from pipeline.ingest.mixture import Lot
from pipeline.ingest.records import Dialogue, Problem, write
from pipeline.learning.reference import Reference, Start
from pipeline.learning.settings import PairConfig
from pipeline.model.transformer import Transformer
from pipeline.rl import models
from pipeline.rl.models import CausalSetting
from pipeline.run.config import SandboxAddress
from pipeline.run.errors import ConfigError
from pipeline.run.workdir import Job
from pipeline.sandbox.judge import SandboxConfig
from pipeline.synthetic import programs
from pipeline.text.tokenizer import Tokenizer
from stages import corpus, encode, evaluate, reward, tasks
from tests.corpora import documents, write_corpus
from tests.data_stages import TASKS, Machine, made
from tests.data_stages import planted_machine as planted_machine
from tests.judges import LengthJudge
from tests.loop import job
from tests.suites import DOUBLE, write_set
from tests.suites import PARAMS as EVALUATE
from tests.workspace import Workspace

URL, WORKERS = "http://machine:8801", 3
ASKED = (SandboxConfig(), WORKERS, URL)


class NotHere(Exception):
    """Ends a stage as soon as it has asked for what is tested."""


class Judges:
    """Stands in for `Judge` and records its arguments. Entering one raises `error`."""

    def __init__(self, error: type[Exception] = NotHere) -> None:
        self.error = error
        self.made: list[tuple[SandboxConfig, int, str | None]] = []

    def __call__(self, config: SandboxConfig, workers: int, url: str | None = None) -> "Judges":
        self.made.append((config, workers, url))
        return self

    def __enter__(self) -> None:
        raise self.error("no sandbox here")

    def __exit__(self, *_: object) -> None:
        pass


def at_work(folder: Path) -> Job:
    """A job with an address and workers."""
    return replace(job(folder, sandbox=SandboxAddress(url=URL)), workers=WORKERS)


# -- runtime.sandbox.url -----------------------------------------------------------------------------------------------


def test_reinforcement_judges_where_the_address_says(
    tmp_path: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    judges = Judges(ConfigError)
    monkeypatch.setattr(models, "RememberingJudge", judges)
    start = Start(tiny_model, byte_tokenizer, Reference(tiny_model, adapted=False), None)
    config: Any = None
    with CausalSetting(start, config, at_work(tmp_path)).judge(SandboxConfig(), wanted=()) as judge:
        assert judge is None
    with CausalSetting(start, config, job(tmp_path)).judge(SandboxConfig(), wanted=()) as judge:
        assert judge is None
    assert judges.made == [ASKED, (SandboxConfig(), 1, None)]


def test_the_reward_stage_judges_where_the_address_says(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    judges = Judges()
    monkeypatch.setattr(models, "RememberingJudge", judges)
    params = reward.Params(
        centering=0.0,
        label_flip=0.0,
        own_prompts=0,
        calibration_answers=4,
        answer_tokens=24,
        sandbox=SandboxConfig(),
        fit=PairConfig(steps=1, learning_rate=1e-3, pairs=4, max_prompt=60, max_length=120),
    )
    with pytest.raises(NotHere):
        reward.run(
            params,
            at_work(workspace.folder / "work"),
            base=Path("models/tools"),
            pairs=Path("data/preferences"),
            out=Path("models/new"),
        )
    assert judges.made == [ASKED]


def test_tasks_tries_problems_and_labels_pairs_where_the_address_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judges = Judges()
    monkeypatch.setattr(tasks, "Judge", judges)
    lot = Lot("files", "files", splits={"train": list(programs.problems("train", 1, 0, 0))})
    with pytest.raises(NotHere):
        tasks._try_out([lot], TASKS, at_work(tmp_path), tmp_path, {})
    with pytest.raises(NotHere):
        tasks._pairs(TASKS, at_work(tmp_path))
    assert judges.made == [ASKED, (replace(ASKED[0], allow_unsafe=True), *ASKED[1:])]  # the second is for our programs


def test_evaluate_judges_problems_and_test_sets_where_the_address_says(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    judges = Judges(ConfigError)  # then both say that they are skipped
    monkeypatch.setattr(evaluate, "Judge", judges)
    for name in ("documents", "sampled_stories", "gaps", "answered"):
        monkeypatch.setattr(evaluate.suites, name, lambda *_: SuiteResult())
    monkeypatch.setattr(evaluate.evaluation_tools, "called", lambda *_: SuiteResult())
    empty = workspace.folder / "empty"
    write(empty / "dialogues/test.jsonl", list[Dialogue]())
    write(empty / "problems/test.jsonl", list[Problem]())
    (empty / "overlap.json").write_text('{"dialogues": [], "problems": []}')
    write_set(empty / "benchmarks/h.jsonl", [DOUBLE])
    evaluate.run(
        replace(EVALUATE, benchmarks=["data/benchmarks/h.jsonl"]),
        at_work(workspace.folder / "work"),
        model=Path("models/tools"),
        text=empty,
        code=empty,
        dialogues=empty / "dialogues",
        problems=empty / "problems",
        facts=Path("data/facts"),
        overlap=empty / "overlap.json",
        benchmarks=empty / "benchmarks",
        summary=empty / "m.json",
        items=empty / "m.jsonl",
        curves=empty / "m.csv",
    )
    assert judges.made == [ASKED, ASKED]


def test_the_command_of_the_benchmarks_judges_where_params_yaml_says(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judges = Judges(ConfigError)
    monkeypatch.setattr(benchmarks, "Judge", judges)
    with Path("params.yaml").open("a") as file:
        file.write(f"runtime: {{sandbox: {{url: '{URL}'}}}}\n")
    path = write_set(workspace.folder / "h.jsonl", [DOUBLE])
    assert benchmarks.main(["models/code", str(path)]) == 0
    assert judges.made == [(SandboxConfig(), 1, URL)] and "skipped: no sandbox" in capsys.readouterr().out


# -- runtime.workers ---------------------------------------------------------------------------------------------------


class Pools:
    """Stands in for `pool_map`: records how many workers each call gets, and works in this process."""

    def __init__(self) -> None:
        self.workers: list[int] = []

    def __call__(self, function: Callable[[Any], Any], items: Iterable[Any], workers: int) -> Iterator[Any]:
        self.workers.append(workers)
        return map(function, items)


def test_tasks_generates_in_so_many_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools()
    monkeypatch.setattr(tasks, "Judge", LengthJudge)
    monkeypatch.setattr(tasks, "pool_map", pools)
    monkeypatch.setattr(tasks, "WORTH_A_WORKER", 1)
    monkeypatch.setattr(tasks, "CHUNK", 5)  # no more is made than is used
    small = replace(TASKS, dialogues=20, problems=10, pairs=6, test_items=4)
    made(tmp_path, small, workers=WORKERS)
    assert len(pools.workers) == 3 + 3 * 3  # problems, dialogues, choices, and three kinds of pairs per split
    assert {*pools.workers} == {WORKERS}


def test_encode_and_corpus_work_in_so_many_workers(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = Pools()
    monkeypatch.setattr(encode, "pool_map", pools)
    monkeypatch.setattr(corpus, "pool_map", pools)
    write_corpus(tmp_path / "written", documents(4), documents(2, first=100))
    encode.run(
        encode.Params(),
        at_work(tmp_path / "work"),
        tokenizer=tmp_path / "written/tokenizer",
        corpus=tmp_path / "written/raw",
        out=tmp_path / "tokens",
    )
    machine.build("built", workers=WORKERS)
    assert pools.workers == [WORKERS, WORKERS]
