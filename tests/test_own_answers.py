"""Pairs of a model's own answers: ordered by truth, at most two a prompt, and only where the truth is known."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.evaluation import preferences
from pipeline.ingest.records import Pair
from pipeline.rl.answers import Prompt
from pipeline.sandbox.judge import Judge, SandboxConfig
from pipeline.text.tokenizer import Tokenizer

RIGHT = "```python\ndef double(x):\n    return 2 * x\n```"
WRONG = "```python\ndef double(x):\n    return x\n```"
TESTS = [{"args": f"[{n}]", "expected": str(2 * n), "visible": False} for n in (1, 2, 3)]


@dataclass
class Said:
    ids: list[int]
    logprobs: list[float]
    stop: str = "stop"


def prompt(identity: str, truth: dict[str, Any] | None) -> Prompt:
    pair = Pair(
        id=identity,
        source="generated",
        kind="code",
        prompt=[{"role": "user", "content": "Double it."}],
        chosen=[{"role": "assistant", "content": RIGHT}],
        rejected=[{"role": "assistant", "content": WRONG}],
        truth=truth,
    )
    return Prompt(identity, [5, 6, 7], "code", pair)


def saying(tokenizer: Tokenizer, texts: Sequence[str]) -> Any:
    def generate(prompts: list[list[int]], seeds: list[int]) -> list[Said]:
        assert len(prompts) == len(texts)
        encoded = [tokenizer.encode(text) for text in texts]
        return [Said(ids, [-0.5] * (len(ids) + 1)) for ids in encoded]

    return generate


def test_the_best_and_the_worst_answer_make_a_pair_and_equal_ones_none(byte_tokenizer: Tokenizer) -> None:
    truth = {"entry_point": "double", "tests": TESTS}
    prompts = [prompt("mixed", truth), prompt("all wrong", truth), prompt("nobody knows", None)]
    texts = [WRONG, "no code", RIGHT, WRONG, WRONG, WRONG, WRONG, WRONG, RIGHT, WRONG, RIGHT, WRONG]
    with Judge(SandboxConfig(), 1) as judge:
        (found,) = preferences.own_pairs(saying(byte_tokenizer, texts), prompts, byte_tokenizer, judge, 1)
    assert (found.pair.id, found.pair.kind, found.pair.gold_chosen, found.pair.gold_rejected) == (
        "own-mixed-1",
        "own code",
        1.0,
        0.0,
    )
    ids = byte_tokenizer.encode(RIGHT)
    assert found.chosen.ids.tolist() == [5, 6, 7, *ids, byte_tokenizer.turn_end]
    assert list(found.chosen.trained) == [False] * 3 + [True] * (len(ids) + 1)
    assert found.pair.rejected == [{"role": "assistant", "content": "no code"}]


def test_the_next_best_and_the_next_worst_make_a_second_pair(byte_tokenizer: Tokenizer) -> None:
    prompts = [prompt("mixed", {"entry_point": "double", "tests": TESTS})]
    texts = [RIGHT, "no code", WRONG, RIGHT.replace("2 * x", "x + x")]
    with Judge(SandboxConfig(), 1) as judge:
        found = preferences.own_pairs(saying(byte_tokenizer, texts), prompts, byte_tokenizer, judge, 1)
    assert [(one.pair.id, one.pair.gold_chosen, one.pair.gold_rejected) for one in found] == [
        ("own-mixed-1", 1.0, 0.0),
        ("own-mixed-2", 1.0, 0.2),
    ]
    said = [[message["content"] for message in (*one.pair.chosen, *one.pair.rejected)] for one in found]
    assert said == [[texts[0], texts[1]], [texts[3], texts[2]]]


def test_without_a_sandbox_code_has_no_truth_and_so_no_pair(byte_tokenizer: Tokenizer) -> None:
    prompts = [prompt("mixed", {"entry_point": "double", "tests": TESTS})]
    generate = saying(byte_tokenizer, [WRONG, "no code", RIGHT, WRONG])
    assert preferences.own_pairs(generate, prompts, byte_tokenizer, None, 1) == []
