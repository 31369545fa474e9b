"""Test sets given by path: read or refused, made safe to judge, scored as computed by hand, impossible to cheat."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.evaluation import benchmarks, code
from pipeline.evaluation import bfcl as evaluation_bfcl
from pipeline.evaluation.suites import SuiteResult
from pipeline.model import checkpoint
from pipeline.model.transformer import Transformer
from pipeline.run import mlflow_store
from pipeline.run.errors import DataError
from pipeline.sandbox import servers
from pipeline.sandbox.judge import Candidate, Judge, SandboxConfig
from pipeline.text.tokenizer import Tokenizer
from tests.judges import beside
from tests.judges import real_judge as real_judge
from tests.suites import DOUBLE, HALF, Scripted, write_set
from tests.suites import scripted_subjects as scripted_subjects

SHIFT = {
    "task_id": "Own/1",
    "prompt": (
        'def encode(text: str) -> str:\n    return "".join(chr(ord(c) + 1) for c in text)\n\n\ndef decode(text: str) ->'
        ' str:\n    """Undo encode."""\n'
    ),
    "entry_point": "decode",
    "canonical_solution": '    return "".join(chr(ord(c) - 1) for c in text)\n',
    "test": (
        "def check(candidate):\n    from random import choice\n    import string\n\n    for _ in range(20):\n       "
        " text = ''.join(choice(string.ascii_lowercase) for _ in range(5))\n        assert candidate(encode(text)) =="
        " text\n"
    ),
}
HUMANEVAL = [DOUBLE, SHIFT, HALF]
MBPP = [
    {
        "task_id": 2,
        "text": "Write a function that adds one.",
        "code": "def inc(x):\r\n\treturn x + 1",
        "test_list": ["assert inc(1) == 2", "assert inc(0) == 1"],
        "test_setup_code": "",
        "challenge_test_list": ["assert inc(-1) == 0"],
    },
    {
        "task_id": 11,
        "text": "Write a function that squares.",
        "code": "def square(x):\r\n    return x * x",
        "test_list": ["assert square(3) == 9", "assert square(2) == 2 ** 2"],
        "test_setup_code": "",
        "challenge_test_list": [],
    },
    {
        "task_id": 12,
        "text": "Write a function for the area.",
        "code": "def area(r):\n    return math.pi * r * r",
        "test_list": ["assert math.isclose(area(1), PI)", "assert math.isclose(area(2), 4 * PI, rel_tol=0.001)"],
        "test_setup_code": "import math\nPI = math.pi",
        "challenge_test_list": [],
    },
    {
        "task_id": 600,
        "text": "Write a function.",
        "code": "def f():\n    return 1",
        "test_list": ["assert f() == 1"],
        "test_setup_code": "",
        "challenge_test_list": [],
    },
]
SANITIZED = [
    {
        "source_file": "own",
        "task_id": row["task_id"],
        "prompt": row["text"],
        "code": row["code"],
        "test_imports": ["import math"] if row["task_id"] == 12 else [],
        "test_list": [test.replace("PI", "3.141592653589793") for test in row["test_list"]],
    }
    for row in MBPP
]
WEATHER = {
    "name": "weather.now",
    "description": "The weather.",
    "parameters": {
        "type": "dict",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "limits": {"type": "tuple", "items": {"type": "float"}},
        },
        "required": ["city"],
    },
}


def bfcl(folder: Path, name: str, turns: dict[str, list[dict[str, Any]] | None]) -> Path:
    """Write a category's file from id -> truth; None for a category without truths."""
    table = [{"id": i, "question": [[{"role": "user", "content": f"Ask {i}."}]], "function": [WEATHER]} for i in turns]
    if None not in turns.values():
        write_set(folder / "possible_answer" / name, [{"id": i, "ground_truth": truth} for i, truth in turns.items()])
    return write_set(folder / name, table)


