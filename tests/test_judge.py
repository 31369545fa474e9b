"""Values and verdicts: what equals what, what a forged report is worth, which asserts can be judged. Few
processes are started.
"""

import ast
import gc
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.run.errors import DataError
from pipeline.sandbox import asserts, messages
from pipeline.sandbox.judge import Candidate, Judge, Limits, SandboxConfig, _answers, parse_test
from pipeline.sandbox.pool import Report
from pipeline.text import literals


def received(value: object):
    """A value as it arrives from a child."""
    return messages.decode(messages.parse(messages.encode(value)))


def same(expected: object, actual: object, mode: str = "strict") -> bool:
    return messages.equal(received(expected), received(actual), mode)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
KEYS = st.integers() | st.text() | st.booleans() | st.tuples(st.integers(), st.text())
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner) | st.sets(KEYS),
    max_leaves=12,
)


def types_and_value(value):
    """A slow, obvious form that spells out types at every level, so that strict equality is Python's."""
    name = type(value).__name__
    if isinstance(value, dict):
        return name, {types_and_value(k): types_and_value(v) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        return name, frozenset(map(types_and_value, value))
    if isinstance(value, list | tuple):
        return name, tuple(map(types_and_value, value))
    if isinstance(value, float):
        return name, value.hex()
    return (name, value.real.hex(), value.imag.hex()) if isinstance(value, complex) else (name, value)


@contextmanager
def cpu_within(seconds: float) -> Iterator[None]:
    """Fail if the block takes more CPU time. Objects left by other tests are frozen, so that the collector does not
    walk them.
    """
    gc.collect()
    gc.freeze()
    start = time.process_time()
    try:
        yield
        took = time.process_time() - start
    finally:
        gc.unfreeze()
    assert took < seconds


@settings(max_examples=40, deadline=None, derandomize=True)
@given(PLAIN, PLAIN)
def test_strict_equality_is_equality_of_types_and_values_at_every_level(a: object, b: object):
    assert same(a, a)
    assert same(a, b) == (types_and_value(a) == types_and_value(b))


def without_nan(value) -> bool:
    return "nan" not in messages.encode(value)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(PLAIN.filter(without_nan), PLAIN.filter(without_nan))
def test_python_equality_is_the_double_equals_of_plain_data(a: object, b: object):
    assert same(a, a, "python")
    assert same(a, b, "python") == (a == b)


@pytest.mark.parametrize(
    ("a", "b", "strict", "python", "close"),
    [
        (1, 1.0, False, True, False),
        (1.0, 1, False, True, True),
        (1, True, False, True, False),
        (1.0, True, False, True, False),
        (0.0, -0.0, False, True, True),
        (math.nan, math.nan, True, False, True),
        ([1, 2], (1, 2), False, False, False),
        ({1, 2}, frozenset({2, 1}), False, True, False),
        ({1: "a", 2: "b"}, {2: "b", 1: "a"}, True, True, True),
        (0.1 + 0.2, 0.3, False, False, True),
        ([0.0], [1e-10], False, False, True),
        ([1.0], [1.0 + 2e-6], False, False, False),
        ({1.0, 2.0}, {2.0 + 1e-9, 1.0}, False, False, True),
        ({"a": 1.0}, {"a": 1.0 + 1e-9}, False, False, True),
        ({"a": 1.0}, {"b": 1.0}, False, False, False),
        (10**23, 1e23, False, False, False),
        (2.0**60, 2**60, False, True, True),
        (1.0, 10**400, False, False, False),
        (complex(2, 0), 2, False, True, True),
        ("\ud800\0", "\ud800\0", True, True, True),
        (b"a", "a", False, False, False),
        (math.inf, math.inf, True, True, True),
        (math.inf, -math.inf, False, False, False),
    ],
)
def test_the_three_comparisons_by_hand(a: object, b: object, strict: bool, python: bool, close: bool):
    assert (same(a, b), same(a, b, "python"), same(a, b, "close")) == (strict, python, close)


class AlwaysEqual:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # pyright: ignore


class Number(int):
    pass


CYCLE: list = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize("value", [AlwaysEqual(), Number(3), [Number(3)], {"a": AlwaysEqual()}, CYCLE, range(3), len])
def test_what_is_not_plain_data_is_opaque_and_equals_nothing(value: object):
    arrived = received(value)
    assert messages.has_opaque(arrived)
    assert not any(messages.equal(arrived, arrived, mode) for mode in messages.MODES)


def test_a_text_full_of_commas_arrives():
    value = "a," * 300_000
    assert received([value]) == [value]


@pytest.mark.parametrize("size", ["depth", "digits", "nodes", "bytes"])
def test_a_value_beyond_the_limits_is_opaque_at_once(size: str):
    value: object = {"depth": [], "digits": 1 << 3_321_928, "nodes": list(range(100_001)), "bytes": "\0" * (1 << 19)}[
        size
    ]
    if size == "depth":
        for _ in range(10**5):
            value = [value]
    with cpu_within(0.5):  # 0.1 s on a quiet machine
        assert isinstance(received(value), messages.Opaque)


@pytest.mark.parametrize("unit", ["[],", '{"t":[]},', "1,", '{"i":"0x0"},', '{"f":"0x0.0p+0"},', "[[[[[[[[]]]]]]]],"])
def test_a_forged_frame_of_four_mebibytes_costs_the_judge_next_to_nothing(unit: str):
    text = (unit * ((4 << 20) // len(unit) - 20))[:-1]
    with cpu_within(0.1):
        assert verdicts(report(f'{{"n":"ab","i":0,"v":[{text}]}}', given_tests=1), count=1) == [("unsafe", "forged")]


@pytest.mark.parametrize("unit", ["[],", '{"t":[]},', "1,"])
def test_a_frame_that_is_as_long_as_a_value_may_be_costs_the_judge_little(unit: str):
    text = (unit * ((1 << 20) // len(unit) - 20))[:-1]
    with cpu_within(0.5):  # 0.1 s on a quiet machine
        assert verdicts(report(f'{{"n":"ab","i":0,"v":[{text}]}}', given_tests=1), count=1) == [("unsafe", "forged")]


COLLIDING = "{" + ", ".join(str(number * ((1 << 61) - 1)) for number in range(1, 20_000)) + "}"


@pytest.mark.parametrize(
    "test",
    [
        {"args": f"[{COLLIDING}]", "expected": "1"},
        {"args": "[1]", "expected": COLLIDING},
        {"assert": f"assert f({COLLIDING}) == 1"},
        {"assert": f"assert f(1) == {COLLIDING}"},
        {"args": f"[{{{COLLIDING[1:-1].replace(',', ': 1,')}: 1}}]", "expected": "1"},
    ],
    ids=["args", "expected", "argument of an assert", "in an assert", "keys"],
)
def test_a_test_full_of_colliding_hashes_is_read_in_no_time(test: dict):
    with cpu_within(0.7):  # 0.1 to 0.2 s on a quiet machine; building the set takes 1.7
        assert parse_test(test, "f") is not None


def test_colliding_hashes_in_the_arguments_count_as_time_and_cost_no_server():
    tests = [{"args": f"[{COLLIDING[:-1]}, {COLLIDING[1:]}]", "expected": "1"}]
    right = Candidate(source="def f(x): return 1", entry_point="f", tests=[{"args": "[1]", "expected": "1"}])
    with Judge(SandboxConfig(limits=Limits(job_cpu_seconds=0.5)), 1) as judge:
        found = list(judge.judge([Candidate(source="def f(x): return 1", entry_point="f", tests=tests), right]))
        restarts = judge.pool.host.num_restarts
    assert [(v.verdict, v.reason) for v in found] == [("timeout", ""), ("passed", "")] and restarts == 0


@pytest.mark.parametrize(
    "text",
    [
        *[
            "{1, 1.0, True, 2}",
            "{0, -0.0, 0j}",
            "{1: 'a', True: 'b', 2: 'c', 1.0: 'd'}",
            "set()",
            "[{(1, 2), (1, 2.0)}, {}]",
        ],
        *[
            "-1",
            "+1.5",
            "1 + 2j",
            "-1 - 2j",
            "-2j",
            "'a' 'b'",
            "b'a'",
            " [None, True, ...]",
            "{'a', b'a'}",
            "()",
            "1e999",
        ],
    ],
)
def test_a_literal_is_what_python_reads(text: str):
    found, expected = literals.read(text, messages.bag, messages.mapping), ast.literal_eval(text.strip())
    if "..." in text:
        assert found == expected
    else:
        assert messages.equal(found, received(expected), "strict"), found


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "f()",
        "{[1]}",
        "{{1}: 2}",
        "{**{1: 2}}",
        "[*[1]]",
        "1 + 1",
        "1j + 1",
        "--1",
        "-True",
        "-'a'",
        "set(1)",
        "{(1, [2])}",
        "1 if 1 else 2",
        "f'a'",
        "{...: 1, ...: 2}",
    ],
)
def test_what_is_no_literal_is_refused_as_python_refuses_it(text: str):
    with pytest.raises(ValueError):
        messages.check(literals.read(text, messages.bag, messages.mapping))
    if "..." not in text:
        with pytest.raises((ValueError, TypeError)):
            ast.literal_eval(text)


def test_colliding_keys_cost_nothing_to_compare():
    keys = [number * ((1 << 61) - 1) for number in range(1, 20_001)]  # every one has hash 0
    text = json.dumps({"d": [[{"i": hex(key)}, 1] for key in keys]}, separators=(",", ":"))
    with cpu_within(1):  # 0.2 s on a quiet machine, for two values; hashing them would take 4 s
        assert messages.equal(messages.decode(messages.parse(text)), messages.decode(messages.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        *["1.5", "NaN", "Infinity", "9007199254740992", '{"i":"12"}', '{"f":"1.0"}', '{"x":[]}', '{"t":1}', '{"i":1}'],
        *['{"t":[],"s":[]}', "{}", '{"d":[[1]]}', '{"b":"*"}', '{"c":["0x0p+0"]}', "[" * 5000, "9" * 5000, '"é"', ""],
        "[" * 40 + "]" * 40,
    ],
)
def test_text_that_encode_does_not_write_is_malformed(text: str):
    with pytest.raises(messages.Malformed):
        messages.decode(messages.parse(text))


def report(*frames: str, given_tests: int = 2, **changes) -> Report:
    fields = {"first": 0, "given": given_tests, "is_program": False, "nonce": "ab", "status": None, "signal": None}
    fields |= {"cut": None, "stdout": "", "stderr": "", "cpu_ms": 1, "max_rss_kb": 1}
    return Report(frames=list(frames), **fields | changes)


def verdicts(*reports: Report, count: int = 2) -> list[tuple[str, str]]:
    return [(answer.verdict, answer.reason) for answer in _answers(list(reports), count)]


GOOD = ('{"n":"ab","i":0,"v":1}', '{"n":"ab","i":1,"v":2}')


@pytest.mark.parametrize(
    "frame",
    [
        *['{"n":"ab","i":0,"v":1}', '{"n":"ab","i":2,"v":1}', '{"n":"cd","i":1,"v":1}', '{"n":"ab","i":true,"v":1}'],
        *['{"n":"ab","i":1}', '{"i":1,"n":"ab","v":1}', '{"n":"ab","i":1,"v":1,"w":1}', '{"n":"ab","i":1,"v":{"q":1}}'],
        *['{"n":"ab","n":"ab","i":1,"v":1}', '{"n":"ab","i":1,"e":["A"]}', '{"n":"ab","load":"run","e":["A",""]}', "x"],
        '{"n":"ab","end":true}',
    ],
)
def test_a_frame_out_of_turn_or_shape_is_forged(frame: str):
    assert ("unsafe", "forged") in verdicts(report(GOOD[0], frame))


def test_the_way_a_child_ends_decides_about_the_tests_it_left():
    right, timeout = ("", ""), ("timeout", "")
    assert verdicts(report(*GOOD)) == [right, right]
    assert verdicts(report(GOOD[0], status=0)) == [right, ("error", "exit")]
    assert verdicts(report(*GOOD, status=0)) == [right, ("error", "exit")]  # the end was never reported
    assert verdicts(report(signal=11)) == [("error", "crash")] * 2
    assert verdicts(report(signal=9)) == [("memory", "")] * 2
    assert verdicts(report(GOOD[0], cut="output")) == [right, ("error", "output")]
    assert verdicts(report(*GOOD, cut="forged"))[1] == ("unsafe", "forged")
    assert verdicts(report(cut="cpu")) == [timeout, timeout]
    second = report(GOOD[0], given_tests=1, first=1)
    assert verdicts(report(cut="wall"), second) == [timeout, right]
    assert verdicts(report('{"n":"ab","load":"compile","e":["SyntaxError",""]}', status=0)) == [("syntax", "")] * 2
    assert verdicts(report('{"n":"ab","i":0,"e":["MemoryError",""]}', GOOD[1])) == [("memory", ""), right]


@pytest.mark.parametrize(
    ("text", "answers", "holds"),
    [
        ("assert f(1, k=[2]) == 3", [3], True),
        ("assert f(1) == 3", [3.0], True),
        ("assert f(1) == 3, 'message'", [4], False),
        ("assert 3 == f(1)", [3], True),
        ("assert f(1)", [[]], False),
        ("assert not f(1)", [set()], True),
        ("assert f(1) is None", [None], True),
        ("assert f(1) is True", [1], False),
        ("assert f(1) != 3", [AlwaysEqual()], False),
        ("assert f(1) == f(2)", [[1, {2}], [1, {2}]], True),
        ("assert abs(f(1) - 0.5) < 1e-6", [0.5000001], True),
        ("assert math.isclose(f(1), 0.5, abs_tol=0.01)", [0.509], True),
        ("assert isclose(f(1), 0.5)", [0.6], False),
        ("assert set(f([1, 2])) == {1, 2}", [[2, 1, 1]], True),
        ("assert sorted(f(1)) == ['a', 'b']", [{"b": 1, "a": 2}], True),
        ("assert sorted(f(1)) == [1]", [[1, "a"]], False),
        ("assert len(f(1)) == 2 and f(2)[0] == 'x'", [{1, 2}, ["x"]], True),
        ("assert f(1)['a'] == 1", [{"a": 1}], True),
        ("assert f(1)[9] == 1", [[1]], False),
        ("assert f(1) in (1, 2)", [2], True),
        ("assert 'a' in f(1)", ["cat"], True),
        ("assert 1 < f(1) <= 2", [2], True),
        ("assert round(f(1), 2) == 0.33", [1 / 3], True),
        ("assert [f(1), f(2)] == [1, 2]", [1, 2], True),
        ("assert (f(1), -f(2)) == (1, -2)", [1, 2], True),
        ("assert f(1) == 1 + 2j", [1 + 2j], True),
        ("assert f(1) + 1 == 'aa'", ["a"], False),
    ],
)
def test_an_assert_holds_as_in_python_on_plain_data(text: str, answers: list, holds: bool):
    assertion = asserts.parse(text, "f")
    assert assertion is not None
    assert assertion.holds([received(answer) for answer in answers]) is holds
    if all(answer is None or type(answer).__module__ == "builtins" for answer in answers):
        assert holds is python_says(text, answers)


def python_says(text: str, answers: list) -> bool:
    """The oracle: Python itself, on answers that we wrote."""
    replies = iter(answers)
    namespace = {"f": lambda *a, **k: next(replies), "math": math, "isclose": math.isclose}
    try:
        compile_and_run = __builtins__["exec"] if isinstance(__builtins__, dict) else __builtins__.exec
        compile_and_run(text, namespace)
    except (AssertionError, TypeError, IndexError):
        return False
    return True


@pytest.mark.parametrize(
    "text",
    [
        *[
            "assert f(g(1)) == 2",
            "assert f(x) == 2",
            "assert f(f(1)) == 2",
            "assert g(1) == 2",
            "x = f(1)",
            "assert f(",
        ],
        *[
            "assert f(1).name == 2",
            "assert 1 == 1",
            "assert open(f(1))",
            "assert [x for x in f(1)]",
            "assert f(*[1]) == 1",
        ],
        *["assert f(1) ** 9 == 1", "assert f(1) == 1\nassert f(2) == 2", "assert (lambda: f(1))()", "assert f(1) << 9"],
    ],
)
def test_an_assert_that_needs_more_than_values_is_unprotected(text: str):
    assert asserts.parse(text, "f") is None
    assert parse_test({"assert": text, "visible": True}, "f") is None


@pytest.mark.parametrize(
    "test",
    [
        *[{"args": "[1", "expected": "1"}, {"args": "(1,)", "expected": "1"}, {"args": "[g()]", "expected": "1"}, {}],
        *[{"args": "[1]"}, {"args": [1], "expected": "1"}, {"args": "[1]", "expected": "[" + "0," * 100_001 + "]"}],
    ],
)
def test_a_test_that_is_none_raises_a_data_error(test: dict):
    with pytest.raises(DataError, match="f: "):
        parse_test(test, "f")


@pytest.fixture(scope="module")
def judge():
    with Judge(SandboxConfig(limits=Limits(cpu_seconds=1.0)), 2) as judge:
        yield judge


TESTS = [
    {"args": "[1, 2]", "expected": "3", "visible": True},
    {"args": "[5, -5]", "expected": "0", "visible": False},
    {"assert": "assert f('a', b='b') == 'ab'", "visible": False},
    {"assert": "assert isinstance(f(1, 2), int)", "visible": True},
]


@pytest.mark.parametrize(
    ("source", "verdict", "reason", "passed"),
    [
        ("def f(a, b): return a + b", "passed", "", 3),
        ("def f(a, b): return 3", "wrong", "value", 1),
        ("def f(a, b): return iter([a + b])", "wrong", "opaque", 0),
        ("def f(a, b): return a + b if a != 5 else 1 / 0", "error", "exception", 2),
        ("def g(a, b): return a + b", "error", "exception", 0),
        ("def f(a, b): return a + b\nraise SystemExit", "error", "exit", 0),
        ("import os\ndef f(a, b):\n    if a == 5: os.write(3, b'x' * 99)\n    return a + b", "unsafe", "forged", 0),
        ("def f(a, b: return", "syntax", "", 0),
        ("x = '\ud800'; y = \0", "syntax", "", 0),
        ("(" * 5000, "syntax", "", 0),
        (" \n", "no_code", "", 0),
        (None, "no_code", "", 0),
        ("#" * (65 << 10), "error", "output", 0),
    ],
)
def test_a_program_gets_its_verdict_reason_and_score(judge, source, verdict, reason, passed):
    (found,) = judge.judge([Candidate(source=source, entry_point="f", tests=TESTS)])
    assert (found.verdict, found.reason, found.passed, found.total) == (verdict, reason, passed, 3)
    assert found.score == passed / 3 and found.unprotected == 1 and found.profile == "sealed"
    assert [result.visible for result in found.results] == [True, False, False]


def test_messages_for_people_hold_no_control_characters(judge):
    source = "def f(a, b): raise ValueError('\\x1b[2J\\n' + 'é\\ud800')"
    (found,) = judge.judge([Candidate(source=source, entry_point="f", tests=TESTS)])
    assert found.results[0].message == "ValueError: \\x1b[2J\\né\\ud800"


def test_verdicts_come_in_order_from_an_endless_stream(judge):
    def programs():
        number = 0
        while True:
            number += 1
            yield Candidate(
                source=f"def f(): return {number}", entry_point="f", tests=[{"args": "[]", "expected": "7"}]
            )

    stream = judge.judge(programs())
    assert [next(stream).verdict for _ in range(9)] == ["wrong"] * 6 + ["passed"] + ["wrong"] * 2
    stream.close()


def test_a_program_whose_tests_cannot_be_judged_is_unscorable(judge):
    tests = [{"assert": "assert f(x) == 1", "visible": True}]
    (found,) = judge.judge([Candidate(source="def f(x): return 1", entry_point="f", tests=tests)])
    assert (found.verdict, found.reason, found.score, found.unprotected) == ("unscorable", "unprotected", None, 1)


def test_arguments_are_fresh_for_each_test_and_output_is_ignored(judge):
    source = "def f(a):\n print('noise')\n a.append(1)\n return a"
    tests = [{"args": "[[]]", "expected": "[1]"}] * 3
    (found,) = judge.judge([Candidate(source=source, entry_point="f", tests=tests)])
    assert found.verdict == "passed"


def test_a_float_is_met_within_a_tolerance_where_the_problem_says_so(judge):
    tests = [{"args": "[]", "expected": "0.3"}]
    source = "def f(): return 0.1 + 0.2"
    found = judge.judge(Candidate(source=source, entry_point="f", tests=tests, compare=c) for c in ("strict", "close"))
    assert [verdict.verdict for verdict in found] == ["wrong", "passed"]
