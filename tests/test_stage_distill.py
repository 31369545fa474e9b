"""Stages teach and distill on tiny models: what is written down, that the student approaches its teacher in each
way, that what was kept can replace the teacher, and what is refused.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from pipeline.batches.batch import Answered
from pipeline.generation.sampling import Sampling, sampler
from pipeline.learning import losses
from pipeline.learning.distillation import jensen_shannon
from pipeline.model import checkpoint
from pipeline.rl import answers, teaching
from tests import workspace as builder
from tests.workspace import Workspace

pytestmark = pytest.mark.slow  # each test runs a stage
TEACH: dict[str, Any] = {"teacher": "teacher", "samples": 2, "top_k": 4, "max_prompt": 60, "max_new_tokens": 24}
VOCABULARY = 400  # more than the tiny model has
LONGER: dict[str, Any] = {"iterations": 12, "learning_rate": 1e-3, "prompts": 8}


def teach(workspace: Workspace, **changes: Any) -> str:
    argv = [f"teach.{key}={json.dumps(value)}" for key, value in (TEACH | changes).items()]
    ended = builder.command("teach", [*argv, "runtime.precision=fp32"])
    assert ended.code == 0, ended.said
    return ended.said


def distance(workspace: Workspace, name: str) -> float:
    """KL(model || teacher) in nats a token, over the model's own answers."""
    (model, tokenizer), (teacher, _) = (checkpoint.load(Path("models") / each) for each in (name, "teacher"))
    prompts = answers.problem_prompts(list(map(builder.problem, range(8))), tokenizer, 60)
    generate = sampler(model, Sampling(24), {tokenizer.turn_end})
    rows = answers.rows_of(answers.sample(generate, answers.repeated(prompts, 16), tokenizer, 5), tokenizer.pad)
    with torch.no_grad():
        own, its = (losses.trained_logits(each, rows)[0].log_softmax(-1) for each in (model, teacher))
    return float(jensen_shannon(own, its, 1.0).mean())


def test_what_is_written_down_is_what_the_teacher_says(workspace: Workspace) -> None:
    teach(workspace)
    folder, numbers = workspace.folder / "data/taught", workspace.numbers("teach")
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert len(lines) == numbers["answers"] == 16 == 2 * numbers["prompts"]
    top, meta = load_file(folder / "top_k.safetensors"), json.loads((folder / "meta.json").read_text())
    assert top["ids"].shape == top["logprobs"].shape == (numbers["tokens"], 4) == (sum(len(x["ids"]) for x in lines), 4)
    teacher, tokenizer = checkpoint.load(Path("models/teacher"))
    assert meta["tokenizer"] == tokenizer.hash and meta["teacher"] == checkpoint.weights_digest(teacher)
    first = 0
    prompts = {p.id: p for p in answers.problem_prompts(list(map(builder.problem, range(8))), tokenizer, 60)}
    for line in lines:
        ids = torch.tensor([prompts[line["id"]].ids + line["ids"]])
        targets = ids[:, 1:].clone()
        targets[:, : len(prompts[line["id"]].ids) - 1] = -100
        zero = torch.zeros_like(targets)
        rows = Answered(ids[:, :-1], targets, zero.int(), torch.arange(targets.shape[1])[None])
        with torch.no_grad():
            logits, chosen = losses.trained_logits(teacher, rows)
        expected = logits.log_softmax(-1).topk(4)
        part = slice(first, first + len(line["ids"]))
        assert np.allclose(top["logprobs"][part], expected.values, atol=1e-5)
        assert np.allclose(line["logprobs"], logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0], atol=1e-4)
        first = part.stop
    assert numbers["mass_of_top_k"] == pytest.approx(float(np.exp(top["logprobs"]).sum(1).mean()), abs=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"on_policy": 0.0, "beta": 0.0},
        {"on_policy": 0.0, "beta": 0.5, "adapter": {"rank": 8, "alpha": 16, "targets": ["all-linear"]}},
        {"on_policy": 1.0, "beta": 1.0},
        {"on_policy": 1.0, "beta": 1.0, "loss": "minillm", "gamma": 0.9},
    ],
    ids=lambda changes: f"{changes.get('loss', 'jsd')} {changes['on_policy']} {changes['beta']}",
)
def test_the_student_comes_to_its_teacher(changes: dict[str, Any], workspace: Workspace) -> None:
    teach(workspace, samples=8, top_k=100)
    before = distance(workspace, "tools")
    ended = workspace.command("distill", **LONGER, **changes)
    assert ended.code == 0, ended.said
    assert distance(workspace, "distill") < 0.6 * before
    curve = [float(row["loss"]) for row in workspace.curve("distill") if row.get("loss")]
    assert curve[-1] < 0.8 * curve[0]


