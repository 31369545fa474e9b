"""Our numbers beside other harnesses': the comparison, our side of it, and what lm-evaluation-harness needs of us.

What EvalPlus 0.3.1 and bfcl-eval 2026.3.23 said here was recorded from runs of them on these very answers. The
harnesses themselves run in `make clients`, and one of them in the last test, where it is installed.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from pipeline.evaluation import benchmarks
from pipeline.evaluation.suites import Subject
from pipeline.model import checkpoint
from pipeline.sandbox.judge import Judge, SandboxConfig
from pipeline.text.tokenizer import Tokenizer
from tests.matrix import agreement, harnesses, lessons
from tests.matrix.agreement import Comparison, Protocol
from tests.server import random_model, serving

# -- the server --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_scored_prompt_has_an_entry_for_the_token_that_ended_the_answer(
    client: openai.OpenAI, byte_tokenizer: Tokenizer, stream: bool
) -> None:
    """lm-evaluation-harness asks for one token and drops the last entry, which must not be a prompt token's."""
    ids = byte_tokenizer.encode("The pilot asked")
    asked: dict[str, Any] = {"model": "nano", "prompt": ids, "temperature": 0, "logprobs": 1, "max_tokens": 1}
    for end in (byte_tokenizer.end_of_text, byte_tokenizer.turn_end):
        bias = {str(end): 100}
        answer: Any = client.completions.create(**asked, echo=True, logit_bias=bias, stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
        told = [choice.logprobs for choice in choices if choice.logprobs]
        logprobs = [value for part in told for value in part.token_logprobs]
        assert len(logprobs) == len(ids) + 1 and logprobs[0] is None and logprobs[-1] < 0
        assert len([top for part in told for top in part.top_logprobs]) == len(ids) + 1
        assert "".join(choice.text for choice in choices) == "The pilot asked", "it adds no text"
        assert choices[-1].finish_reason == "stop"
        alone: Any = client.completions.create(**{**asked, "max_tokens": 0, "echo": True})
        assert logprobs[1:-1] == pytest.approx(alone.choices[0].logprobs.token_logprobs[1:], abs=1e-4)


@pytest.mark.slow
def test_an_answer_without_echo_has_no_entry_for_its_end(client: openai.OpenAI, byte_tokenizer: Tokenizer) -> None:
    bias = {str(byte_tokenizer.end_of_text): 100}
    answer = client.completions.create(model="nano", prompt="The", logprobs=1, max_tokens=4, logit_bias=bias)
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.tokens == []
    assert answer.usage is not None and answer.usage.completion_tokens == 0


# -- items -------------------------------------------------------------------------------------------------------------


def choice(name: str, *logprobs: float, acc: float = 1.0) -> dict[str, Any]:
    return {"id": name, "logprobs": list(logprobs), "acc": acc, "acc_norm": acc}


def test_log_probabilities_must_agree_even_where_the_choice_is_the_same() -> None:
    ours = [choice("a", -1.0, -2.0), choice("b", -1.0, -2.0), choice("c", -1.0, -2.0)]
    theirs = [choice("c", -1.0, -2.0, acc=0.0), choice("a", -1.0004, -2.0), choice("b", -1.0, -2.1)]
    items = agreement.choices(ours, theirs)
    assert [(item.id, item.agrees) for item in items] == [("a", True), ("b", False), ("c", False)]
    found = agreement.failures([Comparison("h", "t", items=items)])
    assert found[0].startswith("h, t, b: ours acc 1, acc_norm 1, log-probabilities -1.0000, -2.0000; theirs")
    assert len(found) == 2, "nothing explains them"


def test_the_first_cause_that_holds_is_the_reason_and_without_one_the_item_fails() -> None:
    causes = [("a rule", False), ("a tolerance", True), ("time", True)]
    ours = [
        {"id": "same", "right": True, "found": "", "causes": causes},
        {"id": "known", "right": True, "found": "", "causes": causes},
        {"id": "strange", "right": False, "found": "", "causes": causes[:1]},
    ]
    theirs = [{"id": name, "right": right, "found": "x"} for name, right in (("same", 1), ("known", 0), ("strange", 1))]
    compared = Comparison("h", "t", items=agreement.verdicts(ours, theirs))
    assert [item.reason for item in compared.items] == ["", "a tolerance", ""]
    assert [item.id for item in compared.unexplained] == ["strange"]
    assert "  known: ours ; theirs x: a tolerance" in agreement.told([compared])
    assert "  strange: ours ; theirs x: NO REASON FOUND" in agreement.told([compared])
    assert agreement.failures([compared]) == ["h, t, strange: ours ; theirs x"]


def test_texts_that_differ_by_one_character_differ() -> None:
    ours, theirs = ({"id": "a", "text": text, "exact_match": 0.0} for text in ("at six", "at six."))
    assert agreement.failures([Comparison("h", "t", items=agreement.texts([ours], [theirs]))])


def test_items_that_only_one_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"found 1 of ours and 2 of theirs; on one side only: \['b'\]"):
        agreement.choices([choice("a", -1.0)], [choice("a", -1.0), choice("b", -1.0)])


