"""Generated problems: answers pass, neighbors fail, splits are disjoint, bytes are the same everywhere."""

import ast
import hashlib
import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from itertools import islice
from typing import Any

import pytest

from pipeline.ingest.records import Problem, dumps
from pipeline.run.errors import DataError
from pipeline.synthetic import chains, operations, programs, wording
from pipeline.synthetic.chains import Step, parse
from pipeline.synthetic.operations import Draw

SIZES = {"train": 100, "val": 20, "rl": 40, "test": 80}


@cache
def some(split: str) -> tuple[Problem, ...]:
    return tuple(programs.problems(split, SIZES[split], 7))


def every() -> list[Problem]:
    return [problem for split in SIZES for problem in some(split)]


def execute(source: str, name: str) -> Any:
    space: dict[str, Any] = {}
    exec(source, space)
    return space[name]


def share_passed(source: str, problem: Problem) -> float:
    """The share of tests that a source passes, by a slow and obvious judge."""
    try:
        answer = execute(source, problem.entry_point)
    except SyntaxError:
        return 0.0
    passed = 0
    for test in problem.tests:
        try:
            passed += repr(answer(*ast.literal_eval(test["args"]))) == test["expected"]
        except Exception:
            continue
    return passed / len(problem.tests)


def test_every_answer_passes_every_test() -> None:
    for problem in every():
        source = parse(problem.id.rpartition("-")[2]).source(problem.entry_point)
        if problem.answer is not None:
            assert problem.answer == f"```python\n{source}\n```"
        assert share_passed(source, problem) == 1.0, problem.id


def test_a_request_has_tests_that_its_answer_passes_and_is_asked_in_words_that_training_never_uses() -> None:
    requests = list(programs.requests(7))
    assert list(programs.requests(7)) == requests
    names = {problem.key.partition("/")[2].partition(".")[0] for problem in requests}
    assert set(chains.singles()) - names == {"magnitude"}  # its short inputs are positive
    for problem in requests:
        source = parse(problem.id.rpartition("-")[2]).source("solve")
        assert problem.answer == f"```python\n{source}\n```" and share_passed(source, problem) == 1.0
        assert "solve" not in problem.question and "{" not in problem.question
    trained = {words_of(programs.request(Draw("any", number))[0]) for number in range(4000)}
    assert len(trained) > 1500 and not trained & {words_of(problem.question) for problem in requests}