def scored(subject: Scripted, *paths: Path, completes: bool = False) -> SuiteResult:
    sets = [benchmarks.load(path) for path in paths]
    return benchmarks.score(subject, sets, completes=completes, sandbox=lambda: Judge(SandboxConfig(), 2))


def fenced(source: str) -> str:
    return f"```python\n{source}\n```"


# HumanEval


def test_pass_at_k_of_a_gzipped_humaneval_file_is_what_hand_counting_gives(scripted: Any, tmp_path: Path) -> None:
    path = write_set(tmp_path / "HumanEval.jsonl.gz", [DOUBLE, SHIFT])
    right = {row["task_id"]: row["canonical_solution"] for row in HUMANEVAL}
    wrong = "    return None\n"
    answers: dict[Any, Any] = {("Own/0", 0): right["Own/0"] + "\n\ndef more():\n    pass", ("Own/1", 0): wrong}
    for sample in range(1, 6):  # right samples: 2 of 5 and 1 of 5
        answers[("Own/0", sample)] = right["Own/0"] if sample in (2, 5) else wrong
        answers[("Own/1", sample)] = right["Own/1"] + "# end\nprint(1)" if sample == 3 else "    syntax error"
    subject = scripted(answers, samples=5)
    result = scored(subject, path, completes=True)
    numbers = result.numbers["HumanEval"]
    assert (numbers["kind"], numbers["form"], numbers["problems"], numbers["n"]) == ("humaneval", "completion", 2, 2)
    assert (numbers["pass_at_1_greedy"], numbers["pass_at_1_greedy_low"]) == (0.5, pytest.approx(0.0945, abs=1e-4))
    assert numbers["pass_at_1"] == pytest.approx((2 / 5 + 1 / 5) / 2)
    assert numbers["pass_at_5"] == 1.0 and "pass_at_10" not in numbers
    assert numbers["pass_at_1_low"] == pytest.approx(0.2) and numbers["pass_at_1_high"] == pytest.approx(0.4)
    assert (numbers["asserts"], numbers["asserts_unprotected"], numbers["unjudged"]) == (3, 0, 0)
    assert "format_rate" not in numbers and numbers["parse_rate"] == 1.0
    t = subject.tokenizer
    assert subject.asked["Own/0"] == [t.end_of_text, *t.encode(DOUBLE["prompt"])]
    assert [(row["suite"], row["id"], row["verdict"]) for row in result.rows] == [
        ("benchmarks/HumanEval", "Own/0", "passed"),
        ("benchmarks/HumanEval", "Own/1", "wrong"),
    ]


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (fenced("def double(values: List[int]) -> List[int]:\n    return [v + v for v in values]"), "passed"),
        ("Here it is:\n" + fenced("def double(values):\n    return values * 2"), "wrong"),
        (fenced("    return [v + v for v in values]"), "passed"),  # the body alone
        (fenced("return 1"), "syntax"),
        ("I would double each value.", "no_code"),
        (fenced("def twice(values):\n    return [v + v for v in values]"), "wrong"),  # the exercise's own stub answers
    ],
)
def test_in_chat_the_block_is_the_function_or_its_body(
    scripted: Any, tmp_path: Path, answer: str, verdict: str
) -> None:
    result = scored(scripted({"Own/0": answer}), write_set(tmp_path / "h.jsonl", [DOUBLE]))
    assert result.numbers["h"]["form"] == "chat" and "format_rate" in result.numbers["h"]
    assert [row["verdict"] for row in result.rows] == [verdict]


