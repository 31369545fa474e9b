"""The block `evaluate`: how many items each suite takes, with how many tokens and at what temperature it asks."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.evaluation import suites
from pipeline.evaluation.suites import Subject
from pipeline.generation.sampling import Completion
from pipeline.model.transformer import Transformer
from pipeline.streams.records import write
from pipeline.synthesis import stories, tools
from pipeline.text.tokenizer import Tokenizer
from stages import evaluate
from tests.test_evaluate import PARAMS, corpus
from tests.test_fit import job
from tests.test_suites import SETTINGS, Judge, problem, text
from tests.workspace import Workspace

FEW = replace(SETTINGS, stories=3, problems=2, samples=1, dialogues=4, gaps=1, max_new_tokens=11, story_tokens=13,
              temperature=0.7, bootstrap=5)  # fmt: skip
CODE = "".join(f"def function_{n}(value):\n    return value + {n}\n\n\n" for n in range(6))


@dataclass(frozen=True)
class Recorded(Subject):
    """A subject that keeps what it was asked, and answers all of it alike."""

    asked: list[tuple[str, int, int, float]] = field(default_factory=list)  # suite, prompts, tokens, temperature

    def complete(
        self, suite: str, prompts: dict[str, list[int]], *, tokens: int, temperature: float, sample: int = 0
    ) -> dict[str, Completion]:
        self.asked.append((suite, len(prompts), tokens, temperature))
        ids = self.tokenizer.encode("so it is")
        return {name: Completion(ids, [0.0] * len(ids), "stop") for name in prompts}


@pytest.fixture
def subject(tiny_model: Transformer, byte_tokenizer: Tokenizer) -> Recorded:
    return Recorded(tiny_model, byte_tokenizer, FEW, 7)


def test_stories_and_gaps_are_asked_for_as_their_keys_say(subject: Recorded) -> None:
    suites.sampled_stories(subject, [text("stories/gift/50", stories.story("stories/gift/50"))])
    suites.gaps(subject, [text(f"{n}.py", CODE) for n in range(4)])
    assert subject.asked == [("stories", 3, 13, 0.7), ("gaps", 1, 64, 0.0)]


def test_problems_are_asked_for_as_their_keys_say(subject: Recorded) -> None:
    judge: Any = Judge([])
    suites.solved(subject, [problem(f"p{n}", "easy") for n in range(5)], judge)
    assert subject.asked == [("problems", 2, 11, 0.0), ("problems", 2, 11, 0.7)]


def test_conversations_are_asked_for_as_their_keys_say(subject: Recorded) -> None:
    talks = list(tools.dialogues("test", 24, 1))
    asked = {row["id"].rpartition("#")[0] for row in suites.called(subject, talks).rows}
    assert asked <= {talk.id for talk in talks[:4]} and len(asked) > 1
    assert suites.answered(subject, talks).numbers["n"] == 2  # half as many
    assert {(suite, tokens, temperature) for suite, _, tokens, temperature in subject.asked} == {
        ("tools", 11, 0.0), ("answers", 11, 0.0)
    }  # fmt: skip


def test_likelihoods_are_of_so_many_documents_of_each_kind(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def documents(subject: Subject, texts: list[Any]) -> suites.Result:
        counts.append(len(texts))
        return suites.Result()

    monkeypatch.setattr(suites, "documents", documents)
    monkeypatch.setattr(evaluate, "solve", lambda *_: suites.Result())
    for name in ("sampled_stories", "gaps", "called", "answered"):
        monkeypatch.setattr(suites, name, lambda *_: suites.Result())
    made = {name: corpus(workspace.folder / name, val_0=[(f"Prose {n}.", "docs", f"docs/{n}") for n in range(5)])
            for name in ("text", "code")}  # fmt: skip
    outs = {name: workspace.folder / name for name in ("summary", "items", "curves")}
    params = replace(PARAMS, settings=replace(FEW, documents=2))
    records = {name: Path(f"data/{name}") for name in ("dialogues", "problems", "benchmarks")}
    for name in ("dialogues", "problems"):
        write(records[name] / "test.jsonl", ())
    evaluate.run(params, job(workspace.folder / "work"), model=Path("models/tools"), **made, **records, **outs)
    assert counts == [2, 0, 0, 0, 0, 2]  # prose, three kinds of what is generated, transcripts, code


def test_a_sample_is_drawn_from_the_nucleus_of_top_p(tiny_model: Transformer, byte_tokenizer: Tokenizer) -> None:
    prompts = {f"p{n}": byte_tokenizer.encode("The pilot asked " + "very " * n) for n in range(4)}

    def drawn(top_p: float, temperature: float) -> list[list[int]]:
        subject = Subject(tiny_model, byte_tokenizer, replace(SETTINGS, top_p=top_p), 7)
        return [done.ids for done in subject.complete("s", prompts, tokens=8, temperature=temperature).values()]

    assert drawn(1e-6, 1.0) == drawn(1.0, 0.0) != drawn(1.0, 1.0)  # a nucleus of one token is greedy


def test_likelihoods_are_taken_in_windows_of_context(tiny_model: Transformer, byte_tokenizer: Tokenizer) -> None:
    found = {}
    for context in (8, 128):
        subject = Subject(tiny_model, byte_tokenizer, replace(SETTINGS, context=context), 7)
        found[context] = suites.documents(subject, [text("a", "The pilot asked the girl which way. " * 4)]).numbers[
            "bpb"
        ]
    assert found[8] != pytest.approx(found[128], rel=1e-3)


def test_intervals_are_of_as_many_resamples(subject: Recorded) -> None:
    one, many = (
        replace(subject, settings=replace(FEW, bootstrap=count)).bootstrap([0.0, 1.0, 3.0]) for count in (1, 200)
    )
    assert one.low == one.high and many.low < many.value < many.high
