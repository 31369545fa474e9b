"""What a user may get wrong before an alignment stage: exit 2, and one line that says what was expected, what was
found, and what to do.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.ingest import records
from pipeline.learning.pair_losses import LOSSES
from pipeline.learning.policy_losses import METHODS
from pipeline.model import checkpoint
from pipeline.model.transformer import Transformer
from pipeline.sandbox import servers
from pipeline.text.tokenizer import Tokenizer
from tests import workspace as builder
from tests.workspace import Workspace, said

pytestmark = pytest.mark.slow  # each test runs a stage


def assert_refused(workspace: Workspace, stage: str, message: str, **changes: Any) -> None:
    """Check that the stage's last line has the message, and that it exits with 2 and publishes nothing."""
    before = workspace.published()
    ended = workspace.command(stage, **changes)
    last = ended.said.strip().splitlines()[-1]
    assert ended.code == 2, ended.said
    assert last.startswith(f"stage_{stage}: ") and re.search(message, last), last
    assert workspace.published() == before
    assert workspace.states(stage) == []


def write_pairs(workspace: Workspace, split: str, count: int, wrong: list[dict[str, Any]]) -> None:
    """Write a split of `count` pairs, the first of which have the changes in `wrong`."""
    made = [builder.pair(n, **wrong[n]) if n < len(wrong) else builder.pair(n) for n in range(count)]
    records.write(workspace.folder / f"data/preferences/{split}.jsonl", made)


SAME: dict[str, Any] = {"chosen": [said("assistant", "left")], "rejected": [said("assistant", "left")]}
EMPTY: dict[str, Any] = {"rejected": [said("assistant", " \n")]}
LONG_PROMPT: dict[str, Any] = {"prompt": [said("user", "Which way? " * 30)]}
LONG_ANSWER: dict[str, Any] = {"rejected": [said("assistant", "0123456789" * 12)]}


# pairs that are dropped


@pytest.mark.parametrize("stage", ["reward", "dpo", "rlhf"])
def test_pairs_that_teach_nothing_are_dropped_and_counted(stage: str, workspace: Workspace) -> None:
    write_pairs(workspace, "train", 40, [SAME, EMPTY, LONG_PROMPT, SAME])
    ended = workspace.command(stage, **({"kinds": ["story"], "iterations": 1} if stage == "rlhf" else {"steps": 1}))
    assert ended.code == 0, ended.said
    dropped = workspace.numbers(stage)["dropped"]
    assert dropped == {"train": {"chosen equals rejected": 2, "empty answer": 1, "prompt too long": 1}, "test": {}}


@pytest.mark.parametrize(
    ("wrong", "counted"),
    [
        ([SAME, SAME, EMPTY], "3 of 20 pairs cannot be used (2 chosen equals rejected, 1 empty answer)"),
        ([LONG_PROMPT] * 3, "3 of 20 pairs cannot be used (3 prompt too long)"),
    ],
)
def test_more_than_a_tenth_dropped_stops(wrong: list[dict[str, Any]], counted: str, workspace: Workspace) -> None:
    write_pairs(workspace, "train", 20, wrong)
    message = rf"preferences/train\.jsonl: {re.escape(counted)}; at most 10% may be left out\. .*max_prompt \(60\)"
    for stage in ("reward", "dpo", "rlhf"):
        assert_refused(workspace, stage, message)


def test_answers_over_the_length_stop_what_trains_on_them(workspace: Workspace) -> None:
    """A cut answer would lose its end."""
    write_pairs(workspace, "train", 20, [LONG_ANSWER] * 3)
    for stage in ("reward", "dpo"):
        assert_refused(workspace, stage, r"3 of 20 pairs cannot be used \(3 answer too long\).* max_length \(120\)")


def test_a_file_of_pairs_that_is_missing_stops(workspace: Workspace) -> None:
    """An empty one does not: test_without_data.py."""
    (workspace.folder / "data/preferences/train.jsonl").unlink()
    assert_refused(
        workspace, "reward", r"train\.jsonl: expected preference pairs here, found none; run dvc repro stage_tasks"
    )


def test_labels_of_one_kind_and_a_file_that_is_missing_stop_kto(workspace: Workspace) -> None:
    path = workspace.folder / "data/labels/train.jsonl"
    labels = list(records.read(path, records.Label))
    records.write(path, [label for label in labels if label.desirable])
    assert_refused(workspace, "kto", r"train\.jsonl: expected both good and bad answers, found 20 good and 0 bad; add")
    path.unlink()
    assert_refused(workspace, "kto", r"train\.jsonl: expected labels here, found none; run dvc repro stage_tasks")


def test_prompts_without_a_short_answer_stop_rlhf(workspace: Workspace) -> None:
    assert_refused(
        workspace,
        "rlhf",
        "no preference pair has an answer of at most 1 tokens; raise max_new_tokens",
        max_new_tokens=1,
    )
    assert_refused(
        workspace, "rlhf", "at most 24 tokens and a prompt of the kinds code, tools; raise", kinds=["code", "tools"]
    )