def test_what_cannot_be_judged_is_counted_named_and_never_passed(scripted: Any, tmp_path: Path) -> None:
    variable = HALF | {"task_id": "Own/3", "test": "def check(candidate):\n    r = candidate(4)\n    assert r == 2\n"}
    lying = HALF | {"task_id": "Own/4", "canonical_solution": "    return x\n"}
    answers = dict.fromkeys(("Own/2", "Own/3", "Own/4"), "    return x / 2\n")
    result = scored(scripted(answers), write_set(tmp_path / "h.jsonl", [HALF, variable, lying]), completes=True)
    numbers = result.numbers["h"]
    assert (numbers["problems"], numbers["n"], numbers["pass_at_1_greedy"]) == (3, 1, 1.0)
    assert (numbers["unjudged"], numbers["reference_fails"], numbers["partly_judged"]) == (1, 1, 1)
    assert (numbers["asserts"], numbers["asserts_unprotected"]) == (5, 3)
    named = {row["id"]: (row["verdict"], row["output"]) for row in result.rows if row["suite"] == "benchmarks/h/tests"}
    assert named["Own/2"] == ("1 of its asserts cannot be judged safely", "assert result == 2")
    assert named["Own/3"][0].startswith("none of its tests can be judged safely")
    assert named["Own/4"][0].startswith("the solution fails the problem's own tests (wrong, value: 0 of 1 tests pass)")


EQUAL = "class Always(list):\n    def __eq__(self, other):\n        return True\n    __hash__ = None\n"
HOSTILE = {
    "__eq__": "    return Always()\n\n\n" + EQUAL,
    "patched check": (
        "    import sys\n    sys._getframe(1).f_globals['check'] = lambda f: None\n    check = None\n    return"
        " Always()\n\n\n" + EQUAL + "\ncheck = lambda candidate: None"
    ),
    "exit at import": "    return 0\n\n\nimport sys\nsys.exit(0)\n",
    "exit in the call": "    import os\n    os._exit(0)\n",
    "asks the caller": (
        "    import sys\n    frame = sys._getframe(1)\n    while frame:\n        for value in"
        " frame.f_locals.values():\n            if value == [2, 4]:\n                return value\n        frame ="
        " frame.f_back\n    return Always()\n\n\n" + EQUAL
    ),
    "patched builtins": (
        "    return 0\n\n\nimport builtins\nbuiltins.AssertionError = type('A', (BaseException,), {})\nimport"
        " json\njson.dumps = lambda *a, **k: '[2, 4]'\n"
    ),
    "only the shown example": "    return [2] if values == [1] else []\n",
    "empty": "",
}


def test_no_hostile_solution_passes_although_a_check_run_beside_it_is_deceived(scripted: Any, tmp_path: Path) -> None:
    """Stop sequences are no defense here: the answers come whole, as from a chat model."""
    table = [DOUBLE | {"task_id": name} for name in HOSTILE]
    answers = {name: fenced(DOUBLE["prompt"] + body) for name, body in HOSTILE.items()}
    result = scored(scripted(answers), write_set(tmp_path / "h.jsonl", table))
    assert {row["id"]: row["verdict"] for row in result.rows if row["verdict"] == "passed"} == {}
    assert (result.numbers["h"]["n"], result.numbers["h"]["pass_at_1_greedy"]) == (len(HOSTILE), 0.0)
    assert beside(DOUBLE["prompt"] + HOSTILE["__eq__"], DOUBLE["test"], "double")
    assert beside(DOUBLE["prompt"] + HOSTILE["patched check"], DOUBLE["test"], "double")


# MBPP


def test_both_forms_of_mbpp_give_the_test_split_with_its_setup(judge: Judge, tmp_path: Path) -> None:
    for path in (write_set(tmp_path / "mbpp.jsonl", MBPP), write_set(tmp_path / "sanitized-mbpp.json", SANITIZED)):
        loaded = benchmarks.load(path)
        assert (loaded.kind, [e.id for e in loaded.exercises]) == ("mbpp", ["MBPP/11", "MBPP/12"])
        square, area = loaded.exercises
        assert (square.entry_point, area.entry_point, square.before) == ("square", "area", "")
        assert area.before.startswith("import math") and "\r" not in square.reference
        tests = code.protect(judge, [square.check, area.check])
        assert [len(t.tests) for t in tests] == [2, 2] and not any(t.unprotected for t in tests)
        programs = [
            Candidate(source=source, entry_point=exercise.entry_point, tests=found.tests)
            for exercise, found in zip(loaded.exercises, tests, strict=True)
            for source in (exercise.reference, exercise.completed("def area(r):\n    return 3 * r\n[DONE]\n%"))
        ]
        assert [v.verdict for v in judge.judge(programs)] == ["passed", "error", "passed", "wrong"]