def test_all_tokens_kept_teach_what_the_teacher_at_hand_does(workspace: Workspace) -> None:
    """With almost no answers of its own, the student learns from the teacher's, recorded or from the teacher itself."""
    teach(workspace, top_k=VOCABULARY)
    found = []
    for share in (0.0, 1e-9):
        assert workspace.command("distill", on_policy=share, **{"runtime.fresh": True}).code == 0
        found.append(workspace.weights("distill"))
    start = workspace.weights("tools")
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], atol=1e-5, rtol=0)
    assert max(float((value - start[name]).abs().max()) for name, value in found[0].items()) > 1e-3


def test_the_student_answers_as_often_as_it_should(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    original = teaching.Lessons.sample

    def sample(self: teaching.Lessons, requests: Any) -> Any:
        asked.append(sum(self.is_own(*request) for request in requests))
        return original(self, requests)

    monkeypatch.setattr(teaching.Lessons, "sample", sample)
    for share, low, high in ((0.0, 0, 0), (0.5, 18, 46), (1.0, 64, 64)):
        asked.clear()
        assert workspace.command("distill", on_policy=share, prompts=8, samples=2, iterations=4).code == 0
        assert low <= sum(asked) <= high


def refused(workspace: Workspace, message: str, **changes: Any) -> None:
    ended = workspace.command("distill", **changes)
    assert ended.code == 2 and message in ended.said, ended.said
    assert not (workspace.folder / "models/distill").exists()


def test_wrong_teachers_and_keys_are_refused(workspace: Workspace) -> None:
    refused(workspace, "distill.teacher: models/tools did not write data/taught", teacher="tools")
    refused(workspace, "distill.temperature: expected 1.0, as used to create data/taught", temperature=0.5)
    refused(workspace, "loss: expected one of jsd, minillm, got 'kl'", loss="kl")
    refused(workspace, "expected `on_policy: 1` and `beta: 1`, got 0.5 and 0.3", loss="minillm")
    refused(workspace, "beta: expected 0 to 1, got 1.5", beta=1.5)
    refused(workspace, "every answer is longer than 1 tokens", max_new_tokens=1, on_policy=0.0)
    refused(workspace, "models/nobody does not exist", teacher="nobody")


def test_a_teacher_with_another_tokenizer_is_refused(workspace: Workspace) -> None:
    path = workspace.folder / "data/taught/meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer": "another"}))
    refused(workspace, "the teacher's tokenizer differs from the student's")


def test_a_cut_file_is_refused(workspace: Workspace) -> None:
    path = workspace.folder / "data/taught/top_k.safetensors"
    save_file({name: value[:-1] for name, value in load_file(path).items()}, path)
    refused(workspace, "run dvc repro stage_teach")


def test_without_problems_the_student_passes_through(workspace: Workspace) -> None:
    (workspace.folder / "data/problems/rl.jsonl").write_text("")
    teach(workspace)
    ended = workspace.command("distill")
    assert ended.code == 0 and "passes through unchanged" in ended.said
    start, end = workspace.weights("tools"), workspace.weights("distill")
    assert all(torch.equal(value, end[name]) for name, value in start.items())


def test_answers_that_fail_can_be_left_out(workspace: Workspace) -> None:
    """The tiny teacher solves nothing."""
    argv = [f"teach.{key}={json.dumps(value)}" for key, value in (TEACH | {"keep": "passed"}).items()]
    ended = builder.command("teach", [*argv, "runtime.precision=fp32"])
    assert ended.code != 0 and "passes the tests; set teach.keep=all" in ended.said, ended.said