def test_problems_that_cannot_be_asked_stop_grpo(workspace: Workspace) -> None:
    path = workspace.folder / "data/problems/rl.jsonl"
    records.write(path, [builder.problem(n, question="Add. " * (30 if n < 2 else 1)) for n in range(8)])
    assert_refused(workspace, "grpo", r"2 of 8 problems have prompts of more than max_prompt = 60 tokens; at most 10%")
    records.write(path, [builder.problem(n, **({"tests": []} if n == 5 else {})) for n in range(8)])
    assert_refused(workspace, "grpo", "problem 5 has no tests, so its answers cannot be scored; add tests or remove it")


# files


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"train\.jsonl:3: not JSON"),
        ("[]", r"train\.jsonl:3: expected the keys of Pair"),
        ({"prompt": "Which way?"}, r"train\.jsonl:3: prompt: expected list\[.*\], found 'Which way\?'"),
        ({"chosen": ["left"]}, r"train\.jsonl:3: chosen: expected list\[.*\], found \['left'\]"),
        ({"margin": "large"}, r"train\.jsonl:3: margin: expected float or none, found 'large'"),
        ({"id": 7}, r"train\.jsonl:3: id: expected str, found 7"),
        ({"worth": 1}, r"train\.jsonl:3: expected the keys of Pair \(chosen, .*truth\)"),
        ({"rejected": None}, r"train\.jsonl:3: rejected: expected list\[.*\], found None"),
        ({"prompt": [{"role": "robot", "content": "left"}]}, r"pair 2: .*'robot'"),
    ],
)
def test_a_record_that_is_wrong_is_named_by_file_line_and_field(line: Any, message: str, workspace: Workspace) -> None:
    path = workspace.folder / "data/preferences/train.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = line if isinstance(line, str) else json.dumps(json.loads(lines[2]) | line)
    path.write_text("\n".join(lines) + "\n")
    assert_refused(workspace, "dpo", message)


def test_a_field_that_is_missing_is_named(workspace: Workspace) -> None:
    for stage, path, field in (
        ("reward", "preferences/train", "rejected"),
        ("kto", "labels/train", "desirable"),
        ("grpo", "problems/rl", "tests"),
        ("lora", "dialogues/train", "messages"),
    ):
        file = workspace.folder / f"data/{path}.jsonl"
        first, *rest = file.read_text().splitlines()
        row = json.loads(first)
        del row[field]
        file.write_text("\n".join([json.dumps(row), *rest]) + "\n")
        assert_refused(workspace, stage, rf"{path}\.jsonl:1: .*missing .*'{field}'")


# models


@pytest.fixture
def other_tokenizer() -> Tokenizer:
    return Tokenizer.train(iter(["Another text altogether.\n" * 3]), 320)


def test_a_reward_model_with_another_tokenizer_is_refused(
    workspace: Workspace, tiny_model: Transformer, other_tokenizer: Tokenizer
) -> None:
    builder.save_reward(workspace.folder / "models/reward", tiny_model.config, other_tokenizer)
    ours, theirs = workspace.tokenizer.hash[:12], other_tokenizer.hash[:12]
    assert_refused(
        workspace,
        "rlhf",
        rf"models/tools and models/reward have different tokenizers \({ours} and {theirs}\); expected the same"
        r" tokenizer; train both from the same",
    )


def test_a_language_model_is_no_reward_model(workspace: Workspace, tiny_model: Transformer) -> None:
    checkpoint.save(workspace.folder / "models/reward", tiny_model, workspace.tokenizer, {})
    assert_refused(
        workspace,
        "rlhf",
        r"models/reward: expected a reward model \(Qwen3ForSequenceClassification\), found Qwen3ForCausalLM; run"
        " dvc repro stage_reward to train one",
    )


@pytest.mark.parametrize(
    ("stage", "changes", "message"),
    [
        ("reward", {"max_length": 300}, "max_length: expected at most 256, the model's context, got 300"),
        ("dpo", {"max_length": 300}, "max_length: expected at most 256, the model's context, got 300"),
        ("kto", {"max_length": 300}, "max_length: expected at most 256, the model's context, got 300"),
        ("rlhf", {"max_prompt": 240}, r"max_prompt \+ max_new_tokens: expected at most 256, .* got 264"),
        ("grpo", {"max_prompt": 240}, r"max_prompt \+ max_new_tokens: expected at most 256, .* got 264"),
        (
            "lora",
            {"context": 512, "tokens_per_step": 512},
            "context: expected at most 256, the model's context, got 512",
        ),
    ],
)
def test_rows_longer_than_the_model_reads_are_refused(
    stage: str, changes: dict[str, Any], message: str, workspace: Workspace
) -> None:
    """At the start, not only at the first long row."""
    assert_refused(workspace, stage, message, **changes)


def test_a_critic_may_read_less_than_the_actor(workspace: Workspace, tiny_model: Transformer) -> None:
    builder.save_reward(
        workspace.folder / "models/reward", replace(tiny_model.config, max_context=64), workspace.tokenizer
    )
    assert_refused(workspace, "rlhf", r"max_prompt \+ max_new_tokens: expected at most 64, the model's context, got 84")


# parameters