def test_a_base_model_sees_worked_examples_and_a_chat_model_one_task(tmp_path: Path) -> None:
    square = benchmarks.load(write_set(tmp_path / "mbpp.jsonl", MBPP)).exercises[0]
    shot, task = square.continued.split("[DONE]\n\n")
    assert shot.endswith("[BEGIN]\ndef inc(x):\n\treturn x + 1\n") and "assert inc(0) == 1" in shot
    assert task.endswith("assert square(2) == 2 ** 2\n[BEGIN]\n") and task.startswith(square.asked)
    assert square.completed("def square(x):\n    return x\n[DONE]\nmore") == "def square(x):\n    return x\n"


def test_an_mbpp_file_without_the_test_split_is_scored_whole(scripted: Any, tmp_path: Path) -> None:
    path = write_set(tmp_path / "mine.jsonl", [MBPP[3] | {"task_id": 1000 + n} for n in range(3)])
    answers = {"MBPP/1000": "def f():\n    return 1\n[DONE]", "MBPP/1001": "def f():\n    return 2", "MBPP/1002": ""}
    result = scored(scripted(answers), path, completes=True)
    assert (result.numbers["mine"]["n"], result.numbers["mine"]["pass_at_1_greedy"]) == (3, pytest.approx(1 / 3))
    assert [row["verdict"] for row in result.rows] == ["passed", "wrong", "no_code"]


# BFCL


def call(**arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'weather.now', 'arguments': arguments})}\n</tool_call>"


def test_calls_are_scored_by_category_with_wilsons_interval(scripted: Any, tmp_path: Path) -> None:
    rome = {"weather.now": {"city": ["Rome", "roma"], "days": ["", 3], "limits": ["", [1.0, 2.5]]}}
    oslo = {"weather.now": {"city": ["Oslo"], "days": ["", 3], "limits": [""]}}
    simple = bfcl(tmp_path, "BFCL_v3_simple.json", {f"s{n}": [rome] for n in range(4)})
    parallel = bfcl(tmp_path, "BFCL_v4_live_parallel.json", {"p0": [rome, oslo], "p1": [rome, oslo]})
    quiet = bfcl(tmp_path, "BFCL_v4_irrelevance.json", {"i0": None, "i1": None})
    any_call = bfcl(tmp_path, "BFCL_v4_live_relevance.json", {"r0": None, "r1": None})
    java = bfcl(tmp_path, "BFCL_v4_simple_java.json", {"j0": [rome]})
    answers = {
        "s0": call(city="rome", limits=[1, 2.5]),
        "s1": call(city="Rome", mood="x"),
        "s2": "I cannot.",
        "s3": call(city="ROMA", days=3),
        "p0": call(city="Oslo") + call(city="Rome"),
        "p1": call(city="Oslo"),
        "i0": "None of these.",
        "i1": call(city="Rome"),
        "r0": call(city="Paris", days=9),
        "r1": "Sorry.",
    }
    subject = scripted(answers)
    result = scored(subject, simple, parallel, quiet, any_call, java)
    numbers = result.numbers
    assert (numbers["BFCL_v3_simple"]["ast_simple"], numbers["BFCL_v3_simple"]["n"]) == (0.5, 4)
    assert numbers["BFCL_v3_simple"]["ast_simple_low"] == pytest.approx(0.15004, abs=1e-5)  # Wilson, 2 of 4
    assert numbers["BFCL_v3_simple"]["ast_simple_high"] == pytest.approx(0.84996, abs=1e-5)
    assert numbers["BFCL_v4_live_parallel"]["ast_live_parallel"] == 0.5
    assert (numbers["BFCL_v4_irrelevance"]["irrelevance"], numbers["BFCL_v4_live_relevance"]["live_relevance"]) == (
        0.5,
        0.5,
    )
    assert numbers["BFCL_v4_simple_java"]["skipped"] == "skipped: simple_java is not a single turn in Python"
    verdicts = {row["id"]: row["verdict"] for row in result.rows}
    assert verdicts == {
        "s0": "right",
        "s1": "unexpected_param",
        "s2": "wrong_count",
        "s3": "right",
        "p0": "right",
        "p1": "wrong_count",
        "i0": "right",
        "i1": "called",
        "r0": "right",
        "r1": "silent",
    }
    shown = subject.tokenizer.decode(subject.asked["s0"])
    assert '"type": "object"' in shown and '"type": "number"' in shown and '"dict"' not in shown


