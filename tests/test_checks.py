"""A check in code becomes tests on literals with the same verdicts as running it, or is kept as unprotected."""

import ast

import pytest

from pipeline.evaluation import code
from pipeline.sandbox.judge import Candidate, Judge
from tests.judges import beside
from tests.judges import real_judge as real_judge


def protect(judge: Judge, body: str, context: str = "") -> code.Tests:
    source = "def check(candidate):\n" + "".join(f"    {line}\n" for line in body.splitlines())
    (tests,) = code.protect(judge, [code.function(source, "f", context, "file:1")])
    return tests


CHECKS = {  # body of a check -> solutions, whose verdicts must be those of running the check beside them
    "for x in range(2, 8):\n    assert candidate(x, x + 1) == str(x)": ["return str(x)", "return str(y)", "return '2'"],
    "table = [(1, 2), (3, 4)]\nfor x, y in table:\n    assert candidate(x, y) == sum(v for v in (x, y)), 'sum'": [
        "return x + y",
        "return 3",
        "return x * y + 1",
    ],
    "assert tuple(candidate(1, 2)) == tuple([1, 2])": ["return [x, y]", "return [y, x]", "return 1"],
    "assert candidate(1, 2) is None\nassert not candidate(3, y=4)": ["return None", "return 0", "return x == 3"],
    "import math\nassert math.isclose(candidate(1, 3), 1 / 3, rel_tol=1e-3)\nassert candidate(0, 1) == 0": [
        "return x / y",
        "return 0.3333 * x",
        "return 0.3 * x",
    ],
    "if 2 > 1:\n    assert candidate([1] * 3, {'a': 2 ** 3}) == [8, 1]": ["return [y['a'], x[0]]", "return [8]"],
    "assert 0 <= candidate(1, 1) < 5 and candidate(2, 2) in {4, 5}": [
        "return x + y",
        "return 9",
        "return 4 if x > 1 else -1",
    ],
    "limit = 10\nassert abs(candidate(1.5, limit) - 11.5) < 1e-6\n"
    "assert len(candidate(1, 2) * [0] if False else [1]) == 1": ["return x + y", "return x"],
}


@pytest.mark.parametrize("body", CHECKS)
def test_a_check_made_safe_says_what_running_it_beside_the_candidate_says(judge: Judge, body: str) -> None:
    tests = protect(judge, body)
    parsed = list(ast.walk(ast.parse(body)))
    assert len(tests.tests) + len(tests.unprotected) == sum(isinstance(node, ast.Assert) for node in parsed)
    outcomes = []
    for solution in CHECKS[body]:
        source = f"def f(x, y):\n    {solution}\n"
        (verdict,) = judge.judge([Candidate(source=source, entry_point="f", tests=tests.tests)])
        outcomes.append(beside(source, f"def check(candidate):\n{indented(body)}"))
        assert (verdict.verdict == "passed") == outcomes[-1], (solution, verdict)
    assert outcomes[0] and not all(outcomes)


def indented(body: str) -> str:
    return "".join(f"    {line}\n" for line in body.splitlines())


@pytest.mark.parametrize(
    ("body", "num_tests", "unprotected"),
    [
        ("assert candidate(1) == 1\nr = candidate(2)\nassert r == 3", 1, ["assert r == 3"]),
        ("for x in range(3):\n    assert candidate(x) == x\n    y = candidate(x)", 0, ["assert f(x) == x"]),
        ("try:\n    candidate(0)\nexcept ValueError:\n    pass\nelse:\n    assert False", 0, ["assert False"]),
        (
            "assert all(candidate(x) == x for x in [1])\nassert candidate(len('ab')) == 2",
            1,
            ["assert all((f(x) == x for x in [1]))"],
        ),
        ("assert candidate(object()) == 1\nx = 5\nassert candidate(x) == 5", 1, ["assert f(object()) == 1"]),
        ("values = [1]\nassert values == [1]\nassert candidate(1) == 1", 1, ["assert values == [1]"]),
        ("assert True, 'nothing'\nassert candidate(1) == 1", 1, []),
        ("if candidate(1):\n    assert candidate(2) == 2", 0, ["assert f(2) == 2"]),
        ("for x in range(0):\n    assert candidate(x) == x", 0, ["assert f(x) == x"]),
        ("assert candidate(float('inf')) == 1\nassert candidate(1) == 1", 1, ["assert f(float('inf')) == 1"]),
        ("import os\nos.fork()\nx = 1\nassert candidate(x) == 1", 0, ["assert f(x) == 1"]),
        ("print('{}')\nx = 1\nassert candidate(x) == 1", 1, []),
    ],
)
def test_an_assert_that_no_value_decides_is_unprotected_and_kept_by_its_text(
    judge: Judge, body: str, num_tests: int, unprotected: list[str]
) -> None:
    tests = protect(judge, body)
    assert (len(tests.tests), tests.unprotected) == (num_tests, unprotected)


def test_a_check_uses_the_helpers_of_the_reference_and_never_its_answer(judge: Judge) -> None:
    helped = protect(
        judge, "for x in (1, 2):\n    assert candidate(g(x)) == x", "def g(x): return x + 5\ndef f(x): return 0"
    )
    assert helped.tests == [{"assert": "assert (f((6)) == (1)) and (f((7)) == (2))", "visible": False}]
    asking = protect(
        judge, "for x in (1, 2):\n    assert candidate(g(x)) == x", "def g(x): return f(x)\ndef f(x): return 0"
    )
    assert (asking.tests, asking.unprotected) == ([], ["assert f(g(x)) == x"])