def test_the_report_has_numbers_protocols_and_reasons() -> None:
    ours, theirs = Protocol("Q: a|b\nA:", "none", "greedy"), Protocol("Q: a|b\nA:", "['\\n', '<|im_end|>']", "greedy")
    row = {"id": "i", "right": True, "found": "", "causes": [("a rule", True)]}
    items = agreement.verdicts([row], [{"id": "i", "right": False, "found": ""}])
    text = agreement.section(
        [
            Comparison("h", "t", "1.2", items, ours, theirs),
            Comparison("g", "all", absent="not installed; `make clients` installs it"),
            Comparison("f", "all", failed="ended with 1"),
        ]
    )
    assert "| h 1.2 | t | 1 | 0 | 1 (100.0%) | 0 (0.0%) | 1 | 0 |" in text
    assert "| g | all | not run: not installed; `make clients` installs it |" in text
    assert "| f | all | FAIL |" in text
    assert r"| t | theirs | `Q: a\|b\nA:` | ['\n', '<\|im_end\|>'] | greedy |" in text
    assert "| t | ours | the same | none | greedy |" in text
    assert "- t, 1: a rule (for example `i`: ours correct, theirs incorrect)" in text
    assert agreement.failures([Comparison("g", "all", absent="x"), Comparison("f", "all", failed="broke")]) == [
        "f, all: broke"
    ]


def test_a_harness_without_an_environment_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harnesses, "CLIENTS", tmp_path)
    with pytest.raises(harnesses.NotInstalled, match=r"`make clients` installs tests/matrix/bfcl.txt"):
        harnesses.run("bfcl", {}, tmp_path)


@pytest.mark.slow
def test_without_any_harness_each_is_told_and_nothing_fails(
    tmp_path: Path, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harnesses, "CLIENTS", tmp_path / "none")
    checkpoint.save(tmp_path / "nano", random_model(byte_tokenizer), byte_tokenizer, {})
    found = harnesses.measure(tmp_path, tmp_path / "nano")
    assert {comparison.harness for comparison in found} == {"lm-evaluation-harness", "EvalPlus", "bfcl-eval"}
    assert all("`make clients` installs tests/matrix/" in comparison.absent for comparison in found)
    assert not agreement.failures(found) and harnesses.said_calls({}, tmp_path) == []


# -- our side ----------------------------------------------------------------------------------------------------------


def test_a_choices_score_is_the_sum_of_its_tokens(byte_tokenizer: Tokenizer) -> None:
    """Against one forward pass of the whole text and the softmax of its logits."""
    model = random_model(byte_tokenizer)
    subject = Subject(model, byte_tokenizer, harnesses.SETTINGS, 0)
    row = lessons.rows(harnesses.CHOICES)[0]
    found = harnesses.scored(subject, row, begins=False)
    for text, logprob in zip(row["choices"], found["logprobs"], strict=True):
        ids = byte_tokenizer.encode(f"{harnesses.question(row)} {text}")
        start = len(byte_tokenizer.encode(harnesses.question(row)))
        with torch.no_grad():
            table = model(torch.tensor([ids]))[0].double().log_softmax(-1)
        assert logprob == pytest.approx(sum(float(table[i - 1, ids[i]]) for i in range(start, len(ids))), abs=1e-4)
    begun = harnesses.scored(subject, row, begins=True)["logprobs"]
    assert begun != pytest.approx(found["logprobs"], abs=1e-3), "a text that begins a document has another score"


@pytest.mark.slow
def test_what_evalplus_said_is_ours_or_has_its_reason() -> None:
    """The answers of `lessons.program`, with the base and plus statuses that EvalPlus reported."""
    rows = lessons.rows(harnesses.PROBLEMS)
    statuses = [("pass", "pass")] * 4 + [("pass", "fail"), ("pass", "pass"), ("pass", "pass"), ("fail", "fail")]
    cut = 'def largest(numbers: list) -> int:\n    """ The largest number. """\n    return max(numbers)'
    exercises = benchmarks.load(harnesses.PROBLEMS).exercises
    reasons = []
    with Judge(SandboxConfig(), 1) as judge:
        for place, part in enumerate(("base", "plus")):
            tests = harnesses.tests_of(judge, rows, part)
            for number, (row, exercise) in enumerate(zip(rows, exercises, strict=True)):
                text, said = lessons.program(row, number), statuses[number][place]
                code = cut if number == 6 else text.removeprefix("```python\n").removesuffix("\n```")
                status = {f"{part}_status": said, "solution": code}
                ours = harnesses.judged_program(judge, exercise, tests[exercise.id], text, text, status, part)
                (item,) = agreement.verdicts([ours], [{"id": exercise.id, "right": said == "pass", "found": said}])
                assert item.agrees or item.reason, f"{exercise.id} {part}"
                reasons.append(item.reason)
                if number == 5:  # the same program for another answer of the model: nothing explains that
                    other = harnesses.judged_program(judge, exercise, tests[exercise.id], text, "", status, part)
                    assert not any(holds for _, holds in other["causes"])
    each = [*[""] * 5, harnesses.TOLERANCE, harnesses.CUT_DIFFERENTLY, ""]
    assert reasons == each * 2


