"""Keys of stage evaluate: how much each suite asks, how long it lets the model write, how it samples and resamples."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from pipeline import wings
from pipeline.evaluation import benchmarks, likelihood, suites
from pipeline.evaluation import tools as evaluation_tools
from pipeline.evaluation.intervals import Interval, ratio
from pipeline.evaluation.suites import Subject, SuiteResult, SuiteSettings
from pipeline.generation.sampling import Completion, Sampling
from pipeline.ingest.records import Dialogue, Text, write
from pipeline.model import checkpoint
from pipeline.model.transformer import Transformer
from pipeline.sandbox.judge import SandboxConfig
from pipeline.synthetic import drills, stories
from pipeline.synthetic import tools as synthetic_tools
from pipeline.text.tokenizer import Tokenizer
from stages import evaluate
from tests.judges import KnowingJudge
from tests.loop import job
from tests.suites import SETTINGS, SOURCE, problem, text


@dataclass(frozen=True)
class Asked:
    """One call of `complete`."""

    suite: str
    names: list[str]
    tokens: int
    temperature: float
    sample: int


@dataclass(frozen=True)
class Silent(Subject):
    """A subject that writes nothing or, with `ends`, only the end; it records what it was asked."""

    asked: list[Asked] = field(default_factory=list)
    ends: bool = True

    def complete(
        self, suite: str, prompts: dict[str, list[int]], *, tokens: int, temperature: float, sample: int = 0
    ) -> dict[str, Completion]:
        self.asked.append(Asked(suite, list(prompts), tokens, temperature, sample))
        return {name: Completion([], [], "stop") for name in prompts} if self.ends else {}


@pytest.fixture
def silent(tiny_model: Transformer, byte_tokenizer: Tokenizer) -> Any:
    def made(*, ends: bool = True, **settings: Any) -> Silent:
        return Silent(tiny_model, byte_tokenizer, replace(SETTINGS, **settings), 7, ends=ends)

    return made


@pytest.mark.parametrize("count", [1, 2, 9])
def test_so_many_problems_are_asked(count: int, silent: Any) -> None:
    subject, problems = silent(problems=count), [problem(name, "easy") for name in "abc"]
    suites.solved(subject, problems, KnowingJudge([]))  # type: ignore[arg-type]
    assert [one.names for one in subject.asked] == [["a", "b", "c"][:count]]


def test_problems_are_answered_once_greedily_and_so_often_by_sampling_within_their_tokens(silent: Any) -> None:
    subject = silent(samples=2, temperature=0.6, max_new_tokens=11)
    suites.solved(subject, [problem("a", "easy")], KnowingJudge([]))  # type: ignore[arg-type]
    assert [(one.sample, one.temperature, one.tokens) for one in subject.asked] == [
        (0, 0.0, 11),
        (1, 0.6, 11),
        (2, 0.6, 11),
    ]


@pytest.mark.parametrize("count", [0, 1, 3, 9])
def test_so_many_gaps_are_to_be_filled_in(count: int, silent: Any) -> None:
    subject = silent(gaps=count)
    suites.gaps(subject, [text(str(n), SOURCE) for n in range(4)])
    assert [name for one in subject.asked for name in one.names] == ["0", "1", "2", "3"][:count]


@pytest.mark.parametrize("count", [4, 7, 40])
def test_turns_of_so_many_dialogues_are_asked_and_words_of_half_as_many(count: int, silent: Any) -> None:
    dialogues = list(synthetic_tools.dialogues("test", 20, 1))
    subject = silent(dialogues=count, max_new_tokens=13, ends=False)
    evaluation_tools.called(subject, dialogues)
    expected = [f"{d.id}#{turn}" for d in dialogues[:count] for turn in synthetic_tools.turns(d)]
    assert [(one.names, one.tokens, one.temperature) for one in subject.asked] == [(expected, 13, 0.0)]
    subject.asked.clear()
    suites.answered(subject, [talk(n) for n in range(20)])
    expected = [f"{n}#1" for n in range(20)][: count // 2]
    assert [(one.names, one.tokens, one.temperature) for one in subject.asked] == [(expected, 13, 0.0)]


def talk(number: int) -> Dialogue:
    said = [{"role": "user", "content": "and?"}, {"role": "assistant", "content": "No."}]
    return Dialogue(id=str(number), kind="chat", category="talk", messages=said)


def test_stories_are_as_many_as_long_and_as_hot_as_was_said(silent: Any) -> None:
    paths = [f"stories/trade/{n}" for n in (50, 100, 150)]
    subject = silent(stories=2, story_tokens=17, temperature=0.6)
    suites.sampled_stories(subject, [text(path, stories.story(path)) for path in paths])
    assert subject.asked == [Asked("stories", paths[:2], 17, 0.6, 0)]


@pytest.mark.parametrize(("temperature", "share"), [(0.6, 0.7), (0.0, 1.0)])
def test_the_tail_is_cut_where_a_token_is_drawn_and_not_where_the_likeliest_is_taken(
    temperature: float,
    share: float,
    tiny_model: Transformer,
    byte_tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[Sampling] = []

    def generate(model: Any, prompts: Sequence[Any], sampling: Sampling, **_: Any) -> list[Completion]:
        found.append(sampling)
        return [Completion([], [], "stop") for _ in prompts]

    monkeypatch.setattr(suites, "generate", generate)
    subject = Subject(tiny_model, byte_tokenizer, replace(SETTINGS, top_p=0.7), 7)
    subject.complete("s", {"a": [5]}, tokens=3, temperature=temperature)
    assert found == [Sampling(3, temperature=temperature, top_p=share)]


@pytest.mark.parametrize("context", [16, 64])
def test_likelihoods_are_those_within_the_window(context: int, silent: Any) -> None:
    texts = [text("a", "The pilot asked. " * 12), text("b", "The girl told the pilot which way. " * 5)]
    subject = silent(context=context)
    scored = [
        likelihood.likelihood(subject.model, subject.tokenizer, [t.text for t in texts], context=window)
        for window in (16, 64)
    ]
    found = suites.documents(subject, "text", texts).numbers["bpb"]
    assert [found == pytest.approx(one.bits_per_byte, rel=1e-6) for one in scored] == [context == 16, context == 64]


def test_intervals_are_over_so_many_resamples(silent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(*more: Any, resamples: int, **rest: Any) -> Interval:
        asked.append(resamples)
        return ratio(*more, resamples=resamples, **rest)

    monkeypatch.setattr(suites, "ratio", counted)
    for resamples in (3, 50):
        silent(bootstrap=resamples).bootstrap([0.0, 1.0])
    assert asked == [3, 50]


# the stage


def corpus(folder: Path, rows: list[tuple[str, str]]) -> Path:
    """A val split with these (source, path) rows."""
    folder.mkdir()
    columns = {
        "text": [f"{n}. " * 9 for n in range(len(rows))],
        "source": [s for s, _ in rows],
        "path": [p for _, p in rows],
        "license": ["MIT"] * len(rows),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "val-0.parquet")
    return folder


@pytest.fixture
def measured(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """The stage on suites that record what they are given: (suite, ids or paths), and the sandboxes asked for."""
    found: list[tuple[str, list[str]]] = []
    sandboxes: list[SandboxConfig] = []

    def taking(name: str) -> Any:
        def suite(subject: Subject, *given: Any) -> SuiteResult:
            items: Sequence[Any] = next(part for part in given if not isinstance(part, str))
            found.append((name, [item.path if isinstance(item, Text) else item.id for item in items]))
            return SuiteResult({f"{name}/settings": subject.settings.documents})

        return suite

    class NoJudge:
        def __init__(self, config: SandboxConfig, *_: Any, **__: Any) -> None:
            sandboxes.append(config)

        def __enter__(self) -> "NoJudge":
            return self

        def __exit__(self, *_: object) -> None: ...

    for name in ("documents", "sampled_stories", "gaps", "answered", "solved"):
        monkeypatch.setattr(suites, name, taking(name))
    monkeypatch.setattr(evaluation_tools, "called", taking("called"))
    monkeypatch.setattr(evaluate, "Judge", NoJudge)
    each = wings.each
    monkeypatch.setattr(wings, "each", lambda offer: [] if offer == "causal_suites" else each(offer))
    sources = [
        ("docs", "docs"),
        ("trade", "trade"),
        (stories.HELD_OUT[0], "unseen"),
        (drills.SOURCE, "drill"),
        (synthetic_tools.SOURCE, "call"),
    ]
    checkpoint.save(tmp_path / "model", tiny_model, byte_tokenizer, {})
    inputs: dict[str, Path] = {
        "model": tmp_path / "model",
        "dialogues": tmp_path / "dialogues",
        "problems": tmp_path / "problems",
        "facts": tmp_path / "facts",
        "overlap": tmp_path / "overlap.json",
        "text": corpus(tmp_path / "text", [(source, f"{path}/{n}") for source, path in sources for n in range(5)]),
        "code": corpus(tmp_path / "code", [("package", f"code/{n}") for n in range(5)]),
        "benchmarks": tmp_path / "benchmarks",
        "summary": tmp_path / "m.json",
        "items": tmp_path / "m.jsonl",
        "curves": tmp_path / "m.csv",
    }
    (tmp_path / "overlap.json").write_text('{"dialogues": [], "problems": []}')
    write(tmp_path / "dialogues/test.jsonl", [talk(n) for n in range(3)])
    write(tmp_path / "problems/test.jsonl", [problem("a", "easy")])

    def run(
        settings: SuiteSettings = SETTINGS, **changes: Any
    ) -> tuple[list[tuple[str, list[str]]], list[SandboxConfig]]:
        found.clear()
        params = evaluate.Params(**({"settings": settings, "sandbox": SandboxConfig()} | changes))
        evaluate.run(params, job(tmp_path / "work"), **inputs)
        return list(found), sandboxes

    return run


@pytest.mark.parametrize("count", [1, 3])
def test_so_many_documents_of_each_kind_are_weighed(count: int, measured: Any, tmp_path: Path) -> None:
    given, _ = measured(replace(SETTINGS, documents=count))
    kinds = ("docs", "trade", "unseen", "drill", "call", "code")
    assert [names for suite, names in given if suite == "documents"] == [
        [f"{kind}/{n}" for n in range(count)] for kind in kinds
    ]
    written = json.loads((tmp_path / "m.json").read_text())
    assert written["settings"]["documents"] == written["text"]["documents/settings"] == count


def test_a_suite_that_is_done_is_not_measured_again_and_another_test_set_costs_itself(
    measured: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scored: list[str] = []
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / "data/benchmarks").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"data/benchmarks/{name}.jsonl").write_text(name)
    monkeypatch.setattr(benchmarks, "load", lambda path: benchmarks.TestSet(path.stem, "mbpp"))
    monkeypatch.setattr(
        benchmarks, "score", lambda subject, sets, **_: scored.append(sets[0].name) or SuiteResult({"n": 1})
    )
    first = measured(benchmarks=["data/benchmarks/a.jsonl"])[0]
    assert first and scored == ["a"]
    assert measured(benchmarks=["data/benchmarks/a.jsonl", "data/benchmarks/b.jsonl"])[0] == []
    assert scored == ["a", "b"]
    (tmp_path / "data/benchmarks/a.jsonl").write_text("changed")
    assert measured(benchmarks=["data/benchmarks/a.jsonl", "data/benchmarks/b.jsonl"])[0] == []
    assert scored == ["a", "b", "a"]
    assert len(measured(replace(SETTINGS, documents=2))[0]) == len(first)  # other settings are another measurement
    for path in tmp_path.rglob("suites/*.json"):
        path.write_text("{")  # damaged
    assert measured(benchmarks=["data/benchmarks/a.jsonl"])[0] == first and scored == ["a", "b", "a", "a"]


def test_problems_run_in_the_sandbox_of_its_block(measured: Any) -> None:
    config = SandboxConfig(preload=("json",))
    assert measured(sandbox=config)[1] == [config]


def test_the_test_sets_that_are_named_are_scored_and_no_others(
    measured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Path] = []
    scored: list[Any] = []
    monkeypatch.setattr(benchmarks, "load", lambda path: loaded.append(path) or benchmarks.TestSet(path.name, "mbpp"))

    def score(subject: Subject, sets: list[Any], **_: Any) -> SuiteResult:
        scored.extend(sets)
        return SuiteResult()

    monkeypatch.setattr(benchmarks, "score", score)
    measured()
    assert loaded == scored == []
    measured(benchmarks=["data/benchmarks/b.jsonl"])
    assert loaded == [tmp_path / "benchmarks/b.jsonl"] and [one.name for one in scored] == ["b.jsonl"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"problems": -5},
        {"dialogues": -1},
        {"samples": -1},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"documents": 0},
    ],
)
def test_counts_and_temperatures_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}.*: expected"):
        replace(SETTINGS, **wrong)