def test_the_truth_of_a_file_scores_one_whatever_its_types_are_called(scripted: Any, tmp_path: Path) -> None:
    schema = {
        "type": "dict",
        "required": ["a"],
        "properties": {
            "a": {"type": "float"},
            "b": {"type": "any"},
            "c": {"type": "tuple", "items": {"type": "integer"}},
            "d": {"type": "dict", "properties": {"x": {"type": "string"}, "y": {"type": "boolean"}}},
            "e": {"type": "array", "items": {"type": "dict", "properties": {"x": {"type": "string"}}}},
        },
    }
    truth = {
        "own.f": {
            "a": [8.0],
            "b": ["", "any"],
            "c": [[1, 2]],
            "d": [{"x": ["A", "B"], "y": ["", True]}],
            "e": [[{"x": ["q"]}]],
        }
    }
    given = {"a": 8, "b": "any", "c": [1, 2], "d": {"x": "b"}, "e": [{"x": "Q"}]}
    row = QUESTION | {"function": [{"name": "own.f", "description": "", "parameters": schema}]}
    write_set(tmp_path / "possible_answer/BFCL_v4_multiple.json", [{"id": "s", "ground_truth": [truth]}])
    path = write_set(tmp_path / "BFCL_v4_multiple.json", [row])
    for change, right in (({}, 1.0), ({"d": {"x": "c"}}, 0.0), ({"c": [2, 1]}, 0.0), ({"a": "8"}, 0.0)):
        text = f"<tool_call>\n{json.dumps({'name': 'own.f', 'arguments': given | change})}\n</tool_call>"
        assert scored(scripted({"s": text}), path).numbers["BFCL_v4_multiple"]["ast_multiple"] == right, change


@pytest.mark.parametrize("name", ["BFCL_v4_simple_python.json", "BFCL_v3_live_simple.json", "simple.jsonl"])
def test_the_category_stands_in_the_name_of_either_version(name: str) -> None:
    assert evaluation_bfcl.category(Path(name)) == ("live_simple" if "live" in name else "simple")


def test_multi_turn_files_are_known_and_skipped(scripted: Any, tmp_path: Path) -> None:
    row = {
        "id": "m0",
        "question": [[{"role": "user", "content": "a"}], []],
        "initial_config": {},
        "involved_classes": ["X"],
    }
    result = scored(scripted({}), write_set(tmp_path / "BFCL_v4_multi_turn_base.json", [row]))
    assert result.numbers["BFCL_v4_multi_turn_base"]["skipped"].startswith("skipped: multi_turn_base")


# invalid files