def words_of(question: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", question.lower()))


def test_every_operation_has_requests_that_differ_and_state_its_constant() -> None:
    for operation in operations.chain_operations():
        asked = wording.lines("requests.yaml", operation.name)
        assert len(asked) > 6 and len(set(map(words_of, asked))) == len(asked)
        assert all(("{k}" in line) == operation.has_constant for line in asked), operation.name
    assert set(wording.table("requests.yaml")) == {operation.name for operation in operations.chain_operations()}


def test_the_answer_to_a_request_is_the_program_that_was_asked_for() -> None:
    answers = dict(programs.request(Draw("any", number), held_out=True) for number in range(2000))
    checked = [problem for problem in programs.requests(7) if problem.question in answers]  # the constants are equal
    for problem in checked:
        assert share_passed(programs.unfenced(answers[problem.question]), problem) == 1.0, problem.question
    assert len(checked) > 90


def test_neighbors_that_differ_fail_a_test() -> None:
    failed = passed = 0
    for problem in every()[::5]:
        program = parse(problem.id.rpartition("-")[2])
        if program.second is not None:
            continue
        probe = [(value,) for value in operations.probes(program.takes)]
        # These neighbors are newly drawn, not those that the tests were made against.
        for wrong in islice(chains.neighbors(program, Draw("other", problem.id)), 16):
            if any(repr(wrong.run(one)) != repr(program.run(one)) for one in probe):
                missed = share_passed(wrong.source(problem.entry_point), problem) == 1.0
                failed, passed = failed + (not missed), passed + missed
    assert failed + passed > 400 and passed < 0.01 * failed, (failed, passed)


def test_tests_are_three_visible_and_twelve_to_twenty_four_hidden_with_edges_and_no_value_over_half() -> None:
    for problem in every():
        visible = [test["visible"] for test in problem.tests]
        assert visible[:3] == [True] * 3 and not any(visible[3:]) and 12 <= len(visible) - 3 <= 24
        expected = Counter(test["expected"] for test in problem.tests)
        assert max(expected.values()) * 2 <= len(problem.tests), problem.id
        first = [ast.literal_eval(test["args"])[0] for test in problem.tests]
        assert any(not value for value in first), problem.id  # empty, or zero
        if problem.signature.split("(")[1].startswith("numbers"):
            assert any(len(value) == 1 for value in first) and any(len(value) >= 12 for value in first)
            assert any(value and max(value) < 0 for value in first)
        for test in problem.tests:
            assert set(test) == {"args", "expected", "visible"}
            assert repr(ast.literal_eval(test["expected"])) == test["expected"]


def test_no_key_is_in_two_splits() -> None:
    keys = {split: {problem.key for problem in some(split)} for split in SIZES}
    for one in keys:
        for other in keys:
            assert one == other or not keys[one] & keys[other]


def test_splits_by_hash_have_their_shares() -> None:
    shares = Counter(chains.split_of(f"key{number}") for number in range(5000))
    assert shares["test"] == pytest.approx(500, rel=0.15) and shares["rl"] == pytest.approx(1000, rel=0.15)
    assert chains.split_of("add+sort") == chains.split_of("add+sort")


def test_operations_and_ordinary_phrasings_of_the_test_split_occur_in_training() -> None:
    def steps(split: str, count: int) -> set[tuple[str, int]]:
        found = set()
        for number in range(count):
            _, program = programs._program(split, Draw(split, number))
            found |= {(step.operation.name, step.phrasing) for step in program.steps if isinstance(step, Step)}
        return found

    trained = steps("train", 2000)
    assert {name for name, _ in trained} == {one.name for one in operations.chain_operations()}
    for one in operations.chain_operations():
        assert {phrasing for name, phrasing in trained if name == one.name} == set(range(len(one.phrasings) - 1))


def test_training_never_uses_a_held_out_phrasing_and_the_phrasing_group_uses_nothing_else() -> None:
    held_out = [one.phrasings[-1] for one in operations.all_operations()]
    patterns = [
        re.compile(r"(: |should |to |then )" + re.escape(one).replace(r"\{k\}", r"\d") + r"[.,]") for one in held_out
    ]
    for problem in (*some("train"), *some("rl"), *some("val")):
        assert not any(pattern.search(problem.question) for pattern in patterns), problem.question
    told = [problem for problem in some("test") if problem.group == "phrasing"]
    assert told and all(any(pattern.search(problem.question) for pattern in patterns) for problem in told)


def test_levels_groups_and_answers_are_those_of_the_split() -> None:
    assert {problem.level for problem in some("train")} == {1, 2, 3}
    assert {problem.level for problem in some("rl")} == {2, 3, 4} and all(one.answer is None for one in some("rl"))
    groups = Counter((problem.group, problem.level) for problem in some("test"))
    assert groups == {
        ("medium", 2): 20,
        ("medium", 3): 20,
        ("easy", 1): 16,
        ("hard", 4): 8,
        ("phrasing", 1): 6,
        ("phrasing", 2): 6,
        ("told", 5): 4,
    }
    for problem in some("train"):
        if problem.level == 3:
            assert chains.is_shown(problem.key)


def test_a_question_holds_signature_and_visible_tests_and_is_short() -> None:
    for problem in every():
        assert problem.signature in problem.question
        for test in problem.tests:
            call = f"{problem.entry_point}({test['args'][1:-1]}) == {test['expected']}"
            assert call in problem.question or not test["visible"]
        assert len(problem.question) < 900
    lengths = [len(problem.question) + len(problem.answer or "") for problem in some("train")]
    assert sum(lengths) / len(lengths) < 450  # about 130 tokens of 3.3 bytes


def test_a_longer_run_begins_with_the_shorter_one_and_ids_are_unique() -> None:
    assert tuple(programs.problems("train", 20, 7)) == some("train")[:20]
    assert next(programs.problems("train", 1, 8)) != some("train")[0]
    assert len({problem.id for problem in every()}) == len(every())
    with pytest.raises(ValueError, match="split must be"):
        next(programs.problems("dev", 1, 7))


def test_distractors_are_wrong_in_their_way_and_mostly_fail() -> None:
    kinds: Counter[str] = Counter()
    passing: Counter[str] = Counter()
    for problem in (*some("train")[:80], *some("rl")[:20]):
        right = parse(problem.id.rpartition("-")[2]).source(problem.entry_point)
        wrong = programs.distractors(problem, 3)
        assert wrong == programs.distractors(problem, 3)
        assert len({source for _, source in wrong} | {right}) == len(wrong) + 1
        for kind, source in wrong:
            kinds[kind] += 1
            score = share_passed(source, problem)
            passing[kind] += score == 1.0
            if kind == "broken_syntax":
                with pytest.raises(SyntaxError):
                    ast.parse(source)
            else:
                ast.parse(source)
            if kind == "lost_default":
                assert score < 1.0 or "sort" in source or "+" in problem.key
    assert set(kinds) == {"other_operation", "off_by_one", "wrong_constant", "lost_default", "broken_syntax"}
    assert passing["broken_syntax"] == 0
    assert sum(passing.values()) < 0.1 * sum(kinds.values()), (kinds, passing)


def test_a_dialogue_is_question_and_answer_and_needs_an_answer() -> None:
    problem = some("train")[0]
    dialogue = programs.dialogue(problem)
    assert (dialogue.kind, dialogue.category, dialogue.id) == ("code", problem.group, problem.id)
    assert [message["role"] for message in dialogue.messages] == ["user", "assistant"]
    assert dialogue.messages[0]["content"] == problem.question
    with pytest.raises(DataError, match="has no answer"):
        programs.dialogue(some("rl")[0])


def test_generated_sources_hold_true_asserts_and_only_training_keys() -> None:
    texts = list(programs.sources(30_000, 7))
    size = sum(len(text.text.encode()) for text in texts)
    assert 30_000 <= size < 33_000
    assert len({text.path for text in texts}) == len(texts)
    for text in texts:
        assert (text.source, text.license) == ("generated", "CC0-1.0")
        exec(text.text, {})
        assert len([node for node in ast.parse(text.text).body if isinstance(node, ast.FunctionDef)]) == 3
    for number in range(150):
        program = programs._source_program(programs.SOURCE_SHAPES[number % 10], Draw("s", number))
        assert chains.split_of(chains.key_of(program)) == "train"


@pytest.mark.slow
@pytest.mark.full
def test_records_do_not_depend_on_the_hash_seed_or_the_locale() -> None:
    script = (
        "import hashlib\n"
        "from pipeline.ingest.records import dumps\n"
        "from pipeline.synthetic import programs\n"
        "digest = hashlib.sha256()\n"
        "for split in ('train', 'val', 'rl', 'test'):\n"
        "    for problem in programs.problems(split, 4, 7):\n"
        "        digest.update((dumps(problem) + repr(programs.distractors(problem, 1))).encode())\n"
        "for text in programs.sources(2000, 7):\n"
        "    digest.update(dumps(text).encode())\n"
        "print(digest.hexdigest())\n"
    )
    here = hashlib.sha256()
    for split in SIZES:
        for problem in some(split)[:4]:
            here.update((dumps(problem) + repr(programs.distractors(problem, 1))).encode())
    for text in programs.sources(2000, 7):
        here.update(dumps(text).encode())
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "LC_ALL": "C", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    there = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert there.stdout.strip() == here.hexdigest()