OF_PAIRS, OF_GROUPS = ", ".join(LOSSES), ", ".join(METHODS)
FIVE = "code_format, code, tool_call, length, learned"


@pytest.mark.parametrize(
    ("stage", "changes", "message"),
    [
        ("reward", {"label_flip": 0.5}, r"reward: expected label_flip in \[0, 0\.5\)"),
        ("reward", {"label_flip": -0.1}, r"label_flip in \[0, 0\.5\)"),
        ("dpo", {"loss": "kto"}, f"dpo: loss: expected one of {OF_PAIRS}, got 'kto'"),
        (
            "dpo",
            {"loss": "cdpo", "label_smoothing": 0.5},
            r"label_smoothing: expected a share in \(0, 0\.5\), got 0\.5",
        ),
        (
            "dpo",
            {"loss": "robust", "label_smoothing": -0.1},
            r"label_smoothing: expected a share in \(0, 0\.5\), got -0\.1",
        ),
        (
            "dpo",
            {"label_smoothing": 0.1},
            "label_smoothing: expected 0, because sigmoid has no label smoothing, got 0.1",
        ),
        ("dpo", {"adapter": {"rank": 2, "alpha": 4, "dropout": 0.1}}, r"adapter\.dropout: expected 0 .*, got 0\.1"),
        ("kto", {"loss": "sigmoid"}, "kto: loss: expected one of kto, apo_zero_unpaired, got 'sigmoid'"),
        ("kto", {"answers": 1}, "kto: answers: expected at least 2, got 1"),
        ("kto", {"desirable_weight": 0.0}, "desirable_weight and undesirable_weight > 0, got 0.1, 0.0 and 1.0"),
        ("kto", {"adapter": {"rank": 2, "alpha": 4, "dropout": 0.1}}, r"adapter\.dropout: expected 0 .*, got 0\.1"),
        ("grpo", {"method": "ppo"}, f"grpo: method: expected one of {OF_GROUPS}, got 'ppo'"),
        (
            "grpo",
            {"samples": 1},
            "samples: expected at least 2, got 1; grpo compares each prompt's answers with one another",
        ),
        (
            "grpo",
            {"samples": 1, "method": "rloo"},
            "samples: expected at least 2, got 1; rloo compares each prompt's answers with one another",
        ),
        ("grpo", {"rewards": {"style": 1.0}}, f"rewards: unknown reward 'style'; valid names: {FIVE}"),
        ("grpo", {"rewards": {"learned": 1.0}}, "rewards: `learned` needs a reward model"),
        ("grpo", {"rewards": {"tool_call": 1.0}}, "rewards: `tool_call` needs prompts with a known correct call"),
        ("grpo", {"rewards": {"task": 1.0}}, r"rewards: `task` needs an environment; set grpo\.environment"),
        ("grpo", {"rewards": {}}, f"rewards: expected at least one of {FIVE}"),
        ("rlhf", {"method": "a2c"}, "method: expected rloo or ppo, got 'a2c'"),
        (
            "rlhf",
            {"method": "rloo", "samples": 1},
            "samples: expected at least 2, got 1; rloo compares each prompt's answers",
        ),
        ("rlhf", {"rewards": {"style": 1.0}}, f"rewards: unknown reward 'style'; valid names: {FIVE}"),
        ("rlhf", {"adapter": {"rank": 2, "alpha": 4, "dropout": 0.1}}, r"adapter\.dropout: expected 0 .*, got 0\.1"),
        ("lora", {"rank": 0}, "adapter.rank: expected at least 1, found 0"),
        ("lora", {"trained_roles": ["turn"]}, "trained_roles: expected names from end_of_text, .*; got 'turn'"),
    ],
)
def test_a_parameter_that_cannot_be_is_refused_with_what_can(
    stage: str, changes: dict[str, Any], message: str, workspace: Workspace
) -> None:
    assert_refused(workspace, stage, message, **changes)


# no sandbox


@pytest.fixture
def no_sandbox(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(servers, "JAIL", tmp_path / "missing.py")


@pytest.mark.usefixtures("no_sandbox")
def test_rewards_that_run_code_need_a_sandbox(workspace: Workspace) -> None:
    message = (
        r"safely needs Linux with seccomp\. Set runtime\.sandbox\.url .*, or sandbox\.allow_unsafe: true .* machine: "
    )
    assert_refused(workspace, "grpo", message, rewards={"code": 1.0, "length": 0.5})


@pytest.mark.usefixtures("no_sandbox")
def test_other_rewards_do_without_one_and_the_true_score_of_code_stays_empty(workspace: Workspace) -> None:
    ended = workspace.command("grpo", iterations=1)
    assert ended.code == 0, ended.said
    assert "no sandbox available, so answers with code get no true score" in ended.said
    assert not any(row.get("gold") for row in workspace.curve("grpo"))


def test_a_sandbox_service_that_does_not_answer_is_named(workspace: Workspace) -> None:
    changes: dict[str, Any] = {"rewards": {"code": 1.0}, "runtime.sandbox": {"url": "http://127.0.0.1:9"}}
    assert_refused(workspace, "grpo", r"http://127\.0\.0\.1:9", **changes)