TRUTH = [{"id": "s", "ground_truth": [{"weather.now": {"city": ["Rome"]}}]}]
QUESTION = {"id": "s", "question": [[{"role": "user", "content": "Q"}]], "function": [WEATHER]}
WRONG: dict[str, tuple[str, list[Any] | str | bytes, str]] = {
    "no json": ("a.jsonl", '{"task_id": 1}\n{broken\n', r"a\.jsonl:2: invalid JSON"),
    "broken list": ("sanitized.json", '[\n{"a": 1},\n{"b"]', r"sanitized\.json:3: invalid JSON"),
    "no object": ("a.jsonl", "[1, 2]", r"a\.jsonl, row 1: expected an object, found int"),
    "empty": ("a.jsonl", "\n\n", "has no rows"),
    "not utf-8": ("a.jsonl", b"\xff\xfe{}", "expected UTF-8 text"),
    "cut gzip": ("a.jsonl.gz", gzip.compress(b"{}" * 99)[:20], "expected UTF-8 text, plain or gzip"),
    "other keys": (
        "a.jsonl",
        [{"text": "a story"}],
        r"a\.jsonl:1: expected a row of HumanEval .* MBPP .* BFCL .*found the keys text",
    ),
    "mixed": ("a.jsonl", [DOUBLE, MBPP[0]], r"a\.jsonl:2: expected a humaneval row like the first one"),
    "no prompt": ("a.jsonl", [DOUBLE | {"prompt": 3}], r"a\.jsonl:1: prompt: expected a string, found 3"),
    "no check": (
        "a.jsonl",
        [DOUBLE, SHIFT | {"test": "assert True"}],
        r"a\.jsonl:2: test: expected `def check\(candidate\)`",
    ),
    "test no Python": ("a.jsonl", [DOUBLE | {"test": "def check("}], r"a\.jsonl:1: expected Python"),
    "solution no Python": (
        "a.jsonl",
        [DOUBLE | {"canonical_solution": "oops("}],
        r"1: canonical_solution: expected Python",
    ),
    "other name": ("a.jsonl", [DOUBLE | {"entry_point": "triple"}], r"1: entry_point: expected the name of a function"),
    "twice": ("a.jsonl", [DOUBLE, DOUBLE], r"a\.jsonl:2: task_id: expected a unique id \(.*a\.jsonl:1 has the same"),
    "mbpp id": ("a.jsonl", [MBPP[1] | {"task_id": "x"}], "task_id: expected a whole number, found 'x'"),
    "mbpp no tests": ("a.jsonl", [MBPP[1] | {"test_list": []}], r"test_list: expected a list of asserts, found \[\]"),
    "mbpp no call": ("a.jsonl", [MBPP[1] | {"test_list": ["assert 1 == 1"]}], "test_list: expected asserts that call"),
    "bfcl no truth file": (
        "BFCL_v3_simple.json",
        [QUESTION],
        r"possible_answer/BFCL_v3_simple\.json, which does not exist",
    ),
    "bfcl turns": (
        "BFCL_v3_irrelevance.json",
        [QUESTION | {"question": [[], []]}],
        "question: expected a list of one turn",
    ),
    "bfcl role": (
        "BFCL_v3_irrelevance.json",
        [QUESTION | {"question": [[{"role": "tool", "content": "x"}]]}],
        "question: expected messages",
    ),
    "bfcl function": (
        "BFCL_v3_irrelevance.json",
        [QUESTION | {"function": [{"description": "x"}]}],
        "function: expected a list of functions",
    ),
    "bfcl twice": ("BFCL_v3_irrelevance.json", [QUESTION, QUESTION], r":2: id: expected a unique id"),
    "bfcl name": ("BFCL v3.json", [QUESTION], "expected a file name that contains the category"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_file_is_refused_with_place_field_and_what_was_expected(tmp_path: Path, fault: str) -> None:
    name, content, message = WRONG[fault]
    path = tmp_path / name
    if isinstance(content, list):
        write_set(path, content)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        benchmarks.load(path)


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        (TRUTH[0] | {"ground_truth": []}, "ground_truth: expected a list of"),
        (TRUTH[0] | {"ground_truth": [{"weather.now": {"city": "Rome"}}]}, "ground_truth: expected a list of"),
        (TRUTH[0] | {"id": "other"}, "id: expected an id from the file of the same name in possible_answer/"),
    ],
)
def test_a_wrong_truth_is_refused(tmp_path: Path, truth: dict[str, Any], message: str) -> None:
    write_set(tmp_path / "possible_answer/BFCL_v3_multiple.json", [truth])
    with pytest.raises(DataError, match=re.escape(message)):
        benchmarks.load(write_set(tmp_path / "BFCL_v3_multiple.json", [QUESTION]))


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"HumanEval\.jsonl\.gz: cannot be read \(No such file"):
        benchmarks.load(tmp_path / "HumanEval.jsonl.gz")