BFCL: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {  # rows in their format, and the accepted calls
    "simple_python": (
        {
            "name": "chart.mark",
            "description": "Marks buoys.",
            "parameters": {
                "type": "dict",
                "properties": {
                    "port": {"type": "string", "description": "The port."},
                    "miles": {"type": "array", "items": {"type": "float"}, "description": "Distances."},
                    "color": {"type": "string", "description": "Of the buoys."},
                },
                "required": ["port", "miles"],
            },
        },
        [{"chart.mark": {"port": ["Hull", "Kingston upon Hull"], "miles": [[1.5, 3.0]], "color": ["", "red"]}}],
    ),
    "parallel": (
        {
            "name": "book",
            "description": "Books a berth.",
            "parameters": {
                "type": "dict",
                "properties": {
                    "harbor": {"type": "string", "description": "Where."},
                    "berth": {"type": "integer", "description": "Its number."},
                },
                "required": ["harbor", "berth"],
            },
        },
        [{"book": {"harbor": ["Hull", "Goole"], "berth": [4]}}, {"book": {"harbor": ["Goole"], "berth": [4]}}],
    ),
}
ACCEPTED = {  # which of `lessons.VARIANTS` bfcl-eval accepts
    "simple_python": {"truth", "last-values", "required-alone", "loud-texts", "fractions", "backwards"},
    "parallel": {"truth", "last-values", "required-alone", "loud-texts", "whole-numbers"},
}


@pytest.mark.parametrize("category", BFCL)
def test_what_bfcl_eval_said_of_each_kind_of_answer_is_ours_or_has_its_reason(category: str, tmp_path: Path) -> None:
    function, truth = BFCL[category]
    name, file = f"{category}_0", f"BFCL_v4_{category}.json"
    row = {"id": name, "question": [[{"role": "user", "content": "Please."}]], "function": [function]}
    (tmp_path / "possible_answer").mkdir()
    (tmp_path / file).write_text(json.dumps(row) + "\n")
    (tmp_path / "possible_answer" / file).write_text(json.dumps({"id": name, "ground_truth": truth}) + "\n")
    question = harnesses.questions(tmp_path, [category])[name]
    reasons = {}
    for variant, change in lessons.VARIANTS.items():
        calls = [call | {"name": call["name"].replace(".", "_")} for call in change(question.truth)]
        verdict = harnesses.in_their_names(question, calls)
        causes = harnesses.known_causes(question, calls, verdict)
        theirs = {"id": name, "right": variant in ACCEPTED[category], "found": ""}
        ours = {"id": name, "right": verdict.valid, "found": "", "causes": causes}
        (item,) = agreement.verdicts([ours], [theirs])
        assert item.agrees or item.reason, f"{variant}: ours {verdict}"
        if not item.agrees:
            reasons[variant] = item.reason
    known = {"simple_python": {"whole-numbers": harnesses.IN_LISTS}, "parallel": {"backwards": harnesses.BY_ORDER}}
    assert reasons == known[category]


def test_a_lesson_trains_the_answer_alone(byte_tokenizer: Tokenizer) -> None:
    ids, trained = lessons.encoded(byte_tokenizer, lessons.Said("Question: a\nAnswer:", " b"))
    assert (
        byte_tokenizer.decode([id_ for id_, yes in zip(ids, trained) if yes], skip_special=False) == " b<|endoftext|>"
    )
    call = {"name": "book", "arguments": {"berth": 4}}
    asked = lessons.Said([{"role": "user", "content": "Book it."}], "", calls=(call,))
    ids, trained = lessons.encoded(byte_tokenizer, asked)
    said = byte_tokenizer.decode([id_ for id_, yes in zip(ids, trained) if yes], skip_special=False)
    assert said == '<tool_call>\n{"name": "book", "arguments": {"berth": 4}}\n</tool_call><|im_end|>'


# -- a harness ---------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_lm_evaluation_harness_and_we_agree_on_an_untrained_model(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    if not (harnesses.CLIENTS / "lm_eval" / ".ready").is_file():
        pytest.skip("lm-evaluation-harness is not installed: make clients")
    checkpoint.save(tmp_path / "nano", random_model(byte_tokenizer), byte_tokenizer, {})
    subject = Subject(random_model(byte_tokenizer), byte_tokenizer, harnesses.SETTINGS, 0)
    keys = {"STAGECOACH_API_KEYS": harnesses.KEY}
    with serving([tmp_path / "nano"], log=tmp_path / "log", environment=keys) as server:
        found = harnesses.with_lm_eval(harnesses.Setting(subject, tmp_path / "nano", server.url, tmp_path))
    assert [len(comparison.items) for comparison in found] == [8, 8, 6]
    assert not agreement.failures(found) and all(item.agrees for item in found[0].items)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
