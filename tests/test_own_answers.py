"""Pairs of a model's own answers: ordered by truth, at most two per prompt, and only where the truth is known."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.batches.pairs import Encoded
from pipeline.evaluation import preferences
from pipeline.ingest.records import Pair
from pipeline.model.transformer import Transformer
from pipeline.rl import answers as rl_answers
from pipeline.rl.answers import Answer, Prompt
from pipeline.sandbox.judge import Judge, SandboxConfig
from pipeline.synthetic.preferences import assistant
from pipeline.text.tokenizer import Tokenizer

RIGHT = '```python\ndef double(x):\n    """Double it."""\n    return 2 * x\n```'
WRONG = RIGHT.replace("2 * x", "x")
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
        ("own-mixed-2", 1.0, 0.5),
    ]
    said = [[message["content"] for message in (*one.pair.chosen, *one.pair.rejected)] for one in found]
    assert said == [[texts[0], texts[1]], [texts[3], texts[2]]]


def test_without_a_sandbox_code_has_no_truth_and_so_no_pair(byte_tokenizer: Tokenizer) -> None:
    prompts = [prompt("mixed", {"entry_point": "double", "tests": TESTS})]
    generate = saying(byte_tokenizer, [WRONG, "no code", RIGHT, WRONG])
    assert preferences.own_pairs(generate, prompts, byte_tokenizer, None, 1) == []


def test_the_share_of_wins_counts_equal_scores_half_and_unknown_ones_not() -> None:
    found = preferences.win_rate([1.0, 0.5, 0.2, None, 0.9], [0.0, 0.5, 0.7, 0.1, None], 1)
    assert found["prompts"] == 3 and found["win_rate"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert found["win_rate_low"] <= found["win_rate"] <= found["win_rate_high"]
    assert preferences.win_rate([None], [1.0], 1) == {}


def test_likelihood_ranks_by_the_mean_of_an_answer_s_tokens(tiny_model: Transformer, byte_tokenizer: Tokenizer) -> None:
    """Short and long answers, each side worked out by hand; the truth swaps one pair."""
    texts = [("yes", "no, never in a hundred years"), ("a b c d e f", "a"), ("left", "right")]
    pairs, means = [], list[float]()
    for number, sides in enumerate(texts):
        asked = prompt(str(number), None)
        pieces = [rl_answers.piece_of(Answer(asked, 0, byte_tokenizer.encode(text), [], True, text)) for text in sides]
        assert isinstance(asked.record, Pair)
        record = replace(asked.record, gold_chosen=float(number < 2), gold_rejected=0.5)
        pairs.append(Encoded(record, *pieces))
        for piece in pieces:
            ids = torch.tensor(piece.ids)[None]
            with torch.no_grad():
                logprobs = tiny_model(ids)[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
            means.append(float(logprobs[torch.tensor(np.asarray(piece.trained)[1:])].mean()))
    right = [means[0] > means[1], means[2] > means[3], means[5] > means[4]]
    found = preferences.likelihood_ranking(tiny_model, pairs, byte_tokenizer.pad, torch.device("cpu"))
    assert found["accuracy"] == pytest.approx(sum(right) / 3) and found["code"]["accuracy"] == found["accuracy"]


def test_pairs_of_code_are_also_told_apart_by_what_differs(byte_tokenizer: Tokenizer) -> None:
    plain = "```python\ndef f(x):\n    return x\n```"
    wrong = plain.replace("return x", "return -x")
    good = plain.replace("):\n", '):\n    """Return x."""\n')
    sides = [
        (good, plain, "code", "generated"),
        (plain, wrong, "code", "generated"),
        (good, plain, "code", "hub"),
        (plain, wrong, "story", "generated"),
    ]
    pairs = []
    for number, (chosen, rejected, kind, source) in enumerate(sides):
        asked = prompt(str(number), None)
        pieces = [
            rl_answers.piece_of(Answer(asked, 0, byte_tokenizer.encode(t), [], True, t)) for t in (chosen, rejected)
        ]
        assert isinstance(asked.record, Pair)
        messages = {name: [assistant(text)] for name, text in (("chosen", chosen), ("rejected", rejected))}
        pairs.append(Encoded(replace(asked.record, kind=kind, source=source, **messages), *pieces))
    found = {name: members.tolist() for name, members in preferences.by_kind(pairs).items()}
    assert found == {
        "": [True] * 4,
        "code": [True, True, True, False],
        "code style": [True, False, False, False],
        "code tests": [False, True, False, False],
        "story": [False, False, False, True],
    }