def test_rows_are_read_plain_gzipped_with_a_mark_and_from_one_object(tmp_path: Path) -> None:
    plain, packed = (
        write_set(tmp_path / "a.jsonl", [{"a": 1}, {"a": 2}]),
        write_set(tmp_path / "b.gz", [{"a": 1}, {"a": 2}]),
    )
    marked = tmp_path / "c.json"
    marked.write_bytes(b'\xef\xbb\xbf{\n "a": 1\n}')
    assert (
        [row.fields for row in evaluation_bfcl.read(plain)]
        == [row.fields for row in evaluation_bfcl.read(packed)]
        == [{"a": 1}, {"a": 2}]
    )
    assert [row.fields for row in evaluation_bfcl.read(marked)] == [{"a": 1}]


# around


def test_without_a_sandbox_programs_are_skipped_and_calls_are_scored(
    scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(servers, "JAIL", tmp_path / "missing.py")
    quiet = bfcl(tmp_path, "BFCL_v4_irrelevance.json", {"i0": None})
    result = scored(scripted({"i0": "No."}), write_set(tmp_path / "h.jsonl", [DOUBLE]), quiet)
    assert result.numbers["h"] == {"kind": "humaneval", "skipped": "skipped: no sandbox"}
    assert result.numbers["BFCL_v4_irrelevance"]["irrelevance"] == 1.0
    assert "Running generated code safely needs Linux with seccomp" in capsys.readouterr().err


def test_names_of_numbers_have_no_dots() -> None:
    assert [benchmarks.stem(Path(name)) for name in ("x/HumanEval.jsonl.gz", "mbpp.v2.json")] == [
        "HumanEval",
        "mbpp_v2",
    ]


@pytest.mark.slow
@pytest.mark.full
def test_the_command_scores_a_model_directory_on_a_file_from_anywhere(
    tiny_model: Transformer,
    byte_tokenizer: Tokenizer,
    tmp_path: Path,
    in_repository: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STAGECOACH_WORK", str(tmp_path / ".work"))
    monkeypatch.setenv("STAGECOACH_MLFLOW", "on")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    checkpoint.save(tmp_path / "code", tiny_model, byte_tokenizer, {"key": "k"})
    path = write_set(tmp_path / "h.jsonl", [HALF])
    assert benchmarks.main([str(tmp_path / "code"), str(path)]) == 0
    numbers = json.loads(capsys.readouterr().out)["h"]
    assert (numbers["form"], numbers["n"], numbers["pass_at_1_greedy"]) == ("completion", 1, 0.0)
    client, experiment = mlflow_store.connect()
    (run,) = client.search_runs([experiment], "tags.stage = 'benchmarks'")
    assert (run.data.tags["work.key"], run.data.metrics["final/h/n"], run.info.status) == ("k", 1.0, "FINISHED")
    assert benchmarks.main([str(tmp_path / "code"), str(tmp_path / "none.jsonl")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert benchmarks.main([]) == 2


@pytest.mark.parametrize("stop", ["\nclass A:", "\ndef g():", "\n# more", "\nif __name__", "\nprint(1)"])
def test_a_completion_ends_at_the_first_stop_sequence(stop: str) -> None:
    (exercise,) = benchmarks.humaneval([evaluation_bfcl.FileRow("a:1", HALF)])
    assert exercise.completed(f"    return x\n{stop}\ndef last():") == HALF["prompt"] + "    return x\n"
    assert exercise.completed("    if x:\n        return 1") == HALF["prompt"] + "    if x:\n        return 1"
